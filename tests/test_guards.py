"""Bad input: one clear line that names the constant, the value and the remedy; exit code 2; nothing lost."""

import contextlib
import dataclasses
import errno
import importlib.metadata
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from flax import nnx
from short_runs import SCRIPT, SHORT, load_weights, saved_steps
from table_policy import train_llm

import constants
import grpo_llama3_1_8b_demo as demo
import inference
import reward_func
import settings
from model import devices, llama, versions
from model.cluster import make_cluster
from model.llm import Llm
from run import process, run_folder, train_log
from run import start as start_of_run
from run.run_files import read_log
from settings import HERE, UserError
from task import prompts, run_grader

GOOD_ROW = {
    "question": "Tom has 2 apples and buys 3 more. How many apples does Tom have now?",
    "answer": "2+3=5\n#### 5",
}
SMALL = ["NUM_BATCHES=3", "BATCH_SIZE=2", "NUM_GENERATIONS=2", "NUM_TEST_QUESTIONS=4"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def read(*arguments):
    return settings.read(demo.Constants, arguments)


# %% Constants


def test_what_maxtext_refuses_is_one_line():
    _, hf = llama.load_hf_config("tiny_llama")
    with pytest.raises(
        UserError,
        match=r"^DTYPE=float7, .*refuses one of these \(Input should be 'bfloat16'.*\); see its base.yml$",
    ):
        llama.to_maxtext_config(hf, rows=1, prompt_tokens=1, new_tokens=1, dtype="float7")


def test_help_shows_every_constant_as_it_stands_on_its_page(capsys):
    with pytest.raises(SystemExit) as done:
        demo.main(["NUM_BATCHES=3", "--help"])
    assert not done.value.code
    said = capsys.readouterr().out
    for block, place in ((demo.Constants, SCRIPT.name), (constants.Machine, "constants.py")):
        assert f"# {place}\n{inspect.getsource(block)}" in said
    fields = dataclasses.fields(demo.Constants)
    assert len(fields) > 60 and all(f"\n    {field.name}: " in said for field in fields)


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("NUM_BATCH=3", 2, "error: 'NUM_BATCH=3': no such constant"),
        ("REWARDS=mark_reward,match_format_exactly", 2, "error: REWARDS="),
        ("--help", 0, ""),
    ],
)
def test_the_command_line_answers_with_one_line_and_before_the_imports(argument, code, words):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, argument], capture_output=True, text=True
    )
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == code and len(said) == (code != 0)
    assert not said or said[0].startswith(words)
    assert "run.checks" in imported
    assert not imported & {"jax", "flax", "maxtext", "tunix", "transformers", "grain", "tensorflow"}
    assert not Path("runs").exists()


# %% Stopping, and going on


def run_script(monkeypatch, main, *arguments):
    """`settings.run` as of a script whose name has a space in it; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["my scripts/grpo.py", *arguments])
    with pytest.raises(SystemExit) as done:
        settings.run(main)
    return done.value.code


def raising(error):
    def main(arguments):
        raise error

    return main


def test_what_ends_a_script_has_its_line_and_its_exit_code(monkeypatch, capsys):
    assert run_script(monkeypatch, raising(UserError("SEED=-1: use 0 or more"))) == 2
    assert capsys.readouterr().err == "error: SEED=-1: use 0 or more\n"
    assert run_script(monkeypatch, raising(KeyboardInterrupt()), "SEED=1", "RUN_DIR=mine") == 130
    err = capsys.readouterr().err  # before there is a run
    assert "stopped" in err and "RUN_DIR" not in err and "python" not in err
    arguments = ["DATASET=my files/a.jsonl", "RUN_DIR=", "TEMPLATE={question} 'now'"]
    assert run_script(monkeypatch, raising(settings.Stopped(Path("my runs/one"))), *arguments) == 130
    command = capsys.readouterr().err.splitlines()[-1].removeprefix("stopped. To go on: ")
    expected = ["python", "my scripts/grpo.py", arguments[0], arguments[2], "RUN_DIR=my runs/one"]
    assert shlex.split(command) == expected


@pytest.mark.parametrize("where", ["read_data", "make_prompts"])
def test_an_early_ctrl_c_of_the_main_script(monkeypatch, capsys, where):
    """Before the folder of the run is made, and after: then it is named, though RUN_DIR was not given."""

    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(start_of_run, where, interrupt)
    assert run_script(monkeypatch, demo.main, "TEMPLATE={question} now") == 130
    err = capsys.readouterr().err
    folders = list(Path("runs/grpo_llama3_1_8b_demo").glob("*"))
    if where == "read_data":
        assert "RUN_DIR" not in err and not folders
    else:
        command = ["python", "my scripts/grpo.py", "TEMPLATE={question} now", f"RUN_DIR={folders[0]}"]
        assert shlex.split(err.splitlines()[-1].removeprefix("stopped. To go on: ")) == command


def begin(*arguments):
    """Opens the run's folder as `main` does."""
    with run_folder.open_run(read(*arguments)) as run:
        return run


