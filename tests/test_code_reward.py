"""Programs that cheat (hostile_programs.py) and programs that solve the task: only the second kind scores."""

import csv
import fcntl
import itertools
import os
import subprocess
import sys
import termios
import time
from pathlib import Path

import hostile_programs
import pages
import pytest
import try_hostile_programs
from hostile_programs import HANG_SECONDS, KINDS, OUTPUT, PROGRAMS, SECRET

from sandbox import box, warden
from settings import UserError
from task import code_grading
from task.code_grading import compute_score, extract_code, read_statements, read_tests, same_output
from tools import code_reward

FOLDER = Path(box.__file__).parent.parent


NAMESPACES = (os.CLONE_NEWNS, os.CLONE_NEWCGROUP, os.CLONE_NEWUTS, os.CLONE_NEWIPC, os.CLONE_NEWUSER)
NAMESPACES += (os.CLONE_NEWPID, os.CLONE_NEWNET)
FCNTL = ("F_SETOWN", "F_SETSIG", "F_SETLEASE", "F_SETPIPE_SZ")


ISOLATED = [kind for kind in KINDS if kind != "limits"]
UNPROTECTED = pytest.mark.skip(reason="no protection works on this machine")

every_kind = pytest.mark.parametrize("kind", KINDS or [pytest.param(None, marks=UNPROTECTED)])

# ---------------------------------------------------------------- programs that cheat


@pytest.fixture(scope="module")
def outcomes():
    return {kind: hostile_programs.try_all(kind) for kind in KINDS}


TRIED = [(kind, name) for kind in KINDS for name in hostile_programs.names(kind)]


@pytest.mark.parametrize(("kind", "name"), TRIED or [pytest.param(None, None, marks=UNPROTECTED)])
def test_a_hostile_program_is_not_paid_and_ends(kind, name, outcomes):
    assert outcomes[kind].scores[name] == 0.0  # nor an exception, which is the grader's
    assert name not in outcomes[kind].crashed()


@every_kind
def test_nothing_is_left_of_the_hostile_programs_and_nothing_was_reached(kind, outcomes):
    assert not outcomes[kind].escaped
    assert not outcomes[kind].outlived


def test_the_limits_that_the_readme_names_are_in_force():
    text = " ".join(pages.text(FOLDER, "english").split())
    for limit in (
        f"{box.WALL_SECONDS:.0f} s by the clock, {box.CPU_SECONDS} s of processor time",
        f"{box.MEMORY_BYTES >> 20} MiB of memory a process, {box.PROCESSES} processes or threads",
        f"{box.DISK_BYTES >> 20} MiB in 1,024 files, {box.OPEN_FILES} open files",
        f"{box.OUTPUT_BYTES >> 20} MiB of output; {code_grading.ANSWER_SECONDS:.0f} s for all tests",
        f"{code_grading.BATCH_SECONDS:.0f} s for the answers of a step",
    ):
        assert limit in text


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_table_of_the_hostile_programs_is_the_committed_csv(language):
    text = pages.text(FOLDER, language)
    with open(FOLDER / "assets" / "hostile_programs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["protection"], row["user"]) for row in rows} == set(
        itertools.product(box.SENTENCES, ("root", "another"))
    )
    for row in rows:
        assert int(row["tried"]) == len(hostile_programs.names(row["protection"]))
        cells = [row[name] for name in ("tried", "paid", "escaped", "outlived", "crashed")]
        assert f" {' | '.join(cells)} |" in next(
            line
            for line in text.splitlines()
            if line.startswith(f"| `{row['protection']}` | {row['user']} |")
        )


def test_only_on_request_trying_them_writes_the_committed_table(tmp_path, monkeypatch, capsys):
    committed = FOLDER / "assets" / "hostile_programs.csv"
    before = committed.read_bytes()
    monkeypatch.setattr(hostile_programs, "KINDS", ["limits"])
    nothing = hostile_programs.Outcomes({"a": 0.0}, {"a": 1.0}, [], [])
    monkeypatch.setattr(hostile_programs, "try_all", lambda kind: nothing)
    try_hostile_programs.main([])
    assert committed.read_bytes() == before and "'paid': 0" in capsys.readouterr().out
    (tmp_path / "table.csv").write_bytes(before)
    try_hostile_programs.main([f"TABLE={tmp_path / 'table.csv'}"])
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    user = "another" if os.geteuid() else "root"
    assert [row["protection"] for row in rows if row["user"] == user] == ["limits"]
    assert [row for row in rows if row["user"] != user] == [
        row for row in csv.DictReader(before.decode().splitlines()) if row["user"] != user
    ]


