"""Asks a model what the main script trained it for: one question, a built-in batch, or a file of
questions.

    python 5_GRPO_Maxtext/inference.py "Kim has 8 cards and loses 6. How many cards are there now?"
    python 5_GRPO_Maxtext/inference.py                                     # the built-in questions
    python 5_GRPO_Maxtext/inference.py SAMPLES=8 "Tom has 3 boxes with 5 coins in each box. ..."
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine COMPARE=True   # before and after
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine PAGE=True ANSWER=15 "Tom has 3 ..."
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine/50 \
        INPUT=questions.jsonl OUTPUT=answers.jsonl

The answer to your own question is streamed. Decoding is greedy unless you set SAMPLING or SAMPLES.
MODEL, prompt, lengths, rewards and LoRA come from the run's constants.json unless the command line
sets them. PAGE writes a page for the browser: eight answers to each question, their rewards and
advantages, and which of their tokens training made more or less likely.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import settings
from constants import Arrays
from plain_text import escape_controls
from run import checks, run_files
from run.run_files import Checkpoint
from settings import Count, Seed, TwoOrMore, UserError, pair
from task import prompts, questions, run_grader, task_rewards
from task.grading import parse_number


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(Arrays):
    """Edit a value here, or give it for one run as NAME=value. Arrays: constants.py."""

    # a run's folder, runs/mine/50, or base (empty = newest run in runs/, else base)
    CHECKPOINT: str = ""
    MODEL: str = ""  # Hugging Face name or folder (empty = the run's, and tiny_llama for base)
    COMPARE: bool = False  # True: the answers from before training above those of CHECKPOINT
    SAMPLES: Count = 1  # answers per question; above 1 the most frequent answer is the vote
    PAGE: bool = False  # True: answers.html in the run's folder shows them; 8 SAMPLES instead of 1
    ANSWER: str = ""  # the right answer to the question on the command line; then it is graded
    # (empty = greedy; standard if SAMPLES > 1)
    SAMPLING: Literal["", "greedy", "standard", "liberal"] = ""
    SEED: Seed = 0  # of the samples; greedy answers do not depend on it
    # JSON, JSONL or Parquet file with question or prompt; answer or ground_truth is graded
    INPUT: str = ""
    # JSONL file: INPUT's rows and the answers (empty = INPUT's name with .answers)
    OUTPUT: str = ""
    BATCH_SIZE: Count = 64  # answers decoded at once; more: faster, and more memory
    REWARDS: str = ""  # names, comma-separated (empty = compute_score if INPUT has a data_source)
    # Python file with your own compute_score; a run's is run only if named here
    REWARD_FUNC: str = ""
    # --- how a run asked; without one, how the main script would
    # what the model is asked to write
    SYSTEM_PROMPT: str = (
        "You are given a problem. Think about it and write your reasoning between <reasoning> and "
        "</reasoning>. Then give the final answer, one number and nothing else, between <answer> "
        "and </answer>."
    )
    # the user's message, put inside the tokenizer's chat template
    TEMPLATE: str = pair(small="{question}", large="{system_prompt}\n\n{question}")
    # tokens with template; longer ones are refused
    MAX_PROMPT_LENGTH: Count = pair(small=28, large=256)
    # tokens per answer; longer ones are cut off
    TOTAL_GENERATION_STEPS: TwoOrMore = pair(small=28, large=768)


# Constants we reuse from a run. Its BATCH_SIZE and SEED mean something else, and its REWARD_FUNC
# could be anyone's code, so we only run a file named on the command line.
PROMPT_AND_LENGTHS = "SYSTEM_PROMPT", "TEMPLATE", "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS"
RUNS_CONSTANTS = (
    "MODEL",
    "REWARDS",
    *PROMPT_AND_LENGTHS,
    *(field.name for field in dataclasses.fields(Arrays)),
)
PAGE_SAMPLES = 8  # answers per question on the page; advantages need a group

QUESTIONS = (  # held-out questions in the tiny Llama's 76 words, with their answers
    ("Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?", "7"),
    ("Lily has 3 boxes with 5 shells in each box. How many shells does Lily have?", "15"),
    ("Sara has 3 boxes with 6 pencils in each box. How many pencils does Sara have?", "18"),
)


# %% Arguments -------------------------------------------------------------------------------------
def read_arguments(arguments: Sequence[str]) -> tuple[Constants, str, Checkpoint | None]:
    """The constants, including the run's; the question or ""; the checkpoint, None for base."""
    names = "|".join(field.name for field in dataclasses.fields(Constants))
    # a lower-case name is a typo, not a question
    constant = re.compile(f"--|-h$|[A-Z_]+=|(?i:{names})=")
    # MODEL= is the default
    given = [text for text in arguments if constant.match(text) and text != "MODEL="]
    words = [text for text in arguments if not constant.match(text)]
    question = " ".join(words).strip()
    if words and not question:
        raise UserError("the question is empty; write one, or none at all for the built-in batch")
    c = settings.read(Constants, given)
    checkpoint = find_checkpoint(c)
    no_number = c.ANSWER and parse_number(c.ANSWER) is None
    alike = c.SAMPLING == "greedy" and (c.SAMPLES > 1 or c.PAGE)
    no_run = c.COMPARE and not checkpoint
    for holds, fault in (
        (question and c.INPUT, f"INPUT={c.INPUT}: there is a question, too; give one of the two"),
        (
            c.ANSWER and not question,
            f"ANSWER={c.ANSWER}: there is no question that it answers; write one",
        ),
        (no_number, f"ANSWER={c.ANSWER}: a question here is graded by its number; give one"),
        (
            alike,
            f"SAMPLES={c.SAMPLES}, PAGE={c.PAGE}: greedy answers are all alike; leave SAMPLING out",
        ),
        (no_run, "COMPARE=True: no run to compare with; give CHECKPOINT= a run's folder"),
    ):
        if holds:
            raise UserError(fault)
    trained_with = checkpoint.constants if checkpoint else {"MODEL": "tiny_llama"}
    c = settings.read(
        Constants, given, {k: v for k, v in trained_with.items() if k in RUNS_CONSTANTS}
    )
    if trained_with.get("REWARD_FUNC") and not c.REWARD_FUNC:
        # not `compute_score`: the file has one
        ours = *run_grader.course_rewards(reward_func), *run_grader.THINK_REWARDS
        kept = [name for name in settings.names_in(c.REWARDS) if name in ours]
        c = dataclasses.replace(c, REWARDS=",".join(kept))
    if c.PAGE and c.SAMPLES == 1:
        c = dataclasses.replace(c, SAMPLES=PAGE_SAMPLES)
    checks.template(c)
    return c, question, checkpoint


