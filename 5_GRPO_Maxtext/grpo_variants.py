"""Alternatives to plain GRPO. Each is a complete function that replaces one on the main script's
page.

One constant picks from each of the page's five tables: ROLLOUTS, ADVANTAGE, LOSS_AGG_MODE,
LOSS_ALGO and KL_LOSS_MODE. You can read each function on its own, next to its paper's formula.
Options that combine with all of them (a sampler correction, an entropy bonus, filters) wrap the
function you picked; see `choose`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from constants import RunConstants
from model.llm import Llm, Pi
from settings import UserError, find_path
from task.questions import mixed_batches, question_key
from task.run_grader import call_user_code, load_file, on_copies
from task.task import Samples, Task, differ

MAX_LOG_RATIO = 20.0  # per token, as on the page: ratios stay below exp(20) = 5e8
MAX_LOG_SEQUENCE_RATIO = 10.0  # per answer: GSPO's mean over the tokens
CANDIDATES = 2  # `curriculum` picks from CANDIDATES * BATCH_SIZE questions
MAX_REFILLS = 4  # batches of replacement questions per step; each costs a step's generation
REFILL_SEED = 1_000_003  # added to SEED, so replacement questions come in a different order


# %% ROLLOUTS: the Samples [B, G, ...] of a step; `run` is a TrainingRun of run/training.py --------
def sample(llm: Llm, task: Task, questions: dict[str, np.ndarray], step: int) -> Samples:
    """G answers to each of these questions (columns [B]), graded: `Samples` [B, G, ...]."""
    repeated = task.repeat(questions)
    return task.grade(repeated, llm.generate(repeated, step))


def one_step_ahead(c: RunConstants, llm: Llm, task: Task, run, step: int) -> Samples:
    """Samples the next step's answers while a step trains, with the weights from before the update.

    (Noukhovitch et al., arXiv 2410.18252.) A checkpoint keeps the answers sampled ahead, because a
    resumed run no longer has the weights they came from.
    """
    ahead = llm.sampled_ahead(run.carried)
    questions = task.repeat(task.batches[step])
    answers = ahead.take(questions, step)
    # `step` sets the temperature that the update below trains with, too
    if step + 1 < c.NUM_BATCHES:
        ahead.begin(task.repeat(task.batches[step + 1]), step)
    return task.grade(questions, answers)


def curriculum(c: RunConstants, llm: Llm, task: Task, run, step: int) -> Samples:
    """Asks the B out of CANDIDATES * B questions whose last pass rate is closest to 1/2.

    They teach the most: p (1 - p), the variance of a 0/1 reward, peaks there and is 0 when all
    answers agree. New questions count as 1/2 and keep their order.
    """
    rates = run.carried.setdefault("pass_rates", {})  # by question
    candidates = mixed_batches(task.train, c.SEED, c.BATCH_SIZE * CANDIDATES)[step]  # columns, str
    distance = [
        abs(rates.get(question_key(question), 0.5) - 0.5)
        for question in candidates["question"].tolist()
    ]
    closest = np.sort(np.argsort(distance, kind="stable")[: c.BATCH_SIZE])
    questions = {name: column[closest] for name, column in candidates.items()}
    samples = sample(llm, task, questions, step)
    asked = map(question_key, questions["question"].tolist())  # [B]
    rates.update(zip(asked, task.right(samples).mean(axis=1).tolist(), strict=True))
    return samples


ROLLOUTS = {"one-step-ahead": one_step_ahead, "curriculum": curriculum}


# %% ADVANTAGE: of Samples [B, G, ...]; float [B, G], or [B, G, T] per token -----------------------
def centered_advantage(samples):
    """Dr. GRPO (arXiv 2503.20783): A_i = R_i - mean(R_1..R_G), not divided by the std."""
    rewards = samples.rewards  # [B, G]
    return rewards - rewards.mean(axis=1, keepdims=True)


def leave_one_out_advantage(samples):
    """RLOO (arXiv 2402.14740): A_i = R_i - mean of the rewards of the other G - 1 answers."""
    rewards = samples.rewards  # [B, G]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def maxrl_advantage(samples):
    """MaxRL (arXiv 2602.02710): A_i = (R_i - mean) / mean, for rewards that are never negative.

    With 0/1 rewards it's an unbiased gradient of log p, up to its term pass@(G - 1), where R - mean
    gives the gradient of p. The fewer answers are right, the more each one counts. 0 if no answer
    is right.
    """
    rewards = samples.rewards  # [B, G]
    if (least := rewards.min()) < 0:
        raise UserError(
            f"ADVANTAGE=maxrl: divides by the mean reward, and one is {least:g}; take rewards that "
            "are never negative, such as REWARDS=correctness_reward"
        )
    mean = rewards.mean(axis=1, keepdims=True)  # [B, 1]
    return (rewards - mean) / np.where(mean > 0, mean, 1.0)


def decoupled_advantage(samples):
    """GDPO (arXiv 2601.05242): normalizes each reward within its group, then their sum over the
    batch.

    It can tell apart two answers that earn the same sum from different rewards; the group advantage
    can't.
    """
    parts = np.stack(list(samples.reward_parts.values()))  # [F, B, G], of F reward functions
    mean, std = parts.mean(axis=2, keepdims=True), parts.std(axis=2, ddof=1, keepdims=True)
    total = ((parts - mean) / (std + 1e-6)).sum(axis=0)  # [B, G]
    return (total - total.mean()) / (total.std(ddof=1) + 1e-6)


def no_advantage(samples):
    """Distillation: rewards are only logged; the KL to the TEACHER is the whole training signal."""
    return np.zeros_like(samples.rewards)


def turn_advantage(samples):
    """Return-to-go per turn, normalized within a question's group: A_ik = (R_ik - mean_i R_ik) /
    std.

    R_ik is answer i's reward from turn k on (the return-to-go of chapter 3). The mean is over the
    answers that got that far, the std over all turns of the group around their means. [B, G, T]; 0
    for tokens the model didn't write.
    """
    centered, reached = centered_turns(samples)  # [B, G, K]
    means = reached.any(axis=1).sum(axis=1)  # [B], one for each turn that an answer reached
    dof = reached.sum(axis=(1, 2)) - means  # [B]
    std = np.sqrt((centered**2).sum(axis=(1, 2)) / dof.clip(1))  # [B]
    return per_token(centered / (std[:, None, None] + 1e-6), samples.answers.turn)


def centered_turns(samples):
    """R_ik - mean_i R_ik, and whether answer i reached turn k: [B, G, K] each, K the most turns."""
    episodes = samples.answers.episodes  # [B, G]
    to_go = np.full((*episodes.shape, samples.answers.turn.max() + 1), np.nan)  # [B, G, K]
    for place, episode in np.ndenumerate(episodes):
        to_go[place][: len(episode.to_go)] = episode.to_go
    reached = ~np.isnan(to_go)
    if "episode_return" in samples.reward_parts:  # other rewards come at the end of the episode
        to_go = to_go + (samples.rewards - samples.reward_parts["episode_return"])[..., None]
    else:  # the environment's own rewards don't count
        to_go = np.where(reached, samples.rewards[..., None], np.nan)
    # [B, 1, K]
    mean = np.nansum(to_go, axis=1, keepdims=True) / reached.sum(axis=1, keepdims=True).clip(1)
    return np.where(reached, to_go - mean, 0.0), reached


def per_token(per_turn, turn):
    """Spreads [B, G, K] per turn to [B, G, T] per token; 0 where `turn` is -1."""
    return np.take_along_axis(per_turn, turn.clip(0), axis=2) * (turn >= 0)


ADVANTAGES = {
    "centered": centered_advantage,
    "rloo": leave_one_out_advantage,
    "maxrl": maxrl_advantage,
    "gdpo": decoupled_advantage,
    "none": no_advantage,
    "turn": turn_advantage,
}


# %% LOSS_AGG_MODE: of the mask, bool [B, G, T]; a weight per token, float [B, G, T] ---------------
def mean_of_tokens(mask):
    """DAPO (arXiv 2503.14476, eq. 8): every token counts the same, here across the step, not per
    group.
    """
    return mask / mask.sum().clip(1)


def sum_of_tokens(mask):
    """Sums over an answer's tokens, so a long answer counts more."""
    return mask / mask.any(axis=-1).sum().clip(1)


