"""CleanRL's ppo_continuous_action.py (torch; it has none in JAX) as it is, on Pendulum-v1, one seed.

It has no settings for Pendulum: those of its file (for MuJoCo) but 100,000 steps instead of a million.
CHECKOUT is a clone of github.com/vwxyzjn/cleanrl. Run by against_peers.py, see peer.py.
"""

import cleanrl_script
import gymnasium
import numpy as np
import peer
import torch

[seed], steps, checkout = peer.options()
torch.set_num_threads(1)
arguments = [f"--seed={seed}", "--env-id=Pendulum-v1", f"--total-timesteps={steps or 100_000}"]
imports = ["gymnasium", "tyro", "torch.utils.tensorboard"]
names, measured, rows, version = cleanrl_script.run(checkout, "ppo_continuous_action.py", arguments, imports)

env = names["envs"].envs[0]  # its wrappers hold the statistics that observations are normalized with
while not isinstance(env, gymnasium.wrappers.NormalizeObservation):
    env = env.env
mean, var = env.obs_rms.mean, env.obs_rms.var


def greedy(obs):
    """The mean of the policy's distribution, cut to the torque's range."""
    obs = np.clip((obs - mean) / np.sqrt(var + env.epsilon), -10, 10)
    with torch.no_grad():
        return np.clip(names["agent"].actor_mean(torch.Tensor(obs)).numpy(), -2, 2)


peer.finish(version, names["global_step"], measured, [peer.judge("Pendulum-v1", greedy)], [rows])
