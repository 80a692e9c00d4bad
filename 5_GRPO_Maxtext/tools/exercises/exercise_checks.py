"""Behind exercises.py: test inputs, the usual mistakes, training with the functions; which loss is
yours?

A loss for groups of answers has a few pieces: an advantage, a ratio, a clip, a KL, a mean. Six
published ones are six choices (`METHODS`), a usual mistake is a different choice of one piece
(`PIECES`). A function's value and gradient on the golden batch reveal its choices.

The six values in golden.npz are independent: `tests/make_golden_batch.py` computes them from the
papers, one token at a time.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient as fixed

import settings
from model import llama
from settings import UserError
from task.run_grader import load_file
from tools.exercises import grader

# N = 12 answers of at most T = 12 tokens, in groups of 4: log_prob, old_log_prob, ref_log_prob,
# float32 [N, T], arbitrary in the padding; mask, bool [N, T]; rewards, float32 [N]; the NUMBERS.
# And for each method, float64: METHOD_advantage [N], METHOD_loss [], METHOD_gradient [N, T].
with np.load(Path(__file__).with_name("golden.npz")) as file:
    BATCH = dict(file)
ARRAYS = ("old_log_prob", "ref_log_prob", "mask", "rewards")
NUMBERS = ("epsilon", "epsilon_high", "beta", "num_generations", "max_tokens")
GIVEN = ("advantage", *ARRAYS, *NUMBERS)  # what a reader's loss may ask for besides log_prob


# %% Pieces ----------------------------------------------------------------------------------------
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
    """GSPO-token's ratio [N, T]: its value comes from the answer's `log_ratio` [N], its gradient
    from new.
    """
    return jnp.exp(new - fixed(new) + fixed(log_ratio)[:, None])


def k3(d):
    """An estimate of the KL from d = log pi_ref - log pi, both [N, T]."""
    return jnp.exp(d) - d - 1


# Each other piece is an expression of what is given, and of the pieces before it: new, old, ref
# (log-probs) and mask [N, T]; lengths [N], and own, the sum of an answer's log-ratios [N]; low
# (epsilon), high (epsilon_high), beta. The words continue "This is what comes out if ..." and "It
# is GRPO, but ..."; GRPO's choice comes first.
PIECES = {
    "advantage": {  # [N]; an edit of `group_advantage`
        "1e-6 => 1e-6": "the advantage is divided by the group's standard deviation",
        "1e-6 => 1e-4": "1e-4 is added to the standard deviation, as TRL does; verl adds 1e-6",
        ", ddof=1 =>": "the standard deviation is the population's (ddof=0), not the sample's",
        "r.std => r.var": "the advantage is divided by the variance",
        "/ (std + 1e-6) =>": "the advantage is not divided by the standard deviation",
        "/ (std + 1e-6) => * num_generations / (num_generations - 1)": (
            "the baseline is the mean of the other answers"
        ),
        "A.ravel => r.ravel": "the reward itself is the advantage, without a baseline",
        "axis=1 => axis=None": (
            "mean and standard deviation are of the whole batch, not of each group"
        ),
        "reshape(-1, num_generations) => reshape(num_generations, -1).T; A.ravel => A.T.ravel": (
            "the groups are read across: reshape(G, B), not (B, G)"
        ),
    },
    "A": {
        "advantage.reshape(-1, 1)": "each token gets the advantage of its answer",
        "advantage.reshape(1, -1)": (
            "the advantage [N] lacks [:, None]: token t gets that of answer t"
        ),
    },
    "ratio": {  # this and all others up to `total` are [N, T]
        "jnp.exp(new - old)": "each token has its own ratio",
        "answer_ratio(new, own / lengths)": (
            "an answer has one ratio, the exp of its mean log-ratio"
        ),
        "answer_ratio(new, (new - old).mean(1))": "padding counts in the answer's ratio",
        "answer_ratio(new, own)": "the answer's log-ratios are added up, not averaged",
        "jnp.exp(old - new)": "the ratio is inverted: old over new",
        "new - old": "the ratio is a difference of log-probs, without exp",
        "jnp.exp(new - ref)": "the ratio is taken to the reference, not to the old policy",
        "jnp.exp(new - fixed(new))": (
            "the old log-probs are computed anew, so that the ratio is always 1"
        ),
    },
    "clipped": {
        "ratio.clip(1 - low, 1 + low)": "the clip is epsilon on both sides",
        "ratio.clip(1 - low, 1 + high)": "the upper bound of the clip is epsilon_high",
        "ratio.clip(max=1 + high)": "the ratio has no lower bound",
        "ratio": "nothing is clipped",
    },
    "objective": {
        "jnp.minimum(ratio * A, clipped * A)": (
            "the smaller of ratio * A and clip(ratio) * A is taken"
        ),
        "jnp.maximum(ratio * A, clipped * A)": (
            "the larger of the two terms is taken, not the smaller"
        ),
        "clipped * A": "only clip(ratio) * A is left, without the min",
        "fixed(clipped) * A * new": (
            "the clipped ratio is only a weight of log pi, without a gradient"
        ),
        "clipped * A * new": "the gradient also flows through the weight: stop_gradient is missing",
        "A * new": "the objective is A * log pi, without a ratio",
        "A * jnp.exp(new)": "the probability is used instead of its logarithm",
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
        "(total.sum(1) / lengths).mean()": (
            "the mean is over an answer's tokens first, then over the answers"
        ),
        "total.sum() / lengths.sum()": (
            "one mean is taken over all tokens, so that long answers count more"
        ),
        "total.sum(1).mean() / mask.shape[1]": (
            "an answer's sum is divided by T, the most tokens it may have"
        ),
        "total.sum(1).mean() / lengths.max()": (
            "an answer's sum is divided by the longest answer's length"
        ),
        "total.sum(1).mean()": "an answer's tokens are added up and not averaged",
        "total.sum()": "everything is added up and nothing is averaged",
        "padded.mean()": "the mask is missing: padding counts as tokens",
        "(padded.sum(1) / lengths).mean()": (
            "the mask is missing in the sum, but not in the number of tokens"
        ),
    },
    "loss": {"-mean": "", "mean": "the minus is missing: a loss is minus the objective"},
}
METHODS = {  # by name: what differs from GRPO
    "grpo": {},
    "dr_grpo": {
        "advantage": "/ (std + 1e-6) =>",
        "kl": "0 * new",
        "mean": "total.sum(1).mean() / mask.shape[1]",
    },
    "dapo": {
        "clipped": "ratio.clip(1 - low, 1 + high)",
        "kl": "0 * new",
        "mean": "total.sum() / lengths.sum()",
    },
    "gspo": {"ratio": "answer_ratio(new, own / lengths)", "kl": "0 * new"},
    "cispo": {
        "objective": "fixed(clipped) * A * new",
        "clipped": "ratio.clip(max=1 + high)",
        "kl": "0 * new",
        "mean": "total.sum() / lengths.sum()",
    },
    "rloo": {
        "advantage": "/ (std + 1e-6) => * num_generations / (num_generations - 1)",
        "objective": "A * new",
        "kl": "0 * new",
        "mean": "total.sum(1).mean()",
    },
}
TITLES = dict(zip(METHODS, ("GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO")))
GRPO = {piece: next(iter(choices)) for piece, choices in PIECES.items()}


def loss(pieces: dict[str, str], log_prob: jax.Array, given: np.ndarray | None = None) -> jax.Array:
    """The loss that these pieces make, float32 []; a `given` advantage [N] replaces the first
    piece.
    """
    old, mask = BATCH["old_log_prob"], BATCH["mask"]
    given = advantage(pieces["advantage"]) if given is None else given
    x = dict(
        advantage=jnp.asarray(given, jnp.float32),
        new=log_prob,
        old=old,
        ref=BATCH["ref_log_prob"],
        mask=mask,
        lengths=mask.sum(axis=1),
        own=((log_prob - old) * mask).sum(axis=1),
        low=BATCH["epsilon"],
        high=BATCH["epsilon_high"],
        beta=BATCH["beta"],
    )
    for piece in list(pieces)[1:]:
        x[piece] = eval(pieces[piece], globals(), x)
    return x["loss"]


def look(loss: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Value and gradient on the golden batch of a loss of log_prob alone."""
    constants = f"epsilon {BATCH['epsilon']}, beta {BATCH['beta']}"
    yield f"golden.npz (N = T = 12), {constants}: the loss", loss(BATCH["log_prob"])
    yield "the same: the loss's gradient for log_prob [N, T]", jax.grad(loss)(BATCH["log_prob"])


