"""Programs that cheat (hostile_programs.toml) and programs that solve the task: only the second
earn.
"""

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import hostile_programs
import pytest
from hostile_programs import HANG_SECONDS, KINDS, PROGRAMS, SECRET, filled
from measure.columns import read_csv

from sandbox import box, warden
from task import code_grading
from task.code_grading import compute_score, extract_code, read_statements, same_output
from tools import code_reward

FOLDER = Path(box.__file__).parent.parent
CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


every_kind = pytest.mark.parametrize("kind", KINDS)  # none, and pytest skips the test
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@every_kind
def test_hostile_programs_earn_nothing_reach_nothing_and_leave_nothing(kind):
    outcomes = hostile_programs.try_all(kind)
    assert outcomes == {"paid": [], "escaped": [], "outlived": [], "crashed": []}


def test_the_committed_table_is_of_these_programs():
    rows = read_csv(FOLDER / "assets" / "hostile_programs.csv")
    tried = {(row["protection"], int(row["tried"])) for row in rows}
    assert tried == {(kind, len(hostile_programs.names(kind))) for kind in box.SENTENCES}


@pytest.mark.parametrize("name", ["reads the tests' file", "searches the disk"])
def test_without_isolation_a_search_finds_the_answer(name, tmp_path):
    """The cheats are real: outside a sandbox the same program prints the expected output."""
    (tmp_path / "tests.json").write_text(filled("{OUTPUT}", SECRET=SECRET))
    program = filled(PROGRAMS[name]["program"], PUBLIC=tmp_path)
    command = [sys.executable, "-I", "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS).stdout
    assert same_output(printed, SECRET)


@pytest.fixture
def under(monkeypatch):
    """Sets the protection of compute_score, without a limit on time that an honest program could
    reach.
    """

    def set_protection(kind):
        monkeypatch.setattr(box, "protection", lambda: kind)
        monkeypatch.setattr(box, "WALL_SECONDS", HANG_SECONDS)
        monkeypatch.setattr(code_grading, "ANSWER_SECONDS", HANG_SECONDS)

    return set_protection


@every_kind
def test_all_tests_of_an_answer_share_a_time_limit(kind, under, monkeypatch):
    under(kind)
    monkeypatch.setattr(code_grading, "ANSWER_SECONDS", 1.5)
    start = time.monotonic()
    assert compute_score("import time\ntime.sleep(1)\nprint(1)", [["", "1"]] * 50) <= 0.02
    assert time.monotonic() - start < 40  # about 1.5 s; one after the other they would take 50


@only_linux
def test_without_protection_the_answer_is_refused_in_one_line(tmp_path):
    """The kernel refuses namespaces and nothing else, as in many containers; here a filter does."""
    for name, text in (("answer.py", "x = 1"), ("tests.py", "assert x == 1")):
        (tmp_path / name).write_text(text)
    program = """
from tools import code_reward
import settings
from sandbox import warden
warden._REFUSED = ["unshare 272 97, clone 56 220 0&0x7E020000"]
if warden.seccomp_filter():
    warden.install(warden.seccomp_filter())
settings.run(code_reward.main)
"""
    command = [
        sys.executable,
        "-c",
        program,
        f"ANSWER={tmp_path}/answer.py",
        f"TESTS={tmp_path}/tests.py",
    ]
    for wanted, code in (("namespaces", 2), ("limits", 0 if "limits" in KINDS else 2)):
        # the program imports from the current folder
        environment = os.environ | {"CODE_PROTECTION": wanted}
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, env=environment)
        assert done.returncode == code and ("score" in done.stdout) == (code == 0)
        if wanted == "namespaces":
            assert done.stderr.count("\n") == 1 and "not permitted. Remedy: " in done.stderr


@only_linux
def test_the_numbers_of_the_refused_calls_are_the_kernels():
    """Compares the tables with the kernel's headers where they are installed."""
    table = warden.refused_calls()
    assert len(table) > 50 and all(row[1].isdigit() and row[2].isdigit() for row in table)
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    for column, header in enumerate(headers, 1):
        if Path(header).exists():
            # Only those with a number: the others are another name for the same.
            found = re.findall(
                r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text(), re.M
            )
            defined = dict(found)
            assert sum(row[0] in defined for row in table) > 40  # the newest may be missing
            wrong = [row for row in table if defined.get(row[0], row[column]) != row[column]]
            assert not wrong


