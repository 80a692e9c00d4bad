"""Folder 3: a seed trained beside others learns what it learns alone, with clocks of its own."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import flat, load, unstack

reinforce, ppo, pendulum = (load("3_Pendulum", name) for name in ("reinforce", "ppo", "pendulum"))
environments = load("3_Pendulum", "environments")
SMALL = ["HIDDEN_SIZE=4", "NUM_ENVS=2", "EVAL_INTERVAL=40", "NUM_STEPS=80", "NUM_SEEDS=3"]
OF_PPO = ["ROLLOUT_STEPS=20", "MINIBATCH_SIZE=20", "NUM_EPOCHS=2"]


def ends_by_chance(width):
    """A world whose episodes terminate after 3 to 11 steps, drawn at their first state."""

    def reset(rng):
        length = jax.random.randint(rng, (), 3, 12)
        obs = jnp.zeros(width).at[0].set(length / 12)
        return environments.EnvState(length, obs, jnp.int32(0), jnp.float32(0))

    def step(state, action):
        steps, reward = state.steps + 1, jnp.float32(1)
        obs = state.obs.at[1].set(steps / 12)
        after = environments.EnvState(state.physical, obs, steps, state.episode_return + reward)
        ended = steps >= state.physical
        row = environments.Transition(state.obs, action, reward, obs, ended, jnp.bool_(False))
        return after, row

    scale = (1.0,) * width
    return SimpleNamespace(reset=reset, step=step, max_episode_steps=12, observation_scale=scale)


@pytest.mark.parametrize("script", [reinforce, ppo, pendulum], ids=lambda script: script.__name__)
def test_a_seed_beside_others_learns_what_it_learns_alone(script, monkeypatch):
    monkeypatch.setattr(script, "ENV", ends_by_chance(len(script.ENV.observation_scale)))
    words = [*SMALL, *OF_PPO] if script is not reinforce else SMALL
    c = script.settings.read(script.Constants, words)
    agents, log, _ = script.train(c)
    train_row = jax.jit(partial(script.train_row, c))
    clocks = []
    for seed in range(3):
        alone = script.make_agent(c, seed)  # without vmap
        rows = []
        for until in (40, 80):
            alone, row = train_row(alone, until) if script is reinforce else train_row(alone)
            rows.append(row)
        beside = unstack(agents, seed)
        assert (beside.env_step, beside.num_updates) == (alone.env_step, alone.num_updates)
        np.testing.assert_array_equal(*(jax.random.key_data(x.rng) for x in (beside, alone)))
        for network in ("actor", "critic"):
            weights = (flat(getattr(x, network)) for x in (beside, alone))
            # float32: one network or three at once are summed in another order. Adam's first steps
            # have the size of its rate, 1e-2 at most, whatever the gradient's size.
            np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)
        for name, values in log._asdict().items():
            found = [getattr(row, name) for row in rows]
            np.testing.assert_allclose(values[seed], found, rtol=1e-3, atol=1e-4)
        if script is reinforce:  # its episodes end within an update: only the counts are left
            clocks.append((int(alone.env_step), int(log.env_step[seed, 0])))
        else:
            for beside_leaf, leaf in zip(beside.env_state, alone.env_state):
                np.testing.assert_array_equal(beside_leaf, leaf)
            clocks.append(tuple(alone.env_state.steps.tolist()))
    assert len({*clocks}) == 3  # the seeds differ in them
