"""What serves a run of Q_Learning.py and changes nothing that it learns: constants, run folder, CSV files."""

import csv
import difflib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic


def ranges(c: SimpleNamespace) -> list[tuple[str, bool, str]]:
    """Each constant, whether it is as it must be, and the remedy.

    Written as what is good: a comparison with nan is False, so nan is refused with the rest.
    """
    return [
        ("ALPHA", 0 < c.ALPHA <= 1, "above 0 and at most 1; 0 learns nothing, above 1 overshoots"),
        ("GAMMA", 0 < c.GAMMA <= 1, "above 0 and at most 1; at 0 only the last move counts"),
        ("NUM_EPISODES", 1 <= c.NUM_EPISODES <= 10**7, "from 1 to 10000000"),
        ("MAX_STEPS_PER_EPISODE", 6 <= c.MAX_STEPS_PER_EPISODE <= 10**5, "from 6 (shortest way) to 100000"),
        ("EPSILON_START", 0 <= c.EPSILON_START <= 1, "a probability, from 0 to 1"),
        ("EPSILON_END", 0 <= c.EPSILON_END <= c.EPSILON_START, f"from 0 to EPSILON_START={c.EPSILON_START}"),
        ("DECAY_EPISODES", c.DECAY_EPISODES >= 1, "1 or more; freeze epsilon by EPSILON_START = EPSILON_END"),
        ("GOAL_REWARD", 0 < c.GOAL_REWARD < math.inf, "above 0 and finite; else nothing attracts the agent"),
        ("STEP_REWARD", -math.inf < c.STEP_REWARD < 0, "below 0 and finite; else no way has to be short"),
        ("SEED", c.SEED >= 0, "0 or more"),
        ("LOG_EVERY", c.LOG_EVERY >= 1, "1 or more"),
        ("PRINT_EVERY", c.PRINT_EVERY >= 0, "0 (no lines) or more"),
        ("NUM_SEEDS", getattr(c, "NUM_SEEDS", 1) >= 1, "1 or more"),  # of study.py
    ]  # fmt: skip


# %% The same in folders 1 to 4, each of which stands alone ---------------------------------------------
class UserError(Exception):
    """Something the person at the keyboard can fix: shown as one line, exit code 2."""


def constants(script: Mapping[str, Any]) -> dict[str, Any]:
    """The constants that a script's globals() hold so far, by name."""
    return {name: value for name, value in script.items() if name.isupper()}


def configure(script: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Sets the constants of a script: its DEFAULTS, changed by `NAME=value` arguments.

    Args:
        script: its globals().
        arguments: such as ["ALPHA=0.5", "NUM_EPISODES=5000"]; `--help` prints all constants and exits.

    Returns:
        Every constant by name, as the run will use it.

    Raises:
        UserError: an unknown name (lists the nearest), a value of the wrong type or out of range.
    """
    defaults = script["DEFAULTS"]
    if {"--help", "-h"} & set(arguments):
        print(help_text(script))
        sys.exit(0)
    values = dict(defaults)
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in defaults or not equals:
            near = difflib.get_close_matches(name.upper(), defaults, n=3, cutoff=0.5)
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: "
                f"{', '.join(near) or 'none'} (--help lists all)"
            )
        kind = type(defaults[name])
        try:
            values[name] = pydantic.TypeAdapter(kind).validate_python(text)  # 1e-3, 50_000, inf, True
        except pydantic.ValidationError:
            raise UserError(
                f"{argument!r}: {name} is of type {kind.__name__}, {text!r} is not; "
                f"write it like {defaults[name]}"
            ) from None
    for name, good, remedy in ranges(SimpleNamespace(**values)):
        if not good:
            raise UserError(f"{name}={values[name]}: must be {remedy}")
    script.update(values)
    return values


def help_text(script: Mapping[str, Any]) -> str:
    """Every constant with its default and the remark beside it: in the script, or in the one it studies."""
    files = [module.__file__ for module in script.values() if hasattr(module, "DEFAULTS")]
    text = "\n".join(Path(file).read_text() for file in [*files, script["__file__"]])
    remarks = dict(re.findall(r"^([A-Z]\w*) = .*?  # (.*)$", text, re.M))
    lines = [
        f"\n{name} = {value!r}\n    {remarks.get(name, '')}" for name, value in script["DEFAULTS"].items()
    ]
    return "NAME=value changes a constant for one run; so does editing it in the script." + "".join(lines)


def open_run(name: str, constants: Mapping[str, Any]) -> Path:
    """Makes the folder of a run, RUN_DIR or runs/NAME/TIME, and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    folder = Path(constants["RUN_DIR"] or time.strftime(f"runs/{name}/%Y-%m-%d_%H-%M-%S"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "result.json").exists():
            raise UserError(f"RUN_DIR={folder}: holds the result of another run; choose another folder")
        write_json(folder / "constants.json", constants)
    except OSError as error:
        raise UserError(f"RUN_DIR={folder}: {error.strerror}; choose another folder") from None
    return folder


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes constants.json or result.json."""
    path.write_text(json.dumps(values, indent=1) + "\n")


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a table; numbers in full, so that everything shown can be computed again from the file."""
    rows = list(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(main: Callable[[list[str]], Any]) -> None:
    """Calls `main` with the command line; exit code 2 on the user's errors, 130 on Ctrl-C."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; nothing was kept of this run", file=sys.stderr)
        sys.exit(130)
