"""The course says what is so: links, linked lines of code, both languages, stated times, cells, figures."""

import ast
import csv
import re
import statistics
import subprocess
import sys
from pathlib import Path

import figures
import line_links
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT, *sorted(ROOT.glob("[1-5]_*"))]
READMES = [path for folder in FOLDERS for path in sorted(folder.glob("README*.md"))]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md"]
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README_ch.md"))
LANGUAGES = {"README.md": ENGLISH, "README_ch.md": CHINESE}
FENCE = re.compile(r"^```.*?^```|``.+?``", re.M | re.S)  # blocks of code, and spans that show markup


def name_of(path):
    return str(path.relative_to(ROOT))


# --- links


def anchors(page):
    """What GitHub makes of headings: lower case, no punctuation, hyphens for spaces, -1 for a second one."""
    found = []
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{again}" if again else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_resolves_with_its_anchor(page):
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    assert links
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if target.suffix == ".md" and anchor:
            assert anchor in anchors(target), link
        elif anchor:
            line = re.fullmatch(r"L(\d+)", anchor)
            assert line and int(line[1]) <= len(target.read_text().splitlines()), link


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_every_linked_line_holds_the_text_that_is_shown(page):
    for link in line_links.LINE_LINK.finditer(page.read_text()):
        lines = (page.parent / link["path"]).read_text().splitlines()
        shown = lines[int(link["line"]) - 1]
        assert link["text"] in shown, f"{link[0]} is {shown!r}; after a change in a script: make links"


def test_lines_that_moved_are_found_again():
    moved = re.sub(r"#L\d+\)", "#L1)", ENGLISH)
    assert moved != ENGLISH
    assert line_links.renewed(moved, ROOT) == ENGLISH


@pytest.mark.parametrize("text", ["a text of no script", "import"])
def test_a_linked_text_must_stand_on_one_line(text):
    with pytest.raises(ValueError, match="link a text that stands on one"):
        line_links.line_of(ROOT / "1_Q_Learning" / "Q_Learning.py", text)


# --- modules


