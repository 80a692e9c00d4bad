"""The plain loops of the chapters: the block that a page follows with its output is run."""

import ast
import contextlib
import io
import re
import sys

import numpy as np
import pytest
from folders import ROOT, load_all

LOOP = re.compile(r"^```py\n([^`]*)^```\n\n```text\n([^`]*)^```", re.M)
LANGUAGES = pytest.mark.parametrize("page", ["README.md", "README_ch.md"])


def loop_of(chapter, page):
    """The one loop that a chapter's page has: its code, and what it prints."""
    [loop] = LOOP.findall((ROOT / chapter / page).read_text())
    return loop


@LANGUAGES
@pytest.mark.parametrize("chapter", ["2_Cart_Pole_DQN", "3_Pendulum", "4_GRPO_MNIST"])
def test_a_loop_prints_what_its_page_says(chapter, page, monkeypatch):
    """Run as in a Python that was started in the chapter's folder."""
    for name, module in load_all(chapter).items():
        monkeypatch.setitem(sys.modules, name, module)
    code, printed = loop_of(chapter, page)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == printed


@LANGUAGES
def test_a_guess_earns_in_the_loop_what_it_earns_in_the_script(page):
    _, printed = loop_of("4_GRPO_MNIST", page)
    rows = [ast.literal_eval(line.replace(" [", ", [")) for line in printed.splitlines()]
    labels, guesses, rewards = map(np.array, zip(*rows, strict=True))
    assert 0 < rewards.mean() < 1
    step = load_all("4_GRPO_MNIST")["environment"].step
    np.testing.assert_array_equal(step(labels, guesses), rewards)
