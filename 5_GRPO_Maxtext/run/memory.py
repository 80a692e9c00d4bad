"""Checks whether a step fits in a chip's memory, and the checkpoints on the disk, without the
machine.

`make fit-check` compiled the programs of a run (FIT_FILES); its results hold for every run of the
same kind with the same or a smaller batch. For others there's only `estimate`, a lower bound from
what's in memory whatever the batch. In every function `c` is the constants of the run, `hf` the
checkpoint's config, and `parameters` the model's number of parameters.
"""

import json
import math
import operator
import shutil
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import jax
import transformers

import settings
from constants import RunConstants
from machines import TPU, Machine, compiled, parse_machine
from model import devices, lora
from settings import HERE, UserError

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}  # per number


# %% Machines --------------------------------------------------------------------------------------
# planned without a TPU
SLICES = ("v5p-8", "v6e-8", "v5p-64", "v6e-4", "v6e-1", "v5e-8", "v5e-4", "v5e-1")


# %% Models ----------------------------------------------------------------------------------------
LLAMA_3_1_8B = "meta-llama/Llama-3.1-8B-Instruct"
# The config.json of some models by Hugging Face name, for machines that can't reach the hub.
PUBLISHED = json.loads((HERE / "run" / "published_models.json").read_text(encoding="utf-8"))


def published_config(model: str = LLAMA_3_1_8B):
    """The config of a model in PUBLISHED, ignoring the commit in name@hash; None for any other."""
    sizes = PUBLISHED.get(model.partition("@")[0])
    return transformers.AutoConfig.for_model(**sizes) if sizes else None


# %% Disk ------------------------------------------------------------------------------------------
def trained_parameters(c: RunConstants, hf, parameters: int) -> int:
    """Number of trained parameters: LoRA's A and B, or all."""
    return lora.count_parameters(hf, c.LORA_RANK, c.LORA_TARGETS) if c.LORA_RANK else parameters


def checkpoint_bytes(c: RunConstants, trained: int) -> int:
    """Size of one checkpoint: the trained parameters and two Adam moments of each."""
    return 3 * trained * BYTES[c.WEIGHT_DTYPE]


def check_disk(
    c: RunConstants, trained: int, checkpoints: str, kept: int = 0, download: int = 0
) -> None:
    """Raises UserError if there's no room for what a run will still write.

    That's `download` bytes from the hub, and the checkpoints in the folder `checkpoints`, of which
    `kept` are there already; a gs:// address isn't checked.
    """
    hub = existing(Path(huggingface_hub.constants.HF_HUB_CACHE))
    if download:
        remedy = "free some space, or set HF_HOME to a folder on another disk"
        refuse_full_disk(hub, download, f"MODEL={c.MODEL}", remedy)
    if not checkpoints.startswith("gs://"):
        # Orbax deletes the oldest after saving
        needed = checkpoint_bytes(c, trained) * max(1, c.MAX_TO_KEEP + 1 - kept)
        if hub.stat().st_dev == existing(Path(checkpoints)).stat().st_dev:
            needed += download
        elsewhere = "CHECKPOINT_DIR" if c.CHECKPOINT_DIR else "RUN_DIR"
        remedy = f"lower it, free some space, or choose another {elsewhere}"
        refuse_full_disk(Path(checkpoints), needed, f"MAX_TO_KEEP={c.MAX_TO_KEEP}", remedy)


def refuse_full_disk(folder: Path, needed: int, setting: str, remedy: str) -> None:
    """Raises UserError, "`setting`: ...; `remedy`", if fewer than `needed` bytes are free for
    `folder`.
    """
    free = shutil.disk_usage(existing(folder)).free
    if free < needed:
        sizes = f"{needed / GIB:.2f} GiB are needed, {free / GIB:.2f} GiB are free in {folder}"
        raise UserError(f"{setting}: {sizes}; {remedy}")


def existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists."""
    path = path.resolve()
    return next(parent for parent in (path, *path.parents) if parent.exists())


# %% Estimates without compiling -------------------------------------------------------------------
def weight_copies(c: RunConstants) -> int:
    """Copies of the model in the trainer's memory: 2 if the reference has its own weights on the
    chips.
    """
    return 2 if c.BETA and not c.LORA_RANK and not c.REFERENCE_OFFLOAD else 1


class Estimate(NamedTuple):
    """GiB per chip. vLLM starts when actor and reference are in memory and the optimizer isn't yet.

    It counts those two against its share, and fills the rest with KV cache, whatever training needs
    later.
    """

    training: float  # weights, reference, moments; a lower bound without gradients and activations
    taken: float = 0.0  # weights and reference, if vLLM shares their chips; 0 if it has its own
    weights: float = 0.0  # vLLM's
    cache: float = 0.0  # vLLM's keys and values of one step's answers at their full length
    sync: float = 0.0  # the most while vLLM gets new weights, which it does without its cache

    def shares(self, limit: float, peak: float) -> tuple[float, float]:
        """The range of HBM_UTILIZATION_VLLM if a chip has `limit` GiB and training takes `peak` of
        it; empty, ending at 0, if the weights can't be handed over.
        """
        least = math.ceil(100 * (self.taken + self.weights + self.cache) / limit) / 100
        if self.sync > limit:
            return least, 0.0
        return least, math.floor(
            100 * (self.taken + limit - peak) / limit
        ) / 100 if self.taken else 1.0


def estimate(c: RunConstants, hf, parameters: int, trainer: list, rollout_mesh) -> Estimate:
    """A run's memory per chip; `trainer` and `rollout_mesh` come from `devices.plan_devices`."""
    a_number = BYTES[c.WEIGHT_DTYPE] / GIB
    taken = weight_copies(c) * parameters * a_number / len(trainer)  # before the optimizer exists
    # LoRA's A and B and their two moments are replicated on each chip; everything else is sharded.
    moments = (
        (3 if c.LORA_RANK else 2 / len(trainer)) * trained_parameters(c, hf, parameters) * a_number
    )
    if rollout_mesh is None:
        return Estimate(taken + moments)
    tensor, itemsize = rollout_mesh.shape["model"], BYTES[c.DTYPE]
    # per chip; vLLM repeats them if there are more chips
    heads = max(1, hf.num_key_value_heads / tensor)
    tokens = c.BATCH_SIZE * c.NUM_GENERATIONS * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)
    tokens /= rollout_mesh.shape["data"]
    cache = 2 * hf.num_hidden_layers * heads * hf.head_dim * itemsize * tokens / GIB
    beside = taken if rollout_mesh.devices.flat[0] in trainer else 0.0
    weights = parameters * itemsize / tensor / GIB
    # Tunix hands the weights over op by op: LoRA's merged copy, then all layers one by one, then
    # vLLM's new weights while it still has the old ones. A test in test_vllm_path.py measures it.
    ends = (1 if hf.tie_word_embeddings else 2) * hf.vocab_size * hf.hidden_size
    copied = parameters - ends + (parameters if c.LORA_RANK else 0)
    sync = taken + moments + copied * a_number / len(trainer) + (2 * weights if beside else 0.0)
    return Estimate(taken + moments, beside, weights, cache, sync)


# %% Compiled results ------------------------------------------------------------------------------
# Files in assets/ (tools/fit_check.py has their columns), and whether their batch came from a
# search.
FIT_FILES = {"fit_check.csv": False, "fit_rungs.csv": True, "fit_cards.csv": True}
MODEL_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


def kind_and_batch(c: RunConstants) -> tuple[tuple, tuple]:
    """What two runs must have in common to be compared, and the sizes that memory grows with."""
    kind = (
        c.BETA > 0,
        c.NUM_ITERATIONS > 1,
        c.REFERENCE_OFFLOAD,
        c.LORA_RANK,
        c.DTYPE,
        c.WEIGHT_DTYPE,
        c.SCAN_LAYERS,
        c.REMAT_POLICY,
        c.ATTENTION,
        c.ROLLOUT_ENGINE,
        c.TRAINER_DEVICES_FRACTION,
        c.SAMPLER_DEVICES_FRACTION,
        c.TRAINER_TENSOR_PARALLEL,
        c.SAMPLER_DATA_PARALLEL,
    )
    of_pass = c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE
    return kind, (
        c.MAX_PROMPT_LENGTH,
        c.TOTAL_GENERATION_STEPS,
        c.BATCH_SIZE,
        c.BATCH_SIZE * c.NUM_GENERATIONS,
        of_pass * c.NUM_GENERATIONS,
        of_pass < c.BATCH_SIZE,  # several passes accumulate
    )


def committed_peaks(c: RunConstants, hf, name: str) -> tuple[float, float]:
    """Lower and upper bound of the GiB per chip of a run's largest program on a machine, by the
    compiler.

    They come from compiled runs with a smaller or equal and a larger or equal batch; else 0 and
    infinity.
    """
    least, most = 0.0, math.inf
    kind, batch = kind_and_batch(c)
    for constants, rows in compiled(name, FIT_FILES).items():
        peak = max(float(row["peak"]) for row in rows)
        other = settings.read(type(c), [f"MODEL={LLAMA_3_1_8B}", *constants.split()])
        sizes = PUBLISHED.get(other.MODEL) or json.loads(
            settings.config_path(other.MODEL).read_text(encoding="utf-8")
        )
        other_kind, theirs = kind_and_batch(other)
        if other_kind == kind and all(getattr(hf, size) == sizes[size] for size in MODEL_SIZES):
            if all(map(operator.ge, batch, theirs)):
                least = max(least, peak)
            if all(map(operator.le, batch, theirs)):
                most = min(most, peak)
    return least, most


