"""Cards: the same inputs give the same text, no number is typed by hand, and what was not measured is left out."""

import json
import re
from argparse import Namespace
from pathlib import Path

import model_card
import pytest
from conftest import seeded, tiny_config
from huggingface_hub import ModelCard
from model_card import INPUTS, TEMPLATE, collect, render

from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel

CARDS = sorted(path.parent for path in TEMPLATE.parent.glob("*/README.md"))


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_cards_are_what_their_inputs_say(folder):
    assert (folder / "README.md").read_text() == render(folder)
    assert ModelCard.load(folder / "README.md").data.model_name == folder.name
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", (folder / "README.md").read_text()):
        assert (folder / picture).is_file()
    texts = [path.read_text() for path in folder.glob("*.*") if path.suffix in (".md", ".json")]
    assert not any(re.search(r'"/|\.\./', text) for text in texts), "a path of the machine that made it"


def test_the_template_holds_no_number():
    """Outside of expressions, where numbers are formats."""
    text = re.sub(r"\{[{%].*?[}%]\}", "", TEMPLATE.read_text(), flags=re.DOTALL)
    assert not re.search(r"\d", text)


def arguments(folder: Path, **named) -> Namespace:
    card = {
        "repo_id": "user/model",
        "description": "",
        "data": "",
        "dataset_id": "",
        "license": "mit",
        "language": "en",
    }
    results = {"evaluation": None, "decoding": None, "conversion": None, "kernels": None}
    return Namespace(folder=folder, **card | results | named)


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification])
def test_what_was_not_measured_is_left_out(head, tmp_path):
    """With nothing but a model there is no table of results; with the files of a script there is one."""
    model = seeded(head, tiny_config(causal=head is not TnnForMaskedLM))
    trained, target = tmp_path / "trained", tmp_path / "card"
    trained.mkdir()
    collect(arguments(trained), model, target)
    bare = render(target)
    for heading in ("## Training", "## Results", "## Longer texts", "## What the layers", "## Conversion"):
        assert heading not in bare
    assert ModelCard(bare).data.pipeline_tag == model_card.PIPELINES[head.__name__]
    (trained / "all_results.json").write_text(json.dumps({"eval_accuracy": 0.8125, "eval_runtime": 3.0}))
    secret = {"dataset_name": str(tmp_path / "sst2"), "learning_rate": 0.5, "output_dir": "/home/me", "seed": None}
    (trained / "training_args.json").write_text(json.dumps(secret))
    collect(arguments(trained), model, target)
    text = render(target)
    assert "| accuracy | 0.8125 | validation part of sst2 |" in text and "| learning_rate | 0.5 |" in text
    assert "Data: sst2." in text and str(tmp_path) not in text + (target / INPUTS["arguments"]).read_text()
    (result,) = ModelCard(text).data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.8125)
