"""Writes report.html, with every saved answer, for a finished or running run; or overlays two runs.

    python 5_GRPO_Maxtext/tool.py show_run runs/mine
    python 5_GRPO_Maxtext/tool.py show_run                      # the run in runs/ that saved last
    python 5_GRPO_Maxtext/tool.py show_run runs/mine runs/other # writes runs/mine/compare.html

The main script does the same when it ends. You can open the page from disk, without a server or
network.
"""

from pathlib import Path

import settings
from plain_text import escape_controls
from run import page, run_files
from settings import UserError


def main(arguments: list[str]) -> None:
    """Prints the health lines of a run and writes its page; UserError if the folder isn't one's."""
    folders = [Path(argument).expanduser() for argument in arguments] or [run_files.newest_run()]
    if (
        folders[0] is None
        or len(folders) > 2
        or any(str(folder).startswith("-") for folder in folders)
    ):
        raise UserError(
            f"show_run {' '.join(arguments)}: give a run's folder, such as runs/mine, or two"
        )
    path, runs = page.write(*folders), [page.read(folder) for folder in folders]
    if len(runs) > 1 and (names := page.differing(*runs)):
        print(f"note: the runs also differ in {', '.join(names)}")
    for run in runs:
        print(escape_controls(f"{run.folder}: {'; '.join(run.headline)}"))
        print(
            escape_controls("\n".join(run.health)) or f"{len(run.log)} steps, and nothing to report"
        )
    print(f"page     {path}")


if __name__ == "__main__":
    settings.run(main)
