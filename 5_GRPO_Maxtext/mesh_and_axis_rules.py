"""Mesh and axis rules, runnable: shards one matrix, then a Llama, over 8 devices.

Three things decide which device holds a number. The *mesh* gives the devices coordinates, here 4 x
2, named ('data', 'model'). *Logical axes* name an array's dimensions: a layer's weights are
('embed', 'mlp'), a batch of inputs is ('batch', 'embed'). The *rules* map logical axes to mesh
axes:

    {'batch': 'data', 'mlp': 'model', 'embed': None}      batch in 4 parts, mlp in 2, embed in one

The layer's code never changes, only the rules do. The compiler derives the communication between
devices (the collectives) from them, and the result stays the same. Run it on 8 virtual CPU devices:

    python 5_GRPO_Maxtext/mesh_and_axis_rules.py   # 31 s of one core of an AMD EPYC, with imports

This doesn't show speed. Virtual devices share one processor; on real ones the collectives cost
time.
"""

import functools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic

import settings

# %% Constants -------------------------------------------------------------------------------------
DEVICES = 8  # virtual devices; every mesh below uses all of them, or one
Shared = Annotated[int, pydantic.Field(ge=1, multiple_of=DEVICES)]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    BATCH_SIZE: Shared = 16  # rows of the layer's input; these three must be multiples of 8
    EMBED: Shared = 16  # its columns; rows of the weights
    MLP: Shared = 32  # columns of the weights, and of the output
    LEARNING_RATE: float = 0.1  # of the one SGD step
    SEED: settings.Seed = 0  # of weights, inputs and targets
    RUN_DIR: str = ""  # for the tables (empty = runs/mesh_and_axis_rules/<time>)


class Strategy(NamedTuple):
    """A mesh shape ('data', 'model') and the rules: logical axis -> mesh axis, or None for not
    sharded.
    """

    mesh_shape: tuple[int, int]
    rules: dict[str, str | None]


STRATEGIES = {
    "one device": Strategy((1, 1), {"batch": None, "mlp": None, "embed": None}),
    "data parallel": Strategy((8, 1), {"batch": "data", "mlp": None, "embed": None}),
    "tensor parallel": Strategy((1, 8), {"batch": None, "mlp": "model", "embed": None}),
    "both": Strategy((4, 2), {"batch": "data", "mlp": "model", "embed": None}),
    "FSDP": Strategy((8, 1), {"batch": "data", "mlp": None, "embed": "data"}),
    "FSDP + tensor": Strategy((4, 2), {"batch": "data", "mlp": "model", "embed": "data"}),
}
# Logical axes of the layer's arrays. An array never uses a mesh axis twice: if 'batch' has taken
# 'data', the inputs' 'embed' isn't sharded.
LOGICAL_AXES = {
    "inputs": ("batch", "embed"),
    "weights": ("embed", "mlp"),
    "outputs": ("batch", "mlp"),
}

# A Llama has more axes than a layer. Maps each of MaxText's to one of our three:
LLAMA_AXES = {
    "embed": "embed",
    "embed_attn": "embed",
    "embed_vocab": "embed",
    "mlp": "mlp",
    "q_heads": "mlp",
    "kv_heads": "mlp",
    "heads": "mlp",
    "vocab": "mlp",
    "kv": None,
    "kv_head_dim": None,
    "layers": None,
    "norm": "mlp",
}
# Bytes per parameter: weights, gradients, Adam's two moments
BYTES = {"bfloat16": (2, 2, 4), "float32": (4, 4, 8)}
LLAMA_ROWS, LLAMA_TOKENS = 8, 24  # the batch on which the tiny Llama is compared


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses a wrong constant now, before seconds of imports
    settings.refuse_early(Constants)

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from machines import CHIPS
from model import llama, versions
from run import memory, report, run_folder


# %% The mesh, the layer, the rules ----------------------------------------------------------------
def make_mesh(strategy: Strategy) -> Mesh:
    """The machine's first devices as a grid; Auto: the compiler chooses unspecified shardings."""
    devices = jax.devices()[: math.prod(strategy.mesh_shape)]
    return jax.make_mesh(
        strategy.mesh_shape, ("data", "model"), (AxisType.Auto,) * 2, devices=devices
    )


def spec_of(logical_axes: tuple[str | None, ...], rules: dict[str, str | None]) -> PartitionSpec:
    """Looks up the mesh axis of each dimension."""
    return linen.logical_to_mesh_axes(logical_axes, tuple(rules.items()))


