"""Programs that cheat and programs that solve the task: only the second kind may score.

A cheat that searches for the expected output must not find it; one that breaks a limit prints the expected
output once it has broken it. So each cheat scores as soon as the protection against it is missing.
"""

import concurrent.futures
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import code_reward
from parts import code_grading
from parts.code_grading import compute_score, extract_code, read_statements, read_tests, same_output
from parts.settings import UserError
from sandbox import box, warden

FOLDER = Path(box.__file__).parent.parent
HANG_SECONDS = 600  # for a subprocess that takes 0.5 s: only one that hangs reaches it


def works(kind):
    try:
        return bool(box.protection(kind))
    except ValueError:
        return False


KINDS = [kind for kind in box.SENTENCES if works(kind)]
ISOLATED = [kind for kind in KINDS if kind != "limits"]


def refused(kind):
    """Whether this machine has no protection (kind None); checks that no answer runs there."""
    if kind is None:
        with pytest.raises(ValueError, match="Remedy"):
            compute_score("x = 1", "assert x == 1")
    return kind is None


SECRET = f"7777{secrets.randbelow(10**8):08d}"  # impossible to guess, easy to recognize
CALLS = f"assert secret(3) == {SECRET}\nassert secret(4) == {SECRET}"
OUTPUT = json.dumps([{"input": "3\n", "output": SECRET}])

FIND = r"""
import os, re, sys
def find(text):
    found = re.findall(rb"7777\d{8}", text if isinstance(text, bytes) else str(text).encode(errors="replace"))
    if found:
        print(int(found[0]))
        os._exit(0)
def find_in(path):
    try:
        with open(path, "rb") as file:
            find(file.read(1 << 20))
    except Exception:
        pass
def secret(x):
    return answer
answer = 0
"""

# ---------------------------------------------------------------- cheats against assert statements

CHEATS = {
    "exit at import": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef secret(x):\n    os._exit(0)",
    "SystemExit at import": "import sys\nsys.exit(0)",
    "SystemExit in the call": "def secret(x):\n    raise SystemExit(0)",
    "equal to everything": "class Yes:\n    def __eq__(self, other):\n        return True\n"
    "def secret(x):\n    return Yes()",
    "an int equal to everything": "class Yes(int):\n    def __eq__(self, other):\n        return True\n"
    "    __hash__ = int.__hash__\ndef secret(x):\n    return Yes(5)",
    "a list equal to everything": "class Yes(list):\n    def __eq__(self, other):\n        return True\n"
    "def secret(x):\n    return Yes()",
    "mock.ANY": "from unittest.mock import ANY\ndef secret(x):\n    return ANY",
    "prints the pass mark": "print('1\\n1\\n1', flush=True)\ndef secret(x):\n"
    "    print('1\\n1\\n1', flush=True)",
    "pass mark to every descriptor": """
import os
def secret(x):
    for fd in range(64):
        try:
            os.write(fd, b'1\\n1\\n1\\n')
        except OSError:
            pass
""",
    "forged replies": """
import os
for fd in range(64):
    try:
        os.write(fd, b'["value", true]\\n' * 9)
    except OSError:
        pass
""",
    "forged objects": """
import json, os
for fd in range(64):
    try:
        os.write(fd, (json.dumps(["value", ["object", "x"]]) + "\\n").encode() * 9)
    except OSError:
        pass
""",
    "patched builtins": """
import builtins, json, operator
builtins.AssertionError = ValueError
builtins.isinstance = builtins.all = lambda *a: True
builtins.exec = builtins.compile = builtins.eval = lambda *a, **k: None
json.dumps = lambda *a, **k: '["value", true]'
operator.eq = lambda a, b: True
def secret(x):
    return True
""",
    "patched server": """
import sys
main = sys.modules["__main__"]
main.encode = main.decode = lambda *a: True
main.check = lambda *a: print("1\\n1")
def secret(x):
    return True
""",
    "garbage collector": FIND
    + """
import gc
def secret(x):
    for thing in gc.get_objects():
        try:
            text = repr(thing)
        except Exception:
            continue
        if (found := re.findall(r"7777\\d{8}", text)):
            return int(found[0])
""",
    "frames": FIND
    + """
def secret(x):
    for frame in sys._current_frames().values():
        while frame:
            if (found := re.findall(r"7777\\d{8}", repr(frame.f_locals) + repr(frame.f_globals))):
                return int(found[0])
            frame = frame.f_back
""",
    "trace function": FIND
    + """
seen = []
def trace(frame, event, argument):
    seen.extend(re.findall(r"7777\\d{8}", repr(frame.f_locals) + repr(argument)))
    return trace
sys.settrace(trace)
def secret(x):
    return int(seen[0])
""",
    "open descriptors": FIND
    + """
def secret(x):
    for fd in range(64):
        try:
            os.lseek(fd, 0, 0)
            if (found := re.findall(rb"7777\\d{8}", os.read(fd, 1 << 20))):
                return int(found[0])
        except OSError:
            pass
""",
    "modules that tests use": "class json:\n    loads = lambda *a: True\ndef secret(x):\n    return json",
    "errors of every kind": "def secret(x):\n    raise AssertionError('1')",
    "StopIteration": "def secret(x):\n    raise StopIteration",
    "a reply without end": """
import os
def secret(x):
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, b"[" * 65536)
            except OSError:
                pass
""",
    "a reply nested too deep": "value = []\nfor _ in range(900):\n    value = [value]\n"
    "def secret(x):\n    return value",
    "an object that calls itself": "class A:\n    def __getattr__(self, name):\n        return self\n"
    "    def __call__(self, *a):\n        return self\nsecret = A()",
    "a thread that replies": """
import os, threading
def flood():
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, b'["value", true]\\n')
            except OSError:
                pass
threading.Thread(target=flood, daemon=True).start()
def secret(x):
    return True
""",
    "segmentation fault": "import ctypes\ndef secret(x):\n    ctypes.string_at(0)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef secret(x):\n    return secret(x)",
    "hangs in the call": "import time\ndef secret(x):\n    time.sleep(600)\n    return {SECRET}",
    "hangs at import": "import time\ntime.sleep(600)\ndef secret(x):\n    return {SECRET}",
}

