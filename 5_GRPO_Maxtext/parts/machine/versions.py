"""The versions this folder was written for, and how it replaces a function of theirs.

Private names and patches hold for one version only: the installed versions are compared with VERSIONS at
every start, and a function is replaced only where the library still looks it up.
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from parts.settings import UserError

VERSIONS = {"google-tunix": "0.1.7", "maxtext": "0.2.5", "qwix": "0.1.8"}  # pinned in requirements*.txt, too


def check_versions() -> None:
    """Refuses other versions than those whose private names and layouts are relied on.

    Raises:
        UserError: names the package, its version and the one that is needed.
    """
    for package, wanted in VERSIONS.items():
        found = importlib.metadata.version(package)
        if found != wanted:
            raise UserError(
                f"{package} {found} is installed: this script needs {wanted}; install {package}=={wanted}"
            )


def looks_up(code: CodeType, name: str) -> bool:
    """Whether a function's code, or that of a function inside it, looks `name` up when it runs."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(looks_up(inner, name) for inner in nested)


def require(owner: Any, name: str, caller: Callable) -> None:
    """Makes sure that what replaces `owner.name` will be called.

    Args:
        owner: the class, instance or module that has the name.
        name: the attribute that is replaced or overridden.
        caller: the library's function that has to look it up.

    Raises:
        UserError: the installed library has another shape than VERSIONS promises.
    """
    if not hasattr(owner, name) or not looks_up(caller.__code__, name):
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise UserError(
            f"{owner_name}.{name}: not what {caller.__module__}.{caller.__name__} calls; reinstall the "
            f"versions of requirements.txt ({', '.join(f'{p}=={v}' for p, v in VERSIONS.items())})"
        )


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable, *callers: Callable) -> Iterator[None]:
    """Replaces `owner.name` while the block runs; arguments and errors as in `require`."""
    for caller in callers:
        require(owner, name, caller)
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
