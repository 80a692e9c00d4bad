"""What belongs to exercises.py: numbers to try the functions on, the usual mistakes, the training."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import grader
import runs
import settings
from grader import Exercise

# %% td_target ------------------------------------------------------------------------------------------
TRANSITIONS = {
    "reward": np.array([1, 2, 3], np.float32),
    "terminated": np.array([0, 1, 0], bool),
    "next_q": np.array([8, 16, 24], np.float32),
    "gamma": np.array([0.5, 0.5, 0.25], np.float32),
}


def look_at_td_target(function: Callable) -> dict[str, jax.Array]:
    """Three transitions, one of them the last of its episode."""
    jax.eval_shape(lambda t: function(**t), TRANSITIONS)  # traced as jax.jit does it in a training
    arrays = {name: jnp.asarray(array) for name, array in TRANSITIONS.items()}
    given = ", ".join(f"{name} {array.tolist()}" for name, array in TRANSITIONS.items())
    return {
        given: function(**arrays),
        f"{given}: the gradient of the targets' sum with respect to next_q": jax.grad(
            lambda next_q: jnp.sum(function(**arrays | {"next_q": next_q}))
        )(arrays["next_q"]),
    }


def td_target(
    reward, terminated, next_q, gamma,
    goes_on=lambda end: 1 - end,
    target=lambda r, gamma, future, end: r + gamma * future,
    constant=jax.lax.stop_gradient,
    finish=lambda y: y,
):  # fmt: skip
    return constant(finish(target(reward, gamma, goes_on(terminated) * next_q, terminated)))


TD_TARGET = Exercise(
    look_at_td_target,
    td_target,
    {
        "it bootstraps past the end: (1 - terminated) is missing": dict(goes_on=lambda end: 1),
        "terminated is upside down: only the end bootstraps": dict(goes_on=lambda end: end),
        "the end takes the reward away, too": dict(target=lambda r, g, f, end: (1 - end) * (r + g * f)),
        "gamma is missing": dict(target=lambda r, g, f, end: r + f),
        "gamma discounts the reward, too": dict(target=lambda r, g, f, end: g * (r + f)),
        "the reward is missing": dict(target=lambda r, g, f, end: g * f),
        "next_q is missing": dict(target=lambda r, g, f, end: r),
        "[B, 1] meets [B], which makes [B, B]": dict(target=lambda r, g, f, end: r[:, None] + g * f),
        "[B] meets [B, 1], which makes [B, B]": dict(target=lambda r, g, f, end: r + (g * f)[:, None]),
        "the gradient flows through the target: stop_gradient is missing": dict(constant=lambda y: y),
        "the mean is taken already": dict(finish=jnp.mean),
    },
)


# %% n_step ---------------------------------------------------------------------------------------------
class Windows(NamedTuple):
    """The fields of the script's Transition that count here."""

    reward: jax.Array  # float32 [B, n]
    terminated: jax.Array  # bool [B, n]
    truncated: jax.Array  # bool [B, n]
    next_obs: jax.Array  # float32 [B, n]; in the script [B, n, 4]


# As many windows as steps: [B] against [B, n] goes wrong without a complaint.
WINDOWS = Windows(
    np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [4, 3, 2, 1]], np.float32),
    np.array([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], bool),
    np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool),
    np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]], np.float32),
)


def look_at_n_step(function: Callable) -> dict[str, jax.Array]:
    """A window without an end, one with two, one that ends with its last step, one with a truncation."""
    jax.eval_shape(lambda windows: function(windows, 0.5), WINDOWS)
    result = function(jax.tree.map(jnp.asarray, WINDOWS), 0.5)
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], Windows):
        raise grader.Unusable("it must return three things: the sums, m, and the last transitions")
    rows = "\n".join(f"{name} {array.astype(int).tolist()}" for name, array in WINDOWS._asdict().items())
    return {
        f"{rows}\ngamma 0.5: the sums": result[0],
        f"{rows}\ngamma 0.5: m": result[1],
        f"{rows}\ngamma 0.5: next_obs of the last transitions": result[2].next_obs,
    }


