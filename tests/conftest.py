"""The folders are no packages: tests import folder 5's scripts from the path, the others' by
folders.load.
"""

import fcntl
import gc
import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in ("5_GRPO_Maxtext", "benchmarks", "benchmarks/peers", ""):
    sys.path.insert(0, str(ROOT / folder))

# A suite that a shell started in the background (`make test &`) ignores Ctrl-C, and so would the
# scripts that tests start: those that are to be interrupted would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The scripts' own flag and no other: programs are compiled as a user's are. To skip XLA's expensive
# passes would save time, but such programs round otherwise.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
# A program that one test has compiled is read by the next, by the other worker, and by the scripts
# that tests start. All of it before jax is imported.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "runs" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected():
    """Millions of objects that imports and earlier files made are looked at no more by each
    collection.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def shared_programs():
    """A run with the model and sizes of an earlier one takes over what that one has traced."""
    with pytest.MonkeyPatch.context() as patch:
        # the tests of folders 1 to 4 alone spare its imports
        if "grpo_llama3_1_8b_demo" in sys.modules:
            import short_runs

            short_runs.share_programs(patch)
        yield


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The current folder, with nothing in it: a file's tests have it by `pytestmark`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A function of constants: the folder of a finished run with them, with run/ and said.txt.

    Each run is made once for all files and workers. Copy it to change it.
    """
    import short_runs

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run_once(*constants):
        folder = base / f"finished_{hashlib.sha256(repr(constants).encode()).hexdigest()}"
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "said.txt").exists():  # which is written last
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                short_runs.run_here(folder, *constants)
        return folder

    return run_once


@pytest.fixture(scope="module")
def bucket():
    """A stand-in for Google Cloud Storage, for this process and its children."""
    import fake_bucket
    from etils.epath.backend import fsspec_backend

    fake = fake_bucket.of_this_process()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fake.variables.items():
            patch.setenv(name, value)
        from gcsfs import GCSFileSystem  # which reads one of them now

        yield fake
    fsspec_backend._get_filesystem.cache_clear()  # it'd lead there still
    GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def driver(request):
    """A browser for the files that want one."""
    import chromium

    driver = chromium.started(traced=hasattr(request.module, "TRACED"))
    yield driver
    driver.quit()
