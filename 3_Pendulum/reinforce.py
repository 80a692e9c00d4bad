"""REINFORCE on CartPole: push up the probability of what paid off. Paid off, compared with what?

The policy is a network, and its weights climb the expected return J itself (Williams 1992; Sutton & Barto
2018, eq. 13.11), estimated from B whole episodes played by the policy:

    grad J  ~  1/B sum_episodes sum_t (G_t - b_t) grad log pi(a_t | s_t),    G_t = sum_{k>=t} gamma^(k-t) r_k

BASELINE chooses b_t: nothing, the mean of the batch, or a learned critic V(s_t). On average the direction
stays the same; what a baseline changes is how far the estimate of one batch strays from it.

What is *not* here, and why: no bootstrapping (Monte Carlo: a return is what was really earned, up to the fall
or the time limit), no normalisation of the advantages (dividing by their spread would hide what the baseline
does), no second step on the same episodes (that needs PPO's ratio: pendulum.py), no entropy bonus, no factor
gamma^t in front of each term (nearly everyone leaves it out; it would all but silence the late steps).

    python 3_Pendulum/reinforce.py                # ten seeds at once: about 20 seconds on one CPU core
    python 3_Pendulum/reinforce.py BASELINE=none REWARD_TO_GO=False
    python 3_Pendulum/reinforce.py COMPARE=True   # every row of the table, and the variance study: 3 minutes
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

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from jax.flatten_util import ravel_pytree
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from yaml import YAMLError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# %% Constants ------------------------------------------------------------------------------------------
# The question
BASELINE = "critic"  # what a return is compared with: none, mean (of the batch, at the same step), critic
REWARD_TO_GO = True  # credit an action with what came after it; False: with the whole episode's return

# Learning
NUM_STEPS = 100_000  # environment steps of each seed, counted as played; the last batch may run over
BATCH_SIZE = 8  # whole episodes for each gradient step
GAMMA = 0.99  # worth of a reward one step later: looks about 100 steps ahead
LEARNING_RATE = 1e-2  # Adam's, of the actor
CRITIC_LEARNING_RATE = 3e-3  # Adam's, of the critic
CRITIC_STEPS = 20  # gradient steps of the critic for each one of the actor
CRITIC_BATCH_SIZE = 256  # time steps in each of them, drawn from the episodes just played
SCALE_OBSERVATIONS = True  # divide by OBSERVATION_SCALE, so that all four numbers reach about 1
HIDDEN_SIZE = 64  # width of the two hidden layers, of actor and critic

# The run
SEED = 0  # of the first seed
NUM_SEEDS = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
EVAL_INTERVAL = 5_000  # environment steps between looks at the greedy policy during training
EVAL_EPISODES = 100  # greedy episodes on gymnasium.make("CartPole-v1") after training, for each seed
VARIANCE_BATCHES = 256  # batches played with each frozen policy of the variance study (COMPARE=True)
COMPARE = False  # True: trains every row of COMPARISON as well, and measures the gradients' variance
RUN_DIR = ""  # empty: runs/reinforce/<time>

DEFAULTS = {name: value for name, value in globals().items() if name.isupper()}


class UserError(Exception):
    """Something the person at the keyboard can mend: shown as one line, exit code 2."""


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets this module's constants: the defaults, changed by `NAME=value` arguments.

    Args:
        arguments: such as ["BASELINE=none", "LEARNING_RATE=5e-3"].

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
    # Written as `not (good)`: a comparison with nan is False, and nan is refused with the rest.
    checks = [
        ("BASELINE", BASELINE in BASELINES, f"one of {', '.join(BASELINES)}"),
        (
            "NUM_STEPS",
            EVAL_INTERVAL <= NUM_STEPS < 10**9 and NUM_STEPS % max(EVAL_INTERVAL, 1) == 0,
            f"a multiple of EVAL_INTERVAL={EVAL_INTERVAL}",
        ),
        ("BATCH_SIZE", 2 <= BATCH_SIZE <= 10**4, "from 2 to 10000; the mean of one episode is the episode"),
        ("GAMMA", 0 <= GAMMA <= 1, "from 0 to 1"),
        ("LEARNING_RATE", 0 < LEARNING_RATE < np.inf, "above 0 and finite"),
        ("CRITIC_LEARNING_RATE", 0 < CRITIC_LEARNING_RATE < np.inf, "above 0 and finite"),
        ("CRITIC_STEPS", 1 <= CRITIC_STEPS <= 10**4, "from 1 to 10000"),
        ("CRITIC_BATCH_SIZE", 1 <= CRITIC_BATCH_SIZE <= 10**6, "from 1 to 1000000"),
        ("HIDDEN_SIZE", 1 <= HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SEED", 0 <= SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_INTERVAL", EVAL_INTERVAL >= 1, "1 or more"),
        ("EVAL_EPISODES", EVAL_EPISODES >= 1, "1 or more"),
        ("VARIANCE_BATCHES", 2 <= VARIANCE_BATCHES <= 10**5, "from 2 to 100000"),
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
    next_obs: jax.Array  # float32 [4]
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
def scaled(obs: jax.Array) -> jax.Array:
    """Observations [..., 4], about -1 to 1 if SCALE_OBSERVATIONS."""
    return obs / jnp.array(OBSERVATION_SCALE) if SCALE_OBSERVATIONS else obs


class Actor(nnx.Module):
    """pi(. | s): 4 - 64 - 64 - 2, float32. The outputs are logits: softmax makes them probabilities."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden1 = nnx.Linear(4, HIDDEN_SIZE, rngs=rngs)
        self.hidden2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 2, rngs=rngs)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Observations [..., 4] to logits [..., 2]."""
        x = nnx.relu(self.hidden1(scaled(obs)))
        x = nnx.relu(self.hidden2(x))
        return self.output(x)


class Critic(nnx.Module):
    """V(s, t): 5 - 64 - 64 - 1, float32. The return to expect from here on, given the clock as well.

    Why the clock: nothing is bootstrapped, so the return from step 499 is 1 however well the pole stands,
    while the same upright pole is worth 99 at step 0. A critic that cannot see the time is wrong about both.
    A baseline may depend on anything but the action; the actor, which has to play CartPole-v1, sees no clock.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.hidden1 = nnx.Linear(5, HIDDEN_SIZE, rngs=rngs)
        self.hidden2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 1, rngs=rngs)

    def __call__(self, obs: jax.Array, t: jax.Array) -> jax.Array:
        """Observations [..., 4] and their steps in the episode [...] to values [...]."""
        time = jnp.broadcast_to(t / MAX_EPISODE_STEPS, obs.shape[:-1])
        x = nnx.relu(self.hidden1(jnp.concatenate([scaled(obs), time[..., None]], axis=-1)))
        x = nnx.relu(self.hidden2(x))
        # The network learns a share of the largest return there is; numbers up to 100 take Adam too long.
        largest = sum(GAMMA**k for k in range(MAX_EPISODE_STEPS))
        return largest * self.output(x)[..., 0]  # trap: [..., 1] less returns [...] would be a square


