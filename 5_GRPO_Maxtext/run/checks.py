"""Refuses constants that would fail later, or silently train nothing.

settings.py checks names, types and ranges when it reads the constants. Nothing here imports jax, so we refuse
a wrong setting before the slow imports. Checks that need the model or the devices come later.
"""

import importlib.util
import itertools

from constants import Machine, lora_targets
from run.machine import CARDS, named
from settings import UserError
from task import questions, run_grader

VLLM_TEMPERATURE = 2  # vLLM 0.32 refuses a request above it


def refuse(c) -> None:
    """Checks every constant we can without the model; raises UserError."""
    combinations(c)
    paths(c)
    template(c)


def combinations(c) -> None:
    """Constants that contradict each other."""
    vllm, ahead = c.ROLLOUT_ENGINE == "vllm", c.ROLLOUTS == "one-step-ahead"
    listed = run_grader.reward_names(c.REWARDS)
    think, reasoning = ([name for name in sorted(form) if name in listed] for form in
                        (run_grader.WANT_THINK_TAGS, run_grader.WANT_REASONING_TAGS))  # fmt: skip
    targets, known = lora_targets(c.LORA_TARGETS), lora_targets(Machine.LORA_TARGETS)
    faults = {
        f"LORA_TARGETS={c.LORA_TARGETS}: name each weight once, of {','.join(known)}":
            not set(targets) <= set(known) or len(set(targets)) < len(targets),
        f"TOP_K={c.TOP_K}: use 1 or more, or -1 to switch it off": c.TOP_K != -1 and c.TOP_K < 1,
        f"TRAIN_MICRO_BATCH_SIZE={c.TRAIN_MICRO_BATCH_SIZE}: must divide BATCH_SIZE={c.BATCH_SIZE}":
            c.TRAIN_MICRO_BATCH_SIZE and c.BATCH_SIZE % c.TRAIN_MICRO_BATCH_SIZE,
        f"REFERENCE_OFFLOAD=True: with LORA_RANK={c.LORA_RANK} the reference is the base itself, with no "
        "second copy to move; set it to False": c.LORA_RANK and c.REFERENCE_OFFLOAD,
        f"OVERLONG_BUFFER={c.OVERLONG_BUFFER}: more than TOTAL_GENERATION_STEPS={c.TOTAL_GENERATION_STEPS}; "
        "it counts the last tokens before that limit": c.OVERLONG_BUFFER > c.TOTAL_GENERATION_STEPS,
        "ROLLOUTS=one-step-ahead: works neither with ZERO_VARIANCE_GROUPS=refill nor with TEMPERATURE_END "
        f"(ZERO_VARIANCE_GROUPS={c.ZERO_VARIANCE_GROUPS}, TEMPERATURE_END={c.TEMPERATURE_END}); drop one":
            ahead and (c.ZERO_VARIANCE_GROUPS == "refill" or c.TEMPERATURE_END),
        f"EPSILON_HIGH={c.EPSILON_HIGH}: below EPSILON={c.EPSILON}; raise it, or 0 for the same":
            0 < c.EPSILON_HIGH < c.EPSILON,
        f"EPSILON_HIGH={c.EPSILON_HIGH}: LOSS_ALGO=grpo clips by EPSILON on both sides; set LOSS_ALGO=dapo":
            c.EPSILON_HIGH and c.LOSS_ALGO == "grpo",
        "LOSS_ALGO=dapo: EPSILON_HIGH=0 makes it plain GRPO; set EPSILON_HIGH=0.28":
            c.LOSS_ALGO == "dapo" and not c.EPSILON_HIGH,
        f"TARGET_KL={c.TARGET_KL}: BETA=0 has no reference model; set BETA above 0":
            c.TARGET_KL and not c.BETA,
        f"TEACHER={c.TEACHER}: BETA=0 has no pull to it; set BETA=1": c.TEACHER and not c.BETA,
        f"TEACHER={c.TEACHER}: the gradient of KL_LOSS_MODE=kl is 0 on average; set it to mse_kl":
            c.TEACHER and c.KL_LOSS_MODE == "kl",
        "ADVANTAGE=none: then only a teacher teaches; set TEACHER": c.ADVANTAGE == "none" and not c.TEACHER,
        f"ZERO_VARIANCE_GROUPS={c.ZERO_VARIANCE_GROUPS}: with ADVANTAGE=none no group has an advantage; set "
        "it to keep": c.ADVANTAGE == "none" and c.ZERO_VARIANCE_GROUPS != "keep",
        f"SAMPLER_WEIGHT={c.SAMPLER_WEIGHT}: SAMPLER_CORRECTION=0 weighs nothing; set it to 2":
            c.SAMPLER_WEIGHT != "token" and not c.SAMPLER_CORRECTION,
        "REFERENCE_OFFLOAD=True: BETA=0 has no reference model; set BETA above 0":
            c.REFERENCE_OFFLOAD and not c.BETA,
        f"SCAN_LAYERS={c.SCAN_LAYERS}: with ROLLOUT_ENGINE=vllm it must be True; MaxText names only the "
        "stacked layers to vLLM, others would keep vLLM's random weights without a word":
            vllm and not c.SCAN_LAYERS,
        f"LOGITS_CLIP={c.LOGITS_CLIP}: vLLM draws from the logits as they are, another policy than the one "
        "that would be trained; use 0, or set ROLLOUT_ENGINE=maxtext": vllm and c.LOGITS_CLIP,
        f"TEMPERATURE={c.TEMPERATURE}, TEMPERATURE_END={c.TEMPERATURE_END}: vLLM takes at most "
        f"{VLLM_TEMPERATURE}; lower it, or set ROLLOUT_ENGINE=maxtext":
            vllm and max(c.TEMPERATURE, c.TEMPERATURE_END) > VLLM_TEMPERATURE,
        f"MACHINE={c.MACHINE}: no such machine; {', '.join(CARDS)}, several of them (8xh100), or a TPU slice "
        "(v6e-8)": c.MACHINE and not named(c.MACHINE),
        f"MACHINE={c.MACHINE}: is what a dry run plans for, a run takes what is here; set DRY_RUN=True":
            c.MACHINE and not c.DRY_RUN,
        f"REWARDS={c.REWARDS}: {', '.join(think[:1])} wants <think>, {', '.join(reasoning[:1])} wants "
        "<reasoning>; choose one form": think and reasoning,
    }  # fmt: skip
    alone = {"ROLLOUT_ENGINE": "maxtext", "DISTRIBUTED": False, "OVERLONG_BUFFER": 0}
    faults |= {
        f"{name}={getattr(c, name)}: does not work with turns (ENVIRONMENT={c.ENVIRONMENT}); set "
        f"{name}={value}":
            c.ENVIRONMENT and getattr(c, name) != value
        for name, value in alone.items()
    } | {
        f"ROLLOUTS={c.ROLLOUTS}: does not work with turns (ENVIRONMENT={c.ENVIRONMENT}); set it to fresh":
            c.ENVIRONMENT and ahead,
        f"ADVANTAGE={c.ADVANTAGE}: judges the turns of a world; name an ENVIRONMENT":
            c.ADVANTAGE.startswith("turn") and not c.ENVIRONMENT,
        f"REWARDS={c.REWARDS}: episode_return is a world's; name an ENVIRONMENT":
            not c.ENVIRONMENT and "episode_return" in listed,
    } | {
        f"REWARDS={c.REWARDS}: {name} is named twice; name each reward once": listed.count(name) > 1
        for name in listed
    }  # fmt: skip
    for fault, holds in faults.items():
        if holds:
            raise UserError(fault)


