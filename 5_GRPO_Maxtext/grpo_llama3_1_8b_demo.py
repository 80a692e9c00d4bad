"""GRPO on a language model: evaluate, train, evaluate, with MaxText, Tunix, Grain and Orbax.

`MODEL` is any Llama or Qwen3 checkpoint in Hugging Face's layout. By default it's the tiny Llama in
this folder (0.3 M parameters, a laptop's CPU); `meta-llama/Llama-3.1-8B-Instruct` needs a TPU VM. A
constant with two values takes the one for a small or for a large model. The script is the same for
both, but the model isn't computed by the same code: on a CPU it has attention, rotary and dense
modules of our own (model/faster_on_cpu.py), which are faster and equal MaxText's up to rounding.

The objective (DeepSeekMath, arXiv 2402.03300, eq. 3), for G answers o_1..o_G to one question q; a
step takes the mean over all answers to its BATCH_SIZE questions:

    J = mean_i mean_t [ min(ratio_it * A_i, clip(ratio_it, 1 - eps, 1 + eps) * A_i) - beta * KL_it ]
    A_i = (R_i - mean(R_1..R_G)) / std(R_1..R_G)        ratio_it = pi(o_it | q, o_i<t) / pi_old(...)

What GRPO leaves out: a critic (the group's mean reward is the baseline), a reward model (rewards
are functions in reward_func.py), and a replay buffer (an answer is used NUM_ITERATIONS times, then
thrown away).

This page is plain GRPO, complete. Read it from top to bottom; you only need to know these names:

    c       the constants
    llm     the language model on its devices: generate, log_probs, reference_log_probs, load
    task    the questions, and what an answer earns
    run     this training: resume, logging, held-out evaluation, periodic checkpoints

Every option (DAPO, GSPO, Dr. GRPO, ...) is a complete function in grpo_variants.py that takes the
place of one on this page. The packages model/, task/ and run/ serve the run.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py          # tiny Llama, a minute on 2 cores
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py --help   # every constant with its comment
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py NUM_BATCHES=50 SEED=1
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py RUN_DIR=runs/mine   # again: it continues
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DATASET=mine REWARD_FUNC=my_reward.py
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py \
        MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import settings
from constants import RunConstants
from run import checks
from settings import BelowOne, Count, CountOrOff, NonNegative, Positive, Seed, TwoOrMore, pair


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(RunConstants):
    """Edit a value here, or change it for one run with NAME=value. constants.py has the other
    blocks.

    pair(small=..., large=...): the defaults for a hidden size below 1,024 (the tiny Llama, SmolLM2)
    and for larger models.
    """

    # --- the task
    # Hugging Face name, name@revision or folder; "tiny_llama" is in this folder
    MODEL: str = "tiny_llama"
    # folder, "gsm8k", .json, .jsonl or .parquet file; a.jsonl:0.7,b.jsonl:0.3
    DATASET: str = "tiny_gsm8k"
    # names, comma-separated (empty = reward_func.py's four for GSM8K, else compute_score)
    REWARDS: str = ""
    # Python file with your own compute_score, or with functions to name in REWARDS
    REWARD_FUNC: str = ""
    # folder of the run; with a checkpoint in it the run continues (empty = a new folder)
    RUN_DIR: str = ""
    SEED: Seed = 0  # orders the questions and samples the answers; the weights come from MODEL
    # what the model is asked to write; built-in rewards that want <think> swap the tags, your own
    # don't
    SYSTEM_PROMPT: str = (
        "You are given a problem. Think about it and write your reasoning between <reasoning> and "
        "</reasoning>. Then give the final answer, one number and nothing else, between <answer> "
        "and </answer>."
    )
    # the user's message, put inside the tokenizer's chat template
    TEMPLATE: str = pair(small="{question}", large="{system_prompt}\n\n{question}")
    # --- sampling
    # tokens with template; longer questions are left out
    MAX_PROMPT_LENGTH: Count = pair(small=28, large=256)
    # tokens per answer; longer ones are cut off
    TOTAL_GENERATION_STEPS: TwoOrMore = pair(small=28, large=768)
    TEMPERATURE: Positive = 1.0  # 1 = the policy itself; lower makes the G answers agree
    # --- GRPO
    # questions per step; more: less noise, more memory and time
    BATCH_SIZE: Count = pair(small=16, large=64)
    NUM_GENERATIONS: TwoOrMore = 8  # G, answers per question; with few, many groups have no signal
    # training steps, each on one batch of questions
    NUM_BATCHES: Count = pair(small=100, large=116)
    NUM_ITERATIONS: Count = pair(small=2, large=1)  # mu, updates per batch; at 1 the ratio is 1
    EPSILON: NonNegative = 0.2  # clip range of the ratio; larger allows larger policy updates
    # weight of the KL to the starting model (0 = none)
    BETA: NonNegative = pair(small=0.08, large=0.001)
    # --- optimizer: AdamW, linear warm-up, cosine decay to 0
    # peak; for all weights of 8 B (no LoRA) 1e-6
    LEARNING_RATE: NonNegative = pair(small=5e-4, large=8e-5)
    WARMUP_FRACTION: BelowOne = 0.1  # share of all steps (0 = off); the rest is for the decay
    MAX_GRAD_NORM: NonNegative = 1.0  # gradient clip; lower it if the KL runs away (0 = off)
    B1: BelowOne = 0.9  # decay of Adam's mean of the gradient; larger remembers longer
    B2: BelowOne = 0.99  # decay of Adam's mean of its square
    WEIGHT_DECAY: NonNegative = 0.1  # decoupled weight decay, times the learning rate (0 = off)
    # rank r of A [in, r], B [r, out] (0 = train all weights)
    LORA_RANK: CountOrOff = pair(small=0, large=32)
    LORA_ALPHA: Positive = pair(small=16.0, large=32.0)  # A B is added times LORA_ALPHA / LORA_RANK
    # questions per gradient pass (0 = all)
    TRAIN_MICRO_BATCH_SIZE: CountOrOff = pair(small=0, large=2)
    # --- evaluation
    # test questions, from the top of the test set
    NUM_TEST_QUESTIONS: Count = pair(small=512, large=1_319)
    # of all evaluations: model/rollout.py
    EVAL_CONFIG: Literal["greedy", "standard", "liberal"] = "standard"
    # steps between evaluations during training (0 = none)
    EVAL_EVERY: CountOrOff = pair(small=25, large=20)
    # held out for it; not trained on, not in the test
    EVAL_QUESTIONS: Count = pair(small=128, large=512)


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses a wrong constant now, before seconds of imports
    settings.refuse_early(Constants, checks.refuse)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import grpo_variants as variants
import reward_func
from model.llm import Llm, Model, Pi, accumulate_gradients
from model.log_probs import token_metrics
from run import dry_run, evaluation, report, start
from run.training import TrainingRun
from task.task import Samples, Task

MAX_LOG_RATIO = 20.0  # ratios stay below exp(20) = 5e8; beyond it they have no gradient


# %% Samples ---------------------------------------------------------------------------------------
def rollouts(c: Constants, llm: Llm, task: Task, run: TrainingRun, step: int) -> Samples:
    """Samples G answers to each of a step's B questions with the newest weights, and grades them.

    Returns:
        Arrays [B, G, ...]; steps are counted from 0.
    """
    questions = task.repeat(task.batches[step])  # columns by name, str [B * G]
    answers = llm.generate(questions, step)  # the random key follows from SEED and the step
    return task.grade(questions, answers)


def group_advantage(samples: Samples) -> np.ndarray:
    """How much better each answer is than its group (arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean(R_1..R_G)) / std(R_1..R_G)

    Returns:
        float [B, G]; 0 if all answers of a group earn the same reward, so the group has no
        gradient.
    """
    rewards = samples.rewards  # [B, G], the sum over the reward functions
    mean = rewards.mean(axis=1, keepdims=True)  # [B, 1]: the baseline, where PPO has a critic
    std = rewards.std(axis=1, ddof=1, keepdims=True)  # [B, 1]; ddof=1 as in TRL and Tunix
    return (rewards - mean) / (std + 1e-6)  # 1e-6: equal rewards would give 0 / 0


def mean_of_answers(mask: np.ndarray) -> np.ndarray:
    """mean_i mean_t as a weight per token: every answer counts the same, whatever its length.

    Args:
        mask: the tokens to train, bool [B, G, T].

    Returns:
        float [B, G, T]; the weights of a step sum to 1.
    """
    num_tokens = mask.sum(axis=-1, keepdims=True).clip(1)  # [B, G, 1]
    num_answers = mask.any(axis=-1).sum().clip(1)  # []: answers with a token to train
    return mask / num_tokens / num_answers


# %% The loss --------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """The input of the loss: N = B * G answers, float32 [N, T] unless noted.

    `to_batch` builds it from arrays [B, G, ...]; `update` gets all gradient passes of a step,
    [passes, N / passes, ...], and `loss` one of them. T is TOTAL_GENERATION_STEPS, on one CPU often
    less.
    """

    prompt_ids: jax.Array  # int32 [N, P], left-padded
    completion_ids: jax.Array  # int32 [N, T], right-padded
    mask: jax.Array  # bool [N, T]: the tokens to train, up to and with end-of-sequence
    weight: jax.Array  # of each token in J
    advantage: jax.Array  # [N, 1]: all tokens of an answer share it; [N, T] with ADVANTAGE=turn
    # [N, 1], weight of the KL; an array, so TARGET_KL can change it without a recompile
    beta: jax.Array
    # under the sampler's distribution; for SAMPLER_CORRECTION and the log
    sampler_log_prob: jax.Array
    ref_log_prob: jax.Array | None = None  # under the starting model; None without KL
    old_log_prob: jax.Array | None = None  # under pi_old; None if each answer is used once


def clipped_objective(pi: Pi, batch: Batch, c: Constants) -> tuple[jax.Array, jax.Array]:
    """min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) (arXiv 2402.03300, eq. 3).

    Args:
        pi: log-prob and entropy of the policy at each token, [N, T].
        batch: the answers.
        c: the constants.

    Returns:
        The objective [N, T], and which tokens the clip changes, bool [N, T].
    """
    log_ratio = jnp.clip(pi.log_prob - batch.old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)  # [N, T]
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - c.EPSILON, 1 + c.EPSILON)
    objective = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    return objective, clipped * batch.advantage < ratio * batch.advantage


def k3(log_ref_ratio: jax.Array) -> jax.Array:
    """KL_t = pi_ref / pi - log(pi_ref / pi) - 1 >= 0 (arXiv 2402.03300, eq. 4); [N, T]."""
    return jnp.expm1(log_ref_ratio) - log_ref_ratio  # exp(x) - 1 would lose its digits near 0


def loss(
    params, model: Model, batch: Batch, method: variants.Method
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One gradient pass's share of -J, the objective at the top of this file.

    Args:
        params: the trained weights; with LoRA, A and B.
        model: the rest of the policy.
        batch: the answers of the pass.
        method: the functions above, or the variants that replace them.

    Returns:
        The loss [], float32, and metrics for the log.
    """
    pi = model(params, batch)  # log_prob and entropy, [N, T] each
    if batch.old_log_prob is None:  # each answer is used once, so pi_old is pi
        batch = batch._replace(old_log_prob=jax.lax.stop_gradient(pi.log_prob))
    objective, clipped = method.objective(pi, batch, method.c)  # [N, T] each
    kl = jnp.zeros_like(objective)
    if batch.ref_log_prob is not None:
        # [N, T]; exp could overflow on padding
        kl = method.kl((batch.ref_log_prob - pi.log_prob) * batch.mask)
    J = (batch.weight * (objective - batch.beta * kl)).sum()  # []
    return -J, token_metrics(batch, kl=kl, clip_fraction=clipped, entropy=pi.entropy)


