"""What stands beside exercises.py: numbers to try the functions on, the usual mistakes, the training."""

import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import grader
import settings
from grader import Exercise

# %% group_advantage ------------------------------------------------------------------------------------
# As many groups as guesses: [B] against [B, G] goes wrong without a complaint. The last group has no signal.
REWARDS = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], np.float32)


def look_at_group_advantage(function: Callable) -> dict[str, jax.Array]:
    """Four groups of four."""
    jax.eval_shape(function, REWARDS)  # traced as jax.jit does it in a training
    return {f"rewards {REWARDS.astype(int).tolist()}": function(jnp.asarray(REWARDS))}


def above(rewards: jax.Array, axis: int | None = 1, ddof: int = 1, epsilon: float = 1e-6) -> jax.Array:
    """The right one, with its choices open."""
    mean, std = rewards.mean(axis, keepdims=True), rewards.std(axis, ddof=ddof, keepdims=True)
    return (rewards - mean) / (std + epsilon)


GROUP_ADVANTAGE = Exercise(
    look_at_group_advantage,
    above,
    {
        "the standard deviation is the population's (ddof=0), not the sample's": lambda r: above(r, ddof=0),
        "mean and standard deviation are those of the guesses for different images: wrong axis": (
            lambda r: above(r, axis=0)
        ),
        "mean and standard deviation are those of the whole batch, not of each group": lambda r: above(
            r, axis=None
        ),
        "1e-6 is missing: a group of equal rewards is 0 / 0": lambda r: above(r, epsilon=0.0),
        "keepdims is missing: [B] is spread over the guesses, not over the groups": lambda r: (
            (r - r.mean(1)) / (r.std(1, ddof=1) + 1e-6)
        ),
        "the mean lacks keepdims: [B] is spread over the guesses, not over the groups": lambda r: (
            (r - r.mean(1)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
        ),
        "the std lacks keepdims: [B] is spread over the guesses, not over the groups": lambda r: (
            (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1) + 1e-6)
        ),
        "it is not divided by the standard deviation": lambda r: r - r.mean(axis=1, keepdims=True),
        "it is divided by the variance": lambda r: (
            (r - r.mean(1, keepdims=True)) / (r.var(1, ddof=1, keepdims=True) + 1e-6)
        ),
        "the mean is not subtracted": lambda r: r / (r.std(1, ddof=1, keepdims=True) + 1e-6),
        "the sign is the other one: mean less reward": lambda r: -above(r),
        "the baseline is the mean of the other guesses, and nothing is divided (RLOO)": lambda r: (
            r - (r.sum(1, keepdims=True) - r) / (r.shape[1] - 1)
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


def of_difference(estimator: Callable) -> Callable:
    """An estimator of d = log pi_ref - log pi."""
    return lambda log_prob, ref_log_prob: estimator(ref_log_prob - log_prob)


K3 = Exercise(
    look_at_k3,
    of_difference(lambda d: jnp.expm1(d) - d),
    {
        "it is k1, log pi - log pi_ref": of_difference(lambda d: -d),
        "it is k2, half the square of log pi - log pi_ref": of_difference(lambda d: d**2 / 2),
        "pi and pi_ref are exchanged": of_difference(lambda d: jnp.expm1(-d) + d),
        "the sign is the other one": of_difference(lambda d: d - jnp.expm1(d)),
        "the - 1 is missing: equal policies are 1 apart": of_difference(lambda d: jnp.exp(d) - d),
        "the logarithm is missing: only pi_ref / pi - 1 is left": of_difference(jnp.expm1),
        "the logarithm is added, not subtracted": of_difference(lambda d: jnp.expm1(d) + d),
        "the exp is missing: the difference of the logarithms stands for the ratio": of_difference(
            lambda d: d - d - 1
        ),
        "a difference of probabilities stands for their ratio": lambda p, ref: (
            jnp.expm1(jnp.exp(ref) - jnp.exp(p)) - (jnp.exp(ref) - jnp.exp(p))
        ),
        "no gradient flows: stop_gradient holds log_prob": of_difference(
            lambda d: jax.lax.stop_gradient(jnp.expm1(d) - d)
        ),
        "the mean is taken already": of_difference(lambda d: (jnp.expm1(d) - d).mean()),
    },
)

EXERCISES = {"group_advantage": GROUP_ADVANTAGE, "k3": K3}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    settings.run(lambda arguments: train(functions, arguments or ["MNIST_PATH=subset"]))


def train(functions: Sequence[Callable], arguments: list[str]) -> None:
    """grpo_mnist.py as it is, but for the functions that the reader wrote."""
    import grpo_mnist

    print("\nAll right. grpo_mnist.py with your group_advantage and k3:")
    grpo_mnist.group_advantage, grpo_mnist.k3 = functions
    grpo_mnist.main(arguments)
