"""Health lines: what a training log says in words when one of its figures leaves the healthy range.

Nothing crashes when a GRPO run goes wrong: the loss stays finite, the bar moves on, and after a night
nothing was learned. So each line says what is seen, the likely cause, and the constant to turn. The main
script prints a line when it first holds, and repeats all of them in report.md. For a log already there:

    python 5_GRPO_Maxtext/health.py runs/mine

A figure here is the median over WINDOW steps: one odd batch raises no alarm, and the KL estimate (k3) has a
long tail. "At first" means the first WINDOW steps of the log.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

WINDOW = 5  # steps that a figure must last: with fewer every odd batch speaks, with more help comes late
NO_SIGNAL = 0.9  # share of zero-variance groups: nine tenths of the generation is paid for nothing
ALIKE = 1.5  # distinct answers a group: between one and two
SOLVED = 0.9  # share of right answers at which few groups with signal, or little entropy, are success
NEVER_STOPS = 0.9  # share of answers cut off at the limit: a model that knows how to stop is far below
OFTEN_CUT = 0.3  # share of answers cut off from which the limit decides about many of them
KL_HIGH = 0.5  # nats a token: an answer of 15 tokens is e^7.5 times likelier than it was
FORMAT_LEARNED, FORMAT_GAIN = 0.9, 0.2  # share of well-formed answers, and how much it has risen
ACCURACY_GAIN = 0.05  # above twice the standard error of 5 steps of 128 answers; less than it is flat
COLLAPSED = 0.1  # of the entropy at first; a healthy run keeps a fifth (assets/train_log.csv)
SHARP = 0.01  # nats a token: with less entropy at first there is nothing to collapse
LONGER = 1.4  # times the length at first; assets/train_log.csv stays within 1.1
CLIPPED = 0.1  # share of clipped tokens, which teach nothing; most tokens are certain and never clip
GRADIENT = 10  # times MAX_GRAD_NORM: the clip, not the gradient, sizes the update
WORSE = 0.5  # of the spread inside a group at first: that much less reward than the untrained model got


def check(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> dict[str, str]:
    """What is wrong at the last of these steps.

    Args:
        rows: of `train_log.csv`, in the order of the steps; a column that is missing or NaN is not judged.
        constants: of the run, by name.

    Returns:
        One sentence for each thing that is wrong, by its kind; empty if all is well, and while there are
        fewer than WINDOW rows.
    """
    if len(rows) < WINDOW:
        return {}

    def median(name: str, part: Sequence[Mapping[str, float]]) -> float:
        return float(np.median([row.get(name, np.nan) for row in part]))

    def at_first(name: str) -> float:
        return median(name, rows[:WINDOW])

    def now(name: str) -> float:
        return median(name, rows[-WINDOW:])

    def turn(*names: str) -> str:
        return ", ".join(f"{name}={constants[name]}" for name in names)

    found = {}
    # A comparison with NaN is false: what is not logged is not judged.
    if now("zero_variance") >= NO_SIGNAL:
        seen = f"in {now('zero_variance'):.0%} of the groups all answers earn the same, and teach nothing"
        if now("correct") >= SOLVED:
            found["solved"] = (
                f"{seen}; {now('correct'):.0%} are right: nothing is left to learn here. Take harder "
                f"questions ({turn('DATASET')}), or stop earlier ({turn('NUM_BATCHES')})"
            )
        elif now("distinct") <= ALIKE:
            found["alike"] = (
                f"{seen}; of {turn('NUM_GENERATIONS')} answers {now('distinct'):.1f} differ: sampling is too "
                f"narrow. Raise {turn('TEMPERATURE')}, widen {turn('TOP_K', 'TOP_P')}"
            )
        else:
            found["no_signal"] = (
                f"{seen}, though they differ: the rewards see no difference, mostly because none is right "
                f"({now('correct'):.0%}). Take easier questions ({turn('DATASET')}) or rewards with more "
                f"steps (reward_func.py), look at the prompt (TEMPLATE), or raise {turn('NUM_GENERATIONS')}"
            )
    if now("cut_off") >= NEVER_STOPS and at_first("cut_off") >= NEVER_STOPS:
        found["never_stops"] = (
            f"{now('cut_off'):.0%} of the answers never end, from the first step on: a wrong chat template, "
            "or an end-of-sequence token that the model never learned to write. Look at the tokenizer of "
            f"{turn('MODEL')} and at TEMPLATE; if answers are simply longer, raise "
            f"{turn('TOTAL_GENERATION_STEPS')}"
        )
    elif now("length") >= LONGER * at_first("length"):
        found["longer"] = (
            f"answers have grown from {at_first('length'):.1f} to {now('length'):.1f} tokens, "
            f"{now('cut_off'):.0%} are cut off: a reward that pays for length, or the loss, which divides a "
            "wrong answer's penalty by its length (LOSS_AGG_MODE has others). Look at reward_func.py, lower "
            f"{turn('LEARNING_RATE')}, raise {turn('BETA')}"
        )
    elif now("cut_off") >= OFTEN_CUT:
        found["cut_off"] = (
            f"{now('cut_off'):.0%} of the answers are cut off at the limit, and graded without their end: "
            f"raise {turn('TOTAL_GENERATION_STEPS')}, or leave them out of the loss (MASK_OVERLONG)"
        )
    if now("kl") >= KL_HIGH:
        found["kl"] = (
            f"the KL to the starting model is {now('kl'):.2g} a token: the updates are too large. Lower "
            f"{turn('LEARNING_RATE')} or {turn('MAX_GRAD_NORM')}, or raise {turn('BETA')}"
        )
    if (
        now("format_ok") >= max(FORMAT_LEARNED, at_first("format_ok") + FORMAT_GAIN)
        and now("correct") < min(SOLVED, at_first("correct") + ACCURACY_GAIN)
    ):  # fmt: skip
        found["format_only"] = (
            f"the format is learned ({at_first('format_ok'):.0%} to {now('format_ok'):.0%}), the answers are "
            f"not ({at_first('correct'):.0%} to {now('correct'):.0%} right): too hard, wrong answers in the "
            f"data, or too many points for form. Check {turn('DATASET')} and the points in reward_func.py, "
            f"raise {turn('NUM_GENERATIONS')}"
        )
    if at_first("entropy") > SHARP and now("entropy") <= COLLAPSED * at_first("entropy") and (
        now("correct") < SOLVED
    ):  # fmt: skip
        found["entropy"] = (
            f"the entropy has fallen from {at_first('entropy'):.2g} to {now('entropy'):.2g} a token while "
            f"only {now('correct'):.0%} are right: the model has settled too early. Lower "
            f"{turn('LEARNING_RATE')}, raise {turn('BETA')} or {turn('TEMPERATURE')}"
        )
    if now("clip_fraction") >= CLIPPED:
        found["clipped"] = (
            f"{now('clip_fraction'):.0%} of the tokens are clipped and teach nothing: too many or too large "
            f"updates on the same answers. Lower {turn('NUM_ITERATIONS')} or {turn('LEARNING_RATE')}"
        )
    limit = float(constants["MAX_GRAD_NORM"])
    if limit and now("grad_norm") >= GRADIENT * limit:  # 0: nothing is cut
        found["gradient"] = (
            f"the gradient's norm is {now('grad_norm'):.2g} ({turn('MAX_GRAD_NORM')}): the loss is steep and "
            f"nearly every update is cut. Lower {turn('LEARNING_RATE')}, or raise MAX_GRAD_NORM"
        )
    if now("reward") < at_first("reward") - WORSE * at_first("reward_std"):
        found["worse"] = (
            f"the reward has fallen from {at_first('reward'):.2f} to {now('reward'):.2f}, below the "
            f"untrained model's: training does harm. Lower {turn('LEARNING_RATE')} or {turn('MAX_GRAD_NORM')}"
        )
    return found


def history(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> Iterator[str]:
    """Every line of a whole log, where it begins to hold: "step N: ..."; arguments as in `check`."""
    before: dict[str, str] = {}
    for i, row in enumerate(rows, start=1):
        # the first rows and the last are all that `check` looks at
        found = check([*rows[: min(i, WINDOW)], *rows[max(i - WINDOW, WINDOW) : i]], constants)
        yield from (f"step {row['step']:.0f}: {line}" for kind, line in found.items() if kind not in before)
        before = found


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a `train_log.csv`; an empty list if there is none."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def main() -> None:
    """Prints the health lines of a run's folder."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "constants.json").is_file():
        print("error: give the folder of a run (with train_log.csv and constants.json)", file=sys.stderr)
        sys.exit(2)
    folder = Path(sys.argv[1])
    rows = read_log(folder / "train_log.csv")
    lines = list(history(rows, json.loads((folder / "constants.json").read_text())))
    print("\n".join(lines) or f"{len(rows)} steps, and nothing to report")


if __name__ == "__main__":
    main()
