"""GRPO on MNIST: guess each digit G times, and compare the guesses with each other. No critic.

An image is the observation, a guessed digit the action, 1 the reward of the right digit, 0 of every other;
the episode is over after one guess. For each image G guesses are drawn. To be maximized is PPO's clipped
surrogate objective, with an advantage counted inside the group (DeepSeekMath, arXiv 2402.03300, eq. 3):

    A_i = (R_i - mean(R_1 ... R_G)) / std(R_1 ... R_G)
    J   = mean [ min(ratio_i * A_i, clip(ratio_i, 1 - epsilon, 1 + epsilon_high) * A_i) - beta * KL_i ]
    ratio_i = pi(a_i | s) / pi_old(a_i | s)              the importance weight

The clip plays the part of a trust region around the policy that guessed; the KL holds the policy near a
frozen reference. Beside GRPO, on the same images in the same order: PPO with a critic, REINFORCE without a
baseline (`judge` has the difference), and cross-entropy, which is told the digit: the supervised reference.

Read first: `update`, the four phases; `group_std`; `policy_loss`.

What is *not* here, and why: no tokens (one guess is a whole answer, so length normalization has nothing to
do), no discount, GAE or bootstrapping (an episode has one step), no refilling of groups that are dropped
(DAPO draws others in their place), no reward model (the label is the judge), no entropy bonus (the KL to the
untrained network keeps the entropy up).

    python 4_GRPO_MNIST/grpo_mnist.py MNIST_PATH=subset      # packaged subset: 9 s, and 18 to compile
    python 4_GRPO_MNIST/grpo_mnist.py NUM_GENERATIONS=2 ADVANTAGE=group
    python 4_GRPO_MNIST/grpo_mnist.py MNIST_PATH=mnist.npz   # all of MNIST: 107 s, and 17 to compile
    python 4_GRPO_MNIST/study.py MNIST_PATH=mnist.npz        # every row of the study: 33 minutes

Measured after imports on 2 cores of a Xeon, no accelerator: every run trains four methods, five seeds each.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# What was compiled is kept from run to run: another SEED compiles nothing. Safe to delete.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "runs/compiled")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tensorflow_probability.substrates.jax import distributions as tfd

import data as mnist
import pictures
import settings

# %% Constants ------------------------------------------------------------------------------------------
# Data
MNIST_PATH = ""  # empty: tensorflow-datasets (offline: the subset); subset: that one; or Keras's .npz file
DATA_DIR = "~/tensorflow_datasets"  # where tensorflow-datasets keeps mnist

# The group
NUM_GENERATIONS = 8  # G, guesses for each image
ADVANTAGE = "group_std"  # group_std (DeepSeekMath), group (Dr. GRPO), batch_mean, leave_one_out (RLOO)
SKIP_ZERO_VARIANCE = False  # True: groups whose rewards are all equal do not count in GRPO's mean

# The update
NUM_ITERATIONS = 1  # mu, updates for each batch of guesses; with 1 the ratio is 1 and the clip never binds
CLIP_EPSILON = 0.2  # how far the ratio counts below 1; inf: no clip
CLIP_EPSILON_HIGH = 0.2  # ... and above 1; 0.28 is DAPO's clip-higher; inf: no clip
BETA = 0.1  # weight of the KL to the frozen reference, the untrained network; 0: no reference is kept
KL_ESTIMATOR = "k3"  # k1, k2, k3 (Schulman 2020); as a loss each pulls another way, see their docstrings

# Training
BATCH_SIZE = 128  # images per update; the guesses are G times as many
MICRO_BATCH_SIZE = 0  # images per gradient pass, added up over the batch; 0: the whole batch at once
NUM_EPOCHS = 10  # passes over the training images
LEARNING_RATE = 0.003  # Adam's, at its peak; falls to 0 along half a cosine
WARMUP_FRACTION = 0.1  # share of the updates in which it rises from 0; 0: early haste can lose a digit
HIDDEN_SIZE = 128  # of both hidden layers

# The run
SEED = 0  # draws weights, order of the images, guesses
NUM_SEEDS = 5  # SEED, SEED + 1, ...: trained side by side by jax.vmap
LOGS_PER_EPOCH = 2  # rows of log.csv per epoch, each with a look at the validation images
RUN_DIR = ""  # empty: runs/grpo_mnist/<time>

DEFAULTS = settings.constants(globals())


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets the constants above: DEFAULTS, changed by `NAME=value` arguments. Raises settings.UserError."""
    return settings.configure(globals(), arguments)


