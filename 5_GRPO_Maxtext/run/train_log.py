"""The log of a training run: train_log.csv, TensorBoard, the progress bar, health lines, evaluations."""

import csv
import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tqdm import tqdm

from model import devices
from run import answers as kept_answers
from run import health
from run.evaluation import HELD_OUT
from run.run_files import read_log
from settings import UserError
from task.task import GRADED

COLUMNS = (  # then, in the order in which they turn up: `reward_<function>`, `memory_...`
    "step", "reward", "reward_std", "correct", "format_ok", "zero_variance", "length", "kl", "entropy",
    "clip_fraction", "loss", "grad_norm", "seconds", "distinct", "cut_off", "tokens_per_second", "beta",
    "temperature", "correct_lenient", "held_out_correct", "held_out_correct_lenient", "held_out_format_ok",
    "held_out_greedy_correct", "held_out_greedy_correct_lenient", "mismatch", "mismatch_max", "answers",
)  # fmt: skip


# %% Figures of a step --------------------------------------------------------------------------------------
def answer_figures(grader, samples, seconds: float) -> dict[str, float]:
    """What a step's answers say, by column.

    `zero_variance`: share of groups whose G rewards are all equal. They have no better and no worse answer,
    hence advantage 0 and no gradient: their generation was paid for nothing. `distinct`: different answers in
    a group, 1 to G; it tells whether such answers were all alike.

    Args:
        grader: of the run.
        samples: `Samples`.
        seconds: that the step took.
    """
    groups, flat = samples.rewards, samples.flat()  # [B, G], and arrays [N, ...]
    answers = flat.answers
    columns = {name: flat.questions[name] for name in GRADED}
    return {
        "reward": groups.mean(),
        "reward_std": groups.std(axis=1, ddof=1).mean(),  # G - 1, as the advantage
        "correct": np.mean(grader.score(answers.texts, **columns) >= 1),
        "format_ok": np.mean([grader.format_right(text) for text in answers.texts]),
        "zero_variance": np.mean(np.ptp(groups, axis=1) == 0),
        "length": answers.lengths.mean(),
        "distinct": np.mean([len(set(group)) for group in samples.answers.texts]),
        "cut_off": np.mean(~answers.ended),
        "correct_lenient": np.mean(grader.right_lenient(answers.texts, **columns)),
        "answers": groups.size,
        "seconds": seconds,
        "tokens_per_second": answers.lengths.sum() / seconds,
    } | {f"reward_{name}": points.mean() for name, points in samples.reward_parts.items()}


def in_words(result: Mapping[str, float]) -> str:
    """The shares of an evaluation that are of interest while a run goes on."""
    names = {"answers right": "answer_accuracy", "by the last number": "lenient_accuracy",
             "format right": "format_accuracy", "greedy right": "greedy_answer_accuracy"}  # fmt: skip
    return ", ".join(f"{words} {result[name]:.1%}" for words, name in names.items())


def count_nonfinite(c, step: int, before: int, loss: float, grad_norm: float) -> int:
    """How many updates in a row were not finite, this one included; they were not applied.

    Raises:
        UserError: more than MAX_NONFINITE_UPDATES.
    """
    # Both: a loss can be finite while its gradient is not, and every update is skipped in silence.
    bad = {n: v for n, v in (("loss", loss), ("gradient norm", grad_norm)) if not math.isfinite(v)}
    if bad and before + 1 > c.MAX_NONFINITE_UPDATES:
        name, value = next(iter(bad.items()))
        raise UserError(
            f"the {name} of step {step} is {value}; that update was not applied, and no checkpoint holds it. "
            f"Lower LEARNING_RATE={c.LEARNING_RATE} or MAX_GRAD_NORM={c.MAX_GRAD_NORM}, and start a new run, "
            f"or let some pass (MAX_NONFINITE_UPDATES={c.MAX_NONFINITE_UPDATES})"
        )
    return before + 1 if bad else 0


