"""The warden of `box.py`: isolates a program, starts it, and ends all of its processes.

It runs in a separate interpreter, as a script with its settings as an argument, because it enters
namespaces and adopts orphans. It imports little, because start-up is most of the cost of a short
test.
"""

import ctypes
import os
import signal
import struct
import sys

# ---------------------------------------------------------------- the filter of system calls

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # (column below, AUDIT_ARCH_*)

with open(os.path.join(os.path.dirname(__file__), "refused_calls.txt")) as _file:
    _REFUSED = [line for line in _file if not line.startswith("#")]
_CLONE3 = 435
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def refused_calls() -> list[list[str]]:
    """The rows of refused_calls.txt: name, two numbers, conditions."""
    return [row.split() for line in _REFUSED for row in line.split(",") if row.strip()]


def seccomp_filter() -> bytes:
    """The filter for one of MACHINES as classic BPF, 8 bytes per instruction."""
    column, machine = MACHINES[os.uname().machine]
    # An instruction: opcode, instructions to skip if true, to skip if false, constant.
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    # 32-bit calls differ
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, _KILL)]
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (answer, 0, 0, _KILL)]  # and x32's
    # clone3 passes its flags by pointer, which a filter can't read; without it the C library uses
    # clone.
    program += [(equal, 0, 1, _CLONE3), (answer, 0, 0, _ENOSYS)]
    for row in refused_calls():
        body, numbers, conditions = [], row[1:3], row[3:]
        for condition in conditions:
            argument, test, constant = condition.partition("=" if "=" in condition else "&")
            # 16: the low half of the first argument; the high half of argument 4 is 4.5
            body += [(load, 0, 0, 16 + int(8 * float(argument)))]
            body += [
                (equal if test == "=" else any_bit, 0, 1, int(constant, 0)),
                (answer, 0, 0, _EPERM),
            ]
        body += [(answer, 0, 0, _ALLOW if conditions else _EPERM)]
        program += [(equal, 0, len(body), int(numbers[column])), *body]
    program += [(answer, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


# ------------------------------------------------------- inside: the last steps before the program

READY = b"ready\n"

# Runs in the fresh interpreter, which is isolated by then. RLIMIT_NPROC and file permissions don't
# apply to root, so root becomes an otherwise unused user.
_INSIDE = """
import os, resource, sys
if os.geteuid() == 0:
    os.setgroups([])
    for uid in (settings["uid"], 65534):  # nobody, where the container lacks the first
        try:
            os.setgid(uid)
            os.setuid(uid)
            break
        except OSError:
            pass
    else:
        sys.exit("root cannot become another user here")
    if not os.access(os.__file__, os.R_OK):
        sys.exit(f"running as root: the answer's user cannot read {os.__file__}")
for name, value in settings["limits"].items():
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (value, value))
text = open(settings["program"], encoding="utf-8").read()
os.write(2, b"ready\\n")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
sys.argv = ["answer.py"]
main = sys.modules["__main__"] = type(sys)("__main__")
exec(compile(text, "answer.py", "exec"), main.__dict__)
"""


# ---------------------------------------------------------------- isolation

# the only folder the program can write to; no interpreter is installed under this name
HOME = "/.answer"

# linux/prctl.h, linux/mount.h
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = 2, -100, 0x8000, 442
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4  # MOUNT_ATTR_*


def _call(name: str, *arguments) -> None:
    """Calls the C library's function `name`; raises an OSError that names it if it returns -1."""
    arguments = [os.fsencode(a) if isinstance(a, str) else a for a in arguments]
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _read_only_paths(python: str) -> list[str]:
    """Files and folders that Python and its C library need, none inside another."""
    paths = [
        sys.base_prefix,
        sys.base_exec_prefix,
        python,
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
    ]
    paths = sorted({path for path in [*paths, "/etc/ld.so.cache"] if os.path.exists(path)})
    return [p for p in paths if not any(p.startswith(other.rstrip("/") + "/") for other in paths)]


def _own_namespaces() -> None:
    """Gives this process its own mounts, process ids, network, queues and host name."""
    uid, gid = os.geteuid(), os.getegid()
    own = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    os.unshare(own | (os.CLONE_NEWUSER if uid else 0))
    maps = (
        {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        if uid
        else {}
    )
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("mount", "none", "/", None, _MS_REC | _MS_PRIVATE, None)


def _make_root(folder: str, size: int, python: str) -> None:
    """Makes the empty `folder` the root, with `python`, /dev/null and a HOME of `size` bytes."""
    _call("mount", "tmpfs", folder, "tmpfs", 0, "size=1m,mode=755")
    for path in [*_read_only_paths(python), "/dev/null"]:
        target = folder + path
        os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(path):
            open(target, "w").close()
        if path != "/dev/null":
            _call("mount", path, target, None, _MS_BIND | _MS_REC, None)
    os.mkdir(folder + HOME)
    # Unlike a remount, this keeps the restrictions that a mount already has.
    attributes = struct.pack("=QQQQ", _READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    _call(
        "syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, folder, _AT_RECURSIVE, attributes, len(attributes)
    )
    # a device, so after nodev
    _call("mount", "/dev/null", folder + "/dev/null", None, _MS_BIND, None)
    # unlimited empty files would fill the kernel's memory
    options = f"size={size},nr_inodes=1024,mode=777"
    _call("mount", "tmpfs", folder + HOME, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(folder)
    _call("pivot_root", ".", ".")  # stacks the old root on the new one; unmount it
    _call("umount2", ".", _MNT_DETACH)
    os.chdir(HOME)


def install(program: bytes) -> None:
    """Applies a filter from `seccomp_filter` to this process and its future children; it can't be
    undone.
    """
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    instructions = ctypes.create_string_buffer(program)
    length_and_address = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    _call("prctl", _PR_SET_SECCOMP, 2, length_and_address, 0, 0)


def _become_the_program(settings: dict) -> None:
    """The warden's child: isolates itself and becomes the interpreter. Does not return."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(settings["folder"])
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if settings["protection"] == "namespaces":
        _make_root(settings["folder"], settings["disk"], settings["python"])
        # Process 1 stays ours. No process inside can kill it, and all others end with it.
        if child := os.fork():
            while (ended := os.wait())[0] != child:
                pass
            os._exit(os.waitstatus_to_exitcode(ended[1]) & 0xFF)
    elif os.geteuid() == 0:
        os.chown(settings["folder"], settings["uid"], -1)
    install(seccomp_filter())
    inside = f"settings = {settings!r}\n{_INSIDE}"
    os.execv(settings["python"], [settings["python"], "-I", "-S", "-X", "utf8", "-c", inside])


def guard(settings: dict) -> int:
    """Starts the program, waits for its end or SIGTERM, ends all its processes; returns its exit
    status.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # held until sigwait below
    # ignored, the default, it is lost on some systems
    signal.signal(signal.SIGCHLD, lambda *_: None)
    settings["uid"] = (1 << 30) + os.getpid()  # otherwise unused, and different for every answer
    if settings["protection"] == "namespaces":
        _own_namespaces()
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt orphans
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != settings["parent"]:  # it ended before prctl took effect
        return 1
    child = os.fork()
    if child == 0:
        try:
            _become_the_program(settings)
        except BaseException as error:  # shown as one line, without a traceback
            os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    while signal.sigwait(signals) == signal.SIGCHLD:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    # before the child is reaped: until then its id can't be reused
    for kill in (os.kill, os.killpg):
        try:  # noqa: SIM105 (importing contextlib takes time)
            kill(child, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            pass
    status = 1
    try:
        while True:
            pid, ended = os.wait()
            if pid == child:
                status = os.waitstatus_to_exitcode(ended) & 0xFF
    except ChildProcessError:  # no child is left
        return status


if __name__ == "__main__":
    sys.exit(guard(eval(sys.argv[1])))  # a dict, written by `box.started`
