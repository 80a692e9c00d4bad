"""What is installed is what pyproject.toml asks for, and nothing committed names a package
registry.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_WHEEL = {"jieba", "promise", "rouge-score", "sqlitedict", "word2number"}  # pure Python
# what each is compiled from
SOURCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def packages(name):
    """By package: its line (version and marker), and its hashes."""
    _, *blocks = re.split(r"^(?=\w)", (ROOT / name).read_text(), flags=re.M)
    return {b.split("==")[0]: (b.splitlines()[0], re.findall(r"sha256:\w{64}", b)) for b in blocks}


def test_the_cuda_set_is_the_cpu_set_and_nothing_but_the_cuda_of_this_jax():
    cpu, cuda = packages("requirements.txt"), packages("requirements/cuda.txt")
    assert {name: cuda.get(name) for name in cpu} == cpu
    assert all(name.startswith(("jax-cuda13-", "nvidia-")) for name in cuda.keys() - cpu.keys())


@pytest.mark.index
@pytest.mark.parametrize("file", SOURCES)
def test_a_file_has_what_pyproject_asks_for_and_nothing_else_is_built(file, tmp_path):
    """Resolved for Linux with the file's versions, which takes a second where compiling it takes
    ten.

    Nothing is built but the packages that have no wheel: a wheel is what its hash says; what is
    built also depends on what builds it. Lines with a marker may be for another system.
    """
    never = tmp_path / "never.txt"
    never.write_text("".join(f"{name}; python_version < '3'\n" for name in WITHOUT_WHEEL))
    command = [
        *(Path(sys.executable).with_name("uv"), "pip", "install", "--dry-run", "--no-build"),
        *("--overrides", never, "--constraint", file, "--target", tmp_path, *SOURCES[file].split()),
        *("--python-platform", "x86_64-manylinux_2_31", "--python-version", "3.12"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = set(re.findall(r"^ \+ (\S+)$", done.stderr, re.M))
    lines = {line.rstrip(" \\"): hashes for line, hashes in packages(file).values()}
    assert found <= {line.split(" ;")[0] for line in lines}, "run `make requirements`"
    always = {line for line in lines if ";" not in line}
    assert {line for line in always if line.split("==")[0] not in WITHOUT_WHEEL} <= found
    assert all(lines.values()), "a package without a hash"


@pytest.mark.index
# xprof's wheel for ARM Linux needs glibc 2.35: Ubuntu 22.04, Debian 12
@pytest.mark.parametrize("machine", ["aarch64-manylinux_2_35", "aarch64-apple-darwin"])
def test_an_arm_machine_has_a_wheel_of_every_package(machine, tmp_path):
    """But of those that are built everywhere."""
    command = [Path(sys.executable).with_name("uv"), "pip", "install", "--dry-run", "--no-deps"]
    command += ["--target", tmp_path, "--python-platform", machine, "--python-version", "3.12"]
    command += ["--require-hashes", "--requirement", "requirements.txt", "--only-binary", ":all:"]
    command += [word for name in WITHOUT_WHEEL for word in ("--no-binary", name)]
    command += ["--no-build-isolation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert "Would install" in done.stderr


def test_what_is_built_is_built_by_a_setuptools_with_a_hash():
    """Every command that installs such a package has installed the builder before, and does not
    isolate.
    """
    [(line, hashes), (uv, _)] = packages("requirements/build.txt").values()
    assert line.startswith("setuptools==") and len(hashes) == 2 and uv.startswith("uv==")
    files = *pages.ENGLISH, *ROOT.glob("5_GRPO_Maxtext/launch/*.sh")
    [recipe] = re.findall(r"^define INSTALL\n(.*?)^endef", pages.MAKE, re.M | re.S)
    expanded = re.sub(
        r"^\t\$\(call INSTALL,(.+?)(,.*)?\)$",
        lambda call: recipe.replace("$(1)", call[1]).replace("\\\n", ""),
        pages.MAKE.replace("$(REQUIREMENTS)", "requirements.txt"),
        flags=re.M,
    )
    commands = "\n".join([expanded, *(path.read_text() for path in files)])
    found = set()
    installs = r"^.*install[^\n]*(?:-r|--requirement) (requirements[\w/]*\.txt)"
    for match in re.finditer(installs, commands, re.M):
        if WITHOUT_WHEEL & packages(match[1]).keys():
            found.add(match[1])
            assert "--no-build-isolation" in match[0], match[0]
            above = commands[: match.start()].splitlines()
            before = [line for line in above if not line.startswith("@echo")][-1]
            assert "requirements/build.txt" in before, before
    assert found == {name for name in SOURCES if WITHOUT_WHEEL & packages(name).keys()}


def test_no_package_registry_is_named():
    hosts = ["pypi" + ".org", "python" + "hosted"]
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in files.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
        assert not any(host in text for host in hosts), name