# %% Episodes -------------------------------------------------------------------------------------------
class Episodes(NamedTuple):
    """BATCH_SIZE whole episodes, each padded to MAX_EPISODE_STEPS; `alive` tells what is real."""

    obs: jax.Array  # float32 [B, T, 4]
    action: jax.Array  # int32 [B, T]
    reward: jax.Array  # float32 [B, T], 0 after the end
    alive: jax.Array  # float32 [B, T], 1 up to and with the last step, then 0
    truncated: jax.Array  # bool [B, T], the step at which the time limit, and not a fall, ended it


def play(actor: Actor, rng: jax.Array) -> Episodes:
    """BATCH_SIZE whole episodes with actions drawn from the policy.

    All run for MAX_EPISODE_STEPS steps, since a compiled loop cannot stop for each alone; a pole that has
    fallen is played on, and nothing after the fall counts.
    """
    reset_rng, action_rng = jax.random.split(rng)
    states = jax.vmap(reset)(jax.random.split(reset_rng, BATCH_SIZE))

    def play_step(carry, rng):
        states, alive = carry
        action = jax.random.categorical(rng, actor(states.obs))  # [B]
        transition = jax.vmap(step)(states, action)
        fell, over = transition.terminated, transition.truncated
        row = Episodes(
            states.obs, action, alive * transition.reward, alive.astype(jnp.float32), alive & over & ~fell
        )
        return (EnvState(transition.next_obs, states.steps + 1), alive & ~fell & ~over), row

    start = states, jnp.ones(BATCH_SIZE, bool)
    _, rows = jax.lax.scan(play_step, start, jax.random.split(action_rng, MAX_EPISODE_STEPS))  # [T, B, ...]
    return jax.tree.map(lambda x: x.swapaxes(0, 1), rows)


