"""Refuses constants that would fail later, or silently train nothing.

settings.py checks names, types and ranges when it reads the constants. Nothing here imports jax, so
we refuse a wrong setting before the slow imports. Checks that need the model or the devices come
later.
"""

import importlib.util
import itertools

from constants import Machine, RunConstants
from machines import CARDS, parse_machine
from settings import UserError, names_in
from task import questions, run_grader

VLLM_TEMPERATURE = 2  # vLLM 0.32 refuses a request above it


def refuse(c: RunConstants) -> None:
    """Checks every constant we can without the model; raises UserError."""
    combinations(c)
    paths(c)
    template(c)


def combinations(c: RunConstants) -> None:
    """Constants that contradict each other."""
    vllm, ahead = c.ROLLOUT_ENGINE == "vllm", c.ROLLOUTS == "one-step-ahead"
    environment = c.ENVIRONMENT
    micro = c.TRAIN_MICRO_BATCH_SIZE
    kept = c.ZERO_VARIANCE_GROUPS == "keep"
    alone = c.ADVANTAGE == "none"
    listed = names_in(c.REWARDS)
    think, reasoning = (
        [name for name in sorted(form) if name in listed]
        for form in (run_grader.WANT_THINK_TAGS, run_grader.WANT_REASONING_TAGS)
    )
    targets, known = names_in(c.LORA_TARGETS), names_in(Machine.LORA_TARGETS)
    rules = [  # constant, whether it's refused, why and what to do
        (
            "LORA_TARGETS",
            not set(targets) <= set(known) or len(set(targets)) < len(targets),
            f"name each weight once, of {','.join(known)}",
        ),
        ("TOP_K", c.TOP_K < 1 and c.TOP_K != -1, "use 1 or more, or -1 to switch it off"),
        (
            "TRAIN_MICRO_BATCH_SIZE",
            micro and c.BATCH_SIZE % micro,
            f"must divide BATCH_SIZE={c.BATCH_SIZE}",
        ),
        (
            "REFERENCE_OFFLOAD",
            c.LORA_RANK and c.REFERENCE_OFFLOAD,
            f"with LORA_RANK={c.LORA_RANK} the "
            "reference is the base itself, with no second copy to move; set it to False",
        ),
        (
            "OVERLONG_BUFFER",
            c.OVERLONG_BUFFER > c.TOTAL_GENERATION_STEPS,
            "more than TOTAL_GENERATION_STEPS="
            f"{c.TOTAL_GENERATION_STEPS}; it counts the last tokens before that limit",
        ),
        (
            "ROLLOUTS",
            ahead and (c.ZERO_VARIANCE_GROUPS == "refill" or c.TEMPERATURE_END),
            "works neither with ZERO_VARIANCE_GROUPS=refill nor with TEMPERATURE_END "
            f"(ZERO_VARIANCE_GROUPS={c.ZERO_VARIANCE_GROUPS}, "
            f"TEMPERATURE_END={c.TEMPERATURE_END}); drop one",
        ),
        (
            "EPSILON_HIGH",
            0 < c.EPSILON_HIGH < c.EPSILON,
            f"below EPSILON={c.EPSILON}; raise it, or 0 for the same",
        ),
        (
            "EPSILON_HIGH",
            c.EPSILON_HIGH and c.LOSS_ALGO == "grpo",
            "LOSS_ALGO=grpo clips by EPSILON on both sides; set LOSS_ALGO=dapo",
        ),
        (
            "LOSS_ALGO",
            c.LOSS_ALGO == "dapo" and not c.EPSILON_HIGH,
            "EPSILON_HIGH=0 makes it plain GRPO; set EPSILON_HIGH=0.28",
        ),
        (
            "TARGET_KL",
            c.TARGET_KL and not c.BETA,
            "BETA=0 has no reference model; set BETA above 0",
        ),
        ("TEACHER", c.TEACHER and not c.BETA, "BETA=0 has no pull to it; set BETA=1"),
        (
            "TEACHER",
            c.TEACHER and c.KL_LOSS_MODE == "kl",
            "the gradient of KL_LOSS_MODE=kl is 0 on average; set it to mse_kl",
        ),
        ("ADVANTAGE", alone and not c.TEACHER, "then only a teacher teaches; set TEACHER"),
        (
            "ZERO_VARIANCE_GROUPS",
            alone and not kept,
            "with ADVANTAGE=none no group has an advantage; set it to keep",
        ),
        (
            "SAMPLER_WEIGHT",
            c.SAMPLER_WEIGHT != "token" and not c.SAMPLER_CORRECTION,
            "SAMPLER_CORRECTION=0 weighs nothing; set it to 2",
        ),
        (
            "REFERENCE_OFFLOAD",
            c.REFERENCE_OFFLOAD and not c.BETA,
            "BETA=0 has no reference model; set BETA above 0",
        ),
        (
            "SCAN_LAYERS",
            vllm and not c.SCAN_LAYERS,
            "with ROLLOUT_ENGINE=vllm it must be True; MaxText names "
            "only the stacked layers to vLLM, others would keep vLLM's "
            "random weights without a word",
        ),
        (
            "LOGITS_CLIP",
            vllm and c.LOGITS_CLIP,
            "vLLM draws from the logits as they are, another policy than "
            "the one that would be trained; use 0, or set ROLLOUT_ENGINE=maxtext",
        ),
        (
            "TEMPERATURE",
            vllm and max(c.TEMPERATURE, c.TEMPERATURE_END) > VLLM_TEMPERATURE,
            f"TEMPERATURE_END={c.TEMPERATURE_END}: vLLM takes at most {VLLM_TEMPERATURE}; lower "
            "it, or set ROLLOUT_ENGINE=maxtext",
        ),
        (
            "MACHINE",
            c.MACHINE and not parse_machine(c.MACHINE),
            (
                f"no such machine; {', '.join(CARDS)}, several of them (8xh100), "
                "or a TPU slice (v6e-8)"
            ),
        ),
        (
            "MACHINE",
            c.MACHINE and not c.DRY_RUN,
            "is what a dry run plans for, a run takes what is here; set DRY_RUN=True",
        ),
        (
            "REWARDS",
            think and reasoning,
            f"{', '.join(think[:1])} wants <think>, "
            f"{', '.join(reasoning[:1])} wants <reasoning>; choose one form",
        ),
        (
            "ADVANTAGE",
            c.ADVANTAGE.startswith("turn") and not environment,
            "judges turns; name an ENVIRONMENT",
        ),
        (
            "REWARDS",
            "episode_return" in listed and not environment,
            "episode_return needs an environment; name an ENVIRONMENT",
        ),
        *(
            ("REWARDS", listed.count(name) > 1, f"{name} is named twice; name each reward once")
            for name in listed
        ),
        *(
            (
                name,
                environment and wrong,
                f"does not work with turns (ENVIRONMENT={environment}); set it to {value}",
            )
            for name, wrong, value in (
                ("ROLLOUT_ENGINE", vllm, "maxtext"),
                ("DISTRIBUTED", c.DISTRIBUTED, False),
                ("OVERLONG_BUFFER", c.OVERLONG_BUFFER, 0),
                ("ROLLOUTS", ahead, "fresh"),
            )
        ),
    ]
    for name, refused, message in rules:
        if refused:
            raise UserError(f"{name}={getattr(c, name)}: {message}")


