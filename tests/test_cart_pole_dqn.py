"""Folder 2: the environment against Gymnasium, the target by hand and against rlax, learning on worlds whose
values are known, and the script as a reader runs it."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import cart_pole_dqn as dqn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from flax import nnx

SCRIPT = Path(dqn.__file__)
README = SCRIPT.parent / "README.md"


@pytest.fixture(autouse=True)
def defaults():
    dqn.configure([])
    yield
    dqn.configure([])


def silent(row):
    """A report that reports nothing."""


def train(seeds=(0,)):
    """A fresh trace each time, or a constant changed in between would go unnoticed."""
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jax.jit(jax.vmap(lambda key: dqn.train(key, silent), axis_name="seed"))(keys)


def unstack(tree, index=0):
    return jax.tree.map(lambda x: x[index], tree)


def params(network):
    return jax.tree.leaves(nnx.state(network, nnx.Param))


# --- the environment


@pytest.fixture(scope="module")
def random_episodes():
    """1,000 random episodes of CartPole-v1: first states, actions, states after each step, lengths."""
    rng, env = np.random.default_rng(0), gymnasium.make("CartPole-v1")
    episodes = []
    for seed in range(1_000):
        obs, _ = env.reset(seed=seed)
        states, actions, terminated = [obs], [], False
        while not terminated:
            actions.append(int(rng.integers(2)))
            obs, reward, terminated, truncated, _ = env.step(actions[-1])
            assert reward == 1.0 and not truncated
            states.append(obs)
        episodes.append((np.array(states), np.array(actions)))
    return episodes


@pytest.mark.parametrize("physics, equal", [(dqn.PHYSICS, True), (type(dqn.PHYSICS)(), False)])
def test_each_step_equals_cart_pole_v1(random_episodes, physics, equal, monkeypatch):
    monkeypatch.setattr(dqn, "PHYSICS", physics)
    before = np.concatenate([states[:-1] for states, _ in random_episodes])
    after = np.concatenate([states[1:] for states, _ in random_episodes])
    actions = np.concatenate([actions for _, actions in random_episodes])
    ends = np.concatenate([np.arange(len(actions)) == len(actions) - 1 for _, actions in random_episodes])
    transition = jax.vmap(lambda obs, action: dqn.step(dqn.EnvState(obs, jnp.int32(0)), action))(
        before, actions
    )
    # Gymnasium computes in float64 and shows float32; from one shown state to the next that is a few units
    # in the last place of numbers up to about 4.
    same = np.allclose(transition.next_obs, after, atol=2e-6, rtol=1e-6)
    assert same == equal  # Gymnasium 1.4.0's own default parameters are another physics
    if equal:
        np.testing.assert_array_equal(transition.terminated, ends)
        np.testing.assert_array_equal(transition.reward, 1.0)
        assert not transition.truncated.any()


def test_whole_random_episodes_end_at_the_same_step(random_episodes):
    longest = max(len(actions) for _, actions in random_episodes)
    first = np.array([states[0] for states, _ in random_episodes])
    actions = np.array([np.resize(actions, longest) for _, actions in random_episodes])

    def play(obs, actions):
        def one(state, action):
            transition = dqn.step(state, action)
            state = dqn.EnvState(transition.next_obs, state.steps + 1)
            return state, (transition.next_obs, transition.terminated)

        return jax.lax.scan(one, dqn.EnvState(obs, jnp.int32(0)), actions)[1]

    obs, terminated = map(np.asarray, jax.jit(jax.vmap(play))(first, actions))
    lengths = np.array([len(actions) for _, actions in random_episodes])
    np.testing.assert_array_equal(terminated.argmax(axis=1) + 1, lengths)
    for i, (states, _) in enumerate(random_episodes):
        # A falling pole multiplies a rounding error of 1e-7 by about e^3.8 a second; the longest episode here
        # takes 2.3 seconds, the measured maximum is 1.5e-4.
        np.testing.assert_allclose(obs[i, : lengths[i]], states[1:], atol=5e-4)


def test_the_time_limit_truncates_at_the_same_step_as_cart_pole_v1():
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    state = dqn.EnvState(jnp.array(obs), jnp.int32(0))
    step = jax.jit(dqn.step)
    ended = False
    while not ended:
        action = int(0.1 * obs[0] + 0.3 * obs[1] + 4 * obs[2] + obs[3] > 0)  # a controller that balances
        obs, _, terminated, truncated, _ = env.step(action)
        transition = step(state, jnp.int32(action))
        state = dqn.EnvState(jnp.array(obs), state.steps + 1)  # Gymnasium's: rounding must not add up
        assert (bool(transition.terminated), bool(transition.truncated)) == (terminated, truncated)
        ended = terminated or truncated
    assert truncated and state.steps == 500


# --- the replay buffer


def numbered(i):
    """A transition that knows when it was played."""
    return dqn.Transition(
        jnp.full(4, i, jnp.float32),
        jnp.int32(i % 2),
        jnp.float32(i),
        jnp.full(4, i + 1.0),
        i % 7 == 0,
        i % 5 == 0,
    )


@pytest.mark.parametrize("added, oldest", [(4, 0), (5, 0), (8, 0), (9, 1), (20, 12)])
def test_the_ring_never_returns_unwritten_overwritten_or_torn_windows(added, oldest):
    dqn.configure(["REPLAY_CAPACITY=8", "N_STEPS=3", "BATCH_SIZE=500", "LEARNING_STARTS=1000"])
    buffer = dqn.empty_buffer()
    for i in range(added):
        buffer = buffer.add(jax.tree.map(jnp.asarray, numbered(i)))
    window = buffer.sample(jax.random.key(0))
    rewards = np.asarray(window.reward)  # the number of each transition, [500, 3]
    np.testing.assert_array_equal(rewards, rewards[:, :1] + np.arange(3))  # consecutive
    # every window that exists is drawn (500 draws of at most 6 windows: missing one has probability 1e-38)
    assert set(rewards[:, 0]) == set(range(oldest, added - 2))
    for row in (0, 250, 499):
        for i in range(3):
            for stored, meant in zip(unstack(window, (row, i)), numbered(int(rewards[row, i]))):
                np.testing.assert_array_equal(stored, meant)


def test_windows_are_drawn_uniformly():
    dqn.configure(["REPLAY_CAPACITY=8", "N_STEPS=3", "BATCH_SIZE=60000", "LEARNING_STARTS=1000"])
    buffer = dqn.empty_buffer()
    for i in range(20):
        buffer = buffer.add(jax.tree.map(jnp.asarray, numbered(i)))
    drawn = np.asarray(buffer.sample(jax.random.key(1)).reward)[:, 0].astype(int)
    counts = np.bincount(drawn, minlength=18)[12:]
    assert np.abs(counts - 10_000).max() < 500  # 5.5 standard deviations of a binomial count


# --- the target


def lookup(table):
    """A network that reads its Q values from rows of a table: observation [i, ., ., .] has row i."""
    return lambda obs: jnp.asarray(table, jnp.float32)[obs[..., 0].astype(int)]


ONLINE = [[0, 0], [5, 1], [1, 9], [2, 3]]
TARGET = [[0, 0], [10, 20], [30, 40], [60, 50]]


def window_of(terminated, truncated):
    """Three steps through the states 0, 1, 2, 3 with rewards 1, 2, 4."""
    states = jnp.tile(jnp.arange(4.0)[:, None], (1, 4))
    return dqn.Transition(
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
    dqn.configure(["GAMMA=0.5", f"DOUBLE_DQN={double}", "N_STEPS=3"])
    window = window_of(np.array(terminated, bool), np.array(truncated, bool))
    # every number here is a small dyadic fraction: exact in float32
    np.testing.assert_array_equal(dqn.td_target(lookup(ONLINE), lookup(TARGET), window), [by_hand])


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_td_target_equals_rlax(n, double):
    dqn.configure([f"DOUBLE_DQN={double}", f"N_STEPS={n}"])
    rng = np.random.default_rng(n)
    batch = 200
    terminated = rng.random((batch, n)) < 0.2
    obs, next_obs = rng.normal(size=(2, batch, n, 4)).astype(np.float32)
    reward = rng.normal(size=(batch, n)).astype(np.float32)
    window = dqn.Transition(
        obs, np.zeros((batch, n), int), reward, next_obs, jnp.array(terminated), jnp.zeros((batch, n), bool)
    )
    online, target = dqn.QNetwork(nnx.Rngs(0)), dqn.QNetwork(nnx.Rngs(1))
    q_next, selector = target(next_obs), (online if double else target)(next_obs)
    value = jnp.take_along_axis(q_next, selector.argmax(-1)[..., None], -1)[..., 0]  # [B, n]
    discount = 0.99 * (1 - terminated)
    rlax_target = jax.vmap(lambda r, d, v: rlax.n_step_bootstrapped_returns(r, d, v, n)[0])(
        reward, discount, value
    )
    # float32 sums of up to six terms of size about 1
    np.testing.assert_allclose(dqn.td_target(online, target, window), rlax_target, atol=1e-5)


def test_the_gradient_flows_into_the_prediction_only():
    dqn.configure(["N_STEPS=2"])
    rng = np.random.default_rng(0)
    window = dqn.Transition(
        jnp.array(rng.normal(size=(32, 2, 4)), jnp.float32), jnp.array(rng.integers(0, 2, (32, 2))),
        jnp.ones((32, 2)), jnp.array(rng.normal(size=(32, 2, 4)), jnp.float32), jnp.zeros((32, 2), bool),
        jnp.zeros((32, 2), bool),
    )  # fmt: skip
    network = dqn.QNetwork(nnx.Rngs(0))
    into_target = nnx.grad(lambda target: dqn.td_target(network, target, window).sum())(network)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(into_target))

    # The same network as prediction and target: a gradient through the target would show at once.
    y = np.asarray(dqn.td_target(network, network, window))
    before = [np.asarray(p, np.float64) for p in params(network)]

    def semi_gradient(network):
        q = network(window.obs[:, 0])[jnp.arange(32), window.action[:, 0]]
        return ((q - y) ** 2).sum() / 32

    by_hand = params(nnx.grad(semi_gradient)(network))
    loss_by_hand = semi_gradient(network)
    optimizer = nnx.Optimizer(network, optax.sgd(1.0), wrt=nnx.Param)  # weights move by minus the gradient
    loss, _ = dqn.train_step(network, nnx.clone(network), optimizer, window)
    assert loss == pytest.approx(float(loss_by_hand), rel=1e-6)  # one float32 mean in two orders
    for old, new, gradient in zip(before, params(network), by_hand):
        # the difference of two weights near 1 keeps about 1e-7 of a gradient's digits
        np.testing.assert_allclose(old - np.asarray(new), gradient, atol=1e-6)


# --- the target network


def test_synchronize_copies_and_does_not_share():
    online, target = dqn.QNetwork(nnx.Rngs(0)), dqn.QNetwork(nnx.Rngs(1))
    before = [np.asarray(p) for p in params(target)]
    dqn.synchronize(online, target, jnp.array(False))
    assert all((a == b).all() for a, b in zip(before, params(target)))
    dqn.synchronize(online, target, jnp.array(True))
    assert all((a == b).all() for a, b in zip(params(online), params(target)))
    online.output.bias[...] += 1.0
    assert not (online.output.bias[...] == target.output.bias[...]).any()


SHORT = [
    "LEARNING_STARTS=11", "EVAL_INTERVAL=4", "TRAIN_INTERVAL=2", "BATCH_SIZE=4", "LEARNING_RATE_END=1e-3",
    "N_STEPS=2", "HIDDEN_SIZE=8",
]  # fmt: skip


@pytest.mark.parametrize("interval, num_steps, moved_at", [(100, 23, 11), (8, 23, 19)])
def test_the_target_network_moves_only_on_sync(interval, num_steps, moved_at):
    """It is the online network as it was at step `moved_at`: 11 is before the first gradient step."""
    dqn.configure([*SHORT, f"TARGET_SYNC_INTERVAL={interval}", f"NUM_STEPS={num_steps}"])
    target = unstack(train()[0].target)
    if moved_at == 11:
        network_rng = jax.random.split(jax.random.key(0), 4)[0]
        then = dqn.QNetwork(nnx.Rngs(network_rng))
    else:
        dqn.configure([*SHORT, f"TARGET_SYNC_INTERVAL={interval}", f"NUM_STEPS={moved_at}"])
        then = unstack(train()[0].online)
    for a, b in zip(params(target), params(then)):
        # same operations in two compiled programs: at most fused differently
        np.testing.assert_allclose(a, b, atol=1e-6)
    dqn.configure([*SHORT, f"TARGET_SYNC_INTERVAL={interval}", f"NUM_STEPS={moved_at + 4}"])
    later = unstack(train()[0].online)
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(params(target), params(later)))


# --- the loop


def test_the_buffer_holds_what_was_played(monkeypatch):
    """Each row follows from the one before; the true last observation is kept, not the reset one."""
    monkeypatch.setattr(dqn, "MAX_EPISODE_STEPS", 30)
    dqn.configure(["NUM_STEPS=1001", "LEARNING_STARTS=501", "EVAL_INTERVAL=500", "TRAIN_INTERVAL=2"])
    buffer = unstack(train()[0].replay_buffer)
    assert buffer.count == 1001
    rows = jax.tree.map(lambda x: np.asarray(x)[:1001], buffer.rows)
    ended = rows.terminated | rows.truncated
    following = ~ended[:-1]
    np.testing.assert_array_equal(rows.next_obs[:-1][following], rows.obs[1:][following])
    starts = rows.obs[1:][ended[:-1]]
    assert len(starts) > 20 and (np.abs(starts) <= 0.05).all()
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


def test_a_changed_constant_is_seen_by_the_next_training():
    """jax keeps traces by function: a scan body outside of `train` would silently keep the old constant."""
    dqn.configure([*SHORT, "NUM_STEPS=31"])
    first = params(unstack(train()[0].online))
    dqn.configure([*SHORT, "NUM_STEPS=31", "N_STEPS=4"])
    changed = params(unstack(train()[0].online))
    dqn.configure([*SHORT, "NUM_STEPS=31"])
    again = params(unstack(train()[0].online))
    assert all((a == b).all() for a, b in zip(first, again))
    assert any((a != b).any() for a, b in zip(first, changed))


def test_seeds_do_not_see_each_other():
    dqn.configure([*SHORT, "NUM_STEPS=51"])
    together, log = train(seeds=(3, 4))
    alone, _ = train(seeds=(4,))
    for a, b in zip(params(unstack(together.online, 1)), params(unstack(alone.online))):
        np.testing.assert_allclose(a, b, atol=1e-5)  # 20 Adam steps, matrix products in another order
    assert (params(together.online)[0][0] != params(together.online)[0][1]).any()
    np.testing.assert_array_equal(log.env_step[0], np.arange(15, 52, 4))
    assert log.epsilon[0, -1] == pytest.approx(1 - 0.99 * 51 / 10_000, rel=1e-6)  # float32


def test_epsilon_falls_in_a_straight_line_then_stays():
    at = [float(dqn.epsilon_at(jnp.int32(step))) for step in (0, 5_000, 10_000, 50_000)]
    np.testing.assert_allclose(at, [1.0, 0.505, 0.01, 0.01], rtol=1e-6)  # float32


def test_epsilon_greedy_chooses():
    network, obs = lookup([[1.0, 2.0]]), jnp.zeros(4)
    choose = jax.jit(jax.vmap(lambda key, epsilon: dqn.select_action(network, obs, epsilon, key), (0, None)))
    keys = jax.random.split(jax.random.key(0), 10_000)
    assert (choose(keys, 0.0) == 1).all()
    # half of the random actions are the greedy one too; 5 standard deviations are 0.025
    assert np.mean(choose(keys, 1.0)) == pytest.approx(0.5, abs=0.025)
    assert np.mean(choose(keys, 0.4)) == pytest.approx(0.8, abs=0.025)


# --- worlds whose values are known


def test_a_two_state_chain_reaches_its_fixed_point():
    """0 -> 1 earns 1, 1 -> 0 earns 3, for ever: Q(0) = (1 + 0.9 * 3) / (1 - 0.81), Q(1) = 3 + 0.9 Q(0)."""
    dqn.configure(["GAMMA=0.9", "N_STEPS=1", "SCALE_OBSERVATIONS=False"])
    states = jnp.eye(4)[:2]
    obs = jnp.repeat(states, 2, axis=0)[:, None]  # [4, 1, 4]: both states, both actions
    none = jnp.zeros((4, 1), bool)
    actions, rewards = jnp.array([[0], [1], [0], [1]]), jnp.array([[1.0], [1.0], [3.0], [3.0]])
    window = dqn.Transition(obs, actions, rewards, obs[::-1], none, none)
    online = dqn.QNetwork(nnx.Rngs(0))
    optimizer = nnx.Optimizer(online, optax.adam(optax.linear_schedule(3e-3, 0.0, 6_000)), wrt=nnx.Param)

    @jax.jit
    def learn(carry):
        def update(carry, i):
            online, target, optimizer = carry
            dqn.train_step(online, target, optimizer, window)
            dqn.synchronize(online, target, i % 20 == 0)
            return carry, None

        return jax.lax.scan(update, carry, jnp.arange(6_000))[0]

    online, _, _ = learn((online, nnx.clone(online), optimizer))
    q0 = (1 + 0.9 * 3) / (1 - 0.81)
    # 300 copies shrink the error of the start by 0.9^300; what is left is the network's own fit
    np.testing.assert_allclose(online(states), [[q0, q0], [3 + 0.9 * q0] * 2], rtol=1e-2)


def probe(start, reward, ends_after=1, truncates=False):
    """A world of `ends_after` steps; the observation is (x, step, 0, 0) with x drawn by `start`."""

    def reset(rng):
        return dqn.EnvState(jnp.array([start(rng), 0.0, 0.0, 0.0]), jnp.int32(0))

    def step(state, action):
        ended = state.steps + 1 >= ends_after
        return dqn.Transition(
            state.obs, action, jnp.float32(reward(state, action)), state.obs.at[1].add(1.0),
            ended & (not truncates), ended & truncates,
        )  # fmt: skip

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


@pytest.mark.parametrize("name", PROBES)
def test_probe_environments(name, monkeypatch):
    world, values = PROBES[name]
    reset, step = probe(*world)
    if name == "truncation":  # what comes after the cut is the same world again

        def step(state, action, step=step):
            return step(state, action)._replace(next_obs=state.obs)

    monkeypatch.setattr(dqn, "reset", reset)
    monkeypatch.setattr(dqn, "step", step)
    monkeypatch.setattr(dqn, "MAX_EPISODE_STEPS", 1)  # of the quick evaluation, which is not looked at here
    dqn.configure(
        [
            "GAMMA=0.5",
            "NUM_STEPS=6400",
            "LEARNING_STARTS=400",
            "EVAL_INTERVAL=6000",
            "EPSILON_END=1.0",
            "N_STEPS=2",
            "SCALE_OBSERVATIONS=False",
            "REPLAY_CAPACITY=1000",
            "TARGET_SYNC_INTERVAL=20",
        ]
    )
    online = unstack(train()[0].online)
    for (x, t), q in values.items():
        # 3,000 steps of Adam with a falling rate fit a handful of points to about 1e-3
        np.testing.assert_allclose(online(jnp.array([x, t, 0.0, 0.0])), q, atol=0.02)


def test_quick_evaluate_sums_and_discounts(monkeypatch):
    monkeypatch.setattr(dqn, "QUICK_EVAL_EPISODES", 1)
    network = lookup([[3.0, 7.0]] * 3)  # always pushes right: the pole falls after about ten steps
    returned, max_q, discounted = dqn.quick_evaluate(network, jax.random.key(0))
    assert 5 < returned < 20 and max_q == 7
    assert float(discounted) == pytest.approx(
        (1 - 0.99 ** float(returned)) / 0.01, rel=1e-5
    )  # geometric series, float32


def test_evaluate_plays_cart_pole_v1():
    dqn.configure(["EVAL_EPISODES=4"])
    networks = nnx.vmap(lambda key: dqn.QNetwork(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    returns = dqn.evaluate(networks)
    assert returns.shape == (3, 4)
    for s in range(3):
        network = unstack(networks, s)
        for e in range(4):
            env = gymnasium.make("CartPole-v1")
            obs, _ = env.reset(seed=e)
            total, ended = 0.0, False
            while not ended:
                obs, reward, terminated, truncated, _ = env.step(int(network(jnp.array(obs)).argmax()))
                total, ended = total + reward, terminated or truncated
            assert returns[s, e] == total


def test_three_seeds_learn_to_balance():
    """Ten seeds of ten balance for 500 steps; the mark leaves room for other machines' rounding."""
    dqn.configure(["NUM_SEEDS=3", "EVAL_EPISODES=30"])
    agents, log, _, _ = dqn.train_seeds()
    returns = dqn.evaluate(agents.online).mean(axis=1)
    assert (returns >= 475).all(), returns
    assert (dqn.evaluate(agents.best).mean(axis=1) >= 475).all()
    # and the promise is near the truth at the end: gamma^500 and the network's fit leave a few units of 100
    np.testing.assert_allclose(log.max_q[:, -1], log.discounted_return[:, -1], atol=5)


