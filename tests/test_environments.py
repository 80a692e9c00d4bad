"""CartPole and Pendulum of folders 2 and 3 against Gymnasium's own, and what is learned in them."""

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import SAME_STATE, load, unstack

dqn, cart_pole = load("2_Cart_Pole_DQN", "cart_pole_dqn"), load("2_Cart_Pole_DQN", "cart_pole")
reinforce, ppo, pendulum = (load("3_Pendulum", name) for name in ("reinforce", "ppo", "pendulum"))
environments = load("3_Pendulum", "environments")
IDS = {cart_pole: "CartPole-v1", ppo: "CartPole-v1", pendulum: "Pendulum-v1"}
each_world = pytest.mark.parametrize("script", IDS, ids=lambda script: script.__name__)


def world_of(script):
    return script if script is cart_pole else script.ENV


def state_of(script, physical, steps):
    """An episode in progress."""
    if script is cart_pole:
        return cart_pole.EnvState(physical, steps, jnp.float32(0))
    obs = script.ENV.functional.observation(physical, None, script.ENV.params)
    return environments.EnvState(physical, obs, steps, jnp.float32(0))


def actors_of(script, count):
    """Untrained, each leaf [count, ...]; and what one of them does when it sees observations."""
    keys = jax.random.split(jax.random.key(0), count)
    if script is cart_pole:
        make = partial(dqn.QNetwork, dqn.Constants(HIDDEN_SIZE=64))
        act = lambda actor, obs: actor(obs).argmax(-1)  # noqa: E731
    else:
        make = lambda key: script.make_networks(script.Constants(HIDDEN_SIZE=64), key, key)[0]  # noqa: E731
        act = lambda actor, obs: script.policy(actor, obs).mode()  # noqa: E731
    return jax.jit(jax.vmap(make))(keys), jax.jit(act)


def play(env, actor, act, obs):
    """The rewards of an episode that has begun."""
    rewards, ended = [], False
    while not ended:
        action = np.asarray(act(actor, jnp.asarray(obs)))
        obs, reward, terminated, truncated, _ = env.step(
            action[None] if "Pend" in env.spec.id else action
        )
        rewards.append(reward)
        ended = terminated or truncated
    return rewards


@each_world
def test_each_step_equals_gymnasiums(script):
    """Random pushes, and torques far beyond the limits; the first pole stays up for 500 steps."""
    rng, env = np.random.default_rng(0), gymnasium.make(IDS[script])
    rows = []
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        ended, steps = False, 0
        while not ended:
            before, action = env.unwrapped.state, int(rng.integers(2))
            if script is pendulum:
                action = np.float32([rng.normal(scale=2.5)])
            elif seed == 0:
                action = int(0.1 * obs[0] + 0.3 * obs[1] + 4 * obs[2] + obs[3] > 0)
            obs, reward, terminated, truncated, _ = env.step(action)
            rows.append((before, steps, action, obs, reward, terminated, truncated))
            ended, steps = terminated or truncated, steps + 1
    before, steps, action, obs, reward, terminated, truncated = map(np.array, zip(*rows))
    assert truncated.any() and terminated.any() == (script is not pendulum)
    states = jax.vmap(partial(state_of, script))(before.astype(np.float32), steps)
    actions = jnp.asarray(action.reshape(len(steps)))
    following, found = jax.jit(jax.vmap(world_of(script).step))(states, actions)
    # Gymnasium computes in float64 and lets angles run to 30 rad: float32 keeps 2e-6 of that, and a
    # reward goes up to 16 and depends on the square of the angle.
    np.testing.assert_allclose(found.next_obs, obs, atol=1e-5)
    np.testing.assert_allclose(found.reward, reward, atol=1e-4)
    np.testing.assert_allclose(following.episode_return, found.reward, **SAME_STATE)
    np.testing.assert_array_equal(found.terminated, terminated)
    np.testing.assert_array_equal(found.truncated, truncated)


