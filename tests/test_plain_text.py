"""What a model wrote is shown on the terminal and in report.md, and never obeyed."""

import json
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
from hostile import HOSTILE
from short_runs import SHORT

import grpo_llama3_1_8b_demo as demo
import inference
import plain_text
import settings
from run import health, inference_output, report, run_folder
from tools import model_card, show_run

# the direction of writing
TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = {"\u200e", "\u200f", "\u061c"}
# clears, hides an .exe, overwrites, colors, is not text
EVIL = "\x1b[2J\u202egnp.exe\r\x9b1m\ud800"


def obeyed(text):
    """The characters of a text that a terminal does more with than to show them."""
    kinds = ("Cc", "Cs", "Zl", "Zp")
    return {
        c
        for c in text
        if (unicodedata.category(c) in kinds and c not in "\n\t")
        or unicodedata.bidirectional(c) in TURNING
        or c in MARKS
    }


def test_every_character_of_the_first_plane_is_judged_as_unicode_has_it():
    escape = plain_text.escape_controls
    for c in map(chr, range(0x10000)):
        assert escape(c) == (c.encode("unicode_escape").decode() if obeyed(c) else c), hex(ord(c))
    for text in (*HOSTILE, EVIL):
        assert escape(text) == "".join(map(escape, text))


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.mark.parametrize("text", [*HOSTILE, "a\n```\n# heading\n````\n", "`````", "~~~\n```"])
def test_no_line_of_a_text_ends_its_code_block(text):
    opening, *inside, closing = plain_text.fenced(text).split("\n")
    assert opening == closing and set(opening) == {"`"} and len(opening) >= 3
    assert not [line for line in inside if re.fullmatch(rf" {{0,3}}`{{{len(opening)},}}\s*", line)]
    assert "\n".join(inside) == plain_text.escape_controls(text)


def test_the_report_shows_an_answer_in_a_block_and_a_source_in_a_cell(finished, tmp_path, capsys):
    logs = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    text, c = f"fine\n```\n# taken over\n{EVIL}", settings.read(demo.Constants, [])
    for path in (logs / "before.json", logs / "after.json"):
        result = json.loads(path.read_text())
        result["by_data_source"] = {f"a | b\\| <!--\n{EVIL}": dict(result), "x": dict(result)}
        result["completions"] = [text] * 16
        result["asked"] = [{"question": text, "answer": text}] * 16
        path.write_text(json.dumps(result))
    log = (logs / "train_log.csv").read_text().splitlines()
    kl = log[0].split(",").index("kl")
    row = [value if i != kl else "nan" for i, value in enumerate(log[-1].split(","))]
    (logs / "train_log.csv").write_text("\n".join([*log[:-1], ",".join(row), ""]))
    report.write(c, run_folder.RunFolder(logs, logs, str(logs / "checkpoints")), "test.jsonl")
    markdown = (logs / "report.md").read_text(encoding="utf-8")
    for said in (capsys.readouterr().out, markdown):
        assert not obeyed(said) and "\\x1b[2J\\u202egnp.exe" in said
        [row] = [line for line in said.splitlines() if line.startswith("| a ")]
        assert (
            row.startswith(r"| a \| b\\\| \<!-- \\x1b[2J\\u202egnp.exe") and row.count(" | ") == 4
        )
        assert "KL not measured (BETA=0)" in said
    block = markdown.partition("````\n")[2].partition("\n````")[0]
    assert block.count("# taken over") == markdown.count("# taken over") == 4


def test_inference_prints_questions_answers_and_votes_that_do_nothing(capsys):
    grader = inference.make_grader(settings.read(inference.Constants, []), [])
    row = {"question": EVIL, "answer": EVIL, "data_source": None, "extra_info": ""}
    answers = [EVIL, f"<answer>{EVIL}</answer>"]
    for before in ({}, {"before": answers}):
        inference_output.show([row | before | {"after": answers}], grader)
        said = capsys.readouterr().out
        assert (
            not obeyed(said) and "gnp.exe" in said and "right: \\x1b[2J" in said.replace("\n", "")
        )


def test_names_from_the_folder_of_a_run_do_nothing(tmp_path, monkeypatch, capsys):
    """A run's folder can be anybody's: its constants are printed, too."""
    monkeypatch.setattr(
        health, "history", lambda *_: iter([health.Sentence("at_step", step=1, line=EVIL)])
    )
    constants = settings.defaults(demo.Constants, "small") | {"DATASET": EVIL}
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    (tmp_path / "train_log.csv").write_text("step\n1\n")
    show_run.main([str(tmp_path)])
    assert not obeyed(capsys.readouterr().out)
    assert not obeyed(model_card.code(EVIL)) and "gnp" in model_card.code(EVIL)


def test_an_error_shows_what_it_quotes(monkeypatch, capsys):
    def main(arguments):
        raise settings.UserError(f"DATASET={EVIL}: no such file")

    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    with pytest.raises(SystemExit):
        settings.exit_on_error(main)
    assert (
        capsys.readouterr().err
        == "error: DATASET=\\x1b[2J\\u202egnp.exe\\r\\x9b1m\\ud800: no such file\n"
    )
