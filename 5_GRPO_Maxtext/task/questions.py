"""Reads questions from JSON, JSON lines, Parquet or tensorflow-datasets, and mixes batches.

A row is a question and its right answer, with either set of columns; the first is GSM8K's:

    {"question": "...", "answer": "16 - 7 = 9\\n#### 9"}
    {"prompt": "...", "ground_truth": "9", "data_source": "math_reasoning", "extra_info": {...}}

`data_source` names the task and so selects the grader (see task_rewards.py). With GSM8K's columns
it's optional and defaults to "gsm8k". `extra_info` is optional and is passed to the reward
unchanged.

A DATASET is one source, or several with their shares of the training questions:

    DATASET=tiny_gsm8k                     a folder with train.jsonl, test.jsonl (validation.jsonl)
    DATASET=gsm8k                          your folder of that name, else from tensorflow-datasets
    DATASET=mine.parquet
    DATASET=sums.jsonl:0.7,code.jsonl:0.3  7 questions of the first to 3 of the second
"""

import collections
import decimal
import functools
import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from constants import RunConstants
from plain_text import escape_controls
from settings import UserError, find_path, reachable
from task.grading import extract_hash_answer, parse_number
from task.task_rewards import ground_truth_fault

EPOCHS = 10**6  # of each source; an infinite one would have a length that len() can't return
NAMES = {
    "train": "training questions",
    "validation": "held-out questions",
    "test": "test questions",
}
# columns of a row that a grader gets along with the answer
GRADED = ("answer", "data_source", "extra_info")
SHOWN_BAD_ROWS = 5  # in a message; the others are only counted


class OutOfReach(UserError):
    """A data set that another machine may be able to reach; a dry run says so and goes on."""


# %% Sources ---------------------------------------------------------------------------------------
def parse_sources(spec: str, constant: str = "DATASET") -> list[tuple[str, float]]:
    """(name, weight) of each source in `spec`, the value of `constant`: a.jsonl:0.7,b.jsonl:0.3.

    Give weights for all names or for none. They're relative: 7 and 3 mean the same as 0.7 and 0.3.
    """
    names, colons, texts = zip(*(part.strip().partition(":") for part in spec.split(",")))
    try:
        weights = [float(text) if colon else 1.0 for colon, text in zip(colons, texts)]
    except ValueError:
        weights = [math.nan]
    named_once = all(names) and len(set(names)) == len(names)
    if (
        not named_once
        or len(set(colons)) > 1
        or not all(0 < weight < math.inf for weight in weights)
    ):
        rule = (
            "name each source once, all of them with a weight above 0 or none: "
            "a.jsonl:0.7,b.jsonl:0.3"
        )
        raise UserError(f"{constant}={spec}: {rule}")
    return list(zip(names, weights))


# %% Files -----------------------------------------------------------------------------------------
def read_file(path: Path, constant: str = "DATASET") -> list[tuple[int, Any]]:
    """Rows of a JSON array, a JSON-lines or a Parquet file, which `constant` names, numbered from
    1.

    In a JSON-lines file that's the line number, counting empty lines, and a row is the line, still
    a text. UserError if the file can't be read at all.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return list(enumerate(pyarrow.parquet.ParquetFile(path).read().to_pylist(), start=1))
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
        if text.lstrip().startswith("["):
            return list(enumerate(parse_json(text), start=1))
    except (
        OSError,
        ValueError,
        NotImplementedError,
        RecursionError,
    ) as error:  # pyarrow's are such, too
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"{constant}={path}: {reason}; give a JSON, JSONL or Parquet file"
        ) from None
    # Not splitlines(): it also breaks at U+2028 and the like, which may occur inside a JSON string.
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def checked_text(row: dict[str, Any], column: str) -> str:
    """The text in a column of a row; ValueError if there's none."""
    if column not in row:
        raise ValueError(f"no column {column!r} (it has {', '.join(map(repr, row)) or 'none'})")
    if not isinstance(row[column], str) or not row[column].strip():
        raise ValueError(f"{column} is {row[column]!r:.40}, not a text")
    return row[column]


