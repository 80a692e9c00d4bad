"""The constants of a script: a frozen dataclass on top of it, changed by `NAME=value` on the command line.

tyro reads the values, and makes `--help` of the remarks beside them. Folders 1 to 4 hold a copy each.
"""

import contextlib
import difflib
import io
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tyro


class UserError(Exception):
    """Something the person at the keyboard can fix: shown as one line, exit code 2."""


def read[C](kind: type[C], arguments: Sequence[str], checks: Callable[[C], Iterable[tuple]]) -> C:
    """The constants of a run.

    Args:
        kind: the dataclass.
        arguments: such as ["GAMMA=0.5", "NUM_SEEDS=3"]; `--help` prints every constant and exits.
        checks: gives for each rule of `kind` a constant's name, whether it is kept, and the remedy.

    Raises:
        UserError: an unknown name (lists the nearest), a value of the wrong type, or a rule that is not kept.
    """
    form = {"config": (tyro.conf.FlagConversionOff,), "use_underscores": True}  # FLAG=True, not --no-flag
    if {"--help", "-h"} & set(arguments):
        tyro.cli(kind, args=["--help"], **form)
    c = kind()
    types = typing.get_type_hints(kind)
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if name not in types or not equals:
            near = ", ".join(difflib.get_close_matches(name.upper(), types, cutoff=0.5)) or "none"
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: {near} (--help lists all)"
            )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # tyro's own words, a dozen lines
                c = tyro.cli(kind, args=[f"--{name}={text}"], default=c, **form)
        except SystemExit:
            choices = ", ".join(typing.get_args(types[name]))
            wanted = f"one of {choices}" if choices else f"of type {types[name].__name__}"
            given = repr(argument)[1:-1]  # in one line, whatever was typed
            raise UserError(f"{given}: must be {wanted}; write it like {name}={getattr(c, name)}") from None
    for name, kept, remedy in checks(c):
        if not kept:
            raise UserError(f"{name}={getattr(c, name)}: must be {remedy}")
    return c


def run(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line; exit code 2 on the user's errors, 130 on Ctrl-C.

    In a notebook with the constants as they stand: its arguments are its kernel's.
    """
    try:
        main([] if "ipykernel" in sys.modules else sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; nothing was kept of this run", file=sys.stderr)
        sys.exit(130)
