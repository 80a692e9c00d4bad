"""Will it fit, before you rent it: compiles the main script's own training step for TPUs that are not here.

The TPU compiler (libtpu, a Python package) runs on any Linux machine and says how much memory of a chip a
program takes. It compiles what the main script runs, with its constants: MaxText's Llama under Tunix's
adapter, and the main script's `update`. Three programs, since any of them may be the one that does not fit:

    step        an optimizer update with all its gradient passes, beside the frozen reference
    reference   log-probs of the answers under the reference, beside actor and optimizer
    sync        the new weights in vLLM's layout and dtype (Tunix does it op by op: a lower bound)

It cannot tell speed, numerics, or what the runtime itself takes. ALGORITHM=PPO adds a critic as large as the
actor, and its optimizer, to what is in memory beside the step: what GRPO saves.

    make fit-setup                                                   # .venv-fit, with libtpu
    make fit-check                                                   # TABLE and LARGEST, written to assets/
    F=".venv-fit/bin/python 5_GRPO_Maxtext/tool.py tpu_fit_check"
    $F                                                               # all of TABLE, printed
    $F TOPOLOGIES=v6e-8 BATCH_SIZE=1
    $F TOPOLOGIES=v5e-1 MODEL=Qwen/Qwen3-0.6B LARGEST=True

The last two forms take every constant of the main script. On one core of an AMD EPYC a step that
fits takes about 45 s, one that does not 5 s.
"""

import contextlib
import csv
import importlib.metadata
import os
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

# Before jax is imported: run on the CPU, and let libtpu compile without looking for a chip or a cloud.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5p-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_LOG_DIR="disabled",
)

import settings  # before jax: sets XLA's flags  # isort: skip
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen import partitioning as nn_partitioning
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.utils import accelerator_to_spec_map, maxtext_utils, model_creation_utils
from tunix.generate.utils import transfer_state_with_mappings

import grpo_llama3_1_8b_demo as demo
from model import devices, llama, lora, versions
from model.log_probs import log_probs_of_state
from run import checks, dry_run, memory
from run.memory import GIB
from settings import UserError


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(demo.Constants):
    """This tool's own; all of the main script's stand beside them."""

    MODEL: str = memory.LLAMA_3_1_8B  # Hugging Face name or folder; those in memory.PUBLISHED need no network
    TOPOLOGIES: str = "v5p-8,v6e-8,v5p-64"  # Google's names; v5p counts two cores per chip: v5p-8 has 4 chips
    ALGORITHM: Literal["GRPO", "PPO"] = "GRPO"  # PPO: with a critic and its optimizer
    LARGEST: bool = False  # True: the most answers per gradient pass that fit, by halving; the step alone
    WRITE: bool = False  # True: all of TABLE (with LARGEST: of RUNGS) to assets/; takes no other constant


# The table of docs/tpu_and_gpu.md: topology, algorithm, constants other than the defaults of the TPU column.
FULL = ("LORA_RANK=0", "BATCH_SIZE=2", "TRAIN_MICRO_BATCH_SIZE=0")  # all weights, in one gradient pass
ON_32 = ("LORA_RANK=0", "BATCH_SIZE=8", "TRAIN_MICRO_BATCH_SIZE=0")  # sequences divide evenly among the chips
TABLE = [
    ("v5p-8", "GRPO", ()),
    ("v6e-8", "GRPO", ()),
    ("v5p-8", "GRPO", FULL),
    ("v6e-8", "GRPO", FULL),
    ("v5p-64", "GRPO", ON_32),
    # Half of the chips train; gradients accumulated prompt by prompt.
    ("v5p-8", "GRPO", (*FULL, "TRAINER_DEVICES_FRACTION=0.5", "SAMPLER_DEVICES_FRACTION=0.5")),
    ("v6e-8", "GRPO", ("LORA_RANK=0", "BATCH_SIZE=2", "TRAIN_MICRO_BATCH_SIZE=1")),
    # What a critic would cost.
    ("v5p-8", "PPO", FULL),
    ("v6e-8", "PPO", FULL),
    ("v5p-64", "PPO", ON_32),
    # 8 bytes per parameter: bfloat16 everywhere.
    ("v5p-8", "GRPO", (*FULL, "WEIGHT_DTYPE=bfloat16")),
    ("v5p-8", "PPO", (*FULL, "WEIGHT_DTYPE=bfloat16")),
]

