"""What the variants make of rewards, lengths and steps: functions of NumPy arrays, by hand."""

import collections
import math
import statistics

import numpy as np
import pytest
from table_policy import constants_of
from tunix.rl import function_registry

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import reward_func
import settings
from task import run_grader

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
    advantage = grpo_variants.pieces(constants_of(*constants), demo.PLAIN).advantage
    found = advantage(np.array([1.0, 4.0, 2.0, 2.0]), 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # 1e-6 is added to the std


@pytest.mark.parametrize(
    ("ours", "tunixs"),
    [
        (demo.group_advantage, "grpo"),
        (grpo_variants.centered_advantage, "drgrpo"),
        (grpo_variants.leave_one_out_advantage, "rloo"),
    ],
)
def test_each_advantage_equals_tunixs_own(ours, tunixs):
    rewards = np.random.default_rng(3).normal(size=24)
    theirs = function_registry.get_advantage_estimator(tunixs)
    # float64, a few roundings
    np.testing.assert_allclose(ours(rewards, 4), np.asarray(theirs(rewards, 4)), rtol=1e-6, atol=1e-7)
    assert np.isfinite(ours(np.ones(8), 4)).all()


def test_maxrl_climbs_the_first_terms_of_log_p():
    """Its mean over all draws of G coins with a logit against the gradient of the expansion of log p.

    log p = - sum_k (1 - p)^k / k; the mean of the group as a baseline leaves the terms up to G - 1.
    """
    G, p = 5, 0.3
    found = 0.0
    for right in range(G + 1):
        rewards = np.array([1.0] * right + [0.0] * (G - right))
        score = rewards - p  # d log prob of each coin / d logit
        often = math.comb(G, right) * p**right * (1 - p) ** (G - right)
        found += often * (grpo_variants.maxrl_advantage(rewards, G) * score).mean()
    slope = sum((1 - p) ** (k - 1) for k in range(1, G)) * p * (1 - p)  # dp / d logit = p (1 - p)
    np.testing.assert_allclose(found, slope, rtol=1e-12)


def test_maxrl_by_hand_and_without_a_right_answer():
    found = grpo_variants.maxrl_advantage(np.array([1.0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2]), 4)
    np.testing.assert_allclose(found, [3, -1, -1, -1] + [0] * 8, rtol=1e-12)
    with pytest.raises(settings.UserError, match=r"ADVANTAGE=maxrl: .* -1; .*correctness_reward"):
        grpo_variants.maxrl_advantage(np.array([3.0, -1.0]), 2)


def test_distillation_has_no_advantage_of_its_own():
    c = constants_of("ADVANTAGE=none", "TEACHER=tiny_llama")
    assert grpo_variants.pieces(c, demo.PLAIN).advantage(np.array([9.5, 0.0]), 2).tolist() == [0, 0]


Points = collections.namedtuple("Points", ("points",))


def test_gdpo_normalises_each_reward_by_itself():
    """In plain Python. The first two answers earn 3 in sum, of different rewards, and are told apart."""
    points = {"form": [3.0, 0, 3, 0, 1, 1, 1, 1], "answer": [0.0, 3, 1, 2, 2, 0, 0, 0]}
    total = [0.0] * 8
    for values in points.values():
        for start in (0, 4):
            group = values[start : start + 4]
            for i in range(start, start + 4):
                spread = statistics.stdev(group)
                total[i] += (values[i] - statistics.mean(group)) / spread if spread else 0.0
    spread = statistics.stdev(total)
    drawn = Points({name: np.array(values) for name, values in points.items()})
    found = grpo_variants.finer_advantage(constants_of("ADVANTAGE=gdpo"), demo.PLAIN)(drawn, 4)
    np.testing.assert_allclose(found, [value / spread for value in total], atol=1e-5)  # 1e-6 beside each std
    assert found[1] - found[0] > 0.5
    of_sum = demo.group_advantage(sum(drawn.points.values()), 4)
    assert of_sum[0] == of_sum[1]
    assert grpo_variants.finer_advantage(constants_of(), demo.PLAIN) is None


# --- which questions are asked


def test_a_curriculum_takes_what_was_half_right():
    batch = {"question": np.array(list("abcdef")), "answer": np.array(list("123456"))}
    rates = {"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.9, "z": 0.5}
    chosen = grpo_variants.half_right(batch, rates, 3)
    assert {name: "".join(column) for name, column in chosen.items()} == {"question": "bef", "answer": "256"}
    chosen = grpo_variants.half_right(batch, rates | {"e": 1.0, "f": 0.75}, 3)  # then d, 0.4 from the half
    assert "".join(chosen["question"]) == "bdf"


def test_a_pass_rate_is_the_share_of_right_answers():
    """By the grade, not by the points: a wrong answer in good form earns some."""
    answers = [f"<reasoning>1</reasoning><answer>{n}</answer>" for n in (3, 4, 4, 4, 7, 7, 7, 8)]
    columns = {"question": "ppppqqqq", "answer": "44449999", "data_source": [""] * 8, "extra_info": [""] * 8}
    asked = {name: np.array(list(column)) for name, column in columns.items()}
    drawn = collections.namedtuple("Drawn", ("texts", "asked"))(np.array(answers, dtype=object), asked)
    grader = run_grader.make_grader("", "", reward_func, [])
    assert grpo_variants.rates_of(drawn, grader, 4) == {"p": 0.75, "q": 0.0}


def test_a_curriculum_draws_from_twice_as_many_questions():
    rows = [dict(prompts=str(i), weight="1", source="", question="") for i in range(12)]
    sizes = {
        asked: [
            len(b["prompts"]) for b in demo.training_batches(constants_of("BATCH_SIZE=2", asked), rows, 0)
        ]
        for asked in ("CURRICULUM=False", "CURRICULUM=True")
    }
    assert sizes == {"CURRICULUM=False": [2] * 100, "CURRICULUM=True": [4] * 100}


# --- a piece of one's own


def test_a_readers_piece_takes_the_place_of_the_pages(tmp_path):
    """The example's ranks by hand, and another piece beside it."""
    own = tmp_path / "own.py"
    example = (settings.HERE / "examples" / "my_method.py").read_text()
    own.write_text(example + "\n\ndef count(mask):\n    return mask.sum() * 2\n")
    c = constants_of(f"METHOD={own}", "ADVANTAGE=rloo")
    grpo_variants.check_method(c, demo.PLAIN)
    found = grpo_variants.pieces(c, demo.PLAIN)
    assert found._replace(advantage=None, count=None) == demo.PLAIN._replace(advantage=None, count=None)
    assert found.count(np.ones(3)) == 6
    advantage = found.advantage(np.array([9.5, 2, 2, -1, 4, 4, 4, 4]), 4)
    np.testing.assert_allclose(advantage, [1, 0, 0, -1, 0, 0, 0, 0], atol=1e-12)


WRONG_METHODS = {
    "def advantages(rewards, num_generations): return rewards": "has none of the functions advantage, ratio",
    "def advantage(rewards, num_generations): return rewards.reshape(-1, num_generations)": "shape (2, 4)",
    "def advantage(rewards, num_generations): return rewards[0]": "shape ()",
    "def advantage(rewards): return rewards": "TypeError",
    "def advantage(rewards, num_generations): return rewards / 0": "NaN or infinity",
    "def advantage(rewards, num_generations):\n"
    "    groups = rewards.reshape(-1, num_generations)\n"
    "    return (groups / groups.sum(axis=1, keepdims=True)).ravel()": "a group of equal rewards",
    "def ratio(log_prob, old_log_prob, mask): return (log_prob - old_log_prob).mean()": "shape ()",
    "def kl(x): raise ValueError('no\\nidea')": "kl raised ValueError: no; fix it",
    "def objective(ratio, A, log_prob, epsilon, epsilon_high): return ratio * A": "objective returned",
    "def kl(x):\n    if x > 0:\n        return x": "truth value",
    "def weight(log_prob, sampler_log_prob, mask, cap): return mask[:, 0]": "weight returned the shape (8,)",
    "advantage = 1 / 0": "ZeroDivisionError",
}


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # of the reader's code
@pytest.mark.parametrize("text", WRONG_METHODS)
def test_a_piece_that_cannot_work_gets_one_line(text, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(text)
    with pytest.raises(settings.UserError) as error:
        grpo_variants.check_method(constants_of(f"METHOD={own}"), demo.PLAIN)
    line = str(error.value)
    assert line.startswith(f"METHOD={own}: ") and "\n" not in line and WRONG_METHODS[text] in line, line


def test_a_weight_for_the_whole_answer_is_a_weight(tmp_path):
    (tmp_path / "own.py").write_text(
        "def weight(log_prob, sampler_log_prob, mask, cap): return mask[:, :1] * 1.0"
    )
    grpo_variants.check_method(constants_of(f"METHOD={tmp_path / 'own.py'}"), demo.PLAIN)


# --- the length penalty


@pytest.mark.parametrize(
    ("tokens", "points"),
    [(1, 0), (15, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1)],
)
def test_the_soft_length_penalty_by_hand(tokens, points):
    """DAPO's eq. 13 for L_max = 20 and L_cache = 4: it begins after 16 tokens."""
    ids = [[7] * tokens, [7]]
    for penalty in (1.0, 0.5):
        function = grpo_variants.overlong_penalty(20, 4, penalty)
        assert function(prompts=["", ""], completions=["", ""], completion_ids=ids) == [points * penalty, 0]


def test_the_length_penalty_is_a_reward_like_the_others():
    functions_of = run_grader.make_grader("", "", reward_func, []).functions
    c = constants_of("OVERLONG_BUFFER=2", "TOTAL_GENERATION_STEPS=4", "OVERLONG_PENALTY=0.5")
    functions = grpo_variants.reward_functions(c, functions_of)
    assert functions[:-1] == functions_of and functions[-1].__name__ == "overlong"
    assert grpo_variants.reward_functions(constants_of(), functions_of) == functions_of
    ids = [[1] * n for n in (2, 3, 4)]
    assert functions[-1](prompts=[""] * 3, completions=[""] * 3, completion_ids=ids) == [0, -0.25, -0.5]


# --- what counts, and groups that are filled up


def test_a_group_has_a_signal_where_its_rewards_differ():
    rewards = np.array([2.0, 2.0, 1.0, 4.0, 0.0, 0.0])
    assert grpo_variants.has_signal(rewards, 2).tolist() == [False, True, False]
    assert grpo_variants.has_signal(rewards, 3).tolist() == [True, True]


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
    found = grpo_variants.what_counts(constants_of("NUM_GENERATIONS=2", *constants), rewards, ended)
    assert found.astype(int).tolist() == expected


Asked = collections.namedtuple("Asked", ("rewards", "tokens", "columns"))


def asked(*rewards):
    """Answers with these rewards; what else there is of a row is its reward, too."""
    rewards = np.array(rewards, float)
    return Asked(rewards, np.repeat(rewards[:, None], 2, axis=1), {"question": rewards.astype(str)})


def filled(first, *others):
    """The rewards that `filled_up` takes, and those of all that was drawn."""
    others = (asked(*rewards) for rewards in others)
    taken, everything = grpo_variants.filled_up(constants_of("NUM_GENERATIONS=2"), asked(*first), others)
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
    assert [len(batches) for batches in steps] == [grpo_variants.MAX_REFILLS] * 3
    assert steps[1] == [batch["prompts"].tolist() for batch in demo.refill_batches(c, rows, 1)]
    texts = [text for batches in steps for batch in batches for text in batch]
    assert len(set(texts)) == len(texts) == 3 * grpo_variants.MAX_REFILLS * 2
    assert steps[0][0] != demo.training_batches(c, rows, 0)[0]["prompts"].tolist()


# --- schedules


def test_the_kl_controller_by_hand():
    """Ziegler et al. 2019, section 2.2, with KL target 0.1: errors clipped to 0.2, -0.2, and 0.1 as it is."""
    beta = 0.5
    for kl, factor in ((0.5, 1.02), (0.001, 0.98), (0.11, 1.01), (float("nan"), 1), (0.1, 1)):
        after = grpo_variants.adaptive_beta(beta, 0.1, kl)
        np.testing.assert_allclose(after, beta * factor, rtol=1e-12)
        beta = after
    assert grpo_variants.adaptive_beta(0.5, 0.0, 9.0) == 0.5  # no target


def test_the_temperature_moves_in_a_straight_line_to_the_last_step():
    c = constants_of("TEMPERATURE=1.0", "TEMPERATURE_END=0.5", "NUM_BATCHES=11")
    found = [grpo_variants.temperature_of(c, step) for step in (0, 1, 5, 10)]
    np.testing.assert_allclose(found, [1.0, 0.95, 0.75, 0.5], rtol=1e-12)
    assert grpo_variants.temperature_of(constants_of("TEMPERATURE=0.7"), 7) == 0.7
    single = constants_of("TEMPERATURE=0.7", "TEMPERATURE_END=0.5", "NUM_BATCHES=1")
    assert grpo_variants.temperature_of(single, 0) == 0.7
