"""The update and the loop: against Tunix's own learner, NumPy, and themselves in other gradient
passes.

Most of it trains a table of logits on answers that are given (table_policy.py), in Tunix's real
cluster. What needs a language model takes the tiny Llama.
"""

import functools
import gc
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# isort: skip
from table_policy import CLOSE, EOS, PAD, TABLE, VOCABULARY, Scripted, Tokenizer, constants_of

from table_policy import log_probs_by_hand, questions, train, train_llm, two_tables  # isort: skip
from short_runs import saved_steps
from test_load_llama import LOG_PROB
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role

import grpo_llama3_1_8b_demo as demo
import reward_func
import settings
from model import llama
from model.llm import load_llm
from model.rollout import sampling_config
from run import start
from run.run_files import read_log
from run.training import TrainingRun
from schedules import adaptive_beta
from task import prompts, run_grader
from task.questions import mixed_batches, read_data

QUICK = ("EVAL_EVERY=0", "LOG_ANSWERS_EVERY=0", "WARMUP_FRACTION=0.0", "NUM_ITERATIONS=1")
TWO = ("BATCH_SIZE=2", "NUM_GENERATIONS=2", "NUM_BATCHES=1", "LEARNING_RATE=0.1", *QUICK)


def random_answers(seed, count, limit=3):
    """Answers [count, limit] of one token or more; some have no end."""
    random = np.random.default_rng(seed)
    answers = random.integers(2, VOCABULARY, (count, limit))
    for row, length in zip(answers, random.integers(1, limit + 2, count), strict=True):
        row[length - 1 : length] = EOS
        row[length:] = PAD
    return answers


def points(ids):
    return sum(ids) % 5


@pytest.fixture
def fed(monkeypatch):
    """Each `update`'s batch as NumPy arrays, its temperature, and the table after it."""
    calls, update = [], demo.update

    def recorded(params, opt_state, model, batch, *more):
        before = jax.tree.map(np.asarray, batch), model.temperature
        after = update(params, opt_state, model, batch, *more)
        calls.append((*before, np.asarray(after[0]["table"])))
        return after

    monkeypatch.setattr(demo, "update", recorded)
    return calls


# --- against Tunix's own learner


def tunix_learner(c, answers, **config):
    """Tunix's GRPOLearner on the same answers: its table, and the history of its metrics."""
    mesh, actor, reference = two_tables()
    roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)
    training = RLTrainingConfig(
        actor_optimizer=demo.make_optimizer(c),
        max_steps=c.NUM_BATCHES * c.NUM_ITERATIONS,
        mini_batch_size=c.BATCH_SIZE,
        train_micro_batch_size=c.TRAIN_MICRO_BATCH_SIZE or None,
        eval_every_n_steps=1_000,
    )
    cluster = RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            role_to_logical_axis_rule=dict.fromkeys(roles, ()),
            rollout_engine=functools.partial(Scripted, answers=answers),
            rollout_config=sampling_config(c),
            training_config=training,
        ),
    )

    def reward(prompts, completions, **columns):
        return [float(points(map(int, text.split()))) for text in completions]

    names = dict(num_generations=c.NUM_GENERATIONS, num_iterations=c.NUM_ITERATIONS, beta=c.BETA)
    config = GRPOConfig(**names, epsilon=c.EPSILON, kl_loss_mode="low_var_kl", **config)
    rows = questions(10 * c.BATCH_SIZE)  # as `train` has them
    learner = GRPOLearner(cluster, config, [reward])
    learner.train(
        iter([dict(batch) for batch in mixed_batches(rows, c.SEED, c.BATCH_SIZE)[: c.NUM_BATCHES]])
    )
    logger = cluster.actor_trainer.metrics_logger
    names = ("loss", "kl", "grad_norm")
    history = {name: logger.get_metric_history("actor", name, "train") for name in names}
    return np.asarray(cluster.actor_trainer.model.table[...]), history


