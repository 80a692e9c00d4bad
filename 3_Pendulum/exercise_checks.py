"""Behind exercises.py: numbers to try the functions on, the usual mistakes, the training."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import grader
import runs
import settings

LONG = 500  # steps of an episode of CartPole


def unrolled(function: Callable, *types: np.dtype) -> tuple[str, bool]:
    """The question whether a function of arrays [2, LONG] of these types loops in Python, and its
    answer.
    """
    operations = len(
        jax.make_jaxpr(function)(*(jnp.zeros((2, LONG), dtype) for dtype in types)).eqns
    )
    loop = (
        f"{LONG} steps: is it a Python loop, which jax.jit compiles for minutes, "
        "and not jax.lax.scan?"
    )
    return loop, operations >= LONG


# %% discounted_returns ----------------------------------------------------------------------------
REWARD = np.array([[1, 2, 0, 4, 3], [2, 1, 0, 0, 0]], np.float32)


def look_at_returns(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Two episodes of five steps, the second one over after two."""
    yield f"reward {REWARD.tolist()}, gamma 0.5", function(jnp.asarray(REWARD), 0.5)
    yield unrolled(lambda reward: function(reward, 0.5), float)


def backwards(x: jax.Array, factor: jax.Array | float) -> jax.Array:
    """y_t = x_t + factor_t * y_{t+1} for t = T - 1 ... 0, where y_T = 0: all [N, T]."""
    join = lambda later, now: (now[0] + now[1] * later[0], now[1] * later[1])  # noqa: E731
    return jax.lax.associative_scan(join, (x, factor * jnp.ones_like(x)), reverse=True, axis=1)[0]


def discounted_returns(reward, gamma):
    G = backwards(reward, factor=gamma)
    return G


DISCOUNTED_RETURNS = grader.Exercise(
    look_at_returns,
    discounted_returns,
    {
        "gamma is missing": "=gamma => =1.0",
        "the step's own reward is missing: it sums from t + 1": (
            "return G => return (G - reward) / gamma"
        ),
        "the step's own reward is discounted, too": "return G => return gamma * G",
        "the last reward is lost: the loop begins at T - 2": (
            "(reward, f => (reward.at[:, -1].set(0), f"
        ),
        "only the next reward is added, not the next return": (
            "return G => return reward + gamma * jnp.pad(reward[:, 1:], ((0, 0), (0, 1)))"
        ),
        "the sum runs forward": "(reward, f => (reward[:, ::-1], f; return G => return G[:, ::-1]",
        "the columns are in reverse order": "return G => return G[:, ::-1]",
        "every step gets the whole return": (
            "return G => return jnp.broadcast_to(G[:, :1], G.shape)"
        ),
        "rewards are discounted from the start of the episode, not from step t": (
            "(reward, factor=gamma => (reward * gamma ** jnp.arange(reward.shape[1]), 1.0"
        ),
        "it sums over the environments": "(reward, f => (reward.T, f; return G => return G.T",
    },
)

# %% policy_loss -----------------------------------------------------------------------------------
LOG_PROB = np.array([[-0.5, -1.0, -0.25, -2.0], [-0.75, -1.5, -3.0, -3.0]], np.float32)
ADVANTAGE = np.array([[2.0, -1.0, 1.0, 0.5], [-2.0, 1.0, 4.0, 4.0]], np.float32)
ALIVE = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)


