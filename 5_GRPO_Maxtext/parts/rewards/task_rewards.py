r"""Rewards by task, rewards for <think> answers, and the `Grader` of a run.

`compute_score(data_source, solution_str, ground_truth, extra_info=None)` gives 1.0 to a right answer and 0.0
to any other (code: the share of the tests that pass, see tools/code_reward.py):

| data_source              | what counts as right                                                         |
|--------------------------|------------------------------------------------------------------------------|
| gsm8k, math_reasoning    | the number, compared exactly: "1,000", "$1000.00" and "1000" are equal       |
| math                     | an equal expression, by math-verify: \frac{1}{2} equals 0.5, 3*4 equals 12   |
| code, code_generation    | code that passes the tests in `ground_truth`                                 |
| qa, trivia               | the text, or one of a JSON list of texts, normalized as in SQuAD: without    |
|                          | case, punctuation, and a, an, the                                            |
| classification           | the label, without case and surrounding punctuation                          |

The last <answer>...</answer> is graded; without one the last \boxed{...}; without that the text after the
last "####". Without any of these the whole text is graded, so it has to be the answer and nothing else.

The rewards for think tags look at <think>...</think><answer>...</answer>:

| reward function      | what it looks at                                               | points    |
|----------------------|----------------------------------------------------------------|-----------|
| `correctness_reward` | the right number; the same text where the answer is no number  | 2.0       |
| `digit_reward`       | the answer is one number, such as "-3", "1,000", "2.5"         | 0.5       |
| `hard_format_reward` | one <think>, one <answer> block, nothing else; any line breaks | 0.5       |
| `mark_reward`        | each of the four tags that occurs exactly once                 | 4 x 0.125 |

Rewards of your own: a file with a `compute_score` as above (REWARD_FUNC=my_reward.py), or with functions as
in reward_func.py, named in REWARDS. examples/my_reward.py shows both.
"""

import dataclasses
import functools
import importlib.util
import inspect
import json
import numbers
import re
import string
import subprocess
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from parts.rewards.grading import (
    MAX_EQUATION,
    MAX_LENGTH,
    SOLUTION_END,
    SOLUTION_START,
    TAGS,
    arithmetic,
    extract_answer,
    format_ok,
    grade,
    grade_lenient,
    parse_number,
)
from parts.settings import UserError, find_path

if TYPE_CHECKING:
    import numpy as np  # imported where used: parts/run/checks.py needs only the names

Reward = Callable[..., list[float]]  # Tunix's form: f(prompts, completions, **columns)

THINK_TAGS = ("<think>", "</think>", SOLUTION_START, SOLUTION_END)
POINTS_CORRECT = 2.0
POINTS_DIGIT = 0.5
POINTS_HARD_FORMAT = 0.5
POINTS_MARK = 0.125  # per tag that occurs exactly once

COURSE_REWARDS = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
WANT_REASONING_TAGS = frozenset({"match_format_exactly", "match_format_approximately"})
WANT_THINK_TAGS = frozenset({"hard_format_reward", "mark_reward"})

MAX_REWARD = 1e15  # either sign: sums and squares of it stay within float32
KEPT_SCORES = 8192  # of `compute_score`; more than the answers of one step


def reward_names(rewards: str) -> list[str]:
    """The names in REWARDS, which are divided by commas; none if it is empty."""
    return [name.strip() for name in rewards.split(",")] if rewards else []


def built_in_rewards(rewards: str) -> str:
    """Those of REWARDS that need no REWARD_FUNC; a `compute_score` named beside one is that file's."""
    return ",".join(name for name in reward_names(rewards) if name in (*COURSE_REWARDS, *THINK_REWARDS))


# %% Finding the answer ----------------------------------------------------------------------------------
BOXED = r"\boxed{"
_STOP_TOKENS = re.compile(r"(?:\s*+>\|\w++\|<)*+\s*+")  # of a text that is read backwards


def without_stop_tokens(text: str) -> str:
    """`text` without the stop tokens, such as <|eot_id|>, and blanks that samplers may leave at its end.

    From the end, because a search for what reaches the end takes quadratic time.
    """
    return text[: len(text) - _STOP_TOKENS.match(text[::-1]).end()]