# Donated: it overwrites params and opt_state in place, so llm.params can't be used before
# `llm.load`.
@functools.partial(
    jax.jit, static_argnames=("method", "optimizer"), donate_argnames=("params", "opt_state")
)
def update(params, opt_state, model: Model, batch: Batch, method: variants.Method, optimizer):
    """One optimizer update with the gradient summed over a step's passes.

    Returns:
        The new params and opt_state; the metrics: loss, grad_norm, and those of the passes.
    """
    grad_fn = jax.value_and_grad(loss, has_aux=True)
    (value, metrics), grads = accumulate_gradients(grad_fn, params, model, batch, method)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    metrics |= {"loss": value, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(params, updates), opt_state, metrics


def make_optimizer(c: Constants) -> optax.GradientTransformation:
    """AdamW with gradient-norm clipping; skips updates that aren't finite."""
    num_updates = c.NUM_BATCHES * c.NUM_ITERATIONS
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=c.LEARNING_RATE,
        warmup_steps=int(c.WARMUP_FRACTION * num_updates),
        decay_steps=num_updates,
    )
    optimizer = optax.adamw(learning_rate, b1=c.B1, b2=c.B2, weight_decay=c.WEIGHT_DECAY)
    if c.MAX_GRAD_NORM:
        optimizer = optax.chain(optax.clip_by_global_norm(c.MAX_GRAD_NORM), optimizer)
    # Otherwise one NaN would spread to every weight and into the next checkpoint.
    # check_finite stops the run
    return optax.apply_if_finite(optimizer, max_consecutive_errors=num_updates)


