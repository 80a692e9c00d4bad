"""Generation by vLLM on a TPU: Tunix's engine, with the weights of a MaxText model pushed into it.

The engine has its own model (tpu-inference's, in JAX) on its own devices. After every step Tunix
sends it the trained weights using MaxText's map: it unstacks the scanned layers, applies the hooks
(MaxText folds 1 / sqrt(head_dim) into the query and interleaves the two halves of a rotation) and
pads. If the map misses a weight, Tunix only logs it, and the engine would go on with random numbers
there. Here that's an error.

Only `engine_class` needs the packages of requirements/tpu.txt.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.generate.mappings import MappingConfig
from tunix.generate.utils import build_flat_dict
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from constants import RunConstants

OUTPUT_LAYER = "base.decoder.logits_dense.kernel"
# The name in tpu-inference 0.32; MaxText 0.2.5 still has an older one. Drop this when they agree.
OUTPUT_LAYERS = {"qwen3-0.6b": "lm_head.weight"}


def engine_mapping(actor, model_name: str, head_dim: int) -> MappingConfig:
    """MaxText's own map to the engine, for a model with scanned layers; `model_name` is MaxText's.

    `head_dim` is the engine's: 64 or a multiple of 128, whatever the model's. Tunix pads the
    kernels of query, key and value with zeros, but not the output's.
    """
    mapping = MappingConfig.from_model(actor, "vllm_jax")

    def pad_heads(kernel):  # [heads, head_dim, embed]
        return jnp.pad(kernel, ((0, 0), (0, head_dim - kernel.shape[1]), (0, 0)))

    hooks = {**mapping.to_hf_hook_fns, "base.decoder.layers.self_attention.out.kernel": pad_heads}
    name, axes = mapping.to_hf_mappings[OUTPUT_LAYER]
    names = {**mapping.to_hf_mappings, OUTPUT_LAYER: (OUTPUT_LAYERS.get(model_name, name), axes)}
    return dataclasses.replace(mapping, to_hf_hook_fns=hooks, to_hf_mappings=names)


def check_mapping(names: dict[str, tuple], source: nnx.State, target: nnx.State) -> None:
    """Raises ValueError unless every parameter of the actor (`source`) maps to one of the engine
    (`target`) and every one of those is filled; `names` maps MaxText's name to (engine's name,
    axes).
    """

    def paths(state):
        return [".".join(map(str, path)) for path, _ in state.flat_state()]

    reached = build_flat_dict(target.flat_state(), names)
    filled = [
        p for _, path, _ in reached.values() for p in (path if isinstance(path, list) else [path])
    ]
    odd = set(paths(source)) ^ set(reached) | set(paths(target)) ^ set(filled)
    if odd:
        raise ValueError(
            f"MaxText's map to vLLM misses {len(odd)} weights: {', '.join(sorted(odd)[:4])}"
        )


@jax.jit
def stochastic_round(x: jax.Array) -> jax.Array:
    """Rounds each weight randomly to one of its two bfloat16 neighbors, without bias.

    With rounding to nearest, most weights wouldn't change early in a run, since LoRA moves them by
    less than half a grid step (docs/learn/sampling_with_vllm.md). The upper 16 bits of a float32
    are a bfloat16. We add 16 random bits to the lower half, and the closer the weight is to its
    upper neighbor, the more often that carries. The random key is the sum of the weights: the same
    ones always round the same way, also in a resumed run, and each layer and step gets different
    noise.
    """
    x = x.astype(jnp.float32)
    key = jax.random.key(jax.lax.bitcast_convert_type(x.sum(), jnp.uint32))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def rounded(mapping: MappingConfig) -> MappingConfig:
    """The same map for an engine in bfloat16: rounds each weight stochastically after its hook."""

    def then_round(hook):
        return lambda weight: stochastic_round(hook(weight) if hook else weight)

    hooks = {name: then_round(mapping.to_hf_hook_fns.get(name)) for name in mapping.to_hf_mappings}
    return dataclasses.replace(mapping, to_hf_hook_fns=hooks)


def sync_gain(
    params: nnx.State, merge: Callable, mapping: MappingConfig, engine: nnx.State
) -> float:
    """How much of the LoRA update W' - W arrived in the engine's weights H: 1 is all of it, 0
    nothing.

        sum (H - W) (W' - W) / sum (W' - W)^2        W' = W + scale * A B

    A regression through the origin over the middle layer, without weights the engine pads or
    repeats. NaN while B is 0.
    """
    held = build_flat_dict(engine.flat_state(), mapping.to_hf_mappings)
    layer = {  # W [in, layer, ...], A [in, layer, r] and B [r, layer, out] without the layers
        path: type(leaf)(leaf[...][:, leaf.shape[1] // 2])
        for path, leaf in nnx.to_flat_state(params)
        if "layers" in path
    }
    arrived = size = 0.0
    for path, leaf in nnx.to_flat_state(merge(nnx.from_flat_state(layer))):
        hook = mapping.to_hf_hook_fns.get(".".join(path), lambda weight: weight)
        old, new = hook(layer[path][...]), hook(leaf[...])
        weights = held[".".join(path)][0]
        now = weights[len(weights) // 2][...]
        if now.shape == old.shape:
            update, moved = new - old, jax.device_put(now, old.sharding) - old
            arrived += float(jnp.vdot(moved, update))
            size += float(jnp.vdot(update, update))
    return arrived / size if size else math.nan


def engine_config(
    c: RunConstants, folder: Path, rollout_mesh: jax.sharding.Mesh, eos_ids: tuple[int, ...]
) -> dict:
    """Tunix's `RolloutConfig` fields for vLLM, other than sampling.

    There's no `seed` per request: vLLM on a TPU refuses it, and elsewhere all answers of a group
    would be equal. The engine has one seed for the whole run. `rollout_mesh` is ("data", "model").
    """
    return dict(
        return_logprobs=True,  # vLLM's default is none
        data_parallel_size=rollout_mesh.shape["data"],
        tensor_parallel_size=rollout_mesh.shape["model"],
        rollout_vllm_model_version=str(folder),
        rollout_vllm_hbm_utilization=c.HBM_UTILIZATION_VLLM,
        rollout_vllm_tpu_backend_type="jax",
        rollout_vllm_kwargs={
            "dtype": c.DTYPE,
            "seed": c.SEED,
            # else vLLM uses the checkpoint's own temperature and stop tokens
            "generation_config": "vllm",
        },
        rollout_vllm_sampling_kwargs={
            "prompt_logprobs": None,  # Tunix requests them and throws them away
            "stop_token_ids": list(eos_ids),  # Tunix only passes the tokenizer's own
        },
    )


def engine_class() -> type[BaseRollout]:
    """Tunix's vLLM engine for a MaxText actor; its arguments are as in `MaxTextRollout`.

    vLLM builds a mesh of its own over the devices. Its model has no LoRA, so sending `merge`d
    weights needs memory for a full copy. The engine's `metrics` of the newest weights are for the
    log.
    """
    from tpu_inference.utils import get_padded_head_dim
    from tunix.rl.rollout.vllm_rollout import VllmRollout

    class MaxTextToVllm(VllmRollout):
        def __init__(
            self, rollout_actor, tokenizer, mesh, rollout_config, *, maxtext_config, merge=None
        ):
            self._actor = rollout_actor
            self.tokenizer = tokenizer
            self._merge = merge
            self.metrics = {}
            head_dim = get_padded_head_dim(maxtext_config.head_dim)
            self._mapping = engine_mapping(rollout_actor, maxtext_config.model_name, head_dim)
            sent = dataclasses.replace(
                self._mapping, preprocess_src_state=jax.jit(merge) if merge else None
            )
            if rollout_config.rollout_vllm_kwargs["dtype"] == "bfloat16":
                sent = rounded(sent)
            config = dataclasses.replace(rollout_config, rollout_mapping_config=sent)
            super().__init__(rollout_actor, tokenizer, rollout_config.kv_cache_size, mesh, config)
            weights = nnx.state(rollout_actor, nnx.Param)
            weights = nnx.eval_shape(merge, weights) if merge else weights
            check_mapping(sent.to_hf_mappings, weights, self.parameters())

        # without random keys; Tunix has no public name for its state
        def parameters(self) -> nnx.State:
            return self._sampler.transformer_state.filter(nnx.Param)

        def generate(
            self, prompts: list[str], rollout_config: RolloutConfig, **kwargs
        ) -> RolloutOutput:
            output = super().generate(prompts, rollout_config, **kwargs)
            # Tunix leaves "<|eot_id|>" at the end, which would make every answer fail the format
            # check.
            text = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in output.tokens]
            return dataclasses.replace(output, text=text)

        def update_params(self, params, filter_types: tuple | None = None) -> None:
            params = nnx.state(self._actor, nnx.Param)  # with LoRA more than the trained ones
            super().update_params(params, filter_types)
            if self._merge:
                self.metrics = {
                    "sync_gain": sync_gain(params, self._merge, self._mapping, self.parameters())
                }

    return MaxTextToVllm
