r"""The reward for answers that are programs: the share of the tests that they pass.

    score = compute_score("```python\ndef add(a, b):\n    return a + b\n```", "assert add(1, 2) == 3")  # 1.0

A program found by trial and error is whatever scores, and solving the task is only one of the ways. So
the answer runs in a sandbox (`code_sandbox.py`), and what is expected never enters it:
  * input and output: the program gets its input, and what it printed is compared here;
  * assert statements: they run in a second sandbox, and call the answer over a wire (`code_calls.py`).
No exit status, printed mark or patched checker counts, for the answer's process has no say in the verdict.

Try it with your own (an assert file takes 0.7 s on one busy core of an AMD EPYC, no accelerator, 2026-11-21):

    python 5_GRPO_Maxtext/code_reward.py ANSWER=answer.py TESTS=tests.py

What no sandbox can mend is a weak test: `assert is_prime(7)` holds for a program that says yes to everything.
"""

import ast
import builtins
import json
import os
import re
import subprocess
import symtable
import sys
import tempfile
import time
from pathlib import Path

import code_sandbox
from reward_func import SOLUTION_END, extract_answer

ANSWER_SECONDS = 30.0  # for all tests of one answer together; tests that would come later have failed

# ---------------------------------------------------------------- the answer and its tests

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def extract_code(completion: str) -> str:
    """The program in `completion` (str): the last ``` block of the last answer pair, or of the whole text.

    Where there is no complete block, all of the answer pair, or of the text, is taken for the program.
    """
    text = extract_answer(completion) if SOLUTION_END in completion else None
    text = completion if text is None else text
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else text


def read_tests(ground_truth) -> list[tuple[str, str]] | str:
    """Pairs of input and expected output; or the text of assert statements.

    Args:
        ground_truth: Python text with assert statements; or a list, or JSON text of one, of such texts, of
            {"input": ..., "output": ...} or of [input, output]; or {"inputs": [...], "outputs": [...]}.

    Raises:
        ValueError: it is none of these, or has no test in it; one line.
    """
    tests = ground_truth
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"ground_truth={tests[:60]!r}: not JSON ({error})") from None
    if isinstance(tests, dict) and set(tests) == {"inputs", "outputs"}:
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError("ground_truth: as many inputs as outputs are needed")
        tests = [list(pair) for pair in zip(tests["inputs"], tests["outputs"])]
    if not isinstance(tests, str) and hasattr(tests, "__len__") and len(tests) > 0:
        if all(isinstance(test, str) for test in tests):
            tests = "\n".join(tests)
        else:
            keys = ("input", "output")
            pairs = [tuple(map(t.get, keys)) if isinstance(t, dict) else tuple(t) for t in tests]
            if all(len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs):
                return pairs
    if not isinstance(tests, str):
        start = str(ground_truth)[:60]
        raise ValueError(f"ground_truth={start!r}: must be assert statements, or pairs of input and output")
    return tests


def _has_assert(node: ast.AST, helpers: set[str] = frozenset()) -> bool:
    return any(
        isinstance(part, ast.Assert) or (isinstance(part, ast.Name) and part.id in helpers)
        for part in ast.walk(node)
    )


def read_statements(tests: str, entry_point: str | None = None) -> tuple[list[tuple[str, bool]], list, list]:
    """Takes assert statements apart, so that each can be passed or failed by itself.

    A test is a statement of the top level that asserts, in itself or through a function of the tests. Two
    forms are unfolded: the body of HumanEval's `check(candidate)`, and pytest's `def test_...():`.

    Args:
        tests (str): Python text.
        entry_point (str or None): the function under test; needed where tests define `check` and do not call
            it, and where the function has the name of a builtin (`sum`), which otherwise means the builtin.

    Returns:
        (statements, names, modules): list of (text, is_test) in their order; names to take from the answer;
        standard library modules used without an import (never the answer's own idea of `math`).

    Raises:
        ValueError: not Python, no test in it, or `check` without an entry point; one line.
    """
    try:
        body = ast.parse(tests).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"ground_truth={tests[:60]!r}: no valid Python ({error})") from None
    # `from solution import add` says where the answer is, in data sets made for pytest.
    body = [s for s in body if not (isinstance(s, ast.ImportFrom) and s.module in ("solution", "answer"))]
    defined = {s.name: s for s in body if isinstance(s, ast.FunctionDef)}

    check = defined.get("check")
    if check is not None and len(check.args.args) == 1 and not any(map(_returns, ast.walk(check))):
        calls = [s for s in body if _is_call_of_check(s)]
        if len(calls) > 1 or not (calls or entry_point):
            raise ValueError(
                "ground_truth: defines check(), and neither calls it once nor is entry_point given"
            )
        candidate = calls[0].value.args[0] if calls else ast.Name(entry_point, ast.Load())
        bind = ast.Assign([ast.Name(check.args.args[0].arg, ast.Store())], candidate)
        body = [s for s in body if s is not check and s not in calls] + [bind, *check.body]
    body += [
        ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))
        for name, function in defined.items()
        if name.startswith("test_") and not function.args.args
    ]

    helpers = {name for name, function in defined.items() if _has_assert(function)}
    statements = []
    for statement in body:
        is_definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        text = ast.unparse(ast.fix_missing_locations(statement))
        statements.append((text, not is_definition and _has_assert(statement, helpers)))
    if not any(is_test for _, is_test in statements):
        raise ValueError(f"ground_truth={tests[:60]!r}: no assert statement in it")
    free = _free_names("\n".join(text for text, _ in statements))
    free -= set(dir(builtins)) - {entry_point}
    modules = {name for name in free if name in sys.stdlib_module_names and name != entry_point}
    return statements, sorted(free - modules), sorted(modules)


