"""Health lines: one sentence for each figure of a training log that leaves its healthy range.

Nothing crashes when a GRPO run goes wrong: the loss stays finite, the progress bar advances, and nothing is
learned. Each line therefore names what is seen, the likely cause, and the constant to change. The main script
prints a line when it begins to hold, and repeats all of them in report.md; tools/show_run.py prints those of
a run that is already there.

A figure here is the median over WINDOW steps: one odd batch raises no alarm, and the KL estimate (k3) has a
long tail. "At first" means the first WINDOW steps of the log.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

WINDOW = 5  # steps that a figure must last; fewer: odd batches raise alarms, more: the alarm comes late
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
WORSE = 0.5  # fall of the reward since the start, in spreads within a group at first


def check(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> dict[str, str]:
    """What is wrong at the last of these steps.

    Args:
        rows: rows of `train_log.csv` in the order of the steps; what most of them lack is not judged.
        constants: the run's constants by name.

    Returns:
        One sentence for each fault, by its kind; empty if there is none, and for fewer than WINDOW rows.
    """
    if len(rows) < WINDOW:
        return {}

    def median(name: str, part: Sequence[Mapping[str, float]]) -> float:
        numbers = [row[name] for row in part if not np.isnan(row.get(name, np.nan))]
        return float(np.median(numbers)) if 2 * len(numbers) > len(part) else np.nan

    def at_first(name: str) -> float:
        return median(name, rows[:WINDOW])

    def now(name: str) -> float:
        return median(name, rows[-WINDOW:])

    def turn(*names: str) -> str:
        return ", ".join(f"{name}={constants[name]}" for name in names)

    found = {}
    # A comparison with NaN is false: what is not logged is not judged.
    if now("zero_variance") >= NO_SIGNAL:
        seen = f"in {now('zero_variance'):.0%} of the groups all answers earn the same reward: no gradient"
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
                f"{seen}, though they differ: the rewards see no difference, usually because none is right "
                f"({now('correct'):.0%}). Take easier questions ({turn('DATASET')}) or rewards with more "
                f"steps (reward_func.py), look at the prompt (TEMPLATE), or raise {turn('NUM_GENERATIONS')}"
            )
    limits = turn(*["MAX_TURNS"] * bool(constants.get("ENVIRONMENT")), "TOTAL_GENERATION_STEPS")
    if now("cut_off") >= NEVER_STOPS and at_first("cut_off") >= NEVER_STOPS:
        found["never_stops"] = (
            f"{now('cut_off'):.0%} of the answers never end, from the first step on: a wrong chat template, "
            "or an end-of-sequence token that the model has not learned to write. Look at the tokenizer of "
            f"{turn('MODEL')} and at TEMPLATE; if answers are simply longer, raise {limits}"
        )
    elif now("length") >= LONGER * at_first("length"):
        found["longer"] = (
            f"answers have grown from {at_first('length'):.1f} to {now('length'):.1f} tokens, "
            f"{now('cut_off'):.0%} are cut off: a reward that pays for length, or a loss that divides a "
            "wrong answer's penalty by its length (LOSS_AGG_MODE has others). Look at reward_func.py, lower "
            f"{turn('LEARNING_RATE')}, raise {turn('BETA')}"
        )
    elif now("cut_off") >= OFTEN_CUT:
        found["cut_off"] = (
            f"{now('cut_off'):.0%} of the answers are cut off at the limit, and graded without their end: "
            f"raise {limits}, or leave them out of the loss (MASK_OVERLONG)"
        )
    if now("kl") >= KL_HIGH:
        found["kl"] = (
            f"the KL to the starting model is {now('kl'):.2g} nats per token: the updates are too "
            f"large. Lower {turn('LEARNING_RATE')} or {turn('MAX_GRAD_NORM')}, or raise {turn('BETA')}"
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
            f"the entropy has fallen from {at_first('entropy'):.2g} to {now('entropy'):.2g} nats per "
            f"token while only {now('correct'):.0%} are right: the model has settled too early. Lower "
            f"{turn('LEARNING_RATE')}, raise {turn('BETA')} or {turn('TEMPERATURE')}"
        )
    if now("clip_fraction") >= CLIPPED:
        found["clipped"] = (
            f"{now('clip_fraction'):.0%} of the tokens are clipped, hence without gradient: too many or too "
            f"large updates on the same answers. Lower {turn('NUM_ITERATIONS')} or {turn('LEARNING_RATE')}"
        )
    # 0: no clip. RLOO's loss sums over an answer's tokens; the mean's gradient is that many times smaller.
    summed = now("length") if constants.get("LOSS_AGG_MODE") == "seq-mean-token-sum" else 1
    limit = float(constants["MAX_GRAD_NORM"]) * summed
    if limit and now("grad_norm") >= GRADIENT * limit:
        found["gradient"] = (
            f"the gradient's norm is {now('grad_norm'):.2g} ({turn('MAX_GRAD_NORM')}): the loss is steep, "
            f"and nearly every update is cut. Lower {turn('LEARNING_RATE')}, or raise MAX_GRAD_NORM"
        )
    corrected = constants.get("SAMPLER_CORRECTION")  # runs older than it have no mismatch to judge either
    if now("mismatch") >= (MISMATCH_CORRECTED if corrected else MISMATCH):
        found["mismatch"] = (
            f"sampler and trainer differ by {now('mismatch'):.2g} nats per token: the answers are drawn from "
            "another distribution than the one that is trained (a cut, old weights, other kernels). Undo "
            f"{turn('TOP_K', 'TOP_P', 'ROLLOUTS')}"
            + ("" if corrected else f", or weigh the tokens ({turn('SAMPLER_CORRECTION')}; the field's is 2)")
        )
    if now("reward") < at_first("reward") - WORSE * at_first("reward_std"):
        found["worse"] = (
            f"the reward has fallen from {at_first('reward'):.2f} to {now('reward'):.2f}, below the "
            f"untrained model's: training does harm. Lower {turn('LEARNING_RATE')} or {turn('MAX_GRAD_NORM')}"
        )
    return found


def history(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> Iterator[str]:
    """Every line of a log where it begins to hold: "step N: ..."; arguments as in `check`."""
    before: dict[str, str] = {}
    for i, row in enumerate(rows, start=1):
        # the first rows and the last are all that `check` looks at
        found = check([*rows[: min(i, WINDOW)], *rows[max(i - WINDOW, WINDOW) : i]], constants)
        yield from (f"step {row['step']:.0f}: {line}" for kind, line in found.items() if kind not in before)
        before = found
