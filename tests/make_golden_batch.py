"""Writes tools/exercises/golden.npz: answers, and six losses with their gradients, from the papers.

    python tests/make_golden_batch.py

Everything is float64 and written as the papers write it, one answer and one token at a time,
without a mask. The gradient with respect to each log-prob is a central difference. What a paper
puts under stop-gradient is held fixed: such terms read `fixed`, a second copy of the log-probs that
no difference moves.

    grpo      arXiv 2402.03300, eq. 3 and 4; the std is the sample's, as Tunix, TRL and verl have it
    dr_grpo   arXiv 2503.20783, section 3.2; a sum is divided by the longest answer there may be
    dapo      arXiv 2503.14476, eq. 8: mean over all tokens, clip-higher
    gspo      GSPO-token, arXiv 2507.18071, eq. 13 and 14. Its epsilon of 3e-4 would clip all here
    cispo     arXiv 2506.13585, eq. 4 and 5: no lower bound
    rloo      arXiv 2402.14740, section 3.3: an answer is one action

Only grpo has a KL.
"""

from math import exp, log
from pathlib import Path

import numpy as np

TO = (
    Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext" / "tools" / "exercises" / "golden.npz"
)
QUESTIONS, G = 3, 4
# as many tokens as answers: [N] against [N, T] goes wrong without a complaint
N = T = QUESTIONS * G
EPSILON, EPSILON_HIGH, BETA = 0.2, 0.28, 0.04
# none as long as allowed: T is not the longest answer
LENGTHS = [11, 3, 7, 1, 5, 9, 2, 8, 6, 4, 10, 5]
# mean log-ratio of each answer: below, between and above the bounds of both clips, for good and bad
# answers
SHIFTS = [0.22, -0.3, 0.1, 0.4, 0.22, -0.3, 0.4, -0.1, 0.0, 0.3, -0.3, 0.1]
# the last group teaches nothing
REWARDS = [1.0, 0.0, 0.0, 0.5, 2.0, 1.0, 0.0, 1.5, 1.0, 1.0, 1.0, 1.0]


def batch() -> dict[str, np.ndarray]:
    """Log-probs of three policies that differ enough for ratios on both sides of both clips."""
    rng = np.random.default_rng(0)
    mask = np.arange(T) < np.array(LENGTHS)[:, None]
    old = -rng.exponential(1.2, (N, T)) - 1.5
    log_ratio = rng.normal(0, 0.3, (N, T))
    log_ratio += (np.array(SHIFTS) - (log_ratio * mask).sum(axis=1) / LENGTHS)[:, None]
    arrays = {
        "log_prob": old + log_ratio,
        "old_log_prob": old,
        "ref_log_prob": np.minimum(old + rng.normal(0, 0.5, (N, T)), -0.01),
    }
    # what is rounded to float32 before it is used is the same number for everybody
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    return arrays | {"mask": mask, "rewards": np.array(REWARDS, np.float32)}


def advantage(method: str, i: int) -> float:
    """Of answer i, within its group."""
    group = [REWARDS[j] for j in range(N) if j // G == i // G]
    mean = sum(group) / G
    if method == "rloo":  # leaves one out
        return REWARDS[i] - (sum(group) - REWARDS[i]) / (G - 1)
    if method == "dr_grpo":
        return REWARDS[i] - mean
    variance = sum((reward - mean) ** 2 for reward in group) / (G - 1)
    return (REWARDS[i] - mean) / (variance**0.5 + 1e-6)


def answer_sum(method: str, i: int, new, fixed, old, ref) -> float:
    """Sum over the tokens of answer i of what the method's objective adds up."""
    A, total, length = advantage(method, i), 0.0, LENGTHS[i]
    high = 1 + (EPSILON_HIGH if method in ("dapo", "cispo") else EPSILON)
    answer_log_ratio = sum(fixed[i, t] - old[i, t] for t in range(length)) / length
    for t in range(length):
        if method == "cispo":
            total += min(exp(fixed[i, t] - old[i, t]), high) * A * new[i, t]
        elif method == "rloo":
            total += A * new[i, t]
        else:
            ratio = exp(new[i, t] - old[i, t])
            if method == "gspo":
                ratio = exp(answer_log_ratio) * exp(new[i, t]) / exp(fixed[i, t])
            total += min(ratio * A, min(max(ratio, 1 - EPSILON), high) * A)
        if method == "grpo":
            x = exp(ref[i, t] - new[i, t])
            total -= BETA * (x - log(x) - 1)
    return total


def loss(method: str, new, fixed, old, ref) -> float:
    """Minus the objective of the method's paper."""
    sums = [answer_sum(method, i, new, fixed, old, ref) for i in range(N)]
    if method in ("dapo", "cispo"):
        return -sum(sums) / sum(LENGTHS)
    if method == "dr_grpo":
        return -sum(sums) / T / N
    if method == "rloo":
        return -sum(sums) / N
    return -sum(total / length for total, length in zip(sums, LENGTHS)) / N


def gradient(method: str, new, old, ref) -> np.ndarray:
    """Central differences, float64 [N, T]; right to about 1e-9."""
    found, h = np.zeros((N, T)), 1e-5
    for i, t in zip(*np.nonzero(np.arange(T) < np.array(LENGTHS)[:, None])):
        step = np.zeros((N, T))
        step[i, t] = h
        above, below = (loss(method, moved, new, old, ref) for moved in (new + step, new - step))
        found[i, t] = (above - below) / (2 * h)
    return found


def main() -> None:
    """Writes the file."""
    arrays = batch()
    new, old, ref = (
        arrays[name].astype(float) for name in ("log_prob", "old_log_prob", "ref_log_prob")
    )
    for method in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"):
        arrays[f"{method}_advantage"] = np.array([advantage(method, i) for i in range(N)])
        arrays[f"{method}_loss"] = np.array(loss(method, new, new, old, ref))
        arrays[f"{method}_gradient"] = gradient(method, new, old, ref)
    constants = dict(
        num_generations=G, max_tokens=T, epsilon=EPSILON, epsilon_high=EPSILON_HIGH, beta=BETA
    )
    np.savez_compressed(TO, **arrays, **constants)


if __name__ == "__main__":
    main()
