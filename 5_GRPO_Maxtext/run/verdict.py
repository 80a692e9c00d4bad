"""Summarizes a run's results in words: did it work, and why. Claims no more than was measured.

Before and after use the same questions, so we compare those that changed: if training did nothing, about as
many turn wrong as turn right. A change is clear if chance alone would produce one as lopsided in fewer than
5 % of cases (exact McNemar test).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from run.health import Sentence

type Result = Mapping[str, Any]  # of an evaluation

SEEN = 0.05  # if the share of right answers never gets there, the reward was for something else


def measured(results: Sequence[Result]) -> tuple[str, str]:
    """Which metric counts as right in these: the name of its list and of its share.

    If rewards depend on the last number only, no answer may be right in the requested format.
    """
    keys = ("answer_accuracy", "lenient_accuracy")
    in_form, number = (max((result[key] for result in results), default=1) for key in keys)
    by_number = in_form < SEEN <= number
    return ("correct_lenient", "lenient_accuracy") if by_number else ("correct", "answer_accuracy")


def change(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, int]:
    """How many turned right, how many wrong; and 1: clearly better, -1: clearly worse, 0: may be chance."""
    from scipy.stats import binomtest  # takes a second to import, which `tool.py show_run` can defer

    right = sum(new > old for old, new in zip(before, after, strict=True))
    wrong = sum(new < old for old, new in zip(before, after, strict=True))
    clear = right != wrong and binomtest(right, right + wrong).pvalue < 0.05
    return right, wrong, (1 if right > wrong else -1) if clear else 0


def headline(tests: Sequence[Result], evaluations: Sequence[Result], steps: int) -> list[Sentence]:
    """Did it work? `tests` are the results before training and, once the run is over, after it."""
    over = len(tests) == 2
    said = [] if over else [Sentence("not_over", steps=steps)]
    if not over and len(evaluations) < 2:
        return said
    before, after = tests if over else (evaluations[0], evaluations[-1])
    name, key = measured((before, after))
    right, _, sign = change(before[name], after[name])
    verdict = "worked" if sign > 0 else "got_worse" if sign < 0 else "unclear" if right else "no_gain"
    right = Sentence(key, before=before[key], after=after[key])  # "35% to 99% right"
    said += [Sentence(verdict if over else "so_far", change=right)]
    if name == "correct" and change(before["format_ok"], after["format_ok"])[2]:
        shares = before["format_accuracy"], after["format_accuracy"]
        said += [Sentence("format_change", before=shares[0], after=shares[1])]
    apart = [i for i, one in enumerate(evaluations) if change(one[name], evaluations[-1][name])[2]]
    if sign > 0 and apart and len(evaluations) > 2:  # with two of them, nothing is known in between
        since = evaluations[apart[-1] + 1]["step"]
        said += [Sentence("flat" if since < evaluations[-1]["step"] else "rising", step=since)]
    return said


def reasons(before: Result, after: Result) -> list[Sentence]:
    """Where the change comes from, as far as we can count it."""
    name, _ = measured((before, after))
    right, wrong, _ = change(before[name], after[name])
    said = [Sentence("turned", right=right, wrong=wrong, all=len(before[name]))]
    had_it = zip(before["correct"], after["correct"], before["correct_lenient"], strict=True)
    if name == "correct" and right:
        form = sum(new > old and number for old, new, number in had_it)
        said += [Sentence("only_form", form=form, rest=right - form)]
    return said


def dips(evaluations: Sequence[Result]) -> list[tuple[int, bool, Sentence]]:
    """Each drop of the held-out curve: its step, whether it's clear, and a description."""
    found, (name, key) = [], measured(evaluations)
    for old, new in pairwise(evaluations):
        if new[key] < old[key]:
            right, wrong, sign = change(old[name], new[name])
            form = sum(a > b and number for a, b, number in zip(old[name], new[name], new["correct_lenient"]))
            dip = Sentence("dip", step=new["step"], wrong=wrong, form=form, right=right)
            found += [(new["step"], sign < 0, dip)]
    return found


def between(names: Sequence[str], after: Sequence[Result]) -> Sentence:
    """Which of two runs answers the same test questions better."""
    name, key = measured(after)
    _, _, sign = change(*(result[name] for result in after))
    (worse, low), (better, high) = list(zip(names, (result[key] for result in after)))[:: sign or 1]
    shares = Sentence(f"{key}_each", first=better, high=high, second=worse, low=low)
    return Sentence("better" if sign else "no_winner", better=better, shares=shares)
