"""What a committed table or picture was made from, and whether that's still what the repository
holds.

lock.json has an entry for each committed product: the command, a hash of the code that made it, a
hash of what the code was given (constants, patches, or the tables that a picture is drawn from),
commit, versions, machine, date and minutes. Comments, docstrings and line breaks change no hash.
Under `checked` it says when a row was made anew with later code, or when short runs of both codes
were equal (`short_runs`).
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "measure" / "lock.json"
# Modules that draw, or start runs: they change no number.
NO_NUMBERS = {"pictures", "measure.pictures", "measure.drawings", "measure.run", "measure.tables"}
Edits = Sequence[Sequence[str]]  # (file, old text, new text) each


def digest(*parts: Any) -> str:
    """Twelve hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def edited(folder: Path, edits: Edits) -> dict[Path, str]:
    """The changed files' texts; SystemExit where an old text isn't in its file exactly once."""
    texts: dict[Path, str] = {}
    for name, old, new in edits:
        path = folder / name
        text = texts.get(path) or path.read_text()
        if text.count(old) != 1:
            times = f"the patch's text is there {text.count(old)} times, not once"
            raise SystemExit(f"error: {path.relative_to(ROOT)}: {times}; adapt study.toml: {old!r}")
        texts[path] = text.replace(old, new)
    return texts


def without_words(text: str) -> ast.Module:
    """The parsed text without its docstrings; comments are lost in parsing."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def imported(tree: ast.Module, places: Sequence[Path]) -> Iterator[Path]:
    """The files of this repository that a module imports, also inside its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            paths = [place / f"{name.replace('.', '/')}.py" for place in places]
            if name not in NO_NUMBERS and (
                found := next((path for path in paths if path.exists()), None)
            ):
                yield found


def code_of(script: Path) -> str:
    """A digest of a script and of the local modules that it imports."""
    seen, waiting = {}, [script]
    places = (script.parent, ROOT, ROOT / "5_GRPO_Maxtext")
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen[path], imports = parsed(path.read_text(), places)
            waiting += imports
    return digest({str(path.relative_to(ROOT)): text for path, text in seen.items()})


@functools.cache
def parsed(text: str, places: tuple[Path, ...]) -> tuple[str, tuple[Path, ...]]:
    """A module without its words, and the local files it imports."""
    tree = without_words(text)
    return ast.unparse(tree), tuple(imported(tree, places))


def function_of(path: Path, name: str) -> str:
    """A function's source, normalized."""
    functions = (
        node for node in without_words(path.read_text()).body if getattr(node, "name", "") == name
    )
    return ast.unparse(next(functions))


def read() -> dict[str, dict[str, Any]]:
    """The entries, by the product's path."""
    return json.loads(LOCK.read_text()) if LOCK.exists() else {}


def write(entries: dict[str, dict[str, Any]]) -> None:
    """Writes the entries, sorted, so that a diff shows what was remade."""
    LOCK.write_text(json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def why_stale(entry: dict[str, Any] | None, code: str, given: str) -> str:
    """In words, or empty if the product is what today's code makes of today's constants."""
    if not entry:
        return "never recorded"
    words = {"code": "its code", "given": "what it was given"}
    changed = [
        words[name] for name, now in (("code", code), ("given", given)) if entry[name] != now
    ]
    return f"{' and '.join(changed)} changed since {entry['commit']}" if changed else ""
