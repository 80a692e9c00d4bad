"""Turns: the model acts, an environment answers, the model acts again; an episode is one row of
tokens.

    prompt | down <end> | row 2 column 1 | right <end> | row 2 column 2 | ...
             model        environment      model         environment

The environment's tokens go into the KV cache: the model reads them but isn't trained on them. A row
has no padding between turns, so one pass gives the log-probs of all its tokens. Sampled tokens are
never decoded and re-encoded, which could change them.

ENVIRONMENT names a Python file with a class `Environment`; each answer gets a new instance, created
without arguments. It has Gymnasium's interface, in text:

    reset(question, rng) -> observation              what follows the prompt (usually nothing)
    step(action) -> observation, reward, terminated, truncated
    STOP = ""                                        where an action ends

`rng` is a separate NumPy generator per answer, so a resumed run samples the same. If STOP is empty,
an action ends with the end-of-sequence token, and the observation is the user's next message in the
tokenizer's chat template. With a STOP such as "</calc>" an action also ends there, and the
observation follows unchanged in the same message; the end-of-sequence token then ends the episode.
"""

import dataclasses
import functools
import itertools
import numbers
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from constants import RunConstants
from settings import UserError, find_path
from task.prompts import as_letters, chat
from task.run_grader import MAX_REWARD, call_user_code, load_file

WORDS = "<first>", "<action>", "<observation>"  # placeholders for messages in a chat template


@dataclasses.dataclass(frozen=True)
class Episode:
    """What an answer in turns has beside its text and tokens."""

    turn: list[int]  # of each token, counted from 0; -1 for the environment's tokens
    to_go: list[float]  # return-to-go of each turn; at least one turn
    rewards: list[float]  # of each action the environment answered
    terminated: bool  # the environment ended it; otherwise it was cut off

    @property
    def right(self) -> bool:
        """Whether the environment ended it with a reward above 0."""
        return self.terminated and self.rewards[-1] > 0


# %% The environment -------------------------------------------------------------------------------
@functools.cache
def load(environment: str) -> type:
    """The class `Environment` of a file; UserError without one."""
    module = load_file(find_path(environment).resolve(), "ENVIRONMENT")
    kind = getattr(module, "Environment", None)
    if not (
        isinstance(kind, type)
        and all(callable(getattr(kind, name, 0)) for name in ("reset", "step"))
    ):
        raise UserError(
            f"ENVIRONMENT={environment}: has no class Environment with reset and step; write one "
            "(docs/learn/turns.md has one of twenty lines)"
        )
    return kind


def call_environment(environment: str, call: str, method: Callable, *arguments):
    """Calls an environment's `reset` or `step`, named `call`, and checks that it follows the
    interface.
    """
    given = call_user_code(f"ENVIRONMENT={environment}: {call} raised", method, *arguments)
    given = (given, 0.0, False, False) if call == "reset" else given
    match given:
        case str(), numbers.Real(), bool() | np.bool_(), bool() | np.bool_() if (
            abs(given[1]) <= MAX_REWARD
        ):
            return given
    wanted = (
        f"observation, reward, terminated, truncated: a text, a number up to {MAX_REWARD:.0e}, "
        "two bools"
    )
    wanted = "an observation, a text" if call == "reset" else wanted
    raise UserError(f"ENVIRONMENT={environment}: {call} returned {given!r:.90}; return {wanted}")


def around_observation(tokenizer) -> tuple[str, str]:
    """What the chat template writes before and after an observation between two actions."""
    messages = [
        dict(role=role, content=word) for role, word in zip(("user", "assistant", "user"), WORDS)
    ]
    text = chat(tokenizer, messages)
    if not all(word in text for word in WORDS):
        raise UserError(
            "ENVIRONMENT: MODEL's chat template leaves messages out; take another model, or give "
            "the Environment a STOP"
        )
    before, _, after = text.partition(WORDS[1])[2].partition(WORDS[2])
    end = tokenizer.decode([tokenizer.eos_id()])
    return before.removeprefix(end), after  # the model has already written the end token


