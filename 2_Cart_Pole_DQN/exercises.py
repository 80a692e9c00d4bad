"""Write DQN's three functions yourself. Fill in the bodies, then run the checker:

    python 2_Cart_Pole_DQN/exercises.py    # each: not begun, right, or wrong, and how

When all are right, cart_pole_dqn.py trains with them. They run inside jax.jit: write with `jnp`.
"""

from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  (for you)

import exercise_checks


def td_target(
    reward: jax.Array, terminated: jax.Array, next_q: jax.Array, gamma: jax.Array
) -> jax.Array:
    """What Q(s, a) should have been: the rewards, then an estimate of what follows (Mnih et al.
    2015).

        y = r + gamma * (1 - terminated) * next_q

    All are [B]: the rewards of one step or several; whether the episode has terminated (False for
    a truncated one, which would have gone on); the network's estimate of the next state's value;
    the discount of that estimate. No gradient flows through a target: jax.lax.stop_gradient.
    """
    raise NotImplementedError


def n_step(batch: Any, gamma: float) -> tuple[jax.Array, jax.Array, Any]:
    """The rewards of windows of n consecutive steps, up to the first end of an episode (Sutton
    1988).

        sum = r_0 + gamma * r_1 + ... + gamma^(m-1) * r_{m-1}

    m is n, or less if the episode ends within the window, by termination or truncation. The step
    that ends it is the last one that counts; what follows belongs to the next episode.
    `batch` is a NamedTuple of arrays [B, n, ...]; you need batch.reward, batch.terminated and
    batch.truncated, [B, n].

    Returns the sums, float32 [B]; m, int32 [B]; the last transition that counts, the same
    NamedTuple of arrays [B, ...]: `jax.tree.map(lambda x: x[jnp.arange(B), m - 1], batch)`.
    """
    raise NotImplementedError


def sample(buffer: Any, rng: jax.Array, batch_size: int, n_steps: int) -> Any:
    """Windows of consecutive transitions from a ring, sampled uniformly with replacement.

    Transition number i, counted from 0, was written into row i % capacity and replaced what was
    there, so the buffer has the last `capacity` transitions. A window may begin with any of them
    that has n_steps - 1 newer ones after it. It never runs on from the newest row into the oldest,
    which is next to it in the ring.

    buffer.rows is a tree of arrays, each [capacity, ...]; buffer.count, int32 [], says how many
    transitions were ever added, at least n_steps. Returns the same tree, each array [batch_size,
    n_steps, ...]: `jax.tree.map(lambda x: x[positions], buffer.rows)` makes it of positions, int32
    [batch_size, n_steps].
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(td_target, n_step, sample)
