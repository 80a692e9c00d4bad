"""Gets a run ready to start: checks everything, then loads model and data."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import settings
from grpo_variants import own_functions
from model import devices, llama, versions
from model.llm import Llm, Pi, load_llm
from run import checks, memory, process, report, run_folder
from run.machine import machine_defaults
from run.run_folder import RunFolder
from settings import UserError
from task import questions, run_grader, turns
from task.prompts import check_form, make_prompts
from task.task import Task, make_task


def prepare(c, tables) -> None:
    """The first steps of a run and of a dry run."""
    checks.refuse(c)
    versions.prepare_libraries()
    process.keep_compiled()
    check_method(c, tables)
    devices.check_machine(c)


def check_method(c, tables) -> None:
    """Tries METHOD's functions on two small groups, one with equal rewards. Refuses a function that
    raises, returns a NaN, or a shape other than the page's own. `rollouts` is first tried in the
    first step.
    """
    # [B, G, T]: answers of 3, 2, 1 and 3 tokens
    mask = np.arange(3) < np.array([[[3], [2], [1], [3]]] * 2)
    log_prob = np.linspace(-2.0, -0.1, mask.size, dtype=np.float32).reshape(8, 3)  # [N, T]
    rewards = np.array([[0.0, 1, 1, 3], [0, 0, 0, 0]])
    samples = SimpleNamespace(rewards=rewards, reward_parts={"reward": rewards}, mask=mask)
    batch = SimpleNamespace(
        completion_ids=np.ones((8, 3), np.int32),
        mask=mask.reshape(8, 3),
        weight=mask.reshape(8, 3) / 18,
        advantage=np.linspace(-1, 1, 8)[:, None],
        beta=np.full((8, 1), c.BETA),
        sampler_log_prob=log_prob,
        ref_log_prob=log_prob[::-1],
        old_log_prob=log_prob[::-1],
    )
    calls = {  # traced as in the loss, where NumPy can't be used
        "advantage": lambda f: f(samples),
        "weights": lambda f: f(mask),
        "objective": lambda f: jax.jit(lambda x: f(Pi(log_prob=x, entropy=-x), batch, c))(log_prob),
        "kl": lambda f: jax.jit(f)(log_prob[::-1] - log_prob),
    }
    own = own_functions(c.METHOD)
    for name in own.keys() & calls.keys():
        pages = next(iter(tables[name][1].values()))  # a table's first function
        given = run_grader.call_user_code(
            f"METHOD={c.METHOD}: {name} raised", calls[name], own[name]
        )
        shapes, wanted = (jax.tree.map(np.shape, x) for x in (given, calls[name](pages)))
        if shapes != wanted:
            raise UserError(
                f"METHOD={c.METHOD}: {name} returned the shape {shapes}, not {wanted}; fix it"
            )
        if not all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(given)):
            nan = "NaN or infinity (a group of equal rewards? a 0 / 0?)"
            raise UserError(f"METHOD={c.METHOD}: {name} returned {nan}; fix it")


def checked_grader(c, hf, tokenizer, course, data) -> run_grader.Grader:
    """The grader of a run, once constants, model, questions and rewards suit each other.

    `data` is from `questions.read_data`, `course` reward_func.py; `tokenizer` None is out of reach.
    """
    everything = [row for rows, _ in data.values() for row in rows]
    rewards = c.REWARDS or "episode_return" * bool(c.ENVIRONMENT)
    grader = run_grader.make_grader(rewards, c.REWARD_FUNC, course, everything)
    if hf.vocab_size < c.TOP_K:
        fault = f"MODEL={c.MODEL} has {hf.vocab_size:,} tokens; use fewer, or -1 (off)"
        raise UserError(f"TOP_K={c.TOP_K}: {fault}")
    if tokenizer:
        llama.check_teacher(c, tokenizer)
        check_form(c, tokenizer, grader)
    if c.ENVIRONMENT:
        turns.load(c.ENVIRONMENT)
    return grader


def make_splits(c, data, grader: run_grader.Grader, tokenizer, too_long=None):
    """Adds prompts to the questions and holds some out, as a run does; also each split's source in
    words.

    `data` is from `questions.read_data`, or a part of it; without a `tokenizer` the prompts are
    left out. `too_long` is a CSV file, as for `make_prompts`.
    """
    rows, sources = {}, {split: source for split, (_, source) in data.items()}
    for split, (part, source) in data.items():
        part = part[: c.NUM_TEST_QUESTIONS] if split == "test" else part
        if part and tokenizer:
            part = make_prompts(c, part, source, tokenizer, grader.think_tags, too_long)
        rows[split] = part
    if c.EVAL_EVERY and "train" in rows:
        rows["validation"], rows["train"], sources["validation"] = questions.hold_out(
            rows["train"], rows["validation"], c.EVAL_QUESTIONS
        )
    return rows, sources


def for_this_machine(c, arguments: Sequence[str]):
    """The constants with the defaults for MODEL, once its config.json is here, and for the machine.

    Prints the defaults that the machine changes, and why.
    """
    machine, given = devices.machine_for(c), dict(argument.split("=", 1) for argument in arguments)
    changed = {
        name: value for name, value in machine_defaults(machine, given).items() if name not in given
    }
    if changed and not settings.is_small(c.MODEL) and devices.is_first():
        print(
            f"machine  {machine.name}:",
            ", ".join(f"{k}={v} ({why})" for k, (v, why) in changed.items()),
        )
    return settings.read(type(c), arguments, machine=machine)


@contextlib.contextmanager
def open_run(
    c, arguments: Sequence[str], course, tables
) -> Iterator[tuple[Any, Llm, Task, RunFolder]]:
    """Yields the constants (MODEL with the hub's commit), language model, task and run folder."""
    devices.find_devices(c)
    # fetches config.json, which decides the constants' column
    llama.fetch_model(c.MODEL, weights=False)
    c = for_this_machine(c, arguments)
    prepare(c, tables)
    checks.rollout_engine(c)
    model_folder, hf = llama.fetch_model(c.MODEL)
    c = replace(c, MODEL=llama.pinned(c.MODEL, model_folder))
    tokenizer = llama.load_tokenizer(model_folder)
    data = questions.read_data(c)
    grader = checked_grader(c, hf, tokenizer, course, data)
    if c.TEACHER:
        c = replace(c, TEACHER=llama.pinned(c.TEACHER, llama.fetch_model(c.TEACHER)[0]))
    with devices.only_first_prints():
        devices.plan_devices(c, hf, jax.devices())  # refuses before anything is written
        with run_folder.open_folder(c, arguments) as folder:
            rows, sources = make_splits(c, data, grader, tokenizer, folder.logs / "too_long.csv")
            folder.same(run_folder.identity(c, rows, grader.names, course.__file__), c)
            llm = load_llm(c, model_folder, hf, tokenizer)
            parameters = llama.count_parameters(llm.actor)
            trained = memory.trained_parameters(c, hf, parameters)
            memory.check_disk(c, trained, folder.checkpoints)
            task = make_task(c, rows, grader, sources)
            report.introduce(c, folder, parameters, trained, model_folder, hf, task, rows)
            yield c, llm, task, folder
