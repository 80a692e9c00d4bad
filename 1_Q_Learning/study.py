"""Other step sizes and epsilons: trains Q_Learning.py with each row of COMPARISON, NUM_SEEDS seeds each.

    python 1_Q_Learning/study.py                       # half a minute
    python 1_Q_Learning/study.py NUM_EPISODES=5000     # a constant of the script, for all rows

Writes compare.csv (one row per training), compare_curves.csv and compare.png.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import grid
import pictures
import Q_Learning as script
import runs
import settings


# %% Constants ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(script.Constants):
    """The script's, and these."""

    NUM_SEEDS: settings.Count = 5  # of each row: SEED, SEED + 1, ...
    PRINT_EVERY: settings.CountOrOff = 0  # rows of log.csv per printed line; 0: prints none
    RUN_DIR: str = ""  # empty: runs/Q_Learning_study/<time>


def configure(arguments: list[str]) -> Constants:
    """The constants above, changed by `NAME=value` arguments. Raises settings.UserError."""
    return settings.read(Constants, arguments)


COMPARISON = [  # what to change on the command line, and its color
    ([], pictures.BLUE),
    (["ALPHA=0.01"], pictures.ORANGE),
    (["ALPHA=1.0"], pictures.GREY),
    (["EPSILON_END=1.0"], "#2ca02c"),
    (["EPSILON_START=0.01"], pictures.RED),
]


# %% Comparison -----------------------------------------------------------------------------------------
def train_seeds(c: Constants, label: str) -> tuple[list[dict[str, Any]], np.ndarray, np.ndarray, np.ndarray]:
    """Trains the script with each seed.

    Args:
        c: the constants.
        label: names the row.

    Returns:
        results: one row of compare.csv per seed.
        episodes: float64 (rows,), the episodes at the end of each row of the log.
        errors: float64 (seeds, rows), largest absolute error of the table.
        returns: float64 (seeds, rows), mean return.
    """
    q_star = grid.value_iteration(c)
    results, errors, returns = [], [], []
    for seed in range(c.SEED, c.SEED + c.NUM_SEEDS):
        q_table, log, tables = script.train(c, np.random.default_rng(seed))
        error = np.abs(tables - q_star)  # (rows, 16, 4)
        errors.append(error.max(axis=(1, 2)))
        returns.append(log[:, 2])
        close = np.flatnonzero(errors[-1] < 1e-6)
        result = {
            "changed": label,
            "seed": seed,
            "max_abs_error": errors[-1][-1],
            "pairs_off_by_0.01": int((error[-1] > 0.01).sum()),
            "optimal_from_every_state": grid.optimal_from_every_state(c, q_table),
            "episodes_to_1e-6": int(log[close[0], 0]) if len(close) else "never",
            "return_of_last_1000_episodes": log[log[:, 0] > c.NUM_EPISODES - 1000, 2].mean(),
        }
        results.append(result)
        print("   ".join(f"{name} {value}" for name, value in result.items()))
    return results, log[:, 0], np.array(errors), np.array(returns)


def curves(episodes: np.ndarray, errors: np.ndarray, returns: np.ndarray) -> dict[str, np.ndarray]:
    """The lines and bands of compare.png: geometric mean of the errors, mean of the returns, and extremes."""
    errors = np.maximum(errors, pictures.FLOOR)
    return {
        "episode": episodes,
        "error_mean": np.exp(np.log(errors).mean(axis=0)),
        "error_min": errors.min(axis=0),
        "error_max": errors.max(axis=0),
        "return_mean": returns.mean(axis=0),
        "return_min": returns.min(axis=0),
        "return_max": returns.max(axis=0),
    }


def draw_comparison(path: Path, lines: dict[str, dict[str, np.ndarray]], log_every: int) -> None:
    """Left: largest error. Right: return. Lines are means over the seeds, bands go from lowest to highest.

    Args:
        path: of the PNG file.
        lines: `curves` by label, in the order of COMPARISON.
        log_every: episodes averaged into one point.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), facecolor="white", layout="constrained")
    for (label, line), (changes, color) in zip(lines.items(), COMPARISON):
        for axes, name in ((left, "error"), (right, "return")):
            x, low, high = line["episode"], line[f"{name}_min"], line[f"{name}_max"]
            # The first one thick: where a later one covers it, both are seen.
            width = 1.5 if changes else 4
            axes.semilogx(x, line[f"{name}_mean"], color=color, label=label, linewidth=width)
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    left.set(xlabel="episode", ylabel="largest |Q − Q*| over all pairs", yscale="log")
    right.set(xlabel="episode", ylabel=f"return (mean of {log_every} episodes)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """Runs every row of COMPARISON and writes what came of it.

    Args:
        arguments: `NAME=value`, the script's constants or NUM_SEEDS; those of the script hold for every row
            that does not change them.

    Raises:
        settings.UserError: a constant is wrong, also in one of the rows; nothing was trained then.
    """
    started = time.perf_counter()
    rows = {" ".join(changes) or "unchanged": configure([*arguments, *changes]) for changes, _ in COMPARISON}
    run_dir = runs.open_run("Q_Learning_study", rows["unchanged"])

    results, points, lines = [], [], {}
    for label, c in rows.items():
        of_label, *series = train_seeds(c, label)
        results += of_label
        lines[label] = curves(*series)
        for point in zip(*lines[label].values()):
            shown = dict(zip(lines[label], (f"{value:.4g}" for value in point)))
            points.append({"changed": label} | shown | {"episode": int(point[0])})

    runs.write_csv(run_dir / "compare.csv", results)
    runs.write_csv(run_dir / "compare_curves.csv", points)
    draw_comparison(run_dir / "compare.png", lines, rows["unchanged"].LOG_EVERY)
    seconds = time.perf_counter() - started
    runs.write_json(run_dir / "result.json", {"seconds": seconds})
    print(f"{seconds:.1f} s; everything of this run is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
