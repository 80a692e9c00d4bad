"""Turns: what a model draws and a world answers, against one full pass, brute force, and chapter
1's grid.
"""

import functools
import itertools
import json
from types import SimpleNamespace

import folders
import jax
import numpy as np
import pytest
from short_runs import run_here
from test_load_llama import ROUNDING, load
from test_rollout import full_forward
from tunix.generate.tokenizer_adapter import TokenizerAdapter

import grpo_llama3_1_8b_demo as demo
import grpo_variants as variants
import settings
from model import llama, rollout
from run import checks, page
from settings import HERE, UserError
from task import turns
from task.prompts import to_prompt
from task.questions import read_questions
from task.run_grader import load_file

GRID = "examples/grid/grid_world.py"
T, TURNS = 30, 5  # tokens and turns of an episode here
SHORT = [  # a run of seconds
    "ENVIRONMENT=examples/grid/grid_world.py",
    "MODEL=tiny_grid",
    "DATASET=examples/grid/plain",
    "MAX_PROMPT_LENGTH=8",
    "TOTAL_GENERATION_STEPS=30",
    "MAX_TURNS=4",
    "GAMMA=0.9",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "NUM_TEST_QUESTIONS=8",
    "EVAL_EVERY=0",
    "BETA=0.0",
    "EVAL_CONFIG=liberal",
    "LOG_ANSWERS_EVERY=1",
    "NUM_BATCHES=4",
    "SAVE_INTERVAL_STEPS=2",
    "WARMUP_FRACTION=0.0",
    "NUM_ITERATIONS=1",
]
world = load_file(HERE / GRID, "ENVIRONMENT")


def constants(*arguments):
    shape = (
        f"MAX_TURNS={TURNS}",
        "MAX_PROMPT_LENGTH=8",
        f"TOTAL_GENERATION_STEPS={T}",
        "TEMPERATURE=1",
    )
    c = settings.read(demo.Constants, (f"ENVIRONMENT={GRID}", *shape, *arguments))
    checks.refuse(c)
    return c


@functools.cache
def engine():
    actor, mesh, config, hf = load("tiny_grid", 16, 8, T)  # rows of a call
    tokenizer = TokenizerAdapter(llama.load_tokenizer(HERE / "tiny_grid"))
    how = rollout.sampling_config(constants(), seed=jax.random.key(0))
    return rollout.MaxTextRollout(actor, tokenizer, mesh, how, maxtext_config=config, hf=hf)


def walk(questions, *arguments, seed=0):
    made, c, form = engine(), constants(*arguments), dict(template="{question}", system_prompt="")
    prompts = [to_prompt(made.tokenizer.tokenizer, question, **form) for question in questions]
    return turns.run_episodes(
        c, made, prompts, questions, rollout.sampling_config(c, seed=jax.random.key(seed))
    )


QUESTIONS = [
    f"{('', 'slippery ', 'walls ')[i % 3]}row {1 + i % 3} column {1 + i % 4}" for i in range(27)
]


def test_the_log_probs_of_an_episode_are_those_of_one_pass_over_it():
    output, episodes = walk(QUESTIONS, "TEMPERATURE=0.7")
    logits = full_forward(engine(), output, T)[0] / 0.7
    close = 2 * ROUNDING * np.abs(logits).max()  # a log-prob is the difference of two such numbers
    logits[..., engine().pad_id()] = -np.inf  # never drawn
    expected = np.asarray(jax.nn.log_softmax(logits))
    of_turn = [np.array(episode.turn) for episode in episodes]
    for i, (tokens, log_prob) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        at = np.flatnonzero(of_turn[i] >= 0)
        found = expected[i, at, tokens[at]]
        np.testing.assert_allclose(log_prob[at], found, rtol=0, atol=close)
        assert not log_prob[of_turn[i] < 0].any()  # never drawn
    assert max(map(max, of_turn)) == TURNS - 1


