"""The constants of a script: a frozen dataclass on top of it, changed by `NAME=value` on the command line.

pydantic reads the values and checks the ranges, which are the types beside the constants; tyro makes `--help`
of the remarks there. The same file in folders 1 to 4.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pydantic
import tyro
from pydantic import Field

Count = Annotated[int, Field(ge=1, lt=10**9)]
CountOrOff = Annotated[int, Field(ge=0, lt=10**9)]
Size = Annotated[int, Field(ge=1, le=10_000)]  # of an array, or copies of something: memory is the limit
TwoOrMore = Annotated[int, Field(ge=2, le=10_000)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrInf = Annotated[float, Field(gt=0)]
Negative = Annotated[float, Field(lt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31 - 1_000)]


class UserError(Exception):
    """Something the person at the keyboard can fix: shown as one line, exit code 2."""


def read[C](kind: type[C], arguments: Sequence[str]) -> C:
    """The constants of a run: an instance of the dataclass `kind`, changed by `NAME=value` each.

    `--help` prints every constant and exits.

    Raises:
        UserError: an unknown name (lists the nearest), a value of the wrong type or range, or what the
            `__post_init__` of `kind` refuses.
    """
    if {"--help", "-h"} & set(arguments):
        tyro.cli(kind, args=["--help"], config=(tyro.conf.FlagConversionOff,), use_underscores=True)
    values = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if name not in kind.__dataclass_fields__ or not equals:
            near = ", ".join(difflib.get_close_matches(name.upper(), kind.__dataclass_fields__, cutoff=0.5))
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: {near or 'none'} "
                f"(--help lists all)"
            )
        values[name] = text
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        [name, *_], said = error.errors()[0]["loc"], error.errors()[0]["msg"]
        given = repr(f"{name}={values[name]}")[1:-1]  # in one line, whatever was typed
        raise UserError(f"{given}: {said.replace('Input should', 'must')}") from None


def check(c: Any, name: str, kept: bool, remedy: str) -> None:
    """Raises UserError with the constant, its value and the remedy unless the rule is kept."""
    if not kept:
        raise UserError(f"{name}={getattr(c, name)}: must be {remedy}")


def run(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line; exit code 2 on errors the user can fix, 130 on Ctrl-C.

    In a notebook sys.argv belongs to the kernel, unless a cell has replaced it.
    """
    try:
        main([] if "ipykernel" in sys.argv[0] else sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # such as a full disk
        print(f"error: {error}; free some space, or choose another RUN_DIR", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; nothing was kept of this run", file=sys.stderr)
        sys.exit(130)
