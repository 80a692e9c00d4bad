"""The picture of a run of grpo_mnist.py, or of all twins, drawn from the logs."""

from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREY, GREEN, RED, PURPLE = "#1f77b4", "#ff7f0e", "#888888", "#2ca02c", "#d62728", "#9467bd"
COLORS = {"grpo": BLUE, "cross_entropy": GREY, "ppo": ORANGE, "reinforce": GREEN}
LABELS = {
    "grpo": "GRPO",
    "cross_entropy": "cross-entropy",
    "ppo": "PPO with critic",
    "reinforce": "REINFORCE, no baseline",
}


def draw_accuracy(path: Any, logs: dict[str, Any]) -> plt.Figure:
    """Left: validation accuracy of all methods, mean over the seeds, and a band from lowest to highest.

    Right: the signal in GRPO's groups, one quantity an axis.

    Args:
        path: of the PNG file, or an open one.
        logs: by method, each a NamedTuple of arrays [NUM_SEEDS, rows].
    """
    figure, panels = plt.subplot_mosaic(
        [["left", 0], ["left", 1], ["left", 2]],
        figsize=(11, 4.8), facecolor="white", layout="constrained", width_ratios=(3, 2),
    )  # fmt: skip
    left = panels["left"]
    errors = {method: 100 * (1 - log.validation_accuracy) for method, log in logs.items()}  # [seeds, rows]
    for method, error in errors.items():
        x, error = logs[method].images[0], np.maximum(error, 0.1)
        left.plot(x, error.mean(axis=0), color=COLORS[method], label=LABELS[method])
        low, high = error.min(axis=0), error.max(axis=0)
        left.fill_between(x, low, high, color=COLORS[method], alpha=0.2, linewidth=0)
    # From 97 to 98 % is as far as from 91 to 94 %.
    left.set(xlabel="images seen", yscale="log")
    left.set_ylabel("of 100 validation images right (greedy);\nthe scale widens towards 100")
    left.xaxis.set_major_formatter("{x:,.0f}")
    ticks = [0.5, 1, 2, 3, 5, 10, 20, 50, 90]
    left.set_yticks(ticks, [f"{100 - tick:g}" for tick in ticks])
    left.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    every = np.concatenate(list(errors.values()))
    left.set_ylim(min(1.3 * every.max(), 100), max(0.8 * every.min(), 0.1))
    left.legend(frameon=False, loc="lower right")
    log = logs["grpo"]
    for row, (values, title, color) in enumerate(
        (
            (log.reward, "GRPO: share of right guesses", BLUE),
            (log.zero_variance, "groups without signal: all right or all wrong", RED),
            (log.advantage_std, "spread of the advantages", PURPLE),
        )
    ):
        panels[row].plot(log.images[0], values.mean(axis=0), color=color)
        panels[row].set_title(title, fontsize=10)
        panels[row].set_ylim(0, 1)
        panels[row].xaxis.set_major_formatter("{x:,.0f}")
        panels[row].set_xticks(left.get_xticks()[1:-1:2])
    panels[2].set_xlabel("images seen (training images)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return figure
