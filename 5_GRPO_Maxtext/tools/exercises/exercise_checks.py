"""Support for exercises.py: test inputs, the usual mistakes, and training with the functions."""

import functools
import inspect
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import settings
from model import llama
from tools.exercises import grader, which_loss
from tools.exercises.grader import Exercise

# %% group_advantage ----------------------------------------------------------------------------------------
REWARDS = np.array([1, 0, 0.5, 0, 3, 1, 0, 1, 2, 2, 2, 2], np.float32)  # three groups; the last has no signal


def look_at_group_advantage(function: Callable) -> dict[str, jax.Array]:
    """Three groups of four."""
    return {f"rewards {grader.text(REWARDS)}, num_generations 4": function(jnp.asarray(REWARDS), 4)}


def group_advantage(expression: str) -> Callable:
    return functools.partial(which_loss.advantage, expression)


GROUP_ADVANTAGE = Exercise(
    look_at_group_advantage,
    group_advantage("normal(r)"),
    {words: group_advantage(x) for x, words in which_loss.PIECES["advantage"].items() if x != "normal(r)"}
    | {
        "1e-6 is missing: a group of equal rewards is 0 / 0": group_advantage("normal(r, small=0)"),
        "the groups come back as [B, G], not as [B * G]":
            lambda rewards, G: which_loss.normal(rewards.reshape(-1, G)),
    },
)  # fmt: skip

# %% completion_mask ----------------------------------------------------------------------------------------
COMPLETIONS = np.int32([
    [5, 6, 1, 0, 0, 0],
    [1, 0, 0, 0, 0, 0],  # an empty answer: its end-of-sequence token still counts
    [5, 0, 6, 1, 0, 0],  # token 0 was sampled, so it isn't padding
    [5, 1, 7, 1, 0, 0],  # the sampler went on after the end
    [5, 6, 7, 8, 9, 5],  # cut off
])  # fmt: skip


def look_at_mask(function: Callable) -> dict[str, jax.Array]:
    """Checks each row separately and shows the first wrong one."""
    mask = grader.numbers(function(jnp.asarray(COMPLETIONS), 1))
    if mask.shape != COMPLETIONS.shape:
        raise grader.Unusable(f"its shape is {list(mask.shape)}; expected {list(COMPLETIONS.shape)}")
    return {f"completion {row}, eos_id 1": mask[i] for i, row in enumerate(COMPLETIONS)}


def before(c: jax.Array, eos_id: int) -> jax.Array:
    """How many end-of-sequence tokens come before this one: int [N, T]."""
    return (c == eos_id).cumsum(axis=1) - (c == eos_id)


COMPLETION_MASK = Exercise(
    look_at_mask,
    lambda c, eos: before(c, eos) == 0,
    {
        "the end-of-sequence token does not count": lambda c, eos: before(c, eos) + (c == eos) == 0,
        "one token after the end-of-sequence token counts, too":
            lambda c, eos: before(jnp.pad(c, ((0, 0), (1, 0)), constant_values=-1)[:, :-1], eos) == 0,
        "everything but token 0 counts: the padding is known by where it stands, not by its token":
            lambda c, eos: c != 0,
        "everything but the end-of-sequence token counts": lambda c, eos: c != eos,
        "the last end-of-sequence token ends an answer, not the first":
            lambda c, eos: (before(c, eos) == 0) | (before(c[:, ::-1], eos)[:, ::-1] + (c == eos) > 0),
        "argmax of an answer without end-of-sequence token is 0: all but its first token is lost":
            lambda c, eos: jnp.arange(c.shape[1]) <= (c == eos).argmax(axis=1, keepdims=True),
        "an answer without end-of-sequence token does not count at all":
            lambda c, eos: (before(c, eos) == 0) & (c == eos).any(axis=1, keepdims=True),
        "the mask is upside down: True where there is padding": lambda c, eos: before(c, eos) > 0,
        "the sum runs down the batch, not along the answer": lambda c, eos: before(c.T, eos).T == 0,
    },
)  # fmt: skip

# %% grpo_loss ----------------------------------------------------------------------------------------------
BATCH = which_loss.golden_batch()
EPSILON, BETA = BATCH["epsilon"].item(), BATCH["beta"].item()