def paths(c: RunConstants) -> None:
    """Checks the names of files and folders."""
    for name in ("MODEL", "DATASET", "TEST_DATASET", "REWARD_FUNC", "ENVIRONMENT", "RUN_DIR"):
        if "gs://" in getattr(c, name):
            fault = "must be a local path; copy it here with `gcloud storage cp -r`"
            raise UserError(f"{name}={getattr(c, name)}: {fault}")
    tested = questions.parse_sources(c.TEST_DATASET, "TEST_DATASET") if c.TEST_DATASET else []
    trained = questions.parse_sources(c.DATASET)
    for (test, _), (train, _) in itertools.product(tested or trained, trained):
        file, other = questions.source_file(test, "test"), questions.source_file(train, "train")
        if file.exists() and other.exists() and file.samefile(other):
            fault = (
                f"{file} is trained on, too (DATASET={c.DATASET}); give a file of other questions"
            )
            raise UserError(f"TEST_DATASET={c.TEST_DATASET}: {fault}")
    if any(weight != 1 for _, weight in tested):
        raise UserError(
            f"TEST_DATASET={c.TEST_DATASET}: every question is asked once; leave the weights out"
        )


def template(c: RunConstants) -> None:
    """Refuses a TEMPLATE without the question, which would give the same prompt every time."""
    mark = "the question"
    try:
        fault = (
            ""
            if mark in c.TEMPLATE.format(question=mark, system_prompt="")
            else "has no {question}"
        )
    except (
        LookupError,
        AttributeError,
        ValueError,
    ) as error:  # another name in braces; a brace alone
        fault = f"{type(error).__name__} {error}"
    if fault:
        raise UserError(
            f"TEMPLATE={c.TEMPLATE!r:.80}: {fault}; write {{question}} where the question belongs "
            "and {system_prompt} for SYSTEM_PROMPT; other braces are written twice"
        )


def rollout_engine(c: RunConstants) -> None:
    """Refuses vLLM if it isn't installed. Not in `refuse`, because a dry run plans for another
    machine.
    """
    if c.ROLLOUT_ENGINE == "vllm" and importlib.util.find_spec("vllm") is None:
        remedy = "install the TPU packages (requirements/tpu.txt), or set ROLLOUT_ENGINE=maxtext"
        raise UserError(f"ROLLOUT_ENGINE=vllm: the package vllm is not installed; {remedy}")
