"""The front page's question, asked again and again while the main job learns.

    python measure/answers_while_training.py    # runs the main job first: about five minutes

Writes 5_GRPO_Maxtext/assets/answers_while_training.json, of which measure/films.py makes a film.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
STEPS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 30, 50, 70, 100)  # of the main job


def main() -> None:
    """Trains as `make demo` does, and asks its checkpoints the question eight times each.

    Under 0 are the answers of the first training step, from before its update.
    """
    transcript = json.loads((FOLDER / "assets" / "eight_answers.json").read_text())
    question, answer = transcript["question"], transcript["answer"]
    answers = {0: [each["text"] for each in transcript["before"]]}
    with tempfile.TemporaryDirectory() as name:
        run, asked, answered = (Path(name, part) for part in ("run", "in.jsonl", "out.jsonl"))
        asked.write_text(json.dumps({"question": question, "answer": f"#### {answer}"}))
        words = [f"RUN_DIR={run}", "SAVE_INTERVAL_STEPS=2", "MAX_TO_KEEP=50"]
        subprocess.run([sys.executable, FOLDER / "grpo_llama3_1_8b_demo.py", *words], check=True)
        for step in STEPS:
            words = [f"CHECKPOINT={run / str(step)}", f"INPUT={asked}", f"OUTPUT={answered}"]
            words += ["SAMPLES=8"]
            subprocess.run([sys.executable, FOLDER / "inference.py", *words], check=True)
            answers[step] = json.loads(answered.read_text())["completions"]
            answered.unlink()
    asked_of = {"question": question, "answer": answer, "answers": answers}
    path = FOLDER / "assets" / "answers_while_training.json"
    path.write_text(json.dumps(asked_of, indent=1) + "\n")


if __name__ == "__main__":
    main()
