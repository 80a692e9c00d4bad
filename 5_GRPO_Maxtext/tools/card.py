"""Tries this course on an NVIDIA card, in ten minutes at most, and writes card.txt to send to us.

    python 5_GRPO_Maxtext/tool.py card                    # anywhere with jax 0.11 and CUDA
    python 5_GRPO_Maxtext/tool.py card NUM_BATCHES=3      # shorter; goes to each of its runs
    JAX_PLATFORMS=cpu python 5_GRPO_Maxtext/tool.py card  # to see what it does

Nothing is downloaded. It trains the tiny Llama on the CPU and on the card, compares the two, and
kills and resumes a run. Then it executes the programs of the largest model with default constants
that fits the card, with zeros for weights, and compares their memory with what the compiler
predicted (assets/fit_cards.csv). card.txt has no host name, no user name, no path and no token.
"""

import contextlib
import csv
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Only the standard library up to here: the first thing to find out is which packages are missing.
HERE = Path(__file__).resolve().parent.parent  # folder 5
REPORT = Path("card.txt")
SIZES = [  # of each run; of the first one, fit_cards.csv has the memory
    "BATCH_SIZE=64",
    "NUM_BATCHES=6",
    "WARMUP_FRACTION=0.0",
    "NUM_TEST_QUESTIONS=16",
    "EVAL_EVERY=0",
    "SAVE_INTERVAL_STEPS=2",
]
VERSIONS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "maxtext", "google-tunix", "qwix")
PATH = r"\S*(?:/\S*/|~/)\S*"  # it may tell who you are; a model's name has one slash
SAME = 1e-4  # of loss and reward in the first step: float32, in another order of summation


def predicted_gib(card: str, model: str, batch_size: int) -> float:
    """What the compiler gave the largest program of a default run (assets/fit_cards.csv)."""
    with open(HERE / "assets" / "fit_cards.csv", newline="", encoding="utf-8") as file:
        return max(
            float(row["peak"])
            for row in csv.DictReader(file)
            if row["machine"] == card
            and {f"MODEL={model}", f"BATCH_SIZE={batch_size}"} <= set(row["constants"].split())
            and "LORA_RANK=0" not in row["constants"]
        )