def test_a_row_is_what_was_said_without_a_gap():
    """Each action and observation again from the tokens, and the world walked again from the
    actions.
    """
    (output, episodes), made = walk(QUESTIONS, "GAMMA=0.9"), engine()
    decode = functools.partial(made.tokenizer.decode, skip_special_tokens=True)
    for question, text, episode, tokens in zip(
        QUESTIONS, output.text, episodes, output.tokens, strict=True
    ):
        assert len(episode.turn) == len(tokens) and made.pad_id() not in tokens
        pairs = itertools.groupby(zip(episode.turn, tokens, strict=True), key=lambda pair: pair[0])
        pieces = [(turn, [token for _, token in pair]) for turn, pair in pairs]
        assert [decode(ids) for _, ids in pieces] == text.split("\n")
        assert [turn for turn, _ in pieces if turn >= 0] == list(range(max(episode.turn) + 1))
        if question.startswith("slippery"):
            continue
        again, said = world.Environment(), ()
        again.reset(question, np.random.default_rng(0))
        for k, (turn, ids) in enumerate(pieces):
            if turn < 0:
                assert decode(ids) == said[0]
            elif k < len(pieces) - 1:
                assert ids[-1] == made.eos_id() and made.eos_id() not in ids[:-1]
                said = again.step(decode(ids))
    ended = [episode.terminated for episode in episodes]
    assert 0 < sum(ended) < len(QUESTIONS)
    for episode, over in zip(episodes, ended, strict=True):
        later = rewarded(*episode.rewards, gamma=0.9).to_go
        np.testing.assert_allclose(episode.to_go[: len(later)], later)
        assert len(episode.to_go) == max(episode.turn) + 1
        assert (episode.rewards[-1] == 100) == over == episode.right
        assert over or len(episode.rewards) == TURNS or len(episode.turn) == T


def test_the_world_draws_from_the_answers_own_generator_and_the_same_again(tmp_path):
    draws = "    def reset(self, question, rng): return f'row {1 + rng.integers(4)}'\n"
    draws += "    def step(self, a): return '', 0.0, True, False"
    for path in (GRID, written(tmp_path, draws)):
        questions = ["slippery row 1 column 1"] * 16
        walks = [walk(questions, f"ENVIRONMENT={path}", seed=seed) for seed in (1, 1, 2)]
        texts, episodes = [output.text for output, _ in walks], [found for _, found in walks]
        assert texts[0] == texts[1] != texts[2] and episodes[0] == episodes[1]
    assert len({text.split("\n")[0] for text in texts[0]}) == 4  # each row its own


def test_the_batch_masks_the_worlds_tokens_and_the_page_shows_the_turns(tmp_path, monkeypatch):
    """As `update` gets it, from the main script, against the tokens and turns that a run leaves."""
    fed, update = [], demo.update

    def recorded(params, opt_state, model, batch, *rest):
        fed.extend(zip(*(np.asarray(x[0]) for x in (batch.mask, batch.advantage)), strict=True))
        return update(params, opt_state, model, batch, *rest)

    monkeypatch.setattr(demo, "update", recorded)
    said = run_here(tmp_path, *SHORT, "ADVANTAGE=turn", "NUM_BATCHES=2")
    assert "answers right" in said
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    ]
    episodes = [answer for row in rows for answer in row["completions"]]
    for answer, (mask, advantages) in zip(episodes, fed, strict=True):
        of_turn = np.array(answer["turn"])
        assert len(of_turn) == len(answer["tokens"]) == len(answer["pieces"])
        np.testing.assert_array_equal(np.flatnonzero(mask), np.flatnonzero(of_turn >= 0))
        # rounded
        np.testing.assert_allclose(answer["advantages"], advantages[: len(of_turn)], atol=1e-5)
        assert not advantages[~mask].any() and answer["advantages"][0] == answer["advantage"]
        assert answer["cut_off"] == (answer["rewards"][-1] < 0)
        gained = sum(r * 0.9**k for k, r in enumerate(answer["rewards"]))
        np.testing.assert_allclose(answer["reward"], gained, atol=1e-6)
    assert np.ptp([answer["advantage"] for answer in episodes]) > 1
    groups = page.run_data(page.read(tmp_path / "run"))["groups"]
    shown = [answer for group in groups for answer in group["completions"]]
    for answer, written in zip(shown, episodes, strict=True):
        assert [answer[name] for name in ("turn", "advantages")] == [
            written["turn"],
            written["advantages"],
        ]
        assert answer["picture"].count("<polyline") == 1
    svg = world.Environment.picture("row 1 column 1", "right\nrow 1 column 2\ndown")
    # where the walk ended
    assert 'points="20,22 60,22 60,62"' in svg and ">goal<" in svg and ">90<" in svg


