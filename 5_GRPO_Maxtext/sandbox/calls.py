"""Assert statements about functions in another process, out of reach of the program under test.

    checker: runs the tests,      --- look, call, make, as JSON --->   server: runs the answer,
    knows the expected values     <-- plain data or an exception ---   sees each call's arguments

`task/code_grading.py` sends the text of this file to two sandboxes; one calls `check`, the other
`serve`. In the tests `add(1, 2)` sends the arguments to the server and rebuilds the reply from
plain data, so `add(1, 2) == 3` compares an int with an int, in a process that never runs a line of
the answer.

Only plain data crosses, by value: None, bool, float, str, the types in TYPES and LIBRARY. A
subclass crosses as its base. If a test passes a list, set or dict to a function that returns None,
it comes back changed, as after `sort`. Anything else an answer returns could claim to equal what
the test expects. So the test fails, even one that catches every exception. It also fails if the
answer lacks a name or its process has ended.

A test makes an object by calling a class, a name with a capital first letter: `s = Stack()`. The
object stays in the server; its methods, attributes and OPERATIONS return plain data. It can't be
compared or tested for truth, because that would run the answer's code. A function can only be
called.
"""

import builtins
import collections.abc
import contextlib
import importlib
import itertools
import json
import operator
import os
import sys

ITEMS = 10_000  # of a range or an iterator
OPERATIONS = (  # of an object, where its class defines them
    *("__call__", "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__next__"),
    *("__repr__", "__setitem__", "__str__"),
)
# Modules whose names tests may use without an import. Not operator, or `add` would mean the
# library's.
HELPERS = (
    *("math", "collections", "itertools", "functools", "string", "heapq", "bisect", "copy"),
    *("fractions", "decimal", "datetime", "statistics", "typing"),
)


def library(name: str):
    """What `name` means without an import: a Python module, a public name of HELPERS, or None."""
    if name.startswith("_"):
        return None
    if name in sys.stdlib_module_names:
        return importlib.import_module(name)
    modules = map(importlib.import_module, HELPERS)
    return next((vars(m)[name] for m in modules if name in getattr(m, "__all__", vars(m))), None)


class NotData(BaseException):
    """A value that should cross isn't plain data. Not an Exception, because tests catch those."""


def _items(iterator):
    items = list(itertools.islice(iterator, ITEMS + 1))
    if len(items) > ITEMS:
        raise NotData
    return items


