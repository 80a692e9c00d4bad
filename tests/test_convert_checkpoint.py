"""Hugging Face -> MaxText -> Hugging Face: the same bits; MaxText loads what is between."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx
from maxtext.utils import model_creation_utils
from test_load_llama import load, logits_of, tolerance

import grpo_llama3_1_8b_demo as demo
import settings
from model import llama
from run import checkpoints, run_folder
from settings import HERE, UserError
from tools import convert_checkpoint as convert

GOLDEN = Path(__file__).resolve().parent / "golden"
LLAMA8B_LAYOUT = "llama31_rope"  # grouped kv heads, llama3 rope scaling, an output layer of its own


pytestmark = pytest.mark.usefixtures("empty_folder")


def metadata(checkpoint):
    """What Orbax knows of each array of a checkpoint."""
    tree = ocp.PyTreeCheckpointer().metadata(Path(checkpoint).resolve()).item_metadata.tree
    return jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "shape"))


def load_weights(folder):
    """Every tensor of a Hugging Face folder, by name, whatever the number of files."""
    files = map(safetensors.numpy.load_file, Path(folder).glob("*.safetensors"))
    return {name: weight for file in files for name, weight in file.items()}


def assert_same_bits(folder, other):
    one, two = (
        {name: (w.dtype, w.shape, w.tobytes()) for name, w in load_weights(path).items()}
        for path in (folder, other)
    )
    assert one and one == two


def in_bfloat16(name):
    """A copy of a golden model in bfloat16, the type in which Llama 3.1 8B is published."""
    folder = Path(shutil.copytree(GOLDEN / name, "model"))
    weights = {k: v.astype(ml_dtypes.bfloat16) for k, v in load_weights(folder).items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((LLAMA8B_LAYOUT, False), ("qwen3", True), ("qwen3", False))
]


@pytest.mark.parametrize(("name", "scan_layers"), [(LLAMA8B_LAYOUT, True), *SLOW])
def test_maxtext_loads_the_converted_checkpoint_and_gives_the_logits_of_transformers(
    tmp_path, name, scan_layers
):
    """With MaxText's own loader."""
    golden = np.load(GOLDEN / name / "logits.npz")
    convert.main([f"SOURCE={GOLDEN / name}", "TARGET=mt", f"SCAN_LAYERS={scan_layers}"])
    _, hf = llama.fetch_model(str(GOLDEN / name))
    config = llama.to_maxtext_config(
        hf,
        rows=len(golden["tokens"]),
        prompt_tokens=20,
        new_tokens=4,
        scan_layers=scan_layers,
        load_parameters_path=str(tmp_path / "mt" / "0" / "items"),
        enable_checkpointing=True,
    )
    adapter, mesh = model_creation_utils.from_pretrained(
        config, wrap_with_tunix_adapter=True, tokenizer_pad_id=0
    )
    llama.use_rope_scaling(adapter.base, hf)
    logits = logits_of(adapter, mesh, golden)  # [B, L, V]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=tolerance(golden))


