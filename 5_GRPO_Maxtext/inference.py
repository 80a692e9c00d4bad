"""Asks a model what the main script trained it for: one question, a built-in batch, or a file of questions.

    python 5_GRPO_Maxtext/inference.py "Kim has 8 cards and loses 6. How many cards are there now?"
    python 5_GRPO_Maxtext/inference.py                                     # the built-in questions
    python 5_GRPO_Maxtext/inference.py --samples 8 "Tom has 3 boxes with 5 coins in each box. How many?"
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine COMPARE=True   # before and after, side by side
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine --page ANSWER=15 "Tom has 3 boxes with 5 ..."
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine/50 INPUT=questions.jsonl OUTPUT=answers.jsonl

A question of your own is answered token by token as it is decoded. Decoding is greedy unless SAMPLING or
SAMPLES says otherwise. MODEL, prompt, lengths, rewards and LoRA are the run's, from its constants.json, where
the command line does not give them. `--page` writes a page for the browser: eight answers to each question,
their rewards and advantages, and which of their tokens training raised or lowered.
"""

import dataclasses
import itertools
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parts import settings
from parts.data import prompts, questions
from parts.plain_text import shown
from parts.rewards import run_grader
from parts.rewards.grading import parse_number
from parts.run import checks, run_files
from parts.settings import Count, CountOrOff, Seed, UserError, pair


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    CHECKPOINT: str = ""  # a run's folder, runs/mine/50, or base (empty = newest run in runs/, else base)
    MODEL: str = ""  # Hugging Face name or folder (empty = the run's, and tiny_llama for base)
    COMPARE: bool = False  # True: the answers from before training beside those of CHECKPOINT
    SAMPLES: Count = 1  # answers per question, as --samples N; above 1 the most frequent answer is the vote
    PAGE: bool = False  # True, or --page: answers.html in the run's folder shows them; 8 SAMPLES instead of 1
    ANSWER: str = ""  # the right answer to the question on the command line; then it is graded
    SAMPLING: Literal["", "greedy", "standard", "liberal"] = ""  # (empty = greedy; standard if SAMPLES > 1)
    SEED: Seed = 0  # draws the samples; greedy answers do not depend on it
    INPUT: str = ""  # JSON, JSONL or Parquet file with question or prompt; answer or ground_truth is graded
    OUTPUT: str = ""  # JSONL file: INPUT's rows and the answers (empty = INPUT's name with .answers)
    BATCH_SIZE: Count = 64  # answers decoded at once; more: faster, and more memory
    # --- the run's, where there is a run; the defaults are those of the main script
    MAX_PROMPT_LENGTH: Count = pair(laptop=28, tpu=256)  # tokens, chat template included
    TOTAL_GENERATION_STEPS: Count = pair(laptop=28, tpu=768)  # tokens per answer; longer answers are cut off
    TEMPLATE: str = pair(  # the tiny Llama learned its format from demonstrations; it knows no instructions
        laptop="{question}", tpu="{system_prompt}\n\n{question}"
    )  # the user's message, put inside the tokenizer's chat template
    SYSTEM_PROMPT: str = (
        "You are given a problem. Think about it and write your reasoning between <reasoning> and "
        "</reasoning>. Then give the final answer, one number and nothing else, between <answer> and "
        "</answer>."
    )  # what the model is asked to write; rewards that want <think> tags change the tags here, too
    DTYPE: Literal["float32", "bfloat16"] = pair(laptop="float32", tpu="bfloat16")  # of activations
    WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"  # of weights; bfloat16 takes half the memory
    SCAN_LAYERS: bool = pair(laptop=False, tpu=True)  # layout of the weights; a checkpoint has the run's
    REWARDS: str = ""  # names, comma-separated (empty = compute_score if INPUT has a data_source)
    REWARD_FUNC: str = ""  # Python file with your own compute_score; a run's is run only if named here
    LOGITS_CLIP: float = 0.0  # largest absolute logit (0 = off)
    LORA_RANK: CountOrOff = 0  # r of the run's A [in, r] and B [r, out] (0 = the run trained all weights)
    LORA_ALPHA: float = 16.0  # A B is added times LORA_ALPHA / LORA_RANK
    LORA_TARGETS: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # weights that have A and B


