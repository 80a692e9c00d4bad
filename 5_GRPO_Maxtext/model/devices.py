"""Assigns devices to training and generation, and coordinates several hosts.

With `jax.distributed` one process per host runs the same command with DISTRIBUTED=True. Every host
reads the same questions, samples the same answers and grades them all: that's cheap. Only the
model's arrays are sharded over the devices of all hosts, and each host places its own part of a
batch. The first host writes RUN_DIR, the others a folder host_<i> in it. All write the checkpoints
together, to a shared folder.
"""

import contextlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax.linen import partitioning as nn_partitioning
from jax.experimental import multihost_utils

import settings
from constants import RunConstants
from machines import (
    CARDS,
    CHIPS,
    OUTSIDE_JAX,
    OUTSIDE_JAX_OF_SEVERAL,
    OUTSIDE_JAX_ON_WSL,
    SPARE,
    TPU,
    Machine,
    parse_machine,
)
from model.versions import first_line
from settings import UserError

# %% GPU -------------------------------------------------------------------------------------------
# also in a container, also under Windows
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
# jax's packages for NVIDIA: the version of CUDA in them, and the oldest driver and compute
# capability that it works with (CUDA's release notes)
CUDA_PACKAGES = {"jax_cuda13_plugin": ("13", 580, 7.5), "jax_cuda12_plugin": ("12", 525, 5.0)}
# tokens, of a TPU's flash attention: a longer sequence has to be a multiple of it
FLASH_BLOCK = 512
PROC_VERSION = Path("/proc/version")  # "microsoft" is in it under WSL
SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the latter is older


def check_gpu(several: bool = False) -> None:
    """Opens the NVIDIA GPU, if there is one, with most of its memory for JAX; call it before jax is
    asked for its devices.

    `several`: the run has more GPUs than this process sees. Warns about an unused GPU, and refuses
    what JAX would silently train on the CPU: CUDA packages without a GPU, and a GPU that they can't
    use.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if "cpu" in platforms:
        return
    packages = next(filter(importlib.util.find_spec, CUDA_PACKAGES), None)
    gpu = any(map(os.path.exists, NVIDIA_DEVICES))
    if packages and not gpu:
        raise UserError(
            "JAX_PLATFORMS is not set, the CUDA packages are installed, and there is no NVIDIA "
            "GPU; install its driver (nvidia-smi shows the GPU), or set JAX_PLATFORMS=cpu"
        )
    if packages:
        share_memory(several)
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # jax has no such backend or device
        reason = first_line(error) if str(error) else "no such device is set up here"
        raise UserError(
            f"JAX_PLATFORMS={platforms}: {reason}; set JAX_PLATFORMS=cpu to use the CPU"
        ) from None
    if gpu and backend == "cpu" and packages:
        raise UserError(f"{why_unused(packages)}, or set JAX_PLATFORMS=cpu to train on the CPU")
    if gpu and backend == "cpu":
        print(
            "devices  the NVIDIA GPU here is not used: these packages are the CPU's; "
            "see `make demo-cuda`"
        )


def query_driver(*fields: str) -> list[list[str]]:
    """What nvidia-smi says about each GPU this process may use; empty if it doesn't answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


def why_unused(packages: str) -> str:
    """Why JAX can't use the GPU of this machine, with the remedy."""
    cuda, oldest, least = CUDA_PACKAGES[packages]
    driver, capability = (query_driver("driver_version", "compute_cap") or [["", ""]])[0]
    if not driver:
        with contextlib.suppress(OSError):
            numbers = re.findall(
                r"\d+\.[\d.]+", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
            )
            driver = numbers[0] if numbers else ""
    if driver and int(driver.partition(".")[0]) < oldest:
        return f"the NVIDIA driver is {driver}, CUDA {cuda} needs {oldest} or newer; update it"
    if capability and float(capability) < least:
        fault = f"compute capability {capability}, CUDA {cuda} needs {least} or higher"
        return f"the NVIDIA GPU has {fault}; use another GPU"
    known = f"driver {driver or 'unknown'}, CUDA {cuda} needs {oldest} or newer"
    return f"JAX can't use the NVIDIA GPU ({known}); see why with JAX_PLATFORMS=cuda"


