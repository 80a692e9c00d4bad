"""Loads a Llama or Qwen3 checkpoint in Hugging Face's layout into MaxText.

MaxText's `model_name` selects the architecture and its weight mapping; all sizes come from the
checkpoint's own config.json. Qwen3 is a Llama that normalizes queries and keys per head before
rotating them. The logits equal those of transformers' own models (tests/test_load_llama.py).
"""

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import safetensors
import transformers
from flax import nnx
from maxtext.checkpoint_conversion.utils import hf_shape, load_dynamic, param_mapping
from maxtext.checkpoint_conversion.utils.utils import process_maxtext_param
from maxtext.configs import pyconfig
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.layers.embeddings import LLaMARotaryEmbedding
from maxtext.utils import globals as maxtext_globals
from maxtext.utils import maxtext_utils, model_creation_utils

from constants import RunConstants
from model import config_json, faster_on_cpu
from model.versions import first_line
from settings import UserError, find_path

# model_type in config.json: a MaxText model with these layers, weight names, layout hooks
ARCHITECTURES = {
    "llama": "llama3.1-8b",
    "qwen3": "qwen3-0.6b",
}
# mesh axes that MaxText splits a batch over
BATCH_AXES = ["data", "fsdp", "fsdp_transpose", "expert"]
# Of a model's files, those that may hold weights; the others, such as the tokenizer's merges.txt,
# belong to it, whatever their names. WEIGHTS are in the one format that we read.
WEIGHTS = "*.safetensors*"
OTHER_WEIGHTS = ("*.bin*", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot")
OTHER_WEIGHTS += ("original/*", "onnx/*", "openvino/*", "coreml/*", "gguf/*")
# pad-only tokens of Llama 3.1 and Qwen3
SPARE_TOKENS = ("<|finetune_right_pad_id|>", "<|fim_pad|>")


# %% Hugging Face's side ---------------------------------------------------------------------------
def fetch_model(model: str, weights: bool = True) -> tuple[Path, transformers.PretrainedConfig]:
    """The folder of MODEL, downloaded if it's a name or name@revision on Hugging Face's hub, and
    its config.

    `weights=False` leaves the weights on the hub. UserError if files are missing or MaxText can't
    run it.
    """
    folder = find_path(model)
    if not folder.is_dir():
        folder = from_hub(model, [*OTHER_WEIGHTS, *[WEIGHTS] * (not weights)])
    if not (folder / "config.json").is_file():
        raise UserError(
            f"MODEL={model}: {folder} has no config.json; give a Hugging Face model folder"
        )
    config = config_json.read_checked(folder / "config.json", config_json.AnyConfigJson, model)
    if config.model_type not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise UserError(
            f"MODEL={model}: model_type={config.model_type} is not supported; {known} is"
        )
    config_json.read_checked(folder / "config.json", config_json.ConfigJson, model)
    try:
        hf = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' checks share no type
        fault = f"its config.json is not understood ({first_line(error)})"
        raise UserError(f"MODEL={model}: {fault}; correct it, or fetch it again") from None
    refuse_unsupported(model, hf)
    if weights:
        config_json.refuse_misfit(model, hf, config_json.stored_weights(weight_files(folder)))
    return folder, hf


def side_files(folder: Path) -> list[Path]:
    """A model's files that hold no weights, but for its README: config, tokenizer, chat templates,
    license.
    """
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    return sorted(
        path
        for path in files
        if path.is_file()
        and not path.name.startswith((".", "README"))
        and not any(path.match(pattern) for pattern in (WEIGHTS, *OTHER_WEIGHTS))
    )


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights, chosen as transformers does; the folder may have others.

    That's model.safetensors, or else the files in model.safetensors.index.json.
    """
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [path]
    try:
        if index.is_file() and not path.is_file():
            path = index
            files = sorted(
                {
                    folder / name
                    for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                }
            )
        for path in files:
            with safetensors.safe_open(path, "np"):
                pass
    except FileNotFoundError:
        raise UserError(
            f"MODEL={folder}: has no {path.name}; fetch its weights (*.safetensors), or rebuild"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise UserError(
            f"MODEL={folder}: {path.name} is damaged ({error}); fetch it again"
        ) from None
    return files


def parameters_of(hf: transformers.PretrainedConfig) -> int:
    """Number of parameters of the model that config.json calls for."""
    return sum(math.prod(shape) for shape in config_json.weight_shapes(hf).values())


def snapshot(model: str, without: list[str], **options: bool) -> Any:
    """What huggingface_hub's snapshot_download returns for MODEL, name@revision or a name, and all
    its files but those of these patterns; `options` are its other arguments.
    """
    name, _, revision = model.partition("@")
    return huggingface_hub.snapshot_download(
        name, revision=revision or None, ignore_patterns=without, **options
    )


def bytes_to_download(model: str) -> int:
    """Size of a hub model's files that aren't here yet; 0 for a folder, or if the hub doesn't
    answer.
    """
    if not model or find_path(model).is_dir():
        return 0
    try:
        files = snapshot(model, list(OTHER_WEIGHTS), dry_run=True)
    except Exception:  # many types; `fetch_model` says what's wrong
        return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def from_hub(model: str, without: list[str]) -> Path:
    """The folder in the hub's cache with the files of MODEL, but `without` those of these patterns;
    downloads missing ones.
    """
    faults = []
    # A commit is looked up on the hub even if a cache of older versions of huggingface_hub has it.
    for only_local in (False, True):
        try:
            return Path(snapshot(model, without, local_files_only=only_local))
        except Exception as error:  # many types
            faults.append(first_line(error))
    fault = f"neither a folder nor to be had from the Hugging Face hub ({faults[0]})"
    raise UserError(
        f"MODEL={model}: {fault}; give a folder, or accept the license and set HF_TOKEN"
    )


def pinned(model: str, folder: Path) -> str:
    """MODEL with the commit taken from the hub, name@hash; a local folder is returned unchanged.

    `folder`, from `fetch_model`, is named after the commit in the hub's cache.
    """
    return model if find_path(model).is_dir() else f"{model.partition('@')[0]}@{folder.name}"


def refuse_unsupported(model: str, hf: transformers.PretrainedConfig) -> None:
    """Raises UserError if MaxText's layers differ from those of `hf`; `model` is MODEL."""
    supported = dict(
        attention_bias=(False,),
        mlp_bias=(False,),
        use_sliding_window=(False,),
        hidden_act=("silu",),
        rope_type=("default", "llama3") if hf.model_type == "llama" else ("default",),
    )
    for name, wanted in supported.items():
        # Qwen3 has no mlp_bias, a Llama no sliding window
        value = (
            hf.rope_parameters["rope_type"] if name == "rope_type" else getattr(hf, name, wanted[0])
        )
        if value not in wanted:
            known = " or ".join(map(str, wanted))
            raise UserError(f"MODEL={model}: {name}={value} is not supported; {known} is")


def check_length(c: RunConstants, hf: transformers.PretrainedConfig) -> None:
    """Raises UserError if prompt and answer take positions that the model was never trained on."""
    tokens, most = c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS, hf.max_position_embeddings
    if tokens > most:
        fault = (
            f"with TOTAL_GENERATION_STEPS={c.TOTAL_GENERATION_STEPS} that's {tokens:,} positions, "
            f"and MODEL={c.MODEL} knows {most:,} (max_position_embeddings in its config.json)"
        )
        raise UserError(f"MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH}: {fault}; lower one of the two")


def load_tokenizer(folder: Path):
    """The model's tokenizer with `eos_ids` and a padding token that isn't one of them.

    Padding is masked out of the loss. If an end-of-sequence token doubled as padding, the end of
    every answer would be masked, too, and the model would never learn to stop. `eos_ids` are the
    ids that end an answer: the tokenizer's own and those in generation_config.json (Llama 3.1 has
    three), where vLLM stops, too.
    """
    generation, fault = folder / "generation_config.json", ""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers share no type
        fault = f"no tokenizer that can be read ({first_line(error)})"
        raise UserError(f"MODEL={folder}: {fault}; fetch damaged files again") from None
    named = None
    if generation.is_file():
        kind = config_json.GenerationJson
        named = config_json.read_checked(generation, kind, str(folder)).eos_token_id
    ids = {tokenizer.eos_token_id, *([named] if isinstance(named, int) else named or [])}
    vocabulary = tokenizer.get_vocab()
    token, number = max(vocabulary.items(), key=lambda item: item[1])
    spare = [token for token in SPARE_TOKENS if token in vocabulary]
    needs_pad = tokenizer.pad_token_id in {None, *ids}
    if tokenizer.eos_token_id is None:
        fault = "its tokenizer has no eos_token; name it in tokenizer_config.json"
    elif needs_pad and not spare:
        fault = "its tokenizer has no pad token of its own; add one"
    elif tokenizer.chat_template is None:
        fault = "its tokenizer has no chat template; use an instruct model"
    elif number >= (
        rows := config_json.read_checked(
            folder / "config.json", config_json.ConfigJson, str(folder)
        ).vocab_size
    ):
        fault = (
            f"its tokenizer has number {number} for {token!r}, and its config.json only "
            f"vocab_size={rows} embeddings; resize the model's, "
            "or take the token out of the tokenizer"
        )
    if fault:
        raise UserError(f"MODEL={folder}: {fault}")
    if needs_pad:
        tokenizer.pad_token = spare[0]
    tokenizer.eos_ids = tuple(sorted(ids))
    return tokenizer


def check_teacher(c: RunConstants, tokenizer) -> None:
    """Refuses a TEACHER that can't be read, or whose tokens differ from MODEL's."""
    if not c.TEACHER:
        return
    try:
        theirs = load_tokenizer(fetch_model(c.TEACHER)[0])
    except UserError as error:
        raise UserError(str(error).replace("MODEL=", "TEACHER=", 1)) from None
    if theirs.get_vocab() != tokenizer.get_vocab():
        why = (
            f"its vocabulary of {len(theirs):,} tokens is not that of "
            f"MODEL={c.MODEL} ({len(tokenizer):,})"
        )
        remedy = "it judges token by token, so choose one of the same family"
        raise UserError(f"TEACHER={c.TEACHER}: {why}; {remedy}")


# %% MaxText's side --------------------------------------------------------------------------------
def to_maxtext_config(
    hf: transformers.PretrainedConfig,
    *,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype: str = "float32",
    weight_dtype: str = "float32",
    attention: str = "dot_product",
    scan_layers: bool = False,
    remat_policy: str = "none",
    **machine: Any,
):
    """The MaxText config for a model with the sizes in `config.json`.

    `rows` are the sequences in one forward pass, over all devices; `prompt_tokens` and
    `new_tokens`, P and T, the two parts of the KV cache. The others are constants of these names,
    and MaxText's own settings.
    """
    rope = hf.rope_parameters
    settings = dict(
        model_name=ARCHITECTURES[hf.model_type],
        override_model_config=True,
        base_num_decoder_layers=hf.num_hidden_layers,
        base_emb_dim=hf.hidden_size,
        base_mlp_dim=hf.intermediate_size,
        base_num_query_heads=hf.num_attention_heads,
        base_num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        vocab_size=hf.vocab_size,
        normalization_layer_epsilon=hf.rms_norm_eps,
        rope_max_timescale=int(rope["rope_theta"]),
        rope_use_scale=rope["rope_type"] == "llama3",
        # MaxText then computes the output layer in bfloat16
        logits_via_embedding=hf.tie_word_embeddings,
        # MaxText would divide tied logits by sqrt(emb_dim); Llama doesn't
        normalize_embedding_logits=False,
        per_device_batch_size=rows / jax.device_count(),
        max_prefill_predict_length=prompt_tokens,
        max_target_length=prompt_tokens + new_tokens,
        dtype=dtype,
        weight_dtype=weight_dtype,
        attention=attention,
        scan_layers=scan_layers,
        remat_policy=remat_policy,
        matmul_precision="highest" if dtype == "float32" else "default",
        # the KV cache's rows, split like the answers'; by default every device holds all of them
        logical_axis_rules=[["cache_batch", BATCH_AXES], ["cache_batch_prefill", BATCH_AXES]],
        ici_fsdp_parallelism=-1,  # all devices the other axes don't use
        hardware=jax.default_backend() if jax.default_backend() in ("cpu", "gpu") else "tpu",
        # Tunix and Orbax save, not MaxText
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
        convert_checkpoint_if_possible=False,
        log_config=False,
        run_name="grpo",
        base_output_directory="runs",
        jax_cache_dir="",  # process.enable_compilation_cache sets up the compilation cache
    )
    settings |= machine
    if settings["hardware"] == "cpu":
        settings |= faster_on_cpu.CACHE_LAYOUT
    try:
        config = pyconfig.initialize(
            ["", f"{maxtext_globals.MAXTEXT_CONFIGS_DIR}/base.yml"], **settings
        )
    except ValueError as error:  # lists everything MaxText accepts, for pages
        validation = isinstance(error, pydantic.ValidationError)
        reason = error.errors()[0]["msg"] if validation else str(error).splitlines()[-1].strip()
        raise UserError(
            f"DTYPE={dtype}, WEIGHT_DTYPE={weight_dtype}, ATTENTION={attention}: MaxText refuses "
            f"one of these ({reason}); see its base.yml"
        ) from None
    # MaxText parses "none" as None; its decoder checks for "none", so it would recompute every
    # layer.
    config.get_keys()["remat_policy"] = remat_policy
    return config


def to_run_config(
    c: RunConstants, hf: transformers.PretrainedConfig, rows: int = 0, **machine: Any
):
    """The MaxText config of a training run: B * G sequences (or `rows`) per pass, weights split
    over all devices; `machine` as in `to_maxtext_config`.
    """
    return to_maxtext_config(
        hf,
        rows=rows or c.BATCH_SIZE * c.NUM_GENERATIONS,
        prompt_tokens=c.MAX_PROMPT_LENGTH,
        new_tokens=c.TOTAL_GENERATION_STEPS,
        dtype=c.DTYPE,
        weight_dtype=c.WEIGHT_DTYPE,
        attention=c.ATTENTION,
        scan_layers=c.SCAN_LAYERS,
        remat_policy=c.REMAT_POLICY,
        **{"ici_tensor_parallelism": c.TRAINER_TENSOR_PARALLEL} | machine,
    )


@functools.cache  # equal arguments give the same function object, so compiled programs are shared
def rope_scaling(
    factor: float, low: float, high: float, original: int
) -> Callable[[jax.Array], jax.Array]:
    """Llama 3.1's scaling of the rotary frequencies, as a function of one frequency.

    Stretches wavelengths above `original / low` by `factor`, keeps those below `original / high`,
    and interpolates in between (github.com/meta-llama/llama-models, llama3/model.py).
    """

    def scale(frequency):
        smooth = (original * frequency / (2 * jnp.pi) - low) / (high - low)
        smooth = jnp.clip(smooth, 0.0, 1.0)  # 0: stretched by `factor`, 1: kept
        return ((1 - smooth) / factor + smooth) * frequency

    return scale


def use_rope_scaling(model: nnx.Module, hf: transformers.PretrainedConfig) -> None:
    """Gives a MaxText model the checkpoint's rope scaling.

    MaxText 0.2.5 hard-codes Llama 3.1's four numbers. Drop this when its config accepts them.
    """
    rope = hf.rope_parameters
    if rope["rope_type"] != "llama3":
        return
    names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    scale = rope_scaling(*(rope[name] for name in names))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, LLaMARotaryEmbedding):
            module._apply_scaling_factor = scale  # on the instance, so other models keep theirs


