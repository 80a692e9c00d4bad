"""The embedded model and data: what ships is what was made, and is fit for its purpose."""

import hashlib
import json
import re
import subprocess
import sys

import grpo_llama3_1_8b_demo as demo
import pytest
import reward_func


def read(split):
    return [
        json.loads(line) for line in (demo.HERE / "tiny_gsm8k" / f"{split}.jsonl").read_text().splitlines()
    ]


def checksums():
    lines = (demo.HERE / "tiny.sha256").read_text().splitlines()
    return dict(reversed(line.split("  ")) for line in lines)


def test_the_shipped_files_have_their_recorded_checksums():
    recorded = checksums()
    shipped = [p for d in ("tiny_llama", "tiny_gsm8k") for p in (demo.HERE / d).iterdir()]
    assert {p.relative_to(demo.HERE).as_posix() for p in shipped} == set(recorded)
    for path, checksum in recorded.items():
        assert hashlib.sha256((demo.HERE / path).read_bytes()).hexdigest() == checksum, path
    assert sum(p.stat().st_size for p in shipped) < 5e6  # bytes: "a few MB in all"


def test_questions_are_distinct_and_the_splits_share_none():
    train, test = ({row["question"] for row in read(split)} for split in ("train", "test"))
    assert len(train) == len(read("train")) >= 3_000
    assert len(test) == len(read("test")) >= 500
    assert not train & test


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_written_step_is_true_and_leads_to_the_answer(split):
    for row in read(split):
        work, gold = row["answer"].split("\n#### ")
        for step in work.split(","):
            a, operator, b, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", step).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator] == int(result)
        assert work.endswith(f"={gold}")
        assert reward_func.extract_hash_answer(row["answer"]) == gold


def test_the_tokenizer_gives_back_the_text_and_pads_with_a_token_of_its_own():
    tokenizer = demo.load_tokenizer(demo.HERE / "tiny_llama")
    assert tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    answer = "<reasoning>15-4=11,11+3=14</reasoning><answer>14</answer>"
    for text in [row["question"] for row in read("test")] + [answer]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.decode(tokenizer.encode(answer), skip_special_tokens=True) == answer  # the tags stay


@pytest.mark.slow  # 6 to 8 minutes on 2 cores
def test_rebuilding_gives_the_same_bytes():
    recorded = checksums()
    subprocess.run([sys.executable, demo.HERE / "make_tiny_llama.py"], check=True)
    assert checksums() == recorded, "another machine may round differently: `git checkout` the two folders"
