"""Prints the lines of Python in each area, and how many are over 100 characters. Not a limit."""

import subprocess

AREAS = {
    "folders 1 to 4": ["1_*", "2_*", "3_*", "4_*"],
    "folder 5": ["5_*"],
    "tests": ["tests"],
    "benchmarks and tools": ["benchmarks", "measure", "playground", "tools"],
    "all": ["."],
}

for area, paths in AREAS.items():
    names = subprocess.check_output(["git", "ls-files", "--", *paths], text=True).splitlines()
    lines = []
    for name in names:
        if name.endswith(".py"):
            with open(name, encoding="utf-8") as file:
                lines += file.read().splitlines()
    wide = sum(len(line) > 100 for line in lines)
    share = 100 * wide / len(lines)
    print(f"{area:20} {len(lines):7,} lines of Python, {share:.1f} % over 100 characters")
