"""The course says what is so: the door, symbols, drawings, cells, commands, committed figures."""

import ast
import csv
import difflib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import drawings
import figures
import numpy as np
import pages
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*pages.ALL, ROOT / "CONTRIBUTING.md"]
DOORS = [ROOT / "README.md", ROOT / "README_ch.md"]


def name_of(path):
    return str(path.relative_to(ROOT))


# --- the scripts beside each other


def code_of(path):
    """Its lines without comments, docstrings and line breaks of taste."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


@pytest.mark.parametrize(
    "one, other, most",
    [
        ("3_Pendulum/reinforce.py", "3_Pendulum/ppo.py", 300),
        ("3_Pendulum/ppo.py", "3_Pendulum/pendulum.py", 160),
        ("3_Pendulum/ppo.py", "4_GRPO_MNIST/grpo_mnist.py", 300),
    ],
)
def test_a_diff_of_two_scripts_is_the_lesson(one, other, most):
    changes = difflib.ndiff(code_of(one), code_of(other))
    assert 50 < sum(line[:2] in ("+ ", "- ") for line in changes) <= most


# --- the door


@pytest.mark.parametrize("door", DOORS, ids=name_of)
def test_the_doors_transcript_is_the_committed_one(door):
    """Eight answers with their points, and advantages that follow from the points: (R - mean) / std."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    text = door.read_text()
    assert group["question"] in text
    rewards = np.array([answer["reward"] for answer in group["before"]])
    advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
    for answer, advantage in zip(group["before"], advantages, strict=True):
        assert answer["advantage"] == pytest.approx(advantage, abs=1e-4)  # Tunix adds 1e-6 to the std
        shown = f"{advantage:+.2f}".replace("-", "−")
        assert f"| `{answer['text']}` | {answer['reward']:.1f} | {shown} |" in text
    assert f" {rewards.mean():.2f}" in text
    [after] = set(group["after"])  # all eight the same
    assert len(group["after"]) == 8 and f"`{after}`" in text


@pytest.mark.parametrize("door", DOORS, ids=name_of)
def test_the_stated_total_is_the_sum_of_the_map_and_below_20_minutes(door):
    rows = re.findall(r"^\| \[\d.*\| (\d+) s \|$", door.read_text(), re.M)
    assert len(rows) == 7
    total = sum(map(int, rows))
    assert f" {total} s" in " ".join(door.read_text().split()) and total < 20 * 60


@pytest.mark.parametrize("door", DOORS, ids=name_of)
def test_the_maps_times_are_those_of_the_first_runs(door):
    with open(ROOT / "benchmarks" / "default_runs.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "first"]
    seconds = {row["script"].split()[0].split("/")[1]: float(row["seconds"]) for row in rows}
    for text, stated in re.findall(r"^\| \[\d(.*)\| (\d+) s \|$", door.read_text(), re.M):
        scripts = re.findall(r"\[`(\w+\.py)`\]", text)
        assert scripts and abs(sum(map(seconds.pop, scripts)) - int(stated)) < 1
    assert not seconds


def test_every_decimal_figure_of_the_door_is_one_of_the_folders():
    """The root measures nothing itself. 3.12, 2.0 and 3.1 are versions: of Python, the licence, Llama."""
    folders = "".join(page.read_text() for page in pages.ENGLISH if page.parent != ROOT)
    transcript = re.compile(r"^\| `<reasoning>.*$", re.M)
    text = transcript.sub("", re.sub(r"\]\([^)]*\)", "", DOORS[0].read_text()))
    assert set(re.findall(r"\d+\.\d+", text)) <= {*re.findall(r"\d+\.\d+", folders), "3.12", "2.0", "3.1"}


def test_every_symbol_is_a_name_in_some_script():
    for glossary in ("GLOSSARY.md", "GLOSSARY_ch.md"):
        table = re.search(r"^\| (?:notation|記號) .*?\n\n", (ROOT / glossary).read_text(), re.M | re.S)[0]
        names = [
            name
            for row in table.strip().splitlines()[2:]
            for name in re.findall(r"`([^`]+)`", row.split("|")[2])
        ]
        assert len(names) > 25
        code = "".join(path.read_text() for path in ROOT.glob("[1-5]_*/*.py"))
        for name in names:
            assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code), name


# --- drawings


