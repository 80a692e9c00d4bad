"""Folder 3, why a baseline: expectations against enumerations, formulas by hand, the masks, the measured
variances, and the script as a reader runs it."""

import csv
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reinforce
from flax import nnx
from jax.flatten_util import ravel_pytree

SCRIPT = Path(reinforce.__file__)
SHORT = ["NUM_STEPS=600", "EVAL_INTERVAL=300", "BATCH_SIZE=4", "HIDDEN_SIZE=8", "CRITIC_STEPS=2"]


@pytest.fixture(autouse=True)
def defaults():
    reinforce.configure([])
    yield
    reinforce.configure([])


def silent(row):
    """A report that reports nothing."""


def train(seeds=(0,)):
    """A fresh trace each time, or a constant changed in between would go unnoticed."""
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    train_all = jax.vmap(lambda key: reinforce.train(key, silent), axis_name="seed")
    # most of the time is compiling: a third of it without optimization, with the same program
    return jax.jit(train_all).lower(keys).compile({"xla_backend_optimization_level": 0})(keys)


def unstack(tree, index=0):
    return jax.tree.map(lambda x: x[index], tree)


def params(network):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(network, nnx.Param))]


def flat(gradient):
    return np.asarray(ravel_pytree(gradient)[0], np.float64)


def episodes_of(actions, rewards, lengths, obs=None):
    """Episodes [B, T] that end after `lengths` steps; rewards after the end are 0, as `play` leaves them."""
    actions, rewards = np.asarray(actions), np.asarray(rewards, np.float32)
    alive = (np.arange(actions.shape[1]) < np.asarray(lengths)[:, None]).astype(np.float32)
    obs = np.zeros((*actions.shape, 4), np.float32) if obs is None else np.asarray(obs, np.float32)
    return reinforce.Episodes(
        jnp.array(obs),
        jnp.array(actions),
        jnp.array(rewards * alive),
        jnp.array(alive),
        jnp.zeros(alive.shape, bool),
    )


def random_episodes(batch=6, steps=20, seed=0):
    rng = np.random.default_rng(seed)
    return episodes_of(
        rng.integers(0, 2, (batch, steps)),
        rng.normal(size=(batch, steps)),
        rng.permutation(np.linspace(1, steps, batch).astype(int)),
        rng.normal(size=(batch, steps, 4)),
    )


# --- the environment and the episodes


def test_each_step_equals_cart_pole_v1():
    rng, env = np.random.default_rng(0), gymnasium.make("CartPole-v1")
    before, actions, after, fell = [], [], [], []
    for seed in range(100):
        obs, _ = env.reset(seed=seed)
        terminated = False
        while not terminated:
            before.append(obs)
            actions.append(int(rng.integers(2)))
            obs, _, terminated, _, _ = env.step(actions[-1])
            after.append(obs)
            fell.append(terminated)
    transition = jax.vmap(lambda obs, action: reinforce.step(reinforce.EnvState(obs, jnp.int32(0)), action))(
        np.array(before), np.array(actions)
    )
    # Gymnasium computes in float64 and shows float32: a few units in the last place of numbers up to about 4
    np.testing.assert_allclose(transition.next_obs, np.array(after), atol=2e-6, rtol=1e-6)
    np.testing.assert_array_equal(transition.terminated, fell)
    np.testing.assert_array_equal(transition.reward, 1.0)


