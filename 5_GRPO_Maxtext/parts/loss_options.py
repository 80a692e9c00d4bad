"""Everything beyond plain GRPO: the variants of the loss and of the advantage, schedules, dynamic sampling.

`policy_loss` has the lines of `grpo_loss` in the main script, in their order: what differs is the variant.
The main script trains with its own loss unless a constant asks for one of these.

    policy_loss   GSPO's ratio, CISPO, clip-higher, sampler correction, entropy bonus, three KL estimators,
                  four aggregations, traced schedules
    Learner       answers that do not count, groups without signal, what a gradient pass is fed
    Cluster       answers one step old; log-probs of the old and the frozen policy, at the step's temperature
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parts import faster_on_cpu, llama
from parts.questions import GRADED_COLUMNS
from parts.tunix_api import (
    GRPOConfig,
    GRPOLearner,
    Mode,
    RLCluster,
    RLLearner,
    Role,
    RolloutOutput,
    TrainExample,
    common,
    compute_entropy_from_logits,
    register_advantage_estimator,
    register_policy_loss_fn,
    sharding_utils,
)
from parts.versions import require

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: a larger ratio would only overflow
MAX_LOG_SEQUENCE_RATIO = 10.0  # GSPO's mean log-ratio of an answer; Tunix's limit
MAX_REFILLS = 4  # batches of other questions per step; each costs a step's generation
KL_GAIN, KL_ERROR_LIMIT = 0.1, 0.2  # arXiv 1909.08593: beta moves by 2 % per step at most


# %% What a gradient pass is fed ----------------------------------------------------------------------------
@flax.struct.dataclass(frozen=True)
class Example(TrainExample):
    """Tunix's batch, and what its plain GRPO learner does not hold. One value per row: Tunix slices by rows.

    Attributes:
        sampler_log_prob: float32 [N, T], of each token under the distribution it was drawn from.
        denominator: float32 [N], what the aggregation divides by, averaged over the micro-batches.
        beta: float32 [N], weight of the KL.
        temperature: float32 [N], of the sampling.
    """

    sampler_log_prob: jax.Array | None = None
    denominator: jax.Array | None = None
    beta: jax.Array | None = None
    temperature: jax.Array | None = None

    def cut(self, columns: int) -> "Example":
        """The same with the first tokens of each answer only."""
        arrays = {name: getattr(self, name) for name in PER_TOKEN}
        return self.replace(**{name: x[:, :columns] for name, x in arrays.items() if x is not None})


PER_TOKEN = (  # of an Example, [N, T]
    "completion_ids", "completion_mask", "ref_per_token_logps", "old_per_token_logps", "sampler_log_prob",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class LossConfig(GRPOConfig):
    """Tunix's GRPO configuration, and the options that it lacks; their meaning is that of the constants."""

    policy_objective: str = "grpo"  # LOSS_ALGO; Tunix's `loss_algo` refuses what Tunix does not have
    epsilon_high: float
    max_answer_tokens: int
    mask_overlong: bool = False
    zero_variance_groups: str = "keep"
    advantage_clip: float = 0.0
    logits_clip: float = 0.0
    sampler_correction: float = 0.0
    entropy_coef: float = 0.0
    adaptive_beta: bool = False
    temperature_schedule: bool = False


def is_plain(c) -> bool:
    """Whether the constants ask for the loss on the page: no variant, no schedule, no accumulation."""
    variants = (
        c.EPSILON_HIGH, c.SAMPLER_CORRECTION, c.ENTROPY_COEF, c.LOGITS_CLIP, c.TARGET_KL, c.TEMPERATURE_END,
        c.TRAIN_MICRO_BATCH_SIZE,
    )  # fmt: skip
    standard = ("grpo", "seq-mean-token-mean", "low_var_kl")
    return not any(variants) and standard == (c.LOSS_ALGO, c.LOSS_AGG_MODE, c.KL_LOSS_MODE)


