"""What is logged, against the tokens and texts themselves; the profiler's trace; memory; several
devices.
"""

import json
import mmap
import os
import shutil
import statistics
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
from jax.profiler import ProfileData
from short_runs import finish, run_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from xprof.convert import raw_to_tool_data

import grpo_llama3_1_8b_demo as demo
import settings
from model import llama
from run import answers, process, training
from run.run_files import read_log

STEPS, SAVED, B, G, T = 4, 2, 4, 4, 13
DAY = 86_400  # seconds
ARGUMENTS = [
    f"NUM_BATCHES={STEPS}",
    f"BATCH_SIZE={B}",
    f"NUM_GENERATIONS={G}",
    f"TOTAL_GENERATION_STEPS={T}",
    "NUM_TEST_QUESTIONS=4",
    f"SAVE_INTERVAL_STEPS={SAVED}",
    "EVAL_CONFIG=liberal",
    "EVAL_EVERY=3",
    "EVAL_QUESTIONS=8",
    "LOG_ANSWERS_EVERY=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One short run in this process: its folder, and the rows of its log."""
    folder, evaluate, evaluations = tmp_path_factory.mktemp("monitor"), demo.evaluate, []

    def long_evaluation(*arguments):
        evaluations.append(evaluate(*arguments))
        return evaluations[-1]

    def clock():  # each evaluation takes a day
        return time.perf_counter() + DAY * len(evaluations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "evaluate", long_evaluation)
        patch.setattr(training, "time", SimpleNamespace(perf_counter=clock, time=time.time))
        run_here(folder, *ARGUMENTS, "PROFILE_DIR=trace")
    # before and after; before the first step, after the third and the fourth
    assert len(evaluations) == 5
    return {"folder": folder, "rows": read_log(folder / "run" / "train_log.csv")}


def test_the_columns_follow_from_tokens_texts_and_rewards(run):
    eos = llama.load_tokenizer(settings.HERE / "tiny_llama").eos_token_id
    at_the_limit = 0
    groups = {}
    for line in answers.read_lines(run["folder"] / "run" / "answers.jsonl"):
        groups.setdefault(line["step"], []).append(line["completions"])
    names = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
    assert len(run["rows"]) == STEPS == len(groups)
    for row in run["rows"]:
        step = groups[row["step"]]
        written = [answer for group in step for answer in group]
        lengths, ended = zip(
            *((len(answer["tokens"]), eos in answer["tokens"]) for answer in written)
        )
        # an answer that ends at the limit isn't cut off
        assert row["cut_off"] == 1 - np.mean(ended)
        at_the_limit += sum(end and length == T for end, length in zip(ended, lengths))
        assert row["length"] == pytest.approx(sum(lengths) / (B * G), rel=1e-12)
        assert row["tokens_per_second"] == pytest.approx(sum(lengths) / row["seconds"], rel=1e-12)
        assert row["distinct"] == np.mean(
            [len({answer["text"] for answer in group}) for group in step]
        )
        for name in names:
            mean = np.mean([answer["points"][name] for answer in written])
            assert row[f"reward_{name}"] == pytest.approx(mean, abs=1e-9)
        assert row["reward"] == pytest.approx(
            sum(row[f"reward_{name}"] for name in names), abs=1e-9
        )
        spread = [
            statistics.stdev(sum(answer["points"].values()) for answer in group) for group in step
        ]
        assert row["reward_std"] == pytest.approx(np.mean(spread), abs=1e-6)
        assert 0 < row["seconds"] < DAY  # without the evaluations
    # else this would show nothing
    assert at_the_limit and any(row["cut_off"] for row in run["rows"])


def test_tensorboard_has_every_figure_of_every_step_and_the_evaluations_where_a_step_ends_with_one(
    run,
):
    evaluations = {
        e["step"]: e for e in answers.read_lines(run["folder"] / "run" / "evaluations.jsonl")
    }
    assert list(evaluations) == [0, 3, 4]
    events = EventAccumulator(str(run["folder"] / "run" / "tensorboard"))
    events.Reload()
    scalars = {
        tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }
    assert (
        scalars.keys()
        == run["rows"][0].keys()
        > {"reward", "kl", "loss", "grad_norm", "beta", "mismatch"}
    )
    for name, logged in scalars.items():
        column = {int(row["step"]): row[name] for row in run["rows"]}
        if name in training.HELD_OUT:
            column = {step: value for step, value in column.items() if not np.isnan(value)}
            assert column == {step: evaluations[step][training.HELD_OUT[name]] for step in (3, 4)}
        assert logged == pytest.approx(column, rel=1e-6), name  # float32


def test_the_trace_holds_the_third_step_and_no_other(run):
    [file] = run["folder"].glob("trace/plugins/profile/*/*.xplane.pb")
    planes = ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]

    def calls(program):  # of which jax writes two events, one inside the other
        spans = [(e.start_ns, e.end_ns) for e in events if e.name == f"PjitFunction({program})"]
        return sum(not any(a < start and end < b for a, b in spans) for start, end in spans)

    assert calls("update") == 2  # NUM_ITERATIONS
    assert calls("_decode_all") == 3  # the answers, and two for its evaluation
    # TensorBoard's plugin is xprof; this is what it does with the file
    data, kind = raw_to_tool_data.xspace_to_tool_data([str(file)], "trace_viewer", {})
    names = {event.get("name", "") for event in json.loads(data)["traceEvents"]}
    assert kind == "application/json" and any(
        "jit" in name and "_decode_all" in name for name in names
    )


