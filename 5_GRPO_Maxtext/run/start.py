"""Gets a run ready to start: checks everything, then loads model and data."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

import settings
from model import devices, llama, versions
from model.llm import Llm
from model.load import load_llm
from run import checks, memory, process, report, run_folder
from run.check_method import check_method
from run.machine import changes
from task import questions, run_grader, turns
from task.prompts import check_form, make_prompts
from task.task import Task, make_task


def prepare(c, tables) -> None:
    """The first steps of a run and of a dry run."""
    checks.refuse(c)
    versions.prepare()
    process.keep_compiled()
    check_method(c, tables)
    devices.check_machine(c)


def checked_grader(c, hf, tokenizer, course, data) -> run_grader.Grader:
    """The grader of a run, once constants, model, questions and rewards suit each other.

    `data` is from `questions.read_data`, `course` reward_func.py; `tokenizer` None is out of reach.
    """
    everything = [row for rows, _ in data.values() for row in rows]
    rewards = c.REWARDS or "episode_return" * bool(c.ENVIRONMENT)
    grader = run_grader.make_grader(rewards, c.REWARD_FUNC, course, everything)
    if hf.vocab_size < c.TOP_K:
        said = f"MODEL={c.MODEL} has {hf.vocab_size:,} tokens; use fewer, or -1 (off)"
        raise settings.UserError(f"TOP_K={c.TOP_K}: {said}")
    if tokenizer:
        llama.check_teacher(c, tokenizer)
        check_form(c, tokenizer, grader)
    if c.ENVIRONMENT:
        turns.load(c.ENVIRONMENT)
    return grader


def as_asked(c, data, grader: run_grader.Grader, tokenizer, too_long=None):
    """Adds prompts to the questions and holds some out, as a run does; also each split's source in words.

    `data` is from `questions.read_data`, or a part of it; without a `tokenizer` the prompts are left out.
    `too_long` is a CSV file, as for `make_prompts`.
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
    changed = {name: value for name, value in changes(machine, given).items() if name not in given}
    if changed and not settings.is_small(c.MODEL) and devices.is_first():
        print(f"machine  {machine.name}:", ", ".join(f"{k}={v} ({why})" for k, (v, why) in changed.items()))
    return settings.read(type(c), arguments, machine=machine)


@contextlib.contextmanager
def open_run(c, arguments: Sequence[str], course, tables) -> Iterator[tuple[Any, Llm, Task, run_folder.Run]]:
    """Yields the constants (MODEL with the hub's commit), the language model, task and run folder."""
    devices.find_devices(c)
    llama.load_hf_config(c.MODEL, weights=False)
    c = for_this_machine(c, arguments)
    prepare(c, tables)
    checks.rollout_engine(c)
    folder, hf = llama.load_hf_config(c.MODEL)
    c = replace(c, MODEL=llama.pinned(c.MODEL, folder))
    tokenizer = llama.load_tokenizer(folder)
    data = questions.read_data(c)
    grader = checked_grader(c, hf, tokenizer, course, data)
    if c.TEACHER:
        c = replace(c, TEACHER=llama.pinned(c.TEACHER, llama.load_hf_config(c.TEACHER)[0]))
    with devices.only_first_prints():
        devices.plan_devices(c, hf, jax.devices())  # refuses before anything is written
        with run_folder.open_run(c, arguments) as run:
            rows, sources = as_asked(c, data, grader, tokenizer, run.logs / "too_long.csv")
            run.same(run_folder.identity(c, rows, grader.names, course.__file__), c)
            llm = load_llm(c, folder, hf, tokenizer)
            parameters = llama.count_parameters(llm.actor)
            trained = memory.trained_parameters(c, hf, parameters)
            memory.check_disk(c, trained, run.checkpoints)
            task = make_task(c, rows, grader, sources)
            report.introduce(c, run, parameters, trained, folder, hf, task, rows)
            yield c, llm, task, run
