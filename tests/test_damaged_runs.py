"""A run's folder after a kill, a full disk or a careless hand: one clear line, or the run simply goes on."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from short_runs import HANGS, SCRIPT
from test_guards import load_weights

import convert_checkpoint as convert
import grpo_llama3_1_8b_demo as demo
import health
import inference
import reward_func
import show_run
from parts import checkpoints, llama, run_log, settings, task_rewards
from parts.run_files import read_log
from parts.settings import UserError

RUN = ["NUM_BATCHES=4", "BATCH_SIZE=2", "NUM_GENERATIONS=4", "NUM_TEST_QUESTIONS=4", "SAVE_INTERVAL_STEPS=2",
       "EVAL_EVERY=2", "EVAL_QUESTIONS=4", "LOG_ANSWERS_EVERY=1", "EVAL_CONFIG=liberal"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run that is over: run/."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        demo.main([*RUN, "RUN_DIR=run"])
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of it in the current folder, to be damaged."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "run", "run")
    return Path("run")


def cut(path):
    """Half of a file, as a full disk leaves it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(bytes(range(256)) * 4 + b"\n")


def actor(run, step=4):
    return run / "checkpoints" / "actor" / str(step)


def empty_folder(run):
    shutil.rmtree(actor(run))
    actor(run).mkdir()


def cut_data(run):
    """The largest file of the weights: the arrays themselves."""
    cut(max(actor(run, 4).glob("model_params/**/*"), key=lambda path: path.is_file() * path.stat().st_size))


# name: (what is done to the run, what is said)
REFUSED = {
    "constants empty": (lambda run: empty(run / "constants.json"), "its constants.json is damaged"),
    "constants cut": (lambda run: cut(run / "constants.json"), "its constants.json is damaged"),
    "constants a list": (
        lambda run: (run / "constants.json").write_text("[1]"),
        "RUN_DIR=run: its constants.json is damaged",
    ),
    "constants garbage": (
        lambda run: garbage(run / "constants.json"), "RUN_DIR=run: its constants.json is damaged"
    ),
    "constants lost": (  # a new run, that is not to go on with another's weights
        lambda run: (run / "constants.json").unlink(), "holds the checkpoints of another run"
    ),
    "run.json cut": (lambda run: cut(run / "run.json"), "run.json is damaged; copy .*checkpoints/run.json"),
    "before lost": (lambda run: (run / "before.json").unlink(), "before.json is lost or damaged, and after"),
    "before cut": (lambda run: cut(run / "before.json"), "before.json is lost or damaged, and after"),
    "every checkpoint": (
        lambda run: [shutil.rmtree(actor(run, step) / "model_params") for step in (2, 4)],
        r"none of its checkpoints \(2, 4\) can be read.*model_params",
    ),
    "the mark of the checkpoints": (
        lambda run: cut(run / "checkpoints" / "run.json"), "copy the run.json of its RUN_DIR over it"
    ),
}  # fmt: skip

GOES_ON = {
    "after lost": (lambda run: (run / "after.json").unlink(), "after training: "),
    "after cut": (lambda run: cut(run / "after.json"), "after training: "),
    "log lost": (lambda run: (run / "train_log.csv").unlink(), "has lost the rows of 4 steps"),
    "log empty": (lambda run: empty(run / "train_log.csv"), "has lost the rows of 4 steps"),
    "log garbage": (lambda run: garbage(run / "train_log.csv"), "has lost the rows of 4 steps"),
    "log cut": (lambda run: cut(run / "train_log.csv"), "has lost the rows of 2 steps"),
    "answers garbage": (lambda run: garbage(run / "answers.jsonl"), ""),
    "answers of another kind": (lambda run: (run / "answers.jsonl").write_text('null\n7\n["step"]\n'), ""),
    "evaluations cut": (lambda run: cut(run / "evaluations.jsonl"), ""),
    "pending answers cut": (lambda run: (run / "answers.pending.json").write_text('{"step": 4, '), ""),
    "result cut": (lambda run: cut(run / "result.json"), ""),
    "no weights": (lambda run: shutil.rmtree(actor(run) / "model_params"), "checkpoint 4 in .* is damaged"),
    "no moments": (
        lambda run: shutil.rmtree(actor(run) / "optimizer_state"), ".it has no optimizer_state.; taking 2"
    ),
    "empty checkpoint": (empty_folder, "checkpoint 4 in .* is damaged .*; taking 2, the one before"),
    "metadata cut": (lambda run: cut(actor(run) / "model_params" / "_METADATA"), "is damaged .*taking 2"),
    "metadata lost": (
        lambda run: (actor(run) / "optimizer_state" / "_METADATA").unlink(), "checkpoint 4 in .* is damaged"
    ),
    "arrays cut": (cut_data, "checkpoint 4 in .* is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_good_is_one_line_and_nothing_is_lost(run, name):
    damage, words = REFUSED[name]
    damage(run)
    there = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=words) as error:
        demo.main([*RUN, "RUN_DIR=run"])
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in there} == there