# %% Log-probs ----------------------------------------------------------------------------------------------
def log_probs(
    model, prompts, completions, *, pad_id, eos_id, temperature, logits_clip=0.0, num_generations=1
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the answers' tokens under a model, and its logits there.

    Args:
        model: called as Tunix calls it.
        prompts: int32 [N, P], left-padded.
        completions: int32 [N, T], right-padded.
        pad_id: padding token.
        eos_id: end-of-sequence token.
        temperature: of the sampling; may be traced, so that a schedule compiles nothing anew.
        logits_clip: largest absolute logit (0 = off).
        num_generations: G, rows side by side that have the same prompt.

    Returns:
        float32 [N, T] and logits [N, T, V], clipped and divided by the temperature.
    """
    tokens, positions, attention_mask, segment_ids = common.process_ids(prompts, completions, pad_id, eos_id)
    if num_generations > 1 and faster_on_cpu.shares_prompts(model):
        logits = faster_on_cpu.logits_of_groups(
            model, tokens, positions, segment_ids, prompt_tokens=prompts.shape[1], answers=num_generations
        )
    else:
        logits, _ = model(
            tokens, positions=positions, cache=None, attention_mask=attention_mask, segment_ids=segment_ids
        )
        logits = logits[:, -completions.shape[1] - 1 : -1]  # [N, T, V]: the logit of token t is at t - 1
    if logits_clip:
        logits = jnp.clip(logits, -logits_clip, logits_clip)
    logits /= temperature
    return common.selective_log_softmax(logits, completions), logits


@functools.partial(jax.jit, static_argnames=("pad_id", "eos_id", "logits_clip", "num_generations"))
def _log_probs_of_state(graphdef, state, prompts, completions, **arguments):
    return log_probs(nnx.merge(graphdef, state), prompts, completions, **arguments)[0]


def completion_log_probs(model, prompts, completions, **arguments) -> jax.Array:
    """`log_probs` as a compiled program of its own, without the logits: float32 [N, T]."""
    return _log_probs_of_state(*nnx.split(model), prompts, completions, **arguments)


# %% Loss ---------------------------------------------------------------------------------------------------
def token_log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, mask: jax.Array) -> jax.Array:
    """GRPO: log of pi / pi_old for each token [N, T]."""
    return jnp.clip(log_prob - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, mask: jax.Array) -> jax.Array:
    """GSPO-token (arXiv 2507.18071, eq. 14): the answer's mean, with each token's own gradient [N, T]."""
    log_ratio = token_log_ratio(log_prob, old_log_prob, mask)
    mean = (log_ratio * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True).clip(1)  # [N, 1]
    own_gradient = log_prob - jax.lax.stop_gradient(log_prob)  # zero, with the gradient of log_prob
    return jnp.clip(own_gradient + jax.lax.stop_gradient(mean), max=MAX_LOG_SEQUENCE_RATIO)


LOG_RATIOS = {"grpo": token_log_ratio, "gspo-token": sequence_log_ratio, "cispo": token_log_ratio}


def clipped_objective(ratio, A, log_prob, epsilon: float, epsilon_high: float):
    """PPO's and GRPO's: min(ratio * A, clip(ratio, 1 - eps, 1 + eps_high) * A), [N, T].

    Returns:
        The objective, and which tokens the clip changes (bool): they have no gradient.
    """
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon_high)
    return jnp.minimum(ratio * A, clipped * A), clipped * A < ratio * A


def cispo_objective(ratio, A, log_prob, epsilon: float, epsilon_high: float):
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): sg(min(ratio, 1 + eps_high)) * A * log pi, [N, T].

    The ratio is a weight without a gradient. Capped, it weighs a token less, where PPO's clip drops it. The
    paper sets no lower bound, and neither is there one here: `epsilon` is not used.

    Returns:
        As `clipped_objective`; the tokens whose weight is capped keep a gradient.
    """
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, 1 + epsilon_high))
    return weight * A * log_prob, ratio > 1 + epsilon_high


