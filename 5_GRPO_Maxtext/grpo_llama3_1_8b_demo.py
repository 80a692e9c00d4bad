"""GRPO on a language model: evaluate -> train -> evaluate, with MaxText, Tunix, Grain and Orbax.

One script, two sizes. `MODEL` is any Llama-architecture checkpoint in Hugging Face's layout: by default
the tiny Llama that lies beside this file (0.3 M parameters, laptop CPU), at full size
`meta-llama/Llama-3.1-8B-Instruct` on a TPU VM. Same code path; the constants below have two columns.

The objective (DeepSeekMath, arXiv 2402.03300, eq. 3), for G answers o_1..o_G to one question q:

    J = mean_i mean_t [ min(ratio_it * A_i, clip(ratio_it, 1 - eps, 1 + eps) * A_i) - beta * KL_it ]
    A_i = (R_i - mean(R_1..R_G)) / std(R_1..R_G)        ratio_it = pi(o_it | q, o_i<t) / pi_old(...)

What is *not* here, and why: no critic (the group's mean reward is the baseline: that is GRPO), no reward
model (the rewards are four functions in reward_func.py), no replay (samples are used once, NUM_ITERATIONS
1, so ratio = 1 and the clip never binds), no value of the prompt's tokens (only the answer is trained).

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py                   # tiny Llama, under 2 minutes on 2 cores
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py NUM_BATCHES=50 SEED=1
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py RUN_DIR=runs/mine     # again: goes on where it stopped
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DATASET=mine REWARD_FUNC=my_reward.py
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k
"""

import contextlib
import csv
import difflib
import errno
import functools
import itertools
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# XLA splits even the smallest matrix product over all cores; on a model this small the hand-over costs
# more than it saves, and one thread also makes a run repeatable bit for bit. TPUs ignore these flags.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # "PyTorch was not found": it is not needed

import absl.logging
import grain
import huggingface_hub
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
import transformers
from flax import nnx
from maxtext.checkpoint_conversion.utils import load_dynamic, param_mapping
from maxtext.configs import pyconfig
from maxtext.layers.embeddings import LLaMARotaryEmbedding
from maxtext.utils import globals as maxtext_globals
from maxtext.utils import model_creation_utils
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from scipy.stats import binomtest
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tqdm import tqdm
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import hooks
from yaml import YAMLError

sys.path.insert(0, str(HERE))  # so that the files beside this one import from anywhere
import health
import hosts
import lora
import loss_options
import monitor
import questions
import reward_func
import task_rewards
from rollout import MaxTextRollout

matplotlib.use("Agg")
import matplotlib.pyplot as plt


# %% Constants ------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    """A constant with two values; `configure` keeps the one that fits MODEL's size."""

    laptop: Any
    tpu: Any


MODEL = "tiny_llama"  # Hugging Face name or folder; "tiny_llama" lies beside this file
DATASET = "tiny_gsm8k"  # beside this file; "gsm8k"; a .json, .jsonl or .parquet file; a.jsonl:0.7,b.jsonl:0.3
TEST_DATASET = ""  # empty: the test split of DATASET; or files as in DATASET, without weights
BAD_ROWS = "refuse"  # rows that cannot be used stop the run; "skip": are left out. Both count and name them
REWARDS = ""  # names; empty: reward_func.py's four for GSM8K columns, else compute_score (task_rewards.py)
REWARD_FUNC = ""  # a Python file with a compute_score of your own, or with functions to be named in REWARDS
DATA_DIR = "~/tensorflow_datasets"  # where tensorflow-datasets keeps gsm8k
RUN_DIR = ""  # empty: runs/grpo_llama3_1_8b_demo/<time>; a folder with a checkpoint in it: go on from there
SEED = 0  # weights come from MODEL; the seed orders the questions and draws the answers
DRY_RUN = False  # True: check everything that can be checked, say what would happen, and stop

#                                     laptop column: MODEL's hidden size is below 1,024 (tiny Llama, CPU)
#                                     TPU column:    Llama 3.1 8B on a TPU VM

# --- the question, and what the model is asked to write
SYSTEM_PROMPT = (
    "You are given a problem. Think about it and write your reasoning between <reasoning> and "
    "</reasoning>. Then give the final answer, one number and nothing else, between <answer> and </answer>."
)
# With hard_format_reward or mark_reward in REWARDS it says <think> where it says <reasoning>.
# The tiny Llama learned its format from demonstrations and has never seen an instruction.
TEMPLATE = Pair("{question}", "{system_prompt}\n\n{question}")
MAX_PROMPT_LENGTH = Pair(28, 256)  # tokens, chat template included; longer questions are left out, and named
TOTAL_GENERATION_STEPS = Pair(28, 768)  # tokens an answer may take; what is longer is cut off

# --- sampling during training
TEMPERATURE = Pair(1.0, 0.9)  # 1: the policy itself. Too low and all G answers agree: nothing to learn from
TOP_P = 1.0  # 1: off. Cutting the tail here would train on another distribution than the one sampled
TOP_K = Pair(-1, 50)  # -1: off. 50 of 128,256 tokens cut only noise; the tiny Llama has 76

# --- GRPO
BATCH_SIZE = Pair(16, 2)  # prompts a step (the source: 1)
NUM_GENERATIONS = 8  # G, answers a prompt. With 2 (the source) most groups agree, and teach nothing
NUM_ITERATIONS = 1  # mu, optimizer updates a batch
BETA = 0.08  # weight of the KL to the frozen starting model; 0 loads no reference model at all
EPSILON = 0.2  # clip range of the ratio; idle while NUM_ITERATIONS is 1
EPSILON_HIGH = 0.0  # upper clip range, 0: as EPSILON. DAPO (arXiv 2503.14476): 0.28, room for rare tokens
LOSS_ALGO = "grpo"  # "gspo-token" (arXiv 2507.18071): one ratio a sequence, clipped at a smaller EPSILON
LOSS_AGG_MODE = "sequence-mean-token-mean"  # DAPO: token-mean; Dr. GRPO: seq-mean-token-sum-norm
ADVANTAGE = "group"  # R - mean of the group; "rloo" (arXiv 2402.14740): R - mean of the other G - 1
NORM_ADV_BY_STD = True  # of "group": divide by the group's std; False: Dr. GRPO (arXiv 2503.20783)
KL_LOSS_MODE = "low_var_kl"  # k3, as in the GRPO paper (eq. 4); "kl" is k1, "mse_kl" is k2
MASK_OVERLONG = False  # True: answers cut off at the limit are not trained on (DAPO); none may learn to stop
ZERO_VARIANCE_GROUPS = "keep"  # "skip": no loss, no KL; "refill": ask other questions instead (DAPO)
MAX_REFILLS = 4  # batches of other questions a step may ask; each costs a step's generation
TARGET_KL = 0.0  # BETA is steered, step by step, to keep the KL here (arXiv 1909.08593); 0: BETA stays
TEMPERATURE_END = 0.0  # TEMPERATURE goes there in a straight line, over all steps; 0: it stays
ADVANTAGE_CLIP = 0.0  # largest size of an advantage, 0: off. Bounds a lucky answer's pull, and a deserved one
LOGITS_CLIP = 0.0  # largest size of a logit, 0: off. Saves an overflow from NaN; what is clipped cannot learn
REFERENCE_OFFLOAD = False  # True: the frozen model waits in the host's memory; costs a transfer each step
NUM_BATCHES = Pair(200, 3_738)  # steps an epoch
NUM_EPOCHS = 1  # passes of NUM_BATCHES steps

# --- optimizer (AdamW, linear warm-up, cosine decay to 0)
LEARNING_RATE = Pair(1e-3, 3e-6)  # peak; 8 B parameters forgive far less than 0.3 M
B1 = 0.9  # Adam's memory of the gradient ...
B2 = 0.99  # ... and of its square
WEIGHT_DECAY = 0.1  # AdamW's
WARMUP_FRACTION = 0.1  # share of all steps
MAX_GRAD_NORM = Pair(1.0, 0.1)  # KL runs away: lower it; 0: off
MAX_NONFINITE_UPDATES = 0  # updates in a row with a NaN or infinite loss or gradient: skipped, not fatal
TRAIN_MICRO_BATCH_SIZE = 0  # prompts a gradient pass, accumulated: takes memory, too; 0: all at once

# --- LoRA (lora.py): train two small matrices beside each weight, of which the weight itself stays as it is
LORA_RANK = 0  # r of A [in, r] and B [r, out]; 0: train all weights
LORA_ALPHA = 16.0  # A B is added times LORA_ALPHA / LORA_RANK
LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # the weights that get one

