"""A numbered script with a clock around its training; run by against_peers.py.

    python benchmarks/peers/our_training.py 2_Cart_Pole_DQN/cart_pole_dqn.py NUM_SEEDS=1

The script's own evaluations during training are inside the clock. Last line: see peer.finish.
"""

import csv
import importlib
import json
import sys
import tempfile
from pathlib import Path

import peer
from machine import commit, versions

path, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
sys.path.insert(0, str(path.parent))
script = importlib.import_module(path.stem)
train = script.train
clocks = []


def timed(*args, **kwargs):
    """Compiles and trains, as `train` does."""
    clock = peer.Clock()
    result = train(*args, **kwargs)
    clocks.append(clock.read())
    return result


script.train = timed
with tempfile.TemporaryDirectory() as folder:
    script.main([*arguments, f"RUN_DIR={folder}/run"])
    result = json.loads(Path(folder, "run", "result.json").read_text())
    with open(Path(folder, "run", "log.csv"), newline="") as file:
        log = list(csv.DictReader(file))

compile_seconds = result["compile_seconds"]
[clock] = clocks
env_steps = max(int(row["env_step"]) for row in log)
curves = []
for seed in dict.fromkeys(row["seed"] for row in log):
    rows = [row for row in log if row["seed"] == seed]
    steps, returns = ([float(row[name]) for row in rows] for name in ("env_step", "eval_return"))
    curves.append(peer.evenly(clock, compile_seconds, env_steps, steps, returns))
version = f"commit {commit()}, {versions('jax', 'flax', 'optax')}"
peer.finish(version, env_steps, clock, result["eval_return"], curves, compile_seconds)
