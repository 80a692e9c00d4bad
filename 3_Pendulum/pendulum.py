"""PPO on Pendulum: an actor draws its torque from a normal distribution, a critic says what to expect.

The objective of the actor (Schulman et al. 2017, eq. 7, and its second lock, eq. 8), to be maximised:

    J = mean [ min(ratio_t * A_t, clip(ratio_t, 1 - eps, 1 + eps) * A_t) - beta * KL(pi_old || pi) ]
    ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)

with the advantage of GAE (Schulman et al. 2016, eq. 16), cut at the end of an episode:

    A_t = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1}
    delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)

Pendulum never terminates, its episodes are truncated after 200 steps: V of the true last observation counts.

What is *not* here, and why: no entropy bonus (the distribution starts wide and narrows by itself), no
clipping of the value loss, no running normalisation (three numbers with known ranges; normalised advantages
forgive the rewards' scale), no weights shared between actor and critic (two small networks are simpler than
weighing two losses against each other), no early stop by KL.

    python 3_Pendulum/pendulum.py                 # ten seeds at once: about 25 seconds on one CPU core
    python 3_Pendulum/pendulum.py GAMMA=0.9 NUM_SEEDS=3
    python 3_Pendulum/pendulum.py COMPARE=True    # every row of the ablation table: 9 minutes
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
from gymnasium.envs.phys2d.pendulum import PendulumFunctional, PendulumParams
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from tensorboardX import SummaryWriter
from tensorflow_probability.substrates.jax import distributions as tfd
from tqdm import tqdm
from yaml import YAMLError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# %% Constants ------------------------------------------------------------------------------------------
# Collecting: one rollout is NUM_ENVS * ROLLOUT_STEPS steps, learned from and thrown away
NUM_STEPS = 100_000  # environment steps of each seed, all its environments together
NUM_ENVS = 8  # environments of each seed, side by side
ROLLOUT_STEPS = 125  # steps of each environment in a rollout

# Judging
GAMMA = 0.98  # worth of a reward one step later: looks about 50 steps ahead, a swing-up takes about as long
GAE_LAMBDA = 0.85  # 0: trust the critic after one step; 1: trust only what was earned (no GAE)
BOOTSTRAP_TRUNCATED = True  # False takes a truncation for a termination, on purpose wrong: V(s_T) counts as 0
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
SCALE_OBSERVATIONS = True  # divide by OBSERVATION_SCALE, so that all three numbers reach 1

# The run
SEED = 0  # of the first seed
NUM_SEEDS = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
EVAL_INTERVAL = 5_000  # environment steps between looks at the greedy policy during training
EVAL_EPISODES = 100  # greedy episodes on gymnasium.make("Pendulum-v1") after training, for each seed
COMPARE = False  # True: trains every row of COMPARISON as well, and draws the comparison
RUN_DIR = ""  # empty: runs/pendulum/<time>

DEFAULTS = {name: value for name, value in globals().items() if name.isupper()}


class UserError(Exception):
    """Something the person at the keyboard can mend: shown as one line, exit code 2."""


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets this module's constants: the defaults, changed by `NAME=value` arguments.

    Args:
        arguments: such as ["GAMMA=0.9", "ACTOR_LEARNING_RATE=5e-4"].

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
    rollout = NUM_ENVS * ROLLOUT_STEPS
    # Written as `not (good)`: a comparison with nan is False, and nan is refused with the rest.
    checks = [
        ("NUM_ENVS", 1 <= NUM_ENVS <= 10**4, "from 1 to 10000"),
        ("ROLLOUT_STEPS", 1 <= ROLLOUT_STEPS <= 10**5, "from 1 to 100000"),
        (
            "MINIBATCH_SIZE",
            2 <= MINIBATCH_SIZE <= rollout and rollout % MINIBATCH_SIZE == 0,
            f"2 or more and a divisor of NUM_ENVS * ROLLOUT_STEPS = {rollout}",
        ),
        (
            "EVAL_INTERVAL",
            EVAL_INTERVAL >= 1 and EVAL_INTERVAL % max(rollout, 1) == 0,
            f"a multiple of NUM_ENVS * ROLLOUT_STEPS = {rollout}",
        ),
        (
            "NUM_STEPS",
            1 <= NUM_STEPS < 10**9 and NUM_STEPS % max(EVAL_INTERVAL, 1) == 0,
            f"a multiple of EVAL_INTERVAL={EVAL_INTERVAL}, below 1000000000",
        ),
        ("GAMMA", 0 <= GAMMA < 1, "from 0 to below 1; at 1 the value of a swing without end is infinite"),
        ("GAE_LAMBDA", 0 <= GAE_LAMBDA <= 1, "from 0 to 1"),
        ("NUM_EPOCHS", 1 <= NUM_EPOCHS <= 10**4, "from 1 to 10000"),
        ("ACTOR_LEARNING_RATE", 0 < ACTOR_LEARNING_RATE < np.inf, "above 0 and finite"),
        ("CRITIC_LEARNING_RATE", 0 < CRITIC_LEARNING_RATE < np.inf, "above 0 and finite"),
        ("LEARNING_RATE_END", 0 <= LEARNING_RATE_END <= 1, "a share, from 0 to 1"),
        ("MAX_GRAD_NORM", 0 < MAX_GRAD_NORM < np.inf, "above 0 and finite; 1e9 switches it off"),
        ("CLIP_EPSILON", 0 < CLIP_EPSILON < np.inf, "above 0 and finite; 1e9 switches it off"),
        ("BETA", 0 <= BETA < np.inf, "0 or more and finite"),
        ("KL_TARGET", 0 <= KL_TARGET < np.inf, "0 or more and finite"),
        ("BETA", BETA > 0 or KL_TARGET <= 0, f"above 0 where KL_TARGET={KL_TARGET}: 0 doubled is 0"),
        ("HIDDEN_SIZE", 1 <= HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SIGMA_START", SIGMA_MIN < SIGMA_START < 1_000, f"above SIGMA_MIN = {SIGMA_MIN} and below 1000"),
        ("SEED", 0 <= SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_EPISODES", EVAL_EPISODES >= 1, "1 or more"),
    ]
    for name, good, remedy in checks:
        if not good:
            raise UserError(f"{name}={globals()[name]}: must be {remedy}")


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
SIGMA_MIN = 0.05  # newton metres; a policy surer than that makes ratios of e^50 out of one gradient step


def scaled(obs: jax.Array) -> jax.Array:
    """Observations [..., 3], each number within -1 to 1 if SCALE_OBSERVATIONS."""
    return obs / jnp.array(OBSERVATION_SCALE) if SCALE_OBSERVATIONS else obs


class Actor(nnx.Module):
    """pi(. | s), the distribution of the torque: 3 - 64 - 64 - (mean, sigma), float32."""

    def __init__(self, rngs: nnx.Rngs):
        # Heads that start at almost nothing: mean 0 and SIGMA_START wherever the pendulum is.
        almost_zero = nnx.initializers.variance_scaling(0.01, "fan_in", "truncated_normal")
        self.hidden1 = nnx.Linear(3, HIDDEN_SIZE, rngs=rngs)
        self.hidden2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.mean = nnx.Linear(HIDDEN_SIZE, 1, kernel_init=almost_zero, rngs=rngs)
        self.sigma = nnx.Linear(HIDDEN_SIZE, 1, kernel_init=almost_zero, rngs=rngs)

    def __call__(self, obs: jax.Array) -> tfd.Normal:
        """Observations [..., 3] to a normal distribution of batch shape [...]."""
        x = nnx.tanh(self.hidden1(scaled(obs)))
        x = nnx.tanh(self.hidden2(x))
        mean = MAX_TORQUE * nnx.tanh(self.mean(x))[..., 0]
        # softplus keeps sigma positive; the constant inside makes it SIGMA_START where the head gives 0.
        start = np.log(np.expm1(SIGMA_START - SIGMA_MIN))
        sigma = SIGMA_MIN + nnx.softplus(self.sigma(x)[..., 0] + start)
        return tfd.Normal(mean, sigma)


class Critic(nnx.Module):
    """V(s): 3 - 64 - 64 - 1, float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden1 = nnx.Linear(3, HIDDEN_SIZE, rngs=rngs)
        self.hidden2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.value = nnx.Linear(HIDDEN_SIZE, 1, rngs=rngs)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Observations [..., 3] to values [...]; not [..., 1], see `critic_loss`."""
        x = nnx.tanh(self.hidden1(scaled(obs)))
        x = nnx.tanh(self.hidden2(x))
        return self.value(x)[..., 0]


# %% Rollout buffer -------------------------------------------------------------------------------------
@struct.dataclass
class RolloutBuffer:
    """What one policy did, and what it thought while doing it. It spoils: used once, then thrown away."""

    transition: Transition  # each [T, N, ...], T = ROLLOUT_STEPS, N = NUM_ENVS
    log_prob: jax.Array  # float32 [T, N], of the action, by the policy that drew it
    mean: jax.Array  # float32 [T, N], of that policy
    sigma: jax.Array  # float32 [T, N]
    value: jax.Array  # float32 [T, N], V(s_t)
    next_value: jax.Array  # float32 [T, N], V(s_{t+1}), of the true next observation

    def calculate_advantages_and_returns(self) -> tuple[jax.Array, jax.Array]:
        """GAE (Schulman et al. 2016, eq. 16), from the last step back to the first.

        Returns:
            The advantages A_t and the critic's targets A_t + V(s_t), float32 [T, N] each.
        """
        t = self.transition
        # Truncated is not terminated: the world goes on, only we stop watching. It bootstraps.
        cut_off = t.terminated if BOOTSTRAP_TRUNCATED else t.terminated | t.truncated  # [T, N]
        delta = t.reward + GAMMA * (1 - cut_off) * self.next_value - self.value  # [T, N]
        # The next row may belong to the next episode: no advantage flows back over an end of either kind.
        running = 1 - (t.terminated | t.truncated)  # [T, N]

        def backwards(advantage, x):  # advantage [N]
            delta, running = x
            advantage = delta + GAMMA * GAE_LAMBDA * running * advantage
            return advantage, advantage

        _, advantages = jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, running), reverse=True)
        return advantages, advantages + self.value


class Batch(NamedTuple):
    """Steps to learn from, in any order."""

    obs: jax.Array  # float32 [B, 3]
    action: jax.Array  # float32 [B]
    log_prob: jax.Array  # float32 [B], of the old policy
    mean: jax.Array  # float32 [B], of the old policy
    sigma: jax.Array  # float32 [B], of the old policy
    advantage: jax.Array  # float32 [B]
    returns: jax.Array  # float32 [B]


# %% Algorithm ------------------------------------------------------------------------------------------
def select_action(actor: Actor, critic: Critic, obs: jax.Array, rng: jax.Array):
    """Draws the torque, and notes at once all that learning will ask for.

    Args:
        obs: float32 [N, 3].

    Returns:
        Action, its log-prob, value of the observation, float32 [N] each; and the distribution drawn from.
    """
    policy = actor(obs)
    action = policy.sample(seed=rng)  # [N], beyond +-2 at will: see `step`
    return action, policy.log_prob(action), critic(obs), policy


def clipped_objective(ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """The first lock (Schulman et al. 2017, eq. 7), elementwise: a pessimist's view of the gain.

    A good action (advantage above 0) earns nothing more once it is 1 + eps times as likely, a bad one
    once it is down to 1 - eps. On the other side is no limit: a step in the wrong direction is paid in full.
    """
    clipped = jnp.clip(ratio, 1 - CLIP_EPSILON, 1 + CLIP_EPSILON)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def actor_loss(actor: Actor, beta: jax.Array, batch: Batch) -> jax.Array:
    """Minus the objective on top of this file, float32 []."""
    policy = actor(batch.obs)
    ratio = jnp.exp(policy.log_prob(batch.action) - batch.log_prob)  # [B], 1 at the first gradient step
    advantage = batch.advantage
    if NORMALIZE_ADVANTAGES:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    kl = tfd.kl_divergence(tfd.Normal(batch.mean, batch.sigma), policy)  # [B]
    return -jnp.mean(clipped_objective(ratio, advantage) - beta * kl)


def critic_loss(critic: Critic, batch: Batch) -> jax.Array:
    """Mean squared error of the values, float32 []."""
    value = critic(batch.obs)  # [B]; with [B, 1] the difference would be [B, B], and nothing would complain
    return jnp.mean((value - batch.returns) ** 2)


def train_step(agent: "Agent", batch: Batch) -> tuple[jax.Array, jax.Array]:
    """One gradient step of actor and critic; changes networks and optimizers in place.

    Returns:
        The two losses, float32 [] each.
    """
    loss_of_actor, gradient = nnx.value_and_grad(actor_loss)(agent.actor, agent.beta, batch)
    agent.actor_optimizer.update(agent.actor, gradient)
    loss_of_critic, gradient = nnx.value_and_grad(critic_loss)(agent.critic, batch)
    agent.critic_optimizer.update(agent.critic, gradient)
    return loss_of_actor, loss_of_critic


def adapted_beta(beta: jax.Array, kl: jax.Array) -> jax.Array:
    """The second lock's weight for the next rollout (Schulman et al. 2017, section 4)."""
    if not KL_TARGET:
        return beta
    beta = jnp.where(kl > 1.5 * KL_TARGET, 2 * beta, beta)
    beta = jnp.where(kl < KL_TARGET / 1.5, beta / 2, beta)
    return jnp.clip(beta, 1e-6, 1e6)  # halved a hundred times, it would be 0 and stay 0


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of jax.lax.scan."""

    actor: Actor
    critic: Critic
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    beta: jax.Array  # float32 []
    env_state: EnvState  # each leaf [N, ...]
    best: Actor  # the actor at its best evaluation so far
    best_return: jax.Array  # float32 []


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


QUICK_EVAL_EPISODES = 20


def quick_evaluate(actor: Actor, rng: jax.Array) -> jax.Array:
    """Mean return of QUICK_EVAL_EPISODES greedy episodes (the mean is the torque) on the JAX environment."""
    states = jax.vmap(reset)(jax.random.split(rng, QUICK_EVAL_EPISODES))  # [E, ...]

    def play(states, _):
        states, transition = jax.vmap(step)(states, actor(states.obs).mean())
        return states, transition.reward

    _, rewards = jax.lax.scan(play, states, None, MAX_EPISODE_STEPS)  # [200, E]
    return rewards.sum(axis=0).mean()


def compare_policies(actor: Actor, batch: Batch) -> tuple[jax.Array, ...]:
    """How far the actor has moved on a rollout: kl, approx_kl, clip_fraction, entropy, sigma (see `Log`)."""
    policy = actor(batch.obs)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob  # [B]
    ratio = jnp.exp(log_ratio)
    return (
        tfd.kl_divergence(tfd.Normal(batch.mean, batch.sigma), policy).mean(),
        jnp.mean(ratio - 1 - log_ratio),  # Schulman 2020, "Approximating KL divergence": never negative
        jnp.mean(jnp.abs(ratio - 1) > CLIP_EPSILON),
        policy.entropy().mean(),
        policy.stddev().mean(),
    )


def choose(condition: jax.Array, yes, no):
    """`yes` where the condition [] holds, else `no`, for every leaf of two equal trees."""
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)


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
    actor_rng, critic_rng, reset_rng, eval_rng, learning_rng = jax.random.split(rng, 5)
    rollout_size = NUM_ENVS * ROLLOUT_STEPS
    num_updates = NUM_STEPS * NUM_EPOCHS // MINIBATCH_SIZE

    def adam(learning_rate: float) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(learning_rate, learning_rate * LEARNING_RATE_END, num_updates)
        return optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(schedule))

    actor, critic = Actor(nnx.Rngs(actor_rng)), Critic(nnx.Rngs(critic_rng))
    agent = Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, adam(ACTOR_LEARNING_RATE), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, adam(CRITIC_LEARNING_RATE), wrt=nnx.Param),
        beta=jnp.float32(BETA),
        env_state=jax.vmap(reset)(jax.random.split(reset_rng, NUM_ENVS)),
        best=nnx.clone(actor),
        best_return=jnp.float32(-jnp.inf),
    )

    def collect(agent: Agent, rng: jax.Array) -> tuple[Agent, RolloutBuffer, jax.Array]:
        """ROLLOUT_STEPS steps of every environment by one and the same policy.

        Returns also the return of each episode where it ended, else nan, [T, N].
        """

        def one_step(env_state: EnvState, rng: jax.Array):
            action_rng, reset_rng = jax.random.split(rng)
            action, log_prob, value, policy = select_action(
                agent.actor, agent.critic, env_state.obs, action_rng
            )
            following, transition = jax.vmap(step)(env_state, action)
            next_value = agent.critic(transition.next_obs)  # [N]
            row = RolloutBuffer(transition, log_prob, policy.loc, policy.scale, value, next_value)
            ended = transition.terminated | transition.truncated  # [N]
            episode_return = jnp.where(ended, following.episode_return, jnp.nan)
            first = jax.vmap(reset)(jax.random.split(reset_rng, NUM_ENVS))
            env_state = jax.vmap(choose)(ended, first, following)
            return env_state, (row, episode_return)

        rngs = jax.random.split(rng, ROLLOUT_STEPS)
        env_state, (buffer, episode_returns) = jax.lax.scan(one_step, agent.env_state, rngs)  # [T, N, ...]
        return agent._replace(env_state=env_state), buffer, episode_returns

    def learn(agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, jax.Array]:
        """NUM_EPOCHS passes over the rollout in shuffled mini-batches; returns the mean value loss."""

        def one_epoch(agent: Agent, rng: jax.Array):
            shuffled = jax.random.permutation(rng, rollout_size).reshape(-1, MINIBATCH_SIZE)

            def one_minibatch(agent: Agent, rows: jax.Array):
                _, value_loss = train_step(agent, jax.tree.map(lambda x: x[rows], batch))
                return agent, value_loss

            return jax.lax.scan(one_minibatch, agent, shuffled)

        agent, value_loss = jax.lax.scan(one_epoch, agent, jax.random.split(rng, NUM_EPOCHS))
        return agent, value_loss.mean()

    def update(agent: Agent, rng: jax.Array):
        """The four phases of PPO."""
        collect_rng, learn_rng = jax.random.split(rng)
        # 1. collect
        agent, buffer, episode_returns = collect(agent, collect_rng)
        # 2. compute targets
        advantages, returns = buffer.calculate_advantages_and_returns()
        t = buffer.transition
        rows = (t.obs, t.action, buffer.log_prob, buffer.mean, buffer.sigma, advantages, returns)
        batch = Batch(*(x.reshape(rollout_size, *x.shape[2:]) for x in rows))
        # 3. learn
        agent, value_loss = learn(agent, batch, learn_rng)
        # 4. discard: the buffer ends here. Its log-probs are those of a policy that is gone.

        unexplained = jnp.var(returns - buffer.value)
        kl, *others = compare_policies(agent.actor, batch)
        agent = agent._replace(beta=adapted_beta(agent.beta, kl))
        return agent, (episode_returns, jnp.var(returns), unexplained, value_loss, kl, *others, agent.beta)

    def learn_and_evaluate(agent: Agent, x):
        """EVAL_INTERVAL environment steps, then a look at the greedy policy."""
        env_step, rng = x
        rngs = jax.random.split(rng, EVAL_INTERVAL // rollout_size)
        agent, (episode_returns, variance, unexplained, *figures) = jax.lax.scan(update, agent, rngs)
        # The same first states each time: what changes is the policy.
        eval_return = quick_evaluate(agent.actor, eval_rng)
        better = eval_return >= agent.best_return  # among equals the latest
        nnx.update(agent.best, choose(better, nnx.state(agent.actor), nnx.state(agent.best)))
        agent = agent._replace(best_return=jnp.maximum(eval_return, agent.best_return))
        # Over the whole interval: in a rollout where all pendulums stand there is nothing to explain.
        explained_variance = 1 - unexplained.mean() / variance.mean()
        means = [figure.mean() for figure in figures]
        log = Log(
            env_step + EVAL_INTERVAL, jnp.nanmean(episode_returns), eval_return, explained_variance, *means
        )  # fmt: skip
        jax.debug.callback(report, jax.lax.pmean(log, "seed"))
        return agent, log

    steps = jnp.arange(0, NUM_STEPS, EVAL_INTERVAL)
    rngs = jax.random.split(learning_rng, len(steps))
    agent, log = jax.lax.scan(learn_and_evaluate, agent, (steps, rngs))
    return agent, log


def train_seeds(tensorboard_dir: Path | None = None) -> tuple[Agent, Log, float, float]:
    """Compiles and trains all seeds as one program.

    Args:
        tensorboard_dir: where TensorBoard's curves go, means over the seeds; None: nowhere.

    Returns:
        The agents, each leaf with a leading axis [NUM_SEEDS]; the log [NUM_SEEDS, rows]; seconds of
        compiling and of training.
    """
    rngs = jax.vmap(jax.random.key)(SEED + jnp.arange(NUM_SEEDS))
    writer = SummaryWriter(str(tensorboard_dir)) if tensorboard_dir else None
    print_interval = max(EVAL_INTERVAL, NUM_STEPS // 10)
    with tqdm(total=NUM_STEPS, unit="step", leave=False, disable=None) as bar:
        started = time.perf_counter()

        def report(row: Log) -> None:
            env_step = int(row.env_step)
            # of all seeds together; the first interval's clock starts when training does
            steps_per_second = NUM_SEEDS * env_step / (time.perf_counter() - training_started)
            bar.update(env_step - bar.n)
            if writer:
                for name, value in row._asdict().items():
                    if np.isfinite(value):  # the return of an interval in which no episode ended is nan
                        writer.add_scalar(f"train/{name}", float(value), env_step)
                writer.add_scalar("train/steps_per_second", steps_per_second, env_step)
            if env_step % print_interval < EVAL_INTERVAL:
                tqdm.write(
                    f"step {env_step:7d}   return {row.episode_return:8.1f}   greedy {row.eval_return:8.1f}"
                    f"   value loss {row.value_loss:7.2f}   explained {row.explained_variance:5.2f}"
                    f"   kl {row.approx_kl:6.4f}   clipped {row.clip_fraction:4.0%}"
                    f"   entropy {row.entropy:5.2f}   {steps_per_second:7,.0f} steps/s"
                )

        train_all = jax.vmap(functools.partial(train, report=report), axis_name="seed")
        compiled = jax.jit(train_all).lower(rngs).compile()
        training_started = time.perf_counter()
        compile_seconds = training_started - started
        agents, log = jax.block_until_ready(compiled(rngs))
        jax.effects_barrier()  # the last report has been printed
        train_seconds = time.perf_counter() - training_started
    if writer:
        writer.close()
    return agents, jax.tree.map(np.asarray, log), compile_seconds, train_seconds


# %% Evaluation -----------------------------------------------------------------------------------------
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


def summary(eval_return: np.ndarray) -> str:
    """Mean and spread over the seeds [NUM_SEEDS]."""
    return f"{eval_return.mean():.1f} +- {eval_return.std():.1f}, lowest {eval_return.min():.1f}"


# %% Pictures -------------------------------------------------------------------------------------------
BLUE, ORANGE, GREY, GREEN = "#1f77b4", "#ff7f0e", "#888888", "#2ca02c"


def draw_band(axes, x: np.ndarray, curves: np.ndarray, color: str, label: str | None = None) -> None:
    """Mean over the seeds, and a band from the lowest to the highest; `curves` is [NUM_SEEDS, rows]."""
    axes.plot(x, curves.mean(axis=0), color=color, label=label)
    axes.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0)


def draw_learning_curve(path: Path, log: Log) -> None:
    """Left: return against environment steps. Middle and right: what a practitioner watches."""
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 3.6), facecolor="white", layout="constrained"
    )
    x = log.env_step[0]
    draw_band(left, x, log.eval_return, BLUE, "greedy policy")
    ended = ~np.isnan(log.episode_return).any(axis=0)  # a short interval may see no episode end
    left.plot(x[ended], log.episode_return.mean(axis=0)[ended], color=GREY, label="torque drawn")
    left.set(ylabel="return", ylim=(None, 0))
    draw_band(middle, x, log.approx_kl, ORANGE, "approximate KL")
    draw_band(middle, x, log.clip_fraction, BLUE, "share clipped")
    middle.set(ylim=(0, None))
    draw_band(right, x, log.explained_variance, GREEN, "explained variance")
    draw_band(right, x, log.sigma, BLUE, "sigma, N m")
    right.set(ylim=(-0.1, None))
    for axes in (left, middle, right):
        axes.set_xlabel("environment step")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def play_episode(actor: Actor, seed: int, every: int) -> tuple[np.ndarray, list[Image.Image]]:
    """One greedy episode on Pendulum-v1.

    Returns:
        Angle and speed before each step, [200, 2]; and every `every`-th picture of it, at half size.
    """
    greedy = jax.jit(lambda actor, obs: actor(obs).mean())
    env = gymnasium.make("Pendulum-v1", render_mode="rgb_array")
    obs, _ = env.reset(seed=seed)
    path, frames = [], []
    for t in range(MAX_EPISODE_STEPS):
        path.append(env.unwrapped.state)
        if t % every == 0:
            frames.append(Image.fromarray(env.render()).resize((250, 250)).quantize(16))
        obs, *_ = env.step(np.asarray(greedy(actor, obs))[None])
    env.close()
    return np.array(path), frames


def draw_value_function(path: Path, critic: Critic, played: np.ndarray) -> None:
    """What the critic expects of every angle and speed, with an episode on it."""
    angle, speed = np.linspace(-np.pi, np.pi, 181), np.linspace(-8, 8, 161)
    grid = np.stack(np.meshgrid(angle, speed), axis=-1).astype(np.float32)  # [161, 181, 2]
    value = critic(jax.vmap(jax.vmap(lambda p: ENV.observation(p, None, PHYSICS)))(grid))  # [161, 181]
    figure, axes = plt.subplots(figsize=(7.5, 4.6), facecolor="white", layout="constrained")
    mesh = axes.pcolormesh(np.degrees(angle), speed, value, shading="nearest", rasterized=True)
    figure.colorbar(mesh, label="V(s): discounted return expected")
    degrees = np.degrees((played[:, 0] + np.pi) % (2 * np.pi) - np.pi)
    axes.plot(degrees, played[:, 1], "o", color="white", markersize=3, markeredgewidth=0)
    axes.annotate("start", (degrees[0], played[0, 1]), (4, -12), textcoords="offset points", color="white")
    axes.set(
        xlabel="angle, degrees (0: upright, 180: hanging)", ylabel="speed, rad/s", xticks=range(-180, 181, 60)
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_clipped_objective(path: Path) -> None:
    """`clipped_objective` and its slope against the ratio, for an advantage of +1 and of -1."""
    ratio = jnp.linspace(0.5, 1.5, 400)  # none on a corner, where the slope is anybody's
    figure, both = plt.subplots(1, 2, figsize=(10, 3.4), facecolor="white", layout="constrained")
    for axes, advantage, color in zip(both, (1.0, -1.0), (BLUE, ORANGE)):
        slope = jax.vmap(jax.grad(clipped_objective), (0, None))(ratio, advantage)
        axes.plot(ratio, ratio * advantage, color=GREY, linestyle="--", label="ratio x advantage")
        axes.plot(ratio, clipped_objective(ratio, advantage), color=color, linewidth=2, label="clipped")
        axes.plot(ratio, slope, color=GREEN, linewidth=1, label="slope: what moves the actor")
        axes.axvline(1, color=GREY, linewidth=0.5)
        axes.set(xlabel="ratio: new probability / old", title=f"advantage {advantage:+.0f}")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Comparison -----------------------------------------------------------------------------------------
NOTES = [  # the textbook's constants
    "GAMMA=0.99", "GAE_LAMBDA=0.95", "NUM_ENVS=1", "ROLLOUT_STEPS=2048", "MINIBATCH_SIZE=64",
    "SIGMA_START=1.0", "ACTOR_LEARNING_RATE=3e-4", "CRITIC_LEARNING_RATE=1e-3", "LEARNING_RATE_END=1.0",
    "EVAL_INTERVAL=10_240",
]  # fmt: skip
COMPARISON = [  # what to change on the command line
    [],
    # the locks
    ["CLIP_EPSILON=1e9"],
    ["CLIP_EPSILON=1e9", "BETA=1.0"],
    ["CLIP_EPSILON=1e9", "BETA=1.0", "KL_TARGET=0.01"],
    ["BETA=1.0", "KL_TARGET=0.01"],
    # the judgement
    ["BOOTSTRAP_TRUNCATED=False"],
    ["NORMALIZE_ADVANTAGES=False"],
    ["GAE_LAMBDA=1.0"],
    ["GAE_LAMBDA=0.95"],
    ["GAE_LAMBDA=0.0"],
    ["GAMMA=0.99"],
    ["GAMMA=0.9"],
    ["GAMMA=0.99", "GAE_LAMBDA=0.95"],
    ["GAMMA=0.9", "GAE_LAMBDA=0.95"],
    # the rest
    ["SIGMA_START=1.0"],
    ["SIGMA_START=0.5"],
    ["SCALE_OBSERVATIONS=False"],
    ["CRITIC_LEARNING_RATE=1e-3"],
    ["LEARNING_RATE_END=1.0"],
    ["NUM_EPOCHS=1"],
    ["NUM_ENVS=1", "ROLLOUT_STEPS=1000"],
    # the textbook
    ["NUM_STEPS=102_400", *NOTES],
    ["NUM_STEPS=512_000", *NOTES],
]


def label_of(changes: list[str]) -> str:
    """How a row of COMPARISON is called in tables and pictures."""
    return " ".join(changes) or "unchanged"


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
        eval_return = evaluate(agents.actor).mean(axis=1)
        best_return = evaluate(agents.best).mean(axis=1)
        for i in range(NUM_SEEDS):
            results.append(
                {
                    "changed": label,
                    "seed": SEED + i,
                    "eval_return": eval_return[i],
                    "best_eval_return": best_return[i],
                    "kl": logs[label].kl[i].mean(),
                    "clip_fraction": logs[label].clip_fraction[i].mean(),
                    "last_explained_variance": logs[label].explained_variance[i, -1],
                    "last_sigma": logs[label].sigma[i, -1],
                }
            )
        print(f"last policy: {summary(eval_return)}; best policy: {summary(best_return)}")
    configure(arguments)
    write_csv(run_dir / "compare.csv", results)
    draw_comparison(run_dir / "compare.png", results)
    draw_failures(run_dir / "failures.png", logs)


def draw_comparison(path: Path, results: list[dict[str, Any]]) -> None:
    """A line for each row of COMPARISON, a dot for each seed's last policy."""
    labels = [label_of(changes) for changes in COMPARISON]
    figure, axes = plt.subplots(
        figsize=(10, 0.4 * len(labels) + 0.9), facecolor="white", layout="constrained"
    )
    for y, label in enumerate(labels):
        returns = np.array([row["eval_return"] for row in results if row["changed"] == label])
        # Spread out vertically, else ten seeds at one place look like one.
        axes.scatter(returns, y + np.linspace(-0.3, 0.3, len(returns)), s=14, color=BLUE)
        axes.text(1.01, y, f"{returns.mean():.1f}", va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels], fontsize=9)
    axes.grid(axis="both", alpha=0.3)
    axes.set(ylim=(len(labels) - 0.4, -0.6), xlabel="return of the last policy (right: mean over the seeds)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shortened(label: str) -> str:
    """A label that fits beside an axis."""
    steps, *rest = label.split()
    return f"the textbook's constants\n{steps}" if rest == NOTES else label.replace(" KL", "\nKL")


def draw_failures(path: Path, logs: dict[str, Log]) -> None:
    """The greedy policy's learning curve of each row of COMPARISON, above that of the first in grey."""
    columns = 4
    figure, panels = plt.subplots(
        -(-(len(logs) - 1) // columns), columns, figsize=(12, 13), facecolor="white", layout="constrained",
        sharey=True, squeeze=False,
    )  # fmt: skip
    (_, unchanged), *rows = logs.items()
    for axes in panels.flat[len(rows) :]:
        axes.set_axis_off()
    for axes, (label, log) in zip(panels.flat, rows):
        axes.plot(unchanged.env_step[0] / 1000, unchanged.eval_return.mean(axis=0), color=GREY)
        draw_band(axes, log.env_step[0] / 1000, log.eval_return, BLUE)
        axes.set_title(shortened(label), fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("return")
    figure.supxlabel("thousand environment steps (grey: unchanged)", fontsize=10)
    figure.savefig(path, dpi=90)
    plt.close(figure)


# %% The run --------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> Path:
    """Makes the folder of this run and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    run_dir = Path(RUN_DIR or time.strftime("runs/pendulum/%Y-%m-%d_%H-%M-%S"))
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
    num_updates = NUM_STEPS * NUM_EPOCHS // MINIBATCH_SIZE
    print(
        f"{NUM_SEEDS} seeds x {NUM_STEPS:,} environment steps in rollouts of {NUM_ENVS} x {ROLLOUT_STEPS}, "
        f"{num_updates:,} gradient steps of {MINIBATCH_SIZE}, in {run_dir}"
    )
    agents, log, compile_seconds, train_seconds = train_seeds(run_dir / "tensorboard")
    write_csv(run_dir / "log.csv", log_rows(log))
    print(
        f"compiled in {compile_seconds:.1f} s, trained in {train_seconds:.1f} s; "
        f"now {EVAL_EPISODES} episodes of Pendulum-v1 each"
    )
    eval_return = evaluate(agents.actor).mean(axis=1)
    best_eval_return = evaluate(agents.best).mean(axis=1)
    for i in range(NUM_SEEDS):
        print(
            f"seed {SEED + i:3d}   last policy {eval_return[i]:8.2f}   best policy {best_eval_return[i]:8.2f}"
        )
    print(f"last policy: {summary(eval_return)}\nbest policy: {summary(best_eval_return)}")

    draw_learning_curve(run_dir / "learning_curve.png", log)
    draw_clipped_objective(run_dir / "clipped_objective.png")
    first = jax.tree.map(lambda x: x[0], agents)  # the first seed
    played, frames = play_episode(first.actor, seed=34, every=3)  # starts hanging
    draw_value_function(run_dir / "value_function.png", first.critic, played)
    frames[0].save(
        run_dir / "pendulum.gif", save_all=True, append_images=frames[1:], duration=150, loop=0
    )  # 0.05 s a step: as fast as it is
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
