"""The pictures of a run of cart_pole_dqn.py, drawn from its log and its network."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the GIF is drawn without a screen

import gymnasium
import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

BLUE, ORANGE, GREY = "#0969da", "#c2570c", "#6e7781"


def draw_band(axes: Axes, x: np.ndarray, curves: np.ndarray, color: str, label: str) -> None:
    """Mean over the seeds, and a band from the lowest to the highest; `curves` is [NUM_SEEDS,
    rows].
    """
    axes.plot(x, curves.mean(axis=0), color=color, label=label)
    axes.fill_between(
        x, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.2, linewidth=0
    )


def draw_learning_curve(path: Path, log: Any) -> Figure:
    """Above: return against environment steps. Below: what the network promises against what comes
    of it.
    """
    figure = Figure((6, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1)
    x = log.env_step[0]
    draw_band(above, x, log.eval_return, BLUE, "greedy policy")
    above.plot(x, np.nanmean(log.episode_return, axis=0), color=GREY, label="while exploring")
    above.set(title="return", ylim=(0, 515))
    draw_band(below, x, log.max_q, ORANGE, "estimated: max Q of the first state")
    draw_band(below, x, log.discounted_return, BLUE, "what came of it")
    below.set(xlabel="environment step", title="discounted return")
    for axes in (above, below):
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    return figure


def record_gif(path: Path, untrained: Any, trained: Any) -> None:
    """500 steps of two greedy policies side by side, with the steps played; every fourth frame.

    What ends an episode is a lean of 12 degrees. The film goes on to the ground, then the next one
    begins.
    """
    greedy = jax.jit(lambda network, obs: network(obs).argmax())
    films = []
    for network in (untrained, trained):
        env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        obs, _ = env.reset(seed=0)
        film, steps, since_end = [], 0, 0  # of this episode
        for step in range(500):
            if step % 4 == 0:
                film.append(Image.fromarray(env.render()).resize((450, 300)))
                colour = "#cf222e" if since_end else "black"
                ImageDraw.Draw(film[-1]).text((12, 10), str(steps), fill=colour, font_size=32)
            if since_end:
                fall_on(env.unwrapped)
                since_end += 1
            else:
                obs, _, terminated, truncated, _ = env.step(int(greedy(network, obs)))
                steps, since_end = steps + 1, int(terminated or truncated)
            if since_end > 75:  # a second and a half
                (obs, _), steps, since_end = env.reset(), 0, 0
        env.close()
        films.append(film)
    frames = [see_through(np.hstack(pair)) for pair in zip(*films, strict=True)]
    look = {"transparency": 15, "disposal": 2, "loop": 0}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, **look)


def see_through(pixels: np.ndarray) -> Image.Image:
    """A frame whose white is transparent and whose black is gray: it fits a light page and a dark
    one.
    """
    pixels[pixels.max(axis=2) < 100] = 128
    film = Image.fromarray(pixels).quantize(15)
    film.paste(15, mask=Image.fromarray(pixels.min(axis=2) > 230))
    return film


def fall_on(env: Any) -> None:
    """One time step of a rod that falls on a cart that doesn't move, down to the track; changes
    `env.state`.
    """
    x, _, angle, speed = env.state
    # `length` is half of the rod
    speed += env.tau * env.gravity * np.sin(angle) / (4 / 3 * env.length)
    angle += env.tau * speed
    env.state = x, 0.0, np.clip(angle, -np.pi / 2, np.pi / 2), speed * (abs(angle) < np.pi / 2)
