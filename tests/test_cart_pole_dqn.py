"""Folder 2: the buffer, the target by hand and against rlax, the loop, the worked examples."""

import itertools
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from flax import nnx
from folders import SAME_STATE, flat, forward, learning_rates, load, unstack

dqn, env = (load("2_Cart_Pole_DQN", name) for name in ("cart_pole_dqn", "cart_pole"))
# All that a figure below depends on: what the defaults are doesn't matter.
SMALL = """
HIDDEN_SIZE=8 BATCH_SIZE=8 REPLAY_CAPACITY=100 LEARNING_STARTS=1000 NUM_STEPS=50_000
TRAIN_INTERVAL=2 EVAL_INTERVAL=1000 N_STEPS=5 GAMMA=0.99 LEARNING_RATE=1e-3 LEARNING_RATE_END=0
TARGET_SYNC_INTERVAL=250
EPSILON_START=1 EPSILON_END=0.01 DECAY_STEPS=10_000 SCALE_OBSERVATIONS=True DOUBLE_DQN=True
"""


def small(*arguments):
    return dqn.settings.read(dqn.Constants, [*SMALL.split(), *arguments])


@cache
def network_of(seed=0, *arguments):
    return jax.jit(lambda: dqn.QNetwork(small(*arguments), jax.random.key(seed)))()


def new_agent(*arguments):
    return jax.jit(partial(dqn.make_agent, small(*arguments)))(0)


def play(c, agent, steps):
    """The agent after `update` for each of the steps, and the metrics."""
    return jax.jit(lambda agent: jax.lax.scan(partial(dqn.update, c), agent, steps))(agent)


def numbered(i):
    """A transition that knows when it was played."""
    obs = jnp.full(4, i, jnp.float32)
    return env.Transition(obs, jnp.int32(i % 2), jnp.float32(i), obs + 1, i % 7 == 0, i % 5 == 0)


def buffer_of(added):
    """A ring of 8 rows to which so many have been added."""
    buffer = new_agent("REPLAY_CAPACITY=8").replay_buffer
    for i in range(added):
        buffer = dqn.add(buffer, jax.tree.map(jnp.asarray, numbered(i)))
    return buffer


@pytest.mark.parametrize("added, oldest", [(4, 0), (5, 0), (8, 0), (9, 1), (20, 12)])
def test_the_ring_never_returns_unwritten_overwritten_or_torn_windows(added, oldest):
    batch = dqn.sample(buffer_of(added), jax.random.key(0), batch_size=500, n_steps=3)
    rewards = np.asarray(batch.reward)  # the number of each transition, [500, 3]
    np.testing.assert_array_equal(rewards, rewards[:, :1] + np.arange(3))  # consecutive
    # every window that exists is drawn (500 draws of at most 6 windows: missing one has probability
    # 1e-38)
    assert set(rewards[:, 0]) == set(range(oldest, added - 2))
    for row in (0, 250, 499):
        for i in range(3):
            for stored, meant in zip(unstack(batch, (row, i)), numbered(int(rewards[row, i]))):
                np.testing.assert_array_equal(stored, meant)


def test_windows_are_drawn_uniformly():
    buffer = buffer_of(20)
    drawn = np.asarray(dqn.sample(buffer, jax.random.key(1), 60_000, 3).reward)[:, 0].astype(int)
    counts = np.bincount(drawn, minlength=18)[12:]
    assert np.abs(counts - 10_000).max() < 500  # 5.5 standard deviations of a binomial count
    another = np.asarray(dqn.sample(buffer, jax.random.key(2), 60_000, 3).reward)[:, 0].astype(int)
    assert np.mean(another == drawn) == pytest.approx(1 / 6, abs=0.01)  # 6.5 standard deviations


def target_of(c, online, target, batch):
    """As `train_step` puts it together."""
    reward, steps, last = dqn.n_step(batch, c.GAMMA)
    next_q = dqn.next_value(online if c.DOUBLE_DQN else target, target, last.next_obs)
    return dqn.td_target(reward, last.terminated, next_q, c.GAMMA**steps)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("double, best", [(True, (20, 40, 50)), (False, (20, 40, 60))])
