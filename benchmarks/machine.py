"""What a measurement records of the machine and of the code, the machine's clocks, and a table's
file.
"""

import csv
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


def processor() -> str:
    """Name and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def clocks() -> np.ndarray:
    """Seconds of the wall, and of all threads' processor, float64 [2]; only differences count."""
    return np.array([time.perf_counter(), time.process_time()])


def commit(folder: Path = Path(__file__).parent) -> str:
    """Of a repository, in short; ends in -dirty where files are not as committed."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.check_output(words, cwd=folder, text=True).strip()


def versions(*packages: str) -> str:
    """Of installed packages: "jax 0.12.0.1, flax 0.12.12"."""
    return ", ".join(f"{package} {version(package)}" for package in packages)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A table; its columns in the order in which the rows bring them."""
    with open(path, "w", newline="") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
