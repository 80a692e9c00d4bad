"""What matters in GRPO on MNIST: constants changed one by one, what can be computed, what memory it takes.

    python 4_GRPO_MNIST/study.py MNIST_PATH=mnist.npz         # 24 rows of five seeds: 33 minutes
    python 4_GRPO_MNIST/study.py tune MNIST_PATH=mnist.npz    # chooses constants on the validation images: 44
    python 4_GRPO_MNIST/study.py twins MNIST_PATH=mnist.npz   # GRPO beside its three twins: 2 minutes
    python 4_GRPO_MNIST/study.py one METHOD=ppo BETA=0.0      # a row alone: method, constants

The first two were timed with much other work on the same 2 cores.

Constants of variants.py, which has those of grpo_mnist.py, hold where a row does not change them.
"""

import functools
import itertools
import time
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import environment as env
import grpo_mnist as script
import pictures
import runs
import settings
import variants
from data import Data, read_mnist
from pictures import BLUE, GREY, ORANGE

COMPARISON = [  # the method, and what to change on the command line
    ("grpo", []),
    # G at a fixed number of guesses: 1,024 per update, and equally many updates
    ("grpo", ["NUM_GENERATIONS=2", "BATCH_SIZE=512", "NUM_EPOCHS=32"]),
    ("grpo", ["NUM_GENERATIONS=4", "BATCH_SIZE=256", "NUM_EPOCHS=16"]),
    ("grpo", ["NUM_GENERATIONS=8", "BATCH_SIZE=128", "NUM_EPOCHS=8"]),
    ("grpo", ["NUM_GENERATIONS=16", "BATCH_SIZE=64", "NUM_EPOCHS=4"]),
    ("grpo", ["NUM_GENERATIONS=64", "BATCH_SIZE=16", "NUM_EPOCHS=1"]),
    # the baseline
    ("grpo", ["ADVANTAGE=group"]),
    ("grpo", ["ADVANTAGE=leave_one_out"]),
    ("grpo", ["ADVANTAGE=batch_mean"]),
    ("grpo", ["ADVANTAGE=batch_mean", "NUM_GENERATIONS=1"]),
    ("ppo", ["ADVANTAGE=batch_mean", "NUM_GENERATIONS=1"]),
    ("reinforce", ["ADVANTAGE=batch_mean", "NUM_GENERATIONS=1"]),
    ("grpo", ["SKIP_ZERO_VARIANCE=True"]),
    ("exact", []),
    # more updates for each batch of guesses
    ("grpo", ["NUM_ITERATIONS=4"]),
    ("grpo", ["NUM_ITERATIONS=4", "CLIP_EPSILON=inf", "CLIP_EPSILON_HIGH=inf"]),
    # the KL to the untrained network
    ("grpo", ["BETA=0.0"]),
    ("ppo", ["BETA=0.0"]),
    ("reinforce", ["BETA=0.0"]),
    ("grpo", ["BETA=0.01"]),
    ("grpo", ["BETA=1.0"]),
    ("grpo", ["KL_ESTIMATOR=k1"]),
    ("grpo", ["KL_ESTIMATOR=k2"]),
    # what collapses
    ("grpo", ["BETA=0.0", "WARMUP_FRACTION=0.0"]),
]
# Nine settings for GRPO, and nine for the supervised reference; other seeds than those that are reported
TUNING_SEEDS = ["SEED=100", "NUM_SEEDS=3"]
RATES = ("0.001", "0.003", "0.006")
GRID = [
    *(("grpo", [f"LEARNING_RATE={x}", f"BETA={y}"]) for x in RATES for y in ("0.03", "0.1", "0.3")),
    *(
        ("cross_entropy", [f"LEARNING_RATE={x}", f"WARMUP_FRACTION={y}"])
        for x in RATES
        for y in ("0.0", "0.1", "0.3")
    ),
]


# %% Training -------------------------------------------------------------------------------------------
def train(c: variants.Constants, data: Data, testing: bool) -> tuple[script.Log, list[dict[str, Any]], float]:
    """Trains one variant: its log, a row for each seed of what came of it, and the seconds of compiling."""
    print(c.METHOD)
    agents, log, compile_seconds = runs.whole(variants.train(c, data), c.NUM_EPOCHS * c.LOGS_PER_EPOCH)
    finals = env.final_rows(c, script.policy, c.METHOD, agents, log, data if testing else None)
    return log, finals, compile_seconds