OBJECTIVES = {"grpo": clipped_objective, "gspo-token": clipped_objective, "cispo": cispo_objective}


def sampler_weight(old_log_prob: jax.Array, sampler_log_prob: jax.Array, cap: float) -> jax.Array:
    """Truncated importance sampling: min(pi / pi_sampler, cap) of each token [N, T] (arXiv 1802.01561, 4.1).

    The answers are drawn from pi_sampler, and the gradient is meant to be an average over pi.
    """
    log_weight = jnp.clip(old_log_prob - sampler_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.minimum(jnp.exp(log_weight), cap)


KL_ESTIMATORS = {  # of d = log pi_ref - log pi, each [N, T] (joschu.net/blog/kl-approx.html)
    "kl": lambda d: -d,  # k1
    "mse_kl": lambda d: d**2 / 2,  # k2
    "low_var_kl": lambda d: jnp.exp(d) - d - 1,  # k3
}

TOKEN_WEIGHTS = {  # of the mask [N, T] and the limit, under verl's names; `denominator` divides their sum
    "seq-mean-token-mean": lambda mask, limit: mask / mask.sum(axis=1, keepdims=True).clip(1),  # GRPO
    "token-mean": lambda mask, limit: mask,  # DAPO
    "seq-mean-token-sum": lambda mask, limit: mask,
    "seq-mean-token-sum-norm": lambda mask, limit: mask / limit,  # Dr. GRPO
}


def denominator(mask: jax.Array, loss_agg_mode: str) -> jax.Array:
    """What the weighted sum is divided by: the tokens that count, or the answers that have one."""
    return mask.sum() if loss_agg_mode == "token-mean" else mask.any(axis=1).sum()


@register_policy_loss_fn("grpo_with_options")
def policy_loss(model, batch: Example, algo_config: LossConfig, pad_id: int, eos_id: int, **kwargs):
    """`grpo_loss` of the main script with every option; arguments and results are the same."""
    mask = batch.completion_mask  # [N, T]
    A = batch.advantages[:, None]  # [N, 1]
    temperature = algo_config.temperature if batch.temperature is None else batch.temperature[0]
    beta = algo_config.beta if batch.beta is None else batch.beta[0]
    log_prob, logits = log_probs(
        model, batch.prompt_ids, batch.completion_ids,
        pad_id=pad_id, eos_id=eos_id, temperature=temperature, logits_clip=algo_config.logits_clip,
        num_generations=algo_config.num_generations,
    )  # fmt: skip
    old_log_prob = batch.old_per_token_logps
    if old_log_prob is None:
        old_log_prob = jax.lax.stop_gradient(log_prob)

    ratio = jnp.exp(LOG_RATIOS[algo_config.policy_objective](log_prob, old_log_prob, mask))  # [N, T]
    objective, clipped = OBJECTIVES[algo_config.policy_objective](
        ratio, A, log_prob, algo_config.epsilon, algo_config.epsilon_high
    )  # [N, T], [N, T]
    if algo_config.sampler_correction:
        objective *= sampler_weight(old_log_prob, batch.sampler_log_prob, algo_config.sampler_correction)

    kl = jnp.zeros_like(log_prob)
    if batch.ref_per_token_logps is not None:
        log_ref_ratio = (batch.ref_per_token_logps - log_prob) * mask  # as on the page
        kl = KL_ESTIMATORS[algo_config.kl_loss_mode](log_ref_ratio)  # [N, T]
        objective -= beta * kl
    if algo_config.entropy_coef:  # Mnih et al., arXiv 1602.01783, section 4
        objective += algo_config.entropy_coef * compute_entropy_from_logits(logits)

    weights = TOKEN_WEIGHTS[algo_config.loss_agg_mode](mask, algo_config.max_answer_tokens)  # [N, T]
    weighted = objective * weights
    # The optimizer averages over micro-batches. A mean of means is the mean of all only if all count alike;
    # with answers of different lengths, or some masked, they do not. So each part divides by the whole's.
    count = denominator(mask, algo_config.loss_agg_mode).clip(1)
    if batch.denominator is not None:
        count = jnp.maximum(batch.denominator[0], 1e-6)
    return -weighted.sum() / count, log_figures(batch, old_log_prob, ratio, clipped, kl, logits)


def log_figures(batch: Example, old_log_prob, ratio, clipped, kl, logits) -> dict[str, jax.Array]:
    """Figures of a gradient pass for the log.

    Args:
        batch: with the mask of what counts, and the sampler's log-probs.
        old_log_prob: of the trainer before the updates of this step [N, T].
        ratio: [N, T].
        clipped: whether the clip changes a token's term [N, T], bool.
        kl: [N, T].
        logits: [N, T, V].

    Returns:
        Over the tokens that count, [2] with their sum and their number: `kl`, `pg_clipfrac`, `entropy` (nats)
        and `mismatch`, |log pi - log pi_sampler| (nats); `mean_of` divides them. []: `mismatch/max`,
        `is_ratio/max` and `is_ratio/min`. Tunix's names, where it has them.
    """
    mask = batch.completion_mask.astype(bool)
    mismatch = jnp.abs(old_log_prob - batch.sampler_log_prob)  # [N, T]
    entropy = compute_entropy_from_logits(logits)  # [N, T]
    per_token = {"kl": kl, "pg_clipfrac": clipped, "entropy": entropy, "mismatch": mismatch}
    sums = {name: jnp.where(mask, figure, 0.0).sum() for name, figure in per_token.items()}
    return {name: jnp.stack([total, mask.sum().astype(total.dtype)]) for name, total in sums.items()} | {
        "mismatch/max": jnp.where(mask, mismatch, 0.0).max(),
        "is_ratio/max": jnp.where(mask, ratio, 0.0).max(),
        "is_ratio/min": jnp.where(mask, ratio, jnp.inf).min(),
    }


def mean_of(passes: Sequence[np.ndarray]) -> float:
    """The mean over the tokens of all gradient passes of an update.

    A mean of the passes' means would weigh few tokens like many. Where no token counts there is no mean, and
    0 would pass for a figure.

    Args:
        passes: sum and number of each, [2].
    """
    total, count = np.sum(passes, axis=0)
    return float(total / count) if count else math.nan


LOGGED = {  # what `log_figures` gives, and how Tunix puts an update's gradient passes together
    "kl": mean_of, "pg_clipfrac": mean_of, "entropy": mean_of, "mismatch": mean_of, "mismatch/max": np.max,
}  # fmt: skip


# %% Advantages: what takes the place of `group_advantage` -------------------------------------------------
@register_advantage_estimator("centered")
def centered_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Dr. GRPO (arXiv 2503.20783): R - mean of the group, not divided by its std; [B * G]."""
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    return (groups - groups.mean(axis=1, keepdims=True)).ravel()


@register_advantage_estimator("leave_one_out")
def leave_one_out_advantage(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """RLOO (arXiv 2402.14740): R - mean of the other G - 1 answers; [B * G]."""
    groups = rewards.reshape(-1, num_generations)  # [B, G]
    others = (groups.sum(axis=1, keepdims=True) - groups) / (num_generations - 1)
    return (groups - others).ravel()


def advantage_name(advantage: str, norm_adv_by_std: bool) -> str:
    """Name under which the function for ADVANTAGE and NORM_ADV_BY_STD is registered."""
    if advantage == "rloo":
        return "leave_one_out"
    return "group" if norm_adv_by_std else "centered"


# %% Rewards: what only the tokens tell --------------------------------------------------------------------
def overlong_penalty(limit: int, buffer: int, penalty: float) -> Callable[..., list[float]]:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13), as a reward function.

    0 up to `limit - buffer` tokens, then down in a straight line to `-penalty` at the limit.

    Args:
        limit: L_max, tokens per answer.
        buffer: L_cache, tokens.
        penalty: points; 1 in the paper, whose rewards are 1 and -1.
    """

    def overlong(prompts, completions, completion_ids: Sequence[Sequence[int]], **columns) -> list[float]:
        over = np.array([len(ids) for ids in completion_ids]) - (limit - buffer)  # [B * G], tokens
        return (-penalty * np.maximum(over / buffer, 0)).tolist()

    return overlong


# %% Schedules: pure functions of the step and of the log ---------------------------------------------------
def adaptive_beta(beta: float, target_kl: float, kls: Iterable[float]) -> float:
    """The KL weight after steps whose KL was `kls` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2)        beta <- beta * (1 + 0.1 e)

    It is computed from the start each time. The log is all the state there is, so a resumed run continues
    with the same weight. A KL that is not finite (an update that was skipped) changes nothing.
    """
    for kl in filter(math.isfinite, kls):
        beta *= 1 + KL_GAIN * min(max(kl / target_kl - 1, -KL_ERROR_LIMIT), KL_ERROR_LIMIT)
    return beta


def linear(start: float, end: float, step: int, num_steps: int) -> float:
    """From `start` at step 0 to `end` at the last of `num_steps` steps."""
    return start + (end - start) * step / max(1, num_steps - 1)


# %% Learner ------------------------------------------------------------------------------------------------
class Learner(GRPOLearner):
    """Tunix's GRPO learner; between generating and training it applies the options of `LossConfig`.

    Args:
        schedule: (weight of the KL, temperature) of the step before which so many steps were done.
        refill: a batch of other questions, as in the data set, for (steps done, attempt in this step).
        on_batch: is given (steps done, batch, what was graded, weight of the KL) before each step's update.
            What was graded are arrays with the rows of the batch: `completions`, `rewards`, `points` by
            reward function, and GRADED_COLUMNS.
        arguments: Tunix's.
    """

    def __init__(
        self,
        *,
        schedule: Callable[[int], tuple[float, float]],
        refill: Callable[[int, int], dict[str, np.ndarray]],
        on_batch: Callable[[int, TrainExample, dict[str, Any], float], None] | None = None,
        **arguments: Any,
    ):
        require(GRPOLearner, "_generate_and_compute_advantage", RLLearner._process_accumulated_batches)
        require(GRPOLearner, "_compute_rewards", GRPOLearner._generate_and_compute_advantage)
        super().__init__(**arguments)
        self._schedule = schedule
        self._refill = refill
        self._on_batch = on_batch
        self._graded = {}

    def _compute_rewards(self, prompts, completions, mode: Mode, **columns) -> np.ndarray:
        """Tunix's; keeps what each reward function gave. float [B * G]."""
        found = self.reward_manager(
            prompts=prompts, completions=completions, completion_ids=self.rl_cluster.drawn.tokens,
            mode=str(mode), **columns,
        )  # fmt: skip
        self.rl_cluster.buffer_metrics(found["log_metrics"], mode=mode)
        names = [function.__name__ for function in self.reward_manager.reward_fns]
        self._graded = {name: np.asarray(columns[name]) for name in GRADED_COLUMNS} | {
            "completions": np.array(completions, dtype=object),
            "rewards": found["rewards"],
            "points": {name: found["log_metrics"][f"rewards/{name}"][0] for name in names},
        }
        return found["rewards"]

    def _draw(self, training_input, mode: Mode) -> Example:
        """A step's answers, drawn and graded (Tunix), with the log-probs that their sampler gave them."""
        example = super()._generate_and_compute_advantage(training_input, mode)
        sampler_log_prob = np.zeros(example.completion_ids.shape, np.float32)  # [B * G, T]
        for row, log_prob in zip(sampler_log_prob, self.rl_cluster.drawn.logprobs, strict=True):
            row[: len(log_prob)] = log_prob
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(TrainExample)}
        return Example(**fields, sampler_log_prob=jnp.asarray(sampler_log_prob))

    def _generate_and_compute_advantage(self, training_input, mode: Mode = Mode.TRAIN) -> Example:
        """Draws a step's answers and grades them, then decides what counts."""
        config, cluster, step = self.algo_config, self.rl_cluster, self.rl_cluster.global_steps
        beta, temperature = self._schedule(step)
        cluster.buffer_metrics(
            {"schedule/beta": (beta, np.mean), "schedule/temperature": (temperature, np.mean)}, mode=mode
        )
        if config.temperature_schedule:
            cluster.set_temperature(temperature)

        example = self._draw(training_input, mode)
        graded, rows = self._graded, len(example.advantages)
        keep = np.ones(rows, bool)
        if config.zero_variance_groups != "keep":
            signal = self._groups_with_signal()
            if config.zero_variance_groups == "refill":
                example, graded, signal = self._fill_up(example, signal, step, mode)
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

        traced = {}
        if config.adaptive_beta:
            traced["beta"] = beta
        if config.temperature_schedule:
            traced["temperature"] = temperature
        passes = self._training_config.get_with_default("gradient_accumulation_steps", 1)
        if passes > 1:
            traced["denominator"] = denominator(example.completion_mask, config.loss_agg_mode) / passes
        if self._on_batch:
            self._on_batch(step, example, graded, beta)
        example = example.cut(cluster.used_columns(example.completion_ids))
        return example.replace(**{k: jnp.full(rows, v, jnp.float32) for k, v in traced.items()})

    def _groups_with_signal(self) -> np.ndarray:
        """bool [groups]: whether the answers just graded differ in reward."""
        return np.ptp(self._graded["rewards"].reshape(-1, self.algo_config.num_generations), axis=1) > 0

    def _fill_up(self, example, signal, step, mode):
        """DAPO's dynamic sampling: asks other questions until every group of the batch has a signal.

        After MAX_REFILLS batches it takes what there is.

        Returns:
            A batch of the same size, groups with signal first, what was graded, and which groups have a
            signal [groups].
        """
        G, size = self.algo_config.num_generations, len(signal)
        examples, graded, signals = [example], [self._graded], [signal]
        for attempt in range(MAX_REFILLS):
            if np.concatenate(signals).sum() >= size:
                break
            more = {k: np.repeat(v, G, axis=0) for k, v in self._refill(step, attempt).items()}  # [B * G]
            examples.append(self._draw(more, mode))
            graded.append(self._graded)
            signals.append(self._groups_with_signal())
        signal = np.concatenate(signals)
        chosen = np.argsort(~signal, kind="stable")[:size]  # those with a signal first, in their order
        rows = (chosen[:, None] * G + np.arange(G)).ravel()
        example = jax.tree.map(lambda *parts: jnp.concatenate(parts)[rows], *examples)
        return example, jax.tree.map(lambda *parts: np.concatenate(parts)[rows], *graded), signal[chosen]


