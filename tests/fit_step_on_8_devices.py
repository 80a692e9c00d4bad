"""Run by test_tpu_fit_check.py in a process of its own, which has 8 virtual CPU devices.

Builds the main script's cluster on the tiny Llama, with real weights, and the fit check's programs, abstract;
runs both and prints what differs (nothing).
"""

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "5_GRPO_Maxtext"))
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from model import cluster as clusters
from model import llama
from run import run_folder
from task import prompts, run_grader
from tools import tpu_fit_check as fit


def described(tree):
    """Path, shape, dtype and placement of every array; a counter lies where the runtime puts it."""
    return {
        jax.tree_util.keystr(path): (
            x.shape,
            x.dtype,
            x.sharding.devices_indices_map(x.shape) if x.ndim else None,
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


class Fed(Exception):
    """The loop was about to make its first update."""


def first_update(c, cluster, grader, rows, run):
    """What the loop calls `update` with, at the moment before the first one."""

    def observed(*arguments):
        raise Fed(arguments)

    update, demo.update = demo.update, observed
    try:
        demo.train(c, cluster, grader, rows, run)
    except Fed as fed:
        return fed.args[0]
    finally:
        demo.update = update


def main(run_dir: str, trained: str) -> None:
    arguments = ["BATCH_SIZE=8", "TRAIN_MICRO_BATCH_SIZE=4", "NUM_GENERATIONS=2", "SCAN_LAYERS=True", trained,
                 "WARMUP_FRACTION=0.0"]  # fmt: skip
    c = settings.read(demo.Constants, [*arguments, f"RUN_DIR={run_dir}"])
    folder, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    pad_id = tokenizer.pad_token_id
    assert jax.device_count() == 8
    programs = fit.make_programs(c, hf, jax.devices(), pad_id)

    questions, source = prompts.read_data(c, None)["train"]
    grader = run_grader.make_grader("", "", reward_func, questions)
    with run_folder.open_run(c) as run:
        cluster = clusters.make_cluster(c, folder, hf, tokenizer, functools.partial(demo.sampling, c))
        rows = prompts.make_prompts(
            c, questions, source, tokenizer, grader.think_tags, run.logs / "too_long.csv"
        )
        graphdef, weights, frozen, moments, batch, *numbers = first_update(c, cluster, grader, rows, run)
    model = llama.copy_of(cluster.actor_trainer.model)

    _, abstract_weights, abstract_frozen, abstract_moments, abstract_batch, *_ = programs.arguments["step"]
    for name, real_one, ours in (
        ("weights", weights, abstract_weights),
        ("moments", moments, abstract_moments),
        ("batch", batch, abstract_batch),
        ("frozen", arrays_of(frozen), arrays_of(abstract_frozen)),
    ):
        assert described(real_one) == described(ours), name
        assert len(described(ours)) >= 6 or name == "frozen"
    print("the same arrays in the same places")

    given = (graphdef, *copied((weights, frozen, moments)), batch, *(jnp.float32(x) for x in numbers[:2]))
    with clusters.trainer_mesh(cluster):
        theirs = demo.update(graphdef, *copied((weights, frozen, moments)), batch, *numbers)
    with programs.context():
        ours = programs.programs["step"]({"beside": jnp.zeros(8)}, *given)
    assert described(ours) == described(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
    changes = [
        np.abs(a - b).max() for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(weights), strict=True)
    ]
    assert max(changes) > 1e-4 and float(ours[3]) > 0  # the weights moved; the norm of the gradient
    print("the same step, bit for bit")

    reference = cluster.inference_worker.get_model("reference")
    with clusters.trainer_mesh(cluster):
        theirs = clusters.batch_log_probs(c, batch, c.TEMPERATURE, pad_id, reference)
    with programs.context():
        found = programs.programs["reference"](
            (), *nnx.split(reference), batch.prompt_ids, batch.completion_ids
        )
    np.testing.assert_array_equal(found, theirs)
    assert np.abs(found).max() > 0.1
    print("the same reference log-probs")

    # vLLM's layout against the checkpoint on disk: what MaxText's loader did is undone.
    with programs.context():
        synced = programs.programs["sync"]((), nnx.state(model, nnx.Param))  # with LoRA, B is 0
    state = fit.abstract_vllm_state(reference, programs.mesh, jnp.dtype(c.DTYPE))
    places = dict(state.flat_state())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    heads, kv_heads, width = hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim
    seen = 0
    for path, param in synced.flat_state():
        name, value = ".".join(map(str, path)), np.asarray(param.get_value())
        assert described(param) == described(places[path])
        named = name.replace(".kernel", ".weight").replace(".scale", ".weight")
        named = named.replace("embed.embedding", "embed_tokens.weight")
        expected = tensors[named.replace("model.lm_head", "lm_head.weight")]
        if "_proj" in name or "lm_head" in name:
            expected = expected.T
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            expected = expected.reshape(-1, heads if "q_proj" in name else kv_heads, width)
        if "o_proj" in name:
            expected = expected.reshape(heads, width, -1)
        # the query's scale is divided by sqrt(head_dim) on loading and multiplied back: one rounding each
        np.testing.assert_allclose(value, expected, rtol=3e-7, err_msg=name)
        seen += 1
    assert seen == len(tensors)
    print("the same weights for vLLM")

    # the compiler reports bytes per device, what is `beside` included
    beside = programs.plain
    sizes, reason = fit.compile_program("step", programs, beside)
    held = [*jax.tree.leaves((programs.arguments["step"], beside))]
    held = [x for x in held if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    shapes = [(x.sharding.shard_shape(x.shape) if x.ndim else (), x.dtype.itemsize) for x in held]
    per_device = sum(np.prod(shape) * size for shape, size in shapes)
    # a few random-number keys, which are not counted here, and alignment
    assert reason == "" and abs(sizes["arguments"] * fit.GIB - per_device) < 1000, (sizes, per_device)
    print("the same bytes")


def arrays_of(state):
    """What is in a state beside random numbers, which nothing draws from; the weights that LoRA freezes."""
    return nnx.to_pure_dict(state.filter(nnx.Param))


def copied(tree):
    """The arrays once more: `update` gives away what it is handed."""
    return jax.tree.map(jnp.copy, tree)


if __name__ == "__main__":
    main(*sys.argv[1:])
