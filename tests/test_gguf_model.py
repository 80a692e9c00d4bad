"""A GGUF file becomes the Hugging Face model it was made of: the same bits, logits, tokens; or one
line.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from test_convert_checkpoint import GOLDEN, assert_same_bits, load_weights

from model import llama
from settings import UserError
from tools import convert_checkpoint as convert

MODEL = "grouped_kv_heads"
# the first three are special tokens
VOCABULARY = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "t",
    "h",
    "e",
    "Ġ",
    "th",
    "the",
    "Ġthe",
    "1",
    "2",
]
TOKENIZER = {
    "model": "gpt2",
    "pre": "smollm",
    "merges": ["t h", "th e", "Ġ the"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
    "padding_token_id": 2,
}
SIZES = {  # a field of GGUF's header: its name in config.json
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
NAMES = {  # Hugging Face's ends of names, as llama.cpp's converter renames them
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
pytestmark = pytest.mark.usefixtures("empty_folder")


def make_gguf(name, path="model.gguf", **changes):
    """A GGUF file of a golden model, by llama.cpp's own writer; `changes` replace values of its
    header.
    """
    config = json.loads((GOLDEN / name / "config.json").read_text())
    unused = config["vocab_size"] - len(VOCABULARY)
    vocabulary = VOCABULARY + [f"<{i}>" for i in range(unused)]
    sizes = {key: config[own] for key, own in SIZES.items()}
    sizes |= {"context_length": 2048, "rope.freq_base": config["rope_parameters"]["rope_theta"]}
    kinds = {"tokens": vocabulary, "token_type": [3] * 3 + [1] * (len(vocabulary) - 3)}
    header = {f"llama.{key}": value for key, value in sizes.items()}
    header |= {f"tokenizer.ggml.{key}": value for key, value in (TOKENIZER | kinds).items()}
    header |= {"general.architecture": "llama", "tokenizer.chat_template": TEMPLATE}
    header |= {
        key.replace("__", "."): value
        for key, value in changes.items()
        if not key.endswith("weight")
    }
    writer = gguf.GGUFWriter(path, header.pop("general.architecture"))
    adds = {
        list: writer.add_array,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    for key, value in header.items():
        if value is not None:
            adds[type(value)](key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for hf_name, weight in load_weights(GOLDEN / name).items():
        layer, _, end = hf_name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        own = (
            f"blk.{layer}.{NAMES[end]}" if layer.isdigit() else NAMES[f"{layer}.{end}".rstrip(".")]
        )
        # row i of one half of a head, then of the other
        if (n := heads.get(own.split(".")[-1])) is not None:
            d = len(weight) // n
            rows = [
                h * d + half * d // 2 + i
                for h in range(n)
                for i in range(d // 2)
                for half in (0, 1)
            ]
            weight = weight[rows]
        if changes.get("missing_weight") != own:
            writer.add_tensor(f"{own}.weight", weight)
    if "extra_weight" in changes:
        writer.add_tensor(changes["extra_weight"], np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["grouped_kv_heads", "tied_embeddings"])
def test_the_weights_come_back_bit_for_bit_and_the_sizes_too(name):
    convert.main([f"SOURCE={make_gguf(name)}", "TARGET=hf"])
    assert_same_bits(GOLDEN / name, "hf")
    files = Path("hf/config.json"), GOLDEN / name / "config.json"
    found, golden = (json.loads(file.read_text()) for file in files)
    its_own = {
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
    }
    assert golden.keys() == found.keys()
    assert {key for key in golden if found[key] != pytest.approx(golden[key])} <= its_own


def test_the_tokenizer_cuts_merges_pads_and_asks_as_the_file_says():
    convert.main([f"SOURCE={make_gguf(MODEL)}", "TARGET=hf"])
    tokenizer = llama.load_tokenizer(Path("hf"))
    encoded = tokenizer.tokenize("the the12")
    assert encoded == ["the", "Ġthe", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("the the12", add_special_tokens=False)) == "the the12"
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    # padding never ends
    assert roles == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|endoftext|>")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert prompt == "<|im_start|>the<|im_end|>" and len(tokenizer.encode(prompt)) == 3
    assert llama.fetch_model("hf")[1].eos_token_id == tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "gpt2"}, "architecture 'gpt2' is not supported; llama is"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer gpt2 llama-bpe is not supported"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer llama smollm is not supported"),
        ({"llama__rope__scaling__type": "linear"}, "rope scaling is not supported"),
        ({"extra_weight": "rope_freqs.weight"}, "rope scaling is not supported"),
        ({"missing_weight": "blk.1.ffn_up"}, "lacks weight blk.1.ffn_up.weight"),
        *[  # fields that are missing, or of another kind
            ({field: value}, "")
            for field in (
                "llama__block_count",
                "llama__attention__head_count_kv",
                "llama__rope__freq_base",
                "tokenizer__ggml__tokens",
            )
            for value in (None, "text", ["a", "b"])
        ],
    ],
)
def test_what_is_not_supported_missing_or_of_another_kind_is_named_in_one_line(changes, words):
    with pytest.raises(UserError, match=rf"\ASOURCE=model.gguf: [^\n]*{words}[^\n]*\Z"):
        convert.main([f"SOURCE={make_gguf(MODEL, **changes)}", "TARGET=hf"])
    assert [path.name for path in Path().iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, None])
def test_a_file_that_was_cut_short_or_is_none_is_one_line(share):
    path = Path(make_gguf(MODEL))
    whole = path.read_bytes()
    path.write_bytes(b"no model " * 1000 if share is None else whole[: int(share * len(whole))])
    for name, words in (
        ("model.gguf", "not a whole GGUF file|lacks weight"),
        ("gone.gguf", "no such file"),
    ):
        with pytest.raises(UserError, match=words):
            convert.main([f"SOURCE={name}", "TARGET=hf"])


def test_a_weight_that_is_not_a_number_is_named(monkeypatch):
    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda *a: dequantize(*a) * np.float32("nan"))
    with pytest.raises(UserError, match=r"^SOURCE=model.gguf: weight model.embed[^\n]* NaN"):
        convert.main([f"SOURCE={make_gguf(MODEL)}", "TARGET=hf"])
    assert [path.name for path in Path().iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.rope.freq_base": float("inf")},
        {"llama.context_length": 0},
    ],
)
def test_a_header_with_odd_numbers_is_one_line(changes):
    with pytest.raises(UserError, match=r"^SOURCE=model.gguf: its header: [^\n]*must"):
        convert.main([f"SOURCE={make_gguf(MODEL, **changes)}", "TARGET=hf"])
