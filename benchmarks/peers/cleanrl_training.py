"""CleanRL's DQN or PPO as it is, in one of its scripts, one seed; run by against_peers.py.

ENV=CartPole-v1 runs dqn_jax.py with the settings of its file (500,000 steps). ENV=Pendulum-v1 runs
ppo_continuous_action.py (torch; it has none in JAX) and has no settings of its own: those of the
file (for MuJoCo) but 100,000 steps instead of a million. CHECKOUT is a clone of
github.com/vwxyzjn/cleanrl; the other arguments are in peer.py.
"""

import contextlib
import importlib
import re
import runpy
import sys
import tempfile
from collections import deque

import gymnasium
import jax
import numpy as np
import peer
import torch

WINDOW = 20  # episodes whose mean is a row of the log, as CleanRL smooths its own curves


class Printed:
    """Standard output of the script: each line with the seconds at which it came."""

    def __init__(self):
        self.started, self.text, self.lines = peer.clocks(), "", []

    def write(self, text: str) -> int:
        *lines, self.text = (self.text + text).split("\n")
        self.lines += [((peer.clocks() - self.started)[0].item(), line) for line in lines]
        return len(text)

    def flush(self) -> None:
        pass


env, [seed], steps, checkout = peer.options()
version = f"CleanRL {peer.commit(checkout)}"
torch.set_num_threads(1)
arguments = [f"--seed={seed}", f"--env-id={env}"]
if env == "CartPole-v1":
    name = "dqn_jax.py"
    arguments += [f"--total-timesteps={steps}", f"--learning-starts={steps // 2}"] if steps else []
else:
    name = "ppo_continuous_action.py"
    arguments.append(f"--total-timesteps={steps or 100_000}")
sys.path.insert(0, str(checkout))  # for its package cleanrl_utils
sys.argv = [name, *arguments]
for module in ("flax", "optax", "tyro", "torch.utils.tensorboard"):
    importlib.import_module(module)  # before the clock starts
with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    printed = Printed()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(checkout / "cleanrl" / name), run_name="__main__")
    measured = peer.clocks() - printed.started
# (environment step, seconds, mean return of the last episodes)
rows, last = [], deque(maxlen=WINDOW)
for seconds, line in printed.lines:
    if found := re.match(r"global_step=(\d+), episodic_return=\[?([-\d.e+]+)", line):
        last.append(float(found[2]))
        if len(last) == WINDOW:
            rows.append((int(found[1]), seconds, sum(last) / WINDOW))

if env == "CartPole-v1":
    env_steps = names["args"].total_timesteps
    greedy = jax.jit(
        lambda obs: names["q_network"].apply(names["q_state"].params, obs).argmax(axis=-1)
    )
else:
    env_steps = names["global_step"]
    wrapper = names["envs"].envs[0]  # one of its wrappers normalizes the observations
    while not isinstance(wrapper, gymnasium.wrappers.NormalizeObservation):
        wrapper = wrapper.env
    mean, std = wrapper.obs_rms.mean, np.sqrt(wrapper.obs_rms.var + wrapper.epsilon)

    def greedy(obs):
        """The mean of the policy's distribution, cut to the torque's range."""
        with torch.no_grad():
            action = names["agent"].actor_mean(torch.Tensor(np.clip((obs - mean) / std, -10, 10)))
        return np.clip(action.numpy(), -2, 2)


peer.finish(version, env_steps, measured, [peer.judge(env, greedy)], [rows])