@pytest.mark.parametrize(
    ("constants", "config"),
    [
        ([], {}),
        (["LOSS_AGG_MODE=token-mean", "NUM_ITERATIONS=2"], dict(loss_agg_mode="token-mean")),
        (
            ["LOSS_AGG_MODE=seq-mean-token-sum-norm", "ADVANTAGE=centered"],  # Dr. GRPO
            dict(loss_agg_mode="sequence-mean-token-scale", advantage_estimator="drgrpo"),
        ),
        (
            ["ADVANTAGE=rloo", "LOSS_ALGO=gspo-token", "NUM_ITERATIONS=2"],
            dict(advantage_estimator="rloo", loss_algo="gspo-token"),
        ),
        (["TRAIN_MICRO_BATCH_SIZE=1"], {}),
    ],
)
def test_our_loop_trains_as_tunixs_own_learner(constants, config, tmp_path):
    """Independently written, with the same answers and optimizer: weights, loss, norm, KL."""
    c = constants_of(*TWO, "NUM_GENERATIONS=4", "NUM_BATCHES=3", *constants)
    answers = [random_answers(seed, 8) for seed in range(3)]
    # Tunix generates in them, too
    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    split = [part for batch in answers for part in np.split(batch, passes)]
    table, history = tunix_learner(c, split, **config)
    llm, log = train(c, answers, points, tmp_path)
    ours = np.asarray(llm.params["table"])
    assert np.abs(ours - TABLE).max() > 0.1
    # float32 sums in another order, three steps
    np.testing.assert_allclose(ours, table, rtol=0, atol=2e-6)
    last = slice(c.NUM_ITERATIONS - 1, None, c.NUM_ITERATIONS)  # of a step's updates
    for name in ("loss", "kl", "grad_norm"):
        if c.TRAIN_MICRO_BATCH_SIZE and name != "loss":
            continue  # Tunix's are means of the passes' metrics
        np.testing.assert_allclose(
            [row[name] for row in log], history[name][last], err_msg=name, **CLOSE
        )
    assert history["grad_norm"].min() > 0.1 and history["kl"].max() > 1e-3


# --- gradient passes


FOUR = ("BATCH_SIZE=4", "NUM_GENERATIONS=2", "TOTAL_GENERATION_STEPS=5", "LEARNING_RATE=0.1")


def test_gradient_passes_are_one_pass(tmp_path):
    """The log and the weights after two steps; with one question a pass, one pass has no token to
    train.
    """
    answers = [random_answers(seed, 8, 5) for seed in range(2)]
    answers[0][2:4] = 2  # both answers to a question are cut off
    runs = []
    for size in (0, 2, 1):
        c = constants_of(
            *FOUR,
            *QUICK,
            "NUM_ITERATIONS=2",
            "NUM_BATCHES=2",
            "MASK_OVERLONG=True",
            "SAMPLER_CORRECTION=2.0",
            f"TRAIN_MICRO_BATCH_SIZE={size}",
        )
        llm, log = train(c, answers, points, tmp_path / str(size))
        runs.append((np.asarray(llm.params["table"]), log))
    (table, log), *others = runs
    assert np.abs(table - TABLE).max() > 0.1
    for other, rows in others:
        np.testing.assert_allclose(other, table, rtol=0, atol=1e-6)  # a few roundings of float32
        for row, whole in zip(rows, log, strict=True):
            for name in row.keys() - {"seconds", "tokens_per_second", "memory_host_gib"}:
                np.testing.assert_allclose(
                    row[name], whole[name], rtol=2e-6, atol=1e-6, err_msg=name
                )


# --- an update that is not finite


def test_a_run_goes_on_after_updates_that_were_not_finite_and_stops_beyond_the_limit(tmp_path):
    """A reward that is NaN poisons one gradient pass of the first step, and of the second."""
    arguments = (
        *FOUR,
        *QUICK,
        "NUM_BATCHES=4",
        "SAVE_INTERVAL_STEPS=4",
        "TRAIN_MICRO_BATCH_SIZE=1",
    )
    answers = [random_answers(seed, 8, 5) for seed in range(4)]
    answers[0][0] = answers[1][0] = 2

    def poisoned(ids):
        return np.nan if ids == [2] * 5 else points(ids)

    c = constants_of(*arguments, "MAX_NONFINITE_UPDATES=2")
    llm, log = train(c, answers, poisoned, tmp_path / "goes_on")
    for name in ("loss", "grad_norm"):
        assert [np.isfinite(row[name]) for row in log] == [False, False, True, True]
    table = np.asarray(llm.params["table"])
    assert np.isfinite(table).all() and np.abs(table - TABLE).max() > 0.1
    with pytest.raises(settings.UserError, match=r"of step 2 is nan.*MAX_NONFINITE_UPDATES=1"):
        train(
            constants_of(*arguments, "MAX_NONFINITE_UPDATES=1"),
            answers,
            poisoned,
            tmp_path / "stops",
        )


