"""A run while it trains: checkpoints, log, held-out questions, Ctrl-C, a full disk: everything but GRPO."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from grpo_variants import adaptive_beta
from model import devices
from model.log_probs import mean_metrics
from run import answers, checkpoints, evaluation, process, train_log
from settings import UserError


class TrainingRun:
    """The folder of a run, from `run_folder.open_run`, open for training; use it in a `with` statement.

    Attributes:
        start: steps that are done, by the newest checkpoint.
        beta: weight of the KL in the next step.
        carried: what the rollouts remember from step to step, by name: JSON, or a function that returns it.
        log: rows of train_log.csv.
    """

    def __init__(self, c, llm, task, folder, evaluate):
        self.c, self.llm, self.task, self.folder, self._evaluate = c, llm, task, folder, evaluate
        self.start, self.beta, self.carried, self._nonfinite = 0, c.BETA, {}, 0

    def __enter__(self) -> "TrainingRun":
        with contextlib.ExitStack() as stack:
            stack.enter_context(process.full_disk(self.folder.folder))
            stack.callback(self.folder.keep)  # when the last checkpoint is whole
            self._manager = checkpoints.open_manager(self.folder.checkpoints, self.c.MAX_TO_KEEP)
            stack.callback(self._manager.close)
            self.start = self._manager.latest_step() or 0
            self._log = train_log.TrainingLog(self.folder.logs, self.c, self.start)
            stack.callback(self._log.close)
            self.log = self._log.rows
            answers.keep_lines(self.folder.logs / "answers.jsonl", self.start)
            self._evaluated = answers.keep_lines(self.folder.logs / "evaluations.jsonl", self.start)
            self._stop = stack.enter_context(process.stop_after_step())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> bool | None:
        return self._stack.__exit__(*error)

    def restore(self, optimizer):
        """params and opt_state of the newest checkpoint, or else the initial ones."""
        self._params, self._opt_state = self.llm.params, self.llm.first_opt_state(optimizer)
        if self.start:
            self._params, self._opt_state, self.carried = checkpoints.restore(
                self._manager, self.start, self._params, self._opt_state
            )
            self.beta = self.carried.pop("beta")
            self.llm.load(self._params)
        return self._params, self._opt_state

    def save(self, done: int) -> None:
        """Saves a checkpoint after `done` steps."""
        carried = {name: value() if callable(value) else value for name, value in self.carried.items()}
        carried["beta"] = self.beta
        self.folder.keep()  # before the checkpoint: a log of more steps than it is cut, of fewer has a hole
        checkpoints.save(self._manager, done, self._params, self._opt_state, carried, self.c)

    def steps(self, rollouts: Iterable[Any]) -> Iterator[Any]:
        """Yields the rollouts, one per step. Ctrl-C (or SIGTERM) ends them after the current step.

        Either saves a checkpoint first, and so does a UserError from a faulty reward or environment.
        """
        self._held_out(self.start)
        rollouts = iter(rollouts)
        for step in process.traced(range(self.start, self.c.NUM_BATCHES), self.c.PROFILE_DIR):
            if not devices.all_agree(not self._stop.is_set()):
                self.save(step)
                raise KeyboardInterrupt
            self._started = time.perf_counter()
            try:
                samples = next(rollouts)
            except UserError:
                if step:
                    self.save(step)
                raise
            yield samples

    def check_finite(self, step: int, metrics) -> None:
        """Raises UserError if too many updates in a row weren't finite; none of them were applied."""
        c, figures = self.c, {"loss": float(metrics["loss"]), "gradient norm": float(metrics["grad_norm"])}
        # Both: if only the gradient isn't finite, every update would be skipped silently.
        bad = [f"{name} of step {step + 1} is {x}" for name, x in figures.items() if not math.isfinite(x)]
        self._nonfinite = self._nonfinite + 1 if bad else 0
        if self._nonfinite > c.MAX_NONFINITE_UPDATES:
            raise UserError(
                f"the {bad[0]}; that update was not applied, and no checkpoint holds it. Lower "
                f"LEARNING_RATE={c.LEARNING_RATE} or MAX_GRAD_NORM={c.MAX_GRAD_NORM}, and start a new run, "
                f"or let some pass (MAX_NONFINITE_UPDATES={c.MAX_NONFINITE_UPDATES})"
            )

    def after(self, step: int, samples, batch, params, opt_state, metrics) -> None:
        """Saves a step's results: a row of the log, its answers, held-out metrics, a checkpoint."""
        c, done = self.c, step + 1
        self._params, self._opt_state = params, opt_state
        old_log_prob = metrics.pop("old_log_prob")
        row = {"step": done, "beta": self.beta, "temperature": self.llm.temperature}
        row |= {name: metrics.pop(name) for name in ("loss", "grad_norm")}
        row |= mean_metrics(metrics) | getattr(self.llm.rollout, "metrics", {}) | process.memory_gib()
        if not c.BETA:
            row["kl"] = math.nan  # not measured isn't zero
        seconds = time.perf_counter() - self._started
        row |= train_log.answer_metrics(self.task.grader, samples.sampled or samples, seconds)
        if answers.keeps(c, done):
            path, tokenizer = self.folder.logs / "answers.jsonl", self.llm.cluster.tokenizer
            log_prob = old_log_prob, self.llm.log_probs(batch)
            answers.append_step(path, c, tokenizer, self.task.grader, samples, batch, row, log_prob)
        self._log.add(row | self._held_out(done))
        self.beta = adaptive_beta(self.beta, c.TARGET_KL, row["kl"])
        if done % c.SAVE_INTERVAL_STEPS == 0 or done == c.NUM_BATCHES:
            self.save(done)

    def _held_out(self, done: int) -> dict[str, float]:
        """Asks the held-out questions, if it's due: before the first step, after the last and every N-th."""
        every, rows = self.c.EVAL_EVERY, self.task.held_out
        due = every and rows and (done % every == 0 or done == self.c.NUM_BATCHES)
        if not devices.all_agree(bool(due and done not in self._evaluated)):
            return {}
        result = self._evaluate(self.c, self.llm, self.task, rows)
        answers.append_lines(self.folder.logs / "evaluations.jsonl", [{"step": done} | result])
        self._evaluated.add(done)
        if devices.is_first():
            tqdm.write(f"held out step {done}: {evaluation.in_words(result)}")
        return {column: result[name] for column, name in evaluation.HELD_OUT.items()}
