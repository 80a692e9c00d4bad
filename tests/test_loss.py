"""The loss on the page and each variant's number, on two answers of up to three tokens.

The model is a table of logits (table_policy.py). The numbers beside it are plain NumPy, finite differences of
float64, or Tunix's own loss.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from table_policy import ADVANTAGES, ANSWERS, CLOSE, EOS, MASK, OLD, PAD, PROMPTS, REFERENCE  # isort: skip
from table_policy import SAMPLER, TABLE, VOCABULARY, Table, batch_of, constants_of  # isort: skip
from table_policy import log_probs_by_hand, loss_of, mean  # isort: skip
from tunix.rl import algo_core
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample

import grpo_by_hand as by_hand
import grpo_llama3_1_8b_demo as demo
import settings
from model.log_probs import mean_metrics

INPUTS = np.concatenate([PROMPTS, ANSWERS], axis=1)[:, :-1]  # the token before each token of an answer


# --- by hand


@pytest.mark.parametrize("seed", range(5))
def test_the_step_by_hand_has_the_pages_loss_and_gradient(seed):
    """grpo_by_hand.py's formulas after two updates, ratios in and out of the clip, against the page's."""
    rng = np.random.default_rng(seed)
    params = rng.normal(size=by_hand.START.shape)
    answers = rng.integers(1, 6, (4, 3))
    old, ref = (by_hand.log_probs(params + 0.3 * rng.normal(size=params.shape), answers) for _ in "ab")
    advantage = rng.normal(size=(4, 1))
    value, gradient, parts = by_hand.loss_and_gradient(params, answers, advantage, old, ref)
    expected, _, slope = loss_of(
        f"BETA={by_hand.BETA}", f"EPSILON={by_hand.EPSILON}", table=params.astype(np.float32),
        prompt_ids=np.zeros((4, 1), int), completion_ids=answers, mask=np.ones((4, 3), bool),
        advantage=advantage, beta=np.full((4, 1), by_hand.BETA), sampler_log_prob=old, old_log_prob=old,
        ref_log_prob=ref,
    )  # fmt: skip
    assert 0 < parts["clipped"].sum() < answers.size
    np.testing.assert_allclose(value, expected, **CLOSE)
    np.testing.assert_allclose(gradient, slope, **CLOSE)


@pytest.mark.parametrize("page", ["MEASUREMENTS.md", "MEASUREMENTS_ch.md"])
def test_the_lab_book_shows_what_the_step_by_hand_prints(page, capsys):
    by_hand.main()
    assert f"```text\n{capsys.readouterr().out}```\n" in (settings.HERE / page).read_text()


def clipped_by_hand(log_prob=None):
    """Per-token losses [2, 3] of the clipped objective (without KL)."""
    ratio, A = np.exp((log_probs_by_hand() if log_prob is None else log_prob) - OLD), ADVANTAGES[:, None]
    return -np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A)


def mean_of_means(losses):
    return (losses[0].sum() / 3 + losses[1, :2].sum() / 2) / 2


# --- against Tunix's own loss, on the same numbers

TUNIXS = {  # Tunix's names of the aggregations
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum-norm": "sequence-mean-token-scale",
}


def tunix_loss(*constants, sampler_is_weights=None, **changes):
    """Loss, metrics and gradient of `tunix.rl.algo_core.grpo_loss_fn` under the constants."""
    c = constants_of("NUM_GENERATIONS=2", *constants)
    batch = batch_of(c, **changes)
    config = GRPOConfig(
        num_generations=2, beta=c.BETA, epsilon=c.EPSILON, loss_algo=c.LOSS_ALGO.replace("dapo", "grpo"),
        loss_agg_mode=TUNIXS.get(c.LOSS_AGG_MODE, c.LOSS_AGG_MODE), kl_loss_mode=c.KL_LOSS_MODE,
    )  # fmt: skip
    config.epsilon_high, config.temperature = c.EPSILON_HIGH or c.EPSILON, c.TEMPERATURE
    example = TrainExample(
        prompt_ids=batch.prompt_ids, prompt_mask=batch.prompt_ids != PAD,
        completion_ids=batch.completion_ids, completion_mask=batch.mask,
        advantages=batch.advantage[:, 0], ref_per_token_logps=batch.ref_log_prob,
        old_per_token_logps=batch.old_log_prob,
    )  # fmt: skip
    if sampler_is_weights is not None:  # Tunix's loss looks for it; only its agentic example has the field
        object.__setattr__(example, "sampler_is_weights", jnp.asarray(sampler_is_weights))

    def loss(model):
        return algo_core.grpo_loss_fn(model, example, config, PAD, EOS)

    (value, metrics), gradient = nnx.value_and_grad(loss, has_aux=True)(Table())
    return value, metrics, gradient.table[...]


MASKED = dict(mask=np.array([[0, 0, 0], [1, 1, 0]]) != 0)


@pytest.mark.parametrize(
    ("constants", "changes"),
    [
        ([], {}),
        (["EPSILON=0.05", "BETA=0.5"], {}),
        (["BETA=0.0"], {}),
        ([], dict(old_log_prob=None)),
        (["TEMPERATURE=0.7"], {}),
        ([], MASKED),
        (["LOSS_ALGO=dapo", "EPSILON_HIGH=0.28"], {}),
        (["LOSS_ALGO=gspo-token", "EPSILON=0.5", "BETA=0.0"], {}),
        (["LOSS_AGG_MODE=token-mean"], MASKED),
        (["LOSS_AGG_MODE=seq-mean-token-sum"], {}),
        (["LOSS_AGG_MODE=seq-mean-token-sum-norm"], MASKED),
        (["KL_LOSS_MODE=kl"], {}),
        (["KL_LOSS_MODE=mse_kl"], {}),
    ],
)
def test_loss_metrics_and_gradients_equal_tunixs_own(constants, changes):
    expected, tunix_metrics, gradient = tunix_loss(*constants, **changes)
    value, metrics, our_gradient = loss_of(*constants, **changes)
    np.testing.assert_allclose(value, expected, **CLOSE)
    np.testing.assert_allclose(our_gradient, gradient, **CLOSE)
    assert np.abs(gradient).max() > 0.01
    for name, tunixs in (("kl", "kl"), ("clip_fraction", "pg_clipfrac")):
        np.testing.assert_allclose(mean(metrics[name]), tunix_metrics[tunixs], err_msg=name, **CLOSE)
    if "LOSS_AGG_MODE=token-mean" in constants:  # Tunix aggregates the entropy as it does the loss
        np.testing.assert_allclose(mean(metrics["entropy"]), tunix_metrics["entropy"], **CLOSE)


@pytest.mark.parametrize("constants", [[], ["SAMPLER_CORRECTION=2.0"], ["LOSS_ALGO=gspo-token"]])
def test_padding_never_counts(constants):
    """What follows the end of an answer: exp(500) is infinite, and infinity times 0 is NaN."""
    value, metrics, gradient = loss_of(*constants)
    padding = 500.0 * (MASK == 0)
    arrays = dict(ref_log_prob=REFERENCE + padding, old_log_prob=OLD - padding)
    arrays["sampler_log_prob"] = SAMPLER + padding
    for name in arrays:
        changes = {name: arrays[name]}
        again, more_metrics, other_gradient = loss_of(*constants, **changes)
        np.testing.assert_array_equal(again, value)
        np.testing.assert_array_equal(other_gradient, gradient)
        jax.tree.map(np.testing.assert_array_equal, more_metrics, metrics)


def objective_of(log_ratio, *constants):
    """The objective of one answer whose tokens have these log-ratios and an advantage of 1."""
    c, log_ratio = constants_of("EPSILON=1e9", *constants), jnp.asarray([log_ratio], jnp.float32)
    batch = SimpleNamespace(old_log_prob=0 * log_ratio, advantage=1.0, mask=jnp.ones_like(log_ratio))
    objective, _ = demo.TABLES["LOSS_ALGO"][c.LOSS_ALGO](SimpleNamespace(log_prob=log_ratio), batch, c)
    return np.asarray(objective)[0]


def test_the_ratio_is_bounded_where_its_exponential_would_overflow():
    """By e^20 on both sides, in closed form; GSPO's above by e^10, Tunix's limit."""
    log_ratio = np.array([-100.0, -20.5, 0.5, 20.5, 100.0])
    expected = np.exp(np.clip(log_ratio, -20, 20))
    np.testing.assert_allclose(objective_of(log_ratio), expected, rtol=1e-5)  # float32 of e^20
    for shift, expected in ((100.0, np.exp(10)), (2.0, np.exp(2 + 0.1))):  # the mean of the row is 0.1
        found = objective_of(log_ratio + shift, "LOSS_ALGO=gspo-token")
        np.testing.assert_allclose(found, np.full(5, expected), rtol=1e-4)


@pytest.mark.parametrize("old", [OLD, None])
@pytest.mark.parametrize(("cap", "algorithm"), [(2.0, "grpo"), (100.0, "grpo"), (2.0, "gspo-token")])
def test_sampler_correction_equals_tunixs_on_the_same_numbers(old, cap, algorithm):
    """Tunix's agentic learner makes the weights outside of its loss, by the formula that stands here."""
    constants = (f"SAMPLER_CORRECTION={cap}", "BETA=0.5", f"LOSS_ALGO={algorithm}", "EPSILON=0.5")
    trainers = log_probs_by_hand() if old is None else old
    weights = np.minimum(np.exp(np.clip(trainers - SAMPLER, -20, 20)), cap)
    assert weights[MASK == 1].min() < 0.9 and (cap > 99 or weights[MASK == 1].max() == cap)
    expected, metrics, gradient = tunix_loss(*constants, old_log_prob=old, sampler_is_weights=weights)
    assert metrics["sampler_is/weight_min"] < 0.9
    value, ours, our_gradient = loss_of(*constants, old_log_prob=old)
    np.testing.assert_allclose(value, expected, **CLOSE)
    np.testing.assert_allclose(our_gradient, gradient, **CLOSE)
    distance = np.abs(trainers - SAMPLER)[MASK == 1]
    np.testing.assert_allclose(mean(ours["mismatch"]), distance.mean(), **CLOSE)
    np.testing.assert_allclose(ours["mismatch_max"], distance.max(), **CLOSE)


