"""DRY_RUN=True: a verdict on any machine, nothing written, one line for what would stop the run."""

import contextlib
import importlib.util
import json
import re
import resource
import shutil
import sys
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from short_runs import SHORT, run_here
from test_machine import on

import grpo_llama3_1_8b_demo as demo
import machines
import reward_func
import settings
from run import memory, start
from settings import UserError

EIGHT_B = [f"MODEL={memory.LLAMA_3_1_8B}", "DATASET=gsm8k", "DRY_RUN=True"]
# all weights, in one gradient pass
FULL = ["LORA_RANK=0", "BATCH_SIZE=2", "TRAIN_MICRO_BATCH_SIZE=0"]
QWEN = ["MODEL=Qwen/Qwen3-0.6B", "DATASET=tiny_gsm8k", "DRY_RUN=True", "TRAIN_MICRO_BATCH_SIZE=1"]
GIB = 2**30
ALONE = "not compiled; weights and moments alone take"
PARAMETERS_8B, PARAMETERS_70B = 8_030_261_248, 70_553_706_496  # as on the models' pages
# rank 32, layers, in + out of q and o, k and v, gate, up and down
LORA_8B = 32 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336))


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(autouse=True)
def without_a_network(empty_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(huggingface_hub, "get_session", None)  # called, it raises


def test_the_eight_b_job_gets_its_verdict_on_a_laptop(tmp_path, capsys):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    demo.main(EIGHT_B)
    # Nothing of the model is allocated: its float32 weights alone are 30 GiB.
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 4 * GIB
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == (
        "dry run  nothing but memory can stop the run (fits: v5p-8, v6e-8; does not fit: v5p-64, "
        "v6e-4, v6e-1, v5e-8, v5e-4, v5e-1); nothing was written"
    )
    for words in (
        f"{PARAMETERS_8B:,} parameters",
        "116 steps",
        f"6 checkpoints of {12 * LORA_8B / GIB:.3g} GiB",
        "64 prompts x 8 answers = 512 sequences, up to 524,288 tokens, in 32 gradient pass(es)",
        "hub is out of reach; published sizes from here",
        "data     unchecked (DATASET=gsm8k: no network",
        "v5p-64   no: BATCH_SIZE=64: the 16 sequences of a gradient pass",  # among 32 chips
        "v5p-8    yes: 4 of 4 chips train, compiled earlier",
        "cost     v6e-8: 1.2 to 3.8 h, 27 to 81 dol",
    ):
        assert words in said
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_not_compiled_is_not_given_the_eight_b_figures(capsys):
    """Llama 3.1 70B from nothing but its config.json: a lower bound.

    float32 weights, two moments, the reference: 16 bytes per parameter over 32 chips
    """
    hf = memory.published_config()
    hf.update(
        dict(
            hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64
        )
    )
    hf.save_pretrained("llama_70b")
    demo.main([*EIGHT_B, *FULL, "MODEL=llama_70b", "BATCH_SIZE=8"])
    said = capsys.readouterr().out
    assert "llama_70b: no weights and no tokenizer in it, unchecked" in said
    least = 16 * PARAMETERS_70B / 32 / GIB
    assert f"v5p-64   unknown: 32 of 32 chips train, {ALONE} {least:.1f} of 95.73" in said
    assert "\nv6e-8    no: BATCH_SIZE=8, lower it, or take a larger machine" in said


def test_the_laptop_job_is_planned_in_full_and_leaves_nothing(tmp_path, capsys):
    small = ["NUM_BATCHES=3", "BATCH_SIZE=2", "NUM_GENERATIONS=2", "NUM_TEST_QUESTIONS=4"]
    demo.main([*small, "DRY_RUN=True", "RUN_DIR=run", "NUM_ITERATIONS=2"])
    said = capsys.readouterr().out
    assert (
        "4,000 questions of" in said and " 4 questions of" in said and "at most 28 tokens" in said
    )
    assert "3 steps, 6 updates, 12 answers" in said
    assert f"devices  {jax.device_count()} x cpu, generation by maxtext" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["DRY_RUN=True", "DRY_RUN=False"])
