"""The environment of folder 1, a square of states, and its optimum, which the agent never sees.

With SIZE=4:
     0  1  2  3
     4  5  6  7      start 0, goal 15
     8  9 10 11
    12 13 14 15
"""

from typing import Any

import numpy as np

START = 0
ACTIONS = ["up", "down", "left", "right"]
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]  # (rows, columns), in the order of ACTIONS
# Of value iteration, at most. A sweep multiplies what's wrong by GAMMA or less: 0.99^5000 = 1e-22.
SWEEPS = 5_000


def step(c: Any, state: int, action: int) -> tuple[int, float, bool]:
    """One move from a state, 0 to SIZE^2 - 1 but for the goal: next_state, reward, terminated (at
    the goal).

    A wall keeps the agent where it is, and the move still costs STEP_REWARD. The move that reaches
    the goal earns GOAL_REWARD only; STEP_REWARD is not added to it.
    """
    row, column = divmod(state, c.SIZE)
    rows, columns = MOVES[action]
    row = min(max(row + rows, 0), c.SIZE - 1)
    column = min(max(column + columns, 0), c.SIZE - 1)
    terminated = row == column == c.SIZE - 1
    return row * c.SIZE + column, c.GOAL_REWARD if terminated else c.STEP_REWARD, terminated


def value_iteration(c: Any) -> np.ndarray:
    """The optimal action values [SIZE^2, 4], computed from the grid's rules; the goal's row is 0.

    Sweeps over all pairs with the Bellman optimality equation (Sutton & Barto, eq. 3.20) until no
    value changes. Prints a line if they still change after SWEEPS sweeps.
    """
    q_star = np.zeros((c.SIZE**2, len(ACTIONS)))
    for _ in range(SWEEPS):
        previous = q_star.copy()
        for state, action in np.ndindex(len(q_star) - 1, len(ACTIONS)):  # all but the goal
            next_state, reward, terminated = step(c, state, action)
            # q*(s, a) = r + gamma * max_a' q*(s', a')
            q_star[state, action] = reward + c.GAMMA * (1 - terminated) * previous[next_state].max()
        change = np.abs(q_star - previous).max()
        if change <= 1e-12:
            return q_star
    print(
        f"\nThe optimum is unknown: value_iteration still changes after {SWEEPS:,} sweeps. "
        "If `step` is random now, let value_iteration average over its outcomes."
    )
    return q_star


def greedy_moves(c: Any, Q: np.ndarray, state: int) -> int | None:
    """The number of moves from a state to the goal by the greedy policy, or None if it never gets
    there.
    """
    goal = len(Q) - 1
    for moves in range(len(Q)):  # a way that visits no state twice is shorter than this
        if state == goal:
            return moves
        state, _, _ = step(c, state, int(Q[state].argmax()))
    return None


def optimal_from_every_state(c: Any, Q: np.ndarray) -> bool:
    """Whether the greedy policy takes the shortest way from every state, also from those it never
    visits.
    """
    # a step to the right or down is one nearer to the goal, and leads to a larger number
    return all(step(c, state, int(Q[state].argmax()))[0] > state for state in range(len(Q) - 1))
