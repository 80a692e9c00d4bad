"""The model card of an exported run: its README.md as Hugging Face reads it, made of the run's own files."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import EvalResult, ModelCardData

from run.plain_text import shown
from run.report import comparison_table
from run.run_files import read_constants, read_object
from settings import find_path
from task import prompts, questions, run_grader

HUB_NAMES = {"gsm8k": "openai/gsm8k"}  # what DATASET and the hub call it
METRICS = {  # of the evaluation at the end; the greedy ones can be repeated by others
    "greedy_answer_accuracy": "greedy: answers right",
    "greedy_lenient_accuracy": "greedy: right by the last number",
    "answer_accuracy": "sampled: answers right",
    "lenient_accuracy": "sampled: right by the last number",
}
QUESTION = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
PACKAGES = ("google-tunix", "maxtext", "jax", "flax", "optax", "transformers")


def licence_of(folder: Path) -> dict[str, str]:
    """The lines on the licence in the card of a model, else such lines for its file LICENSE*; else none."""
    try:
        data = huggingface_hub.metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):  # no card, or one whose header cannot be read
        data = {}
    for path in sorted(folder.glob("LICENSE*")):
        own = {"license": "other", "license_name": "licence-of-the-base-model", "license_link": path.name}
        data = data if "license" in data else own
    names = ("license", "license_name", "license_link")
    return {name: data[name] for name in names if isinstance(data.get(name), str)}


def code(text: str) -> str:
    """`text` as inline code on one line, whatever is in it."""
    return f"`{' '.join(shown(text).split()).replace('`', chr(39))}`"


def header(
    name: str, c: Mapping[str, Any], result: Mapping[str, Any], licence: Mapping[str, str], base: str | None
) -> str:
    """The YAML that Hugging Face reads; arguments as in `model_card`, `base` a hub name or None."""
    trained_on, tested_on = (
        ", ".join(HUB_NAMES.get(source, source) for source, _ in questions.parse_sources(dataset))
        for dataset in (c["DATASET"], c["TEST_DATASET"] or c["DATASET"])
    )
    after = result.get("after", {})
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=tested_on,
            dataset_name=tested_on,
            dataset_split="test",
            dataset_args={"questions": after["questions"]},
            metric_type="accuracy",
            metric_name=label,
            metric_value=after[key],
        )
        for key, label in METRICS.items()
        if key in after
    ]
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "tunix", "maxtext"],
        datasets=[hub for hub in HUB_NAMES.values() if hub in trained_on.split(", ")] or None,
        model_name=name if results else None,
        eval_results=results or None,
        **licence,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def figures(c: Mapping[str, Any], result: Mapping[str, Any], step: int) -> str:
    """Before and after with 95 % intervals, or why there are none."""
    if not result:
        return (
            f"No figures: this is the checkpoint after step {step} of {c['NUM_BATCHES']}. Only what a "
            "finished run ends with is evaluated on the test questions."
        )
    table = comparison_table(result["before"], result["after"], c["EVAL_CONFIG"])
    return (
        f"{table}\n\nIn brackets the 95 % interval (Wilson). *Right* asks for the right number in the form "
        "that the rewards want; *by the last number* takes the last number of the answer, wherever it stands."
    )


def model_card(run: Path, step: int, model: str, folder: Path) -> str:
    """README.md for the folder to which a run is exported.

    Args:
        run: RUN_DIR, with `constants.json`, and with `result.json` if the run is over.
        step: the checkpoint's number. Only the last one has figures.
        model: MODEL, a hub name or a folder.
        folder: where its files are; the licence comes from its README.md.

    Returns:
        A YAML header and Markdown. Nothing that comes from outside can end the header, a table or a block.
    """
    c = read_constants(run)
    result = read_object(run / "result.json") or {}
    if step != result.get("steps"):  # the figures are another checkpoint's
        result = {}
    licence = licence_of(folder)
    named = f"Its card names {code(licence['license'])}." if licence else "Its folder does not name it."
    base = None if find_path(model).is_dir() else model.partition("@")[0]  # without the hub's commit
    name = f"{Path(base or model).name}-grpo"
    think = not run_grader.WANT_THINK_TAGS.isdisjoint(run_grader.reward_names(c["REWARDS"]))
    system_prompt = prompts.think_prompt(c["SYSTEM_PROMPT"]) if think else c["SYSTEM_PROMPT"]
    content = c["TEMPLATE"].format(system_prompt=system_prompt, question=QUESTION)
    weights = f"LoRA of rank {c['LORA_RANK']}, merged" if c["LORA_RANK"] else "all weights"
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    return f"""{header(name, c, result, licence, base)}
# {code(name)}

{code(model)}, trained with GRPO (group relative policy optimization, arXiv 2402.03300) by the main script of
the course *Q-learning to GRPO*: {weights}, {step} steps, each on {c["BATCH_SIZE"]} \
questions x {c["NUM_GENERATIONS"]} answers, which programs graded.

## What it was trained on

{code(c["DATASET"])}, with the template and the rewards that are among the constants of the run:

```json
{shown(json.dumps(c, indent=1, ensure_ascii=False))}
```

Empty `TEST_DATASET`: the test split of `DATASET`. Empty `REWARDS`: the four for GSM8K, else `compute_score`.

## Before and after

{figures(c, result, step)}

## How to use it

```python
from transformers import pipeline

ask = pipeline("text-generation", ".")  # this folder, or its name on the hub
messages = [{{"role": "user", "content": {content!r}}}]
[answer] = ask(messages, max_new_tokens={c["TOTAL_GENERATION_STEPS"]}, do_sample=False)
print(answer["generated_text"][-1]["content"])
```

## Limits

It was trained on the questions above, asked with one template. The figures hold for such questions and say
nothing of others, nor of what else the base model could do. The rewards are programs: what they do not check
was not trained. Nothing was done about safety beyond what the base model brings.

## Licence

That of the base model. {named}

## Versions

Exported with {versions}.
"""
