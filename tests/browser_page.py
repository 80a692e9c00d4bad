"""report.html in a real browser: `make test-browser`. Needs Debian's chromium and chromium-driver.

The page is made by a real short run of the main script; what it shows is compared with the run's
own files. `make page-pictures RUN=folder` writes the pictures of the README.
"""

import io
import json
import os
import re
import shutil
import statistics
import time
import typing
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from chromium import find, look_like, one, texts, turn
from hostile import HOSTILE
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from short_runs import SHORT
from test_health import FOLDER
from test_page import SMALL, with_hostile_texts

import grpo_variants as variants
from constants import Variants
from run import answers, evaluation, page

WIDTHS = {"phone": (390, 844), "desk": (1400, 1000)}
WRITTEN = 0.6  # seconds; the page writes its address at most every 0.4


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture(scope="module")
def run(finished):
    return finished / "run"


@pytest.fixture
def show(driver):
    """Opens a page at a size and in a color scheme; at the end the browser has no complaint."""

    def show(path, size="desk", scheme="light"):
        look_like(driver, *WIDTHS[size], phone=size == "phone", scheme=scheme)
        driver.get(Path(path).resolve().as_uri())
        return driver

    yield show
    assert not driver.get_log("browser")


def into_view(driver, element, block="center"):
    driver.execute_script("arguments[0].scrollIntoView({block: arguments[1]})", element, block)


def focus(driver, element):
    driver.execute_script("arguments[0].focus()", element)


def choose(driver, name, value):
    Select(one(driver, f"#{name}")).select_by_value(value)


def choose_group(driver, i):
    button = find(driver, "#groups button")[i]
    into_view(driver, button)  # not under what is sticky
    button.click()


def open_group(driver, run, step):
    """Shows a group with a signal; its row, and the numbers of its answers that have a card."""
    turn(driver, "step", step)
    rows = [row for row in answers.read_lines(run / "answers.jsonl") if row["step"] == step]
    i = next(i for i, row in enumerate(rows) if len({a["reward"] for a in row["completions"]}) > 1)
    choose_group(driver, i)
    texts = [answer["text"] for answer in rows[i]["completions"]]
    # one card for answers of the same text
    return rows[i], sorted({texts.index(text) for text in texts})


def changed(source, folder, answer=None, log="", **objects):
    """The page of a copy of a run: entries of its JSON files, answers and log are others."""
    copy = shutil.copytree(source, folder, ignore=SMALL)
    for name, entries in objects.items():
        path = copy / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    if answer:
        rows = answers.read_lines(copy / "answers.jsonl")
        answer(rows)
        (copy / "answers.jsonl").write_text(answers.to_lines(rows))
    if log:
        (copy / "train_log.csv").write_text(log)
    return page.write(copy)