# %% Episodes --------------------------------------------------------------------------------------
class EpisodeInProgress:
    """An episode in progress: takes the token sampled for each column, returns the one the row
    gets.

    `stop` is the Environment's, `around` comes from `around_observation` (None with a `stop`),
    `limit` is T.
    """

    def __init__(
        self, c, tokenizer, stop: str, around: tuple[str, str] | None, limit: int, question, rng
    ):
        self.c = c
        self.tokenizer = tokenizer
        self.stop = stop
        self.around = around
        self.limit = limit
        self.tokens, self.log_probs, self.turn, self.texts, self.rewards = [], [], [], [], []
        self.action, self.queue = [], deque()
        self.over = self.terminated = False
        self.environment = call_user_code(
            f"ENVIRONMENT={c.ENVIRONMENT}: Environment() raised", load(c.ENVIRONMENT)
        )
        first, *_ = call_environment(c.ENVIRONMENT, "reset", self.environment.reset, question, rng)
        if first:
            self.queue_tokens(first, first)
        if self.over:
            raise UserError(
                f"TOTAL_GENERATION_STEPS={limit}: ENVIRONMENT={c.ENVIRONMENT} fills it at reset; "
                "raise it"
            )

    def next_token(self, token: int, log_prob: float) -> int:
        """The next column's token: the sampled one or the environment's; padding after the end."""
        if self.over:
            return self.tokenizer.pad_id()
        by_model = not self.queue
        if not by_model:
            token, log_prob = self.queue.popleft(), 0.0
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.turn.append(len(self.rewards) if by_model else -1)
        if by_model:
            self.action.append(token)
            ends = token in self.tokenizer.eos_ids
            if ends or (self.stop and self.stop in self.tokenizer.decode(self.action)):
                self.step_environment(ends)
        self.over |= len(self.tokens) == self.limit
        return token

    def step_environment(self, ends: bool) -> None:
        """Lets the environment answer; `ends`: the action ended with the end-of-sequence token."""
        text = self.tokenizer.decode(self.action, skip_special_tokens=True)
        self.texts.append(text)
        self.action = []
        answer = call_environment(self.c.ENVIRONMENT, "step", self.environment.step, text)
        observation, reward, self.terminated, truncated = answer
        self.rewards.append(float(reward))
        self.over = self.terminated or truncated or len(self.rewards) == self.c.MAX_TURNS
        self.over |= bool(self.stop and ends)
        if not self.over:
            text = (
                observation
                if self.stop
                else as_letters(self.tokenizer, observation).join(self.around)
            )
            self.queue_tokens(observation, text)

    def queue_tokens(self, observation: str, text: str) -> None:
        """Queues the observation's tokens; cuts the episode off if they don't fit in the row."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if self.tokenizer.pad_id() in tokens:
            raise UserError(
                f"ENVIRONMENT={self.c.ENVIRONMENT}: the observation {observation!r:.60} has the "
                "padding token in it; say it in other words"
            )
        if len(self.tokens) + len(tokens) >= self.limit:
            self.over = True
            return
        self.texts.append(observation)
        self.queue.extend(tokens)

    def text(self) -> str:
        """All of the finished episode, including the environment's part."""
        texts = list(self.texts)
        if self.action:  # cut off in the middle of an action
            texts.append(self.tokenizer.decode(self.action, skip_special_tokens=True))
        return ("" if self.stop else "\n").join(texts)

    def episode(self) -> Episode:
        """The finished episode."""
        # of an action that was cut off in the middle: none
        rewards = self.rewards + [0.0] * (len(self.rewards) == max(self.turn))
        to_go = [
            *itertools.accumulate(reversed(rewards), lambda later, now: now + self.c.GAMMA * later)
        ]
        return Episode(
            turn=self.turn,
            to_go=to_go[::-1],
            rewards=self.rewards,
            terminated=bool(self.terminated),
        )


def run_episodes(
    c: RunConstants, rollout, prompts: list[str], questions: Sequence[str], config: RolloutConfig
) -> tuple[RolloutOutput, list[Episode]]:
    """Runs an episode of ENVIRONMENT from each prompt; passes each question to its `reset`.

    Takes a `MaxTextRollout` and returns the same as its `generate`, with the environment's tokens
    in `tokens` (their `logprobs` are 0), and the episodes.
    """
    tokenizer, limit = rollout.tokenizer, config.max_tokens_to_generate
    stop = getattr(load(c.ENVIRONMENT), "STOP", "")
    around = None if stop else around_observation(tokenizer)
    episodes = []
    for start in range(0, len(prompts), rollout.rows):
        part = slice(start, start + rollout.rows)
        key = jax.random.fold_in(config.seed, start)
        seeds = np.random.SeedSequence(jax.random.key_data(key).tolist()).spawn(len(prompts[part]))
        generators = map(np.random.default_rng, seeds)
        rows = [
            EpisodeInProgress(c, tokenizer, stop, around, limit, question, rng)
            for question, rng in zip(questions[part], generators, strict=True)
        ]
        columns = rollout.token_by_token(prompts[part], config, key)
        tokens = None
        while not all(row.over for row in rows):
            sampled = zip(*(x.tolist() for x in columns.send(tokens)), strict=True)
            tokens = np.array(
                [row.next_token(*token) for row, token in zip(rows, sampled, strict=True)]
            )
        episodes += rows
    output = RolloutOutput(
        text=[row.text() for row in episodes],
        logits=None,
        tokens=[np.array(row.tokens, np.int32) for row in episodes],
        left_padded_prompt_tokens=rollout.encode(prompts, config.max_prompt_length),
        logprobs=[np.array(row.log_probs, np.float32) for row in episodes],
    )
    return output, [row.episode() for row in episodes]
