"""The vLLM path as far as it goes without vLLM: devices, Tunix's options, and where each weight
lands.

What vLLM itself does with them is tested by vllm_engine.py (`make test-vllm`, an environment of its
own).
"""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import short_runs
import transformers
from flax import nnx
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from test_load_llama import GOLDEN, load
from tunix.generate.utils import transfer_state_with_mappings
from tunix.rl.reshard import reshard_pytree

import grpo_llama3_1_8b_demo as demo
import settings
from model import devices, llama, lora
from model.rollout import sampling_config
from model.vllm import (
    check_mapping,
    engine_config,
    engine_mapping,
    rounded,
    stochastic_round,
    sync_gain,
)
from run import memory

LLAMA_8B = memory.published_config()  # meta-llama/Llama-3.1-8B-Instruct

# With halves, and gradients prompt by prompt: more can go wrong than with the defaults of the TPU
# column.
TPU_COLUMN = [
    "MODEL=meta-llama/Llama-3.1-8B-Instruct",
    "TRAINER_DEVICES_FRACTION=0.5",
    "SAMPLER_DEVICES_FRACTION=0.5",
    "TRAIN_MICRO_BATCH_SIZE=1",
]


def constants_of(changes):
    """The constants of TPU_COLUMN, some of them changed; changed ones are not checked here."""
    return dataclasses.replace(settings.read(demo.Constants, TPU_COLUMN), **changes)


@pytest.mark.parametrize(
    ("count", "changes", "trainer", "data", "model"),
    [  # devices; the trainer's share; the axes of vLLM's mesh (0: none). v5p-8 has 4 chips, v6e-8 8
        (4, {}, 2, 1, 2),
        (
            8,
            {
                "TRAINER_DEVICES_FRACTION": 0.25,
                "SAMPLER_DEVICES_FRACTION": 0.75,
                "SAMPLER_DATA_PARALLEL": 3,
            },
            2,
            3,
            2,
        ),
        (8, {"TRAINER_DEVICES_FRACTION": 1.0, "SAMPLER_DEVICES_FRACTION": 1.0}, 8, 1, 8),
        (32, {"TRAINER_TENSOR_PARALLEL": 2}, 16, 1, 16),  # they repeat the 8 key/value heads
        (1, {}, 1, 1, 1),
        (8, {"ROLLOUT_ENGINE": "maxtext"}, 8, 0, 0),
    ],
)
def test_devices_are_split_between_trainer_and_sampler(count, changes, trainer, data, model):
    # any objects do
    found, mesh = devices.plan_devices(constants_of(changes), LLAMA_8B, list(range(count)))
    assert found == list(range(trainer)) and bool(mesh) == bool(data)
    if mesh:
        assert dict(mesh.shape) == {"data": data, "model": model}
        assert mesh.devices.flatten().tolist() == list(range(count))[-data * model :]


@pytest.mark.parametrize(
    ("count", "changes", "words"),
    [  # devices that don't divide
        (
            4,
            {"TRAINER_DEVICES_FRACTION": 0.3},
            "TRAINER_DEVICES_FRACTION=0.3: of 4 devices that is 1.2",
        ),
        (
            4,
            {"SAMPLER_DEVICES_FRACTION": 0.75},
            "SAMPLER_DEVICES_FRACTION=0.75 add up to more than 1",
        ),
        (8, {"TRAINER_TENSOR_PARALLEL": 3}, "TRAINER_TENSOR_PARALLEL=3: must divide the 4 devices"),
        (8, {"SAMPLER_DATA_PARALLEL": 3}, "SAMPLER_DATA_PARALLEL=3: must divide the 4 devices"),
        (6, {"NUM_GENERATIONS": 9}, "SAMPLER_DATA_PARALLEL=1: leaves 3 chips .* the 32 heads"),
        (96, {"NUM_GENERATIONS": 48}, "SAMPLER_DATA_PARALLEL=1: leaves 48 chips .* the 32 heads"),
        (6, {"SAMPLER_DATA_PARALLEL": 3}, "BATCH_SIZE=64: the 8 sequences .* among 3 devices"),
    ],
)
def test_devices_that_do_not_divide_are_refused_by_name(count, changes, words):
    with pytest.raises(settings.UserError, match=words):
        devices.plan_devices(constants_of(changes), LLAMA_8B, list(range(count)))


