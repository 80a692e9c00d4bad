"""Converts a Llama: Hugging Face to MaxText's scanned layout; a run or a GGUF to Hugging Face.

What SOURCE is decides the direction. A Hugging Face name or folder becomes an Orbax checkpoint that
MaxText's own programs load (`load_parameters_path=TARGET/0/items`). An Orbax checkpoint, MaxText's
or a run's, becomes a folder that transformers and vLLM load, and so does a GGUF file, llama.cpp's
format.

    hf[q, k, v, o, gate, up, down]  [out, in], one tensor per layer
        <->  MaxText  [in, layer, ...], all layers in one array (SCAN_LAYERS=True);
             q and k: rotary pairs interleaved;
             q: divided by sqrt(head_dim), which Llama does while attending

    C="python 5_GRPO_Maxtext/tool.py convert_checkpoint"
    $C SOURCE=tiny_llama TARGET=runs/tiny_maxtext
    $C SOURCE=runs/tiny_maxtext MODEL=tiny_llama TARGET=runs/tiny_hf
    $C SOURCE=runs/mine TARGET=runs/mine_hf   # a RUN_DIR, its last step; runs/mine/50: step 50
    $C SOURCE=SmolLM2-135M-Instruct.Q4_1.gguf TARGET=runs/smollm2

LoRA's A and B are merged into the weights of the run's MODEL. A run's weights come with a model
card.

The weights are read as the main script reads them, with MaxText's own name map and layout hooks.
MaxText's two converters (0.2.5) know only the sizes of its model table, and round query weights to
bfloat16.
"""

import collections
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import settings
from settings import UserError

# use host memory even on a TPU VM; we compute nothing here
os.environ.setdefault("JAX_PLATFORMS", "cpu")


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # Hugging Face name or folder; .gguf file; Orbax checkpoint: a RUN_DIR, or MaxText's
    SOURCE: str = ""
    TARGET: str = ""  # the folder to make; it must not exist yet
    # for an Orbax SOURCE: where config.json and tokenizer come from (empty = the run's)
    MODEL: str = ""
    # (empty = MODEL's; for MaxText float32)
    WEIGHT_DTYPE: Literal["", "float32", "bfloat16", "float16"] = ""
    # layout of the MaxText checkpoint to write; one that is read shows its own
    SCAN_LAYERS: bool = True


def refuse(c: Constants) -> None:
    """Checks everything it can without reading SOURCE; raises UserError."""
    for name in ("SOURCE", "TARGET"):
        if not getattr(c, name):
            raise UserError(f"{name} is empty; give it on the command line: {name}=folder")
    if Path(c.TARGET).resolve().exists():
        raise UserError(f"TARGET={c.TARGET}: exists already; choose another name, or remove it")


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses a wrong constant now, before seconds of imports
    settings.refuse_early(Constants, refuse)

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
from etils import epath
from maxtext.checkpoint_conversion.to_maxtext import get_maxtext_model_info
from maxtext.checkpoint_conversion.utils.utils import detect_and_extract_checkpoint

from model import config_json, llama, lora, versions
from run import checkpoints, run_files, trained_model
from run.memory import refuse_full_disk
from tools import model_card

SHARD = "2GB"  # of one *.safetensors file
CHUNK = 2**28  # bytes per chunk of a MaxText array; a chip only reads the ones it needs


def to_config(hf, dtype: str, scan_layers: bool = False):
    """The MaxText config of a model; we don't run it, so rows and lengths don't matter."""
    sizes = dict(rows=1, prompt_tokens=1, new_tokens=1)
    return llama.to_maxtext_config(hf, **sizes, weight_dtype=dtype, scan_layers=scan_layers)


def dtype_of(folder: Path, hf) -> str:
    """The dtype that config.json names, or else that of most of the weights, as in transformers."""
    named = str(hf.dtype).removeprefix("torch.")
    stored = config_json.stored_weights(llama.weight_files(folder)).values()
    [(most, _)] = collections.Counter(dtype for _, dtype in stored).most_common(1)
    found = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    dtype = named if named in found.values() else found.get(most)
    if dtype is None:
        raise UserError(f"WEIGHT_DTYPE=: MODEL's weights are {most}; give WEIGHT_DTYPE=float32")
    return dtype


def check_disk(c: Constants, hf, config) -> dict[str, int]:
    """Bytes of each weight by Hugging Face name; raises UserError if the disk under TARGET is too
    small.
    """
    itemsize = jnp.dtype(config.weight_dtype).itemsize
    sizes = {
        name: math.prod(shape) * itemsize for name, shape in llama.hf_shapes(hf, config).items()
    }
    remedy = "free some space, choose another disk, or write WEIGHT_DTYPE=bfloat16"
    refuse_full_disk(Path(c.TARGET), sum(sizes.values()), f"TARGET={c.TARGET}", remedy)
    return sizes


