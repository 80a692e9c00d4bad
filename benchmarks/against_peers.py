"""Folders 2 and 3 against Stable-Baselines3, rejax, purejaxrl and CleanRL, one after another, on one machine.

Every row names its settings: ours are the script's defaults, those of Stable-Baselines3 come from rl-zoo,
those of the others from their own repositories, or stand in their script here. Peers live in environments
of their own, and CleanRL and purejaxrl are clones, which run as they are:

    python3.12 -m venv /tmp/sb3 && /tmp/sb3/bin/pip install stable-baselines3
    python3.12 -m venv /tmp/rejax && /tmp/rejax/bin/pip install rejax 'gymnax<1' gymnasium
    git clone https://github.com/luchris429/purejaxrl /tmp/peers/purejaxrl
    git clone https://github.com/vwxyzjn/cleanrl /tmp/peers/cleanrl
    uv venv -p 3.10 /tmp/purejaxrl && uv pip install -p /tmp/purejaxrl/bin/python --exclude-newer 2024-09-10 \
        -r /tmp/peers/purejaxrl/requirements.txt gymnasium
    uv venv -p 3.11 /tmp/cleanrl && uv pip install -p /tmp/cleanrl/bin/python torch==2.4.1 tensorboard tyro \
        jax==0.4.31 jaxlib==0.4.31 flax==0.9.0 optax==0.2.3 'numpy<2' gymnasium==0.29.1 'setuptools<70'
    python benchmarks/against_peers.py 2_Cart_Pole_DQN SB3=/tmp/sb3/bin/python REJAX=/tmp/rejax/bin/python \
        PUREJAXRL=/tmp/purejaxrl/bin/python PUREJAXRL_CHECKOUT=/tmp/peers/purejaxrl \
        CLEANRL=/tmp/cleanrl/bin/python CLEANRL_CHECKOUT=/tmp/peers/cleanrl
    python benchmarks/against_peers.py 3_Pendulum ...           # the same options

CleanRL pins jax 0.4.8, whose jaxlib is no longer to be had; purejaxrl pins nothing and gets the versions of
the day of its last commit.

Measured alike: one thread each. Seconds are of training with compilation, without imports: wall time, and
the processor's in user and system mode. Our own evaluations during training are inside, those of the others
are not. `eval_return` is of the last policy, in the same 100 greedy episodes on Gymnasium's environment. Time
and steps to the threshold come from each one's own training log: greedy episodes for ours and rejax, episodes
with exploration for the others (the last 100 for Stable-Baselines3, the last 20 for CleanRL).

`version` is the commit and the packages of ours (2026-11-22: the commit that brought the row), a peer's
package or commit; `seeds` is how many `who` has.
Writes benchmarks/dqn_against_peers.csv or ppo_against_peers.csv, one row per trained seed, and prints the
table of MEASUREMENTS.md. Where seeds are trained together, `seconds` are those of all.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
from machine import processor, write_csv

HERE = Path(__file__).resolve().parent
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # each run compiles anew, as its first run did
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}


class Entry(NamedTuple):
    """One line of the table of MEASUREMENTS.md."""

    who: str
    script: str  # in peers/
    seeds: int = 10
    together: bool = True  # all seeds in one program
    python: str = ""  # the option that names its Python; empty: this one
    arguments: tuple[str, ...] = ()


class Comparison(NamedTuple):
    """The lines of one table."""

    table: str
    threshold: float  # Gymnasium's reward_threshold where it has one
    entries: tuple[Entry, ...]


CART_POLE, PENDULUM = "ENV=CartPole-v1", "ENV=Pendulum-v1"
FOLDERS = {
    "2_Cart_Pole_DQN": Comparison("dqn_against_peers.csv", 475, (
        Entry("ours", "our_training.py", arguments=("2_Cart_Pole_DQN/cart_pole_dqn.py",)),
        Entry("ours, one seed", "our_training.py", 2, False, "", ("2_Cart_Pole_DQN/cart_pole_dqn.py",)),
        Entry("Stable-Baselines3 DQN, rl-zoo's settings", "sb3_training.py", 2, False, "SB3", (CART_POLE,)),
        Entry("rejax DQN, its settings", "rejax_training.py", 5, True, "REJAX", (CART_POLE,)),
        Entry("purejaxrl dqn.py, its settings", "purejaxrl_dqn_cart_pole.py", python="PUREJAXRL"),
        Entry("CleanRL dqn_jax.py, its settings", "cleanrl_dqn_cart_pole.py", 2, False, "CLEANRL"),
    )),
    "3_Pendulum": Comparison("ppo_against_peers.csv", -200, (
        Entry("ours", "our_training.py", arguments=("3_Pendulum/pendulum.py",)),
        Entry("ours, one seed", "our_training.py", 3, False, "", ("3_Pendulum/pendulum.py",)),
        Entry("Stable-Baselines3 PPO, rl-zoo's settings", "sb3_training.py", 3, False, "SB3", (PENDULUM,)),
        Entry("rejax PPO, its settings", "rejax_training.py", python="REJAX", arguments=(PENDULUM,)),
        Entry("rejax PPO, its settings, 150,000 steps", "rejax_training.py", python="REJAX",
              arguments=(PENDULUM, "STEPS=150000")),
        Entry("purejaxrl ppo_continuous_action.py, 16 environments", "purejaxrl_ppo_pendulum.py",
              python="PUREJAXRL"),
        Entry("CleanRL ppo_continuous_action.py, MuJoCo's settings", "cleanrl_ppo_pendulum.py", 3, False,
              "CLEANRL"),
    )),
}  # fmt: skip
COLUMNS = [
    "who", "version", "seed", "seeds", "seeds_together", "env_steps", "seconds", "processor_seconds",
    "compile_seconds", "eval_return", "env_steps_to_threshold", "seconds_to_threshold", "machine", "date",
]  # fmt: skip


def expected(comparison: Comparison) -> list[tuple[str, int]]:
    """Who and which seed, of every row in the CSV file, in order."""
    return [(entry.who, seed) for entry in comparison.entries for seed in range(entry.seeds)]


def command(entry: Entry, seeds: list[int], options: dict[str, str]) -> list[str]:
    """The command line that trains some seeds of an entry."""
    python = options[entry.python] if entry.python else sys.executable
    arguments = list(entry.arguments)
    if entry.python:
        arguments.append(f"SEEDS={','.join(map(str, seeds))}")
        if checkout := options.get(f"{entry.python}_CHECKOUT"):
            arguments.append(f"CHECKOUT={checkout}")
    elif not entry.together:
        arguments += [f"SEED={seeds[0]}", "NUM_SEEDS=1"]
    return [python, str(HERE / "peers" / entry.script), *arguments]


def measure(words: list[str]) -> dict[str, Any]:
    """Runs a command; see peer.finish for what comes back."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | ONE_THREAD
    done = subprocess.run(words, cwd=HERE.parent, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(entry: Entry, seeds: list[int], result: dict[str, Any], threshold: float) -> list[dict[str, Any]]:
    """The rows of the CSV file for what one command trained."""
    rows = []
    for seed, eval_return, curve in zip(seeds, result["eval_return"], result["curves"], strict=True):
        reached = [(steps, seconds) for steps, seconds, value in curve if value >= threshold]
        steps, seconds = reached[0] if reached else ("", "")
        values = (
            entry.who, result["version"], seed, entry.seeds, len(seeds), result["env_steps"],
            round(result["seconds"], 2), round(result["processor_seconds"], 2),
            "" if result["compile_seconds"] is None else round(result["compile_seconds"], 2),
            round(eval_return, 3), steps, seconds and round(seconds, 2),
            processor(), time.strftime("%Y-%m-%d"),
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of MEASUREMENTS.md. Seconds are the commands' mean, ± is the sample standard deviation.

    The interval is Student's, 95 % for the mean over the seeds: wide for three, and blind to the fact that no
    return exceeds 500. Steps and seconds to the threshold are the median of the seeds that reach it.
    """
    lines = []
    for who, own in pd.DataFrame(rows).groupby("who", sort=False):
        own = own[COLUMNS[4:12]].apply(pd.to_numeric)
        mean, spread = own.eval_return.mean(), own.eval_return.std()
        half = scipy.stats.t.ppf(0.975, len(own) - 1) * spread / len(own) ** 0.5
        times = [own[name].mean() for name in ("seconds", "processor_seconds", "compile_seconds")]
        times.append(own.seconds_to_threshold.median())
        *seconds, to_it = ("-" if np.isnan(value) else f"{value:.1f} s" for value in times)
        reached = own.env_steps_to_threshold.dropna()
        cells = [
            who, f"{own.env_steps.iloc[0]:,}",
            f"{len(own)} {'together' if own.seeds_together.iloc[0] > 1 else 'in turn'}",
            *seconds, f"{mean:.1f} ± {spread:.1f}", f"{mean - half:.1f} … {mean + half:.1f}",
            f"{len(reached)} / {len(own)}", f"{reached.median():,.0f}" if len(reached) else "-", to_it,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |".replace(" -", " −").replace("| − |", "| - |"))
    return lines


def main() -> None:
    """Runs everybody."""
    folder = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else ""
    if folder not in FOLDERS:
        sys.exit(f"error: give one of the folders {', '.join(FOLDERS)}")
    comparison = FOLDERS[folder]
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    pythons = dict.fromkeys(entry.python for entry in comparison.entries if entry.python)
    checkouts = [f"{name}_CHECKOUT" for name in pythons if name in ("PUREJAXRL", "CLEANRL")]
    for name in (*pythons, *checkouts):
        path = options.get(name, "")
        if not (Path(path, "LICENSE").exists() if name in checkouts else shutil.which(path)):
            sys.exit(f"error: {name}={path}: not there; see the top of this file")

    jobs = [
        (entry, seeds)
        for entry in comparison.entries
        for seeds in ([list(range(entry.seeds))] if entry.together else [[i] for i in range(entry.seeds)])
    ]
    jobs.sort(key=lambda job: job[1][0])  # in turn, so that a slow minute of the machine meets everybody
    rows = []
    for entry, seeds in jobs:
        result = measure(command(entry, seeds, options))
        rows += rows_of(entry, seeds, result, comparison.threshold)
        shown = {name: result[name] for name in ("version", "env_steps", "seconds", "processor_seconds")}
        print(entry.who, seeds, shown, [round(value, 1) for value in result["eval_return"]], flush=True)
    order = expected(comparison)
    rows.sort(key=lambda row: order.index((row["who"], row["seed"])))
    write_csv(HERE / comparison.table, rows)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