# %% Environment ----------------------------------------------------------------------------------------
NUM_PIXELS, NUM_DIGITS = mnist.NUM_PIXELS, mnist.NUM_DIGITS


def pixels(images: jax.Array) -> jax.Array:
    """The observation: uint8 0 to 255 -> float32 0 to 1."""
    return images.astype(jnp.float32) / 255


def step(label: jax.Array, action: jax.Array) -> jax.Array:
    """The reward: 1 for the right digit, 0 for every other; [B], [B, G] -> float32 [B, G]."""
    return (action == label[:, None]).astype(jnp.float32)


# %% Networks -------------------------------------------------------------------------------------------
class Actor(nnx.Module):
    """pi(. | image), the distribution of the guess: 784 - 128 - 128 - 10, float32."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(NUM_PIXELS, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, NUM_DIGITS, rngs=rngs)

    def __call__(self, obs: jax.Array) -> tfd.Categorical:
        """Observations [..., 784] to a distribution over digits of batch shape [...]."""
        x = nnx.relu(self.hidden_1(obs))
        x = nnx.relu(self.hidden_2(x))
        return tfd.Categorical(logits=self.output(x))


class Critic(nnx.Module):
    """V(image), the share of right guesses to expect: 784 - 128 - 128 - 1, float32. Only PPO looks at it."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(NUM_PIXELS, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, 1, rngs=rngs)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Observations [..., 784] to values [...]."""
        x = nnx.relu(self.hidden_1(obs))
        x = nnx.relu(self.hidden_2(x))
        return self.output(x)[..., 0]


# %% Training -------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """Everything that changes while learning; the carry of jax.lax.scan."""

    actor: Actor
    critic: Critic  # where nothing looks at it, XLA removes it from the program
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer


class Rollout(NamedTuple):
    """What one policy guessed; B = BATCH_SIZE, G = NUM_GENERATIONS."""

    obs: jax.Array  # float32 [B, 784]
    label: jax.Array  # int32 [B]
    action: jax.Array  # int32 [B, G]
    reward: jax.Array  # float32 [B, G]
    log_prob: jax.Array  # float32 [B, G], of the action, by the policy that drew it
    reference_log_prob: jax.Array  # float32 [B, G], by the frozen reference
    entropy: jax.Array  # float32 [B], of that policy, nats


class Batch(NamedTuple):
    """Images to learn from. A loss is a sum over them of weight * loss."""

    obs: jax.Array  # float32 [B, 784]
    label: jax.Array  # int32 [B], only the supervised reference looks at it
    action: jax.Array  # int32 [B, G]
    reward: jax.Array  # float32 [B, G], the critic's targets
    log_prob: jax.Array  # float32 [B, G], of the old policy
    reference_log_prob: jax.Array  # float32 [B, G]
    advantage: jax.Array  # float32 [B, G]
    weight: jax.Array  # float32 [B], sums to 1 over the whole batch: its parts' sums add up to the whole


class Log(NamedTuple):
    """One row for each part of an epoch, means over its updates; after training [NUM_SEEDS, rows]."""

    images: jax.Array  # int32, seen so far
    validation_accuracy: jax.Array  # of the likeliest digit: greedy
    validation_sampled_accuracy: jax.Array  # of a drawn digit
    reward: jax.Array  # share of right guesses
    advantage_std: jax.Array
    zero_variance: jax.Array  # share of groups without signal: all right or all wrong
    entropy: jax.Array  # of the policy that guessed, nats
    clip_fraction: jax.Array = np.nan  # share of guesses where the clip binds; nan: no surrogate objective
    kl: jax.Array = np.nan  # KL to the reference as KL_ESTIMATOR has it; nan: no reference


def train_seeds(
    data: mnist.Data, method: str, report: Callable[[Log], None] | None = None
) -> tuple[Agent, Log, float]:
    """Compiles and trains all seeds as one program.

    Args:
        data, method, report: see `train`.

    Returns:
        What `train` returns, each leaf with a leading axis [NUM_SEEDS], the log as numpy arrays; seconds of
        compiling.
    """
    started = time.perf_counter()
    rngs = jax.vmap(jax.random.key)(SEED + jnp.arange(NUM_SEEDS))
    agent_rngs, rngs = jax.vmap(jax.random.split)(rngs).T  # [2, NUM_SEEDS]
    num_updates = NUM_EPOCHS * LOGS_PER_EPOCH * updates_per_row(len(data.images)) * num_iterations(method)
    agents = make_agents(agent_rngs, num_updates)
    train_one = functools.partial(train, method=method, report=report)
    train_all = jax.vmap(train_one, in_axes=(0, 0, None), axis_name="seed")
    compiled = jax.jit(train_all).lower(agents, rngs, data).compile()
    compile_seconds = time.perf_counter() - started
    agents, log = jax.block_until_ready(compiled(agents, rngs, data))
    jax.effects_barrier()  # the last report has been made
    return agents, jax.tree.map(np.asarray, log), compile_seconds


