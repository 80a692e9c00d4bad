"""LoRA: freezes the model and trains a small matrix product next to each weight.

    y = x W + (alpha / r) x A B      W [in, out] frozen, A [in, r] random, B [r, out] zero at first

(Hu et al. 2021, arXiv 2106.09685, eq. 3). With B = 0 the first answers are exactly the base
model's. qwix puts A and B into the MaxText model. The main script differentiates, updates and saves
only those two, and the reference shares the frozen weights. Generation and export use W + (alpha /
r) A B.

We create A and B here because qwix (0.1.8), in a first run of the model, would sample the same A
for every layer, copy a stack's frozen weights, and give A and B the axis names of W, which has one
more dimension. It uses existing ones if it finds them. Drop this when its own initialization works
with MaxText's Llama.
"""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from settings import names_in

TARGETS = {  # Hugging Face's (and PEFT's) name of a weight: MaxText's module
    "q_proj": "self_attention/query",
    "k_proj": "self_attention/key",
    "v_proj": "self_attention/value",
    "o_proj": "self_attention/out",
    "gate_proj": "mlp/wi_0",
    "up_proj": "mlp/wi_1",
    "down_proj": "mlp/wo",
}


class LoraProvider(qwix.LoraProvider):
    """qwix's provider, with the sum x W + (alpha / r) x A B in the dtype of x.

    With float32 weights and bfloat16 activations, qwix's sum and every later activation would be
    float32, and stacked layers (SCAN_LAYERS=True) wouldn't compile. Drop this when qwix rounds its
    sum.
    """

    def dot_general(self, lhs, *args, **kwargs):
        """Activation times weight, with the LoRA product added."""
        return super().dot_general(lhs, *args, **kwargs).astype(lhs.dtype)


def add_lora(
    adapter, mesh: jax.sharding.Mesh, config, rank: int, alpha: float, targets: str, seed: int
) -> tuple[nnx.Module, Callable[[nnx.State], nnx.State]]:
    """A model that shares the weight arrays of `adapter` and adds A and B to those in `targets`.

    A is uniform with variance 2 / in (He et al. 2015, qwix's choice), sampled per layer; B is 0.
    Both are small, so they're replicated on each device of `mesh`.

    Returns:
        Another adapter, and `merge` for its parameters. Its `nnx.LoRAParam` are `kernel_lora_a`
        [in, r] and `kernel_lora_b` [r, out], for stacked layers [in, layer, r] and [r, layer, out].
    """
    names = {TARGETS[name]: name for name in names_in(targets)}
    provider = LoraProvider(
        module_path=rf"decoder/layers.*/({'|'.join(names)})", rank=rank, alpha=alpha
    )
    tokens = jnp.zeros((1, 1), jnp.int32)  # never used: no first run
    base = qwix.apply_lora_to_model(
        adapter.base, provider, tokens, rngs=nnx.Rngs(0), skip_nnx_init=True
    )
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    key = jax.random.key(seed)
    for i, (path, module) in enumerate(nnx.iter_modules(base)):
        name = names.get("/".join(map(str, path[-2:])))
        if name is None:
            continue
        inner, *outer = module.kernel.shape
        layers = (outer.pop(0),) if config.scan_layers else ()
        if name == "o_proj":  # [heads, head_dim, embed]: the others have one axis of inputs
            inner *= outer.pop(0)
        a, b = (inner, *layers, rank), (rank, *layers, math.prod(outer))
        draw = jax.nn.initializers.he_uniform(in_axis=0, batch_axis=tuple(range(1, len(a) - 1)))
        dtype = module.kernel.dtype
        for letter, value in (
            ("a", draw(jax.random.fold_in(key, i), a, dtype)),
            ("b", jnp.zeros(b, dtype)),
        ):
            setattr(
                module, f"kernel_lora_{letter}", nnx.LoRAParam(jax.device_put(value, everywhere))
            )
    lora = nnx.clone(adapter)
    lora.base = base
    return lora, functools.partial(merge, scale=alpha / rank)


def product(a, b, shape: Iterable[int], scale: float):
    """scale * A B in the shape of its weight; the layer axis is the second."""
    # highest: a TPU would multiply in bfloat16
    # [in, out], [layer, in, out]
    added = jnp.einsum("i...r,r...o->...io", a, b, precision="highest") * scale
    if a.ndim == 2:
        return added.reshape(shape)
    inner, layers, *outer = shape
    return jnp.moveaxis(added.reshape(layers, inner, *outer), 0, 1)


def merge(params: nnx.State, scale: float) -> nnx.State:
    """Converts the `nnx.Param` state of a model from `add_lora`, or of its `base`, to a plain
    model's.

    Replaces W with W + scale * A B, where scale is alpha / r; the others don't change.
    """
    leaves = dict(nnx.to_flat_state(params))
    merged = {}
    for path, weight in leaves.items():
        *module, name = path
        if isinstance(weight, nnx.LoRAParam):
            continue
        a, b = (leaves.get((*module, f"{name}_lora_{letter}")) for letter in "ab")
        if a is not None:
            value = weight.get_value()
            added = product(a.get_value(), b.get_value(), value.shape, scale)
            weight = weight.replace(value + added.astype(value.dtype))
        merged[path] = weight
    return nnx.from_flat_state(merged)


def count_parameters(hf, rank: int, targets: str) -> int:
    """Number of parameters in all A and B of a Llama with the sizes of `hf` (its `LlamaConfig`)."""
    E, F = hf.hidden_size, hf.intermediate_size
    # in + out
    q, kv = (E + n * hf.head_dim for n in (hf.num_attention_heads, hf.num_key_value_heads))
    sizes = dict(
        q_proj=q, k_proj=kv, v_proj=kv, o_proj=q, gate_proj=E + F, up_proj=E + F, down_proj=E + F
    )
    return hf.num_hidden_layers * rank * sum(sizes[name] for name in names_in(targets))
