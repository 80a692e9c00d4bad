"""The functions that a reader writes: what is right is the numbered script's own function, and
Tunix's.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import runpy
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import folders
import make_golden_batch
import numpy as np
import pytest
from folders import ROOT
from measure.columns import read_csv
from test_scripts import FOLDERS
from tunix.rl import algo_core, common

CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@functools.cache
def load(folder) -> SimpleNamespace:
    if folder != "5_GRPO_Maxtext":
        return SimpleNamespace(**folders.load_all(folder))
    names = "grader", "exercise_checks"
    return SimpleNamespace(
        **{name: importlib.import_module(f"tools.exercises.{name}") for name in names}
    )


def filled(folder, bodies, tmp_path) -> ModuleType:
    """exercises.py as it is when a reader has written these bodies, by function."""
    text = (ROOT / folder / "exercises.py").read_text()
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name in bodies:
            blank = node.body[-1]
            assert lines[blank.lineno - 1].strip() == "raise NotImplementedError"
            body = textwrap.indent(bodies[node.name], "    ")
            lines[blank.lineno - 1 : blank.end_lineno] = body.splitlines()
    file = tmp_path / "exercises.py"
    file.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("filled", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # folder 5's is in a package
        patch.setitem(sys.modules, "exercise_checks", load(folder).exercise_checks)
        spec.loader.exec_module(module)
    return module


def graded(folder, name, function) -> str:
    """What the grader says of a function: "right", or "wrong" and why, on the next lines."""
    return load(folder).grader.judge(function, load(folder).exercise_checks.EXERCISES[name])


ALL = [*FOLDERS, "5_GRPO_Maxtext"]
EXERCISES = [(folder, name) for folder in ALL for name in load(folder).exercise_checks.EXERCISES]


@pytest.mark.parametrize("folder", ALL)
def test_nothing_is_begun_as_it_comes(folder, capsys, monkeypatch):
    """And the command says so, and exits with 1."""
    monkeypatch.setattr(sys, "argv", ["exercises.py"])
    monkeypatch.setitem(sys.modules, "exercise_checks", load(folder).exercise_checks)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / folder / "exercises.py"), run_name="__main__")
    names = list(load(folder).exercise_checks.EXERCISES)
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{name:20s} not begun" for name in names]
    assert (stopped.value.code, err) == (1, "")


def scripts_own(folder, name):
    """The numbered script's own function."""
    files = folders.load_all(folder)
    scripts = (
        files.get(x) for x in ("Q_Learning", "cart_pole_dqn", "reinforce", "ppo", "grpo_mnist")
    )
    return next(getattr(script, name) for script in scripts if hasattr(script, name))


@pytest.mark.parametrize("folder,name", [row for row in EXERCISES if row[0] != "5_GRPO_Maxtext"])
def test_the_scripts_own_function_is_right_and_takes_the_same_arguments(folder, name):
    files = load(folder)
    function = scripts_own(folder, name)
    assert graded(folder, name, function) == "right"
    blank = getattr(files.exercises, name)
    assert list(inspect.signature(blank).parameters) == list(inspect.signature(function).parameters)


def test_tunix_has_folder_5s_group_advantage_and_mask():
    advantage = lambda rewards, G: algo_core.compute_advantages(np.asarray(rewards), G)  # noqa: E731
    assert graded("5_GRPO_Maxtext", "group_advantage", advantage) == "right"
    assert graded("5_GRPO_Maxtext", "completion_mask", common.make_completion_mask) == "right"


@pytest.mark.parametrize("folder,name", EXERCISES)
def test_every_planted_mistake_is_recognised_by_its_name_alone(folder, name):
    exercise = load(folder).exercise_checks.EXERCISES[name]
    functions = {
        words: exercise.variant(exercise.right, edit) for words, edit in exercise.mistakes.items()
    }
    looked = {
        words: list(exercise.look(f)) for words, f in (functions | {"": exercise.right}).items()
    }
    named = exercise._replace(  # each function is tried once
        look=looked.get,
        right="",
        mistakes={words: words for words in functions},
        variant=lambda right, words: words,
    )
    for words in functions:
        verdict = load(folder).grader.judge(words, named)
        assert verdict.startswith("wrong\n") and verdict.endswith(
            f"\nThis is what comes out if {words}."
        )


@pytest.mark.parametrize("case", CASES["body"], ids=lambda case: case["name"])
def test_a_new_reader_is_told_what_is_wrong(case, tmp_path, capsys):
    files, name, said = load(case["folder"]), case["name"], case["said"]
    function = getattr(filled(case["folder"], {name: case["text"]}, tmp_path), name)
    with contextlib.nullcontext() if not said else pytest.raises(SystemExit):
        files.grader.run(files.exercise_checks.EXERCISES, [function])
    out = capsys.readouterr().out
    assert said in out and "Traceback" not in out
    assert len(out.splitlines()) > 1 if said else out.split() == [name, "right"]
    if "raises" in said:  # the innermost line of the reader's own file
        number = int(out.split("line ")[1].split()[0])
        lines = (tmp_path / "exercises.py").read_text().splitlines()
        assert lines[number - 1].strip() == "if ended.any():"


