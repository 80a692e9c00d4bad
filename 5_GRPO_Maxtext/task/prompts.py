"""Questions become prompts: read, put into the template and the tokenizer's chat template, cut to a limit."""

import csv
import functools
from collections.abc import Callable
from pathlib import Path

from settings import UserError
from task.questions import read_questions, read_validation


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
    read = functools.partial(read_questions, bad_rows=c.BAD_ROWS, fault=fault)
    test_constant = "TEST_DATASET" if c.TEST_DATASET else "DATASET"
    train = read(c.DATASET, "train", constant="DATASET")
    test = read(c.TEST_DATASET or c.DATASET, "test", constant=test_constant)
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
    if left_out:
        several = "," in source
        named = ", ".join(f"{f'{file}, ' * several}row {line} ({n} tokens)" for file, line, n in left_out[:3])
        more = f", ... ({f'all in {too_long}' if too_long else 'and more'})" if left_out[3:] else ""
        print(
            f"{source}: {len(left_out):,} of {len(rows):,} questions are longer than MAX_PROMPT_LENGTH="
            f"{c.MAX_PROMPT_LENGTH} and left out: {named}{more}"
        )
    if left_out and too_long:
        with open(too_long, "a", newline="") as file:
            csv.writer(file).writerows(left_out)
    for lost in {file for file, _, _ in left_out} - {row["source"] for row in kept}:
        shortest = min(tokens for file, _, tokens in left_out if file == lost)
        raise UserError(
            f"MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH}: no question of {lost} is that short; "
            f"the shortest takes {shortest} tokens, raise it"
        )
    return kept


def think_prompt(system_prompt: str) -> str:
    """The system prompt with <think> in place of <reasoning>, for rewards that want think tags."""
    return system_prompt.replace("reasoning>", "think>")


def to_prompt(tokenizer, question: str, *, template: str, system_prompt: str) -> str:
    """The text the model is asked to continue: `template` inside the tokenizer's own chat template.

    Raises:
        UserError: the chat template, a program that comes with MODEL, fails, or drops the question.
    """
    content = template.format(system_prompt=system_prompt, question=question)
    try:
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
