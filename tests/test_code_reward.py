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


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
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


# All run under the best protection; those that need the most of it, under every other, too.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in KINDS
        for name in HONEST
        if kind == KINDS[0] or name in CASES["NEEDY"]
    ],
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
    ("tests", "words"), CASES["tests_that_cannot_be_read_are_an_error_not_a_zero"]
)
def test_tests_that_cannot_be_read_are_an_error_not_a_zero(tests, words):
    with pytest.raises(ValueError, match=words) as error:
        code_grading.readable_tests(
            tests, {"entry_point": "f("} if words == "entry_point='f" else None
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tests", "entry_point", "names"), CASES["names_are_the_answers_or_the_librarys"]
)
def test_names_are_the_answers_or_the_librarys(tests, entry_point, names):
    assert read_statements(tests, entry_point or None)[1] == names


@pytest.mark.parametrize(
    ("tests", "counted"), CASES["what_does_not_depend_on_the_answer_is_no_test"]
)
def test_what_does_not_depend_on_the_answer_is_no_test(tests, counted):
    statements, _ = read_statements(f"from solution import f\n{tests}")
    assert [is_test for _, is_test in statements] == counted


@every_kind
def test_nothing_that_an_answer_returns_stops_a_training(kind, under):
    """Each of these was an error that ended a run, or would be one where a type is forgotten."""
    under(kind)
    returned, used = CASES["STRANGE"]["returned"], CASES["STRANGE"]["used"]
    answer = f"{CASES['STRANGE']['answer']}\ndef f(i):\n    return [{', '.join(returned)}][i]"
    tests = "\n".join(
        f"x = f({i})\nassert ({use}) == 'never'" for i in range(len(returned)) for use in used
    )
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