@pytest.mark.parametrize(
    ("constants", "odd", "kept"),
    [  # what the fifth step's first answer earns: neither is a reason to lose the fourth step
        ((), settings.UserError("the reward is out of order"), [4]),
        (("ADVANTAGE=maxrl",), -1.0, [4]),
        ((), np.nan, []),  # its update has overwritten the weights
    ],
)
def test_a_step_that_cannot_be_trained_costs_none_of_those_before(constants, odd, kept, tmp_path):
    c = constants_of(*TWO, "NUM_BATCHES=6", "SAVE_INTERVAL_STEPS=6", *constants)
    answers = [random_answers(seed, 4) for seed in range(1, 7)]
    answers[4][0] = 2

    def fifth_is_odd(ids):
        if ids != [2] * 3:
            return points(ids)
        if isinstance(odd, Exception):
            raise odd
        return odd

    with pytest.raises(settings.UserError):
        train(c, answers, fifth_is_odd, tmp_path)
    assert saved_steps(tmp_path) == kept
    if kept:
        assert len(read_log(tmp_path / "train_log.csv")) == 4


@pytest.mark.parametrize("step", [1, 2, 3])
def test_ctrl_c_in_any_step_ends_the_run_with_a_checkpoint_of_it(step, tmp_path):
    """Also in the last, where the test questions would come next."""
    c = constants_of(*TWO, "NUM_BATCHES=3", "SAVE_INTERVAL_STEPS=3")
    answers = [random_answers(seed, 4) for seed in range(1, 4)]
    answers[step - 1][0] = 2

    def stopping(ids):
        if ids == [2] * 3:
            signal.raise_signal(signal.SIGINT)
        return points(ids)

    with pytest.raises(KeyboardInterrupt):
        train(c, answers, stopping, tmp_path)
    assert saved_steps(tmp_path) == [step]


def test_the_guard_counts_updates_in_a_row():
    run = TrainingRun(constants_of("MAX_NONFINITE_UPDATES=2"), None, None, None, None)
    nan, inf = float("nan"), float("inf")
    for loss, norm in ((nan, 1.0), (1.0, inf), (1.0, 1.0), (nan, nan), (inf, 1.0)):
        run.check_finite(4, {"loss": loss, "grad_norm": norm})
    with pytest.raises(
        settings.UserError, match=r"the gradient norm of step 6 is inf; .*LEARNING_RATE="
    ):
        run.check_finite(5, {"loss": 1.0, "grad_norm": inf})


@pytest.mark.parametrize(("limit", "length"), [("0.5", 0.5), ("0.0", 3.0)])
def test_max_grad_norm_bounds_the_gradient_or_is_off(limit, length):
    """AdamW hides the gradient's length in its step, but not in its mean, (1 - B1) times it."""
    c = constants_of(f"MAX_GRAD_NORM={limit}")
    optimizer, weights = demo.make_optimizer(c), jnp.zeros(2)
    _, state = optimizer.update(jnp.array([3.0, 0.0]), optimizer.init(weights), weights)
    gradient = optax.tree.get(state, "mu") / (1 - c.B1)
    np.testing.assert_allclose(gradient, [length, 0.0], rtol=1e-6)


# --- what the loop makes of its constants