@pytest.mark.parametrize("change", [{"NUM_EPOCHS": 2}, {"MASK_OVERLONG": None}])
def test_a_run_of_another_version_is_refused_before_its_files_are_touched(change):
    begin("RUN_DIR=run")
    path = Path("run/constants.json")
    saved = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in saved.items() if value is not None}))
    with pytest.raises(
        UserError, match=rf"^RUN_DIR=run: .* another version .* in {next(iter(change))}\); start"
    ):
        begin("RUN_DIR=run")


# %% Versions


def other_version(monkeypatch, package):
    original = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.9" if name == package else original(name)
    )


def test_another_version_is_refused_at_every_start(monkeypatch):
    versions.check_versions()
    package, wanted = next(iter(versions.VERSIONS.items()))
    other_version(monkeypatch, package)
    with pytest.raises(UserError, match=rf"^{package} 9.9 is installed: .*install {package}=={wanted}$"):
        demo.main([])
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["requirements.txt", "requirements/tpu.txt"])
def test_the_versions_are_the_pinned_ones(name):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (HERE.parent / name).read_text(), re.M))
    assert {package: pins[package] for package in versions.VERSIONS} == versions.VERSIONS


# %% Data and model


def test_the_script_refuses_its_template_and_counts_what_is_tested_and_trained_on(capsys):
    for dry in ("DRY_RUN=False", "DRY_RUN=True"):
        with pytest.raises(UserError, match=r"^TEMPLATE='Answer it.': has no {question}; write {question} "):
            demo.main(["TEMPLATE=Answer it.", dry])
        with pytest.raises(UserError, match=r"^TEST_DATASET=mine.jsonl: mine.jsonl is trained on, too"):
            Path("mine.jsonl").write_text(json.dumps(GOOD_ROW))
            demo.main(["DATASET=mine.jsonl", "TEST_DATASET=mine.jsonl", dry])
    Path("own").mkdir()
    for name in ("copy.jsonl", "own/train.jsonl", "own/validation.jsonl"):
        Path(name).write_text(json.dumps(GOOD_ROW))
    with contextlib.suppress(UserError):
        demo.main([*SMALL, "DATASET=own/train.jsonl", "TEST_DATASET=copy.jsonl", "DRY_RUN=True"])
    said = capsys.readouterr().out
    assert "\nnote: 1 of 1 test questions are training questions, too" in said
    assert "\nnote: 1 of 1 held-out questions are training questions, too" in said


# %% Other people's models


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig"}}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.MyTokenizer", None]}},
        ),
    ],
)
def test_code_that_comes_with_a_model_is_refused_and_never_run(name, changes, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "yes")  # transformers would ask, and then run it
    folder = Path(shutil.copytree(HERE / "tiny_llama", "model"))
    (folder / "code.py").write_text(
        "open('ran', 'w').close()\nclass MyConfig: pass\nclass MyTokenizer: pass\n"
    )
    change_json(folder / name, **changes)
    with pytest.raises(
        UserError, match=r"^MODEL=model: (its config.json|no tokenizer) .*contains custom code"
    ):
        demo.main(["MODEL=model"])
    assert not Path("ran").exists()


def test_a_model_that_transformers_knows_may_bring_code_that_nobody_needs():
    folder = Path(shutil.copytree(HERE / "tiny_llama", "model"))
    change_json(folder / "config.json", auto_map={"AutoConfig": "code.MyConfig"})
    assert llama.load_hf_config("model")[1].model_type == "llama"


