"""Judges functions that a reader writes: not begun, right, or wrong, and how. The same file in every folder.

A mistake is recognised by its numbers: the usual mistakes are computed from the same input, and the one that
gives exactly what the reader's function gives is named.
"""

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Exercise(NamedTuple):
    """What is known of a function left to the reader.

    Attributes:
        look: calls a function on fixed numbers: {what is given: what comes out}.
        right: the function as it should be.
        mistakes: the same function with one usual mistake in it, by the words that name it.
        tolerance: largest difference, absolute or relative, that counts as rounding.
        returns: False for a function that changes its arguments in place.
        also: asked where the numbers are right: what is wrong all the same, or nothing.
    """

    look: Callable[[Callable], dict[str, Any]]
    right: Callable
    mistakes: Mapping[str, Callable]
    tolerance: float = 1e-5
    returns: bool = True
    also: Callable[[Callable], str] = lambda function: ""


class Verdict(NamedTuple):
    """What is said of a function."""

    status: str  # "not begun", "right" or "wrong"
    lines: tuple[str, ...] = ()  # how it is wrong
    mistakes: tuple[str, ...] = ()  # the keys of Exercise.mistakes that give the same numbers


class Unusable(Exception):
    """A result that cannot be compared; the text says why."""


def run(exercises: Mapping[str, Exercise], functions: Iterable[Callable]) -> bool:
    """Judges every function by its name and prints what there is to say; True if all are right."""
    verdicts = {f.__name__: judge(f, exercises[f.__name__]) for f in functions}
    for name, verdict in verdicts.items():
        print(f"{name:20s} {verdict.status}")
        for line in verdict.lines:
            print("    " + line.replace("\n", "\n" + " " * 14))
    return all(verdict.status == "right" for verdict in verdicts.values())


def judge(function: Callable, exercise: Exercise) -> Verdict:
    """Compares a function with the right one, and where they differ with every mistake."""

    def returning(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is None and exercise.returns:
            raise Unusable("it returns None; is the `return` missing?")
        return result

    try:
        found = {given: numbers(result) for given, result in exercise.look(returning).items()}
    except NotImplementedError:
        return Verdict("not begun")
    except Unusable as error:
        return Verdict("wrong", (str(error),))
    except Exception as error:  # whatever it is, the reader's own line caused it: one line, no traceback
        return Verdict("wrong", (in_one_line(error, function),))
    expected = exercise.look(exercise.right)
    differing = [given for given in expected if not same(found[given], expected[given], exercise.tolerance)]
    if not differing:
        objection = exercise.also(function)
        return Verdict("wrong", (objection,)) if objection else Verdict("right")
    mistakes = []
    for name, mistake in exercise.mistakes.items():
        results = exercise.look(mistake)
        if all(same(found[given], results[given], exercise.tolerance) for given in results):
            mistakes.append(name)
    first = differing[0]
    lines = [f"given     {first}", *differences(found[first], np.asarray(expected[first]))]
    lines += [f"This is what comes out if {name}." for name in mistakes]
    if not mistakes:
        lines += [f"None of the {len(exercise.mistakes)} usual mistakes gives exactly this."]
    return Verdict("wrong", tuple(lines), tuple(mistakes))


def numbers(result: Any) -> np.ndarray:
    """A result as an array. Raises Unusable if it is none."""
    try:
        array = np.asarray(result)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise Unusable(f"it returns a {type(result).__name__}, which is not an array of numbers")
    return array


def same(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Whether two results have the same shape, type and numbers; nan equals nan."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or not same_type(found, expected):
        return False
    return np.allclose(found.astype(float), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def same_type(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether both are floating-point or both whole; where truth values are expected, 0 and 1 are as good."""
    return found.dtype.kind in {"f": "f", "i": "iu", "b": "biuf"}[expected.dtype.kind]


def differences(found: np.ndarray, expected: np.ndarray) -> list[str]:
    """Expected and found, as lines."""
    lines = [f"expected  {text(expected)}", f"found     {text(found)}"]
    if found.shape != expected.shape:
        lines += [f"Its shape is {list(found.shape)}; expected {list(expected.shape)}."]
    elif not same_type(found, expected):
        lines += [f"Its type is {found.dtype}; expected {expected.dtype}."]
    return lines


def text(array: np.ndarray) -> str:
    """Numbers as one reads them in a message; of a large array the corners."""
    return np.array2string(array, 90, 5, suppress_small=True, threshold=64, edgeitems=2)


HINTS = {  # what stands behind an error of jax's, by its name: not every folder has jax
    "TracerBoolConversionError": "inside jax.jit a value is not known yet: `jnp.where`, not `if`",
    "TracerArrayConversionError": "inside jax.jit a value is not known yet: `jnp`, not `np`",
}


def in_one_line(error: Exception, function: Callable) -> str:
    """An exception with the line of the reader's file that caused it."""
    file = inspect.unwrap(function).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    name = type(error).__name__
    message = HINTS.get(name) or str(error).strip().split("\n")[0]
    return f"line {lines[-1] if lines else '?'} raises {name}: {message}"
