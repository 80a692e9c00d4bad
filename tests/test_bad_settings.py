"""Settings that are wrong, each in another way: one line with constant, value and remedy.

Those that need no file and no model are refused where the constants are read. The others are tried on the
main script before anything is trained, and most of them again as a dry run.
"""

import json
import os
import typing
from pathlib import Path

import pytest

import grpo_llama3_1_8b_demo as demo
import settings
from settings import UserError

ROW = {"question": "1 + 1?", "answer": "#### 2"}

# What the line has to say beside the name of the constant, and the settings.
TABLE = """
config.json <= MODEL=/ | MODEL=tiny_gsm8k
folder <= MODEL=mine.jsonl | MODEL=nobody/nothing
empty name <= DATASET=,
above 0 <= DATASET=tiny_gsm8k:0 | DATASET=tiny_gsm8k:nan
twice <= DATASET=tiny_gsm8k,tiny_gsm8k
every source a weight <= DATASET=tiny_gsm8k:0.5,mine.jsonl
is trained on, too <= DATASET=/dev/null
train.jsonl <= DATASET=empty_folder
local <= REWARD_FUNC=gs://bucket/x.py
No such file <= TEST_DATASET=nothing.json
leave the weights out <= TEST_DATASET=mine.jsonl:0.5
nothing <= REWARDS=nothing
named twice <= REWARDS=check_answer,check_answer
REWARDS <= REWARDS=check_answer,
__class__ <= REWARDS=__class__
choose one form <= REWARDS=mark_reward,match_format_exactly
REWARD_FUNC <= REWARD_FUNC=nothing.py | REWARD_FUNC=mine.jsonl
choose another <= RUN_DIR=mine.jsonl | RUN_DIR=/proc/run | CHECKPOINT_DIR=/proc/checkpoints
less than or equal <= SEED=4294967296
integer <= SEED=1e3
boolean <= DRY_RUN=maybe
or equal to 1 <= BATCH_SIZE=0
shortest takes <= MAX_PROMPT_LENGTH=1
a finite number <= TEMPERATURE=nan
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
not a Python file <= METHOD=nowhere.py
empty_folder <= TEACHER=empty_folder
its vocabulary <= TEACHER=tiny_grid
more than <= OVERLONG_BUFFER=29
drop one <= ROLLOUTS=one-step-ahead TEMPERATURE_END=0.5
less than 1 <= B1=nan
must divide <= TRAIN_MICRO_BATCH_SIZE=5 | TRAINER_TENSOR_PARALLEL=3
each weight once <= LORA_TARGETS=q_proj,q_proj | LORA_TARGETS=lm_head
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
NAME=value <= NUM_BATCHES
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


@pytest.mark.parametrize("row", VALUES)
def test_a_wrong_value_is_one_line_and_a_dry_run_leaves_nothing(row, a_small_place):
    arguments = row.split()
    try:  # with or without DRY_RUN; the rest is tried both ways
        settings.read(demo.Constants, arguments)
        ways = [[]] if row in ONLY_WHEN_IT_RUNS else [["DRY_RUN=True"], []]
    except UserError:
        ways = [[]]
    for first in ways:
        with pytest.raises(UserError) as error:
            demo.main([*first, *arguments])
        line = str(error.value)
        assert VALUES[row] in line and "\n" not in line and len(line) < 700, line
        assert any(argument.split("=")[0] in line for argument in arguments), line
        assert set(os.listdir()) <= a_small_place | ({"runs"} if not first else set())


def test_every_number_has_a_range():
    """TOP_K=-1 switches it off; checks.py has its rule."""
    hints = typing.get_type_hints(demo.Constants, include_extras=True)
    assert len(hints) > 60 and [name for name, hint in hints.items() if hint in (int, float)] == ["TOP_K"]