# Each could take space on the host's disk that no limit of ours counts. They say EPERM, 1, before
# they look whether the file system knows them: it's the same on any.
DISK_CALLS = """
import ctypes, errno, fcntl, os, socket
C = ctypes.CDLL(None, use_errno=True)
long, text = ctypes.c_long, ctypes.c_char_p
said = {}
def tried(name, result):
    said[name] = errno.errorcode[ctypes.get_errno()] if result == -1 else "done"
for mode in (0, 1, 16, 32):  # plain, KEEP_SIZE, ZERO_RANGE, INSERT_RANGE
    tried(f"fallocate {mode}", C.fallocate(1, mode, long(0), long(1 << 30)))
tried("fsetxattr", C.fsetxattr(1, text(b"user.x"), text(b"y" * 60000), long(60000), 0))
tried("setxattr", C.setxattr(text(b"/.answer"), text(b"user.x"), text(b"y"), long(1), 0))
tried("lsetxattr", C.lsetxattr(text(b"/.answer"), text(b"user.x"), text(b"y"), long(1), 0))
for name, number in {
    "RESVSP": 0x40305828, "RESVSP64": 0x4030582A, "ZERO_RANGE": 0x40305839, "FICLONE": 0x40049409,
    "FICLONERANGE": 0x4020940D, "FIDEDUPERANGE": 0xC0189436, "SETFLAGS": 0x40086602,
    "FSSETXATTR": 0x401C5820, "EXT4_MOVE_EXT": 0xC028660F, "TIOCSTI": 0x5412,
}.items():
    tried(name, C.ioctl(1, ctypes.c_ulong(number), ctypes.create_string_buffer(64)))
    tried(f"{name} and high bits", C.ioctl(1, ctypes.c_ulong(number | 1 << 32),
          ctypes.create_string_buffer(64)))
# what Python's own library asks of ioctl goes on working
a, b = socket.socketpair()
a.setblocking(False)
os.set_inheritable(a.fileno(), True)
os.set_inheritable(a.fileno(), False)
b.send(b"four")
waiting = bytearray(4)
fcntl.ioctl(a, 0x541B, waiting)
assert int.from_bytes(waiting, "little") == 4 and not os.isatty(1)
try:
    os.get_terminal_size(1)
except OSError as error:
    assert error.errno == errno.ENOTTY
print(sorted({name for name, what in said.items() if what != "EPERM"}), len(said),
      os.fstat(1).st_blocks * 512)
"""


@every_kind
def test_no_call_takes_space_on_the_hosts_disk_beyond_the_limit(kind):
    """RLIMIT_FSIZE doesn't count what fallocate reserves beyond the end of the output's file."""
    with box.started(DISK_CALLS, kind) as running:
        printed, _ = box.output(*running)
    assert printed == "[] 27 0\n"


HONEST = tomllib.loads(Path(__file__).with_name("honest_programs.toml").read_text()) | {
    "much input": {
        "program": "import sys\nprint(sum(map(int, sys.stdin)))",
        "tests": [["1\n" * 300000, "300000"]],
        "score": 1.0,
    },
    "half a character and a zero byte": {
        "program": "\ud800\x00",
        "tests": "assert add(1, 2) == 3",
        "score": 0.0,
    },
}


@every_kind
def test_plain_data_come_back_as_they_were_returned(kind):
    RETURNED = CASES["RETURNED"]
    answer = (
        "from collections import *\nfrom datetime import *\nfrom decimal import *\nfrom enum "
        "import *\nfrom fractions import *\nfrom itertools import *\n"
        f"def f(i):\n    return [{', '.join(f'lambda: {text}' for text in RETURNED)}][i]()"
    )
    tests = "\n".join(f"r = f({i})\nassert {held}" for i, held in enumerate(RETURNED.values()))
    end = time.monotonic() + HANG_SECONDS
    verdicts = code_grading._verdicts(answer, read_statements(tests), kind, end)
    assert [text for text, passed in zip(RETURNED, verdicts, strict=True) if not passed] == []


NEEDY = [
    "a class",
    "much input",
    "threads and asyncio",
    "the standard library",
    "deep recursion",
    "a stale result is not tested again",
    "each program starts in an empty folder",
    "a program has no capabilities",
]


