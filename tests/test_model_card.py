"""The model card of an exported run, read back by other readers: pyyaml and Hugging Face's own."""

import json
import re

import huggingface_hub
import pytest
import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

import grpo_llama3_1_8b_demo as demo
import settings
from run.evaluation import wilson
from run.run_files import Checkpoint, read_constants
from settings import HERE
from tools import model_card

BEFORE = {"answer_accuracy": 0.25, "greedy_answer_accuracy": 0.375, "questions": 64}
AFTER = {
    "answer_accuracy": 0.75,
    "lenient_accuracy": 0.8125,
    "greedy_answer_accuracy": 0.875,
    "greedy_lenient_accuracy": 0.9375,
    "questions": 64,
}
RESULT = {"before": BEFORE, "after": AFTER, "steps": 100}


def make_run(folder, result=None, **constants):
    """A run's folder with the constants of the default run but for those given."""
    folder.mkdir()
    saved = settings.defaults(demo.Constants, "small") | constants
    (folder / "constants.json").write_text(json.dumps(saved))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def card_of(run, tmp_path, step=100, model="tiny_llama", folder=HERE / "tiny_llama"):
    """The header as pyyaml reads it, the text below it, and the path of the card."""
    path = tmp_path / "README.md"
    model_card.model_card(Checkpoint(run, step, read_constants(run)), model, folder).save(path)
    _, head, body = re.split(r"^---\n", path.read_text(encoding="utf-8"), maxsplit=2, flags=re.M)
    return yaml.safe_load(head), body, path


def block(body, language):
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", body, re.M | re.S)
    return text


def test_the_figures_are_those_of_result_json(tmp_path):
    head, body, path = card_of(make_run(tmp_path / "run", RESULT), tmp_path)
    name, results = model_index_to_eval_results(head["model-index"])
    assert name == "tiny_llama-grpo" == head["model-index"][0]["name"]
    measured = {result.metric_name: result.metric_value for result in results}
    assert measured == {
        "greedy: answers right": 0.875,
        "greedy: right by the last number": 0.9375,
        "sampled: answers right": 0.75,
        "sampled: right by the last number": 0.8125,
    }
    assert {result.dataset_args["questions"] for result in results} == {64}
    assert huggingface_hub.ModelCard.load(path).data.eval_results == results
    low, high = wilson(0.875, 64)
    assert (
        f"| greedy: answers right | 37.5% (26.7% to 49.7%) | 87.5% ({low:.1%} to {high:.1%}) |"
        in body
    )
    assert head["library_name"] == "transformers" and head["pipeline_tag"] == "text-generation"
    # a folder and a file of ours, not on the hub
    assert "base_model" not in head and "datasets" not in head


@pytest.mark.parametrize(("step", "finished"), [(100, True), (50, False), (50, None)])
def test_only_the_last_checkpoint_has_figures(tmp_path, step, finished):
    result = RESULT if finished is not None else None
    head, body, _ = card_of(make_run(tmp_path / "run", result), tmp_path, step=step)
    assert ("model-index" in head) == bool(finished) == ("87.5%" in body)
    assert (f"after step {step} of 100" in body) != bool(finished)


def test_a_hub_name_is_the_base_model(tmp_path):
    run = make_run(
        tmp_path / "run",
        LORA_RANK=8,
        DATASET="gsm8k",
        REWARDS="mark_reward",
        TEMPLATE="{system_prompt}\n\n{question}",
    )
    head, body, path = card_of(run, tmp_path, model=f"org/base@{'1' * 40}")
    assert head["base_model"] == "org/base" and head["datasets"] == ["openai/gsm8k"]
    assert f"`org/base@{'1' * 40}`, trained with" in body and "# `base-grpo`" in body
    assert huggingface_hub.ModelCard.load(path).data.base_model == "org/base"
    assert "LoRA of rank 8, merged" in body and "between <think> and" in block(body, "python")


@pytest.mark.parametrize(
    "text",
    [
        "a'b\"c: [x]\n---\nlicense: mit",
        "x` | y | `z",
        "- !!python/object/apply:os.system [ls]",
        "{'a': 1}#",
    ],
)
def test_texts_from_outside_stay_texts(tmp_path, text):
    """The header keeps its keys and the body its headings, whatever a name is."""
    kept, plain, _ = card_of(make_run(tmp_path / "plain", RESULT), tmp_path)
    data = text.replace(":", ";")  # a colon would be followed by a weight
    given = {"DATASET": data, "TEST_DATASET": data, "REWARD_FUNC": text}
    given["TEMPLATE"] = text.replace("{", "{{").replace("}", "}}") + "{question}"
    run = make_run(tmp_path / "run", RESULT, **given)
    head, body, _ = card_of(run, tmp_path, model=text, folder=tmp_path)
    assert head.keys() - {"base_model"} == kept.keys()
    source = head["model-index"][0]["results"][0]["dataset"]["name"]
    assert source == ", ".join(part.strip() for part in data.split(","))
    assert f"`{' '.join(text.split()).replace('`', chr(39))}`, trained with " in body
    assert re.findall(r"^## .*", body, re.M) == re.findall(r"^## .*", plain, re.M)
    assert json.loads(block(body, "json")).items() >= given.items()
    compile(block(body, "python"), "snippet", "exec")
    assert repr(given["TEMPLATE"].format(question=model_card.QUESTION)) in body


@pytest.mark.parametrize(
    "case",
    [
        {
            "file": "README.md",
            "text": "---\nlicense: llama3.1\n---\n# Base",
            "fields": {"license": "llama3.1"},
        },
        {
            "file": "README.md",
            "text": "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n",
            "fields": {"license": "other", "license_name": "mine", "license_link": "LICENSE"},
        },
        {"file": "README.md", "text": "---\n: : :\n---\n", "fields": {}},
        {
            "file": "LICENSE.txt",
            "text": "All rights reserved.",
            "fields": {
                "license": "other",
                "license_name": "license-of-the-base-model",
                "license_link": "LICENSE.txt",
            },
        },
    ],
)
def test_the_licence_is_the_one_that_the_base_models_card_names_else_its_file(tmp_path, case):
    base = tmp_path / "base"
    base.mkdir()
    (base / case["file"]).write_text(case["text"])
    head, body, _ = card_of(make_run(tmp_path / "run"), tmp_path, folder=base)
    assert {name: head[name] for name in head if name.startswith("license")} == case["fields"]
    named = case["fields"].get("license")
    assert (f"Its card names `{named}`." if named else "Its folder does not name it.") in body
