"""Runs a script of CleanRL as it is, and keeps its names, its seconds and the returns that it printed."""

import contextlib
import importlib
import re
import runpy
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import peer

WINDOW = 20  # episodes whose mean is a row of the log, as CleanRL smooths its own curves


class Printed:
    """Standard output of the script: each line with the seconds at which it came."""

    def __init__(self, clock: peer.Clock):
        self.clock, self.text, self.lines = clock, "", []

    def write(self, text: str) -> int:
        *lines, self.text = (self.text + text).split("\n")
        self.lines += [(self.clock.read()["seconds"], line) for line in lines]
        return len(text)

    def flush(self) -> None:
        pass


def run(
    checkout: Path, name: str, arguments: list[str], imports: list[str]
) -> tuple[dict[str, Any], dict[str, float], list, str]:
    """One run of cleanrl/NAME, in a folder that is thrown away; `imports` come before the clock starts.

    Returns the script's names after its last line; `Clock.read`; rows of its log: (environment step, seconds,
    mean return of the last 20 training episodes); version.
    """
    sys.path.insert(0, str(checkout))  # for its package cleanrl_utils
    sys.argv = [name, *arguments]
    for module in imports:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        clock = peer.Clock()
        printed = Printed(clock)
        with contextlib.redirect_stdout(printed):
            names = runpy.run_path(str(checkout / "cleanrl" / name), run_name="__main__")
        measured = clock.read()
    rows, last = [], deque(maxlen=WINDOW)
    for seconds, line in printed.lines:
        if found := re.match(r"global_step=(\d+), episodic_return=\[?([-\d.e+]+)", line):
            last.append(float(found[2]))
            if len(last) == WINDOW:
                rows.append((int(found[1]), seconds, sum(last) / WINDOW))
    return names, measured, rows, f"CleanRL {peer.commit(checkout)}"
