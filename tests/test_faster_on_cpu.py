"""The CPU's own way of computing a step: the same numbers as MaxText's own modules."""

import contextlib
import dataclasses
import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from maxtext.layers import attentions
from table_policy import as_batch, model_of, without_old
from test_load_llama import GOLDEN

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import settings
from model import faster_on_cpu, llama
from model.log_probs import completion_log_probs

P, T, G, QUESTIONS, PAD, EOS = 7, 6, 3, 2, 0, 2
ROWS = QUESTIONS * G
CONFIGS = ["grouped_kv_heads", "llama31_rope", "qwen3"]


@functools.cache
def loaded(name, ours, **changes):
    """A random model with ours or MaxText's modules, and its mesh."""
    with pytest.MonkeyPatch.context() as patch:
        if not ours:
            patch.setattr(faster_on_cpu, "modules_for", lambda mesh: contextlib.nullcontext())
        folder, hf = llama.load_hf_config(str(GOLDEN / name))
        config = llama.to_maxtext_config(hf, rows=ROWS, prompt_tokens=P, new_tokens=T, **changes)
        return llama.load_llama(folder, hf, config, pad_id=PAD)


@pytest.fixture
def batch():
    """Prompts [N, P] padded on the left, G rows each; answers [N, T] padded on the right, one is full."""
    random = np.random.default_rng(0)
    prompts = random.integers(3, 32, (QUESTIONS, P))
    prompts[1, :3] = PAD
    completions = random.integers(3, 32, (ROWS, T))
    for row, length in zip(completions, [6, 2, 4, 1, 5, 3], strict=True):
        row[length - 1] = EOS
        row[length:] = PAD
    prompts = np.repeat(prompts, G, axis=0)
    mask = completions != PAD
    fields = dict(
        prompt_ids=prompts, completion_ids=completions, mask=mask,
        weight=demo.mean_of_answers(mask.reshape(QUESTIONS, G, T)).reshape(ROWS, T),
        advantage=random.normal(size=(ROWS, 1)), beta=np.full((ROWS, 1), 0.1),
        sampler_log_prob=np.zeros((ROWS, T)),
        ref_log_prob=np.where(mask, random.normal(-3, 0.3, mask.shape), 0),
    )  # fmt: skip
    return as_batch(fields)


def loss_of(adapter, mesh, batch, temperature):
    """The params, and the loss on the page as a function of them."""
    c = settings.read(demo.Constants, [f"NUM_GENERATIONS={G}", f"TOTAL_GENERATION_STEPS={T}"])
    params, model = model_of(c, adapter, temperature=temperature)
    model = dataclasses.replace(model, mesh=mesh)
    use = grpo_variants.choose(c, demo.TABLES)
    return params, lambda params: demo.loss(params, model, batch, use)


def loss_and_gradient(adapter, mesh, batch):
    params, loss = loss_of(adapter, mesh, batch, 0.8)
    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(value), without_old(metrics), gradient


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_maxtexts_own(name, scan_layers, batch):
    """float32 sums in another order: 1e-6 of the largest gradient seen."""
    ours, theirs = (
        loss_and_gradient(*loaded(name, ours, scan_layers=scan_layers), batch) for ours in (True, False)
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name_ in ours[1]:
        np.testing.assert_allclose(ours[1][name_], theirs[1][name_], rtol=1e-4, atol=1e-6)
    for path, a in jax.tree_util.tree_leaves_with_path(ours[2]):
        b = dict(jax.tree_util.tree_leaves_with_path(theirs[2]))[path]
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=str(path))


@pytest.mark.slow
def test_the_gradient_in_bfloat16_is_as_near_to_float32s_as_maxtexts(batch):
    def error(ours):
        exact, rounded = (
            np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(found[2])])
            for found in (
                loss_and_gradient(*loaded("grouped_kv_heads", ours, dtype=dtype), batch)
                for dtype in ("float32", "bfloat16")
            )
        )
        return np.linalg.norm(exact - rounded) / np.linalg.norm(exact)

    assert error(True) < 1.5 * error(False)  # both are noise of the same size


def test_a_prompt_is_computed_once(batch, monkeypatch):
    """The model is called with one row per question."""
    adapter, mesh = loaded("grouped_kv_heads", True)
    seen, call = [], type(adapter.base).__call__

    def watched(self, decoder_input_tokens, **arguments):
        seen.append(decoder_input_tokens.shape)
        return call(self, decoder_input_tokens=decoder_input_tokens, **arguments)

    monkeypatch.setattr(type(adapter.base), "__call__", watched)
    loss_and_gradient(adapter, mesh, batch)
    assert set(seen) == {(QUESTIONS, P + G * T)}


