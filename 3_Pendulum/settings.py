"""What serves the runs of this folder and changes nothing that is learned: constants, run folder, logs."""

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
from tensorboardX import SummaryWriter
from tqdm import tqdm

BASELINES = ("no_baseline", "batch_mean", "critic_baseline")  # the functions of reinforce.py


def ranges(c: SimpleNamespace) -> list[tuple[str, bool, str]]:
    """Each constant, whether it is as it must be, and the remedy; of pendulum.py or of reinforce.py.

    Written as what is good: a comparison with nan is False, so nan is refused with the rest.
    """
    common = [
        ("NUM_ENVS", 1 <= c.NUM_ENVS <= 10**4, "from 1 to 10000"),
        ("GAMMA", 0 <= c.GAMMA <= 1, "from 0 to 1"),
        ("ACTOR_LEARNING_RATE", 0 < c.ACTOR_LEARNING_RATE < math.inf, "above 0 and finite"),
        ("CRITIC_LEARNING_RATE", 0 < c.CRITIC_LEARNING_RATE < math.inf, "above 0 and finite"),
        ("HIDDEN_SIZE", 1 <= c.HIDDEN_SIZE <= 10**4, "from 1 to 10000"),
        ("SEED", 0 <= c.SEED < 2**31 - 1_000, "from 0 to 2147482647"),
        ("NUM_SEEDS", 1 <= c.NUM_SEEDS <= 1_000, "from 1 to 1000"),
        ("EVAL_INTERVAL", c.EVAL_INTERVAL >= 1, "1 or more"),
        ("EVAL_EPISODES", c.EVAL_EPISODES >= 1, "1 or more"),
    ]
    return common + (ppo_ranges(c) if hasattr(c, "CLIP_EPSILON") else reinforce_ranges(c))


def ppo_ranges(c: SimpleNamespace) -> list[tuple[str, bool, str]]:
    """What holds for pendulum.py only."""
    rollout = c.NUM_ENVS * c.ROLLOUT_STEPS
    divides = c.MINIBATCH_SIZE >= 2 and rollout % c.MINIBATCH_SIZE == 0
    whole_rollouts = c.EVAL_INTERVAL % max(rollout, 1) == 0
    whole_intervals = 1 <= c.NUM_STEPS < 10**9 and c.NUM_STEPS % max(c.EVAL_INTERVAL, 1) == 0
    return [
        ("ROLLOUT_STEPS", 1 <= c.ROLLOUT_STEPS <= 10**5, "from 1 to 100000"),
        ("MINIBATCH_SIZE", divides, f"2 or more and a divisor of NUM_ENVS * ROLLOUT_STEPS = {rollout}"),
        ("EVAL_INTERVAL", whole_rollouts, f"a multiple of NUM_ENVS * ROLLOUT_STEPS = {rollout}"),
        ("NUM_STEPS", whole_intervals, f"a multiple of EVAL_INTERVAL={c.EVAL_INTERVAL}, below 1000000000"),
        ("GAMMA", c.GAMMA < 1, "below 1; at 1 the value of a swing without end is infinite"),
        ("GAE_LAMBDA", 0 <= c.GAE_LAMBDA <= 1, "from 0 to 1"),
        ("NUM_EPOCHS", 1 <= c.NUM_EPOCHS <= 10**4, "from 1 to 10000"),
        ("LEARNING_RATE_END", 0 <= c.LEARNING_RATE_END <= 1, "a share, from 0 to 1"),
        ("MAX_GRAD_NORM", c.MAX_GRAD_NORM > 0, "above 0; 1e9 switches it off"),
        ("CLIP_EPSILON", c.CLIP_EPSILON > 0, "above 0; 1e9 switches it off"),
        ("BETA", 0 <= c.BETA < math.inf, "0 or more and finite"),
        ("KL_TARGET", 0 <= c.KL_TARGET < math.inf, "0 or more and finite"),
        ("BETA", c.BETA > 0 or c.KL_TARGET <= 0, f"above 0 where KL_TARGET={c.KL_TARGET}: 0 doubled is 0"),
        ("SIGMA_MIN", 0 < c.SIGMA_MIN < math.inf, "above 0 and finite"),
        ("SIGMA_START", c.SIGMA_MIN < c.SIGMA_START < 1_000, f"above SIGMA_MIN={c.SIGMA_MIN} and below 1000"),
    ]


