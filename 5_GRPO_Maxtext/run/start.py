"""Gets a run ready to start: checks everything, then loads model and data."""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import reward_func
import settings
from constants import RunConstants
from grpo_variants import own_functions
from machines import machine_defaults
from model import devices, llama, versions
from model.llm import Llm, Pi, load_llm
from run import checkpoints, checks, memory, process, report, run_folder
from run.run_folder import RunFolder
from settings import UserError
from task import questions, run_grader, turns
from task.prompts import check_form, make_prompts
from task.task import Answers, Samples, Task, make_task


def prepare(c: RunConstants, tables) -> None:
    """The first steps of a run and of a dry run."""
    checks.refuse(c)
    versions.prepare_libraries()
    process.enable_compilation_cache()
    check_method(c, tables)
    devices.check_machine(c)


def small_samples(c: RunConstants) -> Samples:
    """Two questions with four answers of up to three tokens, as a run with these constants has
    them; the second group's rewards are equal.
    """
    B, G, T, turns_of = 2, 4, 3, [[0, 0, 0], [0, 0, -1], [0, -1, -1], [0, 0, 0]]
    if c.ENVIRONMENT:
        turns_of[0] = [0, -1, 1]  # the environment's token between two of the model's
    turn = np.array([turns_of] * B, np.int32)  # [B, G, T]
    rewards = np.array([[0.0, 1, 1, 3], [0, 0, 0, 0]])  # [B, G]
    episodes = np.full((B, G), None, object) if c.ENVIRONMENT else None
    for place, total in np.ndenumerate(rewards) if c.ENVIRONMENT else ():
        parts = [0.0] * turn[place].max() + [total]
        to_go = [total] * len(parts)
        episodes[place] = turns.Episode(turn[place].tolist(), to_go, parts, terminated=True)
    ids, log_prob = np.full((B, G, T), 2, np.int32), np.full((B, G, T), -0.5, np.float32)
    answers = Answers(
        texts=np.full((B, G), "<answer>7</answer>", object),
        prompt_ids=ids,
        completion_ids=ids,
        sampler_log_prob=log_prob,
        turn=turn,
        lengths=np.array([[3, 2, 1, 3]] * B),
        ended=np.ones((B, G), bool),
        episodes=episodes,
    )
    columns = "prompts", "question", "answer", "data_source", "extra_info", "source", "line"
    asked = {name: np.full((B, G), "7") for name in columns}
    names = settings.names_in(c.REWARDS) if c.REWARDS else ["episode_return"] * bool(c.ENVIRONMENT)
    names = names or [*run_grader.course_rewards(reward_func), "compute_score"]
    parts = OrderedDict((name, rewards / len(names)) for name in names)
    return Samples(asked, answers, parts, rewards, mask=turn >= 0)


def check_method(c: RunConstants, tables) -> None:
    """Tries METHOD's functions on `small_samples`, and on a `Batch` of them. Refuses a function
    that raises, returns a NaN, or a shape other than the page's own; an advantage may also be one
    per token. `rollouts` is first tried in the first step.
    """
    own, samples = own_functions(c.METHOD), small_samples(c)

    def tried(name, function, *arguments, shapes):
        given = run_grader.call_user_code(f"METHOD={c.METHOD}: {name} raised", function, *arguments)
        if (shape := jax.tree.map(np.shape, given)) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise UserError(
                f"METHOD={c.METHOD}: {name} returned the shape {shape}, not {wanted}; fix it"
            )
        if not all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(given)):
            nan = "NaN or infinity (a group of equal rewards? a 0 / 0?)"
            raise UserError(f"METHOD={c.METHOD}: {name} returned {nan}; fix it")
        return given

    per_token = samples.mask.shape  # (B, G, T)
    flat = (8, per_token[2])  # (N, T)
    advantage, weights = np.linspace(-1, 1, 8).reshape(2, 4), samples.mask / 18
    if "advantage" in own:
        shapes = [samples.rewards.shape, per_token]
        advantage = np.asarray(tried("advantage", own["advantage"], samples, shapes=shapes))
    if "weights" in own:
        weights = np.asarray(tried("weights", own["weights"], samples.mask, shapes=[per_token]))
    log_prob = np.linspace(-2.0, -0.1, 24, dtype=np.float32).reshape(flat)
    if "objective" in own:
        # the page's own Batch, which these folders don't import
        page = next(iter(tables["objective"][1].values()))
        batch = (
            inspect.signature(page)
            .parameters["batch"]
            .annotation(
                prompt_ids=samples.answers.prompt_ids.reshape(flat),
                completion_ids=samples.answers.completion_ids.reshape(flat),
                mask=samples.mask.reshape(flat),
                weight=weights.reshape(flat),
                advantage=advantage.reshape(8, -1),
                beta=np.full((8, 1), c.BETA),
                sampler_log_prob=log_prob,
                ref_log_prob=log_prob[::-1] if c.BETA else None,
                old_log_prob=log_prob[::-1],
            )
        )
        # traced as in the loss, where NumPy can't be used
        objective = jax.jit(lambda pi, batch: own["objective"](pi, batch, c))
        pi = Pi(log_prob=log_prob, entropy=-log_prob)
        tried("objective", objective, pi, batch, shapes=[(flat, flat)])
    if "kl" in own:
        tried("kl", jax.jit(own["kl"]), log_prob[::-1] - log_prob, shapes=[flat])


