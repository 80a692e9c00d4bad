"""The loss on the page and each variant's number.

Log-probs of twelve answers: against the papers' formulas, which make_golden_batch.py writes out in
float64, and against Tunix. Two answers of a table of logits (table_policy.py): against plain NumPy.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import make_golden_batch
import numpy as np
import pytest

# isort: skip
# isort: skip
from table_policy import (
    ADVANTAGES,
    ANSWERS,
    CLOSE,
    MASK,
    OLD,
    PROMPTS,
    REFERENCE,
    TABLE,
    constants_of,
    log_probs_by_hand,
    loss_of,
    mean,
    value_and_gradient,
)
from tunix.rl import common

import grpo_by_hand as by_hand
import grpo_llama3_1_8b_demo as demo
import settings
from model.llm import Pi
from model.log_probs import mean_metrics

# N = 12 answers of at most T = 12 tokens, in groups of 4
GOLDEN = dict(np.load(make_golden_batch.TO))
OWN, LENGTHS = GOLDEN["mask"], GOLDEN["mask"].sum(axis=1)
SAMPLER = GOLDEN["old_log_prob"] + np.random.default_rng(1).normal(0, 0.3, OWN.shape)


def loss_of_golden(*constants, **changes):
    """The page's loss of the golden batch, its metrics, its gradient [N, T] in the log-probs."""
    c = constants_of("NUM_GENERATIONS=4", "TOTAL_GENERATION_STEPS=12", *constants)
    rewards = SimpleNamespace(rewards=GOLDEN["rewards"].reshape(-1, 4))
    fields = dict(
        prompt_ids=OWN,
        completion_ids=OWN,
        mask=OWN,
        sampler_log_prob=SAMPLER,
        advantage=demo.TABLES["advantage"][1][c.ADVANTAGE](rewards).reshape(-1, 1),
        beta=np.full((len(OWN), 1), c.BETA),
        old_log_prob=GOLDEN["old_log_prob"],
        ref_log_prob=GOLDEN["ref_log_prob"] if c.BETA else None,
    )
    model = lambda log_prob, batch: Pi(log_prob, entropy=-log_prob)  # noqa: E731
    return value_and_gradient(c, GOLDEN["log_prob"], model, fields | changes)


PAPERS = {
    "grpo": ["BETA=0.04"],
    "dr_grpo": ["BETA=0.0", "ADVANTAGE=centered", "LOSS_AGG_MODE=seq-mean-token-sum-norm"],
    "dapo": ["BETA=0.0", "LOSS_ALGO=dapo", "EPSILON_HIGH=0.28", "LOSS_AGG_MODE=token-mean"],
    "gspo": ["BETA=0.0", "LOSS_ALGO=gspo-token"],
}


@pytest.mark.parametrize("method", PAPERS)
def test_loss_and_gradient_are_the_papers(method):
    """And the share of clipped tokens: those without a gradient, though their answer has an
    advantage.
    """
    value, metrics, gradient = loss_of_golden(*PAPERS[method])
    np.testing.assert_allclose(value, GOLDEN[f"{method}_loss"], **CLOSE)
    np.testing.assert_allclose(gradient, GOLDEN[f"{method}_gradient"], atol=1e-7)
    clipped = (GOLDEN[f"{method}_gradient"] == 0) & (GOLDEN[f"{method}_advantage"][:, None] != 0)
    if method != "grpo":  # its KL has a gradient everywhere
        np.testing.assert_allclose(mean(metrics["clip_fraction"]), clipped[OWN].mean(), **CLOSE)
        assert clipped[OWN].any()


@pytest.mark.parametrize("seed", range(5))
def test_the_step_by_hand_has_the_pages_loss_and_gradient(seed):
    """grpo_by_hand.py's formulas after two updates, ratios in and out of the clip, against the
    page's.
    """
    rng = np.random.default_rng(seed)
    params = rng.normal(size=by_hand.START.shape)
    answers = rng.integers(1, 6, (4, 3))
    old, ref = (
        by_hand.log_probs(params + 0.3 * rng.normal(size=params.shape), answers) for _ in "ab"
    )
    advantage = rng.normal(size=(4, 1))
    value, gradient, parts = by_hand.loss_and_gradient(params, answers, advantage, old, ref)
    expected, _, slope = loss_of(
        f"BETA={by_hand.BETA}",
        f"EPSILON={by_hand.EPSILON}",
        table=params.astype(np.float32),
        prompt_ids=np.zeros((4, 1), int),
        completion_ids=answers,
        mask=np.ones((4, 3), bool),
        advantage=advantage,
        beta=np.full((4, 1), by_hand.BETA),
        sampler_log_prob=old,
        old_log_prob=old,
        ref_log_prob=ref,
    )
    assert 0 < parts["clipped"].sum() < answers.size
    np.testing.assert_allclose(value, expected, **CLOSE)
    np.testing.assert_allclose(gradient, slope, **CLOSE)


