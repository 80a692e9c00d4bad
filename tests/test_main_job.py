"""The whole script, as a user runs it: to the end, stopped, killed and resumed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import grpo_llama3_1_8b_demo as demo
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_guards import load_weights

SCRIPT = demo.HERE / "grpo_llama3_1_8b_demo.py"
SHORT = [
    "NUM_BATCHES=12",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "NUM_TEST_QUESTIONS=16",
    "SAVE_INTERVAL_STEPS=3",
]


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(folder, *arguments):
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return out


def wait_for(condition, process, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


# What a resumed run could take up wrongly: half a batch, old log-probs, a schedule, questions asked again.
# Not TARGET_KL: SIGKILL can cost the log a step, and the controller that step's KL.
STATEFUL = ["TRAIN_MICRO_BATCH_SIZE=2", "NUM_ITERATIONS=2", "TEMPERATURE_END=0.7",
            "ZERO_VARIANCE_GROUPS=refill", "MASK_OVERLONG=True", "LOSS_AGG_MODE=token-mean"]  # fmt: skip


@pytest.mark.parametrize("options", [[], pytest.param(STATEFUL, marks=pytest.mark.slow)])
def test_killed_and_resumed_ends_with_the_very_same_weights(tmp_path, options):
    """SIGKILL while a checkpoint is being written, again at some later moment; then to the end."""
    updates = 24 if "NUM_ITERATIONS=2" in options else 12
    arguments = [*SHORT, *options]
    finish(tmp_path, *arguments, "RUN_DIR=whole")

    checkpoints = tmp_path / "broken" / "checkpoints" / "actor"
    process = start(tmp_path, *arguments, "RUN_DIR=broken")
    # a first checkpoint is there, and the second is being written (or was, just now)
    wait_for(lambda: len(list(checkpoints.glob("*"))) >= 2, process)
    kill(process)
    process = start(tmp_path, *arguments, "RUN_DIR=broken")
    first = max(int(p.name) for p in checkpoints.glob("*") if p.name.isdigit())
    wait_for(lambda: any(p.name.isdigit() and int(p.name) > first for p in checkpoints.glob("*")), process)
    kill(process)
    out = finish(tmp_path, *arguments, "RUN_DIR=broken")

    assert "going on after step" in out
    whole, broken = (load_weights(tmp_path / name, updates) for name in ("whole", "broken"))
    assert whole.keys() == broken.keys() and len(whole) > 60
    for name in whole:
        np.testing.assert_array_equal(whole[name], broken[name], err_msg=name)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "broken")]
    assert results[0]["after"] == results[1]["after"] and results[1]["steps"] == 12


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    arguments = [*SHORT, "NUM_BATCHES=500", "RUN_DIR=run"]
    process = start(tmp_path, *arguments)
    wait_for((tmp_path / "run" / "checkpoints" / "actor" / "6").exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 130
    assert "RUN_DIR=run" in err.splitlines()[-1] and "Traceback" not in err
    saved = max(int(p.name) for p in (tmp_path / "run" / "checkpoints" / "actor").iterdir())
    rows = (tmp_path / "run" / "train_log.csv").read_text().splitlines()
    assert len(rows) == 1 + saved  # the checkpoint is of the last step that the log shows
    assert not (tmp_path / "run" / "after.json").exists()


def test_it_learns_and_leaves_a_report(tmp_path):
    """50 of the 200 default steps: enough to see it, by a margin far above the intervals' width."""
    out = finish(tmp_path, "NUM_BATCHES=50", "NUM_TEST_QUESTIONS=256", "SEED=3", "RUN_DIR=run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    before, after = result["before"], result["after"]
    # a 95 % interval over 256 questions is at most 6 points to either side
    assert after["answer_accuracy"] > before["answer_accuracy"] + 0.15
    assert after["format_accuracy"] > before["format_accuracy"] + 0.15
    assert 0.2 <= before["greedy_answer_accuracy"] <= 0.6
    assert result["steps"] == 50 and result["seconds_per_step"] > 0 and before["questions"] == 256
    assert "tensorboard --logdir run/tensorboard" in out
    report = (tmp_path / "run" / "report.md").read_text()
    assert f"{after['answer_accuracy']:.1%}" in report and "wrong before" in report
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    curves = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    curves.Reload()
    losses = {event.step: event.value for event in curves.Scalars("actor/train/loss")}
    with open(tmp_path / "run" / "train_log.csv", newline="") as file:
        logged = [float(row["loss"]) for row in csv.DictReader(file)]
    assert list(losses.values()) == pytest.approx(logged, rel=1e-6)  # float32 and back
    assert (
        finish(tmp_path, "NUM_BATCHES=50", "NUM_TEST_QUESTIONS=256", "SEED=3", "RUN_DIR=run").count(
            "going on"
        )
        == 1
    )


def test_real_gsm8k_runs_to_the_end(tmp_path):
    gsm8k = demo.HERE.parent.parent / "shared" / "data" / "gsm8k"
    if not gsm8k.exists():
        pytest.skip("GSM8K is not beside this checkout")
    out = finish(
        tmp_path,
        f"DATASET={gsm8k}/train.jsonl",
        f"TEST_DATASET={gsm8k}/test.jsonl",
        "NUM_BATCHES=3",
        "RUN_DIR=run",
    )
    assert "of 7,473 questions are longer than MAX_PROMPT_LENGTH=28" in out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["after"]["answer_accuracy"] < 0.2


def test_gsm8k_through_tensorflow_datasets(tmp_path):
    """The stock data source reads what a builder prepared from local files: no network."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.text.gsm8k import gsm8k

    local = demo.HERE / "tiny_gsm8k" / "test.jsonl"
    rows = [json.loads(line) for line in local.read_text().splitlines()]
    with tfds.core.registered.skip_registration():

        class Gsm8k(gsm8k.Gsm8k):
            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(local) for split in ("train", "test")}

    Gsm8k(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    demo.configure([f"DATA_DIR={tmp_path}"])
    questions, source = demo.read_questions("gsm8k", "test")
    assert "tensorflow-datasets" in source
    assert sorted(q["question"] for q in questions) == sorted(row["question"] for row in rows)
    answers = {row["question"]: row["answer"].split("#### ")[1] for row in rows}
    assert {q["question"]: q["answer"] for q in questions} == answers


def test_gsm8k_without_a_network_says_what_it_uses_instead(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    demo.configure([f"DATA_DIR={tmp_path}"])
    questions, source = demo.read_questions("gsm8k", "test")
    assert len(questions) == 512 and source.endswith("tiny_gsm8k/test.jsonl")
    assert "embedded tiny_gsm8k" in capsys.readouterr().out
    assert os.environ["HTTPS_PROXY"]


def test_wilson_interval_is_the_closed_form():
    for share, n in ((0.0, 10), (0.5, 512), (0.9, 40)):
        z = 1.959963984540054  # the normal distribution's 97.5 % point
        center = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        np.testing.assert_allclose(demo.wilson(share, n), (center - half, center + half), atol=1e-12)


def test_majority_vote_counts_numbers_not_texts():
    answers = ["<answer>7</answer>", "<answer>12</answer>", "no tag", "<answer>12.0</answer>"]
    assert demo.majority(answers) == 1
    assert demo.majority(["no tag"]) == 0  # which is graded as wrong, as it has no answer


def test_flip_table_counts_each_pair():
    table = demo.flip_table([True, True, False, False, False], [True, False, True, True, False])
    assert "| right before | 1 | 1 |" in table and "| wrong before | 2 | 1 |" in table


def test_evaluation_with_several_passes(tmp_path):
    from test_rollout import make_rollout

    engine = make_rollout(rows=16)
    demo.configure([])
    rows = demo.make_prompts(engine._tokenizer, demo.read_questions("tiny_gsm8k", "test")[0][:32], "test")
    result = demo.evaluate(engine, rows, "liberal", num_passes=4)
    once = demo.evaluate(engine, rows, "greedy")
    assert result["pass_at_k"] >= result["answer_accuracy"] > 0
    assert len(result["correct"]) == len(result["completions"]) == 32
    graded = [demo.reward_func.grade(c, r["answer"]) for c, r in zip(result["completions"], rows)]
    assert graded == result["correct"]
    assert once["answer_accuracy"] == np.mean(once["correct"]) and "pass_at_k" not in once
