"""The main script with the real vLLM engine, on a CPU: `make test-vllm` (an environment of its own,
large).

Everything but the attention kernel is what runs on a TPU: see vllm_cpu_shim.py. The models are the
tiny Llama, whose heads are padded to 128, as the engine does with any width it has no kernel for,
and a random Qwen3.
"""

import vllm_cpu_shim  # isort: skip  (before JAX)

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_qwen3
import tpu_inference.layers.jax.pp_utils as pp_utils
import tpu_inference.models.jax.llama3 as engine_llama3
from flax import nnx
from table_policy import train_llm
from test_vllm_path import GOLDEN, LLAMA_8B, constants_of, on_the_grid

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from model import devices, llama, lora
from model.llm import load_llm
from model.log_probs import log_probs
from model.rollout import MaxTextRollout, right_padded, sampling_config
from run import checks
from run.run_files import read_log
from task import prompts, run_grader
from task.questions import read_data

SETTINGS = [
    "ROLLOUT_ENGINE=vllm",
    "SCAN_LAYERS=True",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "NUM_BATCHES=2",
    "SAVE_INTERVAL_STEPS=1",
    "WARMUP_FRACTION=0.0",
    "LEARNING_RATE=3e-3",
]
TOLERANCE = 1e-4  # of a log-prob: float32, two programs that sum in another order; 4e-6 seen


class Session:
    """A language model with its engine, and the questions it is asked."""

    def __init__(self, folder, *arguments):
        self.c = settings.read(demo.Constants, [*SETTINGS, f"RUN_DIR={folder}", *arguments])
        checks.refuse(self.c)
        self.folder = folder
        model, self.hf = llama.fetch_model(self.c.MODEL)
        self.tokenizer = llama.load_tokenizer(model)
        questions, source = read_data(self.c)["test"]
        too_long = folder / "too_long.csv"
        self.rows = prompts.make_prompts(
            self.c, questions[:64], source, self.tokenizer, False, too_long
        )
        self.grader = run_grader.make_grader(self.c.REWARDS, "", reward_func, self.rows)
        self.llm = load_llm(self.c, model, self.hf, self.tokenizer)
        self.config = llama.to_run_config(
            self.c, self.hf, per_device_batch_size=64 / jax.device_count()
        )

    def train(self):
        return train_llm(self.c, self.llm, self.grader, self.rows, self.folder)

    def answers(self):
        """Greedy, of the engine, and of the trainer's own model decoded by rollout.py."""
        llm, c = self.llm, self.c
        rollout = MaxTextRollout(
            llm.actor,
            llm.tokenizer,
            llm.mesh,
            sampling_config(c, "greedy"),
            maxtext_config=self.config,
            hf=self.hf,
            merge=functools.partial(lora.merge, scale=c.LORA_ALPHA / (c.LORA_RANK or 1)),
        )
        asked = [row["prompts"] for row in self.rows]
        engines = llm.rollout.generate(asked, sampling_config(c, "greedy", seed=None))
        return engines, rollout.generate(
            asked, sampling_config(c, "greedy", seed=jax.random.key(0))
        )


