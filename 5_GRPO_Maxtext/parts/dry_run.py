"""DRY_RUN=True: will the run start, and will it fit? All that can be checked without training.

That is: versions and the libraries' arguments, model, access and tokenizer, data, prompt lengths, paths,
disk, the chips against the mesh, memory and vLLM's share of it. Nothing is written. The main script imports
this file only when it is asked for a dry run; the 8 B job can be planned on any machine:

    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DRY_RUN=True
    python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py DRY_RUN=True MODEL=meta-llama/Llama-3.1-8B-Instruct

8 s of one core of an AMD EPYC, imports included; one to three minutes more for each TPU slice that is
compiled for (only where libtpu is installed, and assets/fit_check.csv lacks these constants).
"""

import csv
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import grpo_llama3_1_8b_demo as demo
import huggingface_hub
import jax
import jax.numpy as jnp
import lora
import transformers
from etils import epath
from flax import nnx
from grpo_llama3_1_8b_demo import UserError
from maxtext.utils import maxtext_utils, model_creation_utils
from tunix.rl.rollout.base_rollout import RolloutConfig

# %% Constants ------------------------------------------------------------------------------------------
LLAMA_3_1_8B = "meta-llama/Llama-3.1-8B-Instruct"
VERSIONS = {"google-tunix": "0.1.7", "maxtext": "0.2.5"}  # whose arguments and layouts are relied on
SLICES = {"v5p-8": 4, "v6e-8": 8, "v5p-64": 32}  # chips; the name of a v5p slice counts two cores a chip
HBM_GIB = {"v5p": 95.73, "v6e": 31.24, "v5e": 15.75}  # a chip's limit, as the TPU compiler enforces it
DEVICE_KINDS = {"TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v5 lite": "v5e"}
MEMORY_CONSTANTS = (  # those that move the figures of assets/fit_check.csv
    "MAX_PROMPT_LENGTH", "TOTAL_GENERATION_STEPS", "BATCH_SIZE", "NUM_GENERATIONS", "NUM_ITERATIONS", "BETA",
    "REFERENCE_OFFLOAD",
    "TRAIN_MICRO_BATCH_SIZE", "DTYPE", "WEIGHT_DTYPE", "SCAN_LAYERS", "REMAT_POLICY", "ATTENTION",
    "ROLLOUT_ENGINE", "TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION", "TRAINER_FSDP",
    "TRAINER_TENSOR_PARALLEL", "SAMPLER_DATA_PARALLEL", "SAMPLER_TENSOR_PARALLEL", "LORA_RANK",
)  # fmt: skip


# %% The checks, in the order of the run ----------------------------------------------------------------
def dry_run() -> None:
    """Checks all that can be checked without training, prints what would happen, and changes nothing.

    The 8 B model is planned on any machine: what only the TPU VM can tell (its chips, its disk, its
    packages) is then checked against the slices of SLICES, or said to be unchecked.

    Raises:
        UserError: the first thing that would stop the run.
    """
    check_versions()
    if on_target():
        demo.check_rollout_engine()
        demo.join_hosts()
    folder, hf, source = plan_model(demo.MODEL)
    print(f"versions {', '.join(f'{name} {version}' for name, version in VERSIONS.items())}: as needed")
    print(f"model    {source}")
    parameters = count_parameters(hf)
    print(
        f"         {parameters:,} parameters, {hf.num_hidden_layers} layers, "
        f"{demo.DTYPE} over {demo.WEIGHT_DTYPE}"
    )

    tokenizer = demo.load_tokenizer(folder) if folder else None
    data = []
    for name, dataset, split in (
        ("DATASET", demo.DATASET, "train"),
        ("TEST_DATASET", demo.TEST_DATASET or demo.DATASET, "test"),
    ):
        questions, source = demo.read_questions(dataset, split)
        data.append(questions)
        lengths = plan_prompts(tokenizer, questions, source)
        print(f"data     {name}: {len(questions):,} questions of {source}, {lengths}")

    print(f"rewards  {', '.join(demo.choose_rewards(*data))}")

    sequences = demo.BATCH_SIZE * demo.NUM_GENERATIONS
    tokens = demo.MAX_PROMPT_LENGTH + demo.TOTAL_GENERATION_STEPS
    passes = demo.BATCH_SIZE // (demo.TRAIN_MICRO_BATCH_SIZE or demo.BATCH_SIZE)
    print(
        f"step     {demo.BATCH_SIZE} prompts x {demo.NUM_GENERATIONS} answers = {sequences} sequences, up to "
        f"{sequences * tokens:,} tokens, in {passes} gradient pass(es)\n"
        f"run      {demo.num_steps():,} steps, {demo.num_steps() * demo.NUM_ITERATIONS:,} updates, "
        f"{demo.num_steps() * sequences:,} answers"
    )
    check_paths(trained_parameters(hf, parameters))
    plan_memory(hf, parameters)
    print("dry run  nothing was found that would stop the run; nothing was written")


