"""Who imports whom in folder 5, read from the source."""

import ast
import graphlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
FILES = {  # by the name under which they are imported
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path
    for place in (
        "*.py",
        "tools/*.py",
        "tools/*/*.py",
        "model/*.py",
        "task/*.py",
        "run/*.py",
        "sandbox/*.py",
    )
    for path in sorted(FOLDER.glob(place))
    if path.stem != "__init__"
}
ROOMS = {"model", "task", "run", "sandbox", "tools"}


def room(name):
    """The room of a file: `model.llama` is in model, the scripts are in page."""
    return name.split(".")[0] if name.split(".")[0] in ROOMS else "page"


def imported_modules(module):
    """Every module that a file names in an import, anywhere in it."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


ARROWS = {
    name: imported_modules(ast.parse(path.read_text())) & FILES.keys()
    for name, path in FILES.items()
}
BESIDE = {"settings", "constants", "grpo_variants"}  # what scripts and rooms both read


def test_rooms_never_import_the_page_and_nobody_but_tools_imports_a_tool():
    assert len(ARROWS) > 40 and {room(name) for name in ARROWS} == ROOMS | {"page"}
    for name, arrows in ARROWS.items():
        here, others = room(name), {room(other) for other in arrows - BESIDE}
        if here in ROOMS - {"tools"}:
            assert "page" not in others, name
        if here != "tools" and not name.endswith("exercises"):
            assert "tools" not in others, name


def test_there_is_no_circle():
    graphlib.TopologicalSorter(ARROWS).prepare()
