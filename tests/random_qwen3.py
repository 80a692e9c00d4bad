"""A tiny Qwen3 with random weights and the tiny Llama's tokenizer: what the main script needs of a model."""

import json
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy
from maxtext.checkpoint_conversion.utils import hf_shape

from settings import HERE

GOLDEN = Path(__file__).resolve().parent / "golden"


def make(folder, **changes):
    """Writes `folder`; `changes` are those of tests/golden/qwen3_tied/config.json."""
    shutil.copytree(HERE / "tiny_llama", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tiny = json.loads((folder / "config.json").read_text())
    config = json.loads((GOLDEN / "qwen3_tied" / "config.json").read_text())
    config |= {name: tiny[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
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
