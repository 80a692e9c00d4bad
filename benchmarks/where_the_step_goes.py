"""Where the time of a GRPO step goes: the calls of a step, timed from inside, and the gradient's operations.

    python benchmarks/where_the_step_goes.py [STEPS=12] [NAME=value ...]    # the main script's

It trains as the main script does, with a clock around each call, and leaves out the first steps, which
compile. The update is one compiled program; the loss and its gradient are also compiled on their own.
What an operation of the gradient costs is from jax.profiler, what kind it is from XLA's HLO.

Processor seconds are of all threads, wall seconds of the clock.
"""

import collections
import contextlib
import functools
import re
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
from run import process, start
from run.training import TrainingRun
from task.task import Task

COMPILING = 3  # first steps, left out
REPEATS = 7  # of a program on its own; the median counts


class Clock:
    """Sums wall and processor seconds [2] by name, one entry per step."""

    def __init__(self):
        self.steps: list[dict[str, np.ndarray]] = [{}]

    def around(self, name: str, function: Callable) -> Callable:
        """The function, waited for and timed. What it calls of the same clock is not counted twice."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            started, inside = clocks(), self.total()
            result = jax.block_until_ready(function(*args, **kwargs))
            self.add(name, clocks() - started - (self.total() - inside))
            return result

        return timed

    def add(self, name: str, spent: np.ndarray) -> None:
        """To the step in progress."""
        self.steps[-1][name] = self.steps[-1].get(name, np.zeros(2)) + spent

    def total(self) -> np.ndarray:
        """Of the step in progress so far."""
        return sum(self.steps[-1].values(), np.zeros(2))


def between(steps: Iterator[Any], clock: Clock) -> Iterator[Any]:
    """The batches; what a step spends outside of the timed calls is its `rest`."""
    started = None
    for batch in steps:
        now = clocks()
        if started is not None:
            clock.add("rest", now - started - clock.total())
            clock.steps.append({})
        started = now
        yield batch


def watch(clock: Clock, batches: list) -> contextlib.ExitStack:
    """While the block runs, the clock is around the calls of a step, and the batches are kept."""
    place, traced, stack = Llm.place, process.traced, contextlib.ExitStack()

    def kept(llm, batch):
        batches.append(place(llm, batch))
        return batches[-1]

    for owner, name, part in (
        (Llm, "generate", "generation"),
        (Task, "grade", "rewards"),
        (Llm, "reference_log_probs", "reference"),
        (Llm, "log_probs", "old log-probs"),
        (demo, "update", "update"),
        (TrainingRun, "after", "logging"),
    ):
        stack.enter_context(patched(owner, name, clock.around(part, getattr(owner, name))))
    stack.enter_context(patched(Llm, "place", kept))
    stack.enter_context(patched(process, "traced", lambda *arguments: between(traced(*arguments), clock)))
    return stack


def train(arguments: list[str], clock: Clock, batches: list):
    """A short run of the main script.

    Returns:
        Its constants and language model.
    """
    with tempfile.TemporaryDirectory() as folder:
        c = settings.read(demo.Constants, [*arguments, f"RUN_DIR={folder}/run", "EVAL_EVERY=0"])
        with (
            start.opened(c, arguments, demo.reward_func, demo.TABLES) as (c, llm, task, run),
            TrainingRun(c, llm, task, run, demo.evaluate) as training,
            watch(clock, batches),
        ):
            demo.train(c, llm, task, training)
    return c, llm


def seconds(program: Callable, *arguments: Any) -> np.ndarray:
    """Median wall and processor seconds of a compiled program."""
    spent = []
    for _ in range(REPEATS):
        started = clocks()
        jax.block_until_ready(program(*arguments))
        spent.append(clocks() - started)
    return np.median(spent, axis=0)


def programs(c, llm: Llm, batch):
    """Forward pass and gradient of the loss, compiled on their own.

    Args:
        c: the constants of the run.
        llm: after the training.
        batch: the step's answers in gradient passes, of which the first counts.
    """
    arguments = llm.params, llm.model, jax.tree.map(lambda x: x[0], batch)
    loss = functools.partial(demo.loss, use=grpo_variants.choose(c, demo.TABLES))
    forward = jax.jit(loss).lower(*arguments).compile()
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).compile()
    return forward, gradient, arguments


# %% Operations ---------------------------------------------------------------------------------------------
KINDS = (  # the first whose opcodes are in an operation names it
    ("dot", {"dot", "convolution"}),
    ("scatter, gather", {"scatter", "gather", "dynamic-slice", "dynamic-update-slice"}),
    ("copy, transpose", {"copy", "transpose"}),
    ("reduce", {"reduce", "reduce-window"}),
)


def kinds_of(hlo: str) -> dict[str, str]:
    """The kind of each operation in a program's HLO text: one of KINDS, or "element-wise".

    A fusion has the kind of the operations that are in it. A transposition that XLA does by reading in
    another order has no instruction of its own, and counts as what it is fused into.
    """
    inside = collections.defaultdict(set)  # opcodes by computation
    calls, opcodes, computation = {}, {}, ""
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?(\S+) \(.*\{$", line):
            computation = header[1]
        elif found := re.match(r"\s+(?:ROOT )?%?(\S+) = (?:\([^=]*?\)|\S+) ([\w-]+)\(", line):
            name, opcode = found[1], found[2]
            inside[computation].add(opcode)
            opcodes[name] = opcode
            if called := re.search(r"(?:calls|to_apply)=%?([\w.-]+)", line):
                calls[name] = called[1]
    kinds = {}
    for name, opcode in opcodes.items():
        found = {opcode} | (inside[calls[name]] if opcode in ("fusion", "call") else set())
        kinds[name] = next((kind for kind, wanted in KINDS if found & wanted), "element-wise")
    return kinds


def cost_by_operation(program, *arguments: Any) -> dict[str, float]:
    """Seconds of each operation of a compiled program, from the profiler; of all threads together."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(REPEATS):
                jax.block_until_ready(program(*arguments))
        trace = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    spent = collections.Counter()
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation:
                    spent[operation] += event.duration_ns / 1e9 / REPEATS
    return spent


