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
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import hooks
from yaml import YAMLError

sys.path.insert(0, str(HERE))  # so that the files beside this one import from anywhere
import lora
import reward_func
from rollout import MaxTextRollout

matplotlib.use("Agg")
import matplotlib.pyplot as plt


# %% Constants ------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    """A constant with two values; `configure` keeps the one that fits MODEL's size."""

    laptop: Any
    tpu: Any


MODEL = "tiny_llama"  # Hugging Face name or folder; "tiny_llama" lies beside this file
DATASET = "tiny_gsm8k"  # "tiny_gsm8k" (beside this file), "gsm8k" (tensorflow-datasets), or a JSON/JSONL file
TEST_DATASET = ""  # empty: the test split of DATASET; or a JSON/JSONL file
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
NUM_BATCHES = Pair(200, 3_738)  # steps an epoch
NUM_EPOCHS = 1  # passes of NUM_BATCHES steps

# --- optimizer (AdamW, linear warm-up, cosine decay to 0)
LEARNING_RATE = Pair(1e-3, 3e-6)  # peak; 8 B parameters forgive far less than 0.3 M
B1 = 0.9  # Adam's memory of the gradient ...
B2 = 0.99  # ... and of its square
WEIGHT_DECAY = 0.1  # AdamW's
WARMUP_FRACTION = 0.1  # share of all steps
MAX_GRAD_NORM = Pair(1.0, 0.1)  # KL runs away: lower it
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
HBM_UTILIZATION_VLLM = 0.35  # share of a sampler chip's memory; what lies there already counts against it

DEFAULTS = {name: value for name, value in globals().items() if name.isupper() and name != "HERE"}


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
    globals().update(constants)
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
        "SAVE_INTERVAL_STEPS": 1, "MAX_TO_KEEP": 1, "TRAIN_MICRO_BATCH_SIZE": 0, "SEED": 0,
        "LORA_RANK": 0,
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
    for name in ("BETA", "EPSILON", "LEARNING_RATE", "MAX_GRAD_NORM", "WEIGHT_DECAY", "WARMUP_FRACTION"):
        if not 0 <= globals()[name] < math.inf:
            raise UserError(f"{name}={globals()[name]}: use a finite number, 0 or more")
    if WARMUP_FRACTION > 1:
        raise UserError(f"WARMUP_FRACTION={WARMUP_FRACTION}: a share of all steps, at most 1")
    for name in ("TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION", "HBM_UTILIZATION_VLLM"):
        if not 0 < globals()[name] <= 1:
            raise UserError(f"{name}={globals()[name]}: a share, above 0 and at most 1")
    if not 0 < LORA_ALPHA < math.inf:
        raise UserError(f"LORA_ALPHA={LORA_ALPHA}: use a finite number above 0")
    try:
        lora.parse_targets(LORA_TARGETS)
    except ValueError as error:
        raise UserError(str(error)) from None
    if EVAL_CONFIG not in GENERATION_CONFIGS:
        raise UserError(f"EVAL_CONFIG={EVAL_CONFIG}: one of {', '.join(GENERATION_CONFIGS)}")
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
    policies = ("none", "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj")
    if REMAT_POLICY not in policies:
        raise UserError(f"REMAT_POLICY={REMAT_POLICY}: one of {', '.join(policies)}")
    for name in ("MODEL", "DATASET", "TEST_DATASET", "RUN_DIR"):
        if globals()[name].startswith("gs://"):
            raise UserError(
                f"{name}={globals()[name]}: must be a local path, copy it here with `gcloud storage cp -r`; "
                "only CHECKPOINT_DIR may lie in a bucket"
            )
    if not TEST_DATASET and find_path(DATASET).is_file():
        raise UserError(
            f"TEST_DATASET is empty and DATASET={DATASET} is one file: the test would ask what was trained "
            "on; give TEST_DATASET a file of other questions"
        )


