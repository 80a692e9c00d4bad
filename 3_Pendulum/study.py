"""What holds PPO on Pendulum: trains every row of COMPARISON with all seeds and draws what came of it.

python 3_Pendulum/study.py                # 23 rows of ten seeds each: 9 minutes on one CPU core
python 3_Pendulum/study.py NUM_SEEDS=3    # constants of pendulum.py hold where a row does not change them
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import pendulum
import settings
from pictures import BLUE, GREY, draw_band

TEXTBOOK = [
    "GAMMA=0.99", "GAE_LAMBDA=0.95", "NUM_ENVS=1", "ROLLOUT_STEPS=2048", "MINIBATCH_SIZE=64",
    "SIGMA_START=1.0", "ACTOR_LEARNING_RATE=3e-4", "CRITIC_LEARNING_RATE=1e-3", "LEARNING_RATE_END=1.0",
    "EVAL_INTERVAL=10_240",
]  # fmt: skip
WRONG = "BOOTSTRAP_TRUNCATED=False"  # no constant of pendulum.py: a mistake on purpose, see `patched`
COMPARISON = [  # what to change on the command line, or WRONG
    [],
    # the locks
    ["CLIP_EPSILON=1e9"],
    ["CLIP_EPSILON=1e9", "BETA=1.0"],
    ["CLIP_EPSILON=1e9", "BETA=1.0", "KL_TARGET=0.01"],
    ["BETA=1.0", "KL_TARGET=0.01"],
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


@contextlib.contextmanager
def patched(changes: list[str]) -> Iterator[list[str]]:
    """Makes the mistake WRONG where a row asks for it: V(s_T) of a truncated episode counts as 0.

    Yields:
        What the row changes on the command line.
    """
    right = pendulum.generalized_advantage_estimation

    def wrong(rollout: pendulum.Rollout) -> tuple[jax.Array, jax.Array]:
        return right(
            rollout._replace(next_value=jnp.where(rollout.transition.truncated, 0, rollout.next_value))
        )

    if WRONG not in changes:
        yield changes
        return
    with mock.patch.object(pendulum, "generalized_advantage_estimation", wrong):
        jax.clear_caches()  # jax remembers `update` as it was traced before
        yield [change for change in changes if change != WRONG]
    jax.clear_caches()


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
            with settings.progress(c["NUM_STEPS"], ["episode_return", "eval_return", "kl"]) as report:
                agents, log, policies, _, _ = pendulum.train_seeds(report)
        logs[label] = log
        eval_return = pendulum.evaluate(agents.actor).mean(axis=1)
        best_eval_return = pendulum.evaluate(pendulum.best_of(log, policies)).mean(axis=1)
        lines += [
            {
                "changed": label,
                "seed": c["SEED"] + i,
                "eval_return": eval_return[i],
                "best_eval_return": best_eval_return[i],
                "kl": log.kl[i].mean(),
                "clip_fraction": log.clip_fraction[i].mean(),
                "last_explained_variance": log.explained_variance[i, -1],
                "last_sigma": log.sigma[i, -1],
            }
            for i in range(c["NUM_SEEDS"])
        ]
        print(f"last policy: {settings.summary(eval_return)}")
        print(f"best policy: {settings.summary(best_eval_return)}")
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
        settings.UserError: see `settings.configure` and `settings.open_run`.
    """
    for row in COMPARISON:  # a row that clashes with the command line is refused before anything is trained
        pendulum.configure([*arguments, *(change for change in row if change != WRONG)])
    run_dir = settings.open_run("study", pendulum.configure(arguments))
    lines, logs = compare(arguments)
    settings.write_csv(run_dir / "compare.csv", lines)
    draw_comparison(run_dir / "compare.png", lines)
    draw_failures(run_dir / "failures.png", logs)
    print(f"everything of this study is in {run_dir}")
    return run_dir


if __name__ == "__main__":
    settings.run(main)
