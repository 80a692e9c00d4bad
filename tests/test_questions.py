"""Questions: all columns and file types, several sources mixed, bad rows counted and named."""

import datetime
import decimal
import functools
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import grain
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import reward_func
from model import llama
from run import checks
from settings import HERE, UserError
from task import prompts, questions, run_grader, task_rewards

DEEP = "[" * 100_000
ROWS = [
    {
        "prompt": "1 + 1?",
        "ground_truth": "2",
        "data_source": "math_reasoning",
        "extra_info": {"level": 1},
    },
    {"prompt": "1 + 2?", "ground_truth": "3", "data_source": "gsm8k", "extra_info": None},
]
READ = [  # the questions that are read of ROWS
    {
        "question": "1 + 1?",
        "answer": "2",
        "data_source": "math_reasoning",
        "extra_info": '{"level": 1}',
        "line": "1",
        "weight": "1.0",
    },
    {
        "question": "1 + 2?",
        "answer": "3",
        "data_source": "gsm8k",
        "extra_info": "",
        "line": "2",
        "weight": "1.0",
    },
]
pytestmark = pytest.mark.usefixtures("empty_folder")
read = functools.partial(questions.read_questions, fault=task_rewards.ground_truth_fault)


def refused(words, function, *arguments, **named):
    """It raises UserError, one line that begins with these words."""
    with pytest.raises(UserError, match=f"^{words}") as error:
        function(*arguments, **named)
    assert "\n" not in str(error.value)


def write(path, rows):
    """Rows as a file of the kind that its name says; a text instead of a row is a broken line."""
    path = Path(path)
    if path.suffix == ".parquet":
        columns = dict.fromkeys(name for row in rows for name in row)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([columns | row for row in rows]), path
        )
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_questions(kind):
    """In Parquet a row without the column has None in it."""
    plain = {"question": "1 + 1?", "answer": "1+1=2\n#### 2"}
    rows, source = read(
        write(f"mine.{kind}", [*ROWS, plain | {"data_source": "math"}, plain]), "train"
    )
    assert source == f"mine.{kind}"
    assert [(row["data_source"], row["answer"]) for row in rows[2:]] == [
        ("math", "2"),
        ("gsm8k", "2"),
    ]
    assert rows[:2] == [question | {"source": source} for question in READ]


def test_a_folder_has_a_file_for_each_split_and_may_be_called_gsm8k():
    Path("gsm8k").mkdir()
    write("gsm8k/train.parquet", ROWS)
    write("gsm8k/test.json", ROWS[:1])
    assert len(read("gsm8k", "train")[0]) == 2
    assert read("gsm8k", "test")[1] == "gsm8k/test.json"


def asks(rows):
    return [row["question"] for row in rows]


def test_held_out_questions_are_the_validation_file_or_drawn_from_the_training_questions():
    for name, count in {"one": 40, "two": 30}.items():
        Path(name).mkdir()
        rows = [{"question": f"{name} {i}", "answer": "#### 1"} for i in range(count)]
        write(f"{name}/train.jsonl", rows)
    write("one/validation.jsonl", [{"question": f"held {i}", "answer": "#### 1"} for i in range(9)])
    write("one/other.jsonl", rows)
    c = SimpleNamespace(
        TEST_DATASET="one/other.jsonl", BAD_ROWS="refuse", REWARD_FUNC="", EVAL_EVERY=1
    )
    c.DATASET = "one,two"
    data = questions.read_data(c)
    (train, _), (validation, source) = data["train"], data["validation"]
    assert asks(validation) == [f"held {i}" for i in range(9)] and source == "one/validation.jsonl"
    held, left, words = questions.hold_out(train, validation, 8)
    # as many of each; the second has no such file, and gives a tenth at most
    assert asks(held)[::2] == ["held 0", "held 1", "held 2", "held 3"]
    assert {question.split()[0] for question in asks(held)[1::2]} == {"two"}
    assert words == "one/validation.jsonl, 3 of two/train.jsonl, not trained on"
    two, rest = ([a for a in asks(part) if "two" in a] for part in (train, left))
    assert rest == [a for a in two if a not in asks(held)]  # in the order of the data set
    assert len(left) == 67 and questions.hold_out(train, validation, 8) == (held, left, words)
    for c.DATASET in ("one/other.jsonl", "two/train.jsonl"):
        data = questions.read_data(c)
        assert data["validation"] == ([], "")
    alone, _ = data["train"]
    assert asks(questions.hold_out(alone[:9], [], 8)[0]) == []  # too few to give any away


