"""Texts that a page must show and never run, obey or choke on."""

import json
from pathlib import Path

# JSON has lone surrogates, TOML hasn't
HOSTILE = json.loads(Path(__file__).with_suffix(".json").read_text())
HOSTILE += [
    "Z\u0351\u0344\u0363\u036ea\u0340\u0341\u0342\u0343l\u0360\u0361\u0362g\u0363\u0364o"
    + "\u0301" * 200,
    "W" * 20_000,
    " " * 5_000 + "far right" + "\t" * 200,
]
