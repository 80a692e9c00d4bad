"""Converts a Llama: Hugging Face -> MaxText's scanned layout (Orbax), and what was trained -> Hugging Face.

The direction follows from what SOURCE is: a Hugging Face name or folder becomes an Orbax checkpoint that
MaxText's own programs load (`load_parameters_path=TARGET/0/items`); an Orbax checkpoint, MaxText's or one
that the main script left in its RUN_DIR, becomes a folder that transformers and vLLM load. The main script
itself needs neither: it reads Hugging Face's files as they are.

    hf[q, k, v, o, gate, up, down]  [out, in], one tensor a layer
        <->  MaxText  [in, layer, ...], all layers in one array (SCAN_LAYERS=True);
             q and k: rotary pairs interleaved; q: divided by sqrt(head_dim), which Llama does while attending

    python 5_GRPO_Maxtext/convert_checkpoint.py SOURCE=tiny_llama TARGET=runs/tiny_maxtext
    python 5_GRPO_Maxtext/convert_checkpoint.py SOURCE=runs/tiny_maxtext MODEL=tiny_llama TARGET=runs/tiny_hf
    python 5_GRPO_Maxtext/convert_checkpoint.py SOURCE=runs/mine TARGET=runs/mine_hf     # RUN_DIR=runs/mine

A run with LORA_RANK above 0 saved A and B alone: they are merged into the weights of its MODEL on the way.

One array is in memory at a time, filled or emptied layer by layer: 1.2 B parameters take 64 s and 2.7 GiB to
MaxText, 40 s and 5.3 GiB back (one busy core of an AMD EPYC); README.md says what 8 B should need.

MaxText's own name map, layout hooks and lazy arrays are used. Its two converters as they stand (0.2.5) know
only the sizes of its model table, round the query weights to bfloat16 on the way, and save their lazy arrays
through a part of Orbax that does not take them.
"""

import asyncio
import functools
import itertools
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # host memory, also on a TPU VM: nothing is computed here

import grpo_llama3_1_8b_demo as demo  # first: it sets XLA's flags  # isort: skip
import absl.logging
import huggingface_hub
import jax
import jax.numpy as jnp
import lora
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
from grpo_llama3_1_8b_demo import UserError
from maxtext.checkpoint_conversion import to_maxtext as maxtext_converter
from maxtext.checkpoint_conversion.utils import hf_shape
from maxtext.checkpoint_conversion.utils.utils import apply_hook_fns, param_key_parts_from_path

# %% Constants ------------------------------------------------------------------------------------------
SOURCE = ""  # Hugging Face name or folder; or an Orbax checkpoint: RUN_DIR of a run, or a folder of MaxText's
TARGET = ""  # the folder to make; it must not exist yet
MODEL = ""  # only for an Orbax SOURCE: where config.json and tokenizer come from; a run's RUN_DIR knows it
WEIGHT_DTYPE = ""  # of what is written; empty: float32 for MaxText, config.json's dtype for Hugging Face
SCAN_LAYERS = True  # layout of the MaxText checkpoint to write; one that is read shows its own
MAX_SHARD_SIZE = "2GB"  # of one *.safetensors file; twice that is in memory while it is written
CHUNK_BYTES = 2**28  # piece in which MaxText's arrays are stored: a chip reads only those it needs

DEFAULTS = {name: value for name, value in globals().items() if name.isupper() and name != "HERE"}


# %% Finding things -------------------------------------------------------------------------------------
def find_checkpoint(source: str) -> Path | None:
    """The weights of the latest step under `source` (a run, a MaxText output folder, or one step of either).

    Returns:
        The folder with Orbax's `_METADATA` (`<step>/model_params` or `<step>/items`); None if there is none.
    """
    found = [p.parent for p in Path(source).rglob("_METADATA") if p.parent.name != "optimizer_state"]
    step = [int(p.parent.name) if p.parent.name.isdigit() else -1 for p in found]
    return found[step.index(max(step))].resolve() if found else None


def find_constants(checkpoint: Path) -> dict[str, Any]:
    """The constants of the run around `checkpoint`; empty if no `constants.json` lies above it."""
    for folder in checkpoint.parents:
        if (folder / "constants.json").is_file():
            return json.loads((folder / "constants.json").read_text())
    return {}


def find_model(constants: dict[str, Any]) -> str:
    """The Hugging Face model that the weights stem from: MODEL, or that of the run.

    Raises:
        UserError: MODEL is empty and the checkpoint is not in a run.
    """
    if not (MODEL or constants):
        raise UserError(
            f"MODEL is empty and SOURCE={SOURCE} is not in a run of the main script; give MODEL the Hugging "
            "Face name or folder that the weights stem from"
        )
    return MODEL or constants["MODEL"]


