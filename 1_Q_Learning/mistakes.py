"""What goes wrong, and how it looks: Q_Learning.py trained with one of its functions replaced.

    python 1_Q_Learning/mistakes.py                       # about 2 minutes
    python 1_Q_Learning/mistakes.py NUM_EPISODES=5000     # a constant of the script, for all rows

Writes mistakes.csv (rows M) and exercises.csv (rows E), a line per row and seed.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import grid
import Q_Learning as script
import runs
import settings

NUM_SEEDS = 5  # of each row


class Row(NamedTuple):
    """One training of the script, changed."""

    name: str  # as in the tables of MEASUREMENTS.md
    what: str
    changes: tuple[tuple[Any, str, Any], ...] = ()  # module, name, what stands in its place
    constants: tuple[str, ...] = ()


# %% What stands in the place of a function --------------------------------------------------------------
play_episode, q_update, step = script.play_episode, script.q_update, grid.step


def ends_at_the_limit(c: Any, *arguments: Any) -> tuple[float, int]:
    """An episode whose world calls the step limit an end."""
    steps = 0

    def with_limit(c: Any, state: int, action: int) -> tuple[int, float, bool]:
        nonlocal steps
        steps += 1
        next_state, reward, terminated = step(c, state, action)
        return next_state, reward, terminated or steps == c.MAX_STEPS_PER_EPISODE

    with mock.patch.object(grid, "step", with_limit):
        return play_episode(c, *arguments)


def on_slippery_floor(c: Any, Q: np.ndarray, epsilon: float, rng: np.random.Generator) -> tuple[float, int]:
    """An episode in which one move in five goes in a random direction."""

    def slip(c: Any, state: int, action: int) -> tuple[int, float, bool]:
        return step(c, state, int(rng.integers(4)) if rng.random() < 0.2 else action)

    with mock.patch.object(grid, "step", slip):
        return play_episode(c, Q, epsilon, rng)


def begins_at(value: float) -> Callable:
    """An episode; a table of zeros, which is one that has learned nothing, is filled with `value` before."""

    def play(c: Any, Q: np.ndarray, *arguments: Any) -> tuple[float, int]:
        if not Q.any():
            Q[...] = value
        return play_episode(c, Q, *arguments)

    return play


def past_the_goal(Q, state, action, reward, next_state, terminated, alpha, gamma) -> None:
    """The update without (1 - terminated)."""
    q_update(Q, state, action, reward, next_state, False, alpha, gamma)


def towards_the_mean(Q, state, action, reward, next_state, terminated, alpha, gamma) -> None:
    """The update with the mean over the next actions instead of the maximum."""
    td_target = reward + gamma * (1 - terminated) * Q[next_state].mean()
    Q[state, action] += alpha * (td_target - Q[state, action])


def by_visits(power: float) -> Callable:
    """The update with a step size for each pair: one over its visits to a power."""
    visits = np.zeros((16, 4))

    def update(Q, state, action, reward, next_state, terminated, alpha, gamma) -> None:
        if not Q.any():  # the next seed's table
            visits[:] = 0
        visits[state, action] += 1
        alpha = visits[state, action] ** -power
        q_update(Q, state, action, reward, next_state, terminated, alpha, gamma)

    return update


# %% Rows -----------------------------------------------------------------------------------------------
TRUNCATION = (script, "play_episode", ends_at_the_limit)
SLIPPERY = (script, "play_episode", on_slippery_floor)
FORGOTTEN = (script, "q_update", past_the_goal)
OPTIMISTIC = (script, "play_episode", begins_at(100.0))
PESSIMISTIC = (script, "play_episode", begins_at(-300.0))
OTHER_ORDER = (
    (grid, "ACTIONS", ["right", "left", "down", "up"]),
    (grid, "MOVES", [(0, 1), (0, -1), (1, 0), (-1, 0)]),
)
POWER_1 = (SLIPPERY, (script, "q_update", by_visits(1.0)))
POWER_08 = (SLIPPERY, (script, "q_update", by_visits(0.8)))
MEAN = (script, "q_update", towards_the_mean)

ROWS = [
    Row("M1", "truncation taken for termination", (TRUNCATION,)),
    Row("M2", "truncation taken for termination", (TRUNCATION,), ("EPSILON_END=1.0",)),
    Row("M3", "truncation taken for termination", (TRUNCATION,), ("MAX_STEPS_PER_EPISODE=10",)),
    Row("M4", "the script as it is", (), ("MAX_STEPS_PER_EPISODE=10",)),
    Row("M5", "(1 - terminated) forgotten", (FORGOTTEN,)),
    Row("M6", "(1 - terminated) forgotten, table starts at 100", (FORGOTTEN, OPTIMISTIC)),
    Row("M7", "(1 - terminated) forgotten, table starts at -300", (FORGOTTEN, PESSIMISTIC)),
    Row("M8", "table starts at -300", (PESSIMISTIC,)),
    Row("M9", "actions numbered right, left, down, up", OTHER_ORDER, ("EPSILON_START=0.01",)),
    Row("E1", "the script as it is", (), ("ALPHA=1.0", "NUM_EPISODES=14")),
    Row("E2a", "slippery floor", (SLIPPERY,), ("ALPHA=1.0", "EPSILON_END=1.0")),
    Row("E2b", "slippery floor", (SLIPPERY,), ("ALPHA=0.1", "EPSILON_END=1.0")),
    Row("E2c", "slippery floor, step size visits ** -1.0", POWER_1, ("EPSILON_END=1.0",)),
    Row("E2d", "slippery floor, step size visits ** -0.8", POWER_08, ("EPSILON_END=1.0",)),
    Row("E3", "mean instead of max", (MEAN,), ("EPSILON_END=1.0",)),
]


# %% Running them ---------------------------------------------------------------------------------------
def slippery_optimum(c: script.Constants) -> np.ndarray:
    """The optimal action values on the slippery floor: 0.8 of a move's own value, 0.2 of the mean of all."""
    q_star = np.zeros((c.SIZE**2, 4))
    for _ in range(10_000):  # each sweep shrinks the error by GAMMA: 0.99^10000 is nothing
        moved = np.zeros_like(q_star)
        for state, action in np.ndindex(len(q_star) - 1, 4):
            following, reward, terminated = grid.step(c, state, action)
            moved[state, action] = reward + c.GAMMA * (1 - terminated) * q_star[following].max()
        previous, q_star = q_star, 0.8 * moved + 0.2 * moved.mean(axis=1, keepdims=True)
        if np.abs(q_star - previous).max() < 1e-12:
            break
    return q_star


