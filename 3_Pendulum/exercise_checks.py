"""What stands beside exercises.py: numbers to try the functions on, the usual mistakes, the training."""

import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import grader
import runs  # noqa: F401  (sets XLA's flags, which jax reads when it makes its first array)
import settings
from grader import Exercise

LONG = 500  # steps of an episode of CartPole


def unrolled(*shapes: tuple) -> Callable:
    """The objection to a Python loop over the steps, for a function of arrays of these shapes."""

    def objection(function: Callable) -> str:
        operations = len(jax.make_jaxpr(function)(*(jnp.zeros(*shape) for shape in shapes)).eqns)
        if operations < LONG:
            return ""
        return (
            f"The numbers are right, but a Python loop over {LONG} steps is {operations} operations, which\n"
            "jax.jit compiles for minutes. jax.lax.scan(..., reverse=True) is one."
        )

    return objection


# %% discounted_returns ---------------------------------------------------------------------------------
REWARD = np.array([[1, 2, 0, 4, 3], [2, 1, 0, 0, 0]], np.float32)


def look_at_returns(function: Callable) -> dict[str, jax.Array]:
    """Two episodes of five steps, the second one over after two."""
    jax.eval_shape(lambda reward: function(reward, 0.5), REWARD)  # traced as jax.jit does it in a training
    return {f"reward {REWARD.tolist()}, gamma 0.5": function(jnp.asarray(REWARD), 0.5)}


def backwards(step: Callable, *arrays: jax.Array) -> jax.Array:
    """step(what comes later [N], columns t of the arrays [N]) for t = T - 1 ... 0: [N, T]."""
    later, columns = jnp.zeros(len(arrays[0])), []
    for t in reversed(range(arrays[0].shape[1])):
        later = step(later, *(array[:, t] for array in arrays))
        columns.append(later)
    return jnp.stack(columns[::-1], axis=1)


def returns(reward: jax.Array, gamma: float) -> jax.Array:
    return backwards(lambda later, r: r + gamma * later, reward)


def gammas(reward: jax.Array, gamma: float) -> jax.Array:
    return gamma ** jnp.arange(reward.shape[1])


DISCOUNTED_RETURNS = Exercise(
    look_at_returns,
    returns,
    {
        "gamma is missing": lambda r, gamma: returns(r, 1.0),
        "the step's own reward is missing: the sum begins at t + 1": lambda r, gamma: (
            (returns(r, gamma) - r) / gamma
        ),
        "the step's own reward is discounted, too": lambda r, gamma: gamma * returns(r, gamma),
        "the last reward is lost: the loop begins at T - 2": lambda r, gamma: returns(
            r.at[:, -1].set(0), gamma
        ),
        "only the next reward is added, not the next return": lambda r, gamma: (
            r + gamma * jnp.pad(r[:, 1:], ((0, 0), (0, 1)))
        ),
        "the sum runs forwards: what was earned so far": lambda r, gamma: returns(r[:, ::-1], gamma)[:, ::-1],
        "the columns come out in reversed order": lambda r, gamma: returns(r, gamma)[:, ::-1],
        "every step gets the whole episode's return": lambda r, gamma: jnp.broadcast_to(
            returns(r, gamma)[:, :1], r.shape
        ),
        "rewards are discounted from the start of the episode, not from step t": lambda r, gamma: returns(
            r * gammas(r, gamma), 1.0
        ),
        "the sum runs over the environments, not over the steps: wrong axis": lambda r, gamma: (
            returns(r.T, gamma).T
        ),
    },
    also=lambda function: unrolled(((2, LONG),))(lambda reward: function(reward, 0.5)),
)

# %% policy_loss ----------------------------------------------------------------------------------------
LOG_PROB = np.array([[-0.5, -1.0, -0.25, -2.0], [-0.75, -1.5, -3.0, -3.0]], np.float32)
ADVANTAGE = np.array([[2.0, -1.0, 1.0, 0.5], [-2.0, 1.0, 4.0, 4.0]], np.float32)
ALIVE = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)


def look_at_policy_loss(function: Callable) -> dict[str, jax.Array]:
    """Value and both gradients for two episodes of four and two steps."""
    loss = lambda log_prob, advantage: function(log_prob, advantage, jnp.asarray(ALIVE))  # noqa: E731
    result = jax.eval_shape(loss, LOG_PROB, ADVANTAGE)
    if result.shape:
        raise grader.Unusable(f"it returns an array {list(result.shape)}; expected one number, []")
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(LOG_PROB, ADVANTAGE)
    given = (
        f"log_prob {LOG_PROB.tolist()}, advantage {ADVANTAGE.tolist()}, alive {ALIVE.astype(int).tolist()}"
    )
    return {
        f"{given}the loss": value,
        f"{given}its gradient with respect to log_prob": gradients[0],
        f"{given}its gradient with respect to the advantage, which is a constant": gradients[1],
    }


def terms(log_prob: jax.Array, advantage: jax.Array, alive: jax.Array) -> jax.Array:
    return alive * jax.lax.stop_gradient(advantage) * log_prob