@pytest.mark.parametrize("name", ["reads the tests' file", "searches the disk"])
def test_without_isolation_a_search_finds_the_answer(name, tmp_path):
    """The cheats are real: outside a sandbox the same program prints the expected output."""
    (tmp_path / "tests.json").write_text(OUTPUT.replace("{SECRET}", SECRET))
    program = PROGRAMS[name].program.replace("{PUBLIC}", str(tmp_path))
    command = [sys.executable, "-I", "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS).stdout
    assert same_output(printed, SECRET)


# ---------------------------------------------------------------- the limits


@pytest.fixture
def under(monkeypatch):
    """Sets the protection of compute_score, without a limit on time that an honest program could reach."""

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


@every_kind
def test_each_program_starts_in_an_empty_folder_without_our_environment(kind, under, monkeypatch):
    under(kind)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = "import os\nprint(os.listdir(), 'HF_TOKEN' in os.environ)\nopen('x', 'w').close()"
    assert compute_score(program, [["", "[] False"]] * 2) == 1.0


def test_without_protection_the_answer_is_refused_in_one_line(tmp_path):
    """The kernel refuses namespaces and nothing else, as in many containers; here a filter does."""
    for name, text in (("answer.py", "x = 1"), ("tests.py", "assert x == 1")):
        (tmp_path / name).write_text(text)
    program = """
from tools import code_reward
import settings
from sandbox import warden
warden._REFUSED, warden._REFUSED_WITH = "unshare 272 97", "clone 56 220 0&0x7E020000"
if warden.seccomp_filter():
    warden.install(warden.seccomp_filter())
settings.run(code_reward.main)
"""
    files = [f"ANSWER={tmp_path}/answer.py", f"TESTS={tmp_path}/tests.py"]
    command = [sys.executable, "-c", program, *files]  # imports from the current folder
    results = [
        subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, timeout=HANG_SECONDS,
            env=os.environ | {"CODE_PROTECTION": wanted},
        )
        for wanted in ("auto", "limits")
    ]  # fmt: skip
    assert [result.returncode for result in results] == [2, 0 if "limits" in KINDS else 2]
    assert results[0].stderr.count("\n") == 1
    for word in ("CODE_PROTECTION=auto", "bubblewrap", "namespaces: ", "not permitted", "Remedy"):
        assert word in results[0].stderr
    assert "score" not in results[0].stdout


