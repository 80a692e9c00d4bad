"""Generation with the very model that is being trained: MaxText decoding as one compiled program.

On a TPU VM, vLLM generates the answers. Everywhere else this file does: Tunix accepts any
`BaseRollout`, and its own 'vanilla' one cannot drive a MaxText model. One call is one program:

    prefill   all prompt tokens in a single forward pass, which fills the prompt's half of the KV cache
    decode    one token per step for all rows, until every row has ended

Three things differ from Tunix's vanilla sampler. Each would spoil learning silently:

    end of sequence    stays in the completion: otherwise it is never trained, and answers never learn to stop
    random key         depends on the training step: otherwise every step samples the same, or a resumed run
                       samples differently
    log-probs          use the sampling temperature: otherwise the ratio of the first inner update is not 1
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import partitioning as nn_partitioning
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE, MODEL_MODE_PREFILL
from maxtext.utils import model_creation_utils
from tunix.generate.sampler import sample_top_p
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from parts.model import faster_on_cpu, llama
from parts.model.log_probs import completion_log_probs

GENERATION_CONFIGS = {
    "greedy": dict(temperature=0.0, top_k=1, top_p=1.0),
    "standard": dict(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": dict(temperature=0.85, top_k=-1, top_p=1.0),
}


def rollout_config(
    sampling: dict[str, float], *, prompt_tokens: int, new_tokens: int, **changes: Any
) -> RolloutConfig:
    """Tunix's `RolloutConfig`.

    Args:
        sampling: temperature, top_k and top_p, such as an entry of GENERATION_CONFIGS.
        prompt_tokens: P, the longest prompt.
        new_tokens: T, the longest answer.
        changes: further fields.
    """
    return RolloutConfig(
        **sampling,
        max_prompt_length=prompt_tokens,
        max_tokens_to_generate=new_tokens,
        kv_cache_size=prompt_tokens + new_tokens,
        **changes,
    )


def right_padded(rows: Sequence[Sequence[Any]], width: int, fill: Any, dtype) -> np.ndarray:
    """Rows of at most `width` values as an array [N, width], `fill` behind them."""
    padded = np.full((len(rows), width), fill, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def unused_random_state(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """A key or a counter of that shape; decoding without dropout never draws from it."""
    is_key = jax.dtypes.issubdtype(abstract.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(jax.random.key(0) if is_key else jnp.zeros((), abstract.dtype), abstract.shape)


def sample(logits: jax.Array, t: int, key: jax.Array, temperature, greedy: bool, top_p: float, top_k: int):
    """Token t of each row, from logits [B, 1, V], and its log-prob as it was drawn: [B], [B]."""
    if greedy:
        return jnp.argmax(logits[:, -1], axis=-1), jnp.zeros(len(logits))
    token = sample_top_p(logits, jax.random.fold_in(key, t), temperature, top_p, top_k)[0]
    return token, sampled_log_prob(logits[:, -1], token, temperature, top_p, top_k)


def sampled_log_prob(logits, token, temperature, top_p: float, top_k: int) -> jax.Array:
    """Log-prob of a token under what was left of the distribution after top-k and top-p, renormalised.

    Tunix's `sample_top_p` can return the log-prob before the cut, which hides the very difference that
    SAMPLER_CORRECTION is for.

    Args:
        logits: [B, V].
        token: int32 [B], drawn by `sample_top_p` with the same arguments.
        temperature: of the sampling.
        top_p: probability mass that is kept (1 = all).
        top_k: number of tokens that are kept (-1 = all).

    Returns:
        float32 [B].
    """
    scaled = logits.astype(jnp.float32) / temperature  # [B, V]
    kept = scaled
    if top_k > 0 or top_p < 1:
        kept, _ = jax.lax.top_k(scaled, top_k if top_k > 0 else scaled.shape[-1])  # [B, K], largest first
        probs = jax.nn.softmax(kept)
        kept = jnp.where(jnp.cumsum(probs, axis=-1) - probs > top_p, -jnp.inf, kept)
    drawn = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]  # [B]
    return drawn - jax.nn.logsumexp(kept, axis=-1)


class MaxTextRollout(BaseRollout):
    """A Tunix rollout engine that decodes with the actor's own weights (nothing to synchronise).

    Args:
        rollout_actor: `TunixMaxTextAdapter` around the actor; Tunix passes the one it trains.
        tokenizer: Tunix's `TokenizerAdapter` of a Hugging Face tokenizer with a pad token of its own.
        mesh: device mesh of the actor.
        rollout_config: Tunix's `RolloutConfig` of the training rollouts.
        maxtext_config: the actor's MaxText config. `max_prefill_predict_length` is the prompt limit P,
            `max_target_length` is P + T, `global_batch_size_to_load` the number of rows B of one call.
        hf: the checkpoint's config, for the rotary scaling.
        current_step: returns the training step; the sampling key of a step is a function of it.
        seed: sampling seed of the whole run.
        logits_clip: largest absolute logit, as in training (0 = off).
        merge: makes the plain model's parameters of the actor's, where that has LoRA matrices.
    """

    def __init__(
        self,
        rollout_actor,
        tokenizer,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        *,
        maxtext_config,
        hf,
        current_step: Callable[[], int],
        seed: int,
        logits_clip: float = 0.0,
        merge: Callable[[nnx.State], nnx.State] | None = None,
    ):
        self._actor = rollout_actor
        self._tokenizer = tokenizer
        self._mesh = mesh
        self._rollout_config = rollout_config  # not a copy: a schedule changes its temperature
        self._config = maxtext_config
        self._current_step = current_step
        self._seed = seed
        self._logits_clip = logits_clip
        self._merge = jax.jit(merge) if merge else None
        self._last_step, self._calls = None, 0
        with mesh, nn_partitioning.axis_rules(maxtext_config.logical_axis_rules):
            # A second module with the actor's layers and a KV cache, but without weights of its own:
            # `eval_shape` builds its structure without allocating anything.
            decoder = nnx.eval_shape(
                lambda: model_creation_utils.from_config(
                    maxtext_config,
                    mesh=mesh,
                    model_mode=MODEL_MODE_AUTOREGRESSIVE,
                    rngs=nnx.Rngs(params=0, dropout=1),
                )
            )
        llama.use_rope_scaling(decoder, hf)
        faster_on_cpu.adapt(decoder, mesh)
        self._graphdef, _, self._cache, rest = nnx.split(decoder, nnx.Param, nnx.Cache, ...)
        self._rest = jax.tree.map(unused_random_state, rest)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # on every host
        self._generate = jax.jit(
            self._prefill_and_decode, static_argnames=("sampling", "max_tokens"), out_shardings=whole
        )

    def _forward(self, params, rest, cache, tokens, positions, mode, segment_ids=None):
        """Logits [B, 1, V] of the last position, and the KV cache with these tokens in it.

        That of padding is -inf: drawn, it would be taken for the end of the answer, and the rest be lost.
        """
        state = jax.tree.map(lambda x: x, self._cache)
        nnx.replace_by_pure_dict(state, cache)
        model = nnx.merge(self._graphdef, params, state, rest, copy=True)
        logits = model(
            decoder_input_tokens=tokens,
            decoder_positions=positions,
            decoder_segment_ids=segment_ids,
            enable_dropout=False,
            model_mode=mode,
        )
        # a pure dict, not nnx states: only arrays may be carried through `while_loop`
        logits = logits[:, -1:]
        if self._logits_clip:  # otherwise another policy would be trained than answers
            logits = jnp.clip(logits, -self._logits_clip, self._logits_clip)
        logits = logits.at[..., self.pad_id()].set(-jnp.inf)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.Cache))

    def _prefill(self, params, rest, prompts, key, temperature, sampling, max_tokens):
        """The prompts into the KV cache, and the first token of each answer.

        Args:
            params: the actor's `nnx.Param` state.
            rest: the remaining (random-number) state of the decoder.
            prompts: int32 [B, P], left-padded.
            key: PRNG key; token t is drawn with `fold_in(key, t)`.
            temperature: of the sampling; traced, so that a schedule compiles nothing anew.
            sampling: static (greedy, top_p, top_k).
            max_tokens: T, static.

        Returns:
            The carry of `_decode_step`: t, cache, token [B], done [B], tokens [B, T], their log-probs
            [B, T], prompt lengths [B].
        """
        pad_id = self.pad_id()
        mask = prompts != pad_id  # [B, P]
        lengths = mask.sum(axis=1)  # [B]
        # Left padding: a row's last prompt token is always at P - 1, so is its first logit.
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)  # [B, P]
        empty = nnx.to_pure_dict(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._cache))
        logits, cache = self._forward(
            params, rest, empty, prompts, positions, MODEL_MODE_PREFILL, segment_ids=mask.astype(jnp.int32)
        )
        token, log_prob = sample(logits, 0, key, temperature, *sampling)
        # A row of padding alone only fills up the batch: it is done before it starts.
        token = jnp.where(lengths == 0, pad_id, token)
        done = (token == self.eos_id()) | (lengths == 0)
        tokens = jnp.full((prompts.shape[0], max_tokens), pad_id, jnp.int32).at[:, 0].set(token)
        log_probs = jnp.zeros(tokens.shape).at[:, 0].set(log_prob)
        return jnp.int32(1), cache, token.astype(jnp.int32), done, tokens, log_probs, lengths

    def _decode_step(self, params, rest, key, temperature, sampling, carry):
        """Token t of each answer that is not done; padding for the others. Arguments as in `_prefill`."""
        t, cache, token, done, tokens, log_probs, lengths = carry
        positions = lengths[:, None] + t - 1  # [B, 1]
        logits, cache = self._forward(
            params, rest, cache, token[:, None], positions, MODEL_MODE_AUTOREGRESSIVE
        )
        token, log_prob = sample(logits, t, key, temperature, *sampling)
        token = jnp.where(done, self.pad_id(), token)  # [B]
        tokens, log_probs = tokens.at[:, t].set(token), log_probs.at[:, t].set(log_prob)
        return t + 1, cache, token, done | (token == self.eos_id()), tokens, log_probs, lengths

    def _prefill_and_decode(self, params, rest, prompts, key, temperature, sampling, max_tokens):
        """Tokens up to and including end-of-sequence, padding after it: int32 [B, T]; and their log-probs.

        Arguments as in `_prefill`. The log-probs [B, T] are as `sampled_log_prob` has them.
        """
        *_, tokens, log_probs, _ = jax.lax.while_loop(
            lambda carry: (carry[0] < max_tokens) & ~jnp.all(carry[3]),
            lambda carry: self._decode_step(params, rest, key, temperature, sampling, carry),
            self._prefill(params, rest, prompts, key, temperature, sampling, max_tokens),
        )
        return tokens, log_probs

    def _weights(self) -> nnx.State:
        """`nnx.Param` state of the plain model that decodes."""
        params = nnx.state(self._actor.base, nnx.Param)
        return self._merge(params) if self._merge else params

    def _encode(self, prompts: Sequence[str], P: int) -> np.ndarray:
        """int32 [len(prompts), P], left-padded; raises ValueError if one is longer."""
        ids_of = {p: self._tokenizer.encode(p, add_special_tokens=False) for p in dict.fromkeys(prompts)}
        longest = max(len(ids) for ids in ids_of.values())
        if longest > P:
            raise ValueError(f"a prompt has {longest} tokens, max_prompt_length is {P}")
        padded = np.full((len(prompts), P), self.pad_id(), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[P - len(ids_of[prompt]) :] = ids_of[prompt]
        return padded

    def _fill_up(self, rows: np.ndarray) -> np.ndarray:
        """At most B rows as B rows, the rest padding: one shape, one compilation."""
        B = self._config.global_batch_size_to_load
        return np.pad(rows, ((0, B - len(rows)), (0, 0)), constant_values=self.pad_id())

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs) -> RolloutOutput:
        """Samples one completion for each prompt.

        Args:
            prompts: texts, chat template already applied.
            rollout_config: temperature, top_p, top_k, max_tokens_to_generate, max_prompt_length. With
                `seed=None` (training) the key is a function of (run seed, step, call within the step).

        Returns:
            `RolloutOutput`; `tokens` are unpadded and keep the end-of-sequence token, `logprobs` are of the
            distribution they were drawn from (temperature, top-k and top-p applied).

        Raises:
            ValueError: a prompt is longer than `max_prompt_length` tokens.
        """
        padded = self._encode(prompts, rollout_config.max_prompt_length)
        key = self._key(rollout_config.seed)
        temperature = rollout_config.temperature
        sampling = (temperature == 0.0, rollout_config.top_p, rollout_config.top_k)
        B = self._config.global_batch_size_to_load
        params = self._weights()
        chunks = []
        with self._mesh, nn_partitioning.axis_rules(self._config.logical_axis_rules):
            for i, start in enumerate(range(0, len(padded), B)):
                drawn = self._generate(
                    params,
                    self._rest,
                    self._fill_up(padded[start : start + B]),
                    jax.random.fold_in(key, i),
                    temperature,
                    sampling=sampling,
                    max_tokens=rollout_config.max_tokens_to_generate,
                )
                chunks.append(jax.tree.map(np.asarray, drawn))
        tokens, log_probs = (np.concatenate(parts)[: len(padded)] for parts in zip(*chunks, strict=True))
        lengths = (tokens != self.pad_id()).sum(axis=1)
        completions = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        return RolloutOutput(
            text=self._tokenizer.batch_decode(completions, skip_special_tokens=True),
            logits=None,
            tokens=completions,
            left_padded_prompt_tokens=padded,
            logprobs=[row[:n] for row, n in zip(log_probs, lengths, strict=True)],
        )

    def stream(self, prompt: str, rollout_config: RolloutConfig) -> Iterator[str]:
        """Yields the completion of one prompt piece by piece, as soon as a token makes one.

        The pieces together are the text that `generate` gives for this prompt alone, of the same seed.
        """
        row = self._fill_up(self._encode([prompt], rollout_config.max_prompt_length))
        key = jax.random.fold_in(self._key(rollout_config.seed), 0)
        temperature = rollout_config.temperature
        sampling = (temperature == 0.0, rollout_config.top_p, rollout_config.top_k)
        params, said = self._weights(), ""
        with self._mesh, nn_partitioning.axis_rules(self._config.logical_axis_rules):
            prefill = jax.jit(self._prefill, static_argnames=("sampling", "max_tokens"))
            step = jax.jit(self._decode_step, static_argnames="sampling", donate_argnames="carry")
            carry = prefill(
                params, self._rest, row, key, temperature, sampling=sampling,
                max_tokens=rollout_config.max_tokens_to_generate,
            )  # fmt: skip
            while True:
                t, _, _, done, tokens, *_ = carry
                # All tokens again: what one is in text can depend on those around it (spaces, UTF-8).
                text = self._tokenizer.decode(np.asarray(tokens[0, :t]).tolist(), skip_special_tokens=True)
                over = bool(done[0]) or t == tokens.shape[1]
                if text.startswith(said) and (over or not text.endswith("\ufffd")):  # half a character
                    yield text[len(said) :]
                    said = text
                if over:
                    return
                carry = step(params, self._rest, key, temperature, sampling=sampling, carry=carry)

    def _key(self, seed: jax.Array | None) -> jax.Array:
        if seed is not None:
            return seed
        step = self._current_step()
        # Tunix may ask several times in one step (micro-batches): each call has its own key.
        self._calls = self._calls + 1 if step == self._last_step else 0
        self._last_step = step
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), step), self._calls)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log-probs [B, T] of the completions under the current weights, at the step's temperature."""
        return completion_log_probs(
            self._actor, prompt_tokens[None], completion_tokens[None], pad_id=self.pad_id(),
            temperature=self._rollout_config.temperature, logits_clip=self._logits_clip,
        )[0]  # fmt: skip

    def update_params(self, params, filter_types=None) -> None:
        """Puts new weights into the model that decodes (a no-op while it shares the actor's)."""
        nnx.update(self._actor, params)

    @property
    def tokenizer(self):
        """Tunix's adapter of the tokenizer."""
        return self._tokenizer

    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Id of the end-of-sequence token."""
        return self._tokenizer.eos_id()

    def model(self):
        """The model whose weights generate: the actor itself."""
        return self._actor


class OneStepAhead:
    """Answers that are one step old: while a step trains on its own, the next step's are being drawn.

    vLLM has weights of its own, and draws beside the training. `MaxTextRollout` shares the trainer's, which
    the update gives away: there a step's draw ends before its update begins.

    Args:
        cluster: Tunix's.
        batches: of questions, by step.
        c: the constants of the run.
        saved: from `to_json`, where a run goes on.
    """

    def __init__(self, cluster, batches, c, saved: dict[str, Any] | None):
        self._cluster, self._batches, self._num_generations = cluster, batches, c.NUM_GENERATIONS
        self._drawer = futures.ThreadPoolExecutor(max_workers=1)
        self._ahead: futures.Future | None = None
        if saved:
            arrays = {name: [np.array(row) for row in saved[name]] for name in ("tokens", "logprobs")}
            prompts = np.array(saved["left_padded_prompt_tokens"], np.int32)
            self._ahead = futures.Future()
            self._ahead.set_result(
                RolloutOutput(text=saved["text"], logits=None, left_padded_prompt_tokens=prompts, **arrays)
            )

    def take(self, step: int, prompts: list[str]) -> RolloutOutput:
        """The answers of step `step`, counted from 0; those of the next one are begun."""
        drawn = self._ahead.result() if self._ahead else self._cluster.generate(prompts)
        self._ahead = None
        if step + 1 < len(self._batches):
            following = np.repeat(self._batches[step + 1]["prompts"], self._num_generations).tolist()
            self._ahead = self._drawer.submit(self._cluster.generate, following)
            if isinstance(self._cluster.rollout, MaxTextRollout):
                self.wait()
        return drawn

    def wait(self) -> None:
        """Until the answers ahead are drawn."""
        futures.wait([self._ahead] if self._ahead else [])

    def to_json(self) -> dict[str, Any] | None:
        """The answers ahead, for a checkpoint: the weights that drew them are gone when a run goes on."""
        if not self._ahead:
            return None
        output = self._ahead.result()
        return {
            "text": output.text,
            "tokens": [np.asarray(row).tolist() for row in output.tokens],
            "logprobs": [np.asarray(row, float).tolist() for row in output.logprobs],
            "left_padded_prompt_tokens": np.asarray(output.left_padded_prompt_tokens).tolist(),
        }
