"""Bad input: one clear line that names the constant, the value and the remedy; exit code 2; nothing
lost.
"""

import contextlib
import dataclasses
import http.server
import importlib.metadata
import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import jax
import pytest
from short_runs import HANGS, SCRIPT, SHORT, run_here, start

import grpo_llama3_1_8b_demo as demo
import inference
import settings
from model import versions
from run import process, run_folder, training
from run import start as start_of_run
from run.run_files import read_log
from settings import HERE, UserError


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(autouse=True)
def offline_in_an_empty_folder(empty_folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("argument", "code"), [("REWARDS=mark_reward,match_format_exactly", 2), ("--help", 0)]
)
def test_the_command_line_answers_with_one_line_and_before_the_imports(argument, code):
    command = [sys.executable, "-X", "importtime", SCRIPT, argument]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    imported = {
        line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")
    }
    said = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == code and len(said) == (code != 0)
    assert not said or said[0].startswith("error: REWARDS=")
    assert "run.checks" in imported
    assert not imported & {"jax", "flax", "maxtext", "tunix", "transformers", "grain", "tensorflow"}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("checked_grader", signal.SIGTERM),
        ("checked_grader", signal.SIGHUP),
        ("make_prompts", signal.SIGINT),
    ],
)
def test_an_early_ctrl_c_or_a_schedulers_signal(monkeypatch, capsys, where, number):
    """Before the folder of the run is made, and after: then it is named, though RUN_DIR was not
    given.
    """
    before = {number: signal.getsignal(number) for number in settings.STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup
    monkeypatch.setattr(start_of_run, where, lambda *arguments, **more: signal.raise_signal(number))
    monkeypatch.setattr(
        sys, "argv", ["my scripts/grpo.py", "TEMPLATE={question} {{now}}", "RUN_DIR="]
    )
    with pytest.raises(SystemExit) as done:
        settings.run(demo.main)
    for each, handler in before.items():
        signal.signal(each, handler)
    assert done.value.code == 130
    err = capsys.readouterr().err
    folders = list(Path("runs/grpo_llama3_1_8b_demo").glob("*"))
    if where == "checked_grader":
        assert "RUN_DIR" not in err and not folders
    else:
        command = [
            "python",
            "my scripts/grpo.py",
            "TEMPLATE={question} {{now}}",
            f"RUN_DIR={folders[0]}",
        ]
        assert shlex.split(err.splitlines()[-1].removeprefix("stopped. To go on: ")) == command


@pytest.mark.parametrize("change", [{"NUM_EPOCHS": 2}, {"MASK_OVERLONG": None}])
def test_a_run_of_another_version_is_refused(change):
    c = settings.read(demo.Constants, ["RUN_DIR=run"])
    saved = {
        name: value
        for name, value in (dataclasses.asdict(c) | change).items()
        if value is not None and name not in run_folder.FREE_TO_CHANGE
    }
    with pytest.raises(
        UserError, match=rf"^RUN_DIR=run: .* another version .* in {next(iter(change))}"
    ):
        run_folder.check_same_constants(c, saved, Path("run"))


def test_another_version_is_refused_at_every_start(monkeypatch):
    versions.prepare_libraries()
    package, wanted = next(iter(versions.VERSIONS.items()))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(
        UserError, match=rf"^{package} 9.9 is installed: .*install {package}=={wanted}$"
    ):
        demo.main([])
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["requirements.txt", "requirements/tpu.txt"])
def test_the_versions_are_the_pinned_ones(name):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (HERE.parent / name).read_text(), re.M))
    assert {package: pins[package] for package in versions.VERSIONS} == versions.VERSIONS


def test_the_script_counts_what_is_both_tested_and_trained_on(capsys):
    Path("own").mkdir()
    for name in ("copy.jsonl", "own/train.jsonl", "own/validation.jsonl"):
        Path(name).write_text(
            '{"question": "Tom has 2 apples. How many apples?", "answer": "#### 2"}'
        )
    with contextlib.suppress(UserError):
        demo.main([*SHORT, "DATASET=own/train.jsonl", "TEST_DATASET=copy.jsonl", "DRY_RUN=True"])
    said = capsys.readouterr().out
    assert "\nnote: 1 of 1 test questions are training questions, too" in said
    assert "\nnote: 1 of 1 held-out questions are training questions, too" in said


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
    # transformers would ask, and then run it
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    folder = Path(shutil.copytree(HERE / "tiny_llama", "model"))
    (folder / "code.py").write_text(
        "open('ran', 'w')\nclass MyConfig: pass\nclass MyTokenizer: pass\n"
    )
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    with pytest.raises(
        UserError, match=r"^MODEL=model: (model_type=mine is not|no tokenizer .*custom code)"
    ):
        demo.main(["MODEL=model"])
    assert not Path("ran").exists()


