"""DQN on CartPole: the table of folder 1 becomes a network, and learning becomes unstable. This holds it.

The loss (Mnih et al. 2015, with Double DQN of van Hasselt et al. 2016 and n-step targets of Sutton 1988):

    L = mean (y - Q_online(s_t, a_t))^2
    y = sum_{k<m} gamma^k r_{t+k} + gamma^m (1 - terminated) Q_target(s_{t+m}, argmax_a Q_online(s_{t+m}, a))

with m = N_STEPS, or fewer where the episode ends first; a truncated episode still bootstraps.

What is *not* here, and why: no frame stacking and no convolutions (the state is four numbers), no prioritized
replay and no dueling heads (ten of ten seeds do without), no Huber loss (rewards of 1 need no guard against
large errors), no correction of the n-step return for the older policy that played it (as in Rainbow; with
epsilon near 0 the two seldom disagree).

    python 2_Cart_Pole_DQN/cart_pole_dqn.py               # ten seeds at once: about 35 seconds on 2 CPU cores
    python 2_Cart_Pole_DQN/cart_pole_dqn.py N_STEPS=1 NUM_SEEDS=3
    python 2_Cart_Pole_DQN/cart_pole_dqn.py COMPARE=True  # every row of the ablation table: 12 minutes
"""

import csv
import difflib
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# XLA splits even the smallest matrix product over all cores; here the hand-over costs more than it saves, and
# one thread makes a run repeatable bit for bit.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the GIF is drawn without a screen

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx, struct
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from tqdm import tqdm
from yaml import YAMLError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# %% Constants ------------------------------------------------------------------------------------------
# Learning
NUM_STEPS = 50_000  # environment steps of each seed
LEARNING_STARTS = 1_000  # steps played before the first gradient step, so that a batch is not one episode
TRAIN_INTERVAL = 2  # environment steps between gradient steps; 1 wears the buffer's few episodes out
BATCH_SIZE = 64  # windows of N_STEPS transitions drawn from the buffer
REPLAY_CAPACITY = 10_000  # transitions kept; the oldest is overwritten
GAMMA = 0.99  # worth of a reward one step later: looks about 100 steps ahead
LEARNING_RATE = 1e-3  # Adam's, at the first gradient step
LEARNING_RATE_END = 0.0  # ... and at the last; in between a straight line. Equal values: no decay

# What holds it steady
TARGET_SYNC_INTERVAL = 250  # environment steps between copies of the online network into the target network
N_STEPS = 5  # rewards counted before the network's own opinion; 1: the DQN of 2015
DOUBLE_DQN = True  # the online network chooses the next action, the target network values it
SCALE_OBSERVATIONS = True  # divide by OBSERVATION_SCALE, so that all four numbers reach about 1
HIDDEN_SIZE = 64  # width of the two hidden layers

# Exploration: epsilon falls in a straight line, then stays
EPSILON_START = 1.0  # probability of a random action at first; 1: nothing but random actions
EPSILON_END = 0.01  # ... and in the end; 0 would stop looking altogether
DECAY_STEPS = 10_000  # environment steps from EPSILON_START to EPSILON_END

# The run
SEED = 0  # of the first seed
NUM_SEEDS = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
EVAL_INTERVAL = 1_000  # environment steps between looks at the greedy policy during training
EVAL_EPISODES = 100  # greedy episodes on gymnasium.make("CartPole-v1") after training, for each seed
COMPARE = False  # True: trains every row of COMPARISON as well, and draws the comparison
RUN_DIR = ""  # empty: runs/cart_pole_dqn/<time>

DEFAULTS = {name: value for name, value in globals().items() if name.isupper()}


