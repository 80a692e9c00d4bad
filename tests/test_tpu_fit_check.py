"""The fit check compiles the main script's own step, and its committed table says what the README says."""

import csv
import importlib.util
import os
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
FIT_PYTHON = settings.HERE.parent / ".venv-fit" / "bin" / "python"


def table(name="fit_check.csv"):
    with open(settings.HERE / "assets" / name, newline="") as file:
        return list(csv.DictReader(file))


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


def test_the_committed_table_is_of_the_scripts_cases_and_adds_up():
    rows = table()
    cases = dict.fromkeys((r["topology"], r["algorithm"], r["constants"]) for r in rows)
    assert list(cases) == [(topology, name, " ".join(given)) for topology, name, given in fit.TABLE]
    for row in rows:
        assert float(row["limit"]) == memory.HBM_GIB[row["topology"].split("-")[0]]
        # both rounded to two decimals
        assert float(row["left"]) == pytest.approx(float(row["limit"]) - float(row["peak"]), abs=0.011)
        assert bool(row["arguments"]) == (float(row["left"]) >= 0)


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


def test_the_defaults_fit_one_host_and_a_critic_does_not_fit_v6e_8():
    left = {(r["topology"], r["algorithm"], r["constants"], r["program"]): float(r["left"]) for r in table()}
    full, on_32 = " ".join(fit.FULL), " ".join(fit.ON_32)
    for program in ("step", "reference", "sync"):
        for constants in ("", full):
            assert left["v5p-8", "GRPO", constants, program] > 0
            assert left["v6e-8", "GRPO", constants, program] > 0
        assert left["v5p-64", "GRPO", on_32, program] > 0
    assert settings.defaults(demo.Constants, "tpu")["WEIGHT_DTYPE"] == "float32"
    assert left["v6e-8", "PPO", full, "step"] < 0


def test_the_default_share_of_vllm_is_right_for_both_slices_of_one_host():
    """From what the engine needs to what training leaves, by the table."""
    share = settings.defaults(demo.Constants, "tpu")["HBM_UTILIZATION_VLLM"]
    for row in table():
        if row["program"] == "step" and row["constants"] == "" and row["topology"] in ("v5p-8", "v6e-8"):
            assert float(row["vllm_least"]) <= share <= float(row["vllm_most"])


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_readmes_table_is_the_committed_one(language):
    text = pages.text(settings.HERE, language)
    for row in table():
        if row["program"] == "step":
            given = f"`{row['constants']}`" if row["constants"] else ""
            cells = [row["topology"], row["algorithm"], given, row["chips"], row["arguments"] or "",
                     row["temporaries"] or "", row["peak"], row["limit"], row["left"]]  # fmt: skip
            assert "| " + " | ".join(cells).replace("  ", " ") + " |" in text.replace("  ", " "), cells


def test_a_config_that_does_not_fit_gets_one_line_with_how_much_and_what_to_change():
    full = ["LORA_RANK=0", "BATCH_SIZE=2", "TRAIN_MICRO_BATCH_SIZE=1"]
    c = settings.read(demo.Constants, [f"MODEL={memory.LLAMA_3_1_8B}", *full])
    row = dict(topology="v6e-8", algorithm="GRPO", constants="TRAIN_MICRO_BATCH_SIZE=1", program="step",
               peak=34.48, limit=31.24, left=31.24 - 34.48)  # fmt: skip
    (line,) = fit.verdict(c, [row], None, 0, None, 0)
    assert "3.24 GiB per chip too much (step); TRAIN_MICRO_BATCH_SIZE=1, set 0" in line
    (line,) = fit.verdict(c, [row | {"algorithm": "PPO"}], None, 0, None, 0)
    assert "does not fit" in line and "ALGORITHM=PPO, take GRPO" in line


def test_the_command_line_takes_its_own_constants_and_the_main_scripts():
    assert fit.cases([])[1] == fit.TABLE and fit.cases(["LARGEST=True"])[1] == fit.RUNGS
    expected = [("v5p-8", "PPO", ("BATCH_SIZE=1",)), ("v6e-8", "PPO", ("BATCH_SIZE=1",))]
    c, found = fit.cases(["TOPOLOGIES=v5p-8,v6e-8", "BATCH_SIZE=1", "ALGORITHM=PPO"])
    assert found == expected and not c.WRITE and not c.LARGEST
    with pytest.raises(UserError, match="ALGORITHM=DPO: must be 'GRPO' or 'PPO'"):
        fit.cases(["ALGORITHM=DPO"])


