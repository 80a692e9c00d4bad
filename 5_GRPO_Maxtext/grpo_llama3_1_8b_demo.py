"""GRPO on a language model: evaluate -> train -> evaluate, with MaxText, Tunix, Grain and Orbax.

One script, two sizes. `MODEL` is any Llama or Qwen3 checkpoint in Hugging Face's layout: by default the
tiny Llama in this folder (0.3 M parameters, laptop CPU), at full size `meta-llama/Llama-3.1-8B-Instruct` on a
TPU VM. Same code path; constants with two values take the column that fits the model.

The objective (DeepSeekMath, arXiv 2402.03300, eq. 3), for G answers o_1..o_G to one question q:

    J = mean_i mean_t [ min(ratio_it * A_i, clip(ratio_it, 1 - eps, 1 + eps) * A_i) - beta * KL_it ]
    A_i = (R_i - mean(R_1..R_G)) / std(R_1..R_G)        ratio_it = pi(o_it | q, o_i<t) / pi_old(...)

Not here, and why: no critic (the group's mean reward is the baseline: that is GRPO), no reward model (the
rewards are functions in reward_func.py), no replay (each answer is trained on once, NUM_ITERATIONS=1, so
ratio = 1 and the clip never binds), no loss on the prompt (only the answer is trained).

Read `group_advantage`, `grpo_loss` and `train` first. What only serves the run is in parts/.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py                   # tiny Llama, 2 to 4 minutes on 2 cores
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py --help            # every constant with its remark
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py NUM_BATCHES=50 SEED=1
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py RUN_DIR=runs/mine     # again: continues where it stopped
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DATASET=mine REWARD_FUNC=my_reward.py
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from parts import checks, settings
from parts.settings import pair


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value.

    laptop: MODEL's hidden size is below 1,024 (tiny Llama, CPU); tpu: Llama 3.1 8B on a TPU VM.
    """

    # --- turn these: the task
    MODEL: str = "tiny_llama"  # Hugging Face name, name@revision or folder; "tiny_llama" is in this folder
    DATASET: str = "tiny_gsm8k"  # folder, "gsm8k", .json, .jsonl or .parquet file; a.jsonl:0.7,b.jsonl:0.3
    TEST_DATASET: str = ""  # files as in DATASET, without weights (empty = the test split of DATASET)
    REWARDS: str = ""  # names, comma-separated (empty = reward_func.py's four for GSM8K, else compute_score)
    REWARD_FUNC: str = ""  # Python file with your own compute_score, or with functions to name in REWARDS
    RUN_DIR: str = ""  # folder of the run; with a checkpoint in it the run continues (empty = a new folder)
    SEED: int = 0  # orders the questions and draws the answers; the weights come from MODEL
    DRY_RUN: bool = False  # True: check everything that can be checked, say what would happen, and stop
    SYSTEM_PROMPT: str = (
        "You are given a problem. Think about it and write your reasoning between <reasoning> and "
        "</reasoning>. Then give the final answer, one number and nothing else, between <answer> and "
        "</answer>."
    )  # what the model is asked to write; rewards that want <think> tags change the tags here, too
    TEMPLATE: str = pair(  # the tiny Llama learned its format from demonstrations; it knows no instructions
        laptop="{question}", tpu="{system_prompt}\n\n{question}"
    )  # the user's message, put inside the tokenizer's chat template
    # --- turn these: sampling and GRPO
    MAX_PROMPT_LENGTH: int = pair(laptop=28, tpu=256)  # tokens with template; longer questions are left out
    TOTAL_GENERATION_STEPS: int = pair(laptop=28, tpu=768)  # tokens per answer; longer answers are cut off
    TEMPERATURE: float = 1.0  # 1 = the policy itself; lower makes the G answers agree
    BATCH_SIZE: int = pair(laptop=16, tpu=64)  # questions per step; more: less noise, more memory and time
    NUM_GENERATIONS: int = 8  # G, answers per question; with 2 most groups agree and teach nothing
    NUM_ITERATIONS: int = 1  # mu, optimizer updates per batch; above 1 the clip begins to bind
    BETA: float = pair(laptop=0.08, tpu=0.001)  # weight of the KL to the starting model (0 = none is loaded)
    EPSILON: float = 0.2  # clip range of the ratio; larger allows larger policy updates
    NUM_BATCHES: int = pair(laptop=200, tpu=116)  # training steps, each on one batch of questions
    LEARNING_RATE: float = pair(laptop=1e-3, tpu=3e-5)  # peak; for all weights of 8 B (LORA_RANK=0) 1e-6
    MAX_GRAD_NORM: float = 1.0  # gradient clip; lower it if the KL runs away (0 = off)
    LORA_RANK: int = pair(laptop=0, tpu=32)  # r of A [in, r], B [r, out] beside each weight (0 = train all)
    NUM_TEST_QUESTIONS: int = pair(laptop=512, tpu=1_319)  # test questions, from the top of the test set
    EVAL_CONFIG: Literal["greedy", "standard", "liberal"] = "standard"  # how test answers are drawn
    EVAL_EVERY: int = pair(laptop=25, tpu=20)  # steps between evaluations during training (0 = none)
    EVAL_QUESTIONS: int = pair(laptop=128, tpu=512)  # held out for it; not trained on, not in the test
    LOG_ANSWERS_EVERY: int = 10  # steps between those whose every answer is kept, to be looked at (0 = none)

    # --- leave these until you need them: data
    BAD_ROWS: Literal["refuse", "skip"] = "refuse"  # rows that cannot be used stop the run, or are left out
    NUM_PASSES: int = 1  # sampled answers per test question; above 1 adds pass@k and majority@k
    # --- sampling
    TOP_P: float = 1.0  # (1 = off); below 1 the model trains on another distribution than it samples from
    TOP_K: int = -1  # (-1 = off); a cut, as by TOP_P, that training does not know of
    SAMPLER_CORRECTION: float = pair(laptop=0.0, tpu=2.0)  # cap of pi / pi_sampler per token (0 = off)
    OFF_POLICY_STEPS: int = 0  # 1: answers are one step old; vLLM draws them while the step before trains
    TEMPERATURE_END: float = 0.0  # TEMPERATURE moves there in a straight line over all steps (0 = stays)
    # --- loss, beyond the page (parts/loss_options.py)
    EPSILON_HIGH: float = 0.0  # upper clip range (0 = EPSILON); DAPO, arXiv 2503.14476: 0.28
    LOSS_ALGO: Literal["grpo", "gspo-token", "cispo"] = "grpo"  # arXiv 2507.18071 (GSPO), 2506.13585 (CISPO)
    LOSS_AGG_MODE: Literal[
        "seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"  # verl's names; DAPO: token-mean; Dr. GRPO: seq-mean-token-sum-norm
    ADVANTAGE: Literal["group", "rloo"] = "group"  # RLOO, arXiv 2402.14740: R - mean of the other G - 1
    NORM_ADV_BY_STD: bool = True  # divide by the group's std; False: Dr. GRPO, arXiv 2503.20783
    KL_LOSS_MODE: Literal["low_var_kl", "kl", "mse_kl"] = "low_var_kl"  # k3 (arXiv 2402.03300, eq. 4), k1, k2
    ENTROPY_COEF: float = 0.0  # weight of the entropy in the objective (0 = off), arXiv 1602.01783
    MASK_OVERLONG: bool = False  # True: answers cut off at the limit are not trained on (DAPO)
    OVERLONG_BUFFER: int = 0  # last tokens before the limit that cost points (0 = off), DAPO's soft penalty
    OVERLONG_PENALTY: float = 1.0  # points that an answer at the limit loses by OVERLONG_BUFFER
    ZERO_VARIANCE_GROUPS: Literal["keep", "skip", "refill"] = "keep"  # refill: ask other questions (DAPO)
    TARGET_KL: float = 0.0  # nats per token; BETA is steered to keep the KL here (0 = off), arXiv 1909.08593
    ADVANTAGE_CLIP: float = 0.0  # largest absolute advantage (0 = off)
    LOGITS_CLIP: float = 0.0  # largest absolute logit; a clipped logit has no gradient (0 = off)
    REFERENCE_OFFLOAD: bool = False  # True: keep the reference in host memory; costs a transfer per step
    # --- optimizer: AdamW, linear warm-up, cosine decay to 0
    B1: float = 0.9  # decay of Adam's mean of the gradient; larger remembers longer
    B2: float = 0.99  # decay of Adam's mean of its square
    WEIGHT_DECAY: float = 0.1  # AdamW's pull to zero, times the learning rate (0 = off)
    WARMUP_FRACTION: float = 0.1  # share of all steps (0 = off)
    MAX_NONFINITE_UPDATES: int = 0  # updates in a row that may be NaN or infinite, skipped; one more stops
    TRAIN_MICRO_BATCH_SIZE: int = pair(laptop=0, tpu=2)  # questions per gradient pass; saves memory (0 = all)
    LORA_ALPHA: float = pair(laptop=16.0, tpu=32.0)  # A B is added times LORA_ALPHA / LORA_RANK
    LORA_TARGETS: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # weights that get A and B
    # --- checkpoints and logs (all under RUN_DIR)
    SAVE_INTERVAL_STEPS: int = pair(laptop=50, tpu=20)  # steps between checkpoints
    MAX_TO_KEEP: int = 4  # checkpoints kept; each has the weights and two Adam moments
    CHECKPOINT_DIR: str = ""  # folder or gs://bucket/folder (needs gcsfs) for them (empty = RUN_DIR)
    PROFILE_DIR: str = ""  # folder for a profiler trace of steps 3 and 4, for TensorBoard (empty = off)
    # --- model and devices
    DTYPE: Literal["float32", "bfloat16"] = pair(laptop="float32", tpu="bfloat16")  # of activations
    WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"  # an update of 3e-6 vanishes in bfloat16
    SCAN_LAYERS: bool = pair(laptop=False, tpu=True)  # True compiles one layer instead of 32
    REMAT_POLICY: Literal[
        "none", "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj"
    ] = pair(laptop="minimal", tpu="full")  # what the backward pass computes again, to save memory
    ATTENTION: Literal["dot_product", "flash", "autoselected", "cudnn_flash_te", "cudnn_flash_jax"] = pair(
        laptop="dot_product", tpu="flash"
    )  # MaxText's attention kernel; cudnn_* are for GPUs
    ROLLOUT_ENGINE: Literal["maxtext", "vllm"] = pair(laptop="maxtext", tpu="vllm")  # who generates
    TRAINER_DEVICES_FRACTION: float = 1.0  # vllm: share of the chips that trains (1.0 and 1.0 = all do both)
    SAMPLER_DEVICES_FRACTION: float = 1.0  # share that generates
    TRAINER_TENSOR_PARALLEL: int = 1  # chips that share a matrix product; the rest split weights (FSDP)
    SAMPLER_DATA_PARALLEL: int = 1  # copies of the model in vLLM; the chips of a copy share its products
    DISTRIBUTED: bool = False  # True: this command runs on several hosts as one (jax.distributed)
    HBM_UTILIZATION_VLLM: float = 0.5  # share of a sampler chip's memory, what is already there included


# %% Imports ------------------------------------------------------------------------------------------------
if __name__ == "__main__":  # a constant that is wrong is refused here, before seconds of imports
    settings.refuse_early(Constants, checks.refuse)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import health
import reward_func
from parts import (
    answers,
    checkpoints,
    devices,
    llama,
    lora,
    loss_options,
    memory,
    questions,
    report,
    run_log,
    task_rewards,
)
from parts.grading import is_close
from parts.loss_options import MAX_LOG_RATIO, Example, LossConfig
from parts.rollout import GENERATION_CONFIGS, MaxTextRollout, rollout_config
from parts.tunix_api import (
    ClusterConfig,
    RLCluster,
    RLTrainingConfig,
    Role,
    RolloutConfig,
    register_advantage_estimator,
    register_policy_loss_fn,
)
from parts.versions import check_versions

REFILL_SEED = 1_000_003  # added to SEED: the questions of ZERO_VARIANCE_GROUPS=refill come in another order


# %% Prompts ------------------------------------------------------------------------------------------------
def read_data(c: Constants) -> dict[str, tuple[list[dict[str, str]], str]]:
    """Questions with their right answers, and where they came from, by what they are for.

    Returns:
        `train`; `test`, asked before and after; `validation`, asked during training, where there are any.

    Raises:
        UserError: no such file, no rows, bad rows where BAD_ROWS is "refuse".
    """
    read = functools.partial(
        questions.read_questions,
        bad_rows=c.BAD_ROWS,
        fault=None if c.REWARD_FUNC else task_rewards.ground_truth_fault,
        tiny=settings.is_small(c.MODEL),
    )
    test_constant = "TEST_DATASET" if c.TEST_DATASET else "DATASET"
    train = read(c.DATASET, "train", constant="DATASET")
    test = read(c.TEST_DATASET or c.DATASET, "test", constant=test_constant)
    questions.say_overlap(train[0], test[0])
    validation = questions.read_validation(train[0], read) if c.EVAL_EVERY else ([], "")
    return {"train": train, "test": test, "validation": validation}


def make_prompts(c: Constants, rows, source: str, tokenizer, think_tags: bool, too_long: Path):
    """Adds `prompts`: TEMPLATE inside the tokenizer's own chat template.

    Args:
        rows: from `read_data`.
        source: where they came from.
        tokenizer: of MODEL.
        think_tags: whether the rewards want <think> where SYSTEM_PROMPT has <reasoning>.
        too_long: CSV file for the questions of more than MAX_PROMPT_LENGTH tokens, which are left out.

    Returns:
        The rows that are short enough, with `prompts`.

    Raises:
        UserError: no question of a source is short enough.
    """
    system_prompt = questions.think_prompt(c.SYSTEM_PROMPT) if think_tags else c.SYSTEM_PROMPT
    kept, left_out = questions.with_prompts(
        rows, tokenizer, c.MAX_PROMPT_LENGTH, template=c.TEMPLATE, system_prompt=system_prompt
    )
    run_log.log_too_long(left_out, source, len(rows), c.MAX_PROMPT_LENGTH, too_long)
    questions.refuse_lost_sources(kept, left_out, c.MAX_PROMPT_LENGTH)
    return kept


def training_batches(c: Constants, rows: list[dict[str, str]], start_step: int):
    """Batches of BATCH_SIZE questions from training step `start_step` on, the sources mixed by weight."""
    return questions.mixed_batches(rows, c.SEED, c.BATCH_SIZE)[start_step : c.NUM_BATCHES]


def prompts_of(c: Constants, rows: list[dict[str, str]], step: int) -> list[str] | None:
    """The prompts [B * G] that the step after `step` others asks; None after the last."""
    batches = training_batches(c, rows, 0)
    return np.repeat(batches[step]["prompts"], c.NUM_GENERATIONS).tolist() if step < len(batches) else None


def refill_batch(c: Constants, rows: list[dict[str, str]], step: int, attempt: int) -> dict[str, np.ndarray]:
    """A batch of other questions for a step whose groups lacked a signal; the same after a resume."""
    batches = questions.mixed_batches(rows, c.SEED + REFILL_SEED, c.BATCH_SIZE)
    return batches[step * loss_options.MAX_REFILLS + attempt]


# %% GRPO ---------------------------------------------------------------------------------------------------
@register_advantage_estimator("group")
def group_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """How much better each answer is than its group (arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean(R_1..R_G)) / std(R_1..R_G)

    Args:
        rewards: float [B * G], the G answers to a question side by side.
        num_generations: G.

    Returns:
        float [B * G]; 0 where all answers of a group earn the same: such a group teaches nothing.
    """
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    mean = groups.mean(axis=1, keepdims=True)  # [B, 1]: the baseline, where PPO has a critic
    std = groups.std(axis=1, ddof=1, keepdims=True)  # [B, 1]
    return ((groups - mean) / (std + 1e-6)).ravel()  # 1e-6: equal rewards would give 0 / 0


@register_policy_loss_fn("grpo_on_the_page")
def grpo_loss(model, batch: Example, algo_config: LossConfig, pad_id: int, eos_id: int, **kwargs):
    """Minus the objective J on top of this file, for N = B * G answers of at most T tokens.

    Args:
        model: the policy pi.
        batch: tokens `prompt_ids` [N, P] and `completion_ids` [N, T], `completion_mask` [N, T] (true up to
            and including end-of-sequence), `advantages` [N], `ref_per_token_logps` [N, T] or None without KL,
            `old_per_token_logps` [N, T] or None while each answer is trained on once: then pi_old is pi;
            `sampler_log_prob` [N, T], only for the log.
        algo_config: epsilon, beta, temperature.
        pad_id: padding token.
        eos_id: end-of-sequence token.

    Returns:
        The loss [], float32, and figures for the log.
    """
    mask = batch.completion_mask  # [N, T]: padding never counts
    A = batch.advantages[:, None]  # [N, 1]: every token of an answer gets the answer's advantage
    log_prob, logits = loss_options.log_probs(
        model, batch.prompt_ids, batch.completion_ids,
        pad_id=pad_id, eos_id=eos_id, temperature=algo_config.temperature,
        num_generations=algo_config.num_generations,
    )  # [N, T], [N, T, V]  # fmt: skip
    old_log_prob = batch.old_per_token_logps
    if old_log_prob is None:
        old_log_prob = jax.lax.stop_gradient(log_prob)

    # ratio_t = pi(o_t) / pi_old(o_t);   min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)
    log_ratio = jnp.clip(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)  # [N, T]
    clipped = jnp.clip(ratio, 1 - algo_config.epsilon, 1 + algo_config.epsilon)
    objective = jnp.minimum(ratio * A, clipped * A)  # [N, T]

    # - beta * KL_t;   KL_t = pi_ref / pi - log(pi_ref / pi) - 1   (eq. 4: k3, never negative)
    kl = jnp.zeros_like(log_prob)
    if batch.ref_per_token_logps is not None:
        log_ref_ratio = (batch.ref_per_token_logps - log_prob) * mask  # exp of padding's might overflow
        kl = jnp.exp(log_ref_ratio) - log_ref_ratio - 1  # [N, T]
        objective -= algo_config.beta * kl

    # mean_i mean_t: over the tokens of an answer, then over the answers
    per_answer = (objective * mask).sum(axis=1) / mask.sum(axis=1).clip(1)  # [N]
    J = per_answer.sum() / mask.any(axis=1).sum().clip(1)  # answers that are masked as a whole do not count
    return -J, loss_options.log_figures(batch, old_log_prob, ratio, clipped * A < ratio * A, kl, logits)


# %% Sampling and evaluation --------------------------------------------------------------------------------
def sampling(c: Constants, config_name: str = "", **changes: Any) -> RolloutConfig:
    """How to draw answers: as in training, or as an entry of GENERATION_CONFIGS says."""
    own = dict(temperature=c.TEMPERATURE, top_k=c.TOP_K, top_p=c.TOP_P)
    return rollout_config(
        GENERATION_CONFIGS[config_name] if config_name else own,
        prompt_tokens=c.MAX_PROMPT_LENGTH,
        new_tokens=c.TOTAL_GENERATION_STEPS,
        **changes,
    )


def evaluate(
    c: Constants, rollout, rows: Sequence[dict[str, str]], grader, config_name: str, num_passes: int = 1
) -> dict[str, Any]:
    """Asks every question and grades the answers.

    Args:
        rollout: any Tunix rollout engine.
        rows: from `make_prompts`.
        grader: from `task_rewards.make_grader`.
        config_name: entry of GENERATION_CONFIGS in parts/rollout.py.
        num_passes: answers K to each question Q.

    Returns:
        Shares `answer_accuracy` (right, and in the form asked for), `lenient_accuracy` (right by the last
        number, wherever it stands), `partial_accuracy` (within 10 %), `format_accuracy`, `cut_off`; means
        `completion_length` (tokens) and, where compute_score grades, `mean_score`; with K > 1 also
        `pass_at_k`, `majority_at_k`; where there are several, `by_data_source`: `questions` and three of the
        shares. Lists of the first pass [Q]: `completions`, `correct`, `correct_lenient`, `format_ok`.
    """
    asked = [row for row in rows for _ in range(num_passes)]  # [Q * K]
    prompts = [row["prompts"] for row in asked]
    columns = {name: [row[name] for row in asked] for name in ("answer", "data_source", "extra_info")}
    chunk = c.BATCH_SIZE * c.NUM_GENERATIONS
    if c.ROLLOUT_ENGINE == "vllm":  # it makes up its batches itself
        chunk = len(prompts)
    texts, lengths, cut_off = [], [], []
    starts = range(0, len(prompts), chunk)
    for start in tqdm(starts, f"evaluate, {config_name}", leave=None, disable=not devices.is_first()):
        # The same noise before and after training: what differs is the model.
        seed = jax.random.fold_in(jax.random.key(c.SEED + 1), start)
        if c.ROLLOUT_ENGINE == "vllm":  # takes no seed per request
            seed = None
        output = rollout.generate(prompts[start : start + chunk], sampling(c, config_name, seed=seed))
        texts += output.text
        lengths += [len(tokens) for tokens in output.tokens]
        cut_off += [rollout.eos_id() not in tokens for tokens in output.tokens]

    scores = grader.score(texts, **columns)
    correct, lenient = scores >= 1, grader.right_lenient(texts, **columns)
    formed = np.array([grader.format_right(text) for text in texts])
    shares = {"answer_accuracy": correct, "lenient_accuracy": lenient, "format_accuracy": formed}
    close = [is_close(text, row["answer"], 0.1) for text, row in zip(texts, asked, strict=True)]
    result = {"questions": len(rows)} | {name: float(found.mean()) for name, found in shares.items()}
    result |= {
        "partial_accuracy": float(np.mean(close)),
        "completion_length": float(np.mean(lengths)),
        "cut_off": float(np.mean(cut_off)),
        "completions": texts[::num_passes],
        "correct": correct[::num_passes].tolist(),
        "correct_lenient": lenient[::num_passes].tolist(),
        "format_ok": formed[::num_passes].tolist(),
    }
    if "compute_score" in grader.names:
        result["mean_score"] = float(scores.mean())
    sources = sorted(set(columns["data_source"]))
    if len(sources) > 1:
        masks = {name: np.array([row["data_source"] == name for row in asked]) for name in sources}
        result["by_data_source"] = {
            name: {"questions": int(mask.sum()) // num_passes}
            | {share: float(found[mask].mean()) for share, found in shares.items()}
            for name, mask in masks.items()
        }
    if num_passes > 1:
        result["pass_at_k"] = float(correct.reshape(-1, num_passes).any(axis=1).mean())  # [Q, K] -> []
        winners = [i + grader.majority(texts[i : i + num_passes]) for i in range(0, len(texts), num_passes)]
        result["majority_at_k"] = float(correct[winners].mean())
    return result


def evaluate_both(
    c: Constants, rollout, rows: Sequence[dict[str, str]], grader, num_passes: int = 1
) -> dict[str, Any]:
    """`evaluate` with EVAL_CONFIG; the greedy figures and lists as `greedy_...`; and what was `asked`."""
    greedy = evaluate(c, rollout, rows, grader, "greedy")
    result = evaluate(c, rollout, rows, grader, c.EVAL_CONFIG, num_passes)
    kept = ("answer_accuracy", "lenient_accuracy", "format_accuracy", "completions", "correct")
    asked = [{name: row[name] for name in ("question", "answer", "data_source")} for row in rows]
    return result | {f"greedy_{name}": greedy[name] for name in kept} | {"asked": asked}


# %% Training -----------------------------------------------------------------------------------------------
def make_optimizer(c: Constants) -> optax.GradientTransformation:
    """AdamW behind a gradient-norm clip; an update that is not finite is skipped, not applied."""
    updates = c.NUM_BATCHES * c.NUM_ITERATIONS
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=c.LEARNING_RATE,
        warmup_steps=int(c.WARMUP_FRACTION * updates),
        decay_steps=updates,
    )
    optimizer = optax.adamw(schedule, b1=c.B1, b2=c.B2, weight_decay=c.WEIGHT_DECAY)
    if c.MAX_GRAD_NORM:
        optimizer = optax.chain(optax.clip_by_global_norm(c.MAX_GRAD_NORM), optimizer)
    # One NaN would otherwise be in every weight, and in the next checkpoint. `TrainingLog` stops the run
    # before optax gives up skipping.
    return optax.apply_if_finite(optimizer, max_consecutive_errors=c.MAX_NONFINITE_UPDATES + updates)


def make_training_config(c: Constants, checkpoints: str) -> RLTrainingConfig:
    """Optimizer, batch sizes and checkpoints, as Tunix's trainer takes them."""
    updates = c.NUM_BATCHES * c.NUM_ITERATIONS
    return RLTrainingConfig(
        actor_optimizer=make_optimizer(c),
        max_steps=updates,  # Tunix counts optimizer updates
        eval_every_n_steps=updates,  # never: `evaluate` does it
        mini_batch_size=c.BATCH_SIZE,
        # None, not BATCH_SIZE: one part would still cost the accumulation's copy of the weights
        train_micro_batch_size=c.TRAIN_MICRO_BATCH_SIZE or None,
        rollout_micro_batch_size=c.BATCH_SIZE,
        compute_logps_micro_batch_size=c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE,
        checkpoint_root_directory=checkpoints,
        checkpointing_options=ocp.CheckpointManagerOptions(
            # Not `save_interval_steps`: that also saves after the very first update, which with
            # NUM_ITERATIONS > 1 is in the middle of a step, where no run can be resumed.
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(
                c.SAVE_INTERVAL_STEPS * c.NUM_ITERATIONS
            ),
            max_to_keep=c.MAX_TO_KEEP,
        ),
        data_sharding_axis=("fsdp",),
    )


@checkpoints.restoring_whole_ones()
def make_cluster(c: Constants, folder: Path, hf, tokenizer, checkpoints: str) -> RLCluster:
    """Loads MODEL, copies it for the reference (not with LoRA), and hands both to Tunix.

    Where `checkpoints` holds one, Tunix puts its weights and Adam moments into the actor here.
    """
    trainer_devices, rollout_mesh = devices.plan_devices(c, hf, jax.devices())
    config = llama.to_run_config(c, hf)
    base, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id, trainer_devices)
    actor, merge = base, None
    if c.LORA_RANK:  # the weights are frozen, and shared with the reference: no second copy
        actor, merge = lora.add_lora(base, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED)
    reference = None
    if c.BETA:
        reference = base if c.LORA_RANK else llama.copy_of(base)
    if c.REFERENCE_OFFLOAD:
        reference = llama.to_memory(reference, "pinned_host")

    if c.ROLLOUT_ENGINE == "vllm":
        from parts import vllm_config, vllm_rollout  # needs the TPU packages

        engine = functools.partial(
            vllm_rollout.VllmRollout, maxtext_config=config, actor_mesh=mesh, merge=merge
        )
        engine_config = vllm_config.engine_config(c, folder, rollout_mesh)
    else:
        engine = functools.partial(
            MaxTextRollout,
            maxtext_config=config,
            hf=hf,
            current_step=lambda: cluster.global_steps,
            seed=c.SEED,
            logits_clip=c.LOGITS_CLIP,
            merge=merge,
        )
        rollout_mesh, engine_config = mesh, {}
    cluster = loss_options.Cluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: rollout_mesh},
            role_to_logical_axis_rule={
                role: config.logical_axis_rules for role in (Role.ACTOR, Role.REFERENCE)
            },
            rollout_engine=engine,
            rollout_config=sampling(c, **engine_config),
            training_config=make_training_config(c, checkpoints),
        ),
    )
    cluster.logits_clip, cluster.num_generations = c.LOGITS_CLIP, c.NUM_GENERATIONS
    cluster.reference_offload = c.REFERENCE_OFFLOAD
    if c.LORA_RANK and c.BETA:
        cluster.frozen_weights = nnx.state(reference, nnx.Param)
    # Our own progress bar instead of Tunix's. This is the trainer's own copy of the setting: the loop
    # above it still stops at max_steps.
    cluster.actor_trainer.config.max_steps = None
    if c.ROLLOUT_ENGINE == "vllm" and cluster.actor_trainer.train_steps:
        # Tunix restores a checkpoint after it has given vLLM the starting weights, and would not sync before
        # the next step's end: both that step's answers and an evaluation would be the untrained model's.
        cluster.rollout.update_params(nnx.state(cluster.actor_trainer.model, nnx.Param))
    return cluster


