"""Makes `tiny_llama/` and `tiny_gsm8k/`: a base model that *can* do the task but often doesn't.

Reinforcement learning can only reinforce what a model already does now and then. So we train this
model as supervised_fine_tuning.py does, only longer, on the imperfect demonstrations of
task/demonstrations.py: about half misread the problem, and about half forget a tag.

So its most likely answer is wrong or badly formatted about half the time, but sampling can still
find a right one. With clean demonstrations all answers to a question would agree, and GRPO would
have no signal.

    python 5_GRPO_Maxtext/tool.py make_tiny_llama     # rewrites both folders, bit for bit
    python 5_GRPO_Maxtext/tool.py make_tiny_llama FOLDER=runs/other SEED=1    # another, elsewhere
    python 5_GRPO_Maxtext/tool.py make_tiny_llama TASK=grid                # tiny_grid/

Takes about 6 minutes on 2 cores. TASK=grid makes a smaller model for examples/grid in one minute.
It has seen random walks that know the four moves but not the goal, tend to repeat a move, and
sometimes write "wait".
"""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import settings
from settings import HERE, Seed, find_path


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """What ships is what the defaults make: give another SEED together with another FOLDER."""

    TASK: Literal["gsm8k", "grid"] = "gsm8k"  # grid: tiny_grid/, whose sizes and steps are its own
    FOLDER: str = ""  # for tiny_llama/, tiny_gsm8k/ and tiny.sha256 (empty = folder 5)
    SEED: Seed = 0  # of the questions, the demonstrations and the first weights


# Questions by split, in sampling order; no demonstration uses the test's. `make_problem` has about
# 59,000.
QUESTIONS = {"test": 512, "train": 4_000, "validation": 128}
# query heads of hidden / HEADS dimensions; key/value heads, each shared by two
HEADS, KV_HEADS = 4, 2
TRAINING_BATCH = 64  # new demonstrations per step


class Recipe(NamedTuple):
    """How the models of the two tasks differ."""

    hidden: int  # width of the residual stream
    layers: int  # transformer blocks
    mlp: int  # width of a block's MLP
    steps: int  # of next-token training
    learning_rate: float  # peak, after `warmup_steps` from 0; it decays to 0 along a cosine
    warmup_steps: int
    max_tokens: int  # of the longest prompt and demonstration together


RECIPES = {
    "gsm8k": Recipe(96, 3, 256, 2_500, 3e-3, 100, 52),
    # 78: the longest prompt, twelve turns of six tokens
    "grid": Recipe(64, 2, 128, 120, 2e-3, 20, 78),
}


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses a wrong constant now, before seconds of imports
    settings.refuse_early(Constants)

import jax
import numpy as np
import safetensors.numpy
import transformers
from maxtext.utils import model_creation_utils
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import trange

from model import llama, versions
from run import memory
from supervised_fine_tuning import make_optimizer, to_arrays, update
from task.demonstrations import (
    ASSISTANT,
    BOS,
    EOS,
    TAGS,
    demonstrate,
    make_problem,
    work_out,
)
from task.run_grader import load_file

PAD, UNKNOWN = "<|pad|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
WORD = r" ?[A-Za-z]+|\d|[^\sA-Za-z\d]|\s"  # a word with the space before it, one digit, one sign


