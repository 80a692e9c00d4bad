"""Constants of a script: a frozen dataclass on top of the file, `NAME=value` on the command line,
`--help`.

    @dataclass(frozen=True, kw_only=True)
    class Constants(Variants):  # inherits a block of constants from another file
        SEED: int = 0  # orders the questions and samples the answers
        BATCH_SIZE: Count = pair(small=16, large=2)  # questions per step

pydantic parses the values and checks them against each constant's annotated type and range. Nothing
here imports jax, so a mistyped name fails at once.
"""

import contextlib
import dataclasses
import difflib
import errno
import gc
import inspect
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

import machines
from plain_text import escape_controls

# One thread is fastest for matrix products this small, and bitwise reproducible. TPUs ignore this
# flag.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# "PyTorch was not found": we don't need it
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

HERE = Path(__file__).resolve().parent  # folder 5
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}  # the second: a quota
# Ctrl-C; a scheduler's; a closed terminal or a lost ssh connection
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SMALL_HIDDEN_SIZE = 1024  # a model below it takes the small column

# Types of constants that have a range.
Count = Annotated[int, pydantic.Field(ge=1)]
TwoOrMore = Annotated[int, pydantic.Field(ge=2)]
CountOrOff = Annotated[int, pydantic.Field(ge=0)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, pydantic.Field(gt=0, le=1)]
BelowOne = Annotated[float, pydantic.Field(ge=0, lt=1)]
# NumPy's end at 2^32, and REFILL_SEED is added
Seed = Annotated[int, pydantic.Field(ge=0, le=4_000_000_000)]


class UserError(Exception):
    """An error the user can fix: shown as one line, exit code 2."""


class DiskFull(UserError):
    """A full disk. The process ends at once, because threads that still write would print after the
    error's line.
    """


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; its argument is the RUN_DIR to continue from."""


def expand_home(value: Any) -> Any:
    """`value`; in a text, ~ at the start of a path, or of one after a comma, is the home folder.

    bash does that with NAME=~/path, but zsh, dash, quotes and notebooks don't.
    """
    return ",".join(map(os.path.expanduser, value.split(","))) if isinstance(value, str) else value


# %% Columns ---------------------------------------------------------------------------------------
def pair(*, small: Any, large: Any) -> Any:
    """A default with two columns; `read` picks one by MODEL's hidden size, not by the machine."""
    return dataclasses.field(metadata={"small": small, "large": large})


def names_in(text: str) -> list[str]:
    """The names in a constant such as REWARDS, which are divided by commas."""
    return [name.strip() for name in text.split(",")]


def find_path(name: str) -> Path:
    """Looks for a file or folder in the current directory, then in folder 5."""
    return HERE / name if not Path(name).exists() and (HERE / name).exists() else Path(name)


def config_path(model: str) -> Path | None:
    """The config.json of MODEL, a folder or a hub's name in its cache; None if it isn't here."""
    folder = find_path(model)
    if folder.is_dir():
        return folder / "config.json"
    import huggingface_hub

    name, _, revision = model.partition("@")
    with contextlib.suppress(ValueError):  # a path rather than a name
        cached = huggingface_hub.try_to_load_from_cache(
            name, "config.json", revision=revision or None
        )
        return Path(cached) if isinstance(cached, str) else None


def is_small(model: str) -> bool:
    """Whether MODEL takes the small column."""
    # missing or unreadable: `start.open_run` gets it, and reads the constants again
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        path = config_path(model)
        return path is not None and json.loads(path.read_bytes())["hidden_size"] < SMALL_HIDDEN_SIZE
    return False


def defaults(kind: type, column: str) -> dict[str, Any]:
    """Every default of a dataclass of constants by name, from the column "small" or "large"."""
    return {
        field.name: field.metadata.get(column, field.default) for field in dataclasses.fields(kind)
    }