# %% Algorithm ------------------------------------------------------------------------------------------
def returns_to_go(reward: jax.Array) -> jax.Array:
    """G_t = r_t + gamma G_{t+1} (Sutton & Barto 2018, eq. 3.9); rewards [B, T], 0 after the end, to [B, T].

    Terminated or truncated makes no difference here: Monte Carlo counts what was earned, and bootstraps
    nothing. The time limit is then part of the task: 500 steps are the most there is.
    """

    def earlier(later, reward):
        now = reward + GAMMA * later
        return now, now

    _, to_go = jax.lax.scan(earlier, jnp.zeros(len(reward)), reward.T, reverse=True)  # [T, B]
    return to_go.T


def credit(episodes: Episodes, reward_to_go: bool) -> jax.Array:
    """What each action is held responsible for, [B, T].

    An action cannot change what came before it. Crediting it with the whole episode's return all the same
    (`reward_to_go` False) adds the noise of every earlier step: the first disease. On average the earlier
    steps cancel, and what is left is gamma^t times the term of the return to go: exactly the gradient of the
    discounted return, which the estimate without gamma^t is not (Nota & Thomas 2020), unless GAMMA is 1.
    """
    to_go = returns_to_go(episodes.reward)
    return episodes.alive * (to_go if reward_to_go else to_go[:, :1])


# A baseline is subtracted from the credit. Whatever it is, if it does not depend on the action, the expected
# gradient stays: sum_a pi(a|s) b(s) grad log pi(a|s) = b(s) grad sum_a pi(a|s) = b(s) grad 1 = 0
# (Williams 1992; Sutton & Barto 2018, section 13.4; with a learned one, Sutton et al. 2000). How much
# variance each leaves: Greensmith et al. 2004. All take (episodes, credit [B, T], critic), return [B, T].
def none(episodes: Episodes, credit: jax.Array, critic: Critic) -> jax.Array:
    """b = 0. All returns of CartPole are positive: whatever was done gets pushed up. The second disease."""
    return jnp.zeros_like(credit)


def mean(episodes: Episodes, credit: jax.Array, critic: Critic) -> jax.Array:
    """b_t = mean credit of the episodes that are still alive at step t.

    At the same step, not over all steps: the return to go falls along an episode, and one average for all
    would call every early action good. Each episode is part of its own mean, which shrinks the expected term
    to (n - 1) / n of itself with n alive, to nothing for the last survivor: a known bias. Leaving oneself out
    (folder 4's leave_one_out) would mend it, and leave the last survivor without any baseline.
    """
    alive = episodes.alive
    return jnp.broadcast_to((alive * credit).sum(axis=0) / jnp.maximum(alive.sum(axis=0), 1), credit.shape)


def critic(episodes: Episodes, credit: jax.Array, critic: Critic) -> jax.Array:
    """b_t = V(s_t, t), learned from the episodes *before* these: it must not know what these came to."""
    return critic(episodes.obs, jnp.arange(credit.shape[1]))


BASELINES = {function.__name__: function for function in (none, mean, critic)}


def policy_loss(actor: Actor, episodes: Episodes, advantage: jax.Array) -> jax.Array:
    """The number whose gradient is minus the estimate of grad J (equation on top); `advantage` is [B, T]."""
    log_probs = jax.nn.log_softmax(actor(episodes.obs))  # [B, T, 2]
    log_prob = jnp.take_along_axis(log_probs, episodes.action[..., None], axis=-1)[..., 0]  # [B, T]
    # Sum over the steps, mean over the episodes. The score is constant: no gradient flows through it.
    score = episodes.alive * jax.lax.stop_gradient(advantage)
    return -(score * log_prob).sum(axis=1).mean()


def critic_loss(critic: Critic, obs: jax.Array, t: jax.Array, credit: jax.Array) -> jax.Array:
    """Mean squared error against what was really earned; obs [N, 4], t [N], credit [N]."""
    return jnp.mean((credit - critic(obs, t)) ** 2)


