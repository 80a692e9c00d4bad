"""Judges functions that a reader writes: not begun, right, or wrong, and how. The same file in every folder.

A mistake is recognised by its numbers: the usual mistakes are computed from the same input, and the one that
gives exactly what the reader's function gives is named. If none does, pairs of mistakes are tried.
"""

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

HINTS = dict.fromkeys(
    ("TracerBoolConversionError", "TracerArrayConversionError"),
    "inside jax.jit a value is not known yet: use `jnp.where`, not `if`, and `jnp`, not `np`",
)


class Exercise(NamedTuple):
    """What is known of a function left to the reader."""

    look: Callable[[Callable], dict[str, Any]]  # calls a function on fixed numbers: {input: result}
    right: Callable  # the function as it should be
    mistakes: Mapping[str, Any]  # by the words that name it: another function, or other options of `right`
    tolerance: float = 1e-5  # largest difference, absolute or relative, that counts as rounding
    returns: bool = True  # False for a function that changes its arguments in place
    also: Callable[[Callable], str] = lambda function: ""  # what is wrong although the numbers are right


class Verdict(NamedTuple):
    """What is said of a function."""

    status: str  # "not begun", "right" or "wrong"
    lines: tuple[str, ...] = ()  # how it is wrong
    mistakes: tuple[str, ...] = ()  # the mistakes that give the same numbers


class Unusable(Exception):
    """A result that can't be compared; the text says why."""


def run(exercises: Mapping[str, Exercise], functions: Iterable[Callable]) -> bool:
    """Judges every function by its name and prints the verdicts; True if all are right."""
    verdicts = {f.__name__: judge(f, exercises[f.__name__]) for f in functions}
    for name, verdict in verdicts.items():
        print(f"{name:20s} {verdict.status}")
        for line in verdict.lines:
            print("    " + line.replace("\n", "\n" + " " * 14))
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
    except Unusable as error:
        return Verdict("wrong", (str(error),))
    except Exception as error:  # whatever it is, the reader's own line caused it: one line, no traceback
        return Verdict("wrong", (in_one_line(error, function),))
    expected = exercise.look(exercise.right)
    differing = {g: difference(found[g], expected[g], exercise.tolerance) for g in expected}
    differing = {given: how for given, how in differing.items() if how}
    if not differing:
        objection = exercise.also(function)
        return Verdict("wrong", (objection,)) if objection else Verdict("right")

    def gives_the_same(mistake: Any) -> bool:
        results = exercise.look(variant(exercise, mistake))
        return not any(difference(found[g], results[g], exercise.tolerance) for g in results)

    mistakes = [name for name, mistake in exercise.mistakes.items() if gives_the_same(mistake)]
    if not mistakes:
        options = [(name, m) for name, m in exercise.mistakes.items() if isinstance(m, Mapping)]
        pairs = [(f"{a}; and {b}", x | y) for (a, x), (b, y) in itertools.combinations(options, 2)
                 if not x.keys() & y.keys()]  # fmt: skip
        mistakes = [name for name, pair in pairs if gives_the_same(pair)][:1]
    given, how = next(iter(differing.items()))
    lines = [
        f"given     {given}",
        f"expected  {text(expected[given])}",
        f"found     {text(found[given])}",
        how,
    ]
    lines += [f"This is what comes out if {name}." for name in mistakes]
    if not mistakes:
        lines += [
            f"None of the {len(exercise.mistakes)} usual mistakes gives exactly this, nor do two at once."
        ]
    return Verdict("wrong", tuple(lines), tuple(mistakes))


def variant(exercise: Exercise, mistake: Any) -> Callable:
    """The function with a mistake in it."""
    return functools.partial(exercise.right, **mistake) if isinstance(mistake, Mapping) else mistake


def numbers(result: Any) -> np.ndarray:
    """A result as an array. Raises Unusable if it is none."""
    try:
        array = np.asarray(result)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise Unusable(f"it returns a {type(result).__name__}, which is not an array of numbers")
    return array


def difference(found: Any, expected: Any, tolerance: float) -> str:
    """How two results differ, or "". nan equals nan; where bools are expected, 0 and 1 are as good."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return f"Its shape is {list(found.shape)}; expected {list(expected.shape)}."
    if found.dtype.kind not in {"f": "f", "i": "iu", "b": "biuf"}[expected.dtype.kind]:
        return f"Its type is {found.dtype}; expected {expected.dtype}."
    close = np.allclose(found.astype(float), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if close else "Its numbers differ."


def text(array: Any) -> str:
    """Numbers for a message; of a large array the corners."""
    return np.array2string(np.asarray(array), 90, 5, suppress_small=True, threshold=64, edgeitems=2)


def in_one_line(error: Exception, function: Callable) -> str:
    """An exception with the line of the reader's file that caused it."""
    file = inspect.unwrap(function).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    name = type(error).__name__
    message = HINTS.get(name) or str(error).strip().split("\n")[0]
    return f"line {lines[-1] if lines else '?'} raises {name}: {message}"
