"""Folder 3, PPO on CartPole: what it has in common with pendulum.py, tried in both; the rest by hand."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import scipy
from flax import nnx
from folders import load, whole_run_of

ppo, pendulum = load("3_Pendulum", "ppo"), load("3_Pendulum", "pendulum")
ENV, C = ppo.ENV, ppo.Constants()
SMALL = ppo.configure(["NUM_ENVS=2"])


# --- what both scripts have


def gae(script, c, *arrays):
    """Advantages of arrays [T, N] as the tests write them; the script's are [N, T]."""
    return script.gae(*(jnp.asarray(x).T for x in arrays), c.GAMMA, c.GAE_LAMBDA).T


def random_rollout(seed, steps=40, envs=3):
    """Ends of both kinds, at times both at once; next values that differ from the next row's at every end."""
    rng = np.random.default_rng(seed)
    reward, value, other = rng.normal(size=(3, steps, envs)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, envs)) < 0.1
    next_value = np.concatenate([value[1:], other[:1]])  # the same state seen twice ...
    ended = terminated | truncated
    next_value[ended] = other[ended]  # ... but after an end the next row is another episode's
    return reward, value, next_value, terminated, truncated


def brute_force_gae(reward, value, next_value, terminated, truncated, gamma, lam):
    """Each advantage as its own sum: sum_k (gamma lambda)^k delta_{t+k}, up to the end of the episode."""
    steps, envs = reward.shape
    advantage = np.zeros((steps, envs))
    for n in range(envs):
        for t in range(steps):
            for k in range(steps - t):
                i = t + k
                future = 0.0 if terminated[i, n] else next_value[i, n]
                delta = reward[i, n] + gamma * future - value[i, n]
                advantage[t, n] += (gamma * lam) ** k * delta
                if terminated[i, n] or truncated[i, n]:
                    break
    return advantage


