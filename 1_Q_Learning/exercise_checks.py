"""Behind exercises.py: numbers to try the functions on, the usual mistakes, the training."""

from collections.abc import Callable, Iterator

import numpy as np

import grader
import settings

# %% select_action ---------------------------------------------------------------------------------
VALUES = np.array([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 5.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
DRAWS = 5_000


def look_at_select_action(function: Callable) -> Iterator[tuple[str, np.ndarray]]:
    """How often each action is chosen; a function may draw in any order."""
    for state, epsilon in ((0, 0.0), (2, 0.0), (0, 1.0), (0, 0.4)):
        rng = np.random.default_rng(0)
        actions = [
            function(state, VALUES.copy(), epsilon, rng) for _ in range(DRAWS if epsilon else 10)
        ]
        for action in actions:
            if np.asarray(action).dtype.kind not in "iu" or np.ndim(action) or not 0 <= action < 4:
                raise ValueError(f"it returns {action!r}; an action is a whole number from 0 to 3")
        given = f"Q(s, .) = {VALUES[state]}, epsilon {epsilon}: the share of each action"
        yield given, np.bincount(actions, minlength=4) / len(actions)


def select_action(s, Q, epsilon, rng):
    if rng.random() < epsilon:
        return rng.integers(4)
    return Q[s].argmax()


SELECT_ACTION = grader.Exercise(
    look_at_select_action,
    select_action,
    {
        "epsilon is the probability of the greedy action": "< epsilon => >= epsilon",
        "the action is always greedy: epsilon is not used": "rng.random() < epsilon => False",
        "the action is always random: epsilon is not used": "rng.random() < epsilon => True",
        "a random action is never the greedy one": (
            "rng.integers(4) => rng.choice(np.delete(np.arange(4), Q[s].argmax()))"
        ),
        "the last action is never sampled: integers(n) already leaves n out": (
            "integers(4) => integers(3)"
        ),
        "action 0 is never sampled": "integers(4) => integers(1, 4)",
        "the worst action is taken: argmin instead of argmax": "argmax => argmin",
        "the greedy action is the table's, not the state's": "Q[s].argmax() => Q.argmax() % 4",
    },
    tolerance=0.05,  # a share of 5,000 draws strays by 0.007: two of them, five standard deviations
)

# %% q_update --------------------------------------------------------------------------------------
TABLE = np.array([[1.0, 2.0], [5.0, 3.0], [8.0, 6.0]])


def look_at_q_update(function: Callable) -> Iterator[tuple[str, np.ndarray]]:
    """The whole table after one move, with and without an end."""
    for next_state, terminated in ((1, False), (2, True)):
        Q = TABLE.copy()
        function(Q, 0, 1, -1.0, next_state, terminated, 0.25, 0.9)
        move = f"state 0, action 1, reward -1, next_state {next_state}, terminated {terminated}"
        yield f"Q = {TABLE.tolist()}\n{move}\nalpha 0.25, gamma 0.9: Q afterward", Q


def q_update(Q, s, a, r, s2, end, alpha, gamma):
    future = (1 - end) * Q[s2].max()
    target = r + gamma * future
    Q[s, a] += alpha * (target - Q[s, a])


Q_UPDATE = grader.Exercise(
    look_at_q_update,
    q_update,
    {
        "it bootstraps past the end: (1 - terminated) is missing": "(1 - end) * =>",
        "terminated is inverted: only the last step bootstraps": "(1 - end) => end",
        "the last step loses its reward, too": "= r + => = (1 - end) * r +",
        "gamma is missing": "gamma * =>",
        "gamma discounts the reward, too": "r + gamma * future => gamma * (r + future)",
        "the reward is missing": "= r + => =",
        "the max is missing: the same action is valued in the next state": (
            "Q[s2].max() => Q[s2, a]"
        ),
        "argmax instead of max: that's the number of an action, not its value": (
            ".max() => .argmax()"
        ),
        "the mean over a' is taken instead of the max": ".max() => .mean()",
        "the max is over the row of the state, not of the next state": "Q[s2] => Q[s]",
        "the max is over the whole table": "Q[s2].max() => Q.max()",
        "alpha is missing: the target replaces the old value": "alpha * ( => (",
        "the old value is not subtracted from the target": "- Q[s, a]) => )",
        "at the end the old value is not subtracted": "- Q[s, a]) => - (1 - end) * Q[s, a])",
        "the step replaces the old value: = instead of +=": "+= => =",
        "the sign is wrong: the value moves away from the target": "+= => -=",
        "the entry of the next state is changed": "Q[s, a] += => Q[s2, a] +=",
        "all actions of the state are changed": "Q[s, a] += => Q[s] +=",
        "the table is not changed in place": "Q[s, a] += => Q[s, a] +",
    },
)

EXERCISES = {"select_action": SELECT_ACTION, "q_update": Q_UPDATE}


# %% Main ------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Grades the reader's functions. If all are right, trains with them: exit code 0, else 1."""

    def judge_and_train(arguments: list[str]) -> None:
        grader.run(EXERCISES, functions)
        import Q_Learning as script

        print("\nAll right. Q_Learning.py with your select_action and q_update:")
        script.select_action, script.q_update = functions
        script.main(arguments)

    settings.run(judge_and_train)