def test_cispo_weighs_each_tokens_own_gradient():
    """Eq. 4's gradient in closed form: min(ratio, 1 + eps_high) * A * (one-hot - softmax) of each token."""
    ratio = np.exp(log_probs_by_hand() - OLD)
    weight = np.minimum(ratio, 1.5)
    assert (ratio > 1.5)[MASK == 1].sum() == 1 and (ratio < 0.8)[MASK == 1].sum() == 2  # no lower bound
    constants = ("LOSS_ALGO=cispo", "EPSILON_HIGH=0.5", "BETA=0.0", "LOSS_AGG_MODE=token-mean")
    value, metrics, gradient = loss_of(*constants)
    terms = weight * ADVANTAGES[:, None] * MASK / 5
    np.testing.assert_allclose(value, -(terms * log_probs_by_hand()).sum(), **CLOSE)
    probs = np.exp(TABLE.astype(float))
    probs /= probs.sum(axis=1, keepdims=True)
    expected = np.zeros(TABLE.shape)
    for i, t in zip(*np.nonzero(MASK)):
        expected[INPUTS[i, t]] -= terms[i, t] * (np.eye(VOCABULARY)[ANSWERS[i, t]] - probs[INPUTS[i, t]])
    np.testing.assert_allclose(gradient, expected, **CLOSE)
    np.testing.assert_allclose(mean(metrics["clip_fraction"]), 1 / 5, **CLOSE)


