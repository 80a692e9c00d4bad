"""This process: signals, compiled programs that are kept, memory, the profiler, a disk that is full."""

import contextlib
import errno
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import psutil
from tqdm import tqdm

import settings
from run.plain_text import shown
from settings import UserError

COMPILED = settings.HERE.parent / "runs" / "compiled"  # programs kept from run to run; safe to delete
COMPILED_BYTES = 2**30  # beyond it the programs used longest ago are deleted
PROFILED_STEP = 3  # of a process: the first two compile


def keep_compiled() -> None:
    """Keeps compiled programs from run to run, in COMPILED or where JAX_COMPILATION_CACHE_DIR says."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(COMPILED)
    try:
        if "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, ".lockfile").open("a").close()  # jax locks it even to read
    except OSError as error:
        print(shown(f"note: compiled programs are not kept: {folder}: {error.strerror}"))
        return jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    warnings.showwarning = show_warning


def show_warning(message: Warning, *where: Any, show: Callable = warnings.showwarning) -> None:
    """Hides one warning: a compiled program that a killed run left half written is deleted instead."""
    damaged = re.match(r"Error reading persistent compilation cache entry for '(\w+)'", str(message))
    if not damaged:
        return show(message, *where)
    for path in Path(jax.config.jax_compilation_cache_dir).glob(f"{damaged[1]}-*-cache"):
        with contextlib.suppress(OSError):  # somebody else's
            path.unlink()


@contextlib.contextmanager
def stop_after_step() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C (or SIGTERM) sets; the second one interrupts at once."""
    stop = threading.Event()

    def on_signal(number, frame):
        stop.set()
        tqdm.write("stopping after this step, then saving (once more: stop at once, unsaved)")
        signal.signal(number, signal.default_int_handler)

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def kept(save: Callable[[int], None], step: int) -> Iterator[None]:
    """Saves the `step` steps done if the block raises UserError: a reader's reward or world is at fault."""
    try:
        yield
    except UserError:
        if step:
            save(step)
        raise


@contextlib.contextmanager
def full_disk(folder) -> Iterator[None]:
    """Says in one line that no space was left on the disk under RUN_DIR=`folder`; raises UserError then."""
    try:
        yield
    except Exception as error:  # Orbax and tensorstore have types of their own
        if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise UserError(
                f"RUN_DIR={folder}: the disk is full; earlier checkpoints are whole. Free some space and run "
                "the same command again"
            ) from error
        raise


def traced(steps: Iterable[Any], folder: str) -> Iterator[Any]:
    """Yields `steps`, with jax's profiler on during the PROFILED_STEP-th.

    Args:
        steps: what the loop goes over; a step has ended when the next one is asked for.
        folder: where TensorBoard looks for the trace (empty = no trace).
    """
    try:
        if folder and "://" not in folder:  # before there is a step to lose
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"PROFILE_DIR={folder}: {error.strerror}; choose another folder") from None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each Python call would make the file a hundred times as large
    for count, step in enumerate(steps, start=1):
        now = folder and count == PROFILED_STEP
        with jax.profiler.trace(folder, profiler_options=options) if now else contextlib.nullcontext():
            yield step


def seconds_since_start() -> float:
    """How long this process has lived: with its imports, which take longer than some runs' steps."""
    return time.time() - psutil.Process().create_time()


def memory_gib() -> dict[str, float]:
    """GiB in use now, by column of train_log.csv: this process on the host, and each of its devices.

    On a TPU or GPU: what the runtime has given out, and its largest value so far. Where the runtime keeps no
    such count (a CPU's) it is the live arrays, without the temporaries inside a program; NaN, not measured,
    where it refuses the question: Pathways' devices are on other hosts.
    """
    used = {"memory_host_gib": psutil.Process().memory_info().rss / 2**30}
    for device in jax.local_devices():
        try:
            stats = device.memory_stats()
        except jax.errors.JaxRuntimeError:
            stats = {"bytes_in_use": math.nan}
        if not stats:
            arrays = [x for x in jax.live_arrays() if not x.is_deleted() and device in x.devices()]
            sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays]
            stats = {"bytes_in_use": sum(sizes)}
        used[f"memory_device_{device.id}_gib"] = stats["bytes_in_use"] / 2**30
        if "peak_bytes_in_use" in stats:
            used[f"memory_device_{device.id}_peak_gib"] = stats["peak_bytes_in_use"] / 2**30
    return used
