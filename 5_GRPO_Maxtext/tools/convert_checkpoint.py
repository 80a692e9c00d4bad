"""Converts a Llama: Hugging Face to MaxText's scanned layout, and what was trained, or GGUF, to Hugging Face.

The direction follows from what SOURCE is. A Hugging Face name or folder becomes an Orbax checkpoint that
MaxText's own programs load (`load_parameters_path=TARGET/0/items`). An Orbax checkpoint, MaxText's or the one
in a RUN_DIR of the main script, becomes a folder that transformers and vLLM load. A GGUF file, llama.cpp's
format, becomes such a folder, too, for MODEL of the main script. That script itself needs none of this for
Hugging Face's files: it reads them as they are.

    hf[q, k, v, o, gate, up, down]  [out, in], one tensor per layer
        <->  MaxText  [in, layer, ...], all layers in one array (SCAN_LAYERS=True);
             q and k: rotary pairs interleaved; q: divided by sqrt(head_dim), which Llama does while attending

    C="python 5_GRPO_Maxtext/tool.py convert_checkpoint"
    $C SOURCE=tiny_llama TARGET=runs/tiny_maxtext
    $C SOURCE=runs/tiny_maxtext MODEL=tiny_llama TARGET=runs/tiny_hf
    $C SOURCE=runs/mine TARGET=runs/mine_hf        # RUN_DIR=runs/mine
    $C SOURCE=SmolLM2-135M-Instruct.Q4_1.gguf TARGET=runs/smollm2

A run with LORA_RANK above 0 saved A and B alone: they are merged into the weights of its MODEL on the way.
With a run's weights comes a model card, README.md: data, constants, figures, how to use it.

One array is in memory at a time, filled or emptied layer by layer; docs/checkpoints.md has figures.

MaxText's own name map, layout hooks and lazy arrays are used. Its two converters (0.2.5) know only the sizes
of its model table, round the query weights to bfloat16, and save their lazy arrays through a part of Orbax
that does not take them.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import settings
from settings import UserError

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # host memory, also on a TPU VM: nothing is computed here


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    SOURCE: str = ""  # Hugging Face name or folder; .gguf file; Orbax checkpoint: a RUN_DIR, or MaxText's
    TARGET: str = ""  # the folder to make; it must not exist yet
    MODEL: str = ""  # for an Orbax SOURCE: where config.json and tokenizer come from (empty = the run's)
    WEIGHT_DTYPE: Literal["", "float32", "bfloat16", "float16"] = ""  # (empty = MODEL's; for MaxText float32)
    SCAN_LAYERS: bool = True  # layout of the MaxText checkpoint to write; one that is read shows its own


def refuse(c: Constants) -> None:
    """Checks what can be checked without looking into SOURCE; raises UserError."""
    for name in ("SOURCE", "TARGET"):
        if not getattr(c, name):
            raise UserError(f"{name} is empty; give it on the command line: {name}=folder")
    if Path(c.TARGET).exists():
        raise UserError(f"TARGET={c.TARGET}: exists already; choose another name, or remove it")


# %% Imports ------------------------------------------------------------------------------------------------
if __name__ == "__main__":  # a constant that is wrong is refused here, before seconds of imports
    settings.refuse_early(Constants, refuse)

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
from etils import epath
from maxtext.checkpoint_conversion import to_maxtext as maxtext_converter
from maxtext.checkpoint_conversion.utils.utils import apply_hook_fns, param_key_parts_from_path

from model import llama, lora
from model.versions import check_versions
from run import checkpoints, run_files
from run.memory import refuse_full_disk
from tools import model_card

ITEM = "items"  # MaxText's name of the weights in a checkpoint
SHARD = "2GB"  # of one *.safetensors file; twice that is in memory while it is written
CHUNK = 2**28  # bytes per stored piece of a MaxText array; a chip reads only those it needs
MAX_DEPTH = 5  # folders; MaxText's output is base/run/checkpoints/0/items


# %% Finding things -----------------------------------------------------------------------------------------
def find_checkpoints(source: Path) -> tuple[dict[int, Any], Path | None]:
    """The weights in `source`, and the run that they are of.

    Args:
        source: a run, one of its checkpoints, a MaxText output folder, or one step of that.

    Returns:
        By step the folders with Orbax's `_METADATA` (`<step>/weights` or `<step>/items`); and the run's
        folder, None if there is none.

    Raises:
        UserError: the run's constants.json is damaged.
    """
    run = next((f for f in (source, *source.parents) if (f / "constants.json").is_file()), None)
    if run == source:  # its checkpoints may be elsewhere
        root = checkpoints.root_of(run_files.read_constants(run, "SOURCE").get("CHECKPOINT_DIR", ""), run)
        return {step: epath.Path(root) / str(step) / "weights" for step in checkpoints.saved(root)}, run
    place = epath.Path(source.resolve())  # Orbax wants whole paths
    folders = [place] if (place / "_METADATA").exists() else []
    for name in ("weights", ITEM):
        for depth in range(MAX_DEPTH):  # no "**": a bucket would be listed whole
            folders += place.glob("*/" * depth + name)
    steps = [int(path.parent.name) if path.parent.name.isdigit() else -1 for path in folders]
    return dict(zip(steps, folders, strict=True)), run


class Model(NamedTuple):
    """A Hugging Face model, and the MaxText config of the same sizes, with the dtype and layout to write."""

    folder: Path
    hf: Any
    config: Any


def load_model(constant: str, name: str, dtype: str, scan_layers: bool) -> Model:
    """Finds a Hugging Face model.

    Args:
        constant: that gives `name`, for messages.
        name: on the hub, or a folder.
        dtype: of the weights to write (empty = the model's own).
        scan_layers: layout of the MaxText side.
    """
    try:
        folder, hf = llama.load_hf_config(name)
    except UserError as error:
        raise UserError(str(error).replace("MODEL=", f"{constant}=", 1)) from None
    return Model(folder, hf, to_config(hf, dtype or str(hf.dtype).removeprefix("torch."), scan_layers))


def to_config(hf, dtype: str, scan_layers: bool = False):
    """The MaxText config of a model that is not run here: its rows and lengths do not matter."""
    sizes = dict(rows=1, prompt_tokens=1, new_tokens=1)
    return llama.to_maxtext_config(hf, **sizes, weight_dtype=dtype, scan_layers=scan_layers)


# %% Hugging Face -> MaxText --------------------------------------------------------------------------------
class OneAtATime(ocp.type_handlers.NumpyHandler):
    """Orbax's writer of arrays, for MaxText's lazy ones: each is made, written and freed before the next.

    Orbax by itself starts all of them at once, and would hold the whole model. Drop this and `lazy_registry`
    when MaxText's own handler, which its import registers for all of Orbax, takes the list that Orbax passes.
    """

    async def serialize(self, values, infos, args=None):
        for value, info, arg in zip(values, infos, args or itertools.repeat(ocp.SaveArgs())):
            for future in await super().serialize([np.asarray(value)], [info], [arg]):
                await asyncio.to_thread(future.result)
        return []


def lazy_registry() -> ocp.handlers.CheckpointHandlerRegistry:
    """Orbax's handlers for a save through `OneAtATime`; nothing is registered beyond that save."""
    writer = OneAtATime(deepcopy_host_arrays=False)
    types = ocp.type_handlers.create_type_handler_registry((maxtext_converter.LazyTensor, writer))
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(ITEM, ocp.args.PyTreeSave, ocp.PyTreeCheckpointHandler(type_handler_registry=types))
    return handlers


def leaf_builder(c: Constants, model: Model, dtype) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """A function that gives the array of a MaxText name and shape, in `dtype`, of the model's own tensors.

    Raises:
        UserError: a weight that is missing.
    """
    names, layout_hooks = llama.weight_mapping(model.hf, model.config, saving_to_hf=False)
    files = {}  # file of each tensor
    for path in sorted(model.folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="np") as file:
            files.update(dict.fromkeys(file.keys(), path))
    for hf_names in names.values():
        missing = [hf_name for hf_name in np.atleast_1d(hf_names) if hf_name not in files]
        if missing:
            raise UserError(f"SOURCE={c.SOURCE}: {model.folder} lacks weight {missing[0]}; fetch its file")

    def build(name: str, shape: tuple[int, ...]) -> np.ndarray:
        leaf = np.empty(shape, dtype)
        stacked = isinstance(names[name], list)  # the layers of a scanned model
        layers = np.moveaxis(leaf, model.config.param_scan_axis, 0) if stacked else [leaf]
        for hf_name, layer in zip(np.atleast_1d(names[name]), layers, strict=True):
            with safetensors.safe_open(files[hf_name], framework="np") as file:
                layer[...] = apply_hook_fns(file.get_tensor(hf_name), layer.shape, layout_hooks.get(name))
        return leaf

    return build


def to_maxtext(c: Constants, model: Model, target: Path) -> int:
    """Writes `target`/0/items: {"params": {"params": weights}}, as MaxText saves parameters.

    Returns:
        The number of parameters.

    Raises:
        UserError: a weight that is missing, or a disk that is too small.
    """
    dtype = dtype_of(model.config)
    places, tree = maxtext_converter.get_maxtext_model_info(model.config)  # {name: (index in tree, shape)}
    check_disk(c, sum(math.prod(shape) for _, shape in places.values()) * dtype.itemsize)
    build = leaf_builder(c, model, dtype)
    leaves = [None] * len(places)
    for name, (index, shape) in places.items():
        load = functools.partial(build, name, shape)
        leaves[index] = maxtext_converter.LazyTensor(load, shape, dtype, name)
    weights = jax.tree.unflatten(tree, leaves)
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), weights)
    save = ocp.args.PyTreeSave({"params": weights}, {"params": chunks})
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(
        target.resolve(), options=options, handler_registry=lazy_registry()
    ) as manager:
        scanned = {"scan_layers": model.config.scan_layers}  # MaxText checks it when it loads
        manager.save(0, args=ocp.args.Composite(**{ITEM: save}), custom_metadata=scanned)
    return sum(int(leaf.size) for leaf in leaves)


