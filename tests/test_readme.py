"""What the READMEs say about the script is what the script says."""

import ast
import csv
import dataclasses
import inspect
import itertools
import re
import shlex
import statistics
import typing
from dataclasses import asdict
from pathlib import Path

import methods
import numpy as np
import pages
import pytest
import sampler_mismatch
import scipy.stats
from folders import load

import constants
import grpo_llama3_1_8b_demo as demo
import inference
import mesh_and_axis_rules
import settings
from run import health
from tools import convert_checkpoint, pass_at_k

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [  # folder 5's have a dataclass
    load("1_Q_Learning", "Q_Learning"),
    load("2_Cart_Pole_DQN", "cart_pole_dqn"),
    pendulum := load("3_Pendulum", "pendulum"),
    load("3_Pendulum", "ppo"),
    reinforce := load("3_Pendulum", "reinforce"),
    load("4_GRPO_MNIST", "grpo_mnist"),
]


def shown(value):
    """A constant's value as the tables write it."""
    return "empty" if value == "" else f"{value}".replace("\n", "\\n")


def remarks(kind):
    """The remark beside each constant, as --help prints it."""
    text = settings.help_text(kind)
    lines = text.splitlines()
    nodes = [node for block in ast.parse(text).body for node in block.body if isinstance(node, ast.AnnAssign)]
    ends = {node.target.id: lines[node.end_lineno - 1].encode()[node.end_col_offset :] for node in nodes}
    return {name: end.decode().strip(" #") for name, end in ends.items()}


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_constants_tables_equal_the_script(language):
    """One table for each block of constants: names, order, both values, and the remark."""
    text = pages.text(settings.HERE, language)
    row = r"^\| `([A-Z][A-Z0-9_]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$"
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    tables = [rows for block in blocks if (rows := re.findall(row, block, re.M))]
    laptop, tpu = (settings.defaults(demo.Constants, column) for column in ("laptop", "tpu"))
    hints = typing.get_type_hints(demo.Constants)
    blocks = (
        [demo.Constants],
        [constants.Variants],
        [constants.Extras],
        [constants.Arrays, constants.Machine],
    )
    for rows, block in zip(tables, blocks, strict=True):
        named = [name for part in block for name in inspect.get_annotations(part)]
        assert [name for name, *_ in rows] == named
        for name, *values, remark in rows:
            if name != "SYSTEM_PROMPT":  # too long for a table
                assert values == [shown(laptop[name]), shown(tpu[name])], name
            choices = ", ".join(map(str, typing.get_args(hints[name])))
            assert remark.endswith(choices), name
            if language == "english":
                said = remarks(demo.Constants)[name]
                assert said and remark.replace("`", "") == said + (f"; one of {choices}" if choices else "")


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize(
    "script",
    [inference, convert_checkpoint, mesh_and_axis_rules, pass_at_k],
    ids=lambda script: script.__name__,
)
def test_folder_5s_other_scripts_have_the_constants_of_their_tables(script, language):
    text = pages.text(settings.HERE, language)
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    tables = [re.findall(r"^\| `([A-Z_]+)=([^`]*)` \| [^|]+ \|$", block, re.M) for block in blocks]
    own = settings.defaults(script.Constants, "laptop")
    if script is inference:  # those that it takes over from a run are named in a sentence
        for name in (*inference.ASKING, *inspect.get_annotations(constants.Arrays)):
            assert f"`{name}`" in text
            del own[name]
    assert [(name, str(value)) for name, value in own.items()] in tables
    said = remarks(script.Constants)
    assert said.keys() == settings.defaults(script.Constants, "laptop").keys() and all(said.values())


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_a_constants_table_equals_its_script(script, language):
    text = pages.text(Path(script.__file__).parent, language)
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    row = r"^\| `([A-Z][A-Z0-9_]+)` \| ([^|]*) \| [^|]* \|$"
    tables = [dict(re.findall(row, block, re.M)) for block in blocks if re.search(row, block, re.M)]
    assert {name: shown(value) for name, value in asdict(script.Constants()).items()} in tables
    assert len(tables) == sum(
        Path(other.__file__).parent == Path(script.__file__).parent for other in SCRIPTS
    )


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_table_of_the_methods_is_the_committed_csvs(language):
    lines, curves = (
        methods.read(settings.HERE / "assets" / f"methods{name}.csv") for name in ("", "_curves")
    )
    text = pages.text(settings.HERE, language)
    of_method = {name: list(rows) for name, rows in itertools.groupby(lines, lambda line: line["method"])}
    assert len(of_method) >= 12 and of_method.keys() <= methods.METHODS.keys()
    for name, rows in of_method.items():
        assert [row["seed"] for row in rows] == list(range(10))
        constants = methods.METHODS[name][0].format(teacher="runs/methods/teacher_hf")
        words = [
            "python",
            "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
            *f"{methods.COMMON} {constants}".split(),
        ]
        assert [row["command"].split() for row in rows] == [[*words, f"SEED={seed}"] for seed in range(10)]
        assert f"| {name} | `{constants}` |" in text or not constants
    rows = methods.table(lines, curves)[2:]
    assert len(rows) == len(of_method) and all(row in text for row in rows)


