"""Makes the data of the examples, three of them from tiny_gsm8k, and a tiny Llama that writes <think> tags.

    python 5_GRPO_Maxtext/examples/make_examples.py

    examples/word_problems/    prompt, ground_truth, data_source and extra_info
    examples/one_step/         the same columns, data_source math_reasoning: one operation
    examples/two_step/         GSM8K's columns: two operations
    examples/small_numbers/    one operation on the numbers 2 to 12, in English that no tiny Llama knows: for
                               a pretrained model; no pair of numbers is in two of its files
    examples/larger_numbers/   tiny_gsm8k's questions, with numbers that the tiny Llama seldom or never saw
    examples/grid/plain/       a start of chapter 1's grid per row, the optimal return (GAMMA=0.99) as ground
                               truth; slippery/ and walls/ are two harder worlds
    runs/tiny_think/           tiny_llama with the same weights; its tokens <reasoning> and </reasoning> are
                               renamed to <think> and </think>

Each folder of data holds train, validation and test, as .json or .jsonl; the grid's are the same starts.

The data are committed; the model, a copy, is not. Takes about one second.
"""

import itertools
import json
import random
import shutil
import sys
from pathlib import Path

from grid import grid_world

# %% Constants ------------------------------------------------------------------------------------------
ROWS = {"train": 600, "validation": 40, "test": 128}  # rows per file, from the top of tiny_gsm8k's files
SMALL_NUMBERS = {"train": 600, "validation": 64, "test": 256}  # rows per file
SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}  # of the pairs of numbers
SEED = 0  # of small_numbers

EXAMPLES = Path(__file__).resolve().parent
FOLDER_5 = EXAMPLES.parent


# %% Data -----------------------------------------------------------------------------------------------
def to_prompt_columns(row: dict[str, str], data_source: str = "") -> dict[str, str | dict[str, str]]:
    """A row with GSM8K's columns as a row with `prompt` and `ground_truth`."""
    working, _, gold = row["answer"].partition("\n#### ")
    task = "two_step" if "," in working else "one_step"
    return {
        "prompt": row["question"], "ground_truth": gold, "data_source": data_source or task,
        "extra_info": {"working": working},
    }  # fmt: skip


def make_data() -> dict[str, str]:
    """The text of each file, by its path below examples/."""
    files = {}
    for split, count in ROWS.items():
        lines = (FOLDER_5 / "tiny_gsm8k" / f"{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        problems = [to_prompt_columns(row) for row in rows[: 2 * count]]
        one_step = [row for row in rows if "," not in row["answer"]][:count]
        two_step = [row for row in rows if "," in row["answer"]][:count]
        files |= {
            f"word_problems/{split}.json": "[\n" + json_lines(problems).replace("}\n{", "},\n{") + "]\n",
            f"one_step/{split}.jsonl": json_lines(
                [to_prompt_columns(row, "math_reasoning") for row in one_step]
            ),
            f"two_step/{split}.jsonl": json_lines(two_step),
        }
    for world in ("plain", "slippery", "walls"):
        name = world.removeprefix("plain")
        q_star = grid_world.q_star(name, gamma=0.99)
        rows = [
            {"prompt": f"{name} {grid_world.in_words(start)}".strip(), "data_source": "grid",
             "ground_truth": f"{max(q_star[start, move] for move in grid_world.MOVES):.2f}"}
            for start in grid_world.starts(name)
        ]  # fmt: skip
        files |= {f"grid/{world}/{split}.jsonl": json_lines(rows) for split in ROWS}
    for name, splits in {"small_numbers": small_numbers(), "larger_numbers": larger_numbers()}.items():
        files |= {f"{name}/{split}.jsonl": json_lines(rows) for split, rows in splits.items()}
    return files


SMALL = range(2, 13)
NAMES = ("Tom", "Lily", "Sara", "Max", "Anna", "Kim", "Ben", "Mia")
THINGS = ("apples", "cards", "books", "coins", "shells", "pencils", "marbles", "eggs")
PROBLEMS = (  # question, working; c = a + b
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "{a}+{b}={c}"),
    ("{name} has {a} {things} and {other} has {b} {things}. How many do they have together?", "{a}+{b}={c}"),
    ("{name} has {c} {things} and gives away {b}. How many {things} are left?", "{c}-{b}={a}"),
    (
        "{name} has {a} boxes with {b} {things} in each box. How many {things} does {name} have?",
        "{a}*{b}={d}",
    ),
    ("{name} buys {a} {things} for {b} dollars each. How many dollars does {name} pay?", "{a}*{b}={d}"),
)