def schedule(c: Constants, step: int, log: dict[int, dict[str, float]]) -> tuple[float, float]:
    """Weight of the KL and temperature of the step before which `step` steps were done.

    Tunix reports the KL of a step one step late, so the weight follows the steps before the last. After a
    stop the log still has them, and the run continues with the same weight. SIGKILL can cost the log one
    step, whose KL then changes nothing.
    """
    beta, temperature = c.BETA, c.TEMPERATURE
    if c.TARGET_KL:
        kls = (log[done]["kl"] for done in range(1, step) if "kl" in log.get(done, {}))
        beta = loss_options.adaptive_beta(c.BETA, c.TARGET_KL, kls)
    if c.TEMPERATURE_END:
        temperature = loss_options.linear(c.TEMPERATURE, c.TEMPERATURE_END, step, c.NUM_BATCHES)
    return beta, temperature


def reward_functions(c: Constants, grader) -> list[Callable[..., list[float]]]:
    """What an answer is paid for: the functions of REWARDS and, with OVERLONG_BUFFER, its length."""
    if not c.OVERLONG_BUFFER:
        return grader.functions
    limit, penalty = c.TOTAL_GENERATION_STEPS, c.OVERLONG_PENALTY
    return [*grader.functions, loss_options.overlong_penalty(limit, c.OVERLONG_BUFFER, penalty)]


