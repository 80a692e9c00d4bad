"""Write the functions of REINFORCE and PPO yourself. Fill in the bodies, then run the checker:

    python 3_Pendulum/exercises.py    # each: not begun, right, or wrong, and how

When all four are right, reinforce.py and ppo.py train with them. N environments, T steps of each.
They run inside jax.jit: write with `jnp`; a loop from the last step to the first is
`jax.lax.scan(..., reverse=True)`.
"""

import jax
import jax.numpy as jnp  # noqa: F401  (for you)

import exercise_checks


def discounted_returns(reward: jax.Array, gamma: float) -> jax.Array:
    """The return to go (Sutton & Barto 2018, eq. 3.9): what was earned from step t on.

        G_t = r_t + gamma * r_{t+1} + gamma^2 * r_{t+2} + ... = r_t + gamma * G_{t+1}

    Rewards, 0 after the end of an episode, and returns are float32 [N, T].
    """
    raise NotImplementedError


def policy_loss(log_prob: jax.Array, advantage: jax.Array, alive: jax.Array) -> jax.Array:
    """What REINFORCE's gradient step lowers (Williams 1992), float32 [].

        L = -1/N * sum_n sum_t alive_nt * advantage_nt * log pi(a_nt | s_nt)

    All [N, T]. The gradient flows through log_prob only: the advantage is a constant
    (jax.lax.stop_gradient), even if a network computed it. alive is 1 for steps that were played, 0
    for padding after the end.
    """
    raise NotImplementedError


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    gae_lambda: float,
) -> jax.Array:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16), from the last step back to
    the first.

        delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1},    A_T = 0
        ended_t = terminated_t or truncated_t

    All are [N, T]. After an end, the next step belongs to another episode. next_value, V(s_{t+1}),
    is always the value of the observation in which this one ended. Truncated means that the time
    limit cut the episode off; it would have gone on.
    """
    raise NotImplementedError


def clipped_objective(ratio: jax.Array, advantage: jax.Array, epsilon: float) -> jax.Array:
    """PPO's clipped surrogate objective (Schulman et al. 2017, eq. 7) of each step, to be
    maximized.

        min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A)

    ratio, pi(a | s) / pi_old(a | s), and advantage are float32, of any shape.
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(discounted_returns, policy_loss, gae, clipped_objective)
