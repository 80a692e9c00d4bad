"""Settings that are wrong, each in another way: one line with constant, value and remedy.

Those that need no file and no model are refused where the constants are read. The others are tried on the
main script before anything is trained, and most of them again as a dry run.
"""

import json
import os
import shutil
import typing
from pathlib import Path

import pytest

import grpo_llama3_1_8b_demo as demo
import settings
from settings import UserError

ROW = {"question": "1 + 1?", "answer": "#### 2"}

# What the line has to say beside the name of the constant, and the settings.
TABLE = """
MODEL <= MODEL=
config.json <= MODEL=/ | MODEL=.. | MODEL=tiny_gsm8k
folder <= MODEL=mine.jsonl | MODEL=a/b/c | MODEL=nobody/nothing
empty name <= DATASET= | DATASET=,
above 0 <= DATASET=tiny_gsm8k:0 | DATASET=tiny_gsm8k:-1 | DATASET=tiny_gsm8k:inf | DATASET=tiny_gsm8k:nan
twice <= DATASET=tiny_gsm8k,tiny_gsm8k
every source a weight <= DATASET=tiny_gsm8k:0.5,mine.jsonl
is trained on, too <= DATASET=/dev/null
train.jsonl <= DATASET=empty_folder
local <= DATASET=gs://bucket/x | REWARD_FUNC=gs://bucket/x.py
No such file <= TEST_DATASET=nothing.json
leave the weights out <= TEST_DATASET=mine.jsonl:0.5
nothing <= REWARDS=nothing
named twice <= REWARDS=check_answer,check_answer
REWARDS <= REWARDS=, | REWARDS=check_answer,
os <= REWARDS=os
__class__ <= REWARDS=__class__
choose one form <= REWARDS=mark_reward,match_format_exactly
REWARD_FUNC <= REWARD_FUNC=nothing.py | REWARD_FUNC=empty_folder | REWARD_FUNC=mine.jsonl
choose another <= RUN_DIR=mine.jsonl | RUN_DIR=mine.jsonl/run | RUN_DIR=/proc/run
choose another <= CHECKPOINT_DIR=mine.jsonl/x | CHECKPOINT_DIR=/proc/checkpoints
CHECKPOINT_DIR <= RUN_DIR=gs://b/r
or equal to 0 <= SEED=-1 | BETA=-0.1
less than or equal <= SEED=4294967296 | SEED=99999999999999999999
integer <= SEED=1e3 | NUM_BATCHES=ten
boolean <= DRY_RUN=maybe | SCAN_LAYERS=2
or equal to 1 <= BATCH_SIZE=0
shortest takes <= MAX_PROMPT_LENGTH=1
greater than 0 <= TEMPERATURE=-1
a finite number <= TEMPERATURE=nan | LEARNING_RATE=inf | EPSILON=inf
must be <= TOP_P=nan
-1 <= TOP_K=-2
tokens <= TOP_K=1000
no such constant <= NUM_PASSES=3
BETA <= BETA=0 TARGET_KL=0.1 | BETA=0 REFERENCE_OFFLOAD=True
below EPSILON <= EPSILON_HIGH=0.1
must be 'grpo <= LOSS_ALGO=ppo
set TEACHER <= ADVANTAGE=none
name an ENVIRONMENT <= ADVANTAGE=turn
BETA=1 <= TEACHER=tiny_llama BETA=0
mse_kl <= TEACHER=tiny_llama KL_LOSS_MODE=kl
SAMPLER_CORRECTION=0 <= SAMPLER_WEIGHT=sequence
LOSS_ALGO=dapo <= EPSILON_HIGH=0.28
EPSILON_HIGH=0.28 <= LOSS_ALGO=dapo
refill <= ROLLOUTS=one-step-ahead ZERO_VARIANCE_GROUPS=refill
at most 2; <= TEMPERATURE=2.1 ROLLOUT_ENGINE=vllm SCAN_LAYERS=True
maxtext <= TEMPERATURE_END=3 ROLLOUT_ENGINE=vllm SCAN_LAYERS=True
not a Python file <= METHOD=nowhere.py | METHOD=empty_folder
empty_folder <= TEACHER=empty_folder
its vocabulary <= TEACHER=tiny_grid
more than <= OVERLONG_BUFFER=29
drop one <= ROLLOUTS=one-step-ahead TEMPERATURE_END=0.5
less than 1 <= B1=1 | B1=nan
must divide <= TRAIN_MICRO_BATCH_SIZE=5 | TRAINER_TENSOR_PARALLEL=3
each weight once <= LORA_TARGETS= | LORA_TARGETS=q_proj,q_proj | LORA_TARGETS=lm_head
no second copy <= LORA_RANK=4 REFERENCE_OFFLOAD=True
lower it <= MAX_TO_KEEP=1000000000
CPU <= ATTENTION=flash
t4, l4 <= MACHINE=t5
is what a dry run plans for <= MACHINE=t4
True <= ROLLOUT_ENGINE=vllm
not installed <= ROLLOUT_ENGINE=vllm SCAN_LAYERS=True
as they are <= ROLLOUT_ENGINE=vllm SCAN_LAYERS=True LOGITS_CLIP=5
other hosts <= DISTRIBUTED=True
NUM_BATCHES <= NUM_BATCH=3
NAME=value <= help | NUM_BATCHES
valid number <= LEARNING_RATE=${x}
"""
VALUES = {
    setting: words
    for words, settings in (line.split(" <= ") for line in TABLE.strip().splitlines())
    for setting in settings.split(" | ")
}
ONLY_WHEN_IT_RUNS = {"DISTRIBUTED=True", "MACHINE=t4", "ROLLOUT_ENGINE=vllm SCAN_LAYERS=True"}


