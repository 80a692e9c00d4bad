"""Builds 5_GRPO_Maxtext/assets/playground.html, one file that needs nothing else: `make
playground`.

The page's modules are joined in the order of `PAGE`, the workers' in that of `WORKER`; each imports
only from those before it. Weights, questions and the WebAssembly program follow as base64. In
`trained.safetensors` stands what the main script made with NUM_BATCHES=200 NUM_ITERATIONS=1
LEARNING_RATE=1e-3 SEED=0, in float16.
"""

import base64
import json
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "5_GRPO_Maxtext"
WORKER = ["model.js", "grpo.js", "tokenizer.js", "rewards.js", "worker.js"]
ROOMS = "address texts dom pool missions grid bandit gae clip answers store verdict train page"
PAGE = [*WORKER[:-1], *(f"{name}.js" for name in ROOMS.split())]
LAYERS, HEAD = 3, 24


def flat_weights(path: Path) -> np.ndarray:
    """The weights of a checkpoint as model.js lays them out, float32 [319776].

    Args:
        path: a safetensors file with Hugging Face's names, matrices [out, in].
    """
    file = {name: weight.astype(np.float32) for name, weight in load_file(path).items()}
    parts = [file["model.embed_tokens.weight"]]
    for layer in range(LAYERS):
        at = {
            name.split(f"layers.{layer}.")[-1].removesuffix(".weight"): w
            for name, w in file.items()
        }
        query = at["self_attn.q_proj"] / np.float32(np.sqrt(HEAD))
        parts += [
            at["input_layernorm"],
            np.concatenate([query, at["self_attn.k_proj"], at["self_attn.v_proj"]]).T,
            at["self_attn.o_proj"].T,
            at["post_attention_layernorm"],
            np.concatenate([at["mlp.gate_proj"], at["mlp.up_proj"]]).T,
            at["mlp.down_proj"].T,
        ]
    parts += [file["model.norm.weight"], np.pad(file["lm_head.weight"].T, ((0, 0), (0, 4)))]
    return np.concatenate([part.ravel() for part in parts])


def read_vocabulary() -> list[str]:
    """The 76 tokens in the order of their ids."""
    words = json.loads((FOLDER / "tiny_llama/tokenizer.json").read_text())["model"]["vocab"]
    return sorted(words, key=words.get)


def packed_questions(split: str) -> bytes:
    """Token ids of each question and each gold number, every one followed by a 0, the padding
    token.
    """
    encode = Tokenizer.from_file(str(FOLDER / "tiny_llama/tokenizer.json")).encode
    ids = []
    for row in map(json.loads, (FOLDER / f"tiny_gsm8k/{split}.jsonl").read_text().splitlines()):
        gold = row["answer"].rpartition("####")[2].strip()
        ids += [*encode(row["question"]).ids, 0, *encode(gold).ids, 0]
    return bytes(ids)


def text_of(data: bytes | np.ndarray) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else data.tobytes()).decode()


def joined(names: list[str]) -> str:
    """The modules as one script: each is a function that returns what it exports."""
    parts = ["const modules = {};"]
    for name in names:
        code = (HERE / name).read_text()
        exported = re.findall(r"^export (?:async )?(?:function|const) (\w+)", code, re.MULTILINE)
        code = re.sub(
            r'^import (?:\* as )?([^"]*?) from "\./([^"]*)";$',
            lambda match: f'const {match[1].replace(" as ", ": ")} = modules["{match[2]}"];',
            code,
            flags=re.MULTILINE,
        )
        code = re.sub(r"^export ", "", code, flags=re.MULTILINE)
        parts.append(
            f'modules["{name}"] = (() => {{\n{code}return {{ {", ".join(exported)} }};\n}})();'
        )
    return "\n".join(parts)


def build() -> str:
    """The page."""
    from wasmtime import wat2wasm  # in .venv-site; tests use the rest of this file without it

    start, trained = (
        flat_weights(path)
        for path in (FOLDER / "tiny_llama/model.safetensors", HERE / "trained.safetensors")
    )
    data = {
        "vocabulary": read_vocabulary(),
        "wasm": text_of(bytes(wat2wasm((HERE / "kernels.wat").read_text()))),
        "start": text_of(start),
        # by 200 steps of the main script
        "change": text_of((trained - start).astype(ml_dtypes.bfloat16)),
        "train": text_of(packed_questions("train")),
        "heldOut": text_of(packed_questions("validation")),
    }
    page = (HERE / "playground.html").read_text()
    for name, text in {
        "style": (HERE / "style.css").read_text(),
        "data": json.dumps(data).replace("<", "\\u003c"),
        "worker": joined(WORKER),
        "script": joined(PAGE),
    }.items():
        page = page.replace(f"/*{name}*/", text)
    return page


if __name__ == "__main__":
    target = FOLDER / "assets/playground.html"
    target.write_text(build())
    sys.stdout.write(f"{target}: {target.stat().st_size / 1e6:.2f} MB\n")