def rewarded(*rewards, gamma=1.0):
    to_go = [sum(gamma**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]
    return turns.Episode([], to_go, list(rewards), terminated=True)


def test_a_turn_is_judged_against_the_same_turn_of_its_group():
    """By plain loops; the second group has episodes of one, two and three turns, and another
    reward, too.
    """
    episodes = [
        [rewarded(-1, 100), rewarded(-1, -1), rewarded(-1, -1)],
        [rewarded(100), rewarded(-1, 100), rewarded(-1, -1, -1)],
    ]
    turn = [[[0, -1, 1, -1]] * 3, [[0, 0, -1, -1], [0, -1, 1, 1], [0, 1, -1, 2]]]
    own, other = [[e.to_go[0] for e in group] for group in episodes], [[0.0, 2, 0], [0, 0, 5]]
    # [B, G], [B, G, T]
    answers = SimpleNamespace(episodes=np.array(episodes, object), turn=np.array(turn))
    parts = {"episode_return": np.array(own), "other": np.array(other)}
    samples = SimpleNamespace(answers=answers, reward_parts=parts, rewards=sum(parts.values()))
    found = variants.turn_advantage(samples)
    for b in range(2):
        values = {
            (i, k): g + other[b][i] for i in range(3) for k, g in enumerate(episodes[b][i].to_go)
        }
        means = {k: np.mean([v for (_, j), v in values.items() if j == k]) for _, k in values}
        squares = [(v - means[k]) ** 2 for (_, k), v in values.items()]
        std = np.sqrt(sum(squares) / (len(squares) - len(means)))
        for i, t in itertools.product(range(3), range(4)):
            k = turn[b][i][t]
            expected = 0 if k < 0 else (values[i, k] - means[k]) / (std + 1e-6)
            np.testing.assert_allclose(found[b, i, t], expected, atol=1e-9)
    plain = variants.centered_turn_advantage(samples)
    np.testing.assert_allclose(plain[1, 0], [100 - (100 + 99 + 2) / 3] * 2 + [0, 0])


def test_the_grid_is_chapter_1s():
    """Every move from every cell, and the optimum, against folder 1's own."""
    chapter = folders.load("1_Q_Learning", "grid")
    c = folders.load("1_Q_Learning", "Q_Learning").Constants()
    theirs, ours = chapter.value_iteration(c), world.q_star("", c.GAMMA)
    for state, (action, name) in itertools.product(range(15), enumerate(chapter.ACTIONS)):
        cell = divmod(state, 4)
        here = world.Environment()
        here.reset(world.in_words(cell), np.random.default_rng(0))
        observation, reward, terminated, truncated = here.step(name)
        next_state, expected, reached = chapter.step(c, state, action)
        assert (observation, reward, terminated) == (
            world.in_words(divmod(next_state, 4)),
            expected,
            reached,
        )
        assert not truncated and world.read(observation)[1] == divmod(next_state, 4)
        np.testing.assert_allclose(ours[cell, name], theirs[state, action], atol=1e-9)
    assert len(ours) == 15 * 5  # with the move that is none


@pytest.mark.parametrize("name", ["", "slippery", "walls"])
def test_the_data_sets_answers_are_the_best_returns(name):
    for split in ("train", "test", "validation"):
        rows, _ = read_questions(f"examples/grid/{name or 'plain'}/{split}.jsonl", split)
        worlds, places = zip(*(world.read(row["question"]) for row in rows))
        assert set(worlds) == {name} and sorted(places) == sorted(world.starts(name))
        for place, row in zip(places, rows):
            assert (
                row["answer"]
                == f"{max(world.q_star(name, 0.99)[place, m] for m in world.MOVES):.2f}"
            )


def test_slips_and_walls():
    chances, here = [], world.Environment()
    for seed in range(2000):
        here.reset("slippery row 2 column 2", np.random.default_rng(seed))
        chances.append(here.step("down")[0])
    found = np.mean(np.array(chances) == "row 3 column 2")
    assert abs(found - 0.85) < 0.025  # 0.8 + 0.2 / 4; three standard errors of 2,000
    here.reset("walls row 1 column 2", np.random.default_rng(0))
    assert here.step("down")[0] == "row 1 column 2" and here.step("wait")[0] == "row 1 column 2"
    values = world.q_star("walls", 1.0)
    # nine moves around the walls
    assert max(values[(0, 3), move] for move in world.MOVES) == 100 - 8


def written(tmp_path, body, name="mine.py"):
    path = tmp_path / name
    path.write_text(f"class Environment:\n{body}\n")
    return str(path)


def test_a_tool_answers_in_the_middle_of_a_message(tmp_path):
    """Hot, the model writes any word. STOP ends an action, its own end the episode."""
    questions = ["row 1 column 1"] * 16 + ["row 2 column 1"] * 16
    path = written(
        tmp_path,
        '    STOP = "wait"\n'
        "    def reset(self, question, rng):\n"
        "        self.calls = []\n"
        '        return "row 1" if "2" in question else ""\n'
        "    def step(self, action):\n"
        "        self.calls.append(action)\n"
        '        return " column 4", float(len(self.calls)), False, False\n',
    )
    output, episodes = walk(questions, f"ENVIRONMENT={path}", "TEMPERATURE=20")
    made = engine()
    heard = made.tokenizer.encode(" column 4", add_special_tokens=False)
    first = made.tokenizer.encode("row 1", add_special_tokens=False)
    found = 0
    for question, episode, tokens in zip(questions, episodes, output.tokens, strict=True):
        begin = len(first) if "2" in question else 0
        assert tokens[:begin].tolist() == first[:begin] and set(episode.turn[:begin]) <= {-1}
        for t in range(begin, len(tokens)):
            stops = made.tokenizer.decode([tokens[t]]) == "wait" and episode.turn[t] >= 0
            if (
                stops
                and len(tokens) - t - 1 > len(heard)
                and max(episode.turn[: t + 1]) < TURNS - 1
            ):
                assert tokens[t + 1 : t + 1 + len(heard)].tolist() == heard
                assert set(episode.turn[t + 1 : t + 1 + len(heard)]) == {-1}
                assert episode.turn[t + 1 + len(heard)] == episode.turn[t] + 1
                found += 1
            ends = tokens[t] == made.eos_id()
            assert not ends or t == len(tokens) - 1
        assert not episode.terminated and not episode.right
    assert found > 3


def test_what_stands_around_an_observation_is_the_chat_templates():
    tokenizer = llama.load_tokenizer(HERE / "tiny_grid")
    assert turns.around_observation(TokenizerAdapter(tokenizer)) == ("", "")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|eot_id|>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    around = turns.around_observation(TokenizerAdapter(tokenizer))
    # the model has written <|eot_id|> itself
    assert around == ("\n[user]", "<|eot_id|>\n[assistant]")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="leaves messages out"):
        turns.around_observation(TokenizerAdapter(tokenizer))


