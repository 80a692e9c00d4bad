"""What the READMEs say about the script is what the script says."""

import csv
import re
from pathlib import Path

import grpo_llama3_1_8b_demo as demo
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT, ROOT / "5_GRPO_Maxtext"]


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
