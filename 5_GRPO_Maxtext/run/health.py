"""Health lines: one sentence for each metric of a training log that leaves its healthy range.

Nothing crashes when a GRPO run goes wrong: the loss stays finite, the progress bar advances, and nothing is
learned. So each line says what is seen, the likely cause, and which constant to change. The main script
prints a line when it begins to hold and repeats all of them in its report; tools/show_run.py prints those of
any run.

A metric here is the median over WINDOW steps: one odd batch raises no alarm, and the KL estimate (k3) has a
long tail. "At first" means the first WINDOW steps of the log.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

WINDOW = 5  # steps; with fewer, odd batches raise alarms; with more, the alarm comes late
NO_SIGNAL = 0.9  # share of zero-variance groups; their generation costs time and gives no gradient
ALIKE = 1.5  # distinct answers per group: between one and two
SOLVED = 0.9  # share of right answers; above it few groups with signal, or little entropy, mean success
NEVER_STOPS = 0.9  # share of answers cut off at the limit; a model that has learned to stop is far below
OFTEN_CUT = 0.3  # share of answers cut off at the limit; above it the limit decides many grades
KL_HIGH = 0.5  # nats per token; an answer of 15 tokens is then e^7.5 times likelier than before training
FORMAT_LEARNED, FORMAT_GAIN = 0.9, 0.2  # share of well-formed answers, and its rise since the start
ACCURACY_GAIN = 0.05  # rise of the share of right answers; two standard errors of 5 x 128 answers are less
COLLAPSED = 0.1  # of the entropy at first; a healthy run keeps a fifth (assets/train_log.csv)
SHARP = 0.01  # nats per token; with less entropy at first, there is nothing to collapse
LONGER = 1.4  # times the length at first; assets/train_log.csv stays within 1.1
CLIPPED = 0.1  # share of clipped tokens, which give no gradient; most tokens are certain and never clip
GRADIENT = 10  # times MAX_GRAD_NORM; the clip, not the gradient, then sets the size of the update
MISMATCH = 0.03  # nats per token, uncorrected; bfloat16 kernels alone give 0.01 (SkyRL's CI asserts 0.0104)
MISMATCH_CORRECTED = 0.69  # log 2: the average token is then as far off as the usual cap corrects
WORSE = 0.5  # fall of the reward since the start, in standard deviations within a group at first
JUDGED = (
    "zero_variance", "correct", "distinct", "cut_off", "length", "kl", "format_ok", "entropy",
    "clip_fraction", "grad_norm", "mismatch", "reward", "reward_std",
)  # fmt: skip


def medians(rows: Sequence[Mapping[str, float]]) -> SimpleNamespace:
    """The median of each column in JUDGED; NaN where half of the rows or more have no number."""
    columns = {name: [row[name] for row in rows if not np.isnan(row.get(name, np.nan))] for name in JUDGED}
    known = {name: float(np.median(x)) for name, x in columns.items() if 2 * len(x) > len(rows)}
    return SimpleNamespace(**dict.fromkeys(JUDGED, np.nan) | known)


def check(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> dict[str, str]:
    """What is wrong at the last of these steps: a sentence for each fault, by its kind.

    `rows` are those of `train_log.csv` in the order of the steps; a column that most of them lack isn't
    judged, and nothing is before there are WINDOW rows.
    """
    if len(rows) < WINDOW:
        return {}
    first, now = medians(rows[:WINDOW]), medians(rows[-WINDOW:])

    def turn(*names: str) -> str:
        return ", ".join(f"{name}={constants.get(name)}" for name in names)

    # A comparison with NaN is false: what isn't logged isn't judged.
    silent = now.zero_variance >= NO_SIGNAL
    solved = silent and now.correct >= SOLVED
    alike = silent and not solved and now.distinct <= ALIKE
    same = f"in {now.zero_variance:.0%} of the groups all answers earn the same reward: no gradient"
    never_stops = now.cut_off >= NEVER_STOPS and first.cut_off >= NEVER_STOPS
    longer = not never_stops and now.length >= LONGER * first.length
    limits = turn(*["MAX_TURNS"] * bool(constants.get("ENVIRONMENT")), "TOTAL_GENERATION_STEPS")
    # RLOO's loss sums over an answer's tokens; the mean's gradient is that many times smaller.
    summed = now.length if constants.get("LOSS_AGG_MODE") == "seq-mean-token-sum" else 1
    limit = float(constants["MAX_GRAD_NORM"]) * summed  # 0: no clip
    corrected = constants.get("SAMPLER_CORRECTION")  # older runs don't have it, and no mismatch either
    faults = {
        "solved": (solved,
            f"{same}; {now.correct:.0%} are right: nothing is left to learn here. Take harder questions "
            f"({turn('DATASET')}), or stop earlier ({turn('NUM_BATCHES')})"),
        "alike": (alike,
            f"{same}; of {turn('NUM_GENERATIONS')} answers {now.distinct:.1f} differ: sampling is too "
            f"narrow. Raise {turn('TEMPERATURE')}, widen {turn('TOP_K', 'TOP_P')}"),
        "no_signal": (silent and not solved and not alike,
            f"{same}, though they differ: the rewards see no difference, usually because none is right "
            f"({now.correct:.0%}). Take easier questions ({turn('DATASET')}) or rewards with more steps "
            f"(reward_func.py), look at the prompt (TEMPLATE), or raise {turn('NUM_GENERATIONS')}"),
        "never_stops": (never_stops,
            f"{now.cut_off:.0%} of the answers never end, from the first step on: a wrong chat template, or "
            "an end-of-sequence token that the model has not learned to write. Look at the tokenizer of "
            f"{turn('MODEL')} and at TEMPLATE; if answers are simply longer, raise {limits}"),
        "longer": (longer,
            f"answers have grown from {first.length:.1f} to {now.length:.1f} tokens, {now.cut_off:.0%} are "
            "cut off: a reward that pays for length, or a loss that divides a wrong answer's penalty by its "
            "length (LOSS_AGG_MODE has others). Look at reward_func.py, lower "
            f"{turn('LEARNING_RATE')}, raise {turn('BETA')}"),
        "cut_off": (not never_stops and not longer and now.cut_off >= OFTEN_CUT,
            f"{now.cut_off:.0%} of the answers are cut off at the limit, and graded without their end: "
            f"raise {limits}, or leave them out of the loss (MASK_OVERLONG)"),
        "kl": (now.kl >= KL_HIGH,
            f"the KL to the starting model is {now.kl:.2g} nats per token: the updates are too large. "
            f"Lower {turn('LEARNING_RATE')} or {turn('MAX_GRAD_NORM')}, or raise {turn('BETA')}"),
        "format_only": (now.format_ok >= max(FORMAT_LEARNED, first.format_ok + FORMAT_GAIN)
            and now.correct < min(SOLVED, first.correct + ACCURACY_GAIN),
            f"the format is learned ({first.format_ok:.0%} to {now.format_ok:.0%}), the answers are not "
            f"({first.correct:.0%} to {now.correct:.0%} right): too hard, wrong answers in the data, or too "
            f"many points for form. Check {turn('DATASET')} and the points in reward_func.py, raise "
            f"{turn('NUM_GENERATIONS')}"),
        "entropy": (first.entropy > SHARP and now.entropy <= COLLAPSED * first.entropy
            and now.correct < SOLVED,
            f"the entropy has fallen from {first.entropy:.2g} to {now.entropy:.2g} nats per token while only "
            f"{now.correct:.0%} are right: the model has settled too early. Lower {turn('LEARNING_RATE')}, "
            f"raise {turn('BETA')} or {turn('TEMPERATURE')}"),
        "clipped": (now.clip_fraction >= CLIPPED,
            f"{now.clip_fraction:.0%} of the tokens are clipped, hence without gradient: too many or too "
            f"large updates on the same answers. Lower {turn('NUM_ITERATIONS')} or {turn('LEARNING_RATE')}"),
        "gradient": (limit and now.grad_norm >= GRADIENT * limit,
            f"the gradient's norm is {now.grad_norm:.2g} ({turn('MAX_GRAD_NORM')}): the loss is steep, and "
            f"nearly every update is cut. Lower {turn('LEARNING_RATE')}, or raise MAX_GRAD_NORM"),
        "mismatch": (now.mismatch >= (MISMATCH_CORRECTED if corrected else MISMATCH),
            f"sampler and trainer differ by {now.mismatch:.2g} nats per token: the answers are drawn from "
            "another distribution than the one that is trained (a cut, old weights, other kernels). Undo "
            f"{turn('TOP_K', 'TOP_P', 'ROLLOUTS')}"
            + f", or weigh the tokens ({turn('SAMPLER_CORRECTION')}; the field's is 2)" * (not corrected)),
        "worse": (now.reward < first.reward - WORSE * first.reward_std,
            f"the reward has fallen from {first.reward:.2f} to {now.reward:.2f}, below the untrained "
            f"model's: training does harm. Lower {turn('LEARNING_RATE')} or {turn('MAX_GRAD_NORM')}"),
    }  # fmt: skip
    return {kind: line for kind, (holds, line) in faults.items() if holds}


def history(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> Iterator[str]:
    """Every line of a log where it begins to hold: "step N: ..."; arguments as in `check`."""
    before: dict[str, str] = {}
    for i, row in enumerate(rows, start=1):
        # `check` looks at the first rows and the last only
        found = check([*rows[: min(i, WINDOW)], *rows[max(i - WINDOW, WINDOW) : i]], constants)
        yield from (f"step {row['step']:.0f}: {line}" for kind, line in found.items() if kind not in before)
        before = found
