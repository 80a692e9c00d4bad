"""What we read of a model's config.json: names, types and ranges, checked before anything uses it.

transformers takes any value for any field. Here one that MaxText can't build, or that would train
another model without a word, is one line that names it.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import safetensors

from settings import UserError

Size = Annotated[int, pydantic.Field(ge=1, le=2**24)]
Layers = Annotated[int, pydantic.Field(ge=1, le=1000)]
Length = Annotated[int, pydantic.Field(ge=1, le=2**40)]
Positive = Annotated[float, pydantic.Field(gt=0, le=1e9)]
Ids = int | list[int] | None


class Strict(pydantic.BaseModel):
    """Refuses "96" or true for 96, and NaN; other fields may hold anything."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)


class Rope(Strict):
    """rope_parameters, or rope_scaling in older files."""

    rope_theta: Positive = 1e4
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Length | None = None
    rope_type: str | None = None
    type: str | None = None  # its older name

    @pydantic.model_validator(mode="after")
    def llama3_is_whole(self) -> "Rope":
        low, high = self.low_freq_factor, self.high_freq_factor
        numbers = self.factor, low, high, self.original_max_position_embeddings
        if "llama3" in (self.rope_type, self.type) and (None in numbers or low >= high):
            wanted = "factor, low_freq_factor < high_freq_factor, original_max_position_embeddings"
            raise ValueError(f"llama3 needs {wanted}")
        if self.rope_theta % 1:  # MaxText's is an int
            raise ValueError("rope_theta must be a whole number")
        return self


class AnyConfigJson(Strict):
    """What every config.json has: whose fields the others are."""

    model_type: str


class ConfigJson(AnyConfigJson):
    """The fields of a Llama or Qwen3."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, pydantic.Field(gt=0, lt=1)] = 1e-6
    rope_theta: Positive = 1e4
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    max_position_embeddings: Length = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: list[Literal["full_attention"]] | None = None
    hidden_act: str = "silu"
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: Ids = None
    eos_token_id: Ids = None
    pad_token_id: Ids = None
    quantization_config: None = None

    @pydantic.model_validator(mode="after")
    def heads_fit(self) -> "ConfigJson":
        heads = self.num_attention_heads
        if heads % (self.num_key_value_heads or heads):
            raise ValueError("num_key_value_heads must divide num_attention_heads")
        if not self.head_dim and (self.hidden_size % heads or "head_dim" in self.model_fields_set):
            raise ValueError("head_dim is missing")
        if (self.head_dim or self.hidden_size // heads) % 2:
            raise ValueError("head_dim must be even: a rotation turns pairs")
        if self.rope_theta % 1:
            raise ValueError("rope_theta must be a whole number")
        return self


class GenerationJson(Strict):
    """The fields of generation_config.json."""

    eos_token_id: Ids = None


def read_checked[Kind: Strict](path: Path, kind: type[Kind], model: str) -> Kind:
    """A JSON file of MODEL=`model`, checked as `kind`; raises UserError."""
    named = f"MODEL={model}: {path.name}"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # no JSON, no UTF-8
        fault = f"is not understood ({error!s:.100})"
        raise UserError(f"{named} {fault}; correct it, or fetch the file again") from None
    return checked(content, kind, named)


def checked[Kind: Strict](content: Any, kind: type[Kind], named: str) -> Kind:
    """`content` as `kind`; UserError with where it's from, `named`, the field and its value."""
    try:
        return kind.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if place and first["type"] != "missing":
        place += f"={first['input']!r:.60}"
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    fault = ": ".join(filter(None, (named, place, said)))
    raise UserError(f"{fault}; correct it, or fetch the file again")


# %% The weights' files ----------------------------------------------------------------------------
def stored_weights(files: list[Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype ("F32", "BF16" ...) of each weight in *.safetensors files, by name."""
    found = {}
    for path in files:
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (it isn't a dict)
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape()), part.get_dtype()
    return found


def weight_shapes(hf: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each weight [out, in] that config.json, parsed as `hf`, calls for, by name."""
    D, F, V, d = hf.hidden_size, hf.intermediate_size, hf.vocab_size, hf.head_dim
    q, kv = hf.num_attention_heads * d, hf.num_key_value_heads * d
    layer = {
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (q, D),
        "self_attn.k_proj": (kv, D),
        "self_attn.v_proj": (kv, D),
        "self_attn.o_proj": (D, q),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    if hf.model_type == "qwen3":
        layer |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not hf.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    for i in range(hf.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def refuse_misfit(model: str, hf: Any, stored: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """Raises UserError unless the weights `stored` are those that config.json calls for."""
    wanted, found = weight_shapes(hf), dict(stored)
    if hf.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # a duplicate of the embedding
    if wanted.keys() != found.keys():
        odd = min(wanted.keys() ^ found.keys())
        fault = "lacks" if odd in wanted else "has the unknown"
        raise UserError(f"MODEL={model}: {fault} weight {odd}; is config.json of this model?")
    for name, (shape, dtype) in found.items():
        if shape != wanted[name]:
            fault = f"weight {name} is {shape}, config.json says {wanted[name]}"
            raise UserError(f"MODEL={model}: {fault}; is it of this model?")
        if dtype not in ("F64", "F32", "F16", "BF16"):
            fault = f"weight {name} is stored as {dtype}; quantized weights are not supported"
            raise UserError(f"MODEL={model}: {fault}; take the model's float ones")
