"""The drawings of the course: what explains, and isn't measured."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from measure import pictures
from measure.pictures import BLUE, GREEN, GREY, ORANGE, RED, WIDE, panels

Point = tuple[float, float]
PLANS = tomllib.loads((Path(__file__).parent / "drawings.toml").read_text())
COLOURS = {"blue": BLUE, "green": GREEN, "grey": GREY, "orange": ORANGE}


# %% Boxes and arrows ------------------------------------------------------------------------------
def sheet(height: float, bottom: float = 0) -> tuple[Figure, Axes]:
    """An empty picture whose unit is an inch."""
    figure = Figure((WIDE, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDE), ylim=(bottom, bottom + height))
    axes.axis("off")
    return figure, axes


def say(axes: Axes, x: float, y: float, text: str, **options) -> None:
    """Words about a point."""
    axes.text(x, y, text, **({"ha": "center", "va": "center", "fontsize": 10.5} | options))


def box(axes: Axes, middle: Point, size: Point, text: str, colour: str = BLUE, **options) -> None:
    """A box with words in it."""
    (x, y), (width, height) = middle, size
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=style, fc=f"{colour}18", ec=colour, lw=1.6)
    )
    say(axes, x, y, text, **options)


def arrow(axes: Axes, start: Point, end: Point, **options) -> None:
    """An arrow."""
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "lw": 1.5, "color": GREY} | options
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **look))


def signed(number: float, digits: int = 0) -> str:
    """A number with its sign and without zeros at its end."""
    text = f"{number:+.{digits}f}"
    text = text.rstrip("0").rstrip(".") if digits else text
    return "0" if float(text) == 0 else text.replace("-", "−")


def plan(height: float, items: Sequence[Sequence[Any]], bottom: float = 0) -> Figure:
    """A drawing of drawings.toml."""
    figure, axes = sheet(height, bottom)
    for kind, *given in items:
        options = given.pop() if isinstance(given[-1], dict) else {}
        if "color" in options:
            options = options | {"color": COLOURS[options["color"]]}
        if kind == "box":
            given[3] = COLOURS[given[3]]
        {"say": say, "box": box, "arrow": arrow}[kind](axes, *given, **options)
    return figure


def drawn(name: str, *tables: Path) -> Figure:
    """The picture that a study.toml names: of drawings.toml, or a function here or in pictures."""
    if name in PLANS:
        return plan(**PLANS[name])
    return (getattr(pictures, name, None) or globals()[name])(*tables)


# %% The drawings ----------------------------------------------------------------------------------
# An episode of eight steps, then terminated: what each brought, and what the critic had promised
# before it.
REWARDS = np.array([0, 1, 0, 1, 0, 1, 0, 5])
PROMISES = np.array([6, 5, 6, 7, 6, 4, 2, 3])


def gae_timeline() -> Figure:
    """The TD errors of an episode, and what of each is counted in the first step's advantage."""
    # gamma = 1; nothing is promised at the end
    delta = REWARDS + np.append(PROMISES[1:], 0) - PROMISES
    steps = np.arange(1, 9)
    figure = Figure((WIDE, 5.6))
    rows = figure.subplots(4, 1, sharex=True, height_ratios=(2, 3, 3, 3))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99, hspace=0.1)
    rows[0].set(ylim=(-3.4, 0.6))
    for y, words in enumerate(("step", "reward", "V", "δ")):
        say(rows[0], -0.7, -y, words, ha="left", weight="bold")
        for step, number in zip(steps, (steps, REWARDS, PROMISES, delta)[y], strict=True):
            say(rows[0], step, -y, signed(number) if words == "δ" else str(number))
    kinds = {
        0.0: "trust the critic after one step",
        0.5: "each later step counts half",
        1.0: "trust only the rewards",
    }
    for axes, (gae_lambda, words) in zip(rows[1:], kinds.items(), strict=True):
        shares = delta * gae_lambda ** (steps - 1)
        axes.bar(steps, delta, width=0.6, color="none", edgecolor=GREY, lw=0.8, ls=":")
        axes.bar(steps, shares, width=0.6, color=np.where(shares > 0, GREEN, RED))
        axes.axhline(0, color=GREY, lw=1)
        axes.set(ylim=(-3.3, 4.3))
        for step, share, whole in zip(steps, shares, delta, strict=True):
            number = signed(share, 3 if abs(share) > 0.1 else 2)
            above = whole >= 0
            say(
                axes,
                step,
                whole + (0.2 if above else -0.2),
                number,
                va="bottom" if above else "top",
            )
        axes.text(-0.7, 3.4, f"λ = {gae_lambda:g}:", fontsize=11, weight="bold")
        axes.text(0.45, 3.4, words, fontsize=11)
        say(
            axes,
            8.6,
            3.75,
            f"A₁ = {signed(shares.sum(), 3)}",
            fontsize=11,
            weight="bold",
            ha="right",
        )
    for axes in rows:
        axes.set(xlim=(-0.7, 8.6), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return figure


# The course on one page: what an algorithm learns, from what, its update, its baseline, its limit.
CARD = {
    "1 Q-learning": (
        "learns: a table of values, Q(s, a)",
        "from: single steps, whoever chose the action",
        "update: Q(s, a) += α · (r + γ · max Q(s′, ·) − Q(s, a))",
        "baseline: none, it compares with its own estimate",
        "limit: one table row per state, a few actions",
    ),
    "2 DQN": (
        "learns: a network that computes the values",
        "from: a buffer of old steps, each used many times",
        "update: one gradient step on (r + γ · max Q′(s′, ·) − Q(s, a))²",
        "baseline: none, the target comes from a delayed copy Q′",
        "limit: no continuous actions; training can be unstable",
    ),
    "3 REINFORCE": (
        "learns: the policy π(a|s) itself",
        "from: whole episodes of the current policy, used once",
        "update: θ += η · (return − baseline) · ∇ log π(a|s)",
        "baseline: anything the action doesn't change: a mean, a critic",
        "limit: noisy, and every batch is thrown away",
    ),
    "3 PPO": (
        "learns: a policy and a critic",
        "from: rollouts of the current policy, used ten times",
        "update: maximize min(ratio · A, clip(ratio, 1 ± ε) · A)",
        "baseline: the critic's V(s), with GAE",
        "limit: needs a second network, and trains it all the time",
    ),
    "4, 5 GRPO": (
        "learns: a policy, up to a language model",
        "from: eight answers to each question, graded by a program",
        "update: PPO's, minus β · KL to the frozen start",
        "baseline: the mean of the eight answers",
        "limit: a group of equal rewards teaches nothing",
    ),
}


def course_card() -> Figure:
    """The five algorithms below each other, five lines each: one page to print."""
    figure, axes = sheet(8.3)
    for i, (name, lines) in enumerate(CARD.items()):
        top = 8.2 - 1.64 * i
        box(axes, (3, top - 0.77), (5.9, 1.54), "", (BLUE, BLUE, ORANGE, ORANGE, GREEN)[i])
        say(axes, 0.2, top - 0.2, name, ha="left", weight="bold", fontsize=11.5)
        for row, line in enumerate(lines):
            say(axes, 0.2, top - 0.45 - 0.228 * row, line, ha="left")
    return figure


def kl_band() -> Figure:
    """Two possible answers: how far the policy is from the reference, and which way it's pulled."""
    figure, [axes] = panels(1, height=3.3)
    p = np.linspace(0.001, 0.999, 400)  # of the first answer; the reference gives it one half
    kl = p * np.log(p / 0.5) + (1 - p) * np.log((1 - p) / 0.5)
    axes.plot(p, kl, color=GREY)
    here = 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5)
    band = np.linspace(0.5, 0.7, 25)  # the rubber band, as a zigzag
    zigzag = -0.11 + 0.035 * np.where(np.arange(25) % 2, 1, -1) * (np.arange(25) % 24 > 0)
    axes.plot(band, zigzag, color=ORANGE, lw=1.5)
    axes.plot([0.5, 0.8], [0, here], "o", color=BLUE)
    axes.vlines([0.5, 0.8], -0.11, [0, here], color=GREY, lw=0.8, ls=":")
    arrow(axes, (0.8, -0.11), (0.69, -0.11), color=ORANGE, lw=2.5)
    arrow(axes, (0.8, -0.11), (0.93, -0.11), color=GREEN, lw=2.5)
    say(axes, 0.5, 0.06, "reference")
    say(axes, 0.77, 0.24, f"policy: KL = {here:.3f}", ha="right")
    say(axes, 0.62, -0.22, "the KL pulls back", color=ORANGE)
    say(axes, 0.88, -0.22, "the reward pulls", color=GREEN)
    axes.set(
        title="The further the policy moves away, the harder it's pulled back",
        xlabel="probability of the first answer",
        ylabel="KL to the reference, nats",
        ylim=(-0.3, 0.7),
        yticks=(0, 0.2, 0.4, 0.6),
    )
    return figure


