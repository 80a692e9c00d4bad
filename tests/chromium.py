"""A headless Chromium for the tests of pages; needs Debian's chromium and chromium-driver."""

import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

FLAGS = (
    "headless=new no-sandbox disable-gpu no-first-run disable-sync disable-background-networking"
)


def started(traced: bool) -> webdriver.Chrome:
    """A browser that logs its complaints; where traced, also its tasks and requests."""
    options, logs = webdriver.ChromeOptions(), {"browser": "ALL"}
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    if traced:
        logs["performance"] = "ALL"
        options.add_experimental_option("perfLoggingPrefs", {"traceCategories": "toplevel"})
    options.set_capability("goog:loggingPrefs", logs)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(600)
    return driver


def look_like(driver, width, height, *, phone, scheme="light"):
    """Gives the browser a size and a color scheme."""
    metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=phone)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def find(driver, selector):
    """The elements that a CSS selector finds."""
    return driver.find_elements(By.CSS_SELECTOR, selector)


def one(driver, selector):
    """The only element that a CSS selector finds."""
    [element] = find(driver, selector)
    return element


def texts(driver, selector):
    """Of each element that a CSS selector finds."""
    return [element.text for element in find(driver, selector)]


def turn(driver, name, value):
    """Moves a slider as a reader would."""
    script = (
        "const [s, to] = arguments; s.value = to; s.dispatchEvent(new Event('input', {bubbles: "
        "true}))"
    )
    driver.execute_script(script, one(driver, f"#{name}"), value)
