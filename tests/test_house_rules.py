"""Folder 5's house rules, read from the source: who imports whom, and in which order the story is told."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
MAIN = "grpo_llama3_1_8b_demo"
FILES = {  # by the name under which they are imported
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path
    for place in ("*.py", "tools/*.py", "parts/*.py", "parts/*/*.py", "sandbox/*.py")
    for path in sorted(FOLDER.glob(place))
    if path.stem != "__init__"
}
EXAMPLES = sorted((FOLDER / "examples").glob("*.py"))


def tree(path):
    return ast.parse(path.read_text())


TREES = {name: tree(path) for name, path in FILES.items()}
# From the ground floor up; those of one floor do not know each other, on the lowest there is no circle.
FLOORS = [
    {"plain_text", "late_imports", "settings", "constants", "sandbox"},
    {"data", "rewards", "machine"},
    {"model", "loss_variants"},
    {"run"},
    {"scripts", "tools", "exercises"},  # the exercises train with the main script
]
SIDEWAYS = {("data", "rewards")}  # a row is refused whose ground truth holds no number to grade by


def room(name):
    """The room of a file: `parts.model.llama` is in model, the scripts are in scripts."""
    parts = name.split(".")
    return parts[0] if parts[0] in ("tools", "sandbox") else parts[1] if parts[0] == "parts" else "scripts"


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


def test_the_rules_see_the_folder():
    assert {MAIN, "inference", "reward_func", "tool", "parts.settings", "sandbox.box"} <= FILES.keys()
    assert {"tools.tpu_fit_check", "parts.run.train_log", "parts.model.cluster"} <= FILES.keys()
    assert "parts.settings" in ARROWS[MAIN] and "parts.run.checkpoints" in ARROWS["parts.run.report"]
    assert {room(name) for name in FILES} == set().union(*FLOORS) and len(FILES) > 40


def test_lower_rooms_never_know_higher_ones():
    """So a part never imports a script or a tool, but for the exercises."""
    floor = {name: i for i, rooms in enumerate(FLOORS) for name in rooms}
    sideways = set()
    for name, arrows in ARROWS.items():
        for other in arrows:
            here, there = room(name), room(other)
            assert floor[there] <= floor[here], f"{name} imports {other}"
            if floor[there] == floor[here] in (1, 2) and here != there:
                sideways.add((here, there))
    assert sideways == SIDEWAYS


def test_only_the_fit_check_and_the_exercises_import_the_main_script_and_no_script_a_tool():
    assert {name for name, arrows in ARROWS.items() if MAIN in arrows} == {
        "tools.tpu_fit_check", "parts.exercises.exercise_checks"
    }  # fmt: skip
    for name, arrows in ARROWS.items():
        tools = {other for other in arrows if room(other) == "tools"}
        assert not tools or room(name) == "tools", (name, tools)


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
    MAIN, "parts.loss_variants", "parts.model.cluster", "parts.model.log_probs", "parts.model.rollout",
    "parts.run.checkpoints", "parts.run.train_log", "parts.run.answers", "parts.run.evaluation",
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
            if not ours and node.attr not in ("_replace", "_asdict"):  # a NamedTuple's, and public
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


def test_the_main_script_tells_its_story_in_order():
    """Sections and calls come in the order in which a run needs them."""
    text = FILES[MAIN].read_text()
    marks = [line.split(" -")[0] for line in text.splitlines() if line.startswith("# %%")]
    told = ("Constants", "Imports", "Prompts", "GRPO", "Sampling and evaluation", "Training", "Main")
    assert marks == [f"# %% {name}" for name in told]
    body = TREES[MAIN].body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    # the constants; what goes into an update; what a step draws
    bases = {node.name: [ast.unparse(base) for base in node.bases] for node in classes}
    blocks = ["Variants", "Machine"]
    assert bases == {"Constants": blocks, "Batch": ["NamedTuple"], "Drawn": ["NamedTuple"]}
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    order = list(functions)
    story = [
        "group_advantage", "grpo_loss", "update", "evaluate", "make_optimizer", "ask", "to_batch", "train",
        "main",
    ]  # fmt: skip
    assert [name for name in order if name in story] == story and order[-1] == "main"

    def calls_in(block):
        calls = [node for node in ast.walk(block) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        return [ast.unparse(call.func) for call in calls]

    told = [
        "read", "refuse", "check_versions", "load_hf_config", "load_tokenizer", "read_data", "make_grader",
        "all_hosts", "plan_devices", "open_run", "make_cluster", "check_disk", "once", "train", "once",
        "write",
    ]  # fmt: skip
    names = [name.split(".")[-1] for name in calls_in(functions["main"])]
    assert [name for name in names if name in told] == told
    # the loop: draw, compare, log-probs of the others, update, weights to the sampler, a row, a checkpoint
    loops = [node for node in ast.walk(functions["train"]) if isinstance(node, ast.For)]
    [loop] = [node for node in loops if ast.unparse(node.target) == "(step, batch_of_questions)"]
    told = [
        "asking", "use.advantage", "to_batch", "under", "update", "cluster.rollout.update_params",
        "train_log.answer_figures", "answers.append_step", "log.add", "loss_variants.adaptive_beta", "save",
    ]  # fmt: skip
    names = calls_in(loop)
    told_of = [name for name in names[names.index("asking") :] if name in told]
    assert list(dict.fromkeys(told_of)) == told


def test_a_function_is_given_its_constants():
    """An upper-case name in the main script belongs to the module, or to the constants it was handed."""
    classes = [*TREES[MAIN].body, *TREES["parts.constants"].body]
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
WRITTEN = ("exercises", "exercise_checks", "grader")  # by the reader: tests/test_exercises.py


def test_a_study_imports_the_script_and_never_the_other_way_round():
    for folder, scripts in ALONE.items():
        files = {
            path.stem: path for path in (FOLDER.parent / folder).glob("*.py") if path.stem not in WRITTEN
        }
        arrows = {
            name: {module.split(".")[0] for module in imported_modules(tree(path))} & files.keys()
            for name, path in files.items()
        }
        studies = {name for name in files if name.endswith("study") or name in ("variants", "mistakes")}
        assert studies and set(scripts) < files.keys() - studies
        for name in scripts:
            assert not arrows[name] & {*studies, *scripts}, (folder, name)
        for name in files.keys() - studies - {*scripts}:  # what serves them: world, settings, pictures ...
            assert not arrows[name] & {*studies, *scripts}, (folder, name)
        for name in studies:
            assert arrows[name] & {*scripts}, (folder, name)


def test_what_the_folders_share_is_the_same_text():
    """Nothing is shared across folders, so nothing may drift apart either."""
    graders = [*ALONE, f"{FOLDER.name}/parts/exercises"]
    for name, folders in (("settings.py", ALONE), ("grader.py", graders)):
        assert len({(FOLDER.parent / folder / name).read_text() for folder in folders}) == 1, name
    everywhere = ("open_run", "new_folder", "write_json", "write_csv")
    compiled = ("show_warning", "scan", "trained_rows", "compile_and_run")  # not in folder 1
    for name in (*everywhere, *compiled):
        functions = set()
        for folder in list(ALONE)[name in compiled :]:
            body = tree(FOLDER.parent / folder / "runs.py").body
            functions |= {ast.unparse(node) for node in body if getattr(node, "name", "") == name}
        assert len(functions) == 1, name


def test_no_folder_changes_a_constant_after_it_was_read():
    """And none of folders 1 to 4 makes jax forget what it has traced: functions are given their constants."""
    for folder in ALONE:
        for path in (FOLDER.parent / folder).glob("*.py"):
            for node in ast.walk(tree(path)):
                name = getattr(node, "id", getattr(node, "attr", ""))
                assert name not in ("globals", "clear_caches"), (path, node.lineno)


def test_scripts_2_to_4_have_the_same_sections():
    for folder, scripts in list(ALONE.items())[1:]:
        for name in scripts:
            lines = (FOLDER.parent / folder / f"{name}.py").read_text().splitlines()
            marks = [line.split(" -")[0].removeprefix("# %% ") for line in lines if line.startswith("# %%")]
            assert marks == ["Constants", "Networks", "Training", "Algorithm", "Main"], name
