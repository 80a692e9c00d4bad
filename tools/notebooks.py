"""Makes notebooks of the chapters, prose and script, in both languages: `make notebooks`. Never
edit them.

Each is a page of the course with its formulas and pictures. A section that quotes the script stands
before the cell it quotes; what comes after the last of these stands after the run.

Every code cell shows something. What a script leaves out because it would be in the way there, such
as an example of a formula, is in notebook_cells/, a file for each script:

    # %% after NAME     the lines end the cell that defines NAME; if they begin with a question in
                        both languages (# en: ..., # zh: ...), they're a cell of their own, to
                        change and run again
    # %% before NAME    such a cell comes before the section that defines NAME

A cell without such lines ends with a table of what it defines (notebook_tables.py).

    .venv-site/bin/python tools/notebooks.py notebooks
"""

import ast
import base64
import itertools
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
COURSE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["course"]["repository"]
GITHUB = f"https://github.com/{COURSE}" if COURSE else ""  # where Colab gets the course
PAGES = {  # of each script
    "1_Q_Learning/Q_Learning.py": "README",
    "2_Cart_Pole_DQN/cart_pole_dqn.py": "README",
    "3_Pendulum/reinforce.py": "README",
    "3_Pendulum/ppo.py": "ppo",
    "3_Pendulum/pendulum.py": "ppo",
    "4_GRPO_MNIST/grpo_mnist.py": "README",
    "5_GRPO_Maxtext/llama_by_hand.py": "language_model",
    "5_GRPO_Maxtext/supervised_fine_tuning.py": "language_model",
    "5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py": "README",
    "5_GRPO_Maxtext/mesh_and_axis_rules.py": "docs/learn/mesh_and_axis_rules",
}
ABOUT = {
    "": """\
**On Colab or Kaggle,** this needs Python 3.12, 2 GB of disk and no GPU. The first cell clones the
course from `REPOSITORY` and installs its packages into the clone, a download of 570 MB. If the
kernel has already loaded another NumPy, the cell asks you to restart it. If the kernel is another
Python, choose one with 3.12 (on Colab: Runtime, Change runtime type, Runtime version).

**On your own machine,** choose the course's `.venv-site` as the kernel. There's nothing to install.

`ARGUMENTS` changes constants for this run. The original is `{script}`: change it, not this copy,
which `make notebooks` made.""",
    "_ch": """\
**在 Colab 或 Kaggle 上，** 需要 Python 3.12 和 2 GB 磁碟空間，不需要 GPU。
第一格會從 `REPOSITORY` 下載（clone）整門課，再把套件裝在它的資料夾裡，要下載 570 MB。
如果 kernel 已經載入別版的 NumPy，這一格會請你重新啟動 kernel。
如果 kernel 不是 Python 3.12，請換一個（Colab：執行階段 → 變更執行階段類型 → 執行階段版本）。

**在自己的電腦上，** kernel 選這門課的 `.venv-site`，什麼都不用裝。

這次執行要改常數，就填在 `ARGUMENTS`。原始檔是 `{script}`，要改請改它；
這一份是 `make notebooks` 產生的。""",
}
SETUP = """\
REPOSITORY = "{github}"  # what `git clone` takes, if the course isn't on this machine
ARGUMENTS = []  # constants for this run, such as ["SEED=1"]

import importlib.metadata
import os
import re
import site
import subprocess
import sys
from pathlib import Path

if sys.version_info[:2] != (3, 12):
    sys.exit(f'''The course needs Python 3.12; this kernel is {{sys.version.split()[0]}}.
Choose another, or run the script as a whole, in a cell of its own:
!git clone --depth=1 {{REPOSITORY}} course
!pip install uv
!cd course && uv run --no-project --python 3.12 --with-requirements requirements.txt {script}''')
places = (Path.cwd(), *Path.cwd().parents, Path("course").resolve())
course = next((place for place in places if (place / "{script}").is_file()), places[-1])
if not course.exists():
    if not REPOSITORY:
        sys.exit("The course isn't on this machine: set REPOSITORY in this cell to its address.")
    if subprocess.run(["git", "clone", "--depth=1", REPOSITORY, course]).returncode:
        sys.exit(f"git can't clone REPOSITORY={{REPOSITORY}}. Its own words stand above.")

requirements = (course / "requirements.txt").read_text()
pins = dict(re.findall(r"^([\\w-]+)==([^ ;\\\\]+)", requirements, re.M))
packages = course / ".packages"
sys.path[:0] = [str(course / "{folder}"), str(course / "tools"), str(packages)]
here = {{found.name: found.version for found in reversed([*importlib.metadata.distributions()])}}
if any(here.get(name) != pins[name] for name in ("jax", "flax", "optax", "tyro")):
    install = ["pip", "install", "--quiet", "--require-hashes", "--target", packages]
    pip = [sys.executable, "-m", *install, "-r", course / "requirements/build.txt"]
    subprocess.run(pip, check=True)  # uv, and setuptools for the package without a wheel
    uv = [packages / "bin/uv", *install, "--python", sys.executable, "--no-build-isolation"]
    uv += ["-r", course / "requirements.txt"]
    subprocess.run(uv, check=True, env=os.environ | {{"PYTHONPATH": str(packages)}})
numpy = sys.modules.get("numpy")
if numpy and numpy.__version__ != pins["numpy"]:
    first = f"import sys; sys.path.insert(0, {{str(packages)!r}})"
    Path(site.getsitepackages()[0], "course.pth").write_text(first)
    sys.exit("This kernel had already loaded another NumPy. Restart it, and run this cell again.")
os.chdir(course)
sys.argv = ["{script}", *ARGUMENTS]

import notebook_tables

print(f"Python {{sys.version.split()[0]}}, in {{course}}: {script} {{' '.join(ARGUMENTS)}}")"""
TO_CHANGE = {
    "": "**Change it, and run it again.** ",
    "_ch": "**改一改，再跑一次。** ",
}
RESULT = """\
import json

from IPython.display import SVG, Image, Markdown, display

given = [argument.partition("=") for argument in ARGUMENTS]
chosen = [folder for name, _, folder in given if name == "RUN_DIR"]
results = [Path(folder) / "result.json" for folder in chosen] or Path("runs").rglob("result.json")
newest = max(results, key=os.path.getmtime)
kinds = {".png": Image, ".svg": SVG, ".md": Markdown}
for path in sorted(newest.parent.iterdir()):
    if path.suffix in kinds:
        display(kinds[path.suffix](filename=path))
for name, value in json.loads(newest.read_text()).items():
    if not isinstance(value, dict):
        display(Markdown(f"**{name}:**\\n\\n{value}"))"""