def marked_answer(text: str) -> str | None:
    r"""The stripped answer in <answer>, else in \boxed{}, else after ####; None if `text` marks none.

    A \boxed{ that is never closed is an empty answer: it was cut off.
    """
    answer = extract_answer(text)
    if answer is None and BOXED in text:
        answer = boxed(text) or ""
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].strip().partition("\n")[0]
        answer = without_stop_tokens(answer)
    return answer if answer is None else answer.strip()


def final_answer(text: str) -> str:
    """`marked_answer`, or the whole stripped text if nothing is marked."""
    answer = marked_answer(text)
    return without_stop_tokens(text).strip() if answer is None else answer


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, inner braces matched; None without a closed one."""
    _, mark, rest = text.rpartition(BOXED)
    depth = 1
    for i, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i]
    return None


# %% One grader per task ---------------------------------------------------------------------------------
def number_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is exactly the number `ground_truth`, else 0.0."""
    gold = parse_number(ground_truth)
    return float(gold is not None and parse_number(final_answer(solution_str)) == gold)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-")
_KEPT = re.compile(  # punctuation without which it is another answer: -5, 3.5, 1/2, 10:30, 2010-2012, C#, C++
    r"(?<![\w)])-(?=\.?\d)|(?<=\d)[-./:](?=\d)|(?<!\w)\.(?=\d)|(?<=\b[a-z])(?:#|\+\+)(?!\w)"
)


def normalize_text(text: str) -> str:
    """SQuAD's normal form (arXiv 1606.05250): lower case, no punctuation, no articles, single spaces.

    Other than there, _KEPT stays. Text longer than MAX_LENGTH, which is no short answer, becomes empty
    (to normalize a long run of combining marks takes quadratic time).
    """
    if len(text) > MAX_LENGTH:
        return ""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_DASHES)
    kept = {i for found in _KEPT.finditer(text) for i in range(*found.span())}
    text = "".join(
        c
        for i, c in enumerate(text)
        if i in kept or not (unicodedata.category(c)[0] == "P" or c in string.punctuation)
    )
    return " ".join(_ARTICLES.sub(" ", text).split())


def text_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the normalized answer is `ground_truth`, or one of its texts where it is a JSON list."""
    answer = normalize_text(final_answer(solution_str))
    return float(bool(answer) and answer in map(normalize_text, aliases(ground_truth)))


def aliases(ground_truth: str) -> list[str]:
    """The right texts: the items of `ground_truth` if it is a JSON list, else itself."""
    try:
        items = json.loads(ground_truth)
    except ValueError:
        items = None
    return list(map(str, items)) if isinstance(items, list) else [ground_truth]


def label_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is the label and nothing else: an answer that names two labels is wrong.

    Quotes, brackets, stars and full stops around it do not count; signs such as those of -1, C# and A+ do.
    """

    def normal(label):
        return " ".join(label.casefold().split()).strip("\"'`.,;:!?()[]{}<>*_“”‘’。「」 ")

    return float(normal(final_answer(solution_str)) == normal(ground_truth) != "")


def may_hold(equation: str) -> bool:
    """False for "17 = 18", of which math-verify would take the last side for the answer."""
    values = set(map(arithmetic, equation.split("="))) if len(equation) <= MAX_EQUATION else set()
    return len(values) < 2 or None in values


def math_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if math-verify finds the marked answer equal to `ground_truth`, else 0.0.

    Raises:
        ValueError: math-verify cannot read `ground_truth`, so no answer could be right.
    """
    answer = marked_answer(solution_str)
    if not answer or len(answer) > MAX_LENGTH or not may_hold(answer):
        return 0.0
    equal = math_verifier.equal(ground_truth, answer)
    if equal is None:
        raise ValueError(f"math-verify cannot read ground_truth {ground_truth!r}")
    return float(equal)


def code_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    """The share of the tests in `ground_truth` that the answer's code passes, from 0.0 to 1.0."""
    from parts.rewards import code_grading  # here: it looks for bubblewrap

    return code_grading.compute_score(solution_str, ground_truth, extra_info)


