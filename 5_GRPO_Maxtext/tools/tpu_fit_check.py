"""Will it fit, before you rent it: compiles the main script's own training step for TPUs that aren't here.

The TPU compiler (libtpu, a Python package) runs on any Linux machine and says how much memory of a chip a
program takes. It compiles what the main script runs, with its constants: MaxText's Llama under Tunix's
adapter, and the main script's `update`. There are three programs, since any of them may be the one that
doesn't fit:

    step        an optimizer update with all its gradient passes, beside the frozen reference
    reference   log-probs of the answers under the reference, beside actor and optimizer
    sync        the new weights in vLLM's layout and dtype (Tunix does it op by op: a lower bound)

The compiler doesn't tell speed, numerics, or what the runtime itself takes. ALGORITHM=PPO adds a critic as
large as the actor, and its optimizer, to what is in memory beside the step: what GRPO saves.

    make fit-setup                                                   # .venv-fit, with libtpu
    make fit-check                                                   # both files in assets/ anew
    F=".venv-fit/bin/python 5_GRPO_Maxtext/tool.py tpu_fit_check"
    $F                                                               # all of assets/fit_check.csv, printed
    $F TOPOLOGIES=v6e-8 BATCH_SIZE=1
    $F TOPOLOGIES=v5e-1 MODEL=Qwen/Qwen3-0.6B LARGEST=True

The cases of the two files in assets/ are their rows: add one by its topology, algorithm and constants. The
last two forms take every constant of the main script. On one core of an AMD EPYC a step that fits takes
about 45 s, one that doesn't 5 s.
"""

import csv
import functools
import importlib.metadata
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
import grpo_variants
from model import devices, llama, lora, versions
from model.llm import Model, split
from model.log_probs import log_probs_of_states
from run import checks, dry_run, memory
from settings import UserError


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(demo.Constants):
    """This tool's own; it takes all of the main script's, too."""

    MODEL: str = memory.LLAMA_3_1_8B  # Hugging Face name or folder; those in memory.PUBLISHED need no network
    TOPOLOGIES: str = "v5p-8,v6e-8,v5p-64"  # Google's names; v5p counts two cores per chip: v5p-8 has 4 chips
    ALGORITHM: Literal["GRPO", "PPO"] = "GRPO"  # PPO: with a critic and its optimizer
    LARGEST: bool = False  # True: the most answers per gradient pass that fit, by halving; the step alone
    WRITE: bool = False  # True: writes fit_check.csv (with LARGEST: fit_rungs.csv) anew; alone


MOST_PER_CHIP = 64  # answers with which the search begins
PAD_ID = 128_004  # Llama 3.1's; another number takes the same memory
COLUMNS = ("topology", "algorithm", "constants", "program", "chips", "arguments", "temporaries", "peak",
           "limit", "left", "vllm_least", "vllm_most", "seconds")  # fmt: skip


# %% The programs: shapes, dtypes and shardings, without an array -------------------------------------------
def page_programs(c, policy, plain, mesh, config, pad_id: int):
    """The main script's update and the reference's log-probs: all that this tool knows of their calls.

    Args:
        policy, plain: the policy, abstract; the same without LoRA.
        mesh: of the chips that train.
        config: MaxText's.

    Returns:
        The trained params, opt_state, `update` and its arguments, `log_probs` and its own.
    """
    trained = nnx.LoRAParam if c.LORA_RANK else nnx.Param
    graphdef, params, frozen = split(policy, trained)
    optimizer = demo.make_optimizer(c)
    opt_state = optax.tree_map_params(  # `zeros_like` keeps a parameter's sharding
        optimizer, lambda moment, param: param, jax.eval_shape(optimizer.init, params), params
    )
    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    N, T = c.BATCH_SIZE * c.NUM_GENERATIONS // passes, c.TOTAL_GENERATION_STEPS

    def array(dtype, width):
        sharding = NamedSharding(mesh, P(None, "fsdp"))  # a pass's answers are divided among the chips
        return jax.ShapeDtypeStruct((passes, N, width), dtype, sharding=sharding)

    batch = demo.Batch(
        prompt_ids=array(jnp.int32, c.MAX_PROMPT_LENGTH),
        completion_ids=array(jnp.int32, T),
        mask=array(bool, T),
        weight=array(jnp.float32, T),
        advantage=array(jnp.float32, 1),
        beta=array(jnp.float32, 1),
        sampler_log_prob=array(jnp.float32, T),
        ref_log_prob=array(jnp.float32, T) if c.BETA else None,
        old_log_prob=array(jnp.float32, T) if c.NUM_ITERATIONS > 1 else None,
    )
    temperature = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    rules = tuple(map(tuple, config.logical_axis_rules))
    model = Model(graphdef, frozen, temperature, pad_id, c.LOGITS_CLIP, c.NUM_GENERATIONS, mesh, rules)
    use = grpo_variants.choose(c, demo.TABLES)
    update = functools.partial(demo.update.__wrapped__, use=use, optimizer=optimizer)
    log_probs = functools.partial(
        log_probs_of_states, pad_id=pad_id, temperature=c.TEMPERATURE, logits_clip=c.LOGITS_CLIP,
        num_generations=c.NUM_GENERATIONS,
    )  # fmt: skip
    structure, *states = split(plain, trained)
    of_log_probs = (structure, tuple(states), batch.prompt_ids, batch.completion_ids)
    return params, opt_state, (update, (params, opt_state, model, batch)), (log_probs, of_log_probs)


