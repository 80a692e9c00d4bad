"""The fit check compiles the main script's own programs, and its committed tables say what the
pages say.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
import short_runs
from flax import nnx
from table_policy import train_llm

import grpo_llama3_1_8b_demo as demo
import machines
import reward_func
import settings
from model import llama
from model.llm import load_llm, split
from run import memory, start
from settings import UserError
from task import questions
from tools import fit_check as fit


def table(*files):
    paths = (machines.ASSETS / file for file in files or memory.FIT_FILES)
    # a case without a peak is still to be compiled
    return [row for path in paths for row in machines.rows_of(path) if row["peak"]]


FIT = settings.HERE.parent / ".venv-fit" / "bin" / "python"


@pytest.mark.skipif(not FIT.exists(), reason="needs the TPU's compiler: make fit-setup")
def test_the_native_sampler_and_the_update_compile_for_eight_tpu_chips(tmp_path):
    """A small Llama, sampled in every way we have. The tiny one's vocabulary is too short: with it,
    the compiler also took the top-k that kills it at Llama 3.1's.
    """
    config = json.loads((settings.HERE / "tiny_llama" / "config.json").read_text())
    config |= dict(vocab_size=4096, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = "BATCH_SIZE=8", "NUM_GENERATIONS=2", "SCAN_LAYERS=True"
    alone = "BETA=0", "NUM_ITERATIONS=1"  # without other programs
    asked = "fit_check", "TOPOLOGIES=v6e-8", f"MODEL={tmp_path}", *small, *alone
    # without the suite's variables, which are for the CPU's compiler
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    tool = settings.HERE / "tool.py"
    done = subprocess.run([FIT, tool, *asked], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r": (\w+) takes", done.stdout) == ["prefill", "decode", "update"]


def arrays_of(tree):
    """Path, shape, dtype and placement; a counter lies where the runtime puts it. Random numbers
    don't count: nothing samples from them.
    """
    tree = nnx.to_pure_dict(tree.filter(nnx.Param)) if isinstance(tree, nnx.State) else tree
    return {
        jax.tree_util.keystr(path): (
            x.shape,
            x.dtype,
            x.ndim and x.sharding.devices_indices_map(x.shape),
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def run_and_compare(trained: str) -> None:
    """The tiny Llama as the main script loads it, with weights, and the fit check's abstract
    programs.
    """
    arguments = [
        "BATCH_SIZE=8",
        "TRAIN_MICRO_BATCH_SIZE=4",
        "NUM_GENERATIONS=2",
        "SCAN_LAYERS=True",
        trained,
        "WARMUP_FRACTION=0.0",
        "RUN_DIR=run",
    ]
    c = settings.read(demo.Constants, arguments)
    folder, hf = llama.fetch_model(c.MODEL)
    tokenizer = llama.load_tokenizer(folder)
    assert jax.device_count() == 8
    model = llama.abstract_model(hf, llama.to_run_config(c, hf), jax.devices())
    programs, given, done = {}, {}, {}
    for e in (c, dataclasses.replace(c, ROLLOUT_ENGINE="vllm")):
        for name, jitted, arguments in fit.make_programs(
            e, hf, *model, tokenizer.pad_token_id, done
        ):
            programs[name], given[name] = jitted, arguments
            if name in ("prefill", "decode"):  # decode takes what prefill returns
                done[name] = jitted.lower(*arguments).compile()
    _, cache = done["prefill"].out_info
    _, places = done["prefill"].output_shardings
    for x, place in zip(jax.tree.leaves(cache), jax.tree.leaves(places), strict=True):
        if x.ndim > 2:  # [layers, answers, ...]: a device has those of its own answers
            assert place.shard_shape(x.shape)[:2] == (x.shape[0], x.shape[1] // 8)
    beside, *of_step = given["update"]
    assert bool(jax.tree.leaves(beside)) == (trained == "LORA_RANK=0")  # the frozen reference

    data = questions.read_data(c)
    grader = start.checked_grader(c, hf, tokenizer, reward_func, data)
    rows, _ = start.make_splits(c, data, grader, tokenizer)
    llm = load_llm(c, folder, hf, tokenizer)
    called, update = [], demo.update

    # what the loop calls `update` with, at the moment before the first one
    def observed(*arguments):
        called.extend(arguments)
        raise InterruptedError

    demo.update = observed
    with pytest.raises(InterruptedError):
        train_llm(c, llm, grader, rows["train"], Path("run"))
    params, opt_state, model, batch, method, optimizer = called
    policy = nnx.clone(llm.actor, arrays=True)

    of_step[2] = of_step[2].frozen
    for real, ours in zip((params, opt_state, model.frozen, batch), of_step, strict=True):
        assert arrays_of(real) == arrays_of(ours)

    # `update` gives them away
    kept = [jax.tree.map(jnp.copy, (params, opt_state)) for _ in range(2)]
    theirs = update(*kept[0], model, batch, method, optimizer)
    ours = programs["update"]({"beside": jnp.zeros(8)}, *kept[1], model, batch)
    assert arrays_of(ours) == arrays_of(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-4 and float(ours[2]["grad_norm"]) > 0

    structure, *states = split(llm.reference, nnx.LoRAParam if c.LORA_RANK else nnx.Param)
    found = programs["reference"](
        (), structure, tuple(states), batch.prompt_ids, batch.completion_ids
    )
    np.testing.assert_array_equal(found, llm.reference_log_probs(batch))
    assert np.abs(found).max() > 0.1

    # as many weights, where vLLM's map puts them
    synced = programs["sync"]((), nnx.state(policy, nnx.Param))
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    places = fit.abstract_vllm_state(llm.reference, mesh, jnp.dtype(c.DTYPE))
    assert arrays_of(dict(synced.flat_state())) == arrays_of(dict(places.flat_state()))
    assert sum(x.size for x in jax.tree.leaves(synced)) == llama.count_parameters(llm.reference)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["LORA_RANK=0", "LORA_RANK=4"])
def test_what_is_compiled_is_what_trains(empty_folder, trained):
    """On 8 virtual devices: the same arrays in the same places, step, reference and sync to the
    last bit.
    """
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    short_runs.in_a_process(
        run_and_compare, trained, XLA_FLAGS=f"{flags} {quick}", JAX_PLATFORMS="cpu"
    )


def test_the_estimate_is_what_the_compiler_gives_an_update_to_begin_with():
    """Weights, reference and moments; parameters are counted by hand. 7 %: rows of former code."""
    for row in table():
        if row["program"] != "update" or not row["arguments"] or row["algorithm"] == "PPO":
            continue
        c = settings.read(fit.Constants, row["constants"].split())
        chips = int(row["chips"].split()[0])
        hf = memory.published_config(c.MODEL) or fit.dry_run.find_model(c.MODEL, weights=False)[1]
        d, L = hf.hidden_size, hf.num_hidden_layers
        q, kv = (hf.head_dim * n for n in (hf.num_attention_heads, hf.num_key_value_heads))
        norms = 2 * d + 2 * hf.head_dim * (hf.model_type == "qwen3")
        layer = 2 * d * (q + kv) + 3 * d * hf.intermediate_size + norms
        parameters = (2 - hf.tie_word_embeddings) * hf.vocab_size * d + d + L * layer
        ours = memory.estimate(c, hf, parameters, list(range(chips)), None).training
        assert ours == pytest.approx(float(row["arguments"]), rel=0.07, abs=0.02), row


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_table_of_the_rungs_is_the_committed_one(language):
    """A cell for each case: the most answers per pass, and vLLM's share beside them."""
    text, lines = pages.text(settings.HERE, language), {}
    for row in table("fit_rungs.csv"):
        given = dict(argument.split("=") for argument in row["constants"].split())
        least, most = float(row["vllm_least"]), float(row["vllm_most"])
        answers = int(given["BATCH_SIZE"]) * int(given["NUM_GENERATIONS"])
        cell = f"{answers}: {least:.2f} – {most:.2f}" if least <= most else "✗"
        cell = cell if float(row["left"]) >= 0 else "–"
        # the first row of a case is the largest that fits beside vLLM, or the smallest if none does
        lines.setdefault(row["machine"], {}).setdefault((given["MODEL"], given["LORA_RANK"]), cell)
    assert len({tuple(cells) for cells in lines.values()}) == 1  # the columns
    for machine, cells in lines.items():
        assert f"| {machine} | {' | '.join(cells.values())} |" in text