# ---------------------------------------------------------------- cheats that search or break out

SEARCHES = {
    "reads the tests' file": FIND + "find_in('{PUBLIC}/tests.json')",
    "searches the disk": FIND
    + """
for top in ("{PUBLIC}", "/tmp", "/home", "/root", "/var/tmp", "/dev/shm"):
    for folder, _, names in os.walk(top):
        for name in names[:200]:
            find_in(os.path.join(folder, name))
""",
    "reads /proc": FIND
    + """
for pid in ["self", os.getppid(), {PARENT}, *range(1, 200)]:
    for name in ("cmdline", "environ", *(f"fd/{fd}" for fd in range(9)), "root{PUBLIC}/tests.json"):
        find_in(f"/proc/{pid}/{name}")
""",
    "reads the parent's memory": FIND
    + """
for pid in {os.getppid(), 1, {PARENT}}:
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                if end - start < 1 << 26:
                    try:
                        memory.seek(start)
                        find(memory.read(end - start))
                    except (OSError, ValueError, OverflowError):
                        pass
    except OSError:
        pass
""",
    "reads later input": FIND
    + "find(sys.stdin.read())\nfind(os.read(0, 100))\nos.lseek(0, 0, 0)\nfind(os.read(0, 100))",
}
BREAKS = {  # name: (program, whether `limits` stops it too)
    "fork bomb": (
        """
import os, time
made = 0
while made < 100:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    made += 1
print({SECRET})
""",
        True,
    ),
    "fork bomb that grows": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        True,
    ),
    "thread bomb": (
        """
import threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print({SECRET}, flush=True)
import os
os._exit(0)
""",
        True,
    ),
    "memory": ("x = bytearray(1 << 28)\nprint({SECRET})", True),
    "memory, piece by piece": (
        "x = []\nfor _ in range(26):\n    x.append(bytearray(10 << 20))\nprint({SECRET})",
        True,
    ),
    "memory after raising the limit": (
        """
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
except (ValueError, OSError):
    pass
x = bytearray(1 << 28)
print({SECRET})
""",
        True,
    ),
    "memory outside the address space": (
        "import os\nfd = os.memfd_create('x')\nos.write(fd, bytes(1 << 20))\nprint({SECRET})",
        True,
    ),
    "shared memory": (
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) != -1:\n    print({SECRET})",
        True,
    ),
    "one large file": (
        "with open('x', 'wb') as f:\n    for _ in range(64):\n"
        "        f.write(bytes(1 << 20))\nprint({SECRET})",
        True,
    ),
    "many files": (
        "for i in range(64):\n    with open(f'x{i}', 'wb') as f:\n"
        "        f.write(bytes(1 << 20))\nprint({SECRET})",
        False,
    ),
    "many descriptors": ("import os\nx = [os.pipe() for _ in range(500)]\nprint({SECRET})", True),
    "busy loop": (
        "import time\nend = time.process_time() + 1.9\n"
        "while time.process_time() < end:\n    pass\nprint({SECRET})",
        True,
    ),
    "busy loop deaf to signals": (
        """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while time.process_time() < 20:
    pass
print({SECRET})
""",
        True,
    ),
    "sleep": ("import time\ntime.sleep(600)\nprint({SECRET})", True),
    "prints without end": ("while True:\n    print({SECRET} * 9)", True),
    "much before the answer": ("print('{SECRET}' + '\\n' * 2000000)", True),
    "errors without end": ("import sys\nwhile True:\n    sys.stderr.write('x' * 65536)", True),
    "right, but fails": ("import os\nprint({SECRET}, flush=True)\nos._exit(1)", True),
    "closes its output and stays": (
        "import os, time\nprint({SECRET}, flush=True)\nos.close(1)\nos.close(2)\ntime.sleep(600)",
        True,
    ),
    "leaves a child behind": ("import os, time\nif os.fork() == 0:\n    time.sleep(600)", True),
    "leaves a daemon behind": (
        """
import os, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
""",
        True,
    ),
    "leaves the process group": ("import os\nif os.fork() == 0:\n    os.setsid()\n    print({SECRET})", True),
    "clears its parent-death signal": (
        "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "if os.fork() == 0:\n    time.sleep(600)",
        True,
    ),
    "tcp": ("import socket\nsocket.create_connection(('127.0.0.1', {PORT}), 1)\nprint({SECRET})", True),
    "udp": (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('127.0.0.1', {PORT}))\nprint({SECRET})",
        True,
    ),
    "unix socket": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('{PUBLIC}/socket')\nprint({SECRET})",
        True,
    ),
    "writes outside": (
        """
import os
home, python = os.path.expanduser("~"), os.path.dirname(os.__file__)
for folder in ("{PUBLIC}", "/tmp", "/var/tmp", "/dev/shm", "/", "..", "/dev", home, python):
    try:
        with open(os.path.join(folder, "{MARK}"), "w") as file:
            file.write("x")
        print({SECRET})
    except OSError:
        pass
""",
        False,
    ),
    "deletes outside": ("import os\nos.remove('{PUBLIC}/victim')\nprint({SECRET})", False),
    "hard link to outside": ("import os\nos.link('{PUBLIC}/tests.json', 'x')\nprint({SECRET})", False),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)\nprint({SECRET})", True),
    "kills the training": ("import os\nos.kill({PARENT}, 15)\nprint({SECRET})", True),
    "kills everything": (
        "import os\nfor pid in (-1, 0, *range(1, 3000)):\n"
        "    try:\n        os.kill(pid, 9)\n        print({SECRET})\n"
        "    except OSError:\n        pass",
        True,
    ),
    "kills through a pidfd": (
        "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)\nprint({SECRET})",
        True,
    ),
    "stops the training": ("import os\nos.killpg(os.getpgid({PARENT}), 19)\nprint({SECRET})", True),
    "starves the training": (
        "import resource\nresource.prlimit({PARENT}, resource.RLIMIT_CPU, (1, 1))\nprint({SECRET})",
        True,
    ),
    "traces its parent": (
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0:\n    print({SECRET})",
        True,
    ),
    "namespaces of its own": (
        "import os\nos.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)\nprint({SECRET})",
        True,
    ),
    "clone with namespaces": (
        """
import ctypes, platform
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
pid = ctypes.CDLL(None).syscall(number, 0x10000011, 0, 0, 0, 0)
if pid == 0:
    import os
    os._exit(0)
if pid > 0:
    print({SECRET})
""",
        True,
    ),
    "signals by a descriptor's owner": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {PARENT})\nprint({SECRET})",
        True,
    ),
    "another signal by a descriptor": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 10, 9)\nprint({SECRET})",
        True,
    ),
    "signals by a descriptor's owner, extended": (
        "import fcntl, os, struct\nr, w = os.pipe()\n"
        "fcntl.fcntl(r, 15, struct.pack('ii', 1, {PARENT}))\nprint({SECRET})",
        True,
    ),
    "signals by ioctl FIOSETOWN": (
        "import fcntl, socket, struct\na, b = socket.socketpair()\n"
        "fcntl.ioctl(a, 0x8901, struct.pack('i', {PARENT}))\nprint({SECRET})",
        True,
    ),
    "signals by ioctl SIOCSPGRP": (
        "import fcntl, socket, struct\na, b = socket.socketpair()\n"
        "fcntl.ioctl(a, 0x8902, struct.pack('i', {PARENT}))\nprint({SECRET})",
        True,
    ),
    "asynchronous by ioctl FIOASYNC": (
        "import fcntl, socket, struct\na, b = socket.socketpair()\n"
        "fcntl.ioctl(a, 0x5452, struct.pack('i', 1))\nprint({SECRET})",
        True,
    ),
    "outlives its parent": (
        "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0:\n    print({SECRET})",
        True,
    ),
    "a packet without a connection": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', '{PUBLIC}/datagrams')\nprint({SECRET})",
        True,
    ),
    "a message to an address": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendmsg([b'x'], [], 0, '{PUBLIC}/datagrams')\nprint({SECRET})",
        True,
    ),
    "3,000 nested folders": (
        "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')\nos._exit(1)",
        True,
    ),
    "empty files without end": (
        "for i in range(5000):\n    open(f'{i}', 'w').close()\nprint({SECRET})",
        False,
    ),
    "writes its input": ("import os\nos.write(0, b'x')\nprint({SECRET})", True),
    "becomes root": ("import os\nos.setuid(0)\nprint({SECRET})", True),
    "chroot": ("import os\nos.chroot('.')\nprint({SECRET})", True),
    "makes a device": (
        "import os, stat\nos.mknod('x', 0o666 | stat.S_IFBLK, os.makedev(8, 0))\nprint({SECRET})",
        True,
    ),
    "a shell": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'echo {SECRET}'])", False),
}


