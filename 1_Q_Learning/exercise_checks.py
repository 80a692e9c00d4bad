"""What belongs to exercises.py: numbers to try the functions on, the usual mistakes, the training."""

import sys
from collections.abc import Callable

import numpy as np

import grader
import settings
from grader import Exercise

# %% select_action --------------------------------------------------------------------------------------
VALUES = np.array([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 5.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
DRAWS = 5_000


def look_at_select_action(function: Callable) -> dict[str, np.ndarray]:
    """How often each action is chosen; a function may draw in any order."""
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


def select_action(
    s, Q, epsilon, rng,
    explores=lambda rng, epsilon: rng.random() < epsilon,
    draw=lambda rng, q: rng.integers(4),
    greedy=lambda Q, s: Q[s].argmax(),
):  # fmt: skip
    return draw(rng, Q[s]) if explores(rng, epsilon) else greedy(Q, s)


SELECT_ACTION = Exercise(
    look_at_select_action,
    select_action,
    {
        "epsilon is the probability of the greedy action": dict(explores=lambda rng, e: rng.random() >= e),
        "the action is always greedy: epsilon is not used": dict(explores=lambda rng, e: False),
        "the action is always drawn: epsilon is not used": dict(explores=lambda rng, e: True),
        "the random action is never the greedy one": dict(
            draw=lambda rng, q: rng.choice(np.delete(np.arange(4), q.argmax()))
        ),
        "the last action is never drawn: integers(n) already leaves n out": dict(
            draw=lambda rng, q: rng.integers(3)
        ),
        "action 0 is never drawn": dict(draw=lambda rng, q: rng.integers(1, 4)),
        "the worst action is taken for the greedy one, argmin for argmax": dict(
            greedy=lambda Q, s: Q[s].argmin()
        ),
        "the greedy action is that of the whole table, not of the state's row": dict(
            greedy=lambda Q, s: Q.argmax() % 4
        ),
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


def q_update(
    Q, s, a, r, s2, end, alpha, gamma,
    future=lambda Q, s, a, s2: Q[s2].max(),
    goes_on=lambda end: 1 - end,
    target=lambda r, gamma, future, end: r + gamma * future,
    value=lambda old, alpha, y, end: old + alpha * (y - old),
    place=lambda s, a, s2: (s, a),
):  # fmt: skip
    y = target(r, gamma, goes_on(end) * future(Q, s, a, s2), end)
    step = value(Q[s, a], alpha, y, end) - Q[s, a]
    Q[place(s, a, s2)] += step


Q_UPDATE = Exercise(
    look_at_q_update,
    q_update,
    returns=False,
    mistakes={
        "it bootstraps past the end: (1 - terminated) is missing": dict(goes_on=lambda end: 1),
        "terminated is upside down: only the end bootstraps": dict(goes_on=lambda end: end),
        "the end takes the reward away, too": dict(target=lambda r, g, f, end: (1 - end) * (r + g * f)),
        "gamma is missing": dict(target=lambda r, g, f, end: r + f),
        "gamma discounts the reward, too": dict(target=lambda r, g, f, end: g * (r + f)),
        "the reward is missing": dict(target=lambda r, g, f, end: g * f),
        "the max is missing: the same action is valued in the next state": dict(
            future=lambda Q, s, a, s2: Q[s2, a]
        ),
        "argmax stands where max belongs: a number of an action, not its value": dict(
            future=lambda Q, s, a, s2: Q[s2].argmax()
        ),
        "the mean over a' stands where the max belongs": dict(future=lambda Q, s, a, s2: Q[s2].mean()),
        "the max is over the row of the state, not of the next state": dict(
            future=lambda Q, s, a, s2: Q[s].max()
        ),
        "the max is over the whole table": dict(future=lambda Q, s, a, s2: Q.max()),
        "alpha is missing: the target replaces the old value": dict(value=lambda old, alpha, y, end: y),
        "the old value is not subtracted from the target": dict(
            value=lambda old, alpha, y, end: old + alpha * y
        ),
        "at the end the old value is not subtracted": dict(
            value=lambda old, alpha, y, end: old + alpha * (y - (1 - end) * old)
        ),
        "the step replaces the old value, = for +=": dict(value=lambda old, alpha, y, end: alpha * (y - old)),
        "the sign is wrong: the value moves away from the target": dict(
            value=lambda old, alpha, y, end: old - alpha * (y - old)
        ),
        "the entry of the next state is changed": dict(place=lambda s, a, s2: (s2, a)),
        "all actions of the state are changed": dict(place=lambda s, a, s2: s),
        "the table is not changed in place": lambda *_: None,
    },
)

EXERCISES = {"select_action": SELECT_ACTION, "q_update": Q_UPDATE}


# %% Main -----------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Judges the reader's functions. If all are right, trains with them: exit code 0, else 1."""
    if not grader.run(EXERCISES, functions):
        sys.exit(1)
    import Q_Learning

    print("\nAll right. Q_Learning.py with your select_action and q_update:")
    Q_Learning.select_action, Q_Learning.q_update = functions
    settings.run(Q_Learning.main)
