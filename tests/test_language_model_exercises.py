"""The two functions that a reader of the language model's page writes."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import llama_by_hand as by_hand
import supervised_fine_tuning as sft
from settings import HERE
from tools.exercises import grader, language_model_checks

EXERCISES = language_model_checks.EXERCISES
ATTENTION = """
    T, d = queries.shape[1:]
    weights = np.zeros((len(queries), T, T), np.float32)
    for head in range(len(queries)):
        for t in range(T):
            score = np.exp(keys[head, : t + 1] @ queries[head, t] / d**0.5)
            weights[head, t, : t + 1] = score / score.sum()
    return weights
"""
LOSS = """
    total = count = 0
    for b, t in zip(*np.nonzero(learned)):
        row = logits[b, t - 1].astype(float)
        total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens[b, t]]
        count += 1
    return total / count
"""


def test_the_scripts_own_functions_are_right():
    """The loss of supervised_fine_tuning.py is optax's cross-entropy under a mask."""
    attention = by_hand.attention_weights
    assert grader.judge(attention, EXERCISES["attention_weights"]) == "right"

    def loss(logits, tokens, learned):
        model = lambda *_: (jnp.asarray(logits), None)  # noqa: E731  (the logits are given)
        return np.asarray(sft.cross_entropy(model, jnp.asarray(tokens), jnp.asarray(learned)))

    assert grader.judge(loss, EXERCISES["demonstration_loss"]) == "right"


@pytest.mark.filterwarnings("ignore:invalid value")  # a token that can't read from anything: 0 / 0
@pytest.mark.parametrize(
    "name,words", [(name, words) for name, one in EXERCISES.items() for words in one.mistakes]
)
def test_every_mistake_is_recognized_by_its_name(name, words):
    exercise = EXERCISES[name]
    wrong = exercise.variant(exercise.right, exercise.mistakes[words])
    assert grader.judge(wrong, exercise).endswith(f"\nThis is what comes out if {words}.")


def run(folder, *bodies):
    """The reader's file with these bodies, as a command."""
    text = (HERE / "language_model_exercises.py").read_text()
    for body in bodies:
        text = text.replace("    raise NotImplementedError\n", body.lstrip("\n"), 1)
    file = folder / "language_model_exercises.py"
    file.write_text(text)
    environment = {"PYTHONPATH": str(HERE)}
    return subprocess.run(
        [sys.executable, file], capture_output=True, text=True, env=environment, cwd=folder
    )


def test_a_reader_who_writes_both_sees_the_models_answer_with_the_own_attention(tmp_path):
    done = run(tmp_path, ATTENTION, LOSS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [f"{name:20s} right" for name in EXERCISES]
    assert done.stdout.endswith("answer: <reasoning>8-6=2,2+5=7</reasoning>7</answer>\n")


def test_nothing_is_begun_as_it_comes(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [f"{name:20s} not begun" for name in EXERCISES]
