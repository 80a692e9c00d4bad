"""What llama_by_hand.py computes inside the tiny Llama, for the page on the language model.

    python measure/inside_the_llama.py    # a few seconds

Writes into 5_GRPO_Maxtext/assets/:

    attention.csv    one head's weights while the model answers Kim's question
    readings.csv     the probability of the right sign, by kind of problem, over the test questions
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "5_GRPO_Maxtext"
sys.path.insert(0, str(FOLDER))  # before this folder, whose run.py isn't the one meant

import llama_by_hand as by_hand
from task import demonstrations

# What tells the kinds of problem apart, in the order of demonstrations.PROBLEMS.
KINDS = (
    "buys … more",
    "gives away …",
    "boxes with … each",
    "loses …, then buys",
    "bags with …, then finds",
    "twice as many",
)
LAYER, HEAD = 2, 1  # the last layer's second head: what it looks up is what's written next


def attention(weights, config, tokenizer) -> pd.DataFrame:
    """A row per token of the question and of the answer so far: how much the answer reads from it.

    The answer is the model's own, greedy, up to the end of its working.
    """
    prompt = f"{demonstrations.BOS}{by_hand.Constants.QUESTION}{by_hand.ASSISTANT}"
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    start, stop = len(tokens), tokenizer.token_to_id("</reasoning>")
    while tokens[-1] != stop:
        logits, looks = by_hand.forward(tokens, weights, config)
        tokens.append(int(logits[-1].argmax()))
    pieces = [tokenizer.id_to_token(token) for token in tokens[:-1]]
    # the row of token t is what the model read when it wrote token t + 1
    return pd.DataFrame(
        {
            "reading": at,
            "after": pieces[at],
            "writes": tokenizer.id_to_token(tokens[at + 1]),
            "position": position,
            "token": pieces[position],
            "weight": f"{looks[LAYER, HEAD, at, position]:.4f}",
        }
        for at in range(start, len(pieces))
        for position in range(at + 1)
    )


def readings(weights, config, tokenizer) -> pd.DataFrame:
    """By kind of problem: the demonstrations' share of right readings, and the model's."""
    problems = [template for template, *_ in demonstrations.PROBLEMS["problems"]]
    forms = [re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(p))) for p in problems]
    rows = []
    questions = (FOLDER / "tiny_gsm8k/test.jsonl").read_text().splitlines()
    for question in map(json.loads, questions):
        first, sign = re.match(r"(\d+)([-+*])", question["answer"]).groups()
        prompt = f"{demonstrations.BOS}{question['question']}{by_hand.ASSISTANT}<reasoning>{first}"
        tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
        probs = by_hand.softmax(by_hand.forward(tokens, weights, config)[0][-1])
        # the kind is that of the template which the question fills
        [kind] = [i for i, form in enumerate(forms) if form.fullmatch(question["question"])]
        rows.append((kind, probs[tokenizer.token_to_id(sign)]))
    table = pd.DataFrame(rows, columns=["kind", "probability"]).groupby("kind").probability
    return pd.DataFrame(
        {
            "problem": KINDS,
            "demonstrations": 1 - np.array(demonstrations.MISREADS),
            "model": table.mean().round(4),
            "low": table.min().round(4),
            "high": table.max().round(4),
            "questions": table.size(),
        }
    )


def main() -> None:
    tiny = by_hand.load("tiny_llama")
    attention(*tiny).to_csv(FOLDER / "assets/attention.csv", index=False)
    readings(*tiny).to_csv(FOLDER / "assets/readings.csv", index=False)


if __name__ == "__main__":
    main()
