"""Any Llama or Qwen3 checkpoint into MaxText: logits against those of transformers' own models."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import settings
from model import llama
from settings import UserError

GOLDEN = Path(__file__).resolve().parent / "golden"
FAST = [
    (name, False)
    for name in ("grouped_kv_heads", "llama31_rope", "llama32_rope", "qwen3", "tiny_llama")
]
SLOW = [
    pytest.param(name, False, marks=pytest.mark.slow) for name in ("tied_embeddings", "qwen3_tied")
]

# Two programs add in another order. A logit is a sum of at most 96 products, as are the two that
# each of at most three layers adds on the way to it: seven sums, each off by up to 96 roundings
# (2^-24). As a share of the largest logit:
ROUNDING = 7 * 96 * 2**-24  # 4e-5
# A log-prob at temperature 1 is the difference of two such numbers; the tiny Llama's reach 20.
LOG_PROB = 2 * 20 * ROUNDING  # 1.6e-3


def logits_of(adapter, mesh, golden):
    """Logits [B, L, V] of a model, for the tokens and positions of a golden file."""
    forward = jax.jit(lambda adapter, *inputs: adapter(*inputs, None, None)[0])
    with mesh:
        return np.asarray(
            forward(adapter, jnp.array(golden["tokens"]), jnp.array(golden["positions"]))
        )


def load(folder, rows=2, prompt_tokens=20, new_tokens=4, **changes):
    """A checkpoint as the main script loads it: the model, its mesh, MaxText's config and Hugging
    Face's.
    """
    folder, hf = llama.fetch_model(str(folder))
    sizes = dict(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    config = llama.to_maxtext_config(hf, **sizes, **changes)
    return *llama.load_llama(folder, hf, config, pad_id=0), config, hf


def tolerance(golden):
    """Largest admissible difference of logits.

    The angle of a rotation is position x frequency, rounded to float32: at position 12,000 it is
    off by up to 12,000 x 2^-24 = 7e-4 radians, in each of two layers, of the query and of the key.
    """
    angle = 2 * 2 * golden["positions"].max() * 2**-24
    return ROUNDING * np.abs(golden["logits"]).max() + angle * golden["logits"].std()


@pytest.mark.parametrize(("name", "scan"), [*FAST, ("llama31_rope", True), ("qwen3", True), *SLOW])
def test_logits_equal_transformers(name, scan):
    shipped = name == "tiny_llama"
    golden = np.load(GOLDEN / "tiny_llama.npz" if shipped else GOLDEN / name / "logits.npz")
    adapter, mesh, *_ = load(name if shipped else GOLDEN / name, scan_layers=scan)
    logits = logits_of(adapter, mesh, golden)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=tolerance(golden))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", dict.pop, "lacks weight"),
        (
            "model.layers.0.mlp.up_proj.bias",
            lambda w, name: w.setdefault(name, np.zeros(9)),
            "unknown weight",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, name, change, message):
    folder = shutil.copytree(GOLDEN / "grouped_kv_heads", tmp_path / "model")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    change(weights, name)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(folder)


def sharded(folder, **index):
    """The tiny Llama in two shards and an index, with `more` entries, beside older weights."""
    shutil.copytree(llama.find_path("tiny_llama"), folder)
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)
    }
    for file in set(weight_map.values()):
        held = {name: weight for name, weight in weights.items() if weight_map[name] == file}
        safetensors.numpy.save_file(held, folder / file)
    stale = {name: np.full_like(weight, 9) for name, weight in weights.items()}
    safetensors.numpy.save_file(stale, folder / "model-00001-of-00003.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map | index})
    )
    return folder


def test_the_index_says_which_files_hold_the_weights(tmp_path):
    """Then model.safetensors alone, as transformers has it: whatever lies beside it."""
    folder, shipped = sharded(tmp_path / "m"), llama.named_weights(load("tiny_llama")[0])
    found = [llama.named_weights(load(folder)[0])]
    shutil.copy(llama.find_path("tiny_llama") / "model.safetensors", folder)
    (folder / "model.safetensors.index.json").write_text("{")
    for weights in (*found, llama.named_weights(load(folder)[0])):
        jax.tree.map(np.testing.assert_array_equal, weights, shipped)


def test_files_that_hold_no_weights_are_refused(tmp_path):
    for name, file, words in (
        ("a", "gone", "has no gone; fetch"),
        ("b", 3, "index.json is damaged"),
    ):
        with pytest.raises(UserError, match=words):
            llama.fetch_model(str(sharded(tmp_path / name, x=file)))
    folder = shutil.copytree(llama.find_path("tiny_llama"), tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match=r"model.safetensors is damaged \(.*fetch it again"):
        llama.fetch_model(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.safetensors")
    with pytest.raises(UserError, match=r"has no model\.safetensors; fetch"):
        llama.fetch_model(str(folder))


def test_a_token_without_an_embedding_is_refused(tmp_path):
    folder = shutil.copytree(llama.find_path("tiny_llama"), tmp_path / "m")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    number = len(tokens["model"]["vocab"])
    token = {"id": number, "content": " kites", "special": False, "normalized": False}
    tokens["added_tokens"].append(token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(
        UserError, match=f"number {number} for ' kites', and its config.json only vocab_s"
    ):
        llama.load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "grouped_kv_heads",
            {"model_type": "qwen2"},
            "model_type=qwen2 is not supported; llama or qwen3 is",
        ),
        (
            "grouped_kv_heads",
            {"model_type": "no_such"},
            "model_type=no_such is not supported; llama or qwen3 is",
        ),
        (
            "grouped_kv_heads",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
            "rope_type=yarn is not supported; default or",
        ),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "rope_type=llama3 is not supported; default is",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8},
            "use_sliding_window=True is not",
        ),
    ],
)
def test_another_architecture_is_refused_in_one_line(tmp_path, name, change, message):
    folder = shutil.copytree(GOLDEN / name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        llama.fetch_model(str(folder))


ODD = [None, True, "96", [96], {}, 0, -1, 1.5, 1e999, float("nan"), 10**9, 10**30]
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=5e5)
LLAMA3 |= dict(original_max_position_embeddings=8192, rope_type="llama3")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ODD_FIELDS = {
    **dict.fromkeys((*SIZES, "vocab_size"), ODD),
    "head_dim": [*ODD[1:], 23],
    "num_key_value_heads": [*ODD, 3],
    "max_position_embeddings": ODD[:-2],
    "rms_norm_eps": [None, True, "1e-5", 0, 1, -1e-5, float("nan"), 1e999],
    "tie_word_embeddings": [None, "false", 1, []],
    "attention_bias": ["yes", 1],
    "hidden_act": [None, ["silu"], "gelu"],
    "model_type": [None, 1, "", "Llama", ["llama"]],
    "dtype": [32, ["float32"]],
    "eos_token_id": ["2", [2, "3"], {}, 2.5, True],
    "quantization_config": [{"quant_method": "fp8"}],
    "rope_theta": [None, "1e4", 10000.5, 0, float("nan"), 1e12],
    "rope_parameters": [
        [],
        "llama3",
        {"rope_type": "llama3"},
        LLAMA3 | {"low_freq_factor": 4.0},  # a division by zero
        *(LLAMA3 | {name: odd} for name in LLAMA3 for odd in (None, -1, float("nan"), True, [])),
    ],
}


@pytest.mark.parametrize("field", ODD_FIELDS)
def test_an_odd_value_in_config_json_is_one_line_that_names_it(tmp_path, field):
    folder = shutil.copytree(llama.find_path("tiny_llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for odd in ODD_FIELDS[field]:
        (folder / "config.json").write_text(json.dumps(config | {field: odd}))
        part = field.partition("rope_")[1] or field  # a part of it is named
        with pytest.raises(UserError, match=rf"^MODEL=[^\n]*({part}|llama3|weight)[^\n]*$"):
            llama.fetch_model(str(folder))


def test_a_config_json_of_another_size_is_refused_by_its_weights(tmp_path):
    """Each would be another model, or an error far away from its cause."""
    folder = shutil.copytree(llama.find_path("tiny_llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"hidden_size": 192},
        {"intermediate_size": 128},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 4},
        {"num_attention_heads": 8},
        {"num_attention_heads": 8, "head_dim": 12},  # as many numbers, in other heads
        {"num_key_value_heads": 1},
        {"vocab_size": 77},
        {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=r"^MODEL=[^\n]* weight [^\n]*config.json[^\n]*$"):
            llama.fetch_model(str(folder))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000, '{"é": 1}'.encode("latin1")],
)
def test_a_file_that_is_no_json_object_is_one_line(tmp_path, text):
    folder = shutil.copytree(llama.find_path("tiny_llama"), tmp_path / "model")
    (folder / "generation_config.json").write_bytes(text)
    with pytest.raises(UserError, match=r"^MODEL=[^\n]*generation_config.json[^\n]*again$"):
        llama.load_tokenizer(folder)
    (folder / "config.json").write_bytes(text)
    assert settings.is_small(str(folder)) is False
    with pytest.raises(UserError, match=r"^MODEL=[^\n]*config.json[^\n]*again$"):
        llama.fetch_model(str(folder))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path, bad):
    folder = shutil.copytree(GOLDEN / "grouped_kv_heads", tmp_path / "model")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"weight .*layers_1.*wi_1.*NaN or an infinity"):
        load(folder)


def test_quantized_weights_are_refused(tmp_path):
    folder = shutil.copytree(GOLDEN / "grouped_kv_heads", tmp_path / "model")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights = {name: weight.astype(np.int8) for name, weight in weights.items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match="stored as I8; quantized weights are not supported"):
        llama.fetch_model(str(folder))


def test_positions_that_the_model_does_not_know_are_refused_in_a_run_and_in_inference(
    tmp_path, monkeypatch
):
    import grpo_llama3_1_8b_demo as demo
    import inference

    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(llama.find_path("tiny_llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 55}
    (folder / "config.json").write_text(json.dumps(config))
    words = r"^MAX_PROMPT_LENGTH=28: .*=28 that's 56 positions.* knows 55 .*; lower one of the two$"
    for arguments in (["DRY_RUN=True"], ["RUN_DIR=run"]):
        with pytest.raises(UserError, match=words):
            demo.main(["MODEL=model", *arguments])
    with pytest.raises(UserError, match=words):
        inference.main(["MODEL=model", "CHECKPOINT=base", "Tom has 2 apples"])
    assert not Path("run").exists()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 56}))
    demo.main(["MODEL=model", "DRY_RUN=True"])
