"""Health lines, each provoked by the log of a real run that was spoilt on purpose.

The logs are in golden/health. `make test-slow` does the runs again, and with HEALTH_LOGS=1 keeps
their logs.
"""

import csv
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from short_runs import run_here

import reward_func
from run import health
from run.run_files import read_constants, read_log
from settings import HERE, UserError
from task.run_grader import course_rewards
from tools import show_run

FOLDER = Path(__file__).parent / "golden" / "health"
BROKEN = FOLDER.parent / "broken"


def spoil(name, patch):
    """Writes what a run may read, `changed.jsonl` and `model`; some runs' rewards become one."""
    rows = list(map(json.loads, (HERE / "tiny_gsm8k" / "train.jsonl").read_text().splitlines()))
    # what the model is good at, or gold answers that none of its answers equals, nor comes near
    rows = rows[:16] if name == "solved" else [row | {"answer": "#### 100000"} for row in rows]
    Path("changed.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    # another token ends its sequences than in its training
    shutil.copytree(HERE / "tiny_llama", "model")
    tokens = json.loads(Path("model/tokenizer.json").read_text())["model"]["vocab"]
    path = Path("model/tokenizer_config.json")
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"eos_token": max(tokens, key=tokens.get)})
    )
    sign = {"longer": 1, "entropy": -1}.get(name, 0)

    def by_length(prompts, completions, **columns):
        return [sign * float(len(text)) for text in completions]

    by_length.__module__ = reward_func.__name__  # as if it stood there

    if sign or name == "no_signal":
        for reward in course_rewards(reward_func):
            patch.setattr(reward_func, reward, by_length if sign else reward_func.check_numbers)


# The constants of the runs behind golden/health, beside NUM_BATCHES=20 NUM_TEST_QUESTIONS=8.
CONSTANTS = {
    "healthy": "",
    "rloo": "ADVANTAGE=rloo LOSS_AGG_MODE=seq-mean-token-sum",
    "alike": "TEMPERATURE=0.05 NUM_BATCHES=10",
    "no_signal": "DATASET=changed.jsonl TEST_DATASET=tiny_gsm8k BETA=0.0",
    "solved": (
        "DATASET=changed.jsonl TEST_DATASET=tiny_gsm8k NUM_BATCHES=60 "
        "NUM_ITERATIONS=1 LEARNING_RATE=1e-3"
    ),
    "never_stops": "MODEL=model",
    "cut_off": "TOTAL_GENERATION_STEPS=15",
    "longer": "LEARNING_RATE=0.003 BETA=0.0 NUM_BATCHES=40",
    "kl": "LEARNING_RATE=0.01",
    "format_only": "DATASET=changed.jsonl TEST_DATASET=tiny_gsm8k NUM_BATCHES=30",
    "entropy": "LEARNING_RATE=0.003 BETA=0.0 NUM_BATCHES=40",
    "clipped": "NUM_ITERATIONS=8 LEARNING_RATE=0.005",
    "gradient": "MAX_GRAD_NORM=0.01",
    "mismatch": "TEMPERATURE=3.0 TOP_K=5 BETA=0.0",
    "worse": "LEARNING_RATE=0.03 WARMUP_FRACTION=0.9 MAX_GRAD_NORM=100.0",
}
HEALTHY = ("healthy", "rloo")
ILL = [name for name in CONSTANTS if name not in HEALTHY]
# Runs broken in other ways, and the causes that a report names, the root first. `symptoms` are
# lines that hold, too, and that it leaves out. Each has NUM_TEST_QUESTIONS=64 EVAL_QUESTIONS=32
# EVAL_EVERY=10 EVAL_CONFIG=liberal besides what its .json says.
CAUSES = {
    "learning_rate": dict(
        causes=["kl"], symptoms=["worse", "longer", "late_cut_off", "clipped", "gradient"]
    ),
    # BETA=0: the log has no KL
    "no_kl": dict(causes=["worse"], symptoms=["clipped"]),
    "hot": dict(causes=["hot"]),
    # a reward of one point per digit
    "digits_paid": dict(causes=["gamed"], symptoms=["longer", "late_cut_off"]),
    # a reward for wrong answers
    "wrong_is_right": dict(causes=["gamed"], symptoms=["silenced"]),
    # a reward for tags that the prompt doesn't ask for
    "wrong_tags": dict(causes=["no_signal"]),
    "short": dict(causes=["cut_off"]),
    "four_questions": dict(causes=["by_heart_test"], symptoms=["solved"]),
    # whose weights have noise of half their standard deviation
    "teacher": dict(causes=["teacher"]),
    # it works
    "walk": dict(causes=[]),
    # with twice the NUM_BATCHES, and it works
    "resumed": dict(causes=[], resumed=10),
    # resumed with four times the NUM_BATCHES, but its KL was 58 before that
    "damaged": dict(causes=["kl"], symptoms=["unlearned", "format_only"], resumed=10),
    # BETA=0 and ten times the LEARNING_RATE; the format keeps the reward up
    "collapsed": dict(causes=["unlearned"], symptoms=["format_only"]),
    "still": dict(causes=["still"]),
}


