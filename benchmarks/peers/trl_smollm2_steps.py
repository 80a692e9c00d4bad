"""TRL's GRPOTrainer with PEFT's LoRA on SmolLM2: the peer of smollm2_step_against_trl.py.

Constants, log and versions as in trl_grpo_steps.py; the questions are DATASET's, and the reward is
the function REWARDS of the file REWARD_FUNC.
"""

import json
import runpy
from pathlib import Path

import peft
from trl_grpo_steps import given, train, versions


def main() -> None:
    """Trains A and B beside each of LORA_TARGETS; the model's own weights are frozen."""
    constants = given()
    lines = Path(constants["DATASET"], "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    train(
        constants,
        questions=[constants["TEMPLATE"].format(question=row["prompt"]) for row in rows],
        answers=[row["ground_truth"] for row in rows],
        rewards=[runpy.run_path(constants["REWARD_FUNC"])[constants["REWARDS"]]],
        peft_config=peft.LoraConfig(
            r=int(constants["LORA_RANK"]),
            lora_alpha=float(constants["LORA_ALPHA"]),
            target_modules=constants["LORA_TARGETS"].split(","),
            task_type="CAUSAL_LM",
        ),
    )
    print(versions("trl", "peft", "torch", "transformers"))


if __name__ == "__main__":
    main()