def train(
    agent: Agent, rng: jax.Array, data: mnist.Data, method: str, report: Callable[[Log], None] | None
) -> tuple[Agent, Log]:
    """One seed's whole training, a pure function: jax.jit compiles it, jax.vmap runs it for many seeds.

    Must be mapped with `jax.vmap(..., axis_name="seed")`.

    Args:
        agent: untrained.
        rng: equal keys see the images in one order, by any method.
        data: images and labels.
        method: a key of LOSSES.
        report: called on the host with each row of the log, averaged over the seeds.

    Returns:
        The agent at the end, and the log [rows].
    """
    reference = agent.actor  # frozen: the scan below changes its own copy of the agent

    def learn_and_evaluate(agent: Agent, x):
        """The updates of one row of the log, then a look at the validation images."""
        images, index, rngs = x

        def one_update(agent: Agent, x):
            index, rng = x
            return update(agent, reference, pixels(data.images[index]), data.labels[index], rng, method)

        agent, figures = jax.lax.scan(one_update, agent, (index, rngs))
        accuracies = evaluate(agent.actor, data.validation_images, data.validation_labels)
        log = Log(images, *accuracies, **{name: figure.mean() for name, figure in figures.items()})
        if report:  # of a mean over the seeds the host hears once, not once per seed
            jax.debug.callback(report, jax.lax.pmean(log, "seed"))
        return agent, log

    shuffle = functools.partial(shuffled, num_images=len(data.images))
    epochs = jax.vmap(shuffle)(jax.random.split(rng, NUM_EPOCHS))  # [epochs, LOGS_PER_EPOCH, ...]
    index, rngs = (x.reshape(-1, *x.shape[2:]) for x in epochs)  # [rows, updates, B] and [rows, updates]
    images = (1 + jnp.arange(len(index))) * index[0].size
    return jax.lax.scan(learn_and_evaluate, agent, (images, index, rngs))


def updates_per_row(num_images: int) -> int:
    """Batches between two rows of the log. Raises settings.UserError where the images do not fill one."""
    updates = num_images // BATCH_SIZE // LOGS_PER_EPOCH
    if not updates:
        raise settings.UserError(
            f"BATCH_SIZE={BATCH_SIZE}: {LOGS_PER_EPOCH} batches (LOGS_PER_EPOCH) are more than the "
            f"{num_images} training images; lower one of them"
        )
    return updates


def shuffled(rng: jax.Array, num_images: int) -> tuple[jax.Array, jax.Array]:
    """One epoch: indices of images, int32 [LOGS_PER_EPOCH, updates, BATCH_SIZE], and a key for each batch."""
    order_rng, guess_rng = jax.random.split(rng)
    shape = LOGS_PER_EPOCH, updates_per_row(num_images)
    # Each epoch leaves out other images: those that fill no batch.
    order = jax.random.permutation(order_rng, num_images)[: shape[0] * shape[1] * BATCH_SIZE]
    return order.reshape(*shape, BATCH_SIZE), jax.random.split(guess_rng, shape)


def make_agent(rng: jax.Array, num_updates: int) -> Agent:
    """Untrained networks and their optimizers, whose rate is 0 after `num_updates`."""
    warmup = int(WARMUP_FRACTION * num_updates)
    schedule = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, warmup, num_updates)
    actor_rng, critic_rng = jax.random.split(rng)
    actor, critic = Actor(nnx.Rngs(actor_rng)), Critic(nnx.Rngs(critic_rng))
    return Agent(
        actor=actor,
        critic=critic,
        actor_optimizer=nnx.Optimizer(actor, optax.adam(schedule), wrt=nnx.Param),
        critic_optimizer=nnx.Optimizer(critic, optax.adam(schedule), wrt=nnx.Param),
    )


