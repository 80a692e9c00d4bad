"""What inference.py does with a model's answers: it grades them, takes a vote, prints them, and
writes them to a file or a page.

A row is a question of `questions.read_questions`, with its completions `after` training and perhaps
`before`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tunix.rl.algo_core import compute_advantages

import settings
from constants import RunConstants
from model.rollout import right_padded
from plain_text import escape_controls
from run import answers, page
from task.grading import grade, grade_lenient
from task.questions import GRADED

# by `write_rows`
WRITTEN = ("completion", "completions", "vote", "before", "correct", "correct_lenient")


def is_right(grader, completion: str, row: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a completion is right as the run grades it, and whether its last number is right."""
    if row["data_source"] is None:  # graded by number
        return grade(completion, row["answer"]), grade_lenient(completion, row["answer"])
    columns = [[completion], *([row[name]] for name in GRADED)]
    return bool(grader.score(*columns)[0] >= 1), bool(grader.right_lenient(*columns)[0])


def verdict(grader, completion: str, row: dict[str, Any]) -> str:
    """ " [right]", " [wrong, right: 7]", or nothing if the right answer isn't known."""
    if row["answer"] is None:
        return ""
    return (
        " [right]" if is_right(grader, completion, row)[0] else f" [wrong, right: {row['answer']}]"
    )


def vote(grader, completions: list[str], data_source: str | None = None) -> tuple[str, str]:
    """The first completion with the most frequent answer, and that answer with its count."""
    votes = grader.votes(completions, data_source)
    most = max((vote for vote in votes if vote is not None), key=votes.count, default=None)
    count = f"{most} ({votes.count(most)} of {len(completions)})"
    return completions[votes.index(most)], "no answer" if most is None else count


def show(rows: list[dict[str, Any]], grader) -> None:
    """Prints questions and answers, and how many of those with a known answer are right."""
    names, right = [name for name in ("before", "after") if name in rows[0]], []
    for row in rows:
        print(escape_controls(f"\nquestion: {row['question']}"))
        for texts in zip(*(row[name] for name in names), strict=True):
            for name, text in zip(names if len(names) > 1 else ["answer"], texts):
                print(escape_controls(f"{name + ':':9} {text}{verdict(grader, text, row)}"))
        winners = [vote(grader, row[name], row["data_source"]) for name in names]
        if len(row["after"]) > 1:
            words = f"before {winners[0][1]}, after " if len(names) > 1 else ""
            winner, last = winners[-1]
            print(escape_controls(f"vote:     {words}{last}{verdict(grader, winner, row)}"))
        if row["answer"] is not None:
            right.append([is_right(grader, winner, row) for winner, _ in winners])
    if right:
        for words, counts in zip(("\nright:    ", "by the last number: "), np.sum(right, axis=0).T):
            print(words + ", after ".join(f"{count} of {len(right)}" for count in counts))


def write_rows(path: Path, rows: list[dict[str, Any]], grader) -> None:
    """Writes OUTPUT: INPUT's columns, without those of an earlier OUTPUT, and WRITTEN's."""
    lines = []
    for row in rows:
        completion, words = vote(grader, row["after"], row["data_source"])
        out = {name: value for name, value in row["row"].items() if name not in WRITTEN}
        out["completion"] = completion
        if len(row["after"]) > 1:
            out |= {"completions": row["after"], "vote": words}
        if "before" in row:
            out["before"] = vote(grader, row["before"], row["data_source"])[0]
        if row["answer"] is not None:
            out["correct"], out["correct_lenient"] = is_right(grader, completion, row)
        # str: dates of a Parquet file
        lines.append(json.dumps(out, ensure_ascii=False, default=str) + "\n")
    settings.write_whole(path, "".join(lines))
    print(f"answers:  {path}")


def token_log_probs(c: RunConstants, rollout, output) -> np.ndarray:
    """Log-probs [N, T] of one engine's answers under another's weights at temperature 1."""
    # [N, T]
    tokens = right_padded(output.tokens, c.TOTAL_GENERATION_STEPS, rollout.pad_id(), np.int32)
    parts = [slice(start, start + c.BATCH_SIZE) for start in range(0, len(tokens), c.BATCH_SIZE)]
    prompts = output.left_padded_prompt_tokens  # [N, P]
    return np.concatenate(
        [rollout.get_per_token_logps(prompts[part], tokens[part]) for part in parts]
    )


def write_page(
    c: RunConstants, path: Path, tokenizer, rows, output, log_probs, grader, about: str
) -> None:
    """Writes the page: each question with its answers, rewards, advantages and tokens.

    `log_probs` are from `token_log_probs`, before and after training; only one for an untrained
    model.
    """
    # [N, T]
    tokens = right_padded(output.tokens, c.TOTAL_GENERATION_STEPS, tokenizer.pad_id(), np.int32)
    groups = []
    for i, row in enumerate(rows):
        part, known = slice(i * c.SAMPLES, (i + 1) * c.SAMPLES), row["answer"] is not None
        columns = {
            "question": row["question"],
            "answer": row["answer"] if known else "",
            "data_source": row["data_source"] or "gsm8k",
            "extra_info": row["extra_info"],
        }
        columns = {
            name: np.array([value] * c.SAMPLES, dtype=object) for name, value in columns.items()
        }
        texts = np.array(row["after"], dtype=object)
        points = {
            f.__name__: np.array(f(None, texts, **columns)) for f in grader.functions if known
        }
        rewards = sum(points.values(), np.zeros(c.SAMPLES))
        log_prob = dict(zip(("log_prob", "log_prob_after"), (x[part] for x in log_probs)))
        [group] = answers.question_rows(
            tokenizer,
            grader,
            c.SAMPLES,
            tokens[part],
            columns | {"completions": texts, "points": points, "rewards": rewards},
            advantages=compute_advantages(rewards, c.SAMPLES),
            counts=np.ones(c.SAMPLES, bool),
            **log_prob,
        )
        groups.append(page.to_group(group | {"step": 0, "graded": known, "answer": row["answer"]}))
    notes = ["Drawn with the sampling of inference.py; log-probabilities are at temperature 1."]
    if not all(group["graded"] for group in groups):
        notes.append(
            "Where the right answer is not known there are no rewards: give it as ANSWER=..."
        )
    page.save(
        path,
        {
            "kind": "questions",
            "about": about,
            "groups": groups,
            "compared": len(log_probs) > 1,
            "notes": notes,
            "constants": {"ADVANTAGE": "group", "ZERO_VARIANCE_GROUPS": "keep"},
        },
    )
    print(f"page:     {path}")
