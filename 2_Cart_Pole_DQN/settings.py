"""The constants of a script: a frozen dataclass on top of it, changed by `NAME=value` on the
command line.

pydantic checks each value against the type beside it; tyro turns the comments there into `--help`.
"""

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pydantic
import tyro
from pydantic import Field

# The ranges a constant can have. This file is the same in folders 1 to 4; `make copies` copies it.
Count = Annotated[int, Field(ge=1, lt=10**9)]
CountOrOff = Annotated[int, Field(ge=0, lt=10**9)]
# of an array, or copies of something: memory is the limit
Size = Annotated[int, Field(ge=1, le=10_000)]
TwoOrMore = Annotated[int, Field(ge=2, le=10_000)]
UpTo64 = Annotated[int, Field(ge=1, le=64)]  # each is compiled on its own
Positive = Annotated[float, Field(gt=0, le=1e9)]
PositiveOrInf = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
Negative = Annotated[float, Field(lt=0, ge=-1e9)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31 - 1_000)]


class UserError(Exception):
    """Something the person at the keyboard can fix: shown as one line, exit code 2."""


def read[C](kind: type[C], arguments: Sequence[str]) -> C:
    """The dataclass `kind`, changed by `NAME=value` each. UserError if one is unknown or out of
    range.
    """
    if {"--help", "-h"} & set(arguments):
        tyro.cli(kind, args=["--help"], config=(tyro.conf.FlagConversionOff,), use_underscores=True)
    pairs = [argument.removeprefix("--").partition("=")[::2] for argument in arguments]
    for (name, _), argument in zip(pairs, arguments):
        if name not in kind.__dataclass_fields__ or "=" not in argument:
            near = ", ".join(
                difflib.get_close_matches(name.upper(), kind.__dataclass_fields__, cutoff=0.5)
            )
            hint = f"write NAME=value, nearest names: {near or 'none'} (--help lists all)"
            raise UserError(f"{argument!r}: no such constant; {hint}")
    try:
        c = pydantic.TypeAdapter(kind).validate_python(dict(pairs))
    except pydantic.ValidationError as error:
        [name, *_], said = error.errors()[0]["loc"], error.errors()[0]["msg"]
        given = repr(f"{name}={dict(pairs)[name]}")[1:-1]  # in one line, whatever was typed
        raise UserError(f"{given}: {said.replace('Input should', 'must')}") from None
    # a path from the home folder, which few shells write out after NAME=
    texts = {name: value for name, value in vars(c).items() if isinstance(value, str)}
    return dataclasses.replace(c, **{n: os.path.expanduser(text) for n, text in texts.items()})


def check(c: Any, name: str, kept: bool, remedy: str) -> None:
    """UserError with the constant, its value and the remedy unless the rule is kept."""
    if not kept:
        raise UserError(f"{name}={getattr(c, name)}: must be {remedy}")


def run(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line; exit code 2 on errors you can fix, 130 on Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook
            # A terminal that isn't UTF-8 shows ? for an arrow; a log file gets each line at once.
            stream.reconfigure(errors="replace", line_buffering=True)
    try:
        # a notebook's arguments are its kernel's
        main([] if "ipykernel" in sys.argv[0] else sys.argv[1:])
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = None
        sys.exit(1)
    except (UserError, OSError) as error:
        remedy = (
            "" if isinstance(error, UserError) else "; free some space, or choose another RUN_DIR"
        )
        print(f"error: {error}{remedy}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; nothing was kept of this run", file=sys.stderr)
        sys.exit(130)