def train_critic(
    critic: Critic, optimizer: nnx.Optimizer, episodes: Episodes, target: jax.Array, rng
) -> None:
    """CRITIC_STEPS gradient steps on time steps drawn from the episodes; changes both in place."""
    alive = episodes.alive.ravel()
    shape = (CRITIC_STEPS, CRITIC_BATCH_SIZE)
    drawn = jax.random.choice(rng, alive.size, shape, p=alive / alive.sum())  # with replacement
    b, t = drawn // MAX_EPISODE_STEPS, drawn % MAX_EPISODE_STEPS

    def update(carry, x):
        critic, optimizer = carry
        optimizer.update(critic, nnx.grad(critic_loss)(critic, *x))
        return carry, None

    carry, _ = jax.lax.scan(update, (critic, optimizer), (episodes.obs[b, t], t, target[b, t]))
    nnx.update(critic, nnx.state(carry[0]))
    nnx.update(optimizer, nnx.state(carry[1]))


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of the loops."""

    actor: Actor
    critic: Critic
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    env_step: jax.Array  # int32 [], environment steps so far; padding is not counted
    num_updates: jax.Array  # int32 [], gradient steps of the actor so far
    best: Actor  # the actor at its best evaluation so far
    best_return: jax.Array  # float32 []


class Metrics(NamedTuple):
    """Of one batch; in the log, the mean over the batches of an interval."""

    episode_return: jax.Array  # of the policy that draws its actions, mean over the batch
    truncated: jax.Array  # share of the episodes that reached the time limit
    entropy: jax.Array  # nats, of the policy at the steps played; ln 2 = 0.69 is a coin
    explained_variance: jax.Array  # 1 - var(credit - b) / var(credit), steps played; 0 without baseline
    gradient_norm: jax.Array


class Log(NamedTuple):
    """One row at the first batch past each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    num_updates: jax.Array  # int32, gradient steps so far
    eval_return: jax.Array  # greedy policy, mean of QUICK_EVAL_EPISODES on the JAX environment
    metrics: Metrics


QUICK_EVAL_EPISODES = 20


def quick_evaluate(actor: Actor, rng: jax.Array) -> jax.Array:
    """Mean return of QUICK_EVAL_EPISODES greedy episodes on the JAX environment, float32 []."""
    states = jax.vmap(reset)(jax.random.split(rng, QUICK_EVAL_EPISODES))  # [E, ...]

    def play_step(carry, _):
        states, alive = carry
        transition = jax.vmap(step)(states, actor(states.obs).argmax(axis=-1))
        reward = jnp.where(alive, transition.reward, 0.0)  # [E]
        return (EnvState(transition.next_obs, states.steps + 1), alive & ~transition.terminated), reward

    start = states, jnp.ones(QUICK_EVAL_EPISODES, bool)
    _, rewards = jax.lax.scan(play_step, start, None, MAX_EPISODE_STEPS)  # [T, E]
    return rewards.sum(axis=0).mean()


def train_step(agent: Agent, rng: jax.Array) -> tuple[Agent, Metrics]:
    """Plays a batch, moves the actor one step along the estimated gradient, then improves the critic."""
    play_rng, critic_rng = jax.random.split(rng)
    episodes = play(agent.actor, play_rng)
    earned = credit(episodes, REWARD_TO_GO)  # [B, T]
    baseline = BASELINES[BASELINE](episodes, earned, agent.critic)  # [B, T]
    advantage = earned - baseline

    gradient = nnx.grad(policy_loss)(agent.actor, episodes, advantage)
    alive = episodes.alive
    log_probs = jax.nn.log_softmax(agent.actor(episodes.obs))  # [B, T, 2]
    metrics = Metrics(
        episodes.reward.sum(axis=1).mean(),
        episodes.truncated.any(axis=1).mean(),
        -(jnp.exp(log_probs) * log_probs).sum(axis=-1).mean(where=alive > 0),
        1 - (advantage.var(where=alive > 0) + 1e-6) / (earned.var(where=alive > 0) + 1e-6),  # no 0 / 0
        optax.global_norm(gradient),
    )
    agent.actor_optimizer.update(agent.actor, gradient)
    # After the actor's step: a critic that had seen these returns would explain them away, action and all.
    if BASELINE == "critic":
        train_critic(agent.critic, agent.critic_optimizer, episodes, earned, critic_rng)
    played = alive.sum().astype(jnp.int32)
    return agent._replace(env_step=agent.env_step + played, num_updates=agent.num_updates + 1), metrics