def test_episodes_end_once_and_nothing_after_the_end_counts(monkeypatch):
    """Replayed by Gymnasium: an episode ends where its pole falls, or at the limit, which cuts it off."""
    monkeypatch.setattr(reinforce, "MAX_EPISODE_STEPS", 25)
    reinforce.configure(["BATCH_SIZE=200"])
    episodes = jax.tree.map(
        np.asarray, jax.jit(reinforce.play)(reinforce.Actor(nnx.Rngs(0)), jax.random.key(0))
    )
    lengths = episodes.alive.sum(axis=1).astype(int)
    env = gymnasium.make("CartPole-v1").unwrapped
    for b in range(200):
        env.reset()
        env.state = episodes.obs[b, 0].astype(np.float64)
        assert (np.abs(episodes.obs[b, 0]) <= 0.05).all()
        steps, terminated = 0, False
        while not terminated and steps < 25:
            obs, _, terminated, _, _ = env.step(int(episodes.action[b, steps]))
            steps += 1
            if steps < lengths[b]:
                # rounding grows by about e^3.8 a second while a pole falls; 25 steps are half a second
                np.testing.assert_allclose(episodes.obs[b, steps], obs, atol=1e-5)
        assert steps == lengths[b]
        np.testing.assert_array_equal(episodes.alive[b], np.arange(25) < steps)
        np.testing.assert_array_equal(episodes.reward[b], episodes.alive[b])
        cut_off = (np.arange(25) == 24) & (not terminated)
        np.testing.assert_array_equal(episodes.truncated[b], cut_off)
    assert 0 < episodes.truncated.any(axis=1).sum() < 200  # both kinds of ends are among them


def test_actions_are_drawn_from_the_policy():
    """A policy whose logits are log 0.3 and log 0.7 everywhere plays action 1 seven times in ten."""
    reinforce.configure(["BATCH_SIZE=200"])
    actor = reinforce.Actor(nnx.Rngs(0))
    actor.output.kernel[...] = jnp.zeros_like(actor.output.kernel[...])
    actor.output.bias[...] = jnp.log(jnp.array([0.3, 0.7]))
    episodes = jax.jit(reinforce.play)(actor, jax.random.key(0))
    # 200 episodes x 500 draws, padding included: 5 standard deviations are 0.0072
    assert float(episodes.action.mean()) == pytest.approx(0.7, abs=0.0072)


# --- credit


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_to_go_equal_a_brute_force_sum(gamma):
    reinforce.configure([f"GAMMA={gamma}"])
    episodes = random_episodes()
    reward, alive = np.asarray(episodes.reward, np.float64), np.asarray(episodes.alive)
    lengths = alive.sum(axis=1).astype(int)
    assert lengths.min() == 1 and lengths.max() == 20
    by_hand = np.zeros_like(reward)
    for b, length in enumerate(lengths):
        for t in range(length):
            by_hand[b, t] = sum(gamma ** (k - t) * reward[b, k] for k in range(t, length))
    # float32 sums of at most 20 numbers of size 1
    np.testing.assert_allclose(reinforce.returns_to_go(episodes.reward), by_hand, atol=1e-5)
    np.testing.assert_allclose(reinforce.credit(episodes, True), by_hand, atol=1e-5)
    whole = np.where(alive > 0, by_hand[:, :1], 0)
    np.testing.assert_allclose(reinforce.credit(episodes, False), whole, atol=1e-5)


# --- baselines


def test_baselines_by_hand():
    reinforce.configure(["GAMMA=0.5"])
    episodes = episodes_of(np.zeros((3, 3), int), np.ones((3, 3)), [3, 2, 1])
    earned = reinforce.credit(episodes, True)
    # every number here is a small dyadic fraction, but for the thirds of the mean: float32
    np.testing.assert_array_equal(earned, [[1.75, 1.5, 1], [1.5, 1, 0], [1, 0, 0]])
    critic = reinforce.Critic(nnx.Rngs(0))
    np.testing.assert_array_equal(reinforce.BASELINES["none"](episodes, earned, critic), np.zeros((3, 3)))
    # step 0: three alive, step 1: two, step 2: the last survivor is compared with itself
    np.testing.assert_allclose(
        reinforce.BASELINES["mean"](episodes, earned, critic), [[4.25 / 3, 1.25, 1]] * 3, rtol=1e-6
    )
    # nobody alive at a step: a number, not 0 / 0
    nobody = episodes_of(np.zeros((2, 3), int), np.ones((2, 3)), [1, 2])
    assert np.isfinite(reinforce.BASELINES["mean"](nobody, reinforce.credit(nobody, True), critic)).all()