POLICY_LOSS = Exercise(
    look_at_policy_loss,
    lambda *x: -terms(*x).sum(axis=1).mean(),
    {
        "the minus is missing: the loss rises where J does": lambda *x: terms(*x).sum(axis=1).mean(),
        "alive is missing: padding counts": lambda p, A, alive: -terms(p, A, 1.0).sum(axis=1).mean(),
        "the mean is taken over the steps, too, padding included": lambda *x: -terms(*x).mean(),
        "the mean is taken over the steps that were played": lambda p, A, alive: (
            -terms(p, A, alive).sum() / alive.sum()
        ),
        "each episode is averaged over its steps": lambda p, A, alive: (
            -(terms(p, A, alive).sum(axis=1) / alive.sum(axis=1)).mean()
        ),
        "the episodes are added up, not averaged": lambda *x: -terms(*x).sum(),
        "the sum runs over the episodes and the mean over the steps: wrong axis": lambda *x: (
            -terms(*x).sum(axis=0).mean()
        ),
        "the gradient also flows through the advantage: stop_gradient is missing": lambda p, A, alive: (
            -(alive * A * p).sum(axis=1).mean()
        ),
        "no gradient flows through log_prob: stop_gradient holds the wrong factor": lambda p, A, alive: (
            -terms(jax.lax.stop_gradient(p), A, alive).sum(axis=1).mean()
        ),
        "the probability stands where its logarithm belongs": lambda p, A, alive: (
            -terms(jnp.exp(p), A, alive).sum(axis=1).mean()
        ),
        "sum times sum: an episode's log_prob and its advantage are added up before they are multiplied": (
            lambda p, A, alive: (
                -((alive * p).sum(axis=1) * jax.lax.stop_gradient(alive * A).sum(axis=1)).mean()
            )
        ),
    },
)

# %% gae ------------------------------------------------------------------------------------------------
ROLLOUT = {
    "reward": np.array([[1, 2, 1, 3, 1], [1, 1, 2, 1, 1]], np.float32),
    "value": np.array([[4, 3, 5, 2, 7], [2, 3, 4, 5, 6]], np.float32),
    "next_value": np.array([[3, 7, 2, 8, 5], [3, 4, 5, 6, 7]], np.float32),
    "terminated": np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool),
    "truncated": np.array([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], bool),
}


def look_at_gae(function: Callable) -> dict[str, jax.Array]:
    """A row with an end of each kind, and one without."""
    compute = lambda rollout: function(**rollout, gamma=0.5, gae_lambda=0.8)  # noqa: E731
    jax.eval_shape(compute, ROLLOUT)
    given = "\n".join(f"{name} {array.astype(int).tolist()}" for name, array in ROLLOUT.items())
    return {f"{given}\ngamma 0.5, gae_lambda 0.8": compute({k: jnp.asarray(v) for k, v in ROLLOUT.items()})}


def gae(
    reward, value, next_value, terminated, truncated, gamma, gae_lambda,
    bootstraps=lambda terminated, truncated: ~terminated,
    goes_on=lambda terminated, truncated: ~(terminated | truncated),
):  # fmt: skip
    """The right one; what bootstraps, and what an advantage flows over, may be replaced."""
    delta = reward + gamma * bootstraps(terminated, truncated) * next_value - value
    factor = gamma * gae_lambda * goes_on(terminated, truncated)
    return backwards(lambda later, delta, factor: delta + factor * later, delta, factor)


def with_arguments(change: Callable) -> Callable:
    """`gae` of other arguments: change(a) returns those that differ."""
    return lambda **a: gae(**a | change(a))


def shifted(a: dict) -> jax.Array:
    """V of the next row; the last one has none."""
    return jnp.concatenate([a["value"][:, 1:], a["next_value"][:, -1:]], axis=1)


always = lambda terminated, truncated: jnp.ones_like(terminated)  # noqa: E731

GAE = Exercise(
    look_at_gae,
    gae,
    {
        "it bootstraps past the end: (1 - terminated) is missing in delta": lambda **a: gae(
            **a, bootstraps=always
        ),
        "a truncated episode is taken for a terminated one: it does not bootstrap": lambda **a: gae(
            **a, bootstraps=lambda terminated, truncated: ~(terminated | truncated)
        ),
        "advantages flow over both kinds of end into the episode before": lambda **a: gae(
            **a, goes_on=always
        ),
        "advantages flow over a truncation into the episode before": lambda **a: gae(
            **a, goes_on=lambda terminated, truncated: ~terminated
        ),
        "V(s_{t+1}) is the next row's value: after an end, that of another episode": with_arguments(
            lambda a: {"next_value": shifted(a)}
        ),
        "lambda is missing": with_arguments(lambda a: {"gae_lambda": 1.0}),
        "gamma is missing in the recursion": with_arguments(
            lambda a: {"gae_lambda": a["gae_lambda"] / a["gamma"]}
        ),
        "gamma is missing in delta": with_arguments(lambda a: {"next_value": a["next_value"] / a["gamma"]}),
        "lambda stands in delta, too": with_arguments(
            lambda a: {"next_value": a["gae_lambda"] * a["next_value"]}
        ),
        "V(s_t) is not subtracted": with_arguments(lambda a: {"value": jnp.zeros_like(a["value"])}),
        "V(s_t) is added again: these are the critic's targets": lambda **a: gae(**a) + a["value"],
        "the recursion is missing: this is delta": with_arguments(lambda a: {"gae_lambda": 0.0}),
        "the recursion runs forwards in time": lambda **a: gae(
            **{k: v if k.startswith("ga") else v[:, ::-1] for k, v in a.items()}
        )[:, ::-1],
        "the recursion runs over the environments: wrong axis": lambda **a: (
            gae(**{k: v if k.startswith("ga") else v.T for k, v in a.items()}).T
        ),
        "the columns come out in reversed order": lambda **a: gae(**a)[:, ::-1],
    },
    also=lambda function: unrolled(*[((2, LONG), x.dtype) for x in ROLLOUT.values()])(
        lambda *arrays: function(*arrays, 0.5, 0.8)
    ),
)

