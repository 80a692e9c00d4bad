"""Folder 3, REINFORCE: credit, baselines and an update by hand, the masks."""

import itertools
from dataclasses import replace
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from folders import flat, forward, load, of_sgd

reinforce = load("3_Pendulum", "reinforce")
# All that a figure below depends on: what the defaults are doesn't matter.
GIVEN = [
    "HIDDEN_SIZE=8",
    "GAMMA=0.99",
    "BASELINE=critic_baseline",
    "REWARD_TO_GO=True",
    "CRITIC_LEARNING_RATE=3e-3",
    "CRITIC_STEPS=2",
]

gradient_of = jax.jit(nnx.grad(reinforce.actor_loss))


def given(*arguments):
    return reinforce.settings.read(reinforce.Constants, [*GIVEN, *arguments])


def networks_of(*arguments, seed=0):
    c = given(*arguments)
    return c, *reinforce.make_networks(c, *[jax.random.key(seed)] * 2)


def agent_of(c):
    return jax.jit(partial(reinforce.make_agent, c))(0)


def credit_of(c, rollout):
    """As `update` makes it."""
    credit = reinforce.discounted_returns if c.REWARD_TO_GO else reinforce.whole_return
    return rollout.alive * credit(rollout.reward, c.GAMMA)


def rollout_of(actions, rewards, lengths, obs=None):
    """Episodes [B, T] that end after `lengths` steps; rewards after the end are 0, as `collect`
    does.
    """
    actions = np.asarray(actions)
    alive = (np.arange(actions.shape[1]) < np.asarray(lengths)[:, None]).astype(np.float32)
    obs = np.zeros((*actions.shape, 4)) if obs is None else obs
    arrays = np.float32(obs), actions, np.float32(rewards) * alive, alive, alive > 2
    return reinforce.Rollout(*map(jnp.array, arrays))


def random_rollout(batch=6, steps=20):
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(1, steps, batch).astype(int))
    rewards, obs = rng.normal(size=(batch, steps)), rng.normal(size=(batch, steps, 4))
    return rollout_of(rng.integers(0, 2, (batch, steps)), rewards, lengths, obs)


def batch_of(rollout, advantage, returns=None):
    """What the losses are given of a rollout."""
    advantage = jnp.asarray(advantage, jnp.float32)
    returns = advantage if returns is None else returns
    return reinforce.Batch(rollout.obs, rollout.action, rollout.alive, advantage, returns)


def test_episodes_end_once_and_nothing_after_the_end_counts(monkeypatch):
    """Replayed by Gymnasium: an episode ends where its pole falls, or at the limit, which cuts it
    off.

    The policy's logits are log 0.3 and log 0.7 everywhere: it plays action 1 seven times in ten.
    """
    monkeypatch.setattr(reinforce, "ENV", replace(reinforce.ENV, max_episode_steps=25))
    c, actor, _ = networks_of("NUM_ENVS=200")
    actor.output.kernel[...] = jnp.zeros_like(actor.output.kernel[...])
    actor.output.bias[...] = jnp.log(jnp.array([0.3, 0.7]))
    episodes = jax.tree.map(
        np.asarray, jax.jit(partial(reinforce.collect, c))(actor, jax.random.key(0))
    )
    # 200 episodes x 25 draws, padding included: 5 standard deviations are 0.032
    assert episodes.action.mean() == pytest.approx(0.7, abs=0.032)
    env = gymnasium.make("CartPole-v1").unwrapped
    for b in range(200):
        env.reset()
        env.state = episodes.obs[b, 0].astype(np.float64)
        steps, terminated = 0, False
        while not terminated and steps < 25:
            # rounding grows by about e^3.8 a second while a pole falls; 25 steps are half a second
            np.testing.assert_allclose(episodes.obs[b, steps], env.state, atol=1e-5)
            _, _, terminated, _, _ = env.step(int(episodes.action[b, steps]))
            steps += 1
        np.testing.assert_array_equal(episodes.alive[b], np.arange(25) < steps)
        np.testing.assert_array_equal(episodes.reward[b], episodes.alive[b])
        cut_off = (np.arange(25) == 24) & (not terminated)
        np.testing.assert_array_equal(episodes.truncated[b], cut_off)
    assert 0 < episodes.truncated.any(axis=1).sum() < 200  # both kinds of ends are among them


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_to_go_equal_a_brute_force_sum(gamma):
    c, episodes = given(f"GAMMA={gamma}"), random_rollout()
    reward, alive = np.asarray(episodes.reward, np.float64), np.asarray(episodes.alive)
    by_hand = np.zeros_like(reward)
    for b, t in np.ndindex(reward.shape):
        by_hand[b, t] = alive[b, t] * sum(gamma ** (k - t) * reward[b, k] for k in range(t, 20))
    # float32 sums of at most 20 numbers of size 1
    np.testing.assert_allclose(credit_of(c, episodes), by_hand, atol=1e-5)
    whole = np.where(alive > 0, by_hand[:, :1], 0)
    np.testing.assert_allclose(
        credit_of(replace(c, REWARD_TO_GO=False), episodes), whole, atol=1e-5
    )


