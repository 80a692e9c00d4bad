"""The loss on the page and each option's number, on two answers of up to three tokens.

The model is a table of logits. The numbers beside it are plain NumPy, or Tunix's own loss; the loss under
test is the one that the main script's constants give Tunix's trainer.
"""

import functools
import gc
import inspect
import typing
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.rl import algo_core, function_registry
from tunix.rl import trainer as rl_trainer
from tunix.rl.rl_cluster import Mode, RLTrainingConfig, Role

import grpo_llama3_1_8b_demo as demo
import reward_func
from parts import loss_options, settings
from parts.model import llama, lora
from parts.rewards import task_rewards
from parts.run import checks, run_log

PAD, EOS, VOCABULARY = 0, 1, 6
PROMPTS = np.array([[2], [3]])
ANSWERS = np.array([[4, 5, EOS], [5, EOS, PAD]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = np.array([1.5, -0.5])
OLD = np.array([[-1.9, -1.2, -2.6], [-1.6, -2.2, 0.0]])  # log-probs of the policy that wrote the answers
REFERENCE = np.array([[-1.5, -2.0, -1.1], [-2.4, -1.7, 0.0]])
SAMPLER = np.array([[-1.4, -2.9, -2.6], [-1.3, -2.0, 0.0]])  # as the answers were drawn; ratios 0.6 to 5.5
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
# float32 sums of a dozen numbers of size 1, against float64
CLOSE = dict(rtol=2e-6, atol=2e-6)


class Table(nnx.Module):
    """A language model that looks at one token: row `token` of the table are the next one's logits."""

    def __init__(self, table=TABLE):
        self.table = nnx.Param(jnp.asarray(table))

    def __call__(self, input_tokens, positions, cache, attention_mask, segment_ids=None):
        return self.table[...][input_tokens], None


def example(**changes):
    fields = dict(
        prompt_ids=PROMPTS, prompt_mask=PROMPTS != PAD, completion_ids=ANSWERS, completion_mask=MASK != 0,
        advantages=ADVANTAGES, ref_per_token_logps=REFERENCE, old_per_token_logps=OLD,
        sampler_log_prob=SAMPLER,
    ) | changes  # fmt: skip
    arrays = {k: v if v is None else jnp.asarray(v) for k, v in fields.items()}
    return loss_options.Example(**arrays)


GRADER = task_rewards.make_grader("", "", reward_func, [])


def constants_of(*arguments):
    """The constants of a run, checked."""
    c = settings.read(demo.Constants, arguments)
    checks.refuse(c)
    return c


def make_trainer(*constants, optimizer=None, model=None):
    """Tunix's trainer of the table, with the loss that the constants ask for."""
    if not any(constant.startswith("TOTAL_GENERATION_STEPS=") for constant in constants):
        constants = (f"TOTAL_GENERATION_STEPS={ANSWERS.shape[1]}", *constants)
    c = constants_of(*constants)
    config = RLTrainingConfig(
        actor_optimizer=None, eval_every_n_steps=100, mini_batch_size=c.BATCH_SIZE,
        train_micro_batch_size=c.TRAIN_MICRO_BATCH_SIZE or None,
    )  # fmt: skip
    trainer = rl_trainer.Trainer(model or Table(), optimizer or optax.sgd(0.1), config, dict)
    cluster = SimpleNamespace(
        actor_trainer=trainer,
        rollout=SimpleNamespace(pad_id=lambda: PAD, eos_id=lambda: EOS, model=lambda: trainer.model),
        cluster_config=SimpleNamespace(training_config=config, role_to_mesh={Role.ACTOR: 0, Role.ROLLOUT: 0}),
        get_rollout_config=lambda mode: demo.sampling(c),
    )
    demo.make_learner(c, cluster, GRADER)
    return trainer


def loss_of(*constants, **changes):
    trainer = make_trainer(*constants)
    inputs = trainer.gen_model_input_fn(example(**changes))
    loss, aux = trainer.loss_fn(trainer.model, **inputs)
    return float(loss), aux


# --- by hand


def logps_by_hand(temperature=1.0, clip=np.inf):
    """Log-probs [2, 3] of the answers under the table."""
    inputs = np.concatenate([PROMPTS, ANSWERS], axis=1)[:, :-1]
    logits = np.clip(TABLE.astype(float)[inputs], -clip, clip) / temperature  # [2, 3, V]
    normalizer = np.log(np.exp(logits).sum(-1))
    return np.take_along_axis(logits, ANSWERS[..., None], -1)[..., 0] - normalizer


def clipped_by_hand(low=0.2, high=0.2, sequence_ratio=False, logps=None):
    """Per-token losses [2, 3] of the clipped objective (without KL)."""
    logps = logps_by_hand() if logps is None else logps
    log_ratio = logps - OLD
    if sequence_ratio:  # GSPO, eq. 7: one ratio for the whole answer, the geometric mean
        log_ratio = ((log_ratio * MASK).sum(1) / MASK.sum(1))[:, None] + 0 * log_ratio
    ratio, A = np.exp(log_ratio), ADVANTAGES[:, None]
    return -np.minimum(ratio * A, np.clip(ratio, 1 - low, 1 + high) * A)


def mean_of_means(losses):
    return (losses[0].sum() / 3 + losses[1, :2].sum() / 2) / 2


def test_the_example_leaves_the_clip_range_on_both_sides():
    """Else clip-higher, and the lower end, would not be tested below."""
    ratio = np.exp(logps_by_hand() - OLD)[MASK == 1]
    assert (ratio > 1.28).any() and (ratio < 0.8).any()


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [
        ("seq-mean-token-mean", mean_of_means),
        ("token-mean", lambda x: (x * MASK).sum() / 5),
        ("seq-mean-token-sum", lambda x: (x * MASK).sum() / 2),
        ("seq-mean-token-sum-norm", lambda x: (x * MASK).sum() / 2 / 3),
    ],
)
def test_each_aggregation_is_the_sum_by_hand(mode, by_hand):
    loss, _ = loss_of(f"LOSS_AGG_MODE={mode}", "BETA=0.0", ref_per_token_logps=None)
    np.testing.assert_allclose(loss, by_hand(clipped_by_hand()), **CLOSE)


def test_every_aggregation_is_tested():
    marks = test_each_aggregation_is_the_sum_by_hand.pytestmark
    assert [row[0] for row in marks[0].args[1]] == list(loss_options.TOKEN_WEIGHTS)


def test_every_choice_of_a_constant_has_its_function():
    """The choices are declared once, in Constants; here are the tables that serve them."""
    choices = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(demo.Constants).items()}
    assert choices["LOSS_ALGO"] == tuple(loss_options.LOG_RATIOS) == tuple(loss_options.OBJECTIVES)
    assert set(choices["KL_LOSS_MODE"]) == set(loss_options.KL_ESTIMATORS)
    assert choices["LOSS_AGG_MODE"] == tuple(loss_options.TOKEN_WEIGHTS)
    assert tuple(lora.TARGETS) == checks.LORA_TARGETS
    for advantage in choices["ADVANTAGE"]:
        for by_std in (True, False):
            name = loss_options.advantage_name(advantage, by_std)
            assert function_registry.get_advantage_estimator(name) is not None


