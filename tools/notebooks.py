"""Makes the scripts into notebooks, a cell for each `# %%`: `make notebooks`. They are never edited.

.venv-site/bin/python tools/notebooks.py notebooks
"""

import sys
from pathlib import Path

import jupytext
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "1_Q_Learning/Q_Learning.py",
    "2_Cart_Pole_DQN/cart_pole_dqn.py",
    "3_Pendulum/reinforce.py",
    "3_Pendulum/ppo.py",
    "3_Pendulum/pendulum.py",
    "4_GRPO_MNIST/grpo_mnist.py",
    "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py",
    "5_GRPO_Maxtext/mesh_and_axis_rules.py",
]
ABOUT = """`{script}` as a notebook, made by `make notebooks`: change the script, not this copy.

In a checkout, choose `.venv-site` as the kernel. On Colab or Kaggle (Python 3.12) set `REPOSITORY`:
the next cell fetches the course, and its pinned packages into a folder of their own; what is there stays."""
SETUP = """\
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # only where there is no checkout: what `git clone` takes
ARGUMENTS = []  # constants for this run, such as ["SEED=1"]

course = next((p for p in (Path.cwd(), *Path.cwd().parents) if (p / "{script}").is_file()), None)
if course is None:
    subprocess.run(["git", "clone", "--depth=1", REPOSITORY, "course"], check=True)
    course = Path("course").resolve()


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


pins = dict(re.findall(r"^([\\w-]+)==([^ ;\\\\]+)", (course / "requirements.txt").read_text(), re.M))
packages = course / ".packages"
sys.path[:0] = [str(course / "{folder}"), str(packages)]
if any(installed(name) != pins[name] for name in ("jax", "flax", "optax", "tyro")):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--target", str(packages)]
    subprocess.run([*pip, "-r", course / "requirements/build.txt"], check=True)
    path = os.environ | {{"PYTHONPATH": str(packages)}}  # setuptools, for the package without a wheel
    subprocess.run([*pip, "--no-build-isolation", "-r", course / "requirements.txt"], check=True, env=path)
os.chdir(course)
sys.argv = ["{script}", *ARGUMENTS]"""


def notebook(script: str):
    """A script, by its path in the repository, as a notebook that also finds its folder and its packages."""
    made = jupytext.read(ROOT / script, fmt="py:percent")
    setup = SETUP.format(script=script, folder=Path(script).parent)
    made.cells[:0] = [new_markdown_cell(ABOUT.format(script=script)), new_code_cell(setup)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": kernel}
    return made


def make(target: Path) -> None:
    """Writes every notebook into the folder `target`."""
    target.mkdir(exist_ok=True)
    for script in SCRIPTS:
        path = target / f"{Path(script).stem}.ipynb"
        jupytext.write(notebook(script), path)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
