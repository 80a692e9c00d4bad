"""playground.html in a real browser: `make test-browser`. Needs Debian's chromium and chromium-driver.

The engine's numbers are compared with MaxText's model and the main script's own loss under JAX, its rewards
with reward_func.py. The training is the page's own, through its buttons.
"""

import base64
import csv
import dataclasses
import functools
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax
import psutil
import pytest
from chromium import contrast, find, look_like, one, started
from flax import nnx
from folders import load
from hostile import HOSTILE
from scipy import stats
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from table_policy import as_batch, model_of

import grpo_llama3_1_8b_demo as demo
import grpo_variants
import reward_func
import settings
from model import llama
from model.log_probs import log_probs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "5_GRPO_Maxtext/assets/playground.html"
ROOMS = ("grid", "clip", "answers", "train")
WIDTHS = {"phone": (390, 844), "desk": (1280, 900)}
NARROW_TO_WIDE = (320, 390, 768, 900, 1400)
P, T = 28, 28  # tokens of a prompt and of an answer
BETA = 0.08
REWARDS = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")


@pytest.fixture(scope="module")
def driver():
    driver = started("performance", perfLoggingPrefs={"traceCategories": "toplevel"})
    driver.set_script_timeout(600)
    yield driver
    driver.quit()


@pytest.fixture
def show(driver):
    """Opens a room at a size, in a colour scheme and a language; at the end the browser has no complaint."""

    def show(room, size="desk", scheme="light", lang="en", more=""):
        look_like(driver, *WIDTHS[size], phone=size == "phone", scheme=scheme)
        # Another page of the same origin: it forgets what was kept, and the next address is loaded anew.
        driver.get((ROOT / "LICENSE").as_uri())
        forget = "indexedDB.deleteDatabase('grpo-playground').onsuccess = arguments[0]"
        driver.execute_async_script(forget)
        return visit(driver, f"room={ROOMS.index(room) + 1}&lang={lang}{more}")

    yield show
    assert not driver.get_log("browser")


def visit(driver, address):
    """Loads the page anew at an address, as a link from a chapter would."""
    driver.get("about:blank")
    driver.get(f"{PAGE.as_uri()}#{address}")
    WebDriverWait(driver, 60).until(lambda d: find(d, "#room > *"))
    return driver


def address_of(driver):
    return dict(parse_qsl(urlsplit(driver.current_url).fragment))


def numbers_in(text):
    return [float(x.replace("−", "-")) for x in re.findall(r"[+−]?\d+(?:\.\d+)?", text)]


def turn(driver, name, value):
    """Moves a slider as a reader would."""
    script = "const s = arguments[0]; s.value = arguments[1]; s.dispatchEvent(new Event('input'))"
    driver.execute_script(script, one(driver, f"#{name}"), value)


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
    return run(
        driver,
        f"await (await pool()).ask(given[0], given[1]).then((x) => ({then}))",
        task,
        given,
    )


# --- the engine against JAX


@pytest.fixture(scope="module")
def questions():
    """Token ids of held-out questions, with begin and end marks, and their gold numbers."""
    tokenizer = llama.load_tokenizer(settings.HERE / "tiny_llama")
    rows = [json.loads(line) for line in (settings.HERE / "tiny_gsm8k/validation.jsonl").open()]
    return [
        (
            [1, *tokenizer(row["question"], add_special_tokens=False)["input_ids"], 4],
            row["answer"].split("#### ")[1],
        )
        for row in rows
    ]


@pytest.fixture(scope="module")
def maxtext():
    """The tiny Llama as the main script loads it, its mesh, and the constants."""
    c = settings.read(demo.Constants, ["BATCH_SIZE=2", "NUM_GENERATIONS=4"])
    folder, hf = llama.load_hf_config(c.MODEL)
    model, mesh = llama.load_llama(folder, hf, llama.to_run_config(c, hf), pad_id=0)
    return model, mesh, c


def padded(prompts, answers):
    """int32 [N, P] left-padded, int32 [N, T] right-padded."""
    left, right = np.zeros((len(prompts), P), np.int32), np.zeros((len(answers), T), np.int32)
    for row, prompt in zip(left, prompts, strict=True):
        row[P - len(prompt) :] = prompt
    for row, answer in zip(right, answers, strict=True):
        row[: len(answer)] = answer
    return left, right


def logits_under_jax(maxtext, prompts, answers):
    """Logits [N, T, V]: those at t follow the prompt and t tokens of the answer."""
    model, mesh, _ = maxtext
    graphdef, state = nnx.split(model)

    @jax.jit
    def logits(state, *tokens):
        return log_probs(nnx.merge(graphdef, state, copy=True), *tokens, pad_id=0, temperature=1.0)[1]

    with mesh:
        return np.asarray(logits(state, *padded(prompts, answers)))


def test_logits_equal_jaxs_on_fifty_prompts(show, questions, maxtext):
    driver = show("clip")
    random = np.random.default_rng(0)
    prompts = [tokens for tokens, _ in questions[:50]]
    answers = [random.integers(5, 76, length).tolist() for length in random.integers(0, T, 50)]
    expected = logits_under_jax(maxtext, prompts, answers)  # [N, T, V]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for t in {0, len(answer)}:
            logits = ask(driver, "logits", model="start", tokens=prompt + answer[:t])
            np.testing.assert_allclose(logits, expected[i, t], rtol=0, atol=1e-4)  # the issue's own bound
    assert np.abs(expected).max() > 5  # else 1e-4 would say little