@each_world
def test_first_states_are_drawn_uniformly_within_gymnasiums_limits(script):
    high = np.array([np.pi, 1.0] if script is pendulum else [0.05] * 4)
    found = jax.vmap(world_of(script).reset)(jax.random.split(jax.random.key(0), 20_000))
    share = np.asarray(found.obs if script is cart_pole else found.physical) / high
    assert (np.abs(share) <= 1 + 1e-6).all()
    # tenths of a uniform distribution; 5 standard errors of a quantile of 20,000 draws are 0.036 of
    # width 2
    tenths = np.quantile(share, np.linspace(0, 1, 11), axis=0).T
    np.testing.assert_allclose(tenths, [np.linspace(-1, 1, 11)] * len(high), atol=0.036)


@each_world
def test_quick_evaluate_plays_greedily_to_the_end(script):
    """The same episodes played in Gymnasium from the same first states."""
    (actors, act), rng, env = actors_of(script, 1), jax.random.key(0), gymnasium.make(IDS[script])
    actor, episodes = unstack(actors), []
    states = jax.vmap(world_of(script).reset)(
        jax.random.split(rng, environments.QUICK_EVAL_EPISODES)
    )
    starts = np.asarray(states.obs if script is cart_pole else states.physical, np.float64)
    assert len(np.unique(starts, axis=0)) == len(starts)  # each from a key of its own
    for start, obs in zip(starts, states.obs):
        env.reset()
        env.unwrapped.state = start
        episodes.append(play(env, actor, act, obs))
    mean = np.mean([sum(rewards) for rewards in episodes])
    if script is cart_pole:
        found, max_q, discounted = cart_pole.quick_evaluate(actor, rng, 0.99)
        assert float(max_q) == pytest.approx(float(actor(states.obs).max(axis=-1).mean()), rel=1e-5)
        by_hand = np.mean(
            [sum(0.99**t * reward for t, reward in enumerate(rewards)) for rewards in episodes]
        )
        assert float(discounted) == pytest.approx(by_hand, rel=1e-5)
    else:
        found = environments.quick_evaluate(script.ENV, script.policy, actor)
    assert float(found) == pytest.approx(mean, rel=1e-3)  # float32 against float64 over 200 steps


@each_world
def test_evaluate_plays_gymnasiums_episodes(script, monkeypatch):
    """With a time limit that some of them reach: what is played after either end does not count."""
    actors, act = actors_of(script, 3)
    monkeypatch.setattr(gymnasium, "make_vec", partial(gymnasium.make_vec, max_episode_steps=20))
    if script is cart_pole:
        returns = cart_pole.evaluate(actors, 4)
    else:
        returns = environments.evaluate(script.ENV, script.policy, actors, 4)
    by_hand = np.zeros((3, 4))
    for s, e in np.ndindex(3, 4):
        env = gymnasium.make(IDS[script], max_episode_steps=20)
        by_hand[s, e] = sum(play(env, unstack(actors, s), act, env.reset(seed=e)[0]))
    # one network or three at once round differently
    np.testing.assert_allclose(returns, by_hand, rtol=1e-3)
    assert script is pendulum or returns.min() < 20 == returns.max()


@pytest.mark.parametrize(
    "script, arguments, least",
    [
        # Ten seeds of ten balance for 500 steps, and swing up at -155 (chance: -1,200); the marks
        # leave room for other machines' rounding.
        (dqn, "LEARNING_STARTS=1000 EVAL_INTERVAL=25_000 NUM_STEPS=50_000", cart_pole.SOLVED),
        (pendulum, "EVAL_INTERVAL=20_000 NUM_STEPS=60_000 NUM_ENVS=8 ROLLOUT_STEPS=125", -180),
    ],
    ids=["dqn", "pendulum"],
)
def test_a_seed_learns(script, arguments, least):
    agents, log, _ = script.train(
        script.settings.read(script.Constants, ["NUM_SEEDS=1", *arguments.split()])
    )
    if script is dqn:
        returns = cart_pole.evaluate(agents.online, 10)
        # the promise is near the truth at the end: gamma^500 and the network's fit leave a few
        # units of 100
        np.testing.assert_allclose(log.max_q[:, -1], log.discounted_return[:, -1], atol=5)
    else:
        returns = environments.evaluate(script.ENV, script.policy, agents.actor, 10)
        assert (log.explained_variance[:, -1] > 0.9).all()
        assert (log.entropy[:, -1] < log.entropy[:, 0]).all()
        assert (log.kl[:, -1] < 0.05).all()  # what a practitioner reads is healthy
    assert (returns.mean(axis=1) >= least).all(), returns
