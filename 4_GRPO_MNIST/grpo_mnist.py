"""GRPO on MNIST: guess each digit G times, and compare the guesses with each other. No critic.

The observation is an image, and the action is a guessed digit. The reward is 1 for the right digit
and 0 for any other. The episode is over after one guess. We sample G guesses per image and maximize
PPO's clipped surrogate objective, with an advantage computed within the group (DeepSeekMath, arXiv
2402.03300, eq. 3):

    A_i = (R_i - mean(R_1 ... R_G)) / std(R_1 ... R_G)
    J   = mean [ min(ratio_i * A_i, clip(ratio_i, 1 - epsilon, 1 + epsilon_high) * A_i)
                 - beta * KL_i ]
    ratio_i = pi(a_i | s) / pi_old(a_i | s)              the importance weight

The clip acts as a trust region around the policy that guessed; the KL holds the policy near a
frozen reference.

Read first: `update`, the four phases; `group_advantage`; `actor_loss`. The file is folder 3's
ppo.py with critic, GAE and mini-batches taken out; `diff 3_Pendulum/ppo.py
4_GRPO_MNIST/grpo_mnist.py` shows how much.

What is *not* here, and why: no tokens (one guess is a whole answer, so length normalization has
nothing to do), no discount, GAE or bootstrapping (an episode has one step), no reward model (the
label is the judge), no entropy bonus (the KL to the untrained network keeps the entropy up). Other
advantages, other estimators of the KL, and three baselines (PPO with a critic, REINFORCE,
cross-entropy) are in variants.py.

    python 4_GRPO_MNIST/grpo_mnist.py MNIST_PATH=subset      # packaged subset: about 10 seconds
    python 4_GRPO_MNIST/grpo_mnist.py NUM_GENERATIONS=2 BETA=0.0
    python 4_GRPO_MNIST/grpo_mnist.py MNIST_PATH=mnist.npz   # all of MNIST: about a minute
    python 4_GRPO_MNIST/variants.py METHOD=ppo MNIST_PATH=subset
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tensorflow_probability.substrates.jax import distributions as tfd
from tqdm import tqdm

import data as mnist
import environment as env
import pictures
import runs
import settings
from settings import (
    BelowOne,
    Count,
    NonNegative,
    Positive,
    PositiveOrInf,
    Seed,
    Size,
    TwoOrMore,
    UpTo64,
)


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # --- data
    MNIST_PATH: str = ""  # empty: tensorflow-datasets (offline: subset); subset; or Keras's .npz
    DATA_DIR: str = "~/tensorflow_datasets"  # where tensorflow-datasets keeps mnist
    # --- collecting: a rollout is BATCH_SIZE images, guessed G times each, used and thrown away
    BATCH_SIZE: Size = 128  # images per update; the guesses are G times as many
    NUM_GENERATIONS: TwoOrMore = 8  # G, guesses for each image
    NUM_EPOCHS: Size = 10  # passes over the training images
    # --- learning
    LEARNING_RATE: Positive = 0.003  # Adam's, at its peak; falls to 0 along half a cosine
    # share of the updates in which it rises; 0: it may forget a digit
    WARMUP_FRACTION: BelowOne = 0.1
    # mu, updates per rollout; at 1 the ratio is 1, so the clip does nothing
    NUM_ITERATIONS: UpTo64 = 1
    CLIP_EPSILON: PositiveOrInf = 0.2  # the ratio is clipped this far below 1; inf: no clip
    # ... and above 1; 0.28 is DAPO's clip-higher; inf: no clip
    CLIP_EPSILON_HIGH: PositiveOrInf = 0.2
    # weight of the KL to the frozen reference, the untrained network; 0: no KL
    BETA: NonNegative = 0.1
    # --- networks
    HIDDEN_SIZE: Size = 128  # of both hidden layers
    # --- the run
    SEED: Seed = 0  # seed of the weights, the order of the images and the guesses
    NUM_SEEDS: Size = 5  # trained side by side: SEED, SEED + 1, ...
    # rows of log.csv per epoch, each with an evaluation on the validation images
    LOGS_PER_EPOCH: Count = 2
    RUN_DIR: str = ""  # empty: runs/grpo_mnist/<time>


# %% Networks --------------------------------------------------------------------------------------
class MLP(nnx.Module):
    """A network of two hidden layers, float32: [..., inputs] to [..., outputs]."""

    def __init__(self, inputs: int, hidden_size: int, outputs: int, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(inputs, hidden_size, rngs=rngs)
        self.hidden_2 = nnx.Linear(hidden_size, hidden_size, rngs=rngs)
        self.output = nnx.Linear(hidden_size, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden_1(x))
        x = nnx.relu(self.hidden_2(x))
        return self.output(x)


def policy(actor: MLP, obs: jax.Array) -> tfd.Categorical:
    """pi(. | s), the guess's distribution: observations [..., 784] to distributions [...]."""
    return tfd.Categorical(logits=actor(obs))


