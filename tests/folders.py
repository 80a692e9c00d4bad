"""Imports the files of folders 1 to 4. Each has a `settings`, a `study`: names that clash in one process."""

import contextlib
import functools
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def load_all(folder: str) -> dict[str, ModuleType]:
    """Every file of a numbered folder as a module, by name; afterwards the names are free again."""
    names = sorted(path.stem for path in (ROOT / folder).glob("*.py"))
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # folder 5's exercises
    sys.path.insert(0, str(ROOT / folder))
    try:
        modules = {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
    for name, module in modules.items():  # tyro looks for the source of a dataclass by its module's name
        sys.modules[f"{folder}.{name}"] = module
        if hasattr(module, "Constants"):
            module.Constants.__module__ = f"{folder}.{name}"
    return modules


def load(folder: str, name: str) -> ModuleType:
    """One file of a numbered folder: `load("3_Pendulum", "pendulum")`."""
    return load_all(folder)[name]


def whole_run_of(script: ModuleType, folder: Path, *arguments: str) -> tuple[Path, dict, str, list[Any]]:
    """A whole run of a script of folder 3: `folder`, its result, what was printed, what was trained."""
    printed, trained, train_seeds = io.StringIO(), [], script.train_seeds

    def remember(c, report):
        trained.extend(train_seeds(c, report))
        return trained

    with mock.patch.object(script, "train_seeds", remember), contextlib.redirect_stdout(printed):
        result = script.main([*arguments, f"RUN_DIR={folder}"])
    return folder, result, printed.getvalue(), trained
