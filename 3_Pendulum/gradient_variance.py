"""The variance of each gradient estimate of REINFORCE, from the same episodes, along one training.

    python 3_Pendulum/gradient_variance.py    # writes gradient_variance.csv: half a minute

Constants are those of reinforce.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

import reinforce
import runs
import settings

VARIANCE_BATCHES = 256  # batches played with each frozen policy
NUM_POLICIES = 8  # frozen along one training, nearer to each other early, where learning is fast
# (return to go, baseline). No critic for whole returns: this one has learned returns to go
ESTIMATORS = [
    (False, "no_baseline"),
    (False, "batch_mean"),
    (True, "no_baseline"),
    (True, "batch_mean"),
    (True, "critic_baseline"),
]


# %% Variance of the gradient ----------------------------------------------------------------------
def gradient_estimates(
    c: reinforce.Constants, actor: reinforce.MLP, critic: reinforce.MLP, rngs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What every estimator makes of the same episodes, with frozen networks and keys [M] of M
    batches.

    Returns estimates of grad J, float32 [M, len(ESTIMATORS), weights of the actor]; mean returns
    [M].
    """

    def one_batch(rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        # nnx differentiates only what belongs to the same trace: a copy, made inside the loop
        frozen = nnx.clone(actor)
        rollout = reinforce.collect(c, frozen, rng)

        def estimate(reward_to_go: bool, baseline: str) -> jax.Array:
            credit = reinforce.discounted_returns if reward_to_go else reinforce.whole_return
            returns = rollout.alive * credit(rollout.reward, c.GAMMA)
            advantage = returns - reinforce.BASELINES[baseline](rollout, returns, critic)
            batch = reinforce.Batch(rollout.obs, rollout.action, rollout.alive, advantage, returns)
            return -ravel_pytree(nnx.grad(reinforce.actor_loss)(frozen, batch))[0]

        return jnp.stack([estimate(*which) for which in ESTIMATORS]), rollout.reward.sum(
            axis=1
        ).mean()

    return jax.lax.map(one_batch, rngs)


def spread_of(estimates: np.ndarray) -> dict[str, float]:
    """How far independent estimates [M, P] stray, and how long the vector is that they stray from.

    trace: of the covariance matrix, the mean squared distance of one estimate from the mean.
    squared_norm: of the expected gradient. The mean of M estimates is longer by trace / M:
    subtracted. *_error: standard errors. ratio: trace / squared_norm, nan where the noise hides the
    mean (2 errors).
    """
    estimates = estimates.astype(np.float64)
    m, average = len(estimates), estimates.mean(axis=0)
    squares = ((estimates - average) ** 2).sum(axis=1) * m / (m - 1)  # [M]
    trace = squares.mean()
    squared_norm = (average**2).sum() - trace / m
    squared_norm_error = 2 * (estimates @ average).std(ddof=1) / np.sqrt(m)
    return {
        "trace": trace,
        "trace_error": squares.std(ddof=1) / np.sqrt(m),
        "squared_norm": squared_norm,
        "squared_norm_error": squared_norm_error,
        "ratio": trace / squared_norm if squared_norm > 2 * squared_norm_error else np.nan,
    }


def measure_variance(c: reinforce.Constants) -> list[dict[str, Any]]:
    """The lines of gradient_variance.csv: early to late policies of the first seed's training."""
    train_row = jax.jit(functools.partial(reinforce.train_row, c))
    # the agents as they were at each row of the log
    agent, frozen = reinforce.make_agent(c, c.SEED), []
    for env_step in range(0, c.NUM_STEPS, c.EVAL_INTERVAL):
        agent, _ = train_row(agent, env_step + c.EVAL_INTERVAL)
        frozen.append(agent)
    rows = np.unique(np.geomspace(1, len(frozen), NUM_POLICIES).astype(int)) - 1
    estimate_all = jax.jit(functools.partial(gradient_estimates, c))
    lines = []
    for row in tqdm(rows, unit="policy", leave=False, disable=None):
        rngs = jax.random.split(frozen[row].rng, VARIANCE_BATCHES)
        estimates, returns = estimate_all(frozen[row].actor, frozen[row].critic, rngs)
        policy = {
            "env_step": int(frozen[row].env_step),
            "episode_return": np.asarray(returns).mean().item(),
        }
        for i, (reward_to_go, baseline) in enumerate(ESTIMATORS):
            estimator = {"reward_to_go": reward_to_go, "baseline": baseline}
            lines.append(policy | estimator | spread_of(np.asarray(estimates[:, i])))
    return lines


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """Writes gradient_variance.csv into the run's folder; raises settings.UserError."""
    c = settings.read(reinforce.Constants, arguments)
    runs.start_jax()
    run_dir = runs.open_run("gradient_variance", c)
    runs.write_csv(run_dir / "gradient_variance.csv", measure_variance(c))
    print(f"everything of this study is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
