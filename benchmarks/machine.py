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
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {len(cores())} cores"


def cores() -> list[int]:
    """The numbers of the cores that this process may use; macOS doesn't say, so all."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def clocks() -> np.ndarray:
    """Seconds of the wall, and of all threads' processor, float64 [2]; only differences count."""
    return np.array([time.perf_counter(), time.process_time()])


ROOT = Path(__file__).resolve().parent.parent
MEASURED = (":!*/assets/*", ":!benchmarks/*.csv", ":!measure/lock.json")


def modified(folder: Path = ROOT) -> list[str]:
    """The files of a repository that aren't as committed, but for what measurements write."""
    words = ["git", "status", "--porcelain", "--untracked-files=all", "--", ".", *MEASURED]
    return [line[3:] for line in subprocess.check_output(words, cwd=folder, text=True).splitlines()]


def commit(folder: Path = ROOT) -> str:
    """Of a repository, in short; ends in -dirty where files aren't as committed."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.check_output(words, cwd=folder, text=True).strip()
    return head + "-dirty" * bool(modified(folder))


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
