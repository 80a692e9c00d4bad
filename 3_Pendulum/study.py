"""What holds PPO on Pendulum: trains every row of COMPARISON with all seeds and draws what came of it.

python 3_Pendulum/study.py                # 23 rows of ten seeds each: 9 minutes on one CPU core
python 3_Pendulum/study.py NUM_SEEDS=3    # constants of pendulum.py hold where a row does not change them
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import pendulum
import runs
import settings
from environments import evaluate
from pictures import BLUE, GREY, draw_band

TEXTBOOK = [
    "GAMMA=0.99", "GAE_LAMBDA=0.95", "NUM_ENVS=1", "ROLLOUT_STEPS=2048", "MINIBATCH_SIZE=64",
    "SIGMA_START=1.0", "ACTOR_LEARNING_RATE=3e-4", "CRITIC_LEARNING_RATE=1e-3", "LEARNING_RATE_END=1.0",
    "EVAL_INTERVAL=10_240",
]  # fmt: skip
# No constants of pendulum.py: see `patched`
WRONG = "BOOTSTRAP_TRUNCATED=False"  # a mistake on purpose
ADAPTIVE = "KL_TARGET=0.01"  # BETA doubles or halves after a rollout, to bring the KL near this
COMPARISON = [  # what to change on the command line, or one of these two
    [],
    # the locks
    ["CLIP_EPSILON=1e9"],
    ["CLIP_EPSILON=1e9", "BETA=1.0"],
    ["CLIP_EPSILON=1e9", "BETA=1.0", ADAPTIVE],
    ["BETA=1.0", ADAPTIVE],
    # the judgement
    [WRONG],
    ["NORMALIZE_ADVANTAGES=False"],
    ["GAE_LAMBDA=1.0"],
    ["GAE_LAMBDA=0.95"],
    ["GAE_LAMBDA=0.0"],
    ["GAMMA=0.99"],
    ["GAMMA=0.9"],
    ["GAMMA=0.99", "GAE_LAMBDA=0.95"],
    ["GAMMA=0.9", "GAE_LAMBDA=0.95"],
    # the rest
    ["SIGMA_START=1.0"],
    ["SIGMA_START=0.5"],
    ["SCALE_OBSERVATIONS=False"],
    ["CRITIC_LEARNING_RATE=1e-3"],
    ["LEARNING_RATE_END=1.0"],
    ["NUM_EPOCHS=1"],
    ["NUM_ENVS=1", "ROLLOUT_STEPS=1000"],
    # the textbook
    ["NUM_STEPS=102_400", *TEXTBOOK],
    ["NUM_STEPS=512_000", *TEXTBOOK],
]
FAILURES = {  # the rows from which most is to be learned
    "CLIP_EPSILON=1e9": "no lock at all",
    WRONG: "truncated is taken for terminated",
    "NORMALIZE_ADVANTAGES=False": "advantages of any size",
    "GAE_LAMBDA=0.0": "the critic is trusted after one step",
    "CRITIC_LEARNING_RATE=1e-3": "the critic learns too slowly",
    "NUM_EPOCHS=1": "every rollout is used once",
}


# %% Training -------------------------------------------------------------------------------------------
def label_of(changes: list[str]) -> str:
    """How a row is called in tables and pictures."""
    return " ".join(changes) or "unchanged"


def ended_is_over(gae):
    """`gae` with the mistake WRONG: V(s_T) of a truncated episode counts as 0."""

    def wrong(reward, value, next_value, terminated, truncated, *constants) -> jax.Array:
        return gae(reward, value, jnp.where(truncated, 0, next_value), terminated, truncated, *constants)

    return wrong


def adapted_beta(beta: jax.Array, kl: jax.Array, target: float) -> jax.Array:
    """The second lock's weight for the next rollout (Schulman et al. 2017, section 4)."""
    beta = jnp.where(kl > 1.5 * target, 2 * beta, beta)
    beta = jnp.where(kl < target / 1.5, beta / 2, beta)
    return jnp.clip(beta, 1e-6, 1e6)  # halved a hundred times, it would be 0 and stay 0


class AdaptiveAgent(NamedTuple):
    """pendulum.Agent, and the weight of the penalty."""

    actor: Any
    critic: Any
    actor_optimizer: Any
    critic_optimizer: Any
    env_step: jax.Array
    num_updates: jax.Array
    env_state: Any
    beta: jax.Array  # float32 []


def adaptive(make_agent, update) -> dict[str, Any]:
    """`make_agent` and `update` of pendulum.py with a BETA that is adapted after each rollout."""

    def make_adaptive_agent(c, rng):
        return AdaptiveAgent(*make_agent(c, rng), beta=jnp.float32(c.BETA))

    def adaptive_update(c, agent, rng):
        plain, figures = update(replace(c, BETA=agent.beta), pendulum.Agent(*agent[:-1]), rng)
        target = float(ADAPTIVE.partition("=")[2])
        return AdaptiveAgent(*plain, beta=adapted_beta(agent.beta, figures["kl"][0], target)), figures

    return {"make_agent": make_adaptive_agent, "update": adaptive_update}


