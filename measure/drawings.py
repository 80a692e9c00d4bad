"""The drawings of the course: what explains, and isn't measured.

    python -m measure.drawings

Draws the map of the course, agent and environment, values that crawl back, actor and critic, surprises that
become an advantage, the ratios of one update, eight answers, their advantages and where these push, the
programs that train the language model, what they keep in memory, and eight chips as a mesh.
"""

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from measure.columns import read_csv
from measure.pictures import darken

ROOT = Path(__file__).resolve().parent.parent
BLUE, ORANGE, GREEN, RED, GREY = "#1f77b4", "#d9730d", "#2a8f3c", "#c73a3a", "#6b7280"
Point = tuple[float, float]


# %% Boxes and arrows -----------------------------------------------------------------------------------
def sheet(width: float, height: float) -> tuple[plt.Figure, Axes]:
    """An empty picture whose unit is an inch."""
    figure = plt.figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, middle: Point, size: Point, text: str, colour: str = BLUE, **options) -> None:
    """A box with words in it."""
    (x, y), (width, height) = middle, size
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc=f"{colour}18", ec=colour, lw=1.6))
    axes.text(x, y, text, ha="center", va="center", **({"fontsize": 10} | options))


def arrow(axes: Axes, start: Point, end: Point, text: str = "", at: Point | None = None, **options) -> None:
    """An arrow, with words beside it."""
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "lw": 1.5, "color": GREY} | options
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **look))
    if text:
        x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.text(x, y, text, ha="center", va="center", fontsize=9)


# %% The drawings ---------------------------------------------------------------------------------------
def course_map() -> plt.Figure:
    """Five chapters: what each learns, who says whether an action was good, and what that costs."""
    figure, axes = sheet(10, 4.6)
    steps = (
        ("1  Q-learning", "a table\n64 numbers", "the table\nitself", "every cell must\nbe visited"),
        ("2  DQN", "a network\n4,610 weights", "a frozen copy\nof the network",
         "targets that move:\nunstable"),
        ("3  REINFORCE, PPO", "policy and critic\n9,027 weights", "the critic, which\nlearns along",
         "a second network"),
        ("4  GRPO by hand", "a policy\n118,282 weights", "the mean of\neight guesses",
         "eight guesses\nper image"),
        ("5  GRPO, MaxText", "a language model\n0.3 million to 8 billion", "the mean of\neight answers",
         "eight answers\nper question"),
    )  # fmt: skip
    axes.text(5, 4.38, "Was the action good? Each chapter asks somebody else, and pays another price",
              ha="center", va="center", fontsize=11.5, weight="bold")  # fmt: skip
    for i, (title, what, judge, price) in enumerate(steps):
        x = 1.05 + 1.98 * i
        axes.text(x, 3.95, title, ha="center", va="center", fontsize=10, weight="bold")
        box(axes, (x, 3.38), (1.72, 0.66), what, BLUE)
        box(axes, (x, 2.3), (1.72, 0.66), judge, ORANGE)
        box(axes, (x, 1.5), (1.72, 0.6), price, GREY, fontsize=9)
        arrow(axes, (x, 2.63), (x, 3.05))
        if i:
            arrow(axes, (x - 1.12, 3.38), (x - 0.86, 3.38))
    box(axes, (8.97, 0.72), (1.72, 0.6), "mesh: its numbers\ncut over many chips", GREEN, fontsize=9)
    arrow(axes, (8.97, 1.2), (8.97, 1.02))
    axes.text(8.0, 0.72, "last part, when the model\nfits on no chip (the mesh)", ha="right", va="center",
              fontsize=9)  # fmt: skip
    for x, colour, words in (
        (0.2, BLUE, "blue: what is learned"),
        (2.2, ORANGE, "orange: who says whether an action was good"),
        (5.6, GREY, "grey: the price"),
    ):
        axes.text(x, 0.2, words, ha="left", va="center", fontsize=9, color=colour)
    return figure