TYPES = {  # by name: the type, how to split a value into parts (values, too), and how to rebuild it
    # decimal is quadratic, up to 4300 digits
    "int": (int, lambda n: [hex(n)], lambda text: int(text, 16)),
    "complex": (complex, lambda z: [z.real, z.imag], complex),
    "bytes": (bytes, lambda data: [data.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda data: [data.hex()], bytearray.fromhex),
    "range": (range, operator.attrgetter("start", "stop", "step"), range),
    "slice": (slice, operator.attrgetter("start", "stop", "step"), slice),
    **{
        kind.__name__: (kind, list, lambda *items, kind=kind: kind(items))
        for kind in (list, tuple, set, frozenset, collections.deque)
    },
    "dict": (dict, dict.items, lambda *items: dict(items)),
    "dict_keys": (type({}.keys()), list, lambda *items: dict.fromkeys(items).keys()),
    "dict_values": (type({}.values()), list, lambda *items: dict(enumerate(items)).values()),
    "dict_items": (type({}.items()), list, lambda *items: dict(items).items()),
    "iterator": (collections.abc.Iterator, _items, lambda *items: (item for item in items)),
}
LIBRARY = {"Fraction": "fractions", "Decimal": "decimal"}
LIBRARY |= dict.fromkeys(("datetime", "date", "time", "timedelta", "timezone"), "datetime")


def encode(value):
    """Encodes plain data, or an object that a test made, for JSON; raises NotData for anything
    else.
    """
    if isinstance(type(value), Class):
        return ["object", object.__getattribute__(value, "_number")]
    if value is None or isinstance(value, (bool, float, str)):
        return value
    for name, (kind, parts, _) in TYPES.items():
        if isinstance(value, kind):
            return [name, *map(encode, parts(value))]
    for name, module in LIBRARY.items():
        # We don't import it, which takes longer than most tests. Without the import no such value
        # can exist.
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return [name, *map(encode, value.__reduce__()[1])]
    raise NotData


def decode(data, made=()):
    """Inverse of `encode`; an object is the one of that number in `made`. Other `data` raise or are
    plain.
    """
    if data is None or isinstance(data, (bool, float, str)):
        return data
    kind, *parts = data
    if kind == "object":
        return made[parts[0]]
    make = (
        TYPES[kind][2] if kind in TYPES else getattr(importlib.import_module(LIBRARY[kind]), kind)
    )
    value = make(*(decode(part, made) for part in parts))
    if kind == "range" and len(value) > ITEMS:  # it would hold every number
        raise ValueError("too many items")
    return value


# ---------------------------------------------------------------- the server: the answer's process


def serve(answer: str, requests: int, replies: int) -> None:
    """Runs the Python text `answer`, then the requests, one JSON list per line of a file
    descriptor.
    """
    module = sys.modules["answer"] = type(sys)("answer")
    made = []  # the objects that the tests made

    def reply_to(verb, target, arguments, named):
        owner, *attributes = target
        value = getattr(module, owner) if isinstance(owner, str) else made[owner]
        for name in attributes:
            value = getattr(value, name)
        if verb == "look":
            return ["callable", None] if callable(value) else ["value", encode(value)]
        arguments, named = decode(arguments, made), decode(named, made)
        result = value(*arguments, **named)
        if verb == "make" and isinstance(value, type):
            made.append(result)
            defined = {name for kind in type(result).__mro__ for name in vars(kind)}
            return ["made", *defined.intersection(OPERATIONS)]
        kinds = (list, set, dict) if result is None else ()
        changed = [encode(a) if isinstance(a, kinds) else None for a in arguments]
        return ["value", encode(result), *changed]

    exec(compile(answer, "answer.py", "exec"), module.__dict__)
    with open(requests) as lines, open(replies, "w") as out:
        for line in lines:
            try:
                reply = json.dumps(reply_to(*json.loads(line)))
            except BaseException as error:  # SystemExit too: the next call may succeed
                kinds = [
                    kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"
                ]
                reply = json.dumps(["error", kinds[0], str(error)])
            print(reply, file=out, flush=True)


# ---------------------------------------------------------------- the checker: the tests' process

failed = []  # not empty: the current statement must fail, whatever it catches
numbers = itertools.count()  # of the objects that the tests made
wire = []  # the file of the requests, that of the replies, and how many characters a reply may have


def fail(*_):
    """Fails the current statement."""
    failed.append(True)
    raise NotData


def ask(verb: str, target: list, arguments=(), named=()) -> list:
    """Sends one request; returns the reply: a verdict, and one or more values, which are plain
    data.

    The verb is "look", "call" or "make"; the target a name in the answer, or the number of an
    object, then perhaps attributes. Raises the Exception that the answer raised, and NotData if it
    replied anything else.
    """
    out, lines, most = wire
    raised = None
    try:
        request = [verb, target, encode(list(arguments)), encode(dict(named))]
        print(json.dumps(request), file=out, flush=True)
        verdict, *parts = json.loads(lines.readline(most))
        if verdict != "error":
            value, *rest = map(decode, parts)
            return [verdict, value, *rest]
        kind, text = getattr(builtins, parts[0]), parts[1]
        # Not SystemExit, which would end the checker, nor StopIteration, which would end a test's
        # loop early.
        if issubclass(kind, Exception) and (kind is not StopIteration or target[-1] == "__next__"):
            raised = kind.__new__(kind, text)  # calling some kinds takes other arguments
    except (Exception, NotData):  # not plain data; or the reply is cut off, too long, not JSON
        pass
    if raised is None:
        fail()
    raise raised


def look(target: list):
    """What the tests get for `target`: plain data, or what stands for a function or a class."""
    verdict, value, *_ = ask("look", target)
    if verdict != "callable":
        return value
    if len(target) == 1 and target[0][:1].isupper():  # a class, by its name
        return Class(target[0], (Object,), {"__slots__": ()})

    def function(*arguments, **named):
        return call(target, *arguments, **named)

    function.__name__ = function.__qualname__ = target[-1]
    function.__module__, function.__signature__ = "answer", "unknown"  # inspect refuses the second
    return function


def call(target: list, /, *arguments, **named):
    """Calls a function or a method; returns plain data."""
    _, value, *changed = ask("call", target, arguments, named)
    # Only if it returned None: otherwise the answer could send back anything as the changed
    # arguments.
    for argument, new in zip(arguments, changed if value is None else ()):
        if isinstance(new, list) and isinstance(argument, list):
            argument[:] = new
        elif isinstance(new, (set, dict)) and type(argument) is type(new):
            argument.clear()
            argument.update(new)
    return value


class Class(type):
    """What stands for one of the answer's classes, or for a name that should be one."""

    def __getattr__(cls, name):
        return look([cls.__name__, name])

    def __call__(cls, /, *arguments, **named):
        verdict, *values = ask("make", [cls.__name__], arguments, named)
        if verdict != "made":
            return values[0]

        number = next(numbers)

        def operation(name):
            return lambda made, /, *a, **named: call([number, name], *a, **named)

        defined = {name: operation(name) for name in OPERATIONS if name in values}
        made = object.__new__(Class(cls.__name__, (cls,), defined | {"__slots__": ()}))
        object.__setattr__(made, "_number", number)
        return made


class Object:
    """What stands for an object that a test made."""

    __slots__ = ("_number",)

    def __getattr__(self, name):
        return look([self._number, name])

    __setattr__ = __delattr__ = __bool__ = __reduce_ex__ = fail
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = fail


class Builtins(dict):
    """The builtins, except names that the answer should define, and the library's names."""

    names = ()  # those of the answer, in the tests

    def __missing__(self, name):
        value = None if name in self.names else library(name)
        # a NameError could pass for the error a test expects
        return fail() if value is None else value


def check(tests, names, requests: int, replies: int, most: int) -> None:
    """Runs the statements and prints a line for each test: "1" if it passed, else "0".

    If the answer defines none of the names, nothing is printed. A preparing statement that fails
    ends the run, since later tests would see stale values. `tests` and `names` are from
    `code_grading.read_statements`; a reply has at most `most` characters.
    """
    wire[:] = open(requests, "w"), open(replies), most  # noqa: SIM115
    Builtins.names = names
    ours = Builtins({name: value for name, value in vars(builtins).items() if name not in names})
    namespace = {"__name__": "__main__", "__builtins__": ours}
    for name, theirs in names.items():
        with contextlib.suppress(BaseException):  # the answer doesn't define it
            namespace[name] = look([theirs])
    with open(os.dup(1), "w") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
        for statement, is_test in tests if len(namespace) > 2 else ():
            failed.clear()
            try:
                exec(compile(statement, "tests.py", "exec"), namespace)
                passed = not failed  # a test may have caught it
            except BaseException:
                passed = False
            if is_test:
                print(f"{passed:d}", file=out, flush=True)
            elif not passed:
                break
