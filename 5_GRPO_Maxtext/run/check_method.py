"""Tries the functions of a METHOD file before the training."""

from types import SimpleNamespace

import jax
import numpy as np

from grpo_variants import Method, own_functions
from settings import UserError
from task.run_grader import called


def check_method(c, tables) -> None:
    """Tries METHOD's functions on two small groups, one with equal rewards. Refuses a function that raises,
    returns a NaN, or a shape other than the page's own. `rollouts` is first tried in the first step.
    """
    mask = np.arange(3) < np.array([[[3], [2], [1], [3]]] * 2)  # [B, G, T]: answers of 3, 2, 1 and 3 tokens
    log_prob = np.linspace(-2.0, -0.1, mask.size, dtype=np.float32).reshape(8, 3)  # [N, T]
    rewards = np.array([[0.0, 1, 1, 3], [0, 0, 0, 0]])
    samples = SimpleNamespace(rewards=rewards, reward_parts={"reward": rewards}, mask=mask)
    batch = SimpleNamespace(
        completion_ids=np.ones((8, 3), np.int32), mask=mask.reshape(8, 3), weight=mask.reshape(8, 3) / 18,
        advantage=np.linspace(-1, 1, 8)[:, None], beta=np.full((8, 1), c.BETA),
        sampler_log_prob=log_prob, ref_log_prob=log_prob[::-1], old_log_prob=log_prob[::-1],
    )  # fmt: skip
    calls = {  # traced as in the loss, where NumPy can't be used
        "advantage": lambda use: use.advantage(samples),
        "weights": lambda use: use.weights(mask),
        "objective": lambda use: jax.jit(
            lambda x: use.objective(SimpleNamespace(log_prob=x, entropy=-x), batch, c)
        )(log_prob),
        "kl": lambda use: jax.jit(use.kl)(log_prob[::-1] - log_prob),
    }
    plain, own = Method(*(next(iter(table.values())) for table in tables.values())), own_functions(c.METHOD)
    for name in own.keys() & calls.keys():
        given = called(f"METHOD={c.METHOD}: {name} raised", calls[name], plain._replace(**own))
        shapes, wanted = (jax.tree.map(np.shape, x) for x in (given, calls[name](plain)))
        if shapes != wanted:
            raise UserError(f"METHOD={c.METHOD}: {name} returned the shape {shapes}, not {wanted}; fix it")
        if not all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(given)):
            nan = "NaN or infinity (a group of equal rewards? a 0 / 0?)"
            raise UserError(f"METHOD={c.METHOD}: {name} returned {nan}; fix it")
