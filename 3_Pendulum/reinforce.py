"""REINFORCE on CartPole: push up the probability of what paid off. Paid off, compared with what?

The policy is a network, and its weights climb the expected return J itself (Williams 1992; Sutton & Barto
2018, eq. 13.11), estimated from N whole episodes that the policy played:

    grad J  ~  1/N sum_episodes sum_t (G_t - b_t) grad log pi(a_t | s_t),    G_t = sum_{k>=t} gamma^(k-t) r_k

BASELINE chooses b_t: nothing, the mean of the batch, or a learned critic V(s_t). On average the direction
stays the same; what a baseline changes is how far the estimate of one batch strays from it.

Read first: `update`, the four phases; `returns_to_go` and the three baselines; `policy_loss`. Then
`diff 3_Pendulum/reinforce.py 3_Pendulum/pendulum.py` shows what PPO adds.

What is *not* here, and why: no bootstrapping (Monte Carlo: a return is what was really earned, up to the fall
or the time limit), no normalization of the advantages (dividing by their spread would hide what the baseline
does), no second step on the same episodes (that needs PPO's ratio), no entropy bonus, no factor gamma^t in
front of each term (nearly everyone leaves it out; it would all but silence the late steps).

    python 3_Pendulum/reinforce.py                # ten seeds at once: about 20 seconds on one CPU core
    python 3_Pendulum/reinforce.py BASELINE=no_baseline REWARD_TO_GO=False
    python 3_Pendulum/reinforce_study.py          # every row of the table, and the variance study: 3 minutes
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
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from tensorflow_probability.substrates.jax import distributions as tfd

import pictures
import settings

# %% Constants ------------------------------------------------------------------------------------------
# Collecting: one rollout is an episode of every environment, learned from and thrown away
NUM_STEPS = 100_000  # environment steps of each seed, counted as played; the last rollout may run over
NUM_ENVS = 8  # environments of each seed, side by side: whole episodes for each gradient step

# Judging
GAMMA = 0.99  # worth of a reward one step later: looks about 100 steps ahead
BASELINE = "critic_baseline"  # what a return is compared with: no_baseline, batch_mean, critic_baseline
REWARD_TO_GO = True  # credit an action with what came after it; False: with the whole episode's return

# Learning
ACTOR_LEARNING_RATE = 1e-2  # Adam's
CRITIC_LEARNING_RATE = 3e-3  # Adam's
CRITIC_STEPS = 20  # gradient steps of the critic for each one of the actor
MINIBATCH_SIZE = 256  # time steps in each of them, drawn from the episodes just played

# Networks
HIDDEN_SIZE = 64  # width of the two hidden layers of each network
SCALE_OBSERVATIONS = True  # divide by OBSERVATION_SCALE, so that all four numbers reach about 1

# The run
SEED = 0  # of the first seed
NUM_SEEDS = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
EVAL_INTERVAL = 5_000  # environment steps between looks at the greedy policy during training
EVAL_EPISODES = 100  # greedy episodes on gymnasium.make("CartPole-v1") after training, for each seed
RUN_DIR = ""  # empty: runs/reinforce/<time>

DEFAULTS = settings.constants(globals())


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets the constants above: DEFAULTS, changed by `NAME=value` arguments. Raises settings.UserError."""
    return settings.configure(globals(), arguments)


# %% Environment ----------------------------------------------------------------------------------------
ENV = CartPoleFunctional()
# Trap: Gymnasium 1.4.0's own default of polemass_length is mass + length (0.6). CartPole-v1 multiplies them.
PHYSICS = CartPoleParams(polemass_length=0.05)
MAX_EPISODE_STEPS = gymnasium.spec("CartPole-v1").max_episode_steps  # 500
SOLVED = gymnasium.spec("CartPole-v1").reward_threshold  # 475, Gymnasium's own mark
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
def scaled(obs: jax.Array) -> jax.Array:
    """Observations [..., 4], about -1 to 1 if SCALE_OBSERVATIONS."""
    return obs / jnp.array(OBSERVATION_SCALE) if SCALE_OBSERVATIONS else obs


