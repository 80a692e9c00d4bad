"""The Llama in NumPy against transformers' logits and MaxText's, and what it refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_load_llama import load as load_maxtext
from test_load_llama import tolerance
from tokenizers import Tokenizer

import llama_by_hand as by_hand
from settings import HERE

GOLDEN = Path(__file__).resolve().parent / "golden"


def read(folder):
    """A folder's weights and config.json."""
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    return weights, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "name", ["tiny_llama", "grouped_kv_heads", "tied_embeddings", "llama31_rope", "llama32_rope"]
)
def test_logits_equal_transformers(name, monkeypatch):
    """Also at positions up to 12,000, where Llama 3.1's slower rotations matter."""
    shipped = name == "tiny_llama"
    golden = np.load(GOLDEN / "tiny_llama.npz" if shipped else GOLDEN / name / "logits.npz")
    weights, config = read(HERE / name if shipped else GOLDEN / name)
    for tokens, positions, logits in zip(golden["tokens"], golden["positions"], golden["logits"]):
        # Token t is at positions[t], where by_hand.forward puts it at t.
        stretch = positions[:, None] / np.maximum(np.arange(len(tokens)), 1)[:, None]
        speeds = by_hand.rotary_speeds(config)
        with monkeypatch.context() as patch:
            patch.setattr(by_hand, "rotary_speeds", lambda c: stretch * speeds)  # noqa: B023
            ours, _ = by_hand.forward(tokens, weights, config)
        np.testing.assert_allclose(ours, logits, rtol=0, atol=tolerance(golden))


def answers_to(questions, tokenizer):
    """Prompts with the right answer in the format behind them, as token ids, one length [B, L]."""
    texts = []
    for row in questions:
        work, result = row["answer"].split("\n#### ")
        answer = f"<reasoning>{work}</reasoning><answer>{result}</answer>"
        texts.append(f"<|begin_of_text|>{row['question']}{by_hand.ASSISTANT}{answer}")
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    length = min(map(len, ids))  # without padding: every position counts
    return np.array([row[:length] for row in ids])


def test_logits_equal_maxtexts_on_every_position_of_real_questions():
    """As the main script loads and computes the tiny Llama."""
    rows = (HERE / "tiny_gsm8k/test.jsonl").read_text().splitlines()[:32]
    tokenizer = Tokenizer.from_file(str(HERE / "tiny_llama/tokenizer.json"))
    tokens = answers_to(map(json.loads, rows), tokenizer)
    adapter, mesh, *_ = load_maxtext("tiny_llama", rows=len(tokens), prompt_tokens=tokens.shape[1])
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    with mesh:
        forward = jax.jit(lambda model, *inputs: model(*inputs, None, None)[0])
        theirs = np.asarray(forward(adapter, jnp.array(tokens), jnp.array(positions)))
    weights, config = read(HERE / "tiny_llama")
    ours = np.stack([by_hand.forward(row, weights, config)[0] for row in tokens])
    limit = tolerance({"positions": positions, "logits": theirs})
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit)


def test_attention_reads_only_from_earlier_tokens_and_its_weights_sum_to_1():
    weights, config = read(HERE / "tiny_llama")
    _, looks = by_hand.forward([1, 9, 30, 12, 4], weights, config)
    assert looks.shape == (3, 4, 5, 5)
    assert not np.triu(looks, k=1).any()
    # a sum of 5 float32 numbers of at most 1: five roundings of 2^-24 each, and one of the division
    np.testing.assert_allclose(looks.sum(axis=-1), 1, rtol=0, atol=6 * 2**-24)


def test_a_later_token_changes_no_earlier_logit():
    weights, config = read(HERE / "tiny_llama")
    one, _ = by_hand.forward([1, 9, 30, 12], weights, config)
    two, _ = by_hand.forward([1, 9, 30, 40], weights, config)
    np.testing.assert_array_equal(one[:3], two[:3])
    assert (one[3] != two[3]).any()


def test_tokens_are_sampled_as_often_as_their_probabilities_say():
    """At temperature 0.5 the odds of two tokens are squared; at 0 the likelier one always wins."""
    logits, rng = np.log([0.6, 0.4]), np.random.default_rng(0)
    drawn = np.array([by_hand.choose(logits, 0.5, rng) for _ in range(4_000)])
    share = 0.36 / (0.36 + 0.16)
    # five standard deviations of a mean of 4,000
    assert abs((drawn == 0).mean() - share) < 5 * np.sqrt(share * (1 - share) / 4_000)
    assert {by_hand.choose(logits, 0.0, rng) for _ in range(20)} == {0}


def run(*arguments):
    """The script in a process of its own."""
    command = [sys.executable, HERE / "llama_by_hand.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_it_writes_the_models_own_answer_and_refuses_other_models_in_one_line(tmp_path):
    other = shutil.copytree(GOLDEN / "qwen3", tmp_path / "other")
    shutil.copy(HERE / "tiny_llama/tokenizer.json", other)
    done = run()
    assert done.returncode == 0 and done.stdout.endswith("2+5=7</reasoning>7</answer>\n")
    for wrong in (f"CHECKPOINT={other}", f"CHECKPOINT={tmp_path}", "TEMPERATURE=-1", "QUESTON=x"):
        refused = run(wrong)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert wrong.partition("=")[0] in refused.stderr
