"""Your own method, to copy and change: a function named after one of the page's tables.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py METHOD=examples/my_method.py
    python benchmarks/methods.py METHOD=5_GRPO_Maxtext/examples/my_method.py  # seven seeds

`Method` in grpo_variants.py has the names and arguments: rollouts, advantage, weights, objective,
kl. A file may have several of them.
"""

import numpy as np


def advantage(samples) -> np.ndarray:
    """Rank-based advantage: a group's best answer gets 1, the worst -1; float [B, G].

    Answers with equal rewards share their mean rank, so a group of equal rewards gets 0.
    """
    rewards = samples.rewards  # [B, G]
    better = (rewards[:, :, None] > rewards[:, None, :]).sum(axis=2)  # [B, G], how many it beats
    worse = (rewards[:, :, None] < rewards[:, None, :]).sum(axis=2)
    return (better - worse) / (rewards.shape[1] - 1)
