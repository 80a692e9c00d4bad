"""Who imports whom in folder 5, read from the source."""

import ast
import graphlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "5_GRPO_Maxtext"
FILES = {  # by the name under which they are imported
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path
    for place in (
        "*.py",
        "tools/*.py",
        "tools/*/*.py",
        "model/*.py",
        "task/*.py",
        "run/*.py",
        "sandbox/*.py",
    )
    for path in sorted(FOLDER.glob(place))
    if path.stem != "__init__"
}
ORDER = (  # what a file imports stands before it, or in its own room
    "plain_text",
    "machines",
    "settings",
    "constants",
    "schedules",
    "sandbox",
    "task",
    "reward_func",
    "model",
    "grpo_variants",
    "run",
    "page",  # the scripts
    "tools",
    "exercises",
)


def room(name):
    """Where a file stands in ORDER: `model.llama` in model, a script in page."""
    first = name.split(".")[0]
    if first.endswith("exercises"):
        return "exercises"
    return first if first in ORDER else "page"


def imported_modules(module):
    """Every module that a file names in an import, anywhere in it."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


ARROWS = {
    name: imported_modules(ast.parse(path.read_text())) & FILES.keys()
    for name, path in FILES.items()
}


def test_imports_go_one_way():
    assert len(ARROWS) > 40 and {room(name) for name in ARROWS} == {*ORDER}
    back = [
        f"{name} imports {other}"
        for name, arrows in ARROWS.items()
        for other in arrows
        if ORDER.index(room(other)) > ORDER.index(room(name))
    ]
    assert not back


def annotations(path, name):
    """The annotated names in a class of a file."""
    classes = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.ClassDef)]
    body = next(found for found in classes if found.name == name).body
    return {x.target.id: ast.unparse(x.annotation) for x in body if isinstance(x, ast.AnnAssign)}


def test_the_type_of_c_has_the_names_of_the_page():
    page = annotations(FILES["grpo_llama3_1_8b_demo"], "Constants")
    assert len(page) > 20 and annotations(FILES["constants"], "RunConstants") == page


def test_there_is_no_circle():
    graphlib.TopologicalSorter(ARROWS).prepare()


def names_its_encoding(call):
    """Whether a call that opens, reads or writes a file leaves no encoding to the locale."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = [keyword.arg for keyword in call.keywords]
    texts = [x.value for x in call.args if isinstance(x, ast.Constant) and type(x.value) is str]
    modes = texts + [x.value.value for x in call.keywords if x.arg == "mode"]
    of_a_path = isinstance(call.func, ast.Attribute)
    if name == "open":
        plain = not of_a_path or isinstance(call.func.value, ast.Call)  # open(), Path(...).open()
        return not plain or any("b" in mode for mode in modes[-1:]) or "encoding" in given
    at_most = {"read_text": 0, "write_text": 1}.get(name, 99)  # arguments before the encoding
    return (
        "encoding" in given or len(call.args) > at_most or name not in ("read_text", "write_text")
    )


def test_every_text_file_is_read_and_written_in_a_named_encoding():
    """Where the locale isn't UTF-8, Python's default isn't, either. The sandbox sets its own."""
    folders = [path for path in FOLDER.parent.glob("[1-5]_*") if path.is_dir()]
    files = [path for folder in folders for path in folder.rglob("*.py") if path.is_file()]
    wrong = [
        f"{path.relative_to(FOLDER.parent)}:{node.lineno}"
        for path in files
        if "sandbox" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and not names_its_encoding(node)
    ]
    assert len(files) > 60 and not wrong
