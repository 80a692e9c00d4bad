"""What the READMEs say about the script is what the script says."""

import csv
import itertools
import re
import statistics
from pathlib import Path

import cart_pole_dqn
import grpo_llama3_1_8b_demo as demo
import grpo_mnist
import mistakes
import pytest
import Q_Learning

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [Q_Learning, cart_pole_dqn, grpo_mnist]  # one column of constants; folder 5 has two
FOLDERS = [ROOT, *(Path(script.__file__).parent for script in SCRIPTS), ROOT / "5_GRPO_Maxtext"]


def shown(value):
    """A constant's value as the tables write it."""
    return "empty" if value == "" else f"{value}"


@pytest.mark.parametrize("language", ["README.md", "README_ch.md"])
def test_the_constants_table_equals_the_script(language):
    text = (demo.HERE / language).read_text()
    rows = re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \| ([^|]*) \| ([^|]*) \|", text, re.M)
    table = {name: (laptop, tpu) for name, laptop, tpu in rows}
    long = {"SYSTEM_PROMPT", "TEMPLATE", "GENERATION_CONFIGS"}  # shown as text elsewhere
    script = {
        name: tuple(map(shown, value if isinstance(value, demo.Pair) else (value, value)))
        for name, value in demo.DEFAULTS.items()
        if name not in long
    }
    assert table == script


@pytest.mark.parametrize("language", ["README.md", "README_ch.md"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_a_constants_table_equals_its_script(script, language):
    text = (Path(script.__file__).parent / language).read_text()
    table = dict(re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \| ([^|]*) \| [^|]* \|$", text, re.M))
    assert table == {name: shown(value) for name, value in script.DEFAULTS.items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_both_languages_have_the_same_headings_tables_pictures_and_code(folder):
    english, chinese = ((folder / name).read_text() for name in ("README.md", "README_ch.md"))
    for pattern in (r"^#+ ", r"^\|", r"!\[[^\]]*\]\(([^)]*)\)", r"^```"):
        assert len(re.findall(pattern, english, re.M)) == len(re.findall(pattern, chinese, re.M)), pattern
    commands = [re.findall(r"^(?:make|python|pip|\.venv).*", text, re.M) for text in (english, chinese)]
    assert [c.split("#")[0].strip() for c in commands[0]] == [c.split("#")[0].strip() for c in commands[1]]
    figures = [set(re.findall(r"\d+\.\d+", text)) for text in (english, chinese)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
@pytest.mark.parametrize("language", ["README.md", "README_ch.md"])
def test_every_local_link_resolves(folder, language):
    for target in re.findall(r"\]\(([^)]+)\)", (folder / language).read_text()):
        if not target.startswith(("http", "#")):
            assert (folder / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("language", ["README.md", "README_ch.md"])
def test_the_results_table_is_the_committed_csv(language):
    with open(demo.HERE / "assets" / "seeds.csv", newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) >= 3
    text = (demo.HERE / language).read_text()
    for run in runs:
        assert run["command"] in text
        for when in ("before", "after"):
            for key in ("answer_accuracy", "format_accuracy", "greedy_answer_accuracy"):
                assert f"{100 * float(run[f'{when}_{key}']):.1f}" in text


@pytest.mark.parametrize("folder", mistakes.FOLDERS)
def test_every_mistake_still_finds_its_place_in_the_script(folder):
    """A row whose text has gone from the script would describe a run that nobody can repeat."""
    name, rows, _ = mistakes.FOLDERS[folder]
    text = (ROOT / folder / name).read_text()
    for row in rows:
        changed = mistakes.changed_text(text, row)
        assert (changed != text) == bool(row.changes)
        compile(changed, row.name, "exec")
    for kind in ("mistakes", "exercises"):
        with open(ROOT / folder / "assets" / f"{kind}.csv", newline="") as file:
            measured = {(line["row"], line["constants"]) for line in csv.DictReader(file)}
        assert measured == {(r.name, " ".join(r.constants)) for r in rows if r.name[0] == kind[0].upper()}


# --- folder 2: every row of its tables, computed again from the committed CSV files

DQN = Path(cart_pole_dqn.__file__).parent


def rows_of(path, column):
    """The lines of a CSV file, grouped by one column, in the order of first appearance."""
    groups = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            groups.setdefault(line[column], []).append(line)
    return groups.items()


def spread(lines, column="eval_return"):
    """`mean ± std | lowest | seeds at 500.0` of a group of lines."""
    values = [float(line[column]) for line in lines]
    solved = sum(value == 500 for value in values)
    return (
        f"{statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f} | {min(values):.1f} | "
        f"{solved} / {len(values)}"
    )


def solved(lines, column):
    return f"{sum(float(line[column]) == 500 for line in lines)} / {len(lines)}"


def expected_rows():
    assets = DQN / "assets"
    for command, lines in rows_of(assets / "seeds.csv", "command"):
        yield f"| `{command}` | {spread(lines)} | {solved(lines, 'best_eval_return')} |"
    for i, (changed, lines) in enumerate(rows_of(assets / "compare.csv", "changed"), start=1):
        name = changed if changed == "unchanged" else f"`{changed}`"
        yield f"| A{i} | {name} | {spread(lines)} | {solved(lines, 'best_eval_return')} |"


@pytest.mark.parametrize("language", ["README.md", "README_ch.md"])
def test_every_row_of_the_dqn_tables_is_the_committed_csv(language):
    lines = (DQN / language).read_text().splitlines()
    expected = list(expected_rows())
    assert len(expected) >= 3 + len(cart_pole_dqn.COMPARISON)
    for row in expected:
        assert row in lines
    changed_copies = [rows_of(DQN / "assets" / f"{name}.csv", "row") for name in ("mistakes", "exercises")]
    for row, runs in itertools.chain(*changed_copies):
        shown_rows = [line for line in lines if line.startswith(f"| {row} |")]
        assert len(shown_rows) == 1 and shown_rows[0].endswith(f"| {spread(runs)} |")
    for _, runs in rows_of(ROOT / "benchmarks" / "dqn_against_peers.csv", "who"):
        seconds = [float(run["seconds"]) for run in runs]
        end = f"| {len(runs)} | {statistics.mean(seconds):.1f} s | {spread(runs).split(' |')[0]} |"
        assert any(line.endswith(end) for line in lines), end
