"""Does it fit: a step into a chip's memory, the checkpoints onto a disk.

Nothing here needs a TPU. Where `make fit-check` compiled the run's own programs (FIT_FILES), the TPU
compiler's figure decides. Elsewhere `estimate` gives a bound below which the run can't fit, and whether it
does fit is unknown (tools/tpu_fit_check.py compiles it):

    bytes per chip >= (weights of actor and reference + moments + gradients) / chips

In every function `c` is the constants of the run, `hf` the checkpoint's config, and `parameters` how many
numbers the model's weights have.
"""

import csv
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import transformers

import settings
from model import devices, lora
from settings import HERE, UserError

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}  # per number


class Chip(NamedTuple):
    """A kind of chip that a run can be planned for without having one."""

    gib: float  # memory that a program may use; for a TPU, what the compiler enforces
    kinds: tuple[str, ...]  # jax's device_kind
    counts: int = 1  # how often a slice's name counts a chip: v5p-8 has 8 cores on 4 chips


CHIPS = {
    "v5e": Chip(15.75, ("TPU v5 lite",)),
    "v6e": Chip(31.24, ("TPU v6 lite",)),
    "v5p": Chip(95.73, ("TPU v5p", "TPU v5"), 2),
}
SLICES = ("v5p-8", "v6e-8", "v5p-64", "v6e-4", "v6e-1", "v5e-8", "v5e-4", "v5e-1")  # planned without a TPU

LLAMA_3_1_8B = "meta-llama/Llama-3.1-8B-Instruct"
# What the config.json of some models say, by Hugging Face's name, for machines that can't reach the hub.
PUBLISHED = json.loads((HERE / "run" / "published_models.json").read_text())
NO_SIZES = {"rms_norm_eps", "max_position_embeddings", "rope_parameters"}  # of PUBLISHED; take no memory

FIT_FILES = ("fit_check.csv", "fit_rungs.csv")  # in assets/
MEMORY_CONSTANTS = (  # a row of FIT_FILES is about a run that has the same values
    "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "BATCH_SIZE", "NUM_GENERATIONS", "NUM_ITERATIONS", "BETA",
    "REFERENCE_OFFLOAD", "TRAIN_MICRO_BATCH_SIZE", "DTYPE", "WEIGHT_DTYPE", "SCAN_LAYERS", "REMAT_POLICY",
    "ATTENTION", "ROLLOUT_ENGINE", "TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION",
    "TRAINER_TENSOR_PARALLEL", "SAMPLER_DATA_PARALLEL", "LORA_RANK",
)  # fmt: skip
FEW_SEQUENCES = 16  # up to here the gradient that accumulation keeps is larger than the activations it saves


# %% Disk ---------------------------------------------------------------------------------------------------
def trained_parameters(c, hf, parameters: int) -> int:
    """How many numbers are trained: LoRA's A and B, or all."""
    return lora.count_parameters(hf, c.LORA_RANK, c.LORA_TARGETS) if c.LORA_RANK else parameters


def checkpoint_bytes(c, trained: int) -> int:
    """Size of one checkpoint: the trained parameters and two Adam moments of each."""
    return 3 * trained * BYTES[c.WEIGHT_DTYPE]


def check_disk(c, trained: int, checkpoints: str) -> None:
    """Raises UserError if the disk can't hold a run's checkpoints; a gs:// address isn't checked."""
    if not checkpoints.startswith("gs://"):
        needed = checkpoint_bytes(c, trained) * (c.MAX_TO_KEEP + 1)  # Orbax deletes the oldest after saving
        elsewhere = "CHECKPOINT_DIR" if c.CHECKPOINT_DIR else "RUN_DIR"
        remedy = f"lower it, free some space, or choose another {elsewhere}"
        refuse_full_disk(Path(checkpoints), needed, f"MAX_TO_KEEP={c.MAX_TO_KEEP}", remedy)


def refuse_full_disk(folder: Path, needed: int, setting: str, remedy: str) -> None:
    """Refuses to write what a disk can't hold.

    Args:
        folder: where it will be written; it need not exist yet.
        needed: bytes.
        setting: the constant and its value, for the message: "TARGET=out".
        remedy: what to do about it, for the message.

    Raises:
        UserError: less than `needed` is free.
    """
    free = shutil.disk_usage(existing(folder)).free
    if free < needed:
        sizes = f"{needed / GIB:.2f} GiB are needed, {free / GIB:.2f} GiB are free in {folder}"
        raise UserError(f"{setting}: {sizes}; {remedy}")


def existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists."""
    path = path.resolve()
    return next(parent for parent in (path, *path.parents) if parent.exists())


# %% A chip's memory ----------------------------------------------------------------------------------------
def published_config(model: str = LLAMA_3_1_8B):
    """The config of a model in PUBLISHED (its commit, name@hash, doesn't matter), None of any other."""
    sizes = PUBLISHED.get(model.partition("@")[0])
    return transformers.AutoConfig.for_model(**sizes) if sizes else None


def has_passes(c) -> bool:
    """Whether a step has several gradient passes, and so a sum of gradients beside the gradient of one."""
    return c.TRAIN_MICRO_BATCH_SIZE not in (0, c.BATCH_SIZE)


def weight_copies(c) -> int:
    """Copies of the model in the trainer's memory: 2 if the reference has weights of its own on the chips."""
    return 2 if c.BETA and not c.LORA_RANK and not c.REFERENCE_OFFLOAD else 1


class Estimate(NamedTuple):
    """What can be calculated without compiling anything, in GiB per chip.

    vLLM starts when actor and reference are in memory and the optimizer isn't yet. It counts those two
    against its share, and fills the rest of the share with KV cache, whatever training needs later.
    """

    training: float  # weights, reference, moments, gradients: a lower bound, activations come on top
    taken: float = 0.0  # weights and reference, where vLLM starts beside them; 0 if it has its own chips
    weights: float = 0.0  # vLLM's
    cache: float = 0.0  # vLLM's keys and values of one step's answers at their full length

    def shares(self, limit: float, peak: float) -> tuple[float, float]:
        """What HBM_UTILIZATION_VLLM may be, from what vLLM needs to what training leaves.

        Args:
            limit: GiB per chip.
            peak: GiB per chip that training takes.
        """
        least = math.ceil(100 * (self.taken + self.weights + self.cache) / limit) / 100
        return least, math.floor(100 * (self.taken + limit - peak) / limit) / 100 if self.taken else 1.0


def estimate(c, hf, parameters: int, trainer: list, rollout_mesh) -> Estimate:
    """What a run takes of each chip; `trainer` and `rollout_mesh` come from `devices.plan_devices`."""
    per_chip = BYTES[c.WEIGHT_DTYPE] / len(trainer) / GIB
    kept = weight_copies(c) * parameters  # before the optimizer is there
    training = (kept + (3 + has_passes(c)) * trained_parameters(c, hf, parameters)) * per_chip
    if rollout_mesh is None:
        return Estimate(training)
    tensor, itemsize = rollout_mesh.shape["model"], BYTES[c.DTYPE]
    heads = max(1, hf.num_key_value_heads / tensor)  # per chip; vLLM repeats them where chips are more
    tokens = c.BATCH_SIZE * c.NUM_GENERATIONS * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)
    tokens /= rollout_mesh.shape["data"]
    cache = 2 * hf.num_hidden_layers * heads * hf.head_dim * itemsize * tokens / GIB
    taken = kept * per_chip if rollout_mesh.devices.flat[0] in trainer else 0.0
    return Estimate(training, taken, parameters * itemsize / tensor / GIB, cache)


def memory_remedy(c) -> str:
    """The constant to change when memory is short: of those with room left, the least harmful."""
    larger = "or take a larger slice"
    if has_passes(c) and c.BATCH_SIZE * c.NUM_GENERATIONS <= FEW_SEQUENCES:
        name, change = "TRAIN_MICRO_BATCH_SIZE", "set 0 (accumulating costs another gradient)"
    elif c.TRAINER_DEVICES_FRACTION < 1 and c.ROLLOUT_ENGINE == "vllm":
        name, change = "TRAINER_DEVICES_FRACTION", f"set it and SAMPLER_DEVICES_FRACTION to 1.0, {larger}"
    elif c.BATCH_SIZE > 1:
        name, change = "BATCH_SIZE", f"lower it, {larger}"
    elif c.WEIGHT_DTYPE == "float32":
        name, change = "WEIGHT_DTYPE", "take a larger slice, or bfloat16 (which loses small updates)"
    else:
        name, change = "NUM_GENERATIONS", f"lower it, {larger}"
    return f"{name}={getattr(c, name)}, {change}"


# %% What was compiled --------------------------------------------------------------------------------------
def fit_rows(file: str) -> Iterator[dict[str, str]]:
    """The rows of a file in FIT_FILES; tools/tpu_fit_check.py has their columns."""
    with open(HERE / "assets" / file, newline="") as opened:
        yield from csv.DictReader(opened)


def committed_peak(c, hf, name: str) -> float | None:
    """GiB per chip of the run's largest program on a slice, by the compiler; None if it wasn't compiled."""
    peaks = []
    ours = {constant: str(getattr(c, constant)) for constant in MEMORY_CONSTANTS}
    for row in (row for file in FIT_FILES for row in fit_rows(file)):
        other = settings.read(type(c), [f"MODEL={LLAMA_3_1_8B}", *row["constants"].split()])
        theirs = {constant: str(getattr(other, constant)) for constant in MEMORY_CONSTANTS}
        sizes = PUBLISHED[other.MODEL]
        same_model = all(getattr(hf, size) == sizes[size] for size in sizes.keys() - NO_SIZES)
        if same_model and theirs == ours and (row["topology"], row["algorithm"]) == (name, "GRPO"):
            peaks.append(float(row["peak"]))
    return max(peaks, default=None)


# %% Machines -----------------------------------------------------------------------------------------------
class Machine(NamedTuple):
    """What a run is planned for."""

    name: str  # of the slice, such as "v6e-8", or of the GPU
    chips: int
    gib: float  # per chip


