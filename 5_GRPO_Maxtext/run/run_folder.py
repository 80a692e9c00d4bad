"""The folder of a run: its constants, its lock, the evaluations before and after training.

constants.json has the constants, MODEL with the hub's commit; a resumed run must match them.
run.json has the run's number, command and identity (below), its newest checkpoint and when that was
noted, the checkpoints it keeps, its parts (each start's command, and the steps done before it),
which sets share questions, and the names of METHOD's functions. before.json and after.json are the
evaluations. With CHECKPOINT_DIR the files are also copied there before each checkpoint, so a run
survives the loss of its machine.
"""

import ast
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from etils import epath

import reward_func
import settings
from constants import RunConstants
from model import devices, llama
from model.versions import first_line
from run import checkpoints, process
from run.evaluation import in_words
from run.run_files import GRADERS, read_constants, read_object
from settings import UserError, find_path
from task import code_grading, grading, task_rewards
from task.questions import GRADED
from task.run_grader import course_rewards

HUB = "commit "  # begins the identity of a model from the hub
FREE_TO_CHANGE = {"RUN_DIR", "DRY_RUN", "PROFILE_DIR"}  # when a run is resumed


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folders of a run."""

    path: Path  # RUN_DIR, or one named after the time
    logs: Path  # where this process writes: `path`, or a subfolder on all hosts but the first
    checkpoints: str  # folder or gs:// address
    done: int = 0  # steps by an earlier process

    def keep(self, **more: Any) -> None:
        """Notes `more` and the newest checkpoint; copies what resume and report need to
        CHECKPOINT_DIR.
        """
        steps, note = checkpoints.saved(self.checkpoints), read_object(self.logs / "run.json") or {}
        if steps and steps[-1] != note.get("saved"):
            note |= {"saved": steps[-1], "saved_at": time.time()}
        note |= {"RUN_DIR": str(self.path), "kept": steps} | more
        settings.write_whole(self.logs / "run.json", json.dumps(note) + "\n")
        if self.checkpoints != checkpoints.root_of_run("", self.path):
            checkpoints.copy_files(self.logs, self.copy, again=True)

    @property
    def run_id(self) -> str:
        """Its number, also in each of its checkpoints; "" on hosts other than the first."""
        note = read_object(self.logs / "run.json") or {}
        return note.get("run_id", "") if devices.is_first() else ""

    @property
    def copy(self) -> epath.Path:
        """Where `keep` copies the files to, if there's a CHECKPOINT_DIR."""
        return epath.Path(self.checkpoints) / self.logs.relative_to(self.path)

    def same(self, now: Mapping[str, str], c: RunConstants) -> None:
        """Notes the identity of a new run; raises UserError if the run was started with something
        else.
        """
        kept = (read_object(self.logs / "run.json") or {}).get("identity", {})
        if message := change_message(kept, now, c, f"RUN_DIR={self.path}"):
            raise UserError(f"{message}; put it back, or choose another RUN_DIR")
        self.keep(identity=now | kept)

    def once(self, name: str, ask: Callable[[], dict[str, Any]]) -> None:
        """Keeps `ask()`, the evaluation "before" or "after" training, in `name`.json; not if it's
        there.

        Raises UserError if the one before training is lost and the model has been trained since.
        """
        file = self.logs / f"{name}.json"
        if devices.all_agree(read_object(file) is not None):
            return
        if name == "before" and self.done:
            raise UserError(
                f"RUN_DIR={self.path}: {file.name} is lost or damaged, and after {self.done} steps "
                "the model can no longer be asked as it was before training; put the file back, "
                "or start another run (inference.py and the tool convert_checkpoint take this "
                "one's checkpoints as they are)"
            )
        result = ask()
        print(f"{name} training: {in_words(result)}")
        settings.write_whole(file, json.dumps(result) + "\n")
        self.keep()