def test_baselines_by_hand():
    c, episodes = given("GAMMA=0.5"), rollout_of(np.zeros((3, 3), int), 1, [3, 2, 1])
    earned = credit_of(c, episodes)
    # every number here is a small dyadic fraction, but for the thirds of the mean: float32
    np.testing.assert_array_equal(earned, [[1.75, 1.5, 1], [1.5, 1, 0], [1, 0, 0]])
    assert (reinforce.BASELINES["no_baseline"](episodes, earned, None) == 0).all()
    # step 0: three alive, step 1: two, step 2: the last survivor is compared with itself
    batch_mean = reinforce.BASELINES["batch_mean"]
    np.testing.assert_allclose(
        batch_mean(episodes, earned, None), [[4.25 / 3, 1.25, 1]] * 3, rtol=1e-6
    )
    # nobody alive at a step: a number, not 0 / 0
    nobody = rollout_of(np.zeros((2, 3), int), 1, [1, 2])
    assert np.isfinite(batch_mean(nobody, credit_of(c, nobody), None)).all()


def test_the_critic_sees_the_state_and_the_clock():
    """Forward pass in NumPy, float64; one value per step, not a column of them. Its loss, too."""
    c, _, critic = networks_of(seed=3)
    episodes, t = random_rollout(), np.broadcast_to(np.arange(20), (6, 20))
    x = np.concatenate(
        [episodes.obs / np.array([2.4, 3.0, 0.21, 3.0]), t[..., None] / 500], axis=-1
    )
    largest = (1 - 0.99**500) / (1 - 0.99)  # geometric series
    values = largest * forward(critic, x)[..., 0]
    returns = credit_of(c, episodes)
    baseline = reinforce.BASELINES["critic_baseline"](episodes, returns, critic)
    assert baseline.shape == (6, 20)
    # float32 sums of values of size 100
    np.testing.assert_allclose(baseline, values, rtol=1e-4, atol=1e-3)
    rows = (x.reshape(-1, *x.shape[2:]) for x in (episodes.obs, jnp.array(t), returns))
    loss = float(reinforce.critic_loss(critic, *rows))
    assert loss == pytest.approx(((np.asarray(returns) - values) ** 2).mean(), rel=1e-4)


# --- the gradient, against exact expectations on worlds small enough to enumerate


