"""Health lines: what to change about a run whose log leaves its healthy range, and what shows it.

Nothing crashes when a GRPO run goes wrong: the loss stays finite, the progress bar advances, and
the model learns nothing. FAULTS is a table of what can be wrong, the causes before what they cause;
web/words.json has a line for each, with the constant to change and the metrics.

"Now" is the median over WINDOW steps, because one odd batch shouldn't raise an alarm and the KL
estimate (k3) has a long tail. "First" is the log's first step, whose answers no update has changed.
"""

import collections
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
MOVED = 0.5  # fall or rise of the reward, in standard deviations within a group at first
ACCURACY_LOSS = 0.1  # fall of the share of right answers; two standard errors of 128 are less
BY_HEART = 0.2  # share of right training answers above that of questions it never saw
# nats per token; as undecided as among four equal tokens, at the first step
HOT = 1.4
STILL = 1e-3  # nats per token; a run that ends nearer to the starting model hasn't moved
MOST = 3  # causes in a report
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


class Fault(NamedTuple):
    """What can be wrong with a run, as web/words.json says it."""

    name: str  # of its line
    change: str  # what it asks to change; of several that ask for the same, a report has the first
    holds: Callable[[SimpleNamespace], bool]
    # follows from other faults; alone it's better than nothing
    symptom: bool = False


# The order is that of a report: what was wrong before the first update, then what an update does,
# then what follows. A comparison with NaN is false: metrics that aren't logged raise no alarm.
FAULTS = (
    # whose answers they are
    Fault("sync", "sampler", lambda s: s.now.sync_gain < SYNCED),
    Fault("mismatch", "sampler", lambda s: not s.corrected and s.now.mismatch >= MISMATCH),
    Fault(
        "mismatch_corrected",
        "sampler",
        lambda s: s.corrected and s.now.mismatch >= MISMATCH_CORRECTED,
    ),
    # the untrained model's answers: where they end, how much they differ, what they earn
    Fault("hot", "sampling", lambda s: s.temperature > 1 and s.first.entropy >= HOT),
    Fault(
        "never_stops",
        "limit",
        lambda s: not s.episodes and min(s.first.cut_off, s.now.cut_off) >= NEVER_STOPS,
    ),
    Fault(
        "cut_off",
        "limit",
        lambda s: (
            not s.episodes
            and min(s.first.cut_off, s.now.cut_off) >= OFTEN_CUT
            and s.now.correct < SOLVED
        ),
    ),
    Fault("turns", "limit", lambda s: s.episodes and s.now.cut_off >= OFTEN_CUT and not s.gained),
    Fault("alike", "sampling", lambda s: s.silent and s.first.distinct <= ALIKE),
    Fault(
        "no_signal",
        "reward",
        lambda s: s.silent and s.first.zero_variance >= NO_SIGNAL and s.first.distinct > ALIKE,
    ),
    # what the updates aim at
    Fault(
        "gamed",
        "reward",
        lambda s: s.raised and s.now.correct < s.first.correct - ACCURACY_LOSS,
    ),
    Fault(
        "teacher",
        "teacher",
        lambda s: s.teacher and (s.fallen or (s.over and s.now.kl >= s.first.kl)),
    ),
    # how large the updates are
    Fault(
        "resumed",
        "step",
        lambda s: (
            s.now.reward < s.before_resume.reward - MOVED * s.before_resume.reward_std
            and not s.before_resume.kl >= KL_HIGH
        ),
    ),
    Fault("kl", "step", lambda s: not s.teacher and s.now.kl >= KL_HIGH),
    Fault("worse", "step", lambda s: not s.teacher and s.fallen),
    Fault("clipped", "step", lambda s: s.now.clip_fraction >= CLIPPED),
    Fault("gradient", "step", lambda s: s.limit and s.now.grad_norm >= GRADIENT * s.limit),
    Fault(
        "still",
        "step",
        lambda s: s.over and s.beta and not s.silent and s.now.kl < STILL and not s.gained,
    ),
    # what can be learned from the questions
    Fault("by_heart", "data", lambda s: s.now.correct >= s.now.held_out_correct + BY_HEART),
    Fault("by_heart_test", "data", lambda s: s.now.correct >= s.now.test_correct + BY_HEART),
    Fault("solved", "data", lambda s: s.now.zero_variance >= NO_SIGNAL and s.now.correct >= SOLVED),
    # what follows
    Fault(
        "unlearned",
        "symptom",
        lambda s: not s.raised and s.now.correct < s.first.correct - ACCURACY_LOSS,
        symptom=True,
    ),
    Fault(
        "format_only",
        "symptom",
        lambda s: (
            not s.episodes
            and s.now.format_ok >= max(FORMAT_LEARNED, s.first.format_ok + FORMAT_GAIN)
            and not s.gained
        ),
        symptom=True,
    ),
    Fault(
        "longer",
        "symptom",
        lambda s: s.first.cut_off < OFTEN_CUT and s.now.length >= LONGER * s.first.length,
        symptom=True,
    ),
    Fault(
        "late_cut_off",
        "symptom",
        lambda s: not s.episodes and s.first.cut_off < OFTEN_CUT <= s.now.cut_off,
        symptom=True,
    ),
    Fault(
        "entropy",
        "symptom",
        lambda s: (
            s.first.entropy > SHARP
            and s.now.entropy <= COLLAPSED * s.first.entropy
            and s.now.correct < SOLVED
        ),
        symptom=True,
    ),
    Fault(
        "silenced",
        "symptom",
        lambda s: s.silent and s.first.zero_variance < NO_SIGNAL,
        symptom=True,
    ),
)


