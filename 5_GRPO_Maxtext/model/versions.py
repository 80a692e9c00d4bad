"""The library versions this folder needs, and helpers to patch them.

Private names and patches only work with one version, so every start compares the installed versions
with VERSIONS.
"""

import contextlib
import importlib
import importlib.metadata
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import absl.logging

from settings import UserError

# pinned in requirements*.txt, too
VERSIONS = {"google-tunix": "0.1.7", "maxtext": "0.2.5", "qwix": "0.1.8"}


def prepare_libraries() -> None:
    """Refuses other versions, because we rely on private names and layouts; silences developers'
    messages.
    """
    absl.logging.set_verbosity(absl.logging.ERROR)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for package, wanted in VERSIONS.items():
        installed = importlib.metadata.version(package)
        if installed != wanted:
            raise UserError(
                f"{package} {installed} is installed: this script needs {wanted}; "
                f"install {package}=={wanted}"
            )


def first_line(error: Exception) -> str:
    """What an error says, or else its type; without the pages that some libraries add."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable) -> Iterator[None]:
    """Replaces `owner.name` while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def imported_when_used(*names: str) -> Iterator[None]:
    """Gives the block's imports stand-ins for these modules, which import the real ones on first
    use.

    importlib's LazyLoader won't do: on Python 3.12.1 the next import statement loads its module.
    Drop a name when the library imports it lazily itself, and all of this with Python 3.15's lazy
    imports (PEP 810).
    """
    stand_ins: dict[str, types.ModuleType] = {}

    def remove() -> None:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    class StandIn(types.ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            remove()
            return getattr(importlib.import_module(self.__name__), attribute)

    for name in (name for name in names if name not in sys.modules):
        package, _, child = name.rpartition(".")
        stand_ins[name] = StandIn(name)
        if package:
            stand_ins.setdefault(package, types.ModuleType(package))
            setattr(stand_ins[package], child, stand_ins[name])
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        remove()