def test_an_unknown_protection_is_refused():
    with pytest.raises(
        ValueError, match=r"CODE_PROTECTION=none: must be auto, bubblewrap, namespaces, limits"
    ):
        box.protection("none")


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_the_numbers_of_the_refused_calls_are_the_kernels():
    """Compares the tables with the kernel's headers where they are installed, and with Python's constants."""
    with_arguments = [line.split() for line in warden._REFUSED_WITH.strip().splitlines()]
    table = [call.split() for call in warden._REFUSED.replace(",", "\n").strip().splitlines()]
    assert all(len(row) == 3 for row in table) and all(len(row) > 3 for row in with_arguments)
    table += [row[:3] for row in with_arguments]
    assert all(row[1].isdigit() and row[2].isdigit() for row in table)
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    for column, header in enumerate(headers, 1):
        if Path(header).exists():
            defined = {}
            for line in Path(header).read_text().splitlines():
                if line.startswith("#define __NR"):
                    name, number = line.split()[1:3]
                    if number.isdigit():  # not another name for the same
                        defined[name.removeprefix("__NR").removeprefix("3264").removeprefix("_")] = number
            assert sum(row[0] in defined for row in table) > 40  # the newest may be missing
            wrong = [row for row in table if defined.get(row[0], row[column]) != row[column]]
            assert not wrong
    assert {row[0]: set(row[3:]) for row in with_arguments} == {
        "clone": {f"0&0x{sum(NAMESPACES):X}"},
        "prlimit64": {"0&0xFFFFFFFF"},
        "prctl": {"0=1"},  # PR_SET_PDEATHSIG
        "fcntl": {"1=15", *(f"1={getattr(fcntl, name)}" for name in FCNTL)},  # 15: F_SETOWN_EX
        "ioctl": {f"1=0x{termios.FIOASYNC:X}", "1=0x8901", "1=0x8902"},  # FIOSETOWN, SIOCSPGRP
        "sendto": {"4&0xFFFFFFFF", "4.5&0xFFFFFFFF"},
    }


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
    "objects that change": (
        """
class Counter:
    unit = 1
    def __init__(self, left):
        self.left = left
    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left
    def __call__(self, self_=0, *, more):
        self.left += more
        return self.left
    def __iter__(self):
        return iter(range(self.left))
    def __len__(self):
        return self.left
    def __getitem__(self, i):
        return list(self)[i]
    def __setitem__(self, i, value):
        self.left = value
    def __repr__(self):
        return f"Counter({self.left})"
    @staticmethod
    def twice(x):
        return 2 * x
def empty(counter):
    counter.left = 0
""",
        "c = Counter(3)\nassert c.left == len(c) == 3 and callable(c) and hasattr(c, 'left')\n"
        "assert next(c) == 2 and c.left == 2 and c[1] == 1 and not hasattr(c, 'right')\n"
        "assert c(more=5) == 7 == c.left and 6 in c and list(c) == [*range(7)] and repr(c) == 'Counter(7)'\n"
        "empty(c)\nassert c.left == 0 and list(c) == []\nassert next(c, None) is None\nc[0] = 2\n"
        "assert len(c) == 2 and Counter.twice(4) == 8 and Counter.unit == 1\nassert Counter(5).left == 5\n"
        "for other in (c, Counter(1)):\n"
        "    empty(other)\n    assert other.left == 0",
        {"entry_point": "Counter, empty"},
        1.0,
    ),
    "a class made of another": (
        "from collections import OrderedDict\nclass Cache(OrderedDict):\n    def put(self, key, value):\n"
        "        self[key] = value\n        self.move_to_end(key)",
        "c = Cache()\nc.put(1, 2)\nassert c[1] == 2 and c.get(3) is None and len(c) == 1 and 1 in c",
        None,
        1.0,
    ),
    "several names": (
        "def encode(x):\n    return x + 1\ndef decode(x):\n    return x",
        "assert decode(encode(3)) == 3\nassert encode(3) == 4",
        {"entry_point": "encode, decode"},
        0.5,
    ),
    "one of two names": (
        "def encode(x):\n    return x + 1",
        "from solution import encode, decode as back\nassert back(encode(3)) == 3\nassert encode(3) == 4",
        None,
        0.5,
    ),
    "one of two names, and the other a builtin's": (
        ADD,
        "assert add(1, 2) == 3\nassert sum([1, 2]) == 3",
        {"entry_point": "add, sum"},
        0.5,
    ),
    "a missing name where an error is expected": (
        ADD,
        "assert add(1, 2) == 3\ntry:\n    g(-1)\nexcept Exception:\n    pass\nelse:\n    assert False",
        {"entry_point": "add, g"},
        0.5,
    ),
    "a function with a capital": ("def Fib(n):\n    return n", "assert Fib(5) == 5", None, 1.0),
    "a method for check": (
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        "def check(add):\n    assert True\n    assert add(1, 2) == 3\n    assert add(1, 2) == 4",
        {"entry_point": "Solution().add"},
        0.5,
    ),
    "the name of a builtin, for check": (
        "def sum(x):\n    return len(x)",
        "def check(f):\n    assert f([1, 1]) == sum([1, 1])\n    assert f([2]) == sum([2])",
        {"entry_point": "sum"},
        0.5,
    ),
    "tests of its own file": (
        ADD,
        "def test():\n    assert add(1, 2)\ntest()\nif __name__ == '__main__':\n    assert add(1, 2) == 4",
        None,
        0.5,
    ),
    "an expected error, by its kind": (
        "def f(x):\n    return x.decode()",
        "try:\n    f(b'\\xff')\n    assert False\nexcept UnicodeDecodeError:\n    pass",
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
    "objects of its own": (
        "class a:\n    val = 7\ndef f(x):\n    return a()\ndef g(x):\n    return f",
        "from solution import a, f, g\nassert f(1).val == 7\nassert g(1)(2).val\nassert a()\nassert g(1)",
        None,
        0.0,
    ),
    "no program": ("I don't know.", "assert add(1, 2) == 3", None, 0.0),
    "nothing at all": ("", "assert add(1, 2) == 3", None, 0.0),
    "half a character and a zero byte": ("\ud800\x00", "assert add(1, 2) == 3", None, 0.0),
    "wrong": (ADD.replace("+", "-"), "assert add(1, 2) == 3", None, 0.0),
}


