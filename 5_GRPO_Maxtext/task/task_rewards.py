r"""Rewards by task: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

Returns 1.0 for a right answer, else 0.0 (for code, the share of tests that pass, see
code_grading.py):

| data_source           | what counts as right                                                     |
|-----------------------|--------------------------------------------------------------------------|
| gsm8k, math_reasoning | the number, compared exactly: "1,000", "$1000.00" and "1000" are equal   |
| math                  | an equal expression, by math-verify: \frac{1}{2} equals 0.5, 3*4 equals  |
|                       | 12                                                                       |
| code, code_generation | code that passes the tests in `ground_truth`                             |
| qa, trivia            | the text, or one of a JSON list of texts, normalized as in SQuAD:        |
|                       | without case, punctuation, and a, an, the, unless nothing else is left   |
| classification        | the label, without case and surrounding punctuation                      |

It grades the last <answer>...</answer>, or else the last \boxed{...}, or else the text after the
last "####". Without any of these it grades the whole text, which then has to be the answer and
nothing else.
"""

import contextlib
import functools
import gc
import json
import logging
import re
import string
import unicodedata

from task import code_grading
from task.grading import MAX_EQUATION, MAX_LENGTH, arithmetic, extract_answer, parse_number

# %% Finding the answer ----------------------------------------------------------------------------
BOXED = r"\boxed{"
_STOP_TOKENS = re.compile(r"(?:\s*+>\|\w++\|<)*+\s*+")  # matches reversed text


def without_stop_tokens(text: str) -> str:
    """`text` without trailing blanks and stop tokens such as <|eot_id|>."""
    return text[: len(text) - _STOP_TOKENS.match(text[::-1]).end()]


def marked_answer(text: str) -> str | None:
    r"""The stripped answer in <answer>, else in \boxed{}, else after ####; None if `text` marks
    none.
    """
    answer = extract_answer(text)
    if answer is None and BOXED in text:
        answer = boxed(text)
    if answer is None and "####" in text:
        answer = without_stop_tokens(text.rpartition("####")[2].strip().partition("\n")[0])
    return answer and answer.strip()


def final_answer(text: str) -> str:
    """`marked_answer`, or the whole stripped text if nothing is marked."""
    answer = marked_answer(text)
    return without_stop_tokens(text).strip() if answer is None else answer


def boxed(text: str) -> str:
    r"""The content of the last \boxed{...}, inner braces matched; "" if it's never closed, but cut
    off.
    """
    rest, depth = text.rpartition(BOXED)[2], 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i]
    return ""


# %% One grader per task ---------------------------------------------------------------------------
def number_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is exactly the number `ground_truth`, else 0.0."""
    gold = parse_number(ground_truth)
    return float(gold is not None and parse_number(final_answer(solution_str)) == gold)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-")
_KEPT = re.compile(  # punctuation that changes the answer: -5, 3.5, 1/2, 10:30, 2010-2012, C#, C++
    r"(?<![\w)])-(?=\.?\d)|(?<=\d)[-./:](?=\d)|(?<!\w)\.(?=\d)|(?<=\b[a-z])(?:#|\+\+)(?!\w)"
)


def normalize_text(text: str) -> str:
    """SQuAD's normalization (arXiv 1606.05250): lower case, no punctuation, no articles, single
    spaces.

    Unlike SQuAD, it keeps _KEPT, and answers that would become empty, such as "A" and "?". Text
    longer than MAX_LENGTH isn't a short answer and becomes empty, because normalizing a long run of
    combining marks takes quadratic time.
    """
    if len(text) > MAX_LENGTH:
        return ""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_DASHES)
    kept = {i for match in _KEPT.finditer(text) for i in range(*match.span())}
    dropped = {c for c in text if unicodedata.category(c)[0] == "P" or c in string.punctuation}
    bare = "".join(c for i, c in enumerate(text) if i in kept or c not in dropped)
    forms = (" ".join(form.split()) for form in (_ARTICLES.sub(" ", bare), bare, text))
    return next(filter(None, forms), "")


def text_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the normalized answer is `ground_truth`, or one of its texts if it's a JSON list."""
    answer = normalize_text(final_answer(solution_str))
    return float(bool(answer) and answer in map(normalize_text, aliases(ground_truth)))


def aliases(ground_truth: str) -> list[str]:
    """The right texts: the items of `ground_truth` if it's a JSON list, else itself.

    None for an object, and for a list of anything but texts and numbers.
    """
    try:
        items = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return [ground_truth]
    if isinstance(items, list) and all(isinstance(item, (str, int, float)) for item in items):
        return list(map(str, items))
    return [] if isinstance(items, (list, dict)) else [ground_truth]