def test_the_entropy_bonus_and_its_gradient():
    """Against probabilities times their logarithms, differentiated by JAX."""

    def entropy(table):
        probs = jax.nn.softmax(jnp.asarray(table)[INPUTS])  # [2, 3, V]
        return -(probs * jnp.log(probs)).sum(axis=-1)

    plain, metrics, gradient = loss_of()
    value, _, with_bonus = loss_of("ENTROPY_COEF=0.3")
    expected, slope = jax.value_and_grad(lambda table: -0.3 * mean_of_means(entropy(table)))(TABLE)
    np.testing.assert_allclose(value - plain, expected, **CLOSE)
    np.testing.assert_allclose(with_bonus - gradient, slope, **CLOSE)
    np.testing.assert_allclose(mean(metrics["entropy"]), entropy(TABLE)[MASK == 1].mean(), **CLOSE)


@pytest.mark.parametrize("kind", ["token", "token-mask", "sequence", "sequence-mask"])
def test_each_sampler_weight_by_hand(kind, cap=1.25):
    """Answer by answer in Python floats; the first has 3 tokens of its own, the second 2."""
    expected = np.zeros(SAMPLER.shape)
    for answer, tokens in enumerate(MASK.sum(axis=1).astype(int)):
        ratios = [math.exp(OLD[answer, t] - SAMPLER[answer, t]) for t in range(tokens)]
        of_all = math.prod(ratios)
        for t, ratio in enumerate(ratios):
            expected[answer, t] = {
                "token": min(ratio, cap),
                "token-mask": ratio if 1 / cap <= ratio <= cap else 0.0,
                "sequence": min(of_all, cap),
                "sequence-mask": of_all if of_all <= cap else 0.0,
            }[kind]
    constants = (f"SAMPLER_CORRECTION={cap}", f"SAMPLER_WEIGHT={kind}", "BETA=0.0")
    sampler = np.where(MASK, SAMPLER, -5.0)  # padding has no say in an answer's ratio
    value, *_ = loss_of(*constants, sampler_log_prob=sampler)
    np.testing.assert_allclose(value, mean_of_means(clipped_by_hand() * expected), **CLOSE)