def make_learner(
    c: Constants,
    cluster: RLCluster,
    grader,
    rows: list[dict[str, str]] | None = None,
    log: dict[int, dict[str, float]] | None = None,
    on_batch: Callable[..., None] | None = None,
) -> loss_options.Learner:
    """GRPO on `cluster`: gives its trainer the loss, and holds the rewards.

    Args:
        cluster: holds actor, reference and rollout.
        grader: from `task_rewards.make_grader`.
        rows: questions; needed to train with ZERO_VARIANCE_GROUPS=refill.
        log: `TrainingLog.rows`; needed to train with TARGET_KL.
        on_batch: as `loss_options.Learner` takes it.
    """
    return loss_options.Learner(
        schedule=lambda step: schedule(c, step, log),
        refill=lambda step, attempt: refill_batch(c, rows, step, attempt),
        on_batch=on_batch,
        rl_cluster=cluster,
        algo_config=LossConfig(
            num_generations=c.NUM_GENERATIONS,
            num_iterations=c.NUM_ITERATIONS,
            beta=c.BETA,
            epsilon=c.EPSILON,
            epsilon_high=c.EPSILON_HIGH or c.EPSILON,
            max_answer_tokens=c.TOTAL_GENERATION_STEPS,
            policy_objective=c.LOSS_ALGO,
            loss_agg_mode=c.LOSS_AGG_MODE,
            advantage_estimator=loss_options.advantage_name(c.ADVANTAGE, c.NORM_ADV_BY_STD),
            policy_loss_fn="grpo_on_the_page" if loss_options.is_plain(c) else "grpo_with_options",
            kl_loss_mode=c.KL_LOSS_MODE,
            mask_overlong=c.MASK_OVERLONG,
            zero_variance_groups=c.ZERO_VARIANCE_GROUPS,
            advantage_clip=c.ADVANTAGE_CLIP,
            logits_clip=c.LOGITS_CLIP,
            sampler_correction=c.SAMPLER_CORRECTION,
            entropy_coef=c.ENTROPY_COEF,
            adaptive_beta=bool(c.TARGET_KL),
            temperature_schedule=bool(c.TEMPERATURE_END),
        ),
        reward_fns=reward_functions(c, grader),
        metric_fns=[functools.partial(run_log.group_metrics, grader, c.NUM_GENERATIONS)],
    )