class UserError(Exception):
    """Something the person at the keyboard can mend: shown as one line, exit code 2."""


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets this module's constants: the defaults, changed by `NAME=value` arguments.

    Args:
        arguments: such as ["N_STEPS=1", "LEARNING_RATE=5e-4"].

    Returns:
        Every constant by name, as the run will use it.

    Raises:
        UserError: an unknown name (lists the nearest), a value of the wrong type or out of range.
    """
    constants = dict(DEFAULTS)
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in DEFAULTS or not equals:
            near = difflib.get_close_matches(name.upper(), DEFAULTS, n=3, cutoff=0.5)
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: "
                f"{', '.join(near) or 'none, see the top of the script'}"
            )
        kind = type(DEFAULTS[name])
        try:
            # 1e-3 -> 0.001, True -> bool
            value = text if kind is str else OmegaConf.from_cli([argument])[name]
            if kind is float and type(value) is int:
                value = float(value)
        except (YAMLError, OmegaConfBaseException, ValueError, OverflowError):  # "[", "${x}", 400 digits
            value = None
        if type(value) is not kind:
            raise UserError(
                f"{argument!r}: {name} is of type {kind.__name__}, {text!r} is not; "
                f"write it like {DEFAULTS[name]}"
            )
        constants[name] = value
    globals().update(constants)
    check_constants()
    return constants


def check_constants() -> None:
    """Refuses values that would fail later, or teach nothing without saying so.

    Raises:
        UserError: names the constant, its value and the remedy.
    """
    learning_steps = NUM_STEPS - LEARNING_STARTS
    # Written as `not (good)`: a comparison with nan is False, and nan is refused with the rest.
    checks = [
        ("BATCH_SIZE", 1 <= BATCH_SIZE <= 10**6, "from 1 to 1000000"),
        ("N_STEPS", 1 <= N_STEPS <= 1_000, "from 1 to 1000"),
        ("REPLAY_CAPACITY", N_STEPS <= REPLAY_CAPACITY <= 10**7, f"from N_STEPS={N_STEPS} to 10000000"),
        (
            "LEARNING_STARTS",
            LEARNING_STARTS >= N_STEPS,
            f"N_STEPS={N_STEPS} or more, or nothing can be drawn",
        ),
        ("TRAIN_INTERVAL", TRAIN_INTERVAL >= 1, "1 or more"),
        (
            "EVAL_INTERVAL",
            EVAL_INTERVAL >= 1 and EVAL_INTERVAL % max(TRAIN_INTERVAL, 1) == 0,
            f"a multiple of TRAIN_INTERVAL={TRAIN_INTERVAL}",
        ),
        (
            "NUM_STEPS",
            EVAL_INTERVAL <= learning_steps < 10**9 and learning_steps % max(EVAL_INTERVAL, 1) == 0,
            f"LEARNING_STARTS={LEARNING_STARTS} plus a multiple of EVAL_INTERVAL={EVAL_INTERVAL}",
        ),
        (
            "TARGET_SYNC_INTERVAL",
            TARGET_SYNC_INTERVAL >= 1 and TARGET_SYNC_INTERVAL % max(TRAIN_INTERVAL, 1) == 0,
            f"a multiple of TRAIN_INTERVAL={TRAIN_INTERVAL}; between gradient steps there is nothing to copy",
        ),
        ("GAMMA", 0 <= GAMMA < 1, "from 0 to below 1; at 1 the value of balancing for ever is infinite"),
        ("LEARNING_RATE", 0 < LEARNING_RATE < np.inf, "above 0 and finite"),
        ("LEARNING_RATE_END", 0 <= LEARNING_RATE_END < np.inf, "0 or more and finite"),
        ("HIDDEN_SIZE", 1 <= HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("EPSILON_START", 0 <= EPSILON_START <= 1, "a probability, from 0 to 1"),
        ("EPSILON_END", 0 <= EPSILON_END <= EPSILON_START, f"from 0 to EPSILON_START={EPSILON_START}"),
        ("DECAY_STEPS", DECAY_STEPS >= 1, "1 or more; freeze epsilon by EPSILON_START = EPSILON_END"),
        ("SEED", 0 <= SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_EPISODES", EVAL_EPISODES >= 1, "1 or more"),
    ]
    for name, good, remedy in checks:
        if not good:
            raise UserError(f"{name}={globals()[name]}: must be {remedy}")


# %% Environment ----------------------------------------------------------------------------------------
ENV = CartPoleFunctional()
# Trap: Gymnasium 1.4.0's own default of polemass_length is mass + length (0.6). CartPole-v1 multiplies them.
PHYSICS = CartPoleParams(polemass_length=0.05)
MAX_EPISODE_STEPS = gymnasium.spec("CartPole-v1").max_episode_steps  # 500
# Where an episode ends (position 2.4, angle 0.21), and about the largest speeds that a balancing cart meets.
OBSERVATION_SCALE = (2.4, 3.0, 0.21, 3.0)  # m, m/s, rad, rad/s


class Transition(NamedTuple):
    """One step of the environment; with leading axes, many of them."""

    obs: jax.Array  # float32 [4]
    action: jax.Array  # int32 []
    reward: jax.Array  # float32 []
    next_obs: jax.Array  # float32 [4], the true one, not the first of the next episode
    terminated: jax.Array  # bool [], the pole fell or the cart left the track
    truncated: jax.Array  # bool [], the 500 steps are over; the pole still stands


class EnvState(NamedTuple):
    """An episode in progress."""

    obs: jax.Array  # float32 [4], the whole physical state
    steps: jax.Array  # int32 [], played in this episode


def reset(rng: jax.Array) -> EnvState:
    """The first state of an episode."""
    return EnvState(ENV.initial(rng, PHYSICS), jnp.int32(0))


def step(state: EnvState, action: jax.Array) -> Transition:
    """One step of CartPole-v1, its time limit included."""
    next_obs = ENV.transition(state.obs, action, None, PHYSICS)
    reward = jnp.float32(ENV.reward(state.obs, action, next_obs, None, PHYSICS))
    terminated = ENV.terminal(next_obs, None, PHYSICS)
    truncated = state.steps + 1 >= MAX_EPISODE_STEPS
    return Transition(state.obs, action, reward, next_obs, terminated, truncated)


# %% Network --------------------------------------------------------------------------------------------
class QNetwork(nnx.Module):
    """Q(s, .) of all actions at once: 4 - 64 - 64 - 2, float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden1 = nnx.Linear(4, HIDDEN_SIZE, rngs=rngs)
        self.hidden2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 2, rngs=rngs)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Observations [..., 4] to Q values [..., 2]."""
        x = obs / jnp.array(OBSERVATION_SCALE) if SCALE_OBSERVATIONS else obs
        x = nnx.relu(self.hidden1(x))
        x = nnx.relu(self.hidden2(x))
        return self.output(x)


# %% Replay buffer --------------------------------------------------------------------------------------
@struct.dataclass
class ReplayBuffer:
    """A ring of the last REPLAY_CAPACITY transitions of one environment, in the order they were played."""

    rows: Transition  # each [REPLAY_CAPACITY, ...]
    count: jax.Array  # int32 [], transitions ever added

    def add(self, transition: Transition) -> "ReplayBuffer":
        """The buffer with one transition more; when full, over the oldest."""
        position = self.count % REPLAY_CAPACITY
        rows = jax.tree.map(lambda rows, row: rows.at[position].set(row), self.rows, transition)
        return ReplayBuffer(rows, self.count + 1)

    def sample(self, rng: jax.Array) -> Transition:
        """BATCH_SIZE windows of N_STEPS consecutive transitions, drawn uniformly with replacement.

        Returns:
            Transitions [BATCH_SIZE, N_STEPS, ...]. A window may run over the end of an episode; `td_target`
            stops there. At least N_STEPS transitions must have been added.
        """
        oldest = jnp.maximum(self.count - REPLAY_CAPACITY, 0)
        # The newest window ends at the newest row: none reaches over the seam of the ring into old data.
        first = jax.random.randint(rng, (BATCH_SIZE,), oldest, self.count - N_STEPS + 1)  # [B]
        positions = (first[:, None] + jnp.arange(N_STEPS)) % REPLAY_CAPACITY  # [B, n]
        return jax.tree.map(lambda rows: rows[positions], self.rows)


def empty_buffer() -> ReplayBuffer:
    """A buffer of REPLAY_CAPACITY rows, none of them written."""
    row = jax.eval_shape(lambda: step(reset(jax.random.key(0)), jnp.int32(0)))
    rows = jax.tree.map(lambda x: jnp.zeros((REPLAY_CAPACITY, *x.shape), x.dtype), row)
    return ReplayBuffer(rows, jnp.int32(0))


# %% Algorithm ------------------------------------------------------------------------------------------
def epsilon_at(env_step: jax.Array) -> jax.Array:
    """The probability of a random action: EPSILON_START at step 0, EPSILON_END from DECAY_STEPS on."""
    return optax.linear_schedule(EPSILON_START, EPSILON_END, DECAY_STEPS)(env_step)


def select_action(network: QNetwork, obs: jax.Array, epsilon: jax.Array, rng: jax.Array) -> jax.Array:
    """Epsilon-greedy: int32 []. A random action may well be the greedy one."""
    coin_rng, action_rng = jax.random.split(rng)
    random_action = jax.random.randint(action_rng, (), 0, 2)
    return jnp.where(jax.random.uniform(coin_rng) < epsilon, random_action, network(obs).argmax())


def td_target(online: QNetwork, target: QNetwork, window: Transition) -> jax.Array:
    """What Q(s_t, a_t) should have been: n rewards, then the target network's opinion (equation on top).

    Args:
        online: chooses the next action when DOUBLE_DQN.
        target: values it.
        window: N_STEPS consecutive transitions, [B, n, ...].

    Returns:
        float32 [B], without gradient.
    """
    # A step counts while no step before it ended the episode; what follows belongs to the next one.
    ended = window.terminated | window.truncated  # [B, n]
    running = jnp.cumprod(1 - ended[:, :-1], axis=1)  # [B, n - 1]
    counts = jnp.concatenate([jnp.ones_like(ended[:, :1], int), running], axis=1)  # [B, n], 1 ... 1 0 ... 0
    discounts = GAMMA ** jnp.arange(counts.shape[1])  # [n]
    n_step_return = (counts * discounts * window.reward).sum(axis=1)  # [B]

    m = counts.sum(axis=1)  # [B], from 1 to n
    last = jax.tree.map(lambda x: x[jnp.arange(len(m)), m - 1], window)  # [B, ...]
    # Double DQN (van Hasselt et al. 2016, eq. 4). Without it, max takes the luckiest error for the truth.
    chooser = online if DOUBLE_DQN else target
    next_action = chooser(last.next_obs).argmax(axis=-1)  # [B]
    next_q = jnp.take_along_axis(target(last.next_obs), next_action[:, None], axis=1)[:, 0]  # [B]
    # Only terminated cuts the future off. A truncated episode would have gone on: it bootstraps.
    return jax.lax.stop_gradient(n_step_return + GAMMA**m * (1 - last.terminated) * next_q)


def train_step(online: QNetwork, target: QNetwork, optimizer: nnx.Optimizer, window: Transition):
    """One gradient step on the mean squared TD error; changes `online` and `optimizer` in place.

    Returns:
        The loss, float32 [], and the mean predicted Q(s_t, a_t), float32 [].
    """
    y = td_target(online, target, window)  # [B]

    def loss_fn(online):
        q = online(window.obs[:, 0])  # [B, 2]
        q = jnp.take_along_axis(q, window.action[:, :1], axis=1)[:, 0]  # [B]; [B, 1] - [B] would be [B, B]
        return jnp.mean((y - q) ** 2), q.mean()

    (loss, mean_q), gradient = nnx.value_and_grad(loss_fn, has_aux=True)(online)
    optimizer.update(online, gradient)
    return loss, mean_q


def synchronize(online: QNetwork, target: QNetwork, now: jax.Array) -> None:
    """Copies the online network's weights into the target network where `now` is True."""
    weights = jax.tree.map(lambda new, old: jnp.where(now, new, old), nnx.state(online), nnx.state(target))
    nnx.update(target, weights)


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of jax.lax.scan."""

    online: QNetwork
    target: QNetwork
    optimizer: nnx.Optimizer
    replay_buffer: ReplayBuffer
    env_state: EnvState
    best: QNetwork  # the online network at its best evaluation so far
    best_return: jax.Array  # float32 []


class Log(NamedTuple):
    """One row for each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    epsilon: jax.Array
    episode_return: jax.Array  # mean over the episodes that ended in this interval, nan if none did
    eval_return: jax.Array  # greedy policy, mean of QUICK_EVAL_EPISODES on the JAX environment
    max_q: jax.Array  # max_a Q(s_0, a) at the first states of those episodes
    discounted_return: jax.Array  # what really came of them, discounted by GAMMA
    loss: jax.Array
    mean_q: jax.Array