GRADERS = {
    "gsm8k": number_score, "math_reasoning": number_score, "math": math_score,
    "code": code_score, "code_generation": code_score, "qa": text_score, "trivia": text_score,
    "classification": label_score,
}  # fmt: skip


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """Grades one answer by its task, from 0.0 to 1.0; see the table at the top.

    Args:
        data_source: a key of GRADERS.
        solution_str: what the model wrote.
        ground_truth: the right answer.
        extra_info: the row's `extra_info`, if it has one.

    Raises:
        ValueError: an unknown data_source (lists the known ones), or a ground truth that cannot be read.
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


def ground_truth_fault(data_source: str, ground_truth: str, extra_info: str = "") -> str | None:
    """Why no answer could be right, or None; the arguments are texts, as in a question's row."""
    grader = GRADERS.get(data_source)
    if grader is number_score and parse_number(ground_truth) is None:
        return f"ground_truth {ground_truth!r:.60} is not one number, as data_source {data_source!r} needs it"
    if grader is math_score and not math_verifier.reads(ground_truth):
        return f"ground_truth {ground_truth!r:.60} is nothing that math-verify can read"
    if grader is code_score:
        from parts.rewards import code_grading  # here, as above

        return code_grading.tests_fault(ground_truth, json.loads(extra_info or "null"))
    return None


# %% math-verify, in a process of its own ----------------------------------------------------------------
# A policy can write 9^{9^{9^9}}. math-verify's own time limit is a Unix signal: it cannot be set in the
# thread in which Tunix calls a reward, and it does not interrupt one long multiplication. A child process
# therefore does the work, and an alarm kills that process.
MATH_SECONDS = 3  # per answer, and as much again to read the right one
MATH_BATCH_SECONDS = 60.0  # for the answers of one step together; an honest one takes a few hundredths
MATH_BYTES = 2 * 2**30  # address space of the child process
_MATH_CHILD = """
import functools, json, logging, resource, signal, sys
from math_verify import parse, verify
from sympy.core.cache import clear_cache
logging.disable()
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
def read(text):  # LaTeX is read only between its own marks; an escaped dollar is money and none of them
    text = text.replace("\\\\$", "")
    marked = any(mark in text for mark in ("$", "\\\\(", "\\\\[", "\\\\boxed"))
    return parse(text if marked else f"${text}$", parsing_timeout=None)
def equal(gold, answer):
    return bool(verify(gold, read(answer), timeout_seconds=None))
def say(function, *arguments):  # says whether it gives anything, and returns what
    signal.alarm(int(sys.argv[1]))
    try:
        value = function(*arguments)
    except Exception:  # not MemoryError's: that ends the process
        value = None
    signal.alarm(0)
    print(json.dumps(bool(value)), flush=True)
    return value
read_gold = functools.lru_cache(1024)(read)
print("ready", flush=True)
for n, line in enumerate(sys.stdin, 1):
    gold, *answers = json.loads(line)
    gold = say(read_gold, gold)
    if gold:
        for answer in answers:
            say(equal, gold, answer)
    if n % 100 == 0:
        clear_cache()  # it grows without limit
"""


class MathVerifier:
    """A child process that compares expressions; started on first use, and again after it was killed.

    Args:
        seconds: time limit per answer.
    """

    def __init__(self, seconds: int = MATH_SECONDS):
        self.seconds = seconds
        self.child: subprocess.Popen | None = None
        self.lock = threading.Lock()

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether math-verify calls two expressions equal; None if it cannot read `gold`.

        A comparison that exceeds the limit of time or memory counts as False.

        Raises:
            UserError: it cannot be started.
        """
        with self.lock:
            return self._reply() if self._ask(gold, answer) else None

    def reads(self, gold: str) -> bool:
        """Whether math-verify finds anything in `gold`; errors as of `equal`."""
        with self.lock:
            return self._ask(gold)

    def _ask(self, *expressions: str) -> bool:
        """Sends them; whether the first one, the right answer, can be read."""
        if self.child is None or self.child.poll() is not None:
            self._start()
        try:
            print(json.dumps(expressions), file=self.child.stdin, flush=True)
        except BrokenPipeError:  # ended since it was looked at
            self._start()
            print(json.dumps(expressions), file=self.child.stdin, flush=True)
        return self._reply()

    def _reply(self) -> bool:
        """The next reply; False where the alarm or the limit of memory ended the process."""
        if line := self.child.stdout.readline():
            return json.loads(line)
        self.child.kill()
        self.child.communicate()
        return False

    def _start(self) -> None:
        with tempfile.TemporaryFile("w+") as errors:
            self.child = subprocess.Popen(
                # -P: a sympy.py in the current folder is not sympy
                [sys.executable, "-P", "-c", _MATH_CHILD, str(self.seconds), str(MATH_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C must not kill it: the training finishes its step first
            )
            if self.child.stdout.readline() != "ready\n":
                self.child.communicate()
                errors.seek(0)
                reason = (errors.read().splitlines() or [f"exit code {self.child.returncode}"])[-1]
                raise UserError(f"math-verify does not start: {reason}; pip install -r requirements.txt")


math_verifier = MathVerifier()


# %% The four rewards for <think> answers ----------------------------------------------------------------
# Arguments, return value and errors as in reward_func.py.


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    """POINTS_CORRECT for the right number, or the right text where the ground truth is not a number."""

    def right(completion: str, gold: str) -> bool:
        if parse_number(gold) is not None:
            return grade(completion, gold)
        text = extract_answer(completion)
        return text is not None and text.strip() == gold.strip()

    pairs = zip(completions, answer, strict=True)
    return [POINTS_CORRECT if right(completion, gold) else 0.0 for completion, gold in pairs]


def digit_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_DIGIT if the answer is one number, right or wrong."""
    numbers_given = [parse_number(extract_answer(completion) or "") for completion in completions]
    return [0.0 if number is None else POINTS_DIGIT for number in numbers_given]


