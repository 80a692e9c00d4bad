"""Tables that the notebooks show below a cell: of constants, of what a cell defined, of a log."""

import dataclasses
import inspect
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from IPython.display import Markdown

SHOWN = 12  # rows


def table(head: Iterable[str], rows: list[tuple]) -> Markdown:
    """The first rows as a table, and how many there are."""
    texts = [tuple(str(x).replace("|", "\\|").replace("\n", " ") for x in row) for row in rows]
    lines = [tuple(head), ("---",) * len(tuple(head)), *texts[:SHOWN]]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    left = len(rows) - SHOWN
    return Markdown(shown + f"\n\n... and {left} more" * (left > 0))


def constants(kind: type) -> Markdown:
    """The first constants of a script's class, and their defaults."""
    rows = [(f"`{field.name}`", f"`{field.default}`") for field in dataclasses.fields(kind)]
    return table(("constant", "default"), rows)


def about(*names: str) -> Markdown:
    """What a cell has just imported or defined: its name, and the first sentence that its docstring
    has about it, or its value.
    """
    rows = []
    for name in names:
        thing: Any = vars(sys.modules["__main__"])[name]
        called = f"`{name}`"
        if inspect.ismodule(thing) or inspect.isroutine(thing) or inspect.isclass(thing):
            if inspect.isfunction(thing):
                called = f"`{name}({', '.join(inspect.signature(thing).parameters)})`"
            said = (inspect.getdoc(thing) or "").partition("\n\n")[0]
            # a NamedTuple without a docstring of its own, or a module without one
            version = getattr(thing, "__version__", "")
            rows.append((called, f"{said} {version and f'({version})'}".strip()))
        else:
            rows.append((called, f"`{str(thing)[:80]}`"))
    return table(("name", "what it is"), rows)


def log(rows: Any) -> Markdown:
    """The log of `train`, a NamedTuple of arrays [NUM_SEEDS, rows], as means over the seeds."""
    means = [np.asarray(column, float).mean(axis=0) for column in rows]
    return table(rows._fields, [tuple(f"{x:.4g}" for x in row) for row in zip(*means)])
