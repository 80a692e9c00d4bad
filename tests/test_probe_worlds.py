"""What the learners of folders 2 and 3 come to in worlds whose values are known."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import load, unstack

dqn, cart_pole = load("2_Cart_Pole_DQN", "cart_pole_dqn"), load("2_Cart_Pole_DQN", "cart_pole")
pendulum, environments = load("3_Pendulum", "pendulum"), load("3_Pendulum", "environments")


def world(kinds, width, reward, ends_after=1, truncates=False):
    """A world of `ends_after` steps; the observation is (x, step, 0, ...), and x is 1 or -1 by
    chance.

    Where the world `truncates`, what comes after the cut is the same world again.
    """

    def state_of(obs, steps, earned):
        known = {"physical": obs, "obs": obs, "steps": steps, "episode_return": earned}
        return kinds.EnvState(*(known[name] for name in kinds.EnvState._fields))

    def reset(rng):
        x = jax.random.rademacher(rng, ()).astype(jnp.float32)
        return state_of(jnp.zeros(width).at[0].set(x), jnp.int32(0), jnp.float32(0))

    def step(state, action):
        ended = state.steps + 1 >= ends_after
        earned = jnp.float32(reward(state, action))
        obs = state.obs.at[1].add(0.0 if truncates else 1.0)
        following = state_of(obs, state.steps + 1, state.episode_return + earned)
        kind = ended & (not truncates), ended & truncates
        return following, kinds.Transition(state.obs, action, earned, obs, *kind)

    return reset, step


WORLDS = {  # name: the arguments of `world`, and what each of its steps is worth, by x
    "value depends on the observation": (dict(reward=lambda s, a: s.obs[0]), lambda x: [x]),
    "discount": (dict(reward=lambda s, a: s.steps == 2, ends_after=3), lambda x: [0.25, 0.5, 1]),
    "truncation": (dict(reward=lambda s, a: 1.0, truncates=True), lambda x: [2]),
}


@pytest.fixture(scope="module")
def probed():
    """All worlds as the seeds of one program: by script and name, the agents after training."""

    def train_all(script, kinds, width, best, arguments):
        """`best` is a reward of x and the action."""
        words = f"GAMMA=0.5 HIDDEN_SIZE=16 SCALE_OBSERVATIONS=False {arguments}".split()
        c = script.settings.read(script.Constants, words)
        given = [
            *(known for known, _ in WORLDS.values()),
            dict(reward=lambda s, a: best(s.obs[0], a)),
        ]
        resets, steps = zip(*(world(kinds, width, **known) for known in given))
        starts = jnp.arange(0, c.NUM_STEPS, c.EVAL_INTERVAL)  # of the log's rows

        def train_in(index):
            """The script's own training, in the world of this number, which is its seed, too."""
            reset = lambda rng: jax.lax.switch(index, resets, rng)  # noqa: E731
            step = lambda *args: jax.lax.switch(index, steps, *args)  # noqa: E731
            with pytest.MonkeyPatch.context() as patch:
                if script is dqn:
                    patch.setattr(cart_pole, "reset", reset)
                    patch.setattr(cart_pole, "step", step)
                    patch.setattr(cart_pole, "MAX_EPISODE_STEPS", 1)  # of the quick evaluation
                    train_row = partial(script.train_row, c)
                else:
                    scale = dict(max_episode_steps=1, observation_scale=(1.0,) * width)
                    patch.setattr(script, "ENV", SimpleNamespace(reset=reset, step=step, **scale))
                    train_row = lambda agent, _: script.train_row(c, agent)  # noqa: E731
                return jax.lax.scan(train_row, script.make_agent(c, index), starts)[0]

        agents = jax.jit(jax.vmap(train_in))(jnp.arange(len(given)))
        return {name: unstack(agents, i) for i, name in enumerate([*WORLDS, "actions"])}

    return {
        dqn: train_all(
            dqn,
            cart_pole,
            4,
            lambda x, a: x * (2.0 * a - 1),
            "NUM_STEPS=4400 LEARNING_STARTS=400 EVAL_INTERVAL=4400 N_STEPS=2 "
            "REPLAY_CAPACITY=1000 TARGET_SYNC_INTERVAL=20 TRAIN_INTERVAL=2 BATCH_SIZE=64 "
            "EPSILON_START=1 EPSILON_END=1 LEARNING_RATE=1e-3 LEARNING_RATE_END=0",
        ),
        pendulum: train_all(
            pendulum,
            environments,
            3,
            lambda x, a: -((a - x) ** 2),
            "NUM_STEPS=12_000 EVAL_INTERVAL=12_000 NUM_ENVS=8 ROLLOUT_STEPS=125 "
            "GAE_LAMBDA=0.85 NUM_EPOCHS=10 MINIBATCH_SIZE=50 ACTOR_LEARNING_RATE=1e-3 "
            "CRITIC_LEARNING_RATE=3e-3 LEARNING_RATE_END=0 BETA=0 SIGMA_START=2",
        ),
    }


@pytest.mark.parametrize("x", [1, -1])
@pytest.mark.parametrize("name", WORLDS)
def test_values_of_worlds_that_are_known(probed, name, x):
    """Adam with a falling rate fits a handful of points to about 1e-3."""
    for t, value in enumerate(WORLDS[name][1](x)):
        q = probed[dqn][name].online(jnp.array([x, t, 0.0, 0.0]))
        np.testing.assert_allclose(q, [value, value], atol=0.02)
        found = pendulum.value(probed[pendulum][name].critic, jnp.array([x, t, 0.0]))
        assert float(found) == pytest.approx(value, abs=0.02)


@pytest.mark.parametrize("x", [1, -1])
def test_actions_in_a_world_that_rewards_one_of_xs_sign(probed, x):
    q = probed[dqn]["actions"].online(jnp.array([x, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(q, [-x, x], atol=0.02)
    policy = pendulum.policy(probed[pendulum]["actions"].actor, jnp.array([x, 0.0, 0.0]))
    assert float(policy.loc) == pytest.approx(x, abs=0.15)  # 12 rollouts of noisy torques
    assert float(policy.scale) < 0.7  # from 2
