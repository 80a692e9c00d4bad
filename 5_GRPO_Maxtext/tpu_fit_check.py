"""Will it fit, before you rent it: compiles the main script's own training step for TPUs that are not here.

The TPU compiler (libtpu, a Python package) runs on any Linux machine and says how much memory of a chip a
program takes. What is compiled is what the main script runs, with its constants: MaxText's Llama under
Tunix's adapter, the loss that Tunix's `GRPOLearner` sets, Tunix's trainer around `make_optimizer`.
Three programs, since each may be the one that does not fit:

    step        one gradient pass and optimizer update, the frozen reference lying beside it
    reference   log-probs of the answers under the reference, actor and optimizer lying beside it
    sync        the new weights in vLLM's layout and dtype (Tunix does it op by op: a lower bound)

What it cannot say: speed, numerics, what the runtime itself takes. With ALGORITHM=PPO a critic as large as
the actor, and its optimizer, lie beside the step: what GRPO saves.

    make fit-check                                                   # the table of the README, all of TABLE
    .venv-fit/bin/python 5_GRPO_Maxtext/tpu_fit_check.py TOPOLOGIES=v6e-8 BATCH_SIZE=1

The second form takes every constant of the main script. One core of an AMD EPYC needs about 45 s for a step
that fits and 5 s for one that does not.
"""

import contextlib
import csv
import importlib.metadata
import os
import re
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before jax is imported: run on the CPU, and let libtpu compile without looking for a chip or a cloud.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5p-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_LOG_DIR="disabled",
    TRANSFORMERS_VERBOSITY="error",  # MaxText imports it before the main script can say so
)

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import partitioning as nn_partitioning
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
from maxtext.utils import accelerator_to_spec_map, maxtext_utils, model_creation_utils
from tunix.generate.utils import transfer_state_with_mappings
from tunix.rl import common
from tunix.rl import trainer as rl_trainer
from tunix.rl.rl_cluster import Role

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dry_run
import grpo_llama3_1_8b_demo as demo
from loss_options import Example

# %% Constants ------------------------------------------------------------------------------------------
TOPOLOGIES = "v5p-8,v6e-8,v5p-64"  # names of Google's; v5p counts two cores a chip: v5p-8 has 4 chips
ALGORITHM = "GRPO"  # or PPO: with a critic and its optimizer

# What `make fit-check` compiles: topology, algorithm, constants beside the defaults of the TPU column.
TABLE = [
    ("v5p-8", "GRPO", ()),
    ("v6e-8", "GRPO", ()),
    ("v5p-64", "GRPO", ("BATCH_SIZE=8",)),  # sequences must divide by the chips
    # what the sources would have: half of the chips train, gradients accumulated prompt by prompt
    ("v5p-8", "GRPO", ("TRAINER_DEVICES_FRACTION=0.5", "SAMPLER_DEVICES_FRACTION=0.5")),
    ("v6e-8", "GRPO", ("TRAIN_MICRO_BATCH_SIZE=1",)),
    # what a critic would cost
    ("v5p-8", "PPO", ()),
    ("v6e-8", "PPO", ()),
    ("v5p-64", "PPO", ("BATCH_SIZE=8",)),
    # the sources' 64 GB and 128 GB count 8 bytes a parameter: bfloat16 everywhere
    ("v5p-8", "GRPO", ("WEIGHT_DTYPE=bfloat16",)),
    ("v5p-8", "PPO", ("WEIGHT_DTYPE=bfloat16",)),
]

GIB = 2**30
COLUMNS = ("topology", "algorithm", "constants", "program", "chips", "arguments", "temporaries", "peak",
           "limit", "left", "seconds")  # fmt: skip


# %% The three programs, abstract -----------------------------------------------------------------------
def topology_devices(name: str) -> list:
    """The devices of a TPU slice that is not attached.

    Raises:
        UserError: libtpu is not installed, or MaxText's list has no such slice.
    """
    try:
        spec = accelerator_to_spec_map.get_system_characteristics(name)
    except ValueError:  # its message is the whole list
        spec = None
    if spec is None or spec.platform != "tpu" or name.split("-")[0] not in dry_run.HBM_GIB:
        raise demo.UserError(f"TOPOLOGIES={name}: no such TPU slice; such as v5p-8, v5p-64, v6e-8, v5e-16")
    try:
        topology = topologies.get_topology_desc(
            platform="tpu",
            topology_name=spec.topology_name,
            chip_config_name=spec.chip_config_name,
            chips_per_host_bounds=spec.chips_per_host_bounds,
        )
    except Exception as error:  # jax has no type of its own for a plugin that is not there
        reason = str(error).splitlines()[0]
        raise demo.UserError(
            f"TOPOLOGIES={name}: the TPU compiler does not start ({reason}); run `make fit-check`, "
            "which installs libtpu into .venv-fit"
        ) from None
    return list(topology.devices)