# %% Reading ---------------------------------------------------------------------------------------
def read[Constants](
    kind: type[Constants],
    arguments: Sequence[str],
    saved: Mapping[str, Any] | None = None,
    machine: machines.Machine = machines.TPU,
) -> Constants:
    """The constants of a run, by the `arguments`, then `saved`, then the defaults of MODEL's
    column.

    A large model's defaults are for `machine`, unless MACHINE names another. `--help` exits.
    """
    if {"--help", "-h"} & set(arguments):
        print(help_text(kind))
        sys.exit(0)
    values = defaults(kind, "small")
    texts = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in values or not equals:
            near = (
                ", ".join(difflib.get_close_matches(name.upper(), values, n=3, cutoff=0.5))
                or "none"
            )
            remedy = f"no such constant; write NAME=value, nearest names: {near} (--help lists all)"
            raise UserError(f"{argument!r}: {remedy}")
        texts[name] = text
    given = {name: value for name, value in (saved or {}).items() if name in values} | texts
    if not is_small(expand_home(given.get("MODEL") or values.get("MODEL", ""))):
        machine = machines.parse_machine(given.get("MACHINE", "")) or machine
        changed = machines.machine_defaults(machine, given).items()
        values = defaults(kind, "large") | {
            name: value for name, (value, _) in changed if name in values
        }
    values = {name: expand_home(value) for name, value in (values | given).items()}
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        [name, *_], message = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise UserError(
            f"{name}={values[name]}: {message.replace('Input should', 'must')}"
        ) from None


def help_text(kind: type) -> str:
    """The source of `kind` and its base classes: each constant with its default and comment."""
    texts = ["# NAME=value changes a constant for one run; so does editing it."]
    blocks = [block for block in kind.__mro__ if "__dataclass_fields__" in vars(block)]
    for block in blocks:
        file = Path(inspect.getsourcefile(block)).resolve().relative_to(HERE)
        texts.append(f"# {file}\n{inspect.getsource(block)}")
    return "\n\n".join(texts)


# %% For every script ------------------------------------------------------------------------------
def reachable(url: str) -> bool:
    """Whether a server answers."""
    import huggingface_hub

    # of httpx, of the sockets, or because HF_HUB_OFFLINE is set
    with contextlib.suppress(Exception):
        huggingface_hub.get_session().head(url, timeout=5)  # other calls of it retry for minutes
        return True
    return False


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: neither a reader nor a kill ever leaves half of it."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        error.filename = str(path)  # a full disk has none
        raise


def not_ignored(numbers: Sequence[int]) -> list[int]:
    """Those of the signals that this process doesn't ignore, as it does SIGHUP under nohup."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def run(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` after all imports; exits as `exit_on_error` does, also on STOP_SIGNALS."""
    gc.freeze()  # collections needn't traverse what the imports created
    gc.enable()
    for number in not_ignored(STOP_SIGNALS):
        signal.signal(number, signal.default_int_handler)
    exit_on_error(main)


def exit_on_error(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line; exit code 2 on the user's errors, 130 on Ctrl-C.

    In a notebook, sys.argv holds the kernel's arguments, so the constants keep their defaults.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal in Latin-1 has no arrow: it gets \\u2192. A log file gets each line at once,
        # not 8 KiB at a time.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    at_once = False
    try:
        return main([] if "ipykernel" in sys.argv[0] else sys.argv[1:])
    except UserError as error:
        at_once = isinstance(error, DiskFull)
        code, message = 2, f"error: {escape_controls(str(error))}"
    except KeyboardInterrupt as stop:
        code, message = 130, "\nstopped"
        if isinstance(stop, Stopped):
            kept = [argument for argument in sys.argv[1:] if not argument.startswith("RUN_DIR=")]
            message += (
                f". To go on: {shlex.join(['python', sys.argv[0], *kept, f'RUN_DIR={stop}'])}"
            )
    except BrokenPipeError:  # `--help | head` closes our end before everything is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in NOT_WRITABLE | DISK_FULL:
            raise
        path = escape_controls(str(error.filename or "a file"))
        full, place = error.errno in DISK_FULL, "choose a folder that can be written"
        remedy = "free some space, or choose a folder on another disk" if full else place
        code, message = 2, f"error: {path}: {error.strerror}; {remedy}"
    print(message, file=sys.stderr)
    if at_once and "ipykernel" not in sys.modules:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def exit_early_on_error(refuse: Callable[[list[str]], Any]) -> None:
    """`exit_on_error` before a script's heavy imports; skipped in a notebook: sys.argv is the
    kernel's.
    """
    gc.disable()  # until `run`: collecting during the imports costs half a second
    if "ipykernel" not in sys.argv[0]:
        exit_on_error(refuse)


def refuse_early(kind: type, check: Callable[[Any], None] = lambda c: None) -> None:
    """Answers `--help` and a wrong constant before a script's heavy imports.

    `check`, such as `checks.refuse`, is skipped for a large model, whose defaults depend on the
    machine.
    """

    def refuse(arguments: list[str]) -> None:
        c = read(kind, arguments)
        if is_small(getattr(c, "MODEL", "tiny_llama")):
            check(c)

    exit_early_on_error(refuse)
