"""playground.html in a real browser: `make test-browser`. Needs Debian's chromium and
chromium-driver.

The engine's numbers are compared with MaxText's model and the main script's own loss under JAX, its
rewards with reward_func.py. The training is the page's own, through its buttons.
"""

import dataclasses
import functools
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax
import pandas as pd
import psutil
import pytest
from chromium import find, look_like, one, turn
from flax import nnx
from folders import load
from hostile import HOSTILE
from safetensors.numpy import save_file
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions
from selenium.webdriver.support.ui import Select, WebDriverWait
from table_policy import as_batch, model_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "playground"))
import build

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import reward_func
import settings
from model import llama
from model.log_probs import log_probs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "5_GRPO_Maxtext/assets/playground.html"
ROOMS = ("grid", "bandit", "clip", "answers", "train")
KIM = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
TRACED = True  # conftest.py's `driver` logs tasks and requests
REWARDS = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")


@pytest.fixture
def show(driver):
    """Opens a room, in a color scheme and a language; at the end the browser has no complaint."""

    def show(room, scheme="light", lang="en", more=""):
        look_like(driver, 1280, 900, phone=False, scheme=scheme)
        # of the same origin: what was kept is forgotten from here
        driver.get((ROOT / "LICENSE").as_uri())
        driver.execute_async_script(
            "indexedDB.deleteDatabase('grpo-playground').onsuccess = arguments[0]"
        )
        return visit(driver, f"room={ROOMS.index(room) + 1}&lang={lang}{more}")

    yield show
    assert not driver.get_log("browser")


def visit(driver, address):
    """Loads the page anew at an address, as a link from a chapter would."""
    driver.get("about:blank")
    driver.get(f"{PAGE.as_uri()}#{address}")
    WebDriverWait(driver, 60).until(lambda d: find(d, "#room > *"))
    run(driver, "await module('train').loaded, 1")
    return driver


def address_of(driver):
    return dict(parse_qsl(urlsplit(driver.current_url).fragment))


def numbers_in(text):
    return [float(x.replace("−", "-")) for x in re.findall(r"[+−]?\d+(?:\.\d+)?", text)]


def run(driver, code, *arguments):
    """The value of an expression over the page's modules and its pool of workers, awaited."""
    answer = driver.execute_async_script(
        "const done = arguments[arguments.length - 1], given = arguments;"
        "const module = (name) => modules[`${name}.js`], pool = module('train').getPool;"
        f"(async () => ({code}))().then((x) => done({{x}}), (e) => done({{fault: String(e)}}))",
        *arguments,
    )
    assert "fault" not in answer, answer["fault"]
    return answer["x"]


def ask(driver, task, then="x", **given):
    """What a worker answers to a task, as the expression `then` of it."""
    asked = f"await (await pool()).ask(given[0], given[1]).then((x) => ({then}))"
    return run(driver, asked, task, given)


@pytest.fixture(scope="module")
def maxtext():
    """The tiny Llama as the main script loads it, its mesh, the constants, questions as tokens."""
    c = settings.read(demo.Constants, ["BATCH_SIZE=2", "NUM_GENERATIONS=4"])
    folder, hf = llama.fetch_model(c.MODEL)
    model, mesh = llama.load_llama(folder, hf, llama.to_run_config(c, hf), pad_id=0)
    rows = [
        json.loads(line)["question"]
        for line in (settings.HERE / "tiny_gsm8k/validation.jsonl").open()
    ]
    tokens = llama.load_tokenizer(settings.HERE / "tiny_llama")(rows[:10], add_special_tokens=False)
    return model, mesh, c, [[1, *row, 4] for row in tokens["input_ids"]]


def padded(prompts, answers):
    """int32 [N, 28] left-padded, int32 [N, 28] right-padded."""
    left = [[0] * (28 - len(prompt)) + prompt for prompt in prompts]
    return np.int32(left), np.int32([answer + [0] * (28 - len(answer)) for answer in answers])


def test_tokens_are_drawn_from_the_policy(show, maxtext):
    """What the tokens of some answers were drawn from is JAX's policy; and how one is drawn from
    it.
    """
    driver = show("clip")
    model, mesh, _, questions = maxtext
    for prompt in questions:
        given = dict(model="start", tokens=prompt[1:-1], answers=8, seed=1)
        drawn = ask(driver, "draw", sampling={"temperature": 0.8, "topK": 76, "topP": 1}, **given)
        with mesh:
            tokens = padded([prompt] * 8, [row["tokens"] for row in drawn])
            logits = np.array(log_probs(model, *tokens, pad_id=0, temperature=1.0)[1])  # [8, 28, V]
        logits[..., 0] = -np.inf  # padding: the main script's sampler never draws it either
        for row, of_answer in zip(drawn, logits, strict=True):
            expected = jax.nn.log_softmax(of_answer[: len(row["tokens"])] / 0.8, axis=-1)
            with np.errstate(divide="ignore"):
                found = np.log(row["choices"])
            # 1e-4 on each of two logits
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    random = np.random.default_rng(4)
    policy, uniform = random.dirichlet(np.full(76, 0.1), 200), random.random(200)
    draw = "given[0].map((p, i) => module('grpo').draw(p, given[1][i]))"
    found = run(driver, draw, policy.tolist(), uniform.tolist())
    assert found == [int((p.cumsum() <= u).sum()) for p, u in zip(policy, uniform, strict=True)]


