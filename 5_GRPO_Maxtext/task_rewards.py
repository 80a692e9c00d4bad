r"""Rewards by task: `compute_score` grades by a question's `data_source`; four rewards for <think> answers.

`compute_score(data_source, solution_str, ground_truth, extra_info=None)` gives 1.0 to a right answer, 0.0 to
any other (tests of code: the share that passes, as code_reward.py counts it):

| data_source              | right is                                                                     |
|--------------------------|------------------------------------------------------------------------------|
| gsm8k, math_reasoning    | the number, compared exactly: "1,000", "$1000.00" and "1000" are one          |
| math                     | an equal expression, by math-verify: \frac{1}{2} is 0.5, and 3*4 is 12        |
| code, code_generation    | code that passes the tests in `ground_truth` (code_reward.py)                 |
| qa, trivia               | the text, or one of a JSON list of texts, as SQuAD compares: without case,    |
|                          | punctuation, and a, an, the                                                   |
| classification           | the label, without case and surrounding punctuation                           |

What is graded is the last <answer>...</answer>, else the last \boxed{...}, else what follows the last "####";
without any of these the whole text, which then has to be the answer and nothing else.

The think-tag rewards look at <think>...</think><answer>...</answer>:

| reward function      | what it looks at                                              | points    |
|----------------------|---------------------------------------------------------------|-----------|
| `correctness_reward` | the right number; the same text where the answer is no number | 2.0       |
| `digit_reward`       | the answer is one number: "-3", "1,000", "2.5" are            | 0.5       |
| `hard_format_reward` | one <think>, one <answer> block, nothing else; any line breaks | 0.5       |
| `mark_reward`        | each of the four tags that is there exactly once              | 4 x 0.125 |

Your own: a file with `compute_score` as above (REWARD_FUNC=my_reward.py), or with functions as reward_func.py
has them, named in REWARDS. examples/my_reward.py shows both.
"""

import functools
import importlib.util
import inspect
import json
import numbers
import re
import string
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import reward_func
from reward_func import extract_answer, format_ok, grade, parse_number

Reward = Callable[..., list[float]]

THINK_TAGS = ("<think>", "</think>", reward_func.SOLUTION_START, reward_func.SOLUTION_END)
POINTS_CORRECT = 2.0
POINTS_DIGIT = 0.5
POINTS_HARD_FORMAT = 0.5
POINTS_MARK = 0.125  # for each tag that is there exactly once

COURSE_REWARDS = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
THINK_REWARDS = ("correctness_reward", "digit_reward", "hard_format_reward", "mark_reward")

# %% Finding the answer ----------------------------------------------------------------------------------
_STOP_TOKENS = re.compile(r"(?:\s*<\|\w+\|>)+\s*\Z")  # samplers may leave them in the text


def marked_answer(text: str) -> str | None:
    r"""The stripped answer that `text` marks: <answer>, else \boxed{}, else ####; None without a mark."""
    answer = extract_answer(text)
    if answer is None:
        answer = boxed(text)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].strip().partition("\n")[0]
        answer = _STOP_TOKENS.sub("", answer)
    return answer if answer is None else answer.strip()


def final_answer(text: str) -> str:
    """`marked_answer`, or the whole stripped text where nothing is marked."""
    answer = marked_answer(text)
    return _STOP_TOKENS.sub("", text).strip() if answer is None else answer


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of `text`, inner braces matched; None without a closed one."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for i, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i]
    return None


# %% One grader a task -----------------------------------------------------------------------------------
def number_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is exactly the number `ground_truth`, else 0.0."""
    gold = parse_number(ground_truth)
    return float(gold is not None and parse_number(final_answer(solution_str)) == gold)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_text(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(c for c in text if not (unicodedata.category(c)[0] == "P" or c in string.punctuation))
    return " ".join(_ARTICLES.sub(" ", text).split())


def text_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is `ground_truth`, or one of the texts of a JSON list, in their normal form."""
    answer = normalize_text(final_answer(solution_str))
    return float(bool(answer) and answer in map(normalize_text, aliases(ground_truth)))


def aliases(ground_truth: str) -> list[str]:
    """The right texts: `ground_truth`, or the items of the JSON list that it is."""
    try:
        items = json.loads(ground_truth)
    except ValueError:
        items = None
    return list(map(str, items)) if isinstance(items, list) else [ground_truth]


