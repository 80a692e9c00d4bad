"""Reads a Llama from a GGUF file, llama.cpp's format, as Hugging Face has it: config, tokenizer,
weights.

Three things differ. The weights have other names; the package gguf knows both. The weights are
quantized in blocks; we convert them to float32, which doesn't restore the lost precision. And the
rows of q and k are in another order: llama.cpp rotates neighbors, (0, 1), (2, 3) ..., Hugging Face
rotates rows half a head apart, (0, d/2), (1, d/2 + 1) ...
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model import config_json
from model.versions import first_line
from settings import UserError

SIZES = {  # of config.json, and their fields in GGUF's header
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}


class GGUFLlama:
    """A GGUF file with the `config` and `tokenizer` that Hugging Face would have."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
            self.refuse()
            self.tokenizer = self.make_tokenizer()
            self.config = self.make_config()
            config_json.checked(
                self.config.to_dict(), config_json.ConfigJson, f"SOURCE={path}: its header"
            )
        except FileNotFoundError:
            raise UserError(
                f"SOURCE={path}: there is no such file; give a GGUF file or a folder"
            ) from None
        except UserError:
            raise
        except (
            Exception
        ) as error:  # the reader runs past the end of the file; fields are missing or odd
            fault = f"not a whole GGUF file ({first_line(error)})"
            raise UserError(f"SOURCE={path}: {fault}; fetch it again") from None

    def refuse(self) -> None:
        """Raises UserError for what isn't supported in the file."""
        kind = f"{self.field('tokenizer.ggml.model')} {self.field('tokenizer.ggml.pre', 'default')}"
        layers = len({name.split(".")[1] for name in self.tensors if name.startswith("blk.")})
        fault = ""
        if (architecture := self.field("general.architecture")) != "llama":
            fault = f"architecture {architecture!r} is not supported; llama is"
        elif (
            "rope_freqs.weight" in self.tensors
            or self.field("llama.rope.scaling.type", "none") != "none"
        ):
            fault = "its rope scaling is not supported; take the Hugging Face model"
        elif (
            kind != "gpt2 smollm"
        ):  # the second says how a text is cut before byte pairs are merged
            fault = f"tokenizer {kind} is not supported; gpt2 with smollm is"
        elif (blocks := self.field("llama.block_count")) != layers:
            fault = f"has {layers} layers, its header says {blocks}; fetch it again"
        if fault:
            raise UserError(f"SOURCE={self.path}: {fault}")

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the file's header."""
        field = self.reader.fields.get(name)
        return default if field is None else field.contents()

    def weights(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
        """Name and float32 weight [out, in] (norms [width]), one at a time, for the names in
        `shapes`.
        """
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, self.config.num_hidden_layers)
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }
        for name, shape in shapes.items():
            own = names.get_name(name, try_suffixes=(".weight",))
            if (tensor := self.tensors.get(own)) is None:
                raise UserError(f"SOURCE={self.path}: lacks weight {own}; fetch it again")
            held = tuple(map(int, reversed(tensor.shape)))  # GGUF: the innermost axis first
            if held != shape:
                fault = f"{own} is {held}, its header says {shape}"
                raise UserError(f"SOURCE={self.path}: {fault}; fetch another file")
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            # pairs of rows [heads, d/2, 2, in] into halves
            if (kind := name.split(".")[-2]) in heads:
                weight = weight.reshape(heads[kind], -1, 2, shape[1]).swapaxes(1, 2)
            yield name, weight.reshape(shape)

    def make_config(self) -> transformers.LlamaConfig:
        """The sizes, as Hugging Face's config.json has them, and the special tokens."""
        sizes = {name: int(self.field(f"llama.{field}")) for name, field in SIZES.items()}
        width = sizes["hidden_size"] // sizes["num_attention_heads"]
        rope = {"rope_type": "default", "rope_theta": float(self.field("llama.rope.freq_base"))}
        return transformers.LlamaConfig(
            **sizes,
            vocab_size=int(self.tensors["token_embd.weight"].shape[-1]),
            rope_parameters=rope,
            head_dim=self.field("llama.attention.key_length", width),
            architectures=["LlamaForCausalLM"],
            rms_norm_eps=float(self.field("llama.attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in self.tensors,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def make_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        """Its byte-level BPE tokenizer with the chat template.

        The padding token is the file's own, unless that's the end-of-sequence token, which training
        must not mask. Then it's the unknown token, which a byte-level tokenizer never needs.
        """
        tokens, kinds = self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(
            models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # as smollm does
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = [
            t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL
        ]
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {role: self.field(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
        if ids["pad"] in (None, ids["eos"]):
            ids["pad"] = ids["unk"]
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            **{f"{role}_token": None if i is None else tokens[int(i)] for role, i in ids.items()},
            chat_template=self.field("tokenizer.chat_template") or None,
            clean_up_tokenization_spaces=False,
            model_max_length=self.field("llama.context_length"),
        )
