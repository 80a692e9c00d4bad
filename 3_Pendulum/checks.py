"""Which values the constants of this folder's scripts may have.

Each rule: the constant, whether it is kept, the remedy. Written as what is good: a comparison with nan is
False, so nan is refused with the rest.
"""

import math
from typing import Any

Rule = tuple[str, bool, str]


def common(c: Any) -> list[Rule]:
    """What all three scripts have."""
    look, below = max(c.EVAL_INTERVAL, 1), 10**9  # 0 is refused in a line of its own
    whole_intervals = c.EVAL_INTERVAL <= c.NUM_STEPS < below and c.NUM_STEPS % look == 0
    return [
        ("NUM_ENVS", 1 <= c.NUM_ENVS <= 10**4, "from 1 to 10000"),
        ("GAMMA", 0 <= c.GAMMA <= 1, "from 0 to 1"),
        ("ACTOR_LEARNING_RATE", 0 < c.ACTOR_LEARNING_RATE < math.inf, "above 0 and finite"),
        ("CRITIC_LEARNING_RATE", 0 < c.CRITIC_LEARNING_RATE < math.inf, "above 0 and finite"),
        ("HIDDEN_SIZE", 1 <= c.HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SEED", 0 <= c.SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= c.NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_INTERVAL", c.EVAL_INTERVAL >= 1, "1 or more"),
        ("NUM_STEPS", whole_intervals, f"a multiple of EVAL_INTERVAL={c.EVAL_INTERVAL}, below {below}"),
        ("EVAL_EPISODES", c.EVAL_EPISODES >= 1, "1 or more"),
    ]


def reinforce(c: Any) -> list[Rule]:
    """What reinforce.py's Constants may be."""
    return [
        *common(c),
        ("NUM_ENVS", c.NUM_ENVS >= 2, "2 or more; the mean of one episode is the episode"),
        ("CRITIC_STEPS", 1 <= c.CRITIC_STEPS <= 10**4, "from 1 to 10000"),
        ("MINIBATCH_SIZE", 1 <= c.MINIBATCH_SIZE <= 10**6, "from 1 to 1000000"),
    ]


def ppo(c: Any) -> list[Rule]:
    """What ppo.py's Constants may be."""
    rollout = c.NUM_ENVS * c.ROLLOUT_STEPS
    divides = c.MINIBATCH_SIZE >= 2 and rollout % c.MINIBATCH_SIZE == 0
    whole_rollouts = c.EVAL_INTERVAL % max(rollout, 1) == 0
    return [
        ("ROLLOUT_STEPS", 1 <= c.ROLLOUT_STEPS <= 10**5, "from 1 to 100000"),
        ("MINIBATCH_SIZE", divides, f"2 or more and a divisor of NUM_ENVS * ROLLOUT_STEPS = {rollout}"),
        ("EVAL_INTERVAL", whole_rollouts, f"a multiple of NUM_ENVS * ROLLOUT_STEPS = {rollout}"),
        *common(c),
        ("GAMMA", c.GAMMA < 1, "below 1; at 1 the value of an episode without end is infinite"),
        ("GAE_LAMBDA", 0 <= c.GAE_LAMBDA <= 1, "from 0 to 1"),
        ("NUM_EPOCHS", 1 <= c.NUM_EPOCHS <= 10**4, "from 1 to 10000"),
        ("CLIP_EPSILON", c.CLIP_EPSILON > 0, "above 0; 1e9 switches it off"),
    ]


def pendulum(c: Any) -> list[Rule]:
    """What pendulum.py's Constants may be."""
    return [
        *ppo(c),
        ("LEARNING_RATE_END", 0 <= c.LEARNING_RATE_END <= 1, "a share, from 0 to 1"),
        ("MAX_GRAD_NORM", c.MAX_GRAD_NORM > 0, "above 0; 1e9 switches it off"),
        ("BETA", 0 <= c.BETA < math.inf, "0 or more and finite"),
        ("SIGMA_MIN", 0 < c.SIGMA_MIN < math.inf, "above 0 and finite"),
        ("SIGMA_START", c.SIGMA_MIN < c.SIGMA_START < 1_000, f"above SIGMA_MIN={c.SIGMA_MIN} and below 1000"),
    ]
