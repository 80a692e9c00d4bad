"""LoRA: frozen weights, two matrices beside each, merged where something else has to read the
model.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_load_llama
from flax import nnx
from short_runs import load_weights
from table_policy import train_llm
from test_load_llama import LOG_PROB, ROUNDING

import grpo_llama3_1_8b_demo as demo
import inference
import reward_func
import settings
from model import llama, lora
from model.llm import load_llm
from model.rollout import sampling_config
from run import run_folder
from task import prompts, run_grader
from task.questions import read_data
from tools import convert_checkpoint as convert

ALL = ",".join(lora.TARGETS)
RANK, ALPHA = 4, 12.0
RUN = [
    "LORA_RANK=4",
    "LORA_ALPHA=12.0",
    "NUM_BATCHES=4",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "SAVE_INTERVAL_STEPS=2",
    "WARMUP_FRACTION=0.0",
    "LEARNING_RATE=0.02",
    "SEED=3",
]


@functools.cache  # nobody changes what is loaded
def load(folder="tiny_llama", rows=4, **changes):
    return test_load_llama.load(folder, rows, 28, 28, **changes)


def logits(adapter, mesh):
    """[4, 20, V], of random tokens."""
    tokens = np.random.default_rng(0).integers(4, 70, (4, 20), np.int32)
    positions = np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
    return test_load_llama.logits_of(adapter, mesh, dict(tokens=tokens, positions=positions))


def flat(model, kind=nnx.Param):
    return dict(nnx.to_flat_state(nnx.state(model, kind)))


def fill_b(adapter):
    for i, (path, matrix) in enumerate(flat(adapter, nnx.LoRAParam).items()):
        if path[-1].endswith("_b"):
            noise = np.random.default_rng(i).normal(size=matrix.shape)
            matrix.set_value(jnp.asarray(0.02 * noise, matrix.dtype))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_at_first_it_is_the_base_model_and_merged_it_is_the_adapted_one(scan_layers):
    base, mesh, config, hf = load(scan_layers=scan_layers)
    adapted, merge = lora.add_lora(base, mesh, config, RANK, ALPHA, ALL, seed=0)
    expected = logits(base, mesh)
    close = ROUNDING * np.abs(expected).max()
    np.testing.assert_allclose(logits(adapted, mesh), expected, rtol=0, atol=close)  # B is 0

    matrices, weights = flat(adapted, nnx.LoRAParam), flat(base)
    assert len(matrices) == 2 * 7 * (1 if scan_layers else 3)
    assert sum(m.size for m in matrices.values()) == lora.count_parameters(hf, RANK, ALL)
    for path, weight in weights.items():
        assert flat(adapted)[path].get_value() is weight.get_value()  # no copy
    a = [matrix[...] for path, matrix in matrices.items() if path[-2:] == ("wi_0", "kernel_lora_a")]
    a = a[0].transpose(1, 0, 2) if scan_layers else a
    assert len(a) == 3 and all(np.abs(a[i] - a[j]).max() > 0.1 for i, j in ((0, 1), (0, 2), (1, 2)))

    fill_b(adapted)
    changed = logits(adapted, mesh)  # qwix: x W + scale (x A) B
    assert np.abs(changed - expected).max() > 1
    plain = nnx.clone(base)
    nnx.update(plain, merge(nnx.state(adapted, nnx.Param)))  # x (W + scale A B)
    close = ROUNDING * np.abs(changed).max()
    np.testing.assert_allclose(logits(plain, mesh), changed, rtol=0, atol=close)
    np.testing.assert_array_equal(logits(base, mesh), expected)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_in_bfloat16_float32_matrices_leave_every_activation_in_bfloat16(scan_layers):
    """qwix's sum would be float32 from the first layer on, and stacked layers would not compile."""
    base, mesh, config, _ = load(dtype="bfloat16", scan_layers=scan_layers)
    adapted, _ = lora.add_lora(base, mesh, config, RANK, ALPHA, ALL, seed=0)
    fill_b(adapted)
    graphdef, state = nnx.split(adapted)
    tokens = jnp.ones((4, 20), jnp.int32)

    def forward(state):
        positions = jnp.broadcast_to(jnp.arange(20), tokens.shape)
        return nnx.merge(graphdef, state)(tokens, positions, None, None)[0]

    with mesh:
        program = str(jax.make_jaxpr(forward)(state))
    kept = re.findall(r"(\w+)\[4,20,256\] = name\[name=mlpwi_0\]", program)  # for the gradient
    assert kept == ["bf16"] * (1 if scan_layers else 3)


