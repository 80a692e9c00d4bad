"""DQN on CartPole: a network replaces folder 1's table. Replay and a target network steady it.

The loss (Mnih et al. 2015, with Double DQN of van Hasselt et al. 2016 and n-step targets of Sutton
1988):

    L = mean (y - Q_online(s_t, a_t))^2
    y = sum_{k<m} gamma^k r_{t+k}
        + gamma^m (1 - terminated) Q_target(s_{t+m}, argmax_a Q_online(s_{t+m}, a))

with m = N_STEPS, or fewer where the episode ends first. The second part of y is the network's own
estimate ("bootstrapping"); a truncated episode keeps it. The transitions come from a replay buffer,
so older policies than the one they train have played them ("off-policy").

What is *not* here, and why: no frame stacking and no convolutions (the state is four numbers), no
prioritized replay and no dueling heads (ten of ten seeds do without), no Huber loss (rewards of 1
need no guard against large errors), no correction of the n-step return for the older policy that
played it (as in Rainbow; with epsilon near 0 the two seldom disagree).

Read first: `update` (two steps of environment, one of gradient), `train_step`, `td_target`.

    python 2_Cart_Pole_DQN/cart_pole_dqn.py           # ten seeds at once: 40 seconds on 2 cores
    python 2_Cart_Pole_DQN/cart_pole_dqn.py N_STEPS=1 NUM_SEEDS=3
    python 2_Cart_Pole_DQN/cart_pole_dqn.py --help    # all constants
"""

import functools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cart_pole as env
import pictures
import runs
import settings
from settings import BelowOne, Count, NonNegative, Positive, Probability, Seed, Size


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # --- learning
    NUM_STEPS: Count = 50_000  # environment steps of each seed
    # steps played before the first gradient step, for more than one episode
    LEARNING_STARTS: Count = 1_000
    # environment steps between gradient steps; 1 makes twice as many of them
    TRAIN_INTERVAL: Count = 2
    BATCH_SIZE: Size = 64  # windows of N_STEPS transitions sampled from the buffer
    REPLAY_CAPACITY: Count = 10_000  # transitions kept; the oldest is overwritten
    GAMMA: BelowOne = 0.99  # discount; horizon 1 / (1 - GAMMA), about 100 steps
    LEARNING_RATE: Positive = 1e-3  # Adam's, at the first gradient step
    # ... at the last; linear in between. Equal values: no decay
    LEARNING_RATE_END: NonNegative = 0.0
    # --- what keeps it stable
    TARGET_SYNC_INTERVAL: Count = 250  # environment steps between copies into the target network
    N_STEPS: Size = 5  # rewards counted before the network's own estimate; 1: the DQN of 2015
    # the online network chooses the next action, the target network values it
    DOUBLE_DQN: bool = True
    # divide by env.OBSERVATION_SCALE: all four numbers reach about 1
    SCALE_OBSERVATIONS: bool = True
    HIDDEN_SIZE: Size = 64  # width of the two hidden layers
    # --- exploration: epsilon falls in a straight line, then stays
    EPSILON_START: Probability = 1.0  # chance of a random action at first; 1: all are random
    EPSILON_END: Probability = 0.01  # ... and in the end; 0: no exploration at the end
    DECAY_STEPS: Count = 10_000  # environment steps from EPSILON_START to EPSILON_END
    # --- the run
    SEED: Seed = 0  # of the first seed
    NUM_SEEDS: Size = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
    # environment steps between evaluations of the greedy policy during training
    EVAL_INTERVAL: Count = 1_000
    # greedy episodes per seed after training, on Gymnasium's own CartPole-v1
    EVAL_EPISODES: Count = 100
    RUN_DIR: str = ""  # empty: runs/cart_pole_dqn/<time>

    def __post_init__(self):
        window = f"from N_STEPS={self.N_STEPS} to 10000000"
        settings.check(
            self, "REPLAY_CAPACITY", self.N_STEPS <= self.REPLAY_CAPACITY <= 10**7, window
        )
        settings.check(self, "LEARNING_STARTS", self.N_STEPS <= self.LEARNING_STARTS, window)
        for name in ("EVAL_INTERVAL", "TARGET_SYNC_INTERVAL"):
            whole = getattr(self, name) % self.TRAIN_INTERVAL == 0
            settings.check(self, name, whole, f"a multiple of TRAIN_INTERVAL={self.TRAIN_INTERVAL}")
        steps = self.NUM_STEPS - self.LEARNING_STARTS
        text = (
            f"LEARNING_STARTS={self.LEARNING_STARTS} plus a multiple of "
            f"EVAL_INTERVAL={self.EVAL_INTERVAL}"
        )
        settings.check(self, "NUM_STEPS", steps > 0 and steps % self.EVAL_INTERVAL == 0, text)
        below = f"at most EPSILON_START={self.EPSILON_START}"
        settings.check(self, "EPSILON_END", self.EPSILON_END <= self.EPSILON_START, below)