def test_drawn_tokens_have_the_policys_frequencies(show, questions, maxtext):
    """Of 12,000 answers to one question, the token after each frequent beginning: chi-square."""
    driver = show("clip")
    prompt = questions[2][0]
    counts = {}
    for seed in range(120):
        drawn = ask(
            driver, "draw", "x.map((answer) => answer.tokens)", model="start", tokens=prompt[1:-1],
            answers=100, sampling={"temperature": 1, "topK": 76, "topP": 1}, seed=seed,
        )  # fmt: skip
        for tokens in drawn:
            for t in range(len(tokens)):
                counts.setdefault(tuple(tokens[:t]), np.zeros(76))[tokens[t]] += 1
    frequent = [beginning for beginning, seen in counts.items() if seen.sum() > 1000]
    logits = logits_under_jax(maxtext, [prompt] * len(frequent), frequent)  # [N, T, V]
    undecided = 0
    for beginning, of_answer in zip(frequent, logits, strict=True):
        policy = np.exp(of_answer[len(beginning)].astype(float))
        policy[0] = 0  # padding: the main script's sampler never draws it either
        seen, expected = counts[beginning], policy / policy.sum() * counts[beginning].sum()
        order = np.argsort(-expected)
        classes = max(
            1, (expected >= 5).sum() - 1
        )  # chi-square wants 5 or more; the last class takes the rare ones
        groups = [order[i : i + 1] for i in range(classes)] + [order[classes:]]
        seen, expected = ([x[group].sum() for group in groups] for x in (seen, expected))
        if expected[-1] < 5:
            continue  # the policy is certain: nothing to count
        undecided += 1
        # 1e-4: some ten beginnings are tested, with fixed seeds; temperature 0.9 is found out
        assert stats.chisquare(seen, expected).pvalue > 1e-4, (beginning, seen, expected)
    assert undecided >= 3


def flat_gradient(gradient, layers=3):
    """The gradient of a MaxText model as the page lays it out; MaxText interleaves the halves of a head."""
    tree = gradient["base"]
    decoder = tree["decoder"]

    def halves(kernel):  # [96, heads, 24]: columns 0, 2, 4 .. are the first half
        return np.concatenate([kernel[..., 0::2], kernel[..., 1::2]], axis=-1).reshape(96, -1)

    parts = [tree["token_embedder"]["embedding"]]
    for layer in (decoder[f"layers_{i}"] for i in range(layers)):
        attention, mlp = layer["self_attention"], layer["mlp"]
        parts += [
            layer["pre_self_attention_layer_norm"]["scale"],
            np.concatenate([halves(attention["query"]["kernel"]), halves(attention["key"]["kernel"]),
                            np.reshape(attention["value"]["kernel"], (96, -1))], axis=1),
            np.reshape(attention["out"]["kernel"], (96, 96)),
            layer["post_self_attention_layer_norm"]["scale"],
            np.concatenate([mlp["wi_0"]["kernel"], mlp["wi_1"]["kernel"]], axis=1),
            mlp["wo"]["kernel"],
        ]  # fmt: skip
    parts += [decoder["decoder_norm"]["scale"], np.pad(decoder["logits_dense"]["kernel"], ((0, 0), (0, 4)))]
    return np.concatenate([np.ravel(part) for part in parts])


def test_loss_and_gradient_of_a_step_equal_jaxs(show, questions, maxtext):
    """The main script's own `grpo_loss`, of answers that a policy away from its reference is trained on."""
    driver = show("clip")
    model, mesh, c = maxtext
    random = np.random.default_rng(1)
    prompts = [tokens for tokens, _ in questions[:2]]
    answers = [[[*random.integers(5, 76, n).tolist(), 2] for n in random.integers(0, 20, 4)] for _ in prompts]
    answers[0][0] = [2]  # ends at once: its only token is drawn from the prompt's last row
    flat = [answer for group in answers for answer in group]
    advantages = random.normal(size=(2, 4)).astype(np.float32)

    tokens = padded([prompt for prompt in prompts for _ in range(4)], flat)
    params, policy = model_of(c, model, temperature=1.0)
    policy = dataclasses.replace(policy, mesh=mesh)
    moved = jax.tree.map(lambda w: w * jnp.float32(1.02), params)
    with mesh:
        reference, _ = log_probs(model, *tokens, pad_id=0, temperature=1.0)
    mask = np.asarray(tokens[1]) != 0
    batch = as_batch(dict(
        prompt_ids=tokens[0], completion_ids=tokens[1], mask=mask, advantage=advantages.reshape(8, 1),
        weight=demo.mean_of_answers(mask.reshape(2, 4, T)).reshape(8, T), beta=np.full((8, 1), BETA),
        sampler_log_prob=np.zeros((8, T)), ref_log_prob=reference,
    ))  # fmt: skip
    # AdamW with a gradient of 0 and a rate of -0.2 multiplies every weight by 1 + 0.2 * WEIGHT_DECAY.
    ask(driver, "reset")
    still = "{gradient: new Float32Array(module('model').SIZE), rate: -0.2}"
    run(driver, f"await (await pool()).ask('apply', {still})")
    for old in (
        None,
        np.asarray(reference),
    ):  # drawn by these weights; drawn by the start's, so ratios differ
        given = dict(model=policy, batch=batch._replace(old_log_prob=old))
        loss = functools.partial(demo.loss, use=grpo_variants.choose(c, demo.TABLES), **given)
        (expected, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(moved)
        olds = old is not None and iter([row[m].tolist() for row, m in zip(old, mask, strict=True)])
        given = [
            {"tokens": p, "answers": a, "advantages": r.tolist(), "old": olds and [next(olds) for _ in a]}
            for p, a, r in zip(prompts, answers, advantages, strict=True)
        ]
        given = dict(
            prompts=[row if olds else row | {"old": None} for row in given], epsilon=c.EPSILON, count=8
        )
        found = ask(driver, "loss", "({...x.figures, gradient: Array.from(x.gradient)})", beta=BETA, **given)
        expected_gradient = flat_gradient(gradient)
        assert found["loss"] == pytest.approx(float(expected), abs=1e-4)
        np.testing.assert_allclose(found["gradient"], expected_gradient, rtol=0, atol=1e-4)
        assert found["kl"] > 1 and np.abs(expected_gradient).max() > 0.1  # else 1e-4 would say little
        assert (found["clipped"] > 0) == (old is not None)
        assert ask(driver, "loss", "x.figures.kl", beta=0, **given) == found["kl"]
    ask(driver, "reset")


def test_the_update_equals_optaxs(show):
    """Schedule, clip and AdamW, as `make_optimizer` of the main script chains them."""
    driver = show("clip")
    c = settings.read(demo.Constants, ["NUM_BATCHES=200", "NUM_ITERATIONS=1", "LEARNING_RATE=1e-3"])
    optimizer = demo.make_optimizer(c)
    random = np.random.default_rng(2)
    weights = random.normal(size=7).astype(np.float32)
    gradients = random.normal(size=(30, 7)).astype(np.float32) * np.geomspace(0.01, 3, 30)[:, None]
    state, expected = optimizer.init(weights), jnp.asarray(weights)
    for gradient in gradients.astype(np.float32):
        changes, state = optimizer.update(jnp.asarray(gradient), state, expected)
        expected = optax.apply_updates(expected, changes)
    found = run(driver, """(() => {
        const { createOptimizer, learningRate } = module("grpo");
        const update = createOptimizer(7), w = Float32Array.from(given[0]);
        given[1].forEach((g, step) => update(w, Float32Array.from(g), learningRate(1e-3, step, 200)));
        return Array.from(w);
    })()""", weights.tolist(), gradients.astype(np.float32).tolist())  # fmt: skip
    assert np.abs(np.asarray(expected) - weights).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)  # float32 against float64 inside
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, 200)
    rates = run(
        driver, "Array.from({length: 200}, (_, step) => module('grpo').learningRate(1e-3, step, 200))"
    )
    np.testing.assert_allclose(rates, [schedule(step) for step in range(200)], rtol=0, atol=1e-9)


