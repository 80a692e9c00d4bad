"""The page of a run: report.html, one file that needs neither network nor server.

It only needs the text files in a run's folder; the page itself is in web/. A model's output is
untrusted: it becomes ASCII in a JSON block, and the page's Content-Security-Policy only allows its
own script, by hash.
"""

import base64
import contextlib
import functools
import hashlib
import html
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run import evaluation, health
from run.run_files import (
    COUNTED,
    differences,
    meaning,
    read_constants,
    read_lines,
    read_log,
    read_object,
    what_is_right,
)
from settings import HERE, UserError, write_whole

WEB = Path(__file__).resolve().parent / "web"
MAX_BYTES = 5_000_000  # of the data in a page; above it we leave out steps and questions
# for evaluations during training, and as much for those before and after
OF_QUESTIONS = MAX_BYTES // 5
PER_EVALUATION = ("step", "completions", "correct", "greedy_completions", "greedy_correct")
# shown where the right answers of two runs don't mean the same
DECIDING = ("NUM_TEST_QUESTIONS", "EVAL_QUESTIONS", "EVAL_CONFIG", "REWARDS", "REWARD_FUNC")
PER_TEST = ("asked", "completions", "correct", "correct_lenient", "format_ok")


# %% The file --------------------------------------------------------------------------------------
def save(path: Path, data: dict[str, Any]) -> Path:
    """Writes the page around `data`, which page.js reads; returns its path."""
    page, style, script = (
        (WEB / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    script = f"const WORDS = {to_json(health.WORDS)};\n{script}"
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{digest(style)}'; script-src '{digest(script)}'"
    )
    home = html.escape(Path(os.path.relpath(HERE, path.resolve().parent)).as_posix())
    parts = {
        "policy": policy,
        "home": home,
        "style": style,
        "script": script,
        "data": to_json(data),
    }
    write_whole(path, re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page))
    return path


def to_json(data: Any) -> str:
    """JSON for the page; escapes "<", which could end its block early, and control characters."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def digest(text: str) -> str:
    """The hash that allows one inline script or style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@contextlib.contextmanager
def refuse_foreign_files(folder: Path) -> Iterator[None]:
    """Raises UserError if the block fails on the content of a file of the run in `folder`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"RUN_DIR={folder}: answers.jsonl, evaluations.jsonl, before.json or after.json in it "
            f"is none of ours, or of another version ({error!r:.80}); move the file away"
        ) from None


# %% The page of a run -----------------------------------------------------------------------------
def write(folder: Path, *others: Path) -> Path:
    """Writes `folder`/report.html from the run's files so far, and returns its path.

    With another run it's compare.html, which overlays the two. UserError if it can't.
    """
    with refuse_foreign_files(folder):
        data = compare_data(read(folder), *map(read, others)) if others else run_data(read(folder))
    return save(folder / ("compare.html" if others else "report.html"), data)


def read(folder: Path) -> SimpleNamespace:
    """Reads the files of the run in `folder` so far."""
    constants, note = read_constants(folder), read_object(folder / "run.json") or {}
    tests = {
        w: result for w in ("before", "after") if (result := read_object(folder / f"{w}.json"))
    }
    log, evaluations = read_log(folder / "train_log.csv"), read_lines(folder / "evaluations.jsonl")
    asked = [
        next((result["asked"] for result in results), [])
        for results in (tests.values(), evaluations)
    ]
    columns = with_evaluations(log, evaluations)
    right = what_is_right(constants, asked[0] or asked[1])
    headline = evaluation.headline(list(tests.values()), evaluations, len(log), right)
    parts = note.get("parts", [])
    resumed = parts[-1]["done"] if parts else 0
    failed = evaluation.failed(headline)
    judged = list(log)
    if log and "after" in tests:
        judged[-1] = log[-1] | {"test_correct": tests["after"]["answer_accuracy"]}
    found = (health.first_found if failed else health.check)(judged, constants, resumed)
    causes = health.causes(found)
    if not causes and failed and headline[0].parts[0] != "unclear":
        causes = [health.no_cause(log, constants)]
    intervals = {
        name: [
            None if share is None else evaluation.wilson(share, len(asked[1]))
            for share in columns[name]
        ]
        for name in evaluation.HELD_OUT
        if asked[1] and name in columns
    }
    return SimpleNamespace(
        folder=folder,
        constants=constants,
        tests=tests,
        log=log,
        evaluations=evaluations,
        asked=asked,
        command=note.get("command", "(command lost)"),
        identity=note.get("identity", {}),
        headline=headline,
        right=right,
        parts=with_steps(parts, len(log)),
        overlap=[
            health.Sentence(f"overlap_{use}_{other}", count=count, all=total)
            for use, other, count, total in note.get("overlap", [])
        ],
        best=evaluation.best(evaluations, note.get("kept", [])),
        failed=failed,
        causes=causes,
        health=list(health.history(log, constants, resumed)),
        curves={"columns": columns, "intervals": intervals},
    )


def with_steps(parts: Sequence[dict[str, Any]], steps: int) -> list[health.Sentence]:
    """Which steps of a resumed run each of its commands did; [] if it wasn't resumed."""
    if len(parts) < 2:
        return []
    ends = [part["done"] for part in parts[1:]] + [steps]
    return [
        health.Sentence("part", first=part["done"] + 1, last=end, command=part["command"])
        for part, end in zip(parts, ends, strict=True)
    ]


