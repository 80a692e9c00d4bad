"""What is printed when a run starts and ends; at the end also report.md, report.html and
result.json.
"""

import json
import math
import shlex
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import psutil
from etils import epath

import settings
from constants import RunConstants
from plain_text import escape_controls, fenced, table_cell
from run import evaluation, page
from run.evaluation import Result
from run.run_folder import RunFolder
from task import questions

KEPT = (  # in result.json
    "answer_accuracy",
    "lenient_accuracy",
    "format_accuracy",
    "greedy_answer_accuracy",
    "greedy_lenient_accuracy",
    "partial_accuracy",
    "questions",
    "mean_score",
    "by_data_source",
)


def print_start(
    c: RunConstants, folder: RunFolder, parameters: int, trained: int, model_folder, hf, task, rows
) -> None:
    """Prints what is about to run: model, data, rewards, step, run.

    `trained` of its `parameters` are trained; `hf` is the config in `model_folder`; `rows` are the
    questions by split; some are empty.
    """
    adapter = f", LoRA of rank {c.LORA_RANK} trains {trained:,}" if c.LORA_RANK else ""
    column = "small" if settings.is_small(c.MODEL) else "large"
    data = [
        f"{split}: {task.sources[split]} ({len(rows[split]):,})"
        for split in ("train", "validation", "test")
        if rows[split]
    ]
    print(
        f"model    {model_folder}: {parameters:,} parameters, {hf.num_hidden_layers} layers, "
        f"{c.WEIGHT_DTYPE}{adapter}; the constants' {column} column\n"
        f"data     {', '.join(data)}\n"
        f"rewards  {task.grader}\n"
        f"step     {c.BATCH_SIZE} prompts x {c.NUM_GENERATIONS} answers = "
        f"{c.BATCH_SIZE * c.NUM_GENERATIONS} sequences of {c.MAX_PROMPT_LENGTH} + "
        f"{c.TOTAL_GENERATION_STEPS} tokens\nrun      {c.NUM_BATCHES} steps on "
        f"{jax.device_count()} {jax.devices()[0].device_kind} device(s), generation by "
        f"{c.ROLLOUT_ENGINE}, in {folder.path}"
    )
    questions.print_overlap(rows)
    if folder.steps_done:
        print(
            f"going on after step {folder.steps_done} of {c.NUM_BATCHES}, "
            f"from the checkpoint in {folder.path}"
        )


def table(head: Sequence[str], *rows: Sequence[Any]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def comparison_table(before: Result, after: Result, eval_config: str, right: str) -> str:
    """The metrics before and after training, shares with 95 % Wilson intervals; `right` as in
    `evaluation.rows_for`.
    """
    head = f"{before['questions']} questions, {table_cell(eval_config)} sampling", "before", "after"
    return table(head, *evaluation.comparison([before, after], right))


def data_source_table(before: Result, after: Result, right: str = evaluation.NUMBER) -> str:
    """The same by data_source, without intervals; empty where there is only one."""
    rows = [list(map(table_cell, cells)) for cells in evaluation.by_source([before, after], right)]
    return table(*rows) if rows else ""


def example(before: Result, after: Result) -> str:
    """A question with its answers before and after, the page's."""
    i = evaluation.example(before, after)
    asked = before["asked"][i]
    return fenced(
        f"question: {asked['question']}\nright answer: {asked['answer']}\n"
        f"before: {before['completions'][i]}\nafter:  {after['completions'][i]}"
    )


def write(c: RunConstants, folder: RunFolder, source: str) -> None:
    """Writes the reports from the files in the run's folder, and prints report.md.

    The test questions come from `source`. For processes that were stopped, the total time only
    counts the steps they've saved. UserError if a file in the folder is none of ours.
    """
    with page.refuse_foreign_files(folder.logs):
        write_from_files(c, folder, source)


def write_from_files(c: RunConstants, folder: RunFolder, source: str) -> None:
    """`write`; what's odd in a file of the run is an error of any type."""
    logs, read = folder.logs, page.read(folder.logs)
    before, after, log = *read.tests.values(), read.log
    # imports take longer than some runs' steps
    seconds = time.time() - psutil.Process().create_time()
    seconds += sum(row["seconds"] for row in log if row["step"] <= folder.steps_done)
    timed = [row["seconds"] for row in log]
    # the first step compiles
    per_step = round(float(np.median(timed[1:] or timed)), 4) if log else None
    result = {
        when: {key: test[key] for key in KEPT if key in test} for when, test in read.tests.items()
    }
    result |= {"seconds": round(seconds, 1), "seconds_per_step": per_step, "steps": c.NUM_BATCHES}
    settings.write_whole(logs / "result.json", json.dumps(result, indent=1) + "\n")

    training = f"{c.NUM_BATCHES} steps of {c.BATCH_SIZE} x {c.NUM_GENERATIONS} answers"
    if log:
        last = log[-1]
        kl = "not measured (BETA=0)" if math.isnan(last["kl"]) else f"{last['kl']:.4f}"
        training += (
            f", median {per_step:.2f} s each; last step: reward {last['reward']:.2f} +- "
            f"{last['reward_std']:.2f} within a group, KL {kl}, groups without signal "
            f"{last['zero_variance']:.0%}, {last['length']:.1f} tokens per answer"
        )
    first, *others = read.causes or [""]
    parts = (
        f"**{'; '.join(read.headline)}.**",
        f"**{first}.**" if read.failed and first else "",
        " ".join([*evaluation.reasons(before, after, read.right), *read.overlap]),
        example(before, after),
        "\n".join(f"- {line}" for line in (others if read.failed else read.causes)),
        comparison_table(before, after, c.EVAL_CONFIG, read.right),
        data_source_table(before, after, read.right),
        training,
        read.best or "",
        "\n".join(f"- {line}" for line in read.parts),
        "Every health line, at the step where it first held:\n\n"
        + "\n".join(f"- {line}" for line in read.health)
        if read.health
        else "Health: nothing to report.",
    )
    text = escape_controls("\n\n".join(part for part in parts if part))
    settings.write_whole(
        logs / "report.md",
        f"# GRPO: before and after\n\n`{read.command}`\n\nmodel `{c.MODEL}`, test questions: "
        f"{source}, seed {c.SEED}\n\n{text}\n",
    )
    print(f"\n{text}\n\nreport: {logs}/report.md, total {seconds:.0f} s")
    print(f"every answer: open {page.save(logs / 'report.html', page.run_data(read))} in a browser")
    print(f"curves: tensorboard --logdir {shlex.quote(f'{logs}/tensorboard')}")
    if c.PROFILE_DIR and any(epath.Path(c.PROFILE_DIR).glob("plugins/profile/*/*")):
        print(f"trace of one step: tensorboard --logdir {shlex.quote(c.PROFILE_DIR)}")
    folder.update_run_json()
