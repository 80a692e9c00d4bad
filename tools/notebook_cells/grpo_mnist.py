# %% after Constants
# Ten of the images, and what they show.
import matplotlib.pyplot as plt

runs.start_jax(one_thread=False)
data, source = mnist.read_mnist("subset", "")
print(source)
figure, axes = plt.subplots(1, 10, figsize=(8, 1.2))
for ax, image, label in zip(axes, data.images, data.labels):
    ax.imshow(image.reshape(28, 28), cmap="gray_r")
    ax.set(title=int(label), xticks=[], yticks=[])
plt.show()

# %% after policy
# What an untrained network says about the first image: a chance for each of the ten digits.
untrained = MLP(mnist.NUM_PIXELS, 128, mnist.NUM_DIGITS, nnx.Rngs(0))
policy(untrained, env.pixels(jnp.asarray(data.images[0]))).probs_parameter().round(2)

# %% after group_advantage
# One of four guesses is right.
group_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]]))

# %% after group_advantage
# en: Let two, three and all four guesses be right. How much is a right guess worth in each
# en: group? What's a group with no right guess good for?
# zh: 讓兩個、三個、四個都猜對。在每一組裡，一次猜對值多少？全部猜錯的一組，有什麼用？
rewards = jnp.array(
    [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 0.0],
    ]
)

group_advantage(rewards)

# %% after has_signal
has_signal(jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))

# %% after k3
# en: The reference gives a guess 10 %, the policy gives it `PI`. What does k3 say if `PI` is
# en: 0.1, 0.2 and 0.9? And 0.001? Which of these hurts most?
# zh: 參考模型給一個答案 10 %，策略給它 `PI`。`PI` 是 0.1、0.2、0.9 的時候，k3 各是多少？0.001 呢？
# zh: 哪一個罰得最重？
PI = 0.2

print(f"k3 = {float(k3(jnp.log(PI), jnp.log(0.1))):.3f}")

# %% before main
# en: Three epochs of two seeds. Take two guesses for each image (`NUM_GENERATIONS=2`), or none
# en: of the KL (`BETA=0.0`). Watch `zero_variance`, the share of groups that teach nothing.
# zh: 兩個種子，各三個 epoch。每張圖只猜兩次（`NUM_GENERATIONS=2`），或是不要 KL（`BETA=0.0`）。
# zh: 注意 `zero_variance`：什麼也教不了的群組佔多少。
c = Constants(NUM_EPOCHS=3, NUM_SEEDS=2, NUM_GENERATIONS=8, BETA=0.1)

agents, log, _ = train(c, data, make_agent, update)
notebook_tables.log(log)
