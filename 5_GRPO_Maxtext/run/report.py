"""The report of a run: tables, one picture and one page in RUN_DIR, the same tables on the terminal."""

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

import settings
from model import llama, lora
from run import answers, checkpoints, episodes, evaluation, page, process, train_log
from run.plain_text import fenced, shown, table_cell
from run.run_files import read_object
from run.run_folder import Run
from task import questions

COLORS = {"right": "#1f77b4", "format_ok": "#ff7f0e", "zero_variance": "#888888", "held out": "#2ca02c"}
BEFORE_COLOR, AFTER_COLOR = "#bbbbbb", "#1f77b4"
BARS = {  # of an evaluation, as the picture calls them
    "answer_accuracy": "right",
    "lenient_accuracy": "by the last\nnumber",
    "format_accuracy": "form",
    "greedy_answer_accuracy": "greedy:\nright",
    "greedy_lenient_accuracy": "greedy: by the\nlast number",
}
SEEN = 0.05  # a share that never reaches this is no bar and no curve: the picture names it
KEPT = (  # of an evaluation, in result.json
    "answer_accuracy", "lenient_accuracy", "partial_accuracy", "format_accuracy", "greedy_answer_accuracy",
    "greedy_lenient_accuracy", "questions", "mean_score", "by_data_source",
)  # fmt: skip


def introduce(
    c,
    run: Run,
    cluster,
    folder: Path,
    hf,
    grader,
    rows: dict[str, list[dict[str, str]]],
    sources: dict[str, str],
    done: int,
) -> None:
    """Prints what is about to run: model, data, rewards, step, run.

    Args:
        c: the constants of the run.
        run: its folders.
        cluster: Tunix's, with the model that is trained.
        folder: of the checkpoint.
        hf: its config.
        grader: from `run_grader.make_grader`.
        rows: the questions by what they are for: train, validation (there may be none), test.
        sources: where they come from.
        done: steps that an earlier process has done.
    """
    parameters = llama.count_parameters(cluster.actor_trainer.model)
    sequences = c.BATCH_SIZE * c.NUM_GENERATIONS
    trained = ""
    if c.LORA_RANK:
        count = lora.count_parameters(hf, c.LORA_RANK, c.LORA_TARGETS)
        trained = f", LoRA of rank {c.LORA_RANK} trains {count:,}"
    data = ", ".join(
        f"{split}: {sources[split]} ({len(rows[split]):,})"
        for split in ("train", "validation", "test")
        if rows[split]
    )
    print(
        f"model    {folder}: {parameters:,} parameters, {hf.num_hidden_layers} layers, "
        f"{c.WEIGHT_DTYPE}{trained}; the constants' {settings.column(c.MODEL)} column\n"
        f"data     {data}\n"
        f"rewards  {grader}\n"
        f"step     {c.BATCH_SIZE} prompts x {c.NUM_GENERATIONS} answers = {sequences} sequences of "
        f"{c.MAX_PROMPT_LENGTH} + {c.TOTAL_GENERATION_STEPS} tokens\n"
        f"run      {c.NUM_BATCHES} steps on {jax.device_count()} {jax.devices()[0].device_kind} device(s), "
        f"generation by {c.ROLLOUT_ENGINE}, in {run.folder}"
    )
    questions.say_overlap(rows)
    if done:
        print(f"going on after step {done} of {c.NUM_BATCHES}, from the checkpoint in {run.folder}")


def comparison_table(before: dict[str, Any], after: dict[str, Any], eval_config: str) -> str:
    """The before/after table in Markdown, shares with 95 % Wilson intervals."""
    head = f"| {before['questions']} questions, {table_cell(eval_config)} sampling | before | after |"
    rows = (f"| {' | '.join(cells)} |" for cells in evaluation.comparison([before, after]))
    return "\n".join([head, "|---|---|---|", *rows])


