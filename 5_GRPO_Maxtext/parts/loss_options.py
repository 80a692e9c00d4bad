"""Options of the GRPO loss: what Tunix 0.1.7 takes is handed to it, what it lacks is here.

Tunix computes the loss itself (`tunix.rl.algo_core.grpo_loss_fn`): ratio, clip, KL, aggregation. Around it:

    Learner       answers that do not count, groups without signal, schedules, sums over micro-batches
    policy_loss   the same numbers as traced scalars, so that a schedule compiles nothing anew
    Cluster       log-probs of the old and of the frozen policy, under the same temperature and clipping
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import algo_core, function_registry

from parts.llama import to_memory as on_memory
from parts.tunix_api import (
    GRPOConfig, GRPOLearner, Mode, RLCluster, Role, TrainExample, common, sharding_utils,
)  # fmt: skip

# What the script calls it, and what Tunix calls it. With per-token losses l_it of B answers of |o_i| tokens,
# at most T each; an answer that is masked as a whole does not count in B.
LOSS_AGG_MODES = {
    "sequence-mean-token-mean": "sequence-mean-token-mean",  # 1/B sum_i 1/|o_i| sum_t l_it
    "token-mean": "token-mean",  # 1/(sum_i |o_i|) sum_it l_it
    "seq-mean-token-sum": "seq-mean-token-sum",  # 1/B sum_it l_it
    "sequence-mean-token-sum-norm": "sequence-mean-token-sum-norm",  # the same: Tunix's default norm is B
    "sequence-mean-token-scale": "sequence-mean-token-scale",  # 1/(B T) sum_it l_it
    "seq-mean-token-sum-norm": "sequence-mean-token-scale",  # the same under the name that verl gives it
}
LOSS_ALGOS = ("grpo", "gspo-token")
KL_LOSS_MODES = ("kl", "mse_kl", "low_var_kl")
ADVANTAGES = ("group", "rloo")
ZERO_VARIANCE_GROUPS = ("keep", "skip", "refill")
MAX_REFILLS = 4
KL_GAIN, KL_ERROR_LIMIT = 0.1, 0.2  # of the controller, as in its paper: beta moves by 2 % a step at most


@dataclasses.dataclass(kw_only=True)
class LossConfig(GRPOConfig):
    """Tunix's GRPO configuration, and the options that it lacks.

    Attributes:
        epsilon_high: upper end of the clip range. Tunix's loss looks for it, and in 0.1.7 only the
            configurations of DAPO and of agents have the field.
        mask_overlong: answers that were cut off at the limit do not count.
        zero_variance_groups: "keep", "skip" or "refill" groups whose answers all earn the same.
        advantage_clip: largest absolute advantage; 0: off.
        logits_clip: largest absolute logit; 0: off.
        adaptive_beta: `beta` comes from the schedule instead.
        temperature_schedule: the temperature comes from the schedule, too.
    """

    policy_loss_fn: str = "grpo_with_options"
    epsilon_high: float
    mask_overlong: bool = False
    zero_variance_groups: str = "keep"
    advantage_clip: float = 0.0
    logits_clip: float = 0.0
    adaptive_beta: bool = False
    temperature_schedule: bool = False


def advantage_estimator(advantage: str, norm_adv_by_std: bool) -> str:
    """Tunix's name for ADVANTAGE and NORM_ADV_BY_STD."""
    if advantage == "rloo":
        return "rloo"
    return "grpo" if norm_adv_by_std else "drgrpo"


