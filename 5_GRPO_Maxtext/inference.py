"""Asks a model what the main script trained it for: one question, a built-in batch, or a file of questions.

    python 5_GRPO_Maxtext/inference.py "Kim has 8 cards and loses 6. How many cards are there now?"
    python 5_GRPO_Maxtext/inference.py                                     # the built-in questions
    python 5_GRPO_Maxtext/inference.py SAMPLES=8 "Tom has 3 boxes with 5 coins in each box. How many?"
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine COMPARE=True   # before and after, side by side
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine PAGE=True ANSWER=15 "Tom has 3 boxes with 5 ..."
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine/50 INPUT=questions.jsonl OUTPUT=answers.jsonl

A question of your own is answered token by token as it is decoded. Decoding is greedy unless SAMPLING or
SAMPLES says otherwise. MODEL, prompt, lengths, rewards and LoRA are the run's, from its constants.json, where
the command line does not give them. PAGE writes a page for the browser: eight answers to each question, their
rewards and advantages, and which of their tokens training raised or lowered.
"""

import dataclasses
import functools
import itertools
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import settings
from constants import Arrays
from run import checks, run_files
from run.plain_text import shown
from settings import Count, Seed, TwoOrMore, UserError, pair
from task import prompts, questions, run_grader
from task.grading import parse_number


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants(Arrays):
    """Edit a value here, or give it for one run as NAME=value. Arrays: constants.py."""

    CHECKPOINT: str = ""  # a run's folder, runs/mine/50, or base (empty = newest run in runs/, else base)
    MODEL: str = ""  # Hugging Face name or folder (empty = the run's, and tiny_llama for base)
    COMPARE: bool = False  # True: the answers from before training beside those of CHECKPOINT
    SAMPLES: Count = 1  # answers per question; above 1 the most frequent answer is the vote
    PAGE: bool = False  # True: answers.html in the run's folder shows them; 8 SAMPLES instead of 1
    ANSWER: str = ""  # the right answer to the question on the command line; then it is graded
    SAMPLING: Literal["", "greedy", "standard", "liberal"] = ""  # (empty = greedy; standard if SAMPLES > 1)
    SEED: Seed = 0  # draws the samples; greedy answers do not depend on it
    INPUT: str = ""  # JSON, JSONL or Parquet file with question or prompt; answer or ground_truth is graded
    OUTPUT: str = ""  # JSONL file: INPUT's rows and the answers (empty = INPUT's name with .answers)
    BATCH_SIZE: Count = 64  # answers decoded at once; more: faster, and more memory
    REWARDS: str = ""  # names, comma-separated (empty = compute_score if INPUT has a data_source)
    REWARD_FUNC: str = ""  # Python file with your own compute_score; a run's is run only if named here
    # --- how a run asked; without one, how the main script would
    SYSTEM_PROMPT: str = (
        "You are given a problem. Think about it and write your reasoning between <reasoning> and "
        "</reasoning>. Then give the final answer, one number and nothing else, between <answer> and "
        "</answer>."
    )  # what the model is asked to write
    TEMPLATE: str = pair(  # the tiny Llama learned its format from demonstrations; it knows no instructions
        laptop="{question}", tpu="{system_prompt}\n\n{question}"
    )  # the user's message, put inside the tokenizer's chat template
    MAX_PROMPT_LENGTH: Count = pair(laptop=28, tpu=256)  # tokens with template; longer ones are refused
    TOTAL_GENERATION_STEPS: TwoOrMore = pair(laptop=28, tpu=768)  # tokens per answer; longer ones are cut off


# What is taken over from a run. Its BATCH_SIZE and SEED mean something else. Its REWARD_FUNC would be code of
# whoever made the folder: only what the command line names is run.
ASKING = "SYSTEM_PROMPT", "TEMPLATE", "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS"
RUNS_CONSTANTS = ("MODEL", "REWARDS", *ASKING, *(field.name for field in dataclasses.fields(Arrays)))
PAGE_SAMPLES = 8  # answers to a question on the page; its advantages need a group

QUESTIONS = (  # held-out ones that the tiny Llama's 76 words can ask, with their answers
    ("Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?", "7"),
    ("Lily has 3 boxes with 5 shells in each box. How many shells does Lily have?", "15"),
    ("Sara has 3 boxes with 6 pencils in each box. How many pencils does Sara have?", "18"),
)


