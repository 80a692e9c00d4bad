"""PPO on Pendulum: an actor draws its torque from a normal distribution, a critic says what to expect.

The objective of the actor, to be maximized, is the clipped surrogate objective (Schulman et al. 2017, eq. 7),
with an optional penalty that plays the part of a trust region (eq. 8):

    J = mean [ min(ratio_t * A_t, clip(ratio_t, 1 - epsilon, 1 + epsilon) * A_t) - beta * KL(pi_old || pi) ]
    ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)          the importance weight

with the advantage of GAE (Schulman et al. 2016, eq. 16), cut at the end of an episode:

    A_t = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1}
    delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)

Pendulum never terminates, its episodes are truncated after 200 steps. So delta_t always bootstraps: V of the
true last observation stands for the rewards that were not seen.

Read first: `update`, the four phases; `generalized_advantage_estimation`; `policy_loss`.

What is *not* here, and why: no entropy bonus (the distribution starts wide and narrows by itself), no
clipping of the value loss, no running normalization (three numbers with known ranges; normalized advantages
forgive the rewards' scale), no weights shared between actor and critic (two small networks are simpler than
weighing two losses against each other), no early stop by KL.

    python 3_Pendulum/pendulum.py                 # ten seeds at once: about 25 seconds on one CPU core
    python 3_Pendulum/pendulum.py GAMMA=0.9 NUM_SEEDS=3
    python 3_Pendulum/study.py                    # every row of the ablation table: 9 minutes
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
from flax import nnx
from gymnasium.envs.phys2d.pendulum import PendulumFunctional, PendulumParams
from tensorflow_probability.substrates.jax import distributions as tfd

import pictures
import settings

# %% Constants ------------------------------------------------------------------------------------------
# Collecting: one rollout is NUM_ENVS * ROLLOUT_STEPS steps, learned from and thrown away
NUM_STEPS = 100_000  # environment steps of each seed, all its environments together
NUM_ENVS = 8  # environments of each seed, side by side
ROLLOUT_STEPS = 125  # steps of each environment in a rollout

# Judging
GAMMA = 0.98  # worth of a reward one step later: looks about 50 steps ahead, a swing-up takes about as long
GAE_LAMBDA = 0.85  # 0: trust the critic after one step; 1: trust only what was earned (no GAE)
NORMALIZE_ADVANTAGES = True  # to mean 0 and standard deviation 1, in each mini-batch

# Learning
NUM_EPOCHS = 10  # passes over each rollout
MINIBATCH_SIZE = 50  # steps in one gradient step
ACTOR_LEARNING_RATE = 1e-3  # Adam's, at the first gradient step
CRITIC_LEARNING_RATE = 3e-3  # the critic has to keep up with a policy that moves; 1e-3 is too slow
LEARNING_RATE_END = 0.0  # share of both rates left at the last gradient step; 1: no decay
MAX_GRAD_NORM = 0.5  # longer gradients are shortened to this, for each network on its own

# The two safety locks: both keep the new policy near the one that collected the rollout
CLIP_EPSILON = 0.2  # no gain from moving the ratio beyond 1 +- this; 1e9 switches it off
BETA = 0.0  # weight of the KL divergence from the old policy; 0 switches it off
KL_TARGET = 0.0  # above 0: BETA doubles or halves after a rollout, to bring the KL near this; 0: BETA stays

# Networks
HIDDEN_SIZE = 64  # width of the two hidden layers of each network
SIGMA_START = 2.0  # standard deviation of the torque at first, newton metres; the limits are +-2
SIGMA_MIN = 0.05  # newton metres; as sigma goes to 0, a small step of the mean makes any ratio
SCALE_OBSERVATIONS = True  # divide by OBSERVATION_SCALE, so that all three numbers reach 1

# The run
SEED = 0  # of the first seed
NUM_SEEDS = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
EVAL_INTERVAL = 5_000  # environment steps between looks at the greedy policy during training
EVAL_EPISODES = 100  # greedy episodes on gymnasium.make("Pendulum-v1") after training, for each seed
RUN_DIR = ""  # empty: runs/pendulum/<time>

DEFAULTS = settings.constants(globals())


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets the constants above: DEFAULTS, changed by `NAME=value` arguments. Raises settings.UserError."""
    return settings.configure(globals(), arguments)


