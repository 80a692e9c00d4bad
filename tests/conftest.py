"""The folders are no packages, each stands alone: tests import a script from its folder on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"))
