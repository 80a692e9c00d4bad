"""CartPole and Pendulum: Gymnasium's own JAX environments to learn in, its ordinary ones to be
judged in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from gymnasium.envs.phys2d.pendulum import PendulumFunctional, PendulumParams
from tqdm import tqdm

QUICK_EVAL_EPISODES = 20


class EnvState(NamedTuple):
    """An episode in progress."""

    physical: jax.Array  # float32 [2 or 4], the state of the physics
    obs: jax.Array  # float32 [3 or 4], what the agent sees of it
    steps: jax.Array  # int32 [], played in this episode
    episode_return: jax.Array  # float32 [], earned in it


class Transition(NamedTuple):
    """One step of the environment; with leading axes, many of them."""

    obs: jax.Array  # float32 [3 or 4]
    action: jax.Array  # int32 [] or float32 []
    reward: jax.Array  # float32 []
    next_obs: jax.Array  # float32 [3 or 4], the true one, not the first of the next episode
    terminated: jax.Array  # bool [], the pole fell; a pendulum never terminates
    truncated: jax.Array  # bool [], the time limit is reached; the episode would go on


@dataclass(frozen=True)
class Environment:
    """An environment by its pure functions. (gymnax has the same, but merges the two kinds of
    ends.)
    """

    id: str  # of gymnasium.make
    functional: Any  # Gymnasium's pure functions of the physics
    params: Any
    observation_scale: tuple[float, ...]  # about the largest of each number that is seen
    max_episode_steps: int

    def reset(self, rng: jax.Array) -> EnvState:
        """The first state of an episode."""
        physical = self.functional.initial(rng, self.params)
        obs = self.functional.observation(physical, None, self.params)
        return EnvState(physical, obs, jnp.int32(0), jnp.float32(0))

    def step(self, state: EnvState, action: jax.Array) -> tuple[EnvState, Transition]:
        """One step, the time limit included; action []. The state that follows is never one of a
        new episode.

        Pendulum cuts the torque at its limits: action 3.7 does what action 2 does. So the clipping
        is part of the environment, not of the policy, and we train on the log-prob of the action as
        sampled. (The clipped action's log-prob would be that of an action the policy didn't sample:
        a bias.)
        """
        shaped = jnp.reshape(action, self.functional.action_space.shape)  # [], or [1] of Pendulum
        physical = self.functional.transition(state.physical, shaped, None, self.params)
        reward = jnp.float32(
            self.functional.reward(state.physical, shaped, physical, None, self.params)
        )
        obs = self.functional.observation(physical, None, self.params)
        next_state = EnvState(physical, obs, state.steps + 1, state.episode_return + reward)
        terminated = jnp.bool_(self.functional.terminal(physical, None, self.params))
        truncated = next_state.steps >= self.max_episode_steps
        return next_state, Transition(state.obs, action, reward, obs, terminated, truncated)


def new_where_ended(ended: jax.Array, new: EnvState, state: EnvState) -> EnvState:
    """The first states of new episodes where `ended` [N], else the states as they are; leaves [N,
    ...].
    """
    return jax.tree.map(lambda new, old: jax.vmap(jnp.where)(ended, new, old), new, state)


# Trap: Gymnasium 1.4.0's own default of polemass_length is mass + length (0.6). CartPole-v1
# multiplies them. Scale: where an episode ends (2.4 m, 0.21 rad), and about the largest speeds that
# a balancing cart meets.
CART_POLE = Environment(
    "CartPole-v1",
    CartPoleFunctional(),
    CartPoleParams(polemass_length=0.05),
    (2.4, 3.0, 0.21, 3.0),
    gymnasium.spec("CartPole-v1").max_episode_steps,
)
SOLVED = gymnasium.spec("CartPole-v1").reward_threshold  # 475, Gymnasium's own mark
# Scale: cosine and sine of the angle; the fastest turn, rad/s.
PENDULUM = Environment(
    "Pendulum-v1",
    PendulumFunctional(),
    PendulumParams(),
    (1.0, 1.0, 8.0),
    gymnasium.spec("Pendulum-v1").max_episode_steps,
)
# 2 newton meters, not enough to lift the pendulum in one go
MAX_TORQUE = PENDULUM.functional.max_torque


def quick_evaluate(env: Environment, policy, actor) -> jax.Array:
    """Mean return of QUICK_EVAL_EPISODES greedy episodes in the JAX environment, float32 [].

    `policy`: (actor, observations [E, ...]) -> distribution of actions [E].
    """

    def play(carry, _):
        state, alive = carry
        next_state, transition = jax.vmap(env.step)(state, policy(actor, state.obs).mode())
        return (next_state, alive & ~transition.terminated), jnp.where(
            alive, transition.reward, 0.0
        )

    # The same first states for every seed and at every look: only the policy changes.
    rngs = jax.random.split(jax.random.key(0), QUICK_EVAL_EPISODES)
    states = jax.vmap(env.reset)(rngs)  # [E, ...]
    start = states, jnp.ones(QUICK_EVAL_EPISODES, bool)
    _, rewards = jax.lax.scan(play, start, None, env.max_episode_steps)  # [T, E]
    return rewards.sum(axis=0).mean()


def evaluate(env: Environment, policy, actors, episodes: int) -> np.ndarray:
    """Greedy episodes in gymnasium.make(env.id), never in the JAX copy the agent learned in.

    All actors [S, ...] play the same `episodes`, environment seeds 0, 1, ...: returns float64 [S,
    E].
    """
    shape = len(jax.tree.leaves(actors)[0]), episodes
    envs = gymnasium.make_vec(env.id, np.prod(shape), vectorization_mode="sync")
    # [S, E, ...] -> [S, E]
    greedy = jax.jit(jax.vmap(lambda actor, obs: policy(actor, obs).mode()))
    obs, _ = envs.reset(seed=[*range(episodes)] * shape[0])
    returns, playing = np.zeros(len(obs)), np.ones(len(obs), bool)
    while playing.any():
        action = np.asarray(greedy(actors, obs.reshape(*shape, -1))).reshape(
            envs.action_space.shape
        )
        # one that is over begins anew by itself
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += playing * reward
        playing &= ~(terminated | truncated)
    return returns.reshape(shape)


def print_row(num_steps: int, shown: Sequence[str], log: Sequence[Any]) -> None:
    """Prints the fields `shown` of a log's last row, means over the seeds, at each tenth of
    `num_steps`.
    """
    if len(log) == 1:
        tqdm.write("     step   " + "   ".join(shown))
    before, now = [0, *(min(int(row.env_step.mean()), num_steps) for row in log)][-2:]
    if 10 * before // num_steps < 10 * now // num_steps:
        columns = (f"{getattr(log[-1], name).mean():{len(name)}.4g}" for name in shown)
        tqdm.write(f"{int(log[-1].env_step.mean()):9,}   " + "   ".join(columns))


def print_returns(first_seed: int, eval_return: np.ndarray, solved: float = np.inf) -> None:
    """A line per seed, from a mean return each; then their mean and sample standard deviation."""
    for i, mean in enumerate(eval_return):
        print(f"seed {first_seed + i:3d}   return {mean:8.2f}")
    spread = f" +- {eval_return.std(ddof=1):.1f}" if len(eval_return) > 1 else ""
    text = f"{eval_return.mean():.1f}{spread}, lowest {eval_return.min():.1f}"
    if solved < np.inf:
        text += (
            f", {(eval_return >= solved).sum()} of {len(eval_return)} seeds solved "
            f"({solved:g} or more)"
        )
    print(text)
