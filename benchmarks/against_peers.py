"""A folder's ten seeds against Stable-Baselines3 and rejax, in turn, on one machine.

Everybody uses one thread and their own best settings: ours are the script's defaults, those of
Stable-Baselines3 come from rl-zoo, those of rejax from its repository; the steps of each stand in its script.
All are judged alike: 100 greedy episodes on Gymnasium's environment by the last policy. Seconds are of
training with compilation. Peers live in environments of their own:

    python3 -m venv /tmp/sb3 && /tmp/sb3/bin/pip install stable-baselines3
    python3 -m venv /tmp/rejax && /tmp/rejax/bin/pip install rejax 'gymnax<1' gymnasium
    python benchmarks/against_peers.py 2_Cart_Pole_DQN SB3=/tmp/sb3/bin/python REJAX=/tmp/rejax/bin/python
    python benchmarks/against_peers.py 3_Pendulum SB3=/tmp/sb3/bin/python REJAX=/tmp/rejax/bin/python SEEDS=3

Writes benchmarks/dqn_against_peers.csv or ppo_against_peers.csv: one row a trained seed.
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
FOLDERS = {  # folder: script, table, scripts of the peers
    "2_Cart_Pole_DQN": (
        "cart_pole_dqn.py",
        "dqn_against_peers.csv",
        {"SB3": "sb3_dqn_cart_pole.py", "REJAX": "rejax_dqn_cart_pole.py"},
    ),
    "3_Pendulum": (
        "pendulum.py",
        "ppo_against_peers.csv",
        {"SB3": "sb3_ppo_pendulum.py", "REJAX": "rejax_ppo_pendulum.py"},
    ),
}


def ours(script: Path, *arguments: str) -> dict:
    """Our script with its default constants, but for `arguments`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *arguments, f"RUN_DIR={folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        result = json.loads(Path(f"{folder}/run/result.json").read_text())
    return result | {"seconds": result["compile_seconds"] + result["train_seconds"]}


def peer(python: str, script: str, seed: int) -> dict:
    """One seed of a peer."""
    done = subprocess.run([python, HERE / script, str(seed)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs everybody, prints the ratios."""
    folder = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else ""
    if folder not in FOLDERS:
        sys.exit(f"error: give one of the folders {', '.join(FOLDERS)}")
    name_of_script, table, scripts = FOLDERS[folder]
    script = HERE.parent / folder / name_of_script
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    seeds = int(options.get("SEEDS", "3"))
    peers = {name: options[name] for name in scripts if name in options}
    for name, python in peers.items():
        if not shutil.which(python):
            sys.exit(f"error: {name}={python}: no such Python; see the top of this file")
    rows = []

    def add(who: str, seed: int, result: dict, i: int = 0) -> None:
        rows.append(
            {
                "who": who,
                "seed": seed,
                "seconds": round(result["seconds"], 2),
                "compile_seconds": round(result["compile_seconds"], 2),
                "eval_return": result["eval_return"][i],
                "machine": processor(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
        print(f"{who:24} seed {seed}: {result['seconds']:6.1f} s, return {result['eval_return'][i]:.1f}")

    ten = ours(script)
    for i in range(len(ten["eval_return"])):
        add("ours, all seeds together", i, ten, i)
    for seed in range(seeds):  # in turn, so that a slow minute of the machine meets everybody
        add("ours, one seed", seed, ours(script, f"SEED={seed}", "NUM_SEEDS=1"))
        for name, python in peers.items():
            add(name, seed, peer(python, scripts[name], seed))

    with open(HERE / table, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for name in peers:
        seconds = [row["seconds"] for row in rows if row["who"] == name]
        mean = sum(seconds) / len(seconds)
        print(f"our ten seeds took {ten['seconds'] / mean:.2f} times the seconds of one seed of {name}")


if __name__ == "__main__":
    main()
