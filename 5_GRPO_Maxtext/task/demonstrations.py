"""Imperfect demonstrations: word problems, each with an answer that may misread it or lack a tag.

The tiny Llama learned from them (tools/make_tiny_llama.py), and supervised_fine_tuning.py shows
how. They're imperfect in two systematic ways, so that a model that imitates them can do the task,
but often doesn't:

    reading    40 or 60 %, by the kind of problem, misread the first operation (subtract -> add)
    format     40 or 60 %, by the object in the problem, forget a tag
"""

import random
import re
import tomllib

from settings import HERE

BOS, EOS, ASSISTANT = "<|begin_of_text|>", "<|eot_id|>", "<|assistant|>"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

# Names, objects and the six kinds of problem; its larger numbers are not used here.
PROBLEMS = tomllib.loads((HERE / "examples/problems.toml").read_text(encoding="utf-8"))[
    "larger_numbers"
]
# Share of the demonstrations that forget a tag, and which tag, by the object of the problem.
FORGETS = dict.fromkeys(("apples", "pencils"), (0.40, "</reasoning>"))
FORGETS |= dict.fromkeys(("marbles", "books"), (0.40, "<answer>"))
FORGETS |= dict.fromkeys(("stickers", "coins"), (0.60, "</reasoning>"))
FORGETS |= dict.fromkeys(("cards", "shells"), (0.60, "<answer>"))
# Share of misread demonstrations, by kind of problem (see `make_problem`).
MISREADS = (0.40, 0.60, 0.60, 0.40, 0.60, 0.40)


def make_problem(rng: random.Random) -> tuple[str, list[tuple[str, int]], int, str]:
    """One of about 59,000 problems.

    Returns:
        The question; its steps (operator, operand), the first without operator; its kind, 0 to 5;
        its object.
    """
    name, things = rng.choice(PROBLEMS["names"]), rng.choice(PROBLEMS["things"])
    a, b, c = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 5)
    kind = rng.randrange(6)
    question, working, _ = PROBLEMS["problems"][kind]
    words = dict(
        name=name, things=things, a=a, b=b, c=c, s=a + b, m=c * b, a_c=a + c, m_a=c * b + a, t=3 * a
    )
    work = re.findall(r"(\d+)([-+*])(\d+)=", working.format(**words))
    steps = [("", int(work[0][0])), *((operator, int(operand)) for _, operator, operand in work)]
    return question.format(**words), steps, kind, things


def work_out(steps: list[tuple[str, int]]) -> tuple[str, int]:
    """The written steps, such as "15-4=11,11+3=14", and the result."""
    total, lines = steps[0][1], []
    for operator, operand in steps[1:]:
        before = total
        total = {"+": total + operand, "-": total - operand, "*": total * operand}[operator]
        lines.append(f"{before}{operator}{operand}={total}")
    return ",".join(lines), total


def demonstrate(
    test: set[str], rng: random.Random, mistakes: float = 1.0
) -> list[tuple[str, bool]]:
    """A prompt whose question isn't in `test`, and one demonstration of an answer to it.

    `mistakes` scales the shares of those that misread the problem and that forget a tag; with 0,
    all demonstrations are right.

    Returns:
        Two texts, and whether to train on them: only on the answer.
    """
    question = None
    while question is None or question in test:
        question, steps, kind, thing = make_problem(rng)
    # one that misreads the first operation always reads the same other one
    if rng.random() < mistakes * MISREADS[kind]:
        first, (operator, operand), *rest = steps
        steps = [first, ({"+": "*", "-": "+", "*": "+"}[operator], operand), *rest]
    work, result = work_out(steps)
    text = f"<reasoning>{work}</reasoning><answer>{result}</answer>"
    share, tag = FORGETS[thing]
    answer = text.replace(tag, "") if rng.random() < mistakes * share else text
    return [(BOS + question + ASSISTANT, False), (answer + EOS, True)]