# %% Data: GSM8K columns in, chat prompts out -----------------------------------------------------------
def read_questions(dataset: str, split: str) -> tuple[list[dict[str, str]], str]:
    """Reads questions and gold answers.

    Args:
        dataset: "gsm8k", a folder with `train.jsonl` and `test.jsonl`, or a JSON/JSONL file.
        split: "train" or "test"; ignored for a single file.

    Returns:
        Rows with `question`, `answer` (the text after `####`) and `line`, and where they came from.

    Raises:
        UserError: no such file, no rows, a missing column, an answer without `#### N`.
    """
    if dataset == "gsm8k":
        rows, source = read_tfds_gsm8k(split)
    else:
        path = find_path(dataset)
        path = path / f"{split}.jsonl" if path.is_dir() else path
        rows, source = read_json(path), str(path)
    if not rows:
        raise UserError(f"DATASET={dataset}: {source} has no rows; give a file with at least one question")
    questions = []
    for line, row in enumerate(rows, start=1):
        missing = [column for column in ("question", "answer") if column not in row]
        if missing:
            raise UserError(
                f"DATASET={dataset}: {source}, row {line} has no column {missing[0]!r} "
                f"(it has {', '.join(map(repr, row)) or 'none'}); rename it"
            )
        answer = reward_func.extract_hash_answer(str(row["answer"]))
        if answer is None:
            raise UserError(
                f"DATASET={dataset}: {source}, row {line}: the answer does not end in '#### N'; add it"
            )
        questions.append({"question": str(row["question"]), "answer": answer, "line": str(line)})
    return questions, source


def read_json(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON array or a JSON-lines file; raises UserError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8 text")
        raise UserError(f"DATASET={path}: {reason}; give 'gsm8k' or a JSON/JSONL file") from None
    rows = []
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            for line in filter(str.strip, text.splitlines()):
                rows.append(json.loads(line))
    except ValueError as error:
        raise UserError(f"DATASET={path}: row {len(rows) + 1} is not JSON ({error}); mend it") from None
    for line, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"DATASET={path}: row {line} is not an object with named columns; mend it")
    return rows


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
            return read_json(path), str(path)
        builder.download_and_prepare()
    # values are bytes
    rows = [{k: v.decode() for k, v in row.items()} for row in builder.as_data_source(split)]
    return rows, f"tensorflow-datasets gsm8k ({split})"


def to_prompt(tokenizer, question: str) -> str:
    """The text the model is asked to continue: TEMPLATE inside the tokenizer's own chat template."""
    content = TEMPLATE.format(system_prompt=SYSTEM_PROMPT, question=question)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


def make_prompts(tokenizer, questions: list[dict[str, str]], source: str) -> list[dict[str, str]]:
    """Adds `prompts`, and leaves out what is longer than MAX_PROMPT_LENGTH tokens: counted and named.

    Raises:
        UserError: no question is short enough.
    """
    kept, too_long = [], []
    for row in questions:
        prompt = to_prompt(tokenizer, row["question"])
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        if length <= MAX_PROMPT_LENGTH:
            kept.append({"prompts": prompt} | row)
        else:
            too_long.append((int(row["line"]), length))
    if too_long:
        named = ", ".join(f"row {line} ({n} tokens)" for line, n in too_long[:3])
        print(
            f"{source}: {len(too_long):,} of {len(questions):,} questions are longer than "
            f"MAX_PROMPT_LENGTH={MAX_PROMPT_LENGTH} and left out: {named}"
            + (f", ... (all in {RUN_DIR}/too_long.csv)" if len(too_long) > 3 else "")
        )
        with open(Path(RUN_DIR) / "too_long.csv", "a", newline="") as file:
            csv.writer(file).writerows((source, line, n) for line, n in too_long)
    if not kept:
        raise too_short_error(source, min(n for _, n in too_long))
    return kept


def too_short_error(source: str, shortest: int) -> UserError:
    """For a MAX_PROMPT_LENGTH that leaves no question."""
    return UserError(
        f"MAX_PROMPT_LENGTH={MAX_PROMPT_LENGTH}: no question of {source} is that short; "
        f"the shortest takes {shortest} tokens, raise it"
    )


