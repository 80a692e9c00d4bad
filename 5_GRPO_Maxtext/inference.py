"""Asks a model what the main script trained it for: one question, a built-in batch, or a file of questions.

    python 5_GRPO_Maxtext/inference.py "Kim has 8 cards and loses 6. How many cards are there now?"
    python 5_GRPO_Maxtext/inference.py                                     # the built-in questions
    python 5_GRPO_Maxtext/inference.py --samples 8 "Tom has 3 boxes with 5 coins in each box. How many?"
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine COMPARE=True   # before and after, side by side
    python 5_GRPO_Maxtext/inference.py CHECKPOINT=runs/mine/50 INPUT=questions.jsonl OUTPUT=answers.jsonl

A question of one's own is answered token by token as it is decoded. Greedy unless SAMPLING or SAMPLES says
otherwise. Template, lengths and MODEL are those of the run, which kept them in constants.json.
About 20 s of one core of an AMD EPYC with the tiny Llama, of them 10 s imports.
"""

import itertools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import grpo_llama3_1_8b_demo as demo  # first: it sets XLA's flags  # isort: skip
import functools

import jax
import lora
import reward_func
from etils import epath
from grpo_llama3_1_8b_demo import UserError
from rollout import MaxTextRollout
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.checkpoint_manager import CheckpointManager

# %% Constants ------------------------------------------------------------------------------------------
# A run's folder (its last checkpoint), one of its checkpoints (runs/mine/50), or base. Empty: the newest run
# under runs/grpo_llama3_1_8b_demo, and base where there is none.
CHECKPOINT = ""
MODEL = ""  # Hugging Face name or folder; empty: the run's, and tiny_llama for base
COMPARE = False  # True: the answers of MODEL, before training, beside those of CHECKPOINT
SAMPLES = 1  # answers to each question; --samples N is the same. Above 1 the most frequent number is the vote
SAMPLING = ""  # entry of the main script's GENERATION_CONFIGS; empty: greedy, and standard where SAMPLES > 1
SEED = 0  # of the samples
INPUT = ""  # JSONL file with a column question or prompt; answer (#### N) or ground_truth is graded
OUTPUT = ""  # JSONL file: the same rows with completion, vote, correct; empty: INPUT's name with .answers
MAX_PROMPT_LENGTH = 0  # tokens, chat template included; 0: the run's
TOTAL_GENERATION_STEPS = 0  # tokens an answer may take; 0: the run's
BATCH_SIZE = 64  # answers that are decoded side by side

DEFAULTS = {name: value for name, value in globals().items() if name.isupper() and name != "HERE"}

QUESTIONS = (  # held-out ones that the tiny Llama's 76 words can ask; with their answers
    ("Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?", "7"),
    ("Lily has 3 boxes with 5 shells in each box. How many shells does Lily have?", "15"),
    ("Sara has 3 boxes with 6 pencils in each box. How many pencils does Sara have?", "18"),
)


def configure(arguments: list[str]) -> str:
    """Sets this module's constants from the command line.

    Args:
        arguments: `NAME=value`, `--samples N`, and the words of a question.

    Returns:
        The question; empty if there is none.

    Raises:
        UserError: an unknown option or name, a wrong value, two that contradict each other.
    """
    words, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        name = argument.partition("=")[0]
        if argument.startswith("--samples"):
            overrides.append("SAMPLES=" + (argument.partition("=")[2] or next(rest, "")))
        elif argument.startswith("--"):
            raise UserError(f'{argument!r}: no such option; write "question", --samples N or NAME=value')
        elif "=" in argument and (re.fullmatch("[A-Z_]+", name) or name.upper() in DEFAULTS):
            overrides.append(argument)
        else:
            words.append(argument)
    question = " ".join(words).strip()
    globals().update(DEFAULTS | demo.parse_overrides(overrides, DEFAULTS))
    for name, low in {"SAMPLES": 1, "BATCH_SIZE": 1, "SEED": 0, "MAX_PROMPT_LENGTH": 0,
                      "TOTAL_GENERATION_STEPS": 0}.items():  # fmt: skip
        if globals()[name] < low:
            raise UserError(f"{name}={globals()[name]}: use {low} or more")
    if words and not question:
        raise UserError("the question is empty; write one, or none at all for the built-in batch")
    if question and INPUT:
        raise UserError(f"INPUT={INPUT}: there is a question on the command line, too; give one of the two")
    if SAMPLING not in ("", *demo.GENERATION_CONFIGS):
        raise UserError(f"SAMPLING={SAMPLING}: one of {', '.join(demo.GENERATION_CONFIGS)}")
    if SAMPLING == "greedy" and SAMPLES > 1:
        raise UserError(f"SAMPLES={SAMPLES}: greedy answers are all alike; leave SAMPLING out, or SAMPLES=1")
    if COMPARE and CHECKPOINT == "base":
        raise UserError("COMPARE=True: CHECKPOINT=base has nothing to be compared with; give a run's folder")
    return question