class Actor(nnx.Module):
    """pi(. | s), the distribution of the push: 4 - 64 - 64 - 2 logits, float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(4, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 2, rngs=rngs)

    def __call__(self, obs: jax.Array) -> tfd.Categorical:
        """Observations [..., 4] to a distribution of two actions, of batch shape [...]."""
        x = nnx.relu(self.hidden_1(scaled(obs)))
        x = nnx.relu(self.hidden_2(x))
        return tfd.Categorical(logits=self.output(x))


class Critic(nnx.Module):
    """V(s, t): 5 - 64 - 64 - 1, float32. The return to expect from here on, given the clock as well.

    Why the clock: nothing is bootstrapped, so the return from step 499 is 1 however well the pole stands,
    while the same upright pole is worth 99 at step 0. A critic that cannot see the time is wrong about both.
    A baseline may depend on anything but the action; the actor, which has to play CartPole-v1, sees no clock.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(5, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 1, rngs=rngs)

    def __call__(self, obs: jax.Array, t: jax.Array) -> jax.Array:
        """Observations [..., 4] and their steps in the episode [...] to values [...]."""
        time = jnp.broadcast_to(t / MAX_EPISODE_STEPS, obs.shape[:-1])
        x = nnx.relu(self.hidden_1(jnp.concatenate([scaled(obs), time[..., None]], axis=-1)))
        x = nnx.relu(self.hidden_2(x))
        # The network learns a share of the largest return there is; numbers up to 100 take Adam too long.
        largest = sum(GAMMA**k for k in range(MAX_EPISODE_STEPS))
        return largest * self.output(x)[..., 0]  # trap: [..., 1] less returns [...] would be a square


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of the loops."""

    actor: Actor
    critic: Critic
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    env_step: jax.Array  # int32 [], environment steps so far; padding is not counted
    num_updates: jax.Array  # int32 [], gradient steps of the actor so far


class Rollout(NamedTuple):
    """What one policy did: N = NUM_ENVS whole episodes, each padded to T = 500 steps."""

    obs: jax.Array  # float32 [N, T, 4]
    action: jax.Array  # int32 [N, T]
    reward: jax.Array  # float32 [N, T], 0 after the end
    alive: jax.Array  # float32 [N, T], 1 up to and with the last step, then 0
    truncated: jax.Array  # bool [N, T], the step at which the time limit, and not a fall, ended it


class Batch(NamedTuple):
    """Steps to learn from."""

    obs: jax.Array  # float32 [N, T, 4]
    action: jax.Array  # int32 [N, T]
    alive: jax.Array  # float32 [N, T], what is not padding
    advantage: jax.Array  # float32 [N, T]
    returns: jax.Array  # float32 [N, T], the critic's targets


class Log(NamedTuple):
    """One row at the first rollout past each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    num_updates: jax.Array  # int32, gradient steps so far
    eval_return: jax.Array  # greedy policy, mean of QUICK_EVAL_EPISODES on the JAX environment
    # means over the rollouts of the interval:
    episode_return: jax.Array  # of the policy that draws its actions
    truncated: jax.Array  # share of the episodes that reached the time limit
    entropy: jax.Array  # nats, of the policy at the steps played; ln 2 = 0.69 is a coin
    explained_variance: jax.Array  # 1 - Var(returns - b) / Var(returns), steps played; 0 without baseline
    gradient_norm: jax.Array


def train_seeds(report: Callable[[Log], None]) -> tuple[Agent, Log, tuple[Actor, Critic], float, float]:
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
    agents, log, networks = jax.block_until_ready(compiled(rngs))
    jax.effects_barrier()  # the last report has been made
    train_seconds = time.perf_counter() - started - compile_seconds
    return agents, jax.tree.map(np.asarray, log), networks, compile_seconds, train_seconds