@pytest.mark.parametrize("page", ["MEASUREMENTS.md", "MEASUREMENTS_ch.md"])
def test_the_lab_book_shows_what_the_step_by_hand_prints(page, capsys):
    by_hand.main()
    assert f"```text\n{capsys.readouterr().out}```\n" in (settings.HERE / page).read_text()


@pytest.mark.parametrize("constants", [[], ["SAMPLER_CORRECTION=2.0"], ["LOSS_ALGO=gspo-token"]])
def test_padding_never_counts(constants):
    """What follows the end of an answer: exp(500) is infinite, and infinity times 0 is NaN."""
    value, metrics, gradient = loss_of_golden(*constants)
    padding = 500.0 * ~OWN
    arrays = dict(ref_log_prob=GOLDEN["ref_log_prob"] + padding, sampler_log_prob=SAMPLER + padding)
    arrays["old_log_prob"] = GOLDEN["old_log_prob"] - padding
    for name in arrays:
        again, more_metrics, other_gradient = loss_of_golden(*constants, **{name: arrays[name]})
        np.testing.assert_array_equal(again, value)
        np.testing.assert_array_equal(other_gradient, gradient)
        jax.tree.map(np.testing.assert_array_equal, more_metrics, metrics)


def test_the_weights_of_tokens_where_an_answer_has_none():
    """MASK_OVERLONG and ZERO_VARIANCE_GROUPS leave such answers: they aren't counted."""
    mask = np.arange(4) < np.array([[[3], [0]], [[2], [0]]])  # [2, 2, 4]
    expected = {
        "seq-mean-token-mean": (1 / 6, 1 / 4),
        "token-mean": (1 / 5,) * 2,
        "seq-mean-token-sum": (1 / 2,) * 2,
        "seq-mean-token-sum-norm": (1 / 8,) * 2,
    }
    for name, weights in demo.TABLES["weights"][1].items():
        of_answers = np.array([[expected[name][0], 0], [expected[name][1], 0]])
        np.testing.assert_allclose(weights(mask), of_answers[..., None] * mask, rtol=1e-12)
        assert not weights(mask & False).any()


@pytest.mark.parametrize("mode", demo.TABLES["kl"][1])
def test_each_kl_is_tunixs(mode):
    policy, reference = (jnp.asarray(GOLDEN[f"{name}log_prob"]) for name in ("", "ref_"))
    theirs = common.compute_kl_divergence(policy, reference, mode)
    np.testing.assert_allclose(demo.TABLES["kl"][1][mode](reference - policy), theirs, **CLOSE)


def test_the_kl_keeps_its_digits_near_zero():
    """Against float64; exp(x) - x - 1 would be off by 6e-8, the rounding of a number near 1."""
    x = np.float32([1e-2, -1e-2, 1e-3, 1e-4, -1e-5, 1e-6, 0.0, 1.5, -3.0])
    exact = np.expm1(x.astype(float)) - x.astype(float)
    found = np.asarray(demo.k3(jnp.asarray(x)), float)
    rounding = np.finfo(np.float32).eps * np.abs(np.expm1(x))  # of expm1 and x; a few of them
    assert (np.abs(found - exact) <= 4 * rounding).all()


def objective_of(log_ratio, *constants):
    """The objective of one answer whose tokens have these log-ratios and an advantage of 1."""
    c, log_ratio = constants_of("EPSILON=1e9", *constants), jnp.asarray([log_ratio], jnp.float32)
    batch = SimpleNamespace(
        old_log_prob=0 * log_ratio, advantage=1.0, mask=jnp.ones_like(log_ratio)
    )
    objective, _ = demo.TABLES["objective"][1][c.LOSS_ALGO](
        SimpleNamespace(log_prob=log_ratio), batch, c
    )
    return np.asarray(objective)[0]


