"""purejaxrl's ppo_continuous_action.py on gymnax' Pendulum-v1, all seeds in one program.

It has no settings for Pendulum: those of its file stay but for the 2,048 environments and 50 million steps
that are meant for Brax on a GPU; here 16 environments x 128 steps and 100,000 steps. Its tasks come from
Brax, with actions from -1 to 1; `Pendulum` below puts gymnax' there. Its log: the mean of the episodes that
ended in an iteration, with exploration. CHECKOUT is a clone of github.com/luchris429/purejaxrl. Run by
against_peers.py, see peer.py.
"""

import sys

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import peer

seeds, steps, checkout = peer.options()
sys.path.insert(0, str(checkout / "purejaxrl"))
import ppo_continuous_action as ppo

MAX_TORQUE = 2.0


class Pendulum:
    """What BraxGymnaxWrapper makes of a Brax task, of gymnax' Pendulum-v1: actions from -1 to 1."""

    def __init__(self, name):
        self.env, self.params = gymnax.make(name)

    def reset(self, key, params=None):
        return self.env.reset(key, self.params)

    def step(self, key, state, action, params=None):
        return self.env.step(key, state, MAX_TORQUE * action, self.params)

    def observation_space(self, params):
        return self.env.observation_space(self.params)

    def action_space(self, params):
        return self.env.action_space(self.params)


ppo.BraxGymnaxWrapper = Pendulum
config = peer.config_of(checkout / "purejaxrl" / "ppo_continuous_action.py")
config |= {"ENV_NAME": "Pendulum-v1", "NUM_ENVS": 16, "NUM_STEPS": 128, "DEBUG": False}
config |= {"TOTAL_TIMESTEPS": steps or 100_000}
rngs = jax.vmap(jax.random.PRNGKey)(jnp.array(seeds))
trained, measured, compile_seconds = peer.trained(ppo.make_train(config), rngs)

info = {name: np.asarray(value) for name, value in trained["metrics"].items()}  # [seeds, iterations, T, N]
iterations = info["returned_episode"].shape[1]
iteration = config["NUM_ENVS"] * config["NUM_STEPS"]
env_steps = iterations * iteration
curves = []
for ended, returns in zip(info["returned_episode"], info["returned_episode_returns"]):
    with_episodes = [i for i in range(iterations) if ended[i].any()]
    at = [iteration * (i + 1) for i in with_episodes]
    means = [returns[i][ended[i]].mean() for i in with_episodes]
    curves.append(peer.evenly(measured, compile_seconds, env_steps, at, means))


@jax.jit
def greedy(params, mean, var, obs):
    """The mean of the policy's distribution, as torque."""
    policy, _ = ppo.ActorCritic(1).apply(params, (obs - mean) / jnp.sqrt(var + 1e-8))
    return MAX_TORQUE * jnp.clip(policy.mean(), -1, 1)


train_state, env_state = trained["runner_state"][:2]
observations = env_state.env_state  # below the rewards' statistics; equal rows [seeds, N, 3]
eval_return = []
for i in range(len(seeds)):
    params = jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], train_state.params)
    mean, var = observations.mean[i, 0], observations.var[i, 0]
    policy = jax.tree_util.Partial(greedy, params, mean, var)
    eval_return.append(peer.judge("Pendulum-v1", policy))
peer.finish(f"purejaxrl {peer.commit(checkout)}", env_steps, measured, eval_return, curves, compile_seconds)
