"""A run's folder after a kill, a full disk or a careless hand: one clear line, or the run simply goes on."""

import contextlib
import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from short_runs import HANGS, SCRIPT
from test_guards import load_weights

from tools import convert_checkpoint as convert
import grpo_llama3_1_8b_demo as demo
from parts.run import health
import inference
import reward_func
from tools import show_run
from parts import settings
from parts.model import llama
from parts.rewards import task_rewards
from parts.run import checkpoints, run_log
from parts.run.run_files import read_log
from parts.settings import UserError
from parts.tunix_api import RLTrainingConfig, trainer

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


def empty_folder(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def cut_arrays(checkpoint):
    """The largest file of the weights: the numbers themselves."""
    files = [path for path in checkpoint.glob("model_params/**/*") if path.is_file()]
    cut(max(files, key=lambda path: path.stat().st_size))


CHECKPOINTS = {  # what is done to the last checkpoint, and the reason that is given
    "no weights": (lambda last: shutil.rmtree(last / "model_params"), "model_params"),
    "no moments": (lambda last: shutil.rmtree(last / "optimizer_state"), "it has no optimizer_state"),
    "an empty folder": (empty_folder, ""),
    "weights' metadata cut": (lambda last: cut(last / "model_params" / "_METADATA"), ""),
    "weights' metadata empty": (lambda last: empty(last / "model_params" / "_METADATA"), ""),
    "moments' metadata lost": (lambda last: (last / "optimizer_state" / "_METADATA").unlink(), ""),
    "moments' metadata garbage": (lambda last: garbage(last / "optimizer_state" / "_METADATA"), ""),
    "arrays cut": (cut_arrays, ""),
    "arrays lost": (lambda last: shutil.rmtree(last / "model_params" / "d"), ""),
    "the index of the arrays cut": (lambda last: cut(last / "model_params" / "manifest.ocdbt"), ""),
}


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

GOES_ON = {  # several at once: a run to the end takes seconds
    "files lost": (
        lambda run: [(run / name).unlink() for name in ("after.json", "train_log.csv", "evaluations.jsonl")],
        ["after training: ", "has lost the rows of 4 steps"],
    ),
    "files garbage": (
        lambda run: [garbage(run / name) for name in (
            "after.json", "train_log.csv", "answers.jsonl", "evaluations.jsonl", "answers.pending.json",
            "result.json",
        )],
        ["after training: ", "has lost the rows of 4 steps"],
    ),
    "files cut": (
        lambda run: [cut(run / name) for name in (
            "after.json", "train_log.csv", "answers.jsonl", "evaluations.jsonl", "result.json"
        )] + [cut_arrays(actor(run))],
        ["after training: ", "checkpoint 4 in .* is damaged .*; taking 2", "going on after step 2 of 4"],
    ),
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
    demo.main([*RUN, "RUN_DIR=run", "PROFILE_DIR=trace"])
    said = capsys.readouterr().out
    for word in words:
        assert re.search(word, said), said[-2000:]
    assert ("trace of steps" in said) == ("going on after step 2" in said) == Path("trace").exists()
    whole, again = load_weights(finished / "run", 4), load_weights("run", 4)
    for weight in whole:
        np.testing.assert_array_equal(whole[weight], again[weight], err_msg=weight)
    results = [json.loads((folder / "run" / "result.json").read_text()) for folder in (finished, Path())]
    assert results[0]["after"] == results[1]["after"]
    if "is damaged" in said:  # kept, and out of the way
        assert (actor(run).parent / "damaged_4").is_dir()


class Weights(nnx.Module):
    """A model of 6 numbers: Tunix restores it as it restores the Llama."""

    def __init__(self):
        self.table = nnx.Param(jnp.zeros((2, 3)))


def toy_trainer(root):
    config = RLTrainingConfig(
        actor_optimizer=None, eval_every_n_steps=100, mini_batch_size=1, checkpoint_root_directory=str(root),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=5),
    )  # fmt: skip
    return trainer.Trainer(Weights(), optax.adamw(0.1), config, dict)


@pytest.fixture
def toy(tmp_path):
    """Checkpoints 1 and 2 of the six numbers: all 1, all 2, with moments 1 and 2."""
    root = tmp_path / "checkpoints" / "actor"
    writer = toy_trainer(root)
    for step in (1, 2):
        writer.model.table[...] = jnp.full((2, 3), float(step))
        moments = nnx.state(writer.optimizer, nnx.OptState)
        nnx.update(writer.optimizer, jax.tree.map(functools.partial(jnp.full_like, fill_value=step), moments))
        writer.checkpoint_manager.save(step, writer.model, writer.optimizer, force=True)
    writer.checkpoint_manager.close()
    return root


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(toy, name, capsys):
    damage, reason = CHECKPOINTS[name]
    damage(toy / "2")
    with checkpoints.restoring_whole_ones():
        reader = toy_trainer(toy)
    said = capsys.readouterr().out
    assert re.fullmatch(rf"checkpoint 2 in .* is damaged \(.*{reason}.*\); taking 1, the one before\n", said)
    assert reader.train_steps == 1 and float(reader.model.table[...].min()) == 1
    moments = jax.tree.leaves(nnx.state(reader.optimizer, nnx.OptState))
    assert {float(x) for leaf in moments for x in np.ravel(leaf)} == {1.0}
    assert reader.checkpoint_manager.save(2, reader.model, reader.optimizer, force=True)  # its place is free
    reader.checkpoint_manager.close()
    assert sorted(path.name for path in toy.iterdir()) == ["1", "2", "damaged_2"]


def test_whole_checkpoints_are_restored_without_a_word_and_none_is_a_start(toy, tmp_path, capsys):
    with checkpoints.restoring_whole_ones():
        reader, fresh = toy_trainer(toy), toy_trainer(tmp_path / "none")
    assert (reader.train_steps, fresh.train_steps) == (2, 0) and not capsys.readouterr().out
    assert float(reader.model.table[...].min()) == 2 and float(fresh.model.table[...].max()) == 0


def test_too_little_memory_or_disk_is_no_damage():
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (MemoryError(), UserError("one line"), full):

        def read(step, error=error):
            raise error

        with pytest.raises(type(error)):
            checkpoints.newest_readable([1, 2], read, "here")


def test_inference_beside_a_run_that_prunes_takes_what_is_there_by_then(toy):
    """The last two when the command began, 1 and 2, are gone; the run has saved 3 and 4."""
    steps = checkpoints.saved(str(toy.parent))
    writer = toy_trainer(toy)
    for step in (3, 4):
        writer.model.table[...] = jnp.full((2, 3), float(step))
        writer.checkpoint_manager.save(step, writer.model, writer.optimizer, force=True)
    writer.checkpoint_manager.close()
    for step in steps:
        shutil.rmtree(toy / str(step))
    model = Weights()
    rollout = types.SimpleNamespace(model=lambda: model)
    assert inference.restore(rollout, str(toy.parent), steps, lora_only=False) == 4
    assert float(model.table[...].min()) == 4
    with pytest.raises(UserError, match=r"none of its checkpoints \(2\) can be read"):
        inference.restore(rollout, str(toy.parent), [2], lora_only=False)


@pytest.mark.parametrize("name", ["no weights", "an empty folder", "weights' metadata cut", "arrays cut"])
def test_the_checkpoint_before_a_damaged_one_answers_and_is_exported(run, name, capsys):
    CHECKPOINTS[name][0](actor(run))
    convert.main(["SOURCE=run", "TARGET=exported"])
    assert "is damaged" in (said := capsys.readouterr().out) and "taking 2, the one before" in said
    assert "after update 2 of 4" in Path("exported/README.md").read_text()
    if name in ("no weights", "arrays cut"):
        inference.main(["CHECKPOINT=run"])
        assert "is damaged" in (said := capsys.readouterr().out) and "taking 2, the one before" in said
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


def test_an_update_that_overflows_reaches_no_checkpoint(tmp_path, monkeypatch):
    """In the last step: no loss after it would tell, and the save is forced."""
    monkeypatch.chdir(tmp_path)
    arguments = [*RUN, "LEARNING_RATE=1e39", "WARMUP_FRACTION=0.0", "NUM_BATCHES=1", "EVAL_EVERY=0"]
    with pytest.raises(UserError, match=r"after update 1 are not finite.*LEARNING_RATE=1e\+39") as error:
        demo.main([*arguments, "RUN_DIR=run"])
    assert "\n" not in str(error.value)
    assert checkpoints.saved("run/checkpoints") == []


@pytest.mark.parametrize("what", ["weights", "moments"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_written(tmp_path, what, bad):
    toy = toy_trainer(tmp_path / "actor")
    moments = jax.tree.map(jnp.copy, nnx.state(toy.optimizer, nnx.OptState))
    if what == "weights":
        toy.model.table[...] = jnp.array([[0, 1, 2], [3, bad, 5]])
    else:
        spoil = lambda x: jnp.full_like(x, bad) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        nnx.update(toy.optimizer, jax.tree.map(spoil, moments))
    with checkpoints.only_finite(toy, settings.read(demo.Constants, [])):
        for forced in ({}, {"force": True}):
            with pytest.raises(UserError, match=r"after update 1 are not finite"):
                toy.checkpoint_manager.save(1, toy.model, toy.optimizer, **forced)
        toy.model.table[...] = jnp.zeros((2, 3))
        nnx.update(toy.optimizer, moments)
        assert toy.checkpoint_manager.save(1, toy.model, toy.optimizer)
    toy.checkpoint_manager.close()


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
