"""Folder 3, why a baseline: expectations against enumerations, formulas by hand, the masks, the measured
variances, and the script as a reader runs it."""

import itertools
from dataclasses import replace
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from folders import load, training
from jax.flatten_util import ravel_pytree

reinforce, ppo, pendulum = (load("3_Pendulum", name) for name in ("reinforce", "ppo", "pendulum"))
environments = load("3_Pendulum", "environments")
SHORT = ["NUM_STEPS=600", "EVAL_INTERVAL=300", "NUM_ENVS=4", "HIDDEN_SIZE=8", "CRITIC_STEPS=2"]


def train(c, seeds=(0,)):
    """Agents and log of these seeds."""
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jax.jit(jax.vmap(lambda key: training(reinforce, c, key, c.NUM_STEPS // c.EVAL_INTERVAL)))(keys)


def unstack(tree, index=0):
    return jax.tree.map(lambda x: x[index], tree)


def params(network):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(network, nnx.Param))]


def actor_of(c, seed=0):
    return reinforce.make_networks(c, *[jax.random.key(seed)] * 2)[0]


def critic_of(c, seed=0):
    return reinforce.make_networks(c, *[jax.random.key(seed)] * 2)[1]


def returns_to_go(c, rollout):
    """As `update` makes them."""
    return rollout.alive * reinforce.discounted_returns(rollout.reward, c.GAMMA)


def whole_return(c, rollout):
    return rollout.alive * reinforce.whole_return(rollout.reward, c.GAMMA)


# op by op these would cost more than their compiling
gradient_of = jax.jit(nnx.grad(reinforce.actor_loss))
collect = jax.jit(reinforce.collect, static_argnums=0)


def flat(gradient):
    return np.asarray(ravel_pytree(gradient)[0], np.float64)


def rollout_of(actions, rewards, lengths, obs=None):
    """Episodes [B, T] that end after `lengths` steps; rewards after the end are 0, as `collect` does."""
    actions, rewards = np.asarray(actions), np.asarray(rewards, np.float32)
    alive = (np.arange(actions.shape[1]) < np.asarray(lengths)[:, None]).astype(np.float32)
    obs = np.zeros((*actions.shape, 4), np.float32) if obs is None else np.asarray(obs, np.float32)
    return reinforce.Rollout(
        jnp.array(obs),
        jnp.array(actions),
        jnp.array(rewards * alive),
        jnp.array(alive),
        jnp.zeros(alive.shape, bool),
    )


def random_rollout(batch=6, steps=20, seed=0):
    rng = np.random.default_rng(seed)
    return rollout_of(
        rng.integers(0, 2, (batch, steps)),
        rng.normal(size=(batch, steps)),
        rng.permutation(np.linspace(1, steps, batch).astype(int)),
        rng.normal(size=(batch, steps, 4)),
    )


def batch_of(rollout, advantage, returns=None):
    """What the losses are given of a rollout."""
    advantage = jnp.asarray(advantage, jnp.float32)
    returns = advantage if returns is None else returns
    return reinforce.Batch(rollout.obs, rollout.action, rollout.alive, advantage, returns)


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

    def step(obs, action):
        return reinforce.ENV.step(environments.EnvState(obs, obs, jnp.int32(0), jnp.float32(0)), action)

    following, transition = jax.vmap(step)(np.array(before), np.array(actions))
    np.testing.assert_array_equal(following.obs, transition.next_obs)
    np.testing.assert_array_equal(following.episode_return, 1.0)
    # Gymnasium computes in float64 and shows float32: a few units in the last place of numbers up to about 4
    np.testing.assert_allclose(transition.next_obs, np.array(after), atol=2e-6, rtol=1e-6)
    np.testing.assert_array_equal(transition.terminated, fell)
    np.testing.assert_array_equal(transition.reward, 1.0)


def test_episodes_end_once_and_nothing_after_the_end_counts(monkeypatch):
    """Replayed by Gymnasium: an episode ends where its pole falls, or at the limit, which cuts it off."""
    monkeypatch.setattr(reinforce, "ENV", replace(reinforce.ENV, max_episode_steps=25))
    c = reinforce.configure(["NUM_ENVS=200"])
    episodes = jax.tree.map(
        np.asarray, jax.jit(partial(reinforce.collect, c))(actor_of(c, 0), jax.random.key(0))
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
    c = reinforce.configure(["NUM_ENVS=200"])
    actor = actor_of(c, 0)
    actor.output.kernel[...] = jnp.zeros_like(actor.output.kernel[...])
    actor.output.bias[...] = jnp.log(jnp.array([0.3, 0.7]))
    episodes = jax.jit(partial(reinforce.collect, c))(actor, jax.random.key(0))
    # 200 episodes x 500 draws, padding included: 5 standard deviations are 0.0072
    assert float(episodes.action.mean()) == pytest.approx(0.7, abs=0.0072)


# --- credit

CREDIT = {True: returns_to_go, False: whole_return}


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_to_go_equal_a_brute_force_sum(gamma):
    c = reinforce.configure([f"GAMMA={gamma}"])
    episodes = random_rollout()
    reward, alive = np.asarray(episodes.reward, np.float64), np.asarray(episodes.alive)
    lengths = alive.sum(axis=1).astype(int)
    assert lengths.min() == 1 and lengths.max() == 20
    by_hand = np.zeros_like(reward)
    for b, length in enumerate(lengths):
        for t in range(length):
            by_hand[b, t] = sum(gamma ** (k - t) * reward[b, k] for k in range(t, length))
    # float32 sums of at most 20 numbers of size 1
    np.testing.assert_allclose(returns_to_go(c, episodes), by_hand, atol=1e-5)
    whole = np.where(alive > 0, by_hand[:, :1], 0)
    np.testing.assert_allclose(whole_return(c, episodes), whole, atol=1e-5)


# --- baselines


def test_baselines_by_hand():
    c = reinforce.configure(["GAMMA=0.5"])
    episodes = rollout_of(np.zeros((3, 3), int), np.ones((3, 3)), [3, 2, 1])
    earned = returns_to_go(c, episodes)
    # every number here is a small dyadic fraction, but for the thirds of the mean: float32
    np.testing.assert_array_equal(earned, [[1.75, 1.5, 1], [1.5, 1, 0], [1, 0, 0]])
    critic = critic_of(c, 0)
    np.testing.assert_array_equal(
        reinforce.BASELINES["no_baseline"](episodes, earned, critic), np.zeros((3, 3))
    )
    # step 0: three alive, step 1: two, step 2: the last survivor is compared with itself
    np.testing.assert_allclose(
        reinforce.BASELINES["batch_mean"](episodes, earned, critic), [[4.25 / 3, 1.25, 1]] * 3, rtol=1e-6
    )
    # nobody alive at a step: a number, not 0 / 0
    nobody = rollout_of(np.zeros((2, 3), int), np.ones((2, 3)), [1, 2])
    assert np.isfinite(reinforce.BASELINES["batch_mean"](nobody, returns_to_go(c, nobody), critic)).all()


def test_the_critic_sees_the_state_and_the_clock():
    """Forward pass in NumPy, float64; one value for each step, not a column of them."""
    c = reinforce.configure(["HIDDEN_SIZE=8"])
    critic, episodes = critic_of(c, 3), random_rollout()
    t = np.broadcast_to(np.arange(20) / 500, (6, 20))
    x = np.concatenate([np.asarray(episodes.obs) / [2.4, 3.0, 0.21, 3.0], t[..., None]], axis=-1)
    for layer in (critic.hidden_1, critic.hidden_2):
        x = np.maximum(x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...]), 0)
    value = x @ np.asarray(critic.output.kernel[...], np.float64) + np.asarray(critic.output.bias[...])
    largest = (1 - 0.99**500) / (1 - 0.99)  # geometric series
    baseline = reinforce.BASELINES["critic_baseline"](episodes, returns_to_go(c, episodes), critic)
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
        self.episodes = rollout_of(self.sequences, self.reward, self.alive.sum(axis=1), self.obs)

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
    return -flat(gradient_of(actor, batch_of(world.episodes, weighted)))


