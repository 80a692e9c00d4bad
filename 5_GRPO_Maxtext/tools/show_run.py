"""Shows a run that is over or still going: its health lines, and report.html with every kept answer.

    python 5_GRPO_Maxtext/tool.py show_run runs/mine
    python 5_GRPO_Maxtext/tool.py show_run                # the run under runs/ that saved a checkpoint last

The main script does the same when it ends. A browser opens the page from the disk: no server, no network.
"""

from pathlib import Path

import settings
from run import health, page, run_files
from run.plain_text import shown
from settings import UserError


def main(arguments: list[str]) -> None:
    """Prints the health lines of a run and writes its page; UserError if the folder isn't one's."""
    folder = Path(arguments[0]) if arguments else run_files.newest_run()
    if folder is None or len(arguments) > 1 or str(folder).startswith("-"):
        raise UserError(f"show_run {' '.join(arguments)}: give one run's folder, such as runs/mine")
    constants, rows = run_files.read_constants(folder), run_files.read_log(folder / "train_log.csv")
    lines = list(health.history(rows, constants))
    print(shown("\n".join(lines)) or f"{len(rows)} steps, and nothing to report")
    print(f"page     {page.write(folder)}")


if __name__ == "__main__":
    settings.run(main)
