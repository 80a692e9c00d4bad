"""report.html without a browser: the data behind it, and that no text of a model leaves its place
there.
"""

import base64
import csv
import hashlib
import itertools
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from hostile import HOSTILE
from short_runs import SHORT, run_here, saved_steps
from test_health import FOLDER

from run import answers, evaluation, page, run_folder
from run.run_files import GRADERS, what_is_right
from settings import HERE, UserError
from tools import show_run

SMALL = shutil.ignore_patterns("checkpoints", "tensorboard")


def inside(path):
    """What is in a page's <style>, its data, and its <script>; an end of a tag in the data would
    add one.
    """
    text = path.read_text(encoding="utf-8")
    [style] = re.findall("<style>(.*?)</style>", text, re.S)
    data, script = re.findall("<script[^>]*>(.*?)</script>", text, re.S)
    return style, data, script


def data_of(path):
    return json.loads(inside(path)[1])


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(scope="module")
def run(finished):
    return finished / "run"


def test_the_page_has_what_the_files_have(run, tmp_path):
    data = data_of(run / "report.html")
    rows = answers.read_lines(run / "answers.jsonl")
    for group, row in zip(data["groups"], rows, strict=True):
        assert all(group[name] == row[name] for name in ("step", "question", "answer"))
        for shown, answer in zip(group["completions"], row["completions"], strict=True):
            assert shown == {k: v for k, v in answer.items() if k not in ("text", "tokens")}
    with open(run / "train_log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    for name in ("reward", "kl", "correct_lenient"):
        assert data["columns"][name] == [None, *(float(row[name]) for row in log)]
    evaluated = {
        e["step"]: e["answer_accuracy"] for e in answers.read_lines(run / "evaluations.jsonl")
    }
    assert data["columns"]["held_out_correct"] == [
        evaluated.get(step) for step in data["columns"]["step"]
    ]
    assert [*evaluated] == [0, 4, 8]
    intervals = filter(None, data["intervals"]["held_out_correct"])
    for (low, high), share in zip(intervals, evaluated.values(), strict=True):
        for end in (low, high):  # where the share is 1.96 standard errors away
            assert abs(end - share) == pytest.approx(
                1.959964 * math.sqrt(end * (1 - end) / 8), abs=1e-6
            )
        assert low <= share <= high
    for when in ("before", "after"):
        result = json.loads((run / f"{when}.json").read_text())
        assert (
            data[when]["completions"] == result["completions"] and len(result["completions"]) == 16
        )
        assert f"{result['lenient_accuracy']:.1%}" in str(data["summary"]["rows"])
    shipped = (HERE / "tiny_gsm8k" / "validation.jsonl").read_text().splitlines()[:8]
    questions = [json.loads(line)["question"] for line in shipped]
    assert [asked["question"] for asked in data["asked"]] == questions

    command = (
        f"python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py {shlex.join([*SHORT, 'RUN_DIR=run'])}"
    )
    assert data["command"] == command and f"`{command}`" in (run / "report.md").read_text()
    assert (
        data["constants"] == json.loads((run / "constants.json").read_text())
        and data["health"] == []
    )
    ill = shutil.copytree(run, tmp_path / "ill", ignore=SMALL)
    shutil.copy(FOLDER / "kl.csv", ill / "train_log.csv")
    assert "kl" in [values["line"][0] for _, values in data_of(page.write(ill))["health"]]


def test_the_page_knows_which_functions_are_the_readers_own(empty_folder):
    """And the advantage of each token, where they differ within an answer."""
    Path("own.py").write_text(
        "import numpy as np\ndef advantage(samples):\n    T = samples.mask.shape[2]\n"
        "    return samples.rewards[..., None] + np.arange(T)\n"
        "def rollouts(c, llm, task, run, step):\n    batch = task.repeat(task.batches[step])\n"
        "    return task.grade(batch, llm.generate(batch, step))\n"
    )
    run_here(empty_folder, *SHORT, "NUM_BATCHES=1", "METHOD=own.py")
    data = data_of(Path("run/report.html"))
    assert sorted(data["own"]) == ["advantage", "rollouts"]
    for group in data["groups"]:
        for answer in group["completions"]:
            tokens = np.arange(len(answer["pieces"]))
            np.testing.assert_allclose(answer["advantages"], answer["reward"] + tokens, atol=1e-5)


def test_the_report_names_the_best_evaluation_which_is_the_first_of_the_highest(run):
    kept = [
        e for e in answers.read_lines(run / "evaluations.jsonl") if e["step"] in saved_steps(run)
    ]
    best = max(kept, key=lambda e: (e["answer_accuracy"], e["lenient_accuracy"]))["step"]
    name, values = data_of(run / "report.html")["best"]
    steps = ", ".join(map(str, saved_steps(run)))
    assert values["steps"] == steps and name in ("best", "best_not_kept")
    assert values["kept[step]" if name == "best_not_kept" else "best[step]"] == str(best)
    assert (run / "report.md").read_text().count("Best on the 8 held-out questions: step ") == 1

    shares = ((0.5, 0.9), (0.75, 0.8), (0.75, 0.9), (0.75, 0.9), (0.7, 1.0))
    results = [
        {"step": 25 * i, "answer_accuracy": right, "lenient_accuracy": lenient, "questions": 8}
        for i, (right, lenient) in enumerate(shares, 1)
    ]
    words = "step 75, 75.0% right, 90.0% by the last number (last: step 125: 70.0%, 100.0%)"
    assert words in evaluation.best(results, [75, 125]) and words in evaluation.best(results, [125])
    said = evaluation.best(results, [50, 125]).parts
    assert said[0] == "best_not_kept" and said[1]["kept[step]"] == "50"
    assert evaluation.best(results, []) is None


def test_the_parts_of_a_resumed_run_have_their_commands_and_steps(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "resumed", ignore=SMALL)
    note = json.loads((copy / "run.json").read_text())
    assert note["parts"] == [{"command": note["command"], "done": 0}]
    parts = run_folder.add_part(note, "second", 3, 8)  # killed before its first checkpoint
    parts = run_folder.add_part({"parts": parts}, "third", 3, 8)
    assert parts == run_folder.add_part({"parts": parts}, "a look at what's over", 8, 8)
    shared = {"overlap": [["test", "train", 3, 16]]}  # as the terminal said
    (copy / "run.json").write_text(json.dumps(note | shared | {"parts": parts}))
    assert note["overlap"] == [] and page.read(copy).overlap == [
        "3 of 16 test questions are training questions, too, and flatter the model."
    ]
    said = [str(line) for line in page.read(copy).parts]
    assert said == [f"Steps 1 to 3: {note['command']}", "Steps 4 to 8: third"]


RIGHT = [  # constants, and what a right answer is; which rows its table and which reasons it has
    ({}, "number", {"answers right", "within 10 %"}, ["turned", "only_form"]),
    ({"REWARD_FUNC": "own.py"}, "score", {"answers right", "right by the last number"}, ["turned"]),
    ({"ENVIRONMENT": "world.py"}, "episode", {"episodes that succeed"}, ["turned"]),
]


@pytest.mark.parametrize(("constants", "right", "rows", "reasons"), RIGHT)
def test_the_words_are_those_of_the_task(run, tmp_path, constants, right, rows, reasons):
    before, after = (result(n) | {"questions": 20, "partial_accuracy": 0.5} for n in (5, 15))
    assert what_is_right(constants, [{"data_source": "gsm8k"}]) == right
    shown = {name for name, *_ in evaluation.comparison([before, after], right)}
    assert rows <= shown and ("within 10 %" in shown) == (right == "number")
    assert ("format right" in shown) == (right != "episode")
    assert [line.parts[0] for line in evaluation.reasons(before, after, right)] == reasons


def test_the_example_is_one_whose_answer_turned_as_most_did():
    up, down = result(15), result(5)
    assert evaluation.example(down, up) == 5 and evaluation.example(up, down) == 5
    assert evaluation.example(up, up) == 0


def test_only_the_pages_own_script_may_run(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    policy = dict(part.split(" ", 1) for part in policy.split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    style, _, script = inside(run / "report.html")
    for code, directive in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'", "data:"}
    # nothing is loaded, links lead to the course's own files: no address but that of SVG's name
    # space
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"<(link|img|iframe)|@import|url\(|innerHTML|insertAdjacent|document\.write", text
    )


def with_hostile_texts(folder):
    """Puts every text of HOSTILE where a model, a world or a data set writes."""
    texts = itertools.cycle(HOSTILE)
    for path in map(
        folder.joinpath, ("answers.jsonl", "evaluations.jsonl", "before.json", "after.json")
    ):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if "reward" in row["completions"][0]:
                row |= {"question": next(texts), "answer": next(texts), "data_source": next(texts)}
                for answer in row["completions"]:
                    answer |= {
                        "text": next(texts),
                        "picture": f"<svg viewBox='0 0 9 9'>{next(texts)}</svg>",
                    }
                    answer["pieces"] = [next(texts) for _ in answer["pieces"]]
                continue
            for name in ("completions", "greedy_completions"):
                row[name] = [HOSTILE[i % len(HOSTILE)] for i in range(len(row[name]))]
            for i, asked in enumerate(row["asked"]):
                asked |= {
                    "question": HOSTILE[(20 + i) % len(HOSTILE)],
                    "answer": HOSTILE[i % len(HOSTILE)],
                }
                asked["data_source"] = HOSTILE[20 + i % 2]
        path.write_text(answers.to_lines(rows))
    return page.write(folder)


def test_hostile_texts_stay_inside_the_data(run, tmp_path):
    path = with_hostile_texts(shutil.copytree(run, tmp_path / "<b>run&amp;", ignore=SMALL))
    _, block, _ = inside(path)
    assert (
        block.isascii() and "<" not in block and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", block)
    )
    shown = [answer for group in json.loads(block)["groups"] for answer in group["completions"]]
    # and nothing is lost
    assert set(HOSTILE) == {piece for answer in shown for piece in answer["pieces"]}


def test_a_run_that_is_still_going_has_a_page_too(run, tmp_path):
    shutil.copy(run / "constants.json", tmp_path)  # before the first step
    assert data_of(page.write(tmp_path))["groups"] == []
    shutil.copy(run / "before.json", tmp_path)
    evaluations = (run / "evaluations.jsonl").read_text()
    (tmp_path / "evaluations.jsonl").write_text(evaluations.splitlines()[0] + "\n")
    # the one before training is not called the best
    assert data_of(page.write(tmp_path))["best"] is None
    (tmp_path / "evaluations.jsonl").write_text(evaluations)
    rows = (run / "train_log.csv").read_text().splitlines(keepends=True)
    (tmp_path / "train_log.csv").write_text("".join(rows[:4]))  # a kill has cost the row of step 4
    text = (run / "answers.jsonl").read_text()
    (tmp_path / "answers.jsonl").write_text(text[: len(text) // 2])  # a line is being written
    data = data_of(page.write(tmp_path))
    assert 0 < len(data["groups"]) < text.count("\n") and "after" not in data
    assert data["summary"]["header"] == ["before"] and data["headline"][0] == [
        "not_over",
        {"steps": "3"},
    ]
    assert data["columns"]["step"] == [0, 1, 2, 3, 4, 8]  # not the evaluation of step 4
    assert [bool(ends) for ends in data["intervals"]["held_out_correct"]] == [1, 0, 0, 0, 1, 1]


def test_a_large_run_leaves_steps_out_evenly_and_keeps_both_ends():
    groups = [{"step": step, "text": "x" * 1000} for step in range(1, 101) for _ in range(2)]
    assert page.thin(groups, 250_000) == groups and page.thin([], 10) == []
    steps = [group["step"] for group in page.thin(groups, 50_000)[::2]]
    assert steps == [*range(1, 100, 5), 100]  # of 200 groups
    # of two steps that are too large one question in so many is kept; a "<" takes six bytes in the
    # file
    groups = [{"step": step, "i": i, "text": "<" * 100} for step in (1, 2, 3) for i in range(50)]
    kept = page.thin(groups, 20_000)
    assert [(g["step"], g["i"]) for g in kept] == [
        (step, i) for step in (1, 3) for i in range(0, 50, 4)
    ]
    assert page.thin(groups, -10) == [groups[0], groups[100]]


def test_of_long_evaluations_the_same_questions_are_kept_in_all():
    results = [
        {"step": i, "completions": [f"{k} " + "word " * 600 for k in range(512)]} for i in range(7)
    ]
    kept = page.fewer_questions(results)
    assert 0.8 * page.OF_QUESTIONS < len(page.to_json(kept)) < 1.01 * page.OF_QUESTIONS
    every = round(512 / len(kept[0]["completions"]))
    assert kept == [
        {"step": one["step"], "completions": one["completions"][::every]} for one in results
    ]


def test_every_sentence_and_label_has_chinese_with_the_same_places():
    words = json.loads((page.WEB / "words.json").read_text("utf-8"))
    pairs = [(one["en"], one["zh"]) for one in words["sentences"].values()] + list(
        words["labels"].items()
    )
    for english, chinese in pairs:
        places = [sorted(re.findall("{.+?}", text)) for text in (english, chinese)]
        assert chinese and places[0] == places[1], english


@pytest.mark.parametrize(
    ("right", "wrong"), [(0, 0), (5, 0), (6, 0), (0, 6), (12, 3), (12, 4), (300, 260)]
)
def test_a_change_is_clear_if_chance_is_below_five_percent(right, wrong):
    n = right + wrong
    tail = sum(math.comb(n, k) for k in range(min(right, wrong) + 1)) / 2**n
    clear = 2 * tail < 0.05
    before = [False] * right + [True] * wrong + [True, False]
    after = [True] * right + [False] * wrong + [True, False]
    assert evaluation.mcnemar(before, after) == (right, wrong, clear * (1 if right > wrong else -1))


def result(right, formed=20, number=None, step=0):
    """An evaluation of 20 answers: so many right, in the format, and right by the last number."""
    counts = right, right if number is None else number, formed
    lists = [[i >= 20 - count for i in range(20)] for count in counts]
    shares = zip(("answer_accuracy", "lenient_accuracy", "format_accuracy"), map(np.mean, lists))
    return (
        dict(zip(("correct", "correct_lenient", "format_ok"), lists))
        | dict(shares)
        | {"step": step}
    )


@pytest.mark.parametrize(
    ("before", "after", "held_out", "expected"),
    [
        ([10], [20], [], ["worked"]),
        ([10, 10], [20, 20], [], ["worked", "format_change"]),
        ([0, 0, 0], [0, 0, 20], [], ["worked"]),  # only by the number
        ([20], [10], [], ["got_worse"]),
        ([15], [20], [], ["unclear"]),
        ([0], [0], [], ["no_gain"]),
        ([0], [20], [0, 10, 20, 20], ["worked", "flat"]),
        ([0], [20], [0, 10, 20], ["worked", "rising"]),
        ([0], [20], [0, 20], ["worked"]),  # nothing is known in between
    ],
)
def test_the_headline_claims_what_was_measured(before, after, held_out, expected):
    """Of 20 answers before and after: how many are right, in the format (or all), and right by the
    last number (or as many as are right). Of the held-out evaluations: how many are right.
    """
    curve = [result(right, step=step) for step, right in enumerate(held_out)]
    said = evaluation.headline([result(*before), result(*after)], curve, 9)
    assert [line.parts[0] for line in said] == expected
    assert expected[-1] != "flat" or said[-1].parts[1] == {"step": "2"}


def test_a_dip_of_the_held_out_curve_says_whether_the_format_did_it():
    before = result(0), result(20, step=1)
    [clear, chance] = evaluation.dips(
        [*before, result(10, formed=10, number=20, step=2), result(9, step=3)]
    )
    assert clear[:2] == (2, True) and list(clear[2].parts[1].values()) == ["2", "10", "10", "0"]
    assert chance[:2] == (3, False) and chance[2].parts[1]["form"] == "0"


def test_two_runs_are_laid_over_each_other_unless_they_were_asked_other_questions(
    run, tmp_path, capsys
):
    other = shutil.copytree(run, tmp_path / "other", ignore=SMALL)
    constants = json.loads((run / "constants.json").read_text())

    def change(name, text):
        (other / name).write_text(text)
        show_run.main([str(run), str(other)])

    change("constants.json", json.dumps(constants | {"BETA": 0.5, "RUN_DIR": "x"}))
    assert f"page     {run}/compare.html" in capsys.readouterr().out
    data = data_of(run / "compare.html")
    assert [one["constants"]["BETA"] for one in data["runs"]] == [constants["BETA"], 0.5]
    [name, values] = data["headline"][0]
    assert name == "no_winner" and values["shares"][1]["high:.1%"] == values["shares"][1]["low:.1%"]
    alone = data_of(run / "report.html")
    assert [one["columns"] for one in data["runs"]] == [alone["columns"]] * 2
    for file in ("evaluations.jsonl", "before.json"):
        text = (other / file).read_text()
        with pytest.raises(UserError, match="not the same questions"):
            change(file, text.replace("How many", "How few", 1))
        (other / file).write_text(text)
    with pytest.raises(UserError, match="EVAL_CONFIG=standard"):
        change("constants.json", json.dumps(constants | {"EVAL_CONFIG": "standard"}))


OTHER = [  # constants and identity of the second run, and what is said to differ; refused or not
    ({"REWARD_FUNC": "own.py"}, {}, "REWARDS and REWARD_FUNC", True),
    ({"REWARDS": "compute_score"}, {}, "REWARDS and REWARD_FUNC", True),
    ({"REWARDS": "mark_reward,check_answer"}, {}, "REWARDS and REWARD_FUNC", True),
    ({}, {GRADERS: "0" * 64}, "REWARDS and REWARD_FUNC", True),
    ({"ENVIRONMENT": "world.py"}, {}, "ENVIRONMENT", True),
    ({"EVAL_CONFIG": "standard"}, {}, "EVAL_CONFIG", True),
    ({"MODEL": "other"}, {"MODEL": "0" * 128}, "MODEL", False),
    ({"TEMPLATE": "Q: {question}"}, {}, "TEMPLATE and SYSTEM_PROMPT", False),
    ({"TOTAL_GENERATION_STEPS": 9}, {}, "TOTAL_GENERATION_STEPS", False),
    ({"REWARDS": "check_numbers"}, {}, "", False),  # right is the same
    ({"SYSTEM_PROMPT": "not in TEMPLATE"}, {}, "", False),
    ({"BETA": 0.5, "SEED": 3}, {"DATASET": "0" * 64}, "", False),
]


@pytest.mark.parametrize(("constants", "identity", "names", "refused"), OTHER)
def test_figures_that_mean_something_else_are_refused_and_other_differences_named(
    run, tmp_path, capsys, constants, identity, names, refused
):
    other = shutil.copytree(run, tmp_path / "other", ignore=SMALL)
    for name, changes in (("constants.json", constants), ("run.json", {"identity": identity})):
        text = json.loads((other / name).read_text())
        if name == "run.json":
            changes = {"identity": text["identity"] | identity}
        (other / name).write_text(json.dumps(text | changes))
    if refused:
        with pytest.raises(UserError, match=f"not the same {names}"):
            show_run.main([str(run), str(other)])
        return
    show_run.main([str(run), str(other)])
    out, reasons = capsys.readouterr().out, data_of(run / "compare.html")["reasons"]
    assert (f"note: the runs also differ in {names}\n" in out) == bool(names)
    assert reasons[1:] == ([["differ", {"names": names}]] if names else [])


def test_the_same_file_name_with_another_reward_in_it_is_another_reward(run, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for digest, folder in zip("01", folders):
        shutil.copytree(run, folder, ignore=SMALL)
        for name, changes in (
            ("constants.json", {"REWARD_FUNC": "own.py"}),
            ("run.json", {"identity": {"REWARD_FUNC": digest * 64}}),
        ):
            (folder / name).write_text(
                json.dumps(json.loads((folder / name).read_text()) | changes)
            )
    with pytest.raises(UserError, match="not the same REWARDS and REWARD_FUNC"):
        show_run.main(list(map(str, folders)))
