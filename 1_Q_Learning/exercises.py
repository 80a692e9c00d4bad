"""Write Q-learning's two functions yourself. Fill in the bodies, then run the checker:

    python 1_Q_Learning/exercises.py    # each: not begun, right, or wrong, and how

When both are right, Q_Learning.py trains with them.
"""

import numpy as np

import exercise_checks


def select_action(state: int, Q: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Epsilon-greedy (Sutton & Barto, section 2.2): an action, an integer from 0 to actions - 1.

    With probability epsilon it's sampled uniformly from all of them, the greedy one included; else
    it's the greedy one, argmax_a Q(state, a). Q is float64 [states, actions]; `rng.random()` and
    `rng.integers(n)` are all you need.
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

    Q is float64 [states, actions]. If the episode has terminated, nothing comes after it, whatever
    Q says about next_state.
    """
    raise NotImplementedError


if __name__ == "__main__":
    exercise_checks.main(select_action, q_update)