# --- against Tunix's own loss, on the same numbers


def tunix_loss(c, **changes):
    """Loss, figures and gradient of `tunix.rl.algo_core.grpo_loss_fn` under the constants."""
    names = {  # Tunix's names of the aggregations
        "seq-mean-token-mean": "sequence-mean-token-mean",
        "seq-mean-token-sum-norm": "sequence-mean-token-scale",
    }
    config = loss_options.LossConfig(
        num_generations=2, beta=c.BETA, epsilon=c.EPSILON, epsilon_high=c.EPSILON_HIGH or c.EPSILON,
        loss_algo=c.LOSS_ALGO, loss_agg_mode=names.get(c.LOSS_AGG_MODE, c.LOSS_AGG_MODE),
        kl_loss_mode=c.KL_LOSS_MODE, max_answer_tokens=ANSWERS.shape[1],
    )  # fmt: skip
    config.temperature = c.TEMPERATURE

    def loss(model):
        return algo_core.grpo_loss_fn(model, example(**changes), config, PAD, EOS)

    (value, figures), gradient = nnx.value_and_grad(loss, has_aux=True)(Table())
    return value, figures, gradient.table[...]


def our_loss(*constants, **changes):
    """The same of the loss that the constants give the trainer."""
    trainer = make_trainer(*constants)

    def loss(model):
        return trainer.loss_fn(model, **trainer.gen_model_input_fn(example(**changes)))

    (value, figures), gradient = nnx.value_and_grad(loss, has_aux=True)(Table())
    return value, figures, gradient.table[...]


NO_REFERENCE = dict(ref_per_token_logps=None)
ONE_UPDATE = dict(old_per_token_logps=None)
MASKED = dict(completion_mask=np.array([[0, 0, 0], [1, 1, 0]]) != 0)
PLAIN = [
    ([], {}),
    (["EPSILON=0.05", "BETA=0.5"], {}),
    (["BETA=0.0"], NO_REFERENCE),
    ([], ONE_UPDATE),
    (["TEMPERATURE=0.7"], {}),
    ([], MASKED),
]
VARIANTS = [
    (["EPSILON_HIGH=0.28"], {}),
    (["LOSS_ALGO=gspo-token", "EPSILON=0.5", "BETA=0.0"], NO_REFERENCE),
    (["LOSS_AGG_MODE=token-mean"], MASKED),
    (["LOSS_AGG_MODE=seq-mean-token-sum"], {}),
    (["LOSS_AGG_MODE=seq-mean-token-sum-norm"], MASKED),
    (["KL_LOSS_MODE=kl"], {}),
    (["KL_LOSS_MODE=mse_kl"], {}),
]


def mean(figure):
    """Of sum and number."""
    return figure[0] / figure[1]


@pytest.mark.parametrize(("constants", "changes"), [*PLAIN, *VARIANTS])
def test_loss_figures_and_gradients_equal_tunixs_own(constants, changes):
    c = constants_of(*constants)
    assert loss_options.is_plain(c) == ((constants, changes) in PLAIN)
    expected, tunix_figures, gradient = tunix_loss(c, **changes)
    value, figures, our_gradient = our_loss(*constants, **changes)
    np.testing.assert_allclose(value, expected, **CLOSE)
    np.testing.assert_allclose(our_gradient, gradient, **CLOSE)
    assert np.abs(gradient).max() > 0.01
    for name in ("kl", "pg_clipfrac", "is_ratio/max", "is_ratio/min"):
        found = figures[name] if "is_ratio" in name else mean(figures[name])
        np.testing.assert_allclose(found, tunix_figures[name], err_msg=name, **CLOSE)
    if c.LOSS_AGG_MODE == "token-mean":  # Tunix aggregates the entropy as it does the loss
        np.testing.assert_allclose(mean(figures["entropy"]), tunix_figures["entropy"], **CLOSE)


@pytest.mark.parametrize(("estimator", "tunixs"), [("group", "grpo"), ("centered", "drgrpo"),
                                                   ("leave_one_out", "rloo")])  # fmt: skip
def test_each_advantage_equals_tunixs_own(estimator, tunixs):
    rewards = np.random.default_rng(3).normal(size=24)
    ours, theirs = (function_registry.get_advantage_estimator(name) for name in (estimator, tunixs))
    # float64, a few roundings
    np.testing.assert_allclose(ours(rewards, 4), np.asarray(theirs(rewards, 4)), rtol=1e-6, atol=1e-7)
    assert np.isfinite(ours(np.ones(8), 4)).all()


def test_the_loss_on_the_page_is_what_trains_and_an_option_replaces_it():
    """The function that Tunix calls is the one in the main script, not one of the same numbers."""
    page, options = demo.grpo_loss, loss_options.policy_loss
    for constants, expected in (
        ([], page), (["NUM_ITERATIONS=2"], page), (["LORA_RANK=4"], page), (["MASK_OVERLONG=True"], page),
        (["TARGET_KL=0.1"], options), (["TEMPERATURE_END=0.5"], options), (["LOGITS_CLIP=9"], options),
        (["TRAIN_MICRO_BATCH_SIZE=4"], options), (["EPSILON_HIGH=0.3"], options),
        (["LOSS_ALGO=cispo"], options), (["ENTROPY_COEF=0.1"], options), (["SAMPLER_CORRECTION=2"], options),
        (["OVERLONG_BUFFER=4"], page), (["OFF_POLICY_STEPS=1"], page),
    ):  # fmt: skip
        trainer = make_trainer("TOTAL_GENERATION_STEPS=28", *constants)
        used = inspect.getclosurevars(trainer.loss_fn).nonlocals["policy_loss_fn"]
        assert used is expected, constants
    for constants, expected in (
        ([], demo.group_advantage),
        (["NORM_ADV_BY_STD=False"], loss_options.centered_advantage),
        (["ADVANTAGE=rloo"], loss_options.leave_one_out_advantage),
    ):
        c = constants_of(*constants)
        name = loss_options.advantage_name(c.ADVANTAGE, c.NORM_ADV_BY_STD)
        assert function_registry.get_advantage_estimator(name) is expected


