"""Which loss is this? Compares a function with six published ones, and with the usual mistakes in each.

A loss for groups of answers has a few pieces: an advantage, a ratio, a clip, a KL, a mean. The six methods
are six choices (`METHODS`), a usual mistake is a different choice of one piece (`PIECES`). A function's value
and gradient on the golden batch reveal its choices.

The six values in golden.npz are independent: `tests/make_golden_batch.py` computes them from the papers, one
token at a time.
"""

import functools
import inspect
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

# N = 12 answers of at most T = 12 tokens, in groups of 4: log_prob, old_log_prob, ref_log_prob, float32
# [N, T], arbitrary in the padding; mask, bool [N, T]; rewards, float32 [N]; the NUMBERS. And for each method,
# float64: METHOD_advantage [N], METHOD_loss [], METHOD_gradient [N, T].
with np.load(Path(__file__).with_name("golden.npz")) as file:
    BATCH = dict(file)
ARRAYS = ("old_log_prob", "ref_log_prob", "mask", "rewards")
NUMBERS = ("epsilon", "epsilon_high", "beta", "num_generations", "max_tokens")
GIVEN = ("advantage", *ARRAYS, *NUMBERS)  # what a reader's loss may ask for besides log_prob


# %% Pieces -------------------------------------------------------------------------------------------------
def group_advantage(rewards, num_generations):
    """[B * G]: how many standard deviations above the group's mean."""
    r = rewards.reshape(-1, num_generations)
    std = r.std(axis=1, ddof=1, keepdims=True)
    A = (r - r.mean(axis=1, keepdims=True)) / (std + 1e-6)
    return A.ravel()


@functools.cache
def advantage(edit: str) -> np.ndarray:
    """Of the golden batch, [N], by `group_advantage` with an edit of its source."""
    return grader.variant(group_advantage, edit)(BATCH["rewards"], BATCH["num_generations"])


def answer_ratio(new, log_ratio):
    """GSPO-token's ratio [N, T]: its value comes from the answer's `log_ratio` [N], its gradient from new."""
    return jnp.exp(new - fixed(new) + fixed(log_ratio)[:, None])


def k3(d):
    """An estimate of the KL from d = log pi_ref - log pi, both [N, T]."""
    return jnp.exp(d) - d - 1


