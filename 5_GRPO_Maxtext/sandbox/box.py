"""Runs an untrusted Python program in isolation, on Linux. Standard library only.

    training  --starts-->  warden  --forks-->  init process  --forks-->  `python -I -S`: the program

`namespaces` isolates it (Linux 5.12, user namespaces or real root), `limits` only limits it;
`docs/learn/code_answers.md` says what each one protects against. The warden and the init process
hold no secrets. The warden exits once everything it started has exited: when the init process of a
pid namespace ends, the kernel kills all others in it.
"""

import contextlib
import functools
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sandbox import warden

# An environment variable, because it describes the machine and not the run.
PROTECTION = os.environ.get("CODE_PROTECTION", "namespaces")

WALL_SECONDS = 10.0  # wall-clock time per program, including its start (0.1 s)
CPU_SECONDS = 5  # processor time per process; whole seconds, the kernel's resolution
MEMORY_BYTES = 512 << 20  # address space per process; Python itself takes 20 MiB
# and threads; `limits` counts all of the user's, so there only root's program can start any
PROCESSES = 8
DISK_BYTES = 16 << 20  # all files together; under `limits` each file
OPEN_FILES = 64
OUTPUT_BYTES = 1 << 20  # a program that prints more fails

# the one behind the .venv
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
SENTENCES = {
    "namespaces": (
        "namespaces: no network, no other process, no files but Python's; limits on the rest"
    ),
    "limits": (
        "limits only: an answer can read and write what this user can, and so can forge its reward"
    ),
}


def processors(quota_file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """How many processors this process may use, by its affinity and its container's quota (cgroup
    v2).
    """
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1  # where no program runs
    with contextlib.suppress(OSError, ValueError):  # no such file; no quota, "max"
        quota, period = map(int, Path(quota_file).read_text().split())
        count = min(count, max(1, quota // period))
    return count


@contextlib.contextmanager
def started(program: str, protection: str, stdin=subprocess.DEVNULL, pass_fds=()):
    """Starts `program` in its own process, and cleans up everything when the block ends.

    It runs as `__main__` in a fresh `python -I -S` (standard library, no packages), under a
    protection from `protection()`; its stderr is discarded. Yields the warden's Popen, whose exit
    status is the program's, and the file the program prints to. If it couldn't be started, the end
    of the block raises RuntimeError.
    """
    limits = {
        "CPU": CPU_SECONDS,
        "AS": MEMORY_BYTES,
        "NPROC": PROCESSES,
        "NOFILE": OPEN_FILES,
        "CORE": 0,
    }
    folder = tempfile.mkdtemp(prefix="answer_")
    with contextlib.ExitStack() as stack:
        stack.callback(remove, folder)
        file = stack.enter_context(read_only(program.encode(errors="replace")))
        settings = dict(
            protection=protection,
            limits=limits | {"FSIZE": DISK_BYTES},
            disk=DISK_BYTES,
            folder=folder,
            program=file.fileno(),
            parent=os.getpid(),
            python=_PYTHON,
        )
        stdout = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [_PYTHON, "-I", "-S", warden.__file__, repr(settings)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            pass_fds=(file.fileno(), *pass_fds),
            cwd="/",
            # none of our secrets
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
        )
        try:
            yield process, stdout
        finally:
            process.terminate()  # the warden ends the rest
            try:
                # empty if it was stopped before it started
                _, message = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                _, message = process.communicate()
        if message and warden.READY not in message:
            reason = message.decode(errors="replace").strip().splitlines()[-1]
            raise RuntimeError(f"protection {protection}: {reason}")


def output(process: subprocess.Popen, stdout, end: float = math.inf) -> tuple[str, bool]:
    """What a program printed; whether it kept to OUTPUT_BYTES, WALL_SECONDS and `end`."""
    # Its pipe closes when the last of its processes has ended; `wait` would only poll every 50 ms.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=max(0.0, min(WALL_SECONDS, end - time.monotonic())))
    # A file, so we needn't drain a pipe; DISK_BYTES limits it. pread, because the program moves our
    # position.
    data = os.pread(stdout.fileno(), OUTPUT_BYTES + 1, 0)
    ended = process.returncode is not None and len(data) <= OUTPUT_BYTES
    return data[:OUTPUT_BYTES].decode(errors="replace"), ended


@contextlib.contextmanager
def read_only(data: bytes):
    """Yields an unnamed, read-only file with `data` (bytes)."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        again = open(file.name, "rb")  # noqa: SIM115  (closed below, when the name is gone)
    with again:
        yield again


def remove(folder: str) -> None:
    """Removes a folder with everything an answer left in it under `limits`, where it runs as this
    user.

    `rm` handles any depth, shutil.rmtree in Python 3.12 only about a thousand levels.
    """
    with contextlib.suppress(OSError):  # it isn't empty
        return os.rmdir(folder)
    if os.path.isdir(folder) and not os.path.islink(folder):  # chmod would follow a link
        subprocess.run(
            ["chmod", "-R", "u+rwx", "--", folder], check=False, stderr=subprocess.DEVNULL
        )
    subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def fault(kind: str) -> str:
    """Why the protection `kind` doesn't work here, or "" if it does; tries it."""
    if sys.platform != "linux" or os.uname().machine not in warden.MACHINES:
        return (
            f"only on Linux on {' or '.join(warden.MACHINES)}, "
            f"this is {sys.platform} {os.uname().machine}"
        )
    try:
        with started("print('it runs')", kind) as running:
            printed, _ = output(*running)
    except RuntimeError as error:
        return str(error).partition(": ")[2]
    return "" if printed == "it runs\n" else "a program that prints one line did not"


@functools.cache
def protection(kind: str = PROTECTION) -> str:
    """`kind`, if it's a protection that works here; else ValueError."""
    if kind not in SENTENCES:
        raise ValueError(f"CODE_PROTECTION={kind}: must be {' or '.join(SENTENCES)}")
    if why := fault(kind):
        remedy = (
            "allow user namespaces, or set the environment variable CODE_PROTECTION=limits: "
            "answers then"
        )
        remedy = "" if kind == "limits" else f" Remedy: {remedy} see your files"
        raise ValueError(f"CODE_PROTECTION={kind}: no answer runs unprotected. {why}.{remedy}")
    return kind
