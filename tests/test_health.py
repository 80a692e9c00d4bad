"""Health lines, each provoked by the log of a real run that was spoilt on purpose (make_health_logs.py)."""

import json
import re
import shutil
import subprocess
import sys

import make_health_logs
import pytest

from run import health
from run.run_files import read_log
from settings import HERE, UserError
from tools import show_run

ILL = [name for name in make_health_logs.CASES if name not in make_health_logs.HEALTHY]


def log(name):
    folder = make_health_logs.FOLDER
    rows = read_log(folder / f"{name}.csv")
    constants = json.loads((folder / f"{name}.json").read_text())
    assert len(rows) == constants["NUM_BATCHES"]
    return rows, constants


def kinds(rows, constants):
    """All kinds that hold at some step: `check` on every beginning of the log, as the run itself asks."""
    return [health.check(rows[:i], constants) for i in range(len(rows) + 1)]


@pytest.mark.parametrize("name", ILL)
def test_a_spoilt_run_is_named_with_its_cause_and_the_constant_to_turn(name):
    rows, constants = log(name)
    expected, before = [], {}
    for i, found in enumerate(kinds(rows, constants)):
        expected += [f"step {i}: {found[kind]}" for kind in found if kind not in before]
        before = found
    assert list(health.history(rows, constants)) == expected
    line = [found[name] for found in kinds(rows, constants) if name in found][-1]
    turned = re.findall(r"\b([A-Z][A-Z_0-9]+)=([^\s,;)]+)", line)
    assert "\n" not in line and turned and all(str(constants[name]) == value for name, value in turned)


def test_every_kind_of_line_is_provoked():
    rules = (HERE / "run" / "health.py").read_text().partition("faults = {")[2].partition("}")[0]
    kinds = set(re.findall(r'^        "(\w+)": ', rules, re.M)) - {"mismatch_corrected", "sync"}  # below
    assert kinds == set(ILL)


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
    """The first steps of the default run and of RLOO as recommended, whose gradient of a sum is 15 times as
    large; and all 100 of the committed run."""
    for name in make_health_logs.HEALTHY:
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
    assert health.check([row | dict.fromkeys(row, float("nan")) for row in rows], constants) == {}
    rows, constants = log("kl")  # a step whose answers are all masked has no KL

    def without(*last):
        return [row | ({"kl": float("nan")} if i - len(rows) in last else {}) for i, row in enumerate(rows)]

    assert "kl" in health.check(without(-1, -4), constants)
    assert "kl" not in health.check(without(-1, -3, -4), constants)


def test_the_command_reads_a_runs_folder_and_does_not_import_jax(tmp_path):
    rows, constants = log("kl")
    shutil.copy(make_health_logs.FOLDER / "kl.csv", tmp_path / "train_log.csv")
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    code = (
        "import sys; from tools import show_run; show_run.main(sys.argv[1:])\n"
        "assert not {'jax', 'tunix', 'maxtext'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=HERE, capture_output=True, text=True)
    lines = [f"{tmp_path}: Not over yet, {len(rows)} steps so far", *health.history(rows, constants)]
    lines.append(f"page     {tmp_path}/report.html")
    assert not done.stderr and done.stdout.splitlines() == lines and len(lines) > 1
    del constants["MAX_GRAD_NORM"]
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    with pytest.raises(UserError, match=r"of another version"):
        show_run.main([str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("name", make_health_logs.CASES)
def test_the_spoilt_run_says_so_itself(name, tmp_path):
    """The run of the committed log once more: it prints that log's lines, and report.md repeats them."""
    done = make_health_logs.start(name, tmp_path)
    said = [line.removeprefix("health   ") for line in done.stdout.splitlines() if line.startswith("health ")]
    rows, constants = read_log(tmp_path / "run/train_log.csv"), (tmp_path / "run/constants.json").read_text()
    constants = json.loads(constants)
    assert list(health.history(rows, constants)) == said
    assert any(name in found for found in kinds(rows, constants)) == (name in ILL) == bool(said)
    report = (tmp_path / "run" / "report.md").read_text()
    assert all(line in report for line in said)
