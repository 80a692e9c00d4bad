"""Rewards by task, for think tags, and from a file of one's own; what a Grader makes of them."""

import functools
import gc
import importlib.util
import json
import signal
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import reward_func
from run import inference_output
from settings import UserError
from task import grading, task_rewards
from task.run_grader import THINK_REWARDS, course_rewards, make_grader
from task.task_rewards import compute_score
from task.turns import Episode

CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FORMS = {"math": ["<answer>{}</answer>", r"thus \boxed{{{}}}"], "math_reasoning": ["{}"]}
pytestmark = pytest.mark.usefixtures("empty_folder")


def grader_of(rewards="", reward_file="", rows=()):
    return make_grader(rewards, reward_file, reward_func, rows)


@pytest.mark.parametrize(("task", "gold", "answer", "right"), CASES["answers"])
def test_an_answer_is_right_as_its_task_compares_it(task, gold, answer, right):
    for form in FORMS.get(task, ["{}", "<answer>{}</answer>"]):
        assert compute_score(task, form.format(answer), gold) == float(right)


@pytest.mark.parametrize(("task", "one", "other"), CASES["different"])
def test_a_sign_can_be_the_whole_difference(task, one, other):
    for truth, answer in ((one, other), (other, one)):
        assert compute_score(task, f"<answer>{answer}</answer>", truth) == 0.0
        assert compute_score(task, f"<answer>{truth}</answer>", truth) == 1.0


@pytest.mark.parametrize(("task", "truth", "answer"), CASES["wrong"])
def test_what_a_parser_skips_is_compared_too(task, truth, answer):
    if task_rewards.ground_truth_fault(task, truth) is None:
        assert compute_score(task, f"<answer>{answer}</answer>", truth) == 0.0


@pytest.mark.parametrize(("task", "truth", "answer"), CASES["same"])
def test_another_spelling_is_paid(task, truth, answer):
    assert task_rewards.ground_truth_fault(task, truth) is None
    assert compute_score(task, f"<answer>{answer}</answer>", truth) == 1.0


def test_an_endless_expression_costs_its_time_limit_and_nothing_else(monkeypatch):
    monkeypatch.setattr(task_rewards, "MATH_SECONDS", 1)
    before = signal.getsignal(signal.SIGALRM)
    endless = "9^{9^{9^9}}", "999999999!", r"\int_0^1 \sin(x^{x^x}) dx", "(a+b+c+d)^{90}", "(" * 99
    for expression in endless:
        started = time.process_time()
        assert compute_score("math", f"<answer>{expression}</answer>", "7") == 0.0
        # to read it and to compare it, a second each, and overhead
        assert time.process_time() - started < 10
        assert compute_score("math", "<answer>7</answer>", "7") == 1.0
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (
        0,
        0,
    )


def test_nothing_is_collected_while_an_expression_is_compared():
    """A timeout raised in the collection that jax listens to was lost: it took minutes."""
    task_rewards.math_score("<answer>1</answer>", "7")  # imports
    threshold, before = gc.get_threshold(), gc.get_stats()[0]["collections"]
    gc.set_threshold(20)
    assert task_rewards.math_score(r"<answer>\frac{21}{3}</answer>", "7") == 1.0
    gc.set_threshold(*threshold)
    assert gc.get_stats()[0]["collections"] - before < 5 and gc.isenabled()  # else hundreds


@pytest.mark.parametrize(("data_source", "truth", "taken"), CASES["truths"])
def test_a_truth_that_is_taken_is_paid_in_full_when_it_is_the_answer(data_source, truth, taken):
    fault = task_rewards.ground_truth_fault(data_source, truth)
    assert (fault is None) == taken, fault
    if taken:
        alternatives = json.loads(truth) if truth.startswith('["') else [truth]
        for text in alternatives:
            assert compute_score(data_source, f"<answer>{text}</answer>", truth) == 1.0
    else:
        assert f"data_source {data_source!r} needs " in fault and "\n" not in fault


@pytest.mark.parametrize(
    ("tests", "extra", "words"),
    [  # extra: the row's extra_info; words: what is said, nothing if the tests can grade
        ("assert add(1, 2) == 3", "", ""),
        ('[{"input": "1", "output": "2"}]', "", ""),
        ("def check(f):\n    assert f(1) == 2", '{"entry_point": "add"}', ""),
        ("def check(f):\n    assert f(1) == 2", "", "give entry_point"),
        ("def check(f):\n    assert f(1) == 2", '["add"]', "give entry_point"),
        ("assert add(1, 2 == 3", "", "not valid Python"),
        ("assert add(1, 2) == other(3)", "", "which of add, other is the answer's"),
        ("assert add(1, 2) == other(3)", '{"entry_point": "add"}', "other is neither defined"),
        ("assert add(1, 2) == approx(3)", "", "which of add, approx is the answer's"),
        ("add(1, 2)", "", "no assert statement"),
        ("[1, 2]", "", "must be assert statements"),
        ("[{", "", "not JSON"),
    ],
)
def test_tests_that_grade_nothing_are_found_where_the_data_are_read(tests, extra, words):
    fault = task_rewards.ground_truth_fault("code", tests, extra)
    assert words in fault and "\n" not in fault if words else fault is None