@pytest.mark.parametrize(("name", "scan_layers"), [(LLAMA8B_LAYOUT, False), ("qwen3_tied", True)])
def test_a_round_trip_of_a_bfloat16_checkpoint_gives_the_same_bits(name, scan_layers):
    model = in_bfloat16(name)
    convert.main([f"SOURCE={model}", "TARGET=mt", f"SCAN_LAYERS={scan_layers}"])
    convert.main(["SOURCE=mt", f"MODEL={model}", "TARGET=hf"])
    assert_same_bits(model, "hf")
    assert not Path("hf/README.md").exists()  # no run, no card
    assert json.loads(Path("hf/config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )


def test_large_models_are_split_into_files_and_chunks(monkeypatch):
    monkeypatch.setattr(convert, "SHARD", "9KB")
    monkeypatch.setattr(convert, "CHUNK", 4096)
    model = in_bfloat16(LLAMA8B_LAYOUT)
    Path("mt.partial/0").mkdir(parents=True)  # of a conversion that was killed
    convert.main([f"SOURCE={model}", "TARGET=mt/"])
    convert.main(["SOURCE=mt/", f"MODEL={model}", "TARGET=hf"])
    assert sorted(path.name for path in Path().iterdir()) == ["hf", "model", "mt"]
    files = {path.name for path in Path("hf").glob("*.safetensors")}
    index = json.loads(Path("hf/model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 3 and set(index.values()) == files
    for name, file in index.items():
        assert name in safetensors.numpy.load_file(Path("hf") / file)
    assert_same_bits(model, "hf")
    assert all(np.prod(leaf.storage.chunk_shape) * 4 <= 4096 for leaf in metadata("mt/0/items"))


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory):
    """A golden model as MaxText has it, in bfloat16."""
    folder = tmp_path_factory.mktemp("maxtext") / "mt"
    convert.main([f"SOURCE={GOLDEN / LLAMA8B_LAYOUT}", f"TARGET={folder}", "WEIGHT_DTYPE=bfloat16"])
    return folder


def test_the_type_that_is_asked_for_is_written(maxtext):
    assert {str(leaf.dtype) for leaf in metadata(maxtext / "0/items")} == {"bfloat16"}
    model = f"MODEL={GOLDEN / LLAMA8B_LAYOUT}"
    convert.main([f"SOURCE={maxtext}", model, "TARGET=hf", "WEIGHT_DTYPE=float16"])
    assert {str(weight.dtype) for weight in load_weights("hf").values()} == {"float16"}
    assert json.loads(Path("hf/config.json").read_text())["dtype"] == "float16"


def test_what_a_run_trained_becomes_a_model():
    """The checkpoint is written as the main script writes it; after step i all weights are i times
    larger.
    """
    first = nnx.to_pure_dict(nnx.state(load("tiny_llama")[0], nnx.Param))
    Path("run").mkdir()
    Path("run/constants.json").write_text(json.dumps(settings.defaults(demo.Constants, "small")))
    c, moments = settings.read(demo.Constants, []), optax.adamw(1e-3).init(first)
    with checkpoints.open_manager(str(Path("run/checkpoints").resolve())) as manager:
        for i in (9, 10):  # the latest is taken: by number, not by name
            weights = optax.tree.scale(i, first)
            checkpoints.save(manager, i, weights, moments, {"beta": 0.0, "ahead": None}, c)
    assert Path("run/checkpoints/10/moments").is_dir()

    tokenizer = llama.load_tokenizer(HERE / "tiny_llama")
    original = load_weights(HERE / "tiny_llama")
    for source, step in (("run", 10), ("run/9", 9)):
        target = Path(f"hf{step}")
        convert.main([f"SOURCE={source}", f"TARGET={target}"])
        exported = load_weights(target)
        assert exported.keys() == original.keys()
        # the query was divided and multiplied by sqrt(head_dim)
        for name, weight in original.items():
            np.testing.assert_allclose(exported[name], weight * step, rtol=1e-6)
        text = "Tom has 2 apples"
        assert llama.load_tokenizer(target).encode(text) == tokenizer.encode(text)
        assert f"after step {step} of 100" in (target / "README.md").read_text()


@pytest.mark.parametrize(
    ("dtype", "written"),
    [(None, "bfloat16"), ("auto", "bfloat16"), ("gone", "bfloat16"), ("float32", "float32")],
)
def test_without_a_dtype_in_config_json_the_weights_keep_theirs(maxtext, dtype, written):
    model = in_bfloat16(LLAMA8B_LAYOUT)
    config = json.loads((model / "config.json").read_text())
    config = {k: v for k, v in config.items() if k != "dtype"}
    config |= {} if dtype == "gone" else {"dtype": dtype}
    (model / "config.json").write_text(json.dumps(config))
    convert.main([f"SOURCE={maxtext}", f"MODEL={model}", "TARGET=hf"])
    assert {str(weight.dtype) for weight in load_weights("hf").values()} == {written}
    assert json.loads(Path("hf/config.json").read_text())["dtype"] == written


def test_everything_but_weights_goes_along_and_counts(maxtext):
    """Downloads, exports and a run's identity have one idea of what belongs to a model."""
    model = in_bfloat16(LLAMA8B_LAYOUT)
    own = [
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "qwen.tiktoken",
        "LICENSE",
        "USE_POLICY.md",
    ]
    own += ["additional_chat_templates/tool_use.jinja"]
    others = ["model.gguf", "pytorch_model.bin", "optimizer.pt", "original/consolidated.00.pth"]
    others += ["README.md", ".DS_Store", "checkpoint-5/trainer_state.json"]
    for name in [*own, *others]:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    convert.main([f"SOURCE={maxtext}", f"MODEL={model}", "TARGET=hf"])
    files = {str(p.relative_to("hf")) for p in Path("hf").rglob("*") if p.is_file()}
    assert files == {*own, "config.json", "model.safetensors", "logits.npz"}
    for name, counts in [*((name, True) for name in own), *((name, False) for name in others)]:
        before = run_folder.model_digest(str(model))
        (model / name).write_text("another")
        assert (run_folder.model_digest(str(model)) != before) == counts, name
    assert len(before) != len(hashlib.blake2b().hexdigest()) != 64  # of older runs: not compared


FAULTS = {
    "MODEL=: SOURCE=.*mt is not in a run.* give MODEL": [],
    "its weight .* is .*, SOURCE=.*mt holds": [f"MODEL={GOLDEN / 'grouped_kv_heads'}"],
    r"TARGET=t: 0\.00 GiB are needed, 0\.00 GiB are free": ["SOURCE=tiny_llama"],
}


def test_a_fault_is_one_line_and_leaves_no_target(monkeypatch, subtests, maxtext):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000)
    )
    for message, arguments in FAULTS.items():
        with subtests.test(message):
            with pytest.raises(UserError, match=message) as error:
                convert.main([f"SOURCE={maxtext}", "TARGET=t", *arguments])
            assert "\n" not in str(error.value) and not Path("t").exists()
