"""Halves the processor time of the imports: what MaxText, Tunix and transformers import for others is late.

Nothing false enters `sys.modules`: `import pandas` elsewhere is Python's own. The standard library's
LazyLoader does not do it: on Python 3.12.1 the next import statement of a module that it registered loads it.
"""

import builtins
import collections
import functools
import gc
import importlib
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

# Modules, and what they import without the scripts of this folder ever using it. In these modules only, such
# an import statement binds a stand-in that imports the real module when it is first used. Drop an entry when
# its module imports where it uses, and all of them when Python's own lazy imports (PEP 810, 3.15) will do.
LATE_IMPORTS = {
    # tokamax, 1.4 s: kernels for GPUs, for mixtures of experts, and for options of MaxText that are off
    "maxtext.kernels.megablox.ops": ("tokamax",),
    "maxtext.layers.attention_op": (
        "tokamax._src.ops.attention.base",
        "tokamax._src.ops.attention.pallas_triton",
        "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel",
        "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask",
    ),
    "maxtext.layers.moe": ("tokamax",),
    "maxtext.models.deepseek_batchsplit_fp8": ("tokamax",),
    "maxtext.layers.engram": ("sympy",),  # 0.3 s: prime numbers, for a DeepSeek layer
    "pathwaysutils.profiling": ("fastapi",),  # 0.3 s: a profiling server
    "tunix.utils.trajectory_logger": ("pandas",),  # 0.5 s: a log of Tunix's agents
}
IMPORT_GC_THRESHOLD = 10_000  # objects; with Python's 700 all of them are searched 5 times for nothing: 0.4 s
RUN_GC_THRESHOLD = gc.get_threshold()
IMPORT, DISTRIBUTIONS = builtins.__import__, metadata.packages_distributions


def begin_imports() -> None:
    """From here on the imports named above are late, and the garbage collector is patient."""
    builtins.__import__ = import_late
    metadata.packages_distributions = Distributions
    gc.set_threshold(IMPORT_GC_THRESHOLD)


def end_imports() -> None:
    """Ends what `begin_imports` began, and leaves the collector nothing of what the imports made to search.

    A script calls it once, after its imports. It also saves 0.7 s when the interpreter exits.
    """
    builtins.__import__, metadata.packages_distributions = IMPORT, DISTRIBUTIONS
    gc.freeze()
    gc.set_threshold(*RUN_GC_THRESHOLD)


def import_late(name: str, module=None, scope=None, fromlist=(), level: int = 0) -> Any:
    """Python's own `__import__`, but for the statements that LATE_IMPORTS names."""
    late = LATE_IMPORTS.get((module or {}).get("__name__"), ())
    if late and not fromlist and name in late:  # import name
        return stand_in(name)
    if late and fromlist and all(f"{name}.{part}" in late for part in fromlist):  # from name import part
        return SimpleNamespace(**{part: stand_in(f"{name}.{part}") for part in fromlist})
    return IMPORT(name, module, scope, fromlist, level)


def stand_in(name: str) -> ModuleType:
    """A module whose attributes are those of module `name`, which is imported when one is first read."""
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(importlib.import_module(name), attribute)  # PEP 562
    return module


class Distributions(collections.UserDict):
    """What 230 distributions hold, read when first asked: transformers reads it at once, 0.5 s, unused."""

    def __init__(self):
        pass  # UserDict's own would set `data`

    @functools.cached_property
    def data(self) -> dict[str, list[str]]:
        return dict(DISTRIBUTIONS())
