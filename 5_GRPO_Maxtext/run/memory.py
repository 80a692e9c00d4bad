"""Does it fit: a step into a chip's memory, the checkpoints onto a disk.

A slice is judged by the TPU compiler's own figure where there is one: in FIT_FILES, which `make fit-check`
writes. Elsewhere it is not known whether it fits (tools/tpu_fit_check.py compiles it). What is known is a
bound below which it cannot:

    bytes per chip >= (weights of actor and reference + moments + gradients) / chips

Nothing here imports jax before a function needs it.
"""

import csv
import dataclasses
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import settings
from settings import HERE, UserError

GIB = 2**30
HBM_GIB = {"v5e": 15.75, "v6e": 31.24, "v5p": 95.73}  # per chip, as the TPU compiler enforces it
SLICES = {  # chips; the name of a v5p slice counts two cores per chip
    "v5p-8": 4, "v6e-8": 8, "v5p-64": 32, "v6e-4": 4, "v6e-1": 1, "v5e-8": 8, "v5e-4": 4, "v5e-1": 1,
}  # fmt: skip
DEVICE_KINDS = {"TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v5 lite": "v5e"}
FIT_FILES = ("fit_check.csv", "fit_rungs.csv")  # in assets/
BYTES = {"float32": 4, "bfloat16": 2}  # per number

