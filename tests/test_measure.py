"""What is measured, what was made from what, and the pages' tables: measure/."""

import ast
import dataclasses
import os
import re
import subprocess
import tomllib
from pathlib import Path

import machine
import methods
import numpy as np
import pages
import pandas as pd
import pytest
from folders import load
from measure import columns, lock, run, tables
from pages import ROOT, name_of
from test_q_learning import GIVEN

JOBS = run.jobs()
STUDIED = [job for job in JOBS if "command" not in job.make]
LABELLED = [job for job in JOBS if "columns" in job.make and job.make.get("key") != "command"]
MADE = [path for job in JOBS for path in job.products()]
only_linux = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="make figures gives each run cores of its own"
)


def git(*words, cwd=ROOT, stdin=None):
    done = subprocess.run(["git", *words], cwd=cwd, input=stdin, capture_output=True, text=True)
    return done.stdout.strip()


def test_every_committed_table_and_picture_is_made_by_exactly_one_job():
    assert len(MADE) == len(set(MADE))
    assert {*ROOT.glob("[1-9]_*/assets/*"), *ROOT.glob("benchmarks/*.csv")} == set(MADE)


@pytest.mark.parametrize("job", STUDIED, ids=lambda job: name_of(job.products()[0]))
def test_every_row_is_accepted_and_every_patch_fits(job):
    for one in job.runs():
        assert one.script.exists()
        texts = lock.edited(one.script.parent, one.edits)
        for path, text in texts.items():
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text()))
        if job.folder.name[0] in "1234":
            script = load(job.folder.name, one.script.stem)
            names = [word for word in one.arguments if word != "MNIST_PATH=PATH"]
            more = (getattr(script, name, None) for name in ("variants", "reinforce", "ppo"))
            script.settings.read(
                next(m.Constants for m in (script, *more) if hasattr(m, "Constants")), names
            )


@pytest.mark.parametrize("job", LABELLED, ids=lambda job: name_of(job.products()[0]))
def test_the_committed_table_has_the_rows_of_the_study(job):
    names = [name for name in job.rows()[0] if name not in run.NOT_COLUMNS]
    wanted = [tuple(str(row[name]) or "unchanged" for name in names) for row in job.rows()]
    lines = columns.read_csv(job.products()[0])
    assert [
        *dict.fromkeys(tuple(line[name] or "unchanged" for name in names) for line in lines)
    ] == wanted


def test_what_is_out_of_date_is_marked_as_such():
    """If this fails: remake what it names, or say so in the lab books: make figures MARK=True; make
    pages.
    """
    entries = lock.read()
    old = {name_of(path): why for _, path, why in run.stale(JOBS)}
    marked = {name for name, entry in entries.items() if "stale" in entry}
    hidden = {name: why for name, why in old.items() if name not in marked}
    assert not hidden, run.listing([x for x in run.stale(JOBS) if name_of(x[1]) in hidden])
    assert marked <= old.keys(), "marked, but up to date"
    assert entries.keys() == {name_of(path) for path in MADE}


def test_every_commit_in_the_lock_can_be_checked_out():
    entries = [*lock.read().values()]
    commits = {e["commit"] for e in entries} | {
        e["checked"]["commit"] for e in entries if "checked" in e
    }
    assert all(re.fullmatch("[0-9a-f]{7,40}", commit) for commit in commits)
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the whole history")
    names = [f"{commit}^{{commit}}" for commit in sorted(commits)]
    known = git("cat-file", "--batch-check", stdin="\n".join(names)).splitlines()
    assert [line for line in known if line.endswith("missing")] == []


def test_nothing_is_made_from_code_that_is_not_committed(tmp_path):
    """But a product that was written before, and the lock, may be modified."""
    (tmp_path / "1_Q_Learning" / "assets").mkdir(parents=True)
    (tmp_path / "measure").mkdir()
    for name in ("a.py", "1_Q_Learning/assets/a.csv", "measure/lock.json"):
        (tmp_path / name).write_text("")
    for words in ("init -q", "add -A", "commit -q -m ."):
        git("-c", "user.name=x", "-c", "user.email=x", *words.split(), cwd=tmp_path)
    for name in ("1_Q_Learning/assets/a.csv", "measure/lock.json"):
        (tmp_path / name).write_text("more")
    assert machine.commit(tmp_path, untracked="all") == git(
        "rev-parse", "--short", "HEAD", cwd=tmp_path
    )
    (tmp_path / "new.toml").write_text("")
    machine.commit(tmp_path)
    (tmp_path / "a.py").write_text("more")
    with pytest.raises(SystemExit, match=r"^error: commit first, or set aside: a\.py, new\.toml$"):
        machine.commit(tmp_path, untracked="all")
    with pytest.raises(SystemExit, match=r"^error: commit first, or set aside: a\.py$"):
        machine.commit(tmp_path)


