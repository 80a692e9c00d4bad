# %% after Constants
# The first state of an episode: cosine and sine of the angle, and the speed.
runs.start_jax()
ENV.reset(jax.random.key(0)).obs

# %% after value
# An untrained actor: in every state a torque of 0 on average, plus or minus SIGMA_START.
actor, critic = make_networks(Constants(), *jax.random.split(jax.random.key(0)))
obs = ENV.reset(jax.random.key(0)).obs
print("mean and sigma:", policy(actor, obs).loc, policy(actor, obs).scale)
print("value:", value(critic, obs))

# %% after value
# en: Which torques does the untrained policy try? The motor does at most 2, either way. Try
# en: `SIGMA_START` 0.5 and 5: how many of the samples are beyond what the motor can do?
# zh: 沒訓練過的策略會試哪些力矩？馬達最多出到 2，兩個方向都一樣。試試 `SIGMA_START` 0.5 和 5：有
# zh: 多少樣本超過馬達做得到的？
import matplotlib.pyplot as plt

SIGMA_START = 2.0

actor, _ = make_networks(Constants(SIGMA_START=SIGMA_START), *jax.random.split(jax.random.key(0)))
torques = policy(actor, obs).sample(5_000, seed=jax.random.key(1))
plt.figure(figsize=(6, 2.5))
plt.hist(torques, bins=60)
plt.axvline(-MAX_TORQUE)
plt.axvline(MAX_TORQUE)
plt.title(f"sampled torques; {float((abs(torques) > MAX_TORQUE).mean()):.0%} beyond the limits")
plt.show()

# %% after gae
# Two steps at a cost of 1, of which the second is cut off by the time limit: it bootstraps.
costs, values = -jnp.ones((1, 2)), -5 * jnp.ones((1, 2))
cut_off = jnp.array([[False, True]])
gae(costs, values, values, jnp.zeros_like(cut_off), cut_off, 0.98, 0.85)

# %% after policy_loss
# en: Ten torques were sampled; the new policy gives each of them `STEP` nats more
# en: log-probability. How large may the step be before the clip holds it back? Is it the same if
# en: the advantage is negative?
# zh: 抽了十個力矩，新的策略給每一個的 log 機率都多了 `STEP` nat。這一步要多大，裁剪才會擋下來？
# zh: 優勢是負的時候，也一樣嗎？
STEP, ADVANTAGE = 0.1, 1.0

old = jnp.full(10, -1.5)
loss, slope = jax.value_and_grad(policy_loss)(old + STEP, old, jnp.full(10, ADVANTAGE), 0.2)
print(f"loss {float(loss):.3f}; slope by the first log-prob {float(slope[0]):.3f}")

# %% before main
# en: A short run of two seeds. Replace the clip (`CLIP_EPSILON=1e9`) by the KL penalty
# en: (`BETA=1`). Does the pendulum learn with neither of them?
# zh: 兩個種子，短短地跑一次。把裁剪（`CLIP_EPSILON=1e9`）換成 KL 懲罰（`BETA=1`）。兩個都不要，
# zh: 還學得起來嗎？
c = Constants(NUM_STEPS=30_000, NUM_SEEDS=2, CLIP_EPSILON=0.2, BETA=0.0)

agents, log, _ = train(c)
notebook_tables.log(log)