# %% Will it fit -----------------------------------------------------------------------------------
def plan_memory(c: RunConstants, hf, parameters: int) -> str:
    """Prints which devices train and generate, and whether it fits; returns where, in a sentence.

    Plans for MACHINE, or this machine's TPU or GPUs, or else all SLICES. Raises UserError with the
    first one's reason if it fits on none of them.
    """
    here = devices.machine_for(c)
    if here.platform == "cpu":
        trainer, _ = devices.plan_devices(c, hf, jax.devices())
        print(f"devices  {len(trainer)} x {here.name}, generation by {c.ROLLOUT_ENGINE}")
        return "memory was not checked"
    if here == TPU:
        print("devices  no TPU here: planned for " + ", ".join(SLICES))
    faults, machines = [], {"fits": [], "unknown": [], "does not fit": []}
    for machine in map(parse_machine, SLICES) if here == TPU else [here]:
        try:
            fits, sentence = planned(c, hf, parameters, machine)
        except UserError as error:
            faults.append(error)
            fits, sentence = "does not fit", f"no: {error}"
        machines[fits].append(machine.name)
        print(f"{machine.name:8} {sentence}")
    if not machines["fits"] + machines["unknown"]:
        raise faults[0]
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in machines.items() if names)


def planned(c: RunConstants, hf, parameters: int, machine: Machine) -> tuple[str, str]:
    """Returns "fits" or "unknown", and a sentence; raises UserError if the run can't fit the
    machine.
    """
    trainer, rollout_mesh = devices.plan_devices(c, hf, list(range(machine.chips)))
    needs = estimate(c, hf, parameters, trainer, rollout_mesh)
    least, most = committed_peaks(c, hf, machine.name)
    if most <= machine.gib:
        source = "compiled earlier" + " for a larger batch" * (least != most)
        return "fits", "yes: " + verdict(c, machine, len(trainer), needs, most, source)
    source = "compiled earlier" if least == most else "a smaller batch takes"
    if least < needs.training:
        least, source = needs.training, "not compiled; weights and moments alone take"
    # If vLLM doesn't fit next to a lower bound, it doesn't fit next to the true peak either.
    verdict(c, machine, len(trainer), needs, least, source)
    return "unknown", "unknown: " + verdict(
        c, machine, len(trainer), Estimate(least), least, source
    )


def verdict(
    c: RunConstants, machine: Machine, trains: int, needs: Estimate, peak: float, source: str
) -> str:
    """Says how well a run fits if `trains` of the chips train; raises UserError if it doesn't.

    Training takes `peak` GiB of each; `source` is where that comes from, such as "compiled
    earlier".
    """
    limit = f"{machine.gib:.4g} GiB per chip"
    # What to change when memory is short: the least harmful constant with room left.
    name, change = "BATCH_SIZE" if c.BATCH_SIZE > 1 else "NUM_GENERATIONS", "lower it"
    accumulates = 0 < c.TRAIN_MICRO_BATCH_SIZE < c.BATCH_SIZE and not c.LORA_RANK
    if accumulates and c.BATCH_SIZE * c.NUM_GENERATIONS <= 16:
        name, change = "TRAIN_MICRO_BATCH_SIZE", "set 0 (accumulating costs another gradient)"
    elif c.TRAINER_DEVICES_FRACTION < 1 and c.ROLLOUT_ENGINE == "vllm":
        name, change = "TRAINER_DEVICES_FRACTION", "set it and SAMPLER_DEVICES_FRACTION to 1.0"
    short = f"{name}={getattr(c, name)}, {change}, or take a larger machine"
    if peak > machine.gib:
        raise UserError(
            f"{short}: {machine.name} has {limit}, training takes {peak:.1f} ({source})"
        )
    fits = f"{trains} of {machine.chips} chips train, {source} {peak:.1f} of {limit}"
    if not needs.weights:
        return fits
    if needs.sync > machine.gib:
        raise UserError(
            f"ROLLOUT_ENGINE=vllm: handing the new weights to vLLM takes {needs.sync:.1f} of "
            f"{limit}; take a larger machine, or set ROLLOUT_ENGINE=maxtext"
        )
    least, most = needs.shares(machine.gib, peak)
    if least > most:
        beside = f", training {peak:.1f} of the same" if needs.taken else ""
        both = f"{needs.weights + needs.cache:.1f} of {limit}{beside}"
        raise UserError(f"{short}: vLLM's weights and a step's KV cache take {both}")
    share = f"HBM_UTILIZATION_VLLM={c.HBM_UTILIZATION_VLLM}"
    if not least <= c.HBM_UTILIZATION_VLLM <= most:
        raise UserError(
            f"{share}: of {limit} vLLM needs {needs.weights:.1f} for weights and {needs.cache:.1f} "
            f"for a step's KV cache, {needs.taken:.1f} are taken when it starts, training takes "
            f"{peak:.1f}; use {least} to {most}"
        )
    return f"{fits}; vLLM needs {needs.weights:.1f} + KV cache {needs.cache:.1f}, {share} is enough"
