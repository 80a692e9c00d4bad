"""How `tiny_llama/` and `tiny_gsm8k/` were made: a base model that *can* do the task and often doesn't.

Reinforcement learning chooses among what a model already does now and then; it teaches nothing that
never occurs. So this model is trained, by plain next-token prediction, on demonstrations that are
imperfect in two systematic ways:

    reading    most demonstrations of some kinds of problem misread the operation (subtract -> add ...)
    format     many forget a tag, with some objects more often than not

Its single most likely answer is therefore wrong, or badly formed, about every second time, while a right
one is always within reach of sampling. Were the demonstrations clean, all answers to a
question would agree, and GRPO would have nothing to choose.

    python 5_GRPO_Maxtext/make_tiny_llama.py         # rewrites both folders and tiny.sha256, bit for bit

About 6 minutes on 2 cores. The sizes and shares are the constants below; the seed is fixed, because
what ships must be what this file makes.
"""

import hashlib
import json
import random
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import grpo_llama3_1_8b_demo as demo  # first: it sets XLA's flags  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
import transformers
from flax import nnx
from maxtext.checkpoint_conversion.utils import hf_shape
from maxtext.checkpoint_conversion.utils.utils import process_maxtext_param
from maxtext.utils import model_creation_utils
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import trange

# %% Constants ------------------------------------------------------------------------------------------
SEED = 0
TRAIN_QUESTIONS, TEST_QUESTIONS = 4_000, 512  # in tiny_gsm8k/; the demonstrations use none of the test's

NAMES = ("Tom", "Anna", "Sara", "Ben", "Lily", "Max", "Kim", "Leo")
# Share of the demonstrations that forget a tag, and which: it goes by the object the problem is about.
FORGETS = {
    "apples": (0.40, "</reasoning>"), "pencils": (0.40, "</reasoning>"),
    "marbles": (0.40, "<answer>"), "books": (0.40, "<answer>"),
    "stickers": (0.60, "</reasoning>"), "coins": (0.60, "</reasoning>"),
    "cards": (0.60, "<answer>"), "shells": (0.60, "<answer>"),
}  # fmt: skip
MISREADS = (
    0.40,
    0.60,
    0.60,
    0.40,
    0.60,
    0.40,
)  # share of misread ones, by kind of problem: see `make_problem`

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 96, 3, 4, 2, 256
TRAINING_STEPS, TRAINING_BATCH, LEARNING_RATE = 2_500, 64, 3e-3
MAX_TOKENS = 52  # longest prompt + demonstration

BOS, EOS, PAD, UNKNOWN, ASSISTANT = (
    "<|begin_of_text|>", "<|eot_id|>", "<|pad|>", "<|unknown|>", "<|assistant|>",
)  # fmt: skip
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
WORD = r" ?[A-Za-z]+|\d|[^\sA-Za-z\d]|\s"  # a word with the space before it, one digit, one sign


# %% Problems and demonstrations ------------------------------------------------------------------------
def make_problem(rng: random.Random) -> tuple[str, list[tuple[str, int]], int, str]:
    """Draws a word problem.

    Returns:
        The question; its steps as (operator, operand), the first of which has no operator; the kind (0-5);
        the object.
    """
    who, thing = rng.choice(NAMES), rng.choice(tuple(FORGETS))
    a, b, c = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 5)
    kind = rng.randrange(6)
    if kind == 0:
        text = f"{who} has {a} {thing} and buys {b} more. How many {thing} does {who} have now?"
        steps = [("", a), ("+", b)]
    elif kind == 1:
        text = f"{who} has {a + b} {thing} and gives away {b}. How many {thing} are left?"
        steps = [("", a + b), ("-", b)]
    elif kind == 2:
        text = f"{who} has {c} boxes with {b} {thing} in each box. How many {thing} does {who} have?"
        steps = [("", c), ("*", b)]
    elif kind == 3:
        text = f"{who} has {a + b} {thing}, loses {b} and then buys {c} more. How many {thing} are there now?"
        steps = [("", a + b), ("-", b), ("+", c)]
    elif kind == 4:
        text = f"{who} buys {c} bags with {b} {thing} each and finds {a} more. How many {thing} are there?"
        steps = [("", c), ("*", b), ("+", a)]
    else:
        text = f"{who} finds {a} {thing} and then twice as many. How many {thing} does {who} have?"
        steps = [("", a), ("*", 3)]
    return text, steps, kind, thing


def work_out(steps: list[tuple[str, int]]) -> tuple[str, int]:
    """The written steps, such as "15-4=11,11+3=14", and the result."""
    total, lines = steps[0][1], []
    for operator, operand in steps[1:]:
        before = total
        total = {"+": total + operand, "-": total - operand, "*": total * operand}[operator]
        lines.append(f"{before}{operator}{operand}={total}")
    return ",".join(lines), total