# %% Formulas --------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """Images to learn from."""

    obs: jax.Array  # float32 [B, 784]
    action: jax.Array  # int32 [B, G]
    log_prob: jax.Array  # float32 [B, G], of the old policy
    ref_log_prob: jax.Array  # float32 [B, G]
    advantage: jax.Array  # float32 [B, G]


def group_advantage(rewards: jax.Array) -> jax.Array:
    """How many standard deviations above its group a guess is (DeepSeekMath, arXiv 2402.03300,
    4.1.2).

    A row of the rewards [B, G] is a group: the G guesses for one image. The standard deviation is
    the sample's (divides by G - 1), as in Tunix and TRL; the paper does not say.
    """
    # A_i = (R_i - mean(R)) / std(R); 1e-6 against 0 / 0
    # [B, 1]
    mean, std = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, ddof=1, keepdims=True)
    return (rewards - mean) / (std + 1e-6)


def has_signal(rewards: jax.Array) -> jax.Array:
    """Whether a group has right and wrong guesses, bool [B]; if not, all its advantages are 0."""
    return rewards.min(axis=1) < rewards.max(axis=1)


def clipped_objective(
    ratio: jax.Array, advantage: jax.Array, epsilon: float, high: float
) -> jax.Array:
    """PPO's (arXiv 1707.06347, eq. 7), with a bound per side (DAPO, arXiv 2503.14476, eq. 10)."""
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + high)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def k3(log_prob: jax.Array, ref_log_prob: jax.Array) -> jax.Array:
    """KL(pi || pi_ref) of each guess sampled from pi (DeepSeekMath eq. 4; Schulman 2020),
    elementwise.

    Unbiased, never negative, low variance. As a loss it is another KL: its value estimates KL(pi ||
    pi_ref), but its expected gradient is that of KL(pi_ref || pi). The guesses are held fixed, so
    grad k3 = (1 - pi_ref / pi) grad log pi, and the mean of that over pi is
    sum_a (pi - pi_ref) grad log pi = -sum_a pi_ref grad log pi, since sum_a pi grad log pi = 0.
    """
    log_ref_ratio = ref_log_prob - log_prob
    return jnp.expm1(log_ref_ratio) - log_ref_ratio  # e^x - 1 - x


