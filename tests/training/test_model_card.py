"""Cards: the same inputs give the same text, no number is typed by hand, and what was not measured is left out."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from helpers.models import AUTO, image_config, seeded, tiny_config
from helpers.scripts import SENTENCES, run_script, write_config
from modeling_tnn import (
    TnnForAudioClassification,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForTimeSeriesPrediction,
)
from tnn_programs.push_to_hub import build_parser
from tnn_programs.training import card_inputs
from tnn_programs.training.card_inputs import INPUTS, collect
from tnn_programs.training.model_card import TEMPLATE, render, write_card

CARDS = sorted(path.parent for path in TEMPLATE.parent.glob("*/README.md"))


def test_cards_are_what_their_inputs_say():
    """The template has numbers in expressions alone, where they are formats."""
    assert not re.search(r"\d", re.sub(r"\{[{%].*?[}%]\}", "", TEMPLATE.read_text(), flags=re.DOTALL))
    for folder in CARDS:
        text = (folder / "README.md").read_text()
        assert text == render(folder) and ModelCard(text).data.model_name == folder.name
        assert all((folder / picture).is_file() for picture in re.findall(r"!\[.*?\]\((.*?)\)", text))
        texts = [path.read_text() for path in folder.glob("*.*") if path.suffix in (".md", ".json")]
        assert not any(re.search(r'"/|\.\./', text) for text in texts), "a path of the machine that made it"


def test_a_model_of_no_class(tmp_path):
    """A configuration may name anything. transformers 5.17 refuses it itself."""
    (tmp_path / "config.json").write_text('{"model_type": "tnn", "architectures": 3}')
    with pytest.raises(
        ValueError,
        match=f"The model must be a .*, got tnn 3 in {tmp_path}|The configuration of {tmp_path} .*architectures",
    ):
        card_inputs.load(tmp_path)


ROW = {"length": 8, "perplexity": 4.0, "tokens": 7, "stride": None, "trained_length": 8}


@pytest.fixture
def card(tmp_path):
    """The text of the card of a model, whose folder has these JSON files; `lengths` and `glue` are other reports."""

    def write(model, lengths=None, glue=None, folder="trained", settings=(), published=False, **files):
        args = build_parser().parse_args([str(tmp_path / folder), "--repo_id", "user/model"])
        args.published = published
        args.folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (args.folder / f"{name}.json").write_text(json.dumps(content))
        report = {"settings": {"validation_file": None, "split": "test"} | dict(settings), "results": lengths}
        for name, content in (("evaluation", lengths and report), ("glue", glue)):
            if content:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
                setattr(args, name, tmp_path / f"{name}.json")
        collect(args, model, tmp_path / "card")
        write_card(tmp_path / "card")
        return (tmp_path / "card" / "README.md").read_text()

    return write


def test_what_was_not_measured_is_left_out(card):
    """With nothing but a model there is no table of results; of what is published it says nothing of folders."""
    for head in AUTO:
        model = seeded(head, tiny_config(causal=head is not TnnForMaskedLM))
        bare = card(model, published=head is TnnForMaskedLM)
        for heading in ("## Training", "## Results", "## Longer texts", "## What the layers", "## Conversion"):
            assert heading not in bare
        assert ModelCard(bare).data.pipeline_tag == card_inputs.PIPELINES[head.__name__]
        assert ("is not on the Hub yet" in bare) == (head is not TnnForMaskedLM)


def test_the_figures_of_a_script(card, tmp_path):
    """They are those of its data, by their name and without their folder."""
    model = seeded(TnnForCausalLM, tiny_config())
    secret = {"dataset_name": str(tmp_path / "sst2"), "learning_rate": 0.5, "output_dir": "/home/me", "seed": None}
    text = card(model, all_results={"eval_accuracy": 0.8125, "eval_runtime": 3.0}, training_args=secret)
    assert "| accuracy | 0.8125 | validation part of sst2 |" in text and "| learning_rate | 0.5 |" in text
    assert "Data: sst2." in text and str(tmp_path) not in text + (tmp_path / "card" / INPUTS["arguments"]).read_text()
    assert ModelCard(text).data.language is None is ModelCard(text).data.license, "neither follows from files"
    (result,) = ModelCard(text).data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 0.8125, "sst2")
    text = card(model, training_args=secret | {"validation_file": str(tmp_path / "mine.csv")})
    assert "| accuracy | 0.8125 | the text mine.csv |" in text and str(tmp_path) not in text
    data = yaml.safe_load(card(model, training_args={"dataset_name": ["user/web", str(tmp_path)]}).split("---")[1])
    assert data["datasets"] == ["user/web"]
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == "user/web"


def test_figures_where_the_hub_reads_them(card, tmp_path):
    """Of one data set of the Hub, or a task of GLUE; none of a text of one's own, also after a card that had some."""
    model, place = seeded(TnnForCausalLM, tiny_config()), tmp_path / "card/.eval_results"
    metrics = {"eval_accuracy": 0.8125, "eval_f1": 0.5, "split": "test", "steps": 7}
    for name, given, task in (
        ("nyu-mll_glue", {"task_name": "mrpc"}, "mrpc"),
        ("user_data", {"dataset_name": "user/data", "dataset_config_name": "part"}, "part"),
        ("user_data", {"dataset_name": "user/data"}, "default"),
    ):
        card(model, all_results=metrics, training_args=given)
        (file,) = place.iterdir()
        accuracy, f1 = parse_eval_result_entries(yaml.safe_load(file.read_text()))
        assert file.name == f"{name}.yaml" and (accuracy.dataset_id.replace("/", "_"), accuracy.task_id) == (
            name,
            task,
        )
        assert (accuracy.value, accuracy.notes, f1.value) == (0.8125, "accuracy, test split", 0.5)
    for given in ({"dataset_name": "user/data", "validation_file": "mine.txt"}, {"dataset_name": "user/a user/b"}):
        card(model, all_results=metrics, training_args=given)
        assert not place.exists()