BUSY = ["busy loop", "busy loop deaf to signals"]  # only the limit on processor time stops them


def ours() -> list[str]:
    """Command lines of the processes that this process started in a sandbox and that still run."""
    mark = f"'parent': {os.getpid()}"
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line[:200] for line in lines if mark in line]


@pytest.fixture(scope="module")
def outcomes():
    """(protection, name) -> (score, seconds) of every cheat; "outside": the traces that they left outside."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="public_") as public:
        public = Path(public)  # everybody may read and write here: only isolation keeps a program out
        public.chmod(0o777)
        (public / "tests.json").write_text(OUTPUT)
        (public / "tests.json").chmod(0o666)
        (public / "victim").touch()
        (public / "boxes").mkdir()
        listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)]
        listeners.append(socket.socket(socket.AF_UNIX))
        port = listeners[0].getsockname()[1]
        listeners[1].bind(("127.0.0.1", port))
        listeners[2].bind(str(public / "socket"))
        listeners[2].listen()
        (public / "socket").chmod(0o777)
        listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        listeners[3].bind(str(public / "datagrams"))
        (public / "datagrams").chmod(0o777)

        mark = f"mark_{secrets.token_hex(8)}"
        values = {"SECRET": SECRET, "PUBLIC": public, "MARK": mark, "PORT": port, "PARENT": os.getpid()}
        patch.setattr(tempfile, "tempdir", str(public / "boxes"))
        patch.setattr(box, "CPU_SECONDS", 1)
        patch.setattr(box, "MEMORY_BYTES", 128 << 20)  # small, so that a cheat exceeds it quickly

        def outcome(program, tests):
            for key, value in values.items():
                program = program.replace(f"{{{key}}}", str(value))
            start = time.monotonic()
            score = compute_score(program, tests)
            return score, time.monotonic() - start

        results = {}
        for kind in KINDS:
            patch.setattr(box, "protection", lambda kind=kind: kind)
            cheats = {name: (program, CALLS) for name, program in CHEATS.items()}
            if kind in ISOLATED:
                cheats |= {name: (program, OUTPUT) for name, program in SEARCHES.items()}
            cheats |= {
                n: (program, OUTPUT) for n, (program, held) in BREAKS.items() if held or kind in ISOLATED
            }
            by_processor_time = {name: cheats.pop(name) for name in BUSY}
            for wall_seconds, group in ((HANG_SECONDS, by_processor_time), (2.0, cheats)):
                patch.setattr(box, "WALL_SECONDS", wall_seconds)
                with concurrent.futures.ThreadPoolExecutor(8) as pool:  # most of them sleep
                    scores = pool.map(lambda cheat: outcome(*cheat), group.values())
                    results |= {(kind, name): score for name, score in zip(group, scores)}

        folders = [public, *map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/", "/dev", os.path.expanduser("~")))]
        reached = []
        for listener in listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                reached.append(listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept())
            listener.close()
        results["outside"] = {
            "processes left": ours(),
            "files written": [str(folder) for folder in folders if (folder / mark).exists()],
            "folders left": list((public / "boxes").iterdir()),
            "connections": reached,
            "files lost or changed": not (public / "victim").exists()
            or (public / "tests.json").read_text() != OUTPUT,
        }
    return results


NAMES = [*CHEATS, *SEARCHES, *BREAKS]
TRIED = [(kind, name) for kind in KINDS or [None] for name in NAMES]
TRIED = [
    (k, n) for k, n in TRIED if k != "limits" or not (n in SEARCHES or (n in BREAKS and not BREAKS[n][1]))
]


@pytest.mark.parametrize(("kind", "name"), TRIED)
def test_a_cheat_neither_scores_nor_outlives_its_limit(kind, name, outcomes):
    if refused(kind):
        return
    score, seconds = outcomes[kind, name]
    assert score == 0.0
    assert seconds < 300  # about 2 s, with 8 programs at a time; the sleepers would take 600


def test_nothing_is_left_of_the_cheats_and_nothing_was_reached(outcomes):
    assert not any(outcomes["outside"].values()), outcomes["outside"]


def test_there_are_at_least_40_cheats_under_every_protection():
    assert all(sum(k == kind for k, _ in TRIED) >= 40 for kind in KINDS)


@pytest.mark.parametrize("name", ["reads the tests' file", "searches the disk"])
def test_without_isolation_a_search_finds_the_answer(name, tmp_path):
    """The cheats are real: outside a sandbox the same program prints the expected output."""
    (tmp_path / "tests.json").write_text(OUTPUT)
    program = SEARCHES[name].replace("{PUBLIC}", str(tmp_path))
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS).stdout
    assert same_output(printed, SECRET)


# ---------------------------------------------------------------- cheats with tests or limits of their own

every_kind = pytest.mark.parametrize("kind", KINDS or [None])


@pytest.fixture
def under(monkeypatch):
    """Sets the protection of compute_score, without a limit on time that an honest program could reach."""

    def set_protection(kind):
        monkeypatch.setattr(box, "protection", lambda: kind)
        monkeypatch.setattr(box, "WALL_SECONDS", HANG_SECONDS)
        monkeypatch.setattr(code_grading, "ANSWER_SECONDS", HANG_SECONDS)

    return set_protection


FORGE = """
import json, os, sys
def forge(*reply):
    frame = sys._getframe()
    while frame:
        fd = frame.f_locals.get("replies")
        if isinstance(fd, int):
            os.write(fd, (json.dumps(reply) + "\\n").encode())
        frame = frame.f_back
