"""The Makefile where Python 3.12 is missing, and what it says of its targets."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
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

    def run(*words):
        mine = ("MODEL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL")
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in mine
        }
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


def test_make_copies_changes_nothing(make, tmp_path):
    """Each copy is as it is in folder 2. Folder 1 has no JAX, and folder 5 has other settings."""
    names = ("settings", "runs", "grader")
    files = [path for name in names for path in ROOT.glob(f"[1-5]_*/**/{name}.py")]
    for path in files:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    assert make("copies").returncode == 0
    changed = [x for x in files if x.read_bytes() != (tmp_path / x.relative_to(ROOT)).read_bytes()]
    assert not changed, "edit these in 2_Cart_Pole_DQN, then run `make copies`"
    source = ROOT / "2_Cart_Pole_DQN"
    others = [x for x in files if x.read_bytes() != (source / x.name).read_bytes()]
    assert others == [ROOT / "5_GRPO_Maxtext" / "settings.py", ROOT / "1_Q_Learning" / "runs.py"]


def test_an_environment_that_lost_its_programs_is_built_anew(make, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "installed").touch()
    assert "-m venv --clear .venv" in make("--dry-run", "demo").stdout
    assert MISSING in make("demo", NOWHERE).stderr
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    assert "-m venv" not in make("--dry-run", "demo").stdout


@pytest.mark.index
def test_an_installation_that_fails_is_not_taken_for_done(make, tmp_path):
    """pip installs uv, which is then asked for a package that isn't there."""
    line = f"one @ file:///nowhere/one-1-py3-none-any.whl --hash=sha256:{64 * '0'}\n"
    (tmp_path / "one.txt").write_text(line)
    done = make("setup", "REQUIREMENTS=one.txt")
    assert done.returncode == 2 and "/nowhere/one-1-py3" in done.stderr
    assert "README.md says how pip does it" in done.stderr
    assert (tmp_path / ".venv" / "bin" / "uv").exists()
    assert not (tmp_path / ".venv" / "installed").exists()


def test_uv_asks_the_index_that_pip_is_told_to_ask(make, tmp_path, monkeypatch):
    """It's a folder with one package. uv itself, which pip would fetch from there, is put there."""
    wheel = tmp_path / "simple" / "one" / "one-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("one.py", "")
        file.writestr("one-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1\n")
        file.writestr("one-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("one-1.dist-info/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    index = f"index-url = file://{tmp_path}/simple\nextra-index-url = file:///nowhere\n"
    (tmp_path / "pip.conf").write_text(f"[global]\n{index}")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "one.txt").write_text(f"one==1 --hash=sha256:{digest}\n")
    (tmp_path / "requirements" / "build.txt").write_text("")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    (binaries / "python").symlink_to(sys.executable)  # so the folder isn't cleared
    (tmp_path / ".venv" / "installed").touch()
    os.utime(tmp_path / ".venv" / "installed", (0, 0))
    done = make("setup", "REQUIREMENTS=one.txt")
    assert not done.returncode, done.stderr
    assert [*tmp_path.glob(".venv/lib/python3.12/site-packages/one.py")]
