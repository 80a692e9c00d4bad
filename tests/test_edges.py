"""What happens at the edges of a run: two at once, Ctrl-C in the middle, a notebook, a damaged program."""

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import short_runs
from folders import load

import settings
from run import run_folder
from task import questions, run_grader
from tools import code_reward

FOLDERS = ["1_Q_Learning", "2_Cart_Pole_DQN", "3_Pendulum", "4_GRPO_MNIST"]
COMPILED = FOLDERS[1:]  # the training is one program


@dataclasses.dataclass(frozen=True)
class Constants:
    RUN_DIR: str = ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_runs_that_start_in_the_same_second_have_folders_of_their_own(folder, tmp_path, monkeypatch):
    runs = load(folder, "runs")
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    monkeypatch.setattr(runs.time, "strftime", lambda form: "noon")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: runs.open_run("script", Constants()), range(24)))
    assert set(folders) == set((tmp_path / "script").iterdir()) and len(set(folders)) == 24
    assert {"noon", "noon_2", "noon_24"} <= {path.name for path in folders}
    assert all((path / "constants.json").exists() for path in folders)


@pytest.mark.parametrize("folder", FOLDERS)
def test_runs_lie_in_the_repository_wherever_the_script_is_called(folder, tmp_path):
    runs = load(folder, "runs")
    assert runs.RUNS.resolve() == (tmp_path / __file__).resolve().parent.parent / "runs"


def stop_at_the_second(runs, rows):
    """Ctrl-C while a script prints the second row of its log; keeps their steps in `rows`."""

    def print_row(log, *_):
        rows.append(int(log[-1].env_step.mean()))
        if len(log) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    return mock.patch.object(runs, "print_row", print_row)


SMALL_DQN = ["NUM_SEEDS=1", "HIDDEN_SIZE=4", "REPLAY_CAPACITY=1000", "EVAL_EPISODES=1"]


def test_a_script_that_is_stopped_writes_what_it_trained(tmp_path, capsys):
    dqn, rows = load("2_Cart_Pole_DQN", "cart_pole_dqn"), []
    handler = signal.getsignal(signal.SIGINT)
    with stop_at_the_second(dqn.runs, rows):
        result = dqn.main([*SMALL_DQN, f"RUN_DIR={tmp_path / 'run'}"])
    assert signal.getsignal(signal.SIGINT) is handler
    assert rows == [2_000, 3_000] and result["env_steps"] == [3_000]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["env_steps"] == [3_000]
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 1 + 2
    assert (tmp_path / "run" / "learning_curve.png").exists()


@pytest.mark.parametrize("folder", COMPILED)
def test_a_second_ctrl_c_stops_at_once(folder):
    runs, done = load(folder, "runs"), []
    with pytest.raises(KeyboardInterrupt):
        for i in runs.until_ctrl_c(range(10)):
            for _ in range(2 * i):
                os.kill(os.getpid(), signal.SIGINT)
            done.append(i)
    assert done == [0]


# --- folder 5


def test_module_6_makes_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda form, *when: f"{form.rpartition('/')[0]}/noon")
    made = [run_folder.new_folder("mesh_and_axis_rules") for _ in range(3)]
    assert [path.name for path in made] == ["noon", "noon_2", "noon_3"]
    assert {path.parent.name for path in made} == {"mesh_and_axis_rules"}


@pytest.mark.parametrize("folder", [*FOLDERS, "5_GRPO_Maxtext"])
def test_the_last_cell_of_a_script_runs_in_a_notebook(folder, monkeypatch):
    """Its kernel's arguments are no constants of the reader's; those that a cell puts in their place are."""
    given, run = [], load(folder, "settings").run
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    run(given.append)
    monkeypatch.setattr(sys, "argv", ["script.py", "SEED=1"])
    run(given.append)
    assert given == [[], ["SEED=1"]]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_finished_run_takes_more_steps_and_counts_on_in_whole_numbers(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    short = [argument for argument in short_runs.SHORT if not argument.startswith("NUM_BATCHES")]
    with pytest.raises(settings.UserError, match="NUM_BATCHES=7: the run in RUN_DIR=run was started with 8"):
        short_runs.run_here(tmp_path, *short, "NUM_BATCHES=7")
    said = short_runs.run_here(tmp_path, *short, "NUM_BATCHES=9")
    assert "NUM_BATCHES raised from 8 to 9" in said and "the schedule of 9 steps" in said
    rows = rows_of(tmp_path / "run" / "train_log.csv")
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 10)]
    assert {row["answers"] for row in rows} == {"16"}
    assert float(rows[-1]["grad_norm"]) > 0
    after = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (before["steps"], after["steps"]) == (8, 9)
    assert json.loads((tmp_path / "run" / "constants.json").read_text())["NUM_BATCHES"] == 9


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_a_csv_file_is_called_one(tmp_path, name):
    (tmp_path / name).write_text("question,answer\n1+1,2\n")
    with pytest.raises(settings.UserError, match=r"a table of texts.*; give a JSON, JSONL or Parquet file"):
        questions.read_file(tmp_path / name)


