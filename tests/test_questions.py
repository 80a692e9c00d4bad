"""Own data: every spelling and file type, several sources mixed, bad rows counted and named."""

import csv
import itertools
import json
import shutil
from pathlib import Path

import grain
import grpo_llama3_1_8b_demo as demo
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import questions
from jax.experimental.compilation_cache import compilation_cache

EXAMPLES = demo.HERE / "examples"
ROWS = [
    {"prompt": "1 + 1?", "ground_truth": "2", "data_source": "math_reasoning", "extra_info": {"level": 1}},
    {"prompt": "1 + 2?", "ground_truth": "3", "data_source": "gsm8k", "extra_info": None},
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo.configure([])


def write(path, rows):
    """Rows as a file of the kind that its name says; a text in place of a row is one broken line."""
    path = Path(path)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


# ---------------------------------------------------------------- files and columns


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_questions(kind):
    rows, source = demo.read_questions(write(f"mine.{kind}", ROWS), "train")
    assert source == f"mine.{kind}"
    assert rows == [
        {"question": "1 + 1?", "answer": "2", "data_source": "math_reasoning", "extra_info": '{"level": 1}',
         "source": source, "line": "1", "weight": "1.0"},
        {"question": "1 + 2?", "answer": "3", "data_source": "gsm8k", "extra_info": "", "source": source,
         "line": "2", "weight": "1.0"},
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_gsm8k_columns_may_name_their_task(kind):
    """In Parquet a row without the column has None in it."""
    plain = {"question": "1 + 1?", "answer": "1+1=2\n#### 2"}
    rows, _ = demo.read_questions(write(f"m.{kind}", [plain | {"data_source": "math"}, plain]), "train")
    assert [row["data_source"] for row in rows] == ["math", "gsm8k"]
    assert [row["answer"] for row in rows] == ["2", "2"]


def test_a_folder_has_a_file_for_each_split():
    Path("folder").mkdir()
    write("folder/train.parquet", ROWS)
    write("folder/test.json", ROWS[:1])
    assert len(demo.read_questions("folder", "train")[0]) == 2
    assert demo.read_questions("folder", "test")[1] == "folder/test.json"


def test_lines_are_counted_as_an_editor_counts_them():
    """A byte-order mark, empty lines, Windows' line ends, and U+2028 inside a text, which ends no line."""
    first = json.dumps(ROWS[0] | {"prompt": "one\u2028two"}, ensure_ascii=False)
    text = "\ufeff" + first + "\r\n\r\n" + json.dumps(ROWS[1]) + "\r\n"
    Path("mine.jsonl").write_bytes(text.encode())
    rows, _ = demo.read_questions("mine.jsonl", "train")
    assert [row["line"] for row in rows] == ["1", "3"] and rows[0]["question"] == "one\u2028two"


@pytest.mark.parametrize(
    ("ground_truth", "text"), [(42, "42"), (["a", "b"], '["a", "b"]'), ({"in": 1}, '{"in": 1}'), ("é", "é")]
)
def test_a_ground_truth_need_not_be_a_text(ground_truth, text):
    row = {"prompt": "?", "ground_truth": ground_truth, "data_source": "qa"}
    assert questions.to_question(row)["answer"] == text


# ---------------------------------------------------------------- bad rows

BAD = {
    "{": "not JSON",
    "[1]": "not an object",
    json.dumps(
        {"prompt": "?", "ground_truth": "1"}
    ): "no column 'data_source' (it has 'prompt', 'ground_truth')",
    json.dumps({"prompt": "?", "data_source": "math"}): "no column 'ground_truth'",
    json.dumps({"question": "?", "ground_truth": "1"}): "no column 'answer'",
    json.dumps({"text": "?"}): "no column 'question'",
    json.dumps({"prompt": [{"role": "user"}], "ground_truth": "1", "data_source": "qa"}): "prompt is [{",
    json.dumps({"prompt": " ", "ground_truth": "1", "data_source": "qa"}): "prompt is ' ', not a text",
    json.dumps({"prompt": "?", "ground_truth": "1", "data_source": ""}): "data_source is '', not a text",
    json.dumps({"prompt": "?", "ground_truth": "", "data_source": "qa"}): "ground_truth is empty",
    json.dumps({"prompt": "?", "ground_truth": None, "data_source": "qa"}): "no column 'ground_truth'",
    json.dumps({"prompt": "?", "ground_truth": "two", "data_source": "gsm8k"}): "'two' is not one number",
    json.dumps({"question": "?", "answer": "5"}): "does not end in '#### N'",
    json.dumps({"question": "?", "answer": 5}): "answer is 5, not a text",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_row_stops_the_run_and_is_named_with_file_line_and_reason(line):
    write("mine.jsonl", [ROWS[0], "", line, ROWS[1]])
    with pytest.raises(demo.UserError) as error:
        demo.read_questions("mine.jsonl", "train")
    said = str(error.value)
    assert said.startswith("DATASET=mine.jsonl: 1 of 3 rows cannot be used: mine.jsonl, row 3: ")
    assert BAD[line] in said and said.endswith("Mend them, or set BAD_ROWS=skip") and "\n" not in said


def test_skipped_rows_are_counted_and_named(capsys):
    demo.configure(["BAD_ROWS=skip"])
    write("mine.jsonl", [ROWS[0], *BAD, ROWS[1]])
    rows, _ = demo.read_questions("mine.jsonl", "train")
    assert [row["line"] for row in rows] == ["1", str(len(BAD) + 2)]
    said = capsys.readouterr().out
    assert f"{len(BAD)} of {len(BAD) + 2} rows cannot be used: mine.jsonl, row 2: not JSON" in said
    assert "row 3: not an object" in said and f"and {len(BAD) - questions.SHOWN_BAD_ROWS} more" in said
    write("bad.jsonl", list(BAD))
    with pytest.raises(demo.UserError, match=r"DATASET=bad.jsonl: no row of bad.jsonl can be used"):
        demo.read_questions("bad.jsonl", "train")


def test_a_compute_score_of_ones_own_decides_what_a_ground_truth_is():
    demo.configure(["REWARD_FUNC=mine.py"])
    write("mine.jsonl", [ROWS[0] | {"ground_truth": "two"}])
    assert demo.read_questions("mine.jsonl", "train")[0][0]["answer"] == "two"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.jsonl", None, "No such file"),
        ("gone.parquet", None, "No such file"),
        ("mine.jsonl", b"\xff\xfe", "not UTF-8"),
        ("mine.json", b"[1, 2", "Expecting"),
        ("mine.parquet", b"PAR1 and no more", "arquet"),
        ("mine.json", b"[]", "no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(name, content, words):
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(demo.UserError) as error:
        demo.read_questions(name, "train")
    assert str(error.value).startswith(f"DATASET={name}: ") and words in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- several sources


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.jsonl", [("a.jsonl", 1.0)]),
        ("a.jsonl, b.json", [("a.jsonl", 1.0), ("b.json", 1.0)]),
        ("a.jsonl:0.7,b.jsonl:0.3", [("a.jsonl", 0.7), ("b.jsonl", 0.3)]),
        ("C:/a.jsonl:7,C:/b.jsonl:3", [("C:/a.jsonl", 7.0), ("C:/b.jsonl", 3.0)]),
    ],
)
def test_sources_and_weights(spec, expected):
    assert questions.parse_sources(spec) == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("a:0.7,b", "give every source a weight, or none"),
        ("a:0,b:1", "the weight of a is 0.0"),
        ("a:-1,b:1", "the weight of a is -1.0"),
        ("a:nan,b:1", "the weight of a is nan"),
        ("a:inf,b:1", "the weight of a is inf"),
        ("a,,b", "empty name"),
        ("a:1,a:2", "a stands in it twice"),
    ],
)
def test_faulty_sources_are_one_line_before_anything_is_read(spec, words):
    with pytest.raises(demo.UserError, match=rf"^DATASET={spec}: .*{words}"):
        demo.configure([f"DATASET={spec}", "TEST_DATASET=tiny_gsm8k"])


