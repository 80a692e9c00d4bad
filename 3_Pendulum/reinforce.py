"""REINFORCE on CartPole: push up the probability of what paid off. Paid off, compared with what?

The policy is a network, and its params climb the expected return J itself (Williams 1992; Sutton &
Barto 2018, eq. 13.11), estimated from N whole episodes that the policy played:

    grad J  ~  1/N sum_episodes sum_t (G_t - b_t) grad log pi(a_t | s_t)
    G_t = sum_{k>=t} gamma^(k-t) r_k

BASELINE chooses b_t: nothing, the mean of the batch (it shrinks the gradient a little), or a
learned critic V(s_t). A baseline changes only the variance: how far the estimate of one batch is
from the mean of all.

Read first: `update`, the four phases; `discounted_returns` and the three baselines; `policy_loss`.
Then `diff 3_Pendulum/reinforce.py 3_Pendulum/ppo.py` shows what PPO adds.

What is *not* here, and why: no bootstrapping (Monte Carlo: a return is what was really earned, up
to the fall or the time limit), no normalization of the advantages (dividing by their spread would
hide what the baseline does), no second step on the same episodes (that needs PPO's ratio), no
entropy bonus, no factor gamma^t in front of each term (nearly everyone leaves it out; it would all
but silence the late steps).

    python 3_Pendulum/reinforce.py                # ten seeds at once: 20 seconds on one CPU core
    python 3_Pendulum/reinforce.py BASELINE=no_baseline REWARD_TO_GO=False
    python 3_Pendulum/gradient_variance.py        # the variance of each gradient estimate: 30 s
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tensorflow_probability.substrates.jax import distributions as tfd

import environments
import pictures
import runs
import settings
from environments import CART_POLE as ENV
from environments import SOLVED, EnvState, evaluate, quick_evaluate
from settings import Count, Positive, Probability, Seed, Size, TwoOrMore


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # --- collecting: one rollout is an episode of every environment, learned from and thrown away
    NUM_STEPS: Count = 100_000  # environment steps of each seed; the last rollout may run over
    # environments of each seed, side by side: whole episodes for each gradient step
    NUM_ENVS: TwoOrMore = 8
    # --- judging
    GAMMA: Probability = 0.99  # discount; horizon 1 / (1 - GAMMA), about 100 steps
    # what we subtract
    BASELINE: Literal["no_baseline", "batch_mean", "critic_baseline"] = "critic_baseline"
    # credit an action with what came after it; False: with the whole return
    REWARD_TO_GO: bool = True
    # --- learning
    ACTOR_LEARNING_RATE: Positive = 1e-2  # Adam's
    CRITIC_LEARNING_RATE: Positive = 3e-3  # Adam's
    CRITIC_STEPS: Size = 20  # gradient steps of the critic for each one of the actor
    MINIBATCH_SIZE: Size = 256  # time steps in each of them, sampled from the episodes just played
    # --- networks
    HIDDEN_SIZE: Size = 64  # width of the two hidden layers of each network
    SCALE_OBSERVATIONS: bool = True  # divide by ENV.observation_scale: all numbers reach about 1
    # --- the run
    SEED: Seed = 0  # of the first seed
    NUM_SEEDS: Size = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
    # environment steps between evaluations of the greedy policy during training
    EVAL_INTERVAL: Count = 5_000
    # greedy episodes per seed after training, on Gymnasium's own CartPole-v1
    EVAL_EPISODES: Count = 100
    RUN_DIR: str = ""  # empty: runs/reinforce/<time>

    def __post_init__(self):
        of_interval = f"a multiple of EVAL_INTERVAL={self.EVAL_INTERVAL}"
        settings.check(self, "NUM_STEPS", self.NUM_STEPS % self.EVAL_INTERVAL == 0, of_interval)


# %% Networks --------------------------------------------------------------------------------------
class MLP(nnx.Module):
    """A network of two hidden layers, float32: [..., inputs] to [..., outputs]."""

    def __init__(
        self, scale: tuple, hidden_size: int, outputs: int, rngs: nnx.Rngs, factor: float = 1.0
    ):
        # of the inputs, which are divided by it; of the outputs
        self.scale, self.factor = scale, factor
        self.hidden_1 = nnx.Linear(len(scale), hidden_size, rngs=rngs)
        self.hidden_2 = nnx.Linear(hidden_size, hidden_size, rngs=rngs)
        self.output = nnx.Linear(hidden_size, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden_1(x / jnp.array(self.scale)))
        x = nnx.relu(self.hidden_2(x))
        return self.factor * self.output(x)


def make_networks(c: Constants, actor_rng: jax.Array, critic_rng: jax.Array) -> tuple[MLP, MLP]:
    """Untrained actor and critic."""
    scale = ENV.observation_scale if c.SCALE_OBSERVATIONS else (1.0,) * len(ENV.observation_scale)
    actor = MLP(scale, c.HIDDEN_SIZE, 2, nnx.Rngs(actor_rng))
    # The critic predicts a share of the largest return, since Adam takes too long to reach values
    # of 100.
    largest = sum(c.GAMMA**k for k in range(ENV.max_episode_steps))
    critic = MLP((*scale, ENV.max_episode_steps), c.HIDDEN_SIZE, 1, nnx.Rngs(critic_rng), largest)
    return actor, critic


def policy(actor: MLP, obs: jax.Array) -> tfd.Categorical:
    """pi(. | s), the push's distribution: observations [..., 4] to distributions [...]."""
    return tfd.Categorical(logits=actor(obs))