# %% Schedules: pure functions of the step and of the log -----------------------------------------------
def adaptive_beta(beta: float, target_kl: float, kls: Iterable[float]) -> float:
    """The KL weight after steps whose KL was `kls` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2)        beta <- beta * (1 + 0.1 e)

    It is computed from the start each time: the log is all the state there is, so a resumed run goes on
    with the same weight. A KL that is not finite (an update that was skipped) changes nothing.
    """
    for kl in filter(math.isfinite, kls):
        beta *= 1 + KL_GAIN * min(max(kl / target_kl - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return beta


def linear(start: float, end: float, step: int, num_steps: int) -> float:
    """From `start` at step 0 to `end` at the last of `num_steps` steps."""
    return start + (end - start) * step / max(1, num_steps - 1)


# %% Loss -----------------------------------------------------------------------------------------------
@flax.struct.dataclass(frozen=True)
class Example(TrainExample):
    """What a gradient pass is fed; the numbers are repeated for each row, because Tunix slices by rows.

    Attributes:
        denominator: float32 [B], what the aggregation divides by, averaged over the micro-batches.
        beta: float32 [B], weight of the KL.
        temperature: float32 [B], of the sampling.
    """

    denominator: jax.Array | None = None
    beta: jax.Array | None = None
    temperature: jax.Array | None = None


class ShapedLogits(nnx.Module):
    """A model whose logits are clipped, then divided by a temperature that may be traced.

    Tunix's own temperature is a compile-time constant: a schedule would compile everything at each step.
    """

    def __init__(self, model: nnx.Module, temperature: jax.Array | float, logits_clip: float):
        self.model = model
        self.temperature = nnx.Variable(jnp.asarray(temperature, jnp.float32))
        self.logits_clip = logits_clip

    def __call__(self, input_tokens, positions, cache, attention_mask, segment_ids=None):
        logits, cache = self.model(
            input_tokens, positions=positions, cache=cache, attention_mask=attention_mask,
            segment_ids=segment_ids,
        )  # fmt: skip
        if self.logits_clip:
            logits = jnp.clip(logits, -self.logits_clip, self.logits_clip)  # [B, L, V]
        return logits / self.temperature[...], cache


def denominator(completion_mask: jax.Array, loss_agg_mode: str) -> jax.Array:
    """What Tunix's aggregation divides by: tokens or answers that count (constant factors left out)."""
    counts = completion_mask.sum(axis=-1)  # [B]
    return counts.sum() if loss_agg_mode == "token-mean" else (counts > 0).sum()


@function_registry.register_policy_loss_fn("grpo_with_options")
def policy_loss(model, train_example, algo_config, pad_id, eos_id, **kwargs):
    """Tunix's GRPO loss with what this file adds; without options it is Tunix's, untouched.

    Args:
        model: called as Tunix calls it.
        train_example: an `Example`, or a `TrainExample` of Tunix without options.
        algo_config: `LossConfig`.
        pad_id: padding token.
        eos_id: end-of-sequence token.

    Returns:
        The loss and Tunix's figures.
    """
    config = copy.copy(algo_config)
    beta, temperature, mean_denominator = (
        getattr(train_example, name, None) for name in ("beta", "temperature", "denominator")
    )
    if temperature is not None or config.logits_clip:
        temperature = config.temperature if temperature is None else temperature[0]
        model = ShapedLogits(model, temperature, config.logits_clip)
        config.temperature = 1.0
    if beta is not None:
        config.beta = 0.0  # Tunix then leaves the KL out of the sum, but still computes it
    loss, aux = algo_core.grpo_loss_fn(model, train_example, config, pad_id, eos_id)
    if beta is not None:
        loss += beta[0] * aux["kl_loss"]
    if mean_denominator is not None:
        # The optimizer averages over micro-batches. A mean of means is the mean of all only if all count
        # alike; with answers of different lengths, or some of them masked, they do not.
        own = denominator(train_example.completion_mask, config.loss_agg_mode)
        loss *= own / jnp.maximum(mean_denominator[0], 1e-6)
    return loss, aux


# %% Learner --------------------------------------------------------------------------------------------
class Learner(GRPOLearner):
    """Tunix's GRPO learner; between generating and training it applies the options of `LossConfig`.

    Args:
        schedule: (weight of the KL, temperature) of the step before which so many steps were done.
        refill: a batch of other questions, as in the data set, for (steps done, attempt in this step).
        arguments: Tunix's.
    """

    def __init__(
        self,
        *,
        schedule: Callable[[int], tuple[float, float]],
        refill: Callable[[int, int], dict[str, np.ndarray]],
        **arguments: Any,
    ):
        super().__init__(**arguments)
        self._schedule = schedule
        self._refill = refill
        self._rewards = None

    def _compute_rewards(self, *args, **kwargs) -> np.ndarray:
        self._rewards = super()._compute_rewards(*args, **kwargs)  # [B * G]
        return self._rewards

    def _generate_and_compute_advantage(self, training_input, mode: Mode = Mode.TRAIN) -> TrainExample:
        """Generates a step's answers and grades them (Tunix), then decides what counts."""
        config, cluster, step = self.algo_config, self.rl_cluster, self.rl_cluster.global_steps
        beta, temperature = self._schedule(step)
        cluster.buffer_metrics(
            {"schedule/beta": (beta, np.mean), "schedule/temperature": (temperature, np.mean)}, mode=mode
        )
        if config.temperature_schedule:
            cluster.set_temperature(temperature)

        example = super()._generate_and_compute_advantage(training_input, mode)
        rows = len(example.advantages)
        keep = np.ones(rows, bool)
        if config.zero_variance_groups != "keep":
            signal = self._groups_with_signal()
            if config.zero_variance_groups == "refill":
                example, signal = self._fill_up(example, signal, step, mode)
            keep &= np.repeat(signal, config.num_generations)
        ended = (np.asarray(example.completion_ids) == cluster.rollout.eos_id()).any(axis=1)  # [B * G]
        cluster.buffer_metrics({"completions/cut_off": (np.mean(~ended), np.mean)}, mode=mode)
        if config.mask_overlong:
            keep &= ended
        if not keep.all():
            example = example.replace(completion_mask=example.completion_mask & keep[:, None])
        if config.advantage_clip:
            limit = config.advantage_clip
            example = example.replace(advantages=jnp.clip(example.advantages, -limit, limit))

        added = {}
        if config.adaptive_beta:
            added["beta"] = beta
        if config.temperature_schedule:
            added["temperature"] = temperature
        passes = self._training_config.get_with_default("gradient_accumulation_steps", 1)
        if passes > 1:
            added["denominator"] = denominator(example.completion_mask, config.loss_agg_mode) / passes
        if not added:
            return example
        fields = {f.name: getattr(example, f.name) for f in dataclasses.fields(TrainExample)}
        return Example(**fields, **{k: jnp.full(rows, v, jnp.float32) for k, v in added.items()})

    def _groups_with_signal(self) -> np.ndarray:
        """bool [groups]: whether the answers just graded differ in reward."""
        return np.ptp(self._rewards.reshape(-1, self.algo_config.num_generations), axis=1) > 0

    def _fill_up(self, example, signal, step, mode):
        """DAPO's dynamic sampling: asks other questions until every group of the batch has a signal.

        After MAX_REFILLS batches it takes what there is.

        Returns:
            A batch of the same size, groups with signal first come first, and which have one [groups].
        """
        G, size = self.algo_config.num_generations, len(signal)
        examples, signals = [example], [signal]
        for attempt in range(MAX_REFILLS):
            if np.concatenate(signals).sum() >= size:
                break
            more = {k: np.repeat(v, G, axis=0) for k, v in self._refill(step, attempt).items()}  # [B * G]
            examples.append(super()._generate_and_compute_advantage(more, mode))
            signals.append(self._groups_with_signal())
        signal = np.concatenate(signals)
        chosen = np.argsort(~signal, kind="stable")[:size]  # those with a signal first, in their order
        rows = (chosen[:, None] * G + np.arange(G)).ravel()
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[rows], *examples), signal[chosen]


# %% Cluster: log-probs of the old and of the frozen policy ---------------------------------------------
def completion_log_probs(model, prompts, completions, *, pad_id, eos_id, temperature, logits_clip=0.0):
    graphdef, state = nnx.split(model)
    return common.compute_per_token_logps(
        graphdef, state, prompts, completions, pad_id=pad_id, eos_id=eos_id, temperature=temperature
    )


class Cluster(RLCluster):
    """Tunix's cluster; its log-probs know a temperature schedule, a logit clip, a reference on the host.

    Attributes:
        logits_clip: as in `LossConfig`.
        reference_offload: the reference lies in the host's memory, and is on the device while it computes.
    """

    logits_clip: float = 0.0
    reference_offload: bool = False
    _temperature: float | None = None  # None: the rollout's, for the whole run

    frozen_weights: nnx.State | None = None  # with LoRA: the reference's own arrays

    def update_actor(self, *args, **kwargs) -> None:
        """After each step, puts the reference's own arrays back into the actor.

        Tunix's compiled step returns the whole model, a copy of the frozen weights included, which nothing would
        ever free: the reference keeps the old one.
        """
        super().update_actor(*args, **kwargs)
        if self.frozen_weights is not None:
            nnx.update(self.actor_trainer.model, self.frozen_weights)

    def set_temperature(self, temperature: float) -> None:
        """For the answers and log-probs of the step that begins."""
        self._temperature = temperature
        self.get_rollout_config(Mode.TRAIN).temperature = temperature

    def get_ref_per_token_logps(
        self, prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size=None
    ) -> jax.Array:
        """Log-probs [B, T] of the completions under the frozen model."""
        if not (self.logits_clip or self._temperature is not None or self.reference_offload):
            return super().get_ref_per_token_logps(
                prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size
            )
        reference = self.inference_worker.get_model("reference")
        if self.reference_offload:
            reference = on_memory(reference, "device")
        logps = self._logps(reference, Role.REFERENCE, prompt_tokens, completion_tokens, micro_batch_size)
        return jax.block_until_ready(logps)  # then the weights may go

    def get_old_per_token_logps(self, prompt_tokens, completion_tokens, micro_batch_size=None) -> jax.Array:
        """Log-probs [B, T] of the completions under the weights that wrote them."""
        if not (self.logits_clip or self._temperature is not None):
            return super().get_old_per_token_logps(prompt_tokens, completion_tokens, micro_batch_size)
        actor = self.actor_trainer.model
        return self._logps(actor, Role.ACTOR, prompt_tokens, completion_tokens, micro_batch_size)

    def _logps(self, model, role: Role, prompts, completions, micro_batch_size: int | None) -> jax.Array:
        temperature = self.get_rollout_config(Mode.TRAIN).temperature
        graphdef, state = nnx.split(ShapedLogits(model, temperature, self.logits_clip))
        axes = self.cluster_config.training_config.data_sharding_axis
        size = micro_batch_size or len(prompts)
        with self._get_mesh_and_logical_axis_rules_cm(role):
            prompts, completions = (sharding_utils.shard_input(x, axes) for x in (prompts, completions))
            parts = [
                common.compute_per_token_logps(
                    graphdef, state, prompts[start : start + size], completions[start : start + size],
                    pad_id=self.rollout.pad_id(), eos_id=self.rollout.eos_id(),
                )
                for start in range(0, len(prompts), size)
            ]  # fmt: skip
        return jnp.concatenate(parts)