def agent_environment() -> plt.Figure:
    """The loop, with a game of coins and enemies."""
    figure, axes = sheet(7.6, 3.0)
    box(axes, (1.5, 1.5), (2.0, 1.1), "agent\nthe player who decides", BLUE)
    box(axes, (6.1, 1.5), (2.0, 1.1), "environment\nthe level of the game", ORANGE)
    arc = "arc3,rad=-0.35"
    arrow(axes, (1.5, 2.05), (6.1, 2.05), "action:  step left", (3.8, 2.62), connectionstyle=arc)
    arrow(axes, (6.1, 0.95), (1.5, 0.95), connectionstyle=arc)
    axes.text(3.8, 0.38, "next state:  x = 3, y = 7", ha="center", va="center", fontsize=9)
    axes.text(3.8, 0.62, "reward:  coin +10, enemy −50", ha="center", va="center", fontsize=9, color=GREEN)
    return figure


def actor_critic() -> plt.Figure:
    """Who tells whom what."""
    figure, axes = sheet(8.2, 3.7)
    box(axes, (1.4, 1.85), (1.9, 1.0), "environment\nthe pendulum", ORANGE)
    box(axes, (6.2, 3.0), (2.3, 0.9), "actor\nwhich torque?", BLUE)
    box(axes, (6.2, 0.7), (2.3, 0.9), "critic\nhow much is to be\nexpected from here?", GREEN)
    arrow(axes, (2.35, 2.1), (5.05, 2.82), "state", (3.55, 2.68))
    arrow(axes, (2.35, 1.6), (5.05, 0.85), "state, reward", (3.3, 1.0))
    arrow(axes, (5.05, 3.25), (1.4, 2.35), "action", (2.6, 3.2), connectionstyle="arc3,rad=0.22")
    arrow(axes, (6.2, 1.15), (6.2, 2.55), color=GREEN, lw=2)
    axes.text(6.35, 1.85, "advantage:\nbetter or worse\nthan expected", ha="left", va="center", fontsize=9)
    return figure


# An episode of eight steps, then terminated: what each brought, and what the critic had promised before it.
REWARDS = np.array([0, 1, 0, 1, 0, 1, 0, 5])
PROMISES = np.array([6, 5, 6, 7, 6, 4, 2, 3])


def surprises() -> np.ndarray:
    """delta of each step, gamma = 1; after the last one nothing is promised."""
    return REWARDS + np.append(PROMISES[1:], 0) - PROMISES


