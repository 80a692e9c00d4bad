"""The variants of GRPO: functions of a few lines that take the place of a named piece of the page's loss.

`PLAIN` in the main script names the pieces of plain GRPO; `pieces` here exchanges those that a constant asks
for. There is no second loss. What else a constant of that block changes (schedules, groups that are filled
up, tokens that do not count) is a function here, too, which the loop calls.
The constants that ask for them stand in constants.py.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from settings import UserError, find_path
from task.run_grader import load_file, place_of

MAX_LOG_SEQUENCE_RATIO = 10.0  # GSPO's mean log-ratio of an answer, and the sum of an answer's
CANDIDATES = 2  # CURRICULUM chooses among so many times BATCH_SIZE questions
MAX_REFILLS = 4  # batches of other questions per step; each costs a step's generation
REFILL_SEED = 1_000_003  # added to SEED: these questions come in another order
KL_GAIN, KL_ERROR_LIMIT = 0.1, 0.2  # arXiv 1909.08593: beta moves by 2 % per step at most


# %% Pieces of the loss -------------------------------------------------------------------------------------
class Pieces(NamedTuple):
    """What `grpo_loss` is put together from; arrays are [N, T] where nothing else is said.

    Attributes:
        advantage: of rewards [B * G] and G, NumPy: [B * G].
        ratio: of log_prob, old_log_prob and the mask.
        objective: of ratio, advantage [N, 1], log_prob, epsilon and upper epsilon: the objective, and which
            tokens the clip changes (bool).
        weight: of log_prob, sampler_log_prob, the mask and the cap: what the objective is multiplied by.
        kl: of log pi_ref - log pi.
        answer_sum: of values, the mask and the limit of tokens: [N].
        count: of the mask: what the sum over the answers is divided by, [].
    """

    advantage: Callable[..., np.ndarray]
    ratio: Callable[..., Any]
    objective: Callable[..., tuple[Any, Any]]
    weight: Callable[..., Any]
    kl: Callable[..., Any]
    answer_sum: Callable[..., Any]
    count: Callable[..., Any]


def pieces(c, plain: Pieces) -> Pieces:
    """The pieces that the constants ask for.

    Args:
        c: the constants of the run.
        plain: those of the page.
    """
    chosen = {}
    advantages = {"rloo": leave_one_out_advantage, "maxrl": maxrl_advantage, "none": no_advantage}
    if c.ADVANTAGE in advantages:
        chosen["advantage"] = advantages[c.ADVANTAGE]
    elif not c.NORM_ADV_BY_STD:
        chosen["advantage"] = centered_advantage
    if c.LOSS_ALGO == "gspo-token":
        chosen["ratio"] = sequence_ratio
    if c.LOSS_ALGO == "cispo":
        chosen["objective"] = cispo_objective
    if c.SAMPLER_WEIGHT != "token":
        weights = {"token-mask": masked_weight, "sequence": sequence_weight}
        chosen["weight"] = weights.get(c.SAMPLER_WEIGHT, masked_sequence_weight)
    if c.KL_LOSS_MODE != "low_var_kl":
        chosen["kl"] = {"kl": k1, "mse_kl": k2}[c.KL_LOSS_MODE]
    if c.LOSS_AGG_MODE != "seq-mean-token-mean":
        chosen["answer_sum"] = sum_by_limit if c.LOSS_AGG_MODE.endswith("norm") else token_sum
    if c.LOSS_AGG_MODE == "token-mean":
        chosen["count"] = count_tokens
    return plain._replace(**chosen | own_pieces(c.METHOD))


def leave_one_out_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """RLOO (arXiv 2402.14740): R - mean of the other G - 1 answers; [B * G]."""
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    others = (groups.sum(axis=1, keepdims=True) - groups) / (num_generations - 1)
    return (groups - others).ravel()


def centered_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Dr. GRPO (arXiv 2503.20783): R - mean of the group, not divided by its std; [B * G]."""
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    return (groups - groups.mean(axis=1, keepdims=True)).ravel()


def maxrl_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """MaxRL (arXiv 2602.02710): (R - mean) / mean, for rewards that are never negative; [B * G].

    With 0/1 rewards it is an unbiased gradient of log p's expansion in pass@1..pass@G, where R - mean is that
    of p: the fewer answers are right, the more each counts. (As much as those of an easy question only with
    endless answers; with G of them the pull is 1 - (1 - p)^(G - 1).) 0 where no answer is right.

    Raises:
        UserError: a reward below 0.
    """
    if rewards.min() < 0:
        raise UserError(
            f"ADVANTAGE=maxrl: divides by the mean reward, and one is {rewards.min():g}; take rewards that "
            "are never negative, such as REWARDS=correctness_reward"
        )
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    mean = groups.mean(axis=1, keepdims=True)
    return ((groups - mean) / np.where(mean > 0, mean, 1.0)).ravel()


