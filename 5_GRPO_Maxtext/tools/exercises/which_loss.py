"""Which loss is this? Compares a function with six published ones, and with the usual mistakes in each.

A loss for groups of answers has five pieces: an advantage, a ratio, a clip, a KL, a mean. The six methods are
six choices (`METHODS`), a usual mistake is a different choice of one piece (`PIECES`). A function's value and
gradient on the golden batch reveal its choices.

The six values in golden.npz are independent: `tests/make_golden_batch.py` computes them from the papers, one
token at a time.
"""

import collections
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient as fixed

from settings import UserError
from task.run_grader import load_file

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
def normalized(groups, ddof: int = 1, small: float = 1e-6):
    """[B, G]: how many standard deviations above the group's mean."""
    std = groups.std(axis=1, ddof=ddof, keepdims=True)
    return (groups - groups.mean(axis=1, keepdims=True)) / (std + small)


def answer_ratio(x, log_ratio):
    """GSPO-token's ratio [N, T]: its value comes from the answer's `log_ratio` [N], its gradient from new."""
    return jnp.exp(x.new - fixed(x.new) + fixed(log_ratio)[:, None])


def k3(d):
    """An estimate of the KL from d = log pi_ref - log pi, both [N, T]."""
    return jnp.exp(d) - d - 1