# %% Which checkpoint -----------------------------------------------------------------------------------
def find_run() -> tuple[Path, int | None] | None:
    """The run that CHECKPOINT names and the number of its checkpoint (None: the last); None for base.

    Raises:
        UserError: no such run.
    """
    if CHECKPOINT == "base":
        return None
    if not CHECKPOINT:
        runs = Path("runs/grpo_llama3_1_8b_demo").glob("*/checkpoints/actor/*/model_params")
        newest = max(runs, key=lambda path: path.stat().st_mtime, default=None)
        return (newest.parents[3], None) if newest and not MODEL else None
    path = Path(CHECKPOINT)
    for folder in (path, *path.parents):
        if (folder / "constants.json").is_file() and (folder == path or path.name.isdigit()):
            return folder, None if folder == path else int(path.name)
    raise UserError(
        f"CHECKPOINT={CHECKPOINT}: not in a run of the main script (no constants.json there); give its "
        "RUN_DIR, RUN_DIR/number, or base"
    )


def take_constants(run: Path | None) -> None:
    """Sets the main script's constants: those of the run, but for what only training needs.

    Raises:
        UserError: an unreadable constants.json, lengths that cannot be.
    """
    saved = {}
    if run:
        try:
            saved = json.loads((run / "constants.json").read_text())
            saved["MODEL"]
        except (ValueError, KeyError):
            raise UserError(f"CHECKPOINT={CHECKPOINT or run}: its constants.json is damaged") from None
    demo.configure([f"MODEL={MODEL or saved.get('MODEL', 'tiny_llama')}"])
    own = dict(
        MODEL=demo.MODEL,
        RUN_DIR=str(run or ""),
        MAX_PROMPT_LENGTH=MAX_PROMPT_LENGTH or saved.get("MAX_PROMPT_LENGTH", demo.MAX_PROMPT_LENGTH),
        TOTAL_GENERATION_STEPS=TOTAL_GENERATION_STEPS
        or saved.get("TOTAL_GENERATION_STEPS", demo.TOTAL_GENERATION_STEPS),
        ROLLOUT_ENGINE="maxtext",  # here; the devices of training are not those of today, either
        ATTENTION="dot_product",
        TRAINER_FSDP=-1,
        TRAINER_TENSOR_PARALLEL=1,
    )
    vars(demo).update({name: value for name, value in saved.items() if name in demo.DEFAULTS} | own)
    demo.check_constants()


def checkpoint_folder(run: Path, step: int | None) -> tuple[str, int]:
    """Where Tunix keeps the run's checkpoints, and the number of the one to take.

    Raises:
        UserError: there is none, or not this one.
    """
    root = epath.Path(demo.checkpoint_root()) / "actor"
    steps = sorted(int(path.name) for path in root.iterdir() if path.name.isdigit()) if root.exists() else []
    if not steps:
        raise UserError(
            f"CHECKPOINT={CHECKPOINT or run}: no checkpoint in {root}; train further, or take base"
        )
    if step is not None and step not in steps:
        raise UserError(
            f"CHECKPOINT={CHECKPOINT}: no such checkpoint; there are {', '.join(map(str, steps))}"
        )
    return str(root), steps[-1] if step is None else step