def random_texts(count):
    """Answers of the 76 tokens, many of them nearly right."""
    words = load_vocabulary()
    random = np.random.default_rng(3)
    numbers = "7;18;1,080;08;7.;.5;-7;- 7;6+1=7;8-6=2,2+5=7;+7;3*6;7 = 7;7-;0".split(";")
    frames = [
        "<reasoning>{}</reasoning><answer>{}</answer>", "<reasoning>{}<answer>{}</answer>",
        "{}</reasoning><answer>{}", "<reasoning>{}</reasoning> <answer> {}</answer> ", "{}{}",
        "<answer>{}</answer><answer>{}</answer>",
    ]  # fmt: skip

    def piece():
        kind = random.integers(4)
        if kind == 0:
            return str(random.choice(numbers))
        pool = (
            words[5:] if kind == 1 else [*"0123456789+-*=,. "] if kind == 2 else [*"0123456789", *words[9:52]]
        )
        return "".join(random.choice(pool, random.integers(0, 6)))

    return [str(random.choice(frames)).format(piece(), piece()) for _ in range(count)]


def load_vocabulary():
    words = json.loads((settings.HERE / "tiny_llama/tokenizer.json").read_text())["model"]["vocab"]
    return sorted(words, key=words.get)


def test_points_equal_reward_funcs(show):
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


def test_tokens_equal_the_tokenizers(show):
    driver = show("clip")
    tokenizer = llama.load_tokenizer(settings.HERE / "tiny_llama")
    texts = [
        *random_texts(200),
        *(json.loads(line)["question"] for line in (settings.HERE / "tiny_gsm8k/test.jsonl").open()),
    ]
    texts += ["Zoe has 3 <b>apples</b>.", " Kim  has", "twice\tas many", "<|eot_id|>", ""]
    found = run(
        driver,
        "given[0].map((text) => module('tokenizer').pieces(text, module('pool').VOCABULARY_WORDS)"
        ".map(({token}) => token ?? 3))",
        texts,
    )
    for text, ids in zip(texts, found, strict=True):
        if "<|" not in text:  # a mark of the conversation is no text: typed in, its signs are unknown
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"], text
    assert set(found[texts.index("<|eot_id|>")]) == {3}


# --- what the other rooms compute