@contextlib.contextmanager
def open_folder(c: RunConstants, arguments: Sequence[str] = ()) -> Iterator[RunFolder]:
    """Makes the folder of a run, or checks that the run in it was started with the same constants.

    Raises UserError if it wasn't, or the folder is unusable; Stopped on Ctrl-C in the block.
    """
    path = Path(c.RUN_DIR) if c.RUN_DIR else new_folder("grpo_llama3_1_8b_demo")
    logs = path if devices.is_first() else path / f"host_{jax.process_index()}"
    command = shlex.join(["python", "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py", *arguments])
    with contextlib.ExitStack() as stack:
        named = f"RUN_DIR={path}"
        try:
            logs.mkdir(parents=True, exist_ok=True)
            stack.callback(os.close, lock(logs, path))
            named = f"CHECKPOINT_DIR={c.CHECKPOINT_DIR}" if c.CHECKPOINT_DIR else named
            if c.CHECKPOINT_DIR.startswith("gs://"):
                checkpoints.check_bucket(c.CHECKPOINT_DIR)
            root = checkpoints.root_of_run(c.CHECKPOINT_DIR, path)
            steps = checkpoints.saved(root)
            folder = RunFolder(path, logs, root, done=max(steps, default=0))
            epath.Path(folder.checkpoints).mkdir(parents=True, exist_ok=True)
            if c.CHECKPOINT_DIR:
                if devices.is_first() and not folder.checkpoints.startswith("gs://"):
                    stack.callback(os.close, lock(Path(folder.checkpoints), path))
                if "constants.json" in checkpoints.copy_files(folder.copy, logs, again=False):
                    print(f"{named}: RUN_DIR={path} is taken over from {folder.copy}")
            if not (logs / "constants.json").exists():
                if steps or (logs / "before.json").exists():
                    lost = "the constants.json of the run in it is lost; put it back"
                    raise UserError(f"RUN_DIR={path}: {lost}, or choose another RUN_DIR")
                note = {"run_id": secrets.token_hex(8), "command": command}
                settings.write_whole(logs / "run.json", json.dumps(note) + "\n")
                settings.write_whole(
                    logs / "constants.json", json.dumps(kept_constants(c), indent=1) + "\n"
                )
            note = read_object(logs / "run.json") or {}
            if "run_id" not in note:
                raise UserError(
                    f"RUN_DIR={logs}: its run.json is lost or damaged; put a whole one back"
                )
            if note.get("saved") and not steps:
                lost = (
                    f"{folder.checkpoints} is empty, and the run in "
                    f"RUN_DIR={path} has saved a checkpoint"
                )
                remedy = "put the checkpoints back, or choose another RUN_DIR to start anew"
                raise UserError(f"{named}: {lost} after step {note['saved']}; {remedy}")
            (logs / "too_long.csv").unlink(missing_ok=True)  # each start rewrites it
        except OSError as error:
            fault = error.strerror or first_line(error)
            raise UserError(f"{named}: {fault}; choose another folder") from None
        saved = read_constants(logs)
        check_same_constants(c, saved, path)
        if (steps := saved["NUM_BATCHES"]) < c.NUM_BATCHES:
            print(
                f"NUM_BATCHES raised from {steps} to {c.NUM_BATCHES}: the learning rate, which had "
                f"fallen to 0, and TEMPERATURE_END now follow the schedule of {c.NUM_BATCHES} steps"
            )
            for name, place in itertools.product(
                ("after.json", "result.json"), (logs, folder.copy)
            ):
                (place / name).unlink(missing_ok=True)
            saved["NUM_BATCHES"] = c.NUM_BATCHES
            settings.write_whole(logs / "constants.json", json.dumps(saved, indent=1) + "\n")
        # What Orbax refuses, it refuses now, not after the first evaluation.
        checkpoints.open_manager(folder.checkpoints).close()
        folder.keep(parts=parts(note, command, folder.done, c.NUM_BATCHES))
        try:
            with process.full_disk(path):
                yield folder
        except KeyboardInterrupt:
            raise settings.Stopped(path) from None


def parts(note: Mapping[str, Any], command: str, done: int, steps: int) -> list[dict[str, Any]]:
    """The parts of a run in its `note` and, unless all its steps are `done`, the one that begins.

    It takes the place of those whose steps a kill has undone.
    """
    earlier = note.get("parts", [{"command": note.get("command", ""), "done": 0}])
    if done >= steps:
        return earlier
    return [part for part in earlier if part["done"] < done] + [{"command": command, "done": done}]


def kept_constants(c: RunConstants) -> dict[str, Any]:
    """The constants that a resumed run must match."""
    return {
        name: value for name, value in dataclasses.asdict(c).items() if name not in FREE_TO_CHANGE
    }


def new_folder(script: str) -> Path:
    """Makes a unique folder named after the time; two runs may start in the same second."""
    started = time.localtime(devices.of_first(int(time.time())))
    name, count = time.strftime(f"runs/{script}/%Y-%m-%d_%H-%M-%S", started), 1
    while devices.is_first():
        with contextlib.suppress(FileExistsError):
            Path(f"{name}_{count}" if count > 1 else name).mkdir(parents=True)
            break
        count += 1
    count = devices.of_first(count)
    return Path(f"{name}_{count}" if count > 1 else name)


