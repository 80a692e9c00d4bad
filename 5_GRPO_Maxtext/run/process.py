"""Process-level concerns: signals, the compilation cache, memory, the profiler, a full disk."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import psutil
from tqdm import tqdm

import settings
from plain_text import escape_controls
from settings import UserError

# compilation cache shared by runs; safe to delete
COMPILED = settings.HERE.parent / "runs" / "compiled"
COMPILED_BYTES = 2**30  # above it the least recently used programs are deleted
PROFILED_STEP = 3  # of a process: the first two compile


def enable_compilation_cache() -> None:
    """Turns on jax's compilation cache, in COMPILED or JAX_COMPILATION_CACHE_DIR.

    Off for several processes on CPUs: gloo, which connects them, aborts in a program that was read
    back.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return jax.config.update("jax_enable_compilation_cache", False)
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(COMPILED)
    folder = settings.expand_home(folder)
    try:
        if "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, ".lockfile").open("ab").close()  # jax locks it even to read
    except OSError as error:
        print(escape_controls(f"note: compiled programs are not kept: {folder}: {error.strerror}"))
        return jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@contextlib.contextmanager
def stop_after_step() -> Iterator[threading.Event]:
    """Yields an event that the first of STOP_SIGNALS sets; the second interrupts at once.

    A hangup is the end of the terminal, too, so what's printed after it goes nowhere.
    """
    stop = threading.Event()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def on_signal(number, frame):
        stop.set()
        for other in old:
            signal.signal(other, signal.default_int_handler)
        if number == signal.SIGHUP:  # printing to a terminal that's gone is an error
            for descriptor in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        tqdm.write("stopping after this step, then saving (once more: stop at once, unsaved)")

    old = {
        number: signal.signal(number, on_signal)
        for number in settings.not_ignored(settings.STOP_SIGNALS)
    }
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def full_disk(folder) -> Iterator[None]:
    """Raises a one-line UserError if the disk under RUN_DIR=`folder` is full.

    Orbax logs each error of its threads, and tensorstore prints what follows from it, dozens of
    tracebacks. The first of them is raised in the main thread anyway, so in this block they're left
    out.
    """

    def not_of_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    def of_main_thread(*error) -> None:
        if threading.current_thread() is threading.main_thread():
            hook(*error)

    def of_python(unraisable) -> None:
        if unraisable.object is not None:  # tensorstore names none
            sys.__unraisablehook__(unraisable)

    log, hook = logging.getLogger("absl"), sys.__excepthook__
    log.addFilter(not_of_orbax)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # only Orbax has asyncio's tasks
    sys.excepthook, sys.unraisablehook = of_main_thread, of_python
    try:
        yield
    except Exception as error:  # Orbax and tensorstore have their own types
        said = any(os.strerror(number) in str(error) for number in settings.DISK_FULL)
        if said or getattr(error, "errno", None) in settings.DISK_FULL:
            fault = "the disk is full; earlier checkpoints are whole. Free some space"
            message = f"RUN_DIR={folder}: {fault}, run the same command again"
            raise settings.DiskFull(message) from error
        raise
    finally:
        log.removeFilter(not_of_orbax)  # the rest stays: their threads may outlive the block


def check_profile_dir(folder: str) -> None:
    """Makes PROFILE_DIR before there's a step to lose; UserError if that fails."""
    try:
        if folder and "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"PROFILE_DIR={folder}: {error.strerror}; choose another folder") from None


def profiler(folder: str) -> contextlib.AbstractContextManager:
    """Writes a profile of the block for TensorBoard into `folder` (empty = no profile)."""
    if not folder:
        return contextlib.nullcontext()
    options = jax.profiler.ProfileOptions()
    # tracing Python calls would make the file a hundred times larger
    options.python_tracer_level = 0
    return jax.profiler.trace(folder, profiler_options=options)


def memory_gib() -> dict[str, float]:
    """GiB in use now, by column of train_log.csv: this process on the host, and each of its
    devices.

    The CPU's runtime keeps no count, so there we add up the live arrays, without temporaries. NaN
    (not measured) if the runtime can't tell, as with Pathways, whose devices are on other hosts.
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
