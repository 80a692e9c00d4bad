"""What a run needs besides learning: its folder, its files, its program. The same in folders 2 to
4.
"""

import csv
import dataclasses
import json
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter  # SummaryWriter never ends on a full disk
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar
from tqdm import tqdm

from settings import UserError

RUNS = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "runs"))  # in the repository
HANGUP = getattr(signal, "SIGHUP", None)  # the terminal is closed; Windows doesn't say so


def start_jax(one_thread: bool = True) -> None:
    """Configures JAX before the first array is made. UserError if JAX_PLATFORMS names what isn't
    here.

    By default XLA splits even the smallest matrix product over all cores. With networks this small
    that costs more than it saves, and in one thread a run is repeatable bit for bit. Wider vectors
    round differently, so we ask for AVX2 at most. Even so, the last digits on an Intel and an AMD
    processor differ.
    """
    flags = ["--xla_cpu_multi_thread_eigen=false"] * one_thread
    flags += ["--xla_cpu_max_isa=AVX2"] * (platform.machine().lower() in ("x86_64", "amd64"))
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    # Compiled programs are kept from run to run, so another SEED compiles nothing. The folder can
    # be deleted, and should be if JAX warns of "Error reading persistent compilation cache": a run
    # was killed in it.
    cache = os.path.expanduser(os.environ.get("JAX_COMPILATION_CACHE_DIR", str(RUNS / "compiled")))
    jax.config.update("jax_compilation_cache_dir", cache)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion: a platform without its plugin
        reason = str(error).partition("\n")[0] or "no such device is set up here"
        name = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(f"JAX_PLATFORMS={name}: {reason}; unset it to use the CPU") from None


def open_run(name: str, c: Any) -> Path:
    """Makes a run's folder with constants.json, RUN_DIR or a new one in runs/NAME; UserError if
    it's used.
    """
    folder = Path(c.RUN_DIR or RUNS / name / f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}")
    if (folder / "result.json").exists():
        raise UserError(f"RUN_DIR={folder}: holds the result of another run; choose another folder")
    folder.mkdir(parents=True, exist_ok=bool(c.RUN_DIR))
    write_json(folder / "constants.json", dataclasses.asdict(c))
    return folder


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes constants.json or result.json."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table, with every digit of its numbers."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_log(folder: Path, log: Any, first_seed: int, **columns: str) -> None:
    """Writes the log, a NamedTuple of arrays [NUM_SEEDS, rows]: log.csv, where `columns` go in
    front, and TensorBoard's curves of the means over the seeds, by the log's first field.
    """
    fields = log._asdict()
    write_csv(
        folder / "log.csv",
        [
            {**columns, "seed": first_seed + i}
            | {name: x[i, j].item() for name, x in fields.items()}
            for i, j in np.ndindex(log[0].shape)
        ],
    )
    (folder / "tensorboard").mkdir(exist_ok=True)
    events = EventsWriter(str(folder / "tensorboard" / "events"))
    for name, values in fields.items():
        for x, value in zip(log[0].mean(axis=0), values.mean(axis=0)):
            if np.isfinite(value):  # a metric is nan where there was nothing to measure
                summary = scalar(f"train/{name}", float(value))
                events.write_event(Event(wall_time=time.time(), step=int(x), summary=summary))
    events.close()


def columns[T](log: Sequence[T]) -> T:
    """One log, arrays [NUM_SEEDS, rows], of its rows [NUM_SEEDS] each."""
    return jax.tree.map(lambda *rows: np.stack(rows, axis=1), *log)


def compiled(function: Any, *arguments: Any) -> tuple[Callable, float]:
    """A jitted function, compiled for arguments of these shapes, and the seconds that took."""
    started = time.perf_counter()
    program = function.lower(*arguments).compile()
    return program, time.perf_counter() - started


def finish(folder: Path, started: float, result: dict[str, Any]) -> dict[str, Any]:
    """Adds the seconds since `started` to a run's result, writes result.json, says where it is."""
    result = result | {"seconds": time.perf_counter() - started}
    write_json(folder / "result.json", result)
    print(f"{result['seconds']:.0f} s; everything of this run is in {folder}")
    return result


def until_ctrl_c[T](items: Sequence[T]) -> Iterator[T]:
    """The items, with a progress bar. Ctrl-C ends the loop after the current one; pressed again, at
    once. So do SIGTERM and a closed terminal, whose SIGHUP nohup ignores.
    """
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, HANGUP) if n is not None]
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    pressed = []

    def press(number, _):
        pressed.append(number)
        for other in before:
            signal.signal(other, signal.default_int_handler)
        if number == HANGUP:  # printing to a terminal that's gone is an error
            for descriptor in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    for number in before:
        signal.signal(number, press)
    try:
        for item in tqdm(items, unit="row", leave=False, disable=None):
            yield item
            if pressed:
                tqdm.write(
                    "stopped by Ctrl-C; what's trained so far is kept (Ctrl-C again: nothing is)"
                )
                break
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
