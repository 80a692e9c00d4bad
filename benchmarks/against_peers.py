"""Folders 2 and 3 against Stable-Baselines3, rejax, purejaxrl and CleanRL, on one machine.

They run one after another. Every row names its settings. Ours are the script's defaults, those of
Stable-Baselines3 come from rl-zoo, and those of the others from their own repositories or from
their scripts here. Each peer has its own environment. CleanRL and purejaxrl are clones, which run
as they are:

    python3.12 -m venv /tmp/sb3 && /tmp/sb3/bin/pip install stable-baselines3
    python3.12 -m venv /tmp/rejax && /tmp/rejax/bin/pip install rejax 'gymnax<1' gymnasium
    git clone https://github.com/luchris429/purejaxrl /tmp/peers/purejaxrl
    git clone https://github.com/vwxyzjn/cleanrl /tmp/peers/cleanrl
    uv venv -p 3.10 /tmp/purejaxrl
    uv pip install -p /tmp/purejaxrl/bin/python --exclude-newer 2024-09-10 \
        -r /tmp/peers/purejaxrl/requirements.txt gymnasium
    uv venv -p 3.11 /tmp/cleanrl
    uv pip install -p /tmp/cleanrl/bin/python torch==2.4.1 tensorboard tyro jax==0.4.31 \
        jaxlib==0.4.31 flax==0.9.0 optax==0.2.3 'numpy<2' gymnasium==0.29.1 'setuptools<70'
    python benchmarks/against_peers.py 2_Cart_Pole_DQN SB3=/tmp/sb3/bin/python \
        REJAX=/tmp/rejax/bin/python PUREJAXRL=/tmp/purejaxrl/bin/python \
        PUREJAXRL_CHECKOUT=/tmp/peers/purejaxrl CLEANRL=/tmp/cleanrl/bin/python \
        CLEANRL_CHECKOUT=/tmp/peers/cleanrl
    python benchmarks/against_peers.py 3_Pendulum ...           # the same options

CleanRL pins jax 0.4.8, whose jaxlib is no longer to be had; purejaxrl pins nothing and gets the
versions of the day of its last commit. (With Python 3.11, its navix 0.7.0 can't be imported, and
0.7.4 can.)

Measured alike: one thread each. Seconds are of training with compilation, without imports: wall
time, and the processor's in user and system mode. Our own evaluations during training are inside,
those of the others are not. `eval_return` is of the last policy, in the same 100 greedy episodes on
Gymnasium's environment. Time and steps to the threshold come from each one's own training log:
greedy episodes for ours and rejax, episodes with exploration for the others (the last 100 for
Stable-Baselines3, the last 20 for CleanRL).

`version` is the commit and the packages of ours (2026-11-22: the commit that brought the row), a
peer's package or commit; `seeds` is how many `who` has. Writes benchmarks/dqn_against_peers.csv or
ppo_against_peers.csv, one row per trained seed. Where seeds are trained together, `seconds` are
those of all. `make pages` makes the table of MEASUREMENTS.md of it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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
    # its script is peers/PEER_training.py, the option PEER names its Python; empty: ours
    peer: str = ""
    seeds: int = 10
    together: bool = True  # all seeds in one program
    steps: int = 0  # 0: the peer's own number


class Comparison(NamedTuple):
    """The lines of one table."""

    table: str
    script: str  # ours
    env: str  # Gymnasium's name
    threshold: float  # Gymnasium's reward_threshold where it has one
    entries: tuple[Entry, ...]


DQN = Comparison(
    "dqn_against_peers.csv",
    "2_Cart_Pole_DQN/cart_pole_dqn.py",
    "CartPole-v1",
    475,
    (
        Entry("ours"),
        Entry("ours, one seed", seeds=2, together=False),
        Entry("Stable-Baselines3 DQN, rl-zoo's settings", "sb3", 2, together=False),
        Entry("rejax DQN, its settings", "rejax", 5),
        Entry("purejaxrl dqn.py, its settings", "purejaxrl"),
        Entry("CleanRL dqn_jax.py, its settings", "cleanrl", 2, together=False),
    ),
)
PPO = Comparison(
    "ppo_against_peers.csv",
    "3_Pendulum/pendulum.py",
    "Pendulum-v1",
    -200,
    (
        Entry("ours"),
        Entry("ours, one seed", seeds=3, together=False),
        Entry("Stable-Baselines3 PPO, rl-zoo's settings", "sb3", 3, together=False),
        Entry("rejax PPO, its settings", "rejax"),
        Entry("rejax PPO, its settings, 150,000 steps", "rejax", steps=150_000),
        Entry("purejaxrl ppo_continuous_action.py, 16 environments", "purejaxrl"),
        Entry("CleanRL ppo_continuous_action.py, MuJoCo's settings", "cleanrl", 3, together=False),
    ),
)
FOLDERS = {"2_Cart_Pole_DQN": DQN, "3_Pendulum": PPO}
PYTHONS = ("SB3", "REJAX", "PUREJAXRL", "CLEANRL")
CHECKOUTS = ("PUREJAXRL_CHECKOUT", "CLEANRL_CHECKOUT")


def command(
    comparison: Comparison, entry: Entry, seeds: list[int], options: dict[str, str]
) -> list[str]:
    """The command line that trains some seeds of an entry."""
    script = str(HERE / "peers" / f"{entry.peer or 'our'}_training.py")
    if not entry.peer:
        one = [] if entry.together else [f"SEED={seeds[0]}", "NUM_SEEDS=1"]
        return [sys.executable, script, comparison.script, *one]
    option = entry.peer.upper()
    words = [f"ENV={comparison.env}", f"STEPS={entry.steps}", f"SEEDS={','.join(map(str, seeds))}"]
    return [options[option], script, *words, f"CHECKOUT={options.get(f'{option}_CHECKOUT', '')}"]


def measure(words: list[str]) -> dict[str, Any]:
    """Runs a command; see peer.finish for what comes back."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("JAX_")
    } | ONE_THREAD
    done = subprocess.run(words, cwd=HERE.parent, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(words)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(
    entry: Entry, seeds: list[int], result: dict[str, Any], threshold: float
) -> list[dict[str, Any]]:
    """The rows of the CSV file for what one command trained."""
    rows = []
    for seed, eval_return, curve in zip(
        seeds, result["eval_return"], result["curves"], strict=True
    ):
        reached = [(steps, seconds) for steps, seconds, value in curve if value >= threshold]
        steps, seconds = reached[0] if reached else ("", "")
        compiling = result["compile_seconds"]
        rows.append(
            {
                "who": entry.who,
                "version": result["version"],
                "seed": seed,
                "seeds": entry.seeds,
                "seeds_together": len(seeds),
                "env_steps": result["env_steps"],
                "seconds": round(result["seconds"], 2),
                "processor_seconds": round(result["processor_seconds"], 2),
                "compile_seconds": "" if compiling is None else round(compiling, 2),
                "eval_return": round(eval_return, 3),
                "env_steps_to_threshold": steps,
                "seconds_to_threshold": seconds and round(seconds, 2),
                "machine": processor(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    return rows


def main() -> None:
    """Runs everybody."""
    folder = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else ""
    if folder not in FOLDERS:
        sys.exit(f"error: give one of the folders {', '.join(FOLDERS)}")
    comparison = FOLDERS[folder]
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    for name in (*PYTHONS, *CHECKOUTS):
        path = options.get(name, "")
        if not (Path(path, "LICENSE").exists() if name in CHECKOUTS else shutil.which(path)):
            sys.exit(f"error: {name}={path}: not there; see the top of this file")

    jobs = [
        (entry, seeds)
        for entry in comparison.entries
        for seeds in (
            [list(range(entry.seeds))] if entry.together else [[i] for i in range(entry.seeds)]
        )
    ]
    # in turn, so that a slow minute of the machine meets everybody
    jobs.sort(key=lambda job: job[1][0])
    rows = []
    for entry, seeds in jobs:
        result = measure(command(comparison, entry, seeds, options))
        rows += rows_of(entry, seeds, result, comparison.threshold)
        shown = {
            name: result[name] for name in ("version", "env_steps", "seconds", "processor_seconds")
        }
        print(
            entry.who,
            seeds,
            shown,
            [round(value, 1) for value in result["eval_return"]],
            flush=True,
        )
    order = [entry.who for entry in comparison.entries]
    rows.sort(key=lambda row: (order.index(row["who"]), row["seed"]))
    write_csv(HERE / comparison.table, rows)


if __name__ == "__main__":
    main()
