"""The folder of a run: its constants, its lock, what was asked before and after training.

RUN_DIR/constants.json    what the run was started with, MODEL with the hub's commit; a resume is compared
RUN_DIR/run.json          its number, its command, and the checksum of its questions
RUN_DIR/train_log.csv     one row per step, written at once (train_log.py)
RUN_DIR/tensorboard/      the same figures
RUN_DIR/evaluations.jsonl the evaluations during training, one per line
RUN_DIR/answers.jsonl     every answer of some steps (answers.py)
RUN_DIR/before.json       the evaluation before training; after.json the one after it
RUN_DIR/checkpoints/      Orbax's (checkpoints.py)
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import settings
from model import devices
from run import checkpoints
from run.run_files import read_constants, read_object
from run.train_log import in_words
from settings import UserError
from task.questions import GRADED_COLUMNS

FREE_TO_CHANGE = {"RUN_DIR", "DRY_RUN", "PROFILE_DIR"}  # when a run is resumed


@dataclasses.dataclass(frozen=True)
class Run:
    """The folders of a run.

    Attributes:
        folder: RUN_DIR, or one named after the time.
        logs: where this process writes: `folder`; on the second, third, ... host a folder of its own in it.
        checkpoints: folder or gs:// address.
        done: steps by an earlier process.
    """

    folder: Path
    logs: Path
    checkpoints: str
    done: int = 0

    def same_questions(self, data: Mapping[str, tuple[Sequence[Mapping[str, str]], str]]) -> None:
        """Checks by their SHA-256 that the questions are those the run was started with.

        Args:
            data: from `read_data`; the names and places of the files may change.

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
        """The evaluation "before" or "after" training: `ask()`, kept in `name`.json for a resumed run.

        Raises:
            UserError: what was asked before training is lost, and the model has been `trained` since.
        """
        path = self.logs / f"{name}.json"
        kept = read_object(path)
        if devices.all_agree(kept is not None):
            return kept
        if trained:
            raise UserError(
                f"RUN_DIR={self.folder}: {path.name} is lost or damaged, and after {trained} steps the model "
                "can no longer be asked as it was before training; put the file back, or start another run "
                "(inference.py and the tool convert_checkpoint take this one's checkpoints as they are)"
            )
        result = ask()
        print(f"{name} training: {in_words(result)}")
        settings.write_whole(path, json.dumps(result) + "\n")
        return result


@contextlib.contextmanager
def open_run(c, arguments: Sequence[str] = ()) -> Iterator[Run]:
    """Makes the folder of a run, or checks that the run in it was started with the same constants.

    Args:
        c: the constants of the run.
        arguments: those of the command line; kept for the report.

    Raises:
        UserError: other constants; a folder that can't be written, that another process is using, or whose
            constants.json is damaged; another run's checkpoints.
        Stopped: Ctrl-C in the block.
    """
    folder = Path(c.RUN_DIR) if c.RUN_DIR else new_folder("grpo_llama3_1_8b_demo")
    logs = folder if devices.is_first() else folder / f"host_{jax.process_index()}"
    root = checkpoints.root_of(c.CHECKPOINT_DIR, folder)
    mine = {name: value for name, value in dataclasses.asdict(c).items() if name not in FREE_TO_CHANGE}
    with contextlib.ExitStack() as stack:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(logs, folder))
            new = not (logs / "constants.json").exists()
            command = shlex.join(["python", "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py", *arguments])
            run = {"run_id": secrets.token_hex(8), "command": command}
            if not new and "run_id" not in (run := read_object(logs / "run.json") or {}):
                raise UserError(
                    f"RUN_DIR={logs}: its run.json is lost or damaged; copy {root}/run.json over it"
                )
            if devices.is_first():
                checkpoints.claim(root, run["run_id"], folder, c.CHECKPOINT_DIR)
            if new:
                settings.write_whole(logs / "run.json", json.dumps(run) + "\n")
                settings.write_whole(logs / "constants.json", json.dumps(mine, indent=1) + "\n")
            (logs / "too_long.csv").unlink(missing_ok=True)  # each start writes it anew
        except OSError as error:
            raise UserError(f"RUN_DIR={folder}: {error.strerror}; choose another folder") from None
        saved = read_constants(logs)
        check_same_constants(c, saved, folder)
        if (steps := saved["NUM_BATCHES"]) < c.NUM_BATCHES:
            # It isn't the run that it would have been with so many steps from the start: its first steps
            # followed the shorter schedule. The optimizer has counted its updates and goes on from there.
            print(
                f"NUM_BATCHES raised from {steps} to {c.NUM_BATCHES}: from the next step on, the learning "
                f"rate (and TEMPERATURE_END) follows the schedule of {c.NUM_BATCHES} steps; at the old end "
                "it had fallen to 0"
            )
            for name in ("after.json", "result.json"):
                (logs / name).unlink(missing_ok=True)
            longer = saved | {"NUM_BATCHES": c.NUM_BATCHES}
            settings.write_whole(logs / "constants.json", json.dumps(longer, indent=1) + "\n")
        try:
            yield Run(folder, logs, root)
        except KeyboardInterrupt:
            raise settings.Stopped(folder) from None


def new_folder(script: str) -> Path:
    """Makes a folder named after the time that no other run has: two may start in the same second."""
    started = time.localtime(devices.of_first(int(time.time())))
    name = time.strftime(f"runs/{script}/%Y-%m-%d_%H-%M-%S", started)
    count = 1
    while devices.is_first():
        with contextlib.suppress(FileExistsError):
            Path(f"{name}_{count}" if count > 1 else name).mkdir(parents=True)
            break
        count += 1
    count = devices.of_first(count)
    return Path(f"{name}_{count}" if count > 1 else name)


@contextlib.contextmanager
def locked(logs: Path, folder: Path) -> Iterator[None]:
    """Keeps other processes out of `logs` while the block runs; the kernel drops the lock of a killed one.

    Raises:
        UserError: another process has it; the message names RUN_DIR, `folder`.
    """
    with contextlib.ExitStack() as stack:
        lock = os.open(logs, os.O_RDONLY)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"RUN_DIR={folder}: another process is running in it; wait for its end, or choose another "
                "folder"
            ) from None
        yield


def check_same_constants(c, saved: Mapping[str, Any], folder: Path) -> None:
    """Refuses to resume with other constants than the run was `saved` with; NUM_BATCHES may be larger.

    Raises:
        UserError: names the constant and both values, or what another version of the script had.
    """
    mine = {name: value for name, value in dataclasses.asdict(c).items() if name not in FREE_TO_CHANGE}
    if odd := sorted(mine.keys() ^ saved.keys()):
        raise UserError(
            f"RUN_DIR={folder}: its run was started by another version of this script (it differs in "
            f"{', '.join(odd[:3])}); start another run"
        )
    for name, value in mine.items():
        old = saved[name]
        if name == "MODEL" and ("@" in old) != ("@" in value):  # a dry run doesn't know the hub's commit
            old, value = old.partition("@")[0], value.partition("@")[0]
        if old != value and not (name == "NUM_BATCHES" and value > old):
            raise UserError(
                f"{name}={value}: the run in RUN_DIR={folder} was started with {old}; use that, or "
                "another RUN_DIR"
            )
