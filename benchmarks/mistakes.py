"""What goes wrong, and how it looks: runs changed copies of a folder's script.

    python benchmarks/mistakes.py 1_Q_Learning       # about 2 minutes
    python benchmarks/mistakes.py 2_Cart_Pole_DQN    # about 6 minutes
    python benchmarks/mistakes.py 3_Pendulum         # about 8 minutes

Each row below replaces pieces of the script's text and runs the copy, with its default constants or with
those given. Writes FOLDER/assets/mistakes.csv (rows M) and exercises.csv (rows E): one line a row and seed,
which the folder's MEASUREMENTS.md sums up.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


class Row(NamedTuple):
    """One changed copy."""

    name: str  # as in the tables of MEASUREMENTS.md
    what: str
    changes: tuple[tuple[str, str], ...] = ()  # (a piece of the script that stands there once, its successor)
    constants: tuple[str, ...] = ()
    script: str = ""  # of the folder; empty: its main one


# %% Folder 1 -------------------------------------------------------------------------------------------
TRAINING = "# %% Training -"
UPDATE = "next_state, terminated, c.ALPHA, c.GAMMA)"
STEP = "next_state, reward, terminated = grid.step(c, state, action)"
TABLE = "Q = np.zeros((c.SIZE**2, len(grid.ACTIONS)))"
LEARN = "Q[state, action] += alpha * td_error"
LISTS = "    log, tables, block = [], [], []"
MAX = "Q[next_state].max()\n    td_error"

TRUNCATION = (UPDATE, UPDATE.replace("terminated,", "terminated or steps + 1 == c.MAX_STEPS_PER_EPISODE,"))
FORGOTTEN = ("reward + gamma * (1 - terminated) * Q", "reward + gamma * Q")
OPTIMISTIC = (TABLE, "Q = np.full((c.SIZE**2, 4), 100.0)")
PESSIMISTIC = (TABLE, "Q = np.full((c.SIZE**2, 4), -300.0)")
OTHER_ORDER = (
    (TRAINING, "grid.ACTIONS[:] = ['right', 'left', 'down', 'up']\n" + TRAINING),
    (TRAINING + "--", "grid.MOVES[:] = [(0, 1), (0, -1), (1, 0), (-1, 0)]\n" + TRAINING + "--"),
)
SLIPPERY = (  # one move in five goes in a random direction; `run_q_learning` knows it
    (
        STEP,
        "moved = int(rng.integers(4)) if rng.random() < 0.2 else action\n        "
        + STEP.replace("action)", "moved)"),
    ),
    (TRAINING, "SLIPPERY = True\n" + TRAINING),
)


def by_visits(power: float) -> tuple[tuple[str, str], ...]:
    """A step size for each pair: one over its visits to a power."""
    return (
        (LISTS, LISTS + "\n    visits[:] = 0"),
        (
            LEARN,
            f"visits[state, action] += 1\n    {LEARN.replace('alpha', f'visits[state, action] ** -{power}')}",
        ),
        (TRAINING + "--", f"visits = np.zeros((16, 4))\n{TRAINING}--"),
    )


Q_LEARNING = [
    Row("M1", "truncation taken for termination", (TRUNCATION,)),
    Row("M2", "truncation taken for termination", (TRUNCATION,), ("EPSILON_END=1.0",)),
    Row("M3", "truncation taken for termination", (TRUNCATION,), ("MAX_STEPS_PER_EPISODE=10",)),
    Row("M4", "the script as it is", (), ("MAX_STEPS_PER_EPISODE=10",)),
    Row("M5", "(1 - terminated) forgotten", (FORGOTTEN,)),
    Row("M6", "(1 - terminated) forgotten, table starts at 100", (FORGOTTEN, OPTIMISTIC)),
    Row("M7", "(1 - terminated) forgotten, table starts at -300", (FORGOTTEN, PESSIMISTIC)),
    Row("M8", "table starts at -300", (PESSIMISTIC,)),
    Row("M9", "actions numbered right, left, down, up", OTHER_ORDER, ("EPSILON_START=0.01",)),
    Row("E1", "the script as it is", (), ("ALPHA=1.0", "NUM_EPISODES=14")),
    Row("E2a", "slippery floor", SLIPPERY, ("ALPHA=1.0", "EPSILON_END=1.0")),
    Row("E2b", "slippery floor", SLIPPERY, ("ALPHA=0.1", "EPSILON_END=1.0")),
    Row("E2c", "slippery floor, step size visits ** -1.0", SLIPPERY + by_visits(1.0), ("EPSILON_END=1.0",)),
    Row("E2d", "slippery floor, step size visits ** -0.8", SLIPPERY + by_visits(0.8), ("EPSILON_END=1.0",)),
    Row("E3", "mean instead of max", ((MAX, MAX.replace("max", "mean")),), ("EPSILON_END=1.0",)),
]


def slippery_optimum(c: Any, grid: Any) -> np.ndarray:
    """The optimal action values of SLIPPERY: 0.8 of a move's own value, 0.2 of the mean over all moves."""
    q_star = np.zeros((c.SIZE**2, 4))
    for _ in range(10_000):  # each sweep shrinks the error by GAMMA: 0.99^10000 is nothing
        moved = np.zeros_like(q_star)
        for state, action in np.ndindex(len(q_star) - 1, 4):
            following, reward, terminated = grid.step(c, state, action)
            moved[state, action] = reward + c.GAMMA * (1 - terminated) * q_star[following].max()
        previous, q_star = q_star, 0.8 * moved + 0.2 * moved.mean(axis=1, keepdims=True)
        if np.abs(q_star - previous).max() < 1e-12:
            break
    return q_star


