r"""Runs an untrusted Python program in isolation. Standard library only; isolation needs Linux.

    training  --starts-->  warden  --forks-->  init process  --forks-->  `python -I -S`: the program

| protection   | isolated by                       | needs                                                   |
|--------------|-----------------------------------|---------------------------------------------------------|
| `bubblewrap` | `bwrap`                           | Linux, `bwrap` on the PATH                              |
| `namespaces` | `warden.py`, in the same way      | Linux 5.12, user namespaces allowed (or real root)      |
| `limits`     | nothing: only the limits below    | any Unix; only on request, see PROTECTION               |

An isolated program has no network, sees no other process and no /proc, and reads only what lies in Python's
`sys.base_prefix` (of Debian's own Python: all of /usr), /lib and /usr/lib. Its one writable folder starts
empty, is kept in memory and holds DISK_BYTES. On Linux (x86_64, aarch64), under every protection, a seccomp
filter also refuses system calls that no honest program needs: sockets but pairs, signals, tracing, leaving
the process group, new namespaces, memory outside the limits.

`python 5_GRPO_Maxtext/tool.py code_reward` prints the protection that this machine gives.

The warden and the init process are trusted and hold no secrets. The warden exits once everything it started
has exited. When the init process of a pid namespace exits, the kernel kills all others in it, even after
`setsid`.

Not protected against: kernel bugs, timing side channels, and load on the machine within the limits. Memory is
limited per process, so the maximum is PROCESSES * MEMORY_BYTES + DISK_BYTES; 64 KiB for each pipe and about
200 KiB for each pair of sockets add to it.
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

from sandbox import warden

# bubblewrap, namespaces or limits; auto: the first of bubblewrap and namespaces that works, never limits.
# An environment variable, because it describes the machine and not the run.
PROTECTION = os.environ.get("CODE_PROTECTION", "auto")

WALL_SECONDS = 10.0  # wall-clock time per program, including its start (0.1 s)
CPU_SECONDS = 5  # processor time per process; whole seconds, the kernel's resolution
MEMORY_BYTES = 512 << 20  # address space per process; Python itself takes 20 MiB
PROCESSES = 8  # and threads; `limits` counts all of the user's, so there only root's program can start any
DISK_BYTES = 16 << 20  # all files together; under `limits` each file
OPEN_FILES = 64
OUTPUT_BYTES = 1 << 20  # a program that prints more is stopped

_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # the one behind the .venv

# Loading the warden as a module uses its compiled file; running the file would compile it for every program.
_WARDEN = """
import sys
from importlib.machinery import SourceFileLoader
warden = type(sys)("warden")
SourceFileLoader("warden", {path!r}).exec_module(warden)
sys.exit(warden.guard({settings!r}))
"""

# ---------------------------------------------------------------- starting, reading, ending


@contextlib.contextmanager
def started(program: str, protection: str, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=()):
    """Starts `program` in its own process; nothing of it is left when the block ends.

    Args:
        program (str): runs as `__main__` in a fresh `python -I -S`: standard library, no packages.
        protection (str): "bubblewrap", "namespaces" or "limits", as returned by `protection()`.
        stdin, stdout: as for subprocess.Popen; stderr is discarded.
        pass_fds (tuple of int): file descriptors that it inherits, under the same numbers.

    Yields:
        subprocess.Popen: the warden, whose exit status is the program's.

    Raises:
        RuntimeError: the program could not be started (one line); raised at the end of the block.
    """
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="answer_")
        stack.callback(remove, folder)
        file = stack.enter_context(read_only(program.encode(errors="replace")))
        limits = {
            **{"RLIMIT_CPU": CPU_SECONDS, "RLIMIT_AS": MEMORY_BYTES, "RLIMIT_NPROC": PROCESSES},
            **{"RLIMIT_FSIZE": DISK_BYTES, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0},
        }
        settings = {"protection": protection, "limits": limits, "disk": DISK_BYTES, "folder": folder}
        settings |= {"program": file.fileno(), "parent": os.getpid(), "python": _PYTHON}
        process = subprocess.Popen(
            [_PYTHON, "-I", "-S", "-c", _WARDEN.format(path=warden.__file__, settings=settings)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},  # none of our secrets
            pass_fds=(file.fileno(), *pass_fds),
            cwd="/",
        )
        try:
            yield process
        finally:
            process.terminate()  # the warden ends the rest
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
            os.set_blocking(process.stderr.fileno(), False)
            said = process.stderr.read() or b""  # empty if it was stopped before it began
            process.stderr.close()
        if said and warden.READY not in said:
            reason = said.decode(errors="replace").strip().splitlines()[-1]
            raise RuntimeError(f"protection {protection}: {reason}")


@contextlib.contextmanager
def read_only(data: bytes):
    """Yields a file with `data` (bytes) that can be read and not written, and has no name."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        again = open(file.name, "rb")  # noqa: SIM115  (closed below, when the name is gone)
    with again:
        yield again


def remove(folder: str) -> None:
    """Removes a folder (str) with all that an answer left in it.

    `rm` takes any depth, shutil.rmtree of Python 3.12 about a thousand levels. Under `limits` the answer may
    be this user; then a folder without permissions is in the way of rm.
    """
    try:
        os.rmdir(folder)
    except OSError:
        remedies = [["rm", "-rf", "--", folder]]
        if os.path.isdir(folder) and not os.path.islink(folder):  # chmod would follow a link
            remedies.insert(0, ["chmod", "-R", "u+rwx", "--", folder])
        for remedy in remedies:
            subprocess.run(remedy, check=False, stderr=subprocess.DEVNULL)


def read(process: subprocess.Popen, deadline: float) -> tuple[bytes, bool]:
    """The output of `process`, and whether it ended within OUTPUT_BYTES and before `deadline`.

    Args:
        process (subprocess.Popen): with stdout=subprocess.PIPE.
        deadline (float): time.monotonic() at which reading stops, in seconds.
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


# ---------------------------------------------------------------- which protection works here

_ISOLATED = "no network, no other process, no files but Python's; limits on the rest"
SENTENCES = {
    "bubblewrap": f"bubblewrap: {_ISOLATED}",
    "namespaces": f"namespaces: {_ISOLATED}",
    "limits": "limits only: an answer can read and write what this user can, and so can forge its reward",
}


def describe(kind: str) -> str:
    """What the protection `kind` (str) gives on this machine; one line."""
    if warden.seccomp_filter() is None:
        return f"{SENTENCES[kind]}; the network is open, and a process that leaves its group lives on"
    return SENTENCES[kind]


def _works(kind: str) -> str:
    """Tries the protection `kind`; returns why it does not work here, or "" if it does."""
    if kind != "limits" and warden.seccomp_filter() is None:
        machines = " or ".join(warden.MACHINES)
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
    """The protection that programs get: `wanted`, or for "auto" the best that works. Tried only once.

    Args:
        wanted (str): "auto", "bubblewrap", "namespaces" or "limits".

    Raises:
        ValueError: it does not work here; one line with the reason and the remedy.
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
    raise ValueError(f"CODE_PROTECTION={wanted}: no answer runs unprotected. {tried}. Remedy: {remedy}")
