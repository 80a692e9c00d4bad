"""The tables of results on the pages of folders 1 and 4 are their CSV files."""

import csv
import re
import statistics

import numpy as np
import pages
import pytest

ONE, FOUR = pages.ROOT / "1_Q_Learning", pages.ROOT / "4_GRPO_MNIST"


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def spread(values, form):
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} … {high}"


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_results_table_is_seeds_csv(language):
    runs = read(ONE / "assets" / "seeds.csv")
    assert len(runs) == 10
    for run in runs:
        shown = "yes" if run["optimal_from_every_state"] == "True" else "no"
        row = (
            f"{float(run['max_abs_error']):.3g} | {shown} | {float(run['return_of_last_1000_episodes']):.2f}"
        )
        assert f"| `{run['command']}` | {row} | {float(run['seconds']):.2f} s |" in pages.text(ONE, language)
    for key, form in (("return_of_last_1000_episodes", ".2f"), ("seconds", ".2f")):
        values = [float(run[key]) for run in runs]
        assert f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}" in pages.text(
            ONE, language
        )


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize(("name", "groups"), [("compare.csv", 5), ("mistakes.csv", 9), ("exercises.csv", 6)])
def test_the_other_tables_are_their_csv(language, name, groups):
    rows = {}
    for row in read(ONE / "assets" / name):
        rows.setdefault(next(iter(row.values())), []).append(row)
    assert len(rows) == groups
    for label, seeds in rows.items():
        assert len(seeds) == 5
        (line,) = re.findall(rf"^\| `?{re.escape(label)}`? \|.*$", pages.text(ONE, language), re.M)
        assert f"| {spread([float(row['max_abs_error']) for row in seeds], '.3g')} |" in line
        optimal = sum(row["optimal_from_every_state"] == "True" for row in seeds)
        assert f"| {optimal} / 5 |" in line
        if name != "exercises.csv":
            returns = [float(row["return_of_last_1000_episodes"]) for row in seeds]
            assert f"| {spread(returns, '.1f')} |" in line.replace("−", "-")


def summary(values, count=5):
    values = 100 * np.array([float(value) for value in values])
    assert len(values) == count
    return f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_accuracies_are_seeds_csv_and_reach_the_goals(language):
    runs, readme = read(FOUR / "assets" / "seeds.csv"), pages.text(FOUR, language)
    goals = {"MNIST": 0.7, "subset": 1.5}
    assert {run["data"] for run in runs} == goals.keys()
    for data, goal in goals.items():
        seeds = [run for run in runs if run["data"] == data]
        grpo, twin, *others = ([float(run["test_accuracy"]) for run in seeds if run["method"] == method]
                               for method in ("grpo", "cross_entropy", "ppo", "reinforce"))  # fmt: skip
        shown = [summary(values) for values in (grpo, twin, *others)]
        assert f"| {data} | {' | '.join(shown)} |" in readme
        behind = 100 * (np.mean(twin) - np.mean(grpo))
        assert behind < goal and f"{behind:.2f}" in readme
