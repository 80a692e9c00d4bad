r"""Grades answers that are programs by the share of tests they pass.

    answer = "```python\ndef add(a, b):\n    return a + b\n```"
    score = compute_score(answer, "assert add(1, 2) == 3")  # 1.0

The answer runs in a sandbox (`sandbox/box.py`), and the expected values never enter it:
  * input and output: the program gets its input, and this process compares what it printed;
  * assert statements: they run in a second sandbox and call the answer over pipes
    (`sandbox/calls.py`).
The answer's process doesn't decide the verdict, so it can't cheat with an exit status, a printed
mark or a patched checker. A sandbox doesn't fix a weak test, though: a program that always says yes
passes `assert is_prime(7)`.
"""

import ast
import builtins
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from sandbox import box, calls
from task.grading import extract_answer

ANSWER_SECONDS = 30.0  # wall-clock time for all tests of one answer; tests not reached by then fail
# answers in parallel; more would share processors and run into time limits
AT_ONCE = box.processors()

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def extract_code(completion: str) -> str:
    """The program: the last ``` block in the last answer pair, or else in the text, or else all of
    it.
    """
    text = extract_answer(completion)
    text = completion if text is None else text
    return [text, *_FENCED.findall(text)][-1]


def readable_tests(ground_truth, extra_info) -> list[tuple[str, str]] | tuple[list, dict]:
    """Pairs of input and expected output, or what `read_statements` makes of assert statements.

    `ground_truth` is Python text with assert statements; a list of such texts, of [input, output]
    or of {"input": ..., "output": ...}; {"inputs": [...], "outputs": [...]}; or JSON text of such a
    list or dict. ValueError if it's none of these, or if no answer could pass the tests.
    """
    tests, pairs = ground_truth, []
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"ground_truth={tests[:60]!r}: not JSON ({error})") from None
    if isinstance(tests, dict) and set(tests) == {"inputs", "outputs"}:
        tests = list(itertools.zip_longest(tests["inputs"], tests["outputs"]))
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        tests = "\n".join(tests)
    if isinstance(tests, str):
        return read_statements(
            tests, extra_info.get("entry_point") if isinstance(extra_info, dict) else None
        )
    tests = tests if isinstance(tests, list) else []
    for test in tests:
        match test:
            case [str(given), str(expected)] | {"input": str(given), "output": str(expected)}:
                pairs.append((given, expected))
    if not pairs or len(pairs) < len(tests):
        start = str(ground_truth)[:60]
        raise ValueError(
            f"ground_truth={start!r}: must be assert statements, or pairs of input and output"
        )
    return pairs


_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
_DEFINITIONS = *_FUNCTIONS, ast.ClassDef
# what else binds a name: the attribute that holds it
_CAPTURES = {ast.MatchAs: "name", ast.MatchStar: "name", ast.MatchMapping: "rest"}
_BINDERS = dict.fromkeys((*_DEFINITIONS, ast.ExceptHandler), "name") | {ast.arg: "arg"}
_BINDERS |= dict.fromkeys((ast.TypeVar, ast.ParamSpec, ast.TypeVarTuple), "name")


def _parts(body: ast.AST | list[ast.stmt], kind: type | tuple) -> list:
    """All nodes of type `kind` in `body`, a node or statements."""
    root = ast.Module(body) if isinstance(body, list) else body
    return [part for part in ast.walk(root) if isinstance(part, kind)]


def _named(body: ast.AST | list[ast.stmt], context: type | tuple = ast.expr_context) -> set[str]:
    return {part.id for part in _parts(body, ast.Name) if isinstance(part.ctx, context)}


def _assigned(body: ast.AST | list[ast.stmt], binders=_CAPTURES) -> set[str]:
    """The names that `body` assigns at any depth, or captures by `match`."""
    names = {getattr(part, binders[type(part)]) for part in _parts(body, tuple(binders))}
    return (names | _named(body, ast.Store)) - {None}  # of `case _:`


def _bound(body: ast.AST | list[ast.stmt]) -> set[str]:
    """The names that `body` binds in any way."""
    imported = (a.asname or a.name.partition(".")[0] for a in _parts(body, ast.alias))
    return _assigned(body, _CAPTURES | _BINDERS) | _named(body, ast.Del) | set(imported)