def share_memory(several: bool) -> None:
    """Lets JAX take what each GPU has free, less what CUDA needs outside of JAX's share, unless the
    user chose a share. JAX by itself takes 75 %.

    `several`: other processes of this run may have begun to fill other GPUs. Raises UserError if
    other programs have the memory.
    """
    if wsl := "microsoft" in PROC_VERSION.read_text(encoding="utf-8").lower():
        # the default one gets no 4 GiB at once there (openxla/xla issue 48979)
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    if any(os.environ.get(name) for name in SHARE_NAMES):
        return
    try:
        rows = [list(map(float, row)) for row in query_driver("memory.free", "memory.used")]  # MiB
    except ValueError:  # "[N/A]": a GPU that shares the processor's memory
        return
    outside = OUTSIDE_JAX_OF_SEVERAL if several or len(rows) > 1 else OUTSIDE_JAX
    outside = max(outside, OUTSIDE_JAX_ON_WSL if wsl else 0)
    shares = []
    for free, used in rows:
        total = (free + used) / 1024
        left = total if several else free / 1024
        if left < outside + SPARE:
            raise UserError(
                f"the GPU has {left:.1f} of {total:.1f} GiB free; end the program that has the "
                "rest (nvidia-smi lists it), or set CUDA_VISIBLE_DEVICES to another GPU"
            )
        shares.append((left - outside) / total)
    if shares:  # XLA takes the same share of all
        os.environ[SHARE_NAMES[0]] = f"{min(shares):.3f}"


@contextlib.contextmanager
def on_mesh(mesh: jax.sharding.Mesh, axis_rules) -> Iterator[None]:
    """Makes jax use the mesh and MaxText's axis rules inside the block."""
    with mesh, nn_partitioning.axis_rules(axis_rules):
        yield


def machine_for(c: RunConstants) -> Machine:
    """The run's machine: MACHINE or this one. On a CPU, a large model's dry run assumes a TPU."""
    if named := parse_machine(c.MACHINE):
        return named
    device, count, platform = jax.devices()[0], jax.device_count(), jax.default_backend()
    name = device.device_kind
    if platform == "tpu":
        family = next((family for family, chip in CHIPS.items() if name in chip.kinds), "v6e")
        return parse_machine(f"{family}-{count * CHIPS[family].counts}")
    if platform == "gpu":
        card = next((card for card, row in CARDS.items() if row["name"] == name), "")
        name = f"{count}x" * (count > 1) + (card or name)
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)  # JAX's share
        gib = limit / 2**30 - SPARE if limit else getattr(parse_machine(name), "gib", 0.0)
        return Machine(platform, name, float(device.compute_capability), card, count, gib)
    return (
        TPU
        if c.DRY_RUN and not settings.is_small(c.MODEL)
        else Machine(platform, name, chips=count)
    )


def attention_fault(c: RunConstants, machine: Machine) -> str:
    """Why a machine can't run ATTENTION, with the remedy; empty if it can.

    MaxText (0.2.5, layers/attention_op.py) decodes with `dot_product`, and with `autoselected`,
    which uses flash attention for sequences of 128 tokens or more. On a TPU, decoding with `flash`
    raises; on a GPU it falls back to `dot_product`.
    """
    flash, may_flash = c.ATTENTION == "flash", c.ATTENTION != "dot_product"
    length = c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS
    if machine.platform == "cpu" and flash:
        return "there is no such kernel for the CPU of this machine; use dot_product"
    if machine.platform == "gpu" and may_flash and machine.capability < 8:
        return (
            f"needs compute capability 8.0, {machine.name} has {machine.capability}; "
            "use dot_product"
        )
    if machine.platform == "tpu" and flash and c.ROLLOUT_ENGINE == "maxtext":
        return "it can't decode, and ROLLOUT_ENGINE=maxtext decodes with it; use autoselected"
    if machine.platform == "tpu" and may_flash and length > FLASH_BLOCK and length % FLASH_BLOCK:
        return (
            f"flash attention has blocks of {FLASH_BLOCK} tokens, and TOTAL_GENERATION_STEPS="
            f"{c.TOTAL_GENERATION_STEPS} with MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH} is {length}; "
            f"make it a multiple of {FLASH_BLOCK}, or use dot_product"
        )
    return ""


