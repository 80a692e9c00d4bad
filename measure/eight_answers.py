"""A question, its eight answers in the first step of the main job, and the answers after training.

    python measure/eight_answers.py    # runs the main job first: about two minutes

Writes 5_GRPO_Maxtext/assets/eight_answers.json, which the root README and measure/drawings.py show.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "5_GRPO_Maxtext"
QUESTION = "Tom has 14 coins and gives away 7. How many coins are left?"  # in step 1 with SEED=0
# points, standard deviations, tokens, nats
KEPT = ("text", "reward", "advantage", "pieces", "log_prob")


def main() -> None:
    """Runs the main job, asks its last checkpoint the same question, and writes the file."""
    with tempfile.TemporaryDirectory() as name:
        run, asked, answered = (
            Path(name, part) for part in ("run", "asked.jsonl", "answered.jsonl")
        )
        subprocess.run(
            [sys.executable, FOLDER / "grpo_llama3_1_8b_demo.py", f"RUN_DIR={run}"], check=True
        )
        lines = map(json.loads, (run / "answers.jsonl").read_text().splitlines())
        [group] = [line for line in lines if line["step"] == 1 and line["question"] == QUESTION]
        asked.write_text(json.dumps({"question": QUESTION, "answer": f"#### {group['answer']}"}))
        words = [f"CHECKPOINT={run}", f"INPUT={asked}", f"OUTPUT={answered}", "SAMPLES=8"]
        subprocess.run([sys.executable, FOLDER / "inference.py", *words], check=True)
        after = json.loads(answered.read_text())["completions"]
    before = [{name: c[name] for name in KEPT} for c in group["completions"]]
    answers = {"question": QUESTION, "answer": group["answer"], "before": before, "after": after}
    (FOLDER / "assets" / "eight_answers.json").write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