def test_a_qwen3_whose_heads_the_engine_would_pad_is_refused():
    """The padding would count in the mean of its norms; the engine gave other answers with 32."""
    for width in (64, 256, 32):
        hf = transformers.Qwen3Config(head_dim=width, num_attention_heads=8, num_key_value_heads=8)
        expected = pytest.raises(
            settings.UserError, match=r"ROLLOUT_ENGINE=vllm: .* head_dim is 32; 64 and"
        )
        with expected if width == 32 else contextlib.nullcontext():
            devices.plan_devices(constants_of({}), hf, list(range(4)))
        devices.plan_devices(constants_of(dict(ROLLOUT_ENGINE="maxtext")), hf, list(range(4)))


def test_tunix_knows_every_option_that_is_set():
    mesh = jax.sharding.Mesh(np.array(range(8)).reshape(2, 4), ("data", "model"))
    c = constants_of({})
    # unknown fields raise
    config = sampling_config(c, **engine_config(c, Path("folder"), mesh, (1, 2)))
    assert (config.data_parallel_size, config.tensor_parallel_size) == (2, 4)
    assert config.return_logprobs and config.seed is None
    assert config.rollout_vllm_sampling_kwargs["stop_token_ids"] == [1, 2]


def engine_state(shapes, make=lambda shape: jax.ShapeDtypeStruct(shape, "bfloat16")):
    """A state like the engine's: parameters by dotted name; layer numbers are integers, as in nnx
    lists.
    """
    paths = {name: tuple(int(p) if p.isdigit() else p for p in name.split(".")) for name in shapes}
    return nnx.State.from_flat_path(
        {paths[name]: nnx.Param(make(shape)) for name, shape in shapes.items()}
    )


def transfer(source, target, mapping):
    transfer_state_with_mappings(
        source,
        target,
        key_mappings=mapping.to_hf_mappings,
        key_mapping_hook_fns=mapping.to_hf_hook_fns,
        transpose_keys=mapping.to_hf_transpose_keys,
    )
    return {".".join(map(str, path)): leaf[...] for path, leaf in target.flat_state()}


@pytest.fixture(scope="module")
def llama_8b():
    """Actor and engine of Llama 3.1 8B, all shapes; vllm_engine.py compares the JSON file with the
    engine.
    """
    shapes = json.loads((GOLDEN / "vllm_llama31_8b.json").read_text())
    assert sum(map(np.prod, shapes.values())) == 8_030_261_248
    sizes = dict(rows=16, prompt_tokens=256, new_tokens=768)
    config = llama.to_maxtext_config(LLAMA_8B, **sizes, dtype="bfloat16", scan_layers=True)
    return TunixMaxTextAdapter(llama.abstract_model(LLAMA_8B, config)[0], pad_id=0), shapes


def test_every_weight_of_the_8b_model_has_one_place_in_the_engine_and_fills_it(llama_8b):
    actor, shapes = llama_8b
    source, mapping = nnx.state(actor, nnx.Param), engine_mapping(actor, "llama3.1-8b", 128)
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(source)) == 8_030_261_248
    check_mapping(mapping.to_hf_mappings, source, engine_state(shapes))

    # Tunix's own transfer, traced; what it does not fill is still a shape and no tracer
    def move(source):
        moved = transfer(source, engine_state(shapes), mapping)
        assert all(isinstance(leaf, jax.core.Tracer) for leaf in moved.values())
        return moved

    moved = jax.eval_shape(move, source)
    found = {name: (list(leaf.shape), leaf.dtype) for name, leaf in moved.items()}
    assert found == {name: (shape, "bfloat16") for name, shape in shapes.items()}


@pytest.mark.parametrize(
    # a weight without a place, two in one place, and one that leads nowhere
    ("source", "name", "engines"),
    [
        ("decoder_norm.scale", "model.norm.scale", ""),
        (
            "layers.mlp.wi_1.kernel",
            "model.layers.0.mlp.up_proj",
            "model.layers.*.mlp.gate_proj.kernel",
        ),
        ("logits_dense.kernel", "logits_dense", "lm_head.weight"),
    ],
)
def test_a_map_with_a_hole_is_refused(llama_8b, source, name, engines):
    actor, shapes = llama_8b
    names = dict(engine_mapping(actor, "llama3.1-8b", 128).to_hf_mappings)
    _, axes = names.pop(f"base.decoder.{source}")
    if engines:
        names[f"base.decoder.{source}"] = engines, axes
    with pytest.raises(ValueError, match=f"misses.*{name}"):
        check_mapping(names, nnx.state(actor, nnx.Param), engine_state(shapes))


