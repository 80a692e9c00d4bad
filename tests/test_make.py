"""The Makefile where Python 3.12 is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("target", ["setup", "demo", "test", "lint"])
def test_without_python_3_12_make_says_in_one_line_what_to_do(tmp_path, target):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(  # not as a part of the `make test` that may be running this
        ["make", target, "PYTHON=/nowhere/python3.12"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    [line] = (done.stdout + done.stderr).splitlines()
    assert "PYTHON=/nowhere/python3.12 is not Python 3.12; install it, or set its path" in line
    assert not (tmp_path / ".venv").exists()
