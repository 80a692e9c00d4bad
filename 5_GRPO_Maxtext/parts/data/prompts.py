"""Questions become prompts: read, put into the template and the tokenizer's chat template, cut to a limit."""

import contextlib
import csv
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from parts import settings
from parts.data.questions import read_questions, read_validation, say_overlap
from parts.settings import UserError

TEMPLATE_SECONDS = 5  # that a chat template may take for one question


def read_data(c, fault: Callable | None) -> dict[str, tuple[list[dict[str, str]], str]]:
    """Questions with their right answers, and where they came from, by what they are for.

    Args:
        c: the constants of the run.
        fault: what is wrong with a row's ground truth, as `read_questions` takes it.

    Returns:
        `train`; `test`, asked before and after; `validation`, asked during training, where there are any.

    Raises:
        UserError: no such file, no rows, bad rows where BAD_ROWS is "refuse".
    """
    read = functools.partial(
        read_questions,
        bad_rows=c.BAD_ROWS,
        fault=fault,
        tiny=settings.is_small(c.MODEL),
    )
    test_constant = "TEST_DATASET" if c.TEST_DATASET else "DATASET"
    train = read(c.DATASET, "train", constant="DATASET")
    test = read(c.TEST_DATASET or c.DATASET, "test", constant=test_constant)
    say_overlap(train[0], test[0])
    validation = read_validation(train[0], read) if c.EVAL_EVERY else ([], "")
    return {"train": train, "test": test, "validation": validation}


def make_prompts(c, rows, source: str, tokenizer, think_tags: bool, too_long: Path | None):
    """Adds `prompts`: TEMPLATE inside the tokenizer's own chat template.

    Args:
        rows: from `read_data`.
        source: where they came from.
        tokenizer: of MODEL.
        think_tags: whether the rewards want <think> where SYSTEM_PROMPT has <reasoning>.
        too_long: CSV file for the questions of more than MAX_PROMPT_LENGTH tokens, which are left out; None
            in a dry run, which writes nothing.

    Returns:
        The rows that are short enough, with `prompts`.

    Raises:
        UserError: no question of a source is short enough.
    """
    system_prompt = think_prompt(c.SYSTEM_PROMPT) if think_tags else c.SYSTEM_PROMPT
    kept, left_out = with_prompts(
        rows, tokenizer, c.MAX_PROMPT_LENGTH, template=c.TEMPLATE, system_prompt=system_prompt
    )
    log_too_long(left_out, source, len(rows), c.MAX_PROMPT_LENGTH, too_long)
    refuse_lost_sources(kept, left_out, c.MAX_PROMPT_LENGTH)
    return kept


def think_prompt(system_prompt: str) -> str:
    """The system prompt with <think> in place of <reasoning>, for rewards that want think tags."""
    return system_prompt.replace("reasoning>", "think>")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer.

    By a Unix signal, which ends a loop for good. Only the main thread gets one: elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number, frame):
        raise TimeoutError(f"took more than {seconds:g} s")

    old = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def to_prompt(tokenizer, question: str, *, template: str, system_prompt: str) -> str:
    """The text the model is asked to continue: `template` inside the tokenizer's own chat template.

    Raises:
        UserError: the chat template, a program that comes with MODEL, fails, loops, or drops the question.
    """
    content = template.format(system_prompt=system_prompt, question=question)
    try:
        with time_limit(TEMPLATE_SECONDS):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        fault = "" if question.strip() in prompt else "leaves the question out"  # many strip the message
    except Exception as error:  # whatever a program can raise
        fault = f"fails ({type(error).__name__}: {' '.join(str(error).split()):.200})"
    if fault:
        raise UserError(
            f"MODEL={tokenizer.name_or_path}: its chat template {fault}; correct chat_template in its "
            "tokenizer's files, or take another model"
        )
    return prompt


def with_prompts(
    rows: list[dict[str, str]], tokenizer, limit: int, *, template: str, system_prompt: str
) -> tuple[list[dict[str, str]], list[tuple[str, int, int]]]:
    """Adds the prompts to the questions, and leaves out those that are too long.

    Args:
        rows: from `read_questions`.
        tokenizer: the model's.
        limit: tokens of a prompt, chat template included.
        template: with the fields {question} and {system_prompt}.
        system_prompt: goes into the template.

    Returns:
        The rows with `prompts` added; and source, line and tokens of each row that was left out.
    """
    kept, too_long = [], []
    for row in rows:
        prompt = to_prompt(tokenizer, row["question"], template=template, system_prompt=system_prompt)
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        if length <= limit:
            kept.append({"prompts": prompt} | row)
        else:
            too_long.append((row["source"], int(row["line"]), length))
    return kept, too_long


def refuse_lost_sources(kept: list[dict[str, str]], too_long: list[tuple[str, int, int]], limit: int) -> None:
    """Raises UserError if no question of a source is short enough; arguments as from `with_prompts`."""
    held = {row["source"] for row in kept}
    for lost in dict.fromkeys(source for source, _, _ in too_long if source not in held):
        raise too_short_error(limit, lost, min(tokens for source, _, tokens in too_long if source == lost))


def too_short_error(limit: int, source: str, shortest: int) -> UserError:
    """For a MAX_PROMPT_LENGTH of `limit` tokens, where the shortest question of `source` takes more."""
    return UserError(
        f"MAX_PROMPT_LENGTH={limit}: no question of {source} is that short; "
        f"the shortest takes {shortest} tokens, raise it"
    )


def log_too_long(
    too_long: Sequence[tuple[str, int, int]], source: str, total: int, limit: int, path: Path | None
) -> None:
    """Says which questions are left out because they are too long, and keeps all of them in a CSV file.

    Args:
        too_long: (file, row, tokens) of each.
        source: where the questions come from.
        total: how many there are.
        limit: MAX_PROMPT_LENGTH, in tokens.
        path: of the CSV file; None writes none.
    """
    if not too_long:
        return
    several = "," in source
    named = ", ".join(f"{f'{file}, ' * several}row {line} ({n} tokens)" for file, line, n in too_long[:3])
    print(
        f"{source}: {len(too_long):,} of {total:,} questions are longer than MAX_PROMPT_LENGTH={limit} and "
        f"left out: {named}" + (f", ... ({f'all in {path}' if path else 'and more'})" if too_long[3:] else "")
    )
    if path:
        with open(path, "a", newline="") as file:
            csv.writer(file).writerows(too_long)
