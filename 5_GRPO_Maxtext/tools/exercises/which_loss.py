"""Which loss is this? Compares a function with six published ones, and with the usual mistakes in each.

A loss for groups of answers is put together from pieces: an advantage, a ratio, a clip, a KL, a mean. The
six methods are six choices (`METHODS`), a usual mistake is another choice of one piece (`CHANGES`). What a
function gives on the golden batch, value and gradient, tells which choices it has made.

The six values in golden.npz do not come from here: `tests/make_golden_batch.py` has them from the papers, one
token at a time.
"""

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from settings import UserError

CLOSE = 1e-5  # of a value or of a gradient's entry: float32 against float64 differs by less than 1e-6 here


def golden_batch() -> dict[str, np.ndarray]:
    """The arrays of golden.npz, N = 12 answers of at most T = 12 tokens, in groups of 4.

    Returns:
        log_prob, old_log_prob, ref_log_prob: float32 [N, T], with numbers that mean nothing in the padding.
        mask: bool [N, T]. rewards: float32 [N]. num_generations, max_tokens, epsilon, epsilon_high, beta.
        For each method METHOD_advantage [N], METHOD_loss [], METHOD_gradient [N, T]: float64.
    """
    with np.load(Path(__file__).with_name("golden.npz")) as file:
        return dict(file)


# %% Pieces -------------------------------------------------------------------------------------------------
class Pieces(NamedTuple):
    """What a loss is put together from; the names are those of the tables below. The defaults are GRPO's."""

    advantage: str = "group_std"
    spread: str = "over tokens"
    ratio: str = "token"
    objective: str = "min"
    clip: str = "symmetric"
    kl: str = "k3"
    mean: str = "answer_mean"
    sign: str = "minus"


METHODS = {
    "grpo": Pieces(),
    "dr_grpo": Pieces(advantage="centered", kl="none", mean="budget"),
    "dapo": Pieces(clip="higher", kl="none", mean="token_mean"),
    "gspo": Pieces(ratio="answer", kl="none"),
    "cispo": Pieces(objective="weight", clip="upper", kl="none", mean="token_mean"),
    "rloo": Pieces(advantage="leave_one_out", objective="log_prob", kl="none", mean="answer_sum"),
}
TITLES = {
    "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO", "gspo": "GSPO", "cispo": "CISPO", "rloo": "RLOO",
}  # fmt: skip

fixed = jax.lax.stop_gradient


def normalized(groups: jax.Array, std: jax.Array, small: float = 1e-6) -> jax.Array:
    """[B, G]: how many standard deviations above the group's mean."""
    return (groups - groups.mean(axis=1, keepdims=True)) / (std + small)


ADVANTAGES = {  # of rewards in groups [B, G]
    "group_std": lambda r: normalized(r, r.std(axis=1, ddof=1, keepdims=True)),
    "group_std, 1e-4": lambda r: normalized(r, r.std(axis=1, ddof=1, keepdims=True), 1e-4),
    "population": lambda r: normalized(r, r.std(axis=1, keepdims=True)),
    "variance": lambda r: normalized(r, r.var(axis=1, ddof=1, keepdims=True)),
    "centered": lambda r: r - r.mean(axis=1, keepdims=True),
    "leave_one_out": lambda r: r - (r.sum(axis=1, keepdims=True) - r) / (r.shape[1] - 1),
    "raw": lambda r: r,
    "batch": lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "columns": lambda r: ADVANTAGES["group_std"](r.ravel().reshape(r.shape[1], -1).T).T.reshape(r.shape),
}
SPREADS = {"over tokens": lambda A: A[:, None], "over answers": lambda A: A[None, :]}
RATIOS = {  # of new, old, reference [N, T] and the mask
    "token": lambda new, old, ref, mask: jnp.exp(new - old),
    "answer": lambda new, old, ref, mask: jnp.exp(
        new - fixed(new) + fixed(((new - old) * mask).sum(axis=1) / mask.sum(axis=1))[:, None]
    ),
    "answer, with padding": lambda new, old, ref, mask: jnp.exp(
        new - fixed(new) + fixed((new - old).mean(axis=1))[:, None]
    ),
    "answer, not averaged": lambda new, old, ref, mask: jnp.exp(
        new - fixed(new) + fixed(((new - old) * mask).sum(axis=1))[:, None]
    ),
    "upside down": lambda new, old, ref, mask: jnp.exp(old - new),
    "no exp": lambda new, old, ref, mask: new - old,
    "to the reference": lambda new, old, ref, mask: jnp.exp(new - ref),
    "always 1": lambda new, old, ref, mask: jnp.exp(new - fixed(new)),
}
CLIPS = {  # epsilon and epsilon_high to the bounds of the ratio
    "symmetric": lambda low, high: (1 - low, 1 + low),
    "higher": lambda low, high: (1 - low, 1 + high),
    "upper": lambda low, high: (-jnp.inf, 1 + high),
    "none": lambda low, high: (-jnp.inf, jnp.inf),
}
OBJECTIVES = {  # of the ratio, the clipped ratio, the advantage and log pi, [N, T]
    "min": lambda ratio, clipped, A, new: jnp.minimum(ratio * A, clipped * A),
    "max": lambda ratio, clipped, A, new: jnp.maximum(ratio * A, clipped * A),
    "clipped only": lambda ratio, clipped, A, new: clipped * A,
    "weight": lambda ratio, clipped, A, new: fixed(clipped) * A * new,
    "weight with gradient": lambda ratio, clipped, A, new: clipped * A * new,
    "log_prob": lambda ratio, clipped, A, new: A * new,
    "prob": lambda ratio, clipped, A, new: A * jnp.exp(new),
}
KLS = {  # of d = log pi_ref - log pi [N, T], and of what the old policy has in the reference's place
    "none": lambda d, old: jnp.zeros_like(d),
    "k3": lambda d, old: jnp.exp(d) - d - 1,
    "k1": lambda d, old: -d,
    "k2": lambda d, old: d**2 / 2,
    "reversed": lambda d, old: jnp.exp(-d) + d - 1,
    "rewarded": lambda d, old: -KLS["k3"](d, old),
    "to the old policy": lambda d, old: KLS["k3"](old, d),
}
MEANS = {  # of x and the mask [N, T] to []
    "answer_mean": lambda x, mask: ((x * mask).sum(axis=1) / mask.sum(axis=1)).mean(),
    "token_mean": lambda x, mask: (x * mask).sum() / mask.sum(),
    "budget": lambda x, mask: (x * mask).sum(axis=1).mean() / mask.shape[1],
    "longest": lambda x, mask: (x * mask).sum(axis=1).mean() / mask.sum(axis=1).max(),
    "answer_sum": lambda x, mask: (x * mask).sum(axis=1).mean(),
    "sum": lambda x, mask: (x * mask).sum(),
    "no mask": lambda x, mask: x.mean(),
    "half a mask": lambda x, mask: (x.sum(axis=1) / mask.sum(axis=1)).mean(),
}