def engine_weights(hf, weights, width):
    """A checkpoint's weights as the engine has them, with heads padded to `width`."""
    names = [
        ("embed_tokens.weight", "embed.embedding"),
        ("lm_head.weight", "model.lm_head"),
        ("norm.weight", "norm.scale"),
        ("proj.weight", "proj.kernel"),
    ]
    E, H, pad = hf.hidden_size, hf.head_dim, (0, width - hf.head_dim)
    engine = {}
    for name, weight in weights.items():
        if name == "lm_head.weight" or "proj" in name:
            weight = weight.T
        if "o_proj" in name:
            weight = np.pad(weight.reshape(-1, H, E), ((0, 0), pad, (0, 0)))  # [heads, H, E]
        elif "self_attn" in name and "proj" in name:
            weight = np.pad(weight.reshape(E, -1, H), ((0, 0), (0, 0), pad))  # [E, heads, H]
        for old, new in names if hf.model_type == "llama" else ():
            name = name.replace(old, new)
        engine[name] = weight
    return engine


@pytest.mark.parametrize("name", ["llama31_rope", "tied_embeddings", "qwen3", "qwen3_tied"])
def test_the_engine_receives_the_numbers_of_the_checkpoint(name):
    """There and back again: what Tunix puts into the engine are the Hugging Face weights, heads
    padded.
    """
    adapter, _, config, hf = load(GOLDEN / name, scan_layers=True)
    weights = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    expected = engine_weights(hf, weights, 128)
    shapes = {name: array.shape for name, array in expected.items()}
    target = engine_state(shapes, lambda shape: np.full(shape, np.nan, np.float32))
    mapping, source = engine_mapping(adapter, config.model_name, 128), nnx.state(adapter, nnx.Param)
    check_mapping(mapping.to_hf_mappings, source, target)
    moved = transfer(source, target, mapping)
    for name, array in expected.items():
        # float32: the query is divided by sqrt(H) on the way in and multiplied on the way out
        np.testing.assert_allclose(moved[name], array, rtol=1e-6, err_msg=name)


def on_the_grid(folder):
    """The tiny Llama with weights that bfloat16 can hold, as published checkpoints have them."""
    shutil.copytree(settings.HERE / "tiny_llama", folder)
    file = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    weights = {name: w.astype(jnp.bfloat16).astype(np.float32) for name, w in weights.items()}
    safetensors.numpy.save_file(weights, file, metadata={"format": "pt"})
    return folder


def most_alive_during_a_sync(lora_rank: int) -> tuple[float, float]:
    """Tunix's own weight sync, op by op on 8 virtual devices, of a Llama in the proportions of 8 B:
    the most bytes alive on a device, seen after each hook and around the resharding, divided by
    its share of the weights in float32. LoRA's A and B, moments and the reference aren't there.
    And what `memory.estimate` makes of it.
    """
    from tools import fit_check as fit  # sets variables that vllm_engine.py needs otherwise

    c = constants_of(dict(LORA_RANK=lora_rank, BATCH_SIZE=1, ATTENTION="dot_product"))
    hf = memory.published_config()
    sizes = dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=16, vocab_size=8192)
    hf.update(sizes | dict(head_dim=64))
    config = llama.to_run_config(c, hf, hardware="cpu")
    base, mesh = llama.abstract_model(hf, config, jax.devices())
    actor, seen = TunixMaxTextAdapter(base, pad_id=0), []

    def filled(x):
        return jax.jit(lambda: jnp.zeros(x.shape, x.dtype), out_shardings=x.sharding)()

    weights = jax.tree.map(filled, nnx.state(actor, nnx.Param))
    engine = jax.tree.map(filled, fit.abstract_vllm_state(actor, mesh, jnp.bfloat16))
    held = jax.tree.leaves(engine)  # the engine's runner holds the old weights until the end
    share = sum(x.nbytes for x in jax.tree.leaves(weights)) / 8

    def look():
        shards = (part for x in jax.live_arrays() for part in x.addressable_shards)
        sizes = {
            part.data.unsafe_buffer_pointer(): part.data.nbytes  # an array may have two names
            for part in shards
            if part.device == jax.devices()[0]
        }
        seen.append(sum(sizes.values()) / share)

    def then_look(function):
        def called(*arguments, **named):
            look()
            result = jax.block_until_ready(function(*arguments, **named))
            look()
            return result

        return called

    mapping = rounded(engine_mapping(actor, config.model_name, hf.head_dim))
    # the merged weights are a copy; without LoRA, the engine gets the trainer's own
    source = jax.jit(lambda x: jax.tree.map(jnp.negative, x))(weights) if lora_rank else weights
    transfer_state_with_mappings(
        source,
        engine,
        key_mappings=mapping.to_hf_mappings,
        key_mapping_hook_fns={k: then_look(f) for k, f in mapping.to_hf_hook_fns.items()},
        transpose_keys=mapping.to_hf_transpose_keys,
        reshard_fn=then_look(reshard_pytree),
        delete_dst_buffers=True,  # Tunix's default
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        tp_size=8,
    )
    assert held[0].dtype == jnp.bfloat16
    engines = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "model"))
    needs = memory.estimate(c, hf, llama.count_parameters(base), jax.devices(), engines)
    return max(seen), 1 + (needs.sync - needs.training) * memory.GIB / share


