"""Assert statements about functions in another process, out of reach of the program under test.

    checker: runs the tests,      --- look, call, make, as JSON --->   server: runs the answer,
    knows the expected values     <-- plain data or an exception ---   sees the arguments of each call

`task/code_grading.py` sends the text of this file to two sandboxes; one calls `check`, the other
`serve`. In the tests `add(1, 2)` sends the arguments to the server and rebuilds the reply from plain data, so
`add(1, 2) == 3` compares an int with an int, in a process that never runs a line of the answer.

Only plain data crosses, by value: None, bool, float, str, the types in TYPES and LIBRARY. A subclass crosses
as its base. If a test passes a list, set or dict to a function that returns None, it comes back changed, as
after `sort`. Anything else an answer returns could claim to equal what the test expects. So the test fails,
even one that catches every exception. It also fails if the answer lacks a name or its process has ended.

A test makes an object by calling a class, a name with a capital first letter: `s = Stack()`. The object stays
in the server; its methods, attributes and OPERATIONS return plain data. It can't be compared or tested for
truth, because that would run the answer's code. A function or a class can be called. For anything else
(`f.__doc__`, `hasattr(f, "args")`) the test gets the answer's own attribute, or fails.
"""

import builtins
import collections.abc
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


class NotData(BaseException):
    """A value that should cross isn't plain data. Not an Exception, because tests catch those."""


def _items(iterator):
    items = list(itertools.islice(iterator, ITEMS + 1))
    if len(items) > ITEMS:
        raise NotData(type(iterator).__name__)
    return items


