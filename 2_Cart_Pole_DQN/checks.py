"""Which values the constants of cart_pole_dqn.py may have."""

import math
from typing import Any


def dqn(c: Any) -> list[tuple[str, bool, str]]:
    """Each rule: the constant, whether it is kept, the remedy.

    Written as what is good: a comparison with nan is False, so nan is refused with the rest.
    """
    play = c.NUM_STEPS - c.LEARNING_STARTS
    train, look = max(c.TRAIN_INTERVAL, 1), max(c.EVAL_INTERVAL, 1)  # 0 is refused in a line of its own
    of_train = f"a multiple of TRAIN_INTERVAL={c.TRAIN_INTERVAL}"
    return [
        ("BATCH_SIZE", 1 <= c.BATCH_SIZE <= 10**6, "from 1 to 1000000"),
        ("N_STEPS", 1 <= c.N_STEPS <= 1_000, "from 1 to 1000"),
        ("REPLAY_CAPACITY", c.N_STEPS <= c.REPLAY_CAPACITY <= 10**7, f"from N_STEPS={c.N_STEPS} to 10000000"),
        ("LEARNING_STARTS", c.LEARNING_STARTS >= c.N_STEPS,
         f"N_STEPS={c.N_STEPS} or more, or nothing can be drawn"),
        ("TRAIN_INTERVAL", c.TRAIN_INTERVAL >= 1, "1 or more"),
        ("EVAL_INTERVAL", c.EVAL_INTERVAL >= 1 and c.EVAL_INTERVAL % train == 0, of_train),
        ("NUM_STEPS", c.EVAL_INTERVAL <= play < 10**9 and play % look == 0,
         f"LEARNING_STARTS={c.LEARNING_STARTS} plus a multiple of EVAL_INTERVAL={c.EVAL_INTERVAL}"),
        ("TARGET_SYNC_INTERVAL", c.TARGET_SYNC_INTERVAL >= 1 and c.TARGET_SYNC_INTERVAL % train == 0,
         f"{of_train}; between gradient steps there is nothing to copy"),
        ("GAMMA", 0 <= c.GAMMA < 1, "from 0 to below 1; at 1 the value of balancing for ever is infinite"),
        ("LEARNING_RATE", 0 < c.LEARNING_RATE < math.inf, "above 0 and finite"),
        ("LEARNING_RATE_END", 0 <= c.LEARNING_RATE_END < math.inf, "0 or more and finite"),
        ("HIDDEN_SIZE", 1 <= c.HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("EPSILON_START", 0 <= c.EPSILON_START <= 1, "a probability, from 0 to 1"),
        ("EPSILON_END", 0 <= c.EPSILON_END <= c.EPSILON_START, f"from 0 to EPSILON_START={c.EPSILON_START}"),
        ("DECAY_STEPS", c.DECAY_STEPS >= 1, "1 or more; freeze epsilon by EPSILON_START = EPSILON_END"),
        ("SEED", 0 <= c.SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= c.NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_EPISODES", c.EVAL_EPISODES >= 1, "1 or more"),
    ]  # fmt: skip
