"""The pages of the course: which there are, in which language, and their texts."""

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(ROOT.glob("[1-5]_*"))
LANGUAGES = ("english", "chinese")
ALL = [
    *sorted(path for path in ROOT.glob("*.md") if path.stem != "CONTRIBUTING"),
    *sorted(
        path for folder in FOLDERS for path in [*folder.glob("*.md"), *folder.glob("docs/*/*.md")]
    ),
]
EVERY = [*ALL, ROOT / "CONTRIBUTING.md"]
ENGLISH = [page for page in ALL if not page.stem.endswith("_ch")]
CHINESE = [page for page in ALL if page.stem.endswith("_ch")]

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
    mine = [page for page in pages if page.is_relative_to(folder)]
    return "\n".join(page.read_text() for page in mine)
