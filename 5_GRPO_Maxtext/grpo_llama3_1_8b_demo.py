"""GRPO on a language model: evaluate -> train -> evaluate, with MaxText, Tunix, Grain and Orbax.

One script, two sizes. `MODEL` is any Llama or Qwen3 checkpoint in Hugging Face's layout: by default the
tiny Llama in this folder (0.3 M parameters, laptop CPU), at full size `meta-llama/Llama-3.1-8B-Instruct` on a
TPU VM. Same code path; constants with two values take the column that fits the model.

The objective (DeepSeekMath, arXiv 2402.03300, eq. 3), for G answers o_1..o_G to one question q:

    J = mean_i mean_t [ min(ratio_it * A_i, clip(ratio_it, 1 - eps, 1 + eps) * A_i) - beta * KL_it ]
    A_i = (R_i - mean(R_1..R_G)) / std(R_1..R_G)        ratio_it = pi(o_it | q, o_i<t) / pi_old(...)

Not here, and why: no critic (the group's mean reward is the baseline: that is GRPO), no reward model (the
rewards are functions in reward_func.py), no replay (an answer is trained on NUM_ITERATIONS times and then
thrown away; with 1 ratio = 1 and the clip never binds), no loss on the prompt (only the answer is trained).

Read `group_advantage`, `grpo_loss`, `update` and `train`, the loop, first. What only serves the run is in
parts/; the tools are in tools/.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py                   # tiny Llama, 90 seconds on 2 cores
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py --help            # every constant with its remark
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py NUM_BATCHES=50 SEED=1
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py RUN_DIR=runs/mine     # again: continues where it stopped
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DATASET=mine REWARD_FUNC=my_reward.py
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k
"""

