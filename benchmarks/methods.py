"""What does each method buy? Every variant of GRPO on a task that can tell them apart, ten seeds each.

    python benchmarks/methods.py                            # all of them; goes on where it was stopped
    python benchmarks/methods.py METHOD=my_method.py        # and yours: a file with one function
    python benchmarks/methods.py METHODS="GRPO;MaxRL" SEEDS=3 OUT=runs/short    # some of them, elsewhere

The task is examples/larger_numbers, and how it was chosen stands in folder 5's docs/methods.md, with what is
found. Two runs at a time, each on a core of its own. A run is a folder of RUNS: it is not made again.

Tables and pictures are written to OUT: `methods.csv` (a line per run), `methods_curves.csv` (a line per run
and evaluation), `methods_pass_at_k.csv`, three pictures; the table is printed as Markdown.
"""

import contextlib
import csv
import itertools
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "5_GRPO_Maxtext"
sys.path[:0] = [str(FOLDER)]

import settings
from settings import Count, UserError


# %% Constants ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one call as NAME=value."""

    METHOD: str = ""  # Python file with a piece of the loss (docs/methods.md); joins the table as its name
    METHODS: str = ""  # names, divided by semicolons (empty = all, and METHOD)
    SEEDS: Count = 10  # seeds 0, 1, ... of each
    WORKERS: Count = 2  # runs at a time, each on a core of its own
    RUNS: str = "runs/methods"  # folder of the runs
    OUT: str = str(FOLDER / "assets")  # folder for tables and pictures


STEPS = 100
COMMON = (
    f"DATASET=examples/larger_numbers NUM_BATCHES={STEPS} NUM_TEST_QUESTIONS=256 EVAL_EVERY=10 "
    f"EVAL_QUESTIONS=128 LOG_ANSWERS_EVERY=0 SAVE_INTERVAL_STEPS={STEPS}"
)
TEACHER = "DATASET=examples/larger_numbers NUM_BATCHES=400 SEED=1000 EVAL_EVERY=0 LOG_ANSWERS_EVERY=0"
PASS_AT = (1, 8, 64)
PASS_QUESTIONS = 128  # from the top of the test file, 64 answers each
RESAMPLES = 10_000

OLD = "ROLLOUTS=one-step-ahead"
ZERO_ONE = "REWARDS=correctness_reward"
DISTILLED = "TEACHER={teacher} ADVANTAGE=none BETA=1.0"
PAIRS = "NUM_GENERATIONS=2 BATCH_SIZE=64"  # as many answers per step
NO_CLIP = "EPSILON=1000000"
# By name: constants, and the method that it is compared with. Those that answer a question come first.
METHODS = {
    "GRPO": ("", ""),
    "GRPO, 0/1 reward": (ZERO_ONE, "GRPO"),
    "MaxRL": (f"{ZERO_ONE} ADVANTAGE=maxrl", "GRPO, 0/1 reward"),
    "distillation": (f"{DISTILLED} KL_LOSS_MODE=mse_kl", "GRPO"),
    "mean only": ("ADVANTAGE=centered", "GRPO"),
    "no KL": ("BETA=0.0", "GRPO"),
    "no clip": (NO_CLIP, "GRPO"),
    "pairs": (PAIRS, "GRPO"),
    "none of the four": (f"ADVANTAGE=centered BETA=0.0 {NO_CLIP} {PAIRS}", "GRPO"),
    "random rewards": ("REWARD_FUNC=examples/random_points.py REWARDS=random_points", "GRPO"),
    "GDPO": ("ADVANTAGE=gdpo", "GRPO"),
    "curriculum": ("ROLLOUTS=curriculum", "GRPO"),
    "Dr. GRPO": ("BETA=0.0 ADVANTAGE=centered LOSS_AGG_MODE=seq-mean-token-sum-norm", "GRPO"),
    "RLOO": ("ADVANTAGE=rloo LOSS_AGG_MODE=seq-mean-token-sum", "GRPO"),
    "GSPO": ("BETA=0.0 LOSS_ALGO=gspo-token EPSILON=0.05", "GRPO"),
    "CISPO": ("BETA=0.0 LOSS_ALGO=cispo EPSILON_HIGH=4.0 LOSS_AGG_MODE=token-mean", "GRPO"),
    "DAPO": (
        "BETA=0.0 LOSS_ALGO=dapo LOSS_AGG_MODE=token-mean EPSILON_HIGH=0.28 MASK_OVERLONG=True "
        "OVERLONG_BUFFER=6 ZERO_VARIANCE_GROUPS=refill",
        "GRPO",
    ),
    "one step old": (OLD, "GRPO"),
    "one step old, token capped": (f"{OLD} SAMPLER_CORRECTION=2.0", "one step old"),
    "one step old, token masked": (f"{OLD} SAMPLER_CORRECTION=2.0 SAMPLER_WEIGHT=token-mask", "one step old"),
    "one step old, answer capped": (f"{OLD} SAMPLER_CORRECTION=2.0 SAMPLER_WEIGHT=sequence", "one step old"),
    "one step old, answer masked": (
        f"{OLD} SAMPLER_CORRECTION=2.0 SAMPLER_WEIGHT=sequence-mask",
        "one step old",
    ),
    "distillation, k3": (f"{DISTILLED} KL_LOSS_MODE=low_var_kl", "distillation"),
    "entropy bonus": ("ENTROPY_COEF=0.01", "GRPO"),
}