def label_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is the label and nothing else; an answer that names two labels is none."""

    def normal(label):
        return " ".join(label.casefold().split()).strip(string.punctuation + "“”‘’。「」 ")

    return float(normal(final_answer(solution_str)) == normal(ground_truth) != "")


def math_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if math-verify finds the marked answer equal to `ground_truth`, else 0.0.

    Raises:
        ValueError: math-verify cannot read `ground_truth`: no answer would ever be right.
    """
    answer = marked_answer(solution_str)
    if not answer or len(answer) > reward_func.MAX_LENGTH:
        return 0.0
    equal = ask_math_verify(ground_truth, answer)
    if equal is None:
        raise ValueError(f"math-verify cannot read ground_truth {ground_truth!r}")
    return float(equal)


def code_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    """The share of the tests in `ground_truth` that the answer's code passes; see code_reward.py."""
    import code_reward  # only then: it looks for bubblewrap

    return code_reward.compute_score(solution_str, ground_truth, extra_info)


GRADERS = {
    "gsm8k": number_score, "math_reasoning": number_score, "math": math_score,
    "code": code_score, "code_generation": code_score, "qa": text_score, "trivia": text_score,
    "classification": label_score,
}  # fmt: skip


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """Grades one answer by its task, from 0.0 to 1.0; see the table on top.

    Args:
        data_source: a key of GRADERS.
        solution_str: what the model wrote.
        ground_truth: the right answer.
        extra_info: the row's `extra_info`, if it has any.

    Raises:
        ValueError: an unknown data_source (lists the known), a ground truth that cannot be read.
    """
    if data_source not in GRADERS:
        raise ValueError(unknown_data_source(data_source))
    grader = GRADERS[data_source]
    if grader is code_score:
        return grader(solution_str, ground_truth, extra_info)
    return grader(solution_str, ground_truth)


def unknown_data_source(data_source: str) -> str:
    """The message for a data_source that `compute_score` does not know."""
    return (
        f"data_source {data_source!r} is none that compute_score knows ({', '.join(GRADERS)}); rename it, or "
        "give REWARD_FUNC a file with a compute_score of your own"
    )


def ground_truth_fault(data_source: str, ground_truth: str) -> str | None:
    """Why no answer could ever be right, or None."""
    if GRADERS.get(data_source) is number_score and parse_number(ground_truth) is None:
        return f"ground_truth {ground_truth!r:.60} is not one number, as data_source {data_source!r} needs it"
    return None


# %% math-verify, in a process of its own ----------------------------------------------------------------
# A policy can write 9^{9^{9^9}}. math-verify's own time limit is a Unix signal: it cannot be set in the
# thread in which Tunix calls a reward, and would not end one long multiplication. So a child process does the
# work, and the alarm that it sets simply kills it.
MATH_SECONDS = 3  # for one answer
MATH_BYTES = 2 * 2**30  # address space of the child
_MATH_CHILD = """
import json, logging, resource, signal, sys
from math_verify import parse, verify
logging.disable()
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
def read(text):  # LaTeX is read only between its own marks
    marked = any(mark in text for mark in ("$", "\\\\(", "\\\\[", "\\\\boxed"))
    return parse(text if marked else f"${text}$", parsing_timeout=None)
for line in sys.stdin:
    gold, answer = json.loads(line)
    signal.alarm(int(sys.argv[1]))
    try:
        gold = read(gold)
        equal = bool(verify(gold, read(answer), timeout_seconds=None)) if gold else None
    except (Exception, MemoryError):
        equal = False
    signal.alarm(0)
    print(json.dumps(equal), flush=True)
"""
_math_child: subprocess.Popen | None = None
_math_lock = threading.Lock()


