"""Health lines: one sentence for each metric of a training log that leaves its healthy range.

Nothing crashes when a GRPO run goes wrong: the loss stays finite, the progress bar advances, and
the model learns nothing. So each line gives the symptom, the likely cause, and the constant to
change.

A metric here is the median over WINDOW steps, because one odd batch shouldn't raise an alarm and
the KL estimate (k3) has a long tail. "At first" means the first WINDOW steps of the log.
"""

import collections
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

WINDOW = 5  # steps; with fewer, odd batches raise alarms; with more, the alarm comes late
NO_SIGNAL = 0.9  # share of zero-variance groups; their generation costs time and gives no gradient
ALIKE = 1.5  # mean of distinct answers per group; below it, a group's answers are nearly identical
# share of right answers; above it few groups with signal, or little entropy, mean success
SOLVED = 0.9
# share of answers cut off at the limit; a model that has learned to stop is far below
NEVER_STOPS = 0.9
OFTEN_CUT = 0.3  # share of answers cut off at the limit; above it the limit decides many grades
# nats per token; makes an answer of 15 tokens e^7.5 times likelier than before training
KL_HIGH = 0.5
FORMAT_LEARNED, FORMAT_GAIN = 0.9, 0.2  # share of well-formed answers, and its rise since the start
# rise of the share of right answers; two standard errors of 5 x 128 answers are less
ACCURACY_GAIN = 0.05
COLLAPSED = 0.1  # of the entropy at first; a healthy run keeps a fifth (assets/train_log.csv)
SHARP = 0.01  # nats per token; with less entropy at first, there is nothing to collapse
LONGER = 1.4  # times the length at first; assets/train_log.csv stays within 1.1
# share of clipped tokens, which give no gradient; most tokens are certain and never clip
CLIPPED = 0.1
GRADIENT = 10  # times MAX_GRAD_NORM; the clip, not the gradient, then sets the size of the update
# nats per token, uncorrected; bfloat16 kernels alone give 0.01 (SkyRL's CI asserts 0.0104)
MISMATCH = 0.03
MISMATCH_CORRECTED = 0.69  # log 2: the average token is then as far off as the usual cap corrects
# share of the update that reached the sampler; a working sync has 1 within a few percent
SYNCED = 0.9
WORSE = 0.5  # fall of the reward since the start, in standard deviations within a group at first
JUDGED = (
    "zero_variance",
    "correct",
    "distinct",
    "cut_off",
    "length",
    "kl",
    "format_ok",
    "entropy",
    "clip_fraction",
    "grad_norm",
    "mismatch",
    "sync_gain",
    "reward",
    "reward_std",
)
WORDS = json.loads((Path(__file__).parent / "web" / "words.json").read_text("utf-8"))


class Sentence(str):
    """An English sentence from web/words.json, which the page can also show in Chinese."""

    # its name, and the text for each place in it, or a sentence's parts
    parts: tuple[str, dict[str, Any]]

    def __new__(cls, name: str, **values: Any) -> "Sentence":
        """`values` fill its places as in `str.format`."""
        words = WORDS["sentences"][name]["en"]
        sentence = super().__new__(cls, words.format(**values))
        texts = {place: f"{{{place}}}".format(**values) for place in re.findall("{(.+?)}", words)}
        nested = {
            place: value.parts for place, value in values.items() if isinstance(value, Sentence)
        }
        sentence.parts = name, texts | nested
        return sentence


def medians(rows: Sequence[Mapping[str, float]]) -> SimpleNamespace:
    """The median of each column in JUDGED; NaN if half or more of the rows have no number."""
    columns = {
        name: [row[name] for row in rows if not np.isnan(row.get(name, np.nan))] for name in JUDGED
    }
    known = {name: float(np.median(x)) for name, x in columns.items() if 2 * len(x) > len(rows)}
    return SimpleNamespace(**dict.fromkeys(JUDGED, np.nan) | known)


def check(
    rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]
) -> dict[str, Sentence]:
    """The faults at the last of these steps: a sentence for each, by kind.

    `rows` are those of `train_log.csv` in step order. Skips a column that most of them lack, and
    everything until there are WINDOW rows.
    """
    if len(rows) < WINDOW:
        return {}
    first, now = medians(rows[:WINDOW]), medians(rows[-WINDOW:])

    # A comparison with NaN is false, so metrics that aren't logged raise no alarm.
    silent = now.zero_variance >= NO_SIGNAL
    solved = silent and now.correct >= SOLVED
    alike = silent and not solved and now.distinct <= ALIKE
    never_stops = now.cut_off >= NEVER_STOPS and first.cut_off >= NEVER_STOPS
    longer = not never_stops and now.length >= LONGER * first.length
    # RLOO's loss sums over an answer's tokens; the mean's gradient is that many times smaller.
    summed = now.length if constants.get("LOSS_AGG_MODE") == "seq-mean-token-sum" else 1
    limit = float(constants["MAX_GRAD_NORM"]) * summed  # 0: no clip
    # older runs don't have it, and no mismatch either
    corrected = constants.get("SAMPLER_CORRECTION")
    formed = now.format_ok >= max(FORMAT_LEARNED, first.format_ok + FORMAT_GAIN)
    collapsed = first.entropy > SHARP and now.entropy <= COLLAPSED * first.entropy
    faults = {  # by the name of the line in web/words.json
        "solved": solved,
        "alike": alike,
        "no_signal": silent and not solved and not alike,
        "never_stops": never_stops,
        "longer": longer,
        "cut_off": not never_stops and not longer and now.cut_off >= OFTEN_CUT,
        "kl": now.kl >= KL_HIGH,
        "format_only": formed and now.correct < min(SOLVED, first.correct + ACCURACY_GAIN),
        "entropy": collapsed and now.correct < SOLVED,
        "clipped": now.clip_fraction >= CLIPPED,
        "gradient": limit and now.grad_norm >= GRADIENT * limit,
        "mismatch": not corrected and now.mismatch >= MISMATCH,
        "mismatch_corrected": corrected and now.mismatch >= MISMATCH_CORRECTED,
        "sync": now.sync_gain < SYNCED,
        "worse": now.reward < first.reward - WORSE * first.reward_std,
    }
    limits = ["MAX_TURNS"] * bool(constants.get("ENVIRONMENT")) + ["TOTAL_GENERATION_STEPS"]
    turned = collections.defaultdict(
        str, {name: f"{name}={value}" for name, value in constants.items()}
    )
    values = {"first": first, "now": now, "turn": turned}
    values["limits"] = ", ".join(turned[name] for name in limits)
    return {name: Sentence(name, **values) for name, holds in faults.items() if holds}


def history(
    rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]
) -> Iterator[Sentence]:
    """Every line of a log at the step where it first applies: "step N: ..."; arguments as in
    `check`.
    """
    before: dict[str, Sentence] = {}
    for i, row in enumerate(rows, start=1):
        now = check(rows[:i], constants)
        new = [line for kind, line in now.items() if kind not in before]
        yield from (Sentence("at_step", step=row["step"], line=line) for line in new)
        before = now