def from_orbax(checkpoint: Path, run_id: str = "") -> dict[str, np.ndarray]:
    """A checkpoint's weights by MaxText name, without an optimizer's state.

    UserError if it can't be read, or isn't what the run `run_id` saved ("": any, or MaxText).
    """
    try:
        with ocp.PyTreeCheckpointer() as orbax:
            tree = orbax.metadata(checkpoint).item_metadata.tree
            tree = {name: tree[name] for name in ("params", "base") if name in tree} or tree
            as_numpy = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), tree)
            args = ocp.args.PyTreeRestore(item=tree, restore_args=as_numpy, partial_restore=True)
            read, fault = orbax.restore(checkpoint, args=args), ""
        if (beside := checkpoint.parent / "loop").exists():  # a run's
            with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as orbax:
                loop = orbax.restore(beside)
            step = int(checkpoint.parent.name)
            fault = checkpoints.find_fault({"weights": read}, loop, step, run_id)
            fault = fault and f"is damaged ({fault})"
    except Exception as error:  # of Orbax, tensorstore, json, the network: they share no type
        fault = f"cannot be read ({versions.first_line(error)})"
    if fault:
        raise UserError(f"SOURCE: {checkpoint} {fault}; try again, or name another checkpoint")
    return detect_and_extract_checkpoint(read)


def write_safetensors(c: Constants, hf, config, weights: Iterator, target: Path) -> None:
    """Writes a Hugging Face model's *.safetensors, and their index if there are several.

    `weights` yields names and arrays in the order of `llama.hf_shapes`.
    """
    plan = huggingface_hub.split_state_dict_into_shards_factory(
        check_disk(c, hf, config),
        get_storage_size=int,
        max_shard_size=SHARD,
        filename_pattern="model{suffix}.safetensors",
    )
    dtype = jnp.dtype(config.weight_dtype)
    for file, names in plan.filename_to_tensors.items():  # a file needs the next few tensors
        # safetensors asks for contiguous arrays; the layout hooks end in transposed views
        shard = {
            name: np.ascontiguousarray(x, dtype)
            for name, x in itertools.islice(weights, len(names))
        }
        for name, x in shard.items():
            if not np.isfinite(x).all():
                fault = f"weight {name} has a NaN, an infinity or a number too large for {dtype}"
                raise UserError(f"SOURCE={c.SOURCE}: {fault}; take another SOURCE or WEIGHT_DTYPE")
        safetensors.numpy.save_file(shard, target / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        (target / "model.safetensors.index.json").write_text(text, encoding="utf-8")


# %% Three conversions; each returns how its result is used ----------------------------------------
def to_maxtext(c: Constants, target: Path) -> str:
    """Hugging Face -> `target`/0/items: {"params": {"params": weights}}, as MaxText saves
    parameters.
    """
    try:
        folder, hf = llama.fetch_model(c.SOURCE)
        config = to_config(hf, c.WEIGHT_DTYPE or "float32", c.SCAN_LAYERS)
        check_disk(c, hf, config)
        weights = llama.named_weights(llama.load_llama(folder, hf, config, pad_id=0)[0])
    except UserError as error:
        raise UserError(str(error).replace("MODEL=", "SOURCE=", 1)) from None
    places, tree = get_maxtext_model_info(config)
    params = jax.tree.unflatten(tree, [weights[name] for name in places])
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), params)
    args = ocp.args.Composite(items=ocp.args.PyTreeSave({"params": params}, {"params": chunks}))
    # no second model
    as_it_is = np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    types = ocp.type_handlers.create_type_handler_registry(as_it_is)
    handler = ocp.CompositeCheckpointHandler(
        items=ocp.PyTreeCheckpointHandler(type_handler_registry=types)
    )
    with ocp.Checkpointer(handler) as orbax:  # MaxText checks scan_layers
        orbax.save(target / "0", args=args, custom_metadata={"scan_layers": c.SCAN_LAYERS})
    path = Path(c.TARGET).resolve() / "0" / "items"
    return f"MaxText: load_parameters_path={path} scan_layers={c.SCAN_LAYERS}"


def gguf_to_huggingface(c: Constants, source: Path, target: Path) -> str:
    """GGUF -> a Hugging Face folder: weights, config and tokenizer."""
    from tools import gguf_model  # here: the package gguf isn't among the TPU's

    model = gguf_model.GGUFLlama(source)
    model.config.dtype = dtype = c.WEIGHT_DTYPE or "float32"
    config = to_config(model.config, dtype)
    weights = model.weights(llama.hf_shapes(model.config, config))
    write_safetensors(c, model.config, config, weights, target)
    model.config.save_pretrained(target)
    model.tokenizer.save_pretrained(target)
    return f"MODEL={c.TARGET}"