@pytest.mark.parametrize("constants", [[], ["EPSILON_HIGH=0.28"]])
def test_a_reference_far_off_at_padding_changes_nothing(constants):
    """exp(500) is infinite, and infinity times a mask of 0 would be NaN."""
    far = np.where(MASK == 1, REFERENCE, 500.0)
    for found, expected in zip(
        our_loss(*constants, ref_per_token_logps=far), our_loss(*constants), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_padding_never_counts():
    """What follows the end of an answer; such a fault cost MaxText's users 0.15 of reward (its PR 4016)."""
    value, figures, gradient = our_loss()
    padding = 9.0 * (MASK == 0)
    for changes in (
        dict(ref_per_token_logps=REFERENCE + padding),
        dict(old_per_token_logps=OLD - padding),
        dict(sampler_log_prob=SAMPLER + padding),
    ):
        again, more_figures, other_gradient = our_loss(**changes)
        np.testing.assert_array_equal(again, value)
        np.testing.assert_array_equal(other_gradient, gradient)
        jax.tree.map(np.testing.assert_array_equal, more_figures, figures)


def test_a_huge_log_ratio_overflows_neither_the_loss_nor_its_gradient():
    value, _, gradient = our_loss(old_per_token_logps=OLD - 200)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("constants", "high"),
    [
        ([], 0.2),
        (["EPSILON_HIGH=0.28"], 0.28),
        (["EPSILON=0.1"], 0.1),
        (["EPSILON=0.1", "EPSILON_HIGH=0.5"], 0.5),
    ],
)
def test_clip_higher_moves_the_upper_end_only(constants, high):
    low = 0.1 if "EPSILON=0.1" in constants else 0.2
    loss, _ = loss_of("BETA=0.0", *constants, ref_per_token_logps=None)
    np.testing.assert_allclose(loss, mean_of_means(clipped_by_hand(low, high)), **CLOSE)


@pytest.mark.parametrize("epsilon", [0.05, 1.0])  # clipped, and not
def test_gspo_has_one_ratio_a_sequence(epsilon):
    loss, aux = loss_of("LOSS_ALGO=gspo-token", f"EPSILON={epsilon}", "BETA=0.0", ref_per_token_logps=None)
    by_hand = clipped_by_hand(epsilon, epsilon, sequence_ratio=True)
    np.testing.assert_allclose(loss, mean_of_means(by_hand), **CLOSE)
    assert (float(mean(aux["pg_clipfrac"])) > 0) == (epsilon == 0.05)


def test_gspo_gradient_is_that_of_the_sequence_ratio():
    """Tunix's token form must have the gradient of eq. 5: finite differences of the sequence's loss."""
    trainer = make_trainer("LOSS_ALGO=gspo-token", "EPSILON=1.0", "BETA=0.0")

    def loss(table):
        inputs = trainer.gen_model_input_fn(example(ref_per_token_logps=None))
        return trainer.loss_fn(Table(table), **inputs)[0]

    gradient = jax.grad(loss)(jnp.asarray(TABLE))
    step = 1e-6
    for row, column in ((2, 4), (4, 5), (5, 1)):
        moved = []
        for sign in (1, -1):
            table = TABLE.astype(float)
            table[row, column] += sign * step
            inputs = np.concatenate([PROMPTS, ANSWERS], axis=1)[:, :-1]
            logits = table[inputs]
            logps = np.take_along_axis(logits, ANSWERS[..., None], -1)[..., 0] - np.log(
                np.exp(logits).sum(-1)
            )
            moved.append(mean_of_means(clipped_by_hand(1.0, 1.0, sequence_ratio=True, logps=logps)))
        np.testing.assert_allclose(gradient[row, column], (moved[0] - moved[1]) / (2 * step), rtol=1e-4)


@pytest.mark.parametrize("old", [OLD, None])
@pytest.mark.parametrize("cap", [1.0, 2.0, 100.0])
def test_sampler_correction_equals_tunixs_on_the_same_numbers(old, cap):
    """Tunix's agentic learner makes the weights outside of its loss, by the formula that stands here."""
    constants = (f"SAMPLER_CORRECTION={cap}", "BETA=0.5")
    trainers = logps_by_hand() if old is None else old
    weights = np.minimum(np.exp(np.clip(trainers - SAMPLER, -20, 20)), cap)
    assert weights[MASK == 1].min() < 0.9 and (cap > 99 or weights[MASK == 1].max() == cap)
    c = constants_of(*constants)
    expected, figures, gradient = tunix_loss(c, old_per_token_logps=old, sampler_is_weights=weights)
    assert figures["sampler_is/weight_min"] < 0.9
    value, _, our_gradient = our_loss(*constants, old_per_token_logps=old)
    np.testing.assert_allclose(value, expected, **CLOSE)
    np.testing.assert_allclose(our_gradient, gradient, **CLOSE)


@pytest.mark.parametrize("old", [OLD, None])
def test_the_mismatch_in_the_log_is_the_distance_of_trainer_and_sampler(old):
    for constants in ([], ["SAMPLER_CORRECTION=2"]):
        _, figures = loss_of(*constants, old_per_token_logps=old)
        distance = np.abs((logps_by_hand() if old is None else old) - SAMPLER)[MASK == 1]
        np.testing.assert_allclose(mean(figures["mismatch"]), distance.mean(), **CLOSE)
        np.testing.assert_allclose(figures["mismatch/max"], distance.max(), **CLOSE)


