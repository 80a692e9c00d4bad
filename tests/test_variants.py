"""The variants that work on rewards, groups, lengths and steps: NumPy, by hand."""

import functools
import json
import statistics
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from table_policy import constants_of, train
from tunix.rl import function_registry

import grpo_llama3_1_8b_demo as demo
import grpo_variants as variants
import schedules
import settings
from run.start import check_method, prepare
from task.questions import mixed_batches
from task.task import Answers, Samples, make_task


def samples(*groups, **fields):
    """Groups of answers with these rewards, and other fields of `Samples`."""
    rewards = np.array(groups, float)  # [B, G]
    parts = fields.pop("reward_parts", {"reward": rewards})
    return Samples({}, fields.pop("answers", None), parts, rewards, mask=None)


def advantage(name, *groups, **fields):
    return demo.TABLES["advantage"][1][name](samples(*groups, **fields))


@pytest.mark.parametrize(
    ("ours", "tunixs"), [("group", "grpo"), ("centered", "drgrpo"), ("rloo", "rloo")]
)
def test_each_advantage_equals_tunixs_own(ours, tunixs):
    rewards = np.random.default_rng(3).normal(size=(6, 4))
    theirs = np.asarray(function_registry.get_advantage_estimator(tunixs)(rewards.ravel(), 4))
    # float32
    np.testing.assert_allclose(advantage(ours, *rewards).ravel(), theirs, rtol=1e-6, atol=1e-7)
    assert np.isfinite(advantage(ours, *np.ones((2, 4)))).all()


def test_maxrl_by_hand_and_without_a_right_answer():
    found = advantage("maxrl", [1, 0, 0, 0], [0, 0, 0, 0], [2, 2, 2, 2])
    np.testing.assert_allclose(found, [[3, -1, -1, -1], [0] * 4, [0] * 4], rtol=1e-12)
    with pytest.raises(settings.UserError, match=r"ADVANTAGE=maxrl: .* -1; .*correctness_reward"):
        advantage("maxrl", [3, -1])


def test_gdpo_normalises_each_reward_by_itself():
    """With Python's statistics. It tells apart the first two answers, which earn 3 of different
    rewards.
    """
    parts = {"form": [[3.0, 0, 3, 0], [1, 1, 1, 1]], "answer": [[0.0, 3, 1, 2], [2, 0, 0, 0]]}
    total = []
    for groups in zip(*parts.values(), strict=True):
        means, spreads = (
            [of(group) for group in groups] for of in (statistics.mean, statistics.stdev)
        )
        total += [
            sum((x - m) / (s or 1) for x, m, s in zip(row, means, spreads)) for row in zip(*groups)
        ]
    parts = {name: np.array(values) for name, values in parts.items()}
    found = advantage("gdpo", *sum(parts.values()), reward_parts=parts).ravel()
    # each std + 1e-6
    np.testing.assert_allclose(found, np.array(total) / statistics.stdev(total), atol=1e-5)
    of_sum = advantage("group", *sum(parts.values()))
    assert found[1] - found[0] > 0.5 and of_sum[0, 0] == of_sum[0, 1]


ROW = {"question": "q", "source": "", "weight": "1"}


class Echo:
    """A language model that answers with the prompt, one token; every other answer is cut off."""

    def __init__(self):
        self.asked = []

    def generate(self, questions, step):
        self.asked.append(questions["question"][::2].tolist())
        texts, ids = questions["prompts"], questions["prompts"].astype(int)[:, None]
        ended = np.arange(len(ids)) % 2 == 0
        return Answers(
            texts, ids, ids, ids, turn=0 * ids, lengths=np.ones(len(ids), int), ended=ended
        )


def rollouts(c, rewards_of, rights_of=None, steps=1, train=40, carried=None, start=0):
    """The samples of some steps, and what was asked: lists of questions. G is 2.

    `rewards_of` a question are its G rewards, `rights_of` one says whether its G answers are right.
    """

    def of_each(values_of, completions, **columns):
        return np.array([values_of(text)[i % 2] for i, text in enumerate(completions)], float)

    def reward(**columns):
        return of_each(rewards_of, **columns)

    names = "prompts", "question", "answer", "data_source", "extra_info"
    rows = [dict.fromkeys(names, f"{i:02d}") | {"weight": "1", "source": ""} for i in range(train)]
    grader = SimpleNamespace(functions=[reward], score=functools.partial(of_each, rights_of))
    task = make_task(c, dict(train=rows, test=[], validation=[]), grader, {})
    run = SimpleNamespace(carried={} if carried is None else carried)
    llm = Echo()
    one_step = variants.choose(c, demo.TABLES).rollouts
    found = [one_step(c, llm, task, run, step) for step in range(start, start + steps)]
    return found, llm.asked