def to_huggingface(
    c: Constants, saved: Path, checkpoint: run_files.Checkpoint | None, target: Path
) -> str:
    """Orbax -> a Hugging Face folder: weights, config, tokenizer; with a model card if it's a
    run's.
    """
    if checkpoint:
        trained_model.warn_if_model_changed(c.MODEL or checkpoint.constants["MODEL"], checkpoint)
    stored = from_orbax(saved, *([checkpoint.run_json.get("run_id", "")] if checkpoint else []))
    scanned = any(name.startswith("params-decoder-layers-") for name in stored)
    adapted = [name.removesuffix("_lora_a") for name in stored if name.endswith("_lora_a")]
    if not checkpoint and (adapted or not c.MODEL):
        raise UserError(
            f"MODEL={c.MODEL}: SOURCE={c.SOURCE} is not in a run, whose constants.json would name "
            f"MODEL and LORA_ALPHA; give {'the folder of the run' if adapted else 'MODEL'}"
        )
    model = c.MODEL or checkpoint.constants["MODEL"]
    folder, hf = llama.fetch_model(model)
    config = to_config(hf, c.WEIGHT_DTYPE or dtype_of(folder, hf), scanned)
    shapes = {name: shape for name, (_, shape) in get_maxtext_model_info(config)[0].items()}
    for name in adapted or shapes:
        shape = shapes.get(name, ())
        parts = [f"{name}_lora_a", f"{name}_lora_b"] if adapted else [name]
        held = [np.shape(stored.get(part, 0)) for part in parts]
        # A [in, (layer,) r], B [r, (layer,) out]
        if not (
            math.prod(held[0][:-1]) * held[1][-1] == math.prod(shape)
            if adapted
            else held == [shape]
        ):
            raise UserError(
                f"MODEL={folder}: its weight {name} is {shape}, SOURCE={c.SOURCE} holds "
                f"{' and '.join(map(str, held))}; give the MODEL that was trained"
            )
    weights = stored
    if adapted:  # in float32: one rounding, at the very end
        base, _ = llama.load_llama(folder, hf, to_config(hf, "float32", scanned), pad_id=0)
        weights = llama.named_weights(base)
        scale = checkpoint.constants["LORA_ALPHA"] / checkpoint.constants["LORA_RANK"]
        for name in adapted:
            a, b = (stored[f"{name}_lora_{letter}"].astype(np.float32) for letter in "ab")
            weights[name] = weights[name] + np.asarray(
                lora.product(a, b, weights[name].shape, scale)
            )
    # In the type they have; `write_safetensors` converts them with NumPy, because XLA converts
    # nothing to float16 on a processor without F16C.
    as_stored = to_config(hf, str(next(iter(weights.values())).dtype), scanned)
    write_safetensors(c, hf, config, llama.hf_weights(hf, as_stored, weights.pop), target)
    for path in llama.side_files(folder):  # as they are
        place = target / path.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)
    written = json.loads((folder / "config.json").read_bytes())
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = str(
        jnp.dtype(config.weight_dtype)
    )
    text = json.dumps(written, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    if checkpoint:
        model_card.model_card(checkpoint, model, folder).save(target / "README.md")
    return f"transformers.AutoModelForCausalLM.from_pretrained({c.TARGET!r})"


# %% Main ------------------------------------------------------------------------------------------
def find_weights(source: Path) -> tuple[Path | None, run_files.Checkpoint | None]:
    """The newest Orbax weights under `source`, if any, and the run's checkpoint they belong to."""
    if checkpoint := run_files.checkpoint_at(source, "SOURCE"):
        root, step = trained_model.root_and_step(checkpoint, "SOURCE")
        return epath.Path(root) / str(step) / "weights", checkpoint._replace(step=step)
    source = source.resolve()  # Orbax wants whole paths
    names = "weights", "items", source.name  # the main script's name, MaxText's, or that of a copy
    folders = [file.parent for file in source.rglob("_METADATA") if file.parent.name in names]
    steps = [
        int(path.parent.name) if run_files.is_step(path.parent.name) else -1 for path in folders
    ]
    return max(zip(steps, folders), default=(-1, None))[1], None


def main(arguments: Sequence[str]) -> None:
    """Converts; see the module's docstring. TARGET is written under another name, and whole or not
    at all.
    """
    c = settings.read(Constants, arguments)
    refuse(c)
    versions.prepare_libraries()
    source = settings.find_path(c.SOURCE)
    saved, checkpoint = find_weights(source)
    gguf = source.suffix == ".gguf"
    print(f"{saved or source} -> {'Hugging Face' if saved or gguf else 'MaxText'}")
    target = Path(c.TARGET).resolve()  # without a slash at the end
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"TARGET={c.TARGET}: {error.strerror}; choose another folder") from None
    try:
        if gguf:
            use = gguf_to_huggingface(c, source, partial)
        elif saved:
            use = to_huggingface(c, saved, checkpoint, partial)
        else:
            use = to_maxtext(c, partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"use it: {use}")


if __name__ == "__main__":
    settings.run(main)
