"""Five variants of GRPO side by side on the tiny Llama, three seeds each.

    python benchmarks/grpo_variants.py        # 15 runs one after another, about 40 minutes on 2 cores

The table, the curves and the picture are in 5_GRPO_Maxtext/assets: `variants.csv`, `variants_curves.csv`,
`variants.png`. What the constants mean stands in folder 5's README, under "Options of the loss".
"""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from grpo_step_against_trl import processor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "5_GRPO_Maxtext" / "assets"
SCRIPT = "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py"
SEEDS = (0, 1, 2)
WINDOW = 10  # steps of the moving mean in the picture: one step's 128 answers are noisy

# Two updates per batch: at the first one the ratio is 1, and neither a clip nor GSPO's ratio matters.
COMMON = "NUM_ITERATIONS=2 LEARNING_RATE=5e-4 NUM_BATCHES=100"
VARIANTS = {
    "GRPO": "",
    "Dr. GRPO": "BETA=0.0 NORM_ADV_BY_STD=False LOSS_AGG_MODE=seq-mean-token-sum-norm",
    "DAPO": "BETA=0.0 LOSS_AGG_MODE=token-mean EPSILON_HIGH=0.28 "
    "MASK_OVERLONG=True ZERO_VARIANCE_GROUPS=refill",
    "GSPO": "BETA=0.0 LOSS_ALGO=gspo-token EPSILON=0.05",
    "RLOO": "ADVANTAGE=rloo LOSS_AGG_MODE=seq-mean-token-sum",
}
KEPT = ("answer_accuracy", "format_accuracy", "greedy_answer_accuracy")


def run(arguments: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Runs the main script; returns the line for the table, and the run's train_log.csv."""
    command = " ".join(f"python {SCRIPT} {arguments}".split())
    print(f"\n{command}", flush=True)
    words = [sys.executable, *command.split()[1:], f"RUN_DIR={folder}"]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    line = {"command": command}
    line |= {f"{when}_{key}": result[when][key] for when in ("before", "after") for key in KEPT}
    line |= {"questions": result["before"]["questions"], "seconds": result["seconds"]}
    line |= {"machine": processor(), "date": time.strftime("%Y-%m-%d")}
    with open(folder / "train_log.csv", newline="") as file:
        return line, list(csv.DictReader(file))


def write(name: str, lines: list[dict[str, Any]]) -> None:
    """Writes a table into the assets of folder 5."""
    with open(ASSETS / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def run_variants() -> None:
    """Runs all, and writes the two tables and the picture."""
    lines, curves = [], []
    for name, constants in VARIANTS.items():
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                line, log = run(f"{COMMON} {constants} SEED={seed}", Path(folder) / "run")
            lines.append({"variant": name, "seed": seed} | line)
            curves += [
                {"variant": name, "seed": seed}
                | {key: row[key] for key in ("step", "correct", "format_ok", "kl", "length")}
                for row in log
            ]
    write("variants.csv", lines)
    write("variants_curves.csv", curves)
    draw(curves)


def draw(curves: list[dict[str, Any]]) -> None:
    """Share of right answers against steps: mean of the seeds, band from lowest to highest."""
    figure, axes = plt.subplots(figsize=(9, 4.5), facecolor="white", layout="constrained")
    for name in dict.fromkeys(row["variant"] for row in curves):
        by_seed = np.array(
            [
                [float(r["correct"]) for r in curves if (r["variant"], int(r["seed"])) == (name, seed)]
                for seed in SEEDS
            ]
        )  # [seeds, steps]
        mean = np.stack([np.convolve(row, np.ones(WINDOW) / WINDOW, "valid") for row in by_seed])
        steps = np.arange(WINDOW, by_seed.shape[1] + 1)
        [line] = axes.plot(steps, mean.mean(axis=0), label=name, lw=1.6)
        axes.fill_between(steps, mean.min(axis=0), mean.max(axis=0), color=line.get_color(), alpha=0.15, lw=0)
    axes.set(
        xlabel="training step", ylabel=f"answers right, mean of {WINDOW} steps", ylim=(0, 1.02),
        title=f"{len(SEEDS)} seeds each: mean, lowest and highest",
    )  # fmt: skip
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(ASSETS / "variants.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run_variants()
