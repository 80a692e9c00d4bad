"""The measured pictures of the pages, each a function of committed tables; `save` writes both
languages.
"""

import io
import re
import runpy
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullLocator, PercentFormatter

ROOT = Path(__file__).resolve().parent.parent
BLUE = "#0969da"
ORANGE = "#c2570c"
GREY = "#6e7781"
GREEN = "#1a7f37"
RED = "#cf222e"
PURPLE = "#8250df"
INK, PAGE = "#1f2328", "#ffffff"
DARK = {  # of GitHub's dark pages
    BLUE: "#58a6ff",
    ORANGE: "#f0883e",
    GREY: "#8b949e",
    GREEN: "#3fb950",
    RED: "#ff7b72",
    PURPLE: "#bc8cff",
    INK: "#e6edf3",
    PAGE: "#0d1117",
}
FONTS = "system-ui, 'PingFang TC', 'Microsoft JhengHei', 'Noto Sans CJK TC', sans-serif"
CHINESE = tomllib.loads((Path(__file__).parent / "chinese.toml").read_text())
NUMBER = re.compile(r"[+−-]?\d[\d,.]*(?<![,.])")
WIDE = 6.0  # inches of every picture: a phone shows it at two thirds of its size
rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "course",
        "font.size": 11,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "axes.spines.top": False,
        "legend.fontsize": 10,
        "axes.spines.right": False,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GREY,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


# %% Light and dark, English and Chinese -----------------------------------------------------------
def chinese(text: str) -> str:
    """A label in Chinese, from chinese.toml, where # stands for a number; code and numbers stay."""
    numbers = iter(NUMBER.findall(text))
    found = CHINESE.get(NUMBER.sub("#", text))
    if found is None and "\n" in text:  # a line is a label of its own, unless the whole is one
        return "\n".join(map(chinese, text.split("\n")))
    return text if found is None else re.sub("#", lambda _: next(numbers), found)


def translate(figure: Figure) -> None:
    """Puts Chinese labels where the English ones are; the layout stays."""
    figure.set_layout_engine("none")
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            if labels != [*map(chinese, labels)]:
                axis.set_ticks(axis.get_ticklocs(), [*map(chinese, labels)])
    for text in figure.findobj(Text):
        text.set_text(chinese(text.get_text()))


