"""Generation with the model being trained: MaxText decoding as compiled programs.

On a TPU VM, vLLM generates the answers; everywhere else this file does. Tunix accepts any
`BaseRollout`, and its own 'vanilla' one can't drive a MaxText model. A call runs two programs:

    prefill   all tokens of the prompts in one forward pass, which fills their half of the KV
              cache; once per prompt, however many answers we sample for it
    decode    one token per step for all rows, until every row has ended

Three things differ from Tunix's vanilla sampler. Getting any of them wrong would silently break
learning:

    end of sequence    stays in the completion: otherwise it's never trained, and answers never
                       learn to stop
    random key         is the caller's, `seed`, and depends on the training step: otherwise every
                       step samples the same, or a resumed run samples differently
    log-probs          use the sampling temperature: otherwise the ratio of the first inner update
                       isn't 1
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxtext.common import common_types
from maxtext.utils import model_creation_utils
from tokenizers.decoders import DecodeStream
from tunix.generate.sampler import sample_top_p
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from constants import RunConstants
from model import devices, faster_on_cpu, llama
from model.log_probs import log_probs_of_states

GENERATION_CONFIGS = {
    "greedy": dict(temperature=0.0, top_k=1, top_p=1.0),
    "standard": dict(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": dict(temperature=0.85, top_k=-1, top_p=1.0),
    "policy": dict(temperature=1.0, top_k=-1, top_p=1.0),  # samples from the policy itself
}


def sampling_config(c: RunConstants, config_name: str = "", **changes: Any) -> RolloutConfig:
    """How to sample answers: as in training, or with an entry of GENERATION_CONFIGS."""
    if config_name:
        sampling = GENERATION_CONFIGS[config_name]
    else:
        sampling = dict(temperature=c.TEMPERATURE, top_k=c.TOP_K, top_p=c.TOP_P)
    P, T = c.MAX_PROMPT_LENGTH, c.TOTAL_GENERATION_STEPS
    lengths = dict(max_prompt_length=P, max_tokens_to_generate=T, kv_cache_size=P + T)
    return RolloutConfig(**sampling, **lengths, **changes)


def has_end(tokens: Sequence[np.ndarray], eos_ids: Sequence[int]) -> np.ndarray:
    """Whether each answer has an end-of-sequence token: bool [N]."""
    return np.array([np.isin(eos_ids, ids).any() for ids in tokens])


def right_padded(rows: Sequence[Sequence[Any]], width: int, fill: Any, dtype) -> np.ndarray:
    """Rows of at most `width` values as an array [N, width], padded on the right with `fill`."""
    padded = np.full((len(rows), width), fill, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def sampling_method(config: RolloutConfig) -> tuple[bool, float, int]:
    """How a token is sampled: greedy, top_p, top_k. The temperature is the compiled program's
    argument.
    """
    return config.temperature == 0.0, config.top_p, config.top_k


def sample(
    logits: jax.Array, t, key: jax.Array, temperature, method, methods
) -> tuple[jax.Array, jax.Array]:
    """Samples token t of each row's answer from logits [B, V]: the tokens and their log-probs, [B]
    each.

    `method`, an index into the static `methods`, is traced, so training and both evaluations share
    a program.
    """

    def draw(greedy: bool, top_p: float, top_k: int):
        if greedy:
            return jnp.argmax(logits, axis=-1), jnp.zeros(len(logits))
        noise = jax.random.fold_in(key, t)
        kept = min(top_k, logits.shape[-1])  # the vocabulary may be smaller
        token = sample_top_p(logits[:, None], noise, temperature, top_p, kept)[0]
        return token, sampled_log_prob(logits, token, temperature, top_p, kept)

    return jax.lax.switch(method, [functools.partial(draw, *each) for each in methods])


def sampled_log_prob(logits, token, temperature, top_p: float, top_k: int) -> jax.Array:
    """Log-prob [B] of tokens under the distribution after top-k and top-p, renormalized.

    Tunix's `sample_top_p`, which sampled the `token` [B] from `logits` [B, V] with the same
    arguments, can return the log-prob before the cut. That would hide the difference
    SAMPLER_CORRECTION corrects.
    """
    scaled = logits.astype(jnp.float32) / temperature  # [B, V]
    kept = scaled
    if top_k > 0 or top_p < 1:
        # [B, K], largest first. Take them by their ids: libtpu 0.0.48 aborts on a top_k over rows
        # on several chips if only its values are used.
        _, ids = jax.lax.top_k(scaled, top_k if top_k > 0 else scaled.shape[-1])
        kept = jnp.take_along_axis(scaled, ids, axis=-1)
        probs = jax.nn.softmax(kept)
        kept = jnp.where(jnp.cumsum(probs, axis=-1) - probs > top_p, -jnp.inf, kept)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]  # [B]
    return chosen - jax.nn.logsumexp(kept, axis=-1)


class MaxTextRollout(BaseRollout):
    """A Tunix rollout engine that decodes with the actor's own weights (nothing to synchronize).

    Args:
        rollout_actor, tokenizer, mesh, rollout_config: as Tunix passes them.
        maxtext_config: the actor's, for P prompt tokens, P + T tokens and B rows of one call.
        hf: the checkpoint's config, for the rotary scaling.
        prompt_config: MaxText's config for the R rows of a prompt pass (None = B).
        logits_clip: largest absolute logit, as in training (0 = off).
        merge: merges the actor's LoRA matrices, if any, into plain parameters.
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
        prompt_config=None,
        logits_clip: float = 0.0,
        merge: Callable[[nnx.State], nnx.State] | None = None,
    ):
        self._actor = rollout_actor
        self.tokenizer = tokenizer
        self._mesh = mesh
        self._config = maxtext_config
        self._temperature, self._logits_clip = rollout_config.temperature, logits_clip
        self._merge = jax.jit(merge) if merge else None
        self.rows = maxtext_config.global_batch_size_to_load
        self._prompt_rows = (prompt_config or maxtext_config).global_batch_size_to_load
        self._graphdef, self._cache, rest = self._decoder(maxtext_config, hf)
        self._prompt_graphdef, self._prompt_cache, _ = self._decoder(
            prompt_config or maxtext_config, hf
        )
        with self._axes():
            self._cache_places = nnx.to_pure_dict(nnx.get_named_sharding(self._prompt_cache, mesh))
        self._rest = jax.tree.map(llama.unused_random_state, rest)
        configs = [RolloutConfig(**sampling) for sampling in GENERATION_CONFIGS.values()]
        self._methods = tuple(dict.fromkeys(map(sampling_method, [rollout_config, *configs])))
        self._prefill, self._spread = jax.jit(self._prompt_pass), jax.jit(self._spread_rows)
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._decode = jax.jit(  # donates the cache and returns it, so there's no second copy
            self._decode_all,
            static_argnames=("methods", "max_tokens"),
            donate_argnames="cache",
            out_shardings=(replicated, replicated, None),  # tokens and log-probs on every host
        )
        self._first = jax.jit(sample, static_argnames="methods")
        self._next = jax.jit(self._column, static_argnames="methods", donate_argnames="cache")

    def _decoder(self, config, hf) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """The structure of a module with the actor's layers and a KV cache; allocates nothing."""
        with self._axes(), faster_on_cpu.modules_for(self._mesh):
            decoder = nnx.eval_shape(
                lambda: model_creation_utils.from_config(
                    config,
                    mesh=self._mesh,
                    model_mode=common_types.MODEL_MODE_AUTOREGRESSIVE,
                    rngs=nnx.Rngs(params=0, dropout=1),
                )
            )
        llama.use_rope_scaling(decoder, hf)
        graphdef, _, cache, rest = nnx.split(decoder, nnx.Param, nnx.Cache, ...)
        return graphdef, cache, rest

    def _forward(
        self, graphdef, empty, params, rest, cache, tokens, positions, mode, segment_ids=None
    ):
        """Logits [rows, V] of the last position, and the KV cache with these tokens in it.

        Padding gets the logit -inf, because a sampled pad token would end the answer.
        """
        state = jax.tree.map(lambda x: x, empty)
        nnx.replace_by_pure_dict(state, cache)
        model = nnx.merge(graphdef, params, state, rest, copy=True)
        logits = model(
            decoder_input_tokens=tokens,
            decoder_positions=positions,
            decoder_segment_ids=segment_ids,
            enable_dropout=False,
            model_mode=mode,
        )[:, -1]
        if self._logits_clip:  # otherwise we'd train a different policy than we sample from
            logits = jnp.clip(logits, -self._logits_clip, self._logits_clip)
        logits = logits.at[..., self.pad_id()].set(-jnp.inf)
        # a pure dict instead of nnx states, because `while_loop` can only carry arrays
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.Cache))

    def _prompt_pass(self, params, rest, prompts):
        """Left-padded prompts [R, P]: logits [R, V] of the answers' first tokens, and the KV cache.

        `params` is the actor's `nnx.Param` state, `rest` the decoder's random-number state.
        """
        mask = prompts != self.pad_id()  # [R, P]
        # With left padding, a row's last prompt token is always at P - 1, and so is its first
        # logit.
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)  # [R, P]
        empty = nnx.to_pure_dict(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._prompt_cache)
        )
        logits, cache = self._forward(
            self._prompt_graphdef,
            self._prompt_cache,
            params,
            rest,
            empty,
            prompts,
            positions,
            common_types.MODEL_MODE_PREFILL,
            segment_ids=mask.astype(jnp.int32),
        )
        # MaxText itself splits the cache over the devices only once it decodes.
        return logits, jax.lax.with_sharding_constraint(cache, self._cache_places)

    def _spread_rows(self, passes, rows):
        """Repeats the prompt passes' output for each answer; `rows` [B] maps answers to prompt
        rows.
        """

        # the shapes of R and of B rows: their axis is where these differ
        def spread(one, whole, *parts):
            axis = next((i for i, n in enumerate(one.shape) if n != whole.shape[i]), None)
            return parts[0] if axis is None else jnp.concatenate(parts, axis).take(rows, axis)

        logits, caches = zip(*passes)
        shapes = map(nnx.to_pure_dict, (self._prompt_cache, self._cache))
        return jnp.concatenate(logits)[rows], jax.tree.map(spread, *shapes, *caches)

    def _prompts_done(self, params, prompts: np.ndarray) -> tuple[jax.Array, Any]:
        """Logits [B, V] of the first tokens and the KV cache for prompts [B, P], each computed
        once.
        """
        R = self._prompt_rows
        if len(prompts) == R:
            return self._prefill(params, self._rest, prompts)
        different, rows = np.unique(prompts, axis=0, return_inverse=True)
        passes = [
            self._prefill(params, self._rest, self._fill_up(different[start : start + R], R))
            for start in range(0, len(different), R)
        ]
        return self._spread(passes, rows.astype(np.int32))

    def _column(self, params, rest, cache, token, lengths, t, key, temperature, method, methods):
        """Token t of each row and its log-prob, sampled after the tokens [B] of column t - 1; the
        cache.
        """
        positions = lengths[:, None] + t - 1  # [B, 1]
        logits, cache = self._forward(
            self._graphdef,
            self._cache,
            params,
            rest,
            cache,
            token[:, None],
            positions,
            common_types.MODEL_MODE_AUTOREGRESSIVE,
        )
        return *sample(logits, t, key, temperature, method, methods), cache

    def _decode_all(
        self, params, rest, cache, logits, lengths, key, temperature, method, methods, max_tokens
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Decodes whole answers in one program; token t is sampled with `fold_in(key, t)`.

        `logits` [B, V] and `cache` are the prompts'; `lengths` [B] are 0 for rows that fill up the
        batch.

        Returns:
            Tokens up to and including end-of-sequence, padding after it: int32 [B, T]; their
            log-probs [B, T] as in `sampled_log_prob`; the cache, which was donated.
        """
        sampling = key, temperature, method, methods

        def put(t, sampled, done, tokens, log_probs):
            token = jnp.where(done, self.pad_id(), sampled[0]).astype(jnp.int32)  # [B]
            tokens, log_probs = tokens.at[:, t].set(token), log_probs.at[:, t].set(sampled[1])
            return token, done | self._ends(token), tokens, log_probs

        def step(carry):
            t, cache, token, *answers = carry
            *sampled, cache = self._column(params, rest, cache, token, lengths, t, *sampling)
            return t + 1, cache, *put(t, sampled, *answers)

        shape = len(lengths), max_tokens
        empty = lengths == 0, jnp.full(shape, self.pad_id(), jnp.int32), jnp.zeros(shape)
        _, cache, _, _, tokens, log_probs = jax.lax.while_loop(
            lambda carry: (carry[0] < max_tokens) & ~jnp.all(carry[3]),
            step,
            (jnp.int32(1), cache, *put(0, sample(logits, 0, *sampling), *empty)),
        )
        return tokens, log_probs, cache

    def _ends(self, token):
        """Whether tokens, of any shape, end their answers."""
        return sum(token == eos_id for eos_id in self.tokenizer.eos_ids) > 0

    def _sampling_arguments(self, config: RolloutConfig) -> dict[str, Any]:
        """Temperature, method and methods of a `RolloutConfig`, as arguments for `_decode`."""
        method = sampling_method(config)
        if method not in self._methods:  # recompiles
            self._methods += (method,)
        return dict(
            temperature=config.temperature,
            method=self._methods.index(method),
            methods=self._methods,
        )

    def _weights(self) -> nnx.State:
        """`nnx.Param` state of the plain model that decodes."""
        params = nnx.state(self._actor.base, nnx.Param)
        return self._merge(params) if self._merge else params

    def encode(self, prompts: Sequence[str], P: int) -> np.ndarray:
        """Prompts of at most P tokens as int32 [len(prompts), P], left-padded."""
        ids_of = {
            p: self.tokenizer.encode(p, add_special_tokens=False) for p in dict.fromkeys(prompts)
        }
        padded = np.full((len(prompts), P), self.pad_id(), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[P - len(ids_of[prompt]) :] = ids_of[prompt]
        return padded

    def _fill_up(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Pads to `count` rows, so there's one shape and one compilation."""
        return np.pad(rows, ((0, count - len(rows)), (0, 0)), constant_values=self.pad_id())

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs
    ) -> RolloutOutput:
        """Samples one completion for each prompt (its chat template already applied), with the key
        `seed`.

        The `tokens` are unpadded and keep the end-of-sequence token; `logprobs` are of the
        distribution they were sampled from (temperature, top-k and top-p applied).
        """
        padded = self.encode(prompts, rollout_config.max_prompt_length)
        key, sampling = rollout_config.seed, self._sampling_arguments(rollout_config)
        B, params = self.rows, self._weights()
        chunks = []
        with self._axes():
            for i, start in enumerate(range(0, len(padded), B)):
                rows = self._fill_up(padded[start : start + B], B)
                logits, cache = self._prompts_done(params, rows)
                *sampled, _ = self._decode(
                    params,
                    self._rest,
                    cache,
                    logits,
                    self._lengths(rows),
                    jax.random.fold_in(key, i),
                    **sampling,
                    max_tokens=rollout_config.max_tokens_to_generate,
                )
                chunks.append(jax.tree.map(np.asarray, sampled))
        tokens, log_probs = (
            np.concatenate(parts)[: len(padded)] for parts in zip(*chunks, strict=True)
        )
        lengths = (tokens != self.pad_id()).sum(axis=1)
        completions = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        return RolloutOutput(
            text=self.tokenizer.batch_decode(completions, skip_special_tokens=True),
            logits=None,
            tokens=completions,
            left_padded_prompt_tokens=padded,
            logprobs=[row[:n] for row, n in zip(log_probs, lengths, strict=True)],
        )

    def stream(self, prompt: str, rollout_config: RolloutConfig) -> Iterator[str]:
        """Yields what `generate` returns for this prompt alone, piece by piece, as the tokens
        arrive.

        A character in several tokens comes with the last one; one that the limit cuts off doesn't
        come.
        """
        columns = self.token_by_token(
            [prompt], rollout_config, jax.random.fold_in(rollout_config.seed, 0)
        )
        pieces, token = DecodeStream(skip_special_tokens=True), None
        for _ in range(rollout_config.max_tokens_to_generate):
            token, _ = columns.send(token)
            yield pieces.step(self.tokenizer.tokenizer.backend_tokenizer, int(token[0])) or ""
            if self._ends(token[0]):
                return

    def token_by_token(
        self, prompts: Sequence[str], rollout_config: RolloutConfig, key: jax.Array
    ) -> Generator[tuple[np.ndarray, np.ndarray], np.ndarray, None]:
        """Samples a token for each of at most `rows` prompts, column by column, with `fold_in(key,
        t)`.

        Yields the sampled tokens [N] and their log-probs [N]. Send back the tokens [N] that the
        rows get, the sampled ones or an environment's (task/turns.py).
        """
        prompt_ids = self._fill_up(
            self.encode(prompts, rollout_config.max_prompt_length), self.rows
        )
        sampling, lengths = self._sampling_arguments(rollout_config), self._lengths(prompt_ids)
        params, t = self._weights(), 0
        with self._axes():
            logits, cache = self._prompts_done(params, prompt_ids)
            token, log_prob = self._first(logits, t, key, **sampling)
        while True:
            tokens = yield np.asarray(token)[: len(prompts)], np.asarray(log_prob)[: len(prompts)]
            t, column = t + 1, np.full(self.rows, self.pad_id(), np.int32)
            column[: len(prompts)] = tokens
            with self._axes():  # exited while the caller runs
                token, log_prob, cache = self._next(
                    params, self._rest, cache, column, lengths, t, key, **sampling
                )

    def _axes(self) -> contextlib.AbstractContextManager[None]:
        return devices.on_mesh(self._mesh, self._config.logical_axis_rules)

    def _lengths(self, prompts: np.ndarray) -> np.ndarray:
        """Tokens of left-padded prompts [B, P]: int32 [B]."""
        return (prompts != self.pad_id()).sum(axis=1).astype(np.int32)

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probs [B, T] of completions under the current weights, at `rollout_config`'s
        temperature.
        """
        graphdef, state = nnx.split(self._actor)
        return log_probs_of_states(
            graphdef,
            (state,),
            prompt_tokens[None],
            completion_tokens[None],
            pad_id=self.pad_id(),
            temperature=self._temperature,
            logits_clip=self._logits_clip,
        )[0]

    def update_params(self, params, filter_types=None) -> None:
        """Does nothing, because the actor itself decodes."""

    def pad_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.pad_id()

    def eos_id(self) -> int:
        """Id of the end-of-sequence token."""
        return self.tokenizer.eos_id()

    def model(self):
        """The actor itself."""
        return self._actor