def load_config(constant: str, model: str, dtype: str, scan_layers: bool | None):
    """Folder and config of a Hugging Face model, and the MaxText config of the same sizes.

    Args:
        constant: its name in this script, for messages.
        model: name or folder.
        dtype: of the weights to write; empty: the model's own.
        scan_layers: layout of the MaxText side.
    """
    try:
        folder, hf = demo.load_hf_config(model)
        dtype = dtype or str(hf.dtype).removeprefix("torch.")
        demo.configure([f"MODEL={model}", f"WEIGHT_DTYPE={dtype}", f"SCAN_LAYERS={scan_layers}"])
        demo.ATTENTION = "dot_product"  # flash is for TPUs, and nothing attends here
        return folder, hf, demo.to_maxtext_config(hf, rows=1, prompt_tokens=1, new_tokens=1)
    except UserError as error:
        raise UserError(str(error).replace("MODEL=", f"{constant}=", 1)) from None


def check_disk(folder: Path, needed: int) -> None:
    """Refuses to start what the disk cannot hold; `needed` in bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"TARGET={TARGET}: {needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free; "
            "free some space, choose another disk, or write WEIGHT_DTYPE=bfloat16"
        )


# %% Hugging Face -> MaxText ----------------------------------------------------------------------------
class OneAtATime(ocp.type_handlers.NumpyHandler):
    """Orbax's writer of arrays, for MaxText's lazy ones: each is made, written and freed before the next.

    Orbax by itself starts all of them at once, and so would hold the whole model.
    """

    async def serialize(self, values, infos, args=None):
        for value, info, arg in zip(values, infos, args or itertools.repeat(ocp.SaveArgs())):
            for future in await super().serialize([np.asarray(value)], [info], [arg]):
                await asyncio.to_thread(future.result)
        return []


def leaf_builder(folder: Path, hf, config, dtype) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """A function that gives the array of a MaxText name and shape, in `dtype`, of the tensors in `folder`.

    Raises:
        UserError: a weight that is missing.
    """
    names, layout_hooks = demo.weight_mapping(hf, config, saving_to_hf=False)
    files = {}  # file of each tensor
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="np") as file:
            files.update(dict.fromkeys(file.keys(), path))
    for hf_names in names.values():
        missing = [hf_name for hf_name in np.atleast_1d(hf_names) if hf_name not in files]
        if missing:
            raise UserError(f"SOURCE={SOURCE}: {folder} lacks weight {missing[0]}; fetch its file")

    def read(hf_name: str) -> np.ndarray:
        with safetensors.safe_open(files[hf_name], framework="np") as file:
            return file.get_tensor(hf_name)

    def build(name: str, shape: tuple[int, ...]) -> np.ndarray:
        leaf = np.empty(shape, dtype)
        for hf_name, layer in zip(np.atleast_1d(names[name]), layers_of(leaf, names[name], config)):
            layer[...] = apply_hook_fns(read(hf_name), layer.shape, layout_hooks.get(name))
        return leaf

    return build


def to_maxtext(folder: Path, hf, config, target: Path) -> int:
    """Writes `target`/0/items: {"params": {"params": weights}}, as MaxText saves parameters.

    Args:
        folder: holds `*.safetensors`.
        hf: its config.
        config: MaxText's, with the dtype and layout to write.

    Returns:
        The number of parameters.

    Raises:
        UserError: a weight that is missing.
    """
    places, tree = maxtext_converter.get_maxtext_model_info(config)  # {name: (index in tree, shape)}
    check_disk(target, sum(int(np.prod(shape)) for _, shape in places.values()) * dtype_of(config).itemsize)
    build = leaf_builder(folder, hf, config, dtype_of(config))
    leaves = [None] * len(places)
    for name, (index, shape) in places.items():
        load = functools.partial(build, name, shape)
        leaves[index] = maxtext_converter.LazyTensor(load, shape, dtype_of(config), name)
    weights = jax.tree.unflatten(tree, leaves)
    writer = OneAtATime(deepcopy_host_arrays=False)
    ocp.type_handlers.register_type_handler(maxtext_converter.LazyTensor, writer, override=True)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(target.resolve(), options=options, item_names=("items",)) as manager:
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), weights)
        manager.save(
            0,
            args=ocp.args.Composite(items=ocp.args.PyTreeSave({"params": weights}, {"params": chunks})),
            custom_metadata={"scan_layers": config.scan_layers},  # MaxText checks it when it loads
        )
    return sum(int(leaf.size) for leaf in leaves)


def dtype_of(config) -> np.dtype:
    """NumPy's type of the weights that are written."""
    return jnp.dtype(config.weight_dtype)


