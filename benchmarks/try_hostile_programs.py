"""What the hostile programs of tests/hostile_programs.toml achieve under every protection that
works here.

    python benchmarks/try_hostile_programs.py               # prints, 1.5 minutes
    python benchmarks/try_hostile_programs.py TABLE=path    # and keeps the table

One line per protection and user, root or another: the walls are built differently for them. TABLE
keeps the other user's lines. Columns:

tried           programs that the protection is meant to hold
paid            programs that scored
escaped         files outside that were written or changed, and sockets outside that were reached
outlived        processes and folders that were left
crashed         programs at which the grader failed or hung
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in ("5_GRPO_Maxtext", "tests", "."):
    sys.path.insert(0, str(ROOT / folder))

import hostile_programs
from machine import processor, write_csv
from measure.columns import read_csv


def line(kind: str, user: str) -> dict[str, str | int]:
    """Tries all programs under the protection `kind`; a line of the table."""
    found = hostile_programs.try_all(kind)
    counts = {name: len(which) for name, which in found.items()}
    print(kind, counts, *(f"{name}: {which}" for name, which in found.items() if which), sep="\n  ")
    where = {"machine": processor(), "date": time.strftime("%Y-%m-%d")}
    return (
        {"protection": kind, "user": user, "tried": len(hostile_programs.names(kind))}
        | counts
        | where
    )


def main(arguments: list[str]) -> None:
    """Tries them, and writes the table if TABLE=path is given."""
    user = "another" if os.geteuid() else "root"
    rows = [line(kind, user) for kind in hostile_programs.KINDS]
    for table in (Path(argument.removeprefix("TABLE=")) for argument in arguments):
        rows += [row for row in read_csv(table) if row["user"] != user]
        write_csv(table, sorted(rows, key=lambda row: (row["protection"], row["user"])))


if __name__ == "__main__":
    main(sys.argv[1:])
