"""Each notebook from the first to the last cell: `make test-notebooks`. With constants that keep it
short.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

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
    "grpo_llama3_1_8b_demo": [
        "NUM_BATCHES=4",
        "NUM_TEST_QUESTIONS=16",
        "EVAL_EVERY=2",
        "EVAL_QUESTIONS=16",
    ],
    "mesh_and_axis_rules": [],
    "llama_by_hand": ["MAX_TOKENS=2"],
    "supervised_fine_tuning": [
        "NUM_STEPS=2",
        "WARMUP_STEPS=1",
        "NUM_TEST_QUESTIONS=2",
        "BATCH_SIZE=4",
    ],
}


def shows(output):
    """Whether a reader sees something of a cell's output: printed text, a value, a picture."""
    if output.output_type == "stream":
        return output.name == "stdout" and output.text.strip() != ""
    return bool(output.data)


NO_PICTURES = ("mesh_and_axis_rules", "supervised_fine_tuning")


@pytest.mark.parametrize("script", notebooks.PAGES, ids=lambda script: Path(script).stem)
def test_a_notebook_runs_from_the_first_to_the_last_cell(script, tmp_path):
    made, chinese = notebooks.notebook(script), notebooks.notebook(script, "_ch")
    cells = [cell for cell in made.cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells] == [
        c.source for c in chinese.cells if c.cell_type == "code"
    ]
    name = Path(script).stem
    writes = name != "llama_by_hand"  # which only prints
    arguments = [*SHORT[name], *[f"RUN_DIR={tmp_path}"] * writes]
    cells[0].source = cells[0].source.replace("ARGUMENTS = []", f"ARGUMENTS = {arguments}")
    NotebookClient(made, timeout=1200, resources={"metadata": {"path": ROOT}}).execute()
    assert all(cell.execution_count for cell in cells)
    silent = [cell.source for cell in cells if not any(map(shows, cell.outputs))]
    assert not silent, silent[0]
    assert len([cell for cell in cells if "change" in cell.metadata.get("tags", ())]) >= 3
    assert (tmp_path / "result.json").is_file() == writes
    if (kept := tmp_path / "constants.json").is_file():
        text = [f"{name}={value}" for name, value in json.loads(kept.read_text()).items()]
        assert set(SHORT[name]) <= set(text)
    if writes:
        shown = {kind for output in cells[-1].outputs for kind in output.data}
        kinds = {".png": "image/png", ".svg": "image/svg+xml", ".md": "text/markdown"}
        wanted = {kinds[path.suffix] for path in tmp_path.iterdir() if path.suffix in kinds}
        assert wanted <= shown and (wanted or name in NO_PICTURES)
    page = ROOT / Path(script).parent / f"{notebooks.PAGES[script]}.md"
    for notebook in (made, chinese):
        nbformat.validate(notebook)
        prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        assert len(re.findall(r"^\$\$\n.+?\n\$\$$", prose, re.M | re.S)) == page.read_text().count(
            "```math\n"
        )
        assert "```math" not in prose
        named = [name for cell in notebook.cells for name in cell.get("attachments", ())]
        assert (
            "".join(cell.source for cell in notebook.cells).count("](attachment:") == len(named) > 0
        )


def test_a_kernel_that_has_loaded_another_numpy_is_told_to_restart(tmp_path):
    """And finds the course's from then on: a .pth file is read when Python starts."""
    made = notebooks.notebook("1_Q_Learning/Q_Learning.py")
    before = f"""import numpy, site
numpy.__version__ = "1.0"
site.getsitepackages = lambda: ["{tmp_path}"]"""
    made.cells[0] = nbformat.v4.new_code_cell(before)
    del made.cells[2:]
    with pytest.raises(CellExecutionError, match=r"(?s)SystemExit.*Restart it, and run this"):
        NotebookClient(made, resources={"metadata": {"path": ROOT}}).execute()
    line = (tmp_path / "course.pth").read_text()
    code = "import sys; print(sys.path[0])"
    ran = [sys.executable, "-c", f"{line}; {code}"]
    shown = subprocess.run(ran, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(ROOT / ".packages")


def test_on_github_the_links_of_a_notebook_lead_there(monkeypatch):
    monkeypatch.setattr(notebooks, "GITHUB", "https://github.com/someone/course")
    made = notebooks.notebook("3_Pendulum/ppo.py")
    assert 'REPOSITORY = "https://github.com/someone/course"  #' in made.cells[1].source
    prose = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
    links = re.findall(
        r"(?<!!)\[[^]]*\]\(([^)#]+)", re.sub(r"^\$\$.*?\$\$$", "", prose, flags=re.M | re.S)
    )
    ours = [link for link in links if "someone" in link]
    assert ours and all(link.startswith(("https://", "attachment:")) for link in links)
    for link in ours:
        path = link.removeprefix("https://github.com/someone/course/blob/HEAD/")
        assert (ROOT / path).resolve().exists(), link


def test_without_the_course_the_first_cell_says_what_to_set(tmp_path):
    made = notebooks.notebook("1_Q_Learning/Q_Learning.py")
    del made.cells[2:]
    with pytest.raises(CellExecutionError, match=r"(?s)SystemExit.*set REPOSITORY in this cell"):
        NotebookClient(made, resources={"metadata": {"path": tmp_path}}).execute()
