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
EXAMPLES = sorted((FOLDER / "examples").glob("*.py"))


def tree(path):
    return ast.parse(path.read_text())


TREES = {name: tree(path) for name, path in FILES.items()}
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
    trees = TREES | {path.name: ast.parse(path.read_text()) for path in EXAMPLES}
    assert len(trees) > len(TREES)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            assert getattr(node, "id", "") != "globals", (name, node.lineno)
            assert not isinstance(node, ast.Global), (name, node.lineno)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("sys", "path"), (name, node.lineno)


# What a step and a checkpoint go through, beside the model itself.
PATH_OF_A_STEP = [
    MAIN, "grpo_variants", "model.cluster", "model.log_probs", "model.rollout",
    "run.checkpoints", "run.train_log", "run.answers", "run.evaluation",
]  # fmt: skip
LIBRARIES = {"tunix", "maxtext", "orbax", "ocp"}


def private_names(tree):
    """Private modules, names and attributes of Tunix, MaxText and Orbax that a file uses."""
    bound = {}  # name in the file: module it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    theirs = {name for name, module in bound.items() if module.split(".")[0] in LIBRARIES}
    found = {bound[name] for name in theirs if re.search(r"\._", bound[name])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            # an attribute of ours is self._x; of an object of theirs it is x._y or self._x._y
            ours = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not ours and node.attr not in ("_replace", "_asdict", "_fields"):  # a NamedTuple's, and public
                found.add(ast.unparse(node))
    return found


def test_private_names_are_seen():
    text = "import orbax.checkpoint as ocp\nocp._src.x\nfrom tunix._a import b\nself._cluster._c()\nself._d"
    assert private_names(ast.parse(text)) == {"ocp._src", "tunix._a.b", "self._cluster._c"}


def test_no_private_name_of_a_library_is_in_the_path_of_a_step_or_a_checkpoint():
    for name in PATH_OF_A_STEP:
        assert not private_names(TREES[name]), name


def test_tunixs_learner_and_cluster_are_not_subclassed_and_nothing_of_them_is_patched():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                assert not bases & {"GRPOLearner", "RLLearner", "RLCluster", "PeftTrainer", "Trainer"}, name
                assert not bases & {"CheckpointManager"}, name
        assert not any("learner" in module.lower() for module in imported_modules(tree)), name
    for name in PATH_OF_A_STEP:
        assert "patched" not in FILES[name].read_text(), name


def test_a_function_is_given_its_constants():
    """An upper-case name in the main script belongs to the module, or to the constants it was handed."""
    classes = [*TREES[MAIN].body, *TREES["constants"].body]
    names = ("Constants", "Variants", "Arrays", "Machine")
    blocks = [node for node in classes if isinstance(node, ast.ClassDef) and node.name in names]
    fields = {node.target.id for block in blocks for node in block.body if isinstance(node, ast.AnnAssign)}
    assert len(blocks) == 4 and len(fields) > 60
    page = [node for node in blocks[0].body if isinstance(node, ast.AnnAssign)]
    assert len(page) < 48  # what a reader turns; the rest stands beside the page
    for node in ast.walk(TREES[MAIN]):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            assert node.id not in fields, (node.id, node.lineno)


# --- folders 1 to 4: each stands alone

ALONE = {  # the scripts that a reader runs
    "1_Q_Learning": ["Q_Learning"],
    "2_Cart_Pole_DQN": ["cart_pole_dqn"],
    "3_Pendulum": ["reinforce", "ppo", "pendulum"],
    "4_GRPO_MNIST": ["grpo_mnist"],
}


def test_no_folder_changes_a_constant_after_it_was_read():
    """And none of folders 1 to 4 makes jax forget what it has traced: functions are given their constants."""
    for folder in ALONE:
        for path in (FOLDER.parent / folder).glob("*.py"):
            for node in ast.walk(tree(path)):
                name = getattr(node, "id", getattr(node, "attr", ""))
                assert name not in ("globals", "clear_caches"), (path, node.lineno)