# return to go is the exact gradient without discount; the whole return with any (see `credit`)
@pytest.mark.parametrize("reward_to_go, gamma", [(True, 1.0), (False, 1.0), (False, 0.7)])
@pytest.mark.parametrize("baseline", ["no_baseline", "critic_baseline"])
def test_the_expected_estimate_is_the_gradient_of_the_expected_return(reward_to_go, gamma, baseline):
    c = reinforce.configure(["HIDDEN_SIZE=4", f"GAMMA={gamma}"])
    world, actor = SmallWorld(3), actor_of(c, 1)
    exact = world.gradient(params(actor), gamma)
    earned = CREDIT[reward_to_go](c, world.episodes)
    critic = critic_of(c, 2)
    # wrong values, but of the returns' size: about 2, and different from state to state
    largest = sum(gamma**k for k in range(500))
    critic.output.kernel[...] = critic.output.kernel[...] * 20 / largest
    critic.output.bias[...] = jnp.array([2 / largest])
    subtracted = reinforce.BASELINES[baseline](world.episodes, earned, critic)
    assert baseline == "no_baseline" or (np.abs(subtracted).max() > 2 and np.std(subtracted) > 0.1)
    estimate = expected_estimate(actor, world, world.probabilities(params(actor)), earned - subtracted)
    assert np.abs(exact).max() > 0.1
    # float32 gradients of size 1 against float64 differences, which are good to about 1e-8
    np.testing.assert_allclose(estimate, exact, atol=1e-5)