def data_source_table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The before/after table split by data_source, in Markdown; empty where there is only one."""
    if "by_data_source" not in before:
        return ""
    shares = {"answer_accuracy": "answers right", "lenient_accuracy": "right by the last number",
              "format_accuracy": "format right"}  # fmt: skip
    lines = [f"| data_source | questions | {' | '.join(shares.values())} |", "|---|---|---|---|---|"]
    for name, old in before["by_data_source"].items():
        new = after["by_data_source"][name]
        cells = [f"{old[key]:.1%} to {new[key]:.1%}" for key in shares]
        lines.append(f"| {table_cell(name)} | {old['questions']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def flip_table(before: list[bool], after: list[bool]) -> str:
    """How many questions changed sides (sampled, first pass), in Markdown."""
    counts = {pair: 0 for pair in itertools.product((True, False), repeat=2)}
    for pair in zip(before, after, strict=True):
        counts[pair] += 1
    return (
        "| | right after | wrong after |\n|---|---|---|\n"
        f"| right before | {counts[True, True]} | {counts[True, False]} |\n"
        f"| wrong before | {counts[False, True]} | {counts[False, False]} |"
    )


def sample_answers(before: dict[str, Any], after: dict[str, Any]) -> str:
    """One question with its answers: the first that turned right, else the first."""
    flips = [not b and a for b, a in zip(before["correct"], after["correct"], strict=True)]
    i = flips.index(True) if any(flips) else 0
    return (
        f"question: {before['asked'][i]['question']}\nright answer: {before['asked'][i]['answer']}\n"
        f"before: {before['completions'][i]}\nafter:  {after['completions'][i]}"
    )


def best_checkpoint(evaluations: Sequence[dict[str, Any]], run: Run) -> str:
    """Which kept checkpoint was best during training, in a paragraph; or nothing."""
    saved = set(checkpoints.saved(run.checkpoints))
    words = evaluation.best([result for result in evaluations if result["step"] in saved])
    return f"Of the checkpoints kept in {run.folder}: {words}\n\n" if words else ""


def draw_picture(
    path: Path,
    log: Sequence[dict[str, float]],
    before: dict[str, Any],
    after: dict[str, Any],
    evaluations: Sequence[dict[str, Any]],
    title: str,
) -> None:
    """Learning curves on the left, before/after with intervals on the right; readable on any background.

    A share that stays below SEEN is named instead of drawn: right in the form asked for may be none, where
    answers are paid by their last number.
    """
    import matplotlib  # only here: a run that is refused need not wait for it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = [key for key in BARS if max(before.get(key, 0), after.get(key, 0)) >= SEEN] or list(BARS)[:4]
    strict = "answer_accuracy" in keys
    column, key = ("correct", "answer_accuracy") if strict else ("correct_lenient", "lenient_accuracy")
    reading = "right" if strict else "right by the last number"

    figure, (curves, bars) = plt.subplots(1, 2, figsize=(11, 4.4), facecolor="white", layout="constrained")
    steps = [row["step"] for row in log]
    for name, color, label in (
        ("format_ok", COLORS["format_ok"], "the step's answers: form right"),
        (column, COLORS["right"], "the step's answers: right"),
        ("zero_variance", COLORS["zero_variance"], "groups without signal"),
    ):
        if name != "format_ok" or "format_accuracy" in keys:
            shares = [row.get(name, math.nan) for row in log]
            curves.plot(steps, shares, color=color, label=label, lw=1)
    if evaluations:
        shares = [result[key] for result in evaluations]
        curves.plot(
            [result["step"] for result in evaluations], shares, color=COLORS["held out"], marker="o", ms=5,
            lw=2, label="held-out questions: right",
        )  # fmt: skip
        title = f"held-out questions {reading}: {shares[0]:.0%} to {shares[-1]:.0%}\n({title})"
    curves.set(xlabel="training step", ylabel="share", ylim=(-0.02, 1.02))
    curves.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=9)
    curves.set_title(title, fontsize=11)

    for offset, result, color, label in (
        (-0.2, before, BEFORE_COLOR, "before training"),
        (0.2, after, AFTER_COLOR, "after"),
    ):
        shares = np.array([result[key] for key in keys])
        intervals = np.array([evaluation.wilson(share, result["questions"]) for share in shares])  # [bars, 2]
        error = np.clip(np.abs(intervals.T - shares), 0, None)  # [2, bars]
        places = np.arange(len(keys)) + offset
        bars.bar(places, shares, 0.38, yerr=error, color=color, label=label, capsize=3)
        for x, share, high in zip(places, shares, intervals[:, 1], strict=True):
            bars.text(x, high + 0.015, f"{share:.0%}", ha="center", va="bottom", fontsize=9)
    bars.set_xticks(range(len(keys)), [BARS[key] for key in keys], fontsize=9)
    left_out = [name.replace("\n", " ") for key, name in BARS.items() if key in before and key not in keys]
    asked = f"({before['questions']} test questions, 95% intervals)"
    bars.set(ylim=(0, 1.1), ylabel="share")
    bars.set_title(f"test questions {reading}: {before[key]:.0%} to {after[key]:.0%}\n{asked}", fontsize=11)
    if left_out:
        bars.set_xlabel(f"below {SEEN:.0%}, not drawn: {', '.join(left_out)}", fontsize=8.5)
    bars.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(
    c,
    run: Run,
    before: dict[str, Any],
    after: dict[str, Any],
    log: Sequence[dict[str, float]],
    source: str,
    health_lines: Iterable[str],
    done: int,
) -> None:
    """Prints the tables and writes report.md, report.png, report.html and result.json into the run's folder.

    Args:
        c: the constants of the run.
        run: its folders.
        before: of `evaluate`.
        after: of `evaluate`.
        log: rows of `train_log.csv`.
        source: where the questions come from.
        health_lines: what went wrong, in words.
        done: steps of processes that were stopped; of these the total counts nothing else.
    """
    folder = run.logs
    step_seconds = float(np.median([row.get("seconds", math.nan) for row in log][1:] or [math.nan]))
    table = comparison_table(before, after, c.EVAL_CONFIG)
    flips = flip_table(before["correct"], after["correct"])
    sample, by_data_source = sample_answers(before, after), data_source_table(before, after)
    title = f"{c.BATCH_SIZE} questions x {c.NUM_GENERATIONS} answers per step"
    evaluations = answers.read_lines(folder / "evaluations.jsonl")
    draw_picture(folder / "report.png", log, before, after, evaluations, title)
    best = best_checkpoint(evaluations, run)
    size = f"{c.BATCH_SIZE} x {c.NUM_GENERATIONS}"
    training = f"{c.NUM_BATCHES} steps of {size} answers, median {step_seconds:.2f} s each"
    if log:  # it can be lost: the run was over, and only the report is made again
        names = ("reward", "reward_std", "kl", "zero_variance", "length")
        reward, spread, kl, no_signal, length = (log[-1].get(name, math.nan) for name in names)
        measured = "not measured (BETA=0)" if math.isnan(kl) else f"{kl:.4f}"
        training += (
            f"; last step: reward {reward:.2f} +- {spread:.2f} within a group, KL {measured}, groups without "
            f"signal {no_signal:.0%}, {length:.1f} tokens per answer"
        )
    lines = "\n".join(f"- {line}" for line in health_lines) or "Nothing to report."
    command = (read_object(folder / "run.json") or {}).get("command", "(command lost)")
    (folder / "report.md").write_text(
        f"# GRPO: before and after\n\n`{command}`\n\nmodel `{c.MODEL}`, test questions: {source}, "
        f"seed {c.SEED}\n\n{table}\n\n![curves](report.png)\n\n{training}\n\n{best}Health:\n\n{lines}\n\n"
        f"{by_data_source}Which questions changed sides (sampled):\n\n{flips}\n\n{fenced(sample)}\n"
    )
    path = page.write(folder)
    seconds = process.seconds_since_start() + train_log.seconds_before(log, done)
    result = {
        "before": {key: before[key] for key in KEPT if key in before},
        "after": {key: after[key] for key in KEPT if key in after},
        "seconds": round(seconds, 1),
        "seconds_per_step": round(step_seconds, 4),
        "steps": c.NUM_BATCHES,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table}\n\n{by_data_source}{flips}\n\n{shown(sample)}\n\n{training}\n\n{best}", end="")
    print(f"report: {folder}/report.md, picture: {folder}/report.png, total {seconds:.0f} s")
    print(f"every answer: open {path} in a browser")
    if c.ENVIRONMENT:
        print(f"turn by turn: open {episodes.write(folder)} in a browser")
    print(f"curves: tensorboard --logdir {shlex.quote(f'{folder}/tensorboard')}")
    if c.PROFILE_DIR and any(epath.Path(c.PROFILE_DIR).glob("plugins/profile/*/*")):
        print(f"trace of one step: tensorboard --logdir {shlex.quote(c.PROFILE_DIR)}")