def test_a_dark_twin_is_its_picture_with_the_lightness_turned_round():
    """Every one that is committed; 256 colours stand for all, and an edge is a mixture of two."""
    twins = drawings.twins()
    assert len(twins) > 15
    for path in twins:
        light = np.asarray(
            Image.open(path.with_stem(path.stem.removesuffix("_dark"))).convert("RGB"), dtype=float
        )
        dark = np.asarray(Image.open(path).convert("RGB"), dtype=float)
        assert dark.shape == light.shape, path
        assert np.abs(dark - drawings.darkened(light)).mean() < 2, path  # of 255


def test_darkening_by_hand():
    """White is the page, black is white, grey turns round, a hue stays: pure red has lightness 1/2."""
    colours = np.array([[[255, 255, 255], [0, 0, 0], [255, 0, 0], [200, 200, 200]]], np.uint8)
    white, black, red, grey = drawings.darkened(colours)[0].tolist()
    assert white == [13, 17, 23] and black == [255, 255, 255] and red == [255, 17, 23]
    assert grey == [round(p + 55 / 255 * (255 - p)) for p in (13, 17, 23)]


def test_the_push_of_a_group_on_its_tokens_by_hand():
    """What all eight answers share cancels; at a fork each side gets the sum of its own advantages."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    right, wrong = drawings.pushes(group, 2), drawings.pushes(group, 5)
    assert right[:3] == pytest.approx([0, 0, 0], abs=1e-3)
    assert wrong[:3] == pytest.approx([0, 0, 0], abs=1e-3)
    minus = 1.65496 + 3 * 0.50368  # the four answers that subtract; the other four have the rest of 0
    assert (right[3], wrong[3]) == pytest.approx((minus, -minus), abs=1e-3)
    p = np.exp(-0.82996)  # of </reasoning> after 14-7=7
    assert right[7] == pytest.approx(1.65496 - p * minus, abs=1e-3)
    assert max(map(abs, right[4:7] + right[8:])) < 0.02  # certain already: nothing is left to push


def test_the_map_counts_the_weights_of_the_networks():
    """4 inputs or 3, two hidden layers of 64, 2 outputs; 784 pixels, two layers of 128, 10 digits."""

    def weights(*sizes):
        return sum((rows + 1) * columns for rows, columns in itertools.pairwise(sizes))

    text = (ROOT / "tools" / "drawings.py").read_text()
    actor = weights(3, 64, 64, 2)  # mean and spread
    for count in (weights(4, 64, 64, 2), actor + weights(3, 64, 64, 1), weights(784, 128, 128, 10)):
        assert f"{count:,} weights" in text


# --- scripts cell by cell

SCRIPTS = [
    "1_Q_Learning/Q_Learning.py",
    "2_Cart_Pole_DQN/cart_pole_dqn.py",
    "3_Pendulum/pendulum.py",
    "3_Pendulum/reinforce.py",
    "3_Pendulum/ppo.py",
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
    for name in ("settings", "checks", "runs", "pictures", "data"):  # of the folder before
        sys.modules.pop(name, None)
    for cell in re.split(r"^(?=# %% )", open(path).read(), flags=re.M):
        exec(compile(cell, path, "exec"), module.__dict__)
"""


@pytest.mark.parametrize("path", SCRIPTS)
def test_sections_are_marked_and_a_mark_never_cuts_a_function(path):
    cells = re.split(r"^(?=# %% )", (ROOT / path).read_text(), flags=re.M)
    titles = [re.match(r"# %% (.+?) -*\n", cell)[1] for cell in cells[1:]]
    assert len(titles) >= 4 and titles[0] == "Constants" and len(set(titles)) == len(titles)
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


FOLDER_5 = ROOT / "5_GRPO_Maxtext"


def script_of(words):
    """The script that `python a.py ...` runs, or the tool that `python tool.py NAME ...` runs."""
    script = ROOT / words[1]
    return script.parent / "tools" / f"{words[2]}.py" if script.name == "tool.py" and words[2:] else script


