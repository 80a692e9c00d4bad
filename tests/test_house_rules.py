"""Folder 5's house rules, read from the source: who imports whom, and in which order the story is told."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
PARTS = {
    f"{path.parent.name}.{path.stem}": path
    for folder in ("parts", "sandbox")
    for path in sorted((FOLDER / folder).glob("*.py"))
    if path.stem != "__init__"
}
FILES = SCRIPTS | PARTS
EXAMPLES = sorted((FOLDER / "examples").glob("*.py"))
MAIN = "grpo_llama3_1_8b_demo"


def tree(path):
    return ast.parse(path.read_text())


def imported(path):
    """The files of the folder that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


ARROWS = {name: imported(path) for name, path in FILES.items()}


def test_the_rules_see_the_folder():
    assert {MAIN, "inference", "reward_func", "parts.settings", "sandbox.box"} <= FILES.keys()
    assert "parts.settings" in ARROWS[MAIN] and "parts.run_log" in ARROWS["parts.report"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_never_imports_a_script(part):
    assert not ARROWS[part] & SCRIPTS.keys()


def test_only_the_fit_check_imports_the_main_script():
    assert {name for name, arrows in ARROWS.items() if MAIN in arrows} == {"tpu_fit_check"}


def test_there_is_no_circle():
    left = {name: set(arrows) for name, arrows in ARROWS.items()}
    while free := [name for name, arrows in left.items() if not arrows & left.keys()]:
        for name in free:
            del left[name]
    assert not left


@pytest.mark.parametrize("path", [*FILES.values(), *EXAMPLES], ids=lambda path: path.stem)
def test_no_globals_and_no_path_is_touched(path):
    """A constant is not changed after it was read, and no file makes itself importable."""
    for node in ast.walk(tree(path)):
        assert getattr(node, "id", "") != "globals", (path.name, node.lineno)
        assert not isinstance(node, ast.Global), (path.name, node.lineno)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("sys", "path"), (path.name, node.lineno)


def test_tunix_is_imported_in_one_file_only():
    """Its next version renames what is used here."""
    for name, path in FILES.items():
        for node in ast.walk(tree(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(module.split(".")[0] == "tunix" for module in modules):
                # vLLM's engine is a class that needs the TPU packages as soon as it is imported
                assert name in ("parts.tunix_api", "parts.vllm_rollout"), name


def test_the_main_script_tells_its_story_in_order():
    """Sections and calls come in the order in which a run needs them; the constants are the only class."""
    text = (FOLDER / f"{MAIN}.py").read_text()
    marks = [line.split(" -")[0] for line in text.splitlines() if line.startswith("# %%")]
    told = ("Constants", "Imports", "Prompts", "GRPO", "Sampling and evaluation", "Training", "Main")
    assert marks == [f"# %% {name}" for name in told]
    body = tree(FOLDER / f"{MAIN}.py").body
    assert [node.name for node in body if isinstance(node, ast.ClassDef)] == ["Constants"]
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    order = list(functions)
    assert order.index("group_advantage") < order.index("grpo_loss") < order.index("evaluate")
    assert order[-1] == "main"
    told = [
        "read", "refuse", "check_versions", "load_hf_config", "load_tokenizer", "read_data", "make_grader",
        "all_hosts", "plan_devices", "open_run", "make_cluster", "check_disk", "once", "train", "once",
        "write",
    ]  # fmt: skip
    calls = [node for node in ast.walk(functions["main"]) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    assert [name for name in names if name in told] == told


def test_a_function_is_given_its_constants():
    """An upper-case name in the main script belongs to the module, or to the constants it was handed."""
    module = tree(FOLDER / f"{MAIN}.py")
    [constants] = [node for node in module.body if isinstance(node, ast.ClassDef)]
    fields = {node.target.id for node in constants.body if isinstance(node, ast.AnnAssign)}
    assert len(fields) > 50
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            assert node.id not in fields, (node.id, node.lineno)


# --- folders 1 to 4: each stands alone

ALONE = ["1_Q_Learning", "2_Cart_Pole_DQN", "3_Pendulum", "4_GRPO_MNIST"]
SERVING = {  # what a numbered script may import of its folder
    "settings", "checks", "runs", "pictures", "data", "grid", "cart_pole", "environments", "environment",
}  # fmt: skip


@pytest.mark.parametrize("folder", ALONE)
def test_a_study_imports_the_script_and_never_the_other_way_round(folder):
    files = {path.stem: path for path in (FOLDER.parent / folder).glob("*.py")}
    studies = {name for name in files if name.endswith("study")}
    scripts = files.keys() - studies - SERVING
    assert studies and scripts
    for name, path in files.items():
        found = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
        allowed = (
            scripts | SERVING
            if name in studies | {"variants", "exercises"}
            else SERVING
            if name in scripts
            else {"settings", "data"}
        )
        assert found & files.keys() <= allowed, name
        if name in studies:
            assert found & scripts


def test_what_the_settings_share_is_the_same_text():
    """Nothing is shared across folders, so nothing may drift apart either."""
    texts = [(FOLDER.parent / folder / "settings.py").read_text() for folder in ALONE]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len(texts[0].splitlines()) < 70
    for name in ("open_run", "write_json", "write_csv"):
        functions = set()
        for folder in ALONE:
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


@pytest.mark.parametrize(
    "name",
    [
        "2_Cart_Pole_DQN/cart_pole_dqn.py",
        "3_Pendulum/reinforce.py",
        "3_Pendulum/ppo.py",
        "3_Pendulum/pendulum.py",
        "4_GRPO_MNIST/grpo_mnist.py",
    ],
)
def test_scripts_2_to_4_have_the_same_sections(name):
    lines = (FOLDER.parent / name).read_text().splitlines()
    marks = [line.split(" -")[0].removeprefix("# %% ") for line in lines if line.startswith("# %%")]
    assert marks == ["Constants", "Networks", "Training", "Algorithm", "Main"]
