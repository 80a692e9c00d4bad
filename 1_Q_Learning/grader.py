"""Grades the reader's functions: not begun, right, or wrong, and how. The same file in every folder.

It recognizes a mistake by its numbers: it makes each usual mistake in the right function, tries it on the
same input, and names the one that gives exactly the reader's result, or else the first pair.
"""

import contextlib
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


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

    look: Callable[[Callable], Iterable[tuple[str, Any]]]  # calls it on fixed numbers: input and result, each
    right: Callable  # the function as it should be
    mistakes: Mapping[str, Any]  # by the words that name it: "old => new" in the source of `right`
    tolerance: float = 1e-5  # largest difference, absolute or relative, that counts as rounding
    returns: bool = True  # False for a function that changes its arguments in place
    also: Callable[[Callable], str] = lambda function: ""  # what is wrong although the numbers are right
    variant: Callable[..., Callable] = variant  # (right, *mistakes) -> the function with them

    def differs(self, found: Mapping[str, Any], function: Callable) -> tuple[Any, ...]:
        """Input, its other result, what was found, and how they differ; nan equals nan; 0, 1 are bools."""
        for given, result in self.look(function):
            a, b, how = np.asarray(found[given]), np.asarray(result), ""
            if a.shape != b.shape:
                how = f"Its shape is {list(a.shape)}; expected {list(b.shape)}."
            elif a.dtype.kind not in {"f": "f", "i": "iu", "b": "biuf"}[b.dtype.kind]:
                how = f"Its type is {a.dtype}; expected {b.dtype}."
            elif not np.allclose(a.astype(float), b, self.tolerance, self.tolerance, equal_nan=True):
                how = "Its numbers differ."
            if how:
                return given, b, a, how
        return ()

    def explanations(self, found: Mapping[str, Any], number: int) -> Iterator[tuple[str, ...]]:
        """The names of so many mistakes at once that give exactly what was found."""
        for names in itertools.combinations(self.mistakes, number):
            with contextlib.suppress(Exception):  # two mistakes that don't go together
                if not self.differs(found, self.variant(self.right, *map(self.mistakes.get, names))):
                    yield names


def run(exercises: Mapping[str, Exercise], functions: Iterable[Callable]) -> None:
    """Grades every function by its name and prints the verdicts; exit code 1 unless all are right."""
    verdicts = {f.__name__: judge(f, exercises[f.__name__]) for f in functions}
    for name, (status, *lines) in verdicts.items():
        print(f"{name:20s} {status}", *(line.replace("\n", "\n" + " " * 14) for line in lines), sep="\n    ")
    if any(verdict != ["right"] for verdict in verdicts.values()):
        sys.exit(1)


def judge(function: Callable, exercise: Exercise) -> list[str]:
    """The grade of a function: "not begun", "right" or "wrong"; then lines that say what is wrong."""

    def returning(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is None and exercise.returns:
            raise ValueError("it returns None; is the `return` missing?")
        return result

    try:
        found = {given: np.asarray(result) for given, result in exercise.look(returning)}
    except NotImplementedError:
        return ["not begun"]
    except Exception as error:  # whatever it is, the reader's own line caused it: one line, no traceback
        return ["wrong", in_one_line(error, function)]
    if not (difference := exercise.differs(found, exercise.right)):
        return ["wrong", objection] if (objection := exercise.also(function)) else ["right"]
    given, *arrays, how = difference
    expected, shown = (np.array2string(x, 90, 5, True, threshold=64, edgeitems=2) for x in arrays)
    lines = [f"given     {given}", f"expected  {expected}", f"found     {shown}", how]
    names = next(itertools.chain(*(exercise.explanations(found, number) for number in (1, 2))), None)
    none = f"None of the {len(exercise.mistakes)} usual mistakes gives exactly this, nor do two at once."
    return ["wrong", *lines, f"This is what comes out if {'; and '.join(names)}." if names else none]


def in_one_line(error: Exception, function: Callable) -> str:
    """An exception, with the line of the reader's file that raised it, if one did."""
    file = inspect.unwrap(function).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    name, message = type(error).__name__, str(error).strip().split("\n")[0]
    if name in ("TracerBoolConversionError", "TracerArrayConversionError"):
        message = "inside jax.jit a value is not known yet: use `jnp.where`, not `if`, and `jnp`, not `np`"
    return f"line {lines[-1]} raises {name}: {message}" if lines else message