"""
YES = """
class Yes:
    def __getattr__(self, name):
        return lambda *arguments, **named: True
    def __call__(self, *arguments):
        return self
    def __getitem__(self, key):
        return self
def f(x):
    return Yes()
"""
WEAK = {
    "forged reply that empties its argument": (
        FORGE + "def f(x):\n    forge('value', ['list'], [['list']])\n    forge('value', ['list'], ['list'])",
        "x = [3, 1, 2]\nassert f(x) == sorted(x)",
    ),
    "a value and emptied arguments": (
        FORGE + "def f(x):\n    forge('value', ['int', '0x0'], ['list'])\n    return 0",
        "x = [3, 1, 2]\nassert f(x) == len(x) - 3 + sum(x)\nassert f(x) == sum(x)",
    ),
    "StopIteration ends zip": (
        "def f(x):\n    raise StopIteration",
        "assert list(zip([1, 2], map(f, [1, 2]))) == []\nassert all(y == 5 for y in map(f, [1, 2]))\n"
        "for y in map(f, [1, 2]):\n    assert y == 5\nassert next(map(f, [1]), 5) == 5",
    ),
    "StopIteration of a property": (
        "class A:\n    @property\n    def val(self):\n        raise StopIteration\ndef f(x):\n    return A()",
        "assert all(a.val == 5 for a in map(f, [1, 2]))\nassert list(map(lambda x: f(x).val, [1])) == []",
    ),
    "StopIteration of its own class": (
        "class Stop(StopIteration):\n    pass\ndef f(x):\n    raise Stop",
        "assert all(y == 5 for y in map(f, [1, 2]))",
    ),
    "says yes to every method": (
        YES,
        "assert f(1).startswith('a')\nassert f(1).issubset({1})\nassert f(1).isdigit()\n"
        "assert f(1).count(7)\nassert f(1).get('x')\nassert f(1).a.b.c()\nassert f(1)[0].isupper()",
    ),
    "says yes to what it returns": (YES, "assert f(1)(2)\nassert f(1)[3]\nassert f(1)[3][4]"),
    "an iterator without end": (
        "import itertools\ndef f(x):\n    return itertools.count()",
        "assert 31415 in f(1)\nassert any(y == 31 for y in f(1))\nassert 5 in list(f(1))\n"
        "assert max(zip(f(1), range(5)))",
    ),
    "an iterable that grows": (
        "class A:\n    def __getitem__(self, i):\n        return i\ndef f(x):\n    return A()",
        "assert 31 in f(1)\nassert any(y == 31 for y in f(1))",
    ),
    "its own isclose": (
        "isclose = lambda *a, **k: True\ndef f(x):\n    return 0",
        "assert isclose(f(3), 3.14)",
    ),
    "its own sqrt and Counter": (
        "sqrt = Counter = lambda *a: 0\ndef f(x):\n    return 0",
        "assert f(9) == sqrt(9)\nassert f('aab') == Counter('aab')",
    ),
    "its own math as the entry": (
        "math = type('', (), {'sqrt': lambda x: 0})\ndef f(x):\n    return 0",
        "assert f(9) == math.sqrt(9)",
    ),
    "a class that is a function": (
        "class f:\n    def __init__(self, x):\n        pass\n    def isdigit(self):\n        return True",
        "assert f('1').isdigit()",
    ),
    "its own math": (
        "class math:\n    isclose = lambda *a: True\ndef f(x):\n    return 0",
        "assert math.isclose(f(3), 3.14)",
    ),
    "its own abs": ("def abs(x):\n    return 0\ndef f(x):\n    return 0", "assert abs(f(3) - 3.14) < 0.1"),
    "its own sorted": (
        "def sorted(x):\n    return 0\ndef f(x):\n    return 0",
        "assert f([2, 1]) == sorted([2, 1])",
    ),
    "empties what it is given": (
        "def f(x):\n    x.clear()\n    return x",
        "x = [3, 1, 2]\nassert f(x) == sorted(x)",
    ),
    "holds everything": (
        "class All:\n    def __contains__(self, x):\n        return True\ndef f(x):\n    return All()",
        "assert 31415 in f(3)",
    ),
    "true as an object": ("class A:\n    pass\ndef f(x):\n    return A()", "assert f(3)"),
    "is any class": (
        "class A:\n    __class__ = int\n    def __eq__(self, x):\n"
        "        return True\ndef f(x):\n    return A()",
        "assert isinstance(f(3), int) and f(3) == 31415",
    ),
    "replies that eat memory": (
        "def f(x):\n    return 10**11",
        "assert [0] * f(1) == 1\nassert 2 ** f(1) == 8",
    ),
}


@every_kind
@pytest.mark.parametrize("name", WEAK)
def test_tests_are_not_led_astray(kind, name, under, monkeypatch):
    if refused(kind):
        return
    under(kind)
    monkeypatch.setattr(box, "CPU_SECONDS", 1)
    program, tests = WEAK[name]
    assert compute_score(program, tests) == 0.0


@every_kind
@pytest.mark.parametrize("name", BUSY)
def test_processor_time_is_limited_by_itself(kind, name, outcomes):
    if refused(kind):
        return
    score, seconds = outcomes[kind, name]
    assert score == 0.0
    assert seconds < HANG_SECONDS


@every_kind
def test_all_tests_of_an_answer_share_a_time_limit(kind, under, monkeypatch):
    if refused(kind):
        return
    under(kind)
    monkeypatch.setattr(code_grading, "ANSWER_SECONDS", 1.5)
    start = time.monotonic()
    assert compute_score("import time\ntime.sleep(1)\nprint(1)", [["", "1"]] * 50) <= 0.02
    assert time.monotonic() - start < 40  # about 1.5 s; one after the other they would take 50


@every_kind
def test_each_program_starts_in_an_empty_folder_without_our_environment(kind, under, monkeypatch):
    if refused(kind):
        return
    under(kind)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = "import os\nprint(os.listdir(), 'HF_TOKEN' in os.environ)\nopen('x', 'w').close()"
    assert compute_score(program, [["", "[] False"]] * 2) == 1.0


def test_without_protection_the_answer_is_refused_in_one_line(tmp_path):
    """The kernel refuses namespaces, as in many containers; here because of a filter on the child."""
    for name, text in (("answer.py", "x = 1"), ("tests.py", "assert x == 1")):
        (tmp_path / name).write_text(text)
    program = """
