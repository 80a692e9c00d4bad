"""Defaults that follow the machine, what it refuses, and a whole run on devices that refuse to be
asked.
"""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pathwaysutils
import pytest
import short_runs
from flax import nnx
from jaxlib import xla_client
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE
from maxtext.layers.attention_op import AttentionOp

import grpo_llama3_1_8b_demo as demo
import machines
import settings
from model import devices, llama
from run import start
from run.run_files import read_log

QWEN = ["MODEL=Qwen/Qwen3-0.6B", "DATASET=gsm8k"]
QWEN_LORA, LLAMA_LORA = "MODEL=Qwen/Qwen3-0.6B", "MODEL=meta-llama/Llama-3.1-8B-Instruct"
GIB, MIB = 2**30, 2**20
CARDS = {"t4": "7.5", "h100": "9.0", "8xh100": "9.0", "an unknown card": "6.1"}


def on(monkeypatch, platform, kind, count=1, share=0.0, **attributes):
    """jax, as it would be asked on such a machine; `share` is JAX's, in GiB of a card."""
    device = SimpleNamespace(device_kind=kind, platform=platform, **attributes)
    device.memory_stats = lambda: {"bytes_limit": int(share * GIB)}
    monkeypatch.setattr(jax, "devices", lambda: [device] * count)
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)


