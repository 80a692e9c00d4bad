"""The learning curve of a Stable-Baselines3 run: its ep_rew_mean, over the last 100 episodes of training."""

from stable_baselines3.common.callbacks import BaseCallback


class Log(BaseCallback):
    """Rows (environment step, seconds, ep_rew_mean), one per rollout."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.rows = clock, []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        if len(returns) == 100:
            self.rows.append((self.num_timesteps, self.clock.read()["seconds"], float(sum(returns)) / 100))
