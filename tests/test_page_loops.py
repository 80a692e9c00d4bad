"""The plain loops of the pages: each block of Python that a page follows with its output is run."""

import contextlib
import io
import re
import sys

import pages
import pytest
from folders import load_all

LOOP = re.compile(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", pages.that_have("^```py$"), ids=pages.name_of)
def test_a_loop_prints_what_its_page_says(page, monkeypatch):
    """Run as in a Python that was started in the page's folder."""
    for name, module in load_all(page.parent.name).items():
        monkeypatch.setitem(sys.modules, name, module)
    loops = LOOP.findall(page.read_text())
    assert len(loops) == page.read_text().count("```py\n")
    for code, printed in loops:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        assert out.getvalue() == printed
