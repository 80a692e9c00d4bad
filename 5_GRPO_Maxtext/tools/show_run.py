"""Writes report.html, with every saved answer, for a finished or running run.

    python 5_GRPO_Maxtext/tool.py show_run runs/mine
    python 5_GRPO_Maxtext/tool.py show_run                        # the run under runs/ that saved last

The main script does the same when it ends. You can open the page from disk, without a server or network.
"""

from pathlib import Path

import settings
from run import page, run_files
from run.plain_text import shown
from settings import UserError


def main(arguments: list[str]) -> None:
    """Prints the health lines of a run and writes its page; UserError if the folder isn't one's."""
    folder = Path(arguments[0]) if arguments else run_files.newest_run()
    if folder is None or len(arguments) > 1 or str(folder).startswith("-"):
        raise UserError(f"show_run {' '.join(arguments)}: give a run's folder, such as runs/mine")
    path, run = page.write(folder), page.read(folder)
    print(shown(f"{run.folder}: {'; '.join(run.headline)}"))
    print(shown("\n".join(run.health)) or f"{len(run.log)} steps, and nothing to report")
    print(f"page     {path}")


if __name__ == "__main__":
    settings.run(main)
