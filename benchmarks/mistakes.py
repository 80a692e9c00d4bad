"""What goes wrong, and how it looks: runs changed copies of a folder's script.

    python benchmarks/mistakes.py 2_Cart_Pole_DQN

Each row below replaces a piece of the script's text and runs the copy, with its default constants or with
those given. Writes FOLDER/assets/mistakes.csv (rows M) and exercises.csv (rows E): one line a row and seed,
which the folder's README sums up. About 35 seconds a row.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Row(NamedTuple):
    """One changed copy."""

    name: str  # as in the README's tables
    what: str
    old: str = ""  # a piece of the script that stands there once ...
    new: str = ""  # ... and what stands there instead
    constants: tuple[str, ...] = ()


FUTURE = "(1 - last.terminated)"
PREDICTION = "q = jnp.take_along_axis(q, window.action[:, :1], axis=1)[:, 0]"
COPY = "synchronize(agent.online, agent.target, learning_steps % TARGET_SYNC_INTERVAL == 0)"
WEIGHTS = "nnx.state(agent.online), nnx.state(agent.target)"
AVERAGE = f"nnx.update(agent.target, optax.incremental_update({WEIGHTS}, 0.01))"
PHYSICS = "CartPoleParams(polemass_length=0.05)"

SCRIPTS = {"2_Cart_Pole_DQN": "cart_pole_dqn.py"}
ROWS = {
    "2_Cart_Pole_DQN": [
        Row("M1", "truncation taken for termination", FUTURE, "(1 - ended.any(axis=1))"),
        Row("M2", "(1 - terminated) forgotten", FUTURE, "1.0"),
        Row("M3", "[B, 1] less [B]", PREDICTION, PREDICTION.removesuffix("[:, 0]")),
        Row("M4", "Gymnasium's polemass_length", PHYSICS, "CartPoleParams()"),
        Row("E1a", "as it is", constants=("N_STEPS=1", "TARGET_SYNC_INTERVAL=100")),
        Row("E1b", "as it is", constants=("N_STEPS=1", "TARGET_SYNC_INTERVAL=50")),
        Row("E2a", "as it is", constants=("NUM_STEPS=26_000",)),
        Row("E2b", "as it is", constants=("NUM_STEPS=26_000", "DECAY_STEPS=4_000")),
        Row("E3", "target network averaged", COPY, AVERAGE),
    ]
}


def run(folder: str, row: Row) -> list[list]:
    """Runs one changed copy; returns a line for each seed.

    Raises:
        SystemExit: the piece to replace does not stand in the script exactly once.
    """
    text = (ROOT / folder / SCRIPTS[folder]).read_text()
    if row.old and text.count(row.old) != 1:
        sys.exit(
            f"error: {row.name}: {row.old!r} stands {text.count(row.old)} times in the script; mend ROWS"
        )
    with tempfile.TemporaryDirectory() as run_dir:
        copy = Path(run_dir) / SCRIPTS[folder]
        copy.write_text(text.replace(row.old, row.new) if row.old else text)
        subprocess.run([sys.executable, copy, *row.constants, f"RUN_DIR={run_dir}/run"], check=True)
        result = json.loads((Path(run_dir) / "run" / "result.json").read_text())
    returns = zip(result["eval_return"], result["best_eval_return"])
    return [
        [row.name, row.what, " ".join(row.constants), seed, *values] for seed, values in enumerate(returns)
    ]


def main() -> None:
    """Runs every row of one folder."""
    folder = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""
    if folder not in ROWS:
        sys.exit(f"error: give one of the folders {', '.join(ROWS)}")
    lines = [line for row in ROWS[folder] for line in run(folder, row)]
    for letter, name in (("M", "mistakes"), ("E", "exercises")):
        with open(ROOT / folder / "assets" / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["row", "what", "constants", "seed", "eval_return", "best_eval_return"])
            writer.writerows(line for line in lines if line[0].startswith(letter))


if __name__ == "__main__":
    main()