def train(rng: jax.Array, report: Callable[[Log], None]) -> tuple[Agent, Log, tuple[Actor, Critic]]:
    """One seed's whole training, a pure function: jax.jit compiles it, jax.vmap runs it for many seeds.

    Must be mapped with `jax.vmap(..., axis_name="seed")`.

    Args:
        rng: everything random follows from it.
        report: called on the host after each EVAL_INTERVAL with the log row, averaged over the seeds.

    Returns:
        The agent at the end, the log [rows], and actor and critic as they were at each row [rows, ...].
    """
    # The loop bodies below are closures on purpose: jax caches traces by function, and a constant changed by
    # `configure` between two runs would go unnoticed in a function it has already seen.
    actor_rng, critic_rng, eval_rng, learning_rng = jax.random.split(rng, 4)
    actor, critic = Actor(nnx.Rngs(actor_rng)), Critic(nnx.Rngs(critic_rng))
    agent = Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, optax.adam(LEARNING_RATE), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, optax.adam(CRITIC_LEARNING_RATE), wrt=nnx.Param),
        env_step=jnp.int32(0),
        num_updates=jnp.int32(0),
        best=nnx.clone(actor),
        best_return=jnp.float32(-jnp.inf),
    )

    def learn_and_evaluate(agent: Agent, x):
        """Batches until `until` environment steps have been played, then a look at the greedy policy."""
        until, rng = x

        def update(carry):
            agent, total = carry
            agent, metrics = train_step(agent, jax.random.fold_in(learning_rng, agent.num_updates))
            return agent, jax.tree.map(jnp.add, total, metrics)

        # A batch of short episodes is few steps, one of long episodes many: so a loop of unknown length.
        before = agent.num_updates
        zeros = Metrics(*[jnp.float32(0)] * len(Metrics._fields))
        agent, total = jax.lax.while_loop(lambda carry: carry[0].env_step < until, update, (agent, zeros))
        # nan where the last interval's batch ran over this whole one (BATCH_SIZE * 500 > EVAL_INTERVAL)
        metrics = jax.tree.map(lambda x: x / (agent.num_updates - before), total)

        eval_return = quick_evaluate(agent.actor, rng)
        better = eval_return >= agent.best_return  # among equals the latest
        nnx.update(
            agent.best,
            jax.tree.map(
                lambda new, old: jnp.where(better, new, old), nnx.state(agent.actor), nnx.state(agent.best)
            ),
        )
        agent = agent._replace(best_return=jnp.maximum(eval_return, agent.best_return))
        log = Log(agent.env_step, agent.num_updates, eval_return, metrics)
        jax.debug.callback(report, jax.lax.pmean(log, "seed"))
        return agent, (log, (agent.actor, agent.critic))

    until = jnp.arange(EVAL_INTERVAL, NUM_STEPS + 1, EVAL_INTERVAL)
    agent, (log, snapshots) = jax.lax.scan(
        learn_and_evaluate, agent, (until, jax.random.split(eval_rng, len(until)))
    )
    return agent, log, snapshots


def train_seeds() -> tuple[Agent, Log, tuple[Actor, Critic], float, float]:
    """Compiles and trains all seeds as one program.

    Returns:
        The agents, each leaf with a leading axis [NUM_SEEDS]; the log [NUM_SEEDS, rows]; actors and critics
        at each row [NUM_SEEDS, rows, ...]; seconds of compiling and of training.
    """
    rngs = jax.vmap(jax.random.key)(SEED + jnp.arange(NUM_SEEDS))
    with tqdm(total=NUM_STEPS, unit="step", leave=False, disable=None) as bar:

        def report(row: Log) -> None:
            bar.update(min(int(row.env_step), NUM_STEPS) - bar.n)
            m = row.metrics
            tqdm.write(
                f"step {row.env_step:7.0f}   updates {row.num_updates:5.0f}   return {m.episode_return:5.1f}"
                f"   greedy {row.eval_return:5.1f}   at limit {m.truncated:4.0%}   entropy {m.entropy:.2f}"
                f"   explained {m.explained_variance:5.2f}   gradient {m.gradient_norm:7.1f}"
            )

        started = time.perf_counter()
        train_all = jax.vmap(functools.partial(train, report=report), axis_name="seed")
        compiled = jax.jit(train_all).lower(rngs).compile()
        compile_seconds = time.perf_counter() - started
        agents, log, snapshots = jax.block_until_ready(compiled(rngs))
        jax.effects_barrier()  # the last report has been printed
        train_seconds = time.perf_counter() - started - compile_seconds
    return agents, jax.tree.map(np.asarray, log), snapshots, compile_seconds, train_seconds