def read_statements(tests: str, entry_point: str | None = None) -> tuple[list, dict]:
    """Splits tests into statements, so each test passes or fails by itself.

    A test is a top-level statement that asserts, itself or through a function defined in `tests`,
    and uses something from the answer (`assert True` isn't one). Two formats are unfolded: the body
    of HumanEval's `check(candidate)` (https://arxiv.org/abs/2107.03374) and pytest's `def
    test_...():`.

    The answer's names are those in `entry_point` ("encode, decode"; for `check` an expression,
    "Solution().add") and those that `tests` import from `solution` or `answer`. Without either,
    it's the one name that neither `tests` nor Python nor its library defines.

    Returns:
        (statements, names): list of (text, is_test) in order; names in the tests that are the
        answer's, each with its name there. ValueError if no answer could pass the tests.
    """
    start = f"ground_truth={tests[:60]!r}"
    try:
        body = ast.parse(tests).body
        entry = ast.parse(entry_point, mode="eval").body if entry_point else None
    except (SyntaxError, ValueError, RecursionError, TypeError) as error:
        raise ValueError(
            f"{start}, entry_point={entry_point!r:.60}: not valid Python ({error})"
        ) from None
    if not _parts(body, ast.Assert):
        raise ValueError(f"{start}: no assert statement in it")
    imports = [
        s for s in body if isinstance(s, ast.ImportFrom) and s.module in ("solution", "answer")
    ]
    names = {a.asname or a.name: a.name for s in imports for a in s.names if a.name != "*"}
    names |= {name: name for name in _named(entry)} if entry else {}
    body = [s for s in body if s not in imports]
    for part in _parts(body, (ast.Import, ast.ImportFrom)):
        imported = {alias.name for alias in part.names}
        modules = imported if isinstance(part, ast.Import) else {str(part.module)}
        if "*" in imported or not {m.partition(".")[0] for m in modules} <= sys.stdlib_module_names:
            what = f"{start}: {ast.unparse(part)!r:.60}"
            raise ValueError(
                f"{what}: tests have Python's library only; import its names one by one"
            )
    functions = {s.name: s for s in body if isinstance(s, _FUNCTIONS)}
    asserting = {name for name, function in functions.items() if _parts(function, ast.Assert)}
    body = _unfolded(body, functions, entry, names)
    names = _answers_names(body, names, start)

    touched = set(names)  # with what holds, or calls, something of the answer's
    statements = []
    for statement in body:
        is_definition = isinstance(statement, _DEFINITIONS)
        used = _named(statement) | _assigned(statement)
        if touches := bool(used & touched):
            touched |= {statement.name} if is_definition else used & _assigned(body)
        asserts = bool(_parts(statement, ast.Assert) or used & asserting)
        text = ast.unparse(ast.fix_missing_locations(statement))
        statements.append((text, touches and asserts and not is_definition))
    if not any(is_test for _, is_test in statements):
        raise ValueError(f"{start}: no assert statement uses the answer")
    return statements, names


def _unfolded(
    body: list[ast.stmt], functions: dict, entry: ast.expr | None, names: dict
) -> list[ast.stmt]:
    """Inlines the body of `check`, if `entry` is its argument; calls the functions of pytest.

    An `async def` is run in an event loop; otherwise its call would test nothing.
    """
    check = functions.get("check")
    plain = isinstance(check, ast.FunctionDef) and not _parts(check, (ast.Return, ast.Yield))
    if plain and entry:
        call, parameter = f"check({ast.unparse(entry)})", check.args.args[0].arg
        body = [s for s in body if s is not check and ast.unparse(s) != call]
        if isinstance(entry, ast.Name):
            names[parameter] = entry.id
            if _is_pythons(entry.id):
                del names[entry.id]  # of `sum` only the parameter is the answer's
        else:
            body.append(ast.Assign([ast.Name(parameter, ast.Store())], entry))
        body += check.body
    calls_of = {
        name: f"{name}()"
        for name, function in functions.items()
        if name.startswith("test_") and not function.args.args
    }
    if isinstance(check, ast.AsyncFunctionDef) and entry and "check" not in _named(body):
        calls_of["check"] = f"check({ast.unparse(entry)})"
    for name, call in calls_of.items():
        in_loop = isinstance(functions[name], ast.AsyncFunctionDef)
        body.append(ast.parse(f"__import__('asyncio').run({call})" if in_loop else call).body[0])
    return body