def checked_grader(c: RunConstants, hf, tokenizer, course, data) -> run_grader.Grader:
    """The grader of a run, once constants, model, questions and rewards suit each other.

    `data` is from `questions.read_data`, `course` reward_func.py; `tokenizer` None is out of reach.
    """
    everything = [row for rows, _ in data.values() for row in rows]
    rewards = c.REWARDS or "episode_return" * bool(c.ENVIRONMENT)
    grader = run_grader.make_grader(rewards, c.REWARD_FUNC, course, everything)
    if c.OVERLONG_BUFFER and "overlong" in grader.names:
        raise UserError(
            f"REWARDS={c.REWARDS}: OVERLONG_BUFFER={c.OVERLONG_BUFFER} adds a reward with the name "
            "overlong; rename yours"
        )
    llama.check_length(c, hf)
    if hf.vocab_size < c.TOP_K:
        fault = f"MODEL={c.MODEL} has {hf.vocab_size:,} tokens; use fewer, or -1 (off)"
        raise UserError(f"TOP_K={c.TOP_K}: {fault}")
    if tokenizer:
        llama.check_teacher(c, tokenizer)
        check_form(c, tokenizer, grader)
    if c.ENVIRONMENT:
        turns.load(c.ENVIRONMENT)
    return grader


def make_splits(c: RunConstants, data, grader: run_grader.Grader, tokenizer, too_long=None):
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


def for_this_machine(c: RunConstants, arguments: Sequence[str]):
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


def check_disk(c, hf) -> None:
    """Raises UserError if the weights to download or the run's checkpoints won't fit on the disk.

    Comes before both; `hf` is from MODEL's config.json.
    """
    root, kept = c.CHECKPOINT_DIR or c.RUN_DIR or "runs", 0
    with contextlib.suppress(OSError):  # `open_folder` says which folder can't be used
        if c.RUN_DIR and not root.startswith("gs://"):
            root = checkpoints.root_of_run(c.CHECKPOINT_DIR, Path(c.RUN_DIR))
            kept = len(checkpoints.saved_steps(root))
        trained = memory.trained_parameters(c, hf, llama.parameters_of(hf))
        download = sum(map(llama.bytes_to_download, (c.MODEL, c.TEACHER)))
        memory.check_disk(c, trained, root, kept, download)


@contextlib.contextmanager
def open_run(
    c: RunConstants, arguments: Sequence[str], course, tables
) -> Iterator[tuple[Any, Llm, Task, RunFolder]]:
    """Yields the constants (MODEL with the hub's commit), language model, task and run folder."""
    devices.find_devices(c)
    # fetches config.json, which decides the constants' column
    _, hf = llama.fetch_model(c.MODEL, weights=False)
    c = for_this_machine(c, arguments)
    prepare(c, tables)
    checks.rollout_engine(c)
    check_disk(c, hf)
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
            folder.check_identity(run_folder.identity(c, rows, grader.names, course.__file__), c)
            llm = load_llm(c, model_folder, hf, tokenizer)
            parameters = llama.count_parameters(llm.actor)
            trained = memory.trained_parameters(c, hf, parameters)
            task = make_task(c, rows, grader, sources)
            folder.update_run_json(overlap=questions.overlap(rows))
            report.print_start(c, folder, parameters, trained, model_folder, hf, task, rows)
            yield c, llm, task, folder