RETURNED = {  # unusual, but plain: what a function returns, and what holds of it
    "None": "r is None",
    "True": "r is True",
    "True + True": "type(r) is int and r == 2",
    "-(10**5000)": "r == -(10**5000)",
    "-0.0": "str(r) == '-0.0'",
    "5e-324": "r == 5e-324",
    "float('nan')": "r != r",
    "float('-inf')": "r == -math.inf",
    "1 + 2j": "r == 1 + 2j",
    "complex('nan+infj')": "r.imag == inf",
    "''": "r == ''",
    r"'\ud800\x00\n'": r"r == '\ud800\x00\n'",
    "'中文 é 👍'": "r == '中文 é 👍' and len(r) == 6",
    "'x' * 100_000": "len(r) == 100_000",
    "type('S', (str,), {})('a')": "r == 'a' and r.isalpha()",
    r"b'\x00\xff'": r"r == b'\x00\xff'",
    "bytearray(b'ab')": "type(r) is bytearray and r.decode() == 'ab'",
    "[]": "r == [] and not r",
    "[[], [[]], ()]": "r == [[], [[]], ()]",
    "list(range(20_000))": "r == list(range(20_000))",
    "[1, 2.0, '3', None, (4,), {5}]": "r == [1, 2.0, '3', None, (4,), {5}]",
    "((1, [2]), {3})": "r == ((1, [2]), {3}) and type(r[0]) is tuple",
    "set()": "r == set() and type(r) is set",
    "{1, 'a', None, (2,)}": "r == {1, 'a', None, (2,)}",
    "{frozenset({1}): (2,)}": "r[frozenset({1})] == (2,)",
    "{None: 1, True: 2, (1, 2): 3, 1.5: 4}": "r == {None: 1, True: 2, (1, 2): 3, 1.5: 4}",
    "{'b': {'c': {}}, 'a': 1}": "list(r) == ['b', 'a'] and r['b']['c'] == {}",
    "Counter('aab')": "r == Counter('aab') and r['a'] == 2",
    "defaultdict(list, a=[1])": "r == {'a': [1]}",
    "OrderedDict(b=1, a=2)": "list(r.items()) == [('b', 1), ('a', 2)]",
    "namedtuple('P', 'x y')(1, 2)": "r == (1, 2)",
    "deque([1, 2], maxlen=2)": "r == deque([1, 2]) and r.popleft() == 1",
    "{'b': 1, 'a': 2}.keys()": "list(r) == ['b', 'a'] and r == {'a', 'b'} and not isinstance(r, list)",
    "{'b': 1, 'a': 2}.values()": "list(r) == [1, 2]",
    "{'b': 1, 'a': 2}.items()": "('b', 1) in r and dict(r) == {'a': 2, 'b': 1}",
    "range(10, 0, -3)": "r == range(10, 0, -3) and 7 in r",
    "slice(1, None, 2)": "'abcd'[r] == 'bd'",
    "(x * x for x in range(3))": "next(r) == 0 and list(r) == [1, 4] and next(r, None) is None",
    "map(str, [1, 2])": "''.join(r) == '12'",
    "filter(None, [0, 1])": "not callable(r) and [*r] == [1]",
    "zip('ab', [1, 2])": "dict(r) == {'a': 1, 'b': 2}",
    "enumerate('ab')": "sorted(r) == [(0, 'a'), (1, 'b')]",
    "reversed([1, 2])": "tuple(r) == (2, 1)",
    "permutations('abc')": "len(set(r)) == 6",
    "iter([])": "list(r) == [] and not hasattr(r, '__len__')",
    "[iter([1]), {2: map(abs, [-3])}]": "list(r[0]) == [1] and list(r[1][2]) == [3]",
    "Fraction(1, 3)": "r == Fraction(1, 3) and r * 3 == 1",
    "Decimal('0.10')": "r == Decimal('0.1') and str(r) == '0.10'",
    "Decimal('NaN')": "r.is_nan()",
    "date(2020, 2, 29)": "r == date(2020, 2, 29) and r.year == 2020",
    "datetime(2020, 1, 1, 12, tzinfo=timezone.utc)": "r.isoformat() == '2020-01-01T12:00:00+00:00'",
    "[time(1, 2), timedelta(1, 2, 3)]": "r == [time(1, 2), timedelta(1, 2, 3)]",
    "IntEnum('E', 'A B').B": "r == 2",
    "StrEnum('E', 'A B').B": "r == 'b'",
}


