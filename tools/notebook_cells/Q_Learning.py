# %% after Constants
# Two moves from square 14, next to the goal: a bump into the wall, and the move that wins.
c = Constants()
for action in (1, 3):
    next_state, reward, terminated = grid.step(c, 14, action)
    print(f"14, {grid.ACTIONS[action]:5} -> {next_state}, {reward:g} points, {terminated=}")

# %% after epsilon_at
{episode: epsilon_at(Constants(), episode) for episode in (0, 5_000, 10_000, 20_000)}

# %% after epsilon_at
# en: Halve `DECAY_EPISODES`, then set `EPSILON_END=0.5`. Which run explores more?
# zh: 把 `DECAY_EPISODES` 減半；再設 `EPSILON_END=0.5`。哪一次探索得多？
import matplotlib.pyplot as plt

c = Constants(EPSILON_END=0.01, DECAY_EPISODES=10_000)

episodes = range(0, c.NUM_EPISODES, 100)
plt.figure(figsize=(6, 2.5))
plt.plot(episodes, [epsilon_at(c, episode) for episode in episodes])
plt.xlabel("episode")
plt.title("chance of a random action")
plt.show()

# %% after select_action
# In 1,000 choices with epsilon 0.4, how often is each move taken? The third is the best.
rng = np.random.default_rng(0)
taken = [select_action(0, np.array([[1.0, 2.0, 9.0, 3.0]]), 0.4, rng) for _ in range(1000)]
dict(zip(grid.ACTIONS, np.bincount(taken, minlength=4).tolist()))

# %% after q_update
# A table of zeros. From square 14, the move to the right reaches the goal.
Q = np.zeros((16, 4))
q_update(Q, 14, 3, 100.0, 15, True, 0.1, 0.99)
Q[14]

# %% after q_update
# en: A move from square 14 to the goal earns 100. How fast does its value get there? Guess what
# en: `ALPHA=1.0` does, and `ALPHA=0.01`.
# zh: 從第 14 格走進終點，得 100 分。這一步的價值多快會接近 100？先猜一猜 `ALPHA=1.0` 和
# zh: `ALPHA=0.01` 會怎樣。
ALPHA = 0.1

Q = np.zeros((16, 4))
for visit in range(1, 31):
    q_update(Q, 14, 3, 100.0, 15, True, ALPHA, 0.99)
    if visit in (1, 2, 3, 10, 30):
        print(f"after {visit:2} visits: {Q[14, 3]:7.2f}")

# %% before main
# en: A short run of the whole thing. Does it still find the way with 100 episodes? With
# en: `EPSILON_START=EPSILON_END=0`? On a grid of `SIZE=6`?
# zh: 短短地整個跑一次。只給 100 回合，還找得到路嗎？`EPSILON_START` 和 `EPSILON_END` 都設成 0 呢？
# zh: 換成 `SIZE=6` 的網格呢？
c = Constants(NUM_EPISODES=500, DECAY_EPISODES=250, ALPHA=0.5, SIZE=4, PRINT_EVERY=0)

Q, log, _ = train(c, np.random.default_rng(c.SEED))
print(pictures.policy_text(Q))
print(f"shortest way from every state: {grid.optimal_from_every_state(c, Q)}")
plt.figure(figsize=(6, 2.5))
plt.plot(log[:, 0], log[:, 2])
plt.xlabel("episode")
plt.title("return")
plt.show()
