"""A calculator as a world: ENVIRONMENT=examples/calculator.py REWARDS=check_answer,check_numbers.

The model writes "17*24=" and reads "408" before it goes on, in the same message. It gives no rewards of its
own: name those that grade the text. For a model that was taught to write <calc>17*24</calc>, set
STOP = "</calc>" and SUM = r"<calc>(\\d+)([-+*])(\\d+)</calc>$".
"""

import re

SUM = r"(\d+) ?([-+*]) ?(\d+) ?=$"


class Environment:
    """One answer's calculator."""

    STOP = "="

    def reset(self, question, rng) -> str:
        """Says nothing at first."""
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        """The result of what the action ends with; nothing if that is no sum; the end if it has no STOP."""
        found = re.search(SUM, action)
        if not found:
            return "", 0.0, not action.endswith(self.STOP), False
        a, operator, b = int(found[1]), found[2], int(found[3])
        return str({"+": a + b, "-": a - b, "*": a * b}[operator]), 0.0, False, False