@every_kind
def test_plain_data_come_back_as_they_were_returned(kind):
    assert len(RETURNED) >= 50
    answer = (
        "from collections import *\nfrom datetime import *\nfrom decimal import *\nfrom enum import *\n"
        "from fractions import *\nfrom itertools import *\n"
        f"def f(i):\n    return [{', '.join(f'lambda: {text}' for text in RETURNED)}][i]()"
    )
    tests = "\n".join(f"r = f({i})\nassert {held}" for i, held in enumerate(RETURNED.values()))
    end = time.monotonic() + HANG_SECONDS
    verdicts = code_grading._verdicts(answer, tests, None, kind, end)
    assert [text for text, passed in zip(RETURNED, verdicts, strict=True) if not passed] == []


# All run under the best protection, these under every other too, because they need the most of it.
NEEDY = ["a class", "much input", "threads and asyncio", "the standard library", "deep recursion"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in HONEST if kind == KINDS[0] or name in NEEDY]
    or [pytest.param(None, None, marks=UNPROTECTED)],
)
def test_a_program_earns_the_share_of_tests_that_it_passes(kind, name, under, monkeypatch):
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
        ("assert isclose(sqrt(4), 2)", "which of isclose, sqrt is the answer's"),
        ("assert sum([1, 2]) == 3", "no name in it is the answer's;"),
        ("assert encode(1) == decode(2)", "which of decode, encode is the answer's"),
        ("assert gcd(4, 6) == approx(2)", ": approx is neither defined"),
        ("assert f(1) == np.pi", ": np is neither defined"),
        ("assert f(T(1)) == 1", "which of T, f is the answer's"),
        (
            "from solution import f\nassert f(1) == approx(3) + np.pi",
            "approx, np is neither defined",
        ),
        (
            "import numpy as np\nassert f(1) == np.pi",
            "'import numpy as np': tests have",
        ),
        ("def test_it():\n    from pytest import approx\n    assert f(1)", "'from pytest import approx'"),
        ("from . import g\nassert f(1)", "'from . import g'"),
        ("from math import *\nassert gcd(4, 6) == 2", "import its names one by one"),
        (
            "from solution import f\ndef f(x):\n    return 1\nassert f(1) == 1",
            "no assert statement uses the answer",
        ),
        ("from solution import f\nassert True\nassert 1 + 1 == 2", "no assert statement uses the answer"),
        ("from solution import f\nx = f(1)\ndef ok(y):\n    assert y\nok(1)", "no assert statement uses"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_not_a_zero(tests, words):
    with pytest.raises(ValueError, match=words) as error:
        read = read_tests(tests)
        if isinstance(read, str):
            read_statements(read)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("entry_point", ["f(", "f = 1", 3, "1"])
def test_an_entry_point_that_names_nothing_is_an_error(entry_point):
    with pytest.raises(ValueError, match="entry_point"):
        read_statements("assert f(1) == g(1)", entry_point)


@pytest.mark.parametrize(
    ("tests", "entry_point", "names", "library"),
    [
        ("assert gcd(4, 6) == 2", None, {"gcd": "gcd"}, {}),
        ("assert gcd(4, 6) == f(2)", None, {"f": "f"}, {"gcd": ("math", "gcd")}),
        ("assert add(1, 2) == 3 and operator.add(1, 2) == 3", None, {"add": "add"},
         {"operator": ("operator", "")}),
        ("assert sum([1]) == max(1, 1)", "sum", {"sum": "sum"}, {}),
        ("assert f(1) == copy.deepcopy([1])", None, {"f": "f"}, {"copy": ("copy", "")}),
        ("assert f(1) == copy([1])", None, {"f": "f"}, {"copy": ("copy", "copy")}),
        ("assert time.time() > f(1) > date.min", None, {"f": "f"},
         {"date": ("datetime", "date"), "time": ("time", "")}),
        ("assert f(Fraction(1)) == mean([1])", None, {"f": "f"},
         {"Fraction": ("fractions", "Fraction"), "mean": ("statistics", "mean")}),
        ("from answer import add as plus\nassert plus(1, 2) == 3", None, {"plus": "add"}, {}),
        ("from solution import *\nassert f(1) == 1", None, {"f": "f"}, {}),
        ("def check(f):\n    assert f(1) == g(1)\ncheck(g)", None, {"f": "g", "g": "g"}, {}),
        ("def check(f):\n    assert f([1]) == sum([1])", "sum", {"f": "sum"}, {}),
        ("def check(f):\n    assert f(4, 6) == gcd(4, 6)", "gcd", {"f": "gcd"}, {"gcd": ("math", "gcd")}),
        ("assert f(1) == datetime.strptime('', '')", None, {"f": "f"},
         {"datetime": ("datetime", "datetime")}),
        ("from solution import f, g\nassert f(1) == 1", None, {"f": "f"}, {}),
        ("def g(x):\n    return f(x)\ndef check(h):\n    assert h(1)\ncheck(g)", None, {"f": "f"}, {}),
    ],
)  # fmt: skip
def test_names_are_the_answers_or_the_librarys(tests, entry_point, names, library):
    assert read_statements(tests, entry_point)[1:] == (names, library)


@pytest.mark.parametrize(
    ("tests", "counted"),
    [
        ("assert True\nassert f(1) == 1", [False, True]),
        ("x = f([])\nassert x == 1\ny = 1\nassert y == 1", [False, True, False, False]),
        ("x = []\nf(x)\nassert x == [1]", [False, False, True]),
        ("def ok(x):\n    assert x\ny = ok(f(1))\nok(y)\nok(1)", [False, True, True, False]),
        ("def g():\n    return f(1)\nassert g() == 1", [False, True]),
        ("def g():\n    assert f(1) == 1\ng()", [False, True]),
        ("import math\nx = math.sqrt(f(4))\nassert math.pi > 3\nassert x == 2", [False, False, False, True]),
    ],
)
def test_what_does_not_depend_on_the_answer_is_no_test(tests, counted):
    statements, _, _ = read_statements(f"from solution import f\n{tests}")
    assert [is_test for _, is_test in statements] == counted


@every_kind
@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("assert S().f(lambda x: x) == 1", "hands a value of type function to the answer: assert S()"),
        ("assert S() == 1", "compares the answer's object, or takes it for true: assert S()"),
        ("s = S()\ns.x = 1\nassert s.f(1) == 1", "sets an attribute of the answer's object: s.x = 1"),
    ],
)
def test_a_test_that_can_never_hold_fails_and_is_said_once(test, words, kind, under, capsys):
    under(kind)
    code_grading.say_once.cache_clear()
    for _ in range(2):
        answer = "class S:\n    def f(self, g):\n        return g(1) if callable(g) else g\n    __eq__ = f"
        assert compute_score(answer, f"assert S().f(1) == 1\n{test}") == 0.5
    assert capsys.readouterr().err.count(f"a test {words}") == 1