def check_machine(c: RunConstants) -> None:
    """Refuses what this machine, or MACHINE, can't do, and warns of slow setups; before any
    download.
    """
    if fault := attention_fault(c, machine_for(c)):
        raise UserError(f"ATTENTION={c.ATTENTION}: {fault}")
    if c.ROLLOUT_ENGINE == "vllm" and jax.process_count() > 1:
        raise UserError(
            f"ROLLOUT_ENGINE=vllm: {jax.process_count()} hosts run this script, and vLLM's engine "
            "lives in one; use a TPU VM of one host (v5p-8, v6e-8), Pathways "
            "(JAX_PLATFORMS=proxy), or ROLLOUT_ENGINE=maxtext"
        )
    alone = c.ROLLOUT_ENGINE == "maxtext" and c.TRAINER_TENSOR_PARALLEL == 1
    if alone and jax.device_count() > 1 and not settings.is_small(c.MODEL) and is_first():
        print(
            f"machine  slow: ROLLOUT_ENGINE=maxtext splits the weights over {jax.device_count()} "
            "devices; a TPU gathers them for every token, vLLM gathers none, "
            "TRAINER_TENSOR_PARALLEL=n (a divisor of MODEL's key/value heads) 1/n of them"
        )


# %% Several hosts ---------------------------------------------------------------------------------
VLLM_LIBTPU_FLAG = "--xla_tpu_use_dynamic_smem_negotiation=true"


def find_devices(c: RunConstants) -> None:
    """Joins the other hosts, if any. Must run before anything touches a device.

    Under Pathways one process drives the chips of all hosts; with DISTRIBUTED each host runs a
    process.
    """
    if importlib.util.find_spec("tpu_info"):
        import tpu_info  # noqa: F401 - vLLM imports it, which starts processes; must precede opening the TPU
    if c.ROLLOUT_ENGINE == "vllm" and importlib.util.find_spec("tpu_inference"):
        # tpu-inference 0.32 sets it itself when it's imported, but libtpu has read it by then
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{VLLM_LIBTPU_FLAG} {given}".strip()
    if "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        import pathwaysutils

        pathwaysutils.initialize()
    if c.DISTRIBUTED:
        join()
    check_gpu(several=c.DISTRIBUTED)


def join() -> None:
    """Joins the other hosts. Call it before asking jax for its devices.

    On a TPU slice, under SLURM (launch/slurm.sh: one GPU per task) and Open MPI, jax finds the
    others itself. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES
    and JAX_PROCESS_ID.
    """
    names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    try:
        from_environment = {
            key: int(os.environ[name]) for key, name in names.items() if name in os.environ
        }
        jax.distributed.initialize(**from_environment)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"DISTRIBUTED=True: jax does not find the other hosts ({first_line(error)}); set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID on each, "
            "or DISTRIBUTED=False"
        ) from None


def is_first() -> bool:
    """Whether this process writes the report and talks to the terminal."""
    return jax.process_index() == 0


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
    """Silences all hosts but the first while the block runs."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(sys.stdout if is_first() else nowhere),
    ):
        yield


def tqdm_disabled() -> bool | None:
    """For tqdm's `disable`: True on all hosts but the first; None hides the bar if there's no
    terminal.
    """
    return None if is_first() else True


def broadcast_from_first(number: int) -> int:
    """Broadcasts the first host's number, below 2^32, to all hosts."""
    return int(multihost_utils.broadcast_one_to_all(np.uint32(number)))


