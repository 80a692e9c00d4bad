"""Behind exercises.py: numbers to try the functions on, the usual mistakes, the training."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import grader
import runs
import settings

# %% group_advantage -------------------------------------------------------------------------------
# As many groups as guesses: [B] against [B, G] goes wrong without a complaint. The last group has
# no signal.
REWARDS = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], np.float32)


def look_at_group_advantage(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Four groups of four."""
    jax.eval_shape(function, REWARDS)  # traced as jax.jit does it in a training
    yield f"rewards {REWARDS.astype(int).tolist()}", function(jnp.asarray(REWARDS))


def group_advantage(rewards):
    mean = rewards.mean(axis=1, keepdims=True)
    std = rewards.std(axis=1, keepdims=True, ddof=1)
    return (rewards - mean) / (std + 1e-6)


GROUP_ADVANTAGE = grader.Exercise(
    look_at_group_advantage,
    group_advantage,
    {
        "the standard deviation is the population's (ddof=0), not the sample's": ", ddof=1 =>",
        "mean and standard deviation are over the images: wrong axis": "axis=1 => axis=0",
        "mean and standard deviation are those of the whole batch, not of each group": (
            "axis=1 => axis=None"
        ),
        "1e-6 is missing: a group of equal rewards is 0 / 0": "+ 1e-6 =>",
        "keepdims is missing: [B] broadcasts over the guesses, not over the groups": (
            ", keepdims=True =>"
        ),
        "the mean lacks keepdims: [B] broadcasts over the guesses": (
            "mean(axis=1, keepdims=True => mean(axis=1"
        ),
        "the std lacks keepdims: [B] broadcasts over the guesses": (
            "std(axis=1, keepdims=True => std(axis=1"
        ),
        "it is not divided by the standard deviation": "/ (std + 1e-6) =>",
        "it is divided by the variance": "rewards.std => rewards.var",
        "the mean is not subtracted": "- mean) => )",
        "the sign is reversed: mean minus reward": "rewards - mean => mean - rewards",
        "the baseline is the mean of the other guesses, without the division (RLOO)": (
            "- mean) / (std + 1e-6) => - (rewards.sum(1, "
            "keepdims=True) - rewards) / (rewards.shape[1] - 1))"
        ),
    },
)

# %% k3 --------------------------------------------------------------------------------------------
LOG_PROB = np.array([[-0.5, -1.0, -2.0], [-0.25, -3.0, -1.5]], np.float32)
REF_LOG_PROB = np.array([[-1.0, -1.0, -1.0], [-2.25, -2.0, -1.0]], np.float32)


def look_at_k3(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Value and gradient."""
    jax.eval_shape(function, LOG_PROB, REF_LOG_PROB)
    log_prob, ref_log_prob = jnp.asarray(LOG_PROB), jnp.asarray(REF_LOG_PROB)
    given = f"log_prob {LOG_PROB.tolist()}\nref_log_prob {REF_LOG_PROB.tolist()}\n"
    yield f"{given}the estimates", function(log_prob, ref_log_prob)
    gradient = jax.grad(lambda log_prob: jnp.sum(function(log_prob, ref_log_prob)))(log_prob)
    yield f"{given}the gradient of their sum for log_prob", gradient


def k3(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    return jnp.expm1(d) - d


K3 = grader.Exercise(
    look_at_k3,
    k3,
    {
        "it is k1, log pi - log pi_ref": "jnp.expm1(d) - d => -d",
        "it is k2, half the square of log pi - log pi_ref": "jnp.expm1(d) - d => d**2 / 2",
        "pi and pi_ref are exchanged": "ref_log_prob - log_prob => log_prob - ref_log_prob",
        "the sign is reversed": "jnp.expm1(d) - d => d - jnp.expm1(d)",
        "the - 1 is missing: two equal policies have a k3 of 1": "expm1 => exp",
        "the logarithm is missing: only pi_ref / pi - 1 is left": "(d) - d => (d)",
        "the logarithm is added, not subtracted": "(d) - d => (d) + d",
        "the exp is missing: the difference of the logarithms is used as the ratio": (
            "jnp.expm1(d) => d - 1"
        ),
        "it subtracts probabilities": (
            "ref_log_prob - log_prob => jnp.exp(ref_log_prob) - jnp.exp(log_prob)"
        ),
        "no gradient flows: stop_gradient is around log_prob": (
            "- log_prob => - jax.lax.stop_gradient(log_prob)"
        ),
        "the mean is taken already": "return jnp.expm1(d) - d => return jnp.mean(jnp.expm1(d) - d)",
    },
)

EXERCISES = {"group_advantage": GROUP_ADVANTAGE, "k3": K3}


# %% Main ------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Grades the reader's functions. If all are right, trains with them: exit code 0, else 1."""

    def judge_and_train(arguments: list[str]) -> None:
        runs.start_jax(one_thread=False)
        grader.run(EXERCISES, functions)
        import grpo_mnist as script

        print("\nAll right. grpo_mnist.py with your group_advantage and k3:")
        script.group_advantage, script.k3 = functions
        script.main(arguments or ["MNIST_PATH=subset"])

    settings.run(judge_and_train)
