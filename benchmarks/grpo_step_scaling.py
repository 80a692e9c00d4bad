"""How a GRPO step grows, ours and TRL's side by side: with the model, the answers and the
questions.

One thing is varied at a time around a middle: 10 M parameters, 4 questions x 8 answers of 128
tokens. The models are Llamas with random weights whose answers never end (peers/random_llama.py),
in float32. Both programs compute the whole batch in one pass. TRL lives in an environment of its
own, see grpo_step_against_trl.py.

    python benchmarks/grpo_step_scaling.py PEER=/tmp/trl/bin/python [ROUNDS=1] [CONSTANT=value ...]

CONSTANT: of our script only. Writes benchmarks/grpo_step_scaling.csv, a row per run, at once: what
is there is not run again.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from grpo_step_against_trl import HERE, ours, peer_of, trl
from machine import processor, write_csv

TABLE = HERE / "grpo_step_scaling.csv"
WARM_UP = 2  # steps left out
ANSWERS = 8  # per question
PROMPT_TOKENS = 28
NO_LEARNING = 1e-12  # the answers stay as long as they are
SIZES = {  # width, layers, query heads, key heads, width of the MLP, vocabulary
    "0.3 M": (96, 3, 4, 2, 256, 76),
    "2 M": (192, 5, 6, 3, 512, 76),
    "10 M": (384, 6, 6, 3, 1024, 76),
    "30 M": (576, 8, 9, 3, 1536, 76),
    "135 M": (576, 30, 9, 3, 1536, 49_152),  # of SmolLM2-135M
}


class Point(NamedTuple):
    """What one run of each program is made with."""

    model: str = "10 M"
    tokens: int = 128
    questions: int = 4


POINTS = dict.fromkeys(
    (  # each once
        *(Point(model=model) for model in SIZES),
        *(Point(tokens=tokens) for tokens in (28, 128, 512)),
        *(Point(questions=questions) for questions in (2, 4, 8, 16, 32)),
    )
)


def steps_of(point: Point, parameters: int) -> int:
    """Fewer of the long ones: 2 to 30, for about 5 TFLOP of gradients, and the warm-up."""
    tokens = point.questions * ANSWERS * (PROMPT_TOKENS + point.tokens)
    return WARM_UP + round(min(30, max(2, 5e12 / (8 * parameters * tokens))))


def make_model(peer: str, size: str, folder: Path) -> int:
    """Writes the model of that size; its number of parameters."""
    hidden, layers, heads, kv_heads, mlp, vocabulary = SIZES[size]
    fields = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": "true" if size == "135 M" else "false",
    }
    script = HERE / "peers" / "random_llama.py"
    command = [peer, script, f"FOLDER={folder}", *(f"{k}={v}" for k, v in fields.items())]
    return int(subprocess.check_output(command, text=True).split()[-1])


def measure(peer: str, rounds: int, changes: dict[str, str]) -> None:
    """Every point in every round that the table lacks, the two programs in turn."""
    rows = pd.read_csv(TABLE).to_dict("records") if TABLE.exists() else []
    there = {(row["round"], row["model"], row["tokens"], row["questions"]) for row in rows}
    for number, point in itertools.product(range(rounds), POINTS):
        if (number, *point) in there:
            continue
        answer_tokens = point.questions * ANSWERS * point.tokens
        with tempfile.TemporaryDirectory() as folder:
            parameters = make_model(peer, point.model, Path(folder))
            constants = {
                "MODEL": folder,
                "NUM_BATCHES": steps_of(point, parameters),
                "BATCH_SIZE": point.questions,
                "NUM_GENERATIONS": ANSWERS,
                "TOTAL_GENERATION_STEPS": point.tokens,
                "NUM_ITERATIONS": 1,
                "BETA": 0.08,
                "LEARNING_RATE": NO_LEARNING,
            }
            quick = {"NUM_TEST_QUESTIONS": 1, "LOG_ANSWERS_EVERY": 0}
            mine = ours(constants | quick | changes, WARM_UP)
            results = {"ours": mine, "trl": trl(peer, constants, WARM_UP)}
        for name, result in results.items():
            rows.append(
                {
                    "round": number,
                    **point._asdict(),
                    "program": name,
                    "seeds": 1,
                    "parameters": parameters,
                    "steps": constants["NUM_BATCHES"] - WARM_UP,
                    "seconds_per_step": result["seconds_per_step"],
                    "answer_tokens_per_second": round(answer_tokens / result["seconds_per_step"]),
                    "peak_gib": result["peak_gib"],
                    "versions": result["versions"],
                    "machine": processor(),
                    "date": time.strftime("%Y-%m-%d"),
                }
            )
            print(*rows[-1].values(), sep=", ", flush=True)
        write_csv(TABLE, rows)


def main() -> None:
    """Measures what is missing, prints the table."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    peer_of(options)
    measure(options.pop("PEER"), int(options.pop("ROUNDS", "1")), options)
    runs = pd.read_csv(TABLE).groupby(["model", "tokens", "questions", "program"], sort=False)
    print(runs[["seconds_per_step", "peak_gib"]].median().unstack().to_string())


if __name__ == "__main__":
    main()
