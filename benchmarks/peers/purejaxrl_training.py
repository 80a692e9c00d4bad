"""purejaxrl's dqn.py or ppo_continuous_action.py, all seeds in one program; run by
against_peers.py.

ENV=CartPole-v1 runs dqn.py as it is, with the settings of its file. Its log: the mean of the last
episodes of its ten environments, with exploration.

ENV=Pendulum-v1 runs ppo_continuous_action.py, which has no settings for Pendulum: those of its file
stay but for the 2,048 environments and 50 million steps that are meant for Brax on a GPU; here 16
environments x 128 steps and 100,000 steps. Its tasks come from Brax, with actions from -1 to 1;
`Pendulum` below puts gymnax' there. Its log: the mean of the episodes that ended in an iteration,
with exploration.

CHECKOUT is a clone of github.com/luchris429/purejaxrl; the other arguments are in peer.py.
"""

import ast
import importlib
import sys
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import peer

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


def config_of(source: str) -> dict[str, Any]:
    """The settings of a script that has them as `config = {...}`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "config":
            return ast.literal_eval(node.value)
    raise ValueError("no `config = {...}`")


env, seeds, steps, checkout = peer.options()
version = f"purejaxrl {peer.commit(checkout)}"
sys.path.insert(0, str(checkout / "purejaxrl"))
name = "dqn" if env == "CartPole-v1" else "ppo_continuous_action"
script = importlib.import_module(name)
config = config_of((checkout / "purejaxrl" / f"{name}.py").read_text())
if name == "dqn":
    config |= {"TOTAL_TIMESTEPS": steps, "LEARNING_STARTS": steps // 2} if steps else {}
else:
    script.BraxGymnaxWrapper = Pendulum
    config |= {"ENV_NAME": env, "NUM_ENVS": 16, "NUM_STEPS": 128, "DEBUG": False}
    config["TOTAL_TIMESTEPS"] = steps or 100_000
rngs = jax.vmap(jax.random.PRNGKey)(jnp.array(seeds))
trained, measured, compile_seconds = peer.trained(script.make_train(config), rngs)
# [seeds, iterations, ...]
metrics = {key: np.asarray(value) for key, value in trained["metrics"].items()}
train_state, env_state = trained["runner_state"][:2]

if name == "dqn":
    env_steps = metrics["timesteps"].max()
    every = slice(None, None, 100)  # of 50,000 rows
    logs = [
        (at[every], returns[every]) for at, returns in zip(metrics["timesteps"], metrics["returns"])
    ]
    policies = train_state.params

    @jax.jit
    def greedy(params, obs):
        return script.QNetwork(action_dim=2).apply(params, obs).argmax(axis=-1)
else:
    iteration = config["NUM_ENVS"] * config["NUM_STEPS"]
    env_steps = metrics["returned_episode"].shape[1] * iteration
    logs = []
    for ended, returns in zip(metrics["returned_episode"], metrics["returned_episode_returns"]):
        some = [i for i, of_iteration in enumerate(ended) if of_iteration.any()]
        logs.append(
            ([iteration * (i + 1) for i in some], [returns[i][ended[i]].mean() for i in some])
        )
    observations = env_state.env_state  # below the rewards' statistics; equal rows [seeds, N, 3]
    policies = train_state.params, observations.mean[:, 0], observations.var[:, 0]

    @jax.jit
    def greedy(policy, obs):
        """The mean of the policy's distribution, as torque."""
        params, mean, var = policy
        distribution, _ = script.ActorCritic(1).apply(params, (obs - mean) / jnp.sqrt(var + 1e-8))
        return MAX_TORQUE * jnp.clip(distribution.mean(), -1, 1)


eval_return = peer.judge_each(env, greedy, policies, len(seeds))
curves = [peer.evenly(measured, compile_seconds, env_steps, *log) for log in logs]
peer.finish(version, env_steps, measured, eval_return, curves, compile_seconds)