# %% Training --------------------------------------------------------------------------------------
def to_batch(llm: Llm, samples: Samples, beta: float, method: variants.Method) -> Batch:
    """Moves the samples to the trainer's devices, each token with its advantage and weight in J."""
    batch = Batch(
        prompt_ids=samples.answers.prompt_ids,  # [B, G, P]
        completion_ids=samples.answers.completion_ids,  # [B, G, T]
        mask=samples.mask,  # [B, G, T]
        weight=method.weights(samples.mask),  # [B, G, T]
        advantage=method.advantage(samples),  # [B, G]
        beta=np.full(samples.rewards.shape, beta),  # [B, G]
        sampler_log_prob=samples.answers.sampler_log_prob,  # [B, G, T]
    )
    return llm.place(batch)  # NumPy [B, G, ...] to jax [passes, N / passes, ...]


# by field of `Method`: the constant that picks, and its functions; this page's is the default
TABLES = {
    "rollouts": ("ROLLOUTS", {"fresh": rollouts} | variants.ROLLOUTS),
    "advantage": ("ADVANTAGE", {"group": group_advantage} | variants.ADVANTAGES),
    "weights": ("LOSS_AGG_MODE", {"seq-mean-token-mean": mean_of_answers} | variants.WEIGHTS),
    "objective": ("LOSS_ALGO", {"grpo": clipped_objective} | variants.OBJECTIVES),
    "kl": ("KL_LOSS_MODE", {"low_var_kl": k3} | variants.KLS),
}