CARD_NAMES = {
    "rtx4060": "RTX 4060",
    "rtx4070": "RTX 4070",
    "t4": "T4",
    "l4": "L4",
    "rtx4090": "RTX 4090",
    "rtx3090": "RTX 3090",
    "a100-40": "A100 40 GB",
    "a100-80": "A100 80 GB",
    "h100": "H100",
    "h200": "H200",
    "8xh100": "8 × H100",
}


@pytest.mark.parametrize("language", pages.LANGUAGES)
@pytest.mark.parametrize("card", CARD_NAMES)
def test_the_table_of_the_cards_is_the_committed_one(card, language):
    """A cell for each model and how it's trained: the largest batch whose programs all fit."""
    cells = {}
    for constants, rows in machines.compiled(card, ["fit_cards.csv"]).items():
        c = dict(word.split("=") for word in constants.split())
        size, peak = int(c["BATCH_SIZE"]), max(float(row["peak"]) for row in rows)
        cell = (size, f"{size} ({peak:.1f})")
        if peak > float(rows[0]["limit"]):
            cell = (0, "–")
        case = c.get("LORA_RANK") == "0", c["MODEL"]
        cells[case] = max(cells.get(case, cell), cell)
    del cells[False, "tiny_llama"]
    order = ("135M", "0.6B", "1B", "8B")  # in the models' names; LoRA comes first
    found = sorted(
        (whole, next(i for i, size in enumerate(order) if size in model), cell)
        for (whole, model), (_, cell) in cells.items()
    )
    row = " | ".join(cell for *_, cell in found)
    gib = machines.parse_machine(card).gib
    text = pages.text(settings.HERE, language)
    assert len(found) == 7 and f"| {CARD_NAMES[card]} | {gib:.2f} | {row} |" in text


