"""The language model on its devices: answers questions, computes log-probs of answers, loads new
params.

The main script uses an `Llm`, and a `Model` in its loss. Its sampler is a Tunix rollout engine.
"""

import dataclasses
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from tqdm import tqdm
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from constants import RunConstants
from model import devices, llama, lora
from model.log_probs import entropy_of, log_probs, log_probs_of_states
from model.rollout import MaxTextRollout, has_end, right_padded, sampling_config
from schedules import temperature_at
from task import turns
from task.task import Answers
from task.turns import Episode


class Pi(NamedTuple):
    """The policy's output at each token of the answers, float32 [N, T]."""

    log_prob: jax.Array
    entropy: jax.Array  # in nats; at the sampler's temperature, before TOP_P and TOP_K


@struct.dataclass
class Model:
    """The policy without its params: structure, frozen weights (with LoRA the base), temperature.

    A pytree, so a jitted function takes it as an argument and a new temperature doesn't recompile.
    """

    graphdef: Any
    frozen: Any
    # of the sampler: pi is the policy at this temperature, before TOP_P and TOP_K
    temperature: float
    pad_id: int = struct.field(pytree_node=False)
    logits_clip: float = struct.field(pytree_node=False)
    num_generations: int = struct.field(pytree_node=False)
    mesh: jax.sharding.Mesh = struct.field(pytree_node=False)
    axis_rules: tuple = struct.field(pytree_node=False)

    def __call__(self, params, batch) -> Pi:
        """Log-prob and entropy of each token of a gradient pass."""
        with devices.on_mesh(self.mesh, self.axis_rules):
            model = nnx.merge(self.graphdef, params, self.frozen, copy=True)
            # [N, T], [N, T, V]
            log_prob, logits = log_probs(
                model,
                batch.prompt_ids,
                batch.completion_ids,
                pad_id=self.pad_id,
                temperature=self.temperature,
                logits_clip=self.logits_clip,
                num_generations=self.num_generations,
            )
            return Pi(log_prob, entropy_of(logits))


def accumulate_gradients(grad_fn, params, model: Model, batch, method):
    """Applies `grad_fn`, a value-and-gradient function of these arguments, to each gradient pass of
    a batch.

    Sums loss and gradients, and stacks the metrics of the passes.
    """

    def add_pass(total, batch):
        values, grads = grad_fn(params, model, batch, method)
        return jax.tree.map(jnp.add, total, grads), values

    if len(batch.mask) == 1:  # a single pass doesn't need an accumulator
        return grad_fn(params, model, jax.tree.map(lambda x: x[0], batch), method)
    grads, (losses, metrics) = jax.lax.scan(add_pass, jax.tree.map(jnp.zeros_like, params), batch)
    return (losses.sum(), metrics), grads


def split(model: nnx.Module, trained) -> tuple[nnx.GraphDef, dict, nnx.State]:
    """A model's structure, the arrays of type `trained`, and the rest of its state."""
    graphdef, params, frozen = nnx.split(model, trained, ...)
    return graphdef, nnx.to_pure_dict(params), frozen


