"""Write GRPO's three functions yourself. Fill in the bodies, then run the checker:

    python 5_GRPO_Maxtext/exercises.py               # each: not begun, right, or wrong, and how
    python 5_GRPO_Maxtext/exercises.py my_loss.py    # which published loss is `loss` in a file?

When all three are right, the main script trains the tiny Llama with them, for 30 steps: half a
minute.

Your own `loss` takes what it needs of the golden batch as named arguments: log_prob, old_log_prob,
ref_log_prob, mask, and advantage (the method's own, [N]) or rewards [N]; epsilon (here 0.2),
epsilon_high (0.28), beta (0.04), num_generations (4), max_tokens (12). The shapes are as below.

N = B * G answers, G to each of B questions, of at most T tokens. Write with `jnp`: numpy has no
gradient.
"""

import jax
import jax.numpy as jnp  # noqa: F401  (for you)

from tools.exercises import exercise_checks


def group_advantage(rewards: jax.Array, num_generations: int) -> jax.Array:
    """How much better each answer is than its group (arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean(R_1 ... R_G)) / (std(R_1 ... R_G) + 1e-6)

    Rewards and advantages are float32 [B * G], the G answers to a question side by side;
    num_generations is G. The standard deviation is the sample's: it divides by G - 1.
    """
    raise NotImplementedError


def completion_mask(completions: jax.Array, eos_id: int) -> jax.Array:
    """Marks the tokens of an answer: all up to and including its first end-of-sequence token.

    Everything after it is padding, whatever the token. An answer that was cut off has no
    end-of-sequence token, and all of it counts. Completions are int32 [N, T], the mask is bool [N,
    T].
    """
    raise NotImplementedError


def grpo_loss(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    ref_log_prob: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    epsilon: float,
    beta: float,
) -> jax.Array:
    """Minus GRPO's objective (arXiv 2402.03300, eq. 3 and 4).

        J = mean_i mean_t [ min(ratio_t * A_i, clip(ratio_t, 1 - epsilon, 1 + epsilon) * A_i)
                            - beta * KL_t ]
        ratio_t = pi(o_t) / pi_old(o_t)
        KL_t = pi_ref(o_t) / pi(o_t) - log(pi_ref(o_t) / pi(o_t)) - 1

    mean_t is over an answer's own tokens, mean_i over the answers. log_prob is log pi of each
    token, and the gradient flows through this one only; old_log_prob is that of the policy that
    sampled the answers, ref_log_prob that of the frozen reference: float32 [N, T] each. advantage
    is float32 [N], one for all tokens of an answer; mask is bool [N, T], False where the other
    arrays hold padding. Returns float32 [].
    """
    raise NotImplementedError


# for METHOD
advantage, objective = exercise_checks.as_method(group_advantage, completion_mask, grpo_loss)

if __name__ == "__main__":
    exercise_checks.main(group_advantage, completion_mask, grpo_loss)
