"""A run's checkpoints, written by Orbax's `CheckpointManager`; refuses to save a NaN.

CHECKPOINT_DIR/<name of RUN_DIR>/, or RUN_DIR/checkpoints/
    <step>/weights      the trained weights: all of them, or LoRA's A and B
    <step>/moments      the optimizer's state
    <step>/loop         JSON: the weight of the KL, answers sampled one step ahead, and `proof`:
                        the run's id, the step, a digest of each array above
    run.json ...        in CHECKPOINT_DIR: the files of RUN_DIR as of the newest checkpoint

Orbax writes while training continues. On a disk it writes under a temporary name until a checkpoint
is complete. In a bucket, where nothing can be renamed, it writes `commit_success.txt` last. So half
a checkpoint, which a kill leaves, never counts as one. If a complete one can't be read, the run
stops and names it; it never skips one.
"""

import copy
import hashlib
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from constants import RunConstants
from model.versions import first_line
from run.run_files import is_step, read_object
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


def saved_steps(root: str) -> list[int]:
    """The steps that have a complete checkpoint, in order."""
    place = epath.Path(root)
    steps = [path for path in place.iterdir() if is_step(path.name)] if place.exists() else []
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
    mine = {"RUN_DIR": str(folder)} | (read_object(folder / "run.json") or {})
    key = "run_id" if "run_id" in mine else "RUN_DIR"  # a lost run.json leaves only its name
    note = epath.Path(root) / "run.json"
    for other in itertools.chain([note], note.parent.parent.glob("*/run.json")):
        if (read_object(other) or {}).get(key) == mine[key]:
            return str(other.parent)
    owner, named = read_object(note), f"CHECKPOINT_DIR={checkpoint_dir}"
    if owner is None and note.exists():
        raise UserError(f"{named}: {note} is damaged; copy the run.json of its RUN_DIR over it")
    if owner or saved_steps(root):
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


@jax.jit
def examine(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A digest of an array, uint32 [], and whether all of it is finite, bool [].

    The digest is the sum modulo 2^32 of the numbers' bits, each mixed with its place by the last
    step of MurmurHash3. That's one-to-one, so one changed number always shows; of other damage one
    in 2^32 doesn't. The array's own devices compute it; for any sharding the sum is the same.
    """
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    if jnp.issubdtype(x.dtype, jnp.floating):
        width = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        bits, finite = jax.lax.bitcast_convert_type(x, width), jnp.isfinite(x).all()
    else:  # counters and flags
        bits, finite = x, jnp.array(True)
    mixed = bits.astype(jnp.uint32) ^ index * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ mixed >> 16) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 13) * jnp.uint32(0xC2B2AE35)
    return (mixed ^ mixed >> 16).sum(dtype=jnp.uint32), finite


def examine_all(tree: Any) -> tuple[dict[str, list], list[str]]:
    """[dtype, digest] of each array by its name, which is the same in every kind of tree; and the
    names of those that aren't finite.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    found = jax.device_get({name: examine(leaf) for name, leaf in leaves.items()})
    digests = {name: [str(leaves[name].dtype), int(digest)] for name, (digest, _) in found.items()}
    return digests, [name for name, (_, finite) in found.items() if not finite]


def digest_of(loop: dict[str, Any]) -> str:
    """A digest of what JSON keeps of `loop`, without the proof in it."""
    kept = json.loads(json.dumps({name: x for name, x in loop.items() if name != "proof"}))
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def find_fault(trees: dict[str, Any], loop: dict[str, Any], step: int, run_id: str) -> str:
    """What's wrong with what was read of checkpoint `step`: `trees` by the name of its parts; ""
    if nothing is.

    Checkpoints of older versions have no proof. An array that's read in another dtype isn't
    compared.
    """
    found = {part: examine_all(tree) for part, tree in trees.items()}
    proof = loop.get("proof", {})
    if not isinstance(proof, dict):
        return "its proof isn't an object"
    if run_id and proof.get("run_id", run_id) != run_id:
        return f"it's of another run, {proof['run_id']}, and this one is {run_id}"
    if proof.get("step", step) != step:
        return f"it's of step {proof['step']}"
    if proof and proof.get("loop") != digest_of(loop):
        return "its loop isn't what was saved"
    if type(loop.get("beta")) not in (int, float):
        return "its loop lacks beta, the weight of the KL"
    for part, (digests, infinite) in found.items():
        saved = proof.get(part, {})
        for name, (dtype, digest) in digests.items():
            if name in saved and saved[name][0] == dtype and saved[name][1] != digest:
                return f"{part}/{name} isn't what was saved"
        if infinite:
            return f"{part}/{infinite[0]} has a NaN or an infinity, which is never saved"
    return ""


def save(
    manager: ocp.CheckpointManager,
    step: int,
    params,
    opt_state,
    loop: dict[str, Any],
    c: RunConstants,
    run_id: str = "",
) -> None:
    """Saves what a run needs to continue after `step` steps, unless that checkpoint already exists.

    Raises UserError if a number isn't finite: the optimizer skips a gradient that isn't, but an
    update can overflow by itself, through the learning rate or Adam's moments.
    """
    if manager.latest_step() == step:
        return
    trees = {"weights": params, "moments": jax.tree.leaves(opt_state)}
    found = {part: examine_all(tree) for part, tree in trees.items()}
    if any(infinite for _, infinite in found.values()):
        raise UserError(
            f"the weights or their Adam moments after step {step} are not finite; no checkpoint "
            f"holds them. Lower LEARNING_RATE={c.LEARNING_RATE} or "
            f"MAX_GRAD_NORM={c.MAX_GRAD_NORM}, and start a new run"
        )
    proof = {"run_id": run_id, "step": step, "loop": digest_of(loop)}
    proof |= {part: digests for part, (digests, _) in found.items()}
    items = {part: ocp.args.StandardSave(tree) for part, tree in trees.items()}
    # a copy: it's written in a thread while the loop continues
    items["loop"] = ocp.args.JsonSave(copy.deepcopy(loop | {"proof": proof}))
    manager.save(step, args=ocp.args.Composite(**items))


def restore(
    manager: ocp.CheckpointManager, step: int, params, opt_state=None, run_id: str = ""
) -> tuple[Any, Any, dict]:
    """Reads params, opt_state and `loop` of checkpoint `step`, with the arguments' shapes and
    shardings.

    Without `opt_state` only the params and `loop` are read. Raises UserError if it can't be read as
    this model's, or isn't what the run `run_id` saved ("": any run).
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, jax.tree.leaves(opt_state)))
    items = {"weights": ocp.args.StandardRestore(like[0]), "loop": ocp.args.JsonRestore()}
    if opt_state is not None:
        items["moments"] = ocp.args.StandardRestore(like[1])
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
        loop = dict(restored["loop"])
        trees = {part: restored[part] for part in items if part != "loop"}
        fault = find_fault(trees, loop, step, run_id)
        fault = fault and f"is damaged ({fault})"
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # too little memory doesn't mean a damaged checkpoint
    except Exception as error:  # Orbax, tensorstore, json and the network share no error type
        fault = f"cannot be read as this MODEL's ({first_line(error)})"
    if fault:
        others = [str(other) for other in manager.all_steps() if other < step]
        remedy = f"move it away to go on from {others[-1]}" if others else "put a whole one back"
        named = f"checkpoint {step} in {manager.directory}"
        raise UserError(f"{named} {fault}; try again, or {remedy}")
    loop.pop("proof", None)
    if opt_state is None:
        return restored["weights"], None, loop
    opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), restored["moments"])
    return restored["weights"], opt_state, loop
