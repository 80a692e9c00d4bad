# %% after Constants
# The first state of an episode: the cart's position and speed, the pole's angle and its speed.
runs.start_jax()
ENV.reset(jax.random.key(0)).obs

# %% after value
# An untrained actor and critic, and what they say about the first state.
actor, critic = make_networks(Constants(), *jax.random.split(jax.random.key(0)))
obs = ENV.reset(jax.random.key(0)).obs
print("left, right:", policy(actor, obs).probs_parameter())
print("value:", value(critic, obs))

# %% after gae
# Three steps with a reward of 1, a critic that always says 5, and a fall at the last step.
ones = jnp.ones((1, 3))
falls = jnp.array([[False, False, True]])
gae(ones, 5 * ones, 5 * ones, falls, jnp.zeros_like(falls), 0.99, 0.95)

# %% after gae
# en: A surprise at step 30 of 50: a reward of 1 that the critic didn't expect. How far back does
# en: it reach? Try `LAMBDA` 0, 0.95 and 1.
# zh: 五十步裡的第 30 步，來了一個 critic 沒料到的獎勵。它往回傳多遠？試試 `LAMBDA` 0、0.95 和 1。
import matplotlib.pyplot as plt

GAMMA, LAMBDA = 0.99, 0.8

zeros, never = jnp.zeros((1, 50)), jnp.zeros((1, 50), bool)
advantage = gae(zeros.at[0, 30].set(1.0), zeros, zeros, never, never, GAMMA, LAMBDA)
plt.figure(figsize=(6, 2.5))
plt.bar(range(50), advantage[0])
plt.xlabel("step")
plt.title("advantage")
plt.show()

# %% after normalized
normalized(jnp.array([-1.0, 0.0, 1.0, 8.0]))

# %% after clipped_objective
# en: The objective for a good action (`A=1`). Where is it flat, and what's the slope there? Now
# en: take a bad action, `A=-1`, and then `EPSILON=0.5`.
# zh: 好的動作（`A=1`）的目標函數。哪裡是平的？那裡的斜率是多少？再換成壞的動作 `A=-1`，以及
# zh: `EPSILON=0.5`。
A, EPSILON = 1.0, 0.2

ratio = jnp.linspace(0, 2, 201)
plt.figure(figsize=(6, 2.5))
plt.plot(ratio, clipped_objective(ratio, A, EPSILON))
plt.xlabel("ratio")
plt.title("objective")
plt.show()

# %% before main
# en: A short run of two seeds. Switch the clip off (`CLIP_EPSILON=1e9`), and then make more of
# en: each rollout (`NUM_EPOCHS=50`). Look at the return and at `approx_kl`.
# zh: 兩個種子，短短地跑一次。把裁剪關掉（`CLIP_EPSILON=1e9`），再把每批資料多用幾次（
# zh: `NUM_EPOCHS=50`）。看看報酬，也看看 `approx_kl`。
c = Constants(NUM_STEPS=30_000, NUM_SEEDS=2, CLIP_EPSILON=0.2, NUM_EPOCHS=10)

agents, log, _ = train(c)
notebook_tables.log(log)