def test_cispo_weighs_each_tokens_own_gradient():
    """Eq. 4's gradient in closed form: min(ratio, 1 + eps_high) * A * (one-hot - softmax) of each token."""
    ratio = np.exp(logps_by_hand() - OLD)
    weight = np.minimum(ratio, 1.5)
    assert (ratio > 1.5)[MASK == 1].sum() == 1 and (ratio < 0.8)[MASK == 1].sum() == 2  # no lower bound
    constants = ("LOSS_ALGO=cispo", "EPSILON_HIGH=0.5", "BETA=0.0", "LOSS_AGG_MODE=token-mean")
    value, figures, gradient = our_loss(*constants, ref_per_token_logps=None)
    terms = weight * ADVANTAGES[:, None] * MASK / 5
    np.testing.assert_allclose(value, -(terms * logps_by_hand()).sum(), **CLOSE)
    inputs = np.concatenate([PROMPTS, ANSWERS], axis=1)[:, :-1]
    probs = np.exp(TABLE.astype(float))
    probs /= probs.sum(axis=1, keepdims=True)
    expected = np.zeros(TABLE.shape)
    for i, t in zip(*np.nonzero(MASK)):
        expected[inputs[i, t]] -= terms[i, t] * (np.eye(VOCABULARY)[ANSWERS[i, t]] - probs[inputs[i, t]])
    np.testing.assert_allclose(gradient, expected, **CLOSE)
    np.testing.assert_allclose(mean(figures["pg_clipfrac"]), 1 / 5, **CLOSE)


def test_the_entropy_bonus_and_its_gradient():
    """By hand, and the gradient by central differences of float64."""

    def by_hand(table):
        inputs = np.concatenate([PROMPTS, ANSWERS], axis=1)[:, :-1]
        probs = np.exp(table[inputs])
        probs /= probs.sum(axis=-1, keepdims=True)  # [2, 3, V]
        return mean_of_means((probs * np.log(probs)).sum(axis=-1))  # minus the entropy

    plain, _, gradient = our_loss()
    value, _, with_bonus = our_loss("ENTROPY_COEF=0.3")
    np.testing.assert_allclose(value - plain, 0.3 * by_hand(TABLE.astype(float)), **CLOSE)
    step = 1e-5
    for cell in ((2, 4), (3, 5), (4, 0), (5, 1)):
        moved = np.zeros(TABLE.shape)
        moved[cell] = step
        slope = (by_hand(TABLE + moved) - by_hand(TABLE - moved)) / (2 * step)
        np.testing.assert_allclose((with_bonus - gradient)[cell], 0.3 * slope, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("tokens", "points"),
    [(1, 0), (15, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1)],
)
def test_the_soft_length_penalty_by_hand(tokens, points):
    """DAPO's eq. 13 for L_max = 20 and L_cache = 4: it begins after 16 tokens."""
    ids = [[7] * tokens, [7]]
    for penalty in (1.0, 0.5):
        function = loss_options.overlong_penalty(20, 4, penalty)
        assert function(prompts=["", ""], completions=["", ""], completion_ids=ids) == [points * penalty, 0]


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [
        ("kl", lambda d: d),
        ("mse_kl", lambda d: d**2 / 2),
        ("low_var_kl", lambda d: np.exp(-d) - 1 + d),
    ],
)
def test_each_kind_of_kl(mode, by_hand):
    loss, aux = loss_of(f"KL_LOSS_MODE={mode}", "BETA=0.5")
    kl = by_hand(logps_by_hand() - REFERENCE)
    np.testing.assert_allclose(loss, mean_of_means(clipped_by_hand() + 0.5 * kl), **CLOSE)
    np.testing.assert_allclose(mean(aux["kl"]), (kl * MASK).sum() / 5, **CLOSE)


def test_the_traced_weight_and_temperature_give_the_numbers_of_the_constants():
    """TARGET_KL and TEMPERATURE_END feed them with the batch; TEMPERATURE is then not the constant's."""
    by_hand = clipped_by_hand(logps=logps_by_hand(0.7))
    d = logps_by_hand(0.7) - REFERENCE
    expected = mean_of_means(by_hand + 0.3 * (np.exp(-d) - 1 + d))
    constant, _ = loss_of("BETA=0.3", "TEMPERATURE=0.7")
    traced, _ = loss_of(
        "BETA=0.9", "TARGET_KL=0.1", "TEMPERATURE_END=0.5", beta=np.full(2, 0.3), temperature=np.full(2, 0.7)
    )
    np.testing.assert_allclose([constant, traced], expected, **CLOSE)


def test_logits_clip_bounds_the_logits_before_the_softmax():
    loss, _ = loss_of("LOGITS_CLIP=0.4", "BETA=0.0", ref_per_token_logps=None)
    np.testing.assert_allclose(loss, mean_of_means(clipped_by_hand(logps=logps_by_hand(clip=0.4))), **CLOSE)
    assert np.abs(TABLE).max() > 0.4


@pytest.mark.parametrize(("clip", "finite"), [("0.0", False), ("100.0", True)])
def test_logits_clip_prevents_the_nan_of_an_overflowing_logit(clip, finite):
    table = TABLE.copy()
    table[2, 4] = np.inf  # of the token that was chosen: a product beyond the dtype's range
    trainer = make_trainer(f"LOGITS_CLIP={clip}", "BETA=0.0", model=Table(table))
    trainer._train_step(trainer.model, trainer.optimizer, example(ref_per_token_logps=None))
    others = np.delete(np.asarray(trainer.model.table[...]).ravel(), 2 * VOCABULARY + 4)
    assert np.isfinite(others).all() == finite
    assert not finite or not np.array_equal(others, np.delete(TABLE.ravel(), 2 * VOCABULARY + 4))


# --- advantages


def learn(rewards, answers, *constants):
    """What the real learner makes of answers and grades that are given: the `Example` it would train on.

    Args:
        rewards: a list of [B * G] rewards, one for each batch it asks for.
        answers: tokens [B * G, T], of every batch.
    """
    count = len(rewards[0]) // 2  # NUM_GENERATIONS=2 throughout
    constants = (f"TOTAL_GENERATION_STEPS={answers.shape[1]}", *constants, f"BATCH_SIZE={count}")
    c, trainer = constants_of(*constants), make_trainer(*constants)
    asked, logged = [], {}

    def generate(prompts, mode, micro_batch_size, trace_tags):
        asked.append(list(prompts))
        tokens = [row[row != PAD] for row in answers]
        prompt_tokens = np.array([[2 + int(p) % 3] for p in prompts])
        cluster.drawn = SimpleNamespace(
            tokens=tokens, text=list(map(str, tokens)), left_padded_prompt_tokens=prompt_tokens,
            logprobs=[-0.1 * row - len(asked) for row in tokens],
        )  # fmt: skip
        return cluster.drawn

    config = demo.sampling(c)
    spans = SimpleNamespace(span=trainer._perf_tracer.span)
    cluster = SimpleNamespace(
        actor_trainer=trainer, generate=generate, global_steps=0, perf=spans, r2m={},
        perf_v2=SimpleNamespace(span=trainer._perf_tracer_v2.span),
        rollout=SimpleNamespace(pad_id=lambda: PAD, eos_id=lambda: EOS, model=lambda: trainer.model),
        cluster_config=SimpleNamespace(
            training_config=trainer.config, rollout_config=config,
            role_to_mesh={Role.ACTOR: 0, Role.ROLLOUT: 0},
        ),
        get_rollout_config=lambda mode: config,
        set_temperature=lambda temperature: None,
        used_columns=lambda completions: completions.shape[1],
        buffer_metrics=lambda metrics, mode: [
            logged.setdefault(name, []).append(value) for name, (value, _) in metrics.items()
        ],
    )  # fmt: skip
    rows = [
        dict(prompts=str(i), question="", answer="0", data_source="gsm8k", extra_info="", source="", line="0",
             weight="1")
        for i in range(10 * count)
    ]  # fmt: skip
    learner = demo.make_learner(c, cluster, GRADER, rows)
    learner._rollout_micro_batch_size = learner._compute_logps_micro_batch_size = count
    learner.reward_manager = Graded(rewards)
    learner.metric_fns = []
    first = {name: np.repeat([row[name] for row in rows[:count]], c.NUM_GENERATIONS) for name in rows[0]}
    made = learner._generate_and_compute_advantage(first, Mode.TRAIN)
    return made, asked, logged | {"told": learner.reward_manager.told}


