"""The mesh: every claim of mesh_and_axis_rules.py, on 8 virtual devices.

jax's devices are fixed when it starts, and the other tests want one: so the script runs once in a
process of its own, which hands back all it made.
"""

import contextlib
import io
import json

import numpy as np
import pages
import pytest
import short_runs
from test_load_llama import ROUNDING

from settings import HERE

# written down once more, by hand: mesh (data, model); is it cut along (batch, embed, mlp)?
STRATEGIES = {
    "one device": ((1, 1), (None, None, None)),
    "data parallel": ((8, 1), ("data", None, None)),
    "tensor parallel": ((1, 8), (None, None, "model")),
    "both": ((4, 2), ("data", None, "model")),
    "FSDP": ((8, 1), ("data", "data", None)),
    "FSDP + tensor": ((4, 2), ("data", "data", "model")),
}
B, E, M = 16, 16, 32


def probed(folder):
    """Runs the script with RUN_DIR=folder: its text, and what it made for each strategy, as NumPy
    arrays.
    """
    import mesh_and_axis_rules as script

    with contextlib.redirect_stdout(io.StringIO()) as text:
        layers, llamas = script.main([f"RUN_DIR={folder}"])
    for result in layers.values():
        result["shards"] = {
            name: [(s.device.id, np.asarray(s.data)) for s in array.addressable_shards]
            for name, array in result.pop("arrays").items()
        }
    for name, result in llamas.items():
        strategy = script.STRATEGIES[name]
        result["predicted"] = {
            k: script.shard_shape(*axes, strategy) for k, axes in result["axes"].items()
        }
    return dict(text=text.getvalue(), layers=layers, llamas=llamas)


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    made = short_runs.in_a_process(probed, folder)
    return made | {"tables": json.loads((folder / "result.json").read_text())}


