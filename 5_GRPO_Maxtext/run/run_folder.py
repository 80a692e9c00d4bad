"""The folder of a run: its constants, its lock, the evaluations before and after training.

constants.json has the constants, MODEL with the hub's commit; a resumed run must match them.
run.json has the run's number, command and identity (below), its newest checkpoint and when that was
noted, the checkpoints it keeps, its parts (each start's command, and the steps done before it), and
which sets share questions. before.json and after.json are the evaluations. With CHECKPOINT_DIR the
files are also copied there before each checkpoint, so a run survives the loss of its machine.
"""

import ast
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
    saved_steps: Sequence[int] = ()  # the checkpoints of earlier processes

    @property
    def steps_done(self) -> int:
        """Steps that earlier processes have done, and saved."""
        return max(self.saved_steps, default=0)

    @property
    def run_json(self) -> dict[str, Any]:
        """What run.json holds; empty if it's lost."""
        return read_object(self.logs / "run.json") or {}

    @property
    def run_id(self) -> str:
        """The run's number, also in each of its checkpoints; "" on hosts other than the first."""
        return self.run_json.get("run_id", "") if devices.is_first() else ""

    @property
    def backup(self) -> epath.Path:
        """Where CHECKPOINT_DIR, if there's one, has the copies of the run's files."""
        return epath.Path(self.checkpoints) / self.logs.relative_to(self.path)

    def update_run_json(self, **fields: Any) -> None:
        """Writes these fields and the newest checkpoint into run.json; copies what resume and
        report need to CHECKPOINT_DIR.
        """
        content, steps = self.run_json, checkpoints.saved_steps(self.checkpoints)
        if steps and steps[-1] != content.get("saved"):
            content |= {"saved": steps[-1], "saved_at": time.time()}
        content |= {"RUN_DIR": str(self.path), "kept": steps} | fields
        settings.write_whole(self.logs / "run.json", json.dumps(content) + "\n")
        if self.checkpoints != checkpoints.root_of_run("", self.path):
            checkpoints.copy_files(self.logs, self.backup, again=True)

    def check_identity(self, now: Mapping[str, str], c: RunConstants) -> None:
        """Writes the identity of a new run into run.json; raises UserError if the run was started
        with other content.
        """
        at_start = self.run_json.get("identity", {})
        if message := change_message(at_start, now, c, f"RUN_DIR={self.path}"):
            raise UserError(f"{message}; put it back, or choose another RUN_DIR")
        self.update_run_json(identity=now | at_start)

    def evaluate_once(self, name: str, evaluate: Callable[[], dict[str, Any]]) -> None:
        """Writes `evaluate()`, the evaluation "before" or "after" training, to `name`.json; does
        nothing if an earlier process has.

        Raises UserError if the one before training is lost and the model has been trained since.
        """
        file = self.logs / f"{name}.json"
        if devices.all_agree(read_object(file) is not None):
            return
        if name == "before" and self.steps_done:
            raise UserError(
                f"RUN_DIR={self.path}: {file.name} is lost or damaged, and after {self.steps_done} "
                "steps the model can no longer be asked as it was before training; put the file "
                "back, or start another run (inference.py and the tool convert_checkpoint take "
                "this one's checkpoints as they are)"
            )
        result = evaluate()
        print(f"{name} training: {in_words(result)}")
        settings.write_whole(file, json.dumps(result) + "\n")
        self.update_run_json()


# %% Opening a folder ------------------------------------------------------------------------------
@contextlib.contextmanager
def open_folder(c: RunConstants, arguments: Sequence[str] = ()) -> Iterator[RunFolder]:
    """Makes the folder of a run, or checks that the run in it was started with the same constants.

    Raises UserError if it wasn't, or the folder is unusable; Stopped on Ctrl-C in the block.
    """
    path = Path(c.RUN_DIR) if c.RUN_DIR else new_folder("grpo_llama3_1_8b_demo")
    command = shlex.join(["python", "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py", *arguments])
    with contextlib.ExitStack() as locks:
        folder = make_folders(c, path, locks)
        with refuse_unusable(checkpoint_setting(c, path)):
            if c.CHECKPOINT_DIR:
                restore_lost_files(c, folder)
            if not (folder.logs / "constants.json").exists():
                start_new_run(c, folder, command)
            check_run_json(c, folder)
            (folder.logs / "too_long.csv").unlink(missing_ok=True)  # each start rewrites it
        saved = read_constants(folder.logs)
        check_same_constants(c, saved, path)
        if saved["NUM_BATCHES"] < c.NUM_BATCHES:
            add_steps(c, folder, saved)
        # What Orbax refuses, it refuses now, not after the first evaluation.
        checkpoints.open_manager(folder.checkpoints).close()
        parts = add_part(folder.run_json, command, folder.steps_done, c.NUM_BATCHES)
        folder.update_run_json(parts=parts)
        try:
            with process.full_disk(path):
                yield folder
        except KeyboardInterrupt:
            raise settings.Stopped(path) from None


def checkpoint_setting(c: RunConstants, path: Path) -> str:
    """The setting that decides where the checkpoints are, for messages."""
    return f"CHECKPOINT_DIR={c.CHECKPOINT_DIR}" if c.CHECKPOINT_DIR else f"RUN_DIR={path}"


@contextlib.contextmanager
def refuse_unusable(setting: str) -> Iterator[None]:
    """Turns an OSError in the block into a UserError that begins with `setting`."""
    try:
        yield
    except OSError as error:
        fault = error.strerror or first_line(error)
        raise UserError(f"{setting}: {fault}; choose another folder") from None