# What is taken over from a run. Its BATCH_SIZE and SEED mean something else. Its REWARD_FUNC would be code of
# whoever made the folder: only what the command line names is run.
RUNS_CONSTANTS = (
    "MODEL", "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "TEMPLATE", "SYSTEM_PROMPT", "DTYPE",
    "WEIGHT_DTYPE", "SCAN_LAYERS", "REWARDS", "LOGITS_CLIP", "LORA_RANK", "LORA_ALPHA", "LORA_TARGETS",
)  # fmt: skip

PAGE_SAMPLES = 8  # answers to a question on the page; its advantages need a group

QUESTIONS = (  # held-out ones that the tiny Llama's 76 words can ask, with their answers
    ("Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?", "7"),
    ("Lily has 3 boxes with 5 shells in each box. How many shells does Lily have?", "15"),
    ("Sara has 3 boxes with 6 pencils in each box. How many pencils does Sara have?", "18"),
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        run: RUN_DIR.
        step: its number; None for the last one.
        constants: the run's, from constants.json.
    """

    run: Path
    step: int | None
    constants: dict[str, Any]


def read_arguments(arguments: Sequence[str]) -> tuple[Constants, str, Checkpoint | None]:
    """The command line, and what it says about the run.

    Args:
        arguments: `NAME=value`, `--samples N`, `--page`, `--help`, and the words of a question.

    Returns:
        The constants, those of the run included; the question, empty if there is none; the checkpoint, None
        for base.

    Raises:
        UserError: an unknown option or name, a wrong value, two that contradict each other, no such run.
    """
    question, given = split_arguments(arguments)
    c = settings.read(Constants, given)
    if question and c.INPUT:
        raise UserError(f"INPUT={c.INPUT}: there is a question on the command line, too; give one of the two")
    if c.ANSWER and not question:
        raise UserError(f"ANSWER={c.ANSWER}: there is no question that it answers; write one")
    if c.ANSWER and parse_number(c.ANSWER) is None:
        raise UserError(
            f"ANSWER={c.ANSWER}: a question on the command line is graded by its number; give one"
        )
    if c.SAMPLING == "greedy" and (c.SAMPLES > 1 or c.PAGE):
        raise UserError(
            f"SAMPLES={c.SAMPLES}, PAGE={c.PAGE}: greedy answers are all alike; leave SAMPLING out, or these"
        )
    if c.COMPARE and c.CHECKPOINT == "base":
        raise UserError("COMPARE=True: CHECKPOINT=base has nothing to be compared with; give a run's folder")
    checkpoint = find_checkpoint(c)
    if c.COMPARE and not checkpoint:
        raise UserError("COMPARE=True: no run to compare with; give CHECKPOINT= a run's folder")
    saved = {"MODEL": "tiny_llama"}
    if checkpoint:
        saved = {name: value for name, value in checkpoint.constants.items() if name in RUNS_CONSTANTS}
    c = settings.read(Constants, given, saved)
    if not_run(c, checkpoint):
        c = dataclasses.replace(c, REWARDS=run_grader.built_in_rewards(c.REWARDS))
    if c.PAGE and c.SAMPLES == 1:
        c = dataclasses.replace(c, SAMPLES=PAGE_SAMPLES)
    checks.template(c)
    return c, question, checkpoint


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The question, empty if there is none, and the `NAME=value` texts of a command line.

    Raises:
        UserError: an unknown option, or an empty question.
    """
    words, given, rest = [], [], iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--samples":
            given.append(f"SAMPLES={value or next(rest, '')}")
        elif argument == "--page":
            given.append("PAGE=True")
        elif argument in ("--help", "-h"):
            given.append(argument)
        elif argument.startswith("--"):
            raise UserError(
                f'{argument!r}: no such option; write "question", --samples N, --page or NAME=value'
            )
        elif equals and (re.fullmatch("[A-Z_]+", name) or name.upper() in Constants.__annotations__):
            given.append(argument)
        else:
            words.append(argument)
    question = " ".join(words).strip()
    if words and not question:
        raise UserError("the question is empty; write one, or none at all for the built-in batch")
    return question, [argument for argument in given if argument != "MODEL="]  # empty: not given


# %% Which checkpoint ---------------------------------------------------------------------------------------
def find_checkpoint(c: Constants) -> Checkpoint | None:
    """The checkpoint that CHECKPOINT names; None for base.

    Raises:
        UserError: no such run, or one whose constants.json cannot be read.
    """
    if c.CHECKPOINT == "base":
        return None
    if c.CHECKPOINT:
        run, step = named_run(Path(c.CHECKPOINT))
    else:
        run, step = run_files.newest_run(), None
        if run is None or c.MODEL:
            return None
    constants = run_files.read_constants(run, "CHECKPOINT")
    if world := constants.get("ENVIRONMENT"):
        raise UserError(
            f"CHECKPOINT={run}: was trained by turns with ENVIRONMENT={world}, and nobody answers its model "
            "here; its evaluations are in evaluations.jsonl and after.json"
        )
    return Checkpoint(run, step, constants)


def named_run(path: Path) -> tuple[Path, int | None]:
    """The run around `path`, and the number of the checkpoint if `path` names one; raises UserError."""
    for folder in (path, *path.parents):
        if (folder / "constants.json").is_file() and (folder == path or path.name.isdigit()):
            return folder, None if folder == path else int(path.name)
    raise UserError(
        f"CHECKPOINT={path}: not in a run of the main script (no constants.json there); give its RUN_DIR, "
        "RUN_DIR/number, or base"
    )


def not_run(c: Constants, checkpoint: Checkpoint | None) -> str:
    """The run's REWARD_FUNC, where the command line does not name one: a stranger's code is not run."""
    return "" if c.REWARD_FUNC or not checkpoint else checkpoint.constants.get("REWARD_FUNC", "")


# %% Questions in -------------------------------------------------------------------------------------------
def read_rows(c: Constants, question: str) -> list[dict[str, Any]]:
    """The questions to ask: `question`, else those of INPUT, else the built-in ones.

    Returns:
        Rows as from `questions.read_inputs`; `row` has what OUTPUT repeats.

    Raises:
        UserError: INPUT cannot be read; names file, line and remedy.
    """
    if c.INPUT and not question:
        return questions.read_inputs(c.INPUT)
    built_in = [{"question": text, "answer": gold} for text, gold in QUESTIONS]
    own = {"question": question} | ({"answer": c.ANSWER} if c.ANSWER else {})
    rows = [own] if question else built_in
    by_number = {"data_source": None, "extra_info": ""}
    return [row | by_number | {"gold": row.get("answer"), "row": row} for row in rows]


def output_path(c: Constants) -> Path | None:
    """Where the answers go, if anywhere; raises UserError if something is there already, or cannot be."""
    name = c.OUTPUT or (str(Path(c.INPUT).with_suffix(".answers.jsonl")) if c.INPUT else "")
    if not name:
        return None
    if Path(name).exists():
        raise UserError(f"OUTPUT={name}: exists already; choose another name, or remove it")
    if not Path(name).resolve().parent.is_dir():
        raise UserError(f"OUTPUT={name}: there is no such folder; make it, or choose another")
    return Path(name)


def refuse(arguments: Sequence[str]) -> None:
    """Reads everything that is read before the imports, and raises UserError if something is wrong."""
    c, question, _ = read_arguments(arguments)
    read_rows(c, question)
    output_path(c)


# %% Imports ------------------------------------------------------------------------------------------------
if __name__ == "__main__":  # what is wrong is refused here, before seconds of imports
    settings.answer_early(refuse)

import jax
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.algo_core import compute_advantages
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

import reward_func
from parts.machine import process
from parts.machine.versions import check_versions
from parts.model import llama, lora
from parts.model.rollout import GENERATION_CONFIGS, MaxTextRollout, right_padded, rollout_config
from parts.rewards.grading import grade, grade_lenient
from parts.run import answers, checkpoints, page


# %% Answers out --------------------------------------------------------------------------------------------
def make_grader(c: Constants, rows: list[dict[str, Any]]) -> run_grader.Grader:
    """The run's rewards, which grade the rows with a right answer and a data_source."""
    graded = [row for row in rows if row["gold"] is not None and row["data_source"]]
    return run_grader.make_grader(c.REWARDS, c.REWARD_FUNC, reward_func, graded)


def add_prompts(c: Constants, rows: list[dict[str, Any]], tokenizer, think_tags: bool = False) -> None:
    """Adds `prompt` to the rows, and prints which words the tokenizer does not know.

    Args:
        rows: from `read_rows`.
        tokenizer: of MODEL.
        think_tags: whether the rewards want <think> where SYSTEM_PROMPT has <reasoning>.

    Raises:
        UserError: a question that is too long.
    """
    system_prompt = prompts.think_prompt(c.SYSTEM_PROMPT) if think_tags else c.SYSTEM_PROMPT
    unknown = []
    for number, row in enumerate(rows, start=1):
        row["prompt"] = prompts.to_prompt(
            tokenizer, row["question"], template=c.TEMPLATE, system_prompt=system_prompt
        )
        length = len(tokenizer.encode(row["prompt"], add_special_tokens=False))
        if length > c.MAX_PROMPT_LENGTH:
            raise UserError(
                f"MAX_PROMPT_LENGTH={c.MAX_PROMPT_LENGTH}: question {number} takes {length} tokens, "
                "template included; shorten it, or raise the limit (longer ones were not trained)"
            )
        encoded = tokenizer(row["question"], add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token == tokenizer.unk_token_id:
                unknown.append(row["question"][start:end])
    if unknown:
        print(f"note: {c.MODEL} has no token for {' '.join(dict.fromkeys(unknown))!r}, and cannot see it")


def vote(grader: run_grader.Grader, completions: list[str]) -> tuple[str, str]:
    """The completion with the most frequent answer, and that answer in words with its count."""
    winner, votes = grader.majority(completions), grader.votes(completions)
    if votes[winner] is None:
        return completions[0], "no answer"
    return completions[winner], f"{votes[winner]} ({votes.count(votes[winner])} of {len(completions)})"


def ask(c: Constants, rollout: MaxTextRollout, rows: list[dict[str, Any]]) -> RolloutOutput:
    """SAMPLES completions of each row's prompt, side by side."""
    return rollout.generate([row["prompt"] for row in rows for _ in range(c.SAMPLES)], sampling(c))


def by_question(c: Constants, output: RolloutOutput) -> list[list[str]]:
    """The texts of `ask`, a list for each question."""
    return [output.text[i : i + c.SAMPLES] for i in range(0, len(output.text), c.SAMPLES)]


def sampling(c: Constants) -> RolloutConfig:
    """How to sample: SAMPLING, or what fits SAMPLES."""
    return rollout_config(
        GENERATION_CONFIGS[c.SAMPLING or ("greedy" if c.SAMPLES == 1 else "standard")],
        prompt_tokens=c.MAX_PROMPT_LENGTH,
        new_tokens=c.TOTAL_GENERATION_STEPS,
        seed=jax.random.key(c.SEED),
    )


def is_right(grader: run_grader.Grader, completion: str, row: dict[str, Any]) -> bool:
    """Whether a completion is right: as the run grades the row's data_source, else by its number."""
    if row["data_source"] is None:
        return grade(completion, row["gold"])
    columns = ([row[name]] for name in ("gold", "data_source", "extra_info"))
    return bool(grader.score([completion], *columns)[0] >= 1)


def is_right_lenient(grader: run_grader.Grader, completion: str, row: dict[str, Any]) -> bool:
    """Whether a completion is right by its last number, wherever that stands."""
    if row["data_source"] is None:
        return grade_lenient(completion, row["gold"])
    columns = ([row[name]] for name in ("gold", "data_source", "extra_info"))
    return bool(grader.right_lenient([completion], *columns)[0])


def judged(grader: run_grader.Grader, completion: str, row: dict[str, Any]) -> str:
    """ " [right]", " [wrong, right: 7]", or nothing where the right answer is not known."""
    if row["gold"] is None:
        return ""
    return " [right]" if is_right(grader, completion, row) else f" [wrong, right: {row['gold']}]"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, which end at a space or beside a tag where there is one."""
    lines = [""]
    for piece in re.findall(r"\s*(?:</?\w+>|[^<\s]+|<)", text):
        if len(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            lines += textwrap.wrap(piece, width)
    return lines if lines[0] else lines[1:]


def in_columns(left: str, right: str) -> Iterator[str]:
    """Lines of two texts side by side, as wide as the terminal; no line ends inside a tag."""
    width = (shutil.get_terminal_size().columns - 3) // 2
    columns = (wrapped(text, width) for text in (left, right))
    for lines in itertools.zip_longest(*columns, fillvalue=""):
        yield f"{lines[0]:<{width}} | {lines[1]}".rstrip()


def show(
    rows: list[dict[str, Any]],
    before: list[list[str]] | None,
    after: list[list[str]],
    grader: run_grader.Grader,
) -> None:
    """Prints questions and answers, and how many of those with a known answer are right.

    Args:
        rows: from `read_rows`.
        before: for each row, the completions of the untrained model; None without COMPARE.
        after: for each row, the completions of CHECKPOINT.
        grader: from `make_grader`.
    """
    for i, row in enumerate(rows):
        print(shown(f"\nquestion: {row['question']}"))
        for old, new in zip(before[i] if before else after[i], after[i], strict=True):
            if before:
                left, right = (text + judged(grader, text, row) for text in (old, new))
                print(*in_columns(shown(f"before: {left}"), shown(f"after: {right}")), sep="\n")
            else:
                print(shown(f"answer:   {new}{judged(grader, new, row)}"))
        if len(after[i]) > 1:
            old = f"before {vote(grader, before[i])[1]}, after " if before else ""
            winner, words = vote(grader, after[i])
            print(shown(f"vote:     {old}{words}{judged(grader, winner, row)}"))
    known = [i for i, row in enumerate(rows) if row["gold"] is not None]
    if known:
        print()
        for words, judge in (("right:    ", is_right), ("by the last number: ", is_right_lenient)):
            counts = [
                sum(judge(grader, vote(grader, texts[i])[0], rows[i]) for i in known)
                for texts in (before, after)
                if texts
            ]
            print(f"{words}{', after '.join(f'{count} of {len(known)}' for count in counts)}")


def write_rows(
    path: Path,
    rows: list[dict[str, Any]],
    before: list[list[str]] | None,
    after: list[list[str]],
    grader: run_grader.Grader,
) -> None:
    """Writes OUTPUT: INPUT's columns, and `completion`, `completions`, `vote`, `before`, `correct` ...

    `completion` is that of the vote; `correct_lenient` goes by its last number. The other arguments are
    those of `show`.
    """
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            completion, words = vote(grader, after[i])
            out = row["row"] | {"completion": completion}
            if len(after[i]) > 1:
                out |= {"completions": after[i], "vote": words}
            if before:
                out["before"] = vote(grader, before[i])[0]
            if row["gold"] is not None:
                out["correct"] = is_right(grader, completion, row)
                out["correct_lenient"] = is_right_lenient(grader, completion, row)
            # default=str: a Parquet file can hold dates
            file.write(json.dumps(out, ensure_ascii=False, default=str) + "\n")
    partial.rename(path)  # whole or not at all
    print(f"answers:  {path}")


# %% Page ---------------------------------------------------------------------------------------------------
def token_log_probs(
    c: Constants, rollout: MaxTextRollout, prompts: np.ndarray, completions: np.ndarray
) -> np.ndarray:
    """Log-probs [N, T] of completions [N, T] to prompts [N, P] under the weights of now, at temperature 1."""
    parts = [
        rollout.get_per_token_logps(
            prompts[start : start + c.BATCH_SIZE],
            completions[start : start + c.BATCH_SIZE],
        )
        for start in range(0, len(completions), c.BATCH_SIZE)
    ]
    return np.concatenate(parts)


def write_page(
    c: Constants,
    path: Path,
    rollout: MaxTextRollout,
    rows: list[dict[str, Any]],
    texts: list[list[str]],
    completions: np.ndarray,
    grader: run_grader.Grader,
    *,
    about: str,
    before: np.ndarray | None,
    now: np.ndarray,
) -> None:
    """Writes the page: each question with its answers, points, advantages and tokens.

    Args:
        path: of the page.
        rollout: gives tokenizer and lengths.
        rows: from `read_rows`.
        texts: the answers to each question, from `by_question`.
        completions: their tokens, int32 [N, T].
        grader: from `make_grader`.
        about: which model answered.
        before: log-probs [N, T] of the answers before training; None where the model is the untrained one.
        now: those under the model that answered.
    """
    groups = []
    for i, row in enumerate(rows):
        part = slice(i * c.SAMPLES, (i + 1) * c.SAMPLES)
        answered = np.array(texts[i], dtype=object)
        known = row["gold"] is not None
        columns = {"question": row["question"], "answer": row["gold"] if known else "",
                   "data_source": row["data_source"] or "gsm8k", "extra_info": row["extra_info"]}  # fmt: skip
        columns = {name: np.array([value] * c.SAMPLES, dtype=object) for name, value in columns.items()}
        points = {}
        if known:
            points = {f.__name__: np.array(f(None, answered, **columns)) for f in grader.functions}
        rewards = sum(points.values(), np.zeros(c.SAMPLES))
        [group] = answers.question_rows(
            rollout.tokenizer,
            grader,
            c.SAMPLES,
            completions[part],
            columns | {"completions": answered, "points": points, "rewards": rewards},
            advantages=compute_advantages(rewards, c.SAMPLES),
            counts=np.ones(c.SAMPLES, bool),
            log_prob=(now if before is None else before)[part],
            log_prob_after=None if before is None else now[part],
        )
        group |= {"step": 0, "graded": known} | ({} if known else {"answer": None})
        groups.append(group)
    notes = ["Drawn with the sampling of inference.py; log-probabilities are at temperature 1."]
    if not all(group["graded"] for group in groups):
        notes.append("Where the right answer is not known there are no rewards: give it as ANSWER=...")
    settings.write_whole(path, page.render(page.answers_data(groups, about, before is not None, notes)))
    print(f"page:     {path}")


# %% Main ---------------------------------------------------------------------------------------------------
def chosen_step(c: Constants, checkpoint: Checkpoint) -> tuple[str, int]:
    """Where the run's checkpoints are, and the number of the one that answers.

    Raises:
        UserError: there is none, or not this one.
    """
    root = checkpoints.root_of(checkpoint.constants.get("CHECKPOINT_DIR", ""), checkpoint.run)
    steps = checkpoints.saved(root)
    if not steps:
        raise UserError(
            f"CHECKPOINT={c.CHECKPOINT or checkpoint.run}: no checkpoint in {root}; train further, or "
            "take base"
        )
    if checkpoint.step is None:
        return root, steps[-1]
    if checkpoint.step not in steps:
        raise UserError(
            f"CHECKPOINT={c.CHECKPOINT}: no such checkpoint; there are {', '.join(map(str, steps))}"
        )
    return root, checkpoint.step


def make_rollout(c: Constants, folder: Path, hf, tokenizer, answers: int) -> MaxTextRollout:
    """An engine with MODEL's weights, and LoRA's A and B where the run has them.

    Args:
        folder: of MODEL.
        hf: its config.
        tokenizer: its tokenizer.
        answers: to decode in all; at most BATCH_SIZE of them at once.
    """
    devices = jax.device_count()
    rows = -(-min(c.BATCH_SIZE, answers) // devices) * devices  # a multiple: each device gets as many
    config = llama.to_maxtext_config(
        hf,
        rows=rows,
        prompt_tokens=c.MAX_PROMPT_LENGTH,
        new_tokens=c.TOTAL_GENERATION_STEPS,
        dtype=c.DTYPE,
        weight_dtype=c.WEIGHT_DTYPE,
        scan_layers=c.SCAN_LAYERS,
    )
    adapter, mesh = llama.load_llama(folder, hf, config, tokenizer.pad_token_id)
    merge = None
    if c.LORA_RANK:  # with the run's shapes; its A and B are restored later, so any seed will do
        adapter, merge = lora.add_lora(
            adapter, mesh, config, c.LORA_RANK, c.LORA_ALPHA, c.LORA_TARGETS, seed=0
        )
    whole = dict(temperature=1.0, top_k=-1, top_p=1.0)  # the page's log-probs are the policy's own
    return MaxTextRollout(
        adapter,
        TokenizerAdapter(tokenizer),
        mesh,
        rollout_config(whole, prompt_tokens=c.MAX_PROMPT_LENGTH, new_tokens=c.TOTAL_GENERATION_STEPS),
        maxtext_config=config,
        hf=hf,
        current_step=lambda: 0,
        seed=c.SEED,
        logits_clip=c.LOGITS_CLIP,
        merge=merge,
    )


def restore(rollout: MaxTextRollout, root: str, step: int, lora_only: bool) -> None:
    """Puts a checkpoint into the engine's model.

    Args:
        rollout: from `make_rollout`.
        root: of the checkpoints.
        step: its number; both from `chosen_step`.
        lora_only: whether it has A and B alone.

    Raises:
        UserError: it cannot be read.
    """
    weights = nnx.to_pure_dict(nnx.state(rollout.model(), nnx.LoRAParam if lora_only else nnx.Param))
    with checkpoints.open_manager(root) as manager:
        restored, _, _ = checkpoints.restore(manager, step, weights)
    nnx.update(rollout.model(), restored)


def describe(c: Constants, root: str, step: int) -> str:
    """A checkpoint in words: its folder, and what it was trained from."""
    trained = f" (LoRA of rank {c.LORA_RANK})" if c.LORA_RANK else ""
    return f"{root}/{step}{trained}, trained from {c.MODEL}"


def main(arguments: Sequence[str]) -> None:
    """Asks; see the module's docstring."""
    c, question, checkpoint = read_arguments(arguments)
    rows, path = read_rows(c, question), output_path(c)
    settings.quiet()
    check_versions()
    process.keep_compiled()
    grader = make_grader(c, rows)
    root, step = chosen_step(c, checkpoint) if checkpoint else ("", 0)
    folder, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    about = f"base, {c.MODEL} as it is"
    if checkpoint:
        about = describe(c, root, step)
    print(shown(f"checkpoint: {about}"))
    if own := not_run(c, checkpoint):
        words = f"rewards:    {grader}; the run's own are in {own}: only REWARD_FUNC={own} here would run it"
        print(shown(words))
    add_prompts(c, rows, tokenizer, grader.think_tags)

    rollout = make_rollout(c, folder, hf, tokenizer, len(rows) * c.SAMPLES)
    before = by_question(c, ask(c, rollout, rows)) if c.COMPARE else None
    if checkpoint:
        restore(rollout, root, step, lora_only=bool(c.LORA_RANK))
    if question and c.SAMPLES == 1 and not c.COMPARE:
        pieces = []
        for piece in rollout.stream(rows[0]["prompt"], sampling(c)):
            print(shown(piece), end="", flush=True)
            pieces.append(piece)
        print(shown(judged(grader, "".join(pieces), rows[0])))
        after = [["".join(pieces)]]
    else:
        output = ask(c, rollout, rows)
        after = by_question(c, output)
        show(rows, before, after, grader)
    if c.PAGE:
        completions = right_padded(output.tokens, c.TOTAL_GENERATION_STEPS, rollout.pad_id(), np.int32)
        tokens = output.left_padded_prompt_tokens, completions
        now, old = token_log_probs(c, rollout, *tokens), None
        if checkpoint:  # the untrained model again, for the same tokens
            old = token_log_probs(c, make_rollout(c, folder, hf, tokenizer, len(output.text)), *tokens)
        path_of_page = (checkpoint.run if checkpoint else Path()) / "answers.html"
        write_page(c, path_of_page, rollout, rows, after, tokens[1], grader, about=about, before=old, now=now)
    if path:
        write_rows(path, rows, before, after, grader)


if __name__ == "__main__":
    settings.run(main)