@pytest.mark.parametrize("data_source", ["code", "code_generation"])
def test_code_goes_to_the_code_reward_with_all_it_needs(data_source):
    program = "```python\ndef double(x):\n    return 2 * x\n```"
    check = "def check(candidate):\n    assert candidate(4) == 8\n    assert candidate(4) == 9"
    assert compute_score(data_source, program, check, {"entry_point": "double"}) == 0.5


def shortest(call, enough=0.0):
    """Processor seconds of this thread, the best of three calls or the first below `enough`."""
    seconds = []
    while len(seconds) < 3 and min(seconds, default=enough) >= enough:
        started = time.thread_time()
        call()
        seconds.append(time.thread_time() - started)
    return min(seconds)


@pytest.fixture(scope="module")
def limit():
    """Six million turns of a loop: 0.15 s, on a processor on which 30 kB take a linear grader 0.02
    s at most and a quadratic one 0.4 s.
    """
    return shortest(lambda: sum(i for i in range(6_000_000)))


def test_a_function_added_to_the_file_of_rewards_is_a_reward(tmp_path):
    """By name, and in a run that names none; what the file imports is no reward."""
    path = tmp_path / "course.py"
    added = (
        "\n\ndef short(prompts, completions, **columns):\n    return [0.25] * len(completions)\n"
    )
    path.write_text(Path(reward_func.__file__).read_text() + added)
    spec = importlib.util.spec_from_file_location("course", path)
    spec.loader.exec_module(course := importlib.util.module_from_spec(spec))
    four = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
    assert make_grader("", "", course, []).names == (*four, "short")
    found = make_grader("short", "", course, [])
    assert found.functions[0](prompts=None, completions=["", ""]) == [0.25, 0.25]