def test_a_test_set_has_no_weights_and_no_training_questions():
    with pytest.raises(demo.UserError, match=r"TEST_DATASET=a:2,b:1: .*leave the weights out"):
        demo.configure(["TEST_DATASET=a:2,b:1"])
    write("mine.jsonl", ROWS)
    with pytest.raises(demo.UserError, match=r"TEST_DATASET is empty and DATASET=tiny_gsm8k:1,mine.jsonl:1"):
        demo.configure(["DATASET=tiny_gsm8k:1,mine.jsonl:1"])


def rows_of(source, count, weight=1.0):
    return [{"prompts": f"{source}{i}", "source": source, "weight": str(weight)} for i in range(count)]


def test_one_source_is_shuffled_as_it_always_was():
    """The README's figures come from this order."""
    rows = rows_of("a", 40)
    demo.configure(["SEED=3", "BATCH_SIZE=16", "NUM_BATCHES=7"])
    plain = grain.MapDataset.source(rows).shuffle(seed=3).repeat().batch(16)[0:7]
    batches = demo.training_batches(rows, 0)
    assert len(batches) == 7
    for batch, expected in zip(batches, plain, strict=True):
        np.testing.assert_array_equal(batch["prompts"], expected["prompts"])


@pytest.mark.parametrize(("weights", "shares"), [((0.7, 0.3), (0.7, 0.3)), ((1, 9), (0.1, 0.9))])
def test_sources_are_mixed_by_their_weights(weights, shares):
    demo.configure(["BATCH_SIZE=10", "NUM_BATCHES=100"])
    rows = questions.interleave([rows_of("a", 50, weights[0]), rows_of("b", 30, weights[1])])
    batches = list(demo.training_batches(rows, 0))
    drawn = list(itertools.chain.from_iterable(batch["prompts"] for batch in batches))
    for name, share in zip("ab", shares):
        mine = [prompt for prompt in drawn if prompt[0] == name]
        # Grain rounds weights to hundredths of the smallest: 0.7 to 0.3 becomes 233 to 100
        assert len(mine) == pytest.approx(1000 * share, abs=1000 * 0.01)
        pool = {row["prompts"] for row in rows if row["source"] == name}
        whole = len(mine) - len(mine) % len(pool)
        for start in range(0, whole, len(pool)):  # each pass takes every question once, in another order
            assert set(mine[start : start + len(pool)]) == pool
        assert whole < 2 * len(pool) or mine[: len(pool)] != mine[len(pool) : 2 * len(pool)]
    # a resumed run goes on with the very batches
    for batch, expected in zip(demo.training_batches(rows, 40), batches[40:], strict=True):
        np.testing.assert_array_equal(batch["prompts"], expected["prompts"])


