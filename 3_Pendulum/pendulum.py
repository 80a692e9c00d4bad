"""PPO on Pendulum: ppo.py with a torque, any real number, sampled from a normal distribution.

The objective of the actor, to be maximized, is the clipped surrogate objective (Schulman et al.
2017, eq. 7), with an optional penalty that acts as a trust region (eq. 8):

    J = mean [ min(ratio_t * A_t, clip(ratio_t, 1 - epsilon, 1 + epsilon) * A_t)
               - beta * KL(pi_old || pi) ]
    ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)          the importance weight

with the advantage of GAE (Schulman et al. 2016, eq. 16), cut at the end of an episode:

    A_t = delta_t + gamma * lambda * (1 - ended_t) * A_{t+1}
    delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)

Pendulum never terminates, its episodes are truncated after 200 steps. So delta_t always bootstraps:
V of the true last observation estimates the rewards after the cut.

Read first: `policy`, the normal distribution; `policy_loss`, the KL penalty; `adam`. The rest is
ppo.py.

What is *not* here, and why: no entropy bonus (the distribution starts wide and narrows by itself),
no clipping of the value loss, no running normalization (three numbers with known ranges; normalized
advantages forgive the rewards' scale), no weights shared between actor and critic (two small
networks are simpler than weighing two losses against each other), no early stop by KL.

    python 3_Pendulum/pendulum.py                 # ten seeds at once: 25 seconds on one CPU core
    python 3_Pendulum/pendulum.py GAMMA=0.9 NUM_SEEDS=3
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tensorflow_probability.substrates.jax import distributions as tfd

import environments
import pictures
import runs
import settings
from environments import MAX_TORQUE, EnvState, Transition, evaluate, new_where_ended, quick_evaluate
from environments import PENDULUM as ENV
from settings import (
    BelowOne,
    Count,
    NonNegative,
    Positive,
    PositiveOrInf,
    Probability,
    Seed,
    Size,
    TwoOrMore,
)


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # --- collecting: one rollout is NUM_ENVS * ROLLOUT_STEPS steps, learned from and thrown away
    NUM_STEPS: Count = 100_000  # environment steps of each seed, all its environments together
    NUM_ENVS: Size = 8  # environments of each seed, side by side
    ROLLOUT_STEPS: Count = 125  # steps of each environment in a rollout
    # --- judging
    GAMMA: BelowOne = 0.98  # discount; horizon 1 / (1 - GAMMA): 50 steps, as long as a swing-up
    # 0: trust the critic after one step; 1: trust only the rewards (no GAE)
    GAE_LAMBDA: Probability = 0.85
    NORMALIZE_ADVANTAGES: bool = True  # to mean 0 and standard deviation 1, in each mini-batch
    # --- learning
    ACTOR_LEARNING_RATE: Positive = 1e-3  # Adam's, at the first gradient step
    # the critic must keep up with the policy; 1e-3 is too slow
    CRITIC_LEARNING_RATE: Positive = 3e-3
    # share of both rates left at the last gradient step; 1: no decay
    LEARNING_RATE_END: Probability = 0.0
    # gradient clipping by global norm, for each network on its own
    MAX_GRAD_NORM: PositiveOrInf = 0.5
    NUM_EPOCHS: Size = 10  # passes over each rollout
    MINIBATCH_SIZE: TwoOrMore = 50  # steps in one gradient step
    # --- clip and KL penalty: both keep the new policy near the one that collected the rollout
    CLIP_EPSILON: PositiveOrInf = 0.2  # no gain from a ratio beyond 1 +- this; 1e9 switches it off
    BETA: NonNegative = 0.0  # weight of the KL divergence from the old policy; 0 switches it off
    # --- networks
    HIDDEN_SIZE: Size = 64  # width of the two hidden layers of each network
    SCALE_OBSERVATIONS: bool = True  # divide by ENV.observation_scale: all numbers reach about 1
    SIGMA_START: Positive = 2.0  # initial standard deviation of the torque, N m; the limits are +-2
    # newton meters; as sigma goes to 0, a small step of the mean makes any ratio
    SIGMA_MIN: Positive = 0.05
    # --- the run
    SEED: Seed = 0  # of the first seed
    NUM_SEEDS: Size = 10  # SEED, SEED + 1, ...: trained side by side by jax.vmap
    # environment steps between evaluations of the greedy policy during training
    EVAL_INTERVAL: Count = 5_000
    # greedy episodes per seed after training, on Gymnasium's own Pendulum-v1
    EVAL_EPISODES: Count = 100
    RUN_DIR: str = ""  # empty: runs/pendulum/<time>

    def __post_init__(self):
        rollout = self.NUM_ENVS * self.ROLLOUT_STEPS
        text = f"NUM_ENVS * ROLLOUT_STEPS = {rollout}"
        settings.check(
            self, "MINIBATCH_SIZE", rollout % self.MINIBATCH_SIZE == 0, f"a divisor of {text}"
        )
        settings.check(
            self, "EVAL_INTERVAL", self.EVAL_INTERVAL % rollout == 0, f"a multiple of {text}"
        )
        of_interval = f"a multiple of EVAL_INTERVAL={self.EVAL_INTERVAL}"
        settings.check(self, "NUM_STEPS", self.NUM_STEPS % self.EVAL_INTERVAL == 0, of_interval)
        above = f"above SIGMA_MIN={self.SIGMA_MIN} and below 1000"
        settings.check(self, "SIGMA_START", self.SIGMA_MIN < self.SIGMA_START < 1000, above)


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
        x = nnx.tanh(self.hidden_1(x / jnp.array(self.scale)))
        x = nnx.tanh(self.hidden_2(x))
        return self.factor * self.output(x)


def make_networks(c: Constants, actor_rng: jax.Array, critic_rng: jax.Array) -> tuple[MLP, MLP]:
    """Untrained actor and critic."""
    scale = ENV.observation_scale if c.SCALE_OBSERVATIONS else (1.0,) * len(ENV.observation_scale)
    actor = MLP(scale, c.HIDDEN_SIZE, 2, nnx.Rngs(actor_rng))
    # Small-init output layer: at first mean 0 and sigma SIGMA_START in every state.
    actor.output.kernel[...] = 0.1 * actor.output.kernel[...]
    over = c.SIGMA_START - c.SIGMA_MIN
    # softplus makes `over` of it
    actor.output.bias[...] = jnp.array([0.0, over + np.log(-np.expm1(-over))])
    actor.sigma_min = c.SIGMA_MIN
    critic = MLP(scale, c.HIDDEN_SIZE, 1, nnx.Rngs(critic_rng))
    return actor, critic


def policy(actor: MLP, obs: jax.Array) -> tfd.Normal:
    """pi(. | s), the torque's distribution: observations [..., 3] to distributions [...]."""
    mean, sigma = jnp.moveaxis(actor(obs), -1, 0)  # [...] each
    # softplus keeps sigma positive
    return tfd.Normal(MAX_TORQUE * nnx.tanh(mean), actor.sigma_min + nnx.softplus(sigma))


