"""What the learners of folders 2 and 3 come to in their own worlds."""

import numpy as np
import pytest
from folders import load

dqn, cart_pole = load("2_Cart_Pole_DQN", "cart_pole_dqn"), load("2_Cart_Pole_DQN", "cart_pole")
reinforce, ppo, pendulum = (load("3_Pendulum", name) for name in ("reinforce", "ppo", "pendulum"))
environments = load("3_Pendulum", "environments")


@pytest.mark.parametrize(
    "script, arguments, least",
    [
        # Ten seeds of ten balance for 500 steps, and swing up at -155 (chance: -1,200); the marks leave room
        # for other machines' rounding, and in PPO for fewer steps.
        (dqn, "EVAL_INTERVAL=7000 NUM_STEPS=22_000", cart_pole.SOLVED),
        (reinforce, "EVAL_INTERVAL=20_000 NUM_STEPS=60_000", 475),
        (ppo, "NUM_STEPS=20_000", 200),
        (pendulum, "EVAL_INTERVAL=20_000 NUM_STEPS=60_000", -180),
    ],
    ids=["dqn", "reinforce", "ppo", "pendulum"],
)
def test_two_seeds_learn(script, arguments, least):
    agents, log, _ = script.train(script.configure(["NUM_SEEDS=2", *arguments.split()]))
    if script is dqn:
        returns = cart_pole.evaluate(agents.online, 10)
        # the promise is near the truth at the end: gamma^500 and the network's fit leave a few units of 100
        np.testing.assert_allclose(log.max_q[:, -1], log.discounted_return[:, -1], atol=5)
    else:
        returns = environments.evaluate(script.ENV, script.policy, agents.actor, 10)
        assert script is ppo or (log.explained_variance[:, -1] > 0.9).all()
        assert (log.entropy[:, -1] < log.entropy[:, 0]).all()
    assert (returns.mean(axis=1) >= least).all(), returns
    assert script is not pendulum or (log.kl[:, -1] < 0.05).all()  # what a practitioner reads is healthy