# %% Evaluation -----------------------------------------------------------------------------------------
def evaluate(actors: Actor) -> np.ndarray:
    """Greedy episodes on gymnasium.make("CartPole-v1"), never on the JAX copy the agent learned in.

    Args:
        actors: each leaf with a leading axis [S]. All play the same EVAL_EPISODES episodes, with the
            environment seeds 0, 1, ...

    Returns:
        Returns, float64 [S, EVAL_EPISODES].
    """

    @jax.jit
    def greedy(actors, obs):  # [S, E, 4] -> [S, E]
        return jax.vmap(lambda actor, obs: actor(obs).argmax(axis=-1))(actors, obs)

    num_actors = len(jax.tree.leaves(actors)[0])
    envs = [[gymnasium.make("CartPole-v1") for _ in range(EVAL_EPISODES)] for _ in range(num_actors)]
    obs = np.array([[env.reset(seed=i)[0] for i, env in enumerate(row)] for row in envs])  # [S, E, 4]
    returns = np.zeros((num_actors, EVAL_EPISODES))
    playing = {(s, e) for s in range(num_actors) for e in range(EVAL_EPISODES)}
    while playing:
        actions = np.asarray(greedy(actors, obs))
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
COLORS = {"none": ORANGE, "mean": GREY, "critic": BLUE}


def draw_band(axes, x: np.ndarray, curves: np.ndarray, color: str, label: str) -> None:
    """Mean over the seeds, and a band from the lowest to the highest; `curves` is [NUM_SEEDS, rows]."""
    axes.plot(x, curves.mean(axis=0), color=color, label=label)
    axes.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0)


def draw_learning_curve(path: Path, log: Log) -> None:
    """Left: return against steps. Right: how much of the credit's variance the baseline explains."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained")
    x = log.env_step.mean(axis=0)  # seeds differ by less than a batch
    draw_band(left, x, log.eval_return, BLUE, "greedy policy")
    left.plot(x, np.nanmean(log.metrics.episode_return, axis=0), color=GREY, label="drawing its actions")
    left.set(xlabel="environment step", ylabel="return", ylim=(0, 515))
    left.legend(frameon=False, loc="lower right")
    draw_band(right, x, log.metrics.explained_variance, BLUE, f"BASELINE={BASELINE}")
    right.axhline(0, color=GREY, linewidth=1)
    right.set(xlabel="environment step", ylabel="explained variance")
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Comparison -----------------------------------------------------------------------------------------
COMPARISON = [  # what to change on the command line
    # the two diseases: three baselines, two kinds of credit
    ["REWARD_TO_GO=True", "BASELINE=critic"],
    ["REWARD_TO_GO=True", "BASELINE=mean"],
    ["REWARD_TO_GO=True", "BASELINE=none"],
    ["REWARD_TO_GO=False", "BASELINE=critic"],
    ["REWARD_TO_GO=False", "BASELINE=mean"],
    ["REWARD_TO_GO=False", "BASELINE=none"],
    # can no baseline be saved by smaller steps, or by more episodes in each?
    ["BASELINE=none", "LEARNING_RATE=3e-3"],
    ["BASELINE=none", "BATCH_SIZE=32", "EVAL_INTERVAL=20_000"],
]


def label_of(changes: list[str]) -> str:
    """How a row of COMPARISON is called in tables and pictures."""
    return " ".join(changes)


def compare(run_dir: Path, arguments: list[str]) -> None:
    """Trains every row of COMPARISON, then measures variances with the first row's policies.

    Args:
        run_dir: where compare.csv (a line for each seed), gradient_variance.csv and their pictures go.
        arguments: of the command line; they hold for every row that does not change them.
    """
    results, logs = [], {}
    for changes in COMPARISON:
        configure([*arguments, *changes])
        label = label_of(changes)
        print(f"\n{label}")
        agents, logs[label], snapshots, _, _ = train_seeds()
        if changes == COMPARISON[0]:
            first_seed = jax.tree.map(lambda x: x[0], snapshots)
        eval_return = evaluate(agents.actor).mean(axis=1)
        best_return = evaluate(agents.best).mean(axis=1)
        for i in range(NUM_SEEDS):
            results.append(
                {
                    "changed": label,
                    "seed": SEED + i,
                    "eval_return": eval_return[i],
                    "best_eval_return": best_return[i],
                    "env_steps": logs[label].env_step[i, -1],
                    "num_updates": logs[label].num_updates[i, -1],
                }
            )
        print(f"last policy: {summary(eval_return)}; best policy: {summary(best_return)}")
    write_csv(run_dir / "compare.csv", results)
    draw_comparison(run_dir / "compare.png", logs)

    configure([*arguments, *COMPARISON[0]])
    print(f"\nvariance of the gradient: {VARIANCE_BATCHES} batches of {BATCH_SIZE} episodes a frozen policy")
    rows = measure_variance(first_seed, jax.tree.map(lambda x: x[0], logs[label_of(COMPARISON[0])]))
    write_csv(run_dir / "gradient_variance.csv", rows)
    draw_variance(run_dir / "gradient_variance.png", rows)
    configure(arguments)


def draw_comparison(path: Path, logs: dict[str, Log]) -> None:
    """Greedy return against steps: a panel for each kind of credit, a band for each baseline."""
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained", sharey=True)
    for axes, to_go, title in zip(both, (True, False), ("return to go", "the whole episode's return")):
        for baseline, color in COLORS.items():
            log = logs[label_of([f"REWARD_TO_GO={to_go}", f"BASELINE={baseline}"])]
            draw_band(axes, log.env_step.mean(axis=0), log.eval_return, color, f"baseline: {baseline}")
        axes.set(xlabel="environment step", title=f"each action credited with {title}", ylim=(0, 515))
    both[0].set_ylabel("return of the greedy policy")
    both[1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Variance of the gradient ---------------------------------------------------------------------------
ESTIMATORS = [  # (return to go, baseline). No critic for whole returns: this one has learned returns to go
    (False, "none"),
    (False, "mean"),
    (True, "none"),
    (True, "mean"),
    (True, "critic"),
]


def gradient_estimates(actor: Actor, critic: Critic, rngs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What every estimator makes of the same episodes.

    Args:
        actor, critic: frozen.
        rngs: keys [M], one for each batch of BATCH_SIZE episodes.

    Returns:
        Estimates of grad J, float32 [M, len(ESTIMATORS), weights of the actor]; mean returns [M].
    """

    def one_batch(rng):
        # nnx differentiates only what belongs to the same trace: a copy, made inside the loop
        frozen = nnx.clone(actor)
        episodes = play(frozen, rng)

        def estimate(reward_to_go, baseline):
            earned = credit(episodes, reward_to_go)
            advantage = earned - BASELINES[baseline](episodes, earned, critic)
            return -ravel_pytree(nnx.grad(policy_loss)(frozen, episodes, advantage))[0]

        return jnp.stack([estimate(*which) for which in ESTIMATORS]), episodes.reward.sum(axis=1).mean()

    return jax.lax.map(one_batch, rngs)