def test_memory_counts_what_is_there():
    before = process.memory_gib()
    on_device = jnp.ones((8, 1 << 20))  # 32 MiB
    # 256 MiB of its own, not what a test has freed
    on_host = np.frombuffer(mmap.mmap(-1, 1 << 28), np.uint8)
    on_host[:] = 1  # touched
    after = process.memory_gib()
    used = {name: (after[name] - before[name]) * 1024 for name in before}
    assert used["memory_device_0_gib"] == on_device.nbytes / 2**20 == 32
    # the CPU device lies in the same process, but can take what an earlier test has freed; the rest
    # is the allocators'
    assert 250 < used["memory_host_gib"] < 330
    del on_host


def test_memory_is_the_runtimes_own_count_where_it_keeps_one(monkeypatch):
    """A stand-in for a TPU's device, of which there is none here."""
    stats = {"bytes_in_use": 3 << 30, "peak_bytes_in_use": 5 << 30, "bytes_limit": 95 << 30}
    chip = SimpleNamespace(id=3, memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [chip])
    used = process.memory_gib()
    assert (
        used["memory_device_3_gib"] == 3
        and used["memory_device_3_peak_gib"] == 5
        and len(used) == 3
    )


def test_a_resumed_log_keeps_what_was_there_and_takes_new_columns(tmp_path):
    """As after a resume on more devices: rows beyond the checkpoint go, columns of both stay."""
    path = tmp_path / "train_log.csv"
    path.write_text("step,reward,memory_device_1_gib\n1,2.5,0.5\n2,3.5,0.5\n3,4.5,0.5\n")
    log = training.TrainingLog(tmp_path, settings.read(demo.Constants, []), 2)
    shown = dict.fromkeys(("correct", "format_ok", "kl"), 0.0)
    log.add({"step": 3, "reward": 9.0, "reward_new": 1.0} | shown)
    # both are on the disk
    read, events = read_log(path), EventAccumulator(str(tmp_path / "tensorboard"))
    assert events.Reload().Scalars("reward")[0].value == 9.0
    log.close()
    assert [row["reward"] for row in log.rows] == [2.5, 3.5, 9.0]
    assert [row["reward"] for row in read] == [2.5, 3.5, 9.0] and read[2]["reward_new"] == 1.0
    assert read[0]["memory_device_1_gib"] == 0.5 and np.isnan(read[2]["memory_device_1_gib"])
    assert {p.name for p in tmp_path.iterdir()} == {"train_log.csv", "tensorboard"}