class Checkpoint(NamedTuple):
    """A checkpoint of a run."""

    run: Path  # RUN_DIR
    step: int | None  # its number; None for the last one
    constants: dict[str, Any]  # the run's, from constants.json


def read_arguments(arguments: Sequence[str]) -> tuple[Constants, str, Checkpoint | None]:
    """The command line, and what it says about the run.

    Args:
        arguments: `NAME=value`, `--help`, and the words of a question.

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
        UserError: an empty question.
    """
    names = "|".join(field.name for field in dataclasses.fields(Constants))
    constant = re.compile(f"--|-h$|[A-Z_]+=|(?i:{names})=")  # a name in small letters is a slip
    words = [argument for argument in arguments if not constant.match(argument)]
    question = " ".join(words).strip()
    if words and not question:
        raise UserError("the question is empty; write one, or none at all for the built-in batch")
    # MODEL= is the same as none
    return question, [given for given in arguments if constant.match(given) and given != "MODEL="]


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
from tunix.rl.rollout.base_rollout import RolloutOutput

import reward_func
from model import llama, lora
from model.rollout import GENERATION_CONFIGS, MaxTextRollout, right_padded, rollout_config
from model.versions import check_versions
from run import answers, checkpoints, page, process
from task.grading import grade, grade_lenient

POLICY = dict(temperature=1.0, top_k=-1, top_p=1.0)  # sampling from the policy itself


# %% Answers out --------------------------------------------------------------------------------------------
def make_grader(c: Constants, rows: list[dict[str, Any]]):
    """The run's rewards, which grade the rows with a right answer and a data_source."""
    graded = [row for row in rows if row["gold"] is not None and row["data_source"]]
    return run_grader.make_grader(c.REWARDS, c.REWARD_FUNC, reward_func, graded)


def add_prompts(c: Constants, rows: list[dict[str, Any]], tokenizer, think_tags: bool = False) -> None:
    """Adds `prompt` to the rows, and prints which words the tokenizer does not know.

    `think_tags`: whether the rewards want <think> where SYSTEM_PROMPT has <reasoning>.

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


def vote(grader, completions: list[str]) -> tuple[str, str]:
    """The completion with the most frequent answer, and that answer in words with its count."""
    winner, votes = grader.majority(completions), grader.votes(completions)
    if votes[winner] is None:
        return completions[0], "no answer"
    return completions[winner], f"{votes[winner]} ({votes.count(votes[winner])} of {len(completions)})"


def ask(c: Constants, rollout: MaxTextRollout, rows: list[dict[str, Any]], name: str) -> RolloutOutput:
    """SAMPLES completions of each row's prompt; also as a list in the row, under `name`."""
    output = rollout.generate([row["prompt"] for row in rows for _ in range(c.SAMPLES)], sampling(c))
    for i, row in enumerate(rows):
        row[name] = output.text[i * c.SAMPLES : (i + 1) * c.SAMPLES]
    return output


def sampling(c: Constants, how: dict[str, float] | None = None, seed: jax.Array | None = None):
    """How to sample, as a `RolloutConfig`: `how`, such as POLICY; else SAMPLING, or what fits SAMPLES."""
    name = c.SAMPLING or ("greedy" if c.SAMPLES == 1 else "standard")
    return rollout_config(
        how or GENERATION_CONFIGS[name],
        prompt_tokens=c.MAX_PROMPT_LENGTH,
        new_tokens=c.TOTAL_GENERATION_STEPS,
        seed=jax.random.key(c.SEED) if seed is None else seed,
    )


