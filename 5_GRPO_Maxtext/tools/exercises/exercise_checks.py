"""Support for exercises.py: test inputs, the usual mistakes, and training with the functions."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import settings
from model import llama
from tools.exercises import grader, which_loss

# %% group_advantage ----------------------------------------------------------------------------------------
REWARDS = np.array([1, 0, 0.5, 0, 3, 1, 0, 1, 2, 2, 2, 2], np.float32)  # three groups; the last has no signal


def look_at_group_advantage(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Three groups of four."""
    yield f"rewards {REWARDS.tolist()}, num_generations 4", function(jnp.asarray(REWARDS), 4)


GROUP_ADVANTAGE = grader.Exercise(
    look_at_group_advantage,
    which_loss.group_advantage,
    {words: edit for edit, words in list(which_loss.PIECES["advantage"].items())[1:]}
    | {
        "1e-6 is missing: a group of equal rewards is 0 / 0": "+ 1e-6 =>",
        "the groups come back as [B, G], not as [B * G]": ".ravel() =>",
    },
)

# %% completion_mask ----------------------------------------------------------------------------------------
COMPLETIONS = np.int32([
    [5, 6, 1, 0, 0, 0],
    [1, 0, 0, 0, 0, 0],  # an empty answer: its end-of-sequence token still counts
    [5, 0, 6, 1, 0, 0],  # token 0 was sampled, so it isn't padding
    [5, 1, 7, 1, 0, 0],  # the sampler went on after the end
    [5, 6, 7, 8, 9, 5],  # cut off
])  # fmt: skip


def look_at_mask(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Each row separately: the first wrong one is shown."""
    mask = function(jnp.asarray(COMPLETIONS), 1)
    yield from zip((f"completion {row}, eos_id 1" for row in COMPLETIONS), jnp.asarray(mask, bool))


def completion_mask(completions, eos_id):
    is_eos = completions == eos_id
    before = is_eos.cumsum(axis=1) - is_eos  # how many there are before each token
    return before == 0


COMPLETION_MASK = grader.Exercise(
    look_at_mask,
    completion_mask,
    {
        "the end-of-sequence token does not count": "- is_eos =>",
        "one token after the end-of-sequence token counts, too":
            "before == 0 => jnp.pad(before, ((0, 0), (1, 0)))[:, :-1] == 0",
        "everything but token 0 counts: the padding is known by where it stands, not by its token":
            "before == 0 => completions != 0",
        "everything but the end-of-sequence token counts": "before == 0 => ~is_eos",
        "the last end-of-sequence token ends an answer, not the first":
            "before == 0 => (before == 0) | is_eos[:, ::-1].cumsum(axis=1)[:, ::-1].astype(bool)",
        "argmax of an answer without end-of-sequence token is 0: all but its first token is lost":
            "before == 0 => jnp.arange(is_eos.shape[1]) <= is_eos.argmax(axis=1, keepdims=True)",
        "an answer without end-of-sequence token does not count at all":
            "before == 0 => (before == 0) & is_eos.any(axis=1, keepdims=True)",
        "the mask is upside down: True where there is padding": "before == 0 => before > 0",
        "the sum runs down the batch, not along the answer": "axis=1 => axis=0",
    },
)  # fmt: skip


# %% grpo_loss ----------------------------------------------------------------------------------------------
def look_at_loss(function: Callable) -> Iterator[tuple[str, jax.Array]]:
    """Value and gradient on the golden batch."""
    b = which_loss.BATCH
    arrays = [jnp.asarray(b[name]) for name in ("old_log_prob", "ref_log_prob", "grpo_advantage", "mask")]
    loss = lambda log_prob: function(log_prob, *arrays, b["epsilon"].item(), b["beta"].item())  # noqa: E731
    jax.eval_shape(loss, b["log_prob"])  # traced as jax.jit does it in a training
    return which_loss.look(loss)


GRPO_LOSS = which_loss.exercise("grpo", given=True)._replace(look=look_at_loss)

EXERCISES = {"group_advantage": GROUP_ADVANTAGE, "completion_mask": COMPLETION_MASK, "grpo_loss": GRPO_LOSS}


# %% Training with them -------------------------------------------------------------------------------------
def as_method(group_advantage: Callable, completion_mask: Callable, grpo_loss: Callable) -> tuple:
    """The reader's functions as `advantage` and `objective` of a METHOD file, which exercises.py is."""
    eos_id = functools.cache(lambda model: llama.load_tokenizer(llama.fetch_model(model)[0]).eos_token_id)

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
        grader.run(EXERCISES, functions)
        print("\nAll right. The main script trains the tiny Llama with them:")
        import grpo_llama3_1_8b_demo as script

        script.main([f"METHOD={inspect.getsourcefile(functions[0])}", *(arguments or ["NUM_BATCHES=30"])])

    settings.exit_on_error(judge)


def judge_file(path: str) -> bool:
    """Says which loss a file holds; True if it's one of the six."""
    near = which_loss.what_it_is(which_loss.read_loss(path))
    for method, *words in near:
        print(f"It is {which_loss.TITLES[method]}{', but ' * bool(words)}{'; and '.join(words)}.")
    if not near:
        print("It is none of them, and no one or two of the usual mistakes make it one.")
    return near != [] and len(near[0]) == 1