def value(critic: MLP, obs: jax.Array, t: jax.Array) -> jax.Array:
    """V(s, t): observations [..., 4] and their steps in the episode [...] to values [...].

    Why the clock: nothing is bootstrapped, so the return from step 499 is 1 however upright the
    pole is, while the same upright pole is worth 99 at step 0. A critic that cannot see the time is
    wrong about both. A baseline may depend on anything but the action; the actor, which has to play
    CartPole-v1, sees no clock.
    """
    clock = jnp.broadcast_to(t, obs.shape[:-1])[..., None]
    x = jnp.concatenate([obs, clock], axis=-1)  # [..., 5]
    return critic(x)[..., 0]  # drop the last axis, else [B, 1] - [B] broadcasts to [B, B]


# %% Formulas --------------------------------------------------------------------------------------
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


def discounted_returns(reward: jax.Array, gamma: float) -> jax.Array:
    """G_t = r_t + gamma G_{t+1} (Sutton & Barto 2018, eq. 3.9), from the last step back to the
    first.

    Terminated or truncated makes no difference: Monte Carlo counts what was earned, and bootstraps
    nothing. The time limit is then part of the task: 500 steps at most. Rewards [N, T] are 0 after
    the end.
    """

    def backwards(later, reward):  # [N]
        now = reward + gamma * later
        return now, now

    _, returns = jax.lax.scan(backwards, jnp.zeros(len(reward)), reward.T, reverse=True)  # [T, N]
    return returns.T


def whole_return(reward: jax.Array, gamma: float) -> jax.Array:
    """G_0 for every step, float32 [N, T]: each action is credited with what came before it, too.

    An action cannot change the past, so this adds the variance of every earlier step. On average
    the earlier steps cancel, and what is left is gamma^t times the term of the return to go:
    exactly the gradient of the discounted return, which the estimate without gamma^t is not (Nota &
    Thomas 2020), unless gamma is 1.
    """
    return jnp.broadcast_to(discounted_returns(reward, gamma)[:, :1], reward.shape)


