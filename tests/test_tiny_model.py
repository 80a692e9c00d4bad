"""The embedded model and data: what ships is what was made, and is fit for its purpose."""

import hashlib
import json
import re
import subprocess
import sys

import pytest
import transformers

from settings import HERE
from task.grading import extract_hash_answer


def read(split):
    return [
        json.loads(line)
        for line in (HERE / "tiny_gsm8k" / f"{split}.jsonl").read_text().splitlines()
    ]


def test_the_shipped_files_have_their_recorded_checksums():
    recorded = dict(
        line.split("  ")[::-1] for line in (HERE / "tiny.sha256").read_text().splitlines()
    )
    shipped = [p for d in ("tiny_llama", "tiny_gsm8k") for p in (HERE / d).iterdir()]
    found = {
        p.relative_to(HERE).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in shipped
    }
    assert found == recorded


def test_questions_are_distinct_and_every_written_step_is_true_and_leads_to_the_answer():
    """Also between the splits."""
    asked = []
    for split, size in {"train": 3_000, "validation": 128, "test": 500}.items():
        rows = read(split)
        assert len(rows) >= size
        asked += [row["question"] for row in rows]
        for row in rows:
            work, gold = row["answer"].split("\n#### ")
            for step in work.split(","):
                a, sign, b, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", step).groups()
                a, b = int(a), int(b)
                assert {"+": a + b, "-": a - b, "*": a * b}[sign] == int(result)
            assert work.endswith(f"={gold}") and extract_hash_answer(row["answer"]) == gold
    assert len(set(asked)) == len(asked)


def test_the_tokenizer_gives_back_the_text_and_pads_with_a_token_of_its_own():
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / "tiny_llama")
    assert tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    answer = "<reasoning>15-4=11,11+3=14</reasoning><answer>14</answer>"
    for text in [row["question"] for row in read("test")] + [answer]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    # the tags stay
    assert tokenizer.decode(tokenizer.encode(answer), skip_special_tokens=True) == answer


@pytest.mark.slow  # 6 to 8 minutes on 2 cores
def test_rebuilding_gives_the_same_bytes(tmp_path):
    subprocess.check_call(
        [sys.executable, HERE / "tool.py", "make_tiny_llama", f"FOLDER={tmp_path}"]
    )
    made, shipped = ((folder / "tiny.sha256").read_text() for folder in (tmp_path, HERE))
    assert made == shipped, "another machine may round differently"
