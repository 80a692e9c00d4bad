"""Writes the model card of an exported run from the run's own files; its text is
model_card.md.jinja.
"""

import importlib.metadata
import json
from pathlib import Path

import huggingface_hub
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from plain_text import escape_controls
from run.report import comparison_table
from run.run_files import Checkpoint, read_object, what_is_right
from settings import find_path, names_in
from task import prompts, questions, run_grader

HUB_NAMES = {"gsm8k": "openai/gsm8k"}  # what DATASET and the hub call it
METRICS = {  # of the evaluation at the end; others can repeat the greedy ones
    "greedy_answer_accuracy": "greedy: answers right",
    "greedy_lenient_accuracy": "greedy: right by the last number",
    "answer_accuracy": "sampled: answers right",
    "lenient_accuracy": "sampled: right by the last number",
}
QUESTION = "Kim has 8 cards, loses 6 and then buys 5 more. How many cards are there now?"
PACKAGES = ("google-tunix", "maxtext", "jax", "flax", "optax", "transformers")


def licence_of(folder: Path) -> dict[str, str]:
    """The license fields of a base model's card, else for its file LICENSE*, else none."""
    try:
        data = huggingface_hub.metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):  # there's no card, or its header can't be read
        data = {}
    for path in sorted(folder.glob("LICENSE*")):
        own = {
            "license": "other",
            "license_name": "license-of-the-base-model",
            "license_link": path.name,
        }
        data = data if "license" in data else own
    names = ("license", "license_name", "license_link")
    return {name: data[name] for name in names if isinstance(data.get(name), str)}


def code(text: str) -> str:
    """`text` as inline code on one line, whatever it contains."""
    return f"`{' '.join(escape_controls(text).split()).replace('`', chr(39))}`"


def model_card(checkpoint: Checkpoint, model: str, folder: Path) -> ModelCard:
    """The README.md for the folder to which a run's checkpoint, with its step, is exported.

    Only the last one of a finished run has metrics, from result.json. The license comes from
    MODEL's files in `folder`. Untrusted text can't end the header, a table or a block.
    """
    run_dir, step, c = checkpoint
    result = read_object(run_dir / "result.json") or {}
    after = result["after"] if step == result.get("steps") else {}  # else it's another checkpoint's
    asked = (read_object(run_dir / "after.json") or {}).get("asked", [])
    right = what_is_right(c, asked)
    trained_on, tested_on = (
        ", ".join(HUB_NAMES.get(source, source) for source, _ in questions.parse_sources(dataset))
        for dataset in (c["DATASET"], c["TEST_DATASET"] or c["DATASET"])
    )
    results = [
        EvalResult(
            task_type="text-generation",
            metric_type="accuracy",
            metric_name=label,
            metric_value=after[key],
            dataset_type=tested_on,
            dataset_name=tested_on,
            dataset_split="test",
            dataset_args={"questions": after["questions"]},
        )
        for key, label in METRICS.items()
        if key in after
    ]
    # without the hub's commit
    base = None if find_path(model).is_dir() else model.partition("@")[0]
    name = f"{Path(base or model).name}-grpo"
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "tunix", "maxtext"],
        datasets=[hub for hub in HUB_NAMES.values() if hub in trained_on.split(", ")] or None,
        model_name=name if results else None,
        eval_results=results or None,
        **licence_of(folder),
    )
    think = not run_grader.WANT_THINK_TAGS.isdisjoint(names_in(c["REWARDS"]))
    system_prompt = prompts.think_prompt(c["SYSTEM_PROMPT"]) if think else c["SYSTEM_PROMPT"]
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        c=c,
        name=name,
        model=model,
        step=step,
        code=code,
        run_id=checkpoint.run_json.get("run_id", "unknown"),
        constants=escape_controls(json.dumps(c, indent=1, ensure_ascii=False)),
        table=comparison_table(result["before"], after, c["EVAL_CONFIG"], right) if after else "",
        content=repr(c["TEMPLATE"].format(system_prompt=system_prompt, question=QUESTION)),
        versions=", ".join(
            f"{package} {importlib.metadata.version(package)}" for package in PACKAGES
        ),
    )