def value(critic: MLP, obs: jax.Array) -> jax.Array:
    """V(s): observations [..., 3] to values [...]. No clock: at the time limit V estimates the
    rest.
    """
    return critic(obs)[..., 0]  # drop the last axis, else [B, 1] - [B] broadcasts to [B, B]


# %% Formulas --------------------------------------------------------------------------------------
class Rollout(NamedTuple):
    """What one policy did, and what its networks said: T = ROLLOUT_STEPS of N = NUM_ENVS."""

    transition: Transition  # each [N, T, ...]
    log_prob: jax.Array  # float32 [N, T], of the action, by the policy that sampled it
    mean: jax.Array  # float32 [N, T], of that policy
    sigma: jax.Array  # float32 [N, T], of that policy
    value: jax.Array  # float32 [N, T], V(s_t)
    next_value: jax.Array  # float32 [N, T], V(s_{t+1}), of the true next observation
    episode_return: jax.Array  # float32 [N, T], of the episode so far, this step included


class Batch(NamedTuple):
    """Steps to learn from, in any order."""

    obs: jax.Array  # float32 [B, 3]
    action: jax.Array  # float32 [B], as sampled: may be beyond the torque limits
    log_prob: jax.Array  # float32 [B], of the old policy
    mean: jax.Array  # float32 [B], of the old policy
    sigma: jax.Array  # float32 [B], of the old policy
    advantage: jax.Array  # float32 [B]
    returns: jax.Array  # float32 [B], the critic's targets


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    gae_lambda: float,
) -> jax.Array:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16), from the last step back to
    the first.

    All [N, T]; next_value is V(s_{t+1}) of the true next observation. The advantages plus `value`
    are the critic's targets.
    """
    # Only termination ends the future rewards. A truncated episode would have gone on, so it
    # bootstraps.
    delta = reward + gamma * (1 - terminated) * next_value - value  # [N, T]
    # The next step may belong to the next episode: no advantage flows back over an end of either
    # kind.
    not_done = 1 - (terminated | truncated)  # [N, T]

    def backwards(later, x):  # [N]
        delta, not_done = x
        now = delta + gamma * gae_lambda * not_done * later
        return now, now

    _, advantage = jax.lax.scan(
        backwards, jnp.zeros(len(reward)), (delta.T, not_done.T), reverse=True
    )
    return advantage.T  # [T, N] -> [N, T]


def normalized(advantage: jax.Array) -> jax.Array:
    """To mean 0 and standard deviation 1, [B]: a learning rate then fits rewards of any scale."""
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def clipped_objective(ratio: jax.Array, advantage: jax.Array, epsilon: float) -> jax.Array:
    """The clipped surrogate objective (Schulman et al. 2017, eq. 7), elementwise.

    A good action (advantage above 0) earns nothing more once it is 1 + epsilon times as likely, a
    bad one once it is down to 1 - epsilon. There's no limit on the other side: a step in the wrong
    direction has its full cost.
    """
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def policy_loss(
    log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array, epsilon: float
) -> jax.Array:
    """Minus the surrogate objective on top of this file, without its penalty; [B] each -> []."""
    ratio = jnp.exp(log_prob - old_log_prob)  # 1 at the first gradient step
    return -clipped_objective(ratio, advantage, epsilon).mean()


def actor_loss(c: Constants, actor: MLP, batch: Batch) -> jax.Array:
    """`policy_loss` of the policy that `actor` is now, and the penalty."""
    new = policy(actor, batch.obs)
    advantage = normalized(batch.advantage) if c.NORMALIZE_ADVANTAGES else batch.advantage
    # the KL penalty (Schulman et al. 2017, eq. 8)
    penalty = c.BETA * tfd.kl_divergence(tfd.Normal(batch.mean, batch.sigma), new).mean()
    return (
        policy_loss(new.log_prob(batch.action), batch.log_prob, advantage, c.CLIP_EPSILON) + penalty
    )


def critic_loss(critic: MLP, batch: Batch) -> jax.Array:
    """Mean squared error against the targets, which stay fixed while the critic learns; []."""
    return jnp.mean((batch.returns - value(critic, batch.obs)) ** 2)


# %% PPO -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of the loops."""

    actor: MLP
    critic: MLP
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    env_step: jax.Array  # int32 [], environment steps so far
    num_updates: jax.Array  # int32 [], rollouts so far
    env_state: EnvState  # each leaf [N, ...]: a rollout begins where the last one stopped
    rng: jax.Array  # the key that all others are split off