@pytest.mark.parametrize("alternates", [False, True])
def test_a_held_out_set_has_every_kind_of_question_and_none_that_is_trained_on(alternates):
    """Ten kinds of 50 questions, sorted by class or in a pattern; each is there twice, in other
    letters.
    """
    asked = [(kind, i) for i in range(50) for kind in range(10)]
    texts = [f"{kind} of {i}" for kind, i in (asked if alternates else sorted(asked))]
    rows = [
        {"question": text, "source": "mine.jsonl"} for t in texts for text in (t, f" {t.upper()}  ")
    ]
    held, left, _ = questions.hold_out(rows, [], 100)
    names = [{question.strip().lower() for question in asks(part)} for part in (held, left)]
    assert len(held) == 100 and len(names[0]) == 50 and not names[0] & names[1]
    counts = [sum(name.startswith(f"{kind} ") for name in names[0]) for kind in range(10)]
    # a fair draw of 50 misses a kind with probability 0.04; the seed is fixed
    assert min(counts) >= 1


@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize("second", [range(60, 0, -1), range(1, 31), range(31, 91)])
def test_what_is_held_out_of_one_source_is_trained_on_in_none(second, count):
    """The other source has the same questions, half of them, or also others; in other letters."""
    rows = [{"question": f"Q {i}", "source": "a.jsonl"} for i in range(1, 61)]
    rows += [{"question": f" q  {i} ", "source": "b.jsonl"} for i in second]
    held, left, words = questions.hold_out(rows, [], count)
    keys = [{questions.question_key(row["question"]) for row in part} for part in (held, left)]
    assert len(held) == len(keys[0]) >= count // 2 and not keys[0] & keys[1]
    for source in ("a.jsonl", "b.jsonl"):  # a tenth of a source at most
        had, has = (sum(row["source"] == source for row in part) for part in (rows, left))
        assert 0 <= had - has <= had // 10
        asked = sum(row["source"] == source for row in held)
        assert f"{asked} of {source}, not trained on" in words


def test_the_overlap_of_two_sets_is_counted_whatever_the_case_and_blanks(capsys):
    rows = {
        use: [{"question": text}] for use, text in (("train", "How  Many?"), ("test", "how many? "))
    }
    assert questions.overlap(rows) == [("test", "train", 1, 1)]
    questions.print_overlap(rows)
    assert "note: 1 of 1 test questions are training questions, too" in capsys.readouterr().out


TWO_ANSWERS = [  # a row with two right answers, and what is said
    ('{"question": "q", "answer": "#### 7", "answer": "#### 8"}', "'answer' is given twice"),
    ('{"question": "q", "answer": "#### 7", "ground_truth": "8"}', "two right answers"),
    ('{"question": "q", "answer": "#### 7\\n#### 8"}', "two right answers"),
    (
        '{"prompt": "q", "ground_truth": "8", "answer": "#### 7", "data_source": "gsm8k"}',
        "two right",
    ),
    ('{"question": "q", "answer": "#### 8", "extra_info": {"a": 1, "a": 2}}', "'a' is given twice"),
]


@pytest.mark.parametrize(("line", "words"), TWO_ANSWERS)
def test_a_row_has_one_right_answer(line, words):
    same = '{"question": "q", "answer": "#### Step 1 #### 7,000 #### 7000", "ground_truth": 7000.0}'
    Path("mine.jsonl").write_text(same)
    assert read("mine.jsonl", "train")[0][0]["answer"] == "7000"
    Path("mine.jsonl").write_text(same + "\n" + line)
    with pytest.raises(UserError, match=rf"mine.jsonl, row 2: .*{words}"):
        read("mine.jsonl", "train")
    Path("mine.json").write_text(f"[{same}, {line}]")
    with pytest.raises(UserError, match=words):
        read("mine.json", "train")


