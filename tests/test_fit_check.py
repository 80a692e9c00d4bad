"""The fit check compiles the main script's own step, and its committed table says what the README says."""

import csv
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import grpo_llama3_1_8b_demo as demo
import settings
from run import memory
from settings import UserError
from tools import tpu_fit_check as fit

HERE = Path(__file__).resolve().parent
FULL = "LORA_RANK=0 BATCH_SIZE=2 TRAIN_MICRO_BATCH_SIZE=0"  # all weights, in one gradient pass
FIT_PYTHON = settings.HERE.parent / ".venv-fit" / "bin" / "python"


def table():
    return list(memory.fit_rows("fit_check.csv"))


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["LORA_RANK=0", "LORA_RANK=4"])
def test_what_is_compiled_is_what_trains(tmp_path, trained):
    """On 8 virtual devices: the same arrays in the same places, step, reference and sync to the last bit."""
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    done = subprocess.run(
        [sys.executable, HERE / "fit_step_on_8_devices.py", "run", trained],
        cwd=tmp_path, env=os.environ | {"XLA_FLAGS": f"{flags} {quick}", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-5:] == [
        "the same arrays in the same places",
        "the same step, bit for bit",
        "the same reference log-probs",
        "the same weights for vLLM",
        "the same bytes",
    ]


def test_the_committed_table_adds_up():
    for row in table():
        limit, peak, left = (float(row[name]) for name in ("limit", "peak", "left"))
        assert limit == memory.slice_of(row["topology"]).gib
        assert left == pytest.approx(limit - peak, abs=0.011)  # both rounded to two decimals
        assert bool(row["arguments"]) == (left >= 0)


def test_the_arguments_of_the_table_are_sixteen_bytes_per_parameter():
    """By hand: weights, two moments and the reference in float32; a critic adds another three.

    With LoRA the weights once, split, and on every chip A and B, two moments, the gradient that is added up.
    """
    for row in table():
        if row["program"] != "step" or not row["arguments"]:
            continue
        chips = int(row["chips"].split()[0])
        width = 2 if "bfloat16" in row["constants"] else 4
        arrays = 4 + 3 * (row["algorithm"] == "PPO")
        expected = 8_030_261_248 * width * arrays / chips / 2**30
        if "LORA_RANK=0" not in row["constants"]:
            lora = 32 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336))
            expected = (8_030_261_248 * 4 / chips + lora * 4 * 4) / 2**30
        # batch, scalars, and norms that are not split
        assert float(row["arguments"]) == pytest.approx(expected, abs=0.02), row


def test_the_defaults_fit_one_host_with_their_share_for_vllm_and_a_critic_does_not_fit_v6e_8():
    rows = {(r["topology"], r["algorithm"], r["constants"], r["program"]): r for r in table()}
    share = settings.defaults(demo.Constants, "tpu")["HBM_UTILIZATION_VLLM"]
    for topology in ("v5p-8", "v6e-8"):
        for program in ("step", "reference", "sync"):
            assert all(float(rows[topology, "GRPO", given, program]["left"]) > 0 for given in ("", FULL))
        step = rows[topology, "GRPO", "", "step"]
        assert float(step["vllm_least"]) <= share <= float(step["vllm_most"])
    assert float(rows["v6e-8", "PPO", FULL, "step"]["left"]) < 0


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_readmes_table_is_the_committed_one(language):
    text = pages.text(settings.HERE, language)
    for row in table():
        if row["program"] == "step":
            given = f"`{row['constants']}`" if row["constants"] else ""
            cells = [row["topology"], row["algorithm"], given, row["chips"], row["arguments"] or "",
                     row["temporaries"] or "", row["peak"], row["limit"], row["left"]]  # fmt: skip
            assert "| " + " | ".join(cells).replace("  ", " ") + " |" in text.replace("  ", " "), cells


