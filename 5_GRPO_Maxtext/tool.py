"""Runs one of the tools in tools/, which you can skip on a first reading.

python 5_GRPO_Maxtext/tool.py                                  # what there is
python 5_GRPO_Maxtext/tool.py show_run runs/mine
python 5_GRPO_Maxtext/tool.py convert_checkpoint --help
"""

import ast
import difflib
import runpy
import sys
from pathlib import Path

TOOLS = {
    path.stem: path
    for path in sorted((Path(__file__).parent / "tools").glob("[a-z]*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
}


def main(arguments: list[str]) -> None:
    """Lists the tools, or runs the one named first with the rest of the command line."""
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        for tool, path in TOOLS.items():
            print(
                f"{tool:20}{ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))).splitlines()[0]}"
            )
    elif name in TOOLS:
        sys.argv[1:] = arguments[1:]
        # As a module of the package, so its imports resolve; as __main__, so it runs.
        runpy.run_module(f"tools.{name}", run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, TOOLS, cutoff=0.4) or TOOLS
        print(f"error: {name!r}: no such tool; nearest names: {', '.join(near)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
