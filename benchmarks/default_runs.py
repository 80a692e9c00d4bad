"""How long each script's default run takes, the first time and again: the times on the course's
front page.

    python benchmarks/default_runs.py       # about six minutes; nothing else should run

Every script twice, each a process of its own, timed whole: imports, compiling, evaluation,
pictures. The first run finds an empty cache of compiled programs, the second one what the first has
left. Writes benchmarks/default_runs.csv.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import commit, processor, write_csv

HERE = Path(__file__).resolve().parent
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


def main() -> None:
    """Measures all of them and writes the table. Compiling is nan where result.json does not count
    it.
    """
    rows, made_from = [], commit()
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}
            for run in ("first", "second"):
                words = [sys.executable, *script.split(), f"RUN_DIR={folder}/{run}"]
                started = time.perf_counter()
                subprocess.run(
                    words, cwd=HERE.parent, env=env, stdout=subprocess.DEVNULL, check=True
                )
                seconds = time.perf_counter() - started
                result = json.loads(Path(folder, run, "result.json").read_text())
                rows.append(
                    {
                        "script": script,
                        "run": run,
                        "seconds": round(seconds, 1),
                        "compile_seconds": round(result.get("compile_seconds", math.nan), 1),
                        "machine": processor(),
                        "commit": made_from,
                        "date": time.strftime("%Y-%m-%d"),
                    }
                )
                print(*rows[-1].values(), sep=", ", flush=True)
    write_csv(HERE / "default_runs.csv", rows)


if __name__ == "__main__":
    main()