def ratio_passes(table: Path) -> Figure:
    """The ratios of twenty actions while ten passes go over their rollout, with the clip and
    without.
    """
    figure, both = panels(1, 2, 3.4, sharey=True)
    kinds = pd.read_csv(table).groupby("clip_epsilon", sort=False)
    titles = "with the clip, ε = 0.2", "without the clip"
    for axes, (_, mine), title in zip(both, kinds, titles, strict=True):
        axes.axhspan(0.8, 1.2, color=GREY, alpha=0.2, lw=0)
        for _, action in mine.groupby("step", sort=False):
            colour = GREEN if action.normalized_advantage.iloc[0] > 0 else RED
            axes.plot(action.passes, action.ratio, color=colour, lw=1.2, alpha=0.8)
        outside = f"{100 * mine.share_outside.iloc[-1]:.0f} % end outside 1 ± ε"
        axes.set(
            title=f"{title}\n{outside}",
            xlabel="passes over the rollout",
            xlim=(0, 10),
            ylim=(0, 2.05),
        )
    both[0].set(ylabel="ratio: new probability / old", yticks=(0, 0.4, 0.8, 1, 1.2, 1.6, 2))
    for y, colour, words in ((0.25, GREEN, "advantage above 0"), (0.08, RED, "advantage below 0")):
        both[0].text(0.3, y, words, color=colour, fontsize=10)
    return figure


