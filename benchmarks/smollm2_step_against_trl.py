"""Seconds per GRPO step on a pretrained model: this project's script against TRL's GRPOTrainer with
PEFT.

Both train LoRA on SmolLM2-135M-Instruct with the settings of rung 2, in
5_GRPO_Maxtext/docs/operate/rungs.md: 4 questions x 8 answers of at most 24 tokens. They start from
the same weights, make 5 steps in bfloat16 and 5 in float32, and compute all 32 answers in one
gradient pass. The first 2 steps (compilation, warm-up) are left out. A ratio is of the two runs of
one round, minutes apart. TRL's gradient checkpointing, its default, is off: all answers fit, and it
would take longer. Three things differ from rung 2 or between the two:

  * The only reward is the last number. Rung 2 adds `compute_score`, which is nearly always 0.
  * Each program has its own order of the questions, so the answers aren't the same. `answer_tokens`
    is how long they are, which decides how much there is to compute.
  * In bfloat16, TRL's frozen weights are bfloat16, too. Ours stay float32, and are rounded where
    they're used.

docs/operate/checkpoints.md says how to get SmolLM2, and grpo_step_against_trl.py how to install TRL
with PEFT.

    python benchmarks/smollm2_step_against_trl.py MODEL=runs/smollm2 PEER=/tmp/trl/bin/python \
        [ROUNDS=3]

Writes benchmarks/smollm2_step_against_trl.csv: one row per run, in the order they ran.
"""

import statistics
import sys
import time
from pathlib import Path

from grpo_step_against_trl import FOLDER, HERE, ours, peer_of, trl
from machine import processor, write_csv

STEPS, WARM_UP = 5, 2  # the first steps are left out
DTYPES = ("bfloat16", "float32")
CONSTANTS = {
    "DATASET": FOLDER / "examples" / "small_numbers",
    "REWARD_FUNC": FOLDER / "examples" / "last_number.py",
    "REWARDS": "last_number",
    "TEMPLATE": "{question} Answer in one short sentence.",
    "MAX_PROMPT_LENGTH": 60,
    "TOTAL_GENERATION_STEPS": 24,
    "TEMPERATURE": 0.7,
    "BATCH_SIZE": 4,
    "NUM_GENERATIONS": 8,
    "NUM_ITERATIONS": 1,
    "NUM_BATCHES": STEPS,
    "BETA": 0.08,
    "LEARNING_RATE": 3e-4,
    "LORA_RANK": 16,
    "LORA_ALPHA": 16,
    "LORA_TARGETS": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}


def model_of(options: dict[str, str]) -> Path:
    """SmolLM2's folder. Exits where there is none."""
    model = Path(options.get("MODEL", "")).resolve()
    if not (model / "config.json").exists():
        sys.exit(
            f"error: MODEL={options.get('MODEL', '')}: no model there; see the top of "
            "smollm2_step_against_trl.py"
        )
    return model


def main() -> None:
    """Runs both in turn and prints the ratio of each round."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    peer, model, rounds = peer_of(options), model_of(options), int(options.get("ROUNDS", "3"))
    rows, ratios = [], {dtype: [] for dtype in DTYPES}
    for number in range(rounds):
        for dtype in DTYPES:
            job = CONSTANTS | {"MODEL": model, "DTYPE": dtype}
            results = {
                # the tests before and after training aren't part of a step
                "ours": ours(job | {"EVAL_CONFIG": "liberal", "NUM_TEST_QUESTIONS": 1}, WARM_UP),
                "trl": trl(peer, job, WARM_UP, "trl_smollm2_steps.py"),
            }
            for name, result in results.items():
                rows.append(
                    {
                        "round": number,
                        "program": name,
                        "seeds": 1,
                        "dtype": dtype,
                        **result,
                        "machine": processor(),
                        "date": time.strftime("%Y-%m-%d"),
                    }
                )
            seconds = {name: result["seconds_per_step"] for name, result in results.items()}
            ratios[dtype].append(seconds["ours"] / seconds["trl"])
            said = ", ".join(
                f"{name} {result['seconds_per_step']:.2f} s, {result['answer_tokens']} tokens"
                for name, result in results.items()
            )
            print(f"round {number}, {dtype}: {said}, ratio {ratios[dtype][-1]:.2f}", flush=True)
    write_csv(HERE / "smollm2_step_against_trl.csv", rows)
    for dtype, found in ratios.items():
        print(
            f"{dtype}: ratio {statistics.median(found):.2f} in the median, "
            f"{min(found):.2f} to {max(found):.2f}"
        )


if __name__ == "__main__":
    main()
