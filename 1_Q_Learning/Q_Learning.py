"""Q-learning on a 4x4 grid: a table of 16 states x 4 actions learns what each move is worth.

The update after every move (Watkins 1989; Sutton & Barto, 2nd edition, eq. 6.8):

    Q(S, A) <- Q(S, A) + alpha * (R + gamma * (1 - terminated) * max_a' Q(S', a') - Q(S, A))

Read first: `play_episode`, `select_action`, `update`.

Not here, and why: a step size that shrinks with the visits (Watkins & Dayan 1992 need one for their proof;
this world is deterministic, so a constant one converges too), random tie-breaking (ties last only until the
first visits), a second table against maximization bias (no noise, no bias), gymnasium (the world is `step`).

    python 1_Q_Learning/Q_Learning.py                  # 1 to 2 seconds after imports on 2 cores of an EPYC
    python 1_Q_Learning/Q_Learning.py ALPHA=1.0 SEED=1
    python 1_Q_Learning/Q_Learning.py --help           # every constant
    python 1_Q_Learning/study.py                       # step sizes and epsilons side by side: half a minute
"""

import time
from typing import Any

import numpy as np
from tqdm import tqdm

import pictures
import settings

# %% Constants ------------------------------------------------------------------------------------------
# Learning
ALPHA = 0.1  # step size: share of the TD error that one visit corrects; 1.0 believes the newest target alone
GAMMA = 0.99  # discount: worth of a reward one move later; below 1 a short way is worth more than a long one
NUM_EPISODES = 20000  # each from the start to the goal, or to the step limit
MAX_STEPS_PER_EPISODE = 100  # then the episode is truncated: cut off, not over

# Exploration: the probability of a random action falls linearly, then stays
EPSILON_START = 1.0  # 1: nothing but random moves
EPSILON_END = 0.01  # 0: no exploration any more
DECAY_EPISODES = 10000  # episodes from EPSILON_START to EPSILON_END

# Rewards
GOAL_REWARD = 100.0  # for the move that reaches the goal, instead of STEP_REWARD
STEP_REWARD = -1.0  # for every other move, bumping into a wall included

# The run
SEED = 0  # draws the exploration, the only chance in this world
LOG_EVERY = 50  # episodes averaged into one row of log.csv
PRINT_EVERY = 40  # rows of log.csv per printed line; 0: prints none
RUN_DIR = ""  # empty: runs/Q_Learning/<time>

DEFAULTS = settings.constants(globals())


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets the constants above: DEFAULTS, changed by `NAME=value` arguments. Raises settings.UserError."""
    return settings.configure(globals(), arguments)


# %% World ----------------------------------------------------------------------------------------------
#    0  1  2  3
#    4  5  6  7      start 0, goal 15
#    8  9 10 11
#   12 13 14 15
SIZE = 4
NUM_STATES, NUM_ACTIONS = SIZE * SIZE, 4
START, GOAL = 0, NUM_STATES - 1
ACTIONS = ["up", "down", "left", "right"]
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]  # (rows, columns), in the order of ACTIONS


def step(state: int, action: int) -> tuple[int, float, bool]:
    """One move. A wall keeps the agent where it is, and the move still costs STEP_REWARD.

    The move that reaches the goal earns GOAL_REWARD only; STEP_REWARD is not added to it.

    Args:
        state: 0 to 15, not the goal: from there no move is left.
        action: 0 to 3, an index into ACTIONS.

    Returns:
        next_state, reward, terminated (the goal is reached).
    """
    row, column = divmod(state, SIZE)
    rows, columns = MOVES[action]
    row = min(max(row + rows, 0), SIZE - 1)
    column = min(max(column + columns, 0), SIZE - 1)
    next_state = row * SIZE + column
    terminated = next_state == GOAL
    return next_state, GOAL_REWARD if terminated else STEP_REWARD, terminated


# %% Training -------------------------------------------------------------------------------------------
def train(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plays NUM_EPISODES episodes and learns after each move.

    Args:
        rng: draws the exploration.

    Returns:
        q_table: float64 (16, 4).
        log: float64 (rows, 4), one row per LOG_EVERY episodes (the last may have fewer): the episodes
            played so far, then the means of epsilon, return (undiscounted) and steps.
        tables: float64 (rows, 16, 4), the table at the end of each row.
    """
    q_table = np.zeros((NUM_STATES, NUM_ACTIONS))
    log, tables, block = [], [], []
    for episode in tqdm(range(1, NUM_EPISODES + 1), unit="episode", leave=False, disable=None):
        epsilon = epsilon_at(episode - 1)
        block.append((epsilon, *play_episode(q_table, epsilon, rng)))
        if episode % LOG_EVERY == 0 or episode == NUM_EPISODES:
            log.append((episode, *np.mean(block, axis=0)))
            tables.append(q_table.copy())
            block = []
            if PRINT_EVERY and len(log) % PRINT_EVERY == 0:
                tqdm.write("episode {:6d}   epsilon {:.3f}   return {:7.2f}   steps {:6.2f}".format(*log[-1]))
    return q_table, np.array(log), np.array(tables)


def play_episode(q_table: np.ndarray, epsilon: float, rng: np.random.Generator) -> tuple[float, int]:
    """One episode from START. Changes the table in place. Returns the undiscounted return and the steps."""
    # All random numbers of an episode in two calls: one call per move would cost more than the move.
    coins = rng.random(MAX_STEPS_PER_EPISODE).tolist()
    random_actions = rng.integers(NUM_ACTIONS, size=MAX_STEPS_PER_EPISODE).tolist()
    state, episode_return, steps = START, 0.0, 0
    terminated = truncated = False
    while not (terminated or truncated):
        action = select_action(q_table, state, epsilon, coins[steps], random_actions[steps])
        next_state, reward, terminated = step(state, action)
        update(q_table, state, action, reward, next_state, terminated)
        state = next_state
        episode_return += reward
        steps += 1
        truncated = steps == MAX_STEPS_PER_EPISODE  # ends the loop, and never enters the update
    return episode_return, steps


