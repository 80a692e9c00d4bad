"""Builds the course as a folder of static HTML: `make site`. It works from file:// and on any static host.

Every page keeps its place: X.md becomes X.html, a README index.html. What a page links to comes along:
pictures as they are, scripts and tables as pages with an anchor for every line.

    .venv-site/bin/python tools/build_site.py site
"""

import functools
import html
import os
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
PLAYGROUND = ROOT / "5_GRPO_Maxtext/assets/playground.html"
REPORT = ROOT / "runs/seed_0/report.html"  # of the default run
CHAPTERS = [f"{folder.name}/README.md" for folder in sorted(ROOT.glob("[1-5]_*"))]
PICTURES = {".png", ".gif"}
NAMES = {  # of the entries above every page
    "en": ("Course", "Chapter {}", "Glossary", "Playground", "A run's report", "繁體中文"),
    "zh-Hant-TW": ("課程", "第 {} 章", "詞彙", "互動頁", "一次執行的報告", "English"),
}


def is_copied(path: Path) -> bool:
    """Whether a file comes along as it is; any other .html is a source to be read."""
    return path.suffix in PICTURES or path in (PLAYGROUND, REPORT)


def place(path: Path) -> Path:
    """Where a file or folder of the repository stands in the site, relative to it."""
    if path == REPORT:
        return Path("report.html")
    copied = is_copied(path)
    path = path.relative_to(ROOT)
    if (ROOT / path).is_dir():
        return (
            path / "index.html"
            if not (ROOT / path / "README.md").exists()
            else place(ROOT / path / "README.md")
        )
    if copied:
        return path
    if path.suffix == ".md":
        return path.with_name(path.stem.replace("README", "index") + ".html")
    return path.with_name(f"{path.name}.html")


def other_language(path: Path) -> Path:
    """The same page in the other language."""
    stem = path.stem.removesuffix("_ch") if path.stem.endswith("_ch") else f"{path.stem}_ch"
    return path.with_stem(stem)


def to(target: Path, page: Path) -> str:
    """The address of `target`, as page `page` links it."""
    return os.path.relpath(place(target), place(page).parent)


def code(text: str, language: str, _: str = "") -> str:
    """A block of code with its colours, for a page."""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        lexer = TextLexer()
    return f"<pre><code>{highlight(text, lexer, HtmlFormatter(nowrap=True))}</code></pre>"


def formula(content: str, _: dict) -> str:
    """A displayed formula as MathML."""
    return convert(content, display="block")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def reader() -> MarkdownIt:
    """Reads the Markdown that GitHub reads."""
    markdown = MarkdownIt("commonmark", {"html": True, "highlight": code}).enable("table")
    markdown.use(anchors_plugin, max_level=6, slug_func=slug).use(dollarmath_plugin, renderer=formula)
    return markdown.disable("math_inline")  # a dollar inside a line is money, or a shell's


def line_of(path: Path, shown: str) -> int:
    """The line of a file, from 1, that defines a name, or else the first that holds a text, or else 1."""
    lines = path.read_text().splitlines()
    wanted = rf"(def|class) {re.escape(shown)}\b", re.escape(shown)
    return next((n for text in wanted for n, line in enumerate(lines, 1) if re.search(text, line)), 1)


def page_of(path: Path, wanted: list[Path]) -> str:
    """The HTML of a Markdown page; files that it links to are appended to `wanted`."""

    def linked(address: str, shown: str = "") -> str:
        if re.match(r"[a-z]+:|#", address):
            return address
        name, _, anchor = address.partition("#")
        target = (path.parent / name).resolve()
        wanted.append(target)
        if shown and target.is_file() and target.suffix != ".md":
            anchor = f"L-{line_of(target, shown)}"
        return to(target, path) + (f"#{anchor}" if anchor else "")

    text = re.sub(r"^> (?:繁體中文：|English: )\[.*\n", "", path.read_text(), count=1, flags=re.MULTILINE)
    tokens = reader().parse(text)
    for token in tokens:
        children = [token, *(token.children or [])]
        for child, after in zip(children, [*children[1:], token]):
            for name in ("href", "src"):
                if name in child.attrs:
                    child.attrs[name] = linked(
                        child.attrs[name], after.content * (after.type == "code_inline")
                    )
            if child.type in ("html_block", "html_inline"):
                child.content = re.sub(
                    r'(src|srcset|href)="([^"]*)"', lambda m: f'{m[1]}="{linked(m[2])}"', child.content
                )
    body = reader().renderer.render(tokens, reader().options, {})
    return body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")