@pytest.mark.parametrize(
    ("body", "words"),
    [  # the body of class Environment, and what is said
        ("    x = 1", "has no class Environment with reset and step"),
        (
            (
                "    def __init__(self): raise KeyError('no\\n world')\n"
                "    def reset(self): pass\n"
                "    step = reset"
            ),
            "Environment() raised KeyError: 'no\\n world'",
        ),
        (
            "    def reset(self, question, rng): return 1 / 0\n    step = reset",
            "reset raised ZeroDivisionError",
        ),
        (
            "    def reset(self, question, rng): pass\n    step = reset",
            "reset returned (None, 0.0, False, False); return an observation, a text",
        ),
        (
            "    def reset(self, question, rng): return '<|pad|>'\n    step = reset",
            "has the padding token in it",
        ),
        (
            "    def reset(self, question, rng): return ''\n    def step(self, action): exit(3)",
            "step raised SystemExit: 3",
        ),
        (
            (
                "    def reset(self, question, rng): return ''\n"
                "    def step(self, action): return 'x'"
            ),
            "step returned 'x'; return observation, reward, terminated, truncated",
        ),
        (
            (
                "    def reset(self, question, rng): return ''\n"
                "    def step(self, action): return None, 0, False, False"
            ),
            "step returned (None, 0, False, False); return",
        ),
        (
            (
                "    def reset(self, question, rng): return ''\n"
                "    def step(self, action): return '', float('nan'), False, False"
            ),
            "step returned ('', nan, False, False); return",
        ),
        (
            (
                "    def reset(self, question, rng): return ''\n"
                "    def step(self, action): return '', float('inf'), True, False"
            ),
            "step returned ('', inf, True, False); return",
        ),
        (
            (
                "    def reset(self, question, rng): return ''\n"
                "    def step(self, action): return '', 'much', True, False"
            ),
            "step returned ('', 'much', True, False); return",
        ),
        (
            (
                "    def reset(self, question, rng): return ''\n"
                "    def step(self, action): return '', 0, 'no', False"
            ),
            "step returned ('', 0, 'no', False); return",
        ),
    ],
)
def test_a_world_at_fault_is_one_line(body, words, tmp_path):
    with pytest.raises(UserError) as caught:
        walk(["row 1 column 1"] * 2, f"ENVIRONMENT={written(tmp_path, body)}")
    [line] = str(caught.value).splitlines()
    assert line.startswith("ENVIRONMENT=") and words in line