def run_q_learning(text: str, row: Row, home: Path) -> Iterator[dict[str, Any]]:
    """Five seeds of a changed copy, against its own value iteration; the goal's row of the table left out."""
    sys.path.insert(0, str(home))  # the copy imports settings, grid and pictures
    for name in ("grid", "changed"):
        sys.modules.pop(name, None)  # a row may have changed the moves
    script = sys.modules["changed"] = types.ModuleType("changed")  # dataclasses look there
    script.__file__ = str(home / "Q_Learning.py")  # tyro reads the remarks there
    exec(compile(text, script.__file__, "exec"), script.__dict__)
    grid = script.grid
    c = script.configure([*row.constants, "PRINT_EVERY=0"])
    q_star = slippery_optimum(c, grid) if hasattr(script, "SLIPPERY") else grid.value_iteration(c)
    for seed in range(5):
        q_table, log, _ = script.train(c, np.random.default_rng(seed))
        error = np.abs(q_table - q_star)[:-1]  # [15, 4]
        yield {
            "seed": seed,
            "max_abs_error": error.max(),
            "pairs_off_by_0.01": int((error > 0.01).sum()),
            "optimal_from_every_state": grid.optimal_from_every_state(c, q_table),
            "moves_from_start": grid.greedy_moves(c, q_table, grid.START) or "never",
            "return_of_last_1000_episodes": round(log[log[:, 0] > c.NUM_EPISODES - 1000, 2].mean(), 3),
        }


# %% Folder 2 -------------------------------------------------------------------------------------------
FUTURE = "td_target(reward, last.terminated,"
PREDICTION = "q = jnp.take_along_axis(q, batch.action[:, :1], axis=1)[:, 0]"
COPY = "optax.periodic_update(*weights, learning_steps, c.TARGET_SYNC_INTERVAL)"
AVERAGE = "optax.incremental_update(*weights, 0.01)"
NETWORKS = "# %% Networks -"
DEFAULT_PHYSICS = "env.PHYSICS = type(env.PHYSICS)()\n"

CART_POLE = [
    Row(
        "M1",
        "truncation taken for termination",
        ((FUTURE, "td_target(reward, last.terminated | last.truncated,"),),
    ),
    Row(
        "M2", "(1 - terminated) forgotten", ((FUTURE, "td_target(reward, jnp.zeros_like(last.terminated),"),)
    ),
    Row("M3", "[B, 1] less [B]", ((PREDICTION, PREDICTION.removesuffix("[:, 0]")),)),
    Row("M4", "Gymnasium's polemass_length", ((NETWORKS, DEFAULT_PHYSICS + NETWORKS),)),
    Row("E1a", "as it is", (), ("N_STEPS=1", "TARGET_SYNC_INTERVAL=100")),
    Row("E1b", "as it is", (), ("N_STEPS=1", "TARGET_SYNC_INTERVAL=50")),
    Row("E2a", "as it is", (), ("NUM_STEPS=26_000",)),
    Row("E2b", "as it is", (), ("NUM_STEPS=26_000", "DECAY_STEPS=4_000")),
    Row("E3", "target network averaged", ((COPY, AVERAGE),)),
]


# %% Folder 3 -------------------------------------------------------------------------------------------
NEXT_VALUE = "value(agent.critic, t.next_obs)"
AFTER_RESET = (  # what an environment that resets itself shows after the last step
    "value(agent.critic, jnp.where(ended[:, None], "
    "jax.vmap(ENV.reset)(jax.random.split(reset_rng, c.NUM_ENVS)).obs, t.next_obs))"
)
VALUE = "(batch.returns - value(critic, batch.obs)) ** 2"
RUNNING = "running = 1 - (terminated | truncated)  # [N, T]"
ACTION = "action = old.sample(seed=action_rng)"
OLD_LOG_PROB = "policy_loss(new.log_prob(batch.action), batch.log_prob,"
SIGMA = "mean, sigma = jnp.moveaxis(actor(obs), -1, 0)  # [...] each"
MEAN = "(alive * returns).sum(axis=0) / jnp.maximum(alive.sum(axis=0), 1)"
TIME = "clock = jnp.broadcast_to(t,"

