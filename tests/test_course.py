"""What the pages say of code and data is so: times, constants, commands, pictures, cells."""

import csv
import inspect
import json
import re
import sys
import types
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pages
import pytest
from folders import load, load_all
from measure import drawings, films, pictures, run, tables
from pages import ROOT

import constants
import grpo_llama3_1_8b_demo as demo
import inference
import mesh_and_axis_rules
import settings
from tools import convert_checkpoint, pass_at_k

STEPPED = [path for path in ROOT.glob("[1-5]_*/*.py") if "\n# %% Constants" in path.read_text()]
SCRIPTS = [load(path.parent.name, path.stem) for path in STEPPED if path.parent != settings.HERE]
OTHERS = [inference, convert_checkpoint, mesh_and_axis_rules, pass_at_k]  # scripts of folder 5
COLUMNS = [settings.defaults(demo.Constants, column) for column in ("small", "large")]


@pytest.mark.parametrize("door", [ROOT / "README.md", ROOT / "README_ch.md"], ids=pages.name_of)
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


NAMES = re.compile(
    r"[A-Z_]+=.*|&lt;.*|\w+(/\w+)*\.py|(mesh|data|model|top-k) \d.*|actor|agent|critic|Q\(.*|"
    r"bias [\d.]+|relu\(.*|"
    r"has|cards|loses|and|then|buys|more|many|are|there|now|"  # the tokens of Kim's question
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


def attention_tokens() -> set[str]:
    """The tokens of Kim's question, and of the answer's looks into it."""
    with open(ROOT / "5_GRPO_Maxtext/assets/attention.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    looks = {f"{row['after']} → {row['writes']}".replace("<", "&lt;") for row in rows}
    return {row["token"] for row in rows} | {look.replace(">", "&gt;") for look in looks}


def test_the_labels_of_chinese_pictures_are_chinese_but_for_names():
    for path in ROOT.glob("[1-5]_*/assets/*.svg"):
        labels = re.findall(r"<text[^>]*>([^<]*)<", path.read_text())
        chinese = {label for label in labels if re.search("[\u4e00-\u9fff]", label)}
        english = {
            x for x in labels if re.search("[a-z]{3}", x) and not NAMES.fullmatch(x)
        } - chinese
        if path.stem == "attention_ch":  # its labels are tokens of a question in English
            english -= {token.strip() for token in attention_tokens()}
        assert labels and not (english if path.stem.endswith("_ch") else chinese), path


@pytest.mark.parametrize("name", ["overestimation", "course_card", "accuracy", "course_map"])
def test_a_picture_is_drawn_from_its_table_as_it_is_committed(name, tmp_path):
    [job] = [j for j in run.jobs() if j.make["files"][0] == f"{name}.svg"]
    pictures.save(drawings.drawn(job.make["draw"], *job.sources()), tmp_path / f"{name}.svg")
    for path in job.products():
        assert path.read_text() == (tmp_path / path.name).read_text()


def test_an_answers_color_in_the_film_is_what_the_reward_says():
    """All points: green. The right number without all points: orange. A wrong number: red."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    meant = {9.5: films.GREEN, 5.5: films.ORANGE, 4.0: films.RED, 0.0: films.RED}
    for answer in group["before"]:
        assert films.colour_of(answer["text"], group["answer"]) == meant[answer["reward"]]


def test_the_push_of_a_group_on_its_tokens_by_hand():
    """What all eight answers share cancels; at a fork each side gets its own advantages' sum."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    right, wrong = drawings.pushes(group, 2), drawings.pushes(group, 5)
    assert right[:3] == pytest.approx([0, 0, 0], abs=1e-3)
    assert wrong[:3] == pytest.approx([0, 0, 0], abs=1e-3)
    # the four answers that subtract; the other four have the rest of 0
    minus = 1.65496 + 3 * 0.50368
    assert (right[3], wrong[3]) == pytest.approx((minus, -minus), abs=1e-3)
    p = np.exp(-0.82996)  # of </reasoning> after 14-7=7
    assert right[7] == pytest.approx(1.65496 - p * minus, abs=1e-3)
    assert max(map(abs, right[4:7] + right[8:])) < 0.02  # certain already: nothing is left to push


@pytest.mark.parametrize("path", STEPPED, ids=pages.name_of)
def test_cell_by_cell_a_script_prints_nothing_and_writes_nothing(
    path, empty_folder, monkeypatch, capfd
):
    """Also what an import does: the command line's last lines need `__name__ == "__main__"`."""
    before = {path: path.stat().st_mtime_ns for path in ROOT.glob("[1-5]_*/*")}
    if path.parent != settings.HERE:  # its neighbors are imported anew
        monkeypatch.syspath_prepend(path.parent)
        for name in load_all(path.parent.name):
            monkeypatch.setitem(sys.modules, name, None)  # at the end, what is there now comes back
            del sys.modules[name]
    module = types.ModuleType(f"stepped_{path.stem}")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # decorators of classes look there
    for cell in re.split(r"^(?=# %% )", path.read_text(), flags=re.M):
        exec(compile(cell, path, "exec"), module.__dict__)
    assert capfd.readouterr() == ("", "") and list(empty_folder.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in ROOT.glob("[1-5]_*/*")} == before


def constants_of(words):
    """What a command takes as NAME=value: in folder 5 the dataclass's fields, else any name."""
    script = ROOT / words[1]
    if script.name == "tool.py" and words[2:]:
        script = script.parent / "tools" / f"{words[2]}.py"
    text = script.read_text()
    if "class Constants" not in text:
        return set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
    bases = re.findall(r"import (\w+) as (?:script|demo)\b", text)  # whose constants it takes, too
    bases += ["constants"] * ("grpo_llama3_1_8b_demo" in (script.stem, *bases))
    text += "".join(path.read_text() for base in bases for path in ROOT.glob(f"[1-5]_*/{base}.py"))
    return set(re.findall(r"^    ([A-Z][A-Z0-9_]*): ", text, re.M))


@pytest.mark.parametrize(
    "page", pages.that_have("^```bash$|`python ", pages.EVERY), ids=pages.name_of
)
def test_every_command_names_a_script_and_constants_that_exist(page):
    """What readers copy; a script's own tests show that it runs, and refuses unknown names."""
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


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize("script", OTHERS, ids=lambda s: s.__name__)
def test_folder_5s_other_scripts_have_the_constants_of_their_tables(script, language):
    own = settings.defaults(script.Constants, "small")
    if script is inference:  # those that it takes over from a run are named in a sentence
        for name in (*inference.PROMPT_AND_LENGTHS, *inspect.get_annotations(constants.Arrays)):
            assert f"`{name}`" in pages.text(settings.HERE, language)
            del own[name]
    blocks = re.findall(r"(?:^\|.*\n)+", pages.text(settings.HERE, language), re.M)
    tables = [re.findall(r"^\| `([A-Z_]+)=([^`]*)` \| [^|]+ \|$", block, re.M) for block in blocks]
    assert [(name, str(value)) for name, value in own.items()] in tables


@pytest.mark.parametrize("script", [*SCRIPTS, demo, constants], ids=lambda s: s.__name__)
def test_a_pages_table_has_all_constants_of_its_script_with_defaults_and_remarks(script):
    """`make pages` reads the source of a dataclass; here Python has read it."""
    path = Path(script.__file__)
    mark = rf"<!-- table constants:{path.name}:(\S+) -->"
    kinds, chinese = (
        re.findall(mark, pages.text(path.parent, language)) for language in pages.LANGUAGES
    )
    rows = [
        row
        for kind in kinds
        for row in tables.constants(path.read_text(), kind.split("+"), "", 0)[1:]
    ]
    own = [asdict(script.Constants())] if script in SCRIPTS else COLUMNS
    parts = [getattr(script, kind) for kind in "+".join(kinds).split("+")]
    assert kinds == chinese and all(remark for *_, remark in rows)
    assert [name for name, *_ in rows] == [
        f"`{x}`" for part in parts for x in inspect.get_annotations(part)
    ]
    for name, *values, _ in rows:
        if name != "`SYSTEM_PROMPT`":  # too long for a table
            shown = [str(column[name.strip("`")]).replace("\n", "\\n") for column in own]
            assert values == [value or "empty" for value in shown], name
