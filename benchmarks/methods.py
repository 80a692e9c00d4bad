"""What does each method buy? Every variant of GRPO on a task that can tell them apart, seven seeds
each.

    python benchmarks/methods.py                      # all of them; goes on where it stopped
    python benchmarks/methods.py METHOD=my_method.py        # and yours: a file with one function
    python benchmarks/methods.py METHODS="GRPO;MaxRL" SEEDS=3 OUT=runs/short  # some of them

The task is examples/larger_numbers. Folder 5's docs/learn/methods.md says how we chose it and what
we found. Two runs go at a time, each on its own core, and are kept in runs/measure: what's there
isn't run again.

Written to OUT: `methods.csv` (a line per run), `methods_curves.csv` (a line per run and
evaluation), `methods_pass_at_k.csv`, and a picture of eight methods and yours; the table is printed
as Markdown.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "5_GRPO_Maxtext"
sys.path[:0] = [str(FOLDER), str(ROOT)]

from measure import pictures, tables
from measure.columns import mean_of_pairs, read_json
from measure.run import Run, perform_all

import settings
from settings import Count, UserError


# %% Constants -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Edit a value here, or give it for one call as NAME=value."""

    # Python file with a piece of the loss (docs/learn/methods.md); joins the table as its name
    METHOD: str = ""
    METHODS: str = ""  # names, divided by semicolons (empty = all, and METHOD)
    SEEDS: Count = 7  # seeds 0, 1, ... of each
    WORKERS: Count = 2  # runs at a time, each on a core of its own
    OUT: str = str(FOLDER / "assets")  # folder for tables and picture


STEPS = 100
COMMON = (
    f"DATASET=examples/larger_numbers NUM_BATCHES={STEPS} NUM_TEST_QUESTIONS=256 EVAL_EVERY=10 "
    f"EVAL_QUESTIONS=128 LOG_ANSWERS_EVERY=0 SAVE_INTERVAL_STEPS={STEPS}"
)
TEACHER = (
    "DATASET=examples/larger_numbers NUM_BATCHES=400 SEED=1000 EVAL_EVERY=0 LOG_ANSWERS_EVERY=0"
)
PASS_AT = (1, 8, 64)
PASS_QUESTIONS = 128  # from the top of the test file, 64 answers each

OLD = "ROLLOUTS=one-step-ahead"
ZERO_ONE = "REWARDS=correctness_reward"
DISTILLED = "TEACHER={teacher} ADVANTAGE=none BETA=1.0"
PAIRS = "NUM_GENERATIONS=2 BATCH_SIZE=64"  # as many answers per step
NO_CLIP = "EPSILON=1000000"
# By name: constants, and the method that it is compared with. Those that answer a question come
# first.
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
    "DAPO": (
        "BETA=0.0 LOSS_ALGO=dapo LOSS_AGG_MODE=token-mean EPSILON_HIGH=0.28 MASK_OVERLONG=True "
        "OVERLONG_BUFFER=6 ZERO_VARIANCE_GROUPS=refill",
        "GRPO",
    ),
    "one step old": (OLD, "GRPO"),
    "one step old, token capped": (f"{OLD} SAMPLER_CORRECTION=2.0", "one step old"),
    "distillation, k3": (f"{DISTILLED} KL_LOSS_MODE=low_var_kl", "distillation"),
    "entropy bonus": ("ENTROPY_COEF=0.01", "GRPO"),
}


# %% Runs ------------------------------------------------------------------------------------------
SCRIPT, TOOL = FOLDER / "grpo_llama3_1_8b_demo.py", FOLDER / "tool.py"
STORE, TEACHER_HF = ROOT / "runs" / "measure", "runs/methods/teacher_hf"


def run_of(c: Constants, method: str, seed: int) -> Run:
    """A method's training with a seed."""
    own = METHODS[method][0] if method in METHODS else f"METHOD={Path(c.METHOD).resolve()}"
    return Run(SCRIPT, tuple(f"{COMMON} {own.format(teacher=TEACHER_HF)} SEED={seed}".split()))


def asked_of(c: Constants, method: str) -> Run:
    """The right answers among 64, of all seeds' last checkpoints and of the untrained model."""
    runs = [run_of(c, method, seed) for seed in range(c.SEEDS)]
    reward = [word for word in runs[0].arguments if word.startswith("REWARD_FUNC")]
    folders = ",".join(str(run.folder(STORE)) for run in runs)
    words = f"CHECKPOINT={folders}", f"SAMPLES={max(PASS_AT)}", f"NUM_QUESTIONS={PASS_QUESTIONS}"
    return Run(TOOL, ("pass_at_k", *words, *reward))


def make_teacher() -> None:
    """Trains the model that distillation learns from: GRPO itself, four times as long, a seed of
    its own.
    """
    teacher = Run(SCRIPT, tuple(TEACHER.split()))
    perform_all([teacher], {}, STORE, workers=1)
    words = ["convert_checkpoint", f"SOURCE={teacher.folder(STORE)}", f"TARGET={TEACHER_HF}"]
    subprocess.run([sys.executable, TOOL, *words], cwd=ROOT, check=True)


def run_all(c: Constants, methods: Sequence[str]) -> None:
    """Every method, WORKERS at a time and seed by seed; SystemExit where a run fails."""
    if (
        any("{teacher}" in METHODS.get(m, ("",))[0] for m in methods)
        and not (ROOT / TEACHER_HF).exists()
    ):
        make_teacher()
    perform_all(
        [run_of(c, m, seed) for seed in range(c.SEEDS) for m in methods], {}, STORE, c.WORKERS
    )
    perform_all([asked_of(c, m) for m in methods], {}, STORE, c.WORKERS)