import contextlib
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import settings
from constants import Machine, Variants
from run import checks
from settings import BelowOne, Count, CountOrOff, NonNegative, Positive, Seed, Share, TwoOrMore, pair


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(Variants, Machine):
    """Edit a value here, or give it for one run as NAME=value. The other blocks: constants.py.

    laptop: MODEL's hidden size is below 1,024 (tiny Llama, CPU); tpu: Llama 3.1 8B on a TPU VM.
    """

    # --- the task
    MODEL: str = "tiny_llama"  # Hugging Face name, name@revision or folder; "tiny_llama" is in this folder
    DATASET: str = "tiny_gsm8k"  # folder, "gsm8k", .json, .jsonl or .parquet file; a.jsonl:0.7,b.jsonl:0.3
    TEST_DATASET: str = ""  # files as in DATASET, without weights (empty = the test split of DATASET)
    BAD_ROWS: Literal["refuse", "skip"] = "refuse"  # rows that cannot be used stop the run, or are left out
    REWARDS: str = ""  # names, comma-separated (empty = reward_func.py's four for GSM8K, else compute_score)
    REWARD_FUNC: str = ""  # Python file with your own compute_score, or with functions to name in REWARDS
    RUN_DIR: str = ""  # folder of the run; with a checkpoint in it the run continues (empty = a new folder)
    SEED: Seed = 0  # orders the questions and draws the answers; the weights come from MODEL
    DRY_RUN: bool = False  # True: check everything that can be checked, say what would happen, and stop
    SYSTEM_PROMPT: str = (
        "You are given a problem. Think about it and write your reasoning between <reasoning> and "
        "</reasoning>. Then give the final answer, one number and nothing else, between <answer> and "
        "</answer>."
    )  # what the model is asked to write; rewards that want <think> tags change the tags here, too
    TEMPLATE: str = pair(  # the tiny Llama learned its format from demonstrations; it knows no instructions
        laptop="{question}", tpu="{system_prompt}\n\n{question}"
    )  # the user's message, put inside the tokenizer's chat template
    # --- sampling
    MAX_PROMPT_LENGTH: Count = pair(laptop=28, tpu=256)  # tokens with template; longer questions are left out
    TOTAL_GENERATION_STEPS: TwoOrMore = pair(laptop=28, tpu=768)  # tokens per answer; longer ones are cut off
    TEMPERATURE: Positive = 1.0  # 1 = the policy itself; lower makes the G answers agree
    TOP_P: Share = 1.0  # (1 = off); below 1 the model trains on another distribution than it samples from
    TOP_K: int = -1  # (-1 = off); a cut, as by TOP_P, that training does not know of
    # --- GRPO
    BATCH_SIZE: Count = pair(laptop=16, tpu=64)  # questions per step; more: less noise, more memory and time
    NUM_GENERATIONS: TwoOrMore = 8  # G, answers per question; with few, many groups have no signal
    NUM_BATCHES: Count = pair(laptop=100, tpu=116)  # training steps, each on one batch of questions
    NUM_ITERATIONS: Count = pair(laptop=2, tpu=1)  # mu, updates per batch; above 1 the clip can bind
    EPSILON: NonNegative = 0.2  # clip range of the ratio; larger allows larger policy updates
    BETA: NonNegative = pair(laptop=0.08, tpu=0.001)  # weight of the KL to the starting model (0 = none)
    SAMPLER_CORRECTION: NonNegative = pair(laptop=0.0, tpu=2.0)  # cap of pi / pi_sampler per token (0 = off)
    # --- optimizer: AdamW, linear warm-up, cosine decay to 0
    LEARNING_RATE: NonNegative = pair(
        laptop=5e-4, tpu=3e-5
    )  # peak; for all weights of 8 B (LORA_RANK=0) 1e-6
    WARMUP_FRACTION: BelowOne = 0.1  # share of all steps (0 = off); the rest is for the decay
    MAX_GRAD_NORM: NonNegative = 1.0  # gradient clip; lower it if the KL runs away (0 = off)
    B1: BelowOne = 0.9  # decay of Adam's mean of the gradient; larger remembers longer
    B2: BelowOne = 0.99  # decay of Adam's mean of its square
    WEIGHT_DECAY: NonNegative = 0.1  # AdamW's pull to zero, times the learning rate (0 = off)
    MAX_NONFINITE_UPDATES: CountOrOff = 0  # updates in a row that may be NaN, skipped; one more stops
    LORA_RANK: CountOrOff = pair(
        laptop=0, tpu=32
    )  # r of A [in, r], B [r, out] beside a weight (0 = train all)
    LORA_ALPHA: Positive = pair(laptop=16.0, tpu=32.0)  # A B is added times LORA_ALPHA / LORA_RANK
    TRAIN_MICRO_BATCH_SIZE: CountOrOff = pair(laptop=0, tpu=2)  # questions per gradient pass (0 = all)
    # --- evaluation, checkpoints, log
    NUM_TEST_QUESTIONS: Count = pair(laptop=512, tpu=1_319)  # test questions, from the top of the test set
    EVAL_CONFIG: Literal["greedy", "standard", "liberal"] = "standard"  # how test answers are drawn
    EVAL_EVERY: CountOrOff = pair(laptop=25, tpu=20)  # steps between evaluations during training (0 = none)
    EVAL_QUESTIONS: Count = pair(laptop=128, tpu=512)  # held out for it; not trained on, not in the test
    LOG_ANSWERS_EVERY: CountOrOff = 10  # steps between those whose every answer is kept (0 = none)
    SAVE_INTERVAL_STEPS: Count = pair(laptop=50, tpu=20)  # steps between checkpoints
    MAX_TO_KEEP: Count = 4  # checkpoints kept; each has the trained weights and two Adam moments


# %% Imports ------------------------------------------------------------------------------------------------
if __name__ == "__main__":  # a constant that is wrong is refused here, before seconds of imports
    settings.refuse_early(Constants, checks.refuse)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm
from tunix.rl.rl_cluster import Mode, RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig

import grpo_variants
import reward_func
from model import devices, llama, turns
from model.cluster import batch_log_probs, first_moments, make_cluster, place, trainer_mesh
from model.log_probs import entropy_of, log_probs, mean_figures, token_figures
from model.rollout import GENERATION_CONFIGS, OneStepAhead, right_padded, rollout_config
from model.versions import check_versions
from run import answers, checkpoints, evaluation, health, memory, process, report, run_folder, train_log
from task import questions, run_grader, task_rewards
from task.prompts import make_prompts, read_data

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: a larger ratio would only overflow


# %% Prompts ------------------------------------------------------------------------------------------------
def training_batches(c: Constants, rows: list[dict[str, str]], start_step: int):
    """Batches of questions from training step `start_step` on, the sources mixed by weight."""
    size = c.BATCH_SIZE * (grpo_variants.CANDIDATES if c.CURRICULUM else 1)
    return questions.mixed_batches(rows, c.SEED, size)[start_step : c.NUM_BATCHES]