def weight_mapping(hf: transformers.PretrainedConfig, config, saving_to_hf: bool):
    """MaxText's own map of names and layouts from its model to Hugging Face's, for these sizes."""
    sizes = {"num_hidden_layers": hf.num_hidden_layers, "head_dim": hf.head_dim}
    names = param_mapping.PARAM_MAPPING[config.model_name](
        sizes, config, scan_layers=config.scan_layers
    )
    layout_hooks = param_mapping.HOOK_FNS[config.model_name](
        sizes, config, scan_layers=config.scan_layers, saving_to_hf=saving_to_hf
    )
    if hf.tie_word_embeddings:
        names.pop("params-decoder-logits_dense-kernel")
    # Qwen's map also covers Qwen2, whose attention has biases.
    names = {name: hf_name for name, hf_name in names.items() if not name.endswith("-bias")}
    if hf.model_type == "llama" and not saving_to_hf:
        # MaxText divides a Llama's query weights by sqrt(head_dim) in the checkpoint's own dtype.
        # In bfloat16 that rounds each of them by up to 0.4 % before any training.
        for name, chain in layout_hooks.items():
            if "query" in name:
                layout_hooks[name] = [lambda weight, shape: weight.astype(np.float32), *chain]
    return names, layout_hooks


def abstract_model(hf, config, devices=None) -> tuple[nnx.Module, jax.sharding.Mesh]:
    """The MaxText model for a checkpoint's sizes, as shapes without arrays, and its mesh over
    `devices`.
    """
    mesh = maxtext_utils.get_mesh_from_config(config, devices)
    with faster_on_cpu.modules_for(mesh):
        _, model = model_creation_utils.create_nnx_abstract_model(
            config, mesh, rng_key=jax.random.PRNGKey(0)
        )
    use_rope_scaling(model, hf)
    return model, mesh