def slice_of(name: str) -> Machine:
    """A TPU slice by its name. Raises KeyError or ValueError if its chips aren't in CHIPS, or it has none."""
    family, _, count = name.partition("-")
    return Machine(name, int(count) // CHIPS[family].counts, CHIPS[family].gib)


def machines() -> list[Machine]:
    """The TPU or the GPUs of this machine, or else all SLICES."""
    count, device = jax.device_count(), jax.devices()[0]
    if jax.default_backend() == "gpu":
        return [Machine(device.device_kind, count, device.memory_stats()["bytes_limit"] / GIB)]
    if jax.default_backend() == "tpu":
        family = next((name for name, chip in CHIPS.items() if device.device_kind in chip.kinds), "v6e")
        return [slice_of(f"{family}-{count * CHIPS[family].counts}")]
    print("devices  no TPU here: planned for " + ", ".join(SLICES))
    return [slice_of(name) for name in SLICES]


def plan_memory(c, hf, parameters: int) -> str:
    """Prints who trains and who generates, and whether it fits.

    Returns:
        Where it fits, in a sentence.

    Raises:
        UserError: it fits none of the machines; the reason is the first one's.
    """
    if settings.is_small(c.MODEL):
        trainer, _ = devices.plan_devices(c, hf, jax.devices())
        kind = jax.devices()[0].device_kind
        print(f"devices  {len(trainer)} x {kind}, generation by {c.ROLLOUT_ENGINE}")
        return "memory was not checked"
    faults, found = [], {"fits": [], "unknown": [], "does not fit": []}
    for machine in machines():
        try:
            fits, verdict = planned(c, hf, parameters, machine)
        except UserError as error:
            faults.append(error)
            fits, verdict = "does not fit", f"no: {error}"
        found[fits].append(machine.name)
        print(f"{machine.name:8} {verdict}")
    if not found["fits"] + found["unknown"]:
        raise faults[0]
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in found.items() if names)


def planned(c, hf, parameters: int, machine: Machine) -> tuple[str, str]:
    """How a run fits a machine, by what was compiled earlier or, failing that, by the lower bound.

    Returns:
        "fits" or "unknown", and the same in words.

    Raises:
        UserError: it doesn't fit.
    """
    trainer, rollout_mesh = devices.plan_devices(c, hf, list(range(machine.chips)))
    needs = estimate(c, hf, parameters, trainer, rollout_mesh)
    peak, alone = needs.training, "weights, moments and gradients alone take"
    compiled = committed_peak(c, hf, machine.name) if peak <= machine.gib else None
    if compiled is not None:
        return "fits", "yes: " + verdict(c, machine, len(trainer), needs, compiled, "compiled earlier")
    if has_passes(c):  # one pass compiled as a whole step has no sum of gradients: a lower bound, too
        one = dataclasses.replace(c, BATCH_SIZE=c.TRAIN_MICRO_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE=0)
        if (of_one := committed_peak(one, hf, machine.name) or 0) > peak:
            peak, alone = of_one, "one gradient pass alone takes"
    # What's too much for vLLM beside a lower bound is too much beside the true peak.
    verdict(c, machine, len(trainer), needs, peak, "at least")
    alone = verdict(c, machine, len(trainer), Estimate(peak), peak, f"not compiled; {alone}")
    return "unknown", f"unknown: {alone}"


def verdict(c, machine: Machine, trains: int, needs: Estimate, peak: float, said: str) -> str:
    """Says how well a run fits.

    Args:
        machine: that it runs on.
        trains: how many of its chips train.
        needs: from `estimate`.
        peak: GiB per chip that training takes.
        said: where `peak` is from: "compiled earlier".

    Raises:
        UserError: training takes too much, or vLLM's share is too small for it or too large for training.
    """
    limit = f"{machine.gib:.4g} GiB per chip"
    fits = f"{trains} of {machine.chips} chips train, {said} {peak:.1f} of {limit}"
    if peak > machine.gib:
        raise UserError(f"{memory_remedy(c)}: {machine.name} has {limit}, training takes {peak:.1f} ({said})")
    if not needs.weights:
        return fits
    least, most = needs.shares(machine.gib, peak)
    if least > most:
        too_much = f"{memory_remedy(c)}: vLLM's weights and a step's KV cache take"
        beside = f", training {peak:.1f} of the same" if needs.taken else ""
        raise UserError(f"{too_much} {needs.weights + needs.cache:.1f} of {limit}{beside}")
    share = f"HBM_UTILIZATION_VLLM={c.HBM_UTILIZATION_VLLM}"
    if not least <= c.HBM_UTILIZATION_VLLM <= most:
        raise UserError(
            f"{share}: of {limit} vLLM needs {needs.weights:.1f} for weights and {needs.cache:.1f} for a "
            f"step's KV cache, {needs.taken:.1f} are taken when it starts, training takes {peak:.1f}; use "
            f"{least} to {most}"
        )
    return f"{fits}; vLLM needs {needs.weights:.1f} + KV cache {needs.cache:.1f}, {share} is enough"
