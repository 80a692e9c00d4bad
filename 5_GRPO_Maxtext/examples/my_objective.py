"""An objective of your own, to copy and change: PPO's clip without a corner.

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py METHOD=examples/my_objective.py

objective and kl are compiled and differentiated, so they use jax.numpy.
"""

import jax
import jax.numpy as jnp


def objective(pi, batch, c) -> tuple[jax.Array, jax.Array]:
    """A smooth clip: (1 + eps * tanh((ratio - 1) / eps)) * A, which never cuts a gradient to 0.

    Returns:
        The objective [N, T], and which tokens the page's clip could change, bool [N, T].
    """
    log_ratio = jnp.clip(pi.log_prob - batch.old_log_prob, max=20.0)  # exp stays finite
    distance = jnp.exp(log_ratio) - 1  # [N, T]
    smooth = 1 + c.EPSILON * jnp.tanh(distance / c.EPSILON)
    return smooth * batch.advantage, jnp.abs(distance) > c.EPSILON
