"""Bad input: one clear line that names the constant, the value and the remedy; exit code 2; nothing lost."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
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
from short_runs import SCRIPT, SHORT, run_here, saved_steps
from table_policy import train_llm

import grpo_llama3_1_8b_demo as demo
import inference
import reward_func
import settings
from model import devices, llama, versions
from model.cluster import make_cluster
from model.llm import Llm
from run import process, run_folder, training
from run import start as start_of_run
from run.run_files import read_log
from settings import HERE, UserError
from task import prompts, run_grader
from tools import code_reward

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


def test_what_ends_a_script_has_its_line_and_its_exit_code(monkeypatch, capsys):
    def ends_with(error):
        def main(arguments):
            raise error

        return main

    assert run_script(monkeypatch, ends_with(UserError("SEED=-1: use 0 or more"))) == 2
    assert capsys.readouterr().err == "error: SEED=-1: use 0 or more\n"
    arguments = ["DATASET=my files/a.jsonl", "RUN_DIR=", "TEMPLATE={question} 'now'"]
    assert run_script(monkeypatch, ends_with(settings.Stopped(Path("my runs/one"))), *arguments) == 130
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


@pytest.mark.parametrize("change", [{"NUM_EPOCHS": 2}, {"MASK_OVERLONG": None}])
def test_a_run_of_another_version_is_refused(change):
    c = read("RUN_DIR=run")
    saved = {
        name: value for name, value in (dataclasses.asdict(c) | change).items()
        if value is not None and name not in run_folder.FREE_TO_CHANGE
    }  # fmt: skip
    with pytest.raises(UserError, match=rf"^RUN_DIR=run: .* another version .* in {next(iter(change))}"):
        run_folder.check_same_constants(c, saved, Path("run"))


# %% Versions


def test_another_version_is_refused_at_every_start(monkeypatch):
    versions.check_versions()
    package, wanted = next(iter(versions.VERSIONS.items()))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
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


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "[1]", "its config.json is not understood"),
        ("tokenizer_config.json", None, "no eos_token;"),
    ],
)
def test_a_part_of_a_model_that_says_nothing_is_named(name, text, words):
    path = Path(shutil.copytree(HERE / "tiny_llama", "model")) / name
    known = json.loads(path.read_text())
    path.write_text(text or json.dumps({key: value for key, value in known.items() if key != "eos_token"}))
    with pytest.raises(UserError, match=rf"^MODEL=model: .*{words}"):
        demo.main(["MODEL=model", "DRY_RUN=True"])


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


def test_a_revision_of_the_hub_is_taken_and_its_commit_is_known(hub):
    for name, commit in (("org/tiny", 1), ("org/tiny@v1", 0), (f"org/tiny@{HASHES[0]}", 0)):
        folder, _ = llama.load_hf_config(name)
        assert folder == hub / "snapshots" / HASHES[commit]
        assert llama.pinned(name, folder) == f"org/tiny@{HASHES[commit]}"
    Path("my@folder").mkdir()
    assert llama.pinned("my@folder", Path("my@folder")) == "my@folder"
    with pytest.raises(UserError, match=r"^MODEL=org/tiny@v9: neither a folder nor to be had"):
        llama.load_hf_config("org/tiny@v9")


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


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda n: 1 / 0, "check_answer raised ZeroDivisionError.*by zero"),
        (lambda n: [1.0], r"check_answer returned \[1.0\].*16 completions"),
        (lambda n: [1.0] * (n - 1) + [float("nan")], "check_answer returned nan.*return a number"),
    ],
)
def test_a_faulty_reward_function_stops_the_run_and_is_named(learning, monkeypatch, returns, words):
    c, llm, rows, folder = learning
    monkeypatch.setattr(
        reward_func, "check_answer", lambda prompts, completions, **_: returns(len(completions))
    )
    grader = run_grader.make_grader("", "", reward_func, rows)
    params = jax.tree.map(np.array, llm.params)
    with pytest.raises(UserError, match=words):
        train_llm(c, llm, grader, rows, folder)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(llm.actor, nnx.Param)))
    assert not saved_steps(folder) and not read_log(folder / "train_log.csv")


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
    log = training.TrainingLog(small_disk, read(), 0)
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


def test_a_default_that_was_edited_wrongly_is_refused_in_one_line():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Edited:
        SEED: int = "three"

    with pytest.raises(settings.UserError, match="SEED=three: must be a valid integer"):
        settings.read(Edited, [])


def test_cuda_packages_without_a_gpu_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    """Tried once with jax's real plugin, on a machine without a GPU; here only its name is there."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
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
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(devices, "NVIDIA_DEVICES", (str(tmp_path / "nvidia0"), str(tmp_path / "nvidiactl")))
    devices.check_gpu()
    assert capsys.readouterr().out == ""
    (tmp_path / "nvidiactl").touch()
    devices.check_gpu()
    (line,) = capsys.readouterr().out.splitlines()
    assert "NVIDIA GPU here is not used" in line and "make demo-cuda" in line


# %% A finished run, compiled programs, files


def test_a_finished_run_takes_more_steps_and_counts_on_in_whole_numbers(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    short = [argument for argument in SHORT if not argument.startswith("NUM_BATCHES")]
    with pytest.raises(UserError, match="NUM_BATCHES=7: the run in RUN_DIR=run was started with 8"):
        run_here(tmp_path, *short, "NUM_BATCHES=7")
    said = run_here(tmp_path, *short, "NUM_BATCHES=9")
    assert "NUM_BATCHES raised from 8 to 9" in said and "the schedule of 9 steps" in said
    assert "after training: " in said  # what was asked after 8 steps is asked again
    rows = (tmp_path / "run" / "train_log.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == [str(step) for step in range(1, 10)]
    assert read_log(tmp_path / "run" / "train_log.csv")[-1]["grad_norm"] > 0
    after = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (before["steps"], after["steps"]) == (8, 9)
    assert json.loads((tmp_path / "run" / "constants.json").read_text())["NUM_BATCHES"] == 9


def test_module_6_makes_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda form, *when: f"{form.rpartition('/')[0]}/noon")
    made = [run_folder.new_folder("mesh_and_axis_rules") for _ in range(3)]
    assert [path.name for path in made] == ["noon", "noon_2", "noon_3"]
    assert {path.parent.name for path in made} == {"mesh_and_axis_rules"}


def test_a_faulty_reward_function_is_named_with_its_file_and_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import json\n\ndef broken(prompts, completions, **columns):\n    json.loads('{')\n")
    broken = run_grader.guarded("broken", run_grader.load_file(path).broken)
    with pytest.raises(UserError, match=rf"JSONDecodeError.*; fix it \({path}, line 4\)$"):
        broken([""], [""])
    path.write_text("\nimport json\njson.loads('{')\n")
    with pytest.raises(UserError, match=rf"; fix it \({path}, line 3\)$"):
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
            [sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True,
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
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True,
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
    command = [sys.executable, "-c", DAMAGED, HERE.parent / folder, tmp_path / "compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
