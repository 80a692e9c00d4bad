"""Folder 3, PPO on CartPole and on Pendulum: every formula by hand, in both scripts."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from folders import SAME_STATE, flat, forward, learning_rates, load, of_sgd
from tensorflow_probability.substrates.jax import distributions as tfd

ppo, pendulum, environments = (
    load("3_Pendulum", name) for name in ("ppo", "pendulum", "environments")
)
SMALL = [
    "NUM_ENVS=3",
    "ROLLOUT_STEPS=50",
    "MINIBATCH_SIZE=150",
    "NUM_EPOCHS=1",
    "HIDDEN_SIZE=16",
    "EVAL_INTERVAL=300",
    "NUM_STEPS=600",
    "GAMMA=0.99",
    "CLIP_EPSILON=0.2",
]


@pytest.fixture(params=[ppo, pendulum], ids=["ppo", "pendulum"], scope="module")
def script(request):
    return request.param


def small(script, *arguments):
    """What a figure below depends on is given: what the defaults are doesn't matter."""
    sigma = ["SIGMA_START=2", "SIGMA_MIN=0.05", "BETA=0", "LEARNING_RATE_END=0"] * (
        script is pendulum
    )
    return script.settings.read(script.Constants, [*SMALL, *sigma, *arguments])


@cache
def agent_of(script, *arguments):
    return jax.jit(partial(script.make_agent, small(script, *arguments)))(0)


def outputs(script, network, obs, scaled=True):
    """A network's outputs in NumPy, before their factor."""
    scaled = np.asarray(obs, np.float64) / (script.ENV.observation_scale if scaled else 1)
    return forward(network, scaled, *[np.tanh] * (script is pendulum))


def moved_batch(script, actor, size=4096):
    """Steps of another policy, with today's and that one: a mean 0.3 lower, or other logits."""
    rng, scale = np.random.default_rng(0), script.ENV.observation_scale
    obs = jnp.array(rng.normal(size=(size, len(scale))) * scale, jnp.float32)
    now = script.policy(actor, obs)
    if script is ppo:
        old = tfd.Categorical(logits=now.logits + 0.3 * rng.normal(size=(size, 2)))
        distribution = {}
    else:
        old = tfd.Normal(now.loc - 0.3, 1.3 * now.scale)
        distribution = {"mean": old.loc, "sigma": old.scale}
    action = old.sample(seed=jax.random.key(0))
    good = 2 * action - 1 if script is ppo else jnp.sign(action - old.loc)
    advantage = jnp.array(rng.normal(1.0, 3.0, size), jnp.float32) + 2 * good
    played = {"obs": obs, "action": action, "log_prob": old.log_prob(action)} | distribution
    return script.Batch(**played, advantage=advantage, returns=None), now, old


