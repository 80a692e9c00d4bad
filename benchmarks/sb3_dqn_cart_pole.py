"""Stable-Baselines3's DQN with rl-zoo's CartPole-v1 settings; run by against_peers.py in an environment
of its own. Argument: a seed. Last line: a JSON object."""

import json
import sys
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN

seed = int(sys.argv[1])
torch.set_num_threads(1)
started = time.perf_counter()
model = DQN(
    "MlpPolicy",
    gymnasium.make("CartPole-v1"),
    learning_rate=2.3e-3,
    batch_size=64,
    buffer_size=100_000,
    learning_starts=1_000,
    gamma=0.99,
    target_update_interval=10,
    train_freq=256,
    gradient_steps=128,
    exploration_fraction=0.16,
    exploration_final_eps=0.04,
    policy_kwargs={"net_arch": [256, 256]},
    seed=seed,
    device="cpu",
)
model.learn(50_000)
seconds = time.perf_counter() - started

returns = []
env = gymnasium.make("CartPole-v1")
for episode in range(100):
    obs, _ = env.reset(seed=episode)
    total, ended = 0.0, False
    while not ended:
        action, _ = model.predict(obs, deterministic=True)
        obs, reward, terminated, truncated, _ = env.step(int(action))
        total, ended = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps({"seconds": seconds, "compile_seconds": 0.0, "eval_return": [np.mean(returns)]}))