@pytest.fixture(autouse=True)
def a_small_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("empty_folder").mkdir()
    for name, question in (("mine", "1 + 1?"), ("other", "2 + 3?")):
        Path(f"{name}.jsonl").write_text(json.dumps(ROW | {"question": question}) + "\n")
    return set(os.listdir())


def line_of(arguments):
    with pytest.raises(UserError) as error:
        demo.main(arguments)
    line = str(error.value)
    assert "\n" not in line and len(line) < 700, line
    return line


def refused_when_read(arguments):
    """What the first line of `main` says, with or without DRY_RUN; nothing if it takes the values."""
    try:
        settings.read(demo.Constants, arguments)
    except UserError as error:
        return str(error)
    return ""


def test_a_wrong_value_is_one_line_and_a_dry_run_leaves_nothing(a_small_place, subtests):
    for row, words in VALUES.items():
        with subtests.test(row):
            arguments = row.split()
            ways = [[]] if row in ONLY_WHEN_IT_RUNS else [["DRY_RUN=True"], []]
            lines = [refused_when_read(arguments)]
            for first in [] if lines[0] else ways:
                lines = [*filter(None, lines), line_of([*first, *arguments])]
                assert set(os.listdir()) <= a_small_place | ({"runs"} if not first else set())
            for line in lines:
                assert words in line and "\n" not in line, line
                assert any(argument.split("=")[0] in line for argument in arguments), line
            shutil.rmtree("runs", ignore_errors=True)


def test_every_number_has_a_range():
    """TOP_K=-1 switches it off; checks.py has its rule."""
    hints = typing.get_type_hints(demo.Constants, include_extras=True)
    assert len(hints) > 60 and [name for name, hint in hints.items() if hint in (int, float)] == ["TOP_K"]


@pytest.mark.parametrize("first", [[], ["DRY_RUN=True"]])
def test_the_main_script_reads_its_constants_before_anything_else(first, a_small_place):
    assert "or equal to 1" in line_of([*first, "NUM_BATCHES=0", "MODEL=nothing", "RUN_DIR=run"])
    assert set(os.listdir()) == a_small_place
