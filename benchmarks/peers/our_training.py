"""A numbered script with a clock around its training; run by against_peers.py.

    python benchmarks/peers/our_training.py 2_Cart_Pole_DQN/cart_pole_dqn.py NUM_SEEDS=1

The script's own evaluations during training are inside the clock. Last line: see peer.finish.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import pandas as pd
import peer
from machine import commit, versions

path, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
sys.path.insert(0, str(path.parent))
script = importlib.import_module(path.stem)
train, times, made_from = script.train, [], commit()


def timed(c):
    """Compiles and trains, as `train` does."""
    started = peer.clocks()
    result = train(c)
    times.append(peer.clocks() - started)
    return result


script.train = timed
with tempfile.TemporaryDirectory() as folder:
    script.main([*arguments, f"RUN_DIR={folder}/run"])
    result = json.loads(Path(folder, "run", "result.json").read_text())
    log = pd.read_csv(Path(folder, "run", "log.csv"))

compile_seconds = result["compile_seconds"]
[spent] = times
env_steps = log.env_step.max()
curves = [
    peer.evenly(spent, compile_seconds, env_steps, rows.env_step, rows.eval_return)
    for _, rows in log.groupby("seed", sort=False)
]
version = f"commit {made_from}, {versions('jax', 'flax', 'optax')}"
peer.finish(version, env_steps, spent, result["eval_return"], curves, compile_seconds)
