"""Evaluation results: shares of right answers, each answer, and what they say about the training.

Claims no more than was measured. Before and after use the same questions, so we compare those that
changed: if training did nothing, about as many turn wrong as turn right. A change is clear if
chance alone would produce one as lopsided in fewer than 5 % of cases (exact McNemar test).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from run.health import Sentence
from task.grading import is_close, parse_number
from task.questions import GRADED
from task.run_grader import Grader

if TYPE_CHECKING:  # it imports jax, which takes a second
    from task.task import Answers

type Result = Mapping[str, Any]  # of an evaluation

SEEN = 0.05  # if the share of right answers never gets there, the reward was for something else
# what a right answer is: `run_files.what_is_right`
EPISODE, NUMBER = "episode", "number"
ROWS = {  # of the table: metrics and their descriptions
    "answer_accuracy": "answers right",
    "lenient_accuracy": "right by the last number",
    "partial_accuracy": "within 10 %",
    "format_accuracy": "format right",
    "greedy_answer_accuracy": "greedy: answers right",
    "greedy_lenient_accuracy": "greedy: right by the last number",
    "greedy_format_accuracy": "greedy: format right",
    "cut_off": "cut off at the limit",
    "mean_score": "mean score",
    "completion_length": "mean length, tokens",
}
EPISODE_ROWS = {  # of episodes that only their environment rewards
    "answer_accuracy": "episodes that succeed",
    "greedy_answer_accuracy": "greedy: episodes that succeed",
    "cut_off": "cut off at the limit",
    "completion_length": "mean length, tokens",
}
HELD_OUT = {  # columns: figures of `evaluate`, on rows where a step ends with one
    "held_out_correct": "answer_accuracy",
    "held_out_correct_lenient": "lenient_accuracy",
    "held_out_format_ok": "format_accuracy",
    "held_out_greedy_correct": "greedy_answer_accuracy",
    "held_out_greedy_correct_lenient": "greedy_lenient_accuracy",
}


def grade(grader: Grader, rows: Sequence[Mapping[str, str]], answers: "Answers") -> dict[str, Any]:
    """Grades an answer (`Answers` of task/task.py) to each of Q questions.

    Returns:
        Shares `answer_accuracy` (right, in the requested format), `lenient_accuracy` (the last
        number is right, wherever it is), `partial_accuracy` (within 10 %, of the questions whose
        right answer is a number), `format_accuracy`, `cut_off`; means `completion_length` (tokens)
        and, if compute_score grades, `mean_score`; if there are several, `by_data_source`:
        `questions` and three of the shares. Lists [Q]: `completions`, `correct`, `correct_lenient`,
        `format_ok`.
    """
    texts = answers.texts.tolist()
    columns = {name: [row[name] for row in rows] for name in GRADED}
    columns |= {"completions": texts, "episodes": answers.episodes}
    scores = grader.score(**columns)
    correct, lenient = scores >= 1, grader.right_lenient(**columns)
    formed = grader.format_right(**columns)
    close = [
        is_close(text, row["answer"], 0.1)
        for text, row in zip(texts, rows, strict=True)
        if parse_number(row["answer"]) is not None
    ]
    right = {"answer_accuracy": correct, "lenient_accuracy": lenient, "format_accuracy": formed}

    def shares(mask):
        return {"questions": int(mask.sum())} | {
            name: float(x[mask].mean()) for name, x in right.items()
        }

    result = shares(np.ones(len(rows), bool)) | {
        "completion_length": float(np.mean(answers.lengths)),
        "cut_off": float(np.mean(~answers.ended)),
        "completions": texts,
        "correct": correct.tolist(),
        "correct_lenient": lenient.tolist(),
        "format_ok": formed.tolist(),
    }
    if close:
        result["partial_accuracy"] = float(np.mean(close))
    if "compute_score" in grader.names:
        result["mean_score"] = float(scores.mean())
    sources = np.array(columns["data_source"])
    if len(set(sources)) > 1:
        result["by_data_source"] = {name: shares(sources == name) for name in sorted(set(sources))}
    return result


def merge_greedy(sampled: dict[str, Any], greedy: dict[str, Any], rows) -> dict[str, Any]:
    """Merges two evaluations: the greedy metrics and lists become `greedy_...`; adds what was
    `asked`.
    """
    kept = ("answer_accuracy", "lenient_accuracy", "format_accuracy", "completions", "correct")
    asked = [{name: row[name] for name in ("question", "answer", "data_source")} for row in rows]
    return sampled | {f"greedy_{name}": greedy[name] for name in kept} | {"asked": asked}


def in_words(result: Result) -> str:
    """The shares of an evaluation to show during a run."""
    names = {
        "answers right": "answer_accuracy",
        "by the last number": "lenient_accuracy",
        "format right": "format_accuracy",
        "greedy right": "greedy_answer_accuracy",
    }
    return ", ".join(f"{words} {result[name]:.1%}" for words, name in names.items())


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n questions (Wilson 1927, JASA 22, p. 209): both ends, from 0 to
    1.
    """
    # takes a second to import, which `tool.py show_run` can defer
    from scipy.stats import binomtest

    return tuple(map(float, binomtest(round(share * n), n).proportion_ci(0.95, "wilson")))


