r"""Assert statements about functions in another process, out of reach of the program under test.

    checker: runs the tests,      --- get / call, plain data as JSON --->   server: runs the answer,
    knows the expected values     <-- value, object, or exception -------   sees the arguments of each call

`parts/rewards/code_grading.py` sends the text of this file to two sandboxes; one calls `check`, the other
`serve`. In the tests `add` is a `Remote`: calling it sends the arguments to the server and rebuilds the reply
from plain data. `add(1, 2) == 3` therefore compares an int with an int, in a process that never runs a line
of the answer. Whatever the answer does to its own process, it can only reply; it never sees the expected
value.

Values: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range, slice, deque,
Fraction, Decimal. They cross by value: what a test does to them, it does to a copy. A list, set or dict that
is passed to a function that returns None comes back with the function's changes, as after `sort`.

Any other object stays in the server, and could claim to be whatever a test asks for. So
  * it equals only itself, and has no truth value;
  * its methods are called only if a test made it by calling a class, a name with a capital first letter:
    `Stack().pop()`, but not `f(x).startswith("a")`;
  * iteration, `in`, len() and [] work on a copy of all its items; one that does not end has none;
  * what a test has once read of it, an attribute or its items, stays so until the test hands it to the answer
    again: it cannot have length 0 for one look and 3 items for the next.
Tests can also call what a function returned, and use str() and next(). An object that a test made is asked
each time, since its methods change it.
"""

import builtins
import collections
import importlib
import itertools
import json
import operator
import os
import sys

ITEMS = 10_000  # that iteration copies at most

# ---------------------------------------------------------------- values


def encode(value, keep):
    """`value` in a form that JSON can hold; keep(value) encodes an object that is not plain data."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # decimal takes quadratic time, and Python stops at 4300 digits
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, (range, slice)):
        parts = (value.start, value.stop, value.step)
        return [type(value).__name__, *(encode(part, keep) for part in parts)]
    # Not imported for it: that takes longer than most tests. Who has not imported it has no such value.
    if isinstance(value, getattr(sys.modules.get("fractions"), "Fraction", ())):
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    if isinstance(value, getattr(sys.modules.get("decimal"), "Decimal", ())):
        return ["Decimal", str(value)]
    for kind in (list, tuple, set, frozenset, collections.deque):
        if isinstance(value, kind):
            return [kind.__name__, *(encode(part, keep) for part in value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, keep), encode(part, keep)] for key, part in value.items())]
    return keep(value)


def decode(data, find):
    """Inverse of `encode`; find(data) returns the object for what `keep` encoded.

    Raises:
        ValueError: `data` is not an encoded value.
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
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    if kind == "dict":
        return {decode(key, find): decode(part, find) for key, part in parts}
    if kind == "Fraction":
        return importlib.import_module("fractions").Fraction(*(int(part, 16) for part in parts))
    if kind == "Decimal":
        return importlib.import_module("decimal").Decimal(*parts)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
    if kind in kinds:
        return kinds[kind](decode(part, find) for part in parts)
    if kind in ("range", "slice"):
        return {"range": range, "slice": slice}[kind](*(decode(part, find) for part in parts))
    return find(data)


# ---------------------------------------------------------------- the server: the answer's process


def all_items(value) -> list:
    """The items of an iterable; raises OverflowError if it has more than ITEMS."""
    items = list(itertools.islice(value, ITEMS + 1))
    if len(items) > ITEMS:
        raise OverflowError(f"more than {ITEMS} items")
    return items


def next_item(value) -> list:
    """The next item of an iterator, in a list; an empty list at its end."""
    try:
        return [next(value)]
    except StopIteration:
        return []


LOOKS = {  # what a test can ask of an object, besides calling it
    **{"get": getattr, "str": str, "repr": repr, "len": len},
    **{"item": operator.getitem, "items": all_items, "next": next_item},
}


def serve(answer: str, requests: int, replies: int) -> None:
    """Runs `answer`, then executes the requests. This process holds no secret.

    Args:
        answer (str): Python text.
        requests (int): file descriptor to read, one JSON list per line.
        replies (int): file descriptor to write, one JSON list per request.
    """
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
        if verb in LOOKS:
            return [encode(LOOKS[verb](objects[target], *decode(rest[0], find)), keep)]
        arguments, named = decode(rest[0], find), decode(rest[1], find)
        value = objects[target](*arguments, **named)
        changed = [encode(argument, keep) for argument in arguments] if value is None else []
        return [encode(value, keep), *changed]

    exec(compile(answer, "answer.py", "exec"), module.__dict__)
    with open(requests) as lines, open(replies, "w") as out:
        for line in lines:
            try:
                reply = json.dumps(["value", *reply_to(*json.loads(line))])
            except BaseException as error:  # SystemExit too: the next call may succeed
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                reply = json.dumps(["error", kinds[0], str(error)])
            print(reply, file=out, flush=True)


# ---------------------------------------------------------------- the checker: the tests' process


class NotData(Exception):
    """A test passes a value that is not plain data: an error in the tests, not in the answer."""


