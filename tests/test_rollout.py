"""Generation by MaxText, against the full forward pass and against known distributions."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from scipy.stats import chisquare
from test_load_llama import LOG_PROB, load
from tunix.generate.tokenizer_adapter import TokenizerAdapter

import grpo_llama3_1_8b_demo as demo
from model import llama, rollout
from model.llm import Llm, SampledAhead
from settings import HERE, UserError, read
from task.prompts import to_prompt

NEW_TOKENS = 28


@functools.cache
def shipped():
    """Config, tokenizer, weights and mesh of the tiny Llama; all engines below decode with these
    weights.
    """
    actor, mesh, _, hf = load("tiny_llama", 16, 28, NEW_TOKENS)
    return hf, llama.load_tokenizer(HERE / "tiny_llama"), actor, mesh


@functools.cache
def make_rollout(
    rows=16, prompt_tokens=28, logits_clip=0.0, prompt_rows=None, folder=HERE / "tiny_llama"
):
    """A rollout engine on the shipped tiny Llama, with the tokenizer in `folder`."""
    hf, _, actor, mesh = shipped()
    sizes = dict(prompt_tokens=prompt_tokens, new_tokens=NEW_TOKENS)
    config, of_prompts = (
        llama.to_maxtext_config(hf, rows=count, **sizes) if count else None
        for count in (rows, prompt_rows)
    )
    return rollout.MaxTextRollout(
        actor,
        TokenizerAdapter(llama.load_tokenizer(folder)),
        mesh,
        settings(),
        maxtext_config=config,
        prompt_config=of_prompts,
        hf=hf,
        logits_clip=logits_clip,
    )


def settings(temperature=1.0, top_p=1.0, top_k=-1, prompt_tokens=28, new_tokens=NEW_TOKENS, seed=0):
    c = SimpleNamespace(
        TEMPERATURE=temperature,
        TOP_P=top_p,
        TOP_K=top_k,
        MAX_PROMPT_LENGTH=prompt_tokens,
        TOTAL_GENERATION_STEPS=new_tokens,
    )
    return rollout.sampling_config(c, seed=jax.random.key(seed))


def prompts(n):
    rows = map(json.loads, (HERE / "tiny_gsm8k" / "test.jsonl").read_text().splitlines()[:n])
    return [
        to_prompt(shipped()[1], row["question"], template="{question}", system_prompt="")
        for row in rows
    ]


def full_forward(engine, output, new_tokens=NEW_TOKENS):
    """Logits [B, T, V] that predict each completion token, from one uncached pass over all."""
    completions = rollout.right_padded(output.tokens, new_tokens, engine.pad_id(), np.int32)
    tokens = np.concatenate([output.left_padded_prompt_tokens, completions], axis=1)
    mask = tokens != engine.pad_id()
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    causal = mask[:, None, :] & np.tril(np.ones((tokens.shape[1],) * 2, bool))
    forward = jax.jit(lambda model, *inputs: model(*inputs)[0])
    with engine._mesh:
        logits = forward(
            engine.model(), jnp.array(tokens), jnp.array(positions), None, jnp.array(causal)
        )
    return np.asarray(logits)[:, -new_tokens - 1 : -1], completions


@pytest.mark.parametrize(("clip", "how"), [(np.inf, (3.0, 0.8, 5)), (2.0, (1.0, 1.0, -1))])
def test_samples_have_the_log_probs_of_the_full_forward_pass(clip, how):
    """Also of a policy whose logits are clipped; there the trainer's log-probs, too."""
    engine = make_rollout(logits_clip=clip if clip < 9 else 0.0)
    output = engine.generate(prompts(16), settings(*how, seed=3))
    logits, completions = full_forward(engine, output)
    assert np.abs(logits).max() > 5  # the clip binds
    clipped = np.clip(logits, -clip, clip)
    trained = np.asarray(jax.nn.log_softmax(clipped))
    clipped[..., engine.pad_id()] = -np.inf  # never drawn
    scored = np.asarray(engine.get_per_token_logps(output.left_padded_prompt_tokens, completions))
    for i, (ids, log_prob) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        drawn = [filtered(row, *how)[token] for row, token in zip(clipped[i], ids)]
        np.testing.assert_allclose(log_prob, np.log(drawn), rtol=0, atol=LOG_PROB)
        if clip < 9:
            expected = trained[i][np.arange(len(ids)), ids]
            np.testing.assert_allclose(scored[i, : len(ids)], expected, rtol=0, atol=LOG_PROB)


