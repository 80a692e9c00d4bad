"""The Makefile where Python 3.12 is missing, and what it says of its targets."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder with nothing but what make needs; not as a part of `make test`."""
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("make", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MODEL"}

    def run(*words):
        command = ["make", f"PYTHON={sys.executable}", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


NOWHERE = "PYTHON=/nowhere/python3.12"
MISSING = f"{NOWHERE} is not Python 3.12; install it, or set its path"


@pytest.mark.parametrize("target", ["setup", "demo-cuda", "lint", "lm-eval"])
def test_what_is_missing_is_said_in_one_line(make, tmp_path, target):
    words, said = [NOWHERE], MISSING
    if target == "lm-eval":
        words, said = [], "MODEL is empty; give the folder that the tool convert_checkpoint made"
    done = make(target, *words)
    assert done.returncode == 2
    [line] = (done.stdout + done.stderr).splitlines()
    assert said in line and not list(tmp_path.glob(".venv*"))


def test_help_needs_no_python_and_says_a_word_about_every_target(make):
    said = dict(re.findall(r"^make ([\w-]+) +(\S.*)$", make("PYTHON=/nowhere").stdout, re.M))
    targets = re.findall(r"^([\w-]+):", pages.MAKE, re.M)
    assert said.keys() == set(targets) - {"again"}
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", pages.MAKE, re.M))
    assert sorted(phony.split()) == sorted(targets)


def test_an_environment_that_lost_its_programs_is_built_anew(make, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "installed").touch()
    assert "-m venv --clear .venv" in make("--dry-run", "demo").stdout
    assert MISSING in make("demo", NOWHERE).stderr
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    assert "-m venv" not in make("--dry-run", "demo").stdout


def test_an_installation_that_fails_is_not_taken_for_done(make, tmp_path):
    """Though its output goes through a pipe. Nothing is fetched: no builder, and a package that
    isn't.
    """
    (tmp_path / "requirements" / "build.txt").write_text("")
    line = f"one @ file:///nowhere/one-1-py3-none-any.whl --hash=sha256:{64 * '0'}\n"
    (tmp_path / "one.txt").write_text(line)
    done = make("setup", "REQUIREMENTS=one.txt")
    assert done.returncode == 2 and "/nowhere/one-1-py3" in done.stdout + done.stderr
    assert (tmp_path / ".venv" / "bin" / "pip").exists()
    assert not (tmp_path / ".venv" / "installed").exists()
