"""inference.py: which weights answer, streamed or not, voted, in files; and one line for what is
wrong.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from short_runs import SHORT
from test_page import data_of

import grpo_llama3_1_8b_demo as demo
import inference
import reward_func
import settings
from model import llama
from run import inference_output
from settings import HERE, UserError
from task.grading import extract_answer, grade, last_number
from task.run_grader import course_rewards

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_without_a_run_a_model_is_asked_as_the_main_script_would():
    for column in ("small", "large"):
        mine, its = (
            settings.defaults(kind, column) for kind in (inference.Constants, demo.Constants)
        )
        assert {name: its[name] for name in inference.PROMPT_AND_LENGTHS}.items() <= mine.items()


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(scope="module")
def trained(finished, tmp_path_factory):
    """A copy of a run, its test questions, and its own rollout engine's greedy answers, before and
    after.
    """
    run_dir = tmp_path_factory.mktemp("inference") / "run"
    shutil.copytree(finished / "run", run_dir)
    results = [json.loads((run_dir / f"{when}.json").read_text()) for when in ("before", "after")]
    before, after = (result["greedy_completions"] for result in results)
    changed = [i for i in range(16) if before[i] != after[i]]
    assert changed  # or the tests below would show nothing
    return run_dir, results[0]["asked"], before, after, changed[0]


def test_a_question_is_streamed_as_the_rollout_engine_answers_it(trained, monkeypatch):
    run_dir, rows, _, after, i = trained
    pieces = []
    monkeypatch.setattr(
        "builtins.print", lambda *args, end="\n", **kwargs: pieces.append(*(args or [""]))
    )
    words = rows[i]["question"].split()  # quotation marks forgotten
    inference.main([f"CHECKPOINT={run_dir}", f"ANSWER={rows[i]['answer']}", *words])
    assert pieces[0] == f"checkpoint: {run_dir}/checkpoints/8, trained from tiny_llama"
    graded = "right" if grade(after[i], rows[i]["answer"]) else f"wrong, right: {rows[i]['answer']}"
    assert pieces.pop() == f" [{graded}]" and "".join(pieces[1:]) == after[i]
    tokens = len(
        llama.load_tokenizer(HERE / "tiny_llama").encode(after[i], add_special_tokens=False)
    )
    assert tokens / 2 <= len([piece for piece in pieces[1:] if piece]) <= tokens  # no single lump


def test_the_code_that_a_runs_folder_names_is_run_only_if_it_is_named_here(trained, capsys):
    run_dir, rows, *_ = trained
    shutil.copytree(run_dir, "theirs")
    Path("planted.py").write_text(
        "open('ran', 'w').close()\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0"
    )
    constants = json.loads(Path("theirs/constants.json").read_text())
    theirs = {"REWARD_FUNC": "planted.py", "REWARDS": "compute_score,check_answer"}
    Path("theirs/constants.json").write_text(json.dumps(constants | theirs))
    arguments = ["CHECKPOINT=theirs", "ANSWER=1000", rows[0]["question"]]
    inference.main(arguments)
    assert not Path("ran").exists()
    assert (
        "rewards:    check_answer (built in); the run's own are in planted.py"
        in capsys.readouterr().out
    )
    inference.main([*arguments, "REWARD_FUNC=planted.py", "REWARDS=compute_score"])
    assert Path("ran").exists() and "the run's own" not in capsys.readouterr().out


def test_before_and_after_side_by_side_from_file_to_file(trained, capsys):
    run_dir, rows, before, after, _ = trained
    lines = [
        {"question": r["question"], "answer": f"so it is\n#### {r['answer']}", "id": i}
        for i, r in enumerate(rows)
    ]
    stale = {"vote": "of an earlier answer"}
    Path("in.jsonl").write_text("".join(json.dumps(line | stale) + "\n\n" for line in lines))
    inference.main([f"CHECKPOINT={run_dir}/8", "INPUT=in.jsonl", "COMPARE=True"])
    written = [json.loads(line) for line in Path("in.answers.jsonl").read_text().splitlines()]
    assert [row["before"] for row in written] == before and "vote" not in written[0]
    assert [row["completion"] for row in written] == after
    right = [grade(text, row["answer"]) for text, row in zip(after, rows)]
    assert [row["correct"] for row in written] == right
    assert [{key: row[key] for key in line} for row, line in zip(written, lines)] == lines
    said = capsys.readouterr().out
    was = sum(grade(text, row["answer"]) for text, row in zip(before, rows))
    assert f"right:    {was} of 16, after {sum(right)} of 16" in said
    golds = [int(row["answer"]) for row in rows]
    lenient = [
        [last_number(text) == gold for text, gold in zip(texts, golds)] for texts in (before, after)
    ]
    assert f"by the last number: {sum(lenient[0])} of 16, after {sum(lenient[1])} of 16" in said
    assert [row["correct_lenient"] for row in written] == lenient[1]
    assert f"before:   {before[0]} [" in said and f"after:    {after[0]} [" in said


def test_a_checkpoint_of_the_run_can_be_chosen_and_samples_vote(trained, capsys):
    run_dir, rows, *_ = trained
    answers = {}
    for name in ("base", f"{run_dir}/4", f"{run_dir}/checkpoints/8"):
        inference.main(
            [f"CHECKPOINT={name}", "SAMPLES=16", "SAMPLING=liberal", rows[0]["question"]]
        )
        first, *said = capsys.readouterr().out.splitlines()
        answers[first] = [
            line.removeprefix("answer:   ") for line in said if line.startswith("answer:")
        ]
        assert len(answers[first]) == 16 and said[-1].startswith("vote:     ")
        numbers = [extract_answer(text) for text in answers[first]]
        most = max(numbers.count(n) for n in numbers if n is not None)
        assert f"({most} of 16)" in said[-1]
    assert "base, tiny_llama as it is" in next(iter(answers))
    texts = list(answers.values())
    assert len(answers) == 3 and texts[0] != texts[1] != texts[2] != texts[0]


def test_the_page_has_graded_answers_and_what_training_did_to_their_tokens(trained, capsys):
    run_dir, rows, *_ = trained
    question, gold = rows[0]["question"], rows[0]["answer"]
    inference.main([f"CHECKPOINT={run_dir}", "PAGE=True", f"ANSWER={gold}", question])
    assert f"page:     {run_dir}/answers.html" in capsys.readouterr().out
    data = data_of(run_dir / "answers.html")
    [group] = data["groups"]
    assert (group["question"], group["answer"], group["graded"]) == (question, gold, True)
    assert data["kind"] == "questions" and data["compared"] and len(group["completions"]) == 8
    texts = [
        "".join(answer["pieces"]).removesuffix("<|eot_id|>") for answer in group["completions"]
    ]
    R = np.array([answer["reward"] for answer in group["completions"]])
    expected = (R - R.mean()) / (R.std(ddof=1) + 1e-6)
    for answer, text, A in zip(group["completions"], texts, expected, strict=True):
        for name, points in answer["points"].items():
            assert [points] == getattr(reward_func, name)(None, completions=[text], answer=[gold])
        assert set(answer["points"]) == set(course_rewards(reward_func))
        assert answer["correct"] == grade(text, gold)
        assert answer["advantage"] == pytest.approx(A, abs=1e-5)
        assert np.abs(np.subtract(answer["log_prob_after"], answer["log_prob"])).max() > 1e-3


def test_without_checkpoint_the_newest_run_answers_and_where_there_is_none_the_base():
    for name in ("mine", "a/deep", "a/deep/host_1"):
        Path("runs", name, "checkpoints", "7").mkdir(parents=True)
        # which is not looked into
        constants = {"MODEL": "tiny_llama", "CHECKPOINT_DIR": "gs://bucket/x"}
        Path("runs", name, "constants.json").write_text(json.dumps(constants))
    assert inference.read_arguments([])[2] is None  # nothing was saved
    for when, name in enumerate(("mine", "a/deep")):
        for host in Path("runs", name).glob("**/constants.json"):
            note = {"saved": 7, "saved_at": float(when)}
            host.with_name("run.json").write_text(json.dumps(note))
        *_, checkpoint = inference.read_arguments([])
        assert (checkpoint.run_dir, checkpoint.step) == (Path("runs", name), None)
    # by the time of the save; a later start, or a copy, changes the time of the file
    for name, when in (("a/deep", 7.0), ("mine", 8.0), ("a/deep", 7.0)):
        Path("runs", name, "run.json").write_text(json.dumps({"saved": 7, "saved_at": when}))
    checkpoint = inference.read_arguments([])[2]
    assert checkpoint.run_dir == Path("runs/mine")
    assert inference.read_arguments(["MODEL=tiny_llama"])[2] is None  # that model, not the run's
    assert inference.read_arguments(["MODEL="])[2] == checkpoint


def test_what_a_model_is_asked_with_is_taken_over_from_its_run():
    names = {field.name for field in dataclasses.fields(inference.Constants)}
    its = {field.name for field in dataclasses.fields(demo.Constants)}
    assert set(inference.RUNS_CONSTANTS) == names & its - {"BATCH_SIZE", "SEED", "REWARD_FUNC"}


def test_a_runs_constants_hold_unless_the_command_line_says_otherwise():
    saved = {
        "MODEL": "mine",
        "TEMPLATE": "Q: {question}",
        "MAX_PROMPT_LENGTH": 30,
        "OUTPUT": "/etc/x",
        "BATCH_SIZE": 3,
        "SEED": 9,
        "NUM_BATCHES": 1,
    }
    Path("run").mkdir()
    Path("run/constants.json").write_text(json.dumps(saved))
    c, question, checkpoint = inference.read_arguments(
        ["CHECKPOINT=run/7", "MAX_PROMPT_LENGTH=40", "Why?"]
    )
    assert question == "Why?" and checkpoint.step == 7 and checkpoint.constants == saved
    # the run's; no run has an OUTPUT
    assert (c.MODEL, c.TEMPLATE, c.OUTPUT) == ("mine", "Q: {question}", "")
    assert c.MAX_PROMPT_LENGTH == 40  # the command line's
    # the default's, in the column of a model that is not the tiny one
    assert c.TOTAL_GENERATION_STEPS == 768
    assert (c.BATCH_SIZE, c.SEED) == (64, 0)  # the run's mean something else
    base, *_ = inference.read_arguments(["CHECKPOINT=base"])
    assert (base.MODEL, base.TOTAL_GENERATION_STEPS) == ("tiny_llama", 28)


def test_an_inputs_data_source_says_who_grades_and_what_has_no_answer_is_not_graded(capsys):
    rows = [
        {"prompt": "Capital of Peru?", "ground_truth": ["Lima", "Lima City"], "data_source": "qa"},
        {"prompt": "3 - 3?", "ground_truth": 0},
        {"prompt": "Is 4 odd?", "ground_truth": False, "data_source": "classification"},
        {"prompt": "2 - 2?", "ground_truth": 0, "data_source": "gsm8k"},
        {"prompt": "And now?"},
    ]
    Path("in.json").write_text(json.dumps(rows))
    c, *_ = inference.read_arguments(["INPUT=in.json", "CHECKPOINT=base"])
    rows = inference.read_rows(c, "")
    grader = inference.make_grader(c, rows)
    for row, text in zip(rows, ("the lima", "0.0", "False", "1", "5"), strict=True):
        row["after"] = [f"<answer>{text}</answer>"]
    assert inference_output.is_right(grader, "It is 0", rows[1]) == (False, True)
    assert (
        inference_output.vote(grader, ["<answer>Lima</answer>", "<answer>the lima</answer>"])[1]
        == "Lima (2 of 2)"
    )
    inference_output.show(rows, grader)
    assert "\nright:    3 of 4\n" in capsys.readouterr().out
    inference_output.write_rows(Path("out.jsonl"), rows, grader)
    graded = [
        json.loads(line).get("correct") for line in Path("out.jsonl").read_text().splitlines()
    ]
    assert graded == [True, True, True, False, None]


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(trained):
    with pytest.raises(
        UserError, match=r"CHECKPOINT=.*/5: no such checkpoint; there are 2, 4, 6, 8$"
    ):
        inference.main([f"CHECKPOINT={trained[0]}/5", "How many?"])
