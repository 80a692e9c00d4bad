"""What the variants make of rewards, lengths and steps: functions of NumPy arrays, by hand."""

import collections

import numpy as np
import pytest
from table_policy import constants_of
from tunix.rl import function_registry

import grpo_llama3_1_8b_demo as demo
import reward_func
from parts import loss_variants
from parts.rewards import run_grader

# --- advantages


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        # groups (1, 4) and (2, 2): mean 2.5 and std (of a sample) sqrt(4.5)
        ([], [-1.5 / 4.5**0.5, 1.5 / 4.5**0.5, 0, 0]),
        (["NORM_ADV_BY_STD=False"], [-1.5, 1.5, 0, 0]),
        (["ADVANTAGE=rloo"], [1 - 4, 4 - 1, 0, 0]),
    ],
)
def test_each_advantage_by_hand(constants, expected):
    advantage = loss_variants.pieces(constants_of(*constants), demo.PLAIN).advantage
    found = advantage(np.array([1.0, 4.0, 2.0, 2.0]), 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # 1e-6 is added to the std


@pytest.mark.parametrize(
    ("ours", "tunixs"),
    [
        (demo.group_advantage, "grpo"),
        (loss_variants.centered_advantage, "drgrpo"),
        (loss_variants.leave_one_out_advantage, "rloo"),
    ],
)
def test_each_advantage_equals_tunixs_own(ours, tunixs):
    rewards = np.random.default_rng(3).normal(size=24)
    theirs = function_registry.get_advantage_estimator(tunixs)
    # float64, a few roundings
    np.testing.assert_allclose(ours(rewards, 4), np.asarray(theirs(rewards, 4)), rtol=1e-6, atol=1e-7)
    assert np.isfinite(ours(np.ones(8), 4)).all()


# --- the length penalty


@pytest.mark.parametrize(
    ("tokens", "points"),
    [(1, 0), (15, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1)],
)
def test_the_soft_length_penalty_by_hand(tokens, points):
    """DAPO's eq. 13 for L_max = 20 and L_cache = 4: it begins after 16 tokens."""
    ids = [[7] * tokens, [7]]
    for penalty in (1.0, 0.5):
        function = loss_variants.overlong_penalty(20, 4, penalty)
        assert function(prompts=["", ""], completions=["", ""], completion_ids=ids) == [points * penalty, 0]


def test_the_length_penalty_is_a_reward_like_the_others():
    functions_of = run_grader.make_grader("", "", reward_func, []).functions
    c = constants_of("OVERLONG_BUFFER=2", "TOTAL_GENERATION_STEPS=4", "OVERLONG_PENALTY=0.5")
    functions = loss_variants.reward_functions(c, functions_of)
    assert functions[:-1] == functions_of and functions[-1].__name__ == "overlong"
    assert loss_variants.reward_functions(constants_of(), functions_of) == functions_of
    ids = [[1] * n for n in (2, 3, 4)]
    assert functions[-1](prompts=[""] * 3, completions=[""] * 3, completion_ids=ids) == [0, -0.25, -0.5]


# --- what counts, and groups that are filled up


def test_a_group_has_a_signal_where_its_rewards_differ():
    rewards = np.array([2.0, 2.0, 1.0, 4.0, 0.0, 0.0])
    assert loss_variants.has_signal(rewards, 2).tolist() == [False, True, False]
    assert loss_variants.has_signal(rewards, 3).tolist() == [True, True]


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        ([], [1, 1, 1, 1]),
        (["MASK_OVERLONG=True"], [1, 0, 1, 0]),
        (["ZERO_VARIANCE_GROUPS=skip"], [0, 0, 1, 1]),
        (["ZERO_VARIANCE_GROUPS=refill"], [0, 0, 1, 1]),
        (["ZERO_VARIANCE_GROUPS=skip", "MASK_OVERLONG=True"], [0, 0, 1, 0]),
    ],
)
def test_which_answers_are_trained_on(constants, expected):
    rewards, ended = np.array([2.0, 2.0, 1.0, 4.0]), np.array([True, False, True, False])
    found = loss_variants.what_counts(constants_of("NUM_GENERATIONS=2", *constants), rewards, ended)
    assert found.astype(int).tolist() == expected