HASHES = ["1" * 40, "2" * 40]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the Hugging Face hub with two commits of org/tiny; `main` is the second, `v1` the first."""
    repository = tmp_path / "hub" / "models--org--tiny"
    for commit in HASHES:
        shutil.copytree(HERE / "tiny_llama", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    for name, commit in (("v1", HASHES[0]), ("main", HASHES[1])):
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository


def test_the_same_weights_take_the_same_column_as_a_folder_and_as_a_name_of_the_hub(hub):
    folder = shutil.copytree(HERE / "tiny_llama", "mine")
    for name in ("tiny_llama", folder, "org/tiny", "org/tiny@v1", f"org/tiny@{HASHES[1]}"):
        assert settings.column(name) == "laptop"
        changed = dataclasses.asdict(read(f"MODEL={name}")).items() ^ dataclasses.asdict(read()).items()
        assert {constant for constant, _ in changed} <= {"MODEL"}
        c, *_ = inference.read_arguments(["CHECKPOINT=base", f"MODEL={name}"])
        assert c.TOTAL_GENERATION_STEPS == 28
    change_json(hub / "snapshots" / HASHES[0] / "config.json", hidden_size=2048)
    assert settings.column("org/tiny@v1") == "tpu" == settings.column("org/not_in_the_cache")


@pytest.mark.parametrize(
    ("model", "commit"),
    [("org/tiny", HASHES[1]), ("org/tiny@v1", HASHES[0]), (f"org/tiny@{HASHES[0]}", HASHES[0])],
)
def test_a_revision_of_the_hub_is_taken_and_its_commit_is_known(hub, model, commit):
    folder, _ = llama.load_hf_config(model)
    assert folder == hub / "snapshots" / commit
    assert llama.pinned(model, folder) == f"org/tiny@{commit}"
    assert llama.pinned("tiny_llama", HERE / "tiny_llama") == "tiny_llama"
    Path("my@folder").mkdir()
    assert llama.pinned("my@folder", Path("my@folder")) == "my@folder"


def test_a_revision_that_the_hub_does_not_have_is_one_line(hub):
    with pytest.raises(UserError, match=r"^MODEL=org/tiny@v9: neither a folder nor to be had") as error:
        llama.load_hf_config("org/tiny@v9")
    assert "\n" not in str(error.value)


def test_a_run_keeps_the_commit_and_a_resume_with_another_is_refused(hub, monkeypatch):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    def start(*arguments):
        with pytest.raises(KeyboardInterrupt):
            demo.main(["MODEL=org/tiny", *arguments])

    monkeypatch.setattr(start_of_run, "make_cluster", stop)
    start("RUN_DIR=run")
    saved = json.loads(Path("run/constants.json").read_text())
    assert saved["MODEL"] == f"org/tiny@{HASHES[1]}"
    start("RUN_DIR=run")  # the same command goes on
    start("RUN_DIR=run", f"MODEL=org/tiny@{HASHES[1]}")
    refused = rf"^MODEL=org/tiny@{HASHES[0]}: the run in RUN_DIR=run was started with org/tiny@{HASHES[1]}; "
    for dry in ("DRY_RUN=False", "DRY_RUN=True"):
        demo_run = ["MODEL=org/tiny@v1", "RUN_DIR=run", dry]
        with pytest.raises(UserError, match=refused):
            demo.main(demo_run)
    (hub / "refs" / "main").write_text(HASHES[0])  # the hub has moved on
    with pytest.raises(UserError, match=refused):
        demo.main(["MODEL=org/tiny", "RUN_DIR=run"])
    c, *_ = inference.read_arguments(["CHECKPOINT=run"])
    assert saved["MODEL"] == c.MODEL  # inference asks the one that was trained


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_a_model_folder_with_a_part_missing(lost):
    folder = shutil.copytree(HERE / "tiny_llama", "model")
    (Path(folder) / lost).unlink()
    with pytest.raises(UserError, match=r"MODEL=model: .*" + lost.replace("model.", "")):
        demo.main(["MODEL=model"])


# %% Rewards and updates that are not numbers


@pytest.fixture
def learning(tmp_path):
    """What a training needs: constants, language model, rows, a folder."""
    folder = tmp_path / "learning"
    c = read(*SHORT, f"RUN_DIR={folder}/run")
    model, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(model)
    rows, source = prompts.read_data(c, None)["train"]
    folder.mkdir()
    rows = prompts.make_prompts(c, rows, source, tokenizer, False, folder / "too_long.csv")
    return c, Llm(c, make_cluster(c, model, hf, tokenizer)), rows, folder


def raises(prompts, completions, **columns):
    raise ZeroDivisionError("division by zero")


def wrong_length(prompts, completions, **columns):
    return [1.0]


def not_a_number(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1) + [float("nan")]


@pytest.mark.parametrize(
    ("reward_fn", "words"),
    [
        (raises, ["check_answer", "raised ZeroDivisionError", "by zero"]),
        (wrong_length, ["check_answer", "returned [1.0]", "16 completions"]),
        (not_a_number, ["check_answer", "returned nan", "return a number"]),
    ],
)
def test_a_faulty_reward_function_stops_the_run_and_is_named(learning, monkeypatch, reward_fn, words):
    c, llm, rows, folder = learning
    monkeypatch.setattr(reward_func, "check_answer", reward_fn)
    grader = run_grader.make_grader("", "", reward_func, rows)
    params = jax.tree.map(np.array, llm.params)
    with pytest.raises(UserError) as error:
        train_llm(c, llm, grader, rows, folder)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(llm.actor, nnx.Param)))
    assert not saved_steps(folder) and not read_log(folder / "train_log.csv")
    for word in words:
        assert word in str(error.value)


def test_a_gradient_that_is_not_a_number_stops_the_run_and_never_reaches_a_checkpoint():
    """An absurd learning rate overflows the weights' products; every checkpoint stays finite."""
    with pytest.raises(UserError, match=r"the gradient norm of step 2 is nan.*LEARNING_RATE"):
        demo.main([*SHORT, "LEARNING_RATE=1e37", "WARMUP_FRACTION=0.0", "SAVE_INTERVAL_STEPS=1",
                   "EVAL_EVERY=0", "RUN_DIR=run"])  # fmt: skip
    saved = saved_steps("run")
    assert saved
    for step in saved:
        for weight in load_weights("run", step).values():
            assert np.isfinite(weight).all()


