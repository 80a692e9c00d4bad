r"""Runs Python text that nobody has read where it can do little harm: standard library, Linux at its best.

    training  --starts-->  warden  --forks-->  first process  --forks-->  `python -I -S`: the text

| protection   | who builds the walls              | needs                                                   |
|--------------|-----------------------------------|---------------------------------------------------------|
| `bubblewrap` | `bwrap`                           | Linux, `bwrap` on the PATH                              |
| `namespaces` | `code_warden.py`, the same way    | Linux 5.12, user namespaces allowed (or true root)      |
| `limits`     | nobody: the limits below are all  | any Unix; only if you ask for it, see PROTECTION        |

Behind the walls there is no network, no other process in sight, no /proc, and no file but Python's and the C
library's, read-only. The one folder that can be written is empty, in memory, and of DISK_BYTES. On top of it,
on Linux (x86_64, aarch64), with every protection, a seccomp filter refuses the calls that no honest answer
needs: sockets, signals, tracing, leaving the process group, new namespaces, memory outside the limits.

Which protection this machine gives, in one line:

    python 5_GRPO_Maxtext/code_sandbox.py

Warden and first process are trusted and hold nothing secret. The warden ends when all that it has started has
ended: in a pid namespace the death of the first process takes all others along, `setsid` or not.

Not protected against: a fault in the kernel; what can be learned or signalled by timing; a machine kept busy
for as long as the limits allow. Memory is limited per process, so the most is PROCESSES * MEMORY_BYTES +
DISK_BYTES.
"""

import contextlib
import functools
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import code_warden

# bubblewrap, namespaces, limits; auto: the first of the first two that works here, never the third by itself.
# An environment variable, since it says something about the machine, not about the run.
PROTECTION = os.environ.get("CODE_PROTECTION", "auto")

WALL_SECONDS = 10.0  # from the start to the end of one program, its start (0.1 s) included
CPU_SECONDS = 5  # of one process, whole seconds: the kernel counts no finer
MEMORY_BYTES = 512 << 20  # address space of one process; Python itself takes 20 MiB of it
PROCESSES = (
    8  # and threads. Under `limits` all of your user's count, so unless you are root it can start none
)
DISK_BYTES = 16 << 20  # the whole folder; under `limits` each file
OPEN_FILES = 64
OUTPUT_BYTES = 1 << 20  # a program that prints more than this is ended

_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # the one below the .venv

# Imported, not run as a file: a module is compiled only once.
_WARDEN = (
    "import sys; sys.path.append({folder!r}); from code_warden import guard; sys.exit(guard({settings!r}))"
)

# ---------------------------------------------------------------- starting, reading, ending


@contextlib.contextmanager
def started(program: str, protection: str, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=()):
    """Starts `program` in a process of its own; at the end of the block nothing of it is left.

    Args:
        program (str): runs as `__main__` in a fresh `python -I -S`: with the standard library, no packages.
        protection (str): "bubblewrap", "namespaces" or "limits", as `protection()` gives it.
        stdin, stdout: as for subprocess.Popen; stderr is closed to it.
        pass_fds (tuple of int): file descriptors it keeps, under the same numbers.

    Yields:
        subprocess.Popen: of the warden, whose exit status is the program's.

    Raises:
        RuntimeError: the program could not be started (one line); raised at the end of the block.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())
        box = stack.enter_context(tempfile.TemporaryDirectory(prefix="answer_", ignore_cleanup_errors=True))
        file.write(program.encode(errors="replace"))
        file.seek(0)
        limits = {
            **{"RLIMIT_CPU": CPU_SECONDS, "RLIMIT_AS": MEMORY_BYTES, "RLIMIT_NPROC": PROCESSES},
            **{"RLIMIT_FSIZE": DISK_BYTES, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0},
        }
        settings = {"protection": protection, "limits": limits, "disk": DISK_BYTES, "box": box}
        settings |= {"program": file.fileno(), "parent": os.getpid(), "python": _PYTHON}
        process = subprocess.Popen(
            [_PYTHON, "-I", "-S", "-c", _WARDEN.format(folder=str(Path(__file__).parent), settings=settings)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},  # no secrets of ours
            pass_fds=(file.fileno(), *pass_fds),
            cwd="/",
        )
        try:
            yield process
        finally:
            process.terminate()  # to the warden, who ends the rest
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
            os.set_blocking(process.stderr.fileno(), False)
            said = process.stderr.read() or b""  # nothing, if it was ended before it began
            process.stderr.close()
        if said and code_warden.READY not in said:
            reason = said.decode(errors="replace").strip().splitlines()[-1]
            raise RuntimeError(f"protection {protection}: {reason}")


def read(process: subprocess.Popen, deadline: float) -> tuple[bytes, bool]:
    """What `process` prints, and whether it came to its end, before OUTPUT_BYTES and `deadline`.

    The deadline (float) is one of time.monotonic(), in seconds.
    """
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and selector.select(left):
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return bytes(data), True
            data += piece
            if len(data) > OUTPUT_BYTES:
                break
    return bytes(data), False


WALLS = "no network, no other process, no files but Python's; limits on the rest"
SENTENCES = {
    "bubblewrap": f"bubblewrap: {WALLS}",
    "namespaces": f"namespaces: {WALLS}",
    "limits": "limits only: an answer can read and write what this user can, and so can forge its reward",
}


def _works(kind: str) -> str:
    """Tries the protection `kind`; returns the reason why it does not work here, "" if it does."""
    if kind != "limits" and code_warden.seccomp_filter() is None:
        machines = " or ".join(code_warden.MACHINES)
        return f"only on Linux on {machines}, this is {sys.platform} on {os.uname().machine}"
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "no bwrap on the PATH"
    try:
        with started("print('it runs')", kind, stdout=subprocess.PIPE) as process:
            printed, _ = read(process, time.monotonic() + 10)
    except RuntimeError as error:
        return str(error).partition(": ")[2]
    return "" if printed == b"it runs\n" else "a program that prints one line did not"


@functools.cache
def protection(wanted: str = PROTECTION) -> str:
    """The protection that programs get: the one wanted; for "auto" the best that works. Tried only once.

    Args:
        wanted (str): "auto", "bubblewrap", "namespaces" or "limits".

    Raises:
        ValueError: it does not work here, with the reason and the remedy; one line.
    """
    kinds = {"auto": ("bubblewrap", "namespaces")}.get(wanted, (wanted,))
    if not set(kinds) <= set(SENTENCES):
        raise ValueError(f"CODE_PROTECTION={wanted}: must be auto, {', '.join(SENTENCES)}")
    reasons = {}
    for kind in kinds:
        reasons[kind] = _works(kind)
        if not reasons[kind]:
            return kind
    remedy = "install bubblewrap, or allow user namespaces"
    if wanted == "auto":
        remedy += ", or set the environment variable CODE_PROTECTION=limits: answers then see your files"
    tried = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    raise ValueError(f"CODE_PROTECTION={wanted}: no answer is run unprotected. {tried}. Remedy: {remedy}")


if __name__ == "__main__":
    try:
        sentence = SENTENCES[protection()]
    except ValueError as error:
        sys.exit(f"error: {error}")
    if code_warden.seccomp_filter() is None:
        sentence += "; the network is open, and what leaves its process group lives on"
    print(sentence)
