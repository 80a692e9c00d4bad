"""Tries the programs of hostile_programs.toml, which explains them, under a protection."""

import concurrent.futures
import contextlib
import os
import secrets
import socket
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil

from sandbox import box
from task import code_grading

SECRET = f"7777{secrets.randbelow(10**8):08d}"  # impossible to guess, easy to recognize


class Hostile(NamedTuple):
    """A program, and the task whose reward it wants."""

    program: str
    tests: str
    limits: bool = True  # whether `limits`, which has no walls, is meant to hold it
    sleeps: bool = False
    entry_point: str | None = None


def _read() -> tuple[dict[str, Hostile], dict[str, str]]:
    """All programs by name, and the texts that stand in them by their names in braces."""
    families = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    texts, tests = families.pop("texts"), families.pop("tests")
    found = {}
    for family, entries in families.items():
        for name, entry in entries.items():
            assert name not in found, name
            found[name] = Hostile(**{"tests": tests.get(family)} | entry)
    return found, texts | {"DASHES": "-" * 100_000}


PROGRAMS, TEXTS = _read()


def filled(text: str, **values) -> str:
    """`text` with each {NAME} of TEXTS and of `values` replaced."""
    for name, value in [*TEXTS.items(), *TEXTS.items(), *values.items()]:  # one of TEXTS may name another
        text = text.replace(f"{{{name}}}", str(value))
    return text


HANG_SECONDS = 600  # whoever reaches it hangs


def names(kind: str) -> list[str]:
    """The programs that the protection `kind` is meant to hold."""
    return [name for name, hostile in PROGRAMS.items() if kind != "limits" or hostile.limits]


class Outcomes(NamedTuple):
    """What came of all programs under one protection."""

    scores: dict[str, float | Exception]  # by program; an exception is the grader's
    seconds: dict[str, float]  # wall-clock time of each; with 8 at a time a few seconds
    escaped: list[str]  # what they reached or changed outside
    outlived: list[str]  # their processes and folders that were left

    def paid(self) -> list[str]:
        """The programs that scored."""
        return [name for name, score in self.scores.items() if isinstance(score, float) and score]

    def crashed(self) -> list[str]:
        """The programs at which the grader failed or hung."""
        failed = {name for name, score in self.scores.items() if isinstance(score, Exception)}
        return [name for name, s in self.seconds.items() if name in failed or s > HANG_SECONDS / 2]


KINDS = [kind for kind in box.SENTENCES if not box.fault(kind)]  # the protections of this machine


def left_running() -> list[str]:
    """Command lines of the processes that this process started in a sandbox and that still run."""
    mark = f"'parent': {os.getpid()}"
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line[:200] for line in lines if mark in line]


def try_all(kind: str) -> Outcomes:
    """Grades the programs that the protection `kind` is meant to hold, eight at a time."""
    with contextlib.ExitStack() as stack:
        public = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="public_")))
        expected = filled("{OUTPUT}", SECRET=SECRET)
        (public / "tests.json").write_text(expected)
        (public / "victim").touch()
        (public / "boxes").mkdir()
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        streams, packets = (socket.socket(socket.AF_UNIX, t) for t in (socket.SOCK_STREAM, socket.SOCK_DGRAM))
        port = tcp.getsockname()[1]
        for listener, where in ((udp, ("127.0.0.1", port)), (streams, public / "socket"),
                                (packets, public / "datagrams")):  # fmt: skip
            listener.bind(where if isinstance(where, tuple) else str(where))
        streams.listen()
        for path in (public, *public.iterdir()):
            path.chmod(0o777)
        stack.enter_context(mock.patch.object(tempfile, "tempdir", str(public / "boxes")))
        stack.enter_context(mock.patch.dict(os.environ, HF_TOKEN=SECRET))
        # Small limits, so that a program exceeds them quickly.
        few = {"CPU_SECONDS": 1, "MEMORY_BYTES": 128 << 20, "protection": lambda: kind}
        stack.enter_context(mock.patch.multiple(box, **few))
        stack.enter_context(mock.patch.object(code_grading, "ANSWER_SECONDS", HANG_SECONDS))

        mark = f"mark_{secrets.token_hex(8)}"
        values = {"SECRET": SECRET, "PUBLIC": public, "MARK": mark, "PORT": port, "PARENT": os.getpid()}
        values["GRADER"] = code_grading.__file__
        scores, seconds = {}, {}

        def grade(name):
            hostile = PROGRAMS[name]
            program, tests = filled(hostile.program, **values), filled(hostile.tests, **values)
            extra_info = {"entry_point": hostile.entry_point}
            start = time.monotonic()
            try:
                scores[name] = code_grading.compute_score(program, tests, extra_info)
            except Exception as error:
                scores[name] = error
            seconds[name] = time.monotonic() - start

        for wall_seconds, sleep in ((HANG_SECONDS, False), (2.0, True)):
            chosen = [name for name in names(kind) if PROGRAMS[name].sleeps == sleep]
            with (
                mock.patch.object(box, "WALL_SECONDS", wall_seconds),
                concurrent.futures.ThreadPoolExecutor(8) as pool,
            ):
                list(pool.map(grade, chosen))

        folders = [public, *map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/", "/dev", os.path.expanduser("~")))]
        escaped = [f"wrote {folder / mark}" for folder in folders if (folder / mark).exists()]
        if not (public / "victim").exists() or (public / "tests.json").read_text() != expected:
            escaped.append("changed files of the grader")
        for listener in (tcp, udp, streams, packets):
            listener.setblocking(False)
            with listener, contextlib.suppress(BlockingIOError):
                listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
                escaped.append(f"reached {listener.family.name} {listener.type.name}")
        outlived = [*left_running(), *map(str, (public / "boxes").iterdir())]
        return Outcomes(scores, seconds, escaped, outlived)