def test_a_faulty_reward_function_is_named_with_its_file_and_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import json\n\ndef broken(prompts, completions, **columns):\n    json.loads('{')\n")
    broken = run_grader.guarded("broken", run_grader.load_file(path).broken)
    with pytest.raises(settings.UserError, match=rf"JSONDecodeError.*; fix it \({path}, line 4\)$"):
        broken([""], [""])
    path.write_text("\nimport json\njson.loads('{')\n")
    with pytest.raises(settings.UserError, match=rf"; fix it \({path}, line 3\)$"):
        run_grader.load_file(path)


def test_code_reward_says_which_tests_failed(tmp_path, capsys):
    (tmp_path / "answer.py").write_text("def add(a, b):\n    return abs(a) + b\n")
    tests = tmp_path / "tests.py"
    tests.write_text("assert add(1, 2) == 3\nfor i in range(3):\n    assert add(-i, 0) == -i\n")
    code_reward.main([f"ANSWER={tmp_path / 'answer.py'}", f"TESTS={tests}"])
    said = capsys.readouterr().out
    assert "score: 0.500" in said and "add(1, 2)" not in said
    assert "failed: for i in range(3):" in said and "assert add(-i, 0) == -i" in said
    tests.write_text(json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["1\n", "4\n"]}))
    (tmp_path / "answer.py").write_text("print(int(input()))\n")
    code_reward.main([f"ANSWER={tmp_path / 'answer.py'}", f"TESTS={tests}"])
    assert r"failed: input '2\n', expected output '4\n'" in capsys.readouterr().out


@pytest.mark.parametrize("spoil", ["a file in the way", "the lock is somebody's", "an entry is somebody's"])
def test_a_cache_that_cannot_be_used_does_not_stop_a_run(spoil, tmp_path):
    """Root may write everything, so folders stand where files belong."""
    program = (
        "import jax, sys\nfrom run import process\nprocess.keep_compiled()\n"
        "print(jax.jit(lambda x: x + 1)(1.0))"
    )

    def run_it():
        return subprocess.run(
            [sys.executable, "-c", program], cwd=settings.HERE, capture_output=True, text=True,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "c" / "d")},
        )  # fmt: skip

    if spoil == "a file in the way":
        (tmp_path / "c").touch()
    else:
        (tmp_path / "c" / "d" / (".lockfile" * spoil.startswith("the lock"))).mkdir(parents=True)
    if spoil.startswith("an entry"):
        run_it()
        for path in (tmp_path / "c" / "d").glob("*-cache"):
            path.unlink()
            path.mkdir()
    done = run_it()
    assert done.stdout.splitlines()[-1] == "2.0" and "Traceback" not in done.stderr
    assert ("not kept" in done.stdout) == (not spoil.startswith("an entry"))


def test_a_terminal_without_arrows_gets_their_numbers():
    program = "import settings\nsettings.answer(lambda arguments: print('3 \u2192 4'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=settings.HERE, capture_output=True,
                          env=os.environ | {"PYTHONIOENCODING": "latin-1"})  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"3 \\u2192 4\n")


DAMAGED = """
import pathlib, sys
import jax
sys.path.insert(0, sys.argv[1])
if "Maxtext" in sys.argv[1]:
    from run import process
    process.keep_compiled()
else:
    import runs
    runs.start_jax()
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

def program(x):
    return x + 1

jax.jit(program)(1.0)
[path] = pathlib.Path(sys.argv[2]).glob("jit_program-*-cache")
whole = path.read_bytes()
path.write_bytes(whole[:100])
jax.clear_caches()
jax.jit(program)(1.0)
print(len(path.read_bytes()) > 100)
"""


@pytest.mark.parametrize("folder", ["2_Cart_Pole_DQN", "5_GRPO_Maxtext"])
def test_a_compiled_program_that_is_damaged_is_kept_anew_without_a_word(folder, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-c", DAMAGED, settings.HERE.parent / folder, tmp_path / "compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