def test_a_curriculum_takes_the_questions_closest_to_half_right():
    """By the grade, not by the reward. Of 2 B candidates; those that were never asked count as a
    half.
    """
    c = constants_of("ROLLOUTS=curriculum", "BATCH_SIZE=2", "NUM_GENERATIONS=2", "NUM_BATCHES=99")
    rows = [dict(question=f"{i:02d}", weight="1", source="") for i in range(4)]
    order = mixed_batches(rows, c.SEED, 4)[0]["question"].tolist()
    rates = dict(zip(order, (1.0, 0.0, 0.75, 0.5)))
    rights = dict(zip(order, ((1, 1), (0, 0), (1, 0), (0, 0))))
    carried = {"pass_rates": dict(rates)}
    _, [first] = rollouts(c, lambda q: (9, 9), rights.get, train=4, carried=carried)
    assert first == order[2:]
    assert carried["pass_rates"] == dict(zip(order, (1.0, 0.0, 0.5, 0.0)))
    assert rollouts(c, lambda q: (9, 9), rights.get, train=4)[1] == [order[:2]]


def test_a_refill_asks_other_questions_until_every_group_has_a_signal():
    """The groups with a signal first, in their order; the log sees all; at most MAX_REFILLS
    batches.
    """
    c = constants_of(
        "ZERO_VARIANCE_GROUPS=refill", "BATCH_SIZE=2", "NUM_GENERATIONS=2", "NUM_BATCHES=99"
    )
    [good], asked = rollouts(c, lambda q: (1, 2))
    assert len(asked) == 1 and good.mask.all()
    lucky = rollouts(c, lambda q: (1, 1))[1][2][1]  # only the second question of the second refill
    [some], asked = rollouts(c, lambda q: (1, 2) if q == lucky else (1, 1))
    assert (
        len(asked) == 1 + variants.MAX_REFILLS
        and asked[0] == good.questions["question"][:, 0].tolist()
    )
    assert some.questions["question"][:, 0].tolist() == [lucky, asked[0][0]]
    assert (some.questions["question"].astype(int) == some.answers.completion_ids[..., 0]).all()
    assert some.rewards.tolist() == [[1, 2], [1, 1]]
    assert some.mask.any(axis=(1, 2)).tolist() == [True, False]
    assert some.sampled.questions["question"][:, 0].tolist() == [
        q for batch in asked for q in batch
    ]
    both = {lucky, asked[1][0]}
    [full], until = rollouts(c, lambda q: (1, 2) if q in both else (1, 1))
    assert until == asked[:3] and full.questions["question"][:, 0].tolist() == [asked[1][0], lucky]
    # Each step has replacement questions of its own, the same after a resume.
    _, two = rollouts(c, lambda q: (1, 1), steps=2)
    _, resumed = rollouts(c, lambda q: (1, 1), start=1)
    assert two[5:] == resumed and len({*map(tuple, two)}) == 10


def test_a_step_asks_no_question_twice():
    """Of twelve questions and equal ones in other letters; when none is left, there's no refill."""
    constants = "ZERO_VARIANCE_GROUPS=refill", "BATCH_SIZE=4", "NUM_GENERATIONS=2", "NUM_BATCHES=99"
    for rows, batches in ((12, 3), (4, 1)):
        [found], asked = rollouts(constants_of(*constants), lambda q: (1, 1), train=rows)
        every = [question for batch in asked for question in batch]
        assert sorted(every) == [f"{i:02d}" for i in range(rows)] and len(asked) >= batches
        assert len(found.sampled.rewards) == rows and len(found.rewards) == 4


