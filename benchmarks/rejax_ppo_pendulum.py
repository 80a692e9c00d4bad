"""rejax's PPO with its own Pendulum-v1 settings (configs/gymnax/pendulum.yaml, 150,000 steps); run by
against_peers.py in an environment of its own. Argument: a seed. Last line: a JSON object."""

import json
import os
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import gymnasium
import jax
import numpy as np
from rejax import get_algo

seed = int(sys.argv[1])
started = time.perf_counter()
algorithm = get_algo("ppo").create(
    env="Pendulum-v1",
    agent_kwargs={"activation": "swish"},
    num_envs=100,
    num_steps=100,
    num_epochs=10,
    num_minibatches=10,
    learning_rate=0.001,
    max_grad_norm=10,
    total_timesteps=150_000,
    eval_freq=2_000,
    gamma=0.995,
    gae_lambda=0.95,
    clip_eps=0.2,
    ent_coef=0.0,
    vf_coef=0.5,
    normalize_observations=True,
)
train = jax.jit(algorithm.train).lower(jax.random.key(seed)).compile()
compile_seconds = time.perf_counter() - started
state, _ = jax.block_until_ready(train(jax.random.key(seed)))
seconds = time.perf_counter() - started


@jax.jit
def greedy(obs):
    """The mean of the policy's distribution."""
    obs = algorithm.normalize_obs(state.obs_rms_state, obs)
    return algorithm.actor.apply(state.actor_ts.params, obs[None], method="_action_dist").loc[0]


returns = []
env = gymnasium.make("Pendulum-v1")
for episode in range(100):
    obs, _ = env.reset(seed=episode)
    total, ended = 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(np.asarray(greedy(obs)))
        total, ended = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps({"seconds": seconds, "compile_seconds": compile_seconds, "eval_return": [np.mean(returns)]}))