def test_a_file_is_compiled_case_by_case_and_goes_on_where_it_stopped(monkeypatch, tmp_path):
    """What compiles is replaced, and stops at the third case; all else runs, over a copy of the
    file.
    """
    file, cases, asked = "fit_cards.csv", list(fit.committed_cases("fit_cards.csv")), []
    shutil.copy(machines.ASSETS / file, tmp_path)
    monkeypatch.setattr(machines, "ASSETS", tmp_path)

    def one_row(*case):
        asked.append(case)
        if len(asked) == 3:
            raise KeyboardInterrupt
        names = dict(zip(("machine", "algorithm", "constants"), (*case[:2], " ".join(case[2]))))
        return [names | dict(peak=1 / 3, compiled="2099-01-01")], "yes"

    monkeypatch.setattr(fit, "largest", one_row)
    with pytest.raises(KeyboardInterrupt):
        fit.main([f"WRITE={file}"])
    fit.main([f"WRITE={file}", "SINCE=2099-01-01"])
    assert asked == [*cases[:3], *cases[2:]] and list(fit.committed_cases(file)) == cases
    assert [row["peak"] for row in table(file)] == ["0.33"] * len(cases)


@pytest.mark.parametrize(
    "name, held, beside, answers",
    [
        ("v5e-1", 5, 5, [4, 8]),
        ("v5e-8", 5, 5, [32, 64]),
        ("v5e-1", 5, 2, [2, 4, 8]),
        ("v5e-1", 1, 1, [2, 4]),
        ("v5e-1", 100, 100, [64]),
        ("8xh100", 100, 0, [512]),
        ("t4", 1, 1, [8, 16]),
    ],
)
def test_the_largest_batch_is_found_by_halving(monkeypatch, name, held, beside, answers):
    """A chip holds `held` answers, beside vLLM `beside`: so many fit, no more; one is no group."""

    def check(name, algorithm, arguments, update_alone):
        given = {"NUM_GENERATIONS": 8} | dict(argument.split("=") for argument in arguments)
        asked = int(given["BATCH_SIZE"]) * int(given["NUM_GENERATIONS"])
        each = asked / machines.parse_machine(name).chips
        row = dict(answers=asked, left=held - each, vllm_least=each, vllm_most=beside)
        return [row], f"{asked} answers"

    monkeypatch.setattr(fit, "check", check)
    rows, said = fit.largest(name, "GRPO", [])
    assert [row["answers"] for row in rows] == answers and said == f"{answers[0]} answers"


@pytest.mark.parametrize("name", ["v5p-8", "t4"])
def test_without_its_compiler_the_remedy_is_named(name):
    with pytest.raises(UserError, match=rf"={name}: its compiler does not start .*make fit-setup"):
        fit.devices_of(fit.parse_machine(name))
