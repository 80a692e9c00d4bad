"""The pictures of the lab books, each a function of committed tables; `save` writes light and dark."""

import io
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
from PIL import Image, ImageSequence

from measure.columns import read_csv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREY, GREEN, RED = "#1f77b4", "#ff7f0e", "#888888", "#2ca02c", "#d62728"
PAGE = np.array([13, 17, 23])  # the background of GitHub's dark pages


# %% Light and dark -------------------------------------------------------------------------------------
def darkened(pixels: np.ndarray) -> np.ndarray:
    """A picture with its lightness turned round and its hues kept; white becomes the dark page.

    Lightness is HSL's, (max + min) / 2: adding 1 - 2 * lightness to every channel turns it round and leaves
    hue and chroma as they are. Where a colour stands for a value, as in a map of V(s), it would say something
    else: such a picture has no twin.

    Args:
        pixels: [height, width, 3], uint8.

    Returns:
        [height, width, 3], uint8.
    """
    colours = pixels / 255.0
    lightness = (colours.max(axis=2, keepdims=True) + colours.min(axis=2, keepdims=True)) / 2  # [H, W, 1]
    turned = np.clip(colours + 1 - 2 * lightness, 0, 1)
    return np.round(PAGE + turned * (255 - PAGE)).astype(np.uint8)


def darken(path: Path) -> None:
    """Writes name_dark.png (or .gif) beside a picture."""
    light = Image.open(path)
    film = getattr(light, "is_animated", False)
    first, *others = (
        Image.fromarray(darkened(np.asarray(frame.convert("RGB")))).quantize(16 if film else 256)
        for frame in ImageSequence.Iterator(light)
    )
    more = {"save_all": True, "append_images": others, "duration": light.info.get("duration"), "loop": 0}
    first.save(path.with_stem(f"{path.stem}_dark"), optimize=True, **(more if film else {}))


def save(figure: plt.Figure, path: Path) -> None:
    """Writes a picture and its dark twin."""
    figure.savefig(path, dpi=figure.dpi if figure.dpi > 100 else 110, facecolor="white")
    plt.close(figure)
    darken(path)


# %% Pieces ---------------------------------------------------------------------------------------------
def grouped(rows: Sequence[dict[str, str]], *names: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """The lines by what these columns hold, in the order of appearance."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def numbers(rows: Sequence[dict[str, str]], name: str) -> np.ndarray:
    """A column."""
    return np.array([float(row[name]) for row in rows])


def draw_band(axes, rows: Sequence[dict[str, str]], color: str, label: str | None = None) -> None:
    """A line of the mean, a band from lowest to highest seed: columns env_step, mean, low, high."""
    x = numbers(rows, "env_step")
    axes.plot(x, numbers(rows, "mean"), color=color, label=label)
    axes.fill_between(x, numbers(rows, "low"), numbers(rows, "high"), color=color, alpha=0.2, linewidth=0)


def seeds_by_row(
    table: Path, height: float, shorten: Callable, said: Callable
) -> tuple[plt.Figure, plt.Axes]:
    """A line for each row of a study, a dot for each seed's last policy, and a word at the right."""
    groups = grouped(read_csv(table), "changed")
    figure, axes = plt.subplots(figsize=(10, height * len(groups) + 0.9), layout="constrained")
    for y, rows in enumerate(groups.values()):
        returns = numbers(rows, "eval_return")
        # Spread out vertically, else ten seeds at one place look like one
        axes.scatter(returns, y + np.linspace(-0.3, 0.3, len(returns)), s=14, color=BLUE)
        axes.text(1.01, y, said(returns), va="center", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(groups)), [shorten(label) for (label,) in groups], fontsize=9)
    axes.grid(axis="both", alpha=0.3)
    axes.set(ylim=(len(groups) - 0.4, -0.6))
    return figure, axes


