"""purejaxrl's dqn.py as it is, with the settings of its file, all seeds in one program.

CHECKOUT is a clone of github.com/luchris429/purejaxrl. Its log: the mean of the last episodes of its ten
environments, with exploration. Run by against_peers.py, see peer.py.
"""

import sys

import jax
import jax.numpy as jnp
import peer

seeds, steps, checkout = peer.options()
sys.path.insert(0, str(checkout / "purejaxrl"))
import dqn

config = peer.config_of(checkout / "purejaxrl" / "dqn.py")
if steps:
    config |= {"TOTAL_TIMESTEPS": steps, "LEARNING_STARTS": steps // 2}
rngs = jax.vmap(jax.random.PRNGKey)(jnp.array(seeds))
trained, measured, compile_seconds = peer.trained(dqn.make_train(config), rngs)
metrics = trained["metrics"]  # [seeds, iterations]
env_steps = int(metrics["timesteps"].max())
every = slice(None, None, 100)  # of 50,000 rows
curves = [
    peer.evenly(measured, compile_seconds, env_steps, at[every], returns[every])
    for at, returns in zip(metrics["timesteps"], metrics["returns"])
]


@jax.jit
def greedy(params, obs):
    return dqn.QNetwork(action_dim=2).apply(params, obs).argmax(axis=-1)


params = trained["runner_state"][0].params
policies = [jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], params) for i in range(len(seeds))]
eval_return = [
    peer.judge("CartPole-v1", lambda obs, params=params: greedy(params, obs)) for params in policies
]
peer.finish(f"purejaxrl {peer.commit(checkout)}", env_steps, measured, eval_return, curves, compile_seconds)
