"""pass@k: how often at least one of k answers is right, for the untrained model and for the trained
one.

Reinforcement learning raises pass@1. Does the model also solve new questions, or does it only find
known answers more often? At large k many untrained models overtake the trained ones (arXiv
2504.13837).

    python 5_GRPO_Maxtext/tool.py pass_at_k CHECKPOINT=runs/seed_0,runs/seed_1,runs/seed_2

Writes pass_at_k.csv. The answers are sampled from the policy itself, at temperature 1.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import settings
from settings import Count, Seed, TwoOrMore, UserError


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one run as NAME=value."""

    # a run's folder, or several of one MODEL, comma-separated (empty = the newest run)
    CHECKPOINT: str = ""
    SAMPLES: TwoOrMore = 256  # n, answers per question; k goes up to n in powers of two
    NUM_QUESTIONS: Count = 512  # from the top of the run's test set
    BATCH_SIZE: Count = 512  # answers decoded at once; more: faster, and more memory
    SEED: Seed = 0  # of the sampled answers
    # Python file with the runs' own compute_score; none is run unless named here
    REWARD_FUNC: str = ""
    RUN_DIR: str = ""  # folder for the CSV file (empty = runs/pass_at_k/<time>)


RESAMPLES = 2_000  # of the questions, for the intervals
COLUMNS = [
    "model",
    "reading",
    "k",
    "pass_at_k",
    "low",
    "high",
    "never_right",
    "questions",
    "samples",
]
READINGS = "strict", "lenient"  # right in the form asked for, right by the last number


# %% Imports ---------------------------------------------------------------------------------------
if __name__ == "__main__":  # refuses a wrong constant now, before seconds of imports
    settings.refuse_early(Constants)

import jax
import numpy as np
import pandas as pd
import scipy.stats
from tqdm import tqdm

import inference
import reward_func
from model import devices, llama, versions
from model.rollout import sampling_config
from run import process, run_files, run_folder, start, trained_model
from task import questions, run_grader
from task.questions import GRADED


# %% Estimate --------------------------------------------------------------------------------------
def pass_at_k(right: np.ndarray, n: int, k: int) -> np.ndarray:
    """1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), without bias if k <=
    n: [Q].

    `right` is c, the right ones among n answers to each question, int [Q]. The fraction: k drawn,
    none right.
    """
    return 1 - scipy.stats.hypergeom.pmf(0, n, right, k)


def interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of values [Q], by the percentile bootstrap over questions."""
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    return tuple(np.percentile(means, (2.5, 97.5)))


# %% Answers ---------------------------------------------------------------------------------------
def read_run(c: Constants, run: str):
    """How a run asks and grades: inference's constants, the checkpoint, the tokenizer, the grader,
    and the questions.
    """
    at_once = min(c.BATCH_SIZE, c.SAMPLES * c.NUM_QUESTIONS)
    arguments = [f"CHECKPOINT={run}", f"REWARD_FUNC={c.REWARD_FUNC}", f"BATCH_SIZE={at_once}"]
    ask, _, checkpoint = inference.read_arguments(arguments)
    if checkpoint is None:
        raise UserError(f"CHECKPOINT={run}: there is no run yet; train one, then give its folder")
    made = SimpleNamespace(**checkpoint.constants)  # questions are read and asked as the run did
    data = questions.read_data(made)
    everything = [row for rows, _ in data.values() for row in rows]
    grader = run_grader.make_grader(ask.REWARDS, ask.REWARD_FUNC, reward_func, everything)
    tokenizer = llama.load_tokenizer(llama.fetch_model(ask.MODEL)[0])
    made.NUM_TEST_QUESTIONS = c.NUM_QUESTIONS
    rows = start.make_splits(made, {"test": data["test"]}, grader, tokenizer)[0]["test"]
    return ask, checkpoint, tokenizer, grader, rows


def check_comparable(c: Constants, runs: Sequence[str]) -> None:
    """UserError if the runs' figures don't mean the same: one row is untrained, for all of them."""
    meanings, digest = [], functools.cache(run_folder.model_digest)
    for run in runs:
        ask, checkpoint, _, grader, rows = read_run(c, run)
        own = {"REWARDS": ",".join(grader.names), "REWARD_FUNC": ask.REWARD_FUNC}
        constants = checkpoint.constants | own | {"EVAL_CONFIG": "policy"}
        identity = {"MODEL": digest(ask.MODEL)}  # as it is now
        meanings.append(run_files.meaning(constants, identity, rows))
    for run, one in zip(runs[1:], meanings[1:]):
        if names := run_files.differences(meanings[0], one):
            raise UserError(
                f"CHECKPOINT={','.join(runs)}: {run} and {runs[0]} differ in {', '.join(names)}, "
                "so one table can't hold both; name runs that are the same in these"
            )


def count_right(c: Constants, run: str, trained: bool) -> dict[str, np.ndarray]:
    """How many of n answers to each question are right, strict and lenient: int [Q] each."""
    ask, checkpoint, tokenizer, grader, rows = read_run(c, run)
    at_once = ask.BATCH_SIZE
    rollout = trained_model.make_rollout(ask, tokenizer, c.SAMPLES * len(rows), checkpoint)
    if trained:
        trained_model.warn_if_model_changed(ask.MODEL, checkpoint, "; counted as it is now")
        trained_model.restore(rollout, checkpoint)

    counts = {reading: np.zeros(len(rows), int) for reading in READINGS}
    asked = np.repeat(np.arange(len(rows)), c.SAMPLES)
    for first in tqdm(range(0, len(asked), at_once), run if trained else "untrained", disable=None):
        part = asked[first : first + at_once]
        key = jax.random.fold_in(jax.random.key(c.SEED), first)
        config = sampling_config(ask, "policy", seed=key)
        texts = rollout.generate([rows[i]["prompts"] for i in part], config).text
        columns = {name: [rows[i][name] for i in part] for name in GRADED}
        np.add.at(counts["strict"], part, grader.score(texts, **columns) >= 1)
        np.add.at(counts["lenient"], part, grader.right_lenient(texts, **columns))
    return counts


# %% Table -----------------------------------------------------------------------------------------
def table(c: Constants, counts: dict[str, dict[str, np.ndarray]]) -> pd.DataFrame:
    """One row per model ("untrained", or a run's folder), reading and k; `counts` by model."""
    rows, ks = [], [2**i for i in range(c.SAMPLES.bit_length())]
    for (model, readings), reading, k in itertools.product(counts.items(), READINGS, ks):
        right = readings[reading]
        values = pass_at_k(right, c.SAMPLES, k)
        shares = values.mean(), *interval(values, c.SEED)
        rows.append((model, reading, k, *shares, (right == 0).sum(), len(right), c.SAMPLES))
    return pd.DataFrame(rows, columns=COLUMNS).round(5)


def main(arguments: Sequence[str]) -> None:
    """Counts, estimates, writes; see the module's docstring."""
    c = settings.read(Constants, arguments)
    versions.prepare_libraries()
    process.enable_compilation_cache()
    devices.check_gpu()
    folder = Path(c.RUN_DIR) if c.RUN_DIR else run_folder.new_folder("pass_at_k")
    if (folder / "pass_at_k.csv").exists():
        raise UserError(f"RUN_DIR={folder}: holds another table; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    names = [name.strip() for name in c.CHECKPOINT.split(",") if name.strip()] or [""]
    if len(names) > 1:
        check_comparable(c, names)
    counts = {"untrained": count_right(c, names[0], trained=False)}
    counts |= {name: count_right(c, name, trained=True) for name in names}
    rows = table(c, counts)
    rows.to_csv(folder / "pass_at_k.csv", index=False, lineterminator="\r\n")
    for row in rows.to_dict("records"):
        print(
            "{model}, {reading}: pass@{k} {pass_at_k:.1%} ({low:.1%} to {high:.1%})".format(**row)
        )
    print(f"table: {folder}/pass_at_k.csv")


if __name__ == "__main__":
    settings.run(main)
