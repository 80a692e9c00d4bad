"""Tunix's cluster: the models on their devices and the sampler; how a batch comes to those that train."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.linen import partitioning as nn_partitioning
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from model import devices, llama, lora
from model.log_probs import completion_log_probs
from model.rollout import MaxTextRollout


def make_cluster(c, folder: Path, hf, tokenizer, sampling: Callable[..., RolloutConfig]) -> RLCluster:
    """Loads MODEL, copies it for the reference (not with LoRA), and hands both to Tunix.

    Tunix's cluster holds the models on their devices, generates, and brings new weights to the sampler.

    Args:
        c: the constants of the run.
        folder: of the checkpoint.
        hf: its config.
        tokenizer: its tokenizer.
        sampling: how training answers are drawn; takes further fields of a `RolloutConfig`.
    """
    trainer_devices, rollout_mesh = devices.plan_devices(c, hf, jax.devices())
    config = llama.to_run_config(c, hf)
    base, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id, trainer_devices)
    actor, merge = base, None
    if c.LORA_RANK:  # the weights are frozen, and shared with the reference: no second copy
        actor, merge = lora.add_lora(base, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED)
    reference = None
    if c.TEACHER:
        reference = llama.load_teacher(c, tokenizer.pad_token_id, trainer_devices)
    elif c.BETA:
        reference = base if c.LORA_RANK else llama.copy_of(base)
    if c.REFERENCE_OFFLOAD:
        reference = llama.to_memory(reference, "pinned_host")

    if c.ROLLOUT_ENGINE == "vllm":
        from model import vllm  # needs the TPU packages

        engine = functools.partial(vllm.VllmRollout, maxtext_config=config, merge=merge)
        engine_config = vllm.engine_config(c, folder, rollout_mesh)
    else:
        engine = functools.partial(
            MaxTextRollout,
            maxtext_config=config,
            # One device: a prompt is computed once. On several, B rows may be fewer than the devices.
            prompt_config=llama.to_run_config(c, hf, rows=c.BATCH_SIZE) if mesh.size == 1 else None,
            hf=hf,
            current_step=lambda: cluster.global_steps,
            seed=c.SEED,
            logits_clip=c.LOGITS_CLIP,
            merge=merge,
        )
        rollout_mesh, engine_config = mesh, {}
    cluster = RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: rollout_mesh},
            role_to_logical_axis_rule={
                role: config.logical_axis_rules for role in (Role.ACTOR, Role.REFERENCE)
            },
            rollout_engine=engine,
            rollout_config=sampling(**engine_config),
            # The main script's `update` trains: this optimizer holds nothing, and is never called.
            training_config=RLTrainingConfig(actor_optimizer=optax.identity(), eval_every_n_steps=1),
        ),
    )
    return cluster


@contextlib.contextmanager
def trainer_mesh(cluster: RLCluster) -> Iterator[None]:
    """Inside the block jax computes on the actor's mesh, by the actor's axis rules."""
    config = cluster.cluster_config
    with (
        config.role_to_mesh[Role.ACTOR],
        nn_partitioning.axis_rules(config.role_to_logical_axis_rule[Role.ACTOR]),
    ):
        yield


def place(cluster: RLCluster, batch: Any, passes: int) -> Any:
    """NumPy arrays [N, ...], the same on every host, as arrays [passes, N / passes, ...] of the actor's mesh.

    The rows of a pass are divided among the devices.
    """
    mesh = cluster.cluster_config.role_to_mesh[Role.ACTOR]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))

    def put(x):
        x = x.reshape(passes, -1, *x.shape[1:])
        # Not device_put: it compares the hosts' arrays in a collective, which on CPUs with one device per
        # process can overtake another one; both hosts then abort.
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(put, batch)


def first_moments(cluster: RLCluster, optimizer: optax.GradientTransformation, weights: Any) -> Any:
    """The optimizer's state before the first update: moments lie as their weights do, counters everywhere.

    Left to itself a counter lies on one device; restored from a checkpoint it would be bound to it.
    """
    mesh = cluster.cluster_config.role_to_mesh[Role.ACTOR]
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(x):
        counter = x.ndim == 0
        return jax.make_array_from_callback((), everywhere, np.asarray(x).__getitem__) if counter else x

    return jax.tree.map(put, optimizer.init(weights))


def batch_log_probs(c, batch, temperature: float, pad_id: int, model) -> jax.Array:
    """Log-probs of the answers under a model, pass by pass: float32 [passes, N / passes, T]."""
    if c.REFERENCE_OFFLOAD:  # a no-op for a model that is on the device
        model = llama.to_memory(model, "device")
    log_prob = completion_log_probs(
        model, batch.prompt_ids, batch.completion_ids,
        pad_id=pad_id, temperature=temperature, logits_clip=c.LOGITS_CLIP, num_generations=c.NUM_GENERATIONS,
    )  # fmt: skip
    return jax.block_until_ready(log_prob) if c.REFERENCE_OFFLOAD else log_prob  # before the copy is freed
