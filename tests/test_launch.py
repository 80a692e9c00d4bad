"""The launch scripts against stand-ins for gcloud, xpk and SLURM; every printed command in a dry
run.

The stand-ins on PATH record their arguments. For ssh, gcloud's runs the command in a folder that
serves as the rented machine; for scp it copies.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pages
import pytest
from short_runs import HANGS, SHORT, wait_for

import grpo_llama3_1_8b_demo as demo
import settings
from machines import parse_machine
from run import checkpoints, dry_run, memory
from run.run_files import read_log

LAUNCH = settings.HERE / "launch"
DEMO = f"{settings.HERE.name}/grpo_llama3_1_8b_demo.py"
STAND_IN = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$HERE/calls"; echo >> "$HERE/calls"
[ "${0##*/}" != "$BROKEN" ] || exit ${CODE:-1}
case "$4" in
  ssh) cd "$HERE/vm"; last=${@: -1}; HOME=$PWD exec bash -c "${last#--command=}" ;;
  scp) cp "${5/#grpo:/$HERE/vm/}" "${6/#grpo:/$HERE/vm/}" ;;
esac
"""
PYTHON = """#!/bin/bash
[ "$1" != -c ] || exit 0
mkdir -p runs/grpo; echo "$HF_TOKEN" "$@" >> asked; echo a report > runs/grpo/report.html
for i in {1..1200}; do [ ! -e over ] || exit 0; sleep 0.1; done  # longer than SECONDS
"""
SECONDS = 60  # a script takes less than one, but this machine may be busy


class Desk:
    """The repository's ZIP, unpacked, and `vm`, the folder that serves as the rented machine."""

    def __init__(self, folder):
        self.here, self.folder, self.vm = folder, folder / "repository", folder / "vm"
        course, python = self.folder / settings.HERE.name, self.vm / "course/.venv-vllm/bin/python"
        for made in (
            course,
            self.folder / "runs",
            self.vm / "course/runs",
            python.parent,
            folder / "bin",
        ):
            made.mkdir(parents=True)
        for path, text in (
            (python, PYTHON),
            (folder / "token", "secret"),
            (self.vm / "course/run.log", ""),
            (self.folder / DEMO, ""),
            *(
                (folder / "bin" / name, STAND_IN)
                for name in ("gcloud", "xpk", "srun", "scontrol", "python3", "pip")
            ),
        ):
            path.write_text(text)
            path.chmod(0o755)
        shutil.copytree(pages.ROOT / "requirements", self.folder / "requirements")
        for link, target in (
            (course / "examples", settings.HERE / "examples"),
            (self.folder / ".venv", sys.prefix),
            (self.folder / "runs/smollm2", settings.HERE / "tiny_llama"),
        ):
            link.symlink_to(target)
        self.variables = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HERE": str(folder),
            "PROJECT": "p",
            "ZONE": "z",
            "TPU": "v6e-8",
            "HF_TOKEN_FILE": str(folder / "token"),
            "SLURM_JOB_ID": "7",
            "PYTHON": "",  # `make test PYTHON=...` sets it
        }

    def run(self, script, *arguments, **environment):
        """Runs a launch script; (exit code, standard error, the calls it made)."""
        calls, options = self.here / "calls", dict(capture_output=True, text=True)
        options["timeout"] = SECONDS
        calls.write_text("")
        command, variables = ["bash", LAUNCH / script, *arguments], self.variables | environment
        done = subprocess.run(command, cwd=self.folder, env=variables, **options)
        return (
            done.returncode,
            done.stderr,
            [c.split("\0") for c in calls.read_text().split("\0\n")[:-1]],
        )


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_launch_script_passes_shellcheck(script):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if not (shellcheck := shutil.which("shellcheck", path=path)):
        pytest.skip("shellcheck isn't installed; the index has none for ARM Linux")
    subprocess.run([shellcheck, script], check=True)


