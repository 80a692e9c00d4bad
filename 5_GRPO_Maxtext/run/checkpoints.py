"""A run's checkpoints, written by Orbax's `CheckpointManager`; refuses to save a NaN.

CHECKPOINT_DIR/<name of RUN_DIR>/, or RUN_DIR/checkpoints/
    <step>/weights      the trained weights: all of them, or LoRA's A and B
    <step>/moments      the optimizer's state
    <step>/loop         JSON: the weight of the KL, and answers sampled one step ahead
    run.json ...        in CHECKPOINT_DIR: the files of RUN_DIR as of the newest checkpoint

Orbax writes while training continues. On a disk it writes under a temporary name until a
checkpoint is complete. In a bucket, where nothing can be renamed, it writes `commit_success.txt`
last. So a kill never leaves half a checkpoint that counts as one. If one can't be read anyway, the
run stops and names it; it never skips one.
"""

import copy
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from model import llama
from model.versions import first_line
from run.run_files import read_object
from settings import UserError

# What a run asks of a bucket, and Google's role that allows it. Orbax asks for the bucket itself,
# which none of the roles for objects allows.
ROLES = {
    "storage.buckets.get": "roles/storage.legacyBucketReader",
    "storage.objects.create": "roles/storage.objectAdmin",
    "storage.objects.delete": "roles/storage.objectAdmin",
    "storage.objects.get": "roles/storage.objectAdmin",
    "storage.objects.list": "roles/storage.objectAdmin",
}


def check_bucket(address: str) -> None:
    """Raises UserError unless a run may use the bucket of a gs:// address. Writes nothing."""
    named, name = f"CHECKPOINT_DIR={address}", address.removeprefix("gs://").partition("/")[0]
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{named}: needs the package gcsfs; install it")
    import google.auth.exceptions
    from google.cloud import exceptions, storage

    try:
        bucket = storage.Client().bucket(name)
        allowed = bucket.test_iam_permissions(list(ROLES), timeout=10, retry=None)
    except google.auth.exceptions.DefaultCredentialsError:
        remedy = "run `gcloud auth application-default login`, or give a local folder"
        raise UserError(f"{named}: you aren't logged in to Google Cloud; {remedy}") from None
    except exceptions.NotFound:
        remedy = f"create it with `gcloud storage buckets create gs://{name}`"
        raise UserError(f"{named}: there's no bucket {name}; {remedy}") from None
    except Exception as error:  # the network, the credentials and Google share no error type
        raise UserError(f"{named}: {first_line(error)}; or give a local folder") from None
    if missing := [permission for permission in ROLES if permission not in allowed]:
        roles = " and ".join(dict.fromkeys(ROLES[permission] for permission in missing))
        fault = f"this account lacks {', '.join(missing)} on gs://{name}"
        raise UserError(f"{named}: {fault}; give it the role {roles}, too")


def saved(root: str) -> list[int]:
    """The steps that have a complete checkpoint, in order."""
    place = epath.Path(root)
    steps = [path for path in place.iterdir() if path.name.isdigit()] if place.exists() else []
    return sorted(int(path.name) for path in steps if ocp.utils.is_checkpoint_finalized(path))


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

    Raises UserError if Orbax can't use the folder.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep)
    try:
        return ocp.CheckpointManager(root, options=options)
    except Exception as error:  # Orbax, gcsfs and Google share no error type
        fault = f"Orbax can't keep checkpoints there ({first_line(error)})"
        raise UserError(f"{root}: {fault}; choose another folder") from None


def save(
    manager: ocp.CheckpointManager, step: int, params, opt_state, loop: dict[str, Any], c
) -> None:
    """Saves what a run needs to continue after `step` steps, unless that checkpoint already exists.

    Raises UserError if a number isn't finite: the optimizer skips a gradient that isn't, but an
    update can overflow by itself, through the learning rate or Adam's moments.
    """
    if manager.latest_step() == step:
        return
    if not llama.all_finite((params, opt_state)):
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
