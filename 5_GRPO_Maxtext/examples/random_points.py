"""A coin flip instead of a grader: the control for any study of rewards (arXiv 2506.10947).

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py \
        REWARD_FUNC=examples/random_points.py REWARDS=random_points

If the model still improves with these rewards, it didn't learn that from the answers.
"""

import random

coin = random.Random(0)


def random_points(prompts, completions, **columns) -> list[float]:
    """1 or 0 at random for each answer, whatever it says."""
    return [float(coin.random() < 0.5) for _ in completions]
