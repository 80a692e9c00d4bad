"""A calculator as an environment: ENVIRONMENT=examples/calculator.py
REWARDS=check_answer,check_numbers.

The model writes "17*24=", reads "408" and goes on, in the same message. The environment gives no
rewards, so name some that grade the text. For a model that was taught to write <calc>17*24</calc>,
set STOP = "</calc>" and SUM = r"<calc>(\\d+)([-+*])(\\d+)</calc>$".
"""

import re

SUM = r"(\d+) ?([-+*]) ?(\d+) ?=$"


class Environment:
    """The calculator for one answer."""

    STOP = "="

    def reset(self, question, rng) -> str:
        """Says nothing at first."""
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        """The result of the sum at the action's end, or nothing; terminates if there's no STOP."""
        match = re.search(SUM, action)
        if not match:
            return "", 0.0, not action.endswith(self.STOP), False
        a, operator, b = int(match[1]), match[2], int(match[3])
        return str({"+": a + b, "-": a - b, "*": a * b}[operator]), 0.0, False, False
