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


def discounted_returns(
    reward, gamma,
    before=lambda r, gamma: r,
    discount=lambda gamma: gamma,
    after=lambda G, r, gamma: G,
    turn=lambda x: x,
):  # fmt: skip
    returns = backwards(lambda later, r: r + discount(gamma) * later, turn(before(reward, gamma)))
    return after(turn(returns), reward, gamma)


DISCOUNTED_RETURNS = Exercise(
    look_at_returns,
    discounted_returns,
    {
        "gamma is missing": dict(discount=lambda gamma: 1.0),
        "the step's own reward is missing: the sum begins at t + 1": dict(
            after=lambda G, r, gamma: (G - r) / gamma
        ),
        "the step's own reward is discounted, too": dict(after=lambda G, r, gamma: gamma * G),
        "the last reward is lost: the loop begins at T - 2": dict(before=lambda r, gamma: r.at[:, -1].set(0)),
        "only the next reward is added, not the next return": dict(
            after=lambda G, r, gamma: r + gamma * jnp.pad(r[:, 1:], ((0, 0), (0, 1)))
        ),
        "the sum runs forwards: what was earned so far": dict(turn=lambda x: x[:, ::-1]),
        "the columns come out in reversed order": dict(after=lambda G, r, gamma: G[:, ::-1]),
        "every step gets the whole episode's return": dict(
            after=lambda G, r, gamma: jnp.broadcast_to(G[:, :1], G.shape)
        ),
        "rewards are discounted from the start of the episode, not from step t": dict(
            before=lambda r, gamma: r * gamma ** jnp.arange(r.shape[1]), discount=lambda gamma: 1.0
        ),
        "the sum runs over the environments, not over the steps: wrong axis": dict(turn=lambda x: x.T),
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
        f"log_prob {LOG_PROB.tolist()}, advantage {ADVANTAGE.tolist()}, alive {ALIVE.astype(int).tolist()}: "
    )
    return {
        f"{given}the loss": value,
        f"{given}its gradient with respect to log_prob": gradients[0],
        f"{given}its gradient with respect to the advantage, which is a constant": gradients[1],
    }


def policy_loss(
    log_prob, advantage, alive,
    term=lambda p, A, alive: alive * jax.lax.stop_gradient(A) * p,
    reduce=lambda x, alive: x.sum(axis=1).mean(),
    sign=-1,
):  # fmt: skip
    return sign * reduce(term(log_prob, advantage, alive), alive)


constant = jax.lax.stop_gradient
POLICY_LOSS = Exercise(
    look_at_policy_loss,
    policy_loss,
    {
        "the minus is missing: the loss rises where J does": dict(sign=1),
        "alive is missing: padding counts": dict(term=lambda p, A, alive: constant(A) * p),
        "the mean is taken over the steps, too, padding included": dict(reduce=lambda x, alive: x.mean()),
        "the mean is taken over the steps that were played": dict(
            reduce=lambda x, alive: x.sum() / alive.sum()
        ),
        "each episode is averaged over its steps": dict(
            reduce=lambda x, alive: (x.sum(axis=1) / alive.sum(axis=1)).mean()
        ),
        "the episodes are added up, not averaged": dict(reduce=lambda x, alive: x.sum()),
        "the sum runs over the episodes and the mean over the steps: wrong axis": dict(
            reduce=lambda x, alive: x.sum(axis=0).mean()
        ),
        "the gradient also flows through the advantage: stop_gradient is missing": dict(
            term=lambda p, A, alive: alive * A * p
        ),
        "no gradient flows through log_prob: stop_gradient holds the wrong factor": dict(
            term=lambda p, A, alive: alive * constant(A) * constant(p)
        ),
        "the probability stands where its logarithm belongs": dict(
            term=lambda p, A, alive: alive * constant(A) * jnp.exp(p)
        ),
        "sum times sum: log_prob and advantage are added up over an episode before they are multiplied": dict(
            term=lambda p, A, alive: (alive * p).sum(axis=1) * constant(alive * A).sum(axis=1),
            reduce=lambda x, alive: x.mean(),
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
    delta=lambda r, V, V2, gamma, lam: r + gamma * V2 - V,
    factor=lambda gamma, lam: gamma * lam,
    following=lambda V, V2: V2,
    turn=lambda x: x,
    after=lambda A, V: A,
):  # fmt: skip
    next_value = bootstraps(terminated, truncated) * following(value, next_value)
    error = delta(reward, value, next_value, gamma, gae_lambda)
    factors = factor(gamma, gae_lambda) * goes_on(terminated, truncated)
    step = lambda later, error, factor: error + factor * later  # noqa: E731
    return after(turn(backwards(step, turn(error), turn(factors))), value)


GAE = Exercise(
    look_at_gae,
    gae,
    {
        "it bootstraps past the end: (1 - terminated) is missing in delta": dict(
            bootstraps=lambda terminated, truncated: 1
        ),
        "a truncated episode is taken for a terminated one: it does not bootstrap": dict(
            bootstraps=lambda terminated, truncated: ~(terminated | truncated)
        ),
        "advantages flow over both kinds of end into the episode before": dict(
            goes_on=lambda terminated, truncated: jnp.ones_like(terminated)
        ),
        "advantages flow over a truncation into the episode before": dict(
            goes_on=lambda terminated, truncated: ~terminated
        ),
        "V(s_{t+1}) is the next row's value: after an end, that of another episode": dict(
            following=lambda V, V2: jnp.concatenate([V[:, 1:], V2[:, -1:]], axis=1)  # the last one has none
        ),
        "lambda is missing": dict(factor=lambda gamma, lam: gamma),
        "gamma is missing in the recursion": dict(factor=lambda gamma, lam: lam),
        "the recursion is missing: this is delta": dict(factor=lambda gamma, lam: 0.0),
        "gamma is missing in delta": dict(delta=lambda r, V, V2, gamma, lam: r + V2 - V),
        "lambda stands in delta, too": dict(delta=lambda r, V, V2, gamma, lam: r + gamma * lam * V2 - V),
        "V(s_t) is not subtracted": dict(delta=lambda r, V, V2, gamma, lam: r + gamma * V2),
        "V(s_t) is added again: these are the critic's targets": dict(after=lambda A, V: A + V),
        "the columns come out in reversed order": dict(after=lambda A, V: A[:, ::-1]),
        "the recursion runs forwards in time": dict(turn=lambda x: x[:, ::-1]),
        "the recursion runs over the environments: wrong axis": dict(turn=lambda x: x.T),
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


def clipped_objective(
    ratio, advantage, epsilon,
    clip=lambda ratio, epsilon: jnp.clip(ratio, 1 - epsilon, 1 + epsilon),
    combine=lambda ratio, clipped, A: jnp.minimum(ratio * A, clipped * A),
    finish=lambda x: x,
):  # fmt: skip
    return finish(combine(ratio, clip(ratio, epsilon), advantage))


CLIPPED_OBJECTIVE = Exercise(
    look_at_clip,
    clipped_objective,
    {
        "the larger of the two is taken, not the smaller": dict(
            combine=lambda ratio, clipped, A: jnp.maximum(ratio * A, clipped * A)
        ),
        "the min is missing: only the clipped term is left": dict(
            combine=lambda ratio, clipped, A: clipped * A
        ),
        "nothing is clipped": dict(clip=lambda ratio, epsilon: ratio),
        "the smaller ratio is taken before it is multiplied: for a bad action that is the other one": dict(
            combine=lambda ratio, clipped, A: jnp.minimum(ratio, clipped) * A
        ),
        "the product is clipped, not the ratio": lambda ratio, A, epsilon: jnp.minimum(
            ratio * A, jnp.clip(ratio * A, 1 - epsilon, 1 + epsilon)
        ),
        "the lower bound 1 - epsilon is missing": dict(
            clip=lambda ratio, epsilon: jnp.minimum(ratio, 1 + epsilon)
        ),
        "the upper bound 1 + epsilon is missing": dict(
            clip=lambda ratio, epsilon: jnp.maximum(ratio, 1 - epsilon)
        ),
        "the ratio is clipped to -epsilon ... epsilon, not around 1": dict(
            clip=lambda ratio, epsilon: jnp.clip(ratio, -epsilon, epsilon)
        ),
        "it is a loss, not an objective: the sign is the other one": dict(finish=lambda x: -x),
        "the mean is taken already": dict(finish=jnp.mean),
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
    runs.start_jax()
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    import ppo
    import reinforce

    reinforce.discounted_returns, reinforce.policy_loss, ppo.gae, ppo.clipped_objective = functions
    print("\nAll right. reinforce.py with your discounted_returns and policy_loss:")
    settings.run(lambda arguments: reinforce.main(arguments or ["NUM_SEEDS=3"]))
    print("\nppo.py with your gae and clipped_objective:")
    settings.run(lambda arguments: ppo.main(arguments or ["NUM_SEEDS=3"]))