def test_the_critic_sees_the_state_and_the_clock():
    """Forward pass in NumPy, float64; one value for each step, not a column of them."""
    reinforce.configure(["HIDDEN_SIZE=8"])
    critic, episodes = reinforce.Critic(nnx.Rngs(3)), random_episodes()
    t = np.broadcast_to(np.arange(20) / 500, (6, 20))
    x = np.concatenate([np.asarray(episodes.obs) / [2.4, 3.0, 0.21, 3.0], t[..., None]], axis=-1)
    for layer in (critic.hidden1, critic.hidden2):
        x = np.maximum(x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...]), 0)
    value = x @ np.asarray(critic.output.kernel[...], np.float64) + np.asarray(critic.output.bias[...])
    largest = (1 - 0.99**500) / (1 - 0.99)  # geometric series
    baseline = reinforce.BASELINES["critic"](episodes, reinforce.credit(episodes, True), critic)
    assert baseline.shape == (6, 20)
    # float32 sums of values of size 100
    np.testing.assert_allclose(baseline, largest * value[..., 0], rtol=1e-4, atol=1e-3)


# --- the gradient, against exact expectations on worlds small enough to enumerate


def logits_64(weights, obs):
    """The actor's forward pass in NumPy, float64; `weights` as `params` lists them (bias before kernel)."""
    bias1, kernel1, bias2, kernel2, bias3, kernel3 = weights
    x = np.maximum(obs / np.array([2.4, 3.0, 0.21, 3.0]) @ kernel1 + bias1, 0)
    return np.maximum(x @ kernel2 + bias2, 0) @ kernel3 + bias3


class SmallWorld:
    """Up to three actions; what is seen, earned and when it ends depends on all actions so far."""

    def __init__(self, steps, seed=0):
        rng = np.random.default_rng(seed)
        self.sequences = np.array(list(itertools.product((0, 1), repeat=steps)))  # [N, T]
        table = {}
        obs, reward, alive = [], [], []
        for sequence in self.sequences:
            rows = []
            for t in range(steps):
                seen, done = tuple(sequence[:t]), tuple(sequence[: t + 1])
                table.setdefault(("obs", seen), rng.normal(size=4))
                table.setdefault(("reward", done), 2 + rng.normal())  # mostly positive, as in CartPole
                over = steps == 3 and seen[:1] == (1,) and t >= 2  # action 1 at first: over after two steps
                rows.append((table["obs", seen], table["reward", done], not over))
            obs.append([row[0] for row in rows])
            reward.append([row[1] for row in rows])
            alive.append([row[2] for row in rows])
        self.obs, self.reward, self.alive = np.array(obs), np.array(reward), np.array(alive)
        self.episodes = episodes_of(self.sequences, self.reward, self.alive.sum(axis=1), self.obs)

    def probabilities(self, weights):
        """Of each sequence, [N]; actions after the end are drawn too and change nothing."""
        logits = logits_64(weights, self.obs)  # [N, T, 2]
        probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        return np.take_along_axis(probs, self.sequences[..., None], axis=-1)[..., 0].prod(axis=1)

    def gradient(self, weights, gamma):
        """Central differences of the exact expected return J = sum over sequences of p * return."""
        returns = (gamma ** np.arange(self.reward.shape[1]) * self.reward * self.alive).sum(axis=1)
        weights = [w.astype(np.float64) for w in weights]
        result = []
        for w in weights:
            slopes = np.zeros(w.shape)
            for index in np.ndindex(w.shape):
                kept = w[index]
                values = []
                for move in (1e-6, -1e-6):
                    w[index] = kept + move
                    values.append(self.probabilities(weights) @ returns)
                w[index] = kept
                slopes[index] = (values[0] - values[1]) / 2e-6
            result.append(slopes.ravel())
        return np.concatenate(result)


def expected_estimate(actor, world, probabilities, advantage):
    """The estimate's exact mean: every sequence once, each weighted by its probability."""
    weighted = advantage * (len(probabilities) * probabilities)[:, None]
    return -flat(nnx.grad(reinforce.policy_loss)(actor, world.episodes, jnp.array(weighted, jnp.float32)))