# %% Questions -----------------------------------------------------------------------------------
def make_dataset(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Distinct questions with right answers in GSM8K's columns, by split."""
    rows = {}
    while len(rows) < sum(QUESTIONS.values()):
        question, steps, _, _ = make_problem(rng)
        work, result = work_out(steps)
        rows[question] = {"question": question, "answer": f"{work}\n#### {result}"}
    drawn = iter(rows.values())
    return {split: list(itertools.islice(drawn, size)) for split, size in QUESTIONS.items()}


# %% Walks on the grid -----------------------------------------------------------------------------
GRID_WORD = r" ?[a-z]+| ?\d"
WORLDS = ("", "slippery", "walls")
WAITS, GOES_ON = 0.1, 0.3  # share of the moves that are none; that repeat the one before
MOVES_OF_A_WALK = 12


def wander(rng: random.Random) -> list[tuple[str, bool]]:
    """A random walk on one of the three grids: texts, and whether the walker wrote them."""
    world = load_file(find_path("examples/grid/grid_world.py"), "ENVIRONMENT")
    kind = rng.choice(WORLDS)
    question = f"{kind} {world.in_words(rng.choice(world.starts(kind)))}".strip()
    walk, walker, move = [(BOS + question, False)], world.Environment(), ""
    walker.reset(question, np.random.default_rng(rng.getrandbits(32)))
    for _ in range(MOVES_OF_A_WALK):
        if not move or rng.random() > GOES_ON:
            move = rng.choice(tuple(world.MOVES))
        action = "wait" if rng.random() < WAITS else move
        observation, _, reached, _ = walker.step(action)
        walk += [(action + EOS, True), (observation, False)]
        if reached:
            break
    return walk


# %% Tokenizer: words, single digits, signs --------------------------------------------------------
def make_tokenizer(c: Constants) -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer whose decoding gives back the text (unknown words excepted)."""
    words, word, tags, template = set("0123456789+-*=,.? "), WORD, TAGS, CHAT_TEMPLATE
    if c.TASK == "grid":
        word, tags, template = GRID_WORD, (), CHAT_TEMPLATE.partition("{% if")[0]
        words = {"row", " row", " column", *WORLDS[1:], *(f" {i}" for i in range(1, 5))}
        words |= {"up", "down", "left", "right", "wait"}
    else:
        rng = random.Random(c.SEED)
        for _ in range(5_000):  # far more than it needs to see every word
            words.update(re.findall(WORD, make_problem(rng)[0]))
    vocabulary = [PAD, BOS, EOS, UNKNOWN, ASSISTANT, *tags, *sorted(words)]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(word), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # The tags are whole tokens but not "special": decoding must show them to the reward functions.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNKNOWN, ASSISTANT])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
    )


# %% Training by next-token prediction -------------------------------------------------------------
def train(c: Constants, model, mesh, tokenizer, test: set[str], rng: random.Random) -> None:
    """Trains in place, each step on TRAINING_BATCH new demonstrations or walks."""
    recipe = RECIPES[c.TASK]
    optimizer = make_optimizer(model, recipe.learning_rate, recipe.warmup_steps, recipe.steps)
    progress = trange(recipe.steps, desc="next-token training")
    with mesh:
        for i in progress:
            texts = [
                wander(rng) if c.TASK == "grid" else demonstrate(test, rng)
                for _ in range(TRAINING_BATCH)
            ]
            loss = update(model, optimizer, *to_arrays(texts, tokenizer, recipe.max_tokens))
            if i % 50 == 0 or i == recipe.steps - 1:
                progress.set_postfix(loss=f"{float(loss):.4f}")


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> None:
    """Writes tiny_gsm8k/, tiny_llama/ and tiny.sha256; with TASK=grid tiny_grid/ and
    tiny_grid.sha256.
    """
    c = settings.read(Constants, arguments)
    versions.prepare_libraries()
    folder, recipe = Path(c.FOLDER) if c.FOLDER else HERE, RECIPES[c.TASK]
    grid = c.TASK == "grid"
    folders, checksums = (
        (("tiny_grid",), "tiny_grid.sha256")
        if grid
        else (("tiny_llama", "tiny_gsm8k"), "tiny.sha256")
    )
    model = folder / folders[0]
    dataset = {} if grid else make_dataset(random.Random(c.SEED))
    for split, rows in dataset.items():
        path = folder / "tiny_gsm8k" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines, encoding="utf-8")

    tokenizer = make_tokenizer(c)
    hf = transformers.LlamaConfig(
        **memory.PUBLISHED[memory.LLAMA_3_1_8B]
        | dict(  # with our sizes
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.mlp,
            num_hidden_layers=recipe.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=recipe.hidden // HEADS,
            dtype="float32",
            architectures=["LlamaForCausalLM"],
        )
    )
    hf.save_pretrained(model)
    tokens = recipe.max_tokens
    config = llama.to_maxtext_config(
        hf, rows=TRAINING_BATCH, prompt_tokens=tokens - 1, new_tokens=1
    )
    adapter, mesh = model_creation_utils.from_pretrained(
        config,
        wrap_with_tunix_adapter=True,
        tokenizer_pad_id=tokenizer.pad_token_id,
        rng_key=jax.random.PRNGKey(c.SEED),
    )
    llama.use_rope_scaling(adapter.base, hf)
    print(f"{llama.count_parameters(adapter):,} parameters, vocabulary of {len(tokenizer)}")
    test = {row["question"] for row in dataset.get("test", [])}
    train(c, adapter, mesh, tokenizer, test, random.Random(c.SEED))

    tokenizer.save_pretrained(model)
    weights = dict(llama.hf_weights(hf, config, llama.named_weights(adapter).__getitem__))
    safetensors.numpy.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    files = sorted(path for name in folders for path in (folder / name).iterdir())
    sums = [
        (hashlib.sha256(p.read_bytes()).hexdigest(), p.relative_to(folder).as_posix())
        for p in files
    ]
    # `sha256sum -c`
    lines = "".join(f"{digest}  {name}\n" for digest, name in sums)
    (folder / checksums).write_text(lines, encoding="utf-8")
    print(f"wrote {'/, '.join(folders)}/ and {checksums} in {folder}")


if __name__ == "__main__":
    settings.run(main)