def look_at_policy_loss(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Value and both gradients for two episodes of four and two steps."""
    loss = lambda log_prob, advantage: function(log_prob, advantage, jnp.asarray(ALIVE))  # noqa: E731
    jax.eval_shape(loss, LOG_PROB, ADVANTAGE)  # traced as jax.jit does it in a training
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(LOG_PROB, ADVANTAGE)
    names = (
        "the loss",
        "its gradient for log_prob",
        "its gradient for the advantage, which is a constant",
    )
    given = (
        f"log_prob {LOG_PROB.tolist()}, advantage {ADVANTAGE.tolist()}, alive {ALIVE.tolist()}: "
    )
    yield from zip([f"{given}{name}" for name in names], (value, *gradients))


def policy_loss(log_prob, advantage, alive):
    weight = alive * jax.lax.stop_gradient(advantage)
    return -(weight * log_prob).sum(axis=1).mean()


POLICY_LOSS = grader.Exercise(
    look_at_policy_loss,
    policy_loss,
    {
        "the minus is missing: the loss rises where J does": "-(weight => (weight",
        "alive is missing: padding counts": "alive * =>",
        "the mean is taken over the steps, too, padding included": ".sum(axis=1).mean() => .mean()",
        "the mean is taken over the steps that were played": (
            ".sum(axis=1).mean() => .sum() / alive.sum()"
        ),
        "episodes are averaged": (
            ".sum(axis=1).mean() => .sum(axis=1) @ (1 / alive.sum(axis=1)) / len(alive)"
        ),
        "the episodes are added up, not averaged": ".sum(axis=1).mean() => .sum()",
        "the sum runs over the episodes and the mean over the steps: wrong axis": (
            "axis=1 => axis=0"
        ),
        "the gradient also flows through the advantage: stop_gradient is missing": (
            "jax.lax.stop_gradient =>"
        ),
        "stop_gradient has the wrong factor": "* log_prob => * jax.lax.stop_gradient(log_prob)",
        "the probability is used instead of its logarithm": "* log_prob => * jnp.exp(log_prob)",
        "sum times sum: log_prob and advantage are summed over an episode before they are "
        "multiplied": (
            "(weight * log_prob).sum(axis=1) => "
            "(weight.sum(axis=1) * (alive * log_prob).sum(axis=1))"
        ),
    },
)

# %% gae -------------------------------------------------------------------------------------------
ROLLOUT = {
    "reward": np.array([[1, 2, 1, 3, 1], [1, 1, 2, 1, 1]], np.float32),
    "value": np.array([[4, 3, 5, 2, 7], [2, 3, 4, 5, 6]], np.float32),
    "next_value": np.array([[3, 7, 2, 8, 5], [3, 4, 5, 6, 7]], np.float32),
    "terminated": np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool),
    "truncated": np.array([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], bool),
}


def look_at_gae(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """A row with an end of each kind, and one without."""
    compute = lambda *arrays: function(*arrays, 0.5, 0.8)  # noqa: E731
    given = "\n".join(f"{name} {array.astype(int).tolist()}" for name, array in ROLLOUT.items())
    yield f"{given}\ngamma 0.5, gae_lambda 0.8", compute(*map(jnp.asarray, ROLLOUT.values()))
    yield unrolled(compute, *(array.dtype for array in ROLLOUT.values()))


def gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    delta = reward + gamma * ~terminated * next_value - value
    factor = gamma * gae_lambda * ~(terminated | truncated)
    A = backwards(delta, factor)
    return A


GAE = grader.Exercise(
    look_at_gae,
    gae,
    {
        "it bootstraps past the end: (1 - terminated) is missing in delta": "~terminated * =>",
        "a truncated episode doesn't bootstrap, either": (
            "~terminated * => ~(terminated | truncated) *"
        ),
        "advantages flow over every kind of end": (
            "* ~(terminated | truncated) => * jnp.ones_like(value)"
        ),
        "advantages flow over truncations into the episode": (
            "~(terminated | truncated) => ~terminated"
        ),
        # the last one has none
        "V(s_{t+1}) is the next row's value: after an end, that of another episode": (
            "* next_value => * jnp.concatenate([value[:, 1:], next_value[:, -1:]], axis=1)"
        ),
        "lambda is missing": "gae_lambda * =>",
        "gamma is missing in the recursion": "gamma * gae_lambda => gae_lambda",
        "the recursion is missing: this is delta": "gamma * gae_lambda => 0.0",
        "gamma is missing in delta": "gamma * ~ => ~",
        "lambda is in delta, too": "gamma * ~ => gamma * gae_lambda * ~",
        "V(s_t) is not subtracted": "- value =>",
        "V(s_t) is added again: these are the critic's targets": "return A => return A + value",
        "the columns are in reverse order": "return A => return A[:, ::-1]",
        "the recursion runs forward in time": (
            "(delta, factor) => (delta[:, ::-1], factor[:, ::-1]); return A => return A[:, ::-1]"
        ),
        "it runs over the environments": (
            "(delta, factor) => (delta.T, factor.T); return A => return A.T"
        ),
    },
)

# %% clipped_objective -----------------------------------------------------------------------------
RATIO = np.array([0.5, 0.9, 1.1, 1.5, 0.5, 0.9, 1.1, 1.5], np.float32)
SIGNED = np.array([2, 2, 2, 2, -2, -2, -2, -2], np.float32)


def look_at_clip(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Ratios on both sides of the clip, for a good and a bad action."""
    ratio, advantage = jnp.asarray(RATIO), jnp.asarray(SIGNED)
    given = f"ratio {RATIO.tolist()}, advantage {SIGNED.astype(int).tolist()}, epsilon 0.2"
    jax.eval_shape(lambda ratio: function(ratio, advantage, 0.2), ratio)
    yield given, function(ratio, advantage, 0.2)
    gradient = jax.grad(lambda ratio: jnp.sum(function(ratio, advantage, 0.2)))(ratio)
    yield f"{given}: gradient of its sum for the ratio", gradient


def clipped_objective(ratio, advantage, epsilon):
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    return jnp.minimum(ratio * advantage, clipped * advantage)


MINIMUM = "jnp.minimum(ratio * advantage, clipped * advantage)"
CLIPPED_OBJECTIVE = grader.Exercise(
    look_at_clip,
    clipped_objective,
    {
        "the larger of the two is taken, not the smaller": "minimum => maximum",
        "the min is missing: only the clipped term is left": f"{MINIMUM} => clipped * advantage",
        "nothing is clipped": "jnp.clip(ratio, 1 - epsilon, 1 + epsilon) => ratio",
        "the min is of ratios, not of products": (
            f"{MINIMUM} => jnp.minimum(ratio, clipped) * advantage"
        ),
        "the product is clipped, not the ratio": (
            "clipped * advantage) => jnp.clip(ratio * advantage, 1 - epsilon, 1 + epsilon))"
        ),
        "the lower bound 1 - epsilon is missing": "1 - epsilon => None",
        "the upper bound 1 + epsilon is missing": "1 + epsilon => None",
        "the ratio is clipped to -epsilon ... epsilon, not around 1": "1 - => -; 1 + =>",
        "it's a loss, not an objective: the sign is reversed": "return => return -",
        "the mean is taken already": "clipped * advantage) => clipped * advantage).mean()",
    },
)

EXERCISES = {e.right.__name__: e for e in (DISCOUNTED_RETURNS, POLICY_LOSS, GAE, CLIPPED_OBJECTIVE)}


# %% Main ------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Grades the reader's functions. If all are right, trains with them: exit code 0, else 1."""

    def judge_and_train(arguments: list[str]) -> None:
        runs.start_jax()
        grader.run(EXERCISES, functions)
        import ppo
        import reinforce

        reinforce.discounted_returns, reinforce.policy_loss, ppo.gae, ppo.clipped_objective = (
            functions
        )
        print("\nAll right. reinforce.py with your discounted_returns and policy_loss:")
        reinforce.main(arguments or ["NUM_SEEDS=3"])
        print("\nppo.py with your gae and clipped_objective:")
        ppo.main(arguments or ["NUM_SEEDS=3"])

    settings.run(judge_and_train)