def test_a_paired_difference_and_its_interval():
    """The mean by hand; the interval against SciPy's percentile bootstrap, other resamples of the pairs."""
    less = [0.02, -0.01, 0.03, 0.05, 0.01, 0.0, 0.04, 0.02, 0.06, -0.02]
    lines = [{"method": "a", "seed": seed, "pass_at_1": 0.5 + 0.01 * seed} for seed in range(10)]
    lines += [line | {"method": "b", "pass_at_1": line["pass_at_1"] + less[line["seed"]]} for line in lines]
    value, low, high = methods.difference(lines, "b", "a", "pass_at_1")
    found = scipy.stats.bootstrap((less,), np.mean, method="percentile", n_resamples=10_000, rng=1)
    assert value == pytest.approx(0.02, rel=1e-9)
    interval = found.confidence_interval  # two draws of 10,000 resamples: the ends' own error is 2e-4
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-3)
    np.random.default_rng(0).shuffle(lines)  # paired by seed, not by place
    assert methods.difference(lines, "b", "a", "pass_at_1") == pytest.approx((value, low, high))


def test_answers_until_ninety_percent_of_the_best():
    """Two evaluations in a row; the best is the highest mean at the last step, 0.8 here."""
    curves = [
        {"method": method, "seed": seed, "step": step, "graded": 128 * step, "held_out": share}
        for method, seed, shares in (
            ("a", 0, (0.2, 0.73, 0.5, 0.73, 0.8)), ("a", 1, (0.2, 0.73, 0.74, 0.5, 0.8)),
            ("b", 0, (0.2, 0.2, 0.3, 0.4, 0.75)),
        )
        for step, share in zip((0, 25, 50, 75, 100), shares)
    ]  # fmt: skip
    assert methods.answers_until(curves, "a") == [12_800, 6_400]
    assert methods.answers_until(curves, "b") == []


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_table_of_the_mismatch_is_the_committed_csvs(language):
    """Means over the seeds: of the first and the last ten steps, and of the test questions."""
    runs, curves = (
        list(csv.DictReader((settings.HERE / "assets" / name).read_text().splitlines()))
        for name in ("mismatch.csv", "mismatch_curves.csv")
    )
    text = pages.text(settings.HERE, language)
    assert list(dict.fromkeys(row["variant"] for row in runs)) == list(sampler_mismatch.MISMATCH)
    for variant in sampler_mismatch.MISMATCH:
        mine = [row for row in runs if row["variant"] == variant]
        assert [int(row["seed"]) for row in mine] == list(sampler_mismatch.SEEDS)
        assert f"{mine[0]['command'].removesuffix(' SEED=0')}\n" in text
        cells = []
        for name, digits in (("mismatch", 3), ("entropy", 2), ("correct", 3)):
            ends = []
            for first, last in ((1, 10), (91, 100)):
                rows = [r for r in curves if r["variant"] == variant and first <= int(r["step"]) <= last]
                assert len(rows) == 10 * len(mine)
                mean = statistics.mean(float(row[name]) for row in rows)
                ends.append(f"{100 * mean:.0f}" if name == "correct" else f"{mean:.{digits}f}")
            cells.append(" → ".join(ends) + " %" * (name == "correct"))
        shares = [100 * float(row["after_answer_accuracy"]) for row in mine]
        cells.append(f"{statistics.mean(shares):.1f} ± {statistics.stdev(shares):.1f} %")
        assert f"| {variant} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_results_table_is_the_committed_csv(language):
    with open(settings.HERE / "assets" / "seeds.csv", newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) >= 3
    text = pages.text(settings.HERE, language)
    for run in runs:
        assert run["command"] in text
        for when in ("before", "after"):
            for key in ("answer_accuracy", "lenient_accuracy", "format_accuracy", "greedy_answer_accuracy"):
                assert f"{100 * float(run[f'{when}_{key}']):.1f}" in text
    cells = []
    for key in ("answer_accuracy", "lenient_accuracy", "format_accuracy", "greedy_answer_accuracy"):
        shares = [[100 * float(run[f"{when}_{key}"]) for run in runs] for when in ("before", "after")]
        cells.append(" → ".join(f"{statistics.mean(s):.1f} ± {statistics.stdev(s):.1f} %" for s in shares))
    seconds = statistics.mean(float(run["seconds"]) for run in runs)
    assert f"| {' | '.join(cells)} | {seconds:.0f} s |" in text
    gains = [
        statistics.mean(float(run[f"after_{key}"]) - float(run[f"before_{key}"]) for run in runs)
        for key in ("answer_accuracy", "lenient_accuracy")
    ]
    assert all(f"{100 * gain:.1f}" in text for gain in gains)


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_second_rungs_figures_are_the_committed_csvs(language):
    with open(settings.HERE / "assets" / "smollm2_seeds.csv", newline="") as file:
        run, second = csv.DictReader(file)
    text = pages.text(settings.HERE, language)
    assert second["command"] == run["command"].replace("SEED=0", "SEED=1")
    for key in ("lenient_accuracy", "greedy_lenient_accuracy"):
        assert all(f"{100 * float(second[f'{when}_{key}']):.1f} %" in text for when in ("before", "after"))
    for figure in (f"{float(second['seconds']):,.0f} s", f"{float(second['seconds_per_step']):.1f} s"):
        assert figure in text, figure
    command, seed = run["command"].rsplit(" SEED=", 1)
    assert seed == "0" and f"{command} RUN_DIR=runs/smollm2_seed_0\n" in text
    for key in ("lenient_accuracy", "greedy_lenient_accuracy", "answer_accuracy"):
        before, after = (f"{100 * float(run[f'{when}_{key}']):.1f} %" for when in ("before", "after"))
        assert f"| {before} | {after} |" in text
    with open(settings.HERE / "assets" / "smollm2_train_log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    assert len(log) == int(run["steps"]) == 100
    memory = max(float(row["memory_host_gib"]) for row in log)
    for figure in (
        f"{float(run['seconds']):,.0f} s",
        f"{float(run['seconds_per_step']):.1f} s",
        f"{memory:.1f} GiB",
    ):
        assert figure in text, figure
    constants = dataclasses.asdict(settings.read(demo.Constants, shlex.split(run["command"])[2:]))
    log = [{name: float(value) for name, value in row.items()} for row in log]
    complaints = [line for line in health.history(log, constants) if "KL" in line]
    assert len(complaints) == 4  # "four times", "up to"
    assert max(float(re.search(r"is ([\d.]+) nats", line)[1]) for line in complaints) == 0.57


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_playgrounds_seeds_are_the_committed_csv(language):
    with open(settings.HERE / "assets" / "playground_seeds.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    text = pages.text(settings.HERE, language)
    for line in lines:
        assert line["steps"] == "25" and float(line["right"]) > 80  # as the headings and the door say
        shown = f"| {line['seed']} | {line['right_before']} % | {line['right']} % | {line['seconds']} |"
        assert shown in text
        for figure in (
            f"{line['memory_mb']} MB",
            f"{line['longest_task_ms']} ms",
            line["load"],
            line["date"],
        ):
            assert figure in text
    door = (ROOT / ("README.md" if language == "english" else "README_ch.md")).read_text()
    assert f"{statistics.mean(float(line['right_before']) for line in lines):.0f} %" in door


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_table_of_pass_at_k_is_the_committed_csv(language):
    with open(settings.HERE / "assets" / "pass_at_k.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    text = pages.text(settings.HERE, language).replace(" 到 ", " to ")
    shown = 0
    for k in dict.fromkeys(line["k"] for line in lines):
        cells = []
        for reading in pass_at_k.READINGS:
            mine = [line for line in lines if (line["k"], line["reading"]) == (k, reading)]
            [untrained] = [line for line in mine if line["model"] == "untrained"]
            share, low, high = (100 * float(untrained[name]) for name in ("pass_at_k", "low", "high"))
            trained = [100 * float(line["pass_at_k"]) for line in mine if line is not untrained]
            assert len(trained) == 3
            cells.append(f"{share:.1f} % ({low:.1f} to {high:.1f})")
            cells.append(f"{statistics.mean(trained):.1f} ± {statistics.stdev(trained):.1f} %")
        shown += f"| {k} | {' | '.join(cells)} |" in text
    assert shown == text.count(" to ", text.index("| k |"), text.index("[`pass_at_k.csv`]")) // 2 == 6


@pytest.mark.parametrize("folder", ["1_Q_Learning", "2_Cart_Pole_DQN", "3_Pendulum"])
def test_every_mistake_can_still_stand_in_its_functions_place(folder):
    """A row that no longer fits the script would describe a run that nobody can repeat."""
    rows = load(folder, "mistakes").ROWS
    for row in rows:
        for module, name, new in row.changes:
            old = getattr(module, name)
            if callable(old):
                inspect.signature(new).bind(*inspect.signature(old).parameters)
            else:
                assert type(new) is type(old) and new != old
    for kind in ("mistakes", "exercises"):
        with open(ROOT / folder / "assets" / f"{kind}.csv", newline="") as file:
            measured = {(line["row"], line["constants"]) for line in csv.DictReader(file)}
        assert measured == {(r.name, " ".join(r.constants)) for r in rows if r.name[0] == kind[0].upper()}


# --- folder 2: every row of its tables, computed again from the committed CSV files

DQN = ROOT / "2_Cart_Pole_DQN"


def rows_of(path, column):
    """The lines of a CSV file, grouped by one column, in the order of first appearance."""
    groups = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            groups.setdefault(line[column], []).append(line)
    return groups.items()


def cart_pole_cells(lines, column="eval_return"):
    """`mean ± sample standard deviation | lowest | solved | at 500.0` of a group of lines on CartPole."""
    values = [float(line[column]) for line in lines]
    full = sum(value == 500 for value in values)
    return (
        f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} | {min(values):.1f} | "
        f"{reach_475(lines, column)} | {full} / {len(values)}"
    )


def reach_475(lines, column):
    """How many means reach Gymnasium's threshold."""
    return f"{sum(float(line[column]) >= 475 for line in lines)} / {len(lines)}"


def minus(text):
    return text.replace("-", "−")


def paired_cell(pair):
    """What `paired` of the study returned, as the tables have it."""
    mean, low, high = (float(pair[name]) + 0.0 for name in ("mean_difference", "low", "high"))
    return minus(re.sub(r"-(0\.0)\b", r"\1", f"{mean:.1f} [{low:.1f}, {high:.1f}]"))


def expected_rows():
    assets, paired = DQN / "assets", load("2_Cart_Pole_DQN", "study").paired
    by_command = dict(rows_of(assets / "seeds.csv", "command"))
    for command, lines in by_command.items():
        yield f"| `{command}` | {cart_pole_cells(lines)} |"
    [sixty] = [command for command in by_command if command.endswith("EVAL_EPISODES=30")]
    for command in by_command:
        if command.startswith(f"{sixty} "):
            both = [
                {"changed": name, "eval_return": float(line["eval_return"])}
                for name in (command, sixty)
                for line in by_command[name]
            ]
            yield f"| `{command.removeprefix(sixty)[1:]}` | {paired_cell(paired(both, command, sixty))} |"
    with open(assets / "compare_paired.csv", newline="") as file:
        pairs = {pair["changed"]: pair for pair in csv.DictReader(file) if pair["against"] == "unchanged"}
    for i, (changed, lines) in enumerate(rows_of(assets / "compare.csv", "changed"), start=1):
        label, against = (f"`{changed}`", paired_cell(pairs[changed])) if i > 1 else (changed, "")
        cells = cart_pole_cells(lines)
        yield f"| A{i} | {label} | {cells} | {against} |"
    for learner, lines in rows_of(assets / "tuned.csv", "learner"):
        cells = cart_pole_cells(lines)
        yield f"| `{learner}` | `{lines[0]['changed']}` | {cells} |"
    for learner, lines in rows_of(assets / "tune.csv", "learner"):
        means = {}
        for line in lines:
            means.setdefault(float(line["learning_rate"]), {}).setdefault(
                int(line["target_sync_interval"]), []
            ).append(float(line["eval_return"]))
        for rate, of_rate in means.items():
            cells = " | ".join(f"{statistics.mean(values):.1f}" for values in of_rate.values())
            yield f"| `{learner}` | {rate} | {cells} |"


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_every_row_of_the_dqn_tables_is_the_committed_csv(language):
    lines = pages.text(DQN, language).splitlines()
    expected = list(expected_rows())
    study = load("2_Cart_Pole_DQN", "study")
    rates = {rate for rate, _ in study.GRID}
    assert len(expected) == 6 + 2 + len(study.COMPARISON) + 2 + 2 * len(rates)
    for row in expected:
        assert row in lines
    # the pair that differs by Double DQN only is quoted in the text
    with open(DQN / "assets" / "compare_paired.csv", newline="") as file:
        [quoted] = [pair for pair in csv.DictReader(file) if pair["against"] != "unchanged"]
    assert paired_cell(quoted) in "\n".join(lines)
    changed_copies = [rows_of(DQN / "assets" / f"{name}.csv", "row") for name in ("mistakes", "exercises")]
    for row, runs in itertools.chain(*changed_copies):
        shown_rows = [line for line in lines if line.startswith(f"| {row} |")]
        assert len(shown_rows) == 1 and shown_rows[0].endswith(f"| {cart_pole_cells(runs)} |")


# --- folder 3

PPO = Path(pendulum.__file__).parent


def mean_and_spread(lines, column="eval_return"):
    values = [float(line[column]) for line in lines]
    return minus(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")


def ppo_cells(lines):
    lowest = f"{min(float(line['eval_return']) for line in lines):.1f}".replace("-", "−")
    return f"{mean_and_spread(lines)} | {lowest} |"


def expected_rows_of_folder_3():
    """Each row of the tables, or how it ends where its second cell is in words."""
    assets = PPO / "assets"
    for command, lines in rows_of(assets / "seeds.csv", "command"):
        yield "", f"| `{command}` | {ppo_cells(lines)}"
    for i, (changed, lines) in enumerate(rows_of(assets / "compare.csv", "changed"), start=1):
        yield "", f"| A{i} | {changed if changed == 'unchanged' else f'`{changed}`'} | {ppo_cells(lines)}"
    for command, lines in rows_of(assets / "reinforce_seeds.csv", "command"):
        yield "", f"| `{command}` | {cart_pole_cells(lines)} |"
    for command, lines in rows_of(assets / "ppo_seeds.csv", "command"):
        yield "", f"| `{command}` | {cart_pole_cells(lines)} |"
    for i, (changed, lines) in enumerate(rows_of(assets / "reinforce_compare.csv", "changed"), start=1):
        cells = cart_pole_cells(lines)
        yield "", f"| R{i} | `{changed}` | {cells} |"
    scripts = {row.name: row.script for row in load("3_Pendulum", "mistakes").ROWS}
    for name in ("mistakes", "exercises"):
        for row, lines in rows_of(assets / f"{name}.csv", "row"):
            cells = f"{cart_pole_cells(lines)} |" if scripts[row] is reinforce else ppo_cells(lines)
            if name == "mistakes" and scripts[row] is not reinforce:
                explained = statistics.mean(float(line["last_explained_variance"]) for line in lines)
                cells += f" {explained:.2f} |"
            yield f"| {row} |", f"| {cells}"
    with open(assets / "reinforce_gradient_variance.csv", newline="") as file:
        measured = list(csv.DictReader(file))
    for step in dict.fromkeys(line["env_step"] for line in measured):
        at = {(ln["reward_to_go"], ln["baseline"]): ln for ln in measured if ln["env_step"] == step}
        columns = [("False", "no_baseline"), *(("True", name) for name in reinforce.BASELINES)]
        traces = " | ".join(f"{float(at[column]['trace']):,.0f}" for column in columns)
        yield (
            f"| {int(step):,} (",
            f"| {traces} | "
            + "{:,.0f} ± {:,.0f} |".format(
                *(float(at["True", "critic_baseline"][key]) for key in ("squared_norm", "squared_norm_error"))
            ),
        )


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_every_row_of_folder_3s_tables_is_the_committed_csv(language):
    lines = pages.text(PPO, language).splitlines()
    expected = list(expected_rows_of_folder_3())
    assert len(expected) > 50
    for start, end in expected:
        assert sum(line.startswith(start) and line.endswith(end) for line in lines) == 1, (start, end)
    with open(PPO / "assets" / "pendulum_optimum.csv", newline="") as file:
        best = statistics.mean(float(line["return"]) for line in csv.DictReader(file))
    assert f"{best:.1f}".replace("-", "−") in "\n".join(lines)


# --- folder 5, its chapter


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_what_is_learned_when_is_the_committed_log(language):
    """The lab book's table, and what the chapter says of it."""
    with open(settings.HERE / "assets" / "train_log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    text = pages.text(settings.HERE, language)
    names = ("format_ok", "correct_lenient", "zero_variance")
    shares = {int(row["step"]): [100 * float(row[name]) for name in names] for row in log}
    for step in (1, 13, 25):
        assert f"| {step} | {' | '.join(f'{share:.0f} %' for share in shares[step])} |" in text
    last = [statistics.mean(shares[step][i] for step in range(81, 101)) for i in range(3)]
    assert f"| {' | '.join(f'{share:.0f} %' for share in last)} |" in text
    chapter = (settings.HERE / ("README.md" if language == "english" else "README_ch.md")).read_text()
    assert f" {last[2]:.0f} %" in chapter  # groups without signal, the last twenty steps
    read = [shares[step][1] for step in (1, 13, 25)]
    assert 0.7 < (read[1] - read[0]) / (read[2] - read[0]) < 0.8  # "three quarters of the reading"
