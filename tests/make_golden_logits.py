"""Writes tests/golden/: random tiny models and the logits that transformers + torch give for them.

torch is not among this project's requirements (its Linux wheels bring gigabytes of CUDA), so the
numbers to compare with are committed. Needs an environment of its own:

    pip install torch transformers==5.12.1 safetensors numpy
    python tests/make_golden_logits.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TIED, SCALED = dict(tie_word_embeddings=True), dict(head_dim=32, rope_parameters=LLAMA31_ROPE)
QWEN3 = dict(rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})
CONFIGS = {  # heads and key/value heads, and what else differs from the sizes in `main`
    "grouped_kv_heads": (4, 2, {}),
    "tied_embeddings": (2, 2, TIED | dict(head_dim=24)),
    "llama31_rope": (2, 1, SCALED),
    # 1B, 3B
    "llama32_rope": (2, 1, TIED | SCALED | dict(rope_parameters=LLAMA31_ROPE | {"factor": 32.0})),
    "qwen3": (4, 2, QWEN3 | dict(head_dim=24)),  # 8B and larger
    "qwen3_tied": (2, 1, QWEN3 | TIED | dict(head_dim=32)),  # 0.6B, 1.7B, 4B
}


def write_logits(model: torch.nn.Module, name: str, path: Path) -> None:
    """Logits of two random rows of 24 tokens."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(5, model.config.vocab_size, (2, 24)).astype(np.int32)
    # consecutive; with rope scaling they spread to 12,000, beyond the original 8,192
    positions = (np.linspace(0, 12_000, 24) if "rope" in name else np.arange(24)).astype(np.int32)
    positions = np.broadcast_to(positions, tokens.shape)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(tokens, dtype=torch.long),
            position_ids=torch.tensor(positions.copy(), dtype=torch.long),
        ).logits
    np.savez_compressed(path, tokens=tokens, positions=positions, logits=logits.numpy())


def main() -> None:
    """One folder for each config, and the logits of the shipped tiny_llama."""
    for name, (heads, kv_heads, sizes) in CONFIGS.items():
        torch.manual_seed(0)
        sizes |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
        config = (Qwen3Config if "qwen3" in name else LlamaConfig)(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            initializer_range=0.3,
            **sizes,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():  # norm scales start at 1 and would hide a missing one
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if model.config.tie_word_embeddings:
            # MaxText rounds tied embeddings to bfloat16 in the output layer; so they are stored,
            # usually.
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16().float()
        model.save_pretrained(GOLDEN / name)
        (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
        write_logits(model, name, GOLDEN / name / "logits.npz")
    tiny = LlamaForCausalLM.from_pretrained(HERE.parent / "5_GRPO_Maxtext" / "tiny_llama").eval()
    write_logits(tiny, "tiny_llama", GOLDEN / "tiny_llama.npz")


if __name__ == "__main__":
    main()