def train_changed(row: Row, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Five seeds of a row against the optimum of its own world; the goal's row of the table left out."""
    c = script.configure(["PRINT_EVERY=0", *arguments, *row.constants])
    with contextlib.ExitStack() as stack:
        for change in row.changes:
            stack.enter_context(mock.patch.object(*change))
        q_star = slippery_optimum(c) if SLIPPERY in row.changes else grid.value_iteration(c)
        for seed in range(NUM_SEEDS):
            q_table, log, _ = script.train(c, np.random.default_rng(seed))
            error = np.abs(q_table - q_star)[:-1]  # [15, 4]
            yield {
                "row": row.name,
                "what": row.what,
                "constants": " ".join(row.constants),
                "seed": seed,
                "max_abs_error": error.max(),
                "pairs_off_by_0.01": int((error > 0.01).sum()),
                "optimal_from_every_state": grid.optimal_from_every_state(c, q_table),
                "moves_from_start": grid.greedy_moves(c, q_table, grid.START) or "never",
                "return_of_last_1000_episodes": round(log[log[:, 0] > c.NUM_EPISODES - 1000, 2].mean(), 3),
            }


def main(arguments: list[str]) -> None:
    """Trains every row and writes both tables.

    Args:
        arguments: `NAME=value`, constants of the script; they hold for every row that does not change them.

    Raises:
        settings.UserError: a constant is wrong.
    """
    started = time.perf_counter()
    run_dir = runs.open_run("Q_Learning_mistakes", script.configure(arguments))
    lines = []
    for row in ROWS:
        lines += train_changed(row, arguments)
        error = f"largest error {lines[-1]['max_abs_error']:.3g}"
        print(row.name, row.what, *row.constants, error, flush=True)
    for letter, name in (("M", "mistakes"), ("E", "exercises")):
        runs.write_csv(run_dir / f"{name}.csv", [line for line in lines if line["row"].startswith(letter)])
    seconds = time.perf_counter() - started
    runs.write_json(run_dir / "result.json", {"seconds": seconds})
    print(f"{seconds:.1f} s; everything of this run is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