# return to go is the exact gradient without discount; the whole return with any (see `credit`)
@pytest.mark.parametrize("reward_to_go, gamma", [(True, 1.0), (False, 1.0), (False, 0.7)])
@pytest.mark.parametrize("baseline", ["none", "critic"])
def test_the_expected_estimate_is_the_gradient_of_the_expected_return(reward_to_go, gamma, baseline):
    reinforce.configure(["HIDDEN_SIZE=4", f"GAMMA={gamma}"])
    world, actor = SmallWorld(3), reinforce.Actor(nnx.Rngs(1))
    exact = world.gradient(params(actor), gamma)
    earned = reinforce.credit(world.episodes, reward_to_go)
    critic = reinforce.Critic(nnx.Rngs(2))
    # wrong values, but of the returns' size: about 2, and different from state to state
    largest = sum(gamma**k for k in range(500))
    critic.output.kernel[...] = critic.output.kernel[...] * 20 / largest
    critic.output.bias[...] = jnp.array([2 / largest])
    subtracted = reinforce.BASELINES[baseline](world.episodes, earned, critic)
    assert baseline == "none" or (np.abs(subtracted).max() > 2 and np.std(subtracted) > 0.1)
    estimate = expected_estimate(actor, world, world.probabilities(params(actor)), earned - subtracted)
    assert np.abs(exact).max() > 0.1
    # float32 gradients of size 1 against float64 differences, which are good to about 1e-8
    np.testing.assert_allclose(estimate, exact, atol=1e-5)


@pytest.mark.parametrize("batch", [2, 3])
def test_the_batch_mean_shrinks_the_gradient_by_what_its_docstring_says(batch):
    """All batches of a one-step world: the expected estimate is (B - 1) / B of the gradient, exactly."""
    reinforce.configure(["HIDDEN_SIZE=4"])
    world, actor = SmallWorld(1), reinforce.Actor(nnx.Rngs(1))
    probabilities = world.probabilities(params(actor))
    total = 0.0
    for drawn in itertools.product(range(2), repeat=batch):
        episodes = jax.tree.map(lambda x, drawn=drawn: x[jnp.array(drawn)], world.episodes)
        earned = reinforce.credit(episodes, True)
        advantage = earned - reinforce.BASELINES["mean"](episodes, earned, None)
        estimate = -flat(nnx.grad(reinforce.policy_loss)(actor, episodes, advantage))
        total = total + probabilities[list(drawn)].prod() * estimate
    exact = world.gradient(params(actor), 1.0)
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(total, (batch - 1) / batch * exact, atol=1e-6)  # float32, size 0.1


def test_the_loss_sums_over_steps_and_averages_over_episodes():
    reinforce.configure(["HIDDEN_SIZE=4"])
    actor, episodes = reinforce.Actor(nnx.Rngs(0)), random_episodes()
    logits = logits_64([w.astype(np.float64) for w in params(actor)], np.asarray(episodes.obs))
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    advantage = np.random.default_rng(1).normal(size=episodes.action.shape)
    by_hand = 0.0
    for b, t in np.ndindex(episodes.action.shape):
        if episodes.alive[b, t]:
            by_hand -= log_probs[b, t, episodes.action[b, t]] * advantage[b, t] / 6
    assert float(reinforce.policy_loss(actor, episodes, jnp.array(advantage, jnp.float32))) == pytest.approx(
        by_hand, rel=1e-5  # a float32 sum of 63 terms
    )  # fmt: skip


def test_what_is_played_after_the_end_changes_nothing():
    reinforce.configure(["HIDDEN_SIZE=8"])
    actor, critic, episodes = reinforce.Actor(nnx.Rngs(0)), reinforce.Critic(nnx.Rngs(0)), random_episodes()
    dead = episodes.alive == 0
    garbage = episodes._replace(
        obs=jnp.where(dead[..., None], 7.0, episodes.obs),
        action=jnp.where(dead, 1 - episodes.action, episodes.action),
    )
    for reward_to_go, baseline in itertools.product((True, False), reinforce.BASELINES):
        gradients = []
        for these in (episodes, garbage):
            earned = reinforce.credit(these, reward_to_go)
            advantage = earned - reinforce.BASELINES[baseline](these, earned, critic)
            gradients.append(flat(nnx.grad(reinforce.policy_loss)(actor, these, advantage)))
        np.testing.assert_array_equal(*gradients)
        assert np.abs(gradients[0]).max() > 1e-3


