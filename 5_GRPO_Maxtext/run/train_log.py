"""The log of a training run: train_log.csv, TensorBoard, the progress bar, health lines."""

import csv
import dataclasses
import io
import itertools
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tqdm import tqdm

from model import devices
from run import health
from run.evaluation import HELD_OUT
from run.run_files import read_log
from settings import write_whole
from task.task import GRADED

COLUMNS = (  # then, in order of appearance: `sync_gain`, `reward_<function>`, `memory_...`
    "step", "reward", "reward_std", "correct", "format_ok", "zero_variance", "length", "kl", "entropy",
    "clip_fraction", "loss", "grad_norm", "seconds", "distinct", "cut_off", "tokens_per_second", "beta",
    "temperature", "correct_lenient", *HELD_OUT, "mismatch", "mismatch_max", "answers",
)  # fmt: skip


# %% Metrics of a step --------------------------------------------------------------------------------------
def answer_metrics(grader, samples, seconds: float) -> dict[str, float]:
    """Metrics of a step's answers, `Samples`, by column; `seconds`: how long the step took.

    `zero_variance`: share of groups whose G rewards are all equal. Their advantage is 0 and they give no
    gradient, so the time spent generating them is wasted. `distinct`: how many different answers a group has,
    1 to G; it tells whether all answers of such a group were alike.
    """
    rewards, flat = samples.rewards, samples.flat()  # [B, G], and arrays [N, ...]
    written = flat.answers
    columns = {name: flat.questions[name] for name in GRADED}
    return {
        "reward": rewards.mean(),
        "reward_std": rewards.std(axis=1, ddof=1).mean(),  # G - 1, as in the advantage
        "correct": np.mean(grader.score(written.texts, **columns) >= 1),
        "format_ok": np.mean([grader.format_right(text) for text in written.texts]),
        "zero_variance": np.mean(np.ptp(rewards, axis=1) == 0),
        "length": written.lengths.mean(),
        "distinct": np.mean([len(set(texts)) for texts in samples.answers.texts]),
        "cut_off": np.mean(~written.ended),
        "correct_lenient": np.mean(grader.right_lenient(written.texts, **columns)),
        "answers": rewards.size,
        "seconds": seconds,
        "tokens_per_second": written.lengths.sum() / seconds,
    } | {f"reward_{name}": part.mean() for name, part in samples.reward_parts.items()}


# %% Log ----------------------------------------------------------------------------------------------------
class TrainingLog:
    """One CSV row per step, the same in TensorBoard, the progress bar, health lines.

    `first_step` steps are done; drops later ones from the file in `logs`, because a kill has undone them.
    """

    def __init__(self, logs: Path, c, first_step: int):
        self._c, self._path, self._unhealthy = c, logs / "train_log.csv", {}
        self.rows = [row for row in read_log(self._path) if row["step"] <= first_step]
        if (lost := first_step - len(self.rows)) > 0:
            print(f"{self._path} has lost the rows of {lost:,} steps; the run goes on, its curves lack them")
        self._write()
        (logs / "tensorboard").mkdir(exist_ok=True)
        # Not tensorboardX's SummaryWriter, whose thread dies silently when the disk is full. Here the error
        # reaches the training thread.
        self._events = EventsWriter(str(logs / "tensorboard" / "events"))
        self._progress = tqdm(
            total=c.NUM_BATCHES, initial=first_step, desc="GRPO", unit="step", disable=devices.no_bar()
        )

    def _write(self) -> None:
        """Rewrites the file, because a later step, or more devices after a resume, can add columns."""
        text = io.StringIO()
        writer = csv.DictWriter(text, dict.fromkeys(itertools.chain(COLUMNS, *self.rows)), restval="nan")
        writer.writeheader()
        for row in self.rows:
            writer.writerow(row | {name: int(row[name]) for name in ("step", "answers") if name in row})
        write_whole(self._path, text.getvalue())

    def add(self, row: Mapping[str, float]) -> None:
        """Logs the metrics of a step; they're on the disk when this returns."""
        row = {name: float(value) for name, value in row.items()}
        self.rows.append(row)
        self._write()
        for name, value in row.items():
            if not math.isnan(value):  # not measured
                scalar = summary.scalar(name, np.asarray(value))
                self._events.write_event(Event(step=int(row["step"]), wall_time=time.time(), summary=scalar))
        self._events.flush()
        found = health.check(self.rows, dataclasses.asdict(self._c))
        for kind in found.keys() - self._unhealthy.keys():  # print a line when it first applies
            tqdm.write(f"health   step {row['step']:.0f}: {found[kind]}")
        self._unhealthy = found
        shown = {name: f"{row[name]:.2f}" for name in ("reward", "correct", "format_ok", "kl")}
        self._progress.set_postfix(shown, refresh=False)
        self._progress.update()

    def close(self) -> None:
        """Closes the progress bar and TensorBoard's file."""
        self._progress.close()
        self._events.close()
