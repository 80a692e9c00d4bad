"""Identifies a run's inputs by content, not by name: `of` computes an identity, `changes` compares two.

run.json holds the identity a run was started with, one digest per constant. Of a reward, a METHOD or an
ENVIRONMENT we digest the code without comments, but not what it imports or reads.
"""

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from model import llama
from settings import find_path
from task.questions import GRADED_COLUMNS
from task.run_grader import COURSE_REWARDS

WHOLE = 2**26  # bytes; of a larger file only the header and some blocks are read
BLOCK, BLOCKS = 2**16, 256


def of(c, rows: Mapping[str, Sequence[Mapping]], names: Sequence[str], course: str) -> dict[str, str]:
    """The identity of what a run uses, by constant; DATASET stands for all but the test questions.

    `rows` are questions with their prompts, by split; `names` are the rewards'; `course` is their file.
    """
    files = {name: getattr(c, name, "") for name in ("REWARD_FUNC", "METHOD", "ENVIRONMENT")}
    if not set(COURSE_REWARDS).isdisjoint(names):
        files["reward_func.py"] = course
    code = {name: ast.dump(ast.parse(find_path(file).read_bytes())) for name, file in files.items() if file}
    found = {name: hashlib.sha256(tree.encode()).hexdigest() for name, tree in code.items()}
    found |= {name: of_model(getattr(c, name)) for name in ("MODEL", "TEACHER") if getattr(c, name, "")}
    asked = {"DATASET": ("train", "validation"), "TEST_DATASET": ("test",)}
    for name, splits in asked.items():
        if known := [rows[split] for split in splits if split in rows]:
            columns = [[[row[key] for key in ("prompts", *GRADED_COLUMNS)] for row in part] for part in known]
            found[name] = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    return found


def changes(kept: Mapping[str, str], now: Mapping[str, str], c, run: str) -> str:
    """What has changed since `run`, such as "RUN_DIR=runs/mine", was started, in a sentence; "" if nothing.

    Only compares what both have: a tool has less than the run, and a hub's commit isn't a folder's digest.
    """
    names = [name for name in now if len(kept.get(name, "")) == len(now[name]) and kept[name] != now[name]]
    places = ["DATASET" if name == "TEST_DATASET" and not c.TEST_DATASET else name for name in names]
    said = dict.fromkeys(f"{name}={getattr(c, name, '')}".removesuffix("=") for name in places)
    return f"{', '.join(said)}: the content isn't what the run in {run} was started with" if names else ""


def of_model(model: str) -> str:
    """A hub model's commit; else the digest of a folder's weights, config and tokenizer."""
    folder, _ = llama.load_hf_config(model)
    if not find_path(model).is_dir():
        return folder.name
    files = [*llama.weight_files(folder), *sorted(folder.glob("*.json")), *sorted(folder.glob("*.jinja"))]
    return hashlib.sha256(b"".join(path.name.encode() + of_file(path) for path in files)).hexdigest()


def of_file(path: Path) -> bytes:
    """The digest of a file; of a large one by its size, its safetensors header, and evenly spaced blocks."""
    with open(path, "rb") as file:
        if (size := path.stat().st_size) <= WHOLE:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256(str(size).encode())
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, WHOLE)))
        for i in range(BLOCKS):
            file.seek(i * (size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.digest()
