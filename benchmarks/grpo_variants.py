"""Variants of GRPO side by side on the tiny Llama, and the sampler that is not the trainer.

    python benchmarks/grpo_variants.py                      # 39 runs
    python benchmarks/grpo_variants.py RUNS=runs/variants   # keeps the runs; goes on with them

Tables, curves and pictures are in 5_GRPO_Maxtext/assets: `variants.csv`, `variants_curves.csv`,
`variants.png`, and the same for `mismatch`. The constants are explained in folder 5's
docs/loss_options.md and docs/sampler_and_trainer.md.
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

VARIANTS = {
    "GRPO": "",
    "Dr. GRPO": "BETA=0.0 NORM_ADV_BY_STD=False LOSS_AGG_MODE=seq-mean-token-sum-norm",
    "DAPO": "BETA=0.0 LOSS_AGG_MODE=token-mean EPSILON_HIGH=0.28 "
    "MASK_OVERLONG=True OVERLONG_BUFFER=6 ZERO_VARIANCE_GROUPS=refill",
    "GSPO": "BETA=0.0 LOSS_ALGO=gspo-token EPSILON=0.05",
    "RLOO": "ADVANTAGE=rloo LOSS_AGG_MODE=seq-mean-token-sum",
    "CISPO": "BETA=0.0 LOSS_ALGO=cispo EPSILON_HIGH=4.0 LOSS_AGG_MODE=token-mean",
    "entropy bonus": "ENTROPY_COEF=0.01",
    "length penalty": "OVERLONG_BUFFER=14",
    "one step old": "OFF_POLICY_STEPS=1",
    "one step old, corrected": "OFF_POLICY_STEPS=1 SAMPLER_CORRECTION=2.0",
}
PANELS = (  # of the picture
    ("GRPO", "Dr. GRPO", "DAPO", "GSPO", "RLOO"),
    ("GRPO", "CISPO", "entropy bonus", "length penalty", "one step old", "one step old, corrected"),
)

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


def run_all(name: str, variants: dict[str, str], runs: Path) -> list[dict[str, Any]]:
    """Runs every variant with every seed, each in a folder of `runs`; writes two tables; the curves."""
    lines, curves = [], []
    for variant, constants in variants.items():
        for seed in SEEDS:
            folder = runs / name / f"{variant.replace(' ', '_')}_{seed}"
            line, log = run(f"{constants} SEED={seed}", folder)
            lines.append({"variant": variant, "seed": seed} | line)
            graded = np.cumsum([int(row["answers"]) for row in log]).tolist()
            curves += [
                {"variant": variant, "seed": seed, "graded": total} | {key: row[key] for key in CURVES}
                for row, total in zip(log, graded)
            ]
    write(f"{name}.csv", lines)
    write(f"{name}_curves.csv", curves)
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
        color = "black" if variant == "GRPO" else None  # it is in both halves
        [line] = axes.plot(graded, mean.mean(axis=0), label=variant, lw=1.6, color=color)
        band = mean.min(axis=0), mean.max(axis=0)
        axes.fill_between(graded, *band, color=line.get_color(), alpha=0.15, lw=0)
    axes.set_xlabel("answers graded")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)


def draw_variants(curves: list[dict[str, Any]]) -> None:
    """Share of right answers, in two halves."""
    figure, halves = plt.subplots(1, 2, figsize=(13, 4.8), sharey=True, layout="constrained")
    for axes, variants in zip(halves, PANELS):
        plot(axes, curves, variants, "correct")
    halves[0].set(ylabel=f"answers right, mean of {WINDOW} steps", ylim=(0.7, 1.005))
    for axes in halves:  # DAPO, which asks until groups differ, goes on to four times as many
        axes.set_xlim(0, 15_000)
    save(figure, "variants")


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
    """Both tables with their pictures."""
    draw_variants(run_all("variants", VARIANTS, runs))
    draw_mismatch(run_all("mismatch", MISMATCH, runs))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1].removeprefix("RUNS=")).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
