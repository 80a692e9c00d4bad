"""Your own method, to copy and change: functions named after the page's tables.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py METHOD=examples/my_method.py
    python benchmarks/methods.py METHOD=5_GRPO_Maxtext/examples/my_method.py  # seven seeds

`Method` in grpo_variants.py has the names and arguments: rollouts, advantage, weights, objective,
kl. A file may have several of them. advantage and weights use NumPy; objective and kl are compiled
and differentiated, so they use jax.numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np


def advantage(samples) -> np.ndarray:
    """Rank-based advantage: a group's best answer gets 1, the worst -1; float [B, G].

    Answers with equal rewards share their mean rank, so a group of equal rewards gets 0.
    """
    rewards = samples.rewards  # [B, G]
    better = (rewards[:, :, None] > rewards[:, None, :]).sum(axis=2)  # [B, G], how many it beats
    worse = (rewards[:, :, None] < rewards[:, None, :]).sum(axis=2)
    return (better - worse) / (rewards.shape[1] - 1)


def objective(pi, batch, c) -> tuple[jax.Array, jax.Array]:
    """A smooth clip: (1 + eps * tanh((ratio - 1) / eps)) * A, which never cuts a gradient to 0.

    Returns:
        The objective [N, T], and which tokens the page's clip could change, bool [N, T].
    """
    log_ratio = jnp.clip(pi.log_prob - batch.old_log_prob, max=20.0)  # exp stays finite
    distance = jnp.exp(log_ratio) - 1  # [N, T]
    smooth = 1 + c.EPSILON * jnp.tanh(distance / c.EPSILON)
    return smooth * batch.advantage, jnp.abs(distance) > c.EPSILON