def steps_that_agree(session):
    """The log of two steps, before and after which the engine's texts are the trainer's, and
    change.
    """
    before, log, after = session.answers(), session.train(), session.answers()
    for engine, own in (before, after):
        assert engine.text == own.text
        for a, b in zip(engine.tokens, own.tokens, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(
            engine.left_padded_prompt_tokens, own.left_padded_prompt_tokens
        )
    assert sum(a != b for a, b in zip(before[0].text, after[0].text, strict=True)) >= 5  # of 64
    return log, after[0].text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """After two steps of GRPO; rollout.py decodes the same weights with another program: prompts,
    weights, rope and cache agree.
    """
    session = Session(tmp_path_factory.mktemp("run"))
    session.log, _ = steps_that_agree(session)
    return session


def test_the_engines_log_probs_are_the_trainers(trained):
    """Of the first weights, and of the second. Answers end, have no special token, and differ in a
    group.
    """
    assert [row["step"] for row in trained.log] == [1, 2]
    for row in trained.log:
        assert row["mismatch_max"] < TOLERANCE
        assert row["cut_off"] < 0.5 and row["format_ok"] > 0.3 and row["distinct"] > 1.5


def test_log_probs_of_a_cut_distribution_are_renormalised(trained):
    """Of hot answers by the five likeliest tokens, against the trainer's own logits."""
    rollout = trained.llm.rollout
    config = dataclasses.replace(sampling_config(trained.c), temperature=2.0, top_k=5)
    sample = rollout.generate([row["prompts"] for row in trained.rows], config)
    forward = nnx.jit(functools.partial(log_probs, pad_id=rollout.pad_id()))
    tokens = right_padded(
        sample.tokens, trained.c.TOTAL_GENERATION_STEPS, rollout.pad_id(), np.int32
    )
    with devices.on_mesh(trained.llm.mesh, trained.llm.model.axis_rules):
        _, logits = forward(
            trained.llm.actor, sample.left_padded_prompt_tokens, tokens, temperature=2.0
        )
    for row, tokens, log_prob in zip(
        np.asarray(logits), sample.tokens, sample.logprobs, strict=True
    ):
        chosen = row[np.arange(len(tokens)), tokens]
        five = np.sort(row[: len(tokens)], axis=-1)[:, -5:]
        np.testing.assert_allclose(
            log_prob, chosen - np.log(np.exp(five).sum(axis=-1)), atol=TOLERANCE
        )


def test_lora_is_merged_before_the_engine_gets_the_weights(tmp_path):
    """Before training (Tunix hands over everything), after it (A and B alone), and in a resumed
    run.
    """
    settings = ["LORA_RANK=4", "LEARNING_RATE=0.03"]
    log, after = steps_that_agree(Session(tmp_path, *settings))
    assert max(row["mismatch_max"] for row in log) < TOLERANCE
    # float32: nothing is rounded
    assert [row["sync_gain"] for row in log] == pytest.approx([1, 1], abs=1e-3)
    resumed = Session(tmp_path, *settings)
    resumed.train()  # restores the weights of the last step, and does nothing else
    assert resumed.answers()[0].text == after


def test_the_engine_answers_as_a_qwen3_before_and_after_training(tmp_path):
    """Its output layer is its own: a tied one MaxText rounds to bfloat16, and the engine does not.

    Two key/value heads, which the engine splits between two devices; no padding (see plan_devices).
    """
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    model = test_qwen3.make(tmp_path / "qwen3", tie_word_embeddings=False, **heads)
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    weights["lm_head.weight"][0] = 0  # else it would answer with padding, which the trainer masks
    safetensors.numpy.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    steps_that_agree(Session(tmp_path, f"MODEL={model}", "REWARDS=match_format_approximately"))


def test_the_engines_8b_model_has_the_weights_of_the_golden_file(monkeypatch):
    stage = types.SimpleNamespace(
        is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1
    )
    for module in (engine_llama3, pp_utils):
        monkeypatch.setattr(module, "get_pp_group", lambda: stage)
    model = dict(hf_config=LLAMA_8B, get_vocab_size=lambda: LLAMA_8B.vocab_size, dtype=jnp.bfloat16)
    settings = types.SimpleNamespace(
        model_config=types.SimpleNamespace(**model),
        speculative_config=None,
        cache_config=types.SimpleNamespace(cache_dtype="auto"),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(
            lambda: engine_llama3.LlamaForCausalLM(settings, jax.random.key(0), mesh)
        )
    state = nnx.state(model, nnx.Param).flat_state()
    shapes = {".".join(map(str, path)): list(leaf.shape) for path, leaf in state}
    assert shapes == json.loads((GOLDEN / "vllm_llama31_8b.json").read_text())


def run_script(folder, devices, *arguments, setup="", **environment):
    """Evaluate, train, evaluate, report, in a process of its own; `setup` is code that runs before
    it, `environment` are further variables.
    """
    imports = "import sys, vllm_cpu_shim, grpo_llama3_1_8b_demo as demo"
    code = f"{imports}\n{setup}\ndemo.main(sys.argv[1:])"
    path = os.pathsep.join([str(Path(vllm_cpu_shim.__file__).parent), str(settings.HERE)])
    environment |= {
        "PYTHONPATH": path,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            *SETTINGS,
            f"RUN_DIR={folder}",
            "NUM_TEST_QUESTIONS=64",
            *arguments,
        ],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return read_log(folder / "train_log.csv")


def test_the_script_behind_the_engines_own_precompilation(tmp_path):
    """As on a TPU: every padded size is compiled before the first answer, and after each weight
    sync the engine still answers.
    """
    on = "import tpu_inference.envs as envs; assert not envs.SKIP_JAX_PRECOMPILE"
    log = run_script(tmp_path, 1, setup=on, SKIP_JAX_PRECOMPILE="0")
    assert [row["step"] for row in log] == [1, 2]
    assert max(row["mismatch_max"] for row in log) < TOLERANCE


def test_the_whole_script_with_two_devices_that_train_and_two_that_generate(tmp_path):
    """Weights cross from a mesh of FSDP 2 to one of tensor parallel 2.

    The engine draws the second step's answers while the first step trains: the trainer's log-probs
    of them are a step ahead of the engine's.
    """
    log = run_script(tmp_path, 4, "EVAL_EVERY=1", "EVAL_QUESTIONS=16", "ROLLOUTS=one-step-ahead")
    asked = [
        json.loads(line)["step"]
        for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()
    ]
    assert asked == [0, 1, 2]  # by the engine, between two steps
    assert log[0]["mismatch_max"] < TOLERANCE and log[1]["mismatch_max"] > 0.01
    before = json.loads((tmp_path / "before.json").read_text())
    assert before["greedy_answer_accuracy"] > 0.2  # about 0.4; with wrong weights it would be 0


# The chips in another order. And eight devices of one CPU share XLA's few threads: with many
# programs in flight, six wait in an all-reduce for two that get none, forever; so we wait for each
# rounded weight.
ONE_SLICE = """from jax import block_until_ready; from model import devices, vllm
plan, rounded = devices.plan_devices, vllm.stochastic_round
devices.plan_devices = lambda *a: (plan(*a)[0][:4] + plan(*a)[0][:3:-1], plan(*a)[1])
vllm.stochastic_round = lambda weight: block_until_ready(rounded(weight))"""


def with_eight_heads(folder):
    """The tiny Llama's policy with eight heads: its four twice, at half the output; and with 80
    tokens.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= dict(num_attention_heads=8, num_key_value_heads=8, vocab_size=80)
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:  # each serves two heads: [2, head_dim, embed]
            weight = weight.reshape(2, 24, -1).repeat(2, axis=0).reshape(96, -1)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name] = np.tile(weight, (2, 1))
        elif "o_proj" in name:
            weights[name] = np.tile(weight, (1, 2)) / 2
        elif "embed_tokens" in name or "lm_head" in name:
            # as likely as padding
            weights[name] = np.concatenate([weight, weight[:1].repeat(4, axis=0)])
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


LARGE = [
    "LORA_RANK=32",
    "LORA_ALPHA=32.0",
    "DTYPE=bfloat16",
    "REMAT_POLICY=full",
    "BETA=0.001",
    "SAMPLER_CORRECTION=2.0",
    "NUM_ITERATIONS=1",
    "BATCH_SIZE=16",
    "NUM_GENERATIONS=8",
    "NUM_BATCHES=20",
    "WARMUP_FRACTION=0.1",
    "EVAL_EVERY=0",
    "SAVE_INTERVAL_STEPS=20",
]


@pytest.mark.parametrize("rate", [constants_of({}).LEARNING_RATE, 3e-3])
def test_lora_in_bfloat16_on_eight_chips_that_train_and_generate(tmp_path, rate):
    """Tensor parallel 8, and the trainer's mesh has the chips in another order, as on a real slice.

    At the large model's rate, 20 steps move this small one too little for its reward to show it.
    """
    run = (
        f"MODEL={with_eight_heads(on_the_grid(tmp_path / 'model'))}",
        *LARGE,
        f"LEARNING_RATE={rate}",
    )
    log = run_script(tmp_path / "run", 8, *run, setup=ONE_SLICE)
    assert max(row["mismatch"] for row in log) < 0.005  # 0.001 seen
    assert all(0.9 < row["sync_gain"] < 1.1 for row in log[1:])  # the first step's rate is 0
    if rate == 3e-3:  # from 4.4 to 8.4, and with our own engine from 4.3 to 8.5
        assert np.mean([row["reward"] for row in log[-5:]]) > log[0]["reward"] + 3
