"""Write the two functions that language_model.md is about. Fill in the bodies, then run it:

    python 5_GRPO_Maxtext/language_model_exercises.py    # each: not begun, right, or wrong, and how

When both are right, the tiny Llama writes Kim's answer with your attention.
"""

import numpy as np

from tools.exercises import language_model_checks


def attention_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """How much each token reads from each token (arXiv 1706.03762, eq. 1, with a mask).

        weights = softmax(queries keys^T / sqrt(d)), over the tokens up to and including itself

    queries and keys are float32 [heads, T, d]; so is the result, [heads, T, T]: a row is the token
    that reads, a column the token it reads from, and each row sums to 1.
    """
    raise NotImplementedError


def demonstration_loss(logits: np.ndarray, tokens: np.ndarray, learned: np.ndarray) -> float:
    """The cross-entropy of demonstrations: the mean of -log pi over their answers' tokens.

    logits [B, L, V] are the model's: those at position t are for the token at position t + 1.
    tokens are int32 [B, L]: question, answer, padding. learned is float32 [B, L]: 1 where a token
    belongs to the answer, 0 elsewhere. The mean is over all of the batch's answer tokens.
    """
    raise NotImplementedError


if __name__ == "__main__":
    language_model_checks.main(attention_weights, demonstration_loss)