# --- evaluation
EVAL_CONFIG = "standard"  # the sampled figures use this entry; the greedy figure always uses "greedy"
GENERATION_CONFIGS = {
    "greedy": dict(temperature=0.0, top_k=1, top_p=1.0),
    "standard": dict(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": dict(temperature=0.85, top_k=-1, top_p=1.0),
}
NUM_TEST_QUESTIONS = Pair(512, 1_319)  # from the top of the test set
NUM_PASSES = 1  # sampled answers a question; above 1 the report adds pass@k and majority@k

# --- checkpoints and logs (all under RUN_DIR)
SAVE_INTERVAL_STEPS = Pair(50, 500)  # steps between checkpoints
MAX_TO_KEEP = 4  # checkpoints kept
CHECKPOINT_DIR = ""  # empty: RUN_DIR; or a folder, or gs://bucket/folder (needs gcsfs), for RUN_DIR's name
PROFILE_DIR = ""  # empty: no trace; or a folder for a profiler trace, to look at in TensorBoard
PROFILE_STEPS = "3-4"  # steps to trace, "5" or "5-7"; the first ones compile

# --- model and devices
DTYPE = Pair("float32", "bfloat16")  # of activations
WEIGHT_DTYPE = "float32"  # of weights and Adam moments: an update of 3e-6 vanishes in bfloat16
SCAN_LAYERS = Pair(False, True)  # True compiles one layer instead of 32; False is faster when layers are few
REMAT_POLICY = Pair("none", "full")  # full: recompute activations in the backward pass, to save memory
ATTENTION = Pair("dot_product", "flash")
ROLLOUT_ENGINE = Pair("maxtext", "vllm")  # who generates: rollout.py, or vLLM (TPU packages needed)
TRAINER_DEVICES_FRACTION = 1.0  # vllm on several chips: the share that trains ...
SAMPLER_DEVICES_FRACTION = 1.0  # ... and the share that generates; 1.0 and 1.0: both on all chips
TRAINER_FSDP = -1  # chips among which weights, moments and sequences are split; -1: all that are left
TRAINER_TENSOR_PARALLEL = 1  # chips that share each matrix product of the trainer; -1: all that are left
SAMPLER_DATA_PARALLEL = 1  # copies of the model in vLLM (it has no FSDP); -1: as many as fit
SAMPLER_TENSOR_PARALLEL = -1  # chips that share each matrix product of a copy; -1: all that are left
DISTRIBUTED = False  # True: this command runs on several hosts, whose devices train as one (jax.distributed)
HBM_UTILIZATION_VLLM = 0.35  # share of a sampler chip's memory; what lies there already counts against it

DEFAULTS = {name: value for name, value in globals().items() if name.isupper() and name != "HERE"}
FREE_TO_CHANGE = {"RUN_DIR", "DRY_RUN", "PROFILE_DIR", "PROFILE_STEPS"}  # when a run is resumed


class UserError(Exception):
    """Something the person at the keyboard can mend: shown as one line, exit code 2."""


def is_small(model: str) -> bool:
    """Whether MODEL is a local folder with a hidden size below 1,024: the laptop column."""
    try:
        return json.loads((find_path(model) / "config.json").read_text())["hidden_size"] < 1024
    except (OSError, ValueError, KeyError):
        return False  # a hub name, or a folder whose fault `load_hf_config` will name


def find_path(name: str) -> Path:
    """A file or folder, looked for where the command runs, then beside this file."""
    return HERE / name if not Path(name).exists() and (HERE / name).exists() else Path(name)


def parse_overrides(arguments: list[str], defaults: dict[str, Any]) -> dict[str, Any]:
    """The constants that `NAME=value` arguments change.

    Args:
        arguments: such as ["NUM_BATCHES=50", "LEARNING_RATE=5e-4"].
        defaults: every constant by name; its value, or that of a `Pair`, gives the type.

    Raises:
        UserError: an unknown name (lists the nearest) or a value of the wrong type.
    """
    overrides = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name not in defaults or "=" not in argument or isinstance(defaults[name], dict):
            near = difflib.get_close_matches(name.upper(), defaults, n=3, cutoff=0.5)
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: "
                f"{', '.join(near) or 'none, see the top of the script'}"
            )
        kind = type(defaults[name].laptop if isinstance(defaults[name], Pair) else defaults[name])
        try:
            # 1e-3 -> 0.001, True -> bool
            value = text if kind is str else OmegaConf.from_cli([argument])[name]
            if kind is float and type(value) is int:
                value = float(value)
        except (YAMLError, OmegaConfBaseException, ValueError, OverflowError):  # "[", "${x}", 400 digits
            value = None
        if type(value) is not kind:
            raise UserError(f"{argument!r}: {name} is a {kind.__name__}, {text!r} is not")
        overrides[name] = value
    return overrides


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets this module's constants from `NAME=value` arguments and MODEL's size.

    Args:
        arguments: such as ["NUM_BATCHES=50", "LEARNING_RATE=5e-4"].

    Returns:
        Every constant by name, as the run will use it.

    Raises:
        UserError: an unknown name (lists the nearest), a value of the wrong type or out of range.
    """
    overrides = parse_overrides(arguments, DEFAULTS)
    column = "laptop" if is_small(overrides.get("MODEL", DEFAULTS["MODEL"])) else "tpu"
    constants = {
        name: getattr(value, column) if isinstance(value, Pair) else value for name, value in DEFAULTS.items()
    } | overrides
    globals().update(constants, default_rewards=task_rewards.COURSE_REWARDS)
    check_constants()
    return constants


def check_constants() -> None:
    """Refuses values that would fail later, or teach nothing without saying so.

    Raises:
        UserError: names the constant, its value and the remedy.
    """
    for name, low in {
        "MAX_PROMPT_LENGTH": 1, "TOTAL_GENERATION_STEPS": 2, "BATCH_SIZE": 1, "NUM_GENERATIONS": 2,
        "NUM_ITERATIONS": 1, "NUM_BATCHES": 1, "NUM_EPOCHS": 1, "NUM_TEST_QUESTIONS": 1, "NUM_PASSES": 1,
        "SAVE_INTERVAL_STEPS": 1, "MAX_TO_KEEP": 1, "TRAIN_MICRO_BATCH_SIZE": 0, "SEED": 0, "MAX_REFILLS": 1,
        "MAX_NONFINITE_UPDATES": 0, "LORA_RANK": 0,
        "TRAINER_FSDP": -1, "TRAINER_TENSOR_PARALLEL": -1,
        "SAMPLER_DATA_PARALLEL": -1, "SAMPLER_TENSOR_PARALLEL": -1,
    }.items():  # fmt: skip
        if globals()[name] < low:
            raise UserError(f"{name}={globals()[name]}: use {low} or more")
    if TEMPERATURE <= 0:
        raise UserError(f"TEMPERATURE={TEMPERATURE}: greedy answers are all alike; use a value above 0")
    if not 0 < TOP_P <= 1:
        raise UserError(f"TOP_P={TOP_P}: a probability mass, above 0 and at most 1 (1 switches it off)")
    if TOP_K != -1 and TOP_K < 1:
        raise UserError(f"TOP_K={TOP_K}: use 1 or more, or -1 to switch it off")
    if TRAIN_MICRO_BATCH_SIZE and BATCH_SIZE % TRAIN_MICRO_BATCH_SIZE:
        raise UserError(
            f"TRAIN_MICRO_BATCH_SIZE={TRAIN_MICRO_BATCH_SIZE}: must divide BATCH_SIZE={BATCH_SIZE}"
        )
    for name in (
        "BETA", "EPSILON", "EPSILON_HIGH", "TARGET_KL", "TEMPERATURE_END", "ADVANTAGE_CLIP", "LOGITS_CLIP",
        "LEARNING_RATE", "MAX_GRAD_NORM", "WEIGHT_DECAY", "WARMUP_FRACTION",
    ):  # fmt: skip
        if not 0 <= globals()[name] < math.inf:
            raise UserError(f"{name}={globals()[name]}: use a finite number, 0 or more")
    if WARMUP_FRACTION > 1:
        raise UserError(f"WARMUP_FRACTION={WARMUP_FRACTION}: a share of all steps, at most 1")
    for name in ("TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION", "HBM_UTILIZATION_VLLM"):
        if not 0 < globals()[name] <= 1:
            raise UserError(f"{name}={globals()[name]}: a share, above 0 and at most 1")
    if not 0 < LORA_ALPHA < math.inf:
        raise UserError(f"LORA_ALPHA={LORA_ALPHA}: use a finite number above 0")
    with as_user_error():
        lora.parse_targets(LORA_TARGETS)
    if LORA_RANK and REFERENCE_OFFLOAD:
        raise UserError(
            f"REFERENCE_OFFLOAD=True: with LORA_RANK={LORA_RANK} the reference is the base itself, with no "
            "second copy to move; set it to False"
        )
    if EVAL_CONFIG not in GENERATION_CONFIGS:
        raise UserError(f"EVAL_CONFIG={EVAL_CONFIG}: one of {', '.join(GENERATION_CONFIGS)}")
    for name, choices in {
        "LOSS_ALGO": loss_options.LOSS_ALGOS, "LOSS_AGG_MODE": loss_options.LOSS_AGG_MODES,
        "ADVANTAGE": loss_options.ADVANTAGES, "KL_LOSS_MODE": loss_options.KL_LOSS_MODES,
        "ZERO_VARIANCE_GROUPS": loss_options.ZERO_VARIANCE_GROUPS,
    }.items():  # fmt: skip
        if globals()[name] not in choices:
            raise UserError(f"{name}={globals()[name]}: one of {', '.join(choices)}")
    if 0 < EPSILON_HIGH < EPSILON:
        raise UserError(f"EPSILON_HIGH={EPSILON_HIGH}: below EPSILON={EPSILON}; raise it, or 0 for the same")
    for name in ("TARGET_KL", "REFERENCE_OFFLOAD"):
        if globals()[name] and not BETA:
            raise UserError(f"{name}={globals()[name]}: BETA=0 has no reference model; set BETA above 0")
    if ROLLOUT_ENGINE not in ("maxtext", "vllm"):
        raise UserError(f"ROLLOUT_ENGINE={ROLLOUT_ENGINE}: one of maxtext, vllm")
    if ROLLOUT_ENGINE == "vllm" and not SCAN_LAYERS:
        raise UserError(
            f"SCAN_LAYERS={SCAN_LAYERS}: with ROLLOUT_ENGINE=vllm it must be True; MaxText names only the "
            "stacked layers to vLLM, others would keep vLLM's random weights without a word"
        )
    length = MAX_PROMPT_LENGTH + TOTAL_GENERATION_STEPS
    if ATTENTION == "flash" and length > 512 and length % 512:
        raise UserError(
            f"TOTAL_GENERATION_STEPS={TOTAL_GENERATION_STEPS}: flash attention has blocks of 512 tokens, "
            f"with MAX_PROMPT_LENGTH={MAX_PROMPT_LENGTH} it is {length}; make the sum a multiple of 512, "
            "or set ATTENTION=dot_product"
        )
    if PROFILE_DIR:
        try:
            monitor.parse_steps(PROFILE_STEPS, num_steps())
        except ValueError as error:
            raise UserError(error) from None
    policies = ("none", "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj")
    if REMAT_POLICY not in policies:
        raise UserError(f"REMAT_POLICY={REMAT_POLICY}: one of {', '.join(policies)}")
    for name in ("MODEL", "DATASET", "TEST_DATASET", "REWARD_FUNC", "RUN_DIR"):
        if "gs://" in globals()[name]:
            raise UserError(
                f"{name}={globals()[name]}: must be a local path, copy it here with `gcloud storage cp -r`; "
                "only CHECKPOINT_DIR may lie in a bucket"
            )
    if BAD_ROWS not in ("refuse", "skip"):
        raise UserError(f"BAD_ROWS={BAD_ROWS}: one of refuse, skip")
    with as_user_error():
        for name, _ in questions.parse_sources(DATASET):
            if not TEST_DATASET and find_path(name).is_file():
                raise UserError(
                    f"TEST_DATASET is empty and DATASET={DATASET} is one file: the test would ask what was "
                    "trained on; give TEST_DATASET a file of other questions"
                )
        test_sources = questions.parse_sources(TEST_DATASET, "TEST_DATASET") if TEST_DATASET else []
    if any(weight != 1 for _, weight in test_sources):
        raise UserError(f"TEST_DATASET={TEST_DATASET}: every question is asked once; leave the weights out")
    form_rewards = {"hard_format_reward", "mark_reward"} & set(reward_names())
    if form_rewards and {"match_format_exactly", "match_format_approximately"} & set(reward_names()):
        raise UserError(
            f"REWARDS={REWARDS}: {min(form_rewards)} wants <think>, match_format_* want <reasoning>; "
            "choose one form"
        )


# %% Data: questions in, chat prompts out ---------------------------------------------------------------
@contextlib.contextmanager
def as_user_error():
    """The ready-made one-line messages of questions.py and task_rewards.py, as UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def read_questions(dataset: str, split: str) -> tuple[list[dict[str, str]], str]:
    """Reads questions and right answers; says how many rows cannot be used, and which.

    Args:
        dataset: sources as in DATASET: "gsm8k", a folder with `train.jsonl` and `test.jsonl` (or .json,
            .parquet), a file.
        split: "train" or "test"; ignored for a single file.

    Returns:
        Rows with `question`, `answer`, `data_source`, `extra_info`, `source` (the file), its `weight` and
        `line`, all texts, in turn one of each source; and where they came from.

    Raises:
        UserError: no such file, no rows, bad rows where BAD_ROWS is "refuse".
    """
    # A compute_score of one's own may want what the built-in one could not read.
    fault = (lambda *_: None) if REWARD_FUNC else task_rewards.ground_truth_fault
    constant = "TEST_DATASET" if split == "test" and TEST_DATASET else "DATASET"
    parts, names, bad, total = [], [], [], 0
    with as_user_error():
        for name, weight in questions.parse_sources(dataset, constant):
            rows, source = read_source(name, split, constant)
            if not rows:
                raise UserError(f"{constant}={dataset}: {source} has no rows; give at least one question")
            good, faulty = questions.to_questions(rows, source, fault)
            total += len(rows)
            bad += faulty
            parts.append([row | {"weight": str(weight)} for row in good])
            names.append(source)
    if bad:
        described = questions.describe_bad_rows(bad, total)
        if BAD_ROWS == "refuse":
            raise UserError(f"{constant}={dataset}: {described}. Mend them, or set BAD_ROWS=skip")
        print(f"{constant}={dataset}: {described}. Left out (BAD_ROWS=skip)")
    for name, part in zip(names, parts, strict=True):
        if not part:
            raise UserError(f"{constant}={dataset}: no row of {name} can be used; mend them")
    return questions.interleave(parts), ", ".join(names)