# %% Environment ----------------------------------------------------------------------------------------
ENV = PendulumFunctional()
PHYSICS = PendulumParams()
MAX_EPISODE_STEPS = gymnasium.spec("Pendulum-v1").max_episode_steps  # 200
MAX_TORQUE = ENV.max_torque  # 2 newton metres, not enough to lift the pendulum in one go
OBSERVATION_SCALE = (1.0, 1.0, 8.0)  # cosine and sine of the angle; the fastest turn, rad/s


class Transition(NamedTuple):
    """One step of the environment; with leading axes, many of them."""

    obs: jax.Array  # float32 [3]
    action: jax.Array  # float32 [], as drawn: may lie beyond the torque limits
    reward: jax.Array  # float32 []
    next_obs: jax.Array  # float32 [3], the true one, not the first of the next episode
    terminated: jax.Array  # bool [], always False: nothing can go so wrong that the swinging ends
    truncated: jax.Array  # bool [], the 200 steps are over; the pendulum swings on


class EnvState(NamedTuple):
    """An episode in progress."""

    physical: jax.Array  # float32 [2], the angle (0: upright) and its speed, rad and rad/s
    obs: jax.Array  # float32 [3], what the agent sees of it: cosine, sine, speed
    steps: jax.Array  # int32 [], played in this episode
    episode_return: jax.Array  # float32 [], earned in it


def reset(rng: jax.Array) -> EnvState:
    """The first state of an episode: any angle, slow."""
    physical = ENV.initial(rng, PHYSICS)
    return EnvState(physical, ENV.observation(physical, None, PHYSICS), jnp.int32(0), jnp.float32(0))


def step(state: EnvState, action: jax.Array) -> tuple[EnvState, Transition]:
    """One step of Pendulum-v1, its time limit included.

    The environment itself cuts the torque at its limits: action 3.7 does what action 2 does. So the cut
    belongs to the world, not to the policy, and the log-prob to train on is that of the action as drawn. (The
    log-prob of the cut action would be of an action that the policy did not draw: a bias, for nothing.)
    """
    torque = action[None]
    physical = ENV.transition(state.physical, torque, None, PHYSICS)
    reward = ENV.reward(state.physical, torque, physical, None, PHYSICS)
    obs = ENV.observation(physical, None, PHYSICS)
    following = EnvState(physical, obs, state.steps + 1, state.episode_return + reward)
    terminated = jnp.bool_(ENV.terminal(physical, None, PHYSICS))
    truncated = following.steps >= MAX_EPISODE_STEPS
    return following, Transition(state.obs, action, reward, obs, terminated, truncated)


# %% Networks -------------------------------------------------------------------------------------------
def scaled(obs: jax.Array) -> jax.Array:
    """Observations [..., 3], each number within -1 to 1 if SCALE_OBSERVATIONS."""
    return obs / jnp.array(OBSERVATION_SCALE) if SCALE_OBSERVATIONS else obs