def test_a_row_is_appended_and_half_a_row_is_no_row(tmp_path):
    """A kill in the middle of a write leaves half a line; a resumed run writes it anew."""
    c, path = settings.read(demo.Constants, []), tmp_path / "train_log.csv"
    shown = dict.fromkeys(("reward", "correct", "format_ok", "kl", "answers"), 8.0)
    log = training.TrainingLog(tmp_path, c, 0)
    log.add({"step": 1} | shown)
    file, before = path.stat().st_ino, path.read_bytes()
    for step in (2, 3):
        log.add({"step": step} | shown)
    log.close()
    after = path.read_bytes()
    assert path.stat().st_ino == file and after.startswith(before)
    for cut in range(2, len(after) - len(before)):  # a line ends with \r\n, and \r will do
        path.write_bytes(after[:-cut])
        assert [row["step"] for row in read_log(path)] in ([1, 2], [1])
    log = training.TrainingLog(tmp_path, c, 1)
    for step in (2, 3):
        log.add({"step": step} | shown)
    log.close()
    assert path.read_bytes() == after


def test_tensorboard_has_each_step_once_after_a_kill_and_a_resume(tmp_path, monkeypatch):
    """Killed after step 3 with a checkpoint of step 1, twice; TensorBoard's own reader."""
    c = settings.read(demo.Constants, [])
    shown = dict.fromkeys(("correct", "format_ok", "kl", "answers"), 0.0)
    for start_at, first, last in ((1e9, 0, 3), (1e9 + 60, 1, 3), (1e9 + 120, 1, 4)):
        monkeypatch.setattr(time, "time", lambda start_at=start_at: start_at)  # names the file
        log = training.TrainingLog(tmp_path, c, first)
        for step in range(first + 1, last + 1):
            log.add({"step": step, "reward": start_at - 1e9 + step} | shown)
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(e.step, e.value) for e in events] == [(1, 1.0), (2, 122.0), (3, 123.0), (4, 124.0)]
    assert [row["reward"] for row in read_log(tmp_path / "train_log.csv")] == [1, 122, 123, 124]


def test_a_group_whose_rewards_differ_by_rounding_has_no_signal():
    rewards = np.array([[0.1 + 0.2, 0.3], [1e10 + 0.1, 1e10 + 0.1 + 2e-6], [0.3, 0.301]])
    texts, ended = np.full((3, 2), "", object), np.ones(6, bool)
    grader = SimpleNamespace(
        **dict.fromkeys(("score", "format_right", "right_lenient"), lambda: np.zeros(6))
    )
    written = SimpleNamespace(texts=texts.ravel(), lengths=np.ones(6), ended=ended)
    flat = SimpleNamespace(answers=written, graded={})
    answers = SimpleNamespace(texts=texts)
    samples = SimpleNamespace(rewards=rewards, flat=lambda: flat, answers=answers, reward_parts={})
    assert training.answer_metrics(grader, samples, 1.0)["zero_variance"] == pytest.approx(2 / 3)


# --- several devices: the run above once more, on virtual devices of this CPU


