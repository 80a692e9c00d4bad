"""The examples of the notebooks fit the scripts. `make test-notebooks` runs them."""

import ast
import re
from pathlib import Path

import pages
import pytest
from pages import ROOT

CELLS = sorted((ROOT / "tools" / "notebook_cells").glob("*.py"))


def script_of(path: Path) -> str:
    [script] = [found for folder in pages.FOLDERS for found in folder.glob(path.name)]
    return script.read_text()


@pytest.mark.parametrize("path", CELLS, ids=lambda path: path.stem)
def test_an_example_comes_beside_a_definition_and_a_question_is_in_both_languages(path):
    names = {getattr(node, "name", "") for node in ast.parse(script_of(path)).body}
    names |= set(re.findall(r"^([A-Z_]+) = ", script_of(path), re.M))
    pieces = re.split(r"^# %% ", path.read_text(), flags=re.M)[1:]
    for piece in pieces:
        mark, _, code = piece.partition("\n")
        where, name = mark.split()
        assert where in ("after", "before") and name in names, mark
        assert ("# en: " in code) == ("# zh: " in code), mark
        assert where == "after" or "# en: " in code, "a cell of its own"
    assert sum("# en: " in piece for piece in pieces) >= 3


def test_each_script_of_a_notebook_has_examples():
    scripts = re.findall(r'^    "([^"]+)\.py": "', (ROOT / "tools/notebooks.py").read_text(), re.M)
    assert sorted(Path(script).name for script in scripts) == [path.stem for path in CELLS]
