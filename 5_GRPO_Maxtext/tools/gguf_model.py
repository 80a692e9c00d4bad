"""A Llama in a GGUF file, llama.cpp's format, as Hugging Face has it: config, tokenizer, weights.

Three things differ. The names. The weights, quantised in blocks: here they become float32 again, which does
not bring back what was lost. And the rows of q and k: llama.cpp rotates neighbours, (0, 1), (2, 3) ...,
Hugging Face rows that are half a head apart, (0, d/2), (1, d/2 + 1) ...
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from settings import UserError

ARCHITECTURE = "llama"
PRE_TOKENIZERS = {  # tokenizer.ggml.pre: how a text is cut before byte pairs are merged
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
WEIGHTS = {  # of a layer: GGUF's names, Hugging Face's
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and the like


class GGUFLlama:
    """A GGUF file, checked, with the `config` and `tokenizer` that Hugging Face would have.

    Args:
        path: of the file.

    Raises:
        UserError: no such file, not GGUF or cut short, a field of its header missing or odd, another
            architecture, tokenizer or rope scaling.
    """

    def __init__(self, path: Path):
        try:
            self._reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            if fault := self._fault():
                raise UserError(f"SOURCE={path}: {fault}")
            self.tokenizer = self._make_tokenizer()
            self.config = self._make_config()
        except FileNotFoundError:
            raise UserError(f"SOURCE={path}: there is no such file; give a GGUF file or a folder") from None
        except UserError:
            raise
        except Exception as error:  # the reader looks behind the end of the file; fields are missing, or odd
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"SOURCE={path}: not a whole GGUF file ({reason}); fetch it again") from None

    def _fault(self) -> str:
        """What of the file is not supported, or not there, and what to do; empty if nothing."""
        if (found := self.field("general.architecture")) != ARCHITECTURE:
            return f"architecture {found!r} is not supported; {ARCHITECTURE} is"
        if "rope_freqs.weight" in self._tensors or self.field("llama.rope.scaling.type", "none") != "none":
            return "its rope scaling is not supported; take the Hugging Face model"
        kind = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre", "default")
        if kind[0] != "gpt2" or kind[1] not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            return f"tokenizer {' '.join(map(str, kind))} is not supported; gpt2 with {known} is"
        layers = {name.split(".")[1] for name in self._tensors if name.startswith("blk.")}
        if self.number("block_count") != len(layers) or not layers:
            return f"has {len(layers)} layers, its header says {self.number('block_count')}; fetch it again"
        missing = [name for name in self.names().values() if name not in self._tensors]
        return f"lacks weight {missing[0]}; fetch it again" if missing else ""

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the file's header."""
        field = self._reader.fields.get(name)
        return default if field is None else field.contents()

    def number(self, name: str, default: int | None = None, kind: type = int) -> int | float:
        """A size or another positive number, `llama.<name>`; raises ValueError or TypeError if it is none."""
        value = kind(self.field(f"{ARCHITECTURE}.{name}", default))
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}")
        return value

    def names(self) -> dict[str, str]:
        """Hugging Face's names of all weights, each with GGUF's."""
        names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if "output.weight" in self._tensors:  # else the embedding is the output layer, too
            names["lm_head.weight"] = "output.weight"
        for layer in range(self.number("block_count")):
            for old, new in WEIGHTS.items():
                names[f"model.layers.{layer}.{new}.weight"] = f"blk.{layer}.{old}.weight"
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, as Hugging Face has it; GGUF names the innermost dimension first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Hugging Face's name and the float32 weight [out, in] (norms [width]), one at a time."""
        counts = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        for hf_name, name in self.names().items():
            tensor = self._tensors[name]
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            weight = weight.reshape(self.shape(name))
            kind = name.split(".")[-2]
            yield hf_name, halves(weight, self.number(counts[kind])) if kind in counts else weight

    def _make_config(self) -> transformers.LlamaConfig:
        """The sizes, as Hugging Face's config.json has them, and the special tokens."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        return transformers.LlamaConfig(
            vocab_size=self.shape("token_embd.weight")[0],
            hidden_size=width,
            head_dim=self.number("attention.key_length", width // heads),
            intermediate_size=self.number("feed_forward_length"),
            num_hidden_layers=self.number("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self.number("attention.head_count_kv"),
            max_position_embeddings=self.number("context_length"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon", kind=float),
            rope_parameters={"rope_type": "default", "rope_theta": self.number("rope.freq_base", kind=float)},
            tie_word_embeddings="output.weight" not in self._tensors,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            dtype="float32",
            architectures=["LlamaForCausalLM"],
        )

    def _make_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        """Its byte-level BPE tokenizer with the chat template.

        Padding is the file's own token for it, unless that is the end-of-sequence token, which training must
        not mask; then it is the one for unknown texts, which a byte-level tokenizer never needs.
        """
        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[self.field("tokenizer.ggml.pre")]()
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        roles = ("bos", "eos", "unknown", "padding")
        ids = {role: self.field(f"tokenizer.ggml.{role}_token_id") for role in roles}
        if ids["padding"] in (None, ids["eos"]):
            ids["padding"] = ids["unknown"]
        named = {role: None if i is None else tokens[int(i)] for role, i in ids.items()}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=named["bos"],
            eos_token=named["eos"],
            unk_token=named["unknown"],
            pad_token=named["padding"],
            chat_template=self.field("tokenizer.chat_template") or None,
            clean_up_tokenization_spaces=False,
            model_max_length=self.number("context_length"),
        )


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k [heads * d, in] from llama.cpp's order of rotated pairs into Hugging Face's."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, d/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(weight.shape)
