"""The page of a run: report.html, one file that needs no network and no server.

It is made from the text files of a run's folder alone, so it can be made while the run is still going. The
page itself stands in web/. What a model wrote is hostile text: here it becomes ASCII inside a JSON block that
no browser runs, and the page's own policy (CSP) lets only its own script run, by its hash.
"""

import base64
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from run import evaluation, health
from run.run_files import read_constants, read_lines, read_log, read_object
from settings import UserError, write_whole

WEB = Path(__file__).resolve().parent / "web"
MAX_BYTES = 5_000_000  # of the data in a page; beyond it steps, and questions, are left out
OF_QUESTIONS = MAX_BYTES // 5  # at most, of the evaluations during training; as much of those at its ends
PER_ANSWER = {  # of a completion in answers.jsonl, by its name in the page
    "pieces": "pieces", "points": "points", "reward": "reward", "advantage": "advantage",
    "correct": "correct", "correct_lenient": "correct_lenient", "format_ok": "format_ok",
    "cut_off": "cut_off",
    "counts": "counts", "log_prob": "before", "log_prob_after": "after", "log_prob_reference": "reference",
}  # fmt: skip
PER_EVALUATION = ("completions", "correct", "greedy_completions", "greedy_correct")
PER_TEST = ("asked", "completions", "correct", "correct_lenient", "format_ok")
NEEDED_CONSTANTS = (  # by a formula on the page, or by a health line
    "ADVANTAGE", "ADVANTAGE_CLIP", "LOSS_ALGO", "LOSS_AGG_MODE", "KL_LOSS_MODE", "EPSILON",
    "EPSILON_HIGH", "NUM_ITERATIONS", "ZERO_VARIANCE_GROUPS", "TOTAL_GENERATION_STEPS", "LOG_ANSWERS_EVERY",
    "MAX_GRAD_NORM", "LEARNING_RATE", "BETA", "TEMPERATURE", "TOP_K", "TOP_P", "ROLLOUTS", "DATASET",
)  # fmt: skip


