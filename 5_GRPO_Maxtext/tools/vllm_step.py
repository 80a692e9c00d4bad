"""A step of vLLM's engine for TPUs (tpu-inference 0.32.0), for fit_check in the TPU's environment.

Its Llama with the paged attention kernel (Pallas), the sampler and the log-probs; the engine itself
compiles them separately.
"""

import types

import jax
import jax.numpy as jnp
import tpu_inference.kernels.ragged_paged_attention.v3.kernel as kernel
import tpu_inference.kernels.ragged_paged_attention.v3.tuned_block_sizes as block_sizes
import tpu_inference.layers.jax.sample.sampling as sampling
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_inference.distributed import jax_parallel_state
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata
from tpu_inference.models.jax.llama3 import LlamaForCausalLM
from tpu_inference.runner.kv_cache import get_kv_cache_shape_with_mesh

from constants import RunConstants

# vLLM's defaults on a v6e: at once, per step; tokens of a page
SEQUENCES, TOKENS, PAGE = 256, 2048, 64


def step_program(c: RunConstants, hf, mesh: Mesh, chip: str):
    """A step that reads TOKENS tokens of SEQUENCES answers and samples a token of each.

    `mesh` is ("data", "model") of the chips that generate, of the kind `chip`: "v5e", "v5p" or
    "v6e". Returns the function, to be compiled inside `jax.set_mesh(mesh)`, and its arguments:
    weights, KV cache of SEQUENCES whole answers, the rest.
    """
    for module in (kernel, block_sizes):  # they would ask jax for the attached chip
        module.get_tpu_version = lambda: int(chip[1])
    block_sizes.get_device_name = lambda *_: f"TPU {chip}".removesuffix("p")
    jax_parallel_state._PP = jax_parallel_state.GroupCoordinator(0, 1)
    dtype = jnp.dtype(c.DTYPE)
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            hf_config=hf, dtype=dtype, get_vocab_size=lambda: hf.vocab_size
        ),
        cache_config=types.SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )

    def array(shape, dtype=jnp.int32, spec=None):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or P()))

    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: LlamaForCausalLM(config, jax.random.key(0), mesh))
    graphdef, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    weights = jax.tree.map(lambda x, spec: array(x.shape, x.dtype, spec), state, specs)

    def step(weights, caches, tokens, metadata, last, key, sampling_metadata):
        model = nnx.merge(graphdef, weights)
        caches, hidden, *_ = model(caches, tokens, metadata)
        logits = model.compute_logits(hidden[last]).astype(jnp.float32)  # [SEQUENCES, V]
        # a jit with its own options can't be nested in another one
        draw = sampling.sample.__wrapped__
        sampled, drawn_from = draw(
            key, mesh, logits, sampling_metadata, allow_distributed_sampling=False
        )
        return caches, sampling.gather_logprobs(sampling.compute_logprobs(drawn_from), sampled, 1)

    pages = SEQUENCES * -(-(c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS) // PAGE)
    # repeated where there are more chips
    kv_heads = max(hf.num_key_value_heads, mesh.shape["model"])
    shape = get_kv_cache_shape_with_mesh(mesh, pages, PAGE, kv_heads, hf.head_dim, dtype)
    cache = array(shape, dtype, P("data", None, "model"))
    metadata = AttentionMetadata(
        input_positions=array((TOKENS,)),
        block_tables=array((pages,)),
        seq_lens=array((SEQUENCES,)),
        query_start_loc=array((SEQUENCES + 1,)),
        request_distribution=array((3,)),
    )
    per_answer, share = array((SEQUENCES,)), array((SEQUENCES,), jnp.float32)
    sampling_metadata = TPUSupportedSamplingMetadata(share, per_answer, share, do_sampling=True)
    key, caches = array((), jax.random.key(0).dtype), [cache] * hf.num_hidden_layers
    return step, (weights, caches, array((TOKENS,)), metadata, per_answer, key, sampling_metadata)