def twins(run_dir: Path, c: variants.Constants, data: Data, source: str) -> None:
    """Trains every method; writes log.csv, accuracy.csv, accuracy.png and result.json."""
    started, logs, finals, compile_seconds = time.perf_counter(), {}, {}, 0.0
    for method in variants.METHODS:
        logs[method], finals[method], seconds = train(replace(c, METHOD=method), data, testing=True)
        compile_seconds += seconds
    rows = [row for method, log in logs.items() for row in runs.log_rows(log, c.SEED, method=method)]
    runs.write_csv(run_dir / "log.csv", rows)
    for method, log in logs.items():
        runs.write_curves(run_dir / "tensorboard" / method, log)
    runs.write_csv(run_dir / "accuracy.csv", [row for final in finals.values() for row in final])
    pictures.draw_accuracy(run_dir / "accuracy.png", logs)
    print(f"\ntest accuracy after {c.NUM_EPOCHS} epochs, mean ± sample standard deviation over the seeds")
    for method, final in finals.items():
        greedy, sampled = (script.percent(final, name) for name in ("test_accuracy", "test_sampled_accuracy"))
        print(f"  {pictures.LABELS[method]:24s} greedy {greedy:18s} sampled {sampled}")
    result = {
        "test_accuracy": [row["test_accuracy"] for row in finals["grpo"]],
        "twin_test_accuracy": [row["test_accuracy"] for row in finals["cross_entropy"]],
        "data": source,
        "seconds": time.perf_counter() - started,
        "compile_seconds": compile_seconds,
    }
    runs.write_json(run_dir / "result.json", result)


def train_rows(
    path: Path, rows: list[tuple[str, list[str]]], arguments: list[str], data: Data, testing: bool
) -> None:
    """Trains every row; writes a line for each of them and each seed, anew after each row.

    Args:
        path: of the table; a study that is broken off keeps what it has.
        rows: such as COMPARISON.
        arguments: of the command line; they hold for every row that does not change them.
        data: the images.
        testing: whether to look at the test images as well.
    """
    lines = []
    for method, changes in rows:
        started = time.perf_counter()
        c = variants.configure([*arguments, f"METHOD={method}", *changes])
        log, finals, compile_seconds = train(c, data, testing)
        seconds = time.perf_counter() - started - compile_seconds
        for i, final in enumerate(finals):
            line = (
                {"changed": " ".join(changes) or "unchanged"} | final | {"images": log.images[i, -1].item()}
            )
            # of the others the mean over the whole training
            line |= {k: v[i].mean().item() for k, v in log._asdict().items() if k not in line}
            lines.append(line | {"seconds_of_all_seeds": seconds})
        accuracy = script.percent(finals, "validation_accuracy")
        print(f"{method} {' '.join(changes)}: validation accuracy {accuracy}, {seconds:.1f} s\n")
        runs.write_csv(path, lines)


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
        reward = (np.arange(num_generations) < right).astype(np.float32)
        advantages = np.asarray(variants.ADVANTAGES[advantage](reward[None]))[0]
        chance = comb(num_generations, right) * p**right * (1 - p) ** (num_generations - right)
        total += chance * (advantages[:right].sum() - p / (1 - p) * advantages[right:].sum())
    return total / num_generations


def draw_pull(path: Path) -> None:
    """The pull on an image against its probability, both logarithmic: what dividing by the spread does."""
    figure, axes = plt.subplots(figsize=(7.4, 4.2), facecolor="white", layout="constrained")
    chances = np.logspace(-3, -0.005, 60)
    lines = {
        "cross-entropy: told the digit": (np.ones(60), GREY, (1.5e-3, 1.3)),
        "group_std, G = 8: GRPO": ([pull(p, 8, "group_std") for p in chances], BLUE, (1.2e-3, 0.05)),
        "group, G = 8: mean only": ([pull(p, 8, "group") for p in chances], ORANGE, (0.02, 7e-3)),
    }
    for text, (pulls, color, place) in lines.items():
        axes.loglog(chances, pulls, color=color, linewidth=2)
        axes.text(*place, text, color=color)
    axes.set(xlabel="p: probability of the right digit", ylabel="pull on the image", ylim=(5e-4, 6))
    axes.set_title("what is rarely guessed is hardly pulled, and dividing by the spread pulls harder")
    figure.savefig(path, dpi=110)
    plt.close(figure)


GRADIENT_GUESSES, GRADIENT_DRAWS = 1024, 100  # of each gradient; gradients of each row
GROUP_SIZES = (2, 4, 8, 16, 64)