# %% Networks --------------------------------------------------------------------------------------
class MLP(nnx.Module):
    """A network of two hidden layers, float32: [..., inputs] to [..., outputs]."""

    def __init__(self, scale: tuple, hidden_size: int, outputs: int, rngs: nnx.Rngs):
        self.scale = scale  # of the inputs, which are divided by it
        self.hidden_1 = nnx.Linear(len(scale), hidden_size, rngs=rngs)
        self.hidden_2 = nnx.Linear(hidden_size, hidden_size, rngs=rngs)
        self.output = nnx.Linear(hidden_size, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden_1(x / jnp.array(self.scale)))
        x = nnx.relu(self.hidden_2(x))
        return self.output(x)


def make_network(c: Constants, rng: jax.Array) -> MLP:
    """Untrained: Q(s, .) of all actions at once, observations [..., 4] to [..., 2]."""
    scale = env.OBSERVATION_SCALE if c.SCALE_OBSERVATIONS else (1.0,) * 4
    return MLP(scale, c.HIDDEN_SIZE, 2, nnx.Rngs(rng))


# %% Training --------------------------------------------------------------------------------------
class ReplayBuffer(NamedTuple):
    """A ring of one environment's last REPLAY_CAPACITY transitions, in the order of play."""

    rows: env.Transition  # each [REPLAY_CAPACITY, ...]
    count: jax.Array  # int32 [], transitions ever added


class Agent(NamedTuple):
    """Everything that changes while learning; the carry of the loops."""

    online: MLP
    target: MLP
    optimizer: nnx.Optimizer
    replay_buffer: ReplayBuffer
    env_state: env.EnvState


