"""Fixes the links into code of the course's pages after a change in a script.

A link like [`td_error = ...`](1_Q_Learning/Q_Learning.py#L207) promises that line 207 holds the text in
backticks. A block of Python under [`Q_Learning.py`](1_Q_Learning/Q_Learning.py#L200-L207) promises that it
*is* these lines; a stretch that is left out is the line `# ...`. tests/test_pages.py keeps both promises.
Text and block must stand at exactly one place of the file: so what has moved is found again.

    python tools/line_links.py      # or `make links`
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("[1-5]_*/*.md"), *ROOT.glob("[1-5]_*/docs/*.md")]  # the door quotes no code
LINE_LINK = re.compile(r"\[`(?P<text>[^`]+)`\]\((?P<path>[^)#\s]+)#L(?P<line>\d+)\)")
QUOTATION = re.compile(
    r"^\[`(?P<text>[^`]+)`\]\((?P<path>[^)#\s]+)#L(?P<first>\d+)-L(?P<last>\d+)\)\n\n"
    r"```python\n(?P<code>.*?)^```$",
    re.M | re.S,
)
LEFT_OUT = "# ..."


def line_of(path: Path, text: str) -> int:
    """The number, from 1, of the one line that holds the text.

    Raises:
        ValueError: none does, or several do.
    """
    lines = [n for n, line in enumerate(path.read_text().splitlines(), start=1) if text in line]
    if len(lines) != 1:
        raise ValueError(f"{path}: {text!r} stands on {len(lines)} lines; link a text that stands on one")
    return lines[0]


def ends_at(lines: list[str], parts: list[list[str]], start: int) -> int | None:
    """Where the last of the parts ends, if the first begins at `start` and the others follow in order."""
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    at = start
    for number, part in enumerate(parts):
        wanted = [f"{indent}{line}".rstrip() for line in part]
        places = [start] if number == 0 else range(at, len(lines))
        found = [i for i in places if lines[i : i + len(wanted)] == wanted]
        if not found:
            return None
        at = found[0] + len(wanted)
    return at


def lines_of(path: Path, code: str) -> tuple[int, int]:
    """First and last line, from 1, of the one place in the file that a block quotes.

    Raises:
        ValueError: the block stands nowhere in the file, or at several places.
    """
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    parts: list[list[str]] = [[]]
    for line in code.splitlines():
        if line.strip() == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    first = parts[0][0].strip()
    places = [
        (start + 1, end)
        for start, line in enumerate(lines)
        if line.strip() == first and (end := ends_at(lines, parts, start)) is not None
    ]
    if len(places) != 1:
        raise ValueError(f"{path}: the block that begins with {first!r} stands at {len(places)} places")
    return places[0]


def renewed(page: str, folder: Path) -> str:
    """A page's text with the right line numbers in its links; paths are relative to `folder`."""
    page = LINE_LINK.sub(
        lambda link: f"[`{link['text']}`]({link['path']}#L{line_of(folder / link['path'], link['text'])})",
        page,
    )

    def quoted(block: re.Match) -> str:
        first, last = lines_of(folder / block["path"], block["code"])
        return f"[`{block['text']}`]({block['path']}#L{first}-L{last})\n\n```python\n{block['code']}```"

    return QUOTATION.sub(quoted, page)


def main() -> None:
    """Rewrites every page that links into code."""
    for page in sorted(PAGES):
        try:
            page.write_text(renewed(page.read_text(), page.parent))
        except (ValueError, OSError) as error:
            sys.exit(f"error: {page.relative_to(ROOT)}: {error}")


if __name__ == "__main__":
    main()