def test_td_target_of_every_way_to_end_by_hand(double, best, n):
    """n steps through the states 0, 1, ... with rewards 1, 2, 4; each may end the episode in either
    way.

    A second ending belongs to the next episode. In state 3 the online network prefers action 1 (3 >
    2), the target network's own maximum is action 0.
    """
    c = small("GAMMA=0.5", f"DOUBLE_DQN={double}", f"N_STEPS={n}")
    online, target = (
        lambda obs, table=table: jnp.array(table, jnp.float32)[obs[..., 0].astype(int)]
        for table in ([[0, 0], [1, 5], [1, 9], [2, 3]], [[0, 0], [10, 20], [30, 40], [60, 50]])
    )
    ends = np.array(list(itertools.product((False, True), repeat=2 * n)))
    terminated, truncated = ends[:, :n], ends[:, n:]
    states = jnp.tile(jnp.arange(n + 1.0)[:, None], (len(terminated), 1, 4))
    reward = jnp.tile(2.0 ** jnp.arange(n), (len(states), 1))
    action = jnp.zeros((len(states), n), int)
    windows = env.Transition(states[:, :n], action, reward, states[:, 1:], terminated, truncated)
    found = target_of(c, online, target, windows)
    for y, over, cut in zip(found, terminated, truncated, strict=True):
        steps = next((i + 1 for i in range(n) if over[i] or cut[i]), n)
        by_hand = sum(0.5**k * 2**k for k in range(steps))
        by_hand += 0 if over[steps - 1] else 0.5**steps * best[steps - 1]
        assert y == by_hand  # every number here is a small dyadic fraction: exact in float32


def random_windows(batch, n, ends):
    """Windows [batch, n] of random numbers, terminated at random if `ends`."""
    rng = np.random.default_rng(n)
    obs, next_obs = rng.normal(size=(2, batch, n, 4))
    terminated = rng.random((batch, n)) < 0.2 * ends
    reward, action = rng.normal(size=(batch, n)), rng.integers(0, 2, (batch, n))
    return env.Transition(
        jnp.float32(obs),
        jnp.array(action),
        jnp.float32(reward),
        jnp.float32(next_obs),
        jnp.array(terminated),
        jnp.zeros((batch, n), bool),
    )


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n", [1, 5])
def test_td_target_equals_rlax(n, double):
    c = small(f"DOUBLE_DQN={double}", f"N_STEPS={n}")
    batch, online, target = random_windows(200, n, True), network_of(0), network_of(1)
    selector = online if double else target
    chosen = selector(batch.next_obs).argmax(-1)[..., None]
    value = jnp.take_along_axis(target(batch.next_obs), chosen, -1)[..., 0]  # [B, n]
    returns = jax.vmap(lambda r, d, v: rlax.n_step_bootstrapped_returns(r, d, v, n)[0])
    expected = returns(batch.reward, 0.99 * (1 - batch.terminated), value)
    # float32 sums of up to six terms of size about 1
    np.testing.assert_allclose(target_of(c, online, target, batch), expected, atol=1e-5)


@pytest.mark.parametrize("double", [True, False])
def test_a_training_step_descends_on_the_prediction_only(double):
    """With the network as chooser that DOUBLE_DQN names; no gradient flows into the target."""
    c, batch = small("N_STEPS=2", f"DOUBLE_DQN={double}"), random_windows(32, 2, False)
    network, target = nnx.clone(network_of(0)), network_of(1)
    y = target_of(c, network, target, batch)
    assert (y != target_of(replace(c, DOUBLE_DQN=not double), network, target, batch)).any()
    into_target = nnx.grad(lambda target: target_of(c, network, target, batch).sum())(target)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(into_target))

    def loss_of(network):
        q = network(batch.obs[:, 0])[jnp.arange(32), batch.action[:, 0]]
        return ((q - y) ** 2).sum() / 32, q.mean()

    by_hand, gradients = nnx.value_and_grad(loss_of, has_aux=True)(network)
    before = flat(network)
    # weights move by minus the gradient
    optimizer = nnx.Optimizer(network, optax.sgd(1.0), wrt=nnx.Param)
    found = dqn.train_step(c, dqn.Agent(network, target, optimizer, None, None, None), batch)
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)
    # the difference of two weights near 1 keeps about 1e-7 of a gradient's digits
    np.testing.assert_allclose(before - flat(network), flat(gradients), atol=1e-6)


