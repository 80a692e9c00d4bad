"""The task of a run: its questions and rewards."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import jax
import numpy as np

from constants import RunConstants
from schedules import overlong_penalty
from task.questions import mixed_batches
from task.run_grader import Grader


class Answers(NamedTuple):
    """N answers as arrays."""

    texts: np.ndarray  # str [N]
    prompt_ids: np.ndarray  # int32 [N, P], left-padded
    completion_ids: np.ndarray  # int32 [N, T], right-padded
    # float32 [N, T], under the distribution the tokens were sampled from
    sampler_log_prob: np.ndarray
    turn: np.ndarray  # the turn of each token, int32 [N, T]; -1: an environment's token, or padding
    lengths: np.ndarray  # tokens, int [N]
    ended: np.ndarray  # bool [N]: ended by an end-of-sequence token or the environment
    episodes: np.ndarray | None = None  # with ENVIRONMENT: `Episode` of task/turns.py [N]


class Samples(NamedTuple):
    """G answers to each of B questions, graded."""

    questions: dict[str, np.ndarray]  # columns, str [B, G]
    answers: Answers  # arrays [B, G, ...]
    # by reward function, float [B, G]; `jax.tree` sorts a dict
    reward_parts: OrderedDict[str, np.ndarray]
    rewards: np.ndarray  # their sum, float [B, G]
    # the tokens to train, bool [B, G, T]: the model's own, not an environment's or padding
    mask: np.ndarray
    sampled: Optional["Samples"] = None  # all sampled groups, if some were replaced; for the log

    def groups(self, chosen: np.ndarray) -> "Samples":
        """The groups with these indices."""
        return jax.tree.map(lambda x: x[chosen], self)

    def flat(self) -> "Samples":
        """The same as arrays [N, ...], with the G answers to a question adjacent."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._replace(sampled=None))

    @property
    def graded(self) -> dict[str, np.ndarray]:
        """What a `Grader` needs, by name: the texts, the episodes, the questions' columns."""
        return dict(
            completions=self.answers.texts, episodes=self.answers.episodes, **self.questions
        )

    def joined(self, more: "Samples") -> "Samples":
        """These groups, then those of `more`."""
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), self, more)


def differ(values: np.ndarray) -> np.ndarray:
    """Whether a group's values, [B, G] or [B, G, T], differ by more than rounding: bool [B]."""
    spread = np.ptp(values, axis=1).reshape(len(values), -1).max(axis=1)
    return spread > 1e-6 * np.abs(values).reshape(len(values), -1).max(axis=1).clip(1)


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as itself, not by its questions
class Task:
    """Questions and rewards of a run."""

    batches: Sequence[dict[str, np.ndarray]]  # by step: columns, str [B]
    train: list[dict[str, str]]  # the questions in the batches
    test: Sequence[dict[str, str]]  # asked before and after training
    held_out: Sequence[dict[str, str]]  # asked during training
    grader: Grader
    rewards: list[Callable[..., list[float]]]  # one float per answer each
    num_generations: int  # G
    sources: dict[str, str]  # where the questions come from, in words

    def repeat(self, questions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Each question G times: columns [B] as [B * G]."""
        return {name: column.repeat(self.num_generations) for name, column in questions.items()}

    def with_copies(self) -> "Task":
        """The same task with copies of its questions, for a METHOD of the user's."""
        rows = {name: copy.deepcopy(getattr(self, name)) for name in ("train", "test", "held_out")}
        return dataclasses.replace(self, **rows)

    def grade(self, questions: dict[str, np.ndarray], answers: Answers) -> Samples:
        """Grades the answers, summing over the rewards. Both arguments hold arrays [B * G, ...]."""
        ids = [row[:n] for row, n in zip(answers.completion_ids, answers.lengths, strict=True)]
        given = dict(completions=answers.texts.tolist(), completion_ids=ids, **questions)
        if answers.episodes is not None:
            given["episodes"] = answers.episodes.tolist()
        # [B * G] each
        parts = OrderedDict((f.__name__, np.array(f(**given))) for f in self.rewards)
        rewards = np.sum(list(parts.values()), axis=0)
        samples = Samples(questions, answers, parts, rewards, mask=answers.turn >= 0)
        return jax.tree.map(lambda x: x.reshape(-1, self.num_generations, *x.shape[1:]), samples)

    def right(self, samples: Samples) -> np.ndarray:
        """Whether an answer is right: bool [B, G]."""
        flat = samples.flat()
        right = self.grader.score(**flat.graded) >= 1  # [B * G]
        return right.reshape(samples.rewards.shape)


def make_task(
    c: RunConstants, rows: dict[str, list[dict[str, str]]], grader: Grader, sources: dict[str, str]
) -> Task:
    """The task of a run; `rows` are questions with their prompts, by split: train, test,
    validation.
    """
    batches, rewards = mixed_batches(rows["train"], c.SEED, c.BATCH_SIZE), list(grader.functions)
    if c.OVERLONG_BUFFER:
        rewards.append(
            overlong_penalty(c.TOTAL_GENERATION_STEPS, c.OVERLONG_BUFFER, c.OVERLONG_PENALTY)
        )
    parts = (rows[split] for split in ("train", "test", "validation"))
    return Task(batches, *parts, grader, rewards, c.NUM_GENERATIONS, sources)