@pytest.mark.parametrize("scaled", [True, False])
def test_the_policy_by_hand(script, scaled):
    """The network in NumPy; the torque's mean within its limits, its sigma positive."""
    c, keys = small(script, f"SCALE_OBSERVATIONS={scaled}"), jax.random.split(jax.random.key(0))
    actor, _ = jax.jit(partial(script.make_networks, c))(*keys)
    obs = np.random.default_rng(0).normal(size=(5, len(script.ENV.observation_scale)))
    found = outputs(script, actor, obs, scaled)
    policy = script.policy(actor, jnp.array(obs, jnp.float32))
    if script is ppo:
        np.testing.assert_allclose(policy.logits, found, rtol=1e-3, atol=1e-5)
    else:
        np.testing.assert_allclose(policy.loc, 2 * np.tanh(found[..., 0]), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(policy.scale, 0.05 + np.logaddexp(0, found[..., 1]), rtol=1e-5)


def brute_force_gae(reward, value, next_value, terminated, truncated, gamma, lam):
    """Arrays [N, T]; each advantage as its own sum: sum_k (gamma lambda)^k delta_{t+k}, up to the
    end.
    """
    advantage = np.zeros(reward.shape)
    for n, t in np.ndindex(reward.shape):
        for i in range(t, reward.shape[1]):
            future = 0.0 if terminated[n, i] else next_value[n, i]
            advantage[n, t] += (gamma * lam) ** (i - t) * (
                reward[n, i] + gamma * future - value[n, i]
            )
            if terminated[n, i] or truncated[n, i]:
                break
    return advantage


@pytest.mark.parametrize("gamma, lam", [(0.98, 0.85), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_equals_the_brute_force_sum(script, gamma, lam):
    """Ends of both kinds, at times both at once; next values that differ from the next row's at
    every end.
    """
    rng = np.random.default_rng(int(100 * lam))
    reward, value, other = rng.normal(size=(3, 3, 40)).astype(np.float32)
    terminated, truncated = rng.random((2, 3, 40)) < 0.1
    on = ~(terminated | truncated)[:, :-1]
    next_value = other.copy()
    next_value[:, :-1][on] = value[:, 1:][on]  # the same state seen twice
    arrays = reward, value, next_value, terminated, truncated
    # float32 sums of up to 40 terms of size about 1
    by_hand = brute_force_gae(*arrays, gamma, lam)
    np.testing.assert_allclose(
        script.gae(*map(jnp.asarray, arrays), gamma, lam), by_hand, atol=1e-5
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_the_actors_loss_and_its_gradient_by_hand(script, normalize):
    c = small(script, f"NORMALIZE_ADVANTAGES={normalize}", *["BETA=0.7"] * (script is pendulum))
    actor = agent_of(script).actor
    batch, now, old = moved_batch(script, actor)
    A, ratio = batch.advantage, jnp.exp(now.log_prob(batch.action) - old.log_prob(batch.action))
    A = (A - A.mean()) / A.std() if normalize else A
    assert ((ratio < 0.8) & (A < 0)).any() and ((ratio > 1.2) & (A > 0)).any()  # the clip binds

    def by_hand(actor):
        new = script.policy(actor, batch.obs)
        ratio = jnp.exp(new.log_prob(batch.action)) / jnp.exp(old.log_prob(batch.action))
        loss = -jnp.minimum(ratio * A, jnp.clip(ratio, 0.8, 1.2) * A).mean()
        return loss + 0.7 * tfd.kl_divergence(old, new).mean() if script is pendulum else loss

    loss, gradient = nnx.jit(nnx.value_and_grad(partial(script.actor_loss, c)))(actor, batch)
    expected, wanted = nnx.jit(nnx.value_and_grad(by_hand))(actor)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(flat(gradient), flat(wanted), rtol=1e-3, atol=1e-5)


def test_the_figures_of_a_moved_policy_by_hand(script):
    c, actor = small(script), agent_of(script).actor
    batch, now, old = moved_batch(script, actor)
    log_ratio = np.asarray(now.log_prob(batch.action) - old.log_prob(batch.action), np.float64)
    ratio = np.exp(log_ratio)
    assert min((ratio < 0.8).mean(), (ratio > 1.2).mean()) > 0.03
    expected = {"approx_kl": (ratio - 1 - log_ratio).mean(), "entropy": now.entropy().mean()}
    if script is pendulum:  # the two directions of the KL differ by a quarter here
        expected |= {"sigma": now.scale.mean(), "kl": tfd.kl_divergence(old, now).mean()}
    figures = {
        name: float(figure) for name, figure in script.compare_policies(c, actor, batch).items()
    }
    assert figures.pop("clip_fraction") == pytest.approx(
        (np.abs(ratio - 1) > 0.2).mean(), abs=2 / 4096
    )
    # float32
    assert figures == pytest.approx({name: float(x) for name, x in expected.items()}, rel=1e-3)


def test_the_torque_starts_wide_and_centred_and_keeps_to_its_limits():
    """SIGMA_START far above the limits, too: the inverse of softplus must not overflow, as e^800
    does.
    """
    obs = jnp.array(np.random.default_rng(0).normal(size=(1000, 3)) * [1, 1, 8], jnp.float32)
    for start in (0.06, 2.0, 800.0):
        actor, _ = pendulum.make_networks(
            small(pendulum, f"SIGMA_START={start}"), *[jax.random.key(0)] * 2
        )
        policy = pendulum.policy(actor, obs)
        # the output layer has a tenth of the usual size
        assert np.abs(policy.loc).max() < 0.5
        np.testing.assert_allclose(policy.scale, start, rtol=0.15)
    for sign in (1.0, -1.0):
        actor.output.bias[...] = jnp.array([sign * 100.0, -100.0])
        np.testing.assert_allclose(pendulum.policy(actor, obs).loc, sign * 2.0)
        np.testing.assert_allclose(pendulum.policy(actor, obs).scale, 0.05)


@pytest.mark.parametrize("script, share", [(ppo, 1.0), (pendulum, 0.25)])
def test_the_learning_rates(script, share):
    falling = [f"LEARNING_RATE_END={share}"] * (script is pendulum)
    arguments = ["NUM_STEPS=1500", "NUM_EPOCHS=2", *falling]  # 20 updates
    c, agent = small(script, *arguments), agent_of(script, *arguments)
    for name, rate in (("actor", c.ACTOR_LEARNING_RATE), ("critic", c.CRITIC_LEARNING_RATE)):
        rates, optimizer = learning_rates(
            getattr(agent, f"{name}_optimizer"), getattr(agent, name), 21
        )
        # differences of float32
        np.testing.assert_allclose(
            rates, rate * np.linspace(1, share, 21), rtol=1e-2, atol=1e-3 * rate
        )
        # Adam's first moment is the mean of the shortened gradients, here all alike
        if script is pendulum:
            mean = np.linalg.norm(flat(optimizer.opt_state[1][0].mu)) / (1 - 0.9**21)
            assert mean == pytest.approx(c.MAX_GRAD_NORM, rel=1e-4)  # float32


@cache
def program(script, name):
    return jax.jit(partial(getattr(script, name), small(script, "NORMALIZE_ADVANTAGES=False")))


RATES = {ppo: {"actor": 1.0, "critic": 1e-4}, pendulum: {"actor": 1.0, "critic": 1e-2}}


def test_a_rollout_is_what_its_policy_played_and_its_critic_said(script):
    """Of an untrained agent; one episode reaches its limit."""
    agent, steps = agent_of(script), jnp.array([0, script.ENV.max_episode_steps - 3, 5])
    start = agent._replace(env_state=agent.env_state._replace(steps=steps))
    following, rollout = program(script, "collect")(start, jax.random.key(1))
    rollout = jax.tree.map(np.asarray, rollout)
    t, policy = rollout.transition, script.policy(agent.actor, rollout.transition.obs)
    np.testing.assert_allclose(rollout.log_prob, policy.log_prob(t.action), atol=1e-4)
    factor = 100 if script is ppo else 1
    for found, obs in ((rollout.value, t.obs), (rollout.next_value, t.next_obs)):
        value = factor * outputs(script, agent.critic, obs)[..., 0]
        np.testing.assert_allclose(found, value, rtol=1e-3, atol=1e-4)  # float32
    # torques of a normal around 0 with sigma 2: a third beyond the limits, as drawn
    if script is pendulum:
        np.testing.assert_allclose(
            [rollout.mean, rollout.sigma], [policy.loc, policy.scale], atol=1e-4
        )
        assert (
            0.2 < (np.abs(t.action) > 2).mean() < 0.45 and len(np.unique(t.action)) == t.action.size
        )
    ended, steps = t.terminated | t.truncated, np.asarray(following.env_state.steps)
    assert t.truncated[1, 2] and ended[1, :3].sum() == 1
    on = ~ended[:, :-1]
    np.testing.assert_allclose(t.obs[:, 1:][on], t.next_obs[:, :-1][on], **SAME_STATE)
    # the true last one, then a new episode
    assert (t.obs[:, 1:] != t.next_obs[:, :-1]).any(axis=-1)[~on].all()
    goes_on = ~ended[:, -1]
    np.testing.assert_allclose(
        following.env_state.obs[goes_on], t.next_obs[:, -1][goes_on], **SAME_STATE
    )
    earned = np.zeros(3)
    for i in range(50):
        earned = earned + t.reward[:, i]
        np.testing.assert_allclose(rollout.episode_return[:, i], earned, rtol=1e-5)
        earned[ended[:, i]] = 0
    assert steps[1] == 50 - np.flatnonzero(ended[1])[-1] - 1


def test_an_update_by_hand(script):
    """One mini-batch, plain SGD: at a ratio of 1 the actor climbs A log pi, the critic nears its
    targets.
    """
    before = agent_of(script)
    after, figures = program(script, "update")(of_sgd(before, **RATES[script]))
    _, collect_rng, _ = jax.random.split(before.rng, 3)
    _, rollout = program(script, "collect")(before, collect_rng)
    t, value = rollout.transition, np.asarray(rollout.value, np.float64)
    arrays = t.reward, value, rollout.next_value, t.terminated, t.truncated
    A = brute_force_gae(*map(np.asarray, arrays), 0.99, small(script).GAE_LAMBDA)
    advantage, returns = jnp.array(A, jnp.float32), jnp.array(A + value, jnp.float32)
    wanted = {
        "actor": lambda actor: -(advantage * script.policy(actor, t.obs).log_prob(t.action)).mean(),
        "critic": lambda critic: ((returns - script.value(critic, t.obs)) ** 2).mean(),
    }
    for name, loss in wanted.items():
        gradient = flat(nnx.jit(nnx.grad(loss))(getattr(before, name)))
        moved = (flat(getattr(before, name)) - flat(getattr(after, name))) / RATES[script][name]
        # weights near 1 keep about 1e-7 of what moves them
        np.testing.assert_allclose(moved, gradient, rtol=1e-2, atol=1e-3 * np.abs(gradient).max())
        assert np.abs(gradient).max() > 1e-3
    assert (after.env_step, after.num_updates) == (150, 1)
    figures = {name: float(part / whole) for name, (part, whole) in figures.items()}
    assert figures["value_loss"] == pytest.approx((A**2).mean(), rel=1e-4)
    assert figures["explained_variance"] == pytest.approx(1 - A.var() / (A + value).var(), abs=1e-3)
    ended = np.asarray(t.terminated | t.truncated)
    if ended.any():
        mean = np.asarray(rollout.episode_return)[ended].mean()
        assert figures["episode_return"] == pytest.approx(mean, rel=1e-5)
    assert ended.any() == (script is ppo)  # a pendulum's episode is longer


def test_each_epoch_has_every_step_once_in_an_order_of_its_own(script, monkeypatch):
    seen = []

    def spy(c, agent, batch):
        jax.debug.callback(seen.append, batch.obs, ordered=True)
        return jnp.float32(0)

    monkeypatch.setattr(script, "train_step", spy)
    c = small(script, "NUM_EPOCHS=3", "MINIBATCH_SIZE=10")
    batch = script.Batch(*[jnp.arange(40.0)] * len(script.Batch._fields))
    script.learn(c, jnp.float32(0), batch, jax.random.key(0))
    jax.effects_barrier()
    epochs = np.reshape(seen, (3, 40))
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [np.arange(40)] * 3)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


def test_a_row_of_the_log_is_two_updates_with_keys_of_their_own(script):
    """And a look at the policy."""
    agent, figures = of_sgd(agent_of(script), **RATES[script]), []
    keys = [jax.random.key_data(agent.rng)]
    learned, row = program(script, "train_row")(agent)
    for _ in range(2):
        agent, figure = program(script, "update")(agent)
        figures.append(figure)
        keys.append(jax.random.key_data(agent.rng))
    assert len(np.unique(keys, axis=0)) == 3
    for network in ("actor", "critic"):
        weights = (flat(getattr(x, network)) for x in (learned, agent))
        np.testing.assert_allclose(*weights, atol=1e-5)  # float32
    for name in figures[0].keys() - {"episode_return", "explained_variance"}:
        mean = np.mean([figure[name][0] for figure in figures])
        assert float(getattr(row, name)) == pytest.approx(float(mean), rel=1e-3, abs=1e-5)
    assert (row.num_updates, row.env_step) == (2, 300)
    look = environments.quick_evaluate(script.ENV, script.policy, agent.actor)
    assert float(row.eval_return) == pytest.approx(float(look), rel=1e-2)