TYPES = {  # by name: the type, how to split a value into parts (values, too), and how to rebuild it
    "int": (int, lambda n: [hex(n)], lambda text: int(text, 16)),  # decimal is quadratic, up to 4300 digits
    "complex": (complex, lambda z: [z.real, z.imag], complex),
    "bytes": (bytes, lambda data: [data.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda data: [data.hex()], bytearray.fromhex),
    "range": (range, operator.attrgetter("start", "stop", "step"), range),
    "slice": (slice, operator.attrgetter("start", "stop", "step"), slice),
    **{kind.__name__: (kind, list, lambda *items, kind=kind: kind(items))
       for kind in (list, tuple, set, frozenset, collections.deque)},
    "dict": (dict, dict.items, lambda *items: dict(items)),
    "dict_keys": (type({}.keys()), list, lambda *items: dict.fromkeys(items).keys()),
    "dict_values": (type({}.values()), list, lambda *items: dict(enumerate(items)).values()),
    "dict_items": (type({}.items()), list, lambda *items: dict(items).items()),
    "generator": (collections.abc.Generator, _items, lambda *items: (item for item in items)),
    "iterator": (collections.abc.Iterator, _items, lambda *items: iter(items)),
}  # fmt: skip
LIBRARY = {"Fraction": "fractions", "Decimal": "decimal"}
LIBRARY |= dict.fromkeys(("datetime", "date", "time", "timedelta", "timezone"), "datetime")


def encode(value):
    """Encodes plain data, or an object that a test made, for JSON; raises NotData for anything else."""
    if isinstance(value, Remote):
        return ["object", *place_of(value)[0]]
    if value is None or isinstance(value, (bool, float, str)):
        return value
    for name, (kind, parts, _) in TYPES.items():
        if isinstance(value, kind):
            return [name, *map(encode, parts(value))]
    for name, module in LIBRARY.items():
        # We don't import it, which takes longer than most tests. Without the import no such value can exist.
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return [name, *map(encode, value.__reduce__()[1])]
    raise NotData(type(value).__name__)


def decode(data, find=None):
    """Inverse of `encode`; find(target) returns the object that a test made. Raises for any other `data`."""
    if data is None or isinstance(data, (bool, float, str)):
        return data
    if not isinstance(data, list):
        raise ValueError("not an encoded value")
    kind, *parts = data
    if kind == "object" and find:
        return find(parts)
    make = TYPES[kind][2] if kind in TYPES else getattr(importlib.import_module(LIBRARY[kind]), kind)
    value = make(*(decode(part, find) for part in parts))
    if kind == "range" and not find and len(value) > ITEMS:  # the answer's: it would hold every number
        raise ValueError("too many items")
    return value


# ---------------------------------------------------------------- the server: the answer's process


def serve(answer: str, requests: int, replies: int) -> None:
    """Runs the Python text `answer`, then the requests, one JSON list per line of a file descriptor."""
    module = sys.modules["answer"] = type(sys)("answer")
    made = []  # the objects that the tests made

    def find(target):
        owner, *attributes = target
        value = getattr(module, owner) if isinstance(owner, str) else made[owner]
        for name in attributes:
            value = getattr(value, name)
        return value

    def reply_to(verb, target, arguments, named):
        value, arguments, named = find(target), decode(arguments, find), decode(named, find)
        if verb == "look":
            return ["callable", None] if callable(value) else ["value", encode(value)]
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
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                reply = json.dumps(["error", kinds[0], str(error)])
            print(reply, file=out, flush=True)


# ---------------------------------------------------------------- the checker: the tests' process

faults = []  # why the current statement must fail, whatever it catches; "" if it's the answer's fault
numbers = itertools.count()  # of the objects that the tests made
wire = []  # the file of the requests, that of the replies, and how many characters a reply may have


def fail(fault=""):
    """Fails the current statement."""
    faults.append(fault)
    raise NotData(fault)


def _failing(fault):
    return lambda *_: fail(fault)


def ask(verb: str, target: list, arguments=(), named=()) -> list:
    """Sends one request; returns the reply: a verdict, and one or more values, which are plain data.

    The verb is "look", "call" or "make"; the target a name in the answer, or the number of an object, then
    perhaps attributes. Raises the Exception that the answer raised, and NotData if it replied anything else.
    """
    try:
        request = [verb, target, encode(list(arguments)), encode(dict(named))]
    except NotData as error:
        fail(f"hands a value of type {error} to the answer")
    out, lines, most = wire
    raised = None
    try:
        print(json.dumps(request), file=out, flush=True)
        verdict, *parts = json.loads(lines.readline(most))
        if verdict != "error":
            value, *rest = map(decode, parts)
            return [verdict, value, *rest]
        kind, text = getattr(builtins, parts[0]), parts[1]
        # Not SystemExit, which would end the checker, nor StopIteration, which would end a test's loop early.
        if issubclass(kind, Exception) and (kind is not StopIteration or target[-1] == "__next__"):
            raised = kind.__new__(kind, text)  # calling some kinds takes other arguments
    except Exception:  # cut off, too long, not JSON, no plain data
        pass
    if raised is None:
        fail()
    raise raised


def look(target: list, calls: bool = True):
    """What the tests get for `target`: plain data, a class, or a function, callable if `calls`."""
    verdict, value, *_ = ask("look", target)
    if verdict != "callable":
        return value
    is_class = len(target) == 1 and target[0][:1].isupper()  # by its name
    return Class(target) if is_class else Function(target, calls)


def call(target: list, /, *arguments, **named):
    """Calls a function or a method; returns plain data."""
    _, value, *changed = ask("call", target, arguments, named)
    # Only if it returned None: otherwise the answer could send back anything as the changed arguments.
    for argument, new in zip(arguments, changed if value is None else ()):
        if isinstance(new, list) and isinstance(argument, list):
            argument[:] = new
        elif isinstance(new, (set, dict)) and type(argument) is type(new):
            argument.clear()
            argument.update(new)
    return value


def place_of(remote) -> tuple[list, bool]:
    """The target that `remote` refers to, and whether tests may call it."""
    return object.__getattribute__(remote, "_place")


class Remote:
    """A proxy for an object that a test made; with its OPERATIONS, a separate class."""

    def __init__(self, target: list, calls: bool = True):
        object.__setattr__(self, "_place", (target, calls))

    def __getattribute__(self, name):
        if name == "__class__":
            return type(self)
        return look([*place_of(self)[0], name], calls=type(self) is not Function)

    __setattr__ = __delattr__ = _failing("sets an attribute of the answer's object")
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _failing(
        "compares the answer's object, or takes it for true"
    )


_refuse = _failing("asks the answer's function or class for more than its attributes")


class Closed(type):
    """The metaclass of Function and Class, so a test doesn't see our attributes."""

    __getattribute__ = __eq__ = __hash__ = __repr__ = _refuse


class Function(Remote, metaclass=Closed):
    """A proxy for one of the answer's functions or methods. Its attributes come from the answer, as data."""

    def __getattribute__(self, name):
        if name != "__class__":
            return Remote.__getattribute__(self, name)
        kinds = {"function": type(fail), "type": type}  # the others have no name here
        own = look([*place_of(self)[0], "__class__", "__name__"])  # whatever the answer makes of it
        return kinds.get(str(own)) or _refuse()

    def __call__(self, /, *arguments, **named):
        target, calls = place_of(self)
        return call(target, *arguments, **named) if calls else _refuse()

    __hash__ = __repr__ = __dir__ = __reduce_ex__ = _refuse


class Class(Function):
    """A proxy for one of the answer's classes, or for a name that should be one."""

    def __call__(self, /, *arguments, **named):
        target, _ = place_of(self)
        verdict, *values = ask("make", target, arguments, named)
        if verdict != "made":
            return values[0]

        def operation(name):
            return lambda made, /, *a, **named: call([*place_of(made)[0], name], *a, **named)

        operations = {name: operation(name) for name in OPERATIONS if name in values}
        return type(target[0], (Remote,), operations)([next(numbers)])


class Builtins(dict):
    """The builtins, except names the answer defines."""

    def __missing__(self, name):
        fail()  # a NameError could pass for the error a test expects


def check(tests, names, helpers, requests: int, replies: int, most: int) -> None:
    """Runs the statements and prints a line for each: "1" (a test that passed), "0" (failed), "-" (no test).

    The line also says if no answer could pass. If the answer defines none of the names, nothing is printed.
    A preparing statement that fails ends the run, since later tests would see stale values. `tests`, `names`
    and `helpers` are from `code_grading.read_statements`; a reply has at most `most` characters.
    """
    wire[:] = open(requests, "w"), open(replies), most  # noqa: SIM115
    ours = Builtins({name: value for name, value in vars(builtins).items() if name not in names})
    namespace = {"__name__": "__main__", "__builtins__": ours}
    for name, (module, attribute) in helpers.items():
        found = importlib.import_module(module)
        namespace[name] = getattr(found, attribute) if attribute else found
    lacking = 0
    for name, theirs in names.items():
        try:
            namespace[name] = look([theirs])
        except BaseException:  # the answer doesn't define it
            lacking += 1
    with open(os.dup(1), "w") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
        for statement, is_test in tests if lacking < len(names) else ():
            faults.clear()
            try:
                exec(compile(statement, "tests.py", "exec"), namespace)
                passed = not faults  # a test may have caught it
            except BaseException:
                passed = False
            fault = next(filter(None, faults), "")
            reason = f"{fault}: {statement}".replace("\n", " ") if fault else ""
            print(f"{passed:d}" if is_test else "-", reason, file=out, flush=True)
            if not (is_test or passed):
                break
