"""Makes untrusted text safe to show on the terminal and in Markdown.

Escape sequences can move a terminal's cursor, retitle its window, or hide lines. Bidirectional
characters make a line read differently than it is. A lone surrogate can't be printed at all.
"""

import re

# Control characters except newline and tab; U+2028 and U+2029, which end lines; bidirectional;
# surrogates.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""`text` with visible escapes, such as \x1b or \u202e, for terminal control characters."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def fenced(text: str) -> str:
    """`text` as a Markdown code block that none of its lines can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{escape_controls(text)}\n{fence}"


def table_cell(text: str) -> str:
    """`text` as a Markdown table cell: on one line, with pipes and HTML escaped."""
    return re.sub(r"[\\|<]", r"\\\g<0>", " ".join(escape_controls(text).split()))
