"""Will it fit? Compiles every program of a run for a TPU or a GPU you don't have yet.

The TPU compiler (libtpu) and XLA's for NVIDIA cards are Python packages that run on any Linux
machine and report how much of a chip's memory a program needs. What else is in memory at the time
counts, too.

    prefill     the prompts through the model; with ROLLOUT_ENGINE=maxtext, as the next three
    spread      the prompts' KV cache, a row for each answer; on one chip
    decode      the answers, token by token
    merge       W + (alpha / r) A B for the next answers; with LoRA
    update      an optimizer update with all its gradient passes
    reference   log-probs of the answers under the reference; with BETA
    old         log-probs under the policy that answered; with NUM_ITERATIONS above 1
    sync        the new weights in vLLM's layout and dtype; a lower bound, because Tunix does it op
                by op, which takes four times the float32 weights with LoRA, three times without
                (`memory.estimate` counts these)
    vllm        a step of vLLM's engine, where it's installed; in its own share of the chip

The compiler doesn't report speed, numerics, or the runtime's own memory. ALGORITHM=PPO adds the
memory GRPO saves: a critic as large as the actor, and its optimizer. `make fit-setup` installs both
compilers.

    .venv-fit-cards/bin/python 5_GRPO_Maxtext/tool.py fit_check CARDS=t4 \
        MODEL=Qwen/Qwen3-0.6B DTYPE=float32
    .venv-fit/bin/python 5_GRPO_Maxtext/tool.py fit_check TOPOLOGIES=v6e-8 BATCH_SIZE=1
    .venv-vllm/bin/python 5_GRPO_Maxtext/tool.py fit_check TOPOLOGIES=v6e-8     # with vLLM's engine

Takes every constant of the main script. To add a case to a file in assets/, add its row (machine,
algorithm, constants) and write the file. A program takes 2 to 20 s for a card and about a minute
for a TPU, on one core.
"""

import contextlib
import csv
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

# Before jax is imported: run on the CPU, and let the compilers work without looking for a chip or a
# cloud.
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.update(
        CUDA_VISIBLE_DEVICES="-1",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5p-8",
        TPU_WORKER_ID="0",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled",
    )

import settings  # before jax: sets XLA's flags  # isort: skip
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.utils import accelerator_to_spec_map
from tunix.generate.utils import transfer_state_with_mappings

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import machines
from constants import RunConstants
from machines import CARDS, Machine, parse_machine
from model import devices, llama, lora, versions
from model.llm import Model, split
from model.log_probs import log_probs_of_states
from model.rollout import MaxTextRollout, sampling_config
from run import checks, dry_run, memory
from settings import UserError


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(demo.Constants):
    """This tool's constants, in addition to the main script's."""

    # Hugging Face name or folder; those in memory.PUBLISHED need no network
    MODEL: str = memory.LLAMA_3_1_8B
    # Google's names; v5p counts two cores per chip: v5p-8 has 4 chips
    TOPOLOGIES: str = "v5p-8,v6e-8"
    # in place of TOPOLOGIES: t4, l4, rtx3090, ..., 8xh100; cards.csv describes them
    CARDS: str = ""
    # PPO: with a critic and its optimizer; the update alone
    ALGORITHM: Literal["GRPO", "PPO"] = "GRPO"
    LARGEST: bool = False  # True: the largest batch that fits, in place of the one that's asked for
    # compiles its rows anew
    WRITE: Literal["", "fit_check.csv", "fit_rungs.csv", "fit_cards.csv"] = ""
    SINCE: str = ""  # with WRITE: rows compiled on this day (2026-11-25) or later stay as they are


OWN = ("TOPOLOGIES=", "CARDS=", "ALGORITHM=", "LARGEST=", "WRITE=", "SINCE=")
SEARCHED = ("BATCH_SIZE=", "NUM_GENERATIONS=")  # by `largest`
# Llama 3.1's; any take as much
IDS = types.SimpleNamespace(pad_id=lambda: 128_004, eos_ids=(128_009,))
COLUMNS = (
    "machine",
    "algorithm",
    "constants",
    "program",
    "chips",
    "arguments",
    "temporaries",
    "peak",
    "limit",
    "left",
    "vllm_least",
    "vllm_most",
    "seconds",
    "compiled",
)