def part(size, axis, mesh, device):
    """The slice of a dimension that a device holds: its row of the mesh if cut along data, its
    column ...
    """
    row, column = divmod(device, mesh[1])
    count, index = {"data": (mesh[0], row), "model": (mesh[1], column), None: (1, 0)}[axis]
    return slice(index * size // count, (index + 1) * size // count)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_shard_lies_where_the_rules_say(probe, name):
    mesh, (batch, embed, mlp) = STRATEGIES[name]
    shards = probe["layers"][name]["shards"]
    whole = {
        array: pieces[0][1] for array, pieces in probe["layers"]["one device"]["shards"].items()
    }
    axes = {
        # no mesh axis twice in an array
        "inputs": ((B, batch), (E, None if batch == embed else embed)),
        "weights": ((E, embed), (M, mlp)),
        "outputs": ((B, batch), (M, mlp)),
    }
    for array, dimensions in axes.items():
        assert sorted(device for device, _ in shards[array]) == list(range(np.prod(mesh)))
        for device, data in shards[array]:
            rows, columns = (part(size, axis, mesh, device) for size, axis in dimensions)
            expected = whole[array][rows, columns]
            assert data.shape == expected.shape
            if array == "outputs":  # sums of products; XLA may order them by shape
                np.testing.assert_allclose(data, expected, rtol=0, atol=1e-5)
            else:
                np.testing.assert_array_equal(data, expected)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_answer_is_that_of_numpy_by_hand(probe, name):
    """mean((X W - T)^2), its gradients written out, in float64."""
    shards = probe["layers"]["one device"]["shards"]
    inputs, weights = (shards[array][0][1].astype(np.float64) for array in ("inputs", "weights"))
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(inputs, rng.standard_normal((B, E)).astype(np.float32))
    targets = rng.standard_normal((B, M)).astype(np.float32)
    error = inputs @ weights - targets
    expected = {
        "outputs": inputs @ weights,
        "loss": np.mean(error**2),
        "weights": weights - 0.1 * 2 / (B * M) * inputs.T @ error,
        "input gradient": 2 / (B * M) * error @ weights.T,
    }
    for key, value in probe["layers"][name]["results"].items():
        # float32: 2^-24 a product, 16 to 32 of them in a sum
        np.testing.assert_allclose(
            value, expected[key], rtol=0, atol=3e-6 * np.abs(expected[key]).max()
        )


def test_the_compiler_puts_in_the_collectives_that_the_strategy_needs(probe):
    """Bytes on a device: the weights' gradients go along data, the inputs' along model."""
    # 4 bytes of the loss travel with each
    weights, half, inputs = 4 * E * M, 4 * E * M // 2, 4 * B * E
    of_weights, of_inputs = ("all-reduce", "data"), ("all-reduce", "model")
    needed = {
        "one device": ([], []),
        "data parallel": ([], [(*of_weights, weights + 4)]),
        "tensor parallel": ([], [(*of_inputs, inputs + 4)]),
        "both": ([], [(*of_weights, half + 4), (*of_inputs, inputs // 4 + 4)]),
        "FSDP": ([("all-gather", "data", weights)], [(*of_weights, weights + 4)]),
        "FSDP + tensor": (
            [("all-gather", "data", half)],
            [(*of_weights, half + 4), (*of_inputs, inputs // 4 + 4)],
        ),
    }
    for name, (forward, gradients) in needed.items():
        result = probe["layers"][name]
        assert sorted(result["forward"]) == forward, name
        step = sorted({*result["step"]})  # weights may be gathered anew going back
        assert step == forward + gradients, name


def test_the_ledger_counts_llama_8b(probe):
    embed, layers, mlp, heads, kv, dim, vocab = 4096, 32, 14336, 32, 8, 128, 128256
    mlps = layers * 3 * embed * mlp
    attention = layers * embed * dim * (2 * heads + 2 * kv)
    norms = (2 * layers + 1) * embed
    total = mlps + attention + 2 * vocab * embed + norms
    assert total == 8_030_261_248  # "8 B"
    rows = [row.split("|") for row in probe["tables"]["ledger"].splitlines()[2:]]
    ledger = {name.strip(): int(count.replace(",", "")) for _, name, count, *_ in rows}
    assert ledger["one device"] == ledger["data parallel"] == total  # copies save nothing
    assert ledger["tensor parallel"] == total // 8
    assert ledger["both"] == total // 2
    assert ledger["FSDP"] == (total - norms) // 8 + norms
    assert ledger["FSDP + tensor"] == (total - norms) // 8 + norms // 2
    # the notes' rules cut the MLPs only
    assert ledger["both, three rules only"] == total - mlps // 2
    for cell in (
        (
            "one device | 8,030,261,248 | 16.1 + 16.1 + 32.1 = 64.2 GB | 32.1 "
            "+ 32.1 + 64.2 = 128.5 GB | none |"
        ),
        "both | 4,015,130,624 | 8.0 + 8.0 + 16.1 = 32.1 GB | 16.1 + 16.1 + 32.1 = 64.2 GB | v5p |",
    ):
        assert cell in probe["text"]


@pytest.mark.parametrize("name", ["both", "FSDP"])
def test_maxtext_cuts_its_llama_by_the_same_rules(probe, name):
    llama, whole = probe["llamas"][name], probe["llamas"]["one device"]
    assert llama["shards"] == llama["predicted"] and len(llama["shards"]) == 30
    assert (
        llama["shards"]["decoder/layers_0/mlp/wi_0/kernel"]
        == {"both": (96, 128), "FSDP": (12, 256)}[name]
    )
    assert all(whole["shards"][key] == tuple(shape) for key, (shape, _) in whole["axes"].items())
    close = ROUNDING * np.abs(whole["logits"]).max()
    np.testing.assert_allclose(llama["logits"], whole["logits"], rtol=0, atol=close)
    assert whole["forward"] == {} and llama["forward"]["all-gather"] > 0
    # halves of a product's sum are added
    assert ("all-reduce" in llama["forward"]) == (name == "both")


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_readme_shows_what_it_prints(probe, language):
    """Rows without words, nor the differences' last digits, which depend on the machine."""
    grid = "data 0          0        1\ndata 1          2        3\ndata 2          4        5\n"
    assert all(words in probe["text"] for words in (grid, "CPU 0,2,4,6", "CPU 1,3,5,7"))
    for table in ("strategies", "ledger", "llama"):
        assert probe["tables"][table] in probe["text"]
        for row in probe["tables"][table].splitlines()[2:] * (table != "llama"):
            assert row.split("|", 2)[2].rsplit("|", 2)[0] in pages.text(HERE, language)
