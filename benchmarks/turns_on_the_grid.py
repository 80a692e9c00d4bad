"""The tiny Llama on chapter 1's grid: what it learns by turns, what credit is worth, and the usual
mistakes.

    python benchmarks/turns_on_the_grid.py    # goes on where it stopped: runs are in runs/measure

Tables are in 5_GRPO_Maxtext/assets: `turns.csv` (a line per run), `turns_curves.csv` (a line per
run and step), `turns_starts.csv` (a line per start), `turns_credit.csv`, `turns_price.csv`. They
are explained in folder 5's docs/learn/turns.md. What a run drew is read from its answers.jsonl: the
episodes of its first step are the untrained model's. Every figure of an episode is computed from
its moves and the rules of the grid. Processor seconds count all threads: with two cores free, a run
takes at least half as many.
"""

import importlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "5_GRPO_Maxtext"
ASSETS = FOLDER / "assets"
STORE = ROOT / "runs" / "measure"
sys.path[:0] = [str(FOLDER), str(ROOT)]

import jax
import numpy as np
import pandas as pd
from measure.columns import read_csv, read_json
from measure.run import Run, perform_all, write_csv

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import settings
from model import llama, versions
from model.llm import load_llm
from model.rollout import right_padded, sampling_config
from run import process
from task import turns
from task.run_grader import load_file

world = load_file(FOLDER / "examples" / "grid" / "grid_world.py", "ENVIRONMENT")
GAMMA = 0.99  # chapter 1's
STEPS = 30
COMMON = (
    "ENVIRONMENT=examples/grid/grid_world.py MODEL=tiny_grid DATASET=examples/grid/plain "
    f"GAMMA={GAMMA} NUM_ITERATIONS=1 LEARNING_RATE=1e-3 MAX_PROMPT_LENGTH=5 "
    f"TOTAL_GENERATION_STEPS=48 MAX_TURNS=8 BATCH_SIZE=15 BETA=0.0 NUM_BATCHES={STEPS} "
    "EVAL_EVERY=0 EVAL_CONFIG=greedy NUM_TEST_QUESTIONS=15 "
    f"LOG_ANSWERS_EVERY=10 SAVE_INTERVAL_STEPS={STEPS}"
)
# where twelve moves may be needed
LONGER = "MAX_PROMPT_LENGTH=6 TOTAL_GENERATION_STEPS=72 MAX_TURNS=12"


# %% Mistakes: METHOD files, and a patch of the walk -----------------------------------------------
TRAINS = """import numpy as np

import grpo_llama3_1_8b_demo as demo


def rollouts(c, llm, task, run, step):
    samples = demo.rollouts(c, llm, task, run, step)
    turn, lengths = samples.answers.turn, samples.answers.lengths
    return samples._replace(mask={mask})
"""
ALL_TOKENS = "np.arange(turn.shape[-1]) < lengths[..., None]"  # the world's, too
LAST_TURN = "(turn == turn.max(axis=-1, keepdims=True)) & (turn >= 0)"
OTHER_GROUPS = """import numpy as np


def advantage(samples):
    rewards = samples.rewards.T  # [G, B]: the i-th walks from all B starts are a group
    mean, std = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, ddof=1, keepdims=True)
    return ((rewards - mean) / (std + 1e-6)).T
"""
QUEUE = "        self.fed.extend(tokens)\n"
PAD = "        self.fed.extendleft([self.tokenizer.pad_id()] * bool(self.fed) * 2)\n"
GAPS = (("task/turns.py", QUEUE, QUEUE + PAD),)  # queues the world's tokens behind two of padding


