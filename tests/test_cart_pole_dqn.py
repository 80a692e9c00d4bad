"""Folder 2: the environment against Gymnasium, the target by hand and against rlax, learning on worlds whose
values are known, and the script as a reader runs it."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from flax import nnx
from folders import load, training

dqn, pictures, env = (load("2_Cart_Pole_DQN", name) for name in ("cart_pole_dqn", "pictures", "cart_pole"))
C = dqn.Constants()


def train(*arguments, seeds=(0,)):
    """The agents and the log of these constants."""
    c = dqn.configure(arguments)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jax.jit(jax.vmap(lambda key: training(dqn, c, key, dqn.num_rows(c))))(keys)


def network_of(seed=0, *arguments):
    return dqn.make_network(dqn.configure(arguments), jax.random.key(seed))


def state_of(obs, steps=0):
    return env.EnvState(jnp.asarray(obs), jnp.int32(steps), jnp.float32(0))


def unstack(tree, index=0):
    return jax.tree.map(lambda x: x[index], tree)


def params(network):
    return jax.tree.leaves(nnx.state(network, nnx.Param))


# --- the environment


@pytest.fixture(scope="module")
def random_episodes():
    """1,000 random episodes of CartPole-v1: first states, actions, states after each step, lengths."""
    rng, world = np.random.default_rng(0), gymnasium.make("CartPole-v1")
    episodes = []
    for seed in range(1_000):
        obs, _ = world.reset(seed=seed)
        states, actions, terminated = [obs], [], False
        while not terminated:
            actions.append(int(rng.integers(2)))
            obs, reward, terminated, truncated, _ = world.step(actions[-1])
            assert reward == 1.0 and not truncated
            states.append(obs)
        episodes.append((np.array(states), np.array(actions)))
    return episodes


@pytest.mark.parametrize("physics, equal", [(env.PHYSICS, True), (type(env.PHYSICS)(), False)])
def test_each_step_equals_cart_pole_v1(random_episodes, physics, equal, monkeypatch):
    monkeypatch.setattr(env, "PHYSICS", physics)
    before = np.concatenate([states[:-1] for states, _ in random_episodes])
    after = np.concatenate([states[1:] for states, _ in random_episodes])
    actions = np.concatenate([actions for _, actions in random_episodes])
    ends = np.concatenate([np.arange(len(actions)) == len(actions) - 1 for _, actions in random_episodes])
    _, transition = jax.vmap(lambda obs, action: env.step(state_of(obs), action))(before, actions)
    # Gymnasium computes in float64 and shows float32; from one shown state to the next that is a few units
    # in the last place of numbers up to about 4.
    same = np.allclose(transition.next_obs, after, atol=2e-6, rtol=1e-6)
    assert same == equal  # Gymnasium 1.4.0's own default parameters are another physics
    if equal:
        np.testing.assert_array_equal(transition.terminated, ends)
        np.testing.assert_array_equal(transition.reward, 1.0)
        assert not transition.truncated.any()


def test_the_time_limit_truncates_at_the_same_step_as_cart_pole_v1():
    world = gymnasium.make("CartPole-v1")
    obs, _ = world.reset(seed=0)
    state = state_of(obs)
    step = jax.jit(env.step)
    ended = False
    while not ended:
        action = int(0.1 * obs[0] + 0.3 * obs[1] + 4 * obs[2] + obs[3] > 0)  # a controller that balances
        obs, _, terminated, truncated, _ = world.step(action)
        state, transition = step(state, jnp.int32(action))
        state = state._replace(obs=jnp.array(obs))  # Gymnasium's: rounding must not add up
        assert (bool(transition.terminated), bool(transition.truncated)) == (terminated, truncated)
        ended = terminated or truncated
    assert truncated and state.steps == 500 and state.episode_return == 500


# --- the replay buffer


def numbered(i):
    """A transition that knows when it was played."""
    return env.Transition(
        jnp.full(4, i, jnp.float32),
        jnp.int32(i % 2),
        jnp.float32(i),
        jnp.full(4, i + 1.0),
        i % 7 == 0,
        i % 5 == 0,
    )


def buffer_of(added):
    """A ring of 8 rows to which so many have been added."""
    buffer = new_agent("REPLAY_CAPACITY=8", "HIDDEN_SIZE=8").replay_buffer
    for i in range(added):
        buffer = dqn.add(buffer, jax.tree.map(jnp.asarray, numbered(i)))
    return buffer


@pytest.mark.parametrize("added, oldest", [(4, 0), (5, 0), (8, 0), (9, 1), (20, 12)])
def test_the_ring_never_returns_unwritten_overwritten_or_torn_windows(added, oldest):
    batch = dqn.sample(buffer_of(added), jax.random.key(0), batch_size=500, n_steps=3)
    rewards = np.asarray(batch.reward)  # the number of each transition, [500, 3]
    np.testing.assert_array_equal(rewards, rewards[:, :1] + np.arange(3))  # consecutive
    # every window that exists is drawn (500 draws of at most 6 windows: missing one has probability 1e-38)
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


# --- the target


def lookup(table):
    """A network that reads its Q values from rows of a table: observation [i, ., ., .] has row i."""
    return lambda obs: jnp.asarray(table, jnp.float32)[obs[..., 0].astype(int)]


ONLINE = [[0, 0], [5, 1], [1, 9], [2, 3]]
TARGET = [[0, 0], [10, 20], [30, 40], [60, 50]]


def target_of(c, online, target, batch):
    """As `train_step` puts it together."""
    reward, steps, last = dqn.n_step(batch, c.GAMMA)
    next_q = dqn.next_value(online if c.DOUBLE_DQN else target, target, last.next_obs)
    return dqn.td_target(reward, last.terminated, next_q, c.GAMMA**steps)


def window_of(terminated, truncated):
    """Three steps through the states 0, 1, 2, 3 with rewards 1, 2, 4."""
    states = jnp.tile(jnp.arange(4.0)[:, None], (1, 4))
    return env.Transition(
        states[None, :3], jnp.zeros((1, 3), int), jnp.array([[1.0, 2.0, 4.0]]), states[None, 1:],
        jnp.array([terminated]), jnp.array([truncated]),
    )  # fmt: skip


@pytest.mark.parametrize(
    "terminated, truncated, double, by_hand",
    [
        # all three rewards, then state 3: online prefers action 1 (3 > 2), the target's own max is action 0
        ((0, 0, 0), (0, 0, 0), True, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 50),
        ((0, 0, 0), (0, 0, 0), False, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 60),
        # terminated: nothing comes after, neither the later rewards nor the target network's opinion
        ((0, 0, 1), (0, 0, 0), True, 1 + 0.5 * 2 + 0.25 * 4),
        ((0, 1, 0), (0, 0, 0), True, 1 + 0.5 * 2),
        ((1, 0, 0), (0, 0, 0), True, 1),
        # truncated: the later rewards belong to the next episode, but the last state is worth something
        ((0, 0, 0), (0, 0, 1), True, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 50),
        ((0, 0, 0), (0, 1, 0), True, 1 + 0.5 * 2 + 0.25 * 40),
        ((0, 0, 0), (1, 0, 0), True, 1 + 0.5 * 10),
        ((0, 0, 0), (1, 0, 0), False, 1 + 0.5 * 20),
        # both at once, as when the pole falls in step 500: it fell
        ((0, 1, 0), (0, 1, 0), True, 1 + 0.5 * 2),
        # a second ending in the window belongs to the next episode
        ((0, 0, 1), (1, 0, 0), True, 1 + 0.5 * 10),
    ],
)
def test_td_target_by_hand(terminated, truncated, double, by_hand):
    c = dqn.configure(["GAMMA=0.5", f"DOUBLE_DQN={double}", "N_STEPS=3"])
    batch = window_of(np.array(terminated, bool), np.array(truncated, bool))
    # every number here is a small dyadic fraction: exact in float32
    np.testing.assert_array_equal(target_of(c, lookup(ONLINE), lookup(TARGET), batch), [by_hand])


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_td_target_equals_rlax(n, double):
    c = dqn.configure([f"DOUBLE_DQN={double}", f"N_STEPS={n}"])
    rng = np.random.default_rng(n)
    size = 200
    terminated = rng.random((size, n)) < 0.2
    obs, next_obs = rng.normal(size=(2, size, n, 4)).astype(np.float32)
    reward = rng.normal(size=(size, n)).astype(np.float32)
    batch = env.Transition(
        obs, np.zeros((size, n), int), reward, next_obs, jnp.array(terminated), jnp.zeros((size, n), bool)
    )
    online, target = network_of(0), network_of(1)

    @jax.jit
    def of_rlax(online, target):
        q_next, selector = target(next_obs), (online if double else target)(next_obs)
        value = jnp.take_along_axis(q_next, selector.argmax(-1)[..., None], -1)[..., 0]  # [B, n]
        discount = jnp.array(0.99 * (1 - terminated))
        returns = jax.vmap(lambda r, d, v: rlax.n_step_bootstrapped_returns(r, d, v, n)[0])
        return returns(reward, discount, value)

    # float32 sums of up to six terms of size about 1
    np.testing.assert_allclose(
        jax.jit(partial(target_of, c))(online, target, batch), of_rlax(online, target), atol=1e-5
    )


def random_windows():
    """32 windows of two steps that go on."""
    rng = np.random.default_rng(0)
    return env.Transition(
        jnp.array(rng.normal(size=(32, 2, 4)), jnp.float32), jnp.array(rng.integers(0, 2, (32, 2))),
        jnp.ones((32, 2)), jnp.array(rng.normal(size=(32, 2, 4)), jnp.float32), jnp.zeros((32, 2), bool),
        jnp.zeros((32, 2), bool),
    )  # fmt: skip


@pytest.mark.parametrize("double", [True, False])
def test_a_training_step_lets_the_network_choose_that_double_dqn_names(double):
    batch, (online, target) = random_windows(), (network_of(seed) for seed in (0, 1))
    q = online(batch.obs[:, 0])[jnp.arange(32), batch.action[:, 0]]
    losses = {}
    for chooses in (True, False):
        c = dqn.configure(["N_STEPS=2", f"DOUBLE_DQN={chooses}"])
        losses[chooses] = float(((target_of(c, online, target, batch) - q) ** 2).mean())
    c = dqn.configure(["N_STEPS=2", f"DOUBLE_DQN={double}"])
    agent = dqn.Agent(online, target, nnx.Optimizer(online, optax.sgd(0.0), wrt=nnx.Param), None, None)
    loss, _ = dqn.train_step(c, agent, batch)
    assert loss == pytest.approx(losses[double], rel=1e-5)  # one float32 mean in two orders
    assert abs(losses[True] - losses[False]) > 1e-3 * losses[double]


def test_the_gradient_flows_into_the_prediction_only():
    c, batch = dqn.configure(["N_STEPS=2"]), random_windows()
    network = network_of(0)
    into_target = nnx.jit(nnx.grad(lambda target: target_of(c, network, target, batch).sum()))(network)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(into_target))

    # The same network as prediction and target: a gradient through the target would show at once.
    y = np.asarray(target_of(c, network, network, batch))
    before = [np.asarray(p, np.float64) for p in params(network)]

    def semi_gradient(network):
        q = network(batch.obs[:, 0])[jnp.arange(32), batch.action[:, 0]]
        return ((q - y) ** 2).sum() / 32

    loss_by_hand, by_hand = nnx.jit(nnx.value_and_grad(semi_gradient))(network)
    optimizer = nnx.Optimizer(network, optax.sgd(1.0), wrt=nnx.Param)  # weights move by minus the gradient
    mean_q_by_hand = network(batch.obs[:, 0])[jnp.arange(32), batch.action[:, 0]].mean()
    loss, mean_q = dqn.train_step(c, dqn.Agent(network, nnx.clone(network), optimizer, None, None), batch)
    assert mean_q == pytest.approx(float(mean_q_by_hand), rel=1e-5)
    assert loss == pytest.approx(float(loss_by_hand), rel=1e-6)  # one float32 mean in two orders
    for old, new, gradient in zip(before, params(network), params(by_hand)):
        # the difference of two weights near 1 keeps about 1e-7 of a gradient's digits
        np.testing.assert_allclose(old - np.asarray(new), gradient, atol=1e-6)


# --- the film


def test_the_film_lets_a_pole_fall_as_a_rod_does():
    """Energy: a rod that falls about its end from rest has (w^2) / 2 = (cos a_0 - cos a) g / (4/3 l)."""
    world = gymnasium.make("CartPole-v1").unwrapped
    world.state = 1.0, 3.0, 0.2, 0.0
    angles = []
    while world.state[3] or not angles:
        _, _, angle, speed = world.state
        expected = np.sqrt(2 * (np.cos(0.2) - np.cos(angle)) * world.gravity / (4 / 3 * world.length))
        assert speed == pytest.approx(expected, rel=0.03, abs=0.15)  # steps of a fiftieth of a second
        pictures.fall_on(world)
        angles.append(world.state[2])
    assert angles == sorted(angles) and world.state[:3] == (1.0, 0.0, np.pi / 2)
    world.state = 0.0, 0.0, -0.2, 0.0
    for _ in angles:
        pictures.fall_on(world)
    assert world.state[2] == -np.pi / 2


def new_agent(*arguments):
    c = dqn.configure(arguments)
    return jax.jit(partial(dqn.make_agent, c))(jax.random.key(0))


# --- the loop


def test_the_buffer_holds_what_was_played(monkeypatch):
    """Each row follows from the one before; the true last observation is kept, not the reset one.

    A step earns 2: the log's return is what was earned, not the number of steps.
    """
    monkeypatch.setattr(env, "MAX_EPISODE_STEPS", 30)
    monkeypatch.setattr(env, "ENV", SimpleNamespace(
        initial=env.ENV.initial, transition=env.ENV.transition, terminal=env.ENV.terminal,
        reward=lambda *arguments: 2.0,
    ))  # fmt: skip
    agents, log = train(
        "NUM_STEPS=1001", "LEARNING_STARTS=501", "EVAL_INTERVAL=500", "TRAIN_INTERVAL=2", "HIDDEN_SIZE=8"
    )
    buffer = unstack(agents.replay_buffer)
    assert buffer.count == 1001
    rows = jax.tree.map(lambda x: np.asarray(x)[:1001], buffer.rows)
    ended = rows.terminated | rows.truncated
    following = ~ended[:-1]
    np.testing.assert_array_equal(rows.next_obs[:-1][following], rows.obs[1:][following])
    starts = rows.obs[1:][ended[:-1]]
    assert len(starts) > 20 and (np.abs(starts) <= 0.05).all()
    assert len(np.unique(starts, axis=0)) == len(starts)  # each from a key of its own
    limits = np.array([2.4, np.inf, 12 * np.pi / 180, np.inf])
    outside = (np.abs(rows.next_obs) > limits).any(axis=1)
    np.testing.assert_array_equal(rows.terminated, outside)
    assert rows.truncated.sum() > 0 and rows.terminated.sum() > 0
    # an episode is cut off after 30 steps exactly
    lengths = np.diff(np.flatnonzero(np.concatenate([[True], ended])))
    lengths[0] += 1
    assert lengths.max() == 30
    np.testing.assert_array_equal(rows.truncated[np.flatnonzero(ended)][1:], lengths[1:] == 30)
    # epsilon is 1 at first: both actions are played about equally often (500 coins, 5 standard deviations)
    assert abs(rows.action[:500].mean() - 0.5) < 0.11
    # ... also by the two steps of one update (250 pairs, 5 standard deviations and 5 % that are greedy)
    first, second = rows.action[501:].reshape(-1, 2).T
    assert abs((first == second).mean() - 0.5) < 0.2
    # the log's return of the only interval: the episodes that ended in steps 501 to 1001
    in_interval = np.flatnonzero(ended)[1:] >= 501
    # float32
    assert log.episode_return[0, 0] == pytest.approx(2 * lengths[1:][in_interval].mean(), rel=1e-6)
    assert (rows.reward == 2).all()


def test_a_row_of_the_log(monkeypatch):
    """`update` and `quick_evaluate` made up: who computes what goes into which column."""

    def update(c, agent, x):  # episode returns, loss, mean Q
        return agent, (jnp.array([jnp.nan, 1.0]) * x[0], 2.0 * x[0], 3.0 * x[0])

    monkeypatch.setattr(dqn, "update", update)
    monkeypatch.setattr(env, "quick_evaluate", lambda online, rng, gamma: (online, online + 1, online + 2))
    c, agent = dqn.configure(["EVAL_INTERVAL=4", "NUM_STEPS=1008"]), dqn.Agent(10.0, *jnp.zeros(4))
    _, row = dqn.learn_and_evaluate(c, jax.random.key(0), agent, 1)
    # updates at the steps 1,004 and 1,006, whose mean is 1,005; float32
    expected = [1008, 1 - 0.99 * 0.1008, 1005, 10, 11, 12, 2010, 3015]
    np.testing.assert_allclose(row, expected, rtol=1e-6)


SMALL = ["HIDDEN_SIZE=8", "BATCH_SIZE=8", "REPLAY_CAPACITY=100"]


@pytest.fixture(scope="module")
def updates():
    """`update` from one agent, with four keys at four steps each; epsilon is 0 by then: all play the same."""
    c = dqn.configure([*SMALL, "EPSILON_END=0", "DECAY_STEPS=1000"])
    agent = new_agent(*SMALL, "EPSILON_END=0", "DECAY_STEPS=1000")
    play = jax.jit(lambda agent, xs: jax.lax.scan(partial(dqn.collect, c), agent, xs)[0])
    agent = play(agent, (jnp.arange(80), jax.random.split(jax.random.key(2), 80)))
    # upright and in the middle: the two steps of each update end no episode
    agent = agent._replace(env_state=state_of(jnp.zeros(4)))
    steps, rngs = jnp.array([1_000, 1_246, 1_248, 1_250]), jax.random.split(jax.random.key(3), 4)
    update = jax.vmap(jax.vmap(partial(dqn.update, c), (None, (None, 0))), (None, (0, None)))
    after, (_, loss, _) = jax.jit(update)(agent, (steps, rngs))
    return agent, after, np.asarray(loss)  # with axes [step, key]


def test_each_update_draws_a_batch_of_its_own(updates):
    agent, after, loss = updates
    rows = after.replay_buffer.rows
    assert (after.replay_buffer.count == agent.replay_buffer.count + 2).all()
    assert (rows.obs == rows.obs[0, 0]).all() and (rows.action == rows.action[0, 0]).all()
    assert all(len(set(row)) == 4 for row in loss.tolist())


def test_an_update_copies_the_weights_every_250_steps(updates):
    """LEARNING_STARTS is 1,000: the copy is due after the update that plays the steps 1,248 and 1,249."""
    agent, after, _ = updates
    for online, target in zip(params(agent.online), params(agent.target)):  # before the first copy
        np.testing.assert_array_equal(online, target)
    for old, target, online in zip(params(agent.target), params(after.target), params(after.online)):
        np.testing.assert_array_equal(target[2], online[2])
        for i in (0, 1, 3):
            assert (target[i] == old).all() and (target[i] != online[i]).any()


def test_epsilon_decides_what_is_played():
    """Before DECAY_STEPS some steps are random, after it none is; the steps are counted from 0."""
    c = dqn.configure([*SMALL, "EPSILON_END=0", "DECAY_STEPS=100"])
    agent = new_agent(*SMALL)
    greedy = int(agent.online(agent.env_state.obs).argmax())

    def first_action(env_step, rng):
        return dqn.collect(c, agent, (env_step, rng))[0].replay_buffer.rows.action[0]

    rngs = jax.random.split(jax.random.key(2), 2_000)
    played = jax.jit(jax.vmap(jax.vmap(first_action, (None, 0)), (0, None)))(jnp.array([0, 50, 100]), rngs)
    # epsilon 1, 0.5 and 0, of which half is greedy by chance; 5 standard deviations
    np.testing.assert_allclose((np.asarray(played) == greedy).mean(axis=1), [0.5, 0.75, 1], atol=0.056)
    assert (played[2] == greedy).all()


def test_the_learning_rate_falls_in_a_straight_line_to_its_end():
    """Where all gradients are 1, Adam moves each weight by just the learning rate."""
    agent = new_agent(*SMALL, "NUM_STEPS=1020", "EVAL_INTERVAL=20", "LEARNING_RATE_END=1e-4")
    ones = jax.tree.map(jnp.ones_like, nnx.state(agent.online, nnx.Param))

    def one(carry, _):
        optimizer, online = carry
        before = online.output.bias[0]
        optimizer.update(online, ones)
        return carry, before - online.output.bias[0]

    _, moved = jax.jit(lambda *carry: jax.lax.scan(one, carry, length=10))(agent.optimizer, agent.online)
    # 1e-3 at the first update, 1e-4 where the eleventh would be; float32 differences of about 1e-2
    np.testing.assert_allclose(moved, np.linspace(1e-3, 1e-4, 11)[:10], atol=1e-7)


def test_scaled_observations_are_divided_by_the_scale():
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    scaled, network = network_of(0)(obs), network_of(0, "SCALE_OBSERVATIONS=False")
    np.testing.assert_allclose(scaled, network(obs / np.float32([2.4, 3.0, 0.21, 3.0])), rtol=1e-5)


def test_epsilon_greedy_chooses():
    q = jnp.array([1.0, 2.0])
    choose = jax.jit(jax.vmap(lambda key, epsilon: dqn.select_action(q, epsilon, key), (0, None)))
    keys = jax.random.split(jax.random.key(0), 10_000)
    assert (choose(keys, 0.0) == 1).all()
    # half of the random actions are the greedy one too; 5 standard deviations are 0.025
    assert np.mean(choose(keys, 1.0)) == pytest.approx(0.5, abs=0.025)
    assert np.mean(choose(keys, 0.4)) == pytest.approx(0.8, abs=0.025)


# --- worlds whose values are known


def probe(start, reward, ends_after=1, truncates=False):
    """A world of `ends_after` steps; the observation is (x, step, 0, 0) with x drawn by `start`.

    Where the world `truncates`, what comes after the cut is the same world again.
    """

    def reset(rng):
        return state_of(jnp.array([start(rng), 0.0, 0.0, 0.0]))

    def step(state, action):
        ended = state.steps + 1 >= ends_after
        earned, obs = jnp.float32(reward(state, action)), state.obs.at[1].add(0.0 if truncates else 1.0)
        following = env.EnvState(obs, state.steps + 1, state.episode_return + earned)
        return following, env.Transition(
            state.obs, action, earned, obs, ended & (not truncates), ended & truncates
        )

    return reset, step


def sign(rng):
    return jax.random.rademacher(rng, ()).astype(jnp.float32)


PROBES = {
    # name: (start, reward, ends_after, truncates), {observation: Q values}
    "constant reward": ((lambda rng: 1.0, lambda s, a: 1.0), {(1, 0): (1, 1)}),
    "value depends on the observation": ((sign, lambda s, a: s.obs[0]), {(1, 0): (1, 1), (-1, 0): (-1, -1)}),
    "discount": (
        (lambda rng: 1.0, lambda s, a: s.steps == 2, 3),
        {(1, 0): (0.25, 0.25), (1, 1): (0.5, 0.5), (1, 2): (1, 1)},
    ),
    "reward depends on the action": ((lambda rng: 1.0, lambda s, a: 2.0 * a - 1), {(1, 0): (-1, 1)}),
    "reward depends on both": (
        (sign, lambda s, a: s.obs[0] * (2.0 * a - 1)),
        {(1, 0): (-1, 1), (-1, 0): (1, -1)},
    ),
    # one more than the usual five: the first world, cut off. Its last observation is worth 2 as well.
    "truncation": ((lambda rng: 1.0, lambda s, a: 1.0, 1, True), {(1, 0): (2, 2)}),
}


@pytest.fixture(scope="module")
def probed():
    """All worlds as the seeds of one program: the networks after training, by name."""
    worlds = [probe(*world) for world, _ in PROBES.values()]

    def train_in(key, world):
        """The script's own training, in the world of this number."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(env, "reset", lambda rng: jax.lax.switch(world, [w[0] for w in worlds], rng))
            patch.setattr(env, "step", lambda *args: jax.lax.switch(world, [w[1] for w in worlds], *args))
            patch.setattr(env, "MAX_EPISODE_STEPS", 1)  # of the quick evaluation, not looked at here
            return training(dqn, c, key, dqn.num_rows(c))[0].online

    c = dqn.configure([
        "GAMMA=0.5", "NUM_STEPS=4400", "LEARNING_STARTS=400", "EVAL_INTERVAL=4000", "HIDDEN_SIZE=16",
        "EPSILON_END=1.0", "N_STEPS=2", "SCALE_OBSERVATIONS=False", "REPLAY_CAPACITY=1000",
        "TARGET_SYNC_INTERVAL=20",
    ])  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(worlds))
    networks = jax.jit(jax.vmap(train_in))(keys, jnp.arange(len(worlds)))
    return {name: unstack(networks, i) for i, name in enumerate(PROBES)}


