"""Makes a tiny Llama that writes <think> tags: runs/tiny_think.

    python 5_GRPO_Maxtext/examples/make_examples.py

It's tiny_llama with the same weights; its tokens <reasoning> and </reasoning> are renamed to
<think> and </think>. The data of the examples is in the folders beside this file:

    word_problems/    prompt, ground_truth, data_source and extra_info
    one_step/         the same columns, data_source math_reasoning: one operation
    two_step/         GSM8K's columns: two operations
    small_numbers/    one operation on the numbers 2 to 12, in English a tiny Llama doesn't know:
                      for a pretrained model; no pair of numbers is in two of its files
    larger_numbers/   tiny_gsm8k's questions, with numbers the tiny Llama has seldom or never seen
    grid/plain/       a start of chapter 1's grid per row, the optimal return (GAMMA=0.99) as
                      ground truth; slippery/ and walls/ are two harder grids
"""

import shutil
from pathlib import Path

TINY_LLAMA = Path(__file__).resolve().parent.parent / "tiny_llama"


def make_think_model(target: Path) -> None:
    """Copies tiny_llama to `target` and renames two tokens of its vocabulary."""
    shutil.copytree(TINY_LLAMA, target, dirs_exist_ok=True)
    tokenizer = target / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8").replace("reasoning>", "think>")
    tokenizer.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make_think_model(Path("runs/tiny_think"))
    print("wrote runs/tiny_think")
