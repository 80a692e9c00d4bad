"""The launch scripts against stand-ins for gcloud, xpk and SLURM; every printed command in a dry run.

The stand-ins on PATH record their arguments. gcloud's runs what it is given for ssh in a folder that serves
as the machine, and copies files into it and out of it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax
import pages
import pytest

import grpo_llama3_1_8b_demo as demo
import settings
from model import devices
from run import cost, memory

LAUNCH = settings.HERE / "launch"
DEMO = f"{settings.HERE.name}/grpo_llama3_1_8b_demo.py"
RECORDER = f"""#!{sys.executable}
import json, os, pathlib, shutil, subprocess, sys
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
here = pathlib.Path(os.environ["STAND_IN"])
with open(here / "calls", "a") as calls:
    print(json.dumps([name, *arguments]), file=calls)
if name in os.environ.get("BROKEN", "").split(","):
    sys.exit(1)
vm = here / "vm"
if "ssh" in arguments:
    command = next(a for a in arguments if a.startswith("--command=")).partition("=")[2]
    sys.exit(subprocess.run(["bash", "-c", command], cwd=vm, env=os.environ | {{"HOME": str(vm)}}).returncode)
if "scp" in arguments:
    source, target = arguments[arguments.index("scp") + 1:][:2]
    shutil.copy(vm / source.partition(":")[2] if source.startswith("grpo:") else source,
                vm / target.partition(":")[2] if target.startswith("grpo:") else target)
