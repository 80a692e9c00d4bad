"""Makes report.html, the page of a run with every kept answer, of a run that is over or still going.

    python 5_GRPO_Maxtext/show_run.py runs/mine

The main script makes the same page when it ends. A browser opens it from the disk: no server, no network.
"""

from pathlib import Path

from parts import settings
from parts.run import page
from parts.settings import UserError


def main(arguments: list[str]) -> None:
    """Writes the page of the run folder that is named."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"show_run.py {' '.join(arguments)}: give one run's folder, such as runs/mine")
    print(f"page     {page.write(Path(arguments[0]))}")


if __name__ == "__main__":
    settings.answer(main)