# %% Packages --------------------------------------------------------------------------------------
def missing_packages() -> list[tuple[str, float]]:
    """The packages that a run imports and this environment lacks, "name==version", and MiB of each
    wheel.
    """
    with open(HERE / "tools" / "card_packages.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = []
    for row in rows:
        try:
            importlib.metadata.version(row["package"])
        except importlib.metadata.PackageNotFoundError:
            missing.append((f"{row['package']}=={row['version']}", float(row["mib"])))
    return missing


def refuse_without_packages() -> None:
    """Ends with one line if jax is missing or too old, or if other packages are missing."""
    fault = ""
    try:
        version = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if tuple(map(int, version.split(".")[:2])) < (0, 11):
        fault = "jax 0.11 or newer isn't installed; run `make card` where there's a network"
    elif missing := missing_packages():
        names, sizes = zip(*missing)
        fault = f"{len(names)} packages are missing, {sum(sizes):.1f} MiB of wheels; install them: "
        fault += f"pip install --no-deps {' '.join(names)}"
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(2)


# %% Runs ------------------------------------------------------------------------------------------
def start(code: list[str], on_cpu: bool = False) -> subprocess.Popen:
    """Python in a process of its own, since a process that opens a card keeps its memory."""
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if on_cpu else {})
    return subprocess.Popen(
        [sys.executable, *code],
        cwd=HERE,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def output_of(process: subprocess.Popen) -> str:
    """What a process printed; raises RuntimeError with its last line if it failed."""
    try:
        output, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise RuntimeError("it didn't end in ten minutes") from None
    if process.returncode:
        last = (errors.strip() or output.strip() or "no message").splitlines()[-1]
        raise RuntimeError(last[:300])
    return output


def train(folder: Path, *arguments: str, on_cpu: bool = False) -> list[dict[str, float]]:
    """The rows of train_log.csv of a run of the main script with SIZES."""
    script = [str(HERE / "grpo_llama3_1_8b_demo.py"), *SIZES, *arguments, f"RUN_DIR={folder}"]
    output_of(start(script, on_cpu))
    with open(folder / "train_log.csv", newline="", encoding="utf-8") as file:
        return [
            {name: float(x or "nan") for name, x in row.items()} for row in csv.DictReader(file)
        ]


def kill_and_resume(folder: Path, *arguments: str) -> tuple[int, list[dict[str, float]]]:
    """Kills a run at its first checkpoint and runs it again; that checkpoint, and all rows."""
    script = [str(HERE / "grpo_llama3_1_8b_demo.py"), *SIZES, *arguments, f"RUN_DIR={folder}"]
    process, saved = start(script), []
    while process.poll() is None and not saved:
        time.sleep(0.05)
        saved = [int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit()]
    if process.poll() is not None:
        output_of(process)
        raise RuntimeError("the run ended before it could be killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return max(saved), train(folder, *arguments)


# %% On the devices, each in a process of its own --------------------------------------------------
def print_devices() -> None:
    """Prints what JAX and the driver say of this machine, as JSON."""
    import jax

    from model import devices  # imports settings, which sets XLA's flags

    devices.check_gpu()
    device = jax.devices()[0]
    share = (device.memory_stats() or {}).get("bytes_limit", 0) / 2**30
    fraction = next(filter(None, map(os.environ.get, devices.SHARE_NAMES)), "not set")
    driver = devices.query_driver("driver_version", "memory.total") or [["none", "0"]]
    seen = {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "compute capability": getattr(device, "compute_capability", "none"),
        "driver, MiB of memory": ", ".join(driver[0]),
        "JAX's share": f"{share:.2f} GiB ({devices.SHARE_NAMES[0]}: {fraction})",
        "WSL": str("microsoft" in devices.PROC_VERSION.read_text(encoding="utf-8").lower()),
    }
    print(json.dumps(seen))


def run_largest() -> None:
    """Executes the programs of the largest model with LoRA and default constants that fits this
    machine, or of the tiny Llama; prints seconds and memory as JSON.

    The weights are zeros, and the answers reach their full length, as fit_check assumes.
    """
    import settings  # before jax: sets XLA's flags  # isort: skip
    import jax
    import jax.numpy as jnp

    import grpo_llama3_1_8b_demo as demo
    import machines
    from model import devices, llama, versions
    from run import memory
    from tools import fit_check

    versions.prepare_libraries()
    devices.check_gpu()
    here = devices.machine_for(settings.read(demo.Constants, []))
    fitting = [("tiny_llama", 64, "h100")]
    for model, lora in machines.BATCH_SIZE_COLUMNS if here.platform == "gpu" else ():
        size, card = machines.compiled_batch_size(here, model, lora)
        fitting += [(model, size, card)] if lora and size else []
    model, size, card = fitting[-1]
    given = [f"MODEL={model}", *SIZES] if model == "tiny_llama" else [f"MODEL={model}"]
    c = settings.read(demo.Constants, given, machine=here)
    hf = memory.published_config(model) or llama.fetch_model(model)[1]
    trainer, _ = devices.plan_devices(c, hf, jax.devices())
    abstract, mesh = llama.abstract_model(hf, llama.to_run_config(c, hf), trainer)

    def filled(x):
        """Weights of 0, a temperature of 1, tokens and lengths of 1 (0 would end an answer)."""
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), x.sharding)
        value = 0 if x.shape and jnp.issubdtype(x.dtype, jnp.floating) else 1
        return jnp.full(x.shape, value, x.dtype, device=x.sharding)

    seconds, done = {}, {}
    for name, jitted, arguments in fit_check.make_programs(
        c, hf, abstract, mesh, fit_check.IDS.pad_id(), done
    ):
        done[name] = jitted.lower(*arguments).compile()
        arrays = jax.block_until_ready(jax.tree.map(filled, arguments))
        started = time.perf_counter()
        jax.block_until_ready(done[name](*arrays))
        seconds[name] = time.perf_counter() - started
        del arrays
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", math.nan) / 2**30
    found = {
        "largest default": f"{model} BATCH_SIZE={c.BATCH_SIZE} LORA_RANK={c.LORA_RANK}",
        "its seconds": ", ".join(f"{name} {x:.2f}" for name, x in seconds.items()),
        "its memory, at most": f"{peak:.2f} GiB, predicted {predicted_gib(card, model, size):.2f}",
    }
    print(json.dumps(found))


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> int:
    """Runs it all and writes REPORT after each part; the exit code is 0 if nothing failed."""
    refuse_without_packages()
    lines, faults = [], []

    def say(what: str, found: str) -> None:
        lines.append(f"{what:26}{re.sub(PATH, '...', found)}")
        print(lines[-1], flush=True)
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def part(what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            faults.append(what)
            say(what, f"FAILED: {error}")

    def child(function: str) -> dict[str, str]:
        code = f"from tools import card; card.{function}()"
        return json.loads(output_of(start(["-c", code])).splitlines()[-1])

    def compare(what: str, ours: float, theirs: float) -> None:
        same = abs(ours - theirs) <= SAME
        faults.extend([what] * (not same))
        verdict = "the same" if same else "NOT THE SAME"
        say(what, f"{ours:.6f}, on the CPU {theirs:.6f}: {verdict}")

    started = time.perf_counter()
    say("date", f"{datetime.date.today()}, given: {' '.join(arguments) or 'nothing'}")
    say("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    for name in ("jax", "jaxlib", *VERSIONS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            say(name, importlib.metadata.version(name))
    with part("what JAX sees"):
        for what, found in child("print_devices").items():
            say(what, found)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with part("the tiny Llama"):
            cpu = train(folder / "cpu", *arguments, on_cpu=True)
            rows = train(folder / "card", *arguments)
            for name in ("loss", "reward", "grad_norm"):
                compare(f"{name} of step 1", rows[0][name], cpu[0][name])
            say("reward of the last step", f"{rows[-1]['reward']:.4f}")
            times = [row["seconds"] for row in rows[1:]]
            first, later = rows[0]["seconds"], statistics.median(times)
            say("seconds per step", f"{later:.3f}, the first one {first:.1f}")
            peak = rows[-1].get("memory_device_0_peak_gib", math.nan)  # nan: not measured on a CPU
            predicted = predicted_gib("h100", "tiny_llama", 64)
            say("memory, at most", f"{peak:.2f} GiB, predicted {predicted:.2f} for BATCH_SIZE=64")
        for what, constant in (("bfloat16", "DTYPE=bfloat16"), ("LoRA", "LORA_RANK=16")):
            with part(what):
                [row, *_] = train(folder / what, *arguments, constant)
                say(f"{what}, step 1", f"loss {row['loss']:.6f}, reward {row['reward']:.4f}")
        with part("killed and resumed"):
            saved, again = kill_and_resume(folder / "killed", *arguments)
            steps = [int(row["step"]) for row in again]
            say("killed after checkpoint", f"{saved}; rows afterward: {steps}")
            # On a GPU, sums of gradients differ in the last digits from run to run.
            say("its last reward", f"{again[-1]['reward']:.4f}")
            faults += ["the resumed run's rows"] * (steps != list(range(1, len(steps) + 1)))
    with part("the largest default"):
        for what, found in child("run_largest").items():
            say(what, found)
    say("minutes in all", f"{(time.perf_counter() - started) / 60:.1f}")
    say("not as it should be", ", ".join(faults) or "nothing")
    print(f"please send us {REPORT}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