def test_only_the_named_weights_get_matrices():
    base, mesh, config, hf = load()
    adapted, _ = lora.add_lora(base, mesh, config, 2, 1.0, "q_proj, o_proj", seed=0)
    paths = {path[-3:-1] for path in flat(adapted, nnx.LoRAParam)}
    assert paths == {("self_attention", "query"), ("self_attention", "out")}
    # layers x rank x ...
    assert lora.count_parameters(hf, 2, "q_proj,o_proj") == 3 * 2 * (96 + 96) * 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    c = settings.read(demo.Constants, [*RUN, f"RUN_DIR={folder / 'run'}"])
    model, hf = llama.fetch_model(c.MODEL)
    tokenizer = llama.load_tokenizer(model)
    questions, source = read_data(c)["test"]
    rows = prompts.make_prompts(
        c, questions[:16], source, tokenizer, False, folder / "too_long.csv"
    )
    with run_folder.open_folder(c) as run:
        llm = load_llm(c, model, hf, tokenizer)
        log = train_llm(c, llm, run_grader.make_grader("", "", reward_func, rows), rows, run.path)
    # the sampler's merged weights are the trainer's W and A B
    assert max(row["mismatch_max"] for row in log) < LOG_PROB
    how = sampling_config(c, "greedy", seed=jax.random.key(0))
    return (
        llm,
        folder / "run",
        rows,
        llm.rollout.generate([row["prompts"] for row in rows], how).text,
    )


def test_only_a_and_b_change_and_the_reference_is_the_frozen_base_itself(trained):
    llm, run_dir, *_ = trained
    shipped, reference, actor = map(flat, (load()[0], llm.reference, llm.actor))
    assert shipped.keys() == reference.keys()
    for path, weight in shipped.items():
        np.testing.assert_array_equal(weight[...], actor[path][...])
        # after four steps still one buffer for both: no second copy
        pointers = {m[path].get_value().unsafe_buffer_pointer() for m in (reference, actor)}
        assert len(pointers) == 1
    for path in actor.keys() - shipped.keys():
        assert path[-1].endswith("_b") <= (np.abs(actor[path][...]).max() > 0)
    saved = load_weights(run_dir, 4)
    weights = [name for name in saved if name.startswith("weights")]
    assert len(weights) == 42 and all("_lora_" in name for name in weights)
    moments = [v.size for name, v in saved.items() if name.startswith("moments")]
    # two moments, a few counters
    assert sum(moments) < 2 * sum(saved[name].size for name in weights) + 20


def test_the_merged_export_is_the_adapted_model(trained, empty_folder):
    llm, run_dir, *_ = trained
    convert.main([f"SOURCE={run_dir}", "TARGET=merged"])
    exported, mesh, *_ = load("merged")
    adapted = logits(llm.actor, mesh)
    close = ROUNDING * np.abs(adapted).max()
    np.testing.assert_allclose(logits(exported, mesh), adapted, rtol=0, atol=close)
    assert np.abs(adapted - logits(load()[0], mesh)).max() > 0.5  # which the base model is not


def test_inference_answers_with_the_adapted_weights(trained, capsys):
    _, run_dir, rows, greedy = trained
    i = next(i for i, text in enumerate(greedy) if text)
    inference.main([f"CHECKPOINT={run_dir}", rows[i]["question"]])
    first, *said = capsys.readouterr().out.splitlines()
    assert "checkpoints/4 (LoRA of rank 4), trained from tiny_llama" in first
    assert "\n".join(said) == greedy[i]
