"""What grpo_mnist.py leaves out: three baselines on the same images in the same order, other
advantages and KL estimators, groups that are skipped. The loop is grpo_mnist.py's.

METHOD=ppo has a critic in the group's place. Its advantages are not normalized, as those of folder
3's PPO are: rewards are 0 or 1 here, and need no other scale. METHOD=reinforce has no baseline and
takes one gradient step whatever NUM_ITERATIONS is: its gradient is that of the policy that guessed.
(More steps on the same guesses, with ratio and clip, would be PPO without a critic.)
METHOD=cross_entropy is told the digit: the supervised reference. METHOD=exact has the gradient of
the expected reward, which all others only sample.

    python 4_GRPO_MNIST/variants.py METHOD=ppo MNIST_PATH=subset
    python 4_GRPO_MNIST/variants.py METHOD=reinforce BETA=0.0 MNIST_PATH=mnist.npz
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import environment as env
import grpo_mnist as script
import settings
from data import NUM_DIGITS, NUM_PIXELS


@dataclass(frozen=True, kw_only=True)
class Constants(script.Constants):
    """Those of grpo_mnist.py, and what can be exchanged there."""

    # who learns, see above
    METHOD: Literal["grpo", "cross_entropy", "ppo", "reinforce", "exact"] = "grpo"
    NUM_GENERATIONS: settings.Size = 8  # G; 1 has no group: only ADVANTAGE=batch_mean takes it
    ADVANTAGE: Literal["group_std", "group", "batch_mean", "leave_one_out"] = "group_std"  # GRPO's
    # Schulman 2020; as a loss each pulls another way
    KL_ESTIMATOR: Literal["k1", "k2", "k3"] = "k3"
    # True: groups whose rewards are all equal do not count in GRPO's mean
    SKIP_ZERO_VARIANCE: bool = False

    def __post_init__(self):
        group = self.NUM_GENERATIONS > 1 or self.ADVANTAGE == "batch_mean"
        settings.check(
            self, "NUM_GENERATIONS", group, "2 or more; only ADVANTAGE=batch_mean takes 1"
        )


# %% Formulas --------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """Images to learn from. A loss is a sum over them of weight * loss."""

    obs: jax.Array  # float32 [B, 784]
    label: jax.Array  # int32 [B], only the supervised reference looks at it
    action: jax.Array  # int32 [B, G]
    reward: jax.Array  # float32 [B, G], the critic's targets
    log_prob: jax.Array  # float32 [B, G], of the old policy
    ref_log_prob: jax.Array  # float32 [B, G]
    advantage: jax.Array  # float32 [B, G]
    weight: jax.Array  # float32 [B], sums to 1


# reward [B, G] -> advantage [B, G]; a row is a group: the G guesses for one image
def group(reward: jax.Array) -> jax.Array:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): how far above the group's mean; no division."""
    # A_i = R_i - mean(R)
    return reward - reward.mean(axis=1, keepdims=True)


def batch_mean(reward: jax.Array) -> jax.Array:
    """One baseline for all images (Williams 1992): an easy image counts as good guessing. Not a
    group.
    """
    # A_i = R_i - mean over all groups
    return reward - reward.mean()


def leave_one_out(reward: jax.Array) -> jax.Array:
    """RLOO (Kool et al. 2019; arXiv 2402.14740, section 3.3): the baseline is the *other* guesses'
    mean.
    """
    # A_i = R_i - 1 / (G - 1) * sum_{j != i} R_j
    others = (reward.sum(axis=1, keepdims=True) - reward) / (reward.shape[1] - 1)
    return reward - others


ADVANTAGES = {"group_std": script.group_advantage} | {
    f.__name__: f for f in (group, batch_mean, leave_one_out)
}


