"""What can be computed about GRPO on MNIST instead of trained: the gradient, the pull, the memory.

    python 4_GRPO_MNIST/study.py MNIST_PATH=mnist.npz  # gradient.csv, pull.csv, memory.csv

Constants are those of variants.py. What is trained for the lab book's tables is in study.toml.
"""

import itertools
from dataclasses import replace
from functools import partial
from math import comb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import environment as env
import grpo_mnist as script
import runs
import settings
import variants
from data import Data, read_mnist


# %% What can be computed --------------------------------------------------------------------------
def pull(p: float, num_generations: int, advantage: str) -> float:
    """How hard the expected gradient pulls at an image that is guessed right with probability p.

    The gradient of the expected reward is p * grad log pi(right digit); cross-entropy's is 1 * the
    same vector. So is the expectation of any group's estimate, times the number returned here,
    summed over all numbers k of right guesses among G:

        1 / G * sum_k Binomial(k; G, p)
              * (sum of A over the right - p / (1 - p) * sum of A over the wrong)

    The second term: the wrong digits' gradients, each as likely as pi says, average to
    -p / (1 - p) * grad log pi(right digit), since sum_a pi(a) * grad log pi(a) = 0.
    """
    total = 0.0
    for right in range(num_generations + 1):
        reward = (np.arange(num_generations) < right).astype(np.float32)
        advantages = np.asarray(variants.ADVANTAGES[advantage](reward[None]))[0]
        chance = comb(num_generations, right) * p**right * (1 - p) ** (num_generations - right)
        total += chance * (advantages[:right].sum() - p / (1 - p) * advantages[right:].sum())
    return total / num_generations


def pulls() -> list[dict[str, Any]]:
    """The pull on an image by its probability, of cross-entropy and of two advantages with eight
    guesses.
    """
    return [
        {"p": p, "cross_entropy": 1.0} | {name: pull(p, 8, name) for name in ("group_std", "group")}
        for p in np.logspace(-3, -0.005, 60).tolist()
    ]


GRADIENT_GUESSES, GRADIENT_DRAWS = 1024, 100  # of each gradient; gradients of each row
GROUP_SIZES = (2, 4, 8, 16, 64)


def gradient_study(given: variants.Constants, data: Data) -> list[dict[str, Any]]:
    """How well one update's gradient points along the exact one, at a fixed number of guesses.

    The policy is the first seed's after one epoch of GRPO; exact: `variants.exact_loss` on 10,000
    images. A row for each advantage and G has mean and standard deviation of the cosine over the
    draws.
    """
    one_epoch = replace(given, NUM_EPOCHS=1, NUM_SEEDS=1)
    agents, *_ = script.train(one_epoch, data, variants.make_agent, variants.update)
    agent = jax.tree.map(lambda leaf: leaf[0], agents)
    count = min(len(data.images), 10_000)
    images, labels = env.pixels(jnp.asarray(data.images[:count])), jnp.asarray(data.labels[:count])

    def flat_gradient(c: variants.Constants, loss, batch: variants.Batch) -> jax.Array:
        actor = nnx.clone(agent.actor)  # nnx differentiates only what belongs to the same trace
        gradient, _ = nnx.grad(partial(loss, c), has_aux=True)(actor, batch)
        return jax.flatten_util.ravel_pytree(gradient)[0]

    def cosine(c: variants.Constants, num_images: int, rng: jax.Array) -> jax.Array:
        image_rng, guess_rng = jax.random.split(rng)
        index = jax.random.choice(image_rng, count, (num_images,), replace=False)
        rollout = script.collect(
            c, agent.actor, agent.actor, images[index], labels[index], guess_rng
        )
        batch = variants.judge(c, rollout, labels[index], agent.critic)
        estimate = flat_gradient(c, variants.actor_loss, batch)
        return estimate @ exact / jnp.linalg.norm(estimate) / jnp.linalg.norm(exact)

    everything = variants.Batch(images, labels, *[None] * 5, weight=jnp.full(count, 1 / count))
    exact = flat_gradient(given, variants.exact_loss, everything)
    rngs = jax.random.split(jax.random.key(given.SEED), GRADIENT_DRAWS)
    rows = []
    for advantage, num_generations in itertools.product(variants.ADVANTAGES, GROUP_SIZES):
        c = replace(given, ADVANTAGE=advantage, NUM_GENERATIONS=num_generations)
        num_images = min(GRADIENT_GUESSES // num_generations, count)
        draw = partial(cosine, c, num_images)
        cosines = np.asarray(jax.jit(partial(jax.lax.map, draw))(rngs))
        row = {"advantage": advantage, "num_generations": num_generations, "images": num_images}
        rows.append(
            row | {"cosine": float(cosines.mean()), "cosine_std": float(cosines.std(ddof=1))}
        )
    return rows


# %% Memory ----------------------------------------------------------------------------------------
def memory_ledger(name: str, weights: int, critic: int, reference: int) -> dict[str, Any]:
    """What has to be kept in memory, in bytes, without activations.

    A gradient is as large as its weights, and Adam's two moments are twice as large.
    """
    parts = {"weights": weights, "gradients": weights, "adam_moments": 2 * weights}
    grpo, ppo = 4 * weights, 4 * weights + 4 * critic
    sums = {
        "grpo": grpo,
        "ppo": ppo,
        "grpo_reference": grpo + reference,
        "ppo_reference": ppo + reference,
    }
    return {"network": name, **parts, "critic": 4 * critic, "reference": reference, **sums}


def memory_ledgers() -> list[dict[str, Any]]:
    """The ledger of this network, from live arrays, and of Llama 3.1 8B, from its number of
    parameters.
    """
    c, llama = variants.Constants(), 8_030_261_248
    agent = variants.make_agent(c, seed=0, num_images=c.BATCH_SIZE * c.LOGS_PER_EPOCH)
    actor, critic = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        for model in (agent.actor, agent.critic)
    )
    ledgers = [memory_ledger("this network, float32", actor, critic, actor)]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        name = f"8 billion, {dtype}, reference in bfloat16"
        ledgers.append(memory_ledger(name, size * llama, size * llama, 2 * llama))
    return ledgers


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """Writes the three tables into the run's folder; `arguments` are constants of variants.py."""
    c = settings.read(variants.Constants, arguments)
    runs.start_jax(one_thread=False)  # several cores pay off here
    data, source = read_mnist(c.MNIST_PATH, c.DATA_DIR)
    env.updates_per_row(c, len(data.images))
    run_dir = runs.open_run("grpo_mnist_study", c)
    print(f"data: {source}")
    runs.write_csv(run_dir / "pull.csv", pulls())
    runs.write_csv(run_dir / "memory.csv", memory_ledgers())
    runs.write_csv(run_dir / "gradient.csv", gradient_study(c, data))
    runs.write_json(run_dir / "result.json", {"data": source})
    print(f"everything of this study is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