def test_advantages_reach_the_update_and_are_clipped(fed, tmp_path):
    # rewards 3, 6, 10, 10
    answers = [np.array([[2, EOS, PAD], [5, EOS, PAD], [4, 5, EOS], [4, 5, EOS]])]
    c = constants_of(*TWO, "ADVANTAGE=centered", "ADVANTAGE_CLIP=0.5")
    train(c, answers, sum, tmp_path)
    [(batch, *_)] = fed
    assert batch.advantage[0, :, 0].tolist() == [-0.5, 0.5, 0, 0]
    assert batch.mask[0].tolist() == (answers[0] != PAD).tolist()


def test_the_length_penalty_counts_tokens_and_is_in_the_sum(tmp_path):
    answers = [np.array([[4, 5, EOS], [4, EOS, PAD], [5, 5, 5], [EOS, PAD, PAD]])]
    c = constants_of(*TWO, "OVERLONG_BUFFER=2", "OVERLONG_PENALTY=0.5")
    _, [row] = train(c, answers, len, tmp_path)
    assert row["reward_overlong"] == np.mean([-0.5, -0.25, -0.5, 0])
    assert row["reward_reward"] == np.mean([3, 2, 3, 1])
    assert row["reward"] == row["reward_overlong"] + row["reward_reward"]


def test_schedules_reach_the_sampler_the_update_and_the_log(fed, tmp_path):
    """The weight of the KL is steered by the step just done."""
    schedules = "TARGET_KL=0.01", "TEMPERATURE=0.8", "TEMPERATURE_END=0.4"
    c = constants_of(*TWO, "NUM_BATCHES=3", *schedules)
    llm, log = train(c, [random_answers(seed, 4) for seed in range(3)], points, tmp_path)
    temperatures = [0.8, 0.6, 0.4]
    np.testing.assert_allclose([row["temperature"] for row in log], temperatures)
    np.testing.assert_allclose(llm.rollout.temperatures, temperatures)
    np.testing.assert_allclose([temperature for _, temperature, _ in fed], temperatures, rtol=1e-6)
    betas = [c.BETA]
    for row in log:
        betas.append(adaptive_beta(betas[-1], 0.01, row["kl"]))
    assert betas[1] < c.BETA  # the first step's KL is 0: too little
    np.testing.assert_allclose([row["beta"] for row in log], betas[:3], rtol=1e-12)
    np.testing.assert_allclose([batch.beta[0, 0, 0] for batch, *_ in fed], betas[:3], rtol=1e-6)
    loop = json.loads((tmp_path / "checkpoints" / "3" / "loop" / "metadata").read_text())
    assert loop["beta"] == pytest.approx(betas[3], rel=1e-12)  # a resumed run goes on with it


def test_a_batch_is_cut_in_all_that_has_a_value_per_token_and_trains_the_same(
    fed, tmp_path, monkeypatch
):
    answers = [random_answers(5, 4, 5) * (np.arange(5) < 2)]
    c = constants_of(*TWO, "TOTAL_GENERATION_STEPS=5", "NUM_ITERATIONS=2")
    whole, _ = train(c, answers, points, tmp_path / "whole")
    monkeypatch.setattr(llama, "used_columns", lambda model, limit, longest: longest)
    cut, _ = train(c, answers, points, tmp_path / "cut")
    for field in ("completion_ids", "mask", "sampler_log_prob", "ref_log_prob", "old_log_prob"):
        wide, narrow = (getattr(batch, field) for batch, *_ in (fed[0], fed[-1]))
        assert wide.shape == (1, 4, 5) and narrow.shape == (1, 4, 2)
        np.testing.assert_allclose(narrow, wide[..., :2], rtol=1e-6)
    tables = [np.asarray(llm.params["table"]) for llm in (whole, cut)]
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-6)  # float32 sums of other lengths