def load_llama(folder: Path, hf: transformers.PretrainedConfig, config, pad_id: int, devices=None):
    """The MaxText model in Tunix's adapter with a checkpoint's weights, and its mesh, over
    `devices` or all.

    The adapter maps tokens [B, L], positions [B, L], None and a mask [B, L, L] to logits [B, L, V]
    and None.
    """
    # MaxText's own `from_pretrained` would compile a program for random weights that we'd
    # overwrite.
    model, mesh = abstract_model(hf, config, devices)
    names, layout_hooks = weight_mapping(hf, config, saving_to_hf=False)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    with mesh:
        checkpoint = {}  # by Hugging Face name, sharded over all devices
        for file in weight_files(folder):
            checkpoint |= load_dynamic.load_sharded_hf_state(str(file))
        if hf.tie_word_embeddings:
            checkpoint.pop("lm_head.weight", None)  # a duplicate of the embedding
        shapes = nnx.to_pure_dict(params)
        loaded = load_dynamic.transform_hf_state_to_mt_state(
            checkpoint, shapes, names, layout_hooks, config
        )

    def fit(wanted, loaded):
        return jax.device_put(loaded.astype(wanted.dtype), wanted.sharding)

    fitted = jax.tree.map(fit, shapes, loaded["params"])
    if not all_finite(fitted):
        bad = [
            jax.tree_util.keystr(path)
            for path, weight in jax.tree.leaves_with_path(fitted)
            if not all_finite(weight)
        ]
        fault = f"weight {bad[0]} has a NaN or an infinity"
        raise UserError(f"MODEL={folder}: {fault}; fetch the weights again")
    nnx.replace_by_pure_dict(params, fitted)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    # Jitted, because `device_put` can't place a key on the devices of several hosts.
    unused = jax.jit(lambda: jax.tree.map(unused_random_state, rest), out_shardings=everywhere)()
    adapter = TunixMaxTextAdapter(nnx.merge(graphdef, params, unused), pad_id=pad_id)
    adapter.config = None  # Tunix looks for it; MaxText's `from_pretrained` also sets None
    return adapter, mesh


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no number in a tree of arrays is NaN or infinite: bool []."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def unused_random_state(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """A key or a counter of that shape; a model without dropout never uses it."""
    is_key = jax.dtypes.issubdtype(abstract.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(
        jax.random.key(0) if is_key else jnp.zeros((), abstract.dtype), abstract.shape
    )


def named_weights(adapter) -> dict[str, np.ndarray]:
    """The weights of a model in Tunix's adapter, by the MaxText names in `weight_mapping`."""
    weights = nnx.to_flat_state(nnx.state(adapter.base, nnx.Param))
    return {
        "-".join(["params", *map(str, path)]): np.asarray(leaf.get_value())
        for path, leaf in weights
    }


