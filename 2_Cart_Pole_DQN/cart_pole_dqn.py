"""DQN on CartPole: the table of folder 1 becomes a network, and learning becomes unstable. This holds it.

The loss (Mnih et al. 2015, with Double DQN of van Hasselt et al. 2016 and n-step targets of Sutton 1988):

    L = mean (y - Q_online(s_t, a_t))^2
    y = sum_{k<m} gamma^k r_{t+k} + gamma^m (1 - terminated) Q_target(s_{t+m}, argmax_a Q_online(s_{t+m}, a))

with m = N_STEPS, or fewer where the episode ends first. The second part of y is the network's own estimate
("bootstrapping"); a truncated episode keeps it. The transitions come from a replay buffer, so older policies
than the one they train have played them ("off-policy").

What is *not* here, and why: no frame stacking and no convolutions (the state is four numbers), no prioritized
replay and no dueling heads (ten of ten seeds do without), no Huber loss (rewards of 1 need no guard against
large errors), no correction of the n-step return for the older policy that played it (as in Rainbow; with
epsilon near 0 the two seldom disagree).

Read first: `update` (two steps of environment, one of gradient), `td_target`, `train_step`.

    python 2_Cart_Pole_DQN/cart_pole_dqn.py           # ten seeds at once: about 35 seconds on 2 CPU cores
    python 2_Cart_Pole_DQN/cart_pole_dqn.py N_STEPS=1 NUM_SEEDS=3
    python 2_Cart_Pole_DQN/cart_pole_dqn.py --help    # all constants
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# XLA splits even the smallest matrix product over all cores; here the hand-over costs more than it saves, and
# a product in one thread makes a run repeatable bit for bit.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
# What was compiled is kept from run to run: another SEED compiles nothing. Safe to delete.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "runs/compiled")

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams

import pictures
import settings

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
N_STEPS = 5  # rewards counted before the network's own estimate; 1: the DQN of 2015
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
RUN_DIR = ""  # empty: runs/cart_pole_dqn/<time>

DEFAULTS = settings.constants(globals())


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets the constants above: DEFAULTS, changed by `NAME=value` arguments. Raises settings.UserError."""
    return settings.configure(globals(), arguments)


# %% Environment ----------------------------------------------------------------------------------------
ENV = CartPoleFunctional()
# Trap: Gymnasium 1.4.0's own default of polemass_length is mass + length (0.6). CartPole-v1 multiplies them.
PHYSICS = CartPoleParams(polemass_length=0.05)
MAX_EPISODE_STEPS = gymnasium.spec("CartPole-v1").max_episode_steps  # 500
SOLVED = gymnasium.spec("CartPole-v1").reward_threshold  # 475: a mean return from here on counts as solved
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


# %% Networks -------------------------------------------------------------------------------------------
class QNetwork(nnx.Module):
    """Q(s, .) of all actions at once: 4 - 64 - 64 - 2, float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(4, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 2, rngs=rngs)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Observations [..., 4] to Q values [..., 2]."""
        x = obs / jnp.array(OBSERVATION_SCALE) if SCALE_OBSERVATIONS else obs
        x = nnx.relu(self.hidden_1(x))
        x = nnx.relu(self.hidden_2(x))
        return self.output(x)


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of jax.lax.scan."""

    online: QNetwork
    target: QNetwork
    optimizer: nnx.Optimizer
    replay_buffer: "ReplayBuffer"
    env_state: EnvState


class Log(NamedTuple):
    """One row per EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    epsilon: jax.Array
    episode_return: jax.Array  # mean over the episodes that ended in this interval, nan if none did
    eval_return: jax.Array  # greedy policy, mean of QUICK_EVAL_EPISODES on the JAX environment
    max_q: jax.Array  # max_a Q(s_0, a) at the first states of those episodes
    discounted_return: jax.Array  # what really came of them, discounted by GAMMA
    loss: jax.Array
    mean_q: jax.Array


