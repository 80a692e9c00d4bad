"""Write the two functions that set GRPO apart from PPO. Fill in the bodies, then run the checker:

    python 4_GRPO_MNIST/exercises.py    # each: not begun, right, or wrong, and how

When both are right, grpo_mnist.py trains with them. They run inside jax.jit: write with `jnp`.
"""

import jax
import jax.numpy as jnp  # noqa: F401  (for you)

import exercise_checks


def group_advantage(rewards: jax.Array) -> jax.Array:
    """How many standard deviations a guess is above its group (arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean(R_1 ... R_G)) / (std(R_1 ... R_G) + 1e-6)

    float32 [B, G]: a row is a group, the G guesses for one image. The standard deviation is the
    sample's: it divides by G - 1.
    """
    raise NotImplementedError


def k3(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """An estimate of KL(pi || pi_ref) that is never negative (Schulman 2020; DeepSeekMath, eq. 4).

        k3 = pi_ref / pi - log(pi_ref / pi) - 1

    log_prob is log pi of what was sampled from pi, of any shape; the gradient flows through it.
    ref_log_prob is the frozen reference's.
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(group_advantage, k3)