def test_the_buffer_holds_what_was_played(monkeypatch):
    """Each row follows from the one before; the true last observation is kept, not the reset one.

    A step earns 2: the log's return is what was earned, not the number of steps.
    """
    monkeypatch.setattr(env, "MAX_EPISODE_STEPS", 30)
    monkeypatch.setattr(
        env,
        "ENV",
        SimpleNamespace(
            initial=env.ENV.initial,
            transition=env.ENV.transition,
            terminal=env.ENV.terminal,
            reward=lambda *arguments: 2.0,
        ),
    )
    c = small("NUM_STEPS=1002", "LEARNING_STARTS=501", "EVAL_INTERVAL=501", "REPLAY_CAPACITY=2000")

    def train(seed):
        agent, _ = dqn.train_row(c, dqn.make_agent(c, seed), 0)
        return dqn.train_row(c, agent, 501)

    agent, row = jax.jit(train)(0)
    assert agent.replay_buffer.count == 1002
    rows = jax.tree.map(lambda x: np.asarray(x)[:1002], agent.replay_buffer.rows)
    ended = rows.terminated | rows.truncated
    on = ~ended[:-1]
    np.testing.assert_allclose(rows.next_obs[:-1][on], rows.obs[1:][on], **SAME_STATE)
    starts = rows.obs[1:][ended[:-1]]
    assert len(starts) > 20 and (np.abs(starts) <= 0.05).all()
    assert len(np.unique(starts, axis=0)) == len(starts)  # each from a key of its own
    limits = np.array([2.4, np.inf, 12 * np.pi / 180, np.inf])
    np.testing.assert_array_equal(rows.terminated, (np.abs(rows.next_obs) > limits).any(axis=1))
    # an episode is cut off after 30 steps exactly
    ends = np.flatnonzero(ended)
    lengths = np.diff(ends, prepend=-1)
    assert lengths.max() == 30 > lengths.min()
    np.testing.assert_array_equal(rows.truncated[ends], lengths == 30)
    # epsilon is 1 at first: both actions are played about equally often (500 coins, 5 standard
    # deviations), and two steps in a row don't repeat each other (250 pairs)
    assert abs(rows.action[:500].mean() - 0.5) < 0.11
    first, second = rows.action[:500].reshape(-1, 2).T
    assert abs((first == second).mean() - 0.5) < 0.16
    # the second interval has the episodes that ended in steps 501 to 1001
    assert row.episode_return == pytest.approx(2 * lengths[ends >= 501].mean(), rel=1e-6)  # float32


def test_a_row_of_the_log_by_hand():
    """The second row goes on where the first ended; a mean leaves out steps without a value."""
    c = small("LEARNING_STARTS=60", "EVAL_INTERVAL=64", "NUM_STEPS=128")
    agent, first = jax.jit(partial(dqn.train_row, c))(new_agent(), 0)
    copy = jax.tree.map(jnp.copy, agent)
    _, row = jax.jit(partial(dqn.train_row, c))(agent, 64)
    agent, metrics = play(c, copy, 64 + jnp.arange(64))
    look = jax.jit(env.quick_evaluate)(agent.online, jax.random.split(agent.rng)[1], 0.99)
    means = [np.nanmean(metrics[name]) for name in ("episode_return", "loss", "mean_q")]
    expected = [128, 1 - 0.99 * 0.0128, *means, *look]
    np.testing.assert_allclose(row, expected, rtol=1e-3)  # float32
    np.testing.assert_array_equal(np.isfinite(metrics["loss"]), np.arange(64) % 2 == 1)
    assert np.isfinite(first.loss)  # of the steps 62 and 64


@pytest.fixture(scope="module")
def history():
    """What `update` did in steps 0 to 1,599: gradient steps, both networks' weights, the loss."""
    c = small("NUM_STEPS=2000")

    def one_step(agent, env_step):
        agent, metrics = dqn.update(c, agent, env_step)
        networks = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(n)]) for n in agent[:2])
        return agent, (agent.optimizer.step[...], *networks, metrics["loss"])

    steps = jnp.arange(1600)
    run = jax.jit(lambda agent: jax.lax.scan(one_step, agent, steps)[1])
    return jax.device_get(run(new_agent()))