def with_shardings(state, shardings):
    """Abstract arrays with the given shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def another(module) -> Any:
    """Abstract arrays as large as a module's, of their own: something that lies in memory beside it."""
    state = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def make_programs(hf, devices: list, pad_id: int, eos_id: int, **machine: Any) -> SimpleNamespace:
    """The main script's trainer with abstract weights, and its programs.

    Args:
        hf: the checkpoint's config.
        devices: those that train, of a topology or real ones.
        pad_id: padding token.
        eos_id: end-of-sequence token.
        machine: MaxText settings for the machine to compile for; none for this one.

    Returns:
        `trainer` (abstract `model` and `optimizer`), `step(model, optimizer, example, beside)`,
        `reference(model, example, beside)`, `sync(params, beside)`, abstract `example` (one gradient
        pass), `params`, `vllm_state`, `mesh`, `context()` to lower and to run in.
    """
    rows = demo.BATCH_SIZE * demo.NUM_GENERATIONS
    config = demo.to_maxtext_config(
        hf, rows, demo.MAX_PROMPT_LENGTH, demo.TOTAL_GENERATION_STEPS,
        per_device_batch_size=rows / len(devices), **machine,
    )  # fmt: skip
    mesh = maxtext_utils.get_mesh_from_config(config, devices)
    _, base = model_creation_utils.create_nnx_abstract_model(config, mesh, rng_key=jax.random.PRNGKey(0))
    model = TunixMaxTextAdapter(base, pad_id=pad_id)
    model.config = None  # as MaxText's own `from_pretrained` leaves it

    def context():
        stack = contextlib.ExitStack()
        stack.enter_context(mesh)
        stack.enter_context(nn_partitioning.axis_rules(config.logical_axis_rules))
        return stack

    trainer = abstract_trainer(model, mesh, context)
    cluster = SimpleNamespace(
        actor_trainer=trainer,
        rollout=SimpleNamespace(pad_id=lambda: pad_id, eos_id=lambda: eos_id, model=lambda: model),
        cluster_config=SimpleNamespace(
            training_config=trainer.config, role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh}
        ),
        get_rollout_config=lambda mode: demo.RolloutConfig(**demo.generation_config("train")),
    )
    demo.make_learner(cluster)  # sets the loss

    def step(model, optimizer, example, beside):
        return trainer._train_step(model, optimizer, example)

    def reference(model, example, beside):
        graphdef, state = nnx.split(model)
        return common.compute_per_token_logps(
            graphdef, state, example.prompt_ids, example.completion_ids, pad_id, eos_id,
            temperature=demo.TEMPERATURE,
        )  # fmt: skip

    vllm_state = abstract_vllm_state(model, mesh)

    def sync(params, beside):
        return transfer_state_with_mappings(
            params,
            jax.tree.map(lambda x: x, vllm_state),  # it is filled in place
            key_mappings=model.to_hf_mappings(),
            key_mapping_hook_fns=model.to_hf_hook_fns(),
            transpose_keys=model.to_hf_transpose_keys(),
            reshard_fn=lambda new, place: {
                k: jax.lax.with_sharding_constraint(v, place[k]) for k, v in new.items()
            },
        )

    return SimpleNamespace(
        trainer=trainer, step=step, reference=reference, sync=sync, mesh=mesh, context=context,
        example=abstract_example(mesh), params=nnx.state(model, nnx.Param), vllm_state=vllm_state,
    )  # fmt: skip


def abstract_trainer(model, mesh, context) -> rl_trainer.Trainer:
    """Tunix's trainer, as the main script's cluster makes it, without an array or a file."""
    config = demo.make_training_config()
    config.checkpoint_root_directory = config.checkpointing_options = config.metrics_logging_options = None
    made = []

    def make_optimizer_of_trainer(model):
        made.append(rl_trainer.Trainer(model, config.actor_optimizer, config, dict))
        return made[0].optimizer

    with context():
        graphdef, state = nnx.split(nnx.eval_shape(make_optimizer_of_trainer, model))
        # Tunix places the moments by the same rules (`PeftTrainer._shard_optimizer`).
        shardings = nnx.get_named_sharding(state, mesh)
    (trainer,) = made
    trainer.model, trainer.optimizer = model, nnx.merge(graphdef, with_shardings(state, shardings))
    return trainer