def small_numbers() -> dict[str, list[dict]]:
    """Rows of examples/small_numbers by split. A split's numbers are in no other, whatever the problem."""
    rng = random.Random(SEED)
    # (3, 5) and (5, 3) stay together: their sum and their product are the same fact
    pairs = list(itertools.combinations_with_replacement(SMALL, 2))
    rng.shuffle(pairs)
    splits, start = {}, 0
    for split, count in SMALL_NUMBERS.items():
        stop = start + round(SHARES[split] * len(pairs))
        rows = []
        for i in range(count):
            question, working = PROBLEMS[i % len(PROBLEMS)]
            a, b = rng.sample(rng.choice(pairs[start:stop]), 2)
            name, other = rng.sample(NAMES, 2)
            words = dict(name=name, other=other, things=rng.choice(THINGS), a=a, b=b, c=a + b, d=a * b)
            working = working.format(**words)
            rows.append(
                {
                    "prompt": question.format(**words), "ground_truth": working.partition("=")[2],
                    "data_source": "math_reasoning", "extra_info": {"working": working},
                }
            )  # fmt: skip
        splits[split], start = rows, stop
    return splits


# tiny_llama's demonstrations have a up to 12, b up to 9, c up to 5.
LARGER = {"a": (2, 15), "b": (2, 10), "c": (2, 7)}
LARGER_NUMBERS = {"test": 256, "train": 800, "validation": 256}  # rows per file, in the order drawn
LARGER_SEED = 7
LARGER_NAMES = ("Tom", "Anna", "Sara", "Ben", "Lily", "Max", "Kim", "Leo")
LARGER_THINGS = ("apples", "pencils", "marbles", "books", "stickers", "coins", "cards", "shells")
LARGER_PROBLEMS = (  # tiny_gsm8k's six kinds; s = a + b, m = c * b
    (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "{a}+{b}={s}",
        "s",
    ),
    ("{name} has {s} {things} and gives away {b}. How many {things} are left?", "{s}-{b}={a}", "a"),
    (
        "{name} has {c} boxes with {b} {things} in each box. How many {things} does {name} have?",
        "{c}*{b}={m}",
        "m",
    ),
    (
        "{name} has {s} {things}, loses {b} and then buys {c} more. How many {things} are there now?",
        "{s}-{b}={a},{a}+{c}={a_c}",
        "a_c",
    ),
    (
        "{name} buys {c} bags with {b} {things} each and finds {a} more. How many {things} are there?",
        "{c}*{b}={m},{m}+{a}={m_a}",
        "m_a",
    ),
    (
        "{name} finds {a} {things} and then twice as many. How many {things} does {name} have?",
        "{a}*3={t}",
        "t",
    ),
)


def larger_numbers() -> dict[str, list[dict]]:
    """Rows of examples/larger_numbers by split, in GSM8K's columns; all questions are different."""
    rng, rows = random.Random(LARGER_SEED), {}
    while len(rows) < sum(LARGER_NUMBERS.values()):
        words = {"name": rng.choice(LARGER_NAMES), "things": rng.choice(LARGER_THINGS)}
        a, b, c = (rng.randint(*LARGER[letter]) for letter in "abc")
        words |= {"a": a, "b": b, "c": c, "s": a + b, "m": c * b, "a_c": a + c, "m_a": c * b + a, "t": 3 * a}
        question, working, answer = rng.choice(LARGER_PROBLEMS)
        text = question.format(**words)
        rows[text] = {"question": text, "answer": f"{working.format(**words)}\n#### {words[answer]}"}
    drawn = iter(rows.values())
    return {split: list(itertools.islice(drawn, size)) for split, size in LARGER_NUMBERS.items()}


def json_lines(rows: list[dict]) -> str:
    """The rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


# %% Model ----------------------------------------------------------------------------------------------
def make_think_model(target: Path) -> None:
    """Copies tiny_llama to `target` and renames two tokens of its vocabulary."""
    shutil.copytree(FOLDER_5 / "tiny_llama", target, dirs_exist_ok=True)
    tokenizer = target / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("reasoning>", "think>"))


def main() -> None:
    """Writes the files above."""
    for name, text in make_data().items():
        path = EXAMPLES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")
    make_think_model(Path("runs/tiny_think"))
    print("wrote runs/tiny_think")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"error: {error}; run it where the files can be written", file=sys.stderr)
        sys.exit(2)