# The mean over guesses sampled from pi estimates KL(pi || pi_ref). Schulman 2020.
def k1(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """Unbiased, often negative. As a loss it does nothing: its expected gradient is 0."""
    return log_prob - ref_log_prob


def k2(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """Biased, never negative. As a loss it is right: its expected gradient is that of KL(pi ||
    pi_ref).
    """
    return (log_prob - ref_log_prob) ** 2 / 2


KL_ESTIMATORS = {f.__name__: f for f in (k1, k2, script.k3)}


def actor_loss(
    c: Constants, actor: script.MLP, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`grpo_mnist.actor_loss` with weights of the images, and with any KL_ESTIMATOR."""
    log_prob = script.policy(actor, batch.obs)[:, None].log_prob(batch.action)  # [B, G]
    ratio = jnp.exp(log_prob - batch.log_prob)  # 1 at the first gradient step
    objective = script.clipped_objective(
        ratio, batch.advantage, c.CLIP_EPSILON, c.CLIP_EPSILON_HIGH
    )
    return penalized(c, objective, jnp.mean(objective < ratio * batch.advantage), log_prob, batch)


def reinforce_loss(
    c: Constants, actor: script.MLP, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Minus the mean of R log pi, penalized as the others are: no ratio and no clip."""
    log_prob = script.policy(actor, batch.obs)[:, None].log_prob(batch.action)  # [B, G]
    return penalized(c, batch.advantage * log_prob, jnp.nan, log_prob, batch)


def penalized(c: Constants, objective: jax.Array, clip_fraction, log_prob: jax.Array, batch: Batch):
    """Minus an objective [B, G] less BETA * KL, and metrics of `Log`."""
    kl = KL_ESTIMATORS[c.KL_ESTIMATOR](log_prob, batch.ref_log_prob)
    loss = -(objective - c.BETA * kl).mean(axis=1)  # [B], mean over the group
    metrics = {"clip_fraction": clip_fraction, "kl": kl.mean() if c.BETA else jnp.nan}
    return (batch.weight * loss).sum(), jax.tree.map(jnp.float32, metrics)


def critic_loss(critic: script.MLP, batch: Batch) -> jax.Array:
    """(V(image) - R)^2 / 2: PPO's critic learns the share of right guesses, image by image."""
    error = critic(batch.obs) - batch.reward  # [B, 1] against rewards [B, G]
    return (batch.weight * (error**2 / 2).mean(axis=1)).sum()


def cross_entropy_loss(c: Constants, actor: script.MLP, batch: Batch) -> tuple[jax.Array, dict]:
    """-log pi(right digit): supervised learning, which is told the answer, not graded."""
    logits = script.policy(actor, batch.obs).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.label)  # [B]
    return (batch.weight * loss).sum(), {}


def exact_loss(
    c: Constants, actor: script.MLP, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Minus the expected reward itself, summed over all ten guesses: what policy gradients only
    sample.
    """
    probs = script.policy(actor, batch.obs).probs_parameter()  # [B, 10]
    reward = jax.nn.one_hot(batch.label, NUM_DIGITS)
    # J = sum_a pi(a | image) R(a)
    return -(batch.weight * (probs * reward).sum(axis=1)).sum(), {}


LOSSES = {  # cross-entropy and exact guess, too, but only for the log
    "grpo": actor_loss,
    "ppo": actor_loss,
    "reinforce": reinforce_loss,
    "cross_entropy": cross_entropy_loss,
    "exact": exact_loss,
}


# %% GRPO and the baselines ------------------------------------------------------------------------
class Agent(NamedTuple):
    """As grpo_mnist.py's, and a critic. Where nothing uses it, XLA removes it from the program."""

    actor: script.MLP
    critic: script.MLP
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer
    reference: script.MLP
    order_rng: jax.Array
    rng: jax.Array


def update(
    c: Constants, agent: Agent, obs: jax.Array, label: jax.Array
) -> tuple[Agent, dict[str, jax.Array]]:
    """The four phases on a batch of images, as METHOD has them; also the metrics of `Log`."""
    rng, guess_rng = jax.random.split(agent.rng)
    # 1. collect
    rollout = script.collect(c, agent.actor, agent.reference, obs, label, guess_rng)
    # 2. judge
    batch = judge(c, rollout, label, agent.critic)
    # 3. learn
    agent, learned = learn(c, agent, batch)
    # 4. discard the rollout: the policy that sampled its guesses has changed

    metrics = {
        "reward": rollout.reward.mean(),
        "advantage_std": batch.advantage.std(),
        "zero_variance": 1 - script.has_signal(rollout.reward).mean(),
        "entropy": rollout.entropy.mean(),
        "clip_fraction": jnp.nan,
        "kl": jnp.nan,
    }
    return agent._replace(rng=rng), metrics | learned


def judge(c: Constants, rollout: script.Rollout, label: jax.Array, critic: script.MLP) -> Batch:
    """How much better each guess was than expected: of its group, by PPO's critic, by nobody."""
    weight = jnp.full(len(rollout.reward), 1 / len(rollout.reward))  # [B]
    if c.METHOD == "ppo":  # not normalized
        advantage = rollout.reward - critic(rollout.obs)  # V(image), [B, 1] against [B, G]
    elif c.METHOD == "reinforce":
        advantage = rollout.reward
    else:
        advantage = ADVANTAGES[c.ADVANTAGE](rollout.reward)
        if c.SKIP_ZERO_VARIANCE and c.METHOD == "grpo":
            counted = script.has_signal(rollout.reward)
            weight = counted / jnp.maximum(counted.sum(), 1)
    guesses = rollout.action, rollout.reward, rollout.log_prob, rollout.ref_log_prob
    return Batch(rollout.obs, label, *guesses, advantage, weight)


def learn(c: Constants, agent: Agent, batch: Batch) -> tuple[Agent, dict[str, jax.Array]]:
    """The gradient steps on one batch, which change the agent in place; metrics of the last one."""
    for _ in range(num_iterations(c)):
        loss = partial(LOSSES[c.METHOD], c)
        gradient, metrics = nnx.grad(loss, has_aux=True)(agent.actor, batch)
        agent.actor_optimizer.update(agent.actor, gradient)
        if c.METHOD == "ppo":
            gradient = nnx.grad(critic_loss)(agent.critic, batch)
            agent.critic_optimizer.update(agent.critic, gradient)
    return agent, metrics


def num_iterations(c: Constants) -> int:
    """Gradient steps per batch: more than one need the ratio to the policy that guessed, and its
    clip.
    """
    return c.NUM_ITERATIONS if c.METHOD in ("grpo", "ppo") else 1


# %% Training --------------------------------------------------------------------------------------
def make_agent(c: Constants, seed: jax.Array, num_images: int) -> Agent:
    """Untrained networks and their optimizers; actor and keys are grpo_mnist.py's."""
    rng, actor_rng, order_rng = jax.random.split(jax.random.key(seed), 3)
    rngs = nnx.Rngs(actor_rng)  # first the actor's weights, so that they are grpo_mnist.py's
    actor = script.MLP(NUM_PIXELS, c.HIDDEN_SIZE, NUM_DIGITS, rngs)
    critic = script.MLP(NUM_PIXELS, c.HIDDEN_SIZE, 1, rngs)
    num_updates = (
        c.NUM_EPOCHS * c.LOGS_PER_EPOCH * env.updates_per_row(c, num_images) * num_iterations(c)
    )
    return Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, script.adam(c, num_updates), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, script.adam(c, num_updates), wrt=nnx.Param),
        reference=nnx.clone(actor),
        order_rng=order_rng,
        rng=rng,
    )


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """Trains with METHOD as `grpo_mnist.run` does; `arguments` are NAME=value."""
    c = settings.read(Constants, arguments)
    return script.run(c, "grpo_mnist_variants", c.METHOD, make_agent, update)


if __name__ == "__main__":
    settings.run(main)
