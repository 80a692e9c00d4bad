"""rejax's DQN or PPO with its own settings of a task (configs/gymnax/), all seeds in one program.

    ENV=CartPole-v1 or Pendulum-v1; the other arguments are in peer.py. Run by against_peers.py.

PPO takes num_envs * num_steps = 10,000 environment steps per iteration, and at least one iteration
per evaluation: with the file's eval_freq=2_000, total_timesteps=150_000 become 75 iterations,
750,000 steps. STEPS=150000 runs 15. Evaluations (128 episodes) are left out of the timed program; a
second, untimed one with the same seeds plays them for the learning curve.
"""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import peer
from rejax import get_algo

env, seeds, steps, _ = peer.options()
if env == "CartPole-v1":
    name, total, interval = "dqn", steps or 100_000, steps // 2 or 2_500
    every = interval
    settings = dict(
        agent="DuelingQNetwork",
        agent_kwargs={"activation": "swish"},
        num_envs=10,
        buffer_size=50_000,
        fill_buffer=5_000,
        batch_size=100,
        max_grad_norm=10,
        learning_rate=0.001,
        num_epochs=5,
        polyak=0.98,
        eps_start=1,
        eps_end=0.05,
        exploration_fraction=0.5,
        gamma=0.99,
        ddqn=True,
        normalize_observations=False,
    )
else:
    name, total, every = "ppo", steps or 150_000, 10_000
    interval = every if steps else 2_000
    settings = dict(
        agent_kwargs={"activation": "swish"},
        num_envs=100,
        num_steps=100,
        num_epochs=10,
        num_minibatches=10,
        learning_rate=0.001,
        max_grad_norm=10,
        gamma=0.995,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        normalize_observations=True,
    )


def algorithm():
    same = dict(env=env, total_timesteps=total, eval_freq=interval, skip_initial_evaluation=True)
    return get_algo(name).create(**same, **settings)


rngs = jax.vmap(jax.random.key)(jnp.array(seeds))
quiet = algorithm().replace(eval_callback=lambda *_: ())
(states, _), measured, compile_seconds = peer.trained(quiet.train, rngs)
env_steps = int(states.global_step.max())

_, (_, returns) = jax.jit(jax.vmap(algorithm().train))(rngs)  # returns [seeds, evaluations, 128]
at = [every * (i + 1) for i in range(returns.shape[1])]
curves = [
    peer.evenly(measured, compile_seconds, env_steps, at, row) for row in returns.mean(axis=2)
]


@jax.jit
def greedy(state, obs):
    """DQN's best action; the mean of PPO's distribution, which the environment cuts to the torque's
    range.
    """
    if name == "dqn":
        return quiet.agent.apply(state.q_ts.params, obs).argmax(axis=-1)
    obs = quiet.normalize_obs(state.obs_rms_state, obs)
    return quiet.actor.apply(state.actor_ts.params, obs, method="_action_dist").loc


eval_return = peer.judge_each(env, greedy, states, len(seeds))
peer.finish(f"rejax {version('rejax')}", env_steps, measured, eval_return, curves, compile_seconds)
