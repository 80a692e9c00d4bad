"""Reading questions: JSON, JSON lines, Parquet or GSM8K, one source or several, bad rows counted.

A row is a question and its right answer, in either of two spellings:

    {"question": "...", "answer": "16 - 7 = 9\\n#### 9"}                                       GSM8K's columns
    {"prompt": "...", "ground_truth": "9", "data_source": "math_reasoning", "extra_info": {...}}

`data_source` names the task (it decides who grades, see task_rewards.py). GSM8K's columns may have one, too;
without it they are "gsm8k". `extra_info` is optional, and goes to the reward as it is.

A DATASET is one source or several, each with its share of the training questions:

    DATASET=tiny_gsm8k                       a folder with train.jsonl and test.jsonl
    DATASET=gsm8k                            tensorflow-datasets
    DATASET=mine.parquet
    DATASET=sums.jsonl:0.7,code.jsonl:0.3    7 questions of the first to 3 of the second
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import reward_func

SHOWN_BAD_ROWS = 5  # of a source, in a message; the rest is counted
Fault = Callable[[str, str], str | None]  # data_source, ground truth -> what is wrong with it


class BadRow(NamedTuple):
    """A row that cannot be used."""

    source: str
    row: int  # from 1; the line of the file, where it has one row a line
    reason: str


# %% Which sources ---------------------------------------------------------------------------------------
def parse_sources(spec: str, constant: str = "DATASET") -> list[tuple[str, float]]:
    """Names and weights of the sources in `DATASET=a.jsonl:0.7,b.jsonl:0.3`.

    Args:
        spec: names divided by commas; `:weight` after all of them, or after none (then they count the same).
        constant: whose value it is, for the messages.

    Returns:
        (name, weight) in the order given. The weights are relative: 7 and 3 do what 0.7 and 0.3 do.

    Raises:
        ValueError: an empty or repeated name, a weight that is not above 0, weights for some only.
    """
    sources, weighted = [], 0
    for part in spec.split(","):
        name, colon, text = part.strip().rpartition(":")
        try:
            weight = float(text) if colon else None
        except ValueError:  # a colon that belongs to the name
            weight = None
        if weight is None:
            name, weight = part.strip(), 1.0
        else:
            weighted += 1
        if not 0 < weight < math.inf:
            raise ValueError(f"{constant}={spec}: the weight of {name} is {weight}; use a number above 0")
        if not name or name in [other for other, _ in sources]:
            fault = f"{name} stands in it twice" if name else "it has an empty name"
            raise ValueError(f"{constant}={spec}: {fault}; write each file once: a.jsonl:0.7,b.jsonl:0.3")
        sources.append((name, weight))
    if weighted not in (0, len(sources)):
        raise ValueError(f"{constant}={spec}: give every source a weight, or none")
    return sources


# %% Files -----------------------------------------------------------------------------------------------
def read_file(path: Path, constant: str = "DATASET") -> list[tuple[int, Any]]:
    """Rows of a JSON array, a JSON-lines or a Parquet file, with their numbers from 1.

    In a JSON-lines file the number is the line's, empty lines counted. A line that is not JSON comes as the
    exception that says why: the caller counts it among the bad rows.

    Raises:
        ValueError: no such file, or one that cannot be read as a whole.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            with path.open("rb") as file:
                return list(enumerate(pyarrow.parquet.read_table(file).to_pylist(), start=1))
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte-order mark in front
        if text.lstrip().startswith("["):
            return list(enumerate(json.loads(text), start=1))
    except (OSError, ValueError) as error:  # pyarrow's errors and UnicodeDecodeError are ValueErrors
        if isinstance(error, UnicodeDecodeError):
            reason = "not UTF-8 text"
        else:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(
            f"{constant}={path}: {reason}; give 'gsm8k', or a JSON, JSONL or Parquet file"
        ) from None
    rows = []
    # Not splitlines(): it also breaks at U+2028 and the like, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except ValueError as error:
                rows.append((number, error))
    return rows


def to_question(row: Any) -> dict[str, str]:
    """The columns that the job uses, from a row in either spelling.

    Returns:
        `question`, `answer` (the ground truth; lists and objects as JSON), `data_source`, `extra_info` (JSON,
        or empty): plain texts all, so that rows of all sources stack into one batch.

    Raises:
        ValueError: what is wrong with the row.
    """
    if isinstance(row, Exception):
        raise ValueError(f"not JSON ({row})")
    if not isinstance(row, dict):
        raise ValueError("not an object with named columns")
    has = {name for name, value in row.items() if value is not None}  # Parquet fills what is missing
    gsm8k = "question" in has or not has & {"prompt", "ground_truth"}
    needed = ("question", "answer") if gsm8k else ("prompt", "ground_truth", "data_source")
    for column in needed:
        if column not in has:
            named = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"no column {column!r} (it has {named})")
    question, answer = row[needed[0]], row[needed[1]]
    data_source = row["data_source"] if "data_source" in has else "gsm8k"
    texts = {needed[0]: question, "data_source": data_source} | ({"answer": answer} if gsm8k else {})
    for column, value in texts.items():
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{column} is {value!r:.40}, not a text")
    if gsm8k:
        answer = reward_func.extract_hash_answer(answer)
        if answer is None:
            raise ValueError("the answer does not end in '#### N'")
    elif not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False, default=str)
    if not answer.strip():
        raise ValueError(f"{needed[1]} is empty")
    extra = row.get("extra_info")
    return {
        "question": question,
        "answer": answer,
        "data_source": data_source,
        "extra_info": "" if extra is None else json.dumps(extra, ensure_ascii=False, default=str),
    }


def to_questions(
    rows: list[tuple[int, Any]], source: str, fault: Fault
) -> tuple[list[dict[str, str]], list[BadRow]]:
    """Sorts numbered rows into questions and bad rows.

    Args:
        rows: from `read_file`.
        source: where they come from.
        fault: says what is wrong with a ground truth, or None.

    Returns:
        Questions as `to_question` makes them, with `source` and `line` added; and the bad rows.
    """
    good, bad = [], []
    for number, row in rows:
        try:
            question = to_question(row)
            reason = fault(question["data_source"], question["answer"])
        except ValueError as error:
            reason = str(error)
        if reason:
            bad.append(BadRow(source, number, reason))
        else:
            good.append(question | {"source": source, "line": str(number)})
    return good, bad


def describe_bad_rows(bad: list[BadRow], total: int) -> str:
    """One line: how many of `total` rows are bad, and the first ones with file, row and reason."""
    shown, last = [], None
    for row in bad[:SHOWN_BAD_ROWS]:
        shown.append(f"{'' if row.source == last else row.source + ', '}row {row.row}: {row.reason}")
        last = row.source
    more = f"; and {len(bad) - SHOWN_BAD_ROWS:,} more" if len(bad) > SHOWN_BAD_ROWS else ""
    return f"{len(bad):,} of {total:,} rows cannot be used: {'; '.join(shown)}{more}"


def interleave(parts: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """One row of each part in turn, until all are used: the top of the list holds every source."""
    longest = max(map(len, parts), default=0)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]