def filtered(logits, temperature, top_p, top_k):
    """The distribution to sample from, by a plain loop: the k likeliest, then the fewest that reach
    p.
    """
    p = np.exp(logits / temperature - np.max(logits / temperature))
    order = np.argsort(-p)
    order = order[:top_k] if top_k > 0 else order
    p = p / p[order].sum()
    kept, mass = [], 0.0
    for token in order:
        if mass > top_p:
            break
        kept.append(token)
        mass += p[token]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


@pytest.mark.parametrize("how", [(1.0, 1.0, -1), (3.0, 1.0, 5), (3.0, 0.6, -1)])
def test_sampling_frequencies_match_the_distribution(how):
    temperature, *cut = how
    logits = np.append(-np.inf, np.random.default_rng(0).normal(scale=4, size=75)).astype(
        np.float32
    )
    expected, key = filtered(logits.astype(float), *how), jax.random.key(0)
    drawn, reported = rollout.sample(
        np.tile(logits, (4096, 1)), 0, key, temperature, 0, [(False, *cut)]
    )
    np.testing.assert_allclose(reported, np.log(expected[drawn]), atol=1e-5)  # float32
    counts, total = np.bincount(drawn, minlength=len(expected)), len(drawn)
    assert counts[expected == 0].sum() == 0
    common = expected * total >= 5  # chi-square needs 5 a cell
    assert common.sum() > 1
    wanted = expected[common] / expected[common].sum() * counts[common].sum()
    # the seed is fixed, so this passes or fails for good; a right sampler fails with probability
    # 0.001
    assert chisquare(counts[common], wanted).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 30.0])
def test_padding_is_never_drawn_and_the_end_is_kept_but_not_shown(temperature):
    """At temperature 30 all tokens are about as likely: of 448 drawn, 6 would be padding."""
    engine = make_rollout()
    output = engine.generate(prompts(16), settings(temperature, seed=1))
    assert sum(map(len, output.tokens)) > 200
    for text, tokens, log_prob in zip(output.text, output.tokens, output.logprobs, strict=True):
        assert (tokens != engine.pad_id()).all() and (tokens[:-1] != engine.eos_id()).all()
        assert len(tokens) == NEW_TOKENS or tokens[-1] == engine.eos_id()
        if temperature == 0:
            assert tokens[-1] == engine.eos_id() and text == engine.tokenizer.decode(tokens[:-1])
        assert np.isfinite(log_prob).all()


def test_batch_size_and_padding_do_not_change_a_row():
    asked, engine, small = prompts(16), make_rollout(), make_rollout(rows=4, prompt_tokens=48)
    greedy = engine.generate(asked, settings(temperature=0.0)).text
    assert small.generate(asked, settings(temperature=0.0, prompt_tokens=48)).text == greedy
    # sampled rows too: row i of a batch does not depend on the rows after it
    sampled = engine.generate(asked, settings(seed=3)).text
    assert engine.generate(asked[:5], settings(seed=3)).text == sampled[:5]
    assert small.generate(asked[:4], settings(seed=3, prompt_tokens=48)).text == sampled[:4]


def test_a_prompt_is_computed_once_and_its_answers_are_the_same(monkeypatch):
    """Sixteen rows of five different prompts, four prompts in a pass; the order is nobody's."""
    engine, passes = make_rollout(prompt_rows=4), []
    asked = [prompts(5)[i] for i in (3, 0, 0, 4, 1, 1, 1, 2, 3, 0, 4, 2, 2, 2, 2, 3)]
    prefill = engine._prefill

    def counted(params, rest, rows):
        passes.append(rows.shape)
        return prefill(params, rest, rows)

    monkeypatch.setattr(engine, "_prefill", counted)
    output = engine.generate(asked, settings(temperature=0.7, seed=3))
    assert passes == [(4, 28)] * 2
    expected = make_rollout().generate(asked, settings(temperature=0.7, seed=3))
    assert output.text == expected.text and len(set(output.text)) > 5
    np.testing.assert_array_equal(
        output.left_padded_prompt_tokens, expected.left_padded_prompt_tokens
    )
    for found, log_prob in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(found, log_prob, rtol=0, atol=LOG_PROB / 0.7)


