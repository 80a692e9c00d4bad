"""A run while it trains: checkpoints, log, held-out questions, Ctrl-C, a full disk: everything but
GRPO.
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tqdm import tqdm

from constants import RunConstants
from model import devices
from model.log_probs import mean_metrics
from run import answers, checkpoints, health, process
from run.evaluation import HELD_OUT, in_words
from run.run_files import read_log
from schedules import adaptive_beta
from settings import UserError, write_whole
from task.run_grader import Grader
from task.task import Samples, differ

COLUMNS = (  # then, in order of appearance: `sync_gain`, `reward_<function>`, `memory_...`
    "step",
    "reward",
    "reward_std",
    "correct",
    "format_ok",
    "zero_variance",
    "length",
    "kl",
    "entropy",
    "clip_fraction",
    "loss",
    "grad_norm",
    "seconds",
    "distinct",
    "cut_off",
    "tokens_per_second",
    "beta",
    "temperature",
    "correct_lenient",
    *HELD_OUT,
    "mismatch",
    "mismatch_max",
    "answers",
)


def answer_metrics(grader: Grader, samples: Samples, seconds: float) -> dict[str, float]:
    """Metrics of a step's answers by column; `seconds`: how long the step took.

    `zero_variance`: share of groups whose G rewards are all equal but for rounding, so they give no
    gradient.
    `distinct`: how many different answers a group has, 1 to G.
    """
    rewards, flat = samples.rewards, samples.flat()  # [B, G], and arrays [N, ...]
    written, graded = flat.answers, flat.graded
    return {
        "reward": rewards.mean(),
        "reward_std": rewards.std(axis=1, ddof=1).mean(),  # G - 1, as in the advantage
        "correct": np.mean(grader.score(**graded) >= 1),
        "format_ok": np.mean(grader.format_right(**graded)),
        "zero_variance": np.mean(~differ(rewards)),
        "length": written.lengths.mean(),
        "distinct": np.mean([len(set(texts)) for texts in samples.answers.texts]),
        "cut_off": np.mean(~written.ended),
        "correct_lenient": np.mean(grader.right_lenient(**graded)),
        "answers": rewards.size,
        "seconds": seconds,
        "tokens_per_second": written.lengths.sum() / seconds,
    } | {f"reward_{name}": part.mean() for name, part in samples.reward_parts.items()}


class TrainingLog:
    """train_log.csv with a row per step; the same in TensorBoard, the progress bar, health lines.

    `first_step` steps are done; drops later ones from the file in `logs`, because a kill has undone
    them.
    """

    def __init__(self, logs: Path, c: RunConstants, first_step: int):
        self._c, self._path, self._resumed = c, logs / "train_log.csv", first_step
        # what `health.check` said at the last step
        self._unhealthy: dict[str, health.Sentence] = {}
        self.rows = [row for row in read_log(self._path) if row["step"] <= first_step]
        if (lost := first_step - len(self.rows)) > 0:
            print(
                f"{self._path} has lost the rows of {lost:,} steps; the run goes on, "
                "its curves lack them"
            )
        self._rewrite()
        (logs / "tensorboard").mkdir(exist_ok=True)
        # Not tensorboardX's SummaryWriter, whose thread dies silently when the disk is full. Here
        # the error reaches the training thread.
        self._events = EventsWriter(str(logs / "tensorboard" / "events"))
        # TensorBoard then drops the later steps of older files, which a kill has undone
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(
            Event(wall_time=time.time(), step=first_step + 1, session_log=start)
        )
        self._progress = tqdm(
            total=c.NUM_BATCHES,
            initial=first_step,
            desc="GRPO",
            unit="step",
            disable=devices.tqdm_disabled(),
        )

    def _to_csv(self, rows: Iterable[Mapping[str, float]], header: bool = False) -> str:
        """Rows as lines of the file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="nan")
        if header:
            writer.writeheader()
        for row in rows:
            whole = {name: int(row[name]) for name in ("step", "answers") if name in row}
            writer.writerow(row | whole)
        return text.getvalue()

    def _rewrite(self) -> None:
        """Writes the whole file, with a column for every metric of its rows."""
        self._columns = list(dict.fromkeys(itertools.chain(COLUMNS, *self.rows)))
        write_whole(self._path, self._to_csv(self.rows, header=True))

    def _append(self, row: Mapping[str, float]) -> None:
        """Adds a row at the end of the file. `read_log` skips half a line, which a kill can leave.

        The first step, or more devices after a resume, add columns: then the file is rewritten.
        """
        if row.keys() <= set(self._columns):
            with open(self._path, "a", encoding="utf-8", newline="") as file:
                file.write(self._to_csv([row]))
        else:
            self._rewrite()

    def add(self, row: Mapping[str, float]) -> None:
        """Logs the metrics of a step; they're on the disk when this returns."""
        row = {name: float(value) for name, value in row.items()}
        self.rows.append(row)
        self._append(row)
        for name, value in row.items():
            if not math.isnan(value):  # not measured
                scalar = summary.scalar(name, np.asarray(value))
                self._events.write_event(
                    Event(step=int(row["step"]), wall_time=time.time(), summary=scalar)
                )
        self._events.flush()
        faults = health.check(self.rows, dataclasses.asdict(self._c), self._resumed)
        for kind, line in faults.items():
            if kind not in self._unhealthy:  # it's printed when it first applies
                tqdm.write(f"health   step {row['step']:.0f}: {line}")
        self._unhealthy = faults
        shown = {name: f"{row[name]:.2f}" for name in ("reward", "correct", "format_ok", "kl")}
        self._progress.set_postfix(shown, refresh=False)
        self._progress.update()

    def close(self) -> None:
        """Closes the progress bar and TensorBoard's file."""
        self._progress.close()
        self._events.close()