def eight_answers(transcript: Path) -> Figure:
    """A group of the main job's first step: rewards, their mean, and the advantages."""
    group = json.loads(transcript.read_text())
    rewards, advantages = (
        np.array([a[n] for a in group["before"]]) for n in ("reward", "advantage")
    )
    rows = np.arange(len(rewards))
    figure, (left, right) = panels(1, 2, 4.6, sharey=True)
    figure.suptitle(f"{group['question']}\n(right: {group['answer']})", fontsize=10.5)
    left.barh(rows, rewards, color=GREY, height=0.4)
    # not across the answers
    left.vlines([rewards.mean()] * 8, rows - 0.2, rows + 0.38, color=ORANGE, lw=2)
    left.text(rewards.mean() + 0.1, 7.45, f"mean {rewards.mean():.2f}", color=ORANGE, fontsize=10)
    left.set(title="reward, points", xlim=(0, 10), ylim=(7.6, -0.7), yticks=[])
    right.barh(rows, advantages, color=np.where(advantages > 0, GREEN, RED), height=0.4)
    right.axvline(0, color=GREY, lw=1)
    right.set(title="advantage, in std", xlim=(-2.3, 2.6))
    for row, (answer, advantage) in enumerate(zip(group["before"], advantages, strict=True)):
        left.text(0, row - 0.28, answer["text"], family="monospace", fontsize=8.5)
        side = 1 if advantage > 0 else -1
        say(
            right,
            advantage + 0.08 * side,
            row,
            signed(advantage, 2),
            ha="left" if side > 0 else "right",
        )
    return figure


def pushes(group: dict, row: int) -> list[float]:
    """How hard a group pushes each token of one of its answers, before the division by the length.

    Of the answers that begin as this one does, those that drew the same token push it up by their
    advantage, and all push it down by their advantage times its probability: the slope of sum_i A_i
    log pi along the token's logit.
    """
    answers, mine = group["before"], group["before"][row]
    pushed = []
    for t, piece in enumerate(mine["pieces"]):
        here = [answer for answer in answers if answer["pieces"][:t] == mine["pieces"][:t]]
        probability = np.exp(mine["log_prob"][t])
        pushed.append(sum(a["advantage"] * ((a["pieces"][t] == piece) - probability) for a in here))
    return pushed


def token_credit(transcript: Path) -> Figure:
    """Two answers of the group, token by token: where the push of the eight advantages falls."""
    group = json.loads(transcript.read_text())
    figure, axes = sheet(3.0)
    say(
        axes,
        0.1,
        2.82,
        "Tokens that all eight answers share get almost no push",
        ha="left",
        weight="bold",
    )
    for y, row, name in (
        (1.85, 2, "the best answer: A = +1.65"),
        (0.55, 5, "a wrong answer: A = −1.08"),
    ):
        say(axes, 0.1, y + 0.48, name, ha="left")
        x = 0.1
        for piece, push in zip(group["before"][row]["pieces"][:-1], pushes(group, row)):
            width = 0.1 + 0.077 * len(piece)
            strength = min(abs(push) / 3.2, 1)
            seen = strength > 0.02
            colour = (GREEN if push > 0 else RED) if seen else GREY
            axes.add_patch(
                FancyBboxPatch(
                    (x, y - 0.18),
                    width,
                    0.36,
                    boxstyle="round,pad=0,rounding_size=0.05",
                    ec=colour,
                    lw=1.6 if seen else 0.8,
                    fc=f"{colour}{int(30 + 80 * strength):02x}" if seen else "none",
                )
            )
            say(axes, x + width / 2, y, piece, fontsize=9, family="monospace")
            if seen:
                say(axes, x + width / 2, y - 0.34, signed(push, 2), color=colour, weight="bold")
            x += width + 0.06
    return figure


