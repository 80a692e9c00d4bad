"""A coin instead of a grader: the control of every study of rewards (arXiv 2506.10947).

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py REWARD_FUNC=examples/random_points.py REWARDS=random_points

What still improves with these points was not learned from the answers.
"""

import random

coin = random.Random(0)


def random_points(prompts, completions, **columns) -> list[float]:
    """1 or 0 for each answer, whatever it says; the same answer twice may get both."""
    return [float(coin.random() < 0.5) for _ in completions]