def no_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Distillation: the rewards are only logged, the KL to the TEACHER is all that teaches; [B * G]."""
    return np.zeros(len(rewards))


def sequence_ratio(log_prob, old_log_prob, mask):
    """GSPO-token (arXiv 2507.18071, eq. 14): the answer's mean ratio, with each token's own gradient."""
    log_ratio = log_prob - old_log_prob
    mean = (log_ratio * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True).clip(1)  # [N, 1]
    own_gradient = log_prob - jax.lax.stop_gradient(log_prob)  # zero, with the gradient of log_prob
    return jnp.exp(jnp.clip(own_gradient + jax.lax.stop_gradient(mean), max=MAX_LOG_SEQUENCE_RATIO))


def cispo_objective(ratio, A, log_prob, epsilon: float, epsilon_high: float):
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): sg(min(ratio, 1 + eps_high)) * A * log pi.

    The ratio is a weight without a gradient. Capped, it weighs a token less, where PPO's clip drops it: the
    tokens whose weight is capped keep a gradient. The paper sets no lower bound, and neither is there one
    here: `epsilon` is not used.
    """
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, 1 + epsilon_high))
    return weight * A * log_prob, ratio > 1 + epsilon_high


def sequence_weight(log_prob, sampler_log_prob, mask, cap: float):
    """min(pi / pi_sampler of the whole answer, cap), [N, 1]: exact, and noisier the longer the answer."""
    log_ratio = ((log_prob - sampler_log_prob) * mask).sum(axis=1, keepdims=True)  # [N, 1]
    return jnp.minimum(jnp.exp(jnp.clip(log_ratio, max=MAX_LOG_SEQUENCE_RATIO)), cap)


def masked_weight(log_prob, sampler_log_prob, mask, cap: float):
    """IcePop (arXiv 2510.18855): pi / pi_sampler of a token within 1/cap..cap, beyond it 0; [N, T]."""
    weight = jnp.exp(jnp.clip(log_prob - sampler_log_prob, max=MAX_LOG_SEQUENCE_RATIO))
    return jnp.where((weight >= 1 / cap) & (weight <= cap), weight, 0.0)


def masked_sequence_weight(log_prob, sampler_log_prob, mask, cap: float):
    """The whole answer's ratio, 0 where it is above cap (arXiv 2510.26788, section 4.2); [N, 1]."""
    weight = sequence_weight(log_prob, sampler_log_prob, mask, math.inf)
    return jnp.where(weight <= cap, weight, 0.0)


def k1(log_ref_ratio):
    """The KL's plain estimator (joschu.net/blog/kl-approx.html): log pi - log pi_ref."""
    return -log_ref_ratio


def k2(log_ref_ratio):
    """Half the squared log-ratio (same source)."""
    return log_ref_ratio**2 / 2


def token_sum(values, mask, limit: int):
    """Sum over an answer's tokens: DAPO (arXiv 2503.14476, eq. 8) divides it by all tokens."""
    return (values * mask).sum(axis=1)


def sum_by_limit(values, mask, limit: int):
    """Dr. GRPO (arXiv 2503.20783): divided by the same number for every answer, not by its length."""
    return (values * (mask / limit)).sum(axis=1)


def count_tokens(mask):
    """DAPO: the tokens that count."""
    return mask.sum()


# %% A piece of your own ------------------------------------------------------------------------------------
@functools.cache
def own_pieces(method: str) -> dict[str, Callable[..., Any]]:
    """The functions of METHOD's file that have the name of a piece.

    Raises:
        UserError: no such file, it does not run, or it has no piece.
    """
    if not method:
        return {}
    module = load_file(find_path(method).resolve(), "METHOD")
    found = {
        name: getattr(module, name)
        for name in Pieces.__annotations__
        if callable(getattr(module, name, None))
    }
    if not found:
        raise UserError(
            f"METHOD={method}: has none of the functions {', '.join(Pieces.__annotations__)}; name one so"
        )
    return found