def spread_of(estimates: np.ndarray) -> dict[str, float]:
    """How far independent estimates [M, P] stray, and how long the vector is that they stray from.

    Returns:
        trace: of the covariance matrix, the mean squared distance of one estimate from the mean.
        squared_norm: of the expected gradient. The mean of M estimates is longer by trace / M: subtracted.
        *_error: standard errors. ratio: trace / squared_norm, nan where the noise hides the mean (2 errors).
    """
    estimates = estimates.astype(np.float64)
    m, average = len(estimates), estimates.mean(axis=0)
    squares = ((estimates - average) ** 2).sum(axis=1) * m / (m - 1)  # [M]
    trace = squares.mean()
    squared_norm = (average**2).sum() - trace / m
    squared_norm_error = 2 * (estimates @ average).std(ddof=1) / np.sqrt(m)
    return {
        "trace": trace,
        "trace_error": squares.std(ddof=1) / np.sqrt(m),
        "squared_norm": squared_norm,
        "squared_norm_error": squared_norm_error,
        "ratio": trace / squared_norm if squared_norm > 2 * squared_norm_error else np.nan,
    }


def measure_variance(snapshots: tuple[Actor, Critic], log: Log) -> list[dict[str, Any]]:
    """The variance of every estimator at policies from early to late in one training.

    Args:
        snapshots: actor and critic of one seed, each leaf [rows, ...].
        log: of the same seed, [rows].

    Returns:
        Lines of gradient_variance.csv. The policies are nearer to each other early, where learning is fast.
    """
    rows = np.unique(np.geomspace(1, len(log.env_step), 8).astype(int)) - 1
    estimate_all = jax.jit(lambda snapshot, rngs: gradient_estimates(*snapshot, rngs))
    lines = []
    for row in tqdm(rows, unit="policy", leave=False, disable=None):
        rngs = jax.random.split(jax.random.fold_in(jax.random.key(SEED), row), VARIANCE_BATCHES)
        snapshot = jax.tree.map(lambda x, row=row: x[row], snapshots)
        estimates, returns = map(np.asarray, estimate_all(snapshot, rngs))
        for i, (reward_to_go, baseline) in enumerate(ESTIMATORS):
            lines.append(
                {
                    "env_step": log.env_step[row].item(),
                    "episode_return": returns.mean().item(),
                    "reward_to_go": reward_to_go,
                    "baseline": baseline,
                    **spread_of(estimates[:, i]),
                }
            )
            line = lines[-1]
            tqdm.write(
                f"step {line['env_step']:7d}   return {line['episode_return']:5.1f}   baseline {baseline:6s}"
                f"   to go {reward_to_go!s:5s}   variance {line['trace']:10.4g}"
                f"   mean squared {line['squared_norm']:10.4g}   ratio {line['ratio']:8.4g}"
            )
    return lines


