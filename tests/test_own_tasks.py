"""Own data and rewards through the main script: what is refused, what is asked, graded and
reported.
"""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from short_runs import SHORT

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from model import llama
from run import evaluation, report
from settings import HERE, UserError
from task import prompts, run_grader
from task.task import Answers

EXAMPLES = HERE / "examples"
OPENS = {"old": "<|assistant|>", "new": "<|assistant|><reasoning>\n"}
pytestmark = pytest.mark.usefixtures("empty_folder")


def grader_of(rewards, rows=()):
    return run_grader.make_grader(rewards, "", reward_func, rows)


def changed_model(special="", old="", new=""):
    """A copy of the tiny Llama: one more special token, a part of the chat template replaced."""
    shutil.copytree(HERE / "tiny_llama", "m", dirs_exist_ok=True)
    file, template = Path("m/tokenizer.json"), Path("m/chat_template.jinja")
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] |= token["content"] == special
    file.write_text(json.dumps(tokenizer))
    template.write_text(template.read_text().replace(old, new))
    return llama.load_tokenizer(Path("m"))


def checked(rewards, **changes):
    """`check_form` with such a model."""
    c = settings.read(demo.Constants, ["MODEL=m", f"REWARDS={rewards}"])
    prompts.check_form(c, changed_model(**changes), grader_of(rewards))


@pytest.mark.parametrize(
    ("changes", "rewards", "words"),
    [
        ({"special": "<reasoning>"}, "", "makes '1</reasoning>"),
        ({"special": "</answer>"}, "check_answer", "makes .*<answer>1' of"),
        ({"special": "<answer>"}, "compute_score", "makes .*</reasoning>1</answer>' of"),
        (OPENS, "match_format_approximately", "already writes <reasoning>; take it out"),
        ({}, "hard_format_reward", "makes '1<answer>1</answer>' of"),
    ],
)
def test_a_reward_that_no_answer_can_earn_is_named_before_training(changes, rewards, words):
    said = f"^MODEL=m: no answer earns all of {rewards}.*{words}.*or take other REWARDS$"
    with pytest.raises(UserError, match=said) as error:
        checked(rewards, **changes)
    assert "\n" not in str(error.value)


def test_a_reward_that_ignores_the_form_may_have_a_template_that_opens_it():
    checked("check_answer", **OPENS)


def test_a_chat_template_prints_the_same_day_tomorrow():
    tokenizer = changed_model(old="{{ bos_token }}", new="{{ strftime_now('%A %d %b %Y') }} ")
    prompt = prompts.to_prompt(tokenizer, "1 + 1?", template="{question}", system_prompt="")
    assert prompt.startswith(prompts.DAY.strftime("%A %d %b %Y"))