def train(rng: jax.Array, report: Callable[[Log], None]) -> tuple[Agent, Log, tuple[Actor, Critic]]:
    """One seed's whole training, a pure function: jax.jit compiles it, jax.vmap runs it for many seeds.

    Must be mapped with `jax.vmap(..., axis_name="seed")`.

    Args:
        rng: everything random follows from it.
        report: called on the host after each EVAL_INTERVAL with the log row, averaged over the seeds.

    Returns:
        The agent at the end, the log [rows], and actor and critic at each row of the log, leaves [rows, ...].
    """
    actor_rng, critic_rng, eval_rng, learning_rng = jax.random.split(rng, 4)

    def learn_and_evaluate(agent: Agent, x):
        """Rollouts until `until` environment steps have been played, then a look at the greedy policy."""
        until, rng = x

        def add_update(carry):
            agent, total = carry
            agent, figures = update(agent, jax.random.fold_in(learning_rng, agent.num_updates))
            return agent, jax.tree.map(jnp.add, total, figures)

        # Short episodes are few steps, long ones many: so a loop of unknown length.
        before = agent.num_updates
        zeros = dict.fromkeys(Log._fields[3:], jnp.float32(0))
        agent, total = jax.lax.while_loop(lambda carry: carry[0].env_step < until, add_update, (agent, zeros))
        # nan where the last interval's rollout ran over this whole one (NUM_ENVS * 500 > EVAL_INTERVAL)
        means = {name: figure / (agent.num_updates - before) for name, figure in total.items()}
        log = Log(agent.env_step, agent.num_updates, quick_evaluate(agent.actor, rng), **means)
        jax.debug.callback(report, jax.lax.pmean(log, "seed"))
        return agent, (log, (agent.actor, agent.critic))

    until = jnp.arange(EVAL_INTERVAL, NUM_STEPS + 1, EVAL_INTERVAL)
    agent = make_agent(actor_rng, critic_rng)
    rngs = jax.random.split(eval_rng, len(until))
    agent, (log, networks) = jax.lax.scan(learn_and_evaluate, agent, (until, rngs))
    return agent, log, networks


def make_agent(actor_rng: jax.Array, critic_rng: jax.Array) -> Agent:
    """Untrained networks and their optimizers."""
    actor, critic = Actor(nnx.Rngs(actor_rng)), Critic(nnx.Rngs(critic_rng))
    return Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, optax.adam(ACTOR_LEARNING_RATE), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, optax.adam(CRITIC_LEARNING_RATE), wrt=nnx.Param),
        env_step=jnp.int32(0),
        num_updates=jnp.int32(0),
    )