# %% Runs: each method in a process of its own --------------------------------------------------------------
def folder_of(c: Constants, method: str, seed: int) -> Path:
    """Of a run."""
    words = "".join(letter if letter.isalnum() else "_" for letter in method)
    return Path(c.RUNS).resolve() / f"{words}_{seed}"


def arguments_of(c: Constants, method: str) -> list[str]:
    """A method's constants, those of all runs included, without the seed."""
    own = METHODS[method][0] if method in METHODS else f"METHOD={Path(c.METHOD).resolve()}"
    return f"{COMMON} {own.format(teacher=Path(c.RUNS).resolve() / 'teacher_hf')}".split()


def run_seeds(c: Constants, method: str, core: int) -> None:
    """Trains a method's missing seeds one after another, and counts the right answers of each."""
    os.sched_setaffinity(0, {core})
    os.chdir(ROOT)
    settings.quiet()
    settings.run(lambda _: [run(c, method, seed) for seed in range(c.SEEDS)])


def run(c: Constants, method: str, seed: int) -> None:
    """One run of the main script, unless it has been, and its counts."""
    from machine import commit, versions

    import grpo_llama3_1_8b_demo as demo
    from tools import pass_at_k

    folder, arguments = folder_of(c, method, seed), [*arguments_of(c, method), f"SEED={seed}"]
    if (folder / "measured.json").exists():
        return
    started = time.process_time()
    (folder / "pass").mkdir(parents=True, exist_ok=True)
    with (
        open(folder / "said.txt", "a") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        demo.main([*arguments, f"RUN_DIR={folder}"])
        seconds = time.process_time() - started
        asked = pass_at_k.Constants(
            SAMPLES=max(PASS_AT),
            NUM_QUESTIONS=PASS_QUESTIONS,
            RUN_DIR=str(folder / "pass"),
            REWARD_FUNC=next((a.partition("=")[2] for a in arguments if a.startswith("REWARD_FUNC")), ""),
        )
        counts = pass_at_k.kept_counts(asked, str(folder), trained=True)["strict"]
    command = "python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py " + " ".join(arguments)
    measured = {
        "right_of_64": counts,
        "cpu_seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": versions("jax", "flax", "optax", "google-tunix", "maxtext"),
        "command": command.replace(f"{c.RUNS}", "runs/methods").replace(f"{ROOT}/", ""),
    }
    (folder / "measured.json").write_text(json.dumps(measured) + "\n")


def make_teacher(c: Constants, core: int) -> None:
    """Trains the model that distillation learns from: GRPO itself, four times as long, a seed of its own."""
    os.sched_setaffinity(0, {core})
    os.chdir(ROOT)
    settings.quiet()
    folder, target = (Path(c.RUNS).resolve() / name for name in ("teacher", "teacher_hf"))
    if target.exists():
        return

    def make(_):
        import grpo_llama3_1_8b_demo as demo
        from tools import convert_checkpoint

        demo.main([*TEACHER.split(), f"RUN_DIR={folder}"])
        convert_checkpoint.main([f"SOURCE={folder}", f"TARGET={target}"])

    settings.run(make)


def run_all(c: Constants, methods: Sequence[str]) -> None:
    """Every method, WORKERS at a time.

    Raises:
        SystemExit: a run failed; it has said why.
    """
    from tqdm import tqdm

    context, cores = multiprocessing.get_context("spawn"), queue.Queue()
    for core in sorted(os.sched_getaffinity(0))[: c.WORKERS]:
        cores.put(core)

    def in_a_process(target, *arguments) -> None:
        core = cores.get()
        process = context.Process(target=target, args=(c, *arguments, core))
        process.start()
        process.join()
        cores.put(core)
        if process.exitcode:
            raise SystemExit(process.exitcode)

    def measured(method: str) -> int:
        return sum((folder_of(c, method, seed) / "measured.json").exists() for seed in range(c.SEEDS))

    ended = threading.Event()

    def show() -> None:
        with tqdm(total=len(methods) * c.SEEDS, desc="runs", disable=None) as bar:
            while not ended.wait(2):
                bar.update(sum(map(measured, methods)) - bar.n)

    showing = threading.Thread(target=show)
    missing = [method for method in methods if measured(method) < c.SEEDS]
    if any("{teacher}" in METHODS.get(method, ("",))[0] for method in missing):
        in_a_process(make_teacher)
    showing.start()
    try:
        with ThreadPoolExecutor(cores.qsize()) as pool:
            for future in [pool.submit(in_a_process, run_seeds, method) for method in missing]:
                try:
                    future.result()
                except SystemExit:
                    pool.shutdown(cancel_futures=True)
                    raise
    finally:
        ended.set()
        showing.join()


# %% Figures ------------------------------------------------------------------------------------------------
def collect(c: Constants, methods: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line per run and a line per evaluation, from the runs' folders."""
    import numpy as np
    from machine import processor

    from tools.pass_at_k import pass_at_k

    lines, curves = [], []
    for method in methods:
        for seed in range(c.SEEDS):
            folder = folder_of(c, method, seed)
            measured = json.loads((folder / "measured.json").read_text())
            result = json.loads((folder / "result.json").read_text())
            with open(folder / "train_log.csv", newline="") as file:
                log = list(csv.DictReader(file))
            graded = np.cumsum([0, *(int(row["answers"]) for row in log)]).tolist()
            right = np.array(measured["right_of_64"])
            last = log[-10:]
            line = {"method": method, "seed": seed, "graded": graded[-1]}
            line |= {f"pass_at_{k}": round(pass_at_k(right, 64, k).mean(), 5) for k in PASS_AT}
            line |= {"greedy": result["after"]["greedy_answer_accuracy"]}
            line |= {"format": result["after"]["format_accuracy"]}
            line |= {
                name: round(np.mean([float(row[name]) for row in last]), 5) for name in ("entropy", "length")
            }
            line |= {
                name: measured[name] for name in ("cpu_seconds", "date", "commit", "versions", "command")
            }
            lines.append(line | {"machine": processor()})
            evaluations = map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
            curves += [
                {"method": method, "seed": seed, "step": e["step"], "graded": graded[e["step"]],
                 "held_out": e["answer_accuracy"], "held_out_greedy": e["greedy_answer_accuracy"]}
                for e in evaluations
            ]  # fmt: skip
    return lines, curves


def difference(lines: Sequence[dict[str, Any]], method: str, other: str, figure: str) -> tuple[float, ...]:
    """Mean of the paired differences over the seeds, and its 95 % interval (percentile bootstrap)."""
    import numpy as np

    mine, theirs = (
        {line["seed"]: float(line[figure]) for line in lines if line["method"] == name}
        for name in (method, other)
    )
    pairs = np.array([mine[seed] - theirs[seed] for seed in mine if seed in theirs])
    means = pairs[np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))].mean(axis=1)
    return float(pairs.mean()), *np.percentile(means, (2.5, 97.5)).tolist()


