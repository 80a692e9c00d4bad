"""The course says what is so: the door, symbols, drawings, cells, commands."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pages
import pytest
from measure import drawings, pictures, run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*pages.ALL, ROOT / "CONTRIBUTING.md"]
DOORS = [ROOT / "README.md", ROOT / "README_ch.md"]


@pytest.mark.parametrize("door", DOORS, ids=pages.name_of)
def test_the_maps_times_are_those_of_the_first_runs_and_their_sum_is_below_20_minutes(door):
    with open(ROOT / "benchmarks" / "default_runs.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "first"]
    seconds = {row["script"].split()[0].split("/")[1]: float(row["seconds"]) for row in rows}
    stated = re.findall(r"^\| \[\d(.*)\| (\d+) s \|$", door.read_text(), re.M)
    for text, whole in stated:
        scripts = re.findall(r"\[`(\w+\.py)`\]", text)
        assert scripts and abs(sum(map(seconds.pop, scripts)) - int(whole)) < 1
    assert not seconds
    total = sum(int(whole) for _, whole in stated)
    assert f" {total} s" in " ".join(door.read_text().split()) and total < 20 * 60


SVGS = sorted(ROOT.glob("[1-5]_*/assets/*.svg"))
NAMES = re.compile(
    r"[A-Z_]+=.*|&lt;.*|\w+(/\w+)*\.py|(mesh|data|model|top-k) \d.*|actor|agent|critic|Q\(.*|sigma, N m|"
    r"(\d )?[A-Z][\w-]*(:|,? (DQN|MaxText|Orbax|0/1 reward|PPO))*|group_std, .*|Tom has .*"
)


def test_every_colour_can_be_seen_on_a_light_page_and_on_a_dark_one():
    """WCAG 2 asks for a contrast of 4.5."""

    def luminance(colour):
        values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        return linear @ (0.2126, 0.7152, 0.0722) + 0.05

    page = luminance(pictures.DARK[pictures.PAGE])
    for colour, other in [*pictures.DARK.items()][:-1]:  # the last is the page
        assert 1.05 / luminance(colour) > 4.5 < luminance(other) / page


def test_the_labels_of_chinese_pictures_are_chinese_but_for_names():
    for path in SVGS:
        labels = re.findall(r"<text[^>]*>([^<]*)<", path.read_text())
        chinese = {label for label in labels if re.search("[\u4e00-\u9fff]", label)}
        english = {x for x in labels if re.search("[a-z]{3}", x) and not NAMES.fullmatch(x)} - chinese
        assert labels and not (english if path.stem.endswith("_ch") else chinese), path


@pytest.mark.parametrize("name", ["overestimation", "values_crawl", "accuracy"])
def test_a_picture_is_drawn_from_its_table_as_it_is_committed(name, tmp_path):
    [job] = [j for j in run.jobs() if j.make["files"][0] == f"{name}.svg"]
    draw = getattr(pictures, job.make["draw"], None) or getattr(drawings, job.make["draw"])
    pictures.save(draw(*job.sources()), tmp_path / f"{name}.svg")
    for path in job.products():
        assert path.read_text() == (tmp_path / path.name).read_text()


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


SCRIPTS = [
    "1_Q_Learning/Q_Learning.py", "2_Cart_Pole_DQN/cart_pole_dqn.py", "3_Pendulum/pendulum.py",
    "3_Pendulum/reinforce.py", "3_Pendulum/ppo.py", "4_GRPO_MNIST/grpo_mnist.py",
    "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py", "5_GRPO_Maxtext/mesh_and_axis_rules.py",
]  # fmt: skip
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


def test_cell_by_cell_a_script_prints_nothing_and_writes_nothing(tmp_path):
    """Also what an import does: the command line's last lines need `__name__ == "__main__"`."""
    before = {path: path.stat().st_mtime_ns for path in ROOT.glob("[1-5]_*/*")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", CELL_BY_CELL, *(str(ROOT / path) for path in SCRIPTS)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in ROOT.glob("[1-5]_*/*")} == before


FOLDER_5 = ROOT / "5_GRPO_Maxtext"


def constants_of(words):
    """Names that `python a.py ...`, or `python tool.py NAME ...`, takes as NAME=value.

    Fields of its dataclass in folder 5, elsewhere any name.
    """
    script = ROOT / words[1]
    if script.name == "tool.py" and words[2:]:
        script = script.parent / "tools" / f"{words[2]}.py"
    text = script.read_text()
    if "class Constants" not in text:
        return set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
    if "class Constants(script.Constants)" in text:  # those of the script, too
        base = re.search(r"import (\w+) as script", text)[1]
        text += (script.parent / f"{base}.py").read_text()
    if script.stem == "grpo_llama3_1_8b_demo" or "import grpo_llama3_1_8b_demo as demo" in text:
        text += (FOLDER_5 / "grpo_llama3_1_8b_demo.py").read_text()  # takes the main script's constants, too
        text += (FOLDER_5 / "constants.py").read_text()
    return set(re.findall(r"^    ([A-Z][A-Z0-9_]*): ", text, re.M))


@pytest.mark.parametrize("page", pages.that_have("^```bash$|`python ", PAGES), ids=pages.name_of)
def test_every_command_names_a_script_and_constants_that_exist(page):
    """What readers copy. That a script runs, and refuses what it does not know, its own tests show."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text().replace("\\\n", ""), re.M | re.S)
    spans = re.findall(r"`(python [^`\n]+)`", page.read_text())
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()] + spans
    targets = re.findall(r"^([\w-]+):", pages.MAKE, re.M)
    for line in lines:
        words = line.split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words and words[0].endswith("python") and words[1].endswith(".py"):
            names = constants_of(words)
            for name in re.findall(r"(?<!\S)([A-Z][A-Z0-9_]*)=", line):
                assert name in names, line