class Graded:
    """A reward manager of Tunix's that gives prepared rewards, one list for each call."""

    reward_fns = ()

    def __init__(self, rewards):
        self.rewards = iter(rewards)

    def __call__(self, **columns):
        self.told = columns
        return {"rewards": np.array(next(self.rewards), float), "log_metrics": {}}


FULL = np.tile([4, 5, EOS], (4, 1))
TWO = ("NUM_GENERATIONS=2", "BETA=0.0")


@pytest.mark.parametrize(
    ("longest", "columns"), [(1, 7), (7, 7), (8, 14), (15, 24), (24, 24), (25, 28), (28, 28)]
)
def test_columns_that_no_answer_uses_are_not_computed(longest, columns):
    completions = np.full((3, 28), PAD)
    completions[1, :longest] = 5
    cluster = object.__new__(loss_options.Cluster)
    cluster._rollout = SimpleNamespace(pad_id=lambda: PAD)
    for shares, expected in ((True, columns), (False, 28)):
        cluster._shares_prompts = shares
        assert cluster.used_columns(jnp.asarray(completions)) == expected


def test_a_batch_is_cut_in_all_that_has_a_value_per_token():
    whole = example()
    assert {name for name, x in vars(whole).items() if x is not None and x.shape == ANSWERS.shape} == set(
        loss_options.PER_TOKEN
    )
    cut = whole.cut(2)
    for name in loss_options.PER_TOKEN:
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name)[:, :2])
    np.testing.assert_array_equal(cut.prompt_ids, whole.prompt_ids)
    assert example(ref_per_token_logps=None).cut(2).ref_per_token_logps is None


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        # groups (1, 4) and (2, 2): mean 2.5 and std (of a sample, as Tunix takes it) sqrt(4.5)
        ([], [-1.5 / 4.5**0.5, 1.5 / 4.5**0.5, 0, 0]),
        (["NORM_ADV_BY_STD=False"], [-1.5, 1.5, 0, 0]),
        (["ADVANTAGE=rloo"], [1 - 4, 4 - 1, 0, 0]),
        (["NORM_ADV_BY_STD=False", "ADVANTAGE_CLIP=0.5"], [-0.5, 0.5, 0, 0]),
    ],
)
def test_each_advantage_by_hand(constants, expected):
    made, *_ = learn([[1, 4, 2, 2]], FULL, *TWO, *constants)
    np.testing.assert_allclose(made.advantages, expected, atol=1e-5)  # Tunix adds 1e-6 to the std
    assert np.asarray(made.completion_mask).all()


def test_the_samplers_log_probs_travel_with_their_answers():
    """Through a refill, too: the second group of the first batch, then the first of the third."""
    answers = np.array([[4, 5, EOS], [4, EOS, PAD], [5, 5, 5], [EOS, PAD, PAD]])
    rewards = [[2, 2, 1, 4], [3, 3, 0, 0], [0, 6, 5, 5]]
    made, *_ = learn(rewards, answers, *TWO, "ZERO_VARIANCE_GROUPS=refill")
    expected = -0.1 * answers - np.array([1, 1, 1, 1])[:, None]
    expected[:2] -= 2  # drawn by the third call
    kept = np.where(answers == PAD, 0, expected)[[2, 3, 0, 1]]
    np.testing.assert_allclose(made.sampler_log_prob, kept, rtol=1e-6)


def test_the_length_penalty_is_a_reward_like_the_others():
    """Its points are in the sum; what the other functions are told is as it was."""
    c = constants_of("OVERLONG_BUFFER=2", "TOTAL_GENERATION_STEPS=4", "OVERLONG_PENALTY=0.5")
    functions = demo.reward_functions(c, GRADER)
    assert functions[:-1] == GRADER.functions and functions[-1].__name__ == "overlong"
    assert demo.reward_functions(constants_of(), GRADER) == GRADER.functions
    points = functions[-1](
        prompts=[""] * 3, completions=[""] * 3, completion_ids=[[1] * n for n in (2, 3, 4)]
    )
    assert points == [0, -0.25, -0.5]
    answers = np.array([[4, 5, EOS], [4, EOS, PAD], [5, 5, 5], [EOS, PAD, PAD]])
    *_, logged = learn([[1, 4, 2, 3]], answers, *TWO)
    assert [len(ids) for ids in logged["told"]["completion_ids"]] == [3, 2, 3, 1]  # tokens, not letters


def test_overlong_answers_are_masked_and_only_those():
    answers = np.array([[4, 5, EOS], [4, 5, 4], [4, EOS, PAD], [5, 5, 5]])
    made, *_ = learn([[1, 4, 2, 3]], answers, *TWO, "MASK_OVERLONG=True")
    assert np.asarray(made.completion_mask).tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert np.asarray(made.advantages).all()  # they still belong to their group's mean
    kept, *_ = learn([[1, 4, 2, 3]], answers, *TWO)
    assert np.asarray(kept.completion_mask).sum() == 3 + 3 + 2 + 3


