"""TRL's GRPOTrainer on a Llama of this project, step by step: the peer of grpo_step_against_trl.py.

Runs in an environment of its own (see there) with the constants of our script that it is given, and
logs the steps as our script does: LOG=file.csv, written at once. Same weights, questions, rewards,
batch, lengths and optimizer. Prints its versions.
"""

import csv
import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "5_GRPO_Maxtext"
sys.path.insert(0, str(FOLDER))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TOKENIZERS_PARALLELISM"] = "true"  # as without folder 5's parts, which switch it off

import json

import datasets
import torch
import transformers
import trl

import reward_func
from task.grading import extract_hash_answer

REWARDS = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")


class StepLog(transformers.TrainerCallback):
    """A row per step: seconds since the last one ended, and the mean reward."""

    def __init__(self, path: str):
        self.file = open(path, "w", newline="")  # noqa: SIM115  (open until the process ends)
        self.writer = csv.DictWriter(self.file, ("seconds", "reward"))
        self.writer.writeheader()

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:  # the last log is of the whole training
            now = time.perf_counter()
            self.writer.writerow({"seconds": now - self.started, "reward": logs["reward"]})
            self.file.flush()
            self.started = now


def rewarded(function):
    """One of our reward functions as TRL calls it."""

    def reward(prompts, completions, **columns):
        texts = [c[0]["content"] for c in completions]
        return function(prompts=prompts, completions=texts, answer=columns["answer"])

    reward.__name__ = function.__name__
    return reward


def main() -> None:
    """Trains NUM_BATCHES steps."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    steps, generations = int(given["NUM_BATCHES"]), int(given["NUM_GENERATIONS"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["MODEL"], trust_remote_code=False)
    model = transformers.LlamaForCausalLM.from_pretrained(given["MODEL"], dtype=torch.float32)
    rows = [
        json.loads(line)
        for line in (FOLDER / "tiny_gsm8k" / "train.jsonl").read_text().splitlines()
    ]
    prompts = [[{"role": "user", "content": row["question"]}] for row in rows]
    answers = [extract_hash_answer(row["answer"]) for row in rows]
    config = trl.GRPOConfig(
        output_dir=str(Path(given["LOG"]).parent / "trl"),
        max_steps=steps,
        per_device_train_batch_size=int(given["BATCH_SIZE"]) * generations,
        num_generations=generations,
        max_completion_length=int(given["TOTAL_GENERATION_STEPS"]),
        temperature=1.0,
        beta=float(given["BETA"]),
        learning_rate=float(given["LEARNING_RATE"]),
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        adam_beta2=0.99,
        weight_decay=0.1,
        max_grad_norm=1.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        callbacks=[StepLog(given["LOG"])],
        reward_funcs=[rewarded(getattr(reward_func, name)) for name in REWARDS],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "answer": answers}),
    )
    trainer.train()
    print(
        f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    main()
