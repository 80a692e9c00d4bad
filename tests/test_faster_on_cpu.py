"""The CPU's own way of computing a step: the same numbers as MaxText's own modules."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_load_llama import GOLDEN

import grpo_llama3_1_8b_demo as demo
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
            patch.setattr(faster_on_cpu, "adapt", lambda model, mesh: None)
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
    return demo.Batch(
        prompt_ids=jnp.array(prompts, jnp.int32),
        completion_ids=jnp.array(completions, jnp.int32),
        completion_mask=jnp.array(mask),
        advantages=jnp.array(random.normal(size=ROWS), jnp.float32),
        ref_log_prob=jnp.array(np.where(mask, random.normal(-3, 0.3, mask.shape), 0), jnp.float32),
        sampler_log_prob=jnp.zeros((ROWS, T)),
    )


def grpo_loss(model, batch, temperature):
    """The loss on the page, with a KL."""
    c = settings.read(demo.Constants, [f"NUM_GENERATIONS={G}", f"TOTAL_GENERATION_STEPS={T}"])
    return demo.grpo_loss(model, batch, 0.1, temperature, ROWS, c, PAD)


def loss_and_gradient(adapter, mesh, batch):
    graphdef, params, rest = nnx.split(adapter, nnx.Param, ...)

    def loss(params):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return grpo_loss(model, batch, 0.8)

    with mesh:
        (value, figures), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(value), figures, gradient


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


def test_a_prompt_is_computed_once(batch):
    """The model is called with one row per question."""
    adapter, mesh = loaded("grouped_kv_heads", True)
    seen = []

    class Watched(type(adapter.base)):
        def __call__(self, decoder_input_tokens, **arguments):
            seen.append(decoder_input_tokens.shape)
            return super().__call__(decoder_input_tokens=decoder_input_tokens, **arguments)

    graphdef, state = nnx.split(adapter)
    watched = nnx.merge(graphdef, state)
    faster_on_cpu.become(watched.base, Watched)
    loss_and_gradient(watched, mesh, batch)
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
    mask = np.asarray(batch.completion_mask)
    for row in (1, 4):
        np.testing.assert_array_equal(before[row][mask[row]], after[row][mask[row]])
    assert not np.array_equal(before[0], after[0])


def modules(adapter):
    return {type(module) for _, module in nnx.iter_modules(adapter.base)}


def test_which_modules_are_replaced():
    assert {
        faster_on_cpu.RotaryOnce, faster_on_cpu.WalledDense, faster_on_cpu.SharedPromptAttention,
    } <= modules(loaded("grouped_kv_heads", True)[0])  # fmt: skip
    assert not {faster_on_cpu.LLaMARotaryEmbedding, faster_on_cpu.DenseGeneral} & modules(
        loaded("grouped_kv_heads", True)[0]
    )
    theirs = modules(loaded("grouped_kv_heads", False)[0])
    assert {faster_on_cpu.LLaMARotaryEmbedding, faster_on_cpu.DenseGeneral} <= theirs
    assert not any(module.__module__ == "model.faster_on_cpu" for module in theirs)


def test_nothing_is_replaced_on_another_kind_of_device():
    adapter, _ = loaded("grouped_kv_heads", False)

    class Chip:
        platform = "tpu"

    class Chips:
        devices, size = np.array([Chip()]), 1

    faster_on_cpu.adapt(adapter.base, Chips())
    assert not any(module.__module__ == "model.faster_on_cpu" for module in modules(adapter))


@pytest.mark.parametrize(("hardware", "ours"), [("cpu", True), ("tpu", False)])
def test_the_layout_of_the_kv_cache_is_the_cpus_own(hardware, ours):
    """Also where a CPU compiles for a TPU (tpu_fit_check.py)."""
    _, hf = llama.load_hf_config("tiny_llama")
    config = llama.to_maxtext_config(hf, rows=1, prompt_tokens=P, new_tokens=T, hardware=hardware)
    for name, order in faster_on_cpu.CACHE_LAYOUT.items():
        assert (getattr(config, name) == order) == ours, name


def test_prompts_are_not_shared_over_several_devices():
    """Its rows are too few to be divided among them."""
    adapter, mesh = loaded("tied_embeddings", False)

    class Two:
        devices, size = mesh.devices, 2

    faster_on_cpu.adapt(adapter.base, Two())
    assert faster_on_cpu.WalledDense in modules(adapter)
    assert not faster_on_cpu.shares_prompts(adapter)


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
        graphdef, params, rest = nnx.split(adapter, nnx.Param, ...)
        optimizer = optax.adamw(1e-3, b2=0.99)

        @jax.jit
        def step(params, moments):
            def loss(params):
                model = nnx.merge(graphdef, params, rest, copy=True)
                return grpo_loss(model, batch, 1.0)[0]

            updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
            return optax.apply_updates(params, updates), moments

        moments = optimizer.init(params)
        with mesh:
            for _ in range(20):
                params, moments = step(params, moments)
        return jax.tree.leaves(params)

    start = jax.tree.leaves(nnx.state(loaded("grouped_kv_heads", True)[0], nnx.Param))
    for a, b, old in zip(trained(True), trained(False), start, strict=True):
        moved = np.abs(b - old).max()
        # Adam divides a gradient near 0 by its own size, rounding included: a share of the way, not of 1e-7
        assert np.abs(a - b).max() < 0.02 * moved
        assert np.abs(a - b).mean() < 1e-4 * moved
