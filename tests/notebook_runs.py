"""Each notebook from the first to the last cell: `make test-notebooks`. With constants that keep it short."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import notebooks

SHORT = {
    "Q_Learning": ["NUM_EPISODES=200", "DECAY_EPISODES=100"],
    "cart_pole_dqn": ["NUM_STEPS=4000", "NUM_SEEDS=2", "EVAL_EPISODES=5"],
    "reinforce": ["NUM_STEPS=10000", "NUM_SEEDS=2", "EVAL_EPISODES=5"],
    "ppo": ["NUM_STEPS=10000", "NUM_SEEDS=2", "EVAL_EPISODES=5"],
    "pendulum": ["NUM_STEPS=10000", "NUM_SEEDS=2", "EVAL_EPISODES=5"],
    "grpo_mnist": ["MNIST_PATH=subset", "NUM_EPOCHS=1", "NUM_SEEDS=2"],
    "grpo_llama3_1_8b_demo": ["NUM_BATCHES=4", "NUM_TEST_QUESTIONS=16", "EVAL_EVERY=2", "EVAL_QUESTIONS=16"],
    "mesh_and_axis_rules": [],
}
LEFT = {  # what a run writes last, or near it
    "mesh_and_axis_rules": "mesh_and_axis_rules.png",
}


@pytest.mark.parametrize("script", notebooks.SCRIPTS, ids=lambda script: Path(script).stem)
def test_a_notebook_runs_from_the_first_to_the_last_cell(script, tmp_path):
    made, name = notebooks.notebook(script), Path(script).stem
    cells = [cell.source for cell in made.cells if cell.cell_type == "code"]
    assert "".join(cells[1:]).count("# %%") == 0 and len(cells) > 4
    setup = made.cells[1]
    arguments = [*SHORT[name], f"RUN_DIR={tmp_path / 'run'}"]
    setup.source = setup.source.replace("ARGUMENTS = []", f"ARGUMENTS = {arguments}")
    NotebookClient(made, timeout=1200, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert all(cell.execution_count for cell in made.cells if cell.cell_type == "code")
    assert (tmp_path / "run" / LEFT.get(name, "result.json")).is_file()
    nbformat.validate(made)
