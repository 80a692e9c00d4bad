"""Short runs of the main script for several test files: in this process, or in one that can be killed."""

import os
import subprocess
import sys
import time

from parts import settings

SCRIPT = settings.HERE / "grpo_llama3_1_8b_demo.py"
SHORT = [
    "NUM_BATCHES=8",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "NUM_TEST_QUESTIONS=16",
    "SAVE_INTERVAL_STEPS=2",
    "EVAL_EVERY=4",
    "EVAL_QUESTIONS=8",
    "LOG_ANSWERS_EVERY=2",
    "EVAL_CONFIG=liberal",  # the same program as in training, at another temperature
]
HANGS = 900  # seconds; only against a process that never ends


def start(folder, *arguments, **environment):
    """The main script in a process of its own, with these environment variables (None = without)."""
    variables = os.environ | environment
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    """Waits for the process; its standard output."""
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err[-3000:]
    return out


def wait_for(condition, process):
    """Waits until `condition` holds; the process has to live until then."""
    end = time.monotonic() + HANGS
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()[-3000:]
        time.sleep(0.002)