@pytest.mark.parametrize("name", PROBES)
def test_probe_environments(probed, name):
    for (x, t), q in PROBES[name][1].items():
        # 2,000 steps of Adam with a falling rate fit a handful of points to about 1e-3
        np.testing.assert_allclose(probed[name](jnp.array([x, t, 0.0, 0.0])), q, atol=0.02)


def test_quick_evaluate_sums_and_discounts(monkeypatch):
    monkeypatch.setattr(env, "QUICK_EVAL_EPISODES", 4)
    network = lookup([[3.0, 7.0]] * 3)  # always pushes right: the pole falls after about ten steps
    returned, max_q, discounted = env.quick_evaluate(network, jax.random.key(0), 0.99)
    # the same episodes by hand: each step earns 1, the last one too
    step, lengths = jax.jit(env.step), []
    for rng in jax.random.split(jax.random.key(0), 4):
        state, terminated = env.reset(rng), False
        while not terminated:
            state, transition = step(state, jnp.int32(1))
            terminated = transition.terminated
        lengths.append(int(state.steps))
    assert min(lengths) > 5 and max(lengths) < 20 and len(set(lengths)) > 1
    assert returned == np.mean(lengths) and max_q == 7
    # geometric series, float32
    by_hand = np.mean([(1 - 0.99**length) / 0.01 for length in lengths])
    assert float(discounted) == pytest.approx(by_hand, rel=1e-5)