def check_versions() -> None:
    """Raises UserError unless the packages are those this script was written for, and take its arguments."""
    for package, wanted in VERSIONS.items():
        found = importlib.metadata.version(package)
        if found != wanted:
            raise UserError(
                f"{package} {found} is installed: this script needs {wanted}; install {package}=={wanted}"
            )
    try:
        demo.make_training_config()
        RolloutConfig(**demo.generation_config("train"))
    except TypeError as error:
        raise UserError(
            f"google-tunix {VERSIONS['google-tunix']} does not take what it is given ({error}); reinstall it"
        ) from None


def llama_3_1_8b_config() -> transformers.LlamaConfig:
    """The sizes in Llama 3.1 8B's published config.json, for machines that cannot reach the hub."""
    return transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
        max_position_embeddings=131_072, tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=8192,
        ),
    )  # fmt: skip


def reachable(url: str) -> bool:
    """Whether a server answers within five seconds; the libraries themselves go on trying for minutes."""
    try:
        huggingface_hub.get_session().head(url, timeout=5)
    except Exception:  # of httpx, of the sockets, or because HF_HUB_OFFLINE is set
        return False
    return True


def plan_model(model: str) -> tuple[Path | None, transformers.LlamaConfig, str]:
    """MODEL's config and tokenizer, without its weights.

    Returns:
        The folder that holds its tokenizer (None: out of reach), the config, and where that came from.

    Raises:
        UserError: no such model, no access to it, not a Llama.
    """
    if demo.find_path(model).is_dir():
        folder, hf = demo.load_hf_config(model)
        return folder, hf, f"{folder}"
    if reachable(huggingface_hub.constants.ENDPOINT):
        return (*demo.load_hf_config(model, weights=False), f"{model}, from the Hugging Face hub")
    try:
        cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except huggingface_hub.errors.HFValidationError:  # rather a path than a name
        cached = None
    if isinstance(cached, str):
        return (*demo.load_hf_config(str(Path(cached).parent)), f"{model}, downloaded earlier")
    if model != LLAMA_3_1_8B:
        raise UserError(
            f"MODEL={model}: no such folder, and the Hugging Face hub is out of reach; give a folder"
        )
    source = f"{model}: the hub is out of reach; published sizes from here, access and tokenizer unchecked"
    return None, llama_3_1_8b_config(), source


