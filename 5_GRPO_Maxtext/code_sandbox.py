r"""Runs Python text that nobody has read where it can do little harm: standard library, Linux at its best.

    training  --starts-->  warden  --forks-->  first process  --forks-->  `python -I -S`: the text

| protection   | who builds the walls              | needs                                                   |
|--------------|-----------------------------------|---------------------------------------------------------|
| `bubblewrap` | `bwrap`                           | Linux, `bwrap` on the PATH                              |
| `namespaces` | this file, by the same means      | Linux 5.12, user namespaces allowed (or true root)      |
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
import ctypes
import functools
import json
import os
import platform
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# bubblewrap, namespaces, limits; auto: the first of the first two that works here, never the third by itself.
# An environment variable, since it says something about the machine, not about the run.
PROTECTION = os.environ.get("CODE_PROTECTION", "auto")

WALL_SECONDS = 10.0  # from the start to the end of one program, its start (0.05 s) included
CPU_SECONDS = 5  # of one process, whole seconds: the kernel counts no finer
MEMORY_BYTES = 512 << 20  # address space of one process; Python itself takes 20 MiB of it
PROCESSES = (
    8  # and threads; as a user who is not root, under `limits`, all your processes count: none can be made
)
DISK_BYTES = 16 << 20  # the whole folder; under `limits` each file
OPEN_FILES = 64
OUTPUT_BYTES = 1 << 20  # a program that prints more than this is ended

# ---------------------------------------------------------------- the filter of system calls

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # (column below, AUDIT_ARCH_*)

# name, number on x86_64, number on aarch64 (the kernel's headers). In this order: the network (socketpair
# stays, asyncio needs it); looking into, signalling and slowing down other processes; leaving the process
# group, which is what is killed; namespaces and mounts (in one's own, memory can be mounted without end);
# memory that RLIMIT_AS does not see; large parts of the kernel that nobody needs here.
_REFUSED = """
socket 41 198
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440
pidfd_open 434 434, pidfd_getfd 438 438, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, setpriority 141 140, ioprio_set 251 30
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274
setsid 112 157, setpgid 109 154
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsmount 432 432, mount_setattr 442 442
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180
add_key 248 217, request_key 249 218, keyctl 250 219
io_uring_setup 425 425, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282
"""
_CLONE, _PRLIMIT, _CLONE3 = (56, 220), (302, 261), 435
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* bit that clone knows
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def seccomp_filter() -> bytes | None:
    """The filter as classic BPF, 8 bytes an instruction; None where the numbers are not known."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    column, machine = _MACHINES[platform.machine()]
    calls = _REFUSED.replace(",", "\n").strip().splitlines()
    numbers = [int(call.split()[1 + column]) for call in calls]

    # An instruction: opcode, instructions to skip if true, if false, constant.
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, _KILL)]  # 32-bit numbers are others
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (answer, 0, 0, _KILL)]  # and so are x32's
    # clone3's flags lie behind a pointer, unseen; without it the C library falls back to clone.
    program += [(equal, 0, 1, _CLONE3), (answer, 0, 0, _ENOSYS)]
    for number in numbers:
        program += [(equal, 0, 1, number), (answer, 0, 0, _EPERM)]
    # clone(flags, ...): processes and threads, but no namespaces. 16: the first argument's low half.
    program += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES)]
    program += [(answer, 0, 0, _EPERM), (answer, 0, 0, _ALLOW)]
    # prlimit(pid, ...): only for oneself, pid 0.
    program += [(equal, 0, 3, _PRLIMIT[column]), (load, 0, 0, 16), (equal, 1, 0, 0), (answer, 0, 0, _EPERM)]
    program += [(answer, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


# ---------------------------------------------------------------- inside: the last steps before the text

_READY = b"ready\n"

# Runs in the fresh interpreter, behind whatever walls there are. Root's processes are not counted by
# RLIMIT_NPROC, nor are files closed to it: root becomes a user that nobody else is.
_INSIDE = """
import json, os, resource, sys, types
settings = json.loads(sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([])
    for uid in (settings["uid"], 65534):  # where the container's user namespace lacks the first: nobody
        try:
            os.setgid(uid)
            os.setuid(uid)
            break
        except OSError:
            pass
    else:
        sys.exit("root cannot become another user here")
    if not os.access(os.__file__, os.R_OK):
        sys.exit(f"run as root, the answer's user may not read {os.__file__}")
for name, value in settings["limits"].items():
    number = getattr(resource, name)
    hard = resource.getrlimit(number)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(number, (value, value))
    except (OSError, ValueError):
        if sys.platform == "linux":  # macOS has no such limit on memory
            raise
with open(settings["program"], encoding="utf-8") as file:
    text = file.read()
os.write(2, b"ready\\n")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
sys.argv = ["answer.py"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(text, "answer.py", "exec"), main.__dict__)
"""

_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # the one below the .venv


def _python(settings: dict) -> list[str]:
    return [_PYTHON, "-I", "-S", "-X", "utf8", "-c", _INSIDE, json.dumps(settings)]


# ---------------------------------------------------------------- the warden: code_sandbox.py {...}

# linux/prctl.h, linux/mount.h
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = 2, -100, 0x8000, 442
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4  # MOUNT_ATTR_*


def _call(name: str, *arguments) -> None:
    """Calls a function of the C library; raises OSError, naming it, where it returns -1."""
    arguments = [os.fsencode(a) if isinstance(a, str) else a for a in arguments]
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _read_only_paths() -> list[str]:
    """What Python needs, the C library included; each once, without what lies inside another."""
    paths = [sys.base_prefix, sys.base_exec_prefix, _PYTHON, "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    paths = sorted({path for path in [*paths, "/etc/ld.so.cache"] if os.path.exists(path)})
    return [p for p in paths if not any(p != other and Path(p).is_relative_to(other) for other in paths)]


def _make_root(box: str, size: int) -> None:
    """In a mount namespace of our own: `box` becomes the root, with Python, /dev/null and an empty /work."""
    _call("mount", "none", "/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", "tmpfs", box, "tmpfs", 0, "size=1m,mode=755")
    targets = []
    for path in [*_read_only_paths(), "/dev/null"]:
        target = box + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path):
            Path(target).touch()
        targets.append((path, target))
    os.mkdir(f"{box}/work")
    for path, target in targets[:-1]:
        _call("mount", path, target, None, _MS_BIND | _MS_REC, None)
    # Unlike a remount this only adds: what the machine has forbidden on a mount stays forbidden.
    attributes = struct.pack("=QQQQ", _READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, box, _AT_RECURSIVE, attributes, len(attributes))
    _call("mount", *targets[-1], None, _MS_BIND, None)  # /dev/null is a device: after nodev
    _call(
        "mount",
        "tmpfs",
        f"{box}/work",
        "tmpfs",
        _MS_NOSUID | _MS_NODEV,
        f"size={size},nr_inodes=1024,mode=777",
    )
    os.chdir(box)
    _call("pivot_root", ".", ".")  # the old root now lies on top of the new one: take it off
    _call("umount2", ".", _MNT_DETACH)
    os.chdir("/work")


def _bubblewrap(settings: dict, filter_fd: int) -> list[str]:
    # True root needs no user namespace, and must not have one: there its processes would not be counted.
    capabilities = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    user = ["--unshare-user"] if os.geteuid() else capabilities
    command = ["bwrap", *user, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--seccomp", str(filter_fd)]
    for path in [*_read_only_paths(), "/dev/null"]:
        for folder in list(Path(path).parents)[-2::-1]:  # bwrap's own would be closed to the answer's user
            command += ["--perms", "0755", "--dir", str(folder)]
        command += ["--dev-bind" if path == "/dev/null" else "--ro-bind", path, path]
    command += ["--perms", "0777", "--size", str(settings["disk"])]
    return [*command, "--tmpfs", "/work", "--chdir", "/work", "--remount-ro", "/", "--", *_python(settings)]


def install(program: bytes) -> None:
    """Puts a filter of `seccomp_filter` on this process and all that it will start; there is no way back."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    instructions = ctypes.create_string_buffer(program)
    length_and_address = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    _call("prctl", _PR_SET_SECCOMP, 2, length_and_address, 0, 0)


def _become_the_text(settings: dict) -> None:
    """The warden's child: builds the walls and turns into the interpreter. Does not return."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(settings["box"])
    program = seccomp_filter()
    if settings["protection"] == "bubblewrap":
        filter_fd, end = os.pipe()
        os.write(end, program)
        os.set_inheritable(filter_fd, True)
        command = _bubblewrap(settings, filter_fd)
        os.execvp(command[0], command)
    if sys.platform == "linux":
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if settings["protection"] == "namespaces":
        _make_root(settings["box"], settings["disk"])
        # Process 1 stays ours: its end is the end of all others, and nobody inside can kill it.
        if child := os.fork():
            while (ended := os.wait())[0] != child:
                pass
            os._exit(os.waitstatus_to_exitcode(ended[1]) & 0xFF)
    elif os.geteuid() == 0:
        os.chown(settings["box"], settings["uid"], -1)
    if program is not None:
        install(program)
    command = _python(settings)
    os.execv(command[0], command)


def _warden(settings: dict) -> int:
    """Starts the program, waits until it or SIGTERM comes, and leaves nothing behind; its exit status."""
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they wait for sigwait below
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the default, ignoring, would lose it on some systems
    settings["uid"] = (1 << 30) + os.getpid()  # of nobody else, and no two answers have the same
    if settings["protection"] == "namespaces":
        flags = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
        uid, gid = os.geteuid(), os.getegid()
        os.unshare(flags | (os.CLONE_NEWUSER if uid else 0))
        if uid:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if sys.platform == "linux":
        _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to us
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != settings["parent"]:  # it died before that was said
            return 1
    child = os.fork()
    if child == 0:
        try:
            _become_the_text(settings)
        except BaseException as error:  # no traceback: it is shown as one line
            os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    while signal.sigwait(signals) == signal.SIGCHLD:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    # Before the child is reaped: until then nobody else can have its number.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = 1
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.wait()
            if pid == child:
                status = os.waitstatus_to_exitcode(ended) & 0xFF
    return status


# ---------------------------------------------------------------- outside: starting, reading, ending


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
        settings |= {"program": file.fileno(), "parent": os.getpid()}
        process = subprocess.Popen(
            [_PYTHON, "-I", "-S", __file__, json.dumps(settings)],
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
        if said and _READY not in said:
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
    if kind != "limits" and seccomp_filter() is None:
        return f"only on Linux on {' or '.join(_MACHINES)}, this is {sys.platform} on {platform.machine()}"
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
    if len(sys.argv) == 2:
        sys.exit(_warden(json.loads(sys.argv[1])))
    try:
        sentence = SENTENCES[protection()]
    except ValueError as error:
        sys.exit(f"error: {error}")
    if seccomp_filter() is None:
        sentence += "; the network is open, and what leaves its process group lives on"
    print(sentence)
