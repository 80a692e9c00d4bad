"""What a run leaves on disk while it goes on: its folder, its constants, the log, TensorBoard, a trace.

RUN_DIR/constants.json    what the run was started with, MODEL with the hub's commit; a resume is compared
RUN_DIR/run.json          its number, and the checksum of its questions
RUN_DIR/train_log.csv     one row per step, written at once
RUN_DIR/tensorboard/      the same figures, and Tunix's own
RUN_DIR/evaluations.jsonl the evaluations during training, one per line
RUN_DIR/answers.jsonl     every answer of some steps (answers.py)
RUN_DIR/before.json       the evaluation before training; after.json the one after it
RUN_DIR/checkpoints/      Orbax's, written by Tunix
"""

import contextlib
import csv
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tqdm import tqdm

from parts import answers, checkpoints, devices, settings
from parts.questions import GRADED_COLUMNS
from parts.run_files import read_constants, read_log, read_object
from parts.settings import UserError
from parts.tunix_api import TrainingHooks

FREE_TO_CHANGE = {"RUN_DIR", "DRY_RUN", "PROFILE_DIR"}  # when a run is resumed
PROFILE_STEPS = range(3, 5)  # steps that PROFILE_DIR traces; the first two compile
RENAMED_VALUES = {  # LOSS_AGG_MODE of older runs
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "sequence-mean-token-sum-norm": "seq-mean-token-sum",
    "sequence-mean-token-scale": "seq-mean-token-sum-norm",
}
HELD_OUT = {  # columns of train_log.csv: figures of `evaluate_both`, on rows where a step ends with one
    "held_out_correct": "answer_accuracy", "held_out_correct_lenient": "lenient_accuracy",
    "held_out_format_ok": "format_accuracy", "held_out_greedy_correct": "greedy_answer_accuracy",
    "held_out_greedy_correct_lenient": "greedy_lenient_accuracy",
}  # fmt: skip
FLUSH_SECONDS = 10  # between two writes of TensorBoard's file
COMPILED = settings.HERE.parent / "runs" / "compiled"  # programs kept from run to run; safe to delete
COMPILED_BYTES = 2**30  # beyond it the programs used longest ago are deleted


# %% Run folder ---------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Run:
    """The folders of a run.

    Attributes:
        folder: RUN_DIR, or one named after the time.
        logs: where this process writes: `folder`; on the second, third, ... host a folder of its own in it.
        checkpoints: folder or gs:// address.
    """

    folder: Path
    logs: Path
    checkpoints: str

    def same_questions(self, data: Mapping[str, tuple[Sequence[Mapping[str, str]], str]]) -> None:
        """Checks by their SHA-256 that the questions are those the run was started with.

        Args:
            data: as `read_data` gives it; names and places of the files may change.

        Raises:
            UserError: they are others.
        """
        asked = {
            split: [[row[name] for name in GRADED_COLUMNS] for row in rows]
            for split, (rows, _) in data.items()
        }
        found = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        path = self.logs / "run.json"
        mine = read_object(path) or {}
        if mine.setdefault("questions_sha256", found) != found:
            raise UserError(
                f"RUN_DIR={self.folder}: its run was started with other questions than DATASET and "
                "TEST_DATASET have now; put the files back, or choose another RUN_DIR"
            )
        settings.write_whole(path, json.dumps(mine) + "\n")

    def once(self, name: str, ask: Callable[[], dict[str, Any]], trained: int = 0) -> dict[str, Any]:
        """The evaluation that `ask()` makes, kept in `name`.json: a resumed run does not ask again.

        Args:
            name: "before" or "after".
            ask: asks the test questions.
            trained: steps that are done, of a run that is to be asked before the first.

        Raises:
            UserError: what was asked before training is lost, and the model has been trained since.
        """
        path = self.logs / f"{name}.json"
        kept = read_object(path)
        if devices.all_agree(kept is not None):
            return kept
        if trained:
            raise UserError(
                f"RUN_DIR={self.folder}: {path.name} is lost or damaged, and after {trained} steps the model "
                "can no longer be asked as it was before training; put the file back, or start another run "
                "(inference.py and convert_checkpoint.py take this one's checkpoints as they are)"
            )
        result = ask()
        print(f"{name} training: {in_words(result)}")
        settings.write_whole(path, json.dumps(result) + "\n")
        return result