def refill_batches(c: Constants, rows: list[dict[str, str]], step: int):
    """Other questions for a step whose groups lacked a signal; the same after a resume."""
    batches = questions.mixed_batches(rows, c.SEED + grpo_variants.REFILL_SEED, c.BATCH_SIZE)
    return (batches[step * grpo_variants.MAX_REFILLS + i] for i in range(grpo_variants.MAX_REFILLS))


# %% GRPO ---------------------------------------------------------------------------------------------------
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


def token_ratio(log_prob, old_log_prob, mask):
    """ratio_t = pi(o_t) / pi_old(o_t), of each token [N, T]."""
    return jnp.exp(jnp.clip(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_objective(ratio, A, log_prob, epsilon: float, epsilon_high: float):
    """min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A), and which tokens the clip changes; [N, T] both."""
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon_high)
    return jnp.minimum(ratio * A, clipped * A), clipped * A < ratio * A


def truncated_weight(log_prob, sampler_log_prob, mask, cap: float):
    """min(pi / pi_sampler, cap): drawn from pi_sampler, meant over pi (arXiv 1802.01561, section 4.1)."""
    return jnp.minimum(token_ratio(log_prob, sampler_log_prob, mask), cap)  # [N, T]


def k3(log_ref_ratio):
    """KL_t = pi_ref / pi - log(pi_ref / pi) - 1, never negative (arXiv 2402.03300, eq. 4); [N, T]."""
    return jnp.expm1(log_ref_ratio) - log_ref_ratio  # exp(x) - 1 would lose its digits near 0


def token_mean(values, mask, limit: int):
    """mean_t: the mean over an answer's tokens, [N, T] to [N]."""
    return (values * mask).sum(axis=1) / mask.sum(axis=1).clip(1)


def count_answers(mask):
    """What mean_i divides by: the answers of which a token counts, []."""
    return mask.any(axis=-1).sum()


PLAIN = grpo_variants.Pieces(  # a constant of constants.py exchanges one; grpo_variants.py
    group_advantage, token_ratio, clipped_objective, truncated_weight, k3, token_mean, count_answers
)


class Batch(NamedTuple):
    """What an update is fed: N = B * G answers in gradient passes, [passes, N / passes, ...].

    A gradient pass, and `grpo_loss`, see [N, ...] with the N of the pass.
    """

    prompt_ids: jax.Array  # int32 [N, P], left-padded
    completion_ids: jax.Array  # int32 [N, T], right-padded
    completion_mask: jax.Array  # bool [N, T]: what is trained; up to end-of-sequence, without a world's words
    advantages: jax.Array  # float32 [N]; with RETURN_TO_GO [N, T]
    sampler_log_prob: jax.Array  # float32 [N, T], under the distribution that the tokens were drawn from
    ref_log_prob: jax.Array | None = None  # float32 [N, T] under the frozen reference; None without KL
    old_log_prob: jax.Array | None = None  # float32 [N, T] under pi_old; None: each answer is used once


def grpo_loss(model, batch: Batch, beta, temperature, count, c: Constants, pad_id: int):
    """Minus the objective J on top of this file, for the N answers of a gradient pass.

    Args:
        model: the policy pi.
        batch: the pass.
        beta: weight of the KL, [].
        temperature: that the answers were drawn with, [].
        count: answers of all passes, []: what the sum is divided by, so that passes add up to the mean.
        c: the constants.
        pad_id: padding token.

    Returns:
        The pass's share of the loss [], float32, and figures for the log.
    """
    use = grpo_variants.pieces(c, PLAIN)
    mask = batch.completion_mask  # [N, T]: padding never counts
    A = batch.advantages.reshape(len(mask), -1)  # [N, 1]: every token gets its answer's advantage; or [N, T]
    log_prob, logits = log_probs(
        model, batch.prompt_ids, batch.completion_ids,
        pad_id=pad_id, temperature=temperature, logits_clip=c.LOGITS_CLIP, num_generations=c.NUM_GENERATIONS,
    )  # [N, T], [N, T, V]  # fmt: skip
    old_log_prob = batch.old_log_prob  # None: each answer is trained on once, then pi_old is pi
    if old_log_prob is None:
        old_log_prob = jax.lax.stop_gradient(log_prob)

    ratio = use.ratio(log_prob, old_log_prob, mask)  # [N, T]
    objective, clipped = use.objective(ratio, A, log_prob, c.EPSILON, c.EPSILON_HIGH or c.EPSILON)  # [N, T]
    if c.SAMPLER_CORRECTION:
        objective *= use.weight(old_log_prob, batch.sampler_log_prob, mask, c.SAMPLER_CORRECTION)

    kl = jnp.zeros_like(log_prob)
    if batch.ref_log_prob is not None:
        kl = use.kl((batch.ref_log_prob - log_prob) * mask)  # [N, T]; exp of padding's might overflow
        objective -= beta * kl
    if c.ENTROPY_COEF:  # Mnih et al., arXiv 1602.01783, section 4
        objective += c.ENTROPY_COEF * entropy_of(logits)

    J = use.answer_sum(objective, mask, c.TOTAL_GENERATION_STEPS).sum() / count  # mean_i mean_t
    return -J, token_figures(mask, old_log_prob, batch.sampler_log_prob, clipped, kl, logits)


@functools.partial(jax.jit, static_argnames=("c", "pad_id"), donate_argnames=("weights", "moments"))
def update(graphdef, weights, frozen, moments, batch: Batch, beta, temperature, c: Constants, pad_id: int):
    """One optimizer update.

    Args:
        graphdef: structure of the model.
        weights: what is trained; with LoRA A and B.
        frozen: the rest of the model's state.
        moments: the optimizer's state.
        batch: the step's answers in gradient passes.
        beta, temperature, c, pad_id: as in `grpo_loss`.

    Returns:
        Weights and moments after it; the loss and the norm of the whole gradient, []; the passes' figures.
    """
    count = grpo_variants.pieces(c, PLAIN).count(batch.completion_mask).clip(1)

    def one_pass(batch):
        def loss(weights):
            model = nnx.merge(graphdef, weights, frozen, copy=True)
            return grpo_loss(model, batch, beta, temperature, count, c, pad_id)

        (value, figures), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return gradient, (value, figures)

    def add_pass(total, batch):
        gradient, rest = one_pass(batch)
        return jax.tree.map(jnp.add, total, gradient), rest

    if len(batch.advantages) == 1:  # a single pass keeps no sum of gradients beside its own
        gradient, (losses, figures) = one_pass(jax.tree.map(lambda x: x[0], batch))
    else:
        zeros = jax.tree.map(jnp.zeros_like, weights)
        gradient, (losses, figures) = jax.lax.scan(add_pass, zeros, batch)
    changes, moments = make_optimizer(c).update(gradient, moments, weights)
    return optax.apply_updates(weights, changes), moments, losses.sum(), optax.global_norm(gradient), figures


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
    c: Constants, rollout, rows: Sequence[dict[str, str]], grader, config_name: str
) -> dict[str, Any]:
    """Asks every question once and grades the answers.

    Args:
        rollout: any Tunix rollout engine.
        rows: from `make_prompts`.
        grader: from `run_grader.make_grader`.
        config_name: entry of GENERATION_CONFIGS in model/rollout.py.

    Returns:
        As `evaluation.figures`.
    """
    prompts = [row["prompts"] for row in rows]
    chunk = c.BATCH_SIZE * c.NUM_GENERATIONS
    if c.ROLLOUT_ENGINE == "vllm":  # it makes up its batches itself
        chunk = len(prompts)
    texts, lengths, cut_off = [], [], []
    starts = range(0, len(prompts), chunk)
    for start in tqdm(starts, f"evaluate, {config_name}", leave=None, disable=devices.no_bar()):
        # The same noise before and after training: what differs is the model.
        seed = jax.random.fold_in(jax.random.key(c.SEED + 1), start)
        if c.ROLLOUT_ENGINE == "vllm":  # takes no seed per request
            seed = None
        part, config = slice(start, start + chunk), sampling(c, config_name, seed=seed)
        if c.ENVIRONMENT:
            asked = [row["question"] for row in rows[part]]
            output = turns.walk(c, rollout, prompts[part], asked, config)
        else:
            output = rollout.generate(prompts[part], config)
        texts += output.text
        lengths += [len(tokens) for tokens in output.tokens]
        cut_off += (~turns.ended(output, rollout.eos_id())).tolist()

    return evaluation.figures(grader, rows, texts, lengths, cut_off)