def hard_format_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_HARD_FORMAT for one think block and one answer block, neither empty, and nothing else."""
    return [POINTS_HARD_FORMAT if format_ok(completion, THINK_TAGS) else 0.0 for completion in completions]


def mark_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_MARK per tag that occurs exactly once: partial credit to learn from."""
    return [POINTS_MARK * sum(completion.count(tag) == 1 for tag in THINK_TAGS) for completion in completions]


THINK_REWARDS = {
    function.__name__: function
    for function in (correctness_reward, digit_reward, hard_format_reward, mark_reward)
}


# %% Episodes of ENVIRONMENT -----------------------------------------------------------------------------
def episode_return(prompts, completions, **kwargs) -> list[float]:
    """What the world gave: the rewards of an episode, discounted by GAMMA."""
    return [episode.to_go[0] for episode in completions]


# %% Which rewards a run uses ----------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Grader:
    """The rewards of a run, and what its reports count as right; from `make_grader`.

    Attributes:
        names: of the rewards.
        files: where each comes from: the file of REWARD_FUNC, or "built in".
        functions: the rewards in Tunix's form, f(prompts, completions, **columns) -> one float per
            completion. Each raises UserError if the function behind it fails or returns anything else.
    """

    names: tuple[str, ...]
    files: tuple[str, ...]
    functions: list[Reward]

    def __str__(self) -> str:
        """Which rewards are in force, for the start of a run."""
        return ", ".join(f"{name} ({file})" for name, file in zip(self.names, self.files, strict=True))

    @property
    def think_tags(self) -> bool:
        """Whether the rewards want <think> where the course writes <reasoning>."""
        return not WANT_THINK_TAGS.isdisjoint(self.names)

    def score(self, completions, answer, data_source, extra_info, **columns) -> "np.ndarray":
        """One score per completion, float [N]; 1 or more counts as right.

        The score is that of `compute_score` if it is among the rewards; else 1 for exactly the right number
        in the answer tags, and 0 for anything else. The columns are those of the data, each of length N.
        """
        import numpy as np

        if "compute_score" in self.names:
            function = self.functions[self.names.index("compute_score")]
            return np.array(
                function(
                    prompts=None,
                    completions=completions,
                    answer=answer,
                    data_source=data_source,
                    extra_info=extra_info,
                )
            )
        pairs = zip(completions, answer, strict=True)
        return np.array([float(grade(completion, gold)) for completion, gold in pairs])

    def right_lenient(self, completions, answer, data_source, extra_info, **columns) -> "np.ndarray":
        """Whether each completion is right by its last number, wherever that stands: bool [N].

        Where the right answer is no number, there is no such reading: it is right as `score` says. Arguments
        as in `score`.
        """
        import numpy as np

        by_number = [parse_number(str(gold)) is not None for gold in answer]
        lenient = [grade_lenient(text, str(gold)) for text, gold in zip(completions, answer, strict=True)]
        if all(by_number):  # nothing to grade a second time
            return np.array(lenient)
        return np.where(by_number, lenient, self.score(completions, answer, data_source, extra_info) >= 1)

    def format_right(self, completion: str) -> bool:
        """Whether the completion has the form that the prompt asks for."""
        return format_ok(completion, THINK_TAGS if self.think_tags else TAGS)

    def votes(self, completions: Sequence[str]) -> list[Fraction | str | None]:
        """The answer of each completion: a number; else, where `compute_score` grades, a text; else None."""
        found = [parse_number(extract_answer(completion) or "") for completion in completions]
        if "compute_score" not in self.names:
            return found
        texts = [normalize_text(final_answer(completion)) or None for completion in completions]
        return [text if number is None else number for number, text in zip(found, texts, strict=True)]

    def majority(self, completions: Sequence[str]) -> int:
        """Index of the first completion that gives the most frequent answer; 0 if none gives one."""
        cast = self.votes(completions)
        given = [vote for vote in cast if vote is not None]
        return cast.index(max(given, key=given.count)) if given else 0