def as_json(value: Any) -> str:
    """A value as JSON, "" for None, so that columns of all sources are texts and stack into one
    batch.
    """
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def truth_text(value: Any) -> str:
    """A ground truth as text: bytes decoded, 3.0 as 3 (pandas turns integers into floats), lists as
    JSON.
    """

    def plain(value):
        if isinstance(value, list):
            return list(map(plain, value))
        if isinstance(value, (float, decimal.Decimal)) and float(value).is_integer():
            return int(value)
        return value.decode() if isinstance(value, bytes) else value

    value = plain(value)
    return as_json(value) if isinstance(value, (bool, int, float, list, dict)) else str(value)


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if a key is given twice, of which json would drop the first."""
    row = dict(pairs)
    if len(row) < len(pairs):
        [(key, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{key!r} is given twice in one object")
    return row


def parse_json(text: str) -> Any:
    """`json.loads`; ValueError also if an object has a key twice."""
    return json.loads(text, object_pairs_hook=refuse_duplicate_keys)


def to_question(row: Any, optional: bool = False) -> dict[str, Any]:
    """`question`, `answer` (the ground truth), `data_source` and `extra_info` (JSON, or empty), all
    texts.

    `row` has either set of columns; ValueError says what is wrong with it. If `optional`, the right
    answer and `data_source` are None where they're missing.
    """
    if not isinstance(row, dict):
        raise ValueError("not an object with columns")
    # ValueError: half a character, "\ud800"
    json.dumps(row, ensure_ascii=False, default=str).encode()
    # Without nulls and NaN, which Parquet has where a column is missing.
    row = {name: value for name, value in row.items() if value is not None and value == value}
    if "ground_truth" in row:
        row["ground_truth"] = truth_text(row["ground_truth"])
    asked, given = "question", "answer"
    if "question" not in row and row.keys() & {"prompt", "ground_truth"}:
        asked, given = "prompt", "ground_truth"
    question = checked_text(row, asked)
    answers = [extract_hash_answer(str(row.get("answer", ""))), row.get("ground_truth")]
    known = [answer for answer in answers if answer]
    if len(set(map(parse_number, known))) > 1:
        raise ValueError(f"two right answers: answer {known[0]!r}, ground_truth {known[1]!r:.40}")
    answer = next(iter(known if given == "answer" else reversed(known)), None)
    if not optional:
        checked_text(row, given)
        if answer is None:
            raise ValueError("the answer does not end in '#### N'")
        row = {"data_source": "gsm8k"} | row if given == "answer" else row
    task = None if optional and "data_source" not in row else checked_text(row, "data_source")
    extra_info = as_json(row.get("extra_info"))
    return {"question": question, "answer": answer, "data_source": task, "extra_info": extra_info}


def interleave(parts: Iterable[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Takes a row from each part in turn until all are used: the list's top has every source."""
    return [row for turn in itertools.zip_longest(*parts) for row in turn if row is not None]


