"""A run's folder after a kill, a full disk or a careless hand: one clear line, or the run simply
goes on.
"""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from short_runs import SHORT, load_weights

import grpo_llama3_1_8b_demo as demo
import inference
import settings
from run import checkpoints, process, run_folder, trained_model
from run.run_files import checkpoint_at, read_log, read_object
from settings import UserError
from tools import convert_checkpoint as convert
from tools import show_run


@pytest.fixture(scope="module")
def finished(finished_run):
    """The folder of a finished run, with run/ and said.txt; copy it to change it."""
    return finished_run(*SHORT)


@pytest.fixture
def run(finished, empty_folder):
    """A copy of a run that is over in the current folder, to be damaged."""
    shutil.copytree(finished / "run", "run")
    return Path("run")


def cut(path):
    """Half of a file, as a full disk leaves it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path):
    path.write_bytes(bytes(range(256)) * 4 + b"\n")


CHECKPOINTS = {  # what is done to the last checkpoint
    "no moments": lambda last: shutil.rmtree(last / "moments"),
    "loop garbage": lambda last: garbage(last / "loop" / "metadata"),
    "an empty folder": lambda last: shutil.rmtree(last) or last.mkdir(),
    "arrays cut": lambda last: cut(
        max(  # the largest file: the numbers themselves
            last.glob("weights/**/*"), key=lambda path: path.is_file() * path.stat().st_size
        )
    ),
}


def contents(folder):
    """Every file below `folder`, byte by byte."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_lost_evaluation_of_the_untrained_model_is_refused_and_nothing_is_lost(run):
    cut(run / "before.json")
    there = contents(run)
    with pytest.raises(UserError, match=r"^.*before.json is lost or damaged, and after.*$"):
        demo.main([*SHORT, "RUN_DIR=run"])
    assert contents(run).items() >= there.items()


def test_without_its_logs_and_last_checkpoint_a_run_ends_as_it_would_have(run, finished, capsys):
    """The checkpoint is moved away, as the line about a damaged one says."""
    (run / "checkpoints" / "8").rename("moved away")
    logs = ("after.json", "train_log.csv", "answers.jsonl", "evaluations.jsonl", "result.json")
    for name, damage in zip(logs, (Path.unlink, garbage, cut, garbage, cut), strict=True):
        damage(run / name)
    demo.main([*SHORT, "RUN_DIR=run", "PROFILE_DIR=trace"])
    said = capsys.readouterr().out
    assert "going on after step 6 of 8" in said and "after training: " in said
    assert "train_log.csv has lost the rows of 6 steps" in said
    assert not [*Path("trace").rglob("*.pb")]  # two steps: no third
    whole, again = load_weights(finished / "run", 8), load_weights("run", 8)
    assert whole.keys() == again.keys()
    for weight in whole:
        np.testing.assert_array_equal(whole[weight], again[weight], err_msg=weight)
    results = [
        json.loads((folder / "run" / "result.json").read_text()) for folder in (finished, Path())
    ]
    assert results[0]["after"] == results[1]["after"]


# --- what Orbax says to each kind of damage, on a model of six numbers


@pytest.fixture
def toy(tmp_path):
    """Checkpoints 1 and 2 of six numbers: all 1, all 2, with moments 1 and 2."""
    root, c = tmp_path / "checkpoints", settings.read(demo.Constants, [])
    with checkpoints.open_manager(str(root)) as manager:
        for step in (1, 2):
            checkpoints.save(
                manager, step, *six_numbers(step), {"beta": float(step), "carried": {}}, c
            )
    return root


def six_numbers(value):
    """Weights and moments of AdamW, all of them `value`."""
    weights = {"table": jnp.full((2, 3), float(value))}
    moments = optax.adamw(0.1).init(weights)
    return weights, jax.tree.map(lambda x: jnp.full_like(x, value), moments)