def check_method(c, plain: Pieces) -> None:
    """Calls METHOD's functions on two small groups, the second of which has equal rewards.

    Raises:
        UserError: one raises, or gives another shape than the page's own, or a NaN.
    """
    G, mask = 4, np.arange(3) < np.array([[3, 2, 1, 3] * 2]).T  # [N, T]: answers of 3, 2, 1 and 3 tokens
    log_prob = np.linspace(-2.0, -0.1, mask.size, dtype=np.float32).reshape(mask.shape)
    other, A = log_prob[::-1], np.linspace(-1, 1, len(mask), dtype=np.float32)[:, None]
    examples = {
        "advantage": (np.array([0.0, 1, 1, 3, 0, 0, 0, 0]), G),
        "ratio": (log_prob, other, mask),
        "objective": (np.exp(log_prob - other), A, log_prob, 0.2, 0.3),
        "weight": (log_prob, other, mask, 2.0),
        "kl": (other - log_prob,),
        "answer_sum": (log_prob, mask, 3),
        "count": (mask,),
    }
    for name, function in own_pieces(c.METHOD).items():
        arguments, fault = examples[name], f"METHOD={c.METHOD}: {name}"
        # advantage is NumPy's; the others are compiled as in the loss, where numbers are constants, too.
        numbers = [i for i, x in enumerate(arguments) if not isinstance(x, np.ndarray)]
        try:
            if name != "advantage":
                function = jax.jit(function, static_argnums=numbers)
            given = function(*arguments)
            shapes, expected = (jax.tree.map(np.shape, x) for x in (given, getattr(plain, name)(*arguments)))
            finite = all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(given))
        except (Exception, SystemExit) as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            raise UserError(
                f"{fault} raised {type(error).__name__}: {reason}; fix it{place_of(error)}"
            ) from error
        if shapes != expected and not (name == "weight" and shapes == (len(mask), 1)):
            raise UserError(
                f"{fault} returned the shape {shapes} for {len(mask)} answers of {mask.shape[1]} tokens, not "
                f"{expected}; fix it"
            )
        if not finite:
            raise UserError(f"{fault} returned NaN or infinity (a group of equal rewards? a 0 / 0?); fix it")


# %% What does not count, and what only the tokens tell -----------------------------------------------------
def overlong_penalty(limit: int, buffer: int, penalty: float) -> Callable[..., list[float]]:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13), as a reward function.

    0 up to `limit - buffer` tokens, then down in a straight line to `-penalty` at the limit.

    Args:
        limit: L_max, tokens per answer.
        buffer: L_cache, tokens.
        penalty: points; 1 in the paper, whose rewards are 1 and -1.
    """

    def overlong(prompts, completions, completion_ids: Sequence[Sequence[int]], **columns) -> list[float]:
        over = np.array([len(ids) for ids in completion_ids]) - (limit - buffer)  # [B * G], tokens
        return (-penalty * np.maximum(over / buffer, 0)).tolist()

    return overlong


def reward_functions(c, functions: list[Callable[..., list[float]]]) -> list[Callable[..., list[float]]]:
    """What an answer is paid for: the functions of REWARDS and, with OVERLONG_BUFFER, its length."""
    if not c.OVERLONG_BUFFER:
        return functions
    return [*functions, overlong_penalty(c.TOTAL_GENERATION_STEPS, c.OVERLONG_BUFFER, c.OVERLONG_PENALTY)]


def has_signal(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Whether the answers of a group differ in reward: bool [B]."""
    return np.ptp(rewards.reshape(-1, num_generations), axis=1) > 0