def make_folders(c: RunConstants, path: Path, locks: contextlib.ExitStack) -> RunFolder:
    """Makes RUN_DIR=`path` and the folder of its checkpoints; `locks` holds a lock on each."""
    logs = path if devices.is_first() else path / f"host_{jax.process_index()}"
    with refuse_unusable(f"RUN_DIR={path}"):
        logs.mkdir(parents=True, exist_ok=True)
        locks.callback(os.close, lock(logs, path))
    in_bucket = c.CHECKPOINT_DIR.startswith("gs://")
    with refuse_unusable(checkpoint_setting(c, path)):
        if in_bucket:
            checkpoints.check_bucket(c.CHECKPOINT_DIR)
        root = checkpoints.root_of_run(c.CHECKPOINT_DIR, path)
        saved_steps = checkpoints.saved_steps(root)
        epath.Path(root).mkdir(parents=True, exist_ok=True)
        if c.CHECKPOINT_DIR and devices.is_first() and not in_bucket:
            locks.callback(os.close, lock(Path(root), path))
    return RunFolder(path, logs, root, saved_steps)


def restore_lost_files(c: RunConstants, folder: RunFolder) -> None:
    """Copies the files that RUN_DIR lacks from CHECKPOINT_DIR."""
    copied = checkpoints.copy_files(folder.backup, folder.logs, again=False)
    if "constants.json" in copied:
        setting = checkpoint_setting(c, folder.path)
        print(f"{setting}: RUN_DIR={folder.path} is taken over from {folder.backup}")


def start_new_run(c: RunConstants, folder: RunFolder, command: str) -> None:
    """Writes run.json and constants.json; UserError if the folder has a run that has lost them."""
    if folder.saved_steps or (folder.logs / "before.json").exists():
        lost = "the constants.json of the run in it is lost; put it back"
        raise UserError(f"RUN_DIR={folder.path}: {lost}, or choose another RUN_DIR")
    content = {"run_id": secrets.token_hex(8), "command": command}
    settings.write_whole(folder.logs / "run.json", json.dumps(content) + "\n")
    write_constants(folder, constants_to_match(c))


def check_run_json(c: RunConstants, folder: RunFolder) -> None:
    """Raises UserError if run.json is damaged, or the checkpoints that it names are gone."""
    content = folder.run_json
    if "run_id" not in content:
        raise UserError(
            f"RUN_DIR={folder.logs}: its run.json is lost or damaged; put a whole one back"
        )
    if content.get("saved") and not folder.saved_steps:
        lost = (
            f"{folder.checkpoints} is empty, and the run in RUN_DIR={folder.path} has saved a "
            f"checkpoint after step {content['saved']}"
        )
        remedy = "put the checkpoints back, or choose another RUN_DIR to start anew"
        raise UserError(f"{checkpoint_setting(c, folder.path)}: {lost}; {remedy}")


def check_same_constants(c: RunConstants, saved: Mapping[str, Any], folder: Path) -> None:
    """Refuses to resume with constants that differ from `saved`, except a larger NUM_BATCHES."""
    now = constants_to_match(c)
    if odd := sorted(now.keys() ^ saved.keys()):
        fault = f"started by another version of this script (it differs in {', '.join(odd[:3])})"
        raise UserError(f"RUN_DIR={folder}: its run was {fault}; start another run")
    for name, value in now.items():
        old = saved[name]
        # A dry run doesn't know the hub's commit.
        if name in ("MODEL", "TEACHER") and ("@" in old) != ("@" in value):
            old, value = old.partition("@")[0], value.partition("@")[0]
        if old != value and not (name == "NUM_BATCHES" and value > old):
            fault = (
                f"the run in RUN_DIR={folder} was started with {old}; use that, or another RUN_DIR"
            )
            raise UserError(f"{name}={value}: {fault}")


def add_steps(c: RunConstants, folder: RunFolder, saved: Mapping[str, Any]) -> None:
    """Notes a larger NUM_BATCHES; drops the results of the end, which comes later now."""
    print(
        f"NUM_BATCHES raised from {saved['NUM_BATCHES']} to {c.NUM_BATCHES}: the learning rate, "
        "which had fallen to 0, and TEMPERATURE_END now follow the schedule of "
        f"{c.NUM_BATCHES} steps"
    )
    for name in ("after.json", "result.json"):
        for place in (folder.logs, folder.backup):
            (place / name).unlink(missing_ok=True)
    write_constants(folder, saved | {"NUM_BATCHES": c.NUM_BATCHES})


def add_part(
    run_json: Mapping[str, Any], command: str, done: int, steps: int
) -> list[dict[str, Any]]:
    """The parts in run.json and, unless all of the run's `steps` are `done`, the one that begins.

    It takes the place of those whose steps a kill has undone.
    """
    earlier = run_json.get("parts", [])
    if done >= steps:
        return earlier
    return [part for part in earlier if part["done"] < done] + [{"command": command, "done": done}]


def constants_to_match(c: RunConstants) -> dict[str, Any]:
    """The constants that a resumed run must match."""
    return {
        name: value for name, value in dataclasses.asdict(c).items() if name not in FREE_TO_CHANGE
    }


def write_constants(folder: RunFolder, constants: Mapping[str, Any]) -> None:
    """Writes constants.json."""
    text = json.dumps(constants, indent=1) + "\n"
    settings.write_whole(folder.logs / "constants.json", text)


def new_folder(script: str) -> Path:
    """Makes a unique folder named after the time; two runs may start in the same second."""
    started = time.localtime(devices.broadcast_from_first(int(time.time())))
    name, count = time.strftime(f"runs/{script}/%Y-%m-%d_%H-%M-%S", started), 1
    while devices.is_first():
        with contextlib.suppress(FileExistsError):
            Path(f"{name}_{count}" if count > 1 else name).mkdir(parents=True)
            break
        count += 1
    count = devices.broadcast_from_first(count)
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
