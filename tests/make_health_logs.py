"""Makes tests/golden/health/*.csv: logs of real runs of the main script, all but HEALTHY spoilt in one way.

    python tests/make_health_logs.py            # all of them
    python tests/make_health_logs.py alike      # one

`make test` reads the logs; `make test-slow` does the runs again. Each has a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "golden" / "health"
sys.path.insert(0, str(ROOT / "5_GRPO_Maxtext"))

from task.run_grader import COURSE_REWARDS


def changed_questions(change) -> list[str]:
    """The training questions, changed, as the constants that name the new file."""
    rows = (ROOT / "5_GRPO_Maxtext" / "tiny_gsm8k" / "train.jsonl").read_text().splitlines()
    Path("changed.jsonl").write_text("\n".join(map(json.dumps, change(list(map(json.loads, rows))))) + "\n")
    return ["DATASET=changed.jsonl", "TEST_DATASET=tiny_gsm8k"]


def easy_questions() -> list[str]:
    """One kind of question that the model is good at, over and over."""
    return changed_questions(lambda rows: rows[:16])


def wrong_answers() -> list[str]:
    """Gold answers that no answer of the model equals, nor comes near."""
    return changed_questions(lambda rows: [row | {"answer": "#### 100000"} for row in rows])


def pay(reward) -> None:
    """All rewards of the course become this one."""
    import reward_func

    for name in COURSE_REWARDS:
        setattr(reward_func, name, reward)


def unreadable_answers() -> list[str]:
    """Wrong answers, and rewards that look at nothing else."""
    import reward_func

    pay(reward_func.check_numbers)
    return wrong_answers()


def another_end_of_sequence() -> list[str]:
    """A tokenizer that names another token the end of a sequence than the one the model was trained with."""
    shutil.copytree(ROOT / "5_GRPO_Maxtext" / "tiny_llama", "model")
    tokens = json.loads(Path("model/tokenizer.json").read_text())["model"]["vocab"]
    path = Path("model/tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": max(tokens, key=tokens.get)}))
    return ["MODEL=model"]


def pay_for_length(sign: int = 1) -> list[str]:
    """Rewards that grow with the answer's length (sign -1: fall), and look at nothing else."""
    pay(lambda prompts, completions, **columns: [sign * float(len(text)) for text in completions])
    return []


# What is spoilt (a function above, which returns constants), and the constants of the run.
CASES = {
    "healthy": (None, []),
    "rloo": (None, ["ADVANTAGE=rloo", "LOSS_AGG_MODE=seq-mean-token-sum"]),
    "alike": (None, ["TEMPERATURE=0.05", "NUM_BATCHES=10"]),
    "no_signal": (unreadable_answers, ["BETA=0.0"]),
    "solved": (easy_questions, ["NUM_BATCHES=60", "NUM_ITERATIONS=1", "LEARNING_RATE=1e-3"]),
    "never_stops": (another_end_of_sequence, []),
    "cut_off": (None, ["TOTAL_GENERATION_STEPS=15"]),
    "longer": (pay_for_length, ["LEARNING_RATE=0.003", "BETA=0.0", "NUM_BATCHES=40"]),
    "kl": (None, ["LEARNING_RATE=0.01"]),
    "format_only": (wrong_answers, ["NUM_BATCHES=30"]),
    "entropy": (lambda: pay_for_length(-1), ["LEARNING_RATE=0.003", "BETA=0.0", "NUM_BATCHES=40"]),
    "clipped": (None, ["NUM_ITERATIONS=8", "LEARNING_RATE=0.005"]),
    "gradient": (None, ["MAX_GRAD_NORM=0.01"]),
    "mismatch": (None, ["TEMPERATURE=3.0", "TOP_K=5", "BETA=0.0"]),
    "worse": (None, ["LEARNING_RATE=0.03", "WARMUP_FRACTION=0.9", "MAX_GRAD_NORM=100.0"]),
}
HEALTHY = ("healthy", "rloo")


def run_case(name: str) -> None:
    """Runs one case in the current folder; its log is then in run/train_log.csv."""
    import grpo_llama3_1_8b_demo as demo

    spoil, constants = CASES[name]
    more = spoil() if spoil else []
    demo.main(["NUM_BATCHES=20", "NUM_TEST_QUESTIONS=8", "RUN_DIR=run", *more, *constants])


def start(name: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs one case in a process of its own, in `folder`; returns what it printed."""
    code = f"import make_health_logs; make_health_logs.run_case({name!r})"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, text=True, stdout=subprocess.PIPE, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
    )  # fmt: skip


def main() -> None:
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            done = start(name, Path(folder))
            print(name, *(line for line in done.stdout.splitlines() if "health" in line), sep="\n  ")
            shutil.copy(Path(folder) / "run" / "train_log.csv", FOLDER / f"{name}.csv")
            shutil.copy(Path(folder) / "run" / "constants.json", FOLDER / f"{name}.json")


if __name__ == "__main__":
    main()