@pytest.mark.parametrize("batch", [2, 3])
def test_the_batch_mean_shrinks_the_gradient_by_what_its_docstring_says(batch):
    """All batches of a one-step world: the expected estimate is (B - 1) / B of the gradient, exactly."""
    c = reinforce.configure(["HIDDEN_SIZE=4"])
    world, actor = SmallWorld(1), actor_of(c, 1)
    probabilities = world.probabilities(params(actor))
    total = 0.0
    for drawn in itertools.product(range(2), repeat=batch):
        episodes = jax.tree.map(lambda x, drawn=drawn: x[jnp.array(drawn)], world.episodes)
        earned = returns_to_go(c, episodes)
        advantage = earned - reinforce.BASELINES["batch_mean"](episodes, earned, None)
        estimate = -flat(gradient_of(actor, batch_of(episodes, advantage)))
        total = total + probabilities[list(drawn)].prod() * estimate
    exact = world.gradient(params(actor), 1.0)
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(total, (batch - 1) / batch * exact, atol=1e-6)  # float32, size 0.1


def test_the_loss_sums_over_steps_and_averages_over_episodes():
    c = reinforce.configure(["HIDDEN_SIZE=4"])
    actor, episodes = actor_of(c, 0), random_rollout()
    logits = logits_64([w.astype(np.float64) for w in params(actor)], np.asarray(episodes.obs))
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    advantage = np.random.default_rng(1).normal(size=episodes.action.shape)
    by_hand = 0.0
    for b, t in np.ndindex(episodes.action.shape):
        if episodes.alive[b, t]:
            by_hand -= log_probs[b, t, episodes.action[b, t]] * advantage[b, t] / 6
    loss = float(reinforce.actor_loss(actor, batch_of(episodes, advantage)))
    assert loss == pytest.approx(by_hand, rel=1e-5)  # a float32 sum of 63 terms


def test_what_is_played_after_the_end_changes_nothing():
    c = reinforce.configure(["HIDDEN_SIZE=8"])
    actor, critic, episodes = actor_of(c, 0), critic_of(c, 0), random_rollout()
    dead = episodes.alive == 0
    garbage = episodes._replace(
        obs=jnp.where(dead[..., None], 7.0, episodes.obs),
        action=jnp.where(dead, 1 - episodes.action, episodes.action),
    )
    for reward_to_go, baseline in itertools.product((True, False), reinforce.BASELINES):
        gradients = []
        for these in (episodes, garbage):
            earned = CREDIT[reward_to_go](c, these)
            advantage = earned - reinforce.BASELINES[baseline](these, earned, critic)
            gradients.append(flat(gradient_of(actor, batch_of(these, advantage))))
        np.testing.assert_array_equal(*gradients)
        assert np.abs(gradients[0]).max() > 1e-3


# --- the critic


def test_the_actors_loss_does_not_move_the_critic():
    c = reinforce.configure(["HIDDEN_SIZE=8"])
    actor, episodes = actor_of(c, 0), random_rollout()
    earned = returns_to_go(c, episodes)

    def loss(critic):
        baseline = reinforce.BASELINES["critic_baseline"](episodes, earned, critic)
        return reinforce.actor_loss(actor, batch_of(episodes, earned - baseline))

    assert (flat(nnx.grad(loss)(critic_of(c, 0))) == 0).all()