Asked = collections.namedtuple("Asked", ("rewards", "tokens", "columns"))


def asked(*rewards):
    """Answers with these rewards; what else there is of a row is its reward, too."""
    rewards = np.array(rewards, float)
    return Asked(rewards, np.repeat(rewards[:, None], 2, axis=1), {"question": rewards.astype(str)})


def filled(first, *others):
    """The rewards that `filled_up` takes, and those of all that was drawn."""
    others = (asked(*rewards) for rewards in others)
    taken, everything = loss_variants.filled_up(constants_of("NUM_GENERATIONS=2"), asked(*first), others)
    for found in (taken, everything):  # what belongs to a row goes with it
        np.testing.assert_array_equal(found.tokens[:, 1], found.rewards)
        assert found.columns["question"].tolist() == found.rewards.astype(str).tolist()
    return taken.rewards.tolist(), everything.rewards.tolist()


def test_zero_variance_groups_are_refilled_with_other_questions():
    """The second group of the first batch, then the first group of the third."""
    taken, everything = filled((2, 2, 1, 4), (3, 3, 0, 0), (0, 6, 5, 5), (7, 8, 7, 8))
    assert taken == [1, 4, 0, 6]
    assert everything == [2, 2, 1, 4, 3, 3, 0, 0, 0, 6, 5, 5]  # the last was not asked for
    taken, everything = filled((2, 2, 1, 4), (0, 0, 3, 4), (7, 8, 7, 8))
    assert taken == [1, 4, 3, 4] and len(everything) == 8


def test_refilling_ends_and_keeps_what_is_left():
    """Of no more batches than there are; the groups without a signal come last, and do not count."""
    taken, everything = filled((2, 2, 1, 4), (3, 3, 0, 0), (5, 5, 5, 5))
    assert taken == [1, 4, 2, 2] and len(everything) == 12


def test_refilling_costs_nothing_where_all_groups_have_a_signal():
    taken, everything = filled((2, 1, 1, 4), (7, 8, 7, 8))
    assert taken == everything == [2, 1, 1, 4]


def test_a_step_refills_from_questions_of_its_own_and_at_most_so_often():
    """Other questions than the step's, and than other steps'; the same when it is asked again."""
    c = constants_of("BATCH_SIZE=2")
    rows = [dict(prompts=str(i), weight="1", source="", question="") for i in range(40)]
    steps = [[batch["prompts"].tolist() for batch in demo.refill_batches(c, rows, step)] for step in range(3)]
    assert [len(batches) for batches in steps] == [loss_variants.MAX_REFILLS] * 3
    assert steps[1] == [batch["prompts"].tolist() for batch in demo.refill_batches(c, rows, 1)]
    texts = [text for batches in steps for batch in batches for text in batch]
    assert len(set(texts)) == len(texts) == 3 * loss_variants.MAX_REFILLS * 2
    assert steps[0][0] != demo.training_batches(c, rows, 0)[0]["prompts"].tolist()


# --- schedules


def test_the_kl_controller_by_hand():
    """Ziegler et al. 2019, section 2.2, with KL target 0.1: errors clipped to 0.2, -0.2, and 0.1 as it is."""
    beta = 0.5
    for kl, factor in ((0.5, 1.02), (0.001, 0.98), (0.11, 1.01), (float("nan"), 1), (0.1, 1)):
        after = loss_variants.adaptive_beta(beta, 0.1, kl)
        np.testing.assert_allclose(after, beta * factor, rtol=1e-12)
        beta = after
    assert loss_variants.adaptive_beta(0.5, 0.0, 9.0) == 0.5  # no target


def test_the_temperature_moves_in_a_straight_line_to_the_last_step():
    c = constants_of("TEMPERATURE=1.0", "TEMPERATURE_END=0.5", "NUM_BATCHES=11")
    found = [loss_variants.temperature_of(c, step) for step in (0, 1, 5, 10)]
    np.testing.assert_allclose(found, [1.0, 0.95, 0.75, 0.5], rtol=1e-12)
    assert loss_variants.temperature_of(constants_of("TEMPERATURE=0.7"), 7) == 0.7
    single = constants_of("TEMPERATURE=0.7", "TEMPERATURE_END=0.5", "NUM_BATCHES=1")
    assert loss_variants.temperature_of(single, 0) == 0.7
