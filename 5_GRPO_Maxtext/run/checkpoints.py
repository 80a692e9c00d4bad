"""A run's checkpoints: Orbax's `CheckpointManager`, whose they are, and that none holds a NaN.

CHECKPOINT_DIR/<name of RUN_DIR>/, or RUN_DIR/checkpoints/
    run.json            the number of the run that they belong to
    <step>/weights      what is trained: all weights, or LoRA's A and B
    <step>/moments      the optimizer's state
    <step>/loop         JSON: the weight of the KL, and answers that were drawn one step ahead

Orbax writes beside the training, under another name until a checkpoint is whole: a kill leaves none that is
half. One that cannot be read is therefore no everyday thing; it is named, and never passed over in silence.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from settings import UserError

MAX_REASON = 160  # characters of a library's message


# %% Where they are -----------------------------------------------------------------------------------------
def root_of(checkpoint_dir: str, folder: Path) -> str:
    """Where checkpoints go: into the run's folder, or under its name in CHECKPOINT_DIR."""
    if checkpoint_dir.startswith("gs://"):
        return f"{checkpoint_dir.rstrip('/')}/{folder.name}"
    if checkpoint_dir:
        return str(Path(checkpoint_dir).resolve() / folder.name)
    return str(folder.resolve() / "checkpoints")


def saved(root: str) -> list[int]:
    """The steps after which there is a checkpoint, the last one at the end."""
    place = epath.Path(root)
    return sorted(int(path.name) for path in place.iterdir() if path.name.isdigit()) if place.exists() else []


def claim(root: str, run_id: str, folder: Path, checkpoint_dir: str) -> None:
    """Makes the folder of the checkpoints, or checks that it is this run's.

    Args:
        root: from `root_of`.
        run_id: of the run, from its run.json.
        folder: RUN_DIR.
        checkpoint_dir: CHECKPOINT_DIR.

    Raises:
        UserError: another run's folder, or one that cannot be made.
    """
    place, mark = epath.Path(root), epath.Path(root) / "run.json"
    named = f"CHECKPOINT_DIR={checkpoint_dir}" if checkpoint_dir else f"RUN_DIR={folder}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and not saved(root):
            mark.write_text(json.dumps({"run_id": run_id, "RUN_DIR": str(folder)}) + "\n")
            return
        owner = json.loads(mark.read_text()) if mark.exists() else {}
    except OSError as error:
        raise UserError(f"{named}: {root}: {error.strerror or error}; choose another folder") from None
    except ValueError:
        raise UserError(f"{named}: {mark} is damaged; copy the run.json of its RUN_DIR over it") from None
    if owner.get("run_id", "") != run_id:
        raise UserError(
            f"{named}: {root} holds the checkpoints of another run ({owner.get('RUN_DIR', 'unknown')}); "
            "choose another folder, or another name for RUN_DIR"
        )


# %% Writing ------------------------------------------------------------------------------------------------
def open_manager(root: str, max_to_keep: int | None = None) -> ocp.CheckpointManager:
    """Orbax's manager; it saves in a thread, and keeps the last `max_to_keep` checkpoints (None = all)."""
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep))


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no floating-point number in a tree of arrays is NaN or infinite: bool []."""
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(x).all() for x in numbers]).all()


def save(manager: ocp.CheckpointManager, step: int, weights, moments, loop: dict[str, Any], c) -> None:
    """Saves what a run needs to go on after `step`, unless there is such a checkpoint already.

    Args:
        manager: from `open_manager`.
        step: steps done.
        weights: arrays that are trained.
        moments: the optimizer's state.
        loop: what else the loop carries from step to step, for JSON.
        c: the constants of the run.

    Raises:
        UserError: a weight or a moment is not finite. The optimizer skips a gradient that is not finite; an
            update can be so by itself, through a rate or a moment that overflows.
    """
    if manager.latest_step() == step:
        return
    if not all_finite((weights, moments)):
        raise UserError(
            f"the weights or their Adam moments after step {step} are not finite; no checkpoint holds "
            f"them. Lower LEARNING_RATE={c.LEARNING_RATE} (MAX_GRAD_NORM={c.MAX_GRAD_NORM} bounds the "
            "gradient, 0 does not), and start a new run"
        )
    items = ocp.args.Composite(
        weights=ocp.args.StandardSave(weights),
        moments=ocp.args.StandardSave(jax.tree.leaves(moments)),
        loop=ocp.args.JsonSave(loop),
    )
    manager.save(step, args=items)


# %% Reading ------------------------------------------------------------------------------------------------
def restore(manager: ocp.CheckpointManager, step: int, weights, moments=None) -> tuple[Any, Any, dict]:
    """Reads a checkpoint.

    Args:
        manager: from `open_manager`.
        step: its number.
        weights: arrays of the same shapes, dtypes and shardings.
        moments: the same; None leaves them and `loop` on the disk.

    Returns:
        Weights, moments and `loop`.

    Raises:
        UserError: it cannot be read as this model's.
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (weights, jax.tree.leaves(moments)))
    items = {"weights": ocp.args.StandardRestore(like[0])}
    if moments is not None:
        items |= {"moments": ocp.args.StandardRestore(like[1]), "loop": ocp.args.JsonRestore()}
    try:
        found = manager.restore(step, args=ocp.args.Composite(**items))
    except (MemoryError, jax.errors.JaxRuntimeError):  # too little memory is no fault of the checkpoint's
        raise
    except Exception as error:  # Orbax's, tensorstore's, json's, the network's: none has a type of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON]
        others = [str(other) for other in manager.all_steps() if other < step]
        remedy = f"move it away to go on from {others[-1]}" if others else "put a whole one back"
        raise UserError(
            f"checkpoint {step} in {manager.directory} cannot be read as this MODEL's ({reason}); try "
            f"again, or {remedy}"
        ) from None
    if moments is None:
        return found["weights"], None, {}
    moments = jax.tree.unflatten(jax.tree.structure(moments), found["moments"])
    return found["weights"], moments, found["loop"]
