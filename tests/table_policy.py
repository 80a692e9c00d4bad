"""A policy that is a table of logits: for the tests of the loss, the update and the loop around
them.

It takes no time to compile, and NumPy knows its log-probs.
"""

import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutOutput

import grpo_llama3_1_8b_demo as demo
import grpo_variants as variants
import reward_func
import settings
from model.llm import Llm, Model, split
from model.rollout import sampling_config
from run import checks, run_folder
from run.training import TrainingRun
from task import run_grader
from task.task import make_task

PAD, EOS, VOCABULARY = 0, 1, 6
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
# float32 sums of a dozen numbers of size 1, against float64
CLOSE = dict(rtol=2e-6, atol=2e-6)

# Two answers of up to three tokens.
PROMPTS = np.array([[2], [3]])
ANSWERS = np.array([[4, 5, EOS], [5, EOS, PAD]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = np.array([1.5, -0.5])
# log-probs of the policy that wrote the answers
OLD = np.array([[-1.9, -1.2, -2.6], [-1.6, -2.2, 0.0]])
REFERENCE = np.array([[-1.5, -2.0, -1.1], [-2.4, -1.7, 0.0]])
# as the answers were drawn; ratios 0.6 to 5.5
SAMPLER = np.array([[-1.4, -2.9, -2.6], [-1.3, -2.0, 0.0]])


class Table(nnx.Module):
    """A language model that looks at one token: row `token` of the table is the next's logits."""

    def __init__(self, table=TABLE):
        self.table = nnx.Param(jnp.array(table))

    def __call__(self, input_tokens, positions, cache, attention_mask, segment_ids=None):
        return self.table[...][input_tokens], None


@functools.cache
def constants_of(*arguments):
    """A run's constants, checked; answers are as long as ANSWERS, where nothing else is said."""
    c = settings.read(demo.Constants, (f"TOTAL_GENERATION_STEPS={ANSWERS.shape[1]}", *arguments))
    checks.refuse(c)
    return c


def log_probs_by_hand(table=TABLE, prompts=PROMPTS, answers=ANSWERS, temperature=1.0, clip=np.inf):
    """Log-probs [N, T] of answers under a table, in float64."""
    prompts, answers = np.asarray(prompts), np.asarray(answers)
    inputs = np.concatenate([prompts, answers], axis=1)[:, prompts.shape[1] - 1 : -1]
    logits = np.clip(np.asarray(table, float)[inputs], -clip, clip) / temperature  # [N, T, V]
    return np.take_along_axis(logits, answers[..., None], -1)[..., 0] - np.log(
        np.exp(logits).sum(-1)
    )


def as_batch(fields) -> demo.Batch:
    """Arrays [N, ...] as a `Batch`: jax makes their numbers float32 and int32."""
    return demo.Batch(**{name: jnp.asarray(x) for name, x in fields.items() if x is not None})


def one_device() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))


def model_of(c, module, temperature=None) -> tuple[dict, Model]:
    """A module's params and the `Model` without them."""
    graphdef, params, frozen = split(module, nnx.Param)
    how = temperature or c.TEMPERATURE, PAD, c.LOGITS_CLIP, c.NUM_GENERATIONS
    return params, Model(graphdef, frozen, *how, one_device(), ())


def loss_of(*constants, table=TABLE, temperature=None, **changes):
    """The page's loss, its metrics and its gradient, for the two answers and these constants."""
    c = constants_of("NUM_GENERATIONS=2", *constants)
    params, model = model_of(c, Table(table), temperature=temperature)
    fields = dict(
        prompt_ids=PROMPTS,
        completion_ids=ANSWERS,
        mask=MASK != 0,
        advantage=ADVANTAGES[:, None],
        beta=np.full((2, 1), c.BETA),
        sampler_log_prob=SAMPLER,
        old_log_prob=OLD,
        ref_log_prob=REFERENCE if c.BETA else None,
    )
    value, metrics, gradient = value_and_gradient(c, params, model, fields | changes)
    return value, metrics, np.asarray(gradient["table"])