def make_agent(network_rng: jax.Array, reset_rng: jax.Array) -> Agent:
    """An agent before its first step."""
    num_updates = (NUM_STEPS - LEARNING_STARTS) // TRAIN_INTERVAL
    learning_rate = optax.linear_schedule(LEARNING_RATE, LEARNING_RATE_END, num_updates)
    online = QNetwork(nnx.Rngs(network_rng))
    target = nnx.clone(online)  # starts equal
    optimizer = nnx.Optimizer(online, optax.adam(learning_rate), wrt=nnx.Param)
    return Agent(online, target, optimizer, empty_buffer(), reset(reset_rng))


def train(rng: jax.Array, report: Callable[[Log], None]) -> tuple[Agent, Log, QNetwork]:
    """One seed's whole training, a pure function: jax.jit compiles it, jax.vmap runs it for many seeds.

    Must be mapped with `jax.vmap(..., axis_name="seed")`.

    Args:
        rng: everything random follows from it.
        report: called on the host after each EVAL_INTERVAL with the log row, averaged over the seeds.

    Returns:
        The agent at the end, the log [rows], and the online network as it was at each row [rows, ...].
    """
    network_rng, reset_rng, warmup_rng, learning_rng = jax.random.split(rng, 4)
    agent = make_agent(network_rng, reset_rng)
    steps = jnp.arange(LEARNING_STARTS)
    agent, _ = jax.lax.scan(collect, agent, (steps, jax.random.split(warmup_rng, LEARNING_STARTS)))
    steps = jnp.arange(LEARNING_STARTS, NUM_STEPS, EVAL_INTERVAL)
    rngs = jax.random.split(learning_rng, len(steps))
    interval = functools.partial(learn_and_evaluate, report=report)
    agent, (log, policies) = jax.lax.scan(interval, agent, (steps, rngs))
    return agent, log, policies


def learn_and_evaluate(agent: Agent, x: tuple[jax.Array, jax.Array], report: Callable[[Log], None]):
    """EVAL_INTERVAL environment steps from x = (env_step, rng) on, then a look at the greedy policy."""
    env_step, rng = x
    eval_rng, learn_rng = jax.random.split(rng)
    steps = env_step + jnp.arange(0, EVAL_INTERVAL, TRAIN_INTERVAL)
    rngs = jax.random.split(learn_rng, len(steps))
    agent, (episode_returns, loss, mean_q) = jax.lax.scan(update, agent, (steps, rngs))
    eval_return, max_q, discounted_return = quick_evaluate(agent.online, eval_rng)
    end = env_step + EVAL_INTERVAL
    log = Log(
        end, epsilon_at(end), jnp.nanmean(episode_returns), eval_return, max_q, discounted_return,
        loss.mean(), mean_q.mean(),
    )  # fmt: skip
    jax.debug.callback(report, jax.lax.pmean(log, "seed"))
    return agent, (log, agent.online)


def update(agent: Agent, x: tuple[jax.Array, jax.Array]):
    """TRAIN_INTERVAL environment steps from x = (env_step, rng) on, then one gradient step."""
    env_step, rng = x
    sample_rng, *collect_rngs = jax.random.split(rng, 1 + TRAIN_INTERVAL)
    steps = env_step + jnp.arange(TRAIN_INTERVAL)
    agent, episode_returns = jax.lax.scan(collect, agent, (steps, jnp.stack(collect_rngs)))
    batch = agent.replay_buffer.sample(sample_rng)
    loss, mean_q = train_step(agent.online, agent.target, agent.optimizer, batch)
    learning_steps = env_step + TRAIN_INTERVAL - LEARNING_STARTS
    synchronize(agent.online, agent.target, learning_steps % TARGET_SYNC_INTERVAL == 0)
    return agent, (episode_returns, loss, mean_q)


def collect(agent: Agent, x: tuple[jax.Array, jax.Array]):
    """Plays step x = (env_step, rng) into the buffer; returns the episode's length if it ended, else nan."""
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