def check_disk(c: Constants, needed: int) -> None:
    """Refuses to start if the disk under TARGET has fewer than `needed` bytes free."""
    remedy = "free some space, choose another disk, or write WEIGHT_DTYPE=bfloat16"
    refuse_full_disk(Path(c.TARGET), needed, f"TARGET={c.TARGET}", remedy)


def dtype_of(config) -> np.dtype:
    """NumPy's type of the weights that are written."""
    return jnp.dtype(config.weight_dtype)


# %% MaxText -> Hugging Face --------------------------------------------------------------------------------
@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Says in one line that a checkpoint cannot be read; raises UserError then."""
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:  # Orbax's, tensorstore's, json's, the network's: none has a type of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][: checkpoints.MAX_REASON]
        raise UserError(
            f"SOURCE: {checkpoint} cannot be read ({reason}); try again, or name another checkpoint"
        ) from None


def stored_leaves(checkpoint: Path) -> dict[str, tuple]:
    """MaxText's names of the arrays in a checkpoint, each with its path and metadata.

    The main script's checkpoints hold Tunix's adapter ("base"), MaxText's a tree "params" in a tree "params",
    and possibly the optimizer's.

    Raises:
        UserError: it cannot be read.
    """
    with reading(checkpoint):
        metadata = ocp.PyTreeCheckpointer().metadata(checkpoint).item_metadata.tree
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metadata, is_leaf=lambda x: hasattr(x, "shape")):
        parts = param_key_parts_from_path(path)
        while parts[0] in ("base", "params"):
            parts.pop(0)
        leaves["-".join(["params", *parts])] = (path, leaf)
    return leaves


def restore_leaf(checkpoint: Path, path: tuple) -> np.ndarray:
    """One array of a checkpoint, in the shape and dtype in which it was saved; raises UserError."""
    wanted, arguments = 0, ocp.ArrayRestoreArgs(restore_type=np.ndarray)
    for entry in reversed(path):
        wanted, arguments = {entry.key: wanted}, {entry.key: arguments}
    with reading(checkpoint):
        restored = ocp.PyTreeCheckpointer().restore(
            checkpoint,
            args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True),
        )
    return jax.tree.leaves(restored)[0]


def weights_reader(c: Constants, checkpoint: Path, leaves: dict[str, tuple], model: Model, scale: float):
    """A function that gives the array of a MaxText name out of a checkpoint.

    Of a checkpoint that holds LoRA's A and B alone: W + scale A B, with W out of MODEL's own files.

    Args:
        checkpoint: from `find_checkpoints`.
        leaves: from `stored_leaves`.
        model: that the weights stem from.
        scale: alpha / r, for LoRA.

    Raises:
        UserError: the checkpoint is of another model, or a weight is missing.
    """
    places, _ = maxtext_converter.get_maxtext_model_info(model.config)
    shapes = {name: shape for name, (_, shape) in places.items()}
    adapted = {name.removesuffix("_lora_a") for name in leaves if name.endswith("_lora_a")}
    for name in adapted or shapes:
        shape = shapes.get(name, ())
        parts = [f"{name}_lora_a", f"{name}_lora_b"] if adapted else [name]
        found = [tuple(leaves[part][1].shape) if part in leaves else () for part in parts]
        # A [in, (layer,) r], B [r, (layer,) out]
        fits = math.prod(found[0][:-1]) * found[1][-1] == math.prod(shape) if adapted else found == [shape]
        if not fits:
            raise UserError(
                f"MODEL={model.folder}: its weight {name} is {shape}, SOURCE={c.SOURCE} holds "
                f"{' and '.join(map(str, found))}; give the MODEL that was trained"
            )
    if not adapted:
        return lambda name: restore_leaf(checkpoint, leaves[name][0])
    build = leaf_builder(c, model, np.float32)  # one rounding, at the very end

    def read(name: str) -> np.ndarray:
        leaf = build(name, shapes[name])
        if name in adapted:
            a, b = (restore_leaf(checkpoint, leaves[f"{name}_lora_{letter}"][0]) for letter in "ab")
            leaf = leaf + lora.product(a.astype(np.float32), b.astype(np.float32), shapes[name], scale)
        return leaf

    return read


def to_huggingface(c: Constants, read: Callable[[str], np.ndarray], model: Model, target: Path) -> int:
    """Writes a Hugging Face folder: weights, config, tokenizer.

    Args:
        read: from `weights_reader`.
        model: that the weights stem from.

    Returns:
        The number of parameters.

    Raises:
        UserError: a disk that is too small.
    """
    dtype = dtype_of(model.config)
    weights = llama.hf_weights(model.hf, model.config, read)
    count = write_weights(c, weights, llama.hf_shapes(model.hf, model.config), dtype, target)
    for path in model.folder.iterdir():  # tokenizer, chat template, generation config, licence: as they are
        kept = path.suffix in (".json", ".jinja", ".model") or path.name.startswith("LICENSE")
        if kept and "safetensors" not in path.name:
            shutil.copyfile(path, target / path.name)
    written = json.loads((model.folder / "config.json").read_text())
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = str(dtype)
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return count


def write_weights(
    c: Constants, tensors: Iterator[tuple[str, np.ndarray]], shapes: dict[str, tuple], dtype, target: Path
) -> int:
    """Writes the *.safetensors of a Hugging Face model into `target`, and their index if there are several.

    `tensors`, names and weights in the order of `shapes`, is asked for one at a time.

    Returns:
        The number of parameters.

    Raises:
        UserError: a disk that is too small.
    """
    bytes_of = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    check_disk(c, sum(bytes_of.values()))
    plan = huggingface_hub.split_state_dict_into_shards_factory(
        bytes_of, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    for file, names in plan.filename_to_tensors.items():  # a file needs the next few tensors
        # safetensors asks for contiguous arrays; the layout hooks end in transposed views
        shard = {name: np.ascontiguousarray(x) for name, x in itertools.islice(tensors, len(names))}
        safetensors.numpy.save_file(shard, target / file, metadata={"format": "pt"})
    if len(plan.filename_to_tensors) > 1:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return sum(bytes_of.values()) // dtype.itemsize


# %% GGUF -> Hugging Face -----------------------------------------------------------------------------------
def from_gguf(c: Constants, path: Path, target: Path) -> tuple[int, Any]:
    """Writes a Hugging Face folder with the weights, config and tokenizer of a GGUF file.

    Returns:
        The number of parameters and the MaxText config.

    Raises:
        UserError: a file that is not whole or not supported, or a disk that is too small.
    """
    from tools import gguf_model  # here: the package gguf is not among the TPU's

    model = gguf_model.GGUFLlama(path)
    shapes = {hf_name: model.shape(name) for hf_name, name in model.names().items()}
    config = to_config(model.config, c.WEIGHT_DTYPE or "float32")
    expected = llama.hf_shapes(model.config, config)
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise UserError(
                f"SOURCE={path}: {name} is {shape}, its header says {expected[name]}; fetch another"
            )
    dtype = dtype_of(config)
    count = write_weights(c, ((k, x.astype(dtype)) for k, x in model.tensors()), shapes, dtype, target)
    model.config.dtype = str(dtype)
    model.config.save_pretrained(target)
    model.tokenizer.save_pretrained(target)
    return count, config


# %% Main ---------------------------------------------------------------------------------------------------
def export(c: Constants, checkpoint, run: Path | None, target: Path) -> tuple[int, Any]:
    """Orbax -> Hugging Face: writes `target`; returns the number of parameters and the MaxText config.

    Raises:
        UserError: MODEL, or the rank of LoRA, is not known.
    """
    leaves = stored_leaves(checkpoint)
    scanned = any(name.startswith("params-decoder-layers-") for name in leaves)
    adapted = any(name.endswith("_lora_a") for name in leaves)
    run_constants = run_files.read_constants(run, "SOURCE") if run else {}
    if not run and (adapted or not c.MODEL):
        raise UserError(
            f"MODEL={c.MODEL}: SOURCE={c.SOURCE} is not in a run, whose constants.json would name MODEL and "
            f"LORA_ALPHA; give {'the folder of the run' if adapted else 'MODEL'}"
        )
    name = c.MODEL or run_constants["MODEL"]
    model = load_model("MODEL", name, c.WEIGHT_DTYPE, scanned)
    layout = "scanned" if scanned else "one array per layer"
    scale = 0.0
    if adapted:
        scale = run_constants["LORA_ALPHA"] / run_constants["LORA_RANK"]
        layout += f", LoRA of rank {run_constants['LORA_RANK']} merged into {model.folder}"
    print(f"{checkpoint} ({layout}) -> Hugging Face")
    count = to_huggingface(c, weights_reader(c, checkpoint, leaves, model, scale), model, target)
    if run:
        card = model_card.model_card(run, int(checkpoint.parent.name), name, model.folder)
        (target / "README.md").write_text(card, encoding="utf-8")
    return count, model.config


@contextlib.contextmanager
def made_whole(c: Constants) -> Iterator[Path]:
    """Another folder, which becomes TARGET at the end of the block; if that fails, nothing is left.

    Raises:
        UserError: it cannot be made.
    """
    partial = Path(c.TARGET + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"TARGET={c.TARGET}: {error.strerror}; choose another folder") from None
    try:
        yield partial
        partial.rename(c.TARGET)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: Sequence[str]) -> None:
    """Converts; see the module's docstring."""
    started = time.perf_counter()
    c = settings.read(Constants, arguments)
    refuse(c)
    settings.quiet()
    check_versions()
    source = settings.find_path(c.SOURCE)
    found, run = find_checkpoints(source)
    with made_whole(c) as target:
        if source.suffix == ".gguf":
            print(f"{source} -> Hugging Face")
            count, config = from_gguf(c, source, target)
            use = f"MODEL={c.TARGET}"
        elif found:
            count, config = export(c, found[max(found)], run, target)
            use = f"transformers.AutoModelForCausalLM.from_pretrained({c.TARGET!r})"
        else:
            model = load_model("SOURCE", c.SOURCE, c.WEIGHT_DTYPE or "float32", c.SCAN_LAYERS)
            config = model.config
            print(f"{model.folder} -> MaxText ({'scanned' if c.SCAN_LAYERS else 'one array per layer'})")
            count = to_maxtext(c, model, target)
            path = Path(c.TARGET).resolve() / "0" / ITEM
            use = f"MaxText: load_parameters_path={path} scan_layers={c.SCAN_LAYERS}"
    size = sum(path.stat().st_size for path in Path(c.TARGET).rglob("*") if path.is_file())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    print(
        f"{c.TARGET}: {count:,} parameters, {config.weight_dtype}, {size / 2**30:.3f} GiB on disk, "
        f"{time.perf_counter() - started:.1f} s, at most {peak:.2f} GiB of memory\nuse it: {use}"
    )


if __name__ == "__main__":
    settings.run(main)