# --- the critic


def test_the_actors_loss_does_not_move_the_critic():
    reinforce.configure(["HIDDEN_SIZE=8"])
    actor, episodes = reinforce.Actor(nnx.Rngs(0)), random_episodes()
    earned = reinforce.credit(episodes, True)

    def loss(critic):
        return reinforce.policy_loss(
            actor, episodes, earned - reinforce.BASELINES["critic"](episodes, earned, critic)
        )

    assert (flat(nnx.grad(loss)(reinforce.Critic(nnx.Rngs(0)))) == 0).all()


def test_the_critic_loss_by_hand():
    """[N, 1] less [N] would be a square, and its mean a perfectly good number."""
    reinforce.configure(["HIDDEN_SIZE=8"])
    critic, rng = reinforce.Critic(nnx.Rngs(0)), np.random.default_rng(0)
    obs, t, credit = rng.normal(size=(50, 4)), rng.integers(0, 500, 50), 50 * rng.normal(size=50)
    values = np.array([float(critic(jnp.array(o), jnp.array(s))) for o, s in zip(obs, t)])
    loss = reinforce.critic_loss(critic, jnp.array(obs), jnp.array(t), jnp.array(credit))
    assert float(loss) == pytest.approx(((credit - values) ** 2).mean(), rel=1e-5)  # float32


def test_the_critic_learns_from_the_steps_that_were_played_only(monkeypatch):
    """Returns 100 while alive, and a trap after the end: the critic must come to 100 where it was alive."""
    monkeypatch.setattr(reinforce, "MAX_EPISODE_STEPS", 20)
    reinforce.configure(["CRITIC_STEPS=600", "CRITIC_BATCH_SIZE=32", "HIDDEN_SIZE=16"])
    episodes = random_episodes()
    target = jnp.where(episodes.alive > 0, 10.0, -1000.0)
    critic = reinforce.Critic(nnx.Rngs(0))
    optimizer = nnx.Optimizer(critic, optax.adam(3e-3), wrt=nnx.Param)
    reinforce.train_critic(critic, optimizer, episodes, target, jax.random.key(0))
    values = np.asarray(reinforce.BASELINES["critic"](episodes, target, critic))
    # Adam with a constant rate keeps jumping by a few percent; one step in 32 at -1000 would pull it to -20
    np.testing.assert_allclose(values[np.asarray(episodes.alive) > 0], 10, atol=1.5)


def test_the_critic_has_not_seen_the_returns_it_judges():
    """One step of the actor, with a rate of 1, is the estimate with the critic as it was before."""
    reinforce.configure([*SHORT, "CRITIC_LEARNING_RATE=0.1"])
    rng = jax.random.key(5)
    actor, critic = reinforce.Actor(nnx.Rngs(0)), reinforce.Critic(nnx.Rngs(1))
    actor_before, critic_before = nnx.clone(actor), nnx.clone(critic)
    optimizers = [nnx.Optimizer(network, optax.sgd(1.0), wrt=nnx.Param) for network in (actor, critic)]
    agent = reinforce.Agent(actor, critic, *optimizers, jnp.int32(0), jnp.int32(0), actor, jnp.float32(0))
    agent, metrics = reinforce.train_step(agent, rng)

    episodes = reinforce.play(actor_before, jax.random.split(rng)[0])
    earned = reinforce.credit(episodes, True)
    advantage = earned - reinforce.BASELINES["critic"](episodes, earned, critic_before)
    by_hand = nnx.grad(reinforce.policy_loss)(actor_before, episodes, advantage)
    for old, new, gradient in zip(params(actor_before), params(agent.actor), jax.tree.leaves(by_hand)):
        # weights move by up to hundreds at this rate: float32 differences of them
        np.testing.assert_allclose(old - new, gradient, rtol=1e-4, atol=1e-3)
    assert float(metrics.gradient_norm) == pytest.approx(np.linalg.norm(flat(by_hand)), rel=1e-4)
    assert any((a != b).any() for a, b in zip(params(critic_before), params(agent.critic)))
    assert (agent.env_step, agent.num_updates) == (episodes.alive.sum(), 1)


