"""Scores a program by the share of tests it passes, in a sandbox.

    python 5_GRPO_Maxtext/tool.py code_reward                     # which protection this machine offers
    python 5_GRPO_Maxtext/tool.py code_reward ANSWER=answer.py TESTS=tests.py

`task/code_grading.py` explains the grading, `sandbox/box.py` the protection. A file of assert
statements takes 0.7 s on one busy core of an AMD EPYC (no accelerator, 2026-11-21).
"""

from dataclasses import dataclass
from pathlib import Path

import settings
from run.plain_text import shown
from sandbox import box
from task import code_grading


@dataclass(frozen=True, kw_only=True)
class Constants:
    ANSWER: str = ""  # file with a program, or with a completion that contains one; "" = none
    TESTS: str = ""  # file with assert statements, or with JSON pairs of input and output; "" = none


def main(arguments: list[str]) -> None:
    """Prints the protection of this machine and, with ANSWER and TESTS, the score and what failed."""
    c = settings.read(Constants, arguments)
    if bool(c.ANSWER) != bool(c.TESTS):
        raise settings.UserError(
            f"ANSWER={c.ANSWER!r} TESTS={c.TESTS!r}: give both files to score an answer, or neither to see "
            "which protection this machine gives"
        )
    files = []
    for name, path in {"ANSWER": c.ANSWER, "TESTS": c.TESTS}.items() if c.ANSWER else ():
        try:
            files.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise settings.UserError(f"{name}={path}: cannot be read ({error}); give a text file") from None
    try:
        print(f"protection: {box.describe(box.protection())}")
        if not files:
            return
        passed = code_grading.verdicts(*files)
        tests = code_grading.readable_tests(files[1], None)
        if isinstance(tests, tuple):
            texts = [text for text, is_test in tests[0] if is_test]
        else:
            texts = [f"input {given!r}, expected output {expected!r}" for given, expected in tests]
    except (ValueError, RuntimeError) as error:
        raise settings.UserError(str(error)) from None
    print(f"score: {sum(passed) / len(passed):.3f}")
    for text, held in zip(texts, passed, strict=True):
        if not held:
            print(shown(f"failed: {text}"))


if __name__ == "__main__":
    settings.run(main)