LLAMA_3_1_8B = "meta-llama/Llama-3.1-8B-Instruct"
_LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500_000.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
PUBLISHED = {  # what their config.json says, for machines that cannot reach the hub
    LLAMA_3_1_8B: dict(
        model_type="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        rms_norm_eps=1e-5, max_position_embeddings=131_072, tie_word_embeddings=False,
        rope_parameters=_LLAMA3_ROPE | {"factor": 8.0},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": dict(
        model_type="llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        rms_norm_eps=1e-5, max_position_embeddings=131_072, tie_word_embeddings=True,
        rope_parameters=_LLAMA3_ROPE | {"factor": 32.0},
    ),
    "Qwen/Qwen3-0.6B": dict(
        model_type="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        rms_norm_eps=1e-6, max_position_embeddings=40_960, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
    ),
}  # fmt: skip
MODEL_SIZES = (  # of config.json; with MEMORY_CONSTANTS they decide whether a figure of the file applies
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
MEMORY_CONSTANTS = (
    "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "BATCH_SIZE", "NUM_GENERATIONS", "NUM_ITERATIONS", "BETA",
    "REFERENCE_OFFLOAD", "TRAIN_MICRO_BATCH_SIZE", "DTYPE", "WEIGHT_DTYPE", "SCAN_LAYERS", "REMAT_POLICY",
    "ATTENTION", "ROLLOUT_ENGINE", "TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION",
    "TRAINER_TENSOR_PARALLEL", "SAMPLER_DATA_PARALLEL", "LORA_RANK",
)  # fmt: skip
UNKNOWN = "unknown"  # the verdict where nothing was compiled
FEW_SEQUENCES = 16  # up to here the gradient that accumulation keeps is larger than the activations it saves


# %% Disk ---------------------------------------------------------------------------------------------------
def checkpoint_bytes(c, trained: int) -> int:
    """Size of one checkpoint: weights and two Adam moments.

    Args:
        c: the constants of the run.
        trained: from `trained_parameters`; no others are saved.
    """
    return 3 * trained * BYTES[c.WEIGHT_DTYPE]


def has_passes(c) -> bool:
    """Whether a step has several gradient passes: then their sum is in memory beside the gradient of one."""
    return bool(c.TRAIN_MICRO_BATCH_SIZE and c.TRAIN_MICRO_BATCH_SIZE != c.BATCH_SIZE)


def trained_parameters(c, hf, parameters: int) -> int:
    """Numbers that are trained: LoRA's A and B, or all `parameters` of a model with the config `hf`."""
    if not c.LORA_RANK:
        return parameters
    from model import lora

    return lora.count_parameters(hf, c.LORA_RANK, c.LORA_TARGETS)


def check_disk(c, trained: int, checkpoints: str) -> None:
    """Refuses to start a run whose checkpoints the disk cannot hold.

    Args:
        c: the constants of the run.
        trained: from `trained_parameters`.
        checkpoints: their folder; a gs:// address is not checked.

    Raises:
        UserError: too little space.
    """
    if checkpoints.startswith("gs://"):
        return
    needed = checkpoint_bytes(c, trained) * (c.MAX_TO_KEEP + 1)  # Orbax deletes the oldest after saving
    elsewhere = "CHECKPOINT_DIR" if c.CHECKPOINT_DIR else "RUN_DIR"
    remedy = f"lower it, free some space, or choose another {elsewhere}"
    refuse_full_disk(Path(checkpoints), needed, f"MAX_TO_KEEP={c.MAX_TO_KEEP}", remedy)


def refuse_full_disk(folder: Path, needed: int, setting: str, remedy: str) -> None:
    """Refuses to write what a disk cannot hold.

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
        raise UserError(
            f"{setting}: {needed / GIB:.2f} GiB are needed, {free / GIB:.2f} GiB are free in {folder}; "
            f"{remedy}"
        )


def existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists."""
    path = path.resolve()
    return next(parent for parent in (path, *path.parents) if parent.exists())


# %% A chip's memory ----------------------------------------------------------------------------------------
def published_config(model: str = LLAMA_3_1_8B):
    """The config of a model in PUBLISHED (its commit, name@hash, does not matter), None of any other."""
    import transformers

    sizes = PUBLISHED.get(model.partition("@")[0])
    return transformers.AutoConfig.for_model(**sizes) if sizes else None


def weight_copies(c) -> int:
    """Copies of the model in the trainer's memory: 2 if the reference has weights of its own on the chips."""
    return 2 if c.BETA and not c.LORA_RANK and not c.REFERENCE_OFFLOAD else 1


def plan_memory(c, hf, parameters: int) -> str:
    """Prints who trains and who generates, and whether it fits.

    Args:
        c: the constants of the run.
        hf: the checkpoint's config.
        parameters: of the model.

    Returns:
        Where it fits, in a sentence.

    Raises:
        UserError: it fits none of the slices; the reason is that of the first.
    """
    import jax

    from model import devices

    if settings.is_small(c.MODEL):
        trainer, _ = devices.plan_devices(c, hf, jax.devices())
        kind = jax.devices()[0].device_kind
        print(f"devices  {len(trainer)} x {kind}, generation by {c.ROLLOUT_ENGINE}")
        return "memory was not checked"
    slices = {name: (chips, HBM_GIB[name.split("-")[0]]) for name, chips in SLICES.items()}
    chips, kind = jax.device_count(), jax.devices()[0].device_kind
    if jax.default_backend() == "tpu":
        family = DEVICE_KINDS.get(kind, "v6e")
        slices = {f"{family}-{chips * 2 if family == 'v5p' else chips}": (chips, HBM_GIB[family])}
    elif jax.default_backend() == "gpu":
        slices = {kind: (chips, jax.devices()[0].memory_stats()["bytes_limit"] / GIB)}
    else:
        print("devices  no TPU here: planned for " + ", ".join(slices))
    faults, found = [], {"fits": [], UNKNOWN: [], "does not fit": []}
    for name, (chips, limit) in slices.items():
        try:
            verdict = slice_verdict(c, hf, parameters, name, chips, limit)
            found[UNKNOWN if verdict.startswith(UNKNOWN) else "fits"].append(name)
        except UserError as error:
            faults.append(error)
            found["does not fit"].append(name)
            verdict = f"no: {error}"
        print(f"{name:8} {verdict}")
    if len(faults) == len(slices):
        raise faults[0]
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in found.items() if names)