def evaluate_both(c: Constants, rollout, rows: Sequence[dict[str, str]], grader) -> dict[str, Any]:
    """`evaluate` with EVAL_CONFIG; the greedy figures and lists as `greedy_...`; and what was `asked`."""
    greedy = evaluate(c, rollout, rows, grader, "greedy")
    result = greedy if c.EVAL_CONFIG == "greedy" else evaluate(c, rollout, rows, grader, c.EVAL_CONFIG)
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
    # One NaN would otherwise be in every weight, and in the next checkpoint. `count_nonfinite` stops the
    # run before optax gives up skipping.
    return optax.apply_if_finite(optimizer, max_consecutive_errors=c.MAX_NONFINITE_UPDATES + updates)


class Drawn(NamedTuple):
    """Answers to B questions, graded; N = B * G rows, the G answers to a question side by side."""

    asked: dict[str, np.ndarray]  # columns of the questions, str [N]
    prompt_ids: np.ndarray  # int32 [N, P], left-padded
    completion_ids: np.ndarray  # int32 [N, T], right-padded
    sampler_log_prob: np.ndarray  # float32 [N, T]
    texts: np.ndarray  # str [N]
    lengths: np.ndarray  # tokens, int [N]
    turn: np.ndarray  # of each token the turn it belongs to, int32 [N, T]; -1: a world's, or padding
    ended: np.ndarray  # whether there is an end-of-sequence token, or the world ended it, bool [N]
    points: dict[str, np.ndarray]  # by reward function, float [N]
    rewards: np.ndarray  # their sum, float [N]


