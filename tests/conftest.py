"""The folders are no packages, each stands alone: tests import a script from its folder on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (*sorted(ROOT.glob("[1-5]_*")), ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))