def newest(root):
    """What a run would go on from."""
    with checkpoints.open_manager(str(root)) as manager:
        return checkpoints.restore(manager, manager.latest_step(), *six_numbers(0))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_named_and_never_passed_over(toy, name):
    CHECKPOINTS[name](toy / "2")
    there = contents(toy)
    words = r"^checkpoint 2 in .* cannot be read .*\(.+\); .*move it away to go on from 1$"
    with pytest.raises(UserError, match=words):
        newest(toy)
    assert contents(toy) == there
    (toy / "2").rename(toy.parent / "moved away")
    weights, moments, loop = newest(toy)
    numbers = {float(x) for leaf in jax.tree.leaves((weights, moments)) for x in np.ravel(leaf)}
    assert numbers == {1.0} and loop["beta"] == 1.0
    CHECKPOINTS[name](toy / "1")
    with pytest.raises(
        UserError, match=r"^checkpoint 1 in .*; try again, or put a whole one back$"
    ):
        newest(toy)


def flip(path, place):
    """Changes one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def test_no_flipped_bit_becomes_another_number(toy):
    """Each is refused, or changes nothing that's read."""
    rng, refused = np.random.default_rng(0), 0
    right = newest(toy)
    files = [path for path in (toy / "2").rglob("*") if path.is_file() and path.stat().st_size]
    for _ in range(3):
        for path in files:
            place = int(rng.integers(8 * path.stat().st_size))
            flip(path, place)
            try:
                jax.tree.map(np.testing.assert_array_equal, newest(toy)[:2], right[:2])
                assert newest(toy)[2] == right[2]
            except UserError as error:
                assert "checkpoint 2 in " in str(error) and "\n" not in str(error)
                refused += 1
            flip(path, place)
    assert refused >= 3


def change_loop(step, change):
    """Rewrites the JSON of a checkpoint."""
    path = step / "loop" / "metadata"
    loop = json.loads(path.read_text())
    change(loop)
    path.write_text(json.dumps(loop))


def test_a_run_of_an_older_version_is_refused_and_nothing_is_lost(run):
    """Its checkpoints held what the rollouts remember beside beta."""

    def as_it_was(loop):
        loop |= loop.pop("carried")
        del loop["proof"]

    change_loop(run / "checkpoints" / "8", as_it_was)
    there = contents(run / "checkpoints")
    with pytest.raises(UserError, match=r"^RUN_DIR=run: an older version of this script saved its"):
        demo.main([*SHORT, "RUN_DIR=run"])
    assert contents(run / "checkpoints") == there


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loop: loop.update(beta=2.5), "its loop isn't what was saved"),
        (lambda loop: loop["proof"].update(step=1), "it's of step 1"),
        (lambda loop: loop.update(proof=7), "its proof isn't an object"),
        (lambda loop: loop["proof"]["weights"].update(table=["float32", 1]), "weights/table"),
    ],
)
def test_what_a_checkpoint_says_of_itself_is_checked(toy, change, words):
    change_loop(toy / "2", change)
    with pytest.raises(UserError, match=rf"is damaged \(.*{words}.*move it away to go on from 1$"):
        newest(toy)


def test_a_checkpoint_of_another_run_or_step_is_refused(tmp_path):
    c, root = settings.read(demo.Constants, []), tmp_path / "checkpoints"
    with checkpoints.open_manager(str(root)) as manager:
        checkpoints.save(manager, 1, *six_numbers(1), {"beta": 1.0}, c, "this")
    (root / "1").rename(root / "3")
    with (
        checkpoints.open_manager(str(root)) as manager,
        pytest.raises(UserError, match="it's of step 1"),
    ):
        checkpoints.restore(manager, 3, *six_numbers(0), "this")
    (root / "3").rename(root / "1")
    with checkpoints.open_manager(str(root)) as manager:
        with pytest.raises(UserError, match="it's of another run, this, and this one is that"):
            checkpoints.restore(manager, 1, *six_numbers(0), "that")
        for known in ("this", ""):
            assert checkpoints.restore(manager, 1, *six_numbers(0), known)[2] == {"beta": 1.0}