def is_right(grader, completion: str, row: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a completion is right, and whether it is by its last number, wherever that stands.

    As the run grades the row's data_source; where there is none, by number.
    """
    if row["data_source"] is None:
        return grade(completion, row["gold"]), grade_lenient(completion, row["gold"])
    columns = [[completion], *([row[name]] for name in ("gold", "data_source", "extra_info"))]
    return bool(grader.score(*columns)[0] >= 1), bool(grader.right_lenient(*columns)[0])


def judged(grader, completion: str, row: dict[str, Any]) -> str:
    """ " [right]", " [wrong, right: 7]", or nothing where the right answer is not known."""
    if row["gold"] is None:
        return ""
    return " [right]" if is_right(grader, completion, row)[0] else f" [wrong, right: {row['gold']}]"


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


def show(rows: list[dict[str, Any]], grader) -> None:
    """Prints questions and answers, and how many of those with a known answer are right.

    Args:
        rows: from `read_rows`, with the completions `after`, and with COMPARE those of `before` training.
        grader: from `make_grader`.
    """
    for row in rows:
        print(shown(f"\nquestion: {row['question']}"))
        for old, new in zip(row.get("before", row["after"]), row["after"], strict=True):
            if "before" in row:
                left, right = (text + judged(grader, text, row) for text in (old, new))
                print(*in_columns(shown(f"before: {left}"), shown(f"after: {right}")), sep="\n")
            else:
                print(shown(f"answer:   {new}{judged(grader, new, row)}"))
        if len(row["after"]) > 1:
            old = f"before {vote(grader, row['before'])[1]}, after " if "before" in row else ""
            winner, words = vote(grader, row["after"])
            print(shown(f"vote:     {old}{words}{judged(grader, winner, row)}"))
    if known := [row for row in rows if row["gold"] is not None]:
        print()
        for words, reading in (("right:    ", 0), ("by the last number: ", 1)):
            counts = [
                sum(is_right(grader, vote(grader, row[name])[0], row)[reading] for row in known)
                for name in ("before", "after")
                if name in known[0]
            ]
            print(f"{words}{', after '.join(f'{count} of {len(known)}' for count in counts)}")


def write_rows(path: Path, rows: list[dict[str, Any]], grader) -> None:
    """Writes OUTPUT: INPUT's columns, and `completion`, `completions`, `vote`, `before`, `correct` ...

    `completion` is that of the vote; `correct_lenient` goes by its last number. Arguments as in `show`.
    """
    lines = []
    for row in rows:
        completion, words = vote(grader, row["after"])
        out = row["row"] | {"completion": completion}
        if len(row["after"]) > 1:
            out |= {"completions": row["after"], "vote": words}
        if "before" in row:
            out["before"] = vote(grader, row["before"])[0]
        if row["gold"] is not None:
            out["correct"], out["correct_lenient"] = is_right(grader, completion, row)
        lines.append(json.dumps(out, ensure_ascii=False, default=str) + "\n")  # str: dates of a Parquet file
    settings.write_whole(path, "".join(lines))
    print(f"answers:  {path}")


# %% Page ---------------------------------------------------------------------------------------------------
def token_log_probs(c: Constants, rollout: MaxTextRollout, output: RolloutOutput) -> np.ndarray:
    """Log-probs [N, T] of the tokens in `output`, from `ask`, under an engine's weights at temperature 1."""
    tokens = right_padded(output.tokens, c.TOTAL_GENERATION_STEPS, rollout.pad_id(), np.int32)  # [N, T]
    parts = [slice(start, start + c.BATCH_SIZE) for start in range(0, len(tokens), c.BATCH_SIZE)]
    prompts = output.left_padded_prompt_tokens  # [N, P]
    return np.concatenate([rollout.get_per_token_logps(prompts[part], tokens[part]) for part in parts])


def write_page(
    c: Constants, path: Path, rollout, rows, output: RolloutOutput, grader, about: str, before, now
):
    """Writes the page: each question with its answers, points, advantages and tokens.

    Args:
        path: of the page.
        rollout: the engine that answered.
        rows: from `read_rows`.
        output: from `ask`.
        grader: from `make_grader`.
        about: which model answered.
        before: from `token_log_probs` under the weights from before training; None if those answered.
        now: the same under those that answered.
    """
    completions = right_padded(output.tokens, c.TOTAL_GENERATION_STEPS, rollout.pad_id(), np.int32)  # [N, T]
    groups = []
    for i, row in enumerate(rows):
        part = slice(i * c.SAMPLES, (i + 1) * c.SAMPLES)
        known = row["gold"] is not None
        columns = {"question": row["question"], "answer": row["gold"] if known else "",
                   "data_source": row["data_source"] or "gsm8k", "extra_info": row["extra_info"]}  # fmt: skip
        columns = {name: np.array([value] * c.SAMPLES, dtype=object) for name, value in columns.items()}
        texts = np.array(row["after"], dtype=object)
        points = {f.__name__: np.array(f(None, texts, **columns)) for f in grader.functions if known}
        rewards = sum(points.values(), np.zeros(c.SAMPLES))
        [group] = answers.question_rows(
            rollout.tokenizer,
            grader,
            c.SAMPLES,
            completions[part],
            columns | {"completions": texts, "points": points, "rewards": rewards},
            advantages=compute_advantages(rewards, c.SAMPLES),
            counts=np.ones(c.SAMPLES, bool),
            log_prob=(now if before is None else before)[part],
            log_prob_after=None if before is None else now[part],
        )
        groups.append(group | {"step": 0, "graded": known} | ({} if known else {"answer": None}))
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


def make_rollout(
    c: Constants, folder: Path, hf, tokenizer, answers: int, checkpoint: Checkpoint | None = None
) -> MaxTextRollout:
    """An engine with MODEL's weights, and LoRA's A and B where the run has them; `restore` fills them.

    Args:
        folder, hf, tokenizer: of MODEL.
        answers: to decode in all; at most BATCH_SIZE of them at once.
        checkpoint: that will be restored.
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
    merge, run = None, checkpoint.constants if checkpoint else {}
    if run.get("LORA_RANK"):  # any seed will do: A and B are restored
        numbers = (run[name] for name in ("LORA_RANK", "LORA_ALPHA", "LORA_TARGETS"))
        adapter, merge = lora.add_lora(adapter, mesh, config, *numbers, seed=0)
    return MaxTextRollout(
        adapter,
        TokenizerAdapter(tokenizer),
        mesh,
        sampling(c, POLICY),  # the page's log-probs are the policy's own
        maxtext_config=config,
        hf=hf,
        current_step=lambda: 0,
        seed=c.SEED,
        logits_clip=run.get("LOGITS_CLIP", 0.0),
        merge=merge,
    )


def restore(rollout: MaxTextRollout, root: str, step: int) -> None:
    """Puts a checkpoint, from `chosen_step`, into the engine's model; raises UserError."""
    adapted = nnx.state(rollout.model(), nnx.LoRAParam)  # a run with LoRA saved A and B alone
    weights = nnx.to_pure_dict(adapted or nnx.state(rollout.model(), nnx.Param))
    with checkpoints.open_manager(root) as manager:
        restored, _, _ = checkpoints.restore(manager, step, weights)
    nnx.update(rollout.model(), restored)


def main(arguments: Sequence[str]) -> None:
    """Asks; see the module's docstring."""
    c, question, checkpoint = read_arguments(arguments)
    rows, path = read_rows(c, question), output_path(c)
    settings.quiet()
    check_versions()
    process.keep_compiled()
    grader = make_grader(c, rows)
    folder, hf = llama.load_hf_config(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    about = f"base, {c.MODEL} as it is"
    if checkpoint:
        root, step = chosen_step(c, checkpoint)
        rank = checkpoint.constants.get("LORA_RANK")
        about = f"{root}/{step}{f' (LoRA of rank {rank})' if rank else ''}, trained from {c.MODEL}"
    print(shown(f"checkpoint: {about}"))
    if own := not_run(c, checkpoint):
        words = f"rewards:    {grader}; the run's own are in {own}: only REWARD_FUNC={own} here would run it"
        print(shown(words))
    add_prompts(c, rows, tokenizer, grader.think_tags)

    engine = functools.partial(make_rollout, c, folder, hf, tokenizer, len(rows) * c.SAMPLES, checkpoint)
    rollout = engine()
    if c.COMPARE:
        ask(c, rollout, rows, "before")
    if checkpoint:
        restore(rollout, root, step)
    if question and c.SAMPLES == 1 and not c.COMPARE:
        pieces = []
        for piece in rollout.stream(rows[0]["prompt"], sampling(c)):
            print(shown(piece), end="", flush=True)
            pieces.append(piece)
        rows[0]["after"] = ["".join(pieces)]
        print(shown(judged(grader, *rows[0]["after"], rows[0])))
    else:
        output = ask(c, rollout, rows, "after")
        show(rows, grader)
    if path:
        write_rows(path, rows, grader)
    if c.PAGE:
        now = token_log_probs(c, rollout, output)
        old = token_log_probs(c, engine(), output) if checkpoint else None  # the untrained model again
        path_of_page = (checkpoint.run if checkpoint else Path()) / "answers.html"
        write_page(c, path_of_page, rollout, rows, output, grader, about, old, now)


if __name__ == "__main__":
    settings.run(main)