# %% The programs: shapes, dtypes and shardings, without an array ----------------------------------
def make_programs(
    c: RunConstants, hf, base, mesh, pad_id: int, done, critic=False, update_alone=False, **machine
):
    """The programs a run executes on the training chips, with `llama.abstract_model`'s `base` and
    `mesh`.

    Yields the name of each, a `jax.jit`, and its arguments: first what lies in memory beside the
    others. The caller compiles it into the dict `done` before asking for the next. `critic` puts
    PPO's, with its optimizer, beside the update; `machine` has MaxText's settings for another
    machine than this one.
    """
    config = llama.to_run_config(c, hf, **machine)
    plain = TunixMaxTextAdapter(base, pad_id=pad_id)
    plain.config = None  # as MaxText's own `from_pretrained` leaves it
    model = abstract_lora(c, plain, mesh, config) if c.LORA_RANK else plain
    trained = nnx.LoRAParam if c.LORA_RANK else nnx.Param
    graphdef, params, rest = split(model, trained)
    optimizer = demo.make_optimizer(c)
    opt_state = optax.tree_map_params(  # `zeros_like` keeps a parameter's sharding
        optimizer, lambda moment, param: param, jax.eval_shape(optimizer.init, params), params
    )
    weights, everything = nnx.state(plain, nnx.Param), nnx.state(model, nnx.Param)
    frozen = weights if c.LORA_RANK else ()
    reference = weights if memory.weight_copies(c) > 1 else ()
    rules = tuple(map(tuple, config.logical_axis_rules))

    def program(name, function, arguments, *beside, donated=(), out=None):
        def traced(beside, *arguments):
            with devices.on_mesh(mesh, rules):
                return function(*arguments)

        jitted = jax.jit(traced, donate_argnums=donated, keep_unused=True, out_shardings=out)
        return name, jitted, (beside, *arguments)

    def array(dtype, *shape, axes=()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    def merge(params):
        return lora.merge(params, c.LORA_ALPHA / c.LORA_RANK) if c.LORA_RANK else params

    if c.ROLLOUT_ENGINE == "maxtext" and not update_alone:
        one_chip = mesh.size == 1
        rollout = MaxTextRollout(
            plain,
            IDS,
            mesh,
            sampling_config(c),
            maxtext_config=config,
            hf=hf,
            prompt_config=llama.to_run_config(c, hf, rows=c.BATCH_SIZE, **machine)
            if one_chip
            else None,
        )
        prompts = array(jnp.int32, c.BATCH_SIZE if one_chip else rollout.rows, c.MAX_PROMPT_LENGTH)
        rows, random = array(jnp.int32, rollout.rows), array(jax.random.key(0).dtype)
        decoder = (
            nnx.state(base, nnx.Param),
            jax.tree.map(lambda x: array(x.dtype, *x.shape), rollout._rest),
        )
        beside = opt_state, reference, everything if c.LORA_RANK else ()  # it decodes with W + A B

        def results(name):  # the compiler decides where the prompts' KV cache is
            return jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                done[name].out_info,
                done[name].output_shardings,
            )

        yield program("prefill", rollout._prompt_pass, (*decoder, prompts), *beside)
        if one_chip:
            yield program(
                "spread", rollout._spread_rows, ([results("prefill")], rows), *beside, frozen
            )
        logits, cache = results("spread" if one_chip else "prefill")
        options = dict(methods=rollout._methods, max_tokens=c.TOTAL_GENERATION_STEPS)
        decode, whole = functools.partial(rollout._decode_all, **options), random.sharding
        given = *decoder, cache, logits, rows, random, array(jnp.float32), 0
        # the cache
        yield program("decode", decode, given, *beside, donated=3, out=(whole, whole, None))
        if c.LORA_RANK:
            yield program("merge", merge, (nnx.state(model.base, nnx.Param),), opt_state, reference)

    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    N, T = c.BATCH_SIZE * c.NUM_GENERATIONS // passes, c.TOTAL_GENERATION_STEPS

    def of_pass(dtype, width):
        # its answers are divided among the chips
        return array(dtype, passes, N, width, axes=(None, "fsdp"))

    prompts = of_pass(jnp.int32, c.MAX_PROMPT_LENGTH)
    tokens = of_pass(jnp.int32, T)
    mask = of_pass(bool, T)
    per_token, per_answer = of_pass(jnp.float32, T), of_pass(jnp.float32, 1)
    batch = demo.Batch(
        prompts,
        tokens,
        mask,
        weight=per_token,
        advantage=per_answer,
        beta=per_answer,
        sampler_log_prob=per_token,
        ref_log_prob=per_token if c.BETA else None,
        old_log_prob=per_token if c.NUM_ITERATIONS > 1 else None,
    )
    temperature = array(jnp.float32)
    policy = Model(
        graphdef, rest, temperature, pad_id, c.LOGITS_CLIP, c.NUM_GENERATIONS, mesh, rules
    )
    method = grpo_variants.choose(c, demo.TABLES)
    update = functools.partial(demo.update.__wrapped__, method=method, optimizer=optimizer)
    beside = (frozen, params, opt_state) if critic else ()
    yield program(
        "update", update, (params, opt_state, policy, batch), reference, beside, donated=(1, 2)
    )
    if update_alone:
        return
    log_probs = functools.partial(
        log_probs_of_states,
        pad_id=pad_id,
        temperature=c.TEMPERATURE,
        logits_clip=c.LOGITS_CLIP,
        num_generations=c.NUM_GENERATIONS,
    )
    if c.BETA:  # LoRA's frozen weights are the reference's own
        structure, *states = split(plain, trained)
        given = structure, tuple(states), prompts, tokens
        yield program("reference", log_probs, given, params if c.LORA_RANK else weights, opt_state)
    if c.NUM_ITERATIONS > 1:
        yield program(
            "old", log_probs, (graphdef, (params, rest), prompts, tokens), opt_state, reference
        )
    if c.ROLLOUT_ENGINE == "vllm":

        def sync(params):
            # it is filled in place
            vllm_state = abstract_vllm_state(plain, mesh, jnp.dtype(c.DTYPE))
            return transfer_state_with_mappings(
                merge(params),
                vllm_state,
                key_mappings=plain.to_hf_mappings(),
                key_mapping_hook_fns=plain.to_hf_hook_fns(),
                transpose_keys=plain.to_hf_transpose_keys(),
                reshard_fn=lambda new, place: {
                    k: jax.lax.with_sharding_constraint(v, place[k]) for k, v in new.items()
                },
            )

        yield program("sync", sync, (everything,), opt_state, reference)