@pytest.mark.skipif(not shutil.which("setsid"), reason="this machine stands in for a Linux one")
def test_a_tpu_vm_runs_resumes_from_the_bucket_and_is_not_deleted_before_its_results_are_here(desk):
    assert desk.run("tpu_vm.sh", "copy")[0] == desk.run("tpu_vm.sh", "setup")[0] == 0
    with tarfile.open(desk.vm / "course.tar.gz") as archive:
        assert DEMO in archive.getnames()
    given = ["NUM_BATCHES=20", "TEMPLATE={question} now"]
    # doesn't wait for the run, which goes on until it's told that it's over
    code, error, _ = desk.run("tpu_vm.sh", "run", *given, BUCKET="gs://b/x")
    assert code == 0, error
    end, course = time.monotonic() + SECONDS, desk.vm / "course"
    while not (course / "runs" / "grpo" / "report.html").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    (course / "over").touch()
    ours = f"RUN_DIR=runs/grpo CHECKPOINT_DIR=gs://b/x MODEL={memory.LLAMA_3_1_8B} DATASET=gsm8k"
    assert (course / "asked").read_text() == f"secret {DEMO} {ours} {' '.join(given)}\n"

    code, error, calls = desk.run("tpu_vm.sh", "delete", BROKEN="gcloud")
    assert (
        code == 2 and "nothing was deleted" in error and not any("delete" in call for call in calls)
    )
    code, error, calls = desk.run("tpu_vm.sh", "delete")
    assert code == 0, error
    assert (
        desk.folder / "runs" / "grpo" / "runs" / "grpo" / "report.html"
    ).read_text() == "a report\n"
    assert ["delete" in call for call in calls] == [False, False, True]  # tar, scp, delete
    _, _, [call] = desk.run("tpu_vm.sh", "delete", "--without-results")
    assert "delete" in call


def test_several_hosts_need_a_bucket_and_maxtext(desk):
    code, error, calls = desk.run("tpu_vm.sh", "create", TPU="v5p-64")
    assert code == 2 and error.startswith("error: BUCKET is not set") and not calls
    _, _, [call] = desk.run("tpu_vm.sh", "run", TPU="v5p-64", BUCKET="gs://b")
    assert "--worker=all" in call and "DISTRIBUTED=True ROLLOUT_ENGINE=maxtext" in call[-1]


@pytest.mark.parametrize("code, restarts, again", [(1, 9, 1), (143, 0, 1), (1, 10, 0), (2, 0, 0)])
def test_slurm_puts_a_job_back_unless_refused_or_after_ten_restarts(desk, code, restarts, again):
    environment = {"BROKEN": "srun", "CODE": str(code), "SLURM_RESTART_COUNT": str(restarts)}
    found, _, [srun, *more] = desk.run("slurm.sh", "NUM_BATCHES=20", **environment)
    assert srun[-4:] == [DEMO, "DISTRIBUTED=True", "RUN_DIR=runs/slurm_7", "NUM_BATCHES=20"]
    assert more == ([["scontrol", "requeue", "7"]] if again else []) and found == (
        0 if again else code
    )
    (desk.folder / ".venv").unlink()
    code, error, calls = desk.run("slurm.sh")
    assert code == 2 and error.startswith("error: no .venv/bin/python in ") and not calls


def workload(desk, *arguments, **environment):
    environment |= {"BUCKET": "gs://b/x", "TPU": "v5p-64"}
    code, error, calls = desk.run("gke_xpk.sh", "workload", *arguments, **environment)
    return code, error, next((call for call in calls if call[0] == "xpk"), [])


