"""Makes the data of the examples, three of them from tiny_gsm8k, and a tiny Llama that writes <think> tags.

    python 5_GRPO_Maxtext/examples/make_examples.py

    examples/word_problems/    prompt, ground_truth, data_source and extra_info
    examples/one_step/         the same columns, data_source math_reasoning: one operation
    examples/two_step/         GSM8K's columns: two operations
    examples/small_numbers/    one operation on the numbers 2 to 12, in English a tiny Llama doesn't know: for
                               a pretrained model; no pair of numbers is in two of its files
    examples/larger_numbers/   tiny_gsm8k's questions, with numbers the tiny Llama has seldom or never seen
    examples/grid/plain/       a start of chapter 1's grid per row, the optimal return (GAMMA=0.99) as ground
                               truth; slippery/ and walls/ are two harder grids
    runs/tiny_think/           tiny_llama with the same weights; its tokens <reasoning> and </reasoning> are
                               renamed to <think> and </think>

Each data folder has train, validation and test; for the grid they're the same starts. Takes about a second.
The data is committed; the model is a copy and isn't.
"""

import itertools
import json
import random
import shutil
import tomllib
from pathlib import Path

from grid import grid_world

# %% Constants ------------------------------------------------------------------------------------------
ROWS = {"train": 600, "validation": 40, "test": 128}  # rows per file, from the top of tiny_gsm8k's files

EXAMPLES = Path(__file__).resolve().parent
FOLDER_5 = EXAMPLES.parent
PROBLEMS = tomllib.loads((EXAMPLES / "problems.toml").read_text(encoding="utf-8"))


# %% Data -----------------------------------------------------------------------------------------------
def to_prompt_columns(row: dict[str, str], data_source: str = "") -> dict[str, str | dict[str, str]]:
    """A row with GSM8K's columns as a row with `prompt` and `ground_truth`."""
    working, _, gold = row["answer"].partition("\n#### ")
    task = "two_step" if "," in working else "one_step"
    told = {"prompt": row["question"], "ground_truth": gold, "data_source": data_source or task}
    return told | {"extra_info": {"working": working}}


def make_data() -> dict[str, str]:
    """The text of each file, by its path below examples/."""
    files = {}
    for split, count in ROWS.items():
        text = (FOLDER_5 / "tiny_gsm8k" / f"{split}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        problems = [to_prompt_columns(row) for row in rows[: 2 * count]]
        one_step = [row for row in rows if "," not in row["answer"]][:count]
        one_step = [to_prompt_columns(row, "math_reasoning") for row in one_step]
        two_step = [row for row in rows if "," in row["answer"]][:count]
        files |= {
            f"word_problems/{split}.json": "[\n" + json_lines(problems).replace("}\n{", "},\n{") + "]\n",
            f"one_step/{split}.jsonl": json_lines(one_step),
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


def small_numbers() -> dict[str, list[dict]]:
    """Rows of examples/small_numbers by split. No two splits share a pair of numbers."""
    made = PROBLEMS["small_numbers"]
    rng = random.Random(made["seed"])
    # (3, 5) and (5, 3) stay together: their sum and their product are the same fact
    pairs = list(itertools.combinations_with_replacement(range(2, 13), 2))
    rng.shuffle(pairs)
    splits, start = {}, 0
    for split, count in made["rows"].items():
        stop = start + round(made["shares"][split] * len(pairs))
        rows = []
        for i in range(count):
            question, working = made["problems"][i % len(made["problems"])]
            a, b = rng.sample(rng.choice(pairs[start:stop]), 2)
            name, other = rng.sample(made["names"], 2)
            things = rng.choice(made["things"])
            words = dict(name=name, other=other, things=things, a=a, b=b, c=a + b, d=a * b)
            working = working.format(**words)
            answer = f"{working}\n#### {working.partition('=')[2]}"
            row = {"question": question.format(**words), "answer": answer}
            rows.append(to_prompt_columns(row, "math_reasoning"))
        splits[split], start = rows, stop
    return splits


def larger_numbers() -> dict[str, list[dict]]:
    """Rows of examples/larger_numbers by split, in GSM8K's columns, without duplicate questions."""
    made = PROBLEMS["larger_numbers"]
    rng, rows = random.Random(made["seed"]), {}
    while len(rows) < sum(made["rows"].values()):
        words = {"name": rng.choice(made["names"]), "things": rng.choice(made["things"])}
        a, b, c = (rng.randint(*made["numbers"][letter]) for letter in "abc")
        words |= {"a": a, "b": b, "c": c, "s": a + b, "m": c * b, "a_c": a + c, "m_a": c * b + a, "t": 3 * a}
        question, working, answer = rng.choice(made["problems"])
        text = question.format(**words)
        rows[text] = {"question": text, "answer": f"{working.format(**words)}\n#### {words[answer]}"}
    drawn = iter(rows.values())
    return {split: list(itertools.islice(drawn, size)) for split, size in made["rows"].items()}


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
    main()
