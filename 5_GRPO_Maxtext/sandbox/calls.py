r"""Assert statements about functions in another process, out of reach of the program under test.

    checker: runs the tests,      --- look, call, make, as JSON --->   server: runs the answer,
    knows the expected values     <-- plain data or an exception ---   sees the arguments of each call

`task/code_grading.py` sends the text of this file to two sandboxes; one calls `check`, the other
`serve`. In the tests `add(1, 2)` sends the arguments to the server and rebuilds the reply from plain data, so
`add(1, 2) == 3` compares an int with an int, in a process that never runs a line of the answer. Whatever the
answer does to its own process, it can only reply; it never sees the expected value.

Only plain data cross: None, bool, int, float, complex, str, bytes, bytearray, slice, list, tuple, set,
frozenset, deque, dict and its views, Fraction, Decimal, the values of datetime; of a range or an iterator at
most ITEMS items. They cross by value: what a test does to them, it does to a copy. A subclass crosses as its
base. A list, set or dict that is passed to a function that returns None comes back with the function's
changes, as after `sort`.

Whatever else an answer returns could claim to be what the test asks for. So the test fails, even one that
catches every exception; it fails, too, where the answer lacks a name or its process has ended.

A test makes an object by calling a class, a name with a capital first letter: `s = Stack()`. The object stays
in the server; its methods, attributes and OPERATIONS give plain data. It cannot be compared or tested for
truth, because that would be code of the answer.
"""

import builtins
import collections.abc
import functools
import importlib
import itertools
import json
import os
import sys

ITEMS = 10_000  # of a range or an iterator
OPERATIONS = (  # of an object, where its class defines them
    *("__call__", "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__next__"),
    *("__repr__", "__setitem__", "__str__"),
)

# ---------------------------------------------------------------- values

KINDS = {  # by name: the type, and a function that makes one of a list of its items
    **{kind.__name__: (kind, kind) for kind in (list, tuple, set, frozenset, collections.deque)},
    "dict_keys": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "dict_values": (type({}.values()), lambda items: dict(enumerate(items)).values()),
    "dict_items": (type({}.items()), lambda items: dict(items).items()),
    "generator": (collections.abc.Generator, lambda items: (item for item in items)),
    "iterator": (collections.abc.Iterator, iter),
}
LIBRARY = {"Fraction": "fractions", "Decimal": "decimal"}
LIBRARY |= dict.fromkeys(("datetime", "date", "time", "timedelta", "timezone"), "datetime")


class NotData(BaseException):
    """What was to cross is no plain data. Not an Exception, because tests catch those."""


def encode(value, refuse):
    """Plain data, or an object that a test made, in a form that JSON can hold; refuse(value) of all else."""
    if isinstance(value, Remote):
        return value._target
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # decimal takes quadratic time, and Python stops at 4300 digits
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, (range, slice)):
        parts = (value.start, value.stop, value.step)
        return [type(value).__name__, *(encode(part, refuse) for part in parts)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, refuse), encode(part, refuse)] for key, part in value.items())]
    for name, (kind, _) in KINDS.items():
        if isinstance(value, kind):
            endless = isinstance(value, collections.abc.Iterator)
            items = list(itertools.islice(value, ITEMS + 1 if endless else None))
            if endless and len(items) > ITEMS:
                return refuse(value)
            return [name, *(encode(item, refuse) for item in items)]
    for name, module in LIBRARY.items():
        # Not imported for it: that takes longer than most tests. Who has not imported it has no such value.
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return [name, *(encode(part, refuse) for part in value.__reduce__()[1])]
    return refuse(value)