def abstract_lora(c: RunConstants, plain: TunixMaxTextAdapter, mesh, config) -> TunixMaxTextAdapter:
    """`lora.add_lora` on an abstract model: another one, abstract too."""

    def add(plain):
        return lora.add_lora(
            plain, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, c.SEED
        )[0]

    places = {path: x.sharding for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(plain))}
    graphdef, state = nnx.split(nnx.eval_shape(add, plain))

    def placed(path, x):
        return x.update(sharding=places.get(path, NamedSharding(mesh, P())))  # P(): A and B

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(placed, state))


def abstract_vllm_state(model, mesh, dtype) -> nnx.State:
    """vLLM's weights by MaxText's own map: one array per layer, its "model" axes sharded over
    "fsdp".
    """
    flat = {}
    for path, param in nnx.state(model, nnx.Param).flat_state():
        name, axes = model.to_hf_mappings()[".".join(map(str, path))]
        sizes = list(zip(axes, param.get_value().shape))
        kept = [(axis, n) for axis, n in sizes if axis != "layer"]
        spec = P(
            *(
                "fsdp" if axis == "model" and n % mesh.shape["fsdp"] == 0 else None
                for axis, n in kept
            )
        )
        value = jax.ShapeDtypeStruct(
            [n for _, n in kept], dtype, sharding=NamedSharding(mesh, spec)
        )
        # without an axis of layers the name has no *
        for layer in range(dict(sizes).get("layer", 1)):
            key = name.replace("*", str(layer)).split(".")
            flat[tuple(int(k) if k.isdigit() else k for k in key)] = nnx.Param(value)
    return nnx.State.from_flat_path(flat)


# %% Compiling -------------------------------------------------------------------------------------
# XLA's stream_executor.GpuTargetConfigProto, with what all cards since the T4 have in common
TARGET = """gpu_device_info {{
 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 registers_per_core_limit: 65536 registers_per_block_limit: 65536
 cuda_compute_capability {{ major: {major} minor: {minor} }} {numbers} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def devices_of(machine: Machine) -> list:
    """Devices of a TPU slice or NVIDIA cards we don't have; UserError without their compiler."""
    if card := CARDS.get(machine.kind):
        constant, python = "CARDS", ".venv-fit-cards"
        major, minor = card["capability"].split(".")
        numbers = " ".join(f"{name}: {card[name]}" for name in list(card)[3:-1])
        target = TARGET.format(major=major, minor=minor, numbers=numbers, name=card["name"])
        grid = f"1x1x{machine.chips}"
        description = dict(platform="cuda", topology_name="", target_config=target, topology=grid)
    else:
        constant, python = "TOPOLOGIES", ".venv-fit"
        try:
            spec = accelerator_to_spec_map.get_system_characteristics(machine.name)
        except (KeyError, ValueError):
            raise UserError(
                f"TOPOLOGIES={machine.name}: MaxText's list has no such TPU slice"
            ) from None
        names = "topology_name", "chip_config_name", "chips_per_host_bounds"
        description = dict(platform="tpu", **{name: getattr(spec, name) for name in names})
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except Exception as error:  # jax has no type of its own for a plugin that is not there
        fault = f"its compiler does not start ({versions.first_line(error)})"
        remedy = f"run `make fit-setup`, then {python}/bin/python"
        raise UserError(f"{constant}={machine.name}: {fault}; {remedy}") from None


