"""The folders are no packages, each stands alone: tests import a script from its folder on the path."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (*sorted(ROOT.glob("[1-5]_*")), ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))

# Most of the suite's time is compilation, and its programs run a few times: XLA skips its expensive passes.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# A program that one test has compiled is read by the next, by the other worker, and by the scripts that tests
# start. All of it before jax is imported.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "runs" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