def test_the_critic_loss_by_hand():
    """[N, 1] less [N] would be a square, and its mean a perfectly good number."""
    c = reinforce.configure(["HIDDEN_SIZE=8"])
    critic, rng = critic_of(c, 0), np.random.default_rng(0)
    obs, t, credit = rng.normal(size=(50, 4)), rng.integers(0, 500, 50), 50 * rng.normal(size=50)
    values = np.array([float(reinforce.value(critic, jnp.array(o), jnp.array(s))) for o, s in zip(obs, t)])
    loss = reinforce.critic_loss(critic, jnp.array(obs), jnp.array(t), jnp.array(credit))
    assert float(loss) == pytest.approx(((credit - values) ** 2).mean(), rel=1e-5)  # float32


def make_agent(c, seed=0):
    return reinforce.make_agent(c, jax.random.key(seed))


def test_the_critic_learns_from_the_steps_that_were_played_only(monkeypatch):
    """Returns 10 while alive, and a trap after the end: the critic must come to 10 where it was alive."""
    monkeypatch.setattr(reinforce, "ENV", replace(reinforce.ENV, max_episode_steps=20))
    c = reinforce.configure(["CRITIC_STEPS=600", "MINIBATCH_SIZE=32", "HIDDEN_SIZE=16"])
    episodes = random_rollout()
    target = jnp.where(episodes.alive > 0, 10.0, -1000.0)
    batch = batch_of(episodes, 0 * target, target)
    agent, _ = jax.jit(partial(reinforce.learn, c))(make_agent(c), batch, jax.random.key(0))
    values = np.asarray(reinforce.critic_baseline(episodes, target, agent.critic))
    # Adam with a constant rate keeps jumping by a few percent; one step in 32 at -1000 would pull it to -20
    np.testing.assert_allclose(values[np.asarray(episodes.alive) > 0], 10, atol=1.5)


def test_an_update_by_hand():
    """With plain SGD: the actor's step uses the critic as it was; then the critic learns from the returns."""
    c = reinforce.configure([*SHORT, "CRITIC_LEARNING_RATE=0.1"])
    rng, before = jax.random.key(5), make_agent(c)
    agent = jax.tree.map(jnp.copy, before)
    sgd = [nnx.Optimizer(network, optax.sgd(rate), wrt=nnx.Param) for network, rate in (
        (agent.actor, 1.0), (agent.critic, 1e-6)
    )]  # fmt: skip
    agent = agent._replace(actor_optimizer=sgd[0], critic_optimizer=sgd[1])
    agent, figures = jax.jit(partial(reinforce.update, c))(agent, rng)

    rollout = collect(c, before.actor, jax.random.split(rng)[0])
    returns = returns_to_go(c, rollout)
    advantage = returns - reinforce.critic_baseline(rollout, returns, before.critic)
    gradient = gradient_of(before.actor, batch_of(rollout, advantage))
    for old, new, slope in zip(params(before.actor), params(agent.actor), jax.tree.leaves(gradient)):
        # weights move by up to hundreds at this rate: float32 differences of them
        np.testing.assert_allclose(old - new, slope, rtol=1e-4, atol=1e-3)
    assert float(figures["gradient_norm"]) == pytest.approx(np.linalg.norm(flat(gradient)), rel=1e-4)
    played = np.asarray(rollout.alive) > 0
    losses = [
        np.mean(
            (np.asarray(returns) - np.asarray(reinforce.critic_baseline(rollout, returns, critic)))[played]
            ** 2
        )
        for critic in (before.critic, agent.critic)
    ]
    assert losses[1] < losses[0]  # two small steps downhill
    explained = 1 - np.asarray(advantage)[played].var() / np.asarray(returns)[played].var()
    assert float(figures["explained_variance"]) == pytest.approx(explained, rel=1e-3)
    probs = np.asarray(reinforce.policy(before.actor, rollout.obs).probs_parameter(), np.float64)[played]
    assert float(figures["entropy"]) == pytest.approx(-(probs * np.log(probs)).sum(axis=1).mean(), rel=1e-4)
    assert (agent.env_step, agent.num_updates) == (rollout.alive.sum(), 1)
    assert float(figures["episode_return"]) == pytest.approx(played.sum(axis=1).mean())
    assert float(figures["truncated"]) == 0  # an untrained policy falls


# --- the loop


