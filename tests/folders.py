"""Imports the files of folders 1 to 4. Each has a `settings`, a `runs`: names that clash in one
process.
"""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

ROOT = Path(__file__).resolve().parent.parent
# A program may compute a state twice, once for each array that it's stored in, and round a product
# and a sum in one of them together (fused multiply-add). A step of CartPole or Pendulum is about a
# dozen operations on numbers up to 30 (an angle in radians), each with a rounding of 2^-24 of that.
SAME_STATE = dict(rtol=0, atol=12 * 30 * 2**-24)  # 2e-5


@functools.cache
def load_all(folder: str) -> dict[str, ModuleType]:
    """Every file of a numbered folder as a module, by name; afterward the names are free again."""
    names = sorted(path.stem for path in (ROOT / folder).glob("*.py"))
    # folder 5's exercises
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(ROOT / folder))
    try:
        modules = {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
    # tyro looks for the source of a dataclass by its module's name
    for name, module in modules.items():
        sys.modules[f"{folder}.{name}"] = module
        if hasattr(module, "Constants"):
            module.Constants.__module__ = f"{folder}.{name}"
    return modules


def load(folder: str, name: str) -> ModuleType:
    """One file of a numbered folder: `load("3_Pendulum", "pendulum")`."""
    return load_all(folder)[name]


def unstack(tree: Any, index: Any = 0) -> Any:
    """One of many along the first axis."""
    return jax.tree.map(lambda x: x[index], tree)


def flat(tree: Any) -> np.ndarray:
    """All of its numbers in a row, as they are now: of a gradient, or of a network's weights."""
    tree = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def of_sgd(agent: Any, **rates: float) -> Any:
    """The agent of folder 3, but its networks learn by plain SGD at these rates: a step is the
    gradient.
    """
    optimizers = {
        f"{name}_optimizer": nnx.Optimizer(getattr(agent, name), optax.sgd(rate), wrt=nnx.Param)
        for name, rate in rates.items()
    }
    return agent._replace(**optimizers)


def forward(
    network: nnx.Module, x: Any, activation: Any = lambda x: np.maximum(x, 0)
) -> np.ndarray:
    """A network's outputs before their factor, float64, of inputs that are scaled already."""
    for layer in (network.hidden_1, network.hidden_2, network.output):
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...])
        x = x if layer is network.output else activation(x)
    return x


def learning_rates(
    optimizer: nnx.Optimizer, network: nnx.Module, updates: int
) -> tuple[np.ndarray, Any]:
    """The rate of each update, and the optimizer after them. Under a constant gradient it's Adam's
    step.
    """
    ones = jax.tree.map(jax.numpy.ones_like, nnx.state(network, nnx.Param))

    def one(carry, _):
        optimizer, network = carry
        before = network.output.bias[0]
        optimizer.update(network, ones)
        return carry, before - network.output.bias[0]

    scan = jax.jit(lambda *start: jax.lax.scan(one, start, length=updates))
    (optimizer, _), moved = scan(optimizer, network)
    return np.asarray(moved), optimizer
