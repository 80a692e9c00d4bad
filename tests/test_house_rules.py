"""Folder 5's house rules, read from the source: who imports whom, and in which order the story is told."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
MAIN = "grpo_llama3_1_8b_demo"
FILES = {  # by the name under which they are imported
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path
    for place in ("*.py", "tools/*.py", "tools/*/*.py", "model/*.py", "task/*.py", "run/*.py", "sandbox/*.py")
    for path in sorted(FOLDER.glob(place))
    if path.stem != "__init__"
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
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


ARROWS = {name: imported_modules(tree) & FILES.keys() for name, tree in TREES.items()}
BESIDE = {"settings", "constants", "grpo_variants"}  # what scripts and rooms both read


def test_rooms_never_import_the_page_and_nobody_but_tools_imports_a_tool():
    assert len(ARROWS) > 40 and {room(name) for name in ARROWS} == ROOMS | {"page"}
    for name, arrows in ARROWS.items():
        here, others = room(name), {room(other) for other in arrows - BESIDE}
        if here in ROOMS - {"tools"}:
            assert "page" not in others, name
        if here != "tools" and name != "exercises":
            assert "tools" not in others, name


def test_there_is_no_circle():
    left = {name: set(arrows) for name, arrows in ARROWS.items()}
    while free := [name for name, arrows in left.items() if not arrows & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_no_globals_and_no_path_is_touched():
    """A constant is not changed after it was read, and no file makes itself importable."""
    trees = TREES | {path.name: ast.parse(path.read_text()) for path in FOLDER.glob("examples/*.py")}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            assert getattr(node, "id", "") != "globals", (name, node.lineno)
            assert not isinstance(node, ast.Global), (name, node.lineno)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("sys", "path"), (name, node.lineno)


# What a step and a checkpoint go through, beside the model itself.
PATH_OF_A_STEP = (
    f"{MAIN} grpo_variants model.cluster model.log_probs model.rollout run.checkpoints run.train_log"
)


def test_no_private_name_of_a_library_is_in_the_path_of_a_step_or_a_checkpoint():
    """`x._y` is allowed of self alone, and of a NamedTuple, whose underscored names are public."""
    for name in [*PATH_OF_A_STEP.split(), "run.answers", "run.evaluation"]:
        assert not any("._" in module for module in imported_modules(TREES[name])), name
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                ours = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert ours or node.attr in ("_replace", "_asdict", "_fields"), (name, ast.unparse(node))
