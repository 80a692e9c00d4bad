"""A hundred settings that are wrong, each in another way: one line with constant, value and remedy.

Those that need no file and no model are refused where the constants are read. The others are tried on the
main script before anything is trained, and most of them again as a dry run.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from settings import UserError
from task import run_grader

ROW = {"question": "1 + 1?", "answer": "#### 2"}

# The setting, and what the line has to say beside its name.
TABLE = """
NUM_BATCH=3 => NUM_BATCHES
NUM_BATCHES => NAME=value
NUM_BATCHES=ten => valid integer
LEARNING_RATE=${x} => valid number
SCAN_LAYERS=2 => boolean
EVAL_CONFIG=wild => must be 'greedy', 'standard' or 'liberal'
MAX_PROMPT_LENGTH=3 => shortest takes
MODEL= => MODEL
MODEL=/ => config.json
MODEL=mine.jsonl => folder
MODEL=.. => config.json
MODEL=tiny_gsm8k => config.json
MODEL=a/b/c => folder
DATASET= => empty name
DATASET=, => empty name
DATASET=tiny_gsm8k:0 => above 0
DATASET=tiny_gsm8k:-1 => above 0
DATASET=tiny_gsm8k:inf => above 0
DATASET=tiny_gsm8k:nan => above 0
DATASET=tiny_gsm8k,tiny_gsm8k => twice
DATASET=tiny_gsm8k:0.5,mine.jsonl => every source a weight
DATASET=/dev/null => is trained on, too
DATASET=empty_folder => train.jsonl
DATASET=gs://bucket/x => local
TEST_DATASET=nothing.json => No such file
TEST_DATASET=mine.jsonl:0.5 => leave the weights out
REWARDS=nothing => nothing
REWARDS=check_answer,check_answer => named twice
REWARDS=, => REWARDS
REWARDS=check_answer, => REWARDS
REWARDS=os => os
REWARDS=__class__ => __class__
REWARDS=mark_reward,match_format_exactly => choose one form
REWARD_FUNC=nothing.py => REWARD_FUNC
REWARD_FUNC=empty_folder => REWARD_FUNC
REWARD_FUNC=mine.jsonl => REWARD_FUNC
REWARD_FUNC=gs://bucket/x.py => local
RUN_DIR=mine.jsonl => choose another
RUN_DIR=mine.jsonl/run => choose another
RUN_DIR=gs://b/r => CHECKPOINT_DIR
RUN_DIR=/proc/run => choose another
CHECKPOINT_DIR=mine.jsonl/x => choose another
CHECKPOINT_DIR=/proc/checkpoints => choose another
SEED=-1 => or equal to 0
SEED=4294967296 => less than or equal
SEED=1e3 => integer
SEED=99999999999999999999 => less than or equal
DRY_RUN=maybe => boolean
BAD_ROWS=ignore => must be 'refuse
MAX_PROMPT_LENGTH=0 => or equal to 1
MAX_PROMPT_LENGTH=-5 => or equal to 1
TOTAL_GENERATION_STEPS=1 => or equal to 2
TOTAL_GENERATION_STEPS=0 => or equal to 2
TEMPERATURE=-1 => greater than 0
TEMPERATURE=nan => a finite number
TEMPERATURE=inf => a finite number
TEMPERATURE_END=-1 => or equal to 0
TEMPERATURE_END=nan => a finite number
TOP_P=0 => greater than 0
TOP_P=nan => must be
TOP_K=-2 => -1
TOP_K=1000 => tokens
BATCH_SIZE=0 => or equal to 1
BATCH_SIZE=-8 => or equal to 1
NUM_GENERATIONS=0 => or equal to 2
NUM_ITERATIONS=0 => or equal to 1
NUM_BATCHES=0 => or equal to 1
NUM_TEST_QUESTIONS=0 => or equal to 1
NUM_PASSES=3 => no such constant
EVAL_EVERY=-1 => or equal to 0
EVAL_QUESTIONS=0 => or equal to 1
LOG_ANSWERS_EVERY=-1 => or equal to 0
BETA=-0.1 => or equal to 0
BETA=nan => a finite number
BETA=0 TARGET_KL=0.1 => BETA
BETA=0 REFERENCE_OFFLOAD=True => BETA
EPSILON=-1 => or equal to 0
EPSILON=inf => a finite number
EPSILON_HIGH=0.1 => below EPSILON
LOSS_ALGO=ppo => must be 'grpo
LOSS_AGG_MODE=mean => must be 'seq-mean
ADVANTAGE=gae => must be 'group
METHOD=nowhere.py => not a Python file
METHOD=empty_folder => not a Python file
TEACHER=empty_folder => empty_folder
TEACHER=tiny_grid => its vocabulary
SAMPLER_WEIGHT=answer => must be 'token
KL_LOSS_MODE=k3 => must be 'low_var_kl
ENTROPY_COEF=-1 => or equal to 0
OVERLONG_BUFFER=-1 => or equal to 0
OVERLONG_BUFFER=29 => more than
OVERLONG_PENALTY=nan => a finite number
ZERO_VARIANCE_GROUPS=drop => must be 'keep
TARGET_KL=-1 => or equal to 0
ADVANTAGE_CLIP=-1 => or equal to 0
LOGITS_CLIP=nan => a finite number
ROLLOUTS=one-step-ahead TEMPERATURE_END=0.5 => drop one
SAMPLER_CORRECTION=inf => a finite number
LEARNING_RATE=nan => a finite number
LEARNING_RATE=inf => a finite number
MAX_GRAD_NORM=-1 => or equal to 0
B1=1 => less than 1
B1=-0.1 => greater than or equal to 0
B1=nan => less than 1
B2=1 => less than 1
B2=2 => less than 1
WEIGHT_DECAY=-1 => or equal to 0
WARMUP_FRACTION=1 => less than 1
WARMUP_FRACTION=nan => must be
MAX_NONFINITE_UPDATES=-1 => or equal to 0
TRAIN_MICRO_BATCH_SIZE=5 => must divide
TRAIN_MICRO_BATCH_SIZE=-1 => or equal to 0
LORA_RANK=-1 => or equal to 0
LORA_ALPHA=0 => greater than 0
LORA_ALPHA=inf => a finite number
LORA_TARGETS= => each weight once
LORA_TARGETS=q_proj,q_proj => each weight once
LORA_TARGETS=lm_head => each weight once
LORA_RANK=4 REFERENCE_OFFLOAD=True => no second copy
SAVE_INTERVAL_STEPS=0 => or equal to 1
MAX_TO_KEEP=0 => or equal to 1
MAX_TO_KEEP=1000000000 => lower it
DTYPE=float16 => must be 'float32
WEIGHT_DTYPE=float16 => must be 'float32
WEIGHT_DTYPE=int8 => must be 'float32
REMAT_POLICY=all => must be 'none
ATTENTION=foo => must be 'dot_product
ATTENTION=flash => CPU
MACHINE=t5 => t4, l4
ROLLOUT_ENGINE=sglang => must be 'maxtext
ROLLOUT_ENGINE=vllm => True
ROLLOUT_ENGINE=vllm SCAN_LAYERS=True => not installed
ROLLOUT_ENGINE=vllm SCAN_LAYERS=True LOGITS_CLIP=5 => as they are
TRAINER_DEVICES_FRACTION=0 => greater than 0
SAMPLER_DEVICES_FRACTION=1.5 => less than or equal to 1
TRAINER_TENSOR_PARALLEL=0 => or equal to 1
TRAINER_TENSOR_PARALLEL=3 => must divide
SAMPLER_DATA_PARALLEL=0 => or equal to 1
HBM_UTILIZATION_VLLM=0 => greater than 0
DISTRIBUTED=True => other hosts
"""
VALUES = dict(line.split(" => ") for line in TABLE.strip().splitlines())
ONLY_WHEN_IT_RUNS = {
    "DISTRIBUTED=True",
    "ROLLOUT_ENGINE=vllm SCAN_LAYERS=True",
}  # a dry run cannot tell

REWARDS = {  # the text of own.py: what the line has to say
    "": "compute_score",
    "def": "SyntaxError",
    "import nothing_of_that_name": "nothing_of_that_name",
    "raise SystemExit(0)": "SystemExit",
    "1 / 0": "ZeroDivisionError",
    "compute_score = 7": "compute_score",
    "compute_scores = lambda *a: 1": "compute_score",
    "class compute_score: pass": "compute_score",
    "\0": "own.py",
    "def compute_score(): return 1": "compute_score",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): exit()": "SystemExit",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 'right'": "'right'",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1j": "1j",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return None": "None",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return [1]": "[1]",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1e300": "1e+300",
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return float('inf')": "inf",
}


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
    read_alone = 0
    for row, words in VALUES.items():
        with subtests.test(row):
            arguments = row.split()
            ways = [[]] if row in ONLY_WHEN_IT_RUNS else [["DRY_RUN=True"], []]
            lines = [refused_when_read(arguments)]
            read_alone += bool(lines[0])
            for first in [] if lines[0] else ways:
                lines = [*filter(None, lines), line_of([*first, *arguments])]
                assert set(os.listdir()) <= a_small_place | ({"runs"} if not first else set())
            for line in lines:
                assert words in line and "\n" not in line, line
                assert any(argument.split("=")[0] in line for argument in arguments), line
            shutil.rmtree("runs", ignore_errors=True)
    assert 70 < read_alone < len(VALUES) - 40


@pytest.mark.parametrize("first", [[], ["DRY_RUN=True"]])
def test_the_main_script_reads_its_constants_before_anything_else(first, a_small_place):
    assert "or equal to 1" in line_of([*first, "NUM_BATCHES=0", "MODEL=nothing", "RUN_DIR=run"])
    assert set(os.listdir()) == a_small_place


@pytest.mark.parametrize("text", REWARDS)
def test_a_faulty_reward_file_is_one_line(text):
    """At the start where the file shows it, else at the first answer; test_guards.py has a whole run."""
    Path("own.py").write_text(text)
    row = {"data_source": "mine", "source": "mine.jsonl", "line": "1", "answer": "2"}
    with pytest.raises(UserError) as error:
        grader = run_grader.make_grader("", "own.py", reward_func, [row])
        for function in grader.functions:
            columns = dict(answer=["2"], question=["1 + 1?"], data_source=["mine"], extra_info=[""])
            function(prompts=["1 + 1?"], completions=["2"], **columns)
    line = str(error.value)
    assert REWARDS[text] in line and "\n" not in line, line
    assert "REWARD_FUNC" in line or "compute_score" in line or "own.py" in line


def test_there_are_a_hundred_of_them():
    assert len(VALUES) + len(REWARDS) >= 100