def train(
    c: Constants,
    cluster: RLCluster,
    grader,
    rows: list[dict[str, str]],
    run: run_log.Run,
    validation_rows: Sequence[dict[str, str]] = (),
) -> list[dict[str, float]]:
    """Runs GRPO from the step the cluster has reached to the last. Tunix's learner runs the loop; one step is

        training_batches     B questions, each asked G times
        MaxTextRollout       B * G answers from the current policy (or vLLM's)
        grader.functions     rewards, summed over the functions
        group_advantage      each answer against its group
        Cluster              log-probs under the frozen reference and, with NUM_ITERATIONS > 1, the old policy
        grpo_loss            NUM_ITERATIONS updates by `make_optimizer`

    Every EVAL_EVERY steps `validation_rows` are asked. Ctrl-C (or SIGTERM) ends the loop after the step in
    progress; Tunix then saves a checkpoint.

    Returns:
        One row of figures per step, as in `train_log.csv`.

    Raises:
        KeyboardInterrupt: stopped by the user, checkpoint saved.
        UserError: a faulty reward function, a loss that is not finite, a full disk.
    """
    trainer = cluster.actor_trainer
    # Tunix reads the step from metadata that its last, forced save does not write: count ourselves.
    start = trainer.train_steps // c.NUM_ITERATIONS
    reward_names = [reward_fn.__name__ for reward_fn in reward_functions(c, grader)]
    log = run_log.TrainingLog(run.logs / "train_log.csv", c, start, reward_names, health.check)
    answer_log = answers.AnswerLog(run.logs / "answers.jsonl", c, start, cluster, grader)
    evaluations = run_log.Evaluations(run.logs / "evaluations.jsonl", c, start, log)
    learner = make_learner(c, cluster, grader, rows, log.rows, answer_log.on_batch)
    cluster.global_steps = start
    if c.OFF_POLICY_STEPS:
        cluster.next_prompts = functools.partial(prompts_of, c, rows)
    trainer.with_rl_metrics_to_log(loss_options.LOGGED)
    trainer.with_training_hooks(log)
    cluster.with_external_metrics_logger(log.on_rollout_metrics)

    def between_steps(done: int):
        answer_log.finish()
        if validation_rows and evaluations.due(done):
            evaluations.add(done, evaluate_both(c, cluster.rollout, validation_rows, grader))

    def batches(stop: threading.Event):
        dataset = training_batches(c, rows, start)
        # On a resume Tunix calls next() once for every update already made, to throw the batch away
        # (with NUM_ITERATIONS > 1: too often). It gets placeholders; the real data starts at the step.
        yield from itertools.repeat(dataset[0], start * c.NUM_ITERATIONS)
        ours = itertools.takewhile(lambda batch: devices.all_agree(not stop.is_set()), dataset)
        ours = run_log.traced(ours, start + 1, run_log.PROFILE_STEPS, c.PROFILE_DIR, finish)
        for done, batch in enumerate(ours, start):  # asked for when the step before is over
            between_steps(done)
            yield batch

    def finish():
        jax.block_until_ready(nnx.state(trainer.model))

    with (
        run_log.stop_after_step() as stop,
        contextlib.closing(log),
        run_log.full_disk(run.folder, trainer),
        checkpoints.only_finite(trainer, c),
        run_log.tensorboard_log(run.logs / "tensorboard"),
    ):
        if start < c.NUM_BATCHES:
            learner.train(batches(stop))
        if trainer.train_steps < c.NUM_BATCHES * c.NUM_ITERATIONS:
            answer_log.finish()
            raise KeyboardInterrupt
        between_steps(c.NUM_BATCHES)
    return log.finished_rows()


