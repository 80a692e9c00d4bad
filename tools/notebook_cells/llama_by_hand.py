# %% after rms_norm
# A vector ten times as large comes out almost the same.
weight = np.ones(3)
print(rms_norm(np.array([[1.0, 2.0, 3.0]]), weight, 1e-6))
print(rms_norm(np.array([[10.0, 20.0, 30.0]]), weight, 1e-6))

# %% after rotate
# One pair of numbers, (1, 0), at the first four positions: it turns by 1 radian per token.
rotate(np.tile([1.0, 0.0], (1, 4, 1)), np.arange(4)[:, None])

# %% after softmax
softmax(np.array([2.0, 1.0, 0.0]))

# %% after softmax
# en: The model's logits for `-` and `+` are 0.34 apart. How sure is it at `TEMPERATURE` 0.1? And
# en: at 5?
# zh: 模型給 `-` 和 `+` 的 logit 只差 0.34。`TEMPERATURE` 是 0.1 的時候，它有多肯定？是 5 的時候
# zh: 呢？
TEMPERATURE = 1.0

softmax(np.array([0.34, 0.0]) / TEMPERATURE)

# %% after attention_weights
# Three tokens whose queries fit no key better than another: each reads from all up to itself.
attention_weights(np.zeros((1, 3, 2)), np.zeros((1, 3, 2))).round(2)

# %% after attention_weights
# en: Three tokens, one head. The third one's query equals the first one's key, so it reads from
# en: it. Let it read from itself instead. Why can the first token only read from itself?
# zh: 三個 token，一個 head。第三個的 query 和第一個的 key 一樣，所以它讀第一個。讓它改讀自己。第
# zh: 一個 token 為什麼只能讀自己？
keys = np.array([[[4.0, 0.0], [0.0, 4.0], [-4.0, 0.0]]])  # [heads, T, d]
queries = np.array([[[0.0, 4.0], [0.0, 4.0], [4.0, 0.0]]])

attention_weights(queries, keys).round(2)

# %% after mlp
# One token of two numbers, a hidden layer of three.
rng = np.random.default_rng(0)
shapes = {"gate_proj": (3, 2), "up_proj": (3, 2), "down_proj": (2, 3)}
mlp(np.array([[1.0, -1.0]]), {name: rng.normal(size=shape) for name, shape in shapes.items()})

# %% after choose
# Ten tokens sampled from three logits, and the one that's always taken at temperature 0.
rng = np.random.default_rng(0)
logits = np.array([2.0, 1.0, 0.0])
[choose(logits, 1.0, rng) for _ in range(10)], choose(logits, 0.0, rng)

# %% before main
# en: Ask it something else, for example with *gives away 6*, or with a name it has never seen.
# en: Add the first token that it picks to `ANSWER`, and run the cell again: what comes next?
# zh: 換一個問題，例如 *gives away 6*，或是用它沒看過的名字。再把它最可能寫的 token 接到 `ANSWER`
# zh: 後面，重跑一次：接下來是什麼？
QUESTION = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
ANSWER = "<reasoning>8"

weights, config, tokenizer = load("tiny_llama")
text = f"<|begin_of_text|>{QUESTION}{ASSISTANT}{ANSWER}"
tokens = tokenizer.encode(text, add_special_tokens=False).ids
probs = softmax(forward(tokens, weights, config)[0][-1])
for token in np.argsort(-probs)[:5]:
    print(f"{tokenizer.id_to_token(int(token)):14} {probs[token]:.3f}")
