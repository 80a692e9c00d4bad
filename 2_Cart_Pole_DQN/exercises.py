"""DQN's two functions, to be written by you. Fill in the bodies, then let them be judged:

    python 2_Cart_Pole_DQN/exercises.py    # each: not begun, right, or wrong, and how

When both are right, cart_pole_dqn.py trains with them. They run inside jax.jit: write with `jnp`.
"""

from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  (for you)

import exercise_checks


def td_target(
    reward: jax.Array, terminated: jax.Array, truncated: jax.Array, next_q: jax.Array, gamma: float
) -> jax.Array:
    """What Q(s_t, a_t) should have been: the rewards of a window, then an estimate of the rest.

        y = sum_{k<m} gamma^k * r_{t+k} + gamma^m * (1 - terminated) * next_q

    m is n, or less where the episode ends within the window: the step that ends it is the last one that
    counts, and `terminated` in the formula is this step's. A truncated episode would have gone on.

    Args:
        reward: float32 [B, n], n consecutive steps of each window.
        terminated, truncated: bool [B, n], how a step ended the episode, if it did. What stands in the window
            after an end belongs to the next episode.
        next_q: float32 [B], what the state after the m steps is worth. A network computed it.
        gamma: the discount.

    Returns:
        float32 [B]. No gradient flows through a target: jax.lax.stop_gradient.
    """
    raise NotImplementedError


def sample(buffer: Any, rng: jax.Array, batch_size: int, n_steps: int) -> Any:
    """Windows of consecutive transitions from a ring, drawn uniformly with replacement.

    Transition number i, counted from 0, was written into row i % capacity, over what stood there. Still
    there are the last `capacity` of them. A window begins with any of these after which n_steps - 1 more have
    been played; it never runs from the newest row on into the oldest, which is next to it in the ring.

    Args:
        buffer: buffer.rows, a tree of arrays, each [capacity, ...]; buffer.count, int32 [], how many
            transitions were ever added, at least n_steps.
        rng: a key for one draw.
        batch_size, n_steps: B and n.

    Returns:
        The same tree, each array [B, n, ...]; `jax.tree.map(lambda x: x[positions], buffer.rows)` makes it
        of positions, int32 [B, n].
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(td_target, sample)