def ask(
    c: Constants, columns: dict[str, np.ndarray], generate, walk, rewards, pad_id: int, eos_id: int
) -> Drawn:
    """Asks each of B questions G times, and grades the answers.

    Args:
        columns: of the questions [B], as `training_batches` gives them.
        generate: of prompts [B * G], Tunix's `RolloutOutput`.
        walk: of prompts and questions [B * G], the same with the turns of ENVIRONMENT, where there is one.
        rewards: functions, each one float per answer.
        pad_id, eos_id: padding and end-of-sequence token.
    """
    asked = {name: np.repeat(column, c.NUM_GENERATIONS) for name, column in columns.items()}  # [B * G]
    prompts = asked["prompts"].tolist()
    output = walk(prompts, asked["question"].tolist()) if c.ENVIRONMENT else generate(prompts)
    points = {
        reward.__name__: np.array(reward(completions=output.text, completion_ids=output.tokens, **asked))
        for reward in rewards
    }  # [B * G] each
    return Drawn(
        asked,
        np.asarray(output.left_padded_prompt_tokens),
        right_padded(output.tokens, c.TOTAL_GENERATION_STEPS, pad_id, np.int32),
        right_padded(output.logprobs, c.TOTAL_GENERATION_STEPS, 0.0, np.float32),
        np.array(output.text, dtype=object),
        np.array([len(tokens) for tokens in output.tokens]),
        turns.turns_of(output, c.TOTAL_GENERATION_STEPS),
        turns.ended(output, eos_id),
        points,
        np.sum(list(points.values()), axis=0),
    )


def to_batch(c: Constants, cluster: RLCluster, drawn: Drawn, advantages: np.ndarray) -> Batch:
    """The answers on the devices that train, in gradient passes: a `Batch` without pi_ref and pi_old.

    On one CPU the columns that no answer uses are left out, in four widths: each is a program of its own.
    """
    width = llama.used_columns(cluster.actor_trainer.model, c.TOTAL_GENERATION_STEPS, drawn.lengths.max())
    counts = grpo_variants.what_counts(c, drawn.rewards, drawn.ended)  # [N]
    mask = (drawn.turn[:, :width] >= 0) & counts[:, None]  # [N, T]
    if c.RETURN_TO_GO:
        advantages = advantages[:, :width]
    arrays = Batch(
        drawn.prompt_ids, drawn.completion_ids[:, :width], mask,
        advantages.astype(np.float32), drawn.sampler_log_prob[:, :width],
    )  # fmt: skip
    return place(cluster, arrays, c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE))