# Each other piece is an expression of what is given, and of the pieces before it: new, old, ref (log-probs)
# and mask [N, T]; lengths [N], and own, the sum of an answer's log-ratios [N]; low (epsilon), high
# (epsilon_high), beta. The words continue "This is what comes out if ..." and "It is GRPO, but ..."; GRPO's
# choice comes first.
PIECES = {
    "advantage": {  # [N]; an edit of `group_advantage`
        "1e-6 => 1e-6": "the advantage is divided by the group's standard deviation",
        "1e-6 => 1e-4": "1e-4 is added to the standard deviation, as TRL does; verl adds 1e-6",
        ", ddof=1 =>": "the standard deviation is the population's (ddof=0), not the sample's",
        "r.std => r.var": "the advantage is divided by the variance",
        "/ (std + 1e-6) =>": "the advantage is not divided by the standard deviation",
        "/ (std + 1e-6) => * num_generations / (num_generations - 1)":
            "the baseline is the mean of the other answers",
        "A.ravel => r.ravel": "the reward itself is the advantage, without a baseline",
        "axis=1 => axis=None": "mean and standard deviation are of the whole batch, not of each group",
        "reshape(-1, num_generations) => reshape(num_generations, -1).T; A.ravel => A.T.ravel":
            "the groups are read across: reshape(G, B), not (B, G)",
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
    "dr_grpo": {"advantage": "/ (std + 1e-6) =>", "kl": "0 * new",
                "mean": "total.sum(1).mean() / mask.shape[1]"},
    "dapo": {"clipped": "ratio.clip(1 - low, 1 + high)", "kl": "0 * new",
             "mean": "total.sum() / lengths.sum()"},
    "gspo": {"ratio": "answer_ratio(new, own / lengths)", "kl": "0 * new"},
    "cispo": {"objective": "fixed(clipped) * A * new", "clipped": "ratio.clip(max=1 + high)", "kl": "0 * new",
              "mean": "total.sum() / lengths.sum()"},
    "rloo": {"advantage": "/ (std + 1e-6) => * num_generations / (num_generations - 1)",
             "objective": "A * new", "kl": "0 * new", "mean": "total.sum(1).mean()"},
}  # fmt: skip
TITLES = dict(zip(METHODS, ("GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO")))
GRPO = {piece: next(iter(choices)) for piece, choices in PIECES.items()}


def loss(pieces: dict[str, str], log_prob: jax.Array, given: np.ndarray | None = None) -> jax.Array:
    """The loss that these pieces make, float32 []; a `given` advantage [N] replaces the first piece."""
    old, mask = BATCH["old_log_prob"], BATCH["mask"]
    given = advantage(pieces["advantage"]) if given is None else given
    x = dict(
        advantage=jnp.asarray(given, jnp.float32), new=log_prob, old=old, ref=BATCH["ref_log_prob"],
        mask=mask, lengths=mask.sum(axis=1), own=((log_prob - old) * mask).sum(axis=1),
        low=BATCH["epsilon"], high=BATCH["epsilon_high"], beta=BATCH["beta"],
    )  # fmt: skip
    for piece in list(pieces)[1:]:
        x[piece] = eval(pieces[piece], globals(), x)
    return x["loss"]


def look(loss: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Value and gradient on the golden batch of a loss of log_prob alone."""
    constants = f"epsilon {BATCH['epsilon']}, beta {BATCH['beta']}"
    yield f"golden.npz (N = T = 12), {constants}: the loss", loss(BATCH["log_prob"])
    yield "the same: the loss's gradient for log_prob [N, T]", jax.grad(loss)(BATCH["log_prob"])


def exercise(method: str, given: bool) -> grader.Exercise:
    """A method, and the other choices of each piece as mistakes; of the advantage unless it is `given`."""
    own = GRPO | METHODS[method]
    mistakes = {
        words: (piece, x) for piece in list(PIECES)[given:] for x, words in PIECES[piece].items()
        if x != own[piece]
    }  # fmt: skip

    def variant(right: Any, *changes: tuple[str, str]) -> Callable:
        pieces, advantage = own | dict(changes), BATCH[f"{method}_advantage"] if given else None
        return lambda log_prob, *_: loss(pieces, log_prob, advantage)

    return grader.Exercise(look, variant(None), mistakes, variant=variant)


# %% A reader's own loss ------------------------------------------------------------------------------------
def read_loss(path: str) -> Callable:
    """The function `loss` of a file; raises UserError if there's none that takes the golden batch."""
    function = getattr(load_file(Path(path), "loss"), "loss", None)
    if not callable(function):
        raise UserError(f"{path}: has no function `loss`; name yours so")
    needed = [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    if not {"log_prob"} <= set(needed) <= {"log_prob", *GIVEN}:
        may = f"log_prob and any of {', '.join(GIVEN)}"
        raise UserError(f"{path}: loss asks for {', '.join(needed)}; its arguments may be {may}")
    return function


def what_it_is(function: Callable) -> list[tuple[str, ...]]:
    """Which methods a reader's loss may be, each with the fewest mistakes, two at most, that explain it."""
    wanted = inspect.signature(function).parameters.keys() - {"log_prob"}
    exercises = {method: exercise(method, "advantage" in wanted) for method in METHODS}
    looks = {}
    for method in METHODS:
        advantage = jnp.asarray(BATCH[f"{method}_advantage"], jnp.float32)
        given = {name: jnp.asarray(BATCH[name]) for name in ARRAYS} | {"advantage": advantage}
        given |= {name: BATCH[name].item() for name in NUMBERS}
        loss = functools.partial(function, **{name: given[name] for name in wanted & given.keys()})
        try:
            looks[method] = dict(look(lambda log_prob, loss=loss: loss(log_prob=log_prob)))
        except Exception as error:
            raise UserError(f"your loss: {grader.in_one_line(error, function)}") from None
    explained = ([(method, *words) for method, one in exercises.items()
                  for words in one.explanations(looks[method], number)] for number in (0, 1, 2))  # fmt: skip
    return next(filter(None, explained), [])