class TrainingRun:
    """The folder of a run, from `run_folder.open_folder`, open for training; use it in a `with`
    statement.

    Attributes:
        first_step: the first step to do; those before it are in the newest checkpoint.
        beta: weight of the KL in the next step.
        carried: what the rollouts remember from step to step, by name: JSON, or a function that
            returns it. Each checkpoint keeps it.
        log: rows of train_log.csv.
    """

    def __init__(self, c: RunConstants, llm, task, folder, evaluate):
        self.c, self.llm, self.task, self.folder, self._evaluate = c, llm, task, folder, evaluate
        self.first_step = 0
        self.beta = c.BETA
        self.carried: dict[str, Any] = {}
        self._nonfinite = 0  # updates in a row
        # the steps that `save` could note now: none before the first one, and none once an update
        # has overwritten the weights
        self._saveable = 0

    def __enter__(self) -> "TrainingRun":
        logs = self.folder.logs
        with contextlib.ExitStack() as stack:
            stack.callback(self.folder.update_run_json)  # when the last checkpoint is whole
            self._manager = checkpoints.open_manager(self.folder.checkpoints, self.c.MAX_TO_KEEP)
            stack.callback(self._manager.close)
            self.first_step = self._manager.latest_step() or 0
            self._log = TrainingLog(logs, self.c, self.first_step)
            stack.callback(self._log.close)
            self.log = self._log.rows
            answers.drop_later_steps(logs / "answers.jsonl", self.first_step)
            self._evaluated = answers.drop_later_steps(logs / "evaluations.jsonl", self.first_step)
            self._stop = stack.enter_context(process.stop_after_step())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Saves the steps before one that a faulty reward, environment or METHOD has stopped."""
        try:
            if isinstance(error, UserError) and self._saveable:
                self.save(self._saveable)
        finally:
            self._stack.__exit__(kind, error, traceback)

    def restore(self, optimizer):
        """params and opt_state of the newest checkpoint, or else the initial ones."""
        self._params, self._opt_state = self.llm.params, self.llm.first_opt_state(optimizer)
        if self.first_step:
            self._params, self._opt_state, loop = checkpoints.restore(
                self._manager,
                self.first_step,
                self._params,
                self._opt_state,
                self.folder.run_id,
            )
            if "carried" not in loop:
                raise UserError(
                    f"RUN_DIR={self.folder.path}: an older version of this script saved its "
                    "checkpoints; start the run again in another folder"
                )
            self.beta, self.carried = loop["beta"], loop["carried"]
            self.llm.load(self._params)
        return self._params, self._opt_state

    def save(self, done: int) -> None:
        """Saves a checkpoint after `done` steps."""
        loop = {"beta": self.beta, "carried": self._carried_as_json()}
        # before the checkpoint: a log of more steps than it is cut, of fewer has a hole
        self.folder.update_run_json()
        checkpoints.save(
            self._manager,
            done,
            self._params,
            self._opt_state,
            loop,
            self.c,
            self.folder.run_id,
        )

    def _carried_as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of `carried`; UserError if JSON can't hold an entry."""
        found = {}
        for name, value in self.carried.items():
            found[name] = value() if callable(value) else value
            try:
                json.dumps({name: found[name]})
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"METHOD={self.c.METHOD}: a checkpoint can't keep run.carried[{name!r}] "
                    f"({error}); use text, numbers, lists, and dicts by text"
                ) from None
        return found

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 0. Ctrl-C (or SIGTERM) ends them after the current one, and
        saves a checkpoint.
        """
        process.check_profile_dir(self.c.PROFILE_DIR)
        self._held_out(self.first_step)
        for step in range(self.first_step, self.c.NUM_BATCHES):
            self._stop_if_asked(step)
            self._started, self._saveable = time.perf_counter(), step
            profiled = step - self.first_step + 1 == process.PROFILED_STEP
            with process.profiler(self.c.PROFILE_DIR if profiled else ""):
                yield step
        self._stop_if_asked(self.c.NUM_BATCHES)  # else the test questions come next

    def _stop_if_asked(self, done: int) -> None:
        """Saves a checkpoint of `done` steps and raises KeyboardInterrupt, on any host's Ctrl-C."""
        if not devices.all_agree(not self._stop.is_set()):
            self.save(done)
            raise KeyboardInterrupt

    def check_finite(self, step: int, metrics) -> None:
        """Raises UserError if too many updates in a row weren't finite; none was applied."""
        self._saveable = 0
        c = self.c
        figures = {"loss": float(metrics["loss"]), "gradient norm": float(metrics["grad_norm"])}
        # Both: if only the gradient isn't finite, every update would be skipped silently.
        bad = [
            f"{name} of step {step + 1} is {x}"
            for name, x in figures.items()
            if not math.isfinite(x)
        ]
        self._nonfinite = self._nonfinite + 1 if bad else 0
        if self._nonfinite > c.MAX_NONFINITE_UPDATES:
            raise UserError(
                f"the {bad[0]}; that update was not applied, and no checkpoint holds it. Lower "
                f"LEARNING_RATE={c.LEARNING_RATE} or MAX_GRAD_NORM={c.MAX_GRAD_NORM}, and start a "
                f"new run, or let some pass (MAX_NONFINITE_UPDATES={c.MAX_NONFINITE_UPDATES})"
            )

    def finish_step(self, step: int, samples, batch, params, opt_state, metrics) -> None:
        """Saves a step's results: a row of the log, its answers, held-out metrics, a checkpoint."""
        c, done, grader = self.c, step + 1, self.task.grader
        self._params, self._opt_state = params, opt_state
        if step == self.first_step:
            self._carried_as_json()  # refused now, not at the first checkpoint
        before_update = metrics.pop("log_prob_before_update")  # per token, for answers.jsonl
        row = {"step": done, "beta": self.beta, "temperature": self.llm.temperature}
        row |= {name: metrics.pop(name) for name in ("loss", "grad_norm")}
        row |= (
            mean_metrics(metrics) | getattr(self.llm.rollout, "metrics", {}) | process.memory_gib()
        )
        if not c.BETA:
            row["kl"] = math.nan  # not measured isn't zero
        row |= answer_metrics(
            grader, samples.sampled or samples, time.perf_counter() - self._started
        )
        every = c.LOG_ANSWERS_EVERY
        if every and (done in (1, c.NUM_BATCHES) or done % every == 0):
            path = self.folder.logs / "answers.jsonl"
            log_prob = before_update, self.llm.log_probs(batch)
            answers.append_step(path, c, self.llm.tokenizer, grader, samples, batch, row, log_prob)
        self._log.add(row | self._held_out(done))
        self.beta = adaptive_beta(self.beta, c.TARGET_KL, row["kl"])
        if done % c.SAVE_INTERVAL_STEPS == 0 or done == c.NUM_BATCHES:
            self.save(done)

    def _held_out(self, done: int) -> dict[str, float]:
        """Asks the held-out questions, if it's due: before the first step, after the last and every
        N-th.
        """
        every, rows = self.c.EVAL_EVERY, self.task.held_out
        due = every and rows and (done % every == 0 or done == self.c.NUM_BATCHES)
        if not devices.all_agree(bool(due and done not in self._evaluated)):
            return {}
        result = self._evaluate(self.c, self.llm, self.task, rows)
        with open(self.folder.logs / "evaluations.jsonl", "a", encoding="ascii") as file:
            file.write(answers.to_lines([{"step": done} | result]))
        self._evaluated.add(done)
        if devices.is_first():
            tqdm.write(f"held out step {done}: {in_words(result)}")
        return {column: result[name] for column, name in HELD_OUT.items()}
