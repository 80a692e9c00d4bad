"""Grades the reader's functions: not begun, right, or wrong, and how. The same file in folders 1 to 4.

It recognizes a mistake by its numbers: it makes each usual mistake in the right function, tries it on the
same input, and names the one that gives exactly the reader's result, or else the first pair.
"""

import contextlib
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Exercise(NamedTuple):
    """A function for the reader to write, and how to check it."""

    look: Callable[[Callable], dict[str, Any]]  # calls a function on fixed numbers: {input: result}
    right: Callable  # the function as it should be
    mistakes: Mapping[str, str]  # by the words that name it: "old => new" in the source of `right`
    tolerance: float = 1e-5  # largest difference, absolute or relative, that counts as rounding
    returns: bool = True  # False for a function that changes its arguments in place
    also: Callable[[Callable], str] = lambda function: ""  # what is wrong although the numbers are right


class Verdict(NamedTuple):
    """The grade of a function: "not begun", "right" or "wrong", and how; whose numbers it gives."""

    status: str
    lines: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()


class Unusable(Exception):
    """A result that can't be compared; the text says why."""


def run(exercises: Mapping[str, Exercise], functions: Iterable[Callable]) -> bool:
    """Grades every function by its name and prints the verdicts; True if all are right."""
    verdicts = {f.__name__: judge(f, exercises[f.__name__]) for f in functions}
    for name, verdict in verdicts.items():
        lines = ["    " + line.replace("\n", "\n" + " " * 14) for line in verdict.lines]
        print("\n".join([f"{name:20s} {verdict.status}", *lines]))
    return all(verdict.status == "right" for verdict in verdicts.values())


def judge(function: Callable, exercise: Exercise) -> Verdict:
    """Compares a function with the right one, and if they differ with every mistake."""

    def returning(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is None and exercise.returns:
            raise Unusable("it returns None; is the `return` missing?")
        return result

    try:
        found = {given: numbers(result) for given, result in exercise.look(returning).items()}
    except NotImplementedError:
        return Verdict("not begun")
    except Exception as error:  # whatever it is, the reader's own line caused it: one line, no traceback
        return Verdict("wrong", (in_one_line(error, function),))
    expected = exercise.look(exercise.right)
    how = differences(found, expected, exercise.tolerance)
    if not how:
        objection = exercise.also(function)
        return Verdict("wrong", (objection,)) if objection else Verdict("right")

    def gives_the_same(*names: str) -> bool:
        with contextlib.suppress(Exception):  # two mistakes that don't go together
            wrong = variant(exercise, *(exercise.mistakes[name] for name in names))
            return not differences(found, exercise.look(wrong), exercise.tolerance)
        return False

    mistakes = [name for name in exercise.mistakes if gives_the_same(name)]
    if not mistakes:
        pairs = itertools.combinations(exercise.mistakes, 2)
        mistakes = [f"{a}; and {b}" for a, b in pairs if gives_the_same(a, b)][:1]
    given = next(iter(how))
    none = f"None of the {len(exercise.mistakes)} usual mistakes gives exactly this, nor do two at once."
    lines = [f"given     {given}", f"expected  {text(expected[given])}", f"found     {text(found[given])}"]
    lines += [how[given], *([f"This is what comes out if {name}." for name in mistakes] or [none])]
    return Verdict("wrong", tuple(lines), tuple(mistakes))


def variant(exercise: Exercise, *mistakes: str) -> Callable:
    """The right function with these mistakes in it. ValueError where an edit finds nothing to change."""
    source = inspect.getsource(exercise.right)
    for edit in "; ".join(mistakes).split("; "):
        old, new = map(str.strip, edit.split("=>"))
        if old not in source:
            raise ValueError(f"{old!r} is not in the source of {exercise.right.__name__}")
        source = source.replace(old, new)
    names = dict(exercise.right.__globals__)
    exec(source, names)
    return names[exercise.right.__name__]


def numbers(result: Any) -> np.ndarray:
    """A result as an array. Raises Unusable if it can't be one."""
    with contextlib.suppress(ValueError):
        if np.asarray(result).dtype.kind in "biuf":
            return np.asarray(result)
    raise Unusable(f"it returns a {type(result).__name__}, which is not an array of numbers")


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> dict[str, str]:
    """How the results differ, by input. nan equals nan; 0 and 1 pass for bools."""
    how = {}
    for given in expected:
        a, b = np.asarray(found[given]), np.asarray(expected[given])
        if a.shape != b.shape:
            how[given] = f"Its shape is {list(a.shape)}; expected {list(b.shape)}."
        elif a.dtype.kind not in {"f": "f", "i": "iu", "b": "biuf"}[b.dtype.kind]:
            how[given] = f"Its type is {a.dtype}; expected {b.dtype}."
        elif not np.allclose(a.astype(float), b, rtol=tolerance, atol=tolerance, equal_nan=True):
            how[given] = "Its numbers differ."
    return how


def text(array: Any) -> str:
    """Numbers for a message; only the corners of a large array."""
    return np.array2string(np.asarray(array), 90, 5, suppress_small=True, threshold=64, edgeitems=2)


def in_one_line(error: Exception, function: Callable) -> str:
    """An exception with the line of the reader's file that caused it."""
    if isinstance(error, Unusable):
        return str(error)
    file = inspect.unwrap(function).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    name, message = type(error).__name__, str(error).strip().split("\n")[0]
    if name in ("TracerBoolConversionError", "TracerArrayConversionError"):
        message = "inside jax.jit a value is not known yet: use `jnp.where`, not `if`, and `jnp`, not `np`"
    return f"line {lines[-1] if lines else '?'} raises {name}: {message}"
