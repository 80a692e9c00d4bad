"""Which values the constants of this folder's scripts may have.

Each rule: the constant, whether it is kept, the remedy. Written as what is good: a comparison with nan is
False, so nan is refused with the rest.
"""

import math
from typing import Any

Rule = tuple[str, bool, str]


def common(c: Any) -> list[Rule]:
    """What grpo_mnist.py's Constants may be, but for the size of a group."""
    return [
        ("NUM_ITERATIONS", 1 <= c.NUM_ITERATIONS <= 64, "from 1 to 64"),
        ("CLIP_EPSILON", c.CLIP_EPSILON > 0, "above 0; inf switches the clip off"),
        ("CLIP_EPSILON_HIGH", c.CLIP_EPSILON_HIGH > 0, "above 0; inf switches the clip off"),
        ("BETA", 0 <= c.BETA < math.inf, "0 or more, and finite"),
        ("BATCH_SIZE", 1 <= c.BATCH_SIZE <= 10**5, "from 1 to 100000"),
        ("NUM_EPOCHS", 1 <= c.NUM_EPOCHS <= 10**3, "from 1 to 1000"),
        ("LEARNING_RATE", 0 < c.LEARNING_RATE < math.inf, "above 0 and finite"),
        ("WARMUP_FRACTION", 0 <= c.WARMUP_FRACTION < 1, "from 0 to below 1"),
        ("HIDDEN_SIZE", 1 <= c.HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SEED", 0 <= c.SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= c.NUM_SEEDS <= 100, "from 1 to 100"),
        ("LOGS_PER_EPOCH", c.LOGS_PER_EPOCH >= 1, "1 or more"),
    ]


def grpo(c: Any) -> list[Rule]:
    """What grpo_mnist.py's Constants may be."""
    wants = "from 2 to 1024; a group of one is its own mean"
    return [("NUM_GENERATIONS", 2 <= c.NUM_GENERATIONS <= 1024, wants), *common(c)]


def variants(c: Any) -> list[Rule]:
    """What variants.py's Constants may be."""
    fewest = 1 if c.ADVANTAGE == "batch_mean" else 2  # the batch's mean alone needs no group
    divides = c.MICRO_BATCH_SIZE >= 0 and c.BATCH_SIZE % max(c.MICRO_BATCH_SIZE, 1) == 0
    wants = "from 2 (ADVANTAGE=batch_mean: 1) to 1024"
    return [
        ("NUM_GENERATIONS", fewest <= c.NUM_GENERATIONS <= 1024, wants),
        *common(c),
        ("MICRO_BATCH_SIZE", divides, f"0, or a divisor of BATCH_SIZE={c.BATCH_SIZE}"),
    ]
