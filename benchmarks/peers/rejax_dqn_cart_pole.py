"""rejax's DQN with its own CartPole-v1 settings (configs/gymnax/cartpole.yaml), all seeds in one program.

Its evaluation (128 episodes every 2,500 steps) is left out of the timed program; a second, untimed one with
the same seeds plays them for the learning curve. Run by against_peers.py, see peer.py.
"""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import peer
from rejax import get_algo

seeds, steps, _ = peer.options()
total, interval = (steps, steps // 2) if steps else (100_000, 2_500)


def algorithm():
    return get_algo("dqn").create(
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
        total_timesteps=total,
        eval_freq=interval,
        polyak=0.98,
        eps_start=1,
        eps_end=0.05,
        exploration_fraction=0.5,
        gamma=0.99,
        ddqn=True,
        normalize_observations=False,
        skip_initial_evaluation=True,
    )


rngs = jax.vmap(jax.random.key)(jnp.array(seeds))
clock = peer.Clock()
quiet = algorithm().replace(eval_callback=lambda *_: ())
train = jax.jit(jax.vmap(quiet.train)).lower(rngs).compile()
compile_seconds = clock.read()["seconds"]
states, _ = jax.block_until_ready(train(rngs))
measured = clock.read()
env_steps = int(states.global_step.max())

_, (_, returns) = jax.jit(jax.vmap(algorithm().train))(rngs)  # returns [seeds, evaluations, 128]
at = [interval * (i + 1) for i in range(returns.shape[1])]
curves = [peer.evenly(measured, compile_seconds, env_steps, at, row) for row in returns.mean(axis=2)]


@jax.jit
def greedy(params, obs):
    return quiet.agent.apply(params, obs).argmax(axis=-1)


policies = [jax.tree.map(lambda leaf, i=i: leaf[i], states.q_ts.params) for i in range(len(seeds))]
eval_return = [
    peer.judge("CartPole-v1", lambda obs, params=params: greedy(params, obs)) for params in policies
]
peer.finish(f"rejax {version('rejax')}", env_steps, measured, eval_return, curves, compile_seconds)
