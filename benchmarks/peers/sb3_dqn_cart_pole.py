"""Stable-Baselines3's DQN with rl-zoo's CartPole-v1 settings, one seed; run by against_peers.py."""

import gymnasium
import peer
import stable_baselines3
import torch
from sb3_log import Log

[seed], steps, _ = peer.options()
torch.set_num_threads(1)
clock = peer.Clock()
model = stable_baselines3.DQN(
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
log = Log(clock)
model.learn(steps or 50_000, callback=log)
measured = clock.read()
returns = [peer.judge("CartPole-v1", lambda obs: model.predict(obs, deterministic=True)[0])]
version = f"Stable-Baselines3 {stable_baselines3.__version__}"
peer.finish(version, model.num_timesteps, measured, returns, [log.rows])