@pytest.mark.parametrize("card", CARDS)
def test_a_card_gets_what_it_can_do_and_says_so_in_one_line(card, monkeypatch, capsys):
    """T4's generation, Turing, has tensor cores for float16, not bfloat16: Ampere (8.0) has."""
    row = machines.CARDS.get(card.removeprefix("8x"), {"name": card})
    known = machines.parse_machine(card)
    on(
        monkeypatch,
        "gpu",
        row["name"],
        8 if card.startswith("8x") else 1,
        share=known.gib + machines.SPARE if known else 4,
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


def largest_compiled(card, model, lora):
    """BATCH_SIZE by fit_cards.csv alone: of the batches whose every program fits, the largest."""
    total = int(machines.CARDS[card.removeprefix("8x")]["device_memory_size"]) / GIB
    sizes = [0]
    for constants, rows in machines.compiled(card, ["fit_cards.csv"]).items():
        c = dict(word.split("=") for word in constants.split())
        if (c["MODEL"], c.get("LORA_RANK") != "0") == (model, lora):
            peak = max(float(row["peak"]) for row in rows)
            # 1.5 GiB stay outside of JAX's share (3 with NCCL), 1 GiB in it
            fits = peak <= total - (3 if card.startswith("8x") else 1.5) - 1 + 0.005
            sizes.append(int(c["BATCH_SIZE"]) * fits)
    return max(sizes)


@pytest.mark.parametrize("card", machines.BATCH_SIZES)
def test_every_default_of_every_card_fits_jaxs_share_with_a_gib_to_spare(
    card, monkeypatch, tmp_path
):
    """By the compiler's table; the driver is a script that says what an idle card has."""
    count, kind = (8, card[2:]) if card.startswith("8x") else (1, card)
    total = int(machines.CARDS[kind]["device_memory_size"]) / MIB
    share = float(share_of(monkeypatch, tmp_path, f"{total:.0f}, 0\n" * count))
    for (model, lora), size in zip(machines.BATCH_SIZE_COLUMNS, machines.BATCH_SIZES[card]):
        assert size == largest_compiled(card, model, lora), (model, lora)
        peaks = [
            float(row["peak"])
            for constants, rows in machines.compiled(card, ["fit_cards.csv"]).items()
            for row in rows
            if {f"MODEL={model}", f"BATCH_SIZE={size}"} <= set(constants.split())
            and ("LORA_RANK=0" not in constants) == lora
        ]
        # the share is rounded down to a thousandth of the card
        assert max(peaks, default=0) + 1 <= (share + 1e-3) * total / 1024


@pytest.mark.parametrize(
    ("kind", "capability", "mib", "count", "model", "size", "words"),
    [  # what is told of these cards: nvidia-smi's total; the sizes are those of fit_cards.csv
        ("NVIDIA GeForce RTX 4070", "8.9", 12282, 1, QWEN_LORA, 2, "the largest that fits"),
        ("NVIDIA GeForce RTX 5090", "12.0", 32607, 1, QWEN_LORA, 8, "as for rtx3090"),
        ("NVIDIA A10G", "8.6", 23028, 1, QWEN_LORA, 8, "as for l4"),
        ("NVIDIA H100 PCIe", "9.0", 81559, 1, LLAMA_LORA, 4, "as for a100-80"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9", 8188, 1, QWEN_LORA, 1, "no batch"),
        ("NVIDIA GeForce RTX 4090", "8.9", 24564, 2, QWEN_LORA, 8, "as for"),
        ("NVIDIA H100 80GB HBM3", "9.0", 81559, 4, LLAMA_LORA, 4, "as for"),
        ("NVIDIA H200", "9.0", 143771, 8, LLAMA_LORA, 32, "as for"),
        ("Tesla V100-SXM2-32GB", "7.0", 32768, 1, QWEN_LORA, 2, "as for t4"),  # float32
        ("NVIDIA H100 80GB HBM3", "9.0", 81559, 1, "MODEL=not/compiled", 1, "no batch"),
        ("NVIDIA H100 80GB HBM3", "9.0", 81559, 1, f"{QWEN_LORA}@main", 32, "the largest"),
    ],
)
def test_a_card_that_was_not_compiled_gets_the_next_smaller_ones_batch(
    monkeypatch, capsys, kind, capability, mib, count, model, size, words
):
    outside = 3.0 if count > 1 else 1.5
    share = mib / 1024 - outside
    on(monkeypatch, "gpu", kind, count, share=share, compute_capability=capability)
    arguments = [model, "DATASET=gsm8k"]
    c = start.for_this_machine(settings.read(demo.Constants, arguments), arguments)
    [said] = capsys.readouterr().out.splitlines()
    assert size == c.BATCH_SIZE and f"BATCH_SIZE={size} ({words}" in said


# %% The share, and a GPU that JAX can't use -------------------------------------------------------
def driver_that_says(monkeypatch, tmp_path, text, code=0):
    """A stand-in for nvidia-smi, first on the path."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def share_of(monkeypatch, tmp_path, text, several=False, **environment):
    """XLA_CLIENT_MEM_FRACTION after the driver said `text`; None if it isn't set."""
    driver_that_says(monkeypatch, tmp_path, text)
    for name in (*devices.SHARE_NAMES, "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.setenv(name, "")  # so that it's put back
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices.share_memory(several)
    return os.environ.get("XLA_CLIENT_MEM_FRACTION")


@pytest.mark.parametrize("name", devices.SHARE_NAMES)
def test_the_users_share_stays_and_jax_accepts_it(monkeypatch, tmp_path, name):
    """jaxlib raises if both names are set."""
    share_of(monkeypatch, tmp_path, "22000, 0\n", **{name: "0.5"})
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5


def test_the_share_leaves_what_other_programs_have(monkeypatch, tmp_path):
    """Of 24 GiB: 1.5 for CUDA, 3 with NCCL; a desktop's 1 GiB; 2.5 under Windows."""
    for text, several, wsl, gib in (
        ("24576, 0\n", False, False, 22.5),
        ("23552, 1024\n", False, False, 21.5),
        ("24576, 0\n23552, 1024\n", False, False, 20.0),  # the same share of both
        ("12288, 12288\n", True, False, 21.0),  # another process of the run has the rest
        ("23552, 1024\n", False, True, 20.5),
    ):
        version = tmp_path / "version"
        version.write_text("Linux version 6.6.87.2-microsoft-standard-WSL2" if wsl else "Linux")
        monkeypatch.setattr(devices, "PROC_VERSION", version)
        share = float(share_of(monkeypatch, tmp_path, text, several))
        assert share * 24 == pytest.approx(gib, abs=24e-3)  # three decimals
        assert ("XLA_PYTHON_CLIENT_ALLOCATOR" in os.environ) == wsl
    assert share_of(monkeypatch, tmp_path, "[N/A], [N/A]\n") is None
    with pytest.raises(settings.UserError, match=r"^the GPU has 2\.0 of 24\.0 GiB free; end the"):
        share_of(monkeypatch, tmp_path, "2048, 22528\n")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("550.54.15, 7.5\n", r"^the NVIDIA driver is 550\.54\.15, CUDA 13 needs 580 or newer"),
        ("580.95.05, 7.0\n", r"^the NVIDIA GPU has compute capability 7\.0, CUDA 13 needs 7\.5"),
        ("580.95.05, 8.9\n", r"^JAX can't use the NVIDIA GPU \(driver 580\.95\.05, CUDA 13 needs"),
        ("", r"^JAX can't use the NVIDIA GPU \(driver unknown"),
    ],
)
def test_a_gpu_that_jax_cannot_use_is_refused_with_its_driver(monkeypatch, tmp_path, told, said):
    """jax's backend is the CPU, truly; the device file and the driver's tool are stand-ins."""
    gpu = tmp_path / "nvidia0"
    gpu.touch()
    driver_that_says(monkeypatch, tmp_path, told, code=0 if told else 9)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr(devices, "NVIDIA_DEVICES", (str(gpu),))
    monkeypatch.setattr(devices, "CUDA_PACKAGES", {"jaxlib": ("13", 580, 7.5)})  # installed
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    devices.check_gpu()  # the user asked for the CPU
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(settings.UserError, match=f"{said}.*JAX_PLATFORMS=cpu to train on the CPU$"):
        devices.check_gpu()
    gpu.unlink()
    with pytest.raises(settings.UserError, match="there is no NVIDIA GPU; install its driver"):
        devices.check_gpu()


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
        fault = devices.attention_fault(c, machines.parse_machine(machine))
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
