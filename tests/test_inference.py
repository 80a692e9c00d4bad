"""inference.py: which weights answer, streamed or not, voted, in files; and one line for what is wrong."""

import json
import os
import sys
from pathlib import Path

import grpo_llama3_1_8b_demo as demo
import inference
import pytest

RUN = ["NUM_BATCHES=2", "BATCH_SIZE=4", "NUM_GENERATIONS=4", "SAVE_INTERVAL_STEPS=1", "WARMUP_FRACTION=0.0",
       "LEARNING_RATE=3e-3", "BETA=0.0"]  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    demo.configure([])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, its questions, and its own rollout engine's greedy answers, before and after."""
    run_dir = tmp_path_factory.mktemp("inference") / "run"
    demo.open_run_dir(demo.configure([*RUN, f"RUN_DIR={run_dir}"]))
    folder, hf = demo.load_hf_config("tiny_llama")
    tokenizer = demo.load_tokenizer(folder)
    rows = demo.make_prompts(tokenizer, demo.read_questions("tiny_gsm8k", "test")[0][:16], "test")
    cluster = demo.make_cluster(folder, hf, tokenizer)
    config = demo.RolloutConfig(**demo.generation_config("greedy"))
    before = cluster.rollout.generate([row["prompts"] for row in rows], config).text
    demo.train(cluster, rows)
    after = cluster.rollout.generate([row["prompts"] for row in rows], config).text
    changed = [i for i in range(16) if before[i] != after[i]]
    assert changed  # or the tests below would show nothing
    return run_dir, rows, before, after, changed[0]


def test_a_question_is_streamed_as_the_rollout_engine_answers_it(trained, monkeypatch):
    run_dir, rows, _, after, i = trained
    pieces = []
    monkeypatch.setattr("builtins.print", lambda *args, end="\n", **kwargs: pieces.append(*(args or [""])))
    inference.run([f"CHECKPOINT={run_dir}", *rows[i]["question"].split()])  # quotation marks forgotten
    assert pieces[0] == f"checkpoint: {run_dir}/checkpoints/actor/2, trained from tiny_llama"
    assert "".join(pieces[1:]) == after[i]
    tokens = len(demo.load_tokenizer(demo.HERE / "tiny_llama").encode(after[i], add_special_tokens=False))
    assert tokens / 2 <= len([piece for piece in pieces[1:] if piece]) <= tokens  # no single lump


def test_before_and_after_side_by_side_from_file_to_file(trained, capsys):
    run_dir, rows, before, after, _ = trained
    lines = [{"question": r["question"], "answer": f"so it is\n#### {r['answer']}", "id": i}
             for i, r in enumerate(rows)]  # fmt: skip
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    inference.run([f"CHECKPOINT={run_dir}/2", "INPUT=in.jsonl", "COMPARE=True"])
    written = [json.loads(line) for line in Path("in.answers.jsonl").read_text().splitlines()]
    assert [row["before"] for row in written] == before
    assert [row["completion"] for row in written] == after
    right = [demo.reward_func.grade(text, row["answer"]) for text, row in zip(after, rows)]
    assert [row["correct"] for row in written] == right
    assert [{key: row[key] for key in line} for row, line in zip(written, lines)] == lines
    said = capsys.readouterr().out
    was = sum(demo.reward_func.grade(text, row["answer"]) for text, row in zip(before, rows))
    assert f"right:    {was} of 16, after {sum(right)} of 16" in said
    assert "before: <reasoning>" in said and " | after: " in said


def test_a_checkpoint_of_the_run_can_be_chosen_and_samples_vote(trained, capsys):
    run_dir, rows, *_ = trained
    answers = {}
    for name in ("base", f"{run_dir}/1", f"{run_dir}/checkpoints/actor/2"):
        inference.run([f"CHECKPOINT={name}", "--samples", "16", "SAMPLING=liberal", rows[0]["question"]])
        first, *said = capsys.readouterr().out.splitlines()
        answers[first] = [line.removeprefix("answer:   ") for line in said if line.startswith("answer:")]
        assert len(answers[first]) == 16 and said[-1].startswith("vote:     ")
        numbers = [demo.reward_func.extract_answer(text) for text in answers[first]]
        most = max(numbers.count(n) for n in numbers if n is not None)
        assert f"({most} of 16)" in said[-1]
    assert "base, tiny_llama untrained" in next(iter(answers))
    texts = list(answers.values())
    assert len(answers) == 3 and texts[0] != texts[1] != texts[2] != texts[0]


def test_without_a_question_the_built_in_ones_are_asked(capsys):
    inference.run(["CHECKPOINT=base"])
    said = capsys.readouterr().out
    assert (
        said.count("question: ") == len(inference.QUESTIONS) > 2 and f"of {len(inference.QUESTIONS)}" in said
    )
    grades = [line.partition("[")[2] for line in said.splitlines() if line.startswith("answer:")]
    shipped = {
        row["question"]: row["answer"].split("#### ")[1]
        for row in map(json.loads, (demo.HERE / "tiny_gsm8k" / "test.jsonl").read_text().splitlines())
    }
    for (question, gold), grade in zip(inference.QUESTIONS, grades, strict=True):
        assert shipped[question] == gold
        assert grade in ("right]", f"wrong: {gold}]")


