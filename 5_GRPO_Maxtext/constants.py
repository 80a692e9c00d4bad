"""The main script's constants you can skip on a first reading: other methods, the run, the machine.

They work like those on its page: the same names, `NAME=value`, `--help`.
"""

from dataclasses import dataclass
from typing import Literal

from settings import (
    BelowOne,
    Count,
    CountOrOff,
    NonNegative,
    Positive,
    Seed,
    Share,
    TwoOrMore,
    pair,
)


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Alternatives to plain GRPO; grpo_variants.py has a complete function for each."""

    # --- the five tables: which function replaces the page's own
    # which questions, by which weights
    ROLLOUTS: Literal["fresh", "one-step-ahead", "curriculum"] = "fresh"
    # centered: Dr. GRPO; none: only a TEACHER teaches; turn: a turn by what came after it
    ADVANTAGE: Literal[
        "group", "centered", "rloo", "maxrl", "gdpo", "none", "turn", "turn-centered"
    ] = "group"
    # verl's names; DAPO: token-mean; Dr. GRPO: seq-mean-token-sum-norm
    LOSS_AGG_MODE: Literal[
        "seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"
    LOSS_ALGO: Literal["grpo", "dapo", "gspo-token", "cispo"] = "grpo"  # papers: grpo_variants.py
    # k3 (arXiv 2402.03300, eq. 4), k1, k2
    KL_LOSS_MODE: Literal["low_var_kl", "kl", "mse_kl"] = "low_var_kl"
    # Python file with your own function for a table: rollouts, advantage, weights, ...
    METHOD: str = ""
    # --- what combines with every method
    # upper clip range; dapo needs it (0.28); gspo-token, cispo: 0 = EPSILON
    EPSILON_HIGH: NonNegative = 0.0
    # model in the reference's place, name or folder: on-policy distillation (empty = off)
    TEACHER: str = ""
    # cap of pi_old / pi_sampler (0 = off)
    SAMPLER_CORRECTION: NonNegative = pair(small=0.0, large=2.0)
    # whose ratio SAMPLER_CORRECTION caps; mask: beyond it the weight is 0
    SAMPLER_WEIGHT: Literal["token", "token-mask", "sequence", "sequence-mask"] = "token"
    # weight of the entropy in the objective (0 = off), arXiv 1602.01783
    ENTROPY_COEF: NonNegative = 0.0
    MASK_OVERLONG: bool = False  # True: answers cut off at the limit are not trained on (DAPO)
    # last tokens before the limit that cost reward (0 = off), DAPO's penalty
    OVERLONG_BUFFER: CountOrOff = 0
    # reward that an answer at the limit loses by OVERLONG_BUFFER
    OVERLONG_PENALTY: NonNegative = 1.0
    # refill: ask other questions (DAPO)
    ZERO_VARIANCE_GROUPS: Literal["keep", "skip", "refill"] = "keep"
    TARGET_KL: NonNegative = 0.0  # nats per token; BETA is steered to keep the KL here (0 = off)
    # final temperature, reached linearly over the run (0 = TEMPERATURE)
    TEMPERATURE_END: NonNegative = 0.0
    ADVANTAGE_CLIP: NonNegative = 0.0  # largest absolute advantage (0 = off)
    # largest absolute logit; a clipped logit has no gradient (0 = off)
    LOGITS_CLIP: NonNegative = 0.0
    # Python file with a class Environment, for episodes of turns (empty = off)
    ENVIRONMENT: str = ""
    MAX_TURNS: Count = 12  # actions per episode of ENVIRONMENT; longer ones are cut off
    # discount of the environment's rewards per turn; below 1, shorter episodes earn more
    GAMMA: Share = 1.0


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Data, sampling, logging and checkpoints, for any method."""

    # files as in DATASET, without weights (empty = the test split of DATASET)
    TEST_DATASET: str = ""
    # rows that cannot be used stop the run, or are left out
    BAD_ROWS: Literal["refuse", "skip"] = "refuse"
    # True: check everything that can be checked, say what would happen, and stop
    DRY_RUN: bool = False
    # (1 = off); below 1 the model trains on another distribution than it samples from
    TOP_P: Share = 1.0
    TOP_K: int = -1  # (-1 = off); like TOP_P, it cuts what's sampled, but not what's trained
    # updates in a row that may be NaN, skipped; one more stops
    MAX_NONFINITE_UPDATES: CountOrOff = 0
    LOG_ANSWERS_EVERY: CountOrOff = 10  # steps between those whose every answer is kept (0 = none)
    SAVE_INTERVAL_STEPS: Count = pair(small=50, large=20)  # steps between checkpoints
    MAX_TO_KEEP: Count = 4  # checkpoints kept; each has the params and two Adam moments


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """A model's dtypes and compilation; inference.py and pass_at_k reuse the run's."""

    # of activations
    DTYPE: Literal["float32", "bfloat16"] = pair(small="float32", large="bfloat16")
    # an update of 3e-6 vanishes in bfloat16
    WEIGHT_DTYPE: Literal["float32", "bfloat16"] = "float32"
    SCAN_LAYERS: bool = pair(small=False, large=True)  # True compiles one layer instead of 32


