"""Faster training on a CPU: rewrites the parts that XLA's CPU backend compiles badly.

When a model is built for a CPU, MaxText uses these subclasses of its modules, which compute the
same up to rounding. Other devices keep MaxText's: we measured this on CPUs, and flash attention
can't handle rows with several answers. docs/operate/speed.md has each one's speedup. Drop one once
MaxText (0.2.5) or XLA (jaxlib 0.12.0) is fast without it.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.common.common_types import DEFAULT_MASK_VALUE, MODEL_MODE_TRAIN
from maxtext.layers import attentions, linears
from maxtext.layers.attention_op import AttentionOp
from maxtext.layers.embeddings import LLaMARotaryEmbedding
from maxtext.layers.linears import DenseGeneral

from model.versions import patched

# The KV cache's layout: heads before tokens, the order in which attention's matrix products read
# it. MaxText's own order suits a TPU and would be transposed for each token.
CACHE_LAYOUT = dict.fromkeys(
    ("prefill_cache_axis_order", "ar_cache_axis_order", "compute_axis_order"), "0,2,1,3"
)


# %% Modules ---------------------------------------------------------------------------------------
class RotaryOnce(LLaMARotaryEmbedding):
    """Llama's rotary embedding (arXiv 2104.09864, eq. 34), with sin and cos once, not in each of 66
    uses.
    """

    def __call__(self, inputs: jax.Array, position: jax.Array) -> jax.Array:
        """Rotates each pair (x_2i, x_2i+1) of `inputs` [B, L, heads, D] by position [B, L] x
        frequency i.
        """
        angle = position[:, :, None, None] / self.timescale[..., ::2]  # [B, L, 1, D / 2]
        # Without the barrier XLA inlines both functions into every consumer, forward and backward.
        sin, cos = jax.lax.optimization_barrier((jnp.sin(angle), jnp.cos(angle)))
        even, odd = inputs[..., ::2], inputs[..., 1::2]
        turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(
            inputs.shape
        )
        return turned.astype(self.fprop_dtype) if self.cast_as_fprop_dtype else turned


@jax.custom_vjp
def fusion_barrier(x: jax.Array) -> jax.Array:
    """Identity that stops XLA from fusing across its gradient."""
    return x


fusion_barrier.defvjp(
    lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


class UnfusedDense(DenseGeneral):
    """Computes operands before transposing them: fused, a transpose would read arrays with a large
    stride.
    """

    def __call__(self, inputs: jax.Array, *arguments, **named) -> jax.Array:
        """Like MaxText's: inputs [..., in features] to [..., out features]."""
        rows, features = inputs.shape[: -len(self.axis)], inputs.shape[-len(self.axis) :]
        flat = fusion_barrier(inputs.reshape(-1, *features))
        outputs = fusion_barrier(super().__call__(flat, *arguments, **named))
        return outputs.reshape(*rows, *outputs.shape[1:])


class SharedPromptAttention(AttentionOp):
    """Attention over rows with one prompt and its G answers, inside `logits_of_groups`.

    An answer token attends to the prompt and to its own answer so far, as in a separate row; the
    softmax runs over both.
    """

    sizes = None  # while a model with such rows is traced: tokens of the prompt, answers per prompt

    def __call__(
        self, query, key, value, decoder_segment_ids, inputs_positions, model_mode, *rest, **named
    ):
        """Like MaxText's: query [B, L, heads, D], key and value [B, L, kv_heads, D]; [B, L, heads,
        D].
        """
        attend = super().__call__
        if self.sizes is None or model_mode != MODEL_MODE_TRAIN:
            return attend(
                query, key, value, decoder_segment_ids, inputs_positions, model_mode, *rest, **named
            )
        P, G = self.sizes
        B, L, heads, D = query.shape
        K, T = key.shape[2], (L - P) // G
        of_prompt = (x[:, :P] for x in (query, key, value, decoder_segment_ids))
        prompt = attend(*of_prompt, None, model_mode)
        # [B, 1, 1, 1, 1, P]: no padding
        to_prompt = decoder_segment_ids[:, None, None, None, None, :P] == 1
        # padding comes after an answer, so no token sees it
        to_answer = jnp.tril(jnp.ones((T, T), bool))
        # h = heads // K query heads per key head
        q = query[:, P:].reshape(B, G, T, K, heads // K, D)
        k, v = (x[:, P:].reshape(B, G, T, K, D) for x in (key, value))

        def product(*operands):
            return jnp.einsum(*operands, precision=self.config.matmul_precision)

        scores = [
            jnp.where(mask, s.astype(jnp.float32) if self.float32_logits else s, DEFAULT_MASK_VALUE)
            for mask, s in (
                (to_prompt, product("bgtkhd,bskd->bkghts", q, key[:, :P])),  # [B, K, G, h, T, P]
                (to_answer, product("bgtkhd,bgskd->bkghts", q, k)),  # [B, K, G, h, T, T]
            )
        ]
        largest = jnp.maximum(*(s.max(axis=-1, keepdims=True) for s in scores))
        weights = [jnp.exp(s - jax.lax.stop_gradient(largest)) for s in scores]
        total = sum(w.sum(axis=-1, keepdims=True) for w in weights)
        of_prompt, of_answer = (w / total for w in weights)
        answers = product("bkghts,bskd->bgtkhd", of_prompt, value[:, :P])
        answers += product("bkghts,bgskd->bgtkhd", of_answer, v)  # [B, G, T, K, h, D]
        return jnp.concatenate([prompt, answers.reshape(B, G * T, heads, D)], axis=1)


@contextlib.contextmanager
def modules_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Makes MaxText use the modules above while the block builds a model for CPUs."""
    replaced = []
    if mesh.devices.flat[0].platform == "cpu":
        replaced = [(attentions, RotaryOnce), (attentions, UnfusedDense), (linears, UnfusedDense)]
        replaced += [(attentions, SharedPromptAttention)] if mesh.size == 1 else []
    with contextlib.ExitStack() as stack:
        for module, subclass in replaced:
            stack.enter_context(patched(module, subclass.__base__.__name__, subclass))
        yield


# %% One row per question --------------------------------------------------------------------------
def shares_prompts(model: nnx.Module) -> bool:
    """Whether a model accepts rows with one prompt and several answers."""
    return any(isinstance(module, SharedPromptAttention) for _, module in nnx.iter_modules(model))


def logits_of_groups(
    model, tokens, positions, segment_ids, *, prompt_tokens: int, answers: int
) -> jax.Array:
    """Logits [N, T, V] for N = B * G rows [N, P + T], each prompt of P tokens computed once.

    `model` must satisfy `shares_prompts`; the G rows of a question are adjacent. `segment_ids` are
    1, or 0 for padding. The logits for an answer's token t come from the token before it.
    """
    P, G = prompt_tokens, answers

    def folded(x):
        return jnp.concatenate([x[::G, :P], x[:, P:].reshape(-1, G * (x.shape[1] - P))], axis=1)

    with patched(SharedPromptAttention, "sizes", (P, G)):
        # [B, P + G * T, V]
        logits, _ = model(
            folded(tokens),
            positions=folded(positions),
            cache=None,
            attention_mask=None,
            segment_ids=folded(segment_ids),
        )
    B, _, V = logits.shape
    first = jnp.broadcast_to(logits[:, P - 1, None, None], (B, G, 1, V))  # shared by all G answers
    later = logits[:, P:].reshape(B, G, -1, V)[:, :, :-1]
    return jnp.concatenate([first, later], axis=2).reshape(B * G, -1, V)
