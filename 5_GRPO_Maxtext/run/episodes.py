"""The page of a run with turns: episodes.html, whose token is whose, and what each of them was credited with.

Of the first and the last kept step it shows the best and the worst episode of each group, and beside them
what the world draws of them, if its Environment has a `picture(question, text)` that returns an SVG. The page
has no script; what a model or a world wrote is escaped.
"""

import html
from pathlib import Path
from typing import Any

from run.page import digest
from run.run_files import read_constants, read_lines
from settings import write_whole
from task import turns

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
.row { display: flex; gap: 1rem; align-items: flex-start; border-top: 1px solid #8888; padding: .6rem 0 }
.said { flex: 1 } svg { width: 11rem; flex: none }
span { display: inline-block; border-radius: 4px; padding: 0 .3rem; margin: .1rem; white-space: pre-wrap }
.up { background: #2ca02c55 } .down { background: #d6272855 } .even { background: #8884 }
.world { font-style: italic; opacity: .65 } small { display: block; font-size: .7rem; opacity: .8 }
"""


def write(folder: Path) -> Path:
    """Writes `folder`/episodes.html from the run's answers.jsonl.

    Raises:
        UserError: not the folder of a run; its world's picture is at fault.
    """
    constants, rows = read_constants(folder), read_lines(folder / "answers.jsonl")
    rows = [row for row in rows if all("turn" in answer for answer in row["completions"])]
    body = [
        f"<h1>Turn by turn</h1><p>{html.escape(str(folder))}. Upright: the model's own tokens, with the "
        "advantage they were trained with; in italics: the world's, which are read and not trained.</p>"
    ]
    for step in sorted({row["step"] for row in rows[:1] + rows[-1:]}):
        body.append(f"<h2>Step {step}</h2>")
        for row in (row for row in rows if row["step"] == step):
            episodes = sorted(row["completions"], key=lambda answer: answer["reward"])
            body.append(f"<h3>{html.escape(row['question'])}</h3>")
            body += [
                episode_row(constants["ENVIRONMENT"], row["question"], e) for e in (episodes[-1], episodes[0])
            ]
    policy = f"default-src 'none'; style-src '{digest(STYLE)}'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    path = folder / "episodes.html"
    write_whole(path, f"<!doctype html>{head}<title>Turns</title><style>{STYLE}</style>{''.join(body)}")
    return path


def episode_row(environment: str, question: str, episode: dict[str, Any]) -> str:
    """An episode's tokens, each with its advantage, and the world's picture of it."""
    tokens = []
    for piece, turn, advantage in zip(episode["pieces"], episode["turn"], episode["advantages"]):
        text = html.escape(piece).encode("ascii", "xmlcharrefreplace").decode()
        if turn < 0:
            tokens.append(f'<span class="world">{text}</span>')
        else:
            kind = "up" if advantage > 0 else "down" if advantage < 0 else "even"
            tokens.append(f'<span class="{kind}">{text}<small>{advantage:+.2f}</small></span>')
    picture, draw = "", getattr(turns.load(environment), "picture", None)
    if draw:
        with turns.guarded(environment, "picture"):
            picture = draw(question, episode["text"])
    said = f"<p>return {episode['reward']:.2f}</p>{''.join(tokens)}"
    return f'<div class="row"><div class="said">{said}</div>{picture}</div>'