def constants_of(script):
    """Names that a script takes as NAME=value: fields of its dataclass in folder 5, elsewhere any name."""
    text = script.read_text()
    if "class Constants" not in text:
        return set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
    for base, (pattern) in {"script.Constants": r"import (\w+) as script"}.items():
        if f"class Constants({base})" in text:  # those of the script, too
            text += (script.parent / f"{re.search(pattern, text)[1]}.py").read_text()
    if script.stem == "grpo_llama3_1_8b_demo" or "import grpo_llama3_1_8b_demo as demo" in text:
        text += (FOLDER_5 / "grpo_llama3_1_8b_demo.py").read_text()  # takes the main script's constants, too
        text += (FOLDER_5 / "constants.py").read_text()
    return set(re.findall(r"^    ([A-Z][A-Z0-9_]*): ", text, re.M))


@pytest.mark.parametrize("page", pages.that_have("^```bash$|`python ", PAGES), ids=name_of)
def test_every_command_names_a_script_and_constants_that_exist(page):
    """What readers copy. That a script runs, and refuses what it does not know, its own tests show."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    spans = re.findall(r"`(python [^`\n]+)`", page.read_text())
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()] + spans
    targets = re.findall(r"^([\w-]+):", pages.MAKE, re.M)
    for line in lines:
        words = line.split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words and words[0].endswith("python") and words[1].endswith(".py"):
            names = constants_of(script_of(words))
            for name in re.findall(r"(?<!\S)([A-Z][A-Z0-9_]*)=", line):
                assert name in names, line


# --- make figures


def test_the_list_names_every_job_and_no_place_on_our_machine():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "figures.py", "--list"], capture_output=True, text=True, check=True
    )
    *lines, total = done.stdout.splitlines()
    assert lines[::2] == [job.command for job in figures.JOBS]
    for line, job in zip(lines[1::2], figures.JOBS, strict=True):
        assert all(name in line for name in job.files.values())
    minutes = [float(n) for n in re.findall(r"\(([\d.]+) minutes\)$", done.stdout, re.M)]
    assert total.endswith(f": {sum(minutes):.1f} minutes")
    assert not re.search(r"/tmp|\.\./|/home|/work", done.stdout)


def test_a_path_that_a_command_leaves_open_has_to_be_given(tmp_path):
    with pytest.raises(figures.MissingPath, match="PEER=PATH is not there; give PEER=path"):
        figures.words_of("python benchmarks/x.py PEER=PATH", {})
    words = figures.words_of("python benchmarks/x.py PEER=PATH", {"PEER": str(tmp_path)})
    assert words == [sys.executable, "benchmarks/x.py", f"PEER={tmp_path}"]


def test_every_committed_figure_is_made_by_exactly_one_command():
    made = [name for job in figures.JOBS for name in job.files.values()]
    assert len(made) == len(set(made))
    assets = {name_of(path) for path in ROOT.glob("[1-5]_*/assets/*") if not path.stem.endswith("_dark")}
    tables = {name_of(path) for path in ROOT.glob("benchmarks/*.csv")}
    assert {name for name in made if "/assets/" in name} == assets
    assert tables <= {name for name in made if "/assets/" not in name}


@pytest.mark.parametrize("job", figures.JOBS, ids=lambda job: job.command)
def test_a_commands_script_exists_and_names_what_it_writes(job):
    program, script, *_ = job.command.split()
    if program == "make":
        assert re.search(rf"^{script}:", pages.MAKE, re.M)
        return
    assert program == "python"
    folder = (ROOT / script).parent
    text = script_of(job.command.split()).read_text()
    text += "".join(path.read_text() for path in [*folder.glob("*/*.py"), *folder.glob("runs.py")])
    for name in job.files:
        assert name in text or job.writes_itself or job.rows, name


@pytest.mark.parametrize("runs", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_figures_copies_what_a_run_left(runs, tmp_path, monkeypatch):
    """The whole way once, with the quickest job: folder 1's seeds, each command as it stands in the table."""
    table = Path("1_Q_Learning", "assets", "seeds.csv")
    header, *lines = (ROOT / table).read_text().splitlines()
    assert len(lines) == 10
    (tmp_path / table).parent.mkdir(parents=True)
    (tmp_path / table).write_text("\n".join([header, *lines[-runs:], ""]))
    monkeypatch.setattr(figures, "HOME_OF_FILES", tmp_path)
    figures.seeds(str(table), figures.q_learning_rows)
    columns = ["seed", "max_abs_error", "optimal_from_every_state", "return_of_last_1000_episodes"]
    committed, made = (
        [[row[column] for column in columns] for row in csv.DictReader(text)]
        for text in ([header, *lines[-runs:]], (tmp_path / table).read_text().splitlines())
    )
    assert made == committed