"""
PYTHON = """#!/bin/bash
mkdir -p runs/grpo; echo "$HF_TOKEN" "$@" >> asked; echo a report > runs/grpo/report.html; sleep 30
"""


class Desk:
    """A repository's folder on one's own machine, and what the stand-ins were asked."""

    def __init__(self, folder):
        self.folder = folder / "repository"
        self.variables = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "STAND_IN": str(folder), "PROJECT": "p",
            "ZONE": "z", "TPU": "v6e-8", "HF_TOKEN": "secret", "HF_TOKEN_FILE": str(folder / "token"),
        }  # fmt: skip
        (folder / "token").write_text("secret")
        (folder / "bin").mkdir()
        for name in ("gcloud", "xpk", "srun", "scontrol"):
            (folder / "bin" / name).write_text(RECORDER)
            (folder / "bin" / name).chmod(0o755)
        self.vm, self.record = folder / "vm", folder / "calls"
        (self.vm / "course" / ".venv-vllm" / "bin").mkdir(parents=True)
        python = self.vm / "course" / ".venv-vllm" / "bin" / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        (self.folder / "requirements").mkdir(parents=True)
        for name in ("requirements/tpu.txt", "requirements/build.txt"):
            shutil.copy(pages.ROOT / name, self.folder / name)
        (self.folder / settings.HERE.name).mkdir()
        (self.folder / DEMO).touch()
        for command in ("init --quiet", "add .", "-c user.name=x -c user.email=x commit --quiet -m x"):
            subprocess.run(["git", *command.split()], cwd=self.folder, check=True)

    def run(self, script, *arguments, **environment):
        """Runs a launch script; (exit code, standard error, the calls it made)."""
        self.record.unlink(missing_ok=True)
        variables = {**os.environ, **self.variables, **environment}
        done = subprocess.run(["bash", LAUNCH / script, *arguments], cwd=self.folder, env=variables,
                              capture_output=True, text=True, timeout=20)  # fmt: skip
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return done.returncode, done.stderr, [json.loads(line) for line in lines]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_launch_script_passes_shellcheck(script):
    subprocess.run([shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"), script], check=True)


def test_a_tpu_vm_runs_resumes_from_the_bucket_and_is_not_deleted_before_its_results_are_here(desk):
    assert desk.run("tpu_vm.sh", "copy")[0] == 0
    with tarfile.open(desk.vm / "course.tar.gz") as archive:
        assert DEMO in archive.getnames()
    start = time.monotonic()
    code, error, _ = desk.run("tpu_vm.sh", "run", "NUM_BATCHES=20", "TEMPLATE={question} now", BUCKET="gs://b/x")
    assert code == 0 and time.monotonic() - start < 15, error  # the run itself takes 30 s
    asked = desk.vm / "course" / "asked"
    while not (desk.vm / "course" / "runs" / "grpo" / "report.html").exists():
        assert time.monotonic() - start < 15
        time.sleep(0.05)
    expected = ["secret", DEMO, "RUN_DIR=runs/grpo", "CHECKPOINT_DIR=gs://b/x", f"MODEL={memory.LLAMA_3_1_8B}"]
    assert asked.read_text().split()[: len(expected)] == expected
    assert "NUM_BATCHES=20 TEMPLATE={question} now\n" in asked.read_text()

    code, error, calls = desk.run("tpu_vm.sh", "delete", BROKEN="gcloud")
    assert code == 2 and "nothing was deleted" in error and not any("delete" in call for call in calls)
    code, error, calls = desk.run("tpu_vm.sh", "delete")
    assert code == 0, error
    assert (desk.folder / "runs" / "grpo" / "runs" / "grpo" / "report.html").read_text() == "a report\n"
    assert ["delete" in call for call in calls] == [False, False, True]  # tar, scp, delete
    _, _, [call] = desk.run("tpu_vm.sh", "delete", "--without-results")
    assert "delete" in call


def test_several_hosts_need_a_bucket_and_maxtext(desk):
    code, error, calls = desk.run("tpu_vm.sh", "create", TPU="v5p-64")
    assert code == 2 and error.startswith("error: BUCKET is not set") and not calls
    _, _, [call] = desk.run("tpu_vm.sh", "run", TPU="v5p-64", BUCKET="gs://b")
    assert "--worker=all" in call and "DISTRIBUTED=True ROLLOUT_ENGINE=maxtext" in call[-1]


def workload(desk, *arguments, **environment):
    code, error, calls = desk.run("gke_xpk.sh", "workload", *arguments, BUCKET="gs://b/x", TPU="v5p-64", **environment)
    [xpk] = [call for call in calls if call[0] == "xpk"] or [[]]
    return code, error, xpk


def test_pathways_takes_the_images_of_our_jax_and_claims_no_restart(desk):
    jax_version = re.search(r"^jax==(\S+)", (pages.ROOT / "requirements" / "tpu.txt").read_text(), re.M)[1]
    _, _, call = workload(desk, "TRAIN_MICRO_BATCH_SIZE=4")
    servers = [word for word in call if word.startswith(("--server-image=", "--proxy-server-image="))]
    assert len(servers) == 2 and all(word.endswith(f":jax-{jax_version}") for word in servers)
    assert not any("max-restarts" in word for word in call)
    for words, tag in (("an image of that", "20260901-jax_0.11.1"), ("no image", f"20261120-jax_{jax_version}")):
        code, error, call = workload(desk, PATHWAYS_TAG=tag, BROKEN="gcloud")
        assert code == 2 and words in error and not call
    _, _, call = workload(desk, KIND="hosts")
    assert "--max-restarts=10" in call and not any("image=us-docker" in word for word in call)


@pytest.mark.parametrize("ends_with", [0, 2, 137])
def test_on_gke_the_report_reaches_the_bucket_however_the_run_ends(desk, tmp_path, ends_with):
    """What XPK would put into the pod's YAML, run by bash with a Python that records."""
    _, _, call = workload(desk, "NUM_BATCHES=20")
    command = next(word for word in call if word.startswith("--command=")).partition("=")[2]
    assert "\n" not in command  # it would end the YAML block
    for name, code in (("pip", 0), ("python", ends_with)):
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/pod\n[ "$1" != {DEMO} ] || exit {code}\n')
        file.chmod(0o755)
    done = subprocess.run(["bash", "-c", command], env=os.environ | desk.variables)
    assert done.returncode == ends_with
    *_, run, put = (tmp_path / "pod").read_text().splitlines()
    assert run.startswith(f"python {DEMO} RUN_DIR=runs/grpo CHECKPOINT_DIR=gs://b/x ") and "NUM_BATCHES=20" in run
    assert "put('runs/grpo/', 'b/x/reports/grpo/', recursive=True)" in put


def test_a_cluster_is_not_deleted_before_its_reports_are_here(desk):
    for arguments, broken, deletes in (((), "gcloud", 0), ((), "", 1), (("--without-results",), "gcloud", 1)):
        _, _, calls = desk.run("gke_xpk.sh", "delete", *arguments, BUCKET="gs://b", BROKEN=broken)
        assert sum(call[0] == "xpk" for call in calls) == deletes


# --- every printed command

PRINTED = [settings.HERE / "docs" / f"{name}.md" for name in ("tpu_and_gpu", "several_hosts", "rungs")]
CARDS = {"T4": 14.7, "H100": 79.1}  # GiB that a program may use
COMMANDS = r"^(?:#     |!|)((?:[A-Z_]+=\S+ )*(?:bash|sbatch|python|\S+/python) 5_GRPO_Maxtext/(?:launch|grpo).*)"