@pytest.mark.parametrize("baseline, explained", [("batch_mean", 1), ("no_baseline", 0)])
def test_a_baseline_that_knows_everything_explains_everything(baseline, explained, monkeypatch):
    """Episodes all cut off after 5 steps are equal: the mean at each step is what each of them earns."""
    monkeypatch.setattr(reinforce, "ENV", replace(reinforce.ENV, max_episode_steps=5))
    c = reinforce.configure([*SHORT, f"BASELINE={baseline}"])
    _, figures = jax.jit(partial(reinforce.update, c))(make_agent(c), jax.random.key(0))
    assert float(figures["explained_variance"]) == pytest.approx(explained, abs=1e-5)
    assert (figures["truncated"], figures["episode_return"]) == (1.0, 5.0)


def test_whole_returns_are_learned_from_where_the_constant_says_so():
    """The same rollout, another gradient: its length by hand."""
    c = reinforce.configure([*SHORT, "BASELINE=no_baseline", "REWARD_TO_GO=False"])
    agent, rng = make_agent(c), jax.random.key(0)
    rollout = collect(c, agent.actor, jax.random.split(rng)[0])
    gradient = gradient_of(agent.actor, batch_of(rollout, whole_return(c, rollout)))
    critic = params(agent.critic)
    agent, figures = jax.jit(partial(reinforce.update, c))(agent, rng)
    assert float(figures["gradient_norm"]) == pytest.approx(np.linalg.norm(flat(gradient)), rel=1e-4)
    assert all((a == b).all() for a, b in zip(critic, params(agent.critic)))  # nobody asks it


def test_every_update_has_a_key_of_its_own(monkeypatch):
    """Three updates of 100 steps in each interval; the log has the mean of what each of them drew."""

    def update(c, agent, rng):
        figures = dict.fromkeys(reinforce.Log._fields[3:], jax.random.uniform(rng))
        return agent._replace(env_step=agent.env_step + 100, num_updates=agent.num_updates + 1), figures

    monkeypatch.setattr(reinforce, "update", update)
    monkeypatch.setattr(reinforce, "quick_evaluate", lambda env, policy, actor, rng: jax.random.uniform(rng))
    c = reinforce.configure(SHORT)
    _, log = train(c, seeds=(7,))
    learning_rng = jax.random.split(jax.random.key(7), 4)[3]
    drawn = [float(jax.random.uniform(jax.random.fold_in(learning_rng, i))) for i in range(6)]
    expected = np.reshape(drawn, (2, 3)).mean(axis=1)
    np.testing.assert_allclose(log.episode_return[0], expected, rtol=1e-6)  # float32
    np.testing.assert_array_equal(log.num_updates[0], [3, 6])
    assert log.eval_return[0, 0] == log.eval_return[0, 1]  # every look from the same first states


def test_quick_evaluate_plays_greedily_to_the_fall():
    actor = actor_of(reinforce.configure([]), 0)
    actor.output.kernel[...] = jnp.zeros_like(actor.output.kernel[...])
    actor.output.bias[...] = jnp.array([0.0, 0.1])  # nearly a coin, but the greedy policy always pushes right
    assert 5 < environments.quick_evaluate(reinforce.ENV, reinforce.policy, actor, jax.random.key(0)) < 12


def test_evaluate_plays_cart_pole_v1():
    c = reinforce.configure(["EVAL_EPISODES=4"])
    keys = jax.random.split(jax.random.key(0), 3)
    actors = nnx.vmap(lambda key: reinforce.make_networks(c, key, key)[0])(keys)
    returns = environments.evaluate(reinforce.ENV, reinforce.policy, actors, c.EVAL_EPISODES)
    act = jax.jit(lambda actor, obs: reinforce.policy(actor, obs).mode())
    assert returns.shape == (3, 4)
    for s in range(3):
        actor = unstack(actors, s)
        for e in range(4):
            env = gymnasium.make("CartPole-v1")
            obs, _ = env.reset(seed=e)
            total, ended = 0.0, False
            while not ended:
                obs, reward, terminated, truncated, _ = env.step(int(act(actor, obs)))
                total, ended = total + reward, terminated or truncated
            assert returns[s, e] == total


def test_two_seeds_learn_to_balance():
    """Ten seeds of ten balance for 500 steps; the mark leaves room for other machines' rounding."""
    c = reinforce.configure(["NUM_SEEDS=2", "EVAL_EPISODES=10", "NUM_STEPS=60_000", "EVAL_INTERVAL=20_000"])
    agents, log, _ = reinforce.train(c)
    returns = environments.evaluate(reinforce.ENV, reinforce.policy, agents.actor, c.EVAL_EPISODES).mean(
        axis=1
    )
    assert (returns >= 475).all(), returns
    assert (log.explained_variance[:, -1] > 0.9).all()