def flat_gradient(gradient, c, folder):
    """A MaxText model's gradient as the page lays out weights; by way of Hugging Face's names."""
    _, hf = llama.fetch_model(c.MODEL)

    def read(name):
        return np.asarray(functools.reduce(operator.getitem, name.split("-")[1:], gradient["base"]))

    save_file(dict(llama.hf_weights(hf, llama.to_run_config(c, hf), read)), folder / "gradient")
    return build.flat_weights(folder / "gradient")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_of_a_step_equal_jaxs(show, maxtext, tmp_path, temperature):
    """The main script's own `loss`, of answers that a policy away from its reference is trained on.

    A token's push is minus the gradient by its own logit, times the number of answers.
    """
    driver = show("clip")
    model, mesh, c, questions = maxtext
    prompts, random = questions[:2], np.random.default_rng(1)
    answers = [
        [[*random.integers(5, 76, n).tolist(), 2] for n in random.integers(0, 20, 4)]
        for _ in prompts
    ]
    answers[0][0] = [2]  # ends at once: its only token is drawn from the prompt's last row
    advantages = random.normal(size=(2, 4)).astype(np.float32)

    tokens = padded(
        [prompt for prompt in prompts for _ in range(4)], [a for group in answers for a in group]
    )
    params, policy = model_of(c, model, temperature=temperature)
    moved = jax.tree.map(lambda w: w * jnp.float32(1.02), params)
    with mesh:
        reference, _ = log_probs(model, *tokens, pad_id=0, temperature=temperature)
        away = nnx.merge(policy.graphdef, moved, policy.frozen, copy=True)
        _, logits = log_probs(away, *tokens, pad_id=0, temperature=1.0)  # [8, 28, V]
    mask = np.asarray(tokens[1]) != 0
    batch = as_batch(
        dict(
            prompt_ids=tokens[0],
            completion_ids=tokens[1],
            mask=mask,
            advantage=advantages.reshape(8, 1),
            weight=demo.mean_of_answers(mask.reshape(2, 4, 28)).reshape(8, 28),
            beta=np.full((8, 1), 0.08),
            sampler_log_prob=np.zeros((8, 28)),
            ref_log_prob=reference,
        )
    )
    # AdamW with a gradient of 0 and a rate of -0.2 multiplies every weight by 1 + 0.2 *
    # WEIGHT_DECAY.
    ask(driver, "reset")
    still = "{gradient: new Float32Array(module('model').SIZE), rate: -0.2}"
    run(driver, f"await (await pool()).ask('apply', {still})")
    method, policy = grpo_variants.choose(c, demo.TABLES), dataclasses.replace(policy, mesh=mesh)

    def table(logits, batch):
        log = jax.nn.log_softmax(logits / temperature)
        taken = jnp.take_along_axis(log, batch.completion_ids[..., None], -1)[..., 0]
        return SimpleNamespace(log_prob=taken, entropy=jnp.zeros_like(taken))

    olds = [row[m].tolist() for row, m in zip(np.asarray(reference), mask, strict=True)]
    # answers that these weights have drawn; or the start's, and ratios differ
    for again in (False, True):
        old = batch._replace(old_log_prob=reference) if again else batch
        loss = functools.partial(demo.loss, model=policy, batch=old, method=method)
        (expected, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(moved)
        names = ("tokens", "answers", "advantages", "old")
        rows = zip(prompts, answers, advantages.tolist(), (olds[:4], olds[4:]), strict=True)
        given = dict(
            prompts=[dict(zip(names[: 3 + again], row, strict=False)) for row in rows], count=8
        )
        given |= dict(epsilon=c.EPSILON, temperature=temperature)
        then = "({...x.figures, gradient: Array.from(x.gradient), pushes: x.pushes.flat()})"
        found = ask(driver, "loss", then, beta=0.08, **given)
        assert found["loss"] == pytest.approx(float(expected), abs=1e-4)
        expected = flat_gradient(gradient, c, tmp_path)
        np.testing.assert_allclose(found["gradient"], expected, rtol=0, atol=1e-4 / temperature)
        slopes = jax.grad(lambda x, b=old: demo.loss(x, table, b, method)[0])(logits)  # [8, 28, V]
        own = np.take_along_axis(np.asarray(slopes), tokens[1][..., None], -1)[..., 0]
        # times 8: float32 logits that differ by 1e-4
        np.testing.assert_allclose(found["pushes"], -8 * own[mask], rtol=1e-3, atol=1e-3)
        assert np.ptp(found["pushes"]) > 0.1
        # else 1e-4 would say little
        assert found["kl"] > 1 and np.abs(found["gradient"]).max() > 0.1
        assert (found["clipped"] > 0) == again
        assert ask(driver, "loss", "x.figures.kl", beta=0, **given) == found["kl"]
    ask(driver, "reset")


def test_the_update_equals_optaxs(show):
    """Schedule, clip and AdamW, as `make_optimizer` of the main script chains them."""
    driver = show("clip")
    c = settings.read(demo.Constants, ["NUM_BATCHES=200", "NUM_ITERATIONS=1", "LEARNING_RATE=1e-3"])
    optimizer = demo.make_optimizer(c)
    random = np.random.default_rng(2)
    weights = random.normal(size=7).astype(np.float32)
    gradients = (random.normal(size=(200, 7)) * np.geomspace(0.01, 3, 200)[:, None]).astype(
        np.float32
    )
    state, expected = optimizer.init(weights), jnp.asarray(weights)
    for gradient in gradients:
        changes, state = optimizer.update(jnp.asarray(gradient), state, expected)
        expected = optax.apply_updates(expected, changes)
    found = run(
        driver,
        """(() => {
        const { createOptimizer, learningRate } = module("grpo");
        const update = createOptimizer(7), w = Float32Array.from(given[0]);
        given[1].forEach(
            (g, step) => update(w, Float32Array.from(g), learningRate(1e-3, step, 200)));
        return Array.from(w);
    })()""",
        weights.tolist(),
        gradients.tolist(),
    )
    assert np.abs(np.asarray(expected) - weights).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)  # float32 against float64 inside


def random_texts(count):
    """Answers of the 76 tokens, many of them nearly right."""
    words, random = build.read_vocabulary(), np.random.default_rng(3)
    numbers = [
        "70",
        "18",
        "1,080",
        "08",
        "7.",
        ".5",
        "-7",
        "- 7",
        "6+1=7",
        "8-6=2,2+5=7",
        "+7",
        "3*6",
        " 7 ",
    ]

    def piece():
        pool = [numbers, words[5:], [*"0123456789+-*=,. "], words[9:52]][random.integers(4)]
        return "".join(random.choice(pool, 1 if pool is numbers else random.integers(0, 6)))

    def text():
        parts = ["<reasoning>", piece(), "</reasoning>", "", "<answer>", piece(), "</answer>"]
        return "".join(part for part in parts if random.random() < 0.93) + piece() * (
            random.random() < 0.1
        )

    return [text() for _ in range(count)]


def test_points_and_tokens_equal_the_main_scripts(show):
    driver = show("clip")
    texts = random_texts(6000)
    golds = [("7", "18", "0", "1080")[i % 4] for i in range(len(texts))]
    points = "module('rewards').reward(text, given[1][i], module('rewards').POINTS, 9)"
    found = run(driver, f"given[0].map((text, i) => Object.values({points}))", texts, golds)
    given = dict(prompts=texts, completions=texts, answer=golds)
    expected = np.array([getattr(reward_func, name)(**given) for name in REWARDS]).T
    wrong = [(t, g, f, e) for t, g, f, e in zip(texts, golds, found, expected.tolist()) if f != e]
    assert not wrong, wrong[:5]
    assert all(len(set(column)) > 1 for column in expected.T) and (expected[:, 3] > 0).sum() > 100
    cases = {
        "<reasoning>40+8=48</reasoning><answer>48</answer>": "right",
        "<reasoning>48</reasoning>21": "wrong",
        "<reasoning>40+8=48</reasoning>48</answer>": "untagged",
        "<answer>48</answer>": "untagged",
        "<reasoning>48</reasoning><answer>21</answer>": "wrong",
        "<reasoning></reasoning>": "none",
    }
    judged = run(
        driver, "given[0].map((text) => module('rewards').judged(text, '48'))", list(cases)
    )
    assert judged == list(cases.values())
    tokenizer = llama.load_tokenizer(settings.HERE / "tiny_llama")
    texts = [*texts[:200], "Zoe has 3 <b>apples</b>.", " Kim  has", "twice\tas many", ""]
    texts += [
        json.loads(line)["question"] for line in (settings.HERE / "tiny_gsm8k/test.jsonl").open()
    ]
    pieces = (
        "module('tokenizer').pieces(text, "
        "module('pool').VOCABULARY_WORDS).map(({token}) => token ?? 3)"
    )
    found = run(driver, f"given[0].map((text) => {pieces})", [*texts, "<|eot_id|>"])
    assert found[:-1] == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    # a mark of the conversation is no text: typed in, its signs are unknown
    assert set(found[-1]) == {3}