def test_pathways_takes_the_images_of_our_jax_and_claims_no_restart(desk):
    jax_version = re.search(
        r"^jax==(\S+)", (pages.ROOT / "requirements" / "tpu.txt").read_text(), re.M
    )[1]
    _, _, call = workload(desk, "TRAIN_MICRO_BATCH_SIZE=4")
    servers = [
        word for word in call if word.startswith(("--server-image=", "--proxy-server-image="))
    ]
    assert len(servers) == 2 and all(word.endswith(f":jax-{jax_version}") for word in servers)
    assert not any("max-restarts" in word for word in call)
    for words, tag in (("an image of that", "0.11.1"), ("no image", jax_version)):
        code, error, call = workload(desk, PATHWAYS_TAG=f"20260901-jax_{tag}", BROKEN="gcloud")
        assert code == 2 and words in error and not call
    _, _, call = workload(desk, KIND="hosts")
    assert "--max-restarts=10" in call and not any("image=us-docker" in word for word in call)


# How XPK 1.16 starts a pod's command: in a shell of its own, which is the only one it signals.
XPK = """
trap 'kill -TERM $!' TERM
(true || exit 1; COMMAND) & pid=$!
while kill -0 $pid; do sleep 0.1; done
wait $pid
exit $?
"""


def test_a_pods_script_installs_nothing_outside_of_a_pod(desk):
    code, error, calls = desk.run("pod.sh", "gs://b", "run", KUBERNETES_SERVICE_HOST="")
    assert code == 2 and error.startswith("error: no pod") and not calls


def test_a_pod_that_is_told_to_end_saves_and_its_logs_reach_the_bucket(desk, bucket):
    """The main script itself, and Google's libraries; only pip does nothing."""
    address = f"{bucket.make('pod')}/x"
    bucket.put("pod", "x/token", b"secret\n")
    given, machine = [*SHORT, "NUM_BATCHES=200"], {"TPU": "v5p-64", "BUCKET": address}
    code, error, calls = desk.run("gke_xpk.sh", "workload", *given, **machine)
    assert code == 0, error
    assert ["gcloud", "storage", "cp", str(desk.here / "token"), f"{address}/token"] == calls[1][:5]
    assert not any("secret" in word for call in calls for word in call)
    [command] = [word.partition("=")[2] for word in calls[2] if word.startswith("--command=")]
    assert "\n" not in command  # it would end the YAML block

    pod = desk.here / "pod"
    pod.mkdir()
    (pod / settings.HERE.name).symlink_to(settings.HERE)
    for name, does in (
        ("python", f'echo "$HF_TOKEN" > token; exec {sys.executable} "$@"'),
        ("pip", ""),
    ):
        (pod / name).write_text(f"#!/bin/bash\n{does}\n")
        (pod / name).chmod(0o755)
    inside = {"PATH": f"{pod}:{os.environ['PATH']}", "KUBERNETES_SERVICE_HOST": "x"}
    variables = desk.variables | inside
    constants = "MODEL=tiny_llama DATASET=tiny_gsm8k ROLLOUT_ENGINE=maxtext"
    script = XPK.replace("COMMAND", f"{command} {constants}")
    with open(pod / "log", "w") as log:
        options = dict(cwd=pod, env=variables, stdout=log, stderr=subprocess.PIPE, text=True)
        shell = subprocess.Popen(["bash", "-c", script], start_new_session=True, **options)
    try:
        wait_for(lambda: read_log(pod / "runs" / "grpo" / "train_log.csv"), shell)
        assert "run      200 steps" in (pod / "log").read_text()  # while it runs
        shell.terminate()
        assert shell.wait(HANGS) == 130
    finally:  # as Kubernetes does with what is left of a pod
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    done = read_log(pod / "runs" / "grpo" / "train_log.csv")[-1]["step"]
    assert checkpoints.saved_steps(f"{address}/grpo")[-1] == done < 200
    assert "train_log.csv" in bucket.names(f"{address}/reports/grpo")
    assert (pod / "token").read_text() == "secret\n"


COMMAND = re.compile(
    r"^(?:# +|!)?((?:\w+=\S+ )*(?:bash|sbatch|\S*python) "
    r"5_GRPO_Maxtext/(?:launch/|grpo_llama)[^#\n]*)(?:# *(\S+))?|TPU=(\S+)",
    re.M,
)