def _is_pythons(name: str) -> bool:
    return hasattr(builtins, name) or calls.library(name) is not None


def _answers_names(body: list[ast.stmt], names: dict[str, str], start: str) -> dict[str, str]:
    """Those of `names` that the statements use, else the one name in them that isn't Python's."""
    bound = _bound(body)
    used = sorted(_named(body, ast.Load) - bound)
    unknown = [name for name in used if name not in names and not _is_pythons(name)]
    if not names:
        # gcd, and nothing else
        could = unknown or [name for name in used if not hasattr(builtins, name)]
        if len(could) != 1:
            start += f": which of {', '.join(could)} is" if could else ": no name in it is"
            raise ValueError(
                f"{start} the answer's; give entry_point, and define or import the others"
            )
        return {could[0]: could[0]}
    if unknown:
        raise ValueError(
            f"{start}: {', '.join(unknown)} is neither defined there nor in Python's library; "
            "define it, or add it to entry_point if the answer defines it"
        )
    return {name: names[name] for name in used if name in names}


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree, ignoring trailing whitespace and trailing empty lines."""
    first, second = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected)
    )
    return first == second


def _passes(code: str, given: str, expected: str, protection: str, deadline: float) -> bool:
    """Whether the program prints `expected` and exits by itself with status 0."""
    with (
        box.read_only(given.encode()) as stdin,  # a file, not a pipe: writing it never blocks
        box.started(code, protection, stdin) as (process, stdout),
    ):
        printed, ended = box.output(process, stdout, deadline)
    return ended and process.returncode == 0 and same_output(printed, expected)


def _verdicts(code: str, read: tuple[list, dict], protection: str, deadline: float) -> list[bool]:
    """Which assert statements, from `read_statements`, hold; False for those not reached."""
    source = Path(calls.__file__).read_text(encoding="utf-8")
    asked, asks = os.pipe()
    replies, replied = os.pipe()
    checker = f"{source}\ncheck(*{(*read, asks, replies, box.OUTPUT_BYTES)!r})\n"
    server = f"{source}\nserve({code!r}, {asked}, {replied})\n"
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as ends:
            for end in (asked, asks, replies, replied):
                ends.callback(os.close, end)  # our copy would hide that a process has exited
            running = stack.enter_context(
                box.started(checker, protection, pass_fds=(asks, replies))
            )
            stack.enter_context(box.started(server, protection, pass_fds=(asked, replied)))
        printed, _ = box.output(*running, deadline)
    passed = [line == "1" for line in printed.splitlines()]
    return passed + [False] * (sum(is_test for _, is_test in read[0]) - len(passed))


def compute_score(solution_str: str, ground_truth, extra_info: dict | None = None) -> float:
    """The share of tests that the program in a completion passes; see `verdicts`."""
    passed = [held for _, held in verdicts(solution_str, ground_truth, extra_info)]
    return sum(passed) / len(passed)


def verdicts(
    solution_str: str, ground_truth, extra_info: dict | None = None
) -> list[tuple[str, bool]]:
    """Each test, in words, and whether the program in a completion passes it; False if it wasn't
    reached.

    "entry_point" in `extra_info` names the function under test, see `read_statements`. ValueError
    if the tests cannot be read, or this machine has no protection; RuntimeError if the sandbox
    cannot start.
    """
    protection = box.protection()
    tests, code = readable_tests(ground_truth, extra_info), extract_code(solution_str)
    end = time.monotonic() + ANSWER_SECONDS
    if isinstance(tests, tuple):
        passed = _verdicts(code, tests, protection, end)
        return list(zip((text for text, is_test in tests[0] if is_test), passed, strict=True))
    passed = [time.monotonic() < end and _passes(code, *test, protection, end) for test in tests]
    return [(f"input {x!r}, expected output {y!r}", held) for (x, y), held in zip(tests, passed)]


def side_by_side(score: Callable[..., float], answers: Sequence, at_once: int) -> list[float]:
    """Scores the answers in `at_once` threads (1 uses this one), with a progress bar after 5 s.

    Each has its own time limit, however long the others take.
    """
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        scores = (pool.map if at_once > 1 else map)(score, answers)
        bar = dict(leave=False, disable=None, delay=5, unit="answer")
        return list(tqdm(scores, "grading", len(answers), **bar))