def test_every_reward_is_tried_before_the_model_is_loaded(way, tmp_path, monkeypatch):
    """Also a function that was added to reward_func.py and isn't one."""
    path = tmp_path / "course.py"
    helper = "\n\ndef half(points):\n    return points / 2\n"
    path.write_text(Path(reward_func.__file__).read_text() + helper)
    spec = importlib.util.spec_from_file_location("course", path)
    spec.loader.exec_module(course := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(demo, "reward_func", course)
    monkeypatch.setattr(start, "load_llm", None)  # called, it raises
    with pytest.raises(
        UserError, match=r"course.py: reward function half raised TypeError: .*underscore$"
    ):
        demo.main([way])
    assert not Path("runs").exists()


RECORDS = """
import itertools, json
count = itertools.count()

def recorded(**columns):
    kinds = {
        name: [str(type(value)), str(getattr(value, "dtype", "")), *{str(type(x)) for x in value}]
        for name, value in columns.items()
    }
    with open("kinds.jsonl", "a") as file:
        file.write(json.dumps([next(count), kinds]) + "\\n")
    return [0.0] * len(columns["completions"])
"""


def test_a_reward_is_tried_with_what_a_run_gives_it_and_forgets_the_trial(empty_folder):
    """The types of all columns; the counter, which the first step finds at 0."""
    Path("own.py").write_text(RECORDS)
    run_here(empty_folder, *SHORT, "NUM_BATCHES=1", "REWARD_FUNC=own.py", "REWARDS=recorded")
    lines = [json.loads(line) for line in Path("kinds.jsonl").read_text().splitlines()]
    (_, tried), (first, given) = lines
    for kinds in (tried, given):  # texts of other lengths
        kinds.update({name: re.sub(r"<U\d+", "<U", str(kind)) for name, kind in kinds.items()})
    assert tried == given and first == 0


def test_the_disk_that_holds_the_checkpoints_is_the_one_that_is_checked(tmp_path, monkeypatch):
    """RUN_DIR has room for everything, the disk of CHECKPOINT_DIR for nothing; a bucket is not
    asked.
    """
    small = tmp_path / "small"
    small.mkdir()
    sizes = {tmp_path: 10**12, small: 1000}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, sizes[path])
    )
    for constant, fits in (
        ("RUN_DIR=run", True),
        (f"CHECKPOINT_DIR={small}/mine", False),
        (f"RUN_DIR={small}/run", False),
        ("CHECKPOINT_DIR=gs://bucket/mine", True),
    ):
        c = settings.read(demo.Constants, [constant])
        root = c.CHECKPOINT_DIR or str(tmp_path / (c.RUN_DIR or "run"))
        # float32 weights and two moments, five times: four are kept while the next one is written
        refused = pytest.raises(
            UserError, match=r"^MAX_TO_KEEP=4: 0\.06 GiB are needed, 0\.00 GiB are free"
        )
        with contextlib.nullcontext() if fits else refused:
            memory.check_disk(c, 1_000_000, root)


def test_a_disk_without_room_is_refused_before_the_weights_are_loaded(monkeypatch):
    monkeypatch.setattr(start, "load_llm", None)  # called, it raises
    # The tiny Llama's layers: q and o, k and v, the MLP, two norms. Then both ends, and a norm.
    layer = 2 * 96 * 96 + 2 * 96 * 48 + 3 * 96 * 256 + 2 * 96
    parameters = 3 * layer + 2 * 76 * 96 + 96
    # 12 bytes each, for float32 weights and two moments; a million are kept, one is being written
    needed = 12 * parameters * (10**6 + 1) / GIB
    with pytest.raises(UserError, match=rf"^MAX_TO_KEEP=1000000: {needed:.2f} GiB are needed"):
        demo.main(["MODEL=tiny_llama", "MAX_TO_KEEP=1000000", "RUN_DIR=run"])


def test_checkpoints_that_are_there_need_no_more_room(finished, monkeypatch):
    """The finished run keeps four checkpoints, so going on takes one more; a new run takes five."""
    c = settings.read(demo.Constants, [f"RUN_DIR={finished / 'run'}"])
    _, hf = start.llama.fetch_model(c.MODEL)
    one = memory.checkpoint_bytes(c, start.llama.parameters_of(hf))
    assert len(list((finished / "run" / "checkpoints").glob("[0-9]*"))) == c.MAX_TO_KEEP == 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, one))
    start.check_disk(c, hf)
    with pytest.raises(
        UserError, match=r"^MAX_TO_KEEP=4: 0\.02 GiB are needed, 0\.00 GiB are free"
    ):
        start.check_disk(settings.read(demo.Constants, ["RUN_DIR=new"]), hf)


