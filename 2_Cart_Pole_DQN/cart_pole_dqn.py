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

Read from top to bottom: `update` is the whole algorithm, one environment step at a time. The
formulas it calls come before it, the loop around it comes after.

    python 2_Cart_Pole_DQN/cart_pole_dqn.py           # ten seeds at once: 40 seconds on 2 cores
    python 2_Cart_Pole_DQN/cart_pole_dqn.py N_STEPS=1 NUM_SEEDS=3
    python 2_Cart_Pole_DQN/cart_pole_dqn.py --help    # all constants
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    NUM_SEEDS: Size = 10  # SEED, SEED + 1, ...: trained side by side
    # environment steps between evaluations of the greedy policy during training
    EVAL_INTERVAL: Count = 1_000
    # greedy episodes per seed after training, on Gymnasium's own CartPole-v1
    EVAL_EPISODES: Count = 100
    RUN_DIR: str = ""  # empty: runs/cart_pole_dqn/<time>

    def __post_init__(self):
        buffer = f"from N_STEPS={self.N_STEPS} to 10000000"
        settings.check(
            self, "REPLAY_CAPACITY", self.N_STEPS <= self.REPLAY_CAPACITY <= 10**7, buffer
        )
        last = self.NUM_STEPS - self.TRAIN_INTERVAL  # to have one gradient step at least
        starts = f"from N_STEPS={self.N_STEPS} to NUM_STEPS - TRAIN_INTERVAL = {last}"
        settings.check(
            self, "LEARNING_STARTS", self.N_STEPS <= self.LEARNING_STARTS <= last, starts
        )
        whole = f"a multiple of EVAL_INTERVAL={self.EVAL_INTERVAL}"
        settings.check(self, "NUM_STEPS", self.NUM_STEPS % self.EVAL_INTERVAL == 0, whole)
        below = f"at most EPSILON_START={self.EPSILON_START}"
        settings.check(self, "EPSILON_END", self.EPSILON_END <= self.EPSILON_START, below)

    @property
    def num_updates(self) -> int:
        """Gradient steps of each seed."""
        return self.NUM_STEPS // self.TRAIN_INTERVAL - self.LEARNING_STARTS // self.TRAIN_INTERVAL