def count_parameters(hf: transformers.LlamaConfig) -> int:
    """Parameters of the MaxText model that MODEL would become here; nothing is allocated.

    Raises:
        UserError: MaxText refuses a constant.
    """
    config = demo.to_maxtext_config(
        hf, demo.BATCH_SIZE * demo.NUM_GENERATIONS, demo.MAX_PROMPT_LENGTH, demo.TOTAL_GENERATION_STEPS,
        ici_fsdp_parallelism=1, ici_tensor_parallelism=1,
    )  # fmt: skip
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    _, model = model_creation_utils.create_nnx_abstract_model(config, mesh, rng_key=jax.random.PRNGKey(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def trained_parameters(hf: transformers.LlamaConfig, parameters: int) -> int:
    """Of the model's parameters, those that are trained and saved: all, or LoRA's."""
    return lora.count_parameters(hf, demo.LORA_RANK, demo.LORA_TARGETS) if demo.LORA_RANK else parameters


def weight_copies() -> int:
    """Of the model's weights: the reference has its own, unless LoRA leaves the actor's as they are, or it
    waits in the host's memory."""
    return 2 if demo.BETA and not demo.LORA_RANK and not demo.REFERENCE_OFFLOAD else 1


def plan_prompts(tokenizer, questions: list[dict[str, str]], source: str) -> str:
    """How many questions are short enough; raises UserError if none is."""
    if tokenizer is None:
        return "lengths unchecked (no tokenizer)"
    lengths = [
        len(tokenizer.encode(demo.to_prompt(tokenizer, q["question"]), add_special_tokens=False))
        for q in questions
    ]
    kept = sum(n <= demo.MAX_PROMPT_LENGTH for n in lengths)
    if not kept:
        raise demo.too_short_error(source, min(lengths))
    return f"{kept:,} of at most {demo.MAX_PROMPT_LENGTH} tokens"


def check_paths(parameters: int) -> None:
    """Whether RUN_DIR and CHECKPOINT_DIR can be written, and hold what the run will put there.

    Raises:
        UserError: not writable, a bucket out of reach, another run's constants, too little space.
    """
    folder = Path(demo.RUN_DIR).resolve()
    if (folder / "constants.json").exists():
        demo.check_same_constants(json.loads((folder / "constants.json").read_text()))
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"RUN_DIR={demo.RUN_DIR}: {folder} is not a folder one may write to; choose another")
    if demo.CHECKPOINT_DIR.startswith("gs://"):
        if importlib.util.find_spec("gcsfs") is None:
            raise UserError(f"CHECKPOINT_DIR={demo.CHECKPOINT_DIR}: needs the package gcsfs; install it")
        bucket = demo.CHECKPOINT_DIR.removeprefix("gs://").split("/")[0]
        if not reachable("https://storage.googleapis.com"):
            raise UserError(
                f"CHECKPOINT_DIR={demo.CHECKPOINT_DIR}: Google Cloud Storage is out of reach; "
                "give a local folder"
            )
        if not epath.Path(f"gs://{bucket}").exists():
            raise UserError(f"CHECKPOINT_DIR={demo.CHECKPOINT_DIR}: no bucket {bucket}; create it, or log in")
    size = demo.checkpoint_bytes(parameters)
    count = -(-demo.num_steps() // demo.SAVE_INTERVAL_STEPS)
    print(
        f"saves    {count:,} checkpoints of {size / 2**30:.3g} GiB, the last {demo.MAX_TO_KEEP} kept: "
        f"{size * demo.MAX_TO_KEEP / 2**30:.3g} GiB in {demo.CHECKPOINT_DIR or demo.RUN_DIR or 'runs/'}"
    )
    if on_target():
        demo.check_disk(parameters, folder)


# %% Memory: who trains, who generates, does it fit -----------------------------------------------------
def on_target() -> bool:
    """Whether this machine could be the one that trains: the laptop for a small model, else a TPU VM."""
    return demo.is_small(demo.MODEL) or jax.default_backend() == "tpu"


def plan_memory(hf: transformers.LlamaConfig, parameters: int) -> None:
    """Prints who trains and who generates, and whether it fits; raises UserError if it does so nowhere."""
    if demo.is_small(demo.MODEL):
        trainer, _ = demo.plan_devices(hf, jax.devices())
        kind = jax.devices()[0].device_kind
        print(f"devices  {len(trainer)} x {kind}, generation by {demo.ROLLOUT_ENGINE}")
        return
    slices = SLICES
    if jax.default_backend() == "tpu":
        chips = jax.device_count()
        family = DEVICE_KINDS.get(jax.devices()[0].device_kind, "v6e")
        slices = {f"{family}-{chips * 2 if family == 'v5p' else chips}": chips}
    else:
        print("devices  no TPU here: planned for " + ", ".join(slices))
    faults = []
    for name, chips in slices.items():
        try:
            print(f"{name:8} {slice_verdict(hf, parameters, name, chips)}")
        except UserError as error:
            faults.append(error)
            print(f"{name:8} no: {error}")
    if len(faults) == len(slices):
        raise faults[0]


def slice_verdict(hf: transformers.LlamaConfig, parameters: int, name: str, chips: int) -> str:
    """How the run would fit a TPU slice; raises UserError if it does not.

    The compiler's word where there is one: the committed table if it has these constants, else libtpu if it
    is installed. Otherwise the least that weights, moments and gradients take.
    """
    devices, rollout_mesh = demo.plan_devices(hf, list(range(chips)))
    limit = HBM_GIB[name.split("-")[0]]
    peak, said = compiled_peak(name)
    if peak is None:
        # Tunix does not donate the weights to the step: the old ones stay until the new ones are there.
        weights = weight_copies() * parameters * jnp.dtype(demo.WEIGHT_DTYPE).itemsize
        trained = demo.checkpoint_bytes(trained_parameters(hf, parameters))
        peak = (trained + weights) / len(devices) / 2**30
        said = "not compiled: at least"
    if peak > limit:
        raise UserError(
            f"{memory_remedy()}: {name} has {limit} GiB a chip, training takes {peak:.1f} ({said})"
        )
    verdict = f"{len(devices)} of {chips} chips train: {said} {peak:.1f} of {limit} GiB a chip"
    if rollout_mesh is None:
        return verdict
    shared = rollout_mesh.devices.flat[0] in devices
    return f"{verdict}; {vllm_verdict(hf, parameters, rollout_mesh, len(devices) * shared, limit, peak)}"


def vllm_verdict(hf, parameters: int, rollout_mesh, trainer_chips: int, limit: float, peak: float) -> str:
    """Whether vLLM's share of a chip holds its weights and the KV cache of a step's answers.

    vLLM starts when actor and reference are in memory and the optimizer is not yet: it counts those two
    against its share, and fills what is left of it with KV cache, whatever training needs later.

    Args:
        hf: the checkpoint's config.
        parameters: of the model.
        rollout_mesh: ("data", "model"), from `plan_devices`.
        trainer_chips: how many chips train; 0 if vLLM has chips of its own.
        limit: GiB of a chip.
        peak: GiB of a chip that training takes.

    Raises:
        UserError: too small a share for vLLM, or too large a one for training.
    """
    lying = 0.0
    if trainer_chips:
        lying = weight_copies() * parameters * jnp.dtype(demo.WEIGHT_DTYPE).itemsize / trainer_chips / 2**30
    tensor, itemsize = rollout_mesh.shape["model"], jnp.dtype(demo.DTYPE).itemsize
    weights = parameters * itemsize / tensor / 2**30
    heads = max(1, hf.num_key_value_heads / tensor)  # of a chip; vLLM repeats them where chips are more
    tokens = demo.BATCH_SIZE * demo.NUM_GENERATIONS * (demo.MAX_PROMPT_LENGTH + demo.TOTAL_GENERATION_STEPS)
    tokens /= rollout_mesh.shape["data"]
    cache = 2 * hf.num_hidden_layers * heads * hf.head_dim * itemsize * tokens / 2**30
    least = (lying + weights + cache) / limit
    most = (lying + limit - peak) / limit if trainer_chips else 1.0
    if least > most:
        raise UserError(
            f"{memory_remedy()}: vLLM's weights and a step's KV cache take {weights + cache:.1f} of "
            f"{limit} GiB a chip" + (f", training {peak:.1f} of the same" if trainer_chips else "")
        )
    share = f"HBM_UTILIZATION_VLLM={demo.HBM_UTILIZATION_VLLM}"
    if not least <= demo.HBM_UTILIZATION_VLLM <= most:
        raise UserError(
            f"{share}: of {limit} GiB a chip vLLM needs {weights:.1f} for weights and {cache:.1f} for a "
            f"step's KV cache, {lying:.1f} are taken when it starts, training takes {peak:.1f}; "
            f"use {math.ceil(100 * least) / 100} to {math.floor(100 * most) / 100}"
        )
    return f"vLLM needs {weights:.1f} + KV cache {cache:.1f}, {share} is enough"


def compiled_peak(name: str) -> tuple[float | None, str]:
    """What the TPU compiler says of these constants: GiB a chip (None: nothing), and where it said so."""
    with open(demo.HERE / "assets" / "fit_check.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["topology"] == name and row["algorithm"] == "GRPO"]
    ours = {constant: str(getattr(demo, constant)) for constant in MEMORY_CONSTANTS}
    peaks = []
    for row in rows:
        theirs = {
            constant: str(getattr(demo.DEFAULTS[constant], "tpu", demo.DEFAULTS[constant]))
            for constant in MEMORY_CONSTANTS
        } | dict(argument.split("=") for argument in row["constants"].split())
        if ours == theirs:
            peaks.append(float(row["peak"]))
    if peaks:
        return max(peaks), "compiled (assets/fit_check.csv)"
    if importlib.util.find_spec("libtpu") is None or demo.LORA_RANK:  # the fit check compiles full training
        return None, ""
    print(f"         compiling for {name}, one to three minutes ...", flush=True)
    changed = [f"{constant}={getattr(demo, constant)}" for constant in MEMORY_CONSTANTS]
    done = subprocess.run(
        [sys.executable, demo.HERE / "tpu_fit_check.py", f"TOPOLOGIES={name}", *changed],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    peaks = [float(gib) for gib in re.findall(r"^  peak ([\d.]+) of", done.stdout, re.M)]
    if done.returncode or not peaks:
        raise UserError(f"TOPOLOGIES={name}: the fit check failed ({(done.stderr or '?').splitlines()[-1]})")
    return max(peaks), "compiled now"


def memory_remedy() -> str:
    """The constant to turn when memory is short: of those that still can give, the least harmful."""
    accumulates = demo.TRAIN_MICRO_BATCH_SIZE and demo.TRAIN_MICRO_BATCH_SIZE != demo.BATCH_SIZE
    # Compiled for 8 B and 16 sequences: the activations saved are less than the gradient kept. Not for many.
    if accumulates and demo.BATCH_SIZE * demo.NUM_GENERATIONS <= 16:
        return (
            f"TRAIN_MICRO_BATCH_SIZE={demo.TRAIN_MICRO_BATCH_SIZE}, "
            "set 0 (accumulating costs another gradient)"
        )
    if demo.TRAINER_DEVICES_FRACTION < 1 and demo.ROLLOUT_ENGINE == "vllm":
        return (
            f"TRAINER_DEVICES_FRACTION={demo.TRAINER_DEVICES_FRACTION}, set it and "
            "SAMPLER_DEVICES_FRACTION to 1.0, or take a larger slice"
        )
    if demo.BATCH_SIZE > 1:
        return f"BATCH_SIZE={demo.BATCH_SIZE}, lower it, or take a larger slice"
    if demo.WEIGHT_DTYPE == "float32":
        return "WEIGHT_DTYPE=float32, take a larger slice, or bfloat16 (which loses small updates)"
    return f"NUM_GENERATIONS={demo.NUM_GENERATIONS}, lower it, or take a larger slice"