QUICK_EVAL_EPISODES = 20


def quick_evaluate(network: QNetwork, rng: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Greedy episodes on the JAX environment: cheap enough to be part of the compiled run.

    Returns:
        Mean return, mean max_a Q(s_0, a), and mean discounted return of QUICK_EVAL_EPISODES, float32 [] each.
        The discounted return stops at the time limit, which leaves out at most gamma^500 of the value.
    """
    states = jax.vmap(reset)(jax.random.split(rng, QUICK_EVAL_EPISODES))  # [E, ...]
    max_q = network(states.obs).max(axis=-1).mean()

    def play(carry, t):
        states, alive = carry
        transition = jax.vmap(step)(states, network(states.obs).argmax(axis=-1))
        reward = jnp.where(alive, transition.reward, 0.0)  # [E]
        alive &= ~transition.terminated
        return (EnvState(transition.next_obs, states.steps + 1), alive), (reward, GAMMA**t * reward)

    alive = jnp.ones(QUICK_EVAL_EPISODES, bool)
    _, (rewards, discounted) = jax.lax.scan(play, (states, alive), jnp.arange(MAX_EPISODE_STEPS))  # [T, E]
    return rewards.sum(axis=0).mean(), max_q, discounted.sum(axis=0).mean()


def train(rng: jax.Array, report: Callable[[Log], None]) -> tuple[Agent, Log]:
    """One seed's whole training, a pure function: jax.jit compiles it, jax.vmap runs it for many seeds.

    Must be mapped with `jax.vmap(..., axis_name="seed")`.

    Args:
        rng: everything random follows from it.
        report: called on the host after each EVAL_INTERVAL with the log row, averaged over the seeds.

    Returns:
        The agent at the end, and the log [rows].
    """
    # The scan bodies below are closures on purpose: jax caches traces by function, and a constant changed by
    # `configure` between two runs would go unnoticed in a function it has already seen.
    network_rng, reset_rng, warmup_rng, learning_rng = jax.random.split(rng, 4)
    num_updates = (NUM_STEPS - LEARNING_STARTS) // TRAIN_INTERVAL
    learning_rate = optax.linear_schedule(LEARNING_RATE, LEARNING_RATE_END, num_updates)
    online = QNetwork(nnx.Rngs(network_rng))
    agent = Agent(
        online=online,
        target=nnx.clone(online),  # starts equal
        optimizer=nnx.Optimizer(online, optax.adam(learning_rate), wrt=nnx.Param),
        replay_buffer=empty_buffer(),
        env_state=reset(reset_rng),
        best=nnx.clone(online),
        best_return=jnp.float32(-jnp.inf),
    )

    def collect(agent: Agent, x):
        """Plays one step into the buffer; returns the length of the episode if it ended, else nan."""
        env_step, rng = x
        action_rng, reset_rng = jax.random.split(rng)
        action = select_action(agent.online, agent.env_state.obs, epsilon_at(env_step), action_rng)
        transition = step(agent.env_state, action)
        ended = transition.terminated | transition.truncated
        going_on = EnvState(transition.next_obs, agent.env_state.steps + 1)
        env_state = jax.tree.map(lambda new, old: jnp.where(ended, new, old), reset(reset_rng), going_on)
        episode_return = jnp.where(ended, going_on.steps, jnp.nan)  # every step earns 1
        replay_buffer = agent.replay_buffer.add(transition)
        return agent._replace(replay_buffer=replay_buffer, env_state=env_state), episode_return

    def collect_and_learn(agent: Agent, x):
        """TRAIN_INTERVAL environment steps, one gradient step."""
        env_step, rng = x
        sample_rng, *collect_rngs = jax.random.split(rng, 1 + TRAIN_INTERVAL)
        steps = env_step + jnp.arange(TRAIN_INTERVAL)
        agent, episode_returns = jax.lax.scan(collect, agent, (steps, jnp.stack(collect_rngs)))
        window = agent.replay_buffer.sample(sample_rng)
        loss, mean_q = train_step(agent.online, agent.target, agent.optimizer, window)
        learning_steps = env_step + TRAIN_INTERVAL - LEARNING_STARTS
        synchronize(agent.online, agent.target, learning_steps % TARGET_SYNC_INTERVAL == 0)
        return agent, (episode_returns, loss, mean_q)

    def learn_and_evaluate(agent: Agent, x):
        """EVAL_INTERVAL environment steps, then a look at the greedy policy."""
        env_step, rng = x
        eval_rng, learn_rng = jax.random.split(rng)
        steps = env_step + jnp.arange(0, EVAL_INTERVAL, TRAIN_INTERVAL)
        rngs = jax.random.split(learn_rng, len(steps))
        agent, (episode_returns, loss, mean_q) = jax.lax.scan(collect_and_learn, agent, (steps, rngs))

        eval_return, max_q, discounted_return = quick_evaluate(agent.online, eval_rng)
        better = eval_return >= agent.best_return  # among equals the latest
        synchronize(agent.online, agent.best, better)
        agent = agent._replace(best_return=jnp.maximum(eval_return, agent.best_return))
        end = env_step + EVAL_INTERVAL
        log = Log(
            end, epsilon_at(end), jnp.nanmean(episode_returns), eval_return, max_q, discounted_return,
            loss.mean(), mean_q.mean(),
        )  # fmt: skip
        jax.debug.callback(report, jax.lax.pmean(log, "seed"))
        return agent, log

    steps = jnp.arange(LEARNING_STARTS)
    agent, _ = jax.lax.scan(collect, agent, (steps, jax.random.split(warmup_rng, LEARNING_STARTS)))
    steps = jnp.arange(LEARNING_STARTS, NUM_STEPS, EVAL_INTERVAL)
    rngs = jax.random.split(learning_rng, len(steps))
    agent, log = jax.lax.scan(learn_and_evaluate, agent, (steps, rngs))
    return agent, log


def train_seeds() -> tuple[Agent, Log, float, float]:
    """Compiles and trains all seeds as one program.

    Returns:
        The agents, each leaf with a leading axis [NUM_SEEDS]; the log [NUM_SEEDS, rows]; seconds of
        compiling and of training.
    """
    rngs = jax.vmap(jax.random.key)(SEED + jnp.arange(NUM_SEEDS))
    with tqdm(total=NUM_STEPS, unit="step", leave=False, disable=None) as bar:

        def report(row: Log) -> None:
            bar.update(int(row.env_step) - bar.n)
            if int(row.env_step - LEARNING_STARTS) % (5 * EVAL_INTERVAL) == 0 or row.env_step == NUM_STEPS:
                tqdm.write(
                    f"step {row.env_step:6.0f}   epsilon {row.epsilon:.2f}   return {row.episode_return:5.1f}"
                    f"   greedy {row.eval_return:5.1f}   Q {row.mean_q:6.1f}   loss {row.loss:7.3f}"
                )

        started = time.perf_counter()
        train_all = jax.vmap(functools.partial(train, report=report), axis_name="seed")
        compiled = jax.jit(train_all).lower(rngs).compile()
        compile_seconds = time.perf_counter() - started
        agents, log = jax.block_until_ready(compiled(rngs))
        jax.effects_barrier()  # the last report has been printed
        train_seconds = time.perf_counter() - started - compile_seconds
    return agents, jax.tree.map(np.asarray, log), compile_seconds, train_seconds


# %% Evaluation -----------------------------------------------------------------------------------------
def evaluate(networks: QNetwork) -> np.ndarray:
    """Greedy episodes on gymnasium.make("CartPole-v1"), never on the JAX copy the agent learned in.

    Args:
        networks: each leaf with a leading axis [S]. All play the same EVAL_EPISODES episodes, with the
            environment seeds 0, 1, ...

    Returns:
        Returns, float64 [S, EVAL_EPISODES].
    """

    @jax.jit
    def greedy(networks, obs):  # [S, E, 4] -> [S, E]
        return jax.vmap(lambda network, obs: network(obs).argmax(axis=-1))(networks, obs)

    num_networks = len(jax.tree.leaves(networks)[0])
    envs = [[gymnasium.make("CartPole-v1") for _ in range(EVAL_EPISODES)] for _ in range(num_networks)]
    obs = np.array([[env.reset(seed=i)[0] for i, env in enumerate(row)] for row in envs])  # [S, E, 4]
    returns = np.zeros((num_networks, EVAL_EPISODES))
    playing = {(s, e) for s in range(num_networks) for e in range(EVAL_EPISODES)}
    while playing:
        actions = np.asarray(greedy(networks, obs))
        for s, e in tuple(playing):
            obs[s, e], reward, terminated, truncated, _ = envs[s][e].step(int(actions[s, e]))
            returns[s, e] += reward
            if terminated or truncated:
                playing.remove((s, e))
    return returns


def summary(eval_return: np.ndarray) -> str:
    """Mean and spread over the seeds [NUM_SEEDS], and how many reach the time limit every time."""
    solved = int((eval_return == MAX_EPISODE_STEPS).sum())
    return (
        f"{eval_return.mean():.1f} +- {eval_return.std():.1f}, lowest {eval_return.min():.1f}, "
        f"{solved} of {len(eval_return)} seeds at {MAX_EPISODE_STEPS:.1f}"
    )


# %% Pictures -------------------------------------------------------------------------------------------
BLUE, ORANGE, GREY = "#1f77b4", "#ff7f0e", "#888888"


def draw_band(axes, x: np.ndarray, curves: np.ndarray, color: str, label: str) -> None:
    """Mean over the seeds, and a band from the lowest to the highest; `curves` is [NUM_SEEDS, rows]."""
    axes.plot(x, curves.mean(axis=0), color=color, label=label)
    axes.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0)


def draw_learning_curve(path: Path, log: Log) -> None:
    """Left: return against environment steps. Right: what the network promises against what comes of it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained")
    x = log.env_step[0]
    draw_band(left, x, log.eval_return, BLUE, "greedy policy")
    left.plot(x, np.nanmean(log.episode_return, axis=0), color=GREY, label="while exploring")
    left.set(xlabel="environment step", ylabel="return", ylim=(0, 515))
    left.legend(frameon=False, loc="lower right")
    draw_band(right, x, log.max_q, ORANGE, "promised: max Q of the first state")
    draw_band(right, x, log.discounted_return, BLUE, "what came of it")
    right.set(xlabel="environment step", ylabel="discounted return")
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def record_gif(path: Path, network: QNetwork) -> None:
    """One greedy episode, rendered by Gymnasium at half size, every fourth frame (12.5 a second)."""
    greedy = jax.jit(lambda network, obs: network(obs).argmax())
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    obs, _ = env.reset(seed=0)
    frames, steps, terminated, truncated = [], 0, False, False
    while not (terminated or truncated):
        if steps % 4 == 0:
            frames.append(Image.fromarray(env.render()).resize((300, 200)).quantize(16))
        obs, _, terminated, truncated, _ = env.step(int(greedy(network, obs)))
        steps += 1
    env.close()
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, loop=0)