def start(folder, devices, *arguments, **environment):
    """The script in a process with so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices} {os.environ['XLA_FLAGS']}"
    arguments = (*ARGUMENTS, "RUN_DIR=run", *arguments)
    return short_runs.start(folder, *arguments, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", **environment)


def assert_same_curves(rows, expected):
    """Every figure but time, memory and `mismatch`, which is itself an error of rounding.

    Sums in another order differ by about 1e-7; Adam, which divides by the square root of tiny
    second moments, makes up to 1e-5 of that within these steps. One other token in one answer moves
    the length by 2e-3 of it.
    """
    other = ("seconds", "tokens_per_second", "memory", "mismatch")
    names = [name for name in expected[0] if not name.startswith(other)]
    assert {"step", "reward", "loss", "kl", "entropy", "grad_norm", "length"} < set(names)
    for name in names:
        found, wanted = ([row[name] for row in log] for log in (rows, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.fixture(scope="module")
def run_on_8(run, tmp_path_factory):
    """RUN_DIR of a run on 8 devices."""
    folder = tmp_path_factory.mktemp("devices")
    assert f"run      {STEPS} steps on 8 cpu device(s)" in finish(start(folder, 8))
    return folder / "run"


def test_on_8_devices_the_curves_are_those_of_one(run, run_on_8):
    rows = read_log(run_on_8 / "train_log.csv")
    assert_same_curves(rows, run["rows"])
    # Weights, reference and moments are cut in eight; a few small arrays are whole on the first
    # device. Only later may a checkpoint that is being written hold copies of its own.
    held = [rows[0][f"memory_device_{i}_gib"] for i in range(8)]
    assert max(held) < run["rows"][0]["memory_device_0_gib"] / 7
    assert np.ptp(held) < 0.01 * max(held)


def test_a_checkpoint_of_8_devices_goes_on_on_one(run, run_on_8, tmp_path):
    """As if killed between the first checkpoint and the end."""
    copy = shutil.copytree(run_on_8, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / str(STEPS))
    (copy / "after.json").unlink()
    assert f"going on after step {SAVED} of {STEPS}" in run_here(tmp_path, *ARGUMENTS)
    assert_same_curves(read_log(copy / "train_log.csv"), run["rows"])


def two_hosts(folder, each):
    """Two processes with so many devices each, joined by jax.distributed over this machine's own
    network.
    """
    address = f"127.0.0.1:{short_runs.free_port()}"
    return [
        start(
            folder,
            each,
            "DISTRIBUTED=True",
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_hosts_of_which_one_is_killed_go_on_with_two_devices_each_as_one(run, tmp_path):
    """As if a node were lost behind the first checkpoint; what runs the job ends the other one.

    One device each is a case of its own: placing a batch by `jax.device_put` aborts there
    (devices.py).
    """
    first, second = two_hosts(tmp_path, 1)
    short_runs.wait_for(lambda: short_runs.saved_steps(tmp_path / "run"), first)
    second.kill()
    first.kill()
    first.communicate(), second.communicate()
    assert short_runs.saved_steps(tmp_path / "run") == [SAVED]
    before = (tmp_path / "run" / "before.json").read_bytes()
    outs = [finish(process) for process in two_hosts(tmp_path, 2)]
    assert f"going on after step {SAVED} of {STEPS}" in outs[0] and "on 4 cpu device(s)" in outs[0]
    assert "answers right" not in outs[1]
    assert (tmp_path / "run" / "before.json").read_bytes() == before
    hosts = tmp_path / "run", tmp_path / "run" / "host_1"
    for folder in hosts:
        assert_same_curves(read_log(folder / "train_log.csv"), run["rows"])
    assert not (hosts[1] / "checkpoints").exists()
    folders = (*hosts, run["folder"] / "run")
    first, second, alone = (answers.read_lines(folder / "answers.jsonl") for folder in folders)
    assert first == second and len(first) == len(alone) == STEPS * B
    for mine, expected in zip(first, alone):
        for answer, other in zip(mine["completions"], expected["completions"], strict=True):
            assert answer["tokens"] == other["tokens"] and answer["points"] == other["points"]
            np.testing.assert_allclose(answer["log_prob_after"], other["log_prob_after"], atol=1e-3)
    mine, alone = (json.loads((folder / "result.json").read_text()) for folder in folders[::2])
    for when in ("before", "after"):
        assert mine[when] == alone[when]