def rows_for(right: str) -> dict[str, str]:
    """The metrics that mean something where right is a "number", a "score" or an "episode"."""
    rows = EPISODE_ROWS if right == EPISODE else ROWS
    return {key: name for key, name in rows.items() if right == NUMBER or key != "partial_accuracy"}


def comparison(results: Sequence[Result], right: str = NUMBER) -> list[list[str]]:
    """Rows of a table: a metric's name, and its value in each of `results`; shares with 95 %
    intervals.
    """

    def cell(key, result):
        if key in ("mean_score", "completion_length"):
            return f"{result[key]:.{2 if key == 'mean_score' else 1}f}"
        low, high = wilson(result[key], result["questions"])
        return f"{result[key]:.1%} ({low:.1%} to {high:.1%})"

    return [
        [name, *(cell(key, result) for result in results)]
        for key, name in rows_for(right).items()
        if all(key in result for result in results)
    ]


def by_source(results: Sequence[Result], right: str = NUMBER) -> list[list[str]]:
    """Rows of a table of the same shares by data_source; the first row has the columns' names.

    Empty where there's only one source.
    """
    split = [result.get("by_data_source") for result in results]
    if not results or not all(split):
        return []
    shares = ("answer_accuracy", "lenient_accuracy", "format_accuracy")
    keys = [key for key in shares if key in rows_for(right)]

    def cells(name):
        asked = split[0][name]["questions"]
        changes = (" to ".join(f"{one[name][key]:.1%}" for one in split) for key in keys)
        return [name, str(asked), *changes]

    head = ["data_source", "questions", *(rows_for(right)[key] for key in keys)]
    return [head, *map(cells, split[0])]


def measured(results: Sequence[Result]) -> tuple[str, str]:
    """Which metric counts as right in these: the name of its list and of its share.

    If rewards depend on the last number only, no answer may be right in the requested format.
    """
    keys = ("answer_accuracy", "lenient_accuracy")
    in_form, number = (max((result[key] for result in results), default=1) for key in keys)
    by_number = in_form < SEEN <= number
    return ("correct_lenient", "lenient_accuracy") if by_number else ("correct", "answer_accuracy")


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, int]:
    """How many turned right, how many wrong; and 1: clearly better, -1: clearly worse, 0: may be
    chance.
    """
    from scipy.stats import binomtest

    right = sum(new > old for old, new in zip(before, after, strict=True))
    wrong = sum(new < old for old, new in zip(before, after, strict=True))
    clear = right != wrong and binomtest(right, right + wrong).pvalue < 0.05
    return right, wrong, (1 if right > wrong else -1) if clear else 0


