"""From the constants to a run that can begin: check everything, then load model and data."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

import grpo_variants
import settings
from model import devices, llama
from model.cluster import make_cluster
from model.llm import Llm
from model.versions import check_versions
from run import checkpoints, checks, health, memory, process, run_folder
from run import report as reports
from task import questions, run_grader, task_rewards, turns
from task.prompts import check_form, make_prompts, read_data
from task.task import Task, make_task


def prepare(c, tables) -> None:
    """What comes first, also in a dry run."""
    checks.refuse(c)
    settings.quiet()
    check_versions()
    process.keep_compiled()
    grpo_variants.check_method(c, tables)


def dry_run(c, arguments: Sequence[str], course, tables) -> None:
    """DRY_RUN=True: checks everything that can be checked and says what would happen."""
    from run import dry_run

    with contextlib.suppress(settings.UserError):  # the dry run names what's wrong with MODEL
        llama.load_hf_config(c.MODEL, weights=False)
    c = settings.read(type(c), arguments)
    prepare(c, tables)
    dry_run.dry_run(c, course)


@contextlib.contextmanager
def opened(c, arguments: Sequence[str], course, tables) -> Iterator[tuple[Any, Llm, Task, run_folder.Run]]:
    """Yields the constants (MODEL with the hub's commit), the language model, the task, and the run's folder.

    Args:
        c: the constants.
        arguments: those of the command line, for the report.
        course: the module with the course's rewards, reward_func.py.
        tables: of the main script.

    Raises:
        UserError: something in the constants, the files or the machine doesn't fit.
    """
    llama.load_hf_config(c.MODEL, weights=False)
    c = settings.read(type(c), arguments)  # config.json is here now: the column that fits MODEL
    prepare(c, tables)
    folder, hf = llama.load_hf_config(c.MODEL)
    c = replace(c, MODEL=llama.pinned(c.MODEL, folder))
    tokenizer = llama.load_tokenizer(folder)
    data = read_data(c, None if c.REWARD_FUNC else task_rewards.ground_truth_fault)
    everything = [row for rows, _ in data.values() for row in rows]
    grader = run_grader.make_grader(checks.rewards_of(c), c.REWARD_FUNC, course, everything)
    checks.rollout_engine(c)
    checks.model(c, hf)
    llama.check_teacher(c, tokenizer)
    check_form(c, tokenizer, grader)
    if c.ENVIRONMENT:
        turns.load(c.ENVIRONMENT)

    with devices.all_hosts(c):
        devices.plan_devices(c, hf, jax.devices())  # refuses before anything is written
        devices.check_attention(c)
        with run_folder.open_run(c, arguments) as run:
            run.same_questions(data)
            prompts = functools.partial(
                make_prompts,
                c,
                tokenizer=tokenizer,
                think_tags=grader.think_tags,
                too_long=run.logs / "too_long.csv",
            )
            data["test"] = data["test"][0][: c.NUM_TEST_QUESTIONS], data["test"][1]
            rows = {split: prompts(*part) if part[0] else [] for split, part in data.items()}
            sources = {split: source for split, (_, source) in data.items()}
            if c.EVAL_EVERY:
                rows["validation"], rows["train"], sources["validation"] = questions.hold_out(
                    rows["train"], rows["validation"], c.EVAL_QUESTIONS
                )
            llm = Llm(c, make_cluster(c, folder, hf, tokenizer))
            parameters = llama.count_parameters(llm.actor)
            memory.check_disk(c, memory.trained_parameters(c, hf, parameters), run.checkpoints)
            run = replace(run, done=max(checkpoints.saved(run.checkpoints), default=0))
            task = make_task(c, rows, grader, sources)
            reports.introduce(c, run, llm.cluster, folder, hf, grader, rows, sources, run.done)
            yield c, llm, task, run


def report(c, task: Task, run: run_folder.Run, before, after, log) -> None:
    """The report of a run that's over."""
    lines = health.history(log, asdict(c))
    reports.write(c, run, before, after, log, task.sources["test"], lines, run.done)
