"""The pages of the course say what is so: links, quoted code, formulas, pictures, both languages, words."""

import ast
import re

import line_links
import pages
import pytest
from pages import CHAPTERS, CHINESE, ENGLISH, ROOT, chinese_of, name_of

FENCE = re.compile(r"^```.*?^```|``.+?``", re.M | re.S)  # blocks of code, and spans that show markup
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PICTURE = re.compile(
    r'<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\n'
    r'  <img alt="(?P<words>[^"]+)" src="(?P<path>[^"]+)">\n</picture>'
)
EVERY = [*pages.ALL, ROOT / "CONTRIBUTING.md"]


def prose(text):
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def sections(text):
    """The text under each heading, up to the next one."""
    return re.split(r"^#+ .*$", prose_with_quotes(text), flags=re.M)


def prose_with_quotes(text):
    """A page in which a line that begins with # in a block of code is no heading."""
    return BLOCK.sub(lambda block: re.sub(r"^#", " #", block[0], flags=re.M), text)


# --- links


def anchors(page):
    """What GitHub makes of headings: lower case, no punctuation, hyphens for spaces, -1 for a second one."""
    found = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page.read_text()), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{again}" if again else slug)
    return found


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_every_link_resolves_with_its_anchor(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text()))
    assert links
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if target.suffix == ".md" and anchor:
            assert anchor in anchors(target), link
        elif anchor:
            lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", anchor)
            assert lines and int(lines[2] or lines[1]) <= len(target.read_text().splitlines()), link


@pytest.mark.parametrize("page", pages.ALL, ids=name_of)
def test_a_page_links_to_pages_of_its_own_language(page):
    """But for the first link, which leads to the other one. A page without a translation is everybody's."""
    _, *links = re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", prose(page.read_text()))
    assert links
    for link in links:
        target = (page.parent / link).resolve()
        if target in ENGLISH or target in CHINESE:
            assert (target in CHINESE) == (page in CHINESE), link


def test_every_page_of_folder_5_is_reachable_from_its_chapter():
    for chapter, side in ((pages.CHAPTERS[-1], ENGLISH), (chinese_of(pages.CHAPTERS[-1]), CHINESE)):
        linked = {
            (chapter.parent / link).resolve()
            for link in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", chapter.read_text())
        }
        assert {page for page in side if page.is_relative_to(chapter.parent)} - {chapter} <= linked


@pytest.mark.parametrize("page", pages.that_have(r"\.(py|sh)#L\d|^```python$"), ids=name_of)
def test_linked_lines_and_quoted_blocks_are_what_stands_there(page):
    """After a change in a script: make links."""
    text = page.read_text()
    assert line_links.renewed(text, page.parent) == text
    blocks = [match for match in BLOCK.finditer(text) if match[1] == "python"]
    assert len(blocks) == len(line_links.QUOTATION.findall(text)), "a quotation has its link above it"


@pytest.mark.parametrize("page", pages.that_have("^```"), ids=name_of)
def test_a_block_has_one_of_five_kinds(page):
    assert {kind for kind, _ in BLOCK.findall(page.read_text())} <= {"python", "py", "text", "bash", "json"}


@pytest.mark.parametrize("page", pages.that_have("^```py$"), ids=name_of)
def test_sketches_are_python(page):
    for kind, code in BLOCK.findall(page.read_text()):
        if kind == "py":
            ast.parse(code)


def test_lines_and_blocks_that_moved_are_found_again():
    page = CHAPTERS[0]
    text = page.read_text()
    moved = re.sub(r"#L\d+(-L\d+)?\)", lambda link: "#L1-L2)" if link[1] else "#L1)", text)
    assert moved != text and "#L1-L2)" in moved
    assert line_links.renewed(moved, page.parent) == text


@pytest.mark.parametrize("text", ["a text of no script", "import"])
def test_a_linked_text_must_stand_on_one_line(text):
    with pytest.raises(ValueError, match="link a text that stands on one"):
        line_links.line_of(ROOT / "1_Q_Learning" / "Q_Learning.py", text)


