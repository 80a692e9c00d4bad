"""The whole script, as a user runs it: to the end, stopped, killed and resumed."""

import contextlib
import itertools
import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from short_runs import HANGS, SHORT, load_weights, run_here, saved_steps, wait_for
from short_runs import start as start_run

import grpo_llama3_1_8b_demo as demo
import settings
from run import checkpoints, training
from run.run_files import read_log

GSM8K = settings.HERE.parent.parent / "shared" / "data" / "gsm8k"

OPTIONS = [
    *SHORT,
    "NUM_BATCHES=4",
    "EVAL_EVERY=2",
    "EVAL_QUESTIONS=4",
    "NUM_TEST_QUESTIONS=4",
    "CHECKPOINT_DIR=elsewhere",
]
# What a resumed run could take up wrongly: half a batch, old log-probs, a schedule, questions asked
# again, the weight of the KL, pass rates; and answers that were drawn with weights that are gone.
STATEFUL = [
    "TRAIN_MICRO_BATCH_SIZE=2",
    "NUM_ITERATIONS=2",
    "TEMPERATURE=0.6",
    "TEMPERATURE_END=0.3",
    "TARGET_KL=0.001",
    "ZERO_VARIANCE_GROUPS=refill",
    "MASK_OVERLONG=True",
    "LOSS_AGG_MODE=token-mean",
    "ROLLOUTS=curriculum",
]
AHEAD = ["ROLLOUTS=one-step-ahead", "SAMPLER_CORRECTION=2.0"]
BETWEEN_TWO, IN_THE_LAST = "3 before its row", "4 while saving"


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


def assert_same_end(whole, other, place="checkpoints"):
    """Log (all but times and memory), answers, evaluations, result and weights of two runs, bit for
    bit.
    """
    logs = []
    for folder in (whole, other):
        rows = read_log(folder / "train_log.csv")
        logs.append(
            [
                {
                    name: repr(value)
                    for name, value in row.items()
                    if not name.startswith(("memory", "seconds", "tokens_per"))
                }
                for row in rows
            ]
        )
    steps = len(logs[0])
    assert [row["step"] for row in logs[0]] == [repr(step + 1.0) for step in range(steps)]
    assert logs[0] == logs[1] and steps in (4, 8) and len(logs[0][0]) > 25
    for name in ("answers.jsonl", "evaluations.jsonl"):  # no step twice, none lost
        lines = [(folder / name).read_text() for folder in (whole, other)]
        assert lines[0] == lines[1] and f'"step": {steps}' in lines[0]
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, other)]
    assert (
        results[0]["before"] == results[1]["before"] and results[0]["after"] == results[1]["after"]
    )
    weights = [load_weights(folder, steps, place) for folder in (whole, other)]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 60
    for name in weights[0]:
        np.testing.assert_array_equal(weights[0][name], weights[1][name], err_msg=name)


