"""What stands beside exercises.py: numbers to try the functions on, the usual mistakes, the training."""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import grader
from grader import Exercise

# %% td_target ------------------------------------------------------------------------------------------
# As many windows as steps: [B] against [B, n] goes wrong without a complaint.
WINDOWS = {
    "reward": np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [4, 3, 2, 1]], np.float32),
    "terminated": np.array([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], bool),
    "truncated": np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool),
    "next_q": np.array([8, 16, 24, 32], np.float32),
}


def look_at_td_target(function: Callable) -> dict[str, jax.Array]:
    """A window without an end, two with a termination, one with a truncation."""
    jax.eval_shape(lambda w: function(**w, gamma=0.5), WINDOWS)  # traced as jax.jit does it in a training
    arrays = {name: jnp.asarray(array) for name, array in WINDOWS.items()}
    given = "\n".join(f"{name} {array.astype(int).tolist()}" for name, array in WINDOWS.items())
    return {
        f"{given}\ngamma 0.5": function(**arrays, gamma=0.5),
        f"{given}\ngamma 0.5: gradient of the targets' sum with respect to next_q": jax.grad(
            lambda next_q: jnp.sum(function(**arrays | {"next_q": next_q}, gamma=0.5))
        )(arrays["next_q"]),
    }


def steps_that_count(ended: jax.Array) -> jax.Array:
    """1 up to and with the first end, then 0: int32 [B, n]."""
    ended = ended.astype(int)
    return (ended.cumsum(axis=1) - ended == 0).astype(int)


def target(
    counts: Callable = lambda terminated, truncated: steps_that_count(terminated | truncated),
    discounts: Callable = lambda gamma, n: gamma ** jnp.arange(n),
    rest: Callable = lambda gamma, m, n: gamma**m,
    over: Callable = lambda terminated, truncated, counts: (terminated * counts).any(axis=1),
    fixed: Callable = jax.lax.stop_gradient,
) -> Callable:
    """The right function, or with another piece: which steps count, discounts, when nothing follows."""

    def td_target(reward, terminated, truncated, next_q, gamma):
        n, count = reward.shape[1], counts(terminated, truncated)
        earned = (count * discounts(gamma, n) * reward).sum(axis=1)
        going_on = 1 - over(terminated, truncated, count)
        return fixed(earned + rest(gamma, count.sum(axis=1), n) * going_on * next_q)

    return td_target


TD_TARGET = Exercise(
    look_at_td_target,
    target(),
    {
        "it bootstraps past the end: (1 - terminated) is missing": target(over=lambda end, cut, count: 0),
        "a truncated episode is taken for a terminated one: it does not bootstrap": target(
            over=lambda end, cut, count: ((end | cut) * count).any(axis=1)
        ),
        "only the window's last step is asked whether it terminated, not the last one that counts": target(
            over=lambda end, cut, count: end[:, -1]
        ),
        "rewards of the next episode count: nothing stops at an end": target(
            counts=lambda end, cut: jnp.ones_like(end, int)
        ),
        "rewards count beyond a truncation: only a termination stops the sum": target(
            counts=lambda end, cut: steps_that_count(end)
        ),
        "the step that ends the episode does not count": target(
            counts=lambda end, cut: ((end | cut).cumsum(axis=1) == 0).astype(int)
        ),
        "next_q is discounted by gamma, not by gamma^m": target(rest=lambda gamma, m, n: gamma),
        "next_q is discounted by gamma^n, even where fewer steps count": target(
            rest=lambda gamma, m, n: gamma**n
        ),
        "next_q is discounted once too little, by gamma^(m - 1)": target(
            rest=lambda gamma, m, n: gamma ** (m - 1)
        ),
        "next_q is not discounted": target(rest=lambda gamma, m, n: 1.0),
        "next_q is missing": target(rest=lambda gamma, m, n: 0.0),
        "the rewards are not discounted": target(discounts=lambda gamma, n: jnp.ones(n)),
        "the first reward is discounted already": target(
            discounts=lambda gamma, n: gamma ** jnp.arange(1, n + 1)
        ),
        "the gradient flows through the target: stop_gradient is missing": target(fixed=lambda y: y),
        "next_q [B] meets [B, 1], which makes [B, B]": lambda reward, terminated, truncated, next_q, gamma: (
            target()(reward, terminated, truncated, 0 * next_q, gamma)[:, None]
            + target()(0 * reward, terminated, truncated, next_q, gamma)
        ),
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


def windows(
    low: Callable = lambda count, capacity, n: jnp.maximum(count - capacity, 0),
    high: Callable = lambda count, capacity, n: count - n + 1,
    size: Callable = lambda B, n: (B, 1),
    wrap: bool = True,
    key: Callable = lambda rng: rng,
) -> Callable:
    """The right function, or with another choice: where a window may begin, what is drawn, how it wraps."""

    def sample(buffer, rng, batch_size, n_steps):
        capacity = len(buffer.rows.reward)
        ends = (choose(buffer.count, capacity, n_steps) for choose in (low, high))
        first = jax.random.randint(key(rng), size(batch_size, n_steps), *ends)
        steps = 0 if first.shape[1] == n_steps else jnp.arange(n_steps)
        positions = jnp.broadcast_to(first + steps, (batch_size, n_steps))
        return jax.tree.map(lambda x: x[positions % capacity if wrap else positions], buffer.rows)

    return sample


SAMPLE = Exercise(
    look_at_sample,
    windows(),
    {
        "windows begin anywhere in the ring: they run over its seam, and into rows never written": windows(
            low=lambda count, capacity, n: 0, high=lambda count, capacity, n: capacity
        ),
        "windows begin anywhere in what was written: they run over its end": windows(
            low=lambda count, capacity, n: 0, high=lambda count, capacity, n: jnp.minimum(count, capacity)
        ),
        "the oldest is taken to be number 0 even when it has been overwritten": windows(
            low=lambda count, capacity, n: 0
        ),
        "the newest window is never drawn: randint already leaves its end out": windows(
            high=lambda count, capacity, n: count - n
        ),
        "one window too many: the last one runs past the newest row": windows(
            high=lambda count, capacity, n: count - n + 2
        ),
        "% capacity is missing: what lies beyond the array is its last row": windows(wrap=False),
        "one window is drawn for the whole batch": windows(size=lambda B, n: (1, 1)),
        "the n steps of a window are drawn apart": windows(
            size=lambda B, n: (B, n), high=lambda count, capacity, n: count
        ),
        "rng is not used: every batch is the same": windows(key=lambda rng: jax.random.key(0)),
    },
    tolerance=0.025,  # a share of 12,800 windows strays by 0.0042 at most: two of them, four deviations
)

EXERCISES = {"td_target": TD_TARGET, "sample": SAMPLE}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    import settings

    settings.run(lambda arguments: train(functions, arguments or ["NUM_SEEDS=3"]))


def train(functions: Sequence[Callable], arguments: list[str]) -> None:
    """cart_pole_dqn.py as it is, but for the functions that the reader wrote."""
    import cart_pole_dqn

    print("\nAll right. cart_pole_dqn.py with your td_target and sample:")
    cart_pole_dqn.td_target, cart_pole_dqn.sample = functions
    cart_pole_dqn.main(arguments)