# %% Questions in, answers out --------------------------------------------------------------------------
def read_rows(question: str) -> list[dict[str, Any]]:
    """The questions to ask.

    Returns:
        Rows with `question`, `gold`, `data_source` (each None where INPUT has none), `extra_info` (JSON), and
        INPUT's own columns under `row`.

    Raises:
        UserError: INPUT cannot be read; names file, line and remedy.
    """
    if question:
        return [dict(question=question, gold=None, data_source=None, row={"question": question})]
    if not INPUT:
        return [
            dict(question=q, gold=gold, data_source=None, row={"question": q, "answer": gold})
            for q, gold in QUESTIONS
        ]
    try:
        lines = demo.find_path(INPUT).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"INPUT={INPUT}: {reason}; give a JSONL file") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"INPUT={INPUT}: line {number} is not JSON ({error}); mend it") from None
        text = (row.get("question") or row.get("prompt")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(f"INPUT={INPUT}: line {number} has no column 'question' or 'prompt'; add one")
        gold = row.get("ground_truth") or reward_func.extract_hash_answer(str(row.get("answer", "")))
        if not isinstance(gold, str | None):
            gold = json.dumps(gold, ensure_ascii=False)
        extra = "" if row.get("extra_info") is None else json.dumps(row["extra_info"], ensure_ascii=False)
        rows.append(
            dict(question=text, gold=gold, data_source=row.get("data_source"), extra_info=extra, row=row)
            | dict(source=INPUT, line=str(number), answer=gold)  # for `choose_rewards`, which names the place
        )
    if not rows:
        raise UserError(f"INPUT={INPUT}: has no rows; give a file with at least one question")
    return rows


def add_prompts(rows: list[dict[str, Any]], tokenizer) -> None:
    """Adds `prompt`; says which words the tokenizer does not know.

    Raises:
        UserError: a question that is too long.
    """
    unknown = []
    for number, row in enumerate(rows, start=1):
        row["prompt"] = demo.to_prompt(tokenizer, row["question"])
        length = len(tokenizer.encode(row["prompt"], add_special_tokens=False))
        if length > demo.MAX_PROMPT_LENGTH:
            raise UserError(
                f"MAX_PROMPT_LENGTH={demo.MAX_PROMPT_LENGTH}: question {number} takes {length} tokens, "
                "template included; shorten it, or raise the limit (longer ones were not trained)"
            )
        encoded = tokenizer(row["question"], add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token == tokenizer.unk_token_id:
                unknown.append(row["question"][start:end])
    if unknown:
        print(f"note: {demo.MODEL} has no word for {' '.join(dict.fromkeys(unknown))!r}, and cannot see it")


def vote(completions: list[str]) -> tuple[str, str]:
    """The completion that speaks for all, and the vote in words: the most frequent answer, how often."""
    winner, cast = demo.majority(completions), demo.votes(completions)
    if cast[winner] is None:
        return completions[0], "no answer"
    return completions[winner], f"{cast[winner]} ({cast.count(cast[winner])} of {len(completions)})"


def ask(rollout: MaxTextRollout, rows: list[dict[str, Any]]) -> list[list[str]]:
    """SAMPLES completions of each row's prompt."""
    prompts = [row["prompt"] for row in rows for _ in range(SAMPLES)]
    texts = rollout.generate(prompts, rollout_config()).text
    return [texts[i : i + SAMPLES] for i in range(0, len(texts), SAMPLES)]


def rollout_config() -> RolloutConfig:
    """How to sample: SAMPLING, or what fits SAMPLES."""
    name = SAMPLING or ("greedy" if SAMPLES == 1 else "standard")
    return RolloutConfig(**demo.generation_config(name), seed=jax.random.key(SEED))


def is_right(completion: str, row: dict[str, Any]) -> bool:
    """Whether it is right: as the run grades it where INPUT names a data_source, else by its number."""
    if row["data_source"] is None:
        return reward_func.grade(completion, row["gold"])
    columns = ([row[name]] for name in ("gold", "data_source", "extra_info"))
    return bool(demo.score_answers([completion], *columns)[0] >= 1)


def judged(completion: str, row: dict[str, Any]) -> str:
    """ " [right]", " [wrong: 7]", or nothing where the right answer is not known."""
    if row["gold"] is None:
        return ""
    return " [right]" if is_right(completion, row) else f" [wrong: {row['gold']}]"


def in_columns(left: str, right: str) -> Iterator[str]:
    """Lines of two texts side by side, as wide as the terminal."""
    width = (shutil.get_terminal_size().columns - 3) // 2
    columns = (textwrap.wrap(text, width) for text in (left, right))
    for pair in itertools.zip_longest(*columns, fillvalue=""):
        yield f"{pair[0]:<{width}} | {pair[1]}".rstrip()


def show(rows: list[dict[str, Any]], before: list[list[str]] | None, after: list[list[str]]) -> None:
    """Prints questions and answers, and how many of those with a known answer are right."""
    for i, row in enumerate(rows):
        print(f"\nquestion: {row['question']}")
        for old, new in zip(before[i] if before else after[i], after[i], strict=True):
            if before:
                print(*in_columns(f"before: {old}{judged(old, row)}",
                                  f"after: {new}{judged(new, row)}"), sep="\n")  # fmt: skip
            else:
                print(f"answer:   {new}{judged(new, row)}")
        if SAMPLES > 1:
            old = f"before {vote(before[i])[1]}, after " if before else ""
            winner, words = vote(after[i])
            print(f"vote:     {old}{words}{judged(winner, row)}")
    known = [i for i, row in enumerate(rows) if row["gold"] is not None]
    if known:
        counts = [
            sum(is_right(vote(answers[i])[0], rows[i]) for i in known)
            for answers in (before, after)
            if answers
        ]
        print(f"\nright:    {', after '.join(f'{count} of {len(known)}' for count in counts)}")


def write_rows(path: Path, rows: list[dict[str, Any]], before, after: list[list[str]]) -> None:
    """OUTPUT: INPUT's columns and `completion` (of the vote), `completions`, `vote`, `before`, `correct`."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            completion, words = vote(after[i])
            out = row["row"] | {"completion": completion}
            if SAMPLES > 1:
                out |= {"completions": after[i], "vote": words}
            if before:
                out["before"] = vote(before[i])[0]
            if row["gold"] is not None:
                out["correct"] = is_right(completion, row)
            file.write(json.dumps(out, ensure_ascii=False) + "\n")
    partial.rename(path)  # whole or not at all
    print(f"answers:  {path}")


# %% Main -----------------------------------------------------------------------------------------------
def output_path() -> Path | None:
    """Where the answers go, if anywhere; raises UserError if something is there already, or cannot be."""
    name = OUTPUT or (str(Path(INPUT).with_suffix(".answers.jsonl")) if INPUT else "")
    if not name:
        return None
    if Path(name).exists():
        raise UserError(f"OUTPUT={name}: exists already; choose another name, or remove it")
    if not Path(name).resolve().parent.is_dir():
        raise UserError(f"OUTPUT={name}: there is no such folder; make it, or choose another")
    return Path(name)


def make_rollout(folder: Path, hf, tokenizer, answers: int) -> MaxTextRollout:
    """MODEL, as the run began with it, in an engine that decodes up to `answers` answers side by side."""
    devices = jax.device_count()
    rows = -(-min(BATCH_SIZE, answers) // devices) * devices  # a multiple: each device gets as many
    config = demo.to_maxtext_config(hf, rows, demo.MAX_PROMPT_LENGTH, demo.TOTAL_GENERATION_STEPS)
    adapter, mesh = demo.load_llama(folder, hf, config, tokenizer.pad_token_id)
    merge = None
    if demo.LORA_RANK:
        adapter = lora.add_lora(
            adapter, mesh, config, demo.LORA_RANK, demo.LORA_ALPHA, demo.LORA_TARGETS, demo.SEED
        )
        merge = functools.partial(lora.merge, scale=demo.LORA_ALPHA / demo.LORA_RANK)
    return MaxTextRollout(
        adapter, TokenizerAdapter(tokenizer), mesh, rollout_config(),
        maxtext_config=config, current_step=lambda: 0, seed=SEED, merge=merge,
    )  # fmt: skip


def run(arguments: list[str]) -> None:
    """Asks; see the module's docstring."""
    question = configure(arguments)
    rows, path, found = read_rows(question), output_path(), find_run()
    if COMPARE and not found:
        raise UserError("COMPARE=True: no run to compare with; give CHECKPOINT= a run's folder")
    run_dir, step = found or (None, None)
    take_constants(run_dir)
    demo.choose_rewards([row for row in rows if row["gold"] and row["data_source"]])
    root, step = checkpoint_folder(run_dir, step) if found else ("", None)
    folder, hf = demo.load_hf_config(demo.MODEL)
    tokenizer = demo.load_tokenizer(folder)
    trained = f" (LoRA of rank {demo.LORA_RANK})" if demo.LORA_RANK else ""
    print(
        f"checkpoint: {root}/{step}{trained}, trained from {demo.MODEL}" if found
        else f"checkpoint: base, {demo.MODEL} untrained"
    )  # fmt: skip
    add_prompts(rows, tokenizer)

    rollout = make_rollout(folder, hf, tokenizer, len(rows) * SAMPLES)
    before = ask(rollout, rows) if COMPARE else None
    if found:
        manager = CheckpointManager(root_directory=root)
        manager.maybe_restore(rollout.model(), step=step, restore_only_lora_params=bool(demo.LORA_RANK))
        manager.close()
    if question and SAMPLES == 1 and not COMPARE:
        pieces = []
        for piece in rollout.stream(rows[0]["prompt"], rollout_config()):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        after = [["".join(pieces)]]
    else:
        after = ask(rollout, rows)
        show(rows, before, after)
    if path:
        write_rows(path, rows, before, after)


def main() -> None:
    """Runs the script with the command line; exit code 2 on the user's errors, 130 on Ctrl-C."""
    demo.quiet()
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