# %% Algorithm ------------------------------------------------------------------------------------------
def epsilon_at(episode: int) -> float:
    """The probability of a random action: EPSILON_START at episode 0, EPSILON_END from DECAY_EPISODES on."""
    return EPSILON_START + (EPSILON_END - EPSILON_START) * min(episode / DECAY_EPISODES, 1.0)


def select_action(q_table: np.ndarray, state: int, epsilon: float, coin: float, random_action: int) -> int:
    """Epsilon-greedy, the behavior policy (Sutton & Barto, section 2.2).

    Args:
        q_table: float64 (16, 4).
        state: 0 to 15.
        epsilon: probability of the random action, which may be the greedy one by chance.
        coin: drawn uniformly from [0, 1).
        random_action: drawn uniformly from 0 to 3.

    Returns:
        The action; among equal values the first one.
    """
    return random_action if coin < epsilon else int(q_table[state].argmax())


def update(
    q_table: np.ndarray, state: int, action: int, reward: float, next_state: int, terminated: bool
) -> None:
    """The whole of Q-learning (Sutton & Barto, eq. 6.8): changes one entry of the table, in place.

    Args:
        q_table: float64 (16, 4).
        state, action, reward, next_state: one move.
        terminated: the goal was reached. An episode that the step limit cuts off has *not* terminated: the
            world would have gone on, so the value of next_state still counts.
    """
    # Bootstrapping: the table's own estimate stands in for the rest of the return. Its max over a', whatever
    # action is taken next, makes the method off-policy. (1 - terminated): nothing comes after the goal,
    # whatever the table holds in that row.
    td_target = reward + GAMMA * (1 - terminated) * q_table[next_state].max()
    td_error = td_target - q_table[state, action]
    q_table[state, action] += ALPHA * td_error


# %% Evaluation -----------------------------------------------------------------------------------------
def value_iteration() -> np.ndarray:
    """The optimal action values, computed from the rules of the world, which the learner never sees.

    Sweeps over all pairs with the Bellman optimality equation (Sutton & Barto, eq. 3.20) until no value
    changes, as section 4.4 does for V.

    Returns:
        q_star: float64 (16, 4); the goal's row is 0.
    """
    q_star = np.zeros((NUM_STATES, NUM_ACTIONS))
    change = np.inf
    while change > 1e-12:
        previous = q_star.copy()
        for state in range(NUM_STATES):
            if state == GOAL:
                continue
            for action in range(NUM_ACTIONS):
                next_state, reward, terminated = step(state, action)
                # q*(s, a) = r + gamma * max_a' q*(s', a')
                q_star[state, action] = reward + GAMMA * (1 - terminated) * previous[next_state].max()
        change = np.abs(q_star - previous).max()
    return q_star


def greedy_moves(q_table: np.ndarray, state: int) -> int | None:
    """The number of moves from a state to the goal by the greedy policy, or None if it never gets there."""
    for moves in range(NUM_STATES):  # a way that visits no state twice is shorter than this
        if state == GOAL:
            return moves
        state, _, _ = step(state, int(q_table[state].argmax()))
    return None


def optimal_from_every_state(q_table: np.ndarray) -> bool:
    """Whether the greedy policy takes the shortest way from every state, also from those it never visits."""
    last = SIZE - 1
    return all(
        greedy_moves(q_table, state) == (last - state // SIZE) + (last - state % SIZE)
        for state in range(NUM_STATES)
    )


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains, compares with the optimum, and writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: max_abs_error (over all pairs, against value iteration),
        optimal_from_every_state, seconds (wall time after imports, pictures included).

    Raises:
        settings.UserError: a constant is wrong, or the folder holds another run.
    """
    started = time.perf_counter()
    run_dir = settings.open_run("Q_Learning", configure(arguments))
    q_table, log, tables = train(np.random.default_rng(SEED))

    q_star = value_iteration()
    errors = np.abs(tables - q_star).max(axis=(1, 2))  # (rows,)
    best_return = GOAL_REWARD + STEP_REWARD * (greedy_moves(q_star, START) - 1)
    result = {
        "max_abs_error": float(errors[-1]),
        "optimal_from_every_state": optimal_from_every_state(q_table),
    }
    print(f"\nthe greedy policy\n{pictures.policy_text(q_table, GOAL)}")
    print(f"\nthe table\n{pictures.table_text(q_table, ACTIONS)}\n")
    print(f"largest distance to the optimum (value iteration), over all pairs: {errors[-1]:.2g}")
    optimal = "yes" if result["optimal_from_every_state"] else "no"
    print(f"shortest way from every state: {optimal}; best possible return: {best_return:g}")

    columns = ["episode", "epsilon", "return", "steps", "max_abs_error"]
    log_rows = [dict(zip(columns, [int(row[0]), *row[1:], error])) for row, error in zip(log, errors)]
    settings.write_csv(run_dir / "log.csv", log_rows)
    table_rows = [{"state": state} | dict(zip(ACTIONS, row)) for state, row in enumerate(q_table)]
    settings.write_csv(run_dir / "q_table.csv", table_rows)
    pictures.draw_learning_curve(run_dir / "learning_curve.png", log, errors, best_return)
    pictures.draw_q_table(run_dir / "q_table.png", q_table, MOVES, START, GOAL)
    result["seconds"] = time.perf_counter() - started
    settings.write_json(run_dir / "result.json", result)
    print(f"{result['seconds']:.1f} s; everything of this run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