def log(name):
    rows = read_log(FOLDER / f"{name}.csv")
    constants = json.loads((FOLDER / f"{name}.json").read_text())
    assert len(rows) == constants["NUM_BATCHES"]
    return rows, constants


def kinds(rows, constants):
    """All kinds that hold at some step: `check` on every beginning of the log, as the run itself
    asks.
    """
    return [health.check(rows[:i], constants) for i in range(len(rows) + 1)]


@pytest.mark.parametrize("name", ILL)
def test_a_spoilt_run_is_named_with_its_cause_and_the_constant_to_turn(name):
    rows, constants = log(name)
    found = kinds(rows, constants)
    began = [(i, kind) for i, now in enumerate(found) for kind in now if kind not in found[i - 1]]
    assert list(health.history(rows, constants)) == [
        f"step {i}: {found[i][kind]}" for i, kind in began
    ]
    line = [now[name] for now in found if name in now][-1]
    turned = re.findall(r"\b([A-Z][A-Z_0-9]+)=([^\s,;:)]+)", line)
    assert (
        "\n" not in line and turned and all(str(constants[name]) == value for name, value in turned)
    )


def broken(name):
    """Log and constants of a run in golden/broken; its log ends with the test after training."""
    rows = read_log(BROKEN / f"{name}.csv")
    constants = json.loads((BROKEN / f"{name}.json").read_text())
    rows[-1]["test_correct"] = constants.pop("test_correct")
    return rows, constants, CAUSES[name].get("resumed", 0)


@pytest.mark.parametrize("name", CAUSES)
def test_a_broken_run_has_one_cause_and_its_symptoms_are_not_beside_it(name):
    case, (rows, constants, resumed) = CAUSES[name], broken(name)
    found = health.first_found(rows, constants, resumed)
    said = [line.parts[0] for line in health.causes(found)]
    assert said == case["causes"]
    assert set(case.get("symptoms", [])) <= found.keys() - set(said)
    for line in found.values():  # as it was when it first held
        end = int(line.parts[1]["median"][1]["end"])
        assert line.parts[0] in health.check(rows[:end], constants, resumed)
        assert not any(
            line.parts[0] in health.check(rows[:i], constants, resumed) for i in range(end)
        )


def test_a_fall_after_a_resume_is_the_resumes_unless_the_run_was_ill_before_it():
    """Two real logs in one: the steps of a healthy part, then those of a run that goes wrong."""
    (healthy, constants, _), (ill, _, _) = broken("resumed"), broken("learning_rate")
    both = [*healthy[:10], *(row | {"step": row["step"] + 10} for row in ill)]
    constants |= {"NUM_BATCHES": 30}
    found = health.first_found(both, constants, 10)
    [line] = health.causes(found)
    assert line.parts[0] == "resumed" and line.parts[1]["resumed"] == "10"
    reward = statistics.median(row["reward"] for row in healthy[5:10])
    assert line.parts[1]["before_resume.reward:.2f"] == f"{reward:.2f}"
    assert "resumed" not in health.first_found(both, constants)
    assert {"resumed", "kl"} & found.keys() - health.first_found(both, constants, 15).keys() == {
        "resumed"
    }


ALL_LOGS = [*sorted(FOLDER.glob("*.csv")), *sorted(BROKEN.glob("*.csv"))]


