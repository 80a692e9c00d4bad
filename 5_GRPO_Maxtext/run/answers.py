"""RUN_DIR/answers.jsonl: every answer of some steps, and how the update changed each token's
probability.

One line per question of a kept step. Log-probs have one number per token, end-of-sequence included:

    {"step": 10, "question": ..., "answer": the right one, "data_source": ..., "beta": 0.08,
     "temperature": 1.0, "tokens_in_step": 1893, "completions_in_step": 128,   what its loss counts
     "completions": [{"text": ..., "tokens": ids, "pieces": their texts,
        "points": {"check_answer": 3.0, ...}, "reward": their sum, "advantage": 0.71,
        "log_prob": before the update, "log_prob_after": after it,
        "log_prob_reference": (null without KL),
        "correct": ..., "correct_lenient": ..., "format_ok": ..., "cut_off": ...,
        "counts": in the loss}]}

An episode of ENVIRONMENT also has "turn" (-1: environment) and "advantages" per token, and its
"rewards".
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from run.run_files import read_lines
from settings import write_whole
from task.run_grader import Grader

DECIMALS = 5  # of log-probs and advantages; the ratio of two then has an error of 1e-5


def to_lines(rows: Sequence[dict[str, Any]]) -> str:
    """One JSON line per row, in ASCII, so an answer's control characters never reach a terminal."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def drop_later_steps(path: Path, last_step: int) -> set[int]:
    """Drops the rows of later steps, which a resumed run repeats; returns the remaining steps."""
    rows = [row for row in read_lines(path) if row["step"] <= last_step]
    if path.exists():
        write_whole(path, to_lines(rows))
    return {row["step"] for row in rows}


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text: of a character in several tokens, the last one adds all of
    it.
    """
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer, token) or "" for token in tokens]
    # half a character
    rest = tokenizer.decode(tokens, skip_special_tokens=False)[len("".join(texts)) :]
    return [*texts[:-1], texts[-1] + rest] if texts else []


def question_rows(
    tokenizer,  # Tunix's adapter
    grader: Grader,
    num_generations: int,  # G
    completions: np.ndarray,  # int32 [N, T], right-padded; the G answers to a question side by side
    # `Samples.graded`, rewards, points by function; arrays [N]
    graded: Mapping[str, Any],
    *,
    advantages: np.ndarray,  # float [N], or [N, T]
    counts: np.ndarray,  # bool [N], whether the answer is in the loss
    # `log_prob`, perhaps `log_prob_after`, `..._reference`; float [N, T]
    **log_prob: np.ndarray | None,
) -> list[dict[str, Any]]:
    """The part of a line that describes a question and its answers, for each question."""
    correct, lenient = grader.score(**graded) >= 1, grader.right_lenient(**graded)
    formed, episodes = grader.format_right(**graded), graded.get("episodes")
    per_token = advantages.ndim == 2  # then the advantage of an answer is its first own token's
    rows = []
    for i, text in enumerate(graded["completions"]):
        tokens = completions[i][completions[i] != tokenizer.pad_id()].tolist()
        episode = None if episodes is None else episodes[i]
        first = episode.turn.index(0) if episode else 0
        ended = episode.terminated if episode else not set(tokenizer.eos_ids).isdisjoint(tokens)
        answer = {
            "text": text,
            "tokens": tokens,
            "pieces": token_texts(tokenizer.tokenizer.backend_tokenizer, tokens),
            "points": {name: float(points[i]) for name, points in graded["points"].items()},
            "reward": float(graded["rewards"][i]),
            "advantage": rounded(advantages[i, first] if per_token else advantages[i]),
            "correct": bool(correct[i]),
            "correct_lenient": bool(lenient[i]),
            "format_ok": bool(formed[i]),
            "cut_off": not ended,
            "counts": bool(counts[i]),
        }
        for name in ("log_prob", "log_prob_after", "log_prob_reference"):
            values = log_prob.get(name)
            answer[name] = (
                values if values is None else [rounded(x) for x in values[i, : len(tokens)]]
            )
        if episode:
            each = np.broadcast_to(advantages[i], max(len(episode.turn), advantages[i].size))
            own = [rounded(value) if turn >= 0 else 0.0 for turn, value in zip(episode.turn, each)]
            answer |= {"turn": episode.turn, "rewards": episode.rewards, "advantages": own}
        rows.append(answer)
    return [
        {name: str(graded[name][i]) for name in ("question", "answer", "data_source")}
        | {"completions": rows[i : i + num_generations]}
        for i in range(0, len(rows), num_generations)
    ]


def rounded(value: float) -> float:
    """Rounds for JSON; -0.0 becomes 0.0."""
    return round(float(value), DECIMALS) + 0.0


def append_step(
    path: Path, c, tokenizer, grader, samples, batch, row: Mapping[str, float], log_prob: Sequence
) -> None:
    """Adds a step's lines to answers.jsonl, from its `Samples`, the `Batch` built from them, and
    its log row.

    `log_prob` has those before the update, [passes, N / passes, T], and after it.
    """

    # of all hosts' shards: NumPy
    to_host = functools.partial(multihost_utils.process_allgather, tiled=True)

    def flat(x):  # [passes, n, ...] to [N, ...]
        return None if x is None else to_host(x).reshape(-1, *x.shape[2:])

    before, after = log_prob
    mask, advantages, samples = flat(batch.mask), flat(batch.advantage), samples.flat()
    graded = samples.graded | dict(points=samples.reward_parts, rewards=samples.rewards)
    rows = question_rows(
        tokenizer,
        grader,
        c.NUM_GENERATIONS,
        samples.answers.completion_ids,
        graded,
        advantages=advantages[:, 0] if advantages.shape[1] == 1 else advantages,
        counts=mask.any(axis=1),
        log_prob=to_host(before).reshape(mask.shape),
        log_prob_after=flat(after),
        log_prob_reference=flat(batch.ref_log_prob),
    )
    shared = {name: row[name] for name in ("step", "beta", "temperature")}
    shared |= {
        "tokens_in_step": int(mask.sum()),
        "completions_in_step": int(mask.any(axis=1).sum()),
    }
    with open(path, "a", encoding="ascii") as file:
        file.write(to_lines([shared | line for line in rows]))