@dataclass(frozen=True, kw_only=True)
class Machine(Arrays):
    """Devices, sharding, memory. The large column is for a TPU with vLLM; machines.py adapts it
    to a GPU.
    """

    # t4, h100, 8xh100, v6e-8, ...: what DRY_RUN=True plans for (empty = this one)
    MACHINE: str = ""
    # who generates
    ROLLOUT_ENGINE: Literal["maxtext", "vllm"] = pair(small="maxtext", large="vllm")
    # what the backward pass computes again, to save memory
    REMAT_POLICY: Literal[
        "none", "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj"
    ] = pair(small="minimal", large="full")
    # MaxText's attention kernel; autoselected: flash for long sequences, dot_product where it
    # decodes
    ATTENTION: Literal["dot_product", "flash", "autoselected"] = pair(
        small="dot_product", large="flash"
    )
    # True: keep the reference in host memory; costs a transfer per step
    REFERENCE_OFFLOAD: bool = False
    # vllm: share of the chips that trains (1.0 and 1.0 = all do both)
    TRAINER_DEVICES_FRACTION: Share = 1.0
    SAMPLER_DEVICES_FRACTION: Share = 1.0  # share that generates
    # chips that share a matrix product; the rest split weights (FSDP)
    TRAINER_TENSOR_PARALLEL: Count = 1
    # copies of the model in vLLM; the chips of a copy share its products
    SAMPLER_DATA_PARALLEL: Count = 1
    DISTRIBUTED: bool = False  # True: this command runs on several hosts as one (jax.distributed)
    HBM_UTILIZATION_VLLM: Share = 0.5  # share of a sampler chip's memory, counting what's in use
    # weights that get A and B
    LORA_TARGETS: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    # folder or gs://bucket/folder (needs gcsfs) for checkpoints (empty = RUN_DIR)
    CHECKPOINT_DIR: str = ""
    PROFILE_DIR: str = ""  # folder for a profiler trace of one step, for TensorBoard (empty = off)


class RunConstants(Variants, Extras, Machine):
    """The type of `c` in model/, task/ and run/, which don't import the main script.

    The blocks above, and the names of the script's own block, whose values and comments are there.
    """

    MODEL: str
    DATASET: str
    REWARDS: str
    REWARD_FUNC: str
    RUN_DIR: str
    SEED: Seed
    SYSTEM_PROMPT: str
    TEMPLATE: str
    MAX_PROMPT_LENGTH: Count
    TOTAL_GENERATION_STEPS: TwoOrMore
    TEMPERATURE: Positive
    BATCH_SIZE: Count
    NUM_GENERATIONS: TwoOrMore
    NUM_BATCHES: Count
    NUM_ITERATIONS: Count
    EPSILON: NonNegative
    BETA: NonNegative
    LEARNING_RATE: NonNegative
    WARMUP_FRACTION: BelowOne
    MAX_GRAD_NORM: NonNegative
    B1: BelowOne
    B2: BelowOne
    WEIGHT_DECAY: NonNegative
    LORA_RANK: CountOrOff
    LORA_ALPHA: Positive
    TRAIN_MICRO_BATCH_SIZE: CountOrOff
    NUM_TEST_QUESTIONS: Count
    EVAL_CONFIG: Literal["greedy", "standard", "liberal"]
    EVAL_EVERY: CountOrOff
    EVAL_QUESTIONS: Count
