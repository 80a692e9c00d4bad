"""Loads a trained model for inference or export: its constants, its checkpoint, its weights."""

from types import SimpleNamespace

import jax
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from constants import RunConstants
from model import llama, lora
from model.rollout import MaxTextRollout, sampling_config
from plain_text import escape_controls
from run import checkpoints, run_folder
from run.run_files import Checkpoint
from settings import UserError


def root_and_step(checkpoint: Checkpoint, constant: str = "CHECKPOINT") -> tuple[str, int]:
    """The folder of the run's checkpoints, and the step of the one that `constant` names."""
    # a folder under CHECKPOINT_DIR, wherever that was copied to
    root = str(checkpoint.run_dir.resolve())
    if not checkpoints.saved_steps(root):
        root = checkpoints.root_of_run(
            checkpoint.constants.get("CHECKPOINT_DIR", ""), checkpoint.run_dir
        )
    named = f"{constant}={checkpoint.run_dir}"
    if not (steps := checkpoints.saved_steps(root)):
        raise UserError(f"{named}: no checkpoint in {root}; train further, or name another run")
    if checkpoint.step not in (None, *steps):
        known = ", ".join(map(str, steps))
        raise UserError(f"{named}/{checkpoint.step}: no such checkpoint; there are {known}")
    return root, steps[-1] if checkpoint.step is None else checkpoint.step


def warn_if_model_changed(model: str, checkpoint: Checkpoint, then: str = "") -> None:
    """Prints how MODEL has changed since the run, if it has, and `then`; UserError with LoRA."""
    kept, now = checkpoint.run_json.get("identity", {}), {"MODEL": run_folder.model_digest(model)}
    message = run_folder.change_message(
        kept, now, SimpleNamespace(MODEL=model), str(checkpoint.run_dir)
    )
    if message and checkpoint.constants.get("LORA_RANK"):
        raise UserError(
            f"{message}, and its A and B fit no other weights; put it back, or name it in MODEL"
        )
    if message:
        print(escape_controls(f"note: {message}{then}"))


def make_rollout(
    c: RunConstants, tokenizer, answers: int, checkpoint: Checkpoint | None = None
) -> MaxTextRollout:
    """An engine with MODEL's weights, and LoRA's A and B if the run of `checkpoint` has them.

    `restore` fills these. It decodes `answers` answers in all, at most BATCH_SIZE of them at once.
    """
    folder, hf = llama.fetch_model(c.MODEL)
    llama.check_length(c, hf)
    devices = jax.device_count()
    config = llama.to_maxtext_config(
        # a multiple: each device gets as many
        hf,
        rows=-(-min(c.BATCH_SIZE, answers) // devices) * devices,
        prompt_tokens=c.MAX_PROMPT_LENGTH,
        new_tokens=c.TOTAL_GENERATION_STEPS,
        dtype=c.DTYPE,
        weight_dtype=c.WEIGHT_DTYPE,
        scan_layers=c.SCAN_LAYERS,
    )
    adapter, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id)
    merge, trained_with = None, checkpoint.constants if checkpoint else {}
    if trained_with.get("LORA_RANK"):  # any seed will do: A and B are restored
        numbers = (trained_with[name] for name in ("LORA_RANK", "LORA_ALPHA", "LORA_TARGETS"))
        adapter, merge = lora.add_lora(adapter, mesh, config, *numbers, seed=0)
    return MaxTextRollout(
        adapter,
        TokenizerAdapter(tokenizer),
        mesh,
        sampling_config(c, "policy"),  # the page's log-probs are the policy's own
        maxtext_config=config,
        hf=hf,
        logits_clip=trained_with.get("LOGITS_CLIP", 0.0),
        merge=merge,
    )


def restore(rollout: MaxTextRollout, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint into the engine's model; raises UserError."""
    root, step = root_and_step(checkpoint)
    adapted = nnx.state(rollout.model(), nnx.LoRAParam)  # a run with LoRA saved A and B alone
    weights = nnx.to_pure_dict(adapted or nnx.state(rollout.model(), nnx.Param))
    with checkpoints.open_manager(root) as manager:
        run_id = checkpoint.run_json.get("run_id", "")
        restored, _, _ = checkpoints.restore(manager, step, weights, run_id=run_id)
    nnx.update(rollout.model(), restored)