def make_layer(c: Constants, strategy: Strategy, mesh: Mesh) -> nnx.Linear:
    """`nnx.Linear` [embed, mlp], created sharded: the rules say how, the mesh where."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), LOGICAL_AXES["weights"])
    rules = nnx.logical_axis_rules(tuple(strategy.rules.items()))
    # MaxText switches the third one off for its own models, which would create unsharded arrays
    with jax.set_mesh(mesh), rules, nnx.use_eager_sharding(True):
        return nnx.Linear(c.EMBED, c.MLP, use_bias=False, kernel_init=init, rngs=nnx.Rngs(c.SEED))


def train_step(layer: nnx.Linear, inputs: jax.Array, targets: jax.Array, learning_rate: float):
    """One step of SGD on the mean squared error: the loss [], the new weights [embed, mlp], and the
    inputs' gradient [batch, embed], which a layer below would need.
    """

    def loss_fn(layer, inputs):
        return jnp.mean((layer(inputs) - targets) ** 2)

    loss, (grads, input_grads) = nnx.value_and_grad(loss_fn, argnums=(0, 1))(layer, inputs)
    return loss, layer.kernel.get_value() - learning_rate * grads["kernel"].get_value(), input_grads


# %% The compiler's collectives --------------------------------------------------------------------
COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\((?P<rest>.*)"
)


def collectives(program: str, mesh: Mesh) -> list[tuple[str, str, int]]:
    """Kind, mesh axis and bytes per device of each collective in a compiled program's HLO text."""
    rows = []
    for match in COLLECTIVE.finditer(program):
        shapes = re.findall(r"f32\[([\d,]*)\]", match["shapes"])
        size = sum(4 * math.prod(map(int, re.findall(r"\d+", shape))) for shape in shapes)
        rows.append((match["kind"], axis_of(match["rest"], mesh), size))
    return rows


def axis_of(line: str, mesh: Mesh) -> str:
    """The mesh axis along which a collective communicates, inferred from the size of its groups.

    XLA has two notations for its groups of devices: mesh['a'=4,'b'=2] {'a'}, and [2,4]<=[8], two
    groups of 4.
    """
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        size = math.prod(
            int(n) for name, n in re.findall(r"('\w+')=(\d+)", match[1]) if name in match[2]
        )
    else:
        size = int(re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)[1])
    return {mesh.size: "data and model", mesh.shape["model"]: "model", mesh.shape["data"]: "data"}[
        size
    ]


# %% One layer under every strategy ----------------------------------------------------------------
def run_strategy(c: Constants, strategy: Strategy) -> dict[str, Any]:
    """The layer's forward pass and one training step: `arrays` (inputs, weights, outputs, sharded),
    `results` (NumPy: outputs, loss, weights after the step, input gradient), and the collectives of
    both programs.
    """
    mesh = make_mesh(strategy)
    layer = make_layer(c, strategy, mesh)
    placed = {
        name: NamedSharding(mesh, spec_of(axes, strategy.rules))
        for name, axes in LOGICAL_AXES.items()
    }
    rng = np.random.default_rng(c.SEED)
    inputs = rng.standard_normal((c.BATCH_SIZE, c.EMBED)).astype(np.float32)
    targets = rng.standard_normal((c.BATCH_SIZE, c.MLP)).astype(np.float32)
    inputs, targets = jax.device_put((inputs, targets), (placed["inputs"], placed["outputs"]))
    whole = NamedSharding(mesh, PartitionSpec())
    forward = jax.jit(lambda layer, x: layer(x), out_shardings=placed["outputs"])
    forward = forward.lower(layer, inputs).compile()
    sgd = functools.partial(train_step, learning_rate=c.LEARNING_RATE)
    step = jax.jit(sgd, out_shardings=(whole, placed["weights"], placed["inputs"]))
    step = step.lower(layer, inputs, targets).compile()
    outputs = forward(layer, inputs)
    loss, weights, gradient = step(layer, inputs, targets)
    results = {"outputs": outputs, "loss": loss, "weights": weights, "input gradient": gradient}
    return {
        "arrays": {"inputs": inputs, "weights": layer.kernel.get_value(), "outputs": outputs},
        "results": {name: np.asarray(array) for name, array in results.items()},
        "forward": collectives(forward.as_text(), mesh),
        "step": collectives(step.as_text(), mesh),
    }