def steps_that_count(ended: jax.Array) -> jax.Array:
    """1 up to and with the first end, then 0: int32 [B, n]."""
    ended = ended.astype(int)
    return (ended.cumsum(axis=1) - ended == 0).astype(int)


def n_step(
    batch, gamma,
    counts=lambda terminated, truncated: steps_that_count(terminated | truncated),
    discounts=lambda gamma, k: gamma**k,
    last=lambda m, n: m - 1,
    axis=1,
):  # fmt: skip
    count, n = counts(batch.terminated, batch.truncated), batch.reward.shape[1]
    m = count.sum(axis=1)
    rows = jax.tree.map(lambda x: x[jnp.arange(len(m)), last(m, n)], batch)
    return (count * discounts(gamma, jnp.arange(n)) * batch.reward).sum(axis=axis), m, rows


N_STEP = Exercise(
    look_at_n_step,
    n_step,
    {
        "rewards of the next episode count: nothing stops at an end": dict(
            counts=lambda terminated, truncated: jnp.ones_like(terminated, int)
        ),
        "rewards count beyond a truncation: only a termination stops the sum": dict(
            counts=lambda terminated, truncated: steps_that_count(terminated)
        ),
        "rewards count beyond a termination: only a truncation stops the sum": dict(
            counts=lambda terminated, truncated: steps_that_count(truncated)
        ),
        "the step that ends the episode does not count": dict(
            counts=lambda terminated, truncated: jnp.cumprod(1 - (terminated | truncated), axis=1)
        ),
        "only the steps that end an episode are left out, not what follows them": dict(
            counts=lambda terminated, truncated: 1 - (terminated | truncated)
        ),
        "the rewards are not discounted": dict(discounts=lambda gamma, k: 1.0),
        "the first reward is discounted already": dict(discounts=lambda gamma, k: gamma ** (k + 1)),
        "gamma * k stands where gamma^k belongs": dict(discounts=lambda gamma, k: gamma * k),
        "every later reward is discounted once, by gamma": dict(
            discounts=lambda gamma, k: jnp.where(k == 0, 1.0, gamma)
        ),
        "the last transition is always the window's last, which may belong to the next episode": dict(
            last=lambda m, n: jnp.full_like(m, n - 1)
        ),
        "the last transition is number m of the window, one too far: they are counted from 0": dict(
            last=lambda m, n: jnp.minimum(m, n - 1)
        ),
        "the sum runs over the batch, not over the window: wrong axis": dict(axis=0),
    },
)

# %% sample ---------------------------------------------------------------------------------------------
CAPACITY, BATCH_SIZE, N_STEPS, DRAWS = 8, 64, 3, 200
EMPTY = -1


class Rows(NamedTuple):
    """Each transition is its number, so that one sees which were drawn."""

    obs: jax.Array  # float32 [capacity, 2]
    reward: jax.Array  # float32 [capacity]


class Buffer(NamedTuple):
    """As the script's."""

    rows: Rows
    count: jax.Array  # int32 []


def buffer_after(count: int) -> Buffer:
    """A ring of CAPACITY rows after `count` transitions."""
    numbers = np.full(CAPACITY, EMPTY)
    for i in range(count):
        numbers[i % CAPACITY] = i
    numbers = jnp.asarray(numbers, jnp.float32)
    return Buffer(Rows(jnp.stack([numbers, -numbers], axis=1), numbers), jnp.int32(count))