def test_vllm_gets_its_share_and_no_more():
    """By hand, for Llama 3.1 8B on v6e-8 with 26 GiB of training: 8 chips, 31.24 GiB each."""
    v6e, chips = machines.parse_machine("v6e-8"), list(range(8))
    mesh = jax.sharding.Mesh(np.arange(8).reshape(1, 8), ("data", "model"))
    taken = 2 * 4 * PARAMETERS_8B / 8 / GIB  # actor and reference, float32
    weights = 2 * PARAMETERS_8B / 8 / GIB
    # key and value, layers, heads per chip, width, bfloat16
    cache = 2 * 32 * 1 * 128 * 2 * 16 * 1024 / GIB
    for share, enough in ((0.30, False), (0.31, True), (0.40, True), (0.41, False)):
        c = settings.read(demo.Constants, [*EIGHT_B, *FULL, f"HBM_UTILIZATION_VLLM={share}"])
        assert (taken + weights + cache <= share * 31.24 <= taken + 31.24 - 26) == enough
        needs = memory.estimate(c, memory.published_config(), PARAMETERS_8B, chips, mesh)
        with (
            contextlib.nullcontext()
            if enough
            else pytest.raises(UserError, match=r"use 0.31 to 0.4$")
        ):
            assert "is enough" in memory.verdict(c, v6e, 8, needs, 26, "compiled")


def test_a_chip_without_room_to_hand_the_weights_to_vllm_is_refused():
    """By hand, for Llama 3.2 1B, whose embeddings are tied and aren't taken apart: the update fits
    one v5e chip beside vLLM.
    """
    parameters, embeddings = 1_235_814_400, 128_256 * 2048
    lora = 32 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192))
    # float32: merged ones, too, then all layers; bfloat16: old and new; A, B and two moments
    taken = 4 * (3 * parameters - embeddings) + 2 * 2 * parameters + 3 * 4 * lora
    asked = ["MODEL=meta-llama/Llama-3.2-1B-Instruct", "DATASET=tiny_gsm8k", "DRY_RUN=True"]
    sizes = ["BATCH_SIZE=1", "TRAIN_MICRO_BATCH_SIZE=0", "HBM_UTILIZATION_VLLM=0.25"]
    said = (
        rf"^ROLLOUT_ENGINE=vllm: handing .* takes {taken / GIB:.1f} of 15\.75 GiB per chip; take a"
    )
    with pytest.raises(UserError, match=said):
        demo.main([*asked, *sizes, "MACHINE=v5e-1"])
    demo.main([*asked, *sizes, "MACHINE=v6e-1"])


@pytest.mark.parametrize(("gib", "fits"), [(40, True), (24, False)])
def test_the_gpus_of_this_machine_are_judged_by_what_they_have(monkeypatch, capsys, gib, fits):
    """The devices are made up: no GPU was at hand."""
    on(monkeypatch, "gpu", "NVIDIA RTX", share=gib + machines.SPARE, compute_capability="8.6")
    c = settings.read(demo.Constants, [*EIGHT_B, "ROLLOUT_ENGINE=maxtext", "LORA_RANK=32"])
    # float32: the weights once, they are the reference's, too; A and B, two moments
    least = (4 * PARAMETERS_8B + 3 * 4 * LORA_8B) / GIB
    refused = pytest.raises(
        UserError, match=rf"NVIDIA RTX has 24 GiB per chip, training takes {least:.1f}"
    )
    with contextlib.nullcontext() if fits else refused:
        memory.plan_memory(c, memory.published_config(), PARAMETERS_8B)
        assert (
            f"NVIDIA RTX unknown: 1 of 1 chips train, {ALONE} {least:.1f} of 40"
            in capsys.readouterr().out
        )


def test_a_card_that_is_told_is_judged_by_what_was_compiled_for_it(capsys):
    """A batch that fits, by fit_cards.csv, lets smaller ones fit; one twice as large refuses larger
    ones.
    """
    runs = machines.compiled("t4", ["fit_cards.csv"])
    runs = {
        constants: rows
        for constants, rows in runs.items()
        if "Qwen3-0.6B LORA_RANK=32" in constants
    }
    [largest] = [run for run, rows in runs.items() if all(float(row["left"]) > 0 for row in rows)]
    peak = max(float(row["peak"]) for row in runs[largest])
    B = int(largest.split("BATCH_SIZE=")[-1])
    limit = machines.parse_machine("t4").gib
    asked = [
        *QWEN,
        "ROLLOUT_ENGINE=maxtext",
        "ATTENTION=dot_product",
        "DTYPE=float32",
        "MACHINE=t4",
    ]
    for answers, said in ((768, "compiled earlier"), (400, "compiled earlier for a larger batch")):
        demo.main([*asked, f"BATCH_SIZE={B}", f"TOTAL_GENERATION_STEPS={answers}"])
        assert (
            f"t4       yes: 1 of 1 chips train, {said} {peak:.1f} of {limit}"
            in capsys.readouterr().out
        )
    with pytest.raises(UserError, match=rf"^BATCH_SIZE={2 * B}, lower it.*: t4 has {limit} GiB"):
        demo.main([*asked, f"BATCH_SIZE={2 * B}"])
