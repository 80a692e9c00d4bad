"""What goes wrong, and how it looks: pendulum.py and reinforce.py trained with one function replaced.

    python 3_Pendulum/mistakes.py                # about 8 minutes
    python 3_Pendulum/mistakes.py NUM_SEEDS=3    # a constant that both scripts have, for all rows

Writes mistakes.csv (rows M) and exercises.csv (rows E), a line per row and seed.
"""

import contextlib
import time
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from tensorflow_probability.substrates.jax import distributions as tfd

import pendulum
import reinforce
import runs
import settings
from environments import MAX_TORQUE, evaluate


class Row(NamedTuple):
    """One training of a script, changed."""

    name: str  # as in the tables of MEASUREMENTS.md
    what: str
    changes: tuple[tuple[ModuleType, str, Any], ...] = ()  # module, name, what stands in its place
    constants: tuple[str, ...] = ()
    script: ModuleType = pendulum


# %% What stands in the place of a function --------------------------------------------------------------
collect, gae, policy_loss, value = pendulum.collect, pendulum.gae, pendulum.policy_loss, reinforce.value


def next_is_after_the_reset(c: pendulum.Constants, agent: pendulum.Agent, rng: jax.Array) -> tuple[Any, Any]:
    """V of what an environment that resets itself shows: the next episode's first state."""
    agent, rollout = collect(c, agent, rng)
    last = pendulum.value(agent.critic, agent.env_state.obs)  # [N], of the state the next rollout begins with
    seen = jnp.concatenate([rollout.value[:, 1:], last[:, None]], axis=1)  # [N, T]
    return agent, rollout._replace(next_value=seen)


def square(critic: pendulum.MLP, batch: pendulum.Batch) -> jax.Array:
    """The critic's loss with values [B, 1] instead of [B]."""
    return jnp.mean((batch.returns - pendulum.value(critic, batch.obs)[:, None]) ** 2)


def over_the_ends(reward, value, next_value, terminated, truncated, *constants) -> jax.Array:
    """Advantages that flow back over the ends of episodes."""
    never = jnp.zeros_like(terminated)
    return gae(reward, value, (1 - terminated) * next_value, never, never, *constants)


class Cut(tfd.Normal):
    """Its samples are cut off at the torque's limits, before they get their log-prob."""

    def _sample_n(self, n: int, seed: jax.Array) -> jax.Array:
        return jnp.clip(super()._sample_n(n, seed), -MAX_TORQUE, MAX_TORQUE)


def cut_policy(actor: pendulum.MLP, obs: jax.Array) -> Cut:
    """The policy, with samples that are cut off."""
    mean, sigma = jnp.moveaxis(actor(obs), -1, 0)
    return Cut(MAX_TORQUE * nnx.tanh(mean), actor.sigma_min + nnx.softplus(sigma))


def one_sigma(actor: pendulum.MLP, obs: jax.Array) -> tfd.Normal:
    """The policy with one sigma for all states: a number, the output's bias, and no network."""
    mean, _ = jnp.moveaxis(actor(obs), -1, 0)
    sigma = jnp.broadcast_to(actor.output.bias[1], mean.shape)
    return tfd.Normal(MAX_TORQUE * nnx.tanh(mean), actor.sigma_min + nnx.softplus(sigma))


def old_is_new(log_prob: jax.Array, old_log_prob: jax.Array, *others: Any) -> jax.Array:
    """The loss with an old log-prob that is computed anew: a ratio of 1 at every gradient step."""
    return policy_loss(log_prob, jax.lax.stop_gradient(log_prob), *others)


def mean_of_all_steps(rollout: reinforce.Rollout, returns: jax.Array, critic: reinforce.MLP) -> jax.Array:
    """One mean for all steps, where the script has one for each."""
    return jnp.broadcast_to((rollout.alive * returns).sum() / rollout.alive.sum(), returns.shape)


def without_clock(critic: reinforce.MLP, obs: jax.Array, t: jax.Array) -> jax.Array:
    """A critic for which it is always step 0."""
    return value(critic, obs, 0 * t)


# %% Rows -----------------------------------------------------------------------------------------------
ONE_MEAN = (reinforce, "BASELINES", reinforce.BASELINES | {"batch_mean": mean_of_all_steps})
SHORT, NO_CLIP = "NUM_STEPS=50_000", "CLIP_EPSILON=1e9"
ROWS = [
    Row("M1", "V of the next episode's first observation", ((pendulum, "collect", next_is_after_the_reset),)),
    Row("M2", "[B, 1] less [B]", ((pendulum, "critic_loss", square),)),
    Row("M3", "advantages flow over the ends", ((pendulum, "gae", over_the_ends),)),
    Row("M4", "torque cut before its log-prob", ((pendulum, "policy", cut_policy),)),
    Row("M5", "old log-prob computed anew", ((pendulum, "policy_loss", old_is_new),)),
    Row("M6", "one mean for all steps", (ONE_MEAN,), ("BASELINE=batch_mean",), reinforce),
    Row("E1a", "as it is", (), (SHORT,)),
    Row("E1b", "as it is", (), (SHORT, "NUM_EPOCHS=20")),
    Row("E1c", "as it is", (), (SHORT, "MINIBATCH_SIZE=25")),
    Row("E2a", "as it is", (), (NO_CLIP, "BETA=0.1")),
    Row("E2b", "as it is", (), (NO_CLIP, "BETA=10.0")),
    Row("E3", "one sigma for all states", ((pendulum, "policy", one_sigma),)),
    Row("E5", "a critic without clock", ((reinforce, "value", without_clock),), (), reinforce),
]


# %% Running them ---------------------------------------------------------------------------------------
def train_changed(row: Row, arguments: list[str]) -> list[dict[str, Any]]:
    """All seeds of a row; the last explained variance and entropy are where a mistake may show."""
    c, script = row.script.configure([*arguments, *row.constants]), row.script
    print(f"\n{row.name}: {row.what} {' '.join(row.constants)}")
    with contextlib.ExitStack() as stack:
        for change in row.changes:
            stack.enter_context(mock.patch.object(*change))
        agents, log, _ = runs.whole(script.train(c), c.NUM_STEPS // c.EVAL_INTERVAL)
        eval_return = evaluate(script.ENV, script.policy, agents.actor, c.EVAL_EPISODES).mean(axis=1)
    print(runs.summary(eval_return))
    return [
        {
            "row": row.name,
            "what": row.what,
            "constants": " ".join(row.constants),
            "seed": c.SEED + i,
            "eval_return": eval_return[i],
            "last_explained_variance": log.explained_variance[i, -1],
            "last_entropy": log.entropy[i, -1],
        }
        for i in range(c.NUM_SEEDS)
    ]


def main(arguments: list[str]) -> None:
    """Trains every row and writes both tables.

    Args:
        arguments: `NAME=value`, constants of both scripts; they hold for every row that does not change them.

    Raises:
        settings.UserError: a constant is wrong, also in one of the rows; nothing was trained then.
    """
    started = time.perf_counter()
    for row in ROWS:
        row.script.configure([*arguments, *row.constants])
    runs.start_jax()
    run_dir = runs.open_run("pendulum_mistakes", pendulum.configure(arguments))
    lines = [line for row in ROWS for line in train_changed(row, arguments)]
    for letter, name in (("M", "mistakes"), ("E", "exercises")):
        runs.write_csv(run_dir / f"{name}.csv", [line for line in lines if line["row"].startswith(letter)])
    seconds = time.perf_counter() - started
    runs.write_json(run_dir / "result.json", {"seconds": seconds})
    print(f"{seconds:.0f} s; everything of this run is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
