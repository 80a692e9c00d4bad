"""DQN's three functions, to be written by you. Fill in the bodies, then let them be judged:

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

    All [B]: the rewards of one step or several; whether the episode is over (a truncated one would
    have gone on: False); what the network holds the next state to be worth; its discount. No
    gradient flows through a target: jax.lax.stop_gradient.
    """
    raise NotImplementedError


def n_step(batch: Any, gamma: float) -> tuple[jax.Array, jax.Array, Any]:
    """The rewards of windows of n consecutive steps, up to the first end of an episode (Sutton
    1988).

        sum = r_0 + gamma * r_1 + ... + gamma^(m-1) * r_{m-1}

    m is n, or less where the episode ends within the window, by terminated or by truncated: the
    step that ends it is the last one that counts. What comes after it is the next episode's.
    `batch` is a NamedTuple of arrays [B, n, ...]; you need batch.reward, batch.terminated and
    batch.truncated, [B, n].

    Returns the sums, float32 [B]; m, int32 [B]; the last transition that counts, the same
    NamedTuple of arrays [B, ...]: `jax.tree.map(lambda x: x[jnp.arange(B), m - 1], batch)`.
    """
    raise NotImplementedError


def sample(buffer: Any, rng: jax.Array, batch_size: int, n_steps: int) -> Any:
    """Windows of consecutive transitions from a ring, sampled uniformly with replacement.

    Transition number i, counted from 0, was written into row i % capacity, over what stood there.
    Still there are the last `capacity` of them. A window begins with any of these after which
    n_steps - 1 more have been played; it never runs from the newest row on into the oldest, which
    is next to it in the ring.

    buffer.rows is a tree of arrays, each [capacity, ...]; buffer.count, int32 [], says how many
    transitions were ever added, at least n_steps. Returns the same tree, each array [batch_size,
    n_steps, ...]: `jax.tree.map(lambda x: x[positions], buffer.rows)` makes it of positions, int32
    [batch_size, n_steps].
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(td_target, n_step, sample)
