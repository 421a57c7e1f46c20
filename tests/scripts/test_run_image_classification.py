"""Training an image classifier by its script: pictures of stripes, at a size that takes seconds."""

import json
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from transformers import AutoModelForImageClassification, ViTConfig, ViTImageProcessor, pipeline

from helpers.scripts import run_script
from tnn_scripts.common.arguments import load_config, parse_arguments, training_options
from tnn_scripts.common.peers import vit_like
from tnn_scripts.common.publishing import stage
from tnn_scripts.options.card import build_publishing_parser
from tnn_scripts.runs import run_image_classification as script

RECIPES = sorted((Path(__file__).parents[2] / "configuration" / "recipes" / "images").glob("*.yaml"))
CLASSES = ["vertical", "horizontal", "diagonal"]
TINY = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,rpe_dim=8"
TINY += ",image_size=24,patch_size=4,max_position_embeddings=36"


@pytest.fixture(scope="module")
def data(pictures, tmp_path_factory) -> Path:  # noqa: F811 - a fixture
    """A data set with a column that is neither, and names of its own for the others."""
    folder = tmp_path_factory.mktemp("pictures")
    features = Features({"id": Value("int64"), "img": Image(), "kind": ClassLabel(names=CLASSES)})
    rows = [{"id": index, "img": image, "kind": label} for index, (image, label) in enumerate(pictures)]
    for split, part in {"train": rows[:72], "test": rows[72:]}.items():
        Dataset.from_list(part, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def options(data, output, *more) -> list:
    given = [
        "--config_name",
        "tnn-image-tiny",
        "--config_overrides",
        TINY,
        "--dataset_name",
        data,
        "--output_dir",
        output,
    ]
    given += ["--per_device_train_batch_size", 12, "--learning_rate", 3e-3, "--save_strategy", "no"]
    return [*given, "--report_to", "none", *more]


def test_it_learns_and_classifies(data, tmp_path, capsys):
    run_script(
        "run_image_classification", *options(data, tmp_path, "--num_train_epochs", 8, "--max_train_samples", 60)
    )
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert (results["model"], results["train_rows"], results["steps"]) == ("rpe", 60, 40)
    assert results["test_accuracy"] > 0.9 and results["test_majority"] == pytest.approx(1 / 3)
    assert "rpe, test: accuracy" in capsys.readouterr().out
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert [model.config.id2label[index] for index in range(3)] == CLASSES
    image = Dataset.from_parquet(str(data / "test.parquet"))[0]
    processor = ViTImageProcessor.from_pretrained(tmp_path)
    answer = pipeline("image-classification", model=str(tmp_path), image_processor=processor)(image["img"], top_k=1)
    assert answer[0]["label"] == CLASSES[image["kind"]]
    stage(build_publishing_parser().parse_args([str(tmp_path), "--repo_id", "user/stripes"]), tmp_path / "published")
    published = {path.name for path in (tmp_path / "published").iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "modeling_tnn.py"} <= published
    assert "training_args.bin" not in published
    card = (tmp_path / "published" / "README.md").read_text()
    assert (
        f"| accuracy | {results['test_accuracy']:.4f} | test part of" in card and "| learning_rate | 0.003 |" in card
    )


def test_transformer_of_the_same_size(data, tmp_path):
    run_script("run_image_classification", *options(data, tmp_path, "--max_steps", 1, "--transformer"))
    assert json.loads((tmp_path / "all_results.json").read_text())["model"] == "transformer"
    config = load_config("tnn-image-tiny")
    with torch.device("meta"):
        sizes = [
            AutoModelForImageClassification.from_config(one).num_parameters() for one in (config, vit_like(config))
        ]
    assert isinstance(AutoModelForImageClassification.from_pretrained(tmp_path).config, ViTConfig)
    assert 1 < sizes[0] / sizes[1] < 1.13  # the position encoders are extra


def test_half_of_the_training_pictures_are_mirrored(data):
    loaded = script.load_pictures(script.ImageArguments(config_name="tnn-image-tiny", dataset_name=str(data)))
    processor = ViTImageProcessor(size={"height": 24, "width": 24})
    torch.manual_seed(0)
    plain, drawn = (
        script.prepare(loaded.splits["train"], loaded, script.AUGMENTATIONS[name].to_pixels(processor, 24))[:]
        for name in ("none", "flip")
    )
    assert plain["labels"] == drawn["labels"] == loaded.splits["train"]["kind"]
    pairs = list(zip(plain["pixel_values"], drawn["pixel_values"], strict=True))
    same = [torch.equal(one, other) for one, other in pairs]
    mirrored = [torch.equal(one.flip(-1), other) for one, other in pairs]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)) and 20 < sum(same) < 52


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_read(recipe, monkeypatch):
    monkeypatch.setattr("sys.argv", ["run_image_classification.py", "--recipe", str(recipe), "--bf16", "false"])
    args, _ = parse_arguments([script.ImageArguments, training_options()], "")
    with torch.device("meta"):
        AutoModelForImageClassification.from_config(script.build_config(args, CLASSES))


def test_imagenet_has_the_settings_of_table_12(monkeypatch):
    """Of the TNN paper: 2,048 pictures in a step, 300 epochs of which 5 warm up."""
    recipe = next(recipe for recipe in RECIPES if recipe.stem == "imagenet")
    monkeypatch.setattr("sys.argv", ["run_image_classification.py", "--recipe", str(recipe), "--bf16", "false"])
    args, training = parse_arguments([script.ImageArguments, training_options()], "")
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 2048
    assert (training.num_train_epochs, training.learning_rate, training.lr_scheduler_type) == (300, 2.5e-4, "cosine")
    assert training.warmup_steps * training.num_train_epochs == pytest.approx(5, abs=0.02)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-8)
    assert (training.weight_decay, training.max_grad_norm) == (0.1, 1.0)
    assert (args.augmentation, training.label_smoothing_factor) == ("deit", 0.1)  # DeiT's, for lack of a word


@pytest.mark.parametrize(
    "more, message",
    [
        (["--label_column_name", "id"], "with the columns id, img, kind"),
        (["--config_overrides", "width=3"], "must be fields of TnnConfig, got width"),
        (["--push_to_hub"], "publish the trained model with tnn push"),
        (["--config_overrides", TINY + ",image_size=25"], "image_size=25"),
    ],
)
def test_refused(more, message, data, tmp_path):
    with pytest.raises(SystemExit, match=message):
        run_script("run_image_classification", *options(data, tmp_path, *more))


def test_data_without_a_split_to_evaluate_on(data, tmp_path):
    (tmp_path / "train.parquet").write_bytes((data / "train.parquet").read_bytes())
    with pytest.raises(SystemExit, match="must have the splits train and one of validation, test, got .* with train"):
        run_script("run_image_classification", *options(tmp_path, tmp_path / "out"))
