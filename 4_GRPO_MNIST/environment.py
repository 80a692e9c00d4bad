"""The digits as an environment: an image is seen, a digit is guessed, and the episode is over."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from data import Data
from settings import UserError


def pixels(images: jax.Array) -> jax.Array:
    """The observation: uint8 0 to 255 -> float32 0 to 1."""
    return images.astype(jnp.float32) / 255


def step(label: jax.Array, action: jax.Array) -> jax.Array:
    """The reward: 1 for the right digit, 0 for every other; [B], [B, G] -> float32 [B, G]."""
    return (action == label[:, None]).astype(jnp.float32)


def updates_per_row(c: Any, num_images: int) -> int:
    """Batches between two rows of the log. Raises UserError where the images do not fill one."""
    updates = num_images // c.BATCH_SIZE // c.LOGS_PER_EPOCH
    if not updates:
        batches = f"BATCH_SIZE={c.BATCH_SIZE}: {c.LOGS_PER_EPOCH} batches (LOGS_PER_EPOCH)"
        raise UserError(
            f"{batches} are more than the {num_images} training images; lower one of them"
        )
    return updates


def shuffled(c: Any, rng: jax.Array, num_images: int) -> jax.Array:
    """The batches of one epoch: indices of images, int32 [LOGS_PER_EPOCH, updates, BATCH_SIZE]."""
    shape = c.LOGS_PER_EPOCH, updates_per_row(c, num_images), c.BATCH_SIZE
    # Each epoch leaves out other images: those that fill no batch.
    return jax.random.permutation(rng, num_images)[: math.prod(shape)].reshape(shape)


def evaluate(
    policy: Callable, actor: Any, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accuracy of the likeliest digit, and of a sampled one (its expectation, without sampling)."""
    guess = policy(actor, pixels(images))
    right = jnp.take_along_axis(guess.probs_parameter(), labels[:, None], axis=1)  # [N, 1]
    return (guess.mode() == labels).mean(), right.mean()


def final_rows(
    c: Any, policy: Callable, method: str, agents: Any, log: Any, data: Data
) -> list[dict]:
    """What came of a training, a row for each seed: the log's last accuracies, and those on the
    test images.

    Nothing else looks at the test images: constants are chosen without them.
    """
    accuracies = {
        name: getattr(log, name)[:, -1] for name in log._fields if name.startswith("validation")
    }
    one = lambda actor: evaluate(policy, actor, data.test_images, data.test_labels)  # noqa: E731
    greedy, sampled = jax.jit(jax.vmap(one))(agents.actor)  # [NUM_SEEDS]
    accuracies |= {"test_accuracy": greedy, "test_sampled_accuracy": sampled}
    return [
        {"method": method, "seed": c.SEED + i}
        | {name: x[i].item() for name, x in accuracies.items()}
        for i in range(c.NUM_SEEDS)
    ]
