"""The machine a run is for, and the defaults that depend on it. Nothing here imports jax.

The large column of the constants is for a TPU with vLLM. `machine_defaults` adapts it to another
machine or engine; only this file decides engine, attention, dtype and batch.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ASSETS = HERE / "assets"


class Machine(NamedTuple):
    """The machine a run is planned for, which also sets a large model's defaults."""

    platform: str  # "cpu", "gpu" or "tpu"
    name: str  # of a slice or of cards, "v6e-8", "t4", "8xh100"; otherwise jax's name
    capability: float = 0.0  # of an NVIDIA card
    kind: str = ""  # key of CHIPS or CARDS
    chips: int = 0
    gib: float = 0.0  # per chip; of a card, without OUTSIDE_JAX and SPARE


class Chip(NamedTuple):
    """A kind of TPU chip you can plan a run for without having one."""

    gib: float  # memory a program may use, as the compiler enforces it
    kinds: tuple[str, ...]  # jax's device_kind
    counts: int = 1  # how often a slice's name counts a chip: v5p-8 has 8 cores on 4 chips
    flops: float = 0.0  # bfloat16, per second: Google's data sheet
    bandwidth: float = 0.0  # of its memory, bytes per second: the same
    links: float = 0.0  # to the other chips, bytes per second: the same (3,584 and 4,800 Gbit/s)
    dollars: float = 0.0  # per hour on demand in the US (Google's list, 2026); spot costs less


TPU = Machine("tpu", "TPU")
CHIPS = {
    "v5e": Chip(15.75, ("TPU v5 lite",)),
    "v6e": Chip(31.24, ("TPU v6 lite",), 1, 918e12, 1638e9, 448e9, 2.70),
    "v5p": Chip(95.73, ("TPU v5p", "TPU v5"), 2, 459e12, 2765e9, 600e9, 4.20),
}
# GiB of a card that JAX leaves alone: CUDA's context, cuBLAS and cuDNN, loaded kernels, a display
OUTSIDE_JAX = 1.5
OUTSIDE_JAX_OF_SEVERAL = 3.0  # the same with NCCL, which several cards talk through
OUTSIDE_JAX_ON_WSL = 2.5  # Windows takes memory back for the desktop and its other programs
SPARE = 1.0  # GiB of JAX's share that a run's plan leaves free: the share gets fragmented


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, by the names in its first line."""
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


CARDS = {row["card"]: row for row in rows_of(HERE / "cards.csv")}


def compiled(machine: str, files: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """What tools/fit_check.py wrote to these files of assets/ about a machine, by the run's
    constants.

    A row for each program of GRPO; without the cases still to be compiled, and vLLM's step, which
    has a share of its own.
    """
    rows_by_constants = {}
    for row in (row for file in files for row in rows_of(ASSETS / file)):
        ours = (row["machine"], row["algorithm"]) == (machine, "GRPO") and row["program"] != "vllm"
        if ours and row["peak"]:
            rows_by_constants.setdefault(row["constants"], []).append(row)
    return rows_by_constants


def parse_machine(name: str) -> Machine | None:
    """A TPU slice, an NVIDIA card, or several ("8xh100"); None if there's no such machine."""
    count, card = re.fullmatch(r"(?s)(?:([1-9]\d*)x)?(.*)", name).groups()
    if row := CARDS.get(card):
        chips = int(count or 1)
        outside = OUTSIDE_JAX if chips == 1 else OUTSIDE_JAX_OF_SEVERAL
        gib = round(int(row["device_memory_size"]) / 2**30 - outside - SPARE, 2)
        return Machine("gpu", name, float(row["capability"]), card, chips, gib)
    family, _, cores = name.partition("-")
    chips = int(cores) // CHIPS[family].counts if family in CHIPS and cores.isdecimal() else 0
    return Machine("tpu", name, 0.0, family, chips, CHIPS[family].gib) if chips else None


# Questions per step by default: the most, of the powers of two up to 64, that fit `Machine.gib`; 0
# if not even one does. From assets/fit_cards.csv, as a test checks.
BATCH_SIZES = {
    "rtx4060": (0, 0, 0, 0, 0, 0),
    "rtx4070": (2, 0, 0, 0, 0, 0),
    "t4": (2, 0, 0, 0, 0, 0),
    "l4": (8, 4, 16, 0, 0, 0),
    "rtx4090": (8, 4, 16, 0, 0, 0),
    "rtx3090": (8, 4, 16, 0, 0, 0),
    "a100-40": (16, 8, 32, 32, 0, 0),
    "a100-80": (32, 32, 64, 64, 4, 0),
    "h100": (32, 32, 64, 64, 4, 0),
    "h200": (64, 64, 64, 64, 32, 0),
    "8xh100": (64, 64, 64, 64, 32, 32),
}
BATCH_SIZE_COLUMNS = (  # MODEL, and whether it's trained with LoRA
    ("Qwen/Qwen3-0.6B", True),
    ("Qwen/Qwen3-0.6B", False),
    ("meta-llama/Llama-3.2-1B-Instruct", True),
    ("meta-llama/Llama-3.2-1B-Instruct", False),
    ("meta-llama/Llama-3.1-8B-Instruct", True),
    ("meta-llama/Llama-3.1-8B-Instruct", False),
)


def compiled_batch_size(machine: Machine, model: str, lora: bool) -> tuple[int, str]:
    """The largest BATCH_SIZE that was compiled for NVIDIA cards like these, and for which cards; 0
    and "" if there's none.

    It's that of the row in BATCH_SIZES for the same cards, or else for the next smaller ones: with
    no more memory and no more cards, and without bfloat16 if `machine` has none.
    """
    if (model, lora) not in BATCH_SIZE_COLUMNS:
        return 0, ""
    column, found = BATCH_SIZE_COLUMNS.index((model, lora)), [(0, False, 0.0, "")]
    for name, sizes in BATCH_SIZES.items():
        card = parse_machine(name)
        room = machine.gib + SPARE / 2  # what shows the desktop can leave the same card a bit less
        if card.chips == 1 < machine.chips:  # several split the weights, which makes up for NCCL
            room += OUTSIDE_JAX_OF_SEVERAL - OUTSIDE_JAX
        fits = card.gib <= room and card.chips <= machine.chips
        if sizes[column] and fits and (machine.capability >= 8 or card.capability < 8):
            found.append((sizes[column], name == machine.name, card.gib, name))
    size, _, _, name = max(found)
    return size, name


def machine_defaults(machine: Machine, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """How a machine changes the large column: the new value of each changed constant, and why.

    `given` are the constants set by the user, as text or as values.
    """
    if machine.platform != "gpu":
        kernel = "autoselected" if machine.platform == "tpu" else "dot_product"
        ours = given.get("ROLLOUT_ENGINE") == "maxtext"
        return {"ATTENTION": (kernel, "flash can't decode")} if ours else {}
    model, lora = str(given.get("MODEL", "")).partition("@")[0], str(given.get("LORA_RANK", 32))
    size, card = compiled_batch_size(machine, model, lora != "0")
    why = "the largest that fits" if card == machine.name else f"as for {card}, the next smaller"
    defaults = {
        "ROLLOUT_ENGINE": ("maxtext", "vLLM's packages here are the TPU's"),
        "ATTENTION": ("dot_product", "runs on every card"),
        "TRAIN_MICRO_BATCH_SIZE": (1, "the smallest pass"),
        "BATCH_SIZE": (size, why) if size else (1, "no batch of this MODEL is known to fit"),
    }
    if machine.capability < 8:
        defaults["DTYPE"] = ("float32", "no bfloat16 units")
    return defaults