@contextlib.contextmanager
def open_run(c) -> Iterator[Run]:
    """Makes the folder of a run, or checks that the run in it was started with the same constants.

    Raises:
        UserError: other constants; a folder that cannot be written, that another process is using, or whose
            constants.json is damaged; another run's checkpoints.
        Stopped: Ctrl-C in the block.
    """
    started = time.localtime(devices.start_time())
    folder = Path(c.RUN_DIR or time.strftime("runs/grpo_llama3_1_8b_demo/%Y-%m-%d_%H-%M-%S", started))
    logs = folder if devices.is_first() else folder / f"host_{jax.process_index()}"
    root = checkpoints.root_of(c.CHECKPOINT_DIR, folder)
    with contextlib.ExitStack() as stack:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(logs, folder))
            new = not (logs / "constants.json").exists()
            mine = {"run_id": secrets.token_hex(8)} if new else read_run_file(logs, root)
            if devices.is_first():
                checkpoints.claim(root, mine.get("run_id", ""), folder, c.CHECKPOINT_DIR)
            if new:
                kept = {k: v for k, v in dataclasses.asdict(c).items() if k not in FREE_TO_CHANGE}
                settings.write_whole(logs / "run.json", json.dumps(mine) + "\n")
                settings.write_whole(logs / "constants.json", json.dumps(kept, indent=1) + "\n")
            (logs / "too_long.csv").unlink(missing_ok=True)  # each start writes it anew
        except OSError as error:
            raise UserError(f"RUN_DIR={folder}: {error.strerror}; choose another folder") from None
        check_same_constants(c, read_constants(logs), folder)
        try:
            yield Run(folder, logs, root)
        except KeyboardInterrupt:
            raise settings.Stopped(folder) from None


def read_run_file(logs: Path, root: str) -> dict[str, str]:
    """What run.json says: `run_id`, and `questions_sha256`; nothing of a run that is older than the file.

    Raises:
        UserError: it is damaged.
    """
    path = logs / "run.json"
    found = read_object(path)
    if found is None and path.exists():
        raise UserError(f"RUN_DIR={logs}: its run.json is damaged; copy {root}/run.json over it")
    return found or {}


@contextlib.contextmanager
def locked(logs: Path, folder: Path) -> Iterator[None]:
    """Keeps other processes out of a run's folder while the block runs; the kernel forgets it with a kill.

    Raises:
        UserError: another process has it.
    """
    lock = os.open(logs, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            f"RUN_DIR={folder}: another process is running in it; wait for its end, or choose another folder"
        ) from None
    try:
        yield
    finally:
        os.close(lock)


def check_same_constants(c, saved: Mapping[str, Any], folder: Path) -> None:
    """Refuses to go on with a run that was started with other constants.

    A constant that the run does not know is newer than the run: its default held then.

    Raises:
        UserError: names the constant and both values.
    """
    old = settings.defaults(type(c), "laptop" if settings.is_small(c.MODEL) else "tpu") | dict(saved)
    old["LOSS_AGG_MODE"] = RENAMED_VALUES.get(old["LOSS_AGG_MODE"], old["LOSS_AGG_MODE"])
    if old.get("NUM_EPOCHS", 1) != 1:  # it multiplied NUM_BATCHES: the run would end early, and say nothing
        raise UserError(
            f"RUN_DIR={folder}: its run was started with NUM_EPOCHS={old['NUM_EPOCHS']}, which is gone; "
            f"start another with NUM_BATCHES={old['NUM_EPOCHS'] * old['NUM_BATCHES']}"
        )
    if ("@" in old["MODEL"]) != ("@" in c.MODEL):  # a run older than these commits, or a dry run without them
        old["MODEL"] = old["MODEL"].partition("@")[0]
        c = dataclasses.replace(c, MODEL=c.MODEL.partition("@")[0])
    for name, value in dataclasses.asdict(c).items():
        if name not in FREE_TO_CHANGE and old[name] != value:
            raise UserError(
                f"{name}={value}: the run in RUN_DIR={folder} was started with {old[name]}; use that, or "
                "another RUN_DIR"
            )