# By name: seeds, constants, and a METHOD file's text, or a patch
VARIANTS = {
    "episode": (range(5), "", ""),
    "return to go": (range(5), "ADVANTAGE=turn", ""),
    "slippery": (range(3), f"{LONGER} DATASET=examples/grid/slippery", ""),
    "walls": (range(3), f"{LONGER} DATASET=examples/grid/walls BATCH_SIZE=12", ""),
    "the world's tokens trained": (range(3), "", TRAINS.format(mask=ALL_TOKENS)),
    "only the last turn trained": (range(3), "", TRAINS.format(mask=LAST_TURN)),
    "groups of different starts": (range(3), "", OTHER_GROUPS),
    "padding between turns": (range(3), "", GAPS),
}


# %% Runs ------------------------------------------------------------------------------------------
def runs_of(name: str) -> list[Run]:
    """A variant's runs, one per seed."""
    seeds, constants, change = VARIANTS[name]
    words, edits = f"{COMMON} {constants}".split(), () if isinstance(change, str) else change
    if change and not edits:
        method = STORE / "methods" / f"{name.replace(' ', '_').replace(chr(39), '')}.py"
        method.parent.mkdir(parents=True, exist_ok=True)
        method.write_text(change)
        words.append(f"METHOD={method}")
    return [
        Run(FOLDER / "grpo_llama3_1_8b_demo.py", (*words, f"SEED={seed}"), edits) for seed in seeds
    ]


# %% Episodes --------------------------------------------------------------------------------------
OPTIMA = {name: world.q_star(name, GAMMA) for name in ("", "slippery", "walls")}


def best(name: str, cell: tuple[int, int]) -> float:
    """V* of a cell."""
    return max(OPTIMA[name][cell, move] for move in world.MOVES)


