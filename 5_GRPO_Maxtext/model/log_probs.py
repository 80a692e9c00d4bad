"""Log-probs of answers under a model, and a gradient pass's metrics for the log."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import faster_on_cpu


def log_probs(
    model,
    prompts,
    completions,
    *,
    pad_id: int,
    temperature,
    logits_clip: float = 0.0,
    num_generations=1,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs [N, T] of the answers' tokens, and the logits [N, T, V], clipped and divided by
    temperature.

    `model` is called as Tunix calls it, with `prompts` int32 [N, P], left-padded, of which
    `num_generations` adjacent ones are equal, and `completions` int32 [N, T], right-padded. The
    sampler's `temperature` may be traced, so a schedule doesn't recompile. `logits_clip` is the
    largest absolute logit (0 = off).
    """
    tokens = jnp.concatenate([prompts, completions], axis=1)  # [N, P + T]
    segment_ids = (tokens != pad_id).astype(jnp.int32)  # 1; 0 for padding, which no token sees
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)  # [N, P + T]
    if num_generations > 1 and faster_on_cpu.shares_prompts(model):
        logits = faster_on_cpu.logits_of_groups(
            model,
            tokens,
            positions,
            segment_ids,
            prompt_tokens=prompts.shape[1],
            answers=num_generations,
        )
    else:
        logits, _ = model(
            tokens, positions, cache=None, attention_mask=None, segment_ids=segment_ids
        )
        # [N, T, V]: token t's logits are at t - 1
        logits = logits[:, -completions.shape[1] - 1 : -1]
    if logits_clip:
        logits = jnp.clip(logits, -logits_clip, logits_clip)
    logits /= temperature
    chosen = jnp.take_along_axis(logits, completions[..., None], axis=-1)[..., 0]  # [N, T]
    return chosen.astype(jnp.float32) - jax.nn.logsumexp(
        logits.astype(jnp.float32), axis=-1
    ), logits


@functools.partial(jax.jit, static_argnames=("pad_id", "logits_clip", "num_generations"))
def log_probs_of_states(graphdef, states, prompts, completions, **arguments) -> jax.Array:
    """`log_probs` of a split model as a program, without logits; tokens and result are [passes, N,
    ...].
    """

    def one_pass(tokens):
        return log_probs(nnx.merge(graphdef, *states, copy=True), *tokens, **arguments)[0]

    return jax.lax.map(one_pass, (prompts, completions))


def entropy_of(logits: jax.Array) -> jax.Array:
    """Entropy of the distribution with these logits [..., V], in nats: [...]."""
    log_p = jax.nn.log_softmax(logits)
    return -(jax.nn.softmax(log_p) * log_p).sum(axis=-1)


def token_metrics(batch, **per_token: jax.Array) -> dict[str, jax.Array]:
    """A gradient pass's metrics [N, T] over the trained tokens, for the log.

    Returns:
        Sum and count [2] of each, and of `mismatch`, |log pi_old - log pi_sampler| (nats); the
        largest mismatch [], `mismatch_max`; and `log_prob_before_update` [N, T], for answers.jsonl.
    """
    per_token["mismatch"] = jnp.abs(batch.old_log_prob - batch.sampler_log_prob)  # [N, T]
    sums = {name: jnp.where(batch.mask, values, 0.0).sum() for name, values in per_token.items()}
    counted = {
        name: jnp.stack([total, batch.mask.sum().astype(total.dtype)])
        for name, total in sums.items()
    }
    largest = jnp.where(batch.mask, per_token["mismatch"], 0.0).max()
    return counted | {"mismatch_max": largest, "log_prob_before_update": batch.old_log_prob}


def mean_metrics(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """`token_metrics` of an update's passes as one number each: the mean over all tokens, nan
    without any.

    A mean of the passes' means would weigh a few tokens like many. The arrays may be stacked:
    [passes, ...].
    """
    means = {}
    for name, values in jax.tree.map(np.asarray, metrics).items():
        if name == "mismatch_max":
            means[name] = float(values.max())
        else:
            total, count = values.reshape(-1, 2).sum(axis=0)
            means[name] = float(total / count) if count else math.nan
    if math.isnan(means.get("mismatch", 0.0)):  # of no tokens
        means["mismatch_max"] = math.nan
    return means
