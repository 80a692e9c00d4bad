"""Q-learning on a 4x4 grid: a table of 16 states x 4 actions learns what each move is worth.

The update after every move (Watkins 1989; Sutton & Barto, 2nd edition, eq. 6.8):

    Q(S, A) <- Q(S, A) + alpha * (R + gamma * (1 - terminated) * max_a' Q(S', a') - Q(S, A))

Read first: `play_episode`, `select_action`, `q_update`. The environment is grid.py.

Not here, and why: a step size that shrinks with the visits (Watkins & Dayan 1992 need one for their
proof; this grid is deterministic, so a constant one converges, too), random tie-breaking (argmax
takes the first of equal values; where two moves are equally good to the end, as in nine of the
states, either is right), a second table against maximization bias (no noise, no bias), gymnasium
(the environment is one function).

    python 1_Q_Learning/Q_Learning.py                  # 3 seconds, on 2 cores of an EPYC
    python 1_Q_Learning/Q_Learning.py ALPHA=1.0 SEED=1
    python 1_Q_Learning/Q_Learning.py --help           # every constant
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

import grid
import pictures
import runs
import settings
from settings import Count, CountOrOff, Negative, Positive, Probability, Seed, Share, TwoOrMore


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # --- the environment
    SIZE: TwoOrMore = 4  # rows and columns; the start is upper left, the goal lower right
    GOAL_REWARD: Positive = 100.0  # for the move that reaches the goal, instead of STEP_REWARD
    STEP_REWARD: Negative = -1.0  # for every other move, bumping into a wall included
    # --- learning
    ALPHA: Share = 0.1  # step size: share of the TD error that one visit corrects; 1.0: all of it
    GAMMA: Share = 0.99  # discount per move; below 1, a short way is worth more than a long one
    NUM_EPISODES: Count = 20_000  # each from the start to the goal, or to the step limit
    MAX_STEPS_PER_EPISODE: Count = 100  # then the episode is truncated, which is not a termination
    # --- exploration: the probability of a random action falls linearly, then stays
    EPSILON_START: Probability = 1.0  # chance of a random action at first; 1: all moves are random
    EPSILON_END: Probability = 0.01  # ... and in the end; 0: no exploration at the end
    DECAY_EPISODES: Count = 10_000  # episodes from EPSILON_START to EPSILON_END
    # --- the run
    SEED: Seed = 0  # seed of the exploration, the only randomness here
    LOG_EVERY: Count = 50  # episodes averaged into one row of log.csv
    PRINT_EVERY: CountOrOff = 40  # rows of log.csv per printed line; 0: prints none
    RUN_DIR: str = ""  # empty: runs/Q_Learning/<time>

    def __post_init__(self):
        way = 2 * (self.SIZE - 1)
        settings.check(self, "SIZE", self.SIZE <= 100, "from 2 to 100")
        enough = way <= self.MAX_STEPS_PER_EPISODE
        text = f"{way} or more, the length of the shortest way"
        settings.check(self, "MAX_STEPS_PER_EPISODE", enough, text)
        below = f"at most EPSILON_START={self.EPSILON_START}"
        settings.check(self, "EPSILON_END", self.EPSILON_END <= self.EPSILON_START, below)


# %% Training --------------------------------------------------------------------------------------
def train(c: Constants, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plays NUM_EPISODES episodes and learns after each move; `rng` draws the exploration.

    Returns the table, float64 [16, 4]; the log, [rows, 4], a row per LOG_EVERY episodes (the last
    may have fewer): the episodes so far, then the means of epsilon, return (undiscounted) and
    steps; the tables at the end of each row, [rows, 16, 4].
    """
    Q = np.zeros((c.SIZE**2, len(grid.ACTIONS)))
    log, tables, block = [], [], []
    for episode in tqdm(range(1, c.NUM_EPISODES + 1), unit="episode", leave=False, disable=None):
        epsilon = epsilon_at(c, episode - 1)
        block.append((epsilon, *play_episode(c, Q, epsilon, rng)))
        if episode % c.LOG_EVERY == 0 or episode == c.NUM_EPISODES:
            log.append((episode, *np.mean(block, axis=0)))
            tables.append(Q.copy())
            block = []
            if c.PRINT_EVERY and len(log) % c.PRINT_EVERY == 0:
                tqdm.write(
                    "episode {:6d}   epsilon {:.3f}   return {:7.2f}   steps {:6.2f}".format(
                        *log[-1]
                    )
                )
    return Q, np.array(log), np.array(tables)


