"""Q-learning's two functions, to be written by you. Fill in the bodies, then let them be judged:

    python 1_Q_Learning/exercises.py    # each: not begun, right, or wrong, and how

When both are right, Q_Learning.py trains with them.
"""

import numpy as np

import exercise_checks


def select_action(state: int, Q: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Epsilon-greedy (Sutton & Barto, section 2.2).

    With probability epsilon an action drawn uniformly from all of them, the greedy one included; else the
    greedy one, argmax_a Q(state, a).

    Args:
        state: row of the table.
        Q: float64 [states, actions].
        epsilon: from 0 to 1.
        rng: draws; `rng.random()` and `rng.integers(n)` are all you need.

    Returns:
        The action, a whole number from 0 to actions - 1.
    """
    raise NotImplementedError


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
    """The whole of Q-learning (Sutton & Barto, eq. 6.8). Changes one entry of the table in place.

        Q(S, A) <- Q(S, A) + alpha * (R + gamma * (1 - terminated) * max_a' Q(S', a') - Q(S, A))

    Args:
        Q: float64 [states, actions].
        state, action, reward, next_state: one move.
        terminated: the goal is reached: nothing comes after it, whatever the table says of next_state.
        alpha: step size.
        gamma: discount.
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(select_action, q_update)
