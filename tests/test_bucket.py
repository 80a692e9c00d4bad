"""Checkpoints in a bucket: refused before the first evaluation, killed in the middle of a save."""

import shutil

import pytest
from short_runs import SHORT, finish, free_port, run_here, start, wait_for

import grpo_llama3_1_8b_demo as demo
from run import checkpoints
from run import start as starting
from run.run_files import read_log, read_object
from settings import UserError


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


def assert_ends_alike(finished, folder):
    """The same loss in each step, and the same answers at the end."""
    logs = [place / "run" / "train_log.csv" for place in (finished, folder)]
    whole, other = ([row["loss"] for row in read_log(log)] for log in logs)
    assert whole == other and len(whole) == 8
    assert read_object(logs[0].with_name("after.json")) == read_object(
        logs[1].with_name("after.json")
    )


@pytest.fixture
def refusing(bucket):
    """Buckets that refuse, by name."""
    bucket.make("objects-only", ["roles/storage.objectAdmin"])
    bucket.make("read-only", ["roles/storage.objectViewer", "roles/storage.legacyBucketReader"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("objects-only", r"lacks storage.buckets.get on .*role roles/storage.legacyBucketReader"),
        ("read-only", r"lacks storage.objects.create, .*the role roles/storage.objectAdmin"),
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
    there = {*bucket.names(f"{address}/run")}
    assert there > {"after.json", "report.html", "8/commit_success.txt", "8/weights/manifest.ocdbt"}
    assert checkpoints.saved_steps(f"{address}/run") == [2, 4, 6, 8]
    assert_ends_alike(finished, empty_folder)


def test_killed_in_its_first_save_and_in_its_second_a_run_ends_as_if_nothing_had_happened(
    bucket, finished, tmp_path
):
    """Each time on a machine of its own: what the disk held is lost with it."""
    address = bucket.make("twice")

    def begin(machine):
        folder = tmp_path / machine
        folder.mkdir()
        return start(folder, *SHORT, "RUN_DIR=run", f"CHECKPOINT_DIR={address}")

    # the last thing that Orbax writes, and one of the first
    for machine, upload in (("first", "2/commit_success.txt"), ("second", "4/weights/d/")):
        bucket.hold(f"^run/{upload}")
        run = begin(machine)
        wait_for(bucket.held.is_set, run)
        run.kill()
        run.communicate()
        bucket.release()
        step = upload.partition("/")[0]
        assert any(name.startswith(step) for name in bucket.names(f"{address}/run"))
    assert checkpoints.saved_steps(f"{address}/run") == [2]
    assert "going on after step 2 of 8" in finish(begin("third"))
    assert_ends_alike(finished, tmp_path / "third")


@pytest.mark.slow
def test_two_hosts_with_disks_of_their_own_resume_from_the_bucket_and_run_again(
    bucket, tmp_path, monkeypatch
):
    """With a user's flags and compilation cache, cold and warm, not with the suite's."""
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    address = bucket.make("hosts")
    constants = [*SHORT, "NUM_BATCHES=4", "EVAL_EVERY=0", f"CHECKPOINT_DIR={address}"]

    def hosts(run):
        joined = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": "2",
        }
        started = []
        for i in range(2):
            folder = tmp_path / f"host_{i}"
            folder.mkdir(exist_ok=True)
            arguments = [*constants, "DISTRIBUTED=True", f"RUN_DIR={run}"]
            started.append(start(folder, *arguments, **joined, JAX_PROCESS_ID=str(i)))
        return started

    both = hosts("run")
    wait_for(lambda: ("hosts", "run/2/commit_success.txt") in bucket.objects, both[0])
    for host in reversed(both):  # what runs the job ends the other one
        host.kill()
        host.communicate()
    shutil.rmtree(tmp_path / "host_1")
    outs = [finish(host) for host in hosts("run")]
    assert "going on after step 2 of 4" in outs[0]
    for host in hosts("again"):
        finish(host)
    for folder in ("host_0/run", "host_1/run/host_1", "host_1/again/host_1"):
        rows = [read_log(tmp_path / run / "train_log.csv") for run in ("host_0/again", folder)]
        assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
        assert len(rows[0]) == 4
