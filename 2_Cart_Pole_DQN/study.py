"""What holds cart_pole_dqn.py steady: its constants changed one by one; textbook DQN tuned like ours.

    python 2_Cart_Pole_DQN/study.py         # COMPARISON on seeds 0 to 9: 12 minutes on 2 CPU cores
    python 2_Cart_Pole_DQN/study.py tune    # GRID for both learners on seeds 200 to 204

`NAME=value` after that holds for every row that does not change it. A row that clashes with it is refused
before anything is trained. Everything is written to RUN_DIR, or else to runs/cart_pole_dqn_study/<time>:
compare.csv, compare_paired.csv, promises.csv, compare.png, overestimation.png; or tune.csv and tuned.csv.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import scipy.stats

import cart_pole as env
import cart_pole_dqn as script
import pictures
import runs
import settings

# %% Rows: what to change on the command line -----------------------------------------------------------
COMPARISON = [
    [],
    # one of the five less, then four of them
    ["N_STEPS=1"],
    ["SCALE_OBSERVATIONS=False"],
    ["LEARNING_RATE_END=1e-3"],
    ["TRAIN_INTERVAL=1"],
    ["DOUBLE_DQN=False"],
    ["N_STEPS=1", "SCALE_OBSERVATIONS=False", "LEARNING_RATE_END=1e-3", "DOUBLE_DQN=False"],
    # the target network: as good as none, and rarely copied
    ["TARGET_SYNC_INTERVAL=2"],
    ["TARGET_SYNC_INTERVAL=1000"],
    ["N_STEPS=1", "TARGET_SYNC_INTERVAL=20"],
    ["N_STEPS=1", "TARGET_SYNC_INTERVAL=20", "DOUBLE_DQN=False"],
    ["N_STEPS=1", "TARGET_SYNC_INTERVAL=2", "DOUBLE_DQN=False"],
    # the buffer
    ["REPLAY_CAPACITY=1_000"],
    ["REPLAY_CAPACITY=50_000"],
    # more or less of the same
    ["N_STEPS=3"],
    ["N_STEPS=10"],
    ["TRAIN_INTERVAL=4", "TARGET_SYNC_INTERVAL=252"],
    ["EPSILON_END=0.05"],
]
PROMISE = [[], ["N_STEPS=1", "TARGET_SYNC_INTERVAL=20"]]  # rows drawn with and without Double DQN
LEARNERS = {
    "ours": [],
    "textbook": ["N_STEPS=1", "DOUBLE_DQN=False", "SCALE_OBSERVATIONS=False"],  # and a rate that stays
}
# learning rate x environment steps between copies of the target network
GRID = list(itertools.product((3e-4, 1e-3, 2.3e-3), (20, 50, 100, 250, 500, 1_000)))
TUNING_SEEDS = ["SEED=200", "NUM_SEEDS=5"]  # none that a table of results shows


def label_of(changes: Sequence[str]) -> str:
    """How a row is called in tables and pictures."""
    return " ".join(changes) or "unchanged"


def grid_row(learner: str, learning_rate: float, sync_interval: int) -> list[str]:
    """The changes of one setting of GRID."""
    end = [f"LEARNING_RATE_END={learning_rate}"] if learner == "textbook" else []
    rate = [f"LEARNING_RATE={learning_rate}"]
    return [*LEARNERS[learner], *rate, *end, f"TARGET_SYNC_INTERVAL={sync_interval}"]


# %% Measuring ------------------------------------------------------------------------------------------
def measure(arguments: Sequence[str]) -> tuple[list[dict[str, Any]], script.Log]:
    """Trains and evaluates the script with these constants; one line per seed, and the log."""
    c = script.configure(arguments)
    agents, log, _ = runs.whole(script.train(c), script.num_rows(c))
    eval_return = env.evaluate(agents.online, c.EVAL_EPISODES).mean(axis=1)
    print(runs.summary(eval_return, env.SOLVED))
    return [{"seed": c.SEED + i, "eval_return": eval_return[i]} for i in range(c.NUM_SEEDS)], log


def first_step_at_500(log: script.Log, i: int) -> int | str:
    """The environment step of seed i's first evaluation at the time limit."""
    reached = log.env_step[i, log.eval_return[i] == env.MAX_EPISODE_STEPS]
    return int(reached[0]) if len(reached) else "never"


