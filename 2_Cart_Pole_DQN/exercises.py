"""DQN's three functions, to be written by you. Fill in the bodies, then let them be judged:

    python 2_Cart_Pole_DQN/exercises.py    # each: not begun, right, or wrong, and how

When all are right, cart_pole_dqn.py trains with them. They run inside jax.jit: write with `jnp`.
"""

from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  (for you)

import exercise_checks


def td_target(reward: jax.Array, terminated: jax.Array, next_q: jax.Array, gamma: jax.Array) -> jax.Array:
    """What Q(s, a) should have been: the rewards, then an estimate of what follows (Mnih et al. 2015).

        y = r + gamma * (1 - terminated) * next_q

    Args:
        reward: float32 [B], of one step or the discounted sum of several.
        terminated: bool [B], whether the episode is over. A truncated one would have gone on: False.
        next_q: float32 [B], what the network holds the next state to be worth.
        gamma: float32 [B], the discount of next_q.

    Returns:
        float32 [B]. No gradient flows through a target: jax.lax.stop_gradient.
    """
    raise NotImplementedError


def n_step(batch: Any, gamma: float) -> tuple[jax.Array, jax.Array, Any]:
    """The rewards of windows of n consecutive steps, up to the first end of an episode (Sutton 1988).

        sum = r_0 + gamma * r_1 + ... + gamma^(m-1) * r_{m-1}

    m is n, or less where the episode ends within the window, by terminated or by truncated: the step that
    ends it is the last one that counts. What comes after it is the next episode's.

    Args:
        batch: windows, a NamedTuple of arrays [B, n, ...]. You need batch.reward, float32 [B, n], and
            batch.terminated and batch.truncated, bool [B, n].
        gamma: the discount.

    Returns:
        The sums, float32 [B]; m, int32 [B]; the last transition that counts, the same NamedTuple of arrays
        [B, ...]: `jax.tree.map(lambda x: x[jnp.arange(B), m - 1], batch)`.
    """
    raise NotImplementedError


def sample(buffer: Any, rng: jax.Array, batch_size: int, n_steps: int) -> Any:
    """Windows of consecutive transitions from a ring, sampled uniformly with replacement.

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
    exercise_checks.main(td_target, n_step, sample)