# All run under the best protection; those that need the most of it, under every other, too.
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in HONEST if kind == KINDS[0] or name in NEEDY],
)
def test_a_program_earns_the_share_of_tests_that_it_passes(kind, name, under, monkeypatch):
    under(kind)
    if name.startswith("hangs"):
        monkeypatch.setattr(box, "CPU_SECONDS", 1)
    if kind == "limits" and name.startswith("threads") and os.geteuid():
        monkeypatch.setattr(box, "PROCESSES", 1 << 20)  # counts all of the user's
    honest = HONEST[name]
    score = compute_score(
        honest["program"], honest["tests"], {"entry_point": honest.get("entry_point")}
    )
    assert score == pytest.approx(honest["score"])


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
        ("assert f(1) == g(1)", "entry_point='f"),
        ("x = 1", "no assert"),
        ("assert (", "not valid Python"),
        ("[1, 2", "not JSON"),
        ([], "must be assert statements, or pairs"),
        ([["1"]], "must be assert statements, or pairs"),
        ([{"input": "1"}], "must be assert statements, or pairs"),
        ({"inputs": ["1"], "outputs": []}, "must be assert statements, or pairs"),
        ("def check(candidate):\n    assert candidate(1) == 1", "entry_point"),
        ("assert isclose(sqrt(4), 2)", "which of isclose, sqrt is the answer's"),
        ("assert sum([1, 2]) == 3", "no name in it is the answer's;"),
        ("assert encode(1) == decode(2)", "which of decode, encode is the answer's"),
        ("assert f(1) == np.pi", "which of f, np is the answer's"),
        ("assert f(T(1)) == 1", "which of T, f is the answer's"),
        (
            "from solution import f\nassert f(1) == approx(3) + np.pi",
            "approx, np is neither defined",
        ),
        ("import numpy as np\nassert f(1) == np.pi", "'import numpy as np': tests have"),
        (
            "def test_it():\n    from pytest import approx\n    assert f(1)",
            "'from pytest import approx'",
        ),
        ("from . import g\nassert f(1)", "'from . import g'"),
        ("from math import *\nassert gcd(4, 6) == 2", "import its names one by one"),
        (
            "from solution import f\ndef f(x):\n    return 1\nassert f(1) == 1",
            "no assert statement uses the answer",
        ),
        (
            "from solution import f\nassert True\nassert 1 + 1 == 2",
            "no assert statement uses the answer",
        ),
        (
            "from solution import f\nx = f(1)\ndef ok(y):\n    assert y\nok(1)",
            "no assert statement uses",
        ),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_not_a_zero(tests, words):
    with pytest.raises(ValueError, match=words) as error:
        code_grading.readable_tests(
            tests, {"entry_point": "f("} if words == "entry_point='f" else None
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tests", "entry_point", "names"),
    [
        ("assert gcd(4, 6) == 2", "", {"gcd": "gcd"}),
        ("assert gcd(4, 6) == f(2)", "", {"f": "f"}),
        ("assert add(1, 2) == 3 and operator.add(1, 2) == 3", "", {"add": "add"}),
        ("assert sum([1]) == max(1, 1)", "sum", {"sum": "sum"}),
        ("assert time.time() > f(1) > date.min", "", {"f": "f"}),
        ("assert f(Fraction(1)) == mean([1])", "", {"f": "f"}),
        ("from answer import add as plus\nassert plus(1, 2) == 3", "", {"plus": "add"}),
        ("from solution import *\nassert f(1) == 1", "", {"f": "f"}),
        ("def check(f):\n    assert f(1) == g(1)\ncheck(g)", "", {"g": "g"}),
        ("def check(f):\n    assert f([1]) == sum([1])", "sum", {"f": "sum"}),
        ("def check(f):\n    assert f(4, 6) == gcd(4, 6)", "gcd", {"f": "gcd"}),
        ("from solution import f, g\nassert f(1) == 1", "", {"f": "f"}),
        ("def g(x):\n    return f(x)\ndef check(h):\n    assert h(1)\ncheck(g)", "", {"f": "f"}),
    ],
)
def test_names_are_the_answers_or_the_librarys(tests, entry_point, names):
    assert read_statements(tests, entry_point or None)[1] == names


@pytest.mark.parametrize(
    ("tests", "counted"),
    [
        ("assert True\nassert f(1) == 1", [False, True]),
        ("x = f([])\nassert x == 1\ny = 1\nassert y == 1", [False, True, False, False]),
        ("x = []\nf(x)\nassert x == [1]", [False, False, True]),
        ("def ok(x):\n    assert x\ny = ok(f(1))\nok(y)\nok(1)", [False, True, True, False]),
        ("def g():\n    return f(1)\nassert g() == 1", [False, True]),
        ("def g():\n    assert f(1) == 1\ng()", [False, True]),
        (
            "import math\nx = math.sqrt(f(4))\nassert math.pi > 3\nassert x == 2",
            [False, False, False, True],
        ),
    ],
)
def test_what_does_not_depend_on_the_answer_is_no_test(tests, counted):
    statements, _ = read_statements(f"from solution import f\n{tests}")
    assert [is_test for _, is_test in statements] == counted


