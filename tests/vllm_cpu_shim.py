"""Lets tpu-inference 0.32.0's JAX runner, vLLM's engine on a TPU, run on JAX's CPU backend: for
tests only.

Four parts of it ask for a TPU: the name of the device, its memory, compiler options that XLA's CPU
compiler does not know, and the attention kernel (Pallas). The first three get fixed answers; the
kernel is replaced by a plain JAX function of the same arguments and results, for head widths that
are multiples of 128. And Tunix forbids all transfers during a weight sync on whatever is neither
TPU nor GPU, then makes one itself: that guard goes. Scheduler, block tables, KV cache, model,
sampler and weight transfer stay as they are. Import this module before anything of JAX or vLLM.
"""

import contextlib
import os

# compile what is asked for, not every padded size beforehand; a test sets 0
os.environ.setdefault("SKIP_JAX_PRECOMPILE", "1")
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_NAME": "local",
    "TPU_WORKER_ID": "0",
}

import jax
import jax.numpy as jnp
import tpu_inference.models.common.compiler_options as compiler_options

# Before the modules that copy these names.
compiler_options.get_step_fn_compiler_options = dict
compiler_options.get_sampling_compiler_options = dict

import tpu_inference.layers.common.attention_interface as attention_interface
import tpu_inference.utils as tpu_utils

tpu_utils.get_device_name = lambda num_devices=None: "TPU v6e"
tpu_utils.hbm_usage_bytes = lambda devices: [(0, 1 << 30) for _ in devices]  # (used, limit)

jax.transfer_guard_host_to_device = lambda level: contextlib.nullcontext()


def ragged_paged_attention(
    q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *, sm_scale, **options
):
    """Writes the new keys and values into the paged cache and attends causally to all that came
    before.

    `q` [T, H, D], `k` and `v` [T, K, D] are the new tokens of all sequences, one after the other,
    which begin at `cu_q_lens` [S + 1]; `kv_lens` [S] are a sequence's tokens with them. `kv_cache`
    is [pages, page_size, 2 K, 1, D], key and value of a head side by side; `page_indices` is [S *
    pages a sequence]. The last of `distribution` [3] is the number of sequences. Returns [T, H, D]
    and the new cache.
    """
    assert options.pop("update_kv_cache") and options.pop("use_causal_mask")
    assert not any(options.values()), options
    (T, H, D) = q.shape
    K = k.shape[1]
    (num_pages, page_size, *_) = kv_cache.shape
    S = kv_lens.shape[0]
    pages = page_indices.reshape(S, -1)  # [S, pages a sequence]
    t = jnp.arange(T)
    sequence = jnp.clip(jnp.searchsorted(cu_q_lens[1:], t, side="right"), 0, S - 1)  # [T]
    valid = t < cu_q_lens[distribution[-1]]  # [T]
    new = cu_q_lens[sequence + 1] - cu_q_lens[sequence]
    position = jnp.where(valid, kv_lens[sequence] - new + t - cu_q_lens[sequence], 0)  # [T]
    # out of range: dropped
    page = jnp.where(valid, pages[sequence, position // page_size], num_pages)
    pair = jnp.stack([k, v], axis=2).reshape(T, *kv_cache.shape[2:])  # [T, 2 K, 1, D]
    kv_cache = kv_cache.at[page, position % page_size].set(pair.astype(kv_cache.dtype), mode="drop")

    kv = kv_cache[pages].reshape(S, -1, K, 2, D)  # [S, L, K, 2, D]
    keys, values = kv[sequence, :, :, 0], kv[sequence, :, :, 1]  # [T, L, K, D]
    scores = jnp.einsum("tkgd,tlkd->tkgl", q.reshape(T, K, H // K, D), keys) * sm_scale
    seen = (jnp.arange(kv.shape[1]) <= position[:, None]) & valid[:, None]  # [T, L]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    output = jnp.einsum("tkgl,tlkd->tkgd", weights, values).reshape(T, H, D)
    return jnp.where(valid[:, None, None], output, 0).astype(q.dtype), kv_cache


attention_interface.ragged_paged_attention = ragged_paged_attention
