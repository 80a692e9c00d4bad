"""A tiny reward model: it learns preferences from pairs of answers, and a policy learns to fool it.

docs/learn/reward_model.md has the commands. The pairs come from a run's answers.jsonl: two
answers to the same question. The one with the higher reward plays the answer people preferred. It's
the Bradley-Terry model (InstructGPT, arXiv 2203.02155, eq. 1):

    P(a is preferred to b) = sigmoid(score(a) - score(b))        score(a) = w . features(a)

The features count an answer's words, numbers and signs. The model can't do arithmetic and never
sees the question, and a policy will exploit that.
"""

import functools
import json
import re

import numpy as np
from scipy.optimize import minimize

PAIRS = "runs/pairs/answers.jsonl"  # of a run with LOG_ANSWERS_EVERY=1


def features(answer: str) -> dict[str, int]:
    """How often each tag, sign and word occurs; all numbers count as one word."""
    words = re.findall(r"</?\w+>|\d+|\w+|\S", answer)
    words = ["number" if word.isdigit() else word for word in words]
    return {word: words.count(word) for word in words}


@functools.cache
def weights() -> dict[str, float]:
    """Fits w by maximum likelihood on all pairs with different rewards, with a small L2 penalty."""
    with open(PAIRS, encoding="utf-8") as file:
        groups = [json.loads(line)["completions"] for line in file]
    pairs = [(a, b) for group in groups for a in group for b in group if a["reward"] > b["reward"]]
    words = sorted(
        {word for group in groups for answer in group for word in features(answer["text"])}
    )
    count = {
        answer["text"]: np.array([features(answer["text"]).get(word, 0) for word in words], float)
        for group in groups
        for answer in group
    }
    difference = np.array([count[a["text"]] - count[b["text"]] for a, b in pairs])  # [pairs, words]

    def loss(w):
        margin = difference @ w
        slope = -difference.T @ (1 / (1 + np.exp(margin))) / len(margin)
        return np.logaddexp(0, -margin).mean() + 1e-3 * w @ w, slope + 2e-3 * w

    fitted = minimize(loss, np.zeros(len(words)), jac=True).x
    agrees = (difference @ fitted > 0).mean()
    print(
        f"reward model: {len(pairs)} pairs, {len(words)} words, "
        f"agrees with {agrees:.0%} of the pairs"
    )
    return dict(zip(words, fitted))


def reward_model(prompts, completions, **columns) -> list[float]:
    """The score of each answer; REWARDS=reward_model."""
    return [
        sum(weights().get(word, 0.0) * n for word, n in features(text).items())
        for text in completions
    ]
