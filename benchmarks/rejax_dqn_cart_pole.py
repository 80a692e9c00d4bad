"""rejax's DQN with its own CartPole-v1 settings (configs/gymnax/cartpole.yaml); run by against_peers.py
in an environment of its own. Argument: a seed. Last line: a JSON object."""

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
algorithm = get_algo("dqn").create(
    env="CartPole-v1",
    agent="DuelingQNetwork",
    agent_kwargs={"activation": "swish"},
    num_envs=10,
    buffer_size=50_000,
    fill_buffer=5_000,
    batch_size=100,
    max_grad_norm=10,
    learning_rate=0.001,
    num_epochs=5,
    total_timesteps=100_000,
    eval_freq=2_500,
    polyak=0.98,
    eps_start=1,
    eps_end=0.05,
    exploration_fraction=0.5,
    gamma=0.99,
    ddqn=True,
    normalize_observations=False,
)
train = jax.jit(algorithm.train).lower(jax.random.key(seed)).compile()
compile_seconds = time.perf_counter() - started
state, _ = jax.block_until_ready(train(jax.random.key(seed)))
seconds = time.perf_counter() - started

greedy = jax.jit(lambda obs: algorithm.agent.apply(state.q_ts.params, obs[None])[0].argmax())
returns = []
env = gymnasium.make("CartPole-v1")
for episode in range(100):
    obs, _ = env.reset(seed=episode)
    total, ended = 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(int(greedy(obs)))
        total, ended = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps({"seconds": seconds, "compile_seconds": compile_seconds, "eval_return": [np.mean(returns)]}))