@every_kind
def test_nothing_that_an_answer_returns_stops_a_training(kind, under):
    """Each of these was an error that ended a run, or would be one where a type is forgotten."""
    under(kind)
    returned = [
        "memoryview(b'ab')",
        "deque([1, 2])",
        "(x for x in 'ab')",
        "iter([1])",
        "type",
        "lambda: 1",
        "len",
        "sys",
        "NotImplemented",
        "...",
        "array('i', [1])",
        "object()",
        "A()",
        "float('nan')",
    ]
    used = [
        "x[0:1]",
        "x[0]",
        "x.sort(key=lambda y: y)",
        "''.join(x)",
        "sorted(x)",
        "len(x)",
        "x + x",
        "x == 1",
        "bytes(x)",
        "x.__class__.__name__",
        "{x: 1}",
        "f'{x:>5}'",
        "x()",
        "-x",
        "next(x)",
        "list(x)",
    ]
    answer = (
        "import sys\n"
        "from array import array\n"
        "from collections import deque\n"
        "class A:\n"
        "    def __getitem__(self, key):\n"
        "        raise MemoryError\n"
        "def f(i):\n"
        f"    return [{', '.join(returned)}][i]"
    )
    tests = "\n".join(
        f"x = f({i})\nassert ({use}) == 'never'" for i in range(len(returned)) for use in used
    )
    assert compute_score(answer, tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        (
            "match f(3):\n"
            "    case {'a': 1, **rest}:\n"
            "        r = 0\n"
            "    case [a, b]:\n"
            "        r = a + b\n"
            "assert r == 5"
        ),
        (
            "match {'a': f(3)}:\n"
            "    case {'b': c, **rest} | {'a': c, **rest}:\n"
            "        assert c == [2, 3] and not rest"
        ),
        "match f(3):\n    case [a, *rest]:\n        pass\nassert rest == [3]",
        "async def test_f():\n    assert f(3) == [2, 3]",
        "async def check(candidate):\n    assert candidate(3) == [2, 3]",
        "import asyncio\nasync def main():\n    assert f(3) == [2, 3]\nasyncio.run(main())",
        "async def get():\n    return f(3)\nimport asyncio\nassert asyncio.run(get()) == [2, 3]",
        "def same[T](x: T, y: T):\n    assert x == y\nsame(f(3), [2, 3])",
        "type Pair = list[int]\nx: Pair = f(3)\nassert x == [2, 3]",
        "if (n := f(3)):\n    assert n == [2, 3]",
        (
            "try:\n"
            "    raise ValueError(f(3))\n"
            "except ValueError as g:\n"
            "    assert g.args == ([2, 3],)"
        ),
    ],
)
def test_what_python_accepts_is_a_test_and_still_tells_right_from_wrong(tests):
    if KINDS in ([], ["limits"]):
        pytest.skip("no isolation works on this machine")
    extra = {"entry_point": "f"} if "check" in tests else None
    for returned, score in (("[2, 3]", 1.0), ("[2, 4]", 0.0)):
        assert compute_score(f"def f(x):\n    return {returned}", tests, extra) == score


def test_answers_are_graded_side_by_side_and_all_of_them():
    started = time.monotonic()

    def slow(answer):
        time.sleep(0.4)
        return float(answer)

    assert code_grading.side_by_side(slow, range(40), 8) == list(map(float, range(40)))
    assert time.monotonic() - started < 10  # one after the other 16 s


@only_linux
def test_no_more_answers_at_once_than_the_container_has_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    file = tmp_path / "cpu.max"
    assert box.processors(str(file)) == 6
    for text, count in {
        "max 100000": 6,
        "300000 100000": 3,
        "900000 100000": 6,
        "50000 100000": 1,
    }.items():
        file.write_text(text + "\n")
        assert box.processors(str(file)) == count


def test_the_command_prints_protection_and_score(tmp_path, capsys):
    if KINDS in ([], ["limits"]):
        pytest.skip("no isolation works on this machine")
    protection = f"protection: {box.SENTENCES[KINDS[0]]}"
    add = "def add(a, b):\n    return a + b"
    pairs = '{"inputs": ["1\\n", "2\\n"], "outputs": ["1\\n", "4\\n"]}'
    for answer, tests, failed in (
        (add, "assert add(1, 2) == 3\nassert add(1, 2) == 4", "assert add(1, 2) == 4"),
        ("print(int(input()))", pairs, r"input '2\n', expected output '4\n'"),
    ):
        files = [tmp_path / "answer.py", tmp_path / "tests.py"]
        for path, text in zip(files, (answer, tests)):
            path.write_text(text)
        code_reward.main([f"ANSWER={files[0]}", f"TESTS={files[1]}"])
        assert capsys.readouterr().out.splitlines() == [
            protection,
            "score: 0.500",
            f"failed: {failed}",
        ]