def largest_difference(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str:
    """The largest difference over all results, relative to the largest number of each."""
    return f"{max(np.abs(results[k] - x).max() / np.abs(x).max() for k, x in expected.items()):.1e}"


# %% The memory ledger of Llama 3.1 8B -------------------------------------------------------------
def llama_8b_axes() -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """`axes_in` for Llama 3.1 8B, without allocating anything."""
    hf, sizes = memory.published_config(), dict(rows=DEVICES, prompt_tokens=1, new_tokens=1)
    return axes_in(
        llama.abstract_model(hf, llama.to_maxtext_config(hf, scan_layers=True, **sizes))[0]
    )


def axes_in(model: nnx.Module) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and logical axes of each array of a MaxText model, by path."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        "/".join(map(str, path)): (x.shape, x.get_metadata()["out_sharding"]) for path, x in state
    }


def shard_shape(shape, logical_axes, strategy: Strategy, words=LLAMA_AXES) -> tuple[int, ...]:
    """Shape of an array's shard on one device; an axis that isn't in `words` isn't sharded."""
    spec = spec_of(tuple(words.get(axis) for axis in logical_axes), strategy.rules)
    return NamedSharding(make_mesh(strategy), spec).shard_shape(shape)


def ledger(axes: dict, strategy: Strategy, words=LLAMA_AXES) -> int:
    """Number of parameters per device."""
    return sum(
        math.prod(shard_shape(shape, names, strategy, words)) for shape, names in axes.values()
    )


# %% The same rules on a Llama ---------------------------------------------------------------------
def run_llama(c: Constants, strategy: Strategy) -> dict[str, Any]:
    """MaxText's Llama (the tiny one) on the strategy's mesh: shape and logical axes of each array,
    the shape of a device's shard, the logits [8, 24, V], and how many collectives of each kind.

    MaxText has a mesh axis for each way to shard. Our "data" is its 'data' if only the batch is
    sharded, and its 'fsdp' if the weights are, too; our "model" is its 'tensor'.
    """
    parts, tensor = strategy.mesh_shape
    fsdp = parts if strategy.rules["embed"] else 1
    folder, hf = llama.fetch_model("tiny_llama")
    config = llama.to_maxtext_config(
        hf,
        rows=LLAMA_ROWS,
        prompt_tokens=LLAMA_TOKENS - 1,
        new_tokens=1,
        ici_data_parallelism=parts // fsdp,
        ici_fsdp_parallelism=fsdp,
        ici_tensor_parallelism=tensor,
    )
    devices = jax.devices()[: parts * tensor]
    adapter, mesh = llama.load_llama(folder, hf, config, pad_id=0, devices=devices)
    state = nnx.to_flat_state(nnx.state(adapter.base, nnx.Param))
    tokens = jax.random.randint(
        jax.random.key(c.SEED), (LLAMA_ROWS, LLAMA_TOKENS), 5, hf.vocab_size
    )
    positions = jnp.broadcast_to(jnp.arange(LLAMA_TOKENS), tokens.shape)
    with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        forward = jax.jit(lambda adapter, *x: adapter(*x, None, None)[0])
        program = forward.lower(adapter, tokens, positions).compile()
        logits = program(adapter, tokens, positions)
    kinds = Counter(match["kind"] for match in COLLECTIVE.finditer(program.as_text()))
    return {
        "axes": axes_in(adapter.base),
        "shards": {
            "/".join(map(str, p)): v.get_value().sharding.shard_shape(v.shape) for p, v in state
        },
        "logits": np.asarray(logits),
        "forward": dict(sorted(kinds.items())),
    }


# %% Output ----------------------------------------------------------------------------------------
def show_grid(grid: np.ndarray) -> None:
    """Prints the devices' numbers at their coordinates in the mesh."""
    print(" " * 8 + "".join(f"{f'model {j}':>9}" for j in range(grid.shape[1])))
    for i, row in enumerate(grid):
        print(f"data {i}  " + "".join(f"{device.id:>9}" for device in row))


def show_layer(result: dict[str, Any]) -> None:
    """Prints which device holds which shard of the layer's arrays."""
    for name, array in result["arrays"].items():
        shard = array.sharding.shard_shape(array.shape)
        cut = f"{LOGICAL_AXES[name]} -> {tuple(array.sharding.spec)}"
        print(f"\n{name} {cut}: {list(array.shape)} in shards of {list(shard)}")
        jax.debug.visualize_array_sharding(array, use_color=False)


