"""Supervised fine-tuning: a Llama with random weights learns to answer from demonstrations.

The loss is the cross-entropy, over the tokens y_1 .. y_T of a demonstrated answer:

    L = -mean_t log pi(y_t | question, y_1 .. y_t-1)

Its gradient is REINFORCE's on somebody else's answers, all with an advantage of 1. So the model
learns the demonstrations' own mix, mistakes included: 40 % of the demonstrations for problems like
Kim's misread "loses", and in the end the model gives that misreading about 40 %.

    python 5_GRPO_Maxtext/supervised_fine_tuning.py
    python 5_GRPO_Maxtext/supervised_fine_tuning.py MISTAKES=0       # demonstrations without any
    python 5_GRPO_Maxtext/llama_by_hand.py CHECKPOINT=runs/supervised_fine_tuning/model

The tiny Llama that comes with the course has practiced seven times as long, by the same functions
(tools/make_tiny_llama.py). Left out: anything that makes it faster, such as a KV cache.
"""

import csv
import json
import random
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import settings
from settings import HERE, Count, NonNegative, Positive, Seed, UserError


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or change it for one run with NAME=value."""

    NUM_STEPS: Count = 350  # updates, each on new demonstrations
    BATCH_SIZE: Count = 64  # demonstrations per step
    LEARNING_RATE: Positive = 3e-3  # peak; a warm-up before it, a cosine decay to 0 after it
    WARMUP_STEPS: Count = 50  # steps from 0 to the peak
    MISTAKES: NonNegative = 1.0  # scales the demonstrations' shares of mistakes (0 = none)
    SEED: Seed = 0  # of the first weights, the demonstrations and the sampled answers
    EVAL_EVERY: Count = 25  # steps between looks at sampled answers
    NUM_TEST_QUESTIONS: Count = 128  # of tiny_gsm8k, answered at temperature 1 at each look
    RUN_DIR: str = "runs/supervised_fine_tuning"  # folder for log.csv, result.json and model/

    def __post_init__(self):
        if self.WARMUP_STEPS >= self.NUM_STEPS:
            raise UserError(
                f"WARMUP_STEPS={self.WARMUP_STEPS}: must be below NUM_STEPS={self.NUM_STEPS}"
            )


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses a wrong constant now, before seconds of imports
    settings.refuse_early(Constants)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from flax import nnx
from maxtext.utils import model_creation_utils

from model import llama, versions
from task.demonstrations import ASSISTANT, BOS, EOS, demonstrate
from task.grading import extract_hash_answer

MAX_TOKENS = 52  # of the longest question and demonstration together
NEW_TOKENS = 28  # of a sampled answer, as in the main script
KIM = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
# What every demonstration looks like, also one that forgets a tag.
FORM = re.compile(r"<reasoning>([^<>]+)(?:</reasoning>)?(?:<answer>)?(\d+)</answer>")


# %% The loss --------------------------------------------------------------------------------------
def cross_entropy(model, ids: jax.Array, learned: jax.Array) -> jax.Array:
    """The mean of -log pi over the demonstrations' tokens, [].

    Args:
        model: Tunix's adapter: tokens and positions [B, L] to logits [B, L, V].
        ids: int32 [B, L], questions and answers.
        learned: float32 [B, L], 1 on the answers' tokens, 0 on questions and padding.
    """
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    logits, _ = model(ids, positions, None, None)  # [B, L, V]
    # position t predicts token t + 1; this is -log of its softmax probability
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])  # [B, L - 1]
    return (loss * learned[:, 1:]).sum() / learned.sum()


@nnx.jit
def update(model, optimizer, ids: jax.Array, learned: jax.Array) -> jax.Array:
    """One step of AdamW, in place; the loss before it."""
    loss, gradient = nnx.value_and_grad(cross_entropy)(model, ids, learned)
    optimizer.update(model, gradient)
    return loss


# %% Demonstrations --------------------------------------------------------------------------------
def to_arrays(texts, tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32 [B, L], and the loss mask, float32 [B, L]; `texts`: see `demonstrate`."""
    ids = np.full((len(texts), length), tokenizer.pad_token_id, np.int32)
    learned = np.zeros(ids.shape, np.float32)
    for row, mask, parts in zip(ids, learned, texts, strict=True):
        tokens = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in parts]
        count = sum(len(part) for part, _ in tokens)
        row[:count] = [token for part, _ in tokens for token in part]
        mask[:count] = [own for part, own in tokens for _ in part]
    return ids, learned


def make_optimizer(model, learning_rate: float, warmup_steps: int, steps: int) -> nnx.Optimizer:
    """AdamW with gradient clip, linear warm-up and cosine decay to 0."""
    schedule = optax.warmup_cosine_decay_schedule(0, learning_rate, warmup_steps, steps)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


