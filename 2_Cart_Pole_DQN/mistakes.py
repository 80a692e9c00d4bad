"""What goes wrong, and how it looks: cart_pole_dqn.py trained with one of its functions replaced.

    python 2_Cart_Pole_DQN/mistakes.py                # about 6 minutes
    python 2_Cart_Pole_DQN/mistakes.py NUM_SEEDS=3    # a constant of the script, for all rows

Writes mistakes.csv (rows M) and exercises.csv (rows E), a line per row and seed.
"""

import contextlib
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import cart_pole as env
import cart_pole_dqn as script
import runs
import settings
from study import measure


class Row(NamedTuple):
    """One training of the script, changed."""

    name: str  # as in the tables of MEASUREMENTS.md
    what: str
    changes: tuple[tuple[Any, str, Any], ...] = ()  # module, name, what stands in its place
    constants: tuple[str, ...] = ()


# %% What stands in the place of a function --------------------------------------------------------------
n_step, td_target = script.n_step, script.td_target


def truncated_is_terminated(
    batch: env.Transition, gamma: float
) -> tuple[jax.Array, jax.Array, env.Transition]:
    """Windows whose last step has terminated, too, where it was cut off."""
    reward, steps, last = n_step(batch, gamma)
    return reward, steps, last._replace(terminated=last.terminated | last.truncated)


def past_the_end(reward: jax.Array, terminated: jax.Array, next_q: jax.Array, gamma: jax.Array) -> jax.Array:
    """The target without (1 - terminated)."""
    return td_target(reward, jnp.zeros_like(terminated), next_q, gamma)


def column(*arguments: jax.Array) -> jax.Array:
    """The targets as [B, 1]: less predictions [B] they are a square [B, B]."""
    return td_target(*arguments)[:, None]


def averaged(online: Any, target: Any, steps: jax.Array, interval: int) -> Any:
    """A target network that moves one per cent of the way at each gradient step."""
    return optax.incremental_update(online, target, 0.01)


# %% Rows -----------------------------------------------------------------------------------------------
ROWS = [
    Row("M1", "truncation taken for termination", ((script, "n_step", truncated_is_terminated),)),
    Row("M2", "(1 - terminated) forgotten", ((script, "td_target", past_the_end),)),
    Row("M3", "[B, 1] less [B]", ((script, "td_target", column),)),
    Row("M4", "Gymnasium's polemass_length", ((env, "PHYSICS", type(env.PHYSICS)()),)),
    Row("E1a", "as it is", (), ("N_STEPS=1", "TARGET_SYNC_INTERVAL=100")),
    Row("E1b", "as it is", (), ("N_STEPS=1", "TARGET_SYNC_INTERVAL=50")),
    Row("E2a", "as it is", (), ("NUM_STEPS=26_000",)),
    Row("E2b", "as it is", (), ("NUM_STEPS=26_000", "DECAY_STEPS=4_000")),
    Row("E3", "target network averaged", ((optax, "periodic_update", averaged),)),
]


# %% Running them ---------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """Trains every row and writes both tables.

    Args:
        arguments: `NAME=value`, constants of the script; they hold for every row that does not change them.

    Raises:
        settings.UserError: a constant is wrong, also in one of the rows; nothing was trained then.
    """
    started = time.perf_counter()
    for row in ROWS:
        script.configure([*arguments, *row.constants])
    runs.start_jax()
    run_dir = runs.open_run("cart_pole_dqn_mistakes", script.configure(arguments))
    lines = []
    for row in ROWS:
        print(f"\n{row.name}: {row.what} {' '.join(row.constants)}")
        with contextlib.ExitStack() as stack:
            for change in row.changes:
                stack.enter_context(mock.patch.object(*change))
            of_row, _ = measure([*arguments, *row.constants])
        named = {"row": row.name, "what": row.what, "constants": " ".join(row.constants)}
        lines += [named | line for line in of_row]
    for letter, name in (("M", "mistakes"), ("E", "exercises")):
        runs.write_csv(run_dir / f"{name}.csv", [line for line in lines if line["row"].startswith(letter)])
    seconds = time.perf_counter() - started
    runs.write_json(run_dir / "result.json", {"seconds": seconds})
    print(f"{seconds:.0f} s; everything of this run is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)
