"""The CPU's own way of computing a step: the same numbers as MaxText's own modules."""

import contextlib
import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxtext.layers import attentions
from maxtext.models.models import Transformer
from table_policy import as_batch, for_the_log, model_of
from test_load_llama import GOLDEN, ROUNDING, load

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import settings
from model import faster_on_cpu

P, T, G, QUESTIONS, PAD, EOS = 7, 6, 3, 2, 0, 2
ROWS = QUESTIONS * G
# Logits reach 20 here. The softmax makes their error a share of each probability, and so of the
# loss and of the gradient.
SHARE = 20 * ROUNDING  # 8e-4


@functools.cache
def loaded(name, ours, **changes):
    """A random model with ours or MaxText's modules, and its mesh."""
    with pytest.MonkeyPatch.context() as patch:
        if not ours:
            patch.setattr(faster_on_cpu, "modules_for", lambda mesh: contextlib.nullcontext())
        return load(name if name == "tiny_llama" else GOLDEN / name, ROWS, P, T, **changes)[:2]


@pytest.fixture
def batch():
    """Prompts [N, P] padded on the left, G rows each; answers [N, T] padded on the right, one is
    full.
    """
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
        prompt_ids=prompts,
        completion_ids=completions,
        mask=mask,
        weight=demo.mean_of_answers(mask.reshape(QUESTIONS, G, T)).reshape(ROWS, T),
        advantage=random.normal(size=(ROWS, 1)),
        beta=np.full((ROWS, 1), 0.1),
        sampler_log_prob=np.zeros((ROWS, T)),
        ref_log_prob=np.where(mask, random.normal(-3, 0.3, mask.shape), 0),
    )
    return as_batch(fields)


def loss_and_gradient(adapter, mesh, batch):
    """Of the page's loss, and its metrics."""
    sizes = [f"NUM_GENERATIONS={G}", f"TOTAL_GENERATION_STEPS={T}"]
    # Tokens here have log-probs down to -20: k3's exp(17) would drown all else.
    c = settings.read(demo.Constants, [*sizes, "KL_LOSS_MODE=mse_kl"])
    params, model = model_of(c, adapter, temperature=0.8)
    model, method = dataclasses.replace(model, mesh=mesh), grpo_variants.choose(c, demo.TABLES)
    step = jax.jit(
        jax.value_and_grad(lambda params: demo.loss(params, model, batch, method), has_aux=True)
    )
    (value, metrics), gradient = step(params)
    return float(value), for_the_log(metrics), gradient


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("tiny_llama", True), ("qwen3", False), ("qwen3", True))
]


@pytest.mark.parametrize(("name", "scan_layers"), [("tiny_llama", False), *SLOW])
def test_loss_and_gradient_are_maxtexts_own(name, scan_layers, batch, monkeypatch):
    """Ours computes a prompt once."""
    seen, call = [], Transformer.__call__

    def watched(self, decoder_input_tokens, **arguments):
        seen.append(decoder_input_tokens.shape)
        return call(self, decoder_input_tokens=decoder_input_tokens, **arguments)

    monkeypatch.setattr(Transformer, "__call__", watched)
    models = (loaded(name, ours, scan_layers=scan_layers) for ours in (True, False))
    ours, theirs = (loss_and_gradient(*model, batch) for model in models)
    assert seen[0] == (QUESTIONS, P + G * T) and seen[-1] == (ROWS, P + T)
    assert ours[0] == pytest.approx(theirs[0], rel=SHARE)
    assert ours[1].keys() == theirs[1].keys()
    for name_ in ours[1]:
        np.testing.assert_allclose(ours[1][name_], theirs[1][name_], rtol=SHARE, atol=1e-6)
    for a, b in zip(jax.tree.leaves(ours[2]), jax.tree.leaves(theirs[2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=SHARE * np.abs(b).max())


@pytest.mark.parametrize(
    ("platform", "size", "dense", "attention"), [("tpu", 1, 0, 0), ("cpu", 2, 1, 0)]
)
def test_where_nothing_is_replaced_and_where_prompts_are_not_shared(
    platform, size, dense, attention
):
    """On another kind of device; on several devices, whose rows would be too few to divide."""
    devices = np.array([SimpleNamespace(platform=platform)] * size)
    with faster_on_cpu.modules_for(SimpleNamespace(devices=devices, size=size)):
        assert (attentions.DenseGeneral is faster_on_cpu.UnfusedDense) == dense
        assert (attentions.AttentionOp is faster_on_cpu.SharedPromptAttention) == attention
    assert attentions.DenseGeneral is faster_on_cpu.DenseGeneral


def test_remat_policy_none_recomputes_nothing(batch):
    """MaxText itself recomputes every layer: it reads "none" as None and looks for "none"."""

    def recomputed(policy):
        adapter, mesh = loaded("qwen3", True, remat_policy=policy)
        graphdef, state = nnx.split(adapter)
        tokens = batch.prompt_ids
        positions = jnp.broadcast_to(jnp.arange(P), tokens.shape)
        with mesh:
            program = jax.make_jaxpr(
                lambda s: nnx.merge(graphdef, s)(tokens, positions, None, None)
            )(state)
        return len(re.findall(r"\bremat2\[", str(program)))

    assert recomputed("none") == 0
    assert recomputed("full") == 2  # its layers
