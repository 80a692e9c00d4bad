"""What serves a run of cart_pole_dqn.py and changes nothing that it learns: constants, run folder, CSV."""

import contextlib
import csv
import difflib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pydantic
from tqdm import tqdm


def ranges(c: SimpleNamespace) -> list[tuple[str, bool, str]]:
    """Each constant, whether it is as it must be, and the remedy.

    Written as what is good: a comparison with nan is False, so nan is refused with the rest.
    """
    play = c.NUM_STEPS - c.LEARNING_STARTS
    train, look = max(c.TRAIN_INTERVAL, 1), max(c.EVAL_INTERVAL, 1)  # 0 is refused in a line of its own
    of_train = f"a multiple of TRAIN_INTERVAL={c.TRAIN_INTERVAL}"
    return [
        ("BATCH_SIZE", 1 <= c.BATCH_SIZE <= 10**6, "from 1 to 1000000"),
        ("N_STEPS", 1 <= c.N_STEPS <= 1_000, "from 1 to 1000"),
        ("REPLAY_CAPACITY", c.N_STEPS <= c.REPLAY_CAPACITY <= 10**7, f"from N_STEPS={c.N_STEPS} to 10000000"),
        ("LEARNING_STARTS", c.LEARNING_STARTS >= c.N_STEPS,
         f"N_STEPS={c.N_STEPS} or more, or nothing can be drawn"),
        ("TRAIN_INTERVAL", c.TRAIN_INTERVAL >= 1, "1 or more"),
        ("EVAL_INTERVAL", c.EVAL_INTERVAL >= 1 and c.EVAL_INTERVAL % train == 0, of_train),
        ("NUM_STEPS", c.EVAL_INTERVAL <= play < 10**9 and play % look == 0,
         f"LEARNING_STARTS={c.LEARNING_STARTS} plus a multiple of EVAL_INTERVAL={c.EVAL_INTERVAL}"),
        ("TARGET_SYNC_INTERVAL", c.TARGET_SYNC_INTERVAL >= 1 and c.TARGET_SYNC_INTERVAL % train == 0,
         f"{of_train}; between gradient steps there is nothing to copy"),
        ("GAMMA", 0 <= c.GAMMA < 1, "from 0 to below 1; at 1 the value of balancing for ever is infinite"),
        ("LEARNING_RATE", 0 < c.LEARNING_RATE < math.inf, "above 0 and finite"),
        ("LEARNING_RATE_END", 0 <= c.LEARNING_RATE_END < math.inf, "0 or more and finite"),
        ("HIDDEN_SIZE", 1 <= c.HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("EPSILON_START", 0 <= c.EPSILON_START <= 1, "a probability, from 0 to 1"),
        ("EPSILON_END", 0 <= c.EPSILON_END <= c.EPSILON_START, f"from 0 to EPSILON_START={c.EPSILON_START}"),
        ("DECAY_STEPS", c.DECAY_STEPS >= 1, "1 or more; freeze epsilon by EPSILON_START = EPSILON_END"),
        ("SEED", 0 <= c.SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= c.NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_EPISODES", c.EVAL_EPISODES >= 1, "1 or more"),
    ]  # fmt: skip


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[Any], None]]:
    """Yields `report(row)`, which moves a bar of `total` environment steps and prints ten rows of the log."""
    with tqdm(total=total, unit="step", leave=False, disable=None) as bar:

        def report(row: Any) -> None:
            before, now = bar.n, int(row.env_step)
            bar.n = now  # `update` would not count where the bar is not shown
            bar.refresh()
            if 10 * before // total < 10 * now // total:
                columns = ("epsilon", "episode_return", "eval_return", "mean_q", "loss")
                shown = "   ".join(f"{name} {getattr(row, name):5.4g}" for name in columns)
                tqdm.write(f"step {now:6}   {shown}")

        yield report


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
    if any(script[name] != value for name, value in values.items()):
        jax.clear_caches()  # jax remembers traced functions by identity, and these read other constants
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