# %% A look at its answers -------------------------------------------------------------------------
@nnx.jit
def next_tokens(model, ids: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
    """Samples the token after position `last` [N] of each row of ids [N, L], at temperature 1."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    logits, _ = model(ids, positions, None, None)  # [N, L, V]
    return jax.random.categorical(key, logits[jnp.arange(len(ids)), last])  # [N]


def sample(model, tokenizer, questions: Sequence[str], key: jax.Array) -> list[str]:
    """One sampled answer to each question. No KV cache: each token recomputes all before it."""
    prompts = [[(BOS + question + ASSISTANT, False)] for question in questions]
    ids, _ = to_arrays(prompts, tokenizer, MAX_TOKENS + NEW_TOKENS)
    lengths = (ids != tokenizer.pad_token_id).sum(axis=1)  # [N], of the prompts
    for t in range(NEW_TOKENS):
        tokens = next_tokens(model, ids, lengths + t - 1, jax.random.fold_in(key, t))  # [N]
        ids[np.arange(len(ids)), lengths + t] = tokens
    answers = (tokenizer.decode(row[start:][:NEW_TOKENS]) for row, start in zip(ids, lengths))
    return [answer.partition(EOS)[0] for answer in answers]


def look_at(answers: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """Shares of the answers: in the demonstrations' form; with true equations only; right."""
    forms = [FORM.fullmatch(answer) for answer in answers]
    equations = [re.findall(r"(\d+)([-+*])(\d+)=(\d+)", form[1]) if form else [] for form in forms]
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    true = [
        bool(steps) and all(compute[sign](int(a), int(b)) == int(c) for a, sign, b, c in steps)
        for steps in equations
    ]
    right = [form is not None and form[2] == truth for form, truth in zip(forms, truths)]
    shares = {"form": [form is not None for form in forms], "calculates": true, "right": right}
    return {name: float(np.mean(share)) for name, share in shares.items()}


# %% Main ------------------------------------------------------------------------------------------
def save(folder: Path, hf, config, model) -> None:
    """The weights in Hugging Face's layout, beside the tiny Llama's own tokenizer and config."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (HERE / "tiny_llama").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    weights = dict(llama.hf_weights(hf, config, llama.named_weights(model).__getitem__))
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str]) -> None:
    c = settings.read(Constants, arguments)
    versions.prepare_libraries()
    folder, hf = llama.fetch_model("tiny_llama", weights=False)  # its sizes, not its weights
    tokenizer = llama.load_tokenizer(folder)
    config = llama.to_maxtext_config(
        hf, rows=c.BATCH_SIZE, prompt_tokens=MAX_TOKENS - 1, new_tokens=1
    )
    model, mesh = model_creation_utils.from_pretrained(
        config,
        wrap_with_tunix_adapter=True,
        tokenizer_pad_id=tokenizer.pad_token_id,
        rng_key=jax.random.PRNGKey(c.SEED),
    )
    llama.use_rope_scaling(model.base, hf)
    optimizer = make_optimizer(model, c.LEARNING_RATE, c.WARMUP_STEPS, c.NUM_STEPS)

    test = [
        json.loads(line)
        for line in (HERE / "tiny_gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    held_out = {row["question"] for row in test}
    asked = test[: c.NUM_TEST_QUESTIONS]
    questions = [KIM, *(row["question"] for row in asked)]
    truths = [extract_hash_answer(row["answer"]) for row in asked]
    rng, key, losses, rows = random.Random(c.SEED), jax.random.key(c.SEED), [], []
    started = time.perf_counter()
    print("step   loss    form   calculates  right   an answer to Kim's question")
    with mesh:
        for step in range(c.NUM_STEPS + 1):
            if step % c.EVAL_EVERY == 0 or step == c.NUM_STEPS:
                kims, *answers = sample(model, tokenizer, questions, jax.random.fold_in(key, step))
                shares = look_at(answers, truths)
                loss = float(np.mean(losses)) if losses else float("nan")  # since the last look
                rows.append({"step": step, "loss": loss} | shares)
                losses = []
                percent = "   ".join(f"{share:6.1%}" for share in shares.values())
                print(f"{step:4}  {loss:5.3f}  {percent}   {kims}", flush=True)
            if step < c.NUM_STEPS:
                texts = [demonstrate(held_out, rng, c.MISTAKES) for _ in range(c.BATCH_SIZE)]
                losses.append(update(model, optimizer, *to_arrays(texts, tokenizer, MAX_TOKENS)))
    seconds = time.perf_counter() - started

    run_dir = Path(c.RUN_DIR)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "log.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    save(run_dir / "model", hf, config, model)
    result = rows[-1] | {"seconds": round(seconds, 1)}
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{seconds:.0f} s; log.csv, result.json and model/ are in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
