"""Grading and the course's rewards: a list of hard cases, oracles and hostile texts."""

import json
import random
import re
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import reward_func
from task import grading
from task.grading import (
    extract_answer,
    format_ok,
    grade,
    grade_lenient,
    is_close,
    last_number,
    parse_number,
)
from task.run_grader import course_rewards
from task.task_rewards import compute_score

CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ANSWERS = Path(__file__).with_name("answer_cases.jsonl").read_text(encoding="utf-8").splitlines()

REWARDS = list(course_rewards(reward_func).values())
PERFECT = "<reasoning>16 - 3 - 4 = 9 and 9 * 2 = 18</reasoning>\n<answer>18</answer>"


def tagged(answer: str) -> str:
    return f"<reasoning>I add them up.</reasoning>\n<answer>{answer}</answer>"


def rewards(completion: str, gold: str) -> list[float]:
    """The four rewards of one completion, called as Tunix does: by keyword, gold as an array."""
    columns = {"prompts": ["?"], "completions": [completion], "answer": np.array([gold])}
    return [reward_fn(**columns, question=["?"])[0] for reward_fn in REWARDS]


def completion_of(case: dict) -> str:
    if build := case.get("build"):
        return build["prefix"] + build["unit"] * build["times"] + build["suffix"]
    return case["completion"]


@pytest.mark.parametrize("case", [*map(json.loads, ANSWERS)], ids=lambda case: case["id"])
def test_own_case(case):
    expected = None if case["value"] is None else Fraction(case["value"])
    if case["kind"] == "gold":
        gold = grading.extract_hash_answer(completion_of(case))
        assert (gold is not None) == case["correct"]
        assert (None if gold is None else parse_number(gold)) == expected
        return
    completion = completion_of(case)
    assert parse_number(extract_answer(completion) or "") == expected
    assert grade(completion, case["gold"]) == case["correct"]
    assert format_ok(completion) == case["format_ok"]
    # What the policy is paid must follow what the evaluation reports.
    exactly, approximately, answer, numbers = rewards(completion, case["gold"])
    assert exactly == (3.0 if case["format_ok"] else 0.0)
    assert approximately == 2.0 or not case["format_ok"]
    assert (answer >= 1.5) == case["correct"]
    assert numbers == (1.5 if case["correct"] else 0.0)
    if extract_answer(completion) is not None:  # without tags `compute_score` grades other marks
        for task in ("gsm8k", "math_reasoning"):
            assert compute_score(task, completion, case["gold"]) == float(case["correct"])


def test_parse_number_agrees_with_fraction_of_the_plain_text():
    rng = random.Random(0)
    for _ in range(1000):
        whole = rng.randrange(10 ** rng.randint(1, 25))
        digits = "".join(rng.choices("0123456789", k=rng.randint(1, 20)))
        sign = rng.choice(["", "-"])
        plain = f"{sign}{whole}.{digits}"
        value = Fraction(plain)
        shift = rng.randint(-9, 9)
        writings = (
            plain,
            f"{sign}{whole:,}.{digits}",
            f"{sign}${whole:,}.{digits}000",
            f"{sign}000{whole}.{digits}",
            f"{value * 10**20}e-20",  # at most 20 decimals: an integer times 10^-20
            f"{value.numerator}/{value.denominator}",
            plain.replace("-", "\u2212"),
            plain.translate({ord(c): ord(c) + 0xFEE0 for c in "-.0123456789"}),
            f"  x = {plain} m^2.\n",
            f"**{plain}%**",
        )
        for text in writings:
            assert parse_number(text) == value, text
            assert grade(tagged(text), plain), text
        assert parse_number(f"{plain}E{shift:+d}") == value * Fraction(10) ** shift
        assert not grade(tagged(f"{plain}1"), plain)  # one more digit: differs by 1e-21 or more
        assert not grade(tagged(plain), f"{plain}1")


def test_two_numbers_are_never_read_as_one():
    separators = [
        " ",
        "  ",
        "\n",
        " and ",
        ", ",
        ",",
        ":",
        "$",
        "x",
        " = ",
        " - ",
        "_",
        ";",
        "'",
        "^",
    ]
    separators += ["\u00a0", " of ", " m^2 ", " m^1", "\u2013", "e ", "!", "(", "*", "\u00b7"]
    rng = random.Random(1)
    for separator in separators:
        for _ in range(100):
            first, second = rng.randrange(10_000), rng.randrange(100)  # not three digits: no group
            text = f"{first}{separator}{second}"
            assert parse_number(text) is None, text