def make_programs(c, hf, trainer: Sequence, pad_id: int, algorithm: str = "GRPO", **machine: Any):
    """What a run executes on the chips that train.

    Args:
        c: the main script's constants.
        hf: the checkpoint's config.
        trainer: the devices that train, of a topology or real ones.
        pad_id: padding token.
        algorithm: "PPO" keeps a critic and its optimizer in memory, too; its step alone is compiled.
        machine: MaxText settings for the machine to compile for; none for this one.

    Returns:
        Of each program its name, a `jax.jit`, and its arguments, the first of which is what lies in memory
        beside the others; how many parameters the model has.
    """
    rows = c.BATCH_SIZE * c.NUM_GENERATIONS
    config = llama.to_run_config(c, hf, per_device_batch_size=rows / len(trainer), **machine)
    mesh = maxtext_utils.get_mesh_from_config(config, trainer)
    _, base = model_creation_utils.create_nnx_abstract_model(config, mesh, rng_key=jax.random.PRNGKey(0))
    llama.use_rope_scaling(base, hf)
    plain = TunixMaxTextAdapter(base, pad_id=pad_id)
    plain.config = None  # as MaxText's own `from_pretrained` leaves it
    model = abstract_lora(c, plain, mesh, config) if c.LORA_RANK else plain
    vllm_state = abstract_vllm_state(plain, mesh, jnp.dtype(c.DTYPE))

    def sync(params):
        return transfer_state_with_mappings(
            lora.merge(params, c.LORA_ALPHA / c.LORA_RANK) if c.LORA_RANK else params,
            jax.tree.map(lambda x: x, vllm_state),  # it is filled in place
            key_mappings=plain.to_hf_mappings(),
            key_mapping_hook_fns=plain.to_hf_hook_fns(),
            transpose_keys=plain.to_hf_transpose_keys(),
            reshard_fn=lambda new, place: {
                k: jax.lax.with_sharding_constraint(v, place[k]) for k, v in new.items()
            },
        )

    def program(name, function, arguments, beside, donated=()):
        def traced(beside, *arguments):
            with mesh, nn_partitioning.axis_rules(config.logical_axis_rules):
                return function(*arguments)

        jitted = jax.jit(traced, donate_argnums=donated, keep_unused=True)
        return name, jitted, (beside, *arguments)

    params, opt_state, update, log_probs = page_programs(c, model, plain, mesh, config, pad_id)
    weights = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    reference = weights if memory.weight_copies(c) > 1 else ()
    critic = (weights, params, opt_state) if algorithm == "PPO" else ()
    actor = params if c.LORA_RANK else weights  # LoRA's frozen weights are the reference's own
    programs = [
        program("step", *update, (reference, critic), donated=(1, 2)),  # params, opt_state
        program("reference", *log_probs, (actor, opt_state, critic)),
        program("sync", sync, (nnx.state(model, nnx.Param),), (opt_state, reference, critic)),
    ]
    if algorithm == "PPO":
        programs = programs[:1]
    elif not c.BETA:
        del programs[1]
    return programs, sum(x.size for x in jax.tree.leaves(weights))