@pytest.mark.parametrize("name", GOES_ON)
def test_what_can_be_made_good_is_and_the_run_ends_as_it_would_have(run, finished, name, capsys):
    damage, words = GOES_ON[name]
    damage(run)
    demo.main([*RUN, "RUN_DIR=run"])
    said = capsys.readouterr().out
    assert re.search(words, said), said[-2000:]
    whole, again = load_weights(finished / "run", 4), load_weights("run", 4)
    for weight in whole:
        np.testing.assert_array_equal(whole[weight], again[weight], err_msg=weight)
    results = [json.loads((folder / "run" / "result.json").read_text()) for folder in (finished, Path())]
    assert results[0]["after"] == results[1]["after"]
    if "damaged" in said:  # kept, and out of the way
        assert (actor(run).parent / "damaged_4").is_dir()


@pytest.mark.parametrize("name", ["no weights", "empty checkpoint", "metadata cut", "arrays cut"])
def test_the_checkpoint_before_a_damaged_one_answers_and_is_exported(run, name, capsys):
    GOES_ON[name][0](run)
    inference.main(["CHECKPOINT=run"])
    assert "is damaged" in (said := capsys.readouterr().out) and "taking 2, the one before" in said
    convert.main(["SOURCE=run", "TARGET=exported"])
    assert "is damaged" in (said := capsys.readouterr().out) and "taking 2, the one before" in said
    assert "after update 2 of 4" in Path("exported/README.md").read_text()
    assert actor(run).is_dir()  # whoever only reads moves nothing


@pytest.mark.parametrize("damage", [empty, cut, garbage])
def test_every_reader_of_a_run_names_its_damaged_constants(run, damage):
    damage(run / "constants.json")
    for read in (
        lambda: health.main(["run"]),
        lambda: show_run.main(["run"]),
        lambda: inference.main(["CHECKPOINT=run"]),
        lambda: convert.main(["SOURCE=run", "TARGET=exported"]),
        lambda: demo.main([*RUN, "RUN_DIR=run", "DRY_RUN=True"]),
    ):
        with pytest.raises(UserError, match=r"run: its constants.json is damaged"):
            read()


def test_a_log_that_is_cut_in_the_middle_of_a_number_loses_the_row(tmp_path):
    path = tmp_path / "train_log.csv"
    path.write_text("step,reward,kl\n1,2.5,0.1\n2,2.75,0.3\n3,2.125,0.4")
    assert [row["step"] for row in read_log(path)] == [1, 2]
    path.write_text("step,reward,kl\n1,2.5,0.1\n2,2.75\nx,y,z\n4,1,2,3\n\0\n5,1.5,nan\n")
    assert [row["step"] for row in read_log(path)] == [1, 5]


def test_with_a_target_for_the_kl_a_lost_log_is_refused(run):
    constants = json.loads((run / "constants.json").read_text())
    (run / "constants.json").write_text(json.dumps(constants | {"TARGET_KL": 0.1}))
    (run / "train_log.csv").unlink()
    with pytest.raises(UserError, match=r"TARGET_KL=0.1: run/train_log.csv has lost 4 rows"):
        demo.main([*RUN, "RUN_DIR=run", "TARGET_KL=0.1"])


# --- whose a folder is


def test_two_runs_of_one_name_do_not_share_a_checkpoint_dir(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "run" / "checkpoints", "kept/run")
    with pytest.raises(
        UserError, match=r"^CHECKPOINT_DIR=kept: .*kept/run holds the checkpoints of another "
    ):
        demo.main([*RUN, "RUN_DIR=b/run", "CHECKPOINT_DIR=kept"])
    with pytest.raises(UserError, match=r"^CHECKPOINT_DIR=file/x: .*; choose another folder$"):
        Path("file").write_text("")
        demo.main([*RUN, "RUN_DIR=c/run", "CHECKPOINT_DIR=file/x"])


def test_a_run_whose_checkpoints_are_elsewhere_is_exported(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "run", "run")
    Path("run/checkpoints").rename("elsewhere")
    Path("kept").mkdir()
    Path("elsewhere").rename("kept/run")
    constants = json.loads(Path("run/constants.json").read_text())
    Path("run/constants.json").write_text(json.dumps(constants | {"CHECKPOINT_DIR": "kept"}))
    convert.main(["SOURCE=run", "TARGET=exported"])
    assert "kept/run/actor/4/model_params" in capsys.readouterr().out
    assert "answers right" in Path("exported/README.md").read_text()  # the run's card, with its figures