def test_the_ratio_is_bounded_where_its_exponential_would_overflow():
    """By e^20 on both sides, in closed form; GSPO's above by e^10, Tunix's limit."""
    log_ratio = np.array([-100.0, -20.5, 0.5, 20.5, 100.0])
    expected = np.exp(np.clip(log_ratio, -20, 20))
    np.testing.assert_allclose(objective_of(log_ratio), expected, rtol=1e-5)  # float32 of e^20
    # the mean of the row is 0.1
    for shift, expected in ((100.0, np.exp(10)), (2.0, np.exp(2 + 0.1))):
        found = objective_of(log_ratio + shift, "LOSS_ALGO=gspo-token")
        np.testing.assert_allclose(found, np.full(5, expected), rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token"])
@pytest.mark.parametrize("old", [GOLDEN["old_log_prob"], None], ids=["pi_old", "once"])
def test_the_sampler_weight_by_hand(old, algorithm, cap=1.25):
    """Token by token in Python floats: a factor of each token's gradient that has no gradient
    itself.
    """
    constants = (f"LOSS_ALGO={algorithm}", "BETA=0.0")
    trainer, expected = GOLDEN["log_prob"] if old is None else old, np.zeros(OWN.shape)
    for answer, tokens in enumerate(LENGTHS):
        for t in range(tokens):
            ratio = math.exp(float(trainer[answer, t]) - SAMPLER[answer, t])
            expected[answer, t] = min(ratio, cap)
    _, _, plain = loss_of_golden(*constants, old_log_prob=old)
    sampler = np.where(OWN, SAMPLER, -5.0)  # padding doesn't count
    constants += (f"SAMPLER_CORRECTION={cap}",)
    _, metrics, gradient = loss_of_golden(*constants, old_log_prob=old, sampler_log_prob=sampler)
    assert np.abs(plain).max() > 0.01 and np.ptp(expected[OWN]) > 0.5
    np.testing.assert_allclose(gradient, plain * expected, **CLOSE)
    distance = np.abs(trainer - SAMPLER)[OWN]
    np.testing.assert_allclose(mean(metrics["mismatch"]), distance.mean(), **CLOSE)
    np.testing.assert_allclose(metrics["mismatch_max"], distance.max(), **CLOSE)


# --- two answers of a table of logits


def mean_of_means(losses):
    return (losses[0].sum() / 3 + losses[1, :2].sum() / 2) / 2


def test_the_entropy_bonus_and_its_gradient():
    """Against probabilities times their logarithms, differentiated by JAX."""
    # the token before each token of an answer
    inputs = np.concatenate([PROMPTS, ANSWERS], axis=1)[:, :-1]

    def entropy(table):
        probs = jax.nn.softmax(jnp.asarray(table)[inputs])  # [2, 3, V]
        return -(probs * jnp.log(probs)).sum(axis=-1)

    plain, metrics, gradient = loss_of()
    value, _, with_bonus = loss_of("ENTROPY_COEF=0.3")
    expected, slope = jax.jit(
        jax.value_and_grad(lambda table: -0.3 * mean_of_means(entropy(table)))
    )(TABLE)
    np.testing.assert_allclose(value - plain, expected, **CLOSE)
    np.testing.assert_allclose(with_bonus - gradient, slope, **CLOSE)
    np.testing.assert_allclose(
        mean(metrics["entropy"]), jax.jit(entropy)(TABLE)[MASK == 1].mean(), **CLOSE
    )


def test_temperature_logits_clip_and_the_weight_of_the_kl():
    """TARGET_KL and TEMPERATURE_END move two of them from step to step; BETA and TEMPERATURE only
    begin.
    """
    log_prob = log_probs_by_hand(temperature=0.7, clip=0.4)  # before the softmax
    ratio, A, d = np.exp(log_prob - OLD), ADVANTAGES[:, None], log_prob - REFERENCE
    losses = -np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A) + 0.3 * (np.exp(-d) - 1 + d)
    value, *_ = loss_of("LOGITS_CLIP=0.4", "BETA=0.9", beta=np.full((2, 1), 0.3), temperature=0.7)
    np.testing.assert_allclose(value, mean_of_means(losses), **CLOSE)
    assert np.abs(TABLE).max() > 0.4


def test_the_log_says_nan_of_an_update_without_a_token():
    """What it says of several gradient passes is compared in test_loop.py."""
    _, metrics, _ = loss_of(mask=np.zeros(MASK.shape, bool))
    found = mean_metrics(jax.tree.map(lambda x: np.stack([x]), metrics))
    for name in ("kl", "clip_fraction", "entropy", "mismatch"):
        assert np.isnan(found[name])