class Actor(nnx.Module):
    """pi(. | s), the distribution of the torque: 3 - 64 - 64 - (mean, sigma), float32."""

    def __init__(self, rngs: nnx.Rngs):
        # Heads that start at almost nothing: mean 0 and SIGMA_START wherever the pendulum is.
        almost_zero = nnx.initializers.variance_scaling(0.01, "fan_in", "truncated_normal")
        self.hidden_1 = nnx.Linear(3, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.mean = nnx.Linear(HIDDEN_SIZE, 1, kernel_init=almost_zero, rngs=rngs)
        self.sigma = nnx.Linear(HIDDEN_SIZE, 1, kernel_init=almost_zero, rngs=rngs)

    def __call__(self, obs: jax.Array) -> tfd.Normal:
        """Observations [..., 3] to a normal distribution of batch shape [...]."""
        x = nnx.tanh(self.hidden_1(scaled(obs)))
        x = nnx.tanh(self.hidden_2(x))
        mean = MAX_TORQUE * nnx.tanh(self.mean(x))[..., 0]
        # softplus keeps sigma positive; the constant inside makes it SIGMA_START where the head gives 0.
        start = np.log(np.expm1(SIGMA_START - SIGMA_MIN))
        sigma = SIGMA_MIN + nnx.softplus(self.sigma(x)[..., 0] + start)
        return tfd.Normal(mean, sigma)


class Critic(nnx.Module):
    """V(s): 3 - 64 - 64 - 1, float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(3, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 1, rngs=rngs)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Observations [..., 3] to values [...]; not [..., 1], see `critic_loss`."""
        x = nnx.tanh(self.hidden_1(scaled(obs)))
        x = nnx.tanh(self.hidden_2(x))
        return self.output(x)[..., 0]


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of jax.lax.scan."""

    actor: Actor
    critic: Critic
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    beta: jax.Array  # float32 []
    env_state: EnvState  # each leaf [N, ...], N = NUM_ENVS


class Rollout(NamedTuple):
    """What one policy did, and what it thought while doing it; each [T, N, ...], T = ROLLOUT_STEPS."""

    transition: Transition
    log_prob: jax.Array  # float32 [T, N], of the action, by the policy that drew it
    mean: jax.Array  # float32 [T, N], of that policy
    sigma: jax.Array  # float32 [T, N]
    value: jax.Array  # float32 [T, N], V(s_t)
    next_value: jax.Array  # float32 [T, N], V(s_{t+1}), of the true next observation
    episode_return: jax.Array  # float32 [T, N], of the episode that ended here, else nan


class Batch(NamedTuple):
    """Steps to learn from, in any order."""

    obs: jax.Array  # float32 [B, 3]
    action: jax.Array  # float32 [B]
    log_prob: jax.Array  # float32 [B], of the old policy
    mean: jax.Array  # float32 [B], of the old policy
    sigma: jax.Array  # float32 [B], of the old policy
    advantage: jax.Array  # float32 [B]
    returns: jax.Array  # float32 [B], the critic's targets


class Log(NamedTuple):
    """One row for each EVAL_INTERVAL, means over its rollouts; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    episode_return: jax.Array  # of the episodes that ended in this interval, torque drawn; nan if none did
    eval_return: jax.Array  # greedy policy, mean of QUICK_EVAL_EPISODES on the JAX environment
    explained_variance: jax.Array  # 1 - Var(returns - V) / Var(returns), of V before it learned from them
    value_loss: jax.Array
    # after the last epoch, new policy against old on the whole rollout:
    kl: jax.Array  # KL(pi_old || pi), exact
    approx_kl: jax.Array  # the same from the ratios of the drawn actions, as practitioners watch it (k3)
    clip_fraction: jax.Array  # share of ratios outside 1 +- CLIP_EPSILON
    entropy: jax.Array  # of the new policy, nats
    sigma: jax.Array  # of the new policy, newton metres
    beta: jax.Array


def train_seeds(report: Callable[[Log], None]) -> tuple[Agent, Log, Actor, float, float]:
    """Compiles and trains all seeds as one program.

    Args:
        report: see `train`.

    Returns:
        What `train` returns, each leaf with a leading axis [NUM_SEEDS], the log as numpy arrays; seconds of
        compiling and of training.
    """
    rngs = jax.vmap(jax.random.key)(SEED + jnp.arange(NUM_SEEDS))
    started = time.perf_counter()
    train_all = jax.vmap(functools.partial(train, report=report), axis_name="seed")
    compiled = jax.jit(train_all).lower(rngs).compile()
    compile_seconds = time.perf_counter() - started
    agents, log, policies = jax.block_until_ready(compiled(rngs))
    jax.effects_barrier()  # the last report has been made
    train_seconds = time.perf_counter() - started - compile_seconds
    return agents, jax.tree.map(np.asarray, log), policies, compile_seconds, train_seconds


def train(rng: jax.Array, report: Callable[[Log], None]) -> tuple[Agent, Log, Actor]:
    """One seed's whole training, a pure function: jax.jit compiles it, jax.vmap runs it for many seeds.

    Must be mapped with `jax.vmap(..., axis_name="seed")`.

    Args:
        rng: everything random follows from it.
        report: called on the host after each EVAL_INTERVAL with the log row, averaged over the seeds.

    Returns:
        The agent at the end, the log [rows], and the actor at each row of the log, leaves [rows, ...].
    """
    actor_rng, critic_rng, reset_rng, eval_rng, learning_rng = jax.random.split(rng, 5)

    def learn_and_evaluate(agent: Agent, x):
        """EVAL_INTERVAL environment steps, then a look at the greedy policy."""
        env_step, rng = x
        rngs = jax.random.split(rng, EVAL_INTERVAL // (NUM_ENVS * ROLLOUT_STEPS))
        agent, figures = jax.lax.scan(update, agent, rngs)  # each figure [rollouts, ...]
        episode_return = jnp.nanmean(figures.pop("episode_return"))
        # Over the whole interval: in a rollout where all pendulums stand there is nothing to explain.
        unexplained, variance = figures.pop("unexplained").mean(), figures.pop("variance").mean()
        log = Log(
            env_step=env_step + EVAL_INTERVAL,
            episode_return=episode_return,
            # The same first states each time: what changes is the policy.
            eval_return=quick_evaluate(agent.actor, eval_rng),
            explained_variance=1 - unexplained / variance,
            **{name: figure.mean() for name, figure in figures.items()},
        )
        jax.debug.callback(report, jax.lax.pmean(log, "seed"))
        return agent, (log, agent.actor)

    steps = jnp.arange(0, NUM_STEPS, EVAL_INTERVAL)
    agent = make_agent(actor_rng, critic_rng, reset_rng)
    rngs = jax.random.split(learning_rng, len(steps))
    agent, (log, policies) = jax.lax.scan(learn_and_evaluate, agent, (steps, rngs))
    return agent, log, policies


def make_agent(actor_rng: jax.Array, critic_rng: jax.Array, reset_rng: jax.Array) -> Agent:
    """Untrained networks, their optimizers, and NUM_ENVS first states."""
    num_updates = NUM_STEPS * NUM_EPOCHS // MINIBATCH_SIZE

    def adam(learning_rate: float) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(learning_rate, learning_rate * LEARNING_RATE_END, num_updates)
        return optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(schedule))

    actor, critic = Actor(nnx.Rngs(actor_rng)), Critic(nnx.Rngs(critic_rng))
    return Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, adam(ACTOR_LEARNING_RATE), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, adam(CRITIC_LEARNING_RATE), wrt=nnx.Param),
        beta=jnp.float32(BETA),
        env_state=jax.vmap(reset)(jax.random.split(reset_rng, NUM_ENVS)),
    )