def printed():
    """Each command with the machine it is for: named in its remark, or by the TPU exported above
    it.
    """
    found = {}
    names = ("tpu", "nvidia", "several_hosts", "rungs")
    docs = [settings.HERE / "docs" / "operate" / f"{name}.md" for name in names]
    for path in (*docs, *sorted(LAUNCH.glob("*.sh"))):
        tpu = ""
        for command, remark, exported in COMMAND.findall(path.read_text()):
            tpu = exported or tpu
            if command:
                machine = remark if parse_machine(remark) else tpu if "launch/" in command else ""
                found[command.strip(), machine] = path.name
    return [pytest.param(*key, id=f"{name}-{i}") for i, (key, name) in enumerate(found.items())]


def constants_of(desk, words, machine):
    """What a command, maybe a launch script's, gives the main script; None: it starts no run."""
    start = next(i for i, word in enumerate(words) if word.startswith(settings.HERE.name))
    if words[start] == DEMO:
        return words[start + 1 :]
    variables = dict(word.split("=", 1) for word in words[: start - 1])
    # its own
    arguments = [word for word in words[start + 1 :] if words[0] != "sbatch" or word[0] != "-"]
    if "setup" in arguments:
        desk.run("tpu_vm.sh", "copy")
    variables |= {"TPU": machine, "BUCKET": "gs://b/x"}
    code, error, calls = desk.run(Path(words[start]).name, *arguments, **variables)
    assert code == 0, error
    words = [word for call in calls for text in call for word in shlex.split(text)]
    return words[words.index(DEMO) + 1 :] if DEMO in words else None


@pytest.mark.parametrize("command, machine", printed())
def test_every_printed_command_is_accepted_for_its_machine(desk, monkeypatch, command, machine):
    """By a dry run for it; the bucket of the example doesn't exist."""
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(checkpoints, "check_bucket", lambda address: None)
    arguments = constants_of(desk, shlex.split(command), machine)
    if arguments is not None:
        constants = itertools.takewhile(lambda word: re.match(r"[A-Z][A-Z0-9_]*=", word), arguments)
        # a laptop's job has no hosts
        elsewhere = f"MACHINE={machine}" if machine else "DISTRIBUTED=False"
        demo.main([*constants, elsewhere, "DRY_RUN=True"])


def test_hours_and_dollars_on_the_page_are_the_dry_runs():
    c, parameters = settings.read(demo.Constants, [f"MODEL={memory.LLAMA_3_1_8B}"]), 8_030_261_248
    rate, found = 8 * 1400, dry_run.hours(c, parameters, "v6e", 8)  # tokens per second
    # 8.03e9
    np.testing.assert_allclose(found["sampling"][0], 116 * 512 * 200 / rate / 3600, rtol=2e-4)
    # gathers: 32 passes, 4 times, 7 of 8 parts
    arithmetic = 512 * 1024 * 8 * parameters / (8 * 918e12)
    slow = 116 * (arithmetic / 0.225 + 4 * 32 * parameters * 2 * 7 / 8 / 448e9 / 0.5)
    np.testing.assert_allclose(found["training"][1], slow / 3600, rtol=2e-4)
    # on its 32 chips, a pass needs 32 answers
    far = dataclasses.replace(c, TRAIN_MICRO_BATCH_SIZE=4)
    for name, settled, kind, chips, price in (
        ("v6e-8", c, "v6e", 8, 21.6),
        ("v5p-8", c, "v5p", 4, 16.8),
        ("v5p-64", far, "v5p", 32, 134.4),
    ):
        parts = [*dry_run.hours(settled, parameters, kind, chips).values()]
        cells = [f"{low:.1f} – {high:.1f}" for low, high in (*parts, sum(parts))]
        cells.append("{:.0f} – {:.0f}".format(*price * sum(parts)))
        for language in pages.LANGUAGES:
            assert f"| {name} | {' | '.join(cells)} |" in pages.text(settings.HERE, language)