def test_an_answer_sees_neither_its_neighbours_nor_padding(batch):
    """Other answers, and whatever stands behind an answer's end, change nothing in its log-probs."""
    adapter, mesh = loaded("grouped_kv_heads", True)
    log_probs = functools.partial(
        completion_log_probs, adapter, pad_id=PAD, temperature=1.0, num_generations=G
    )
    with mesh:
        before = np.asarray(log_probs(batch.prompt_ids[None], batch.completion_ids[None]))[0]
        others = batch.completion_ids.at[jnp.array([0, 2, 3, 5])].set(7)
        after = np.asarray(log_probs(batch.prompt_ids[None], others[None]))[0]
    mask = np.asarray(batch.mask)
    for row in (1, 4):
        np.testing.assert_array_equal(before[row][mask[row]], after[row][mask[row]])
    assert not np.array_equal(before[0], after[0])


def modules(adapter):
    return {type(module) for _, module in nnx.iter_modules(adapter.base)}


def test_which_modules_are_replaced():
    assert {
        faster_on_cpu.RotaryOnce, faster_on_cpu.UnfusedDense, faster_on_cpu.SharedPromptAttention,
    } <= modules(loaded("grouped_kv_heads", True)[0])  # fmt: skip
    assert not {faster_on_cpu.LLaMARotaryEmbedding, faster_on_cpu.DenseGeneral} & modules(
        loaded("grouped_kv_heads", True)[0]
    )
    theirs = modules(loaded("grouped_kv_heads", False)[0])
    assert {faster_on_cpu.LLaMARotaryEmbedding, faster_on_cpu.DenseGeneral} <= theirs
    assert not any(module.__module__ == "model.faster_on_cpu" for module in theirs)


@pytest.mark.parametrize(("platform", "size", "dense", "attention"), [("tpu", 1, 0, 0), ("cpu", 2, 1, 0)])
def test_where_nothing_is_replaced_and_where_prompts_are_not_shared(platform, size, dense, attention):
    """On another kind of device; on several devices, whose rows would be too few to divide."""
    devices = np.array([SimpleNamespace(platform=platform)] * size)
    with faster_on_cpu.modules_for(SimpleNamespace(devices=devices, size=size)):
        assert (attentions.DenseGeneral is faster_on_cpu.UnfusedDense) == dense
        assert (attentions.AttentionOp is faster_on_cpu.SharedPromptAttention) == attention
    assert attentions.DenseGeneral is faster_on_cpu.DenseGeneral


@pytest.mark.parametrize(("hardware", "ours"), [("cpu", True), ("tpu", False)])
def test_the_layout_of_the_kv_cache_is_the_cpus_own(hardware, ours):
    """Also where a CPU compiles for a TPU (fit_check.py)."""
    _, hf = llama.load_hf_config("tiny_llama")
    config = llama.to_maxtext_config(hf, rows=1, prompt_tokens=P, new_tokens=T, hardware=hardware)
    for name, order in faster_on_cpu.CACHE_LAYOUT.items():
        assert (getattr(config, name) == order) == ours, name


def test_remat_policy_none_recomputes_nothing(batch):
    """MaxText itself recomputes every layer: it reads "none" as None and looks for "none"."""

    def recomputed(policy):
        adapter, mesh = loaded("grouped_kv_heads", True, remat_policy=policy)
        graphdef, state = nnx.split(adapter)
        tokens = batch.prompt_ids
        positions = jnp.broadcast_to(jnp.arange(P), tokens.shape)
        with mesh:
            program = jax.make_jaxpr(lambda s: nnx.merge(graphdef, s)(tokens, positions, None, None))(state)
        return len(re.findall(r"\bremat2\[", str(program)))

    layers = json.loads((GOLDEN / "grouped_kv_heads" / "config.json").read_text())["num_hidden_layers"]
    assert recomputed("none") == 0
    assert recomputed("full") == layers


def test_twenty_steps_end_in_the_same_weights(batch):
    """AdamW at the default rate, from the same weights: what rounding adds up to."""

    def trained(ours):
        adapter, mesh = loaded("grouped_kv_heads", ours)
        params, loss = loss_of(adapter, mesh, batch, 1.0)
        optimizer = optax.adamw(1e-3, b2=0.99)

        @jax.jit
        def step(params, opt_state):
            gradient, _ = jax.grad(loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        opt_state = optimizer.init(params)
        for _ in range(20):
            params, opt_state = step(params, opt_state)
        return jax.tree.leaves(params)

    start = jax.tree.leaves(nnx.to_pure_dict(nnx.state(loaded("grouped_kv_heads", True)[0], nnx.Param)))
    for a, b, old in zip(trained(True), trained(False), start, strict=True):
        moved = np.abs(b - old).max()
        # Adam divides a gradient near 0 by its own size, rounding included: a share of the way, not of 1e-7
        assert np.abs(a - b).max() < 0.02 * moved
        assert np.abs(a - b).mean() < 1e-4 * moved