def test_the_command_line_takes_its_own_constants_and_the_main_scripts():
    expected = [("v5p-8", "PPO", ("BATCH_SIZE=1",)), ("v6e-8", "PPO", ("BATCH_SIZE=1",))]
    c, found = fit.cases(["TOPOLOGIES=v5p-8,v6e-8", "BATCH_SIZE=1", "ALGORITHM=PPO"])
    assert found == expected and not c.WRITE and not c.LARGEST
    with pytest.raises(UserError, match="ALGORITHM=DPO: must be 'GRPO' or 'PPO'"):
        fit.cases(["ALGORITHM=DPO"])
    with pytest.raises(UserError, match=r"WRITE=True: .* leave out BATCH_SIZE=1, or WRITE$"):
        fit.cases(["WRITE=True", "BATCH_SIZE=1"])


@pytest.mark.parametrize("rungs", [[], ["LARGEST=True"]])
def test_only_write_writes_and_the_cases_are_those_of_the_file(monkeypatch, tmp_path, rungs):
    """What compiles is replaced; all else runs, over a copy of the committed file."""
    file = memory.FIT_FILES[bool(rungs)]
    before, committed = list(memory.fit_rows(file)), (settings.HERE / "assets" / file).read_text()
    (tmp_path / "assets").mkdir()
    shutil.copy(settings.HERE / "assets" / file, tmp_path / "assets")
    monkeypatch.setattr(settings, "HERE", tmp_path)

    def one_row(topology, algorithm, arguments):
        return [
            dict(topology=topology, algorithm=algorithm, constants=" ".join(arguments), peak=1 / 3)
        ], "yes"

    for search in ("check", "largest"):
        monkeypatch.setattr(fit, search, one_row)
    monkeypatch.setattr(fit.importlib.metadata, "version", lambda name: fit.versions.VERSIONS.get(name, "0"))
    fit.main(rungs)
    assert (tmp_path / "assets" / file).read_text() == committed
    fit.main(["WRITE=True", *rungs])
    with open(tmp_path / "assets" / file, newline="") as opened:
        after = list(csv.DictReader(opened))

    def case(row, constants):
        return row["topology"], row["algorithm"], *row["constants"].split()[:constants]

    expected = dict.fromkeys(case(row, 2 if rungs else None) for row in before)
    assert [case(row, None) for row in after] == list(expected)
    assert {row["peak"] for row in after} == {"0.33"}


def test_a_config_that_does_not_fit_gets_one_line_with_how_much_and_what_to_change(monkeypatch):
    """And MODEL on the command line is the model that is compiled. The compiler is replaced."""
    asked = []
    monkeypatch.setattr(fit, "topology_devices", lambda name: list(range(8)))
    monkeypatch.setattr(fit, "compile_program", lambda *a: ({"peak": 40.0}, "too much"))

    def programs(c, hf, *arguments, **machine):
        asked.append((c.MODEL, hf.hidden_size))
        return [("step", None, ()), ("sync", None, ())], 8 * 10**9

    monkeypatch.setattr(fit, "make_programs", programs)
    one_by_one = ["LORA_RANK=0", "BATCH_SIZE=2", "TRAIN_MICRO_BATCH_SIZE=1"]
    [row], said = fit.check("v6e-8", "GRPO", one_by_one)
    assert said.startswith(f"v6e-8 GRPO {' '.join(one_by_one)}: no: TRAIN_MICRO_BATCH_SIZE=1, set 0")
    assert said.endswith("v6e-8 has 31.24 GiB per chip, training takes 40.0 (compiled, step)")
    assert row["left"] == 31.24 - 40 and row["chips"] == "8 of 8"
    assert "no: ALGORITHM=PPO, take GRPO" in fit.check("v6e-8", "PPO", FULL.split())[1]
    fit.check("v6e-8", "GRPO", ("MODEL=tiny_llama",))
    assert asked == 2 * [(memory.LLAMA_3_1_8B, 4096)] + [("tiny_llama", 96)]


