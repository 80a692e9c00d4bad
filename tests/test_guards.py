"""Bad input: one clear line that names the constant, the value and the remedy; exit code 2; nothing lost."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import grpo_llama3_1_8b_demo as demo
import numpy as np
import pytest

GOOD_ROW = {
    "question": "Tom has 2 apples and buys 3 more. How many apples does Tom have now?",
    "answer": "2+3=5\n#### 5",
}
SMALL = [
    "NUM_BATCHES=3",
    "BATCH_SIZE=2",
    "NUM_GENERATIONS=2",
    "NUM_TEST_QUESTIONS=4",
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("NUM_BATCH=3", ["NUM_BATCH=3", "NUM_BATCHES"]),
        ("LERNING_RATE=1e-3", ["LEARNING_RATE"]),
        ("--help", ["NAME=value"]),
        ("NUM_BATCHES=ten", ["NUM_BATCHES=ten", "int"]),
        ("NUM_BATCHES=2.5", ["NUM_BATCHES=2.5", "int"]),
        ("NUM_BATCHES=[", ["NUM_BATCHES=[", "int"]),
        ("LEARNING_RATE=${x}", ["LEARNING_RATE=${x}", "float"]),
        ("BETA=yes", ["BETA=yes", "float"]),
        ("SCAN_LAYERS=1", ["SCAN_LAYERS=1", "bool"]),
        ("NUM_GENERATIONS=1", ["NUM_GENERATIONS=1", "2 or more"]),
        ("TEMPERATURE=0", ["TEMPERATURE=0.0", "above 0"]),
        ("TOP_P=1.5", ["TOP_P=1.5"]),
        ("TOP_K=0", ["TOP_K=0", "-1"]),
        ("TRAIN_MICRO_BATCH_SIZE=3", ["TRAIN_MICRO_BATCH_SIZE=3", "BATCH_SIZE=16"]),
        ("LEARNING_RATE=-1.0", ["LEARNING_RATE=-1.0"]),
        ("EVAL_CONFIG=wild", ["EVAL_CONFIG=wild", "greedy, standard, liberal"]),
        ("ROLLOUT_ENGINE=vllm", ["SCAN_LAYERS=False", "ROLLOUT_ENGINE=vllm"]),
        ("HBM_UTILIZATION_VLLM=2.0", ["HBM_UTILIZATION_VLLM=2.0"]),
        ("MODEL=nobody/nothing", ["MODEL=nobody/nothing", "folder"]),
        ("WARMUP_FRACTION=2.0", ["WARMUP_FRACTION=2.0", "at most 1"]),
        ("DTYPE=float7", ["DTYPE=float7", "MaxText refuses"]),
        ("REMAT_POLICY=some", ["REMAT_POLICY=some", "minimal"]),
        ("DATASET=missing.jsonl", ["missing.jsonl", "No such file"]),
        ("MAX_PROMPT_LENGTH=3", ["MAX_PROMPT_LENGTH=3", "shortest takes"]),
    ],
)
def test_a_bad_constant_is_named_with_its_remedy(argument, words):
    with pytest.raises(demo.UserError) as error:
        demo.run([argument])
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no rows"]),
        ("[]", ["no rows"]),
        (json.dumps({"prompt": "1+1?", "answer": "#### 2"}), ["row 1", "'question'", "'prompt'"]),
        (json.dumps(GOOD_ROW) + "\n" + json.dumps(GOOD_ROW | {"answer": "5"}), ["row 2", "#### N"]),
        (json.dumps(GOOD_ROW) + "\n{", ["row 2", "not JSON"]),
        ("[1]", ["row 1", "not an object"]),
    ],
)
def test_bad_data_is_named_with_file_and_row(text, words):
    Path("mine.jsonl").write_text(text)
    with pytest.raises(demo.UserError) as error:
        demo.run(["DATASET=mine.jsonl", "TEST_DATASET=tiny_gsm8k"])
    for word in ["mine.jsonl", *words]:
        assert word in str(error.value)


def test_training_and_testing_on_one_file_is_refused():
    Path("mine.jsonl").write_text(json.dumps(GOOD_ROW))
    with pytest.raises(demo.UserError, match=r"TEST_DATASET is empty and DATASET=mine.jsonl"):
        demo.run(["DATASET=mine.jsonl"])


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_a_model_folder_with_a_part_missing(lost):
    folder = shutil.copytree(demo.HERE / "tiny_llama", "model")
    (Path(folder) / lost).unlink()
    with pytest.raises(demo.UserError, match=r"MODEL=model: .*" + lost.replace("model.", "")):
        demo.run(["MODEL=model"])


def test_the_command_line_shows_one_line_and_exit_code_2():
    script = demo.HERE / "grpo_llama3_1_8b_demo.py"
    done = subprocess.run([sys.executable, script, "NUM_BATCH=3"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: 'NUM_BATCH=3': no such constant")
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


def test_long_questions_are_left_out_counted_and_named(capsys):
    demo.configure(["MAX_PROMPT_LENGTH=24"])
    demo.RUN_DIR = "."
    tokenizer = demo.load_tokenizer(demo.HERE / "tiny_llama")
    questions, source = demo.read_questions("tiny_gsm8k", "test")
    kept = demo.make_prompts(tokenizer, questions, source)
    lengths = [len(tokenizer.encode(demo.to_prompt(tokenizer, q["question"]))) for q in questions]
    too_long = [i for i, n in enumerate(lengths, start=1) if n > 24]
    assert 0 < len(too_long) == len(questions) - len(kept)
    said = capsys.readouterr().out
    assert (
        f"{len(too_long)} of 512 questions" in said
        and f"row {too_long[0]} ({lengths[too_long[0] - 1]} tokens)" in said
    )
    assert len(Path("too_long.csv").read_text().splitlines()) == len(too_long)


def raises(prompts, completions, **columns):
    raise ZeroDivisionError("division by zero")


def wrong_length(prompts, completions, **columns):
    return [1.0]


def not_a_number(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1) + [float("nan")]


@pytest.mark.parametrize(
    ("reward_fn", "words"),
    [
        (raises, ["raises", "ZeroDivisionError"]),
        (wrong_length, ["wrong_length", "(1,)", "4 completions"]),
        (not_a_number, ["not_a_number", "nan", "finite"]),
    ],
)
def test_a_faulty_reward_function_stops_the_run_and_is_named(monkeypatch, reward_fn, words):
    monkeypatch.setattr(demo.reward_func, "check_answer", reward_fn)
    with pytest.raises(demo.UserError) as error:
        demo.run(SMALL)
    for word in words:
        assert word in str(error.value)


def test_a_gradient_that_is_not_a_number_stops_the_run_and_never_reaches_a_checkpoint():
    """An absurd learning rate overflows the weights' products; every checkpoint stays finite."""
    with pytest.raises(demo.UserError, match=r"the gradient norm of update 2 is nan.*LEARNING_RATE"):
        demo.run(
            [*SMALL, "LEARNING_RATE=1e37", "WARMUP_FRACTION=0.0", "SAVE_INTERVAL_STEPS=1", "RUN_DIR=run"]
        )
    saved = sorted(int(p.name) for p in Path("run/checkpoints/actor").iterdir())
    assert saved
    for step in saved:
        for weight in load_weights("run", step).values():
            assert np.isfinite(weight).all()