def check(
    rows: Sequence[Mapping[str, float]], constants: Mapping[str, object], resumed: int = 0
) -> dict[str, Sentence]:
    """The faults at the last of these steps: a sentence for each, by name, in the order of FAULTS.

    `rows` are those of `train_log.csv` in step order, the last one with `test_correct` if the model
    has answered the test questions since; the run was `resumed` after that step (0:
    never). Skips a column that most of them lack, and everything until there are WINDOW rows.
    """
    if len(rows) < WINDOW:
        return {}
    first, now = medians(rows[:1]), medians(rows[-WINDOW:])
    # once per evaluation, not per step
    now.held_out_correct = rows[-1].get("held_out_correct", np.nan)
    now.test_correct = rows[-1].get("test_correct", np.nan)
    # the last steps before it was resumed, while all of the last ones came after it
    earlier = [row for row in rows if row["step"] <= resumed][-WINDOW:]
    before_resume = medians(earlier if earlier and rows[-WINDOW]["step"] > resumed else [])
    # The gradient of a sum over an answer's tokens is `length` times that of their mean.
    summed = now.length if constants.get("LOSS_AGG_MODE") == "seq-mean-token-sum" else 1
    seen = SimpleNamespace(
        first=first,
        now=now,
        before_resume=before_resume,
        limit=float(constants["MAX_GRAD_NORM"]) * summed,  # 0: no clip
        temperature=float(constants.get("TEMPERATURE", 1)),
        corrected=constants.get("SAMPLER_CORRECTION"),
        episodes=constants.get("ENVIRONMENT"),
        teacher=constants.get("TEACHER"),
        beta=constants.get("BETA"),
        over=rows[-1]["step"] == constants.get("NUM_BATCHES"),
        silent=now.zero_variance >= NO_SIGNAL and not now.correct >= SOLVED,
        gained=now.correct >= min(SOLVED, first.correct + ACCURACY_GAIN),
        raised=now.reward > first.reward + MOVED * first.reward_std,
        fallen=now.reward < first.reward - MOVED * first.reward_std,
    )
    limits = ["MAX_TURNS"] * bool(seen.episodes) + ["TOTAL_GENERATION_STEPS"]
    turned = collections.defaultdict(
        str, {name: f"{name}={value}" for name, value in constants.items()}
    )
    values = {
        "first": first,
        "now": now,
        "before_resume": before_resume,
        "turn": turned,
        "resumed": resumed,
    }
    values |= {"start": int(rows[0]["step"]), "begin": int(rows[-WINDOW]["step"])}
    values |= {"end": int(rows[-1]["step"]), "limits": ", ".join(turned[name] for name in limits)}
    rewards = [turned[name] for name in ("REWARDS", "REWARD_FUNC") if constants.get(name)]
    values["rewards"] = ", ".join(rewards) or "reward_func.py"
    values["median"] = Sentence("median", begin=values["begin"], end=values["end"])
    return {fault.name: Sentence(fault.name, **values) for fault in FAULTS if fault.holds(seen)}


def first_found(
    rows: Sequence[Mapping[str, float]], constants: Mapping[str, object], resumed: int = 0
) -> dict[str, Sentence]:
    """The faults of all steps, each as it was when it first held; arguments as in `check`."""
    found: dict[str, Sentence] = {}
    for i in range(len(rows)):
        found = check(rows[: i + 1], constants, resumed) | found
    return found


def causes(found: Mapping[str, Sentence]) -> list[Sentence]:
    """At most MOST of these faults, the root first; symptoms only if there's nothing else."""
    chosen: dict[str, Sentence] = {}
    for fault in FAULTS:
        if fault.name in found and not (fault.symptom and chosen):
            chosen.setdefault(fault.change, found[fault.name])
    return list(chosen.values())[:MOST]


def no_cause(rows: Sequence[Mapping[str, float]], constants: Mapping[str, object]) -> Sentence:
    """What to say about a run that didn't work, and none of FAULTS holds."""
    if len(rows) < WINDOW:
        steps = f"NUM_BATCHES={constants.get('NUM_BATCHES')}"
        return Sentence("too_few_steps", steps=steps, rows=len(rows), window=WINDOW)
    ends = {"begin": int(rows[-WINDOW]["step"]), "end": int(rows[-1]["step"])}
    now, median = medians(rows[-WINDOW:]), Sentence("median", **ends)
    return Sentence("cant_tell", now=now, median=median)


def history(
    rows: Sequence[Mapping[str, float]], constants: Mapping[str, object], resumed: int = 0
) -> Iterator[Sentence]:
    """Every line of a log at the step where it first applies: "step N: ..."; arguments as in
    `check`.
    """
    before: dict[str, Sentence] = {}
    for i, row in enumerate(rows, start=1):
        now = check(rows[:i], constants, resumed)
        new = [line for kind, line in now.items() if kind not in before]
        yield from (Sentence("at_step", step=row["step"], line=line) for line in new)
        before = now