@functools.partial(jax.jit, static_argnames="num_updates")
def make_agents(rngs: jax.Array, num_updates: int) -> Agent:
    """`make_agent` for each seed: a program of its own, compiled once for all methods."""
    return jax.vmap(functools.partial(make_agent, num_updates=num_updates))(rngs)


def update(
    agent: Agent, reference: Actor, obs: jax.Array, label: jax.Array, rng: jax.Array, method: str
) -> tuple[Agent, dict[str, jax.Array]]:
    """The four phases of GRPO on a batch of images; returns the figures of `Log` as well."""
    # 1. collect
    rollout = collect(agent.actor, reference, obs, label, rng)
    # 2. judge
    batch = judge(rollout, agent.critic, method)
    # 3. learn
    agent, learned = learn(agent, batch, method)
    # 4. discard: the rollout ends here. Its log-probs are those of a policy that is gone.
    figures = {
        "reward": rollout.reward.mean(),
        "advantage_std": batch.advantage.std(),
        "zero_variance": 1 - has_signal(rollout.reward).mean(),
        "entropy": rollout.entropy.mean(),
    }
    return agent, figures | learned


def collect(actor: Actor, reference: Actor, obs: jax.Array, label: jax.Array, rng: jax.Array) -> Rollout:
    """G guesses for each image [B, 784], all by one and the same policy, and their rewards."""
    policy = actor(obs)
    action = policy.sample(NUM_GENERATIONS, seed=rng).T  # [G, B] -> [B, G]
    log_prob = policy[:, None].log_prob(action)  # [B, 1] against [B, G]
    reference_log_prob = reference(obs)[:, None].log_prob(action) if BETA else log_prob
    reward, entropy = step(label, action), policy.entropy()
    return Rollout(obs, label, action, reward, log_prob, reference_log_prob, entropy)


def judge(rollout: Rollout, critic: Critic, method: str) -> Batch:
    """How much better each guess was than expected: of its group, by PPO's critic, by nobody."""
    weight = jnp.full(len(rollout.reward), 1 / len(rollout.reward))  # [B]
    if method == "ppo":
        advantage = critic_baseline(rollout.reward, critic(rollout.obs))
    elif method == "reinforce":
        advantage = no_baseline(rollout.reward)
    else:
        advantage = ADVANTAGES[ADVANTAGE](rollout.reward)
        if SKIP_ZERO_VARIANCE and method == "grpo":
            counted = has_signal(rollout.reward)
            weight = counted / jnp.maximum(counted.sum(), 1)
    return Batch(*rollout[:-1], advantage, weight)  # all but the entropy


def learn(agent: Agent, batch: Batch, method: str) -> tuple[Agent, dict[str, jax.Array]]:
    """The gradient steps on one batch, which change the agent in place; figures of the last one."""
    for _ in range(num_iterations(method)):
        gradients, figures = gradient(LOSSES[method], agent.actor, batch)
        agent.actor_optimizer.update(agent.actor, gradients)
        if method == "ppo":
            gradients, _ = gradient(critic_loss, agent.critic, batch)
            agent.critic_optimizer.update(agent.critic, gradients)
    return agent, figures


def num_iterations(method: str) -> int:
    """Gradient steps per batch: supervised learning has no guesses to use again."""
    return NUM_ITERATIONS if LOSSES[method] is policy_loss else 1


def gradient(loss: Callable, model: nnx.Module, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient over the whole batch, MICRO_BATCH_SIZE images at a time.

    The parts are added, not averaged: the weights already hold the divisor of the whole batch. A mean of the
    parts' means would be another gradient as soon as groups are skipped.
    """
    # A model made outside a scan cannot be used inside: its weights can.
    graph, weights = nnx.split(model, nnx.Param)
    compute = jax.grad(lambda weights, batch: loss(nnx.merge(graph, weights), batch), has_aux=True)
    if not MICRO_BATCH_SIZE:
        return compute(weights, batch)
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, MICRO_BATCH_SIZE, *leaf.shape[1:]), batch)

    def add(total, part):
        gradients, figures = compute(weights, part)
        return jax.tree.map(jnp.add, total, gradients), figures

    total, figures = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), parts)
    return total, jax.tree.map(lambda leaf: leaf.mean(axis=0), figures)


# %% Algorithm ------------------------------------------------------------------------------------------
# reward [B, G] -> advantage [B, G]; a row is a group: the G guesses for one image
STD_EPSILON = 1e-6  # against 0 / 0


def group_std(reward: jax.Array) -> jax.Array:
    """GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): how many standard deviations above the group.

    The standard deviation is the sample's (divides by G - 1), as in Tunix and TRL; the paper does not say.
    """
    # A_i = (R_i - mean(R)) / std(R)
    return group(reward) / (reward.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON)


def group(reward: jax.Array) -> jax.Array:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): how far above the group's mean; no division."""
    # A_i = R_i - mean(R)
    return reward - reward.mean(axis=1, keepdims=True)