def test_help_makes_nothing_and_a_wrong_option_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        run.read_options(["STALE=True", "--help"])
    assert not end.value.code and capsys.readouterr().out.startswith(run.__doc__)
    for word in ("--halp", "STALE", "STALE=yes", "ONLI=3_Pendulum", "WORKERS=0", "WORKERS=two"):
        with pytest.raises(SystemExit) as end:
            run.read_options(["ONLY=3_Pendulum", word])
        [line] = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith(f"error: {word}: ")
    given = {"MNIST_PATH": "mnist.npz", "PEER": "/tmp/trl/bin/python", "MARK": "False"}
    assert run.read_options([f"{name}={value}" for name, value in given.items()]) == given


def test_the_commands_of_the_pages_are_options(capsys):
    """`make figures` hands them on: make/pages.mk."""
    text = (ROOT / "CONTRIBUTING.md").read_text() + run.__doc__
    commands = re.findall(r"^ *(?:make figures|python -m measure.run) ([^#\n]+)", text, re.M)
    assert len(commands) > 8
    for command in commands:
        run.read_options(command.split())


def test_a_changed_default_names_what_it_makes_stale_and_words_none(monkeypatch):
    """As if TARGET_SYNC_INTERVAL were another: everything of the script, and the pictures of its
    tables.
    """
    entries = {}
    for job in JOBS:
        code, given = job.hashes()
        entry = {"code": code, "given": given, "commit": "abc", "minutes": 1}
        entries |= {name_of(path): entry for path in job.products()}
    monkeypatch.setattr(lock, "read", lambda: entries)
    read_text, folder = Path.read_text, ROOT / "2_Cart_Pole_DQN"

    def found_with(name, old, new):
        def changed(path, *arguments, **named):
            text = read_text(path, *arguments, **named)
            return text.replace(old, new) if path == folder / name else text

        assert old in read_text(folder / name)
        monkeypatch.setattr(Path, "read_text", changed)
        return run.stale(JOBS)

    assert found_with("cart_pole.py", '"""CartPole-v1: ', '"""Other words: ') == []
    assert found_with("cart_pole.py", "import jax\n", "import jax  # a remark\n") == []
    default = "TARGET_SYNC_INTERVAL: Count = "
    found = found_with("cart_pole_dqn.py", default, f"{default}2 * ")
    drawings = {"network.svg", "network_ch.svg", "backpropagation.svg", "backpropagation_ch.svg"}
    of_folder = {path.name for path in MADE if path.parts[-3] == "2_Cart_Pole_DQN"} - drawings
    elsewhere = {"default_runs.csv", "dqn_against_peers.csv"}
    assert {path.name for _, path, _ in found} == of_folder | elsewhere
    assert "compare.csv: its code changed since abc" in run.listing(found)
    assert "compare.svg: compare.csv is out of date" in run.listing(found)


@only_linux
def test_a_table_is_what_the_script_gives_and_a_finished_run_is_not_repeated(tmp_path):
    """A mistake is made in a copy and judged by the copy's own optimum, another one on the slippery
    floor.
    """
    name = "1_Q_Learning/assets/exercises.csv"
    [job] = [j for j in JOBS if name_of(j.products()[0]) == name]
    constants = f"{GIVEN} NUM_EPISODES=2_000 EPSILON_END=1.0"
    rows = [
        {"changed": "", "constants": constants, "patches": patches}
        for patches in ([], ["slippery", "visits_08"], ["mean"])
    ]
    job = dataclasses.replace(job, make=job.make | {"rows": rows, "seeds": 1})
    before = (ROOT / "1_Q_Learning" / "grid.py").read_text()
    run.make(job, {}, tmp_path, tmp_path / "runs", workers=2)
    assert (ROOT / "1_Q_Learning" / "grid.py").read_text() == before
    lines = columns.read_csv(tmp_path / name)
    assert [(line["changed"], line["seed"]) for line in lines] == [("unchanged", "0")] * 3
    script, grid = load("1_Q_Learning", "Q_Learning"), load("1_Q_Learning", "grid")
    c = script.settings.read(script.Constants, [*constants.split(), "PRINT_EVERY=0"])
    Q, log, _ = script.train(c, np.random.default_rng(0))
    plain, slippery, mean = (float(line["max_abs_error"]) for line in lines)
    error = np.abs(Q - grid.value_iteration(c))
    assert plain == error.max() and int(lines[0]["pairs_off_by_0.01"]) == (error > 0.01).sum()
    assert float(lines[0]["return_of_last_1000_episodes"]) == log[-len(log) // 2 :, 2].mean()
    # 5 and more against the optimum of the dry floor; without the patch 0
    assert slippery < 1 and mean > 50
    dates = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    (tmp_path / name).unlink()
    run.make(job, {}, tmp_path, tmp_path / "runs", workers=1)
    assert columns.read_csv(tmp_path / name) == lines
    assert dates == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}


