"""What changes during a run, or with an answer's length: the temperature, the weight of the KL, a
penalty. Each is off by default.
"""

import math
from collections.abc import Callable

import numpy as np


def overlong_penalty(limit: int, buffer: int, penalty: float) -> Callable[..., list[float]]:
    """OVERLONG_BUFFER, DAPO's soft length penalty (arXiv 2503.14476, eq. 13), as a reward function.

    0 up to `limit - buffer` tokens, then linear down to `-penalty` at the limit.
    """

    def overlong(prompts, completions, completion_ids, **columns) -> list[float]:
        over = np.array([len(ids) for ids in completion_ids]) - (limit - buffer)  # [B * G], tokens
        return (-penalty * np.maximum(over / buffer, 0)).tolist()

    return overlong


KL_GAIN, KL_ERROR_LIMIT = 0.1, 0.2  # arXiv 1909.08593: beta moves by at most 2 % per step


def adaptive_beta(beta: float, target_kl: float, kl: float) -> float:
    """TARGET_KL: beta after a step whose KL was `kl` (Ziegler et al. 2019, arXiv 1909.08593,
    section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2)        beta <- beta * (1 + 0.1 e)

    A KL that isn't finite (a skipped update) and a target of 0 (off) change nothing.
    """
    if not target_kl or not math.isfinite(kl):
        return beta
    return beta * (1 + KL_GAIN * min(max(kl / target_kl - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT))


def temperature_at(step: int, num_steps: int, first: float, last: float) -> float:
    """Linear from `first` (TEMPERATURE) at step 0 to `last` (TEMPERATURE_END; 0 = constant)."""
    if not last:
        return first
    return first + (last - first) * step / max(1, num_steps - 1)
