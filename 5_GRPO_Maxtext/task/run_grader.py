"""Which rewards a run uses, and the `Grader` that its log and its reports share.

REWARDS names them: the course's four (reward_func.py), `compute_score` (task_rewards.py), the four
below, and those in your own file (REWARD_FUNC=my_reward.py): a `compute_score`, or functions as in
reward_func.py. examples/my_reward.py shows both. The four below expect
<think>...</think><answer>...</answer>.
"""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from settings import UserError, find_path, names_in
from task import code_grading, task_rewards
from task.grading import TAGS, extract_answer, format_ok, grade, grade_lenient, parse_number

Reward = Callable[..., list[float]]  # Tunix's signature: f(prompts, completions, **columns)

THINK_TAGS = ("<think>", "</think>", *TAGS[2:])
POINTS_CORRECT = 2.0
POINTS_DIGIT = 0.5
POINTS_HARD_FORMAT = 0.5
POINTS_MARK = 0.125  # per tag that occurs exactly once

# of a compute_score
SCORE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
WANT_REASONING_TAGS = frozenset({"match_format_exactly", "match_format_approximately"})
WANT_THINK_TAGS = frozenset({"hard_format_reward", "mark_reward"})

MAX_REWARD = 1e15  # either sign, so sums and squares stay within float32
KEPT_SCORES = 8192  # of `compute_score`; more than the answers of one step
# graders that may take long, and for how many answers at once
SLOW = (
    (code_grading.compute_score, code_grading.AT_ONCE),
    (task_rewards.math_score, 1),  # its limit is a signal
)


def is_right(completion: str, gold: str) -> bool:
    """Whether the answer tags hold exactly the gold number; or the gold text, if it's no number."""
    if parse_number(gold) is None:
        return (extract_answer(completion) or "").strip() == gold.strip()
    return grade(completion, gold)


# %% The four rewards for <think> answers ----------------------------------------------------------
# Arguments, return value and errors as in reward_func.py.


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    """POINTS_CORRECT for the right number, or the right text if the ground truth isn't a number."""
    return [POINTS_CORRECT * is_right(*pair) for pair in zip(completions, answer, strict=True)]


def digit_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_DIGIT if the answer is one number, such as "-3", "1,000" or "2.5", right or wrong."""
    values = [parse_number(extract_answer(completion) or "") for completion in completions]
    return [POINTS_DIGIT * (number is not None) for number in values]


def hard_format_reward(prompts, completions, **kwargs) -> list[float]:
    """POINTS_HARD_FORMAT for a think block and an answer block, neither empty, nothing else."""
    return [POINTS_HARD_FORMAT * format_ok(completion, THINK_TAGS) for completion in completions]


def mark_reward(prompts, completions, **kwargs) -> list[float]:
    """Partial credit: POINTS_MARK per tag that occurs exactly once."""
    return [
        POINTS_MARK * sum(completion.count(tag) == 1 for tag in THINK_TAGS)
        for completion in completions
    ]


THINK_REWARDS = {
    f.__name__: f for f in (correctness_reward, digit_reward, hard_format_reward, mark_reward)
}


def episode_return(prompts, completions, episodes, **kwargs) -> list[float]:
    """The discounted return of an ENVIRONMENT episode, with GAMMA."""
    return [episode.to_go[0] for episode in episodes]


# %% Which rewards a run uses ----------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Grader:
    """The rewards of a run, and what its reports count as right; from `make_grader`."""

    names: tuple[str, ...]
    files: tuple[str, ...]  # where each comes from: the file of REWARD_FUNC, or "built in"
    # each raises UserError if it fails or doesn't return one float per completion
    functions: list[Reward]

    def __str__(self) -> str:
        """The rewards in use, printed when a run starts."""
        return ", ".join(
            f"{name} ({file})" for name, file in zip(self.names, self.files, strict=True)
        )

    @property
    def think_tags(self) -> bool:
        """Whether the rewards want <think> instead of the course's <reasoning>."""
        return not WANT_THINK_TAGS.isdisjoint(self.names)

    @property
    def by_environment(self) -> bool:
        """Whether only the environment rewards: then ending with a reward above 0 is right."""
        return self.names == ("episode_return",)

    def score(
        self, completions, answer, data_source, extra_info, episodes=None, **columns
    ) -> np.ndarray:
        """One score per completion, float [N]; 1 or more counts as right.

        `episodes` are those of ENVIRONMENT. Uses `compute_score` if it's one of the rewards; else 1
        for what `is_right`, and 0 for anything else.
        """
        if self.by_environment:
            return np.array([float(episode.right) for episode in episodes])
        if "compute_score" in self.names:
            function = self.functions[self.names.index("compute_score")]
            given = {"answer": answer, "data_source": data_source, "extra_info": extra_info}
            return np.array(function(prompts=None, completions=completions, **given))
        return np.array([float(is_right(*pair)) for pair in zip(completions, answer, strict=True)])

    def right_lenient(
        self, completions, answer, data_source, extra_info, episodes=None, **columns
    ) -> np.ndarray:
        """Whether each one's last number is right, or `score` if gold isn't a number; bool [N]."""
        by_number = [
            not self.by_environment and parse_number(str(gold)) is not None for gold in answer
        ]
        lenient = [
            grade_lenient(text, str(gold)) for text, gold in zip(completions, answer, strict=True)
        ]
        if all(by_number):  # nothing to grade a second time
            return np.array(lenient)
        right = self.score(completions, answer, data_source, extra_info, episodes) >= 1
        return np.where(by_number, lenient, right)

    def format_right(self, completions, episodes=None, **columns) -> np.ndarray:
        """Whether each one has the format that the prompt asks for, or the environment ended it;
        bool [N].
        """
        if self.by_environment:
            return np.array([episode.terminated for episode in episodes])
        tags = THINK_TAGS if self.think_tags else TAGS
        return np.array([format_ok(completion, tags) for completion in completions])

    def votes(self, completions: Sequence[str], data_source: str | None = None) -> list[str | None]:
        """Each completion's answer, as the first completion with the same answer spelled it; None
        without.

        Two answers are the same if each would be right with the other as ground truth. If
        `compute_score` grades, it compares by `data_source` (unknown ones and code: as a number or
        else as text).
        """
        by_task, tasks = "compute_score" in self.names, ("gsm8k",)
        if by_task:
            graded = task_rewards.GRADERS.get(data_source) in task_rewards.NEEDED
            tasks = (data_source,) if graded else ("gsm8k", "qa")
        votes = []
        for answer in map(task_rewards.final_answer if by_task else extract_answer, completions):
            known = [*dict.fromkeys(filter(None, votes)), answer] if answer else []
            equal = (
                o for o in known if any(task_rewards.same_answer(task, answer, o) for task in tasks)
            )
            votes.append(next(equal, None))
        return votes