def layers_of(leaf: np.ndarray, hf_names: str | list[str], config) -> Iterator[np.ndarray]:
    """Views of `leaf`, one for each name: its layers if there is a list of names, else the whole."""
    return iter(np.moveaxis(leaf, config.param_scan_axis, 0) if isinstance(hf_names, list) else [leaf])


# %% MaxText -> Hugging Face ----------------------------------------------------------------------------
def stored_leaves(checkpoint: Path) -> dict[str, tuple]:
    """MaxText's names of the arrays in a checkpoint, each with its path and metadata.

    The main script's checkpoints hold Tunix's adapter ("base") and random-number state beside the weights,
    MaxText's a tree "params" in a tree "params", and possibly the optimizer's.
    """
    metadata = ocp.PyTreeCheckpointer().metadata(checkpoint).item_metadata.tree
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metadata, is_leaf=lambda x: hasattr(x, "shape")):
        parts = param_key_parts_from_path(path)
        while parts[0] in ("base", "params"):
            parts.pop(0)
        leaves["-".join(["params", *parts])] = (path, leaf)
    return leaves


def restore_leaf(checkpoint: Path, path: tuple) -> np.ndarray:
    """One array of a checkpoint, in the shape and dtype in which it was saved."""
    wanted, arguments = 0, ocp.ArrayRestoreArgs(restore_type=np.ndarray)
    for entry in reversed(path):
        wanted, arguments = {entry.key: wanted}, {entry.key: arguments}
    restored = ocp.PyTreeCheckpointer().restore(
        checkpoint,
        args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True),
    )
    return jax.tree.leaves(restored)[0]


def stored_reader(checkpoint: Path, leaves: dict[str, tuple], folder: Path, config):
    """A function that gives the array of a MaxText name out of a checkpoint with all weights.

    Args:
        checkpoint: from `find_checkpoint`.
        leaves: from `stored_leaves`.
        folder: of the model that the weights stem from.
        config: MaxText's, with the layout to read.

    Raises:
        UserError: the checkpoint is of another model.
    """
    places, _ = maxtext_converter.get_maxtext_model_info(config)
    for name, (_, shape) in places.items():
        stored = tuple(leaves[name][1].shape) if name in leaves else "nothing"
        if stored != shape:
            raise UserError(
                f"MODEL={folder}: its weight {name} is {shape}, SOURCE={SOURCE} holds {stored}; give the "
                "MODEL that was trained"
            )
    return lambda name: restore_leaf(checkpoint, leaves[name][0])


def lora_reader(checkpoint: Path, leaves: dict[str, tuple], folder: Path, hf, config, scale: float):
    """As `stored_reader`, out of MODEL's own files and a checkpoint that holds A and B alone: W + scale A B.

    Raises:
        UserError: the checkpoint is of another model, or a weight is missing.
    """
    places, _ = maxtext_converter.get_maxtext_model_info(config)
    for name in leaves:
        weight, _, letter = name.rpartition("_lora_")
        if letter == "a":
            a, b = (
                leaves[f"{weight}_lora_{letter}"][1].shape for letter in "ab"
            )  # [in, (layer,) r], [r, ..., out]
            shape = places[weight][1] if weight in places else ()
            if math.prod(a[:-1]) * b[-1] != math.prod(shape):
                raise UserError(
                    f"MODEL={folder}: {name} in SOURCE={SOURCE} does not fit it; give the MODEL that was "
                    "trained"
                )
    build = leaf_builder(folder, hf, config, np.float32)  # one rounding, at the very end

    def read(name: str) -> np.ndarray:
        shape = places[name][1]
        leaf = build(name, shape)
        if f"{name}_lora_a" not in leaves:
            return leaf
        a, b = (restore_leaf(checkpoint, leaves[f"{name}_lora_{letter}"][0]) for letter in "ab")
        return leaf + lora.product(a.astype(np.float32), b.astype(np.float32), shape, scale)

    return read


