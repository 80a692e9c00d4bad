"""The sampler that is not the trainer: the tiny Llama draws with a cut that training does not know of.

    python benchmarks/sampler_mismatch.py                      # 9 runs
    python benchmarks/sampler_mismatch.py RUNS=runs/mismatch   # keeps the runs; goes on with them

Table, curves and picture are in 5_GRPO_Maxtext/assets: `mismatch.csv`, `mismatch_curves.csv`, `mismatch.png`.
The constants are explained in folder 5's docs/sampler_and_trainer.md.
"""

import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

import matplotlib
import numpy as np
from machine import processor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ASSETS = ROOT / "5_GRPO_Maxtext" / "assets"
SCRIPT = "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py"
SEEDS = (0, 1, 2)
WINDOW = 10  # steps of the moving mean in the pictures: one step's 128 answers are noisy

# Hot, so that five tokens hold but part of the probability; without the KL, which would hold the rest.
HOT = "NUM_ITERATIONS=1 LEARNING_RATE=1e-3 TEMPERATURE=3.0 BETA=0.0 NUM_BATCHES=100"
MISMATCH = {
    "no cut": HOT,
    "top-k 5": f"{HOT} TOP_K=5",
    "top-k 5, corrected": f"{HOT} TOP_K=5 SAMPLER_CORRECTION=2.0",
}
KEPT = ("answer_accuracy", "lenient_accuracy", "format_accuracy", "greedy_answer_accuracy")
CURVES = ("step", "correct", "format_ok", "kl", "length", "entropy", "mismatch")


# %% Runs -----------------------------------------------------------------------------------------------
def run(arguments: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Runs the main script, unless it has; returns the line for the table, and the run's train_log.csv."""
    command = " ".join(f"python {SCRIPT} {arguments}".split())
    if not (folder / "result.json").exists():
        print(f"\n{command}", flush=True)
        words = [sys.executable, *command.split()[1:], f"RUN_DIR={folder}"]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    with open(folder / "train_log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    line = {"command": command}
    line |= {f"{when}_{key}": result[when][key] for when in ("before", "after") for key in KEPT}
    line |= {"questions": result["before"]["questions"], "graded": sum(int(row["answers"]) for row in log)}
    line |= {"seconds": result["seconds"], "machine": processor(), "date": time.strftime("%Y-%m-%d")}
    return line, log


def run_all(runs: Path) -> list[dict[str, Any]]:
    """Runs everything with every seed, each in a folder of `runs`; writes both tables; returns the curves."""
    lines, curves = [], []
    for variant, constants in MISMATCH.items():
        for seed in SEEDS:
            folder = runs / f"{variant.replace(' ', '_')}_{seed}"
            line, log = run(f"{constants} SEED={seed}", folder)
            lines.append({"variant": variant, "seed": seed} | line)
            graded = np.cumsum([int(row["answers"]) for row in log]).tolist()
            curves += [
                {"variant": variant, "seed": seed, "graded": total} | {key: row[key] for key in CURVES}
                for row, total in zip(log, graded)
            ]
    write("mismatch.csv", lines)
    write("mismatch_curves.csv", curves)
    return curves


def write(name: str, lines: list[dict[str, Any]]) -> None:
    """Writes a table into the assets of folder 5."""
    with open(ASSETS / name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


# %% Pictures -------------------------------------------------------------------------------------------
def plot(axes, curves: list[dict[str, Any]], variants: Sequence[str], figure: str) -> None:
    """A figure of the log against answers graded: mean of the seeds, band from lowest to highest."""
    for variant in variants:
        mine = [row for row in curves if row["variant"] == variant]
        of_seed = [[r for r in mine if r["seed"] == seed] for seed in dict.fromkeys(r["seed"] for r in mine)]
        values = np.array([[float(r[figure]) for r in rows] for rows in of_seed])  # [seeds, steps]
        mean = np.stack([np.convolve(row, np.ones(WINDOW) / WINDOW, "valid") for row in values])
        graded = np.mean([[int(r["graded"]) for r in rows] for rows in of_seed], axis=0)[WINDOW - 1 :]
        [line] = axes.plot(graded, mean.mean(axis=0), label=variant, lw=1.6)
        band = mean.min(axis=0), mean.max(axis=0)
        axes.fill_between(graded, *band, color=line.get_color(), alpha=0.15, lw=0)
    axes.set_xlabel("answers graded")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)


def draw_mismatch(curves: list[dict[str, Any]]) -> None:
    """What the health line looks at, and what becomes of the answers."""
    figure, halves = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    labels = {"mismatch": "mismatch (nats per token)", "correct": "answers right"}
    for axes, (name, label) in zip(halves, labels.items()):
        plot(axes, curves, list(MISMATCH), name)
        axes.set(ylabel=f"{label}, mean of {WINDOW} steps", ylim=(0, None))
    save(figure, "mismatch")


def save(figure, name: str) -> None:
    """Writes a picture into the assets of folder 5."""
    figure.suptitle(f"{len(SEEDS)} seeds each: mean, lowest and highest")
    figure.savefig(ASSETS / f"{name}.png", dpi=110, facecolor="white")
    plt.close(figure)


def main(runs: Path) -> None:
    """Tables and picture."""
    draw_mismatch(run_all(runs))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1].removeprefix("RUNS=")).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