def text_page(path: Path) -> str:
    """The HTML of any other text file, every line with an anchor, L-10."""
    text = path.read_text()
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return f"<h1>{path.relative_to(ROOT)}</h1>\n{highlight(text, lexer, HtmlFormatter(linespans='L'))}"


def folder_page(path: Path, wanted: list[Path]) -> str:
    """The files of a folder, as links."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=path, capture_output=True, text=True, check=True
    ).stdout.split()
    files = [path / name for name in listed if "/" not in name]
    wanted += files
    links = "".join(f'<li><a href="{place(file).name}">{file.name}</a></li>' for file in files)
    return f"<h1>{path.relative_to(ROOT)}</h1>\n<ul>{links}</ul>"


def entries(path: Path, lang: str) -> str:
    """What stands above a page: the course's parts, and the same page in the other language."""
    chinese = lang != "en"
    course, chapter, glossary, playground, report, other = NAMES[lang]

    def named(name: str) -> Path:
        return ROOT / (name.replace(".md", "_ch.md") if chinese else name)

    links = [(to(named("README.md"), path), course)]
    links += [(to(named(name), path), chapter.format(i)) for i, name in enumerate(CHAPTERS, start=1)]
    links += [(to(named("GLOSSARY.md"), path), glossary)]
    links += [
        (f"{to(PLAYGROUND, path)}?lang={'zh' if chinese else 'en'}", playground),
        (to(REPORT, path), report),
    ]
    if path.suffix == ".md" and other_language(path).exists():
        links += [(to(other_language(path), path), other)]
    return " ".join(f'<a href="{html.escape(address)}">{name}</a>' for address, name in links)


def colours() -> str:
    """Pygments' classes, light and dark."""
    light, dark = (HtmlFormatter(style=style).get_style_defs("pre") for style in ("default", "github-dark"))
    drop = re.compile(r"^(?:pre \{|pre\s*\{|pre \.linenos|td\.linenos|span\.linenos).*\n", re.MULTILINE)
    return f"{drop.sub('', light)}\n@media (prefers-color-scheme: dark) {{\n{drop.sub('', dark)}\n}}"


def build(site: Path) -> None:
    """Writes every Markdown page of the course, and what they link to, into the folder `site`."""
    template = string.Template((ROOT / "tools/build_site.html").read_text())
    pages = [*ROOT.glob("*.md"), *ROOT.glob("[1-5]_*/*.md"), *ROOT.glob("[1-5]_*/docs/*.md")]
    wanted, done = [*sorted(pages), PLAYGROUND, REPORT], set()
    shutil.rmtree(site, ignore_errors=True)
    while wanted:
        path = wanted.pop()
        if path in done:
            continue
        done.add(path)
        target = site / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_copied(path):
            shutil.copy(path, target)
            continue
        if path.is_dir() and (path / "README.md").exists():
            continue  # a page of its own
        if path.suffix == ".md":
            body, kind = page_of(path, wanted), "page"
        else:
            body, kind = (folder_page(path, wanted) if path.is_dir() else text_page(path)), "code"
        lang = "zh-Hant-TW" if path.stem.endswith("_ch") else "en"
        heading = re.search(r"<h1.*?</h1>", body, re.DOTALL)
        title = re.sub(r"<[^>]*>", "", heading[0]) if heading else path.name
        nav, css = entries(path, lang), colours()
        target.write_text(
            template.substitute(lang=lang, title=title, nav=nav, body=body, kind=kind, highlight=css)
        )
    sys.stdout.write(f"{site}/index.html: {len(done)} pages and pictures\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