def abstract_lora(c, plain: TunixMaxTextAdapter, mesh, config) -> TunixMaxTextAdapter:
    """`lora.add_lora` on an abstract model: another one, abstract too."""

    def add(plain):
        return lora.add_lora(plain, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED)[0]

    shardings = {path: leaf.get_value().sharding for path, leaf in nnx.to_flat_state(nnx.state(plain))}
    graphdef, state = nnx.split(nnx.eval_shape(add, plain))
    placed = []
    for path, leaf in nnx.to_flat_state(state):
        x, sharding = leaf.get_value(), shardings.get(path, NamedSharding(mesh, P()))  # P(): A and B
        placed.append((path, leaf.replace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))))
    return nnx.merge(graphdef, nnx.from_flat_state(placed))


def abstract_vllm_state(model, mesh, dtype) -> nnx.State:
    """vLLM's weights by MaxText's own map: one array per layer, "model" axes sharded over the chips.

    Args:
        model: abstract, under Tunix's adapter.
        mesh: of the chips; its "fsdp" is the same chips in the same order as vLLM's axis "model".
        dtype: of the activations, which vLLM takes for its weights.
    """
    flat = {}
    for path, param in nnx.state(model, nnx.Param).flat_state():
        name, axes = model.to_hf_mappings()[".".join(map(str, path))]
        sizes = list(zip(axes, param.get_value().shape))
        kept = [(axis, n) for axis, n in sizes if axis != "layer"]
        spec = P(*("fsdp" if axis == "model" and n % mesh.shape["fsdp"] == 0 else None for axis, n in kept))
        value = jax.ShapeDtypeStruct([n for _, n in kept], dtype, sharding=NamedSharding(mesh, spec))
        for layer in range(dict(sizes).get("layer", 1)):  # without an axis of layers the name has no *
            key = name.replace("*", str(layer))
            flat[tuple(int(k) if k.isdigit() else k for k in key.split("."))] = nnx.Param(value)
    return nnx.State.from_flat_path(flat)


# %% Compiling, and what the compiler says ------------------------------------------------------------------
def topology_devices(name: str) -> list:
    """The devices of a TPU slice that isn't attached.

    Raises:
        UserError: libtpu isn't installed, or MaxText's list has no such slice.
    """
    try:
        memory.slice_of(name)
        spec = accelerator_to_spec_map.get_system_characteristics(name)
    except (KeyError, ValueError):
        examples = "such as v5p-8, v5p-64, v6e-8, v5e-16"
        raise UserError(f"TOPOLOGIES={name}: no such TPU slice; {examples}") from None
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


def compile_program(jitted: Callable, arguments: tuple) -> tuple[dict[str, float], str]:
    """Compiles a program of `make_programs`.

    Returns:
        GiB per chip: `arguments`, `temporaries`, `peak`; and "" or, where it doesn't fit, the compiler's
        reason (then `peak` is what it asked for, the others are missing).
    """
    lowered = jitted.lower(*arguments)
    try:
        said = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0].split(": ", 2)[-1]
        wanted = [float(gib) for gib in re.findall(r"([\d.]+)G", reason)]
        return {"peak": max(wanted, default=float("nan"))}, reason
    sizes = said.argument_size_in_bytes, said.temp_size_in_bytes, said.peak_memory_in_bytes
    return {name: n / memory.GIB for name, n in zip(("arguments", "temporaries", "peak"), sizes)}, ""


def check(topology: str, algorithm: str, arguments: Sequence[str], step_alone: bool = False):
    """Compiles the programs of one configuration, prints as it goes.

    Args:
        topology: name of the slice.
        algorithm: "GRPO" or "PPO".
        arguments: constants of the main script; without MODEL it is Llama 3.1 8B.
        step_alone: leave out the other programs.

    Returns:
        One row of COLUMNS per program; the verdict, a line.

    Raises:
        UserError: a constant that can't be, or can't be compiled here.
    """
    c = settings.read(Constants, arguments)
    checks.refuse(c)
    hf = memory.published_config(c.MODEL) or dry_run.find_model(c.MODEL, weights=False)[1]
    chips, machine = topology_devices(topology), memory.slice_of(topology)
    trainer, rollout_mesh = devices.plan_devices(c, hf, chips)
    slice_settings = dict(hardware="tpu", compile_topology=topology, compile_topology_num_slices=1)
    programs, parameters = make_programs(c, hf, trainer, PAD_ID, algorithm, **slice_settings)
    needs = memory.estimate(c, hf, parameters, trainer, rollout_mesh if algorithm == "GRPO" else None)
    case = f"{topology} {algorithm} {' '.join(arguments)}".strip()
    rows = []
    for name, jitted, of_program in programs[:1] if step_alone else programs:
        print(f"{case}: compiling {name} ...", flush=True)
        started = time.perf_counter()
        sizes, reason = compile_program(jitted, of_program)
        peak, seconds = sizes["peak"], time.perf_counter() - started
        rows.append(dict(
            topology=topology, algorithm=algorithm, constants=" ".join(arguments), program=name,
            chips=f"{len(trainer)} of {len(chips)}", limit=machine.gib, left=machine.gib - peak,
            seconds=seconds, **sizes,
        ))  # fmt: skip
        if name == "step" and needs.weights:
            rows[0]["vllm_least"], rows[0]["vllm_most"] = needs.shares(machine.gib, peak)
        print(f"  peak {peak:.2f} of {machine.gib} GiB per chip, {seconds:.0f} s {reason}", flush=True)
        if reason:
            break  # the other programs would not save it
    worst = max(rows, key=lambda row: row["peak"])
    try:
        said = f"compiled, {worst['program']}"
        return rows, f"{case}: yes: {memory.verdict(c, machine, len(trainer), needs, worst['peak'], said)}"
    except UserError as error:
        critic = "ALGORITHM=PPO, take GRPO, which has no critic; or " if algorithm == "PPO" else ""
        return rows, f"{case}: no: {critic}{error}"


