"""A Llama by hand, in NumPy: from the text of a question to the model's own answer.

It loads the tiny Llama that chapter 5 trains and computes every number itself. Read it from top to
bottom; language_model.md explains it section by section:

    text -> tokens -> a vector [D] per token
    for each layer:  x += attention(x)      every token reads from itself and the tokens before it
                     x += mlp(x)            every token by itself
    the last vector -> a logit per possible next token [V] -> softmax: their probabilities -> sample

Left out: the KV cache. A real program keeps the keys and values of earlier tokens. This one
recomputes them for every new token, which gives the same numbers and is easier to read.

    python 5_GRPO_Maxtext/llama_by_hand.py
    python 5_GRPO_Maxtext/llama_by_hand.py TEMPERATURE=1 SEED=3      # samples instead
    python 5_GRPO_Maxtext/llama_by_hand.py CHECKPOINT=runs/mine_hf   # a model that GRPO trained
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import settings
from settings import Count, NonNegative, Seed, UserError, find_path


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or change it for one run with NAME=value."""

    QUESTION: str = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
    CHECKPOINT: str = "tiny_llama"  # a Llama's folder, such as an exported run
    TEMPERATURE: NonNegative = 0.0  # 0: always the likeliest token; 1: samples as the model says
    SEED: Seed = 0  # of the sampling
    MAX_TOKENS: Count = 28  # of the answer
    SHOWN: Count = 3  # likeliest tokens to print at each step


# %% The pieces of a layer -------------------------------------------------------------------------
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Scales each token's vector to root mean square 1, then each number by its own weight.

    So a layer always sees inputs of the same size (arXiv 1910.07467, eq. 4). x: [T, D].
    """
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rotary_speeds(c: dict) -> np.ndarray:
    """By how many radians each pair of numbers turns from one position to the next: [head_dim / 2].

    The first pair turns fastest (arXiv 2104.09864, section 3.2.2). Llama 3.1 was first trained on
    8,192 tokens. To read 131,072, it slows down the pairs that turn less than four times within
    8,192 positions.
    """
    rope, head_dim = c["rope_parameters"], c["head_dim"]
    speed = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope["rope_type"] == "default":
        return speed
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = speed * rope["original_max_position_embeddings"] / (2 * np.pi)
    unchanged = np.clip((turns - low) / (high - low), 0, 1)  # 1: as fast as before
    return speed * (unchanged + (1 - unchanged) / rope["factor"])


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turns each pair of numbers of x [heads, T, d] by its token's angles [T, d/2].

    The angles grow with the position, so a query times a key depends on how far apart the two
    tokens are. Number i is paired with number i + d/2, as in Hugging Face's checkpoints.
    """
    a, b = np.split(x, 2, axis=-1)
    turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return np.concatenate(turned, axis=-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turns numbers into probabilities along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))  # the maximum: no overflow
    return powers / powers.sum(axis=-1, keepdims=True)


def attention_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """How much each token (row) reads from each token (column): [heads, T, T], rows sum to 1.

    The softmax of query times key (arXiv 1706.03762, eq. 1), over the tokens up to itself.
    """
    T, d = queries.shape[1:]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)  # [heads, T, T]
    mask = np.tri(T, dtype=bool)  # True: column <= row; a token can't read from a later one
    return softmax(np.where(mask, scores, -np.inf))


