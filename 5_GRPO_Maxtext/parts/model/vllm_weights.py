"""Which weight of the MaxText model becomes which weight of vLLM's (tpu-inference's, in JAX).

MaxText brings the map, Tunix moves the weights by it: it unstacks the scanned layers, applies the hooks
(MaxText folds 1 / sqrt(head_dim) into the query and interleaves the two halves of a rotation) and pads. What
the map does not name, Tunix only logs: the engine would go on with random numbers in that place.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from parts.tunix_api import MappingConfig, build_flat_dict

OUTPUT_LAYER = "base.decoder.logits_dense.kernel"
# Its name in tpu-inference 0.32, where MaxText 0.2.5 has an older one. Drop this when their names agree.
OUTPUT_LAYERS = {"qwen3-0.6b": "lm_head.weight"}


def engine_mapping(actor, model_name: str, head_dim: int) -> MappingConfig:
    """MaxText's own map to the engine, for these sizes.

    Args:
        actor: `TunixMaxTextAdapter` of a model with scanned layers.
        model_name: MaxText's, of llama.ARCHITECTURES.
        head_dim: width of a head in the engine: 64 or a multiple of 128, whatever the model's. Tunix pads
            the kernels of query, key and value with zeros, but not the output's.
    """
    mapping = MappingConfig.from_model(actor, "vllm_jax")

    def pad_heads(kernel):  # [heads, head_dim, embed]
        return jnp.pad(kernel, ((0, 0), (0, head_dim - kernel.shape[1]), (0, 0)))

    hooks = {**mapping.to_hf_hook_fns, "base.decoder.layers.self_attention.out.kernel": pad_heads}
    name, axes = mapping.to_hf_mappings[OUTPUT_LAYER]
    names = {**mapping.to_hf_mappings, OUTPUT_LAYER: (OUTPUT_LAYERS.get(model_name, name), axes)}
    return dataclasses.replace(mapping, to_hf_hook_fns=hooks, to_hf_mappings=names)


def check_mapping(names: dict[str, tuple], source: nnx.State, target: nnx.State) -> None:
    """Makes sure that each parameter of `source` has a place in `target`, and each of `target` is filled.

    Args:
        names: `to_hf_mappings`: MaxText's name to (engine's name, axes).
        source: parameters of the actor, arrays or shapes.
        target: parameters of the engine, arrays or shapes.

    Raises:
        ValueError: names the parameters that would keep their random numbers, or lead nowhere.
    """

    def paths(state):
        return [".".join(map(str, path)) for path, _ in state.flat_state()]

    reached = build_flat_dict(target.flat_state(), names)
    filled = []
    for _, path, _ in reached.values():
        filled += path if isinstance(path, list) else [path]
    odd = set(paths(source)) ^ set(reached) | set(paths(target)) ^ set(filled)
    if odd or len(filled) != len(set(filled)):
        raise ValueError(f"MaxText's map to vLLM misses {len(odd)} weights: {', '.join(sorted(odd)[:4])}")