def to_huggingface(read: Callable[[str], np.ndarray], folder: Path, hf, config, target: Path) -> int:
    """Writes a Hugging Face folder: weights, config, tokenizer.

    Args:
        read: gives the array of a MaxText name; from `stored_reader` or `lora_reader`.
        folder: of the model that the weights stem from.
        hf: its config.
        config: MaxText's, with the dtype to write and the layout to read.

    Returns:
        The number of parameters.
    """
    names, layout_hooks = demo.weight_mapping(hf, config, saving_to_hf=True)
    shapes = hf_shape.HF_SHAPE["llama3.1-8b"](hf.to_dict())

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, hf_names in names.items():
            leaf = read(name)
            for hf_name, layer in zip(np.atleast_1d(hf_names), layers_of(leaf, hf_names, config)):
                tensor = np.asarray(apply_hook_fns(layer, shapes[hf_name], layout_hooks.get(name)))
                # safetensors asks for contiguous arrays; the hooks end in transposed views
                yield str(hf_name), np.ascontiguousarray(tensor.astype(dtype_of(config)))
            del leaf, layer  # before the next one is read

    bytes_of = {
        str(hf_name): int(np.prod(shapes[hf_name])) * dtype_of(config).itemsize
        for hf_names in names.values()
        for hf_name in np.atleast_1d(hf_names)
    }
    check_disk(target, sum(bytes_of.values()))
    plan = huggingface_hub.split_state_dict_into_shards_factory(
        bytes_of, get_storage_size=int, filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_SIZE,
    )  # fmt: skip
    stream = tensors()  # in the order of `bytes_of`, so a file needs the next few tensors
    for file, hf_names in plan.filename_to_tensors.items():
        shard = dict(itertools.islice(stream, len(hf_names)))
        safetensors.numpy.save_file(shard, target / file, metadata={"format": "pt"})
    if len(plan.filename_to_tensors) > 1:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    for path in folder.iterdir():  # tokenizer, chat template, generation config: as they are
        if path.suffix in (".json", ".jinja", ".model") and "safetensors" not in path.name:
            shutil.copyfile(path, target / path.name)
    settings = json.loads((folder / "config.json").read_text())
    settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = str(dtype_of(config))
    (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return sum(bytes_of.values()) // dtype_of(config).itemsize


# %% Main -----------------------------------------------------------------------------------------------
def configure(arguments: list[str]) -> None:
    """Sets this module's constants from `NAME=value` arguments.

    Raises:
        UserError: an unknown name, a wrong value, a SOURCE or TARGET that cannot be.
    """
    globals().update(DEFAULTS | demo.parse_overrides(arguments, DEFAULTS))
    for name in ("SOURCE", "TARGET"):
        if not globals()[name]:
            raise UserError(f"{name} is empty; give it on the command line: {name}=folder")
    if WEIGHT_DTYPE not in ("", "float32", "bfloat16", "float16"):
        raise UserError(f"WEIGHT_DTYPE={WEIGHT_DTYPE}: one of float32, bfloat16, float16")
    if Path(TARGET).exists():
        raise UserError(f"TARGET={TARGET}: exists already; choose another name, or remove it")


def run(arguments: list[str]) -> None:
    """Converts; see the module's docstring."""
    started = time.perf_counter()
    configure(arguments)
    checkpoint = find_checkpoint(demo.find_path(SOURCE))
    partial = Path(TARGET + ".partial")  # renamed at the end: TARGET is whole, or it is not there
    shutil.rmtree(partial, ignore_errors=True)
    if checkpoint:
        leaves = stored_leaves(checkpoint)
        scanned = any(name.startswith("params-decoder-layers-") for name in leaves)
        constants = find_constants(checkpoint)
        folder, hf, config = load_config("MODEL", find_model(constants), WEIGHT_DTYPE, scanned)
        layout = "scanned" if scanned else "one array a layer"
        if any(name.endswith("_lora_a") for name in leaves):
            if not constants:
                raise UserError(
                    f"SOURCE={SOURCE}: holds LoRA matrices and no constants.json with their LORA_ALPHA lies "
                    "above them; give the run's folder"
                )
            scale = constants["LORA_ALPHA"] / constants["LORA_RANK"]
            read = lora_reader(checkpoint, leaves, folder, hf, config, scale)
            layout += f", LoRA of rank {constants['LORA_RANK']} merged into {folder}"
        else:
            read = stored_reader(checkpoint, leaves, folder, config)
        print(f"{checkpoint} ({layout}) -> Hugging Face")
        partial.mkdir(parents=True)
        count = to_huggingface(read, folder, hf, config, partial)
        use = f"transformers.AutoModelForCausalLM.from_pretrained({TARGET!r})"
    else:
        folder, hf, config = load_config("SOURCE", SOURCE, WEIGHT_DTYPE or "float32", SCAN_LAYERS)
        print(f"{folder} -> MaxText ({'scanned' if SCAN_LAYERS else 'one array a layer'})")
        partial.mkdir(parents=True)
        count = to_maxtext(folder, hf, config, partial)
        use = f"MaxText: load_parameters_path={Path(TARGET).resolve()}/0/items scan_layers={SCAN_LAYERS}"
    partial.rename(TARGET)
    size = sum(path.stat().st_size for path in Path(TARGET).rglob("*") if path.is_file())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    print(
        f"{TARGET}: {count:,} parameters, {config.weight_dtype}, {size / 2**30:.3f} GiB on disk, "
        f"{time.perf_counter() - started:.1f} s, at most {peak:.2f} GiB of memory\nuse it: {use}"
    )


def main() -> None:
    """Runs the script with the command line's constants; exit code 2 on the user's errors."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