def test_answers_ahead_are_the_same_bit_for_bit_after_a_checkpoint():
    """Through JSON: text, tokens, log-probs in float32, prompts."""
    engine, asked, sampled = make_rollout(), prompts(4), []

    def sample(texts, step):
        sampled.append(texts)
        return engine.generate(texts, settings(temperature=0.7, seed=5)), None

    llm = SimpleNamespace(sample=sample, rollout=engine, to_arrays=lambda output: output)
    ahead = SampledAhead(llm, None)
    assert ahead.to_json() is None
    ahead.begin(asked, 0)
    resumed = SampledAhead(llm, json.loads(json.dumps(ahead.to_json())))
    expected, found = (each.take(asked, 1) for each in (ahead, resumed))
    assert len(sampled) == 1 and found.text == expected.text  # neither samples again
    np.testing.assert_array_equal(
        found.left_padded_prompt_tokens, expected.left_padded_prompt_tokens
    )
    for name, dtype in (("tokens", np.int32), ("logprobs", np.float32)):
        for ours, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            np.testing.assert_array_equal(np.array(ours, dtype), theirs)
    assert ahead.to_json() is None and resumed.to_json() is None


def test_the_key_is_a_function_of_the_step():
    _, _, actor, mesh = shipped()
    c = read(demo.Constants, ["BETA=0.0"])
    asked = dict.fromkeys(("prompts", "question"), np.array(prompts(16)))
    llm, resumed = (Llm(c, actor, None, make_rollout(), settings(), mesh, ()) for _ in range(2))
    first, second, third = (llm.sample(asked, step)[0].text for step in (7, 7, 8))
    assert first != second  # two calls in one step: a refill must not get the same answers
    assert third not in (first, second)
    assert resumed.sample(asked, 7)[0].text == first


def test_decoding_stops_when_every_row_is_done(monkeypatch):
    """The log-probs of a column that isn't computed stay 0."""
    engine, decoded = make_rollout(), []
    decode = engine._decode

    def kept(*arguments, **named):
        decoded[:] = decode(*arguments, **named)
        return decoded

    monkeypatch.setattr(engine, "_decode", kept)
    output = engine.generate(prompts(4), settings())
    steps = np.flatnonzero(np.any(decoded[1], axis=0))
    assert len(steps) == max(map(len, output.tokens)) < NEW_TOKENS


def test_every_end_of_sequence_token_of_generation_config_ends_an_answer(tmp_path):
    """Llama 3.1 has three, Qwen3's second one is also its padding. Here it is a token of most
    answers.
    """
    folder = Path(shutil.copytree(HERE / "tiny_llama", tmp_path / "model"))
    tokenizer = shipped()[1]
    number = tokenizer.convert_tokens_to_ids("<answer>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [number, 2]}))
    ends = set(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    assert set(llama.load_tokenizer(folder).eos_ids) == ends > {tokenizer.eos_token_id}
    engine = make_rollout(folder=folder)
    output = engine.generate(prompts(16), settings(temperature=2.0))
    ended = rollout.has_end(output.tokens, engine.tokenizer.eos_ids)
    for (*before, last), over in zip(output.tokens, ended, strict=True):
        assert ends.isdisjoint(before) and over == (last in ends)
    assert {tokens[-1] for tokens in output.tokens} > {number}

    for text, found in (
        (f'{{"eos_token_id": {tokenizer.pad_token_id}}}', "no pad token"),
        ("[", "is not understood"),
    ):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=f"^MODEL={folder}: .*{found}"):
            llama.load_tokenizer(folder)
