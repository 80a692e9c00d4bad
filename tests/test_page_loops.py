"""The plain loops of the pages: each block of Python that a page follows with its output is run."""

import ast
import contextlib
import io
import re
import sys

import numpy as np
import pytest
from folders import ROOT, load_all

LOOP = re.compile(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```", re.M | re.S)
FOLDER_4 = ["4_GRPO_MNIST/README.md", "4_GRPO_MNIST/README_ch.md"]


@pytest.fixture
def in_folder(monkeypatch):
    """in_folder(name): from here on, the modules of this folder can be imported, as in Python
    started there.
    """

    def enter(folder):
        for name, module in load_all(folder).items():
            monkeypatch.setitem(sys.modules, name, module)

    return enter


@pytest.mark.parametrize("page", FOLDER_4)
def test_a_loop_prints_what_its_page_says(page, in_folder):
    in_folder(page.split("/")[0])
    [(code, printed)] = LOOP.findall((ROOT / page).read_text())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == printed


@pytest.mark.parametrize("page", FOLDER_4)
def test_a_guess_earns_in_the_loop_what_it_earns_in_the_script(page):
    [(_, printed)] = LOOP.findall((ROOT / page).read_text())
    rows = [ast.literal_eval(line.replace(" [", ", [")) for line in printed.splitlines()]
    labels, guesses, rewards = map(np.array, zip(*rows, strict=True))
    assert 0 < rewards.mean() < 1
    step = load_all("4_GRPO_MNIST")["environment"].step
    np.testing.assert_array_equal(step(labels, guesses), rewards)