@pytest.mark.parametrize(
    ("held", "chips", "answers"), [(5, 1, [4, 8]), (5, 8, [32, 64]), (1, 1, [2, 4]), (100, 1, [64])]
)
def test_the_most_answers_that_fit_are_found_by_halving(monkeypatch, held, chips, answers):
    """A chip holds `held` answers: so many fit, and twice as many don't; one answer is no group."""

    def check(topology, algorithm, arguments, step_alone):
        given = dict(argument.split("=") for argument in arguments)
        asked = int(given["BATCH_SIZE"]) * int(given["NUM_GENERATIONS"])
        assert step_alone and given["TRAIN_MICRO_BATCH_SIZE"] == "0" and given["MODEL"] == "m"
        return [dict(answers=asked, left=held - asked / chips)], f"{asked} answers"

    monkeypatch.setattr(fit, "check", check)
    monkeypatch.setattr(fit, "topology_devices", lambda name: range(chips))
    rows, said = fit.largest(f"v5e-{chips}", "GRPO", ["MODEL=m"])
    assert [row["answers"] for row in rows] == answers and said == f"{answers[0]} answers"


@pytest.mark.parametrize("name", ["v7x-8", "a100", "v5p-7", ""])
def test_an_unknown_slice_is_named(name):
    with pytest.raises(UserError, match=f"TOPOLOGIES={name}: no such TPU slice"):
        fit.topology_devices(name)


def test_without_libtpu_the_remedy_is_named():
    if importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is installed here")
    with pytest.raises(UserError, match=r"the TPU compiler does not start .*make fit-setup"):
        fit.topology_devices("v5p-8")


@pytest.mark.slow
def test_the_compiler_itself_refuses_ppo_in_float32_on_v6e_8():
    """Needs libtpu (`make fit-setup` installs it)."""
    if not FIT_PYTHON.exists():
        pytest.skip("no .venv-fit")
    command = [FIT_PYTHON, settings.HERE / "tool.py", "tpu_fit_check", "TOPOLOGIES=v6e-8", "ALGORITHM=PPO"]
    done = subprocess.run([*command, *FULL.split()], capture_output=True, text=True, check=True)
    assert f"v6e-8 PPO {FULL}: no: ALGORITHM=PPO" in done.stdout


def by_rung():
    """Rows of fit_rungs.csv by slice and constants: the most answers that fit, and twice as many."""
    found = {}
    for row in memory.fit_rows("fit_rungs.csv"):
        model, rank, *_ = row["constants"].split()
        given = dict(argument.split("=") for argument in row["constants"].split())
        row["answers"] = int(given["BATCH_SIZE"]) * int(given["NUM_GENERATIONS"])
        found.setdefault((row["topology"], f"{model} {rank}"), []).append(row)
    return found


def test_of_the_committed_rungs_the_next_step_does_not_fit():
    for first, twice in by_rung().values():
        assert twice["answers"] == 2 * first["answers"] and float(twice["left"]) < 0
        # what does not fit at all was tried with the fewest: one answer per chip, and at least two
        assert float(first["left"]) >= 0 or first["answers"] == max(2, int(first["chips"].split()[0]))


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_readmes_rungs_are_the_committed_ones(language):
    """A line per slice, a cell per model: the most answers per pass, and vLLM's share beside them."""
    text = pages.text(settings.HERE, language)
    lines, models = {}, {}
    for (topology, model), rows in by_rung().items():
        row = rows[0]
        least, most = float(row["vllm_least"]), float(row["vllm_most"])
        share = f"{least:.2f} – {most:.2f}" if least <= most else "✗"
        fits = float(row["left"]) >= 0
        lines.setdefault(topology, []).append(f"{row['answers']}: {share}" if fits else "–")
        models.setdefault(topology, []).append(model)
    assert len(lines) == 6 and len({tuple(names) for names in models.values()}) == 1  # the columns
    for topology, cells in lines.items():
        assert f"| {topology} | {' | '.join(cells)} |" in text
    shown = by_rung()["v5e-1", "MODEL=Qwen/Qwen3-0.6B LORA_RANK=32"][0]
    assert f"tpu_fit_check TOPOLOGIES=v5e-1 {shown['constants']}\n" in text