def modules(text):
    """The text of each module, under its heading of the second level."""
    parts = re.split(r"^## (.+)$", text, flags=re.M)
    return [body for title, body in zip(parts[1::2], parts[2::2]) if re.match(r"Module \d|模組", title)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_formula_links_to_the_line_that_computes_it_and_to_its_test(language):
    lines = [line for line in LANGUAGES[language].splitlines() if line.strip()]
    formulas = [i for i, line in enumerate(lines) if line.startswith("$$")]
    assert len(formulas) >= 15
    for i in formulas:
        code, check = line_links.LINE_LINK.finditer(lines[i + 1])
        assert not code["path"].startswith("tests/"), lines[i + 1]
        assert re.match(r"tests/test_\w+\.py$", check["path"]), lines[i + 1]
        assert check["text"].startswith("test_")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_module_has_a_picture_with_words_and_three_questions_with_folded_answers(language):
    assert len(modules(LANGUAGES[language])) == 7
    for number, module in enumerate(modules(LANGUAGES[language]), start=1):
        pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", module)
        assert pictures and all(len(words) > 15 for words, _ in pictures)
        assert re.findall(r"^\*\*(\d\.\d)\*\*", module, re.M) == [f"{number}.{i}" for i in (1, 2, 3)]
        assert len(re.findall(r"<details><summary>.+?</summary>\n\n.+?\n\n</details>", module, re.S)) == 3


@pytest.mark.parametrize("picture", sorted(ROOT.glob("[1-5]_*/assets/*.gif")), ids=name_of)
def test_an_animation_is_below_a_megabyte(picture):
    assert picture.stat().st_size < 10**6


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_stated_total_is_the_sum_of_the_map_and_below_20_minutes(language):
    rows = re.findall(r"^\| \[\d\]\(#.*\| (\d+) s \| \[.*$", LANGUAGES[language], re.M)
    assert len(rows) == 7
    total = sum(map(int, rows))
    assert f" {total} s" in LANGUAGES[language] and total < 20 * 60


def test_the_maps_times_are_not_below_those_of_the_committed_runs():
    """Imports come on top: a second in folder 1, ten in folder 5, as their READMEs say."""

    def slowest(folder):
        with open(ROOT / folder / "assets" / "seeds.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        return max(float(row["seconds"]) for row in rows if "MNIST_PATH" not in row["command"])

    times = dict(re.findall(r"\[`(\w+)\.py`\].*\| (\d+) s \|", ENGLISH))
    assert slowest("1_Q_Learning") + 1 <= int(times["Q_Learning"])
    assert slowest("4_GRPO_MNIST") <= int(times["grpo_mnist"])
    assert slowest("5_GRPO_Maxtext") + 10 <= int(times["grpo_llama3_1_8b_demo"])


def test_every_decimal_figure_is_one_of_the_folders():
    """The root measures nothing itself. 3.12 and 2.0 are versions: of Python, of the licence."""
    folders = "".join(
        path.read_text() for path in READMES if path.name == "README.md" and path.parent != ROOT
    )
    text = re.sub(r"^\*\*\d\.\d\*\*", "", re.sub(r"\]\([^)]*\)", "", ENGLISH), flags=re.M)
    assert set(re.findall(r"\d+\.\d+", text)) <= {*re.findall(r"\d+\.\d+", folders), "3.12", "2.0", "3.1"}


def committed(name, **wanted):
    """The lines of a committed CSV file that have these values."""
    with open(ROOT / name, newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[k] == v for k, v in wanted.items())]
    assert rows, (name, wanted)
    return rows


def mean(rows, column, factor=1.0):
    return factor * statistics.mean(float(row[column]) for row in rows)


def spread(rows, column):
    return statistics.stdev(float(row[column]) for row in rows)


def results():
    """The texts in which the root READMEs tell what was reached, computed again."""
    rows = committed("1_Q_Learning/assets/seeds.csv")
    yield f"{max(float(row['max_abs_error']) for row in rows):.3g}"
    yield f" {mean(rows, 'seconds'):.2f} "
    rows = committed("3_Pendulum/assets/seeds.csv", command="python 3_Pendulum/pendulum.py")
    yield f"{mean(rows, 'eval_return'):.1f} ± {spread(rows, 'eval_return'):.1f}"
    yield f"{mean(committed('benchmarks/pendulum_optimum.csv'), 'return'):.1f}"
    rows = committed("3_Pendulum/assets/compare.csv", changed="CLIP_EPSILON=1e9")
    yield f"{mean(rows, 'eval_return'):.1f}"
    study = "4_GRPO_MNIST/assets/compare.csv"
    rows = [row for row in committed("4_GRPO_MNIST/assets/seeds.csv") if "MNIST_PATH" in row["command"]]
    for method in ("grpo", "ppo", "cross_entropy"):
        yield f" {mean(rows, method, 100):.2f} %"
    for g in (2, 4, 8, 16, 64):
        changed = f"NUM_GENERATIONS={g} BATCH_SIZE={1024 // g} NUM_EPOCHS={max(64 // g, 1)}"
        rows = committed(study, changed=changed, method="grpo")
        sample_spread = 100 * statistics.stdev(
            float(row["test_accuracy"]) for row in rows
        )  # as folder 4 has it
        accuracy = f"{mean(rows, 'test_accuracy', 100):.2f} ± {sample_spread:.2f}"
        yield f"| {g} | {1024 // g} | {accuracy} | {mean(rows, 'zero_variance'):.2f} |"
    rows = committed(study, changed="BETA=1.0", method="grpo")
    yield f" {mean(rows, 'test_accuracy', 100):.2f} %"
    yield f" {mean(rows, 'test_sampled_accuracy', 100):.2f} %"
    rows = committed("5_GRPO_Maxtext/assets/seeds.csv")
    yield f" {mean(rows, 'before_answer_accuracy', 100):.1f} %"
    yield f" {mean(rows, 'after_answer_accuracy', 100):.1f} %"


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_was_reached_is_what_the_csv_files_say(language):
    text = re.sub(r"\s+", " ", LANGUAGES[language])
    for figure in results():
        assert figure.replace("-", "−") in text or figure in text, figure  # prose has a minus sign


# --- languages


def skeleton(text):
    """What must be equal in both languages, in order."""
    body = FENCE.sub("", text)
    tables = [row for row in body.splitlines() if row.startswith("|")]
    return {
        "headings": [mark for mark in re.findall(r"^(#+) ", body, re.M)],
        "formulas": re.findall(r"^\$\$.*$", body, re.M),
        "line links": [link.groups() for link in line_links.LINE_LINK.finditer(body)],
        "links": [
            re.sub(r"README(_ch)?\.md", "README", link.split("#")[0])
            for link in re.findall(r"\]\(([^)\s]+)\)", body)
        ][1:],  # the first one leads to the other language
        "pictures": re.findall(r"!\[[^\]]*\]\(([^)]+)\)", body),
        "commands": [re.sub(r" *#.*", "", block) for block in FENCE.findall(text)],
        "cells": [row.count("|") for row in tables],
        "code in tables": [re.findall(r"`[^`]+`", row) for row in tables],
        "figures in tables": [
            re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\([^)]*\)", "", row)) for row in tables
        ],
        "decimal figures": sorted(re.findall(r"\d+\.\d+", re.sub(r"\]\([^)]*\)", "", body))),
    }


