"""What every numbered script of folders 1 to 4 does alike: help, one line on bad input, files,
seeds.
"""

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
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flax import nnx
from folders import ROOT, load
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
    remarks = dict(
        re.findall(r"^    ([A-Z_]+): .+?  # (.+)$", inspect.getsource(script.Constants), re.M)
    )
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