def value_iteration(gamma, slip, walls):
    """q* [16, 4] by the rules of chapter 1's world, here with walls and slippery ground."""
    step = load("1_Q_Learning", "grid").step
    constants = load("1_Q_Learning", "Q_Learning").Constants()
    q = np.zeros((16, 4))

    def value(cell, action):
        after, reward, terminated = step(constants, cell, action)
        after, reward = (cell, -1) if after in walls else (after, reward)
        return reward + gamma * (1 - terminated) * q[after].max()

    for _ in range(300):
        for cell, action in itertools.product(set(range(15)) - set(walls), range(4)):
            beside = [value(cell, (action // 2 * 2 + side) % 4) for side in (2, 3)]
            q[cell, action] = (1 - slip) * value(cell, action) + slip * np.mean(beside)
    return q


def test_the_optimum_and_the_right_moves_equal_chapter_1s(show):
    driver = show("grid")
    for gamma, slip, walls in ((0.99, 0.0, []), (1.0, 0.0, []), (0.9, 0.4, [5, 10])):
        more = f"gamma={gamma}&slip={slip}&walls={'_'.join(map(str, walls))}"
        visit(driver, f"room=grid&epsilon=0.8&{more}")
        best = value_iteration(gamma, slip, walls)
        cells = [cell for cell in range(15) if cell not in walls]
        found = np.array(run(driver, "module('grid').optimum(given[0], given[1])", gamma, slip))
        np.testing.assert_allclose(found[cells], best[cells], rtol=0, atol=1e-6)
        one(driver, "#grid_run").click()  # it runs by itself: stop
        seen = []
        for _ in range(3):
            q = np.array(run(driver, "module('grid').state.Q"))
            greedy = q[cells] >= q[cells].max(1, keepdims=True) - 1e-9
            optimal = best[cells] >= best[cells].max(1, keepdims=True) - 1e-6
            seen.append((optimal | ~greedy).all(1).sum())
            assert numbers_in(one(driver, "#grid_right b").text) == [seen[-1], len(cells)]
            assert len(find(driver, "#board .arrow")) == greedy[greedy.sum(1) < 4].sum()
            one(driver, "#grid_hundred").click()
        assert seen[-1] > seen[0]
    visit(driver, "room=grid&walls=11_14&gamma=1&slip=0.3")  # no way to the goal, and no discount
    assert (
        "−∞" in one(driver, ".optimum").text
        and "no move is right" in one(driver, "#grid_right").text
    )


def test_a_move_on_the_grid_is_q_learnings_update(show):
    """The dot walks without a click, but not for a reader who wants no motion."""
    driver = show("grid")
    filled = lambda: one(driver, "#grid_formula").text.splitlines()[1]  # noqa: E731
    WebDriverWait(driver, 20).until(lambda d: int(one(d, "#grid_told").text.split()[0]) > 3)
    still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": still})
    visit(driver, "room=grid&lang=en")
    assert one(driver, "#cell_3").accessible_name.startswith("cell 3, best value 0")
    for _ in range(30):
        one(driver, "#grid_step").click()
        terms = numbers_in(filled().split("← ")[1].replace(" − ", " "))
        before, alpha, reward, gamma, future, again, after = terms
        assert before == again
        update = before + alpha * (reward + gamma * future - before)
        assert after == pytest.approx(update, abs=0.011)  # two decimals are shown
    one(driver, "#predict").click()
    one(driver, "#grid_step").click()
    assert filled().endswith("= ?") and not one(driver, "#grid_step").is_enabled()
    find(driver, "#guess button")[0].send_keys(Keys.ENTER)
    assert driver.switch_to.active_element == one(driver, "#grid_step")  # not lost with the button
    assert not filled().endswith("= ?")


WORTH, OLD = np.array([1, 0.6, 0.2]), np.array([0.6, 0.3, 0.1])
ACTION = np.array([0, 0, 0, 0, 0, 1, 1, 2])


def updates_on_one_batch(clip, beta, lucky, passes=20):
    """The policies [passes + 1, 3] of gradient ascent on the main script's objective, by jax.grad,
    and the advantages [8].
    """
    reward = np.array([0.9, 1.1, 0.7, 1.2, 0.8, 0.5, 0.6, lucky])
    advantage = reward - reward.mean()
    c = SimpleNamespace(EPSILON=0.2 if clip == "on" else 1e9)

    def objective(logits):
        log = jax.nn.log_softmax(logits)
        given = SimpleNamespace(old_log_prob=jnp.log(OLD)[ACTION], advantage=advantage)
        kl = (jnp.exp(log) * (log - jnp.log(OLD))).sum()
        pi = SimpleNamespace(log_prob=log[ACTION])
        return demo.clipped_objective(pi, given, c)[0].mean() - beta * kl

    slope, seen = jax.jit(jax.grad(objective)), [jnp.log(OLD)]
    for _ in range(passes):
        seen.append(seen[-1] + slope(seen[-1]))
    return np.asarray(jax.nn.softmax(jnp.stack(seen))), advantage


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_other_missions_say_is_what_is_paid_and_what_gae_gives(show, lang):
    def paid(text):
        return [getattr(reward_func, name)([text], [text], answer=["48"])[0] for name in REWARDS]

    form = paid("<reasoning>1</reasoning><answer>21</answer>")
    untagged = paid("<reasoning>48</reasoning>48</answer>")
    right = paid("<reasoning>48</reasoning><answer>48</answer>")
    tags = [4, form[1] / 4] if lang == "en" else [form[1]]
    reward, value = np.array([0.0, 1, 0, 1, 0, 1, 0, 5]), np.array([6.0, 5, 6, 7, 6, 4, 2, 3])

    def of_step_1(v2, gae_lambda):
        v = np.where(np.arange(8) == 1, v2, value)
        given = (reward, v, np.append(v[1:], 0), np.arange(8) == 7, np.zeros(8, bool))
        found = load("3_Pendulum", "ppo").gae(*(x[None] for x in given), 1.0, gae_lambda)
        return float(found[0, 0])

    off = [of_step_1(10, x) - of_step_1(5, x) for x in (1.0, 0.0)]
    for room, mission, numbers in (
        ("answers", "tags", [form[0], *tags, -form[2], sum(form), sum(untagged)]),
        ("train", "course", [sum(right[:2]), sum(right[2:])]),
        ("clip", "critic", [1, 1, 1, off[0], 0, 1, off[1]]),  # lambda, gamma, step
    ):
        driver = show(room, lang=lang, more=f"&mission={mission}")
        find(driver, "#mission [id^=guess_]")[0].click()
        found = numbers_in(one(driver, "#mission .why").text)
        assert found[: len(numbers)] == numbers, mission


def test_the_crawl_waits_for_the_guess_and_stops_at_the_goal(show):
    driver = show("grid", more="&mission=crawl")
    time.sleep(1.5)  # 9 moves, if it ran by itself
    assert run(driver, "module('grid').state.moves") == 0
    turn(driver, "speed", 3)
    one(driver, "#grid_run").click()
    WebDriverWait(driver, 30).until(lambda d: "Run" in one(d, "#grid_run").text)
    q = np.array(run(driver, "module('grid').state.Q"))
    assert (q > 0).sum() == 1 and run(driver, "module('grid').state.last.next") == 15


PAYS = np.array([3.0, 2.0, 1.0])  # mean rewards of room 2
KINDS = ("none", "group", "running")


def log_prob_of(logits, actions, weights):
    return (weights * jax.nn.log_softmax(logits)[actions]).mean()


def over_every_batch(policy, samples, shift, baseline):
    """Mean [3] and variance of REINFORCE's estimate, over all batches there are.

    Rewards are 1 above or below their mean here. The page's normal noise has the same mean and
    variance, and the estimate's variance depends on nothing else of it. `baseline`: None is the
    group's mean.
    """
    outcomes = np.array(list(itertools.product(range(3), (-1, 1))))  # [6, 2]
    batches = outcomes[list(itertools.product(range(6), repeat=samples))]  # [6 ** samples, N, 2]
    actions = batches[..., 0]
    rewards = PAYS[actions] + shift + batches[..., 1]
    weights = rewards - (rewards.mean(axis=1, keepdims=True) if baseline is None else baseline)
    gradient = jax.vmap(jax.grad(log_prob_of), (None, 0, 0))
    estimates = np.float64(gradient(jnp.log(policy), actions, jnp.float32(weights)))
    probability = (policy[actions] / 2).prod(axis=1)
    average = probability @ estimates
    return average, probability @ ((estimates - average) ** 2).sum(axis=1)


def test_the_closed_forms_of_the_noise_count_every_batch(show):
    driver = show("bandit")
    closed_form = "module('bandit').closedForm(given[0], given[1], given[2], 2.5)"
    for policy, samples, shift in (
        ([0.2, 0.4, 0.4], 1, 0),
        ([0.2, 0.4, 0.4], 2, 10),
        ([0.7, 0.1, 0.2], 4, 3),
    ):
        for kind, baseline in (("none", 0), ("group", None), ("running", 2.5)):
            expected = over_every_batch(np.array(policy), samples, shift, baseline)
            found = run(driver, closed_form, policy, dict(samples=samples, shift=shift), kind)
            # float32 gradients of rewards below 20
            np.testing.assert_allclose(found["average"], expected[0], rtol=0, atol=1e-5)
            assert found["variance"] == pytest.approx(expected[1], rel=1e-5, abs=1e-9)
            slope = jax.grad(lambda x: jax.nn.softmax(x) @ PAYS)(jnp.log(np.array(policy)))
            np.testing.assert_allclose(found["gradient"], slope, rtol=0, atol=1e-6)


def dots_of(driver, kind):
    """Where the dots [n, 2] and the cross [2] are in a picture of room 2, and how many are
    outside.
    """
    read = """const picture = document.getElementById(`dots_${arguments[0]}`);
    const all = (selector) => [...picture.querySelectorAll(selector)];
    return [all(".dot").map((e) => [e.cx.baseVal.value, e.cy.baseVal.value]),
      all(".exact")[0].getAttribute("d"), all(".above").length]"""
    dots, cross, outside = driver.execute_script(read, kind)
    start = [float(x) for x in re.findall(r"-?[\d.]+", cross)]  # M left,middle h14 M middle,top v14
    return np.array(dots), np.array([start[3], start[1]]), outside


def spread(estimates):
    """The variance of estimates [M, 3], as chapter 3 measures it, and its standard error."""
    found = load("3_Pendulum", "gradient_variance").spread_of(np.array(estimates))
    return found["trace"], found["trace_error"]


@pytest.mark.parametrize("given", ["samples=8", "samples=8&shift=10", "samples=2&start=0.6"])
def test_the_variance_told_is_that_of_the_dots(show, given):
    driver = show("bandit", more=f"&{given}")
    settings = run(driver, "module('bandit').settings")
    estimates = run(driver, "module('bandit').estimatesOf(module('bandit').settings)")
    policy = [settings["start"], *[(1 - settings["start"]) / 2] * 2]
    seen = {}
    for kind in KINDS:
        dots, cross, outside = dots_of(driver, kind)
        exact = run(
            driver,
            "module('bandit').closedForm(given[0], given[1], given[2], given[3])",
            *(policy, settings, kind, estimates["b"]),
        )
        points = np.array(estimates[kind])
        seen[kind], error = spread(points)
        shown = numbers_in(one(driver, f"[data-baseline={kind}] .formula").text)
        share = 100 * (1 - (kind == "group") / settings["samples"])
        told = [seen[kind], exact["variance"], share, outside]
        assert shown == pytest.approx(told, abs=0.00051)  # three decimals are shown
        assert abs(seen[kind] - exact["variance"]) < 4 * error
        assert len(dots) + outside == len(points) == 200
        if outside == 0:  # a plane loses no length: all distances from the cross have one scale
            away = np.linalg.norm(points - exact["gradient"], axis=1)
            pixels = np.linalg.norm(dots - cross, axis=1)
            scale = pixels.sum() / away.sum()
            # 0.01 pixels of a dot and of the cross in each direction
            np.testing.assert_allclose(pixels, scale * away, rtol=0, atol=0.03)
    size, times = numbers_in(one(driver, "#bandit_told").text)[:3:2]
    slope = jax.grad(lambda x: jax.nn.softmax(x) @ PAYS)(jnp.log(np.array(policy)))
    assert size == pytest.approx(float(np.linalg.norm(slope)), abs=0.0051)
    # one decimal
    assert times == pytest.approx(seen["none"] / seen["running"], abs=0.051)


def test_a_constant_moves_only_what_has_no_baseline(show):
    driver = show("bandit")
    drawn = """return Object.fromEntries([...document.querySelectorAll("[id^=dots_], [id^=runs_]")]
      .map((e) => [e.id, e.outerHTML]))"""
    read = lambda: {  # noqa: E731
        name: [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", drawing)]
        for name, drawing in driver.execute_script(drawn).items()
    }
    estimates = "module('bandit').estimatesOf(module('bandit').settings)"
    before, old = read(), run(driver, estimates)
    turn(driver, "shift", 10)
    after, new = read(), run(driver, estimates)
    # where rounding falls the other way: the last of one decimal
    same = {name for name in before if after[name] == pytest.approx(before[name], abs=0.101)}
    assert same == {f"{what}_{kind}" for what in ("dots", "runs") for kind in KINDS[1:]}
    moved = np.linalg.norm(np.subtract(new["none"], old["none"]), axis=1).max()
    variances = [spread(found["none"])[0] / spread(found["running"])[0] for found in (new, old)]
    told = numbers_in(one(driver, "#bandit_told").text)[2:]
    assert told == pytest.approx([variances[0], 10, variances[1], moved, 0], abs=0.051)
    assert moved > 3 and variances[0] > 20 * variances[1]


def ends_of(driver, kind):
    """π(A) at the end of each run, read from the thin lines."""
    read = """return [...document.querySelectorAll(`#runs_${arguments[0]} .thin`)]
      .map((e) => [...e.points].at(-1).y)"""
    return (94 - np.array(driver.execute_script(read, kind))) / 88


@pytest.mark.parametrize("given", ["samples=8", "shift=10&samples=3&rate=0.3"])
def test_training_with_each_baseline_equals_jaxs(show, given):
    """On the page's own uniform numbers, by jax.grad."""
    driver = show("bandit", more=f"&{given}")
    settings = run(driver, "module('bandit').settings")
    samples = settings["samples"]
    uniforms = run(
        driver,
        "((next) => Array.from({length: given[1]}, next))(module('grpo').random(0, 201, given[0]))",
        *(7, 3 * samples * 101),
    )
    drawn, radius, angle = np.reshape(uniforms, (101, samples, 3)).transpose(2, 0, 1)
    normal = np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)  # [101, N]
    gradient = jax.jit(jax.grad(log_prob_of))
    for kind in KINDS:
        logits, running = np.log([0.2, 0.4, 0.4]), None
        expected = []
        for step in range(101):
            policy = np.exp(logits) / np.exp(logits).sum()
            expected.append(policy[0])
            # the first batch is only looked at, by the same policy as the second
            actions = (drawn[step][:, None] >= policy.cumsum()[:2]).sum(axis=1)
            rewards = PAYS[actions] + settings["shift"] + normal[step]
            if step > 0:
                baseline = {"none": 0, "group": rewards.mean(), "running": running}[kind]
                slope = gradient(logits, actions, rewards - baseline)
                logits = logits + settings["rate"] * np.float64(slope)
            running = rewards.mean() if step == 0 else 0.9 * running + 0.1 * rewards.mean()
        found = run(
            driver,
            "module('bandit').trainOnce(given[0], module('bandit').settings, given[1])",
            *(kind, 7),
        )
        # 100 steps of float32 gradients; a sample that falls to another action would show
        np.testing.assert_allclose(found[:-1], expected[1:], rtol=0, atol=1e-3)
    ends = [ends_of(driver, kind) for kind in KINDS]
    told = numbers_in(one(driver, "#bandit_learned").text)
    found = [int((x > 0.9).sum()) for x in ends]
    assert told == [100, 90, found[0], 20, *found[1:], 10, int((ends[0] < 0.1).sum())]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_the_baselines_missions_say_is_what_is_shown(show, lang):
    driver = show("bandit", lang=lang)
    b = run(driver, "module('bandit').estimatesOf(module('bandit').settings).b")
    policy = np.array([0.2, 0.4, 0.4])
    # With a baseline from outside the batch, N samples have 1 / N of the variance of one.
    plain, shifted, held = (
        over_every_batch(policy, 1, shift, baseline)[1] / 8
        for shift, baseline in ((0, 0), (10, 0), (10, b + 10))
    )
    needed = int(np.ceil(8 * shifted / held))
    ends = {}
    for name, more in (("large", "shift=10"), ("small", "shift=10&rate=0.1")):
        visit(driver, f"room=bandit&lang={lang}&{more}")
        ends[name] = {kind: ends_of(driver, kind) for kind in KINDS}
    lost = {name: int((found["none"] < 0.1).sum()) for name, found in ends.items()}
    end = [
        ends[name][kind].mean()
        for name, kind in (("large", "none"), ("small", "none"), ("large", "running"))
    ]
    expected = {
        "plus_ten": [plain, shifted, 10, lost["large"], 20, 10, 100, 10],
        "samples": [1, 64, shifted / 8, needed, held],
        "small": [0.5, 10, lost["large"], 20, 0.1, lost["small"], *end, shifted, 0.5],
        "alone": [0, 1, 50, 87.5],
    }
    for mission, numbers in expected.items():
        one(driver, f"#mission_{mission}").click()
        guesses = find(driver, "#mission [id^=guess_]")
        offered = [numbers_in(guess.text) for guess in guesses]
        guesses[0].click()
        found = sorted(numbers_in(one(driver, "#mission .why").text))
        # two decimals, and a line's tenth of a pixel
        assert found == pytest.approx(sorted(numbers), abs=0.0061), mission
        if mission == "plus_ten":
            assert offered[1] == [round(shifted / plain)]
        if mission == "samples":
            assert offered == [[16], [64], [needed]]


def test_updates_on_one_batch_equal_jaxs(show):
    """The figure of the lucky draw, and how many answers of A, B and C still push."""
    driver = show("clip")
    for clip, beta, lucky in (("on", 0, 3), ("off", 0, 3), ("off", 1, 3), ("on", 0.5, 0.2)):
        policies, advantage = updates_on_one_batch(clip, beta, lucky)
        ratio = policies[-1] / OLD
        promised = (ratio[ACTION] * advantage).mean()
        visit(driver, f"room=clip&lang=en&clip={clip}&beta={beta}&lucky={lucky}")
        shown = numbers_in(one(driver, "#passes_told").text)
        assert shown[:2] == pytest.approx([promised, (policies[-1] - OLD) @ WORTH], abs=0.0051)
        held = (advantage > 0) & (ratio[ACTION] > 1.2) | (advantage < 0) & (ratio[ACTION] < 0.8)
        pushes = (abs(advantage) > 1e-9) & (~held | (clip == "off"))
        pushing = [int(pushes[a == ACTION].sum()) for a in range(3)]
        cells = [x.text for x in find(driver, "#passes_pushing td.number")]
        assert [int(x.split(" / ")[0]) for x in cells] == pushing
        # Only where the clip has stopped C beyond its range does the page say so.
        assert ("C's own push has stopped" in one(driver, "#passes_told").text) == (
            pushing[2] == 0 and ratio[2] > 1.2
        )


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_the_lucky_draws_missions_say_is_what_is_shown(show, lang):
    driver = show("clip", lang=lang)
    free, held, pulled = (
        updates_on_one_batch(*given)[0] for given in (("off", 0, 3), ("on", 0, 3), ("off", 1, 3))
    )
    _, advantage = updates_on_one_batch("off", 0, 3, passes=0)
    lost = lambda policies: (OLD - policies[-1]) @ WORTH  # noqa: E731
    promised = ((free[-1] / OLD)[ACTION] * advantage).mean()
    ratio = held[:, 2] / OLD[2]
    percent = [100 * policies[-1, 2] for policies in (held, pulled, free)]
    expected = {
        "lucky": [promised, lost(free), ratio[1], 1.2, ratio[-1], percent[0], lost(held)],
        "pull": [percent[1], lost(pulled)],
    }
    for mission, numbers in expected.items():
        one(driver, f"#mission_{mission}").click()
        guesses = find(driver, "#mission [id^=guess_]")
        if mission == "lucky":
            shown = [numbers_in(guess.text)[0] for guess in guesses]
            assert shown == pytest.approx(percent, abs=0.51)  # whole percents
        guesses[0].click()
        found = numbers_in(one(driver, "#mission .why").text)
        exact = [0.51 if x > 10 else 0.0051 for x in numbers]
        assert len(found) == len(numbers)
        assert (np.abs(np.subtract(found, numbers)) < exact).all(), (found, numbers)
    # The table that the mission sets up shows the same ratio, past the clip range.
    one(driver, "#mission_lucky").click()
    one(driver, "#set_1").click()
    WebDriverWait(driver, 20).until(lambda d: address_of(d).get("clip") == "on")
    cells = find(driver, "#passes_part tr:nth-last-child(2) td.number")
    assert float(cells[2].text) == pytest.approx(ratio[-1], abs=0.0051) and ratio[-1] > 1.2


def test_advantages_equal_the_main_scripts_and_chapter_3s(show):
    driver = show("clip")
    rewards = np.array([4, 5.5, 9.5, 5.5, 5.5, 0, 0, 0])
    expected = {
        "GRPO": demo.group_advantage(SimpleNamespace(rewards=rewards[None]))[0],
        "Dr. GRPO": rewards - rewards.mean(),
        "RLOO": grpo_variants.leave_one_out_advantage(SimpleNamespace(rewards=rewards[None]))[0],
        "MaxRL": rewards / rewards.mean() - 1,
    }
    for name, advantages in expected.items():
        values = numbers_in(one(driver, f'[data-method="{name}"] .values').text)
        np.testing.assert_allclose(values, advantages, atol=0.0051)  # two decimals
    reward, value = np.array([0.0, 1, 0, 1, 0, 1, 0, 5]), np.array([6.0, 5, 6, 7, 6, 4, 2, 3])
    for gae_lambda, gamma, value[1] in ((0.5, 1, 5), (0, 0.9, 10), (1, 1, 10)):
        given = (reward, value, np.append(value[1:], 0), np.arange(8) == 7, np.zeros(8, bool))
        expected = load("3_Pendulum", "ppo").gae(*(x[None] for x in given), gamma, gae_lambda)[0]
        for name, turned in (("lambda", gae_lambda), ("gae_gamma", gamma), ("v2", value[1])):
            turn(driver, name, turned)
        for step in (1, 4, 8):
            one(driver, f"#gae_step_{step}").click()
            shown = one(driver, "#gae_formula").text.splitlines()[1].split("= ")[-1]
            assert numbers_in(shown) == [pytest.approx(float(expected[step - 1]), abs=0.00051)]


def drawn(driver):
    WebDriverWait(driver, 60).until(lambda d: one(d, "#eight_told").is_displayed())
    return find(driver, "#cards article")


def test_eight_answers_have_points_advantages_and_alternatives(show):
    driver = show("answers")
    seen = []
    for card in drawn(driver):
        tokens = card.find_elements(By.CSS_SELECTOR, ".token")
        text = "".join(token.get_property("textContent") for token in tokens).removesuffix("■")
        points = numbers_in(
            " ".join(x.text for x in card.find_elements(By.CSS_SELECTOR, "td.number"))
        )
        given = dict(prompts=[text], completions=[text], answer=["48"])
        expected = [getattr(reward_func, name)(**given)[0] for name in REWARDS]
        assert points[:5] == [*expected, sum(expected)]
        seen.append(points[4:])
    rewards, shown = np.transpose(seen)
    expected = demo.group_advantage(SimpleNamespace(rewards=rewards[None]))[0]
    np.testing.assert_allclose(shown, expected, atol=0.0051)
    find(driver, ".token")[3].click()
    assert driver.switch_to.active_element == find(driver, ".token")[3]
    shares = [float(x.text.split(" %")[0]) for x in find(driver, "#other .share")]
    rest = float(re.search(r"share ([\d.]+) %", one(driver, "#other").text)[1])
    assert shares == sorted(shares, reverse=True) and sum(shares) + rest == pytest.approx(
        100, abs=0.6
    )
    one(driver, "#question_text").clear()
    one(driver, "#question_text").send_keys(KIM)
    assert not find(driver, "#cards article") and one(driver, "#gold").get_attribute("value") == ""
    assert Select(one(driver, "#question")).first_selected_option.text == "(my own)"
    one(driver, "#gold").send_keys("7", Keys.ENTER)
    assert len(drawn(driver)) == 8
    assert address_of(driver)["question"] == KIM and address_of(driver)["gold"] == "7"
    visit(driver, urlsplit(driver.current_url).fragment)
    assert len(drawn(driver)) == 8 and one(driver, "#question_text").get_attribute("value") == KIM


def test_a_hostile_question_is_text(show):
    driver = show("answers")
    drawn(driver)
    tags = "return [...new Set([...document.querySelectorAll('*')].map((e) => e.tagName))].sort()"
    harmless = set(driver.execute_script(tags))
    # As JSON: WebDriver itself refuses a lone surrogate.
    script = (
        "const [e, x] = arguments; e.value = JSON.parse(x); e.dispatchEvent(new Event('input'))"
    )
    for hostile in HOSTILE:
        driver.execute_script(script, one(driver, "#question_text"), json.dumps(hostile))
        assert not one(driver, "#draw").is_enabled()
        assert set(driver.execute_script(tags)) <= harmless | {"BR"}
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert driver.execute_script("return window.hacked") is None
    for typed, answer, said in (
        (KIM, "7", ""),
        ("", "7", "Type a question"),
        ("Zoe has 8 cards.", "7", "underlined"),
        (f"{KIM} {KIM}", "7", "at most 28"),
        (KIM, "", "whole number"),
    ):
        for name, value in (("question_text", typed), ("gold", answer)):
            driver.execute_script(script, one(driver, f"#{name}"), json.dumps(value))
        assert said in one(driver, "#known").text and one(driver, "#draw").is_enabled() == (
            said == ""
        )


def tasks_of(driver):
    """Processor seconds of each task of a main thread since the last call: [(process, seconds)]."""
    events = [
        json.loads(entry["message"])["message"]["params"] for entry in driver.get_log("performance")
    ]
    tasks = [
        x for x in events if "tdur" in x and x["name"].endswith("RunTask") and x["pid"] == x["tid"]
    ]
    return [(task["pid"], task["tdur"] / 1e6) for task in tasks]


def test_training_reaches_80_percent_within_5_minutes(show, driver):
    """From the untrained weights, seeds 0 to 2, default settings: the median. And memory, and
    blocks.

    `make playground-seeds` writes what it sees into the CSV file named by TABLE.
    """
    # Figures are read by one script each: every step replaces the elements.
    figure = """return document.querySelector('[data-figure="right"]').textContent"""
    rows, blocks, memory = [], [], 0
    for seed in range(3):
        show("train", more=f"&seed={seed}")
        driver.get_log("performance")
        began, shown = time.monotonic(), ["–", "–"]
        one(driver, "#train_go").click()
        while time.monotonic() - began < 300 and (shown[1] == "–" or float(shown[1]) < 80):
            time.sleep(1)
            shown = re.findall(r"[\d.]+|–", driver.execute_script(figure))
            children = psutil.Process(driver.service.process.pid).children(recursive=True)
            pages = {
                p.pid: p.memory_info().rss for p in children if "--type=renderer" in p.cmdline()
            }
            memory = max(memory, *pages.values())
            # Processor time: the wall clock of a task also counts what else this machine is busy
            # with.
            blocks += [duration for pid, duration in tasks_of(driver) if pid in pages]
        row = dict(seed=seed, right_before=float(shown[0]), steps=progress(driver) // 25 * 25)
        rows.append(row | dict(right=float(shown[1]), seconds=round(time.monotonic() - began, 1)))
    print(f"{rows}; {memory / 1e6:.0f} MB; longest of {len(blocks)} tasks {max(blocks):.3f} s")
    if "TABLE" in os.environ:
        row = dict(memory_mb=round(memory / 1e6), longest_task_ms=round(1e3 * max(blocks)))
        row |= dict(
            load=round(os.getloadavg()[2], 1), machine=machine.processor(), date=time.strftime("%F")
        )
        pd.DataFrame(rows).assign(**row).to_csv(os.environ["TABLE"], index=False)
    assert all(25 < row["right_before"] < 45 for row in rows)  # untrained
    assert np.median([row["seconds"] if row["right"] >= 80 else np.inf for row in rows]) < 300
    assert memory < 1e9 and len(blocks) > 100 and max(blocks) < 0.1


def test_one_worker_and_four_train_alike(show, driver):
    """The draws follow from the seed, and the gradients of all workers are added up."""
    steps = []
    for workers in (1, 4, os.cpu_count()):
        driver.execute_cdp_cmd(
            "Emulation.setHardwareConcurrencyOverride", {"hardwareConcurrency": workers}
        )
        show("clip")
        assert run(driver, "module('pool').COUNT") == min(workers, 4)
        given = dict(
            answers=4, updates=3, epsilon=0.2, beta=0.08, rate=1e-3, seed=5, step=20, steps=200
        )
        step = "await (await pool()).step({...given[0], points: module('rewards').POINTS})"
        steps.append(run(driver, step, given))
    first, second, _ = steps
    assert first["groups"] == second["groups"] and first["questions"] == second["questions"]
    for name in ("loss", "kl", "entropy", "norm", "clipped"):
        # float32 sums in another order
        assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6)
    assert first["norm"] > 0.05
    # The shipped change is of 200 steps of the main script, which had 96 % of these questions at
    # its end.
    right = [
        run(driver, f"(await (await pool()).evaluate('{x}', 0)).right")
        for x in ("start", "trained")
    ]
    # 33.6 % by the main script's sampler; 128 questions give 4 points of noise
    assert 0.25 < right[0] < 0.45 and right[1] > 0.9


def progress(driver):
    return int(one(driver, "#progress").get_attribute("value"))


def go_on_until(driver, step, lang="en"):
    """Trains to a step or a little beyond, and stops."""
    one(driver, "#train_go").click()
    WebDriverWait(driver, 120).until(lambda d: progress(d) >= step)
    one(driver, "#train_go").click()
    kept = {"en": "Kept in this browser", "zh": "存在這個瀏覽器"}[lang]
    WebDriverWait(driver, 60).until(lambda d: kept in one(d, "#train_told").text)


def test_verdicts_name_what_pays(show):
    driver = show("clip")
    looks = dict(right=0.3, form=0.3, length=10, reward=1, kl=0.1)
    after = dict(right=0.4, form=0.1, length=8, reward=1, kl=0.1)
    names = ["format", "tag", "right", "whitespace", "close", "near", "wrong", "number", "token"]
    for points, change, said in (
        (dict(right=3), {}, "right paid, form unpaid, length unpaid"),
        # the wrong ones have more
        (dict(right=1, wrong=3), {}, "right against, form unpaid, length unpaid"),
        (dict(number=1, wrong=1), {}, "right unpaid, form unpaid, length unpaid"),
        (dict(tag=0.5), {}, "right unpaid, form against, length unpaid"),
        # -4 for the tags
        (dict(format=3, tag=-0.5, token=-0.1), {}, "right unpaid, form paid, length paid"),
        (dict(token=1), dict(right=0.39, length=8.1), "form unpaid"),  # too little to say so
        ({}, {}, ""),
    ):
        given = dict.fromkeys(names, 0) | points, looks, after | change
        found = run(driver, "module('verdict').verdict(...given[0])", given)
        told = ", ".join(f"{values['name']} {key}" for key, values in found if "name" in values)
        assert told.replace("verdict_", "") == said, points


def test_a_training_stops_goes_on_and_is_reset(show):
    driver = show("train")
    typed = one(driver, "#points_right")
    driver.execute_script("document.querySelector('#live details').open = true")
    typed.clear()
    typed.send_keys("999", Keys.TAB)  # what counts is what's shown
    assert (
        typed.get_attribute("value") == "10" and address_of(driver)["points"].split("_")[2] == "10"
    )
    Select(one(driver, "#preset")).select_by_value("form")
    assert one(driver, "#points_right").get_attribute("value") == "0"
    turn(driver, "answers", 2)
    go_on_until(driver, 2)
    assert one(driver, "#train_changed").text.endswith(": reward only the form, G 2")
    stopped = progress(driver)
    assert len(find(driver, "#train_group tr")) == 3 and not one(driver, "#answers").is_enabled()
    one(driver, "#tab_answers").click()  # what was trained here answers in the other room
    drawn(driver)
    assert (
        f"{stopped} steps" in one(driver, "#model_own").text
        and one(driver, "#model_own").is_enabled()
    )
    # as a reload does: the training is kept, and goes on as if nothing had been
    visit(driver, "room=train")
    WebDriverWait(driver, 60).until(
        lambda d: progress(d) == stopped and not one(d, "#answers").is_enabled()
    )
    # Weights don't go without a question: by a mission, a reset, or another address.
    one(driver, "#mission_kl").click()
    for name in ("set_1", "train_reset"):
        one(driver, f"#{name}").click()
        alert = WebDriverWait(driver, 20).until(expected_conditions.alert_is_present())
        assert f"{stopped} steps" in alert.text
        alert.dismiss()
        assert progress(driver) == stopped and "mission" not in address_of(driver)
        assert run(driver, "module('train').settings.answers") == 2
    visit(driver, "room=train&lang=en&updates=3")
    WebDriverWait(driver, 20).until(lambda d: f"{stopped} steps" in one(d, "#train_told").text)
    one(driver, "#train_go").click()
    driver.switch_to.alert.dismiss()
    assert progress(driver) == 0
    one(driver, "#train_back").click()
    WebDriverWait(driver, 60).until(lambda d: find(d, "#progress") and progress(d) == stopped)
    logs = []
    for _ in range(2):
        go_on_until(driver, stopped + 2)
        logs.append(run(driver, "module('train').training.log")[: stopped + 2])
        one(driver, "#train_reset").click()
        driver.switch_to.alert.accept()
        WebDriverWait(driver, 60).until(
            lambda d: progress(d) == 0 and one(d, "#answers").is_enabled()
        )
    assert logs[0] == logs[1] and logs[0][-1]["kl"] > 0 and find(driver, "polyline.ghost")
    turn(driver, "answers", 16)  # more than the workers have room for: they are opened anew
    go_on_until(driver, 1)
    assert len(find(driver, "#train_group tr")) == 17


def test_settings_change_on_the_way_and_weights_are_kept_often(show):
    driver = show("train", more="&answers=2")
    go_on_until(driver, 2)
    stopped = progress(driver)
    Select(one(driver, "#preset")).select_by_value("length")
    turn(driver, "beta", 0.3)
    assert f"step {stopped}: reward, step {stopped}: BETA" in one(driver, "#train_changed").text
    assert len(find(driver, ".curves svg")) * 2 == len(find(driver, ".curves .mark"))
    one(driver, "#train_go").click()
    WebDriverWait(driver, 120).until(lambda d: progress(d) >= stopped + 6)
    visit(driver, "room=train&lang=en")  # without a stop
    WebDriverWait(driver, 60).until(lambda d: progress(d) > stopped)
    assert run(driver, "module('train').training.run.beta") == 0.3
    rows, shown = run(driver, "[module('train').training.log, module('train').training.shown]")
    # 0.5 points per token from the change on
    lengths = [row["length"] for row in rows[stopped:]]
    assert [row["reward"] for row in rows[stopped:]] == pytest.approx([0.5 * x for x in lengths])
    assert rows[stopped - 1]["reward"] != 0.5 * rows[stopped - 1]["length"]
    # The colors are those of the pushes.
    at = int(one(driver, '#train_group button[aria-pressed="true"]').text) - 1
    pushes = [x for answer in shown["groups"][at] for x in answer["pushes"]]
    kinds = [x.get_attribute("class") for x in find(driver, "#train_group .pushed")]
    signs = ["likelier" if x > 0 else "rarer" if x < 0 else "" for x in pushes]
    assert [kind.removeprefix("pushed").strip() for kind in kinds] == signs


def test_the_note_on_silent_groups_says_what_was_measured(show):
    driver = show("clip")
    log = [dict(silent=0.1, moved=0.1)] * 10 + [dict(silent=0.95, moved=0.14)] * 10
    told = "module('train').silentTold({log: given[0], run: {beta: given[1]}})"
    for lang in ("en", "zh"):
        visit(driver, f"room=clip&lang={lang}")
        said = run(driver, told, log, 0)
        assert numbers_in(said)[:4] == [10, 95, 0.14, 10]
        assert "0.10" in said and run(driver, told, log, 0.1) == ""
        assert run(driver, told, log[:12], 0) == "" == run(driver, told, log[:10] * 2, 0)


def test_the_mission_says_what_silent_groups_js_measures(show):
    driver = show("train", more="&mission=kl")
    find(driver, "#mission [id^=guess_]")[2].click()
    told = one(driver, "#mission .why").text.partition("In three runs")[2]
    shares = re.findall(r"(\d+) %", told)[:3]
    node = ["node", "--experimental-default-type=module", str(ROOT / "playground/silent_groups.js")]
    found = []
    for change in ("as_it_is", "no_decay", "no_gradient"):
        done = subprocess.run([*node, change], capture_output=True, text=True, check=True)
        found.append(float(re.search(r"([\d.]+) %", done.stdout.splitlines()[-1])[1]))
    # Rounding alone makes another run of it: three standard errors of a share of 128.
    assert [float(x) for x in shares] == pytest.approx(found, abs=300 * (0.25 / 128) ** 0.5)
    assert found[2] - max(found[:2]) > 13


def test_room_4_fits_one_screen(show):
    """1,280 x 800: settings at the left, curves at the right, then the group; a verdict, too."""
    driver = show("train")
    look_like(driver, 1280, 800, phone=False)
    box = lambda selector: one(driver, selector).rect  # noqa: E731
    bottom = lambda selector: sum(box(selector)[x] for x in ("y", "height"))  # noqa: E731
    assert bottom(".turn") <= 800  # before the start, with all settings
    go_on_until(driver, 2)
    before = box(".curves")
    held = "{...module('train').training.heldOut[0], step: 2}"
    run(driver, f"module('train').training.heldOut.push({held})")
    one(driver, "#group_1").click()  # draws anew
    assert one(driver, "#verdict").is_displayed() and box(".curves") == before
    assert box(".turn")["x"] + box(".turn")["width"] <= before["x"] and before["y"] < 300
    assert bottom("#train_group table") <= 800 and box("#learned")["y"] < 800
    assert one(driver, ".curves").text.count("step 25") == 6  # not yet 200


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_on_a_phone_and_on_a_desk(show, room):
    """Widths, keys, and links to chapters; `make test-site` asks axe about colors and sizes."""
    reached = """const all = 'button, a.button, select, summary, input';
    return [...document.querySelectorAll(all)].every(
      (e) => (e.focus(), !e.checkVisibility() || e.disabled || e.matches(':focus')))"""
    for lang in ("en", "zh"):
        driver = show(room, lang=lang)
        if room == "answers":
            drawn(driver)
            find(driver, ".token")[4].click()
        if room == "train":
            go_on_until(driver, 2, lang)
        words = one(driver, "body").text
        assert not [word for word in ("undefined", "{", "NaN", "[object") if word in words]
        assert bool(re.search("[\u4e00-\u9fff]", one(driver, "main").text)) == (lang == "zh")
        links = [a.get_attribute("href") for a in find(driver, "#home, .chapters a")]
        pages = [Path(urlsplit(link).path) for link in links]
        assert len(pages) >= 2 and all(page.is_file() for page in pages)
        assert all(page.stem.endswith("_ch") == (lang == "zh") for page in pages)
        for width in (320, 390, 768, 900, 1400):
            look_like(driver, width, 900, phone=width < 500)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            assert driver.execute_script(reached), width
        if room == "clip":
            look_like(driver, 390, 844, phone=True)
            visit(driver, f"room=clip&lang={lang}")  # three parts are folded
            height = driver.execute_script("return document.documentElement.scrollHeight")
            assert height < 3 * 844 and len(find(driver, ".part[open]")) == 1
            look_like(driver, 1280, 844, phone=False)
            visit(driver, f"room=clip&lang={lang}")
            assert len(find(driver, ".part[open]")) == 4
    one(driver, f"#tab_{room}").send_keys(Keys.ARROW_RIGHT)
    after = ROOMS[(ROOMS.index(room) + 1) % len(ROOMS)]
    WebDriverWait(driver, 20).until(lambda d: find(d, f'#tab_{after}[aria-selected="true"]:focus'))


def test_the_address_holds_what_is_set(show):
    driver = show("grid", more="&theme=dark&walls=11_14&gamma=0.9&alpha=much&epsilon=7")
    world = "module('grid').settings"
    # What is no such number is as if it weren't there.
    assert (
        run(driver, world).items()
        >= dict(walls=[11, 14], gamma=0.9, alpha=0.1, epsilon=0.5).items()
    )
    one(driver, "#cell_11").click()
    turn(driver, "slip", 0.3)
    one(driver, "#language").click()
    assert "暫停" in one(driver, "#grid_run").text  # it runs on
    expected = dict(room="grid", lang="zh", theme="dark", walls="14", gamma="0.9", slip="0.3")
    assert address_of(driver) == expected
    driver.refresh()
    assert address_of(driver) == expected and "網格" in one(driver, "#tab_grid").text
    assert one(driver, "html").get_attribute("data-theme") == "dark"
    for name in ("grid_hundred", "tab_clip", "tab_grid"):
        one(driver, f"#{name}").click()
        time.sleep(0.5)  # the room is drawn anew
    assert (
        run(driver, world)["walls"] == [14] and run(driver, "module('grid').state.episodes") >= 100
    )
    visit(driver, "room=grid&walls=11_11_5.5&speed=2.5")
    assert run(driver, world)["walls"] == [] and run(driver, world)["speed"] == 6
    visit(driver, "room=grid&walls=11_5_11")
    assert run(driver, world)["walls"] == [5, 11]
    visit(driver, "room=clip&step=3.7&passes=2.5&v2=&rewards=1_2_3")
    clip = run(driver, "module('clip').settings")
    assert clip["step"] == 1 and clip["passes"] == 20 and len(clip["rewards"]) == 8
    assert one(driver, "#gae_formula").text.startswith("A(t)")


@pytest.mark.parametrize("room", ROOMS)
def test_missions_set_up_what_they_say(show, room):
    driver, address = show(room), f"room={ROOMS.index(room) + 1}"
    for mission in run(driver, f"module('missions').MISSIONS.{room}"):
        one(driver, f"#mission_{mission['name']}").click()
        assert not find(driver, "#mission .why")
        find(driver, "#mission [id^=guess_]")[mission["right"]].send_keys(Keys.ENTER)
        assert find(driver, "#mission .why .good")
        assert driver.switch_to.active_element.get_attribute("id") == f"guess_{mission['right']}"
        for i, asked in enumerate(mission["sets"]):
            one(driver, f"#set_{i}").click()
            given = dict(parse_qsl(asked), mission=mission["name"]).items()
            WebDriverWait(driver, 20).until(lambda d, given=given: given <= address_of(d).items())
        visit(driver, f"{address}&mission={mission['name']}")  # a chapter's shorter link
        assert dict(parse_qsl(mission["sets"][0])).items() <= address_of(driver).items()


@pytest.mark.parametrize("figure", ["crawl", "noise", "clip", "passes", "group", "gae"])
def test_a_figure_stands_alone_in_a_page(show, figure, tmp_path):
    driver, outer = show("clip"), tmp_path / "page.html"
    script = (
        "<script>addEventListener('message', ({data}) => { "
        "document.title = data.playground })</script>"
    )
    outer.write_text(f"<iframe src='{PAGE.as_uri()}#figure={figure}' width=300></iframe>{script}")
    driver.get(outer.as_uri())
    WebDriverWait(driver, 20).until(lambda d: d.title.isdigit() and int(d.title) > 150)
    driver.switch_to.frame(0)
    assert find(driver, "main svg") and not find(driver, "header, footer, .missions, [role=tab]")
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
