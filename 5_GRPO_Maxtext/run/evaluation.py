"""Evaluation results: shares of right answers, and each answer for the report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from run.health import Sentence
from task.grading import is_close

ROWS = {  # of the table: metrics and their descriptions
    "answer_accuracy": "answers right", "lenient_accuracy": "right by the last number",
    "partial_accuracy": "within 10 %", "format_accuracy": "format right",
    "greedy_answer_accuracy": "greedy: answers right",
    "greedy_lenient_accuracy": "greedy: right by the last number",
    "greedy_format_accuracy": "greedy: format right",
    "cut_off": "cut off at the limit", "mean_score": "mean score",
    "completion_length": "mean length, tokens",
}  # fmt: skip
HELD_OUT = {  # columns: figures of `evaluate`, on rows where a step ends with one
    "held_out_correct": "answer_accuracy", "held_out_correct_lenient": "lenient_accuracy",
    "held_out_format_ok": "format_accuracy", "held_out_greedy_correct": "greedy_answer_accuracy",
    "held_out_greedy_correct_lenient": "greedy_lenient_accuracy",
}  # fmt: skip


def grade(grader, rows: Sequence[Mapping[str, str]], answers) -> dict[str, Any]:
    """Grades an answer (`Answers` of model/llm.py) to each of Q questions.

    Returns:
        Shares `answer_accuracy` (right, in the requested format), `lenient_accuracy` (the last number is
        right, wherever it is), `partial_accuracy` (within 10 %), `format_accuracy`, `cut_off`; means
        `completion_length` (tokens) and, if compute_score grades, `mean_score`; if there are several,
        `by_data_source`: `questions` and three of the shares. Lists [Q]: `completions`, `correct`,
        `correct_lenient`, `format_ok`.
    """
    texts = answers.texts.tolist()
    columns = {name: [row[name] for row in rows] for name in ("answer", "data_source", "extra_info")}
    scores = grader.score(texts, **columns)
    correct, lenient = scores >= 1, grader.right_lenient(texts, **columns)
    formed = np.array([grader.format_right(text) for text in texts])
    close = [is_close(text, row["answer"], 0.1) for text, row in zip(texts, rows, strict=True)]

    right = {"answer_accuracy": correct, "lenient_accuracy": lenient, "format_accuracy": formed}

    def shares(mask):
        return {"questions": int(mask.sum())} | {name: float(x[mask].mean()) for name, x in right.items()}

    result = shares(np.ones(len(rows), bool)) | {
        "partial_accuracy": float(np.mean(close)),
        "completion_length": float(np.mean(answers.lengths)),
        "cut_off": float(np.mean(~answers.ended)),
        "completions": texts,
        "correct": correct.tolist(),
        "correct_lenient": lenient.tolist(),
        "format_ok": formed.tolist(),
    }
    if "compute_score" in grader.names:
        result["mean_score"] = float(scores.mean())
    sources = np.array(columns["data_source"])
    if len(set(sources)) > 1:
        result["by_data_source"] = {name: shares(sources == name) for name in sorted(set(sources))}
    return result


def together(sampled: dict[str, Any], greedy: dict[str, Any], rows) -> dict[str, Any]:
    """Merges two evaluations: the greedy metrics and lists become `greedy_...`; adds what was `asked`."""
    kept = ("answer_accuracy", "lenient_accuracy", "format_accuracy", "completions", "correct")
    asked = [{name: row[name] for name in ("question", "answer", "data_source")} for row in rows]
    return sampled | {f"greedy_{name}": greedy[name] for name in kept} | {"asked": asked}


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n questions (Wilson 1927, JASA 22, p. 209): both ends, from 0 to 1."""
    from scipy.stats import binomtest  # takes a second to import, which `tool.py show_run` can defer

    return tuple(binomtest(round(share * n), n).proportion_ci(0.95, "wilson"))


def comparison(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a table: a metric's name, and its value in each of `results`; shares with 95 % intervals."""

    def cell(key, result):
        if key in ("mean_score", "completion_length"):
            return f"{result[key]:.{2 if key == 'mean_score' else 1}f}"
        low, high = wilson(result[key], result["questions"])
        return f"{result[key]:.1%} ({low:.1%} to {high:.1%})"

    known = [key for key in ROWS if all(key in result for result in results)]
    return [[ROWS[key], *(cell(key, result) for result in results)] for key in known]


def best(evaluations: Sequence[Mapping[str, Any]]) -> Sentence | None:
    """The evaluation during training with the most right answers, in a sentence; None without any."""
    if not evaluations:
        return None
    found = max(evaluations, key=lambda e: (e["answer_accuracy"], e["lenient_accuracy"]))  # the first
    return Sentence("best", best=found, last=evaluations[-1])
