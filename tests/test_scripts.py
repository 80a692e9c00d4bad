"""What every numbered script of folders 1 to 4 does alike: help, one line on bad input, files,
seeds.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flax import nnx
from folders import ROOT, load
from measure import tables
from measure.columns import read_csv
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import settings

CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SHORT = CASES["short"]  # a run of seconds, with two rows of the log or more
Q, *_, MNIST = SHORT
FOLDERS = ["1_Q_Learning", "2_Cart_Pole_DQN", "3_Pendulum", "4_GRPO_MNIST"]
COMPILED = [name for name in SHORT if name[0] != "1"]
each_script = pytest.mark.parametrize("name", SHORT)


def script_of(name):
    return load(*name.split("/"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name): a short run of a script; its folder, what it returned, what it printed, its
    arguments.
    """
    home = tmp_path_factory.mktemp("runs")
    images = np.random.default_rng(0).integers(0, 256, (480, 784), np.uint8)
    labels = np.arange(480) % 10
    np.savez(
        home / "own.npz", x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100]
    )

    @functools.cache
    def once(name, seed=3):
        folder, out = home / f"{name.replace('/', '_')}_{seed}", io.StringIO()
        words = [*SHORT[name].split(), f"SEED={seed}", f"RUN_DIR={folder}"]
        words += [f"MNIST_PATH={home / 'own.npz'}"] * name.startswith("4")
        with contextlib.redirect_stdout(out):
            result = script_of(name).main(words)
        return folder, result, out.getvalue(), words

    return once


