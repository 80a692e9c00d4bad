# %% after Constants
# The first state of an episode, and what one push to the right makes of it.
runs.start_jax()
state = env.reset(jax.random.key(0))
print("position, speed, angle, angular speed:", state.obs)
print("after a push to the right:            ", env.step(state, jnp.int32(1))[0].obs)

# %% after epsilon_at
{step: float(epsilon_at(Constants(), step)) for step in (0, 5_000, 10_000, 50_000)}

# %% after select_action
# en: The network values left at 9 and right at 12. How many of 1,000 pushes go left with
# en: `EPSILON` 0.1? And with 1.0?
# zh: 網路給左邊 9 分、右邊 12 分。`EPSILON` 是 0.1 的時候，一千次裡有幾次推左邊？1.0 呢？
EPSILON = 0.1

keys = jax.random.split(jax.random.key(0), 1000)
pushes = jax.vmap(lambda key: select_action(jnp.array([9.0, 12.0]), EPSILON, key))(keys)
dict(zip(("left", "right"), jnp.bincount(pushes, length=2).tolist()))

# %% after add
# A buffer for three transitions, and five of them, with the rewards 1 to 5: two get lost.
state = env.reset(jax.random.key(0))
_, transition = env.step(state, jnp.int32(1))
rows = jax.tree.map(lambda x: jnp.zeros((3, *jnp.shape(x)), jnp.result_type(x)), transition)
buffer = ReplayBuffer(rows, jnp.int32(0))
for reward in range(1, 6):
    buffer = add(buffer, transition._replace(reward=jnp.float32(reward)))
    print(f"{int(buffer.count)} added, in the buffer: {buffer.rows.reward}")

# %% after td_target
# en: The target network says that the next state is worth 20. What does the target become if the
# en: pole falls now (`terminated=1`)? With `GAMMA=0.5`? And what if you forget that it fell?
# zh: 目標網路說，下一個狀態值 20。桿子這一步就倒了（`terminated=1`），目標是多少？`GAMMA=0.5` 呢？
# zh: 忘了它已經倒了，又會怎樣？
GAMMA, next_q = 0.99, 20.0

for terminated in (0, 1):
    target = td_target(jnp.float32(1), jnp.float32(terminated), jnp.float32(next_q), GAMMA)
    print(f"{terminated=}: the value should have been {float(target):.2f}")

# %% before main
# en: A short run of two seeds. Which is steadier, `N_STEPS=1` or `N_STEPS=5`? What happens
# en: without a target network (`TARGET_SYNC_INTERVAL=2`), and without replay
# en: (`REPLAY_CAPACITY=5`)?
# zh: 兩個種子，短短地跑一次。`N_STEPS=1` 和 `N_STEPS=5`，哪個比較穩？等於沒有目標網路（
# zh: `TARGET_SYNC_INTERVAL=2`）會怎樣？等於沒有重播緩衝區（`REPLAY_CAPACITY=5`）呢？
import matplotlib.pyplot as plt

c = Constants(NUM_STEPS=15_000, NUM_SEEDS=2, N_STEPS=5, TARGET_SYNC_INTERVAL=250)

agents, log, _ = train(c)
plt.figure(figsize=(6, 2.5))
plt.plot(log.env_step[0], log.eval_return.T)
plt.xlabel("environment steps")
plt.title("return of the greedy policy, a line per seed")
plt.show()
