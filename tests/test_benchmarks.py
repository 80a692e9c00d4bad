"""The benchmarks and studies, at sizes of a few seconds."""

import math
import sys

import against_peers
import grpo_step_against_trl
import numpy as np
import pytest
import where_the_step_goes
from machine import write_csv
from measure import tables


def test_a_prompt_that_is_shared_counts_once():
    # 2 questions, 2 answers each
    prompt_mask = np.repeat([[0, 1, 1, 1], [1, 1, 1, 1]], 2, axis=0) != 0
    completion_mask = np.array([[1, 0], [1, 1], [1, 0], [1, 0]]) != 0
    masks = [(prompt_mask, completion_mask)]
    assert where_the_step_goes.useful_share(masks, 1) == (14 / 16, 5 / 8, 19 / 24)
    assert where_the_step_goes.useful_share(masks, 2) == (7 / 8, 5 / 8, 12 / 16)


def test_the_timed_parts_of_a_step_are_there():
    assert all(hasattr(owner, name) for owner, name in where_the_step_goes.PARTS.values())


def test_of_a_training_only_the_steps_that_count_are_counted(tmp_path):
    rows = "seconds,reward,length\n90.0,0,9\n80.0,1,9\n3.0,2,4\n1.0,3,3\n2.0,4,5\n"
    log = tmp_path / "log.csv"
    code = (
        f"from sys import *; open(argv[1], 'w').write({rows!r}); print('the end'); "
        "exit('FAIL=1' in argv)"
    )
    command, given = [sys.executable, "-c", code, log], {"NUM_BATCHES": 5}
    found, output = grpo_step_against_trl.watched(command, given, log, warm_up=2)
    assert [found[k] for k in ("seconds_per_step", "first_reward", "last_reward")] == [
        2.0,
        0.0,
        2.0,
    ]
    assert found["answer_tokens"] == 4.0
    assert output == "the end\n"
    with pytest.raises(RuntimeError, match="exit code 1"):
        grpo_step_against_trl.watched(command, given | {"FAIL": 1}, log, warm_up=2)


def test_a_row_of_a_peer_by_hand(tmp_path, monkeypatch):
    entry = against_peers.Entry("somebody", "peer", 2)
    result = {
        "version": "0.1",
        "env_steps": 300,
        "seconds": 5.0,
        "processor_seconds": 4.0,
        "compile_seconds": 1.0,
        "eval_return": [480.0, 100.0],
        "curves": [[(100, 2.0, 20.0), (200, 3.0, 475.0), (300, 4.0, 500.0)], [(300, 4.0, 474.9)]],
    }
    rows = against_peers.rows_of(entry, [0, 1], result, 475)
    reached = [(row["env_steps_to_threshold"], row["seconds_to_threshold"]) for row in rows]
    assert reached == [(200, 3.0), ("", "")]
    (tmp_path / "benchmarks").mkdir()
    write_csv(tmp_path / "benchmarks" / "dqn_against_peers.csv", rows)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    [line] = tables.peers(tmp_path / "2_Cart_Pole_DQN", 0)
    # Student's t of one degree of freedom, 97.5 %
    half = 12.7062 * math.sqrt(2 * 190**2) / math.sqrt(2)
    interval = f"{290 - half:.1f} … {290 + half:.1f}".replace("-", "−")
    cells = ["somebody", "300", "2 together", "5.0 s", "4.0 s", "1.0 s", "290.0 ± 268.7"]
    assert line == [*cells, interval, "1 / 2", "200", "3.0 s"]
