"""The plain loops of the pages: each block of Python that a page follows with its output is run."""

import ast
import contextlib
import io
import re
import sys

import numpy as np
import pages
import pytest
from folders import ROOT, load_all

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


@pytest.mark.parametrize("page", ["4_GRPO_MNIST/README.md", "4_GRPO_MNIST/README_ch.md"])
def test_a_guess_earns_in_the_loop_what_it_earns_in_the_script(page):
    [(_, printed)] = LOOP.findall((ROOT / page).read_text())
    rows = [ast.literal_eval(line.replace(" [", ", [")) for line in printed.splitlines()]
    labels, guesses, rewards = map(np.array, zip(*rows, strict=True))
    assert 0 < rewards.mean() < 1
    step = load_all("4_GRPO_MNIST")["environment"].step
    np.testing.assert_array_equal(step(labels, guesses), rewards)