def actor_loss(c: Constants, actor: MLP, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Minus the surrogate objective on top of this file, and metrics of `Log`; float32 [] each."""
    log_prob = policy(actor, batch.obs)[:, None].log_prob(batch.action)  # [B, G]
    ratio = jnp.exp(log_prob - batch.log_prob)  # 1 at the first gradient step
    objective = clipped_objective(ratio, batch.advantage, c.CLIP_EPSILON, c.CLIP_EPSILON_HIGH)
    kl = k3(log_prob, batch.ref_log_prob)
    loss = -(objective - c.BETA * kl).mean(axis=1)  # [B], mean over the group
    metrics = {
        "clip_fraction": jnp.mean(objective < ratio * batch.advantage),
        "kl": kl.mean() if c.BETA else jnp.nan,
    }
    return loss.mean(), metrics


# %% GRPO ------------------------------------------------------------------------------------------
class Agent(NamedTuple):
    """One seed's networks, optimizer and keys; the carry of the loops."""

    actor: MLP
    actor_optimizer: nnx.Optimizer
    reference: MLP  # the untrained actor, which stays as it is
    order_rng: jax.Array  # stays as it is, too: an epoch's order of images is drawn from it
    rng: jax.Array  # the key that those of the guesses are split off


class Rollout(NamedTuple):
    """What one policy guessed; B = BATCH_SIZE, G = NUM_GENERATIONS."""

    obs: jax.Array  # float32 [B, 784]
    action: jax.Array  # int32 [B, G]
    reward: jax.Array  # float32 [B, G]
    log_prob: jax.Array  # float32 [B, G], of the action, by the policy that sampled it
    ref_log_prob: jax.Array  # float32 [B, G], by the frozen reference
    entropy: jax.Array  # float32 [B], of that policy, nats


def update(
    c: Constants, agent: Agent, obs: jax.Array, label: jax.Array
) -> tuple[Agent, dict[str, jax.Array]]:
    """A step of GRPO (DeepSeekMath, algorithm 1) on a batch of images, in four phases.

    Also returns the metrics of `Log`, float32 [] each.
    """
    rng, guess_rng = jax.random.split(agent.rng)
    # 1. collect
    rollout = collect(c, agent.actor, agent.reference, obs, label, guess_rng)
    # 2. judge
    advantage = group_advantage(rollout.reward)  # [B, G]
    batch = Batch(obs, rollout.action, rollout.log_prob, rollout.ref_log_prob, advantage)
    # 3. learn
    agent, learned = learn(c, agent, batch)
    # 4. discard the rollout: the policy that sampled its guesses has changed

    metrics = {
        "reward": rollout.reward.mean(),
        "advantage_std": batch.advantage.std(),
        "zero_variance": 1 - has_signal(rollout.reward).mean(),
        "entropy": rollout.entropy.mean(),
    }
    return agent._replace(rng=rng), metrics | learned


def collect(
    c: Constants, actor: MLP, reference: MLP, obs: jax.Array, label: jax.Array, rng: jax.Array
) -> Rollout:
    """G guesses for each image [B, 784], all by one and the same policy, and their rewards."""
    old = policy(actor, obs)
    action = old.sample(c.NUM_GENERATIONS, seed=rng).T  # [G, B] -> [B, G]
    log_prob = old[:, None].log_prob(action)  # [B, 1] against [B, G]
    ref_log_prob = policy(reference, obs)[:, None].log_prob(action) if c.BETA else log_prob
    return Rollout(obs, action, env.step(label, action), log_prob, ref_log_prob, old.entropy())


def learn(c: Constants, agent: Agent, batch: Batch) -> tuple[Agent, dict[str, jax.Array]]:
    """NUM_ITERATIONS gradient steps on a batch, which change the agent; the last one's metrics."""
    for _ in range(c.NUM_ITERATIONS):
        gradient, metrics = nnx.grad(partial(actor_loss, c), has_aux=True)(agent.actor, batch)
        agent.actor_optimizer.update(agent.actor, gradient)
    return agent, metrics


# %% Training --------------------------------------------------------------------------------------
class Log(NamedTuple):
    """One row for each part of an epoch; after training [NUM_SEEDS, rows]."""

    images: jax.Array  # int32, seen so far
    validation_accuracy: jax.Array  # of the likeliest digit: greedy
    validation_sampled_accuracy: jax.Array  # of a sampled digit
    # means over the rollouts of the interval:
    reward: jax.Array  # share of right guesses
    advantage_std: jax.Array
    zero_variance: jax.Array  # share of groups without signal: all right or all wrong
    entropy: jax.Array  # of the policy that guessed, nats
    clip_fraction: jax.Array  # share of guesses where the clip binds; nan: no surrogate objective
    kl: jax.Array  # KL to the reference (k3); nan: no reference


SHOWN = ["validation_accuracy", "validation_sampled_accuracy", "reward", "zero_variance"]


def adam(c: Constants, num_updates: int) -> optax.GradientTransformation:
    """Adam, whose rate rises, and falls to 0 along half a cosine."""
    warmup = int(c.WARMUP_FRACTION * num_updates)
    return optax.adam(optax.warmup_cosine_decay_schedule(0, c.LEARNING_RATE, warmup, num_updates))


def make_agent(c: Constants, seed: jax.Array, num_images: int) -> Agent:
    """An untrained network, its frozen copy, and its optimizer."""
    rng, actor_rng, order_rng = jax.random.split(jax.random.key(seed), 3)
    actor = MLP(mnist.NUM_PIXELS, c.HIDDEN_SIZE, mnist.NUM_DIGITS, nnx.Rngs(actor_rng))
    num_updates = (
        c.NUM_EPOCHS * c.LOGS_PER_EPOCH * env.updates_per_row(c, num_images) * c.NUM_ITERATIONS
    )
    return Agent(
        actor=actor,
        actor_optimizer=nnx.Optimizer(actor, adam(c, num_updates), wrt=nnx.Param),
        reference=nnx.clone(actor),
        order_rng=order_rng,
        rng=rng,
    )


def train_row(
    c: Constants, update: Callable, agent: Any, index: jax.Array, data: mnist.Data
) -> tuple[Any, Log]:
    """A part of an epoch of one seed, then the validation images: row `index` of the log."""
    epoch, part = jnp.divmod(index, c.LOGS_PER_EPOCH)
    epoch_rng = jax.random.fold_in(agent.order_rng, epoch)
    batches = env.shuffled(c, epoch_rng, len(data.images))[part]  # [updates, B]

    def one_update(agent: Any, batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        return update(c, agent, env.pixels(data.images[batch]), data.labels[batch])

    agent, metrics = jax.lax.scan(one_update, agent, batches)
    accuracies = env.evaluate(policy, agent.actor, data.validation_images, data.validation_labels)
    means = {name: metric.mean() for name, metric in metrics.items()}
    return agent, Log((index + 1) * batches.size, *accuracies, **means)


def train(
    c: Constants, data: mnist.Data, make_agent: Callable, update: Callable
) -> tuple[Any, Log, float]:
    """Trains all seeds side by side, a row of the log at a time, until Ctrl-C.

    `make_agent` and `update` are those above, or of variants.py. Returns the agents [NUM_SEEDS,
    ...], the log [NUM_SEEDS, rows] and the seconds of compiling.
    """
    # All that's above is about one seed; these `vmap`s make it NUM_SEEDS of them, side by side.
    seeds = c.SEED + jnp.arange(c.NUM_SEEDS)
    agents = jax.jit(jax.vmap(partial(make_agent, c, num_images=len(data.images))))(seeds)
    # Each seed has an agent of its own (axis 0); index and images are the same for all (None).
    all_seeds = jax.jit(jax.vmap(partial(train_row, c, update), in_axes=(0, None, None)))
    data = mnist.Data(*map(jnp.asarray, data))
    all_seeds, compile_seconds = runs.compiled(all_seeds, agents, 0, data)
    log = []
    for index in runs.until_ctrl_c(range(c.NUM_EPOCHS * c.LOGS_PER_EPOCH)):
        agents, row = all_seeds(agents, index, data)
        log.append(jax.device_get(row))
        if len(log) % c.LOGS_PER_EPOCH == 0:
            texts = [f"{name} {100 * getattr(log[-1], name).mean():5.2f} %" for name in SHOWN]
            tqdm.write("   ".join([f"images {log[-1].images[0]:7d}", *texts]))
    return agents, runs.columns(log), compile_seconds


# %% Main ------------------------------------------------------------------------------------------
def percent(rows: list[dict[str, Any]], name: str) -> str:
    """Mean and sample standard deviation of a column over the seeds."""
    values = 100 * np.array([row[name] for row in rows])
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread} %"


def run(
    c: Constants, name: str, method: str, make_agent: Callable, update: Callable
) -> dict[str, Any]:
    """Trains all seeds, evaluates them, fills the run's folder. Returns what result.json holds."""
    started = time.perf_counter()
    runs.start_jax(one_thread=False)  # several cores pay off here
    data, source = mnist.read_mnist(c.MNIST_PATH, c.DATA_DIR)
    env.updates_per_row(c, len(data.images))
    run_dir = runs.open_run(name, c)
    print(
        f"data: {source}\n{method}, each update: {c.BATCH_SIZE} images, "
        f"{c.BATCH_SIZE * c.NUM_GENERATIONS} guesses; {c.NUM_SEEDS} seeds side by side, "
        f"in {run_dir}"
    )
    agents, log, compile_seconds = train(c, data, make_agent, update)
    runs.write_log(run_dir, log, c.SEED, method=method)
    final = env.final_rows(c, policy, method, agents, log, data)
    runs.write_csv(run_dir / "accuracy.csv", final)
    pictures.draw_accuracy(run_dir / "accuracy.png", {method: log})
    greedy, sampled = (percent(final, name) for name in ("test_accuracy", "test_sampled_accuracy"))
    epochs = log.images.shape[1] / c.LOGS_PER_EPOCH
    print(f"\ntest accuracy after {epochs:g} epochs: greedy {greedy}, sampled {sampled}")
    accuracy = [row["test_accuracy"] for row in final]
    result = {"test_accuracy": accuracy, "epochs": epochs, "data": source}
    return runs.finish(run_dir, started, result | {"compile_seconds": compile_seconds})


def main(arguments: list[str]) -> dict[str, Any]:
    """GRPO; `arguments` are NAME=value."""
    return run(settings.read(Constants, arguments), "grpo_mnist", "grpo", make_agent, update)


if __name__ == "__main__":
    settings.run(main)
