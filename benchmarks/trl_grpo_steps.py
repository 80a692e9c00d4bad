"""TRL's GRPOTrainer on the tiny Llama, timed step by step: the peer of grpo_step_against_trl.py.

Runs in an environment of its own (pip install torch trl accelerate datasets) and prints one JSON line.
Same weights, questions, rewards, batch (16 prompts x 8 answers), lengths and optimizer as our script.
"""

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
sys.path.insert(0, str(FOLDER))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TOKENIZERS_PARALLELISM"] = "true"  # as without folder 5's parts, which switch it off

import datasets
import torch
import transformers
import trl

import reward_func
from parts.grading import extract_hash_answer

STEPS, PROMPTS, GENERATIONS, PROMPT_TOKENS, NEW_TOKENS = 60, 16, 8, 28, 28


class StepTimer(transformers.TrainerCallback):
    """Wall time at each step's end."""

    times: list[float] = []  # noqa: RUF012  (one instance)

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())


def main() -> None:
    """Trains STEPS steps with BETA from the command line."""
    beta, threads = float(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER / "tiny_llama")
    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER / "tiny_llama", dtype=torch.float32)
    rows = [json.loads(line) for line in (FOLDER / "tiny_gsm8k" / "train.jsonl").read_text().splitlines()]
    dataset = datasets.Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "answer": extract_hash_answer(row["answer"]),
            }
            for row in rows
        ]
    )

    def rewarded(function):
        def reward(prompts, completions, **columns):
            texts = [c[0]["content"] for c in completions]
            return function(prompts=prompts, completions=texts, answer=columns["answer"])

        reward.__name__ = function.__name__
        return reward

    names = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
    config = trl.GRPOConfig(
        output_dir="/tmp/trl_run",
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=beta,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=STEPS // 10,
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
    timer = StepTimer()
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=[rewarded(getattr(reward_func, name)) for name in names],
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[timer],
    )
    trainer.train()
    seconds = [b - a for a, b in zip(timer.times[9:], timer.times[10:], strict=False)]  # after warm-up
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    print(
        json.dumps(
            {
                "seconds": seconds,
                "first_reward": rewards[0],
                "last_reward": sum(rewards[-5:]) / 5,
                "versions": f"trl {trl.__version__}, torch {torch.__version__}, transformers "
                f"{transformers.__version__}",
            }
        )
    )


if __name__ == "__main__":
    main()
