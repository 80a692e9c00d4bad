"""Seconds per GRPO step: this project's script against TRL's GRPOTrainer, in turn, on the same machine.

Both train the shipped tiny Llama for 60 steps of 16 prompts x 8 answers, 28 + 28 tokens, with the same
four reward functions; the first 10 steps (compilation, warm-up) are left out. A ratio is of the two runs of
one round, minutes apart. TRL lives in an environment of its own:

    python3 -m venv /tmp/trl
    /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.12.1 accelerate==1.15.0 datasets==5.2.0
    python benchmarks/grpo_step_against_trl.py PEER=/tmp/trl/bin/python [ROUNDS=5]

Writes benchmarks/grpo_step_against_trl.csv: one row per run, in the order they ran.
"""

import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "5_GRPO_Maxtext" / "grpo_llama3_1_8b_demo.py"
WARM_UP = 10  # steps left out
BETAS = (0.08, 0.0)  # with and without the reference model


def ours(beta: float) -> dict[str, float]:
    """Median seconds per step and the first and last rewards of our script."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["NUM_BATCHES=60", "NUM_TEST_QUESTIONS=16", f"BETA={beta}", f"RUN_DIR={folder}/run"]
        subprocess.run([sys.executable, SCRIPT, *arguments], check=True, capture_output=True)
        with open(f"{folder}/run/train_log.csv", newline="") as file:
            rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    return {
        "seconds": statistics.median(row["seconds"] for row in rows[WARM_UP:]),
        "first_reward": rows[0]["reward"],
        "last_reward": statistics.mean(row["reward"] for row in rows[-5:]),
    }


def trl(peer: str, beta: float) -> dict[str, float]:
    """The same of TRL."""
    command = [peer, HERE / "trl_grpo_steps.py", str(beta), str(os.cpu_count())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    result["seconds"] = statistics.median(result["seconds"])
    return result


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    """Runs both in turn and prints the ratio of each round."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    peer, rounds = options.get("PEER", ""), int(options.get("ROUNDS", "5"))
    if not shutil.which(peer):
        sys.exit(f"error: PEER={peer}: no such Python; see the top of this file")
    rows, ratios = [], {beta: [] for beta in BETAS}
    for number in range(rounds):
        for beta in BETAS:
            results = {"ours": ours(beta), "trl": trl(peer, beta)}
            for name, result in results.items():
                rows.append(
                    {
                        "round": number, "program": name, "beta": beta,
                        "seconds_per_step": round(result["seconds"], 4),
                        "first_reward": round(result["first_reward"], 3),
                        "last_reward": round(result["last_reward"], 3),
                        "versions": result.get("versions", "requirements.txt"),
                        "machine": processor(), "date": time.strftime("%Y-%m-%d"),
                    }
                )  # fmt: skip
            ratios[beta].append(results["ours"]["seconds"] / results["trl"]["seconds"])
            seconds = ", ".join(f"{name} {result['seconds']:.3f} s" for name, result in results.items())
            print(f"round {number}, beta {beta}: {seconds}, ratio {ratios[beta][-1]:.2f}", flush=True)
    with open(HERE / "grpo_step_against_trl.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for beta, found in ratios.items():
        print(f"beta {beta}: ratio {statistics.median(found):.2f} in the median, {max(found):.2f} at worst")


if __name__ == "__main__":
    main()
