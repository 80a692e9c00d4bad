"""Constants of a script: a frozen dataclass on top of the file, `NAME=value` on the command line, `--help`.

    @dataclass(frozen=True, kw_only=True)
    class Constants:
        SEED: int = 0  # order of the questions, and of the answers drawn
        BATCH_SIZE: int = pair(laptop=16, tpu=2)  # questions per step

Editing a default and `python script.py SEED=1` do the same. pydantic reads the values and checks their types.
Nothing here imports jax: a mistyped name is answered at once.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import os
import shlex
import signal
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from parts import late_imports
from parts.plain_text import shown

HERE = Path(__file__).resolve().parent.parent  # folder 5
SMALL_HIDDEN_SIZE = 1024  # a model below it takes the laptop column


class UserError(Exception):
    """Something the person at the keyboard can fix: shown as one line, exit code 2."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; `folder` is the RUN_DIR to go on from."""

    def __init__(self, folder: Path):
        self.folder = folder


def pair(*, laptop: Any, tpu: Any) -> Any:
    """The default of a constant with two columns; `read` takes the one that fits the size of MODEL."""
    return dataclasses.field(metadata={"laptop": laptop, "tpu": tpu})


def find_path(name: str) -> Path:
    """A file or folder, looked for where the command runs, then in folder 5."""
    return HERE / name if not Path(name).exists() and (HERE / name).exists() else Path(name)


def is_small(model: str) -> bool:
    """Whether `model` is a local folder with a hidden size below SMALL_HIDDEN_SIZE: the laptop column."""
    try:
        config = json.loads((find_path(model) / "config.json").read_text())
        return config["hidden_size"] < SMALL_HIDDEN_SIZE
    except (OSError, ValueError, KeyError, TypeError):
        return False  # a hub name, or a folder whose fault `llama.load_hf_config` will name


def defaults(kind: type, column: str) -> dict[str, Any]:
    """The default of every constant by name.

    Args:
        kind: the dataclass.
        column: "laptop" or "tpu".
    """
    return {field.name: field.metadata.get(column, field.default) for field in dataclasses.fields(kind)}


def read[Constants](
    kind: type[Constants], arguments: Sequence[str], saved: Mapping[str, Any] | None = None
) -> Constants:
    """The constants of a run.

    Args:
        kind: the dataclass.
        arguments: `NAME=value` texts, which win; or `--help`.
        saved: values of another run, which win over the defaults; names that `kind` lacks are ignored.

    Returns:
        An instance of `kind`; the column follows from its MODEL.

    Raises:
        UserError: an unknown name (lists the nearest) or a value of the wrong type.
        SystemExit: after `--help`.
    """
    if {"--help", "-h"} & set(arguments):
        print(help_text(kind))
        sys.exit(0)
    names = [field.name for field in dataclasses.fields(kind)]
    texts = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in names or not equals:
            near = difflib.get_close_matches(name.upper(), names, n=3, cutoff=0.5)
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: "
                f"{', '.join(near) or 'none'} (--help lists all)"
            )
        texts[name] = text
    given = {name: value for name, value in (saved or {}).items() if name in names} | texts
    model = given.get("MODEL") or defaults(kind, "laptop").get("MODEL", "")
    values = defaults(kind, "laptop" if is_small(model) else "tpu") | given
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UserError(f"{name}={values[name]}: use {wanted(kind, name)}") from None


def wanted(kind: type, name: str) -> str:
    """What a constant takes, in words."""
    hint = typing.get_type_hints(kind)[name]
    choices = typing.get_args(hint)
    return (
        f"one of {', '.join(filter(None, map(str, choices)))}"
        if choices
        else f"a value of type {hint.__name__}"
    )


def help_text(kind: type) -> str:
    """Every constant of `kind` with its default and the remark beside it."""
    source = textwrap.dedent(inspect.getsource(kind))
    code = source.splitlines()
    [definition] = ast.parse(source).body
    remarks = {
        node.target.id: code[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip(" #")
        for node in definition.body
        if isinstance(node, ast.AnnAssign)
    }
    hints = typing.get_type_hints(kind)
    lines = ["NAME=value changes a constant for one run; so does editing it on top of the script."]
    for field in dataclasses.fields(kind):
        value = repr(field.default)
        if field.metadata:
            value = f"{field.metadata['laptop']!r} (laptop), {field.metadata['tpu']!r} (TPU)"
        choices = typing.get_args(hints[field.name])
        value += f"    one of {', '.join(map(repr, choices))}" if choices else ""
        lines.append(f"\n{field.name} = {value}\n    {remarks[field.name]}")
    return "\n".join(lines)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole or not there: a reader, or a kill, never finds half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def at_least(c: Any, **lowest: float) -> None:
    """Refuses constants below a lowest value: `at_least(c, SEED=0, BATCH_SIZE=1)`.

    Raises:
        UserError: names the first constant that is too small.
    """
    for name, low in lowest.items():
        if getattr(c, name) < low:
            raise UserError(f"{name}={getattr(c, name)}: use {low} or more")


def quiet() -> None:
    """Keeps what the libraries have to say to their own developers off the terminal."""
    import absl.logging

    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def run(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line, when all is imported; exit codes as in `answer`, SIGTERM's too."""
    late_imports.end_imports()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's Ctrl-C
    answer(main)


def answer(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line; exit code 2 on the user's errors, 130 on Ctrl-C."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        kept = [argument for argument in sys.argv[1:] if not argument.startswith("RUN_DIR=")]
        again = shlex.join(["python", sys.argv[0], *kept, f"RUN_DIR={stop.folder}"])
        print(f"\nstopped. To go on: {again}", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `--help | head` closes our end before everything is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def refuse_early(kind: type, check: Callable[[Any], None] = lambda c: None) -> None:
    """Answers `--help` and a wrong constant before a script's heavy imports.

    Args:
        kind: the dataclass.
        check: refuses constants, as `checks.refuse`.
    """
    answer_early(lambda arguments: check(read(kind, arguments)))


def answer_early(refuse: Callable[[list[str]], Any]) -> None:
    """`answer`, but not in a notebook: its arguments are its kernel's, not the reader's."""
    if "ipykernel" not in sys.modules:
        answer(refuse)
