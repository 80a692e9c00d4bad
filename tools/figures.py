"""Makes every committed CSV file and picture anew, from the commands that made them: `make figures`.

    python tools/figures.py --list                # every command, what it makes, and how long it takes
    python tools/figures.py                       # everything: hours
    python tools/figures.py 1_Q_Learning          # the files of one folder
    python tools/figures.py MNIST_PATH=mnist.npz SB3=/tmp/sb3/bin/python

JOBS below is the table: a command, and what of its run goes where. `NAME=PATH` in a command is a place on
your machine, which you give as `NAME=value`; a command whose path is not there is left out, with a line that
says so. Seconds, and with them some columns, differ from machine to machine; the rest should come out as it
is.
"""

import csv
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import processor

HOME_OF_FILES = ROOT  # the tests write elsewhere


# %% Tables that several runs share ---------------------------------------------------------------------
# One function per table: the lines that one run adds to it, from the files in the run's folder.
def read_csv(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def q_learning_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Folder 1's seeds.csv: one line per run."""
    constants, result = (json.loads((run / f"{name}.json").read_text()) for name in ("constants", "result"))
    log = read_csv(run / "log.csv")
    last = [float(row["return"]) for row in log if int(row["episode"]) > constants["NUM_EPISODES"] - 1000]
    yield result | {
        "seed": constants["SEED"],
        "return_of_last_1000_episodes": round(sum(last) / len(last), 3),
        "seconds": round(result["seconds"], 3),
    }


def seeds_of_one_run(run: Path) -> Iterator[dict[str, Any]]:
    """seeds.csv of folders 2 and 3: one line per seed."""
    constants, result = (json.loads((run / f"{name}.json").read_text()) for name in ("constants", "result"))
    for i in range(constants["NUM_SEEDS"]):
        yield {"seed": constants["SEED"] + i} | {
            name: value[i] if isinstance(value, list) else value for name, value in result.items()
        }


def mnist_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Folder 4's seeds.csv: one line per seed, all methods side by side, on the test images."""
    result = json.loads((run / "result.json").read_text())
    final = {(row["seed"], row["method"]): row for row in read_csv(run / "accuracy.csv")}
    for seed in dict.fromkeys(seed for seed, _ in final):
        row = {"seed": seed, "seconds": result["seconds"], "compile_seconds": result["compile_seconds"]}
        for method in dict.fromkeys(method for _, method in final):
            row[method] = final[seed, method]["test_accuracy"]
            row[f"{method}_sampled"] = final[seed, method]["test_sampled_accuracy"]
        yield row


def mnist_exercise_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Folder 4's exercises.csv: one line per seed, GRPO only."""
    yield from (row for row in read_csv(run / "accuracy.csv") if row["method"] == "grpo")


def language_model_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Folder 5's seeds.csv: one line per run."""
    result = json.loads((run / "result.json").read_text())
    row = result | {f"{when}_{k}": v for when in ("before", "after") for k, v in result[when].items()}
    yield row | {
        "questions": result["before"]["questions"],
        "machine": processor(),
        "date": time.strftime("%Y-%m-%d"),
    }


def task_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Folder 5's own_tasks.csv: one line per run, and one for each data_source where it has several."""
    result = json.loads((run / "result.json").read_text())
    before, after = (
        {"all": result[when]} | result[when].get("by_data_source", {}) for when in ("before", "after")
    )
    for name, old in before.items():
        row = {"data_source": name, "questions": old["questions"]}
        for key in ("answer_accuracy", "lenient_accuracy", "format_accuracy", "greedy_answer_accuracy"):
            row |= {"before_" + key: old.get(key, ""), "after_" + key: after[name].get(key, "")}
        yield row | {"seconds": result["seconds"], "machine": processor(), "date": time.strftime("%Y-%m-%d")}


# %% The table ------------------------------------------------------------------------------------------
class Job(NamedTuple):
    """A command, and where the files of its run are committed."""

    command: str
    files: dict[str, str]  # file in the run's folder -> committed file
    minutes: float | None = None  # as the folders' pages have it; None: not measured as a whole
    writes_itself: bool = False  # the command writes the committed files; no RUN_DIR
    rows: Callable | None = None  # for a table that several runs share: repeats the runs it names


def into(folder: str, *names: str, prefix: str = "") -> dict[str, str]:
    """Files of a run, to the assets of a folder."""
    return {name: f"{folder}/assets/{prefix}{name}" for name in names}


PEERS = "SB3=PATH REJAX=PATH PUREJAXRL=PATH PUREJAXRL_CHECKOUT=PATH CLEANRL=PATH CLEANRL_CHECKOUT=PATH"
SMOLLM2 = (  # the second rung; runs/smollm2 is converted as folder 5's docs/rungs.md says
    "python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py MODEL=runs/smollm2 "
    "DATASET=5_GRPO_Maxtext/examples/small_numbers REWARD_FUNC=5_GRPO_Maxtext/examples/last_number.py "
    "REWARDS=compute_score,last_number 'TEMPLATE={question} Answer in one short sentence.' "
    "MAX_PROMPT_LENGTH=60 TOTAL_GENERATION_STEPS=24 TEMPERATURE=0.7 BATCH_SIZE=4 LORA_RANK=16 "
    "NUM_ITERATIONS=1 LEARNING_RATE=3e-4 DTYPE=bfloat16 NUM_BATCHES=100 SAVE_INTERVAL_STEPS=10 EVAL_EVERY=10 "
    "EVAL_QUESTIONS=64 EVAL_CONFIG=liberal NUM_TEST_QUESTIONS=256"
)
MNIST = "MNIST_PATH=PATH"  # all of it, as Keras distributes it
JOBS = [
    Job(
        "python 1_Q_Learning/Q_Learning.py SEED=0",
        into("1_Q_Learning", "log.csv", "q_table.csv", "q_table.png", "learning_curve.png"),
        0.1,
    ),
    Job(
        "python 1_Q_Learning/study.py",
        into("1_Q_Learning", "compare.csv", "compare.png", "compare_curves.csv"),
        0.5,
    ),
    Job("python 1_Q_Learning/Q_Learning.py", into("1_Q_Learning", "seeds.csv"), 0.2, rows=q_learning_rows),
    Job("python 1_Q_Learning/mistakes.py", into("1_Q_Learning", "mistakes.csv", "exercises.csv"), 2),
    Job(
        "python 2_Cart_Pole_DQN/cart_pole_dqn.py SEED=0",
        into("2_Cart_Pole_DQN", "log.csv", "learning_curve.png", "cart_pole.gif"),
        0.6,
    ),
    Job(
        "python 2_Cart_Pole_DQN/study.py",
        into(
            "2_Cart_Pole_DQN",
            "compare.csv", "compare_paired.csv", "promises.csv", "compare.png", "overestimation.png",
        ),
        12,
    ),
    Job("python 2_Cart_Pole_DQN/study.py tune", into("2_Cart_Pole_DQN", "tune.csv", "tuned.csv")),
    Job(
        "python 2_Cart_Pole_DQN/cart_pole_dqn.py", into("2_Cart_Pole_DQN", "seeds.csv"), rows=seeds_of_one_run
    ),
    Job("python 2_Cart_Pole_DQN/mistakes.py", into("2_Cart_Pole_DQN", "mistakes.csv", "exercises.csv"), 6),
    Job(
        "python 3_Pendulum/pendulum.py SEED=0",
        into(
            "3_Pendulum", "log.csv", "learning_curve.png", "clipped_objective.png", "value_function.png",
            "pendulum.gif",
        ),
        0.5,
    ),
    Job("python 3_Pendulum/study.py", into("3_Pendulum", "compare.csv", "compare.png", "failures.png"), 9),
    Job("python 3_Pendulum/pendulum.py", into("3_Pendulum", "seeds.csv"), rows=seeds_of_one_run),
    Job(
        "python 3_Pendulum/ppo.py SEED=0",
        into("3_Pendulum", "log.csv", "learning_curve.png", prefix="ppo_"),
        0.5,
    ),
    Job("python 3_Pendulum/ppo.py", into("3_Pendulum", "seeds.csv", prefix="ppo_"), rows=seeds_of_one_run),
    Job(
        "python 3_Pendulum/reinforce.py SEED=0",
        into("3_Pendulum", "log.csv", "learning_curve.png", prefix="reinforce_"),
        0.4,
    ),
    Job(
        "python 3_Pendulum/reinforce_study.py",
        into(
            "3_Pendulum", "compare.csv", "compare.png", "gradient_variance.csv", "gradient_variance.png",
            prefix="reinforce_",
        ),
        3,
    ),
    Job(
        "python 3_Pendulum/reinforce.py",
        into("3_Pendulum", "seeds.csv", prefix="reinforce_"),
        rows=seeds_of_one_run,
    ),
    Job("python 3_Pendulum/ratio_study.py", into("3_Pendulum", "ratio_passes.csv"), 0.3),
    Job("python 3_Pendulum/mistakes.py", into("3_Pendulum", "mistakes.csv", "exercises.csv"), 8),
    Job(
        f"python 4_GRPO_MNIST/study.py twins {MNIST}",
        into("4_GRPO_MNIST", "log.csv", "accuracy.png"),
        1.8,
    ),
    Job(
        f"python 4_GRPO_MNIST/study.py {MNIST}",
        into("4_GRPO_MNIST", "compare.csv", "gradient.csv", "memory.csv", "pull.png"),
        33,
    ),
    Job(
        f"python 4_GRPO_MNIST/study.py tune {MNIST}",
        into("4_GRPO_MNIST", "tune.csv"),
        44,
    ),
    Job(
        f"python 4_GRPO_MNIST/study.py twins {MNIST}",
        into("4_GRPO_MNIST", "seeds.csv"),
        1.8,
        rows=mnist_rows,
    ),
    Job(
        "python 4_GRPO_MNIST/study.py twins MNIST_PATH=subset",
        into("4_GRPO_MNIST", "exercises.csv"),
        rows=mnist_exercise_rows,
    ),
    Job(
        "python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py SEED=0",
        into("5_GRPO_Maxtext", "train_log.csv", "report.png"),
        1.6,
    ),
    Job(
        "python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
        into("5_GRPO_Maxtext", "seeds.csv"),
        5,
        rows=language_model_rows,
    ),
    Job(
        "python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
        into("5_GRPO_Maxtext", "once_per_answer.csv"),
        4,
        rows=language_model_rows,
    ),
    Job(
        "python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
        into("5_GRPO_Maxtext", "own_tasks.csv"),
        rows=task_rows,
    ),
    Job(
        "python 5_GRPO_Maxtext/tool.py pass_at_k CHECKPOINT=runs/seed_0,runs/seed_1,runs/seed_2",
        into("5_GRPO_Maxtext", "pass_at_k.csv", "pass_at_k.png"),
        11,
    ),
    Job("make playground", into("5_GRPO_Maxtext", "playground.html"), 0.1, writes_itself=True),
    Job("make playground-seeds", into("5_GRPO_Maxtext", "playground_seeds.csv"), 3.3, writes_itself=True),
    Job(
        "make page-pictures RUN=runs/seed_0",
        into("5_GRPO_Maxtext", "page_group.png", "page_time.png", "page_phone.png"),
        0.5,
        writes_itself=True,
    ),
    Job(
        "python benchmarks/methods.py",
        into(
            "5_GRPO_Maxtext", "methods.csv", "methods_curves.csv", "methods_pass_at_k.csv", "methods.png",
            "methods_pass_at_k.png", "methods_dense.png",
        ),
        100,
        writes_itself=True,
    ),
    Job(
        "python benchmarks/sampler_mismatch.py",
        into("5_GRPO_Maxtext", "mismatch.csv", "mismatch_curves.csv", "mismatch.png"),
        11,
        writes_itself=True,
    ),
    Job(
        "python benchmarks/turns_on_the_grid.py",
        into(
            "5_GRPO_Maxtext", "turns.csv", "turns_curves.csv", "turns_starts.csv", "turns_credit.csv",
            "turns_price.csv", "turns.png",
        ),
        45,
        writes_itself=True,
    ),
    Job(
        "python 5_GRPO_Maxtext/mesh_and_axis_rules.py",
        into("5_GRPO_Maxtext", "mesh_and_axis_rules.png"),
        1.1,
    ),
    Job(
        f"{SMOLLM2} SEED=0",
        into("5_GRPO_Maxtext", "train_log.csv", "report.png", prefix="smollm2_"),
        46,
    ),
    Job(SMOLLM2, into("5_GRPO_Maxtext", "smollm2_seeds.csv"), 46, rows=language_model_rows),
    Job(
        "python benchmarks/against_lm_eval.py RUNS=runs/seed_0,runs/smollm2_seed_0",
        into("5_GRPO_Maxtext", "lm_eval.csv"),
        writes_itself=True,
    ),
    Job(
        "python tools/eight_answers.py",
        into("5_GRPO_Maxtext", "eight_answers.json"),
        1.7,
        writes_itself=True,
    ),
    Job(
        "python tools/drawings.py",
        into("1_Q_Learning", "course_map.png", "agent_environment.png", "values_crawl.png")
        | into("3_Pendulum", "actor_critic.png", "gae_timeline.png", "ratio_passes.png")
        | into("5_GRPO_Maxtext", "eight_answers.png", "token_credit.png", "stack.png")
        | into("5_GRPO_Maxtext", "memory.png", "mesh_4x2.png"),
        0.3,
        writes_itself=True,
    ),
    Job(
        "make fit-check",
        into("5_GRPO_Maxtext", "fit_check.csv", "fit_rungs.csv", "fit_cards.csv"),
        writes_itself=True,
    ),
    Job(
        "python 3_Pendulum/pendulum_optimum.py",
        {"pendulum_optimum.csv": "3_Pendulum/assets/pendulum_optimum.csv"},
        0.3,
        writes_itself=True,
    ),
    Job(
        "python benchmarks/default_runs.py",
        {"default_runs.csv": "benchmarks/default_runs.csv"},
        6,
        writes_itself=True,
    ),
    Job(
        f"python benchmarks/against_peers.py 2_Cart_Pole_DQN {PEERS}",
        {"dqn_against_peers.csv": "benchmarks/dqn_against_peers.csv"},
        writes_itself=True,
    ),
    Job(
        f"python benchmarks/against_peers.py 3_Pendulum {PEERS}",
        {"ppo_against_peers.csv": "benchmarks/ppo_against_peers.csv"},
        writes_itself=True,
    ),
    Job(
        "python benchmarks/grpo_step_against_trl.py PEER=PATH",
        {"grpo_step_against_trl.csv": "benchmarks/grpo_step_against_trl.csv"},
        writes_itself=True,
    ),
    Job(
        "python benchmarks/grpo_step_scaling.py PEER=PATH",
        {
            "grpo_step_scaling.csv": "benchmarks/grpo_step_scaling.csv",
            "scaling.png": "5_GRPO_Maxtext/assets/scaling.png",
        },
        writes_itself=True,
    ),
    Job(
        "python benchmarks/try_hostile_programs.py "
        "TABLE=5_GRPO_Maxtext/assets/hostile_programs.csv",
        {"hostile_programs.csv": "5_GRPO_Maxtext/assets/hostile_programs.csv"},
        1.5,
        writes_itself=True,
    ),
    Job(
        "python benchmarks/gradient_on_cpu.py",
        {"gradient_on_cpu.csv": "5_GRPO_Maxtext/assets/gradient_on_cpu.csv"},
        writes_itself=True,
    ),
    Job(
        "python benchmarks/golden_against_peers.py PEER=PATH",
        {"golden_against_peers.csv": "benchmarks/golden_against_peers.csv"},
        writes_itself=True,
    ),
]  # fmt: skip


# %% Running it -----------------------------------------------------------------------------------------
class MissingPath(Exception):
    """A command names a path that is not on this machine."""


def words_of(command: str, options: dict[str, str]) -> list[str]:
    """A command to run: paths replaced by `options`, this Python for "python".

    Raises:
        MissingPath: a NAME=value of the command names a path that is not there.
    """
    words = shlex.split(command)
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if "/" in value or value == "PATH":
            value = options.get(name, value)
            paths = [part.partition(":")[0] for part in value.split(",")]  # DATASET=one/path:0.7,another:0.3
            if not all((ROOT / path).exists() for path in paths):
                raise MissingPath(f"{name}={value} is not there; give {name}=path")
            words[i] = f"{name}={value}"
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def seeds(table: str, rows: Callable, options: dict[str, str] | None = None, script: str = "") -> None:
    """Repeats every run that a table names, and writes the table anew: same lines, same columns.

    Args:
        table: a committed CSV file with a column "command", or, after `script`, "changed".
        rows: what a run's folder adds to the table.
        options: see `words_of`.
        script: the command that the column "changed" is put behind.
    """
    old = read_csv(HOME_OF_FILES / table)
    keys = [name for name in ("exercise", "command", "changed") if name in old[0]]
    lines = []
    for key in dict.fromkeys(tuple(line[name] for name in keys) for line in old):
        command = key[-1] if keys[-1] == "command" else f"{script} {key[-1]}"
        with tempfile.TemporaryDirectory() as folder:
            words = words_of(command, options or {})
            subprocess.run([*words, f"RUN_DIR={folder}/run"], cwd=ROOT, check=True)
            lines += [row | dict(zip(keys, key)) for row in rows(Path(folder) / "run")]
    with open(HOME_OF_FILES / table, "w", newline="") as file:
        writer = csv.DictWriter(file, list(old[0]), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def make(job: Job, options: dict[str, str]) -> None:
    """Runs one job; see `Job`."""
    words = words_of(job.command, options)
    if job.rows:
        [table] = job.files.values()
        seeds(table, job.rows, options, job.command)
    elif job.writes_itself:
        subprocess.run(words, cwd=ROOT, check=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*words, f"RUN_DIR={folder}/run"], cwd=ROOT, check=True)
            for name, committed in job.files.items():
                shutil.copyfile(Path(folder) / "run" / name, HOME_OF_FILES / committed)


def listed(jobs: list[Job]) -> str:
    """The commands, what each makes, and the minutes of those that were measured."""
    lines = []
    for job in jobs:
        minutes = f"{job.minutes} minutes" if job.minutes else "minutes not measured"
        lines += [job.command, f"  -> {', '.join(job.files.values())}  ({minutes})"]
    known = [job.minutes for job in jobs if job.minutes]
    return "\n".join([*lines, f"{len(known)} of {len(jobs)} commands are measured: {sum(known):.1f} minutes"])


def main() -> None:
    """Runs or lists the jobs of the folder that is named, or all."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    folders = [word.rstrip("/") for word in sys.argv[1:] if "=" not in word and word != "--list"]
    known = dict.fromkeys(name.split("/")[0] for job in JOBS for name in job.files.values())
    if set(folders) - set(known):
        sys.exit(f"error: {' '.join(folders)}: give one of {', '.join(known)}, or none for all")
    jobs = [j for j in JOBS if not folders or any(f.split("/")[0] in folders for f in j.files.values())]
    if "--list" in sys.argv:
        print(listed(jobs))
        return
    for job in jobs:
        print(f"\n{job.command}\n  -> {', '.join(job.files.values())}", flush=True)
        try:
            make(job, options)
        except MissingPath as error:
            print(f"left out: {error}")


if __name__ == "__main__":
    main()