def read_questions(
    dataset: str, split: str, *, constant="DATASET", bad_rows="refuse", fault=None, optional=False
) -> tuple[list[dict[str, str]], str]:
    """Reads the questions and right answers of a DATASET.

    Args:
        dataset: one or several sources; `constant` holds it.
        split: "train" or "test"; ignored for a single file.
        bad_rows: "refuse" raises if rows cannot be used; "skip" prints them and leaves them out.
        fault: (data_source, ground truth, extra_info) -> what is wrong, if anything; None accepts
            all.
        optional: whether right answers may be missing; a row then also has `row`, as the file has
            it.

    Returns:
        Rows as from `to_question`, with `source` (the file), its `weight` and `line`, all texts,
        with the sources interleaved; and the names of the sources.
    """
    parts, bad = {}, []
    for name, weight in parse_sources(dataset, constant):
        if name == "gsm8k" and not find_path(name).exists():
            rows, source = read_tfds_gsm8k(split, constant)
        else:
            source = str(source_file(name, split))
            rows = read_file(Path(source), constant)
        part = parts.setdefault(source, [])
        for number, row in rows:
            try:
                row = parse_json(row) if isinstance(row, str) else row
                question = to_question(row, optional)
                task, answer, extra_info = map(
                    question.get, ("data_source", "answer", "extra_info")
                )
                if reason := fault and task and answer and fault(task, answer, extra_info):
                    raise ValueError(reason)
            except (ValueError, RecursionError) as error:
                not_json = "not JSON: " * isinstance(error, (json.JSONDecodeError, RecursionError))
                bad.append(f"{source}, row {number}: {not_json}{error}")
            else:
                part.append(
                    question | {"source": source, "weight": str(weight), "line": str(number)}
                )
                part[-1] |= {"row": row} if optional else {}
    if bad:
        more = f"; and {len(bad) - SHOWN_BAD_ROWS:,} more" if len(bad) > SHOWN_BAD_ROWS else ""
        named = "; ".join(bad[:SHOWN_BAD_ROWS]) + more
        total = len(bad) + sum(map(len, parts.values()))
        described = f"{constant}={dataset}: {len(bad):,} of {total:,} rows cannot be used: {named}"
        if bad_rows == "refuse":
            raise UserError(f"{described}. Fix them" + ", or set BAD_ROWS=skip" * (not optional))
        print(escape_controls(f"{described}. Left out (BAD_ROWS=skip)"))
    for source, part in parts.items():
        if not part:
            raise UserError(
                f"{constant}={dataset}: {source} has no rows to use; give at least one question"
            )
    return interleave(parts.values()), ", ".join(parts)


def source_file(name: str, split: str) -> Path:
    """The file of a source: itself, or a folder's file for `split`."""
    path = find_path(name)
    files = [path / f"{split}.{kind}" for kind in ("jsonl", "json", "parquet")]
    return next(filter(Path.exists, files), files[0]) if path.is_dir() else path


def read_tfds_gsm8k(split: str, constant: str) -> tuple[list[tuple[int, Any]], str]:
    """GSM8K from tensorflow-datasets, which keeps it in TFDS_DATA_DIR."""
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text.gsm8k

    builder = tfds.builder("gsm8k", file_format="array_record")
    if not builder.data_path.exists():
        # tensorflow-datasets tries for over 200 s
        if not reachable("https://raw.githubusercontent.com"):
            raise OutOfReach(
                f"{constant}=gsm8k: no network, and nothing prepared in {builder.data_dir_root}; "
                "prepare it on a machine with a network and set TFDS_DATA_DIR, or give a JSON, "
                "JSONL or Parquet file"
            )
        builder.download_and_prepare()
    rows = [
        {name: value.decode() for name, value in row.items()}
        for row in builder.as_data_source(split)
    ]
    return list(enumerate(rows, start=1)), f"tensorflow-datasets gsm8k ({split})"


def question_key(text: str) -> str:
    """Equal for two questions that are the same but for case and blanks."""
    return " ".join(text.split()).casefold()


def overlap(rows: Mapping[str, Sequence[Mapping[str, str]]]) -> list[tuple[str, str, int, int]]:
    """The sets that share questions and should have none in common: their names, how many of the
    first are in the second, and how many the first has.
    """
    keys = {use: [question_key(row["question"]) for row in rows.get(use, ())] for use in NAMES}
    shared = []
    for use, other in (("test", "train"), ("validation", "train"), ("validation", "test")):
        known = set(keys[other])
        if count := sum(key in known for key in keys[use]):
            shared.append((use, other, count, len(keys[use])))
    return shared


