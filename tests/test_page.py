"""report.html without a browser: the data behind it, and that no text of a model leaves its place there."""

import base64
import csv
import hashlib
import html.parser
import itertools
import json
import re
import shlex
import shutil
import sys

import make_health_logs
import pytest
from hostile import HOSTILE
from short_runs import SHORT, saved_steps

import settings
from run import answers, evaluation, health, page
from run.run_files import read_log
from settings import HERE, UserError
from tools import show_run


class Elements(html.parser.HTMLParser):
    """The tags of a page in their order, and the text inside each <script> and <style>."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.policy, self.open = [], {}, "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        self.open = (tag, attributes.get("id"))

    def handle_data(self, data):
        if self.open and self.open[0] in ("script", "style"):
            self.inside[self.open] = self.inside.get(self.open, "") + data

    def handle_endtag(self, tag):
        self.open = None


def data_of(path):
    return json.loads(Elements(path.read_text(encoding="utf-8")).inside["script", "data"])


@pytest.fixture(scope="module")
def run(finished):
    """The folder of a short run."""
    return finished / "run"


def test_the_page_has_what_the_files_have(run):
    data = data_of(run / "report.html")
    lines = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert [(g["step"], g["question"], g["answer"]) for g in data["groups"]] == [
        (row["step"], row["question"], row["answer"]) for row in lines
    ]
    for group, row in zip(data["groups"], lines):
        for shown, answer in zip(group["completions"], row["completions"], strict=True):
            assert "".join(shown["pieces"]).startswith(answer["text"])
            for name, old in (("before", "log_prob"), ("after", "log_prob_after"), ("points", "points"),
                              ("reference", "log_prob_reference"), ("advantage", "advantage")):  # fmt: skip
                assert shown[name] == answer[old]
    with open(run / "train_log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    for name in ("reward", "kl", "correct_lenient"):
        assert data["columns"][name] == [None, *(float(row[name]) for row in log)]
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [e["step"] for e in evaluations] == [0, 4, 8]
    held_out = dict(zip(data["columns"]["step"], data["columns"]["held_out_correct"], strict=True))
    for e in evaluations:
        assert held_out[e["step"]] == pytest.approx(e["answer_accuracy"])
    for when in ("before", "after"):
        result = json.loads((run / f"{when}.json").read_text())
        assert data[when]["completions"] == result["completions"] and len(result["completions"]) == 16
        assert f"{result['lenient_accuracy']:.1%}" in str(data["summary"]["rows"])


def test_evaluations_ask_the_validation_questions_and_the_report_names_the_best(run):
    shipped = (HERE / "tiny_gsm8k" / "validation.jsonl").read_text().splitlines()[:8]
    data = data_of(run / "report.html")
    asked = [question["question"] for question in data["asked"]]
    assert asked == [json.loads(line)["question"] for line in shipped]
    evaluations = answers.read_lines(run / "evaluations.jsonl")
    kept = [e for e in evaluations if e["step"] in saved_steps(run)]
    best = max(kept, key=lambda e: (e["answer_accuracy"], e["lenient_accuracy"]))["step"]
    words = f"Best on the 8 held-out questions: step {best}, "
    assert kept and f"Of the checkpoints kept in run: {words}" in (run / "report.md").read_text()
    assert [words in note for note in data["summary"]["notes"]] == [True]


def test_only_the_pages_own_script_may_run(run):
    elements = Elements((run / "report.html").read_text(encoding="utf-8"))
    policy = dict(part.split(" ", 1) for part in elements.policy.split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for kind, directive in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(elements.inside[kind, None].encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    text = (run / "report.html").read_text(encoding="utf-8")
    # nothing is loaded: no address but that of SVG's name space
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)|@import|url\(|innerHTML|insertAdjacent|document\.write", text)


def with_hostile_texts(folder):
    """Puts every text of HOSTILE where a model or a data set writes: answers, tokens, questions, sources."""
    rows = answers.read_lines(folder / "answers.jsonl")
    texts = iter(HOSTILE * 1000)
    for row in rows:
        row |= {"question": next(texts), "answer": next(texts), "data_source": next(texts)}
        for answer in row["completions"]:
            answer["text"] = next(texts)
            answer["pieces"] = [next(texts) for _ in answer["pieces"]]
    (folder / "answers.jsonl").unlink()
    answers.append_lines(folder / "answers.jsonl", rows)
    evaluations = answers.read_lines(folder / "evaluations.jsonl")
    (folder / "evaluations.jsonl").unlink()
    results = [(folder / f"{when}.json", json.loads((folder / f"{when}.json").read_text()))
               for when in ("before", "after") if (folder / f"{when}.json").exists()]  # fmt: skip
    for result in [*evaluations, *(result for _, result in results)]:
        for name in ("completions", "greedy_completions"):
            result[name] = [HOSTILE[i % len(HOSTILE)] for i in range(len(result[name]))]
        for i, asked in enumerate(result["asked"]):
            asked |= {"question": HOSTILE[(20 + i) % len(HOSTILE)], "answer": HOSTILE[i % len(HOSTILE)]}
            asked["data_source"] = HOSTILE[20 + i % 2]
    answers.append_lines(folder / "evaluations.jsonl", evaluations)
    for path, result in results:
        path.write_text(json.dumps(result))


def test_hostile_texts_stay_inside_the_data(run, tmp_path):
    hostile = shutil.copytree(run, tmp_path / "<b>run&amp;")
    with_hostile_texts(hostile)
    path = page.write(hostile)
    harmless, found = (Elements(p.read_text(encoding="utf-8")) for p in (run / "report.html", path))
    assert found.tags == harmless.tags and found.tags.count("script") == 2
    block = found.inside["script", "data"]
    assert block.isascii() and "<" not in block and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", block)
    shown = [answer for group in json.loads(block)["groups"] for answer in group["completions"]]
    assert set(HOSTILE) == {piece for answer in shown for piece in answer["pieces"]}  # and nothing is lost


def test_a_run_that_is_still_going_has_a_page_too(run, tmp_path, capsys):
    going = tmp_path / "going"
    going.mkdir()
    shutil.copy(run / "constants.json", going)
    show_run.main([str(going)])  # before the first step
    assert data_of(going / "report.html")["groups"] == []
    for name in ("before.json", "evaluations.jsonl"):
        shutil.copy(run / name, going)
    rows = (run / "train_log.csv").read_text().splitlines(keepends=True)
    (going / "train_log.csv").write_text("".join(rows[:4]))  # a kill has cost the row of step 4
    text = (run / "answers.jsonl").read_text()
    (going / "answers.jsonl").write_text(text[: len(text) // 2])  # a line is being written
    show_run.main([str(going)])
    data = data_of(going / "report.html")
    assert 0 < len(data["groups"]) < text.count("\n") and data["after"] is None
    assert data["summary"]["header"][1:] == ["before"]
    assert data["columns"]["step"] == [0, 1, 2, 3, 4, 8]  # not the evaluation of step 4
    assert [value is None for value in data["columns"]["held_out_correct"]] == [
        False,
        *[True] * 3,
        False,
        False,
    ]
    assert f"page     {going}/report.html" in capsys.readouterr().out


def test_a_large_run_leaves_steps_out_evenly_and_keeps_both_ends():
    groups = [{"step": step, "text": "x" * 1000} for step in range(1, 101) for _ in range(2)]
    assert page.thin(groups, 250_000) == (groups, False)
    kept, thinned = page.thin(groups, 50_000)
    steps = sorted({group["step"] for group in kept})
    assert thinned and steps[0] == 1 and steps[-1] == 100 and len(page.to_json(kept)) < 50_000
    assert len(steps) > 10 and max(b - a for a, b in itertools.pairwise(steps)) == 8
    assert all(sum(g["step"] == step for g in kept) == 2 for step in steps)


def test_steps_that_are_too_large_alone_keep_their_first_questions():
    groups = [{"step": step, "i": i, "text": "<" * 100} for step in (1, 2, 3) for i in range(50)]
    kept, thinned = page.thin(groups, 20_000)
    assert thinned and 15_000 < len(page.to_json(kept)) < 20_500  # a "<" takes six bytes in the file
    questions = {step: [group["i"] for group in kept if group["step"] == step] for step in (1, 2, 3)}
    assert questions == {1: list(range(15)), 2: [], 3: list(range(15))}
    assert page.thin(groups, 10) == ([groups[0], groups[100]], True) and page.thin([], 10) == ([], False)


def long_answers(run, folder, evaluations, questions):
    """A copy of the run with so many evaluations of so many answers of 3,000 characters, and 1,000 steps."""
    copy = shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))

    def longer(result):
        lists = {
            name: (value * questions)[:questions] for name, value in result.items() if isinstance(value, list)
        }
        texts = {name: ["word " * 600] * questions for name in ("completions", "greedy_completions")}
        return result | lists | texts

    first = answers.read_lines(run / "evaluations.jsonl")[0]
    rows = [longer(first) | {"step": step} for step in range(evaluations)]
    (copy / "evaluations.jsonl").write_text(answers.to_lines(rows))
    kept = [row for row in answers.read_lines(run / "answers.jsonl") if row["step"] == 1]
    rows = [row | {"step": step} for step in range(1, 1001) for row in kept]
    (copy / "answers.jsonl").write_text(answers.to_lines(rows))
    for name in ("before.json", "after.json"):
        (copy / name).write_text(json.dumps(longer(json.loads((run / name).read_text()))))
    return copy


def test_the_page_stays_small_whatever_the_evaluations_hold(run, tmp_path):
    path = page.write(long_answers(run, tmp_path / "long", evaluations=7, questions=512))
    assert 0.7 * page.MAX_BYTES < path.stat().st_size < page.MAX_BYTES + 50_000  # template, style and script
    data = data_of(path)
    assert data["in_all"] == {"asked": 512, "tested": 512}
    for shown in ([data], data["evaluations"], [data["before"], data["after"]]):
        lists = [
            value for one in shown for name, value in one.items() if name in (*page.PER_EVALUATION, "asked")
        ]
        assert len({len(value) for value in lists}) == 1 and 10 < len(lists[0]) < 512
    assert len(data["evaluations"]) == 7 and data["thinned"]  # still a row for each evaluation
    small = data_of(run / "report.html")
    assert small["in_all"] == {"asked": 8, "tested": 16} and len(small["asked"]) == 8
    assert len(small["after"]["completions"]) == 16 and not small["thinned"]


def test_the_page_has_command_constants_health_and_intervals(run, tmp_path):
    data = data_of(run / "report.html")
    assert (
        data["command"]
        == f"python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py {shlex.join([*SHORT, 'RUN_DIR=run'])}"
    )
    assert f"`{data['command']}`" in (run / "report.md").read_text()
    constants = json.loads((run / "constants.json").read_text())
    assert data["written"] == [f"{name}={value}" for name, value in constants.items()]
    assert data["health"] == list(health.history(read_log(run / "train_log.csv"), constants))
    shares, found = data["columns"]["held_out_correct"], data["intervals"]["held_out_correct"]
    assert [range_ is None for range_ in found] == [share is None for share in shares]
    for share, (low, high) in ((share, range_) for share, range_ in zip(shares, found) if range_):
        assert low <= share <= high and (low, high) == pytest.approx(evaluation.wilson(share, 8))
    ill = shutil.copytree(run, tmp_path / "ill", ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    shutil.copy(make_health_logs.FOLDER / "kl.csv", ill / "train_log.csv")
    assert any("the KL to the starting model is" in line for line in data_of(page.write(ill))["health"])


def test_the_best_evaluation_is_the_first_of_the_highest():
    def result(step, share, lenient=1.0):
        return {"step": step, "answer_accuracy": share, "lenient_accuracy": lenient, "questions": 8}

    shares = [0.5, 0.75, 0.75, 0.7]
    words = evaluation.best([result(25 * i, share) for i, share in enumerate(shares, start=1)])
    assert "step 50, 75.0% right, 100.0% by the last number (last: step 100: 70.0%, 100.0%)" in words
    assert "step 2," in evaluation.best([result(1, 0.5, 0.6), result(2, 0.5, 0.7), result(3, 0.5, 0.7)])
    assert evaluation.best([]) == ""


def test_the_evaluation_before_training_is_not_called_the_best():
    before = {"step": 0, "answer_accuracy": 0.9, "lenient_accuracy": 0.9, "questions": 8}
    result = dict.fromkeys(evaluation.ROWS, 0.5) | {"questions": 8}
    assert page.summary(result, None, [before], {"EVAL_CONFIG": "greedy"})["notes"] == []
    after = before | {"step": 4, "answer_accuracy": 0.5}
    [note] = page.summary(result, None, [before, after], {"EVAL_CONFIG": "greedy"})["notes"]
    assert "step 4, 50.0%" in note


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nowhere"], ["a", "b"]])
def test_a_wrong_folder_is_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["show_run", *arguments])
    with pytest.raises(SystemExit) as stopped:
        settings.answer(show_run.main)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert "RUN_DIR" in said or "runs/mine" in said


def test_a_template_that_lacks_a_place_is_an_error(monkeypatch, tmp_path):
    shutil.copytree(page.WEB, tmp_path / "web")
    monkeypatch.setattr(page, "WEB", tmp_path / "web")
    (tmp_path / "web" / "page.html").write_text("{{policy}}{{style}}{{script}}")
    with pytest.raises(ValueError, match="values to unpack"):
        page.render({})
    with pytest.raises(UserError, match=r"no constants\.json in it"):
        page.write(tmp_path)
