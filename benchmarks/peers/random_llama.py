"""A Llama with random weights whose answers never end; run by grpo_step_scaling.py in TRL's
environment.

    python benchmarks/peers/random_llama.py FOLDER=path [hidden_size=96 ...]  # config.json's fields

The first number of each token's embedding is 1, and the output row of the two tokens that must not
be drawn (end and padding) is far below zero there. All answers are as long as they may be, so two
programs that draw other tokens still compute equally many.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

TINY_LLAMA = Path(__file__).resolve().parents[2] / "5_GRPO_Maxtext" / "tiny_llama"

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder = given.pop("FOLDER")
torch.manual_seed(0)
tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LLAMA)
config = transformers.LlamaConfig.from_pretrained(TINY_LLAMA)
for name, value in given.items():
    setattr(config, name, json.loads(value))
model = transformers.LlamaForCausalLM(config)
with torch.no_grad():
    model.model.embed_tokens.weight[:, 0] = 1.0
    model.lm_head.weight[[tokenizer.eos_token_id, tokenizer.pad_token_id], 0] = -30.0
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(sum(p.numel() for p in model.parameters()))