def batch_mean(reward: jax.Array) -> jax.Array:
    """One baseline for all images (Williams 1992): an easy image counts as good guessing. Not a group."""
    # A_i = R_i - mean over all groups
    return reward - reward.mean()


def leave_one_out(reward: jax.Array) -> jax.Array:
    """RLOO (Kool et al. 2019; arXiv 2402.14740, section 3.3): the baseline is the *other* guesses' mean."""
    # A_i = R_i - 1 / (G - 1) * sum_{j != i} R_j
    others = (reward.sum(axis=1, keepdims=True) - reward) / (reward.shape[1] - 1)
    return reward - others


def critic_baseline(reward: jax.Array, value: jax.Array) -> jax.Array:
    """PPO: how far above what the critic expects of the image, value [B]."""
    return reward - value[:, None]  # [B, 1]: a value [B] would be subtracted along the wrong axis


def no_baseline(reward: jax.Array) -> jax.Array:
    """REINFORCE (Williams 1992): the reward itself."""
    return reward


ADVANTAGES = {function.__name__: function for function in (group_std, group, batch_mean, leave_one_out)}


def has_signal(reward: jax.Array) -> jax.Array:
    """Whether a group holds right and wrong guesses, bool [B]; else every advantage of it is 0."""
    return reward.min(axis=1) < reward.max(axis=1)