def gae_timeline() -> plt.Figure:
    """The surprises of an episode, and what of each is counted in the first step's advantage."""
    delta, steps = surprises(), np.arange(1, 9)
    figure, rows = plt.subplots(3, 1, figsize=(9.2, 4.3), dpi=150, sharex=True, layout="constrained")
    kinds = (
        (0.0, "trust the critic\nat once", "worse than promised"),
        (0.5, "each step later\ncounts half", "about as promised"),
        (1.0, "count all\nthat came", "better than promised"),
    )
    for axes, (gae_lambda, words, verdict) in zip(rows, kinds, strict=True):
        shares = delta * gae_lambda ** (steps - 1)
        axes.bar(steps, delta, width=0.6, color="none", edgecolor=GREY, lw=0.8, ls=":")
        axes.bar(steps, shares, width=0.6, color=np.where(shares > 0, GREEN, RED))
        axes.axhline(0, color=GREY, lw=1)
        axes.set(xlim=(0.4, 8.6), ylim=(-3.1, 3.1), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        for step, share, whole in zip(steps, shares, delta, strict=True):
            above = whole >= 0
            number = signed(share, 3 if abs(share) > 0.1 else 2)
            axes.text(step, whole + (0.2 if above else -0.2), number, fontsize=9, ha="center",
                      va="bottom" if above else "top")  # fmt: skip
        for x, side, bold, plain in (
            (-0.02, "right", f"λ = {gae_lambda:g}", words),
            (1.02, "left", f"A₁ = {signed(shares.sum(), 3)}", verdict),
        ):
            beside = {"ha": side, "transform": axes.transAxes}
            axes.text(x, 0.6, bold, fontsize=11, weight="bold", **beside)
            axes.text(x, 0.52, plain, fontsize=9, va="top", color=GREY, **beside)
    for step, reward, promise, surprise in zip(steps, REWARDS, PROMISES, delta, strict=True):
        rows[0].text(step, 6.3, f"step {step}", ha="center", weight="bold", fontsize=10)
        numbers = f"reward {reward}\nV = {promise}\nδ = {signed(surprise)}"
        rows[0].text(step, 6.0, numbers, ha="center", va="top", fontsize=9)
    rows[0].text(8.75, 6.3, "then terminated", weight="bold", fontsize=10)
    return figure


def signed(number: float, digits: int = 0) -> str:
    """A number with its sign and without zeros at its end."""
    text = f"{number:+.{digits}f}"
    text = text.rstrip("0").rstrip(".") if digits else text
    return "0" if float(text) == 0 else text.replace("-", "−")


def ratio_passes() -> plt.Figure:
    """The ratios of twenty actions while ten passes go over their rollout, with the clip and without."""
    lines = read_csv(ROOT / "3_Pendulum" / "assets" / "ratio_passes.csv")
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.5), dpi=150, sharey=True, layout="constrained")
    kinds = dict.fromkeys(line["clip_epsilon"] for line in lines)
    for axes, epsilon, title in zip(panels, kinds, ("with the clip, ε = 0.2", "without it"), strict=True):
        mine = [line for line in lines if line["clip_epsilon"] == epsilon]
        axes.axhspan(0.8, 1.2, color=GREY, alpha=0.18, lw=0)
        for step in dict.fromkeys(line["step"] for line in mine):
            action = [line for line in mine if line["step"] == step]
            good = float(action[0]["normalized_advantage"]) > 0
            axes.plot([int(line["passes"]) for line in action], [float(line["ratio"]) for line in action],
                      color=GREEN if good else RED, lw=1.2, alpha=0.8)  # fmt: skip
        outside = float(mine[-1]["share_outside"])
        axes.set_title(f"{title}: {outside:.0%} end outside of the band".replace("%", " %"), fontsize=10)
        axes.set(xlabel="passes over the rollout", xticks=range(11), xlim=(0, 10), ylim=(0, 2.05),
                 yticks=(0, 0.4, 0.8, 1, 1.2, 1.6, 2))  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ratio: probability now / when drawn")
    for y, colour, words in (
        (0.36, GREEN, "green: an action with an advantage above 0"),
        (0.21, RED, "red: one below 0"),
        (0.06, GREY, "grey band: 1 ± ε"),
    ):
        panels[0].text(0.2, y, words, color=colour, fontsize=9)
    return figure