def test_a_cache_that_cannot_be_used_is_noted(tmp_path, monkeypatch, capsys):
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    kept = {name: getattr(jax.config, name) for name in names}
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file"))
    process.enable_compilation_cache()
    for name, value in kept.items():
        jax.config.update(name, value)
    assert f"not kept: {tmp_path / 'file'}" in capsys.readouterr().out


def test_a_run_keeps_the_commit_and_a_resume_with_another_is_refused(tmp_path, monkeypatch):
    """A cache of the hub with two commits of org/tiny; `main` is the second, `v1` the first."""
    repository, old, new = tmp_path / "hub" / "models--org--tiny", "1" * 40, "2" * 40
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("v1", old), ("main", new)):
        shutil.copytree(HERE / "tiny_llama", repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    stop = lambda *arguments, **more: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(start_of_run, "load_llm", stop)

    def start(*arguments):
        with pytest.raises(KeyboardInterrupt):
            demo.main(["MODEL=org/tiny", *arguments])

    start("RUN_DIR=run")
    saved = json.loads(Path("run/constants.json").read_text())
    assert saved["MODEL"] == f"org/tiny@{new}"
    start("RUN_DIR=run")  # the same command goes on
    start("RUN_DIR=run", f"MODEL=org/tiny@{new}")
    refused = rf"^MODEL=org/tiny@{old}: the run in RUN_DIR=run was started with org/tiny@{new}; "
    for dry in ("DRY_RUN=False", "DRY_RUN=True"):
        with pytest.raises(UserError, match=refused):
            demo.main(["MODEL=org/tiny@v1", "RUN_DIR=run", dry])
    (repository / "refs" / "main").write_text(old)  # the hub has moved on
    with pytest.raises(UserError, match=refused):
        demo.main(["MODEL=org/tiny", "RUN_DIR=run"])
    c, *_ = inference.read_arguments(["CHECKPOINT=run"])
    assert saved["MODEL"] == c.MODEL  # inference asks the one that was trained


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def hub():
    """Stands in for Hugging Face's hub: the tiny Llama as org/tiny, with weights of a petabyte.
    Its address, and the list of what was fetched.
    """
    files, fetched, commit = HERE / "tiny_llama", [], "c" * 40

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self, whole=False):
            names = [path.name for path in files.iterdir()]
            if "/tree/" in self.path:
                rows = [{"type": "file", "path": name, "size": 0, "oid": ""} for name in names]
                content = json.dumps(rows).encode()
            elif self.path.startswith("/api/models/org/tiny/"):
                siblings = [{"rfilename": name} for name in names]
                about = {"id": "org/tiny", "sha": commit, "siblings": siblings}
                content = json.dumps(about).encode()
            else:
                content = (files / self.path.rpartition("/")[2]).read_bytes()
            size = 10**15 if self.path.endswith(".safetensors") else len(content)
            self.send_response(200)
            self.send_header("ETag", f'"{len(content)}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if whole:
                self.wfile.write(content)

        def do_GET(self):
            fetched.append(self.path.rpartition("/")[2])
            self.do_HEAD(whole=True)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", fetched
    server.shutdown()
    server.server_close()


def test_a_disk_too_small_for_the_weights_is_refused_before_they_are_fetched(hub, tmp_path):
    address, fetched = hub
    at_hub = dict(HF_ENDPOINT=address, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0")
    run = start(tmp_path, *SHORT, "MODEL=org/tiny", "RUN_DIR=run", **at_hub)
    _, error = run.communicate(timeout=HANGS)
    said = r"error: MODEL=org/tiny: 931322\.57 GiB are needed, .* are free in .*; .* set HF_HOME"
    assert run.returncode == 2 and re.match(said, error.splitlines()[-1]), error
    assert "config.json" in fetched and "model.safetensors" not in fetched
    assert not Path("run").exists()


def test_a_disk_too_full_for_the_log_ends_the_training(small_disk):
    # tensorboardX's own SummaryWriter would wait for ever, once its thread has died of the full
    # disk
    log = training.TrainingLog(small_disk, settings.read(demo.Constants, []), 0)
    row = dict.fromkeys(("reward", "correct", "format_ok", "kl"), 0.5)
    log.add({"step": 1} | row)
    with pytest.raises(UserError, match="the disk is full"), process.full_disk(small_disk):
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        for step in range(2, 10_000):
            log.add({"step": step} | row)


def test_a_disk_that_fills_up_later_costs_no_checkpoint(small_disk, monkeypatch):
    original = demo.train

    def filling(*arguments):  # somebody else fills the disk while the run is under way
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2_000_000))
        return original(*arguments)

    arguments = [*SHORT, f"RUN_DIR={small_disk}/run"]
    with monkeypatch.context() as patch:
        patch.setattr(demo, "train", filling)
        with pytest.raises(UserError, match="the disk is full"):
            demo.main(arguments)
    (small_disk / "ballast").unlink()
    demo.main(arguments)  # the same command goes on
    assert json.loads((small_disk / "run" / "result.json").read_text())["steps"] == 8


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