def update(agent: Agent, rng: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
    """The four phases of REINFORCE; returns the figures of `Log` as well, float32 [] each."""
    collect_rng, learn_rng = jax.random.split(rng)
    # 1. collect
    rollout = collect(agent.actor, collect_rng)
    # 2. judge
    returns = returns_to_go(rollout) if REWARD_TO_GO else whole_return(rollout)  # [N, T]
    advantage = returns - BASELINES[BASELINE](rollout, returns, agent.critic)
    batch = Batch(rollout.obs, rollout.action, rollout.alive, advantage, returns)
    # 3. learn
    played = rollout.alive > 0  # [N, T]
    entropy = agent.actor(rollout.obs).entropy().mean(where=played)  # before it learns
    agent, gradient_norm = learn(agent, batch, learn_rng)
    # 4. discard: the rollout ends here. Its actions were drawn by a policy that is gone.

    figures = {
        "episode_return": rollout.reward.sum(axis=1).mean(),
        "truncated": rollout.truncated.any(axis=1).mean(),
        "entropy": entropy,
        # 1e-6: no 0 / 0 where all returns are equal
        "explained_variance": 1 - (advantage.var(where=played) + 1e-6) / (returns.var(where=played) + 1e-6),
        "gradient_norm": gradient_norm,
    }
    env_step = agent.env_step + rollout.alive.sum().astype(jnp.int32)
    return agent._replace(env_step=env_step, num_updates=agent.num_updates + 1), figures


def collect(actor: Actor, rng: jax.Array) -> Rollout:
    """One whole episode of every environment, all by one and the same policy.

    All run for MAX_EPISODE_STEPS steps, since a compiled loop cannot stop for each alone; a pole that has
    fallen is played on, and nothing after the fall counts.
    """
    reset_rng, action_rng = jax.random.split(rng)

    def one_step(carry, rng: jax.Array):
        env_state, alive = carry  # [N, ...], [N]
        action = actor(env_state.obs).sample(seed=rng)  # [N]
        t = jax.vmap(step)(env_state, action)
        row = Rollout(
            env_state.obs, action, alive * t.reward, alive.astype(jnp.float32),
            alive & t.truncated & ~t.terminated,
        )  # fmt: skip
        following = EnvState(t.next_obs, env_state.steps + 1)
        return (following, alive & ~t.terminated), row

    start = jax.vmap(reset)(jax.random.split(reset_rng, NUM_ENVS)), jnp.ones(NUM_ENVS, bool)
    _, rollout = jax.lax.scan(one_step, start, jax.random.split(action_rng, MAX_EPISODE_STEPS))  # [T, N, ...]
    return jax.tree.map(lambda x: x.swapaxes(0, 1), rollout)


def learn(agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, jax.Array]:
    """One gradient step of the actor, CRITIC_STEPS of the critic; returns the gradient's length as well."""
    gradient = nnx.grad(policy_loss)(agent.actor, batch)
    agent.actor_optimizer.update(agent.actor, gradient)
    gradient_norm = optax.global_norm(gradient)
    if BASELINE != "critic_baseline":
        return agent, gradient_norm

    def one_minibatch(agent: Agent, rows: tuple[jax.Array, jax.Array]) -> tuple[Agent, None]:
        n, t = rows  # [MINIBATCH_SIZE] each
        gradient = nnx.grad(critic_loss)(agent.critic, batch.obs[n, t], t, batch.returns[n, t])
        agent.critic_optimizer.update(agent.critic, gradient)
        return agent, None

    # After the actor's step: a critic that had seen these returns would explain them away, action and all.
    alive, shape = batch.alive.ravel(), (CRITIC_STEPS, MINIBATCH_SIZE)
    drawn = jax.random.choice(rng, alive.size, shape, p=alive / alive.sum())  # with replacement, no padding
    agent, _ = jax.lax.scan(one_minibatch, agent, jnp.divmod(drawn, MAX_EPISODE_STEPS))
    return agent, gradient_norm


# %% Algorithm ------------------------------------------------------------------------------------------
def returns_to_go(rollout: Rollout) -> jax.Array:
    """G_t = r_t + gamma G_{t+1} (Sutton & Barto 2018, eq. 3.9), from the last step back to the first.

    Terminated or truncated makes no difference here: Monte Carlo counts what was earned, and bootstraps
    nothing. The time limit is then part of the task: 500 steps are the most there is.

    Returns:
        float32 [N, T], 0 after the end.
    """

    def backwards(later, reward):  # [N]
        now = reward + GAMMA * later
        return now, now

    start = jnp.zeros(len(rollout.reward))
    _, returns = jax.lax.scan(backwards, start, rollout.reward.T, reverse=True)  # [T, N]
    return rollout.alive * returns.T


def whole_return(rollout: Rollout) -> jax.Array:
    """G_0 for every step, float32 [N, T]: each action is credited with what came before it, too.

    An action cannot change the past, so this adds the noise of every earlier step: the first disease. On
    average the earlier steps cancel, and what is left is gamma^t times the term of the return to go: exactly
    the gradient of the discounted return, which the estimate without gamma^t is not (Nota & Thomas 2020),
    unless GAMMA is 1.
    """
    return rollout.alive * returns_to_go(rollout)[:, :1]


# A baseline is subtracted from the returns. Whatever it is, if it does not depend on the action, the expected
# gradient stays: sum_a pi(a|s) b(s) grad log pi(a|s) = b(s) grad sum_a pi(a|s) = b(s) grad 1 = 0
# (Williams 1992; Sutton & Barto 2018, section 13.4; with a learned one, Sutton et al. 2000). How much
# variance each leaves: Greensmith et al. 2004. All take (rollout, returns [N, T], critic), return [N, T].
def no_baseline(rollout: Rollout, returns: jax.Array, critic: Critic) -> jax.Array:
    """b = 0. All returns of CartPole are positive: whatever was done gets pushed up. The second disease."""
    return jnp.zeros_like(returns)


def batch_mean(rollout: Rollout, returns: jax.Array, critic: Critic) -> jax.Array:
    """b_t = mean return of the episodes that are still alive at step t.

    At the same step, not over all steps: the return to go falls along an episode, and one average for all
    would call every early action good. Each episode is part of its own mean, which shrinks the expected term
    to (n - 1) / n of itself with n alive, to nothing for the last survivor: a known bias. Leaving oneself out
    (folder 4's leave_one_out) would fix it, and leave the last survivor without any baseline.
    """
    alive = rollout.alive
    return jnp.broadcast_to((alive * returns).sum(axis=0) / jnp.maximum(alive.sum(axis=0), 1), returns.shape)


def critic_baseline(rollout: Rollout, returns: jax.Array, critic: Critic) -> jax.Array:
    """b_t = V(s_t, t), learned from the rollouts *before* this one: it must not know what these came to."""
    return critic(rollout.obs, jnp.arange(returns.shape[1]))


BASELINES = {function.__name__: function for function in (no_baseline, batch_mean, critic_baseline)}


def policy_loss(actor: Actor, batch: Batch) -> jax.Array:
    """The number whose gradient is minus the estimate of grad J on top of this file, float32 []."""
    log_prob = actor(batch.obs).log_prob(batch.action)  # [N, T]
    # Sum over the steps, mean over the episodes. The score is constant: no gradient flows through it.
    score = batch.alive * jax.lax.stop_gradient(batch.advantage)
    return -(score * log_prob).sum(axis=1).mean()


def critic_loss(critic: Critic, obs: jax.Array, t: jax.Array, returns: jax.Array) -> jax.Array:
    """Mean squared error against what was really earned; obs [B, 4], t [B], returns [B]."""
    return jnp.mean((returns - critic(obs, t)) ** 2)


# %% Evaluation -----------------------------------------------------------------------------------------
QUICK_EVAL_EPISODES = 20


def quick_evaluate(actor: Actor, rng: jax.Array) -> jax.Array:
    """Mean return of QUICK_EVAL_EPISODES greedy episodes on the JAX environment, float32 []."""
    states = jax.vmap(reset)(jax.random.split(rng, QUICK_EVAL_EPISODES))  # [E, ...]

    def play_step(carry, _):
        states, alive = carry
        transition = jax.vmap(step)(states, actor(states.obs).mode())
        reward = jnp.where(alive, transition.reward, 0.0)  # [E]
        return (EnvState(transition.next_obs, states.steps + 1), alive & ~transition.terminated), reward

    start = states, jnp.ones(QUICK_EVAL_EPISODES, bool)
    _, rewards = jax.lax.scan(play_step, start, None, MAX_EPISODE_STEPS)  # [T, E]
    return rewards.sum(axis=0).mean()


def best_of(log: Log, policies: Actor) -> Actor:
    """Each seed's actor at its best row of the log, among equals the latest; [S, rows, ...] to [S, ...]."""
    row = log.eval_return.shape[1] - 1 - log.eval_return[:, ::-1].argmax(axis=1)  # [S]
    return jax.tree.map(lambda x: x[np.arange(len(row)), row], policies)


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
        return jax.vmap(lambda actor, obs: actor(obs).mode())(actors, obs)

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


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains all seeds, evaluates them, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: eval_return (of the last policy) and best_eval_return (of the best by
        `quick_evaluate`), each a list over the seeds of the mean of EVAL_EPISODES episodes; env_steps (of
        each seed, a list: the last rollout runs over by its own length); seconds (wall time after imports),
        of which compile_seconds and train_seconds.

    Raises:
        settings.UserError: see `settings.configure` and `settings.open_run`.
    """
    started = time.perf_counter()
    run_dir = settings.open_run("reinforce", configure(arguments))
    print(
        f"{NUM_SEEDS} seeds x {NUM_STEPS:,} environment steps in rollouts of {NUM_ENVS} episodes, "
        f"{BASELINE}, in {run_dir}"
    )
    shown = ["episode_return", "eval_return", "truncated", "explained_variance", "gradient_norm", "entropy"]
    with settings.progress(NUM_STEPS, shown, run_dir / "tensorboard") as report:
        agents, log, (policies, _), compile_seconds, train_seconds = train_seeds(report)
    settings.write_csv(run_dir / "log.csv", settings.log_rows(log, SEED))
    print(
        f"compiled in {compile_seconds:.1f} s, trained in {train_seconds:.1f} s; "
        f"now {EVAL_EPISODES} episodes of CartPole-v1 each"
    )
    eval_return = evaluate(agents.actor).mean(axis=1)  # [NUM_SEEDS]
    best_eval_return = evaluate(best_of(log, policies)).mean(axis=1)
    for i in range(NUM_SEEDS):
        print(f"seed {SEED + i:3d}   last {eval_return[i]:8.2f}   best {best_eval_return[i]:8.2f}")
    print(f"last policy: {settings.summary(eval_return, SOLVED)}")
    print(f"best policy: {settings.summary(best_eval_return, SOLVED)}")
    pictures.draw_reinforce_curve(run_dir / "learning_curve.png", log, BASELINE)
    result = {
        "eval_return": eval_return.tolist(),
        "best_eval_return": best_eval_return.tolist(),
        "env_steps": log.env_step[:, -1].tolist(),
        "seconds": time.perf_counter() - started,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
    }
    settings.write_json(run_dir / "result.json", result)
    print(f"{result['seconds']:.0f} s; everything of this run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