def loss(p: Pieces, b: dict[str, Any], log_prob: jax.Array, advantage: jax.Array | None = None) -> jax.Array:
    """The loss that the pieces make, float32 []; `advantage` [N] takes the place of the first piece."""
    if advantage is None:
        advantage = ADVANTAGES[p.advantage](b["rewards"].reshape(-1, b["num_generations"])).ravel()
    mask, old, ref = b["mask"], b["old_log_prob"], b["ref_log_prob"]
    A = SPREADS[p.spread](jnp.asarray(advantage, jnp.float32))
    ratio = RATIOS[p.ratio](log_prob, old, ref, mask)  # [N, T]
    clipped = jnp.clip(ratio, *CLIPS[p.clip](b["epsilon"], b["epsilon_high"]))
    objective = OBJECTIVES[p.objective](ratio, clipped, A, log_prob)
    objective -= b["beta"] * KLS[p.kl](ref - log_prob, old - log_prob)
    mean = MEANS[p.mean](objective, mask)
    return mean if p.sign == "plus" else -mean


# %% Mistakes -----------------------------------------------------------------------------------------------
# The words continue "This is what comes out if ..." and "It is GRPO, but ..."
CHANGES = {
    "advantage": {
        "group_std": "the advantage is divided by the group's standard deviation",
        "group_std, 1e-4": "1e-4 is added to the standard deviation, as TRL does; Tunix and verl add 1e-6",
        "population": "the standard deviation is the population's (ddof=0), not the sample's",
        "variance": "the advantage is divided by the variance, not by its root",
        "centered": "the advantage is not divided by the standard deviation",
        "leave_one_out": "the baseline is the mean of the other answers",
        "raw": "the reward itself is the advantage, without a baseline",
        "batch": "mean and standard deviation are those of the whole batch, not of each group",
        "columns": "the groups are read across: reshape(G, B) where (B, G) belongs",
    },
    "spread": {"over answers": "the advantage [N] lacks [:, None]: token t gets the advantage of answer t"},
    "ratio": {
        "token": "each token has its own ratio",
        "answer": "an answer has one ratio, the exp of its mean log-ratio",
        "answer, with padding": "padding counts in the answer's ratio",
        "answer, not averaged": "the answer's log-ratios are added up, not averaged",
        "upside down": "the ratio is upside down, old over new",
        "no exp": "the ratio is a difference of log-probs, without exp",
        "to the reference": "the ratio is taken to the reference, not to the old policy",
        "always 1": "the old log-probs are computed anew, so that the ratio is always 1",
    },
    "clip": {
        "symmetric": "the clip is epsilon on both sides",
        "higher": "the upper bound of the clip is epsilon_high",
        "upper": "the ratio has no lower bound",
        "none": "nothing is clipped",
    },
    "objective": {
        "min": "the smaller of ratio * A and clip(ratio) * A is taken",
        "max": "the larger of the two terms is taken, where the smaller belongs",
        "clipped only": "only clip(ratio) * A is left, without the min",
        "weight": "the clipped ratio is only a weight of log pi, without a gradient",
        "weight with gradient": "the gradient also flows through the weight: stop_gradient is missing",
        "log_prob": "the objective is A * log pi, without a ratio",
        "prob": "the probability stands where its logarithm belongs",
    },
    "kl": {
        "none": "the KL is left out",
        "k3": "a KL (k3) is subtracted from the objective",
        "k1": "the KL is estimated by k1, log pi - log pi_ref",
        "k2": "the KL is estimated by k2, half the square of log pi - log pi_ref",
        "reversed": "pi and pi_ref are exchanged in k3",
        "rewarded": "the KL has the wrong sign: it is rewarded",
        "to the old policy": "the KL is taken to the old policy, not to the reference",
    },
    "mean": {
        "answer_mean": "the mean is taken over an answer's tokens first, then over the answers",
        "token_mean": "one mean is taken over all tokens, so that long answers count more",
        "budget": "an answer's sum is divided by T, the most tokens that an answer may have",
        "longest": "an answer's sum is divided by the length of the longest answer",
        "answer_sum": "an answer's tokens are added up and not averaged",
        "sum": "everything is added up and nothing is averaged",
        "no mask": "the mask is missing: padding counts as tokens",
        "half a mask": "the mask is missing in the sum, though not in the number of tokens",
    },
    "sign": {"plus": "the minus is missing: a loss is minus the objective"},
}


