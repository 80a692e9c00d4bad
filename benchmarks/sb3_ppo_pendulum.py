"""Stable-Baselines3's PPO with rl-zoo's Pendulum-v1 settings (100,000 steps); run by against_peers.py in an
environment of its own. Argument: a seed. Last line: a JSON object."""

import json
import sys
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

seed = int(sys.argv[1])
torch.set_num_threads(1)
started = time.perf_counter()
model = PPO(
    "MlpPolicy",
    make_vec_env("Pendulum-v1", n_envs=4, seed=seed),
    n_steps=1024,
    gamma=0.9,
    gae_lambda=0.95,
    n_epochs=10,
    ent_coef=0.0,
    learning_rate=1e-3,
    clip_range=0.2,
    use_sde=True,
    sde_sample_freq=4,
    seed=seed,
    device="cpu",
)
model.learn(100_000)
seconds = time.perf_counter() - started

returns = []
env = gymnasium.make("Pendulum-v1")
for episode in range(100):
    obs, _ = env.reset(seed=episode)
    total, ended = 0.0, False
    while not ended:
        action, _ = model.predict(obs, deterministic=True)
        obs, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps({"seconds": seconds, "compile_seconds": 0.0, "eval_return": [np.mean(returns)]}))
