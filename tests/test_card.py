"""`make card`: what it says where packages are missing, and all of it on the CPU."""

import csv
import getpass
import platform
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import short_runs

import settings
from run.run_files import read_log

TOOL = [settings.HERE / "tool.py", "card"]
with open(settings.HERE / "tools" / "card_packages.csv", newline="") as table:
    PACKAGES = list(csv.DictReader(table))


def test_the_packages_are_those_of_the_course():
    pinned = dict(
        re.findall(
            r"^([\w.-]+)(?:\[[^]]*\])?==([^ \\;]+)",
            (pages.ROOT / "requirements.txt").read_text(),
            re.M,
        )
    )
    for row in PACKAGES:
        assert pinned[row["package"]] == row["version"], row


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "error: jax 0.11 or newer isn't installed; run `make card`"),
        ("0.10.2", "error: jax 0.11 or newer isn't installed; run `make card`"),
        ("0.11.2", f"error: {len(PACKAGES)} packages are missing, "),
    ],
)
def test_where_packages_are_missing_it_names_them_in_one_line(tmp_path, version, said):
    """Python without its site-packages, and with a jax that has nothing but a version."""
    if version:
        folder = tmp_path / f"jax-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-S", *TOOL],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    [line] = done.stderr.splitlines()
    assert line.startswith(said) and done.returncode == 2 and not (tmp_path / "card.txt").exists()
    if version == "0.11.2":
        mib = sum(float(row["mib"]) for row in PACKAGES)
        assert f" {mib:.1f} MiB of wheels" in line and " maxtext==0.2.5" in line


@pytest.mark.slow
def test_all_of_it_on_the_cpu(tmp_path, monkeypatch):
    """Its figures are those of the main script, run here; nothing tells whose machine it was."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    short = ["NUM_BATCHES=4", "BATCH_SIZE=4", "NUM_GENERATIONS=4", "NUM_TEST_QUESTIONS=4"]
    done = subprocess.run(
        [sys.executable, *TOOL, *short], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "card.txt").read_text()
    assert done.stdout == f"{report}please send us card.txt\n"
    short_runs.run_here(tmp_path, *short, "WARMUP_FRACTION=0.0", "EVAL_EVERY=0")
    first, *_, last = read_log(tmp_path / "run" / "train_log.csv")
    for name in ("loss", "reward", "grad_norm"):
        [value] = re.findall(rf"^{name} of step 1 +(\S+), on the CPU \S+: the same$", report, re.M)
        # other programs than those of this process, and six decimals
        assert float(value) == pytest.approx(first[name], abs=2e-6)
    [resumed] = re.findall(r"^its last reward +(\S+)$", report, re.M)
    assert float(resumed) == pytest.approx(last["reward"], abs=1e-4)
    assert re.search(
        r"^killed after checkpoint +[24]; rows afterward: \[1, 2, 3, 4\]$", report, re.M
    )
    assert "decode" in report and report.splitlines()[-1].split() == [
        "not",
        "as",
        "it",
        "should",
        "be",
        "nothing",
    ]
    for secret in (platform.node(), getpass.getuser() + "@", str(Path.home()), str(pages.ROOT)):
        assert secret not in report