def changed(method: str, number: int = 1) -> Iterator[tuple[tuple[str, ...], Pieces]]:
    """A method with so many other pieces: the words for each, and the pieces."""
    own = METHODS[method]
    others = [
        (field, name) for field, names in CHANGES.items() for name in names if name != getattr(own, field)
    ]
    for chosen in itertools.combinations(others, number):
        if len({field for field, _ in chosen}) == number:
            yield tuple(CHANGES[field][name] for field, name in chosen), own._replace(**dict(chosen))


# %% A reader's own loss ------------------------------------------------------------------------------------
ARRAYS = ("log_prob", "old_log_prob", "ref_log_prob", "mask", "advantage", "rewards")
NUMBERS = ("epsilon", "epsilon_high", "beta", "num_generations", "max_tokens")


def read_loss(path: str) -> Callable:
    """The function `loss` of a file.

    Raises:
        UserError: the file is not there, cannot be run, has no such function, or the function asks for
            something that the golden batch does not have.
    """
    file = Path(path)
    if not file.is_file() or file.suffix != ".py":
        raise UserError(f"{path}: no such Python file; give the file that holds your loss")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file's own, of whatever kind
        raise UserError(
            f"{path}: {type(error).__name__}: {str(error).splitlines()[0]}; mend the file"
        ) from None
    function = getattr(module, "loss", None)
    if not callable(function):
        raise UserError(f"{path}: has no function `loss`; name yours so")
    needed = [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    unknown = [name for name in needed if name not in ARRAYS + NUMBERS]
    if unknown or "log_prob" not in needed:
        what = f"asks for {unknown[0]!r}" if unknown else "does not ask for 'log_prob'"
        raise UserError(f"{path}: loss {what}; its arguments may be {', '.join(ARRAYS + NUMBERS)}")
    return function


def value_and_gradient(function: Callable, b: dict[str, Any], method: str) -> tuple[float, np.ndarray]:
    """What a reader's loss gives on the golden batch, with the advantages of a method if it wants any.

    Raises:
        UserError: it gives no single number, or cannot be differentiated.
    """
    given = {name: jnp.asarray(b[name]) for name in ARRAYS if name in b}
    given |= {name: b[name].item() for name in NUMBERS}
    given["advantage"] = jnp.asarray(b[f"{method}_advantage"], jnp.float32)
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


def identify(function: Callable) -> tuple[dict[str, tuple[float, float]], list[str], list[tuple[str, ...]]]:
    """Compares a loss with the six methods, then with each of them with one and with two other pieces.

    Returns:
        By method: how far the value is from the golden one, and the gradient's most distant entry.
        The methods it equals. If there are none, what it looks like: (method, words ...), fewest changes.
    """
    b = golden_batch()
    found = {method: value_and_gradient(function, b, method) for method in METHODS}
    golden = {method: (b[f"{method}_loss"], b[f"{method}_gradient"]) for method in METHODS}
    distances = {
        method: (
            abs(found[method][0] - golden[method][0]),
            np.abs(found[method][1] - golden[method][1]).max(),
        )
        for method in METHODS
    }
    equals = [method for method in METHODS if equal(found[method], golden[method])]
    if equals:
        return distances, equals, []
    takes_advantage = "advantage" in inspect.signature(function).parameters
    for number in (1, 2):
        looks_like = []
        for method in METHODS:
            advantage = b[f"{method}_advantage"] if takes_advantage else None
            for words, pieces in changed(method, number):
                compute = lambda x, p=pieces, a=advantage: loss(p, b, x, a)  # noqa: E731
                if abs(float(compute(b["log_prob"])) - found[method][0]) > CLOSE:
                    continue
                if equal(found[method], jax.value_and_grad(compute)(b["log_prob"])):
                    looks_like.append((method, *words))
        if looks_like:
            return distances, [], looks_like
    return distances, [], []
