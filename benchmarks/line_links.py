"""Fixes the line links of the READMEs after a change in a script.

A link like [`td_error = ...`](1_Q_Learning/Q_Learning.py#L207) promises that line 207 holds the text in
backticks; tests/test_course.py keeps the promise. The text must stand on exactly one line of the file: so a
line that has moved is found again.

    python benchmarks/line_links.py      # or `make links`
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE_LINK = re.compile(r"\[`(?P<text>[^`]+)`\]\((?P<path>[^)#\s]+)#L(?P<line>\d+)\)")


def line_of(path: Path, text: str) -> int:
    """The number, from 1, of the one line that holds the text.

    Raises:
        ValueError: none does, or several do.
    """
    lines = [n for n, line in enumerate(path.read_text().splitlines(), start=1) if text in line]
    if len(lines) != 1:
        raise ValueError(f"{path}: {text!r} stands on {len(lines)} lines; link a text that stands on one")
    return lines[0]


def renewed(readme: str, folder: Path) -> str:
    """A README's text with the right line number in each line link; paths are relative to `folder`."""
    return LINE_LINK.sub(
        lambda link: f"[`{link['text']}`]({link['path']}#L{line_of(folder / link['path'], link['text'])})",
        readme,
    )


def main() -> None:
    """Rewrites every README that has line links."""
    for readme in sorted(ROOT.glob("README*.md")) + sorted(ROOT.glob("[1-5]_*/README*.md")):
        try:
            readme.write_text(renewed(readme.read_text(), readme.parent))
        except (ValueError, OSError) as error:
            sys.exit(f"error: {readme.relative_to(ROOT)}: {error}")


if __name__ == "__main__":
    main()