# --- the variance, measured


def test_spread_of_recovers_a_known_mean_and_covariance():
    rng = np.random.default_rng(0)
    expected, deviations = np.array([3.0, -1.0, 0.0, 2.0]), np.array([1.0, 5.0, 0.5, 2.0])
    found = reinforce.spread_of(expected + deviations * rng.normal(size=(4_000, 4)))
    for key, value in (("trace", (deviations**2).sum()), ("squared_norm", (expected**2).sum())):
        assert 0 < found[f"{key}_error"] < 0.05 * value
        assert abs(found[key] - value) < 4 * found[f"{key}_error"]  # 4 standard errors
    assert found["ratio"] == pytest.approx(found["trace"] / found["squared_norm"])
    # the mean of 10 estimates of nothing is 10 times shorter than one, and not 0: no signal may be claimed
    runs = [reinforce.spread_of(deviations * rng.normal(size=(10, 4))) for _ in range(400)]
    lengths = [run["squared_norm"] for run in runs]
    assert abs(np.mean(lengths)) < 4 * np.std(lengths) / 20
    assert np.isnan(reinforce.spread_of(deviations * rng.normal(size=(10, 4)))["ratio"])


@pytest.fixture(scope="module")
def frozen_estimates():
    """A policy that lasts about 200 steps, its critic, and what each estimator makes of 96 batches."""
    reinforce.configure(["NUM_STEPS=10000"])
    _, _, snapshots = train()
    rngs = jax.random.split(jax.random.key(7), 96)
    actor, critic = unstack(snapshots, (0, 0))
    estimates, _ = jax.jit(lambda *x: reinforce.gradient_estimates(*x))(actor, critic, rngs)
    estimates = np.asarray(estimates, np.float64)
    return {which: estimates[:, i] for i, which in enumerate(reinforce.ESTIMATORS)}


def test_each_baseline_lowers_the_variance(frozen_estimates):
    trace = {which: reinforce.spread_of(g)["trace"] for which, g in frozen_estimates.items()}
    # measured ratios are 2 and 5 with errors of a tenth: the marks are far outside of luck
    assert trace[False, "none"] > 1.3 * trace[True, "none"]
    assert trace[True, "none"] > 2 * trace[True, "mean"]
    assert trace[True, "none"] > 2 * trace[True, "critic"]


def along(direction, estimates):
    """Mean and standard error of the estimates along a direction, in units of its length."""
    values = estimates @ direction / np.linalg.norm(direction)
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def test_unbiased_baselines_have_the_same_mean_gradient(frozen_estimates):
    none, critic = frozen_estimates[True, "none"], frozen_estimates[True, "critic"]
    direction = critic[48:].mean(axis=0)  # from other batches than those that are projected on it
    length, error = along(direction, critic[:48])
    assert length > 4 * error  # there is a gradient to agree about
    difference, error = along(direction, none[:48] - critic[:48])
    assert abs(difference) < 4 * error
    # the same in directions that have nothing to do with the gradient
    for seed in range(20):
        difference, error = along(np.random.default_rng(seed).normal(size=none.shape[1]), none - critic)
        assert abs(difference) < 4.5 * error  # of 20 draws beyond 4.5 errors: one in 7,000
    # the batch mean has its own episode in it: shorter
    shorter, error = along(direction, critic[:48] - frozen_estimates[True, "mean"][:48])
    assert shorter > 2 * error


# --- the loop


def test_a_changed_constant_is_seen_by_the_next_training():
    """jax keeps traces by function: a loop body outside of `train` would silently keep the old constant."""
    results = []
    for changes in (["BASELINE=none"], ["BASELINE=none", "REWARD_TO_GO=False"]):
        reinforce.configure([*SHORT, *changes])
        agent, log, _ = train()
        results.append(params(unstack(agent.actor)))
        # nothing subtracted, nothing explained
        np.testing.assert_allclose(log.metrics.explained_variance, 0, atol=1e-6)
    assert any((a != b).any() for a, b in zip(*results))