def slice_verdict(c, hf, parameters: int, name: str, chips: int, limit: float) -> str:
    """How the run fits a TPU slice, or the GPUs of this machine, in words.

    Args:
        c: the constants of the run.
        hf: the checkpoint's config.
        parameters: of the model.
        name: of the slice, such as "v6e-8", or of the GPU.
        chips: how many there are.
        limit: GiB per chip.

    Raises:
        UserError: it does not fit.
    """
    from model import devices

    trainer, rollout_mesh = devices.plan_devices(c, hf, list(range(chips)))
    numbers = weight_copies(c) * parameters + (3 + has_passes(c)) * trained_parameters(c, hf, parameters)
    peak, said = numbers * BYTES[c.WEIGHT_DTYPE] / len(trainer) / GIB, "at least"
    alone = "weights, moments and gradients alone take"
    compiled = committed_peak(c, hf, name) if peak <= limit else None
    if compiled is not None:
        peak, said = compiled, "compiled earlier"
    elif has_passes(c):  # one of them as a whole step: without the sum of the gradients, so a bound, too
        one = dataclasses.replace(c, BATCH_SIZE=c.TRAIN_MICRO_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE=0)
        if (of_one := committed_peak(one, hf, name) or 0) > peak:
            peak, alone = of_one, "one gradient pass alone takes"
    if peak > limit:
        raise UserError(
            f"{memory_remedy(c)}: {name} has {limit:.4g} GiB per chip, training takes {peak:.1f} ({said})"
        )
    vllm = ""
    if rollout_mesh is not None:  # what is too much beside the bound is too much beside the truth
        shared = len(trainer) * (rollout_mesh.devices.flat[0] in trainer)
        vllm = f"; {vllm_verdict(c, hf, parameters, rollout_mesh, shared, limit, peak)}"
    who = f"{len(trainer)} of {chips} chips train"
    if compiled is None:
        return f"{UNKNOWN}: {who}, not compiled; {alone} {peak:.1f} of {limit:.4g} GiB per chip"
    return f"yes: {who}, {said} {peak:.1f} of {limit:.4g} GiB per chip{vllm}"


def vllm_needs(
    c, hf, parameters: int, rollout_mesh, trainer_chips: int, limit: float, peak: float
) -> SimpleNamespace:
    """What vLLM needs of a chip: its weights, and the KV cache of one step's answers at their full length.

    vLLM starts when actor and reference are in memory and the optimizer is not yet. It counts those two
    against its share, and fills the rest of the share with KV cache, whatever training needs later.

    Args:
        c: the constants of the run.
        hf: the checkpoint's config.
        parameters: of the model.
        rollout_mesh: ("data", "model"), from `devices.plan_devices`.
        trainer_chips: chips that train; 0 if vLLM has chips of its own.
        limit: GiB per chip.
        peak: GiB per chip that training takes.

    Returns:
        GiB per chip: `taken` when it starts, `weights`, `cache`; shares of a chip that HBM_UTILIZATION_VLLM
        may be: from `least`, which vLLM needs, to `most`, which training leaves.
    """
    taken = 0.0
    if trainer_chips:
        taken = weight_copies(c) * parameters * BYTES[c.WEIGHT_DTYPE] / trainer_chips / GIB
    tensor, itemsize = rollout_mesh.shape["model"], BYTES[c.DTYPE]
    weights = parameters * itemsize / tensor / GIB
    heads = max(1, hf.num_key_value_heads / tensor)  # per chip; vLLM repeats them where chips are more
    tokens = c.BATCH_SIZE * c.NUM_GENERATIONS * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)
    tokens /= rollout_mesh.shape["data"]
    cache = 2 * hf.num_hidden_layers * heads * hf.head_dim * itemsize * tokens / GIB
    return SimpleNamespace(
        taken=taken,
        weights=weights,
        cache=cache,
        least=math.ceil(100 * (taken + weights + cache) / limit) / 100,
        most=math.floor(100 * (taken + limit - peak) / limit) / 100 if trainer_chips else 1.0,
    )