def sum_by_limit(mask):
    """Dr. GRPO (arXiv 2503.20783): divides each answer's sum by the limit T, not by its length."""
    return mask / mask.shape[-1] / mask.any(axis=-1).sum().clip(1)


WEIGHTS = {
    "token-mean": mean_of_tokens,
    "seq-mean-token-sum": sum_of_tokens,
    "seq-mean-token-sum-norm": sum_by_limit,
}


# %% LOSS_ALGO: of pi, batch and constants; the objective [N, T], and the tokens the clip changes -
def clip_higher_objective(pi: Pi, batch, c: RunConstants) -> tuple[jax.Array, jax.Array]:
    """DAPO's clip-higher (arXiv 2503.14476, eq. 10): the clip has a separate upper bound.

    min(ratio * A, clip(ratio, 1 - eps, 1 + eps_high) * A)
    """
    ratio = jnp.exp(jnp.clip(pi.log_prob - batch.old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1 - c.EPSILON, 1 + c.EPSILON_HIGH)
    objective = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    return objective, clipped * batch.advantage < ratio * batch.advantage


def gspo_objective(pi: Pi, batch, c: RunConstants) -> tuple[jax.Array, jax.Array]:
    """GSPO-token (arXiv 2507.18071, eq. 14): the answer's mean ratio with per-token gradients.

    s_it = sg(s_i) * pi_it / sg(pi_it)        s_i = exp(mean_t log ratio_it)
    """
    tokens = batch.mask.sum(axis=1, keepdims=True).clip(1)  # [N, 1]
    # [N, 1]
    mean = ((pi.log_prob - batch.old_log_prob) * batch.mask).sum(axis=1, keepdims=True) / tokens
    # 0, with log_prob's gradient
    straight_through = pi.log_prob - jax.lax.stop_gradient(pi.log_prob)
    ratio = jnp.exp(
        jnp.clip(straight_through + jax.lax.stop_gradient(mean), max=MAX_LOG_SEQUENCE_RATIO)
    )
    clipped = jnp.clip(ratio, 1 - c.EPSILON, 1 + (c.EPSILON_HIGH or c.EPSILON))
    objective = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
    return objective, clipped * batch.advantage < ratio * batch.advantage


OBJECTIVES = {"dapo": clip_higher_objective, "gspo-token": gspo_objective}


# %% KL_LOSS_MODE: of log pi_ref - log pi, [N, T] --------------------------------------------------
def k1(log_ref_ratio):
    """The plain estimator (joschu.net/blog/kl-approx.html): log pi - log pi_ref; its mean gradient
    is 0.
    """
    return -log_ref_ratio


def k2(log_ref_ratio):
    """Half the squared log-ratio (same source)."""
    return log_ref_ratio**2 / 2


KLS = {"kl": k1, "mse_kl": k2}


# %% Options that combine with every method --------------------------------------------------------
def has_signal(advantage, samples):
    """Whether a group's advantages differ by more than rounding: bool [B]."""
    return differ(advantage(samples))


def selected(method: "Method", c: RunConstants, llm: Llm, task: Task, run, step: int) -> Samples:
    """The samples of `method.rollouts`, without what isn't to be trained on.

    ZERO_VARIANCE_GROUPS=refill replaces groups without a signal; it and skip mask those that
    remain, also for the KL. MASK_OVERLONG masks cut-off answers (DAPO's overlong filter, arXiv
    2503.14476, section 3.4).
    """
    samples = method.rollouts(c, llm, task, run, step)
    if c.ZERO_VARIANCE_GROUPS == "refill":
        samples = refilled(samples, method.advantage, c, llm, task, step)
    mask = samples.mask  # [B, G, T]
    if c.ZERO_VARIANCE_GROUPS != "keep":
        mask = mask & has_signal(method.advantage, samples)[:, None, None]
    if c.MASK_OVERLONG:
        mask = mask & samples.answers.ended[..., None]
    return samples._replace(mask=mask)


def refilled(
    samples: Samples, advantage: Callable, c: RunConstants, llm: Llm, task: Task, step: int
) -> Samples:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): asks other questions, at most
    MAX_REFILLS batches, until B groups have a signal. No question is asked twice in a step.

    Returns:
        The groups with a signal first, in order; its `sampled` are all sampled groups, for the log.
    """
    others = mixed_batches(task.train, c.SEED + REFILL_SEED, c.BATCH_SIZE)  # by number: columns [B]
    asked = set(map(question_key, samples.questions["question"][:, 0].tolist()))
    for i in range(step * MAX_REFILLS, (step + 1) * MAX_REFILLS):
        if has_signal(advantage, samples).sum() >= c.BATCH_SIZE:
            break
        keys = list(map(question_key, others[i]["question"].tolist()))  # [B]
        new = [j for j, key in enumerate(keys) if key not in asked and key not in keys[:j]]
        if not new:
            continue  # with fewer questions than a step's refills
        asked.update(keys)
        questions = {name: column[new] for name, column in others[i].items()}
        samples = samples.joined(sample(llm, task, questions, step))
    first = np.argsort(~has_signal(advantage, samples), kind="stable")[: c.BATCH_SIZE]
    return samples.groups(first)._replace(sampled=samples)


def truncated_weight(batch, cap):
    """min(pi_old / pi_sampler, cap), truncated importance weight (arXiv 1802.01561, sec. 4.1)."""
    log_ratio = jnp.clip(batch.old_log_prob - batch.sampler_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.minimum(jnp.exp(log_ratio), cap)


def extended_objective(objective, pi: Pi, batch, c: RunConstants) -> tuple[jax.Array, jax.Array]:
    """Weights an objective by pi_old / pi_sampler (SAMPLER_CORRECTION), and adds ENTROPY_COEF *
    entropy (Mnih et al., arXiv 1602.01783, section 4).
    """
    value, clipped = objective(pi, batch, c)
    if c.SAMPLER_CORRECTION:
        value = value * truncated_weight(batch, c.SAMPLER_CORRECTION)
    if c.ENTROPY_COEF:
        value = value + c.ENTROPY_COEF * pi.entropy
    return value, clipped


# %% Choosing a run's functions --------------------------------------------------------------------
class Method(NamedTuple):
    """One function per table, with the options around it, and the constants."""

    rollouts: Callable[..., Samples]  # (c, llm, task, run, step): Samples [B, G, ...]
    advantage: Callable[..., Any]  # (samples): [B, G] or [B, G, T]
    weights: Callable[..., Any]  # (mask [B, G, T]): [B, G, T]
    objective: Callable[..., Any]  # (pi, batch, c): [N, T], bool [N, T]
    kl: Callable[..., Any]  # (log_ref_ratio [N, T]): [N, T]
    c: RunConstants | None = None


def choose(c: RunConstants, tables: dict[str, tuple[str, dict[str, Callable]]]) -> Method:
    """The functions the constants select; METHOD's file overrides the tables."""
    picked = {field: table[getattr(c, constant)] for field, (constant, table) in tables.items()}
    method = Method(**(picked | own_functions(c.METHOD)), c=c)
    wrapped = {}
    if c.ZERO_VARIANCE_GROUPS != "keep" or c.MASK_OVERLONG:
        wrapped["rollouts"] = functools.partial(selected, method)
    if limit := c.ADVANTAGE_CLIP:
        wrapped["advantage"] = lambda samples: np.clip(method.advantage(samples), -limit, limit)
    if c.SAMPLER_CORRECTION or c.ENTROPY_COEF:
        wrapped["objective"] = functools.partial(extended_objective, method.objective)
    return method._replace(**wrapped)


