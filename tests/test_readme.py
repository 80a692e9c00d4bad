"""What the READMEs say about the script is what the script says."""

import inspect
import re
from dataclasses import asdict
from pathlib import Path

import methods
import numpy as np
import pages
import pandas as pd
import pytest
import scipy.stats
from folders import load
from measure import tables

import constants
import grpo_llama3_1_8b_demo as demo
import inference
import mesh_and_axis_rules
import settings
from tools import convert_checkpoint, pass_at_k

SCRIPTS = [  # folder 5's have a dataclass
    load(*name.split("/"))
    for name in ("1_Q_Learning/Q_Learning", "2_Cart_Pole_DQN/cart_pole_dqn", "3_Pendulum/pendulum",
                 "3_Pendulum/ppo", "3_Pendulum/reinforce", "4_GRPO_MNIST/grpo_mnist")
]  # fmt: skip
COLUMNS = [settings.defaults(demo.Constants, column) for column in ("laptop", "tpu")]


def shown(value):
    """A constant's value as the tables write it."""
    return "empty" if value == "" else f"{value}".replace("\n", "\\n")


def tables_of(folder, language, row):
    """The rows that match, table by table, of a folder's pages; without tables that have none."""
    blocks = re.findall(r"(?:^\|.*\n)+", pages.text(folder, language), re.M)
    return [rows for block in blocks if (rows := re.findall(row, block, re.M))]


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize(
    "script", [inference, convert_checkpoint, mesh_and_axis_rules, pass_at_k], ids=lambda s: s.__name__
)
def test_folder_5s_other_scripts_have_the_constants_of_their_tables(script, language):
    own = settings.defaults(script.Constants, "laptop")
    if script is inference:  # those that it takes over from a run are named in a sentence
        for name in (*inference.ASKING, *inspect.get_annotations(constants.Arrays)):
            assert f"`{name}`" in pages.text(settings.HERE, language)
            del own[name]
    tables = tables_of(settings.HERE, language, r"^\| `([A-Z_]+)=([^`]*)` \| [^|]+ \|$")
    assert [(name, str(value)) for name, value in own.items()] in tables


@pytest.mark.parametrize("script", [*SCRIPTS, demo, constants], ids=lambda s: s.__name__)
def test_a_pages_table_has_all_constants_of_its_script_with_defaults_and_remarks(script):
    """`make pages` reads the source of a dataclass; here Python has read it."""
    path = Path(script.__file__)
    kinds, chinese = (
        re.findall(rf"<!-- table constants:{path.name}:(\S+) -->", pages.text(path.parent, language))
        for language in pages.LANGUAGES
    )
    rows = [row for kind in kinds for row in tables.constants(path.read_text(), kind.split("+"), "", 0)[1:]]
    own = [asdict(script.Constants())] if script in SCRIPTS else COLUMNS
    parts = [getattr(script, kind) for kind in "+".join(kinds).split("+")]
    assert kinds == chinese and all(remark for *_, remark in rows)
    assert [name for name, *_ in rows] == [f"`{x}`" for part in parts for x in inspect.get_annotations(part)]
    for name, *values, _ in rows:
        if name != "`SYSTEM_PROMPT`":  # too long for a table
            assert values == [shown(column[name.strip("`")]) for column in own], name


def test_a_paired_difference_and_its_interval():
    """The mean by hand; the interval against SciPy's percentile bootstrap, other resamples of the pairs."""
    less = [0.02, -0.01, 0.03, 0.05, 0.01, 0.0, 0.04, 0.02, 0.06, -0.02]
    lines = [{"method": "a", "seed": seed, "pass_at_1": 0.5 + 0.01 * seed} for seed in range(10)]
    lines += [line | {"method": "b", "pass_at_1": line["pass_at_1"] + less[line["seed"]]} for line in lines]
    value, low, high = methods.difference(pd.DataFrame(lines), "b", "a", "pass_at_1")
    found = scipy.stats.bootstrap((less,), np.mean, method="percentile", n_resamples=10_000, rng=1)
    assert value == pytest.approx(0.02, rel=1e-9)
    # two draws of 10,000 resamples: the ends' own error is 2e-4
    assert (low, high) == pytest.approx(tuple(found.confidence_interval), abs=1e-3)
    np.random.default_rng(0).shuffle(lines)  # paired by seed, not by place
    again = methods.difference(pd.DataFrame(lines), "b", "a", "pass_at_1")
    assert again == pytest.approx((value, low, high))