def test_only_write_writes_the_committed_table_and_it_takes_the_whole_of_it(monkeypatch, tmp_path, capsys):
    assert fit.cases(["WRITE=True"])[1] == fit.TABLE
    assert fit.cases(["WRITE=True", "LARGEST=True"])[1] == fit.RUNGS
    with pytest.raises(UserError, match=r"WRITE=True: .* leave out BATCH_SIZE=1, or WRITE$"):
        fit.cases(["WRITE=True", "BATCH_SIZE=1"])
    (tmp_path / "assets").mkdir()
    monkeypatch.setattr(settings, "HERE", tmp_path)
    for search in ("check", "largest"):
        monkeypatch.setattr(fit, search, lambda *case: ([dict.fromkeys(fit.COLUMNS, case[0])], ["fits"]))
    monkeypatch.setattr(fit.importlib.metadata, "version", lambda name: fit.versions.VERSIONS.get(name, "0"))
    fit.main([])
    assert not list((tmp_path / "assets").iterdir())
    fit.main(["WRITE=True"])
    assert len((tmp_path / "assets" / "fit_check.csv").read_text().splitlines()) == 1 + len(fit.TABLE)
    fit.main(["WRITE=True", "LARGEST=True"])
    assert len((tmp_path / "assets" / "fit_rungs.csv").read_text().splitlines()) == 1 + len(fit.RUNGS)
    assert "fits" in capsys.readouterr().out
    assert "tpu_fit_check WRITE=True" in (HERE.parent / "make" / "environments.mk").read_text()


def test_model_on_the_command_line_is_the_model_that_is_compiled(monkeypatch):
    asked = []
    monkeypatch.setattr(fit, "topology_devices", lambda name: list(range(8)))
    monkeypatch.setattr(fit, "compile_program", lambda *a: ({"peak": 40.0}, "too much"))

    def programs(c, hf, *arguments, **machine):
        asked.append((c.MODEL, hf.hidden_size))
        return fit.SimpleNamespace(plain=(), weights=(), moments=())

    monkeypatch.setattr(fit, "make_programs", programs)
    fit.check("v6e-8", "GRPO", ())
    fit.check("v6e-8", "GRPO", ("MODEL=tiny_llama",))
    assert asked == [(memory.LLAMA_3_1_8B, 4096), ("tiny_llama", 96)]


def test_the_most_answers_that_fit_are_found_by_halving(monkeypatch):
    """A chip that holds 5 answers: 4 fit and 8 do not; one answer is no group."""
    asked = []

    def check(topology, algorithm, arguments, step_alone):
        given = dict(argument.split("=") for argument in arguments)
        answers = int(given["BATCH_SIZE"]) * int(given["NUM_GENERATIONS"])
        asked.append((given["BATCH_SIZE"], given["NUM_GENERATIONS"]))
        assert step_alone and given["TRAIN_MICRO_BATCH_SIZE"] == "0" and given["MODEL"] == "m"
        return [dict(answers=answers, left=held - answers / chips)], [f"{answers} answers"]

    monkeypatch.setattr(fit, "check", check)
    monkeypatch.setattr(fit, "topology_devices", lambda name: range(chips))
    held, chips = 5, 1
    rows, lines = fit.largest("v5e-1", "GRPO", ["MODEL=m"])
    assert asked == [("8", "8"), ("4", "8"), ("2", "8"), ("1", "8"), ("1", "4")]
    assert [row["answers"] for row in rows] == [4, 8] and lines == ["4 answers"]
    held, chips = 5, 8
    assert [row["answers"] for row in fit.largest("v5e-8", "GRPO", ["MODEL=m"])[0]] == [32, 64]
    held, chips = 1, 1
    assert [row["answers"] for row in fit.largest("v5e-1", "GRPO", ["MODEL=m"])[0]] == [2, 4]
    held, chips = 100, 1
    assert [row["answers"] for row in fit.largest("v5e-1", "GRPO", ["MODEL=m"])[0]] == [64]


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
    command = [
        FIT_PYTHON,
        settings.HERE / "tool.py",
        "tpu_fit_check",
        "TOPOLOGIES=v6e-8",
        "ALGORITHM=PPO",
        *fit.FULL,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"v6e-8 PPO {' '.join(fit.FULL)}: does not fit" in done.stdout


def by_rung():
    """Rows of fit_rungs.csv by slice and constants: the most answers that fit, and twice as many."""
    found = {}
    for row in table("fit_rungs.csv"):
        given = dict(argument.split("=") for argument in row["constants"].split())
        row["answers"] = int(given["BATCH_SIZE"]) * int(given["NUM_GENERATIONS"])
        found.setdefault(
            (row["topology"], f"MODEL={given['MODEL']} LORA_RANK={given['LORA_RANK']}"), []
        ).append(row)
    return found


def test_the_committed_rungs_are_those_of_the_script_and_the_next_step_does_not_fit():
    found = by_rung()
    assert list(found) == [(topology, " ".join(given)) for topology, _, given in fit.RUNGS]
    for rows in found.values():
        first, twice = rows
        assert twice["answers"] == 2 * first["answers"] and float(twice["left"]) < 0
        chips = int(first["chips"].split()[0])
        # what does not fit at all was tried with the fewest: one answer per chip, and at least two
        assert float(first["left"]) >= 0 or first["answers"] == max(2, chips)


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
    shown = next(
        rows[0] for key, rows in by_rung().items() if key == ("v5e-1", "MODEL=Qwen/Qwen3-0.6B LORA_RANK=32")
    )
    assert f"tpu_fit_check TOPOLOGIES=v5e-1 {shown['constants']}\n" in text
