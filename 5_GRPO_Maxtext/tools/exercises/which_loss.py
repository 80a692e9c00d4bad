"""Which loss is this? Compares a function with six published ones, and with the usual mistakes in each.

A loss for groups of answers has a few pieces: an advantage, a ratio, a clip, a KL, a mean. The six methods
are six choices (`METHODS`), a usual mistake is a different choice of one piece (`PIECES`). A function's value
and gradient on the golden batch reveal its choices.

The six values in golden.npz are independent: `tests/make_golden_batch.py` computes them from the papers, one
token at a time.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient as fixed

from settings import UserError
from task.run_grader import load_file
from tools.exercises import grader

CLOSE = 1e-5  # of a value or of a gradient's entry: float32 against float64 differs by less than 1e-6 here


def golden_batch() -> dict[str, np.ndarray]:
    """The arrays of golden.npz, N = 12 answers of at most T = 12 tokens, in groups of 4.

    Returns:
        log_prob, old_log_prob, ref_log_prob: float32 [N, T], with arbitrary numbers in the padding.
        mask: bool [N, T]. rewards: float32 [N]. num_generations, max_tokens, epsilon, epsilon_high, beta.
        For each method METHOD_advantage [N], METHOD_loss [], METHOD_gradient [N, T]: float64.
    """
    with np.load(Path(__file__).with_name("golden.npz")) as file:
        return dict(file)


# %% Pieces -------------------------------------------------------------------------------------------------
def normal(groups, ddof: int = 1, small: float = 1e-6):
    """[B, G]: how many standard deviations above the group's mean."""
    std = groups.std(axis=1, ddof=ddof, keepdims=True)
    return (groups - groups.mean(axis=1, keepdims=True)) / (std + small)


def answer_ratio(new, log_ratio):
    """GSPO-token's ratio [N, T]: its value comes from the answer's `log_ratio` [N], its gradient from new."""
    return jnp.exp(new - fixed(new) + fixed(log_ratio)[:, None])


def k3(d):
    """An estimate of the KL from d = log pi_ref - log pi, both [N, T]."""
    return jnp.exp(d) - d - 1


