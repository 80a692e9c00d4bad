"""Seconds per GRPO step: this project's script against TRL's GRPOTrainer, in turn, on the same
machine.

Both train the shipped tiny Llama for 60 steps of 16 prompts x 8 answers, 28 + 28 tokens, with the
same four reward functions; the first 10 steps (compilation, warm-up) are left out. A ratio is of
the two runs of one round, minutes apart. TRL lives in an environment of its own:

    python3 -m venv /tmp/trl
    /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.12.1 \
        accelerate==1.15.0 datasets==5.2.0 peft==0.21.2
    python benchmarks/grpo_step_against_trl.py PEER=/tmp/trl/bin/python [ROUNDS=5]

(smollm2_step_against_trl.py needs peft.) Writes benchmarks/grpo_step_against_trl.csv: one row per
run, in the order they ran.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from machine import commit, processor, versions, write_csv

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "5_GRPO_Maxtext"
STEPS, WARM_UP = 60, 10  # the first steps are left out
BETAS = (0.08, 0.0)  # with and without the reference model


def ours(constants: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """Our script with these constants; see `watched`."""
    made_from = f"commit {commit()}"
    quiet = {"NUM_TEST_QUESTIONS": 16, "EVAL_EVERY": 0, "SAVE_INTERVAL_STEPS": 1000}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "run", "train_log.csv")
        given = quiet | constants | {"RUN_DIR": f"{folder}/run"}
        found, _ = watched(
            [sys.executable, FOLDER / "grpo_llama3_1_8b_demo.py"], given, log, warm_up
        )
    return found | {"versions": f"{made_from}, {versions('jax', 'maxtext', 'google-tunix')}"}


def trl(
    peer: str, constants: dict[str, Any], warm_up: int, script: str = "trl_grpo_steps.py"
) -> dict[str, Any]:
    """TRL with the same constants: `script` of peers/, run by the Python `peer`; see `watched`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        found, output = watched(
            [peer, HERE / "peers" / script], constants | {"LOG": log}, log, warm_up
        )
    return found | {"versions": output.splitlines()[-1]}


def watched(
    command: list, given: dict[str, Any], log: Path, warm_up: int
) -> tuple[dict[str, float], str]:
    """Runs a training with these constants; looks at its memory 20 times a second in the steps that
    count.

    `log` is a CSV with a row per step, written at once; the first `warm_up` rows don't count.
    Returns the median seconds of a step, the highest resident memory, the mean reward of the first
    step and of the last five, and how many tokens an answer has in the mean; and what was printed.
    Raises RuntimeError with the end of what it said if it failed.
    """
    peak, command = 0, [*command, *(f"{name}={value}" for name, value in given.items())]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = psutil.Popen(command, stdout=output, stderr=errors)
        while child.poll() is None:
            done = log.read_text().count("\n") - 1 if log.exists() else 0
            if warm_up <= done < given["NUM_BATCHES"]:
                peak = max(peak, child.memory_info().rss)
            time.sleep(0.05)
        output.seek(0), errors.seek(0)
        if child.returncode:
            raise RuntimeError(f"{command}: exit code {child.returncode}\n{errors.read()[-2000:]}")
        rows = pd.read_csv(log)
        return {
            "seconds_per_step": round(rows.seconds[warm_up:].median(), 4),
            "peak_gib": round(peak / 2**30, 2),
            "first_reward": round(rows.reward[0], 3),
            "last_reward": round(rows.reward[-5:].mean(), 3),
            "answer_tokens": round(rows.length[warm_up:].mean(), 1),
        }, output.read()


def peer_of(options: dict[str, str]) -> str:
    """The Python that has TRL. Exits where there is none."""
    peer = options.get("PEER", "")
    if not shutil.which(peer):
        sys.exit(f"error: PEER={peer}: no such Python; see the top of grpo_step_against_trl.py")
    return peer


def main() -> None:
    """Runs both in turn and prints the ratio of each round."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    peer, rounds = peer_of(options), int(options.get("ROUNDS", "5"))
    rows, ratios = [], {beta: [] for beta in BETAS}
    constants = {
        "MODEL": FOLDER / "tiny_llama",
        "NUM_BATCHES": STEPS,
        "BATCH_SIZE": 16,
        "NUM_GENERATIONS": 8,
        "TOTAL_GENERATION_STEPS": 28,
        "NUM_ITERATIONS": 1,
        "LEARNING_RATE": 1e-3,
    }
    for number in range(rounds):
        for beta in BETAS:
            job = constants | {"BETA": beta}
            results = {"ours": ours(job, WARM_UP), "trl": trl(peer, job, WARM_UP)}
            for name, result in results.items():
                rows.append(
                    {
                        "round": number,
                        "program": name,
                        "seeds": 1,
                        "beta": beta,
                        **result,
                        "machine": processor(),
                        "date": time.strftime("%Y-%m-%d"),
                    }
                )
            seconds = {name: result["seconds_per_step"] for name, result in results.items()}
            ratios[beta].append(seconds["ours"] / seconds["trl"])
            said = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
            print(f"round {number}, beta {beta}: {said}, ratio {ratios[beta][-1]:.2f}", flush=True)
    write_csv(HERE / "grpo_step_against_trl.csv", rows)
    for beta, found in ratios.items():
        print(
            f"beta {beta}: ratio {statistics.median(found):.2f} in the median, "
            f"{max(found):.2f} at worst"
        )


if __name__ == "__main__":
    main()
