"""Makes the committed tables and pictures: `make figures`.

Each chapter's study.toml says what is measured.

    python -m measure.run STALE=True                      # what's out of date, and the minutes
    python -m measure.run ONLY=2_Cart_Pole_DQN            # a chapter; or one product's path
    python -m measure.run MNIST_PATH=mnist.npz WORKERS=2  # all that's out of date: hours; resumes
    python -m measure.run PICTURES=True                   # only the pictures: half a minute
    python -m measure.run CHECK=True ONLY=3_Pendulum      # a row of each anew: still the same?
    python -m measure.run MARK=True                       # marks in lock.json what's out of date

A row of a study is a script with some constants, perhaps in a copy of its folder with a few lines
replaced (a mistake on purpose). Each runs as a process in runs/measure, and is found again by the
hash of its code and constants. With WORKERS above 1 it has a core of its own, and XLA rounds
differently than with two.
"""

import functools
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from machine import commit, processor, versions, write_csv

from measure import columns, drawings, lock, pictures

PACKAGES = ("jax", "flax", "optax", "numpy", "google-tunix", "maxtext")
PLACES = (ROOT, ROOT / "5_GRPO_Maxtext")  # of files and folders that a command names
STUDIES = [*sorted(ROOT.glob("[1-9]_*/study.toml")), ROOT / "benchmarks" / "study.toml"]
SWITCHES = ("STALE", "CHECK", "PICTURES", "MARK")
NOT_COLUMNS = {"args", "script", "patches"}  # of a row
OF_THE_MACHINE = [
    "seconds",
    "compile_seconds",
    "seconds_of_all_seeds",
    "seconds_per_step",
    "date",
    "machine",
]


# %% What study.toml says --------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One process: a script, its constants, and what is replaced in a copy of its folder."""

    script: Path
    arguments: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...] = ()

    def given(self) -> list[Any]:
        """What tells it from another run of the same code: constants, patches, and what named files
        hold.
        """
        values = [word.partition("=")[2] for word in self.arguments if word.endswith(".py")]
        files = [path for value in values for place in PLACES if (path := place / value).exists()]
        return [self.arguments, self.edits, *(lock.digest(path.read_text()) for path in files)]

    def folder(self, runs: Path) -> Path:
        """Where it is, or will be."""
        return runs / f"{self.script.stem}_{lock.digest(lock.code_of(self.source()), self.given())}"

    def source(self) -> Path:
        """The file whose code decides: of `tool.py NAME` the tool."""
        tool = self.script.name == "tool.py"
        return self.script.parent / "tools" / f"{self.arguments[0]}.py" if tool else self.script

    def command(self) -> str:
        """As one would type it; patches aside."""
        return shlex.join(["python", str(self.script.relative_to(ROOT)), *self.arguments])


@dataclass(frozen=True)
class Job:
    """A [[make]] of a study.toml: products, and how they're made."""

    folder: Path
    study: dict[str, Any]
    make: dict[str, Any]

    def products(self) -> list[Path]:
        """The committed files."""
        return [
            self.folder / "assets" / n if "/" not in n else ROOT / n for n in self.make["files"]
        ]

    def sources(self) -> list[Path]:
        """The committed tables that this is made from."""
        return [(self.folder / "assets" / name).resolve() for name in self.make.get("from", [])]

    def rows(self) -> list[dict[str, Any]]:
        """The table's rows: text becomes the column `changed`; a list means one row per value."""
        if self.make.get("rows_from"):
            return getattr(columns, self.make["rows_from"])(*self.sources())
        rows = []
        for row in self.make.get("rows", []):
            row = {"changed": row} if isinstance(row, str) else row
            lists = [
                [(k, v) for v in (value if isinstance(value, list) and k != "patches" else [value])]
                for k, value in row.items()
            ]
            rows += [dict(pairs) for pairs in itertools.product(*lists)]
        return rows

    def runs_of(self, row: dict[str, Any]) -> list[Run]:
        """A row's runs: one, or one per seed where the script takes one seed."""
        form = row.get(
            "args", self.make.get("args", "{constants}" if "constants" in row else "{changed}")
        )
        patches = self.study.get("patch", {})
        words = shlex.split(form.format_map(row).replace("unchanged", ""))
        names = [*row.get("patches", []), *(word for word in words if word in patches)]
        edits = tuple(tuple(edit) for name in names for edit in patches[name])
        script = self.folder / row.get(
            "script", self.make.get("script", self.study.get("script", ""))
        )
        arguments = [word for word in words if word not in patches]
        seeds = (
            [[f"SEED={seed}"] for seed in range(self.make["seeds"])]
            if "seeds" in self.make
            else [[]]
        )
        return [Run(script, (*arguments, *seed), edits) for seed in seeds]

    def runs(self) -> list[Run]:
        """All of them, in order."""
        rows = [{"changed": self.make["run"]}] if "run" in self.make else self.rows()
        return [run for row in rows for run in self.runs_of(row)]

    def hashes(self) -> tuple[str, str]:
        """Digests of the code, and of what it is given."""
        name = self.make.get("columns") or self.make.get("derive")
        function = lock.function_of(ROOT / "measure" / "columns.py", name) if name else ""
        given = [
            lock.digest(path.read_text()) if path.exists() else "absent" for path in self.sources()
        ]
        if "draw" in self.make:
            return drawn_with(), lock.digest(given, self.make["draw"])
        if "command" in self.make:  # the scripts are named under `code` where the command doesn't
            words = shlex.split(self.make["command"])
            scripts = self.make.get("code", words[1:2])
            return lock.digest([lock.code_of(ROOT / name) for name in scripts]), lock.digest(words)
        runs = self.runs()
        code = sorted(lock.code_of(script) for script in {run.source() for run in runs})
        given = lock.digest(given, [run.given() for run in runs])
        return lock.digest(code, function, self.make.get("figures")), given

    def command(self) -> str:
        """What one types to make this."""
        return (
            self.make.get("command") or f"make figures ONLY={self.products()[0].relative_to(ROOT)}"
        )


