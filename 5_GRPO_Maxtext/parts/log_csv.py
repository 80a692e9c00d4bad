"""Reads a run's training log. Apart from run_log.py, which writes it: nothing heavy is imported here."""

import csv
from pathlib import Path


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a `train_log.csv`; an empty list if there is none."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