def reinforce_ranges(c: SimpleNamespace) -> list[tuple[str, bool, str]]:
    """What holds for reinforce.py only."""
    whole_intervals = c.EVAL_INTERVAL <= c.NUM_STEPS < 10**9 and c.NUM_STEPS % max(c.EVAL_INTERVAL, 1) == 0
    return [
        ("BASELINE", c.BASELINE in BASELINES, f"one of {', '.join(BASELINES)}"),
        ("NUM_ENVS", c.NUM_ENVS >= 2, "2 or more; the mean of one episode is the episode"),
        ("NUM_STEPS", whole_intervals, f"a multiple of EVAL_INTERVAL={c.EVAL_INTERVAL}, below 1000000000"),
        ("CRITIC_STEPS", 1 <= c.CRITIC_STEPS <= 10**4, "from 1 to 10000"),
        ("MINIBATCH_SIZE", 1 <= c.MINIBATCH_SIZE <= 10**6, "from 1 to 1000000"),
    ]


@contextlib.contextmanager
def progress(num_steps: int, shown: Sequence[str], tensorboard_dir: Path | None = None) -> Iterator[Callable]:
    """A progress bar, about ten printed lines, and TensorBoard's curves while a training runs.

    Args:
        num_steps: environment steps of each seed.
        shown: columns of the log to print.
        tensorboard_dir: where the curves go; None: nowhere.

    Yields:
        report(row), to be called with a row of the log after each interval, means over the seeds.
    """
    interval, last_step, last_time = None, 0, time.perf_counter()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=num_steps, unit="step", leave=False, disable=None))
        writer = stack.enter_context(SummaryWriter(str(tensorboard_dir))) if tensorboard_dir else None
        tqdm.write("     step   " + "   ".join(shown))

        def report(row: Any) -> None:
            nonlocal interval, last_step, last_time
            env_step, now = int(row.env_step), time.perf_counter()
            interval = interval or env_step
            # of each seed; the first interval has the compiler's time in it
            speed = {"steps_per_second": (env_step - last_step) / (now - last_time)} if last_step else {}
            last_step, last_time = env_step, now
            bar.update(min(env_step, num_steps) - bar.n)  # the last rollout of reinforce.py runs over
            for name, value in (row._asdict() | speed).items() if writer else ():
                if np.isfinite(value):  # the return of an interval in which no episode ended is nan
                    writer.add_scalar(f"train/{name}", float(value), env_step)
            if env_step % max(interval, num_steps // 10) < interval:
                columns = (f"{getattr(row, name):{len(name)}.4g}" for name in shown)
                tqdm.write(f"{env_step:9,}   " + "   ".join(columns))

        yield report


def log_rows(log: Any, first_seed: int) -> list[dict[str, Any]]:
    """The log, a NamedTuple of arrays [NUM_SEEDS, rows], as lines of log.csv."""
    return [
        {"seed": first_seed + i} | {name: values[i, j].item() for name, values in log._asdict().items()}
        for i, j in np.ndindex(log.env_step.shape)
    ]


def summary(eval_return: np.ndarray, solved: float | None = None) -> str:
    """Mean and sample standard deviation over the seeds [NUM_SEEDS], the lowest, and how many are solved."""
    spread = f" +- {eval_return.std(ddof=1):.1f}" if len(eval_return) > 1 else ""
    text = f"{eval_return.mean():.1f}{spread}, lowest {eval_return.min():.1f}"
    if solved is None:
        return text
    return f"{text}, {(eval_return >= solved).sum()} of {len(eval_return)} seeds solved ({solved:g})"


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
