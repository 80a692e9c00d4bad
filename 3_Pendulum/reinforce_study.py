"""What a baseline is good for: REINFORCE with each baseline, and the variance of each gradient estimate.

python 3_Pendulum/reinforce_study.py                # 8 rows of ten seeds each, then the variances
python 3_Pendulum/reinforce_study.py NUM_SEEDS=3    # constants of reinforce.py hold where a row does not
                                                    # change them
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

import reinforce
import runs
import settings
from environments import evaluate
from pictures import BLUE, GREY, ORANGE, draw_band

COLORS = {"no_baseline": ORANGE, "batch_mean": GREY, "critic_baseline": BLUE}
COMPARISON = [  # what to change on the command line
    # the two diseases: three baselines, two kinds of credit
    ["REWARD_TO_GO=True", "BASELINE=critic_baseline"],
    ["REWARD_TO_GO=True", "BASELINE=batch_mean"],
    ["REWARD_TO_GO=True", "BASELINE=no_baseline"],
    ["REWARD_TO_GO=False", "BASELINE=critic_baseline"],
    ["REWARD_TO_GO=False", "BASELINE=batch_mean"],
    ["REWARD_TO_GO=False", "BASELINE=no_baseline"],
    # can no baseline be saved by smaller steps, or by more episodes in each?
    ["BASELINE=no_baseline", "ACTOR_LEARNING_RATE=3e-3"],
    ["BASELINE=no_baseline", "NUM_ENVS=32", "EVAL_INTERVAL=20_000"],
]
VARIANCE_BATCHES = 256  # batches played with each frozen policy
NUM_POLICIES = 8  # frozen along one training, nearer to each other early, where learning is fast
ESTIMATORS = [  # (return to go, baseline). No critic for whole returns: this one has learned returns to go
    (False, "no_baseline"),
    (False, "batch_mean"),
    (True, "no_baseline"),
    (True, "batch_mean"),
    (True, "critic_baseline"),
]


# %% Training -------------------------------------------------------------------------------------------
def compare(arguments: list[str]) -> tuple[list[dict[str, Any]], dict[str, reinforce.Log]]:
    """Trains every row of COMPARISON.

    Args:
        arguments: of the command line; they hold for every row that does not change them.

    Returns:
        The lines of compare.csv, one per row and seed; the log [NUM_SEEDS, rows] by label.
    """
    lines, logs = [], {}
    for changes in COMPARISON:
        label = " ".join(changes)
        c = reinforce.configure([*arguments, *changes])
        print(f"\n{label}")
        agents, log, _ = runs.whole(reinforce.train(c), c.NUM_STEPS // c.EVAL_INTERVAL)
        logs[label] = log
        eval_return = evaluate(reinforce.ENV, reinforce.policy, agents.actor, c.EVAL_EPISODES).mean(axis=1)
        lines += [
            {
                "changed": label,
                "seed": c.SEED + i,
                "eval_return": eval_return[i],
                "env_steps": log.env_step[i, -1],
                "num_updates": log.num_updates[i, -1],
            }
            for i in range(c.NUM_SEEDS)
        ]
        print(runs.summary(eval_return, reinforce.SOLVED))
    return lines, logs


# %% Variance of the gradient ---------------------------------------------------------------------------
def frozen_networks(c: reinforce.Constants) -> tuple[list[tuple[reinforce.MLP, reinforce.MLP]], list[int]]:
    """Actor and critic of the first seed's training as they were at each row of the log; the steps so far."""
    rng = jax.random.key(c.SEED)
    *_, learning_rng = jax.random.split(rng, 4)

    @jax.jit
    def learn(agent: reinforce.Agent, until: jax.Array) -> reinforce.Agent:
        def update(agent):
            return reinforce.update(c, agent, jax.random.fold_in(learning_rng, agent.num_updates))[0]

        return jax.lax.while_loop(lambda agent: agent.env_step < until, update, agent)

    agent, frozen, steps = reinforce.make_agent(c, rng), [], []
    for until in range(c.EVAL_INTERVAL, c.NUM_STEPS + 1, c.EVAL_INTERVAL):
        agent = learn(agent, until)
        frozen.append((agent.actor, agent.critic))
        steps.append(int(agent.env_step))
    return frozen, steps


