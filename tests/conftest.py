"""The folders are no packages, each stands alone: tests import a script from its folder on the path."""

import sys
from pathlib import Path

for folder in sorted(Path(__file__).resolve().parent.parent.glob("[1-5]_*")):
    sys.path.insert(0, str(folder))