def ask_math_verify(gold: str, answer: str) -> bool | None:
    """Whether math-verify calls two expressions equal; None if it cannot read `gold`.

    False, too, where the comparison takes more than MATH_SECONDS or MATH_BYTES.
    """
    global _math_child
    with _math_lock:
        if _math_child is None or _math_child.poll() is not None:
            _math_child = subprocess.Popen(
                [sys.executable, "-c", _MATH_CHILD, str(MATH_SECONDS), str(MATH_BYTES)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,  # Ctrl-C ends the training after its step: this child is still needed
            )  # fmt: skip
        try:
            _math_child.stdin.write(json.dumps([gold, answer]) + "\n")
            _math_child.stdin.flush()
            reply = _math_child.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:  # the alarm, or the memory limit
            _math_child.kill()
            _math_child.communicate()
            return False
        return json.loads(reply)


# %% The four rewards for <think> answers ----------------------------------------------------------------
# Arguments, return and errors as in reward_func.py.


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    """POINTS_CORRECT for the right number, or the right text where the ground truth is no number."""

    def right(completion: str, gold: str) -> bool:
        if parse_number(gold) is not None:
            return grade(completion, gold)
        text = extract_answer(completion)
        return text is not None and text.strip() == gold.strip()

    pairs = zip(completions, answer, strict=True)
    return [POINTS_CORRECT if right(completion, gold) else 0.0 for completion, gold in pairs]


def digit_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_DIGIT if the answer is one number, right or wrong; "-3" and "1,000" are numbers."""
    numbers_given = [parse_number(extract_answer(completion) or "") for completion in completions]
    return [0.0 if number is None else POINTS_DIGIT for number in numbers_given]


def hard_format_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_HARD_FORMAT for one think block, one answer block, neither empty, no more."""
    return [POINTS_HARD_FORMAT if format_ok(completion, THINK_TAGS) else 0.0 for completion in completions]


def mark_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_MARK for each of the four tags that is there exactly once: a slope to learn on."""
    return [POINTS_MARK * sum(completion.count(tag) == 1 for tag in THINK_TAGS) for completion in completions]


# %% Which rewards a run uses ----------------------------------------------------------------------------
@functools.cache
def load_file(path: Path) -> ModuleType:
    """Runs a file of rewards, once a process, and gives its module.

    Raises:
        ValueError: no such file, or one that does not run.
    """
    spec = importlib.util.spec_from_file_location("own_rewards", path)
    if spec is None or not path.is_file():
        raise ValueError(f"REWARD_FUNC={path}: not a Python file; give the path of one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(f"REWARD_FUNC={path}: {type(error).__name__}: {reason}; mend it") from error
    return module


@functools.cache
def by_row(score: Callable[..., float]) -> Reward:
    """Tunix's form of a `compute_score`: lists in, list out.

    The same answer to the same question is scored once: a step's log asks for it again, and running code or
    asking math-verify twice would take twice as long.
    """

    @functools.lru_cache(maxsize=8192)
    def score_once(data_source: str, solution_str: str, ground_truth: str, extra_info: str) -> float:
        value = score(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth,
            extra_info=json.loads(extra_info) if extra_info else None,
        )  # fmt: skip
        if not isinstance(value, numbers.Real):
            raise TypeError(f"returned {value!r:.60} for data_source {data_source!r}, not a number")
        return float(value)

    def compute_score(prompts, completions, answer, data_source, extra_info, **kwargs) -> list[float]:
        rows = zip(data_source, completions, answer, extra_info, strict=True)
        return [score_once(*map(str, row)) for row in rows]  # str: columns come as NumPy's own strings

    return compute_score


def find_reward(name: str, path: Path | None) -> Reward:
    """The reward function of that name: from the file in `path`, else from reward_func.py or from here.

    Raises:
        ValueError: there is none (lists the names there are), or compute_score takes other arguments.
    """
    known = [*COURSE_REWARDS, *THINK_REWARDS, "compute_score"]
    own = load_file(path) if path else None
    if own is not None and hasattr(own, name):
        function = getattr(own, name)
    elif name in known:
        function = getattr(reward_func if name in COURSE_REWARDS else sys.modules[__name__], name)
    else:
        mine = [] if own is None else [n for n, f in vars(own).items() if inspect.isfunction(f)]
        raise ValueError(f"REWARDS: no reward {name!r}; there are {', '.join(dict.fromkeys(mine + known))}")
    if not callable(function):
        raise ValueError(f"REWARDS: {name!r} in {path} is not a function; mend it")
    if name != "compute_score":
        return function
    try:
        inspect.signature(function).bind(data_source="", solution_str="", ground_truth="", extra_info=None)
    except TypeError as error:
        raise ValueError(
            f"REWARD_FUNC={path}: compute_score {error}; it is called with data_source, solution_str, "
            "ground_truth and extra_info"
        ) from None
    return by_row(function)
