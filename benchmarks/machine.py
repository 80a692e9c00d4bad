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

ROOT = Path(__file__).resolve().parent.parent
# what a measurement writes, which may be modified while it names the commit of its code
PRODUCTS = (":!*/assets/*", ":!benchmarks/*.csv", ":!measure/lock.json")


def processor() -> str:
    """Name and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def clocks() -> np.ndarray:
    """Seconds of the wall, and of all threads' processor, float64 [2]; only differences count."""
    return np.array([time.perf_counter(), time.process_time()])


def commit(folder: Path = ROOT, untracked: str = "no") -> str:
    """The commit of the repository at `folder`, in short.

    SystemExit if files aren't as committed: a measurement names the commit it was made from. Ask
    for it before you measure. Products may be modified; new files count if `untracked` is "all".
    """
    words = ["git", "status", "--porcelain", f"--untracked-files={untracked}", "--", ".", *PRODUCTS]
    status = subprocess.check_output(words, cwd=folder, text=True)
    if files := [line[3:] for line in status.splitlines()]:
        more = f" and {len(files) - 5} more" if len(files) > 5 else ""
        raise SystemExit(f"error: commit first, or set aside: {', '.join(files[:5])}{more}")
    words = ["git", "rev-parse", "--short", "HEAD"]
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
