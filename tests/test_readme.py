"""What the READMEs say about the script is what the script says."""

import ast
import inspect
import re
import typing
from dataclasses import asdict
from pathlib import Path

import methods
import numpy as np
import pages
import pandas as pd
import pytest
import scipy.stats
from folders import load

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


def shown(value):
    """A constant's value as the tables write it."""
    return "empty" if value == "" else f"{value}".replace("\n", "\\n")


def remarks(kind):
    """The remark beside each constant, as --help prints it."""
    text = settings.help_text(kind)
    lines = text.splitlines()
    nodes = [node for block in ast.parse(text).body for node in block.body if isinstance(node, ast.AnnAssign)]
    ends = {node.target.id: lines[node.end_lineno - 1].encode()[node.end_col_offset :] for node in nodes}
    return {name: end.decode().strip(" #") for name, end in ends.items()}


def tables_of(folder, language, row):
    """The rows that match, table by table, of a folder's pages; without tables that have none."""
    blocks = re.findall(r"(?:^\|.*\n)+", pages.text(folder, language), re.M)
    return [rows for block in blocks if (rows := re.findall(row, block, re.M))]


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_constants_tables_equal_the_script(language):
    """One table for each block of constants: names, order, both values, and the remark."""
    row = r"^\| `([A-Z][A-Z0-9_]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$"
    laptop, tpu = (settings.defaults(demo.Constants, column) for column in ("laptop", "tpu"))
    hints, said = typing.get_type_hints(demo.Constants), remarks(demo.Constants)
    parts = [demo.Constants], [constants.Variants], [constants.Extras], [constants.Arrays, constants.Machine]
    for rows, kinds in zip(tables_of(settings.HERE, language, row), parts, strict=True):
        assert [name for name, *_ in rows] == [
            name for kind in kinds for name in inspect.get_annotations(kind)
        ]
        for name, *values, remark in rows:
            if name != "SYSTEM_PROMPT":  # too long for a table
                assert values == [shown(laptop[name]), shown(tpu[name])], name
            choices = ", ".join(map(str, typing.get_args(hints[name])))
            assert remark.endswith(choices) and said[name], name
            wanted = said[name] + (f"; one of {choices}" if choices else "")
            assert language == "chinese" or remark.replace("`", "") == wanted


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize(
    "script", [inference, convert_checkpoint, mesh_and_axis_rules, pass_at_k], ids=lambda s: s.__name__
)
def test_folder_5s_other_scripts_have_the_constants_of_their_tables(script, language):
    own = settings.defaults(script.Constants, "laptop")
    said = remarks(script.Constants)
    assert said.keys() == own.keys() and all(said.values())
    if script is inference:  # those that it takes over from a run are named in a sentence
        for name in (*inference.ASKING, *inspect.get_annotations(constants.Arrays)):
            assert f"`{name}`" in pages.text(settings.HERE, language)
            del own[name]
    tables = tables_of(settings.HERE, language, r"^\| `([A-Z_]+)=([^`]*)` \| [^|]+ \|$")
    assert [(name, str(value)) for name, value in own.items()] in tables


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_a_constants_table_equals_its_script(script, language):
    folder = Path(script.__file__).parent
    tables = tables_of(folder, language, r"^\| `([A-Z][A-Z0-9_]+)` \| ([^|]*) \| [^|]* \|$")
    own = {name: shown(value) for name, value in asdict(script.Constants()).items()}
    assert own in map(dict, tables)
    assert len(tables) == sum(Path(other.__file__).parent == folder for other in SCRIPTS)


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