PENDULUM = [
    Row("M1", "V of the next episode's first observation", ((NEXT_VALUE, AFTER_RESET),)),
    Row("M2", "[B, 1] less [B]", ((VALUE, VALUE.replace("obs))", "obs)[:, None])")),)),
    Row("M3", "advantages flow over the ends", ((RUNNING, "running = jnp.ones_like(reward)"),)),
    Row("M4", "torque cut before its log-prob", ((ACTION, f"action = jnp.clip({ACTION[9:]}, -2, 2)"),)),
    Row(
        "M5",
        "old log-prob computed anew",
        (
            (
                OLD_LOG_PROB,
                OLD_LOG_PROB.replace("batch.log_prob", "jax.lax.stop_gradient(new.log_prob(batch.action))"),
            ),
        ),
    ),
    Row(
        "M6",
        "one mean for all steps",
        ((MEAN, "(alive * returns).sum() / alive.sum()"),),
        ("BASELINE=batch_mean",),
        "reinforce.py",
    ),
    Row("E1a", "as it is", (), ("NUM_STEPS=50_000",)),
    Row("E1b", "as it is", (), ("NUM_STEPS=50_000", "NUM_EPOCHS=20")),
    Row("E1c", "as it is", (), ("NUM_STEPS=50_000", "MINIBATCH_SIZE=25")),
    Row("E2a", "as it is", (), ("CLIP_EPSILON=1e9", "BETA=0.1")),
    Row("E2b", "as it is", (), ("CLIP_EPSILON=1e9", "BETA=10.0")),
    Row(
        "E3",
        "one sigma for all states",
        (
            (
                SIGMA,
                SIGMA.replace("  #", "\n    sigma = jnp.broadcast_to(actor.output.bias[1], sigma.shape)  #"),
            ),
        ),
    ),
    Row("E5", "a critic without clock", ((TIME, TIME.replace("t,", "0 * t,")),), (), "reinforce.py"),
]


# %% All folders ----------------------------------------------------------------------------------------
SHOWING = ("explained_variance", "entropy")  # columns of log.csv in which a mistake may show


def run_ten_seeds(text: str, row: Row, home: Path) -> Iterator[dict[str, Any]]:
    """All ten seeds of a changed copy, in a process of its own; `home` has what the copy imports."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "changed.py"
        copy.write_text(text)
        command = [sys.executable, copy, *row.constants, f"RUN_DIR={folder}/run"]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(home)})
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
        with open(Path(folder) / "run" / "log.csv", newline="") as file:
            last = {int(line["seed"]): line for line in csv.DictReader(file)}
    for seed, eval_return in enumerate(result["eval_return"]):
        yield {"seed": seed, "eval_return": eval_return} | {
            f"last_{name}": last[seed][name] for name in SHOWING if name in last[seed]
        }


FOLDERS = {
    "1_Q_Learning": ("Q_Learning.py", Q_LEARNING, run_q_learning),
    "2_Cart_Pole_DQN": ("cart_pole_dqn.py", CART_POLE, run_ten_seeds),
    "3_Pendulum": ("pendulum.py", PENDULUM, run_ten_seeds),
}


def changed_text(text: str, row: Row) -> str:
    """The script with a row's changes.

    Raises:
        SystemExit: a piece to replace does not stand in the script exactly once.
    """
    for old, new in row.changes:
        if text.count(old) != 1:
            sys.exit(f"error: {row.name}: {old!r} stands {text.count(old)} times in the script; fix the row")
        text = text.replace(old, new)
    return text


def main() -> None:
    """Runs every row of one folder."""
    folder = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""
    if folder not in FOLDERS:
        sys.exit(f"error: give one of the folders {', '.join(FOLDERS)}")
    name, rows, run = FOLDERS[folder]
    texts = {row.script: (ROOT / folder / (row.script or name)).read_text() for row in rows}
    lines = [
        {"row": row.name, "what": row.what, "constants": " ".join(row.constants)} | line
        for row in rows
        for line in run(changed_text(texts[row.script], row), row, ROOT / folder)
    ]
    for letter, kind in (("M", "mistakes"), ("E", "exercises")):
        with open(ROOT / folder / "assets" / f"{kind}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(line for line in lines if line["row"].startswith(letter))


if __name__ == "__main__":
    main()