class WorldGrader(Grader):
    """A grader where nobody but the world pays: what it ended with a reward above 0 is right."""

    def score(self, completions, answer, data_source, extra_info, **columns) -> "np.ndarray":
        """1 for each `Episode` that is right, else 0."""
        import numpy as np

        return np.array([float(episode.right) for episode in completions])

    def right_lenient(self, completions, answer, data_source, extra_info, **columns) -> "np.ndarray":
        """As `score`: bool [N]."""
        return self.score(completions, answer, data_source, extra_info) >= 1

    def format_right(self, completion) -> bool:
        """Whether the world ended it: it was not cut off."""
        return completion.terminated


def make_grader(
    rewards: str, reward_file: str, course: ModuleType, rows: Sequence[Mapping[str, str]]
) -> Grader:
    """Finds the rewards of a run, and checks that they can grade its questions.

    Args:
        rewards: the constant REWARDS. If it is empty, the four of the course grade GSM8K's columns, and
            `compute_score` grades where `reward_file` is given or the data name another task.
        reward_file: the constant REWARD_FUNC; empty for none.
        course: the module with COURSE_REWARDS, reward_func.py.
        rows: all questions of the run, from `questions.read_questions`.

    Raises:
        UserError: no such reward, a `reward_file` that does not run, an unknown data_source (lists the known
            ones), or an answer that the rewards cannot grade.
    """
    own = load_file(find_path(reward_file).resolve()) if reward_file else None
    names = reward_names(rewards)
    if not names:
        by_task = own is not None or any(row["data_source"] != "gsm8k" for row in rows)
        names = ["compute_score"] if by_task else list(COURSE_REWARDS)
    functions = [find_reward(name, own, course) for name in names]
    if own is not None and not any(hasattr(own, name) for name in names):
        mine = ", ".join(functions_in(own)) or "no function"
        raise UserError(
            f"REWARD_FUNC={reward_file}: has {mine}, but not {' or '.join(names)}; rename one to "
            "compute_score, or name it in REWARDS"
        )
    by_number = course.check_answer in functions or course.check_numbers in functions
    for row in rows:
        place = f"{row['source']}, row {row['line']}"
        if compute_score in functions and row["data_source"] not in GRADERS:
            raise UserError(f"{place}: {unknown_data_source(row['data_source'])}")
        if by_number and parse_number(row["answer"]) is None:
            raise UserError(
                f"REWARDS={rewards}: check_answer and check_numbers grade numbers, the answer in {place} is "
                f"{row['answer']!r:.40}; leave REWARDS empty, then compute_score grades by data_source"
            )
    in_tunix_form = [
        by_row(function) if name == "compute_score" else function for name, function in zip(names, functions)
    ]
    files = tuple(
        Path(own.__file__).name if own is not None and hasattr(own, name) else "built in" for name in names
    )
    kind = WorldGrader if names == [episode_return.__name__] else Grader
    return kind(tuple(names), files, [guarded(*pair) for pair in zip(names, in_tunix_form)])


