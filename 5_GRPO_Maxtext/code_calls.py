r"""Assert statements about functions that live in another process, out of reach of the tested program.

    checker: runs the tests,      --- get / call, plain data as JSON --->   server: runs the answer
    knows what is expected        <-- value, object, or exception -------   knows the arguments of each call

`code_reward.py` sends this file to two sandboxes, one that calls `check` and one that calls `serve`. In the
tests `add` is a `Remote`: calling it sends the arguments over, what comes back is rebuilt from plain data. So
`add(1, 2) == 3` compares an int with an int, in a process that has never run a line of the answer. Whatever
the answer does to its own process, it can only reply; what its reply is compared with it never sees.

Values: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range. An object of a
class of the answer's stays there: its attributes can be read, its methods called, and len(), str(), [] and
iteration work. It equals nothing but itself, and is neither true nor false: with `__eq__` of its own it could
equal whatever is expected. A list, set or dict handed to a function that returns None comes back changed, as
`sort` changes its list.
"""

import builtins
import importlib
import json
import os
import sys

# ---------------------------------------------------------------- values


def encode(value, keep):
    """`value` as something JSON can hold; keep(value) does so for an object that is no plain value."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # decimal digits would take quadratic time, and Python stops at 4300
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, range):
        return ["range", *(encode(part, keep) for part in (value.start, value.stop, value.step))]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, *(encode(part, keep) for part in value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, keep), encode(part, keep)] for key, part in value.items())]
    return keep(value)


def decode(data, find):
    """The value of what `encode` made; find(data) gives the object for what `keep` made."""
    if not isinstance(data, list):
        if data is None or isinstance(data, (bool, float, str)):
            return data
        raise ValueError("no such value")
    kind, *parts = data
    if kind == "int":
        return int(parts[0], 16)
    if kind == "complex":
        return complex(*parts)
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    if kind == "dict":
        return {decode(key, find): decode(part, find) for key, part in parts}
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in kinds:
        return kinds[kind](decode(part, find) for part in parts)
    if kind == "range":
        return range(*(decode(part, find) for part in parts))
    return find(data)


# ---------------------------------------------------------------- the server: the answer's process


def serve(answer: str, requests: int, replies: int) -> None:
    """Runs `answer`, then does what comes over the file descriptor `requests`. Nothing here is a secret."""
    module = type(sys)("answer")
    sys.modules["answer"] = module
    objects = []

    def keep(value):
        objects.append(value)
        return ["object", len(objects) - 1]

    def find(data):
        return objects[data[1]]

    def reply_to(verb, target, *rest):
        if verb == "name":
            return [encode(getattr(module, target), keep)]
        if verb == "get":
            return [encode(getattr(objects[target], rest[0]), keep)]
        arguments, named = decode(rest[0], find), decode(rest[1], find)
        value = objects[target](*arguments, **named)
        changed = [encode(argument, keep) for argument in arguments] if value is None else []
        return [encode(value, keep), *changed]

    exec(compile(answer, "answer.py", "exec"), module.__dict__)
    with open(requests) as lines, open(replies, "w") as out:
        for line in lines:
            try:
                reply = json.dumps(["value", *reply_to(*json.loads(line))])
            except BaseException as error:  # SystemExit, too: the next call may do better
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                reply = json.dumps(["error", kinds[0], str(error)])
            print(reply, file=out, flush=True)


# ---------------------------------------------------------------- the checker: the tests' process


class NotData(Exception):
    """A test hands over something that is no plain value: the tests' fault, not the answer's."""


class Wire:
    """Requests out, replies in; replies are capped, since the answer writes them."""

    def __init__(self, requests: int, replies: int, most: int):
        self.out, self.lines, self.most = open(requests, "w"), open(replies), most  # noqa: SIM115

    def ask(self, *request):
        """Sends one request and returns the decoded reply, a list; raises what the answer raised."""
        print(json.dumps(request), file=self.out, flush=True)
        line = self.lines.readline(self.most)
        if not line.endswith("\n"):
            raise RuntimeError("the answer's process has ended, or its reply has no end")
        verdict, *rest = json.loads(line)
        if verdict != "value":
            kind = getattr(builtins, rest[0], None)
            # Only true errors: a SystemExit of the answer's must not end the checker.
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else RuntimeError)(rest[1])
        return [decode(part, lambda data: Remote(self, data[1])) for part in rest]


class Remote:
    """An object, class or function of the answer's."""

    def __init__(self, wire, number):
        object.__setattr__(self, "_wire_and_number", (wire, int(number)))

    def __getattr__(self, name):
        wire, number = self._wire_and_number
        return wire.ask("get", number, name)[0]

    def __call__(self, *arguments, **named):
        wire, number = self._wire_and_number
        value, *changed = wire.ask("call", number, encode(list(arguments), _number), encode(named, _number))
        for argument, new in zip(arguments, changed):
            if isinstance(argument, list) and isinstance(new, list):
                argument[:] = new
            elif isinstance(argument, (set, dict)) and type(argument) is type(new) and argument != new:
                argument.clear()
                argument.update(new)
        return value

    def __setattr__(self, name, value):
        raise TypeError("tests cannot set attributes of an answer's object")

    def __bool__(self):
        raise TypeError("an answer's object is neither true nor false")


def _number(value):
    if not isinstance(value, Remote):
        raise NotData(f"a value of type {type(value).__name__}")
    return ["object", value._wire_and_number[1]]


def _forward(name):
    def method(self, *arguments):
        try:
            method = self.__getattr__(name)
        except AttributeError as error:  # what Python raises, and list() expects, where len() is missing
            raise TypeError(str(error)) from None
        return method(*arguments)

    return method


for _name in ("__len__", "__str__", "__repr__", "__getitem__", "__iter__", "__next__"):
    setattr(Remote, _name, _forward(_name))


def check(tests, names, modules, wire: Wire, verdicts: int) -> None:
    """Runs the tests, and writes a line for each to the file descriptor `verdicts`: "1" or "0"; or "! fault".

    Args:
        tests (list of (str, bool)): statements in their order, and whether each is a test or prepares one.
            One that prepares and fails ends the run: what comes after it would look at something else.
        names (list of str): what the tests take from the answer.
        modules (list of str): standard library modules that they use without an import.
    """
    namespace = {"__name__": "tests"} | {name: importlib.import_module(name) for name in modules}
    with open(verdicts, "w") as out:
        for name in names:
            try:
                namespace[name] = wire.ask("name", name)[0]
            except Exception:  # the answer lacks it: the tests that use it will fail
                namespace.pop(name, None)
        for statement, is_test in tests:
            try:
                exec(compile(statement, "tests.py", "exec"), namespace)
                passed = True
            except NotData as error:
                print(f"! hands {error} to the answer: {statement}".replace("\n", " "), file=out, flush=True)
                break
            except BaseException:
                passed = False
            if is_test:
                print(int(passed), file=out, flush=True)
            elif not passed:
                break


def silence() -> int:
    """A copy of stdout's file descriptor; stdout itself leads nowhere from now on, for tests that print."""
    copy = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return copy