def run_data(run: SimpleNamespace) -> dict[str, Any]:
    """The data for the page of a run."""
    evaluations, tests, constants = run.evaluations, list(run.tests.values()), run.constants
    tested, asked = run.asked
    questions, *shown = fewer_questions(
        [{"asked": asked}, *({name: e[name] for name in PER_EVALUATION} for e in evaluations)]
    )
    reasons = evaluation.reasons(*tests, run.right) if len(tests) == 2 else []
    dips = evaluation.dips(evaluations, run.right)
    both = fewer_questions([{name: test[name] for name in PER_TEST} for test in tests])
    data = {
        "kind": "run",
        "folder": str(run.folder),
        "steps": len(run.log),
        "constants": constants,
        "command": run.command,
        "headline": [line.parts for line in run.headline],
        "right": run.right,
        "reasons": [line.parts for line in reasons],
        "dips": [[step, clear, words.parts] for step, clear, words in dips],
        "summary": {
            "header": list(run.tests),
            "rows": evaluation.comparison(tests, run.right),
            "sources": evaluation.by_source(tests, run.right),
        },
        "notes": [line.parts for line in [*run.overlap, *run.parts]],
        "best": run.best and run.best.parts,
        "failed": run.failed,
        "causes": [line.parts for line in run.causes],
        "health": [line.parts for line in run.health],
        "compared": True,
        "evaluations": shown,
        "asked": questions["asked"],
        "in_all": {"asked": len(asked), "tested": len(tested)},
    } | run.curves
    if len(tests) == 2:
        data |= dict(zip(run.tests, both)) | {"cut_off": tests[1]["cut_off"]}
        i = evaluation.example(*tests)
        data["example"] = [{name: test[name][i] for name in PER_TEST} for test in tests]
    draw = None
    if constants.get("ENVIRONMENT"):
        from task import turns  # needs jax, which takes a second to import

        where = constants["ENVIRONMENT"]
        if picture := getattr(turns.load(where), "picture", None):
            draw = functools.partial(
                turns.call_user_code, f"ENVIRONMENT={where}: picture raised", picture
            )
    groups = [to_group(row, draw) for row in read_lines(run.folder / "answers.jsonl")]
    kept = thin(groups, MAX_BYTES - len(to_json(data)))
    return data | {"groups": kept, "thinned": len(kept) < len(groups)}