def find_checkpoint(c: Constants) -> Checkpoint | None:
    """The checkpoint that CHECKPOINT names; None for base."""
    newest = None if c.CHECKPOINT or c.MODEL else run_files.newest_run()
    if c.CHECKPOINT == "base" or not (c.CHECKPOINT or newest):
        return None
    checkpoint = run_files.checkpoint_at(newest or Path(c.CHECKPOINT), "CHECKPOINT")
    if checkpoint is None:
        why = "not in a run of the main script (no constants.json there)"
        raise UserError(
            f"CHECKPOINT={c.CHECKPOINT}: {why}; give its RUN_DIR, RUN_DIR/number, or base"
        )
    if environment := checkpoint.constants.get("ENVIRONMENT"):
        trained = f"was trained by turns with ENVIRONMENT={environment}"
        fault = f"{trained}, and nobody answers its model here"
        place = "its evaluations are in evaluations.jsonl and after.json"
        raise UserError(f"CHECKPOINT={checkpoint.run_dir}: {fault}; {place}")
    return checkpoint


def read_rows(c: Constants, question: str) -> list[dict[str, Any]]:
    """INPUT's questions, `question`, or the built-in ones; rows as `read_questions` returns."""
    if c.INPUT:
        fault = None if c.REWARD_FUNC else task_rewards.ground_truth_fault
        return questions.read_questions(
            c.INPUT, "test", constant="INPUT", fault=fault, optional=True
        )[0]
    asked = [(question, c.ANSWER or None)] if question else QUESTIONS
    given = [{"question": text} | ({"answer": gold} if gold else {}) for text, gold in asked]
    more = {"answer": None, "data_source": None, "extra_info": ""}
    return [more | row | {"row": row} for row in given]


def read_all(arguments: Sequence[str]):
    """Everything we can read before the imports: `read_arguments`, `read_rows`, the output file."""
    c, question, checkpoint = read_arguments(arguments)
    rows = read_rows(c, question)
    if not (c.OUTPUT or c.INPUT):
        return c, question, checkpoint, rows, None
    path = Path(c.OUTPUT or Path(c.INPUT).with_suffix(".answers.jsonl"))
    if path.exists():
        raise UserError(f"OUTPUT={path}: exists already; choose another name, or remove it")
    if not path.resolve().parent.is_dir():
        raise UserError(f"OUTPUT={path}: there is no such folder; make it, or choose another")
    return c, question, checkpoint, rows, path


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses bad input now, before seconds of imports
    settings.exit_early_on_error(read_all)

import jax

