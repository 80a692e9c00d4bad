"""What the learners of folders 2 and 3 come to in worlds whose values are known."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import load, unstack

dqn, cart_pole = load("2_Cart_Pole_DQN", "cart_pole_dqn"), load("2_Cart_Pole_DQN", "cart_pole")
pendulum, environments = load("3_Pendulum", "pendulum"), load("3_Pendulum", "environments")


def training(script, c, rng, rows):
    """One seed's whole training as one traceable function; returns the agent."""
    agent = script.make_agent(c, rng)
    if script is dqn:
        agent = script.fill_buffer(c, rng, agent)
    learn = lambda agent, row: script.learn_and_evaluate(c, rng, agent, row)  # noqa: E731
    return jax.lax.scan(learn, agent, jnp.arange(rows))[0]


def world(kinds, width, start, reward, ends_after=1, truncates=False):
    """A world of `ends_after` steps; the observation is (x, step, 0, ...) with x drawn by `start`.

    Where the world `truncates`, what comes after the cut is the same world again.
    """

    def state_of(obs, steps, earned):
        known = {"physical": obs, "obs": obs, "steps": steps, "episode_return": earned}
        return kinds.EnvState(*(known[name] for name in kinds.EnvState._fields))

    def reset(rng):
        return state_of(jnp.zeros(width).at[0].set(start(rng)), jnp.int32(0), jnp.float32(0))

    def step(state, action):
        ended = state.steps + 1 >= ends_after
        earned, obs = jnp.float32(reward(state, action)), state.obs.at[1].add(0.0 if truncates else 1.0)
        following = state_of(obs, state.steps + 1, state.episode_return + earned)
        kind = ended & (not truncates), ended & truncates
        return following, kinds.Transition(state.obs, action, earned, obs, *kind)

    return reset, step


def one(rng):
    return 1.0


def sign(rng):
    return jax.random.rademacher(rng, ()).astype(jnp.float32)


WORLDS = {  # name: (start, reward, ends_after, truncates), {observation: value}
    "constant reward": ((one, lambda s, a: 1.0), {(1, 0): 1}),
    "value depends on the observation": ((sign, lambda s, a: s.obs[0]), {(1, 0): 1, (-1, 0): -1}),
    "discount": ((one, lambda s, a: s.steps == 2, 3), {(1, 0): 0.25, (1, 1): 0.5, (1, 2): 1}),
    # one more than the usual five: the first world, cut off. Its last observation is worth 2 as well.
    "truncation": ((one, lambda s, a: 1.0, 1, True), {(1, 0): 2}),
}
# ... and two whose reward depends on the action: of two pushes the one of x's sign, of all torques x
ACTIONS = {"reward depends on the action": one, "reward depends on both": sign}


@pytest.fixture(scope="module")
def probed():
    """All worlds as the seeds of one program: by script and name, the agents after training."""

    def train_all(script, kinds, width, reward, arguments):
        c = script.configure(["GAMMA=0.5", "HIDDEN_SIZE=16", "SCALE_OBSERVATIONS=False", *arguments.split()])
        given = [arguments for arguments, _ in WORLDS.values()]
        given += [(start, lambda s, a: reward(s.obs[0], a)) for start in ACTIONS.values()]
        resets, steps = zip(*(world(kinds, width, *arguments) for arguments in given))
        rows = dqn.num_rows(c) if script is dqn else c.NUM_STEPS // c.EVAL_INTERVAL

        def train_in(key, index):
            """The script's own training, in the world of this number."""
            probe = SimpleNamespace(
                reset=lambda rng: jax.lax.switch(index, resets, rng),
                step=lambda *args: jax.lax.switch(index, steps, *args),
                max_episode_steps=1,  # of the quick evaluation, which is not looked at here
                observation_scale=(1.0,) * width,
            )
            with pytest.MonkeyPatch.context() as patch:
                if script is dqn:
                    patch.setattr(cart_pole, "reset", probe.reset)
                    patch.setattr(cart_pole, "step", probe.step)
                    patch.setattr(cart_pole, "MAX_EPISODE_STEPS", 1)
                else:
                    patch.setattr(script, "ENV", probe)
                return training(script, c, key, rows)

        keys = jax.random.split(jax.random.key(0), len(given))
        agents = jax.jit(jax.vmap(train_in))(keys, jnp.arange(len(given)))
        return {name: unstack(agents, i) for i, name in enumerate([*WORLDS, *ACTIONS])}

    return {
        dqn: train_all(dqn, cart_pole, 4, lambda x, a: x * (2.0 * a - 1),
                       "NUM_STEPS=4400 LEARNING_STARTS=400 EVAL_INTERVAL=4000 N_STEPS=2 "
                       "REPLAY_CAPACITY=1000 TARGET_SYNC_INTERVAL=20 TRAIN_INTERVAL=2 BATCH_SIZE=64 "
                       "EPSILON_START=1 EPSILON_END=1 LEARNING_RATE=1e-3 LEARNING_RATE_END=0"),
        pendulum: train_all(pendulum, environments, 3, lambda x, a: -((a - x) ** 2),
                            "NUM_STEPS=12_000 EVAL_INTERVAL=12_000 NUM_ENVS=8 ROLLOUT_STEPS=125 "
                            "GAE_LAMBDA=0.85 NUM_EPOCHS=10 MINIBATCH_SIZE=50 ACTOR_LEARNING_RATE=1e-3 "
                            "CRITIC_LEARNING_RATE=3e-3 LEARNING_RATE_END=0 BETA=0 SIGMA_START=2"),
    }  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_values_of_worlds_that_are_known(probed, name):
    """Adam with a falling rate fits a handful of points to about 1e-3."""
    for (x, t), value in WORLDS[name][1].items():
        q = probed[dqn][name].online(jnp.array([x, t, 0.0, 0.0]))
        np.testing.assert_allclose(q, [value, value], atol=0.02)
        found = pendulum.value(probed[pendulum][name].critic, jnp.array([x, t, 0.0]))
        assert float(found) == pytest.approx(value, abs=0.02)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_in_worlds_that_are_known(probed, name):
    for x in (1, -1) if ACTIONS[name] is sign else (1,):
        q = probed[dqn][name].online(jnp.array([x, 0.0, 0.0, 0.0]))
        np.testing.assert_allclose(q, [-x, x], atol=0.02)
        policy = pendulum.policy(probed[pendulum][name].actor, jnp.array([x, 0.0, 0.0]))
        assert float(policy.loc) == pytest.approx(x, abs=0.15)  # 12 rollouts of noisy torques
        assert float(policy.scale) < 0.7  # from 2
