"""The site in a real browser: `make test-site`. Needs Debian's chromium and chromium-driver.

Every page is opened from file://, every link followed to its file and its anchor; some pages again
from a web server.
"""

import functools
import http.server
import re
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from axe_selenium_python import Axe
from chromium import find, look_like, one
from pages import ALL, ROOT
from selenium.webdriver.support.ui import WebDriverWait

sys.path[:0] = [str(ROOT / "playground"), str(ROOT / "tools")]
import build
import build_site

SITE = ROOT / "site"
PLAYGROUND, REPORT = SITE / "5_GRPO_Maxtext/assets/playground.html", SITE / "report.html"
ROOMS = ("grid", "bandit", "clip", "answers", "train")
WIDTHS = (320, 390, 768, 900, 1400)
LOOK = """
const all = (selector) => [...document.querySelectorAll(selector)];
return {
  links: all("a[href]").map((a) => a.href), ids: all("[id]").map((e) => e.id),
  text: document.body.innerText,
  faults: all("img").filter((i) => !(i.complete && i.naturalWidth)).map((i) => i.src),
  arrows: all("a.md-footer__link").map((a) => a.href),
  math: all("math[display=block]").length, lang: document.documentElement.lang,
  fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
}"""
WIDE = "return document.documentElement.scrollWidth > innerWidth"
# What comes with a click: a mission and the answer to a guess, a token's formula; its strongest
# colors.
OPENED = """
for (const name of [".missions button", "[id^=guess_]", "article .token"])
  document.querySelector(name)?.click();
for (const token of document.querySelectorAll(".token"))
  token.style.setProperty("--strength", "55%")"""
SAMPLE = (
    "index.html",
    "zh/3_Pendulum/ppo.html",
    "GLOSSARY.html",
    "4_GRPO_MNIST/grpo_mnist.py.html",
)


def test_the_committed_playground_is_what_its_sources_make():
    page = ROOT / "5_GRPO_Maxtext/assets/playground.html"
    assert page.read_text() == build.build(), "run make playground"
    assert page.stat().st_size <= 3_000_000


@pytest.fixture(scope="module")
def seen(driver):
    """What the browser finds on each page that can be reached from the first: {path: LOOK's
    answer}.
    """
    found, waiting = {}, [SITE / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in found or path.suffix != ".html" or not path.is_file():
            continue
        driver.get(path.as_uri())
        found[path] = driver.execute_script(LOOK)
        for width in WIDTHS:
            look_like(driver, width, 844, phone=width < 500)
            found[path]["faults"] += [width] if driver.execute_script(WIDE) else []
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        found[path]["faults"] += ["print"] if driver.execute_script(WIDE) else []
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        waiting += [target_of(link)[0] for link in found[path]["links"] if link.startswith("file:")]
    assert not driver.get_log("browser")
    return found


def target_of(link):
    """The file and the anchor that a file:// address names."""
    address, anchor = urldefrag(link)
    return Path(unquote(urlsplit(address).path)), unquote(anchor)


def test_every_link_leads_to_a_file_and_an_anchor_and_no_page_fetches_anything(seen):
    for page, look in seen.items():
        assert all(name.startswith(("file:", "blob:", "data:")) for name in look["fetched"]), page
        assert all(link.startswith(("file:", "http")) for link in look["links"]), page
        for link in look["links"]:
            path, anchor = target_of(link)
            if link.startswith("file:"):
                assert path.is_relative_to(SITE) and path.is_file(), (page, link)
                assert not anchor or "=" in anchor or anchor in seen[path]["ids"], (page, link)


def test_every_page_of_the_course_is_shown_whole_and_in_its_language(seen):
    for page in ALL:
        look, chinese = seen[SITE / build_site.place(page)], page.stem.endswith("_ch")
        assert look["lang"] == ("zh-TW" if chinese else "en")
        other = page.with_stem(page.stem.removesuffix("_ch") if chinese else f"{page.stem}_ch")
        assert (SITE / build_site.place(other)).as_uri() in look["links"], page
        assert look["math"] == len(re.findall(r"^ *```math$", page.read_text(), re.M)), page
    mine = {page: look["faults"] for page, look in seen.items() if page not in (PLAYGROUND, REPORT)}
    assert len(mine) == len(seen) - 2
    assert not {page: faults for page, faults in mine.items() if faults}


def test_the_arrows_below_a_page_lead_where_its_own_do(seen):
    """Not to the next page of the sidebar, which is the lab book after chapter 1."""
    for page in ALL:
        link = r"\[(?:<- [^]]*|[^]]* ->)\]\(([^)]+)\)"
        own = [(page.parent / target).resolve() for target in re.findall(link, page.read_text())]
        arrows = [(SITE / build_site.place(target)).as_uri() for target in own]
        assert seen[SITE / build_site.place(page)]["arrows"] == arrows, page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "page", [*SAMPLE, *(f"{PLAYGROUND}#room={room}" for room in ROOMS), REPORT]
)
def test_axe_finds_nothing(driver, page, scheme):
    for width in (390, 1280):
        look_like(driver, width, 844, phone=False, scheme=scheme)
        driver.get("about:blank")
        driver.get(f"{SITE.as_uri()}/{page}" if page in SAMPLE else f"file://{page}")
        if str(page).endswith("=answers"):
            WebDriverWait(driver, 60).until(
                lambda d: any(x.is_displayed() for x in find(d, "#eight_told"))
            )
        driver.execute_script(OPENED)
        time.sleep(0.6)  # Material fades colors, and lets keys reach what scrolls
        axe = Axe(driver)
        axe.inject()
        rules = ("target-size", "label-content-name-mismatch")  # off by default
        on = ", ".join(f"'{rule}': {{enabled: true}}" for rule in rules)
        found = axe.run(options=f"{{iframes: false, rules: {{{on}}}}}")["violations"]
        assert not [(fault["id"], [node["html"] for node in fault["nodes"]]) for fault in found]


@pytest.mark.parametrize(
    "page, words", [("index.html", "importance weight"), ("zh/index.html", "重要性權重")]
)
def test_the_search_works_from_disk(driver, page, words):
    look_like(driver, 1400, 844, phone=False)
    driver.get((SITE / page).as_uri())
    one(driver, "input.md-search__input").send_keys(words)
    results = WebDriverWait(driver, 20).until(lambda _: find(driver, "a.md-search-result__link"))
    address = results[0].get_attribute("href").partition("?")[0]
    assert words in target_of(address)[0].read_text()


def test_the_switches_work(driver):
    look_like(driver, 1400, 844, phone=False)
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    driver.get_log("browser")  # of what was before
    driver.get(f"http://127.0.0.1:{server.server_port}/3_Pendulum/ppo.html")
    for scheme in ("default", "slate"):
        one(driver, "label.md-header__button[for^=__palette]:not([hidden])").click()
        assert one(driver, "body").get_attribute("data-md-color-scheme") == scheme
    still = one(driver, ".film img").get_attribute("src")
    assert ".frames/66." in still
    one(driver, ".film button").click()
    WebDriverWait(driver, 5).until(lambda _: one(driver, ".film img").get_attribute("src") != still)
    driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    button = find(driver, "button[data-clipboard-target], button.md-clipboard, .md-code__button")[0]
    driver.execute_script("arguments[0].click()", button)
    copied = driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    page = (ROOT / "3_Pendulum/ppo.md").read_text()
    assert copied == re.search(r"^```text\n(.*?)\n```$", page, re.M | re.S)[1]
    server.shutdown()
    assert not driver.get_log("browser")