def eight_answers() -> plt.Figure:
    """A group of the main job's first step: rewards, their mean, and the advantages."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    rewards, advantages = (
        np.array([answer[name] for answer in group["before"]]) for name in ("reward", "advantage")
    )
    rows = np.arange(len(rewards))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.9), dpi=150, sharey=True, width_ratios=(1, 1), layout="constrained"
    )
    figure.suptitle(f"{group['question']}   (right: {group['answer']})", fontsize=10)
    left.barh(rows, rewards, color=GREY, height=0.6)
    left.axvline(rewards.mean(), color=ORANGE, lw=2)
    left.text(rewards.mean() + 0.1, -0.75, f"mean {rewards.mean():.2f}", color=ORANGE, fontsize=9)
    left.set(xlabel="reward, points", xlim=(0, 10), ylim=(7.6, -1.1))
    left.set_yticks(rows, [answer["text"] for answer in group["before"]], family="monospace", fontsize=7.5)
    right.barh(rows, advantages, color=np.where(advantages > 0, GREEN, RED), height=0.6)
    right.axvline(0, color=GREY, lw=1)
    right.set(xlabel="advantage, standard deviations", xlim=(-2.2, 2.2))
    for row, advantage in zip(rows, advantages):
        side = 1 if advantage > 0 else -1
        right.text(advantage + 0.08 * side, row, f"{advantage:+.2f}".replace("-", "−"),
                   ha="left" if side > 0 else "right", va="center", fontsize=8)  # fmt: skip
    left.set_title("what each answer earns", fontsize=10)
    right.set_title("how far it lies from the group's mean", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def pushes(group: dict, row: int) -> list[float]:
    """How hard a group pushes each token of one of its answers, before the division by the length.

    Of the answers that begin as this one does, those that drew the same token push it up by their advantage,
    and all push it down by their advantage times its probability: the slope of sum_i A_i log pi along the
    token's logit.
    """
    answers, mine = group["before"], group["before"][row]
    pushed = []
    for t, piece in enumerate(mine["pieces"]):
        here = [answer for answer in answers if answer["pieces"][:t] == mine["pieces"][:t]]
        probability = np.exp(mine["log_prob"][t])
        pushed.append(sum(a["advantage"] * ((a["pieces"][t] == piece) - probability) for a in here))
    return pushed


def token_credit() -> plt.Figure:
    """Two answers of the group, token by token: where the push of the eight advantages falls."""
    group = json.loads((ROOT / "5_GRPO_Maxtext" / "assets" / "eight_answers.json").read_text())
    figure, axes = sheet(10, 2.9)
    axes.text(5, 2.66, "Tokens that all answers share are not pushed; those where they part are",
              ha="center", va="center", fontsize=11.5, weight="bold")  # fmt: skip
    for y, row, name in ((1.95, 2, "the right answer\nA = +1.65"), (0.75, 5, "a wrong one\nA = −1.08")):
        axes.text(0.08, y, name, ha="left", va="center", fontsize=9.5)
        x = 1.42
        for piece, push in zip(group["before"][row]["pieces"][:-1], pushes(group, row)):
            width = 0.14 + 0.085 * len(piece)
            strength = min(abs(push) / 3.2, 1)
            colour = GREEN if push > 0 else RED
            seen = strength > 0.02
            axes.add_patch(FancyBboxPatch(
                (x, y - 0.2), width, 0.4, boxstyle="round,pad=0,rounding_size=0.05", lw=1.6 if seen else 0.8,
                ec=colour if seen else GREY, fc=f"{colour}{int(40 + 140 * strength):02x}" if seen else "none",
            ))  # fmt: skip
            axes.text(x + width / 2, y, piece, ha="center", va="center", fontsize=9.5, family="monospace")
            if seen:
                number = f"{push:+.2f}".replace("-", "−")
                axes.text(x + width / 2, y - 0.38, number, ha="center", va="center", fontsize=9.5,
                          color=colour, weight="bold")  # fmt: skip
            x += width + 0.09
    axes.text(5, 0.1, "below a token: the push of all eight answers together; no number: next to none",
              ha="center", va="center", fontsize=9, color=GREY)  # fmt: skip
    return figure


def values_crawl() -> plt.Figure:
    """What the table of chapter 1 holds after so many episodes: the best action's value in each cell."""
    folder = str(ROOT / "1_Q_Learning")
    sys.path.insert(0, folder)
    import Q_Learning

    sys.path.remove(folder)
    c, rng = Q_Learning.Constants(), np.random.default_rng(0)  # SEED=0
    Q = np.zeros((c.SIZE**2, 4))
    figure, panels = plt.subplots(1, 4, figsize=(9.2, 2.7), dpi=150, layout="constrained")
    played = 0
    for axes, episodes in zip(panels, (1, 10, 50, 500), strict=True):
        for episode in range(played, episodes):
            Q_Learning.play_episode(c, Q, Q_Learning.epsilon_at(c, episode), rng)
        played = episodes
        best = Q.max(axis=1).reshape(c.SIZE, c.SIZE)
        axes.imshow(np.where(best > 0, best, np.nan), cmap="Blues", vmin=0, vmax=150)
        for (row, column), value in np.ndenumerate(best):
            goal = row == column == c.SIZE - 1
            text = "goal" if goal else f"{value:.0f}" if value >= 0.5 else "·"
            axes.text(column, row, text, ha="center", va="center", fontsize=10)
        axes.set(title=f"after episode {episodes}", xticks=[], yticks=[])
        axes.title.set_fontsize(10)
    return figure


