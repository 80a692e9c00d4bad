"""What stands beside exercises.py: numbers to try the functions on, and the usual mistakes."""

import sys
from collections.abc import Callable, Sequence

import numpy as np

import grader
import settings
from grader import Exercise

# %% select_action --------------------------------------------------------------------------------------
VALUES = np.array([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 5.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
DRAWS = 5_000


def look_at_select_action(function: Callable) -> dict[str, np.ndarray]:
    """How often each action is chosen: in which order the function draws is its own business."""
    found = {}
    for state, epsilon in ((0, 0.0), (2, 0.0), (0, 1.0), (0, 0.4)):
        rng = np.random.default_rng(0)
        actions = [function(state, VALUES.copy(), epsilon, rng) for _ in range(DRAWS if epsilon else 10)]
        for action in actions:
            if grader.numbers(action).dtype.kind not in "iu" or np.ndim(action) or not 0 <= action < 4:
                raise grader.Unusable(f"it returns {action!r}; an action is a whole number from 0 to 3")
        given = f"Q(s, .) = {VALUES[state]}, epsilon {epsilon}: the share of each action"
        found[given] = np.bincount(actions, minlength=4) / len(actions)
    return found


def epsilon_greedy(draw: Callable | None = None, greedy: Callable | None = None) -> Callable:
    """The right function, or with another way to draw from (rng, Q(s, .)), to be greedy with (Q, s)."""

    def select_action(state, Q, epsilon, rng):
        if rng.random() < epsilon:
            return draw(rng, Q[state]) if draw else rng.integers(4)
        return greedy(Q, state) if greedy else Q[state].argmax()

    return select_action


RIGHT_ACTION = epsilon_greedy()

SELECT_ACTION = Exercise(
    look_at_select_action,
    RIGHT_ACTION,
    {
        "epsilon is the probability of the greedy action": (
            lambda s, Q, epsilon, rng: RIGHT_ACTION(s, Q, 1 - epsilon, rng)
        ),
        "the random action is never the greedy one": epsilon_greedy(
            lambda rng, q: rng.choice(np.delete(np.arange(4), q.argmax()))
        ),
        "the last action is never drawn: integers(n) already leaves n out": epsilon_greedy(
            lambda rng, q: rng.integers(3)
        ),
        "action 0 is never drawn": epsilon_greedy(lambda rng, q: rng.integers(1, 4)),
        "the worst action is taken for the greedy one, argmin for argmax": epsilon_greedy(
            greedy=lambda Q, s: Q[s].argmin()
        ),
        "the greedy action is that of the whole table, not of the state's row": epsilon_greedy(
            greedy=lambda Q, s: Q.argmax() % 4
        ),
        "the action is always greedy: epsilon is not used": lambda s, Q, epsilon, rng: Q[s].argmax(),
        "the action is always drawn: epsilon is not used": lambda s, Q, epsilon, rng: rng.integers(4),
    },
    tolerance=0.05,  # a share of 5,000 draws strays by 0.007: two of them, five standard deviations
)

# %% q_update -------------------------------------------------------------------------------------------
TABLE = np.array([[1.0, 2.0], [5.0, 3.0], [8.0, 6.0]])


def look_at_q_update(function: Callable) -> dict[str, np.ndarray]:
    """The whole table after one move, with and without an end."""
    found = {}
    for next_state, terminated in ((1, False), (2, True)):
        Q = TABLE.copy()
        function(Q, 0, 1, -1.0, next_state, terminated, 0.5, 0.9)
        move = f"state 0, action 1, reward -1, next_state {next_state}, terminated {terminated}"
        found[f"Q = {TABLE.tolist()}\n{move}\nalpha 0.5, gamma 0.9: Q afterwards"] = Q
    return found


def update_towards(target: Callable) -> Callable:
    """The right update with another target(Q, s, a, r, s2, terminated, gamma)."""

    def q_update(Q, s, a, r, s2, terminated, alpha, gamma):
        Q[s, a] += alpha * (target(Q, s, a, r, s2, terminated, gamma) - Q[s, a])

    return q_update


def td_target(Q, s, a, r, s2, terminated, gamma):
    return r + gamma * (1 - terminated) * Q[s2].max()


def update_by(change: Callable) -> Callable:
    """The right target with another change(Q, s, a, s2, td_target, alpha) of the table."""

    def q_update(Q, s, a, r, s2, terminated, alpha, gamma):
        change(Q, s, a, s2, td_target(Q, s, a, r, s2, terminated, gamma), alpha)

    return q_update


def replace(Q, place, value):
    Q[place] = value


def add(Q, place, value):
    Q[place] += value


Q_UPDATE = Exercise(
    look_at_q_update,
    update_towards(td_target),
    returns=False,
    mistakes={
        "it bootstraps past the end: (1 - terminated) is missing": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * Q[s2].max()
        ),
        "terminated is upside down: only the end bootstraps": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * end * Q[s2].max()
        ),
        "the end takes the reward away, too": update_towards(
            lambda Q, s, a, r, s2, end, gamma: (1 - end) * (r + gamma * Q[s2].max())
        ),
        "gamma is missing": update_towards(lambda Q, s, a, r, s2, end, gamma: r + (1 - end) * Q[s2].max()),
        "gamma discounts the reward, too": update_towards(
            lambda Q, s, a, r, s2, end, gamma: gamma * (r + (1 - end) * Q[s2].max())
        ),
        "the reward is missing": update_towards(
            lambda Q, s, a, r, s2, end, gamma: gamma * (1 - end) * Q[s2].max()
        ),
        "the max is missing: the same action is valued in the next state": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * (1 - end) * Q[s2, a]
        ),
        "argmax stands where max belongs: a number of an action, not its value": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * (1 - end) * Q[s2].argmax()
        ),
        "the mean over a' stands where the max belongs": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * (1 - end) * Q[s2].mean()
        ),
        "the max is over the row of the state, not of the next state": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * (1 - end) * Q[s].max()
        ),
        "the max is over the whole table": update_towards(
            lambda Q, s, a, r, s2, end, gamma: r + gamma * (1 - end) * Q.max()
        ),
        "alpha is missing: the target replaces the old value": update_by(
            lambda Q, s, a, s2, y, alpha: replace(Q, (s, a), y)
        ),
        "the old value is not subtracted from the target": update_by(
            lambda Q, s, a, s2, y, alpha: add(Q, (s, a), alpha * y)
        ),
        "at the end the old value is not subtracted": lambda Q, s, a, r, s2, end, alpha, gamma: add(
            Q, (s, a), alpha * (td_target(Q, s, a, r, s2, end, gamma) - (1 - end) * Q[s, a])
        ),
        "the step replaces the old value, = for +=": update_by(
            lambda Q, s, a, s2, y, alpha: replace(Q, (s, a), alpha * (y - Q[s, a]))
        ),
        "the sign is wrong: the value moves away from the target": update_by(
            lambda Q, s, a, s2, y, alpha: add(Q, (s, a), -alpha * (y - Q[s, a]))
        ),
        "the entry of the next state is changed": update_by(
            lambda Q, s, a, s2, y, alpha: add(Q, (s2, a), alpha * (y - Q[s, a]))
        ),
        "all actions of the state are changed": update_by(
            lambda Q, s, a, s2, y, alpha: add(Q, s, alpha * (y - Q[s, a]))
        ),
        "the table is not changed in place": update_by(lambda Q, s, a, s2, y, alpha: None),
    },
)

EXERCISES = {"select_action": SELECT_ACTION, "q_update": Q_UPDATE}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    settings.run(lambda arguments: train(functions, arguments))


def train(functions: Sequence[Callable], arguments: list[str]) -> None:
    """Q_Learning.py as it is, but for the functions that the reader wrote."""
    import Q_Learning

    print("\nAll right. Q_Learning.py with your select_action and q_update:")
    Q_Learning.select_action, Q_Learning.q_update = functions
    Q_Learning.main(arguments)