def test_evaluate_plays_cart_pole_v1(monkeypatch):
    """With a time limit that some of the episodes reach: what is played after either end does not count."""
    monkeypatch.setattr(env.gymnasium, "make_vec", partial(gymnasium.make_vec, max_episode_steps=20))
    keys = jax.random.split(jax.random.key(0), 3)
    networks = nnx.vmap(lambda key: dqn.make_network(C, key))(keys)
    returns, act = env.evaluate(networks, 4), jax.jit(lambda network, obs: network(obs).argmax())
    assert returns.shape == (3, 4)
    for s in range(3):
        network = unstack(networks, s)
        for e in range(4):
            world = gymnasium.make("CartPole-v1", max_episode_steps=20)
            obs, _ = world.reset(seed=e)
            total, ended = 0.0, False
            while not ended:
                obs, reward, terminated, truncated, _ = world.step(int(act(network, obs)))
                total, ended = total + reward, terminated or truncated
            assert returns[s, e] == total
    assert returns.min() < 20 == returns.max()


def test_two_seeds_learn_to_balance():
    """Ten seeds of ten balance for 500 steps; the mark leaves room for other machines' rounding."""
    # three looks at the greedy policy instead of 49: they change nothing that is learned, but the keys
    c = dqn.configure(["NUM_SEEDS=2", "EVAL_INTERVAL=7000", "NUM_STEPS=22_000"])
    agents, log, _ = dqn.train(c)
    returns = env.evaluate(agents.online, 10).mean(axis=1)
    assert (returns >= env.SOLVED).all(), returns
    # and the promise is near the truth at the end: gamma^500 and the network's fit leave a few units of 100
    np.testing.assert_allclose(log.max_q[:, -1], log.discounted_return[:, -1], atol=5)


# --- the script as a reader runs it


@pytest.mark.parametrize("page", ["networks_and_jax.md", "networks_and_jax_ch.md"])
def test_the_pages_worked_examples_print_what_they_say(page, capsys):
    text = (Path(dqn.__file__).parent / page).read_text()
    examples = re.findall(r"```py\n(.*?)```\n\n```text\n(.*?)```", text, re.S)
    assert len(examples) == 2
    names = {"__name__": "example"}  # the second goes on where the first ended
    for code, said in examples:
        exec(compile(code, page, "exec"), names)
        assert capsys.readouterr().out == said
