"""A Llama in a GGUF file, llama.cpp's format, as Hugging Face has it: config, tokenizer, weights.

Three things differ. The names. The weights, quantised in blocks: here they become float32 again, which does
not bring back what was lost. And the rows of q and k: llama.cpp rotates neighbours, (0, 1), (2, 3) ...,
Hugging Face rows that are half a head apart, (0, d/2), (1, d/2 + 1) ...
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from parts.settings import UserError

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
    """A GGUF file, checked.

    Args:
        path: of the file.

    Raises:
        UserError: no such file, not GGUF or cut short, another architecture, tokenizer or rope scaling.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise UserError(f"SOURCE={path}: there is no such file; give a GGUF file or a folder") from None
        except (ValueError, IndexError, OSError) as error:  # the reader looks behind the end of the file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"SOURCE={path}: not a whole GGUF file ({reason}); fetch it again") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        found = self.field("general.architecture")
        if found != ARCHITECTURE:
            raise UserError(f"SOURCE={path}: architecture {found!r} is not supported; {ARCHITECTURE} is")
        if "rope_freqs.weight" in self._tensors or self.field("llama.rope.scaling.type", "none") != "none":
            raise UserError(f"SOURCE={path}: its rope scaling is not supported; take the Hugging Face model")
        kind = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre", "default")
        if kind[0] != "gpt2" or kind[1] not in PRE_TOKENIZERS:
            raise UserError(
                f"SOURCE={path}: tokenizer {' '.join(map(str, kind))} is not supported; gpt2 with "
                f"{', '.join(PRE_TOKENIZERS)} is"
            )
        missing = [name for name in self.names().values() if name not in self._tensors]
        if missing:
            raise UserError(f"SOURCE={path}: lacks weight {missing[0]}; fetch it again")

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the file's header."""
        field = self._reader.fields.get(name)
        return default if field is None else field.contents()

    def number(self, name: str, default: int | None = None) -> int:
        """A size, from the header's `llama.<name>`."""
        return int(self.field(f"{ARCHITECTURE}.{name}", default))

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

    def config(self, tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.LlamaConfig:
        """The sizes, as Hugging Face's config.json has them, and the special tokens of its `tokenizer`."""
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
            rms_norm_eps=float(np.float32(self.field("llama.attention.layer_norm_rms_epsilon"))),
            rope_parameters={"rope_type": "default", "rope_theta": float(self.field("llama.rope.freq_base"))},
            tie_word_embeddings="output.weight" not in self._tensors,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
            architectures=["LlamaForCausalLM"],
        )

    def tokenizer(self) -> transformers.PreTrainedTokenizerFast:
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
            chat_template=self.field("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            model_max_length=self.number("context_length"),
        )


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k [heads * d, in] from llama.cpp's order of rotated pairs into Hugging Face's."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, d/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(weight.shape)
