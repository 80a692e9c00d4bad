"""The tasks for lm-eval, which is not installed here, ask what the main script asks and grade as it
does.
"""

import json
import re
import shlex

import jinja2
import pytest
import yaml

import grpo_llama3_1_8b_demo as demo
import settings
from machines import rows_of
from settings import HERE
from task import questions, task_rewards
from task.grading import grade, grade_lenient

TASKS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((HERE / "lm_eval").glob("*.yaml"))
}
# of each task's run
FIGURES = dict(tiny_gsm8k="once_per_answer.csv", small_numbers="smollm2_seeds.csv")


def extract(task, name, text):
    """What lm-eval's filters make of an answer: the last match, the first group that is there, and
    so on.
    """
    [found] = [entry["filter"] for entry in task["filter_list"] if entry["name"] == name]
    assert [step["function"] for step in found] == ["regex", "take_first"]
    matches = re.findall(found[0]["regex_pattern"], text)
    if not matches:
        return "[invalid]"
    match = matches[found[0]["group_select"]]
    match = next(filter(None, match)) if isinstance(match, tuple) else match
    [metric] = task["metric_list"]
    assert metric["metric"] == "exact_match"
    for pattern in metric["regexes_to_ignore"]:
        match = re.sub(pattern, "", match)
    return match.strip()


@pytest.mark.parametrize("name", FIGURES)
def test_a_task_asks_the_runs_questions_and_waits_for_as_many_tokens(name):
    """The constants are those of the command of the run's figures."""
    [_, script, *arguments] = shlex.split(
        next(iter(rows_of(HERE / "assets" / FIGURES[name])))["command"]
    )
    assert script == "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py"
    task, c = TASKS[name], settings.read(demo.Constants, arguments)
    [path] = task["dataset_kwargs"]["data_files"].values()
    data = [json.loads(line) for line in (HERE.parent / path).read_text().splitlines()]
    wanted, source = questions.read_questions(c.DATASET, "test")
    assert (
        source.endswith(path.removeprefix("5_GRPO_Maxtext/")) and len(data) == c.NUM_TEST_QUESTIONS
    )
    for row, question in zip(data, wanted, strict=True):
        asked = jinja2.Template(task["doc_to_text"]).render(row)
        assert asked == c.TEMPLATE.format(question=question["question"])
        assert jinja2.Template(task["doc_to_target"]).render(row) == question["answer"]
    limits = task["generation_kwargs"]
    assert limits["max_gen_toks"] == c.TOTAL_GENERATION_STEPS and limits["do_sample"] is False
    said = json.loads((HERE / "tiny_llama" / "tokenizer_config.json").read_text())
    assert limits["until"] == [said["eos_token"]] or name != "tiny_gsm8k"  # that model's own token


@pytest.mark.parametrize(
    "text",
    [
        "<reasoning>8-6=2,2+5=7</reasoning><answer>7</answer>",
        "<reasoning>8-6=2,2+5=7</reasoning>7</answer>",
        "<reasoning>8+6=14</reasoning><answer>14</answer>",
        "<reasoning>2+5=7</reasoning><answer>7",
        "<answer>7</answer><answer>8</answer>",
        "<answer>8</answer><answer>7</answer>",
        "Mia has 3 + 4 = 7 shells.",
        "She has 7.",
        "It costs $7.",
        "7",
        "There are 7 and then 10",
        "none",
        "",
    ],
)
@pytest.mark.parametrize("name", FIGURES)
def test_the_two_filters_grade_as_the_course_does(name, text):
    strict = {
        "tiny_gsm8k": lambda: grade(text, "7"),
        "small_numbers": lambda: task_rewards.compute_score("math_reasoning", text, "7") >= 1,
    }[name]()
    assert (extract(TASKS[name], "strict-match", text) == "7") == strict
    assert (extract(TASKS[name], "flexible-extract", text) == "7") == grade_lenient(text, "7")
