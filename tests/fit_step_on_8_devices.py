"""Run by test_fit_check.py in a process of its own, which has 8 virtual CPU devices."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from table_policy import train_llm

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from model import llama
from model.llm import split
from model.load import load_llm
from task import prompts, run_grader
from tools import fit_check as fit


def assert_same_arrays(tree, other):
    """Path, shape, dtype and placement; a counter lies where the runtime puts it. Random numbers don't count:
    nothing samples from them.
    """
    trees = (nnx.to_pure_dict(t.filter(nnx.Param)) if isinstance(t, nnx.State) else t for t in (tree, other))
    one, two = (
        {
            jax.tree_util.keystr(path): (x.shape, x.dtype, x.ndim and x.sharding.devices_indices_map(x.shape))
            for path, x in jax.tree_util.tree_leaves_with_path(t)
        }
        for t in trees
    )
    assert one == two


def run_and_compare(trained: str) -> None:
    """The tiny Llama as the main script loads it, with weights, and the fit check's abstract programs."""
    arguments = ["BATCH_SIZE=8", "TRAIN_MICRO_BATCH_SIZE=4", "NUM_GENERATIONS=2", "SCAN_LAYERS=True", trained,
                 "WARMUP_FRACTION=0.0", "RUN_DIR=run"]  # fmt: skip
    c = settings.read(demo.Constants, arguments)
    folder, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    assert jax.device_count() == 8
    engines = c, dataclasses.replace(c, ROLLOUT_ENGINE="vllm")
    programs, given, done = {}, {}, {}
    for e in engines:
        for name, jitted, arguments in fit.make_programs(e, hf, jax.devices(), tokenizer.pad_token_id, done):
            programs[name], given[name] = jitted, arguments
            if name in ("prefill", "decode"):  # decode takes what prefill returns
                done[name] = jitted.lower(*arguments).compile()
    beside, *of_step = given["update"]
    assert bool(jax.tree.leaves(beside)) == (trained == "LORA_RANK=0")  # the frozen reference

    questions, source = prompts.read_data(c, None)["train"]
    grader = run_grader.make_grader("", "", reward_func, questions)
    llm = load_llm(c, folder, hf, tokenizer)
    rows = prompts.make_prompts(c, questions, source, tokenizer, grader.think_tags, Path("too_long.csv"))
    called, update = [], demo.update

    def observed(*arguments):  # what the loop calls `update` with, at the moment before the first one
        called.extend(arguments)
        raise InterruptedError

    demo.update = observed
    try:
        train_llm(c, llm, grader, rows, Path("run"))
    except InterruptedError:
        params, opt_state, model, batch, use, optimizer = called
    policy = llama.copy_of(llm.actor)

    of_step[2] = of_step[2].frozen
    for real, ours in zip((params, opt_state, model.frozen, batch), of_step, strict=True):
        assert_same_arrays(real, ours)

    kept = [jax.tree.map(jnp.copy, (params, opt_state)) for _ in range(2)]  # `update` gives them away
    theirs = update(*kept[0], model, batch, use, optimizer)
    ours = programs["update"]({"beside": jnp.zeros(8)}, *kept[1], model, batch)
    assert_same_arrays(ours, theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-4 and float(ours[2]["grad_norm"]) > 0

    structure, *states = split(llm.reference, nnx.LoRAParam if c.LORA_RANK else nnx.Param)
    found = programs["reference"]((), structure, tuple(states), batch.prompt_ids, batch.completion_ids)
    np.testing.assert_array_equal(found, llm.reference_log_probs(batch))
    assert np.abs(found).max() > 0.1

    synced = programs["sync"]((), nnx.state(policy, nnx.Param))  # as many weights, where vLLM's map puts them
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    places = fit.abstract_vllm_state(llm.reference, mesh, jnp.dtype(c.DTYPE))
    assert_same_arrays(dict(synced.flat_state()), dict(places.flat_state()))
    assert sum(x.size for x in jax.tree.leaves(synced)) == llama.count_parameters(llm.reference)
