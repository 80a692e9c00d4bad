"""Defaults that follow the machine, what it refuses, and a whole run on devices that refuse to be
asked.
"""

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pathwaysutils
import pytest
import short_runs
from flax import nnx
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE
from maxtext.layers.attention_op import AttentionOp

import grpo_llama3_1_8b_demo as demo
import settings
from model import devices, llama
from run import machine as machines
from run import start
from run.run_files import read_log

QWEN = ["MODEL=Qwen/Qwen3-0.6B", "DATASET=gsm8k"]
CARDS = {"t4": "7.5", "h100": "9.0", "8xh100": "9.0", "an unknown card": "6.1"}


def on(monkeypatch, platform, kind, count=1, **attributes):
    """jax, as it would be asked on such a machine."""
    device = SimpleNamespace(device_kind=kind, platform=platform, **attributes)
    monkeypatch.setattr(jax, "devices", lambda: [device] * count)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)


@pytest.mark.parametrize("card", CARDS)
def test_a_card_gets_what_it_can_do_and_says_so_in_one_line(card, monkeypatch, capsys):
    """T4's generation, Turing, has tensor cores for float16, not bfloat16: Ampere (8.0) has."""
    row = machines.CARDS.get(card.removeprefix("8x"), {"name": card})
    on(
        monkeypatch,
        "gpu",
        row["name"],
        8 if card.startswith("8x") else 1,
        compute_capability=CARDS[card],
    )
    c = start.for_this_machine(settings.read(demo.Constants, QWEN), QWEN)
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith(f"machine  {card}: ROLLOUT_ENGINE=maxtext (")
    assert (c.ROLLOUT_ENGINE, c.ATTENTION, c.MACHINE) == ("maxtext", "dot_product", "")
    assert ("bfloat16" if float(CARDS[card]) >= 8 else "float32") == c.DTYPE
    devices.check_machine(c)
    assert ("over 8 devices" in capsys.readouterr().out) == card.startswith("8x")
    if card in machines.CARDS:  # as a dry run elsewhere is told
        monkeypatch.undo()
        told = settings.read(demo.Constants, [*QWEN, f"MACHINE={card}", "DRY_RUN=True"])
        assert vars(told) == vars(c) | {"MACHINE": card, "DRY_RUN": True}
    mine = start.for_this_machine(c, [*QWEN, "DTYPE=bfloat16", "BATCH_SIZE=8"])
    assert (mine.DTYPE, mine.BATCH_SIZE) == ("bfloat16", 8)


def test_the_batch_of_a_card_is_the_largest_that_was_compiled_and_fits(monkeypatch):
    """The table is made up: of the batch of 16 a decode is too large, and a case is still to be
    compiled.
    """
    monkeypatch.setattr(machines, "ASSETS", Path(__file__).parent / "golden" / "machine")
    for asked, batch in (
        ("MACHINE=t4", 8),
        ("MACHINE=t4 LORA_RANK=0", 1),
        ("MACHINE=l4", 64),
        ("MACHINE=t4 MODEL=Qwen/Qwen3-0.6B@main", 8),
        ("MACHINE=t4 MODEL=not/compiled", 64),
    ):
        assert batch == settings.read(demo.Constants, [*QWEN, *asked.split()]).BATCH_SIZE, asked