def training_batches(rows: list[dict[str, str]], start_step: int) -> grain.MapDataset:
    """Batches of BATCH_SIZE prompts, shuffled anew each epoch, from training step `start_step` on."""
    return (
        grain.MapDataset.source(rows)
        .shuffle(seed=SEED)
        .repeat()  # the number of steps is NUM_BATCHES * NUM_EPOCHS, however many rows there are
        .batch(BATCH_SIZE)[start_step : num_steps()]
    )


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
        rows: with `prompts` and `answer`.
        config_name: entry of GENERATION_CONFIGS.
        num_passes: answers K to each question Q.

    Returns:
        Shares `answer_accuracy`, `partial_accuracy` (within 10 %), `format_accuracy`, `cut_off`; means
        `completion_length` (tokens); with K > 1 also `pass_at_k`, `majority_at_k`; lists `correct` [Q]
        (first pass) and `completions` [Q].
    """
    prompts = [row["prompts"] for row in rows for _ in range(num_passes)]
    golds = [row["answer"] for row in rows for _ in range(num_passes)]
    # vLLM makes up its batches itself
    chunk = len(prompts) if ROLLOUT_ENGINE == "vllm" else BATCH_SIZE * NUM_GENERATIONS
    texts, lengths = [], []
    for start in tqdm(range(0, len(prompts), chunk), desc=f"evaluate, {config_name}"):
        # The same noise before and after training: what differs is the model.
        seed = jax.random.fold_in(jax.random.key(SEED + 1), start) if ROLLOUT_ENGINE == "maxtext" else None
        config = RolloutConfig(**generation_config(config_name), seed=seed)
        output = rollout.generate(prompts[start : start + chunk], config)
        texts += output.text
        lengths += [len(tokens) for tokens in output.tokens]

    correct = np.array([reward_func.grade(t, g) for t, g in zip(texts, golds, strict=True)])
    close = np.array([reward_func.is_close(t, g, 0.1) for t, g in zip(texts, golds, strict=True)])
    result = {
        "questions": len(rows),
        "answer_accuracy": float(correct.mean()),
        "partial_accuracy": float(close.mean()),
        "format_accuracy": float(np.mean([reward_func.format_ok(t) for t in texts])),
        "completion_length": float(np.mean(lengths)),
        "cut_off": float(np.mean(np.array(lengths) >= TOTAL_GENERATION_STEPS)),
        "correct": correct[::num_passes].tolist(),
        "completions": texts[::num_passes],
    }
    if num_passes > 1:
        by_question = correct.reshape(-1, num_passes)  # [Q, K]
        result["pass_at_k"] = float(by_question.any(axis=1).mean())
        votes = [majority(texts[i : i + num_passes]) for i in range(0, len(texts), num_passes)]
        result["majority_at_k"] = float(
            np.mean([v is not None and reward_func.grade(v, row["answer"]) for v, row in zip(votes, rows)])
        )
    return result


def majority(completions: list[str]) -> str | None:
    """The first completion that gives the most frequent number; None if none gives one."""
    numbers = [reward_func.parse_number(reward_func.extract_answer(c) or "") for c in completions]
    given = [n for n in numbers if n is not None]
    return completions[numbers.index(max(given, key=given.count))] if given else None


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % Wilson interval of a share seen in n questions."""
    interval = binomtest(round(share * n), n).proportion_ci(0.95, method="wilson")
    return interval.low, interval.high


# %% Training -------------------------------------------------------------------------------------------
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


def group_metrics(prompts, completions, advantages, rewards, answer, **columns):
    """What to watch besides the loss; Tunix averages and logs it.

    `zero_variance`: share of groups whose G rewards are all equal. They have no better and no worse
    answer, hence advantage 0 and no gradient: their generation was paid for nothing.
    """
    groups = np.asarray(rewards).reshape(-1, NUM_GENERATIONS)  # [B, G]
    correct = [reward_func.grade(c, a) for c, a in zip(completions, answer, strict=True)]
    return {
        "groups/zero_variance": (np.mean(np.ptp(groups, axis=1) == 0), np.mean),
        "groups/reward_std": (np.mean(groups.std(axis=1)), np.mean),
        "answers/correct": (np.mean(correct), np.mean),
        "answers/format_ok": (np.mean([reward_func.format_ok(c) for c in completions]), np.mean),
    }