def gradient_estimates(
    c: reinforce.Constants, actor: reinforce.MLP, critic: reinforce.MLP, rngs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What every estimator makes of the same episodes.

    Args:
        c: the constants.
        actor, critic: frozen.
        rngs: keys [M], one for each batch of NUM_ENVS episodes.

    Returns:
        Estimates of grad J, float32 [M, len(ESTIMATORS), weights of the actor]; mean returns [M].
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

        return jnp.stack([estimate(*which) for which in ESTIMATORS]), rollout.reward.sum(axis=1).mean()

    return jax.lax.map(one_batch, rngs)


def spread_of(estimates: np.ndarray) -> dict[str, float]:
    """How far independent estimates [M, P] stray, and how long the vector is that they stray from.

    Returns:
        trace: of the covariance matrix, the mean squared distance of one estimate from the mean.
        squared_norm: of the expected gradient. The mean of M estimates is longer by trace / M: subtracted.
        *_error: standard errors. ratio: trace / squared_norm, nan where the noise hides the mean (2 errors).
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
    """The variance of every estimator at policies from early to late in the first seed's training.

    Returns:
        Lines of gradient_variance.csv.
    """
    frozen, steps = frozen_networks(c)
    rows = np.unique(np.geomspace(1, len(steps), NUM_POLICIES).astype(int)) - 1
    estimate_all = jax.jit(functools.partial(gradient_estimates, c))
    lines = []
    for row in tqdm(rows, unit="policy", leave=False, disable=None):
        rngs = jax.random.split(jax.random.fold_in(jax.random.key(c.SEED), row), VARIANCE_BATCHES)
        estimates, returns = estimate_all(*frozen[row], rngs)
        lines += [
            {
                "env_step": steps[row],
                "episode_return": np.asarray(returns).mean().item(),
                "reward_to_go": reward_to_go,
                "baseline": baseline,
                **spread_of(np.asarray(estimates[:, i])),
            }
            for i, (reward_to_go, baseline) in enumerate(ESTIMATORS)
        ]
    return lines


# %% Pictures -------------------------------------------------------------------------------------------
def draw_comparison(path: Path, logs: dict[str, reinforce.Log]) -> None:
    """Greedy return against steps: a panel for each kind of credit, a band for each baseline."""
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained", sharey=True)
    for axes, to_go, title in zip(both, (True, False), ("return to go", "the whole episode's return")):
        for baseline, color in COLORS.items():
            log = logs.get(f"REWARD_TO_GO={to_go} BASELINE={baseline}")
            if log is None:  # a shorter COMPARISON
                continue
            draw_band(axes, log.env_step.mean(axis=0), log.eval_return, color, baseline)
        axes.set(xlabel="environment step", title=f"each action credited with {title}", ylim=(0, 515))
    both[0].set_ylabel("return of the greedy policy")
    both[1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def noise(line: dict[str, Any], lines: list[dict[str, Any]]) -> float:
    """An estimator's variance over the squared length of its mean, which is what it is to find.

    Returns to go and whole returns estimate two vectors of different lengths. Without a baseline the noise
    hides the mean, so the length is taken from the last estimator of the same kind of credit at the same
    policy, which has a baseline; nan where `spread_of` finds it hidden there as well.
    """
    if line["baseline"] != "no_baseline":
        return line["ratio"]
    kind = ("env_step", "reward_to_go")
    other = [x for x in lines if all(x[name] == line[name] for name in kind)][-1]
    return line["trace"] / other["trace"] * other["ratio"]


def draw_variance(path: Path, lines: list[dict[str, Any]]) -> None:
    """Left: noise of the five estimates at one policy. Right: variance of two of them, along the training."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), facecolor="white", layout="constrained")
    steps = list(dict.fromkeys(line["env_step"] for line in lines))
    step = steps[min(2, len(steps) - 1)]  # it has learned a good part, and still falls
    bars = [line for line in lines if line["env_step"] == step]
    labels = [
        f"{line['baseline'].replace('_', ' ')},\n{'return to go' if line['reward_to_go'] else 'whole return'}"
        for line in bars
    ]
    noises = [noise(line, lines) for line in bars]
    left.barh(labels, noises, color=[COLORS[line["baseline"]] for line in bars])
    for y, value in enumerate(noises):
        if np.isfinite(value):
            digits = 1 - int(np.floor(np.log10(value)))  # two that count
            text = f"{round(value, digits):,.{max(0, digits)}f}"
            left.text(value * 1.15, y, text, va="center", fontsize=9)
    left.set(
        xscale="log",
        xlim=(1, 1e5),
        title=f"policy at step {step:,}, return {bars[0]['episode_return']:.0f}",
    )
    left.set_xlabel("noise: variance of the gradient estimate / (length of its mean)²")
    left.invert_yaxis()
    for baseline in ("no_baseline", "critic_baseline"):
        mine = [line for line in lines if (line["reward_to_go"], line["baseline"]) == (True, baseline)]
        label = f"{baseline.replace('_', ' ')}, return to go"
        right.plot(steps, [line["trace"] for line in mine], color=COLORS[baseline], marker="o", label=label)
    right.set(xlabel="policy frozen at environment step", yscale="log", title="variance along one training")
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> Path:
    """The whole study; writes compare.csv, gradient_variance.csv and their pictures.

    Args:
        arguments: `NAME=value` each, constants of reinforce.py.

    Returns:
        The run's folder.

    Raises:
        settings.UserError: see `settings.read` and `runs.open_run`.
    """
    for changes in COMPARISON:  # a row that clashes with the command line is refused before all training
        reinforce.configure([*arguments, *changes])
    runs.start_jax()
    run_dir = runs.open_run("reinforce_study", reinforce.configure(arguments))
    lines, logs = compare(arguments)
    runs.write_csv(run_dir / "compare.csv", lines)
    draw_comparison(run_dir / "compare.png", logs)

    print(f"\nvariance of the gradient: {VARIANCE_BATCHES} batches per frozen policy")
    lines = measure_variance(reinforce.configure([*arguments, *COMPARISON[0]]))
    runs.write_csv(run_dir / "gradient_variance.csv", lines)
    draw_variance(run_dir / "gradient_variance.png", lines)
    print(f"everything of this study is in {run_dir}")
    return run_dir


if __name__ == "__main__":
    settings.run(main)
