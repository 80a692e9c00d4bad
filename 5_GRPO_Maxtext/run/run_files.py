"""Reads a run's files, even if a kill or a full disk damaged them; says whether two runs' results
mean the same. Imports nothing heavy.
"""

import contextlib
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from settings import UserError, names_in
from task.run_grader import WANT_THINK_TAGS

SCALAR = (str, int, float)
# Types of what's read from run.json and constants.json.
NOTE = {
    "run_id": str,
    "RUN_DIR": str,
    "command": str,
    "saved": int,
    "saved_at": float,
    "identity": dict,
}
TEXTS = ("MODEL", "TEACHER", "DATASET", "TEST_DATASET", "REWARDS", "REWARD_FUNC", "METHOD")
TEXTS += ("ENVIRONMENT", "CHECKPOINT_DIR", "LORA_TARGETS", "TEMPLATE", "SYSTEM_PROMPT")
NUMBERS = ("NUM_BATCHES", "NUM_TEST_QUESTIONS", "EVAL_QUESTIONS", "LORA_RANK", "LORA_ALPHA")
NUMBERS += ("LOGITS_CLIP", "BETA", "NUM_GENERATIONS", "MAX_PROMPT_LENGTH")


def newest_run() -> Path | None:
    """The run under runs/ that saved a checkpoint last, wherever that's saved; None if there's
    none.

    By the time in run.json, because copies and later starts change the time of a file.
    """
    runs = [path.parent for path in Path("runs").rglob("constants.json")]
    notes = {run: read_object(run / "run.json") or {} for run in runs if run.name[:5] != "host_"}
    saved = {run: note["saved_at"] for run, note in notes.items() if "saved_at" in note}
    return max(saved, key=saved.__getitem__, default=None)


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a `train_log.csv`, none without the file; skips truncated or corrupt ones."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a number that is cut short is another number
    rows = []
    for row in csv.DictReader(whole.splitlines()):
        with contextlib.suppress(TypeError, ValueError):  # too few columns, too many, or no number
            rows.append({name: float(value) for name, value in row.items()})
    return [row for row in rows if row.get("step", 0) >= 1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of answers.jsonl or evaluations.jsonl; skips truncated or corrupt ones."""
    rows = []
    for line in (
        path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else ()
    ):
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a local or bucket JSON file; None if there's no such file or object.

    Of run.json, a field of another type than in NOTE is lost, as if the file lacked it.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and path.name == "run.json":
            content = {k: x for k, x in content.items() if isinstance(x, NOTE.get(k, object))}
            if digests := content.get("identity"):
                content["identity"] = {k: x for k, x in digests.items() if isinstance(x, str)}
        return content if isinstance(content, dict) else None


def is_step(name: str) -> bool:
    """Whether a folder's name is a checkpoint's step; Python takes "²" for a digit, too."""
    return name.isascii() and name.isdigit()


def read_constants(folder: Path, constant: str = "RUN_DIR") -> dict[str, Any]:
    """The constants of the run in `folder`; `constant` names the folder in messages."""
    path = folder / "constants.json"
    if not path.is_file():
        raise UserError(
            f"{constant}={folder}: no run (no constants.json in it); give the RUN_DIR of one"
        )
    constants = read_object(path)
    kinds = dict.fromkeys(TEXTS, str) | dict.fromkeys(NUMBERS, (int, float))
    odd = [k for k, x in (constants or {}).items() if not isinstance(x, kinds.get(k, SCALAR))]
    if constants is None or "MODEL" not in constants or odd:
        fault = "its constants.json is damaged; put a whole one back, or give another folder"
        raise UserError(f"{constant}={folder}: {fault}")
    return constants


class Checkpoint(NamedTuple):
    """A checkpoint of a run; its step is None for the last one."""

    run_dir: Path
    step: int | None
    constants: dict[str, Any]  # of the run, from constants.json

    @property
    def run_json(self) -> dict[str, Any]:
        """What the run's run.json holds; empty if it's lost."""
        return read_object(self.run_dir / "run.json") or {}


def checkpoint_at(path: Path, constant: str) -> Checkpoint | None:
    """The run that `path` is, or the checkpoint: RUN_DIR/50, RUN_DIR/checkpoints/50. None if it's
    neither.

    The checkpoint may be in CHECKPOINT_DIR instead; `constant` names the path in messages.
    """
    for folder in (path, *path.parents):
        steps = [
            name
            for name in path.relative_to(folder).parts
            if name not in ("checkpoints", "weights")
        ]
        if (folder / "constants.json").is_file() and len(steps) < 2 and all(map(is_step, steps)):
            return Checkpoint(
                folder, int(steps[0]) if steps else None, read_constants(folder, constant)
            )
    return None


# %% Do two results mean the same? -----------------------------------------------------------------
# What counts as right, of what. The rest of `meaning` is how the answers came about.
GRADERS = "the graders in task/"  # in an identity
COUNTED = "questions", "EVAL_CONFIG", "REWARDS and REWARD_FUNC", "ENVIRONMENT"


def what_is_right(constants: Mapping[str, Any], asked: Sequence[Mapping[str, Any]]) -> str:
    """What the run's rewards count as right, as `Grader.score` decides: the "number" in the answer,
    a "score" of 1 by compute_score, or an "episode" that its environment ends well.
    """
    names = list(filter(None, names_in(constants.get("REWARDS", ""))))
    others = any(row.get("data_source", "gsm8k") != "gsm8k" for row in asked)
    if constants.get("ENVIRONMENT") and names in ([], ["episode_return"]):
        return "episode"
    if "compute_score" in names if names else constants.get("REWARD_FUNC") or others:
        return "score"
    return "number"


def meaning(
    constants: Mapping[str, Any], identity: Mapping[str, str], asked: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a run's share of right answers depends on, by name; two that are equal mean the same.

    Files count by their content where the `identity` in the run's run.json has it, else by name.
    `asked` are the questions, as in its evaluations.
    """
    c, names = constants, list(filter(None, names_in(constants.get("REWARDS", ""))))
    right = what_is_right(constants, asked)
    if right == "score":
        right = identity.get("REWARD_FUNC") or c.get("REWARD_FUNC") or "compute_score"
    think = not WANT_THINK_TAGS.isdisjoint(names)
    prompt = c["TEMPLATE"].replace("{system_prompt}", c["SYSTEM_PROMPT"])
    limits = "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "MAX_TURNS", "EVAL_CONFIG"
    files = {name: identity.get(name) or c.get(name) for name in ("MODEL", "ENVIRONMENT")}
    return files | {
        "questions": [
            [row[name] for name in ("question", "answer", "data_source")] for row in asked
        ],
        "REWARDS and REWARD_FUNC": (right, think, identity.get(GRADERS)),
        "TEMPLATE and SYSTEM_PROMPT": (prompt, think),
        **{name: c.get(name) for name in limits},
    }


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The names in two `meaning`s that differ; [] if figures of the two are comparable."""
    return [name for name in first if first[name] != second[name]]
