"""What the scripts of the peers share. Each runs in a Python of its own, with numpy and gymnasium.

Arguments of those scripts: ENV=CartPole-v1 or Pendulum-v1, SEEDS=0,1,2 (trained together where the
peer can), STEPS=5000 (instead of its own number of environment steps), CHECKOUT=path where the peer
is a repository and no package. Last line: a JSON object, see `finish`.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
from machine import clocks, commit  # noqa: F401  (the scripts' too)


def options() -> tuple[str, list[int], int, Path]:
    """Environment, seeds, steps (0: the peer's own number) and checkout, from the command line."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    seeds = [int(seed) for seed in given.get("SEEDS", "0").split(",")]
    return (
        given["ENV"],
        seeds,
        int(given.get("STEPS", "0")),
        Path(given.get("CHECKOUT", ".")).resolve(),
    )


def trained(train: Callable, rngs: Any) -> tuple[Any, np.ndarray, float]:
    """All seeds in one jax program: what it returns, what the `clocks` counted, seconds of
    compiling.
    """
    import jax  # not every peer has it

    started = clocks()
    program = jax.jit(jax.vmap(train)).lower(rngs).compile()
    compile_seconds = (clocks() - started)[0].item()
    result = jax.block_until_ready(program(rngs))
    return result, clocks() - started, compile_seconds


def judge(env_id: str, policy: Callable[[np.ndarray], np.ndarray], episodes: int = 100) -> float:
    """Mean return of a policy, in the episodes that our scripts are judged by: episode i is of seed
    i.

    `policy`: observations [episodes, ...] to greedy actions [episodes, ...].
    """
    envs = [gymnasium.make(env_id) for _ in range(episodes)]
    obs = np.array([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    total = np.zeros(episodes)
    playing = set(range(episodes))
    while playing:
        actions = np.asarray(policy(obs))
        for i in tuple(playing):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            total[i] += reward
            if terminated or truncated:
                playing.remove(i)
    return float(total.mean())


def judge_each(env_id: str, greedy: Callable, policies: Any, seeds: int) -> list[float]:
    """`judge` for each seed of `policies`, a tree of [seeds, ...]; `greedy` takes one and
    observations.
    """
    import jax

    trees = [jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], policies) for i in range(seeds)]
    return [judge(env_id, functools.partial(greedy, tree)) for tree in trees]


def finish(
    version: str,
    env_steps: int,
    spent: np.ndarray,
    eval_return: list[float],
    curves: list[list[tuple[int, float, float]]],
    compile_seconds: float | None = None,
) -> None:
    """Prints the JSON object that against_peers.py reads.

    env_steps: that one seed really took. spent: of the `clocks` by training, compilation included.
    eval_return: of the last policy, per seed, see `judge`. curves: per seed the peer's own training
    log: (environment step, seconds, return).
    """
    seconds = dict(
        zip(("seconds", "processor_seconds"), spent.tolist()), compile_seconds=compile_seconds
    )
    report = {
        "version": version,
        "env_steps": int(env_steps),
        **seconds,
        "eval_return": eval_return,
    }
    print(json.dumps(report | {"curves": curves}))


def evenly(
    spent: np.ndarray, compile_seconds: float, env_steps: int, steps: Any, returns: Any
) -> list:
    """The log of a training that is one compiled program: each of its steps takes equally long."""
    per_step = (spent[0].item() - compile_seconds) / env_steps
    return [
        (int(n), compile_seconds + per_step * float(n), float(r)) for n, r in zip(steps, returns)
    ]