def train(
    c: Constants,
    cluster: RLCluster,
    grader,
    rows: list[dict[str, str]],
    run: run_folder.Run,
    validation_rows: Sequence[dict[str, str]] = (),
) -> list[dict[str, float]]:
    """The loop: GRPO from the step of the newest checkpoint to the last.

    Every EVAL_EVERY steps `validation_rows` are asked. Ctrl-C (or SIGTERM) ends the loop after the step in
    progress, with a checkpoint.

    Returns:
        One row of figures per step, as in `train_log.csv`.

    Raises:
        KeyboardInterrupt: stopped by the user, checkpoint saved.
        UserError: a faulty reward function, a loss that is not finite, a full disk.
    """
    rewards, use = grpo_variants.reward_functions(c, grader.functions), grpo_variants.pieces(c, PLAIN)
    pad_id, eos_id = cluster.rollout.pad_id(), cluster.rollout.eos_id()
    model = cluster.actor_trainer.model
    reference = cluster.inference_worker.get_model("reference") if c.BETA else None  # or the TEACHER
    trained = nnx.LoRAParam if c.LORA_RANK else nnx.Param
    graphdef, weights, frozen = nnx.split(model, trained, ...)
    weights = nnx.to_pure_dict(weights)
    moments = first_moments(cluster, make_optimizer(c), weights)
    manager = checkpoints.open_manager(run.checkpoints, c.MAX_TO_KEEP)
    start, loop = manager.latest_step() or 0, {"beta": c.BETA, "ahead": None}
    if start:
        weights, moments, loop = checkpoints.restore(manager, start, weights, moments)
        nnx.update(model, weights)
        cluster.rollout.update_params(nnx.state(model, trained), (trained,))
    cluster.global_steps = start  # the sampling key of a step follows from it
    beta, pass_rates, nonfinite = loop["beta"], loop.get("pass_rates", {}), 0
    ahead = None
    if c.OFF_POLICY_STEPS:
        ahead = OneStepAhead(cluster, training_batches(c, rows, 0), c, loop["ahead"])
    log = train_log.TrainingLog(run.logs, c, start)
    answers.keep_lines(run.logs / "answers.jsonl", start)

    def held_out(done: int) -> dict[str, float]:
        if not validation_rows or not log.evaluation_due(done):
            return {}
        return log.add_evaluation(done, evaluate_both(c, cluster.rollout, validation_rows, grader))

    def save(done: int) -> None:
        loop = {"beta": beta, "ahead": ahead.to_json() if ahead else None, "pass_rates": pass_rates}
        checkpoints.save(manager, done, weights, moments, loop, c)

    with (
        process.full_disk(run.folder),
        contextlib.closing(manager),
        contextlib.closing(log),
        process.stop_after_step() as stop,
    ):
        held_out(start)
        steps = enumerate(training_batches(c, rows, start), start)
        for step, batch_of_questions in process.traced(steps, c.PROFILE_DIR):
            if not devices.all_agree(not stop.is_set()):
                save(step)
                raise KeyboardInterrupt
            started, done = time.perf_counter(), step + 1
            temperature = grpo_variants.temperature_of(c, step)
            config = cluster.get_rollout_config(Mode.TRAIN)
            config.temperature = temperature

            # Each question G times; the answers, and what each earns.
            generate = functools.partial(ahead.take, step) if ahead else cluster.generate
            walk = functools.partial(turns.walk, c, cluster.rollout, config=config)
            asking = functools.partial(
                ask, c, generate=generate, walk=walk, rewards=rewards, pad_id=pad_id, eos_id=eos_id
            )
            with process.kept(save, step):
                if c.CURRICULUM:
                    batch_of_questions = grpo_variants.half_right(
                        batch_of_questions, pass_rates, c.BATCH_SIZE
                    )
                drawn = all_drawn = asking(batch_of_questions)
                if c.CURRICULUM:
                    pass_rates |= grpo_variants.rates_of(drawn, grader, c.NUM_GENERATIONS)
                if c.ZERO_VARIANCE_GROUPS == "refill":
                    others = map(asking, refill_batches(c, rows, step))
                    drawn, all_drawn = grpo_variants.filled_up(c, drawn, others)

            # Each answer against its group.
            advantages = use.advantage(drawn.rewards, c.NUM_GENERATIONS)  # [B * G]
            if finer := grpo_variants.finer_advantage(
                c, PLAIN
            ):  # each reward or turn against the same: [N, T]
                advantages = finer(drawn, c.NUM_GENERATIONS)
            if c.ADVANTAGE_CLIP:
                advantages = np.clip(advantages, -c.ADVANTAGE_CLIP, c.ADVANTAGE_CLIP)

            # Log-probs of the reference, and of pi_old where answers are used again; NUM_ITERATIONS updates.
            with trainer_mesh(cluster):
                batch = to_batch(c, cluster, drawn, advantages)  # [passes, N / passes, ...]
                under = functools.partial(batch_log_probs, c, batch, temperature, pad_id)
                kept = answers.keeps(c, done)
                if c.BETA:
                    batch = batch._replace(ref_log_prob=under(reference))
                before = under(model) if kept or c.NUM_ITERATIONS > 1 else None
                if c.NUM_ITERATIONS > 1:
                    batch = batch._replace(old_log_prob=before)
                for _ in range(c.NUM_ITERATIONS):
                    weights, moments, loss, grad_norm, figures = update(
                        graphdef, weights, frozen, moments, batch, beta, temperature, c, pad_id
                    )
                    nnx.update(model, weights)
                    nonfinite = train_log.count_nonfinite(c, done, nonfinite, float(loss), float(grad_norm))
            # The new weights to the sampler. Not `cluster.sync_weights`: it also copies them all to the host.
            if ahead:
                ahead.wait()  # the answers being drawn are the old weights' to the end
            cluster.rollout.update_params(nnx.state(model, trained), (trained,))
            cluster.global_steps = done

            # What the step leaves: a row of the log, its answers, a checkpoint.
            row = {
                "step": done,
                "beta": beta,
                "temperature": temperature,
                "loss": loss,
                "grad_norm": grad_norm,
            }
            row |= mean_figures(figures) | process.memory_gib()
            if not c.BETA:
                row["kl"] = math.nan  # not measured is not zero
            seconds = time.perf_counter() - started
            row |= train_log.answer_figures(grader, all_drawn, c.NUM_GENERATIONS, seconds)
            if kept:
                with trainer_mesh(cluster):
                    log_prob = {"before": before, "after": under(model), "reference": batch.ref_log_prob}
                answers.append_step(
                    run.logs / "answers.jsonl", c, cluster.tokenizer, grader, drawn, batch, row, log_prob
                )
            log.add(row | held_out(done))
            beta = grpo_variants.adaptive_beta(beta, c.TARGET_KL, row["kl"])
            if done % c.SAVE_INTERVAL_STEPS == 0 or done == c.NUM_BATCHES:
                save(done)
    return log.rows


