"""A run is its content: whoever uses it sees that a part was changed under its old name."""

import contextlib
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from short_runs import SHORT

import grpo_llama3_1_8b_demo as demo
import inference
import reward_func
import settings
from model import llama
from model.rollout import MaxTextRollout
from run import run_folder, start
from settings import HERE, UserError
from task import questions, run_grader
from tools import convert_checkpoint, pass_at_k

USED = [
    "MODEL=model",
    "TEACHER=teacher",
    "DATASET=data",
    "REWARD_FUNC=own.py",
    "REWARDS=own,check_numbers",
    "METHOD=method.py",
    "ENVIRONMENT=world.py",
    "TEMPLATE={question}",
    "MAX_PROMPT_LENGTH=99",
]


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(autouse=True)
def files(empty_folder):
    """All that USED names, in the current folder."""
    for name in ("model", "teacher"):
        shutil.copytree(HERE / "tiny_llama", name)
    Path("data").mkdir()
    for split, count in (("train", 40), ("validation", 8), ("test", 20)):
        lines = (HERE / "tiny_gsm8k" / f"{split}.jsonl").read_text().splitlines()[:count]
        Path("data", f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    Path("own.py").write_text(
        "def own(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    for name in ("method.py", "world.py", "course.py"):
        Path(name).write_text("X = 1  # one\n")


def found():
    """The identity of a run with these files."""
    c = settings.read(demo.Constants, [*SHORT, *USED])
    data = questions.read_data(c)
    grader = run_grader.make_grader(c.REWARDS, c.REWARD_FUNC, reward_func, [])
    rows, _ = start.make_splits(c, data, grader, llama.load_tokenizer(Path(c.MODEL)))
    return run_folder.identity(c, rows, grader.names, "course.py")


def edit(path, old, new):
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def move_one_weight(folder):
    """One number of one tensor, by the smallest step; the file keeps its size."""
    weights = safetensors.numpy.load_file(Path(folder, "model.safetensors"))
    name = sorted(weights)[len(weights) // 2]
    weights[name].flat[7] = np.nextafter(weights[name].flat[7], np.float32(9))
    safetensors.numpy.save_file(
        weights, Path(folder, "model.safetensors"), metadata={"format": "pt"}
    )


def lines(path, *which):
    """Keeps these of a file's lines."""
    Path(path).write_text("\n".join(Path(path).read_text().splitlines()[slice(*which)]))


CHANGES = [  # what is done to the files, and what is then another
    (lambda: move_one_weight("model"), "MODEL"),
    (lambda: move_one_weight("teacher"), "TEACHER"),
    (lambda: edit("model/config.json", "1e-05", "2e-05"), "MODEL"),
    (
        lambda: edit("model/chat_template.jinja", "<|assistant|>", "<answer>"),
        "MODEL DATASET TEST_DATASET",
    ),
    (lambda: edit("own.py", "1.0", "-1.0"), "REWARD_FUNC"),
    (lambda: edit("course.py", "1 ", "2 "), "reward_func.py"),
    (lambda: edit("method.py", "1 ", "2 "), "METHOD"),
    (lambda: edit("world.py", "1 ", "2 "), "ENVIRONMENT"),
    (lambda: lines("data/train.jsonl", None, None, -1), "DATASET"),
    (lambda: edit("data/test.jsonl", "#### ", "#### 1"), "TEST_DATASET"),
    (lambda: edit("data/validation.jsonl", "#### ", "#### 1"), "DATASET"),
    (lambda: lines("data/test.jsonl", -1), ""),  # beyond NUM_TEST_QUESTIONS
    (lambda: [edit("method.py", "one", "uno"), edit("own.py", "def", "# points\ndef")], ""),
    (lambda: [Path("model").rename("moved"), shutil.copytree("moved", "model")], ""),
]


def test_what_has_changed_is_named_and_nothing_else():
    before, c = found(), settings.read(demo.Constants, USED)
    for change, names in CHANGES:
        change()
        now, names = found(), set(names.split())
        assert (
            before.keys() == now.keys() and {key for key in now if now[key] != before[key]} == names
        )
        said = run_folder.change_message(before, now, c, "RUN_DIR=r")
        for key in names:
            value = getattr(c, key, None)
            name = f"{key}={value}" if value else {"TEST_DATASET": "DATASET=data"}.get(key, key)
            assert name in said
        assert bool(said) == bool(names) and "\n" not in said
        before = now
    assert not any(
        run_folder.change_message(kept, now, c, "")
        for kept in ({}, {"MODEL": "commit " + "f" * 40})
    )


@pytest.fixture
def run(finished):
    """A run that is over, of MODEL=model."""
    shutil.copytree(finished / "run", "run")
    rewrite("run/constants.json", MODEL="model")


def rewrite(path, **changes):
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | changes))


FEW = settings.read(pass_at_k.Constants, ["SAMPLES=2", "NUM_QUESTIONS=2"])
READERS = {
    "inference": lambda: inference.main(
        ["CHECKPOINT=run", "SAMPLES=2", "How many cards does Tom have?"]
    ),
    "export": lambda: convert_checkpoint.main(["SOURCE=run", "TARGET=hf"]),
    "pass@k": lambda: pass_at_k.count_right(FEW, "run", trained=True),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_of_a_checkpoint_says_that_its_base_is_another(run, name, capsys, monkeypatch):
    """With all weights trained the base is only compared with; LoRA's A and B fit no other."""
    stop = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(MaxTextRollout, "generate", stop)  # the rest would take seconds
    move_one_weight("model")
    with contextlib.suppress(KeyboardInterrupt):
        READERS[name]()
    assert "note: MODEL=model: the content isn't what the run in" in capsys.readouterr().out
    shutil.rmtree("hf", ignore_errors=True)
    rewrite("run/constants.json", LORA_RANK=4)
    with pytest.raises(UserError, match=r"^MODEL=model: the content isn't .*; put it back"):
        READERS[name]()
    assert not Path("hf").exists()


def test_a_run_does_not_go_on_with_another_model(run, capsys):
    """And it does with a copy of the old one."""
    arguments = [*SHORT, "MODEL=model", "RUN_DIR=run"]
    demo.main(arguments)
    out = capsys.readouterr().out
    assert "going on after step 8 of 8" in out and "the content" not in out
    move_one_weight("model")
    with pytest.raises(
        UserError, match=r"^MODEL=model: the content isn't what the run in RUN_DIR=run"
    ):
        demo.main(arguments)
