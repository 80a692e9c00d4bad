"""Checkpoints in a bucket: refused before the first evaluation, killed in the middle of a save."""

import json
import os
import shutil
import signal
from pathlib import Path

import fake_bucket
import numpy as np
import pytest
from gcsfs import GCSFileSystem
from short_runs import SHORT, finish, load_weights, run_here, start, wait_for

import grpo_llama3_1_8b_demo as demo
import settings
from run import checkpoints, run_folder
from run import start as starting
from run.run_files import read_log, read_object
from settings import UserError


@pytest.fixture
def refusing(bucket):
    """Buckets that refuse, by name."""
    bucket.make("objects-only", ["roles/storage.objectAdmin"])
    bucket.make("read-only", ["roles/storage.objectViewer", "roles/storage.legacyBucketReader"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("objects-only", r"lacks storage.buckets.get on .*role roles/storage.legacyBucketReader"),
        ("read-only", r"lacks storage.objects.create, .*give it the role roles/storage.objectAdmin"),
        ("nobodys", r"there's no bucket nobodys; create it"),
    ],
)
def test_a_bucket_that_refuses_is_refused_before_the_model_is_loaded(
    name, said, refusing, bucket, empty_folder, monkeypatch
):
    monkeypatch.setattr(starting, "load_llm", None)  # called, it raises
    for more in ([], ["DRY_RUN=True"]):
        with pytest.raises(UserError, match=f"^CHECKPOINT_DIR=gs://{name}/x: .*{said}") as error:
            demo.main([*SHORT, "RUN_DIR=run", f"CHECKPOINT_DIR=gs://{name}/x", *more])
        assert "\n" not in str(error.value)
    assert not bucket.names(f"gs://{name}")


def test_a_whole_run_ends_in_a_new_bucket_as_on_a_disk(bucket, finished, empty_folder):
    address = bucket.make("new")
    demo.main([*SHORT, "RUN_DIR=run", f"CHECKPOINT_DIR={address}", "DRY_RUN=True"])
    assert not bucket.names(address)
    said = run_here(empty_folder, *SHORT, f"CHECKPOINT_DIR={address}")
    assert "report: run/report.md" in said
    there = bucket.names(f"{address}/run")
    assert {"after.json", "report.html", "8/commit_success.txt", "8/weights/manifest.ocdbt"} < {*there}
    assert checkpoints.saved(f"{address}/run") == checkpoints.saved(finished / "run" / "checkpoints")
    read = [read_log(folder / "run" / "train_log.csv") for folder in (finished, empty_folder)]
    assert [[row["loss"] for row in rows] for rows in read][0] == [row["loss"] for row in read[1]]