def abstract_example(mesh) -> Example:
    """What one gradient pass is fed: B = prompts x answers sequences, split over `fsdp`."""
    B = (demo.TRAIN_MICRO_BATCH_SIZE or demo.BATCH_SIZE) * demo.NUM_GENERATIONS
    prompt, answer = demo.MAX_PROMPT_LENGTH, demo.TOTAL_GENERATION_STEPS

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("fsdp")))

    accumulates = (demo.TRAIN_MICRO_BATCH_SIZE or demo.BATCH_SIZE) < demo.BATCH_SIZE
    return Example(
        prompt_ids=array(jnp.int32, B, prompt),
        prompt_mask=array(bool, B, prompt),
        completion_ids=array(jnp.int32, B, answer),
        completion_mask=array(bool, B, answer),
        advantages=array(jnp.float32, B),
        ref_per_token_logps=array(jnp.float32, B, answer) if demo.BETA else None,
        old_per_token_logps=array(jnp.float32, B, answer) if demo.NUM_ITERATIONS > 1 else None,
        denominator=array(jnp.float32, B) if accumulates else None,
        beta=array(jnp.float32, B) if demo.TARGET_KL else None,
        temperature=array(jnp.float32, B) if demo.TEMPERATURE_END else None,
    )


def abstract_vllm_state(model, mesh) -> nnx.State:
    """vLLM's weights by MaxText's own map: layers apart, activations' dtype, "model" axes over the chips."""
    flat = {}
    chips = "fsdp"  # the same chips, one after the other, as vLLM's axis "model"
    for path, param in nnx.state(model, nnx.Param).flat_state():
        name, axes = model.to_hf_mappings()[".".join(map(str, path))]
        shape = param.get_value().shape
        layers = range(shape[axes.index("layer")]) if "layer" in axes else [None]
        kept = [i for i, axis in enumerate(axes) if axis != "layer"]
        shape = tuple(shape[i] for i in kept)
        spec = P(*(
            chips if axes[i] == "model" and n % mesh.shape[chips] == 0 else None for i, n in zip(kept, shape)
        ))  # fmt: skip
        value = jax.ShapeDtypeStruct(shape, jnp.dtype(demo.DTYPE), sharding=NamedSharding(mesh, spec))
        for layer in layers:
            key = name if layer is None else name.replace("*", str(layer))
            flat[tuple(int(k) if k.isdigit() else k for k in key.split("."))] = nnx.Param(value)
    return nnx.State.from_flat_path(flat)


# %% Compiling, and what the compiler says --------------------------------------------------------------
def compile_program(name: str, programs: SimpleNamespace, beside: Any) -> tuple[dict[str, float], str]:
    """Compiles one program with `beside` lying in memory.

    Returns:
        GiB a chip: `arguments`, `temporaries`, `peak`; and "" or, where it does not fit, the compiler's
        reason (then `peak` is what it asked for, the others are missing).
    """
    trainer, example = programs.trainer, programs.example
    with programs.context():
        if name == "step":  # donated as Tunix does it: the old weights stay until the new ones are there
            lowered = nnx.jit(programs.step, donate_argnames=("optimizer",), keep_unused=True).lower(
                trainer.model, trainer.optimizer, example, beside
            )
        elif name == "reference":
            lowered = nnx.jit(programs.reference, keep_unused=True).lower(trainer.model, example, beside)
        else:
            lowered = jax.jit(programs.sync, keep_unused=True).lower(programs.params, beside)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).splitlines()[0].split(": ", 2)[-1]
            wanted = [float(gib) for gib in re.findall(r"([\d.]+)G", reason)]
            return {"peak": max(wanted, default=float("nan"))}, reason
    memory = getattr(compiled, "compiled", compiled).memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes / GIB,
        "temporaries": memory.temp_size_in_bytes / GIB,
        "peak": memory.peak_memory_in_bytes / GIB,
    }, ""