import reward_func
from model import devices, llama, versions
from model.rollout import sampling_config
from run import inference_output, process, trained_model


# %% Asking ----------------------------------------------------------------------------------------
def make_grader(c: Constants, rows: list[dict[str, Any]]):
    """The run's rewards; they grade the rows that have an answer and a data_source."""
    graded = [row for row in rows if row["answer"] is not None and row["data_source"]]
    return run_grader.make_grader(c.REWARDS, c.REWARD_FUNC, reward_func, graded)


def add_prompts(c: Constants, rows, tokenizer, think_tags: bool = False) -> list[dict[str, Any]]:
    """The rows with `prompts` as in a run; warns of unknown words, UserError for too long ones."""
    numbered = [row | {"source": "", "line": str(i)} for i, row in enumerate(rows, start=1)]
    rows, too_long = prompts.with_prompts(c, numbered, tokenizer, think_tags)
    for _, number, length in too_long:
        raise UserError(
            f"MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH}: question {number} takes {length} tokens, "
            "template included; shorten it, or raise the limit (longer ones were not trained)"
        )
    unknown = []
    for row in rows:
        encoded = tokenizer(row["question"], add_special_tokens=False, return_offsets_mapping=True)
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        unknown += [
            row["question"][slice(*at)] for token, at in tokens if token == tokenizer.unk_token_id
        ]
    if unknown:
        print(
            f"note: {c.MODEL} has no token for {' '.join(dict.fromkeys(unknown))!r}, "
            "and cannot see it"
        )
    return rows


def sample_answers(c: Constants, rollout, config, rows: list[dict[str, Any]], name: str):
    """SAMPLES completions per prompt as Tunix's RolloutOutput; also stored in the row as `name`."""
    output = rollout.generate([row["prompts"] for row in rows for _ in range(c.SAMPLES)], config)
    for i, row in enumerate(rows):
        row[name] = output.text[i * c.SAMPLES : (i + 1) * c.SAMPLES]
    return output


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> None:
    """Asks the questions; see the module's docstring."""
    c, question, checkpoint, rows, path = read_all(arguments)
    versions.prepare_libraries()
    process.enable_compilation_cache()
    devices.check_gpu()
    grader = make_grader(c, rows)
    tokenizer = llama.load_tokenizer(llama.fetch_model(c.MODEL)[0])
    about = f"base, {c.MODEL} as it is"
    if checkpoint:
        root, step = trained_model.root_and_step(checkpoint)
        trained_model.warn_if_model_changed(c.MODEL, checkpoint)
        rank = checkpoint.constants.get("LORA_RANK")
        about = f"{root}/{step}{f' (LoRA of rank {rank})' if rank else ''}, trained from {c.MODEL}"
    print(escape_controls(f"checkpoint: {about}"))
    own = checkpoint.constants.get("REWARD_FUNC") if checkpoint else ""
    if own and not c.REWARD_FUNC:
        theirs = f"the run's own are in {own}: only REWARD_FUNC={own} here would run it"
        print(escape_controls(f"rewards:    {grader}; {theirs}"))
    rows = add_prompts(c, rows, tokenizer, grader.think_tags)

    rollout = trained_model.make_rollout(c, tokenizer, len(rows) * c.SAMPLES, checkpoint)
    by_default = "greedy" if c.SAMPLES == 1 else "standard"
    config = sampling_config(c, c.SAMPLING or by_default, seed=jax.random.key(c.SEED))
    if c.COMPARE:
        sample_answers(c, rollout, config, rows, "before")
    if checkpoint:
        trained_model.restore(rollout, checkpoint)
    if question and c.SAMPLES == 1 and not c.COMPARE:
        rows[0]["after"] = [""]
        for piece in rollout.stream(rows[0]["prompts"], config):
            print(escape_controls(piece), end="", flush=True)
            rows[0]["after"][0] += piece
        print(escape_controls(inference_output.verdict(grader, rows[0]["after"][0], rows[0])))
    else:
        output = sample_answers(c, rollout, config, rows, "after")
        inference_output.show(rows, grader)
    if path:
        inference_output.write_rows(path, rows, grader)
    if c.PAGE:
        folder, log_probs = Path(), [inference_output.token_log_probs(c, rollout, output)]
        if checkpoint:
            untrained = trained_model.make_rollout(c, tokenizer, len(rows) * c.SAMPLES, checkpoint)
            log_probs.insert(0, inference_output.token_log_probs(c, untrained, output))
            folder = checkpoint.run_dir
        path = folder / "answers.html"
        inference_output.write_page(
            c, path, rollout.tokenizer, rows, output, log_probs, grader, about
        )


if __name__ == "__main__":
    settings.run(main)