def headline(
    tests: Sequence[Result], evaluations: Sequence[Result], steps: int, right: str = NUMBER
) -> list[Sentence]:
    """Did it work? `tests` are the results before training and, once the run is over, after it."""
    over = len(tests) == 2
    sentences = [] if over else [Sentence("not_over", steps=steps)]
    if not over and len(evaluations) < 2:
        return sentences
    before, after = tests if over else (evaluations[0], evaluations[-1])
    name, key = measured((before, after))
    gained, _, sign = mcnemar(before[name], after[name])
    verdict = (
        "worked" if sign > 0 else "got_worse" if sign < 0 else "unclear" if gained else "no_gain"
    )
    change = Sentence(key, before=before[key], after=after[key])  # "35% to 99% right"
    sentences += [Sentence(verdict if over else "so_far", change=change)]
    if (
        right != EPISODE
        and name == "correct"
        and mcnemar(before["format_ok"], after["format_ok"])[2]
    ):
        shares = before["format_accuracy"], after["format_accuracy"]
        sentences += [Sentence("format_change", before=shares[0], after=shares[1])]
    apart = [i for i, one in enumerate(evaluations) if mcnemar(one[name], evaluations[-1][name])[2]]
    if sign > 0 and apart and len(evaluations) > 2:  # with two of them, nothing is known in between
        since = evaluations[apart[-1] + 1]["step"]
        sentences += [Sentence("flat" if since < evaluations[-1]["step"] else "rising", step=since)]
    return sentences


def failed(headline: Sequence[Sentence]) -> bool:
    """Whether it says that the run is over and didn't work."""
    return any(line.parts[0] in ("got_worse", "unclear", "no_gain") for line in headline)


def example(before: Result, after: Result) -> int:
    """The first question that turned right, or wrong where more turned wrong; else the first."""
    name, _ = measured((before, after))
    right, wrong, _ = mcnemar(before[name], after[name])
    sides = list(zip(before[name], after[name], strict=True))
    turned = (False, True) if right >= wrong else (True, False)
    return sides.index(turned) if turned in sides else 0


def reasons(before: Result, after: Result, right: str = NUMBER) -> list[Sentence]:
    """Where the change comes from, as far as we can count it."""
    name, _ = measured((before, after))
    gained, wrong, _ = mcnemar(before[name], after[name])
    sentences = [Sentence("turned", right=gained, wrong=wrong, all=len(before[name]))]
    had_it = zip(before["correct"], after["correct"], before["correct_lenient"], strict=True)
    if right == NUMBER and name == "correct" and gained:
        form = sum(new > old and number for old, new, number in had_it)
        sentences += [Sentence("only_form", form=form, rest=gained - form)]
    return sentences


def dips(evaluations: Sequence[Result], task: str = NUMBER) -> list[tuple[int, bool, Sentence]]:
    """Each drop of the held-out curve: its step, whether it's clear, and a description."""
    drops = []
    name, key = measured(evaluations)
    for old, new in pairwise(evaluations):
        if new[key] < old[key]:
            right, wrong, sign = mcnemar(old[name], new[name])
            form = sum(
                a > b and number
                for a, b, number in zip(old[name], new[name], new["correct_lenient"])
            )
            words = "dip" if task == NUMBER else "dip_only"
            dip = Sentence(words, step=new["step"], wrong=wrong, form=form, right=right)
            drops += [(new["step"], sign < 0, dip)]
    return drops


def best(evaluations: Sequence[Result], kept: Sequence[int]) -> Sentence | None:
    """The evaluation during training with the most right answers, and the best of the checkpoints
    that were `kept`, in a sentence; None without either.
    """

    def most_right(some):  # the first
        return max(some, key=lambda e: (e["answer_accuracy"], e["lenient_accuracy"]))

    evaluations = [one for one in evaluations if one["step"]]  # not the one before training
    if not (there := [one for one in evaluations if one["step"] in kept]):
        return None
    steps = ", ".join(map(str, kept))
    found = {"best": most_right(evaluations), "kept": most_right(there), "steps": steps}
    name = "best" if found["best"] is found["kept"] else "best_not_kept"
    return Sentence(name, last=evaluations[-1], **found)


def between(names: Sequence[str], after: Sequence[Result]) -> Sentence:
    """Which of two runs answers the same test questions better."""
    name, key = measured(after)
    _, _, sign = mcnemar(*(result[name] for result in after))
    (worse, low), (better, high) = list(zip(names, (result[key] for result in after)))[:: sign or 1]
    shares = Sentence(f"{key}_each", first=better, high=high, second=worse, low=low)
    return Sentence("better" if sign else "no_winner", better=better, shares=shares)
