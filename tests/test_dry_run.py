"""DRY_RUN=True: a verdict on any machine, nothing written, one line for what would stop the run."""

import importlib.metadata
import importlib.util
import resource
import subprocess
import sys
from pathlib import Path

import dry_run
import grpo_llama3_1_8b_demo as demo
import jax
import numpy as np
import pytest
from test_guards import SMALL

SCRIPT = demo.HERE / "grpo_llama3_1_8b_demo.py"
EIGHT_B = [f"MODEL={dry_run.LLAMA_3_1_8B}", "DATASET=gsm8k", "DRY_RUN=True"]


@pytest.fixture(autouse=True)
def in_an_empty_folder_without_a_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(demo.huggingface_hub, "get_session", refuse)


def refuse():
    raise ConnectionError("no network")


def test_the_eight_b_job_gets_its_verdict_on_a_laptop_in_under_a_minute(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, SCRIPT, *EIGHT_B, f"DATA_DIR={tmp_path}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # of the processor: the clock would measure who else is at work (8 s seen, 28 to 56 on a busy machine)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 30
    said = done.stdout
    assert said.splitlines()[-1].startswith("dry run  nothing was found that would stop the run")
    # LlamaConfig's own arithmetic, layer by layer
    d, f, v, kv = 4096, 14_336, 128_256, 1024
    parameters = 2 * v * d + d + 32 * (2 * d * d + 2 * d * kv + 3 * d * f + 2 * d)
    assert f"{parameters:,} parameters" in said
    assert "2 prompts x 8 answers = 16 sequences, up to 16,384 tokens" in said
    assert "3,738 steps" in said and "8 checkpoints of 89.7 GiB" in said  # 12 bytes a parameter
    assert "hub is out of reach; published sizes from here" in said and "embedded tiny_gsm8k" in said
    for slice_name, gib in (("v5p-8", "95.73"), ("v6e-8", "31.24")):
        (line,) = [line for line in said.splitlines() if line.startswith(slice_name)]
        assert "compiled (assets/fit_check.csv)" in line and f"of {gib} GiB a chip" in line
    assert "v5p-64   no: TRAINER_FSDP=32" in said  # 16 sequences do not divide among 32 chips
    assert not list(tmp_path.iterdir())


def test_constants_that_were_not_compiled_get_a_lower_bound(tmp_path, capsys):
    if importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is installed here: they are compiled")
    demo.run([*EIGHT_B, "TOTAL_GENERATION_STEPS=256", f"DATA_DIR={tmp_path}"])
    # float32 weights before and after, two moments, the reference: 20 bytes a parameter over 8 chips
    least = 20 * 8_030_261_248 / 8 / 2**30
    assert f"8 of 8 chips train: not compiled: at least {least:.1f} of 31.24" in capsys.readouterr().out


def test_the_laptop_job_is_planned_in_full_and_leaves_nothing(tmp_path, capsys):
    demo.run([*SMALL, "DRY_RUN=True", "RUN_DIR=run", "NUM_ITERATIONS=2"])
    said = capsys.readouterr().out
    assert "4,000 of at most 28 tokens" in said and "512 questions" in said
    assert "3 steps, 6 updates, 12 answers" in said
    assert f"devices  {jax.device_count()} x cpu, generation by maxtext" in said
    assert not list(tmp_path.iterdir())


# One setting each, wrong in another way; some on the laptop's job, some on the 8 B job.
WRONG = {
    "an unknown name": (["NUM_BATCH=3"], "NUM_BATCH=3", "NUM_BATCHES"),
    "a wrong type": (["LEARNING_RATE=fast"], "LEARNING_RATE=fast", "float"),
    "no such model": (["MODEL=nobody/nothing"], "MODEL=nobody/nothing", "give a folder"),
    "no such data": (["DATASET=missing.jsonl"], "missing.jsonl", "JSONL or Parquet file"),
    "prompts too short": (["MAX_PROMPT_LENGTH=3"], "MAX_PROMPT_LENGTH=3", "raise it"),
    "no whole blocks": (
        ["ATTENTION=flash", "MAX_PROMPT_LENGTH=256", "TOTAL_GENERATION_STEPS=512"],
        "TOTAL_GENERATION_STEPS=512",
        "a multiple of 512",
    ),
    "a dtype": (["DTYPE=float7"], "DTYPE=float7", "base.yml"),
    "a run folder that is a file": (["RUN_DIR=taken/run"], "RUN_DIR=taken/run", "choose another"),
    "a run folder in a bucket": (["RUN_DIR=gs://bucket/run"], "RUN_DIR=gs://bucket/run", "CHECKPOINT_DIR"),
    "a bucket out of reach": (
        ["CHECKPOINT_DIR=gs://bucket/x"],
        "CHECKPOINT_DIR=gs://bucket/x",
        "local folder",
    ),
    "a disk too small": (["MAX_TO_KEEP=100000000"], "MAX_TO_KEEP=100000000", "lower it"),
    "a share of chips": ([*EIGHT_B, "TRAINER_DEVICES_FRACTION=0.3"], "TRAINER_DEVICES_FRACTION=0.3", "1/4"),
    "a mesh": ([*EIGHT_B, "TRAINER_FSDP=3"], "TRAINER_FSDP=3", "-1"),
    "too much memory": ([*EIGHT_B, "BATCH_SIZE=4096"], "BATCH_SIZE=4096", "lower it"),
    "too little for vLLM": ([*EIGHT_B, "HBM_UTILIZATION_VLLM=0.1"], "HBM_UTILIZATION_VLLM=0.1", "use 0."),
    "unscanned layers": ([*EIGHT_B, "SCAN_LAYERS=False"], "SCAN_LAYERS=False", "True"),
}


def message_of(arguments):
    Path("taken").write_text("a file")
    with pytest.raises(demo.UserError) as error:
        demo.run(["DRY_RUN=True", *arguments, "DATA_DIR=data"])
    return str(error.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_setting_is_one_line_with_constant_value_and_remedy(wrong, tmp_path):
    arguments, setting, remedy = WRONG[wrong]
    message = message_of(arguments)
    assert "\n" not in message and setting in message and remedy in message
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_another_version_of_tunix_is_named(monkeypatch):
    def version(name):
        return "0.1.5" if name == "google-tunix" else importlib.metadata.distribution(name).version

    monkeypatch.setattr(importlib.metadata, "version", version)
    message = message_of([])
    assert message == "google-tunix 0.1.5 is installed: this script needs 0.1.7; install google-tunix==0.1.7"


def test_an_argument_that_tunix_does_not_take_is_named(monkeypatch):
    monkeypatch.setattr(demo, "generation_config", lambda name: {"rollout_vllm_unheard_of": 1})
    assert "google-tunix 0.1.7" in (message := message_of([])) and "rollout_vllm_unheard_of" in message


def test_the_constants_of_a_run_that_goes_on_are_compared():
    demo.open_run_dir(demo.configure(["RUN_DIR=run", "NUM_BATCHES=5"]))
    with pytest.raises(demo.UserError, match=r"NUM_BATCHES=6: .*was started with 5"):
        demo.run(["RUN_DIR=run", "NUM_BATCHES=6", "DRY_RUN=True"])


def test_vllm_gets_its_share_and_no_more():
    """By hand, for Llama 3.1 8B on v6e-8 with 26 GiB of training: 8 chips, 31.24 GiB each."""
    demo.configure([*EIGHT_B])
    parameters = 8_030_261_248
    mesh = jax.sharding.Mesh(np.arange(8).reshape(1, 8), ("data", "model"))
    lying = 2 * 4 * parameters / 8 / 2**30  # actor and reference, float32
    weights = 2 * parameters / 8 / 2**30
    cache = 2 * 32 * 1 * 128 * 2 * 16 * 1024 / 2**30  # key and value, layers, heads a chip, width, bfloat16
    hf = dry_run.llama_3_1_8b_config()
    for share, enough in ((0.30, False), (0.31, True), (0.40, True), (0.41, False)):
        demo.HBM_UTILIZATION_VLLM = share
        fits = lying + weights + cache <= share * 31.24 <= lying + 31.24 - 26
        assert fits == enough
        if enough:
            assert "is enough" in dry_run.vllm_verdict(hf, parameters, mesh, 8, 31.24, 26)
        else:
            with pytest.raises(demo.UserError, match=r"use 0.31 to 0.4$"):
                dry_run.vllm_verdict(hf, parameters, mesh, 8, 31.24, 26)