def test_a_quoted_block_must_stand_at_one_place(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def f():\n    a = 1\n    # why\n    b = 2\n    return a\n\n\ndef g():\n    a = 1\n")
    assert line_links.lines_of(script, "a = 1\n# why\nb = 2\n") == (2, 4)
    assert line_links.lines_of(script, "def f():\n    # ...\n    return a\n") == (1, 5)
    assert line_links.lines_of(script, "def g():\n    a = 1\n") == (8, 9)
    for code in (
        "a = 1\n",
        "a = 1\nb = 2\n",
        "def f():\n# ...\nreturn a\n",
        "def g():\n    # ...\n    b = 2\n",
    ):
        with pytest.raises(ValueError, match="places"):
            line_links.lines_of(script, code)


# --- form


@pytest.mark.parametrize("page", pages.that_have(r"^\$\$"), ids=name_of)
def test_every_formula_stands_beside_its_code_and_names_its_test(page):
    """In the section a quoted block or a linked line of a script; in the fold at the page's end its test."""
    text = page.read_text()
    checks = dict(re.findall(r"^- \[.+?\]\(#(.+?)\)(?:: |：)(.+)$", text.split("</summary>")[-1], re.M))
    for anchor, section in zip(anchors(page), sections(text)[1:], strict=True):
        if re.search(r"^\$\$", section, re.M):
            links = list(line_links.LINE_LINK.finditer(section))
            assert links or line_links.QUOTATION.search(section), section[:200]
            tests = list(line_links.LINE_LINK.finditer(checks.get(anchor, "")))
            assert tests, f"{anchor}: no test in the last fold"
            assert all(test["text"].startswith("test_") and "tests/" in test["path"] for test in tests)


@pytest.mark.parametrize("side", ["english", "chinese"])
def test_every_chapter_has_questions_with_folded_answers(side):
    side = ENGLISH if side == "english" else CHINESE
    numbers = []
    for page in side:
        text = page.read_text()
        mine = re.findall(r"^\*\*(\d\.\d)\*\*", text, re.M)
        assert len(re.findall(r"<details><summary>.+?</summary>\n\n.+?\n\n</details>", text, re.S)) >= len(
            mine
        )
        numbers += mine
    questions = {1: 6, 2: 3, 3: 6, 4: 3, 5: 6}  # three for each idea; chapter 5's last are the mesh's
    assert sorted(numbers) == [f"{chapter}.{i + 1}" for chapter, n in questions.items() for i in range(n)]


@pytest.mark.parametrize("page", pages.that_have(r"<picture>|<img|!\["), ids=name_of)
def test_a_picture_has_words_and_a_dark_twin(page):
    text = page.read_text()
    found = list(PICTURE.finditer(text))
    assert len(found) == text.count("<picture>") == text.count("<img")
    for picture in found:
        assert len(picture["words"]) >= 15
        for name in (picture["path"], picture["dark"]):
            assert (page.parent / name).exists(), name
        assert picture["dark"] == re.sub(r"(?=\.(?:png|gif)$)", "_dark", picture["path"])
    for words, _ in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
        assert len(words) >= 15


def test_every_chapter_has_a_picture():
    assert all(PICTURE.search(chapter.read_text()) for chapter in CHAPTERS)


@pytest.mark.parametrize("picture", sorted(ROOT.glob("[1-5]_*/assets/*.gif")), ids=name_of)
def test_an_animation_is_below_a_megabyte(picture):
    assert picture.stat().st_size < 10**6


def test_pages_are_short():
    """The door is one look, a chapter one sitting, a page of folder 5's documentation one subject."""
    for page in pages.ALL:
        most = {"README": 420, "README_ch": 420, "ppo": 300, "ppo_ch": 300}.get(page.stem, 250)
        if page.parent == ROOT and page.stem.startswith("README"):
            most = 160
        if page.stem.startswith("MEASUREMENTS"):
            continue  # tables
        assert len(page.read_text().splitlines()) <= most, page


# --- languages


def test_every_page_has_both_languages():
    assert [chinese_of(page) for page in ENGLISH] == sorted(CHINESE, key=lambda page: CHINESE.index(page))
    for page in pages.ALL:
        other = page.with_stem(page.stem.removesuffix("_ch")) if page in CHINESE else chinese_of(page)
        assert page.read_text().split("\n")[2].startswith("> ")
        assert f"]({other.name})" in page.read_text().split("\n")[2]


def in_english(link):
    """A link without anchor and language."""
    return re.sub(r"_ch\.md$", ".md", link.split("#")[0])


def skeleton(text):
    """What must be equal in both languages."""
    body = prose(text)
    tables = [row for row in body.splitlines() if row.startswith("|")]
    blocks = BLOCK.findall(text)
    return {
        "headings": re.findall(r"^(#+) ", body, re.M),
        "formulas": re.findall(r"^\$\$.*$", body, re.M),
        "line links": sorted(link.groups() for link in line_links.LINE_LINK.finditer(body)),
        "links": sorted(in_english(link) for link in re.findall(r"\]\(([^)\s]+)\)", body)),
        "pictures": [picture["path"] for picture in PICTURE.finditer(text)],
        "kinds of blocks": [kind for kind, _ in blocks],
        "quotations": [block[0] for block in line_links.QUOTATION.finditer(text)],
        "commands": [re.sub(r" *#.*", "", code) for kind, code in blocks if kind == "bash"],
        "cells": [row.count("|") for row in tables],
        "code in tables": [re.findall(r"`[^`]+`", row) for row in tables],
        "figures in tables": [
            sorted(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\([^)]*\)", "", row))) for row in tables
        ],
        "decimal figures": sorted(re.findall(r"\d+\.\d+", re.sub(r"\]\([^)]*\)", "", body))),
    }


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_both_languages_say_the_same(page):
    english, chinese = (skeleton(path.read_text()) for path in (page, chinese_of(page)))
    for what, said in english.items():
        assert chinese[what] == said, what


ONE_WORD = {  # what is not said: what is said instead
    r"(?<!譯作)回報": "報酬",
    r"功勞分配": "信用分配",
    r"比率|比例（ratio）": "機率比（ratio）, ratio",
    r"(?<!（)動量": "動差（moment）",
    r"線上策略": "同策略",
    r"機房": "引擎",
    r"三個雙胞胎": "三個對照組",
    r"愈": "越",
    r"所占": "所佔",
    r"看見一次執行|怎麼看一次執行": "怎麼看一次訓練",
    r"買到": "換來",
    r"剪裁|剪切": "裁剪",
    r"分布": "分佈",
    r"牽繩|皮帶": "橡皮筋",
    r"取樣過程": "rollout",
    r"採樣": "抽樣",
    r"扭矩|扭力": "力矩",
    r"記錄": "紀錄",
    r"智能體|(?<!也譯)代理人": "agent",
    r"評論家(?!（critic)": "評論家（critic）, critic",
    r"(?<!演)演員(?!（actor)": "演員（actor）, actor",
    r"基準(?!測試)": "基線",
    r"信息|軟件|硬件|內存|默認|視頻|網絡|函數式|質量分數": "資訊、軟體、硬體、記憶體、預設、影片、網路",
}


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_chinese_has_one_word_for_one_thing(page):
    text = prose(page.read_text())
    for wrong, right in ONE_WORD.items():
        found = re.search(rf".{{0,12}}(?:{wrong}).{{0,12}}", text)
        assert not found, f"{found[0]}: {right}"


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_glossary_has_the_same_words_as_the_chapters(language):
    """What the glossary calls a thing is what the chapters call it: each of its words is used somewhere."""
    side = ENGLISH if language == "english" else CHINESE
    glossary = next(page for page in side if "GLOSSARY" in page.stem)
    book = " ".join(word for page in side if page != glossary for word in page.read_text().lower().split())
    column = 1 if language == "english" else 2
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", glossary.read_text(), re.M)
    words = [
        word.strip()
        for row in rows
        if not row[0].startswith(("---", "English"))
        for word in re.split(r"[,、]", re.sub(r"（[^）]*）", "", row[column - 1]))
    ]
    assert len(words) > 50
    missing = [word for word in words if word.lower() not in book]
    assert not missing, missing


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_no_asterisk_is_left_of_what_should_be_bold(page):
    """CommonMark's rule for **: none stands between a punctuation mark inside and a letter outside."""
    text = re.sub(r"`[^`\n]*`", "·", prose(page.read_text()))
    for line in text.splitlines():
        parts = line.split("**")
        assert len(parts) % 2, line
        for before, bold, after in zip(parts[::2], parts[1::2], parts[2::2]):
            assert bold[-1].isalnum() or not after[:1].isalnum(), f"{bold[-9:]}**{after[:9]}"
            assert bold[0].isalnum() or not before[-1:].isalnum(), f"{before[-9:]}**{bold[:9]}"


# --- light enough to read

RUN = re.compile(r"^```bash\n(?:.*\n)*?python \d_", re.M)


def test_density_by_hand():
    """Four figures in 20 English words; 32 characters are as many words."""
    english = "one two three four five six seven eight nine ten " * 2 + "1.5 of 2,000 in -3 and 4"
    assert pages.density(english) == pytest.approx(100 * 4 / 23)  # of, in, and
    assert pages.density("字" * 32 + " 12 到 7") == pytest.approx(100 * 2 / (33 / 1.6))
    assert pages.density("word " * 10 + "chapter 3, [here](x_7.md)\n\n| 1 | 2 |\n\n```\n5 6\n```\n# 8\n") == 0


@pytest.mark.parametrize("page", [page for page in pages.ALL if "MEASUREMENTS" not in page.name], ids=name_of)
def test_at_most_five_figures_per_hundred_words_and_no_spread_in_running_text(page):
    text = page.read_text()
    assert pages.density(text) <= 5
    assert not re.search(r"±|\+/?-\d", pages.UNCOUNTED.sub(" ", text))


@pytest.mark.parametrize("chapter", [p for c in CHAPTERS for p in (c, chinese_of(c))], ids=name_of)
def test_a_chapters_script_is_run_within_its_first_third(chapter):
    text = chapter.read_text()
    before = text[: RUN.search(text).start()].count("\n")
    assert 3 * before <= text.count("\n")