class TrainingLog(hooks.TrainingHooks):
    """Progress bar, one CSV row a step, and the guard against a loss that is not a number."""

    COLUMNS = ("step", "reward", "reward_std", "correct", "format_ok", "zero_variance", "length",
               "kl", "entropy", "clip_fraction", "loss", "grad_norm", "seconds")  # fmt: skip

    def __init__(self, path: Path, first_step: int):
        """Goes on with the log in `path` after `first_step` steps; rows of steps that were lost are dropped.

        Each row is written at once. SIGKILL can cost the row of the last step (it is written a step later).
        """
        old = []
        if path.exists():
            with open(path, newline="") as file:
                old = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        self.rows = {int(row["step"]): row for row in old if row["step"] <= first_step}
        self._file = open(path, "w", newline="", buffering=1)  # noqa: SIM115  (closed by `close`)
        self._writer = csv.DictWriter(self._file, self.COLUMNS, restval="nan")
        self._writer.writeheader()
        self._writer.writerows(self.rows.values())
        self._started = time.perf_counter()
        self._progress = tqdm(total=num_steps(), initial=first_step, desc="GRPO", unit="step")

    def on_rollout_metrics(self, buffer) -> None:
        """Takes what Tunix logged about a step's answers; it reports `global_steps` from 0."""
        mean = {name: float(np.mean(values)) for name, (values, op) in buffer.metrics.items() if op}
        if "rewards/score/mean" not in mean:
            return  # Tunix's last buffer, after the last step, holds no answers
        now = time.perf_counter()
        self.rows.setdefault(buffer.global_steps + 1, {}).update(
            reward=mean["rewards/score/mean"],
            reward_std=mean["groups/reward_std"],
            correct=mean["answers/correct"],
            format_ok=mean["answers/format_ok"],
            zero_variance=mean["groups/zero_variance"],
            length=mean["completions/mean_length"],
            seconds=now - self._started,
        )
        self._started = now

    def on_train_step_end(self, trainer, train_step: int, train_loss: float) -> None:
        """Called once for each optimizer update, one update late (Tunix overlaps logging with work)."""

        def last(name):
            return float(trainer.metrics_logger.get_metric_history("actor", name, "train")[-1])

        # Both: a loss can be finite while its gradient is not, and every update is skipped in silence.
        for name, value in (("loss", float(train_loss)), ("gradient norm", last("grad_norm"))):
            if not np.isfinite(value):
                raise UserError(
                    f"the {name} of update {train_step} is {value}; that update was not applied, and no "
                    f"checkpoint holds it. Lower LEARNING_RATE={LEARNING_RATE} or "
                    f"MAX_GRAD_NORM={MAX_GRAD_NORM}, and start a new run"
                )
        if train_step % NUM_ITERATIONS:
            return
        step = train_step // NUM_ITERATIONS

        row = self.rows.setdefault(step, {})
        row.update(
            step=step, loss=float(train_loss), kl=last("kl"), entropy=last("entropy"),
            clip_fraction=last("pg_clipfrac"), grad_norm=last("grad_norm"),
        )  # fmt: skip
        self._writer.writerow(row)
        shown = {k: f"{row[k]:.2f}" for k in ("reward", "correct", "format_ok", "kl") if k in row}
        self._progress.set_postfix(shown, refresh=False)
        self._progress.update()

    def close(self) -> list[dict[str, float]]:
        """Closes the file and the progress bar; returns the rows."""
        self._progress.close()
        self._file.close()
        return [self.rows[step] for step in sorted(self.rows) if "step" in self.rows[step]]

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
    transform = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), adamw)
    # One NaN would otherwise sit in every weight, and in the next checkpoint; `TrainingLog` stops the run.
    return optax.apply_if_finite(transform, max_consecutive_errors=1_000)


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