class Log(NamedTuple):
    """One row for each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    epsilon: jax.Array
    episode_return: jax.Array  # mean over the episodes that ended in this interval, nan if none did
    eval_return: jax.Array  # greedy policy, a mean over a few episodes in the JAX environment
    max_q: jax.Array  # max_a Q(s_0, a) at the first states of those episodes
    discounted_return: jax.Array  # what really came of them, discounted by GAMMA
    loss: jax.Array
    mean_q: jax.Array


SHOWN = ["epsilon", "episode_return", "eval_return", "mean_q", "loss"]


def train(c: Constants) -> tuple[Agent, Log, float]:
    """Trains all seeds, a row at a time: agents [NUM_SEEDS, ...], log [NUM_SEEDS, rows], compile
    seconds.
    """
    agents, train_row, compile_seconds = runs.compile_row(
        c, lambda c, rng: fill_buffer(c, rng, make_agent(c, rng)), learn_and_evaluate
    )
    log = []
    for index in runs.until_ctrl_c(range(num_rows(c))):
        agents, row = train_row(agents, index)
        log.append(jax.device_get(row))
        env.print_row(c.NUM_STEPS, SHOWN, log)
    return agents, Log(*(np.stack(column, axis=1) for column in zip(*log))), compile_seconds


def num_rows(c: Constants) -> int:
    """Rows of the log of one seed."""
    return (c.NUM_STEPS - c.LEARNING_STARTS) // c.EVAL_INTERVAL


def learn_and_evaluate(
    c: Constants, rng: jax.Array, agent: Agent, index: jax.Array
) -> tuple[Agent, Log]:
    """EVAL_INTERVAL environment steps of one seed, then its greedy policy's score: row `index`."""
    *_, learning_rng = jax.random.split(rng, 4)
    eval_rng, learn_rng = jax.random.split(jax.random.split(learning_rng, num_rows(c))[index])
    env_step = c.LEARNING_STARTS + index * c.EVAL_INTERVAL
    steps = env_step + jnp.arange(0, c.EVAL_INTERVAL, c.TRAIN_INTERVAL)
    rngs = jax.random.split(learn_rng, len(steps))
    agent, (episode_returns, loss, mean_q) = jax.lax.scan(
        functools.partial(update, c), agent, (steps, rngs)
    )
    eval_return, max_q, discounted_return = env.quick_evaluate(agent.online, eval_rng, c.GAMMA)
    end = env_step + c.EVAL_INTERVAL
    return agent, Log(
        end,
        epsilon_at(c, end),
        jnp.nanmean(episode_returns),
        eval_return,
        max_q,
        discounted_return,
        loss.mean(),
        mean_q.mean(),
    )


def make_agent(c: Constants, rng: jax.Array) -> Agent:
    """An untrained network, its copy, its optimizer, an empty buffer and a first state."""
    network_rng, reset_rng, *_ = jax.random.split(rng, 4)
    num_updates = (c.NUM_STEPS - c.LEARNING_STARTS) // c.TRAIN_INTERVAL
    learning_rate = optax.linear_schedule(c.LEARNING_RATE, c.LEARNING_RATE_END, num_updates)
    online, env_state = make_network(c, network_rng), env.reset(reset_rng)
    row = jax.eval_shape(lambda: env.step(env_state, jnp.int32(0))[1])
    rows = jax.tree.map(lambda x: jnp.zeros((c.REPLAY_CAPACITY, *x.shape), x.dtype), row)
    return Agent(
        online=online,
        target=nnx.clone(online),  # starts equal
        optimizer=nnx.Optimizer(online, optax.adam(learning_rate), wrt=nnx.Param),
        replay_buffer=ReplayBuffer(rows, jnp.int32(0)),
        env_state=env_state,
    )


def fill_buffer(c: Constants, rng: jax.Array, agent: Agent) -> Agent:
    """Plays the first LEARNING_STARTS steps into the buffer."""
    _, _, warmup_rng, _ = jax.random.split(rng, 4)
    steps = jnp.arange(c.LEARNING_STARTS), jax.random.split(warmup_rng, c.LEARNING_STARTS)
    return jax.lax.scan(functools.partial(collect, c), agent, steps)[0]


def update(c: Constants, agent: Agent, x: tuple[jax.Array, jax.Array]):
    """TRAIN_INTERVAL environment steps from x = (env_step, rng) on, then one gradient step."""
    env_step, rng = x
    sample_rng, *collect_rngs = jax.random.split(rng, 1 + c.TRAIN_INTERVAL)
    # 1. collect
    steps = env_step + jnp.arange(c.TRAIN_INTERVAL)
    agent, episode_returns = jax.lax.scan(
        functools.partial(collect, c), agent, (steps, jnp.stack(collect_rngs))
    )
    # 2. sample from the buffer, which also holds what older policies played
    batch = sample(agent.replay_buffer, sample_rng, c.BATCH_SIZE, c.N_STEPS)
    # 3. judge and learn
    loss, mean_q = train_step(c, agent, batch)
    # 4. copy the online network into the target network every TARGET_SYNC_INTERVAL steps
    learning_steps = env_step + c.TRAIN_INTERVAL - c.LEARNING_STARTS
    params = nnx.state(agent.online), nnx.state(agent.target)
    nnx.update(agent.target, optax.periodic_update(*params, learning_steps, c.TARGET_SYNC_INTERVAL))
    return agent, (episode_returns, loss, mean_q)