class SmallWorld:
    """Up to three actions; what is seen, earned and when it ends depends on all actions so far."""

    def __init__(self, steps):
        rng, obs, reward = np.random.default_rng(0), {}, {}
        self.sequences = np.array(list(itertools.product((0, 1), repeat=steps)))  # [N, T]
        for sequence, t in itertools.product(self.sequences.tolist(), range(steps)):
            obs.setdefault(tuple(sequence[:t]), rng.normal(size=4))
            # mostly positive, as in CartPole
            reward.setdefault(tuple(sequence[: t + 1]), 2 + rng.normal())
        lengths = [2 if steps == 3 and first == 1 else steps for first in self.sequences[:, 0]]
        seen = [[obs[tuple(s[:t])] for t in range(steps)] for s in self.sequences.tolist()]
        earned = [
            [reward[tuple(s[: t + 1])] for t in range(steps)] for s in self.sequences.tolist()
        ]
        self.episodes = rollout_of(self.sequences, earned, lengths, seen)

    def probabilities(self, actor):
        """Of each sequence, [N]; actions after the end are drawn too and change nothing."""
        log_probs = jax.nn.log_softmax(actor(self.episodes.obs))  # [N, T, 2]
        taken = jnp.take_along_axis(log_probs, self.episodes.action[..., None], axis=-1)
        return jnp.exp(taken.sum(axis=(1, 2)))

    def gradient(self, actor, gamma):
        """Of the exact expected return J = sum over sequences of p * return."""
        returns = (gamma ** jnp.arange(self.sequences.shape[1]) * self.episodes.reward).sum(axis=1)
        return flat(nnx.jit(nnx.grad(lambda actor: self.probabilities(actor) @ returns))(actor))


# return to go is the exact gradient without discount; the whole return with any (see
# `whole_return`)
@pytest.mark.parametrize("reward_to_go, gamma", [(True, 1.0), (False, 1.0), (False, 0.7)])
@pytest.mark.parametrize("baseline", ["no_baseline", "critic_baseline"])
def test_the_expected_estimate_is_the_gradient_of_the_expected_return(
    reward_to_go, gamma, baseline
):
    """The estimate's exact mean: every sequence once, each weighted by its probability."""
    c, actor, critic = networks_of(f"GAMMA={gamma}", f"REWARD_TO_GO={reward_to_go}", seed=1)
    world = SmallWorld(3)
    earned = credit_of(c, world.episodes)
    # wrong values, but of the returns' size: about 2, and different from state to state
    largest = sum(gamma**k for k in range(500))
    critic.output.kernel[...] = critic.output.kernel[...] * 20 / largest
    critic.output.bias[...] = jnp.array([2 / largest])
    subtracted = reinforce.BASELINES[baseline](world.episodes, earned, critic)
    assert baseline == "no_baseline" or (np.abs(subtracted).max() > 2 and np.std(subtracted) > 0.1)
    weighted = (earned - subtracted) * 8 * world.probabilities(actor)[:, None]
    exact = world.gradient(actor, gamma)
    assert np.abs(exact).max() > 0.1
    estimate = -flat(gradient_of(actor, batch_of(world.episodes, weighted)))
    np.testing.assert_allclose(estimate, exact, atol=1e-5)  # float32 gradients of size 1


def test_no_gradient_flows_through_the_advantage():
    """Else the actor's loss would move the critic."""
    _, actor, _ = networks_of()
    episodes = random_rollout()
    loss = lambda advantage: reinforce.actor_loss(actor, batch_of(episodes, advantage))  # noqa: E731
    assert (jax.jit(jax.grad(loss))(episodes.reward) == 0).all()


def test_the_critic_learns_from_the_steps_that_were_played_only(monkeypatch):
    """Returns 10 while alive, and a trap after the end: the critic must come to 10 where it was
    alive.
    """
    monkeypatch.setattr(reinforce, "ENV", replace(reinforce.ENV, max_episode_steps=20))
    c = given("CRITIC_STEPS=600", "MINIBATCH_SIZE=32", "HIDDEN_SIZE=16")
    episodes = random_rollout()
    target = jnp.where(episodes.alive > 0, 10.0, -1000.0)
    agent, batch = agent_of(c), batch_of(episodes, 0 * target, target)
    agent, _ = jax.jit(partial(reinforce.learn, c))(agent, batch, jax.random.key(0))
    values = np.asarray(reinforce.critic_baseline(episodes, target, agent.critic))
    # Adam with a constant rate keeps jumping by a few percent; one step in 32 at -1000 would pull
    # it to -20
    np.testing.assert_allclose(values[np.asarray(episodes.alive) > 0], 10, atol=1.5)