def test_extraction_and_form_agree_with_a_slow_regex():
    """The oracles look for a tag at each character: plainly right, and too slow for real use."""
    pair = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
    block = r"((?:(?!</?(?:answer|reasoning)>).)*)"
    end = r"\s*(?:<\|end\|>\s*)*"
    form = rf"\s*<reasoning>{block}</reasoning>\s*<answer>{block}</answer>{end}"
    pieces = [*grading.TAGS, "18", " ", "\n", "<|end|>"]
    right = ["<reasoning>", "a", "</reasoning>", " ", "<answer>", "18", "</answer>", "<|end|>"]
    rng = random.Random(2)
    seen = {True: 0, False: 0}
    for _ in range(8_000):
        # Half start from the right form: pieces in random order would hardly ever have it.
        parts = list(right) if rng.random() < 0.5 else rng.choices(pieces, k=rng.randint(0, 10))
        for _ in range(rng.randint(0, 2)):
            parts.insert(rng.randint(0, len(parts)), rng.choice(pieces))
        if parts and rng.random() < 0.3:
            parts.pop(rng.randrange(len(parts)))
        text = "".join(parts)
        assert extract_answer(text) == (pair.findall(text) or [None])[-1], text
        match = re.fullmatch(form, text, re.DOTALL)
        expected = match is not None and bool(match[1].strip() and match[2].strip())
        assert format_ok(text) == expected, text
        seen[expected] += 1
    assert min(seen.values()) > 400  # both answers must have been put to the test


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [  # what is replaced in the perfect answer ("": it comes after the answer)
        ("perfect", "", "", [3.0, 2.0, 3.0, 1.5]),
        ("stop token", "", "<|eot_id|>", [3.0, 2.0, 3.0, 1.5]),
        ("dollars", "18</a", "$18.00</a", [3.0, 2.0, 3.0, 1.5]),
        ("whitespace", "18</a", " 18\n</a", [3.0, 2.0, 1.5, 1.5]),
        ("no opening", "<reasoning>", "", [0.0, 1.0, 3.0, 1.5]),
        ("not closed", "</reasoning>", "", [0.0, 1.0, 3.0, 1.5]),
        ("no <answer>", "<answer>", "", [0.0, 1.0, 0.0, 0.0]),
        ("no </answer>", "</answer>", "", [0.0, 1.0, 0.0, 0.0]),
        ("answered twice", "", "<answer>18</answer>", [0.0, 0.0, 3.0, 1.5]),
        ("chatter", "", " So 18.", [0.0, 2.0, 3.0, 1.5]),
        ("within 10 %", "18</a", "19</a", [3.0, 2.0, 0.5, 0.0]),
        ("within 20 %", "18</a", "15</a", [3.0, 2.0, 0.25, 0.0]),
        ("wrong", "18</a", "30</a", [3.0, 2.0, -1.0, 0.0]),
        ("no number", "18</a", "many</a", [3.0, 2.0, -1.0, 0.0]),
        ("empty answer", "18</a", "</a", [0.0, 2.0, -1.0, 0.0]),
    ],
)
def test_points(name, old, new, expected):
    assert rewards(PERFECT.replace(old, new) if old else PERFECT + new, "18") == expected


@pytest.mark.parametrize(("gold", "answer", "points"), CASES["points_of_check_answer"])
def test_points_of_check_answer(gold, answer, points):
    assert reward_func.check_answer([""], [tagged(answer)], [gold]) == [points]


def test_is_close_takes_a_float_ratio_as_the_decimal_it_is_written_as():
    assert is_close(tagged("0.33"), "0.3", 0.1)
    assert is_close(tagged("110"), "100", "0.1")
    # The float next to 0.1 is 5.6e-18 above it: of a gold of 100 that would let this pass.
    assert not is_close(tagged("110.0000000000000001"), "100", 0.1)
    assert not is_close("18", "18", 0.1)


@pytest.mark.parametrize("reward_fn", REWARDS[2:])
def test_an_answer_too_few_is_an_error(reward_fn):
    with pytest.raises(ValueError):
        reward_fn(prompts=["?", "?"], completions=[PERFECT, PERFECT], answer=["18"])


def test_the_longest_number_that_is_read():
    assert parse_number("9" * 4300) == 10**4300 - 1
    assert parse_number("9" * 4301) is None
    assert parse_number("1e308") == 10**308
    assert parse_number("1e309") is None
    assert parse_number("1e-308") == Fraction(1, 10**308)


@pytest.mark.parametrize(
    ("text", "number"),
    [  # "": there is none
        ("I get 18", "18"),
        ("18", "18"),
        ("It is $1,080.50.", "2161/2"),
        ("3/4 of it", "3/4"),
        ("<reasoning>8-6=2,2+5=7</reasoning>7</answer>", "7"),
        ("<answer>7</answer>, not 5", "5"),
        ("16-9", "9"),
        ("16 - 9", "9"),
        ("(3)-5", "5"),
        ("x-5", "5"),
        ("= -3", "-3"),
        ("-3", "-3"),
        ("is: -$5", "-5"),
        ("17. So", "17"),
        ("50%", "50"),
        ("１８", "18"),
        ("−18", "-18"),
        ("1\u00a0000", "1000"),
        ("10:30", "30"),
        ("no number", ""),
        ("", ""),
        ("1/0", ""),
        ("9" * 5000, ""),
        ("77" + "x" * 9000, "77"),
    ],
)
def test_the_last_number_wherever_it_stands(text, number):
    assert last_number(text) == (Fraction(number) if number else None)
    if number:
        assert grade_lenient(text, number) and not grade_lenient(text, str(Fraction(number) + 1))
    assert not grade_lenient(text, "nothing")


def test_what_is_not_read_whole_is_refused_and_one_number_is_read_with_what_stands_beside_it():
    assert [text for text in CASES["another"] if parse_number(text) is not None] == []
    assert [text for text in CASES["seventy"] if parse_number(text) != 70] == []
    signed = [
        ("-\\$70", "-70"),
        ("\\boxed{-70}", "-70"),
        ("- $70", "-70"),
        ("**-70**", "-70"),
        ("(-70)", "-70"),
        ("−70 %", "-70"),
        ("\\$1,080.50", "2161/2"),
        ("3/4 of it", "3/4"),
    ]
    assert [text for text, number in signed if parse_number(text) != Fraction(number)] == []