def compile_program(jitted: Callable, arguments: tuple, limit: float, card: bool):
    """Compiles a program of `make_programs`, unless its arguments alone take more than `limit` GiB
    per chip.

    On a GPU (`card`) arguments, results and temporaries are allocated one by one.

    Returns:
        `arguments`, `temporaries`, `peak` in GiB per chip, and the program; where it doesn't fit,
        the `peak` that was asked for, and None.
    """
    arrays = [x for x in jax.tree.leaves(arguments) if getattr(x, "sharding", None)]
    taken = (
        sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
        / memory.GIB
    )
    if taken > limit:
        return {"peak": taken}, None
    try:
        compiled = jitted.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        wanted = [float(gib) for gib in re.findall(r"([\d.]+)G", str(error).splitlines()[0])]
        return {"peak": max(wanted, default=math.nan)}, None
    used = compiled.memory_analysis()
    given = used.argument_size_in_bytes
    temporaries = used.temp_size_in_bytes
    peak = used.peak_memory_in_bytes
    if card:
        peak = given + temporaries + used.output_size_in_bytes - used.alias_size_in_bytes
    sizes = dict(arguments=given, temporaries=temporaries, peak=peak)
    return {name: n / memory.GIB for name, n in sizes.items()}, compiled


def check(
    name: str, algorithm: str, arguments: Sequence[str], update_alone=False
) -> tuple[list[dict], str]:
    """Compiles the programs of one configuration, prints as it goes, and stops at one that doesn't
    fit.

    `name` is the slice's or the cards', `arguments` are the main script's constants.

    Returns:
        One row of COLUMNS per program; the verdict, a line.
    """
    machine = parse_machine(name)
    c = settings.read(Constants, arguments, machine=machine)
    checks.refuse(c)
    hf = memory.published_config(c.MODEL) or dry_run.find_model(c.MODEL, weights=False)[1]
    chips, card = devices_of(machine), machine.kind in CARDS
    trainer, rollout_mesh = devices.plan_devices(c, hf, chips)
    target = (
        dict(hardware="gpu")
        if card
        else dict(
            hardware="tpu",
            compile_topology=name,
            compile_topology_num_slices=1,
            per_device_batch_size=c.BATCH_SIZE * c.NUM_GENERATIONS / len(chips),
        )
    )
    rows, done, critic = [], {}, algorithm == "PPO"
    alone = critic or update_alone
    model, mesh = llama.abstract_model(hf, llama.to_run_config(c, hf, **target), trainer)
    programs = make_programs(c, hf, model, mesh, IDS.pad_id(), done, critic, alone, **target)
    if (
        rollout_mesh
        and hf.model_type == "llama"
        and not update_alone
        and importlib.util.find_spec("vllm")
    ):
        from tools import vllm_step  # imports vLLM

        step, of_step = vllm_step.step_program(c, hf, rollout_mesh, machine.kind)
        programs = itertools.chain(programs, [("vllm", jax.jit(step, donate_argnums=1), of_step)])
    needs = memory.estimate(
        c, hf, llama.count_parameters(model), trainer, None if critic else rollout_mesh
    )
    case = f"{name} {algorithm} {' '.join(arguments)}".strip()
    # a row is valid for their versions
    packages = ("jax", "jax-cuda13-plugin" if card else "libtpu")
    pins = " ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    for program, jitted, given in programs:
        started = time.perf_counter()
        with jax.set_mesh(rollout_mesh) if program == "vllm" else contextlib.nullcontext():
            sizes, done[program] = compile_program(jitted, given, machine.gib, card)
        peak, seconds = sizes["peak"], time.perf_counter() - started
        rows.append(
            dict(
                machine=name,
                algorithm=algorithm,
                constants=" ".join(arguments),
                program=program,
                chips=f"{len(trainer)} of {len(chips)}",
                limit=machine.gib,
                left=machine.gib - peak,
                seconds=seconds,
                compiled=f"{datetime.date.today()} {pins}",
                **sizes,
            )
        )
        if program == "update" and needs.weights:
            rows[-1]["vllm_least"], rows[-1]["vllm_most"] = needs.shares(machine.gib, peak)
        print(
            f"{case}: {program} takes {peak:.2f} of {machine.gib:.2f} GiB, {seconds:.0f} s",
            flush=True,
        )
        if peak > machine.gib:
            break  # the other programs would not save it
    worst = max((row for row in rows if row["program"] != "vllm"), key=lambda row: row["peak"])
    try:
        source = f"compiled, {worst['program']}"
        return (
            rows,
            (
                f"{case}: yes: "
                f"{memory.verdict(c, machine, len(trainer), needs, worst['peak'], source)}"
            ),
        )
    except UserError as error:
        remedy = "ALGORITHM=PPO, take GRPO, which has no critic; or " if critic else ""
        return rows, f"{case}: no: {remedy}{error}"