# Each piece reads what is given, and what the pieces before it have made, as attributes of x:
#   an advantage: r, the rewards [B, G]; above, by how much they exceed their group's mean [B, G]
#   the others: new, old, ref (log-probs) and mask [N, T]; lengths [N]; low (epsilon), high (epsilon_high);
#   advantage [N]; A [N, 1]; ratio, clipped, objective, kl, padded (objective - beta * kl) [N, T]; total,
#   which is padded with 0 in the padding; mean []
# The words continue "This is what comes out if ..." and "It is GRPO, but ..."; GRPO's choice comes first.
PIECES = {
    "advantage": {
        "group_std": (lambda x: normalized(x.r),
                      "the advantage is divided by the group's standard deviation"),
        "group_std, 1e-4": (lambda x: normalized(x.r, small=1e-4),
                            "1e-4 is added to the standard deviation, as TRL does; Tunix and verl add 1e-6"),
        "population": (lambda x: normalized(x.r, ddof=0),
                       "the standard deviation is the population's (ddof=0), not the sample's"),
        "variance": (lambda x: x.above / (x.r.var(axis=1, ddof=1, keepdims=True) + 1e-6),
                     "the advantage is divided by the variance, not by its root"),
        "centered": (lambda x: x.above, "the advantage is not divided by the standard deviation"),
        "leave_one_out": (lambda x: x.r - (x.r.sum(axis=1, keepdims=True) - x.r) / (x.r.shape[1] - 1),
                          "the baseline is the mean of the other answers"),
        "raw": (lambda x: x.r, "the reward itself is the advantage, without a baseline"),
        "batch": (lambda x: (x.r - x.r.mean()) / (x.r.std(ddof=1) + 1e-6),
                  "mean and standard deviation are those of the whole batch, not of each group"),
        "columns": (lambda x: normalized(x.r.reshape(x.r.shape[::-1]).T).T.reshape(x.r.shape),
                    "the groups are read across: reshape(G, B) where (B, G) belongs"),
    },
    "A": {
        "over tokens": (lambda x: x.advantage.reshape(-1, 1), ""),
        "over answers": (lambda x: x.advantage.reshape(1, -1),
                         "the advantage [N] lacks [:, None]: token t gets the advantage of answer t"),
    },
    "ratio": {
        "token": (lambda x: jnp.exp(x.new - x.old), "each token has its own ratio"),
        "answer": (lambda x: answer_ratio(x, ((x.new - x.old) * x.mask).sum(axis=1) / x.lengths),
                   "an answer has one ratio, the exp of its mean log-ratio"),
        "answer, with padding": (lambda x: answer_ratio(x, (x.new - x.old).mean(axis=1)),
                                 "padding counts in the answer's ratio"),
        "answer, not averaged": (lambda x: answer_ratio(x, ((x.new - x.old) * x.mask).sum(axis=1)),
                                 "the answer's log-ratios are added up, not averaged"),
        "upside down": (lambda x: jnp.exp(x.old - x.new), "the ratio is upside down, old over new"),
        "no exp": (lambda x: x.new - x.old, "the ratio is a difference of log-probs, without exp"),
        "to the reference": (lambda x: jnp.exp(x.new - x.ref),
                             "the ratio is taken to the reference, not to the old policy"),
        "always 1": (lambda x: jnp.exp(x.new - fixed(x.new)),
                     "the old log-probs are computed anew, so that the ratio is always 1"),
    },
    "clipped": {
        "symmetric": (lambda x: x.ratio.clip(1 - x.low, 1 + x.low), "the clip is epsilon on both sides"),
        "higher": (lambda x: x.ratio.clip(1 - x.low, 1 + x.high),
                   "the upper bound of the clip is epsilon_high"),
        "upper": (lambda x: x.ratio.clip(max=1 + x.high), "the ratio has no lower bound"),
        "none": (lambda x: x.ratio, "nothing is clipped"),
    },
    "objective": {
        "min": (lambda x: jnp.minimum(x.ratio * x.A, x.clipped * x.A),
                "the smaller of ratio * A and clip(ratio) * A is taken"),
        "max": (lambda x: jnp.maximum(x.ratio * x.A, x.clipped * x.A),
                "the larger of the two terms is taken, where the smaller belongs"),
        "clipped only": (lambda x: x.clipped * x.A, "only clip(ratio) * A is left, without the min"),
        "weight": (lambda x: fixed(x.clipped) * x.A * x.new,
                   "the clipped ratio is only a weight of log pi, without a gradient"),
        "weight with gradient": (lambda x: x.clipped * x.A * x.new,
                                 "the gradient also flows through the weight: stop_gradient is missing"),
        "log_prob": (lambda x: x.A * x.new, "the objective is A * log pi, without a ratio"),
        "prob": (lambda x: x.A * jnp.exp(x.new), "the probability stands where its logarithm belongs"),
    },
    "kl": {
        "k3": (lambda x: k3(x.ref - x.new), "a KL (k3) is subtracted from the objective"),
        "none": (lambda x: jnp.zeros_like(x.new), "the KL is left out"),
        "k1": (lambda x: x.new - x.ref, "the KL is estimated by k1, log pi - log pi_ref"),
        "k2": (lambda x: (x.ref - x.new) ** 2 / 2,
               "the KL is estimated by k2, half the square of log pi - log pi_ref"),
        "reversed": (lambda x: k3(x.new - x.ref), "pi and pi_ref are exchanged in k3"),
        "rewarded": (lambda x: -k3(x.ref - x.new), "the KL has the wrong sign: it is rewarded"),
        "to the old policy": (lambda x: k3(x.old - x.new),
                              "the KL is taken to the old policy, not to the reference"),
    },
    "mean": {
        "answer_mean": (lambda x: (x.total.sum(axis=1) / x.lengths).mean(),
                        "the mean is taken over an answer's tokens first, then over the answers"),
        "token_mean": (lambda x: x.total.sum() / x.lengths.sum(),
                       "one mean is taken over all tokens, so that long answers count more"),
        "budget": (lambda x: x.total.sum(axis=1).mean() / x.mask.shape[1],
                   "an answer's sum is divided by T, the most tokens that an answer may have"),
        "longest": (lambda x: x.total.sum(axis=1).mean() / x.lengths.max(),
                    "an answer's sum is divided by the length of the longest answer"),
        "answer_sum": (lambda x: x.total.sum(axis=1).mean(),
                       "an answer's tokens are added up and not averaged"),
        "sum": (lambda x: x.total.sum(), "everything is added up and nothing is averaged"),
        "no mask": (lambda x: x.padded.mean(), "the mask is missing: padding counts as tokens"),
        "half a mask": (lambda x: (x.padded.sum(axis=1) / x.lengths).mean(),
                        "the mask is missing in the sum, though not in the number of tokens"),
    },
    "loss": {
        "minus": (lambda x: -x.mean, ""),
        "plus": (lambda x: x.mean, "the minus is missing: a loss is minus the objective"),
    },
}  # fmt: skip
Pieces = collections.namedtuple("Pieces", PIECES, defaults=[next(iter(names)) for names in PIECES.values()])
METHODS = {
    "grpo": Pieces(),
    "dr_grpo": Pieces(advantage="centered", kl="none", mean="budget"),
    "dapo": Pieces(clipped="higher", kl="none", mean="token_mean"),
    "gspo": Pieces(ratio="answer", kl="none"),
    "cispo": Pieces(objective="weight", clipped="upper", kl="none", mean="token_mean"),
    "rloo": Pieces(advantage="leave_one_out", objective="log_prob", kl="none", mean="answer_sum"),
}
TITLES = dict(zip(METHODS, ("GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO")))


