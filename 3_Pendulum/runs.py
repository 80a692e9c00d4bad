"""What serves a run and changes nothing that is learned: its folder, its log, what it prints."""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from tensorboardX import SummaryWriter
from tqdm import tqdm

from settings import UserError

# XLA splits even the smallest matrix product over all cores; here the hand-over costs more than it saves, and
# a product in one thread makes a run repeatable bit for bit. (jax looks at it when it makes its first array.)
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
RUNS = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "runs"))  # wherever a script is called
# What was compiled is kept from run to run: another SEED compiles nothing. Safe to delete.
jax.config.update(
    "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(RUNS / "compiled"))
)


STOP = threading.Event()  # set by Ctrl-C while a training runs


def show_warning(message: Warning, *where: Any, show: Callable = warnings.showwarning) -> None:
    """Not of a compiled program that a killed run left half written: it goes, and is kept anew."""
    damaged = re.match(r"Error reading persistent compilation cache entry for '(\w+)'", str(message))
    if not damaged:
        return show(message, *where)
    for path in Path(jax.config.jax_compilation_cache_dir).glob(f"{damaged[1]}-*-cache"):
        path.unlink(missing_ok=True)


warnings.showwarning = show_warning


class Stopped(KeyboardInterrupt):
    """Ctrl-C has ended a training early; what was trained until then is whole."""


def open_run(name: str, c: Any) -> Path:
    """Makes the folder of a run, RUN_DIR or a new one in runs/NAME, and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    folder = Path(c.RUN_DIR or RUNS / name)
    try:
        folder = folder if c.RUN_DIR else new_folder(folder / time.strftime("%Y-%m-%d_%H-%M-%S"))
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "result.json").exists():
            raise UserError(f"RUN_DIR={folder}: holds the result of another run; choose another folder")
        write_json(folder / "constants.json", dataclasses.asdict(c))
    except OSError as error:
        raise UserError(f"RUN_DIR={folder}: {error.strerror}; choose another folder") from None
    return folder


def new_folder(path: Path) -> Path:
    """Makes it, or path_2, path_3, ...: two runs may start in the same second."""
    for count in itertools.count(1):
        folder = path.with_name(f"{path.name}_{count}") if count > 1 else path
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes constants.json or result.json."""
    path.write_text(json.dumps(values, indent=1) + "\n")


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a table; numbers in full, so that everything shown can be computed again from the file."""
    rows = list(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_log(folder: Path, log: Any, first_seed: int) -> None:
    """The log, arrays [NUM_SEEDS, rows]: log.csv, and means over the seeds as TensorBoard's curves."""
    rows = [
        {"seed": first_seed + i} | {name: values[i, j].item() for name, values in log._asdict().items()}
        for i, j in np.ndindex(log.env_step.shape)
    ]
    write_csv(folder / "log.csv", rows)
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for name, values in log._asdict().items():
            for env_step, value in zip(log.env_step.mean(axis=0), values.mean(axis=0)):
                if np.isfinite(value):  # the return of an interval in which no episode ended is nan
                    writer.add_scalar(f"train/{name}", float(value), int(env_step))


@contextlib.contextmanager
def progress(num_steps: int, shown: Sequence[str]) -> Iterator[Callable[[Any], None]]:
    """A progress bar and about ten printed lines while a training runs.

    Args:
        num_steps: environment steps of each seed.
        shown: columns of the log to print.

    Yields:
        report(row), to be called with a row of the log after each interval, means over the seeds.
    """
    with tqdm(total=num_steps, unit="step", leave=False, disable=None) as bar:
        tqdm.write("     step   " + "   ".join(shown))

        def report(row: Any) -> None:
            before, bar.n = bar.n, min(int(row.env_step), num_steps)  # a last rollout may run over
            bar.refresh()
            if 10 * before // num_steps < 10 * bar.n // num_steps:
                columns = (f"{getattr(row, name):{len(name)}.4g}" for name in shown)
                tqdm.write(f"{int(row.env_step):9,}   " + "   ".join(columns))

        STOP.clear()
        yield report
        if STOP.is_set():
            raise Stopped


def scan(body: Callable, agent: Any, xs: Any, report: Callable[[Any], None]) -> tuple[Any, Any]:
    """jax.lax.scan, which calls report(row), means over the seeds, after each row, and ends once STOP is set.

    Args:
        body: (agent, x) -> (agent, row of the log), mapped with `jax.vmap(..., axis_name="seed")`.
        agent, xs: as those of jax.lax.scan.
        report: called on the host.

    Returns:
        The agent, and the log; rows that were not trained any more are 0.
    """

    def go_on(row: Any) -> np.bool_:
        report(row)
        return np.bool_(not STOP.is_set())

    def one_row(carry: tuple) -> tuple:
        i, _, agent, log = carry
        agent, row = body(agent, jax.tree.map(lambda x: x[i], xs))
        log = jax.tree.map(lambda rows, new: rows.at[i].set(new), log, row)
        going = io_callback(go_on, jax.ShapeDtypeStruct((), bool), jax.lax.pmean(row, "seed"))
        return i + 1, going, agent, log

    count = len(jax.tree.leaves(xs)[0])
    _, row = jax.eval_shape(body, agent, jax.tree.map(lambda x: x[0], xs))
    log = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), row)
    start = (jnp.int32(0), jnp.bool_(True), agent, log)
    *_, agent, log = jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[1], one_row, start)
    return agent, log


def trained_rows(log: Any) -> Any:
    """The log as numpy arrays [NUM_SEEDS, rows], without the rows that `scan` has left out."""
    log = jax.tree.map(np.asarray, log)
    return jax.tree.map(lambda values: values[:, log[0][0] > 0], log)  # the first column counts what was seen


def compile_and_run(function: Callable, *arguments: Any) -> tuple[Any, float]:
    """What `function` returns of jax arrays, and the seconds of compiling it.

    Ctrl-C while it runs ends its `scan` at the next report. Once more: nothing is kept.
    """
    started = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - started

    def stop(number: int, frame: Any) -> None:
        STOP.set()
        tqdm.write("stopping at the next report (Ctrl-C once more: nothing is kept)")
        signal.signal(number, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        # Python hears Ctrl-C only in a thread that XLA does not keep busy.
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(lambda: jax.block_until_ready(program(*arguments))).result()
    finally:
        signal.signal(signal.SIGINT, before)
    return result, compile_seconds


def summary(eval_return: np.ndarray, solved: float | None = None) -> str:
    """Mean and sample standard deviation over the seeds [NUM_SEEDS], the lowest, and how many are solved."""
    spread = f" +- {eval_return.std(ddof=1):.1f}" if len(eval_return) > 1 else ""
    text = f"{eval_return.mean():.1f}{spread}, lowest {eval_return.min():.1f}"
    if solved is None:
        return text
    return f"{text}, {(eval_return >= solved).sum()} of {len(eval_return)} seeds solved ({solved:g})"