# What readers have, and what is small enough for it: the most answers that fit are looked for.
RUNGS = [
    (topology, "GRPO", (f"MODEL={model}", *trained))
    for topology in ("v5e-1", "v5e-4", "v5e-8", "v6e-1", "v6e-4", "v6e-8")
    for model, trained in (
        ("Qwen/Qwen3-0.6B", ("LORA_RANK=0",)),
        ("Qwen/Qwen3-0.6B", ("LORA_RANK=32",)),
        ("meta-llama/Llama-3.2-1B-Instruct", ("LORA_RANK=0",)),
        ("meta-llama/Llama-3.2-1B-Instruct", ("LORA_RANK=32",)),
        (memory.LLAMA_3_1_8B, ("LORA_RANK=32",)),
    )
]
MOST_PER_CHIP = 64  # answers with which the search begins

PAD_ID = 128_004  # Llama 3.1's; another number takes the same memory
COLUMNS = ("topology", "algorithm", "constants", "program", "chips", "arguments", "temporaries", "peak",
           "limit", "left", "vllm_least", "vllm_most", "seconds")  # fmt: skip


# %% The three programs, abstract ---------------------------------------------------------------------------
def topology_devices(name: str) -> list:
    """The devices of a TPU slice that is not attached.

    Raises:
        UserError: libtpu is not installed, or MaxText's list has no such slice.
    """
    try:
        spec = accelerator_to_spec_map.get_system_characteristics(name)
    except ValueError:  # its message is the whole list
        spec = None
    if spec is None or spec.platform != "tpu" or name.split("-")[0] not in memory.HBM_GIB:
        raise UserError(f"TOPOLOGIES={name}: no such TPU slice; such as v5p-8, v5p-64, v6e-8, v5e-16")
    try:
        topology = topologies.get_topology_desc(
            platform="tpu",
            topology_name=spec.topology_name,
            chip_config_name=spec.chip_config_name,
            chips_per_host_bounds=spec.chips_per_host_bounds,
        )
    except Exception as error:  # jax has no type of its own for a plugin that is not there
        reason = str(error).splitlines()[0]
        raise UserError(
            f"TOPOLOGIES={name}: the TPU compiler does not start ({reason}); run `make fit-setup`, "
            "which installs libtpu into .venv-fit"
        ) from None
    return list(topology.devices)


def make_programs(c, hf, trainer_devices: Sequence, pad_id: int, **machine: Any) -> SimpleNamespace:
    """The main script's programs, and what they are given: shapes, dtypes and shardings, without an array.

    Args:
        c: the main script's constants.
        hf: the checkpoint's config.
        trainer_devices: those that train, of a topology or real ones.
        pad_id: padding token.
        machine: MaxText settings for the machine to compile for; none for this one.

    Returns:
        `step`, `reference` and `sync`, functions of arrays that are only in memory beside them, and of their
        own arguments; `arguments` by program; `weights`, `moments`, `plain` (all weights of the model without
        LoRA), `mesh`, and `context()` to lower and to run in.
    """
    rows = c.BATCH_SIZE * c.NUM_GENERATIONS
    config = llama.to_run_config(c, hf, per_device_batch_size=rows / len(trainer_devices), **machine)
    mesh = maxtext_utils.get_mesh_from_config(config, trainer_devices)
    _, base = model_creation_utils.create_nnx_abstract_model(config, mesh, rng_key=jax.random.PRNGKey(0))
    llama.use_rope_scaling(base, hf)
    plain = TunixMaxTextAdapter(base, pad_id=pad_id)
    plain.config = None  # as MaxText's own `from_pretrained` leaves it
    model, merge = abstract_lora(c, plain, mesh, config) if c.LORA_RANK else (plain, None)

    def context():
        stack = contextlib.ExitStack()
        stack.enter_context(mesh)
        stack.enter_context(nn_partitioning.axis_rules(config.logical_axis_rules))
        return stack

    graphdef, weights, frozen = nnx.split(model, nnx.LoRAParam if c.LORA_RANK else nnx.Param, ...)
    weights = nnx.to_pure_dict(weights)
    optimizer = demo.make_optimizer(c)
    moments = optax.tree_map_params(  # `zeros_like` keeps a weight's sharding
        optimizer, lambda moment, weight: weight, jax.eval_shape(optimizer.init, weights), weights
    )
    batch = abstract_batch(c, mesh)
    vllm_state = abstract_vllm_state(plain, mesh, jnp.dtype(c.DTYPE))

    def step(beside, *arguments):
        return demo.update.__wrapped__(*arguments, c=c, pad_id=pad_id)

    def reference(beside, *arguments):
        return log_probs_of_state(
            *arguments, pad_id=pad_id, temperature=c.TEMPERATURE, logits_clip=c.LOGITS_CLIP,
            num_generations=c.NUM_GENERATIONS,
        )  # fmt: skip

    def sync(beside, params):
        return transfer_state_with_mappings(
            merge(params) if merge else params,
            jax.tree.map(lambda x: x, vllm_state),  # it is filled in place
            key_mappings=plain.to_hf_mappings(),
            key_mapping_hook_fns=plain.to_hf_hook_fns(),
            transpose_keys=plain.to_hf_transpose_keys(),
            reshard_fn=lambda new, place: {
                k: jax.lax.with_sharding_constraint(v, place[k]) for k, v in new.items()
            },
        )

    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    return SimpleNamespace(
        programs={
            "step": jax.jit(step, donate_argnums=(2, 4), keep_unused=True),
            "reference": jax.jit(reference, keep_unused=True),
            "sync": jax.jit(sync, keep_unused=True),
        },
        arguments={
            "step": (graphdef, weights, frozen, moments, batch, number, number),
            "reference": (*nnx.split(plain), batch.prompt_ids, batch.completion_ids),
            "sync": (nnx.state(model, nnx.Param),),
        },
        weights=weights, moments=moments, plain=nnx.to_pure_dict(nnx.state(plain, nnx.Param)),
        mesh=mesh, context=context,
    )  # fmt: skip