def seconds_before(log: Sequence[Mapping[str, float]], first_step: int) -> float:
    """How long the steps took that earlier processes of a run have done."""
    return sum(row.get("seconds", 0.0) for row in log if row["step"] <= first_step)


def log_too_long(
    too_long: Sequence[tuple[str, int, int]], source: str, total: int, limit: int, path: Path
) -> None:
    """Says which questions are left out because they are too long, and keeps all of them in a CSV file.

    Args:
        too_long: (file, row, tokens) of each.
        source: where the questions come from.
        total: how many there are.
        limit: MAX_PROMPT_LENGTH, in tokens.
        path: of the CSV file.
    """
    if not too_long:
        return
    several = "," in source
    named = ", ".join(f"{f'{file}, ' * several}row {line} ({n} tokens)" for file, line, n in too_long[:3])
    print(
        f"{source}: {len(too_long):,} of {total:,} questions are longer than MAX_PROMPT_LENGTH={limit} and "
        f"left out: {named}" + (f", ... (all in {path})" if len(too_long) > 3 else "")
    )
    with open(path, "a", newline="") as file:
        csv.writer(file).writerows(too_long)


def keep_compiled() -> None:
    """Keeps compiled programs from run to run: an unchanged setting is not compiled again.

    They are kept in COMPILED, or where the environment variable JAX_COMPILATION_CACHE_DIR says.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


# %% Ending early -------------------------------------------------------------------------------------------
@contextlib.contextmanager
def stop_after_step() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C (or SIGTERM) sets; the second one interrupts at once."""
    stop = threading.Event()

    def on_signal(number, frame):
        stop.set()
        tqdm.write("stopping after this step, then saving (once more: stop at once, unsaved)")
        signal.signal(number, signal.default_int_handler)

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def full_disk(folder: Path, trainer) -> Iterator[None]:
    """Lets a checkpoint that is being saved finish when the block fails, and says so if the disk is full.

    Raises:
        UserError: no space was left.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # on a full disk the save under way fails as well
            trainer.checkpoint_manager.close()
        if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise UserError(
                f"RUN_DIR={folder}: the disk is full; earlier checkpoints are whole. Free some space and run "
                "the same command again"
            ) from error
        raise


# %% Training log -------------------------------------------------------------------------------------------
def group_metrics(grader, num_generations: int, prompts, completions, advantages, rewards, **columns):
    """What to watch besides the loss, in the form of Tunix's metric functions.

    `zero_variance`: share of groups whose G rewards are all equal. They have no better and no worse answer,
    hence advantage 0 and no gradient: their generation was paid for nothing. `distinct`: different answers in
    a group, 1 to G; it tells whether such answers were all alike.
    """
    groups = np.asarray(rewards).reshape(-1, num_generations)  # [B, G]
    distinct = [len(set(group)) for group in np.reshape(completions, groups.shape)]
    return {
        "groups/zero_variance": (np.mean(np.ptp(groups, axis=1) == 0), np.mean),
        "groups/reward_std": (np.mean(groups.std(axis=1, ddof=1)), np.mean),  # G - 1, as the advantage
        "groups/distinct": (np.mean(distinct), np.mean),
        "answers/correct": (np.mean(grader.score(completions, **columns) >= 1), np.mean),
        "answers/correct_lenient": (np.mean(grader.right_lenient(completions, **columns)), np.mean),
        "answers/format_ok": (np.mean([grader.format_right(text) for text in completions]), np.mean),
    }


def say_what_is_lost(path: Path, c, lost: int) -> None:
    """Says how many rows of a resumed run's log are gone, or refuses where the run depends on them.

    A SIGKILL can cost the last row. More are lost when the file was deleted or damaged.

    Raises:
        UserError: TARGET_KL steers the weight of the KL by these rows.
    """
    if lost > 1 and c.TARGET_KL:
        raise UserError(
            f"TARGET_KL={c.TARGET_KL}: {path} has lost {lost:,} rows, and the weight of the KL follows from "
            "them; put the file back, or start another run"
        )
    if lost > 1:
        print(f"{path} has lost the rows of {lost:,} steps; the run goes on, its curves lack them")


class TrainingLog(TrainingHooks):
    """Progress bar, one CSV row per step, health lines, and the guard against a loss that is not a number.

    Args:
        path: of the CSV file. Rows of steps after `first_step`, which a kill has undone, are dropped.
        c: the constants of the run.
        first_step: steps already done.
        reward_names: of the reward functions, for their columns.
        check: health lines of the rows so far, by kind.

    Each row is written at once. SIGKILL can cost the row of the last step (it is written a step later).
    """

    # Then, in the order in which they turn up: `reward_<function>`, `memory_...`.
    COLUMNS = (
        "step", "reward", "reward_std", "correct", "format_ok", "zero_variance", "length", "kl", "entropy",
        "clip_fraction", "loss", "grad_norm", "seconds", "distinct", "cut_off", "tokens_per_second", "beta",
        "temperature", "correct_lenient", *HELD_OUT, "mismatch", "mismatch_max", "answers",
    )  # fmt: skip

    def __init__(
        self,
        path: Path,
        c,
        first_step: int,
        reward_names: Sequence[str],
        check: Callable[[Sequence[Mapping[str, float]], Mapping[str, Any]], dict[str, str]],
    ):
        self.rows = {int(row["step"]): row for row in read_log(path) if row["step"] <= first_step}
        say_what_is_lost(path, c, first_step - len(self.rows))
        self._c = c
        self._check, self._constants = check, dataclasses.asdict(c)
        self._reward_names = reward_names
        self._path, self._file, self._columns = path, None, list(self.COLUMNS)
        self._rewrite()
        self._unhealthy: dict[str, str] = {}
        self._started = time.perf_counter()
        self._progress = tqdm(
            total=c.NUM_BATCHES,
            initial=first_step,
            desc="GRPO",
            unit="step",
            disable=not devices.is_first(),
        )
        self._nonfinite = 0  # updates in a row

    def _rewrite(self) -> None:
        """The whole file anew, with a column for everything that has been logged so far."""
        if self._file:
            self._file.close()
        rows = self.finished_rows()
        self._columns = list(dict.fromkeys(itertools.chain(self._columns, *rows)))
        partial = self._path.with_suffix(".partial")
        self._file = open(partial, "w", newline="", buffering=1)  # noqa: SIM115  (closed by `close`)
        self._writer = csv.DictWriter(self._file, self._columns, restval="nan")
        self._writer.writeheader()
        self._writer.writerows(rows)
        partial.rename(self._path)  # the open file goes with it

    def finished_rows(self) -> list[dict[str, float]]:
        """Rows of the steps whose update is done, in their order."""
        return [self.rows[step] for step in sorted(self.rows) if "step" in self.rows[step]]

    def on_rollout_metrics(self, buffer) -> None:
        """Takes what Tunix logged about a step's answers; it reports `global_steps` from 0."""
        mean = {name: float(np.mean(values)) for name, (values, op) in buffer.metrics.items() if op}
        if "rewards/score/mean" not in mean:
            return  # Tunix's last buffer, after the last step, holds no answers
        now = time.perf_counter()
        answers = np.size(buffer.metrics["rewards/sum"][0])
        self.rows.setdefault(buffer.global_steps + 1, {}).update(
            reward=mean["rewards/score/mean"],
            reward_std=mean["groups/reward_std"],
            correct=mean["answers/correct"],
            format_ok=mean["answers/format_ok"],
            zero_variance=mean["groups/zero_variance"],
            length=mean["completions/mean_length"],
            seconds=now - self._started,
            distinct=mean["groups/distinct"],
            cut_off=mean["completions/cut_off"],
            tokens_per_second=answers * mean["completions/mean_length"] / (now - self._started),
            beta=mean["schedule/beta"],
            temperature=mean["schedule/temperature"],
            correct_lenient=mean["answers/correct_lenient"],
            answers=answers,
            **{f"reward_{name}": mean[f"rewards/{name}"] for name in self._reward_names},
            **memory_gib(),
        )
        self._started = now

    def on_train_step_end(self, trainer, train_step: int, train_loss: float) -> None:
        """Called once for each optimizer update, one update late (Tunix overlaps logging with work).

        Raises:
            UserError: more than MAX_NONFINITE_UPDATES updates in a row were not finite.
        """

        def last(name):
            return float(trainer.metrics_logger.get_metric_history("actor", name, "train")[-1])

        c = self._c
        # Both: a loss can be finite while its gradient is not, and every update is skipped in silence.
        figures = {"loss": float(train_loss), "gradient norm": last("grad_norm")}
        bad = {name: value for name, value in figures.items() if not np.isfinite(value)}
        self._nonfinite = self._nonfinite + 1 if bad else 0
        if self._nonfinite > c.MAX_NONFINITE_UPDATES:
            name, value = next(iter(bad.items()))
            raise UserError(
                f"the {name} of update {train_step} is {value}; that update was not applied, and no "
                f"checkpoint holds it. Lower LEARNING_RATE={c.LEARNING_RATE} or "
                f"MAX_GRAD_NORM={c.MAX_GRAD_NORM}, and start a new run, or let some pass "
                f"(MAX_NONFINITE_UPDATES={c.MAX_NONFINITE_UPDATES})"
            )
        if train_step % c.NUM_ITERATIONS:
            return
        step = train_step // c.NUM_ITERATIONS

        row = self.rows.setdefault(step, {})
        row.update(
            step=step, loss=float(train_loss), kl=last("kl"), entropy=last("entropy"),
            clip_fraction=last("pg_clipfrac"), grad_norm=last("grad_norm"),
            mismatch=last("mismatch"), mismatch_max=last("mismatch/max"),
        )  # fmt: skip
        if row.keys() <= set(self._columns):
            self._writer.writerow(row)
        else:
            self._rewrite()
        for name, value in row.items():  # Tunix gives TensorBoard the others
            if name.startswith(("seconds", "tokens", "memory", "answers")):
                trainer.metrics_logger.log("system", name, value, "train", step)
        self._say_what_is_wrong()
        shown = {k: f"{row[k]:.2f}" for k in ("reward", "correct", "format_ok", "kl") if k in row}
        self._progress.set_postfix(shown, refresh=False)
        self._progress.update()

    def held_out(self, step: int, result: Mapping[str, float]) -> None:
        """Takes the evaluation after a step, into its row and into TensorBoard."""
        figures = {column: result[name] for column, name in HELD_OUT.items()}
        for column, value in figures.items():
            jax.monitoring.record_scalar(f"held_out/{column.removeprefix('held_out_')}", value, step=step)
        self.rows.setdefault(step, {}).update(figures)
        if "step" in self.rows[step]:  # the row is in the file already
            self._rewrite()

    def _say_what_is_wrong(self) -> None:
        """Prints each health line when it begins to hold."""
        rows = self.finished_rows()
        found = self._check(rows, self._constants)
        for kind in found.keys() - self._unhealthy.keys():
            tqdm.write(f"health   step {rows[-1]['step']:.0f}: {found[kind]}")
        self._unhealthy = found

    def close(self) -> list[dict[str, float]]:
        """Closes the file and the progress bar; returns the rows."""
        self._progress.close()
        self._file.close()
        return self.finished_rows()

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...


