"""Loads MODEL and the reference onto their devices, with a sampler: the `Llm` of a run."""

from pathlib import Path

import jax
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from model import devices, llama, lora
from model.llm import Llm
from model.rollout import MaxTextRollout, sampling_config


def load_llm(c, folder: Path, hf, tokenizer) -> Llm:
    """The language model of a run; `folder`, `hf` and `tokenizer` are the checkpoint's."""
    trainer_devices, rollout_mesh = devices.plan_devices(c, hf, jax.devices())
    config = llama.to_run_config(c, hf)
    base, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id, trainer_devices)
    actor, merge, reference = base, None, None
    if c.LORA_RANK:
        actor, merge = lora.add_lora(base, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED)
    if c.TEACHER:
        teacher = llama.fetch_model(c.TEACHER)  # folder, and config
        teacher_config = llama.to_run_config(c, teacher[1])
        reference, _ = llama.load_llama(*teacher, teacher_config, tokenizer.pad_token_id, trainer_devices)
    elif c.BETA:  # LoRA freezes the base weights, so the reference shares them instead of copying
        reference = base if c.LORA_RANK else llama.copy_of(base)
    if c.REFERENCE_OFFLOAD:
        graphdef, state = nnx.split(reference)
        reference = nnx.merge(graphdef, llama.in_memory(state, "pinned_host"))

    if c.ROLLOUT_ENGINE == "vllm":
        from model import vllm  # needs the TPU packages

        engine, options = vllm.engine_class(), {}
        how = sampling_config(c, **vllm.engine_config(c, folder, rollout_mesh, tokenizer.eos_ids))
    else:
        # On one device each prompt is computed once. With several, there may be fewer rows than devices.
        prompt_config = llama.to_run_config(c, hf, rows=c.BATCH_SIZE) if mesh.size == 1 else None
        engine, options = MaxTextRollout, dict(prompt_config=prompt_config, hf=hf, logits_clip=c.LOGITS_CLIP)
        how, rollout_mesh = sampling_config(c), mesh
    adapter = TokenizerAdapter(tokenizer)
    rollout = engine(actor, adapter, rollout_mesh, how, maxtext_config=config, merge=merge, **options)
    return Llm(c, actor, reference, rollout, how, mesh, config.logical_axis_rules)
