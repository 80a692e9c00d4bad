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
|                       | without case, a, an, the, and the punctuation of prose; O+ isn't O-      |
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


_SPELLED = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-") | {
    0x2044: "/",
    0x2032: "'",
}
_POWER = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]++(?![⁺⁻])")  # not the charge of Ca²⁺
_MIXED = re.compile("(?<=[0-9])(?=[¼½¾⅐-⅞])")  # of 2½, which NFKC makes 21/2
_MARKED = re.compile(  # *emphasis*, "a quotation", `code`
    r"""(?<![\w*`"'])(?:(\*{1,3}|_{1,2}|["'])(?!\s)([^*_"']+)(?<!\s)\1|`([^`]+)`)(?![\w*`"'])"""
)
_LAST_CALL = re.compile(r"(?<![\d)!])(?<!\b[a-z])!+$")  # not the factorial of 5! and n!
_QUOTES = "\"'“”„‘’«»「」『』"
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# "(1, 2)" isn't "[1, 2]"
_LIST = re.compile(r"\d\s*[,;]")
# The signs that only punctuate prose, each where it does. Every other sign is part of the answer:
# O+, < 5, 3^2, 2*3, x_1, 5!, 3.5, 10:30, f(x), 5'.
_PROSE = re.compile(
    r"""[;?¿¡…。、“”„‘«»「」『』] | (?<![\d)]) (?<!\b[a-z]) !
    | ,(?!\d) | (?<!\d), | (?<=\d),(?=\d{3}(?!\d))             # of 1,000, but not of 1,2
    | \.(?!\d) | (?<=[^\W\d])\. | :(?!\S) | (?<!\S): | (?<=[^\W\d]{2}):
    | (?<=[^\W\d]{2})-(?=[^\W\d]) | (?<=[^\W\d])-(?=[^\W\d]{2})  # self-made, but not x-y
    | (?:\A|(?<=[^\W\d]{2}\s)) - (?=\s+[^\W\d]{2})              # Paris - France
    | (?<![\d)]) (?<!\b[a-z]) ["'’] | ["'’](?=\w)              # a prime follows 5' and f'
    """,
    re.VERBOSE,
)
_INNER = re.compile(  # a remark in brackets, which touch no word or sign outside of them
    r"(?<![\w^)\]}])(?:\(([^()\[\]{}]*)\)|\[([^()\[\]{}]*)\]|\{([^()\[\]{}]*)\})(?![\w^*/(\[{+=!-])"
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\s+(?=\w)")  # not the A of "vitamin A"


def unwrapped(text: str) -> str:
    """`text` in lower case and single spaces, without what only wraps it: quotes, brackets, stars,
    a full stop.

    Unicode's other spellings become one (NFKC), but x² becomes x^2 and 2½ becomes 2 1/2.
    """
    text = _POWER.sub(lambda power: "^" + power[0], _MIXED.sub(" ", text.replace("″", '"')))
    text = unicodedata.normalize("NFKC", text).casefold().translate(_SPELLED)
    text = " ".join(text.split())
    for _ in range(4):  # "**(x)**."
        text = _LAST_CALL.sub("", text.rstrip(".,;:?…。、 "))
        text = _MARKED.sub(lambda match: match[2] or match[3], text)
        if text[:1] and text[0] in _QUOTES:
            text = text.strip(_QUOTES)
        closed = _PAIRS.get(text[:1])
        if closed and text.endswith(closed) and not set(text[1:-1]) & set("()[]{}"):
            text = text if _LIST.search(text) else text[1:-1]
    return text


def normalize_text(text: str) -> str:
    """SQuAD's normalization (arXiv 1606.05250): lower case, no punctuation, no articles, single
    spaces.

    Unlike SQuAD, it only drops the signs of prose (_PROSE), and keeps answers that would become
    empty, such as "A" and "?". Text longer than MAX_LENGTH isn't a short answer and becomes empty,
    because normalizing a long run of combining marks takes quadratic time.
    """
    if len(text) > MAX_LENGTH:
        return ""

    def content(match):
        inside = match[match.lastindex] if match.lastindex else ""
        return match[0] if _LIST.search(inside) else inside

    whole = unwrapped(text)
    bare = _INNER.sub(content, whole)
    for opening, closing in _PAIRS.items():
        if opening not in bare:  # that of "B)"
            bare = bare.replace(closing, "")
    bare = _ARTICLES.sub("", " ".join(_PROSE.sub("", bare).split()))
    return bare or whole or " ".join(text.split())


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

    Ignores what `unwrapped` takes off, but not signs such as in -1, C#, A+ and <5.
    """
    label = unwrapped(final_answer(solution_str)[:MAX_LENGTH])
    return float(label == unwrapped(ground_truth) != "")


def may_hold(equation: str) -> bool:
    """False for "17 = 18", where math-verify would take the last side as the answer."""
    values = set(map(arithmetic, equation.split("="))) if len(equation) <= MAX_EQUATION else set()
    return len(values) < 2 or None in values


# What math-verify skips, so two texts have to agree in it: the base of 4210_5, a relation without a
# left side, a prime, dots, an operator without operands, words that multiply, a second sentence.
_SKIPPED = re.compile(
    r"""(?P<base>(?<=\d)_\{?\w+) | (?P<relation>\A\s*(?:[<>≠≈≤≥~¬]|\\(?:n?eq?|not|approx|sim|simeq
    |cong|equiv|neg|[gl](?:eq?|t)?q?(?:slant)?)(?![a-z]))) | (?P<prime>'+)
    | (?P<dots>\\[lc]?dots|\.\.\.|…) | (?P<operator>\\(?:lim|sum|prod|int|neg|not)(?![a-z]))
    | \b(?P<words>\w*illions?|thousand|hundred|dozens?|grand|gross|lakh|crore|hal(?:f|ves)|twice
    |double|triple|minus|negative|or\ (?:more|less|so)|at\ (?:least|most)|base|no|not|never)\b
    | (?P<sentence>\? | [.!]\s+(?=[A-Za-z]))""",
    re.IGNORECASE | re.VERBOSE,
)
# May be left out, but not exchanged: the unit after a number, and the bracket around a list.
_UNIT = re.compile(
    r"\A(?:[^A-Za-z+\\]|\\[dt]?frac|\\sqrt|\\pi|\\left|\\right)+(?:\\(?:text|mathrm|mbox)\{\s*)?"
    r"(\^\{?\\circ|\\?%|°|[cmk]?m|[mk]?g|m?[lL]|in|ft|yd|mi|h|min|s)[\s}.^23²³]*\Z"
)
_BRACKET = re.compile(r"\A\s*(?:\\left)?(\\\{|[(\[])(?=.*,)")
# what only names the right side of an equation: x = , f(x) = , a_1 =
_NAME = re.compile(
    r"(\A|[,;$]|\b(?:or|and)\b\s*\}?)"
    r"\s*(?!\\n(?:ot|eg)\b)(?:\\?[A-Za-z]{1,20}\s*){1,2}(?:_\{?\w+\}?)?'*(?:\([a-z]\))?\s*=(?!=)"
)


def skipped(text: str) -> dict[str, list[str]]:
    """What math-verify skips in a text, by kind."""
    found: dict[str, list[str]] = {}
    for match in _SKIPPED.finditer(text):
        found.setdefault(match.lastgroup, []).append(match[0].replace("{", "").strip().lower())
    return found


def sides_to_check(answer: str, gold: str) -> list[str]:
    """The texts that all have to equal `gold`: the answer without names (x = 5), or the sides of
    its equation (6 * 4 = 24) if `gold` is none. Empty if what math-verify skips differs.
    """
    answer, gold = (_NAME.sub(r"\1 ", text.replace(r"\$", "")) for text in (answer, gold))
    for mark in (_UNIT, _BRACKET):
        marks = {match[1].strip("\\^{") for text in (answer, gold) if (match := mark.search(text))}
        if len(marks) > 1:
            return []
    if skipped(answer) != skipped(gold) or not may_hold(answer):
        return []
    if "=" not in answer or "=" in gold:
        return [answer]
    return answer.split("=") if len(answer) <= MAX_EQUATION else []


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
    if not answer or len(answer) > MAX_LENGTH:
        return 0.0
    sides = sides_to_check(answer, ground_truth)
    gc.disable()  # a timeout that is raised inside jax's callback for a collection would be lost
    try:
        if not (gold := read_gold(ground_truth)):
            raise ValueError(f"math-verify cannot read ground_truth {ground_truth!r}")
        equal = functools.partial(math_verify.verify, gold, timeout_seconds=MATH_SECONDS)
        return float(bool(sides) and all(equal(read_math(side)) for side in sides))
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