def test_the_text_of_the_demo_is_named(tmp_path, monkeypatch):
    """A training that was given no data says which it had, and so does its card."""
    verses = [{"text": text, "book": "Genesis", "chapter": 1} for text in SENTENCES * 40]
    (tmp_path / "kjv.jsonl").write_text("\n".join(map(json.dumps, verses)))
    monkeypatch.setattr("tnn_programs.data.corpus._demo_file", lambda: str(tmp_path / "kjv.jsonl"))
    write_config(tmp_path / "config")
    run_script("pretrain", "--config_name", tmp_path / "config", "--output_dir", tmp_path / "out", "--max_steps", 1)
    run_script("push_to_hub", tmp_path / "out", "--repo_id user/demo --dry_run --card_dir", tmp_path / "card")
    found = ModelCard.load(tmp_path / "card" / "README.md")
    assert "Data: the King James Bible." in found.text and found.data.datasets is None
    assert found.data.language == "en" and found.data.license is None
    of_files = {"task_name": None, "dataset_name": None, "train_file": "news.csv"}
    assert card_inputs.language_of(of_files) is None and card_inputs.language_of({"task_name": "sst2"}) == "en"
    for several, language in (("wikitext Salesforce/wikitext", "en"), ("wikitext other/data", None)):
        assert card_inputs.language_of({"dataset_name": several}) == language
    assert found.data.eval_results[0].dataset_name == "the King James Bible"


def test_perplexity_by_length(card, tmp_path):
    """In bits per byte too where they were measured, of this model alone; nothing is left of an earlier card."""
    model = seeded(TnnForCausalLM, tiny_config())
    text = card(model, [ROW | {"bits_per_byte": 1.25}])
    assert "| 8 | 4.00 | 1.250 | 7 |" in text and "bits per byte" in text
    rows = [ROW | {"model": str(tmp_path / "trained")}, ROW | {"model": str(tmp_path / "other"), "perplexity": 2.0}]
    text = card(model, rows)
    assert "| 8 | 4.00 | 7 |" in text and "2.00" not in text and "bits per byte" not in text
    assert "## Longer texts" in text and (tmp_path / "card" / "length_extrapolation.png").exists()
    assert "## Longer texts" not in card(model) and not (tmp_path / "card" / "length_extrapolation.png").exists()
    with pytest.raises(ValueError, match="`causal` of its models must be True, got False"):
        card(model, rows, settings={"objective": "mlm", "mlm_probability": 0.2})


def test_the_state_is_that_of_decoding():
    """Not that of a prompt, whose end `crop` may need: the state of a rational function is the same after any."""
    short, long = card_inputs.decoding_state(seeded(TnnForCausalLM, tiny_config(tno_type="rtf")), 64)
    assert short["mebibytes"] == long["mebibytes"] > 0


def test_card_of_a_masked_model(card):
    """Its perplexity is that of hidden tokens; it may have scores of GLUE, and settings of the operator's own."""
    model = seeded(TnnForMaskedLM, tiny_config(causal=False, decay=0.01, learnable_decay=True))
    settings = {"objective": "mlm", "mlm_probability": 0.25}
    score = {"task": "cola", "metric": "matthews_correlation", "mean": 0.125, "std": 0.01, "seeds": 2, "best": 0.13}
    rates = [score | {"learning_rate": 3e-4, "majority": 0.0, "runs": []}]
    given = {"objective": "mlm", "operator_weight_decay": 0.0}
    text = card(model, [ROW], rates, settings=settings, training_args=given)
    assert "hidden with the probability\n0.25" in text and "before it in its row" not in text
    assert "| cola | matthews correlation | 0.00 | 12.50 ± 1.00 | 2 | 0.0003 |" in text
    assert "| decay per token | learned, at least 0.01 |" in text and "| operator_weight_decay | 0.0 |" in text


def test_card_of_an_image_classifier(card):
    """It speaks of pictures; the figures of its script are those of the split that it names."""
    model = seeded(TnnForImageClassification, image_config())
    results = {"test_accuracy": 0.8125, "test_majority": 0.3, "steps": 7}
    found = ModelCard(card(model, results=results, training_args={"dataset_name": "user/stripes"}))
    assert found.data.pipeline_tag == "image-classification" and found.data.language is None
    (result,) = found.data.eval_results
    assert (result.metric_value, result.dataset_type, result.dataset_split) == (0.8125, "user/stripes", "test")
    use = "import AutoModelForImageClassification, AutoImageProcessor"
    for expected in ("| accuracy | 0.8125 | test part of user/stripes |", "| classes | 3 |", "24 by 24 pixels", use):
        assert expected in found.text
    assert not re.search("tokenizer|vocabulary|texts", found.text)


@pytest.mark.parametrize(
    ("head", "task"),
    [(TnnForTimeSeriesPrediction, "time-series-forecasting"), (TnnForAudioClassification, "audio-classification")],
)
def test_card_of_a_model_of_values(card, head, task):
    """It speaks of signals."""
    found = ModelCard(card(seeded(head, tiny_config(input_channels=1, prediction_length=4))))
    assert found.data.pipeline_tag == task and "| channels of the input | 1 |" in found.text
    assert "knows only the signals" in found.text and not re.search("okenizer|vocabulary|texts", found.text)
