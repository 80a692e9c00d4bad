"""What a run of Q_Learning.py shows: the printed policy and table, learning_curve.png and
q_table.png.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED = "#0969da", "#c2570c", "#6e7781", "#cf222e"
ARROWS = "↑↓←→"  # in the order of the actions
TIE = 1e-6  # points; actions closer than this are equally good
FLOOR = 1e-14  # an error of exactly 0 has no place on a logarithmic axis: it is drawn here


def policy_text(q_table: np.ndarray) -> str:
    """The greedy policy as lines of arrows, G at the goal, the last state."""
    size = math.isqrt(len(q_table))
    arrows = [*(ARROWS[i] for i in q_table.argmax(axis=1)[:-1]), "G"]
    return "\n".join("  " + " ".join(arrows[row : row + size]) for row in range(0, size**2, size))


def table_text(q_table: np.ndarray, actions: Sequence[str]) -> str:
    """The table with a header, one line per state."""
    lines = ["state" + "".join(f"{name:>9}" for name in actions)]
    lines += [
        f"{state:5d}" + "".join(f"{q:9.3f}" for q in row) for state, row in enumerate(q_table)
    ]
    return "\n".join(lines)


def draw_learning_curve(
    path: Path, log: np.ndarray, errors: np.ndarray, best_return: float
) -> Figure:
    """Above: return, and where epsilon stops falling; `log` is `train`'s. Below: the table's error
    [rows].
    """
    episodes, epsilon, returns = log[:, 0], log[:, 1], log[:, 2]
    figure = Figure((6, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1)
    above.plot(episodes, returns, color=BLUE)
    above.axhline(best_return, color=ORANGE, linestyle="--")
    above.annotate(
        f"best possible: {best_return:g}",
        (episodes[0], best_return),
        (0, -14),
        textcoords="offset points",
        color=ORANGE,
    )
    falls = episodes[epsilon.argmin()]
    above.axvline(falls, color=GREY, linestyle=":")
    above.text(
        falls, returns.min(), f"epsilon is down to {epsilon.min():.2g}  ", color=GREY, ha="right"
    )
    above.set(title=f"return (mean of {episodes[0]:.0f} episodes)", xscale="log")
    below.loglog(episodes, np.maximum(errors, FLOOR), color=BLUE)
    below.set(xlabel="episode, logarithmic", title="largest error of the table")
    figure.savefig(path, dpi=110)
    return figure


def draw_q_table(path: Path, q_table: np.ndarray, moves: Sequence[tuple[int, int]]) -> Figure:
    """The grid of a table [SIZE^2, 4]: a triangle per action, colored and labeled by Q, and greedy
    arrows.

    Every action within TIE of the best gets an arrow: rounding decides which of them argmax takes.
    """
    size = math.isqrt(len(q_table))
    figure = Figure((1.5 * size, 1.35 * size), layout="constrained")
    axes = figure.subplots()
    # (x, y), y downwards; top edge first, clockwise
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    edges = [(0, 1), (2, 3), (3, 0), (1, 2)]  # the two corners on the side of up, down, left, right
    states = range(size**2 - 1)  # all but the goal
    triangles = [
        np.array([corners[first], corners[second], (0.5, 0.5)])
        + np.array([state % size, state // size])
        for state in states
        for first, second in edges
    ]
    look = {"cmap": "viridis", "edgecolors": "white", "linewidths": 0.8}
    patches = PolyCollection(triangles, array=q_table[:-1].ravel(), **look)
    axes.add_collection(patches)
    middle = q_table[:-1].min() / 2 + q_table[:-1].max() / 2
    for state in states:
        center = np.array([state % size + 0.5, state // size + 0.5])
        for q, (rows, columns) in zip(q_table[state], moves):
            x, y = center + 0.34 * np.array([columns, rows])
            # white is the page, and dark on a dark one
            color = "#fefefe" if q < middle else "black"
            axes.text(x, y, f"{q:.1f}", ha="center", va="center", fontsize=8.5, color=color)
        for action in np.flatnonzero(q_table[state] >= q_table[state].max() - TIE):
            tip = center + 0.24 * np.array(moves[action])[::-1]
            look = {"arrowstyle": "-|>", "color": RED, "linewidth": 2.2, "mutation_scale": 16}
            axes.annotate("", xy=tip, xytext=center, arrowprops=look)
    axes.text(size - 0.5, size - 0.5, "goal", ha="center", va="center", fontsize=13)
    axes.text(0.5, -0.04, "start", ha="center", va="bottom", fontsize=13)
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[])
    figure.colorbar(patches, ax=axes, label="Q(state, action)", shrink=0.85)
    figure.savefig(path, dpi=110)
    return figure