@pytest.mark.parametrize(
    "baseline, reward_to_go", [("critic_baseline", True), ("no_baseline", False)]
)
def test_an_update_by_hand(baseline, reward_to_go):
    """With plain SGD: the actor's step uses the critic as it was; then the critic learns from the
    returns.
    """
    c = given("NUM_ENVS=4", f"BASELINE={baseline}", f"REWARD_TO_GO={reward_to_go}")
    before = agent_of(c)
    agent = of_sgd(jax.tree.map(jnp.copy, before), actor=1.0, critic=1e-6)
    agent, figures = jax.jit(partial(reinforce.update, c))(agent)
    _, collect_rng, _ = jax.random.split(before.rng, 3)
    rollout = jax.jit(partial(reinforce.collect, c))(before.actor, collect_rng)
    returns = np.asarray(credit_of(c, rollout))
    values = [
        np.asarray(reinforce.critic_baseline(rollout, returns, x.critic)) for x in (before, agent)
    ]
    advantage = returns - (values[0] if baseline == "critic_baseline" else 0)

    def loss(actor):  # climbs 1 / N sum over episodes and steps of A log pi, up to the end of each
        log_prob = jax.nn.log_softmax(actor(rollout.obs))[*np.indices((4, 500)), rollout.action]
        return -(rollout.alive * advantage * log_prob).sum() / 4

    gradient = nnx.jit(nnx.grad(loss))(before.actor)
    # weights move by up to hundreds at this rate: float32 differences of them
    np.testing.assert_allclose(
        flat(before.actor) - flat(agent.actor), flat(gradient), rtol=1e-4, atol=1e-3
    )
    played = np.asarray(rollout.alive) > 0
    losses = [np.mean((returns - value)[played] ** 2) for value in values]
    assert losses[1] < losses[0] if baseline == "critic_baseline" else losses[1] == losses[0]
    probs = np.asarray(reinforce.policy(before.actor, rollout.obs).probs_parameter(), np.float64)[
        played
    ]
    expected = {
        "gradient_norm": np.linalg.norm(flat(gradient)),
        "explained_variance": 1 - advantage[played].var() / returns[played].var(),
        "entropy": -(probs * np.log(probs)).sum(axis=1).mean(),
        "episode_return": played.sum(axis=1).mean(),
        "truncated": 0,  # an untrained policy falls
    }
    assert {k: float(v) for k, v in figures.items()} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert (agent.env_step, agent.num_updates) == (played.sum(), 1)


def test_a_row_of_the_log_is_two_updates_with_keys_of_their_own(monkeypatch):
    """And a look at the policy. No pole falls in five steps: a rollout has 20 here."""
    monkeypatch.setattr(reinforce, "ENV", replace(reinforce.ENV, max_episode_steps=5))
    c, figures = given("NUM_ENVS=4", "EVAL_INTERVAL=40", "NUM_STEPS=80"), []
    agent = agent_of(c)
    keys = [jax.random.key_data(agent.rng)]
    learned, row = jax.jit(partial(reinforce.train_row, c))(agent, 40)
    update = jax.jit(partial(reinforce.update, c))
    for _ in range(2):
        agent, figure = update(agent)
        figures.append(figure)
        keys.append(jax.random.key_data(agent.rng))
    assert len(np.unique(keys, axis=0)) == 3
    look = reinforce.quick_evaluate(reinforce.ENV, reinforce.policy, agent.actor)
    assert row.eval_return == look
    for name in figures[0]:
        assert getattr(row, name) == pytest.approx(
            np.mean([figure[name] for figure in figures]), rel=1e-3
        )
    assert (row.num_updates, row.env_step) == (2, 40)
    np.testing.assert_allclose(flat(learned.critic), flat(agent.critic), atol=1e-5)  # float32
    np.testing.assert_allclose(flat(learned.actor), flat(agent.actor), atol=1e-5)
