"""pass_at_k.py: the estimate against all choices of k answers, of real runs, and these against the
grader.
"""

import csv
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from short_runs import SHORT

from model.rollout import MaxTextRollout
from settings import HERE, UserError
from task.grading import grade, last_number
from tools import pass_at_k

NUM_QUESTIONS, SAMPLES = 5, 8
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


def test_the_interval_is_that_of_the_mean():
    values = np.random.default_rng(0).beta(0.5, 0.5, 400)
    low, high = pass_at_k.interval(values, seed=1)
    half = 1.96 * values.std(ddof=1) / 20  # the normal approximation, good at 400 questions
    # 2,000 resamples place an end to about 4 % of the half width
    assert (low, high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.12 * half
    )
    assert pass_at_k.interval(np.ones(9), seed=1) == (1, 1)


def test_counts_and_table_of_real_runs(finished, monkeypatch):
    """Of a run that is over, and of a copy of it that ended at step 2."""
    for name in ("seed_0", "seed_1"):
        shutil.copytree(finished / "run", name)
    for step in (4, 6, 8):
        shutil.rmtree(f"seed_1/checkpoints/{step}")
    texts = []
    generate = MaxTextRollout.generate

    def observed(self, prompts, config, **kwargs):
        # the policy itself
        assert (config.temperature, config.top_k, config.top_p) == (1.0, -1, 1.0)
        output = generate(self, prompts, config, **kwargs)
        texts.extend(output.text)
        return output

    monkeypatch.setattr(MaxTextRollout, "generate", observed)
    arguments = [
        "CHECKPOINT=seed_0,seed_1",
        f"SAMPLES={SAMPLES}",
        "BATCH_SIZE=4",
        f"NUM_QUESTIONS={NUM_QUESTIONS}",
        "RUN_DIR=out",
    ]
    pass_at_k.main(arguments)
    shipped = (HERE / "tiny_gsm8k" / "test.jsonl").read_text().splitlines()[:NUM_QUESTIONS]
    gold = [json.loads(line)["answer"].split("#### ")[1] for line in shipped]
    assert len(texts) == 3 * NUM_QUESTIONS * SAMPLES  # untrained, and twice trained
    by_model = np.reshape(texts, (3, NUM_QUESTIONS, SAMPLES))
    readings = {"strict": grade, "lenient": lambda text, answer: last_number(text) == int(answer)}
    with open("out/pass_at_k.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 4
    for row in rows:
        model = ["untrained", "seed_0", "seed_1"].index(row["model"])
        right = np.array(
            [
                [readings[row["reading"]](text, answer) for text in answers]
                for answers, answer in zip(by_model[model], gold)
            ]
        )
        k = int(row["k"])
        solved = [any(choice) for answers in right for choice in itertools.combinations(answers, k)]
        # as it is rounded
        assert float(row["pass_at_k"]) == pytest.approx(np.mean(solved), abs=1e-5)
        assert float(row["low"]) <= float(row["pass_at_k"]) <= float(row["high"])
        assert int(row["never_right"]) == (right.sum(axis=1) == 0).sum()
        assert (row["questions"], row["samples"]) == (str(NUM_QUESTIONS), str(SAMPLES))
    assert not np.array_equal(by_model[0], by_model[1])
    assert (by_model[..., :4] != by_model[..., 4:]).any()  # each batch has draws of its own


def test_runs_whose_figures_mean_something_else_are_not_put_into_one_table(finished, monkeypatch):
    """One row is the untrained model, for all of them. Questions, prompt and limits differ."""
    asked = []
    monkeypatch.setattr(pass_at_k, "count_right", lambda *given: asked.append(given))
    shutil.copytree(finished / "run", "one")
    lines = (HERE / "tiny_gsm8k" / "test.jsonl").read_text()
    Path("test.jsonl").write_text(lines.replace("#### ", "#### 1"))
    for changes, names in (
        ({"TEST_DATASET": "test.jsonl"}, "questions"),
        ({"TEMPLATE": "Tom {question}"}, "TEMPLATE and SYSTEM_PROMPT"),
        ({"TOTAL_GENERATION_STEPS": 20}, "TOTAL_GENERATION_STEPS"),
        ({"REWARDS": "compute_score"}, "REWARDS and REWARD_FUNC"),
    ):
        shutil.copytree(finished / "run", "two", dirs_exist_ok=True)
        constants = json.loads(Path("two/constants.json").read_text())
        Path("two/constants.json").write_text(json.dumps(constants | changes))
        with pytest.raises(
            UserError, match=f"CHECKPOINT=one,two: two and one differ in {names}, so"
        ):
            pass_at_k.main(["CHECKPOINT=one,two", "SAMPLES=2", "NUM_QUESTIONS=4", "RUN_DIR=out"])
    assert not asked