def prose(text: str, page: Path):
    """Sections of a page as a cell that carries its pictures, with formulas as Jupyter reads them.
    Links lead to GitHub, or from the folder notebooks/ while the course isn't there.
    """
    pictures = {}

    def carried(match: re.Match) -> str:
        path = (page.parent / match[2]).resolve()
        kind = path.suffix[1:].replace("svg", "svg+xml")
        pictures[path.name] = {f"image/{kind}": base64.b64encode(path.read_bytes()).decode()}
        return f"![{match[1]}](attachment:{path.name})"

    text = re.sub(r"!\[([^]]*)\]\(([^)]*)\)", carried, text)
    here = f"{GITHUB}/blob/HEAD" if GITHUB else ".."
    here = f"{here}/{page.parent.relative_to(ROOT)}"
    text = re.sub(r"\]\((?!attachment:|[a-z]+:|#)", f"]({here}/", text)
    text = re.sub(r"^( *)```math\n(.*?)^ *```$", r"\1$$\n\2\1$$", text, flags=re.M | re.S)
    return new_markdown_cell(text.strip(), attachments=pictures)


class Extra(NamedTuple):
    """A piece of a file in notebook_cells/."""

    where: str  # "after" or "before"
    name: str  # of a definition in the script
    question: dict[str, str]  # by language; empty: the code ends the cell that defines the name
    code: str


def extras(script: str) -> list[Extra]:
    """What the notebook of a script has besides it; ValueError if a name isn't the script's."""
    found = []
    path = ROOT / "tools/notebook_cells" / Path(script).name
    for piece in re.split(r"^# %% ", path.read_text(), flags=re.M)[1:]:
        mark, _, code = piece.partition("\n")
        where, name = mark.split()
        said = {
            language: " ".join(re.findall(rf"^# {code_of}: (.*)$", code, re.M))
            for language, code_of in (("", "en"), ("_ch", "zh"))
        }
        said["_ch"] = re.sub(r"(?<=[^ -~]) (?=[^ -~])", "", said["_ch"])  # where its lines meet
        question = said if all(said.values()) else {}
        found.append(
            Extra(where, name, question, re.sub(r"^# (en|zh): .*\n", "", code, flags=re.M))
        )
    lacking = {extra.name for extra in found} - {*defined((ROOT / script).read_text())}
    if lacking:
        raise ValueError(f"{path.name} in notebook_cells/: {script} defines no {lacking}")
    return found