def collect(c: Constants, agent: Agent, x: tuple[jax.Array, jax.Array]) -> tuple[Agent, jax.Array]:
    """Plays step x = (env_step, rng) into the buffer; returns the episode's return if it ended,
    else nan.
    """
    env_step, rng = x
    action_rng, reset_rng = jax.random.split(rng)
    action = select_action(agent.online(agent.env_state.obs), epsilon_at(c, env_step), action_rng)
    next_state, transition = env.step(agent.env_state, action)
    ended = transition.terminated | transition.truncated
    env_state = jax.tree.map(
        lambda new, old: jnp.where(ended, new, old), env.reset(reset_rng), next_state
    )
    episode_return = jnp.where(ended, next_state.episode_return, jnp.nan)
    return agent._replace(
        replay_buffer=add(agent.replay_buffer, transition), env_state=env_state
    ), episode_return


def train_step(c: Constants, agent: Agent, batch: env.Transition) -> tuple[jax.Array, jax.Array]:
    """One gradient step on the mean squared TD error, which changes the online network in place.

    `batch`: windows of N_STEPS transitions, each [B, n, ...]. Returns the loss and the mean Q(s_t,
    a_t), [].
    """
    reward, steps, last = n_step(batch, c.GAMMA)  # [B], [B], [B, ...]
    next_q = next_value(agent.online if c.DOUBLE_DQN else agent.target, agent.target, last.next_obs)
    y = td_target(reward, last.terminated, next_q, c.GAMMA**steps)  # [B]

    def loss_fn(online: MLP) -> tuple[jax.Array, jax.Array]:
        q = online(batch.obs[:, 0])  # [B, 2]
        # [B], else y - q broadcasts to [B, B]
        q = jnp.take_along_axis(q, batch.action[:, :1], axis=1)[:, 0]
        return jnp.mean((y - q) ** 2), q.mean()

    (loss, mean_q), gradient = nnx.value_and_grad(loss_fn, has_aux=True)(agent.online)
    agent.optimizer.update(agent.online, gradient)
    return loss, mean_q


# %% Algorithm -------------------------------------------------------------------------------------
def epsilon_at(c: Constants, env_step: jax.Array) -> jax.Array:
    """Probability of a random action: EPSILON_START at step 0, EPSILON_END from DECAY_STEPS on."""
    return optax.linear_schedule(c.EPSILON_START, c.EPSILON_END, c.DECAY_STEPS)(env_step)


def select_action(q: jax.Array, epsilon: jax.Array, rng: jax.Array) -> jax.Array:
    """Epsilon-greedy on Q values [A]: int32 []. A random action may well be the greedy one."""
    coin_rng, action_rng = jax.random.split(rng)
    random_action = jax.random.randint(action_rng, (), 0, len(q))
    return jnp.where(jax.random.uniform(coin_rng) < epsilon, random_action, q.argmax())


def add(buffer: ReplayBuffer, transition: env.Transition) -> ReplayBuffer:
    """The buffer with one transition more; when full, over the oldest."""
    position = buffer.count % len(buffer.rows.reward)
    rows = jax.tree.map(lambda rows, row: rows.at[position].set(row), buffer.rows, transition)
    return ReplayBuffer(rows, buffer.count + 1)


def sample(buffer: ReplayBuffer, rng: jax.Array, batch_size: int, n_steps: int) -> env.Transition:
    """Windows of consecutive transitions, sampled uniformly with replacement: each field [B, n,
    ...].

    A window may run over the end of an episode; `n_step` stops there. At least n_steps must have
    been added.
    """
    capacity = len(buffer.rows.reward)
    oldest = jnp.maximum(buffer.count - capacity, 0)
    # The newest window ends at the newest row: none reaches over the seam of the ring into old
    # data.
    first = jax.random.randint(rng, (batch_size,), oldest, buffer.count - n_steps + 1)  # [B]
    positions = (first[:, None] + jnp.arange(n_steps)) % capacity  # [B, n]
    return jax.tree.map(lambda rows: rows[positions], buffer.rows)


