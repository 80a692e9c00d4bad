"""A GGUF file becomes the Hugging Face model it was made of: the same bits, logits, tokens; or one line."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from test_convert_checkpoint import GOLDEN, load_weights
from test_load_llama import maxtext_logits, tolerance

from model import llama
from settings import UserError
from tools import convert_checkpoint as convert

MODELS = ["grouped_kv_heads", "tied_embeddings"]
NAMES = {  # Hugging Face's ends of names, as llama.cpp's converter renames them
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def permuted(weight, heads):
    """The rows of q or k as llama.cpp orders them: row i of one half of a head, then of the other."""
    d = len(weight) // heads
    order = [head * d + half * d // 2 + i for head in range(heads) for i in range(d // 2) for half in (0, 1)]
    return weight[order]


def make_gguf(name, path="model.gguf", **changes):
    """A GGUF file of a golden model, by llama.cpp's own writer; `changes` replace values of its header."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    known = [*SPECIAL, "t", "h", "e", "Ġ", "th", "the", "Ġthe", "1", "2"]
    vocabulary = known + [f"<{i}>" for i in range(config["vocab_size"] - len(known))]
    header = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": 2048,
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(vocabulary) - 3),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    } | {key.replace("__", "."): value for key, value in changes.items() if not key.endswith("weight")}
    writer = gguf.GGUFWriter(path, header.pop("general.architecture"))
    for key, value in header.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](
                key, value
            )
    for hf_name, weight in load_weights(GOLDEN / name).items():
        layer = hf_name.removeprefix("model.layers.").split(".")[0]
        place = f"blk.{layer}." if layer.isdigit() else ""
        end = hf_name.removesuffix(".weight").split(f"layers.{layer}.")[-1]
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if NAMES[end] in heads:
            weight = permuted(weight, heads[NAMES[end]])
        if changes.get("missing_weight") == f"{place}{NAMES[end]}":
            continue
        writer.add_tensor(f"{place}{NAMES[end]}.weight", weight)
    if "extra_weight" in changes:
        writer.add_tensor(changes["extra_weight"], np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_come_back_bit_for_bit_and_give_the_logits_of_transformers(name):
    convert.main([f"SOURCE={make_gguf(name)}", "TARGET=hf"])
    before, after = load_weights(GOLDEN / name), load_weights("hf")
    assert before.keys() == after.keys()
    for weight in before:
        np.testing.assert_array_equal(before[weight], after[weight], err_msg=weight)
    golden = np.load(GOLDEN / name / "logits.npz")
    logits = maxtext_logits("hf", golden)
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=tolerance(golden))
    assert [path.name for path in Path().iterdir() if "partial" in path.name] == []


def test_the_tokenizer_cuts_merges_pads_and_asks_as_the_file_says():
    convert.main([f"SOURCE={make_gguf(MODELS[0])}", "TARGET=hf"])
    tokenizer = llama.load_tokenizer(Path("hf"))
    encoded = tokenizer.tokenize("the the12")
    assert encoded == ["the", "Ġthe", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("the the12", add_special_tokens=False)) == "the the12"
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert roles == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|endoftext|>")  # padding never ends
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert prompt == "<|im_start|>the<|im_end|>" and len(tokenizer.encode(prompt)) == 3
    assert llama.load_hf_config("hf")[1].eos_token_id == tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "gpt2"}, "architecture 'gpt2' is not supported; llama is"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer gpt2 llama-bpe is not supported"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer llama smollm is not supported"),
        ({"llama__rope__scaling__type": "linear"}, "rope scaling is not supported"),
        ({"extra_weight": "rope_freqs.weight"}, "rope scaling is not supported"),
        ({"missing_weight": "blk.1.ffn_up"}, "lacks weight blk.1.ffn_up.weight"),
    ],
)
def test_what_is_not_supported_is_named(changes, words):
    path = make_gguf(MODELS[0], **changes)
    with pytest.raises(UserError, match=words):
        convert.main([f"SOURCE={path}", "TARGET=hf"])
    assert sorted(p.name for p in Path().iterdir()) == [path]


FIELDS = ["llama.block_count", "llama.embedding_length", "llama.attention.head_count_kv",
          "llama.rope.freq_base", "tokenizer.ggml.tokens"]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_header_that_is_missing_or_of_another_kind_is_one_line(field, subtests):
    for value in (None, "text", ["a", "b"]):
        with subtests.test(value):
            path = make_gguf(MODELS[0], **{field.replace(".", "__"): value})
            with pytest.raises(UserError, match=r"^SOURCE=model.gguf: [^\n]+$"):
                convert.main([f"SOURCE={path}", "TARGET=hf"])
            assert sorted(p.name for p in Path().iterdir()) == [path]


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, None])
def test_a_file_that_was_cut_short_or_is_none_is_one_line(share):
    path = Path(make_gguf(MODELS[0]))
    whole = path.read_bytes()
    path.write_bytes(b"no model " * 1000 if share is None else whole[: int(share * len(whole))])
    for name, words in (("model.gguf", "not a whole GGUF file|lacks weight"), ("gone.gguf", "no such file")):
        with pytest.raises(UserError, match=words):
            convert.main([f"SOURCE={name}", "TARGET=hf"])
    assert not Path("hf").exists() and not Path("hf.partial").exists()
