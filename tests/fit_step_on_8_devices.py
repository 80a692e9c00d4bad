"""Run by test_tpu_fit_check.py in a process of its own, which has 8 virtual CPU devices.

Builds the main script's cluster on the tiny Llama, with real weights, and the fit check's programs, abstract;
runs both and prints what differs (nothing).
"""

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
from tools import tpu_fit_check as fit
from parts import settings
from parts.model import llama
from parts.rewards import task_rewards
from parts.run import run_log
from parts.tunix_api import Role, TrainExample, sharding_utils


def described(tree):
    """Path, shape, dtype and placement of every array."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.dtype, x.sharding.devices_indices_map(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


class Fed(Exception):
    """The trainer was about to take its first step."""


def first_example(c, cluster, grader, rows, run):
    """What Tunix's trainer is fed in training, at the moment before its first gradient pass."""
    original = sharding_utils.shard_input

    def observed(batch, axes):
        placed = original(batch, axes)
        if isinstance(batch, TrainExample):
            raise Fed(placed)
        return placed

    sharding_utils.shard_input = observed
    try:
        demo.train(c, cluster, grader, rows, run)
    except Fed as fed:
        return fed.args[0]
    finally:
        sharding_utils.shard_input = original


def main(run_dir: str, trained: str) -> None:
    arguments = ["BATCH_SIZE=8", "TRAIN_MICRO_BATCH_SIZE=4", "NUM_GENERATIONS=2", "SCAN_LAYERS=True", trained]
    c = settings.read(demo.Constants, [*arguments, f"RUN_DIR={run_dir}"])
    folder, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    assert jax.device_count() == 8
    programs = fit.make_programs(c, hf, jax.devices(), tokenizer.pad_token_id, tokenizer.eos_token_id)

    questions, source = demo.read_data(c)["train"]
    grader = task_rewards.make_grader("", "", reward_func, questions)
    with run_log.open_run(c) as run:
        cluster = demo.make_cluster(c, folder, hf, tokenizer, run.checkpoints)
        trainer = cluster.actor_trainer
        rows = demo.make_prompts(
            c, questions, source, tokenizer, grader.think_tags, run.logs / "too_long.csv"
        )
        example = first_example(c, cluster, grader, rows, run)
    untrained = llama.copy_of(trainer.model)
    model, optimizer = llama.copy_of(trainer.model), llama.copy_of(trainer.optimizer)

    for name, real_one, ours in (
        ("model", nnx.state(model, nnx.Param), nnx.state(programs.trainer.model, nnx.Param)),
        ("optimizer", nnx.state(optimizer), nnx.state(programs.trainer.optimizer)),
        ("example", example, programs.example),
    ):
        assert described(real_one) == described(ours), name
        assert len(described(ours)) >= 6
    print("the same arrays in the same places")

    with cluster._get_mesh_and_logical_axis_rules_cm(Role.ACTOR):
        real_step, _ = trainer.jit_train_and_eval_step()
        loss, _, norm = real_step(example)  # changes trainer.model and trainer.optimizer
    with programs.context():
        ours = nnx.jit(programs.step, donate_argnames=("optimizer",), keep_unused=True)
        our_loss, _, our_norm = ours(model, optimizer, example, {"beside": jnp.zeros(8)})
    assert float(loss) == float(our_loss) and float(norm) == float(our_norm) > 0
    for ours, theirs in ((model, trainer.model), (optimizer, trainer.optimizer)):
        pairs = zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True)
        assert all(bool(jnp.array_equal(a, b)) for a, b in pairs)
    moved = nnx.state(optimizer)["opt_state"]["acc_grads"]
    assert any(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(moved))
    print("the same step, bit for bit")

    reference = cluster.inference_worker.get_model("reference")
    theirs = cluster.get_ref_per_token_logps(
        example.prompt_ids, example.completion_ids, tokenizer.pad_token_id, tokenizer.eos_token_id
    )
    with programs.context():
        ours = nnx.jit(programs.reference)(reference, example, ())
    np.testing.assert_array_equal(ours, theirs)
    print("the same reference log-probs")

    # vLLM's layout against the checkpoint on disk: what MaxText's loader did is undone.
    with programs.context():
        synced = jax.jit(programs.sync)(nnx.state(untrained, nnx.Param), ())  # with LoRA, B is 0
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    heads, kv_heads, width = hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim
    seen = 0
    for path, param in synced.flat_state():
        name, value = ".".join(map(str, path)), np.asarray(param.get_value())
        assert described(param) == described(dict(programs.vllm_state.flat_state())[path])
        named = name.replace(".kernel", ".weight").replace(".scale", ".weight")
        named = named.replace("embed.embedding", "embed_tokens.weight")
        expected = weights[named.replace("model.lm_head", "lm_head.weight")]
        if "_proj" in name or "lm_head" in name:
            expected = expected.T
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            expected = expected.reshape(-1, heads if "q_proj" in name else kv_heads, width)
        if "o_proj" in name:
            expected = expected.reshape(heads, width, -1)
        # the query's scale is divided by sqrt(head_dim) on loading and multiplied back: one rounding each
        np.testing.assert_allclose(value, expected, rtol=3e-7, err_msg=name)
        seen += 1
    assert seen == len(weights)
    print("the same weights for vLLM")

    # the compiler reports bytes per device, `beside` included
    beside = fit.another(programs.trainer.model)
    sizes, reason = fit.compile_program("step", programs, beside)
    held = nnx.state(programs.trainer.model), nnx.state(programs.trainer.optimizer), programs.example, beside
    numbers = [x for x in jax.tree.leaves(held) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    per_device = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in numbers)
    # a few random-number keys, which are not counted here, and alignment
    assert reason == "" and abs(sizes["arguments"] * fit.GIB - per_device) < 1000, (sizes, per_device)
    print("the same bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