import code_reward
from parts import settings
from sandbox import warden
warden._REFUSED = "unshare 272 97"
if warden.seccomp_filter():
    warden.install(warden.seccomp_filter())
settings.run(code_reward.main)
"""
    environment = {key: value for key, value in os.environ.items() if key != "CODE_PROTECTION"}
    files = [f"ANSWER={tmp_path}/answer.py", f"TESTS={tmp_path}/tests.py"]
    command = [sys.executable, "-c", program, *files]  # imports from the current folder
    result = subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    for word in ("CODE_PROTECTION=auto", "bubblewrap", "namespaces", "Remedy"):
        assert word in result.stderr


def test_an_unknown_protection_is_refused():
    with pytest.raises(
        ValueError, match=r"CODE_PROTECTION=none: must be auto, bubblewrap, namespaces, limits"
    ):
        box.protection("none")


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_the_numbers_of_the_refused_calls_are_the_kernels():
    """Compares the table with the kernel's headers where they are installed; checks its form everywhere."""
    table = [call.split() for call in warden._REFUSED.replace(",", "\n").split("\n") if call]
    assert all(len(row) == 3 and row[1].isdigit() and row[2].isdigit() for row in table)
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    for column, header in enumerate(headers, 1):
        if Path(header).exists():
            defined = {}
            for line in Path(header).read_text().splitlines():
                if line.startswith("#define __NR"):
                    name, number = line.split()[1:3]
                    defined[name.removeprefix("__NR").removeprefix("3264").removeprefix("_")] = number
            wrong = [row for row in table if defined.get(row[0], row[column]) != row[column]]
            assert not wrong