def draw_variance(path: Path, rows: list[dict[str, Any]]) -> None:
    """Left: variance of the estimate at each policy. Right: the same, as a multiple of what it estimates."""
    figure, both = plt.subplots(1, 2, figsize=(10, 3.9), facecolor="white", layout="constrained")
    for reward_to_go, baseline in ESTIMATORS:
        mine = [r for r in rows if (r["reward_to_go"], r["baseline"]) == (reward_to_go, baseline)]
        style = {"color": COLORS[baseline], "linestyle": "-" if reward_to_go else ":", "marker": "o"}
        label = f"{baseline}, {'return to go' if reward_to_go else 'whole return'}"
        for axes, key in zip(both, ("trace", "ratio")):
            axes.plot(range(len(mine)), [r[key] for r in mine], label=label, **style)
    for axes in both:
        axes.set_yscale("log")
        axes.set_xticks(
            range(len(mine)), [f"{r['env_step']:,}\n({r['episode_return']:.0f})" for r in mine], fontsize=8
        )
        axes.set_xlabel("policy frozen at environment step (its return)")
    both[0].set_ylabel("variance of the gradient estimate\n(trace of its covariance)")
    both[1].set_ylabel("variance / squared length\nof the mean gradient")
    both[1].set_title("missing: the noise hides the mean", fontsize=9)
    both[0].set_ylim(bottom=100)  # where all episodes reach the limit, the mean leaves exactly nothing
    both[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% The run --------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> Path:
    """Makes the folder of this run and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    run_dir = Path(RUN_DIR or time.strftime("runs/reinforce/%Y-%m-%d_%H-%M-%S"))
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
    columns = {name: values for name, values in log._asdict().items() if name != "metrics"}
    columns |= log.metrics._asdict()
    return [
        {"seed": SEED + i} | {name: values[i, j].item() for name, values in columns.items()}
        for i, j in np.ndindex(log.env_step.shape)
    ]


def run(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains all seeds, evaluates them, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: eval_return (of the last policy) and best_eval_return (of the best by
        `quick_evaluate`), each a list over the seeds of the mean of EVAL_EPISODES episodes; env_steps (of
        each seed, a list: the last batch runs over by its own length); seconds (wall time after imports), of
        which compile_seconds and train_seconds.

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
    print(
        f"{NUM_SEEDS} seeds x {NUM_STEPS:,} environment steps in batches of {BATCH_SIZE} episodes, "
        f"baseline {BASELINE}, in {run_dir}"
    )
    agents, log, _, compile_seconds, train_seconds = train_seeds()
    write_csv(run_dir / "log.csv", log_rows(log))
    print(
        f"compiled in {compile_seconds:.1f} s, trained in {train_seconds:.1f} s; "
        f"now {EVAL_EPISODES} episodes of CartPole-v1 each"
    )
    eval_return = evaluate(agents.actor).mean(axis=1)
    best_eval_return = evaluate(agents.best).mean(axis=1)
    for i in range(NUM_SEEDS):
        print(
            f"seed {SEED + i:3d}   last policy {eval_return[i]:6.2f}   best policy {best_eval_return[i]:6.2f}"
        )
    print(f"last policy: {summary(eval_return)}\nbest policy: {summary(best_eval_return)}")

    draw_learning_curve(run_dir / "learning_curve.png", log)
    if COMPARE:
        compare(run_dir, arguments)
    result = {
        "eval_return": eval_return.tolist(),
        "best_eval_return": best_eval_return.tolist(),
        "env_steps": log.env_step[:, -1].tolist(),
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
