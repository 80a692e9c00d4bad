"""The films of the pages: GIF files without words and on a transparent background.

python measure/films.py answers    # from 5_GRPO_Maxtext/assets/answers_while_training.json
python measure/films.py values     # from 1_Q_Learning/assets/crawl_film.csv
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
MONO = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
# A contrast of about 4.3 on GitHub's light page and on its dark one. Index 0 is transparent.
PAPER, INK, GREEN, ORANGE, RED, BLUE = range(6)
PALETTE = [0, 0, 0, 118, 125, 134, 35, 137, 62, 196, 98, 12, 219, 79, 86, 47, 120, 216]


# %% A film ----------------------------------------------------------------------------------------
def page(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty frame. Its letters have no soft edges, which would be light on a dark page."""
    frame = Image.new("P", (width, height), PAPER)
    frame.putpalette(PALETTE)
    draw = ImageDraw.Draw(frame)
    draw.fontmode = "1"
    return frame, draw


def save(frames: Sequence[Image.Image], milliseconds: Sequence[int], path: Path) -> None:
    """Writes a film that starts again at its end."""
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=list(milliseconds),
        loop=0,
        transparency=PAPER,
        disposal=2,
        optimize=False,
    )


# %% Eight answers while the model learns ----------------------------------------------------------
def colour_of(text: str, answer: str) -> int:
    """Green: right, with every tag. Orange: right, but a tag is missing. Red: wrong."""
    if text.endswith(f"</reasoning><answer>{answer}</answer>"):
        return GREEN
    return ORANGE if f"={answer}<" in text or f">{answer}<" in text else RED


def draw_answers() -> None:
    """A frame per step: the eight answers in three colors, and how far the training is."""
    assets = ROOT / "5_GRPO_Maxtext" / "assets"
    film = json.loads((assets / "answers_while_training.json").read_text())
    font = ImageFont.truetype(str(MONO), 36)
    rows = [text for texts in film["answers"].values() for text in texts]
    width = int(font.getlength(max(rows, key=len))) + 40
    frames = []
    for step, texts in film["answers"].items():
        frame, draw = page(width, 8 * 56 + 70)
        for row, text in enumerate(texts):
            draw.text((10, 56 * row + 6), text, colour_of(text, film["answer"]), font)
        bottom = 8 * 56 + 36
        draw.line((10, bottom, width - 120, bottom), INK, 3)
        done = 10 + (width - 130) * int(step) / 100
        draw.line((10, bottom, done, bottom), BLUE, 14)
        draw.text((width - 10, bottom), step, BLUE, font, anchor="rm")
        frames.append(frame)
    times = [900] * (len(frames) - 1) + [3000]
    save(frames, times, assets / "eight_answers.gif")


# %% The values of chapter 1 -----------------------------------------------------------------------
def draw_values() -> None:
    """A frame per number of episodes: the best action's value in each of the sixteen cells."""
    assets = ROOT / "1_Q_Learning" / "assets"
    large, small = (ImageFont.truetype(str(MONO), size) for size in (36, 28))
    frames = []
    groups = pd.read_csv(assets / "crawl_film.csv").groupby("episodes", sort=False)
    for episodes, rows in groups:
        frame, draw = page(600, 660)
        for i, value in enumerate(rows.best_value):
            y, x = (150 * part for part in divmod(i, 4))
            inside = (x + 6, y + 6, x + 144, y + 144)
            draw.rectangle(inside, outline=GREEN if i == 15 else INK, width=6 if i == 15 else 2)
            if i < 15 and value >= 0.5:
                top = y + 141 - 132 * value / 100  # a bar that rises with the value
                draw.rectangle((x + 9, top, x + 23, y + 141), fill=BLUE)
                draw.text((x + 84, y + 75), f"{value:.0f}", BLUE, large, anchor="mm")
        draw.text((592, 632), str(episodes), INK, small, anchor="rm")
        frames.append(frame)
    save(frames, [700] * (len(frames) - 1) + [3000], assets / "crawl_film.gif")


if __name__ == "__main__":
    {"answers": draw_answers, "values": draw_values}[sys.argv[1]]()