def largest(name: str, algorithm: str, arguments: Sequence[str]) -> tuple[list[dict], str]:
    """`check` of the largest batch that fits, by halving: answers of a pass for a slice, questions
    for cards.

    For a slice the update alone is compiled, and vLLM has to fit beside it. The last row is that of
    the smallest batch that doesn't fit; before it come those that only fit without vLLM.
    `arguments` leave out BATCH_SIZE and, for a slice, NUM_GENERATIONS; there they have
    TRAIN_MICRO_BATCH_SIZE=0.
    """
    machine, fitting, over = parse_machine(name), [], []
    card = machine.kind in CARDS
    for i in reversed(range(7)):  # 64 questions, or answers per chip, and fewer
        sizes = (f"BATCH_SIZE={2**i}",)
        if not card:
            answers = machine.chips * 2**i
            group = min(answers, settings.defaults(demo.Constants, "large")["NUM_GENERATIONS"])
            if group < 2:  # one answer has no group to be compared with
                continue
            sizes = f"BATCH_SIZE={answers // group}", f"NUM_GENERATIONS={group}"
        rows, verdict = check(name, algorithm, (*arguments, *sizes), update_alone=not card)
        if rows[-1]["left"] < 0:
            over = rows[-1:] + over[:1]
            continue
        fitting = rows + fitting
        # without vLLM: neither
        if card or rows[-1].get("vllm_least", 0) <= rows[-1].get("vllm_most", 1):
            break
    return fitting + over[:1] if fitting else over, verdict


# %% Main ------------------------------------------------------------------------------------------
def committed_cases(file: str) -> dict[tuple, list[dict]]:
    """Rows of a file in assets/ by case: machine, algorithm, and the constants that aren't searched
    for.
    """
    cases, searched = {}, SEARCHED if memory.FIT_FILES[file] else ()
    for row in machines.rows_of(machines.ASSETS / file):
        constants = tuple(
            text for text in row["constants"].split() if not text.startswith(searched)
        )
        cases.setdefault((row["machine"], row["algorithm"], constants), []).append(row)
    return cases


def main(arguments: list[str]) -> None:
    """Compiles; prints a line per program and a verdict per configuration."""
    c = settings.read(Constants, arguments)
    given = tuple(text for text in arguments if not text.startswith(OWN))
    if c.WRITE and (given or c.LARGEST):
        raise UserError(
            f"WRITE={c.WRITE}: compiles what's in it; leave out all else but SINCE, or WRITE"
        )
    versions.prepare_libraries()
    search = memory.FIT_FILES.get(c.WRITE, c.LARGEST)
    names = (c.CARDS or c.TOPOLOGIES).split(",")
    if odd := [name for name in names if not parse_machine(name)]:
        raise UserError(
            f"{odd[0]!r}: no such machine; {', '.join([*memory.SLICES, *CARDS])}, or 8xh100 are"
        )
    table = (
        committed_cases(c.WRITE) if c.WRITE else {(name, c.ALGORITHM, given): () for name in names}
    )
    for case, old in table.items():
        if c.SINCE and old and min(row["compiled"] for row in old) >= c.SINCE:
            continue
        rows, verdict = (largest if search else check)(*case)
        print(verdict, flush=True)
        if c.WRITE:
            table[case] = [  # two decimals for GiB and seconds
                {name: f"{x:.2f}" if isinstance(x, float) else x for name, x in row.items()}
                for row in rows
            ]
            with open(machines.ASSETS / c.WRITE, "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(row for rows in table.values() for row in rows)


if __name__ == "__main__":
    settings.run(main)