# %% clipped_objective ----------------------------------------------------------------------------------
RATIO = np.array([0.5, 0.9, 1.1, 1.5, 0.5, 0.9, 1.1, 1.5], np.float32)
SIGNED = np.array([2, 2, 2, 2, -2, -2, -2, -2], np.float32)


def look_at_clip(function: Callable) -> dict[str, jax.Array]:
    """Ratios on both sides of the clip, for a good and a bad action."""
    ratio, advantage = jnp.asarray(RATIO), jnp.asarray(SIGNED)
    given = f"ratio {RATIO.tolist()}, advantage {SIGNED.astype(int).tolist()}, epsilon 0.2"
    jax.eval_shape(lambda ratio: function(ratio, advantage, 0.2), ratio)
    return {
        given: function(ratio, advantage, 0.2),
        f"{given}: gradient of its sum with respect to the ratio": jax.grad(
            lambda ratio: jnp.sum(function(ratio, advantage, 0.2))
        )(ratio),
    }


def clip(ratio: jax.Array, epsilon: float) -> jax.Array:
    return jnp.clip(ratio, 1 - epsilon, 1 + epsilon)


CLIPPED_OBJECTIVE = Exercise(
    look_at_clip,
    lambda ratio, A, epsilon: jnp.minimum(ratio * A, clip(ratio, epsilon) * A),
    {
        "the larger of the two is taken, not the smaller": lambda ratio, A, epsilon: jnp.maximum(
            ratio * A, clip(ratio, epsilon) * A
        ),
        "the min is missing: only the clipped term is left": lambda ratio, A, epsilon: (
            clip(ratio, epsilon) * A
        ),
        "nothing is clipped": lambda ratio, A, epsilon: ratio * A,
        "the smaller ratio is taken before it is multiplied: for a bad action that is the other one": (
            lambda ratio, A, epsilon: jnp.minimum(ratio, clip(ratio, epsilon)) * A
        ),
        "the product is clipped, not the ratio": lambda ratio, A, epsilon: jnp.minimum(
            ratio * A, clip(ratio * A, epsilon)
        ),
        "the lower bound 1 - epsilon is missing": lambda ratio, A, epsilon: jnp.minimum(
            ratio * A, jnp.minimum(ratio, 1 + epsilon) * A
        ),
        "the upper bound 1 + epsilon is missing": lambda ratio, A, epsilon: jnp.minimum(
            ratio * A, jnp.maximum(ratio, 1 - epsilon) * A
        ),
        "the ratio is clipped to -epsilon ... epsilon, not around 1": lambda ratio, A, epsilon: jnp.minimum(
            ratio * A, jnp.clip(ratio, -epsilon, epsilon) * A
        ),
        "it is a loss, not an objective: the sign is the other one": lambda ratio, A, epsilon: (
            -jnp.minimum(ratio * A, clip(ratio, epsilon) * A)
        ),
        "the mean is taken already": lambda ratio, A, epsilon: jnp.minimum(
            ratio * A, clip(ratio, epsilon) * A
        ).mean(),
    },
)

EXERCISES = {
    "discounted_returns": DISCOUNTED_RETURNS,
    "policy_loss": POLICY_LOSS,
    "gae": GAE,
    "clipped_objective": CLIPPED_OBJECTIVE,
}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    settings.run(lambda arguments: train(functions, arguments or ["NUM_SEEDS=3"]))


def train(functions: Sequence[Callable], arguments: list[str]) -> None:
    """reinforce.py and ppo.py as they are, but for the functions that the reader wrote."""
    import ppo
    import reinforce

    discounted_returns, policy_loss, gae, clipped_objective = functions
    print("\nAll right. reinforce.py with your discounted_returns and policy_loss:")
    reinforce.discounted_returns, reinforce.policy_loss = discounted_returns, policy_loss
    reinforce.main(arguments)
    print("\nppo.py with your gae and clipped_objective:")
    ppo.gae, ppo.clipped_objective = gae, clipped_objective
    ppo.main(arguments)
