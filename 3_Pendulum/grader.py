"""Grades the reader's functions: not begun, right, or wrong, and how. The same file in every
folder.

It recognizes a mistake by its numbers: it makes each usual mistake in the right function, tries it
on the same input, and names the one that gives exactly the reader's result, or else the first pair.
"""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

# of types that count as the expected one: 0 and 1 are bools
KINDS = {"f": "f", "i": "iu", "b": "biuf"}


def variant(right: Callable, *mistakes: str) -> Callable:
    """The right function with these mistakes in it."""
    source, names = inspect.getsource(right), dict(right.__globals__)
    for edit in "; ".join(mistakes).split("; "):
        old, new = map(str.strip, edit.split("=>"))
        assert old in source, f"{old!r} is not in the source of {right.__name__}"
        source = source.replace(old, new)
    exec(source, names)
    return names[right.__name__]


class Exercise(NamedTuple):
    """A function for the reader to write, and how to check it."""

    # calls it on fixed numbers: input and result, each
    look: Callable[[Callable], Iterable[tuple[str, Any]]]
    right: Callable  # the function as it should be
    mistakes: Mapping[str, Any]  # by the words that name it: "old => new" in the source of `right`
    tolerance: float = 1e-5  # largest difference, absolute or relative, that counts as rounding
    variant: Callable[..., Callable] = variant  # (right, *mistakes) -> the function with them

    def difference(self, found: Mapping[str, Any], function: Callable) -> list[str]:
        """Where the function's results aren't what was found: one in a few lines, or none; nan
        equals nan.
        """
        for given, result in self.look(function):
            a, b, eps = found[given], np.asarray(result), self.tolerance
            alike = a.shape == b.shape and a.dtype.kind in KINDS[b.dtype.kind]
            if not (alike and np.allclose(a.astype(float), b, eps, eps, equal_nan=True)):
                lines = [f"given     {given}", f"expected  {shown(b)}", f"found     {shown(a)}"]
                sizes = f"It is {a.dtype} {list(a.shape)}; expected {b.dtype} {list(b.shape)}."
                return lines + [sizes] * (not alike)
        return []

    def explanations(self, found: Mapping[str, Any], number: int) -> Iterator[tuple[str, ...]]:
        """The names of so many mistakes at once that give exactly what was found."""
        for names in itertools.combinations(self.mistakes, number):
            with contextlib.suppress(Exception):  # two mistakes that don't go together
                if not self.difference(
                    found, self.variant(self.right, *map(self.mistakes.get, names))
                ):
                    yield names


def shown(array: np.ndarray) -> str:
    """Its numbers, indented by the ten characters before them; only the edges of a large array."""
    return np.array2string(array, 90, 5, True, prefix=10 * " ", threshold=64, edgeitems=2)


def run(exercises: Mapping[str, Exercise], functions: Iterable[Callable]) -> None:
    """Grades every function by name and prints the verdicts; exit code 1 unless all are right."""
    verdicts = {f.__name__: judge(f, exercises[f.__name__]) for f in functions}
    for name, verdict in verdicts.items():
        print(f"{name:20s} {verdict}".replace("\n", "\n    "))
    if set(verdicts.values()) != {"right"}:
        sys.exit(1)


def judge(function: Callable, exercise: Exercise) -> str:
    """A function's grade: "not begun", "right" or "wrong"; then lines that say what is wrong."""
    try:
        found = {given: np.asarray(result) for given, result in exercise.look(function)}
    except NotImplementedError:
        return "not begun"
    except (
        Exception
    ) as error:  # whatever it is, the reader's own line caused it: one line, no traceback
        return f"wrong\n{in_one_line(error, function)}"
    if not (difference := exercise.difference(found, exercise.right)):
        return "right"
    names = next(
        itertools.chain(*(exercise.explanations(found, number) for number in (1, 2))), None
    )
    none = (
        f"None of the {len(exercise.mistakes)} usual mistakes gives exactly this, "
        "nor do two at once."
    )
    why = f"This is what comes out if {'; and '.join(names)}." if names else none
    return "\n".join(["wrong", *difference, why])


def in_one_line(error: Exception, function: Callable) -> str:
    """The exception that is being handled, with the line of the reader's file that raised it, if
    one did.
    """
    file, name = inspect.unwrap(function).__code__.co_filename, type(error).__name__
    lines = [frame.lineno for frame in inspect.trace() if frame.filename == file]
    message = str(error).strip().split("\n")[0]
    if name.startswith("Tracer"):
        message = (
            "inside jax.jit a value is not known yet: use `jnp.where`, not `if`, and `jnp`, "
            "not `np`"
        )
    if "None" in message:
        message += "; is the `return` missing?"
    return f"line {lines[-1]} raises {name}: {message}" if lines else message
