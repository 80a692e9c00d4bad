"""Which values the constants of this folder's scripts may have."""

import math
from typing import Any


def q_learning(c: Any) -> list[tuple[str, bool, str]]:
    """Each rule: the constant, whether it is kept, the remedy.

    Written as what is good: a comparison with nan is False, so nan is refused with the rest.
    """
    shortest = 2 * (c.SIZE - 1)
    return [
        ("SIZE", 2 <= c.SIZE <= 100, "from 2 to 100"),
        ("ALPHA", 0 < c.ALPHA <= 1, "above 0 and at most 1; 0 learns nothing, above 1 overshoots"),
        ("GAMMA", 0 < c.GAMMA <= 1, "above 0 and at most 1; at 0 only the last move counts"),
        ("NUM_EPISODES", 1 <= c.NUM_EPISODES <= 10**7, "from 1 to 10000000"),
        ("MAX_STEPS_PER_EPISODE", shortest <= c.MAX_STEPS_PER_EPISODE <= 10**5,
         f"from {shortest} (shortest way) to 100000"),
        ("EPSILON_START", 0 <= c.EPSILON_START <= 1, "a probability, from 0 to 1"),
        ("EPSILON_END", 0 <= c.EPSILON_END <= c.EPSILON_START, f"from 0 to EPSILON_START={c.EPSILON_START}"),
        ("DECAY_EPISODES", c.DECAY_EPISODES >= 1, "1 or more; freeze epsilon by EPSILON_START = EPSILON_END"),
        ("GOAL_REWARD", 0 < c.GOAL_REWARD < math.inf, "above 0 and finite; else nothing attracts the agent"),
        ("STEP_REWARD", -math.inf < c.STEP_REWARD < 0, "below 0 and finite; else no way has to be short"),
        ("SEED", c.SEED >= 0, "0 or more"),
        ("LOG_EVERY", c.LOG_EVERY >= 1, "1 or more"),
        ("PRINT_EVERY", c.PRINT_EVERY >= 0, "0 (no lines) or more"),
        ("NUM_SEEDS", getattr(c, "NUM_SEEDS", 1) >= 1, "1 or more"),  # of study.py
    ]  # fmt: skip
