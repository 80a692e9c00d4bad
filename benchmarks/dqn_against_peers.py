"""DQN on CartPole-v1: this project's ten seeds against Stable-Baselines3 and rejax, in turn, on one machine.

Everybody uses one thread and their own best settings: ours are the script's defaults (50,000 steps), those of
Stable-Baselines3 come from rl-zoo (50,000 steps), those of rejax from its repository (100,000 steps). All are
judged alike: 100 greedy episodes of gymnasium.make("CartPole-v1") by the last policy. Seconds are of training
with compilation. Peers live in environments of their own:

    python3 -m venv /tmp/sb3 && /tmp/sb3/bin/pip install stable-baselines3
    python3 -m venv /tmp/rejax && /tmp/rejax/bin/pip install rejax 'gymnax<1' gymnasium
    python benchmarks/dqn_against_peers.py SB3=/tmp/sb3/bin/python [REJAX=/tmp/rejax/bin/python] [SEEDS=3]

Writes benchmarks/dqn_against_peers.csv: one row a trained seed.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpo_step_against_trl import processor

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "2_Cart_Pole_DQN" / "cart_pole_dqn.py"


def ours() -> dict:
    """All ten seeds of our script with its default constants."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, SCRIPT, f"RUN_DIR={folder}/run"], check=True, capture_output=True)
        result = json.loads(Path(f"{folder}/run/result.json").read_text())
    return result | {"seconds": result["compile_seconds"] + result["train_seconds"]}


def peer(python: str, script: str, seed: int) -> dict:
    """One seed of a peer."""
    done = subprocess.run([python, HERE / script, str(seed)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs everybody, prints the ratios."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    seeds = int(options.get("SEEDS", "3"))
    peers = {name: options[name] for name in ("SB3", "REJAX") if name in options}
    for name, python in peers.items():
        if not shutil.which(python):
            sys.exit(f"error: {name}={python}: no such Python; see the top of this file")
    scripts = {"SB3": "sb3_dqn_cart_pole.py", "REJAX": "rejax_dqn_cart_pole.py"}
    rows = []

    def add(who: str, seed: int, seconds: float, result: dict, i: int = 0) -> None:
        rows.append(
            {
                "who": who,
                "seed": seed,
                "seconds": round(seconds, 2),
                "compile_seconds": round(result["compile_seconds"], 2),
                "eval_return": result["eval_return"][i],
                "machine": processor(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
        print(f"{who:6} seed {seed}: {seconds:6.1f} s, return {result['eval_return'][i]:.1f}", flush=True)

    result = ours()
    for i in range(len(result["eval_return"])):
        add("ours, all seeds together", i, result["seconds"], result, i)
    for seed in range(seeds):  # in turn, so that a slow minute of the machine meets everybody
        for name, python in peers.items():
            of_peer = peer(python, scripts[name], seed)
            add(name, seed, of_peer["seconds"], of_peer)

    with open(HERE / "dqn_against_peers.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for name in peers:
        seconds = [row["seconds"] for row in rows if row["who"] == name]
        mean = sum(seconds) / len(seconds)
        print(f"our ten seeds took {result['seconds'] / mean:.2f} times the seconds of one seed of {name}")


if __name__ == "__main__":
    main()