def n_step(batch: env.Transition, gamma: float) -> tuple[jax.Array, jax.Array, env.Transition]:
    """The discounted rewards of windows [B, n, ...] up to the first end of an episode (Sutton
    1988).

    Returns their sum, float32 [B]; how many they are, int32 [B], from 1 to n; the last transition
    [B, ...].
    """
    # A step counts if no earlier step of the window ended the episode; later ones belong to the
    # next episode.
    ended = batch.terminated | batch.truncated  # [B, n]
    not_done = jnp.cumprod(1 - ended[:, :-1], axis=1)  # [B, n - 1]
    # [B, n], 1 ... 1 0 ... 0
    counts = jnp.concatenate([jnp.ones_like(ended[:, :1], int), not_done], axis=1)
    discounts = gamma ** jnp.arange(counts.shape[1])  # [n]
    m = counts.sum(axis=1)  # [B]
    last = jax.tree.map(lambda x: x[jnp.arange(len(m)), m - 1], batch)  # [B, ...]
    return (counts * discounts * batch.reward).sum(axis=1), m, last


def next_value(chooser: MLP, target: MLP, next_obs: jax.Array) -> jax.Array:
    """Q_target(s', argmax_a Q_chooser(s', a)): [B, 4] to [B].

    Double DQN (van Hasselt et al. 2016, eq. 4) lets the online network choose. With the target
    network as chooser it's the plain maximum, which has a maximization bias.
    """
    action = chooser(next_obs).argmax(axis=-1)  # [B]
    return jnp.take_along_axis(target(next_obs), action[:, None], axis=1)[:, 0]


def td_target(
    reward: jax.Array, terminated: jax.Array, next_q: jax.Array, gamma: jax.Array
) -> jax.Array:
    """What Q(s, a) should have been: rewards, then the target network's estimate; [B] each, no
    gradient.

    Only terminated cuts the future off. A truncated episode would have gone on: it bootstraps.
    `gamma` is gamma^m after m rewards.
    """
    return jax.lax.stop_gradient(reward + gamma * (1 - terminated) * next_q)


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains all seeds, evaluates them, fills the run's folder. Returns what result.json holds."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    runs.start_jax()
    run_dir = runs.open_run("cart_pole_dqn", c)
    updates = (
        f"{(c.NUM_STEPS - c.LEARNING_STARTS) // c.TRAIN_INTERVAL:,} "
        f"gradient steps of {c.BATCH_SIZE}"
    )
    steps = f"{c.NUM_SEEDS} seeds x {c.NUM_STEPS:,} environment steps"
    print(f"{steps}, {updates} windows of {c.N_STEPS}, in {run_dir}")
    agents, log, compile_seconds = train(c)
    runs.write_log(run_dir, log, c.SEED)
    print(f"trained; now {c.EVAL_EPISODES} greedy episodes each")
    eval_return = env.evaluate(agents.online, c.EVAL_EPISODES).mean(axis=1)  # [NUM_SEEDS]
    env.print_returns(c.SEED, eval_return)
    pictures.draw_learning_curve(run_dir / "learning_curve.png", log)
    first_seed = jax.tree.map(lambda x: x[0], agents.online)
    pictures.record_gif(
        run_dir / "cart_pole.gif", make_network(c, jax.random.key(c.SEED)), first_seed
    )
    seconds = {"seconds": time.perf_counter() - started, "compile_seconds": compile_seconds}
    result = {
        "eval_return": eval_return.tolist(),
        "env_steps": log.env_step[:, -1].tolist(),
    } | seconds
    runs.write_json(run_dir / "result.json", result)
    print(f"{result['seconds']:.0f} s; everything of this run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
