"""What happens at the edges of a run: two at once, Ctrl-C in the middle, a notebook, a damaged program."""

import dataclasses
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import load

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


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a log, as a tree."""

    count: jax.Array
    value: jax.Array

    def __getitem__(self, i):
        return (self.count, self.value)[i]


jax.tree_util.register_dataclass(Row)


@pytest.mark.parametrize("folder", COMPILED)
def test_ctrl_c_stops_a_training_at_the_next_report_and_keeps_what_was_trained(folder, capsys):
    runs, reported = load(folder, "runs"), []

    def report(row):
        reported.append(float(row.value))
        if len(reported) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            runs.STOP.wait(10)  # the signal is on its way to the main thread

    def body(agent, x):
        agent = agent + x
        return agent, Row(agent.astype(int), 10.0 * agent)

    def train(start):
        return runs.scan(body, start, jnp.ones(1_000), report)

    runs.STOP.clear()
    handler = signal.getsignal(signal.SIGINT)
    train_all = jax.vmap(train, axis_name="seed")
    (agents, log), _ = runs.compile_and_run(train_all, jnp.array([0.0, 2.0]))
    assert signal.getsignal(signal.SIGINT) is handler
    assert reported == [20.0, 30.0, 40.0]  # means over both seeds
    assert agents.tolist() == [3.0, 5.0]
    log = runs.trained_rows(log)
    assert log.count.tolist() == [[1, 2, 3], [3, 4, 5]] and isinstance(log.value, np.ndarray)
    assert "stopping at the next report" in capsys.readouterr().out
    runs.STOP.clear()
    (agents, log), _ = runs.compile_and_run(train_all, jnp.array([0.0, 2.0]))  # nobody stops this one
    assert agents.tolist() == [1_000.0, 1_002.0] and log.count.shape == (2, 1_000)


@pytest.mark.parametrize("folder", COMPILED)
def test_a_study_keeps_no_row_that_was_stopped(folder):
    runs = load(folder, "runs")
    shown = ("grpo", 10, 1) if folder[0] == "4" else (10, ["loss"])
    with pytest.raises(KeyboardInterrupt), runs.progress(*shown):
        runs.STOP.set()
    with runs.progress(*shown):  # and the next training is not stopped by it
        assert not runs.STOP.is_set()


def test_a_script_that_is_stopped_writes_what_it_trained(tmp_path, monkeypatch):
    dqn = load("2_Cart_Pole_DQN", "cart_pole_dqn")
    rows = []

    def stop_at_the_second(log):
        rows.append(int(log.env_step))
        if len(rows) >= 2:
            os.kill(os.getpid(), signal.SIGINT)
            dqn.runs.STOP.wait(10)

    train_seeds = dqn.train_seeds
    monkeypatch.setattr(dqn, "train_seeds", lambda c, report: train_seeds(c, stop_at_the_second))
    small = ["NUM_SEEDS=1", "HIDDEN_SIZE=4", "REPLAY_CAPACITY=1000", "EVAL_EPISODES=1"]
    result = dqn.main([*small, f"RUN_DIR={tmp_path / 'run'}"])
    assert rows == [2_000, 3_000] and result["env_steps"] == [3_000]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["env_steps"] == [3_000]
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 1 + 2
    assert (tmp_path / "run" / "learning_curve.png").exists()