def update(c: Constants, agent: Agent) -> tuple[Agent, dict[str, jax.Array]]:
    """One iteration of PPO (Schulman et al. 2017, algorithm 1), in four phases.

    Also returns the metrics of `Log`, a pair (part, whole) each.
    """
    rng, collect_rng, learn_rng = jax.random.split(agent.rng, 3)
    # 1. collect: play ROLLOUT_STEPS steps of NUM_ENVS environments with the policy as it is
    agent, rollout = collect(c, agent, collect_rng)
    # 2. judge: an advantage for each step, from the last one to the first
    batch = judge(c, rollout)
    # 3. learn: NUM_EPOCHS passes over the rollout, in mini-batches, on the clipped objective
    agent, value_loss = learn(c, agent, batch, learn_rng)
    # 4. discard the rollout: the policy that sampled its actions has changed

    ended = rollout.transition.terminated | rollout.transition.truncated  # [N, T]
    metrics = {  # (part, whole): `train_row` adds up both before it divides
        "episode_return": (jnp.where(ended, rollout.episode_return, 0.0).sum(), ended.sum()),
        "explained_variance": (batch.returns.var() - batch.advantage.var(), batch.returns.var()),
        "value_loss": (value_loss, 1),
    } | {name: (metric, 1) for name, metric in compare_policies(c, agent.actor, batch).items()}
    env_step = agent.env_step + c.NUM_ENVS * c.ROLLOUT_STEPS
    return agent._replace(env_step=env_step, num_updates=agent.num_updates + 1, rng=rng), metrics