def play_episode(
    c: Constants, Q: np.ndarray, epsilon: float, rng: np.random.Generator
) -> tuple[float, int]:
    """One episode, which changes the table in place; its undiscounted return and its steps."""
    state, episode_return, steps = grid.START, 0.0, 0
    terminated = truncated = False
    while not (terminated or truncated):
        action = select_action(state, Q, epsilon, rng)
        next_state, reward, terminated = grid.step(c, state, action)
        q_update(Q, state, action, reward, next_state, terminated, c.ALPHA, c.GAMMA)
        state = next_state
        episode_return += reward
        steps += 1
        truncated = steps == c.MAX_STEPS_PER_EPISODE  # ends the loop, and never enters the update
    return episode_return, steps


# %% Algorithm -------------------------------------------------------------------------------------
def epsilon_at(c: Constants, episode: int) -> float:
    """The probability of a random action: EPSILON_START at episode 0, EPSILON_END from
    DECAY_EPISODES on.
    """
    return c.EPSILON_START + (c.EPSILON_END - c.EPSILON_START) * min(
        episode / c.DECAY_EPISODES, 1.0
    )


def select_action(state: int, Q: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Epsilon-greedy, the behavior policy (Sutton & Barto, section 2.2): among equal values the
    first action.

    The random one, drawn with probability epsilon, may be the greedy one by chance. Q is float64
    [16, 4].
    """
    if rng.random() < epsilon:
        return int(rng.integers(Q.shape[1]))
    return int(Q[state].argmax())


def q_update(
    Q: np.ndarray,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    terminated: bool,
    alpha: float,
    gamma: float,
) -> None:
    """The whole of Q-learning (Sutton & Barto, eq. 6.8): changes one entry of the table [16, 4], in
    place.

    An episode that the step limit cuts off has *not* terminated. It would have gone on, so the
    value of next_state still counts.
    """
    # Bootstrapping: the table's own estimate replaces the rest of the return. Its max over a',
    # whatever action is taken next, makes the method off-policy. (1 - terminated): nothing comes
    # after the goal, whatever the table holds in that row.
    td_target = reward + gamma * (1 - terminated) * Q[next_state].max()
    td_error = td_target - Q[state, action]
    Q[state, action] += alpha * td_error


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains, compares with the optimum, fills the run's folder. Returns what result.json holds."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    run_dir = runs.open_run("Q_Learning", c)
    Q, log, tables = train(c, np.random.default_rng(c.SEED))

    q_star = grid.value_iteration(c)
    errors = np.abs(tables - q_star).max(axis=(1, 2))  # [rows]
    best_return = c.GOAL_REWARD + c.STEP_REWARD * (2 * (c.SIZE - 1) - 1)  # of the shortest way
    optimal = grid.optimal_from_every_state(c, Q)
    result = {"max_abs_error": float(errors[-1]), "optimal_from_every_state": optimal}
    columns = ["episode", "epsilon", "return", "steps", "max_abs_error"]
    log_rows = [
        dict(zip(columns, [int(row[0]), *row[1:], error])) for row, error in zip(log, errors)
    ]
    runs.write_log(run_dir, log_rows)
    table_rows = [{"state": state} | dict(zip(grid.ACTIONS, row)) for state, row in enumerate(Q)]
    runs.write_csv(run_dir / "q_table.csv", table_rows)

    print(f"\nthe greedy policy\n{pictures.policy_text(Q)}")
    print(f"\nthe table\n{pictures.table_text(Q, grid.ACTIONS)}\n")
    print(f"largest distance to the optimum (value iteration), over all pairs: {errors[-1]:.2g}")
    yes = "yes" if optimal else "no"
    print(f"shortest way from every state: {yes}; best possible return: {best_return:g}")
    pictures.draw_learning_curve(run_dir / "learning_curve.png", log, errors, best_return)
    pictures.draw_q_table(run_dir / "q_table.png", Q, grid.MOVES)
    result["seconds"] = time.perf_counter() - started
    runs.write_json(run_dir / "result.json", result)
    print(f"{result['seconds']:.1f} s; everything of this run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
