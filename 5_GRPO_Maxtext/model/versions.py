"""The versions this folder was written for, and how it replaces a function of theirs.

Private names and patches hold for one version only: the installed versions are compared with VERSIONS at
every start.
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

from settings import UserError

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


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable) -> Iterator[None]:
    """Replaces `owner.name` while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