def jobs() -> list[Job]:
    """Those of all chapters and of benchmarks/study.toml, and then the pictures of their tables."""
    found, drawn = [], []
    for path in STUDIES:
        study = tomllib.loads(path.read_text())
        found += [Job(path.parent, study, make) for make in study["make"]]
        for name, (draw, *tables) in study.get("picture", {}).items():
            files = [f"{name}.svg", f"{name}_ch.svg"]
            drawn.append(Job(path.parent, study, {"files": files, "draw": draw, "from": tables}))
    return found + drawn


def drawn_with() -> str:
    """A digest of all code that draws: to draw everything anew takes half a minute."""
    paths = [*ROOT.glob("*/pictures.py"), ROOT / "measure" / "drawings.py"]
    data = [(ROOT / "measure" / f"{name}.toml").read_text() for name in ("chinese", "drawings")]
    return lock.digest([lock.code_of(path) for path in sorted(paths)], data)


# %% Running ---------------------------------------------------------------------------------------
def filled(words: Sequence[str], places: dict[str, str]) -> list[str]:
    """A command's words with this machine's paths for NAME=PATH; FileNotFoundError if a path isn't
    there.
    """
    new = []
    for word in words:
        name, _, value = word.partition("=")
        value = places.get(name, value) if value == "PATH" else value
        parts = [part.partition(":")[0] for part in value.split(",")]
        there = any((place / part).exists() for part in parts for place in PLACES)
        if value == "PATH" or (name.isupper() and "/" in value and not there):
            raise FileNotFoundError(f"{name}={value} isn't there; give {name}=path")
        new.append(f"{name}={value}" if value else word)
    return new


def git(*words: str) -> str:
    """What a git command prints."""
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).rstrip()


def head() -> str:
    """The commit that everything is made from, in short."""
    return git("rev-parse", "--short", "HEAD")


