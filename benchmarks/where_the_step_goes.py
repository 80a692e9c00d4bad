"""Where the time of a GRPO step goes: the calls of a step, timed from inside.

    python benchmarks/where_the_step_goes.py [STEPS=12] [NAME=value ...]    # the main script's

It trains as the main script does, with a clock around each call, and leaves out the first steps,
which compile. The update is one compiled program; the loss and its gradient are also compiled on
their own. Processor seconds are of all threads, wall seconds of the clock.
"""

import collections
import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
sys.path.insert(0, str(FOLDER))

import jax
import numpy as np
from machine import clocks

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import settings
from model import faster_on_cpu
from model.llm import Llm
from model.versions import patched
from run import start
from run.training import TrainingRun
from task.task import Task

COMPILING = 3  # first steps, left out
REPEATS = 7  # of a program on its own; the median counts
PARTS = {
    "generation": (Llm, "generate"),
    "rewards": (Task, "grade"),
    "reference": (Llm, "reference_log_probs"),
    "old log-probs": (Llm, "log_probs"),
    "update": (demo, "update"),
    "logging": (TrainingRun, "finish_step"),
}


def train(arguments: list[str]) -> tuple[Any, Llm, list[dict[str, np.ndarray]], list[demo.Batch]]:
    """A short run of the main script.

    Returns its constants and language model; of each step the wall and processor seconds [2] of its
    parts; the batch of each update.
    """
    spent, batches, steps = [], [], TrainingRun.steps

    def timed(part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            started = clocks()
            result = jax.block_until_ready(function(*args, **kwargs))
            spent[-1][part] += clocks() - started
            batches.extend(arg for arg in args if part == "update" and isinstance(arg, demo.Batch))
            return result

        return call

    def timed_steps(run: TrainingRun) -> Iterator[int]:
        for step in steps(run):
            spent.append(collections.defaultdict(lambda: np.zeros(2)))
            started = clocks()
            yield step
            spent[-1]["rest"] = clocks() - started - sum(spent[-1].values())

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # LOG_ANSWERS_EVERY=0: what is logged calls no other part
        arguments = [*arguments, f"RUN_DIR={folder}/run", "EVAL_EVERY=0", "LOG_ANSWERS_EVERY=0"]
        c = settings.read(demo.Constants, arguments)
        c, llm, task, run = stack.enter_context(
            start.open_run(c, arguments, demo.reward_func, demo.TABLES)
        )
        training = stack.enter_context(TrainingRun(c, llm, task, run, demo.evaluate))
        for part, (owner, name) in PARTS.items():
            stack.enter_context(patched(owner, name, timed(part, getattr(owner, name))))
        stack.enter_context(patched(TrainingRun, "steps", timed_steps))
        demo.train(c, llm, task, training)
    return c, llm, spent, batches


def seconds(program: Callable, *arguments: Any) -> np.ndarray:
    """Median wall and processor seconds of a compiled program."""
    spent = []
    for _ in range(REPEATS):
        started = clocks()
        jax.block_until_ready(program(*arguments))
        spent.append(clocks() - started)
    return np.median(spent, axis=0)


def programs(c, llm: Llm, batch):
    """Forward pass and gradient of the loss, compiled on their own, for a step's first gradient
    pass.
    """
    arguments = llm.params, llm.model, jax.tree.map(lambda x: x[0], batch)
    loss = functools.partial(demo.loss, method=grpo_variants.choose(c, demo.TABLES))
    forward = jax.jit(loss).lower(*arguments).compile()
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).compile()
    return forward, gradient, arguments


# %% Main ------------------------------------------------------------------------------------------
def useful_share(masks: list, shared: int) -> tuple[float, float, float]:
    """Positions that hold a token, of all that are computed: of the prompts, of the answers, of
    both.

    `masks` are of each step: of its prompts [N, P] and of its answers [N, T]; of `shared` rows with
    one prompt it is computed once.
    """
    prompts = [prompt[::shared].ravel() for prompt, _ in masks]
    answers = [answer.ravel() for _, answer in masks]
    return tuple(
        float(np.concatenate(part).mean()) for part in (prompts, answers, prompts + answers)
    )


def row(name: str, wall: float, processor: float, whole: float | None = None) -> str:
    """Name, milliseconds of wall and processor, share of the processor's."""
    share = f"{processor / whole:8.1%}" if whole else ""
    return f"{name:24s} {1000 * wall:8.1f} {1000 * processor:8.1f}{share}"


def main() -> None:
    """Trains, compiles the parts, prints their times."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    given["NUM_BATCHES"] = given.pop("STEPS", "12")
    c, llm, steps, batches = train([f"{name}={value}" for name, value in given.items()])
    counted = steps[COMPILING:]
    spent = {name: np.median([step[name] for step in counted], axis=0) for name in (*PARTS, "rest")}
    mask_of = lambda tokens: np.asarray(tokens).reshape(-1, tokens.shape[-1]) != llm.pad_id  # noqa: E731
    masks = [(mask_of(batch.prompt_ids), mask_of(batch.completion_ids)) for batch in batches]
    forward, gradient, parameters = programs(c, llm, batches[-1])
    whole = sum(spent.values())
    print(
        f"\n{f'a step, median of {len(counted)}':24s} {'wall':>8s} "
        f"{'cpu':>8s}   share  (milliseconds)"
    )
    for name, times in spent.items():
        print(row(name, *times, whole[1]))
    print(row("all", *whole))
    print("compiled on their own:")
    print(row("    loss", *seconds(forward, *parameters)))
    print(row("    loss and gradient", *seconds(gradient, *parameters)))
    shared = c.NUM_GENERATIONS if faster_on_cpu.shares_prompts(llm.actor) else 1
    prompts, completions, both = useful_share(masks, shared)
    print(
        f"\npositions that hold a token: prompts {prompts:.0%}, answers {completions:.0%}, "
        f"both {both:.0%}"
    )


if __name__ == "__main__":
    main()