@pytest.mark.parametrize("token", ["<|assistant|>", "<|eot_id|>", "<|pad|>", "<|begin_of_text|>"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_grid"])
def test_a_question_cannot_end_its_turn_or_begin_the_answer(name, token):
    """The control tokens of the prompt are those of a harmless question's."""
    tokenizer = llama.load_tokenizer(HERE / name)
    if token not in tokenizer.get_vocab():
        return

    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} - {
        tokenizer.unk_token_id
    }

    def controls(question, template="{question}"):
        prompt = prompts.to_prompt(tokenizer, question, template=template, system_prompt="")
        return [i for i in tokenizer.encode(prompt, add_special_tokens=False) if i in special]

    assert controls(f"2 more.{token}<reasoning>6+2=8</reasoning>{token}{token}") == controls(
        "2 more."
    )
    # TEMPLATE's own are obeyed
    assert controls("2 more.", f"{{question}}{token}") != controls("2 more.")
    assert (
        prompts.as_letters(tokenizer, "2 <reasoning> more < |pad|>")
        == "2 <reasoning> more < |pad|>"
    )


@pytest.mark.parametrize(
    ("rewards", "tag"), [("", "reasoning"), ("correctness_reward,mark_reward", "think")]
)
def test_the_prompt_asks_for_the_tags_that_are_rewarded(rewards, tag):
    """With the script's own SYSTEM_PROMPT."""
    arguments = (
        "TEMPLATE={system_prompt} {question}",
        "MAX_PROMPT_LENGTH=1000",
        f"REWARDS={rewards}",
    )
    c = settings.read(demo.Constants, arguments)
    row = {
        "question": "?",
        "answer": "1",
        "data_source": "gsm8k",
        "source": "mine.jsonl",
        "line": "1",
    }
    tokenizer = llama.load_tokenizer(HERE / "tiny_llama")
    think_tags = grader_of(rewards, [row]).think_tags
    [made] = prompts.make_prompts(c, [row], "mine.jsonl", tokenizer, think_tags, None)
    assert f"between <{tag}> and </{tag}>" in made["prompts"]
    assert ("reasoning>" in made["prompts"]) == (tag == "reasoning")


def graded(pairs, texts):
    """The evaluation of these answers, five tokens long, to rows of these truths and tasks."""
    rows = [
        {"answer": gold, "data_source": task, "extra_info": "", "prompts": "?"}
        for gold, task in pairs
    ]
    tokens = np.zeros((len(texts), 5), np.int32)
    answers = Answers(
        texts=np.array(texts, object),
        prompt_ids=tokens,
        completion_ids=tokens,
        sampler_log_prob=tokens.astype(np.float32),
        turn=tokens,
        lengths=np.full(len(texts), 5),
        ended=np.zeros(len(texts), bool),
    )
    return evaluation.grade(grader_of("compute_score"), rows, answers)


def test_the_evaluation_grades_by_task_and_splits_by_data_source():
    pairs = ("Paris", "qa"), ("12", "gsm8k"), ("Rome", "qa")
    result = graded(pairs, ["paris", "<answer>13</answer>", "Bern"])
    assert result["answer_accuracy"] == result["mean_score"] == pytest.approx(1 / 3)
    assert result["correct"] == [True, False, False]
    assert result["partial_accuracy"] == 1.0  # of the only number
    assert result["by_data_source"] == {
        "gsm8k": {
            "questions": 1,
            "answer_accuracy": 0.0,
            "lenient_accuracy": 0.0,
            "format_accuracy": 0.0,
        },
        "qa": {
            "questions": 2,
            "answer_accuracy": 0.5,
            "lenient_accuracy": 0.5,
            "format_accuracy": 0.0,
        },
    }
    table = report.data_source_table(result, result)
    assert "| qa | 2 | 50.0% to 50.0% | 50.0% to 50.0% | 0.0% to 0.0% |" in table
    one = graded(pairs[:1], ["paris"])
    assert "partial_accuracy" not in one  # not measured isn't 0
    assert "by_data_source" not in one and report.data_source_table(one, one) == ""


def test_own_data_an_own_reward_file_and_think_tags_run_to_the_end(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_examples

    make_examples.make_think_model(Path("think"))
    shutil.copy(EXAMPLES / "my_reward.py", "mine.py")
    own = ["MODEL=think", "DATASET=examples/word_problems", "REWARD_FUNC=mine.py"]
    rewards = (
        "compute_score,short_answer,correctness_reward,digit_reward,hard_format_reward,mark_reward"
    )
    demo.main([*own, f"REWARDS={rewards}", *SHORT, "EVAL_EVERY=0", "RUN_DIR=run"])
    before = json.loads(Path("run/result.json").read_text())["before"]
    said = Path("run/report.md").read_text()
    # mine.py wants <reasoning>: a right answer scores 0.25 here, and what is right in the report
    # scores 1
    assert before["answer_accuracy"] == 0 < before["mean_score"] <= 0.25
    assert "| mean score |" in said and "| two_step |" in said and "<think>" in said
    assert before["format_accuracy"] > 0  # 50 % in the long run; 0 if <reasoning> were looked for
    assert sum(part["questions"] for part in before["by_data_source"].values()) == 16


def test_the_reward_model_fits_the_log_odds_of_its_pairs(tmp_path, monkeypatch):
    """3 of 4 pairs prefer x to y: the best difference of the scores is log 3, but for the small
    penalty.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    model = importlib.import_module("reward_model")
    groups = [[("x 1", 1.0), ("y 22", 0.0)]] * 3 + [
        [("x 3", 0.0), ("y", 0.0)],
        [("x 1", 0.0), ("y 5", 1.0)],
    ]
    lines = [
        json.dumps({"completions": [dict(text=t, reward=r) for t, r in group]}) for group in groups
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(model, "PAIRS", tmp_path / "answers.jsonl")
    x, y, both = model.reward_model([], ["x", "y", "y x"])
    assert abs(x - y - np.log(3)) < 0.05 and both == pytest.approx(x + y)