# %% The file -----------------------------------------------------------------------------------------------
def render(data: dict[str, Any]) -> str:
    """The page around `data`, which page.js reads; see `run_data` and `answers_data`."""
    style, script = ((WEB / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{digest(style)}'; script-src '{digest(script)}'"
    )
    page = (WEB / "page.html").read_text(encoding="utf-8")
    for name, value in {"policy": policy, "style": style, "script": script, "data": to_json(data)}.items():
        before, after = page.split("{{" + name + "}}")  # raises if the page asks for it twice, or not at all
        page = before + value + after
    return page


def to_json(data: Any) -> str:
    """JSON for the page: "<" could end its block early, and no control character may be in the file."""
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def digest(text: str) -> str:
    """The hash by which a Content-Security-Policy lets one inline script or style through."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def without_nan(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


# %% The page of a run --------------------------------------------------------------------------------------
def write(folder: Path) -> Path:
    """Writes `folder`/report.html from what the run has left there so far.

    Returns:
        Its path.

    Raises:
        UserError: not the folder of a run, a run of another version, or its constants.json is damaged.
    """
    path = folder / "report.html"
    try:
        text = render(run_data(folder))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"RUN_DIR={folder}: answers.jsonl, evaluations.jsonl, before.json or after.json in it is none of "
            f"ours ({error!r:.80}); move the file away"
        ) from None
    write_whole(path, text)
    return path


def run_data(folder: Path) -> dict[str, Any]:
    """What the page of a run shows, from the files in its folder."""
    constants = read_constants(folder)
    if lacking := [name for name in NEEDED_CONSTANTS if name not in constants]:
        raise UserError(f"RUN_DIR={folder}: another version's run (it has no {lacking[0]}); start a new one")
    log = read_log(folder / "train_log.csv")
    evaluations = read_lines(folder / "evaluations.jsonl")
    tests = [read_object(folder / f"{when}.json") for when in ("before", "after")]
    about_tests = summary(*tests, evaluations, constants)
    asked = evaluations[0]["asked"] if evaluations else []
    in_all = {"asked": len(asked)}
    if both := all(tests):
        in_all["tested"] = len(tests[0]["asked"])
        tests = fewer_questions([{name: test[name] for name in PER_TEST} for test in tests])
    columns = with_evaluations(log, evaluations)
    questions, *shown = fewer_questions(
        [{"asked": asked}, *({name: e[name] for name in ("step", *PER_EVALUATION)} for e in evaluations)]
    )
    data = {
        "kind": "run",
        "title": "GRPO: every answer",
        "inspector_title": "One question, its answers, and what the update did",
        "about": f"{constants['MODEL']}, {constants['DATASET']}, {folder}, {len(log):,} of "
        f"{constants['NUM_BATCHES']:,} steps of {constants['BATCH_SIZE']} questions × "
        f"{constants['NUM_GENERATIONS']} answers, seed {constants['SEED']}",
        "constants": {name: constants[name] for name in NEEDED_CONSTANTS},
        "written": [f"{name}={value}" for name, value in constants.items()],
        "command": (read_object(folder / "run.json") or {}).get("command", ""),
        "summary": about_tests,
        "health": list(health.history(log, constants)),
        "columns": columns,
        "intervals": {
            name: [
                share if share is None else evaluation.wilson(share, len(asked)) for share in columns[name]
            ]
            for name in evaluation.HELD_OUT
            if name in columns and asked
        },
        "compared": True,
        "evaluations": shown,
        "asked": questions["asked"],
        "in_all": in_all,
        "before": tests[0] if both else None,
        "after": tests[1] if both else None,
    }
    groups = [to_group(row) for row in read_lines(folder / "answers.jsonl")]
    data["groups"], data["thinned"] = thin(groups, MAX_BYTES - len(to_json(data)))
    return data | {"sources": len({group["data_source"] for group in data["groups"]})}


def to_group(row: dict[str, Any]) -> dict[str, Any]:
    """A line of answers.jsonl as the page has it: without what it does not show."""
    answers = [{new: answer[old] for old, new in PER_ANSWER.items()} for answer in row["completions"]]
    return row | {"completions": answers}


def fitting(sizes: Iterable[int], limit: int) -> int:
    """How many of the first sizes add up to no more than `limit`; at least 1."""
    return max(1, sum(size <= limit for size in itertools.accumulate(sizes)))


def fewer_questions(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lists in `results`, one item per question, cut to as many questions as OF_QUESTIONS hold."""
    columns = [value for result in results for value in result.values() if isinstance(value, list)]
    kept = fitting((len(to_json(question)) for question in zip(*columns, strict=True)), OF_QUESTIONS)
    return [
        {name: value[:kept] if isinstance(value, list) else value for name, value in result.items()}
        for result in results
    ]


def thin(groups: Sequence[dict[str, Any]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Groups of at most `limit` bytes, and whether any was left out.

    Every second step is left out as often as needed; where the first and the last alone are too much, some of
    their questions, too.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for group in groups:
        steps.setdefault(group["step"], []).append(group)
    sizes = {step: [len(to_json(group)) for group in steps[step]] for step in steps}
    kept, stride = list(steps), 1
    while (too_much := sum(sum(sizes[step]) for step in kept) > limit) and len(kept) > 2:
        stride *= 2
        kept = list(dict.fromkeys([*list(steps)[::stride], list(steps)[-1]]))
    if too_much:
        steps = {step: steps[step][: fitting(sizes[step], limit // len(kept))] for step in kept}
    found = [group for step in kept for group in steps[step]]
    return found, len(found) < len(groups)


def with_evaluations(
    log: Sequence[dict[str, float]], evaluations: Sequence[dict[str, Any]]
) -> dict[str, list[float | None]]:
    """The columns of train_log.csv; the evaluations' from evaluations.jsonl, which loses none by a kill."""
    rows = {int(row["step"]): dict(row) for row in log}
    for result in evaluations:
        row = rows.setdefault(result["step"], {"step": result["step"]})
        row.update({column: result[name] for column, name in evaluation.HELD_OUT.items()})
    names = dict.fromkeys(name for row in rows.values() for name in row if not name.startswith("memory"))
    return {name: [without_nan(rows[step].get(name, math.nan)) for step in sorted(rows)] for name in names}


def summary(before, after, evaluations, constants) -> dict[str, Any]:
    """The figures on top of the page: a table, and a sentence below it."""
    results = {when: result for when, result in (("before", before), ("after", after)) if result}
    if not results:
        return {"header": [], "rows": [], "notes": []}
    questions = next(iter(results.values()))["questions"]
    note = evaluation.best([e for e in evaluations if e["step"]])
    return {
        "header": [f"{questions} test questions, {constants['EVAL_CONFIG']} sampling", *results],
        "rows": evaluation.comparison(list(results.values())),
        "notes": [note] if note else [],
    }


# %% The page of some answers -------------------------------------------------------------------------------
def answers_data(
    groups: list[dict[str, Any]], about: str, compared: bool, notes: list[str]
) -> dict[str, Any]:
    """What the page of inference.py shows: groups of answers that no update follows.

    Args:
        groups: lines as in answers.jsonl; `graded` is False where the right answer is not known.
        about: one line that says what was asked.
        compared: whether they have log-probs of two models.
        notes: sentences on top of the page.
    """
    return {
        "kind": "questions",
        "title": "Answers to questions",
        "inspector_title": "One question, its answers" + (", and what training did" if compared else ""),
        "about": about,
        "constants": {"ADVANTAGE": "group", "ZERO_VARIANCE_GROUPS": "keep"},
        "summary": {"header": [], "rows": [], "notes": notes},
        "columns": {},
        "groups": [to_group(group) for group in groups],
        "compared": compared,
        "sources": len({group["data_source"] for group in groups}),
        "evaluations": [],
        "before": None,
        "after": None,
    }
