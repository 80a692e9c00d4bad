"""The plain loops of the chapters: the block that a page follows with its output is run."""

import contextlib
import io
import re
import sys

import pytest
from folders import ROOT, load_all

LOOP = re.compile(r"^```py\n([^`]*)^```\n\n```text\n([^`]*)^```", re.M)
CHAPTERS = ["3_Pendulum"]


@pytest.mark.parametrize("page", ["README.md", "README_ch.md"])
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_loop_prints_what_its_page_says(chapter, page, monkeypatch):
    """Run as in a Python that was started in the chapter's folder."""
    for name, module in load_all(chapter).items():
        monkeypatch.setitem(sys.modules, name, module)
    [(code, printed)] = LOOP.findall((ROOT / chapter / page).read_text())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == printed
