"""Which one-line faults do the tests catch? Run `make mutants`, or `python tests/mutants.py WORDS`.

Each entry of mutants.toml puts a fault into a copy of the checkout and runs the test file that has to fail.
WORDS pick the entries whose file or test contains one of them. Exit code 1 if a mutant lives or no longer
fits the code.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = {0: "LIVES", 1: "killed", 5: "NO TEST", -signal.SIGALRM: "killed (never ends)"}
SLOW_IMPORTS = "jax flax.nnx optax rlax gymnasium matplotlib.pyplot tensorflow_probability.substrates.jax"


def run(mutant: dict[str, str], copy: Path) -> str:
    """What became of a mutant: killed, or else in capitals. `copy` is left as it was."""
    path = copy / mutant["file"]
    text = path.read_text()
    if text.count(mutant["old"]) != 1:
        return f"NOT IN THE FILE ONCE ({text.count(mutant['old'])})"
    path.write_text(text.replace(mutant["old"], mutant["new"]))
    child = os.fork()  # has imported the libraries already
    if not child:
        try:
            os._exit(test(mutant, copy))
        finally:
            os._exit(3)  # whatever happens, the child leaves here
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    path.write_text(text)
    return OUTCOMES.get(code, f"PYTEST EXITS WITH {code}")


def test(mutant: dict[str, str], copy: Path) -> int:
    """pytest's exit code for the tests of a mutant."""
    signal.alarm(600)
    os.chdir(copy)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    import pytest

    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"tests/{mutant['test']}"]
    return pytest.main([*words, *(["-k", mutant["k"]] if "k" in mutant else [])])


def main(words: list[str]) -> int:
    # A .pyc file is as new as its source to the second: a mutant of the same length would run the old one.
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "runs" / "compiled"))
    mutants = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    mutants = [m for m in mutants if not words or any(w in m["file"] + m["test"] for w in words)]
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in ("conftest", *SLOW_IMPORTS.split()):  # conftest.py sets JAX's environment
        importlib.import_module(name)
    del sys.modules["conftest"]
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in tracked.split("\0"):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        for mutant in mutants:
            outcome = run(mutant, Path(folder))
            alive += not outcome.startswith("killed")
            change = f"{mutant['old'].strip()}  ->  {mutant['new'].strip()}"
            print(f"{outcome:8}  {mutant['file']}: {change}", flush=True)
    print(f"{len(mutants) - alive} of {len(mutants)} killed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
