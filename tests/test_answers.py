"""answers.jsonl: every number computed again in another way, from the texts, the log and
checkpoints.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from hostile import HOSTILE
from test_load_llama import LOG_PROB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import grpo_llama3_1_8b_demo as demo
import inference
import reward_func
import settings
from model import llama
from model.llm import load_llm
from run import answers, checkpoints
from run.run_files import read_log
from settings import HERE
from task.grading import format_ok, grade, last_number
from task.run_grader import course_rewards

G, STEPS = 4, 4
KEPT = [1, 3, 4]  # the first, every third, the last
ARGUMENTS = (
    f"NUM_BATCHES={STEPS} BATCH_SIZE=4 NUM_GENERATIONS={G} TOTAL_GENERATION_STEPS=13 "
    "NUM_ITERATIONS=2 LEARNING_RATE=5e-4 TEMPERATURE_END=0.6 ZERO_VARIANCE_GROUPS=refill "
    "MASK_OVERLONG=True SAVE_INTERVAL_STEPS=1 MAX_TO_KEEP=20 LOG_ANSWERS_EVERY=3 "
    "EVAL_EVERY=0 NUM_TEST_QUESTIONS=16 EVAL_CONFIG=liberal"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("answers") / "run"
    demo.main([*ARGUMENTS, f"RUN_DIR={folder}"])
    return folder


@pytest.fixture(scope="module")
def rows(run):
    return [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]


def test_the_chosen_steps_are_kept_with_all_answers(run, rows):
    assert [row["step"] for row in rows] == [step for step in KEPT for _ in range(4)]
    assert all(len(row["completions"]) == G for row in rows)
    drawn = [row["answers"] for row in read_log(run / "train_log.csv") if row["step"] in KEPT]
    assert max(drawn) > 4 * G  # some groups are those of a refill


def test_points_rewards_and_advantages_follow_from_the_texts(rows):
    spread = 0
    for row in rows:
        texts = [answer["text"] for answer in row["completions"]]
        given = dict(prompts=None, completions=texts, answer=[row["answer"]] * G)
        points = {name: f(**given) for name, f in course_rewards(reward_func).items()}
        rewards = np.sum([*points.values()], axis=0)
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        spread += rewards.std() > 0
        for i, answer in enumerate(row["completions"]):
            assert answer["points"] == {name: of_all[i] for name, of_all in points.items()}
            assert answer["reward"] == rewards[i]
            # five decimals are kept
            assert answer["advantage"] == pytest.approx(expected[i], abs=1e-5)
            assert answer["correct"] == grade(texts[i], row["answer"])
            assert answer["correct_lenient"] == (last_number(texts[i]) == int(row["answer"]))
            assert answer["format_ok"] == format_ok(texts[i])
    assert spread > 4  # else equal numbers everywhere would pass


def test_tokens_and_their_texts_are_the_answer_to_the_question_and_the_masked_ones_do_not_count(
    rows,
):
    tokenizer = llama.load_tokenizer(HERE / "tiny_llama")
    data = map(json.loads, (HERE / "tiny_gsm8k/train.jsonl").read_text().splitlines())
    asked, cut = {row["question"]: row["answer"].split("#### ")[1] for row in data}, 0
    for row in rows:
        assert asked[row["question"]] == row["answer"]
        for answer in row["completions"]:
            assert tokenizer.decode(answer["tokens"], skip_special_tokens=True) == answer["text"]
            assert "".join(answer["pieces"]) == tokenizer.decode(answer["tokens"])
            assert len(answer["pieces"]) == len(answer["tokens"]) == len(answer["log_prob"])
            assert (
                answer["cut_off"]
                == (answer["tokens"][-1] != tokenizer.eos_token_id)
                != answer["counts"]
            )
            cut += answer["cut_off"]
        step = [a for other in rows if other["step"] == row["step"] for a in other["completions"]]
        counted = [len(answer["tokens"]) for answer in step if answer["counts"]]
        assert (row["completions_in_step"], row["tokens_in_step"]) == (len(counted), sum(counted))
    assert 0 < cut < len(rows) * G


def test_log_probs_are_those_of_the_checkpoints_before_and_after_the_step(run, rows):
    """Prompt and answer are at the left here, where training has the prompt's padding."""
    c, *_ = inference.read_arguments([f"CHECKPOINT={run}"])
    folder, hf = llama.fetch_model("tiny_llama")
    tokenizer = llama.load_tokenizer(folder)
    llm = load_llm(settings.read(demo.Constants, ARGUMENTS), folder, hf, tokenizer)
    forward = nnx.jit(type(llm.actor).__call__)
    mine = inference.add_prompts(c, [row for row in rows if row["step"] == STEPS], tokenizer)
    asked = [
        (tokenizer.encode(row["prompts"], add_special_tokens=False), answer)
        for row in mine
        for answer in row["completions"]
    ]
    tokens = np.zeros((len(asked), 56), np.int32)
    for line, (prompt, answer) in zip(tokens, asked):
        line[: len(prompt) + len(answer["tokens"])] = prompt + answer["tokens"]
    positions = np.broadcast_to(np.arange(56), tokens.shape)
    close = LOG_PROB / mine[0]["temperature"] + 0.5e-5  # five decimals are kept
    for name, step in (
        ("log_prob_reference", 0),
        ("log_prob", STEPS - 1),
        ("log_prob_after", STEPS),
    ):
        if step:
            with checkpoints.open_manager(str(run / "checkpoints")) as manager:
                nnx.update(llm.actor, checkpoints.restore(manager, step, llm.params)[0])
        model, segments = llm.actor if step else llm.reference, (tokens != 0).astype(np.int32)
        logits, _ = forward(model, tokens, positions, None, None, decoder_segment_ids=segments)
        log_prob = jax.nn.log_softmax(np.asarray(logits, np.float32) / mine[0]["temperature"])
        for of_line, (prompt, answer) in zip(log_prob, asked, strict=True):
            places = len(prompt) - 1 + np.arange(len(answer["tokens"]))
            expected = of_line[places, np.array(answer["tokens"])]
            np.testing.assert_allclose(answer[name], expected, rtol=0, atol=close)
    changes = [np.subtract(answer["log_prob_after"], answer["log_prob"]) for _, answer in asked]
    assert max(np.abs(change).max() for change in changes) > 20 * close


def test_the_texts_of_the_tokens_add_up_to_the_text():
    """With a byte-level BPE as Llama's: a character can take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    texts = [text.encode("utf-8", "ignore").decode() for text in HOSTILE]  # without lone surrogates
    tokenizer.train_from_iterator(texts, trainer)
    ids = [tokenizer.encode(text).ids for text in texts]
    # these may end in the middle of a character
    for tokens in [*ids, *(tokens[:-1] for tokens in ids)]:
        pieces = answers.token_texts(tokenizer, tokens)
        assert len(pieces) == len(tokens) > 1 and "".join(pieces) == tokenizer.decode(tokens)
        whole = [tokenizer.decode([token]) for token in tokens]
        for piece, alone in zip(pieces, whole):  # a token that is whole characters has its own text
            assert "\ufffd" in alone or piece == alone