def course_rewards(course: ModuleType) -> dict[str, Reward]:
    """The functions that `course`, reward_func.py, defines, by name and in its order."""
    return {
        name: function
        for name, function in vars(course).items()
        if name[0] != "_"
        and inspect.isfunction(function)
        and function.__module__ == course.__name__  # not imported there
    }


def make_grader(
    rewards: str, reward_file: str, course: ModuleType, rows: Sequence[Mapping]
) -> Grader:
    """Finds the rewards of REWARDS and REWARD_FUNC, and checks that they can grade all questions of
    the run.

    `course` is reward_func.py. If REWARDS is empty, its functions grade GSM8K's columns, or
    `compute_score` if there's a `reward_file` or the data names another task.
    """
    own = vars(load_file(find_path(reward_file).resolve())) if reward_file else {}
    own = {name: value for name, value in own.items() if name[0] != "_" and callable(value)}
    known = course_rewards(course) | THINK_REWARDS
    known |= {"compute_score": task_rewards.compute_score, "episode_return": episode_return} | own
    by_task = reward_file or any(row["data_source"] != "gsm8k" for row in rows)
    names = ["compute_score"] if by_task else list(course_rewards(course))
    names = names_in(rewards) if rewards else names
    if missing := [name for name in names if name not in known]:
        place = f"REWARDS={rewards} REWARD_FUNC={reward_file}"
        raise UserError(f"{place}: no reward function {missing[0]!r}; there are {', '.join(known)}")
    if reward_file and own.keys().isdisjoint(names):
        mine = f"has {', '.join(own) or 'no function'}, but not {' or '.join(names)}"
        remedy = "rename one to compute_score, or name it in REWARDS"
        raise UserError(f"REWARD_FUNC={reward_file}: {mine}; {remedy}")
    functions = [known[name] for name in names]
    by_number = course.check_answer in functions or course.check_numbers in functions
    for row in rows:
        place = f"{row['source']}, row {row['line']}"
        if (
            task_rewards.compute_score in functions
            and row["data_source"] not in task_rewards.GRADERS
        ):
            raise UserError(f"{place}: {task_rewards.unknown_data_source(row['data_source'])}")
        if by_number and parse_number(row["answer"]) is None:
            raise UserError(
                f"REWARDS={rewards}: check_answer and check_numbers grade numbers, the answer in "
                f"{place} is {row['answer']!r:.40}; leave REWARDS empty, "
                "then compute_score grades by data_source"
            )
    if "compute_score" in names:
        known["compute_score"] = with_tunix_signature(known["compute_score"], reward_file)
    files = tuple(Path(reward_file).name if name in own else "built in" for name in names)
    return Grader(tuple(names), files, [checked_reward(name, known[name]) for name in names])


