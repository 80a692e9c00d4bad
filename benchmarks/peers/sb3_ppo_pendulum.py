"""Stable-Baselines3's PPO with rl-zoo's Pendulum-v1 settings, one seed; run by against_peers.py."""

import peer
import stable_baselines3
import torch
from sb3_log import Log
from stable_baselines3.common.env_util import make_vec_env

[seed], steps, _ = peer.options()
torch.set_num_threads(1)
clock = peer.Clock()
model = stable_baselines3.PPO(
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
log = Log(clock)
model.learn(steps or 100_000, callback=log)
measured = clock.read()
returns = [peer.judge("Pendulum-v1", lambda obs: model.predict(obs, deterministic=True)[0])]
version = f"Stable-Baselines3 {stable_baselines3.__version__}"
peer.finish(version, model.num_timesteps, measured, returns, [log.rows])
