"""Folder 5's runs, evaluated by EleutherAI's lm-evaluation-harness: question by question against our figures.

    python benchmarks/against_lm_eval.py RUNS=runs/seed_0,runs/smollm2_seed_0

RUNS are finished runs of the main script whose questions have a task in 5_GRPO_Maxtext/lm_eval/. "Before" is
their MODEL, "after" the last checkpoint. Both were asked greedily by the run itself with its own DTYPE. Here
`make lm-eval` asks them (torch, float32), and so does inference.py in float32. What lies in runs/lm_eval
already is not made again.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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


def ask_lm_eval(folder: Path, command: Sequence[str]) -> list[dict[str, Any]]:
    """Its answers, one entry a question: the text, and whether it counts it as right by each filter."""
    found = "lm_eval/*/samples_*.jsonl"
    if not list((ROOT / folder).glob(found)):
        subprocess.run(command, cwd=ROOT, check=True)
    [path] = (ROOT / folder).glob(found)
    answers = {}
    for sample in map(json.loads, path.read_text().splitlines()):
        answer = answers.setdefault(sample["doc_id"], {"text": sample["resps"][0][0]})
        answer[sample["filter"]] = sample["exact_match"] == 1
    return [answers[i] for i in range(len(answers))]


def ask_in_float32(constants: dict[str, Any], folder: Path, task: str) -> list[dict[str, Any]]:
    """inference.py's answers in float32, as from `ask_lm_eval`."""
    path = ROOT / f"{folder}_float32.jsonl"
    if not path.exists():
        same = ("MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "TEMPLATE", "REWARDS", "REWARD_FUNC")
        questions = settings.find_path(constants["DATASET"]) / "test.jsonl"
        python("inference.py", "CHECKPOINT=base", f"MODEL={folder}", f"INPUT={questions}", f"OUTPUT={path}",
               "DTYPE=float32", *(f"{name}={constants[name]}" for name in same))  # fmt: skip
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {"text": r["completion"], "strict-match": r["correct"], "flexible-extract": r["correct_lenient"]}
        for r in rows
    ]


def compare(run: Path) -> Iterator[dict[str, Any]]:
    """One line for each of before and after, and each metric."""
    constants = json.loads((run / "constants.json").read_text())
    result = json.loads((run / "result.json").read_text())
    task = Path(constants["DATASET"]).name
    for when in ("before", "after"):
        folder = OUT / f"{task}_{when}"
        if not (ROOT / folder).exists() and when == "before":
            shutil.copytree(settings.find_path(constants["MODEL"]), ROOT / folder)
        elif not (ROOT / folder).exists():
            python("tool.py", "convert_checkpoint", f"SOURCE={run}", f"TARGET={folder}")
        command = ["make", "lm-eval", f"MODEL={folder}", f"TASK={task}"]
        theirs, float32 = ask_lm_eval(folder, command), ask_in_float32(constants, folder, task)
        said = json.loads((run / f"{when}.json").read_text())
        golds = [row["answer"] for row in said["asked"]]
        pairs = zip(said["greedy_completions"], golds, strict=True)
        ours = {
            "strict-match": said["greedy_correct"],
            "flexible-extract": [grading.grade_lenient(text, gold) for text, gold in pairs],
        }
        texts = sum(a != b["text"] for a, b in zip(said["greedy_completions"], theirs, strict=True))
        texts_32 = sum(a["text"] != b["text"] for a, b in zip(float32, theirs, strict=True))
        for metric, key in METRICS.items():
            differing = [i for i, answer in enumerate(theirs) if answer[metric] != ours[metric][i]]
            differing_32 = sum(a[metric] != b[metric] for a, b in zip(float32, theirs, strict=True))
            yield {
                "model": MODELS[task], "when": when, "questions": len(theirs), "metric": metric,
                "ours": result[when][key],
                "lm_eval": sum(answer[metric] for answer in theirs) / len(theirs),
                "differing questions": " ".join(map(str, differing)), "differing texts": texts,
                "ours in float32": sum(answer[metric] for answer in float32) / len(theirs),
                "differing questions in float32": differing_32, "differing texts in float32": texts_32,
                "seed": constants["SEED"], "commit": commit(), "command": " ".join(command),
                "machine": processor(), "date": time.strftime("%Y-%m-%d"),
            }  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Compares all runs and writes the table; UserError if one of RUNS is no finished run."""
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    runs = [Path(name) for name in options.get("RUNS", "").split(",")]
    for run in runs:
        if not (run / "result.json").is_file():
            raise UserError(f"RUNS={options.get('RUNS', '')}: {run} has no result.json; give finished runs")
    rows = [row for run in runs for row in compare(run.resolve())]
    write_csv(FOLDER / "assets" / "lm_eval.csv", rows)


if __name__ == "__main__":
    settings.answer(main)
