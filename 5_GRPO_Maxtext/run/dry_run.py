"""DRY_RUN=True: will the run start, and will it fit? Checks everything it can without training.

Versions, model, access and tokenizer, data, prompt lengths, rewards, paths, disk, the chips against
the mesh, memory and vLLM's share of it. It writes nothing. You can plan the 8 B job on any machine,
in 8 s on one core:

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DRY_RUN=True \
        MODEL=meta-llama/Llama-3.1-8B-Instruct
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import huggingface_hub
import jax
import numpy as np

import settings
from constants import RunConstants
from machines import CHIPS
from model import devices, llama, versions
from run import checkpoints, checks, memory, run_files, run_folder, start
from settings import UserError, find_path, reachable
from task import questions


def dry_run(c: RunConstants, arguments: Sequence[str], course: ModuleType, tables) -> None:
    """Checks everything it can without training, prints what would happen, and changes nothing.

    On a machine that couldn't train the model, it checks chips against memory.SLICES and reports
    disk and packages as unchecked. `course` is reward_func.py.
    """
    try:
        devices.find_devices(c)
    except UserError as error:
        if on_target(c):
            raise
        print(f"hosts    unchecked ({error})")
    with contextlib.suppress(UserError):  # `find_model` names what's wrong with MODEL
        llama.fetch_model(c.MODEL, weights=False)
    c = start.for_this_machine(c, arguments)
    start.prepare(c, tables)
    with devices.only_first_prints():
        if on_target(c):
            checks.rollout_engine(c)
        print(f"versions {', '.join(map(' '.join, versions.VERSIONS.items()))}: as needed")
        folder, hf, source = find_model(c.MODEL, on_target(c))
        c = dataclasses.replace(c, MODEL=llama.pinned(c.MODEL, folder) if folder else c.MODEL)
        config = llama.to_run_config(c, hf, ici_fsdp_parallelism=1, ici_tensor_parallelism=1)
        model, _ = llama.abstract_model(hf, config, jax.devices()[:1])
        parameters = llama.count_parameters(model)  # nothing was allocated
        print(
            f"model    {source}\n         {parameters:,} parameters, {hf.num_hidden_layers} "
            f"layers, {c.DTYPE} over {c.WEIGHT_DTYPE}"
        )
        check_data(c, hf, folder and llama.load_tokenizer(folder), course)
        sequences = c.BATCH_SIZE * c.NUM_GENERATIONS
        tokens = sequences * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)
        passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
        print(
            f"step     {c.BATCH_SIZE} prompts x {c.NUM_GENERATIONS} answers = {sequences} "
            f"sequences, up to {tokens:,} tokens, in {passes} gradient pass(es)\n"
            f"run      {c.NUM_BATCHES:,} steps, {c.NUM_BATCHES * c.NUM_ITERATIONS:,} updates, "
            f"{c.NUM_BATCHES * sequences:,} answers"
        )
        check_paths(c, hf, memory.trained_parameters(c, hf, parameters))
        fits = memory.plan_memory(c, hf, parameters)
        for name, kind, chips in (("v6e-8", "v6e", 8), ("v5p-8", "v5p", 4)):
            if (
                c.LORA_RANK
                and c.ROLLOUT_ENGINE == "vllm"
                and name in fits.partition("does not fit")[0]
            ):
                low, high = both = sum(hours(c, parameters, kind, chips).values())
                least, most = CHIPS[kind].dollars * chips * both
                price = f"{low:.1f} to {high:.1f} h, {least:.0f} to {most:.0f} dollars on demand"
                print(f"cost     {name}: {price}, by the formula in run/dry_run.py")
    print(f"dry run  nothing but memory can stop the run ({fits}); nothing was written")


def on_target(c: RunConstants) -> bool:
    """Whether this machine could train the model: any for a small one, else a TPU or GPU."""
    return not c.MACHINE and (settings.is_small(c.MODEL) or jax.default_backend() != "cpu")


def find_model(model: str, weights: bool):
    """Finds MODEL's config and tokenizer without downloading its weights.

    With `weights`, a local folder must contain the weights and the tokenizer, as for a real run.
    Returns the folder with the tokenizer (None: out of reach), the config, and where that came
    from.
    """
    local, config = find_path(model).is_dir(), settings.config_path(model)
    if not local and reachable(huggingface_hub.constants.ENDPOINT):
        return (*llama.fetch_model(model, weights=False), f"{model}, from the Hugging Face hub")
    if not config:  # it isn't in the hub's cache
        if published := memory.published_config(model):
            note = (
                "the hub is out of reach; published sizes from here, access and tokenizer unchecked"
            )
            return None, published, f"{model}: {note}"
        fault = "no such folder, and the Hugging Face hub is out of reach; give a folder"
        raise UserError(f"MODEL={model}: {fault}")
    folder, hf = llama.fetch_model(str(config.parent), weights)
    patterns = {"weights": "*.safetensors", "tokenizer": "tokenizer*.json"}
    missing = [
        name for name, pattern in patterns.items() if not (weights or list(folder.glob(pattern)))
    ]
    source = str(folder) if local else f"{model}, downloaded earlier to {folder}"
    unchecked = f": no {' and no '.join(missing)} in it, unchecked" if missing else ""
    return (None if "tokenizer" in missing else folder), hf, source + unchecked


def check_data(c: RunConstants, hf, tokenizer, course: ModuleType) -> None:
    """Checks questions and rewards, and prints how many there are; `tokenizer` None is out of
    reach.
    """
    data = {}
    try:
        data = questions.read_data(c)
    except questions.OutOfReach as error:
        if on_target(c):
            raise
        print(f"data     unchecked ({error})")
    grader = start.checked_grader(c, hf, tokenizer, course, data)
    if c.ENVIRONMENT:
        print(f"episodes {c.ENVIRONMENT}, at most {c.MAX_TURNS} turns")
    rows, sources = start.make_splits(c, data, grader, tokenizer)
    questions.print_overlap(rows)
    lengths = (
        f"at most {c.MAX_PROMPT_LENGTH} tokens" if tokenizer else "lengths unchecked (no tokenizer)"
    )
    for split, asked in rows.items():
        print(f"data     {split}: {len(asked):,} questions of {sources[split]}, {lengths}")
    print(f"rewards  {grader}")


def check_paths(c: RunConstants, hf, trained: int) -> None:
    """Checks that RUN_DIR and CHECKPOINT_DIR are writable and hold `trained` parameters."""
    folder = Path(c.RUN_DIR or "runs")
    if (folder / "constants.json").exists():
        run_folder.check_same_constants(c, run_files.read_constants(folder), folder)
    for constant, path in {"RUN_DIR": str(folder), "CHECKPOINT_DIR": c.CHECKPOINT_DIR}.items():
        place = memory.existing(Path(path))
        if path.startswith("gs://"):
            checkpoints.check_bucket(path)
        elif path and not (place.is_dir() and os.access(place, os.W_OK)):
            fault = f"{place} is not a folder one may write to; choose another"
            raise UserError(f"{constant}={Path(path)}: {fault}")
    size = memory.checkpoint_bytes(c, trained) / memory.GIB
    count = -(-c.NUM_BATCHES // c.SAVE_INTERVAL_STEPS)
    print(
        f"saves    {count:,} checkpoints of {size:.3g} GiB, the last {c.MAX_TO_KEEP} kept: "
        f"{size * c.MAX_TO_KEEP:.3g} GiB in {c.CHECKPOINT_DIR or folder}, and one more while it's "
        f"written: {size * (c.MAX_TO_KEEP + 1):.3g} GiB"
    )
    if on_target(c):
        start.check_disk(c, hf)


# %% Hours and dollars -----------------------------------------------------------------------------
# Arrays are [optimistic, pessimistic].
# tokens per second and v6e chip, Llama 3.1 8B: the floor in tpu-inference's own tests
DECODED = 1400
ANSWER = 200  # tokens: verl's 8 B runs on GSM8K have 154 to 199 on average
BATCH = 256  # answers vLLM decodes at a time: its default (max_num_seqs) for a chip it doesn't know
BYTES = 2  # per gathered or sent weight: bfloat16
# per weight and token: forward, recomputation, gradient of the activations, reference; 2 each
FLOPS = 8
# of all weights per pass: forward, recomputation, backward; then the reference's
GATHERS = np.array([3, 4])
# of `flops`: MaxText's pre-training on v6e; half, for small passes
PEAK_SHARE = np.array([0.45, 0.225])
LINK_SHARE = np.array([1.0, 0.5])  # of `links`: assumed
# seconds per step: public reports for 0.6 B on v7x and for 30 B on v5p-8
SYNC = np.array([6.7, 22.0])
# minutes: packages 3 to 8, download 2 to 7, conversion 3 to 5, vLLM's
START = np.array([20.0, 45.0])
# precompilation 10 to 20 (public reports), the step's programs 2 to 5; all but the precompilation
# assumed


def hours(c: RunConstants, parameters: int, kind: str, chips: int) -> dict[str, np.ndarray]:
    """Hours by part, [optimistic, pessimistic], on `chips` chips of a `kind` in CHIPS with known
    speed.

    By a formula for LoRA on one host, with vLLM on the training chips, of which nothing was
    measured. The optimistic end hides the transfers of weights behind the arithmetic and keeps
    vLLM's batch full.
    """
    chip = CHIPS[kind]
    # Decoding is memory-bound, by the weights mostly.
    rate = DECODED * chip.bandwidth / CHIPS["v6e"].bandwidth * chips * 8.03e9 / parameters

    def sampling(answers: int) -> np.ndarray:
        """Seconds: all slots busy with average answers, or every wave as long as the longest
        answer.
        """
        longest = math.ceil(answers / BATCH) * c.TOTAL_GENERATION_STEPS * BATCH / rate
        return np.array([min(answers * ANSWER / rate, longest), longest])

    sequences = c.BATCH_SIZE * c.NUM_GENERATIONS
    tokens = sequences * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)  # padded
    compute = tokens * FLOPS * parameters / (chips * chip.flops * PEAK_SHARE)
    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    moved = parameters * BYTES * (chips - 1) / chips  # bytes that a chip receives per gather
    gather = passes * GATHERS * moved / chip.links / LINK_SHARE
    looks = 1 + math.ceil(c.NUM_BATCHES / c.EVAL_EVERY) if c.EVAL_EVERY else 0
    seconds = {
        "sampling": c.NUM_BATCHES * sampling(sequences),
        "training": c.NUM_BATCHES * np.array([max(compute[0], gather[0]), compute[1] + gather[1]]),
        "weight sync": c.NUM_BATCHES * SYNC,  # evaluations: greedy and sampled each time
        "evaluations": 4 * sampling(c.NUM_TEST_QUESTIONS) + 2 * looks * sampling(c.EVAL_QUESTIONS),
        "start": 60 * START,
    }
    return {part: ends / 3600 for part, ends in seconds.items()}
