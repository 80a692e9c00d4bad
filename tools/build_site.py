"""Reads the course's pages for MkDocs: `make site`. Material for MkDocs makes the rest, see
mkdocs.yml.

English pages keep their places: X.md becomes X.html, a README index.html. X_ch.md becomes
zh/X.html. What they link to comes along: pictures as they are, scripts and tables as pages with an
anchor for every line.
"""

import functools
import html
import io
import json
import os
import re
import subprocess
from pathlib import Path

import jieba
from latex2mathml.converter import convert
from markdown.extensions.toc import nest_toc_tokens
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from PIL import Image, ImageSequence
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, find_lexer_class_for_filename, get_lexer_by_name

ROOT = Path(__file__).resolve().parent.parent
PLAYGROUND = ROOT / "5_GRPO_Maxtext/assets/playground.html"
REPORT = ROOT / "runs/seed_0/report.html"  # of the default run
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[1-5]_*/*.md"), *ROOT.glob("[1-5]_*/docs/*/*.md")])
LANGUAGE = os.environ.get("SITE_LANGUAGE", "en")[:2]
NAMES = {
    "en": ("Glossary", "Playground", "A run's report"),
    "zh": ("詞彙", "互動頁", "一次執行的報告"),
}
ROOMS = {  # what the site shows of the playground: below the paragraph of a page that links to it
    "README": "room=train",
    "4_GRPO_MNIST/README": "figure=group",
    "5_GRPO_Maxtext/README": "room=answers",
}
FIGURES = {  # and below a picture
    "values_crawl": "figure=crawl",
    "gae_timeline": "figure=gae",
    "reinforce_gradient_variance": "figure=noise",
    "clipped_objective": "figure=clip",
    "ratio_passes": "figure=passes",
}
# The links with arrows at the end of a page.
PREVIOUS, NEXT = r"\[<- [^]]*\]\(([^)]+)\)", r"\[[^]]* ->\]\(([^)]+)\)"
# Terms that are everyday words, too: no hint where they occur.
EVERYDAY = (
    "action agent batch clip group host mask mesh network prompt pull replay return reward seed "
    "slice solved state target value window"
)


def place(path: Path) -> Path:
    """Where a file or folder of the repository stands in the site, relative to it."""
    if path == REPORT:
        return Path("report.html")
    if path.is_dir():
        page = path / "README.md"
        return place(page) if page.exists() else path.relative_to(ROOT) / "index.html"
    name = path.relative_to(ROOT)
    if path.suffix == ".md":
        chinese = "zh" if name.stem.endswith("_ch") else ""
        stem = name.stem.removesuffix("_ch").replace("README", "index")
        return chinese / name.with_name(f"{stem}.html")
    return name if is_copied(path) else name.with_name(f"{name.name}.html")


def language_of(path: Path) -> str:
    """The language of a page."""
    return "zh" if path.stem.endswith("_ch") else "en"


def is_copied(path: Path) -> bool:
    """Whether a file comes along as it is; any other .html is a source to be read."""
    return path.suffix in {".png", ".svg", ".gif"} or path in (PLAYGROUND, REPORT)


def to(target: Path, page: Path) -> str:
    """The address of `target`, as page `page` links it."""
    return os.path.relpath(place(target), place(page).parent)


def fence(self, tokens, i, options, env) -> str:
    """A block of code in a page, or a formula: as MathML, with the epsilon that the text has."""
    if tokens[i].info == "math":
        shown = convert(tokens[i].content, display="block").replace("ϵ", "ε")
        return f'<div class="formula">{shown}</div>'
    lexer = get_lexer_by_name(tokens[i].info or "text")
    return highlight(tokens[i].content, lexer, HtmlFormatter(wrapcode=True))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def reader() -> MarkdownIt:
    """Reads the Markdown that GitHub reads; MkDocs' own reader knows another dialect."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    markdown.use(anchors_plugin, max_level=6, slug_func=slug)
    markdown.add_render_rule("fence", fence)
    return markdown


def line_of(path: Path, shown: str) -> int:
    """The line of a file, from 1, that defines a name, or else the first that holds a text, or else
    1.
    """
    lines = path.read_text().splitlines()
    wanted = rf"(def|class) {re.escape(shown)}\b", re.escape(shown)
    return next(
        (n for text in wanted for n, line in enumerate(lines, 1) if re.search(text, line)), 1
    )


@functools.cache
def terms(glossary: Path) -> dict[str, tuple[str, str]]:
    """The glossary's words: {a word: (its anchor, its meaning)}."""
    table = glossary.read_text().split("\n## ")[2].split("|---|---|---|\n")[1]
    found = {}
    for english, chinese, meaning in re.findall(r"^\| ([^|]+) \| ([^|]+) \| (.+) \|$", table, re.M):
        names = english.split(", ")
        words = re.split(r"[、（）]", chinese) if glossary.stem.endswith("_ch") else names
        if names[0] not in EVERYDAY.split():
            found |= {html.escape(word): (slug(english), meaning) for word in words if word}
    return found


def with_hints(paragraph: str, left: dict, address: str) -> str:
    """A paragraph with a link to the glossary, at `address`, from each of the terms that are
    `left`.
    """

    def hint(match: re.Match) -> str:
        if match[0] not in left:
            return match[0]
        anchor, meaning = left.pop(match[0])
        title = html.escape(re.sub(r"[`*]", "", meaning))
        return f'<a class="term" href="{address}#{anchor}" title="{title}">{match[0]}</a>'

    words = "|".join(re.escape(word) for word in sorted(left, key=len, reverse=True))
    wanted = rf"<a .*?</a>|<code>.*?</code>|<[^>]*>|(?<![A-Za-z-])(?:{words})(?![A-Za-z-])"
    return re.sub(wanted, hint, paragraph, flags=re.S)


def film(image: re.Match, path: Path) -> str:
    """The <img> of a GIF on a page as a still; page.js plays the frames, with a button and a
    slider.
    """
    address, rest = image.groups()
    frames = Image.open(ROOT / os.path.normpath(place(path).parent / address).removeprefix("zh/"))
    facts = (
        f'data-src="{address}" data-count="{frames.n_frames}" data-ms="{frames.info["duration"]}"'
    )
    still = f'<img src="{address}.frames/{frames.n_frames - 1}.webp"{rest}>'
    return f'<span class="film" {facts}>{still}</span>'


def read(path: Path) -> tuple[str, set[Path]]:
    """The HTML of a Markdown page, and the files that it links to."""
    language, wanted = language_of(path), set()

    def linked(match: re.Match) -> str:
        name, address, shown = match.groups()
        if re.match(r"[a-z]+:|#", address):
            return match[0]
        address, _, anchor = address.partition("#")
        target = (path.parent / html.unescape(address)).resolve()
        wanted.add(target)
        if shown and target.is_file() and target.suffix != ".md":
            anchor = f"L-{line_of(target, html.unescape(shown))}"
        if target == PLAYGROUND:
            anchor += f"{'&' * bool(anchor)}lang={language}"
        rest = f"><code>{shown}</code>" if shown else ""
        return f'{name}="{to(target, path)}{anchor and "#"}{anchor}"{rest}'

    text = re.sub(
        r"^> (?:繁體中文：|English: )\[.*\n", "", path.read_text(), count=1, flags=re.MULTILINE
    )
    # measure/hosted.py fills these in. The site has no need of a link to itself, and brings the
    # playground along.
    text = re.sub(r"^<!-- hosted -->$.*?^<!-- end -->$", "", text, flags=re.M | re.S)
    playground = os.path.relpath(PLAYGROUND, path.parent)
    text = re.sub(r"\]\([^)]*\)<!-- playground (\S+) -->", rf"]({playground}#\1)", text)
    body = reader().render(text).replace("<th></th>", "<td></td>")
    body = re.sub(r'(href|src|srcset)="([^"]*)"(?:><code>([^<]*)</code>)?', linked, body)
    body = re.sub(r'<img src="([^"]*\.gif)"([^>]*)>', lambda match: film(match, path), body)
    glossary = ROOT / ("GLOSSARY_ch.md" if language == "zh" else "GLOSSARY.md")
    if path == glossary:
        rows = re.sub(
            r"<tr>\n<td>(.*?)</td>", lambda m: m[0].replace("<tr", f'<tr id="{slug(m[1])}"'), body
        )
        return f'<div class="glossary">{rows}</div>', wanted
    left = dict(terms(glossary))
    page = str(path.relative_to(ROOT).with_suffix("")).removesuffix("_ch")
    rooms = {f"/{PLAYGROUND.name}": ROOMS[page]} if page in ROOMS else dict(FIGURES)

    def framed(block: re.Match) -> str:
        shown = with_hints(block[0], left, to(glossary, path))
        for name in [name for name in rooms if re.search(rf'{name}(_ch)?[.#"]', shown)]:
            address = f"{to(PLAYGROUND, path)}#{rooms.pop(name)}&amp;lang={language}&amp;embed=1"
            title = NAMES[language][1]
            shown += (
                f'<iframe class="room" data-src="{address}" title="{title}" '
                'loading="lazy"></iframe>'
            )
        return shown

    return re.sub(r"<p>.*?</p>", framed, body, flags=re.S), wanted


def at_home(path: Path) -> str:
    """The playground or the report, with the site's addresses for the course's pages."""
    text = path.read_text().replace('name="course" content="md"', 'name="course" content="html"')
    return re.sub(
        r'(href|data-zh)="[./]*(5_GRPO_Maxtext/[^"?#]*)',
        lambda m: f'{m[1]}="{place(ROOT / m[2])}',
        text,
    )


def text_page(path: Path) -> str:
    """The HTML of any other text file, every line with an anchor, L-10."""
    lexer = find_lexer_class_for_filename(path.name) or TextLexer
    shown = highlight(path.read_text(), lexer(), HtmlFormatter(wrapcode=True, linespans="L"))
    return f"<h1>{path.relative_to(ROOT)}</h1>\n{shown}"


def folder_page(folder: Path) -> tuple[str, set[Path]]:
    """The HTML of a folder without a page of its own, and the files of the repository in it."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True
    )
    inside = [folder / name for name in listed.stdout.split() if "/" not in name]
    links = "".join(f'<li><a href="{place(path).name}">{path.name}</a></li>' for path in inside)
    return f"<h1>{folder.relative_to(ROOT)}</h1>\n<ul>{links}</ul>", set(inside)


def title_of(path: Path) -> str:
    """The heading of a page."""
    return path.read_text().partition("\n")[0].removeprefix("# ")


def navigation() -> list:
    """The sidebar: a section for each chapter and for each folder of its docs/. Pages come in the
    order in which the section's first page names them.
    """
    pages = [path for path in PAGES if language_of(path) == LANGUAGE]
    address = {path: str(place(path).with_suffix(".md")).removeprefix("zh/") for path in pages}
    first = ROOT / ("README_ch.md" if LANGUAGE == "zh" else "README.md")

    def section(page: Path) -> dict:
        """A folder by its first page, with the pages beside it and the sections below it."""
        text = page.read_text()
        below = [path for path in pages if path.is_relative_to(page.parent) and path != page]
        firsts = [path for path in below if path.name == first.name]
        beside = [path for path in below if path.parent == page.parent]
        before = linked_page(page, PREVIOUS)  # the language model's page, before chapter 5

        def order(path: Path) -> tuple:
            return path != before, text.find(os.path.relpath(path, page.parent)) % len(text)

        parts = sorted(beside + firsts, key=order)
        entries = [section(p) if p in firsts else {title_of(p): address[p]} for p in parts]
        return {title_of(page): [address[page], *entries]}

    chapters = [folder / first.name for folder in sorted(ROOT.glob("[1-5]_*"))]
    entries = [{title_of(first): address[first]}, *map(section, chapters)]
    check = next(path for path in pages if path.stem.startswith("what_you_should_know"))
    entries.append({title_of(check): address[check]})
    glossary, playground, report = NAMES[LANGUAGE]
    playground = {playground: f"root:{place(PLAYGROUND)}#lang={LANGUAGE}"}
    return [*entries, {glossary: "GLOSSARY.md"}, playground, {report: f"root:{place(REPORT)}"}]


def linked_page(path: Path, pattern: str) -> Path | None:
    """The page that the arrow `<-` or `->` at the end of a page leads to, if there is one."""
    link = re.search(pattern, path.read_text())
    return (path.parent / link[1]).resolve() if link else None


BODIES: dict[str, str] = {}  # of the pages being built, by their place


def on_config(config):
    """Takes the language's folder, name and sidebar; gives the search a worker that opens from
    disk.
    """
    config.site_dir = str(ROOT / ("site/zh" if LANGUAGE == "zh" else "site"))
    config.nav = navigation()
    [config.site_name] = config.nav[0]
    for word in terms(ROOT / "GLOSSARY_ch.md"):
        jieba.add_word(word)
    return config


def on_nav(nav, config, files):
    """The footer's arrows lead where the page's own lead, not to the next page of the sidebar."""
    sources = {place(path): path for path in PAGES}
    home = "zh" if LANGUAGE == "zh" else ""
    pages = {sources[Path(home, page.file.dest_uri)]: page for page in nav.pages}
    for path, page in pages.items():
        page.previous_page = pages.get(linked_page(path, PREVIOUS))
        page.next_page = pages.get(linked_page(path, NEXT))
    return nav


def on_files(files, config):
    """Adds the pages, and what they link to, to MkDocs' files."""
    found = {path: read(path) for path in PAGES}
    wanted = {PLAYGROUND, REPORT}.union(*(links for _, links in found.values()))
    for folder in [path for path in wanted if path.is_dir() and not (path / "README.md").exists()]:
        found[folder] = folder_page(folder)
        wanted |= found[folder][1]
    for path in wanted - found.keys():
        # the Chinese pages link to these
        if LANGUAGE == "en" and path.is_file() and not is_copied(path):
            found[path] = text_page(path), set()
    add = functools.partial(File.generated, config)
    for path, (body, _) in found.items():
        if language_of(path) == LANGUAGE:
            uri = str(place(path).with_suffix(".md")).removeprefix("zh/")
            BODIES[uri] = body
            files.append(add(uri, content=""))
    for path in filter(is_copied, wanted) if LANGUAGE == "en" else ():
        source = (
            {"abs_src_path": str(path)} if path.suffix != ".html" else {"content": at_home(path)}
        )
        files.append(add(str(place(path)), **source))
        if path.suffix == ".gif":
            for i, frame in enumerate(ImageSequence.Iterator(Image.open(path))):
                frame.convert("RGBA").save(data := io.BytesIO(), "webp", lossless=True)
                files.append(add(f"{place(path)}.frames/{i}.webp", content=data.getvalue()))
    # What is searched for is cut by the words of the index, but for the last one: "o<" stops before
    # the end.
    worker = next(file for file in files if re.search(r"workers/search.*\.js$", file.src_uri))
    worker.content_string = worker.content_string.replace(
        "o<t.length;o++)t.slice(s,o)", "o<=t.length;o++)t.slice(s,o)"
    )
    # A page that was opened from disk may not start a worker from a file, but from a text.
    source = json.dumps(worker.content_string)
    shim = f"""const Started = Worker;
if (location.protocol === "file:")
  window.Worker = function () {{
    return new Started(URL.createObjectURL(new Blob([{source}])));
  }};"""
    files.append(add("iframe-worker.js", content=shim))
    return files


def on_page_markdown(markdown, page, config, files):
    """Nothing for MkDocs to read: the page is HTML already. Scripts and tables stay out of the
    search.
    """
    if "<h1 id=" not in BODIES[page.file.src_uri]:
        page.meta = {"hide": ["navigation", "toc"], "search": {"exclude": True}}
    return ""


def on_page_content(body, page, config, files):
    """The HTML of a page, its title and its headings."""
    body = BODIES[page.file.src_uri]
    found = re.findall(r'<h(\d) id="([^"]*)">(.*?)</h\d>', body, re.S)
    names = [re.sub("<[^>]*>", "", name) for *_, name in found]
    headings = [dict(level=int(n), id=i, name=name) for (n, i, _), name in zip(found, names)]
    page.toc = get_toc(nest_toc_tokens(headings))
    page.title = html.unescape(re.sub("<[^>]*>", "", re.search("<h1.*?</h1>", body, re.S)[0]))
    return body


def on_page_context(context, page, config, nav):
    """The switch between the languages leads to the same page, or the first where the other has
    none.
    """
    both = {place(path) for path in PAGES} >= {
        Path(lang, page.file.dest_uri) for lang in ("", "zh")
    }
    uri = page.file.dest_uri if both else "index.html"
    config.extra["alternate"] = [
        {"name": "English", "link": f"root:{uri}", "lang": "en"},
        {"name": "繁體中文", "link": f"root:zh/{uri}", "lang": "zh-TW"},
    ]


def on_post_page(output, page, config):
    """Links from the top of both languages, which MkDocs can't make; none that make the theme fetch
    a map.
    """
    up = "../" * (page.file.dest_uri.count("/") + (LANGUAGE == "zh"))
    return re.sub('<link rel="alternate".*?>', "", output).replace('href="root:', f'href="{up}')