def abstract_lora(c, plain: TunixMaxTextAdapter, mesh, config):
    """`lora.add_lora` on an abstract model: another one, abstract too, and `merge`."""
    merges = []

    def add(plain):
        adapted, merge = lora.add_lora(plain, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED)
        merges.append(merge)
        return adapted

    placed = {path: leaf.get_value().sharding for path, leaf in nnx.to_flat_state(nnx.state(plain))}
    everywhere = NamedSharding(mesh, P())  # A and B
    graphdef, state = nnx.split(nnx.eval_shape(add, plain))
    shardings = [
        (path, leaf.replace(placed.get(path, everywhere))) for path, leaf in nnx.to_flat_state(state)
    ]
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, nnx.from_flat_state(shardings)
    )
    return nnx.merge(graphdef, placed), merges[0]


def abstract_batch(c, mesh) -> demo.Batch:
    """What `update` is fed, its rows sharded over `fsdp`."""
    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    N, P_length, T = c.BATCH_SIZE * c.NUM_GENERATIONS // passes, c.MAX_PROMPT_LENGTH, c.TOTAL_GENERATION_STEPS

    def array(dtype, *shape):
        sharding = NamedSharding(mesh, P(None, "fsdp"))
        return jax.ShapeDtypeStruct((passes, N, *shape), dtype, sharding=sharding)

    return demo.Batch(
        prompt_ids=array(jnp.int32, P_length),
        completion_ids=array(jnp.int32, T),
        completion_mask=array(bool, T),
        advantages=array(jnp.float32),
        sampler_log_prob=array(jnp.float32, T),
        ref_log_prob=array(jnp.float32, T) if c.BETA else None,
        old_log_prob=array(jnp.float32, T) if c.NUM_ITERATIONS > 1 else None,
    )


def abstract_vllm_state(model, mesh, dtype) -> nnx.State:
    """vLLM's weights by MaxText's own map: one array per layer, "model" axes sharded over the chips.

    Args:
        model: abstract, under Tunix's adapter.
        mesh: of the chips.
        dtype: of the activations, which vLLM takes for its weights.
    """
    flat = {}
    chips = "fsdp"  # the same chips in the same order as vLLM's axis "model"
    for path, param in nnx.state(model, nnx.Param).flat_state():
        name, axes = model.to_hf_mappings()[".".join(map(str, path))]
        shape = param.get_value().shape
        layers = range(shape[axes.index("layer")]) if "layer" in axes else [None]
        kept = [i for i, axis in enumerate(axes) if axis != "layer"]
        shape = tuple(shape[i] for i in kept)
        spec = P(*(
            chips if axes[i] == "model" and n % mesh.shape[chips] == 0 else None for i, n in zip(kept, shape)
        ))  # fmt: skip
        value = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for layer in layers:
            key = name if layer is None else name.replace("*", str(layer))
            flat[tuple(int(k) if k.isdigit() else k for k in key.split("."))] = nnx.Param(value)
    return nnx.State.from_flat_path(flat)


