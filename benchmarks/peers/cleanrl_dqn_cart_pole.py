"""CleanRL's dqn_jax.py as it is, with the settings of its file (CartPole-v1, 500,000 steps), one seed.

CHECKOUT is a clone of github.com/vwxyzjn/cleanrl. Run by against_peers.py, see peer.py.
"""

import cleanrl_script
import jax
import peer
import torch

[seed], steps, checkout = peer.options()
torch.set_num_threads(1)
arguments = [f"--seed={seed}"]
if steps:
    arguments += [f"--total-timesteps={steps}", f"--learning-starts={steps // 2}"]
imports = ["flax", "gymnasium", "jax", "optax", "tyro", "torch.utils.tensorboard"]
names, measured, rows, version = cleanrl_script.run(checkout, "dqn_jax.py", arguments, imports)
greedy = jax.jit(lambda obs: names["q_network"].apply(names["q_state"].params, obs).argmax(axis=-1))
eval_return = [peer.judge("CartPole-v1", greedy)]
peer.finish(version, names["args"].total_timesteps, measured, eval_return, [rows])