def test_ctrl_c_saves_says_how_to_go_on_and_the_run_ends_as_one_that_was_not_stopped(
    finished, tmp_path
):
    process = start_run(tmp_path, *SHORT, "RUN_DIR=run")
    wait_for(lambda: saved_steps(tmp_path / "run"), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert "RUN_DIR=run" in err.splitlines()[-1] and "Traceback" not in err
    rows = (tmp_path / "run" / "train_log.csv").read_text().splitlines()
    done = saved_steps(tmp_path / "run")[-1]  # of the last step that the log shows
    assert len(rows) == 1 + done < 1 + 8
    assert not (tmp_path / "run" / "after.json").exists()
    assert f"going on after step {done} of 8" in run_here(tmp_path, *SHORT)
    assert_same_end(finished / "run", tmp_path / "run")


def moments_of_a_kill(monkeypatch, whole, kept):
    """Copies what a run in `whole` has written, as a SIGKILL would leave it, at three moments a
    step.
    """

    def copying(when, original):
        def called(self, *arguments):
            step = int(arguments[0]["step"]) if when == "row" else int(arguments[0])
            if when == "row":
                copy(f"{step} before its row")
            result = original(self, *arguments)
            copy(f"{step} after its row" if when == "row" else f"{step} while saving")
            return result

        return called

    def copy(name):
        # a thread writes it
        while name == BETWEEN_TWO and not (whole / "elsewhere/run/2").exists():
            time.sleep(0.01)
        # Orbax is writing: what it renames in between is gone, as it is for whoever looks at the
        # disk
        with contextlib.suppress(shutil.Error):
            shutil.copytree(whole, kept / name, symlinks=True)

    monkeypatch.setattr(training.TrainingLog, "add", copying("row", training.TrainingLog.add))
    monkeypatch.setattr(checkpoints, "save", copying("save", checkpoints.save))


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        pytest.param(STATEFUL, {BETWEEN_TWO: "machine lost", IN_THE_LAST: ""}, id="two moments"),
        pytest.param(STATEFUL, None, id="every moment", marks=pytest.mark.slow),
        pytest.param(AHEAD, None, id="answers ahead, every moment", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_and_resumed_ends_in_the_same_bits(
    options, moments, tmp_path, monkeypatch
):
    """With the machine, only CHECKPOINT_DIR is left."""
    whole, kept, few = (tmp_path / name for name in ("whole", "kept", "few"))
    for folder in (whole, kept, few):
        folder.mkdir()
    for split, rows in (("train", 20), ("test", 4)):  # 16 to train on: a curriculum asks some again
        lines = (settings.HERE / "tiny_gsm8k" / f"{split}.jsonl").read_text().splitlines()[:rows]
        (few / f"{split}.jsonl").write_text("\n".join(lines))
    options = [*OPTIONS, *options, f"DATASET={few}"]
    with monkeypatch.context() as patch:
        moments_of_a_kill(patch, whole, kept)
        run_here(whole, *options)
    every = sorted(path.name for path in kept.iterdir())
    assert len(every) == 4 * 2 + 2
    log = read_log(whole / "run" / "train_log.csv")
    if "TARGET_KL=0.001" in options:  # or it would show nothing
        assert len({row["beta"] for row in log}) > 2 and any(row["answers"] > 16 for row in log)
        assert [row["temperature"] for row in log] == pytest.approx([0.6, 0.5, 0.4, 0.3])
    else:
        assert log[-1]["mismatch"] > 10 * log[0]["mismatch"]
    cases = moments.items() if moments else itertools.product(every, ("", "machine lost"))
    for name, lost in cases:
        folder = tmp_path / f"{name} {lost}"
        shutil.copytree(kept / name, folder)
        if lost:
            shutil.rmtree(folder / "run")
        said = run_here(folder, *options)
        assert name != BETWEEN_TWO or "going on after step 2 of 4" in said
        assert_same_end(whole / "run", folder / "run", "../elsewhere/run")


LEARNS = [
    *SHORT,
    "NUM_BATCHES=25",
    "NUM_TEST_QUESTIONS=128",
    "EVAL_EVERY=25",
    "LOG_ANSWERS_EVERY=25",
    "SAVE_INTERVAL_STEPS=25",
    "SEED=5",
    "RUN_DIR=my run",
]


def test_it_learns_and_leaves_a_report(empty_folder, capsys):
    """Three seeds gained 40 to 45 points. Run again, it only says that it's over."""
    demo.main(LEARNS)
    out, run = capsys.readouterr().out, Path("my run")
    demo.main(LEARNS)
    assert capsys.readouterr().out.count("going on") == 1
    result = json.loads((run / "result.json").read_text())
    before, after = result["before"], result["after"]
    # a 95 % interval over 128 questions is at most 9 points to either side
    assert after["answer_accuracy"] > before["answer_accuracy"] + 0.15
    assert after["format_accuracy"] > before["format_accuracy"] + 0.15
    assert 0.2 <= before["greedy_answer_accuracy"] <= 0.6
    assert result["steps"] == 25 and result["seconds_per_step"] > 0 and before["questions"] == 128
    assert "tensorboard --logdir 'my run/tensorboard'" in out
    assert f"{after['answer_accuracy']:.1%}" in (run / "report.md").read_text()
    assert out.splitlines()[0].endswith("; the constants' small column")


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside this checkout")
def test_real_gsm8k_runs_to_the_end(tmp_path):
    data = [f"DATASET={GSM8K}/train.jsonl", f"TEST_DATASET={GSM8K}/test.jsonl"]
    said = run_here(tmp_path, *data, *SHORT)
    assert "of 7,473 questions are longer than MAX_PROMPT_LENGTH=28" in said
    assert (
        json.loads((tmp_path / "run" / "result.json").read_text())["after"]["answer_accuracy"] < 0.2
    )