def differing(first: SimpleNamespace, second: SimpleNamespace) -> list[str]:
    """In what else than their training two runs differ; UserError if their right answers don't
    mean the same.
    """
    names: dict[str, None] = {}
    for asked in zip(first.asked, second.asked):
        if all(asked):
            both = (
                meaning(run.constants, run.identity, questions)
                for run, questions in zip((first, second), asked)
            )
            names |= dict.fromkeys(differences(*both))
    if counted := [name for name in names if name in COUNTED]:
        apart = [
            f"{name}={run.constants.get(name)}"
            for name in DECIDING
            for run in (first, second)
            if first.constants.get(name) != second.constants.get(name)
        ]
        raise UserError(
            f"show_run {first.folder} {second.folder}: not the same {', '.join(counted)}"
            f"{f' ({", ".join(apart)})' if apart else ''}, so comparing them would be wrong; give "
            "two runs that are the same in these"
        )
    return list(names)


def compare_data(*runs: SimpleNamespace) -> dict[str, Any]:
    """The data for the page of two runs; UserError if their right answers don't mean the same."""
    folders, differ = [run.folder for run in runs], differing(*runs)
    names = [
        folder.name if folders[0].name != folders[1].name else str(folder) for folder in folders
    ]
    after = [run.tests["after"] for run in runs if "after" in run.tests]
    over = len(after) == 2
    headline = (
        [evaluation.between(names, after)]
        if over
        else [line for run in runs for line in run.headline]
    )
    return {
        "kind": "compare",
        "names": names,
        "headline": [line.parts for line in headline],
        "reasons": [["one_run_each", {}]]
        + [["differ", {"names": ", ".join(differ)}]] * bool(differ),
        "summary": {"header": names, "rows": evaluation.comparison(after, runs[0].right)},
        "runs": [run.curves | {"constants": run.constants} for run in runs],
        "groups": [],
    }


def to_group(row: dict[str, Any], draw: Callable[[str, str], str] | None = None) -> dict[str, Any]:
    """A line of answers.jsonl for the page, with the SVG that the environment may `draw` of each
    episode.
    """
    answers = [dict(answer) for answer in row["completions"]]
    for answer in answers:
        text = answer.pop("text")  # the page has the pieces
        del answer["tokens"]
        if draw:
            answer["picture"] = draw(row["question"], text)
    return row | {"completions": answers}


def fewer_questions(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Thins the lists in `results`, one item per question, until they fit in OF_QUESTIONS."""
    every = math.ceil(len(to_json(results)) / OF_QUESTIONS)
    return [
        {
            name: value[::every] if isinstance(value, list) else value
            for name, value in result.items()
        }
        for result in results
    ]


def thin(groups: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Thins groups to about `limit` bytes: every n-th step and the last, or also every n-th
    question.
    """
    steps = [list(step) for _, step in itertools.groupby(groups, key=lambda group: group["step"])]
    kept = steps[: -1 : math.ceil(len(to_json(groups)) / max(1, limit))] + steps[-1:]
    every = math.ceil(len(to_json(kept)) / max(1, limit)) if len(kept) < 3 else 1
    return [group for step in kept for group in step[::every]]


def with_evaluations(log: list[dict], evaluations: list[dict]) -> dict[str, list[float | None]]:
    """The columns of train_log.csv; the evaluations' from evaluations.jsonl, which a kill can't
    truncate.
    """
    rows = {int(row["step"]): dict(row) for row in log}
    for result in evaluations:
        row = rows.setdefault(result["step"], {"step": result["step"]})
        row.update({column: result[name] for column, name in evaluation.HELD_OUT.items()})
    names = dict.fromkeys(
        name for row in rows.values() for name in row if not name.startswith("memory")
    )
    columns = {name: [rows[step].get(name, math.nan) for step in sorted(rows)] for name in names}
    return {
        name: [x if math.isfinite(x) else None for x in column] for name, column in columns.items()
    }
