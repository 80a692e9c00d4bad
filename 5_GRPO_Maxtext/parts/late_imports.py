"""Halves the processor time of the imports: what MaxText, Tunix and transformers import for others is late.

Nothing false enters `sys.modules`: `import pandas` elsewhere is Python's own. The standard library's
LazyLoader does not do it: on Python 3.12.1 the next import statement of a module that it registered loads it.
"""

import builtins
import collections
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
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
    "transformers.utils.import_utils": (),  # reads what 230 distributions hold: 0.5 s, unused
}
IMPORT_GC_THRESHOLD = 10_000  # objects; with Python's 700 all of them are searched 5 times for nothing: 0.4 s
RUN_GC_THRESHOLD = gc.get_threshold()


def end_imports() -> None:
    """Gives the garbage collector its usual threshold back, and nothing of what the imports made to search.

    A script calls it once, after its imports. It also saves 0.7 s when the interpreter exits.
    """
    gc.freeze()
    gc.set_threshold(*RUN_GC_THRESHOLD)


def stand_in(name: str) -> ModuleType:
    """A module whose attributes are those of module `name`, which is imported when one is first read."""
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(importlib.import_module(name), attribute)  # PEP 562
    return module


class LateImports(SourceFileLoader):
    """Runs a module of LATE_IMPORTS with an `__import__` of its own, by way of its `__builtins__`.

    And with a late `packages_distributions`; drop that when transformers has one.
    """

    def exec_module(self, module: ModuleType) -> None:
        late = LATE_IMPORTS[module.__name__]

        def import_late(name: str, module=None, scope=None, fromlist=(), level: int = 0) -> Any:
            if not fromlist and name in late:  # import name
                return stand_in(name)
            if fromlist and all(f"{name}.{part}" in late for part in fromlist):  # from name import part
                return SimpleNamespace(**{part: stand_in(f"{name}.{part}") for part in fromlist})
            return builtins.__import__(name, module, scope, fromlist, level)

        module.__builtins__ = vars(builtins) | {"__import__": import_late}
        from importlib import metadata

        read = metadata.packages_distributions
        metadata.packages_distributions = lambda: Distributions(read)
        try:
            super().exec_module(module)
        finally:
            metadata.packages_distributions = read


class Distributions(collections.UserDict):
    """`importlib.metadata.packages_distributions()`, read when first asked."""

    def __init__(self, read: Callable[[], dict[str, list[str]]]):
        self.read = read

    @functools.cached_property
    def data(self) -> dict[str, list[str]]:
        return self.read()


class LateFinder:
    """Gives the modules named above their loaders; all others are left to Python."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in LATE_IMPORTS else None
        if spec is not None:
            spec.loader = LateImports(name, spec.origin)
        return spec


def begin_imports() -> None:
    """From here on the imports named above are late, and the garbage collector is patient."""
    sys.meta_path.insert(0, LateFinder)
    gc.set_threshold(IMPORT_GC_THRESHOLD)
