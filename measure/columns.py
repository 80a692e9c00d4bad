"""What a finished run adds to a committed table, and tables that follow from other tables.

Each function named under `columns` in a study.toml takes the folders of a row's runs (one, or one
per seed) and yields lines; each named under `derive` takes tables' paths.
"""

import csv
import json
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
Lines = Iterator[dict[str, Any]]


def read_csv(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_json(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def log_of(run: Path, seed: int | None = None) -> dict[str, np.ndarray]:
    """The columns of log.csv: of the only seed, or of one of several, float32 as the script had
    them.
    """
    rows = [row for row in read_csv(run / "log.csv") if seed is None or int(row["seed"]) == seed]
    dtype = float if seed is None else np.float32
    return {
        name: np.array([row[name] for row in rows], dtype) for name in rows[0] if name != "method"
    }


# %% Folder 1 --------------------------------------------------------------------------------------
def q_learning(runs: Sequence[Path], figures: Sequence[str]) -> Lines:
    """Some figures of each run; the goal's row of the table is left out."""
    for run in runs:
        c = SimpleNamespace(**read_json(run / "constants.json"))
        result = read_json(run / "result.json")
        log = log_of(run)
        Q = np.array(
            [[float(q) for q in list(row.values())[1:]] for row in read_csv(run / "q_table.csv")]
        )
        copy = run / "changed" / "1_Q_Learning"  # a patched grid has another optimum
        grid = runpy.run_path(str((copy if copy.exists() else ROOT / "1_Q_Learning") / "grid.py"))
        error = np.abs(Q - grid["value_iteration"](c))[:-1]  # [15, 4]
        close = log["episode"][log["max_abs_error"] < 1e-6]
        found = {
            "max_abs_error": error.max(),
            "pairs_off_by_0.01": int((error > 0.01).sum()),
            "optimal_from_every_state": result["optimal_from_every_state"],
            "episodes_to_1e-6": int(close[0]) if len(close) else "never",
            "moves_from_start": grid["greedy_moves"](c, Q, grid["START"]) or "never",
            "return_of_last_1000_episodes": log["return"][
                log["episode"] > c.NUM_EPISODES - 1000
            ].mean(),
            "seconds": round(result["seconds"], 3),
        }
        yield {"seed": c.SEED} | {name: found[name] for name in figures}


def q_learning_curves(runs: Sequence[Path]) -> Lines:
    """compare_curves.csv: geometric mean of the errors, mean of the returns, and extremes over the
    seeds.
    """
    logs = [log_of(run) for run in runs]
    # 0 isn't on a logarithmic axis
    errors = np.maximum([log["max_abs_error"] for log in logs], 1e-14)
    returns = np.array([log["return"] for log in logs])
    lines = {
        "error_mean": np.exp(np.log(errors).mean(axis=0)),
        "error_min": errors.min(axis=0),
        "error_max": errors.max(axis=0),
        "return_mean": returns.mean(axis=0),
        "return_min": returns.min(axis=0),
        "return_max": returns.max(axis=0),
    }
    for i, episode in enumerate(logs[0]["episode"]):
        yield {"episode": int(episode)} | {
            name: f"{values[i]:.4g}" for name, values in lines.items()
        }


def q_learning_crawl(runs: Sequence[Path]) -> Lines:
    """crawl.csv: the best action's value in each state."""
    for row in read_csv(runs[0] / "q_table.csv"):
        state, *values = row.values()
        yield {"state": state, "best_value": max(map(float, values))}


# %% Folders 2 and 3: seeds side by side -----------------------------------------------------------
def with_logs(runs: Sequence[Path]) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """By seed: its number and its last policy's return, and its log."""
    for run in runs:
        first = read_json(run / "constants.json")["SEED"]
        for seed, eval_return in enumerate(
            read_json(run / "result.json")["eval_return"], start=first
        ):
            yield {"seed": seed, "eval_return": eval_return}, log_of(run, seed)


def first_step(log: dict[str, np.ndarray], name: str, value: str) -> int | str:
    """The environment step at which a column has a value for the first time."""
    reached = log["env_step"][log[name] == float(value)]
    return int(reached[0]) if len(reached) else "never"


FIGURES = {
    "first": first_step,
    "last": lambda log, name: log[name][-1],
    "count": lambda log, name: int(log[name][-1]),
    "max": lambda log, name: log[name].max(),
    "mean": lambda log, name: log[name].mean(),
}


def seeds_side_by_side(runs: Sequence[Path], **figures: str) -> Lines:
    """A line per seed: its last policy's return, and figures of its log, such as kl="mean kl"."""
    for line, log in with_logs(runs):
        specs = {name: spec.split() for name, spec in figures.items()}
        yield line | {name: FIGURES[kind](log, *rest) for name, (kind, *rest) in specs.items()}


def band(runs: Sequence[Path], value: str) -> Lines:
    """Mean, lowest and highest seed at each row of the log: of a column, or of one less another."""
    logs = [pd.DataFrame(log) for _, log in with_logs(runs)]
    values = np.stack([log.eval(value) for log in logs])  # [seeds, rows]
    steps = np.mean([log["env_step"] for log in logs], axis=0)
    for step, at in zip(steps, values.T):
        yield {"env_step": f"{step:g}", "mean": at.mean(), "low": at.min(), "high": at.max()}


def mean_of_pairs(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean of paired differences, and its 95 % interval.

    The interval is the percentile bootstrap's (10,000 resamples of the seeds), which makes no guess
    at the shape of the differences, most of them 0, and with ten seeds is a little narrow.
    """
    import scipy.stats

    if len(differences) == 1:  # SciPy wants two
        return (differences[0],) * 3
    interval = scipy.stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=10_000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return differences.mean(), interval.low, interval.high


def paired(lines: Sequence[dict[str, Any]], changed: str, against: str) -> dict[str, Any]:
    """Last policies of one row less those of another, seed by seed: mean, interval, how many are
    lower.
    """
    rows = [
        [float(x["eval_return"]) for x in lines if x["changed"] == label]
        for label in (changed, against)
    ]
    difference = np.subtract(*rows)
    mean, low, high = mean_of_pairs(difference)
    return {
        "changed": changed,
        "against": against,
        "mean_difference": mean,
        "low": low,
        "high": high,
        "lower": int((difference < 0).sum()),
        "higher": int((difference > 0).sum()),
    }


def paired_rows(table: Path) -> Lines:
    """Each row against the first, and against the row that differs by DOUBLE_DQN=False only."""
    lines = read_csv(table)
    labels = list(dict.fromkeys(line["changed"] for line in lines))
    pairs = [(label, labels[0]) for label in labels[1:]]
    pairs += [(label, label.removesuffix(" DOUBLE_DQN=False")) for label in labels]
    for changed, against in dict.fromkeys(pairs):
        if changed != against and against in labels:
            yield paired(lines, changed, against)


def best_of_tune(table: Path) -> list[dict[str, Any]]:
    """Each learner's best setting by the mean of its last policies; of equals, by that while
    learning.
    """
    keys, scores = ["learning_rate", "target_sync_interval"], ["eval_return", "mean_while_learning"]
    lines, rows = pd.read_csv(table, dtype=dict.fromkeys(keys, str)), []
    for learner, mine in lines.groupby("learner", sort=False):
        means = mine.groupby(keys, as_index=False)[scores].mean()
        rate, interval = means.sort_values(scores + keys).iloc[-1][keys]
        words = f"LEARNING_RATE={rate}"
        if learner != "ours":
            words = (
                "N_STEPS=1 DOUBLE_DQN=False SCALE_OBSERVATIONS=False "
                f"{words} LEARNING_RATE_END={rate}"
            )
        rows.append({"learner": learner, "changed": f"{words} TARGET_SYNC_INTERVAL={interval}"})
    return rows


# %% Folder 4 --------------------------------------------------------------------------------------
def mnist(runs: Sequence[Path], figures: Sequence[str]) -> Lines:
    """Some figures of each seed: the last accuracies, means of the log, seconds of all seeds."""
    for run in runs:
        result = read_json(run / "result.json")
        for row in read_csv(run / "accuracy.csv"):
            log = log_of(run, int(row["seed"]))
            found = result | {name: log[name].mean().item() for name in log} | row
            found["images"] = int(log["images"][-1])
            found["seconds_of_all_seeds"] = result["seconds"] - result["compile_seconds"]
            yield {name: found[name] for name in ("seed", *figures)}


def mnist_log(runs: Sequence[Path]) -> Lines:
    """Folder 4's log.csv: every method's log."""
    for run in runs:
        yield from read_csv(run / "log.csv")


# %% Folder 5 --------------------------------------------------------------------------------------
WHEN = "before", "after"


def measured(run: Path) -> dict[str, str]:
    """Machine and date."""
    return {name: read_json(run / "measured.json")[name] for name in ("machine", "date")}


def language_model(runs: Sequence[Path]) -> Lines:
    """Folder 5's seeds.csv: one line per run."""
    for run in runs:
        result = read_json(run / "result.json")
        named = [
            (when, name) for when in WHEN for name in result[when] if name.endswith("_accuracy")
        ]
        shares = {f"{when}_{name}": result[when][name] for when, name in named}
        more = {name: result.get(name, "") for name in ("seconds", "seconds_per_step", "steps")}
        yield shares | {"questions": result["before"]["questions"]} | more | measured(run)


KEYS = ("answer_accuracy", "lenient_accuracy", "format_accuracy", "greedy_answer_accuracy")


def own_task(runs: Sequence[Path]) -> Lines:
    """Folder 5's own_tasks.csv: one line per run, and one for each data_source where it has
    several.
    """
    for run in runs:
        result = read_json(run / "result.json")
        parts = {
            when: {"all": result[when]} | result[when].get("by_data_source", {}) for when in WHEN
        }
        for name, before in parts["before"].items():
            shares = {
                f"{when}_{key}": parts[when][name].get(key, "") for key in KEYS for when in WHEN
            }
            line = {"data_source": name, "questions": before["questions"]} | shares
            yield line | {"seconds": result["seconds"]} | measured(run)


def mismatch(runs: Sequence[Path]) -> Lines:
    """Folder 5's mismatch.csv."""
    for run in runs:
        result = read_json(run / "result.json")
        command = read_json(run / "measured.json")["command"]
        line = {"seed": read_json(run / "constants.json")["SEED"], "command": command}
        line |= {f"{when}_{key}": result[when][key] for when in WHEN for key in KEYS}
        graded = sum(int(row["answers"]) for row in read_csv(run / "train_log.csv"))
        line |= {
            "questions": result["before"]["questions"],
            "graded": graded,
            "seconds": result["seconds"],
        }
        yield line | measured(run)


def mismatch_curve(runs: Sequence[Path]) -> Lines:
    """Folder 5's mismatch_curves.csv: a line per run and step."""
    for run in runs:
        graded, seed = 0, read_json(run / "constants.json")["SEED"]
        for row in read_csv(run / "train_log.csv"):
            graded += int(row["answers"])
            names = ("step", "correct", "format_ok", "kl", "length", "entropy", "mismatch")
            yield {"seed": seed, "graded": graded} | {name: row[name] for name in names}