METHODS = [
    key.removesuffix("_loss") for key in np.load(make_golden_batch.TO) if key.endswith("_loss")
]


def test_the_golden_batch_is_what_its_script_computes():
    golden = load("5_GRPO_Maxtext").exercise_checks.BATCH
    for name, array in make_golden_batch.batch().items():
        np.testing.assert_array_equal(golden[name], array)
    new, old, ref = (
        golden[name].astype(float) for name in ("log_prob", "old_log_prob", "ref_log_prob")
    )
    for method in METHODS:
        value = make_golden_batch.loss(method, new, new, old, ref)
        # the same float64 sums
        np.testing.assert_allclose(value, golden[f"{method}_loss"], rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_the_pieces_make_the_golden_losses(method):
    checks = load("5_GRPO_Maxtext").exercise_checks
    golden = checks.BATCH
    value, gradient = (x for _, x in checks.look(checks.exercise(method, given=False).right))
    # float32 against float64: RLOO's value is a sum of 71 terms of size 1
    np.testing.assert_allclose(value, golden[f"{method}_loss"], atol=2e-6)
    np.testing.assert_allclose(gradient, golden[f"{method}_gradient"], atol=1e-7)


@pytest.mark.parametrize("case", CASES["loss"], ids=lambda case: case["said"])
def test_a_readers_own_loss_is_recognised(case, tmp_path, capsys, monkeypatch):
    """A file that can't be used gets one line."""
    said, code, file = case["said"], case["exit"], tmp_path / "my_loss.py"
    if code == 1:  # all pairs of mistakes in one method instead of six
        monkeypatch.setattr(load("5_GRPO_Maxtext").exercise_checks, "METHODS", {"grpo": {}})
    file.write_text("import jax.numpy as jnp\n" + case["text"])
    monkeypatch.setattr(sys, "argv", ["exercises.py", str(file)])
    with pytest.raises(SystemExit) as stopped:
        load("5_GRPO_Maxtext").exercise_checks.main()
    out, err = capsys.readouterr()
    assert stopped.value.code == code and said in (err if code == 2 else out)
    assert err.count("error: ") == err.count("\n") == (code == 2)


@pytest.mark.parametrize("folder,arguments,runs", CASES["training"])
def test_the_scripts_train_with_the_readers_functions(
    folder, arguments, runs, tmp_path, monkeypatch, capsys
):
    """exercises.py with every blank filled; each function says so when it is traced or called."""
    bodies = {}
    for name in load(folder).exercise_checks.EXERCISES:
        function = ast.parse(inspect.getsource(scripts_own(folder, name))).body[0]
        bodies[name] = "\n".join([f'print("mine: {name}")', *map(ast.unparse, function.body[1:])])
    file = filled(folder, bodies, tmp_path).__file__
    for name, module in folders.load_all(folder).items():
        monkeypatch.setitem(sys.modules, name, module)
        for own in bodies.keys() & vars(module).keys():
            # a script has its own again afterward
            monkeypatch.setattr(module, own, getattr(module, own))
    monkeypatch.setattr(load(folder).runs, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(sys, "argv", ["exercises.py", *arguments.split()])
    runpy.run_path(file, run_name="__main__")
    judged, trained = capsys.readouterr().out.split("\nAll right.")
    assert all(f"{name:20s} right" in judged and f"mine: {name}" in trained for name in bodies)
    assert len([*tmp_path.glob("runs/*/*/result.json")]) == runs


@pytest.mark.slow
def test_folder_5_trains_the_tiny_llama_with_the_readers_functions(tmp_path):
    """To the digits of the script's own, in two gradient passes."""
    import grpo_llama3_1_8b_demo as script

    exercise_checks = load("5_GRPO_Maxtext").exercise_checks
    right = {case["name"]: case["text"] for case in CASES["body"] if not case["said"]}
    bodies = {name: right[name] for name in exercise_checks.EXERCISES}
    file = filled("5_GRPO_Maxtext", bodies, tmp_path).__file__
    arguments = [
        "NUM_BATCHES=3",
        "BATCH_SIZE=4",
        "NUM_GENERATIONS=4",
        "NUM_ITERATIONS=2",
        "LEARNING_RATE=1e-3",
        "TRAIN_MICRO_BATCH_SIZE=2",
        "SAVE_INTERVAL_STEPS=3",
        "EVAL_EVERY=4",
        "EVAL_QUESTIONS=8",
        "NUM_TEST_QUESTIONS=16",
        "LOG_ANSWERS_EVERY=2",
        "EVAL_CONFIG=liberal",
    ]
    logs = {}
    for who, method in (("script", []), ("reader", [f"METHOD={file}"])):
        script.main([*arguments, *method, f"RUN_DIR={tmp_path / who}"])
        rows = read_csv(tmp_path / who / "train_log.csv")
        logs[who] = [
            [float(row[name]) for name in ("reward", "loss", "grad_norm", "kl")] for row in rows
        ]
    # float32, summed in another order: the gradient's rounding, through six updates
    assert logs["reader"] == [pytest.approx(row, rel=2e-3, abs=1e-4) for row in logs["script"]]