def value_and_gradient(c, params, model, fields):
    """The loss on the page with its metrics, and its gradient; `fields` of a `Batch` but for the
    weights.

    These are what the run's aggregation makes of the mask [N, T], a group of two at a time.
    """
    method, mask = variants.choose(c, demo.TABLES), np.asarray(fields["mask"])
    weight = method.weights(mask.reshape(-1, 2, mask.shape[-1])).reshape(mask.shape)
    one_pass = jax.value_and_grad(demo.loss, has_aux=True)
    (value, metrics), gradient = one_pass(
        params, model, as_batch(fields | {"weight": weight}), method
    )
    return value, for_the_log(metrics), gradient


def for_the_log(metrics):
    """The metrics that `mean_metrics` takes."""
    return {name: value for name, value in metrics.items() if name != "log_prob_before_update"}


def mean(figure):
    """Of sum and number."""
    return figure[0] / figure[1]


class Tokenizer:
    """Text is the tokens' numbers, "4 5 1"; what Tunix asks of a tokenizer."""

    eos_ids = (EOS,)

    def pad_id(self):
        return PAD

    def eos_id(self):
        return EOS

    bos_id = eos_id

    def encode(self, text, **kwargs):
        return [int(token) for token in text.split()]

    def decode(self, ids, **kwargs):
        return " ".join(str(int(token)) for token in ids)


class Scripted(BaseRollout):
    """A rollout engine that gives prepared answers: those of call i are `answers[i]`, [N, T],
    padded.

    It has weights of its own, as vLLM has; the log-probs are those of the answers under them.
    """

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, *, answers, takes=0.0):
        self._model = rollout_actor
        self.tokenizer = tokenizer
        self._answers = answers
        self._takes = takes
        self._table = jnp.copy(rollout_actor.table[...])
        self.asked, self.temperatures = [], []

    def generate(self, prompts, rollout_config, **kwargs):
        time.sleep(self._takes)
        answers = np.asarray(self._answers[len(self.asked)])
        tokens = [row[row != PAD] for row in answers]
        prompt_ids = np.array([[2 + int(text) % 3] for text in prompts])
        log_prob = log_probs_by_hand(
            self._table, prompt_ids, answers, rollout_config.temperature or 1.0
        )
        self.asked.append(list(prompts))
        self.temperatures.append(rollout_config.temperature)
        return RolloutOutput(
            text=[self.tokenizer.decode(row) for row in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=prompt_ids,
            logprobs=[row[: len(ids)] for row, ids in zip(log_prob, tokens, strict=True)],
        )

    # Tunix's learner asks for pi_old's
    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        table = self._model.table[...]  # it sends no weights to an engine on the trainer's devices
        return jnp.asarray(log_probs_by_hand(table, prompt_tokens, completion_tokens))

    def update_params(self, params, filter_types=None):
        self._table = jnp.copy(params["table"][...])

    pad_id, eos_id = Tokenizer.pad_id, Tokenizer.eos_id

    def model(self):
        return self._model


def two_tables():
    """A mesh of one device, and actor and reference on it."""
    mesh = one_device()
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return mesh, *(Table(jax.device_put(TABLE, placed)) for _ in range(2))


def questions(count):
    """Rows as `make_prompts` gives them; the prompt of row i is the text of i."""
    names = ("question", "answer", "data_source", "extra_info", "source", "line")
    return [dict.fromkeys(names, "0") | dict(prompts=str(i), weight="1") for i in range(count)]


def train(c, answers, points, folder: Path, takes=0.0):
    """The loop on the page, with these answers: the language model after it, and the rows of its
    log.

    The only reward function is `points`, of an answer's tokens.
    """

    def reward(prompts, completions, completion_ids, **columns):
        return [float(points(list(ids))) for ids in completion_ids]

    grader = run_grader.make_grader("check_numbers", "", reward_func, [])
    grader = dataclasses.replace(grader, functions=[reward])
    mesh, actor, frozen = two_tables()
    rollout = Scripted(actor, Tokenizer(), mesh, None, answers=answers, takes=takes)
    llm = Llm(c, actor, frozen if c.BETA else None, rollout, sampling_config(c), mesh, ())
    return llm, train_llm(c, llm, grader, questions(10 * c.BATCH_SIZE), folder)


def train_llm(c, llm, grader, rows, folder: Path):
    """The loop on the page, on these questions; the rows of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    run = run_folder.RunFolder(folder, folder, str(folder / "checkpoints"))
    task = make_task(c, dict(train=rows, test=[], validation=[]), grader, {})
    with TrainingRun(c, llm, task, run, demo.evaluate) as training:
        return demo.train(c, llm, task, training)