def read_source(name: str, split: str, constant: str) -> tuple[list[tuple[int, Any]], str]:
    """Numbered rows of one source of a DATASET, and where they came from."""
    if name == "gsm8k":
        rows, source = read_tfds_gsm8k(split)
        return list(enumerate(rows, start=1)), source
    path = find_path(name)
    if path.is_dir():
        files = [path / f"{split}.{kind}" for kind in ("jsonl", "json", "parquet")]
        path = next(filter(Path.exists, files), files[0])
    return questions.read_file(path, constant), str(path)


def read_tfds_gsm8k(split: str) -> tuple[list[dict[str, str]], str]:
    """GSM8K from tensorflow-datasets; the embedded tiny_gsm8k where it can be neither found nor fetched."""
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text.gsm8k

    builder = tfds.builder("gsm8k", data_dir=os.path.expanduser(DATA_DIR), file_format="array_record")
    if not builder.data_path.exists():
        try:
            # Probe first: tensorflow-datasets itself goes on trying for over 200 s without a network.
            huggingface_hub.get_session().head("https://raw.githubusercontent.com", timeout=5)
        except Exception:
            print("DATASET=gsm8k: no network and nothing prepared in DATA_DIR; using the embedded tiny_gsm8k")
            path = HERE / "tiny_gsm8k" / f"{split}.jsonl"
            return [row for _, row in questions.read_file(path)], str(path)
        builder.download_and_prepare()
    # values are bytes
    rows = [{k: v.decode() for k, v in row.items()} for row in builder.as_data_source(split)]
    return rows, f"tensorflow-datasets gsm8k ({split})"


def to_prompt(tokenizer, question: str) -> str:
    """The text the model is asked to continue: TEMPLATE inside the tokenizer's own chat template."""
    system_prompt = SYSTEM_PROMPT.replace("reasoning>", "think>") if think_tags() else SYSTEM_PROMPT
    content = TEMPLATE.format(system_prompt=system_prompt, question=question)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


def make_prompts(tokenizer, rows: list[dict[str, str]], source: str) -> list[dict[str, str]]:
    """Adds `prompts`, and leaves out what is longer than MAX_PROMPT_LENGTH tokens: counted and named.

    Raises:
        UserError: no question of a source is short enough.
    """
    kept, too_long = [], []
    for row in rows:
        prompt = to_prompt(tokenizer, row["question"])
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        if length <= MAX_PROMPT_LENGTH:
            kept.append({"prompts": prompt} | row)
        else:
            too_long.append((row["source"], int(row["line"]), length))
    if too_long:
        several = len({row["source"] for row in rows}) > 1
        named = ", ".join(f"{f'{file}, ' * several}row {line} ({n} tokens)" for file, line, n in too_long[:3])
        print(
            f"{source}: {len(too_long):,} of {len(rows):,} questions are longer than "
            f"MAX_PROMPT_LENGTH={MAX_PROMPT_LENGTH} and left out: {named}"
            + (f", ... (all in {RUN_DIR}/too_long.csv)" if len(too_long) > 3 else "")
        )
        with open(log_dir() / "too_long.csv", "a", newline="") as file:
            csv.writer(file).writerows(too_long)
    for name in {row["source"] for row in rows} - {row["source"] for row in kept}:
        raise too_short_error(name, min(n for file, _, n in too_long if file == name))
    return kept


def too_short_error(source: str, shortest: int) -> UserError:
    """For a MAX_PROMPT_LENGTH that leaves no question."""
    return UserError(
        f"MAX_PROMPT_LENGTH={MAX_PROMPT_LENGTH}: no question of {source} is that short; "
        f"the shortest takes {shortest} tokens, raise it"
    )


def mixed_questions(rows: list[dict[str, str]], seed: int) -> grain.MapDataset:
    """Batches of BATCH_SIZE prompts without end, the sources mixed by their weights.

    Each source is shuffled anew each time it has been used up. Grain deals out the sources evenly: after any
    number of prompts each has had its share, to within one prompt a source.
    """
    parts = {}
    for row in rows:
        parts.setdefault(row["source"], []).append(row)
    sources = [
        grain.MapDataset.source(part).shuffle(seed=seed + i).repeat() for i, part in enumerate(parts.values())
    ]
    weights = [float(part[0]["weight"]) for part in parts.values()]
    return grain.MapDataset.mix(sources, weights).batch(BATCH_SIZE)


def training_batches(rows: list[dict[str, str]], start_step: int) -> grain.MapDataset:
    """The batches from training step `start_step` on; how many rows there are does not matter."""
    return mixed_questions(rows, SEED)[start_step : num_steps()]


def refill_batch(rows: list[dict[str, str]], step: int, attempt: int) -> dict[str, np.ndarray]:
    """A batch of other questions for a step whose groups lacked a signal, the same after a resume."""
    return mixed_questions(rows, SEED + 1_000_003)[step * MAX_REFILLS + attempt]


def num_steps() -> int:
    """Training steps of the whole run: batches of BATCH_SIZE questions."""
    return NUM_BATCHES * NUM_EPOCHS


# %% Model: any Llama-architecture checkpoint into MaxText ----------------------------------------------
def load_hf_config(model: str, weights: bool = True) -> tuple[Path, transformers.LlamaConfig]:
    """Finds MODEL (a folder, or a name on the Hugging Face hub) and reads its `config.json`.

    Args:
        model: MODEL.
        weights: False leaves them on the hub, for a dry run.

    Raises:
        UserError: not found, not reachable, not a Llama, without weights, or with parts MaxText lacks.
    """
    folder = find_path(model)
    if not folder.is_dir():
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    model, allow_patterns=["*.json", "*.jinja"] + ["*.safetensors"] * weights
                )
            )
        except Exception as error:  # no network, no such name, no licence accepted: many types
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"MODEL={model}: neither a folder nor to be had from the Hugging Face hub ({reason}); "
                "give a folder, or accept the licence and set HF_TOKEN"
            ) from None
    if not (folder / "config.json").is_file():
        raise UserError(f"MODEL={model}: {folder} has no config.json; give a Hugging Face model folder")
    if weights and not list(folder.glob("*.safetensors")):
        raise UserError(f"MODEL={model}: {folder} has no *.safetensors weights; fetch them, or rebuild")
    hf = transformers.AutoConfig.from_pretrained(folder)
    rope_type = getattr(hf, "rope_parameters", {}).get("rope_type")
    if hf.model_type != "llama" or hf.attention_bias or hf.mlp_bias or hf.hidden_act != "silu":
        raise UserError(f"MODEL={model}: not a plain Llama ({hf.model_type}); biases are not supported")
    if rope_type not in ("default", "llama3"):
        raise UserError(f"MODEL={model}: rope type {rope_type!r} is not supported; default or llama3 is")
    return folder, hf