def advantage(name: str, rewards, num_generations: int):
    """An advantage of the table, [N], of rewards [N]."""
    r = rewards.reshape(-1, num_generations)
    return PIECES["advantage"][name][0](SimpleNamespace(r=r, above=r - r.mean(axis=1, keepdims=True))).ravel()


def loss(pieces: Pieces, b: dict[str, Any], log_prob: jax.Array, given=None) -> jax.Array:
    """The loss from these pieces, float32 []; a `given` advantage [N] replaces the first piece."""
    if given is None:
        given = advantage(pieces.advantage, b["rewards"], b["num_generations"])
    x = SimpleNamespace(
        new=log_prob, old=b["old_log_prob"], ref=b["ref_log_prob"], mask=b["mask"],
        lengths=b["mask"].sum(axis=1), low=b["epsilon"], high=b["epsilon_high"],
        advantage=jnp.asarray(given, jnp.float32),
    )  # fmt: skip
    for field, name in list(pieces._asdict().items())[1:]:
        setattr(x, field, PIECES[field][name][0](x))
        if field == "kl":
            x.padded = x.objective - b["beta"] * x.kl
            x.total = x.padded * x.mask
    return x.loss


def changed(method: str, number: int = 1) -> Iterator[tuple[tuple[str, ...], Pieces]]:
    """Variants of a method with `number` pieces replaced: the words for each, and the pieces."""
    own = METHODS[method]
    others = [(field, name) for field in PIECES for name in PIECES[field] if name != getattr(own, field)]
    for chosen in itertools.combinations(others, number):
        if len(dict(chosen)) == number:
            yield tuple(PIECES[field][name][1] for field, name in chosen), own._replace(**dict(chosen))


# %% A reader's own loss ------------------------------------------------------------------------------------
ARRAYS = ("log_prob", "old_log_prob", "ref_log_prob", "mask", "advantage", "rewards")
NUMBERS = ("epsilon", "epsilon_high", "beta", "num_generations", "max_tokens")
Findings = dict[str, tuple[float, Any]]  # by method: of the value, and of the gradient


def read_loss(path: str) -> Callable:
    """The function `loss` of a file; raises UserError if there's none that takes the golden batch."""
    function = getattr(load_file(Path(path), "loss"), "loss", None)
    if not callable(function):
        raise UserError(f"{path}: has no function `loss`; name yours so")
    needed = [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    unknown = [name for name in needed if name not in ARRAYS + NUMBERS]
    if unknown or "log_prob" not in needed:
        what = f"asks for {unknown[0]!r}" if unknown else "does not ask for 'log_prob'"
        raise UserError(f"{path}: loss {what}; its arguments may be {', '.join(ARRAYS + NUMBERS)}")
    return function


def value_and_gradient(function: Callable, b: dict[str, Any], method: str) -> tuple[float, np.ndarray]:
    """A reader's loss and its gradient on the golden batch, with a method's advantages if it takes any."""
    b = b | {"advantage": b[f"{method}_advantage"].astype(np.float32)}
    given = {name: jnp.asarray(b[name]) for name in ARRAYS} | {name: b[name].item() for name in NUMBERS}
    wanted = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    log_prob = wanted.pop("log_prob")
    try:
        value, gradient = jax.value_and_grad(lambda x: function(log_prob=x, **wanted))(log_prob)
    except jax.errors.TracerArrayConversionError:
        raise UserError("the loss uses numpy, which has no gradient; write it with jax.numpy") from None
    except Exception as error:
        raise UserError(f"the loss raises {type(error).__name__}: {str(error).splitlines()[0]}") from None
    return float(value), np.asarray(gradient)


def equal(found: tuple[float, np.ndarray], expected: tuple[float, np.ndarray]) -> bool:
    """Whether value and gradient agree to CLOSE; nan never does."""
    return all(np.allclose(x, y, rtol=0, atol=CLOSE) for x, y in zip(found, expected))


def looks_like(found: Findings, number: int, takes_advantage: bool) -> list[tuple[str, ...]]:
    """Methods with `number` pieces replaced that give what was `found`: (method, words ...)."""
    b, same = golden_batch(), []
    for method, (value, gradient) in found.items():
        given = b[f"{method}_advantage"] if takes_advantage else None
        for words, pieces in changed(method, number):
            compute = functools.partial(loss, pieces, b, given=given)
            near = abs(float(compute(b["log_prob"])) - value) <= CLOSE  # the gradient takes longer
            if near and equal((value, gradient), jax.value_and_grad(compute)(b["log_prob"])):
                same.append((method, *words))
    return same
