"""A run's checkpoints, written by Orbax's `CheckpointManager`; refuses to save a NaN.

CHECKPOINT_DIR/<name of RUN_DIR>/, or RUN_DIR/checkpoints/
    <step>/weights      the trained weights: all of them, or LoRA's A and B
    <step>/moments      the optimizer's state
    <step>/loop         JSON: the weight of the KL, and answers sampled one step ahead
    run.json ...        in CHECKPOINT_DIR: the files of RUN_DIR as of the newest checkpoint

Orbax writes while training continues, under a temporary name until a checkpoint is complete, so a
kill never leaves a half-written one. If one can't be read anyway, the run stops and names it; it
never skips one.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from model.versions import first_line
from run.run_files import read_object
from settings import UserError


def saved(root: str) -> list[int]:
    """The steps that have a checkpoint, in order."""
    place = epath.Path(root)
    return (
        sorted(int(path.name) for path in place.iterdir() if path.name.isdigit())
        if place.exists()
        else []
    )


def root_of_run(checkpoint_dir: str, folder: Path) -> str:
    """Where to save checkpoints: in the run's folder, or under its name in CHECKPOINT_DIR.

    Finds that folder by run_id if it or RUN_DIR was renamed. Raises UserError if it belongs to
    another run, or if that can't be determined.
    """
    if not checkpoint_dir:
        return str(folder.resolve() / "checkpoints")
    place = checkpoint_dir if checkpoint_dir.startswith("gs://") else Path(checkpoint_dir).resolve()
    root = str(epath.Path(place) / folder.name)
    mine = read_object(folder / "run.json") or {"RUN_DIR": str(folder)}
    key = "run_id" if "run_id" in mine else "RUN_DIR"  # a lost run.json leaves only its name
    note = epath.Path(root) / "run.json"
    for other in itertools.chain([note], note.parent.parent.glob("*/run.json")):
        if (read_object(other) or {}).get(key) == mine[key]:
            return str(other.parent)
    owner, named = read_object(note), f"CHECKPOINT_DIR={checkpoint_dir}"
    if owner is None and note.exists():
        raise UserError(f"{named}: {note} is damaged; copy the run.json of its RUN_DIR over it")
    if owner or saved(root):
        fault = (
            f"{root} holds the checkpoints of another run "
            f"({(owner or {}).get('RUN_DIR', 'unknown')})"
        )
        raise UserError(f"{named}: {fault}; choose another folder, or another name for RUN_DIR")
    return root


def copy_files(source: str | Path, target: str | Path, again: bool) -> list[str]:
    """Copies the files of a run, without its checkpoints, from or to a folder or gs:// address.

    Skips files `target` already has, unless `again`. Returns the names of the files copied.
    """
    source, target, copied = epath.Path(source), epath.Path(target), []
    for path in (*source.glob("*.*"), *source.glob("tensorboard/*")):
        place = target / path.relative_to(source)
        if path.suffix == ".partial" or path.is_dir() or (place.exists() and not again):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{place.name}.partial")
        partial.write_bytes(path.read_bytes())
        partial.replace(place)
        copied.append(str(path.relative_to(source)))
    return copied


def open_manager(root: str, max_to_keep: int | None = None) -> ocp.CheckpointManager:
    """Orbax's manager; it saves in a thread, and keeps the last `max_to_keep` checkpoints (None =
    all).
    """
    return ocp.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep)
    )


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no number in a tree of arrays is NaN or infinite: bool []."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def save(
    manager: ocp.CheckpointManager, step: int, params, opt_state, loop: dict[str, Any], c
) -> None:
    """Saves what a run needs to continue after `step` steps, unless that checkpoint already exists.

    Raises UserError if a number isn't finite: the optimizer skips a gradient that isn't, but an
    update can overflow by itself, through the learning rate or Adam's moments.
    """
    if manager.latest_step() == step:
        return
    if not all_finite((params, opt_state)):
        raise UserError(
            f"the weights or their Adam moments after step {step} are not finite; no checkpoint "
            f"holds them. Lower LEARNING_RATE={c.LEARNING_RATE} or "
            f"MAX_GRAD_NORM={c.MAX_GRAD_NORM}, and start a new run"
        )
    weights, moments = map(ocp.args.StandardSave, (params, jax.tree.leaves(opt_state)))
    loop = ocp.args.JsonSave(copy.deepcopy(loop))  # written in a thread while the loop continues
    manager.save(step, args=ocp.args.Composite(weights=weights, moments=moments, loop=loop))


def restore(
    manager: ocp.CheckpointManager, step: int, params, opt_state=None
) -> tuple[Any, Any, dict]:
    """Reads params, opt_state and `loop` of checkpoint `step`, with the arguments' shapes and
    shardings.

    Without `opt_state` only the params are read. Raises UserError if it can't be read as this
    model's.
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, jax.tree.leaves(opt_state)))
    items = {"weights": ocp.args.StandardRestore(like[0])}
    if opt_state is not None:
        items |= {"moments": ocp.args.StandardRestore(like[1]), "loop": ocp.args.JsonRestore()}
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # too little memory doesn't mean a damaged checkpoint
    except Exception as error:  # Orbax, tensorstore, json and the network share no error type
        others = [str(other) for other in manager.all_steps() if other < step]
        remedy = f"move it away to go on from {others[-1]}" if others else "put a whole one back"
        fault = f"checkpoint {step} in {manager.directory} cannot be read as this MODEL's"
        raise UserError(f"{fault} ({first_line(error)}); try again, or {remedy}") from None
    if opt_state is None:
        return restored["weights"], None, {}
    opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), restored["moments"])
    return restored["weights"], opt_state, restored["loop"]
