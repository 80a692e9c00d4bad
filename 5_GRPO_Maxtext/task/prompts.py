"""Turns questions into prompts: applies the templates, and drops those over the limit."""

import csv
import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from constants import RunConstants
from settings import UserError
from task.grading import TAGS
from task.run_grader import THINK_TAGS, WANT_REASONING_TAGS, WANT_THINK_TAGS

DAY = datetime.date(2024, 7, 26)  # for chat templates that print today's; Llama 3.1's own default
WORD_JOINER = "\u2060"  # has no width


def make_prompts(
    c: RunConstants, rows, source: str, tokenizer, think_tags: bool, too_long: Path | None
):
    """The rows that are short enough, with `prompts`: TEMPLATE inside the model's chat template.

    Args:
        rows: from `questions.read_data`; they come from `source`.
        think_tags: whether the rewards want <think> where SYSTEM_PROMPT has <reasoning>.
        too_long: CSV file for the questions of more than MAX_PROMPT_LENGTH tokens, which are left
            out; None in a dry run, which writes nothing.
    """
    kept, left_out = with_prompts(c, rows, tokenizer, think_tags)
    if left_out:
        several = "," in source
        named = ", ".join(
            f"{f'{file}, ' * several}row {line} ({n} tokens)" for file, line, n in left_out[:3]
        )
        more = f", ... ({f'all in {too_long}' if too_long else 'and more'})" if left_out[3:] else ""
        print(
            f"{source}: {len(left_out):,} of {len(rows):,} questions are longer than "
            f"MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH} and left out: {named}{more}"
        )
        if too_long:
            with open(too_long, "a", newline="", encoding="utf-8") as file:
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


@functools.lru_cache(8)
def control_tokens(tokenizer) -> re.Pattern:
    """Finds the texts that a tokenizer reads as control tokens, such as <|eot_id|>."""
    controls = [re.escape(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special]
    return re.compile("|".join(controls) or "$^")


def as_letters(tokenizer, text: str) -> str:
    """`text` with a character without width in each control token, so that none ends the user's
    turn.
    """
    return control_tokens(tokenizer).sub(
        lambda token: token[0][0] + WORD_JOINER + token[0][1:], text
    )


def chat(tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """`messages` in the tokenizer's chat template, dated DAY so that a resumed run gets the same
    prompts.
    """
    options = dict(add_generation_prompt=True, tokenize=False, strftime_now=DAY.strftime)
    return tokenizer.apply_chat_template(messages, **options)


def to_prompt(tokenizer, question: str, *, template: str, system_prompt: str) -> str:
    """The text the model is asked to continue: `template` inside the tokenizer's own chat template.

    Control tokens are plain text in the question, but work in TEMPLATE and SYSTEM_PROMPT. UserError
    if the chat template, a program that comes with MODEL, fails or drops the question.
    """
    question = as_letters(tokenizer, question)
    content = template.format(system_prompt=system_prompt, question=question)
    try:
        prompt = chat(tokenizer, [{"role": "user", "content": content}])
        # many strip the message
        fault = "" if question.strip() in prompt else "leaves the question out"
    except Exception as error:  # whatever a program can raise
        fault = f"fails ({type(error).__name__}: {' '.join(str(error).split()):.200})"
    if fault:
        raise UserError(
            f"MODEL={tokenizer.name_or_path}: its chat template {fault}; correct chat_template in "
            "its tokenizer's files, or take another model"
        )
    return prompt


def with_prompts(c: RunConstants, rows: list[dict[str, str]], tokenizer, think_tags: bool):
    """The rows with `prompts` short enough, and source, line and tokens of each row left out."""
    kept, too_long = [], []
    system_prompt = think_prompt(c.SYSTEM_PROMPT) if think_tags else c.SYSTEM_PROMPT
    for row in rows:
        prompt = to_prompt(
            tokenizer, row["question"], template=c.TEMPLATE, system_prompt=system_prompt
        )
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        if length <= c.MAX_PROMPT_LENGTH:
            kept.append({"prompts": prompt} | row)
        else:
            too_long.append((row["source"], int(row["line"]), length))
    return kept, too_long


def check_form(c: RunConstants, tokenizer, grader) -> None:
    """Checks that a well-formatted answer survives MODEL's tokenizer and chat template.

    UserError if a built-in reward of `grader` couldn't be earned.
    """
    tags = THINK_TAGS if grader.think_tags else TAGS
    prompt = to_prompt(tokenizer, "1", template=c.TEMPLATE, system_prompt=c.SYSTEM_PROMPT)
    form, why = "{}1{}{}1{}".format(*tags), ""
    read = tokenizer.decode(
        tokenizer.encode(form, add_special_tokens=False), skip_special_tokens=True
    )
    names = [
        n
        for n, file in zip(grader.names, grader.files)
        if file == "built in" and n != "episode_return"
    ]
    if names and "".join(read.split()) != form:
        why = f"its tokenizer makes {read!r} of {form}; make the tags tokens that aren't special"
    elif prompt.rstrip().endswith(tags[0]) and (WANT_REASONING_TAGS | WANT_THINK_TAGS).intersection(
        names
    ):
        why = f"its chat template already writes {tags[0]}; take it out of chat_template"
    if why:
        earned = f"no answer earns all of {', '.join(names)}"
        raise UserError(f"MODEL={c.MODEL}: {earned}: {why}, or take other REWARDS")