def train_seeds(report: Callable[[Log], None]) -> tuple[Agent, Log, QNetwork, dict[str, float]]:
    """Compiles and trains all seeds as one program.

    Returns:
        What `train` returns, each array with a leading axis [NUM_SEEDS]; compile_seconds and train_seconds.
    """
    rngs = jax.vmap(jax.random.key)(SEED + jnp.arange(NUM_SEEDS))
    started = time.perf_counter()
    train_all = jax.vmap(functools.partial(train, report=report), axis_name="seed")
    compiled = jax.jit(train_all).lower(rngs).compile()
    compile_seconds = time.perf_counter() - started
    agents, log, policies = jax.block_until_ready(compiled(rngs))
    jax.effects_barrier()  # the last report has been printed
    train_seconds = time.perf_counter() - started - compile_seconds
    seconds = {"compile_seconds": compile_seconds, "train_seconds": train_seconds}
    return agents, jax.tree.map(np.asarray, log), policies, seconds


# %% Algorithm ------------------------------------------------------------------------------------------
Batch = Transition  # as sampled, windows of consecutive transitions: each field [BATCH_SIZE, N_STEPS, ...]


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

    def sample(self, rng: jax.Array) -> Batch:
        """BATCH_SIZE windows of N_STEPS consecutive transitions, drawn uniformly with replacement.

        A window may run over the end of an episode; `td_target` stops there. At least N_STEPS transitions
        must have been added.
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


def epsilon_at(env_step: jax.Array) -> jax.Array:
    """The probability of a random action: EPSILON_START at step 0, EPSILON_END from DECAY_STEPS on."""
    return optax.linear_schedule(EPSILON_START, EPSILON_END, DECAY_STEPS)(env_step)


def select_action(network: QNetwork, obs: jax.Array, epsilon: jax.Array, rng: jax.Array) -> jax.Array:
    """Epsilon-greedy: int32 []. A random action may well be the greedy one."""
    coin_rng, action_rng = jax.random.split(rng)
    random_action = jax.random.randint(action_rng, (), 0, 2)
    return jnp.where(jax.random.uniform(coin_rng) < epsilon, random_action, network(obs).argmax())


def train_step(online: QNetwork, target: QNetwork, optimizer: nnx.Optimizer, batch: Batch):
    """One gradient step on the mean squared TD error; changes `online` and `optimizer` in place.

    Returns:
        The loss, float32 [], and the mean predicted Q(s_t, a_t), float32 [].
    """
    y = td_target(online, target, batch)  # [B]

    def loss_fn(online):
        q = online(batch.obs[:, 0])  # [B, 2]
        q = jnp.take_along_axis(q, batch.action[:, :1], axis=1)[:, 0]  # [B]; [B, 1] - [B] would be [B, B]
        return jnp.mean((y - q) ** 2), q.mean()

    (loss, mean_q), gradient = nnx.value_and_grad(loss_fn, has_aux=True)(online)
    optimizer.update(online, gradient)
    return loss, mean_q


def td_target(online: QNetwork, target: QNetwork, batch: Batch) -> jax.Array:
    """What Q(s_t, a_t) should have been: n rewards, then the target network's estimate (equation on top).

    Args:
        online: chooses the next action when DOUBLE_DQN.
        target: values it.
        batch: windows of N_STEPS consecutive transitions, [B, n, ...].

    Returns:
        float32 [B], without gradient.
    """
    # A step counts while no step before it ended the episode; what follows belongs to the next one.
    ended = batch.terminated | batch.truncated  # [B, n]
    running = jnp.cumprod(1 - ended[:, :-1], axis=1)  # [B, n - 1]
    counts = jnp.concatenate([jnp.ones_like(ended[:, :1], int), running], axis=1)  # [B, n], 1 ... 1 0 ... 0
    discounts = GAMMA ** jnp.arange(counts.shape[1])  # [n]
    n_step_return = (counts * discounts * batch.reward).sum(axis=1)  # [B]

    m = counts.sum(axis=1)  # [B], from 1 to n
    last = jax.tree.map(lambda x: x[jnp.arange(len(m)), m - 1], batch)  # [B, ...]
    # Double DQN (van Hasselt et al. 2016, eq. 4). Without it, max takes the luckiest error for the truth.
    chooser = online if DOUBLE_DQN else target
    next_action = chooser(last.next_obs).argmax(axis=-1)  # [B]
    next_q = jnp.take_along_axis(target(last.next_obs), next_action[:, None], axis=1)[:, 0]  # [B]
    # Only terminated cuts the future off. A truncated episode would have gone on: it bootstraps.
    return jax.lax.stop_gradient(n_step_return + GAMMA**m * (1 - last.terminated) * next_q)


def synchronize(online: QNetwork, target: QNetwork, now: jax.Array) -> None:
    """Copies the online network's weights into the target network where `now` is True."""
    weights = jax.tree.map(lambda new, old: jnp.where(now, new, old), nnx.state(online), nnx.state(target))
    nnx.update(target, weights)


