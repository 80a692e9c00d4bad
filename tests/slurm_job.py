"""5_GRPO_Maxtext/launch/slurm.sh under a real SLURM: `make test-slurm`. Needs Debian's slurm-wlm
and munge.

A throw-away SLURM of this machine alone: its own munged, slurmctld and slurmd, with configuration,
key and state in a temporary folder, on free ports. Both tasks of a job run here, on one CPU device
each. What only several machines show, the network between them and their common disk, is not tried.
"""

import contextlib
import getpass
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from short_runs import HANGS, SHORT, free_port, saved_steps
from test_monitor import assert_same_curves

import settings
from run.run_files import read_log

STEPS, SAVED = 8, 3
ARGUMENTS = [*SHORT, f"SAVE_INTERVAL_STEPS={SAVED}"]
CONFIG = Path(__file__).with_name("slurm.conf").read_text()
# one CPU device a task, and the remains of a start by hand, which must not count
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "JAX_COORDINATOR_ADDRESS": "nowhere:1",
    "JAX_PROCESS_ID": "0",
}


def wait_for(condition, what):
    end = time.monotonic() + HANGS
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a job, while SLURM's daemons run."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    given = dict(ports=(free_port(), free_port()), user=getpass.getuser(), folder=folder)
    config.write_text(CONFIG.format(**given, host=socket.gethostname()))
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True)
    files = {
        "key-file": "key",
        "socket": "socket",
        "pid-file": "pid",
        "seed-file": "seed",
        "log-file": "log",
    }
    munged = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    variables = os.environ | ENVIRONMENT | {"SLURM_CONF": str(config)}

    def is_idle():
        sinfo = ("sinfo", "--noheader", "--format=%T")
        return (
            subprocess.run(sinfo, env=variables, capture_output=True, text=True).stdout.strip()
            == "idle"
        )

    with contextlib.ExitStack() as running:
        for name, *options in (
            # force: the temporary folder is ours alone
            ("munged", "--foreground", "--force", *munged),
            ("slurmctld", "-D", "-f", config),
            ("slurmd", "-D", "-f", config),
        ):
            out = running.enter_context(open(folder / f"{name}.out", "w"))
            daemon = subprocess.Popen([name, *options], stdout=out, stderr=out)
            running.callback(daemon.wait)
            running.callback(daemon.terminate)
            if name == "munged":
                wait_for((folder / "munge.socket").exists, "munged does not start")
        wait_for(is_idle, f"SLURM does not start; see {folder}")
        yield variables
        # a job would outlive the daemons
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=variables, check=True)
        wait_for(is_idle, "a job does not end")


@pytest.mark.parametrize("end", ["a task is killed", "all are told to end"])
def test_a_job_goes_back_into_the_queue_and_both_tasks_train_as_one(
    end, cluster, finished, tmp_path
):
    """It goes on after its newest checkpoint, and its curves are those of one process, on both
    hosts.
    """

    def ask(*command):
        done = subprocess.run(command, env=cluster, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def ended():
        """Once it has: state, exit code, restarts."""
        state = dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "show", "job", job, "--oneliner")))
        over = state["JobState"] in ("COMPLETED", "FAILED")
        return (state["JobState"], state["ExitCode"], state["Restarts"]) if over else None

    def seconds():
        """The time that each step in the first host's log took; it tells a step that was computed
        again.
        """
        return {int(row["step"]): row["seconds"] for row in read_log(run / "train_log.csv")}

    (tmp_path / ".venv").symlink_to(sys.prefix)  # as in the repository
    (tmp_path / settings.HERE.name).symlink_to(settings.HERE)
    options = ("--parsable", "--nodes=1", "--ntasks-per-node=2")  # both tasks on this machine
    job = ask("sbatch", *options, f"{settings.HERE.name}/launch/slurm.sh", *ARGUMENTS)
    run, out = tmp_path / "runs" / f"slurm_{job}", tmp_path / f"slurm-{job}.out"
    wait_for(lambda: SAVED in saved_steps(run), "no checkpoint")
    before = seconds()
    # the row of a step is there before its checkpoint
    assert SAVED in before and STEPS not in before
    assert f"run      {STEPS} steps on 2 cpu device(s)" in out.read_text()
    # PID JOBID STEPID LOCALID GLOBALID; the batch script is in the list, too
    processes = [line.split() for line in ask("scontrol", "listpids", job).splitlines()[1:]]
    [second] = [int(pid) for pid, _, step, _, task in processes if (step, task) == ("0", "1")]
    if end == "a task is killed":
        os.kill(second, 9)
    else:  # as --signal=TERM does before the time limit
        ask("scancel", "--signal=TERM", job)
    assert wait_for(ended, "the job does not end") == ("COMPLETED", "0:0", "1"), out.read_text()
    [newest] = re.findall(rf"going on after step (\d+) of {STEPS}", out.read_text())
    if end == "a task is killed":
        assert int(newest) == SAVED
    else:  # it has saved after the step it was in
        assert "stopping after this step, then saving" in out.read_text()
        assert int(newest) >= max(before)
    again = seconds()
    assert all((before[step] == again[step]) == (step <= int(newest)) for step in before)
    for folder in (run, run / "host_1"):
        rows = read_log(folder / "train_log.csv")
        assert sum(name.startswith("memory_device") for name in rows[0]) == 1  # one device of two
        assert_same_curves(rows, read_log(finished / "run" / "train_log.csv"))