def what_counts(c, rewards: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Which answers are trained on: bool [B * G].

    Args:
        c: the constants of the run.
        rewards: float [B * G].
        ended: whether an answer has an end-of-sequence token, bool [B * G].
    """
    counts = np.ones(len(rewards), bool)
    if c.ZERO_VARIANCE_GROUPS != "keep":
        counts &= np.repeat(has_signal(rewards, c.NUM_GENERATIONS), c.NUM_GENERATIONS)
    if c.MASK_OVERLONG:
        counts &= ended
    return counts


def filled_up(c, drawn, others: Iterable[Any]):
    """DAPO's dynamic sampling: asks other questions until every group of the batch has a signal.

    Args:
        c: the constants of the run.
        drawn: a tuple of arrays [B * G, ...], with `rewards`.
        others: more of them, drawn when asked for; where they end it takes what there is.

    Returns:
        As many groups, those with a signal first; and all that were drawn.
    """
    G = c.NUM_GENERATIONS
    parts, size = [drawn], len(drawn.rewards) // G
    signal = has_signal(drawn.rewards, G)
    others = iter(others)
    while signal.sum() < size and (more := next(others, None)) is not None:
        parts.append(more)
        signal = np.append(signal, has_signal(more.rewards, G))
    chosen = np.argsort(~signal, kind="stable")[:size]  # those with a signal first, in their order
    rows = (chosen[:, None] * G + np.arange(G)).ravel()
    all_drawn = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return jax.tree.map(lambda array: array[rows], all_drawn), all_drawn


# %% Which questions are asked ------------------------------------------------------------------------------
def half_right(
    batch: dict[str, np.ndarray], pass_rates: dict[str, float], size: int
) -> dict[str, np.ndarray]:
    """Of a batch, the `size` questions whose last pass rate is nearest to 1/2: they have most to teach.

    The variance of a 0/1 reward, p (1 - p), is largest there, and 0 where all answers agree. Questions that
    were not yet asked count as 1/2 and come in their order.

    Args:
        batch: columns of the questions, str [CANDIDATES * size].
        pass_rates: by question, from `rates_of`.
        size: questions per step, B.
    """
    distance = [abs(pass_rates.get(question, 0.5) - 0.5) for question in batch["question"].tolist()]
    chosen = np.sort(np.argsort(distance, kind="stable")[:size])
    return {name: column[chosen] for name, column in batch.items()}


def rates_of(drawn, grader, num_generations: int) -> dict[str, float]:
    """By question, the share of its G answers that were right."""
    names = ("answer", "data_source", "extra_info")
    right = grader.score(drawn.texts.tolist(), **{name: drawn.asked[name].tolist() for name in names}) >= 1
    rates = right.reshape(-1, num_generations).mean(axis=1).tolist()
    return dict(zip(drawn.asked["question"][::num_generations].tolist(), rates, strict=True))


# %% Each reward, each turn ---------------------------------------------------------------------------------
def finer_advantage(c, plain: Pieces) -> Callable[..., np.ndarray] | None:
    """What takes the advantage's place and sees more than the sum of an answer's rewards; None: nothing."""
    if c.RETURN_TO_GO:
        return functools.partial(turn_advantage, by_std=c.NORM_ADV_BY_STD)
    if c.ADVANTAGE == "gdpo":
        return functools.partial(decoupled_advantage, of_one=plain.advantage)
    return None


def decoupled_advantage(drawn, num_generations: int, of_one: Callable[..., np.ndarray]) -> np.ndarray:
    """GDPO (arXiv 2601.05242): each reward against its own group, summed, divided by the batch's std.

    Two answers with the same sum from different rewards are told apart, where the group advantage of the sum
    sees one number.

    Args:
        drawn: the main script's `Drawn`.
        num_generations: G.
        of_one: the group advantage of one reward.

    Returns:
        float [B * G]
    """
    total = sum(of_one(points, num_generations) for points in drawn.points.values())
    return (total - total.mean()) / (total.std(ddof=1) + 1e-6)


# %% Turns --------------------------------------------------------------------------------------------------
def turn_advantage(drawn, num_generations: int, by_std: bool = True) -> np.ndarray:
    """Each turn against the same turn of its group: A_ik = (G_ik - mean_i G_ik) / std.

    G_ik is what answer i earned from turn k on (chapter 3's return-to-go), the mean is over the answers that
    came as far, and the standard deviation is that of all the group's turns around these means.

    Args:
        drawn: the main script's `Drawn`, of episodes.
        num_generations: G.
        by_std: False leaves the division out.

    Returns:
        float [N, T], of each token of the model's own; 0 for the others.
    """
    K = drawn.turn.max() + 1
    to_go = np.full((len(drawn.texts), K), np.nan)
    for row, episode in zip(to_go, drawn.texts, strict=True):
        row[: len(episode.to_go)] = episode.to_go
    world = drawn.points.get("episode_return", 0.0 * drawn.rewards)  # the other rewards come at the end
    to_go = to_go * ("episode_return" in drawn.points) + (drawn.rewards - world)[:, None]
    groups = to_go.reshape(-1, num_generations, K)  # [B, G, K]
    walked = ~np.isnan(groups)
    count = walked.sum(axis=1, keepdims=True)  # [B, 1, K]
    centered = np.where(walked, groups - np.nansum(groups, axis=1, keepdims=True) / count.clip(1), 0.0)
    if by_std:
        spare = walked.sum(axis=(1, 2)) - (count > 0).sum(axis=(1, 2))  # [B], less a mean for each turn
        std = np.sqrt((centered**2).sum(axis=(1, 2)) / spare.clip(1))
        centered /= std[:, None, None] + 1e-6
    return np.take_along_axis(centered.reshape(-1, K), drawn.turn.clip(0), axis=1) * (drawn.turn >= 0)


# %% Schedules: pure functions of the step ------------------------------------------------------------------
def adaptive_beta(beta: float, target_kl: float, kl: float) -> float:
    """The KL weight after a step whose KL was `kl` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2)        beta <- beta * (1 + 0.1 e)

    A KL that is not finite (an update that was skipped), and a target of 0 (off), change nothing.
    """
    if not target_kl or not math.isfinite(kl):
        return beta
    return beta * (1 + KL_GAIN * min(max(kl / target_kl - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT))


def temperature_of(c, step: int) -> float:
    """TEMPERATURE at step 0, in a straight line to TEMPERATURE_END at the last step (0 = it stays)."""
    if not c.TEMPERATURE_END:
        return c.TEMPERATURE
    return c.TEMPERATURE + (c.TEMPERATURE_END - c.TEMPERATURE) * step / max(1, c.NUM_BATCHES - 1)