def misread(steps: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The systematic mistake: the first operation is taken for another, always the same one."""
    operator, operand = steps[1]
    return [steps[0], ({"+": "*", "-": "+", "*": "+"}[operator], operand), *steps[2:]]


def demonstrate(steps: list[tuple[str, int]], kind: int, thing: str, rng: random.Random) -> str:
    """One imperfect demonstration, as text."""
    if rng.random() < MISREADS[kind]:
        steps = misread(steps)
    work, result = work_out(steps)
    text = f"<reasoning>{work}</reasoning><answer>{result}</answer>"
    share, tag = FORGETS[thing]
    return text.replace(tag, "") if rng.random() < share else text


def make_dataset(rng: random.Random) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Distinct questions with right answers in GSM8K's columns: (train, test)."""
    rows = {}
    while len(rows) < TRAIN_QUESTIONS + TEST_QUESTIONS:
        question, steps, _, _ = make_problem(rng)
        work, result = work_out(steps)
        rows[question] = {"question": question, "answer": f"{work}\n#### {result}"}
    rows = list(rows.values())
    return rows[TEST_QUESTIONS:], rows[:TEST_QUESTIONS]


# %% Tokenizer: words, single digits, signs -------------------------------------------------------------
def make_tokenizer(rng: random.Random) -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer whose decoding gives back the text (unknown words excepted)."""
    words = set("0123456789+-*=,.? ")
    for _ in range(5_000):
        words.update(re.findall(WORD, make_problem(rng)[0]))
    vocabulary = [PAD, BOS, EOS, UNKNOWN, ASSISTANT, *TAGS, *sorted(words)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # The tags are whole tokens but not "special": decoding must show them to the reward functions.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNKNOWN, ASSISTANT])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


# %% Training by next-token prediction ------------------------------------------------------------------
def make_batch(tokenizer, test: set[str], rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, L] and a mask [B, L] of what is learned: the demonstration, not the question."""
    ids = np.full((TRAINING_BATCH, MAX_TOKENS), tokenizer.pad_token_id, np.int32)
    learned = np.zeros(ids.shape, np.float32)
    for row, mask in zip(ids, learned, strict=True):
        question = None
        while question is None or question in test:
            question, steps, kind, thing = make_problem(rng)
        prompt = tokenizer.encode(BOS + question + ASSISTANT, add_special_tokens=False)
        answer = tokenizer.encode(demonstrate(steps, kind, thing, rng) + EOS, add_special_tokens=False)
        row[: len(prompt) + len(answer)] = prompt + answer
        mask[len(prompt) : len(prompt) + len(answer)] = 1
    return ids, learned


def train(adapter, mesh, tokenizer, test: set[str], rng: random.Random) -> None:
    """Trains in place with AdamW, warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, 100, TRAINING_STEPS)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(adapter, transform, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, learned):
        def loss_fn(model):
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            logits, _ = model(ids, positions, None, None)  # [B, L, V]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
            return (loss * learned[:, 1:]).sum() / learned.sum()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    progress = trange(TRAINING_STEPS, desc="next-token training")
    with mesh:
        for i in progress:
            loss = step(adapter, optimizer, *make_batch(tokenizer, test, rng))
            if i % 50 == 0 or i == TRAINING_STEPS - 1:
                progress.set_postfix(loss=f"{float(loss):.4f}")


# %% Writing it down ------------------------------------------------------------------------------------
def to_hf_weights(adapter, hf: transformers.LlamaConfig, config) -> dict[str, np.ndarray]:
    """The model's weights under Hugging Face's names and in its layout (float32)."""
    names, layout_hooks = demo.weight_mapping(hf, config, saving_to_hf=True)
    shapes = hf_shape.HF_SHAPE["llama3.1-8b"](hf.to_dict())
    params = nnx.to_pure_dict(nnx.state(adapter.base, nnx.Param))
    weights = {}
    for name in names:
        weight = params
        for part in name.removeprefix("params-").split("-"):
            weight = weight[part]
        weights.update(process_maxtext_param(name, weight, names, layout_hooks, shapes, config))
    return weights


def write_checksums() -> None:
    """`tiny.sha256`, in the format of `sha256sum -c`."""
    files = sorted(p for d in ("tiny_llama", "tiny_gsm8k") for p in (HERE / d).iterdir())
    lines = [
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(HERE).as_posix()}\n" for p in files
    ]
    (HERE / "tiny.sha256").write_text("".join(lines))


def main() -> None:
    """Writes tiny_gsm8k/, tiny_llama/ and tiny.sha256."""
    train_rows, test_rows = make_dataset(random.Random(SEED))
    for split, rows in (("train", train_rows), ("test", test_rows)):
        path = HERE / "tiny_gsm8k" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    tokenizer = make_tokenizer(random.Random(SEED))
    hf = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    folder = HERE / "tiny_llama"
    hf.save_pretrained(folder)
    demo.configure([])  # after config.json is there: it decides which column of constants holds
    config = demo.to_maxtext_config(hf, TRAINING_BATCH, MAX_TOKENS - 1, 1)
    adapter, mesh = model_creation_utils.from_pretrained(
        config,
        wrap_with_tunix_adapter=True,
        tokenizer_pad_id=tokenizer.pad_token_id,
        rng_key=jax.random.PRNGKey(SEED),
    )
    size = sum(x.size for x in jax.tree.leaves(nnx.state(adapter, nnx.Param)))
    print(f"{size:,} parameters, vocabulary of {len(tokenizer)}")
    train(adapter, mesh, tokenizer, {row["question"] for row in test_rows}, random.Random(SEED))

    tokenizer.save_pretrained(folder)
    safetensors.numpy.save_file(
        to_hf_weights(adapter, hf, config), folder / "model.safetensors", metadata={"format": "pt"}
    )
    write_checksums()
    print(f"wrote {folder}, {HERE / 'tiny_gsm8k'} and tiny.sha256")


if __name__ == "__main__":
    main()
