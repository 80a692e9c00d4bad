"""rejax's PPO with its own Pendulum-v1 settings (configs/gymnax/pendulum.yaml), all seeds in one program.

One iteration takes num_envs * num_steps = 10,000 environment steps, and there is at least one per evaluation:
with the file's eval_freq=2_000, total_timesteps=150_000 become 75 iterations, 750,000 steps. STEPS=150000
runs 15. Its evaluation (128 episodes) is left out of the timed program; a second, untimed one with the same
seeds plays them for the learning curve. Run by against_peers.py, see peer.py.
"""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import peer
from rejax import get_algo

ITERATION = 10_000
seeds, steps, _ = peer.options()
total, interval = (steps, ITERATION) if steps else (150_000, 2_000)


def algorithm():
    return get_algo("ppo").create(
        env="Pendulum-v1",
        agent_kwargs={"activation": "swish"},
        num_envs=100,
        num_steps=100,
        num_epochs=10,
        num_minibatches=10,
        learning_rate=0.001,
        max_grad_norm=10,
        total_timesteps=total,
        eval_freq=interval,
        gamma=0.995,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        normalize_observations=True,
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
at = [ITERATION * (i + 1) for i in range(returns.shape[1])]
curves = [peer.evenly(measured, compile_seconds, env_steps, at, row) for row in returns.mean(axis=2)]


@jax.jit
def greedy(state, obs):
    """The mean of the policy's distribution, which the environment cuts to the torque's range."""
    obs = quiet.normalize_obs(state.obs_rms_state, obs)
    return quiet.actor.apply(state.actor_ts.params, obs, method="_action_dist").loc


policies = [jax.tree.map(lambda leaf, i=i: leaf[i], states) for i in range(len(seeds))]
eval_return = [peer.judge("Pendulum-v1", lambda obs, state=state: greedy(state, obs)) for state in policies]
peer.finish(f"rejax {version('rejax')}", env_steps, measured, eval_return, curves, compile_seconds)