def test_zero_variance_groups_are_skipped():
    made, asked, _ = learn([[2, 2, 1, 4]], FULL, *TWO, "ZERO_VARIANCE_GROUPS=skip")
    assert np.asarray(made.completion_mask).all(axis=1).tolist() == [False, False, True, True]
    assert len(asked) == 1
    kept, *_ = learn([[2, 2, 1, 4]], FULL, *TWO)
    assert np.asarray(kept.completion_mask).all()


def test_zero_variance_groups_are_refilled_with_other_questions():
    rewards = [[2, 2, 1, 4], [3, 3, 0, 0], [0, 6, 5, 5]]
    made, asked, _ = learn(rewards, FULL, *TWO, "ZERO_VARIANCE_GROUPS=refill", "NORM_ADV_BY_STD=False")
    assert len(asked) == 3 and np.asarray(made.completion_mask).all()
    # the second group of the first batch, then the first group of the third
    np.testing.assert_allclose(made.advantages, [-1.5, 1.5, -3, 3])
    prompts = [asked[0][2], asked[0][3], asked[2][0], asked[2][1]]
    assert [row[0] for row in np.asarray(made.prompt_ids)] == [2 + int(p) % 3 for p in prompts]
    assert asked[1] != asked[2] and len(asked[1]) == 4 and asked[1][0] == asked[1][1]


def test_refilling_ends_and_skips_what_is_left(monkeypatch):
    monkeypatch.setattr(loss_options, "MAX_REFILLS", 2)
    rewards = [[2, 2, 1, 4], [3, 3, 0, 0], [5, 5, 5, 5]]
    made, asked, _ = learn(rewards, FULL, *TWO, "ZERO_VARIANCE_GROUPS=refill")
    assert len(asked) == 3
    assert np.asarray(made.completion_mask).all(axis=1).tolist() == [True, True, False, False]


def test_refilling_costs_nothing_where_all_groups_have_a_signal():
    _, asked, _ = learn([[2, 1, 1, 4]], FULL, *TWO, "ZERO_VARIANCE_GROUPS=refill")
    assert len(asked) == 1


# --- gradient accumulation


@pytest.mark.parametrize("mode", loss_options.TOKEN_WEIGHTS)
def test_accumulated_micro_batches_equal_the_full_batch(mode):
    """Weights after one update by Tunix's trainer: whole, and in 4 parts of 2 answers of unequal lengths.

    Two answers are masked as a whole, so that the parts also differ in how many answers count.
    """
    rng = np.random.default_rng(1)
    B, T = 8, 5
    answers = rng.integers(2, VOCABULARY, (B, T))
    for row, length in enumerate([1, 5, 2, 4, 3, 5, 2, 1]):
        answers[row, length:] = PAD
    mask = answers != PAD
    mask[[1, 2]] = False
    fields = dict(
        prompt_ids=rng.integers(2, VOCABULARY, (B, 2)), prompt_mask=np.ones((B, 2), bool),
        completion_ids=answers, completion_mask=mask, advantages=rng.normal(size=B),
        ref_per_token_logps=rng.normal(size=(B, T)), old_per_token_logps=rng.normal(size=(B, T)),
        sampler_log_prob=rng.normal(size=(B, T)),
    )  # fmt: skip
    tables = []
    for size, parts in ((0, 1), (1, 4)):
        trainer = make_trainer(
            f"LOSS_AGG_MODE={mode}", "NUM_GENERATIONS=2", "BATCH_SIZE=4", f"TRAIN_MICRO_BATCH_SIZE={size}"
        )
        step = nnx.jit(trainer._train_step)
        if parts > 1:
            counted = mask.sum() if mode == "token-mean" else 6
            fields["denominator"] = np.full(B, counted / parts, np.float32)
        for part in np.split(np.arange(B), parts):
            step(trainer.model, trainer.optimizer, example(**{k: v[part] for k, v in fields.items()}))
        tables.append(np.asarray(trainer.model.table[...]))
    assert not np.allclose(tables[0], TABLE, atol=1e-3)
    np.testing.assert_allclose(
        tables[0], tables[1], rtol=0, atol=5e-7
    )  # float32: a few roundings of a weight


def test_what_the_log_says_of_an_update_does_not_depend_on_its_gradient_passes():
    """Two answers of 3 and 2 tokens: the mean over 5 tokens, in one pass or in two, also with one masked."""
    one, two = np.array([[1, 1, 1], [0, 0, 0]]) != 0, np.array([[0, 0, 0], [1, 1, 0]]) != 0
    _, whole = loss_of(completion_mask=one | two)
    parts = [loss_of(completion_mask=mask)[1] for mask in (one, two)]
    nothing = loss_of(completion_mask=one & two)[1]
    for name in ("kl", "entropy", "mismatch", "pg_clipfrac"):
        combine = loss_options.LOGGED[name]
        expected = combine([whole[name]])
        np.testing.assert_allclose(combine([part[name] for part in parts]), expected, **CLOSE)
        np.testing.assert_allclose(combine([whole[name], nothing[name]]), expected, **CLOSE)
        assert np.isnan(combine([nothing[name]]))
    assert not np.isclose(np.mean([mean(part["kl"]) for part in parts]), mean(whole["kl"]), rtol=0.01)
    largest = [float(part["mismatch/max"]) for part in parts]
    assert loss_options.LOGGED["mismatch/max"](largest) == float(whole["mismatch/max"]) > min(largest)


def test_the_learner_hands_the_whole_batchs_denominator_to_each_part():
    answers = np.array([[4, 5, EOS], [4, EOS, PAD], [EOS, PAD, PAD], [5, 5, 5]])
    constants = ("TRAIN_MICRO_BATCH_SIZE=1", "MASK_OVERLONG=True")
    tokens, *_ = learn([[1, 4, 2, 3]], answers, *TWO, *constants, "LOSS_AGG_MODE=token-mean")
    assert np.asarray(tokens.denominator).tolist() == [6 / 2] * 4
    rows, *_ = learn([[1, 4, 2, 3]], answers, *TWO, *constants)
    assert np.asarray(rows.denominator).tolist() == [3 / 2] * 4


# --- schedules


def test_the_kl_controller_by_hand():
    """Ziegler et al. 2019, section 2.2, with KL target 0.1: errors clipped to 0.2, -0.2, and 0.1 as it is."""
    beta = loss_options.adaptive_beta(0.5, 0.1, [0.5, 0.001, 0.11, float("nan")])
    np.testing.assert_allclose(beta, 0.5 * 1.02 * 0.98 * 1.01, rtol=1e-12)
    assert loss_options.adaptive_beta(0.5, 0.1, []) == 0.5
    assert loss_options.adaptive_beta(0.5, 0.1, [0.1] * 9) == 0.5  # on target: it stays