def attention(x: np.ndarray, w: dict, c: dict, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each token reads from the tokens up to itself, [T, D]; and the weights [heads, T, T]."""
    T, heads, kv_heads = len(x), c["num_attention_heads"], c["num_key_value_heads"]
    q = (x @ w["q_proj"].T).reshape(T, heads, -1).swapaxes(0, 1)  # [heads, T, d]
    k = (x @ w["k_proj"].T).reshape(T, kv_heads, -1).swapaxes(0, 1)  # [kv_heads, T, d]
    v = (x @ w["v_proj"].T).reshape(T, kv_heads, -1).swapaxes(0, 1)
    q, k = rotate(q, angles), rotate(k, angles)
    # heads / kv_heads query heads share a key head and a value head (arXiv 2305.13245)
    k, v = (np.repeat(shared, heads // kv_heads, axis=0) for shared in (k, v))  # [heads, T, d]
    weights = attention_weights(q, k)
    read = weights @ v  # [heads, T, d]
    return read.swapaxes(0, 1).reshape(T, -1) @ w["o_proj"].T, weights


def mlp(x: np.ndarray, w: dict) -> np.ndarray:
    """A network with one hidden layer, for each token by itself: [T, D] (arXiv 2002.05202).

    The gate, silu(z) = z * sigmoid(z), decides how much of each hidden number gets through.
    """
    gate = x @ w["gate_proj"].T  # [T, hidden]
    return (gate / (1 + np.exp(-gate)) * (x @ w["up_proj"].T)) @ w["down_proj"].T


# %% The model -------------------------------------------------------------------------------------
def forward(tokens: Sequence[int], weights: dict, c: dict) -> tuple[np.ndarray, np.ndarray]:
    """The whole model.

    Args:
        tokens: [T] ids.
        weights: the checkpoint's arrays by name.
        c: its config.json.

    Returns:
        Logits [T, V]: row t says what could come after token t. And the attention weights of all
        layers [layers, heads, T, T].
    """
    eps, looks = c["rms_norm_eps"], []
    x = weights["model.embed_tokens.weight"][list(tokens)]  # [T, D]
    angles = np.arange(len(x))[:, None] * rotary_speeds(c)  # [T, head_dim / 2]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        # model.layers.0.self_attn.q_proj.weight -> q_proj
        w = {n.split(".")[-2]: array for n, array in weights.items() if n.startswith(prefix)}
        read, look = attention(rms_norm(x, w["input_layernorm"], eps), w, c, angles)
        x = x + read
        x = x + mlp(rms_norm(x, w["post_attention_layernorm"], eps), w)
        looks.append(look)
    x = rms_norm(x, weights["model.norm.weight"], eps)
    # Some models, such as Llama 3.2 1B, reuse the embedding here.
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])  # [V, D]
    return x @ head.T, np.stack(looks)


def choose(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """The next token, from its logits [V]: sampled, or the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    return int(rng.choice(len(logits), p=softmax(logits.astype(np.float64) / temperature)))


# %% Load, ask, write ------------------------------------------------------------------------------
ASSISTANT = "<|assistant|>"  # the token after which the tiny Llama's answer begins


def load(name: str) -> tuple[dict, dict, Tokenizer]:
    """A checkpoint's weights by name, its config.json, and its tokenizer."""
    folder = find_path(name)
    try:
        c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower type
        raise UserError(
            f"CHECKPOINT={name}: {error}; give a folder with config.json, model.safetensors and "
            "tokenizer.json, such as tiny_llama or what the tool convert_checkpoint writes"
        ) from None
    if c.get("model_type") != "llama" or tokenizer.token_to_id(ASSISTANT) is None:
        raise UserError(
            f"CHECKPOINT={name}: not a tiny Llama; this script knows only its chat template, "
            "inference.py runs every other model"
        )
    return weights, c, tokenizer


def main(arguments: Sequence[str]) -> None:
    c = settings.read(Constants, arguments)
    weights, config, tokenizer = load(c.CHECKPOINT)
    print(f"{sum(array.size for array in weights.values()):,} parameters")
    prompt = f"<|begin_of_text|>{c.QUESTION}{ASSISTANT}"
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    print(f"{len(tokens)} tokens: {'|'.join(map(tokenizer.id_to_token, tokens))}\n")
    if "<|unknown|>" in map(tokenizer.id_to_token, tokens):
        print("note: the model doesn't know the words shown as <|unknown|>, and can't see them\n")

    rng, answer = np.random.default_rng(c.SEED), []
    for _ in range(c.MAX_TOKENS):
        logits = forward([*tokens, *answer], weights, config)[0][-1]  # [V], after the last token
        answer.append(choose(logits, c.TEMPERATURE, rng))
        probs = softmax(logits)  # [V]
        best = np.argsort(-probs)[: c.SHOWN]
        likely = "   ".join(f"{tokenizer.id_to_token(int(i))} {probs[i]:.3f}" for i in best)
        print(f"{tokenizer.id_to_token(answer[-1]):14}   likeliest: {likely}")
        if answer[-1] == config["eos_token_id"]:
            break
    print(f"\nanswer: {tokenizer.decode(answer)}")


if __name__ == "__main__":
    settings.run(main)
