"""What goes wrong, and how it looks: runs copies of a folder's script with one mistake each.

    python benchmarks/mistakes.py 2_Cart_Pole_DQN

Every row below replaces pieces of the script's text and runs the copy with its default constants, or with
those given. Writes FOLDER/assets/mistakes.csv: one line a row and seed, as the folder's README shows them.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CLIP_AT_TERMINATED = "(1 - last.terminated)"
PREDICTION = "q = jnp.take_along_axis(q, window.action[:, :1], axis=1)[:, 0]"
COPY_NOW = "synchronize(agent.online, agent.target, learning_steps % TARGET_SYNC_INTERVAL == 0)"
PHYSICS = "CartPoleParams(polemass_length=0.05)"
AVERAGE = (
    "nnx.update(agent.target, "
    "optax.incremental_update(nnx.state(agent.online), nnx.state(agent.target), 0.01))"
)

ROWS = {  # folder: script, [(row, what, [(old text, new text)], constants)]
    "2_Cart_Pole_DQN": (
        "cart_pole_dqn.py",
        [
            ("M1", "truncation taken for termination", [(CLIP_AT_TERMINATED, "(1 - ended.any(axis=1))")], []),
            ("M2", "(1 - terminated) forgotten", [(CLIP_AT_TERMINATED, "1.0")], []),
            ("M3", "[B, 1] less [B]", [(PREDICTION, PREDICTION.removesuffix("[:, 0]"))], []),
            ("M4", "Gymnasium's polemass_length", [(PHYSICS, "CartPoleParams()")], []),
            ("M5", "target averaged, not copied", [(COPY_NOW, AVERAGE)], []),
        ],
    ),
}


def main() -> None:
    """Runs every row of one folder."""
    folder = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""
    if folder not in ROWS:
        sys.exit(f"error: give one of the folders {', '.join(ROWS)}")
    name, rows = ROWS[folder]
    text = (ROOT / folder / name).read_text()
    lines = []
    for row, what, changes, constants in rows:
        changed = text
        for old, new in changes:
            if changed.count(old) != 1:
                sys.exit(f"error: {row}: {old!r} stands {changed.count(old)} times in {name}; mend this file")
            changed = changed.replace(old, new)
        with tempfile.TemporaryDirectory() as run_dir:
            copy = Path(run_dir) / name
            copy.write_text(changed)
            subprocess.run([sys.executable, copy, *constants, f"RUN_DIR={run_dir}/run"], check=True)
            result = json.loads((Path(run_dir) / "run" / "result.json").read_text())
        for seed, values in enumerate(zip(result["eval_return"], result["best_eval_return"])):
            lines.append([row, what, " ".join(constants), seed, *values])
    with open(ROOT / folder / "assets" / "mistakes.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "what", "constants", "seed", "eval_return", "best_eval_return"])
        writer.writerows(lines)


if __name__ == "__main__":
    main()