@pytest.mark.parametrize("what", skeleton(ENGLISH))
def test_both_languages_say_the_same(what):
    assert skeleton(CHINESE)[what] == skeleton(ENGLISH)[what]


def test_every_symbol_is_a_name_in_some_script():
    table = re.search(r"^\| notation .*?\n\n", ENGLISH, re.M | re.S)[0].strip()
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[2])]
    assert len(names) > 25
    code = "".join(path.read_text() for path in ROOT.glob("[1-5]_*/*.py"))
    for name in names:
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code), name


# --- scripts cell by cell

SCRIPTS = [
    "1_Q_Learning/Q_Learning.py",
    "2_Cart_Pole_DQN/cart_pole_dqn.py",
    "3_Pendulum/pendulum.py",
    "3_Pendulum/reinforce.py",
    "4_GRPO_MNIST/grpo_mnist.py",
    "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
    "5_GRPO_Maxtext/mesh_and_axis_rules.py",
]
CELL_BY_CELL = r"""
import re, sys, types
for path in sys.argv[1:]:
    module = types.ModuleType("stepped_" + path.rsplit("/", 1)[1][:-3])
    module.__file__ = path
    sys.modules[module.__name__] = module  # decorators of classes look there
    sys.path.insert(0, path.rsplit("/", 1)[0])
    for name in ("settings", "pictures", "data"):  # of the folder before
        sys.modules.pop(name, None)
    for cell in re.split(r"^(?=# %% )", open(path).read(), flags=re.M):
        exec(compile(cell, path, "exec"), module.__dict__)
"""


@pytest.mark.parametrize("path", SCRIPTS)
def test_sections_are_marked_and_a_mark_never_cuts_a_function(path):
    cells = re.split(r"^(?=# %% )", (ROOT / path).read_text(), flags=re.M)
    titles = [re.match(r"# %% (.+?) -*\n", cell)[1] for cell in cells[1:]]
    assert len(titles) >= 6 and titles[0] == "Constants" and len(set(titles)) == len(titles)
    for cell in cells:
        ast.parse(cell)


