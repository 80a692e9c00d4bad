"""Folder 5's runs, evaluated by EleutherAI's lm-evaluation-harness: question by question against
our figures.

    python benchmarks/against_lm_eval.py RUNS=runs/seed_0,runs/smollm2_seed_0

RUNS are finished runs of the main script whose questions have a task in 5_GRPO_Maxtext/lm_eval/.
"Before" is their MODEL, "after" the last checkpoint. Both were asked greedily by the run itself
with its own DTYPE. Here `make lm-eval` asks them (torch, float32), and so does inference.py in
float32. It skips what's already in runs/lm_eval.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from machine import commit, processor, write_csv

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "5_GRPO_Maxtext"
sys.path.insert(0, str(FOLDER))

import settings
from settings import UserError
from task import grading

OUT = Path("runs/lm_eval")
MODELS = {"tiny_gsm8k": "tiny Llama, 0.3 M", "small_numbers": "SmolLM2, 135 M"}  # by task
METRICS = {"strict-match": "greedy_answer_accuracy", "flexible-extract": "greedy_lenient_accuracy"}


def python(script: str, *arguments: str) -> None:
    """Runs a script of folder 5."""
    subprocess.run([sys.executable, str(FOLDER / script), *arguments], cwd=ROOT, check=True)


def ask_lm_eval(folder: Path, command: Sequence[str]) -> pd.DataFrame:
    """Its answers, a line for each question: the text, and whether it counts it as right by each
    filter.
    """
    found = "lm_eval/*/samples_*.jsonl"
    if not list((ROOT / folder).glob(found)):
        subprocess.run(command, cwd=ROOT, check=True)
    [path] = (ROOT / folder).glob(found)
    samples = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    samples["right"] = samples.exact_match == 1
    answers = samples.pivot(index="doc_id", columns="filter", values="right")
    return answers.assign(
        text=samples.groupby("doc_id").resps.first().map(lambda resps: resps[0][0])
    )


def ask_in_float32(constants: dict[str, Any], folder: Path) -> pd.DataFrame:
    """inference.py's answers in float32, as from `ask_lm_eval`."""
    path = ROOT / f"{folder}_float32.jsonl"
    if not path.exists():
        same = ("MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "TEMPLATE", "REWARDS", "REWARD_FUNC")
        questions = settings.find_path(constants["DATASET"]) / "test.jsonl"
        python(
            "inference.py",
            "CHECKPOINT=base",
            f"MODEL={folder}",
            f"INPUT={questions}",
            f"OUTPUT={path}",
            "DTYPE=float32",
            *(f"{name}={constants[name]}" for name in same),
        )
    names = {"completion": "text", "correct": "strict-match", "correct_lenient": "flexible-extract"}
    return pd.DataFrame(map(json.loads, path.read_text().splitlines())).rename(columns=names)


def compare(run: Path) -> Iterator[dict[str, Any]]:
    """One line for each of before and after, and each metric."""
    made_from = commit()
    constants, result = (
        json.loads((run / f"{name}.json").read_text()) for name in ("constants", "result")
    )
    task = Path(constants["DATASET"]).name
    for when in ("before", "after"):
        folder = OUT / f"{task}_{when}"
        if not (ROOT / folder).exists() and when == "before":
            shutil.copytree(settings.find_path(constants["MODEL"]), ROOT / folder)
        elif not (ROOT / folder).exists():
            python("tool.py", "convert_checkpoint", f"SOURCE={run}", f"TARGET={folder}")
        command = ["make", "lm-eval", f"MODEL={folder}", f"TASK={task}"]
        theirs, float32 = ask_lm_eval(folder, command), ask_in_float32(constants, folder)
        said = json.loads((run / f"{when}.json").read_text())
        ours = pd.DataFrame(
            {"text": said["greedy_completions"], "strict-match": said["greedy_correct"]}
        )
        pairs = zip(ours.text, said["asked"], strict=True)
        ours["flexible-extract"] = [
            grading.grade_lenient(text, asked["answer"]) for text, asked in pairs
        ]
        for metric, key in METRICS.items():
            differing = np.flatnonzero(theirs[metric] != ours[metric])
            yield {
                "model": MODELS[task],
                "when": when,
                "questions": len(theirs),
                "metric": metric,
                "ours": result[when][key],
                "lm_eval": theirs[metric].mean(),
                "differing questions": " ".join(map(str, differing)),
                "differing texts": (ours.text != theirs.text).sum(),
                "ours in float32": float32[metric].mean(),
                "differing questions in float32": (float32[metric] != theirs[metric]).sum(),
                "differing texts in float32": (float32.text != theirs.text).sum(),
                "seed": constants["SEED"],
                "commit": made_from,
                "command": " ".join(command),
                "machine": processor(),
                "date": time.strftime("%Y-%m-%d"),
            }


def main(arguments: Sequence[str]) -> None:
    """Compares all runs and writes the table; UserError if one of RUNS is no finished run."""
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    runs = [Path(name) for name in options.get("RUNS", "").split(",")]
    for run in runs:
        if not (run / "result.json").is_file():
            raise UserError(
                f"RUNS={options.get('RUNS', '')}: {run} has no result.json; give finished runs"
            )
    rows = [row for run in runs for row in compare(run.resolve())]
    write_csv(FOLDER / "assets" / "lm_eval.csv", rows)


if __name__ == "__main__":
    settings.exit_on_error(main)
