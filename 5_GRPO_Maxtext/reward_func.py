"""The rewards of the GRPO run: four functions that score a completion.

GRPO needs no reward model. A program grades each of the G answers to a question, and GRPO compares
the answers of a group with each other. The prompt asks for

    <reasoning>16 - 3 - 4 = 9 eggs, 9 * 2 = 18</reasoning><answer>18</answer>

| reward function              | what it looks at                            | points       |
|------------------------------|---------------------------------------------|--------------|
| `match_format_exactly`       | the whole completion has the format above   | 3.0, else 0  |
| `match_format_approximately` | each of the four tags: exactly once, or not | +0.5 or -0.5 |
| `check_answer`               | the right number                            | 3.0          |
|                              | the same text except for whitespace         | 1.5          |
|                              | off by at most 10 %, at most 20 %           | 0.5, 0.25    |
|                              | any other answer                            | -1.0         |
|                              | no <answer>...</answer> pair                | 0            |
| `check_numbers`              | the right number, however it's written      | 1.5, else 0  |

Every function of this file is a reward: without REWARDS, a run adds them all up. If you add a
helper, begin its name with an underscore.

A perfect completion earns 3.0 + 4 * 0.5 + 3.0 + 1.5 = 9.5 points. The points are those of Tunix's
GSM8K demo, plus the row for whitespace. task/grading.py reads and compares the numbers.

To use your own reward, put a function like the one below in a file and run with
REWARD_FUNC=my_reward.py REWARDS=check_answer,short_is_good (examples/my_reward.py shows more).
Tunix passes everything by keyword: `prompts`, `completions` and every other column of the data
(`question`, `answer`, `data_source`, `extra_info` ...), all lists of the same length. Return one
finite float per completion.

    def short_is_good(prompts, completions, **kwargs):
        return [0.5 if len(completion) < 500 else 0.0 for completion in completions]
"""

from task.grading import TAGS, extract_answer, format_ok, grade, is_close

POINTS_FORMAT = 3.0
POINTS_TAG = 0.5  # for a tag that occurs exactly once; any other count costs as much
POINTS_RIGHT = 3.0
POINTS_WHITESPACE = 1.5  # right, but " 18 " instead of "18"
POINTS_CLOSE = (("0.1", 0.5), ("0.2", 0.25))  # (largest relative error, points), the closest first
POINTS_WRONG = -1.0
POINTS_NUMBER = 1.5

# Each reward takes `prompts`, `completions` and `answer` (lists or arrays of str) by keyword. It
# raises ValueError if there aren't as many answers as completions; a plain zip would silently drop
# the last ones.


def match_format_exactly(prompts, completions, **kwargs) -> list[float]:
    """POINTS_FORMAT if `format_ok`, else 0."""
    return [POINTS_FORMAT if format_ok(completion) else 0.0 for completion in completions]


def match_format_approximately(prompts, completions, **kwargs) -> list[float]:
    """Partial credit: per tag, POINTS_TAG if it occurs exactly once, else minus POINTS_TAG."""
    return [
        sum(POINTS_TAG if text.count(tag) == 1 else -POINTS_TAG for tag in TAGS)
        for text in completions
    ]


def check_answer(prompts, completions, answer, **kwargs) -> list[float]:
    """Grades the answer itself by the table above; `answer` holds the gold numbers."""

    def points(completion: str, gold: str) -> float:
        text = extract_answer(completion)
        # more than a wrong answer gets, but the missing pair costs 5.0 format points
        if text is None:
            return 0.0
        if grade(completion, gold):
            only_whitespace = text != gold and text.strip() == gold.strip()
            return POINTS_WHITESPACE if only_whitespace else POINTS_RIGHT
        return next((p for r, p in POINTS_CLOSE if is_close(completion, gold, r)), POINTS_WRONG)

    return [points(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def check_numbers(prompts, completions, answer, **kwargs) -> list[float]:
    """POINTS_NUMBER if `grade`, else 0: "18", " 18 " and "$18.00" all earn it."""
    pairs = zip(completions, answer, strict=True)
    return [POINTS_NUMBER if grade(completion, gold) else 0.0 for completion, gold in pairs]