def test_it_learns_in_every_second_step_after_the_first_thousand(history):
    played = 1 + np.arange(1600)
    due = (played > 1000) & (played % 2 == 0)
    gradient_steps, online, _, loss = history
    np.testing.assert_array_equal(gradient_steps, due.cumsum())
    np.testing.assert_array_equal(np.isfinite(loss), due)
    np.testing.assert_array_equal((np.diff(online, axis=0) != 0).any(axis=1), due[1:])


def test_each_gradient_step_draws_a_batch_of_its_own(monkeypatch):
    """The rows a batch holds, from one buffer in which nothing changes: a loss would differ anyway,
    because the network does.
    """
    monkeypatch.setattr(dqn, "add", lambda buffer, transition: buffer)
    monkeypatch.setattr(dqn, "train_step", lambda c, agent, batch: (batch.reward[0, 0], -1.0))
    c, agent = small("BATCH_SIZE=1", "LEARNING_STARTS=5"), new_agent()
    # 100 transitions whose reward is their number
    rows = agent.replay_buffer.rows._replace(reward=jnp.arange(100.0))
    agent = agent._replace(replay_buffer=dqn.ReplayBuffer(rows, jnp.int32(100)))
    _, metrics = play(c, agent, 1000 + jnp.arange(400))
    sampled = metrics["loss"][1::2]
    # 200 draws of 96 windows leave out one with probability (1 - 1/96)^200 = 0.12: about 84 come
    assert len(np.unique(sampled)) > 70
    assert (metrics["mean_q"][1::2] == -1).all()


def test_the_target_network_is_copied_every_250_steps(history):
    _, online, target, _ = history
    # numbers of steps played
    changed = 2 + np.flatnonzero((np.diff(target, axis=0) != 0).any(axis=1))
    assert changed.tolist() == [1250, 1500]
    np.testing.assert_array_equal(target[:1001], online[:1001])  # before the first gradient step
    np.testing.assert_array_equal(target[changed - 1], online[changed - 1])
    np.testing.assert_array_equal(target[1599], online[1499])


def test_the_optimizer_counts_to_the_end_of_its_schedule():
    """As many gradient steps as the learning rate is planned for, also where nothing divides."""
    c = small("NUM_STEPS=90", "EVAL_INTERVAL=45", "LEARNING_STARTS=20", "TRAIN_INTERVAL=7")
    agent, _ = play(c, new_agent(), jnp.arange(90))
    assert agent.optimizer.step[...] == 10 == c.num_updates  # after 21, 28, ... 84 steps


def test_epsilon_decides_what_is_played():
    """Before DECAY_STEPS some steps are random, after it none is; the steps are counted from 0."""
    c = small("EPSILON_END=0", "DECAY_STEPS=100")
    agent = new_agent()
    greedy = int(agent.online(agent.env_state.obs).argmax())

    def first_action(env_step, rng):
        return dqn.update(c, agent._replace(rng=rng), env_step)[0].replay_buffer.rows.action[0]

    rngs = jax.random.split(jax.random.key(2), 2_000)
    played = jax.jit(jax.vmap(jax.vmap(first_action, (None, 0)), (0, None)))(
        jnp.array([0, 50, 100]), rngs
    )
    # epsilon 1, 0.5 and 0, of which half is greedy by chance; 5 standard deviations
    np.testing.assert_allclose(
        (np.asarray(played) == greedy).mean(axis=1), [0.5, 0.75, 1], atol=0.056
    )
    assert (played[2] == greedy).all()
    epsilons = dqn.epsilon_at(small(), jnp.array([0, 5_000, 10_000, 50_000]))
    np.testing.assert_allclose(epsilons, [1, 0.505, 0.01, 0.01], rtol=1e-6)


def draw_lengths(monkeypatch):
    """Makes every episode as long as its first state says: 1 to 30 steps, whatever is done."""

    def reset(rng):
        length = jax.random.randint(rng, (), 1, 31).astype(jnp.float32)
        return env.EnvState(jnp.zeros(4).at[0].set(length), jnp.int32(0), jnp.float32(0))

    def step(state, action):
        following = state._replace(steps=state.steps + 1, episode_return=state.episode_return + 1)
        terminated = following.steps >= state.obs[0]
        ends = terminated, jnp.bool_(False)
        return following, env.Transition(state.obs, action, jnp.float32(1), state.obs, *ends)

    monkeypatch.setattr(env, "reset", reset)
    monkeypatch.setattr(env, "step", step)


