"""The main script's constants that a first reading does not need: variants; the machine.

They are the main script's like those on its page: the same names, `NAME=value`, `--help`.
"""

from dataclasses import dataclass
from typing import Literal

from settings import Count, CountOrOff, NonNegative, OneOrOff, Share, pair

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # PEFT's names


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Another method than plain GRPO: grpo_variants.py has what they exchange."""

    EPSILON_HIGH: NonNegative = 0.0  # upper clip range (0 = EPSILON); DAPO, arXiv 2503.14476: 0.28
    LOSS_ALGO: Literal["grpo", "gspo-token", "cispo"] = "grpo"  # arXiv 2507.18071 (GSPO), 2506.13585 (CISPO)
    LOSS_AGG_MODE: Literal[
        "seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"  # verl's names; DAPO: token-mean; Dr. GRPO: seq-mean-token-sum-norm
    METHOD: str = ""  # Python file with a piece of the loss of your own, by its name (empty = off)
    ADVANTAGE: Literal["group", "rloo", "maxrl", "gdpo", "none"] = "group"  # none: a TEACHER alone teaches
    NORM_ADV_BY_STD: bool = True  # divide by the group's std; False: Dr. GRPO, arXiv 2503.20783
    KL_LOSS_MODE: Literal["low_var_kl", "kl", "mse_kl"] = "low_var_kl"  # k3 (arXiv 2402.03300, eq. 4), k1, k2
    TEACHER: str = ""  # model in the reference's place, name or folder: on-policy distillation (empty = off)
    SAMPLER_WEIGHT: Literal[
        "token",
        "token-mask",
        "sequence",
        "sequence-mask",
    ] = "token"  # whose ratio SAMPLER_CORRECTION caps; mask: beyond it the weight is 0
    CURRICULUM: bool = False  # True: of twice as many questions ask those that were half right the last time
    ENTROPY_COEF: NonNegative = 0.0  # weight of the entropy in the objective (0 = off), arXiv 1602.01783
    MASK_OVERLONG: bool = False  # True: answers cut off at the limit are not trained on (DAPO)
    OVERLONG_BUFFER: CountOrOff = 0  # last tokens before the limit that cost points (0 = off), DAPO's penalty
    OVERLONG_PENALTY: NonNegative = 1.0  # points that an answer at the limit loses by OVERLONG_BUFFER
    ZERO_VARIANCE_GROUPS: Literal["keep", "skip", "refill"] = "keep"  # refill: ask other questions (DAPO)
    TARGET_KL: NonNegative = 0.0  # nats per token; BETA is steered to keep the KL here (0 = off)
    TEMPERATURE_END: NonNegative = 0.0  # TEMPERATURE goes there in a straight line over all steps (0 = stays)
    OFF_POLICY_STEPS: OneOrOff = 0  # 1: answers are one step old; vLLM draws them while a step trains
    ADVANTAGE_CLIP: NonNegative = 0.0  # largest absolute advantage (0 = off)
    LOGITS_CLIP: NonNegative = 0.0  # largest absolute logit; a clipped logit has no gradient (0 = off)
    ENVIRONMENT: str = ""  # Python file with a class Environment, a world to act in by turns (empty = off)
    MAX_TURNS: Count = 12  # actions per episode of ENVIRONMENT; longer ones are cut off
    GAMMA: Share = 1.0  # discount of the world's rewards per turn; below 1 a short way is worth more
    RETURN_TO_GO: bool = False  # True: a turn is judged by what came after it, not by the whole episode


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """What a model's arrays and programs are like; inference.py and pass_at_k take over a run's."""

    DTYPE: Literal["float32", "bfloat16"] = pair(laptop="float32", tpu="bfloat16")  # of activations
    WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"  # an update of 3e-6 vanishes in bfloat16
    SCAN_LAYERS: bool = pair(laptop=False, tpu=True)  # True compiles one layer instead of 32


@dataclass(frozen=True, kw_only=True)
class Machine(Arrays):
    """Where a run runs, and what its arrays and programs are like there."""

    ROLLOUT_ENGINE: Literal["maxtext", "vllm"] = pair(laptop="maxtext", tpu="vllm")  # who generates
    REMAT_POLICY: Literal[
        "none", "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj"
    ] = pair(laptop="minimal", tpu="full")  # what the backward pass computes again, to save memory
    ATTENTION: Literal["dot_product", "flash", "autoselected", "cudnn_flash_te", "cudnn_flash_jax"] = pair(
        laptop="dot_product", tpu="flash"
    )  # MaxText's attention kernel; cudnn_* are for GPUs
    REFERENCE_OFFLOAD: bool = False  # True: keep the reference in host memory; costs a transfer per step
    TRAINER_DEVICES_FRACTION: Share = 1.0  # vllm: share of the chips that trains (1.0 and 1.0 = all do both)
    SAMPLER_DEVICES_FRACTION: Share = 1.0  # share that generates
    TRAINER_TENSOR_PARALLEL: Count = 1  # chips that share a matrix product; the rest split weights (FSDP)
    SAMPLER_DATA_PARALLEL: Count = 1  # copies of the model in vLLM; the chips of a copy share its products
    DISTRIBUTED: bool = False  # True: this command runs on several hosts as one (jax.distributed)
    HBM_UTILIZATION_VLLM: Share = 0.5  # share of a sampler chip's memory, what is already there included
    LORA_TARGETS: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # weights that get A and B
    CHECKPOINT_DIR: str = ""  # folder or gs://bucket/folder (needs gcsfs) for checkpoints (empty = RUN_DIR)
    PROFILE_DIR: str = ""  # folder for a profiler trace of one step, for TensorBoard (empty = off)


def lora_targets(text: str) -> list[str]:
    """The names in LORA_TARGETS, "q_proj,v_proj" as ["q_proj", "v_proj"]."""
    return [name.strip() for name in text.split(",")]