def test_lines_are_counted_as_an_editor_counts_them():
    """A byte-order mark, empty lines, Windows' line ends, and U+2028 inside a text, which ends no
    line.
    """
    first = json.dumps(ROWS[0] | {"prompt": "one\u2028two"}, ensure_ascii=False)
    text = "\ufeff" + first + "\r\n\r\n" + json.dumps(ROWS[1]) + "\r\n"
    Path("mine.jsonl").write_bytes(text.encode())
    rows, _ = read("mine.jsonl", "train")
    assert [row["line"] for row in rows] == ["1", "3"] and rows[0]["question"] == "one\u2028two"
    Path("mine.json").write_text(f"\ufeff\r\n [{first}]", encoding="utf-8")
    assert read("mine.json", "train")[0][0]["question"] == "one\u2028two"


@pytest.mark.parametrize(
    ("ground_truth", "text"),
    [
        (42, "42"),
        (42.0, "42"),
        (0.5, "0.5"),
        (["a", "b"], '["a", "b"]'),
        (["a", 1.0], '["a", 1]'),
        ({"in": 1}, '{"in": 1}'),
        ("é", "é"),
        (True, "true"),
        (float("inf"), "Infinity"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (b"Paris", "Paris"),
        (decimal.Decimal("3.00"), "3"),
        (["Paris", None], '["Paris", null]'),
    ],
)
def test_a_ground_truth_need_not_be_a_text(ground_truth, text):
    assert questions.to_question(ROWS[0] | {"ground_truth": ground_truth})["answer"] == text


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    """tensorflow-datasets' default, which it takes from TFDS_DATA_DIR when it is imported; and no
    network.
    """
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    huggingface_hub.close_session()  # a session reads the proxy when it is made
    yield tmp_path / "tfds"
    huggingface_hub.close_session()


def test_gsm8k_through_tensorflow_datasets(data_dir):
    """The stock data source reads what a builder prepared from local files: no network."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.text.gsm8k import gsm8k

    local = HERE / "tiny_gsm8k" / "test.jsonl"
    rows = [json.loads(line) for line in local.read_text().splitlines()]
    with tfds.core.registered.skip_registration():

        class Gsm8k(gsm8k.Gsm8k):
            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(local) for split in ("train", "test")}

    Gsm8k(data_dir=data_dir, file_format="array_record").download_and_prepare()
    prepared, source = read("gsm8k", "test")
    assert "tensorflow-datasets" in source
    assert sorted(q["question"] for q in prepared) == sorted(row["question"] for row in rows)
    answers = {row["question"]: row["answer"].split("#### ")[1] for row in rows}
    assert {q["question"]: q["answer"] for q in prepared} == answers


def test_gsm8k_without_a_network_is_refused(data_dir):
    with pytest.raises(
        UserError, match=rf"^TEST_DATASET=gsm8k: no network, .* {data_dir}; .*TFDS_DATA_DIR"
    ):
        read("gsm8k", "train", constant="TEST_DATASET")


def test_inputs_may_have_an_answer():
    rows = [ROWS[0], {"prompt": "1 + 3?"}, {"question": "?", "answer": "2 * 2 = 4\n#### 4"}]
    columns = dict.fromkeys(
        ("prompt", "question", "answer", "ground_truth", "data_source", "extra_info")
    )
    name = write("in.parquet", [columns | row for row in rows])
    (first, second, third), _ = read(name, "test", constant="INPUT", optional=True)
    assert first == READ[0] | {"source": name, "row": columns | ROWS[0]}
    assert (second["question"], second["answer"], second["data_source"]) == ("1 + 3?", None, None)
    assert second["extra_info"] == "" and third["answer"] == "4" and third["line"] == "3"


BAD = {  # a line of a file, and why it is refused
    "{": "not JSON: Expecting",
    DEEP: "not JSON: maximum recursion depth exceeded",
    '{"question": "\\ud800?", "answer": "#### 1"}': "surrogates not allowed",
    '{"question": "?", "answer": "#### 1", "extra_info": {"\\udfff": 1}}': "surrogates not allowed",
    '{"question": "", "answer": "#### 1"}': "question is '', not a text",
    '{"question": null, "answer": "#### 1"}': "no column 'question' (it has 'answer')",
    '{"ground_truth": "1", "data_source": "qa"}': "no column 'prompt'",
    "[1]": "not an object",
    '{"prompt": "?", "ground_truth": "1"}': (
        "no column 'data_source' (it has 'prompt', 'ground_truth')"
    ),
    '{"prompt": "?", "data_source": "math"}': "no column 'ground_truth'",
    '{"question": "?", "ground_truth": "1"}': "no column 'answer'",
    '{"text": "?"}': "no column 'question'",
    '{"prompt": [{"role": "user"}], "ground_truth": "1", "data_source": "qa"}': "prompt is [{",
    '{"prompt": " ", "ground_truth": "1", "data_source": "qa"}': "prompt is ' ', not a text",
    '{"prompt": "?", "ground_truth": "1", "data_source": ""}': "data_source is '', not a text",
    '{"prompt": "?", "ground_truth": "", "data_source": "qa"}': "ground_truth is '', not a text",
    '{"prompt": "?", "ground_truth": null, "data_source": "qa"}': "no column 'ground_truth'",
    '{"prompt": "?", "ground_truth": NaN, "data_source": "qa"}': "no column 'ground_truth'",
    '{"prompt": "?", "ground_truth": "two", "data_source": "gsm8k"}': (
        "'two' is not paid when it is given as the answer"
    ),
    '{"prompt": "?", "ground_truth": {"target": ["Paris"]}, "data_source": "qa"}': (
        "needs a text, or a list of texts"
    ),
    '{"question": "?", "answer": "5"}': "does not end in '#### N'",
    '{"question": "?", "answer": 5}': "answer is 5, not a text",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_row_stops_the_run_and_is_named_with_file_line_and_reason(line):
    write("mine.jsonl", [ROWS[0], "", line, ROWS[1]])
    said = "DATASET=mine.jsonl: 1 of 3 rows cannot be used: mine.jsonl, row 3: "
    refused(f"{said}.*{re.escape(BAD[line])}.*set BAD_ROWS=skip$", read, "mine.jsonl", "train")


def test_skipped_rows_are_counted_and_named(capsys):
    write("mine.jsonl", [ROWS[0], *BAD, ROWS[1]])
    rows, _ = read("mine.jsonl", "train", bad_rows="skip")
    assert [row["line"] for row in rows] == ["1", str(len(BAD) + 2)]
    said = capsys.readouterr().out
    assert (
        f"{len(BAD)} of {len(BAD) + 2} rows cannot be used: mine.jsonl, row 2: not JSON: " in said
    )
    assert "row 3: not JSON" in said and f"and {len(BAD) - questions.SHOWN_BAD_ROWS} more" in said
    write("bad.jsonl", list(BAD))
    refused(
        "DATASET=bad.jsonl: bad.jsonl has no rows to use",
        read,
        "bad.jsonl",
        "train",
        bad_rows="skip",
    )


@pytest.mark.parametrize(
    ("constant", "name", "content", "words"),
    [  # content: the file's bytes as Latin-1; "": no file
        ("INPUT", "blank.jsonl", '{"question": " \\n"}', "row 1: question is ' \\n', not a text"),
        (
            "INPUT",
            "task.jsonl",
            '{"question": "?", "data_source": 7}',
            "row 1: data_source is 7, not a text",
        ),
        (
            "INPUT",
            "truth.jsonl",
            '{"prompt": "?", "ground_truth": "two", "data_source": "gsm8k"}',
            "row 1: ground_truth 'two' is not paid",
        ),
        ("INPUT", "nothing.jsonl", "\n", "has no rows to use"),
        ("DATASET", "mine.jsonl", "\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
        ("DATASET", "mine.json", "[1, 2", "Expecting"),
        ("DATASET", "mine.parquet", "PAR1 and no more", "arquet"),
        ("DATASET", "mine.json", "[]", "no rows to use"),
        ("DATASET", "mine.json", DEEP, "recursion"),
        ("DATASET", "gone.jsonl", "", "No such file"),
        ("DATASET", "gone.parquet", "", "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(constant, name, content, words):
    if content:
        Path(name).write_bytes(content.encode("latin-1"))
    given = dict(constant=constant, optional=constant == "INPUT")
    refused(f"{constant}={name}: .*{re.escape(words)}", read, name, "test", **given)


@pytest.mark.parametrize(
    ("train", "test"),
    [  # DATASET, and a TEST_DATASET with the same file
        ("mine.jsonl", "mine.jsonl"),
        ("tiny_gsm8k,mine.jsonl", "./mine.jsonl"),
        ("mine.jsonl", "link.jsonl"),
        ("folder", "folder/train.jsonl"),
        ("mine.jsonl:2,tiny_gsm8k:1", "tiny_gsm8k,mine.jsonl"),
    ],
)
def test_the_file_that_is_trained_on_is_no_test(train, test):
    write("mine.jsonl", ROWS)
    Path("link.jsonl").symlink_to("mine.jsonl")
    Path("folder").mkdir()
    write("folder/train.jsonl", ROWS)
    said = rf"TEST_DATASET={test}: .*\(DATASET={train}\); "
    refused(said, check_paths, DATASET=train, TEST_DATASET=test)
    check_paths(DATASET="folder", TEST_DATASET="mine.jsonl")
    check_paths(DATASET="tiny_gsm8k", TEST_DATASET="tiny_gsm8k")  # its other file


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.jsonl", [["a.jsonl", 1.0]]),
        ("a.jsonl, b.json", [["a.jsonl", 1.0], ["b.json", 1.0]]),
        ("a.jsonl:0.7,b.jsonl:0.3", [["a.jsonl", 0.7], ["b.jsonl", 0.3]]),
    ],
)
def test_sources_and_weights(spec, expected):
    assert questions.parse_sources(spec) == list(map(tuple, expected))


def check_paths(**changed):
    names = ("MODEL", "DATASET", "TEST_DATASET", "REWARD_FUNC", "ENVIRONMENT", "RUN_DIR")
    checks.paths(SimpleNamespace(**dict.fromkeys(names, "") | {"DATASET": "tiny_gsm8k"} | changed))


def test_one_source_is_shuffled_as_it_always_was():
    """The README's figures come from this order."""
    rows = [{"prompts": f"a{i}", "source": "a", "weight": "1.0"} for i in range(40)]
    plain = grain.MapDataset.source(rows).shuffle(seed=3).repeat().batch(16)[0:7]
    batches = questions.mixed_batches(rows, 3, 16)[0:7]
    assert len(batches) == 7
    for batch, expected in zip(batches, plain, strict=True):
        np.testing.assert_array_equal(batch["prompts"], expected["prompts"])


@pytest.mark.parametrize(("weights", "shares"), [((0.7, 0.3), (0.7, 0.3)), ((1, 9), (0.1, 0.9))])
def test_sources_are_mixed_by_their_weights(weights, shares):
    """Also if the first question of one is too long and left out."""
    for name, count in (("a", 50), ("b", 30)):
        write(f"{name}.jsonl", [ROWS[0] | {"prompt": f"{name}{i}"} for i in range(count)])
    rows, _ = read("a.jsonl:{},b.jsonl:{}".format(*weights), "train")
    assert asks(rows[:3]) == ["a0", "b0", "a1"]
    rows = rows[1:]
    batches = list(questions.mixed_batches(rows, 0, 10)[0:100])
    drawn = list(itertools.chain.from_iterable(batch["question"] for batch in batches))
    for name, share in zip("ab", shares):
        mine = [question for question in drawn if question[0] == name]
        # Grain rounds weights to hundredths of the smallest: 0.7 to 0.3 becomes 233 to 100
        assert len(mine) == pytest.approx(1000 * share, abs=1000 * 0.01)
        pool = {question for question in asks(rows) if question[0] == name}
        whole = len(mine) - len(mine) % len(pool)
        # each pass takes every question once, in another order
        for start in range(0, whole, len(pool)):
            assert set(mine[start : start + len(pool)]) == pool
        assert whole < 2 * len(pool) or mine[: len(pool)] != mine[len(pool) : 2 * len(pool)]
    # a resumed run goes on with the very batches
    for batch, expected in zip(
        questions.mixed_batches(rows, 0, 10)[40:100], batches[40:], strict=True
    ):
        np.testing.assert_array_equal(batch["question"], expected["question"])


def test_a_source_whose_questions_are_all_too_long_is_named(capsys):
    tokenizer = llama.load_tokenizer(HERE / "tiny_llama")
    rows, _ = read("examples/one_step,examples/two_step", "test")
    c = SimpleNamespace(SYSTEM_PROMPT="", TEMPLATE="{question}", MAX_PROMPT_LENGTH=20)
    made = functools.partial(prompts.make_prompts, c, rows, "both", tokenizer, False)
    refused(
        "MAX_PROMPT_LENGTH=20: no question of .*two_step/test.jsonl.* the shortest takes 24 ",
        made,
        None,
    )
    _, too_long = prompts.with_prompts(c, rows, tokenizer, False)
    said = f"both: {len(too_long):,} of {len(rows):,} questions are longer"
    assert capsys.readouterr().out.startswith(said)
    c.MAX_PROMPT_LENGTH = 28
    kept = made(None)
    assert len(kept) == len(rows) and kept[0]["question"] in kept[0]["prompts"]


def chosen(*rows, rewards=""):
    data = [{"source": "mine.jsonl", "line": "7"} | questions.to_question(row) for row in rows]
    return run_grader.make_grader(rewards, "", reward_func, data).names


def test_the_rewards_follow_the_data():
    gsm8k = {"question": "?", "answer": "#### 2"}
    course = "match_format_exactly,match_format_approximately,check_answer,check_numbers"
    assert ",".join(chosen(gsm8k)) == course
    assert chosen(gsm8k, ROWS[0]) == ("compute_score",)
    assert chosen(gsm8k, ROWS[0], rewards="check_answer") == ("check_answer",)
    said = r"mine.jsonl, row 7: data_source 'maths' is none .*\(gsm8k, math_reasoning, "
    refused(said, chosen, ROWS[0], ROWS[0] | {"data_source": "maths"})
    chosen(ROWS[0] | {"ground_truth": "0"}, rewards="check_answer")
    paris = ROWS[0] | {"ground_truth": "Paris", "data_source": "qa"}
    said = ".*the answer in mine.jsonl, row 7 is 'Paris'; leave REWARDS empty"
    refused(said, chosen, paris, rewards="check_answer")


@pytest.mark.parametrize(
    ("chat_template", "words"),
    [  # none of them asks the question
        ("{{ raise_exception('no system role') }}", "fails (TemplateError: no system role)"),
        ("{{ messages[3]['content'] + 1 }}", "fails (UndefinedError: "),
        ("{% for x in", "fails (TemplateSyntaxError: "),
        ("{{ 1 / 0 }}", "fails (ZeroDivisionError: division by zero)"),
        ("", "leaves the question out"),
        ("How are you?", "leaves the question out"),
    ],
)
def test_a_chat_template_that_does_not_ask_the_question_is_refused(chat_template, words):
    changed = llama.load_tokenizer(HERE / "tiny_llama")
    changed.chat_template = "<{{ messages[0]['content'] | trim }}>"  # it may strip the message
    assert (
        prompts.to_prompt(changed, " 2 + 2?\n", template="{question}", system_prompt="")
        == "<2 + 2?>"
    )
    changed.chat_template = chat_template
    said = (
        f"MODEL={HERE / 'tiny_llama'}: its chat template {re.escape(words)}.*or take another model$"
    )
    refused(said, prompts.to_prompt, changed, "2 + 2?", template="{question}", system_prompt="")