def rewards_of(c) -> str:
    """REWARDS, or the environment's rewards if it's empty and there's an ENVIRONMENT."""
    return c.REWARDS or ("episode_return" if c.ENVIRONMENT else "")


def paths(c) -> None:
    """Checks the names of files and folders."""
    for name in ("MODEL", "DATASET", "TEST_DATASET", "REWARD_FUNC", "ENVIRONMENT", "RUN_DIR"):
        if "gs://" in getattr(c, name):
            said = (
                "must be a local path, copy it here with `gcloud storage cp -r`; only CHECKPOINT_DIR may be"
            )
            raise UserError(f"{name}={getattr(c, name)}: {said} in a bucket")
    tested = questions.parse_sources(c.TEST_DATASET, "TEST_DATASET") if c.TEST_DATASET else []
    trained = questions.parse_sources(c.DATASET)
    for (test, _), (train, _) in itertools.product(tested or trained, trained):
        file, other = questions.source_file(test, "test"), questions.source_file(train, "train")
        if file.exists() and other.exists() and file.samefile(other):
            said = f"{file} is trained on, too (DATASET={c.DATASET}); give a file of other questions"
            raise UserError(f"TEST_DATASET={c.TEST_DATASET}: {said}")
    if any(weight != 1 for _, weight in tested):
        raise UserError(f"TEST_DATASET={c.TEST_DATASET}: every question is asked once; leave the weights out")


def template(c) -> None:
    """Refuses a TEMPLATE without the question, which would give the same prompt every time."""
    mark = "the question"
    try:
        fault = "" if mark in c.TEMPLATE.format(question=mark, system_prompt="") else "has no {question}"
    except (LookupError, AttributeError, ValueError) as error:  # another name in braces; a brace alone
        fault = f"{type(error).__name__} {error}"
    if fault:
        raise UserError(
            f"TEMPLATE={c.TEMPLATE!r:.80}: {fault}; write {{question}} where the question belongs and "
            "{system_prompt} for SYSTEM_PROMPT; other braces are written twice"
        )


def model(c, hf) -> None:
    """Checks constants against MODEL's config `hf`: a TOP_K larger than the vocabulary."""
    if hf.vocab_size < c.TOP_K:
        said = f"MODEL={c.MODEL} has {hf.vocab_size:,} tokens; use fewer, or -1 (off)"
        raise UserError(f"TOP_K={c.TOP_K}: {said}")


def rollout_engine(c) -> None:
    """Refuses vLLM if it isn't installed. Not in `refuse`, because a dry run plans for another machine."""
    if c.ROLLOUT_ENGINE == "vllm" and importlib.util.find_spec("vllm") is None:
        said = "install the TPU packages (requirements/tpu.txt), or set ROLLOUT_ENGINE=maxtext"
        raise UserError(f"ROLLOUT_ENGINE=vllm: the package vllm is not installed; {said}")