# A baseline is subtracted from the returns. Whatever it is, if it does not depend on the action,
# the expected gradient stays: sum_a pi(a|s) b(s) grad log pi(a|s) = b(s) grad sum_a pi(a|s) = b(s)
# grad 1 = 0 (Williams 1992; Sutton & Barto 2018, section 13.4; with a learned one, Sutton et al.
# 2000). How much variance each leaves: Greensmith et al. 2004. All take (rollout, returns [N, T],
# critic), return [N, T].
def no_baseline(rollout: Rollout, returns: jax.Array, critic: MLP) -> jax.Array:
    """b = 0. All returns of CartPole are positive: every action gets pushed up, good or bad."""
    return jnp.zeros_like(returns)


def batch_mean(rollout: Rollout, returns: jax.Array, critic: MLP) -> jax.Array:
    """b_t = mean return of the episodes that are still alive at step t.

    At the same step, not over all steps: the return to go falls along an episode, and one average
    for all would call every early action good. Each episode is part of its own mean, which shrinks
    the expected term to (n - 1) / n of itself with n alive, to nothing for the last survivor: a
    known bias. Leaving oneself out (folder 4's leave_one_out) would fix it, and leave the last
    survivor without any baseline.
    """
    alive = rollout.alive
    return jnp.broadcast_to(
        (alive * returns).sum(axis=0) / jnp.maximum(alive.sum(axis=0), 1), returns.shape
    )


def critic_baseline(rollout: Rollout, returns: jax.Array, critic: MLP) -> jax.Array:
    """b_t = V(s_t, t), learned from the rollouts *before* this one: it must not know what these
    came to.
    """
    return value(critic, rollout.obs, jnp.arange(returns.shape[1]))


BASELINES = {function.__name__: function for function in (no_baseline, batch_mean, critic_baseline)}


def policy_loss(log_prob: jax.Array, advantage: jax.Array, alive: jax.Array) -> jax.Array:
    """The number whose gradient is minus the estimate of grad J on top of this file; [N, T] each ->
    [].
    """
    # Sum over the steps, mean over the episodes. The weight is a constant: no gradient flows
    # through it.
    weight = alive * jax.lax.stop_gradient(advantage)
    return -(weight * log_prob).sum(axis=1).mean()


def actor_loss(actor: MLP, batch: Batch) -> jax.Array:
    """`policy_loss` of the policy that `actor` is now."""
    log_prob = policy(actor, batch.obs).log_prob(batch.action)  # [N, T]
    return policy_loss(log_prob, batch.advantage, batch.alive)


def critic_loss(critic: MLP, obs: jax.Array, t: jax.Array, returns: jax.Array) -> jax.Array:
    """Mean squared error against what was really earned; obs [B, 4], t [B], returns [B] -> []."""
    return jnp.mean((returns - value(critic, obs, t)) ** 2)


# %% REINFORCE -------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of the loops."""

    actor: MLP
    critic: MLP
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    env_step: jax.Array  # int32 [], environment steps so far; padding is not counted
    num_updates: jax.Array  # int32 [], rollouts so far
    rng: jax.Array  # the key that all others are split off


def update(c: Constants, agent: Agent) -> tuple[Agent, dict[str, jax.Array]]:
    """One step of REINFORCE with a baseline (Sutton & Barto 2018, section 13.4), in four phases.

    Also returns the metrics of `Log`, float32 [] each.
    """
    rng, collect_rng, learn_rng = jax.random.split(agent.rng, 3)
    # 1. collect: play NUM_ENVS episodes with the policy as it is
    rollout = collect(c, agent.actor, collect_rng)
    # 2. judge: what came after each step, compared with what the baseline expected
    credit = discounted_returns if c.REWARD_TO_GO else whole_return
    returns = rollout.alive * credit(rollout.reward, c.GAMMA)  # [N, T]
    advantage = returns - BASELINES[c.BASELINE](rollout, returns, agent.critic)
    batch = Batch(rollout.obs, rollout.action, rollout.alive, advantage, returns)
    # 3. learn: one gradient step of the actor, then the critic's
    played = rollout.alive > 0  # [N, T]
    entropy = policy(agent.actor, rollout.obs).entropy().mean(where=played)  # before it learns
    agent, gradient_norm = learn(c, agent, batch, learn_rng)
    # 4. discard the rollout: the policy that sampled its actions has changed

    metrics = {
        "episode_return": rollout.reward.sum(axis=1).mean(),
        "truncated": rollout.truncated.any(axis=1).mean(),
        "entropy": entropy,
        # 1e-6: no 0 / 0 where all returns are equal
        "explained_variance": 1
        - (advantage.var(where=played) + 1e-6) / (returns.var(where=played) + 1e-6),
        "gradient_norm": gradient_norm,
    }
    env_step = agent.env_step + rollout.alive.sum().astype(jnp.int32)
    return agent._replace(env_step=env_step, num_updates=agent.num_updates + 1, rng=rng), metrics


