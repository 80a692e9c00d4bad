"""Scores a program by the share of tests it passes, in a sandbox.

    python 5_GRPO_Maxtext/tool.py code_reward               # this machine's protection
    python 5_GRPO_Maxtext/tool.py code_reward ANSWER=answer.py TESTS=tests.py

`task/code_grading.py` explains the grading, `sandbox/box.py` the protection. A file of assert
statements takes 0.7 s on one busy core of an AMD EPYC (no accelerator, 2026-11-21).
"""

from dataclasses import dataclass
from pathlib import Path

import settings
from plain_text import escape_controls
from sandbox import box
from task import code_grading


@dataclass(frozen=True, kw_only=True)
class Constants:
    ANSWER: str = ""  # file with a program, or with a completion that contains one; "" = none
    # file with assert statements, or with JSON pairs of input and output; "" = none
    TESTS: str = ""


def main(arguments: list[str]) -> None:
    """Prints this machine's protection and, with ANSWER and TESTS, the score and what failed."""
    c = settings.read(Constants, arguments)
    if bool(c.ANSWER) != bool(c.TESTS):
        raise settings.UserError(
            f"ANSWER={c.ANSWER} TESTS={c.TESTS}: give both files to score, or neither"
        )
    try:
        print(f"protection: {box.SENTENCES[box.protection()]}")
        files = [Path(path).read_text(encoding="utf-8") for path in (c.ANSWER, c.TESTS) if path]
        verdicts = code_grading.verdicts(*files) if files else []
    except (ValueError, RuntimeError, OSError) as error:
        given = f"ANSWER={c.ANSWER} TESTS={c.TESTS}: " if c.ANSWER else ""
        raise settings.UserError(f"{given}{error}") from None
    if verdicts:
        print(f"score: {sum(held for _, held in verdicts) / len(verdicts):.3f}")
    for test, held in verdicts:
        if not held:
            print(escape_controls(f"failed: {test}"))


if __name__ == "__main__":
    settings.run(main)
