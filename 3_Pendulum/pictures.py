"""The pictures of a run of this folder's scripts: drawn from what the run hands over."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the GIF is drawn without a screen

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

BLUE, ORANGE, GREY, GREEN = "#0969da", "#c2570c", "#6e7781", "#1a7f37"


def draw_band(
    axes, x: np.ndarray, curves: np.ndarray, color: str, label: str | None = None
) -> None:
    """Mean over the seeds, and a band from the lowest to the highest; `curves` is [NUM_SEEDS,
    rows].
    """
    axes.plot(x, curves.mean(axis=0), color=color, label=label)
    axes.fill_between(
        x, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0
    )


def draw_return(axes, x: np.ndarray, log: Any) -> None:
    """Of the greedy policy, and while training."""
    draw_band(axes, x, log.eval_return, BLUE, "greedy policy")
    ended = ~np.isnan(log.episode_return).any(axis=0)  # a short interval may see no episode end
    axes.plot(x[ended], log.episode_return.mean(axis=0)[ended], color=GREY, label="sampled actions")
    axes.set(title="return", ylim=(None, 0) if (log.eval_return < 0).any() else (0, 515))
    axes.legend(frameon=False, loc="lower right")


def draw_ppo_curve(path: Path, log: Any) -> Figure:
    """Return against environment steps; below, what a practitioner watches, one axis each."""
    figure = Figure((6, 6.4), layout="constrained")
    places = [["return", "return"], ["kl", "clipped"], ["explained", "spread"]]
    axes = figure.subplot_mosaic(places, height_ratios=(3, 2, 2))
    x = log.env_step[0]
    draw_return(axes["return"], x, log)
    end = (
        (log.sigma, "spread of the torque")
        if hasattr(log, "sigma")
        else (log.entropy, "entropy, nats")
    )
    for name, values, color, title in (
        ("kl", np.maximum(log.approx_kl, 1e-3), ORANGE, "approximate KL, logarithmic"),
        ("clipped", log.clip_fraction, BLUE, "share outside the range"),
        # It falls far where all returns agree: what is left of the variance is noise
        (
            "explained",
            np.maximum(log.explained_variance, -0.5),
            GREEN,
            "explained variance (≥ −0.5)",
        ),
        ("spread", end[0], BLUE, end[1]),
    ):
        draw_band(axes[name], x, values, color)
        axes[name].set(title=title, xticks=np.linspace(0, x[-1], 3))
    axes["clipped"].set_ylim(bottom=0)
    axes["spread"].set_ylim(bottom=0)
    # a spike flattens a line
    axes["kl"].set(yscale="log", ylim=(1e-3, max(0.1, np.nanmax(log.approx_kl))))
    axes["kl"].yaxis.set_major_formatter("{x:g}")
    axes["explained"].set(ylim=(-0.55, 1.05))
    for one in axes.values():
        one.xaxis.set_major_formatter("{x:,.0f}")
    figure.supxlabel("environment step", fontsize="medium")
    figure.savefig(path, dpi=110)
    return figure


def record_gif(path: Path, policy: Callable, untrained: Any, trained: Any) -> np.ndarray:
    """One greedy episode of two policies side by side, on a Pendulum-v1 that starts hanging.

    Returns angle and speed of the trained one before each step, [200, 2], rad and rad/s.
    """
    greedy = jax.jit(lambda actor, obs: policy(actor, obs).mode())
    films = []
    for actor in (untrained, trained):
        env = gymnasium.make("Pendulum-v1", render_mode="rgb_array")
        obs, _ = env.reset(seed=34)  # starts hanging
        played, film, episode_return, truncated = [], [], 0.0, False
        while not truncated:
            if len(played) % 3 == 0:
                film.append(
                    Image.fromarray(env.render()).resize((350, 350), box=(115, 115, 385, 385))
                )
                ImageDraw.Draw(film[-1]).text(
                    (8, 8), f"{episode_return:,.0f}", fill="black", font_size=28
                )
            played.append(env.unwrapped.state)
            obs, reward, _, truncated, _ = env.step(np.asarray(greedy(actor, obs))[None])
            episode_return += reward
        env.close()
        films.append(film)
    frames = [see_through(np.hstack(pair)) for pair in zip(*films, strict=True)]
    # 150 ms per frame of 3 steps of 0.05 s: as fast as it is
    look = {"transparency": 15, "disposal": 2, "loop": 0}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=150, **look)
    return np.array(played)


def see_through(pixels: np.ndarray) -> Image.Image:
    """A frame whose white is transparent and whose black is gray: it fits a light page and a dark
    one.
    """
    pixels[pixels.max(axis=2) < 100] = 128
    film = Image.fromarray(pixels).quantize(15)
    film.paste(15, mask=Image.fromarray(pixels.min(axis=2) > 230))
    return film


def draw_value_function(path: Path, value: Callable, played: np.ndarray) -> None:
    """What the critic expects of every angle and speed, with an episode on it; `played` is [200,
    2].
    """
    angle, speed = np.linspace(-np.pi, np.pi, 181), np.linspace(-8, 8, 161)
    grid = np.stack(np.meshgrid(angle, speed), axis=-1).astype(np.float32)  # [161, 181, 2]
    obs = jnp.stack([jnp.cos(grid[..., 0]), jnp.sin(grid[..., 0]), grid[..., 1]], axis=-1)
    expected = value(obs)  # [161, 181]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    # seen on white and on black
    with rc_context(dict.fromkeys(names, "#767d86") | {"font.size": 12}):
        figure = Figure((6, 4.4), layout="constrained")
        axes = figure.subplots()
        mesh = axes.pcolormesh(
            np.degrees(angle), speed, expected, shading="nearest", rasterized=True
        )
        figure.colorbar(mesh, label="V(s)")
        degrees = np.degrees((played[:, 0] + np.pi) % (2 * np.pi) - np.pi)
        axes.plot(degrees, played[:, 1], "o", color="white", markersize=3, markeredgewidth=0)
        axes.plot(
            degrees[0], played[0, 1], "o", color="none", markersize=11, markeredgecolor="white"
        )
        axes.set(xlabel="θ, °", ylabel="dθ/dt, rad/s", xticks=range(-180, 181, 60))
        figure.savefig(path, dpi=110, transparent=True)


def draw_clipped_objective(path: Path, clipped_objective: Callable, epsilon: float) -> Figure:
    """PPO's objective against the ratio, for an advantage of +1 and of -1; the band of the clip is
    shaded.
    """
    ratio = np.linspace(0.5, 1.5, 401)
    figure = Figure((6, 3.4), layout="constrained")
    for axes, advantage, color in zip(figure.subplots(1, 2), (1.0, -1.0), (BLUE, ORANGE)):
        clipped = clipped_objective(ratio, advantage, epsilon)
        axes.axvspan(
            max(1 - epsilon, 0.5), min(1 + epsilon, 1.5), color=GREY, alpha=0.15, linewidth=0
        )
        axes.plot(ratio, ratio * advantage, color=GREY, linestyle="--", label="ratio × advantage")
        axes.plot(ratio, clipped, color=color, linewidth=2.5, label="clipped: maximized")
        for end, side in ((0, "left"), (-1, "right")):
            steps = (clipped[-1] - clipped[-2]) if end else (clipped[1] - clipped[0])
            words = "no gradient" if abs(float(steps)) < 1e-6 else "full gradient"
            axes.annotate(
                words, (ratio[end], clipped[end]), (0, -22), ha=side, textcoords="offset points"
            )
        title = "A = +1: better" if advantage > 0 else "A = −1: worse"
        axes.set(xlabel="ratio: new probability / old", title=title)
        axes.margins(y=0.25)
        axes.legend(
            frameon=False, loc="upper left" if advantage > 0 else "upper right", fontsize="small"
        )
    figure.savefig(path, dpi=110)
    return figure


def draw_reinforce_curve(path: Path, log: Any, baseline: str) -> Figure:
    """Above: return against steps. Below: the share of the variance that the baseline explains."""
    figure = Figure((6, 5), layout="constrained")
    above, below = figure.subplots(2, 1)
    x = log.env_step.mean(axis=0)  # seeds differ by less than a rollout
    draw_return(above, x, log)
    draw_band(below, x, log.explained_variance, BLUE)
    below.axhline(0, color=GREY, linewidth=1)
    below.set(xlabel="environment step", title=f"explained variance, BASELINE={baseline}")
    for axes in (above, below):
        axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.savefig(path, dpi=110)
    return figure