# %% Cluster: answers, and log-probs of the old and of the frozen policy ------------------------------------
class Cluster(RLCluster):
    """Tunix's cluster; its log-probs know a temperature schedule, a logit clip, a reference on the host.

    Attributes:
        drawn: what the rollout engine gave last, while the step is graded.
        next_prompts: prompts [B * G] of the step after so many steps, None after the last. Where it is given,
            each step but the first trains on answers one step old.
        logits_clip, num_generations: as in `LossConfig`.
        reference_offload: the reference is kept in host memory, and is on the device while it computes.
        frozen_weights: with LoRA the reference's own arrays, which are the actor's, too.
    """

    drawn: RolloutOutput | None = None
    next_prompts: Callable[[int], list[str] | None] | None = None
    logits_clip: float = 0.0
    num_generations: int = 1
    reference_offload: bool = False
    frozen_weights: nnx.State | None = None
    _ahead: futures.Future | None = None

    def generate(self, prompts: list[str], **arguments) -> RolloutOutput:
        """The answers of this step; with `next_prompts` it also begins to draw those of the next one."""
        draw = functools.partial(super().generate, **arguments)
        self.drawn = self._ahead.result() if self._ahead else draw(prompts)
        if self.next_prompts:
            following = self.next_prompts(self.global_steps + 1)
            self._ahead = self._drawer.submit(draw, following) if following else None
            # vLLM has its own weights, and draws while the step trains. rollout.py shares the trainer's.
            if self._ahead and self.rollout.model() is self.actor_trainer.model:
                futures.wait([self._ahead])
        return self.drawn

    @functools.cached_property
    def _drawer(self) -> futures.Executor:
        return futures.ThreadPoolExecutor(max_workers=1)

    def sync_weights(self) -> None:
        """Tunix's; the answers that are being drawn are the old weights' to the end."""
        if self._ahead:
            futures.wait([self._ahead])
        super().sync_weights()

    def update_actor(self, *args, **kwargs) -> None:
        """After each step, puts the frozen weights back into the actor.

        Tunix's compiled step returns the whole model, a copy of the frozen weights included, which nothing
        would ever free: the reference keeps the old one.
        """
        super().update_actor(*args, **kwargs)
        if self.frozen_weights is not None:
            nnx.update(self.actor_trainer.model, self.frozen_weights)

    @functools.cached_property
    def _shares_prompts(self) -> bool:
        return faster_on_cpu.shares_prompts(self.actor_trainer.model)

    def used_columns(self, completions: jax.Array) -> int:
        """How many columns of the answers [N, T] are computed: on one CPU a quarter, half, 7/8 or all of T.

        Each width is a program of its own; on other devices that takes minutes to compile: there it is T.
        """
        T = completions.shape[1]
        if not self._shares_prompts:
            return T
        used = np.flatnonzero((np.asarray(completions) != self.rollout.pad_id()).any(axis=0))
        longest = int(used[-1]) + 1 if used.size else 1
        return next(width for width in (T // 4, T // 2, 7 * T // 8, T) if longest <= width)

    def set_temperature(self, temperature: float) -> None:
        """For the answers and log-probs of the step that begins."""
        self.get_rollout_config(Mode.TRAIN).temperature = temperature

    def get_ref_per_token_logps(
        self, prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size=None
    ) -> jax.Array:
        """Log-probs [N, T] of the completions under the frozen model."""
        reference = self.inference_worker.get_model("reference")
        if self.reference_offload:
            reference = llama.to_memory(reference, "device")
        log_prob = self._log_probs(
            reference, Role.REFERENCE, prompt_tokens, completion_tokens, micro_batch_size
        )
        # before the copy on the device is freed
        return jax.block_until_ready(log_prob) if self.reference_offload else log_prob

    def get_old_per_token_logps(self, prompt_tokens, completion_tokens, micro_batch_size=None) -> jax.Array:
        """Log-probs [N, T] of the completions under the weights that wrote them."""
        actor = self.actor_trainer.model
        return self._log_probs(actor, Role.ACTOR, prompt_tokens, completion_tokens, micro_batch_size)

    def _log_probs(self, model, role: Role, prompts, completions, micro_batch_size: int | None) -> jax.Array:
        axes = self.cluster_config.training_config.data_sharding_axis
        size, T = micro_batch_size or len(prompts), completions.shape[1]
        completions = completions[:, : self.used_columns(completions)]
        with self._get_mesh_and_logical_axis_rules_cm(role):
            prompts, completions = (sharding_utils.shard_input(x, axes) for x in (prompts, completions))
            parts = [
                completion_log_probs(
                    model, prompts[start : start + size], completions[start : start + size],
                    pad_id=self.rollout.pad_id(), eos_id=self.rollout.eos_id(),
                    temperature=self.get_rollout_config(Mode.TRAIN).temperature,
                    logits_clip=self.logits_clip, num_generations=self.num_generations,
                )
                for start in range(0, len(prompts), size)
            ]  # fmt: skip
        return jnp.pad(jnp.concatenate(parts), ((0, 0), (0, T - completions.shape[1])))