def _returns(node: ast.AST) -> bool:
    return isinstance(node, (ast.Return, ast.Yield, ast.Await))


def _is_call_of_check(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", None) == "check" and len(call.args) == 1


def _free_names(text: str) -> set[str]:
    """The global names that `text` uses and does not itself make."""
    top = symtable.symtable(text, "tests.py", "exec")
    made, used, tables = set(), set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                made.add(symbol.get_name())
            elif symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
    return used - made


# ---------------------------------------------------------------- running them


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are the same but for white space at the ends of lines, empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return first == second


def _passes(code: str, given: str, expected: str, protection: str, deadline: float) -> bool:
    """Whether the program prints what is expected, ends by itself, and ends well."""
    with tempfile.TemporaryFile() as stdin:  # a file, not a pipe: nobody has to wait until it is read
        stdin.write(given.encode())
        stdin.seek(0)
        with code_sandbox.started(code, protection, stdin=stdin, stdout=subprocess.PIPE) as process:
            printed, ended = code_sandbox.read(process, deadline)
            if not ended:
                return False
            process.wait()  # the output has ended, for the warden has
    return process.returncode == 0 and same_output(printed.decode(errors="replace"), expected)


def _verdicts(code: str, tests: str, entry_point: str | None, protection: str, deadline: float) -> list[bool]:
    """Which of the assert statements hold: one bool for each test, False for those that were not reached."""
    statements, names, modules = read_statements(tests, entry_point)
    source = (Path(__file__).parent / "code_calls.py").read_text()
    requests, replies = os.pipe(), os.pipe()
    most = code_sandbox.OUTPUT_BYTES
    wire = f"Wire({requests[1]}, {replies[0]}, {most})"
    checker = f"{source}\ncheck({statements!r}, {names!r}, {modules!r}, {wire}, silence())\n"
    server = f"{source}\nserve({code!r}, {requests[0]}, {replies[1]})\n"
    pipe = {"stdout": subprocess.PIPE, "pass_fds": (requests[1], replies[0])}
    try:
        with (
            code_sandbox.started(checker, protection, **pipe) as process,
            code_sandbox.started(server, protection, pass_fds=(requests[0], replies[1])),
        ):
            for end in (*requests, *replies):  # theirs now: who dies must be seen to have hung up
                os.close(end)
            requests, replies = (), ()
            printed, _ = code_sandbox.read(process, deadline)
    finally:
        for end in (*requests, *replies):
            os.close(end)
    lines = printed.decode().splitlines()
    for line in lines:
        if line.startswith("!"):
            raise ValueError(f"ground_truth: a test {line[2:][:200]}; only plain values can be handed over")
    passed = [line == "1" for line in lines]
    return passed + [False] * (sum(is_test for _, is_test in statements) - len(passed))


def compute_score(solution_str: str, ground_truth, extra_info: dict | None = None) -> float:
    """The share of tests that the program in a completion passes.

    Args:
        solution_str (str): what the model wrote; `extract_code` finds the program in it.
        ground_truth: the tests, as `read_tests` takes them.
        extra_info (dict or None): "entry_point" names the function under test, see `read_statements`.

    Returns:
        float in [0, 1]; 0.0 for whatever does not run, ends with an error or runs into a limit.

    Raises:
        ValueError: the tests cannot be read, or nothing here protects against the answer; one line.
        RuntimeError: the sandbox could not start a program (memory or processes of the machine are used up).
    """
    protection = code_sandbox.protection()
    tests, code = read_tests(ground_truth), extract_code(solution_str)
    end = time.monotonic() + ANSWER_SECONDS

    def deadline():
        return min(end, time.monotonic() + code_sandbox.WALL_SECONDS)

    if isinstance(tests, str):
        entry_point = (extra_info or {}).get("entry_point")
        passed = _verdicts(code, tests, entry_point, protection, deadline())
    else:
        passed = [
            time.monotonic() < end and _passes(code, given, expected, protection, deadline())
            for given, expected in tests
        ]
    return sum(passed) / len(passed)


def main(arguments: list[str]) -> None:
    """Prints the protection and the score of ANSWER=file under TESTS=file."""
    files = dict(argument.partition("=")[::2] for argument in arguments)
    if set(files) != {"ANSWER", "TESTS"}:
        sys.exit("error: write ANSWER=file.py TESTS=file, tests as assert statements or as JSON")
    try:
        answer, tests = (Path(files[name]).read_text() for name in ("ANSWER", "TESTS"))
        print(f"protection: {code_sandbox.SENTENCES[code_sandbox.protection()]}")
        print(f"score: {compute_score(answer, tests):.3f}")
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