def collect(c: Constants, actor: MLP, rng: jax.Array) -> Rollout:
    """One whole episode of every environment, all by one and the same policy.

    All run for 500 steps, because a compiled loop can't stop each one separately. After a pole has
    fallen, its environment goes on, but nothing after the fall counts.
    """
    reset_rng, action_rng = jax.random.split(rng)

    def one_step(carry: tuple[EnvState, jax.Array], rng: jax.Array):
        env_state, alive = carry  # [N, ...], [N]
        action = policy(actor, env_state.obs).sample(seed=rng)  # [N]
        next_state, transition = jax.vmap(ENV.step)(env_state, action)
        timeout = alive & transition.truncated & ~transition.terminated
        reward = alive * transition.reward
        row = Rollout(transition.obs, action, reward, alive.astype(jnp.float32), timeout)
        return (next_state, alive & ~transition.terminated), row

    start = jax.vmap(ENV.reset)(jax.random.split(reset_rng, c.NUM_ENVS)), jnp.ones(c.NUM_ENVS, bool)
    _, rollout = jax.lax.scan(one_step, start, jax.random.split(action_rng, ENV.max_episode_steps))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), rollout)  # [T, N, ...] -> [N, T, ...]


def learn(c: Constants, agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, jax.Array]:
    """One gradient step of the actor, CRITIC_STEPS of the critic; also the gradient's length."""
    gradient = nnx.grad(actor_loss)(agent.actor, batch)
    agent.actor_optimizer.update(agent.actor, gradient)
    gradient_norm = optax.global_norm(gradient)
    if c.BASELINE != "critic_baseline":
        return agent, gradient_norm

    def one_minibatch(agent: Agent, rows: tuple[jax.Array, jax.Array]) -> tuple[Agent, None]:
        n, t = rows  # [MINIBATCH_SIZE] each
        gradient = nnx.grad(critic_loss)(agent.critic, batch.obs[n, t], t, batch.returns[n, t])
        agent.critic_optimizer.update(agent.critic, gradient)
        return agent, None

    # After the actor's step: a critic that had seen these returns would explain them away, action
    # and all.
    alive, shape = batch.alive.ravel(), (c.CRITIC_STEPS, c.MINIBATCH_SIZE)
    # with replacement, no padding
    drawn = jax.random.choice(rng, alive.size, shape, p=alive / alive.sum())
    agent, _ = jax.lax.scan(one_minibatch, agent, jnp.divmod(drawn, ENV.max_episode_steps))
    return agent, gradient_norm


