"""How well can Pendulum-v1 be played at all? Value iteration on a fine grid, with the physics
known.

Backwards from the last of 200 steps (Bellman 1957), without discount, over 241 angles x 321 speeds
x 21 torques, linear between the grid's points; then the policy that looks one step ahead with those
values plays the episodes of folder 3's tables: gymnasium.make("Pendulum-v1"), environment seeds 0,
1, ... 99.

    python 3_Pendulum/pendulum_optimum.py     # 15 seconds; writes assets/pendulum_optimum.csv
    python 3_Pendulum/pendulum_optimum.py 361 481 41    # another grid: prints only

Near the best there is, not a proof: the finer grid of the second line gains 0.3.
"""

import sys
from pathlib import Path

import gymnasium
import numpy as np
from scipy.ndimage import map_coordinates
from tqdm import tqdm

import runs

GRID = 241, 321, 21  # angles, speeds, torques
NUM_STEPS = 200
NUM_EPISODES = 100
MAX_SPEED = 8.0  # rad/s


def wrapped(angle: np.ndarray) -> np.ndarray:
    """An angle, rad, as -pi to pi."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def move(angle: np.ndarray, speed: np.ndarray, torque: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One step of 0.05 s of a rod of 1 kg and 1 m in a gravity of 10 m/s^2 (Gymnasium's
    documentation).
    """
    speed = np.clip(speed + (15 * np.sin(angle) + 3 * torque) * 0.05, -MAX_SPEED, MAX_SPEED)
    return angle + 0.05 * speed, speed


def cost(angle: np.ndarray, speed: np.ndarray, torque: np.ndarray) -> np.ndarray:
    """What a step costs: minus Pendulum-v1's reward."""
    return wrapped(angle) ** 2 + 0.1 * speed**2 + 0.001 * torque**2


def lookup(table: np.ndarray, angle: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """A table [angles, speeds] read between its points."""
    row = (wrapped(angle) + np.pi) / (2 * np.pi) * (table.shape[0] - 1)
    column = (speed + MAX_SPEED) / (2 * MAX_SPEED) * (table.shape[1] - 1)
    return map_coordinates(table, [row, column], order=1)


def costs_to_go(num_angles: int, num_speeds: int, num_torques: int) -> list[np.ndarray]:
    """The least cost of the last 0, 1, ... NUM_STEPS steps, each [angles, speeds]."""
    angles = np.linspace(-np.pi, np.pi, num_angles)
    speeds = np.linspace(-MAX_SPEED, MAX_SPEED, num_speeds)
    angle, speed = np.meshgrid(angles, speeds, indexing="ij")
    torques = np.linspace(-2, 2, num_torques)
    moves = [move(angle, speed, torque) for torque in torques]
    costs = [cost(angle, speed, torque) for torque in torques]
    tables = [np.zeros_like(angle)]
    for _ in tqdm(range(NUM_STEPS), desc="backwards", disable=None):
        tables.append(np.min([c + lookup(tables[-1], *m) for c, m in zip(costs, moves)], axis=0))
    return tables


def main(arguments: list[str]) -> None:
    """Plays the episodes, prints their mean; writes the table, unless another grid is given."""
    grid = [int(n) for n in arguments] or GRID
    tables = costs_to_go(*grid)
    torques = np.linspace(-2, 2, 4 * grid[2])
    env, rows = gymnasium.make("Pendulum-v1"), []
    for seed in tqdm(range(NUM_EPISODES), desc="episodes", disable=None):
        env.reset(seed=seed)
        total = 0.0
        for steps_left in range(NUM_STEPS, 0, -1):
            angle, speed = (np.full(len(torques), x) for x in env.unwrapped.state)
            ahead = cost(angle, speed, torques) + lookup(
                tables[steps_left - 1], *move(angle, speed, torques)
            )
            total += float(env.step(torques[[ahead.argmin()]])[1])
        rows.append({"seed": seed, "return": total})
    returns = np.array([row["return"] for row in rows])
    print(f"{returns.mean():.2f} +- {returns.std():.2f} over {NUM_EPISODES} episodes")
    if not arguments:
        runs.write_csv(Path(__file__).parent / "assets" / "pendulum_optimum.csv", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