def look_at_loss(function: Callable) -> dict[str, jax.Array]:
    """Value and gradient on the golden batch."""
    names = "old_log_prob", "ref_log_prob", "grpo_advantage"
    old, ref, advantage = (jnp.asarray(BATCH[name], jnp.float32) for name in names)

    def loss(log_prob):
        return function(log_prob, old, ref, advantage, jnp.asarray(BATCH["mask"]), EPSILON, BETA)

    result = jax.eval_shape(loss, BATCH["log_prob"])  # traced as jax.jit does it in a training
    if result.shape:
        raise grader.Unusable(f"it returns an array {list(result.shape)}; expected one number, []")
    value, gradient = jax.value_and_grad(loss)(BATCH["log_prob"])
    return {
        f"golden.npz (N = T = 12), epsilon {EPSILON}, beta {BETA}: the loss": value,
        "the same: the loss's gradient with respect to log_prob [N, T]": gradient,
    }


def loss_from(changes: dict[str, str]) -> Callable:
    """A loss from `which_loss` with the exercise's signature."""
    return lambda log_prob, old, ref, advantage, *_: which_loss.loss(changes, BATCH, log_prob, advantage)


GRPO_LOSS = Exercise(
    look_at_loss,
    loss_from({}),
    {words: loss_from(changes) for (words,), changes in which_loss.changed("grpo")
     if "advantage" not in changes},
    lambda found: [
        f"{one}, and if {other}" for _, one, other in
        which_loss.looks_like({"grpo": tuple(found.values())}, 2, takes_advantage=True)
    ],
)  # fmt: skip

EXERCISES = {"group_advantage": GROUP_ADVANTAGE, "completion_mask": COMPLETION_MASK, "grpo_loss": GRPO_LOSS}


# %% Training with them -------------------------------------------------------------------------------------
def as_method(group_advantage: Callable, completion_mask: Callable, grpo_loss: Callable) -> tuple:
    """The reader's functions as `advantage` and `objective` of a METHOD file, which exercises.py is."""
    eos_id = functools.cache(lambda model: llama.load_tokenizer(llama.load_hf_config(model)[0]).eos_token_id)

    def advantage(samples):
        rewards = samples.rewards  # [B, G]
        flat = group_advantage(jnp.asarray(rewards.ravel(), jnp.float32), rewards.shape[1])
        return np.asarray(flat).reshape(rewards.shape)

    def objective(pi, batch, c):
        import grpo_llama3_1_8b_demo as script

        mask = completion_mask(batch.completion_ids, eos_id(c.MODEL))  # [N, T]
        ref = pi.log_prob if batch.ref_log_prob is None else batch.ref_log_prob
        loss = grpo_loss(
            pi.log_prob, batch.old_log_prob, ref, batch.advantage[:, 0], mask, c.EPSILON, batch.beta[0, 0]
        )  # []
        # The page subtracts the KL again, so we add it here; the reader's loss has its own.
        kl = script.k3((ref - pi.log_prob) * batch.mask)
        return batch.beta * kl - loss, script.clipped_objective(pi, batch, c)[1]  # [N, T] each

    return advantage, objective


# %% Main ---------------------------------------------------------------------------------------------------
def main(*functions: Callable) -> None:
    """Checks the reader's three functions, or the loss in the file on the command line.

    Exit code 0: all right, or the loss is one of the six; 1: not yet; 2: the file can't be used.
    """

    def judge(arguments: list[str]) -> None:
        if arguments and "=" not in arguments[0]:
            sys.exit(0 if judge_file(arguments[0]) else 1)
        if not grader.run(EXERCISES, functions):
            sys.exit(1)
        print("\nAll right. The main script trains the tiny Llama with them:")
        import grpo_llama3_1_8b_demo as script

        script.main([f"METHOD={inspect.getsourcefile(functions[0])}", *(arguments or ["NUM_BATCHES=30"])])

    settings.answer(judge)


def judge_file(path: str) -> bool:
    """Says which loss a file holds; True if it's one of the six."""
    function = which_loss.read_loss(path)
    found = {method: which_loss.value_and_gradient(function, BATCH, method) for method in which_loss.METHODS}
    takes = "advantage" in inspect.signature(function).parameters
    near = next(filter(None, (which_loss.looks_like(found, number, takes) for number in (0, 1, 2))), [])
    for method, *words in near:
        print(f"It is {which_loss.TITLES[method]}{', but ' * bool(words)}{'; and '.join(words)}.")
    if not near:
        print("It is none of them, and no one or two of the usual mistakes make it one.")
    return near != [] and len(near[0]) == 1
