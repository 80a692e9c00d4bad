"""What serves a run of grpo_mnist.py and changes nothing that it learns: constants, run folder, logs."""

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
import numpy as np
import pydantic
from tqdm import tqdm

ADVANTAGES = ("group_std", "group", "batch_mean", "leave_one_out")
KL_ESTIMATORS = ("k1", "k2", "k3")


def ranges(c: SimpleNamespace) -> list[tuple[str, bool, str]]:
    """Each constant, whether it is as it must be, and the remedy.

    Written as what is good: a comparison with nan is False, so nan is refused with the rest.
    """
    fewest = 1 if c.ADVANTAGE == "batch_mean" else 2  # the batch's mean alone needs no group
    divides = c.MICRO_BATCH_SIZE >= 0 and c.BATCH_SIZE % max(c.MICRO_BATCH_SIZE, 1) == 0
    return [
        ("ADVANTAGE", c.ADVANTAGE in ADVANTAGES, f"one of {', '.join(ADVANTAGES)}"),
        ("NUM_GENERATIONS", fewest <= c.NUM_GENERATIONS <= 1024, "from 2 (ADVANTAGE=batch_mean: 1) to 1024"),
        ("NUM_ITERATIONS", 1 <= c.NUM_ITERATIONS <= 64, "from 1 to 64"),
        ("CLIP_EPSILON", c.CLIP_EPSILON > 0, "above 0; inf switches the clip off"),
        ("CLIP_EPSILON_HIGH", c.CLIP_EPSILON_HIGH > 0, "above 0; inf switches the clip off"),
        ("BETA", 0 <= c.BETA < math.inf, "0 or more, and finite"),
        ("KL_ESTIMATOR", c.KL_ESTIMATOR in KL_ESTIMATORS, f"one of {', '.join(KL_ESTIMATORS)}"),
        ("BATCH_SIZE", 1 <= c.BATCH_SIZE <= 10**5, "from 1 to 100000"),
        ("MICRO_BATCH_SIZE", divides, f"0, or a divisor of BATCH_SIZE={c.BATCH_SIZE}"),
        ("NUM_EPOCHS", 1 <= c.NUM_EPOCHS <= 10**3, "from 1 to 1000"),
        ("LEARNING_RATE", 0 < c.LEARNING_RATE < math.inf, "above 0 and finite"),
        ("WARMUP_FRACTION", 0 <= c.WARMUP_FRACTION < 1, "from 0 to below 1"),
        ("HIDDEN_SIZE", 1 <= c.HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SEED", 0 <= c.SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= c.NUM_SEEDS <= 100, "from 1 to 100"),
        ("LOGS_PER_EPOCH", c.LOGS_PER_EPOCH >= 1, "1 or more"),
    ]  # fmt: skip


@contextlib.contextmanager
def progress(method: str, num_rows: int, rows_per_line: int) -> Iterator[Callable]:
    """A progress bar while a training runs, and a printed line after every `rows_per_line` rows of the log.

    Yields:
        report(row), to be called with each row of the log, means over the seeds.
    """
    with tqdm(total=num_rows, desc=method, leave=False, disable=None) as bar:
        rows = []

        def report(row: Any) -> None:
            rows.append(row)
            bar.update()
            if len(rows) % rows_per_line == 0:
                shares = ("validation_accuracy", "validation_sampled_accuracy", "reward", "zero_variance")
                texts = [f"{name} {100 * getattr(row, name):5.2f} %" for name in shares]
                tqdm.write("   ".join([f"{method:13s}   images {int(row.images):7d}", *texts]))

        yield report


def log_rows(method: str, log: Any, first_seed: int) -> list[dict[str, Any]]:
    """The log, a NamedTuple of arrays [NUM_SEEDS, rows], as lines of log.csv."""
    return [
        {"method": method, "seed": first_seed + i}
        | {name: values[i, j].item() for name, values in log._asdict().items()}
        for i, j in np.ndindex(log.images.shape)
    ]


def percent(accuracies: Iterable[float]) -> str:
    """Mean and sample standard deviation over the seeds."""
    values = 100 * np.array(list(accuracies))
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread} %"


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