def stack() -> plt.Figure:
    """Who calls whom when the language model is trained, down to the chips."""
    figure, axes = sheet(9.2, 5.6)
    axes.set(ylim=(-1.0, 4.6))
    box(axes, (4.6, 4.15), (4.0, 0.66), "grpo_llama3_1_8b_demo.py\nthe loop, advantage, loss, update", BLUE)
    box(axes, (1.2, 4.15), (2.0, 0.66), "Grain\nshuffles questions", GREY)
    box(axes, (8.0, 4.15), (2.0, 0.66), "reward_func.py\npoints per answer", GREEN)
    box(
        axes,
        (2.6, 2.95),
        (4.3, 0.66),
        "Tunix: RLCluster\nmodels on chips, new weights to the sampler",
        ORANGE,
    )
    box(axes, (7.75, 1.7), (2.2, 0.9), "Optax, Orbax\nweight updates,\ncheckpoints", GREY)
    box(axes, (1.75, 1.7), (2.6, 0.9), "generation\nmodel/rollout.py\nvLLM (TPU)", ORANGE)
    box(axes, (4.85, 1.7), (2.5, 0.9), "MaxText: the Llama\npolicy (trained)\nreference (frozen)", ORANGE)
    box(axes, (4.6, 0.45), (8.4, 0.56), "JAX and XLA: one program, whatever the chips", BLUE)
    rules = "the mesh and the axis rules: which piece of each array lies on which chip"
    box(axes, (4.6, -0.17), (8.4, 0.44), rules, GREEN)
    for x, chips in ((1.72, "CPU: your laptop, one chip"), (4.6, "TPU: 4, 8 or 32 chips"), (7.48, "GPU")):
        box(axes, (x, -0.7), (2.64, 0.4), chips, GREY)
    arrow(axes, (2.2, 4.15), (2.6, 4.15))
    arrow(axes, (6.6, 4.25), (7.0, 4.25))
    arrow(axes, (7.0, 4.05), (6.6, 4.05))
    arrow(axes, (3.4, 3.82), (3.0, 3.28))
    arrow(axes, (5.3, 3.82), (5.3, 2.15))
    arrow(axes, (6.2, 3.82), (7.4, 2.15))
    arrow(axes, (1.9, 2.62), (1.8, 2.15))
    arrow(axes, (4.2, 2.62), (4.4, 2.15))
    for x in (1.75, 4.85, 7.75):
        arrow(axes, (x, 1.25), (x, 0.73))
    return figure