# %% Network ---------------------------------------------------------------------------------------
class QNetwork(nnx.Module):
    """Q(s, .) of both actions at once, float32: observations [..., 4] to values [..., 2]."""

    def __init__(self, c: Constants, rng: jax.Array):
        rngs = nnx.Rngs(rng)
        self.scale = env.OBSERVATION_SCALE if c.SCALE_OBSERVATIONS else (1.0,) * 4
        self.hidden_1 = nnx.Linear(4, c.HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(c.HIDDEN_SIZE, c.HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(c.HIDDEN_SIZE, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden_1(x / jnp.array(self.scale)))
        x = nnx.relu(self.hidden_2(x))
        return self.output(x)


# %% Formulas --------------------------------------------------------------------------------------
def epsilon_at(c: Constants, env_step: jax.Array) -> jax.Array:
    """Probability of a random action: EPSILON_START at step 0, EPSILON_END from DECAY_STEPS on."""
    return optax.linear_schedule(c.EPSILON_START, c.EPSILON_END, c.DECAY_STEPS)(env_step)


def select_action(q: jax.Array, epsilon: jax.Array, rng: jax.Array) -> jax.Array:
    """Epsilon-greedy on Q values [A]: int32 []. A random action may well be the greedy one."""
    coin_rng, action_rng = jax.random.split(rng)
    random_action = jax.random.randint(action_rng, (), 0, len(q))
    return jnp.where(jax.random.uniform(coin_rng) < epsilon, random_action, q.argmax())


class ReplayBuffer(NamedTuple):
    """A ring of one environment's last REPLAY_CAPACITY transitions, in the order of play."""

    rows: env.Transition  # each [REPLAY_CAPACITY, ...]
    count: jax.Array  # int32 [], transitions ever added


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


def next_value(chooser: QNetwork, target: QNetwork, next_obs: jax.Array) -> jax.Array:
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


# %% DQN -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning."""

    online: QNetwork
    target: QNetwork
    optimizer: nnx.Optimizer
    replay_buffer: ReplayBuffer
    env_state: env.EnvState
    rng: jax.Array  # the random key that all others are split from


def train_step(c: Constants, agent: Agent, batch: env.Transition) -> tuple[jax.Array, jax.Array]:
    """One gradient step on the mean squared TD error, which changes the online network in place.

    `batch`: windows of N_STEPS transitions, each [B, n, ...]. Returns the loss and the mean Q(s_t,
    a_t), [].
    """
    reward, steps, last = n_step(batch, c.GAMMA)  # [B], [B], [B, ...]
    next_q = next_value(agent.online if c.DOUBLE_DQN else agent.target, agent.target, last.next_obs)
    y = td_target(reward, last.terminated, next_q, c.GAMMA**steps)  # [B]

    def loss_fn(online: QNetwork) -> tuple[jax.Array, jax.Array]:
        q = online(batch.obs[:, 0])  # [B, 2]
        # [B], else y - q broadcasts to [B, B]
        q = jnp.take_along_axis(q, batch.action[:, :1], axis=1)[:, 0]
        return jnp.mean((y - q) ** 2), q.mean()

    (loss, mean_q), gradient = nnx.value_and_grad(loss_fn, has_aux=True)(agent.online)
    agent.optimizer.update(agent.online, gradient)
    return loss, mean_q


def update(c: Constants, agent: Agent, env_step: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
    """One turn of the loop in algorithm 1 of Mnih et al. 2015: plays step number `env_step`, then
    does what's due.

    Also returns metrics, float32 [] each, nan where this step has none.
    """
    rng, action_rng, reset_rng, sample_rng = jax.random.split(agent.rng, 4)
    # With probability epsilon play any action, else the best one.
    q = agent.online(agent.env_state.obs)  # [2]
    action = select_action(q, epsilon_at(c, env_step), action_rng)
    env_state, transition, episode_return = env.step_or_reset(agent.env_state, action, reset_rng)
    # Store the transition.
    replay_buffer = add(agent.replay_buffer, transition)
    agent = agent._replace(replay_buffer=replay_buffer, env_state=env_state, rng=rng)

    # Every TRAIN_INTERVAL steps: sample a batch and learn from it.
    played = env_step + 1
    due = (played > c.LEARNING_STARTS) & (played % c.TRAIN_INTERVAL == 0)

    def learn(agent: Agent) -> tuple[Agent, jax.Array, jax.Array]:
        batch = sample(agent.replay_buffer, sample_rng, c.BATCH_SIZE, c.N_STEPS)
        loss, mean_q = train_step(c, agent, batch)
        return agent, loss, mean_q

    def wait(agent: Agent) -> tuple[Agent, float, float]:
        return agent, jnp.nan, jnp.nan

    agent, loss, mean_q = jax.lax.cond(due, learn, wait, agent)  # `if due`, compiled
    # Every TARGET_SYNC_INTERVAL steps: target = a copy of online.
    target = optax.periodic_update(agent.online, agent.target, played, c.TARGET_SYNC_INTERVAL)
    metrics = {"episode_return": episode_return, "loss": loss, "mean_q": mean_q}
    return agent._replace(target=target), metrics


# %% Training --------------------------------------------------------------------------------------
class Log(NamedTuple):
    """One row for each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    epsilon: jax.Array
    # means over the interval, nan if it has none:
    episode_return: jax.Array  # of the episodes that ended
    loss: jax.Array  # of the gradient steps
    mean_q: jax.Array  # of the actions in their batches
    # a look at the greedy policy, means over a few episodes in the JAX environment:
    eval_return: jax.Array
    max_q: jax.Array  # max_a Q(s_0, a) at the first states
    discounted_return: jax.Array  # what really came of them, discounted by GAMMA


SHOWN = ["epsilon", "episode_return", "eval_return", "mean_q", "loss"]


def make_agent(c: Constants, seed: jax.Array) -> Agent:
    """An untrained network, its copy, its optimizer, an empty buffer and a first state."""
    rng, network_rng, reset_rng = jax.random.split(jax.random.key(seed), 3)
    online, env_state = QNetwork(c, network_rng), env.reset(reset_rng)
    learning_rate = optax.linear_schedule(c.LEARNING_RATE, c.LEARNING_RATE_END, c.num_updates)
    _, row = env.step(env_state, jnp.int32(0))  # only its shapes matter
    rows = jax.tree.map(lambda x: jnp.zeros((c.REPLAY_CAPACITY, *x.shape), x.dtype), row)
    return Agent(
        online=online,
        target=nnx.clone(online),  # starts equal
        optimizer=nnx.Optimizer(online, optax.adam(learning_rate), wrt=nnx.Param),
        replay_buffer=ReplayBuffer(rows, jnp.int32(0)),
        env_state=env_state,
        rng=rng,
    )


def train_row(c: Constants, agent: Agent, env_step: jax.Array) -> tuple[Agent, Log]:
    """EVAL_INTERVAL updates of one seed from `env_step` on, then a look at its greedy policy."""
    agent, metrics = jax.lax.scan(partial(update, c), agent, env_step + jnp.arange(c.EVAL_INTERVAL))
    rng, eval_rng = jax.random.split(agent.rng)
    eval_return, max_q, discounted_return = env.quick_evaluate(agent.online, eval_rng, c.GAMMA)
    played = env_step + c.EVAL_INTERVAL
    return agent._replace(rng=rng), Log(
        env_step=played,
        epsilon=epsilon_at(c, played),
        **{name: jnp.nanmean(values) for name, values in metrics.items()},
        eval_return=eval_return,
        max_q=max_q,
        discounted_return=discounted_return,
    )


def train(c: Constants) -> tuple[Agent, Log, float]:
    """Trains all seeds, a row at a time: agents [NUM_SEEDS, ...], log [NUM_SEEDS, rows], compile
    seconds.
    """
    # All that's above is about one seed; these `vmap`s make it NUM_SEEDS of them, side by side.
    agents = jax.jit(jax.vmap(partial(make_agent, c)))(c.SEED + jnp.arange(c.NUM_SEEDS))
    # Each seed has an agent of its own (axis 0), but the step is one number for all (None). So
    # `cond` stays a branch: with a step for each, all seeds would learn at every step and mostly
    # throw the result away.
    all_seeds = jax.jit(jax.vmap(partial(train_row, c), in_axes=(0, None)))
    all_seeds, compile_seconds = runs.compiled(all_seeds, agents, 0)
    log = []
    for env_step in runs.until_ctrl_c(range(0, c.NUM_STEPS, c.EVAL_INTERVAL)):
        agents, row = all_seeds(agents, env_step)
        log.append(jax.device_get(row))
        env.print_row(c.NUM_STEPS, SHOWN, log)
    return agents, runs.columns(log), compile_seconds


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains all seeds, evaluates them, fills the run's folder. Returns what result.json holds."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    runs.start_jax()
    run_dir = runs.open_run("cart_pole_dqn", c)
    steps = f"{c.NUM_SEEDS} seeds x {c.NUM_STEPS:,} environment steps"
    updates = f"{c.num_updates:,} gradient steps of {c.BATCH_SIZE} windows of {c.N_STEPS}"
    print(f"{steps}, {updates}, in {run_dir}")
    agents, log, compile_seconds = train(c)
    runs.write_log(run_dir, log, c.SEED)
    print(f"trained; now {c.EVAL_EPISODES} greedy episodes each")
    eval_return = env.evaluate(agents.online, c.EVAL_EPISODES).mean(axis=1)  # [NUM_SEEDS]
    env.print_returns(c.SEED, eval_return)
    pictures.draw_learning_curve(run_dir / "learning_curve.png", log)
    first_seed = jax.tree.map(lambda x: x[0], agents.online)
    untrained = QNetwork(c, jax.random.key(c.SEED))
    pictures.record_gif(run_dir / "cart_pole.gif", untrained, first_seed)
    result = {
        "eval_return": eval_return.tolist(),
        "env_steps": log.env_step[:, -1].tolist(),
        "compile_seconds": compile_seconds,
    }
    return runs.finish(run_dir, started, result)


if __name__ == "__main__":
    settings.run(main)
