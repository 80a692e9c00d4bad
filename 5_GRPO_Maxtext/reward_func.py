r"""The rewards of the GRPO run: four functions that look at an answer and give it points.

GRPO needs no reward model: a program grades each of the G answers to a question, and the answers
of one group are compared with each other. The prompt asks for

    <reasoning>16 - 3 - 4 = 9 eggs, 9 * 2 = 18</reasoning><answer>18</answer>

| reward function              | what it looks at                            | points       |
|------------------------------|---------------------------------------------|--------------|
| `match_format_exactly`       | the whole completion has the form above     | 3.0, else 0  |
| `match_format_approximately` | each of the four tags: exactly once, or not | +0.5 or -0.5 |
| `check_answer`               | the right number                            | 3.0          |
|                              | the same text, but for whitespace around it | 1.5          |
|                              | off by at most 10 %, at most 20 %           | 0.5, 0.25    |
|                              | any other answer                            | -1.0         |
|                              | no <answer>...</answer> pair                | 0            |
| `check_numbers`              | the right number, however it is written     | 1.5, else 0  |

A perfect answer earns 3.0 + 4 * 0.5 + 3.0 + 1.5 = 9.5. The points are the course's: Tunix's
GSM8K demo, plus the whitespace row. The grading is not: a policy finds whatever a grader gets
wrong, so here it is
  * exact: with floats, 18.00000000000000001 would be 18;
  * unwilling to guess: "5 boxes of 12" is no answer, though one of its numbers is right;
  * linear in the length of the completion: 100 kB of commas must not stop the training.

Your own reward is a function like the one below, in a file of your own (REWARD_FUNC=my_reward.py
REWARDS=check_answer,short_is_good; examples/my_reward.py shows more). Tunix passes everything by
keyword: `prompts`, `completions` and each further column of the data (`question`, `answer`,
`data_source`, `extra_info` ...), all lists of one length. Return one finite float for each completion.

    def short_is_good(prompts, completions, **kwargs):
        return [0.5 if len(completion) < 500 else 0.0 for completion in completions]
"""

import functools
import re
from fractions import Fraction

REASONING_START = "<reasoning>"
REASONING_END = "</reasoning>"
SOLUTION_START = "<answer>"
SOLUTION_END = "</answer>"
TAGS = (REASONING_START, REASONING_END, SOLUTION_START, SOLUTION_END)

POINTS_FORMAT = 3.0
POINTS_TAG = 0.5  # for a tag that is there exactly once; minus as much for any other count
POINTS_RIGHT = 3.0
POINTS_WHITESPACE = 1.5  # right, but " 18 " where "18" was asked for
POINTS_CLOSE = (("0.1", 0.5), ("0.2", 0.25))  # (relative error up to, points), the closest first
POINTS_WRONG = -1.0
POINTS_NUMBER = 1.5

MAX_LENGTH = 4300  # of an answer; also the most digits that int(), which is quadratic, takes
MAX_EXPONENT = 308  # where a double ends; "1e999999999", 11 characters, would be a 400 MB integer

# ---------------------------------------------------------------- reading one number

_PLAIN = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}  # full-width to ASCII
_PLAIN |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-")  # minus, en dash
_PLAIN |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"))  # zero width

_DIGIT_SPACE = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3})")  # narrow or no-break

_NUMBER = re.compile(
    r"""(?P<sign> ^[-+]\s*+ | [-+] )?                         # "- 5" only at the very start
        (?: (?: [A-Z]{0,2}[$€£¥₹] | USD | EUR | GBP | Rs\.? ) \s? )?
        (?P<value> (?: (?!0)\d{1,3}(?:,\d{3})+(?!\d) | \d+ )  # 1,080 or 1080; of "1,00" just the 1
                   (?: \.\d* )?
                 | (?<![\w.])\.\d+ )                          # .5, but in "No.5" it is a full stop
        (?: [eE](?P<exponent>[-+]?\d+) )?
        (?: [ ]?/[ ]?(?P<denominator>\d+) )?""",
    re.VERBOSE,
)
_POWER_OF_UNIT = re.compile(r"(?<![A-Za-z])(?:[ckm]?m|ft|in|yd|mi)\^?[23²³](?!\w|[.,/:]\d)")  # m^2

# What makes it another number, or none: "x5", "--5", "< 5" before it; "5k", "2x", "5-", "5 + tax"
# after it; "minus five", "2 million" on either side.
_SPOILT_BEFORE = re.compile(r"(?:[A-Za-z_]|[-+/^<>≤≥≠±√×÷]\s*)\Z")
_SPOILT_AFTER = re.compile(r"\A(?:\s?[kKMBx]\b|-(?![A-Za-z]))|[=+^<>±×÷√π;]")
_SPOILT_WORDS = re.compile(
    r"\b(?:minus|negative|half|dozen|hundred|thousand|million|billion|trillion|pi)s?\b", re.I
)


