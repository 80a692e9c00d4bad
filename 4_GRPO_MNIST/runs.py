"""What serves a run and changes nothing that is learned: its folder, its log, what it prints."""

import contextlib
import csv
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from settings import UserError

# What was compiled is kept from run to run: another SEED compiles nothing. Safe to delete.
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", "runs/compiled"))


def open_run(name: str, c: Any) -> Path:
    """Makes the folder of a run, RUN_DIR or runs/NAME/TIME, and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    folder = Path(c.RUN_DIR or time.strftime(f"runs/{name}/%Y-%m-%d_%H-%M-%S"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "result.json").exists():
            raise UserError(f"RUN_DIR={folder}: holds the result of another run; choose another folder")
        write_json(folder / "constants.json", dataclasses.asdict(c))
    except OSError as error:
        raise UserError(f"RUN_DIR={folder}: {error.strerror}; choose another folder") from None
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


def write_log(folder: Path, logs: Mapping[str, Any], first_seed: int) -> None:
    """The logs by method, arrays [NUM_SEEDS, rows]: log.csv, and means over the seeds for TensorBoard."""
    rows = [
        {"method": method, "seed": first_seed + i}
        | {name: values[i, j].item() for name, values in log._asdict().items()}
        for method, log in logs.items()
        for i, j in np.ndindex(log.images.shape)
    ]
    write_csv(folder / "log.csv", rows)
    for method, log in logs.items():
        with SummaryWriter(str(folder / "tensorboard" / method)) as writer:
            for name, values in log._asdict().items():
                for images, value in zip(log.images[0], values.mean(axis=0)):
                    if np.isfinite(value):  # nan where a method has no such figure
                        writer.add_scalar(f"train/{name}", float(value), int(images))


@contextlib.contextmanager
def progress(method: str, num_rows: int, rows_per_line: int) -> Iterator[Callable[[Any], None]]:
    """A progress bar while a training runs, and a printed line after every `rows_per_line` rows of the log.

    Yields:
        report(row), to be called with each row of the log, means over the seeds.
    """
    with tqdm(total=num_rows, desc=method, leave=False, disable=None) as bar:
        rows = []

        def report(row: Any) -> None:
            rows.append(row)
            bar.update()
            if len(rows) % rows_per_line == 0:
                shares = ("validation_accuracy", "validation_sampled_accuracy", "reward", "zero_variance")
                texts = [f"{name} {100 * getattr(row, name):5.2f} %" for name in shares]
                tqdm.write("   ".join([f"{method:13s}   images {int(row.images):7d}", *texts]))

        yield report


def compile_and_run(function: Callable, *arguments: Any) -> tuple[Any, float]:
    """What `function` returns of jax arrays, and the seconds of compiling it."""
    started = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - started
    result = jax.block_until_ready(program(*arguments))
    jax.effects_barrier()  # the last report has been made
    return result, compile_seconds


def percent(accuracies: Iterable[float]) -> str:
    """Mean and sample standard deviation over the seeds."""
    values = 100 * np.array(list(accuracies))
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread} %"
