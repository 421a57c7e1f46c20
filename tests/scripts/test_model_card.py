"""Cards: the same inputs give the same text, no number is typed by hand, and what was not measured is left out."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from helpers.models import AUTO, seeded, tiny_config
from helpers.scripts import SENTENCES, run_script, write_config
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM
from tnn_scripts.common import model_card
from tnn_scripts.common.model_card import INPUTS, TEMPLATE, collect, render

CARDS = sorted(path.parent for path in TEMPLATE.parent.glob("*/README.md"))


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_cards_are_what_their_inputs_say(folder):
    assert (folder / "README.md").read_text() == render(folder)
    assert ModelCard.load(folder / "README.md").data.model_name == folder.name
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", (folder / "README.md").read_text()):
        assert (folder / picture).is_file()
    texts = [path.read_text() for path in folder.glob("*.*") if path.suffix in (".md", ".json")]
    assert not any(re.search(r'"/|\.\./', text) for text in texts), "a path of the machine that made it"


def test_a_card_of_what_is_published_says_nothing_of_folders(tmp_path):
    model, trained = seeded(TnnForCausalLM, tiny_config()), tmp_path / "trained"
    trained.mkdir()
    for published in (False, True):
        collect(arguments(trained, published=published), model, tmp_path / "card")
        assert ("is not on the Hub yet" in render(tmp_path / "card")) != published


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
        "published": False,
    }
    results = dict.fromkeys(("evaluation", "glue", "decoding", "conversion", "kernels"))
    return Namespace(folder=folder, **card | results | named)


@pytest.mark.parametrize("head", AUTO)
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
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 0.8125, "sst2")
    own = secret | {"validation_file": str(tmp_path / "mine.csv")}
    (trained / "training_args.json").write_text(json.dumps(own))
    collect(arguments(trained), model, target)
    assert "| accuracy | 0.8125 | the text mine.csv |" in (text := render(target)) and str(tmp_path) not in text
    assert ModelCard(text).data.eval_results[0].dataset_name == "mine.csv"


@pytest.mark.parametrize("head, reason", [(TnnForCausalLM, "has just read"), (TnnForMaskedLM, "random numbers")])
def test_a_perplexity_above_the_vocabulary_is_explained(head, reason, tmp_path):
    model, trained = seeded(head, tiny_config(causal=head is TnnForCausalLM)), tmp_path / "trained"
    trained.mkdir()
    for before in (model.config.vocab_size + 1, model.config.vocab_size):
        (trained / "metrics.json").write_text(json.dumps({"perplexity_before": before, "perplexity": 2.0}))
        collect(arguments(trained), model, tmp_path / "card")
        assert (reason in render(tmp_path / "card")) == (before > model.config.vocab_size)


@pytest.mark.parametrize("program", ["demo", "pretrain"])
def test_the_text_of_the_demo_is_named(program, tmp_path, monkeypatch):
    """A training that was given no data says which it had, and so does its card."""
    verses = [{"text": text, "book": "Genesis", "chapter": 1} for text in SENTENCES * 40]
    (tmp_path / "kjv.jsonl").write_text("\n".join(map(json.dumps, verses)))
    monkeypatch.setattr("tnn_scripts.data.text._demo_file", lambda: str(tmp_path / "kjv.jsonl"))
    write_config(tmp_path / "config")
    run_script(program, "--config_name", tmp_path / "config", "--output_dir", tmp_path / "out", "--max_steps", 1)
    run_script("model_card", tmp_path / "out", "--repo_id", "user/demo", "--output_dir", tmp_path / "card")
    card = ModelCard.load(tmp_path / "card" / "README.md")
    assert "Data: the King James Bible." in card.text and card.data.datasets is None
    assert card.data.eval_results[0].dataset_name == "the King James Bible"


def test_perplexity_by_length_has_bits_per_byte(tmp_path):
    """Where the evaluation measured them; those of an older one have none."""
    model, trained = seeded(TnnForCausalLM, tiny_config()), tmp_path / "trained"
    trained.mkdir()
    row = {"length": 8, "perplexity": 4.0, "bits_per_byte": 1.25, "tokens": 7, "stride": None, "trained_length": 8}
    for figures in (row, {name: value for name, value in row.items() if name != "bits_per_byte"}):
        settings = {"validation_file": None, "split": "test"}
        (tmp_path / "lengths.json").write_text(json.dumps({"settings": settings, "results": [figures]}))
        collect(arguments(trained, evaluation=tmp_path / "lengths.json"), model, tmp_path / "card")
        with_bits = "bits_per_byte" in figures
        assert ("| 8 | 4.00 | 1.250 | 7 |" if with_bits else "| 8 | 4.00 | 7 |") in render(tmp_path / "card")
        assert ("bits per byte" in render(tmp_path / "card")) == with_bits


def test_several_sources_of_text(tmp_path):
    """Each of those on the Hub is named by its own id in the metadata."""
    model, trained = seeded(TnnForCausalLM, tiny_config()), tmp_path / "trained"
    trained.mkdir()
    (trained / "metrics.json").write_text(json.dumps({"perplexity": 3.0}))
    for sources, listed, kind in (
        (["user/web", "user/code"], ["user/web", "user/code"], "text"),
        (["user/web", str(tmp_path)], ["user/web"], "user/web"),
        ([str(tmp_path)], None, "text"),
    ):
        (trained / "training_args.json").write_text(json.dumps({"dataset_name": sources, "objective": "clm"}))
        collect(arguments(trained), model, tmp_path / "card")
        data = yaml.safe_load(render(tmp_path / "card").split("---")[1])
        assert data.get("datasets") == listed
        assert data["model-index"][0]["results"][0]["dataset"]["type"] == kind


def test_the_rows_of_one_model(tmp_path):
    """A report of several models: those of another one, or of another kind, are not put into the card."""
    model, trained, other = seeded(TnnForCausalLM, tiny_config()), tmp_path / "trained", tmp_path / "other"
    trained.mkdir()
    row = {"length": 8, "perplexity": 4.0, "tokens": 7, "stride": None, "trained_length": 8}
    rows = [row | {"model": str(trained)}, row | {"model": str(other), "perplexity": 2.0}]
    report = {"settings": {"validation_file": None, "split": "test"}, "results": rows}
    (tmp_path / "lengths.json").write_text(json.dumps(report))
    collect(arguments(trained, evaluation=tmp_path / "lengths.json"), model, tmp_path / "card")
    text = render(tmp_path / "card")
    assert "| 8 | 4.00 | 7 |" in text and "2.00" not in text
    with pytest.raises(ValueError, match="must have .*third among its models"):
        collect(arguments(tmp_path / "third", evaluation=tmp_path / "lengths.json"), model, tmp_path / "card")
    report["settings"] |= {"objective": "mlm", "mlm_probability": 0.2}
    (tmp_path / "lengths.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match="`causal` of its models must be True, got False"):
        collect(arguments(trained, evaluation=tmp_path / "lengths.json"), model, tmp_path / "card")


def test_the_state_is_that_of_decoding():
    """Not that of a prompt, whose end `crop` may need: the state of a rational function is the same after any."""
    model = seeded(TnnForCausalLM, tiny_config(tno_type="rtf"))
    short, long = model_card.decoding_state(model, 64)
    assert short["mebibytes"] == long["mebibytes"] > 0


def test_nothing_is_left_of_an_earlier_card(tmp_path):
    model, trained, target = seeded(TnnForCausalLM, tiny_config()), tmp_path / "trained", tmp_path / "card"
    trained.mkdir()
    row = {"length": 8, "perplexity": 4.0, "tokens": 7, "stride": None, "trained_length": 8}
    report = {"settings": {"validation_file": None, "split": "test"}, "results": [row]}
    (tmp_path / "lengths.json").write_text(json.dumps(report))
    collect(arguments(trained, evaluation=tmp_path / "lengths.json"), model, target)
    assert "## Longer texts" in render(target) and (target / "length_extrapolation.png").exists()
    collect(arguments(trained), model, target)
    assert "## Longer texts" not in render(target) and not (target / "length_extrapolation.png").exists()


def test_card_of_a_masked_model(tmp_path):
    """Its perplexity is that of hidden tokens; it may have scores of GLUE, and settings of the operator's own."""
    config = tiny_config(causal=False, decay=0.01, learnable_decay=True)
    model, trained = seeded(TnnForMaskedLM, config), tmp_path / "trained"
    trained.mkdir()
    (trained / "training_args.json").write_text(json.dumps({"objective": "mlm", "operator_weight_decay": 0.0}))
    row = {"length": 8, "perplexity": 4.0, "tokens": 7, "stride": None, "trained_length": 8}
    settings = {"validation_file": None, "split": "test", "objective": "mlm", "mlm_probability": 0.25}
    (tmp_path / "lengths.json").write_text(json.dumps({"settings": settings, "results": [row]}))
    score = {"task": "cola", "metric": "matthews_correlation", "mean": 0.125, "std": 0.01, "seeds": 2, "best": 0.13}
    without = {"task": "stsb", "metric": "pearson", "mean": 0.5, "std": 0.0, "seeds": 2, "majority": None}
    rates = [score | {"learning_rate": 3e-4, "majority": 0.0, "runs": []}, without | {"learning_rate": 1e-3}]
    (tmp_path / "glue.json").write_text(json.dumps(rates))
    named = {"evaluation": tmp_path / "lengths.json", "glue": tmp_path / "glue.json"}
    collect(arguments(trained, **named), model, tmp_path / "card")
    text = render(tmp_path / "card")
    assert "hidden with the probability\n0.25" in text and "before it in its row" not in text
    assert "| cola | matthews correlation | 0.00 | 12.50 ± 1.00 | 2 | 0.0003 |" in text
    assert "| stsb | pearson |  | 50.00 ± 0.00 | 2 | 0.001 |" in text
    assert "| decay per token | learned, at least 0.01 |" in text and "| operator_weight_decay | 0.0 |" in text


def test_card_of_an_image_classifier(tmp_path):
    """It speaks of pictures; the figures of its script are those of the split that it names."""
    fields = {"image_size": 24, "patch_size": 4, "max_position_embeddings": 36, "spatial_dims": 2, "num_labels": 3}
    model, target = seeded(TnnForImageClassification, tiny_config(causal=False, **fields)), tmp_path / "card"
    (tmp_path / "results.json").write_text(json.dumps({"test_accuracy": 0.8125, "test_majority": 0.3, "steps": 7}))
    (tmp_path / "training_args.json").write_text(json.dumps({"dataset_name": "user/stripes", "learning_rate": 0.5}))
    collect(arguments(tmp_path), model, target)
    card = ModelCard(render(target))
    assert card.data.pipeline_tag == "image-classification" and card.data.language is None
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_type, result.dataset_split) == (0.8125, "user/stripes", "test")
    use = "import AutoModelForImageClassification, AutoImageProcessor"
    for expected in ("| accuracy | 0.8125 | test part of user/stripes |", "| classes | 3 |", "24 by 24 pixels", use):
        assert expected in card.text
    assert not re.search("tokenizer|vocabulary|texts", card.text)