def test_a_place_on_this_machine_has_to_be_given(tmp_path):
    with pytest.raises(FileNotFoundError, match="PEER=PATH isn't there; give PEER=path"):
        run.filled(["PEER=PATH"], {})
    assert run.filled(["PEER=PATH", "SEED=1"], {"PEER": str(tmp_path)}) == [
        f"PEER={tmp_path}",
        "SEED=1",
    ]


def test_seeds_side_by_side_by_hand(tmp_path):
    """Two seeds, three rows of the log."""
    (tmp_path / "constants.json").write_text('{"SEED": 7, "NUM_SEEDS": 2}')
    (tmp_path / "result.json").write_text('{"eval_return": [500.0, 20.0]}')
    values = [
        (7, 1000, 10, 1),
        (7, 2000, 500, 5),
        (7, 3000, 500, 3),
        (8, 1000, 20, 2),
        (8, 2000, 30, 2),
        (8, 3000, 40, 9),
    ]
    names = "seed", "env_step", "eval_return", "max_q"
    run.write_csv(
        tmp_path / "log.csv", [dict(zip(names, row)) | {"discounted_return": 1} for row in values]
    )
    figures = {"first_step_at_500": "first eval_return 500", "largest_max_q": "max max_q"}
    first, second = columns.seeds_side_by_side([tmp_path], **figures)
    assert first == {"seed": 7, "eval_return": 500.0, "first_step_at_500": 2000, "largest_max_q": 5}
    assert second == {
        "seed": 8,
        "eval_return": 20.0,
        "first_step_at_500": "never",
        "largest_max_q": 9,
    }
    names = "env_step", "mean", "low", "high"
    band = columns.band([tmp_path], "max_q - discounted_return")
    at = [tuple(line[k] for k in names) for line in band]
    assert at == [("1000", 0.5, 0, 1), ("2000", 2.5, 1, 4), ("3000", 5, 2, 8)]
    means = columns.seeds_side_by_side([tmp_path], mean="mean eval_return", last="count env_step")
    assert [(line["mean"], line["last"]) for line in means] == [
        (pytest.approx(1010 / 3), 3000),
        (30, 3000),
    ]


@pytest.mark.parametrize("page", tables.all_pages(), ids=name_of)
def test_make_pages_changes_nothing(page):
    assert tables.filled(page) == page.read_text()


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_single_figures_of_sentences_are_those_of_the_tables(language):
    for figure in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["figure"]:
        folder = ROOT / figure["folder"]
        rows = columns.read_csv(folder / "assets" / figure["table"])
        assert tables.cell(figure["says"], rows, "", "") in pages.text(folder, language), figure


@pytest.mark.parametrize(
    "job", [j for j in JOBS if "derive" in j.make], ids=lambda job: job.make["derive"]
)
def test_a_derived_table_follows_from_its_table(job):
    lines = getattr(columns, job.make["derive"])(*job.sources())
    assert [{k: str(v) for k, v in line.items()} for line in lines] == columns.read_csv(
        job.products()[0]
    )


def test_differences_are_paired_by_seed_and_one_seed_has_no_interval():
    lines = pd.read_csv(ROOT / "5_GRPO_Maxtext" / "assets" / "methods.csv")
    what = "MaxRL", "GRPO, 0/1 reward", "pass_at_1"
    assert methods.difference(lines.sample(frac=1, random_state=0), *what) == methods.difference(
        lines, *what
    )
    assert columns.mean_of_pairs(np.array([3.0])) == (3, 3, 3)