# %% Comparison -----------------------------------------------------------------------------------------
COMPARISON = [  # what to change on the command line
    [],
    # one means of steadiness less, then all of them
    ["N_STEPS=1"],
    ["SCALE_OBSERVATIONS=False"],
    ["LEARNING_RATE_END=1e-3"],
    ["TRAIN_INTERVAL=1"],
    ["DOUBLE_DQN=False"],
    ["N_STEPS=1", "SCALE_OBSERVATIONS=False", "LEARNING_RATE_END=1e-3", "DOUBLE_DQN=False"],
    # the target network: as good as none, and rarely copied
    ["TARGET_SYNC_INTERVAL=2"],
    ["TARGET_SYNC_INTERVAL=1000"],
    ["N_STEPS=1", "TARGET_SYNC_INTERVAL=20"],
    ["N_STEPS=1", "TARGET_SYNC_INTERVAL=20", "DOUBLE_DQN=False"],
    ["N_STEPS=1", "TARGET_SYNC_INTERVAL=2", "DOUBLE_DQN=False"],
    # the buffer
    ["REPLAY_CAPACITY=1_000"],
    ["REPLAY_CAPACITY=50_000"],
    # more or less of the same
    ["N_STEPS=3"],
    ["N_STEPS=10"],
    ["TRAIN_INTERVAL=4", "TARGET_SYNC_INTERVAL=252"],
    ["EPSILON_END=0.05"],
]