# %% Figures ---------------------------------------------------------------------------------------
def collect(c: Constants, methods: Sequence[str]) -> tuple[pd.DataFrame, ...]:
    """A line per run, per evaluation, and per method and k, from the runs' folders."""
    lines, curves, by_k = [], [], []
    for method in methods:
        asked = pd.read_csv(asked_of(c, method).folder(STORE) / "pass_at_k.csv")
        asked = asked[asked.reading == "strict"]
        trained = asked[asked.model != "untrained"]
        if not by_k:
            by_k.append(asked[asked.model == "untrained"].assign(method="untrained"))
        by_k.append(trained.assign(method=method))
        for seed, (_, right) in enumerate(trained.groupby("model", sort=False)):
            folder = run_of(c, method, seed).folder(STORE)
            measured = read_json(folder / "measured.json")
            after = read_json(folder / "result.json")["after"]
            log = pd.read_csv(folder / "train_log.csv")
            graded = [0, *log.answers.cumsum()]
            of_k = {f"pass_at_{k}": right.pass_at_k[right.k == k].item() for k in PASS_AT}
            line = {"method": method, "seed": seed, "graded": graded[-1]} | of_k
            line |= {"greedy": after["greedy_answer_accuracy"], "format": after["format_accuracy"]}
            line |= log[["entropy", "length", "zero_variance"]].tail(10).mean().round(5)
            names = "processor_seconds", "date", "commit", "versions", "command", "machine"
            lines.append(line | {name: measured[name] for name in names})
            curves += [
                {
                    "method": method,
                    "seed": seed,
                    "step": e["step"],
                    "graded": graded[e["step"]],
                    "held_out": e["answer_accuracy"],
                    "held_out_greedy": e["greedy_answer_accuracy"],
                }
                for e in map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
            ]
    shares = pd.concat(by_k).groupby(["method", "k"], sort=False).pass_at_k
    ends = shares.agg(mean="mean", lowest="min", highest="max").round(5)
    return pd.DataFrame(lines), pd.DataFrame(curves), ends.reset_index()


def difference(lines: pd.DataFrame, method: str, other: str, figure: str) -> tuple[float, ...]:
    """A figure of a method less that of another, over the seeds: see `mean_of_pairs`."""
    of = lines.pivot(index="seed", columns="method", values=figure)
    return mean_of_pairs((of[method] - of[other]).dropna().to_numpy())


def answers_until(curves: pd.DataFrame, method: str, share: float = 0.9) -> list[int]:
    """By seed, the answers graded until two evaluations in a row have `share` of the best method's
    mean.

    The best is taken over all methods' last evaluations, each a mean over the seeds. A run that
    does not get there is left out.
    """
    best = curves[curves.step == STEPS].groupby("method").held_out.mean().max()
    reached = []
    for _, rows in curves[curves.method == method].groupby("seed"):
        twice = rows.held_out.rolling(2).min() >= share * best
        reached += rows.graded[twice].head(1).tolist()
    return reached


def table(lines: pd.DataFrame, curves: pd.DataFrame) -> list[list[str]]:
    """The table of the page; one line per method, figures in percent, tokens or nats."""
    cells = [
        "method",
        "answers graded",
        "pass@1",
        "pass@8",
        "pass@64",
        "greedy",
        "entropy",
        "length",
    ]
    text = [[*cells, "answers to 90 % of the best", "pass@1 less its counterpart's"]]
    for method, mine in lines.groupby("method", sort=False):
        cells = [method, f"{mine.graded.mean():,.0f}"]
        for name in (*(f"pass_at_{k}" for k in PASS_AT), "greedy"):
            std = f" ± {100 * mine[name].std():.1f}" if len(mine) > 1 else ""
            cells.append(f"{100 * mine[name].mean():.1f}{std}")
        reached = answers_until(curves, method)
        until = f"{np.median(reached):,.0f}" if 2 * len(reached) > len(mine) else "–"
        until += "" if len(reached) == len(mine) else f" ({len(reached)} of {len(mine)})"
        other, less = METHODS.get(method, ("", "GRPO"))[1], "–"
        if other in set(lines.method):
            value, low, high = (100 * x for x in difference(lines, method, other, "pass_at_1"))
            less = f"{value:+.1f} ({low:+.1f} … {high:+.1f})".replace("-", "−")
        cells += [f"{mine.entropy.mean():.3f}", f"{mine.length.mean():.1f}", until, less]
        text.append(cells)
    return text


def main(arguments: Sequence[str]) -> None:
    """Runs what is missing, then tables and picture."""
    c = settings.read(Constants, arguments)
    own = [Path(c.METHOD).stem] if c.METHOD else []
    known = [*METHODS, *own]
    methods = [name.strip() for name in c.METHODS.split(";") if name.strip()] or known
    for name in methods:
        if name not in known:
            raise UserError(
                f"METHODS={c.METHODS}: no method {name!r}; there are {'; '.join(known)}"
            )
    run_all(c, [*own, *(m for m in methods if m not in own)])
    lines, curves, by_k = collect(c, methods)
    out = Path(c.OUT)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("methods", lines), ("methods_curves", curves), ("methods_pass_at_k", by_k)):
        rows.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
    pictures.save(pictures.methods(out / "methods.csv"), out / "methods.svg")
    print(tables.markdown(table(lines, curves)))


if __name__ == "__main__":
    settings.run(main)
