"""The pages of the course say what is so: links, quoted code, formulas, pictures, both languages,
words.
"""

import html
import re
import textwrap

import cmarkgfm
import pages
import pytest
from cmarkgfm.cmark import Options
from pages import CHINESE, ENGLISH, chinese_of, name_of

# blocks of code, and spans that show markup
FENCE = re.compile(r"^```.*?^```|``.+?``", re.M | re.S)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def prose(text):
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def anchors(page):
    """What GitHub makes of headings: lower case, no punctuation, hyphens for spaces, -1 for a
    second one.
    """
    found = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page.read_text()), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = sum(
            re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found
        )
        found.append(f"{slug}-{again}" if again else slug)
    return found


@pytest.mark.parametrize("page", pages.EVERY, ids=name_of)
def test_every_link_resolves_with_its_anchor_in_the_pages_language(page):
    """But for the first link, which leads to the other one. A page without a translation is
    everybody's.
    """
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text()))
    assert links
    for i, link in enumerate(link for link in links if not link.startswith("http")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if target.suffix == ".md" and anchor:
            assert anchor in anchors(target), link
        if i and page in pages.ALL and target in pages.ALL:
            assert (target in CHINESE) == (page in CHINESE), link


def arrow(page, pattern):
    """The page that an arrow at the end of a page leads to, if it has one."""
    link = re.search(pattern, page.read_text())
    return link and (page.parent / link[1]).resolve()


@pytest.mark.parametrize("side", [ENGLISH, CHINESE], ids=pages.LANGUAGES)
def test_the_arrows_lead_through_the_course_and_back(side):
    """From the front page through the chapters in their order, then through the pages of chapter 5.
    The site's own arrows follow these (tools/build_site.py).
    """
    way = [next(page for page in side if page.parent == pages.ROOT and "README" in page.name)]
    while (following := arrow(way[-1], r"\[[^]]* ->\]\(([^)]+)\)")) != way[0]:
        assert following not in way
        assert arrow(following, r"\[<- [^]]*\]\(([^)]+)\)") == way[-1]
        way.append(following)
    folders = [page.relative_to(pages.ROOT).parts[0] for page in way[1:]]
    assert folders == sorted(folders) and {*folders} == {folder.name for folder in pages.FOLDERS}
    assert not any("MEASUREMENTS" in page.name for page in way)


def test_every_page_of_folder_5_is_reachable_from_its_chapter():
    english = pages.FOLDERS[-1] / "README.md"
    for chapter, side in ((english, ENGLISH), (chinese_of(english), CHINESE)):
        links = re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", chapter.read_text())
        linked = {(chapter.parent / link).resolve() for link in links} | {chapter}
        assert {page for page in side if page.is_relative_to(chapter.parent)} <= linked


@pytest.mark.parametrize("page", pages.that_have("^```python$"), ids=name_of)
def test_a_quoted_block_is_code_of_the_file_linked_above_it(page):
    """Its lines, in their order; the line `# ...` stands for a stretch that is left out."""
    text = page.read_text()
    quotations = re.findall(r"\]\(([^)\s]+)\)\n\n```python\n(.*?)^```$", text, re.M | re.S)
    assert len(quotations) == text.count("\n```python\n"), "a link to its file above each"
    for path, code in quotations:
        file = [line.strip() for line in (page.parent / path).read_text().splitlines()]
        for part in re.split(r"^ *# \.\.\.\n", code, flags=re.M):
            lines = [line.strip() for line in part.splitlines()]
            assert any(file[i : i + len(lines)] == lines for i in range(len(file))), part


@pytest.mark.parametrize("page", pages.that_have(r"\[`[^`]+`\]\([^)\s]+\.(py|sh)\)"), ids=name_of)
def test_code_that_a_link_shows_is_in_the_linked_file(page):
    for shown, path in re.findall(r"\[`([^`]+)`\]\(([^)\s]+\.(?:py|sh))\)", page.read_text()):
        assert shown in (page.parent / path).read_text() or path.endswith(shown), (shown, path)


@pytest.mark.parametrize("page", pages.that_have(r"<picture>|<img|!\["), ids=name_of)
def test_a_picture_has_words_and_its_labels_are_in_the_pages_language(page):
    assert "<img" not in page.read_text()
    for words, path in PICTURE.findall(page.read_text()):
        assert len(words) >= 15
        assert not path.endswith(".svg") or path.endswith("_ch.svg") == (page in CHINESE), path


def test_every_page_has_both_languages():
    assert sorted(map(chinese_of, ENGLISH)) == sorted(CHINESE)
    for page in pages.ALL:
        other = (
            page.with_stem(page.stem.removesuffix("_ch")) if page in CHINESE else chinese_of(page)
        )
        third = page.read_text().split("\n")[2]
        assert third.startswith("> ") and f"]({other.name})" in third


def in_english(link):
    """A link without anchor and language."""
    link = link.split("#")[0].removesuffix("zh/")
    return re.sub(r"_ch\.(md|svg|png|ipynb)$", r".\1", link)


def skeleton(text):
    """What must be equal in both languages."""
    body = prose(text)
    tables = [row for row in body.splitlines() if row.startswith("|")]
    blocks = BLOCK.findall(text)
    return {
        "headings": re.findall(r"^(#+) ", body, re.M),
        "formulas": [code for kind, code in blocks if kind == "math"],
        "links": sorted(in_english(link) for link in re.findall(r"\]\(([^)\s]+)\)", body)),
        "pictures": [in_english(path) for _, path in PICTURE.findall(text)],
        "kinds of blocks": [kind for kind, _ in blocks],
        "quotations": [code for kind, code in blocks if kind == "python"],
        "commands": [re.sub(r" *#.*", "", code) for kind, code in blocks if kind == "bash"],
        "cells": [row.count("|") for row in tables],
        "code in tables": [re.findall(r"`[^`]+`", row) for row in tables],
    }


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_both_languages_say_the_same(page):
    english, chinese = (skeleton(path.read_text()) for path in (page, chinese_of(page)))
    assert english == chinese


def on_github(page):
    """The HTML that GitHub's own Markdown makes of a page, before its formulas are drawn."""
    text = page.read_text()
    return cmarkgfm.github_flavored_markdown_to_html(text, Options.CMARK_OPT_UNSAFE)


def formulas(pattern, text):
    """What the groups of `pattern` find, without the indentation of a list."""
    return [textwrap.dedent("".join(groups)) for groups in re.findall(pattern, text, re.M | re.S)]


@pytest.mark.parametrize("page", pages.that_have(r"^ *```math$|\$\$"), ids=name_of)
def test_github_draws_each_formula_as_it_is_written(page):
    """Dollars are looked for, too: they're drawn, but from what Markdown has left of the TeX."""
    written = formulas(r"^ *```math\n(.*?)^ *```$|\$\$(.*?)\$\$", page.read_text())
    fence = r'<pre lang="math"><code>(.*?)</code></pre>'
    drawn = formulas(rf"{fence}|\$\$(.*?)\$\$", on_github(page))
    assert [html.unescape(formula) for formula in drawn] == written != []


@pytest.mark.parametrize("page", pages.EVERY, ids=name_of)
def test_markdown_takes_no_sign_out_of_the_text(page):
    """Outside code, it takes asterisks inside a word for emphasis, and a notebook takes what is
    between two dollars for a formula.
    """
    text = re.sub(r"<(code|pre)\b.*?</\1>", "", on_github(page), flags=re.S)
    assert "$" not in text
    assert not re.findall(r'.*[\dA-Za-z"]<em>.*|.*</em>[\dA-Za-z].*', text)


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_no_asterisk_is_left_of_what_should_be_bold(page):
    """CommonMark's rule for **: never between a punctuation mark inside and a letter outside."""
    text = re.sub(r"`[^`\n]*`", "·", prose(page.read_text()))
    for line in text.splitlines():
        parts = line.split("**")
        assert len(parts) % 2, line
        for before, bold, after in zip(parts[::2], parts[1::2], parts[2::2]):
            assert bold[-1].isalnum() or not after[:1].isalnum(), f"{bold[-9:]}**{after[:9]}"
            assert bold[0].isalnum() or not before[-1:].isalnum(), f"{before[-9:]}**{bold[:9]}"