# no episode ended in some short intervals
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@each_script
def test_a_run_leaves_its_files_and_is_not_written_over(name, run):
    script = script_of(name)
    folder, result, printed, words = run(name)
    assert json.loads((folder / "result.json").read_text()) == result
    given = dataclasses.asdict(script.settings.read(script.Constants, words))
    assert json.loads((folder / "constants.json").read_text()) == given
    assert str(folder) in printed
    for picture in CASES["pictures"][name].split():
        with Image.open(folder / picture) as image:
            image.load()
            assert min(image.size) >= 300
    rows = read_csv(folder / "log.csv")
    if name in COMPILED:
        columns = ["seed", *script.Log._fields]
        assert list(rows[0]) == (["method"] if name.startswith("4") else []) + columns
        assert [row["seed"] for row in rows] == sorted(["3", "4"] * (len(rows) // 2))
        assert 0 < result["compile_seconds"] < result["seconds"]
    if "env_steps" in result:
        assert [int(float(rows[i]["env_step"])) for i in (len(rows) // 2 - 1, -1)] == result[
            "env_steps"
        ]
        assert f"{np.mean(result['eval_return']):.1f}" in printed
    # TensorBoard's own reader finds every curve: means over the seeds
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for column in [column for column in rows[0] if column not in ("method", "seed")]:
        values = np.reshape(
            [float(row[column] or "nan") for row in rows], (2 if name in COMPILED else 1, -1)
        )
        means = values.mean(axis=0)
        scalars = events.Scalars(f"train/{column}") if np.isfinite(means).any() else []
        found = [event.value for event in scalars]
        # float32 in the file
        np.testing.assert_allclose(found, means[np.isfinite(means)], rtol=1e-5)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    refused = f"^RUN_DIR={re.escape(str(folder))}: holds the result"
    with pytest.raises(script.settings.UserError, match=refused):
        script.main(words)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("name", COMPILED)
def test_seeds_do_not_see_each_other(name, run):
    """Seed 4 beside 3, and beside 5: the same digits. Seed 3 has others. Each row goes on where one
    ended.
    """
    (folder, _, _, words), script = run(name), script_of(name)
    c = script.settings.read(script.Constants, [*words, "SEED=4"])
    given = [c]
    if name == MNIST:
        given += [script.mnist.read_mnist(c.MNIST_PATH, "")[0], script.make_agent, script.update]
    agents, log, _ = script.train(*given)
    optimizer = next(part for part in agents if isinstance(part, nnx.Optimizer))
    assert (optimizer.step[...] >= CASES["gradient_steps"][name]).all()
    four = [[str(x[0, i].item()) for x in log] for i in range(log[0].shape[1])]
    rows = read_csv(folder / "log.csv")
    beside = {
        seed: [[row[x] for x in log._fields] for row in rows if row["seed"] == seed]
        for seed in "34"
    }
    assert beside["3"] != beside["4"] == four


def test_another_seed_is_another_training_and_the_same_is_the_same(run, tmp_path):
    script, words = script_of(Q), SHORT[Q].split()
    script.main([*words, "SEED=3", f"RUN_DIR={tmp_path}"])
    three, again, four = (read_csv(x / "q_table.csv") for x in (run(Q)[0], tmp_path, run(Q, 4)[0]))
    assert three == again != four


@each_script
def test_help_prints_every_constant_with_its_remark(name, capsys):
    script = script_of(name)
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    text = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    source = inspect.getsource(script.Constants)
    [constants] = ast.parse(source).body
    remarks = {
        node.target.id: tables.remark_on(node, source.splitlines())
        for node in constants.body
        if isinstance(node, ast.AnnAssign)
    }
    assert not stopped.value.code and list(remarks) == list(script.Constants.__dataclass_fields__)
    for constant, remark in remarks.items():
        assert f"--{constant}" in text and re.sub(r"\s", "", remark) in text, constant


@each_script
def test_every_constant_has_bounds(name):
    script = script_of(name)
    for constant in set(script.Constants.__dataclass_fields__) - {
        "RUN_DIR",
        "MNIST_PATH",
        "DATA_DIR",
    }:
        for value in ("-inf", "nan"):
            with pytest.raises(script.settings.UserError, match=f"^{constant}=.*: must [^\n]*$"):
                script.settings.read(script.Constants, [f"{constant}={value}"])


@pytest.mark.parametrize(
    "name, words, said", CASES["rules"], ids=[rule[1] for rule in CASES["rules"]]
)
def test_bad_input_is_one_line_with_the_remedy_and_exit_code_2(
    name, words, said, empty_folder, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["a script", *words.split(" ")])
    script = script_of(name)
    with pytest.raises(SystemExit) as stopped:
        script.settings.run(script.main)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and said in err
    assert not any(empty_folder.iterdir())  # nothing begun


def process(path, *arguments, cwd, disk="unlimited", **environment):
    """A script as a reader runs it; `disk`: the KiB beyond which no file can grow."""
    command = [
        "bash",
        "-c",
        f'ulimit -f {disk}; exec "$0" "$@"',
        sys.executable,
        ROOT / path,
        *arguments,
    ]
    variables = os.environ | environment
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, errors="replace"
    )


def test_a_terminal_that_is_not_utf_8_costs_no_run(tmp_path):
    done = process(
        "1_Q_Learning/Q_Learning.py",
        "NUM_EPISODES=200",
        "RUN_DIR=run",
        cwd=tmp_path,
        PYTHONIOENCODING="latin-1",
    )
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("folder", [*FOLDERS, settings.HERE.name])
def test_a_log_file_gets_each_line_at_once(folder, tmp_path):
    """While the program still runs, as a job of a day would; by itself, Python waits for 8 KiB."""
    code = "import sys, settings\n"
    code += "settings.run(lambda arguments: print('a line') or sys.stdin.read())"
    variables = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(tmp_path / "run.log", "w") as log:
        options = dict(cwd=ROOT / folder, env=variables, stdin=subprocess.PIPE, stdout=log)
        program = subprocess.Popen([sys.executable, "-c", code], **options)
    end = time.monotonic() + 30
    while not (written := (tmp_path / "run.log").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    program.communicate()
    assert written == "a line\n"


def test_a_full_disk_gets_one_line(tmp_path):
    """Large enough for log.csv, too small for TensorBoard's file."""
    words = ["NUM_EPISODES=2000", "RUN_DIR=run", "PRINT_EVERY=0"]
    done = process("1_Q_Learning/Q_Learning.py", *words, cwd=tmp_path, disk=4)
    assert done.returncode == 2 and (tmp_path / "run" / "constants.json").exists()
    assert (
        done.stderr.startswith("error: ")
        and done.stderr.count("\n") == 1
        and "RUN_DIR" in done.stderr
    )


@pytest.mark.parametrize(
    "path", ["2_Cart_Pole_DQN/exercises.py", "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py"]
)
def test_a_card_that_is_not_here_gets_one_line(path, tmp_path):
    done = process(path, cwd=tmp_path, JAX_PLATFORMS="cuda")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: JAX_PLATFORMS=cuda: ") and not any(tmp_path.iterdir())


def test_ctrl_c_ends_with_130_and_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        load("1_Q_Learning", "settings").run(lambda arguments: signal.raise_signal(signal.SIGINT))
    assert stopped.value.code == 130 and capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("folder", FOLDERS)
def test_runs_that_start_in_the_same_second_have_folders_of_their_own(
    folder, tmp_path, monkeypatch
):
    runs = load(folder, "runs")
    constants = dataclasses.make_dataclass("C", [("RUN_DIR", str, "")])()
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    folders = [runs.open_run("script", constants) for _ in range(24)]
    assert set(folders) == set((tmp_path / "script").iterdir()) and len(set(folders)) == 24
    assert all((path / "constants.json").exists() for path in folders)


def test_a_script_that_is_stopped_writes_what_it_trained(tmp_path, monkeypatch):
    ppo, rows = load("3_Pendulum", "ppo"), []
    handler = signal.getsignal(signal.SIGINT)

    def print_row(num_steps, shown, log):
        rows.append(int(log[-1].env_step.mean()))
        if len(log) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ppo.environments, "print_row", print_row)
    result = ppo.main(
        [*SHORT["3_Pendulum/ppo"].split(), "NUM_STEPS=3000", f"RUN_DIR={tmp_path / 'run'}"]
    )
    assert signal.getsignal(signal.SIGINT) is handler
    assert rows == [1000, 2000] and result["env_steps"] == [2000, 2000]
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 1 + 2 * 2
    assert (tmp_path / "run" / "learning_curve.png").exists()


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_a_second_ctrl_c_stops_at_once(folder):
    runs, done = load(folder, "runs"), []
    with pytest.raises(KeyboardInterrupt):
        for i in runs.until_ctrl_c(range(10)):
            for _ in range(2 * i):
                os.kill(os.getpid(), signal.SIGINT)
            done.append(i)
    assert done == [0]


@each_script
def test_a_path_from_the_home_folder_is_written_out(name, monkeypatch):
    """No shell is between us and it, as with zsh, a notebook or a job's file."""
    monkeypatch.setenv("HOME", "/somewhere")
    script = script_of(name)
    texts = [n for n, field in script.Constants.__dataclass_fields__.items() if field.type is str]
    for constant in texts:
        for given, meant in (
            ("~/a/b~", "/somewhere/a/b~"),
            ("~root/a", f"{Path('~root').expanduser()}/a"),
            ("a/~/b", "a/~/b"),
        ):
            c = script.settings.read(script.Constants, [f"{constant}={given}"])
            assert getattr(c, constant) == meant
    assert "~" not in "".join(str(vars(script.settings.read(script.Constants, []))))


def test_lists_of_paths_from_the_home_folder_are_written_out_and_a_prompt_is_left(monkeypatch):
    import grpo_llama3_1_8b_demo as demo

    monkeypatch.setenv("HOME", "/somewhere")
    given = {
        "DATASET": ("~/a.jsonl:2,~/b.jsonl:1,c", "/somewhere/a.jsonl:2,/somewhere/b.jsonl:1,c"),
        "RUN_DIR": ("~", "/somewhere"),
        "CHECKPOINT_DIR": ("gs://bucket/~", "gs://bucket/~"),
        "MODEL": ("~/model", "/somewhere/model"),
        "SYSTEM_PROMPT": ("~5 steps, then ~ the answer: a~b/c", None),
    }
    c = settings.read(demo.Constants, [f"{name}={text}" for name, (text, _) in given.items()])
    assert {name: getattr(c, name) for name in given} == {
        name: meant or text for name, (text, meant) in given.items()
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_a_scheduler_and_a_closed_terminal_stop_a_script_as_ctrl_c_does(folder, number):
    runs, done = load(folder, "runs"), []
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does
    try:
        for ignored in (True, False):
            for i in runs.until_ctrl_c(range(3)):
                signal.raise_signal(number)
                done.append(i)
            assert done == ([0, 1, 2] if ignored else [0, 1, 2, 0])
            signal.signal(number, signal.SIG_DFL)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    "setup",
    [
        "import runs; items = runs.until_ctrl_c(range(9))",
        "from run import process; stop = process.stop_after_step()\n"
        "def steps():\n    with stop as event:\n        for i in range(9):\n"
        "            yield i\n            if event.is_set(): return\nitems = steps()",
    ],
    ids=["3_Pendulum", "5_GRPO_Maxtext"],
)
def test_a_closed_terminal_ends_a_script_that_prints_without_losing_what_it_has(setup, tmp_path):
    """A real terminal: when it's gone, every print to it fails."""
    folder = ROOT / ("5_GRPO_Maxtext" if "process" in setup else "3_Pendulum")
    program = f"""import pathlib, signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
{setup}
for i in items:
    print("step", i, flush=True)
    deadline = time.monotonic() + 60
    while i == 1 and time.monotonic() < deadline and not pathlib.Path("closed").exists():
        time.sleep(0.01)
print("it prints on", flush=True)
pathlib.Path("kept").write_text(str(i))
"""
    ours, terminal = os.openpty()
    command = [sys.executable, "-c", program]
    child = subprocess.Popen(
        # a session of its own, whose terminal this is
        ["setsid", "--ctty", "--wait", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    said = b""
    while b"step 1" not in said:
        said += os.read(ours, 1000)
    os.close(ours)
    (tmp_path / "closed").touch()
    child.wait(timeout=100)
    assert (tmp_path / "kept").read_text() == "1"


@pytest.mark.parametrize(
    "run", [*(load(folder, "settings").run for folder in FOLDERS), settings.run]
)
def test_the_last_cell_of_a_script_runs_in_a_notebook(run, monkeypatch):
    """Its kernel's arguments are no constants of the reader's."""
    given = []
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    run(given.append)
    assert given == [[]]
