"""Rewards by task, for think tags, and from a file of one's own."""

import functools
import json
import os
import string
import threading
import time
from collections import Counter
from pathlib import Path

import grpo_llama3_1_8b_demo as demo
import numpy as np
import pytest
import reward_func
import task_rewards
from task_rewards import compute_score, correctness_reward, digit_reward, hard_format_reward, mark_reward
from test_reward_func import OWN_CASES, cases, completion_of

EXAMPLES = demo.HERE / "examples"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo.configure([])


# ---------------------------------------------------------------- compute_score by data_source


@pytest.mark.parametrize(
    "case", [c for c in cases(OWN_CASES, (False, True)) if c.values[0]["kind"] != "gold"]
)
def test_a_tagged_number_is_graded_as_the_course_grades_it(case):
    completion = completion_of(case)
    if reward_func.extract_answer(completion) is None:
        return  # the course wants tags; compute_score also takes other marks
    for data_source in ("gsm8k", "math_reasoning"):
        assert compute_score(data_source, completion, case["gold"]) == float(case["correct"])


@pytest.mark.parametrize(
    ("solution", "right"),
    [
        ("<think>8 - 3</think><answer>1,000</answer>", True),
        (r"so it is \boxed{1{,}000}", False),  # not the way a number is written outside LaTeX
        (r"first \boxed{7}, no: \boxed{1000}", True),
        (r"\boxed{1000} and then \boxed{7", False),  # the last one is not closed: cut off
        ("I add.\n#### 1000", True),
        ("#### 7 is wrong\n#### $1,000.00<|eot_id|>", True),
        ("1000", True),
        ("The answer is 1000.<|eot_id|>", True),
        ("7 + 993 = 1000", False),  # three numbers and no mark: not guessed
        (r"<answer>7</answer> \boxed{1000} #### 1000", False),  # the tags are what was asked for
        ("<answer>-1000</answer>", False),
        ("", False),
    ],
)
def test_where_the_answer_of_a_math_problem_is_looked_for(solution, right):
    assert compute_score("math_reasoning", solution, "1000") == float(right)


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", r"\frac{2}{4}", True),
        ("x^2+1", "1 + x^2", True),
        ("x^2+1", "x^2-1", False),
        ("-3", "3", False),
        ("1,000", "1000", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("[0,1)", "[0,1)", True),
        ("[0,1)", "[0,1]", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("43", "42 or 43", False),  # both at once is not an answer
        ("3", "5 boxes of 3", False),
        ("7", "((((((", False),
        ("7", "", False),
    ],
)
def test_math_takes_any_equal_expression(gold, answer, right):
    assert compute_score("math", f"<answer>{answer}</answer>", gold) == float(right)
    assert compute_score("math", rf"thus \boxed{{{answer}}}", gold) == float(right)


def test_math_is_graded_in_the_thread_where_tunix_calls_rewards():
    """math-verify itself refuses any thread but the main one: its time limit is a signal."""
    import math_verify

    scores = []

    def grade_one():
        scores.append(compute_score("math", r"\boxed{0.5}", r"\frac{1}{2}"))
        with pytest.raises(ValueError, match="threaded environment"):
            math_verify.parse("$1$")

    thread = threading.Thread(target=grade_one)
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_an_endless_expression_costs_its_time_limit_and_nothing_else(monkeypatch):
    monkeypatch.setattr(task_rewards, "MATH_SECONDS", 1)
    if task_rewards._math_child:  # it was started with the other limit
        task_rewards._math_child.kill()
        task_rewards._math_child.wait()
    watchdog = threading.Timer(40, lambda: task_rewards._math_child.kill())  # a test that hangs is not red
    watchdog.start()
    started = time.monotonic()
    assert compute_score("math", "<answer>9^{9^{9^9}}</answer>", "7") == 0.0
    watchdog.cancel()
    assert time.monotonic() - started < 30  # imports of sympy on a busy machine, and one second
    child = task_rewards._math_child
    assert child.returncode is not None and not Path(f"/proc/{child.pid}").exists()
    monkeypatch.undo()
    assert compute_score("math", "<answer>7</answer>", "7") == 1.0
    assert task_rewards._math_child.pid not in (child.pid, os.getpid())


def test_a_math_answer_that_nobody_can_read_is_the_datas_fault():
    with pytest.raises(ValueError, match=r"math-verify cannot read ground_truth '\$'"):
        compute_score("math", "<answer>7</answer>", "$")