def all_agree(here: bool) -> bool:
    """Whether `here` is true on every host. If one host decided alone, the others would wait
    forever.
    """
    return bool(np.all(multihost_utils.process_allgather(np.bool_(here))))


# %% Trainer and sampler ---------------------------------------------------------------------------
def plan_devices(c: RunConstants, hf, devices: list) -> tuple[list, jax.sharding.Mesh | None]:
    """The trainer's devices, and vLLM's mesh with the axes ("data", "model"), or None if MaxText
    generates.

    With vLLM the first TRAINER_DEVICES_FRACTION train and the last SAMPLER_DEVICES_FRACTION
    generate. All devices do both with rollout.py (it decodes with the trainer's own weights), on a
    single device, or if both fractions are 1.0. The heads in the checkpoint's config `hf` are
    sharded among the chips, too.
    """
    vllm, trainer, sampler = c.ROLLOUT_ENGINE == "vllm", devices, devices
    if vllm and len(devices) > 1:
        shares = {
            name: getattr(c, name)
            for name in ("TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION")
        }
        for name, share in shares.items():
            count = share * len(devices)
            if not math.isclose(count, round(count), abs_tol=1e-6):
                raise UserError(
                    f"{name}={share}: of {len(devices)} devices that is {count:.4g}; use a "
                    f"multiple of 1/{len(devices)}"
                )
        trains, generates = (round(share * len(devices)) for share in shares.values())
        if len(devices) < trains + generates < 2 * len(devices):
            raise UserError(
                f"{' and '.join(f'{name}={share}' for name, share in shares.items())} add up to "
                "more than 1; lower one, or set both to 1.0 to share all devices"
            )
        trainer, sampler = devices[:trains], devices[-generates:]
    heads, kv = hf.num_attention_heads, hf.num_key_value_heads
    tensor, copies = c.TRAINER_TENSOR_PARALLEL, c.SAMPLER_DATA_PARALLEL
    fsdp, chips = max(1, len(trainer) // tensor), max(1, len(sampler) // copies)
    sequences = (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE) * c.NUM_GENERATIONS
    # tpu-inference 0.32 pads such heads with zeros, and its norms average over the padding, too
    padded = hf.model_type == "qwen3" and hf.head_dim != 64 and hf.head_dim % 128
    rules = [  # whether it's refused, why and what to do
        (
            len(trainer) % tensor or kv % tensor,
            f"TRAINER_TENSOR_PARALLEL={tensor}: must divide the "
            f"{len(trainer)} devices that train and the {kv} key/value heads of MODEL",
        ),
        (
            sequences % fsdp,
            f"BATCH_SIZE={c.BATCH_SIZE}: the {sequences} sequences of a gradient pass, "
            f"(TRAIN_MICRO_BATCH_SIZE={c.TRAIN_MICRO_BATCH_SIZE} or BATCH_SIZE) x NUM_GENERATIONS="
            f"{c.NUM_GENERATIONS}, must divide evenly among {fsdp} devices; change one",
        ),
        (
            vllm and padded,
            "ROLLOUT_ENGINE=vllm: its engine answers wrongly with a Qwen3 whose head_dim is "
            f"{hf.head_dim}; 64 and multiples of 128 are right, or set ROLLOUT_ENGINE=maxtext",
        ),
        (
            vllm and len(sampler) % copies,
            f"SAMPLER_DATA_PARALLEL={copies}: must divide the {len(sampler)} devices that generate",
        ),
        # vLLM repeats too few key/value heads
        (
            vllm and (heads % chips or (kv % chips and chips % kv)),
            f"SAMPLER_DATA_PARALLEL={copies}: leaves "
            f"{chips} chips to a copy of the model; that must divide the {heads} heads of MODEL, "
            f"and divide its {kv} key/value heads or be a multiple of them",
        ),
    ]
    for refused, message in rules:
        if refused:
            raise UserError(message)
    if not vllm:
        return trainer, None
    return trainer, jax.sharding.Mesh(np.array(sampler).reshape(copies, chips), ("data", "model"))