def check(
    topology: str, algorithm: str, arguments: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compiles the programs of one configuration, prints as it goes.

    Returns:
        One row of COLUMNS for each program, and the verdict, a line for each thing to know.
    """
    demo.configure([f"MODEL={dry_run.LLAMA_3_1_8B}", *arguments])
    if demo.LORA_RANK:
        raise demo.UserError(
            f"LORA_RANK={demo.LORA_RANK}: the fit check compiles full training; leave it out"
        )
    is_default = demo.MODEL == dry_run.LLAMA_3_1_8B  # its sizes are public: no network, no licence needed
    hf = dry_run.llama_3_1_8b_config() if is_default else dry_run.plan_model(demo.MODEL)[1]
    chips = topology_devices(topology)
    devices, rollout_mesh = demo.plan_devices(hf, chips)
    limit = dry_run.HBM_GIB[topology.split("-")[0]]
    programs = make_programs(
        hf, devices, pad_id=128_004, eos_id=128_009,
        hardware="tpu", compile_topology=topology, compile_topology_num_slices=1,
    )  # fmt: skip
    actor, optimizer = (another(x) for x in (programs.trainer.model, programs.trainer.optimizer))
    reference = actor if dry_run.weight_copies() > 1 else ()
    critic = (actor, optimizer) if algorithm == "PPO" else ()
    beside = {  # what lies on the same chips and the program does not name
        "step": (reference, critic),
        "reference": (actor, optimizer, critic),
        "sync": (optimizer, reference, critic),
    }
    names = ["step", "reference", "sync"] if demo.BETA else ["step", "sync"]
    rows = []
    for name in names if algorithm == "GRPO" else ["step"]:
        print(f"{topology} {algorithm} {' '.join(arguments)}: compiling {name} ...", flush=True)
        started = time.perf_counter()
        sizes, reason = compile_program(name, programs, beside[name])
        row = dict(
            topology=topology, algorithm=algorithm, constants=" ".join(arguments), program=name,
            chips=f"{len(devices)} of {len(chips)}", limit=limit, left=limit - sizes["peak"],
            seconds=time.perf_counter() - started, **sizes,
        )  # fmt: skip
        rows.append(row)
        print(f"  peak {row['peak']:.2f} of {limit} GiB a chip, {row['seconds']:.0f} s {reason}", flush=True)
        if reason:
            break  # the other programs would not save it
    return rows, verdict(rows, hf, programs, devices, rollout_mesh)


def verdict(rows, hf, programs, devices, rollout_mesh) -> list[str]:
    """What the figures mean: fits or not, by how much, what to turn; then vLLM."""
    worst = min(rows, key=lambda row: row["left"])
    name = " ".join(filter(None, (worst["topology"], worst["algorithm"], worst["constants"])))
    if worst["left"] < 0:
        remedy = dry_run.memory_remedy()
        if worst["algorithm"] == "PPO":
            remedy = "ALGORITHM=PPO, take GRPO, which has no critic, or a larger slice"
        too_much = f"{-worst['left']:.2f} GiB a chip too much ({worst['program']})"
        return [f"{name}: does not fit, {too_much}; {remedy}"]
    lines = [f"{name}: fits, {worst['left']:.2f} GiB a chip left ({worst['program']})"]
    if rollout_mesh is not None and worst["algorithm"] == "GRPO":
        parameters = sum(x.size for x in jax.tree.leaves(programs.params))
        shared = rollout_mesh.devices.flat[0] in devices
        chips = len(devices) if shared else 0
        try:
            said = dry_run.vllm_verdict(hf, parameters, rollout_mesh, chips, worst["limit"], worst["peak"])
            lines.append(f"  {said}")
        except demo.UserError as error:
            lines.append(f"  {error}")
    return lines


# %% Main -----------------------------------------------------------------------------------------------
def cases(arguments: list[str]) -> list[tuple[str, str, tuple[str, ...]]]:
    """TABLE, or what the command line asks for."""
    if not arguments:
        return TABLE
    own = {"TOPOLOGIES": TOPOLOGIES, "ALGORITHM": ALGORITHM}
    rest = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in own:
            own[name] = value
        else:
            rest.append(argument)
    if own["ALGORITHM"] not in ("GRPO", "PPO"):
        raise demo.UserError(f"ALGORITHM={own['ALGORITHM']}: one of GRPO, PPO")
    return [(topology, own["ALGORITHM"], tuple(rest)) for topology in own["TOPOLOGIES"].split(",")]


def main() -> None:
    """Compiles, prints one line a program and a verdict a configuration; exit code 2 on the user's errors.

    Without arguments it also writes `assets/fit_check.csv`, the table of the README.
    """
    demo.quiet()
    started = time.perf_counter()
    rows, verdicts = [], []
    try:
        for case in cases(sys.argv[1:]):
            new_rows, lines = check(*case)
            rows += new_rows
            verdicts += lines
    except demo.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"\nGiB a chip; jax {jax.__version__}, libtpu {libtpu_version()}")
    print(" | ".join(COLUMNS))
    for row in rows:
        print(" | ".join(shown(row.get(column, "")) for column in COLUMNS))
    print("\n" + "\n".join(verdicts))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.perf_counter() - started:.0f} s, {peak:.1f} GiB of this machine's memory")
    if len(sys.argv) == 1:
        with open(demo.HERE / "assets" / "fit_check.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: shown(v) for k, v in row.items()} for row in rows)


def shown(value) -> str:
    """A cell: two decimals for GiB and seconds."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def libtpu_version() -> str:
    """Of the compiler used."""
    return importlib.metadata.version("libtpu")


if __name__ == "__main__":
    main()