def test_answers_drawn_ahead_are_those_of_the_weights_one_step_ago(fed, tmp_path):
    """An engine of its own draws while a step trains, and gets the new weights only after that."""
    c = constants_of(*TWO, "NUM_BATCHES=4", "ROLLOUTS=one-step-ahead")
    answers = [random_answers(seed, 4) for seed in range(4)]
    llm, log = train(c, answers, points, tmp_path, takes=0.1)  # long after the update
    batches = mixed_batches(questions(20), c.SEED, c.BATCH_SIZE)[:4]
    asked = [np.repeat(batch["prompts"], 2).tolist() for batch in batches]
    assert llm.rollout.asked == asked
    tables = [TABLE, *(table for *_, table in fed)]
    for step, (batch, *_) in enumerate(fed):
        prompt_ids, completion_ids = batch.prompt_ids[0], batch.completion_ids[0]
        assert prompt_ids[:, 0].tolist() == [2 + int(text) % 3 for text in asked[step]]
        np.testing.assert_array_equal(completion_ids, answers[step])
        expected = log_probs_by_hand(tables[max(step - 1, 0)], prompt_ids, completion_ids)
        np.testing.assert_allclose(
            batch.sampler_log_prob[0], expected * (answers[step] != PAD), rtol=1e-5
        )
    assert [row["mismatch"] > 0.01 for row in log] == [False, True, True, True]


# --- a real model: memory, and the same temperature everywhere


def tiny_llama(load, *constants):
    """Constants, and the tiny Llama; of the sizes of other files, whose programs are there."""
    c = constants_of(
        "BATCH_SIZE=4", "NUM_GENERATIONS=4", "TOTAL_GENERATION_STEPS=28", *QUICK, *constants
    )
    folder, hf = llama.fetch_model("tiny_llama")
    return c, load(c, folder, hf, llama.load_tokenizer(folder))


def weights_in_memory(kind):
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == kind)


def test_without_kl_there_is_no_reference_and_offloaded_it_is_not_on_the_device():
    used = {}
    for constants in (("BETA=0.0",), ("BETA=0.1",), ("BETA=0.1", "REFERENCE_OFFLOAD=True")):
        before = np.array([weights_in_memory(kind) for kind in ("device", "pinned_host")])
        _, llm = tiny_llama(load_llm, *constants)
        used[constants] = (
            np.array([weights_in_memory(kind) for kind in ("device", "pinned_host")]) - before
        )
        weights = sum(x.nbytes for x in jax.tree.leaves(llm.params))
        del llm
    none, kept, offloaded = used.values()
    slack = 1_000  # random-number state of a model: some keys and counters
    np.testing.assert_allclose(kept - none, [weights, 0], atol=slack)
    np.testing.assert_allclose(offloaded - none, [0, weights], atol=slack)


@pytest.mark.parametrize("rollouts", ["fresh", "one-step-ahead"])
def test_sampler_ratio_and_reference_agree_while_the_weights_do(rollouts, tmp_path):
    """At every temperature of the schedule; the update compiles once. Answers ahead are one update
    old.

    The tiny Llama samples with the weights that train: its answers ahead are sampled before the
    update.
    """
    fresh = "NUM_ITERATIONS=2", "TEMPERATURE_END=0.25", "LEARNING_RATE=0.0"
    constants = fresh if rollouts == "fresh" else ("ROLLOUTS=one-step-ahead", "LEARNING_RATE=3e-3")
    c, llm = tiny_llama(start.load_llm, "NUM_BATCHES=3", "REFERENCE_OFFLOAD=True", *constants)
    compiled = demo.update._cache_size()
    rows, source = read_data(c)["test"]
    tokenizer = llama.load_tokenizer(settings.find_path("tiny_llama"))
    rows = prompts.make_prompts(c, rows[:16], source, tokenizer, False, tmp_path / "too_long.csv")
    log = train_llm(c, llm, run_grader.make_grader("", "", reward_func, []), rows, tmp_path)
    if rollouts == "fresh":
        assert [row["temperature"] for row in log] == [1.0, 0.625, 0.25]
        # The same numbers from different programs. Of a difference d, k3 is about d^2 / 2.
        for row in log:
            close = LOG_PROB / row["temperature"]
            assert row["mismatch_max"] < close and row["kl"] < close**2 / 2
        assert not any(row["clip_fraction"] for row in log)
    else:
        assert log[0]["mismatch_max"] < LOG_PROB and log[2]["mismatch_max"] > 1e-2
    widths = 4  # at most: columns that no answer uses are cut, in four widths
    assert demo.update._cache_size() - compiled <= widths