@pytest.mark.parametrize("kernel", ["dot_product", "flash", "autoselected"])
def test_what_cannot_decode_is_refused_and_maxtext_itself_says_which_that_is(kernel, monkeypatch):
    folder, hf = llama.fetch_model("tiny_llama")
    config = llama.to_maxtext_config(hf, rows=1, prompt_tokens=4, new_tokens=4, attention=kernel)
    adapter, _ = llama.load_llama(folder, hf, config, pad_id=0)
    op = next(
        module for _, module in nnx.iter_modules(adapter.base) if isinstance(module, AttentionOp)
    )
    heads = ((1, hf.num_attention_heads), (256, hf.num_key_value_heads))
    one, past = (
        jax.ShapeDtypeStruct((1, n, count, hf.head_dim), jnp.float32) for n, count in heads
    )

    def decode(query, key, value):
        return op.apply_attention(
            query,
            key,
            value,
            None,
            None,
            None,
            MODEL_MODE_AUTOREGRESSIVE,
            qk_product_einsum=jnp.einsum,
            wv_product_einsum=jnp.einsum,
        )

    for platform, attributes in (("tpu", {}), ("gpu", {"compute_capability": "8.0"})):
        here = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        monkeypatch.setattr(op, "mesh", here)
        answer = contextlib.nullcontext()
        try:
            jax.eval_shape(decode, one, past, past)
        except ValueError as error:
            assert "Decode not supported" in str(error)
            answer = pytest.raises(
                settings.UserError, match=f"^ATTENTION={kernel}: .*; use autoselected$"
            )
        with monkeypatch.context() as patch:
            on(patch, platform, platform, **attributes)
            asked = [*QWEN, "ROLLOUT_ENGINE=maxtext"]
            devices.check_machine(
                start.for_this_machine(settings.read(demo.Constants, asked), asked)
            )
            with answer:
                devices.check_machine(
                    settings.read(demo.Constants, [*asked, f"ATTENTION={kernel}"])
                )


@pytest.mark.parametrize(
    ("machine", "length", "refused"),
    [("v6e-8", 1024, 0), ("v6e-8", 1000, 1), ("v6e-8", 400, 0), ("h100", 1000, 0), ("t4", 1024, 1)],
)
def test_flash_needs_its_blocks_and_its_card(machine, length, refused):
    for kernel in ("autoselected", "dot_product"):
        c = settings.read(
            demo.Constants,
            [
                *QWEN,
                f"ATTENTION={kernel}",
                "MAX_PROMPT_LENGTH=200",
                f"TOTAL_GENERATION_STEPS={length - 200}",
            ],
        )
        fault = machines.attention_fault(c, machines.parse_machine(machine))
        assert bool(fault) == (refused and kernel == "autoselected")


def refuse(*arguments, **named):
    raise jax.errors.JaxRuntimeError(
        "INVALID_ARGUMENT: only supported for addressable PjRt devices."
    )


def test_a_run_on_devices_that_are_elsewhere(tmp_path, monkeypatch):
    """As those of Pathways' proxy they refuse what jaxlib has for PjRt devices alone; callbacks,
    too.
    """
    device, client = type(jax.devices()[0]), type(jax.devices()[0].client)
    for owner, names in {
        device: ["memory_stats", "live_buffers", "get_stream_for_external_ready_events"],
        client: [
            "heap_profile",
            "unsafe_client_pointer",
            "make_python_callback_from_host_send_and_recv",
        ],
        jaxlib._jax.ArrayImpl: ["unsafe_buffer_pointer", "__dlpack__"],
        jax: ["pure_callback"],
        jax.debug: ["callback"],
        jax.experimental: ["io_callback"],
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, refuse, raising=False)
    initialized = []
    monkeypatch.setattr(pathwaysutils, "initialize", lambda: initialized.append(True))
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    short_runs.run_here(tmp_path, *short_runs.SHORT, "NUM_BATCHES=4")
    rows = read_log(tmp_path / "run" / "train_log.csv")
    assert initialized == [True] and rows and (tmp_path / "run" / "report.md").exists()
    for row in rows:
        assert np.isnan(row["memory_device_0_gib"]) and row["memory_host_gib"] > 0.1


def test_the_tools_are_ours_where_another_package_has_their_name(tmp_path):
    """The wheel of tpu-inference 0.32 brings a package `tools`, and it's on the path, too."""
    (tmp_path / "tools").mkdir()
    for name in ("__init__", "show_run"):
        (tmp_path / "tools" / f"{name}.py").write_text("raise SystemExit('the other one')")
    command = [sys.executable, settings.HERE / "tool.py", "show_run", "--help"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "give a run's folder" in done.stderr