@pytest.mark.parametrize("path", ALL_LOGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_number_of_a_line_is_the_logs(path):
    """By another reader of CSV and another median; a number that isn't in the log is no metric."""
    with open(path, newline="") as file:
        table = {int(float(row["step"])): row for row in csv.DictReader(file)}
    constants = json.loads(path.with_suffix(".json").read_text())
    rows, resumed = read_log(path), CAUSES.get(path.stem, {}).get("resumed", 0)
    rows[-1]["test_correct"] = constants.pop("test_correct", math.nan)
    for i in range(len(rows) + 1):
        for line in health.check(rows[:i], constants, resumed).values():
            values = line.parts[1]
            ends = values["median"][1]
            steps = [step for step in table if int(ends["begin"]) <= step <= int(ends["end"])]
            assert len(steps) == 5 and steps[-1] == rows[i - 1]["step"]
            before = [step for step in table if step <= resumed][-5:]
            for place, text in values.items():
                when, _, column = place.partition(":")[0].partition(".")
                if not column or column == "test_correct":
                    continue
                asked = {"now": steps, "first": [1], "before_resume": before}[when]
                asked = steps[-1:] if column == "held_out_correct" else asked
                numbers = [float(table[step][column]) for step in asked]
                median = statistics.median(x for x in numbers if not math.isnan(x))
                assert text == format(median, place.partition(":")[2]), (line, place)


def test_what_is_not_limited_or_corrected_is_not_judged():
    rows, constants = log("gradient")
    assert "gradient" not in health.check(rows, constants | {"MAX_GRAD_NORM": 0.0})
    rows, constants = log("mismatch")
    corrected = constants | {"SAMPLER_CORRECTION": 2.0}
    assert not {"mismatch", "mismatch_corrected"} & health.check(rows, corrected).keys()
    far = [row | {"mismatch": health.MISMATCH_CORRECTED} for row in rows]
    assert "mismatch_corrected" in health.check(far, corrected)


def test_a_sampler_that_lags_behind_is_named_unless_it_was_not_measured():
    """Only vLLM measures `sync_gain`; after the first step, whose rate is 0, it's nan."""
    rows, constants = log("healthy")
    for gain, named in ((0.89, True), (0.95, False), (float("nan"), False)):
        found = health.check([rows[0], *(row | {"sync_gain": gain} for row in rows[1:])], constants)
        assert list(found) == ["sync"] * named


def test_healthy_runs_raise_no_alarm():
    """The first steps of the default run and of RLOO as recommended, whose gradient of a sum is 15
    times as large; and all 100 of the committed run.
    """
    for name in HEALTHY:
        rows, constants = log(name)
        assert list(health.history(rows, constants)) == []
    rows = read_log(HERE / "assets" / "train_log.csv")
    assert len(rows) == 100 and list(health.history(rows, constants)) == []


@pytest.mark.parametrize("name", sorted({*ILL} - {"never_stops", "gradient", "format_only"}))
def test_one_odd_step_raises_no_alarm(name):
    """The metrics of a bad step, for one step in the middle of the healthy run."""
    healthy, constants = log("healthy")
    spoilt, spoilt_constants = log(name)
    bad = next(spoilt[i - 1] for i, f in enumerate(kinds(spoilt, spoilt_constants)) if name in f)
    once = [row | bad | {"step": 13} if i == 12 else row for i, row in enumerate(healthy)]
    assert not any(name in found for found in kinds(once, constants))


def test_too_few_steps_and_missing_metrics_are_not_judged():
    rows, constants = log("alike")
    assert health.check(rows[: health.WINDOW - 1], constants) == {} == health.check([], constants)
    assert "alike" in health.check(rows[: health.WINDOW], constants)
    assert health.check([{"step": row["step"]} for row in rows], constants) == {}
    unknown = [dict.fromkeys(row, float("nan")) | {"step": row["step"]} for row in rows]
    assert health.check(unknown, constants) == {}
    rows, constants = log("kl")  # a step whose answers are all masked has no KL

    def without(*last):
        return [
            row | ({"kl": float("nan")} if i - len(rows) in last else {})
            for i, row in enumerate(rows)
        ]

    assert "kl" in health.check(without(-1, -4), constants)
    assert "kl" not in health.check(without(-1, -3, -4), constants)


def test_the_command_reads_a_runs_folder_and_does_not_import_jax(tmp_path):
    rows, constants = log("kl")
    shutil.copy(FOLDER / "kl.csv", tmp_path / "train_log.csv")
    constants = {name: x for name, x in constants.items() if not isinstance(x, dict)}
    constants["MODEL"] = "tiny_llama"
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    code = "import sys; from tools import show_run; show_run.main(sys.argv[1:])\n"
    code += "assert not {'jax', 'tunix', 'maxtext'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=HERE, capture_output=True, text=True
    )
    lines = [
        f"{tmp_path}: Not over yet, {len(rows)} steps so far",
        *health.history(rows, constants),
    ]
    lines.append(f"page     {tmp_path}/report.html")
    assert not done.stderr and done.stdout.splitlines() == lines and len(lines) > 1
    del constants["MAX_GRAD_NORM"]
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    with pytest.raises(UserError, match=r"of another version"):
        show_run.main([str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTANTS)
def test_the_spoilt_run_says_so_itself(name, empty_folder, monkeypatch):
    """The run of the committed log once more: it prints the lines of its log, and report.md repeats
    them.
    """
    spoil(name, monkeypatch)
    out = run_here(empty_folder, "NUM_BATCHES=20", "NUM_TEST_QUESTIONS=8", *CONSTANTS[name].split())
    said = re.findall("^health   (.*)", out, re.M)
    rows, constants = read_log(Path("run/train_log.csv")), read_constants(Path("run"))
    assert list(health.history(rows, constants)) == said
    assert any(name in found for found in kinds(rows, constants)) == (name in ILL) == bool(said)
    assert all(line in Path("run/report.md").read_text() for line in said)
    if "HEALTH_LOGS" in os.environ:
        shutil.copy("run/train_log.csv", FOLDER / f"{name}.csv")
        shutil.copy("run/constants.json", FOLDER / f"{name}.json")
