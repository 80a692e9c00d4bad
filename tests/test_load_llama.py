"""Any Llama or Qwen3 checkpoint into MaxText: logits against those of transformers' own models."""

import json
import shutil
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from model import llama
from settings import UserError

GOLDEN = Path(__file__).resolve().parent / "golden"
REFUSED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["refused"]
FAST = [
    (name, False)
    for name in ("grouped_kv_heads", "llama31_rope", "llama32_rope", "qwen3", "tiny_llama")
]
SLOW = [
    pytest.param(name, False, marks=pytest.mark.slow) for name in ("tied_embeddings", "qwen3_tied")
]


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
    """Largest admissible difference, as a share of the logits' spread.

    1e-4: float32 sums in another order (2e-6 seen with random weights, 5e-5 with trained ones). The
    angle of a rotation is position x frequency, rounded to float32: at position 12,000 it is off by
    up to 12,000 x 2^-24 = 7e-4 radians.
    """
    return (1e-4 if golden["positions"].max() < 100 else 3e-3) * golden["logits"].std()


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


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_another_architecture_is_refused_in_one_line(tmp_path, name, change, message):
    folder = shutil.copytree(GOLDEN / name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        llama.fetch_model(str(folder))
