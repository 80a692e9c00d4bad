"""TRL's GRPOTrainer on a Llama of this project, step by step: the peer of grpo_step_against_trl.py.

Runs in an environment of its own (see there) with the constants of our script that it is given, and
logs the steps as our script does: LOG=file.csv, written at once. Same weights, questions, rewards,
batch, lengths and optimizer. Prints its versions. trl_smollm2_steps.py trains with `train`, too.
"""

import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
    """A row per step: seconds since the last one ended, mean reward, mean tokens of an answer."""

    def __init__(self, path: str):
        self.file = open(path, "w", newline="")  # noqa: SIM115  (open until the process ends)
        self.writer = csv.DictWriter(self.file, ("seconds", "reward", "length"))
        self.writer.writeheader()

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:  # the last log is of the whole training
            now = time.perf_counter()
            length = logs["completions/mean_length"]
            self.writer.writerow(
                {"seconds": now - self.started, "reward": logs["reward"], "length": length}
            )
            self.file.flush()
            self.started = now


def rewarded(function):
    """One of our reward functions as TRL calls it."""

    def reward(prompts, completions, **columns):
        texts = [c[0]["content"] for c in completions]
        return function(prompts=prompts, completions=texts, answer=columns["answer"])

    reward.__name__ = function.__name__
    return reward


def given() -> dict[str, str]:
    """The constants of the command line."""
    return dict(argument.split("=", 1) for argument in sys.argv[1:])


def train(
    constants: dict[str, str],
    questions: Sequence[str],
    answers: Sequence[str],
    rewards: Sequence[Callable],
    peft_config: Any = None,
) -> None:
    """Trains NUM_BATCHES steps of our script's `constants`; with a `peft_config` only the adapters.

    With DTYPE=bfloat16, the weights are bfloat16 and the step runs under autocast.
    """
    steps, generations = int(constants["NUM_BATCHES"]), int(constants["NUM_GENERATIONS"])
    dtype = constants.get("DTYPE", "float32")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        constants["MODEL"], trust_remote_code=False
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        constants["MODEL"], dtype=getattr(torch, dtype)
    )
    prompts = [[{"role": "user", "content": question}] for question in questions]
    config = trl.GRPOConfig(
        output_dir=str(Path(constants["LOG"]).parent / "trl"),
        max_steps=steps,
        per_device_train_batch_size=int(constants["BATCH_SIZE"]) * generations,
        num_generations=generations,
        max_completion_length=int(constants["TOTAL_GENERATION_STEPS"]),
        temperature=float(constants.get("TEMPERATURE", "1.0")),
        beta=float(constants["BETA"]),
        learning_rate=float(constants["LEARNING_RATE"]),
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        adam_beta2=0.99,
        weight_decay=0.1,
        max_grad_norm=1.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=dtype == "bfloat16",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        callbacks=[StepLog(constants["LOG"])],
        reward_funcs=[rewarded(function) for function in rewards],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, "answer": answers}),
        peft_config=peft_config,
    )
    trainer.train()


def versions(*packages: str) -> str:
    """Of installed packages: "trl 1.16.0, torch 2.13.0"."""
    return ", ".join(f"{package} {version(package)}" for package in packages)


def main() -> None:
    """Trains the tiny Llama on its own questions, with the course's four rewards."""
    rows = [
        json.loads(line)
        for line in (FOLDER / "tiny_gsm8k" / "train.jsonl").read_text().splitlines()
    ]
    train(
        given(),
        questions=[row["question"] for row in rows],
        answers=[extract_hash_answer(row["answer"]) for row in rows],
        rewards=[getattr(reward_func, name) for name in REWARDS],
    )
    print(versions("trl", "torch", "transformers"))


if __name__ == "__main__":
    main()