def hf_shapes(hf: transformers.PretrainedConfig, config) -> dict[str, tuple[int, ...]]:
    """The shape of each weight by Hugging Face name, in the order of `hf_weights`."""
    names = weight_mapping(hf, config, True)[0]
    shapes = hf_shape.HF_SHAPE[config.model_name](hf.to_dict())
    return {
        str(name): tuple(shapes[name]) for value in names.values() for name in np.atleast_1d(value)
    }


def hf_weights(
    hf: transformers.PretrainedConfig, config, read: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """A MaxText model's weights under Hugging Face's names, in its layout and in the dtype of
    `config`.

    `read` returns the array for a MaxText name; it's called one name at a time.
    """
    names, layout_hooks = weight_mapping(hf, config, saving_to_hf=True)
    shapes = hf_shapes(hf, config)
    for name in names:
        yield from process_maxtext_param(name, read(name), names, layout_hooks, shapes, config)


def count_parameters(model: nnx.Module) -> int:
    """Number of parameters of a model."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def used_columns(model: nnx.Module, limit: int, longest: int) -> int:
    """How many columns of answers [N, limit] to compute: on one CPU a quarter, half, 7/8 or all of
    them.

    Each width compiles a separate program. On other devices that takes minutes, so they always use
    `limit`. `longest` is the length of the longest answer in tokens.
    """
    if not faster_on_cpu.shares_prompts(model):
        return limit
    return next(
        width for width in (limit // 4, limit // 2, 7 * limit // 8, limit) if longest <= width
    )
