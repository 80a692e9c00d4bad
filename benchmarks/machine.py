"""What the benchmarks ask the machine: its processor's name, and its clocks."""

import os
import platform
import time
from pathlib import Path

import numpy as np


def processor() -> str:
    """Name and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def clocks() -> np.ndarray:
    """Seconds of the wall, and of the processor in user and system mode, all threads: float64 [2].

    Only differences mean anything.
    """
    return np.array([time.perf_counter(), time.process_time()])