def load_weights(run_dir, step):
    """Weights and optimizer state of a checkpoint, as numpy arrays by name."""
    import jax
    import orbax.checkpoint as ocp

    folder = Path(run_dir).resolve() / "checkpoints" / "actor" / str(step)
    arrays = {}
    for item in ("model_params", "optimizer_state"):
        tree = ocp.PyTreeCheckpointer().restore(folder / item)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            arrays[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return arrays


def test_other_constants_than_the_run_in_run_dir_are_refused():
    demo.configure([])
    demo.open_run_dir(demo.configure(["RUN_DIR=run", "NUM_BATCHES=5"]))
    with pytest.raises(demo.UserError, match=r"NUM_BATCHES=6: .*was started with 5"):
        demo.open_run_dir(demo.configure(["RUN_DIR=run", "NUM_BATCHES=6"]))


def test_a_run_dir_that_cannot_be_made_is_named():
    Path("taken").write_text("a file")
    with pytest.raises(demo.UserError, match="RUN_DIR=taken/run: "):
        demo.open_run_dir(demo.configure(["RUN_DIR=taken/run"]))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_too_full_for_the_log_ends_the_training(small_disk):
    # tensorboardX's own SummaryWriter would wait for ever, once its thread has died of the full disk
    with pytest.raises(OSError, match="No space left"), demo.tensorboard_log(small_disk / "tensorboard"):
        (small_disk / "ballast").write_bytes(bytes(demo.shutil.disk_usage(small_disk).free))
        for step in range(10_000):
            demo.jax.monitoring.record_scalar("actor/train/loss", 0.5, step=step)


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_training(small_disk):
    (small_disk / "ballast").write_bytes(bytes(12_000_000))
    with pytest.raises(demo.UserError, match=r"MAX_TO_KEEP=4: the checkpoints need 0.02 GiB"):
        demo.run([*SMALL, f"RUN_DIR={small_disk}/run"])


def test_a_disk_that_fills_up_later_costs_no_checkpoint(small_disk, monkeypatch):
    original = demo.training_batches

    def filling(rows, start_step):  # somebody else fills the disk while the run is under way
        (small_disk / "ballast").write_bytes(bytes(demo.shutil.disk_usage(small_disk).free - 2_000_000))
        return original(rows, start_step)

    arguments = [*SMALL, "NUM_BATCHES=4", "SAVE_INTERVAL_STEPS=2", f"RUN_DIR={small_disk}/run"]
    with monkeypatch.context() as patch:
        patch.setattr(demo, "training_batches", filling)
        with pytest.raises(demo.UserError, match="the disk is full"):
            demo.run(arguments)
    (small_disk / "ballast").unlink()
    demo.run(arguments)  # the same command goes on
    assert json.loads((small_disk / "run" / "result.json").read_text())["steps"] == 4
