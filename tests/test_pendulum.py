"""Folder 3, PPO: the environment against Gymnasium, GAE and losses by hand, against rlax and TFP, learning on
worlds whose values are known, and the script as a reader runs it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from folders import load, training
from tensorflow_probability.substrates.jax import distributions as tfd

ppo = load("3_Pendulum", "pendulum")
environments = load("3_Pendulum", "environments")
ENV, C = ppo.ENV, ppo.Constants()


def actor_of(c=C, seed=0):
    return ppo.make_networks(c, *[jax.random.key(seed)] * 2)[0]


def critic_of(c=C, seed=0):
    return ppo.make_networks(c, *[jax.random.key(seed)] * 2)[1]


act = jax.jit(lambda actor, obs: ppo.policy(actor, obs).mean())


def unstack(tree, index=0):
    return jax.tree.map(lambda x: x[index], tree)


def params(network):
    return jax.tree.leaves(nnx.state(network, nnx.Param))


# --- the environment


def test_each_step_equals_pendulum_v1():
    """200 episodes with torques far beyond the limits: states, observations, rewards and ends."""
    rng, env = np.random.default_rng(0), gymnasium.make("Pendulum-v1")
    before, actions, after, observations, rewards, truncations = [], [], [], [], [], []
    for seed in range(200):
        env.reset(seed=seed)
        truncated = False
        while not truncated:
            before.append(env.unwrapped.state)
            actions.append(np.float32(rng.normal(scale=2.5)))
            obs, reward, terminated, truncated, _ = env.step(actions[-1:])
            assert not terminated
            after.append(env.unwrapped.state)
            observations.append(obs)
            rewards.append(reward)
            truncations.append(truncated)
    actions = np.array(actions)
    assert (np.abs(actions) > 2).mean() > 0.3
    steps = np.tile(np.arange(200), 200)
    physical = np.array(before, np.float32)
    obs = jax.vmap(lambda p: ENV.functional.observation(p, None, ENV.params))(physical)
    state = environments.EnvState(physical, obs, steps, np.zeros(len(steps), np.float32))
    following, transition = jax.jit(jax.vmap(ENV.step))(state, actions)
    # Gymnasium computes in float64 and lets the angle run to 30 rad and more: float32 keeps 2e-6 of that.
    np.testing.assert_allclose(following.physical, after, atol=1e-5)
    np.testing.assert_allclose(transition.next_obs, observations, atol=1e-5)
    # A reward goes up to 16 and depends on the square of an angle of up to pi: 1e-5 of an angle is 6e-5 here.
    # At the hanging point rounding may pick the other side of the circle, where the square is the same.
    np.testing.assert_allclose(transition.reward, rewards, atol=1e-4)
    np.testing.assert_array_equal(transition.truncated, truncations)
    assert not transition.terminated.any()


def test_first_states_are_drawn_like_those_of_pendulum_v1():
    ours = np.asarray(jax.vmap(ENV.reset)(jax.random.split(jax.random.key(0), 20_000)).physical)
    low, high = np.array([-np.pi, -1.0]), np.array([np.pi, 1.0])
    assert (ours >= low).all() and (ours <= high).all()
    # uniform: mean 0 and standard deviation high / sqrt(3), 5 standard errors of 20,000 draws
    np.testing.assert_allclose(ours.mean(axis=0) / high, 0, atol=5 / np.sqrt(3 * 20_000))
    np.testing.assert_allclose(ours.std(axis=0) / high, 1 / np.sqrt(3), atol=0.012)
    env = gymnasium.make("Pendulum-v1")
    theirs = []
    for seed in range(2_000):
        env.reset(seed=seed)
        theirs.append(env.unwrapped.state)
    # the same quantiles; 5 standard errors of a quantile of 2,000 uniform draws are 0.056 of the width 2
    q = np.linspace(0.1, 0.9, 9)
    np.testing.assert_allclose(
        np.quantile(ours / high, q, axis=0), np.quantile(theirs / high, q, axis=0), atol=0.12
    )


# --- the two locks


def batch_of(actor, seed=0, size=64, moved=0.0):
    """A batch as `actor` would have drawn it, had its mean been lower by `moved`."""
    rng = np.random.default_rng(seed)
    obs = jnp.array(rng.normal(size=(size, 3)), jnp.float32)
    now = ppo.policy(actor, obs)
    old = tfd.Normal(now.loc - moved, now.scale * (1 + moved))
    action = old.sample(seed=jax.random.key(seed))
    advantage, returns = jnp.array(rng.normal([[1.0], [5.0]], 1.0, (2, size)), jnp.float32)
    return ppo.Batch(obs, action, old.log_prob(action), old.loc, old.scale, advantage, returns)


@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("normalize", [True, False])
def test_policy_loss_by_hand(beta, normalize):
    """NumPy in float64, the normal's density and the KL of two normals written out."""
    c = ppo.configure([f"NORMALIZE_ADVANTAGES={normalize}", f"BETA={beta}"])
    actor = actor_of(seed=0)
    batch = batch_of(actor, moved=0.3)
    policy = ppo.policy(actor, batch.obs)
    mean, sigma = np.asarray(policy.loc, np.float64), np.asarray(policy.scale, np.float64)
    action, old_mean, old_sigma, advantage = (
        np.asarray(x, np.float64) for x in (batch.action, batch.mean, batch.sigma, batch.advantage)
    )

    def log_density(m, s):
        return -0.5 * ((action - m) / s) ** 2 - np.log(s) - 0.5 * np.log(2 * np.pi)

    ratio = np.exp(log_density(mean, sigma) - log_density(old_mean, old_sigma))
    assert (ratio > 1.2).any() and (ratio < 0.8).any() and ((ratio > 0.9) & (ratio < 1.1)).any()
    if normalize:
        advantage = (advantage - advantage.mean()) / advantage.std()
    kl = np.log(sigma / old_sigma) + (old_sigma**2 + (old_mean - mean) ** 2) / (2 * sigma**2) - 0.5
    gain = np.where(advantage > 0, np.minimum(ratio, 1.2) * advantage, np.maximum(ratio, 0.8) * advantage)
    expected = -(gain - beta * kl).mean()
    # log-probs of size about 5 in float32, so ratios to about 1e-6, in a mean of 64
    assert float(ppo.actor_loss(c, actor, batch)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_kl_is_of_old_against_new():
    """The order matters: the two directions differ by a quarter here. TFP's own closed form decides."""
    actor = actor_of(seed=0)
    batch = batch_of(actor, moved=0.3)
    new, old = ppo.policy(actor, batch.obs), tfd.Normal(batch.mean, batch.sigma)
    right, wrong = tfd.kl_divergence(old, new).mean(), tfd.kl_divergence(new, old).mean()
    assert abs(right - wrong) > 0.1 * right
    with_kl, without = (ppo.actor_loss(replace(C, BETA=beta), actor, batch) for beta in (1.0, 0.0))
    assert float(with_kl - without) == pytest.approx(float(right), rel=1e-4)  # a difference of two float32
    draws = old.sample(100_000, seed=jax.random.key(1))
    sampled = (old.log_prob(draws) - new.log_prob(draws)).mean()
    assert float(right) == pytest.approx(float(sampled), rel=0.02)  # 6.4 million draws: about 0.2 %
    assert float(ppo.compare_policies(C, actor, batch)["kl"]) == pytest.approx(float(right), rel=1e-6)


def test_the_gradient_of_the_actor_equals_finite_differences():
    actor = actor_of(seed=0)
    batch = batch_of(actor, size=4096, moved=0.3)
    loss = jax.jit(partial(ppo.actor_loss, replace(C, BETA=0.5)))
    gradient = nnx.grad(loss)(actor, batch)
    bias = actor.output.bias  # of the mean and of sigma
    value, h = bias[...], 1e-3
    for i in range(2):
        bias[...] = value.at[i].add(h)
        above = loss(actor, batch)
        bias[...] = value.at[i].add(-h)
        below = loss(actor, batch)
        bias[...] = value
        slope = float(gradient.output.bias[...][i])
        # float32: two losses to 1e-7, over 2e-3; and a few of 4,096 ratios cross a corner of the clip
        assert float(above - below) / (2 * h) == pytest.approx(slope, rel=0.02)


# --- the silent broadcast


def test_the_critic_loss_is_not_broadcast():
    """[B, 1] less [B] would be [B, B]: its mean is another number, and nothing complains."""
    critic = critic_of(seed=0)
    obs = jnp.array(np.random.default_rng(0).normal(size=(64, 3)), jnp.float32)
    noise = np.random.default_rng(1).normal(scale=0.1, size=64)
    returns = ppo.value(critic, obs) + jnp.array(
        noise, jnp.float32
    )  # nearly right already: the true loss is 0.01
    assert ppo.value(critic, obs).shape == returns.shape == (64,)
    value, target = np.asarray(ppo.value(critic, obs), np.float64), np.asarray(returns, np.float64)
    expected = sum((v - r) ** 2 for v, r in zip(value, target)) / 64
    broadcast = ((value[:, None] - target) ** 2).mean()
    assert broadcast > 2 * expected  # the mistake would show
    batch = ppo.Batch(obs, *[returns] * 6)
    assert float(ppo.critic_loss(critic, batch)) == pytest.approx(
        expected, rel=1e-4
    )  # of float32 differences


@pytest.fixture
def one_rollout():
    """A rollout of 7 steps and 3 environments, the untrained agent that played it, and the constants."""
    c = ppo.configure(
        ["NUM_ENVS=3", "ROLLOUT_STEPS=7", "MINIBATCH_SIZE=21", "EVAL_INTERVAL=21", "NUM_STEPS=21"]
    )
    agent = ppo.make_agent(c, jax.random.key(0))
    return agent, *ppo.collect(c, agent, jax.random.key(1)), c


def test_what_a_rollout_holds(one_rollout):
    """Every shape; log-probs and values are those of the agent; each torque is a draw of its own."""
    agent, following, rollout, _ = one_rollout
    t = rollout.transition
    for x in rollout:
        assert jax.tree.leaves(x)[0].shape[:2] == (3, 7)
    policy = ppo.policy(agent.actor, t.obs)
    # float32: seven steps at once and one by one are two compiled programs
    np.testing.assert_allclose(rollout.log_prob, policy.log_prob(t.action), atol=1e-5)
    np.testing.assert_allclose(rollout.mean, policy.loc, atol=1e-6)
    np.testing.assert_allclose(rollout.sigma, policy.scale, atol=1e-6)
    np.testing.assert_allclose(rollout.value, ppo.value(agent.critic, t.obs), atol=1e-6)
    assert len(set(np.asarray(t.action).ravel().tolist())) == 21
    # rows follow each other, and the agent goes on where they end
    np.testing.assert_array_equal(t.obs[:, 1:], t.next_obs[:, :-1])
    np.testing.assert_array_equal(following.env_state.obs, t.next_obs[:, -1])
    np.testing.assert_array_equal(following.env_state.steps, 7)


def test_next_value_is_of_the_true_next_observation(one_rollout):
    """At the end of an episode as well, where the next row of the rollout shows another one's beginning."""
    agent, _, _, c = one_rollout
    steps = jnp.array([0, ENV.max_episode_steps - 3, 5])
    env_state = agent.env_state._replace(steps=steps, episode_return=jnp.array([0.0, -7.0, 0.0]))
    following, rollout = ppo.collect(c, agent._replace(env_state=env_state), jax.random.key(2))
    t = rollout.transition
    np.testing.assert_array_equal(np.argwhere(t.truncated), [[1, 2]])
    assert np.abs(t.next_obs[1, 2] - t.obs[1, 3]).max() > 1e-3  # a new episode
    np.testing.assert_allclose(rollout.next_value, ppo.value(agent.critic, t.next_obs), atol=1e-6)
    assert abs(rollout.next_value[1, 2] - rollout.value[1, 3]) > 1e-4
    # the return of the episode that ended: what it had before, and the three rewards
    assert float(rollout.episode_return[1, 2]) == pytest.approx(-7.0 + float(t.reward[1, :3].sum()), rel=1e-6)
    assert float(rollout.episode_return[1, 3]) == pytest.approx(float(t.reward[1, 3]), rel=1e-6)
    np.testing.assert_array_equal(following.env_state.steps, [7, 4, 12])


def test_the_actor_starts_wide_and_centred_and_keeps_to_its_limits():
    obs = jnp.array(np.random.default_rng(0).normal(size=(1000, 3)) * [1, 1, 8], jnp.float32)
    actor = actor_of(seed=0)
    policy = ppo.policy(actor, obs)
    # heads with a hundredth of the usual variance: a tenth of the usual size
    assert np.abs(policy.loc).max() < 0.5 and np.abs(policy.scale - 2.0).max() < 0.3
    for sign in (1.0, -1.0):
        actor.output.bias[...] = jnp.array([sign * 100.0, -100.0])
        np.testing.assert_allclose(ppo.policy(actor, obs).loc, sign * 2.0)
        np.testing.assert_allclose(ppo.policy(actor, obs).scale, C.SIGMA_MIN)


# --- learning


def test_the_figures_of_a_moved_policy_by_hand():
    """NumPy in float64. Ratios leave the band on both sides; k3 is never negative and is no k1."""
    actor = actor_of(seed=0)
    batch = batch_of(actor, size=4096, moved=0.3)
    policy = ppo.policy(actor, batch.obs)
    log_ratio = np.asarray(policy.log_prob(batch.action), np.float64) - np.asarray(batch.log_prob, np.float64)
    ratio = np.exp(log_ratio)
    low, high = (ratio < 0.8).mean(), (ratio > 1.2).mean()
    assert min(low, high) > 0.05
    figures = ppo.compare_policies(C, actor, batch)
    assert float(figures["clip_fraction"]) == pytest.approx(low + high, abs=2 / 4096)  # one on the corner
    k3 = (ratio - 1 - log_ratio).mean()
    assert float(figures["approx_kl"]) == pytest.approx(k3, rel=1e-3)  # float32 exponents of size 1
    assert abs(k3 - (-log_ratio).mean()) > 0.01 * k3
    # k3 estimates the KL: within four standard errors of its 4,096 draws
    assert float(figures["kl"]) == pytest.approx(k3, abs=4 * (ratio - 1 - log_ratio).std() / 64)
    sigma = np.asarray(policy.scale, np.float64)
    assert float(figures["entropy"]) == pytest.approx(
        (0.5 * np.log(2 * np.pi * np.e * sigma**2)).mean(), rel=1e-5
    )
    assert float(figures["sigma"]) == pytest.approx(sigma.mean(), rel=1e-5)


def test_the_rollout_holds_what_was_played(monkeypatch):
    """What learning is given: looked at by a `train_step` that only writes down its batch."""
    seen = []

    def spy(c, agent, batch):
        policy = ppo.policy(agent.actor, batch.obs)
        ratio = jnp.exp(policy.log_prob(batch.action) - batch.log_prob)
        value = ppo.value(agent.critic, batch.obs)
        jax.debug.callback(lambda *x: seen.append(x), batch, ratio, policy.loc, value)
        return jnp.float32(0)

    monkeypatch.setattr(ppo, "train_step", spy)
    c = ppo.configure(
        ["NUM_STEPS=2000", "EVAL_INTERVAL=1000", "MINIBATCH_SIZE=1000", "NUM_EPOCHS=2", "NUM_SEEDS=1"]
    )
    _, log, _ = ppo.train(c)
    assert len(seen) == 4
    (batch, ratio, loc, value), _, (later, *_), _ = seen
    # the critic's targets; two compiled programs with other shapes round differently
    np.testing.assert_allclose(batch.returns, batch.advantage + value, atol=1e-4)
    assert not np.isin(later.action, batch.action).any()  # the next rollout was drawn anew
    # what the critic left unexplained is the advantage: one rollout per interval, in float32
    explained = 1 - np.asarray(batch.advantage).var() / np.asarray(batch.returns).var()
    assert float(log.explained_variance[0, 0]) == pytest.approx(explained, abs=1e-4)
    # the same policy is looked at with the same first states
    assert log.eval_return[0, 0] == log.eval_return[0, 1]
    # nothing was learned, so the ratio is 1; two compiled programs with other shapes round differently
    np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
    np.testing.assert_allclose(batch.mean, loc, atol=1e-6)
    # 1,000 torques of a normal around 0 with sigma 2: a third of them beyond the limits, kept as drawn
    assert 0.25 < (np.abs(batch.action) > 2).mean() < 0.4


def test_train_step_moves_each_network_by_its_own_gradient():
    c = ppo.configure(["NORMALIZE_ADVANTAGES=False", "BETA=0.5"])
    actor, critic = actor_of(seed=0), critic_of(seed=1)
    batch = batch_of(actor, moved=0.3)
    actor_gradient = params(jax.jit(nnx.grad(partial(ppo.actor_loss, c)))(actor, batch))
    critic_gradient = params(jax.jit(nnx.grad(ppo.critic_loss))(critic, batch))
    before = [np.asarray(p, np.float64) for p in params(actor) + params(critic)]
    sgd = [
        nnx.Optimizer(network, optax.sgd(rate), wrt=nnx.Param)
        for network, rate in ((actor, 1.0), (critic, 0.1))
    ]
    agent = ppo.Agent(actor, critic, *sgd, jnp.int32(0), jnp.int32(0), None)
    value_loss = float(ppo.critic_loss(critic, batch))
    assert float(ppo.train_step(c, agent, batch)) == value_loss  # of the critic before its step
    expected = [*actor_gradient, *(0.1 * g for g in critic_gradient)]
    for old, new, gradient in zip(before, params(actor) + params(critic), expected):
        # the difference of two weights near 1 keeps about 1e-7 of a gradient's digits
        np.testing.assert_allclose(old - np.asarray(new), gradient, atol=2e-6)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_learning_rates_fall_to_their_share(share):
    """Adam's step under a constant gradient is the learning rate itself: read it off the weights."""
    c = ppo.configure(["NUM_STEPS=5000", "MINIBATCH_SIZE=500", "NUM_EPOCHS=2", f"LEARNING_RATE_END={share}"])
    agent = ppo.make_agent(c, jax.random.key(0))
    for network, optimizer, rate in (
        (agent.actor, agent.actor_optimizer, c.ACTOR_LEARNING_RATE),
        (agent.critic, agent.critic_optimizer, c.CRITIC_LEARNING_RATE),
    ):
        gradient = jax.tree.map(jnp.ones_like, nnx.state(network, nnx.Param))
        assert optax.global_norm(gradient) > 10 * c.MAX_GRAD_NORM

        def one(carry, _, gradient=gradient):
            network, optimizer = carry
            before = params(network)[0]
            optimizer.update(network, gradient)
            return carry, (before - params(network)[0]).mean()

        # 5000 * 2 / 500 = 20 updates
        carry = network, optimizer
        (_, optimizer), moved = jax.jit(lambda carry, one=one: jax.lax.scan(one, carry, length=21))(carry)
        falling = rate * np.linspace(1, share, 21)
        np.testing.assert_allclose(moved, falling, rtol=1e-2, atol=1e-3 * rate)  # differences of float32
        # Adam's first moment is the mean of the gradients as shortened: here all alike
        mean = optax.global_norm(optimizer.opt_state[1][0].mu) / (1 - 0.9**21)
        assert float(mean) == pytest.approx(c.MAX_GRAD_NORM, rel=1e-4)  # float32


# --- worlds whose values are known


def world(start, reward, ends_after=1, truncates=False):
    """A world of `ends_after` steps; the observation is (x, step, 0) with x drawn by `start`."""

    def reset(rng):
        x = jnp.asarray(start(rng), jnp.float32)
        return environments.EnvState(x[None], jnp.array([x, 0.0, 0.0]), jnp.int32(0), jnp.float32(0))

    def step(state, action):
        earned = jnp.float32(reward(state, action))
        ended = state.steps + 1 >= ends_after
        # a truncated world goes on as it was; what a terminated one looks like afterwards nobody should ask
        obs = state.obs if truncates else state.obs.at[1].add(1.0)
        following = environments.EnvState(state.physical, obs, state.steps + 1, state.episode_return + earned)
        return following, environments.Transition(
            state.obs, action, earned, obs, ended & (not truncates), ended & truncates
        )

    return reset, step


def sign(rng):
    return jax.random.rademacher(rng, ())


PROBES = {
    # name: (start, reward, ends_after, truncates), {observation: value}, {observation: torque} or None
    "constant reward": ((lambda rng: 1.0, lambda s, a: 1.0), {(1, 0): 1}, None),
    "value depends on the observation": ((sign, lambda s, a: s.obs[0]), {(1, 0): 1, (-1, 0): -1}, None),
    "discount": (
        (lambda rng: 1.0, lambda s, a: s.steps == 2, 3),
        {(1, 0): 0.25, (1, 1): 0.5, (1, 2): 1},
        None,
    ),
    # the best torque is 1 or x; the rest of the reward is the noise of sigma, which should become small
    "reward depends on the action": ((lambda rng: 1.0, lambda s, a: -((a - 1) ** 2)), {}, {(1, 0): 1}),
    "reward depends on both": (
        (sign, lambda s, a: -((a - s.obs[0]) ** 2)),
        {},
        {(1, 0): 1, (-1, 0): -1},
    ),
    # one more than the usual five: the first world, cut off. Its last observation is worth 2 as well.
    "truncation": ((lambda rng: 1.0, lambda s, a: 1.0, 1, True), {(1, 0): 2}, None),
}


@pytest.fixture(scope="module")
def probed():
    """The agents of all probes, by name: one program, each world a row of it."""
    c = ppo.configure(["GAMMA=0.5", "NUM_STEPS=12_000", "EVAL_INTERVAL=12_000", "HIDDEN_SIZE=16",
                       "SCALE_OBSERVATIONS=False"])  # fmt: skip
    resets, steps = zip(*(world(*arguments) for arguments, _, _ in PROBES.values()))

    def train_in(key, index):
        probe = SimpleNamespace(
            reset=lambda rng: jax.lax.switch(index, resets, rng),
            step=lambda state, action: jax.lax.switch(index, steps, state, action),
            max_episode_steps=1,  # of the quick evaluation, which is not looked at here
            observation_scale=ENV.observation_scale,
        )
        with mock.patch.object(ppo, "ENV", probe):
            return training(ppo, c, key, c.NUM_STEPS // c.EVAL_INTERVAL)[0]

    keys = jnp.stack([jax.random.key(0)] * len(PROBES))
    agents = jax.jit(jax.vmap(train_in))(keys, jnp.arange(len(PROBES)))
    return {name: unstack(agents, i) for i, name in enumerate(PROBES)}


@pytest.mark.parametrize("name", PROBES)
def test_probe_environments(name, probed):
    _, values, torques = PROBES[name]
    agent = probed[name]
    for (x, t), value in values.items():
        # Adam with a falling rate fits a handful of points to about 1e-3
        found = ppo.value(agent.critic, jnp.array([x, t, 0.0]))
        assert float(found) == pytest.approx(value, abs=0.02)
    for (x, t), torque in (torques or {}).items():
        policy = ppo.policy(agent.actor, jnp.array([x, t, 0.0]))
        assert float(policy.loc) == pytest.approx(torque, abs=0.15)  # 12 rollouts of noisy torques
        assert float(policy.scale) < 0.7  # from 2


def test_quick_evaluate_equals_playing(monkeypatch):
    actor, rng = actor_of(seed=0), jax.random.key(5)
    state = unstack(jax.vmap(ENV.reset)(jax.random.split(rng, 2)), 1)
    monkeypatch.setattr(environments, "QUICK_EVAL_EPISODES", 2)
    both = float(environments.quick_evaluate(ENV, ppo.policy, actor, rng))
    env = gymnasium.make("Pendulum-v1")
    total = 0.0
    for state in [unstack(jax.vmap(ENV.reset)(jax.random.split(rng, 2)), i) for i in range(2)]:
        env.reset()
        env.unwrapped.state = np.asarray(state.physical, np.float64)
        obs = state.obs
        for _ in range(200):
            obs, reward, *_ = env.step(np.asarray(act(actor, obs))[None])
            total += reward
    assert both == pytest.approx(total / 2, rel=1e-3)  # float32 against float64 over 200 steps


def test_evaluate_plays_pendulum_v1():
    c = ppo.configure(["EVAL_EPISODES=3"])
    keys = jax.random.split(jax.random.key(0), 2)
    actors = nnx.vmap(lambda key: ppo.make_networks(c, key, key)[0])(keys)
    returns = environments.evaluate(ENV, ppo.policy, actors, c.EVAL_EPISODES)
    assert returns.shape == (2, 3)
    for s, e in np.ndindex(2, 3):
        actor, env = unstack(actors, s), gymnasium.make("Pendulum-v1")
        obs, _ = env.reset(seed=e)
        total, truncated = 0.0, False
        while not truncated:
            obs, reward, _, truncated, _ = env.step(np.asarray(act(actor, obs))[None])
            total += reward
        assert returns[s, e] == pytest.approx(total, rel=1e-3)  # one network or two at once round differently


def test_two_seeds_learn_to_swing_up():
    """Ten seeds of ten are above -155; the mark leaves room for fewer steps and for other machines' rounding.
    Chance: -1,200."""
    c = ppo.configure(["NUM_SEEDS=2", "EVAL_EPISODES=10", "NUM_STEPS=60_000", "EVAL_INTERVAL=20_000"])
    agents, log, _ = ppo.train(c)
    returns = environments.evaluate(ENV, ppo.policy, agents.actor, c.EVAL_EPISODES).mean(axis=1)
    assert (returns >= -180).all(), returns
    # what a practitioner reads is in its healthy range
    assert (log.explained_variance[:, -1] > 0.9).all() and (log.kl[:, -1] < 0.05).all()
    assert (log.entropy[:, -1] < log.entropy[:, 0]).all()


def test_a_sigma_of_any_size_starts_as_it_is_given():
    """Far above the limits: the inverse of softplus must not overflow, as e^800 does."""
    for start in (0.06, 2.0, 800.0):
        policy = ppo.policy(actor_of(ppo.configure([f"SIGMA_START={start}"])), jnp.zeros(3))
        assert float(policy.scale) == pytest.approx(start, rel=0.1)
