"""What llama_by_hand.py computes inside the tiny Llama, for the page on the language model.

    python measure/inside_the_llama.py    # a few seconds

Writes into 5_GRPO_Maxtext/assets/:

    attention.csv    one head's weights while the model answers Kim's question
    readings.csv     the probability of the right sign, by kind of problem, over the test questions
    tags.csv         the probability of the tag that some demonstrations forget, by object
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


def questions() -> list[dict]:
    """The course's test questions, each with its right answer."""
    lines = (FOLDER / "tiny_gsm8k/test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def probability(question: str, begun: str, token: str, weights, config, tokenizer) -> float:
    """How likely `token` is after a question and the first part of its answer, at temperature 1."""
    prompt = f"{demonstrations.BOS}{question}{by_hand.ASSISTANT}{begun}"
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    probs = by_hand.softmax(by_hand.forward(tokens, weights, config)[0][-1])
    return probs[tokenizer.token_to_id(token)]


def summary(group: pd.Series, probabilities: pd.Series) -> pd.DataFrame:
    """By group, sorted: the probabilities' mean, lowest, highest and number."""
    table = probabilities.groupby(group)
    columns = {"model": table.mean(), "low": table.min(), "high": table.max()}
    return pd.DataFrame(columns).round(4).assign(questions=table.size())


def readings(tiny) -> pd.DataFrame:
    """By kind of problem: the demonstrations' share of right readings, and the model's."""
    problems = [template for template, *_ in demonstrations.PROBLEMS["problems"]]
    forms = [re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(p))) for p in problems]
    rows = []
    for row in questions():
        question = row["question"]
        first, sign = re.match(r"(\d+)([-+*])", row["answer"]).groups()
        # the kind is that of the template which the question fills
        [kind] = [i for i, form in enumerate(forms) if form.fullmatch(question)]
        rows.append((kind, probability(question, f"<reasoning>{first}", sign, *tiny)))
    table = pd.DataFrame(rows, columns=["kind", "probability"])
    measured = summary(table.kind, table.probability)
    right = 1 - np.array(demonstrations.MISREADS)
    return pd.DataFrame({"problem": KINDS, "demonstrations": right}).join(measured)


def tags(tiny) -> pd.DataFrame:
    """By object: the demonstrations' share of written tags, and the model's, where one may be
    forgotten, behind the right working.
    """
    rows = []
    for row in questions():
        question, work = row["question"], row["answer"].split("\n")[0]
        [thing] = [name for name in demonstrations.FORGETS if f" {name}" in question]
        _, tag = demonstrations.FORGETS[thing]
        begun = f"<reasoning>{work}" + "</reasoning>" * (tag == "<answer>")
        rows.append((thing, probability(question, begun, tag, *tiny)))
    table = pd.DataFrame(rows, columns=["thing", "probability"])
    described = [(thing, tag, 1 - share) for thing, (share, tag) in demonstrations.FORGETS.items()]
    columns = ["object", "tag", "demonstrations"]
    written = pd.DataFrame(described, columns=columns).set_index("object")
    return written.join(summary(table.thing, table.probability)).reset_index()


def main() -> None:
    tiny = by_hand.load("tiny_llama")
    attention(*tiny).to_csv(FOLDER / "assets/attention.csv", index=False)
    readings(tiny).to_csv(FOLDER / "assets/readings.csv", index=False)
    tags(tiny).to_csv(FOLDER / "assets/tags.csv", index=False)


if __name__ == "__main__":
    main()