def gradient_study(arguments: list[str], data: Data) -> list[dict[str, Any]]:
    """How well one update's gradient points along the exact one, at a fixed number of guesses.

    The policy is the first seed's after one epoch of GRPO; exact: `variants.exact_loss` on 10,000 images.

    Returns:
        A row for each advantage and G: mean and standard deviation of the cosine over the draws.
    """
    given = variants.configure([*arguments, "MICRO_BATCH_SIZE=0"])
    one_epoch = replace(given, NUM_EPOCHS=1, NUM_SEEDS=1)
    agent = jax.tree.map(lambda leaf: leaf[0], variants.train(one_epoch, data)[0])
    count = min(len(data.images), 10_000)
    images, labels = env.pixels(jnp.asarray(data.images[:count])), jnp.asarray(data.labels[:count])

    def flat_gradient(c: variants.Constants, loss, batch: variants.Batch) -> jax.Array:
        gradient, _ = variants.gradient(c, functools.partial(loss, c), agent.actor, batch)
        return jax.flatten_util.ravel_pytree(gradient)[0]

    def cosine(c: variants.Constants, num_images: int, rng: jax.Array) -> jax.Array:
        image_rng, guess_rng = jax.random.split(rng)
        index = jax.random.choice(image_rng, count, (num_images,), replace=False)
        rollout = script.collect(c, agent.actor, agent.actor, images[index], labels[index], guess_rng)
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
        draw = functools.partial(cosine, c, num_images)
        cosines = np.asarray(jax.jit(functools.partial(jax.lax.map, draw))(rngs))
        row = {"advantage": advantage, "num_generations": num_generations, "images": num_images}
        rows.append(row | {"cosine": float(cosines.mean()), "cosine_std": float(cosines.std(ddof=1))})
    return rows


# %% Memory ---------------------------------------------------------------------------------------------
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
    c = variants.Constants()
    agent = variants.make_agent(c, jax.random.key(0), num_images=c.BATCH_SIZE * c.LOGS_PER_EPOCH)
    actor, critic = (nnx.state(model, nnx.Param) for model in (agent.actor, agent.critic))
    moments = [optimizer.opt_state[0] for optimizer in (agent.actor_optimizer, agent.critic_optimizer)]
    moments = [(adam.mu, adam.nu) for adam in moments]
    ledgers = [memory_ledger("this network, float32", actor, moments[0], critic, moments[1], actor)]
    for dtype, reference_dtype in (("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        weights, reference = (
            jax.ShapeDtypeStruct((8_030_261_248,), jnp.dtype(name)) for name in (dtype, reference_dtype)
        )
        adam = jax.eval_shape(optax.adam(1e-3).init, weights)[0]
        moments = (adam.mu, adam.nu)
        name = f"8 billion, {dtype}, reference in {reference_dtype}"
        ledgers.append(memory_ledger(name, weights, moments, weights, moments, reference))
    return ledgers


# %% Main -----------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> Path:
    """The study: compare.csv (COMPARISON), gradient.csv, memory.csv, pull.png.

    With `one` compare.csv alone, of METHOD; with `tune` tune.csv (GRID); with `twins` log.csv, accuracy.csv,
    accuracy.png and result.json.

    Args:
        arguments: `one`, `tune`, `twins` or nothing, then `NAME=value` each, constants of variants.py.

    Returns:
        The run's folder.

    Raises:
        settings.UserError: see `grpo_mnist.main`, for every row.
    """
    what, arguments = (
        (arguments[0], arguments[1:]) if arguments[:1] in (["tune"], ["twins"], ["one"]) else ("", arguments)
    )
    arguments = [*TUNING_SEEDS, *arguments] if what == "tune" else arguments
    c = variants.configure(arguments)
    rows = {"": COMPARISON, "tune": GRID, "twins": [], "one": [(c.METHOD, [])]}[what]
    runs.start_jax(xla_flags="")  # several cores pay off here
    data, source = read_mnist(c.MNIST_PATH, c.DATA_DIR)
    for method, changes in [("grpo", []), *rows]:
        # one that clashes with the command line is refused before anything is trained
        changed = variants.configure([*arguments, f"METHOD={method}", *changes])
        env.updates_per_row(changed, len(data.images))
    run_dir = runs.open_run("grpo_mnist_study", c)
    print(f"data: {source}")
    if what == "twins":
        twins(run_dir, c, data, source)
    elif what == "tune":
        train_rows(run_dir / "tune.csv", rows, arguments, data, testing=False)
    elif what == "one":
        train_rows(run_dir / "compare.csv", rows, arguments, data, testing=True)
    else:
        draw_pull(run_dir / "pull.png")
        runs.write_csv(run_dir / "memory.csv", memory_ledgers())
        train_rows(run_dir / "compare.csv", rows, arguments, data, testing=True)
        runs.write_csv(run_dir / "gradient.csv", gradient_study(arguments, data))
    print(f"everything of this study is in {run_dir}")
    return run_dir


if __name__ == "__main__":
    settings.run(main)