# %% Training --------------------------------------------------------------------------------------
class Log(NamedTuple):
    """One row at the first rollout past each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    num_updates: jax.Array  # int32, rollouts so far
    eval_return: jax.Array  # greedy policy, a mean over a few episodes in the JAX environment
    # means over the rollouts of the interval, nan if there was none:
    episode_return: jax.Array  # of the policy that samples its actions
    truncated: jax.Array  # share of the episodes that reached the time limit
    entropy: jax.Array  # nats, of the policy at the steps played; ln 2 = 0.69 is a coin
    # 1 - Var(returns - b) / Var(returns), steps played; 0 without baseline
    explained_variance: jax.Array
    gradient_norm: jax.Array


SHOWN = [
    "episode_return",
    "eval_return",
    "truncated",
    "explained_variance",
    "gradient_norm",
    "entropy",
]


def make_agent(c: Constants, seed: jax.Array) -> Agent:
    """Untrained networks and their optimizers."""
    rng, actor_rng, critic_rng = jax.random.split(jax.random.key(seed), 3)
    actor, critic = make_networks(c, actor_rng, critic_rng)
    return Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, optax.adam(c.ACTOR_LEARNING_RATE), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, optax.adam(c.CRITIC_LEARNING_RATE), wrt=nnx.Param),
        env_step=jnp.int32(0),
        num_updates=jnp.int32(0),
        rng=rng,
    )


def train_row(c: Constants, agent: Agent, until: jax.Array) -> tuple[Agent, Log]:
    """Rollouts of one seed until it has played so many steps, then a look at its greedy policy: one
    row of the log.
    """

    def one_update(carry):
        agent, total = carry
        agent, metrics = update(c, agent)
        return agent, jax.tree.map(jnp.add, total, metrics)

    # Short episodes are few steps, long ones many: a loop of unknown length.
    zeros = dict.fromkeys(Log._fields[3:], jnp.float32(0))
    before = agent.num_updates
    agent, total = jax.lax.while_loop(
        lambda carry: carry[0].env_step < until, one_update, (agent, zeros)
    )
    means = {name: metric / (agent.num_updates - before) for name, metric in total.items()}
    eval_return = quick_evaluate(ENV, policy, agent.actor)
    return agent, Log(agent.env_step, agent.num_updates, eval_return, **means)


def train(c: Constants) -> tuple[Agent, Log, float]:
    """Trains all seeds, a row at a time: agents [NUM_SEEDS, ...], log [NUM_SEEDS, rows], compile
    seconds.
    """
    # All functions above are for one seed. vmap trains all seeds side by side: an agent each (axis
    # 0), and one number of steps for all (None).
    agents = jax.jit(jax.vmap(partial(make_agent, c)))(c.SEED + jnp.arange(c.NUM_SEEDS))
    all_seeds = jax.jit(jax.vmap(partial(train_row, c), in_axes=(0, None)))
    all_seeds, compile_seconds = runs.compiled(all_seeds, agents, 0)
    log = []
    for env_step in runs.until_ctrl_c(range(0, c.NUM_STEPS, c.EVAL_INTERVAL)):
        agents, row = all_seeds(agents, env_step + c.EVAL_INTERVAL)
        log.append(jax.device_get(row))
        environments.print_row(c.NUM_STEPS, SHOWN, log)
    return agents, runs.columns(log), compile_seconds


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains all seeds, evaluates them, fills the run's folder. Returns what result.json holds."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    runs.start_jax()
    run_dir = runs.open_run("reinforce", c)
    rollout = f"{c.NUM_ENVS} episodes, {c.BASELINE}"
    print(
        f"{c.NUM_SEEDS} seeds x {c.NUM_STEPS:,} steps of {ENV.id} in rollouts of {rollout}, "
        f"in {run_dir}"
    )
    agents, log, compile_seconds = train(c)
    runs.write_log(run_dir, log, c.SEED)
    print(f"trained; now {c.EVAL_EPISODES} greedy episodes each")
    eval_return = evaluate(ENV, policy, agents.actor, c.EVAL_EPISODES).mean(axis=1)  # [NUM_SEEDS]
    environments.print_returns(c.SEED, eval_return, SOLVED)
    pictures.draw_reinforce_curve(run_dir / "learning_curve.png", log, c.BASELINE)
    result = {
        "eval_return": eval_return.tolist(),
        "env_steps": log.env_step[:, -1].tolist(),
        "compile_seconds": compile_seconds,
    }
    return runs.finish(run_dir, started, result)


if __name__ == "__main__":
    settings.run(main)
