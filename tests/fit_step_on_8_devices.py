"""Run by test_fit_check.py in a process of its own, which has 8 virtual CPU devices.

Builds the main script's cluster on the tiny Llama, with real weights, and the fit check's programs, abstract;
runs both and prints what differs (nothing).
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "5_GRPO_Maxtext"))
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from table_policy import train_llm

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from model import llama
from model.cluster import make_cluster
from model.llm import Llm, split
from model.versions import patched
from task import prompts, run_grader
from tools import fit_check as fit


def described(tree):
    """Path, shape, dtype and placement of every array; a counter lies where the runtime puts it."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.dtype, x.ndim and x.sharding.devices_indices_map(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def first_update(c, llm, grader, rows, folder):
    """What the loop calls `update` with, at the moment before the first one."""
    seen = []

    def observed(*arguments):
        seen.append(arguments)
        raise InterruptedError

    with patched(demo, "update", observed):
        try:
            train_llm(c, llm, grader, rows, folder)
        except InterruptedError:
            return seen[0]


def main(run_dir: str, trained: str) -> None:
    arguments = ["BATCH_SIZE=8", "TRAIN_MICRO_BATCH_SIZE=4", "NUM_GENERATIONS=2", "SCAN_LAYERS=True", trained,
                 "WARMUP_FRACTION=0.0"]  # fmt: skip
    c = settings.read(demo.Constants, [*arguments, f"RUN_DIR={run_dir}"])
    folder, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    pad_id = tokenizer.pad_token_id
    assert jax.device_count() == 8
    for_vllm = dataclasses.replace(c, ROLLOUT_ENGINE="vllm")
    made = [p for engine in (c, for_vllm) for p in fit.make_programs(engine, hf, jax.devices(), pad_id)[0]]
    programs = {name: jitted for name, jitted, _ in made}
    abstract = {name: arguments for name, _, arguments in made}

    questions, source = prompts.read_data(c, None)["train"]
    grader = run_grader.make_grader("", "", reward_func, questions)
    llm = Llm(c, make_cluster(c, folder, hf, tokenizer))
    too_long = Path(run_dir).parent / "too_long.csv"
    rows = prompts.make_prompts(c, questions, source, tokenizer, grader.think_tags, too_long)
    params, opt_state, model, batch, use, optimizer = first_update(c, llm, grader, rows, Path(run_dir))
    policy = llama.copy_of(llm.actor)

    beside, *of_step = abstract["update"]
    of_step[2] = of_step[2].frozen
    for real, ours in zip((params, opt_state, model.frozen, batch), of_step, strict=True):
        assert described(arrays_of(real)) == described(arrays_of(ours))
    print("the same arrays in the same places")

    # copies: `update` gives away what it is handed
    given = [(*jax.tree.map(jnp.copy, (params, opt_state)), model, batch) for _ in range(2)]
    theirs = demo.update(*given[0], use, optimizer)
    ours = programs["update"]({"beside": jnp.zeros(8)}, *given[1])
    assert described(ours) == described(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-4 and float(ours[2]["grad_norm"]) > 0
    print("the same step, bit for bit")

    reference, trained_type = llm.reference, nnx.LoRAParam if c.LORA_RANK else nnx.Param
    theirs = llm.reference_log_probs(batch)
    structure, *states = split(reference, trained_type)
    found = programs["reference"]((), structure, tuple(states), batch.prompt_ids, batch.completion_ids)
    np.testing.assert_array_equal(found, theirs)
    assert np.abs(found).max() > 0.1
    print("the same reference log-probs")

    synced = programs["sync"]((), nnx.state(policy, nnx.Param))  # with LoRA, B is 0
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    places = dict(fit.abstract_vllm_state(reference, mesh, jnp.dtype(c.DTYPE)).flat_state())
    assert described(dict(synced.flat_state())) == described(places)
    assert sum(x.size for x in jax.tree.leaves(synced)) == llama.count_parameters(reference)
    print("as many weights for vLLM, where its map puts them")

    # the compiler reports bytes per device, what is beside the arguments included
    sizes, compiled = fit.compile_program(programs["update"], abstract["update"])
    per_device = sum(
        np.prod(x.sharding.shard_shape(x.shape) if x.ndim else ()) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract["update"]) if x.dtype != jax.random.key(0).dtype
    )  # fmt: skip
    # a few random-number keys, which are not counted here, and alignment
    assert compiled and abs(sizes["arguments"] * 2**30 - per_device) < 1000, (sizes, per_device)
    assert bool(jax.tree.leaves(beside)) == (trained == "LORA_RANK=0")  # the frozen reference
    print("the same bytes")


def arrays_of(tree):
    """What is in it beside random numbers, which nothing samples from."""
    return nnx.to_pure_dict(tree.filter(nnx.Param)) if isinstance(tree, nnx.State) else tree


if __name__ == "__main__":
    main(*sys.argv[1:])
