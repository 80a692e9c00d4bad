"""Behind language_model_exercises.py: test inputs, the usual mistakes, and an answer written with
the reader's attention.
"""

from collections.abc import Callable, Iterator

import numpy as np

import llama_by_hand as by_hand
import settings
from tools.exercises import grader

# %% attention_weights -----------------------------------------------------------------------------
rng = np.random.default_rng(0)
QUERIES, KEYS = rng.normal(size=(2, 2, 4, 9)).astype(np.float32)  # [heads, T, d] each


def look_at_attention(function: Callable) -> Iterator[tuple[str, np.ndarray]]:
    """Each head separately: the first wrong one is shown."""
    weights = np.asarray(function(QUERIES, KEYS))
    words = "queries and keys of the checker, [2, 4, 9], head"
    yield from ((f"{words} {head}", weights[head]) for head in range(len(QUERIES)))


def attention_weights(queries, keys):
    T, d = queries.shape[1:]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)
    mask = np.tri(T, dtype=bool)
    scores = np.where(mask, scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


ATTENTION_WEIGHTS = grader.Exercise(
    look_at_attention,
    attention_weights,
    {
        "the mask is missing: tokens read from later ones": (
            "scores = np.where(mask, scores, -np.inf) =>"
        ),
        "a token reads from itself and the later ones: the mask is inverted": (
            "np.tri(T, dtype=bool) => np.tri(T, dtype=bool).T"
        ),
        "a token can't read from itself": ("np.tri(T, dtype=bool) => np.tri(T, k=-1, dtype=bool)"),
        "a masked score is 0, not minus infinity: e^0 is 1, so it still counts": "-np.inf => 0",
        "the mask comes after softmax, so the rows no longer sum to 1": (
            "scores = np.where(mask, scores, -np.inf) =>; / powers.sum => * mask / powers.sum"
        ),
        "the scores aren't divided by the square root of d": "/ np.sqrt(d) =>",
        "the scores are divided by d, not by its square root": "np.sqrt(d) => d",
        "the scores are divided by the square root of T, not of d": "np.sqrt(d) => np.sqrt(T)",
        "softmax runs over the readers, not over what they read": (
            "powers.sum(axis=-1 => powers.sum(axis=-2"
        ),
        "the keys ask the queries: the product is transposed": (
            "queries @ keys.swapaxes(1, 2) => keys @ queries.swapaxes(1, 2)"
        ),
        "one softmax runs over all heads and rows": "powers.sum(axis=-1 => powers.sum(axis=None",
    },
)

# %% demonstration_loss ----------------------------------------------------------------------------
# Two questions and answers of unlike length, padded with 0.
TOKENS = np.int32([[1, 5, 3, 4, 2, 0], [1, 6, 2, 0, 0, 0]])
LEARNED = np.float32([[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]])
LOGITS = rng.normal(size=(*TOKENS.shape, 7)).astype(np.float32)


def look_at_loss(function: Callable) -> Iterator[tuple[str, np.ndarray]]:
    """Four answer tokens among twelve."""
    words = (
        f"tokens {TOKENS.tolist()}, learned {LEARNED.astype(int).tolist()}, the checker's logits"
    )
    yield words, np.float32(function(LOGITS, TOKENS, LEARNED))


def demonstration_loss(logits, tokens, learned):
    before, after, counted = logits[:, :-1], tokens[:, 1:], learned[:, 1:]
    log_probs = before - np.log(np.exp(before).sum(axis=-1, keepdims=True))
    log_prob = np.take_along_axis(log_probs, after[..., None], axis=-1)[..., 0]
    return -(log_prob * counted).sum() / counted.sum()


DEMONSTRATION_LOSS = grader.Exercise(
    look_at_loss,
    demonstration_loss,
    {
        "logits and tokens aren't shifted: each token predicts itself": (
            "logits[:, :-1], tokens[:, 1:], learned[:, 1:] => logits, tokens, learned"
        ),
        "they're shifted the wrong way: each token predicts the one before it": (
            "logits[:, :-1] => logits[:, 1:]; tokens[:, 1:] => tokens[:, :-1]; "
            "learned[:, 1:] => learned[:, :-1]"
        ),
        "learned isn't shifted with the tokens": "learned[:, 1:] => learned[:, :-1]",
        "the question's tokens and the padding count, too": (
            "learned[:, 1:] => np.ones_like(learned[:, 1:])"
        ),
        "only the padding is left out: the question's tokens count, too": (
            "learned[:, 1:] => tokens[:, 1:] != 0"
        ),
        "the mean is over all positions, not over the answers' tokens": (
            "/ counted.sum() => / counted.size"
        ),
        "the tokens are added up and not averaged": "/ counted.sum() =>",
        "each answer is averaged by itself, so that short answers count more": (
            "(log_prob * counted).sum() / counted.sum() => "
            "((log_prob * counted).sum(axis=1) / counted.sum(axis=1)).mean()"
        ),
        "the logits are used as log-probs: log-softmax is missing": (
            "before - np.log(np.exp(before).sum(axis=-1, keepdims=True)) => before"
        ),
        "the logarithm is missing: it's the probability that is averaged": (
            "before - np.log(np.exp(before).sum(axis=-1, keepdims=True)) => "
            "np.exp(before) / np.exp(before).sum(axis=-1, keepdims=True)"
        ),
        "the minus is missing": "return -( => return (",
    },
)
EXERCISES = {
    "attention_weights": ATTENTION_WEIGHTS,
    "demonstration_loss": DEMONSTRATION_LOSS,
}


def grade_and_answer(functions: list[Callable]) -> None:
    """Grades the functions. If both are right, the tiny Llama answers with the reader's
    attention.
    """
    grader.run(EXERCISES, functions)
    by_hand.attention_weights = functions[0]
    print("\nthe tiny Llama with your attention:\n")
    by_hand.main([])


def main(*functions: Callable) -> None:
    """Grades them; see language_model_exercises.py."""
    settings.run(lambda arguments: grade_and_answer([*functions]))