# %% Compiling, and what the compiler says ------------------------------------------------------------------
def compile_program(name: str, programs: SimpleNamespace, beside: Any) -> tuple[dict[str, float], str]:
    """Compiles one program with the arrays `beside` in memory.

    Returns:
        GiB per chip: `arguments`, `temporaries`, `peak`; and "" or, where it does not fit, the compiler's
        reason (then `peak` is what it asked for, the others are missing).
    """
    with programs.context():
        lowered = programs.programs[name].lower(beside, *programs.arguments[name])
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).splitlines()[0].split(": ", 2)[-1]
            wanted = [float(gib) for gib in re.findall(r"([\d.]+)G", reason)]
            return {"peak": max(wanted, default=float("nan"))}, reason
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes / GIB,
        "temporaries": memory.temp_size_in_bytes / GIB,
        "peak": memory.peak_memory_in_bytes / GIB,
    }, ""


def check(
    topology: str, algorithm: str, arguments: Sequence[str], step_alone: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compiles the programs of one configuration, prints as it goes.

    Args:
        topology: name of the slice.
        algorithm: "GRPO" or "PPO".
        arguments: constants of the main script; without MODEL it is Llama 3.1 8B.
        step_alone: leave out the other programs.

    Returns:
        One row of COLUMNS per program, and the verdict, one line per thing to know.

    Raises:
        UserError: a constant that cannot be, or cannot be compiled here.
    """
    c = settings.read(Constants, arguments)
    checks.refuse(c)
    hf = memory.published_config(c.MODEL) or dry_run.find_model(c.MODEL, weights=False)[1]
    chips = topology_devices(topology)
    trainer_devices, rollout_mesh = devices.plan_devices(c, hf, chips)
    limit = memory.HBM_GIB[topology.split("-")[0]]
    programs = make_programs(
        c, hf, trainer_devices, PAD_ID,
        hardware="tpu", compile_topology=topology, compile_topology_num_slices=1,
    )  # fmt: skip
    plain, weights, moments = programs.plain, programs.weights, programs.moments
    reference = plain if memory.weight_copies(c) > 1 else ()
    critic = (plain, weights, moments) if algorithm == "PPO" else ()
    # with LoRA the reference computes with the actor's own frozen weights
    beside_reference = weights if c.LORA_RANK else plain
    beside = {  # on the same chips, and no argument of the program
        "step": (reference, critic),
        "reference": (beside_reference, moments, critic),
        "sync": (moments, reference, critic),
    }
    names = ["step", "reference", "sync"] if c.BETA else ["step", "sync"]
    parameters = sum(x.size for x in jax.tree.leaves(plain))
    trains = len(trainer_devices) if rollout_mesh and rollout_mesh.devices.flat[0] in trainer_devices else 0
    rows = []
    for name in ["step"] if step_alone or algorithm == "PPO" else names:
        print(f"{topology} {algorithm} {' '.join(arguments)}: compiling {name} ...", flush=True)
        started = time.perf_counter()
        sizes, reason = compile_program(name, programs, beside[name])
        row = dict(
            topology=topology, algorithm=algorithm, constants=" ".join(arguments), program=name,
            chips=f"{len(trainer_devices)} of {len(chips)}", limit=limit, left=limit - sizes["peak"],
            seconds=time.perf_counter() - started, **sizes,
        )  # fmt: skip
        if name == "step" and rollout_mesh and algorithm == "GRPO":
            needs = memory.vllm_needs(c, hf, parameters, rollout_mesh, trains, limit, row["peak"])
            row |= dict(vllm_least=needs.least, vllm_most=needs.most)
        rows.append(row)
        print(
            f"  peak {row['peak']:.2f} of {limit} GiB per chip, {row['seconds']:.0f} s {reason}", flush=True
        )
        if reason:
            break  # the other programs would not save it
    return rows, verdict(c, rows, hf, parameters, rollout_mesh, trains)


def largest(topology: str, algorithm: str, arguments: Sequence[str]) -> tuple[list[dict], list[str]]:
    """The most answers per gradient pass that fit: halved until they do. What does not fit compiles fast.

    Args:
        topology: name of the slice.
        algorithm: "GRPO" or "PPO".
        arguments: constants of the main script, BATCH_SIZE and NUM_GENERATIONS excepted: a question gets up
            to the default's answers, and there are as many questions as that makes.

    Returns:
        As `check`, of the step alone: the row that fits, if there is one, and that of twice as many answers.
    """
    G = settings.defaults(demo.Constants, "tpu")["NUM_GENERATIONS"]
    chips = len(topology_devices(topology))
    rows = []
    for i in reversed(range(MOST_PER_CHIP.bit_length())):  # 64, 32 ... 1 per chip
        answers = chips * 2**i
        group = min(answers, G)
        if group < 2:  # one answer has no group to be compared with
            continue
        sizes = f"BATCH_SIZE={answers // group}", "TRAIN_MICRO_BATCH_SIZE=0", f"NUM_GENERATIONS={group}"
        found, lines = check(topology, algorithm, (*arguments, *sizes), step_alone=True)
        rows = rows[-1:] + found  # beside the last that did not fit
        if found[-1]["left"] >= 0:
            break
    return rows[::-1], lines


def verdict(c, rows, hf, parameters: int, rollout_mesh, trainer_chips: int) -> list[str]:
    """What the figures mean: fits or not, by how much, which constant to change; then vLLM.

    Args:
        c: the main script's constants.
        rows: of `check`.
        hf: the checkpoint's config.
        parameters: of the model.
        rollout_mesh: of vLLM, None without it.
        trainer_chips: as `memory.vllm_needs` takes them.
    """
    worst = min(rows, key=lambda row: row["left"])
    name = " ".join(filter(None, (worst["topology"], worst["algorithm"], worst["constants"])))
    if worst["left"] < 0:
        remedy = memory.memory_remedy(c)
        if worst["algorithm"] == "PPO":
            remedy = "ALGORITHM=PPO, take GRPO, which has no critic, or a larger slice"
        too_much = f"{-worst['left']:.2f} GiB per chip too much ({worst['program']})"
        return [f"{name}: does not fit, {too_much}; {remedy}"]
    lines = [f"{name}: fits, {worst['left']:.2f} GiB per chip left ({worst['program']})"]
    if rollout_mesh is not None and worst["algorithm"] == "GRPO":
        chip = worst["limit"], worst["peak"]
        try:
            lines.append("  " + memory.vllm_verdict(c, hf, parameters, rollout_mesh, trainer_chips, *chip))
        except UserError as error:
            lines.append(f"  {error}")
    return lines


# %% Main ---------------------------------------------------------------------------------------------------
def cases(arguments: Sequence[str]) -> tuple[Constants, list[tuple[str, str, tuple[str, ...]]]]:
    """What the command line asks for: this script's constants; topology, algorithm, constants of each case.

    Raises:
        UserError: a value that cannot be, or constants beside WRITE=True.
    """
    c = settings.read(Constants, arguments)
    own = ("TOPOLOGIES=", "ALGORITHM=", "LARGEST=", "WRITE=")
    others = tuple(argument for argument in arguments if not argument.startswith(own))
    given = [argument for argument in arguments if not argument.startswith(("WRITE=", "LARGEST="))]
    if c.WRITE and given:
        raise UserError(
            f"WRITE=True: the files hold the cases of TABLE and RUNGS; leave out {' '.join(given)}, or WRITE"
        )
    if not given:
        return c, RUNGS if c.LARGEST else TABLE
    return c, [(topology, c.ALGORITHM, others) for topology in c.TOPOLOGIES.split(",")]


def main(arguments: list[str]) -> None:
    """Compiles; prints one line per program and a verdict per configuration."""
    c, chosen = cases(arguments)
    settings.quiet()
    versions.check_versions()
    started = time.perf_counter()
    rows, verdicts = [], []
    for case in chosen:
        new_rows, lines = largest(*case) if c.LARGEST else check(*case)
        rows += new_rows
        verdicts += lines
    print(f"\nGiB per chip; jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}")
    print(" | ".join(COLUMNS))
    for row in rows:
        print(" | ".join(shown(row.get(column, "")) for column in COLUMNS))
    print("\n" + "\n".join(verdicts))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    print(f"{time.perf_counter() - started:.0f} s, {peak:.1f} GiB of this machine's memory")
    if c.WRITE:
        name = memory.FIT_FILES[c.LARGEST]
        with open(settings.HERE / "assets" / name, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: shown(v) for k, v in row.items()} for row in rows)


def shown(value) -> str:
    """A cell: two decimals for GiB and seconds."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    settings.run(main)
