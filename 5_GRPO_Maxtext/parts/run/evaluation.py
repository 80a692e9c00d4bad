"""What an evaluation says: shares of right answers, and each answer for the report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parts.rewards.grading import is_close


def figures(
    grader, rows: Sequence[Mapping[str, str]], texts: list[str], lengths: list[int], cut_off: list[bool]
) -> dict[str, Any]:
    """Grades an answer to each question.

    Args:
        grader: from `task_rewards.make_grader`.
        rows: the questions, Q of them.
        texts: the answers.
        lengths: of the answers, in tokens.
        cut_off: whether an answer has no end.

    Returns:
        Shares `answer_accuracy` (right, and in the form asked for), `lenient_accuracy` (right by the last
        number, wherever it stands), `partial_accuracy` (within 10 %), `format_accuracy`, `cut_off`; means
        `completion_length` (tokens) and, where compute_score grades, `mean_score`; where there are several,
        `by_data_source`: `questions` and three of the shares. Lists [Q]: `completions`, `correct`,
        `correct_lenient`, `format_ok`.
    """
    columns = {name: [row[name] for row in rows] for name in ("answer", "data_source", "extra_info")}
    scores = grader.score(texts, **columns)
    correct, lenient = scores >= 1, grader.right_lenient(texts, **columns)
    formed = np.array([grader.format_right(text) for text in texts])
    shares = {"answer_accuracy": correct, "lenient_accuracy": lenient, "format_accuracy": formed}
    close = [is_close(text, row["answer"], 0.1) for text, row in zip(texts, rows, strict=True)]
    result = {"questions": len(rows)} | {name: float(found.mean()) for name, found in shares.items()}
    result |= {
        "partial_accuracy": float(np.mean(close)),
        "completion_length": float(np.mean(lengths)),
        "cut_off": float(np.mean(cut_off)),
        "completions": texts,
        "correct": correct.tolist(),
        "correct_lenient": lenient.tolist(),
        "format_ok": formed.tolist(),
    }
    if "compute_score" in grader.names:
        result["mean_score"] = float(scores.mean())
    sources = np.array(columns["data_source"])
    if len(set(sources)) > 1:
        masks = {name: sources == name for name in sorted(set(sources))}
        result["by_data_source"] = {
            name: {"questions": int(mask.sum())}
            | {share: float(found[mask].mean()) for share, found in shares.items()}
            for name, mask in masks.items()
        }
    return result
