"""What serves a run and changes nothing that is learned: its folder and its files."""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from settings import UserError

RUNS = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "runs"))  # wherever a script is called


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


def write_log(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The log, one row per LOG_EVERY episodes: log.csv, and TensorBoard's curves."""
    write_csv(folder / "log.csv", rows)
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for row in rows:
            for name, value in row.items():
                writer.add_scalar(f"train/{name}", value, row["episode"])