def defined(code: str) -> list[str]:
    """The names that a piece of a script defines, in their order."""
    names = []
    for node in ast.parse(code).body:
        targets = [x for target in getattr(node, "targets", []) for x in ast.walk(target)]
        names += [x.id for x in targets if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
        names += [node.name] if hasattr(node, "name") else []
    return names


def imported(code: str) -> list[str]:
    """The modules that a piece of a script imports, by the names it has for them."""
    imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import)]
    return [alias.asname or alias.name for node in imports for alias in node.names]


def with_table(code: str) -> str:
    """A cell's code, and then a table of what it defines, or else of the modules it imports."""
    names = defined(code) or imported(code)
    if "Constants" in names:
        return f"{code}\n\n\nnotebook_tables.constants(Constants)"
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"{code}\n\n\nnotebook_tables.about({quoted})"


def notebook(script: str, language: str = ""):
    """A script, by its path in the repository, as a notebook with its page, perhaps in _ch."""
    source = (ROOT / script).read_text()
    page = (ROOT / script).parent / f"{PAGES[script]}{language}.md"
    text = re.sub(r"^> .*\.md\)\n", "", page.read_text(), count=1, flags=re.M)
    text = re.sub(r"^<!-- colab .*?^<!-- end -->\n", "", text, flags=re.M | re.S)  # the way here
    cells = re.split(r"\n\n+(?=# %%)|\n\n\n(?=\S)", source)
    sections = re.split(r"^(?=## )", text, flags=re.M)
    quotes = rf"\[`([^`]+)`\]\((?:\.\./)*{Path(script).name}\)"

    def quoted(section: str) -> int:
        """The first cell of which a section quotes a line, or that defines a name it gives."""
        code = [
            f"def {text}(" if text.isidentifier() else text for text in re.findall(quotes, section)
        ]
        found = (i for i, cell in enumerate(cells) if i and any(text in cell for text in code))
        return next(found, len(cells))

    places = [quoted(section) for section in sections]
    opening = next((i for i, place in enumerate(places) if place < len(cells)), 0)
    places = [0 if i < opening else min(places[i:]) for i in range(len(places))]
    setup = SETUP.format(github=GITHUB, script=script, folder=Path(script).parent)
    made = [new_markdown_cell(ABOUT[language].format(script=script)), new_code_cell(setup)]
    given, waiting = extras(script), []  # the parts of the script that wait for the cell's end

    def close(*examples: Extra) -> None:
        """Ends the code cell, with examples or with a table; then come the cells to change."""
        code = "\n\n\n".join(waiting)
        waiting.clear()
        last = [example.code.strip() for example in examples if not example.question]
        if code:
            runs = code.endswith("settings.run(main)")
            shown = "\n\n\n".join([code, *last]) if last or runs else with_table(code)
            made.append(new_code_cell(shown))
        for example in examples:
            if example.question:
                made.append(new_markdown_cell(TO_CHANGE[language] + example.question[language]))
                made.append(new_code_cell(example.code.strip(), metadata={"tags": ["change"]}))

    for i, cell in enumerate(cells):
        names = defined(cell)
        before = [x for x in given if x.where == "before" and x.name in names]
        here = [prose(section, page) for section, place in zip(sections, places) if place == i]
        heading = re.match(r"# %% (.*?) -+\n", cell)
        if before or here or heading:
            close()
            close(*before)
            made += here
        if heading:
            made.append(new_markdown_cell(f"### {heading[1]}"))
        waiting.append(cell[heading.end() if heading else 0 :].strip())
        after = [x for x in given if x.where == "after" and x.name in names]
        if after:
            close(*after)
    close()
    if "RUN_DIR" in source:  # else the script only prints
        made.append(new_code_cell(RESULT))
    made += [
        prose(section, page) for section, place in zip(sections, places) if place == len(cells)
    ]
    return new_notebook(
        cells=made, metadata={"kernelspec": {"display_name": "Python 3", "name": "python3"}}
    )


def make(target: Path) -> None:
    """Writes every notebook into the folder `target`."""
    target.mkdir(exist_ok=True)
    for script, language in itertools.product(PAGES, ABOUT):
        nbformat.write(notebook(script, language), target / f"{Path(script).stem}{language}.ipynb")
    sys.stdout.write(f"{len(PAGES) * len(ABOUT)} notebooks in {target}\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
