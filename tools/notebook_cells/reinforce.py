# %% after Constants
# The first state of an episode: the cart's position and speed, the pole's angle and its speed.
runs.start_jax()
ENV.reset(jax.random.key(0)).obs

# %% after value
# An untrained actor and critic, and what they say about the first state.
actor, critic = make_networks(Constants(), *jax.random.split(jax.random.key(0)))
obs = ENV.reset(jax.random.key(0)).obs
print("left, right:", policy(actor, obs).probs_parameter())
print("value:", value(critic, obs, jnp.int32(0)))

# %% after discounted_returns
# An episode of four steps, with a reward of 1 for each.
discounted_returns(jnp.ones((1, 4)), 0.5)

# %% after discounted_returns
# en: The reward comes only with the last of 50 steps. How much credit does the first step get?
# en: Try `GAMMA` 0.9, 0.99 and 1.0.
# zh: 五十步裡，只有最後一步有獎勵。第一步分到多少功勞？試試 `GAMMA` 0.9、0.99 和 1.0。
import matplotlib.pyplot as plt

GAMMA = 0.9

reward = jnp.zeros((1, 50)).at[0, -1].set(1.0)
plt.figure(figsize=(6, 2.5))
plt.plot(discounted_returns(reward, GAMMA)[0])
plt.xlabel("step")
plt.title("return from this step on")
plt.show()

# %% after batch_mean
# en: Three episodes; the second ends after two steps. What's subtracted at each step? Let the
# en: third one earn more. Which actions are called bad then?
# zh: 三個回合，第二個走兩步就結束。每一步減掉的是多少？讓第三個回合多拿一點，這時哪些動作會變成
# zh: 不好的？
import types

rewards = jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
alive = jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])

returns = discounted_returns(rewards, 1.0)
baseline = batch_mean(types.SimpleNamespace(alive=alive), returns, None)
print("returns\n", returns)
print("baseline\n", baseline)
print("advantage\n", alive * (returns - baseline))

# %% before main
# en: A short run of two seeds. Take the baseline away (`BASELINE="no_baseline"`), or credit
# en: every action with the whole return (`REWARD_TO_GO=False`). How do the curves change?
# zh: 兩個種子，短短地跑一次。把基準線拿掉（`BASELINE="no_baseline"`），或是讓每個動作都分到整個
# zh: 回合的報酬（`REWARD_TO_GO=False`），曲線會怎麼變？
c = Constants(NUM_STEPS=40_000, NUM_SEEDS=2, BASELINE="critic_baseline", REWARD_TO_GO=True)

agents, log, _ = train(c)
plt.figure(figsize=(6, 2.5))
plt.plot(log.env_step.T, log.episode_return.T)
plt.xlabel("environment steps")
plt.title("return of the sampled actions, a line per seed")
plt.show()
