"""Behind exercises.py: numbers to try the functions on, the usual mistakes, the training."""

from collections import namedtuple
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import grader
import runs
import settings

# %% td_target -------------------------------------------------------------------------------------
TRANSITIONS = {
    "reward": np.array([1, 2, 3], np.float32),
    "terminated": np.array([0, 1, 0], bool),
    "next_q": np.array([8, 16, 24], np.float32),
    "gamma": np.array([0.5, 0.5, 0.25], np.float32),
}


def look_at_td_target(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Three transitions, one of them the last of its episode."""
    jax.eval_shape(lambda t: function(**t), TRANSITIONS)  # traced as jax.jit does it in a training
    arrays = {name: jnp.asarray(array) for name, array in TRANSITIONS.items()}
    given = ", ".join(f"{name} {array.tolist()}" for name, array in TRANSITIONS.items())
    yield given, function(**arrays)
    gradient = jax.grad(lambda next_q: jnp.sum(function(**arrays | {"next_q": next_q})))(
        arrays["next_q"]
    )
    yield f"{given}: the gradient of the targets' sum for next_q", gradient


def td_target(reward, terminated, next_q, gamma):
    y = reward + gamma * (1 - terminated) * next_q
    return jax.lax.stop_gradient(y)


TARGET = "reward + gamma * (1 - terminated) * next_q"
TD_TARGET = grader.Exercise(
    look_at_td_target,
    td_target,
    {
        "it bootstraps past the end: (1 - terminated) is missing": "(1 - terminated) * =>",
        "terminated is inverted: only the last step bootstraps": "(1 - terminated) => terminated",
        "the last step loses its reward, too": "= reward + => = (1 - terminated) * reward +",
        "gamma is missing": "gamma * =>",
        "gamma discounts the reward, too": "= reward + => = gamma * reward +",
        "the reward is missing": "reward + =>",
        "next_q is missing": f"{TARGET} => reward",
        "[B, 1] meets [B], which makes [B, B]": "= reward + => = reward[:, None] +",
        "[B] meets [B, 1], which makes [B, B]": "* next_q => * next_q[:, None]",
        "the gradient flows through the target: stop_gradient is missing": (
            "jax.lax.stop_gradient =>"
        ),
        "the mean is taken already": "(y) => (y.mean())",
    },
)


# %% n_step ----------------------------------------------------------------------------------------
# of the script's Transition
Windows = namedtuple("Windows", "reward terminated truncated next_obs")
# As many windows as steps: [B] against [B, n] goes wrong without a complaint.
WINDOWS = Windows(
    np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [4, 3, 2, 1]], np.float32),
    np.array([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], bool),
    np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool),
    np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]], np.float32),
)


def look_at_n_step(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """A window without an end, one with two, one that ends with its last step, one with a
    truncation.
    """
    jax.eval_shape(lambda windows: function(windows, 0.5), WINDOWS)
    result = function(jax.tree.map(jnp.asarray, WINDOWS), 0.5)
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], Windows):
        raise ValueError("it must return three things: the sums, m, and the last transitions")
    rows = "\n".join(
        f"{name} {array.astype(int).tolist()}" for name, array in WINDOWS._asdict().items()
    )
    names = [
        f"{rows}\ngamma 0.5: {name}"
        for name in ("the sums", "m", "next_obs of the last transitions")
    ]
    yield from zip(names, (*result[:2], result[2].next_obs))


def n_step(batch, gamma):
    ended = (batch.terminated | batch.truncated).astype(int)
    counts = (ended.cumsum(axis=1) - ended == 0).astype(int)
    n, m = counts.shape[1], counts.sum(axis=1)
    rows = jax.tree.map(lambda x: x[jnp.arange(len(m)), m - 1], batch)
    return (counts * gamma ** jnp.arange(n) * batch.reward).sum(axis=1), m, rows


N_STEP = grader.Exercise(
    look_at_n_step,
    n_step,
    {
        "rewards of the next episode count: nothing stops at an end": "ended == 0 => ended > -99",
        "rewards count beyond a truncation: only a termination stops the sum": (
            "| batch.truncated =>"
        ),
        "rewards count beyond a termination: only a truncation stops the sum": (
            "batch.terminated | =>"
        ),
        "the step that ends the episode does not count": "(axis=1) - ended => (axis=1)",
        "only the steps that end an episode are left out": "ended.cumsum(axis=1) - ended => ended",
        "the rewards are not discounted": "gamma ** jnp.arange(n) * =>",
        "the first reward is discounted already": "jnp.arange(n) => (1 + jnp.arange(n))",
        "it's gamma * k instead of gamma^k": "gamma ** => gamma *",
        "every later reward is discounted once, by gamma": (
            "jnp.arange(n) => jnp.minimum(jnp.arange(n), 1)"
        ),
        "the last transition is always the window's last": "m - 1], batch => 0 * m - 1], batch",
        "the last transition is number m, one too far": (
            "m - 1], batch => jnp.minimum(m, n - 1)], batch"
        ),
        "the sum runs over the batch, not the window: wrong axis": (
            ".sum(axis=1), m, => .sum(axis=0), m,"
        ),
    },
)

# %% sample ----------------------------------------------------------------------------------------
CAPACITY, BATCH_SIZE, N_STEPS, DRAWS = 8, 64, 3, 200
# each transition is its number, so that one sees which were drawn
Rows = namedtuple("Rows", "obs reward")
Buffer = namedtuple("Buffer", "rows count")


def buffer_after(count: int) -> Buffer:
    """A ring of CAPACITY rows after `count` transitions; a row never written is below 0."""
    rows = np.arange(CAPACITY)
    numbers = jnp.float32(rows + (count - 1 - rows) // CAPACITY * CAPACITY)
    return Buffer(Rows(jnp.stack([numbers, -numbers], axis=1), numbers), jnp.int32(count))


def look_at_sample(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """What 200 batches of 64 windows hold: the frequencies count, not how the function draws."""
    rngs = jax.random.split(jax.random.key(0), DRAWS)
    for count in (4, CAPACITY, 11):  # half empty, just full, overwritten
        buffer = buffer_after(count)
        rows = jax.vmap(lambda rng, buffer=buffer: function(buffer, rng, BATCH_SIZE, N_STEPS))(rngs)
        shapes = [list(np.shape(x)[1:]) for x in jax.tree.leaves(rows)]
        if shapes != [[BATCH_SIZE, N_STEPS, 2], [BATCH_SIZE, N_STEPS]]:
            given = "of rows [8, 2] and [8], batch_size 64, n_steps 3"
            raise ValueError(f"{given} it makes {shapes}; expected [[64, 3, 2], [64, 3]]")
        windows = np.asarray(rows.reward).astype(int)  # [DRAWS, B, n]
        first = windows[:, :, 0]
        what = {
            "are rows sampled that were never written?": np.any(windows < 0),
            "are there windows whose transitions are not consecutive?": np.any(
                np.diff(windows, axis=2) != 1
            ),
            f"share of windows that begin with transition 0, 1, ... {count - 1}": np.array(
                [np.mean(first == i) for i in range(count)]
            ),
            "share of batches that consist of a single window": np.mean(
                (first == first[:, :1]).all(axis=1)
            ),
            "share of batches equal to the one before": np.mean(
                (first[1:] == first[:-1]).all(axis=1)
            ),
        }
        given = f"capacity {CAPACITY}, {count} transitions added, n_steps {N_STEPS}:"
        yield from ((f"{given} {asked}", answer) for asked, answer in what.items())


def sample(buffer, rng, B, n):
    capacity, count = len(buffer.rows.reward), buffer.count
    low, high = jnp.maximum(count - capacity, 0), count - n + 1
    first = jax.random.randint(rng, (B, 1), low, high)
    positions = (first + jnp.arange(n)) % capacity
    return jax.tree.map(lambda x: x[positions], buffer.rows)


RANGE = "jnp.maximum(count - capacity, 0), count - n + 1"
SAMPLE = grader.Exercise(
    look_at_sample,
    sample,
    {
        "windows cross the ring's seam, and start in rows that were never written": (
            f"{RANGE} => 0, capacity"
        ),
        "windows start anywhere, even in rows never written": f"{RANGE} => 0, capacity - n + 1",
        "windows run past the end of what was written": (
            f"{RANGE} => 0, jnp.minimum(count, capacity)"
        ),
        "windows begin at 0 to count: in overwritten rows, or run into empty ones": (
            f"{RANGE} => 0, count"
        ),
        "the oldest is number 0 even when it's overwritten": (
            "jnp.maximum(count - capacity, 0) => 0"
        ),
        "the newest window is never sampled: randint already leaves its end out": (
            "count - n + 1 => count - n"
        ),
        "one window too many: the last one runs past the newest row": (
            "count - n + 1 => count - n + 2"
        ),
        "% capacity is missing: an index beyond the array returns its last row": "% capacity =>",
        "one window is sampled for the whole batch": (
            "(B, 1) => (1, 1); jnp.arange(n)) => jnp.arange(n) + jnp.zeros((B, 1), int))"
        ),
        "the n steps of a window are sampled separately": (
            "(B, 1), low, high => (B, n), low, count; first + jnp.arange(n) => first"
        ),
        "rng is not used: every batch is the same": "randint(rng => randint(jax.random.key(0)",
    },
    # a share of 12,800 windows strays by 0.0042 at most: two of them, four deviations
    tolerance=0.025,
)

EXERCISES = {"td_target": TD_TARGET, "n_step": N_STEP, "sample": SAMPLE}


# %% Main ------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Grades the reader's functions. If all are right, trains with them: exit code 0, else 1."""

    def judge_and_train(arguments: list[str]) -> None:
        runs.start_jax()
        grader.run(EXERCISES, functions)
        import cart_pole_dqn as script

        print("\nAll right. cart_pole_dqn.py with your td_target, n_step and sample:")
        script.td_target, script.n_step, script.sample = functions
        script.main(arguments or ["NUM_SEEDS=3"])

    settings.run(judge_and_train)