def test_a_second_process_in_a_run_dir_is_refused(run):
    code = (
        "import sys, grpo_llama3_1_8b_demo as demo\n"
        "from parts import run_log, settings\n"
        f"c = settings.read(demo.Constants, {[*RUN, 'RUN_DIR=run']!r})\n"
        "with run_log.open_run(c):\n    print('open', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert first.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=r"RUN_DIR=run: another process is running in it"):
            demo.main([*RUN, "RUN_DIR=run"])
    finally:
        first.kill()
        first.communicate()
    with run_log.open_run(settings.read(demo.Constants, [*RUN, "RUN_DIR=run"])):
        pass  # the kernel has forgotten the lock of the killed one


def test_a_run_does_not_go_on_with_other_questions(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(settings.HERE / "tiny_gsm8k", "mine")
    arguments = [*RUN, "DATASET=mine", "RUN_DIR=run"]
    c = settings.read(demo.Constants, arguments)
    with run_log.open_run(c) as opened:
        opened.same_questions(demo.read_data(c))
    lines = Path("mine/test.jsonl").read_text().splitlines()
    Path("mine/test.jsonl").write_text("\n".join(lines[::-1]) + "\n")
    with pytest.raises(UserError, match=r"^RUN_DIR=run: its run was started with other questions"):
        demo.main(arguments)
    Path("mine/test.jsonl").write_text("\n".join(lines))  # the same questions, another file
    with run_log.open_run(c) as opened:
        opened.same_questions(demo.read_data(c))


def test_questions_that_are_too_long_are_listed_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c = settings.read(demo.Constants, [*RUN, "RUN_DIR=run", "MAX_PROMPT_LENGTH=24"])
    tokenizer = llama.load_tokenizer(settings.HERE / "tiny_llama")
    seen = []
    for _ in range(2):
        with run_log.open_run(c) as opened:
            for rows, source in demo.read_data(c).values():
                demo.make_prompts(c, rows, source, tokenizer, False, opened.logs / "too_long.csv")
        seen.append(Path("run/too_long.csv").read_text())
    assert seen[0] == seen[1] and len(seen[0]) > 100


# --- weights that are not finite


@pytest.mark.parametrize(
    "arguments",
    [
        ["LEARNING_RATE=1e39", "WARMUP_FRACTION=0.0", "MAX_GRAD_NORM=0", "SAVE_INTERVAL_STEPS=1"],
        ["LEARNING_RATE=1e39", "WARMUP_FRACTION=0.0", "NUM_BATCHES=1"],  # the last save, after the last step
    ],
)
def test_an_update_that_overflows_reaches_no_checkpoint(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"after update 1 are not finite.*LEARNING_RATE=1e\+39") as error:
        demo.main([*RUN, *arguments, "RUN_DIR=run"])
    assert "\n" not in str(error.value)
    assert checkpoints.saved("run/checkpoints") == []


# --- stopped before the first step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_is_answered_like_ctrl_c(tmp_path, number):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\nPath('asked').touch()\ntime.sleep(3600)\n"
        "def slow(prompts, completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *RUN, "RUN_DIR=run", "REWARDS=slow", "REWARD_FUNC=slow.py"],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and err.strip().endswith("stopped") and "Traceback" not in err


# --- what only the whole run shows


def test_a_resumed_run_counts_the_seconds_of_its_earlier_steps():
    log = [{"step": step, "seconds": step + 3.0} for step in (1, 2, 3)] + [{"step": 4.0}]
    assert run_log.seconds_before(log, 2) == 4 + 5 and run_log.seconds_before(log, 0) == 0


def test_an_answer_that_ends_on_the_last_token_is_not_cut_off(finished):
    """Of one token each: the end, and another."""

    class Rollout:
        def generate(self, prompts, config):
            tokens = [[7] * 27 + [2], [7] * 28, [7, 2]] * (len(prompts) // 3)
            return type("Output", (), {"text": ["x"] * len(prompts), "tokens": tokens})

        def eos_id(self):
            return 2

    c = settings.read(demo.Constants, RUN)
    rows = [{"prompts": "p", "question": "q", "answer": "1", "data_source": "gsm8k", "extra_info": ""}] * 3
    grader = task_rewards.make_grader("", "", reward_func, [])
    assert demo.evaluate(c, Rollout(), rows, grader, "greedy")["cut_off"] == pytest.approx(1 / 3)
