"""The benchmarks and studies, at sizes of a few seconds."""

import csv
import math
import re
import sys

import against_peers
import gradient_on_cpu
import grpo_step_against_trl
import numpy as np
import pytest
import where_the_step_goes


def test_a_prompt_that_is_shared_counts_once():
    prompt_mask = np.repeat([[0, 1, 1, 1], [1, 1, 1, 1]], 2, axis=0) != 0  # 2 questions, 2 answers each
    completion_mask = np.array([[1, 0], [1, 1], [1, 0], [1, 0]]) != 0
    masks = [(prompt_mask, completion_mask)]
    assert where_the_step_goes.useful_share(masks, 1) == (14 / 16, 5 / 8, 19 / 24)
    assert where_the_step_goes.useful_share(masks, 2) == (7 / 8, 5 / 8, 12 / 16)


@pytest.mark.slow
def test_the_parts_of_a_step_add_up(monkeypatch, capsys):
    arguments = ["STEPS=5", "BATCH_SIZE=4", "NUM_GENERATIONS=4", "NUM_ITERATIONS=2"]
    monkeypatch.setattr(sys, "argv", ["where_the_step_goes.py", *arguments])
    where_the_step_goes.main()
    said = capsys.readouterr().out
    parts = re.findall(r"^(\S.*?)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)%$", said, re.MULTILINE)[:7]
    steps = ["generation", "rewards", "reference", "old log-probs", "update", "logging", "rest"]
    assert [name for name, *_ in parts] == steps
    wall = [float(milliseconds) for _, milliseconds, *_ in parts]
    assert min(wall) > 0  # with two updates per batch there are old log-probs
    [whole] = re.findall(r"^all\s+([\d.]+)", said, re.MULTILINE)
    assert sum(wall) == pytest.approx(float(whole), abs=0.4)  # each rounded to 0.1
    assert sum(float(share) for *_, share in parts) == pytest.approx(100, abs=0.4)
    assert "loss and gradient" in said


TRAINING = """
import sys, time
log = open(sys.argv[1], "w")
print("seconds,reward", file=log, flush=True)
for step, seconds in enumerate((90.0, 80.0, 3.0, 1.0, 2.0, 0)):
    held = None
    held = b"x" * ((120 if 0 < step < 5 else 300) << 20)
    time.sleep(0.5)
    print(*[f"{seconds},{step}"] * (step < 5), file=log, flush=True)
print("the end")
sys.exit(len(sys.argv) - 2)
"""


def test_a_training_is_watched_during_the_steps_that_count(tmp_path):
    """300 MiB before and after them, 120 MiB in them; Python itself takes about 10."""
    command = [sys.executable, "-c", TRAINING, tmp_path / "log.csv"]
    found = grpo_step_against_trl.watched(command, tmp_path / "log.csv", steps=5, warm_up=2)
    assert found["seconds"] == 2.0 and found["first_reward"] == 0.0 and found["last_reward"] == 2.0
    assert found["output"] == "the end\n"
    assert 120 / 1024 < found["peak_gib"] < 200 / 1024
    with pytest.raises(RuntimeError, match="exit code 1"):
        grpo_step_against_trl.watched([*command, "fail"], tmp_path / "log.csv", steps=5, warm_up=2)


def test_every_variant_of_the_gradient_is_the_same_gradient():
    with open(gradient_on_cpu.TABLE, newline="") as file:
        norms = [float(row["gradient_norm"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(norms, norms[0], rtol=2e-5)  # float32 sums in another order


def test_a_row_of_a_peer_by_hand():
    entry = against_peers.Entry("somebody", "peer.py", 2)
    result = {
        "version": "0.1", "env_steps": 300, "seconds": 5.0, "processor_seconds": 4.0, "compile_seconds": 1.0,
        "eval_return": [480.0, 100.0],
        "curves": [[(100, 2.0, 20.0), (200, 3.0, 475.0), (300, 4.0, 500.0)], [(300, 4.0, 474.9)]],
    }  # fmt: skip
    rows = against_peers.rows_of(entry, [0, 1], result, 475)
    reached = [(row["env_steps_to_threshold"], row["seconds_to_threshold"]) for row in rows]
    assert reached == [(200, 3.0), ("", "")]
    [line] = against_peers.table(rows)
    half = 12.7062 * math.sqrt(2 * 190**2) / math.sqrt(2)  # Student's t of one degree of freedom, 97.5 %
    interval = f"{290 - half:.1f} … {290 + half:.1f}".replace("-", "−")
    cells = "| somebody | 300 | 2 together | 5.0 s | 4.0 s | 1.0 s | 290.0 ± 268.7 |"
    assert line == f"{cells} {interval} | 1 / 2 | 200 | 3.0 s |"