@pytest.mark.slow
@pytest.mark.parametrize(("lora_rank", "copies"), [(32, 3.5 + 0.5), (0, 2.5 + 0.5)])
def test_a_weight_sync_takes_four_times_the_weights_with_lora_and_three_times_without(
    lora_rank, copies
):
    """float32: the weights, with LoRA the merged ones, and all layers one by one; bfloat16: the
    engine's old and new ones. The embeddings, a tenth, aren't taken apart.
    """
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    seen, expected = short_runs.in_a_process(
        most_alive_during_a_sync, lora_rank, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
    )
    assert copies - 0.15 < seen < copies
    # of the norms, 0.1 % of this model, every device has all; 3.911 and 3.916 with LoRA
    assert seen == pytest.approx(expected, rel=0.003)


def test_rounding_at_random_gives_a_neighbour_and_on_average_the_number():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=200) * 10.0 ** rng.uniform(-6, 2, 200)
    numbers = np.concatenate([numbers, [0, 1, -0.5, 3e-6]]).astype(np.float32)
    down = (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)  # toward zero
    up = (down.view(np.uint32) + 0x10000).view(np.float32)
    drawn = np.asarray(stochastic_round(np.tile(numbers, (10_000, 1)))).astype(np.float32)
    assert ((drawn == down) | (drawn == up)).all() and (drawn[:, 200:203] == numbers[200:203]).all()
    share = (numbers.astype(float) - down) / (up.astype(float) - down)
    # of 10,000 draws: five standard deviations
    np.testing.assert_allclose((drawn == up).mean(axis=0), share, atol=0.025)
    # The same weights round alike, in a resumed run, too; another step's get other noise.
    weights = np.full(1000, 1.001, np.float32)
    changed = weights * (np.arange(1000) > 0)
    first, again, other = (np.asarray(stochastic_round(w)) for w in (weights, weights, changed))
    assert (first == again).all() and (first[1:] != other[1:]).any()


def test_a_small_lora_update_arrives_in_bfloat16_only_if_it_is_rounded_at_random(tmp_path):
    """Through Tunix's own transfer, into an engine of zeros that has no padding."""
    base, mesh, config, hf = load(on_the_grid(tmp_path / "model"), scan_layers=True)
    weights = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    adapted, merge = lora.add_lora(base, mesh, config, 4, 4.0, ",".join(lora.TARGETS), seed=0)
    merge = jax.jit(merge)
    params = nnx.state(adapted, nnx.Param)
    mapping = engine_mapping(adapted, config.model_name, hf.head_dim)
    shapes = {name: array.shape for name, array in engine_weights(hf, weights, hf.head_dim).items()}

    def gain(dtype, used):
        engine = engine_state(shapes, lambda shape: jnp.zeros(shape, dtype))
        transfer(merge(params), engine, used)
        return sync_gain(params, merge, mapping, engine)

    assert np.isnan(gain("float32", mapping))  # B is 0
    for path, leaf in params.flat_state():
        if path[-1].endswith("_b"):
            signs = np.random.default_rng(0).choice([-1e-4, 1e-4], leaf.shape)
            leaf.set_value(jnp.asarray(signs, jnp.float32))
    assert gain("float32", mapping) == pytest.approx(1, abs=1e-3)
    assert gain("bfloat16", mapping) < 0.3
    # 100,000 weights: 0.013 expected
    assert gain("bfloat16", rounded(mapping)) == pytest.approx(1, abs=0.06)
