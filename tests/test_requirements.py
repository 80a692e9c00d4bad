"""What is installed is what pyproject.toml asks for, and nothing committed names a package registry."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_requirements_are_compiled_from_pyproject(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)  # versions stay as they are, unless they no longer fit
    command = [Path(sys.executable).parent / "uv", "pip", "compile", "pyproject.toml", "--extra", "dev",
               "--universal", "--python-version", "3.12", "--generate-hashes", "--no-emit-index-url",
               "--custom-compile-command", "make requirements", "--quiet",
               "--output-file", "requirements.txt"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True)
    fresh, committed = ((d / "requirements.txt").read_text() for d in (tmp_path, ROOT))
    assert fresh == committed, "run `make requirements`"


def test_every_requirement_is_pinned_with_hashes():
    blocks = (ROOT / "requirements.txt").read_text().split("\n    # via")[:-1]
    assert len(blocks) > 100
    for block in blocks:
        assert "==" in block and "--hash=sha256:" in block


def test_no_package_registry_is_named():
    hosts = ["pypi" + ".org", "python" + "hosted"]
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
        assert not any(host in text for host in hosts), name