def test_a_seed_beside_others_does_what_it_does_alone(monkeypatch):
    """Episodes end at different times in each seed: clock, keys and buffer are its own."""
    draw_lengths(monkeypatch)
    c = small("LEARNING_STARTS=198", "NUM_STEPS=400", "EVAL_INTERVAL=200", "NUM_SEEDS=3", "SEED=3")
    agents, log, _ = dqn.train(c)
    train_row = jax.jit(partial(dqn.train_row, c))
    for i in range(3):
        alone, first = train_row(jax.jit(partial(dqn.make_agent, c))(3 + i), 0)
        alone, second = train_row(alone, 200)
        beside = unstack(agents, i)
        # no action changes an episode here, so these are the same whatever is learned
        assert (beside.rng == alone.rng).all()
        for one, other in zip(beside.env_state, alone.env_state):
            np.testing.assert_array_equal(one, other)
        assert beside.replay_buffer.count == alone.replay_buffer.count == 400
        for name in ("obs", "reward", "terminated"):
            one, other = (getattr(a.replay_buffer.rows, name) for a in (beside, alone))
            np.testing.assert_array_equal(one, other)
        for name in ("env_step", "episode_return", "eval_return"):
            together = getattr(log, name)[i]
            np.testing.assert_array_equal(together, [getattr(x, name) for x in (first, second)])
        # One gradient step falls into the first row. Its loss comes from untrained networks: sums
        # of at most 8 products, each rounded to 2^-24, in three layers.
        np.testing.assert_allclose(log.loss[i, 0], first.loss, rtol=1e-5)
        np.testing.assert_allclose(log.mean_q[i, 0], first.mean_q, rtol=1e-5)
    assert len(set(np.asarray(agents.env_state.steps).tolist())) == 3  # at different times
    assert (log.env_step == [200, 400]).all()  # the one count that they share
    assert (agents.optimizer.step[...] == 101).all()


def test_seeds_share_the_step_so_that_only_due_steps_learn(monkeypatch):
    """JAX computes one side of `cond` only if its condition isn't a batch. Else it's slow."""
    calls = []

    def train_step(c, agent, batch):
        jax.debug.callback(calls.append, batch.reward.sum())
        return jnp.float32(0), jnp.float32(0)

    monkeypatch.setattr(dqn, "train_step", train_step)
    dqn.train(small("LEARNING_STARTS=5", "NUM_STEPS=8", "EVAL_INTERVAL=8", "NUM_SEEDS=2"))
    jax.effects_barrier()
    assert len(calls) == 2 * 2  # after 6 and 8 steps, in each seed


def test_the_learning_rate_falls_in_a_straight_line_to_its_end():
    agent = new_agent("NUM_STEPS=1020", "EVAL_INTERVAL=20", "LEARNING_RATE_END=1e-4")
    rates, _ = learning_rates(agent.optimizer, agent.online, 10)
    # 1e-3 at the first update, 1e-4 where the eleventh would be; float32 differences of about 1e-2
    np.testing.assert_allclose(rates, np.linspace(1e-3, 1e-4, 11)[:10], atol=1e-7)


@pytest.mark.parametrize("scaled", [True, False])
def test_the_network_by_hand(scaled):
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    network = network_of(0, f"SCALE_OBSERVATIONS={scaled}")
    scale = [2.4, 3.0, 0.21, 3.0] if scaled else [1] * 4
    np.testing.assert_allclose(
        network(obs), forward(network, obs / np.array(scale)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("page", ["networks_and_jax.md", "networks_and_jax_ch.md"])
def test_the_pages_worked_examples_print_what_they_say(page, capsys):
    text = (Path(dqn.__file__).parent / page).read_text()
    examples = re.findall(r"```py\n(.*?)```\n\n```text\n(.*?)```", text, re.S)
    assert len(examples) == 2
    names = {"__name__": "example"}  # the second goes on where the first ended
    for code, said in examples:
        exec(compile(code, page, "exec"), names)
        assert capsys.readouterr().out == said