def values_crawl(table: Path) -> Figure:
    """What the table of chapter 1 holds after so many episodes: the best action's value in each
    cell.
    """
    figure, axes = panels(2, 2, 2.7)
    for one, (episodes, rows) in zip(
        axes, pd.read_csv(table).groupby("episodes", sort=False), strict=True
    ):
        for i, value in enumerate(rows.best_value):
            row, column = divmod(i, 4)
            one.add_patch(
                Rectangle((column, row), 1, 1, fc=BLUE, ec=GREY, lw=0.6, alpha=max(value, 0) / 200)
            )
            text = "goal" if i == len(rows) - 1 else f"{value:.0f}" if value >= 0.5 else "·"
            say(one, column + 0.5, row + 0.5, text, fontsize=11.5)
        one.set(
            title=f"after episode {episodes}",
            xticks=[],
            yticks=[],
            xlim=(0, 4),
            ylim=(4, 0),
            aspect=1,
        )
        one.spines[:].set_visible(True)
    return figure


def memory(table: Path) -> Figure:
    """What PPO and GRPO keep on the chip, at 8 billion parameters in bfloat16."""
    row = pd.read_csv(table, index_col="network").loc["8 billion, bfloat16, reference in bfloat16"]
    figure, [axes] = panels(1, height=3.0)
    parts = {
        "weights": BLUE,
        "gradients": BLUE,
        "adam_moments": BLUE,
        "reference": GREY,
        "critic": RED,
    }
    words = {"adam_moments": "Adam", "critic": "critic: weights,\ngradients, Adam"}
    for y, method in enumerate(("GRPO", "PPO")):
        left = 0.0
        for name, colour in parts.items():
            if name == "critic" and method == "GRPO":
                continue
            size = row[name] / 1e9
            axes.barh(y, size, left=left, color=f"{colour}30", edgecolor=colour, height=0.6)
            upright = {"rotation": 90} if size < 20 else {}
            say(
                axes,
                left + size / 2,
                y,
                f"{words.get(name, name)}\n{size:.1f}",
                fontsize=10,
                **upright,
            )
            left += size
        say(axes, left + 2, y, f"{left:.0f} GB", weight="bold", ha="left")
    axes.set_yticks([0, 1], ["GRPO", "PPO"], fontsize=11)
    axes.set(xlim=(0, 172), xlabel="GB, 8 billion parameters in bfloat16, without activations")
    axes.set_title("The critic is nearly half of PPO's memory; GRPO has none")
    return figure


# mesh of mesh_and_axis_rules.py, and into how many rows and columns the weights are cut
STRATEGIES = {
    "data parallel": ("8 × 1", 1, 1),
    "tensor parallel": ("1 × 8", 1, 8),
    "both": ("4 × 2", 1, 2),
    "FSDP": ("8 × 1", 8, 1),
    "FSDP + tensor": ("4 × 2", 4, 2),
}


def mesh_and_axis_rules() -> Figure:
    """The weights of a layer as five strategies cut them, and what one of eight devices keeps of
    them.
    """
    figure, axes = panels(2, 3, 2.5)
    for one, (name, (mesh, rows, columns)) in zip(axes, STRATEGIES.items(), strict=False):
        pieces = rows * columns
        for i in range(pieces):
            row, column = divmod(i, columns)
            look = {"fc": "none" if i else f"{BLUE}50", "ec": GREY}
            one.add_patch(Rectangle((column / columns, row / rows), 1 / columns, 1 / rows, **look))
        say(one, 0.5, 1.1, "device 0: " + (f"1/{pieces}" if pieces > 1 else "everything"))
        one.set(
            title=f"{name}\nmesh {mesh}",
            xlim=(0, 1),
            ylim=(1.25, 0),
            xticks=[],
            yticks=[],
            aspect=1,
        )
        one.spines[:].set_visible(False)
    axes[-1].axis("off")
    words = "One layer's weights,\ncut over 8 devices.\nBlue: the piece\nof device 0"
    say(axes[-1], 0, 0.6, words, ha="left")
    return figure