def test_checkpoints_of_older_versions_are_read_but_for_a_nan(toy):
    for step in ("1", "2"):
        change_loop(toy / step, lambda loop: loop.pop("proof"))
    assert newest(toy)[2] == {"beta": 2.0, "carried": {}}
    weights, moments = six_numbers(3)
    trees = {"weights": weights, "moments": jax.tree.leaves(moments)}
    trees["weights"]["table"] = trees["weights"]["table"].at[1, 1].set(np.nan)
    items = {part: ocp.args.StandardSave(tree) for part, tree in trees.items()}
    items["loop"] = ocp.args.JsonSave({"beta": 3.0})
    with ocp.CheckpointManager(str(toy)) as manager:
        manager.save(3, args=ocp.args.Composite(**items))
    with pytest.raises(UserError, match="weights/table has a NaN or an infinity"):
        newest(toy)


def mixed(bits, place):
    """github.com/aappleby/smhasher, fmix32, in Python's own numbers."""
    x = bits ^ place * 0x9E3779B1 % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def test_the_digest_is_the_formula():
    rng = np.random.default_rng(0)
    for shape in ((), (7,), (3, 5), (2, 3, 4)):
        for dtype in (np.float32, jnp.bfloat16, np.int32, bool):
            x = np.asarray(100 * rng.standard_normal(shape)).astype(dtype)
            kinds = {4: np.uint32, 2: np.uint16, 1: np.uint8}
            bits = np.ravel(x).view(kinds[x.dtype.itemsize])
            wanted = sum(mixed(int(bit), i) for i, bit in enumerate(bits)) % 2**32
            assert int(checkpoints.examine(x)[0]) == wanted