# %% A full disk


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
    log = train_log.TrainingLog(small_disk, read(), 0)
    row = dict.fromkeys(("reward", "correct", "format_ok", "kl"), 0.5)
    log.add({"step": 1} | row)
    with pytest.raises(UserError, match="the disk is full"), process.full_disk(small_disk):
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        for step in range(2, 10_000):
            log.add({"step": step} | row)


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_training(small_disk):
    (small_disk / "ballast").write_bytes(bytes(12_000_000))
    with pytest.raises(UserError, match=r"MAX_TO_KEEP=4: 0.02 GiB are needed"):
        demo.main([*SHORT, f"RUN_DIR={small_disk}/run"])


def test_a_disk_that_fills_up_later_costs_no_checkpoint(small_disk, monkeypatch):
    original = demo.train

    def filling(*arguments):  # somebody else fills the disk while the run is under way
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2_000_000))
        return original(*arguments)

    arguments = [*SHORT, "NUM_BATCHES=4", "EVAL_EVERY=0", f"RUN_DIR={small_disk}/run"]
    with monkeypatch.context() as patch:
        patch.setattr(demo, "train", filling)
        with pytest.raises(UserError, match="the disk is full"):
            demo.main(arguments)
    (small_disk / "ballast").unlink()
    demo.main(arguments)  # the same command goes on
    assert json.loads((small_disk / "run" / "result.json").read_text())["steps"] == 4


def test_a_save_that_fails_beside_the_log_on_a_full_disk_hides_nothing(tmp_path):
    """Which of the two fails first is a race, seen once on a busy machine; here the log does."""

    class Manager:
        def close(self):
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    with (
        pytest.raises(UserError, match="the disk is full"),
        process.full_disk(tmp_path),
        contextlib.closing(Manager()),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(KeyError, match="mine"), process.full_disk(tmp_path):
        raise KeyError("mine")


def test_a_default_that_was_edited_wrongly_is_refused_in_one_line():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Edited:
        SEED: int = "three"

    with pytest.raises(settings.UserError, match="SEED=three: must be a valid integer"):
        settings.read(Edited, [])


def without_jax_platforms(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def test_cuda_packages_without_a_gpu_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    """Tried once with jax's real plugin, on a machine without a GPU; here only its name is there."""
    without_jax_platforms(monkeypatch)
    monkeypatch.setattr(devices, "NVIDIA_DEVICES", ())
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or find_spec(name)
    )
    for arguments in ([], ["DRY_RUN=True"]):
        with pytest.raises(UserError, match=r"no NVIDIA GPU; install its driver .* or set JAX_PLATFORMS=cpu"):
            demo.main([*SMALL, *arguments])
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    devices.check_gpu()


def test_a_gpu_that_the_cpu_packages_do_not_use_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    without_jax_platforms(monkeypatch)
    monkeypatch.setattr(devices, "NVIDIA_DEVICES", (str(tmp_path / "nvidia0"), str(tmp_path / "nvidiactl")))
    devices.check_gpu()
    assert capsys.readouterr().out == ""
    (tmp_path / "nvidiactl").touch()
    devices.check_gpu()
    (line,) = capsys.readouterr().out.splitlines()
    assert "NVIDIA GPU here is not used" in line and "make demo-cuda" in line
