"""Stable-Baselines3's DQN or PPO with rl-zoo's settings, one seed; run by against_peers.py.

ENV=CartPole-v1 or Pendulum-v1; the other arguments are in peer.py.
"""

import gymnasium
import peer
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


class Log(BaseCallback):
    """Rows (environment step, seconds, ep_rew_mean of the last 100 episodes of training), one per
    rollout.
    """

    def __init__(self):
        super().__init__()
        self.started, self.rows = peer.clocks(), []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        if len(returns) == 100:
            seconds = (peer.clocks() - self.started)[0].item()
            self.rows.append((self.num_timesteps, seconds, float(sum(returns)) / 100))


env, [seed], steps, _ = peer.options()
torch.set_num_threads(1)
log = Log()
if env == "CartPole-v1":
    steps = steps or 50_000
    model = stable_baselines3.DQN(
        "MlpPolicy",
        gymnasium.make(env),
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
else:
    steps = steps or 100_000
    model = stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env(env, n_envs=4, seed=seed),
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
model.learn(steps, callback=log)
measured = peer.clocks() - log.started
returns = [peer.judge(env, lambda obs: model.predict(obs, deterministic=True)[0])]
version = f"Stable-Baselines3 {stable_baselines3.__version__}"
peer.finish(version, model.num_timesteps, measured, returns, [log.rows])