def decode(data, find=None):
    """Inverse of `encode`; find(data) returns the object that a test made.

    Raises:
        ValueError: `data` is not an encoded value, or, without `find`, no plain data.
    """
    if not isinstance(data, list):
        if data is None or isinstance(data, (bool, float, str)):
            return data
        raise ValueError("not an encoded value")
    kind, *parts = data
    if kind == "int":
        return int(parts[0], 16)
    if kind == "complex":
        return complex(*parts)
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind].fromhex(parts[0])
    if kind == "dict":
        return {decode(key, find): decode(part, find) for key, part in parts}
    if kind == "object" and find:
        return find(data)
    parts = [decode(part, find) for part in parts]
    if kind == "slice":
        return slice(*parts)
    if kind == "range":
        value = range(*parts)
        if find is None and len(value) > ITEMS:  # the answer's: it would hold every number
            raise ValueError("too many items")
        return value
    if kind in KINDS:
        return KINDS[kind][1](parts)
    return getattr(importlib.import_module(LIBRARY[kind]), kind)(*parts)


# ---------------------------------------------------------------- the server: the answer's process


def serve(answer: str, requests: int, replies: int) -> None:
    """Runs `answer`, then executes the requests. This process holds no secret.

    Args:
        answer (str): Python text.
        requests (int): file descriptor to read, one JSON list per line.
        replies (int): file descriptor to write, one JSON list per request.
    """
    module = type(sys)("answer")
    sys.modules["answer"] = module
    made = []  # the objects that the tests made

    def find(data):
        _, owner, *attribute = data
        value = getattr(module, owner) if isinstance(owner, str) else made[owner]
        return getattr(value, *attribute) if attribute else value

    def refuse(value):
        raise NotData

    def reply_to(verb, target, arguments, named):
        value, arguments, named = find(target), decode(arguments, find), decode(named, find)
        if verb == "look":
            return ["callable", None] if callable(value) else ["value", encode(value, refuse)]
        result = value(*arguments, **named)
        if verb == "make" and isinstance(value, type):
            made.append(result)
            defined = {name for kind in type(result).__mro__ for name in vars(kind)}
            return ["made", *defined.intersection(OPERATIONS)]
        kinds = (list, set, dict) if result is None else ()
        changed = [encode(a, refuse) if isinstance(a, kinds) else None for a in arguments]
        return ["value", encode(result, refuse), *changed]

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


class Wire:
    """Sends requests and reads replies of at most `most` characters, because the answer writes them.

    Attributes:
        fault (str or None): why the statement that runs now must fail, whatever it catches; "" if it is the
            answer's fault, None if it may hold.
    """

    def __init__(self, requests: int, replies: int, most: int):
        self.out, self.lines, self.most = open(requests, "w"), open(replies), most  # noqa: SIM115
        self.fault, self.made = None, 0

    def fail(self, fault: str = ""):
        """Fails the statement that runs now."""
        self.fault = self.fault or fault
        raise NotData(fault)

    def ask(self, verb: str, target: list, arguments=(), named=()) -> list:
        """Sends one request; returns the reply: a verdict, and one or more values, which are plain data.

        Args:
            verb (str): "look", "call" or "make".
            target (list): "object"; a name in the answer, or the number of an object; perhaps an attribute.
            arguments, named: what a call passes.

        Raises:
            Exception: what the answer raised.
            NotData: it replied anything else.
        """
        encoded = [encode(list(arguments), self._refuse), encode(dict(named), self._refuse)]
        raised = None
        try:
            print(json.dumps([verb, target, *encoded]), file=self.out, flush=True)
            verdict, *parts = json.loads(self.lines.readline(self.most))
            if verdict != "error":
                value, *rest = map(decode, parts)
                return [verdict, value, *rest]
            kind, text = getattr(builtins, parts[0]), parts[1]
            # Not SystemExit, which would end the checker, nor StopIteration, which would end a loop of the
            # test before it has looked at everything.
            if issubclass(kind, Exception) and (kind is not StopIteration or target[-1] == "__next__"):
                raised = kind.__new__(kind, text)  # calling some kinds takes other arguments
        except Exception:  # cut off, too long, not JSON, no plain data
            pass
        if raised is None:
            self.fail()
        raise raised

    def _refuse(self, value):
        self.fail(f"hands a value of type {type(value).__name__} to the answer")

    def look(self, target: list):
        """What `target` is to the tests: plain data, a class, or something to call."""
        verdict, value, *_ = self.ask("look", target)
        if verdict != "callable":
            return value
        name = target[-1] if len(target) == 2 else ""
        return Class(self, target) if name[:1].isupper() else functools.partial(self.call, target)

    def call(self, target: list, /, *arguments, **named):
        """Calls a function or a method; returns plain data."""
        _, value, *changed = self.ask("call", target, arguments, named)
        # A function that returns something changes nothing here: the answer could reply anything.
        for argument, new in zip(arguments, changed if value is None else ()):
            if isinstance(argument, list) and isinstance(new, list):
                argument[:] = new
            elif isinstance(argument, (set, dict)) and type(argument) is type(new):
                argument.clear()
                argument.update(new)
        return value


