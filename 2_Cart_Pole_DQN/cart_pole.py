"""CartPole-v1: Gymnasium's own JAX environment for training, its ordinary one for evaluation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from tqdm import tqdm

ENV = CartPoleFunctional()
# Trap: Gymnasium 1.4.0's own default of polemass_length is mass + length (0.6). CartPole-v1
# multiplies them.
PHYSICS = CartPoleParams(polemass_length=0.05)
MAX_EPISODE_STEPS = gymnasium.spec("CartPole-v1").max_episode_steps  # 500
# 475: a mean return from here on counts as solved
SOLVED = gymnasium.spec("CartPole-v1").reward_threshold
# Where an episode ends (position 2.4, angle 0.21), and about the largest speeds that a balancing
# cart meets.
OBSERVATION_SCALE = (2.4, 3.0, 0.21, 3.0)  # m, m/s, rad, rad/s
QUICK_EVAL_EPISODES = 20


class EnvState(NamedTuple):
    """An episode in progress."""

    obs: jax.Array  # float32 [4], the whole physical state
    steps: jax.Array  # int32 [], played in this episode
    episode_return: jax.Array  # float32 [], earned in it


class Transition(NamedTuple):
    """One step of the environment; with leading axes, many of them."""

    obs: jax.Array  # float32 [4]
    action: jax.Array  # int32 []
    reward: jax.Array  # float32 []
    next_obs: jax.Array  # float32 [4], the true one, not the first of the next episode
    terminated: jax.Array  # bool [], the pole fell or the cart left the track
    truncated: jax.Array  # bool [], the 500 steps are over; the pole is still up


def reset(rng: jax.Array) -> EnvState:
    """The first state of an episode."""
    return EnvState(ENV.initial(rng, PHYSICS), jnp.int32(0), jnp.float32(0))


def step(state: EnvState, action: jax.Array) -> tuple[EnvState, Transition]:
    """One step, the time limit included. The state that follows is never one of a new episode.

    By hand: gymnax has the same, but merges the two kinds of ends.
    """
    next_obs = ENV.transition(state.obs, action, None, PHYSICS)
    reward = jnp.float32(ENV.reward(state.obs, action, next_obs, None, PHYSICS))
    next_state = EnvState(next_obs, state.steps + 1, state.episode_return + reward)
    terminated = ENV.terminal(next_obs, None, PHYSICS)
    truncated = next_state.steps >= MAX_EPISODE_STEPS
    return next_state, Transition(state.obs, action, reward, next_obs, terminated, truncated)


def step_or_reset(
    state: EnvState, action: jax.Array, rng: jax.Array
) -> tuple[EnvState, Transition, jax.Array]:
    """`step`; if it ends the episode, the state that follows is the first of another one.

    Also returns the return of the episode that ended, nan if none did. The transition is `step`'s.
    """
    next_state, transition = step(state, action)
    ended = transition.terminated | transition.truncated
    env_state = jax.tree.map(lambda new, old: jnp.where(ended, new, old), reset(rng), next_state)
    return env_state, transition, jnp.where(ended, next_state.episode_return, jnp.nan)


def quick_evaluate(
    network: Callable, rng: jax.Array, gamma: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Greedy episodes in the JAX environment: cheap enough to be part of the compiled run.

    Returns mean return, mean max_a Q(s_0, a), and mean discounted return of QUICK_EVAL_EPISODES,
    float32 [] each. The discounted return stops at the time limit, which leaves out at most
    gamma^500 of the value.
    """
    states = jax.vmap(reset)(jax.random.split(rng, QUICK_EVAL_EPISODES))  # [E, ...]
    max_q = network(states.obs).max(axis=-1).mean()

    def play(carry, t):
        states, alive = carry
        next_state, transition = jax.vmap(step)(states, network(states.obs).argmax(axis=-1))
        reward = jnp.where(alive, transition.reward, 0.0)  # [E]
        return (next_state, alive & ~transition.terminated), (reward, gamma**t * reward)

    start = states, jnp.ones(QUICK_EVAL_EPISODES, bool)
    _, (rewards, discounted) = jax.lax.scan(play, start, jnp.arange(MAX_EPISODE_STEPS))  # [T, E]
    return rewards.sum(axis=0).mean(), max_q, discounted.sum(axis=0).mean()


def evaluate(networks: Any, episodes: int) -> np.ndarray:
    """Greedy episodes in gymnasium.make("CartPole-v1"), never in the JAX copy the agent learned in.

    All networks [S, ...] play the same `episodes`, environment seeds 0, 1, ...: returns float64 [S,
    E].
    """
    shape = len(jax.tree.leaves(networks)[0]), episodes
    envs = gymnasium.make_vec("CartPole-v1", np.prod(shape), vectorization_mode="sync")
    # [S, E, 4] -> [S, E]
    greedy = jax.jit(jax.vmap(lambda network, obs: network(obs).argmax(axis=-1)))
    obs, _ = envs.reset(seed=[*range(episodes)] * shape[0])
    returns, playing = np.zeros(len(obs)), np.ones(len(obs), bool)
    while playing.any():
        action = np.asarray(greedy(networks, obs.reshape(*shape, 4))).reshape(-1)
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


def print_returns(first_seed: int, eval_return: np.ndarray) -> None:
    """A line per seed, from a mean return each; then their mean and sample standard deviation."""
    for i, mean in enumerate(eval_return):
        print(f"seed {first_seed + i:3d}   return {mean:8.2f}")
    spread = f" +- {eval_return.std(ddof=1):.1f}" if len(eval_return) > 1 else ""
    text = f"{eval_return.mean():.1f}{spread}, lowest {eval_return.min():.1f}"
    solved = (eval_return >= SOLVED).sum()
    print(f"{text}, {solved} of {len(eval_return)} seeds solved ({SOLVED:g} or more)")