# Each piece is an expression of what is given, and of the pieces before it: r, the rewards, and above, by how
# much they exceed their group's mean [B, G]; new, old, ref (log-probs) and mask [N, T]; lengths [N], and own,
# the sum of an answer's log-ratios [N]; low (epsilon), high (epsilon_high), beta. The words continue "This is
# what comes out if ..." and "It is GRPO, but ..."; GRPO's choice comes first.
PIECES = {
    "advantage": {  # [B, G]
        "normal(r)": "the advantage is divided by the group's standard deviation",
        "normal(r, small=1e-4)": "1e-4 is added to the standard deviation, as TRL does; verl adds 1e-6",
        "normal(r, ddof=0)": "the standard deviation is the population's (ddof=0), not the sample's",
        "above / (r.var(1, ddof=1, keepdims=True) + 1e-6)": "the advantage is divided by the variance",
        "above": "the advantage is not divided by the standard deviation",
        "above * r.shape[1] / (r.shape[1] - 1)": "the baseline is the mean of the other answers",
        "r": "the reward itself is the advantage, without a baseline",
        "normal(r.reshape(1, -1))": "mean and standard deviation are of the whole batch, not of each group",
        "normal(r.reshape(r.shape[::-1]).T).T": "the groups are read across: reshape(G, B), not (B, G)",
    },
    "A": {
        "advantage.reshape(-1, 1)": "each token gets the advantage of its answer",
        "advantage.reshape(1, -1)": "the advantage [N] lacks [:, None]: token t gets that of answer t",
    },
    "ratio": {  # this and all others up to `total` are [N, T]
        "jnp.exp(new - old)": "each token has its own ratio",
        "answer_ratio(new, own / lengths)": "an answer has one ratio, the exp of its mean log-ratio",
        "answer_ratio(new, (new - old).mean(1))": "padding counts in the answer's ratio",
        "answer_ratio(new, own)": "the answer's log-ratios are added up, not averaged",
        "jnp.exp(old - new)": "the ratio is upside down, old over new",
        "new - old": "the ratio is a difference of log-probs, without exp",
        "jnp.exp(new - ref)": "the ratio is taken to the reference, not to the old policy",
        "jnp.exp(new - fixed(new))": "the old log-probs are computed anew, so that the ratio is always 1",
    },
    "clipped": {
        "ratio.clip(1 - low, 1 + low)": "the clip is epsilon on both sides",
        "ratio.clip(1 - low, 1 + high)": "the upper bound of the clip is epsilon_high",
        "ratio.clip(max=1 + high)": "the ratio has no lower bound",
        "ratio": "nothing is clipped",
    },
    "objective": {
        "jnp.minimum(ratio * A, clipped * A)": "the smaller of ratio * A and clip(ratio) * A is taken",
        "jnp.maximum(ratio * A, clipped * A)": "the larger of the two terms is taken, not the smaller",
        "clipped * A": "only clip(ratio) * A is left, without the min",
        "fixed(clipped) * A * new": "the clipped ratio is only a weight of log pi, without a gradient",
        "clipped * A * new": "the gradient also flows through the weight: stop_gradient is missing",
        "A * new": "the objective is A * log pi, without a ratio",
        "A * jnp.exp(new)": "the probability stands where its logarithm belongs",
    },
    "kl": {
        "k3(ref - new)": "a KL (k3) is subtracted from the objective",
        "0 * new": "the KL is left out",
        "new - ref": "the KL is estimated by k1, log pi - log pi_ref",
        "(ref - new) ** 2 / 2": "the KL is estimated by k2, half the square of log pi - log pi_ref",
        "k3(new - ref)": "pi and pi_ref are exchanged in k3",
        "-k3(ref - new)": "the KL has the wrong sign: it is rewarded",
        "k3(old - new)": "the KL is taken to the old policy, not to the reference",
    },
    "padded": {"objective - beta * kl": ""},
    "total": {"padded * mask": ""},
    "mean": {  # []
        "(total.sum(1) / lengths).mean()": "the mean is over an answer's tokens first, then over the answers",
        "total.sum() / lengths.sum()": "one mean is taken over all tokens, so that long answers count more",
        "total.sum(1).mean() / mask.shape[1]": "an answer's sum is divided by T, the most tokens it may have",
        "total.sum(1).mean() / lengths.max()": "an answer's sum is divided by the longest answer's length",
        "total.sum(1).mean()": "an answer's tokens are added up and not averaged",
        "total.sum()": "everything is added up and nothing is averaged",
        "padded.mean()": "the mask is missing: padding counts as tokens",
        "(padded.sum(1) / lengths).mean()": "the mask is missing in the sum, but not in the number of tokens",
    },
    "loss": {"-mean": "", "mean": "the minus is missing: a loss is minus the objective"},
}  # fmt: skip
METHODS = {  # by name: what differs from GRPO
    "grpo": {},
    "dr_grpo": {"advantage": "above", "kl": "0 * new", "mean": "total.sum(1).mean() / mask.shape[1]"},
    "dapo": {"clipped": "ratio.clip(1 - low, 1 + high)", "kl": "0 * new",
             "mean": "total.sum() / lengths.sum()"},
    "gspo": {"ratio": "answer_ratio(new, own / lengths)", "kl": "0 * new"},
    "cispo": {"objective": "fixed(clipped) * A * new", "clipped": "ratio.clip(max=1 + high)", "kl": "0 * new",
              "mean": "total.sum() / lengths.sum()"},
    "rloo": {"advantage": "above * r.shape[1] / (r.shape[1] - 1)", "objective": "A * new", "kl": "0 * new",
             "mean": "total.sum(1).mean()"},
}  # fmt: skip
TITLES = dict(zip(METHODS, ("GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO")))


def pieces_of(changes: dict[str, str]) -> dict[str, str]:
    """GRPO's expression for each piece, or another from `changes`."""
    return {piece: next(iter(choices)) for piece, choices in PIECES.items()} | changes


