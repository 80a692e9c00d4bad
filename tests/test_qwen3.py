"""Qwen3 through everything that a Llama goes through; its logits are compared in
test_load_llama.py.
"""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from maxtext.checkpoint_conversion.utils import hf_shape
from test_load_llama import GOLDEN

import grpo_llama3_1_8b_demo as demo
import settings
from run.run_files import read_log
from tools import convert_checkpoint as convert


def make(folder, **changes):
    """A tiny Qwen3 with random weights and the tiny Llama's tokenizer; `changes` are of its
    config.json.
    """
    shutil.copytree(
        settings.HERE / "tiny_llama", folder, ignore=shutil.ignore_patterns("*.safetensors")
    )
    tiny, config = (
        json.loads((path / "config.json").read_text()) for path in (folder, GOLDEN / "qwen3_tied")
    )
    config |= {
        name: tiny[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in hf_shape.HF_SHAPE["qwen3-0.6b"](config).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        noise = rng.normal(size=shape).astype(np.float32)
        # norms about 1; the others large enough for sharp, and so different, answers
        weights[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.mark.parametrize(
    "lora", [(), pytest.param(("LORA_RANK=2", "SCAN_LAYERS=True"), marks=pytest.mark.slow)]
)
def test_the_whole_script_trains_it_and_the_export_is_what_was_trained(model, empty_folder, lora):
    demo.main(
        [
            f"MODEL={model}",
            "NUM_BATCHES=2",
            "BATCH_SIZE=4",
            "NUM_GENERATIONS=4",
            "NUM_ITERATIONS=1",
            "LEARNING_RATE=0.01",
            "BETA=0.0",
            "REWARDS=match_format_approximately",
            "SAVE_INTERVAL_STEPS=2",
            "LOG_ANSWERS_EVERY=2",
            "NUM_TEST_QUESTIONS=16",
            "EVAL_EVERY=0",
            "EVAL_CONFIG=liberal",
            "RUN_DIR=run",
            *lora,
        ]
    )
    log = read_log(empty_folder / "run" / "train_log.csv")
    assert len(log) == 2
    # Decoding, whose cache holds keys that are normalized and rotated, agrees with the full forward
    # pass, but for padding: a random model gives it up to 14 %, and it's never drawn.
    assert max(row["mismatch_max"] for row in log) < 0.2
    convert.main(["SOURCE=run", "TARGET=hf"])
    before = safetensors.numpy.load_file(model / "model.safetensors")
    after = safetensors.numpy.load_file(empty_folder / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name, weight in before.items() if np.abs(weight - after[name]).max() > 0}
    trained = {name for name in before if not lora or "proj" in name}
    # random answers of which some groups differ in reward: every weight that is trained gets a
    # gradient
    assert moved == trained