def collect(c: Constants, agent: Agent, rng: jax.Array) -> tuple[Agent, Rollout]:
    """ROLLOUT_STEPS steps of every environment, all by one and the same policy."""

    def one_step(env_state: EnvState, rng: jax.Array):
        action_rng, reset_rng = jax.random.split(rng)
        old = policy(agent.actor, env_state.obs)
        action = old.sample(seed=action_rng)  # [N], beyond +-2 at will: see `ENV.step`
        next_state, transition = jax.vmap(ENV.step)(env_state, action)
        ended = transition.terminated | transition.truncated  # [N]
        row = Rollout(
            transition,
            old.log_prob(action),
            old.loc,
            old.scale,
            value(agent.critic, transition.obs),
            value(agent.critic, transition.next_obs),
            next_state.episode_return,
        )
        first = jax.vmap(ENV.reset)(jax.random.split(reset_rng, c.NUM_ENVS))
        return new_where_ended(ended, first, next_state), row

    env_state, rollout = jax.lax.scan(
        one_step, agent.env_state, jax.random.split(rng, c.ROLLOUT_STEPS)
    )
    rollout = jax.tree.map(lambda x: x.swapaxes(0, 1), rollout)  # [T, N, ...] -> [N, T, ...]
    return agent._replace(env_state=env_state), rollout


def judge(c: Constants, rollout: Rollout) -> Batch:
    """How much better each step went than the critic expected, and the critic's targets."""
    steps = rollout.transition  # each [N, T, ...]
    advantage = gae(  # [N, T]
        steps.reward,
        rollout.value,
        rollout.next_value,
        steps.terminated,
        steps.truncated,
        c.GAMMA,
        c.GAE_LAMBDA,
    )
    old = rollout.log_prob, rollout.mean, rollout.sigma
    rows = Batch(steps.obs, steps.action, *old, advantage, advantage + rollout.value)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)  # [N, T, ...] -> [B, ...]


def learn(c: Constants, agent: Agent, batch: Batch, rng: jax.Array) -> tuple[Agent, jax.Array]:
    """NUM_EPOCHS passes over the rollout in shuffled mini-batches; also the mean value loss."""

    def one_minibatch(agent: Agent, rows: jax.Array) -> tuple[Agent, jax.Array]:
        return agent, train_step(c, agent, jax.tree.map(lambda x: x[rows], batch))

    epochs = jax.random.split(rng, c.NUM_EPOCHS)
    shuffled = jax.vmap(lambda rng: jax.random.permutation(rng, len(batch.obs)))(epochs)
    agent, value_loss = jax.lax.scan(one_minibatch, agent, shuffled.reshape(-1, c.MINIBATCH_SIZE))
    return agent, value_loss.mean()


def train_step(c: Constants, agent: Agent, batch: Batch) -> jax.Array:
    """A gradient step of actor and critic, which changes both in place; the critic's loss []."""
    gradient = nnx.grad(partial(actor_loss, c))(agent.actor, batch)
    agent.actor_optimizer.update(agent.actor, gradient)
    value_loss, gradient = nnx.value_and_grad(critic_loss)(agent.critic, batch)
    agent.critic_optimizer.update(agent.critic, gradient)
    return value_loss


def compare_policies(c: Constants, actor: MLP, batch: Batch) -> dict[str, jax.Array]:
    """How far the actor has moved on a rollout, metrics of `Log`, float32 [] each."""
    new = policy(actor, batch.obs)
    log_ratio = new.log_prob(batch.action) - batch.log_prob  # [B]
    return {
        "entropy": new.entropy().mean(),
        "sigma": new.scale.mean(),
        "kl": tfd.kl_divergence(tfd.Normal(batch.mean, batch.sigma), new).mean(),
        "approx_kl": jnp.mean(jnp.expm1(log_ratio) - log_ratio),  # Schulman 2020: never negative
        "clip_fraction": jnp.mean(jnp.abs(jnp.expm1(log_ratio)) > c.CLIP_EPSILON),
    }


# %% Training --------------------------------------------------------------------------------------
class Log(NamedTuple):
    """One row for each EVAL_INTERVAL; after training [NUM_SEEDS, rows]."""

    env_step: jax.Array  # int32, environment steps so far
    num_updates: jax.Array  # int32, rollouts so far
    eval_return: jax.Array  # greedy policy, a mean over a few episodes in the JAX environment
    # means over the rollouts of the interval:
    episode_return: jax.Array  # of the policy that samples its actions; nan if no episode ended
    # 1 - Var(returns - V) / Var(returns), of V before it learned from them
    explained_variance: jax.Array
    value_loss: jax.Array
    # after the last epoch, new policy against old on the whole rollout:
    entropy: jax.Array  # nats, of the new policy
    sigma: jax.Array  # newton meters, of the same
    kl: jax.Array  # KL(old || new), exact
    approx_kl: jax.Array  # the same, estimated from the sampled actions (k3)
    clip_fraction: jax.Array  # share of ratios outside 1 +- CLIP_EPSILON


SHOWN = [
    "episode_return",
    "eval_return",
    "explained_variance",
    "approx_kl",
    "clip_fraction",
    "entropy",
]