def answers_until(curves, method: str, share: float = 0.9) -> list[int]:
    """By seed, the answers graded until two evaluations in a row have `share` of the best method's mean.

    The best is taken over all methods' last evaluations, each a mean over the seeds. A run that does not get
    there is left out.
    """
    import numpy as np

    last = [row for row in curves if row["step"] == STEPS]
    names = dict.fromkeys(row["method"] for row in last)
    best = max(np.mean([row["held_out"] for row in last if row["method"] == name]) for name in names)
    reached = []
    for seed in sorted({row["seed"] for row in curves if row["method"] == method}):
        rows = [row for row in curves if (row["method"], row["seed"]) == (method, seed)]
        for before, row in itertools.pairwise(rows):
            if min(before["held_out"], row["held_out"]) >= share * best:
                reached.append(row["graded"])
                break
    return reached


def table(lines, curves) -> list[str]:
    """The table of the page, in Markdown; one line per method, figures in percent, tokens or nats."""
    import numpy as np

    text = [
        "| method | answers graded | pass@1 | pass@8 | pass@64 | greedy | entropy | length "
        "| answers to 90 % of the best | pass@1 less its counterpart's |",
        "|" + "---|" * 10,
    ]
    for method in dict.fromkeys(line["method"] for line in lines):
        mine = [line for line in lines if line["method"] == method]
        of = {
            name: np.array([float(line[name]) for line in mine])
            for name in ("graded", *(f"pass_at_{k}" for k in PASS_AT), "greedy", "entropy", "length")
        }
        cells = [f"{of['graded'].mean():,.0f}"]
        for name in (*(f"pass_at_{k}" for k in PASS_AT), "greedy"):
            std = f" ± {100 * of[name].std(ddof=1):.1f}" if len(mine) > 1 else ""
            cells.append(f"{100 * of[name].mean():.1f}{std}")
        reached = answers_until(curves, method)
        until = f"{np.median(reached):,.0f}" if 2 * len(reached) > len(mine) else "–"
        until += "" if len(reached) == len(mine) else f" ({len(reached)} of {len(mine)})"
        other, less = METHODS.get(method, ("", "GRPO"))[1], "–"
        if other and any(line["method"] == other for line in lines):
            value, low, high = (100 * x for x in difference(lines, method, other, "pass_at_1"))
            less = f"{value:+.1f} ({low:+.1f} … {high:+.1f})".replace("-", "−")
        cells += [f"{of['entropy'].mean():.3f}", f"{of['length'].mean():.1f}", until, less]
        text.append(f"| {method} | " + " | ".join(cells) + " |")
    return text