# %% Log ----------------------------------------------------------------------------------------------------
class TrainingLog:
    """One CSV row per step, the same in TensorBoard, progress bar, health lines, evaluations.

    Args:
        logs: folder of train_log.csv, evaluations.jsonl and tensorboard/. Rows of steps after `first_step`,
            which a kill has undone, are dropped.
        c: the constants of the run.
        first_step: steps already done.
    """

    def __init__(self, logs: Path, c, first_step: int):
        self._c, self._constants = c, dataclasses.asdict(c)
        self._path = logs / "train_log.csv"
        self.rows = [row for row in read_log(self._path) if row["step"] <= first_step]
        if len(self.rows) < first_step:
            lost = first_step - len(self.rows)
            print(f"{self._path} has lost the rows of {lost:,} steps; the run goes on, its curves lack them")
        self._columns = list(dict.fromkeys(itertools.chain(COLUMNS, *self.rows)))
        self._rewrite()
        self._evaluations = logs / "evaluations.jsonl"
        self._evaluated = kept_answers.keep_lines(self._evaluations, first_step)
        (logs / "tensorboard").mkdir(exist_ok=True)
        # Not tensorboardX's SummaryWriter: that is a thread, which a full disk ends without a word. Here the
        # disk's error reaches the thread that trains.
        self._events = EventsWriter(str(logs / "tensorboard" / "events"))
        self._unhealthy: dict[str, str] = {}
        self._progress = tqdm(
            total=c.NUM_BATCHES, initial=first_step, desc="GRPO", unit="step",
            disable=devices.no_bar(),
        )  # fmt: skip

    def _rewrite(self) -> None:
        """The whole file anew, with a column for everything that has been logged so far."""
        partial = self._path.with_suffix(".partial")
        with open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="nan")
            writer.writeheader()
            writer.writerows(map(in_whole_numbers, self.rows))
        partial.rename(self._path)

    def add(self, row: Mapping[str, float]) -> None:
        """Takes the figures of a step: they are on the disk when this returns."""
        row = {name: float(value) for name, value in row.items()}
        self.rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        if new:
            self._rewrite()
        else:
            with open(self._path, "a", newline="") as file:
                csv.DictWriter(file, self._columns, restval="nan").writerow(in_whole_numbers(row))
        for name, value in row.items():
            scalar = summary.scalar(name, np.asarray(value))
            self._events.write_event(Event(step=int(row["step"]), wall_time=time.time(), summary=scalar))
        self._events.flush()
        self._say_what_is_wrong()
        shown = {name: f"{row[name]:.2f}" for name in ("reward", "correct", "format_ok", "kl")}
        self._progress.set_postfix(shown, refresh=False)
        self._progress.update()

    def _say_what_is_wrong(self) -> None:
        """Prints each health line when it begins to hold."""
        found = health.check(self.rows, self._constants)
        for kind in found.keys() - self._unhealthy.keys():
            tqdm.write(f"health   step {self.rows[-1]['step']:.0f}: {found[kind]}")
        self._unhealthy = found

    def evaluation_due(self, done: int) -> bool:
        """Whether to evaluate after so many steps: before the first, after the last, after every N-th."""
        every = self._c.EVAL_EVERY
        wanted = every and (done % every == 0 or done == self._c.NUM_BATCHES)
        return devices.all_agree(bool(wanted and done not in self._evaluated))

    def add_evaluation(self, done: int, result: dict[str, Any]) -> dict[str, float]:
        """Writes an evaluation into evaluations.jsonl; its columns for the row of that step."""
        kept_answers.append_lines(self._evaluations, [{"step": done} | result])
        self._evaluated.add(done)
        if devices.is_first():
            tqdm.write(f"held out step {done}: {in_words(result)}")
        return {column: result[name] for column, name in HELD_OUT.items()}

    def close(self) -> None:
        """Closes the progress bar and TensorBoard's file."""
        self._progress.close()
        self._events.close()


def in_whole_numbers(row: Mapping[str, float]) -> dict[str, float]:
    """A row for the CSV file: counts as 1, 2, not as 1.0, 2.0."""
    return row | {name: int(row[name]) for name in ("step", "answers") if name in row}


def seconds_before(log: Sequence[Mapping[str, float]], first_step: int) -> float:
    """How long the steps took that earlier processes of a run have done."""
    return sum(row.get("seconds", 0.0) for row in log if row["step"] <= first_step)
