"""What each change of faster_on_cpu.py is worth, and what else was tried: the gradient's time, in
turn.

    python benchmarks/gradient_on_cpu.py [ROUNDS=15] [NAME=value ...]    # the main script's

The loss and its gradient are compiled once per variant, for a batch of random answers of 10 to 22
tokens, and then run in turn in one process: a machine that changes its speed slows all of them
alike. Writes 5_GRPO_Maxtext/assets/gradient_on_cpu.csv: medians, and processor seconds as a share
of the first variant's.
"""

import contextlib
import dataclasses
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
sys.path.insert(0, str(FOLDER))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from machine import clocks, processor, write_csv

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import settings
from model import faster_on_cpu, llama, log_probs, versions
from model.llm import Model, split
from model.versions import patched

WARM_UP = 3  # rounds left out
OURS = ("RotaryOnce", "UnfusedDense", "SharedPromptAttention")


def masked_sum(logits: jax.Array, tokens: jax.Array, axis: int) -> jax.Array:
    """`take_along_axis` of one token without a gather, whose gradient is a scatter."""
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(vocabulary == tokens, logits, 0).sum(axis=axis, keepdims=True)


VARIANTS = {  # by name: how it differs from the script as it is; arguments of `compiled`
    "MaxText's own modules": {"stays": OURS},
    "RotaryOnce": {"stays": ("UnfusedDense", "SharedPromptAttention")},
    "RotaryOnce, UnfusedDense": {"stays": ("SharedPromptAttention",)},
    "all three": {},
    "all but UnfusedDense": {"stays": ("UnfusedDense",)},
    "all but RotaryOnce": {"stays": ("RotaryOnce",)},
    "all, answers cut to 24 columns": {"cut": 4},
    "all, REMAT_POLICY=none": {"REMAT_POLICY": "none"},
    "all, REMAT_POLICY=full": {"REMAT_POLICY": "full"},
    "all, embedding by a product (use_iota_embed)": {"maxtext": {"use_iota_embed": True}},
    "all, log-prob by a masked sum": {"masked": True},
    "all, fast-math": {"xla": {"xla_cpu_enable_fast_math": True}},
}


def random_batch(c, pad_id: int, vocabulary: int) -> demo.Batch:
    """A step's batch: questions of 19 to 26 tokens, answers of 10 to 22."""
    random = np.random.default_rng(0)
    N = c.BATCH_SIZE * c.NUM_GENERATIONS
    asked, answered = random.integers(19, 27, (c.BATCH_SIZE, 1)), random.integers(10, 23, (N, 1))
    held = (
        np.arange(c.MAX_PROMPT_LENGTH)[::-1] < asked,
        np.arange(c.TOTAL_GENERATION_STEPS) < answered,
    )
    prompts, completions = (
        np.where(x, random.integers(10, vocabulary, x.shape), pad_id).astype(np.int32) for x in held
    )
    prompts = np.repeat(prompts, c.NUM_GENERATIONS, axis=0)
    mask = completions != pad_id
    groups = mask.reshape(c.BATCH_SIZE, c.NUM_GENERATIONS, -1)
    return demo.Batch(
        prompt_ids=jnp.array(prompts),
        completion_ids=jnp.array(completions),
        mask=jnp.array(mask),
        weight=jnp.array(demo.mean_of_answers(groups).reshape(mask.shape), jnp.float32),
        advantage=jnp.array(random.normal(size=(N, 1)), jnp.float32),
        beta=jnp.full((N, 1), c.BETA),
        sampler_log_prob=jnp.zeros(mask.shape),
        ref_log_prob=jnp.array(np.where(mask, -4.3, 0), jnp.float32),
    )


def compiled(
    c, stays=(), maxtext=None, cut=0, masked=False, xla=None, **constants
) -> tuple[Callable, Any]:
    """The gradient's program of a variant, and its weights.

    `stays` are modules that stay MaxText's own, `maxtext` its settings; `cut` columns of the
    answers are left out; if `masked`, the log-prob is a masked sum; `xla` are compiler options.
    """
    c = dataclasses.replace(c, **constants)
    folder, hf = llama.fetch_model(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    config = llama.to_run_config(c, hf, **(maxtext or {}))
    with contextlib.ExitStack() as stack:
        for ours in stays:
            maxtexts = getattr(faster_on_cpu, ours).__base__
            same = type(ours, (maxtexts,), {})  # a subclass that changes nothing
            stack.enter_context(patched(faster_on_cpu, ours, same))
        if "SharedPromptAttention" in stays:
            stack.enter_context(patched(faster_on_cpu, "shares_prompts", lambda model: False))
        if masked:
            changed = types.SimpleNamespace(**vars(jnp) | {"take_along_axis": masked_sum})
            stack.enter_context(patched(log_probs, "jnp", changed))
        adapter, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id)
        graphdef, params, frozen = split(adapter, nnx.Param)
        rules = tuple(map(tuple, config.logical_axis_rules))
        model = Model(
            graphdef,
            frozen,
            c.TEMPERATURE,
            tokenizer.pad_token_id,
            0.0,
            c.NUM_GENERATIONS,
            mesh,
            rules,
        )
        batch = random_batch(c, tokenizer.pad_token_id, hf.vocab_size)
        width, prompts = c.TOTAL_GENERATION_STEPS - cut, batch.prompt_ids
        batch = jax.tree.map(lambda x: x[:, :width], batch)._replace(prompt_ids=prompts)
        method = grpo_variants.choose(c, demo.TABLES)
        gradient = jax.value_and_grad(demo.loss, has_aux=True)
        lowered = jax.jit(lambda params: gradient(params, model, batch, method)).lower(params)
        return lowered.compile(xla), params


def main() -> None:
    """Compiles all, runs them in turn, prints and writes the medians."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rounds = int(given.pop("ROUNDS", "15"))
    c = settings.read(demo.Constants, [f"{name}={value}" for name, value in given.items()])
    versions.prepare_libraries()
    programs = {name: compiled(c, **changes) for name, changes in VARIANTS.items()}
    spent = {name: [] for name in programs}
    for _ in range(WARM_UP + rounds):
        for name, (program, params) in programs.items():
            started = clocks()
            jax.block_until_ready(program(params))
            spent[name].append(clocks() - started)
    first, rows = None, []
    for name, (program, params) in programs.items():
        wall, cpu = np.median(spent[name][WARM_UP:], axis=0)
        first = first or cpu
        (loss, _), gradient = program(params)
        rows.append(
            {
                "variant": name,
                "wall_seconds": f"{wall:.4f}",
                "processor_seconds": f"{cpu:.4f}",
                "share": f"{cpu / first:.3f}",
                "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20),
                "loss": f"{float(loss):.6g}",
                "gradient_norm": f"{float(optax.global_norm(gradient)):.6g}",
                "machine": processor(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
        print(", ".join(f"{key} {value}" for key, value in list(rows[-1].items())[:-2]), flush=True)
    write_csv(FOLDER / "assets" / "gradient_on_cpu.csv", rows)


if __name__ == "__main__":
    main()
