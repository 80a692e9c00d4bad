"""The pages of the course: which there are, in which language, and their texts."""

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(ROOT.glob("[1-5]_*"))
LANGUAGES = ("english", "chinese")
ALL = [
    *sorted(path for path in ROOT.glob("*.md") if path.stem != "CONTRIBUTING"),
    *sorted(path for folder in FOLDERS for path in [*folder.glob("*.md"), *folder.glob("docs/*.md")]),
]
ENGLISH = [page for page in ALL if not page.stem.endswith("_ch")]
CHINESE = [page for page in ALL if page.stem.endswith("_ch")]
CHAPTERS = [folder / "README.md" for folder in FOLDERS]

MAKE = "".join(path.read_text() for path in [ROOT / "Makefile", *sorted(ROOT.glob("make/*.mk"))])


def chinese_of(page: Path) -> Path:
    """The Chinese page of an English one."""
    return page.with_stem(f"{page.stem}_ch")


def name_of(path: Path) -> str:
    """A path as a test's name."""
    return str(path.relative_to(ROOT))


def that_have(pattern: str, among: Sequence[Path] = ALL) -> list[Path]:
    """The pages in which a pattern occurs: a test of a thing runs on those; there must be some."""
    found = [page for page in among if re.search(pattern, page.read_text(), re.M)]
    assert found, pattern
    return found


def text(folder: Path, language: str) -> str:
    """All pages of a folder in one language, one after the other."""
    pages = ENGLISH if language == "english" else CHINESE
    mine = [page for page in pages if page.parent == folder or page.parent == folder / "docs"]
    return "\n".join(page.read_text() for page in mine)


UNCOUNTED = (
    re.compile(  # not running text: code, tables, pictures, headings, links' ends, numbers, references
        r"^```.*?^```|<picture>.*?</picture>|^\s*\|.*?$|^#.*?$|\]\([^)]*\)|<[^>]*>|^\s*\d+\.\s"
        r"|\b(?:[Cc]hapters?|[Mm]odules?|[Ff]olders?|[Qq]uestions?) \d(?:(?:, | and | to |-)\d)*"
        r"|第 ?\d ?[章題模]|^\*\*\d\.\d\*\*|^## (?:Further reading|延伸閱讀)$.*\Z",
        re.M | re.S,
    )
)
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)*")
WORD = re.compile(r"[A-Za-z][\w'-]*")
HAN = re.compile(r"[\u4e00-\u9fff]")
HAN_PER_WORD = 1.6  # characters: the pages of both languages then have as many words, to a tenth


def density(text: str) -> float:
    """Figures per 100 words of a page's running text; those in spans of code count."""
    running = UNCOUNTED.sub(" ", text)
    words = len(WORD.findall(running)) + len(HAN.findall(running)) / HAN_PER_WORD
    return 100 * len(FIGURE.findall(running)) / words


if __name__ == "__main__":  # python tests/pages.py
    for page in ALL:
        lines = page.read_text().splitlines()
        print(f"{density(page.read_text()):5.1f} {len(lines):4d} lines  {name_of(page)}")