class Llm:
    """The language model of a run.

    Attributes:
        params: the trained weights: all of them, or LoRA's A and B.
        temperature: of the most recent answers.
    """

    def __init__(
        self,
        c,
        actor: nnx.Module,
        reference: nnx.Module | None,
        rollout: BaseRollout,
        rollout_config: RolloutConfig,
        mesh: jax.sharding.Mesh,
        axis_rules: Sequence,
    ):
        self.c = c
        self.actor = actor
        self.reference = reference
        self.rollout = rollout
        self._rollout_config = rollout_config
        self.mesh, self._axis_rules = mesh, tuple(map(tuple, axis_rules))
        self.tokenizer = rollout.tokenizer
        self.pad_id, self.eos_ids = rollout.pad_id(), rollout.tokenizer.eos_ids
        self.temperature = c.TEMPERATURE
        self._last_step: int | None = None
        self._calls = 0  # in that step
        trained = nnx.LoRAParam if c.LORA_RANK else nnx.Param
        self._graphdef, self.params, self._frozen = split(self.actor, trained)
        # once: it takes milliseconds
        self._reference = split(reference, trained) if c.BETA else None
        self._ahead: SampledAhead | None = None

    # --- answers
    def generate(self, questions: dict[str, np.ndarray], step: int) -> Answers:
        """One answer per question (columns [N]), sampled as in training step `step`."""
        return self.to_arrays(*self.sample(questions, step))

    def sample(
        self, questions: dict[str, np.ndarray], step: int
    ) -> tuple[RolloutOutput, list[Episode] | None]:
        """`generate` in Tunix's format, and the episodes of ENVIRONMENT.

        The random key depends on SEED, the step, and the call in the step.
        """
        self._calls = self._calls + 1 if step == self._last_step else 0  # a refill asks again
        self._last_step = step
        self.temperature = temperature_at(
            step, self.c.NUM_BATCHES, self.c.TEMPERATURE, self.c.TEMPERATURE_END
        )
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.c.SEED), step), self._calls)
        config = dataclasses.replace(self._rollout_config, temperature=self.temperature)
        return self._ask(questions["prompts"].tolist(), questions["question"].tolist(), config, key)

    def _ask(
        self, prompts: list[str], questions: list[str], config: RolloutConfig, key
    ) -> tuple[RolloutOutput, list[Episode] | None]:
        # vLLM takes no seed per request.
        config = dataclasses.replace(config, seed=None if self.c.ROLLOUT_ENGINE == "vllm" else key)
        if self.c.ENVIRONMENT:
            return turns.run_episodes(self.c, self.rollout, prompts, questions, config)
        return self.rollout.generate(prompts, config), None

    def answer(self, questions: Sequence[dict[str, str]], config_name: str) -> Answers:
        """One answer per question, sampled with an entry of GENERATION_CONFIGS."""
        vllm = self.c.ROLLOUT_ENGINE == "vllm"  # batches requests itself
        chunk = len(questions) if vllm else self.c.BATCH_SIZE * self.c.NUM_GENERATIONS
        starts, chunks = range(0, len(questions), chunk), []
        for start in tqdm(
            starts, f"evaluate, {config_name}", leave=None, disable=devices.tqdm_disabled()
        ):
            # The same noise before and after training, so only the model differs.
            key = jax.random.fold_in(jax.random.key(self.c.SEED + 1), start)
            part = questions[start : start + chunk]
            asked = ([row[name] for row in part] for name in ("prompts", "question"))
            chunks.append(
                self.to_arrays(*self._ask(*asked, sampling_config(self.c, config_name), key))
            )
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *chunks)

    def to_arrays(self, output: RolloutOutput, episodes: list[Episode] | None = None) -> Answers:
        """Tunix's lists as arrays."""
        T = self.c.TOTAL_GENERATION_STEPS
        if episodes:
            turn = [episode.turn for episode in episodes]
            ended = [episode.terminated for episode in episodes]
        else:
            turn = [[0] * len(ids) for ids in output.tokens]
            ended = has_end(output.tokens, self.eos_ids)
        return Answers(
            texts=np.array(output.text, object),
            prompt_ids=np.asarray(output.left_padded_prompt_tokens, np.int32),
            completion_ids=right_padded(output.tokens, T, self.pad_id, np.int32),
            sampler_log_prob=right_padded(output.logprobs, T, 0.0, np.float32),
            turn=right_padded(turn, T, -1, np.int32),
            lengths=np.array([len(tokens) for tokens in output.tokens]),
            ended=np.array(ended),
            episodes=np.array(episodes, object) if episodes else None,
        )

    def sampled_ahead(self, carried: dict[str, Any]) -> "SampledAhead":
        """Samples a step's answers while the previous step trains; `load` waits for them.

        `carried` are a run's: they have the answers that an earlier process sampled ahead, and get
        the function that a checkpoint calls for the newest ones.
        """
        if not self._ahead:
            self._ahead = SampledAhead(self, carried.get("ahead"))
            carried["ahead"] = self._ahead.to_json
        return self._ahead

    # --- batches, log-probs
    @property
    def model(self) -> Model:
        """The policy without its params."""
        return Model(
            self._graphdef,
            self._frozen,
            self.temperature,
            self.pad_id,
            self.c.LOGITS_CLIP,
            self.c.NUM_GENERATIONS,
            self.mesh,
            self._axis_rules,
        )

    def place(self, batch):
        """NumPy arrays [B, G, ...] on the trainer's devices, in gradient passes: [passes, N /
        passes, ...].

        A pass is TRAIN_MICRO_BATCH_SIZE questions, and [B, G] becomes [passes, N / passes, 1]. The
        rows of a pass are split over the devices. On one CPU, `llama.used_columns` drops unused
        columns.
        """
        B, G, T = batch.completion_ids.shape
        width = llama.used_columns(
            self.actor, T, (batch.completion_ids != self.pad_id).sum(axis=-1).max()
        )
        passes = B // (self.c.TRAIN_MICRO_BATCH_SIZE or B)
        sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(None, "fsdp"))

        def put(name, x):
            x = x.reshape(passes, B * G // passes, -1)
            x = x if name == "prompt_ids" else x[..., :width]
            x = x.astype(np.float32) if x.dtype == np.float64 else x
            # Not device_put: it compares the hosts' arrays in a collective, which on CPUs with one
            # device per process can overtake another one; both hosts then abort.
            return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

        return batch._replace(
            **{name: put(name, x) for name, x in batch._asdict().items() if x is not None}
        )

    def log_probs(self, batch) -> jax.Array:
        """Log-probs of the answers under the last loaded policy: float32 [passes, N/passes, T]."""
        return self._log_probs(self._graphdef, (self.params, self._frozen), batch)

    def reference_log_probs(self, batch) -> jax.Array:
        """The same under the starting model or the TEACHER."""
        graphdef, *states = self._reference
        if self.c.REFERENCE_OFFLOAD:
            states = jax.device_put(states, jax.memory.Space.Device)
        result = self._log_probs(graphdef, tuple(states), batch)
        # then the copy is freed
        return jax.block_until_ready(result) if self.c.REFERENCE_OFFLOAD else result

    def _log_probs(self, graphdef, states, batch) -> jax.Array:
        with devices.on_mesh(self.mesh, self._axis_rules):
            return log_probs_of_states(
                graphdef,
                states,
                batch.prompt_ids,
                batch.completion_ids,
                pad_id=self.pad_id,
                temperature=self.temperature,
                logits_clip=self.c.LOGITS_CLIP,
                num_generations=self.c.NUM_GENERATIONS,
            )

    # --- params
    def first_opt_state(self, optimizer: optax.GradientTransformation):
        """The optimizer's initial state: moments sharded like their params, counters on every
        device.

        By default a counter lives on one device, and would be tied to it when restored from a
        checkpoint.
        """
        everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

        def put(x):
            return (
                x
                if x.ndim
                else jax.make_array_from_callback((), everywhere, np.asarray(x).__getitem__)
            )

        return jax.tree.map(put, optimizer.init(self.params))

    def load(self, params) -> None:
        """Loads new params into the policy and the sampler."""
        if self._ahead:
            self._ahead.wait()  # the old weights finish the answers being sampled
        self.params = params
        nnx.update(self.actor, params)
        self.rollout.update_params(params)


class SampledAhead:
    """The next step's answers, sampled while a step trains, so they're one update old when used.

    vLLM has its own weights, so it samples while the trainer trains. `MaxTextRollout` shares the
    trainer's arrays, which the update donates, so its sampling finishes before the update begins.
    """

    def __init__(self, llm: Llm, saved: dict[str, Any] | None):
        self._llm, self._executor, self._next = llm, futures.ThreadPoolExecutor(max_workers=1), None
        if saved:
            self._next = futures.Future()
            self._next.set_result((RolloutOutput(logits=None, **saved), None))

    def take(self, questions, step: int) -> Answers:
        """The answers sampled ahead; samples them now if there are none."""
        output, _ = self._next.result() if self._next else self._llm.sample(questions, step)
        self._next = None
        return self._llm.to_arrays(output)

    def begin(self, questions, step: int) -> None:
        """Starts sampling, with the random key of `step`."""
        self._next = self._executor.submit(self._llm.sample, questions, step)
        if isinstance(self._llm.rollout, MaxTextRollout):
            self.wait()

    def wait(self) -> None:
        """Blocks until the answers ahead are sampled."""
        futures.wait([self._next] if self._next else [])

    def to_json(self) -> dict[str, Any] | None:
        """The answers ahead, for a checkpoint."""
        if not self._next:
            return None
        output, _ = self._next.result()
        return {
            "text": output.text,
            "tokens": [np.asarray(row).tolist() for row in output.tokens],
            "logprobs": [np.asarray(row, float).tolist() for row in output.logprobs],
            "left_padded_prompt_tokens": np.asarray(output.left_padded_prompt_tokens).tolist(),
        }


def load_llm(c: RunConstants, folder: Path, hf, tokenizer) -> Llm:
    """The language model of a run; `folder`, `hf` and `tokenizer` are the checkpoint's."""
    trainer_devices, rollout_mesh = devices.plan_devices(c, hf, jax.devices())
    config = llama.to_run_config(c, hf)
    base, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id, trainer_devices)
    actor, merge, reference = base, None, None
    if c.LORA_RANK:
        actor, merge = lora.add_lora(
            base, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED
        )
    if c.TEACHER:
        teacher = llama.fetch_model(c.TEACHER)  # folder, and config
        teacher_config = llama.to_run_config(c, teacher[1])
        reference, _ = llama.load_llama(
            *teacher, teacher_config, tokenizer.pad_token_id, trainer_devices
        )
    elif c.BETA:  # LoRA freezes the base weights, so the reference shares them instead of copying
        reference = base if c.LORA_RANK else nnx.clone(base, arrays=True)
    if c.REFERENCE_OFFLOAD:
        reference = nnx.merge(*jax.device_put(nnx.split(reference), jax.memory.Space.Host))

    if c.ROLLOUT_ENGINE == "vllm":
        from model import vllm  # needs the TPU packages

        engine, options = vllm.engine_class(), {}
        engine_settings = vllm.engine_config(c, folder, rollout_mesh, tokenizer.eos_ids)
        rollout_config = sampling_config(c, **engine_settings)
    else:
        # On one device each prompt is computed once. With several, there may be fewer rows than
        # devices.
        prompt_config = llama.to_run_config(c, hf, rows=c.BATCH_SIZE) if mesh.size == 1 else None
        engine = MaxTextRollout
        options = dict(prompt_config=prompt_config, hf=hf, logits_clip=c.LOGITS_CLIP)
        rollout_config, rollout_mesh = sampling_config(c), mesh
    adapter = TokenizerAdapter(tokenizer)
    rollout = engine(
        actor, adapter, rollout_mesh, rollout_config, maxtext_config=config, merge=merge, **options
    )
    return Llm(c, actor, reference, rollout, rollout_config, mesh, config.logical_axis_rules)