def train(c: Constants, llm: Llm, task: Task, run: TrainingRun) -> list[dict[str, float]]:
    """The loop: GRPO from the step of the newest checkpoint to the last one.

    Returns:
        One row of metrics per step, from its last update, as in `train_log.csv`; for tests and
        notebooks.

    Raises:
        KeyboardInterrupt: stopped by the user; a checkpoint is saved.
        UserError: a faulty reward function, a loss that isn't finite, a full disk.
    """
    method, optimizer = variants.choose(c, TABLES), make_optimizer(c)
    params, opt_state = run.restore(optimizer)
    for step in run.steps():  # from the newest checkpoint's; Ctrl-C ends them, with a checkpoint
        samples = method.rollouts(c, llm, task, run, step)
        batch = to_batch(llm, samples, run.beta, method)
        if c.BETA:  # else there's no reference model
            batch = batch._replace(ref_log_prob=llm.reference_log_probs(batch))
        if c.NUM_ITERATIONS > 1:
            batch = batch._replace(old_log_prob=llm.log_probs(batch))
        for _ in range(c.NUM_ITERATIONS):
            params, opt_state, metrics = update(
                params, opt_state, llm.model, batch, method, optimizer
            )
            run.check_finite(step, metrics)
        llm.load(params)  # the next answers come from the new weights
        # log, evaluation, checkpoint
        run.finish_step(step, samples, batch, params, opt_state, metrics)
    return run.log


# %% Evaluation, main ------------------------------------------------------------------------------
def evaluate(c: Constants, llm: Llm, task: Task, rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Asks every question once greedily and once as EVAL_CONFIG says, and grades the answers.

    Returns:
        Shares of right answers and each answer, as in `evaluation.grade`; the greedy ones as
        `greedy_...`.
    """
    results = {
        name: evaluation.grade(task.grader, rows, llm.answer(rows, name))
        for name in dict.fromkeys(("greedy", c.EVAL_CONFIG))  # once if EVAL_CONFIG is greedy
    }
    return evaluation.merge_greedy(results[c.EVAL_CONFIG], results["greedy"], rows)


def main(arguments: list[str]) -> None:
    """Evaluates, trains, evaluates; see the docstring of this file."""
    c = settings.read(Constants, arguments)
    if c.DRY_RUN:
        return dry_run.dry_run(c, arguments, reward_func, TABLES)
    # From here on, c also has this machine's defaults and MODEL's commit.
    with start.open_run(c, arguments, reward_func, TABLES) as (c, llm, task, folder):
        # not again by a resumed run
        folder.evaluate_once("before", lambda: evaluate(c, llm, task, task.test))
        with TrainingRun(c, llm, task, folder, evaluate) as run:
            train(c, llm, task, run)
        folder.evaluate_once("after", lambda: evaluate(c, llm, task, task.test))
        report.write(c, folder, task.sources["test"])


if __name__ == "__main__":
    settings.run(main)