def lock(logs: Path, folder: Path) -> int:
    """Keeps other processes out of `logs` until the returned file is closed, or this process is
    killed.
    """
    descriptor = os.open(logs, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        fault = "another process is running in it; wait for its end, or choose another folder"
        raise UserError(f"RUN_DIR={folder}: {fault}") from None
    return descriptor


def check_same_constants(c: RunConstants, saved: Mapping[str, Any], folder: Path) -> None:
    """Refuses to resume with constants that differ from `saved`, except a larger NUM_BATCHES."""
    mine = kept_constants(c)
    if odd := sorted(mine.keys() ^ saved.keys()):
        fault = f"started by another version of this script (it differs in {', '.join(odd[:3])})"
        raise UserError(f"RUN_DIR={folder}: its run was {fault}; start another run")
    for name, value in mine.items():
        old = saved[name]
        # A dry run doesn't know the hub's commit.
        if name in ("MODEL", "TEACHER") and ("@" in old) != ("@" in value):
            old, value = old.partition("@")[0], value.partition("@")[0]
        if old != value and not (name == "NUM_BATCHES" and value > old):
            fault = (
                f"the run in RUN_DIR={folder} was started with {old}; use that, or another RUN_DIR"
            )
            raise UserError(f"{name}={value}: {fault}")


# %% What a run is made of -------------------------------------------------------------------------
def identity(
    c: RunConstants, rows: Mapping[str, Sequence[Mapping]], names: Sequence[str], course: str
) -> dict[str, str]:
    """Digests of the content of what a run uses, by constant; DATASET stands for all but the test
    questions.

    `rows` are questions with their prompts, by split; `names` are the rewards'; `course` is their
    file. Of a reward, METHOD or ENVIRONMENT it's the code without comments, but not what that
    imports or reads; GRADERS is the course's own code that grades.
    """
    files = {name: getattr(c, name, "") for name in ("REWARD_FUNC", "METHOD", "ENVIRONMENT")}
    if not course_rewards(reward_func).keys().isdisjoint(names):
        files["reward_func.py"] = course
    code = {
        name: ast.dump(ast.parse(find_path(file).read_bytes()))
        for name, file in files.items()
        if file
    }
    code[GRADERS] = "".join(map(code_of, (grading, task_rewards, code_grading)))
    digests = {name: hashlib.sha256(tree.encode()).hexdigest() for name, tree in code.items()}
    digests |= {
        name: model_digest(getattr(c, name))
        for name in ("MODEL", "TEACHER")
        if getattr(c, name, "")
    }
    asked = {"DATASET": ("train", "validation"), "TEST_DATASET": ("test",)}
    for name, splits in asked.items():
        if known := [rows[split] for split in splits if split in rows]:
            keys = "prompts", "question", *GRADED
            columns = [[[row[key] for key in keys] for row in part] for part in known]
            digests[name] = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    return digests


def code_of(module: ModuleType) -> str:
    """A module's code without comments and docstrings."""
    tree = ast.parse(Path(module.__file__).read_bytes())
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def change_message(
    kept: Mapping[str, str], now: Mapping[str, str], c: RunConstants, where: str
) -> str:
    """What has changed since the run in `where`, such as "RUN_DIR=runs/mine", was started; "" if
    nothing.

    Only compares what both have: a tool has less than the run, and a hub's commit isn't a folder's
    digest.
    """
    names = [
        name
        for name in now
        if name in kept
        and kept[name] != now[name]
        and kept[name].startswith(HUB) == now[name].startswith(HUB)
    ]
    places = [
        "DATASET" if name == "TEST_DATASET" and not c.TEST_DATASET else name for name in names
    ]
    listed = dict.fromkeys(f"{name}={getattr(c, name, '')}".removesuffix("=") for name in places)
    return (
        f"{', '.join(listed)}: the content isn't what the run in {where} was started with"
        if names
        else ""
    )


def model_digest(model: str) -> str:
    """A hub model's commit; else the digest of a folder's weights and the files beside them."""
    folder, _ = llama.fetch_model(model)
    if not find_path(model).is_dir():
        return HUB + folder.name
    files = [*llama.weight_files(folder), *llama.side_files(folder)]
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