def label_of(changes: list[str]) -> str:
    """How a row of COMPARISON is called in tables and pictures."""
    return " ".join(changes) or "unchanged"


def first_step_at_500(log: Log, i: int) -> int | str:
    """The environment step of seed i's first evaluation at the time limit."""
    reached = log.env_step[i, log.eval_return[i] == MAX_EPISODE_STEPS]
    return int(reached[0]) if len(reached) else "never"


def compare(run_dir: Path, arguments: list[str]) -> None:
    """Trains every row of COMPARISON; writes compare.csv (a line for each seed), two pictures.

    Args:
        run_dir: where the files go.
        arguments: of the command line; they hold for every row that does not change them.
    """
    results, logs = [], {}
    for changes in COMPARISON:
        configure([*arguments, *changes])
        label = label_of(changes)
        print(f"\n{label}")
        agents, logs[label], _, _ = train_seeds()
        eval_return = evaluate(agents.online).mean(axis=1)
        best_return = evaluate(agents.best).mean(axis=1)
        for i in range(NUM_SEEDS):
            results.append(
                {
                    "changed": label,
                    "seed": SEED + i,
                    "eval_return": eval_return[i],
                    "best_eval_return": best_return[i],
                    "first_step_at_500": first_step_at_500(logs[label], i),
                    "largest_max_q": logs[label].max_q[i].max(),
                }
            )
        print(f"last policy: {summary(eval_return)}; best policy: {summary(best_return)}")
    configure(arguments)
    write_csv(run_dir / "compare.csv", results)
    draw_comparison(run_dir / "compare.png", results)
    draw_overestimation(run_dir / "overestimation.png", logs)


