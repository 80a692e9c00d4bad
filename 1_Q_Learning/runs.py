"""What serves a run and changes nothing that is learned: its folder and its files."""

import csv
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter  # SummaryWriter never ends on a full disk
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from settings import UserError

# wherever a script is called
RUNS = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "runs"))


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


def write_log(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The log, one row per LOG_EVERY episodes: log.csv, and TensorBoard's curves."""
    write_csv(folder / "log.csv", rows)
    (folder / "tensorboard").mkdir(exist_ok=True)
    events = EventsWriter(str(folder / "tensorboard" / "events"))
    for row, name in itertools.product(rows, rows[0]):
        summary = scalar(f"train/{name}", row[name])
        events.write_event(Event(wall_time=time.time(), step=row["episode"], summary=summary))
    events.close()