def load_tokenizer(folder: Path):
    """The model's tokenizer, with a padding token that is not its end-of-sequence token.

    Padding is masked out of the loss. Were the two the same, so would be the end of every answer, and
    the model would never learn to stop.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        spare = "<|finetune_right_pad_id|>"  # Llama 3.1 reserves this one for the purpose
        if spare not in tokenizer.get_vocab():
            raise UserError(f"MODEL={MODEL}: its tokenizer has no pad token of its own; add one")
        tokenizer.pad_token = spare
    if tokenizer.chat_template is None:
        raise UserError(f"MODEL={MODEL}: its tokenizer has no chat template; take an instruct model")
    return tokenizer


def to_maxtext_config(
    hf: transformers.LlamaConfig, rows: int, prompt_tokens: int, new_tokens: int, **machine: Any
):
    """The MaxText config of a Llama with the sizes of `config.json`.

    Args:
        hf: the checkpoint's config.
        rows: sequences in one forward pass, over all devices.
        prompt_tokens: P, the prompt's half of the KV cache.
        new_tokens: T, the answer's half.
        machine: MaxText settings for another machine than this one (tpu_fit_check.py compiles for a TPU).
    """
    rope = hf.rope_parameters
    set_rope_scaling(rope)
    settings = dict(
        model_name="llama3.1-8b",  # names the architecture (and its weight mapping); the sizes follow
        override_model_config=True,
        base_num_decoder_layers=hf.num_hidden_layers,
        base_emb_dim=hf.hidden_size,
        base_mlp_dim=hf.intermediate_size,
        base_num_query_heads=hf.num_attention_heads,
        base_num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        vocab_size=hf.vocab_size,
        normalization_layer_epsilon=hf.rms_norm_eps,
        rope_max_timescale=int(rope["rope_theta"]),
        rope_use_scale=rope["rope_type"] == "llama3",
        logits_via_embedding=hf.tie_word_embeddings,  # MaxText then computes the output layer in bfloat16
        normalize_embedding_logits=False,  # MaxText would divide tied logits by sqrt(emb_dim); Llama does not
        per_device_batch_size=rows / jax.device_count(),
        max_prefill_predict_length=prompt_tokens,
        max_target_length=prompt_tokens + new_tokens,
        dtype=DTYPE,
        weight_dtype=WEIGHT_DTYPE,
        matmul_precision="highest" if DTYPE == "float32" else "default",
        attention=ATTENTION,
        scan_layers=SCAN_LAYERS,
        remat_policy=REMAT_POLICY,
        ici_fsdp_parallelism=TRAINER_FSDP,
        ici_tensor_parallelism=TRAINER_TENSOR_PARALLEL,
        hardware=jax.default_backend() if jax.default_backend() in ("cpu", "gpu") else "tpu",
        skip_jax_distributed_system=True,
        enable_checkpointing=False,  # Tunix and Orbax save, not MaxText
        convert_checkpoint_if_possible=False,
        log_config=False,
        jax_cache_dir="",  # or MaxText keeps compiled programs in the home directory
        run_name="grpo",
        base_output_directory="runs",
    )
    try:
        return pyconfig.initialize(
            ["", os.path.join(maxtext_globals.MAXTEXT_CONFIGS_DIR, "base.yml")], **settings | machine
        )
    except ValueError as error:  # MaxText's own list of what it takes, pages long
        reason = str(error).splitlines()[-1].strip()
        raise UserError(
            f"DTYPE={DTYPE}, WEIGHT_DTYPE={WEIGHT_DTYPE}, ATTENTION={ATTENTION}: MaxText refuses one "
            f"of these ({reason}); see its base.yml"
        ) from None


def set_rope_scaling(rope: dict[str, Any]) -> None:
    """Gives MaxText the checkpoint's rope scaling, where it has Llama 3.1's four numbers built in.

    The formula (Llama 3.1's): wavelengths above `original / low_freq_factor` are stretched by `factor`,
    those below `original / high_freq_factor` are kept, those between are interpolated.
    """
    if rope["rope_type"] != "llama3":
        return
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]

    def scale(self, frequency):
        smooth = (original * frequency / (2 * jnp.pi) - low) / (high - low)
        smooth = jnp.clip(smooth, 0.0, 1.0)  # 0: stretched by `factor`, 1: kept
        return ((1 - smooth) / rope["factor"] + smooth) * frequency

    LLaMARotaryEmbedding._apply_scaling_factor = scale


def weight_mapping(hf: transformers.LlamaConfig, config, saving_to_hf: bool):
    """MaxText's own name map and layout hooks between its Llama and Hugging Face's, for these sizes."""
    sizes = {"num_hidden_layers": hf.num_hidden_layers, "head_dim": hf.head_dim}
    names = param_mapping.PARAM_MAPPING["llama3.1-8b"](sizes, config, scan_layers=config.scan_layers)
    layout_hooks = param_mapping.HOOK_FNS["llama3.1-8b"](
        sizes, config, scan_layers=config.scan_layers, saving_to_hf=saving_to_hf
    )
    if hf.tie_word_embeddings:
        names.pop("params-decoder-logits_dense-kernel")
    if not saving_to_hf:
        # MaxText divides the query weights by sqrt(head_dim) in the checkpoint's own type: in bfloat16
        # that rounds each of them by up to 0.4 %, before a single step is trained.
        for name, chain in layout_hooks.items():
            if "query" in name:
                layout_hooks[name] = [lambda weight, shape: weight.astype(np.float32), *chain]
    return names, layout_hooks


def load_llama(folder: Path, hf: transformers.LlamaConfig, config, pad_id: int, devices=None):
    """Builds the MaxText model under Tunix's adapter and fills it with the checkpoint's weights.

    Args:
        folder: holds `*.safetensors`.
        hf: its config.
        config: from `to_maxtext_config`.
        pad_id: padding token id; the adapter masks it.
        devices: None for all.

    Returns:
        The adapter, called with tokens [B, L], positions [B, L], None and a mask [B, L, L] or None, gives
        logits [B, L, V] and None; and its mesh.

    Raises:
        UserError: weights that are missing, left over or of another shape.
    """
    adapter, mesh = model_creation_utils.from_pretrained(
        config,
        devices=devices,
        wrap_with_tunix_adapter=True,
        tokenizer_pad_id=pad_id,
        rng_key=jax.random.PRNGKey(0),
    )
    names, layout_hooks = weight_mapping(hf, config, saving_to_hf=False)
    params = nnx.state(adapter.base, nnx.Param)
    target = nnx.to_pure_dict(params)
    with mesh:
        checkpoint = load_dynamic.load_sharded_hf_state(str(folder))
        wanted = {name for value in names.values() for name in np.atleast_1d(value)}
        if hf.tie_word_embeddings:
            checkpoint.pop("lm_head.weight", None)  # the same numbers once more
        if wanted != set(checkpoint):
            odd = sorted(wanted ^ set(checkpoint))[0]
            fault = "lacks" if odd in wanted else "has the unknown"
            raise UserError(f"MODEL={MODEL}: {folder} {fault} weight {odd}; is config.json of this model?")
        loaded = load_dynamic.transform_hf_state_to_mt_state(checkpoint, target, names, layout_hooks, config)[
            "params"
        ]

    def fit(path, old, new):
        if old.shape != new.shape or new is old:  # `new is old`: MaxText left its random weight in place
            raise UserError(f"MODEL={MODEL}: weight {jax.tree_util.keystr(path)} is not in {folder}")
        return jax.device_put(new.astype(old.dtype), old.sharding)

    nnx.update(adapter.base, jax.tree_util.tree_map_with_path(fit, target, loaded))
    return adapter, mesh


def copy_of(adapter):
    """A second model with the same weights in memory of its own: the frozen reference."""
    graphdef, state = nnx.split(adapter)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


# %% Rewards: which ones, and what counts as right ------------------------------------------------------
default_rewards = task_rewards.COURSE_REWARDS  # where REWARDS is empty, until `choose_rewards` saw the data


def reward_names() -> list[str]:
    """Names of the rewards of this run."""
    return [name.strip() for name in REWARDS.split(",")] if REWARDS else list(default_rewards)


def reward_functions() -> list[Callable[..., list[float]]]:
    """The functions behind `reward_names`, in Tunix's form: f(prompts, completions, **columns) -> floats.

    Raises:
        UserError: no such function, or a REWARD_FUNC that does not run.
    """
    path = find_path(REWARD_FUNC).resolve() if REWARD_FUNC else None
    with as_user_error():
        return [task_rewards.find_reward(name, path) for name in reward_names()]


def think_tags() -> bool:
    """Whether the rewards want <think> where the course writes <reasoning>."""
    return bool({"hard_format_reward", "mark_reward"} & set(reward_names()))


def choose_rewards(*data: list[dict[str, str]]) -> list[str]:
    """Chooses the rewards where REWARDS is empty, and checks that they can grade the questions.

    Args:
        data: training questions and test questions, from `read_questions`.

    Returns:
        Their names.

    Raises:
        UserError: an unknown `data_source` (lists the known), an answer that a reward cannot grade, no such
            reward, a REWARD_FUNC that does not run.
    """
    global default_rewards
    rows = [row for part in data for row in part]
    if REWARD_FUNC or any(row["data_source"] != "gsm8k" for row in rows):
        default_rewards = ("compute_score",)
    functions = reward_functions()
    by_task = task_rewards.by_row(task_rewards.compute_score) in functions
    by_number = reward_func.check_answer in functions or reward_func.check_numbers in functions
    for row in rows:
        place = f"{row['source']}, row {row['line']}"
        if by_task and row["data_source"] not in task_rewards.GRADERS:
            raise UserError(f"{place}: {task_rewards.unknown_data_source(row['data_source'])}")
        if by_number and reward_func.parse_number(row["answer"]) is None:
            raise UserError(
                f"REWARDS={REWARDS}: check_answer and check_numbers grade numbers, the answer in {place} is "
                f"{row['answer']!r:.40}; leave REWARDS empty, then compute_score grades by data_source"
            )
    return reward_names()


def guarded(reward_fn):
    """The reward function, with its faults turned into one clear line (Tunix would let NaN pass as 0)."""

    @functools.wraps(reward_fn)
    def checked(prompts, completions, **columns):
        name = f"reward function {reward_fn.__name__}"
        try:
            rewards = reward_fn(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            raise UserError(f"{name} raised {type(error).__name__}: {error}; mend it") from error
        if np.shape(rewards) != (len(completions),):
            raise UserError(
                f"{name} returned shape {np.shape(rewards)} for {len(completions)} completions; "
                "return one number for each"
            )
        bad = np.flatnonzero(~np.isfinite(np.asarray(rewards, float)))
        if bad.size:
            raise UserError(
                f"{name} returned {rewards[bad[0]]} for completion {completions[bad[0]]!r}; "
                "return a finite number"
            )
        return rewards

    return checked


def score_answers(completions, answer, data_source, extra_info, **columns) -> np.ndarray:
    """One score for each completion, float [N]; 1 or more counts as right.

    That of compute_score where it is among the rewards; else 1 for exactly the right number in the answer
    tags, and 0 for anything else.
    """
    for name, function in zip(reward_names(), reward_functions()):
        if name == "compute_score":
            columns = dict(answer=answer, data_source=data_source, extra_info=extra_info)
            return np.array(guarded(function)(prompts=None, completions=completions, **columns))
    pairs = zip(completions, answer, strict=True)
    return np.array([float(reward_func.grade(completion, gold)) for completion, gold in pairs])


def format_right(completion: str) -> bool:
    """Whether the completion has the form that the prompt asks for."""
    return reward_func.format_ok(completion, task_rewards.THINK_TAGS if think_tags() else reward_func.TAGS)


# %% Evaluation: the same questions before and after ----------------------------------------------------
def generation_config(name: str) -> dict[str, Any]:
    """Arguments of Tunix's `RolloutConfig` for an entry of GENERATION_CONFIGS, or "train"."""
    train = dict(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
    sampling = train if name == "train" else GENERATION_CONFIGS[name]
    return sampling | dict(
        max_prompt_length=MAX_PROMPT_LENGTH,
        max_tokens_to_generate=TOTAL_GENERATION_STEPS,
        kv_cache_size=MAX_PROMPT_LENGTH + TOTAL_GENERATION_STEPS,
    )


def evaluate(rollout, rows: list[dict[str, str]], config_name: str, num_passes: int = 1) -> dict[str, Any]:
    """Asks every question and grades the answers.

    Args:
        rollout: any Tunix rollout engine.
        rows: from `make_prompts`.
        config_name: entry of GENERATION_CONFIGS.
        num_passes: answers K to each question Q.

    Returns:
        Shares `answer_accuracy`, `partial_accuracy` (within 10 %), `format_accuracy`, `cut_off`; means
        `completion_length` (tokens) and, where compute_score grades, `mean_score`; with K > 1 also
        `pass_at_k`, `majority_at_k`; lists `correct` [Q] (first pass) and `completions` [Q]; where there are
        several, `by_data_source`: `questions`, `answer_accuracy`, `format_accuracy` of each.
    """
    prompts = [row["prompts"] for row in rows for _ in range(num_passes)]
    asked = [row for row in rows for _ in range(num_passes)]
    columns = {name: [row[name] for row in asked] for name in ("answer", "data_source", "extra_info")}
    # vLLM makes up its batches itself
    chunk = len(prompts) if ROLLOUT_ENGINE == "vllm" else BATCH_SIZE * NUM_GENERATIONS
    texts, lengths = [], []
    for start in tqdm(
        range(0, len(prompts), chunk), desc=f"evaluate, {config_name}", disable=not hosts.is_first()
    ):
        # The same noise before and after training: what differs is the model.
        seed = jax.random.fold_in(jax.random.key(SEED + 1), start) if ROLLOUT_ENGINE == "maxtext" else None
        config = RolloutConfig(**generation_config(config_name), seed=seed)
        output = rollout.generate(prompts[start : start + chunk], config)
        texts += output.text
        lengths += [len(tokens) for tokens in output.tokens]

    scores = score_answers(texts, **columns)
    correct = scores >= 1
    close = np.array([reward_func.is_close(t, r["answer"], 0.1) for t, r in zip(texts, asked, strict=True)])
    formed = np.array([format_right(t) for t in texts])
    result = {
        "questions": len(rows),
        "answer_accuracy": float(correct.mean()),
        "partial_accuracy": float(close.mean()),
        "format_accuracy": float(formed.mean()),
        "completion_length": float(np.mean(lengths)),
        "cut_off": float(np.mean(np.array(lengths) >= TOTAL_GENERATION_STEPS)),
        "correct": correct[::num_passes].tolist(),
        "completions": texts[::num_passes],
    }
    if "compute_score" in reward_names():
        result["mean_score"] = float(scores.mean())
    names = sorted(set(columns["data_source"]))
    if len(names) > 1:
        masks = {name: np.array([row["data_source"] == name for row in asked]) for name in names}
        result["by_data_source"] = {
            name: {
                "questions": int(mask.sum()) // num_passes,
                "answer_accuracy": float(correct[mask].mean()),
                "format_accuracy": float(formed[mask].mean()),
            }
            for name, mask in masks.items()
        }
    if num_passes > 1:
        by_question = correct.reshape(-1, num_passes)  # [Q, K]
        result["pass_at_k"] = float(by_question.any(axis=1).mean())
        votes = [i + majority(texts[i : i + num_passes]) for i in range(0, len(texts), num_passes)]
        result["majority_at_k"] = float(correct[votes].mean())
    return result


def votes(completions: list[str]) -> list[Any]:
    """What each completion answers, None for nothing: a number; where compute_score grades, also a text."""
    numbers = [reward_func.parse_number(reward_func.extract_answer(c) or "") for c in completions]
    if "compute_score" not in reward_names():
        return numbers
    texts = [task_rewards.normalize_text(task_rewards.final_answer(c)) or None for c in completions]
    return [text if number is None else number for number, text in zip(numbers, texts, strict=True)]


def majority(completions: list[str]) -> int:
    """Index of the first completion that gives the most frequent answer; 0 if none gives one."""
    cast = votes(completions)
    given = [vote for vote in cast if vote is not None]
    return cast.index(max(given, key=given.count)) if given else 0


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % Wilson interval of a share seen in n questions."""
    interval = binomtest(round(share * n), n).proportion_ci(0.95, method="wilson")
    return interval.low, interval.high


# %% Training -------------------------------------------------------------------------------------------
def group_metrics(prompts, completions, advantages, rewards, **columns):
    """What to watch besides the loss; Tunix averages and logs it.

    `zero_variance`: share of groups whose G rewards are all equal. They have no better and no worse
    answer, hence advantage 0 and no gradient: their generation was paid for nothing. `distinct`: different
    answers in a group, 1 to G; it tells whether such answers were all alike.
    """
    groups = np.asarray(rewards).reshape(-1, NUM_GENERATIONS)  # [B, G]
    distinct = [len(set(group)) for group in np.reshape(completions, groups.shape)]
    return {
        "groups/zero_variance": (np.mean(np.ptp(groups, axis=1) == 0), np.mean),
        "groups/reward_std": (np.mean(groups.std(axis=1)), np.mean),
        "groups/distinct": (np.mean(distinct), np.mean),
        "answers/correct": (np.mean(score_answers(completions, **columns) >= 1), np.mean),
        "answers/format_ok": (np.mean([format_right(c) for c in completions]), np.mean),
    }


class TrainingLog(hooks.TrainingHooks):
    """Progress bar, one CSV row a step, health lines, and the guard against a loss that is not a number."""

    # Then, in the order in which they turn up: `reward_<function>`, `memory_...`.
    COLUMNS = ("step", "reward", "reward_std", "correct", "format_ok", "zero_variance", "length",
               "kl", "entropy", "clip_fraction", "loss", "grad_norm", "seconds",
               "distinct", "cut_off", "tokens_per_second", "beta", "temperature")  # fmt: skip

    def __init__(self, path: Path, first_step: int, reward_names: list[str]):
        """Goes on with the log in `path` after `first_step` steps; rows of steps that were lost are dropped.

        Each row is written at once. SIGKILL can cost the row of the last step (it is written a step later).
        """
        self.rows = {int(row["step"]): row for row in health.read_log(path) if row["step"] <= first_step}
        self._reward_names = reward_names
        self._path, self._file, self._columns = path, None, list(self.COLUMNS)
        self._rewrite()
        self._unhealthy: dict[str, str] = {}
        self._started = time.perf_counter()
        self._progress = tqdm(
            total=num_steps(), initial=first_step, desc="GRPO", unit="step", disable=not hosts.is_first()
        )
        self._nonfinite = 0  # updates in a row

    def _rewrite(self) -> None:
        """The whole file anew, with a column for everything that has been logged so far."""
        if self._file:
            self._file.close()
        rows = self.finished_rows()
        self._columns = list(dict.fromkeys(itertools.chain(self._columns, *rows)))
        partial = self._path.with_suffix(".partial")
        self._file = open(partial, "w", newline="", buffering=1)  # noqa: SIM115  (closed by `close`)
        self._writer = csv.DictWriter(self._file, self._columns, restval="nan")
        self._writer.writeheader()
        self._writer.writerows(rows)
        partial.rename(self._path)  # the open file goes with it

    def finished_rows(self) -> list[dict[str, float]]:
        """Rows of the steps whose update is done, in their order."""
        return [self.rows[step] for step in sorted(self.rows) if "step" in self.rows[step]]

    def on_rollout_metrics(self, buffer) -> None:
        """Takes what Tunix logged about a step's answers; it reports `global_steps` from 0."""
        mean = {name: float(np.mean(values)) for name, (values, op) in buffer.metrics.items() if op}
        if "rewards/score/mean" not in mean:
            return  # Tunix's last buffer, after the last step, holds no answers
        now = time.perf_counter()
        answers = np.size(buffer.metrics["rewards/sum"][0])
        self.rows.setdefault(buffer.global_steps + 1, {}).update(
            reward=mean["rewards/score/mean"],
            reward_std=mean["groups/reward_std"],
            correct=mean["answers/correct"],
            format_ok=mean["answers/format_ok"],
            zero_variance=mean["groups/zero_variance"],
            length=mean["completions/mean_length"],
            seconds=now - self._started,
            distinct=mean["groups/distinct"],
            cut_off=mean["completions/cut_off"],
            tokens_per_second=answers * mean["completions/mean_length"] / (now - self._started),
            beta=mean["schedule/beta"],
            temperature=mean["schedule/temperature"],
            **{f"reward_{name}": mean[f"rewards/{name}"] for name in self._reward_names},
            **monitor.memory_gib(),
        )
        self._started = now

    def on_train_step_end(self, trainer, train_step: int, train_loss: float) -> None:
        """Called once for each optimizer update, one update late (Tunix overlaps logging with work)."""

        def last(name):
            return float(trainer.metrics_logger.get_metric_history("actor", name, "train")[-1])

        # Both: a loss can be finite while its gradient is not, and every update is skipped in silence.
        figures = {"loss": float(train_loss), "gradient norm": last("grad_norm")}
        bad = {name: value for name, value in figures.items() if not np.isfinite(value)}
        self._nonfinite = self._nonfinite + 1 if bad else 0
        if self._nonfinite > MAX_NONFINITE_UPDATES:
            name, value = next(iter(bad.items()))
            raise UserError(
                f"the {name} of update {train_step} is {value}; that update was not applied, and no "
                f"checkpoint holds it. Lower LEARNING_RATE={LEARNING_RATE} or MAX_GRAD_NORM={MAX_GRAD_NORM}, "
                f"and start a new run, or let some pass (MAX_NONFINITE_UPDATES={MAX_NONFINITE_UPDATES})"
            )
        if train_step % NUM_ITERATIONS:
            return
        step = train_step // NUM_ITERATIONS

        row = self.rows.setdefault(step, {})
        row.update(
            step=step, loss=float(train_loss), kl=last("kl"), entropy=last("entropy"),
            clip_fraction=last("pg_clipfrac"), grad_norm=last("grad_norm"),
        )  # fmt: skip
        if row.keys() <= set(self._columns):
            self._writer.writerow(row)
        else:
            self._rewrite()
        for name, value in row.items():  # Tunix gives TensorBoard the others
            if name.startswith(("seconds", "tokens", "memory")):
                trainer.metrics_logger.log("system", name, value, "train", step)
        self._say_what_is_wrong()
        shown = {k: f"{row[k]:.2f}" for k in ("reward", "correct", "format_ok", "kl") if k in row}
        self._progress.set_postfix(shown, refresh=False)
        self._progress.update()

    def _say_what_is_wrong(self) -> None:
        """Prints each health line when it begins to hold."""
        rows = self.finished_rows()
        found = health.check(rows, globals())
        for kind in found.keys() - self._unhealthy.keys():
            tqdm.write(f"health   step {rows[-1]['step']:.0f}: {found[kind]}")
        self._unhealthy = found

    def close(self) -> list[dict[str, float]]:
        """Closes the file and the progress bar; returns the rows."""
        self._progress.close()
        self._file.close()
        return self.finished_rows()

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...


@contextlib.contextmanager
def tensorboard_log(folder: Path):
    """Writes every scalar that Tunix reports to `folder`, while the block runs.

    Not with Tunix's own writer: that is a thread, which a full disk ends without a word, and a dozen scalars
    later the training waits for it for ever. Here the disk's error reaches the thread that trains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    events = EventsWriter(str(folder / "events"))
    flushed = time.monotonic()

    def write(name: str, value: float, step: int | None = None, **columns) -> None:
        nonlocal flushed
        if step is None:
            return  # jax reports figures of its own
        scalar = summary.scalar(name, np.asarray(value))
        events.write_event(Event(step=int(step), wall_time=time.time(), summary=scalar))
        if time.monotonic() > flushed + 10:
            events.flush()
            flushed = time.monotonic()

    jax.monitoring.register_scalar_listener(write)
    try:
        yield
    finally:
        jax.monitoring.unregister_scalar_listener(write)
        events.close()


def make_optimizer() -> optax.GradientTransformation:
    """AdamW behind a gradient-norm clip; an update that is not finite is skipped, not applied."""
    updates = num_steps() * NUM_ITERATIONS
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=LEARNING_RATE, warmup_steps=int(WARMUP_FRACTION * updates),
        decay_steps=updates,
    )  # fmt: skip
    adamw = optax.adamw(schedule, b1=B1, b2=B2, weight_decay=WEIGHT_DECAY)
    transform = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), adamw) if MAX_GRAD_NORM else adamw
    # One NaN would otherwise sit in every weight, and in the next checkpoint; `TrainingLog` stops the run.
    return optax.apply_if_finite(transform, max_consecutive_errors=MAX_NONFINITE_UPDATES + 1_000)


def check_rollout_engine() -> None:
    """Raises UserError if ROLLOUT_ENGINE asks for vLLM, and it is not installed."""
    if ROLLOUT_ENGINE == "vllm":
        try:
            import vllm  # noqa: F401
        except ImportError:
            raise UserError(
                "ROLLOUT_ENGINE=vllm: the package vllm is not installed; install the TPU packages "
                "(requirements-tpu.txt), or set ROLLOUT_ENGINE=maxtext"
            ) from None


def join_hosts() -> None:
    """Joins the other hosts, if there are any.

    Under Pathways one process drives the chips of all hosts; with DISTRIBUTED each host runs a process.

    Raises:
        UserError: the others are not found; or vLLM on several hosts without Pathways.
    """
    if "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        import pathwaysutils  # before the first look at a device

        pathwaysutils.initialize()
    if DISTRIBUTED:
        try:
            hosts.join()
        except ValueError as error:
            raise UserError(error) from None
    if ROLLOUT_ENGINE == "vllm" and jax.process_count() > 1:
        raise UserError(
            f"ROLLOUT_ENGINE=vllm: {jax.process_count()} hosts run this script, and vLLM's engine lives in "
            "one; use a TPU VM of one host (v5p-8, v6e-8), Pathways (JAX_PLATFORMS=proxy), or "
            "ROLLOUT_ENGINE=maxtext"
        )


def log_dir() -> Path:
    """Where this process writes: RUN_DIR; on the second, third, ... host a folder of its own in it."""
    return Path(RUN_DIR) if hosts.is_first() else Path(RUN_DIR) / f"host_{jax.process_index()}"


def checkpoint_root() -> str:
    """Where checkpoints go: under RUN_DIR, or under its name in CHECKPOINT_DIR."""
    if CHECKPOINT_DIR.startswith("gs://"):
        return f"{CHECKPOINT_DIR.rstrip('/')}/{Path(RUN_DIR).name}"
    if CHECKPOINT_DIR:
        return str(Path(CHECKPOINT_DIR).resolve() / Path(RUN_DIR).name)
    return str(Path(RUN_DIR).resolve() / "checkpoints")


def make_training_config() -> rl_cluster_lib.RLTrainingConfig:
    """Optimizer, batch sizes, checkpoints and logs, as Tunix's trainer takes them."""
    return rl_cluster_lib.RLTrainingConfig(
        actor_optimizer=make_optimizer(),
        max_steps=num_steps() * NUM_ITERATIONS,  # Tunix counts optimizer updates
        eval_every_n_steps=num_steps() * NUM_ITERATIONS,  # never: `evaluate` does it
        mini_batch_size=BATCH_SIZE,
        # None, not BATCH_SIZE: one part would still cost the accumulation's copy of the weights
        train_micro_batch_size=TRAIN_MICRO_BATCH_SIZE or None,
        rollout_micro_batch_size=BATCH_SIZE,
        compute_logps_micro_batch_size=TRAIN_MICRO_BATCH_SIZE or BATCH_SIZE,
        checkpoint_root_directory=checkpoint_root(),
        checkpointing_options=ocp.CheckpointManagerOptions(
            # Not `save_interval_steps`: that also saves after the very first update, which with
            # NUM_ITERATIONS > 1 lies in the middle of a step, where no run can be resumed.
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(
                SAVE_INTERVAL_STEPS * NUM_ITERATIONS
            ),
            max_to_keep=MAX_TO_KEEP,
        ),
        data_sharding_axis=("fsdp",),
    )


def split_devices(devices: list) -> tuple[list, list]:
    """Devices that train and devices that generate.

    With vLLM the first TRAINER_DEVICES_FRACTION train and the last SAMPLER_DEVICES_FRACTION generate. Both
    are all of them with rollout.py (it decodes with the trainer's own weights), on a single device, and with
    two fractions of 1.0.

    Raises:
        UserError: a fraction that is no whole number of devices, or shares that overlap only in part.
    """
    if ROLLOUT_ENGINE != "vllm" or len(devices) == 1:
        return devices, devices
    counts = []
    for name in ("TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION"):
        count = globals()[name] * len(devices)
        if not math.isclose(count, round(count), abs_tol=1e-6):
            raise UserError(
                f"{name}={globals()[name]}: of {len(devices)} devices that is {count:.4g}; use a multiple of "
                f"1/{len(devices)}"
            )
        counts.append(round(count))
    if sum(counts) > len(devices) and counts != [len(devices)] * 2:
        raise UserError(
            f"TRAINER_DEVICES_FRACTION={TRAINER_DEVICES_FRACTION} and "
            f"SAMPLER_DEVICES_FRACTION={SAMPLER_DEVICES_FRACTION} add up to more than 1; "
            "lower one, or set both to 1.0 to share all devices"
        )
    return devices[: counts[0]], devices[len(devices) - counts[1] :]


def fill_parallelism(num_devices: int, names: tuple[str, str]) -> tuple[int, int]:
    """Two parallelism constants whose product is the number of devices; one of them may be -1, the rest.

    Raises:
        UserError: they do not divide the devices.
    """
    sizes = [globals()[name] for name in names]
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = num_devices // -math.prod(sizes)
    if -1 in sizes or math.prod(sizes) != num_devices:
        given = " and ".join(f"{name}={globals()[name]}" for name in names)
        raise UserError(
            f"{given}: their product must be the number of devices they share, {num_devices}; "
            "set one of them to -1"
        )
    return sizes[0], sizes[1]


def plan_devices(hf: transformers.LlamaConfig, devices: list) -> tuple[list, jax.sharding.Mesh | None]:
    """Who trains where and who generates where.

    Args:
        hf: the checkpoint's config; its heads have to be split among the chips, too.
        devices: all of them.

    Returns:
        The devices of actor and reference, and vLLM's mesh ("data", "model"), None with rollout.py.

    Raises:
        UserError: the fractions, the parallelism, the heads or the sequences do not divide.
    """
    trainer, sampler = split_devices(devices)
    names = ("TRAINER_FSDP", "TRAINER_TENSOR_PARALLEL")
    fsdp, trainer_tensor = fill_parallelism(len(trainer), names)
    if hf.num_key_value_heads % trainer_tensor:
        raise UserError(
            f"TRAINER_TENSOR_PARALLEL={trainer_tensor}: must divide the {hf.num_key_value_heads} key/value "
            "heads of MODEL"
        )
    sequences = (TRAIN_MICRO_BATCH_SIZE or BATCH_SIZE) * NUM_GENERATIONS
    if sequences % fsdp:
        raise UserError(
            f"TRAINER_FSDP={fsdp}: must divide the {sequences} sequences of a gradient pass, "
            f"(TRAIN_MICRO_BATCH_SIZE={TRAIN_MICRO_BATCH_SIZE} or BATCH_SIZE={BATCH_SIZE}) x "
            f"NUM_GENERATIONS={NUM_GENERATIONS}; change one of them"
        )
    if ROLLOUT_ENGINE != "vllm":
        return trainer, None
    names = ("SAMPLER_DATA_PARALLEL", "SAMPLER_TENSOR_PARALLEL")
    data, tensor = fill_parallelism(len(sampler), names)
    kv = hf.num_key_value_heads
    if hf.num_attention_heads % tensor or (kv % tensor and tensor % kv):  # vLLM repeats too few kv heads
        raise UserError(
            f"SAMPLER_TENSOR_PARALLEL={tensor}: must divide the {hf.num_attention_heads} heads of MODEL, and "
            f"divide its {kv} key/value heads or be a multiple of them; set SAMPLER_DATA_PARALLEL=-1 and a "
            "smaller SAMPLER_TENSOR_PARALLEL"
        )
    return trainer, jax.sharding.Mesh(np.array(sampler).reshape(data, tensor), ("data", "model"))


def vllm_rollout_config(folder: Path, rollout_mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What Tunix's `RolloutConfig` needs for vLLM, beside the sampling of `generation_config`.

    No `seed` for a request: vLLM on a TPU refuses it, and elsewhere it would make the answers of a group
    equal. The engine's own seed runs through the whole run.
    """
    return dict(
        return_logprobs=True,  # unasked, vLLM returns none
        data_parallel_size=rollout_mesh.shape["data"],
        tensor_parallel_size=rollout_mesh.shape["model"],
        rollout_vllm_model_version=str(folder),
        rollout_vllm_hbm_utilization=HBM_UTILIZATION_VLLM,
        rollout_vllm_tpu_backend_type="jax",
        rollout_vllm_kwargs={
            "dtype": DTYPE,
            "seed": SEED,
            "generation_config": "vllm",  # else a checkpoint's own temperature and stop tokens creep in
        },
        rollout_vllm_sampling_kwargs={"prompt_logprobs": None},  # Tunix asks for them and throws them away
    )


def make_cluster(folder: Path, hf: transformers.LlamaConfig, tokenizer) -> rl_cluster_lib.RLCluster:
    """Loads MODEL, copies it for the reference (not with LoRA), and hands both to Tunix.

    If RUN_DIR holds a checkpoint, Tunix puts its weights and Adam moments into the actor here.
    """
    trainer_devices, rollout_mesh = plan_devices(hf, jax.devices())
    config = to_maxtext_config(hf, BATCH_SIZE * NUM_GENERATIONS, MAX_PROMPT_LENGTH, TOTAL_GENERATION_STEPS)
    actor, mesh = load_llama(folder, hf, config, tokenizer.pad_token_id, trainer_devices)
    if LORA_RANK:  # the weights are frozen, and shared with the reference: no second copy
        reference = actor if BETA else None
        actor = lora.add_lora(actor, mesh, config, LORA_RANK, LORA_ALPHA, LORA_TARGETS, SEED)
        merge = functools.partial(lora.merge, scale=LORA_ALPHA / LORA_RANK)
    else:
        reference = copy_of(actor) if BETA else None
        merge = None
    if REFERENCE_OFFLOAD:
        reference = loss_options.on_memory(reference, "pinned_host")

    if ROLLOUT_ENGINE == "vllm":
        from vllm_rollout import VllmRollout  # needs the TPU packages

        rollout_engine = functools.partial(VllmRollout, maxtext_config=config, actor_mesh=mesh, merge=merge)
        engine_config = vllm_rollout_config(folder, rollout_mesh)
    else:
        rollout_engine = functools.partial(
            MaxTextRollout, maxtext_config=config, current_step=lambda: cluster.global_steps, seed=SEED,
            merge=merge,
        )  # fmt: skip
        rollout_mesh, engine_config = mesh, {}
    role = rl_cluster_lib.Role
    cluster = loss_options.Cluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=rl_cluster_lib.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: rollout_mesh},
            role_to_logical_axis_rule={r: config.logical_axis_rules for r in (role.ACTOR, role.REFERENCE)},
            rollout_engine=rollout_engine,
            rollout_config=RolloutConfig(**generation_config("train"), **engine_config),
            training_config=make_training_config(),
        ),
    )
    cluster.logits_clip, cluster.reference_offload = LOGITS_CLIP, REFERENCE_OFFLOAD
    if LORA_RANK and BETA:
        lora.keep_one_copy(cluster, reference)
    # Our own progress bar instead of Tunix's. This is the trainer's own copy of the setting: the loop
    # above it still stops at max_steps.
    cluster.actor_trainer.config.max_steps = None
    if ROLLOUT_ENGINE == "vllm" and cluster.actor_trainer.train_steps:
        # Tunix restores a checkpoint after it has given vLLM the starting weights, and would not sync before
        # the next step's end: both that step's answers and an evaluation would be the untrained model's.
        cluster.rollout.update_params(nnx.state(cluster.actor_trainer.model, nnx.Param))
    return cluster


def schedule(step: int, log: dict[int, dict[str, float]]) -> tuple[float, float]:
    """Weight of the KL and temperature of the step before which `step` steps were done.

    The KL of the very last step is not known yet, Tunix reports it a step late; so the weight follows those
    before it. After a stop the log still has them, and the run goes on with the same weight; SIGKILL can cost
    the log one step, whose KL then changes nothing.
    """
    beta, temperature = BETA, TEMPERATURE
    if TARGET_KL:
        kls = (log[done]["kl"] for done in range(1, step) if "kl" in log.get(done, {}))
        beta = loss_options.adaptive_beta(BETA, TARGET_KL, kls)
    if TEMPERATURE_END:
        temperature = loss_options.linear(TEMPERATURE, TEMPERATURE_END, step, num_steps())
    return beta, temperature


def make_learner(
    cluster: rl_cluster_lib.RLCluster,
    rows: list[dict[str, str]] | None = None,
    log: dict[int, dict[str, float]] | None = None,
) -> loss_options.Learner:
    """GRPO on `cluster`: gives its trainer the loss, and holds the rewards.

    Args:
        cluster: holds actor, reference and rollout.
        rows: questions; needed to train with ZERO_VARIANCE_GROUPS=refill.
        log: `TrainingLog.rows`; needed to train with TARGET_KL.
    """
    return loss_options.Learner(
        schedule=lambda step: schedule(step, log),
        refill=lambda step, attempt: refill_batch(rows, step, attempt),
        rl_cluster=cluster,
        algo_config=loss_options.LossConfig(
            num_generations=NUM_GENERATIONS,
            num_iterations=NUM_ITERATIONS,
            beta=BETA,
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH or EPSILON,
            loss_algo=LOSS_ALGO,
            loss_agg_mode=loss_options.LOSS_AGG_MODES[LOSS_AGG_MODE],
            advantage_estimator=loss_options.advantage_estimator(ADVANTAGE, NORM_ADV_BY_STD),
            kl_loss_mode=KL_LOSS_MODE,
            mask_overlong=MASK_OVERLONG,
            zero_variance_groups=ZERO_VARIANCE_GROUPS,
            max_refills=MAX_REFILLS,
            advantage_clip=ADVANTAGE_CLIP,
            logits_clip=LOGITS_CLIP,
            adaptive_beta=bool(TARGET_KL),
            temperature_schedule=bool(TEMPERATURE_END),
        ),
        reward_fns=[guarded(reward_fn) for reward_fn in reward_functions()],
        metric_fns=[group_metrics],
    )


def train(cluster: rl_cluster_lib.RLCluster, rows: list[dict[str, str]]) -> list[dict[str, float]]:
    """Runs GRPO from the step the cluster stands at to the last.

    Ctrl-C (or SIGTERM) ends the loop after the step in progress; Tunix then saves a checkpoint.

    Returns:
        One row of figures for each step, as in `train_log.csv`.

    Raises:
        KeyboardInterrupt: stopped by the user, checkpoint saved.
        UserError: a faulty reward function, a loss that is not finite, a full disk.
    """
    trainer = cluster.actor_trainer
    # Tunix reads the step from metadata that its last, forced save does not write: count ourselves.
    start = trainer.train_steps // NUM_ITERATIONS
    reward_names = [reward_fn.__name__ for reward_fn in reward_functions()]
    log = TrainingLog(log_dir() / "train_log.csv", start, reward_names)
    learner = make_learner(cluster, rows, log.rows)
    cluster.global_steps = start
    trainer.with_rl_metrics_to_log({name: np.mean for name in ("kl", "pg_clipfrac", "entropy")})
    trainer.with_training_hooks(log)
    cluster.with_external_metrics_logger(log.on_rollout_metrics)

    stop = threading.Event()

    def batches():
        dataset = training_batches(rows, start)
        # On a resume Tunix calls next() once for every update already made, to throw the batch away
        # (with NUM_ITERATIONS > 1: too often). It gets placeholders; the real data starts at the step.
        yield from itertools.repeat(dataset[0], start * NUM_ITERATIONS)
        yield from traced(itertools.takewhile(lambda batch: hosts.all_agree(not stop.is_set()), dataset))

    def traced(dataset):
        if not PROFILE_DIR:
            return dataset
        steps = monitor.parse_steps(PROFILE_STEPS, num_steps())
        return monitor.traced(dataset, start + 1, steps, PROFILE_DIR, finish)

    def finish():
        jax.block_until_ready(nnx.state(trainer.model))

    def on_signal(number, frame):
        stop.set()
        tqdm.write("stopping after this step, then saving (once more: stop at once, unsaved)")
        signal.signal(number, signal.default_int_handler)

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tensorboard_log(log_dir() / "tensorboard"):
            learner.train(batches())
    except Exception as error:
        trainer.checkpoint_manager.close()  # lets a save that is under way finish
        if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise UserError(
                f"RUN_DIR={RUN_DIR}: the disk is full; earlier checkpoints are whole. Free some space "
                "and run the same command again"
            ) from error
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        rows_logged = log.close()
    if stop.is_set() and trainer.train_steps < num_steps() * NUM_ITERATIONS:
        raise KeyboardInterrupt
    return rows_logged


# %% Report: terminal, report.md, one picture, result.json ----------------------------------------------
def comparison_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The before/after table in Markdown, shares with 95 % Wilson intervals."""
    n = before["questions"]

    def cell(value, key):
        if key in ("mean_score", "completion_length"):
            return f"{value:.2f}" if key == "mean_score" else f"{value:.1f}"
        low, high = wilson(value, n)
        return f"{value:.1%} ({low:.1%} to {high:.1%})"

    names = {
        "answer_accuracy": "answers right", "partial_accuracy": "within 10 %",
        "format_accuracy": "format right",
        "greedy_answer_accuracy": "greedy: answers right", "greedy_format_accuracy": "greedy: format right",
        "pass_at_k": f"pass@{NUM_PASSES}", "majority_at_k": f"majority@{NUM_PASSES}",
        "cut_off": "cut off at the limit", "mean_score": "mean score",
        "completion_length": "mean length, tokens",
    }  # fmt: skip
    lines = [f"| {n} questions, {EVAL_CONFIG} sampling | before | after |", "|---|---|---|"]
    for key, name in names.items():
        if key in before:
            row = [cell(result[key], key) for result in (before, after)]
            lines.append(f"| {name} | {row[0]} | {row[1]} |")
    return "\n".join(lines)


def data_source_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The before/after table split by data_source, in Markdown; empty where there is only one."""
    if "by_data_source" not in before:
        return ""
    lines = ["| data_source | questions | answers right | format right |", "|---|---|---|---|"]
    for name, old in before["by_data_source"].items():
        new = after["by_data_source"][name]
        cells = [f"{old[key]:.1%} to {new[key]:.1%}" for key in ("answer_accuracy", "format_accuracy")]
        lines.append(f"| {name} | {old['questions']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n\n"


def flip_table(before: list[bool], after: list[bool]) -> str:
    """How many questions changed sides (sampled, first pass), in Markdown."""
    counts = {pair: 0 for pair in itertools.product((True, False), repeat=2)}
    for pair in zip(before, after, strict=True):
        counts[pair] += 1
    return (
        "| | right after | wrong after |\n|---|---|---|\n"
        f"| right before | {counts[True, True]} | {counts[True, False]} |\n"
        f"| wrong before | {counts[False, True]} | {counts[False, False]} |"
    )


def sample_answers(before: dict[str, Any], after: dict[str, Any], rows: list[dict[str, str]]) -> str:
    """One question with its answers: the first that turned right, else the first."""
    flips = [not b and a for b, a in zip(before["correct"], after["correct"], strict=True)]
    i = flips.index(True) if any(flips) else 0
    return (
        f"question: {rows[i]['question']}\nright answer: {rows[i]['answer']}\n"
        f"before: {before['completions'][i]}\nafter:  {after['completions'][i]}"
    )


def draw_picture(path: Path, log: list[dict[str, float]], before: dict[str, Any], after: dict[str, Any]):
    """Learning curves on the left, before/after with intervals on the right; readable on any background."""
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(11, 4), facecolor="white", layout="constrained")
    steps = [row["step"] for row in log]
    colors = {"correct": "#1f77b4", "format_ok": "#ff7f0e", "zero_variance": "#888888"}
    labels = {
        "correct": "answers right",
        "format_ok": "format right",
        "zero_variance": "groups without signal",
    }
    for key, color in colors.items():
        curves.plot(steps, [row.get(key, math.nan) for row in log], color=color, label=labels[key], lw=1.2)
    curves.set(xlabel="training step", ylabel="share of the step's answers", ylim=(-0.02, 1.02))
    curves.legend(frameon=False)
    curves.set_title(f"{BATCH_SIZE} questions x {NUM_GENERATIONS} answers a step")

    keys = ("answer_accuracy", "partial_accuracy", "format_accuracy", "greedy_answer_accuracy")
    for offset, result, color, label in (
        (-0.2, before, "#bbbbbb", "before"),
        (0.2, after, "#1f77b4", "after"),
    ):
        shares = np.array([result[key] for key in keys])
        intervals = np.array([wilson(share, result["questions"]) for share in shares])  # [4, 2]
        error = np.clip(np.abs(intervals.T - shares), 0, None)  # [2, 4]
        bars.bar(np.arange(4) + offset, shares, 0.38, yerr=error, color=color, label=label, capsize=3)
    bars.set_xticks(range(4), ["answers\nright", "within\n10 %", "format\nright", "greedy:\nright"])
    bars.set(ylim=(0, 1.2), title=f"{before['questions']} held-out questions, 95 % intervals")
    bars.legend(frameon=False, ncols=2, loc="upper center")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(before, after, log, test_rows, source: str, seconds: float) -> None:
    """Prints the tables and writes report.md, report.png and result.json into RUN_DIR."""
    run_dir = log_dir()
    step_seconds = float(np.median([row.get("seconds", math.nan) for row in log][1:] or [math.nan]))
    table, flips = comparison_table(before, after), flip_table(before["correct"], after["correct"])
    sample, by_data_source = sample_answers(before, after, test_rows), data_source_table(before, after)
    draw_picture(run_dir / "report.png", log, before, after)
    last = log[-1]
    training = (
        f"{num_steps()} steps of {BATCH_SIZE} x {NUM_GENERATIONS} answers, median {step_seconds:.2f} s each; "
        f"last step: reward {last['reward']:.2f} +- {last['reward_std']:.2f} within a group, "
        f"KL {last['kl']:.4f}, groups without signal {last['zero_variance']:.0%}, "
        f"{last['length']:.1f} tokens an answer"
    )
    lines = "\n".join(f"- {line}" for line in health.history(log, globals())) or "Nothing to report."
    command = "python 5_GRPO_Maxtext/" + Path(__file__).name + " " + " ".join(sys.argv[1:])
    (run_dir / "report.md").write_text(
        f"# GRPO: before and after\n\n`{command.strip()}`\n\nmodel `{MODEL}`, test questions: {source}, "
        f"seed {SEED}\n\n{table}\n\n![curves](report.png)\n\n{training}\n\nHealth:\n\n{lines}\n\n"
        f"{by_data_source}Which questions changed sides (sampled):\n\n{flips}\n\n```\n{sample}\n```\n"
    )
    kept = (
        "answer_accuracy", "partial_accuracy", "format_accuracy", "greedy_answer_accuracy", "questions",
        "mean_score", "by_data_source",
    )  # fmt: skip
    result = {
        "before": {key: before[key] for key in kept if key in before},
        "after": {key: after[key] for key in kept if key in after},
        "seconds": round(seconds, 1),
        "seconds_per_step": round(step_seconds, 4),
        "steps": num_steps(),
    }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table}\n\n{by_data_source}{flips}\n\n{sample}\n\n{training}")
    print(f"\nreport: {run_dir}/report.md, picture: {run_dir}/report.png, total {seconds:.0f} s")
    print(f"curves: tensorboard --logdir {run_dir}/tensorboard")
    if PROFILE_DIR:
        print(f"trace of steps {PROFILE_STEPS}: tensorboard --logdir {PROFILE_DIR}")


# %% Main -----------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> None:
    """Makes RUN_DIR, or checks that the run in it was started with the same constants.

    Raises:
        UserError: other constants, or a folder that cannot be written.
    """
    global RUN_DIR
    started = time.localtime(hosts.start_time())
    RUN_DIR = RUN_DIR or time.strftime("runs/grpo_llama3_1_8b_demo/%Y-%m-%d_%H-%M-%S", started)
    path = log_dir() / "constants.json"
    new = {k: v for k, v in constants.items() if k not in FREE_TO_CHANGE}
    try:
        log_dir().mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(json.dumps(new, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"RUN_DIR={RUN_DIR}: {error.strerror}; choose another folder") from None
    check_same_constants(json.loads(path.read_text()))


def check_same_constants(old: dict[str, Any]) -> None:
    """Raises UserError if the run in RUN_DIR was started with other constants than these."""
    for name in DEFAULTS.keys() - FREE_TO_CHANGE:
        value = globals()[name]
        if old.get(name) != value:
            raise UserError(
                f"{name}={value}: the run in RUN_DIR={RUN_DIR} was started with {old.get(name)}; "
                "take that, or another RUN_DIR"
            )


def checkpoint_bytes(parameters: int) -> int:
    """Of one checkpoint: weights, two Adam moments, and the accumulated gradient where there is one.

    Args:
        parameters: those that are trained; with LoRA, no others are saved.
    """
    accumulated = bool(TRAIN_MICRO_BATCH_SIZE and TRAIN_MICRO_BATCH_SIZE != BATCH_SIZE)
    return parameters * (3 + accumulated) * jnp.dtype(WEIGHT_DTYPE).itemsize


def check_disk(num_parameters: int, folder: Path) -> None:
    """Refuses to start a run whose checkpoints will not fit the disk that `folder` is on."""
    needed = checkpoint_bytes(num_parameters) * (MAX_TO_KEEP + 1)
    free = shutil.disk_usage(folder).free
    if free < needed and not CHECKPOINT_DIR:
        raise UserError(
            f"MAX_TO_KEEP={MAX_TO_KEEP}: the checkpoints need {needed / 2**30:.2f} GiB in RUN_DIR={RUN_DIR}, "
            f"{free / 2**30:.2f} GiB are free; lower it, free some space, or take another RUN_DIR"
        )


def evaluate_both(rollout, rows: list[dict[str, str]], when: str) -> dict[str, Any]:
    """Greedy and sampled figures; kept in RUN_DIR, so that a resumed run does not ask again."""
    path = log_dir() / f"{when}.json"
    if hosts.all_agree(path.exists()):
        return json.loads(path.read_text())
    greedy = evaluate(rollout, rows, "greedy")
    result = evaluate(rollout, rows, EVAL_CONFIG, NUM_PASSES) | {
        "greedy_answer_accuracy": greedy["answer_accuracy"],
        "greedy_format_accuracy": greedy["format_accuracy"],
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n")
    partial.rename(path)  # whole or not at all
    print(
        f"{when} training: answers right {result['answer_accuracy']:.1%}, format right "
        f"{result['format_accuracy']:.1%}, greedy right {result['greedy_answer_accuracy']:.1%}"
    )
    return result


def run(arguments: list[str]) -> None:
    """Evaluates, trains, evaluates; see the module's docstring."""
    started = time.perf_counter()
    constants = configure(arguments)
    if DRY_RUN:
        # Run as `__main__`, this script would be loaded anew by dry_run.py, which imports it: all defaults.
        sys.modules.setdefault("grpo_llama3_1_8b_demo", sys.modules[__name__])
        from dry_run import dry_run

        return dry_run()
    folder, hf = load_hf_config(MODEL)
    tokenizer = load_tokenizer(folder)
    train_questions, train_source = read_questions(DATASET, "train")
    test_questions, test_source = read_questions(TEST_DATASET or DATASET, "test")
    choose_rewards(train_questions, test_questions)
    check_rollout_engine()
    join_hosts()
    plan_devices(hf, jax.devices())  # refuses before anything is written
    open_run_dir(constants)
    train_rows = make_prompts(tokenizer, train_questions, train_source)
    test_rows = make_prompts(tokenizer, test_questions[:NUM_TEST_QUESTIONS], test_source)

    cluster = make_cluster(folder, hf, tokenizer)
    trainer = cluster.actor_trainer
    num_parameters = sum(x.size for x in jax.tree.leaves(nnx.state(trainer.model, nnx.Param)))
    num_trained = lora.count_parameters(hf, LORA_RANK, LORA_TARGETS) if LORA_RANK else num_parameters
    check_disk(num_trained, Path(RUN_DIR))
    print(
        f"model    {folder}: {num_parameters:,} parameters, {hf.num_hidden_layers} layers, "
        f"{WEIGHT_DTYPE}{f', LoRA of rank {LORA_RANK} trains {num_trained:,}' if LORA_RANK else ''}\n"
        f"data     {train_source} ({len(train_rows):,}), test: {test_source} ({len(test_rows):,})\n"
        f"step     {BATCH_SIZE} prompts x {NUM_GENERATIONS} answers = "
        f"{BATCH_SIZE * NUM_GENERATIONS} sequences of {MAX_PROMPT_LENGTH} + {TOTAL_GENERATION_STEPS} tokens\n"
        f"run      {num_steps()} steps on {jax.device_count()} {jax.devices()[0].device_kind} device(s), "
        f"generation by {ROLLOUT_ENGINE}, in {RUN_DIR}"
    )
    done = trainer.train_steps // NUM_ITERATIONS
    if done:
        print(f"going on after step {done} of {num_steps()}, from the checkpoint in {RUN_DIR}")
    before = evaluate_both(cluster.rollout, test_rows, "before")
    log = train(cluster, train_rows) if done < num_steps() else health.read_log(log_dir() / "train_log.csv")
    after = evaluate_both(cluster.rollout, test_rows, "after")
    write_report(before, after, log, test_rows, test_source, time.perf_counter() - started)


def quiet() -> None:
    """Keeps what the libraries have to say to their own developers off the terminal."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def main() -> None:
    """Runs the script with the command line's constants; exit code 2 on the user's errors, 130 on Ctrl-C."""
    quiet()
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        again = " ".join(a for a in sys.argv[1:] if not a.startswith("RUN_DIR="))
        print(f"\nstopped. To go on: python {sys.argv[0]} {again} RUN_DIR={RUN_DIR}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