# %% Folder 1 -------------------------------------------------------------------------------------------
def step_sizes(curves: Path) -> plt.Figure:
    """Left: largest error. Right: return. Lines are means over the seeds, bands lowest to highest."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colors = (BLUE, ORANGE, GREY, GREEN, RED)
    for ((label,), rows), color in zip(grouped(read_csv(curves), "changed").items(), colors, strict=True):
        for axes, name in ((left, "error"), (right, "return")):
            x, low, high = (numbers(rows, key) for key in ("episode", f"{name}_min", f"{name}_max"))
            # The first one thick: where a later one covers it, both are seen
            width = 4 if label == "unchanged" else 1.5
            axes.semilogx(x, numbers(rows, f"{name}_mean"), color=color, label=label, linewidth=width)
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    left.set(xlabel="episode", ylabel="largest |Q − Q*| over all pairs", yscale="log")
    right.set(xlabel="episode", ylabel="return (mean of 50 episodes)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


# %% Folder 2 -------------------------------------------------------------------------------------------
def seeds_of_dqn(table: Path) -> plt.Figure:
    """Last policies, and how many seeds are solved."""
    figure, axes = seeds_by_row(
        table, 0.36,
        lambda label: label.replace(" LEARN", "\nLEARN").replace(" DOUBLE", "\nDOUBLE", 1),
        lambda returns: f"{(returns >= 475).sum()} of {len(returns)}",
    )  # fmt: skip
    axes.axvline(475, color=GREY, linewidth=1)
    axes.set(xlim=(0, 515), xticks=range(0, 501, 100))
    axes.set_xlabel("return of the last policy (line and right: seeds solved, 475 or more)")
    return figure


def overestimation(table: Path) -> plt.Figure:
    """What the network promises less what comes of it, with and without Double DQN."""
    groups = grouped(read_csv(table), "changed")
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    titles = "defaults: the promise starts too low", "1-step targets, copied every 20 steps: too high"
    for axes, label, title in zip(both, ("", "N_STEPS=1 TARGET_SYNC_INTERVAL=20"), titles, strict=True):
        draw_band(axes, groups[label or "unchanged",], BLUE, "Double DQN")
        draw_band(axes, groups[f"{label} DOUBLE_DQN=False".strip(),], ORANGE, "plain max")
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set(xlabel="environment step", title=title)
        axes.legend(frameon=False, loc="lower right")
    both[1].set_yscale("symlog", linthresh=100)  # a seed that runs away would flatten all others
    both[0].set_ylabel("promised less true\ndiscounted return")
    return figure


# %% Folder 3 -------------------------------------------------------------------------------------------
def seeds_of_ppo(table: Path) -> plt.Figure:
    """Last policies, and their mean."""

    def shorten(label: str) -> str:
        steps, *rest = label.split()
        return f"the textbook's constants\n{steps}" if len(rest) > 5 else label.replace(" KL", "\nKL")

    figure, axes = seeds_by_row(table, 0.4, shorten, lambda returns: f"{returns.mean():.1f}")
    axes.set_xlabel("return of the last policy (right: mean over the seeds)")
    return figure


FAILURES = {  # the rows from which most is to be learned
    "CLIP_EPSILON=1e9": "no clip and no KL penalty",
    "BOOTSTRAP_TRUNCATED=False": "truncated is taken for terminated",
    "NORMALIZE_ADVANTAGES=False": "advantages of any size",
    "GAE_LAMBDA=0.0": "the critic is trusted after one step",
    "CRITIC_LEARNING_RATE=1e-3": "the critic learns too slowly",
    "NUM_EPOCHS=1": "every rollout is used once",
}


def failures(table: Path) -> plt.Figure:
    """The greedy policy's learning curve of each row of FAILURES, above that of the first row in grey."""
    groups = grouped(read_csv(table), "changed")
    figure, panels = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained", sharex=True, sharey=True)
    unchanged = groups["unchanged",]
    for axes, (label, words) in zip(panels.flat, FAILURES.items(), strict=True):
        axes.plot(numbers(unchanged, "env_step"), numbers(unchanged, "mean"), color=GREY)
        draw_band(axes, groups[label,], BLUE)
        axes.set_title(f"{words}\n{label}", fontsize=9)
        axes.set_xticks([25_000, 50_000, 75_000, 100_000])
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in panels[:, 0]:
        axes.set_ylabel("return")
    figure.supxlabel("environment steps (grey: unchanged)", fontsize=10)
    return figure


BASELINES = {"no_baseline": ORANGE, "batch_mean": GREY, "critic_baseline": BLUE}


def baselines(table: Path) -> plt.Figure:
    """Greedy return against steps: a panel for each kind of credit, a band for each baseline."""
    groups = grouped(read_csv(table), "changed")
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for axes, to_go, title in zip(both, (True, False), ("return to go", "the whole episode's return")):
        for baseline, color in BASELINES.items():
            draw_band(axes, groups[f"REWARD_TO_GO={to_go} BASELINE={baseline}",], color, baseline)
        axes.set(xlabel="environment step", title=f"each action credited with {title}", ylim=(0, 515))
    both[0].set_ylabel("return of the greedy policy")
    both[1].legend(frameon=False, loc="lower right")
    return figure


def noise(line: dict[str, str], lines: Sequence[dict[str, str]]) -> float:
    """An estimator's variance over the squared length of its mean, which is what it is to find.

    Returns to go and whole returns estimate two vectors of different lengths. Without a baseline the noise
    hides the mean, so the length is taken from the last estimator of the same kind of credit at the same
    policy, which has a baseline; nan where `spread_of` finds it hidden there as well.
    """
    if line["baseline"] != "no_baseline":
        return float(line["ratio"])
    kind = ("env_step", "reward_to_go")
    other = [x for x in lines if all(x[name] == line[name] for name in kind)][-1]
    return float(line["trace"]) / float(other["trace"]) * float(other["ratio"])


