"""A run's checkpoints: whose they are, that none with a NaN is written, and which of them can be read.

CHECKPOINT_DIR/<name of RUN_DIR>/, or RUN_DIR/checkpoints/
    run.json          the number of the run that they belong to
    actor/<update>/   Orbax's: model_params and optimizer_state
    actor/damaged_<update>/   could not be read; kept, and not looked at again
"""

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx

from parts import devices
from parts.settings import UserError
from parts.tunix_api import CheckpointManager, PeftTrainer
from parts.versions import patched

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
    """The updates after which there is a checkpoint, the last one at the end."""
    actor = epath.Path(root) / "actor"
    return sorted(int(path.name) for path in actor.iterdir() if path.name.isdigit()) if actor.exists() else []


def claim(root: str, run_id: str, folder: Path, checkpoint_dir: str) -> None:
    """Makes the folder of the checkpoints, or checks that those in it are this run's.

    Args:
        root: from `root_of`.
        run_id: of the run, from its run.json.
        folder: RUN_DIR.
        checkpoint_dir: CHECKPOINT_DIR.

    Raises:
        UserError: another run's checkpoints, or a folder that cannot be made.
    """
    place, mark = epath.Path(root), epath.Path(root) / "run.json"
    named = f"CHECKPOINT_DIR={checkpoint_dir}" if checkpoint_dir else f"RUN_DIR={folder}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not saved(root):
            mark.write_text(json.dumps({"run_id": run_id, "RUN_DIR": str(folder)}) + "\n")
            return
        owner = json.loads(mark.read_text()) if mark.exists() else {}  # {}: a run older than the file
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
@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no floating-point number in a tree of arrays is NaN or infinite: bool []."""
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(x).all() for x in numbers]).all()


@contextlib.contextmanager
def only_finite(trainer: PeftTrainer, c) -> Iterator[None]:
    """While the block runs, no checkpoint is written whose weights or Adam moments are not finite.

    `make_optimizer` skips a gradient that is not finite. An update can be so by itself, through a rate or a
    moment that overflows.

    Args:
        trainer: Tunix's.
        c: the constants of the run.

    Raises:
        UserError: from the trainer's save.
    """
    manager = trainer.checkpoint_manager
    write = manager.save

    def save(step: int, model: nnx.Module, optimizer: nnx.Optimizer, **arguments) -> bool:
        due = arguments.get("force") or manager._checkpoint_manager.should_save(step)
        if due and not all_finite((nnx.state(model, nnx.Param), nnx.state(optimizer, nnx.OptState))):
            raise UserError(
                f"the weights or their Adam moments after update {step} are not finite; no checkpoint holds "
                f"them. Lower LEARNING_RATE={c.LEARNING_RATE} (MAX_GRAD_NORM={c.MAX_GRAD_NORM} bounds the "
                "gradient, 0 does not), and start a new run"
            )
        return write(step, model, optimizer, **arguments)

    with patched(manager, "save", save, PeftTrainer.train, PeftTrainer._save_last_checkpoint):
        yield


# %% Reading ------------------------------------------------------------------------------------------------
_tunix_restore = CheckpointManager.maybe_restore  # also while it is replaced


def newest_readable(steps: list[int], read: Callable[[int], Any], where: str) -> tuple[int, Any, list[int]]:
    """The newest checkpoint that can be read; says which cannot.

    Args:
        steps: what there is, ascending.
        read: reads one, or raises.
        where: the folder, for messages.

    Returns:
        Its step, what `read` returned, and the newer steps, which are damaged.

    Raises:
        UserError: none can be read.
    """
    damaged = []
    for step in reversed(steps):
        try:
            found = read(step)
        except (UserError, MemoryError, jax.errors.JaxRuntimeError):  # too little memory is no damage
            raise
        except Exception as error:  # Orbax's, tensorstore's, json's: a damaged file has no error of its own
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = lines[0][:MAX_REASON]
            damaged.append(step)
            continue
        if damaged:
            names = ", ".join(map(str, damaged))
            print(f"checkpoint {names} in {where} is damaged ({reason}); taking {step}, the one before")
        return step, found, damaged
    raise UserError(
        f"{where}: none of its checkpoints ({', '.join(map(str, steps))}) can be read as this MODEL's: "
        f"{reason}; put a whole one back, or start another run"
    )


def restore(manager: CheckpointManager, step: int, model, optimizer, lora_only: bool) -> tuple[int, dict]:
    """Tunix's restore of one checkpoint, which has to be whole; raises whatever the libraries raise."""
    items = manager._checkpoint_manager.item_metadata(step)
    for item in ("model_params",) if optimizer is None else ("model_params", "optimizer_state"):
        if items.get(item) is None:  # without moments Tunix would go on with fresh ones
            raise ValueError(f"it has no {item}")
    return _tunix_restore(manager, model, optimizer, step, lora_only)


@contextlib.contextmanager
def restoring_whole_ones() -> Iterator[None]:
    """While the block runs, Tunix's trainer goes on from the newest checkpoint that can be read.

    Raises:
        UserError: there are checkpoints, and none can be read.
    """

    def maybe_restore(self, model, optimizer=None, step=None, restore_only_lora_params=False):
        manager = self._checkpoint_manager
        steps = sorted(manager.all_steps()) if manager else []
        if not steps:
            return 0, {}
        _, found, damaged = newest_readable(
            steps,
            lambda step: restore(self, step, model, optimizer, restore_only_lora_params),
            str(manager.directory),
        )
        for step in damaged if devices.is_first() else ():  # out of the way of the save that will come
            (manager.directory / str(step)).rename(manager.directory / f"damaged_{step}")
        if damaged:
            devices.all_agree(True)  # the other hosts wait until they are gone
            manager.reload()
        return found

    with patched(CheckpointManager, "maybe_restore", maybe_restore, PeftTrainer.__init__):
        yield