def adam(c: Constants, learning_rate: float) -> optax.GradientTransformation:
    """Adam, whose rate falls in a straight line, on gradients of a limited length."""
    num_updates = c.NUM_STEPS * c.NUM_EPOCHS // c.MINIBATCH_SIZE
    schedule = optax.linear_schedule(
        learning_rate, learning_rate * c.LEARNING_RATE_END, num_updates
    )
    return optax.chain(optax.clip_by_global_norm(c.MAX_GRAD_NORM), optax.adam(schedule))


def make_agent(c: Constants, seed: jax.Array) -> Agent:
    """Untrained networks, their optimizers, and NUM_ENVS first states."""
    rng, actor_rng, critic_rng, reset_rng = jax.random.split(jax.random.key(seed), 4)
    actor, critic = make_networks(c, actor_rng, critic_rng)
    return Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, adam(c, c.ACTOR_LEARNING_RATE), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, adam(c, c.CRITIC_LEARNING_RATE), wrt=nnx.Param),
        env_step=jnp.int32(0),
        num_updates=jnp.int32(0),
        env_state=jax.vmap(ENV.reset)(jax.random.split(reset_rng, c.NUM_ENVS)),
        rng=rng,
    )


def train_row(c: Constants, agent: Agent) -> tuple[Agent, Log]:
    """EVAL_INTERVAL steps of one seed, then a look at its greedy policy: one row of the log."""

    def one_update(agent: Agent, _: None):
        return update(c, agent)

    num_rollouts = c.EVAL_INTERVAL // (c.NUM_ENVS * c.ROLLOUT_STEPS)
    agent, metrics = jax.lax.scan(one_update, agent, length=num_rollouts)
    means = {name: part.sum() / whole.sum() for name, (part, whole) in metrics.items()}
    eval_return = quick_evaluate(ENV, policy, agent.actor)
    return agent, Log(agent.env_step, agent.num_updates, eval_return, **means)


def train(c: Constants) -> tuple[Agent, Log, float]:
    """Trains all seeds, a row at a time: agents [NUM_SEEDS, ...], log [NUM_SEEDS, rows], compile
    seconds.
    """
    # All functions above are for one seed. vmap trains all seeds side by side, an agent each.
    agents = jax.jit(jax.vmap(partial(make_agent, c)))(c.SEED + jnp.arange(c.NUM_SEEDS))
    all_seeds = jax.jit(jax.vmap(partial(train_row, c)))
    all_seeds, compile_seconds = runs.compiled(all_seeds, agents)
    log = []
    for _ in runs.until_ctrl_c(range(c.NUM_STEPS // c.EVAL_INTERVAL)):
        agents, row = all_seeds(agents)
        log.append(jax.device_get(row))
        environments.print_row(c.NUM_STEPS, SHOWN, log)
    return agents, runs.columns(log), compile_seconds


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains all seeds, evaluates them, fills the run's folder. Returns what result.json holds."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    runs.start_jax()
    run_dir = runs.open_run("pendulum", c)
    rollout = f"{c.NUM_ENVS} x {c.ROLLOUT_STEPS}"
    print(
        f"{c.NUM_SEEDS} seeds x {c.NUM_STEPS:,} steps of {ENV.id} in rollouts of {rollout}, "
        f"in {run_dir}"
    )
    agents, log, compile_seconds = train(c)
    runs.write_log(run_dir, log, c.SEED)
    print(f"trained; now {c.EVAL_EPISODES} greedy episodes each")
    eval_return = evaluate(ENV, policy, agents.actor, c.EVAL_EPISODES).mean(axis=1)  # [NUM_SEEDS]
    environments.print_returns(c.SEED, eval_return)
    pictures.draw_ppo_curve(run_dir / "learning_curve.png", log)
    pictures.draw_clipped_objective(
        run_dir / "clipped_objective.png", clipped_objective, c.CLIP_EPSILON
    )
    trained, critic = (
        jax.tree.map(lambda x: x[0], network) for network in (agents.actor, agents.critic)
    )
    untrained, _ = make_networks(c, jax.random.key(c.SEED), jax.random.key(c.SEED))
    played = pictures.record_gif(run_dir / "pendulum.gif", policy, untrained, trained)
    pictures.draw_value_function(run_dir / "value_function.png", partial(value, critic), played)
    result = {
        "eval_return": eval_return.tolist(),
        "env_steps": log.env_step[:, -1].tolist(),
        "compile_seconds": compile_seconds,
    }
    return runs.finish(run_dir, started, result)


if __name__ == "__main__":
    settings.run(main)