def label_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is the label and nothing else; an answer that names two labels is wrong.

    Ignores quotes, brackets, stars and full stops around it, but not signs such as in -1, C# and
    A+.
    """

    def normal(label):
        return " ".join(label.casefold().split()).strip("\"'`.,;:!?()[]{}<>*_“”‘’。「」 ")

    return float(normal(final_answer(solution_str)) == normal(ground_truth) != "")


def may_hold(equation: str) -> bool:
    """False for "17 = 18", where math-verify would take the last side as the answer."""
    values = set(map(arithmetic, equation.split("="))) if len(equation) <= MAX_EQUATION else set()
    return len(values) < 2 or None in values


MATH_SECONDS = 3  # to parse an expression, and again to compare; uses a signal, so main thread only


def read_math(text: str) -> list:
    r"""What math-verify parses from `text` in MATH_SECONDS, else nothing; `\$` is money."""
    import math_verify

    # it reports each answer that it cannot read
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    text = text.replace(r"\$", "")
    marked = any(mark in text for mark in ("$", r"\(", r"\[", r"\boxed"))
    return math_verify.parse(text if marked else f"${text}$", parsing_timeout=MATH_SECONDS)


@functools.lru_cache(1024)
def read_gold(text: str) -> list:
    """`read_math` of a right answer, once for all answers to a question."""
    from sympy.core.cache import clear_cache

    clear_cache()  # it grows without limit
    return read_math(text)


def math_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if math-verify finds the marked answer equal to `ground_truth`; ValueError if it can't
    parse it.
    """
    import math_verify

    answer = marked_answer(solution_str)
    if not answer or len(answer) > MAX_LENGTH or not may_hold(answer):
        return 0.0
    gc.disable()  # a timeout that is raised inside jax's callback for a collection would be lost
    try:
        if not (gold := read_gold(ground_truth)):
            raise ValueError(f"math-verify cannot read ground_truth {ground_truth!r}")
        return float(math_verify.verify(gold, read_math(answer), timeout_seconds=MATH_SECONDS))
    finally:
        gc.enable()


GRADERS = {
    "gsm8k": number_score,
    "math_reasoning": number_score,
    "math": math_score,
    "code": code_grading.compute_score,
    "code_generation": code_grading.compute_score,
    "qa": text_score,
    "trivia": text_score,
    "classification": label_score,
}
NEEDED = {
    number_score: "one number",
    math_score: "what math-verify can read, and finds equal to itself",
    text_score: "a text, or a list of texts",
    label_score: "one label",
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """Grades what the model wrote by its task, from 0.0 to 1.0; see the table at the top.

    ValueError for a data_source that isn't in GRADERS, or a ground truth that can't be parsed.
    """
    if data_source not in GRADERS:
        raise ValueError(unknown_data_source(data_source))
    grader = GRADERS[data_source]
    return grader(
        solution_str, ground_truth, *[extra_info] * (grader is code_grading.compute_score)
    )


def unknown_data_source(data_source: str) -> str:
    """The message for a data_source that `compute_score` doesn't know."""
    return (
        f"data_source {data_source!r} is none that compute_score knows ({', '.join(GRADERS)}); "
        "rename it, or give REWARD_FUNC a file with a compute_score of your own"
    )


def same_answer(data_source: str, answer: str, ground_truth: str) -> bool:
    """Whether `answer` equals `ground_truth`, by the data_source's own comparison."""
    with contextlib.suppress(ValueError):  # math-verify cannot read it
        return compute_score(data_source, f"<answer>{answer}</answer>", ground_truth) == 1
    return False


def ground_truth_fault(data_source: str, ground_truth: str, extra_info: str = "") -> str | None:
    """Why `ground_truth` as the answer isn't rewarded, or None; for code, why its tests grade
    nothing.
    """
    grader = GRADERS.get(data_source)
    if grader is code_grading.compute_score:
        try:
            code_grading.readable_tests(ground_truth, json.loads(extra_info or "null"))
        except ValueError as error:
            return str(error)
    if grader not in NEEDED:
        return None
    answers = aliases(ground_truth) if grader is text_score else [ground_truth]
    several = grader is label_score and aliases(ground_truth) != answers
    if answers and not several and all(same_answer(data_source, a, ground_truth) for a in answers):
        return None
    needed = f"data_source {data_source!r} needs {NEEDED[grader]}"
    return f"ground_truth {ground_truth!r:.60} is not paid when it is given as the answer; {needed}"