def look_at_sample(function: Callable) -> dict[str, np.ndarray]:
    """What 200 batches of 64 windows hold: only the frequencies count, not how the function draws."""
    found = {}
    rngs = jax.random.split(jax.random.key(0), DRAWS)
    for count in (5, 11):
        buffer = buffer_after(count)
        rows = jax.vmap(lambda rng, buffer=buffer: function(buffer, rng, BATCH_SIZE, N_STEPS))(rngs)
        shapes = [list(np.shape(x)[1:]) for x in jax.tree.leaves(rows)]
        if shapes != [[BATCH_SIZE, N_STEPS, 2], [BATCH_SIZE, N_STEPS]]:
            raise grader.Unusable(
                f"of rows [8, 2] and [8], batch_size 64, n_steps 3 it makes {shapes}; "
                f"expected [[64, 3, 2], [64, 3]]"
            )
        windows = np.asarray(rows.reward).astype(int)  # [DRAWS, B, n]
        first = windows[:, :, 0]
        given = f"capacity {CAPACITY}, {count} transitions added, n_steps {N_STEPS}: share of"
        found |= {
            f"{given} rows drawn that were never written": np.mean(windows == EMPTY),
            f"{given} windows whose transitions are not consecutive": np.mean(
                (np.diff(windows, axis=2) != 1).any(axis=2)
            ),
            f"{given} windows that begin with transition 0, 1, ... {count - 1}": np.array(
                [np.mean(first == i) for i in range(count)]
            ),
            f"{given} batches that hold one window only": np.mean((first == first[:, :1]).all(axis=1)),
            f"{given} batches that are equal to the one before": np.mean(
                (first[1:] == first[:-1]).all(axis=1)
            ),
        }
    return found


def sample(
    buffer, rng, batch_size, n_steps,
    low=lambda count, capacity: jnp.maximum(count - capacity, 0),
    high=lambda count, capacity, n: count - n + 1,
    size=lambda B, n: (B, 1),
    wrap=lambda positions, capacity: positions % capacity,
    key=lambda rng: rng,
):  # fmt: skip
    capacity, count = len(buffer.rows.reward), buffer.count
    ends = low(count, capacity), high(count, capacity, n_steps)
    first = jax.random.randint(key(rng), size(batch_size, n_steps), *ends)
    steps = 0 if first.shape[1] == n_steps else jnp.arange(n_steps)
    positions = wrap(jnp.broadcast_to(first + steps, (batch_size, n_steps)), capacity)
    return jax.tree.map(lambda x: x[positions], buffer.rows)


SAMPLE = Exercise(
    look_at_sample,
    sample,
    {
        "windows begin anywhere in the ring: they run over its seam, and into rows never written": dict(
            low=lambda count, capacity: 0, high=lambda count, capacity, n: capacity
        ),
        "windows begin anywhere in what was written: they run over its end": dict(
            low=lambda count, capacity: 0, high=lambda count, capacity, n: jnp.minimum(count, capacity)
        ),
        "windows begin at 0 to count: in overwritten rows, and beyond the newest one into empty ones": dict(
            low=lambda count, capacity: 0, high=lambda count, capacity, n: count
        ),
        "the oldest is taken to be number 0 even when it has been overwritten": dict(
            low=lambda count, capacity: 0
        ),
        "the newest window is never drawn: randint already leaves its end out": dict(
            high=lambda count, capacity, n: count - n
        ),
        "one window too many: the last one runs past the newest row": dict(
            high=lambda count, capacity, n: count - n + 2
        ),
        "% capacity is missing: what lies beyond the array is its last row": dict(
            wrap=lambda positions, capacity: positions
        ),
        "one window is drawn for the whole batch": dict(size=lambda B, n: (1, 1)),
        "the n steps of a window are drawn apart": dict(
            size=lambda B, n: (B, n), high=lambda count, capacity, n: count
        ),
        "rng is not used: every batch is the same": dict(key=lambda rng: jax.random.key(0)),
    },
    tolerance=0.025,  # a share of 12,800 windows strays by 0.0042 at most: two of them, four deviations
)

EXERCISES = {"td_target": TD_TARGET, "n_step": N_STEP, "sample": SAMPLE}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    runs.start_jax()
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    import cart_pole_dqn

    print("\nAll right. cart_pole_dqn.py with your td_target, n_step and sample:")
    cart_pole_dqn.td_target, cart_pole_dqn.n_step, cart_pole_dqn.sample = functions
    settings.run(lambda arguments: cart_pole_dqn.main(arguments or ["NUM_SEEDS=3"]))
