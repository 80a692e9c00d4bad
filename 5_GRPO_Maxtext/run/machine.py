"""The machine a run is for, and the default values that follow from it. Nothing here imports jax.

The tpu column of the constants is for a large model on a TPU where vLLM generates. `changes` says what
another machine, or another engine, makes of it: engine, attention, dtype and batch are decided only here.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
FITS = FOLDER.parent / "assets" / "fit_cards.csv"  # what was compiled for NVIDIA cards: tools/fit_check.py
FLASH_BLOCK = 512  # tokens, of a TPU's flash attention: a longer sequence has to be a multiple of it


class Machine(NamedTuple):
    """What the default values of a large model are chosen for."""

    platform: str  # "cpu", "gpu" or "tpu"
    name: str  # of a slice or of cards, "v6e-8", "t4", "8xh100"; of another one what jax calls it
    capability: float = 0.0  # of an NVIDIA card


TPU = Machine("tpu", "TPU")


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, by the names in its first line."""
    with open(path, newline="") as file:
        yield from csv.DictReader(file)


CARDS = {row["card"]: row for row in rows_of(FOLDER / "cards.csv")}


def named(name: str) -> Machine | None:
    """A TPU slice, an NVIDIA card, or several ("8xh100"); None if there's no such machine."""
    card = re.sub(r"^[1-9]\d*x", "", name)
    if card in CARDS:
        return Machine("gpu", name, float(CARDS[card]["capability"]))
    return Machine("tpu", name) if re.fullmatch(r"v(5e|5p|6e)-[1-9]\d*", name) else None


def compiled_for(machine: Machine, model: str, rank: str) -> dict[str, str]:
    """The constants of the largest batch that FITS says fits; empty if that wasn't compiled.

    Args:
        machine: cards.
        model: MODEL, without its revision.
        rank: LORA_RANK.
    """
    left = {}
    for row in rows_of(FITS) if FITS.exists() else ():
        if row["machine"] == machine.name and row["algorithm"] == "GRPO":
            left.setdefault(row["constants"], []).append(float(row["left"] or "-inf"))
    runs = [dict(word.split("=") for word in text.split()) for text, gib in left.items() if min(gib) >= 0]
    ours = [run for run in runs if (run.get("MODEL"), run.get("LORA_RANK")) == (model, rank)]
    return max(ours, key=lambda run: int(run["BATCH_SIZE"]), default={})


def changes(machine: Machine, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What a machine makes of the tpu column: the value of each constant it changes, and why.

    Args:
        machine: that the run is for.
        given: the constants that were set, as text or as values.
    """
    if machine.platform == "gpu":
        found = {
            "ROLLOUT_ENGINE": ("maxtext", "vLLM's packages here are the TPU's"),
            "ATTENTION": ("dot_product", "runs on every card"),
            "TRAIN_MICRO_BATCH_SIZE": (1, "the smallest pass"),
        }
        if machine.capability < 8:
            found["DTYPE"] = ("float32", "no bfloat16 units")
        model, rank = (str(given.get(name, other)) for name, other in (("MODEL", ""), ("LORA_RANK", 32)))
        if compiled := compiled_for(machine, model.partition("@")[0], rank):
            found["BATCH_SIZE"] = compiled["BATCH_SIZE"], "the largest that fits, as compiled"
        return found
    if given.get("ROLLOUT_ENGINE") == "maxtext":
        kernel = "autoselected" if machine.platform == "tpu" else "dot_product"
        return {"ATTENTION": (kernel, "flash can't decode")}
    return {}


def picked(machine: Machine, arguments: list[str]) -> str:
    """What `changes` decided for a command line, in one line; empty if it decided nothing."""
    given = dict(argument.split("=", 1) for argument in arguments)
    found = {name: value for name, value in changes(machine, given).items() if name not in given}
    reasons = ", ".join(f"{name}={value} ({why})" for name, (value, why) in found.items())
    return f"machine  {machine.name}: {reasons}" if reasons else ""


def attention_fault(c, machine: Machine) -> str:
    """Why a machine can't run ATTENTION, with the remedy; empty if it can.

    MaxText (0.2.5, layers/attention_op.py) decodes with `dot_product`, and with `autoselected`, which takes
    flash attention for sequences of 128 tokens or more. On a TPU `flash` raises when it is to decode; on a
    GPU it decodes as `dot_product` does.
    """
    flash, may_flash = c.ATTENTION == "flash", c.ATTENTION != "dot_product"
    length = c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS
    if machine.platform == "cpu" and flash:
        return "there is no such kernel for the CPU of this machine; use dot_product"
    if machine.platform == "gpu" and may_flash and machine.capability < 8:
        return f"needs compute capability 8.0, {machine.name} has {machine.capability}; use dot_product"
    if machine.platform == "tpu" and flash and c.ROLLOUT_ENGINE == "maxtext":
        return "it can't decode, and ROLLOUT_ENGINE=maxtext decodes with it; use autoselected"
    if machine.platform == "tpu" and may_flash and length > FLASH_BLOCK and length % FLASH_BLOCK:
        return (
            f"flash attention has blocks of {FLASH_BLOCK} tokens, and TOTAL_GENERATION_STEPS="
            f"{c.TOTAL_GENERATION_STEPS} with MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH} is {length}; make it a "
            f"multiple of {FLASH_BLOCK}, or use dot_product"
        )
    return ""