def print_overlap(rows: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Prints how many questions two sets share that should have none in common."""
    for use, other, count, total in overlap(rows):
        some = f"{count:,} of {total:,} {NAMES[use]}"
        print(f"note: {some} are {NAMES[other]}, too, and flatter the model")


def validation_file(source: str) -> Path | None:
    """The file `validation.jsonl` (.json, .parquet) beside a source's `train.jsonl`; None without
    one.
    """
    file = source_file(str(Path(source).parent), "validation")
    return file if Path(source).stem == "train" and file.exists() else None


def read_data(c: RunConstants) -> dict[str, tuple[list[dict[str, str]], str]]:
    """What `read_questions` gives for `train`, for `test`, and for `validation`, asked during
    training.

    The last are those of each `validation_file` beside the training questions; [] and "" without
    one.
    """
    fault = None if c.REWARD_FUNC else ground_truth_fault
    read = functools.partial(read_questions, bad_rows=c.BAD_ROWS, fault=fault)
    train = read(c.DATASET, "train")
    test_constant = "TEST_DATASET" if c.TEST_DATASET else "DATASET"
    test = read(c.TEST_DATASET or c.DATASET, "test", constant=test_constant)
    files = [str(file) for file in map(validation_file, by_file(train[0])) if file and c.EVAL_EVERY]
    validation = read(",".join(files), "validation") if files else ([], "")
    return {"train": train, "test": test, "validation": validation}


def by_file(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """The rows of each source."""
    sources = dict.fromkeys(row["source"] for row in rows)
    return {source: [row for row in rows if row["source"] == source] for source in sources}


def hold_out(rows: list[dict[str, str]], validation: list[dict[str, str]], count: int):
    """Holds out `count` questions to ask during training, equally many from each source.

    A source without any in `validation`, from `read_data`, holds out some of its training questions
    `rows`, at most a tenth, sampled with a fixed seed. The same question (`question_key`) is held
    out of every source that has it.

    Returns:
        The held-out questions; the remaining training questions; and where the former came from, in
        words.
    """
    by_source, read = by_file(rows), by_file(validation)
    share = -(-count // len(by_source))
    most = {source: len(own) // 10 for source, own in by_source.items()}
    keys = {
        source: collections.Counter(question_key(row["question"]) for row in own)
        for source, own in by_source.items()
    }
    held_keys: set[str] = set()
    held, names = [], []
    for source, own in by_source.items():
        file = str(validation_file(source))
        if file in read:
            held.append(read[file][:share])
            names.append(file)
            continue
        mine, few = set(), share
        for key in random.Random(0).sample(list(keys[source]), len(keys[source])):
            fits = keys[source][key] <= few and key not in held_keys
            if fits and all(keys[name][key] <= most[name] for name in keys):
                mine.add(key)
                few -= keys[source][key]
                for name in keys:
                    most[name] -= keys[name][key]
        held_keys |= mine
        held.append([row for row in own if question_key(row["question"]) in mine])
        names.append(f"{len(held[-1]):,} of {source}, not trained on")
    left = [
        [row for row in own if question_key(row["question"]) not in held_keys]
        for own in by_source.values()
    ]
    return interleave(held)[:count], interleave(left), ", ".join(names)


# %% Batches ---------------------------------------------------------------------------------------
def mixed_batches(rows: list[dict[str, str]], seed: int, batch_size: int):
    """A grain.MapDataset of batches of questions, more than any run needs, with the sources mixed
    by weight.

    Each source is reshuffled every epoch. Grain interleaves the sources evenly: after any number of
    questions each has had its share, to within one question. A batch has each column of `rows` as
    an array of str [B].
    """
    import grain

    parts = by_file(rows).values()
    whole = map(grain.MapDataset.source, parts)
    sources = [part.shuffle(seed=seed + i).repeat(EPOCHS) for i, part in enumerate(whole)]
    return grain.MapDataset.mix(sources, [float(part[0]["weight"]) for part in parts]).batch(
        batch_size
    )
