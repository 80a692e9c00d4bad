"""What parts/late_imports.py leaves out of the main script's imports stays out, and works when it is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parts.late_imports import LATE_IMPORTS

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
SCRIPT = r"""
import gc, importlib.metadata, json, pickle, sys, threading
from types import ModuleType

usual = gc.get_threshold()
import grpo_llama3_1_8b_demo
from parts import late_imports as parts

HEAVY = ("tokamax", "sympy", "pandas", "fastapi", "scipy", "matplotlib", "tensorflow")
seen = {"loaded": [name for name in HEAVY if name in sys.modules]}

stand_ins = {}
for owner in parts.LATE_IMPORTS:
    values = vars(sys.modules[owner]).values()
    bound = {value.__name__: value for value in values if isinstance(value, ModuleType)}
    stand_ins[owner] = {name: module for name, module in bound.items() if sys.modules.get(name) is not module}
seen["stand_ins"] = {owner: sorted(modules) for owner, modules in stand_ins.items()}
distributions = sys.modules["transformers.utils.import_utils"].PACKAGE_DISTRIBUTION_MAPPING
seen["distributions_read"] = "data" in vars(distributions)

uses = {
    "tokamax": lambda module: module.ragged_dot,
    "tokamax._src.ops.attention.base": lambda module: module.Mask(is_causal=True),
    "tokamax._src.ops.attention.pallas_triton": lambda module: module.PallasTritonFlashAttention(),
    "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel":
        lambda module: module.SegmentIds(1, 2),
    "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask":
        lambda module: module.CausalMask(shape=(8, 8)),
    "sympy": lambda module: module.isprime(7) or 1 / 0,
    "fastapi": lambda module: module.FastAPI(),
    "pandas": lambda module: pickle.loads(pickle.dumps(module.DataFrame({"a": [1]}))),
}
used = []  # by eight threads at once
def use():
    for owner, modules in stand_ins.items():
        for name, module in modules.items():
            uses[name](module)
            used.append((owner, name))
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
seen["used"] = len(used)
seen["tunix_frame"] = list(stand_ins["tunix.utils.trajectory_logger"]["pandas"].DataFrame({"a": [1]}).a)

# Elsewhere nothing is replaced: these are the modules themselves, with their submodules.
import pandas as pd
import tokamax.autotuning
from sympy.parsing import sympy_parser
from tokamax._src.ops.ragged_dot import api
seen["elsewhere"] = [
    pd is sys.modules["pandas"], tokamax.ragged_dot is api.ragged_dot,
    str(sympy_parser.parse_expr("x + x")) == "2*x",
]
seen["distributions_equal"] = dict(distributions) == dict(importlib.metadata.packages_distributions())
try:
    stand_ins["maxtext.layers.engram"]["sympy"].no_such_name
except AttributeError as error:
    seen["no_such_name"] = str(error)

parts.end_imports()
seen["restored"] = [
    __import__ is parts.IMPORT, importlib.metadata.packages_distributions.__module__ == "importlib.metadata"
]
seen["collector"] = [gc.isenabled(), gc.get_threshold() == usual, gc.get_freeze_count() > 0]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_main_scripts_imports_load_none_of_the_heavy_libraries(seen):
    assert seen["loaded"] == []
    assert seen["distributions_read"] is False


def test_every_entry_is_still_imported_by_its_module(seen):
    assert seen["stand_ins"] == {owner: sorted(names) for owner, names in LATE_IMPORTS.items()}


def test_a_stand_in_is_the_library_once_it_is_used_also_by_many_threads(seen):
    assert seen["used"] == 8 * sum(len(names) for names in LATE_IMPORTS.values())
    assert seen["tunix_frame"] == [1]
    assert seen["no_such_name"] == "module 'sympy' has no attribute 'no_such_name'"


def test_other_modules_import_the_libraries_themselves(seen):
    assert seen["elsewhere"] == [True, True, True]


def test_transformers_finds_the_same_distributions(seen):
    assert seen["distributions_equal"] and seen["restored"] == [True, True]


def test_the_garbage_collector_is_as_usual_after_the_imports(seen):
    assert seen["collector"] == [True, True, True]


def test_parts_alone_imports_nothing_but_the_standard_library():
    code = "import sys, parts; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    loaded = {name for name in done.stdout.split() if not name.startswith("_")}
    assert loaded - sys.stdlib_module_names <= {"parts", "sitecustomize"}