def squad_normalize(text):
    """As in the evaluation script of SQuAD 1.1, from its description: lower, punctuation, articles, space."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in text.split() if word not in ("a", "an", "the")]


@pytest.mark.parametrize("data_source", ["qa", "trivia"])
@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("The Eiffel Tower", "eiffel  tower!", True),
        ("Mr. O'Hara", "mr ohara", True),
        ("another", "other", False),
        ("Paris", "Paris or London", False),
        ("an apple", "Apple", True),
        ("theater", "ater", False),
    ],
)
def test_texts_are_compared_as_squad_does(data_source, gold, answer, right):
    assert (squad_normalize(gold) == squad_normalize(answer)) == right
    assert compute_score(data_source, f"<answer>{answer}</answer>", gold) == float(right)
    assert compute_score(data_source, answer, gold) == float(right)


def test_a_question_may_have_several_right_texts():
    aliases = json.dumps(["Mumbai", "Bombay", 7])
    assert [compute_score("qa", text, aliases) for text in ("bombay", "7", "Delhi", "")] == [1, 1, 0, 0]
    assert compute_score("qa", "東京。", "東京") == 1.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [("Positive", True), (" 'positive'. ", True), ("positive, negative", False), ("not positive", False),
     ("positively", False), ("", False), ("the positive", False)],
)  # fmt: skip
def test_a_label_has_to_stand_alone(answer, right):
    assert compute_score("classification", f"<answer>{answer}</answer>", "positive") == float(right)


@pytest.mark.parametrize("data_source", ["code", "code_generation"])
def test_code_goes_to_the_code_reward_with_all_it_needs(data_source):
    code_reward = pytest.importorskip("code_reward")
    program = "```python\ndef double(x):\n    return 2 * x\n```"
    assert compute_score(data_source, program, "assert double(4) == 8") == 1.0
    assert compute_score(data_source, program, "assert double(4) == 9") == 0.0
    assert code_reward.compute_score(program, "assert double(4) == 8", None) == 1.0


def test_an_unknown_data_source_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"data_source 'chess' is none .*gsm8k, math_reasoning, math, code"):
        compute_score("chess", "e4", "e4")


# ---------------------------------------------------------------- think tags


def think(thoughts, answer):
    return f"<think>\n{thoughts}\n</think>\n<answer>\n{answer}\n</answer>"


def points(completion, gold="-1000"):
    columns = {"prompts": ["?"], "completions": [completion], "answer": np.array([gold])}
    rewards = (correctness_reward, digit_reward, hard_format_reward, mark_reward)
    return tuple(reward(**columns, data_source=["gsm8k"])[0] for reward in rewards)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (think("0 - 1,000", "-1,000"), (2.0, 0.5, 0.5, 0.5)),
        # the letter n and several lines: `[^n]+` and `.` without DOTALL refuse one or the other
        (think("minus one thousand\n\nin two lines", "-1000"), (2.0, 0.5, 0.5, 0.5)),
        (think("x", "7"), (0.0, 0.5, 0.5, 0.5)),  # "7".isdigit(), and wrong
        (think("x", "-7.5"), (0.0, 0.5, 0.5, 0.5)),  # isdigit() would say no
        (think("x", "minus 7"), (0.0, 0.0, 0.5, 0.5)),
        (think("x", "1 or -1000"), (0.0, 0.0, 0.5, 0.5)),
        ("<think>x</think><answer>-1000</answer><|eot_id|>", (2.0, 0.5, 0.5, 0.5)),
        ("Sure! " + think("x", "-1000"), (2.0, 0.5, 0.0, 0.5)),
        (think("x", "-1000") + " Done.", (2.0, 0.5, 0.0, 0.5)),
        ("<answer>-1000</answer>", (2.0, 0.5, 0.0, 0.25)),
        ("<think></think><answer>-1000</answer>", (2.0, 0.5, 0.0, 0.5)),  # empty thoughts are none
        ("<answer>-1000</answer><think>x</think>", (2.0, 0.5, 0.0, 0.5)),  # the wrong way round
        (think("x", "-1000") + think("x", "-1000"), (2.0, 0.5, 0.0, 0.0)),
        (think("x", "-1000").replace("think", "reasoning"), (2.0, 0.5, 0.0, 0.25)),
        ("-1000", (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_think_rewards(completion, expected):
    assert points(completion) == expected


def test_a_right_text_is_correct_where_the_truth_is_no_number():
    assert points(think("x", "Paris"), "Paris")[0] == 2.0
    assert points(think("x", "paris"), "Paris")[0] == 0.0


def test_think_rewards_raise_where_lists_differ_in_length():
    with pytest.raises(ValueError):
        correctness_reward(["?"], ["a", "b"], ["1"])


def test_the_evaluation_looks_for_the_form_that_is_rewarded():
    thinking, reasoning = think("x", "1"), think("x", "1").replace("think", "reasoning")
    assert (demo.format_right(thinking), demo.format_right(reasoning)) == (False, True)
    demo.configure(["REWARDS=correctness_reward,hard_format_reward"])
    assert (demo.format_right(thinking), demo.format_right(reasoning)) == (True, False)


# ---------------------------------------------------------------- own rewards

COLUMNS = {
    "prompts": ["?", "?"], "completions": ["<answer>2</answer>", "<answer>3</answer>"], "answer": ["2", "2"],
    "data_source": ["mine", "mine"], "extra_info": ['{"level": 3}', ""],
}  # fmt: skip


def own(text, *arguments):
    """The reward functions of a run whose REWARD_FUNC holds `text`."""
    Path("mine.py").write_text(text)
    demo.configure(["REWARD_FUNC=mine.py", *arguments])
    demo.choose_rewards([])
    return [demo.guarded(function) for function in demo.reward_functions()]


def test_a_compute_score_of_ones_own_gets_the_rows_columns():
    (reward,) = own(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert type(solution_str) is str  # not NumPy's\n"
        "    return (data_source == 'mine') + 2 * (ground_truth in solution_str)\\\n"
        "        + 4 * (extra_info or {'level': 0})['level']"
    )
    columns = {name: np.array(values) for name, values in COLUMNS.items()}  # as Grain stacks them
    assert reward(**columns) == [15.0, 1.0]
    assert reward.__name__ == "compute_score" and demo.reward_names() == ["compute_score"]


def test_the_example_file_does_what_it_says():
    demo.configure([f"REWARD_FUNC={EXAMPLES}/my_reward.py", "REWARDS=compute_score,few_tokens,check_answer"])
    score, few, check = demo.reward_functions()
    tags = "<reasoning>{}</reasoning><answer>{}</answer>".format
    completions = [tags("2+3=5", "5"), tags("4+1=5", "5"), tags("2+3=5", "5").replace("</reasoning>", ""),
                   tags("2+3=6", "6"), "5"]  # fmt: skip
    n = len(completions)
    columns = {
        "prompts": ["?"] * n, "completions": completions, "answer": ["5"] * n,
        "data_source": ["one_step"] * n, "extra_info": ['{"working": "2+3=5"}'] * n,
    }  # fmt: skip
    assert score(**columns) == [1.0, 0.5, 0.25, 0.0, 0.0]
    assert few(**columns) == [0.1, 0.1, 0.1, 0.1, 0.0]
    assert check is reward_func.check_answer
    # what is right in the report and in the log: full marks only
    del columns["prompts"]
    assert (demo.score_answers(**columns) >= 1).tolist() == [True, False, False, False, False]


def test_a_function_of_ones_own_goes_before_a_built_in_of_that_name():
    (reward,) = own(
        "def check_answer(prompts, completions, **columns):\n    return [8.0] * len(completions)",
        "REWARDS=check_answer",
    )
    assert reward(**COLUMNS) == [8.0, 8.0]


def test_the_same_answer_is_scored_once_and_another_question_anew():
    """The log asks for the scores that the training has just asked for; code would run twice."""
    (reward,) = own(
        "calls = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    calls.append((solution_str, ground_truth))\n"
        "    return len(calls)"
    )
    assert reward(**COLUMNS) == [1.0, 2.0] == reward(**COLUMNS)
    assert reward(**COLUMNS | {"answer": ["2", "9"]}) == [1.0, 3.0]
    assert Counter(task_rewards.load_file(Path("mine.py").resolve()).calls).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def compute_score(", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError: division by zero; mend it"),
        ("def compute_score(completion, answer): return 1.0", "compute_score .*data_source, solution_str"),
        ("compute_score = 3", "'compute_score' in .* is not a function"),
    ],
)
def test_a_reward_file_that_does_not_run_is_one_line(text, words):
    with pytest.raises(demo.UserError, match=words) as error:
        own(text)
    assert "mine.py" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "TypeError: returned None for data_source 'mine', not a number"),
        ("'1.0'", "returned '1.0'"),
        ("float('nan')", "returned nan for completion '<answer>2</answer>'; return a finite number"),
        ("{}[0]", "raised KeyError: 0; mend it"),
        ("[1.0]", "not a number"),
    ],
)
def test_a_faulty_score_stops_the_run_and_is_named(returned, words):
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    (reward,) = own(f"{signature} return {returned}")
    with pytest.raises(demo.UserError) as error:
        reward(**COLUMNS)
    assert "reward function compute_score" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("returned", ["True", "1", "np.float32(1)", "np.int64(1)"])
def test_any_real_number_is_a_score(returned):
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    (reward,) = own(f"import numpy as np\n{signature} return {returned}")
    assert reward(**COLUMNS) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["REWARDS=check_anser"],
            r"no reward 'check_anser'; there are match_format_exactly, .*compute_score",
        ),
        (["REWARD_FUNC=gone.py"], r"REWARD_FUNC=.*gone.py: not a Python file"),
        (["REWARD_FUNC=mine.txt"], r"REWARD_FUNC=.*mine.txt: not a Python file"),
        (
            ["REWARD_FUNC=mine.py", "REWARDS=other"],
            r"no reward 'other'; there are brief, match_format_exactly",
        ),
        (["REWARDS=check_answer,"], "no reward ''"),
        (["BAD_ROWS=drop"], "BAD_ROWS=drop: one of refuse, skip"),
        (["REWARD_FUNC=gs://mine.py"], "REWARD_FUNC=gs://mine.py: must be a local path"),
        (["DATASET=a:1,gs://b.jsonl:1"], "must be a local path"),
    ],
)
def test_a_bad_choice_of_rewards_is_named_before_anything_is_written(arguments, words):
    Path("mine.py").write_text("def brief(prompts, completions, **columns): return [0.0] * len(completions)")
    Path("mine.txt").write_text("")
    with pytest.raises(demo.UserError, match=words):
        demo.run(arguments)
    assert not Path("runs").exists()


# ---------------------------------------------------------------- what the evaluation makes of the scores


class Parrot:
    """A rollout that gives prepared answers."""

    def __init__(self, answers):
        self.answers = answers

    def generate(self, prompts, config):
        texts, self.answers = self.answers[: len(prompts)], self.answers[len(prompts) :]
        return type("Output", (), {"text": texts, "tokens": [[0] * 5] * len(texts)})


def asked(*rows):
    names = ("answer", "data_source", "extra_info", "prompts")
    return [dict(zip(names, (*row, "", "?"), strict=True)) for row in rows]


def test_the_evaluation_grades_by_task_and_splits_by_data_source():
    demo.configure(["REWARDS=compute_score"])
    rows = asked(("Paris", "qa"), ("12", "gsm8k"), ("Rome", "qa"))
    result = demo.evaluate(Parrot(["paris", "<answer>13</answer>", "Bern"]), rows, "greedy")
    assert result["answer_accuracy"] == result["mean_score"] == pytest.approx(1 / 3)
    assert result["partial_accuracy"] == pytest.approx(1 / 3) and result["correct"] == [True, False, False]
    assert result["by_data_source"] == {
        "gsm8k": {"questions": 1, "answer_accuracy": 0.0, "format_accuracy": 0.0},
        "qa": {"questions": 2, "answer_accuracy": 0.5, "format_accuracy": 0.0},
    }
    table = demo.data_source_table(result, result)
    assert "| qa | 2 | 50.0% to 50.0% | 0.0% to 0.0% |" in table
    one = demo.evaluate(Parrot(["paris"]), rows[:1], "greedy")
    assert "by_data_source" not in one and demo.data_source_table(one, one) == ""


def test_texts_are_voted_on_where_texts_are_graded():
    answers = ["Rome", "the Paris", "paris", "<answer>12</answer>"]
    demo.configure(["REWARDS=compute_score"])
    assert demo.majority(answers) == 1
    result = demo.evaluate(Parrot(answers), asked(("Paris", "qa")), "liberal", num_passes=4)
    assert (result["majority_at_k"], result["pass_at_k"], result["answer_accuracy"]) == (1.0, 1.0, 0.5)
    demo.configure([])
    assert demo.majority(answers) == 3 and demo.majority(["Rome"]) == 0


def test_rewards_are_found_by_the_names_of_the_readme():
    for name in (*task_rewards.COURSE_REWARDS, *task_rewards.THINK_REWARDS):
        function = task_rewards.find_reward(name, None)
        assert function.__name__ == name and not isinstance(function, functools.partial)