class Wire:
    """Sends requests and reads replies of at most `most` characters, because the answer writes them."""

    def __init__(self, requests: int, replies: int, most: int):
        self.out, self.lines, self.most = open(requests, "w"), open(replies), most  # noqa: SIM115

    def ask(self, *request):
        """Sends one request and returns the decoded reply, a list; raises what the answer raised."""
        print(json.dumps(request), file=self.out, flush=True)
        line = self.lines.readline(self.most)
        if not line.endswith("\n"):
            raise RuntimeError("the answer's process ended, or its reply is too long")
        verdict, *rest = json.loads(line)
        if verdict != "value":
            kind = getattr(builtins, rest[0], None)
            # Only subclasses of Exception: the answer's SystemExit must not end the checker. StopIteration
            # would end a loop of the test before it has looked at everything.
            known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration
            raise (kind if known else RuntimeError)(rest[1])
        return [decode(part, lambda data: Remote(self, data[1])) for part in rest]


class Remote:
    """An object, class or function in the answer's process.

    Args:
        wire (Wire): connection to it.
        number (int): of the object in the server.

    `_marked` sets its flags:
        own (bool): whether the tests know what it is: a name that they use, or an instance that they made.
        makes (bool): whether calling it makes an instance.
        method (bool): whether it is an attribute of an object of which they do not, and cannot be called.
    """

    def __init__(self, wire, number):
        object.__setattr__(self, "_wire_and_number", (wire, int(number)))
        object.__setattr__(self, "_flags", (False, False, False))
        object.__setattr__(self, "_seen", {})

    def _ask(self, verb, *rest):
        """The reply to one of LOOKS."""
        wire, number = self._wire_and_number
        return wire.ask(verb, number, encode(list(rest), _number))[0]

    def _look(self, verb, *rest):
        """The same; of an object that no test made, always the first reply."""
        own, *_ = self._flags
        if own:
            return self._ask(verb, *rest)
        if (verb, *rest) not in self._seen:
            self._seen[verb, *rest] = self._ask(verb, *rest)
        return self._seen[verb, *rest]

    def __getattr__(self, name):
        own, makes, _ = self._flags
        return _marked(self._look("get", name), makes=makes, method=not own)

    def __call__(self, *arguments, **named):
        (wire, number), (_, makes, method) = self._wire_and_number, self._flags
        if method:
            raise TypeError("a method of an object that the test did not make")
        self._seen.clear()
        value, *changed = wire.ask("call", number, encode(list(arguments), _number), encode(named, _number))
        value = _marked(value, own=makes)
        # A function that returns something changes nothing here: the answer could reply anything.
        for argument, new in zip(arguments, changed if value is None else ()):
            if isinstance(argument, list) and isinstance(new, list):
                argument[:] = new
            elif isinstance(argument, (set, dict)) and type(argument) is type(new) and argument != new:
                argument.clear()
                argument.update(new)
        return value

    def __iter__(self):
        return iter(self._look("items"))

    def __contains__(self, item):
        return item in self._look("items")

    def __len__(self):
        own, *_ = self._flags
        return self._ask("len") if own else len(self._look("items"))

    def __getitem__(self, key):
        own, *_ = self._flags
        return self._ask("item", key) if own else self._look("items")[key]

    def __str__(self):
        return self._look("str")

    def __repr__(self):
        return self._look("repr")

    def __next__(self):
        self._seen.clear()
        items = self._ask("next")
        if not items:
            raise StopIteration
        return items[0]

    def __setattr__(self, name, value):
        raise TypeError("a test cannot set an attribute of the answer's object")

    def __bool__(self):
        raise TypeError("the answer's object has no truth value")


def _number(value):
    if not isinstance(value, Remote):
        raise NotData(f"a value of type {type(value).__name__}")
    value._seen.clear()  # what it is handed to may change it
    return ["object", value._wire_and_number[1]]


def _marked(value, own=False, makes=False, method=False):
    """The reply to a request; an object gets these flags, and keeps what was seen of it."""
    if isinstance(value, Remote):
        object.__setattr__(value, "_flags", (own, makes, method))
    return value


def check(tests, names, helpers, wire: Wire, verdicts: int) -> None:
    """Runs the tests and writes one line per test: "1" (passed), "0" (failed), and why where it never can.

    Args:
        tests (list of (str, bool)): statements in order, each with whether it is a test or only prepares one.
            A preparing statement that fails ends the run, since later tests would see stale values.
        names (list of str): names that the tests take from the answer.
        helpers (dict): names that the tests use without importing them: (module, name in it, or "").
        wire (Wire): connection to the server.
        verdicts (int): file descriptor to write.
    """
    namespace = {"__name__": "tests"}
    for name, (module, attribute) in helpers.items():
        found = importlib.import_module(module)
        namespace[name] = getattr(found, attribute) if attribute else found
    with open(verdicts, "w") as out:
        for name in names:
            try:
                namespace[name] = _marked(wire.ask("name", name)[0], own=True, makes=name[:1].isupper())
            except Exception:  # the answer does not define it: the tests that use it will fail
                namespace.pop(name, None)
        for statement, is_test in tests:
            try:
                exec(compile(statement, "tests.py", "exec"), namespace)
                verdict = "1"
            except NotData as error:
                verdict = f"0 a test hands {error} to the answer: {statement}"
            except BaseException:
                verdict = "0"
            passed = verdict == "1"
            if is_test:
                print(verdict.replace("\n", " "), file=out, flush=True)
            elif not passed:
                break


def silence() -> int:
    """Sends stdout to /dev/null, because tests may print, and returns a copy of its file descriptor."""
    copy = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return copy