def paired(lines: Sequence[dict[str, Any]], changed: str, against: str) -> dict[str, Any]:
    """Last policies of one row less those of another, seed by seed.

    Returns:
        The mean difference; its 95 % interval by the percentile bootstrap (10,000 resamples of the seeds),
        which makes no guess at the shape of the differences, most of them 0, and with ten seeds is a little
        narrow; how many seeds are lower and higher.
    """
    rows = [[ln["eval_return"] for ln in lines if ln["changed"] == label] for label in (changed, against)]
    difference = np.subtract(*rows)
    interval = scipy.stats.bootstrap(
        (difference,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return {
        "changed": changed,
        "against": against,
        "mean_difference": difference.mean(),
        "low": interval.low,
        "high": interval.high,
        "lower": int((difference < 0).sum()),
        "higher": int((difference > 0).sum()),
    }


# %% Studies --------------------------------------------------------------------------------------------
def compare(run_dir: Path, arguments: Sequence[str]) -> None:
    """Trains the rows of COMPARISON; writes compare.csv, a line per row and seed, compare_paired.csv, each
    row against the first and rows that differ by DOUBLE_DQN=False only, promises.csv, and two pictures."""
    lines, logs = [], {}
    for changes in COMPARISON:
        label = label_of(changes)
        print(f"\n{label}")
        measured, logs[label] = measure([*arguments, *changes])
        for i, line in enumerate(measured):
            more = {
                "first_step_at_500": first_step_at_500(logs[label], i),
                "largest_max_q": logs[label].max_q[i].max(),
            }
            lines.append({"changed": label} | line | more)
    runs.write_csv(run_dir / "compare.csv", lines)
    labels = [label_of(changes) for changes in COMPARISON]
    pairs = [(label, labels[0]) for label in labels[1:]]
    pairs += [(label, label.removesuffix(" DOUBLE_DQN=False")) for label in labels]
    pairs = [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1] and pair[1] in labels]
    runs.write_csv(run_dir / "compare_paired.csv", (paired(lines, *pair) for pair in pairs))
    draw_comparison(run_dir / "compare.png", lines)
    runs.write_csv(run_dir / "promises.csv", promises(logs))
    draw_overestimation(run_dir / "overestimation.png", logs)


def promises(logs: dict[str, script.Log]) -> Iterator[dict[str, Any]]:
    """The curves of overestimation.png: promised less true return, mean and range over the seeds."""
    for changes, extra in itertools.product(PROMISE, ([], ["DOUBLE_DQN=False"])):
        label = label_of([*changes, *extra])
        error = np.asarray(logs[label].max_q - logs[label].discounted_return)  # [seeds, rows]
        for i, step in enumerate(logs[label].env_step[0].tolist()):
            at = error[:, i]
            yield {"changed": label, "env_step": step, "mean": at.mean(), "low": at.min(), "high": at.max()}


def tune(run_dir: Path, arguments: Sequence[str]) -> None:
    """Both learners on the same GRID; the best setting of each, by the mean of its last policies, on SEED to
    SEED + NUM_SEEDS - 1. Among equals the better one while learning. Writes tune.csv and tuned.csv."""
    lines, tuned = [], []
    for learner in LEARNERS:
        score = {}
        for setting in GRID:
            changes = grid_row(learner, *setting)
            print(f"\n{learner}: {label_of(changes)}")
            measured, log = measure([*arguments, *TUNING_SEEDS, *changes])
            learning = log.eval_return.mean(axis=1)
            score[setting] = (np.mean([line["eval_return"] for line in measured]), learning.mean())
            lines += [
                {"learner": learner, "learning_rate": setting[0], "target_sync_interval": setting[1]}
                | line
                | {"mean_while_learning": learning[i]}
                for i, line in enumerate(measured)
            ]
        changes = grid_row(learner, *max(GRID, key=score.get))
        print(f"\nbest of {learner}: {label_of(changes)}")
        measured, _ = measure([*arguments, *changes])
        tuned += [{"learner": learner, "changed": label_of(changes)} | line for line in measured]
    runs.write_csv(run_dir / "tune.csv", lines)
    runs.write_csv(run_dir / "tuned.csv", tuned)


# %% Pictures -------------------------------------------------------------------------------------------
def draw_comparison(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """A line for each row of COMPARISON, a dot for each seed's last policy."""
    labels = [label_of(changes) for changes in COMPARISON]
    figure, axes = plt.subplots(
        figsize=(10, 0.36 * len(labels) + 0.9), facecolor="white", layout="constrained"
    )
    for y, label in enumerate(labels):
        returns = np.array([line["eval_return"] for line in lines if line["changed"] == label])
        # Spread out vertically, else ten seeds at 500 look like one.
        axes.scatter(returns, y + np.linspace(-0.3, 0.3, len(returns)), s=14, color=pictures.BLUE)
        axes.text(515, y, f"{(returns >= env.SOLVED).sum()} of {len(returns)}", va="center")
    axes.axvline(env.SOLVED, color=pictures.GREY, linewidth=1)
    axes.set_yticks(
        range(len(labels)),
        [label.replace(" LEARN", "\nLEARN").replace(" DOUBLE", "\nDOUBLE", 1) for label in labels],
        fontsize=9,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set(xlim=(0, 575), ylim=(len(labels) - 0.4, -0.6), xticks=range(0, 501, 100))
    axes.set_xlabel(f"return of the last policy (line and right: seeds solved, {env.SOLVED:.0f} or more)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_overestimation(path: Path, logs: dict[str, script.Log]) -> None:
    """What the network promises less what comes of it, with and without Double DQN, per row of PROMISE."""
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained")
    choices = (([], pictures.BLUE, "Double DQN"), (["DOUBLE_DQN=False"], pictures.ORANGE, "plain max"))
    titles = "defaults: the promise starts too low", "1-step targets, copied every 20 steps: too high"
    for axes, changes, title in zip(both, PROMISE, titles):
        for extra, color, name in choices:
            log = logs[label_of(changes + extra)]
            pictures.draw_band(axes, log.env_step[0], log.max_q - log.discounted_return, color, name)
        axes.axhline(0, color=pictures.GREY, linewidth=1)
        axes.set(xlabel="environment step", title=title)
        axes.legend(frameon=False, loc="lower right")
    both[1].set_yscale("symlog", linthresh=100)  # a seed that runs away would flatten all others
    both[0].set_ylabel("promised less true\ndiscounted return")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> Path:
    """Runs `tune` if that is the first argument, else `compare`; returns the study's folder.

    Raises:
        settings.UserError: see `settings.read` and `runs.open_run`, for every row.
    """
    study, rows = compare, COMPARISON
    if arguments[:1] == ["tune"]:
        study, arguments = tune, arguments[1:]
        rows = [grid_row(learner, *setting) for learner in LEARNERS for setting in GRID]
    for changes in rows:  # a row that clashes with the command line is refused now, not after the others
        script.configure([*arguments, *changes])
    runs.start_jax()
    run_dir = runs.open_run("cart_pole_dqn_study", script.configure(arguments))
    study(run_dir, arguments)
    print(f"everything of this study is in {run_dir}")
    return run_dir


if __name__ == "__main__":
    settings.run(main)