def test_environment_steps_are_those_played_and_seeds_do_not_see_each_other():
    reinforce.configure([*SHORT, "BASELINE=mean"])
    together, log, snapshots = train(seeds=(3, 4))
    alone, log_alone, _ = train(seeds=(4,))
    for a, b in zip(params(unstack(together.actor, 1)), params(unstack(alone.actor))):
        np.testing.assert_allclose(a, b, atol=1e-5)  # a few Adam steps, matrix products in another order
    # every step earns 1: updates x episodes x mean return, interval by interval, is what was played
    for one in (log, log_alone):
        updates = np.diff(one.num_updates, axis=1, prepend=0)
        played = (updates * 4 * one.metrics.episode_return).sum(axis=1)
        np.testing.assert_allclose(played, one.env_step[:, -1], rtol=1e-5)  # float32 means
        assert (one.env_step[:, 0] >= 300).all() and (one.env_step[:, 1] >= 600).all()
        assert (one.env_step[:, 1] < 600 + 4 * 500).all()
    for a, b in zip(params(unstack(snapshots[0], (0, -1))), params(unstack(together.actor))):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(together.best_return, log.eval_return.max(axis=1))


def test_a_baseline_that_knows_everything_explains_everything(monkeypatch):
    """Episodes all cut off after 5 steps are equal: the mean at each step is what each of them earns."""
    monkeypatch.setattr(reinforce, "MAX_EPISODE_STEPS", 5)
    reinforce.configure([*SHORT, "BASELINE=mean"])
    log = train()[1]
    np.testing.assert_allclose(log.metrics.explained_variance, 1, atol=1e-5)
    np.testing.assert_array_equal(log.metrics.truncated, 1.0)
    np.testing.assert_array_equal(log.metrics.episode_return, 5.0)


def test_quick_evaluate_plays_greedily_to_the_fall():
    actor = reinforce.Actor(nnx.Rngs(0))
    actor.output.kernel[...] = jnp.zeros_like(actor.output.kernel[...])
    actor.output.bias[...] = jnp.array([0.0, 0.1])  # nearly a coin, but the greedy policy always pushes right
    assert 5 < reinforce.quick_evaluate(actor, jax.random.key(0)) < 12


