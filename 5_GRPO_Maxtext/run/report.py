"""A run's final report: report.md (also printed), report.png, report.html, result.json."""

import collections
import json
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from etils import epath

import settings
from model import lora
from run import answers, checkpoints, evaluation, page, verdict
from run.plain_text import fenced, table_cell
from run.run_files import read_object
from run.run_folder import Run
from task import questions

BARS = {  # metrics of an evaluation, as the picture calls them
    "answer_accuracy": "right", "lenient_accuracy": "by the last\nnumber", "format_accuracy": "form",
    "greedy_answer_accuracy": "greedy:\nright", "greedy_lenient_accuracy": "greedy: by the\nlast number",
}  # fmt: skip
type Log = Sequence[dict[str, float]]  # rows of train_log.csv
type Result = dict[str, Any]  # of an evaluation
KEPT = (*BARS, "partial_accuracy", "questions", "mean_score", "by_data_source")  # in result.json


def introduce(c, run: Run, parameters: int, folder: Path, hf, task, rows: dict[str, list]) -> None:
    """Prints what is about to run: model, data, rewards, step, run.

    `hf` is the config of the checkpoint in `folder`; `rows` are the questions by split; some are empty.
    """
    trained = ""
    if c.LORA_RANK:
        count = lora.count_parameters(hf, c.LORA_RANK, c.LORA_TARGETS)
        trained = f", LoRA of rank {c.LORA_RANK} trains {count:,}"
    data = [f"{split}: {task.sources[split]} ({len(rows[split]):,})"
            for split in ("train", "validation", "test") if rows[split]]  # fmt: skip
    print(
        f"model    {folder}: {parameters:,} parameters, {hf.num_hidden_layers} layers, "
        f"{c.WEIGHT_DTYPE}{trained}; the constants' {settings.column(c.MODEL)} column\n"
        f"data     {', '.join(data)}\n"
        f"rewards  {task.grader}\n"
        f"step     {c.BATCH_SIZE} prompts x {c.NUM_GENERATIONS} answers = {c.BATCH_SIZE * c.NUM_GENERATIONS} "
        f"sequences of {c.MAX_PROMPT_LENGTH} + {c.TOTAL_GENERATION_STEPS} tokens\n"
        f"run      {c.NUM_BATCHES} steps on {jax.device_count()} {jax.devices()[0].device_kind} device(s), "
        f"generation by {c.ROLLOUT_ENGINE}, in {run.folder}"
    )
    questions.say_overlap(rows)
    if run.done:
        print(f"going on after step {run.done} of {c.NUM_BATCHES}, from the checkpoint in {run.folder}")