def call_user_code(what: str, function: Callable, *arguments, **named):
    """Calls a function of the user's; an exception becomes a one-line UserError that begins with
    `what`.

    It ends with where it was raised, or where the library that raised it was called: (my_reward.py,
    line 7).
    """
    try:
        return function(*arguments, **named)
    except UserError:  # of ours, which it called
        raise
    except (Exception, SystemExit) as error:
        ours = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
        places = [
            f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
        ]
        where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{what} {type(error).__name__}: {reason}; fix it{where}") from error


def on_copies(function: Callable) -> Callable:
    """`function` of the user's, called with copies: what it writes to its arguments stays there."""

    @functools.wraps(function)
    def called(*arguments, **named):
        return function(*copy.deepcopy(arguments), **copy.deepcopy(named))

    return called


def load_file(path: Path, constant: str = "REWARD_FUNC") -> ModuleType:
    """Loads the user's file, which `constant` names, as a module; UserError if that fails."""
    spec = importlib.util.spec_from_file_location(f"own_{constant}", path)
    if spec is None or not path.is_file():
        raise UserError(
            f"{constant}={path}: not a Python file; give the path of one that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up by name
    call_user_code(f"{constant}={path}:", spec.loader.exec_module, module)
    return module


def with_tunix_signature(score: Callable[..., float], reward_file: str) -> Reward:
    """Wraps a `compute_score` in Tunix's signature; UserError unless it takes SCORE_ARGUMENTS.

    Caches scores, because a step's log asks for them again.
    """
    try:
        inspect.signature(score).bind(**dict.fromkeys(SCORE_ARGUMENTS))
    except TypeError as error:
        fault = (
            f"REWARD_FUNC={reward_file}: compute_score {error}; "
            f"it takes {', '.join(SCORE_ARGUMENTS)}"
        )
        raise UserError(fault) from None
    scored: dict[tuple[str, ...], float] = {}

    def score_of(row: tuple[str, ...]) -> float:
        *texts, extra_info = row
        return score(**dict(zip(SCORE_ARGUMENTS, [*texts, json.loads(extra_info or "null")])))

    def scores(prompts, completions, answer, data_source, extra_info, **kwargs) -> list[float]:
        columns = zip(data_source, completions, answer, extra_info, strict=True)
        # str: the columns hold NumPy's own strings
        rows = [tuple(map(str, row)) for row in columns]
        if len(scored) > KEPT_SCORES:
            scored.clear()
        new = [row for row in dict.fromkeys(rows) if row not in scored]
        if score is task_rewards.compute_score:
            for grader, at_once in SLOW:
                some = [row for row in new if task_rewards.GRADERS.get(row[0]) is grader]
                scored.update(zip(some, code_grading.side_by_side(score_of, some, at_once)))
        scored.update((row, score_of(row)) for row in new if row not in scored)
        return [scored[row] for row in rows]

    return scores


def checked_reward(name: str, reward_fn: Reward) -> Reward:
    """Wraps `reward_fn` under its name in REWARDS, gives it copies, and turns its errors into
    UserError.
    """

    @functools.wraps(reward_fn)
    def checked(prompts, completions, **columns):
        subject, given = f"reward function {name}", dict(prompts=prompts, completions=completions)
        rewards = call_user_code(f"{subject} raised", on_copies(reward_fn), **given, **columns)
        try:
            values = np.asarray(rewards).tolist()
        except ValueError:  # lists of different lengths
            values = None
        if not isinstance(values, list) or len(values) != len(completions):
            how_many = f"{rewards!r:.60} for {len(completions)} completions"
            raise UserError(f"{subject} returned {how_many}; return one number per completion")
        for value, text in zip(values, completions):
            if not isinstance(value, numbers.Real) or not abs(value) <= MAX_REWARD:
                remedy = f"return a number of at most {MAX_REWARD:.0e}"
                raise UserError(
                    f"{subject} returned {value!r:.60} for completion {text!r}; {remedy}"
                )
        return list(map(float, values))

    checked.__name__ = name  # the log's column
    return checked