def draw_comparison(path: Path, results: list[dict[str, Any]]) -> None:
    """A line for each row of COMPARISON, a dot for each seed's last policy."""
    labels = [label_of(changes) for changes in COMPARISON]
    figure, axes = plt.subplots(
        figsize=(10, 0.36 * len(labels) + 0.9), facecolor="white", layout="constrained"
    )
    for y, label in enumerate(labels):
        returns = np.array([row["eval_return"] for row in results if row["changed"] == label])
        # Spread out vertically, else ten seeds at 500 look like one.
        axes.scatter(returns, y + np.linspace(-0.3, 0.3, len(returns)), s=14, color=BLUE)
        axes.text(515, y, f"{(returns == MAX_EPISODE_STEPS).sum()} of {len(returns)}", va="center")
    axes.set_yticks(
        range(len(labels)),
        [label.replace(" LEARN", "\nLEARN").replace(" DOUBLE", "\nDOUBLE", 1) for label in labels],
        fontsize=9,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set(xlim=(0, 575), ylim=(len(labels) - 0.4, -0.6), xticks=range(0, 501, 100))
    axes.set_xlabel(f"return of the last policy (right: seeds at {MAX_EPISODE_STEPS:.1f})")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_overestimation(path: Path, logs: dict[str, Log]) -> None:
    """What the network promises less what comes of it, with and without Double DQN, for two targets."""
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained")
    for axes, changes in zip(both, ([], ["N_STEPS=1", "TARGET_SYNC_INTERVAL=20"])):
        for extra, color, name in (([], BLUE, "Double DQN"), (["DOUBLE_DQN=False"], ORANGE, "plain max")):
            log = logs[label_of(changes + extra)]
            draw_band(axes, log.env_step[0], log.max_q - log.discounted_return, color, name)
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set(xlabel="environment step", title=label_of(changes))
        axes.legend(frameon=False, loc="lower right")
    both[1].set_yscale("symlog", linthresh=100)  # a seed that runs away would flatten all others
    both[0].set_ylabel("promised less true\ndiscounted return")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% The run --------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> Path:
    """Makes the folder of this run and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    run_dir = Path(RUN_DIR or time.strftime("runs/cart_pole_dqn/%Y-%m-%d_%H-%M-%S"))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / "result.json").exists():
            raise UserError(f"RUN_DIR={run_dir}: holds the result of another run; choose another folder")
        (run_dir / "constants.json").write_text(json.dumps(constants, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"RUN_DIR={run_dir}: {error.strerror}; choose another folder") from None
    return run_dir


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a table; numbers in full, so that everything shown can be computed again from the file."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def log_rows(log: Log) -> list[dict[str, Any]]:
    """The log [NUM_SEEDS, rows] as lines of log.csv."""
    return [
        {"seed": SEED + i} | {name: values[i, j].item() for name, values in log._asdict().items()}
        for i, j in np.ndindex(log.env_step.shape)
    ]


def run(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains all seeds, evaluates them, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: eval_return (of the last policy) and best_eval_return (of the best by
        `quick_evaluate`), each a list over the seeds of the mean of EVAL_EPISODES episodes; env_steps (of
        each seed); seconds (wall time after imports), of which compile_seconds and train_seconds.

    Raises:
        UserError: see `configure` and `open_run_dir`.
    """
    started = time.perf_counter()
    constants = configure(arguments)
    if COMPARE:  # a row that clashes with the command line is refused now, not after all the training
        for changes in COMPARISON:
            configure([*arguments, *changes])
        configure(arguments)
    run_dir = open_run_dir(constants)
    num_updates = (NUM_STEPS - LEARNING_STARTS) // TRAIN_INTERVAL
    print(
        f"{NUM_SEEDS} seeds x {NUM_STEPS:,} environment steps, {num_updates:,} gradient steps of "
        f"{BATCH_SIZE} windows of {N_STEPS}, in {run_dir}"
    )
    agents, log, compile_seconds, train_seconds = train_seeds()
    write_csv(run_dir / "log.csv", log_rows(log))
    print(
        f"compiled in {compile_seconds:.1f} s, trained in {train_seconds:.1f} s; "
        f"now {EVAL_EPISODES} episodes of CartPole-v1 each"
    )
    eval_return = evaluate(agents.online).mean(axis=1)
    best_eval_return = evaluate(agents.best).mean(axis=1)
    for i in range(NUM_SEEDS):
        print(
            f"seed {SEED + i:3d}   last policy {eval_return[i]:6.2f}   best policy {best_eval_return[i]:6.2f}"
        )
    print(f"last policy: {summary(eval_return)}\nbest policy: {summary(best_eval_return)}")

    draw_learning_curve(run_dir / "learning_curve.png", log)
    record_gif(run_dir / "cart_pole.gif", jax.tree.map(lambda x: x[0], agents.online))  # the first seed
    if COMPARE:
        compare(run_dir, arguments)
    result = {
        "eval_return": eval_return.tolist(),
        "best_eval_return": best_eval_return.tolist(),
        "env_steps": NUM_STEPS,
        "seconds": time.perf_counter() - started,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
    }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds']:.0f} s; everything of this run is in {run_dir}")
    return result


def main() -> None:
    """Runs the script with the command line's constants; exit code 2 on the user's errors, 130 on Ctrl-C."""
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; nothing was kept of this run", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
