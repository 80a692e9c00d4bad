"""The Makefile where Python 3.12 is missing, and what it says of its own targets and environments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).resolve().parent.parent


def copy_makefiles(folder):
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "requirements.txt", folder)
    shutil.copytree(ROOT / "make", folder / "make")
    shutil.copytree(ROOT / "requirements", folder / "requirements")


@pytest.mark.parametrize("target", ["setup", "demo", "demo-cuda", "test", "lint"])
def test_without_python_3_12_make_says_in_one_line_what_to_do(tmp_path, target):
    copy_makefiles(tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(  # not as a part of the `make test` that may be running this
        ["make", target, "PYTHON=/nowhere/python3.12"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    [line] = (done.stdout + done.stderr).splitlines()
    assert "PYTHON=/nowhere/python3.12 is not Python 3.12; install it, or set its path" in line
    assert not list(tmp_path.glob(".venv*"))


def test_lm_eval_without_a_model_says_in_one_line_what_to_do(tmp_path):
    copy_makefiles(tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MODEL"}
    command = ["make", "lm-eval", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = (done.stdout + done.stderr).splitlines()
    assert "MODEL is empty; give the folder that the tool convert_checkpoint made" in line
    assert not list(tmp_path.glob(".venv*"))


def test_every_target_is_phony_but_the_environments():
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", pages.MAKE, re.M))
    assert sorted(phony.split()) == sorted(re.findall(r"^([\w-]+):", pages.MAKE, re.M))


def test_help_needs_no_python_and_says_a_word_about_every_target(tmp_path):
    copy_makefiles(tmp_path)
    done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = dict(re.findall(r"^make ([\w-]+) +(\S.*)$", done.stdout, re.M))
    assert said.keys() == set(re.findall(r"^([\w-]+):", pages.MAKE, re.M)) - {"again"}
    assert list(said)[:6] == ["help", "setup", "demo", "test", "test-slow", "lint"]


def test_git_ignores_every_environment_that_make_builds():
    stamps = re.findall(r"^(\.venv[\w-]*/installed):", pages.MAKE, re.M)
    assert ".venv-cuda/installed" in stamps
    for stamp in stamps:  # its folder: git looks at nothing behind a link, and .venv may be one
        command = ["git", "check-ignore", "--quiet", Path(stamp).parent]
        subprocess.run(command, cwd=ROOT, check=True)


def make(folder, *words):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_an_environment_that_lost_its_programs_is_built_anew(tmp_path):
    copy_makefiles(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "installed").touch()
    assert "-m venv --clear .venv" in make(tmp_path, "--dry-run", "demo").stdout
    said = make(tmp_path, "demo", "PYTHON=/nowhere/python3.12").stderr
    assert "PYTHON=/nowhere/python3.12 is not Python 3.12; install it, or set its path" in said
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    assert "-m venv" not in make(tmp_path, "--dry-run", "demo").stdout


@pytest.mark.index
def test_setup_says_how_far_it_is(tmp_path):
    copy_makefiles(tmp_path)
    blocks = re.split(r"^(?=\w)", (ROOT / "requirements.txt").read_text(), flags=re.M)
    [one] = [block for block in blocks if block.startswith("iniconfig==")]
    (tmp_path / "one.txt").write_text(one)
    done = make(tmp_path, "setup", "REQUIREMENTS=one.txt")
    assert done.returncode == 0, done.stderr
    assert "installing the 1 packages of one.txt into .venv" in done.stdout
    assert "unpacking them, about a minute" in done.stdout and (tmp_path / ".venv" / "installed").exists()
    (tmp_path / "one.txt").write_text(one.replace("sha256:", "sha256:0"))
    (tmp_path / ".venv" / "installed").unlink()
    done = make(tmp_path, "setup", "REQUIREMENTS=one.txt")
    assert done.returncode == 2 and not (tmp_path / ".venv" / "installed").exists()  # not hidden by the pipe