def test_the_schedule_uses_the_log_up_to_the_step_before_the_last():
    """The last step's KL is known a step late; a resumed run must not use more than a whole one did."""
    c = constants_of("BETA=0.5", "TARGET_KL=0.1", "TEMPERATURE=1.0", "TEMPERATURE_END=0.5", "NUM_BATCHES=11")
    log = {1: dict(kl=9.0), 2: dict(kl=0.0), 3: dict(kl=9.0)}
    weights, temperatures = zip(*(demo.schedule(c, step, log) for step in range(4)))
    np.testing.assert_allclose(weights, [0.5, 0.5, 0.51, 0.51 * 0.98], rtol=1e-12)
    np.testing.assert_allclose(temperatures, [1.0, 0.95, 0.9, 0.85], rtol=1e-12)
    assert (
        demo.schedule(c, 10, log | {n: dict(kl=0.1) for n in range(4, 11)})[1] == 0.5
    )  # the last of 11 steps
    lost = {
        1: log[1],
        3: log[3],
        4: {"reward": 1.0},
    }  # SIGKILL took the second row; the fourth is not done yet
    np.testing.assert_allclose(demo.schedule(c, 4, lost)[0], 0.51 * 1.02, rtol=1e-12)
    assert demo.schedule(constants_of("BETA=0.5"), 7, {}) == (0.5, 1.0)


def test_schedules_reach_the_batch_and_the_log():
    constants = ("NUM_GENERATIONS=2", "TEMPERATURE=0.8", "TEMPERATURE_END=0.4")
    made, _, logged = learn([[1, 4, 2, 2]], FULL, *TWO, *constants)
    np.testing.assert_allclose(made.temperature, [0.8] * 4, rtol=1e-6)
    assert logged["schedule/temperature"] == [0.8] and logged["schedule/beta"] == [0.0]
    constant, _, logged = learn([[1, 4, 2, 2]], FULL, *TWO)
    assert logged["schedule/temperature"] == [1.0] and constant.temperature is None


# --- guards


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["LOSS_ALGO=gspo"], ["LOSS_ALGO=gspo:", "grpo, gspo-token"]),
        (["LOSS_AGG_MODE=mean"], ["LOSS_AGG_MODE=mean:", "token-mean", "seq-mean-token-sum-norm"]),
        (["ADVANTAGE=gae"], ["ADVANTAGE=gae:", "group, rloo"]),
        (["KL_LOSS_MODE=k3"], ["KL_LOSS_MODE=k3:", "low_var_kl"]),
        (["ZERO_VARIANCE_GROUPS=drop"], ["ZERO_VARIANCE_GROUPS=drop:", "keep, skip, refill"]),
        (["EPSILON_HIGH=-0.1"], ["EPSILON_HIGH=-0.1:", "0 or more"]),
        (["EPSILON_HIGH=0.1"], ["EPSILON_HIGH=0.1:", "EPSILON=0.2"]),
        (["ADVANTAGE_CLIP=-1"], ["ADVANTAGE_CLIP=-1.0:"]),
        (["LOGITS_CLIP=-1"], ["LOGITS_CLIP=-1.0:"]),
        (["TEMPERATURE_END=-1"], ["TEMPERATURE_END=-1.0:"]),
        (["MAX_NONFINITE_UPDATES=-1"], ["MAX_NONFINITE_UPDATES=-1:"]),
        (["TARGET_KL=0.1", "BETA=0.0"], ["TARGET_KL=0.1:", "BETA"]),
        (["REFERENCE_OFFLOAD=True", "BETA=0.0"], ["REFERENCE_OFFLOAD=True:", "BETA"]),
        (["TEMPERATURE=2.1", "ROLLOUT_ENGINE=vllm", "SCAN_LAYERS=True"], ["TEMPERATURE=2.1,", "at most 2;"]),
        (
            ["TEMPERATURE_END=3", "ROLLOUT_ENGINE=vllm", "SCAN_LAYERS=True"],
            ["TEMPERATURE_END=3.0:", "maxtext"],
        ),
        (["SAMPLER_CORRECTION=-1"], ["SAMPLER_CORRECTION=-1.0:", "0 or more"]),
        (["ENTROPY_COEF=-0.1"], ["ENTROPY_COEF=-0.1:"]),
        (["OVERLONG_PENALTY=-1"], ["OVERLONG_PENALTY=-1.0:"]),
        (["OVERLONG_BUFFER=-1"], ["OVERLONG_BUFFER=-1:"]),
        (["OVERLONG_BUFFER=29"], ["OVERLONG_BUFFER=29:", "TOTAL_GENERATION_STEPS=28"]),
        (["OFF_POLICY_STEPS=2"], ["OFF_POLICY_STEPS=2:", "0 or 1"]),
        (["OFF_POLICY_STEPS=1", "ZERO_VARIANCE_GROUPS=refill"], ["OFF_POLICY_STEPS=1:", "refill"]),
        (["OFF_POLICY_STEPS=1", "TEMPERATURE_END=0.5"], ["OFF_POLICY_STEPS=1:", "TEMPERATURE_END=0.5"]),
    ],
)
def test_a_bad_option_is_named_with_its_remedy(arguments, words):
    with pytest.raises(settings.UserError) as error:
        constants_of(*arguments)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("limit", "length"), [("0.5", 0.5), ("0.0", 3.0)])
def test_max_grad_norm_bounds_the_gradient_or_is_off(limit, length, monkeypatch):
    """AdamW would hide the gradient's length: it is replaced by plain descent."""
    monkeypatch.setattr(optax, "adamw", lambda *_, **__: optax.sgd(1.0))
    optimizer = demo.make_optimizer(constants_of(f"MAX_GRAD_NORM={limit}"))
    weights = jnp.zeros(2)
    update, _ = optimizer.update(jnp.array([3.0, 0.0]), optimizer.init(weights), weights)
    np.testing.assert_allclose(np.abs(update), [length, 0.0], rtol=1e-6)


