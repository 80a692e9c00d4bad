"""Which one-line faults do the tests catch? Run `make mutants`, or `python tests/mutants.py WORDS`.

Each entry of mutants.toml puts a fault into a copy of the checkout and runs the test file that has
to fail. WORDS pick the entries whose file or test contains one of them. Exit code 1 if a mutant
lives or no longer fits the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = {0: "LIVES", 1: "killed", 5: "NO TEST"}  # by pytest's exit code
SECONDS = 600  # a mutant that never ends is killed, too
# A .pyc file is as new as its source to the second: a mutant of the same length would run the old
# one.
VARIABLES = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / "runs" / "compiled")} | os.environ
VARIABLES["PYTHONDONTWRITEBYTECODE"] = "1"


def run(mutant: dict[str, str], copy: Path) -> str:
    """What became of a mutant: killed, or else in capitals. `copy` is left as it was."""
    path = copy / mutant["file"]
    text = path.read_text()
    if text.count(mutant["old"]) != 1:
        return f"NOT IN THE FILE ONCE ({text.count(mutant['old'])})"
    path.write_text(text.replace(mutant["old"], mutant["new"]))
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    words += [f"tests/{mutant['test']}", *(["-k", mutant["k"]] if "k" in mutant else [])]
    try:
        done = subprocess.run(words, cwd=copy, env=VARIABLES, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        path.write_text(text)
    return OUTCOMES.get(done.returncode, f"PYTEST EXITS WITH {done.returncode}")


def main(words: list[str]) -> int:
    mutants = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    mutants = [m for m in mutants if not words or any(w in m["file"] + m["test"] for w in words)]
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(lambda name: (ROOT / name).is_file(), tracked.split("\0")):
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        for mutant in mutants:
            outcome = run(mutant, Path(folder))
            alive += outcome != "killed"
            change = f"{mutant['old'].strip()}  ->  {mutant['new'].strip()}"
            print(f"{outcome:8}  {mutant['file']}: {change}", flush=True)
    print(f"{len(mutants) - alive} of {len(mutants)} killed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