# --- the script as a reader runs it

QUICK = [
    "NUM_SEEDS=2", "NUM_STEPS=1200", "LEARNING_STARTS=1000", "EVAL_INTERVAL=100", "EVAL_EPISODES=2",
]  # fmt: skip


def run_script(folder, *arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_the_script_runs_and_leaves_its_results(tmp_path):
    done = run_script(tmp_path, *QUICK, "RUN_DIR=mine")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert set(result) == {
        "eval_return", "best_eval_return", "env_steps", "seconds", "compile_seconds", "train_seconds",
    }  # fmt: skip
    assert len(result["eval_return"]) == len(result["best_eval_return"]) == 2
    assert result["env_steps"] == 1200
    assert 0 < result["compile_seconds"] + result["train_seconds"] < result["seconds"]
    with open(tmp_path / "mine" / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["env_step"]) for row in rows] == [
        ("0", "1100"), ("0", "1200"), ("1", "1100"), ("1", "1200")
    ]  # fmt: skip
    for name in ("learning_curve.png", "cart_pole.gif", "constants.json"):
        assert (tmp_path / "mine" / name).stat().st_size > 100
    assert "mine" in done.stdout
    # a second run does not write over the first
    again = run_script(tmp_path, *QUICK, "RUN_DIR=mine")
    assert again.returncode == 2 and again.stderr.startswith("error: RUN_DIR=mine: ")