def test_a_nan_update_changes_no_weight_and_stops_the_run_only_beyond_the_limit(tmp_path):
    for limit in (0, 2):
        c = constants_of(f"MAX_NONFINITE_UPDATES={limit}", "NUM_BATCHES=9")
        optimizer = demo.make_optimizer(c)
        weights = jnp.ones(2)
        update, _ = optimizer.update(jnp.array([np.nan, 1.0]), optimizer.init(weights), weights)
        assert np.asarray(update).tolist() == [0.0, 0.0]
        history = SimpleNamespace(get_metric_history=lambda *_: [float("nan")])
        log = run_log.TrainingLog(tmp_path / f"{limit}.csv", c, 0, [], lambda rows, constants: {})
        steps = iter(range(1, 9))
        for _ in range(limit):
            log.on_train_step_end(SimpleNamespace(metrics_logger=history), next(steps), float("nan"))
        with pytest.raises(settings.UserError, match=r"MAX_NONFINITE_UPDATES"):
            log.on_train_step_end(SimpleNamespace(metrics_logger=history), next(steps), float("nan"))
        log.close()


# --- the real cluster: memory, and the same temperature everywhere


def make_cluster(tmp_path, *constants):
    c = constants_of(*constants, "BATCH_SIZE=2", "NUM_GENERATIONS=2")
    folder, hf = llama.load_hf_config("tiny_llama")
    return c, demo.make_cluster(c, folder, hf, llama.load_tokenizer(folder), str(tmp_path / "checkpoints"))


def weights_in_memory(kind):
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == kind)


def test_without_kl_there_is_no_reference_and_offloaded_it_is_not_on_the_device(tmp_path):
    used = {}
    for constants in (("BETA=0.0",), ("BETA=0.1",), ("BETA=0.1", "REFERENCE_OFFLOAD=True")):
        before = np.array([weights_in_memory(kind) for kind in ("device", "pinned_host")])
        _, cluster = make_cluster(tmp_path, *constants)
        used[constants] = np.array([weights_in_memory(kind) for kind in ("device", "pinned_host")]) - before
        params = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param))
        weights = sum(x.nbytes for x in params)
        cluster.actor_trainer.checkpoint_manager.close()
        del cluster, params
    none, kept, offloaded = used.values()
    slack = 1_000  # random-number state of a model: some keys and counters
    np.testing.assert_allclose(kept - none, [weights, 0], atol=slack)
    np.testing.assert_allclose(offloaded - none, [0, weights], atol=slack)


def test_answers_ratio_and_reference_have_the_schedules_temperature(tmp_path):
    """Old, new and frozen log-probs agree while the weights do; a new temperature compiles nothing."""
    c, cluster = make_cluster(tmp_path, "NUM_ITERATIONS=2", "TEMPERATURE_END=0.5", "REFERENCE_OFFLOAD=True")
    learner = demo.make_learner(c, cluster, GRADER)
    prompts = np.repeat([row["prompts"] for row in short_questions(c, cluster, tmp_path, 2)], 2)
    columns = dict(
        answer=np.repeat("1", 4), question=prompts, line=prompts,
        data_source=np.repeat("gsm8k", 4), extra_info=np.repeat("", 4),
    )  # fmt: skip
    learner._rollout_micro_batch_size = learner._compute_logps_micro_batch_size = 2
    batches = []
    for temperature in (1.0, 0.25):
        learner._schedule = lambda step, t=temperature: (c.BETA, t)
        batches.append(learner._generate_and_compute_advantage(columns | dict(prompts=prompts)))
    assert cluster.rollout._generate._cache_size() == 1
    config, loss_fn, likelihoods = learner.algo_config, cluster.actor_trainer.loss_fn, []
    step = nnx.jit(lambda model, batch: loss_fn(model, batch, config))
    for batch in batches:
        mask = np.asarray(batch.completion_mask)
        old = batch.old_per_token_logps * mask
        # The same numbers from different programs: rounding of float32 log-probs of size 10
        np.testing.assert_allclose(old, batch.ref_per_token_logps * mask, rtol=0, atol=1e-4)
        with cluster._get_mesh_and_logical_axis_rules_cm(Role.ACTOR):
            _, aux = step(cluster.actor_trainer.model, batch)
        np.testing.assert_allclose([aux["is_ratio/max"], aux["is_ratio/min"]], 1, atol=1e-4)
        likelihoods.append(old.sum())
    assert likelihoods[1] > likelihoods[0]  # cold answers are likely ones under the cold policy


def test_off_policy_answers_are_those_of_the_weights_one_step_ago(tmp_path):
    """Each batch's sampler log-probs, against the log-probs under the weights of every step."""
    constants = ("OFF_POLICY_STEPS=1", "NUM_BATCHES=4", "LEARNING_RATE=1e-2", "WARMUP_FRACTION=0")
    c, cluster = make_cluster(tmp_path, *constants)
    rows = short_questions(c, cluster, tmp_path, 8)
    weights, batches = [], []

    def on_batch(step, batch, graded, beta):
        weights.append(jax.tree.map(np.array, nnx.state(cluster.actor_trainer.model, nnx.Param)))
        batches.append(batch)
        assert graded["question"].tolist() == np.repeat(asked[step]["question"], 2).tolist()
        prompts = [row[row != cluster.rollout.pad_id()].tolist() for row in np.asarray(batch.prompt_ids)]
        assert prompts == [cluster.tokenizer.encode(text) for text in np.repeat(asked[step]["prompts"], 2)]

    asked = list(demo.training_batches(c, rows, 0))
    learner = demo.make_learner(c, cluster, GRADER, rows, {}, on_batch)
    cluster.next_prompts = functools.partial(demo.prompts_of, c, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log.TrainingLog, "__init__", lambda *_: None)
        learner.train(iter(asked))
    assert len(batches) == 4
    distance = np.zeros((4, 4))  # [batch, weights]
    for i, batch in enumerate(batches):
        for j, state in enumerate(weights):
            nnx.update(cluster.actor_trainer.model, state)
            log_prob = cluster.get_old_per_token_logps(batch.prompt_ids, batch.completion_ids)
            mask = np.asarray(batch.completion_mask)
            distance[i, j] = np.abs((log_prob - batch.sampler_log_prob) * mask).max()
    drawn_by = distance.argmin(axis=1)
    assert drawn_by.tolist() == [0, 0, 1, 2]
    # cached decoding and the full pass sum float32 in another order, of log-probs of size 10
    assert distance.min(axis=1).max() < 1e-4 and distance[2, 2] > 1e-2


def short_questions(c, cluster, tmp_path, count):
    rows, source = demo.read_data(c)["test"]
    tokenizer = cluster.tokenizer._tokenizer
    return demo.make_prompts(c, rows, source, tokenizer, False, tmp_path / "too_long.csv")[:count]