# %% Main ---------------------------------------------------------------------------------------------------
def useful_share(masks: list, shared: int) -> tuple[float, float, float]:
    """Positions that hold a token, of all that are computed: of the prompts, of the answers, of both.

    Args:
        masks: of each step: of its prompts [N, P] and of its answers [N, T].
        shared: rows that have one prompt, computed once.
    """
    prompts, answers_ = (
        [(int(mask.sum()), mask.size) for mask in part]
        for part in ([prompt[::shared] for prompt, _ in masks], [answer for _, answer in masks])
    )
    both = prompts + answers_
    return tuple(sum(n for n, _ in part) / sum(n for _, n in part) for part in (prompts, answers_, both))


def row(name: str, wall: float, processor: float, whole: float | None = None) -> str:
    """Name, milliseconds of wall and processor, share of the processor's."""
    share = f"{processor / whole:8.1%}" if whole else ""
    return f"{name:24s} {1000 * wall:8.1f} {1000 * processor:8.1f}{share}"


def main() -> None:
    """Trains, compiles the parts, prints three tables."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    steps = int(given.pop("STEPS", "12"))
    arguments = [f"{name}={value}" for name, value in given.items()] + [f"NUM_BATCHES={steps}"]
    clock, batches = Clock(), []
    c, llm = train(arguments, clock, batches)
    counted = clock.steps[COMPILING:-1]
    names = ("generation", "rewards", "reference", "old log-probs", "update", "logging", "rest")
    spent = {name: np.median([step.get(name, np.zeros(2)) for step in counted], axis=0) for name in names}
    pad_id, masks = llm.pad_id, []
    for batch in batches:
        tokens = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (batch.prompt_ids, batch.completion_ids))
        masks.append([ids != pad_id for ids in tokens])
    batch = batches[-1]
    if c.BETA:  # its numbers do not matter here
        batch = batch._replace(ref_log_prob=batch.sampler_log_prob)
    forward, gradient, parameters = programs(c, llm, batch)
    forward_seconds, gradient_seconds = seconds(forward, *parameters), seconds(gradient, *parameters)
    operations = cost_by_operation(gradient, *parameters)
    whole = sum(spent.values())
    print(f"\n{f'a step, median of {len(counted)}':24s} {'wall':>8s} {'cpu':>8s}   share  (milliseconds)")
    for name, times in spent.items():
        print(row(name, *times, whole[1]))
    print(row("all", *whole))
    print("compiled on their own:")
    print(row("    loss", *forward_seconds))
    print(row("    loss and gradient", *gradient_seconds))
    shared = c.NUM_GENERATIONS if faster_on_cpu.shares_prompts(llm.actor) else 1
    prompts, completions, both = useful_share(masks, shared)
    print(f"\npositions that hold a token: prompts {prompts:.0%}, answers {completions:.0%}, both {both:.0%}")

    kinds = kinds_of(gradient.as_text())
    by_kind = collections.Counter()
    for operation, cost in operations.items():
        by_kind[kinds.get(operation, "other")] += cost
    print("\nthe gradient's operations, processor milliseconds in the profiler:")
    for kind, cost in by_kind.most_common():
        print(f"{kind:24s} {1000 * cost:8.1f} {cost / sum(by_kind.values()):6.1%}")
    for operation, cost in operations.most_common(10):
        print(f"    {operation:36s} {1000 * cost:8.1f}  {kinds.get(operation, 'other')}")


if __name__ == "__main__":
    main()