def gradient_variance(table: Path) -> plt.Figure:
    """Left: noise of the five estimates at one policy. Right: variance of two of them, along the training."""
    lines = read_csv(table)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), layout="constrained")
    steps = list(dict.fromkeys(int(line["env_step"]) for line in lines))
    step = steps[min(2, len(steps) - 1)]  # it has learned a good part, and still falls
    bars = [line for line in lines if int(line["env_step"]) == step]
    to_go = {"True": "return to go", "False": "whole return"}
    labels = [f"{line['baseline'].replace('_', ' ')},\n{to_go[line['reward_to_go']]}" for line in bars]
    noises = [noise(line, lines) for line in bars]
    left.barh(labels, noises, color=[BASELINES[line["baseline"]] for line in bars])
    for y, value in enumerate(noises):
        if np.isfinite(value):
            digits = 1 - int(np.floor(np.log10(value)))  # two that count
            left.text(value * 1.15, y, f"{round(value, digits):,.{max(0, digits)}f}", va="center", fontsize=9)
    title = f"policy at step {step:,}, return {float(bars[0]['episode_return']):.0f}"
    left.set(xscale="log", xlim=(1, 1e5), title=title)
    left.set_xlabel("noise: variance of the gradient estimate / (length of its mean)²")
    left.invert_yaxis()
    for baseline in ("no_baseline", "critic_baseline"):
        mine = [line for line in lines if (line["reward_to_go"], line["baseline"]) == ("True", baseline)]
        label = f"{baseline.replace('_', ' ')}, return to go"
        right.plot(steps, numbers(mine, "trace"), color=BASELINES[baseline], marker="o", label=label)
    right.set(xlabel="policy frozen at environment step", yscale="log", title="variance along one training")
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.legend(frameon=False)
    return figure


# %% Folder 4 -------------------------------------------------------------------------------------------
def accuracy(table: Path) -> plt.Figure:
    """All four methods while they learn: the chapter's own picture, from the table."""
    draw = runpy.run_path(str(table.resolve().parents[1] / "pictures.py"))["draw_accuracy"]
    logs = {}
    for (method,), rows in grouped(read_csv(table), "method").items():
        seeds = list(dict.fromkeys(row["seed"] for row in rows))
        columns = {n: np.stack([numbers([r for r in rows if r["seed"] == s], n) for s in seeds])
                   for n in rows[0] if n not in ("method", "seed")}  # fmt: skip
        logs[method] = SimpleNamespace(**columns)  # [seeds, rows]
    return draw(io.BytesIO(), logs)


def pull(table: Path) -> plt.Figure:
    """The pull on an image against its probability, both logarithmic: what dividing by the spread does."""
    rows = read_csv(table)
    figure, axes = plt.subplots(figsize=(7.4, 4.2), layout="constrained")
    for name, text, color, place in (
        ("cross_entropy", "cross-entropy: told the digit", GREY, (1.5e-3, 1.3)),
        ("group_std", "group_std, G = 8: GRPO", BLUE, (1.2e-3, 0.05)),
        ("group", "group, G = 8: mean only", ORANGE, (0.02, 7e-3)),
    ):
        axes.loglog(numbers(rows, "p"), numbers(rows, name), color=color, linewidth=2)
        axes.text(*place, text, color=color)
    axes.set(xlabel="p: probability of the right digit", ylabel="pull on the image", ylim=(5e-4, 6))
    axes.set_title("what is rarely guessed is hardly pulled, and dividing by the spread pulls harder")
    return figure


# %% Folder 5 -------------------------------------------------------------------------------------------
def mismatch(table: Path, window: int = 10) -> plt.Figure:
    """What the health line looks at, and what becomes of the answers; moving means of `window` steps."""
    figure, halves = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    labels = {"mismatch": "mismatch (nats per token)", "correct": "answers right"}
    for axes, (name, label) in zip(halves, labels.items(), strict=True):
        for (variant,), rows in grouped(read_csv(table), "variant").items():
            of_seed = list(grouped(rows, "seed").values())
            values = np.stack([numbers(one, name) for one in of_seed])  # [seeds, steps]
            mean = np.stack([np.convolve(row, np.ones(window) / window, "valid") for row in values])
            graded = np.mean([numbers(one, "graded") for one in of_seed], axis=0)[window - 1 :]
            [line] = axes.plot(graded, mean.mean(axis=0), label=variant, lw=1.6)
            band = mean.min(axis=0), mean.max(axis=0)
            axes.fill_between(graded, *band, color=line.get_color(), alpha=0.15, lw=0)
        axes.set(xlabel="answers graded", ylabel=f"{label}, mean of {window} steps", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False)
    figure.suptitle("3 seeds each: mean, lowest and highest")
    return figure
