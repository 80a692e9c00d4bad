"""The course on the web: with an address in pyproject.toml, the pages' links lead there."""

import re

import pages
import pytest
from measure import hosted
from pages import CHINESE, ROOT, chinese_of, name_of
from test_pages import skeleton

SITE = "https://someone.github.io/course/"
COLAB = "https://colab.research.google.com/github/someone/course/blob/notebooks/"
LINK = re.compile(r"\]\((https://[^)\s]+)\)")
MARKED = pages.that_have(r"<!-- (hosted|colab|playground)\b")


def on_the_web(page):
    """A page's text as `make pages` would write it for the course at someone/course."""
    return hosted.filled(page.read_text(), page, "someone/course")


def added(page):
    """The links that only a hosted course has."""
    return set(LINK.findall(on_the_web(page))) - set(LINK.findall(page.read_text()))


@pytest.mark.parametrize("page", MARKED, ids=name_of)
def test_every_hosted_link_leads_to_what_is_published(page):
    """The site has the files where the repository has them, and a notebook is named after the
    script.
    """
    language = "zh" if page in CHINESE else "en"
    assert added(page)
    for link in added(page):
        if link.startswith(COLAB):
            notebook = link.removeprefix(COLAB)
            stem = notebook.removesuffix("_ch.ipynb" if page in CHINESE else ".ipynb")
            folder = ROOT / page.relative_to(ROOT).parts[0]
            assert (folder / f"{stem}.py").is_file(), link
        else:
            path, _, address = link.removeprefix(SITE).partition("#")
            assert path in ("", "zh/") or (ROOT / path).is_file(), link
            assert not address or f"&lang={language}" in address, link


def test_every_script_of_the_map_opens_in_colab_in_both_languages():
    scripts = re.findall(r"\]\((\d_\w+/\w+)\.py\)", (ROOT / "README.md").read_text())
    names = {script.split("/")[1] for script in scripts}
    for side in (pages.ENGLISH, CHINESE):
        text = "\n".join(on_the_web(page) for page in side)
        found = re.findall(rf"{re.escape(COLAB)}(\w+?)(?:_ch)?\.ipynb", text)
        assert sorted(found) == sorted(names)


@pytest.mark.parametrize("page", MARKED, ids=name_of)
def test_without_an_address_the_page_is_as_before(page):
    """And the playground's links lead to the front page, not into 2.9 MB of HTML."""
    text = hosted.filled(on_the_web(page), page, "")
    assert text == hosted.filled(page.read_text(), page, "")
    blocks = re.findall(r"^<!-- (?:hosted|colab)[^>]*-->\n\n(.*?)^<!-- end -->$", text, re.M | re.S)
    assert not any(blocks)
    if page.parent != ROOT:
        assert "playground.html" not in text


@pytest.mark.parametrize("page", [p for p in MARKED if p not in CHINESE], ids=name_of)
def test_both_languages_say_the_same_on_the_web(page):
    assert skeleton(on_the_web(page)) == skeleton(on_the_web(chinese_of(page)))


def test_a_room_that_a_page_links_to_is_in_the_playground():
    texts = "".join(page.read_text() for page in pages.ALL)
    rooms = (ROOT / "playground" / "missions.js").read_text()
    links = re.findall(r"<!-- playground room=(\w+)(?:&mission=(\w+))? -->", texts)
    assert len(links) == texts.count("<!-- playground ")
    for room, mission in links:
        [listed] = re.findall(rf"^  {room}: \[\n(.*?)^  \]", rooms, re.M | re.S)
        assert not mission or f'name: "{mission}"' in listed