def strategy_table(results: dict[str, dict[str, Any]]) -> str:
    """One row per strategy: shards, messages, agreement with one device; Markdown."""
    head = "", "mesh", "rules", "weights on a device", "forward pass", "training step", "difference"
    rows = []
    for name, result in results.items():
        strategy, weights = STRATEGIES[name], result["arrays"]["weights"]
        sent = (
            "; ".join(f"{kind} along {axis}, {size:,} bytes" for kind, axis, size in result[part])
            or "silent"
            for part in ("forward", "step")
        )
        shapes = strategy.mesh_shape, weights.sharding.shard_shape(weights.shape)
        mesh, shard = (" x ".join(map(str, shape)) for shape in shapes)
        rules = ", ".join(f"{k}: {v}" for k, v in strategy.rules.items() if v) or "nothing cut"
        difference = largest_difference(result["results"], results["one device"]["results"])
        rows.append([name, mesh, rules, shard, *sent, difference])
    return report.table(head, *rows)


def ledger_table(axes: dict) -> str:
    """Training memory per device, in GB (1e9 bytes); Markdown."""
    held = {name: ledger(axes, strategy) for name, strategy in STRATEGIES.items()}
    held["both, three rules only"] = ledger(
        axes, STRATEGIES["both"], {"embed": "embed", "mlp": "mlp"}
    )
    rows = []
    for name, parameters in held.items():
        cells = [name, f"{parameters:,}"]
        for parts in BYTES.values():
            summands = " + ".join(f"{parameters * n / 1e9:.1f}" for n in parts)
            cells.append(f"{summands} = {parameters * sum(parts) / 1e9:.1f} GB")
        total = parameters * sum(BYTES["float32"]) / memory.GIB
        fits = [kind for kind, chip in CHIPS.items() if total < chip.gib]
        rows.append([*cells, ", ".join(fits) or "none"])
    sums = "bfloat16: weights + gradients + Adam", "float32"
    return report.table(("", "parameters per device", *sums, "float32 fits, alone"), *rows)


def llama_table(results: dict[str, dict[str, Any]]) -> str:
    """One row per strategy; Markdown."""
    rows = []
    for name, result in results.items():
        held = sum(map(math.prod, result["shards"].values()))
        sent = ", ".join(f"{n} x {kind}" for kind, n in result["forward"].items()) or "silent"
        difference = largest_difference(result, {"logits": results["one device"]["logits"]})
        rows.append([name, f"{held:,}", sent, difference])
    return report.table(("", "weights on a device", "forward pass", "difference"), *rows)


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shows it all, see the module's docstring; returns what it made with the layer and with the
    Llama.
    """
    c = settings.read(Constants, arguments)
    versions.prepare_libraries()
    jax.config.update("jax_platforms", "cpu")  # whatever else this machine has
    jax.config.update("jax_num_cpu_devices", DEVICES)
    started = time.perf_counter()
    run_dir = Path(c.RUN_DIR) if c.RUN_DIR else run_folder.new_folder("mesh_and_axis_rules")
    run_dir.mkdir(parents=True, exist_ok=True)

    both = STRATEGIES["both"]
    print("1. The mesh: 8 devices as 4 x 2\n")
    show_grid(make_mesh(both).devices)
    results = {name: run_strategy(c, strategy) for name, strategy in STRATEGIES.items()}
    print(f"\n2. One layer, outputs = inputs @ weights, under the rules {both.rules}")
    show_layer(results["both"])
    tables = {"strategies": strategy_table(results)}
    print(
        "\n3. The same layer under other rules. Difference: to one device, relative, of outputs, "
        f"loss, updated weights and gradients\n\n{tables['strategies']}"
    )
    tables["ledger"] = ledger_table(llama_8b_axes())
    print(
        "\n4. The memory ledger of Llama 3.1 8B, "
        f"per device (no activations yet)\n\n{tables['ledger']}"
    )
    llamas = {name: run_llama(c, STRATEGIES[name]) for name in ("one device", "both", "FSDP")}
    tables["llama"] = llama_table(llamas)
    print(
        f"\n5. The same rules on the tiny MaxText Llama, {LLAMA_ROWS} x {LLAMA_TOKENS} tokens\n\n"
        f"{tables['llama']}"
    )
    seconds = time.perf_counter() - started
    text = json.dumps(tables | {"seconds": round(seconds, 1)}, indent=1) + "\n"
    settings.write_whole(run_dir / "result.json", text)
    print(f"\ntables: {run_dir}/result.json, total {seconds:.0f} s after imports")
    return results, llamas


if __name__ == "__main__":
    settings.run(main)