@every_kind
def test_nothing_that_an_answer_returns_stops_a_training(kind, under):
    """Each of these was an error that ended a run, or would be one where a type is forgotten."""
    under(kind)
    returned = (
        "memoryview(b'ab')", "deque([1, 2])", "(x for x in 'ab')", "iter([1])", "type", "lambda: 1", "len",
        "sys", "NotImplemented", "...", "array('i', [1])", "object()", "A()", "float('nan')",
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


def test_answers_are_graded_side_by_side_within_a_bound(capsys):
    started = time.monotonic()

    def slow(answer):
        time.sleep(0.4)
        return float(answer)

    scores = code_grading.side_by_side(slow, range(100), 1.0, 8)
    assert time.monotonic() - started < 20  # one after the other 40 s
    done = [i for i, score in enumerate(scores) if score]
    assert done == list(range(1, len(done) + 1)) and 16 <= len(done) < 100
    assert f"graded {len(done) + 1} of 100 answers in 1 s" in capsys.readouterr().out


def test_statements_that_prepare_are_no_tests_and_their_failure_ends_the_run():
    statements, names, library = read_statements("s = Stack()\ns.push(re.I)\nassert s.pop() == 1\n'text'")
    assert [is_test for _, is_test in statements] == [False, False, True, False]
    assert (names, library) == ({"Stack": "Stack"}, {"re": ("re", "")})


@every_kind
def test_a_stale_result_is_not_tested_again(kind, under):
    under(kind)
    tests = "x = f(1)\nassert x == 1\nx = f(2)\nassert x == 1"
    assert compute_score("def f(x):\n    return {1: 1}[x]", tests) == 0.5


def test_the_command_prints_protection_and_score(tmp_path, capsys):
    (tmp_path / "answer.py").write_text(ADD)
    (tmp_path / "tests.py").write_text("assert add(1, 2) == 3\nassert add(1, 2) == 4")
    command = [sys.executable, FOLDER / "tool.py", "code_reward", "ANSWER=answer.py", "TESTS=tests.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS)
    if ISOLATED:
        protection = f"protection: {box.SENTENCES[ISOLATED[0]]}"
        assert result.stdout.splitlines() == [protection, "score: 0.500", "failed: assert add(1, 2) == 4"]
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