def adapted(svg: str) -> str:
    """An SVG of matplotlib's with the reader's fonts, light or dark as the page around it is."""
    rules = [f"text:not([style*=Mono]) {{font-family: {FONTS} !important}}"]
    rules += ["@media (prefers-color-scheme: dark) {"]
    rules += [
        f"[style*='{what}: {light}'] {{{what}: {dark} !important}}"
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    svg = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<\?xml.*?(?=<svg)", "", svg, flags=re.S)
    return svg.replace("</style>", "\n".join([*rules, "}</style>"]), 1)


def save(figure: Figure, path: Path) -> None:
    """Writes name.svg with English labels, and name_ch.svg with Chinese ones."""
    for target in (path, path.with_stem(f"{path.stem}_ch")):
        if target != path:
            translate(figure)
        svg = io.StringIO()
        with warnings.catch_warnings():
            # of Chinese: the reader has the font
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(svg, format="svg", facecolor=PAGE, metadata={"Date": None})
        target.write_text(adapted(svg.getvalue()))


# %% Pieces ----------------------------------------------------------------------------------------
def log_of(rows: pd.DataFrame) -> SimpleNamespace:
    """A log's columns as a script has them, each [seeds, rows]."""
    columns = rows.select_dtypes("number").astype(float)
    seeds = rows.seed.nunique()
    return SimpleNamespace(
        **{name: columns[name].to_numpy().reshape(seeds, -1) for name in columns}
    )


def panels(
    rows: int, columns: int = 1, height: float = 2.6, **options
) -> tuple[Figure, list[Axes]]:
    """Axes below and beside each other, in a picture of the usual width."""
    figure = Figure((WIDE, height * rows), layout="constrained")
    axes = [*figure.subplots(rows, columns, squeeze=False, **options).flat]
    for one in axes:
        one.xaxis.set_major_formatter(lambda x, _: f"{x:,g}".replace("-", "−"))
    return figure, axes


def band(axes: Axes, x, mean, low, high, color: str, label: str | None = None, **options) -> None:
    """A line of the mean, and a band from the lowest to the highest seed."""
    axes.plot(x, mean, color=color, label=label, **options)
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def band_of(axes: Axes, x: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """The same of `values`, [seeds, rows]."""
    band(axes, x, values.mean(axis=0), values.min(axis=0), values.max(axis=0), color, label)


def draw_band(axes: Axes, rows: pd.DataFrame, color: str, label: str | None = None) -> None:
    """The same of a table with the columns env_step, mean, low, high."""
    band(axes, rows.env_step, rows["mean"], rows.low, rows.high, color, label)


def key_below(figure: Figure, axes: Axes, columns: int = 2) -> Figure:
    """The figure with a legend where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    return figure


def by_seed(groups: dict[str, tuple[np.ndarray, str]], height: float) -> tuple[Figure, Axes]:
    """A line per row of a study, a dot per seed's last policy, and a word at the right."""
    figure, [axes] = panels(1, height=height * len(groups) + 0.9)
    for y, (returns, word) in enumerate(groups.values()):
        # Spread out vertically, else ten seeds at one place look like one
        axes.scatter(returns, y + np.linspace(-0.25, 0.25, len(returns)), s=16, color=BLUE)
        axes.text(1.02, y, word, va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(groups)), groups, fontsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.set(ylim=(len(groups) - 0.5, -0.5))
    return figure, axes


def of_chapter(folder: str, name: str, *given) -> Figure:
    """A picture that a chapter's script draws at the end of its run, drawn by the same function."""
    return runpy.run_path(str(ROOT / folder / "pictures.py"))[name](io.BytesIO(), *given)


def of_log(folder: str, name: str, *more) -> Callable[[Path], Figure]:
    """A function that draws such a picture from a log."""
    return lambda log: of_chapter(folder, name, log_of(pd.read_csv(log)), *more)


# %% Folder 1 --------------------------------------------------------------------------------------
def q_learning_curve(log: Path) -> Figure:
    """Return and largest error."""
    rows = pd.read_csv(log).to_numpy()
    return of_chapter("1_Q_Learning", "draw_learning_curve", rows[:, :4], rows[:, 4], 95.0)


def q_table(table: Path) -> Figure:
    """All values on the grid."""
    values = pd.read_csv(table, index_col="state").to_numpy()
    return of_chapter("1_Q_Learning", "draw_q_table", values, [(-1, 0), (1, 0), (0, -1), (0, 1)])


def step_sizes(curves: Path) -> Figure:
    """Above: largest error. Below: return. Lines: means of the seeds; bands: lowest to highest."""
    figure, both = panels(2, sharex=True)
    groups = pd.read_csv(curves).groupby("changed", sort=False)
    colors = (BLUE, ORANGE, GREY, GREEN, RED)
    for (label, rows), color in zip(groups, colors, strict=True):
        rows = rows.iloc[np.unique(np.geomspace(1, len(rows), 150).astype(int)) - 1]
        # where a later one covers the first, both are seen
        width = 4 if label == "unchanged" else 1.5
        for axes, name in zip(both, ("error", "return"), strict=True):
            ends = (rows[f"{name}_{end}"] for end in ("mean", "min", "max"))
            band(axes, rows.episode, *ends, color, label, linewidth=width)
    both[0].set(xscale="log", yscale="log", title="largest error of the table")
    both[1].set(xlabel="episode", title="return (mean of 50 episodes)")
    return key_below(figure, both[0], 3)


# %% Folder 2 --------------------------------------------------------------------------------------
dqn_curve = of_log("2_Cart_Pole_DQN", "draw_learning_curve")


def seeds_of_dqn(table: Path) -> Figure:
    """Last policies of the rows where not every seed is solved."""
    returns = pd.read_csv(table).groupby("changed", sort=False).eval_return
    solved = returns.agg(lambda values: (values >= 475).sum()).sort_values(kind="stable")
    shown = {
        label.replace(" ", "\n"): (returns.get_group(label), f"{count} of 10")
        for label, count in solved.items()
        if count < 10
    }
    figure, axes = by_seed(shown, height=0.6)
    axes.axvline(475, color=GREEN, linewidth=1)
    axes.set(
        xlim=(0, 510), xticks=range(0, 501, 100), title="What fails: seeds solved (475 or more)"
    )
    axes.set_xlabel("return of the last policy; other rows: 10 of 10", loc="right")
    return figure


def overestimation(table: Path) -> Figure:
    """What the network promises less what comes of it, with and without Double DQN."""
    groups = pd.read_csv(table).groupby("changed", sort=False)
    figure, both = panels(2, sharex=True)
    titles = (
        "defaults: the estimate starts too low",
        "one-step targets, copied every 20 steps: too high",
    )
    for axes, label, title in zip(
        both, ("", "N_STEPS=1 TARGET_SYNC_INTERVAL=20"), titles, strict=True
    ):
        draw_band(axes, groups.get_group(label or "unchanged"), BLUE, "Double DQN")
        draw_band(axes, groups.get_group(f"{label} DOUBLE_DQN=False".strip()), ORANGE, "plain max")
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set(title=title, ylabel="estimate − true return")
    both[1].set_yscale("symlog", linthresh=100)  # a seed that runs away would flatten all others
    both[1].set_xlabel("environment step")
    return key_below(figure, both[0])


# %% Folder 3 --------------------------------------------------------------------------------------
ppo_curve = of_log("3_Pendulum", "draw_ppo_curve")
reinforce_curve = of_log("3_Pendulum", "draw_reinforce_curve", "critic_baseline")


def clipped_objective() -> Figure:
    """PPO's objective against the ratio."""
    objective = lambda ratio, A, eps: np.minimum(ratio * A, np.clip(ratio, 1 - eps, 1 + eps) * A)  # noqa: E731
    return of_chapter("3_Pendulum", "draw_clipped_objective", objective, 0.2)


def seeds_of_ppo(table: Path) -> Figure:
    """Last policies of the rows that do worse."""
    returns, shown = pd.read_csv(table).groupby("changed", sort=False).eval_return, {}
    means = returns.mean().sort_values(kind="stable")
    for label in [*means[means < -170].index, "unchanged"]:
        steps, *others = label.split()
        words = (
            f"the textbook's constants\n{steps}" if len(others) > 2 else label.replace(" ", "\n")
        )
        shown[words] = -returns.get_group(label), f"−{-means[label]:.0f}"
    figure, axes = by_seed(shown, height=0.48)
    ticks = [150, 300, 600, 1200]
    axes.set(xscale="log", xlim=(1700, 125), title="What does worse, and the mean of ten seeds")
    axes.set_xticks(ticks, [f"−{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("return of the last policy, logarithmic")
    return figure


FAILURES = {  # the rows from which most is to be learned
    "CLIP_EPSILON=1e9": "no clip, no KL penalty",
    "BOOTSTRAP_TRUNCATED=False": "truncated = terminated",
    "NORMALIZE_ADVANTAGES=False": "advantages of any size",
    "GAE_LAMBDA=0.0": "critic trusted at once",
    "CRITIC_LEARNING_RATE=1e-3": "critic learns too slowly",
    "NUM_EPOCHS=1": "each rollout used once",
}


def failures(table: Path) -> Figure:
    """The greedy policy's learning curve of each row of FAILURES, above that of the first row in
    grey.
    """
    groups = pd.read_csv(table).groupby("changed", sort=False)
    first = groups.get_group("unchanged")
    figure, axes = panels(3, 2, 2.1, sharex=True, sharey=True)
    for one, (label, words) in zip(axes, FAILURES.items(), strict=True):
        one.plot(first.env_step, first["mean"], color=GREY, label="unchanged")
        draw_band(one, groups.get_group(label), BLUE, "changed")
        one.set_title(f"{words}\n", fontsize=11)
        one.text(0, 1.03, label, fontsize=8, color=GREY, transform=one.transAxes)
        one.set_xticks([0, 50_000, 100_000])
    axes[2].set_ylabel("return")
    axes[4].set_xlabel("environment step")
    return key_below(figure, axes[0])


BASELINES = {"critic_baseline": BLUE, "batch_mean": GREY, "no_baseline": ORANGE}


def baselines(table: Path, shown=tuple(BASELINES), credit=(True, False)) -> Figure:
    """Greedy return against steps: a row for each baseline, a column for each kind of credit."""
    groups = pd.read_csv(table).groupby("changed", sort=False)
    figure, axes = panels(len(shown), len(credit), 1.7, sharex=True, sharey=True)
    pairs = [(baseline, to_go) for baseline in shown for to_go in credit]
    for one, (baseline, to_go) in zip(axes, pairs, strict=True):
        draw_band(
            one, groups.get_group(f"REWARD_TO_GO={to_go} BASELINE={baseline}"), BASELINES[baseline]
        )
        column = f", {'reward to go' if to_go else 'whole return'}" if len(credit) > 1 else ""
        one.set_title(baseline.replace("_", " ") + column)
        one.set(ylim=(0, 515), xticks=[0, 50_000, 100_000])
    figure.supxlabel("environment step", fontsize=11)
    return figure


def two_baselines(table: Path) -> Figure:
    """The two runs of the chapter."""
    return baselines(table, ("critic_baseline", "no_baseline"), (True,))


def gradient_variance(table: Path) -> Figure:
    """Above: noise of three estimates at one policy. Below: variance of two, along the training.

    The noise is an estimator's variance over the squared length of its mean, which is what it is to
    find. Without a baseline the noise hides the mean, so the length is the critic's.
    """
    lines = pd.read_csv(table).query("reward_to_go")
    figure, (above, below) = panels(2, height=2.4)
    steps = lines.env_step.unique()
    # the last policy whose mean gradient is longer than its error: later there's little to learn
    step = lines[(lines.baseline == "critic_baseline") & lines.ratio.notna()].env_step.max()
    bars = lines[lines.env_step == step]
    length = (bars.trace / bars.ratio).iloc[-1]
    noises = bars.ratio.where(bars.baseline != "no_baseline", bars.trace / length)
    above.barh(bars.baseline.str.replace("_", " "), noises, color=bars.baseline.map(BASELINES))
    for y, value in enumerate(noises):
        above.text(value * 1.15, y, f"{value:.0f}", va="center")
    above.set(xscale="log", xlim=(1, 1e3))
    above.set_title(f"variance / (length of the mean gradient)² at step {step:,}")
    above.invert_yaxis()
    for baseline in ("no_baseline", "critic_baseline"):
        mine = lines[lines.baseline == baseline]
        below.plot(
            steps, mine.trace, "o-", color=BASELINES[baseline], label=baseline.replace("_", " ")
        )
    below.set(
        xlabel="policy frozen at environment step",
        yscale="log",
        title="variance along one training",
    )
    return key_below(figure, below)


# %% Folder 4 --------------------------------------------------------------------------------------
def accuracy(table: Path) -> Figure:
    """All four methods while they learn."""
    logs = {
        method: log_of(rows) for method, rows in pd.read_csv(table).groupby("method", sort=False)
    }
    return of_chapter("4_GRPO_MNIST", "draw_accuracy", logs)


def pull(table: Path) -> Figure:
    """The pull on an image against its probability, both logarithmic: what dividing by the spread
    does.
    """
    rows = pd.read_csv(table)
    figure, [axes] = panels(1, height=3.8)
    for name, text, color, place in (
        ("cross_entropy", "cross-entropy: told the digit", GREY, (1.5e-3, 1.3)),
        ("group_std", "group_std, G = 8: GRPO", BLUE, (1.2e-3, 0.06)),
        ("group", "group, G = 8: mean only", ORANGE, (0.02, 6e-3)),
    ):
        axes.loglog(rows.p, rows[name], color=color, linewidth=2)
        axes.text(*place, text, color=color)
    title = "Pull on an image: dividing by the spread pulls harder"
    axes.set(xlabel="p: probability of the right digit", ylim=(5e-4, 6), title=title)
    return figure


def beta(table: Path) -> Figure:
    """Three shares against the weight of the KL: greedy and sampled accuracy, groups with signal.

    Means of the seeds; the strength of the penalty isn't to scale.
    """
    rows = pd.read_csv(table).query("method == 'grpo'").copy()
    changes = {"BETA=0.0": "0", "BETA=0.01": "0.01", "unchanged": "0.1", "BETA=1.0": "1"}
    means = rows.groupby("changed").mean(numeric_only=True).loc[[*changes]]
    x = np.arange(len(changes))
    figure, [axes] = panels(1, height=3.4)
    for values, color, label, place in (
        (means.test_accuracy, GREEN, "most likely digit right", (0.05, 102)),
        (means.test_sampled_accuracy, BLUE, "sampled digit right", (1.1, 78)),
        (1 - means.zero_variance, ORANGE, "groups with a signal", (0.5, 27)),
    ):
        axes.plot(x, 100 * values, "o-", color=color)
        axes.text(*place, label, color=color)
    axes.set_xticks(x, [*changes.values()])
    axes.set(
        title="A stronger KL penalty: more groups teach, but samples get worse",
        xlabel="β, the weight of the KL penalty",
        ylabel="%",
        ylim=(0, 109),
    )
    return figure


# %% Folder 5 --------------------------------------------------------------------------------------
def report(log: Path, seeds: Path) -> Figure:
    """While a run trains: its answers and held-out questions. Below: the test before and after."""
    rows, result = pd.read_csv(log), pd.read_csv(seeds).iloc[0]
    reading, column = "answer", "correct"
    if result.after_answer_accuracy < 0.1:  # answers are paid by their last number
        reading, column = "lenient", "correct_lenient"
    held_out = rows.set_index("step")[f"held_out_{column}"].dropna()
    figure, (above, below) = panels(2, height=2.7, height_ratios=(2, 1))
    lines = {
        "zero_variance": (GREY, "groups without signal"),
        column: (BLUE, "the step's answers: right"),
    }
    if column == "correct":
        lines["format_ok"] = ORANGE, "the step's answers: format right"
    for name, (color, label) in lines.items():
        above.plot(rows.step, rows[name], color=color, lw=1, label=label)
    above.plot(held_out, color=GREEN, marker="o", lw=2, label="held-out questions: right")
    above.set(ylim=(-0.02, 1.02), xlabel="training step")
    above.yaxis.set_major_formatter(PercentFormatter(1))
    for y, (when, color) in enumerate((("before", GREY), ("after", BLUE))):
        places = np.arange(2) - 0.2 + 0.4 * y
        values = [100 * result[f"{when}_{kind}{reading}_accuracy"] for kind in ("", "greedy_")]
        below.barh(places, values, 0.38, color=color)
        for place, value in zip(places, values, strict=True):
            below.text(value + 1, place, f"{value:.0f} %, {when}", va="center")
    below.set_yticks([0, 1], ["sampled", "greedy"])
    below.set(xlim=(0, 125), xticks=[], ylim=(1.5, -0.5))
    below.set_title(f"{result['questions']} test questions: right")
    below.spines["bottom"].set_visible(False)
    return key_below(figure, above)


def attention(table: Path) -> Figure:
    """Where one head looks in Kim's question before it writes each of the three numbers."""
    rows = pd.read_csv(table, keep_default_na=False, na_filter=False)
    asking = {"<reasoning>": "8", "-": "6", "+": "5"}  # the token it has just written: the next
    question = rows[(rows.reading == rows.reading.min()) & (rows.token.str[0] != "<")]
    figure = Figure((WIDE, 2.1), layout="constrained")
    axes = figure.subplots()
    for y, (after, writes) in enumerate(asking.items()):
        [row] = [
            group
            for _, group in rows.groupby("reading")
            if (group.after.iloc[0], group.writes.iloc[0]) == (after, writes)
        ]
        look = row[row.position.isin(question.position)]
        axes.scatter(look.position, [y] * len(look), s=150 * look.weight.astype(float), color=BLUE)
    axes.set_xticks(question.position, question.token.str.strip(), rotation=90)
    axes.set_yticks(range(3), [f"{after} → {writes}" for after, writes in asking.items()])
    axes.set(ylim=(2.6, -0.6))
    axes.tick_params(length=0)
    axes.grid(axis="y", color=GREY, alpha=0.25)
    return figure


def supervised_fine_tuning(log: Path) -> Figure:
    """From noise to the format: the loss, and what share of the sampled answers can what."""
    rows = pd.read_csv(log)
    figure, (above, below) = panels(2, height=2.2, sharex=True)
    above.plot(rows.step, rows.loss, color=BLUE)
    above.set(ylim=(0, None), title="cross-entropy per token, mean since the last look")
    lines = {
        "form": (ORANGE, "looks like a demonstration"),
        "calculates": (PURPLE, "and its equations are true"),
        "right": (BLUE, "right answer"),
    }
    for name, (color, label) in lines.items():
        below.plot(rows.step, rows[name], color=color, label=label)
    below.set(ylim=(-0.02, 1.02), xlabel="training step", title="sampled answers")
    below.yaxis.set_major_formatter(PercentFormatter(1))
    return key_below(figure, below)


def pass_at_k(table: Path) -> Figure:
    """Right answers among k, before GRPO and after."""
    figure, both = panels(1, 2, 3.3, sharey=True)
    readings = pd.read_csv(table).groupby("reading", sort=False)
    words = {"strict": "right, between the answer tags", "lenient": "right by the last number"}
    for axes, (reading, title) in zip(both, words.items(), strict=True):
        for i, (_, rows) in enumerate(readings.get_group(reading).groupby("model", sort=False)):
            color, label = (BLUE, "after GRPO" if i == 1 else None) if i else (GREY, "before GRPO")
            band(axes, rows.k, rows.pass_at_k, rows.low, rows.high, color, label, marker="o", ms=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axes.set(xlabel="k, answers per question", title=title)
    both[0].yaxis.set_major_formatter(PercentFormatter(1))
    return key_below(figure, both[0])


METHODS = (  # of the page's table; one's own method joins them
    "mean only",
    "GRPO, 0/1 reward",
    "MaxRL",
    "pairs",
    "no KL",
    "no clip",
    "DAPO",
    "random rewards",
)


def methods(table: Path) -> Figure:
    """Each method less its counterpart, with intervals: one answer, and the best of 64."""
    import methods as study

    lines = pd.read_csv(table)
    present = dict.fromkeys(lines.method)
    counterpart = {name: study.METHODS.get(name, ("", "GRPO"))[1] for name in present}
    shown = [
        name
        for name in (*METHODS, *(present.keys() - study.METHODS.keys()))
        if {name, counterpart.get(name)} <= present.keys()
    ]
    figure, both = panels(1, 2, 0.4 * len(shown) + 0.9, sharey=True)
    titles = {"pass_at_1": "one answer: pass@1", "pass_at_64": "best of 64: pass@64"}
    for axes, (name, title) in zip(both, titles.items(), strict=True):
        for y, method in enumerate(shown):
            mean, low, high = (
                100 * x for x in study.difference(lines, method, counterpart[method], name)
            )
            color = GREY if low <= 0 <= high else BLUE if mean > 0 else RED
            axes.plot([low, mean, high], [y] * 3, "-o", markevery=[1], color=color, lw=2.5)
            if mean < -7:  # off the picture
                axes.text(-6.8, y, f"← {mean:.0f}".replace("-", "−"), va="center", color=color)
        axes.axvline(0, color=INK, lw=0.8)
        axes.set(title=title, xlim=(-7, 4), ylim=(len(shown) - 0.5, -0.5))
    labels = [m if counterpart[m] == "GRPO" else f"{m}\n(less {counterpart[m]})" for m in shown]
    both[0].set_yticks(range(len(shown)), labels)
    figure.supxlabel("percentage points more than GRPO, 95 % interval", fontsize=11)
    return figure


def methods_pass_at_k(table: Path) -> Figure:
    """Does MaxRL keep what only many answers find?"""
    figure, [axes] = panels(1, height=3.6)
    for method, color in {
        "before training": GREY,
        "GRPO, 0/1 reward": ORANGE,
        "MaxRL": BLUE,
    }.items():
        rows = pd.read_csv(table).replace("untrained", "before training").query("method == @method")
        band(axes, rows.k, rows["mean"], rows.lowest, rows.highest, color, method, marker="o", ms=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows.k, rows.k)
    axes.set(xlabel="k, answers per question", title="questions with a right answer among k")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return key_below(figure, axes, 3)


def methods_dense(table: Path) -> Figure:
    """What a signal at every token buys."""
    figure, [axes] = panels(1, height=3.4)
    for method, color in {"GRPO": ORANGE, "distillation": BLUE}.items():
        log = log_of(pd.read_csv(table).query("method == @method"))
        band_of(axes, log.graded.mean(axis=0), log.held_out, color, method)
    axes.set(xlabel="answers sampled", title="held-out questions right, one answer", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return key_below(figure, axes)


VARIANTS = {  # of the grid in turns: what works, and the mistakes
    "whole episode": BLUE,
    "reward to go": ORANGE,
    "slippery": GREEN,
    "walls": RED,
    "the world's tokens trained": ORANGE,
    "only the last turn trained": GREEN,
    "groups of different starts": RED,
    "padding between turns": PURPLE,
}


def turns(table: Path) -> Figure:
    """Return against the optimum: two kinds of credit and three worlds, and the mistakes."""
    figure, both = panels(2, height=3.1, sharex=True)
    words = {"episode": "whole episode", "return to go": "reward to go"}
    groups, names = pd.read_csv(table).replace(words).groupby("variant", sort=False), list(VARIANTS)
    titles = "return, mean over all starts", "the same with a mistake"
    for axes, title, shown in zip(both, titles, (names[:4], [names[0], *names[4:]]), strict=True):
        for name in shown:
            log = log_of(groups.get_group(name))
            band_of(axes, log.step[0], log.reward, VARIANTS[name], name)
        axes.axhline(95.57, color=INK, lw=0.8, ls="--", label="optimum of the plain grid")
        axes.set(ylim=(-10, 100), title=title)
        axes.legend(loc="lower right")
    both[1].set_xlabel("step (120 episodes each)")
    return figure


def mismatch(table: Path, window: int = 10) -> Figure:
    """What the health line looks at, and what becomes of the answers; moving means of `window`
    steps.
    """
    figure, both = panels(2, sharex=True)
    labels = {"mismatch": "mismatch, nats per token", "correct": "share of answers right"}
    for axes, (name, title) in zip(both, labels.items(), strict=True):
        variants = pd.read_csv(table).groupby("variant", sort=False)
        for (variant, rows), color in zip(variants, (BLUE, ORANGE, GREEN), strict=True):
            log = log_of(rows)
            means = np.stack(
                [np.convolve(row, np.ones(window) / window, "valid") for row in vars(log)[name]]
            )
            band_of(axes, log.graded.mean(axis=0)[window - 1 :], means, color, variant)
        axes.set(title=title, ylim=(0, None))
    both[1].set_xlabel("answers graded")
    return key_below(figure, both[0], 3)


def scaling(table: Path) -> Figure:
    """Seconds and memory of a step as a share of TRL's, in each setting."""
    by_setting = pd.read_csv(table).groupby(["model", "tokens", "questions"], sort=False)
    figure, [axes] = panels(1, height=4.4)
    labels = []
    for y, ((model, tokens, questions), rows) in enumerate(by_setting):
        parts = [f"{model} parameters"] if y < 5 else [f"{tokens} tokens"] * (tokens != 128)
        labels += [*parts, *[f"{questions} questions"] * (questions != 4)]
        medians = rows.groupby("program")[["seconds_per_step", "peak_gib"]].median()
        for share, color, label in zip(
            medians.loc["ours"] / medians.loc["trl"], (BLUE, ORANGE), ("time", "memory")
        ):
            axes.plot(share, y, "o", color=color, label=None if y else label)
    axes.axvline(1, color=INK, lw=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.set(
        xlim=(0, 1.1), ylim=(len(labels) - 0.5, -0.5), title="A step's time and memory: TRL = 1"
    )
    axes.set_xlabel("usually 10 M parameters, 128 tokens, 4 questions")
    return key_below(figure, axes)