def policy_loss(actor: Actor, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Minus the surrogate objective on top of this file, and figures of `Log`; float32 [] each."""
    log_prob = actor(batch.obs)[:, None].log_prob(batch.action)  # [B, G]
    ratio = jnp.exp(log_prob - batch.log_prob)  # 1 at the first gradient step
    objective = clipped_objective(ratio, batch.advantage)
    kl = KL_ESTIMATORS[KL_ESTIMATOR](batch.reference_log_prob - log_prob)
    loss = -(objective - BETA * kl).mean(axis=1)  # [B], mean over the group
    figures = {"clip_fraction": jnp.mean(objective < ratio * batch.advantage)}
    return (batch.weight * loss).sum(), figures | ({"kl": kl.mean()} if BETA else {})


def clipped_objective(ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """PPO's (arXiv 1707.06347, eq. 7), with a bound for each side (DAPO, arXiv 2503.14476, eq. 10)."""
    clipped = jnp.clip(ratio, 1 - CLIP_EPSILON, 1 + CLIP_EPSILON_HIGH)
    return jnp.minimum(ratio * advantage, clipped * advantage)


# log_ref_ratio = log pi_ref(a) - log pi(a) of a guess drawn from pi; the mean over guesses estimates
# KL(pi || pi_ref). Schulman 2020, "Approximating KL Divergence".
def k1(log_ref_ratio: jax.Array) -> jax.Array:
    """Unbiased, often negative. As a loss it does nothing: its expected gradient is 0."""
    return -log_ref_ratio


def k2(log_ref_ratio: jax.Array) -> jax.Array:
    """Biased, never negative. As a loss it is right: its expected gradient is that of KL(pi || pi_ref)."""
    return log_ref_ratio**2 / 2


def k3(log_ref_ratio: jax.Array) -> jax.Array:
    """Unbiased, never negative, low variance (DeepSeekMath eq. 4). As a loss it is another KL.

    Its value estimates KL(pi || pi_ref), but its expected gradient is that of KL(pi_ref || pi). The guesses
    are held fixed, so grad k3 = (1 - pi_ref / pi) grad log pi, of which the mean over pi is
    sum_a (pi - pi_ref) grad log pi = -sum_a pi_ref grad log pi, since sum_a pi grad log pi = 0.
    """
    return jnp.expm1(log_ref_ratio) - log_ref_ratio  # e^x - 1 - x


KL_ESTIMATORS = {function.__name__: function for function in (k1, k2, k3)}


def critic_loss(critic: Critic, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(V(image) - R)^2 / 2: PPO's critic learns the share of right guesses, image by image."""
    value = critic(batch.obs)[:, None]  # [B, 1]: against reward [B, G] this broadcasts along the group
    return (batch.weight * ((value - batch.reward) ** 2 / 2).mean(axis=1)).sum(), {}


def cross_entropy_loss(actor: Actor, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-log pi(right digit): supervised learning, which is told the answer instead of being graded."""
    loss = optax.softmax_cross_entropy_with_integer_labels(actor(batch.obs).logits, batch.label)  # [B]
    return (batch.weight * loss).sum(), {}


LOSSES = {
    "grpo": policy_loss,
    "cross_entropy": cross_entropy_loss,  # it guesses, too, but only for the log
    "ppo": policy_loss,
    "reinforce": policy_loss,
}


# %% Evaluation -----------------------------------------------------------------------------------------
def evaluate(actor: Actor, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accuracy of the likeliest digit, and of a drawn one (the expectation: computed, not drawn)."""
    policy = actor(pixels(images))
    right = jnp.take_along_axis(policy.probs_parameter(), labels[:, None], axis=1)  # [N, 1]
    return (policy.mode() == labels).mean(), right.mean()


def final_rows(method: str, agents: Agent, log: Log, data: mnist.Data | None) -> list[dict[str, Any]]:
    """What came of a training, a row for each seed: the log's last accuracies, and those on the test images.

    Nothing else looks at the test images, which is why constants are chosen without them (data None).
    """
    accuracies = {name: getattr(log, name)[:, -1] for name in Log._fields if name.startswith("validation")}
    if data:
        evaluate_all = jax.jit(jax.vmap(evaluate, in_axes=(0, None, None)))
        greedy, sampled = evaluate_all(agents.actor, data.test_images, data.test_labels)  # [NUM_SEEDS]
        accuracies |= {"test_accuracy": greedy, "test_sampled_accuracy": sampled}
    return [
        {"method": method, "seed": SEED + i} | {name: x[i].item() for name, x in accuracies.items()}
        for i in range(NUM_SEEDS)
    ]


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains every method of LOSSES, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: test_accuracy and twin_test_accuracy (greedy; GRPO and its twin by
        cross-entropy, a list over the seeds), data (which was used), seconds (wall time after imports, data
        and compiling included), compile_seconds.

    Raises:
        settings.UserError: see `settings.configure`, `read_mnist`, `updates_per_row`, `settings.open_run`.
    """
    started = time.perf_counter()
    constants = configure(arguments)
    data, source = mnist.read_mnist(MNIST_PATH, DATA_DIR)
    updates_per_row(len(data.images))
    run_dir = settings.open_run("grpo_mnist", constants)
    print(
        f"data: {source}\neach update: {BATCH_SIZE} images, {BATCH_SIZE * NUM_GENERATIONS} guesses, "
        f"{NUM_ITERATIONS} optimizer step(s); {NUM_SEEDS} seeds side by side"
    )
    logs, finals, compile_seconds = {}, {}, 0.0
    for method in LOSSES:
        with settings.progress(method, NUM_EPOCHS * LOGS_PER_EPOCH, LOGS_PER_EPOCH) as report:
            agents, logs[method], seconds = train_seeds(data, method, report)
        finals[method] = final_rows(method, agents, logs[method], data)
        compile_seconds += seconds
    rows = [row for method, log in logs.items() for row in settings.log_rows(method, log, SEED)]
    settings.write_csv(run_dir / "log.csv", rows)
    settings.write_csv(run_dir / "accuracy.csv", [row for final in finals.values() for row in final])
    pictures.draw_accuracy(run_dir / "accuracy.png", logs)

    print(f"\ntest accuracy after {NUM_EPOCHS} epochs, mean ± sample standard deviation over the seeds")
    for method, final in finals.items():
        greedy, sampled = (
            settings.percent(row[name] for row in final)
            for name in ("test_accuracy", "test_sampled_accuracy")
        )
        print(f"  {pictures.LABELS[method]:24s} greedy {greedy:18s} sampled {sampled}")
    result = {
        "test_accuracy": [row["test_accuracy"] for row in finals["grpo"]],
        "twin_test_accuracy": [row["test_accuracy"] for row in finals["cross_entropy"]],
        "data": source,
        "seconds": time.perf_counter() - started,
        "compile_seconds": compile_seconds,
    }
    settings.write_json(run_dir / "result.json", result)
    print(f"\n{result['seconds']:.1f} s, {compile_seconds:.1f} s of it compiling; the run is in {run_dir}")
    return result


if __name__ == "__main__":
    settings.run(main)