def advantage(expression: str, rewards, num_generations: int):
    """An advantage of the table, [N], of rewards [N]."""
    r = rewards.reshape(-1, num_generations)
    return eval(expression, globals(), {"r": r, "above": r - r.mean(axis=1, keepdims=True)}).ravel()


def loss(changes: dict[str, str], b: dict[str, Any], log_prob: jax.Array, given=None) -> jax.Array:
    """GRPO's loss with these changes, float32 []; a `given` advantage [N] replaces the first piece."""
    pieces, old, mask = pieces_of(changes), b["old_log_prob"], b["mask"]
    first = pieces.pop("advantage")
    given = advantage(first, b["rewards"], b["num_generations"]) if given is None else given
    x = dict(
        new=log_prob, old=old, ref=b["ref_log_prob"], mask=mask, lengths=mask.sum(axis=1),
        own=((log_prob - old) * mask).sum(axis=1), low=b["epsilon"], high=b["epsilon_high"], beta=b["beta"],
        advantage=jnp.asarray(given, jnp.float32),
    )  # fmt: skip
    for piece, expression in pieces.items():
        x[piece] = eval(expression, globals(), x)
    return x["loss"]


def changed(method: str, number: int = 1) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Variants of a method with `number` pieces replaced: the words for each, and their changes."""
    own = pieces_of(METHODS[method])
    others = [(piece, x) for piece, choices in PIECES.items() for x in choices if x != own[piece]]
    for chosen in itertools.combinations(others, number):
        if len(dict(chosen)) == number:
            yield tuple(PIECES[piece][x] for piece, x in chosen), METHODS[method] | dict(chosen)


# %% A reader's own loss ------------------------------------------------------------------------------------
ARRAYS = ("log_prob", "old_log_prob", "ref_log_prob", "mask", "advantage", "rewards")
NUMBERS = ("epsilon", "epsilon_high", "beta", "num_generations", "max_tokens")


def read_loss(path: str) -> Callable:
    """The function `loss` of a file; raises UserError if there's none that takes the golden batch."""
    function = getattr(load_file(Path(path), "loss"), "loss", None)
    if not callable(function):
        raise UserError(f"{path}: has no function `loss`; name yours so")
    needed = [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    if not {"log_prob"} <= set(needed) <= set(ARRAYS + NUMBERS):
        may = f"log_prob and any of {', '.join(ARRAYS[1:] + NUMBERS)}"
        raise UserError(f"{path}: loss asks for {', '.join(needed)}; its arguments may be {may}")
    return function


def value_and_gradient(function: Callable, b: dict[str, Any], method: str) -> tuple[float, np.ndarray]:
    """A reader's loss and its gradient on the golden batch, with a method's advantages if it takes any."""
    b = b | {"advantage": b[f"{method}_advantage"].astype(np.float32)}
    given = {name: jnp.asarray(b[name]) for name in ARRAYS} | {name: b[name].item() for name in NUMBERS}
    wanted = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    log_prob = wanted.pop("log_prob")
    try:
        value, gradient = jax.value_and_grad(lambda x: function(log_prob=x, **wanted))(log_prob)
    except Exception as error:
        raise UserError(f"the loss, {grader.in_one_line(error, function)}") from None
    return float(value), np.asarray(gradient)


def looks_like(found: dict[str, tuple], number: int, takes_advantage: bool) -> list[tuple[str, ...]]:
    """Methods with `number` pieces replaced that give what was `found`: (method, words ...)."""
    b, same = golden_batch(), []
    for method, (value, gradient) in found.items():
        given = b[f"{method}_advantage"] if takes_advantage else None
        for words, changes in changed(method, number):
            compute = functools.partial(loss, changes, b, given=given)
            near = abs(float(compute(b["log_prob"])) - value) <= CLOSE  # the gradient takes longer
            if near and np.allclose(jax.grad(compute)(b["log_prob"]), gradient, rtol=0, atol=CLOSE):
                same.append((method, *words))
    return same