# %% Evaluation -----------------------------------------------------------------------------------------
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


def best_of(log: Log, policies: QNetwork) -> QNetwork:
    """Each seed's network at its best `eval_return`, among equals the latest: [S, rows, ...] to [S, ...]."""
    seeds, rows = log.eval_return.shape
    best = rows - 1 - log.eval_return[:, ::-1].argmax(axis=1)  # [S]
    return jax.tree.map(lambda x: x[np.arange(seeds), best], policies)


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
    """Mean and sample standard deviation over the seeds [S], and how many of them are solved."""
    spread = f" +- {eval_return.std(ddof=1):.1f}" if len(eval_return) > 1 else ""
    solved, full = (int((eval_return >= mark).sum()) for mark in (SOLVED, MAX_EPISODE_STEPS))
    return (
        f"{eval_return.mean():.1f}{spread}, lowest {eval_return.min():.1f}, {solved} of {len(eval_return)} "
        f"seeds solved ({SOLVED:.0f} or more), {full} at {MAX_EPISODE_STEPS:.1f}"
    )


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains all seeds, evaluates them, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: eval_return (of the last policy) and best_eval_return (of the best by
        `quick_evaluate`), each a list over the seeds of the mean of EVAL_EPISODES episodes; env_steps (of
        each seed); seconds (wall time after imports), of which compile_seconds and train_seconds.

    Raises:
        settings.UserError: see `settings.configure` and `settings.open_run`.
    """
    started = time.perf_counter()
    constants = configure(arguments)
    run_dir = settings.open_run("cart_pole_dqn", constants)
    num_updates = (NUM_STEPS - LEARNING_STARTS) // TRAIN_INTERVAL
    print(
        f"{NUM_SEEDS} seeds x {NUM_STEPS:,} environment steps, {num_updates:,} gradient steps of "
        f"{BATCH_SIZE} windows of {N_STEPS}, in {run_dir}"
    )
    with settings.progress(NUM_STEPS) as report:
        agents, log, policies, seconds = train_seeds(report)
    rows = [
        {"seed": SEED + i} | {name: values[i, j].item() for name, values in log._asdict().items()}
        for i, j in np.ndindex(log.env_step.shape)
    ]
    settings.write_csv(run_dir / "log.csv", rows)
    print(
        f"compiled in {seconds['compile_seconds']:.1f} s, trained in {seconds['train_seconds']:.1f} s; "
        f"now {EVAL_EPISODES} episodes of CartPole-v1 each"
    )
    last, best = (evaluate(n).mean(axis=1) for n in (agents.online, best_of(log, policies)))
    for i in range(NUM_SEEDS):
        print(f"seed {SEED + i:3d}   last policy {last[i]:6.2f}   best policy {best[i]:6.2f}")
    print(f"last policy: {summary(last)}\nbest policy: {summary(best)}")
    pictures.draw_learning_curve(run_dir / "learning_curve.png", log)
    first_seed = jax.tree.map(lambda x: x[0], agents.online)
    pictures.record_gif(run_dir / "cart_pole.gif", QNetwork(nnx.Rngs(SEED)), first_seed)
    result = {
        "eval_return": last.tolist(),
        "best_eval_return": best.tolist(),
        "env_steps": NUM_STEPS,
        "seconds": time.perf_counter() - started,
    } | seconds
    settings.write_json(run_dir / "result.json", result)
    print(f"{result['seconds']:.0f} s; everything of this run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