@contextlib.contextmanager
def patched(changes: list[str]) -> Iterator[list[str]]:
    """Exchanges the functions of pendulum.py that WRONG and ADAPTIVE ask for; yields the other changes."""
    new = {"gae": ended_is_over(pendulum.gae)} if WRONG in changes else {}
    new |= adaptive(pendulum.make_agent, pendulum.update) if ADAPTIVE in changes else {}
    with mock.patch.multiple(pendulum, **new) if new else contextlib.nullcontext():
        yield [change for change in changes if change not in (WRONG, ADAPTIVE)]


def compare(arguments: list[str]) -> tuple[list[dict[str, Any]], dict[str, pendulum.Log]]:
    """Trains every row of COMPARISON.

    Args:
        arguments: of the command line; they hold for every row that does not change them.

    Returns:
        The lines of compare.csv, one per row and seed; the log [NUM_SEEDS, rows] by label.
    """
    lines, logs = [], {}
    for row in COMPARISON:
        label = label_of(row)
        with patched(row) as changes:
            c = pendulum.configure([*arguments, *changes])
            print(f"\n{label}")
            agents, log, _ = runs.whole(pendulum.train(c), c.NUM_STEPS // c.EVAL_INTERVAL)
        logs[label] = log
        eval_return = evaluate(pendulum.ENV, pendulum.policy, agents.actor, c.EVAL_EPISODES).mean(axis=1)
        lines += [
            {
                "changed": label,
                "seed": c.SEED + i,
                "eval_return": eval_return[i],
                "kl": log.kl[i].mean(),
                "clip_fraction": log.clip_fraction[i].mean(),
                "last_explained_variance": log.explained_variance[i, -1],
                "last_sigma": log.sigma[i, -1],
            }
            for i in range(c.NUM_SEEDS)
        ]
        print(runs.summary(eval_return))
    return lines, logs


# %% Pictures -------------------------------------------------------------------------------------------
def draw_comparison(path: Path, lines: list[dict[str, Any]]) -> None:
    """A line for each row of COMPARISON, a dot for each seed's last policy."""
    labels = list(dict.fromkeys(line["changed"] for line in lines))
    figure, axes = plt.subplots(
        figsize=(10, 0.4 * len(labels) + 0.9), facecolor="white", layout="constrained"
    )
    for y, label in enumerate(labels):
        returns = np.array([line["eval_return"] for line in lines if line["changed"] == label])
        # Spread out vertically, else ten seeds at one place look like one.
        axes.scatter(returns, y + np.linspace(-0.3, 0.3, len(returns)), s=14, color=BLUE)
        axes.text(1.01, y, f"{returns.mean():.1f}", va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels], fontsize=9)
    axes.grid(axis="both", alpha=0.3)
    axes.set(ylim=(len(labels) - 0.4, -0.6), xlabel="return of the last policy (right: mean over the seeds)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shortened(label: str) -> str:
    """A label that fits beside an axis."""
    steps, *rest = label.split()
    return f"the textbook's constants\n{steps}" if rest == TEXTBOOK else label.replace(" KL", "\nKL")


def draw_failures(path: Path, logs: dict[str, pendulum.Log]) -> None:
    """The greedy policy's learning curve of each row of FAILURES, above that of the first row in grey."""
    figure, panels = plt.subplots(
        2, 3, figsize=(11, 5.6), facecolor="white", layout="constrained", sharex=True, sharey=True
    )
    unchanged = next(iter(logs.values()))
    for axes, (label, words) in zip(panels.flat, FAILURES.items()):
        axes.plot(unchanged.env_step[0], unchanged.eval_return.mean(axis=0), color=GREY)
        if label in logs:  # a shorter COMPARISON
            draw_band(axes, logs[label].env_step[0], logs[label].eval_return, BLUE)
        axes.set_title(f"{words}\n{label}", fontsize=9)
        axes.set_xticks([25_000, 50_000, 75_000, 100_000])
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in panels[:, 0]:
        axes.set_ylabel("return")
    figure.supxlabel("environment steps (grey: unchanged)", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> Path:
    """The whole study; writes compare.csv, compare.png and failures.png.

    Args:
        arguments: `NAME=value` each, constants of pendulum.py.

    Returns:
        The run's folder.

    Raises:
        settings.UserError: see `settings.read` and `runs.open_run`.
    """
    for row in COMPARISON:  # a row that clashes with the command line is refused before anything is trained
        with patched(row) as changes:
            pendulum.configure([*arguments, *changes])
    runs.start_jax()
    run_dir = runs.open_run("study", pendulum.configure(arguments))
    lines, logs = compare(arguments)
    runs.write_csv(run_dir / "compare.csv", lines)
    draw_comparison(run_dir / "compare.png", lines)
    draw_failures(run_dir / "failures.png", logs)
    print(f"everything of this study is in {run_dir}")
    return run_dir


if __name__ == "__main__":
    settings.run(main)