# %% Tables in Markdown -------------------------------------------------------------------------------------
def table(head: Sequence[str], *rows: Sequence[Any]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def comparison_table(before: Result, after: Result, eval_config: str) -> str:
    """The metrics before and after training, shares with 95 % Wilson intervals."""
    head = f"{before['questions']} questions, {table_cell(eval_config)} sampling", "before", "after"
    return table(head, *evaluation.comparison([before, after]))


def data_source_table(before: Result, after: Result) -> str:
    """The same by data_source, without intervals; empty where there is only one."""
    if "by_data_source" not in before:
        return ""
    shares = ("answer_accuracy", "lenient_accuracy", "format_accuracy")
    pairs = [(name, old, after["by_data_source"][name]) for name, old in before["by_data_source"].items()]
    rows = [(table_cell(name), old["questions"], *(f"{old[key]:.1%} to {new[key]:.1%}" for key in shares))
            for name, old, new in pairs]  # fmt: skip
    return table(("data_source", "questions", *(evaluation.ROWS[key] for key in shares)), *rows)


def flip_table(before: list[bool], after: list[bool]) -> str:
    """How many questions turned right or wrong (sampled, first pass)."""
    count = collections.Counter(zip(before, after, strict=True))
    return table(
        ("", "right after", "wrong after"),
        ("right before", count[True, True], count[True, False]),
        ("wrong before", count[False, True], count[False, False]),
    )


def sample_answers(before: Result, after: Result) -> str:
    """One question with its answers: the first that turned right, else the first."""
    sides = list(zip(before["correct"], after["correct"], strict=True))
    i = sides.index((False, True)) if (False, True) in sides else 0
    return fenced(
        f"question: {before['asked'][i]['question']}\nright answer: {before['asked'][i]['answer']}\n"
        f"before: {before['completions'][i]}\nafter:  {after['completions'][i]}"
    )


# %% Picture, files -----------------------------------------------------------------------------------------
def draw_picture(path: Path, log: Log, before: Result, after: Result, evaluations: list[Result], title: str):
    """Plots learning curves on the left, before and after with intervals on the right."""
    import matplotlib  # here, so that a refused run needn't wait for it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = [key for key in BARS if max(before.get(key, 0), after.get(key, 0)) >= verdict.SEEN]
    keys = keys or list(BARS)[:4]
    column, key = verdict.measured((before, after))
    reading = "right" if column == "correct" else "right by the last number"

    figure, (curves, bars) = plt.subplots(1, 2, figsize=(11, 4.4), facecolor="white", layout="constrained")
    lines = {"format_ok": ("#ff7f0e", "form right")} if "format_accuracy" in keys else {}
    lines |= {column: ("#1f77b4", "right"), "zero_variance": ("#888888", "groups without signal")}
    for name, (color, label) in lines.items():
        label = label if name == "zero_variance" else f"the step's answers: {label}"
        shares = [row.get(name, math.nan) for row in log]
        curves.plot([row["step"] for row in log], shares, color=color, label=label, lw=1)
    if evaluations:
        steps, shares = zip(*((result["step"], result[key]) for result in evaluations))
        curves.plot(steps, shares, color="#2ca02c", marker="o", ms=5, lw=2, label="held-out questions: right")
        title = f"held-out questions {reading}: {shares[0]:.0%} to {shares[-1]:.0%}\n({title})"
    curves.set(xlabel="training step", ylabel="share", ylim=(-0.02, 1.02))

    for offset, result, color, label in ((-0.2, before, "#bbbbbb", "before training"),
                                         (0.2, after, "#1f77b4", "after")):  # fmt: skip
        shares = np.array([result[key] for key in keys])
        intervals = np.array(
            [evaluation.wilson(share, result["questions"]) for share in shares]
        ).T  # [2, bars]
        error, places = np.clip(np.abs(intervals - shares), 0, None), np.arange(len(keys)) + offset
        bars.bar(places, shares, 0.38, yerr=error, color=color, label=label, capsize=3)
        for x, share, high in zip(places, shares, intervals[1], strict=True):
            bars.text(x, high + 0.015, f"{share:.0%}", ha="center", va="bottom", fontsize=9)
    bars.set_xticks(range(len(keys)), [BARS[key] for key in keys], fontsize=9)
    if left_out := [
        name.replace("\n", " ") for key, name in BARS.items() if key in before and key not in keys
    ]:
        bars.set_xlabel(f"below {verdict.SEEN:.0%}, not drawn: {', '.join(left_out)}", fontsize=8.5)
    bars.set(ylim=(0, 1.1), ylabel="share")
    tested = f"test questions {reading}: {before[key]:.0%} to {after[key]:.0%}"
    asked = f"({before['questions']} test questions, 95% intervals)"
    for axes, words, below in ((curves, title, -0.14), (bars, f"{tested}\n{asked}", -0.2)):
        axes.set_title(words, fontsize=11)
        axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, below), fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(
    c, run: Run, before: Result, after: Result, log: Log, source: str, health_lines: Iterable[str], done: int
) -> None:
    """Writes result.json and the reports into the run's folder, and prints report.md.

    The `log` may be missing if the run was over and we only redo the report. The test questions come from
    `source`. For processes that were stopped, the total time only counts the `done` steps.
    """
    folder = run.logs
    seconds = time.time() - psutil.Process().create_time()  # imports take longer than some runs' steps
    seconds += sum(row.get("seconds", 0.0) for row in log if row["step"] <= done)
    timed = [row["seconds"] for row in log if "seconds" in row]
    per_step = float(np.median(timed[1:] or timed)) if timed else None  # the first step compiles
    results = {when: {key: result[key] for key in KEPT if key in result}
               for when, result in (("before", before), ("after", after))}  # fmt: skip
    result = results | {"seconds": round(seconds, 1), "seconds_per_step": per_step and round(per_step, 4),
                        "steps": c.NUM_BATCHES}  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")

    evaluations = answers.read_lines(folder / "evaluations.jsonl")
    title = f"{c.BATCH_SIZE} questions x {c.NUM_GENERATIONS} answers per step"
    draw_picture(folder / "report.png", log, before, after, evaluations, title)
    training = f"{c.NUM_BATCHES} steps of {c.BATCH_SIZE} x {c.NUM_GENERATIONS} answers"
    if log:
        names = ("reward", "reward_std", "kl", "zero_variance", "length")
        reward, spread, kl, no_signal, length = (log[-1].get(name, math.nan) for name in names)
        training += f", median {per_step:.2f} s each" if timed else ""
        training += (
            f"; last step: reward {reward:.2f} +- {spread:.2f} within a group, KL "
            f"{'not measured (BETA=0)' if math.isnan(kl) else f'{kl:.4f}'}, groups without signal "
            f"{no_signal:.0%}, {length:.1f} tokens per answer"
        )
    saved = set(checkpoints.saved(run.checkpoints))
    best = evaluation.best([result for result in evaluations if result["step"] in saved])
    headline = verdict.headline([before, after], evaluations, len(log))
    parts = (
        f"**{'; '.join(headline)}.** {' '.join(verdict.reasons(before, after))}",
        comparison_table(before, after, c.EVAL_CONFIG),
        data_source_table(before, after),
        flip_table(before["correct"], after["correct"]),
        sample_answers(before, after),
        training,
        f"Of the checkpoints kept in {run.folder}: {best}" if best else "",
        "\n".join(f"- {line}" for line in health_lines) or "Health: nothing to report.",
    )
    text = "\n\n".join(part for part in parts if part)
    command = (read_object(folder / "run.json") or {}).get("command", "(command lost)")
    (folder / "report.md").write_text(
        f"# GRPO: before and after\n\n`{command}`\n\nmodel `{c.MODEL}`, test questions: {source}, seed "
        f"{c.SEED}\n\n![curves](report.png)\n\n{text}\n"
    )
    print(f"\n{text}\n\nreport: {folder}/report.md, picture: {folder}/report.png, total {seconds:.0f} s")
    print(f"every answer: open {page.write(folder)} in a browser")
    print(f"curves: tensorboard --logdir {shlex.quote(f'{folder}/tensorboard')}")
    if c.PROFILE_DIR and any(epath.Path(c.PROFILE_DIR).glob("plugins/profile/*/*")):
        print(f"trace of one step: tensorboard --logdir {shlex.quote(c.PROFILE_DIR)}")
