"""The picture of a run of grpo_mnist.py, or of all methods, from the logs."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

BLUE, ORANGE, GREY, GREEN, RED = "#0969da", "#c2570c", "#6e7781", "#1a7f37", "#cf222e"
COLORS = {"grpo": BLUE, "cross_entropy": GREY, "ppo": ORANGE, "reinforce": GREEN, "exact": RED}
LABELS = {
    "grpo": "GRPO",
    "cross_entropy": "cross-entropy",
    "ppo": "PPO with critic",
    "reinforce": "REINFORCE, no baseline",
    "exact": "exact gradient",
}


def draw_accuracy(path: Any, logs: dict[str, Any]) -> Figure:
    """Above: validation accuracy of all methods, mean over the seeds, and a band from lowest to
    highest.

    Below: the signal in the first method's groups, one quantity an axis. `logs` has a log for each
    method, whose fields are [NUM_SEEDS, rows].
    """
    figure = Figure((6, 5.6), layout="constrained")
    panels = figure.subplot_mosaic([["main"] * 3, [0, 1, 2]], height_ratios=(5, 2))
    main = panels["main"]
    # [seeds, rows]
    errors = {method: 100 * (1 - log.validation_accuracy) for method, log in logs.items()}
    for method, error in errors.items():
        x, error = logs[method].images[0], np.maximum(error, 0.1)
        main.plot(x, error.mean(axis=0), color=COLORS[method], label=LABELS[method])
        low, high = error.min(axis=0), error.max(axis=0)
        main.fill_between(x, low, high, color=COLORS[method], alpha=0.2, linewidth=0)
    # From 97 to 98 % is as far as from 91 to 94 %.
    main.set(
        xlabel="images seen",
        yscale="log",
        title="validation accuracy, %",
        xticks=[0, x[-1] / 2, x[-1]],
    )
    main.xaxis.set_major_formatter("{x:,.0f}")
    ticks = [0.5, 1, 2, 3, 5, 10, 20, 50, 90]
    main.set_yticks(ticks, [f"{100 - tick:g}" for tick in ticks])
    main.yaxis.set_minor_locator(NullLocator())
    every = np.concatenate(list(errors.values()))
    main.set_ylim(min(1.3 * every.max(), 100), max(0.8 * every.min(), 0.1))
    main.legend(frameon=False, loc="lower right")
    method, log = next(iter(logs.items()))
    for row, (values, title, color) in enumerate(
        (
            (log.reward, "right guesses", BLUE),
            (log.zero_variance, "groups without signal", RED),
            (log.advantage_std, "std of advantages", GREY),
        )
    ):
        panels[row].plot(log.images[0], values.mean(axis=0), color=color)
        panels[row].set_title(title, fontsize=10)
        panels[row].xaxis.set_major_formatter("{x:,.0f}")
        panels[row].set(ylim=(0, 1), xticks=[log.images[0][-1]])
    figure.supxlabel(
        f"{LABELS[method]}'s groups: share or spread, over the images seen", fontsize="medium"
    )
    figure.savefig(path, dpi=110)
    return figure
