"""Loads MODEL and the reference, and hands both to Tunix's cluster with a sampler."""

import functools
from pathlib import Path

import jax
import optax
from flax import nnx
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role

from model import devices, llama, lora
from model.rollout import MaxTextRollout, sampling


def make_cluster(c, folder: Path, hf, tokenizer) -> RLCluster:
    """The models on their devices and the sampler; `folder`, `hf` and `tokenizer` are the checkpoint's."""
    trainer_devices, rollout_mesh = devices.plan_devices(c, hf, jax.devices())
    config = llama.to_run_config(c, hf)
    base, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id, trainer_devices)
    actor, merge, reference = base, None, None
    if c.LORA_RANK:
        actor, merge = lora.add_lora(base, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED)
    if c.TEACHER:
        teacher, its = llama.load_hf_config(c.TEACHER)
        its_config = llama.to_run_config(c, its)
        reference, _ = llama.load_llama(teacher, its, its_config, tokenizer.pad_token_id, trainer_devices)
    elif c.BETA:  # LoRA freezes the base weights, so the reference shares them instead of copying
        reference = base if c.LORA_RANK else llama.copy_of(base)
    if c.REFERENCE_OFFLOAD:
        graphdef, state = nnx.split(reference)
        reference = nnx.merge(graphdef, llama.in_memory(state, "pinned_host"))

    if c.ROLLOUT_ENGINE == "vllm":
        from model import vllm  # needs the TPU packages

        engine = functools.partial(vllm.engine_class(), maxtext_config=config, merge=merge)
        engine_config = vllm.engine_config(c, folder, rollout_mesh, tokenizer.eos_ids)
    else:
        # On one device each prompt is computed once. With several, there may be fewer rows than devices.
        prompt_config = llama.to_run_config(c, hf, rows=c.BATCH_SIZE) if mesh.size == 1 else None
        engine = functools.partial(
            MaxTextRollout, maxtext_config=config, prompt_config=prompt_config, hf=hf, seed=c.SEED,
            current_step=lambda: cluster.global_steps, logits_clip=c.LOGITS_CLIP, merge=merge,
        )  # fmt: skip
        rollout_mesh, engine_config = mesh, {}
    roles = (Role.ACTOR, Role.REFERENCE)
    cluster_config = ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh) | {Role.ROLLOUT: rollout_mesh},
        role_to_logical_axis_rule=dict.fromkeys(roles, config.logical_axis_rules),
        rollout_engine=engine,
        rollout_config=sampling(c, **engine_config),
        # The main script's `update` trains; this optimizer has no state and is never called.
        training_config=RLTrainingConfig(actor_optimizer=optax.identity(), eval_every_n_steps=1),
    )
    cluster = RLCluster(actor=actor, reference=reference, tokenizer=tokenizer, cluster_config=cluster_config)
    return cluster