def moves_of(question: str, text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Cell and move, "" for a word that is none, of each turn of an episode's text."""
    cell, said = world.read(question)[1], text.split("\n")
    for i in range(0, len(said), 2):
        yield cell, said[i] if said[i] in world.MOVES else ""
        if i + 1 < len(said):
            cell = world.read(said[i + 1])[1]


def judged(question: str, text: str, rewards: list[float]) -> dict[str, float]:
    """Return and its share of the optimum, regret per move, whether the goal was reached, of one
    episode.
    """
    name, start = world.read(question)
    pairs = [*moves_of(question, text)]
    regrets = [best(name, cell) - OPTIMA[name][cell, move] for cell, move in pairs]
    gained = sum(GAMMA**k * reward for k, reward in enumerate(rewards))
    return {
        "return": gained,
        "share": gained / best(name, start),
        "regret": float(np.mean(regrets)),
        "goal": float(rewards[-1] > 0),
        "moves": len(pairs),
    }


def episodes_of(folder: Path, step: int) -> pd.DataFrame:
    """Start and `judged` of every episode of a step that a run kept."""
    rows = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    return pd.DataFrame(
        [
            {"start": row["question"]} | judged(row["question"], answer["text"], answer["rewards"])
            for row in rows
            if row["step"] == step
            for answer in row["completions"]
        ]
    )


def greedy(folder: Path, when: str) -> list[float]:
    """Share of the optimum of the greedy walk from each start, before or after training.

    On the slippery grid NaN: its rewards follow from slips that the text does not tell.
    """
    result, shares = json.loads((folder / f"{when}.json").read_text()), []
    for asked, text in zip(result["asked"], result["completions"], strict=True):
        walked, rewards = world.Environment(), []
        walked.reset(asked["question"], np.random.default_rng(0))
        for cell, move in moves_of(asked["question"], text):
            walked.place = cell
            rewards.append(walked.step(move)[1])
        slips = world.read(asked["question"])[0] in world.SLIP
        shares.append(math.nan if slips else judged(asked["question"], text, rewards)["share"])
    return shares


def table_of_runs() -> None:
    """Every run; writes turns.csv, turns_curves.csv and turns_starts.csv."""
    lines, curves, starts = [], [], []
    pairs = [(name, run) for name in VARIANTS for run in runs_of(name)]
    perform_all([run for _, run in pairs], {}, STORE, workers=1)
    for name, run in pairs:
        folder, seed = run.folder(STORE), int(run.arguments[-1].removeprefix("SEED="))
        measured = read_json(folder / "measured.json")
        command = " ".join(w for w in measured["command"].split() if not w.startswith("METHOD="))
        line = {"variant": name, "seed": seed, "command": command}
        line |= {key: measured[key] for key in ("processor_seconds", "date", "machine")}
        for when, step in (("before", 1), ("after", STEPS)):
            episodes = episodes_of(folder, step)
            by_start = episodes.groupby("start").share.mean().round(4)
            means = episodes.drop(columns="start").mean().round(4)
            line |= {f"{when}_{key}": value for key, value in means.items()}
            line[f"{when}_worst_start"] = by_start.min()
            line[f"{when}_greedy_worst_start"] = round(min(greedy(folder, when)), 4)
            starts += [
                {
                    "variant": name,
                    "seed": seed,
                    "when": when,
                    "start": start,
                    "share": share,
                    "optimum": round(best(*world.read(start)), 3),
                }
                for start, share in by_start.items()
            ]
        log = read_csv(folder / "train_log.csv")
        said = (folder / "said.txt").read_text() + (folder / "report.md").read_text()
        health = sorted({w[:90] for w in said.splitlines() if w.startswith("- step ")})
        tokens = sum(round(float(row["length"]) * float(row["answers"])) for row in log)
        lines.append(line | {"health": " | ".join(health), "tokens_drawn": tokens})
        names = ("step", "reward", "correct", "entropy", "mismatch", "length", "grad_norm")
        curves += [
            {"variant": name, "seed": seed} | {key: row[key] for key in names} for row in log
        ]
    for table, rows in (("turns", lines), ("turns_curves", curves), ("turns_starts", starts)):
        write_csv(ASSETS / f"{table}.csv", rows)


# %% Credit ----------------------------------------------------------------------------------------
GROUPS = (4, 8, 16)
CALLS = 8  # of 15 starts x 16 walks


def table_of_credit() -> None:
    """How far the advantage of a move tells what the move was worth, A* = Q* - V*; the untrained
    model's.
    """
    c = settings.read(demo.Constants, [*COMMON.split(), "NUM_GENERATIONS=16"])
    folder, hf = llama.fetch_model(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    rollout = load_llm(c, folder, hf, tokenizer).rollout
    questions = [world.in_words(start) for start in world.starts("") for _ in range(16)]
    prompts = [tokenizer.bos_token + question for question in questions]
    lines = []
    for call in range(CALLS):
        how = sampling_config(c, seed=jax.random.key(1_000 + call))
        output, episodes = turns.run_episodes(c, rollout, prompts, questions, how)
        for G in GROUPS:
            lines += [
                {"G": G, "call": call} | found
                for found in credit(output.text, episodes, questions, G)
            ]
    write_csv(ASSETS / "turns_credit.csv", lines)


def credit(
    texts: list[str], episodes: list[turns.Episode], questions: list[str], G: int
) -> Iterator[dict[str, Any]]:
    """Correlations with A*, over all moves of these walks, in groups of G."""
    turn = right_padded([episode.turn for episode in episodes], 48, -1, np.int32)  # [N, T]
    grouped = np.array(episodes, object).reshape(-1, G)
    answers = SimpleNamespace(episodes=grouped, turn=turn.reshape(-1, G, turn.shape[1]))
    returns = np.array([episode.to_go[0] for episode in episodes]).reshape(-1, G)
    samples = SimpleNamespace(
        answers=answers, rewards=returns, reward_parts={"episode_return": returns}
    )
    kinds = {
        "episode": np.broadcast_to(demo.group_advantage(samples).reshape(-1, 1), turn.shape),
        "return to go": grpo_variants.turn_advantage(samples).reshape(turn.shape),
    }
    for kind, advantages in kinds.items():
        given, right = [], []
        rows = zip(questions, texts, episodes, strict=True)
        for i, (question, text, episode) in enumerate(rows):
            for k, (cell, move) in enumerate(moves_of(question, text)):
                if k < len(episode.rewards):
                    given.append(advantages[i, episode.turn.index(k)])  # of its first token
                    right.append(OPTIMA[""][cell, move] - best("", cell))
        yield {
            "advantage": kind,
            "correlation": round(float(np.corrcoef(given, right)[0, 1]), 4),
            "moves": len(given),
        }


# %% Price -----------------------------------------------------------------------------------------
def chapter_1() -> ModuleType:
    """Its script; its `settings` is another file than folder 5's."""
    ours, folder = sys.modules.pop("settings"), str(ROOT / "1_Q_Learning")
    sys.path.insert(0, folder)
    script = importlib.import_module("Q_Learning")
    sys.path.remove(folder)
    sys.modules["settings"] = ours
    return script


def table_of_price(curves: pd.DataFrame) -> None:
    """Moves until 95 % of the optimum: chapter 1's table, and the language model."""
    Q_Learning = chapter_1()
    c = Q_Learning.Constants(GAMMA=GAMMA, NUM_EPISODES=4_000, LOG_EVERY=10)
    lines, enough = [], 0.95 * np.mean([best("", start) for start in world.starts("")])
    for seed in range(5):
        started = time.process_time()
        _, log, tables = Q_Learning.train(c, np.random.default_rng(seed))
        seconds = time.process_time() - started
        good = np.array([worst_of_table(Q_Learning.grid, c, Q) for Q in tables]) >= 0.95
        at = int(np.flatnonzero(good)[0])
        moves = round(float((log[: at + 1, 3] * c.LOG_EVERY).sum()))
        lines.append(
            {
                "who": "Q-learning",
                "seed": seed,
                "numbers": 64,
                "episodes": int(log[at, 0]),
                "moves": moves,
                "tokens": 0,
                "seconds": round(seconds * moves / log[:, 3].sum() / c.LOG_EVERY, 3),
            }
        )
    for name in ("episode", "return to go"):
        for seed in VARIANTS[name][0]:
            rows = curves.query("variant == @name and seed == @seed")
            good = rows.reward.rolling(3, min_periods=1).mean().to_numpy() >= enough
            if not good.any():
                continue
            at = int(good.argmax())
            tokens = sum(rows.length[: at + 1]) * 120
            # six tokens each; after the last nothing is said
            moves = (tokens + 4 * 120 * (at + 1)) / 6
            line = read_json(runs_of(name)[seed].folder(STORE) / "measured.json")
            lines.append(
                {
                    "who": f"tiny Llama, {name}",
                    "seed": seed,
                    "numbers": 76_480,
                    "episodes": 120 * (at + 1),
                    "moves": round(moves),
                    "tokens": round(tokens),
                    "seconds": round(line["processor_seconds"] * (at + 1) / STEPS, 1),
                }
            )
    write_csv(ASSETS / "turns_price.csv", lines)


def worst_of_table(grid: ModuleType, c: Any, Q: np.ndarray) -> float:
    """The greedy policy's smallest share of the optimum, over the starts; 0 from one that leads
    nowhere.
    """
    shares = []
    for row, column in world.starts(""):
        moves = grid.greedy_moves(c, Q, 4 * row + column) or 0
        rewards = [world.STEP_REWARD] * (moves - 1) + [world.GOAL_REWARD] * bool(moves)
        gained = sum(GAMMA**k * reward for k, reward in enumerate(rewards))
        shares.append(gained / best("", (row, column)))
    return min(shares)


def main() -> None:
    """All tables."""
    versions.prepare_libraries()
    process.enable_compilation_cache()
    STORE.mkdir(parents=True, exist_ok=True)
    table_of_credit()
    table_of_runs()
    table_of_price(pd.read_csv(ASSETS / "turns_curves.csv"))


if __name__ == "__main__":
    main()