def test_the_slider_moves_curves_group_and_evaluation(run, show):
    driver = show(run / "report.html")
    rows = answers.read_lines(run / "answers.jsonl")
    log = (run / "train_log.csv").read_text().splitlines()[1:]
    for step in (1, 2, 5, 8):
        turn(driver, "step", step)
        assert one(driver, "#step_shown").text == f"{step} of 8"
        reward = float(log[step - 1].split(",")[1])
        caption = texts(driver, "#charts figcaption .first")[0]
        assert f"{reward:.3f}" in caption or f"{reward:.1f}" in caption
        kept = min((row["step"] for row in rows), key=lambda other: (abs(other - step), other))
        first = next(row for row in rows if row["step"] == kept)
        assert one(driver, "#group .question").text == first["question"]
        assert one(driver, "#kept").text.startswith(f"Step {kept}: 4 questions, 4 answers each")
        marked = one(driver, "#time_table tr[data-step][style]:not([style=''])")
        assert marked.get_attribute("data-step") == str(4 * (step // 4))
    one(driver, "#step_back").click()
    assert one(driver, "#step_shown").text == "6 of 8"
    turn(driver, "step", 4)
    result = answers.read_lines(run / "evaluations.jsonl")[1]["greedy_answer_accuracy"]
    low, high = evaluation.wilson(result, 8)
    # greedy, with its interval
    caption = one(driver, "#held_out figure:last-child figcaption").text
    assert f"{100 * result:.1f} % [{100 * low:.1f} to {100 * high:.1f}]" in caption
    picture = find(driver, "#charts svg")[0]  # a click on a curve
    into_view(driver, picture)
    to_its_end = picture.size["width"] // 2 - 8
    webdriver.ActionChains(driver).move_to_element_with_offset(
        picture, to_its_end, 0
    ).click().perform()
    assert one(driver, "#step_shown").text == "8 of 8"


VARIANTS = {
    "GRPO": {},
    "Dr. GRPO": dict(ADVANTAGE="centered", LOSS_AGG_MODE="seq-mean-token-sum-norm"),
    "RLOO": dict(ADVANTAGE="rloo", LOSS_AGG_MODE="seq-mean-token-sum", KL_LOSS_MODE="mse_kl"),
    "DAPO": dict(
        LOSS_ALGO="dapo", LOSS_AGG_MODE="token-mean", EPSILON_HIGH=0.28, KL_LOSS_MODE="kl"
    ),
    "GSPO": dict(LOSS_ALGO="gspo-token", EPSILON=0.0005),
    "MaxRL": dict(ADVANTAGE="maxrl"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_has_the_numbers_of_the_token(run, show, tmp_path, variant):
    constants = VARIANTS[variant]
    driver = show(changed(run, tmp_path / "run", constants=constants))
    row, cards = open_group(driver, run, 6)
    R = np.array([answer["reward"] for answer in row["completions"]])
    for number in cards:
        answer = row["completions"][number]
        N, n = row["completions_in_step"], len(answer["tokens"])
        t = n // 2
        focus(driver, one(driver, f'.token[data-answer="{number}"][data-token="{t}"]'))
        text = "\n".join(line.text for line in find(driver, "#formula p")).replace("\u2212", "-")
        [_, first, *_] = text.splitlines()
        lines = {line.split()[0]: line for line in text.splitlines()}

        base = (R.sum() - R[number]) / (len(R) - 1) if variant == "RLOO" else R.mean()
        scales = {"RLOO": 1, "Dr. GRPO": 1, "MaxRL": R.mean()}
        A = (R[number] - base) / scales.get(variant, R.std(ddof=1) + 1e-6)
        assert first.startswith(f"{variant if variant in scales else 'GRPO'}: A = ")
        old, new, reference = (
            np.array(answer[f"log_prob{x}"]) for x in ("", "_after", "_reference")
        )
        ratio = np.exp((new - old).mean() if variant == "GSPO" else new[t] - old[t])
        epsilon = constants.get("EPSILON", 0.2)
        low, high = 1 - epsilon, 1 + constants.get("EPSILON_HIGH", epsilon)
        assert f"clip(ratio, {low:.2f}, {high:.2f})" in text
        objective = min(
            ratio * answer["advantage"], np.clip(ratio, low, high) * answer["advantage"]
        )
        d = reference[t] - new[t]
        kl = {"kl": -d, "mse_kl": d * d / 2}.get(constants.get("KL_LOSS_MODE"), np.exp(d) - d - 1)
        weight = {
            "seq-mean-token-sum-norm": 1 / (N * 28),
            "seq-mean-token-sum": 1 / N,
            "token-mean": 1 / row["tokens_in_step"],
        }.get(constants.get("LOSS_AGG_MODE"), 1 / (N * n))
        for line, expected, places in (
            (first, A, 3),
            (lines["ratio"], ratio, 3),
            (lines["min(ratio"].split("←")[0], objective, 3),
            (lines["d"].split(";")[1], kl, 4),
            (lines["weight"], weight, 5),
        ):
            assert float(line.rsplit("= ", 1)[1]) == pytest.approx(expected, abs=0.51 * 10**-places)


def test_every_setting_has_its_formula(run, show):
    driver, kinds = show(run / "report.html"), typing.get_type_hints(Variants)
    for constant, table in (
        ("ADVANTAGE", "ADVANTAGES"),
        ("LOSS_ALGO", "OBJECTIVES"),
        ("KL_LOSS_MODE", "KL"),
        ("LOSS_AGG_MODE", "WEIGHTS"),
    ):
        known = driver.execute_script(f"return Object.keys({table})")
        assert set(typing.get_args(kinds[constant])) <= set(known), constant


def of_the_step(rows, step, advantage):
    """Gives the answers of a step the advantages that a function of the script's finds."""
    rows = [row for row in rows if row["step"] == step]
    answers = [row["completions"] for row in rows]  # [B][G]
    parts = {
        name: np.array([[answer["points"][name] for answer in group] for group in answers])
        for name in answers[0][0]["points"]
    }
    found = advantage(SimpleNamespace(reward_parts=parts, rewards=sum(parts.values())))
    for group, values in zip(answers, found, strict=True):
        for answer, value in zip(group, values, strict=True):
            answer["advantage"] = round(float(value), 5)
    return rows


def test_gdpo_shows_its_own_advantage_and_shares(run, show, tmp_path):
    """The script's, of the whole step; a group of equal sums with other parts isn't silent."""

    def gdpo(rows):
        for part, answer in enumerate(rows[0]["completions"]):
            answer["points"] |= dict(check_answer=float(part), check_numbers=-(float(part) ** 2))
            answer["points"]["match_format_exactly"] = part**2 - part
            answer["reward"] = sum(answer["points"].values())
        of_the_step(rows, 1, variants.decoupled_advantage)

    driver = show(changed(run, tmp_path / "run", gdpo, constants={"ADVANTAGE": "gdpo"}))
    turn(driver, "step", 1)
    row = json.loads((tmp_path / "run" / "answers.jsonl").read_text().splitlines()[0])
    earned = [answer["points"] for answer in row["completions"]]
    assert "silent" not in find(driver, "#groups button")[0].get_attribute("class").split()
    choose_group(driver, 0)
    assert one(driver, "#group .math").text.startswith("GDPO: S = ")
    for card in find(driver, "article"):
        number = int(card.get_attribute("data-answer"))
        answer = row["completions"][number]
        focus(driver, card.find_elements(By.CSS_SELECTOR, ".token")[0])
        line = texts(driver, "#formula .math")[0].replace("\u2212", "-")
        columns = [[points[name] for points in earned] for name in earned[0]]
        spreads = [statistics.stdev(column) + 1e-6 for column in columns]
        S = sum(
            (column[number] - statistics.mean(column)) / spread
            for column, spread in zip(columns, spreads, strict=True)
        )
        assert line.endswith(f" = {S:.3f} / std(S) = {answer['advantage']:.3f}")
        rows = card.find_elements(By.CSS_SELECTOR, "tbody tr")
        shares = [
            float(line.find_elements(By.TAG_NAME, "td")[2].text.replace("\u2212", "-"))
            for line in rows
        ]
        assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.026)  # five rounded to 0.01


OURS = {  # of METHOD's functions, what the page says where it has our own
    "advantage": "GRPO: A = (R",
    "objective": "min(ratio × A, clip(ratio",
    "kl": "(k3)",
    "weights": "weight in J: 1 / (16 answers",
}


@pytest.mark.parametrize("own", [["advantage"], ["objective", "kl"], ["rollouts", "weights"], None])
def test_a_readers_own_function_is_named_and_has_no_formula_of_ours(run, show, tmp_path, own):
    """Its advantage is the logged one, also where all rewards are equal. Without run.json (None) it
    may be any of them.
    """

    def silent_by_rewards(rows):
        for i, answer in enumerate(rows[0]["completions"]):
            answer |= {"reward": 9.5, "advantage": i / 8}

    note = {"own_functions": own} if own else {}
    constants = {"METHOD": "mine/soft.py"}
    path = changed(run, tmp_path / "run", silent_by_rewards, constants=constants, run=note)
    if own is None:
        (tmp_path / "run" / "run.json").unlink()
        path = page.write(tmp_path / "run")
    driver = show(path)
    turn(driver, "step", 1)
    choose_group(driver, 0)
    replaced = own or list(OURS)
    classes = find(driver, "#groups button")[0].get_attribute("class").split()
    assert ("silent" in classes) == ("advantage" not in replaced)
    row, cards = open_group(driver, run, 6)
    for number in cards:
        focus(driver, one(driver, f'.token[data-answer="{number}"][data-token="1"]'))
        said = one(driver, "#formula").text
        for name, words in OURS.items():
            assert (words in said) == (name not in replaced), (name, said)
            assert (f"your own {name} (soft.py)" in said) == (name in replaced), (name, said)
        A = row["completions"][number]["advantage"]
        if "advantage" in replaced:
            line = texts(driver, "#formula .math")[0].replace("\u2212", "-")
            assert line == f"A: your own advantage (soft.py) = {A:.3f}"
            assert "share of A" not in find(driver, "article .bars")[0].text
        if "objective" in replaced:
            assert "the clip" not in said
    driver.get(f"{path.resolve().as_uri()}#lang=zh")
    turn(driver, "step", 6)
    focus(driver, find(driver, "article .token")[1])
    assert driver.execute_script("return [...untranslated]") == []


def test_what_stands_around_the_objective_is_said(run, show, tmp_path):
    constants = dict(SAMPLER_CORRECTION=2.0, ENTROPY_COEF=0.01)
    driver = show(changed(run, tmp_path / "run", constants=constants))
    open_group(driver, run, 6)
    focus(driver, find(driver, "article .token")[1])
    said = one(driver, "#formula").text
    assert "at most 2 (SAMPLER_CORRECTION)" in said and "plus 0.01 × the entropy" in said


def test_cards_have_the_points_and_their_shares_add_up_to_the_advantage(run, show):
    driver = show(run / "report.html")
    row, numbers = open_group(driver, run, 8)
    cards = find(driver, "article")
    order = [int(card.get_attribute("data-answer")) for card in cards]
    advantages = [row["completions"][i]["advantage"] for i in order]
    assert advantages == sorted(advantages, reverse=True) and sorted(order) == numbers
    for card, i in zip(cards, order):
        answer = row["completions"][i]
        lines = [
            [cell.text.replace("\u2212", "-") for cell in line.find_elements(By.TAG_NAME, "td")]
            for line in card.find_elements(By.CSS_SELECTOR, "tbody tr")
        ]
        assert [line[0] for line in lines] == [*answer["points"], "sum"]
        assert [float(line[1]) for line in lines] == [*answer["points"].values(), answer["reward"]]
        shares = [float(line[2]) for line in lines]
        assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.021)  # each is rounded to 0.01
        assert shares[-1] == pytest.approx(answer["advantage"], abs=0.0051)
        tokens = card.find_elements(By.CSS_SELECTOR, ".token")
        for token, before, after in zip(
            tokens, answer["log_prob"], answer["log_prob_after"], strict=True
        ):
            kinds = set(token.get_attribute("class").split()) & {"up", "down"}
            assert kinds == ({"up"} if after > before else {"down"} if after < before else set())


def test_an_episode_shows_whose_each_token_is(run, show, tmp_path):
    """The world's tokens are read and not trained; each turn has its own advantage."""

    def as_episode(rows):
        for answer in rows[0]["completions"]:
            turn = [0, 0, -1, -1] + [1] * (len(answer["pieces"]) - 4)
            answer |= {
                "turn": turn,
                "rewards": [1.0, 2.0],
                "advantages": [max(0.0, 0.5 + t) for t in turn],
            }
            answer["picture"] = '<svg viewBox="0 0 10 20"><text>9</text></svg>'

    driver = show(changed(run, tmp_path / "run", as_episode, constants={"ADVANTAGE": "turn"}))
    turn(driver, "step", 1)
    choose_group(driver, 0)
    card = "article:first-child "
    assert len(find(driver, f"{card}.token.world")) == 2
    assert texts(driver, f"{card}.begins") == ["turn 1, A = +0.50", "turn 2, A = +1.50"]
    image = one(driver, f"{card}img")
    assert driver.execute_script(
        "return arguments[0].complete && arguments[0].naturalHeight > 0", image
    )
    focus(driver, find(driver, f"{card}.token")[2])
    assert "isn't trained on it" in (said := one(driver, "#formula").text) and "weight" not in said
    focus(driver, find(driver, f"{card}.token")[5])
    assert "A of turn 2 = 1.500" in one(driver, "#formula").text


def test_a_group_without_signal_says_why(run, show, tmp_path):
    def silent(rows):
        for answer in rows[1]["completions"]:
            answer |= {"reward": 9.5, "advantage": 0.0, "correct": True}
        first = rows[2]["completions"][0] | {"reward": 1.0, "advantage": 0.0, "correct": False}
        rows[2]["completions"] = [first] * 4

    driver = show(changed(run, tmp_path / "run", silent))
    turn(driver, "step", 1)
    for i, why, alike in ((1, "All are right", False), (2, "None is right", True)):
        assert find(driver, f"#groups button.silent:nth-child({i + 1})")
        choose_group(driver, i)
        notice = one(driver, "#group .notice").text
        assert "every A is 0" in notice and why in notice and ("word for word" in notice) == alike
    # four are one text
    assert one(driver, "article h3").text.startswith("Answers 1, 2, 3, 4\n× 4\n")


def test_everything_can_be_reached_and_turned_with_the_keyboard(run, show):
    driver = show(run / "report.html")
    turn(driver, "step", 6)
    now, seen = lambda: driver.switch_to.active_element, []
    while seen.count("theme") < 2:  # once around
        now().send_keys(Keys.TAB)
        seen.append(now().get_attribute("id") or now().get_attribute("role"))
    controls = {
        "theme",
        "step_back",
        "step",
        "step_on",
        "tab",
        "time_filter",
        "time_question",
        "both_filter",
        "both_form",
        "both_search",
    }
    assert controls <= set(seen)
    # one stop for each answer, not for each token
    assert seen.count("option") == len(find(driver, "article"))
    one(driver, '#groups button[aria-selected="true"]').send_keys(Keys.ARROW_RIGHT)
    assert one(driver, '#groups button[aria-selected="true"]').text == "2"
    first, second, *_ = [card.get_attribute("data-answer") for card in find(driver, "article")]
    focus(driver, one(driver, f'.token[data-answer="{first}"][data-token="0"]'))
    last = str(len(find(driver, f'.token[data-answer="{first}"]')) - 1)
    for key, *place in (
        (Keys.ARROW_RIGHT, first, "1"),
        (Keys.ARROW_DOWN, second, "1"),
        (Keys.ARROW_LEFT, second, "0"),
        (Keys.ARROW_LEFT, second, "0"),
        (Keys.ARROW_UP, first, "0"),
        (Keys.ARROW_UP, first, "0"),
        (Keys.END, first, last),
    ):
        now().send_keys(key)
        assert now() == one(driver, ".token.chosen")
        assert [now().get_attribute(f"data-{name}") for name in ("answer", "token")] == place
    assert "token" in one(driver, "#formula").text


def test_on_a_phone_the_formula_comes_with_a_tap_and_can_be_closed(run, show):
    driver = show(run / "report.html", "phone")
    height = WIDTHS["phone"][1]
    for i in range(len(find(driver, "#groups button"))):
        choose_group(driver, i)
        assert not one(driver, "#formula").is_displayed() and not find(driver, ".token.chosen")
    box = "return arguments[0].getBoundingClientRect().toJSON()"
    tokens = find(driver, "article .token")
    for token in (tokens[3], tokens[-1]):
        into_view(driver, token, "end")  # where the formula will be
        token.click()
        formula, seen = (
            driver.execute_script(box, element) for element in (one(driver, "#formula"), token)
        )
        assert formula["bottom"] == height and formula["height"] <= 0.41 * height
        assert (
            one(driver, "#steps").rect["height"] < seen["top"] and seen["bottom"] < formula["top"]
        )
        one(driver, "#close").click()
        assert (
            not one(driver, "#formula").is_displayed() and token == driver.switch_to.active_element
        )
    for key, shown in ((Keys.ENTER, True), (Keys.ESCAPE, False)):
        tokens[3].send_keys(key)
        assert one(driver, "#formula").is_displayed() == shown


def test_no_word_is_broken_however_narrow_the_page(run, show, tmp_path):
    """Each word of a table, of the notes, a heading and an answer's tokens is on one line."""

    def marbles(rows):  # a long word of many tokens
        for answer in rows[0]["completions"]:
            answer["pieces"] = ["marbles"] * len(answer["pieces"])

    driver = show(changed(run, tmp_path / "run", marbles), "phone")
    turn(driver, "step", 1)
    assert len(find(driver, "article .token")) > 10
    broken = """
        const found = [], range = document.createRange();
        const all = "b,th,td:not(.any,:has(.written)),h1,h2,h3,li,figcaption,.token"
            + ",p:not(.math,#about)";
        for (const place of document.querySelectorAll(all)) {
            const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
            for (let node; (node = walker.nextNode()); )
                for (const word of node.data.matchAll(/[^\\s_/-]+/g)) {
                    range.setStart(node, word.index);
                    range.setEnd(node, word.index + word[0].length);
                    const lines = new Set([...range.getClientRects()].map((box) => box.top));
                    if (lines.size > 1) found.push(word[0]);
                }
        }
        return found"""
    wide = (
        "return [...document.querySelectorAll('.scroll')].some((e) "
        "=> e.scrollWidth > e.clientWidth)"
    )
    for width in (718, 320, 390, 768, 900, 1400):
        media = "print" if width == 718 else ""  # A4 within its margins
        look_like(driver, width, 800, phone=width < 400)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
        assert driver.execute_script(broken) == []
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        # there a table of three columns is scrolled
        assert width == 320 or not driver.execute_script(wide)


def test_one_spike_does_not_flatten_a_curve(run, show, tmp_path):
    kl = [3.784 if step == 41 else 0.1 + 0.001 * (step % 10) for step in range(1, 101)]
    rows = "".join(f"{step},{value}\n" for step, value in enumerate(kl, start=1))
    driver = show(changed(run, tmp_path / "run", log=f"step,kl\n{rows}"))
    [figure] = [figure for figure in find(driver, "#charts figure") if "▲" in figure.text]
    assert "KL to the" in figure.text and "up to 3.784 (step 41)" in figure.text


def test_the_address_keeps_the_place_and_a_reload_forgets_nothing(run, show):
    driver = show(run / "report.html")
    assert "#" not in driver.current_url  # nobody has chosen anything
    turn(driver, "step", 6)
    choose_group(driver, 2)
    find(driver, "article:last-child .token")[2].click()
    Select(one(driver, "#both_form")).select_by_index(3)
    Select(one(driver, "#time_question")).select_by_index(5)
    one(driver, "#both_search").send_keys("how many")
    one(driver, "#theme").click()
    place = """const ids = ['step_shown', 'group', 'formula', 'time_table', 'both_list'];
        return [...ids.map((id) => at(id).innerText),
                at('both_search').value, at('both_form').value,
                document.documentElement.dataset.theme]"""
    before = driver.execute_script(place)
    time.sleep(WRITTEN)
    driver.refresh()
    assert driver.execute_script(place) == before and before[0] == "6 of 8" and before[-1] == "dark"
    one(driver, "#close").click()
    time.sleep(WRITTEN)
    driver.refresh()
    assert not one(driver, "#formula").is_displayed() and "#step=6&question=3" in driver.current_url
    show(run / "after.json")  # elsewhere
    wrong = "#step=999&question=-5&answer=x&token=1e9&theme=%22&time_question=77&shown=1"
    driver.get((run / "report.html").as_uri() + wrong)
    assert one(driver, "#step_shown").text == "8 of 8"
    assert one(driver, "#groups button:first-child").get_attribute("tabindex") == "0"


def test_the_top_says_what_came_of_it_and_where_to_look_next(run, show, tmp_path):
    before = json.loads((run / "before.json").read_text())["correct"]
    after, lost = [not right for right in before], sum(before)
    ill = (FOLDER / "kl.csv").read_text()
    driver = show(
        changed(run, tmp_path / "run", log=ill, after={"correct": after, "format_ok": after})
    )
    assert one(driver, "h1").text == driver.title and "% right" in driver.title
    counts = f"{16 - lost} of 16 test questions turned right, {lost} turned wrong"
    assert one(driver, "#reasons").text.startswith(counts)
    assert any(
        "the KL to the starting model is" in text
        for text in texts(driver, "#change a, #look_list a")
    )
    driver.find_element(By.PARTIAL_LINK_TEXT, f"wrong after training: {lost} of 16 ").click()
    WebDriverWait(driver, 20).until(lambda d: len(find(d, ".pair")) == lost)
    place = "return arguments[0].getBoundingClientRect().top"
    assert 0 <= driver.execute_script(place, one(driver, "#before_after")) < 300
    for home in find(driver, "#home a"):
        assert Path(unquote(urlsplit(home.get_attribute("href")).path)).is_file()


def test_all_of_it_is_in_chinese_too_and_the_address_remembers(hostile, run, show):
    driver = show(run / "report.html")
    one(driver, "#lang").click()
    time.sleep(WRITTEN)
    driver.refresh()
    assert one(driver, "html").get_attribute("lang") == "zh-Hant-TW"
    assert re.search("[\u4e00-\u9fff]", one(driver, "h1").text)
    for path in (run / "report.html", hostile):
        show(run / "after.json")
        driver.get(f"{path.resolve().as_uri()}#lang=zh")
        for step in (1, 8):
            turn(driver, "step", step)
            for i in range(4):
                choose_group(driver, i)
        for option in Select(one(driver, "#time_filter")).options:
            option.click()
        assert driver.execute_script("return [...untranslated]") == []
    one(driver, "#lang").click()
    assert one(driver, "html").get_attribute("lang") == "en"


def test_two_runs_in_one_picture(run, show, tmp_path):
    rows = (run / "train_log.csv").read_text().splitlines()
    five = "\n".join(rows[:6]) + "\n"
    other = changed(run, tmp_path / "other", log=five, constants={"BETA": 0.5}).parent
    driver = show(page.write(other, run))
    assert [
        len(figure.find_elements(By.TAG_NAME, "path")) for figure in find(driver, "figure")
    ] == [2] * 9
    rewards = [float(row.split(",")[1]) for row in rows[1:]]
    turn(driver, "step", 8)
    caption = texts(driver, "#charts figcaption")[0]
    assert f"other {rewards[4]:.3f} (step 5)" in caption and f"run {rewards[7]:.3f}" in caption
    assert texts(driver, "#summary tbody")[1] == "BETA 0.5 0.08"
    assert (
        not one(driver, "#inspector").is_displayed()
        and not one(driver, "#before_after").is_displayed()
    )


def test_long_answers_are_folded_and_printed(run, show, tmp_path):
    long = [f"{'because ' * 400}the end"] * 16
    driver = show(changed(run, tmp_path / "run", after={"completions": long}), "phone")
    fold = one(driver, ".pair:first-child details")
    assert "the end" not in one(driver, "#both_list").text and "all 3207 characters" in fold.text
    fold.click()
    assert fold.text.endswith("the end")
    driver.execute_cdp_cmd("Page.printToPDF", {})
    assert one(driver, "#both_list").text.count("the end") == 16


def test_one_question_through_time(run, show):
    driver = show(run / "report.html")
    evaluations = answers.read_lines(run / "evaluations.jsonl")
    right = np.array([e["greedy_correct"] for e in evaluations])  # [evaluations, questions]
    for i in range(8):
        choose(driver, "time_question", str(i))
        expected = [[f"{e['step']}" for e in evaluations]]
        for kind in ("greedy_", ""):
            verdicts = [("wrong", "right")[e[f"{kind}correct"][i]] for e in evaluations]
            expected += [
                [f"{v}\n{e[f'{kind}completions'][i]}" for v, e in zip(verdicts, evaluations)]
            ]
        assert [texts(driver, f"#time_table td:nth-child({k})") for k in (1, 2, 3)] == expected
        since = next((e["step"] for k, e in enumerate(evaluations) if right[k:, i].all()), None)
        said = {None: "is still wrong", 0: "right from the start"}.get(
            since, f"right from step {since} on"
        )
        assert said in one(driver, "#time_table p").text
    Select(one(driver, "#time_filter")).select_by_index(1)
    learned = np.flatnonzero(~right[0] & right[-1])
    offered = find(driver, "#time_question option") if len(learned) else []
    assert [int(option.get_attribute("value")) for option in offered] == learned.tolist()


def test_before_and_after_are_filtered_and_searched(run, show):
    driver = show(run / "report.html")
    before, after = (json.loads((run / f"{when}.json").read_text()) for when in ("before", "after"))
    asked = [row["question"] for row in before["asked"]]
    questions = ".pair .question"
    listed = lambda: [x.split("right answer:")[0].strip() for x in texts(driver, questions)]  # noqa: E731

    def turned(name, now):
        return [
            q for q, old, new in zip(asked, before[name], after[name]) if old != new and new == now
        ]

    for name, expected in (
        ("turned right", turned("correct", True)),
        ("turned wrong", turned("correct", False)),
        ("all questions", asked),
    ):
        choose(driver, "both_filter", name)
        assert listed() == expected
        assert one(driver, "#both_count").text.startswith(f"{len(expected)} of 16 questions")
    choose(driver, "both_form", "turned right")
    assert listed() == turned("format_ok", True)
    choose(driver, "both_form", "any")
    one(driver, "#both_search").send_keys("SHELLS")
    assert listed() == [q for q in asked if "shells" in q] and 0 < len(listed()) < 16
    assert not one(driver, "#both_source_label").is_displayed()  # one source: nothing to choose


@pytest.fixture(scope="module")
def hostile(run, tmp_path_factory):
    return with_hostile_texts(shutil.copytree(run, tmp_path_factory.mktemp("hostile") / "run"))


def test_hostile_texts_are_shown_and_never_run(hostile, run, show):
    driver = show(run / "report.html")
    tags = "return [...new Set([...document.querySelectorAll('*')].map((e) => e.tagName))].sort()"
    harmless = driver.execute_script(tags)
    driver = show(hostile)
    odd = r"[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
    raw = f"return /{odd}/.test(document.querySelector('main').textContent)"
    for step in (1, 2, 4, 6, 8):
        turn(driver, "step", step)
        for i in range(4):
            choose_group(driver, i)
            assert driver.execute_script(raw) is False
    for i in (1, 2, 0):
        Select(one(driver, "#both_source")).select_by_index(i)
        assert driver.execute_script(raw) is False and bool(find(driver, ".pair"))
    for token in find(driver, ".token")[:30]:
        focus(driver, token)
    assert driver.execute_script("return window.hacked") is None
    assert driver.current_url.split("#")[0] == hostile.resolve().as_uri()
    assert set(driver.execute_script(tags)) <= {*harmless, "IMG"}
    for name, size in WIDTHS.items():  # nothing wider than the window, however long a word is
        look_like(driver, *size, phone=name == "phone")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    every = driver.execute_script("return document.querySelector('main').textContent")
    codes = ("U+202E", "U+0000", "U+001B", "U+200B", "U+D800", "U+FEFF", "U+2028")
    for text in (*codes, HOSTILE[0], "{{data}} {{script}} {{policy}}"):
        assert text in every, text


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="SCREENSHOTS names no folder")
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    "name, size, scheme, place",
    [
        ("page_top", "desk", "light", "body"),
        ("page_group", "desk", "light", "#steps"),
        ("page_time", "desk", "dark", "#through_time"),
        ("page_phone", "phone", "light", "#groups"),
    ],
)
def test_pictures_for_the_readme(run, show, name, size, scheme, place, lang):
    """The group that the README's exercise asks about."""
    driver = show(Path(os.environ.get("RUN", run)) / "report.html", size, scheme)
    if lang == "zh":
        one(driver, "#lang").click()
    turn(driver, "step", 20)
    choose_group(driver, min(13, len(find(driver, "#groups button")) - 1))
    if size == "phone":
        find(driver, "article .token")[3].click()
    into_view(driver, one(driver, place), "start")
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    # enough for a page, in half the space
    picture = picture.quantize(256, dither=Image.Dither.NONE)
    name += "_ch" * (lang == "zh")
    picture.save(Path(os.environ["SCREENSHOTS"]) / f"{name}.png", optimize=True)