def largest(topology: str, algorithm: str, arguments: Sequence[str]):
    """The most answers per gradient pass that fit: halved until they do. What doesn't fit compiles fast.

    Args:
        topology, algorithm: as in `check`.
        arguments: without BATCH_SIZE and NUM_GENERATIONS: a question gets up to the default's answers, and
            there are as many questions as that makes.

    Returns:
        As `check`, of the step alone: the row that fits, if there is one, and that of twice as many answers.
    """
    chips = len(topology_devices(topology))
    rows = []
    for i in reversed(range(MOST_PER_CHIP.bit_length())):  # 64, 32 ... 1 per chip
        answers = chips * 2**i
        group = min(answers, settings.defaults(demo.Constants, "tpu")["NUM_GENERATIONS"])
        if group < 2:  # one answer has no group to be compared with
            continue
        sizes = f"BATCH_SIZE={answers // group}", "TRAIN_MICRO_BATCH_SIZE=0", f"NUM_GENERATIONS={group}"
        found, verdict = check(topology, algorithm, (*arguments, *sizes), step_alone=True)
        rows = rows[-1:] + found  # beside the last that did not fit
        if found[-1]["left"] >= 0:
            break
    return rows[::-1], verdict


# %% Main ---------------------------------------------------------------------------------------------------
def cases(arguments: Sequence[str]):
    """What the command line asks for.

    Returns:
        This script's constants; topology, algorithm and constants of each case.

    Raises:
        UserError: a value that can't be, or constants beside WRITE=True.
    """
    c = settings.read(Constants, arguments)
    given = [argument for argument in arguments if not argument.startswith(("WRITE=", "LARGEST="))]
    file = memory.FIT_FILES[c.LARGEST]
    if c.WRITE and given:
        raise UserError(f"WRITE=True: compiles what's in {file} again; leave out {' '.join(given)}, or WRITE")
    if given:
        constants = tuple(text for text in given if not text.startswith(("TOPOLOGIES=", "ALGORITHM=")))
        return c, [(topology, c.ALGORITHM, constants) for topology in c.TOPOLOGIES.split(",")]
    found = {}
    for row in memory.fit_rows(file):
        constants = tuple(row["constants"].split())
        if c.LARGEST:  # MODEL and LORA_RANK; `largest` finds the others
            constants = constants[:2]
        found[row["topology"], row["algorithm"], constants] = True
    return c, list(found)


def main(arguments: list[str]) -> None:
    """Compiles; prints one line per program and a verdict per configuration."""
    c, chosen = cases(arguments)
    settings.quiet()
    versions.check_versions()
    started = time.perf_counter()
    rows, verdicts = [], []
    for case in chosen:
        new_rows, verdict = largest(*case) if c.LARGEST else check(*case)
        rows += [  # two decimals for GiB and seconds
            {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in row.items()}
            for row in new_rows
        ]
        verdicts.append(verdict)
    print(f"\nGiB per chip; jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}")
    print(" | ".join(COLUMNS))
    for row in rows:
        print(" | ".join(row.get(column, "") for column in COLUMNS))
    print("\n" + "\n".join(verdicts))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    print(f"{time.perf_counter() - started:.0f} s, {peak:.1f} GiB of this machine's memory")
    if c.WRITE:
        with open(settings.HERE / "assets" / memory.FIT_FILES[c.LARGEST], "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    settings.run(main)