@functools.cache
def own_functions(file: str) -> dict[str, Callable[..., Any]]:
    """The functions of METHOD's file named after a field of `Method`; UserError without any."""
    if not file:
        return {}
    module = load_file(find_path(file).resolve(), "METHOD")
    names = [name for name in Method._fields if name != "c"]
    functions = {
        name: getattr(module, name) for name in names if callable(getattr(module, name, None))
    }
    # of these, the arguments can be written to; jax's arrays can't
    for name in functions.keys() & {"advantage", "weights"}:
        functions[name] = on_copies(functions[name])
    if "rollouts" in functions:
        functions["rollouts"] = checked_rollouts(functions["rollouts"], file)
    if not functions:
        raise UserError(f"METHOD={file}: defines none of {', '.join(names)}; name a function so")
    return functions


def checked_rollouts(own: Callable[..., Samples], file: str) -> Callable[..., Samples]:
    """METHOD's `rollouts`; it gets one copy of the task for the whole run, so the evaluations don't
    see what it writes there. UserError if it raises, or returns something other than Samples.
    """
    copy_of = functools.cache(Task.with_copies)

    def rollouts(c: RunConstants, llm: Llm, task: Task, run, step: int) -> Samples:
        what = f"METHOD={file}: rollouts"
        samples = call_user_code(f"{what} raised", own, c, llm, copy_of(task), run, step)
        if not isinstance(samples, Samples):
            raise UserError(f"{what} returned {samples!r:.60}; return Samples, as task.grade does")
        return samples

    return rollouts
