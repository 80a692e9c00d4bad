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

import psutil
import pytest

from sandbox import box
from task import code_grading

SECRET = f"7777{secrets.randbelow(10**8):08d}"  # impossible to guess, easy to recognize
HANG_SECONDS = 600  # whoever reaches it hangs
KINDS = [kind for kind in box.SENTENCES if not box.fault(kind)]  # the protections of this machine

FAMILIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TEXTS = FAMILIES.pop("texts") | {"DASHES": "-" * 100_000}
TESTS = FAMILIES.pop("tests")
PROGRAMS = {
    name: {"tests": TESTS.get(family), "limits": True, "sleeps": False, "entry_point": None} | entry
    for family, entries in FAMILIES.items()
    for name, entry in entries.items()
}


def filled(text: str, **values) -> str:
    """`text` with each {NAME} of TEXTS and of `values` replaced."""
    # one of TEXTS may name another
    for name, value in [*TEXTS.items(), *TEXTS.items(), *values.items()]:
        text = text.replace(f"{{{name}}}", str(value))
    return text


def names(kind: str) -> list[str]:
    """The programs that the protection `kind` is meant to hold."""
    return [name for name, hostile in PROGRAMS.items() if kind != "limits" or hostile["limits"]]


def left_running() -> list[str]:
    """Command lines of the processes that this process started in a sandbox and that still run."""
    mark = f"'parent': {os.getpid()}"
    lines = (
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    )
    return [line[:200] for line in lines if mark in line]


def try_all(kind: str) -> dict[str, list[str]]:
    """Grades the programs that the protection `kind` is meant to hold, eight at a time.

    Returns those that were `paid`; what they reached or changed outside (`escaped`); their
    processes and folders that were left (`outlived`); those at which the grader failed or hung
    (`crashed`).
    """
    with (
        tempfile.TemporaryDirectory(prefix="public_") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        public, expected = Path(folder), filled("{OUTPUT}", SECRET=SECRET)
        (public / "tests.json").write_text(expected)
        (public / "victim").touch()
        (public / "boxes").mkdir()
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        streams, packets = (
            socket.socket(socket.AF_UNIX, t) for t in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        )
        udp.bind(tcp.getsockname())
        streams.bind(str(public / "socket"))
        streams.listen()
        packets.bind(str(public / "datagrams"))
        for path in (public, *public.iterdir()):
            path.chmod(0o777)
        patch.setattr(tempfile, "tempdir", str(public / "boxes"))
        patch.setenv("HF_TOKEN", SECRET)
        patch.setattr(box, "protection", lambda: kind)
        patch.setattr(box, "CPU_SECONDS", 1)  # small limits, so that a program exceeds them quickly
        patch.setattr(box, "MEMORY_BYTES", 128 << 20)
        patch.setattr(code_grading, "ANSWER_SECONDS", HANG_SECONDS)

        mark = f"mark_{secrets.token_hex(8)}"
        values = {"SECRET": SECRET, "PUBLIC": public, "MARK": mark, "PORT": tcp.getsockname()[1]}
        values |= {"PARENT": os.getpid(), "GRADER": code_grading.__file__}
        paid, crashed = [], []

        def grade(name):
            hostile, start = PROGRAMS[name], time.monotonic()
            program, tests = (filled(hostile[part], **values) for part in ("program", "tests"))
            try:
                if code_grading.compute_score(
                    program, tests, {"entry_point": hostile["entry_point"]}
                ):
                    paid.append(name)
            except Exception as error:  # the grader's
                crashed.append(f"{name}: {error}")
            # with 8 at a time it takes a few seconds
            if time.monotonic() - start > HANG_SECONDS / 2:
                crashed.append(name)

        for wall_seconds, sleep in ((HANG_SECONDS, False), (2.0, True)):
            patch.setattr(box, "WALL_SECONDS", wall_seconds)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(
                    pool.map(
                        grade, (name for name in names(kind) if PROGRAMS[name]["sleeps"] == sleep)
                    )
                )

        folders = [
            public,
            *map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/", "/dev", os.path.expanduser("~"))),
        ]
        escaped = [f"wrote {folder / mark}" for folder in folders if (folder / mark).exists()]
        if not (public / "victim").exists() or (public / "tests.json").read_text() != expected:
            escaped.append("changed files of the grader")
        for listener in (tcp, udp, streams, packets):
            listener.setblocking(False)
            with listener, contextlib.suppress(BlockingIOError):
                listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
                escaped.append(f"reached {listener.family.name} {listener.type.name}")
        outlived = [*left_running(), *map(str, (public / "boxes").iterdir())]
        return {"paid": paid, "escaped": escaped, "outlived": outlived, "crashed": crashed}