# %% Pictures -----------------------------------------------------------------------------------------------
EDGE = -9.0  # points
DROPPED = ("mean only", "no clip", "no KL", "pairs", "none of the four")


def draw_differences(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Each method less its counterpart, with intervals: one answer on the left, the best of 64 beside it."""
    import matplotlib.pyplot as plt

    present = {line["method"] for line in lines}
    pairs = [(m, other) for m, (_, other) in METHODS.items() if other and {m, other} <= present]
    pairs += [(m, "GRPO") for m in sorted(present - METHODS.keys()) if "GRPO" in present]
    pairs.sort(key=lambda pair: pair[0] not in DROPPED)
    if not pairs:
        return
    figure, halves = plt.subplots(
        1, 2, figsize=(11, 1.2 + 0.3 * len(pairs)), sharey=True, layout="constrained"
    )
    titles = {"pass_at_1": "one answer (pass@1)", "pass_at_64": "the best of 64 (pass@64)"}
    for axes, (name, title) in zip(halves, titles.items(), strict=True):
        for y, (method, other) in enumerate(pairs):
            value, low, high = (100 * x for x in difference(lines, method, other, name))
            color = "#999999" if low <= 0 <= high else "#1f77b4" if value > 0 else "#d62728"
            axes.plot([low, high], [y, y], color=color, lw=2)
            axes.plot(value, y, "o", color=color)
            if value < EDGE:  # off the picture
                axes.text(EDGE, y, f" ← {value:.0f}".replace("-", "−"), va="center", color=color)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_xlim(left=max(EDGE, axes.get_xlim()[0]))
        axes.set(title=title, xlabel="points more than its counterpart, 95 % interval")
    halves[0].set_yticks(range(len(pairs)), [f"{m}  (less {o})" if o != "GRPO" else m for m, o in pairs])
    halves[0].invert_yaxis()
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def pass_at_all_k(c: Constants, methods: Sequence[str]) -> list[dict[str, Any]]:
    """pass@k for k = 1, 2, ... 64, before training and of each method: mean, lowest and highest seed."""
    import numpy as np

    from tools.pass_at_k import Constants as Asked
    from tools.pass_at_k import kept_counts, pass_at_k

    asked = Asked(SAMPLES=64, NUM_QUESTIONS=PASS_QUESTIONS, RUN_DIR=str(Path(c.RUNS).resolve()))
    before = kept_counts(asked, str(folder_of(c, "GRPO", 0)), trained=False)["strict"]
    counts = {"untrained": [before]}
    for method in methods:
        files = [folder_of(c, method, seed) / "measured.json" for seed in range(c.SEEDS)]
        counts[method] = [json.loads(file.read_text())["right_of_64"] for file in files]
    rows = []
    for method, of_seeds in counts.items():
        for k in (1, 2, 4, 8, 16, 32, 64):
            values = [pass_at_k(np.array(right), 64, k).mean() for right in of_seeds]
            ends = {"mean": np.mean(values), "lowest": min(values), "highest": max(values)}
            rows.append({"method": method, "k": k} | {name: round(x, 5) for name, x in ends.items()})
    return rows


def draw_pass_at_k(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Question one: does MaxRL keep what only many answers find?"""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    colors = {"untrained": "#888888", "GRPO, 0/1 reward": "black", "MaxRL": "#1f77b4"}
    for method, color in colors.items():
        mine = [row for row in rows if row["method"] == method]
        if not mine:
            continue
        ks, means, low, high = ([row[name] for row in mine] for name in ("k", "mean", "lowest", "highest"))
        axes.plot(ks, means, color=color, marker="o", ms=3, label=method)
        axes.fill_between(ks, low, high, color=color, alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, map(str, ks))
    axes.set(xlabel="k, answers per question", ylabel="share of questions with a right one")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def draw_dense(path: Path, curves: Sequence[dict[str, Any]]) -> None:
    """Question two: what a signal at every token buys."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for method, color in {"GRPO": "black", "distillation": "#1f77b4"}.items():
        mine = [row for row in curves if row["method"] == method]
        if not mine:
            continue
        steps = sorted({row["step"] for row in mine})
        shares = [[row["held_out"] for row in mine if row["step"] == step] for step in steps]
        graded = [np.mean([row["graded"] for row in mine if row["step"] == step]) for step in steps]
        axes.plot(graded, [np.mean(s) for s in shares], color=color, label=method)
        axes.fill_between(
            graded, list(map(min, shares)), list(map(max, shares)), color=color, alpha=0.15, lw=0
        )
    axes.set(xlabel="answers drawn", ylabel="held-out questions right, one answer", ylim=(0, 1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def read(path: Path) -> list[dict[str, Any]]:
    """A CSV file of `write`, numbers as numbers."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    with open(path, newline="") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """A CSV file."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main(arguments: Sequence[str]) -> None:
    """Runs what is missing, then tables and pictures."""
    c = settings.read(Constants, arguments)
    own = [Path(c.METHOD).stem] if c.METHOD else []
    known = [*METHODS, *own]
    methods = [name.strip() for name in c.METHODS.split(";") if name.strip()] or known
    for name in methods:
        if name not in known:
            raise UserError(f"METHODS={c.METHODS}: no method {name!r}; there are {'; '.join(known)}")
    run_all(c, [*own, *(m for m in methods if m not in own)])
    lines, curves = collect(c, methods)
    out = Path(c.OUT)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "methods.csv", lines)
    write(out / "methods_curves.csv", curves)
    by_k = pass_at_all_k(c, methods)
    write(out / "methods_pass_at_k.csv", by_k)
    draw_differences(out / "methods.png", lines)
    draw_pass_at_k(out / "methods_pass_at_k.png", by_k)
    draw_dense(out / "methods_dense.png", curves)
    print("\n".join(table(lines, curves)))


if __name__ == "__main__":
    settings.run(main)