def value_iteration(gamma, slip=0.0, walls=()):
    """q* [16, 4] by the rules of chapter 1's world, here with walls and slippery ground."""
    grid, script = load("1_Q_Learning", "grid"), load("1_Q_Learning", "Q_Learning")
    q = np.zeros((16, 4))
    for _ in range(3000):
        for cell in set(range(15)) - set(walls):
            for action in range(4):
                sides = [(action // 2 * 2 + 2) % 4, (action // 2 * 2 + 3) % 4]
                value = 0.0
                for p, a in ((1 - slip, action), *((slip / 2, side) for side in sides)):
                    after, reward, terminated = grid.step(script.Constants(), cell, a)
                    after, reward = (cell, -1) if after in walls else (after, reward)
                    value += p * (reward + gamma * (1 - terminated) * q[after].max())
                q[cell, action] = value
    return q


def test_the_optimum_and_the_right_moves_equal_chapter_1s(show):
    driver = show("grid", more="&epsilon=0.8&speed=1000")
    grid, script = load("1_Q_Learning", "grid"), load("1_Q_Learning", "Q_Learning")
    for gamma in (0.99, 0.5, 1.0):
        expected = grid.value_iteration(script.Constants(GAMMA=gamma))
        found = run(driver, "module('grid').optimum(given[0], 0)", gamma)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    for more, slip, walls in (("", 0.0, ()), ("&slip=0.4&walls=5_10", 0.4, (5, 10))):
        visit(driver, f"room=1&epsilon=0.8{more}")
        best = value_iteration(0.99, slip, walls)
        shown = np.array(run(driver, "module('grid').optimum(0.99, given[0])", slip))
        cells = [cell for cell in range(15) if cell not in walls]
        np.testing.assert_allclose(shown[cells], best[cells], rtol=0, atol=1e-6)
        seen = []
        for _ in range(3):
            one(driver, "#grid_run").click() if "Pause" in one(driver, "#grid_run").text else None
            q = np.array(run(driver, "module('grid').state.Q"))
            right = [np.isin(np.flatnonzero(q[c] == q[c].max()), np.flatnonzero(best[c] > best[c].max() - 1e-6)).all()
                     for c in cells]  # fmt: skip
            seen.append(sum(right))
            assert numbers_in(one(driver, "#grid_right b").text) == [seen[-1], len(cells)]
            assert len(find(driver, "#board .arrow")) == sum(
                n for c in cells if (n := (q[c] > q[c].max() - 1e-9).sum()) < 4
            )
            one(driver, "#grid_hundred").click()
        assert seen[-1] > seen[0]
    visit(driver, "room=1&walls=11_14&gamma=1&slip=0.3")  # no way to the goal, and no discount
    assert "−∞" in one(driver, ".optimum").text and "no move is right" in one(driver, "#grid_right").text
    one(driver, "#grid_hundred").click()
    inside = """return [...document.querySelectorAll('#board svg')].every((cell) => { const of = cell.getBoundingClientRect();
      const agent = cell.querySelector('.agent')?.getBoundingClientRect();
      return [...cell.querySelectorAll('text')].every((text) => { const r = text.getBoundingClientRect();
        return r.left >= of.left && r.right <= of.right
          && !(agent && r.right > agent.left && r.left < agent.right && r.bottom > agent.top && r.top < agent.bottom); }); })"""
    assert driver.execute_script(inside)  # no number is clipped, and the dot covers none


def test_a_move_on_the_grid_is_q_learnings_update(show):
    driver = show("grid")
    one(driver, "#grid_run").click()  # it runs by itself: stop
    one(driver, "#grid_reset").click()
    for _ in range(30):
        one(driver, "#grid_step").click()
        filled = one(driver, "#grid_formula").text.splitlines()[1].replace("−", "-")
        before, alpha, reward, gamma, future, again, after = map(
            float, re.sub(r"[()=+·]| - ", " ", filled.split("← ")[1]).split()
        )
        assert before == again
        assert after == pytest.approx(
            before + alpha * (reward + gamma * future - before), abs=0.011
        )  # two decimals are shown
    one(driver, "#predict").click()
    one(driver, "#grid_step").click()
    assert one(driver, "#grid_formula").text.splitlines()[1].endswith("= ?")
    assert not one(driver, "#grid_step").is_enabled()
    find(driver, "#guess button")[0].send_keys(Keys.ENTER)
    assert driver.switch_to.active_element == one(driver, "#grid_step")  # not lost with the button
    assert not one(driver, "#grid_formula").text.splitlines()[1].endswith("= ?")
    one(driver, "#grid_hundred").click()
    assert re.search(r"10[01] episodes", one(driver, "#grid_told").text)
    cell = find(driver, "#board button")[5]
    cell.click()
    assert "wall" in cell.get_attribute("aria-label")


def test_clip_and_advantages_equal_the_main_scripts(show):
    driver = show("clip")
    for ratio in (0.3, 0.8, 1.0, 1.15, 1.35, 2.0):
        for advantage in (-2.0, -0.5, 0.0, 1.0):
            for epsilon in (0.1, 0.2, 0.5):
                found = run(
                    driver, "module('grpo').clippedObjective(...given[0])", [ratio, advantage, epsilon]
                )

                def objective(r, A=advantage, epsilon=epsilon):
                    given = SimpleNamespace(old_log_prob=0.0, advantage=A)
                    c = SimpleNamespace(EPSILON=epsilon)
                    return demo.clipped_objective(SimpleNamespace(log_prob=jnp.log(r)), given, c)[0]

                assert found["value"] == pytest.approx(float(objective(ratio)), abs=1e-6)
                if (
                    min(abs(ratio - 1 - epsilon), abs(ratio - 1 + epsilon)) > 1e-6
                ):  # at a corner there are two slopes
                    assert found["slope"] == pytest.approx(float(jax.grad(objective)(ratio)), abs=1e-6)
    rewards = np.array([4, 5.5, 9.5, 5.5, 5.5, 0, 0, 0])
    expected = {
        "GRPO": demo.group_advantage(SimpleNamespace(rewards=rewards[None]))[0],
        "Dr. GRPO": rewards - rewards.mean(),
        "RLOO": grpo_variants.leave_one_out_advantage(SimpleNamespace(rewards=rewards[None]))[0],
        "MaxRL": rewards / rewards.mean() - 1,
    }
    for card in find(driver, "#methods .card"):
        values = [
            float(x) for x in card.find_element(By.CSS_SELECTOR, ".values").text.replace("−", "-").split()
        ]
        np.testing.assert_allclose(
            values, expected[card.get_attribute("data-method")], atol=0.0051
        )  # two decimals
    find(driver, ".controls button")[3].click()  # all equal
    assert "teaches nothing" in one(driver, "#group_told").text


def test_updates_on_one_batch_equal_jaxs(show):
    """The figure of the lucky draw: gradient ascent on the main script's objective, by jax.grad."""
    driver = show("clip")
    worth, old = np.array([1, 0.6, 0.2]), np.array([0.6, 0.3, 0.1])
    action = np.array([0, 0, 0, 0, 0, 1, 1, 2])
    for clip, beta, lucky in (("on", 0, 3), ("off", 0, 3), ("off", 1, 3), ("on", 0.5, 0.2)):
        reward = np.array([0.9, 1.1, 0.7, 1.2, 0.8, 0.5, 0.6, lucky])
        c = SimpleNamespace(EPSILON=0.2 if clip == "on" else 1e9)
        given = SimpleNamespace(old_log_prob=jnp.log(old)[action], advantage=reward - reward.mean())

        def objective(logits, c=c, given=given, beta=beta):
            log = jax.nn.log_softmax(logits)
            kl = (jnp.exp(log) * (log - jnp.log(old))).sum()
            return (
                demo.clipped_objective(SimpleNamespace(log_prob=log[action]), given, c)[0].mean() - beta * kl
            )

        logits, slope = jnp.log(old), jax.jit(jax.grad(objective))
        for _ in range(20):
            logits += slope(logits)
        policy = np.asarray(jax.nn.softmax(logits))
        promised = (policy[action] / old[action] * given.advantage).mean()
        visit(driver, f"room=2&clip={clip}&beta={beta}&lucky={lucky}")
        shown = numbers_in(one(driver, "#passes_told").text)
        assert shown[:2] == pytest.approx([promised, (policy - old) @ worth], abs=0.0051)
    assert one(driver, "#clip_on").is_selected()


def test_gae_equals_chapter_3s(show):
    driver = show("clip")
    reward, value = np.array([0.0, 1, 0, 1, 0, 1, 0, 5]), np.array([6.0, 5, 6, 7, 6, 4, 2, 3])
    ended = np.arange(8) == 7
    for gae_lambda, gamma, v2 in ((0.5, 1, 5), (0, 0.9, 10), (1, 1, 10)):
        value[1] = v2
        given = (reward, value, np.append(value[1:], 0), ended, np.zeros(8, bool))
        expected = load("3_Pendulum", "ppo").gae(*(x[None] for x in given), gamma, gae_lambda)[0]
        turn(driver, "lambda", gae_lambda), turn(driver, "gae_gamma", gamma), turn(driver, "v2", v2)
        for step in (1, 4, 8):
            one(driver, f"#gae_step_{step}").click()
            shown = numbers_in(one(driver, "#gae_formula").text.splitlines()[1].split("= ")[-1])
            assert shown == [pytest.approx(float(expected[step - 1]), abs=0.00051)]


# --- eight answers


def drawn(driver):
    WebDriverWait(driver, 60).until(lambda d: one(d, "#eight_told").is_displayed())
    return find(driver, "#cards article")


def test_eight_answers_have_points_advantages_and_alternatives(show):
    driver = show("answers")
    cards = drawn(driver)
    assert len(cards) == 8
    gold = one(driver, "#gold").get_attribute("value")
    rewards, shown = [], []
    for card in cards:
        text = "".join(
            token.get_property("textContent") for token in card.find_elements(By.CSS_SELECTOR, ".token")
        ).removesuffix("■")
        points = [
            float(cell.text.replace("−", "-")) for cell in card.find_elements(By.CSS_SELECTOR, "td.number")
        ]
        given = dict(prompts=[text], completions=[text], answer=[gold])
        expected = [getattr(reward_func, name)(**given)[0] for name in REWARDS]
        assert points[:4] == expected and points[4] == sum(expected)
        rewards.append(points[4])
        shown.append(points[5])
    expected = demo.group_advantage(SimpleNamespace(rewards=np.array(rewards).reshape(-1, 8)))
    np.testing.assert_allclose(shown, expected.ravel(), atol=0.0051)
    token = find(driver, ".token")[3]
    token.click()
    shares = [float(x.text.split(" %")[0]) for x in find(driver, "#other .share")]
    rest = float(re.search(r"share ([\d.]+) %", one(driver, "#other").text)[1])
    assert shares == sorted(shares, reverse=True) and sum(shares) + rest == pytest.approx(100, abs=1)
    assert one(driver, "#other .taken").text == one(
        driver, '.token[aria-pressed="true"]'
    ).text.strip().replace(" ", "␣")


def test_answers_belong_to_their_question(show):
    driver = show("answers")
    drawn(driver)
    other = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
    box, gold = one(driver, "#question_text"), one(driver, "#gold")
    box.clear()
    box.send_keys(other)
    assert not find(driver, "#cards article") and gold.get_attribute("value") == ""
    assert Select(one(driver, "#question")).first_selected_option.text == "(my own)"
    gold.send_keys("7", Keys.ENTER)
    assert len(drawn(driver)) == 8
    assert address_of(driver)["question"] == other and address_of(driver)["gold"] == "7"
    visit(driver, urlsplit(driver.current_url).fragment)
    assert len(drawn(driver)) == 8 and one(driver, "#question_text").get_attribute("value") == other
    cases = {
        "<reasoning>40+8=48</reasoning><answer>48</answer>": "right", "<reasoning>40+8=48</reasoning>48</answer>": "untagged",
        "<answer>48</answer>": "untagged", "<reasoning>48</reasoning><answer>21</answer>": "wrong",
        "<reasoning>48</reasoning>21": "wrong", "<reasoning></reasoning>": "none", "": "none",
    }  # fmt: skip
    judged = "given[0].map((text) => module('rewards').judged(text, '48'))"
    assert run(driver, judged, list(cases)) == list(cases.values())


def test_the_trained_weights_answer_better(show, questions):
    """The shipped change is of 200 steps of the main script, which had 96 % of these questions at its end."""
    driver = show("train")
    right = {
        model: run(driver, f"(await (await pool()).evaluate('{model}', 0)).right")
        for model in ("start", "trained")
    }
    assert (
        0.25 < right["start"] < 0.45
    )  # 33.6 % by the main script's sampler; 128 questions give 4 points of noise
    assert right["trained"] > 0.9


def test_what_a_browser_lacks_is_said(show, driver, tmp_path):
    """A page whose WebAssembly program no browser takes: as where SIMD is missing."""
    broken = tmp_path / "broken.html"
    broken.write_text(re.sub(r'"wasm": "AGFzbQ', '"wasm": "AAAAAA', PAGE.read_text()))
    show("clip")
    driver.get(f"{broken.as_uri()}#answers")
    WebDriverWait(driver, 60).until(lambda d: "needs WebAssembly with SIMD" in one(d, "#known").text)
    one(driver, "#tab_train").click()
    one(driver, "#train_go").click()
    WebDriverWait(driver, 60).until(lambda d: "needs WebAssembly with SIMD" in one(d, "#train_told").text)


def test_a_hostile_question_is_text(show):
    driver = show("answers")
    drawn(driver)
    tags = "return [...new Set([...document.querySelectorAll('*')].map((e) => e.tagName))].sort()"
    harmless = set(driver.execute_script(tags))
    for hostile in HOSTILE:
        # As JSON: WebDriver itself refuses a lone surrogate.
        script = (
            "const e = arguments[0]; e.value = JSON.parse(arguments[1]); e.dispatchEvent(new Event('input'))"
        )
        driver.execute_script(script, one(driver, "#question_text"), json.dumps(hostile))
        assert not one(driver, "#draw").is_enabled() or hostile.isspace()
        assert set(driver.execute_script(tags)) <= harmless | {"BR"}
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert driver.execute_script("return window.hacked") is None
    kim = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
    for typed, answer, said in (
        (kim, "7", ""), ("", "7", "Type a question"), ("Zoe has 8 cards.", "7", "underlined"),
        (f"{kim} {kim}", "7", "at most 28"), (kim, "", "whole number"),
    ):  # fmt: skip
        for name, value in (("question_text", typed), ("gold", answer)):
            driver.execute_script(script, one(driver, f"#{name}"), json.dumps(value))
        assert said in one(driver, "#known").text and one(driver, "#draw").is_enabled() == (said == "")


# --- training


def trace_of(driver):
    """Since the last call: processor seconds of each task of a main thread, and the addresses asked for."""
    tasks, addresses = [], []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        event = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            addresses.append(event["request"]["url"])
        if "tdur" in event and event["name"].endswith("RunTask") and event["pid"] == event["tid"]:
            tasks.append((event["pid"], event["tdur"] / 1e6))
    return tasks, addresses


def renderers(driver):
    """Processes that show pages: {pid: bytes of memory}."""
    children = psutil.Process(driver.service.process.pid).children(recursive=True)
    return {p.pid: p.memory_info().rss for p in children if "--type=renderer" in p.cmdline()}


def test_nothing_leaves_the_page(show, driver):
    driver.get_log("performance")
    for room in ROOMS:
        show(room)
        if room == "answers":
            drawn(driver)
    one(driver, "#train_go").click()
    WebDriverWait(driver, 120).until(lambda d: int(one(d, "#progress").get_attribute("value")) >= 2)
    _, addresses = trace_of(driver)
    assert len(addresses) >= 4
    # A worker is a blob of the page's own, and the icon is empty.
    elsewhere = [
        x for x in addresses if not x.startswith((PAGE.as_uri(), "about:blank", "blob:null/", "data:,"))
    ]
    assert not elsewhere


def test_training_reaches_80_percent_within_5_minutes(show, driver):
    """From the untrained weights, seeds 0 to 2, default settings: the median. And memory, and blocks.

    `make playground-seeds` writes what it sees into the CSV file named by TABLE.
    """
    # Figures are read by one script each: every step replaces the elements.
    figure = """return document.querySelector('[data-figure="right"]').textContent"""
    rows, blocks, memory = [], [], 0
    for seed in range(3):
        show("train")
        turn(driver, "seed", seed)
        driver.get_log("performance")
        began, shown = time.monotonic(), ["–", "–"]
        one(driver, "#train_go").click()
        while time.monotonic() - began < 300 and (shown[1] == "–" or float(shown[1]) < 80):
            time.sleep(1)
            shown = driver.execute_script(figure).replace(" %", "").split(": ")[1].split(" → ")
            pages = renderers(driver)
            memory = max(memory, *pages.values())
            # Processor time: the wall clock of a task also counts what else this machine is busy with.
            blocks += [duration for pid, duration in trace_of(driver)[0] if pid in pages]
        seconds = round(time.monotonic() - began, 1)
        steps = int(one(driver, "#progress").get_attribute("value")) // 25 * 25  # asked every 25 steps
        rows.append(
            dict(seed=seed, right_before=float(shown[0]), steps=steps, right=float(shown[1]), seconds=seconds)
        )
    print(f"{rows}; {memory / 1e6:.0f} MB; longest of {len(blocks)} tasks {max(blocks):.3f} s")
    if "TABLE" in os.environ:
        row = dict(memory_mb=round(memory / 1e6), longest_task_ms=round(1e3 * max(blocks)))
        row |= dict(load=round(os.getloadavg()[2], 1), machine=machine.processor(), date=time.strftime("%F"))
        with open(os.environ["TABLE"], "w", newline="") as file:
            table = csv.DictWriter(file, [*rows[0], *row], lineterminator="\n")
            table.writeheader()
            table.writerows(seen | row for seen in rows)
    assert all(25 < row["right_before"] < 45 for row in rows)  # untrained
    assert np.median([row["seconds"] if row["right"] >= 80 else np.inf for row in rows]) < 300
    assert memory < 1e9
    assert len(blocks) > 100 and max(blocks) < 0.1


def test_one_worker_and_four_train_alike(show, driver):
    """The draws follow from the seed, and the gradients of all workers are added up."""
    steps = []
    for workers in (1, 4):
        driver.execute_cdp_cmd("Emulation.setHardwareConcurrencyOverride", {"hardwareConcurrency": workers})
        show("clip")
        assert run(driver, "module('pool').COUNT") == workers
        points = "points: module('rewards').POINTS"
        given = f"{{answers: 4, updates: 3, epsilon: 0.2, beta: 0.08, rate: 1e-3, {points}, seed: 5, step: 20, steps: 200}}"
        steps.append(run(driver, f"await (await pool()).step({given})"))
    driver.execute_cdp_cmd(
        "Emulation.setHardwareConcurrencyOverride", {"hardwareConcurrency": os.cpu_count()}
    )
    first, second = steps
    assert first["groups"] == second["groups"] and first["questions"] == second["questions"]
    for name in ("loss", "kl", "entropy", "norm", "clipped"):
        # float32 sums in another order
        assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6)
    assert first["norm"] > 0.05


def go_on_until(driver, step):
    """Trains to a step or a little beyond, and stops."""
    one(driver, "#train_go").click()
    reached = lambda d: int(one(d, "#progress").get_attribute("value")) >= step  # noqa: E731
    WebDriverWait(driver, 120).until(reached)
    one(driver, "#train_go").click()
    WebDriverWait(driver, 60).until(lambda d: run(d, "!module('train').training.running && 1"))
    WebDriverWait(driver, 60).until(lambda d: "Kept in this browser" in one(d, "#train_told").text)


def test_a_verdict_names_only_what_pays_and_what_moved(show):
    """What pays is asked of the reward itself: the same answer, once with and once without."""
    driver = show("clip")
    random = np.random.default_rng(5)
    form, bare = "<reasoning>7</reasoning><answer>{}</answer>", "{}"
    pairs = {
        "right": (form.format(7), form.format(70), 9, 9),
        "form": (form.format(70), bare.format(70), 9, 9),
    }
    pairs["length"] = (form.format(7), form.format(7), 20, 10)
    kinds = set()
    for _ in range(300):
        names = "format tag right whitespace close near wrong number token".split()
        points = dict(zip(names, random.choice([0, 0, 0.5, 3, -1], 9).tolist(), strict=True))
        points["wrong"] = 0 if random.integers(2) else points["wrong"]
        before, after = (
            dict(right=random.random(), form=random.random(), length=28 * random.random(), reward=random.normal(), kl=random.random())
            for _ in range(2)
        )  # fmt: skip
        said = run(driver, "module('verdict').verdict(...given)", points, before, after)
        for name, (first, second, m, n) in pairs.items():
            total = "module('rewards').total(module('rewards').reward(given[0], '7', given[2], given[1]))"
            pays = run(driver, total, first, m, points) - run(driver, total, second, n, points)
            if name == "form" and points["wrong"]:
                continue  # an answer without tags isn't graded as wrong: the form isn't all that differs
            told = [key for key, values in said if values.get("name") == name]
            change = after[name] - before[name]
            way = 0 if abs(change) < (2 if name == "length" else 0.1) else np.sign(change)
            kind = "unpaid" if pays == 0 else "paid" if np.sign(pays) == way else "against"
            assert told == ([f"verdict_{kind}"] if way and any(points.values()) else []), (points, name)
            kinds.update(told)
        earns = [key for key, _ in said if key in ("verdict_more", "verdict_less")]
        assert not earns or (earns == ["verdict_more"]) == (after["reward"] > before["reward"])
    assert len(kinds) == 3


def test_one_spike_does_not_flatten_a_curve(show):
    driver = show("clip")
    values = [0.1 + 0.004 * i for i in range(100)]
    end = "module('dom').axisEnd(given[0], 0.3)"
    assert run(driver, end, values) == max(values)
    values[50] = 31.0
    assert max(values[:50] + values[51:]) <= run(driver, end, values) < 1
    assert run(driver, end, values[:50] + [3.0] * 50) == 3  # a run that has left stays visible
    curve = "module('dom').curve('kl', given[0].map((x, i) => [i, x]), {steps: 100, max: 0.8}).outerHTML"
    marks = re.findall(r'<polygon points="([\d.]+),', run(driver, curve, values))
    assert [float(x) for x in marks] == [4 + 50 / 100 * 292]


def test_a_training_stops_goes_on_and_is_reset(show):
    driver = show("train")
    progress = lambda: int(one(driver, "#progress").get_attribute("value"))  # noqa: E731
    Select(one(driver, "#preset")).select_by_value("form")
    assert one(driver, "#points_right").get_attribute("value") == "0"
    turn(driver, "answers", 2)
    go_on_until(driver, 2)
    stopped = progress()
    rows = find(driver, "#train_group tr")
    assert len(rows) == 3 and not one(driver, "#beta").is_enabled()
    one(driver, "#tab_answers").click()  # what was trained here answers in the other room
    drawn(driver)
    assert f"{stopped} steps" in one(driver, "#model_own").text and one(driver, "#model_own").is_enabled()
    visit(driver, "room=4")  # as a reload does: the training is kept, and goes on as if nothing had been
    WebDriverWait(driver, 60).until(lambda d: progress() == stopped and not one(d, "#beta").is_enabled())
    go_on_until(driver, stopped + 2)
    log = run(driver, "module('train').training.log")
    one(driver, "#train_reset").click()
    WebDriverWait(driver, 60).until(lambda d: progress() == 0 and one(d, "#beta").is_enabled())
    go_on_until(driver, stopped + 2)
    again = run(driver, "module('train').training.log")
    assert again[: stopped + 2] == log[: stopped + 2] and again[-1]["kl"] > 0
    assert find(driver, "polyline.ghost") and "the same settings" in one(driver, ".curves + .quiet").text
    one(driver, "#train_reset").click()
    WebDriverWait(driver, 60).until(lambda d: progress() == 0 and one(d, "#beta").is_enabled())
    turn(driver, "answers", 16)  # more than the workers have room for: they are opened anew
    one(driver, "#train_go").click()
    WebDriverWait(driver, 200).until(lambda d: progress() >= 1)
    assert len(find(driver, "#train_group tr")) == 17


# --- sizes, colours, keys


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("room", ROOMS)
def test_each_room_on_a_phone_and_on_a_desk(show, room, size, scheme):
    for lang in ("en", "zh"):
        driver = show(room, size, scheme, lang)
        if room == "answers":
            drawn(driver)
            find(driver, ".token")[4].click()
        if room == "train":
            one(driver, "#train_go").click()
            WebDriverWait(driver, 120).until(lambda d: int(one(d, "#progress").get_attribute("value")) >= 2)
        words = one(driver, "body").text
        assert "undefined" not in words and "{" not in words and "NaN" not in words
        assert bool(re.search("[\u4e00-\u9fff]", one(driver, "main").text)) == (lang == "zh")
        for width in NARROW_TO_WIDE if scheme == "light" else ():
            look_like(driver, width, 900, phone=width < 500, scheme=scheme)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        small = (
            "return [...document.querySelectorAll('button, a.button, input, select, summary')].map((e) => [e.id, e."
            "getBoundingClientRect()]).filter(([, r]) => r.width && (r.width < 23.9 || r.height < 23.9)).map(([id]) => id)"
        )
        assert set(driver.execute_script(small)) <= {
            "clip_on",
            "predict",
        }  # their labels are as large as they need be
        look_like(driver, *WIDTHS[size], phone=size == "phone", scheme=scheme)
        style = "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor]"
        body = driver.execute_script(style, one(driver, "body"))
        assert (contrast(body[1], "rgb(255, 255, 255)") < 2) == (scheme == "light")
        assert contrast(*body) > 7  # WCAG's AAA
        for selector in (".quiet", ".good", ".bad", "button.main"):
            for color, back in driver.execute_script(
                "return [...document.querySelectorAll(arguments[0])].slice(0, 1)"
                ".map((e) => getComputedStyle(e)).map((s) => [s.color, s.backgroundColor])",
                selector,
            ):
                back = body[1] if back == "rgba(0, 0, 0, 0)" else back
                assert contrast(color, back) > 4.5, (selector, color, back)  # AA
        if "SCREENSHOTS" in os.environ:
            height = driver.execute_script("return document.documentElement.scrollHeight")
            clip = dict(x=0, y=0, width=WIDTHS[size][0], height=height, scale=1)
            picture = driver.execute_cdp_cmd(
                "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
            )
            path = Path(os.environ["SCREENSHOTS"]) / f"playground_{room}_{size}_{scheme}_{lang}.png"
            path.write_bytes(base64.b64decode(picture["data"]))


def test_every_room_is_reached_and_turned_with_the_keyboard(show):
    driver = show("grid")
    one(driver, "#grid_run").click()
    driver.execute_script("arguments[0].focus()", one(driver, "#tab_grid"))
    for room in (*ROOMS[1:], ROOMS[0]):
        driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        WebDriverWait(driver, 20).until(lambda d, room=room: find(d, f"#tab_{room}:focus"))
        assert one(driver, f"#tab_{room}").get_attribute("aria-selected") == "true"
        for element in find(driver, "main button, main input, main select"):
            if element.is_displayed() and element.is_enabled():
                driver.execute_script("arguments[0].focus()", element)
                assert driver.switch_to.active_element == element
        unnamed = driver.execute_script(
            "const named = (e) => e.textContent.trim() || e.ariaLabel || e.labels?.[0]?.textContent.trim();"
            "return [...document.querySelectorAll('button, input, select')].filter((e) => !named(e)).length"
        )
        assert not unnamed
        driver.execute_script("arguments[0].focus()", one(driver, f"#tab_{room}"))
    slider = one(driver, "#alpha")
    before = slider.get_attribute("value")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert slider.get_attribute("value") != before
    one(driver, "#language").send_keys(Keys.ENTER)
    assert "網格" in one(driver, "#tab_grid").text


def test_the_first_thing_to_see_moves(show):
    """Without a click: the dot walks. A reader who wants no motion sees it stand."""
    driver = show("grid")
    moves = lambda: int(one(driver, "#grid_told").text.split()[0])  # noqa: E731
    WebDriverWait(driver, 20).until(lambda d: moves() > 3)
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")
    driver.get(PAGE.as_uri())
    time.sleep(1)
    assert moves() == 0


# --- the address


def test_the_address_holds_what_is_set(show):
    driver = show("grid", more="&theme=dark&walls=11_14&gamma=0.9&alpha=much&epsilon=7")
    world = "module('grid').settings"
    found = run(driver, world)
    assert found["walls"] == [11, 14] and found["gamma"] == 0.9
    assert found["alpha"] == found["epsilon"] == 0.5  # what is no such number is as if it weren't there
    one(driver, "#cell_11").click()
    turn(driver, "slip", 0.3)
    one(driver, "#language").click()
    assert (
        "Pause" not in one(driver, "#grid_run").text and "暫停" in one(driver, "#grid_run").text
    )  # it runs on
    expected = dict(room="1", lang="zh", theme="dark", walls="14", gamma="0.9", slip="0.3")
    assert address_of(driver) == expected
    driver.refresh()
    assert address_of(driver) == expected and run(driver, world)["walls"] == [14]
    assert (
        one(driver, "html").get_attribute("data-theme") == "dark" and "網格" in one(driver, "#tab_grid").text
    )
    one(driver, "#tab_clip").click()
    one(driver, "#tab_grid").click()
    assert run(driver, world)["walls"] == [14]
    driver.get(f"{PAGE.as_uri()}?lang=en#train")  # an address of the page's first version
    driver.refresh()
    assert one(driver, "#tab_train").get_attribute("aria-selected") == "true"


@pytest.mark.parametrize("room", ROOMS)
def test_missions_set_up_what_they_say_and_rooms_name_their_chapter(show, room):
    driver = show(room)
    missions = run(driver, f"module('missions').MISSIONS.{room}")
    for mission in missions:
        one(driver, f"#mission_{mission['name']}").click()
        guesses = find(driver, "#mission [id^=guess_]")
        assert mission["right"] < len(guesses) and not find(driver, "#mission .why")
        guesses[mission["right"]].send_keys(Keys.ENTER)
        assert find(driver, "#mission .why .good")
        assert driver.switch_to.active_element.get_attribute("id") == f"guess_{mission['right']}"
        for i, asked in enumerate(mission["sets"]):
            one(driver, f"#set_{i}").click()
            given, address = dict(parse_qsl(asked)), address_of(driver)
            WebDriverWait(driver, 20).until(lambda d, a=given: a.items() <= address_of(d).items())
            assert address["mission"] == mission["name"]
        visit(driver, f"room={ROOMS.index(room) + 1}&mission={mission['name']}")  # a chapter's shorter link
        assert dict(parse_qsl(mission["sets"][0])).items() <= address_of(driver).items()
    for lang in ("zh", "en"):
        visit(driver, f"room={ROOMS.index(room) + 1}&lang={lang}")
        links = [a.get_attribute("href") for a in find(driver, "#home, .chapters a")]
        pages = [Path(urlsplit(link).path) for link in links]
        assert len(pages) >= 2 and all(page.is_file() for page in pages)
        assert all(page.stem.endswith("_ch") == (lang == "zh") for page in pages)


@pytest.mark.parametrize("figure", ["crawl", "clip", "passes", "group", "gae"])
def test_a_figure_stands_alone_in_a_page(show, figure, tmp_path):
    driver = show("clip")
    outer = tmp_path / "page.html"
    outer.write_text(
        f"<iframe src='{PAGE.as_uri()}#figure={figure}&lang=zh' width=300></iframe>"
        "<script>addEventListener('message', ({data}) => { document.title = data.playground })</script>"
    )
    driver.get(outer.as_uri())
    WebDriverWait(driver, 20).until(lambda d: d.title.isdigit() and int(d.title) > 150)
    driver.switch_to.frame(0)
    assert len(find(driver, "main svg")) and not find(driver, "header, footer, .missions, [role=tab]")
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert re.search("[\u4e00-\u9fff]", one(driver, "main").text)
