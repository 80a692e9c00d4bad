"""One step of GRPO by hand, in NumPy: every number from four answers to the new weights.

The language model is as small as one can be: six tokens, and the next one depends only on the one
before. Its parameters are a table of logits, one row per previous token, so you can check each
number with a calculator. The formulas are those of grpo_llama3_1_8b_demo.py, under the same names
(arXiv 2402.03300, eq. 3 and 4).

    python 5_GRPO_Maxtext/grpo_by_hand.py

Change a constant and run it again: BETA=0 switches off the KL, NUM_ITERATIONS=1 the clip (see
update 2).
"""

import numpy as np

SEED = 1  # which answers are sampled
NUM_GENERATIONS = 4  # G, answers to the one question
NUM_ITERATIONS = 2  # mu, updates with the same answers
EPSILON = 0.2  # clip range of the ratio
BETA = 0.04  # weight of the KL to the starting model
LEARNING_RATE = 4.0  # of plain gradient ascent; the real script has AdamW and a far smaller one

QUESTION = "Tom has 14 cards and gives 7 away. How many does he have left?"
TOKENS = ["question", "14-7", "14+7", "=7", "=21", "end"]
LENGTH = 3  # T, tokens per answer
# Logits of the next token (column) after each token (row). The model often misreads "gives away".
START = np.array(
    [  # [V, V]
        [-9, 1.0, 1.5, -9, -9, -9],  # after the question: 14-7 or 14+7
        [-9, -9, -9, 2.0, 0.0, -9],  # after 14-7: =7 or =21
        [-9, -9, -9, 0.0, 2.0, -9],  # after 14+7
        [-9, 0.0, -9, -9, -9, 1.0],  # after =7: end, or it rambles on
        [-9, -9, 0.0, -9, -9, 1.0],  # after =21
        [0.0] * 6,
    ]
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def generate(params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Samples the G answers token by token: int [G, T]."""
    answers = np.zeros((NUM_GENERATIONS, LENGTH + 1), int)  # column 0: the question
    for t in range(LENGTH):
        for i in range(NUM_GENERATIONS):
            probs = np.exp(log_softmax(params[answers[i, t]]))  # [V]
            answers[i, t + 1] = rng.choice(len(TOKENS), p=probs)
    return answers[:, 1:]


def reward(answer: np.ndarray) -> float:
    """1 for the right number, 0.5 for ending in time."""
    return 1.0 * (TOKENS[answer[1]] == "=7") + 0.5 * (TOKENS[answer[2]] == "end")


def log_probs(params: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """log pi of each token, given the one before: [G, T]."""
    return log_softmax(params)[previous(answers), answers]


def previous(answers: np.ndarray) -> np.ndarray:
    return np.pad(answers, ((0, 0), (1, 0)))[:, :-1]  # [G, T]; the first token follows the question


def loss_and_gradient(params, answers, advantage, old_log_prob, ref_log_prob):
    """-J, GRPO's objective negated; its gradient [V, V]; and its terms per token [G, T]."""
    log_prob = log_probs(params, answers)
    ratio = np.exp(log_prob - old_log_prob)
    unclipped = ratio * advantage  # all tokens of an answer share its advantage, [G, 1]
    clipped = np.clip(ratio, 1 - EPSILON, 1 + EPSILON) * advantage
    x = ref_log_prob - log_prob
    kl = np.exp(x) - x - 1  # k3
    weight = 1 / answers.size  # the mean over the answers of the mean over their tokens
    J = (weight * (np.minimum(unclipped, clipped) - BETA * kl)).sum()

    # The chain rule. Where the min takes the clipped side, the ratio is a constant and has no
    # gradient.
    d_log_prob = weight * (np.where(unclipped <= clipped, unclipped, 0) - BETA * (1 - np.exp(x)))
    # [G, T, V]
    onehot, probs = np.eye(len(TOKENS))[answers], np.exp(log_softmax(params))[previous(answers)]
    dJ = np.zeros_like(params)
    # d log pi / d logits
    np.add.at(dJ, previous(answers), d_log_prob[..., None] * (onehot - probs))
    return -J, -dJ, {"log_prob": log_prob, "ratio": ratio, "kl": kl, "clipped": clipped < unclipped}


def show(answers: np.ndarray, parts: dict[str, np.ndarray]) -> None:
    print(f"  {'answer':17}{'log_prob':23}{'ratio (* clipped)':26}kl")
    for i, answer in enumerate(answers):
        text = " ".join(TOKENS[token] for token in answer)
        log_prob = " ".join(f"{value:6.3f}" for value in parts["log_prob"][i])
        stars = [" *"[clipped] for clipped in parts["clipped"][i].astype(int)]
        ratio = " ".join(f"{value:.3f}{star}" for value, star in zip(parts["ratio"][i], stars))
        kl = " ".join(f"{value:.3f}" for value in parts["kl"][i])
        print(f"  {text:15}{log_prob}   {ratio}   {kl}")


def main() -> None:
    answers = generate(START, np.random.default_rng(SEED))  # [G, T]
    rewards = np.array([reward(answer) for answer in answers])  # [G]
    advantage = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    print(QUESTION)
    for answer, r, a in zip(answers, rewards, advantage):
        print(
            f"  {' '.join(TOKENS[token] for token in answer):15} reward {r:.1f}, advantage {a:6.3f}"
        )
    print(f"  mean {rewards.mean():.3f}, std {rewards.std(ddof=1):.3f}")

    params = START
    # in a run's first step both are the start
    old_log_prob = ref_log_prob = log_probs(START, answers)
    for iteration in range(1, NUM_ITERATIONS + 1):
        loss, gradient, parts = loss_and_gradient(
            params, answers, advantage[:, None], old_log_prob, ref_log_prob
        )
        print(f"\nupdate {iteration}: loss {round(loss, 4) + 0.0:.4f}")
        show(answers, parts)
        params = params - LEARNING_RATE * gradient
        print(f"  logits after the question: 14-7 {params[0, 1]:.3f}, 14+7 {params[0, 2]:.3f}")
    before, after = np.exp(log_softmax(START))[0, 1], np.exp(log_softmax(params))[0, 1]
    print(f"\nprobability of 14-7, the right first token: {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