@pytest.mark.parametrize("script", [ppo, pendulum], ids=["ppo", "pendulum"])
@pytest.mark.parametrize("gamma, lam", [(0.98, 0.85), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_equals_the_brute_force_sum(script, gamma, lam):
    c = script.configure([f"GAMMA={gamma}", f"GAE_LAMBDA={lam}"])
    arrays = random_rollout(seed=int(100 * lam))
    assert (arrays[3].sum(), arrays[4].sum()) > (5, 5)
    by_hand = brute_force_gae(*arrays, gamma, lam)
    # float32 sums of up to 40 terms of size about 1
    np.testing.assert_allclose(gae(script, c, *arrays), by_hand, atol=1e-5)


@pytest.mark.parametrize("script", [ppo, pendulum], ids=["ppo", "pendulum"])
@pytest.mark.parametrize("lam", [0.0, 0.85, 1.0])
def test_gae_equals_rlax(script, lam):
    """rlax knows one kind of end only, a discount of 0: between two truncations, and with terminations."""
    c = script.configure([f"GAE_LAMBDA={lam}"])
    reward, value, next_value, terminated, truncated = random_rollout(seed=7, envs=1)
    advantages = gae(script, c, reward, value, next_value, terminated, truncated)
    ends = [0, *(np.flatnonzero(truncated[:, 0]) + 1), len(reward)]
    assert len(ends) > 3
    for first, last in itertools.pairwise(ends):
        if first == last:
            continue
        piece = slice(first, last)
        values = np.append(value[piece, 0], next_value[last - 1, 0])
        expected = rlax.truncated_generalized_advantage_estimation(
            reward[piece, 0], c.GAMMA * (1.0 - terminated[piece, 0]), lam, values
        )
        np.testing.assert_allclose(advantages[piece, 0], expected, atol=1e-5)  # float32, up to 40 terms


@pytest.mark.parametrize("script", [ppo, pendulum], ids=["ppo", "pendulum"])
@pytest.mark.parametrize(
    "ratio, advantage, value, slope",
    [
        (0.5, 2.0, 1.0, 2.0),  # good action, less likely than before: full pull back
        (1.1, 2.0, 2.2, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # likely enough: nothing more to gain
        (0.5, -2.0, -1.6, 0.0),  # bad action, unlikely enough
        (0.9, -2.0, -1.8, -2.0),
        (1.5, -2.0, -3.0, -2.0),  # bad action, more likely than before: full push
    ],
)
def test_clipped_objective_and_its_slope(script, ratio, advantage, value, slope):
    assert script.clipped_objective(ratio, advantage, 0.2) == pytest.approx(value, rel=1e-6)  # float32
    assert jax.grad(script.clipped_objective)(ratio, advantage, 0.2) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("script", [ppo, pendulum], ids=["ppo", "pendulum"])
def test_every_update_has_a_key_of_its_own(script, monkeypatch):
    """Two rollouts in each interval; the log has the mean of what each of them drew."""

    def update(c, agent, rng):
        figures = dict.fromkeys(script.Log._fields[3:], (jax.random.uniform(rng), jnp.float32(1)))
        return agent._replace(env_step=agent.env_step + 1000, num_updates=agent.num_updates + 1), figures

    monkeypatch.setattr(script, "update", update)
    c = script.configure(["NUM_STEPS=4000", "EVAL_INTERVAL=2000", "HIDDEN_SIZE=8", "NUM_SEEDS=1", "SEED=7"])
    _, log, _ = script.train(c)
    learning_rng = jax.random.split(jax.random.key(7), 5)[4]
    drawn = [float(jax.random.uniform(jax.random.fold_in(learning_rng, i))) for i in range(4)]
    expected = np.reshape(drawn, (2, 2)).mean(axis=1)
    np.testing.assert_allclose(log.value_loss[0], expected, rtol=1e-6)  # float32
    np.testing.assert_array_equal(log.num_updates[0], [2, 4])


@pytest.mark.parametrize("script", [ppo, pendulum], ids=["ppo", "pendulum"])
def test_each_epoch_has_every_step_once_in_an_order_of_its_own(script, monkeypatch):
    seen = []

    def spy(c, agent, batch):
        jax.debug.callback(lambda obs: seen.append(np.asarray(obs)), batch.obs, ordered=True)
        return jnp.float32(0)

    monkeypatch.setattr(script, "train_step", spy)
    c = script.configure(["NUM_EPOCHS=3", "MINIBATCH_SIZE=10"])
    batch = script.Batch(*[jnp.arange(40.0)] * len(script.Batch._fields))
    script.learn(c, jnp.float32(0), batch, jax.random.key(0))
    jax.effects_barrier()
    epochs = np.reshape(seen, (3, 40))
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [np.arange(40)] * 3)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


@pytest.fixture(scope="module")
def agent():
    """Untrained."""
    return ppo.make_agent(SMALL, jax.random.key(0))


@pytest.fixture(scope="module")
def played(agent):
    """A rollout of the untrained agent, whose episodes are a few dozen steps long; the agent before it."""
    return *ppo.collect(SMALL, agent, jax.random.key(1)), agent


def batch_of(actor, size=512, moved=0.3):
    """Steps that an older policy played: its log-probs are those of other logits."""
    rng = np.random.default_rng(0)
    obs = jnp.array(rng.normal(size=(size, 4)) * ENV.observation_scale, jnp.float32)
    old = log_softmax(np.asarray(actor(obs)) + moved * rng.normal(size=(size, 2)))
    action = jnp.array(rng.integers(2, size=size))
    log_prob = old[np.arange(size), action]
    advantage, returns = rng.normal(loc=1.0, scale=3.0, size=(2, size))
    return ppo.Batch(obs, action, *(jnp.array(x, jnp.float32) for x in (log_prob, advantage, returns)))


def log_softmax(logits):
    """In float64, along the last axis."""
    return scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)


def log_ratio_of(actor, batch):
    """NumPy in float64, [B]."""
    return log_softmax(actor(batch.obs))[np.arange(len(batch.obs)), batch.action] - np.asarray(
        batch.log_prob, np.float64
    )


def test_a_rollout_is_what_its_policy_played_and_its_critic_said(played):
    following, rollout, agent = played
    t = rollout.transition
    log_p = log_softmax(agent.actor(t.obs))  # [N, T, 2]
    drawn = np.take_along_axis(log_p, np.asarray(t.action)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(rollout.log_prob, drawn, atol=1e-5)  # float32
    np.testing.assert_allclose(rollout.value, agent.critic(t.obs)[..., 0], atol=1e-4)
    np.testing.assert_allclose(rollout.next_value, agent.critic(t.next_obs)[..., 0], atol=1e-4)
    ended = np.asarray(t.terminated | t.truncated)
    assert 3 < ended.sum() < ended.size / 5
    on = ~ended[:, :-1]
    np.testing.assert_array_equal(t.obs[:, 1:][on], t.next_obs[:, :-1][on])
    assert (np.abs(t.obs[:, 1:][~on]) <= 0.05).all()  # a first state of CartPole
    assert (np.abs(t.next_obs[ended][:, 2]) > 0.2).all()  # the true last one: fallen, not begun anew
    steps = np.ones(len(ended))
    for i in range(ended.shape[1]):
        np.testing.assert_array_equal(rollout.episode_return[:, i], steps)
        steps = np.where(ended[:, i], 1, steps + 1)
    goes_on = np.where(ended[:, -1:], following.env_state.obs, t.next_obs[:, -1])
    np.testing.assert_array_equal(following.env_state.obs, goes_on)


def test_an_update_learns_from_the_advantages_of_its_rollout(played):
    _, rollout, agent = played
    learned = []

    def remember(c, agent, batch, rng):
        learned.append(batch)
        return agent, jnp.float32(7)

    with (
        mock.patch.object(ppo, "collect", lambda *_: (agent, rollout)),
        mock.patch.object(ppo, "learn", remember),
    ):
        after, figures = ppo.update(SMALL, agent, jax.random.key(0))
    [batch] = learned
    t = rollout.transition
    ended, value = np.asarray(t.terminated | t.truncated), np.asarray(rollout.value, np.float64)
    arrays = (t.reward, value, rollout.next_value, t.terminated, t.truncated)
    advantage = brute_force_gae(*(np.asarray(x).T for x in arrays), C.GAMMA, C.GAE_LAMBDA).T
    np.testing.assert_allclose(batch.advantage, advantage.ravel(), rtol=1e-3, atol=1e-3)  # float32, 125 terms
    np.testing.assert_allclose(batch.returns, (advantage + value).ravel(), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(batch.obs, t.obs.reshape(-1, 4))
    np.testing.assert_array_equal(batch.action, t.action.ravel())
    np.testing.assert_array_equal(batch.log_prob, rollout.log_prob.ravel())
    assert (int(after.env_step), int(after.num_updates)) == (250, 1)
    part, whole = figures["episode_return"]
    assert part / whole == pytest.approx(np.asarray(rollout.episode_return)[ended].mean())
    part, whole = figures["explained_variance"]
    assert part / whole == pytest.approx(1 - advantage.var() / (advantage + value).var(), abs=1e-3)
    assert figures["value_loss"] == (7, 1)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_actors_loss_by_hand(agent, normalize):
    batch = batch_of(agent.actor)
    ratio, A = np.exp(log_ratio_of(agent.actor, batch)), np.asarray(batch.advantage, np.float64)
    if normalize:
        A = (A - A.mean()) / A.std()
    assert ((ratio < 0.8) & (A < 0)).any() and ((ratio > 1.2) & (A > 0)).any()  # the clip binds
    expected = -np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A).mean()
    c = ppo.configure([f"NORMALIZE_ADVANTAGES={normalize}"])
    assert float(ppo.actor_loss(c, agent.actor, batch)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_figures_of_a_moved_policy_by_hand(agent):
    batch = batch_of(agent.actor, size=4096)
    log_ratio, log_p = log_ratio_of(agent.actor, batch), log_softmax(agent.actor(batch.obs))
    ratio = np.exp(log_ratio)
    figures = ppo.compare_policies(C, agent.actor, batch)
    assert float(figures["entropy"]) == pytest.approx(-(np.exp(log_p) * log_p).sum(axis=1).mean(), rel=1e-5)
    assert float(figures["approx_kl"]) == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-3)
    outside = (np.abs(ratio - 1) > 0.2).mean()
    assert 0.05 < outside < 0.95
    assert float(figures["clip_fraction"]) == pytest.approx(outside, abs=2 / 4096)  # one on the corner


def test_the_critic_loss_by_hand(agent):
    batch = batch_of(agent.actor)
    error = np.asarray(batch.returns) - np.asarray(agent.critic(batch.obs))[:, 0]
    assert float(ppo.critic_loss(agent.critic, batch)) == pytest.approx(np.mean(error**2), rel=1e-4)


@pytest.mark.parametrize("scaled", [True, False])
def test_the_networks_by_hand(scaled):
    """Two hidden layers of relu on scaled observations; the critic's output is a share of 1 / (1 - gamma)."""
    c = ppo.configure([f"SCALE_OBSERVATIONS={scaled}", "GAMMA=0.9"])
    obs = np.random.default_rng(0).normal(size=(5, 4))
    for network, factor in zip(ppo.make_networks(c, *[jax.random.key(0)] * 2), (1.0, 10.0), strict=True):
        x = obs / np.array(ENV.observation_scale if scaled else [1.0] * 4)
        for layer in (network.hidden_1, network.hidden_2, network.output):
            x = x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
            x = x if layer is network.output else np.maximum(x, 0)
        np.testing.assert_allclose(network(jnp.array(obs, jnp.float32)), factor * x, rtol=1e-4, atol=1e-4)


def test_a_training_step_moves_each_network_by_its_own_rate():
    """Adam's first step is the learning rate, whatever the gradient."""
    agent = ppo.make_agent(SMALL, jax.random.key(0))
    before = [jax.tree.map(np.array, nnx.state(x, nnx.Param)) for x in (agent.actor, agent.critic)]
    ppo.train_step(C, agent, batch_of(agent.actor))
    after = [nnx.state(x, nnx.Param) for x in (agent.actor, agent.critic)]
    rates = (C.ACTOR_LEARNING_RATE, C.CRITIC_LEARNING_RATE)
    for old, new, rate in zip(before, after, rates, strict=True):
        moved = max(
            np.abs(np.asarray(b) - a).max()
            for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        )
        assert moved == pytest.approx(rate, rel=1e-2)


def test_two_seeds_learn_to_balance(tmp_path):
    """From two dozen steps to hundreds, and what the run leaves is what it says."""
    folder, result, printed, _ = whole_run_of(
        ppo, tmp_path / "run", "NUM_SEEDS=2", "NUM_STEPS=20000", "EVAL_EPISODES=10"
    )
    assert min(result["eval_return"]) > 200 and result["env_steps"] == [20_000, 20_000]
    assert f"{np.mean(result['eval_return']):.1f}" in printed
    assert {"constants.json", "log.csv", "result.json"} <= {path.name for path in folder.iterdir()}