# %% Evaluations during training ----------------------------------------------------------------------------
class Evaluations:
    """Writes evaluations.jsonl: {"step": steps done} and what `evaluate_both` of the main script found.

    Args:
        path: of the file. Lines of steps after `first_step`, which a kill has undone, are dropped.
        c: the constants of the run.
        first_step: steps already done.
        log: takes the figures, too.
    """

    def __init__(self, path: Path, c, first_step: int, log: TrainingLog):
        self._path, self._c, self._log = path, c, log
        self._steps = answers.keep_lines(path, first_step)

    def due(self, done: int) -> bool:
        """Whether to evaluate after so many steps: before the first, after the last, after every N-th."""
        c = self._c
        wanted = c.EVAL_EVERY and (done % c.EVAL_EVERY == 0 or done == c.NUM_BATCHES)
        return devices.all_agree(bool(wanted and done not in self._steps))

    def add(self, done: int, result: dict[str, Any]) -> None:
        """Writes the evaluation after so many steps."""
        answers.append_lines(self._path, [{"step": done} | result])
        self._steps.add(done)
        self._log.held_out(done, result)
        if devices.is_first():
            tqdm.write(f"held out step {done}: {in_words(result)}")


def in_words(result: Mapping[str, float]) -> str:
    """The shares of an evaluation that are of interest while a run goes on."""
    names = {"answers right": "answer_accuracy", "by the last number": "lenient_accuracy",
             "format right": "format_accuracy", "greedy right": "greedy_answer_accuracy"}  # fmt: skip
    return ", ".join(f"{words} {result[name]:.1%}" for words, name in names.items())