def parse_number(text: str) -> Fraction | None:
    """The exact value of the one number in `text` (str); None if there is none, or any doubt.

    Reads "1,080", "$18.00", "-$5", "1/2", "1.8E+1", "18 apples", "x = 18", "The answer is 18." and
    "50%" (as 50). Refuses two numbers, wrong grouping ("1,5", "1,00"), a time ("10:30"), "0x12",
    "2 million", "1/0", exponents beyond MAX_EXPONENT, and texts that, stripped, are longer than
    MAX_LENGTH.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    text = _DIGIT_SPACE.sub(",", text.translate(_PLAIN).strip())
    number = _NUMBER.search(text)
    if number is None:
        return None
    before, after = text[: number.start()], _POWER_OF_UNIT.sub("", text[number.end() :])
    if _SPOILT_BEFORE.search(before) or _SPOILT_AFTER.search(after):
        return None
    rest = before + " " + after
    # Wider than isdigit(): the ½ of "7½" and the 萬 (10,000) of "2萬" are further numbers, too.
    if any(map(str.isnumeric, rest)) or _SPOILT_WORDS.search(rest):
        return None

    exponent, denominator = int(number["exponent"] or 0), int(number["denominator"] or 1)
    if abs(exponent) > MAX_EXPONENT or denominator == 0:
        return None
    value = Fraction(number["value"].replace(",", "")) * Fraction(10) ** exponent / denominator
    return -value if (number["sign"] or "").startswith("-") else value


# ---------------------------------------------------------------- finding and grading the answer


def extract_answer(completion: str) -> str | None:
    """The text, not stripped, in the last complete answer pair of `completion` (str), or None.

    The last, for a model that corrects itself means its last word. An <answer> inside another one
    starts anew, so that a tag named in the prose ("I will use <answer> tags") captures nothing.
    """
    # From the right, since "<answer><answer>..." takes a lazy regex quadratic time.
    before, _, _ = completion.rpartition(SOLUTION_END)
    _, opened, text = before.rpartition(SOLUTION_START)
    return text.partition(SOLUTION_END)[0] if opened else None


def extract_hash_answer(answer: str) -> str | None:
    """GSM8K's gold: the stripped text after the last "####" of `answer` (str), a whole solution.

    Returns None where the marker or a number after it is missing; "1,080" keeps its comma.
    """
    _, marker, gold = answer.rpartition("####")
    return gold.strip() if marker and parse_number(gold) is not None else None


def is_close(completion: str, gold: str, ratio: float | str) -> bool:
    """Whether answer / gold lies between 1 - ratio and 1 + ratio, both included.

    Args:
        completion (str): what the model wrote; its last answer pair counts.
        gold (str): the right number as plain text: "18", "1,080", "$18.00".
        ratio (float or str): 0.1 or "0.1" is one tenth exactly, not the float next to it.

    Returns:
        bool; False where either cannot be read. Only 0 is close to a gold of 0.
    """
    guess, target = parse_number(extract_answer(completion) or ""), parse_number(gold)
    if guess is None or target is None:
        return False
    return abs(guess - target) <= Fraction(str(ratio)) * abs(target)  # no division: gold may be 0


def grade(completion: str, gold: str) -> bool:
    """Whether the last tagged answer is exactly the gold number; never so for texts like "nan".

    Args and return as in `is_close`.
    """
    return is_close(completion, gold, 0)


@functools.cache
def _form(tags: tuple[str, str, str, str]) -> re.Pattern:
    # format_ok has counted the tags before this runs: each lazy group has one place to stop, no other.
    return re.compile(
        r"\s*{}(.*?){}\s*{}(.*?){}\s*".format(*tags)
        + r"(?:<\|\w+\|>\s*)*",  # <|eot_id|>: samplers may leave stop and padding tokens in the text
        re.DOTALL,
    )


def format_ok(completion: str, tags: tuple[str, str, str, str] = TAGS) -> bool:
    """Whether `completion` (str) is one reasoning block, one answer block, neither empty, no more.

    Whitespace around the blocks and stop tokens like <|eot_id|> at the end do no harm. `tags` open and
    close the two blocks.
    """
    if any(completion.count(tag) != 1 for tag in tags):
        return False
    form = _form(tags).fullmatch(completion)
    return form is not None and all(block.strip() for block in form.groups())


# ---------------------------------------------------------------- the four rewards
# Each takes prompts, completions and answer (list[str], or a numpy array of str), returns
# list[float], and raises ValueError where completions and answer differ in length: a plain zip
# would quietly drop the last answers.


def match_format_exactly(prompts, completions, **kwargs) -> list[float]:
    """POINTS_FORMAT if `format_ok`, else 0."""
    return [POINTS_FORMAT if format_ok(completion) else 0.0 for completion in completions]


def match_format_approximately(prompts, completions, **kwargs) -> list[float]:
    """For each tag POINTS_TAG if it is there exactly once, else minus that: a slope to learn on."""

    def points(completion: str) -> float:
        return sum(POINTS_TAG if completion.count(tag) == 1 else -POINTS_TAG for tag in TAGS)

    return [points(completion) for completion in completions]


def check_answer(prompts, completions, answer, **kwargs) -> list[float]:
    """Points for the answer itself, by the table on top; `answer` holds the gold numbers."""

    def points(completion: str, gold: str) -> float:
        text = extract_answer(completion)
        if text is None:  # more than for a wrong answer; yet without the pair 5.0 of form are lost
            return 0.0
        if grade(completion, gold):
            only_whitespace = text != gold and text.strip() == gold.strip()
            return POINTS_WHITESPACE if only_whitespace else POINTS_RIGHT
        return next((p for r, p in POINTS_CLOSE if is_close(completion, gold, r)), POINTS_WRONG)

    return [points(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def check_numbers(prompts, completions, answer, **kwargs) -> list[float]:
    """POINTS_NUMBER if `grade`, else 0: " 18 " and "$18.00" earn it as "18" does."""
    pairs = zip(completions, answer, strict=True)
    return [POINTS_NUMBER if grade(completion, gold) else 0.0 for completion, gold in pairs]