@pytest.mark.parametrize("piece", CASES["PIECES"], ids=repr)
def test_no_shape_of_text_takes_a_grader_longer_than_its_length(piece, limit):
    grader = grader_of("compute_score")
    course = list(course_rewards(reward_func).values())
    rewards = [
        functools.partial(f, [""], answer=["18"]) for f in (*course, *THINK_REWARDS.values())
    ]
    tasks = ("gsm8k", "qa", "classification")
    of_one = [functools.partial(compute_score, task, ground_truth="18") for task in tasks]
    of_list = [
        functools.partial(
            grader.right_lenient, answer=["18"], data_source=["gsm8k"], extra_info=[""]
        )
    ]
    places = [  # where 100 kB of the piece are put
        "{}",
        "{}x",
        "<answer>{}</answer>",
        "<reasoning>a</reasoning>\n<answer>{}</answer>",
        "<reasoning>a</reasoning>\n<answer>{}18</answer>",
        "<reasoning>a</reasoning>\n<answer>18{}x</answer>",
        "<reasoning>{}</reasoning><answer>18</answer>",
        "{}<reasoning>a</reasoning><answer>18</answer>",
        "<reasoning>a</reasoning>{}<answer>18</answer>",
        "<reasoning>a</reasoning><answer>18</answer>{}",
        "<reasoning>a</reasoning><answer>18</answer>{}x",
    ]
    for place in places:
        text = place.format(piece * (30_000 // len(piece)))
        calls = [functools.partial(f, solution_str=text) for f in of_one]
        calls += [
            functools.partial(f, completions=[text]) for f in (*rewards, *of_list, grader.votes)
        ]
        calls += [functools.partial(grading.extract_hash_answer, "#### " + text)]
        for call in calls:
            assert shortest(call, limit) < limit, (call.func, place)


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [  # isdigit() would refuse -7.5, and `.` without DOTALL two lines
        (
            "-1000",
            "<think>\n0 - 1,000\n</think>\n<answer>\n-1,000\n</answer>",
            [2.0, 0.5, 0.5, 0.5],
        ),
        (
            "-1000",
            "<think>\nminus one thousand\n\nin two lines\n</think>\n<answer>\n-1000\n</answer>",
            [2.0, 0.5, 0.5, 0.5],
        ),
        ("-1000", "<think>\nx\n</think>\n<answer>\n7\n</answer>", [0.0, 0.5, 0.5, 0.5]),
        ("-1000", "<think>\nx\n</think>\n<answer>\n-7.5\n</answer>", [0.0, 0.5, 0.5, 0.5]),
        ("-1000", "<think>\nx\n</think>\n<answer>\nminus 7\n</answer>", [0.0, 0.0, 0.5, 0.5]),
        ("-1000", "<think>\nx\n</think>\n<answer>\n1 or -1000\n</answer>", [0.0, 0.0, 0.5, 0.5]),
        ("-1000", "<think>x</think><answer>-1000</answer><|eot_id|>", [2.0, 0.5, 0.5, 0.5]),
        ("-1000", "Sure! <think>\nx\n</think>\n<answer>\n-1000\n</answer>", [2.0, 0.5, 0.0, 0.5]),
        ("-1000", "<think>\nx\n</think>\n<answer>\n-1000\n</answer> Done.", [2.0, 0.5, 0.0, 0.5]),
        ("-1000", "<answer>-1000</answer>", [2.0, 0.5, 0.0, 0.25]),
        ("-1000", "<think></think><answer>-1000</answer>", [2.0, 0.5, 0.0, 0.5]),
        ("-1000", "<answer>-1000</answer><think>x</think>", [2.0, 0.5, 0.0, 0.5]),
        (
            "-1000",
            "<think>\nx\n</think>\n<answer>\n-1000\n</answer>"
            "<think>\nx\n</think>\n<answer>\n-1000\n</answer>",
            [2.0, 0.5, 0.0, 0.0],
        ),
        (
            "-1000",
            "<reasoning>\nx\n</reasoning>\n<answer>\n-1000\n</answer>",
            [2.0, 0.5, 0.0, 0.25],
        ),
        ("-1000", "-1000", [0.0, 0.0, 0.0, 0.0]),
        ("Paris", "<answer>Paris</answer>", [2.0, 0.0, 0.0, 0.25]),  # the truth is no number
        ("Paris", "<answer>paris</answer>", [0.0, 0.0, 0.0, 0.25]),
    ],
)
def test_think_rewards(gold, completion, expected):
    columns = {"prompts": ["?"], "completions": [completion], "answer": np.array([gold])}
    assert [
        reward(**columns, data_source=["gsm8k"])[0] for reward in THINK_REWARDS.values()
    ] == expected


def test_what_correctness_reward_pays_counts_as_right():
    """Texts, too: the log and the evaluation agree with the reward."""
    texts = ["<answer> Paris</answer>", "<answer>Rome</answer>", "Paris", "<answer>$4</answer>"]
    columns = {"answer": ["Paris", "Paris", "Paris", "4"], "data_source": ["gsm8k"] * 4}
    grader = grader_of("correctness_reward")
    paid = grader.functions[0](prompts=["?"] * 4, completions=texts, **columns)
    right = grader.score(completions=texts, extra_info=[""] * 4, **columns)
    assert paid == [2, 0, 0, 2] and right.tolist() == [1, 0, 0, 1]
    assert grader.right_lenient(completions=texts, extra_info=[""] * 4, **columns)[0]


COLUMNS = {
    "prompts": ["?", "?"],
    "completions": ["<answer>2</answer>", "<answer>3</answer>"],
    "answer": ["2", "2"],
    "data_source": ["mine", "mine"],
    "extra_info": ['{"level": 3}', ""],
}


def own(text, rewards=""):
    """The grader of a run whose REWARD_FUNC holds `text`."""
    Path("mine.py").write_text(text)
    return grader_of(rewards, "mine.py")


def test_a_compute_score_of_ones_own_gets_the_rows_columns():
    grader = own(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert type(solution_str) is str  # not NumPy's\n"
        "    return (data_source == 'mine') + 2 * (ground_truth in solution_str)\\\n"
        "        + 4 * (extra_info or {'level': 0})['level']"
    )
    columns = {name: np.array(values) for name, values in COLUMNS.items()}  # as Grain stacks them
    (reward,) = grader.functions
    assert reward(**columns) == [15.0, 1.0]
    assert reward.__name__ == "compute_score" and grader.names == ("compute_score",)


EDITS = (
    "completions[0] = 'mine'",
    "columns['answer'][0] = 'mine'",
    "columns['completion_ids'][0][0] = 9",
    "columns['episodes'][0].rewards[0] = 9.0",
)


@pytest.mark.parametrize("edit", EDITS)
def test_a_reward_may_write_to_its_arguments_and_nobody_else_sees_it(edit):
    """First of the rewards or last; lists, arrays and an episode's own lists."""
    text = f"def mine(prompts, completions, **columns):\n    {edit}\n    return [0.0, 0.0]"
    episodes = [Episode(turn=[0], to_go=[1.0], rewards=[1.0], terminated=True) for _ in range(2)]
    texts = ["<answer>2</answer>", "<answer>3</answer>"]
    given = COLUMNS | {"completions": [*texts], "answer": np.array(["2", "2"])}
    given["episodes"] = episodes
    given["completion_ids"] = [np.array([5, 6]), np.array([5])]
    for order in ("mine,check_answer", "check_answer,mine"):
        points = {f.__name__: f(**given) for f in own(text, order).functions}
        assert points == {"mine": [0.0, 0.0], "check_answer": [3.0, -1.0]}
    assert given["completions"] == texts and episodes[0].rewards == [1.0]
    assert given["answer"].tolist() == ["2", "2"] and given["completion_ids"][0].tolist() == [5, 6]


def test_the_same_answer_is_scored_once_and_another_question_anew():
    """The log asks for the scores that the training has just asked for; code would run twice."""
    (reward,) = own(
        "calls = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    calls.append((solution_str, ground_truth))\n"
        "    return len(calls)"
    ).functions
    assert reward(**COLUMNS) == [1.0, 2.0] == reward(**COLUMNS)
    assert reward(**COLUMNS | {"answer": ["2", "9"]}) == [1.0, 3.0]
    assert Counter(sys.modules["own_REWARD_FUNC"].calls).most_common(1)[0][1] == 1


@pytest.mark.parametrize(("text", "rewards", "words"), CASES["own_rewards"])
def test_a_reward_of_ones_own_at_fault_is_one_line(text, rewards, words):
    with pytest.raises(UserError) as error:
        for reward in own(text, rewards).functions:
            reward(**COLUMNS)
    said = str(error.value)
    assert words in said and "\n" not in said and ("mine.py" in said or "reward function" in said)


@pytest.mark.parametrize(
    ("rewards", "reward_file", "words"),
    [
        (
            "check_anser",
            "",
            "no reward function 'check_anser'; .*match_format_exactly, .*compute_score",
        ),
        ("", "gone.py", "REWARD_FUNC=.*gone.py: not a Python file"),
        ("", "mine.txt", "REWARD_FUNC=.*mine.txt: not a Python file"),
        ("other", "mine.py", "no reward function 'other'; .*match_format_exactly.*brief"),
        ("check_answer,", "", "no reward function ''"),
    ],
)
def test_a_bad_choice_of_rewards_is_named_before_anything_is_written(rewards, reward_file, words):
    Path("mine.py").write_text(
        "def brief(prompts, completions, **columns): return [0.0] * len(completions)"
    )
    Path("mine.txt").write_text("")
    with pytest.raises(UserError, match=words):
        grader_of(rewards, reward_file)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("data_source", "answers", "votes"),
    [  # each vote is the answer as it was written first
        (
            "qa",
            ["Rome", "the Paris", "paris", "A", "a"],
            ["Rome", "the Paris", "the Paris", "A", "A"],
        ),
        ("classification", ["the spam", "spam", "Spam."], ["the spam", "spam", "spam"]),
        (
            "math",
            ["\\frac{1}{2}", "0.5", "0.50", "$"],
            ["\\frac{1}{2}", "\\frac{1}{2}", "\\frac{1}{2}", ""],
        ),
        ("gsm8k", ["1,000", "1000.0", "many", "$1000"], ["1,000", "1,000", "", "1,000"]),
        ("code", ["x = 1", "X = 1", "7", "7.0"], ["x = 1", "x = 1", "7", "7"]),
        ("nobody knows it", ["7.0", "7", "Rome", ""], ["7.0", "7.0", "Rome", ""]),
    ],
)
def test_votes_are_counted_as_the_task_compares_answers(data_source, answers, votes):
    completions = [
        f"<reasoning>{i}</reasoning><answer>{text}</answer>" for i, text in enumerate(answers)
    ]
    grader = grader_of("compute_score")
    assert grader.votes(completions, data_source) == [vote or None for vote in votes]
    most = max(filter(None, votes), key=votes.count)
    winner, _ = inference_output.vote(grader, completions, data_source)
    assert winner == completions[votes.index(most)]


def test_without_compute_score_numbers_in_tags_are_voted_on():
    answers = ["Rome", "12", "<answer>12.0</answer>", "<answer>12</answer>", "<answer>7</answer>"]
    course = grader_of()
    assert course.votes(answers) == [None, None, "12.0", "12.0", "7"]
    assert inference_output.vote(course, answers) == (answers[2], "12.0 (2 of 5)")
    assert inference_output.vote(course, ["Rome", "12"]) == ("Rome", "no answer")
