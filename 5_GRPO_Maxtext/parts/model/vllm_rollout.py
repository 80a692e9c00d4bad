"""Generation by vLLM on a TPU: Tunix's engine, with the weights of a MaxText Llama pushed into it.

The engine holds a Llama of its own (tpu-inference's, in JAX) on its own devices; after every step Tunix
sends it the trained weights, by the map of vllm_weights.py. Imported only when `ROLLOUT_ENGINE=vllm`: it
needs the packages of requirements-tpu.txt.

Three things differ from Tunix 0.1.7's own `VllmRollout`. Each would fail or spoil learning silently:

    text         has no special tokens: with "<|eot_id|>" at its end no answer is well formed
    log-probs    of the old policy come from the trainer: Tunix returns the sampler's, of the last generation
    weights      that the map does not reach are an error
"""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from flax.linen import partitioning as nn_partitioning
from parts.loss_options import completion_log_probs
from parts.tunix_api import RolloutConfig, RolloutOutput
from tpu_inference.utils import get_padded_head_dim
from tunix.rl.rollout import vllm_rollout

from parts.model.vllm_weights import check_mapping, engine_mapping


class VllmRollout(vllm_rollout.VllmRollout):
    """Tunix's vLLM engine for a MaxText actor.

    Args:
        rollout_actor: `TunixMaxTextAdapter` around the actor; Tunix passes the one it trains.
        tokenizer: Tunix's `TokenizerAdapter`.
        mesh: devices that generate; vLLM builds a mesh of its own over them.
        rollout_config: Tunix's `RolloutConfig` of the training rollouts.
        maxtext_config: the actor's MaxText config.
        actor_mesh: devices that train.
        merge: makes the plain model's parameters of the actor's, where that has LoRA matrices: the engine's
            Llama has none. A whole copy of the weights lives while they are sent.
    """

    def __init__(
        self,
        rollout_actor,
        tokenizer,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        *,
        maxtext_config,
        actor_mesh: jax.sharding.Mesh,
        merge: Callable[[nnx.State], nnx.State] | None = None,
    ):
        self._actor = rollout_actor
        self._actor_mesh = actor_mesh
        self._rules = maxtext_config.logical_axis_rules
        self._rollout_config = rollout_config  # not a copy: a schedule changes its temperature
        self._merge = jax.jit(merge) if merge else None
        head_dim = get_padded_head_dim(maxtext_config.head_dim)
        mapping = engine_mapping(rollout_actor, maxtext_config.model_name, head_dim)
        mapping = dataclasses.replace(mapping, preprocess_src_state=self._merge)
        config = dataclasses.replace(rollout_config, rollout_mapping_config=mapping)
        super().__init__(rollout_actor, tokenizer, rollout_config.kv_cache_size, mesh, config)
        parameters = self._sampler.transformer_state.filter(nnx.Param)  # without the engine's random keys
        weights = nnx.state(rollout_actor, nnx.Param)
        weights = nnx.eval_shape(merge, weights) if merge else weights
        check_mapping(mapping.to_hf_mappings, weights, parameters)

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs) -> RolloutOutput:
        """Samples one completion for each prompt.

        Returns:
            `RolloutOutput`: `text` without special tokens; `tokens`, unpadded, with the end-of-sequence
            token; `logprobs` of the tokens as they were drawn (temperature, top-k and top-p applied).
        """
        output = super().generate(prompts, rollout_config, **kwargs)
        text = [self._sampler.tokenizer.decode(ids, skip_special_tokens=True) for ids in output.tokens]
        return dataclasses.replace(output, text=text)

    def update_params(self, params: nnx.State, filter_types: tuple | None = None) -> None:
        """Sends the engine new weights; with LoRA the actor's own, since Tunix passes A and B alone."""
        super().update_params(nnx.state(self._actor, nnx.Param) if self._merge else params, filter_types)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log-probs [B, T] of the completions under the trainer's weights, at the step's temperature."""
        with self._actor_mesh, nn_partitioning.axis_rules(self._rules):
            return completion_log_probs(
                self._actor,
                prompt_tokens,
                completion_tokens,
                pad_id=self.pad_id(),
                eos_id=self.eos_id(),
                temperature=self._rollout_config.temperature,
            )
