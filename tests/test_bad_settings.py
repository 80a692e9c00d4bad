"""Settings that are wrong, each in another way: one line with constant, value and remedy, and exit
code 2.

The cases are in test_bad_settings.toml. Those that need no file and no model are refused where the
constants are read. The main script's are tried before anything is trained, and most of them again
as a dry run.
"""

import importlib
import os
import shlex
import sys
import tomllib
import typing
from pathlib import Path

import pytest

import grpo_llama3_1_8b_demo as demo
import settings

CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MAIN, OTHERS = CASES["main"], CASES["others"]


@pytest.fixture(autouse=True)
def a_small_place(empty_folder, monkeypatch):
    """The current folder; the names in it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("empty_folder", "no_checkpoint", "strange"):
        Path(name).mkdir()
    for name, text in CASES["files"].items():
        Path(name).write_text(text)
    return set(os.listdir())


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a script and asserts that it ends with one line, which has these words; returns the
    line.
    """

    def run(script, arguments, *words):
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        with pytest.raises(SystemExit) as stopped:
            settings.exit_on_error(script.main)
        line = capsys.readouterr().err
        assert stopped.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1, (
            line
        )
        assert all(word in line for word in words) and len(line) < 700, line
        return line

    return run


@pytest.mark.parametrize(("arguments", "words"), MAIN["both"] + MAIN["only_a_dry_run"])
def test_a_dry_run_refuses_what_is_wrong_and_leaves_nothing(
    arguments, words, refused, a_small_place
):
    refused(demo, ["DRY_RUN=True", *shlex.split(arguments)], words)
    assert set(os.listdir()) == a_small_place


@pytest.mark.parametrize(("arguments", "words"), MAIN["both"] + MAIN["only_when_it_runs"])
def test_the_main_script_refuses_what_is_wrong(arguments, words, refused, a_small_place):
    line = refused(demo, shlex.split(arguments), words)
    assert any(argument.split("=")[0] in line for argument in shlex.split(arguments)), line
    assert set(os.listdir()) <= a_small_place | {"runs"}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name in OTHERS for row in OTHERS[name]])
def test_another_script_refuses_what_is_wrong(name, row, refused, a_small_place):
    folder = "" if (settings.HERE / f"{name}.py").exists() else "tools."
    refused(importlib.import_module(folder + name), shlex.split(row[0]), *row[1:])
    assert set(os.listdir()) <= a_small_place | {"runs"}


def test_every_number_has_a_range():
    """TOP_K=-1 switches it off; checks.py has its rule."""
    hints = typing.get_type_hints(demo.Constants, include_extras=True)
    assert len(hints) > 60 and [name for name, hint in hints.items() if hint in (int, float)] == [
        "TOP_K"
    ]
