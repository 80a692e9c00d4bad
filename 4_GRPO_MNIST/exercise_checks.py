"""What belongs to exercises.py: numbers to try the functions on, the usual mistakes, the training."""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import grader
import runs
import settings
from grader import Exercise

# %% group_advantage ------------------------------------------------------------------------------------
# As many groups as guesses: [B] against [B, G] goes wrong without a complaint. The last group has no signal.
REWARDS = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], np.float32)


def look_at_group_advantage(function: Callable) -> dict[str, jax.Array]:
    """Four groups of four."""
    jax.eval_shape(function, REWARDS)  # traced as jax.jit does it in a training
    return {f"rewards {REWARDS.astype(int).tolist()}": function(jnp.asarray(REWARDS))}


def group_advantage(
    rewards, axis=1, ddof=1, epsilon=1e-6, sign=1,
    mean=lambda r, axis: r.mean(axis, keepdims=True),
    std=lambda r, axis, ddof: r.std(axis, ddof=ddof, keepdims=True),
):  # fmt: skip
    return sign * (rewards - mean(rewards, axis)) / (std(rewards, axis, ddof) + epsilon)


NO_KEEPDIMS = dict(mean=lambda r, axis: r.mean(axis), std=lambda r, axis, ddof: r.std(axis, ddof=ddof))
GROUP_ADVANTAGE = Exercise(
    look_at_group_advantage,
    group_advantage,
    {
        "the standard deviation is the population's (ddof=0), not the sample's": dict(ddof=0),
        "mean and standard deviation are those of the guesses for different images: wrong axis": dict(axis=0),
        "mean and standard deviation are those of the whole batch, not of each group": dict(axis=None),
        "1e-6 is missing: a group of equal rewards is 0 / 0": dict(epsilon=0.0),
        "keepdims is missing: [B] is spread over the guesses, not over the groups": NO_KEEPDIMS,
        "the mean lacks keepdims: [B] is spread over the guesses, not over the groups": dict(
            mean=NO_KEEPDIMS["mean"]
        ),
        "the std lacks keepdims: [B] is spread over the guesses, not over the groups": dict(
            std=NO_KEEPDIMS["std"]
        ),
        "it is not divided by the standard deviation": dict(std=lambda r, axis, ddof: 1.0, epsilon=0.0),
        "it is divided by the variance": dict(
            std=lambda r, axis, ddof: r.var(axis, ddof=ddof, keepdims=True)
        ),
        "the mean is not subtracted": dict(mean=lambda r, axis: 0.0),
        "the sign is the other one: mean less reward": dict(sign=-1),
        "the baseline is the mean of the other guesses, and nothing is divided (RLOO)": lambda rewards: (
            rewards - (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
        ),
    },
)

# %% k3 -------------------------------------------------------------------------------------------------
LOG_PROB = np.array([[-0.5, -1.0, -2.0], [-0.25, -3.0, -1.5]], np.float32)
REF_LOG_PROB = np.array([[-1.0, -1.0, -1.0], [-2.25, -2.0, -1.0]], np.float32)


def look_at_k3(function: Callable) -> dict[str, jax.Array]:
    """Value and gradient."""
    jax.eval_shape(function, LOG_PROB, REF_LOG_PROB)
    log_prob, ref_log_prob = jnp.asarray(LOG_PROB), jnp.asarray(REF_LOG_PROB)
    given = f"log_prob {LOG_PROB.tolist()}\nref_log_prob {REF_LOG_PROB.tolist()}\n"
    return {
        f"{given}the estimates": function(log_prob, ref_log_prob),
        f"{given}the gradient of their sum with respect to log_prob": jax.grad(
            lambda log_prob: jnp.sum(function(log_prob, ref_log_prob))
        )(log_prob),
    }


def k3(
    log_prob, ref_log_prob,
    of=lambda d: jnp.expm1(d) - d,
    difference=lambda p, ref: ref - p,
    finish=lambda x: x,
):  # fmt: skip
    return finish(of(difference(log_prob, ref_log_prob)))


K3 = Exercise(
    look_at_k3,
    k3,
    {
        "it is k1, log pi - log pi_ref": dict(of=lambda d: -d),
        "it is k2, half the square of log pi - log pi_ref": dict(of=lambda d: d**2 / 2),
        "pi and pi_ref are exchanged": dict(difference=lambda p, ref: p - ref),
        "the sign is the other one": dict(finish=lambda x: -x),
        "the - 1 is missing: equal policies are 1 apart": dict(of=lambda d: jnp.exp(d) - d),
        "the logarithm is missing: only pi_ref / pi - 1 is left": dict(of=jnp.expm1),
        "the logarithm is added, not subtracted": dict(of=lambda d: jnp.expm1(d) + d),
        "the exp is missing: the difference of the logarithms stands for the ratio": dict(
            of=lambda d: d - d - 1
        ),
        "a difference of probabilities stands for their ratio": dict(
            difference=lambda p, ref: jnp.exp(ref) - jnp.exp(p)
        ),
        "no gradient flows: stop_gradient holds log_prob": dict(finish=jax.lax.stop_gradient),
        "the mean is taken already": dict(finish=jnp.mean),
    },
)

EXERCISES = {"group_advantage": GROUP_ADVANTAGE, "k3": K3}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    runs.start_jax(xla_flags="")
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    import grpo_mnist

    print("\nAll right. grpo_mnist.py with your group_advantage and k3:")
    grpo_mnist.group_advantage, grpo_mnist.k3 = functions
    settings.run(lambda arguments: grpo_mnist.main(arguments or ["MNIST_PATH=subset"]))