def update(agent: Agent, rng: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
    """The four phases of PPO; returns the figures of `Log`, explained variance in its two parts."""
    collect_rng, learn_rng = jax.random.split(rng)
    # 1. collect
    agent, rollout = collect(agent, collect_rng)
    # 2. judge
    advantage, returns = generalized_advantage_estimation(rollout)
    t = rollout.transition
    rows = (t.obs, t.action, rollout.log_prob, rollout.mean, rollout.sigma, advantage, returns)
    batch = Batch(*(x.reshape(-1, *x.shape[2:]) for x in rows))  # [T, N, ...] -> [B, ...]
    # 3. learn
    agent, value_loss = learn(agent, batch, learn_rng)
    # 4. discard: the rollout ends here. Its log-probs are those of a policy that is gone.

    figures = {
        "episode_return": rollout.episode_return,
        "variance": returns.var(),
        "unexplained": (returns - rollout.value).var(),
        "value_loss": value_loss,
        **compare_policies(agent.actor, batch),
    }
    agent = agent._replace(beta=adapted_beta(agent.beta, figures["kl"]))
    return agent, figures | {"beta": agent.beta}


def collect(agent: Agent, rng: jax.Array) -> tuple[Agent, Rollout]:
    """ROLLOUT_STEPS steps of every environment, all by one and the same policy."""

    def one_step(env_state: EnvState, rng: jax.Array) -> tuple[EnvState, Rollout]:
        action_rng, reset_rng = jax.random.split(rng)
        policy = agent.actor(env_state.obs)
        action = policy.sample(seed=action_rng)  # [N], beyond +-2 at will: see `step`
        log_prob, value = policy.log_prob(action), agent.critic(env_state.obs)  # [N]
        following, transition = jax.vmap(step)(env_state, action)
        next_value = agent.critic(transition.next_obs)  # [N]
        ended = transition.terminated | transition.truncated  # [N]
        episode_return = jnp.where(ended, following.episode_return, jnp.nan)
        first = jax.vmap(reset)(jax.random.split(reset_rng, NUM_ENVS))
        env_state = jax.vmap(choose)(ended, first, following)
        row = Rollout(transition, log_prob, policy.loc, policy.scale, value, next_value, episode_return)
        return env_state, row

    rngs = jax.random.split(rng, ROLLOUT_STEPS)
    env_state, rollout = jax.lax.scan(one_step, agent.env_state, rngs)
    return agent._replace(env_state=env_state), rollout


def choose(condition: jax.Array, yes, no):
    """`yes` where the condition [] holds, else `no`, for every leaf of two equal trees."""
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def learn(agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, jax.Array]:
    """NUM_EPOCHS passes over the rollout in shuffled mini-batches; returns the mean value loss as well."""

    def one_epoch(agent: Agent, rng: jax.Array) -> tuple[Agent, jax.Array]:
        shuffled = jax.random.permutation(rng, len(batch.obs)).reshape(-1, MINIBATCH_SIZE)
        return jax.lax.scan(one_minibatch, agent, shuffled)

    def one_minibatch(agent: Agent, rows: jax.Array) -> tuple[Agent, jax.Array]:
        return agent, train_step(agent, jax.tree.map(lambda x: x[rows], batch))

    agent, value_loss = jax.lax.scan(one_epoch, agent, jax.random.split(rng, NUM_EPOCHS))
    return agent, value_loss.mean()


def train_step(agent: Agent, batch: Batch) -> jax.Array:
    """One gradient step of actor and critic, which changes both in place; returns the critic's loss []."""
    gradient = nnx.grad(policy_loss)(agent.actor, batch, agent.beta)
    agent.actor_optimizer.update(agent.actor, gradient)
    value_loss, gradient = nnx.value_and_grad(critic_loss)(agent.critic, batch)
    agent.critic_optimizer.update(agent.critic, gradient)
    return value_loss


# %% Algorithm ------------------------------------------------------------------------------------------
def generalized_advantage_estimation(rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """GAE (Schulman et al. 2016, eq. 16), from the last step back to the first.

    Returns:
        The advantages A_t and the critic's targets A_t + V(s_t), float32 [T, N] each.
    """
    t = rollout.transition
    # Truncated is not terminated: the world goes on, only we stop watching. So a truncation bootstraps.
    delta = t.reward + GAMMA * (1 - t.terminated) * rollout.next_value - rollout.value  # [T, N]
    # The next row may belong to the next episode: no advantage flows back over an end of either kind.
    running = 1 - (t.terminated | t.truncated)  # [T, N]

    def backwards(advantage, x):  # advantage [N]
        delta, running = x
        advantage = delta + GAMMA * GAE_LAMBDA * running * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, running), reverse=True)
    return advantage, advantage + rollout.value


