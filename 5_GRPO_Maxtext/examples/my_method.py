"""A method of your own, to copy and change: a piece of the loss, by its name.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py METHOD=examples/my_method.py
    python benchmarks/methods.py METHOD=5_GRPO_Maxtext/examples/my_method.py    # ten seeds, in the table

The pieces and their arguments are `Pieces` in grpo_variants.py: advantage, ratio, objective, weight,
kl, answer_sum, count. A file may have several of them.
"""

import numpy as np


def advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Only the rank counts: the best answer of a group gets 1, the worst -1; [B * G].

    Answers with equal rewards share their ranks' mean, so a group of equal rewards gets 0.
    """
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    better = (groups[:, :, None] > groups[:, None, :]).sum(axis=2)  # [B, G], how many it beats
    worse = (groups[:, :, None] < groups[:, None, :]).sum(axis=2)
    return ((better - worse) / (num_generations - 1)).ravel()