# %% TensorBoard, memory, trace -----------------------------------------------------------------------------
@contextlib.contextmanager
def tensorboard_log(folder: Path) -> Iterator[None]:
    """Writes every scalar that Tunix reports to `folder`, while the block runs.

    Not with Tunix's own writer: that is a thread, which a full disk ends without a word. A dozen scalars
    later the training waits for it for ever. Here the disk's error reaches the thread that trains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    events = EventsWriter(str(folder / "events"))
    flushed = time.monotonic()

    def write(name: str, value: float, step: int | None = None, **columns) -> None:
        nonlocal flushed
        if step is None:
            return  # jax reports figures of its own
        scalar = summary.scalar(name, np.asarray(value))
        events.write_event(Event(step=int(step), wall_time=time.time(), summary=scalar))
        if time.monotonic() > flushed + FLUSH_SECONDS:
            events.flush()
            flushed = time.monotonic()

    jax.monitoring.register_scalar_listener(write)
    try:
        yield
    finally:
        jax.monitoring.unregister_scalar_listener(write)
        events.close()


def memory_gib() -> dict[str, float]:
    """GiB in use now, by column of train_log.csv: this process on the host, and each of its devices.

    On a device: what the runtime has given out, and its largest value so far (TPU, GPU). A CPU's runtime
    keeps no such count: there it is the arrays that are alive, without the temporaries inside a program.
    """
    used = {"memory_host_gib": psutil.Process().memory_info().rss / 2**30}
    alive = dict.fromkeys(jax.local_devices(), 0)
    if next(iter(alive)).memory_stats() is None:
        for array in jax.live_arrays():
            if not array.is_deleted():
                piece = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
                for device in array.sharding.addressable_devices:
                    alive[device] += piece
    for device in alive:
        stats = device.memory_stats() or {"bytes_in_use": alive[device]}
        used[f"memory_device_{device.id}_gib"] = stats["bytes_in_use"] / 2**30
        if "peak_bytes_in_use" in stats:
            used[f"memory_device_{device.id}_peak_gib"] = stats["peak_bytes_in_use"] / 2**30
    return used


def traced(
    batches: Iterable[Any], first_step: int, steps: range, folder: str, finish: Callable[[], Any]
) -> Iterator[Any]:
    """Yields `batches`, with jax's profiler on while the chosen steps run: sampling, rewards and update.

    A step begins when its batch is asked for, and has ended when the next one is.

    Args:
        batches: one for each training step.
        first_step: of them, counted from 1.
        steps: consecutive steps to trace; on a resume those that are left.
        folder: where TensorBoard looks for the trace (empty = no trace).
        finish: waits until the devices have done all they were given.
    """
    if not folder:
        yield from batches
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each Python call would make the file a hundred times as large
    tracing = False
    try:
        for step, batch in enumerate(batches, start=first_step):
            if tracing and step not in steps:
                finish()
                jax.profiler.stop_trace()
                tracing = False
            elif step in steps and not tracing:
                jax.profiler.start_trace(folder, profiler_options=options)
                tracing = True
            yield batch
    finally:
        if tracing:
            finish()
            jax.profiler.stop_trace()