def perform(run: Run, places: dict[str, str], runs: Path, machine: str, started: list) -> None:
    """Runs it, unless it has been. measured.json, written last in its folder, says that it's
    complete.

    Its process joins `started`: in a session of its own, Ctrl-C doesn't reach it, or it would end
    early and write a result.
    """
    folder = run.folder(runs)
    if (folder / "measured.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = run.script
    if run.edits:
        copy = folder / "changed" / script.parent.name
        shutil.copytree(
            script.parent, copy, ignore=shutil.ignore_patterns("assets", "__pycache__", "*.md")
        )
        for path, text in lock.edited(script.parent, run.edits).items():
            (copy / path.relative_to(run.script.parent)).write_text(text)
        script = copy / script.name
    words = [sys.executable, str(script), *filled(run.arguments, places), f"RUN_DIR={folder}"]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / "runs" / "compiled"))
    begun = time.perf_counter()
    with open(folder / "said.txt", "w") as said:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
        )
        started.append(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
    if status:
        raise SystemExit(f"error: {run.command()}: failed; {folder / 'said.txt'} has the reason")
    (folder / "measured.json").write_text(
        json.dumps(
            {
                "command": run.command(),
                "minutes": (time.perf_counter() - begun) / 60,
                "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine,
                "commit": head(),
                "versions": versions(*PACKAGES),
            }
        )
    )


def perform_all(runs: Sequence[Run], places: dict[str, str], store: Path, workers: int) -> None:
    """All runs, `workers` at a time, each then on a core of its own."""
    cores, started, machine = sorted(os.sched_getaffinity(0))[:workers], [], processor()
    free = iter(cores)

    def take_a_core() -> None:
        """A process runs where the thread may run that starts it."""
        if workers > 1:
            os.sched_setaffinity(0, {next(free)})

    pool = ThreadPoolExecutor(len(cores), initializer=take_a_core)
    with pool, tqdm(total=len(runs), unit="run", disable=None) as bar:
        for future in [pool.submit(perform, run, places, store, machine, started) for run in runs]:
            try:
                future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in started:
                    if process.returncode is None:
                        os.killpg(process.pid, signal.SIGKILL)
                raise
            bar.update()


def table(job: Job, store: Path) -> Iterator[dict[str, Any]]:
    """The lines of a job's table, from its runs' folders."""
    add = functools.partial(getattr(columns, job.make["columns"]), **job.make.get("figures", {}))
    for row in job.rows():
        runs = job.runs_of(row)
        named = {
            k: v or "unchanged" if k == "changed" else v
            for k, v in row.items()
            if k not in NOT_COLUMNS
        }
        parts = [(named, runs)]
        if job.make.get("key") == "command":
            parts = [({"command": run.command()}, [run]) for run in runs]
        for key, some in parts:
            yield from (key | line for line in add([run.folder(store) for run in some]))


def make(job: Job, places: dict[str, str], out: Path, store: Path, workers: int) -> float:
    """Makes a job's products in `out` (a copy of the tree's paths); returns the minutes it took."""
    targets = [out / path.relative_to(ROOT) for path in job.products()]
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if "command" in job.make:
        words = filled(shlex.split(job.make["command"]), places)
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        subprocess.run(words, cwd=ROOT, check=True)
        return (time.perf_counter() - started) / 60
    runs = job.runs()
    perform_all(runs, places, store, workers)
    if "run" in job.make:
        for name, target in zip(job.make.get("names", job.make["files"]), targets):
            shutil.copyfile(runs[0].folder(store) / Path(name).name, target)
    elif "columns" in job.make:
        write_csv(targets[0], list(table(job, store)))
    else:
        sources = [out / path.relative_to(ROOT) for path in job.sources()]
        if "derive" in job.make:
            write_csv(targets[0], list(getattr(columns, job.make["derive"])(*sources)))
        else:
            pictures.save(drawings.drawn(job.make["draw"], *sources), targets[0])
    measured = [
        json.loads((run.folder(store) / "measured.json").read_text())["minutes"] for run in runs
    ]
    return sum(measured) if runs else (time.perf_counter() - started) / 60


# %% Command line ----------------------------------------------------------------------------------
def chosen(only: str) -> list[Job]:
    """The jobs of a chapter or of a product, or all. SystemExit if there are none."""
    found = [
        job
        for job in jobs()
        if not only
        or any(str(path.relative_to(ROOT)).startswith(only.rstrip("/")) for path in job.products())
    ]
    if not found:
        refuse(f"ONLY={only}", "no product's path begins like this; STALE=True lists them")
    return found


def stale(found: Sequence[Job]) -> list[tuple[Job, Path, str]]:
    """The products that are out of date, and why. What's made from such a table is, too."""
    entries, old = lock.read(), {}
    for job in jobs():  # tables come before what's made from them
        hashes, tables = job.hashes(), [path.name for path in job.sources() if path in old]
        for path in job.products():
            why = lock.why_stale(entries.get(str(path.relative_to(ROOT))), *hashes)
            if why or tables:
                old[path] = why or f"{tables[0]} is out of date"
    return [(job, path, old[path]) for job in found for path in job.products() if path in old]


def listing(found: Sequence[tuple[Job, Path, str]]) -> str:
    """What's out of date, its command and its minutes, and the minutes in all."""
    entries, lines, minutes = lock.read(), [], {}
    for job, path, why in found:
        name = str(path.relative_to(ROOT))
        known = entries.get(name, {}).get("minutes")
        minutes[id(job.make)] = known or 0
        cost = f"{known:g} minutes" if known else "minutes unknown"
        lines.append(f"{name}: {why}\n    {job.command()}  ({cost})")
    return "\n".join(
        [*lines, f"{len(found)} products are out of date: {sum(minutes.values()):.0f} minutes"]
    )


def differs(job: Job, places: dict[str, str], store: Path) -> list[str]:
    """The columns in which a table's first row, made anew, isn't the committed one's, rounding
    aside.
    """
    first = replace(job, make={**job.make, "rows": job.rows()[:1], "rows_from": None})
    perform_all(first.runs(), places, store, workers=1)
    text = pd.DataFrame(table(first, store)).to_csv(index=False)
    anew = pd.read_csv(io.StringIO(text))
    old = pd.read_csv(job.products()[0], nrows=text.count("\n") - 1)
    return [
        name
        for name in anew.columns.difference(OF_THE_MACHINE)
        if not (
            np.allclose(anew[name], old[name], rtol=1e-9, equal_nan=True)
            if anew[name].dtype.kind == "f"
            else anew[name].equals(old[name])
        )
    ]


def record(job: Job, minutes: float | None = None) -> None:
    """Writes a job's entries in lock.json; without minutes it says that a row was checked with this
    code.
    """
    entries, (code, given) = lock.read(), job.hashes()
    today = {"commit": head(), "date": time.strftime("%Y-%m-%d"), "machine": processor()}
    for name in (str(path.relative_to(ROOT)) for path in job.products()):
        now = today | {"minutes": minutes and round(minutes, 2), "versions": versions(*PACKAGES)}
        before = {k: v for k, v in entries.get(name, {}).items() if k != "stale"} | {
            "checked": today
        }
        new = {"command": job.command(), "code": code, "given": given}
        entries[name] = (before if minutes is None else now) | new
    lock.write(entries)


def mark(found: Sequence[Job]) -> None:
    """Says in lock.json, and so in the lab books, which products are out of date."""
    entries, old = lock.read(), {str(path.relative_to(ROOT)): why for _, path, why in stale(found)}
    for name, entry in entries.items():
        entry.pop("stale", None)
        if name in old:
            entry["stale"] = old[name]
    lock.write(entries)
    print(f"{len(old)} products are marked as out of date; now `make pages`")


def refuse(argument: str, remedy: str) -> NoReturn:
    """Ends with one line about what was typed, and exit code 2."""
    print(f"error: {argument}: {remedy}", file=sys.stderr)
    sys.exit(2)


def read_options(arguments: Sequence[str]) -> dict[str, str]:
    """The options of the command line, {NAME: value}; the rest are places on this machine.

    SystemExit after --help (code 0), and if one is unknown or has no such value (code 2).
    """
    if {"--help", "-h"} & {*arguments}:
        print(__doc__)
        sys.exit()
    studies = [str(tomllib.loads(path.read_text())) for path in STUDIES]  # without comments
    places = {name for text in studies for name in re.findall(r"\b(\w+)=PATH\b", text)}
    options = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in {"ONLY", "WORKERS", *SWITCHES, *places} or "=" not in argument:
            known = ", ".join(["ONLY", "WORKERS", *SWITCHES, *sorted(places)])
            refuse(argument, f"no such option; write NAME=value with one of {known}")
        if name in SWITCHES and value not in ("True", "False"):
            refuse(argument, "must be True or False")
        if name == "WORKERS" and not (value.isdecimal() and int(value)):
            refuse(argument, "must be a whole number from 1 on")
        options[name] = value
    return options


def main(arguments: Sequence[str]) -> None:
    """See the top of the file."""
    options = read_options(arguments)
    found = chosen(only := options.pop("ONLY", ""))
    if options.pop("PICTURES", "") == "True":
        found = [job for job in found if "draw" in job.make]
    workers, store = int(options.pop("WORKERS", 1)), ROOT / "runs" / "measure"
    if options.pop("CHECK", "") == "True":
        commit(ROOT, untracked="all")
        # other constants are another row, of which the first says nothing
        of_code = "its code changed"
        for job in (
            j for j, _, why in stale(found) if "columns" in j.make and why.startswith(of_code)
        ):
            if changed := differs(job, options, store):
                print(f"{job.products()[0].name}: other {', '.join(changed)}", flush=True)
            else:
                record(job)
    elif options.pop("STALE", "") == "True":
        print(listing(stale(found)))
    elif options.pop("MARK", "") == "True":
        mark(jobs())
    else:
        commit(ROOT, untracked="all")
        old = [job.make for job, _, _ in stale(found)]
        if not only or "draw" in found[0].make:
            found = [job for job in found if job.make in old]
        for job in found:
            print(f"{job.command()}\n  -> {', '.join(job.make['files'])}", flush=True)
            try:
                record(job, make(job, options, ROOT, store, workers))
            except FileNotFoundError as error:
                print(f"  left out: {error}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("\nstopped; the finished runs are kept: the same command goes on")