def exercise(method: str, given: bool) -> grader.Exercise:
    """A method, and the other choices of each piece as mistakes; of the advantage unless it is
    `given`.
    """
    own = GRPO | METHODS[method]
    mistakes = {
        words: (piece, x)
        for piece in list(PIECES)[given:]
        for x, words in PIECES[piece].items()
        if x != own[piece]
    }

    def variant(right: Any, *changes: tuple[str, str]) -> Callable:
        pieces, advantage = own | dict(changes), BATCH[f"{method}_advantage"] if given else None
        return lambda log_prob, *_: loss(pieces, log_prob, advantage)

    return grader.Exercise(look, variant(None), mistakes, variant=variant)


# %% group_advantage -------------------------------------------------------------------------------
# three groups; the last has no signal
REWARDS = np.array([1, 0, 0.5, 0, 3, 1, 0, 1, 2, 2, 2, 2], np.float32)


def look_at_group_advantage(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Three groups of four."""
    yield f"rewards {REWARDS.tolist()}, num_generations 4", function(jnp.asarray(REWARDS), 4)


GROUP_ADVANTAGE = grader.Exercise(
    look_at_group_advantage,
    group_advantage,
    {words: edit for edit, words in list(PIECES["advantage"].items())[1:]}
    | {
        "1e-6 is missing: a group of equal rewards is 0 / 0": "+ 1e-6 =>",
        "the groups come back as [B, G], not as [B * G]": ".ravel() =>",
    },
)

# %% completion_mask -------------------------------------------------------------------------------
COMPLETIONS = np.int32(
    [
        [5, 6, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],  # an empty answer: its end-of-sequence token still counts
        [5, 0, 6, 1, 0, 0],  # token 0 was sampled, so it isn't padding
        [5, 1, 7, 1, 0, 0],  # the sampler went on after the end
        [5, 6, 7, 8, 9, 5],  # cut off
    ]
)


def look_at_mask(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Each row separately: the first wrong one is shown."""
    mask = function(jnp.asarray(COMPLETIONS), 1)
    yield from zip((f"completion {row}, eos_id 1" for row in COMPLETIONS), jnp.asarray(mask, bool))


def completion_mask(completions, eos_id):
    is_eos = completions == eos_id
    before = is_eos.cumsum(axis=1) - is_eos  # how many there are before each token
    return before == 0


COMPLETION_MASK = grader.Exercise(
    look_at_mask,
    completion_mask,
    {
        "the end-of-sequence token does not count": "- is_eos =>",
        "one token after the end-of-sequence token counts, too": (
            "before == 0 => jnp.pad(before, ((0, 0), (1, 0)))[:, :-1] == 0"
        ),
        "everything but token 0 counts: padding is recognized by its position, not by its token": (
            "before == 0 => completions != 0"
        ),
        "everything but the end-of-sequence token counts": "before == 0 => ~is_eos",
        "the last end-of-sequence token ends an answer, not the first": (
            "before == 0 => (before == 0) | is_eos[:, ::-1].cumsum(axis=1)[:, ::-1].astype(bool)"
        ),
        "argmax of an answer without end-of-sequence token is 0: all but its first token is lost": (
            "before == 0 => jnp.arange(is_eos.shape[1]) <= is_eos.argmax(axis=1, keepdims=True)"
        ),
        "an answer without end-of-sequence token does not count at all": (
            "before == 0 => (before == 0) & is_eos.any(axis=1, keepdims=True)"
        ),
        "the mask is inverted: True where there is padding": "before == 0 => before > 0",
        "the sum runs down the batch, not along the answer": "axis=1 => axis=0",
    },
)


# %% grpo_loss -------------------------------------------------------------------------------------
def look_at_loss(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Value and gradient on the golden batch."""
    b = BATCH
    arrays = [
        jnp.asarray(b[name]) for name in ("old_log_prob", "ref_log_prob", "grpo_advantage", "mask")
    ]
    loss = lambda log_prob: function(log_prob, *arrays, b["epsilon"].item(), b["beta"].item())  # noqa: E731
    jax.eval_shape(loss, b["log_prob"])  # traced as jax.jit does it in a training
    return look(loss)


GRPO_LOSS = exercise("grpo", given=True)._replace(look=look_at_loss)

EXERCISES = {
    "group_advantage": GROUP_ADVANTAGE,
    "completion_mask": COMPLETION_MASK,
    "grpo_loss": GRPO_LOSS,
}


# %% Training with them ----------------------------------------------------------------------------
def as_method(group_advantage: Callable, completion_mask: Callable, grpo_loss: Callable) -> tuple:
    """The reader's functions as `advantage` and `objective` of a METHOD file, which exercises.py
    is.
    """
    eos_id = functools.cache(
        lambda model: llama.load_tokenizer(llama.fetch_model(model)[0]).eos_token_id
    )

    def advantage(samples):
        rewards = samples.rewards  # [B, G]
        flat = group_advantage(jnp.asarray(rewards.ravel(), jnp.float32), rewards.shape[1])
        return np.asarray(flat).reshape(rewards.shape)

    def objective(pi, batch, c):
        import grpo_llama3_1_8b_demo as script

        mask = completion_mask(batch.completion_ids, eos_id(c.MODEL))  # [N, T]
        ref = pi.log_prob if batch.ref_log_prob is None else batch.ref_log_prob
        # []
        loss = grpo_loss(
            pi.log_prob,
            batch.old_log_prob,
            ref,
            batch.advantage[:, 0],
            mask,
            c.EPSILON,
            batch.beta[0, 0],
        )
        # The page subtracts the KL again, so we add it here; the reader's loss has its own.
        kl = script.k3((ref - pi.log_prob) * batch.mask)
        return batch.beta * kl - loss, script.clipped_objective(pi, batch, c)[1]  # [N, T] each

    return advantage, objective


# %% A reader's own loss ---------------------------------------------------------------------------
def read_loss(path: str) -> Callable:
    """The function `loss` of a file; UserError if there's none that takes the golden batch."""
    function = getattr(load_file(Path(path), "loss"), "loss", None)
    if not callable(function):
        raise UserError(f"{path}: has no function `loss`; name yours so")
    needed = [
        name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty
    ]
    if not {"log_prob"} <= set(needed) <= {"log_prob", *GIVEN}:
        may = f"log_prob and any of {', '.join(GIVEN)}"
        raise UserError(f"{path}: loss asks for {', '.join(needed)}; its arguments may be {may}")
    return function


def what_it_is(function: Callable) -> list[tuple[str, ...]]:
    """Which methods a reader's loss may be, each with the fewest mistakes, two at most, that
    explain it.
    """
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
    explained = (
        [
            (method, *words)
            for method, one in exercises.items()
            for words in one.explanations(looks[method], number)
        ]
        for number in (0, 1, 2)
    )
    return next(filter(None, explained), [])


# %% Main ------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Checks the reader's three functions, or the loss in the file on the command line.

    Exit code 0: all right, or the loss is one of the six; 1: not yet; 2: the file can't be used.
    """

    def judge(arguments: list[str]) -> None:
        if arguments and "=" not in arguments[0]:
            sys.exit(0 if judge_file(arguments[0]) else 1)
        grader.run(EXERCISES, functions)
        print("\nAll right. The main script trains the tiny Llama with them:")
        import grpo_llama3_1_8b_demo as script

        script.main(
            [f"METHOD={inspect.getsourcefile(functions[0])}", *(arguments or ["NUM_BATCHES=30"])]
        )

    settings.exit_on_error(judge)


def judge_file(path: str) -> bool:
    """Says which loss a file holds; True if it's one of the six."""
    near = what_it_is(read_loss(path))
    for method, *words in near:
        print(f"It is {TITLES[method]}{', but ' * bool(words)}{'; and '.join(words)}.")
    if not near:
        print("It is none of them, and no one or two of the usual mistakes make it one.")
    return near != [] and len(near[0]) == 1