def memory() -> plt.Figure:
    """What PPO and GRPO keep on the chip, at 8 billion parameters in bfloat16, of the study's memory.csv."""
    rows = read_csv(ROOT / "4_GRPO_MNIST" / "assets" / "memory.csv")
    row = next(row for row in rows if row["network"].startswith("8 billion, bfloat16"))
    figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
    parts = {
        "weights": BLUE, "gradients": BLUE, "adam_moments": BLUE, "reference": GREY, "critic": RED,
    }  # fmt: skip
    words = {"adam_moments": "Adam's moments", "critic": "critic: its weights, gradients, moments"}
    for y, method in enumerate(("GRPO", "PPO")):
        left = 0.0
        for name, colour in parts.items():
            if name == "critic" and method == "GRPO":
                continue
            size = int(row[name]) / 1e9
            axes.barh(y, size, left=left, color=colour, edgecolor="white", height=0.62)
            axes.text(
                left + size / 2, y, f"{words.get(name, name).replace(' ', chr(10), 1)}\n{size:.1f}",
                ha="center", va="center", color="white", fontsize=9,
            )  # fmt: skip
            left += size
        axes.text(left + 1.5, y, f"{left:.1f} GB", va="center", weight="bold")
    axes.set_yticks([0, 1], ["GRPO", "PPO"])
    axes.set(xlim=(0, 168), xlabel="GB, 8 billion parameters in bfloat16, activations not counted")
    axes.set_title("the critic is nearly half of PPO's memory, and GRPO has none")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def mesh_4x2() -> plt.Figure:
    """A list of eight chips becomes a grid; what each axis cuts, and what travels along it."""
    figure, axes = sheet(9.2, 4.4)
    for i in range(8):
        box(axes, (0.62 + 0.42 * i, 3.95), (0.36, 0.4), f"c{i}", GREY, fontsize=9)
    axes.text(0.44, 4.27, "a list of eight chips", fontsize=9)
    arrow(axes, (3.85, 3.95), (4.45, 3.95))
    for row in range(4):
        for column in range(2):
            place = (5.1 + 1.5 * column, 3.3 - 0.85 * row)
            box(axes, place, (1.15, 0.62), f"c{2 * row + column}", (BLUE, ORANGE)[column])
        axes.text(4.35, 3.3 - 0.85 * row, f"data {row}", ha="right", va="center", fontsize=9)
    for column, half in enumerate(("left half", "right half")):
        axes.text(5.1 + 1.5 * column, 3.75, f"model {column}", ha="center", fontsize=9)
        axes.text(5.1 + 1.5 * column, 0.22, f"{half}\nof the weights", ha="center", va="center", fontsize=8.5)
    for row in range(4):
        arrow(axes, (5.68, 3.3 - 0.85 * row), (6.02, 3.3 - 0.85 * row), arrowstyle="<|-|>")
    arrow(axes, (7.45, 3.55), (7.45, 0.55), arrowstyle="<|-|>", color=GREEN, lw=2)
    axes.text(7.6, 2.05, "along data:\ngradients are\nadded up,\nonce per step", va="center", fontsize=9)
    axes.text(5.85, 4.1, "along model: activations, in every layer", ha="center", fontsize=9)
    axes.text(0.44, 2.9, "each row of chips\ngets a quarter of the batch", va="center", fontsize=9)
    axes.text(0.44, 1.9, "each column of chips\nkeeps one half of the weights:\nall four keep the same",
              va="center", fontsize=9)  # fmt: skip
    return figure


DRAWINGS = {
    "1_Q_Learning/assets/course_map.png": course_map,
    "1_Q_Learning/assets/values_crawl.png": values_crawl,
    "1_Q_Learning/assets/agent_environment.png": agent_environment,
    "3_Pendulum/assets/actor_critic.png": actor_critic,
    "3_Pendulum/assets/gae_timeline.png": gae_timeline,
    "3_Pendulum/assets/ratio_passes.png": ratio_passes,
    "5_GRPO_Maxtext/assets/eight_answers.png": eight_answers,
    "5_GRPO_Maxtext/assets/token_credit.png": token_credit,
    "5_GRPO_Maxtext/assets/stack.png": stack,
    "5_GRPO_Maxtext/assets/memory.png": memory,
    "5_GRPO_Maxtext/assets/mesh_4x2.png": mesh_4x2,
}


# %% Main -----------------------------------------------------------------------------------------------
def main() -> None:
    """Draws everything."""
    for name, draw in DRAWINGS.items():
        figure = draw()
        figure.savefig(ROOT / name)
        plt.close(figure)
        darken(ROOT / name)


if __name__ == "__main__":
    main()