def load_file(path: Path, constant: str = "REWARD_FUNC") -> ModuleType:
    """Runs a reader's own file, which `constant` names, and returns it as a module.

    Raises:
        UserError: no such file, or it raises an exception.
    """
    spec = importlib.util.spec_from_file_location(f"own_{constant}", path)
    if spec is None or not path.is_file():
        raise UserError(f"{constant}={path}: not a Python file; give the path of one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(f"{constant}={path}: {type(error).__name__}: {reason}; fix it") from error
    return module


def functions_in(module: ModuleType) -> list[str]:
    """Names of the functions that a module has."""
    return [name for name, value in vars(module).items() if inspect.isfunction(value)]


def find_reward(name: str, own: ModuleType | None, course: ModuleType) -> Callable:
    """The function of that name: from `own`, else from `course` or from this module.

    Args:
        name: as in REWARDS.
        own: the file of REWARD_FUNC, from `load_file`.
        course: the module with COURSE_REWARDS.

    Raises:
        UserError: there is none (lists the names there are), or compute_score takes other arguments.
    """
    built_in = {other: getattr(course, other) for other in COURSE_REWARDS}
    built_in |= THINK_REWARDS | {"compute_score": compute_score, "episode_return": episode_return}
    if own is not None and hasattr(own, name):
        function = getattr(own, name)
    elif name in built_in:
        function = built_in[name]
    else:
        mine = [] if own is None else functions_in(own)
        known = ", ".join(dict.fromkeys([*mine, *built_in]))
        raise UserError(f"REWARDS: no reward {name!r}; there are {known}")
    if not callable(function):
        raise UserError(f"REWARDS: {name!r} in {own.__file__} is not a function; fix it")
    if name == "compute_score":
        try:
            inspect.signature(function).bind(
                data_source="", solution_str="", ground_truth="", extra_info=None
            )
        except TypeError as error:
            raise UserError(
                f"REWARD_FUNC={own.__file__}: compute_score {error}; it is called with data_source, "
                "solution_str, ground_truth and extra_info"
            ) from None
    return function


def by_row(score: Callable[..., float]) -> Reward:
    """A `compute_score` in Tunix's form: columns in, list of floats out.

    The same answer to the same question is scored once: the log of a step asks for the scores of the training
    again, and to run code or math-verify twice would take twice as long.
    """

    scored: dict[tuple[str, ...], float] = {}

    def score_of(row: tuple[str, ...]) -> float:
        data_source, solution_str, ground_truth, extra_info = row
        value = score(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=json.loads(extra_info) if extra_info else None,
        )
        if not isinstance(value, numbers.Real):
            raise TypeError(f"returned {value!r:.60} for data_source {data_source!r}, not a number")
        return float(value)

    def scores(prompts, completions, answer, data_source, extra_info, **kwargs) -> list[float]:
        columns = zip(data_source, completions, answer, extra_info, strict=True)
        rows = [tuple(map(str, row)) for row in columns]  # str: the columns hold NumPy's own strings
        if len(scored) > KEPT_SCORES:
            scored.clear()
        new = [row for row in dict.fromkeys(rows) if row not in scored]
        tasks = {GRADERS.get(row[0]) for row in new} & {code_score, math_score}
        if score is compute_score and tasks:
            from parts.rewards import code_grading

            seconds = code_grading.BATCH_SECONDS if code_score in tasks else MATH_BATCH_SECONDS
            scored.update(zip(new, code_grading.side_by_side(score_of, new, seconds), strict=True))
        else:
            scored.update((row, score_of(row)) for row in new)
        return [scored[row] for row in rows]

    return scores


def guarded(name: str, reward_fn: Reward) -> Reward:
    """`reward_fn` under its name in REWARDS, its faults turned into UserError (Tunix counts NaN as 0)."""
    import numpy as np

    @functools.wraps(reward_fn)
    def checked(prompts, completions, **columns):
        try:
            rewards = reward_fn(prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"reward function {name} raised {type(error).__name__}: {error}; fix it"
            ) from error
        try:
            values = np.asarray(rewards)
        except ValueError:  # lists of different lengths
            values = np.empty(0, object)
        if values.shape != (len(completions),):
            raise UserError(
                f"reward function {name} returned {rewards!r:.60} for {len(completions)} completions; return "
                "one number per completion"
            )
        for value, completion in zip(values.tolist(), completions, strict=True):
            if not isinstance(value, numbers.Real) or not abs(value) <= MAX_REWARD:
                raise UserError(
                    f"reward function {name} returned {value!r:.60} for completion {completion!r}; return a "
                    f"number of at most {MAX_REWARD:.0e}"
                )
        return [float(value) for value in values.tolist()]

    checked.__name__ = name  # Tunix logs the reward under it
    return checked