def test_a_group_has_a_signal_where_its_advantages_differ():
    """GDPO tells answers with equal sums apart; rewards that are equal but for rounding are no
    signal.
    """
    columns = np.array([[[1, 0, 0], [1, 1, 1]], [[0, 0.5, 0], [1, 1, 1]], [[0, 0.5, 1], [1, 1, 1]]])
    mixed = samples([1, 1, 1], [3, 3, 3], reward_parts=dict(enumerate(columns)))
    assert variants.has_signal(demo.TABLES["advantage"][1]["gdpo"], mixed).tolist() == [True, False]
    equal = samples([0.1 + 0.2, 0.3, 0.3], [0.1] * 3, [0, 1e-3, 0])
    for name in ("group", "centered", "rloo", "maxrl"):
        assert variants.has_signal(demo.TABLES["advantage"][1][name], equal).tolist() == [
            False,
            False,
            True,
        ]


@pytest.mark.parametrize(
    ("constants", "expected"),
    [  # the first of two groups has equal rewards; every other answer is cut off
        ([], [[1, 1], [1, 1]]),
        (["MASK_OVERLONG=True"], [[1, 0], [1, 0]]),
        (["ZERO_VARIANCE_GROUPS=skip"], [[0, 0], [1, 1]]),
        (["ZERO_VARIANCE_GROUPS=skip", "MASK_OVERLONG=True"], [[0, 0], [1, 0]]),
    ],
)
def test_which_answers_are_trained_on(constants, expected):
    c = constants_of("BATCH_SIZE=2", "NUM_GENERATIONS=2", *constants)
    _, [[equal, _]] = rollouts(c, lambda q: (1, 1))
    [found], _ = rollouts(c, lambda q: (2, 2) if q == equal else (1, 4))
    assert found.mask.all(axis=-1).astype(int).tolist() == expected


def test_a_readers_function_takes_the_place_of_the_pages(tmp_path):
    """The example's ranks by hand, and another function beside it."""
    own = tmp_path / "own.py"
    example = (settings.HERE / "examples" / "my_method.py").read_text()
    own.write_text(example + "\n\ndef weights(mask):\n    return mask * 2.0\n")
    c = constants_of(f"METHOD={own}")
    check_method(c, demo.TABLES)
    method = variants.choose(c, demo.TABLES)
    assert method.kl is demo.k3 and method.rollouts is demo.rollouts
    assert method.weights(np.ones(3)).tolist() == [2, 2, 2]
    advantage = method.advantage(samples([9.5, 2, 2, -1], [4, 4, 4, 4]))
    np.testing.assert_allclose(advantage, [[1, 0, 0, -1], [0, 0, 0, 0]], atol=1e-12)