@pytest.mark.parametrize("folders", ["1234", "5"])
def test_cell_by_cell_a_script_prints_nothing_and_writes_nothing(folders, tmp_path):
    """Also what an import does: the command line's last lines need `__name__ == "__main__"`."""
    paths = [str(ROOT / path) for path in SCRIPTS if path[0] in folders]
    before = {path: path.stat().st_mtime_ns for path in ROOT.glob("[1-5]_*/*")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", CELL_BY_CELL, *paths], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in ROOT.glob("[1-5]_*/*")} == before


# --- commands


def constants_of(script):
    """Names that a script takes as NAME=value: fields of its dataclass in folder 5, elsewhere any name."""
    text = script.read_text()
    if "class Constants:" not in text:
        return set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
    if "import grpo_llama3_1_8b_demo as demo" in text:  # takes the main script's constants, too
        text += (script.parent / "grpo_llama3_1_8b_demo.py").read_text()
    return set(re.findall(r"^    ([A-Z][A-Z0-9_]*): ", text, re.M))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_names_a_script_and_constants_that_exist(page):
    """What readers copy. That a script runs, and refuses what it does not know, its own tests show."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    spans = re.findall(r"`(python [^`\n]+)`", page.read_text())
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()] + spans
    assert lines
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in lines:
        words = line.split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words and words[0].endswith("python") and words[1].endswith(".py"):
            names = constants_of(ROOT / words[1])
            for name in re.findall(r"(?<!\S)([A-Z][A-Z0-9_]*)=", line):
                assert name in names, line


# --- make figures


def test_contributing_lists_every_job_with_its_minutes():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", text, re.M)
    expected = [
        (
            job.command,
            ", ".join(f"`{name}`" for name in job.files.values()),
            f"{job.minutes or 'not measured'}",
        )
        for job in figures.JOBS
    ]
    assert [row for row in rows if row[0].startswith(("python", "make "))] == expected
    total = sum(job.minutes or 0 for job in figures.JOBS)
    assert f"{total:.1f} minutes" in text


def test_every_committed_figure_is_made_by_exactly_one_command():
    made = [name for job in figures.JOBS for name in job.files.values()]
    assert len(made) == len(set(made))
    assets = {name_of(path) for path in ROOT.glob("[1-5]_*/assets/*")}
    tables = {name_of(path) for path in ROOT.glob("benchmarks/*.csv")}
    assert {name for name in made if "/assets/" in name} == assets
    assert tables <= {name for name in made if "/assets/" not in name}


@pytest.mark.parametrize("job", figures.JOBS, ids=lambda job: job.command)
def test_a_commands_script_exists_and_names_what_it_writes(job):
    program, script, *_ = job.command.split()
    if program == "make":
        assert re.search(rf"^{script}:", (ROOT / "Makefile").read_text(), re.M)
        return
    assert program == "python"
    text = (ROOT / script).read_text()
    text += "".join(path.read_text() for path in (ROOT / script).parent.glob("parts/*.py"))
    for name in job.files:
        assert name in text or job.writes_itself or job.rows, name


def test_figures_copies_what_a_run_left(tmp_path, monkeypatch, capsys):
    """The whole way once, with the quickest job: folder 1's seeds, each command as it stands in the table."""
    (tmp_path / "1_Q_Learning" / "assets").mkdir(parents=True)
    committed = (ROOT / "1_Q_Learning" / "assets" / "seeds.csv").read_text()
    (tmp_path / "1_Q_Learning" / "assets" / "seeds.csv").write_text(committed)
    monkeypatch.setattr(figures, "HOME_OF_FILES", tmp_path)
    figures.seeds("1_Q_Learning/assets/seeds.csv", figures.q_learning_rows)
    columns = ["seed", "max_abs_error", "optimal_from_every_state", "return_of_last_1000_episodes"]
    tables = [
        [{c: row[c] for c in columns} for row in csv.DictReader(text.splitlines())]
        for text in (committed, (tmp_path / "1_Q_Learning" / "assets" / "seeds.csv").read_text())
    ]
    assert tables[0] == tables[1]