def test_a_world_that_never_ends_is_cut_off(tmp_path):
    """By MAX_TURNS, by the row's length, or by its own `truncated`: none of them is the world's
    end.
    """
    body = "    def reset(self, question, rng): return ''\n    def step(self, action): return {}"
    for said, length in (
        ("'row 1', 1.0, False, False", TURNS),
        ("'row 1 ' * 14, 1.0, False, False", 1),
        ("'', 1.0, False, True", 1),
    ):
        path = written(tmp_path, body.format(said), f"w{length}{len(said)}.py")
        output, episodes = walk(["row 1 column 1"] * 8, f"ENVIRONMENT={path}")
        assert not any(episode.terminated for episode in episodes)
        lengths = [len(episode.rewards) for episode in episodes]
        assert max(lengths) == length and max(map(len, output.tokens)) <= T


def test_the_calculator():
    calculator = load_file(HERE / "examples" / "calculator.py", "ENVIRONMENT").Environment()
    assert calculator.reset("", None) == ""
    for action, result in {
        "<reasoning>15-4=": "11",
        ",11 + 3 =": "14",
        "17*24=": "408",
        "x=": "",
    }.items():
        assert calculator.step(action) == (result, 0.0, False, False)
    assert calculator.step("</reasoning><answer>14</answer>") == ("", 0.0, True, False)


def test_a_world_is_not_asked_on_several_hosts():
    with pytest.raises(UserError, match=r"^DISTRIBUTED=True: does not work with turns"):
        constants("DISTRIBUTED=True")