def test_the_kl_keeps_its_digits_near_zero():
    """Against float64; exp(x) - x - 1 would be off by 6e-8, the rounding of a number near 1."""
    x = np.float32([1e-2, -1e-2, 1e-3, 1e-4, -1e-5, 1e-6, 0.0, 1.5, -3.0])
    exact = np.expm1(x.astype(float)) - x.astype(float)
    found = np.asarray(demo.k3(jnp.asarray(x)), float)
    rounding = np.finfo(np.float32).eps * np.abs(np.expm1(x))  # of expm1 and x; a few of them
    assert (np.abs(found - exact) <= 4 * rounding).all()


def test_the_weight_of_the_kl_and_the_temperature_are_arguments():
    """TARGET_KL and TEMPERATURE_END move them from step to step; BETA and TEMPERATURE only begin."""
    log_prob = log_probs_by_hand(temperature=0.7)
    d = log_prob - REFERENCE
    expected = mean_of_means(clipped_by_hand(log_prob=log_prob) + 0.3 * (np.exp(-d) - 1 + d))
    constant, *_ = loss_of("BETA=0.3", "TEMPERATURE=0.7")
    moved, *_ = loss_of("BETA=0.9", beta=np.full((2, 1), 0.3), temperature=0.7)
    np.testing.assert_allclose([constant, moved], expected, **CLOSE)


def test_logits_clip_bounds_the_logits_before_the_softmax():
    loss, *_ = loss_of("LOGITS_CLIP=0.4", "BETA=0.0")
    log_prob = log_probs_by_hand(clip=0.4)
    np.testing.assert_allclose(loss, mean_of_means(clipped_by_hand(log_prob=log_prob)), **CLOSE)
    assert np.abs(TABLE).max() > 0.4


def test_the_log_says_nan_of_an_update_without_a_token():
    """What it says of several gradient passes is compared in test_loop.py."""
    _, metrics, _ = loss_of(mask=np.zeros(MASK.shape, bool))
    found = mean_metrics(jax.tree.map(lambda x: np.stack([x]), metrics))
    for name in ("kl", "clip_fraction", "entropy", "mismatch"):
        assert np.isnan(found[name])