# ---------------------------------------------------------------- programs that solve the task

ADD = "def add(a, b):\n    return a + b"
STACK = """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
"""
HONEST = {
    "assert": (ADD, "assert add(1, 2) == 3", None, 1.0),
    "list of asserts": (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 2"], None, 1.0),
    "half of the asserts": (
        "def add(a, b):\n    return a + b if a == 1 else 0",
        "assert add(1, 2) == 3\nassert add(2, 2) == 4",
        None,
        0.5,
    ),
    "an error in one call": (
        "def f(x):\n    return 6 // x",
        "assert f(2) == 3\nassert f(0) == 1\nassert f(3) == 2\nassert f(6) == 1",
        None,
        0.75,
    ),
    "hangs in the last of three": (
        "def f(x):\n    while x > 2:\n        pass\n    return x",
        "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3",
        None,
        2 / 3,
    ),
    "HumanEval's check": (
        ADD,
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(1, 2) == 4",
        {"entry_point": "add"},
        0.5,
    ),
    "check, called": (ADD, "def check(f):\n    assert f(1, 2) == 3\ncheck(add)", None, 1.0),
    "pytest's form": (
        ADD,
        "from solution import add\ndef test_one():\n    assert add(1, 2) == 3\n"
        "def test_two():\n    assert add(1, 2) == 4",
        None,
        0.5,
    ),
    "a loop of asserts": (ADD, "for i in range(9):\n    assert add(i, 1) == i + 1", None, 1.0),
    "a class": (
        STACK,
        "s = Stack()\ns.push(1)\nassert len(s) == 1\nassert s.pop() == 1\nassert len(s) == 0",
        None,
        1.0,
    ),
    "an expected error": (
        STACK,
        "try:\n    Stack().pop()\n    assert False\nexcept IndexError:\n    pass",
        None,
        1.0,
    ),
    "in place": ("def f(x):\n    x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]", None, 1.0),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]", None, 1.0),
    "the name of a builtin": (
        "def sum(a, b):\n    return a + b",
        "assert sum(1, 2) == 3",
        {"entry_point": "sum"},
        1.0,
    ),
    "math without an import": ("def f(x):\n    return x / 3", "assert math.isclose(f(1), 1 / 3)", None, 1.0),
    "every kind of value": (
        "def f(x):\n    return x",
        "for x in (None, True, -1, 10**5000, 1.5, float('inf'), 1j, 'é\\n', b'x', [1, [2]], (1,), {1}, "
        "frozenset({2}), {(1, 2): {'a': None}}, range(3)):\n    assert f(x) == x and type(f(x)) is type(x)",
        None,
        1.0,
    ),
    "a fence in an answer pair": (
        f"<reasoning>```\nx\n```</reasoning><answer>\n```python\n{ADD}\n```\n</answer>",
        "assert add(1, 2) == 3",
        None,
        1.0,
    ),
    "prints while it works": ("def f(x):\n    print('debug')\n    return x", "assert f(1) == 1", None, 1.0),
    "a main block": (
        ADD + "\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
        [["1 2", "3"], ["2 2\n", "4\n"]],
        None,
        1.0,
    ),
    "JSON pairs": ("print(int(input()) + 1)", '[["1", "2"], ["5", "6"], ["7", "9"]]', None, 2 / 3),
    "JSON inputs and outputs": (
        "print(int(input()) + 1)",
        '{"inputs": ["1", "2"], "outputs": ["2 \\n\\n", "x"]}',
        None,
        0.5,
    ),
    "what a class makes by another name": (
        "class A:\n    @classmethod\n    def make(cls):\n        return cls()\n    def seven(self):\n"
        "        return 7",
        "assert A.make().seven() == 7",
        None,
        1.0,
    ),
    "nodes": (
        "class N:\n    def __init__(self, val, next=None):\n        self.val, self.next = val, next\n"
        "def f(x):\n    head = None\n    for v in reversed(x):\n        head = N(v, head)\n    return head",
        "assert f([1, 2]).next.val == 2\nassert f([1]).next is None",
        None,
        1.0,
    ),
    "a function that makes functions": (
        "def f(a):\n    return lambda b: a * b",
        "assert f(3)(4) == 12",
        None,
        1.0,
    ),
    "next and in": (
        "def f(n):\n    yield from range(n)",
        "g = f(5)\nassert next(g) == 0 and next(g) == 1\nassert 3 in f(5) and 7 not in f(5)\n"
        "try:\n    next(f(0))\n    assert False\nexcept StopIteration:\n    pass",
        None,
        1.0,
    ),
    "numbers and queues of the library": (
        "from collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "def f(x):\n    return [deque(x), Fraction(1, 3), Decimal('0.10'), slice(1, 3)]",
        "from collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "q, third, tenth, part = f([1, 2, 3])\nassert q == deque([1, 2, 3]) and q.popleft() == 1\n"
        "assert third == Fraction(1, 3) and str(tenth) == '0.10'\nassert [0, 1, 2, 3][part] == [1, 2]\n"
        "assert f(deque([1]))[0] == deque([1])",
        None,
        1.0,
    ),
    "the library's names without an import": (
        "def f(x):\n    return x / 2",
        "assert isclose(f(3), 1.5)\nassert f(4) == sqrt(4)\nassert Counter('aa')['a'] == f(4)",
        None,
        1.0,
    ),
    "a name of the library's": (
        "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)",
        "assert gcd(4, 6) == 2",
        None,
        1.0,
    ),
    "one of the library's names, named": (
        "def sqrt(x):\n    return 3",
        "assert isclose(sqrt(9), 3)",
        {"entry_point": "sqrt"},
        1.0,
    ),
    "much input": ("import sys\nprint(sum(map(int, sys.stdin)))", [["1\n" * 300000, "300000"]], None, 1.0),
    "threads and asyncio": (
        "import asyncio, threading\nt = threading.Thread(target=print, args=(1,))\n"
        "t.start()\nt.join()\nasyncio.run(asyncio.sleep(0))",
        [["", "1"]],
        None,
        1.0,
    ),
    "the standard library": (
        "import collections, heapq, itertools, json, math, random, re, string, decimal, dataclasses\n"
        "@dataclasses.dataclass\nclass P:\n    x: int = 1\nprint(P())",
        [["", "P(x=1)"]],
        None,
        1.0,
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**5)\ndef f(n):\n    return n and 1 + f(n - 1)",
        "assert f(50000) == 50000",
        None,
        1.0,
    ),
    "no program": ("I don't know.", "assert add(1, 2) == 3", None, 0.0),
    "nothing at all": ("", "assert add(1, 2) == 3", None, 0.0),
    "half a character and a zero byte": ("\ud800\x00", "assert add(1, 2) == 3", None, 0.0),
    "wrong": (ADD.replace("+", "-"), "assert add(1, 2) == 3", None, 0.0),
}