def test_evaluate_plays_cart_pole_v1():
    reinforce.configure(["EVAL_EPISODES=4"])
    actors = nnx.vmap(lambda key: reinforce.Actor(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    returns = reinforce.evaluate(actors)
    assert returns.shape == (3, 4)
    for s in range(3):
        actor = unstack(actors, s)
        for e in range(4):
            env = gymnasium.make("CartPole-v1")
            obs, _ = env.reset(seed=e)
            total, ended = 0.0, False
            while not ended:
                obs, reward, terminated, truncated, _ = env.step(int(actor(jnp.array(obs)).argmax()))
                total, ended = total + reward, terminated or truncated
            assert returns[s, e] == total


def test_three_seeds_learn_to_balance():
    """Ten seeds of ten balance for 500 steps; the mark leaves room for other machines' rounding."""
    reinforce.configure(["NUM_SEEDS=3", "EVAL_EPISODES=30"])
    agents, log, _, _, _ = reinforce.train_seeds()
    returns = reinforce.evaluate(agents.actor).mean(axis=1)
    assert (returns >= 475).all(), returns
    assert (log.metrics.explained_variance[:, -1] > 0.9).all()


# --- the script as a reader runs it

QUICK = [*SHORT, "NUM_SEEDS=2", "EVAL_EPISODES=2"]


def run_script(folder, *arguments):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles faster
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_script_runs_and_leaves_its_results(tmp_path):
    done = run_script(tmp_path, *QUICK, "RUN_DIR=mine")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert set(result) == {
        "eval_return", "best_eval_return", "env_steps", "seconds", "compile_seconds", "train_seconds",
    }  # fmt: skip
    assert len(result["eval_return"]) == len(result["best_eval_return"]) == len(result["env_steps"]) == 2
    assert all(600 <= steps < 2600 for steps in result["env_steps"])
    assert 0 < result["compile_seconds"] + result["train_seconds"] < result["seconds"]
    rows = read(tmp_path / "mine" / "log.csv")
    assert [row["seed"] for row in rows] == ["0", "0", "1", "1"]
    assert {"env_step", "num_updates", "eval_return", *reinforce.Metrics._fields} < set(rows[0])
    assert [int(row["env_step"]) for row in rows[1::2]] == result["env_steps"]
    for name in ("learning_curve.png", "constants.json"):
        assert (tmp_path / "mine" / name).stat().st_size > 100
    assert "mine" in done.stdout
    # a second run does not write over the first
    again = run_script(tmp_path, *QUICK, "RUN_DIR=mine")
    assert again.returncode == 2 and again.stderr.startswith("error: RUN_DIR=mine: ")


@pytest.mark.slow
def test_the_comparison_leaves_its_tables_and_pictures(tmp_path):
    smaller = [
        "NUM_STEPS=20000",
        "EVAL_INTERVAL=5000",
        "NUM_SEEDS=2",
        "EVAL_EPISODES=2",
        "VARIANCE_BATCHES=4",
    ]
    done = run_script(tmp_path, *smaller, "COMPARE=True", "RUN_DIR=mine")
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "mine" / "compare.csv")
    labels = [reinforce.label_of(changes) for changes in reinforce.COMPARISON]
    assert [(row["changed"], row["seed"]) for row in rows] == [(x, seed) for x in labels for seed in "01"]
    rows = read(tmp_path / "mine" / "gradient_variance.csv")
    assert len(rows) % len(reinforce.ESTIMATORS) == 0 and len(rows) >= 2 * len(reinforce.ESTIMATORS)
    for name in ("compare.png", "gradient_variance.png"):
        assert (tmp_path / "mine" / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    "argument, said",
    [
        ("BASELINES=none", "BASELINE"),
        ("BASELINE=best", "BASELINE=best: must be one of none, mean, critic"),
        ("GAMMA=[", "GAMMA"),
        ("GAMMA=${x}", "GAMMA"),
        ("GAMMA=nan", "GAMMA"),
        ("GAMMA=1.01", "GAMMA=1.01: must be from 0 to 1"),
        ("REWARD_TO_GO=1", "REWARD_TO_GO"),
        ("BATCH_SIZE=2.5", "BATCH_SIZE"),
        ("BATCH_SIZE=1", "BATCH_SIZE=1: must be from 2"),
        ("NUM_STEPS=100001", "NUM_STEPS=100001: must be a multiple of EVAL_INTERVAL=5000"),
        ("NUM_STEPS=0", "NUM_STEPS=0: must be"),
        ("EVAL_INTERVAL=0", "EVAL_INTERVAL=0: must be 1"),
        ("LEARNING_RATE=0", "LEARNING_RATE=0.0: must be"),
        ("CRITIC_LEARNING_RATE=.inf", "CRITIC_LEARNING_RATE=inf: must be"),
        ("CRITIC_STEPS=0", "CRITIC_STEPS=0: must be"),
        ("CRITIC_BATCH_SIZE=0", "CRITIC_BATCH_SIZE=0: must be"),
        ("HIDDEN_SIZE=0", "HIDDEN_SIZE=0: must be"),
        ("SEED=-1", "SEED=-1: must be"),
        ("NUM_SEEDS=0", "NUM_SEEDS=0: must be"),
        ("EVAL_EPISODES=0", "EVAL_EPISODES=0: must be"),
        ("VARIANCE_BATCHES=1", "VARIANCE_BATCHES=1: must be"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_remedy(argument, said):
    with pytest.raises(reinforce.UserError, match=re.escape(said)) as error:
        reinforce.configure([argument])
    assert "\n" not in str(error.value)


def test_bad_input_gets_one_line_and_exit_code_2(tmp_path):
    done = run_script(tmp_path, "BASELINE=best")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: BASELINE=best")
    # a row of the comparison that clashes with the command line is refused before any training
    done = run_script(tmp_path, "COMPARE=True", "NUM_STEPS=25000")
    assert done.returncode == 2 and "EVAL_INTERVAL=20000" in done.stderr