def policy_loss(actor: Actor, batch: Batch, beta: jax.Array) -> jax.Array:
    """Minus the surrogate objective on top of this file, float32 []."""
    policy = actor(batch.obs)
    ratio = jnp.exp(policy.log_prob(batch.action) - batch.log_prob)  # [B], 1 at the first gradient step
    advantage = batch.advantage
    if NORMALIZE_ADVANTAGES:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    kl = tfd.kl_divergence(tfd.Normal(batch.mean, batch.sigma), policy)  # [B]
    return -jnp.mean(clipped_objective(ratio, advantage) - beta * kl)


def clipped_objective(ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """The first lock (Schulman et al. 2017, eq. 7), elementwise: the lower of two estimates of the gain.

    A good action (advantage above 0) earns nothing more once it is 1 + epsilon times as likely, a bad one
    once it is down to 1 - epsilon. On the other side is no limit: a step in the wrong direction is paid in
    full.
    """
    clipped = jnp.clip(ratio, 1 - CLIP_EPSILON, 1 + CLIP_EPSILON)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def critic_loss(critic: Critic, batch: Batch) -> jax.Array:
    """Mean squared error of the values, float32 []."""
    value = critic(batch.obs)  # [B]; with [B, 1] the difference would be [B, B], and nothing would complain
    return jnp.mean((value - batch.returns) ** 2)


def adapted_beta(beta: jax.Array, kl: jax.Array) -> jax.Array:
    """The second lock's weight for the next rollout (Schulman et al. 2017, section 4)."""
    if not KL_TARGET:
        return beta
    beta = jnp.where(kl > 1.5 * KL_TARGET, 2 * beta, beta)
    beta = jnp.where(kl < KL_TARGET / 1.5, beta / 2, beta)
    return jnp.clip(beta, 1e-6, 1e6)  # halved a hundred times, it would be 0 and stay 0


def compare_policies(actor: Actor, batch: Batch) -> dict[str, jax.Array]:
    """How far the actor has moved on a rollout, the figures of `Log`, float32 [] each."""
    policy = actor(batch.obs)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob  # [B]
    ratio = jnp.exp(log_ratio)
    return {
        "kl": tfd.kl_divergence(tfd.Normal(batch.mean, batch.sigma), policy).mean(),
        # Schulman 2020, "Approximating KL divergence": never negative
        "approx_kl": jnp.mean(ratio - 1 - log_ratio),
        "clip_fraction": jnp.mean(jnp.abs(ratio - 1) > CLIP_EPSILON),
        "entropy": policy.entropy().mean(),
        "sigma": policy.stddev().mean(),
    }


# %% Evaluation -----------------------------------------------------------------------------------------
QUICK_EVAL_EPISODES = 20


def quick_evaluate(actor: Actor, rng: jax.Array) -> jax.Array:
    """Mean return of QUICK_EVAL_EPISODES greedy episodes (the mean is the torque) on the JAX environment."""
    states = jax.vmap(reset)(jax.random.split(rng, QUICK_EVAL_EPISODES))  # [E, ...]

    def play(states, _):
        states, transition = jax.vmap(step)(states, actor(states.obs).mean())
        return states, transition.reward

    _, rewards = jax.lax.scan(play, states, None, MAX_EPISODE_STEPS)  # [200, E]
    return rewards.sum(axis=0).mean()


def best_of(log: Log, policies: Actor) -> Actor:
    """Each seed's actor at its best row of the log, among equals the latest; [S, rows, ...] to [S, ...]."""
    row = log.eval_return.shape[1] - 1 - log.eval_return[:, ::-1].argmax(axis=1)  # [S]
    return jax.tree.map(lambda x: x[np.arange(len(row)), row], policies)


def evaluate(actors: Actor) -> np.ndarray:
    """Greedy episodes on gymnasium.make("Pendulum-v1"), never on the JAX copy the agent learned in.

    Args:
        actors: each leaf with a leading axis [S]. All play the same EVAL_EPISODES episodes, with the
            environment seeds 0, 1, ...

    Returns:
        Returns, float64 [S, EVAL_EPISODES].
    """

    @jax.jit
    def greedy(actors, obs):  # [S, E, 3] -> [S, E]
        return jax.vmap(lambda actor, obs: actor(obs).mean())(actors, obs)

    num_actors = len(jax.tree.leaves(actors)[0])
    envs = [[gymnasium.make("Pendulum-v1") for _ in range(EVAL_EPISODES)] for _ in range(num_actors)]
    obs = np.array([[env.reset(seed=i)[0] for i, env in enumerate(row)] for row in envs])  # [S, E, 3]
    returns = np.zeros((num_actors, EVAL_EPISODES))
    for t in range(MAX_EPISODE_STEPS):
        actions = np.asarray(greedy(actors, obs))
        for s, e in np.ndindex(returns.shape):
            obs[s, e], reward, terminated, truncated, _ = envs[s][e].step(actions[s, e : e + 1])
            returns[s, e] += reward
            assert not terminated and truncated == (t + 1 == MAX_EPISODE_STEPS)
    return returns


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
    run_dir = settings.open_run("pendulum", configure(arguments))
    print(
        f"{NUM_SEEDS} seeds x {NUM_STEPS:,} environment steps in rollouts of {NUM_ENVS} x {ROLLOUT_STEPS}, "
        f"{NUM_STEPS * NUM_EPOCHS // MINIBATCH_SIZE:,} gradient steps of {MINIBATCH_SIZE}, in {run_dir}"
    )
    shown = ["episode_return", "eval_return", "explained_variance", "approx_kl", "clip_fraction", "entropy"]
    with settings.progress(NUM_STEPS, shown, run_dir / "tensorboard") as report:
        agents, log, policies, compile_seconds, train_seconds = train_seeds(report)
    settings.write_csv(run_dir / "log.csv", settings.log_rows(log, SEED))
    print(
        f"compiled in {compile_seconds:.1f} s, trained in {train_seconds:.1f} s; "
        f"now {EVAL_EPISODES} episodes of Pendulum-v1 each"
    )
    eval_return = evaluate(agents.actor).mean(axis=1)  # [NUM_SEEDS]
    best_eval_return = evaluate(best_of(log, policies)).mean(axis=1)
    for i in range(NUM_SEEDS):
        print(f"seed {SEED + i:3d}   last {eval_return[i]:8.2f}   best {best_eval_return[i]:8.2f}")
    print(f"last policy: {settings.summary(eval_return)}")
    print(f"best policy: {settings.summary(best_eval_return)}")
    actor, critic = (jax.tree.map(lambda x: x[0], network) for network in (agents.actor, agents.critic))
    pictures.draw_learning_curve(run_dir / "learning_curve.png", log)
    pictures.draw_clipped_objective(run_dir / "clipped_objective.png", clipped_objective, CLIP_EPSILON)
    played = pictures.record_gif(run_dir / "pendulum.gif", Actor(nnx.Rngs(SEED)), actor)
    pictures.draw_value_function(run_dir / "value_function.png", critic, played)
    result = {
        "eval_return": eval_return.tolist(),
        "best_eval_return": best_eval_return.tolist(),
        "env_steps": NUM_STEPS,
        "seconds": time.perf_counter() - started,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
    }
    settings.write_json(run_dir / "result.json", result)
    print(f"{result['seconds']:.0f} s; everything of this run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