def test_a_source_keeps_its_weight_when_its_first_question_is_left_out():
    write("a.jsonl", [ROWS[0], ROWS[1]])
    write("b.jsonl", [ROWS[1]])
    demo.configure(["DATASET=a.jsonl:9,b.jsonl:1", "TEST_DATASET=tiny_gsm8k", "BATCH_SIZE=100"])
    rows = [row | {"prompts": row["source"]} for row in demo.read_questions(demo.DATASET, "train")[0]]
    assert [row["source"] for row in rows] == ["a.jsonl", "b.jsonl", "a.jsonl"]
    for kept in (rows, rows[1:]):
        drawn = demo.training_batches(kept, 0)[0]
        assert list(drawn["prompts"]).count("a.jsonl") == 90


def test_the_top_of_a_mixed_test_set_holds_every_source():
    demo.configure(["DATASET=examples/one_step:0.3,examples/two_step:0.7"])
    rows, source = demo.read_questions(demo.DATASET, "test")
    assert len(rows) == 256 and source.count("test.jsonl") == 2
    for n in (2, 10, 64):
        assert [row["data_source"] for row in rows[:n]].count("gsm8k") == n / 2
    assert questions.interleave([[1, 2, 3], [4]]) == [1, 4, 2, 3]


def test_a_source_whose_questions_are_all_too_long_is_named():
    demo.configure(["MAX_PROMPT_LENGTH=20"])  # two-step problems take at least 22 tokens
    demo.RUN_DIR = "."
    tokenizer = demo.load_tokenizer(demo.HERE / "tiny_llama")
    rows, source = demo.read_questions("examples/one_step,examples/two_step", "test")
    with pytest.raises(demo.UserError, match=r"MAX_PROMPT_LENGTH=20: no question of .*two_step/test.jsonl"):
        demo.make_prompts(tokenizer, rows, source)
    assert "two_step/test.jsonl" in Path("too_long.csv").read_text()


# ---------------------------------------------------------------- which rewards grade them


def chosen(*rows):
    return demo.choose_rewards(
        [{"source": "mine.jsonl", "line": "7"} | questions.to_question(row) for row in rows]
    )


def test_the_rewards_follow_the_data():
    gsm8k = {"question": "?", "answer": "#### 2"}
    assert ",".join(chosen(gsm8k)) == (
        "match_format_exactly,match_format_approximately,check_answer,check_numbers"
    )
    demo.configure([])
    assert chosen(gsm8k, ROWS[0]) == ["compute_score"]
    demo.configure(["REWARDS=check_answer"])
    assert chosen(gsm8k, ROWS[0]) == ["check_answer"]


def test_an_unknown_data_source_is_an_error_that_lists_the_known_ones():
    with pytest.raises(demo.UserError) as error:
        chosen(ROWS[0], ROWS[0] | {"data_source": "maths"})
    known = "gsm8k, math_reasoning, math, code, code_generation, qa, trivia, classification"
    assert "mine.jsonl, row 7: data_source 'maths'" in str(error.value) and known in str(error.value)


def test_a_number_reward_for_texts_is_refused():
    demo.configure(["REWARDS=check_answer,match_format_exactly"])
    chosen(ROWS[0] | {"ground_truth": "0"})
    with pytest.raises(
        demo.UserError, match=r"the answer in mine.jsonl, row 7 is 'Paris'; leave REWARDS empty"
    ):
        chosen(ROWS[0] | {"ground_truth": "Paris", "data_source": "qa"})