class Remote:
    """An object in the answer's process that a test made; with its OPERATIONS, a class of its own."""

    def __init__(self, wire: Wire, target: list):
        vars(self).update(_wire=wire, _target=target)

    def __getattr__(self, name):
        return self._wire.look([*self._target, name])

    def __setattr__(self, name, value):
        self._wire.fail("sets an attribute of the answer's object")

    def _judge(self, *other):
        self._wire.fail("compares the answer's object, or takes it for true")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _judge


class Class(Remote):
    """A class of the answer's; or, by its name, what should be one."""

    def __call__(self, /, *arguments, **named):
        verdict, *values = self._wire.ask("make", self._target, arguments, named)
        if verdict != "made":
            return values[0]

        def operation(name):
            return lambda thing, /, *a, **named: self._wire.call([*thing._target, name], *a, **named)

        operations = {name: operation(name) for name in OPERATIONS if name in values}
        self._wire.made += 1
        target = ["object", self._wire.made - 1]
        return type(self._target[1], (Remote,), operations)(self._wire, target)


class Builtins(dict):
    """The builtins, without those whose names are the answer's."""

    def __init__(self, wire: Wire, names):
        super().__init__({name: value for name, value in vars(builtins).items() if name not in names})
        self.wire = wire

    def __missing__(self, name):
        self.wire.fail()  # a NameError would pass for the error that a test expects


def check(tests, names, helpers, wire: Wire, verdicts: int) -> None:
    """Runs the statements and writes a line for each: "1" (a test that passed), "0" (failed), "-" (no test).

    The line also says why no answer could pass. For an answer that defines none of the names there are none.

    Args:
        tests (list of (str, bool)): statements in order, each with whether it is a test or only prepares one.
            A preparing statement that fails ends the run, since later tests would see stale values.
        names (dict of str): names in the tests that are the answer's, each with its name there.
        helpers (dict): names that the tests use without importing them: (module, name in it, or "").
        wire (Wire): connection to the server.
        verdicts (int): file descriptor to write.
    """
    namespace = {"__name__": "__main__", "__builtins__": Builtins(wire, names)}
    for name, (module, attribute) in helpers.items():
        found = importlib.import_module(module)
        namespace[name] = getattr(found, attribute) if attribute else found
    lacking = 0
    for name, theirs in names.items():
        try:
            namespace[name] = wire.look(["object", theirs])
        except BaseException:  # the answer does not define it
            lacking += 1
    with open(verdicts, "w") as out:
        for statement, is_test in tests if lacking < len(names) else ():
            wire.fault = None
            try:
                exec(compile(statement, "tests.py", "exec"), namespace)
                passed = wire.fault is None  # a test may have caught it
            except BaseException:
                passed = False
            reason = f"{wire.fault}: {statement}".replace("\n", " ") if wire.fault else ""
            print(f"{passed:d}" if is_test else "-", reason, file=out, flush=True)
            if not (is_test or passed):
                break


def silence() -> int:
    """Sends stdout to /dev/null, because tests may print, and returns a copy of its file descriptor."""
    copy = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return copy