def test_the_newest_run_is_taken_and_where_there_is_none_the_base():
    inference.configure([])
    assert inference.find_run() is None
    for name in ("older", "newer"):
        folder = Path("runs/grpo_llama3_1_8b_demo") / name
        (folder / "checkpoints" / "actor" / "7" / "model_params").mkdir(parents=True)
        (folder / "constants.json").write_text("{}")
    os.utime("runs/grpo_llama3_1_8b_demo/older/checkpoints/actor/7/model_params", (1, 1))
    assert inference.find_run() == (Path("runs/grpo_llama3_1_8b_demo/newer"), None)


def test_the_vote_counts_numbers():
    texts = ["<answer>7</answer>", "<answer>12</answer>", "no tag", "<answer>12.0</answer>"]
    assert inference.vote(texts) == (texts[1], "12 (2 of 4)")
    assert inference.vote(["no tag", "none"]) == ("no tag", "no answer")


def test_an_inputs_data_source_says_who_grades():
    Path("in.jsonl").write_text(
        '{"prompt": "Capital of Peru?", "ground_truth": ["Lima", "Lima City"], "data_source": "qa"}\n'
        '{"prompt": "2 + 2?", "ground_truth": "4"}\n'
    )
    inference.configure(["INPUT=in.jsonl"])
    demo.configure([])
    city, number = inference.read_rows("")
    demo.choose_rewards([city])
    assert inference.is_right("<answer>lima</answer>", city)
    assert not inference.is_right("<answer>Quito</answer>", city)
    assert inference.is_right("<answer>4.0</answer>", number)
    assert inference.vote(["<answer>Lima</answer>", "<answer>the lima</answer>"])[1] == "lima (2 of 2)"


def test_an_unknown_data_source_in_the_input_is_named():
    Path("in.jsonl").write_text('{"prompt": "?", "ground_truth": "4", "data_source": "cooking"}\n')
    with pytest.raises(demo.UserError, match=r"in\.jsonl, row 1: .*cooking"):
        inference.run(["INPUT=in.jsonl", "CHECKPOINT=base"])


def test_words_the_model_does_not_know_are_named(capsys):
    tokenizer = demo.load_tokenizer(demo.HERE / "tiny_llama")
    demo.configure([])
    row = {"question": "Tom has 2 zebras. How many zebras does Tom have?"}
    inference.add_prompts([row], tokenizer)
    assert "'zebras'" in capsys.readouterr().out.replace(" zebras", "zebras")


LONG = "Tom has 2 apples and " * 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sample", "3"], ["'--sample'", "--samples N"]),
        (["--samples", "three", "How many?"], ["SAMPLES=three", "int"]),
        (["--samples"], ["SAMPLES=", "int"]),
        (["--samples=0"], ["SAMPLES=0", "1 or more"]),
        (["checkpoint=base"], ["'checkpoint=base'", "CHECKPOINT"]),
        ([""], ["question is empty"]),
        (["INPUT=a.jsonl", "How many?"], ["INPUT=a.jsonl", "one of the two"]),
        (["SAMPLING=wild"], ["SAMPLING=wild", "greedy, standard, liberal"]),
        (["SAMPLING=greedy", "SAMPLES=2"], ["SAMPLES=2", "all alike"]),
        (["CHECKPOINT=base", "COMPARE=True"], ["COMPARE=True", "run's folder"]),
        (["COMPARE=True"], ["COMPARE=True", "run's folder"]),
        (["CHECKPOINT=nowhere"], ["CHECKPOINT=nowhere", "constants.json"]),
        (["CHECKPOINT=empty"], ["CHECKPOINT=empty", "no checkpoint"]),
        (["CHECKPOINT=damaged"], ["CHECKPOINT=damaged", "damaged"]),
        (["INPUT=missing.jsonl"], ["INPUT=missing.jsonl", "No such file"]),
        (["INPUT=bad.jsonl"], ["INPUT=bad.jsonl", "line 2", "not JSON"]),
        (["INPUT=columns.jsonl"], ["INPUT=columns.jsonl", "line 1", "'question'"]),
        (["INPUT=nothing.jsonl"], ["INPUT=nothing.jsonl", "no rows"]),
        (["INPUT=good.jsonl", "OUTPUT=bad.jsonl"], ["OUTPUT=bad.jsonl", "exists"]),
        (["INPUT=good.jsonl", "OUTPUT=no/a.jsonl"], ["OUTPUT=no/a.jsonl", "folder"]),
        (["MODEL=nobody/nothing"], ["MODEL=nobody/nothing", "folder"]),
        (["CHECKPOINT=base", LONG], ["MAX_PROMPT_LENGTH=28", "question 1 takes", "raise"]),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(arguments, words, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = json.dumps({"question": "How many?"}) + "\n"
    files = {"good": good, "bad": good + "{", "columns": '{"text": 1}', "nothing": "\n"}
    for name, text in files.items():
        Path(f"{name}.jsonl").write_text(text)
    for name, text in (("empty", '{"MODEL": "tiny_llama"}'), ("damaged", "{")):
        Path(name).mkdir()
        Path(name, "constants.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["inference.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        inference.main()
    assert stopped.value.code == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: ") and "\n" not in line
    for word in words:
        assert word in line


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(trained):
    with pytest.raises(demo.UserError, match=r"CHECKPOINT=.*/5: no such checkpoint; there are 1, 2$"):
        inference.run([f"CHECKPOINT={trained[0]}/5", "How many?"])