# %% Main ---------------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """Evaluates, trains, evaluates; see the module's docstring."""
    c = settings.read(Constants, arguments)
    checks.refuse(c)
    settings.quiet()
    check_versions()
    process.keep_compiled()
    grpo_variants.check_method(c, PLAIN)
    if c.DRY_RUN:
        from run import dry_run

        return dry_run.dry_run(c, reward_func)
    folder, hf = llama.load_hf_config(c.MODEL)
    c = replace(c, MODEL=llama.pinned(c.MODEL, folder))
    tokenizer = llama.load_tokenizer(folder)
    data = read_data(c, None if c.REWARD_FUNC else task_rewards.ground_truth_fault)
    everything = [question for asked, _ in data.values() for question in asked]
    grader = run_grader.make_grader(checks.rewards_of(c), c.REWARD_FUNC, reward_func, everything)
    checks.rollout_engine(c)
    checks.model(c, hf)
    llama.check_teacher(c, tokenizer)
    if c.ENVIRONMENT:
        turns.load(c.ENVIRONMENT)

    with devices.all_hosts(c):
        devices.plan_devices(c, hf, jax.devices())  # refuses before anything is written
        devices.check_attention(c)
        with run_folder.open_run(c, arguments) as run:
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
            cluster = make_cluster(c, folder, hf, tokenizer, functools.partial(sampling, c))
            parameters = llama.count_parameters(cluster.actor_trainer.model)
            memory.check_disk(c, memory.trained_parameters(c, hf, parameters), run.checkpoints)
            done = max(checkpoints.saved(run.checkpoints), default=0)  # by an earlier process
            report.introduce(c, run, cluster, folder, hf, grader, rows, sources, done)

            ask_test = functools.partial(evaluate_both, c, cluster.rollout, rows["test"], grader)
            before = run.once("before", ask_test, done)
            log = train(c, cluster, grader, rows["train"], run, rows["validation"])
            after = run.once("after", ask_test)
            lines = health.history(log, asdict(c))
            report.write(c, run, before, after, log, sources["test"], lines, done)


if __name__ == "__main__":
    settings.run(main)
