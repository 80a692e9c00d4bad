"""How long each script's default run takes, the first time and again: the times on the course's front page.

    python benchmarks/default_runs.py       # about six minutes; nothing else should run

Every script twice, each a process of its own, timed whole: imports, compiling, evaluation, pictures. The
first run finds an empty cache of compiled programs, the second one what the first has left. Writes
benchmarks/default_runs.csv.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import commit, processor, write_csv

HERE = Path(__file__).resolve().parent
TABLE = HERE / "default_runs.csv"
SCRIPTS = [
    "1_Q_Learning/Q_Learning.py",
    "2_Cart_Pole_DQN/cart_pole_dqn.py",
    "3_Pendulum/reinforce.py",
    "3_Pendulum/ppo.py",
    "3_Pendulum/pendulum.py",
    "4_GRPO_MNIST/grpo_mnist.py MNIST_PATH=subset",
    "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
    "5_GRPO_Maxtext/mesh_and_axis_rules.py",
]


def measure(script: str, run_dir: Path, cache: Path) -> tuple[float, float]:
    """Seconds of a whole run, and those of them that result.json counts as compiling (nan: not counted)."""
    words = [sys.executable, *script.split(), f"RUN_DIR={run_dir}"]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    started = time.perf_counter()
    subprocess.run(words, cwd=HERE.parent, env=env, stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - started
    return seconds, json.loads((run_dir / "result.json").read_text()).get("compile_seconds", float("nan"))


def main() -> None:
    """Measures all of them and writes the table."""
    rows = []
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            for run in ("first", "second"):
                seconds, compiling = measure(script, Path(folder, run), Path(folder, "compiled"))
                rows.append({
                    "script": script, "run": run, "seconds": round(seconds, 1),
                    "compile_seconds": round(compiling, 1), "machine": processor(), "commit": commit(),
                    "date": time.strftime("%Y-%m-%d"),
                })  # fmt: skip
                print(f"{script}, {run} run: {seconds:.1f} s, compiling {compiling:.1f} s")
    write_csv(TABLE, rows)


if __name__ == "__main__":
    main()
