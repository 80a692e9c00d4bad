# %% after group_advantage
# Four answers to one question. The best one is far above the group's mean.
import types

group_advantage(types.SimpleNamespace(rewards=np.array([[9.5, 4.0, 4.0, 0.0]])))

# %% after group_advantage
# en: Eight answers in two groups. What's an advantage worth if all eight earn 4? And if one
# en: answer in a group earns 100?
# zh: 兩組，一共八個回答。八個都拿 4 分，優勢是多少？一組裡有一個拿 100 分呢？
rewards = np.array(
    [
        [9.5, 9.5, 4.0, 0.0],
        [4.0, 4.0, 4.0, 4.0],
    ]
)

group_advantage(types.SimpleNamespace(rewards=rewards)).round(2)

# %% after group_advantage
# en: What does an answer earn? Break this one, one thing at a time: another number, a missing
# en: tag, a space before the number, a word after the last tag.
# zh: 一個回答拿幾分？一次改壞一個地方：換一個數字、少一個標籤、數字前多一個空格、最後一個標籤後
# zh: 面多一個字。
ANSWER = "<reasoning>8-6=2,2+5=7</reasoning><answer>7</answer>"

functions = (
    reward_func.match_format_exactly,
    reward_func.match_format_approximately,
    reward_func.check_answer,
    reward_func.check_numbers,
)
points = {f.__name__: f(prompts=[""], completions=[ANSWER], answer=["7"])[0] for f in functions}
points | {"all": sum(points.values())}

# %% after mean_of_answers
# One group, an answer of two tokens and one of four: each answer counts a half.
mean_of_answers(np.array([[[1, 1, 0, 0], [1, 1, 1, 1]]], bool))

# %% after clipped_objective
# en: The objective of one token. Where is it flat, so that the token isn't pushed any more? Take
# en: a negative advantage, and then `EPSILON=0.5`.
# zh: 一個 token 的目標函數。哪裡是平的，也就是不再推它？換成負的優勢，再換成 `EPSILON=0.5`。
import matplotlib.pyplot as plt

ADVANTAGE, EPSILON = 1.0, 0.2

ratio = jnp.linspace(0.01, 2, 200)
objective, _ = clipped_objective(
    types.SimpleNamespace(log_prob=jnp.log(ratio)),
    types.SimpleNamespace(old_log_prob=0.0, advantage=ADVANTAGE),
    types.SimpleNamespace(EPSILON=EPSILON),
)
plt.figure(figsize=(6, 2.5))
plt.plot(ratio, objective)
plt.xlabel("ratio")
plt.title("objective")
plt.show()

# %% after k3
# The reference gives a token 1, 2 and 10 times the policy's probability.
k3(jnp.log(jnp.array([1.0, 2.0, 10.0])))
