"""The site in a real browser: `make test-site`. Needs Debian's chromium and chromium-driver.

Every page is opened from file://, every link followed to its file and its anchor; some pages again from a web
server.
"""

import functools
import http.server
import re
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from chromium import look_like, started
from pages import ALL, ROOT

SITE = ROOT / "site"
LOOK = """
const all = (selector) => [...document.querySelectorAll(selector)];
return {
  links: all("a[href]").map((a) => a.href), ids: all("[id]").map((e) => e.id), text: document.body.innerText,
  missing: all("img").filter((i) => !(i.complete && i.naturalWidth)).map((i) => i.src),
  math: all("math[display=block]").length,
  wide: document.documentElement.scrollWidth > innerWidth, lang: document.documentElement.lang,
}"""


def test_the_committed_playground_is_what_its_sources_make():
    sys.path.insert(0, str(ROOT / "playground"))
    import build

    page = ROOT / "5_GRPO_Maxtext/assets/playground.html"
    assert page.read_text() == build.build(), "run make playground"
    assert page.stat().st_size <= 3_000_000


@pytest.fixture(scope="module")
def driver():
    driver = started()
    look_like(driver, 390, 844, phone=True)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def seen(driver):
    """What the browser finds on each page that can be reached from the first: {path: LOOK's answer}."""
    found, waiting = {}, [SITE / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in found or path.suffix != ".html" or not path.is_file():
            continue
        driver.get(path.as_uri())
        found[path] = driver.execute_script(LOOK)
        waiting += [target_of(link)[0] for link in found[path]["links"] if link.startswith("file:")]
    assert not driver.get_log("browser")
    return found


def target_of(link):
    """The file and the anchor that a file:// address names."""
    address, anchor = urldefrag(link)
    return Path(unquote(urlsplit(address).path)), unquote(anchor)


def test_every_link_leads_to_a_file_and_an_anchor(seen):
    followed = 0
    for page, look in seen.items():
        for link in look["links"]:
            if not link.startswith("file:"):
                assert link.startswith("http"), (page, link)
                continue
            path, anchor = target_of(link)
            assert path.is_relative_to(SITE) and path.is_file(), (page, link)
            if anchor:
                assert anchor in seen[path]["ids"], (page, link)
            followed += 1
    assert followed > 3000


def test_every_page_of_the_course_is_reached_in_its_language(seen):
    def built(page):
        return SITE / page.relative_to(ROOT).with_name(page.stem.replace("README", "index") + ".html")

    for page in ALL:
        look = seen[built(page)]
        chinese = page.stem.endswith("_ch")
        assert look["lang"] == ("zh-Hant-TW" if chinese else "en")
        other = page.with_stem(page.stem.removesuffix("_ch") if chinese else f"{page.stem}_ch")
        assert built(other).as_uri() in look["links"], page
    assert SITE / "report.html" in seen and SITE / "5_GRPO_Maxtext/assets/playground.html" in seen


def test_formulas_and_pictures_are_shown(seen):
    for page in ALL:
        look = seen[SITE / page.relative_to(ROOT).with_name(page.stem.replace("README", "index") + ".html")]
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        assert look["math"] == len(re.findall(r"^\$\$.*?\$\$$", prose, re.M | re.S)), page
        assert not look["missing"], page
        assert not look["wide"], page  # on a phone
        assert "$$" not in look["text"], page
    assert sum(look["math"] for look in seen.values()) > 50


def test_the_site_works_on_a_static_host(driver, seen):
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("", "5_GRPO_Maxtext/index_ch.html", "3_Pendulum/", "5_GRPO_Maxtext/assets/playground.html"):
        driver.get(f"{address}/{name}")
        look = driver.execute_script(LOOK)
        path = SITE / name / ("index.html" if name in ("", "3_Pendulum/") else "")
        assert {urlsplit(x).path for x in look["links"] if x.startswith(address)} == {
            "/" + str(target_of(x)[0].relative_to(SITE)) for x in seen[path]["links"] if x.startswith("file:")
        }
        assert not look["missing"]
    server.shutdown()
    assert not driver.get_log("browser")