# All run under the best protection, these under every other too, because they need the most of it.
NEEDY = ["a class", "much input", "threads and asyncio", "the standard library", "deep recursion"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in KINDS or [None]
        for name in HONEST
        if kind in [*KINDS, None][:1] or name in NEEDY
    ],
)
def test_a_program_earns_the_share_of_tests_that_it_passes(kind, name, under, monkeypatch):
    if refused(kind):
        return
    under(kind)
    if name.startswith("hangs"):
        monkeypatch.setattr(box, "CPU_SECONDS", 1)
    if kind == "limits" and name.startswith("threads") and os.geteuid():
        monkeypatch.setattr(box, "PROCESSES", 1 << 20)  # counts all of the user's
    program, tests, extra, expected = HONEST[name]
    assert compute_score(program, tests, extra) == pytest.approx(expected)


def test_a_completion_is_searched_for_its_last_program():
    assert extract_code("a\n```python\nx\n```\nb\n```\ny\n```\nc") == "y\n"
    assert extract_code("```py\nx\n```<answer>y</answer>") == "y"
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("```python\nx = 1") == "```python\nx = 1"
    start = time.monotonic()
    extract_code("```\n" * 100000 + "<answer>" * 100000)
    assert time.monotonic() - start < 20  # linear: 0.02 s; quadratic: minutes


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("", "no assert"),
        ("x = 1", "no assert"),
        ("assert (", "not valid Python"),
        ("[1, 2", "not JSON"),
        ([], "must be assert statements, or pairs"),
        (None, "must be assert statements, or pairs"),
        ([["1"]], "must be assert statements, or pairs"),
        ([{"input": "1"}], "must be assert statements, or pairs"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ("def check(candidate):\n    assert candidate(1) == 1", "entry_point"),
        ("assert isclose(sqrt(4), 2)", "which of isclose, sqrt is it"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_not_a_zero(tests, words):
    with pytest.raises(ValueError, match=words) as error:
        read = read_tests(tests)
        if isinstance(read, str):
            read_statements(read)
    assert "\n" not in str(error.value)


@every_kind
def test_a_test_that_hands_over_a_function_fails_and_is_said_once(kind, under, capsys):
    if refused(kind):
        return
    under(kind)
    code_grading.say_once.cache_clear()
    for _ in range(2):
        tests = "assert f(lambda x: x) == 1\nassert f(1) == 1"
        assert compute_score("def f(g):\n    return g(1) if callable(g) else g", tests) == 0.5
    assert capsys.readouterr().err.count("hands a value of type function to the answer") == 1


@every_kind
def test_nothing_that_an_answer_returns_stops_a_training(kind, under):
    """Each of these was an error that ended a run, or would be one where a type is forgotten."""
    if refused(kind):
        return
    under(kind)
    returned = (
        "memoryview(b'ab')", "deque([1, 2])", "(x for x in 'ab')", "iter([1])", "type", "lambda: 1", "len", "sys",
        "NotImplemented", "...", "array('i', [1])", "object()", "A()", "float('nan')",
    )  # fmt: skip
    answer = (
        "import sys\nfrom array import array\nfrom collections import deque\n"
        "class A:\n    def __getitem__(self, key):\n        raise MemoryError\n"
        f"def f(i):\n    return [{', '.join(returned)}][i]"
    )
    used = (
        "x[0:1]", "x[0]", "x.sort(key=lambda y: y)", "''.join(x)", "sorted(x)", "len(x)", "x + x", "x == 1",
        "bytes(x)", "x.__class__.__name__", "{x: 1}", "f'{x:>5}'", "x()", "-x", "next(x)", "list(x)",
    )  # fmt: skip
    tests = "\n".join(f"x = f({i})\nassert ({use}) == 'never'" for i in range(len(returned)) for use in used)
    assert compute_score(answer, tests) == 0.0


def test_answers_are_graded_side_by_side_within_a_bound(monkeypatch, capsys):
    monkeypatch.setattr(code_grading, "BATCH_SECONDS", 1.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    started = time.monotonic()

    def slow(answer):
        time.sleep(0.4)
        return float(answer)

    scores = code_grading.side_by_side(slow, range(100))
    assert time.monotonic() - started < 20  # one after the other 40 s
    done = [i for i, score in enumerate(scores) if score]
    assert done == list(range(1, len(done) + 1)) and 16 <= len(done) < 100
    assert f"graded {len(done) + 1} of 100 answers in 1 s" in capsys.readouterr().out


def test_statements_that_prepare_are_no_tests_and_their_failure_ends_the_run():
    statements, names, helpers = read_statements("s = Stack()\ns.push(re.I)\nassert s.pop() == 1\n'text'")
    assert [is_test for _, is_test in statements] == [False, False, True, False]
    assert (names, helpers) == (["Stack"], {"re": ("re", "")})


@every_kind
def test_a_stale_result_is_not_tested_again(kind, under):
    if refused(kind):
        return
    under(kind)
    tests = "x = f(1)\nassert x == 1\nx = f(2)\nassert x == 1"
    assert compute_score("def f(x):\n    return {1: 1}[x]", tests) == 0.5


def test_the_command_prints_protection_and_score(tmp_path, capsys):
    (tmp_path / "answer.py").write_text(ADD)
    (tmp_path / "tests.py").write_text("assert add(1, 2) == 3\nassert add(1, 2) == 4")
    command = [sys.executable, str(FOLDER / "code_reward.py"), "ANSWER=answer.py", "TESTS=tests.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS)
    if ISOLATED:
        protection = f"protection: {box.SENTENCES[ISOLATED[0]]}"
        assert result.stdout.splitlines() == [protection, "score: 0.500"]
        code_reward.main([])
        assert capsys.readouterr().out.splitlines() == [protection]
    else:
        assert result.returncode == 2 and "Remedy" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ANSWER=a.py"], "give both files"),
        (["TESTS=t.py"], "give both files"),
        (["ANSWER=/no/a.py", "TESTS=/no/t.py"], "ANSWER=/no/a.py: cannot be read"),
        (["ANSWERS=a.py"], "nearest names: ANSWER"),
    ],
)
def test_a_command_that_cannot_work_is_refused_in_one_line(arguments, words):
    with pytest.raises(UserError, match=words) as error:
        code_reward.main(arguments)
    assert "\n" not in str(error.value)