@pytest.mark.parametrize(
    "argument, said",
    [
        ("N_STEP=3", "N_STEPS"),
        ("GAMMA", "GAMMA"),
        ("GAMMA=[", "GAMMA"),
        ("GAMMA=${x}", "GAMMA"),
        ("GAMMA=nan", "GAMMA"),
        ("GAMMA=1.0", "GAMMA=1.0: must be"),
        ("N_STEPS=2.5", "N_STEPS"),
        ("DOUBLE_DQN=1", "DOUBLE_DQN"),
        ("N_STEPS=0", "N_STEPS=0: must be"),
        ("BATCH_SIZE=0", "BATCH_SIZE=0: must be"),
        ("REPLAY_CAPACITY=4", "REPLAY_CAPACITY=4: must be from N_STEPS=5"),
        ("LEARNING_STARTS=4", "LEARNING_STARTS=4: must be N_STEPS=5"),
        ("TRAIN_INTERVAL=0", "TRAIN_INTERVAL=0: must be"),
        ("EVAL_INTERVAL=0", "EVAL_INTERVAL=0: must be"),
        ("EVAL_INTERVAL=1001", "EVAL_INTERVAL=1001: must be a multiple of TRAIN_INTERVAL=2"),
        ("NUM_STEPS=50001", "NUM_STEPS=50001: must be LEARNING_STARTS=1000 plus"),
        ("NUM_STEPS=1000", "NUM_STEPS=1000: must be"),
        ("TARGET_SYNC_INTERVAL=251", "TARGET_SYNC_INTERVAL=251: must be a multiple"),
        ("LEARNING_RATE=0", "LEARNING_RATE=0.0: must be"),
        ("LEARNING_RATE=.inf", "LEARNING_RATE=inf: must be"),
        ("LEARNING_RATE_END=-1e-3", "LEARNING_RATE_END=-0.001: must be"),
        ("HIDDEN_SIZE=0", "HIDDEN_SIZE=0: must be"),
        ("EPSILON_START=1.5", "EPSILON_START=1.5: must be"),
        ("EPSILON_END=-0.1", "EPSILON_END=-0.1: must be"),
        ("DECAY_STEPS=0", "DECAY_STEPS=0: must be"),
        ("SEED=-1", "SEED=-1: must be"),
        ("NUM_SEEDS=0", "NUM_SEEDS=0: must be"),
        ("EVAL_EPISODES=0", "EVAL_EPISODES=0: must be"),
    ],
)
def test_bad_input_is_refused_with_its_name_and_remedy(argument, said):
    with pytest.raises(dqn.UserError, match=re.escape(said)) as error:
        dqn.configure([argument])
    assert "\n" not in str(error.value)


def test_bad_input_gets_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "file").write_text("")
    for argument in ("N_STEPS=0", "RUN_DIR=file"):
        done = run_script(tmp_path, argument)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {argument}")
    # a row of the comparison that clashes with the command line is refused before any training
    done = run_script(tmp_path, "COMPARE=True", "LEARNING_STARTS=8", "NUM_STEPS=1008")
    assert done.returncode == 2 and "N_STEPS=10" in done.stderr