def test_any_changed_bit_and_any_two_change_the_digest():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(64).astype(np.float32)
    right = int(checkpoints.examine(jnp.array(x))[0])
    pairs = [(i, i) for i in range(64 * 32)] + [(i, i + 32) for i in range(63 * 32)]  # two signs
    for places in pairs:
        changed = x.copy()
        for place in set(places):
            changed.view(np.uint32)[place // 32] ^= np.uint32(1 << place % 32)
        assert int(checkpoints.examine(jnp.array(changed))[0]) != right, places


def test_a_damaged_checkpoint_is_not_exported(toy):
    assert convert.from_orbax(toy / "2" / "weights")
    change_loop(toy / "2", lambda loop: loop["proof"]["weights"].update(table=["float32", 1]))
    with pytest.raises(UserError, match=r"^SOURCE: .*2/weights is damaged \(weights/table"):
        convert.from_orbax(toy / "2" / "weights")


@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")]
)
def test_too_little_memory_is_no_damage(toy, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    with pytest.raises(type(error)):
        newest(toy)


def test_every_reader_of_a_run_names_its_damaged_constants(run):
    garbage(run / "constants.json")
    for read in (
        lambda: show_run.main(["run"]),
        lambda: inference.main(["CHECKPOINT=run"]),
        lambda: convert.main(["SOURCE=run", "TARGET=exported"]),
        lambda: demo.main([*SHORT, "RUN_DIR=run", "DRY_RUN=True"]),
    ):
        with pytest.raises(UserError, match=r"run: its constants.json is damaged"):
            read()


def test_a_log_that_is_cut_in_the_middle_of_a_number_loses_the_row(tmp_path):
    path = tmp_path / "train_log.csv"
    path.write_text("step,reward,kl\n1,2.5,0.1\n2,2.75,0.3\n3,2.125,0.4")
    assert [row["step"] for row in read_log(path)] == [1, 2]
    path.write_text("step,reward,kl\n1,2.5,0.1\n2,2.75\nx,y,z\n4,1,2,3\n\0\n5,1.5,nan\n")
    assert [row["step"] for row in read_log(path)] == [1, 5]


@pytest.mark.parametrize("name", ["answers.jsonl", "evaluations.jsonl", "before.json"])
def test_json_that_can_be_read_and_is_none_of_ours_is_one_line(run, name):
    with open(run / name, "a" if name.endswith("l") else "w") as file:
        file.write(
            '{"step": 3, "completions": [7]}' + '\n[1]\n7\n{"step": "x"}\n' * name.endswith("l")
        )
    with pytest.raises(UserError, match=f"RUN_DIR=run: .*{name}.* move the file away$"):
        show_run.main(["run"])


@pytest.mark.parametrize("name", ["answers.jsonl", "before.json"])
def test_a_report_that_cannot_be_made_is_one_line_and_made_once_the_file_is_gone(run, name):
    """The training and the evaluations are kept: nothing is done again."""
    whole = (run / name).read_bytes()
    with open(run / name, "a" if name.endswith("l") else "w") as file:
        file.write('{"step": 3, "completions": [7]}')
    (run / "result.json").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^RUN_DIR=run: .*{name}.* move the file away$"):
            demo.main([*SHORT, "RUN_DIR=run"])
    (run / name).write_bytes(whole)
    demo.main([*SHORT, "RUN_DIR=run"])
    assert json.loads((run / "result.json").read_text())["steps"] == 8


OTHER_TYPES = [None, 7, "x", True, [], [1], {}, {"x": 1}]


@pytest.mark.parametrize("name", ["run_id", "RUN_DIR", "command", "saved", "identity"])
def test_a_field_of_another_type_in_run_json_is_as_good_as_lost(run, name):
    note = json.loads((run / "run.json").read_text())
    for value in [*OTHER_TYPES, {"MODEL": 7}]:
        (run / "run.json").write_text(json.dumps(note | {name: value}))
        show_run.main(["run"])
        checkpoint = checkpoint_at(run, "CHECKPOINT")
        trained_model.warn_if_model_changed("tiny_llama", checkpoint)
        try:
            with run_folder.open_folder(settings.read(demo.Constants, [*SHORT, "RUN_DIR=run"])):
                pass
        except UserError as error:  # the run's number can't be made up
            assert name in ("run_id", "saved") and "\n" not in str(error)


@pytest.mark.parametrize(
    "name", ["MODEL", "NUM_BATCHES", "LORA_RANK", "CHECKPOINT_DIR", "BETA", "TEACHER", "EPSILON"]
)
def test_a_constant_of_another_type_is_one_line(run, name):
    constants = json.loads((run / "constants.json").read_text())
    for value in (None, [], [1], {}, "x" if name in ("NUM_BATCHES", "LORA_RANK", "BETA") else {}):
        (run / "constants.json").write_text(json.dumps(constants | {name: value}))
        for read in (
            lambda: show_run.main(["run"]),
            lambda: inference.main(["CHECKPOINT=run"]),
            lambda: convert.main(["SOURCE=run", "TARGET=exported"]),
            lambda: demo.main([*SHORT, "RUN_DIR=run"]),
        ):
            with pytest.raises(UserError, match=r"run: its constants.json is damaged"):
                read()


@pytest.mark.parametrize("name", ["²", "٣", "notes", "2.orbax-checkpoint-tmp"])
def test_a_folder_that_is_no_step_is_none(toy, name):
    (toy / name).mkdir()
    assert checkpoints.saved_steps(str(toy)) == [1, 2]
    assert newest(toy)[2]["beta"] == 2.0
    assert checkpoint_at(toy / name, "CHECKPOINT") is None


def test_a_quota_is_a_full_disk_and_a_failed_write_has_a_name(tmp_path, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(SystemExit) as done:
        settings.exit_on_error(lambda _: settings.write_whole(tmp_path / "a.json", "text"))
    said = capsys.readouterr().err
    assert done.value.code == 2 and said.count("\n") == 1
    assert f"{tmp_path}/a.json: Disk quota exceeded; free some space" in said
    with pytest.raises(UserError, match=r"^RUN_DIR=r: the disk is full"), process.full_disk("r"):
        settings.write_whole(tmp_path / "a.json", "text")


def test_a_profile_dir_that_cannot_be_made_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"^PROFILE_DIR=.*file/x: Not a directory; choose another folder$"
    ):
        process.check_profile_dir(f"{tmp_path}/file/x")


# --- whose a folder is


def write_checkpoint(root, whole=True):
    """Files of checkpoint 4; in a bucket, Orbax ends one with a file that says so."""
    step = epath.Path(root) / "4"
    step.mkdir(exist_ok=True)
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    if whole and root.startswith("gs://"):
        (step / "commit_success.txt").touch()


def begin(*arguments):
    """Opens a run's folder, as the main script does, and notes a checkpoint in it."""
    with run_folder.open_folder(settings.read(demo.Constants, [*SHORT, *arguments])) as run:
        if not checkpoints.saved_steps(run.checkpoints):
            write_checkpoint(run.checkpoints)
            (run.logs / "before.json").touch()
            (run.logs / "tensorboard").mkdir()
            (run.logs / "tensorboard" / "events").touch()
        run.update_run_json()
        return run


@pytest.fixture(params=["kept", "gs://"])
def kept(request, empty_folder):
    """A CHECKPOINT_DIR: a folder; a folder in a new bucket."""
    if request.param == "kept":
        return request.param
    bucket = request.getfixturevalue("bucket")
    return f"{bucket.make(f'bucket-{len(bucket.roles)}')}/kept"


def test_half_a_checkpoint_in_a_bucket_never_counts_and_does_not_stop_the_run(bucket, empty_folder):
    """Neither as the newest one, nor as one that the run has lost when it's gone."""
    root = bucket.make("half")
    for _ in range(2):  # machines
        with run_folder.open_folder(
            settings.read(demo.Constants, [*SHORT, "RUN_DIR=a", f"CHECKPOINT_DIR={root}"])
        ) as run:
            write_checkpoint(run.checkpoints, whole=False)
            run.update_run_json()
            assert checkpoints.saved_steps(run.checkpoints) == [] and run.steps_done == 0
        shutil.rmtree("a")
    assert "saved" not in read_object(epath.Path(f"{root}/a/run.json"))


# what happens to a run in RUN_DIR=a, its RUN_DIR then, and under CHECKPOINT_DIR its checkpoints
WHERE = {
    "nothing": (lambda kept: None, "a", "a"),
    "the machine is lost": (lambda kept: shutil.rmtree("a"), "a", "a"),
    "some files are lost": (
        lambda kept: [path.unlink() for path in Path("a").glob("*.json")],
        "a",
        "a",
    ),
    "renamed, used, lost": (
        lambda kept: [
            Path("a").rename("b"),
            begin("RUN_DIR=b", f"CHECKPOINT_DIR={kept}"),
            shutil.rmtree("b"),
        ],
        "b",
        "a",
    ),
    "that, and lost": (
        lambda kept: [epath.Path(f"{kept}/a").rename(epath.Path(f"{kept}/x")), shutil.rmtree("a")],
        "a",
        "x",
    ),
}


@pytest.mark.parametrize("name", WHERE)
def test_a_run_finds_its_checkpoints_and_they_bring_its_files(name, kept, capsys):
    happens, folder, root = WHERE[name]
    arguments = [f"CHECKPOINT_DIR={kept}", "RUN_DIR=a"]
    first, other = begin(*arguments), begin(arguments[0], "RUN_DIR=other")  # beside another run
    files = {path.relative_to("a") for path in Path("a").rglob("*") if path.is_file()}
    number = read_object(first.logs / "run.json")["run_id"]
    happens(kept)
    capsys.readouterr()
    run = begin(arguments[0], f"RUN_DIR={folder}")
    assert run.checkpoints.endswith(f"kept/{root}") and run.saved_steps == [4]
    note, others = (read_object(each.logs / "run.json") for each in (run, other))
    assert note["run_id"] == number != others["run_id"] and note["saved"] == 4
    assert {path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()} == files
    assert ("taken over from" in capsys.readouterr().out) == ("lost" in name)
    newest = trained_model.root_and_step(checkpoint_at(Path(folder), "CHECKPOINT"))
    assert newest == (run.checkpoints, 4)
    if kept == "kept":  # a copy of the checkpoints' folder will do, too
        copy = Path(shutil.copytree(run.checkpoints, "copy")).resolve()
        assert trained_model.root_and_step(checkpoint_at(copy, "CHECKPOINT")) == (str(copy), 4)
    with pytest.raises(UserError, match=r"^BATCH_SIZE=2: .* was started with 4"):
        begin(arguments[0], f"RUN_DIR={folder}", "BATCH_SIZE=2")


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(empty_folder):
    assert len({run_folder.new_folder("script") for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("happens", "arguments", "said"),
    [
        pytest.param(
            "rm a/constants.json a/before.json",
            [],
            "constants.json of",
            id="constants and evaluation",
        ),
        pytest.param(
            "rm -r a/constants.json a/checkpoints/4",
            [],
            "constants.json of",
            id="constants before a checkpoint",
        ),
        pytest.param(
            "rm -r a/checkpoints",
            [],
            "a/checkpoints is empty, .* step 4",
            id="checkpoints are gone",
        ),
        pytest.param(
            "rm -r kept/a", ["CHECKPOINT_DIR=kept"], "kept/a is empty", id="CHECKPOINT_DIR is gone"
        ),
        pytest.param(
            "rm -r a",
            ["RUN_DIR=c/a", "CHECKPOINT_DIR=kept"],
            r"of another run \(a\)",
            id="another's of that name",
        ),
        pytest.param(
            'echo \'{"run_id": "1", "RUN_DIR": "a"}\' > kept/a/run.json',
            ["CHECKPOINT_DIR=kept"],
            "of another run",
            id="another's of that RUN_DIR",
        ),
        pytest.param(
            "touch f", ["RUN_DIR=d", "CHECKPOINT_DIR=f/x"], "=f/x: Not a dir.*; choose", id="a file"
        ),
        pytest.param(
            "echo '{' > a/run.json",
            ["CHECKPOINT_DIR=kept"],
            "run.json.* damaged",
            id="run.json cut",
        ),
        pytest.param(
            "echo '[1]' > kept/a/run.json",
            ["CHECKPOINT_DIR=kept"],
            "run.json.* damaged",
            id="its copy is a list",
        ),
    ],
)
def test_a_run_never_begins_anew_over_what_there_is(happens, arguments, said, empty_folder):
    """A run in RUN_DIR=a, what happens to it, and how it's started once more."""
    arguments = ["RUN_DIR=a", *arguments]
    # it had its CHECKPOINT_DIR from the beginning where it's started with one
    begin("RUN_DIR=a", *[text for text in arguments if text == "CHECKPOINT_DIR=kept"])
    subprocess.run(happens, shell=True, check=True)
    there = contents(empty_folder)
    with pytest.raises(UserError, match=said) as error:
        begin(*arguments)
    assert "\n" not in str(error.value) and contents(empty_folder).items() >= there.items()


def test_a_second_process_in_a_run_dir_or_at_its_checkpoints_is_refused(empty_folder, monkeypatch):
    """The kernel's locks belong to an open file: a second one in this process is refused, too."""
    c = settings.read(demo.Constants, ["RUN_DIR=a", f"CHECKPOINT_DIR={empty_folder / 'kept'}"])
    (empty_folder / "b").mkdir()
    with run_folder.open_folder(c):
        for place in (".", "b"):  # the same command in another folder finds the checkpoints
            monkeypatch.chdir(place)
            with pytest.raises(UserError, match=r"RUN_DIR=a: another process is running in it"):
                run_folder.open_folder(c).__enter__()


# --- weights that are not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_written(tmp_path, bad):
    c, (weights, moments) = settings.read(demo.Constants, []), six_numbers(1)
    spoilt = jax.tree.map(
        lambda x: x * bad if jnp.issubdtype(x.dtype, jnp.floating) else x, moments
    )
    with checkpoints.open_manager(str(tmp_path / "checkpoints")) as manager:
        for pair in (({"table": weights["table"].at[1, 1].set(bad)}, moments), (weights, spoilt)):
            with pytest.raises(UserError, match=r"after step 1 are not finite"):
                checkpoints.save(manager, 1, *pair, {}, c)
        assert not checkpoints.saved_steps(str(tmp_path / "checkpoints"))
        checkpoints.save(manager, 1, weights, moments, {}, c)
    assert checkpoints.saved_steps(str(tmp_path / "checkpoints")) == [1]


def test_a_terminal_without_arrows_gets_their_escapes(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    settings.exit_on_error(lambda arguments: print("\u2192", flush=True))
    assert terminal.buffer.getvalue() == b"\\u2192\n"