def vllm_verdict(c, hf, parameters: int, rollout_mesh, trainer_chips: int, limit: float, peak: float) -> str:
    """Whether vLLM's share of a chip is large enough, in words; arguments as in `vllm_needs`.

    Raises:
        UserError: the share is too small for vLLM, or too large for training.
    """
    needs = vllm_needs(c, hf, parameters, rollout_mesh, trainer_chips, limit, peak)
    if needs.least > needs.most:
        raise UserError(
            f"{memory_remedy(c)}: vLLM's weights and a step's KV cache take "
            f"{needs.weights + needs.cache:.1f} of {limit} GiB per chip"
            + (f", training {peak:.1f} of the same" if trainer_chips else "")
        )
    share = f"HBM_UTILIZATION_VLLM={c.HBM_UTILIZATION_VLLM}"
    if not needs.least <= c.HBM_UTILIZATION_VLLM <= needs.most:
        raise UserError(
            f"{share}: of {limit} GiB per chip vLLM needs {needs.weights:.1f} for weights and "
            f"{needs.cache:.1f} for a step's KV cache, {needs.taken:.1f} are taken when it starts, training "
            f"takes {peak:.1f}; use {needs.least} to {needs.most}"
        )
    return f"vLLM needs {needs.weights:.1f} + KV cache {needs.cache:.1f}, {share} is enough"


def committed_peak(c, hf, name: str) -> float | None:
    """The TPU compiler's figure for this model and these constants, in FIT_FILES.

    Args:
        c: the constants of the run.
        hf: the checkpoint's config.
        name: of the slice.

    Returns:
        GiB per chip of the largest of the run's programs; None if they were not compiled.
    """
    same_sizes = {
        model
        for model, sizes in PUBLISHED.items()
        if all(getattr(hf, size) == sizes[size] for size in MODEL_SIZES)
    }
    defaults = settings.defaults(type(c), "tpu")
    ours = {constant: str(getattr(c, constant)) for constant in MEMORY_CONSTANTS}
    rows, peaks = [], []
    for file in FIT_FILES:
        with open(HERE / "assets" / file, newline="") as opened:
            rows += csv.DictReader(opened)
    for row in rows:
        theirs = {constant: str(defaults[constant]) for constant in MEMORY_CONSTANTS}
        theirs |= dict(argument.split("=") for argument in row["constants"].split())
        if theirs.pop("MODEL", LLAMA_3_1_8B) not in same_sizes:
            continue
        if (row["topology"], row["algorithm"]) == (name, "GRPO") and theirs == ours:
            peaks.append(float(row["peak"]))
    return max(peaks, default=None)


def memory_remedy(c) -> str:
    """The constant to change when memory is short: of those with room left, the least harmful."""
    if has_passes(c) and c.BATCH_SIZE * c.NUM_GENERATIONS <= FEW_SEQUENCES:
        return (
            f"TRAIN_MICRO_BATCH_SIZE={c.TRAIN_MICRO_BATCH_SIZE}, set 0 (accumulating costs another gradient)"
        )
    if c.TRAINER_DEVICES_FRACTION < 1 and c.ROLLOUT_ENGINE == "vllm":
        return (
            f"TRAINER_DEVICES_FRACTION={c.TRAINER_DEVICES_FRACTION}, set it and SAMPLER_DEVICES_FRACTION to "
            "1.0, or take a larger slice"
        )
    if c.BATCH_SIZE > 1:
        return f"BATCH_SIZE={c.BATCH_SIZE}, lower it, or take a larger slice"
    if c.WEIGHT_DTYPE == "float32":
        return "WEIGHT_DTYPE=float32, take a larger slice, or bfloat16 (which loses small updates)"
    return f"NUM_GENERATIONS={c.NUM_GENERATIONS}, lower it, or take a larger slice"