def test_the_example_of_an_objective_is_the_smooth_clip():
    """In float64, and its slope in log pi by the derivative of tanh, 1 / cosh^2."""
    c = constants_of("METHOD=examples/my_objective.py")
    check_method(c, demo.TABLES)
    method = variants.choose(c, demo.TABLES)
    log_ratio, A = np.array([[-3.0, -0.1, 0.0, 0.15, 2.0]]), np.array([[-1.5]])
    batch = SimpleNamespace(old_log_prob=np.float32(-log_ratio), advantage=A)
    ratio, x = np.exp(log_ratio), (np.exp(log_ratio) - 1) / c.EPSILON

    def total(log_prob):
        found, far = method.objective(SimpleNamespace(log_prob=log_prob), batch, c)
        return found.sum(), (found, far)

    zeros = np.zeros(log_ratio.shape, np.float32)
    slope, (found, far) = jax.grad(total, has_aux=True)(zeros)
    # float32: each rounding of a number of size 1 is 6e-8, divided by EPSILON = 0.2
    close = dict(rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(found, (1 + c.EPSILON * np.tanh(x)) * A, **close)
    np.testing.assert_allclose(slope, ratio * A / np.cosh(x) ** 2, **close)
    assert far.tolist() == [[True, False, False, False, True]]


HAS = {  # a METHOD that defines one function; its constant, with another value than the default
    "def rollouts(c, llm, task, run, step): pass": "ROLLOUTS=curriculum",
    "def advantage(samples): return samples.rewards": "ADVANTAGE=rloo",
    "def weights(mask): return mask * 1.0": "LOSS_AGG_MODE=token-mean",
    "def objective(pi, batch, c): return pi.log_prob, batch.mask": "LOSS_ALGO=gspo-token",
    "def kl(x): return x": "KL_LOSS_MODE=mse_kl",
}


@pytest.mark.parametrize("constant", HAS.values())
@pytest.mark.parametrize("text", HAS)
def test_a_constant_that_a_readers_function_overrides_is_refused(text, constant, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(text)
    c = constants_of(f"METHOD={own}", constant)
    words = f"^{constant}: has no effect, because METHOD={own} has its own [a-z]+; leave it out$"
    refused = pytest.raises(settings.UserError, match=words)
    with refused if HAS[text] == constant else nullcontext():
        prepare(c, demo.TABLES)


@pytest.mark.parametrize("text", HAS)
@pytest.mark.parametrize("constant", ["EPSILON_HIGH=0.3", "EPSILON_HIGH=0.1"])
def test_a_readers_objective_may_use_the_clip_ranges_its_own_way(text, constant, tmp_path):
    """The page's objective has no use for these."""
    own = tmp_path / "own.py"
    own.write_text(text)
    refused = pytest.raises(settings.UserError, match=f"^{constant}: ")
    with nullcontext() if "objective" in text else refused:
        prepare(constants_of(f"METHOD={own}", constant), demo.TABLES)


@pytest.mark.parametrize(
    "text",
    [
        "def advantage(samples): return samples.rewards / samples.answers.lengths",
        (
            "import numpy as np\n"
            "def advantage(samples): return samples.rewards[..., None] * "
            "np.ones(samples.mask.shape)"
        ),
        (
            "def advantage(samples): return samples.reward_parts['check_answer'] * "
            "(samples.questions['line'] != '')"
        ),
        "def advantage(samples): return samples.flat().rewards.reshape(2, -1)",
        (
            "def objective(pi, batch, c): return pi.log_prob * batch.advantage + 0 * "
            "batch.prompt_ids.sum(), batch.mask"
        ),
        "from grpo_variants import turn_advantage as advantage, gspo_objective as objective",
        (
            "from grpo_variants import decoupled_advantage as advantage, "
            "mean_of_tokens as weights, k2 as kl"
        ),
    ],
)
def test_a_function_is_tried_with_what_a_run_has(text, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(text)
    worlds = ["ENVIRONMENT=world.py"] * ("turn_" in text)  # then the answers are episodes
    check_method(constants_of(f"METHOD={own}", *worlds), demo.TABLES)


def test_what_a_readers_function_writes_to_its_arguments_stays_there(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def advantage(samples):\n    samples.rewards[:] = 5\n    return samples.rewards\n"
        "def weights(mask):\n    mask[:] = False\n    return mask * 1.0\n"
        "def rollouts(c, llm, task, run, step):\n    task.test[0]['answer'] += 'mine'\n"
        "    return llm._replace(questions=task.test[0])\n"
    )
    method, some = (
        variants.choose(constants_of(f"METHOD={own}"), demo.TABLES),
        samples([1, 2], [3, 4]),
    )
    mask, test = np.ones((2, 2, 3), bool), [{"answer": "7"}]
    assert (method.advantage(some) == 5).all() and not method.weights(mask).any()
    task = make_task(
        method.c, dict(train=[ROW], test=test, validation=[]), SimpleNamespace(functions=[]), {}
    )
    for step, answer in enumerate(("7mine", "7minemine")):  # a copy of its own, the same each step
        assert method.rollouts(method.c, some, task, None, step).questions == {"answer": answer}
    assert some.rewards.tolist() == [[1, 2], [3, 4]] and mask.all() and test == [{"answer": "7"}]


# of the reader's code
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def advantages(samples): return samples.rewards", "defines none of rollouts, advantage"),
        ("def advantage(samples): return samples.rewards.ravel()", "shape (8,)"),
        ("def advantage(rewards, G): return rewards", "TypeError"),
        ("def advantage(samples): return samples.rewards / 0", "NaN or infinity"),
        ("def kl(x): raise ValueError('no\\nidea')", "kl raised ValueError: no idea; fix it"),
        ("def objective(pi, batch, c): return pi.log_prob * batch.advantage", "objective returned"),
        ("def kl(x):\n    if x > 0:\n        return x", "truth value"),
        (
            "def kl(x):\n    if x.sum() > 0:\n        return x",
            "use jnp.where in place of if (",
        ),
        (
            "import numpy as np\ndef kl(x): return np.exp(x) - 1 - x",
            "use jax.numpy (jnp) in place of NumPy (",
        ),
        ("def kl(x): return x * float(x[0, 0])", "keep it an array"),
        (
            "import numpy as np\ndef objective(pi, batch, c):\n"
            "    return np.tanh(pi.log_prob), batch.mask",
            "use jax.numpy (jnp) in place of NumPy (",
        ),
        ("advantage = 1 / 0", "ZeroDivisionError"),
        ("def rollouts(*_): return iter(())", "rollouts returned <tuple_iterator"),
        ("def rollouts(c, llm, task, run): pass", "rollouts raised TypeError"),
        (
            "def rollouts(c, llm, task, run, step): return 1 / 0",
            "rollouts raised ZeroDivisionError",
        ),
    ],
)
def test_a_function_that_cannot_work_gets_one_line(text, words, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(text)
    c = constants_of(f"METHOD={own}", "EVAL_EVERY=0")
    with pytest.raises(settings.UserError) as error:
        check_method(c, demo.TABLES)
        train(c, [], sum, tmp_path / "run")
    line = str(error.value)
    assert line.startswith(f"METHOD={own}: ") and "\n" not in line and words in line, line


REMEMBERS = """import json

def rollouts(c, llm, task, run, step):
    run.carried.setdefault("beta", []).append(step)
    run.carried["proof"] = run.carried["carried"] = {"mine": run.carried["beta"]}
"""
SAMPLES = """
    questions = task.repeat(task.batches[step])
    return task.grade(questions, llm.generate(questions, step))
"""


@pytest.fixture
def remembering(tmp_path):
    """A short run on given answers with a METHOD that writes to run.carried; its log."""
    answers = [np.array([[4, 5, 1], [5, 1, 0], [4, 4, 1], [1, 0, 0]])]
    short = "EVAL_EVERY=0", "LOG_ANSWERS_EVERY=0", "BATCH_SIZE=2", "NUM_GENERATIONS=2", "BETA=0.25"

    def run(steps, text):
        own = tmp_path / f"own_{abs(hash(text))}.py"
        own.write_text(text)
        c = constants_of(*short, f"METHOD={own}", f"NUM_BATCHES={steps}")
        return train(c, answers, sum, tmp_path / "run")[1]

    return run


def test_what_a_readers_rollouts_remember_is_theirs_whatever_they_call_it(remembering, tmp_path):
    """Under the names that a checkpoint itself uses, through the end of a process."""
    seen = tmp_path / "seen.json"
    text = REMEMBERS + f"    open({str(seen)!r}, 'w').write(json.dumps(run.carried))\n" + SAMPLES
    for steps in (1, 2):
        log = remembering(steps, text)
    assert [row["beta"] for row in log] == [0.25, 0.25]
    mine = {"mine": [0, 1]}
    assert json.loads(seen.read_text()) == {"beta": [0, 1], "proof": mine, "carried": mine}


@pytest.mark.parametrize("value", ["__import__('numpy').ones(2)", "{(1, 2): 3}", "{1, 2}"])
def test_what_no_checkpoint_can_keep_is_refused_in_the_first_step(value, remembering):
    text = REMEMBERS.replace("append(step)", f"append({value})") + SAMPLES
    with pytest.raises(settings.UserError, match=r"^METHOD=\S+: .*run\.carried\['beta'\] .*; use"):
        remembering(3, text)


def test_the_kl_controller_by_hand():
    """Ziegler et al. 2019, section 2.2, with KL target 0.1: errors clipped to 0.2, -0.2, and 0.1 as
    it is.
    """
    beta = 0.5
    for kl, factor in ((0.5, 1.02), (0.001, 0.98), (0.11, 1.01), (float("nan"), 1), (0.1, 1)):
        before, beta = beta, schedules.adaptive_beta(beta, 0.1, kl)
        np.testing.assert_allclose(beta, before * factor, rtol=1e-12)
    assert schedules.adaptive_beta(0.5, 0.0, 9.0) == 0.5  # no target