def initialize_pathways() -> None:
    """Joins the Pathways cluster whose environment this is; one process then drives the chips of all hosts.

    Raises:
        UserError: vLLM on several hosts without Pathways.
    """
    if "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        import pathwaysutils  # before the first look at a device

        pathwaysutils.initialize()
    if ROLLOUT_ENGINE == "vllm" and jax.process_count() > 1:
        raise UserError(
            f"ROLLOUT_ENGINE=vllm: {jax.process_count()} hosts run this script, and vLLM's engine lives in "
            "one; use a TPU VM of one host (v5p-8, v6e-8), or Pathways (JAX_PLATFORMS=proxy)"
        )


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
    cluster = rl_cluster_lib.RLCluster(
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


def make_learner(cluster: rl_cluster_lib.RLCluster) -> GRPOLearner:
    """GRPO on `cluster`: gives its trainer the loss, and holds the rewards."""
    return GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(
            num_generations=NUM_GENERATIONS,
            num_iterations=NUM_ITERATIONS,
            beta=BETA,
            epsilon=EPSILON,
            kl_loss_mode="low_var_kl",  # k3, the estimator of the GRPO paper (eq. 4)
        ),
        reward_fns=[
            guarded(reward_func.match_format_exactly),
            guarded(reward_func.match_format_approximately),
            guarded(reward_func.check_answer),
            guarded(reward_func.check_numbers),
        ],
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
    learner = make_learner(cluster)
    trainer.with_rl_metrics_to_log({name: np.mean for name in ("kl", "pg_clipfrac", "entropy")})
    # Tunix reads the step from metadata that its last, forced save does not write: count ourselves.
    start = trainer.train_steps // NUM_ITERATIONS
    cluster.global_steps = start
    log = TrainingLog(Path(RUN_DIR) / "train_log.csv", start)
    trainer.with_training_hooks(log)
    cluster.with_external_metrics_logger(log.on_rollout_metrics)

    stop = threading.Event()

    def batches():
        dataset = training_batches(rows, start)
        # On a resume Tunix calls next() once for every update already made, to throw the batch away
        # (with NUM_ITERATIONS > 1: too often). It gets placeholders; the real data starts at the step.
        yield from itertools.repeat(dataset[0], start * NUM_ITERATIONS)
        for batch in dataset:
            if stop.is_set():
                return
            yield batch

    def on_signal(number, frame):
        stop.set()
        tqdm.write("stopping after this step, then saving (once more: stop at once, unsaved)")
        signal.signal(number, signal.default_int_handler)

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tensorboard_log(Path(RUN_DIR) / "tensorboard"):
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

    def cell(value, is_share):
        if not is_share:
            return f"{value:.1f}"
        low, high = wilson(value, n)
        return f"{value:.1%} ({low:.1%} to {high:.1%})"

    names = {
        "answer_accuracy": "answers right", "partial_accuracy": "within 10 %",
        "format_accuracy": "format right",
        "greedy_answer_accuracy": "greedy: answers right", "greedy_format_accuracy": "greedy: format right",
        "pass_at_k": f"pass@{NUM_PASSES}", "majority_at_k": f"majority@{NUM_PASSES}",
        "cut_off": "cut off at the limit", "completion_length": "mean length, tokens",
    }  # fmt: skip
    lines = [f"| {n} questions, {EVAL_CONFIG} sampling | before | after |", "|---|---|---|"]
    for key, name in names.items():
        if key in before:
            row = [cell(result[key], key != "completion_length") for result in (before, after)]
            lines.append(f"| {name} | {row[0]} | {row[1]} |")
    return "\n".join(lines)


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
    run_dir = Path(RUN_DIR)
    step_seconds = float(np.median([row.get("seconds", math.nan) for row in log][1:] or [math.nan]))
    table, flips = comparison_table(before, after), flip_table(before["correct"], after["correct"])
    sample = sample_answers(before, after, test_rows)
    draw_picture(run_dir / "report.png", log, before, after)
    last = log[-1]
    training = (
        f"{num_steps()} steps of {BATCH_SIZE} x {NUM_GENERATIONS} answers, median {step_seconds:.2f} s each; "
        f"last step: reward {last['reward']:.2f} +- {last['reward_std']:.2f} within a group, "
        f"KL {last['kl']:.4f}, groups without signal {last['zero_variance']:.0%}, "
        f"{last['length']:.1f} tokens an answer"
    )
    command = "python 5_GRPO_Maxtext/" + Path(__file__).name + " " + " ".join(sys.argv[1:])
    (run_dir / "report.md").write_text(
        f"# GRPO: before and after\n\n`{command.strip()}`\n\nmodel `{MODEL}`, test questions: {source}, "
        f"seed {SEED}\n\n{table}\n\n![curves](report.png)\n\n{training}\n\n"
        f"Which questions changed sides (sampled):\n\n{flips}\n\n```\n{sample}\n```\n"
    )
    kept = ("answer_accuracy", "partial_accuracy", "format_accuracy", "greedy_answer_accuracy", "questions")
    result = {
        "before": {key: before[key] for key in kept},
        "after": {key: after[key] for key in kept},
        "seconds": round(seconds, 1),
        "seconds_per_step": round(step_seconds, 4),
        "steps": num_steps(),
    }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table}\n\n{flips}\n\n{sample}\n\n{training}")
    print(f"\nreport: {run_dir}/report.md, picture: {run_dir}/report.png, total {seconds:.0f} s")
    print(f"curves: tensorboard --logdir {run_dir}/tensorboard")


# %% Main -----------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> None:
    """Makes RUN_DIR, or checks that the run in it was started with the same constants.

    Raises:
        UserError: other constants, or a folder that cannot be written.
    """
    global RUN_DIR
    RUN_DIR = RUN_DIR or time.strftime("runs/grpo_llama3_1_8b_demo/%Y-%m-%d_%H-%M-%S")
    path = Path(RUN_DIR) / "constants.json"
    new = {k: v for k, v in constants.items() if k not in ("RUN_DIR", "DRY_RUN")}
    try:
        Path(RUN_DIR).mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(json.dumps(new, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"RUN_DIR={RUN_DIR}: {error.strerror}; choose another folder") from None
    check_same_constants(json.loads(path.read_text()))


def check_same_constants(old: dict[str, Any]) -> None:
    """Raises UserError if the run in RUN_DIR was started with other constants than these."""
    for name in DEFAULTS.keys() - {"RUN_DIR", "DRY_RUN"}:
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
    path = Path(RUN_DIR) / f"{when}.json"
    if path.exists():
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
    check_rollout_engine()
    initialize_pathways()
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
    if done < num_steps():
        log = train(cluster, train_rows)
    else:
        log = TrainingLog(Path(RUN_DIR) / "train_log.csv", done).close()
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