# ---------------------------------------------------------------- the examples, and the README's commands


def test_the_examples_are_what_their_script_makes(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_examples

    files = make_examples.make_data()
    assert {p.relative_to(EXAMPLES).as_posix() for p in EXAMPLES.glob("*/*.json*")} == set(files)
    for name, text in files.items():
        assert (EXAMPLES / name).read_text() == text, name
    make_examples.make_think_model(Path("runs/tiny_think"))
    think, plain = (demo.load_tokenizer(p) for p in (Path("runs/tiny_think"), demo.HERE / "tiny_llama"))
    text = "<reasoning>2+3=5</reasoning><answer>5</answer>"
    assert think.encode(text.replace("reasoning", "think")) == plain.encode(text)
    assert think.decode(plain.encode(text)) == text.replace("reasoning", "think")
    weights = [p / "model.safetensors" for p in (Path("runs/tiny_think"), demo.HERE / "tiny_llama")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_prompt_asks_for_the_tags_that_are_rewarded():
    tokenizer = demo.load_tokenizer(demo.HERE / "tiny_llama")
    template = "TEMPLATE={system_prompt} {question}"
    demo.configure([template])
    assert "between <reasoning> and </reasoning>" in demo.to_prompt(tokenizer, "?")
    demo.configure([template, "REWARDS=correctness_reward,mark_reward"])
    prompt = demo.to_prompt(tokenizer, "?")
    assert "between <think> and </think>" in prompt and "reasoning>" not in prompt
    with pytest.raises(demo.UserError, match="mark_reward wants <think>, match_format_"):
        demo.configure(["REWARDS=mark_reward,match_format_exactly"])


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """The three runs are one program: compiled for the first, read from the disk by the others."""
    compilation_cache.set_cache_dir(str(tmp_path_factory.mktemp("programs")))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


SHORT = ["NUM_BATCHES=2", "BATCH_SIZE=4", "NUM_GENERATIONS=4", "NUM_TEST_QUESTIONS=16", "RUN_DIR=run"]


def run(*arguments):
    demo.run([*arguments, *SHORT])
    return json.loads(Path("run/result.json").read_text()), Path("run/report.md").read_text()


def test_own_data_with_an_own_reward_file_runs_to_the_end(compile_cache):
    shutil.copy(EXAMPLES / "my_reward.py", "mine.py")
    result, report = run(
        "DATASET=examples/word_problems", "REWARD_FUNC=mine.py", "REWARDS=compute_score,few_tokens"
    )
    before = result["before"]
    # a right answer scores 0.25, 0.5 or 1; what is right in the report scores 1
    assert before["answer_accuracy"] <= before["mean_score"] <= 1
    assert "| mean score |" in report and "| two_step |" in report
    assert sum(part["questions"] for part in before["by_data_source"].values()) == 16


def test_two_data_sets_run_to_the_end_and_the_report_is_split(compile_cache):
    result, report = run(
        "DATASET=examples/one_step:0.3,examples/two_step:0.7", "REWARDS=compute_score,match_format_exactly"
    )
    parts = result["after"]["by_data_source"]
    assert set(parts) == {"gsm8k", "math_reasoning"} and parts["gsm8k"]["questions"] == 8
    whole = (parts["gsm8k"]["answer_accuracy"] + parts["math_reasoning"]["answer_accuracy"]) / 2
    assert result["after"]["answer_accuracy"] == pytest.approx(whole)
    assert "| data_source | questions | answers right | format right |" in report


def test_think_tags_run_to_the_end(compile_cache, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_examples

    make_examples.make_think_model(Path("think"))
    rewards = "REWARDS=correctness_reward,digit_reward,hard_format_reward,mark_reward"
    result, report = run("MODEL=think", rewards)
    assert result["before"]["format_accuracy"] > 0  # 50 % in the long run; 0 if <reasoning> were looked for
    assert "<think>" in report and "by_data_source" not in result["before"]


@pytest.mark.parametrize("language", ["README.md", "README_ch.md"])
def test_the_readmes_table_is_the_committed_csv(language):
    with open(demo.HERE / "assets" / "own_tasks.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["command"] for row in rows}) == 4  # LoRA's, too
    text = (demo.HERE / language).read_text()
    for row in rows:
        cells = [
            f"{100 * float(row['before_' + key]):.1f} % → {100 * float(row['after_' + key]):.1f} %"
            for key in ("answer_accuracy", "format_accuracy", "greedy_answer_accuracy")
            if row["before_" + key]
        ]
        assert row["command"] in text and f"| {row['questions']} | {' | '.join(cells)} |" in text