# %% Main ---------------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """Evaluates, trains, evaluates; see the module's docstring."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    checks.refuse(c)
    settings.quiet()
    check_versions()
    run_log.keep_compiled()
    if c.DRY_RUN:
        from parts import dry_run

        return dry_run.dry_run(c, reward_func)
    folder, hf = llama.load_hf_config(c.MODEL)
    c = replace(c, MODEL=llama.pinned(c.MODEL, folder))
    tokenizer = llama.load_tokenizer(folder)
    data = read_data(c)
    everything = [question for asked, _ in data.values() for question in asked]
    grader = task_rewards.make_grader(c.REWARDS, c.REWARD_FUNC, reward_func, everything)
    checks.rollout_engine(c)
    checks.model(c, hf)

    with devices.all_hosts(c):
        devices.plan_devices(c, hf, jax.devices())  # refuses before anything is written
        devices.check_attention(c)
        with run_log.open_run(c) as run:
            run.same_questions(data)
            prompts = functools.partial(
                make_prompts,
                c,
                tokenizer=tokenizer,
                think_tags=grader.think_tags,
                too_long=run.logs / "too_long.csv",
            )
            data["test"] = data["test"][0][: c.NUM_TEST_QUESTIONS], data["test"][1]
            rows = {split: prompts(*part) if part[0] else [] for split, part in data.items()}
            sources = {split: source for split, (_, source) in data.items()}
            if c.EVAL_EVERY:
                rows["validation"], rows["train"], sources["validation"] = questions.hold_out(
                    rows["train"], rows["validation"], c.EVAL_QUESTIONS
                )
            cluster = make_cluster(c, folder, hf, tokenizer, run.checkpoints)
            memory.check_disk(c, hf, cluster.actor_trainer.model, run.checkpoints)
            report.introduce(c, run, cluster, folder, hf, grader, rows, sources)

            ask = functools.partial(evaluate_both, c, cluster.rollout, rows["test"], grader, c.NUM_PASSES)
            done = cluster.actor_trainer.train_steps // c.NUM_ITERATIONS  # by an earlier process
            before = run.once("before", ask, done)
            log = train(c, cluster, grader, rows["train"], run, rows["validation"])
            after = run.once("after", ask)
            seconds = time.perf_counter() - started + run_log.seconds_before(log, done)
            lines = health.history(log, asdict(c))
            report.write(c, run, before, after, log, arguments, sources["test"], seconds, lines)


if __name__ == "__main__":
    settings.run(main)
