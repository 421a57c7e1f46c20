"""Training an image classifier by its script: pictures of stripes, at a size that takes seconds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pictures
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
    ViTImageProcessor,
    pipeline,
    set_seed,
)

from helpers.programs import unlike
from helpers.scripts import read, run, run_script, weights, words
from tnn_programs.cli.parser import load_config
from tnn_programs.push_to_hub import build_parser
from tnn_programs.training import run_image_classification as script
from tnn_programs.training.peers import vit_like
from tnn_programs.training.publishing import stage

CLASSES = ["vertical", "horizontal", "diagonal"]
TINY = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,rpe_dim=8"
TINY += ",image_size=24,patch_size=4,max_position_embeddings=36"
SIDE = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Vertical, horizontal and diagonal stripes of random phase, with a column that is neither picture nor class."""
    folder, rng, rows = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0), []
    features = Features({"id": Value("int64"), "img": Image(), "kind": ClassLabel(names=CLASSES)})
    y, x = np.mgrid[:24, :24]
    for index in range(96):
        wave = np.sin((x, y, x + y)[index % 3] * 1.3 + rng.uniform(0, 6))
        noisy = 128 + 80 * wave[..., None] + rng.normal(0, 10, (24, 24, 3))
        image = Pictures.fromarray(noisy.clip(0, 255).astype(np.uint8))
        rows.append({"id": index, "img": image, "kind": index % 3})
    for split, part in {"train": rows[:72], "test": rows[72:]}.items():
        Dataset.from_list(part, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def options(data, output) -> list:
    return words(f"--config_name tnn-image-tiny --config_overrides {TINY} --dataset_name {data} --output_dir {output}",
                 "--per_device_train_batch_size 12 --learning_rate 3e-3 --report_to none")  # fmt: skip


def test_it_learns_and_classifies(data, tmp_path):
    more = "--num_train_epochs 8 --max_train_samples 60 --save_strategy no"
    shown = run("run_image_classification", *options(data, tmp_path), more).stdout
    results = read(tmp_path)
    assert (results["model"], results["train_rows"], results["steps"]) == ("rpe", 60, 40)
    assert results["test_accuracy"] > 0.9 and results["test_majority"] == pytest.approx(1 / 3)
    assert "rpe, test: accuracy" in shown
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert [model.config.id2label[index] for index in range(3)] == CLASSES
    image = Dataset.from_parquet(str(data / "test.parquet"))[0]
    processor = ViTImageProcessor.from_pretrained(tmp_path)
    answer = pipeline("image-classification", model=str(tmp_path), image_processor=processor)(image["img"], top_k=1)
    assert answer[0]["label"] == CLASSES[image["kind"]]
    stage(build_parser().parse_args([str(tmp_path), "--repo_id", "user/stripes"]), tmp_path / "published")
    published = {path.name for path in (tmp_path / "published").iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "modeling_tnn.py"} <= published
    assert "training_args.bin" not in published
    card = (tmp_path / "published" / "README.md").read_text()
    assert f"| accuracy | {results['test_accuracy']:.4f} | test part of" in card
    assert "| learning_rate | 0.003 |" in card


def test_transformer_of_the_same_size(data, tmp_path):
    run_script("run_image_classification", *options(data, tmp_path), "--max_steps 1 --transformer --save_strategy no")
    assert read(tmp_path)["model"] == "transformer"
    assert isinstance(AutoModelForImageClassification.from_pretrained(tmp_path).config, ViTConfig)
    config, build = load_config("tnn-image-tiny"), AutoModelForImageClassification.from_config
    with torch.device("meta"):
        own, other = (build(one).num_parameters() for one in (config, vit_like(config)))
    assert 1 < own / other < 1.13  # the position encoders are extra


def test_refused(data, tmp_path):
    assert not unlike("run_image_classification", options(data, tmp_path / "out"), {
        "--label_column_name id": "with the columns id, img, kind",
        "--config_overrides width=3": "must be fields of TnnConfig, got width",
        "--push_to_hub": "publish the trained model with tnn push",
    })  # fmt: skip


def picture(width: int = 25, height: int = 19, mode: str = "RGB", seed: int = 0) -> Pictures.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Pictures.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).convert("RGB")


def drawn(count: int, seed: int = 0, mirrored: float = 0.0, **shape) -> torch.Tensor:
    """The pixels of different pictures."""
    set_seed(seed)
    rows = {"img": [picture(seed=index, **shape) for index in range(count)], "kind": [0] * count}
    pictures = script.Pictures(DatasetDict(train=Dataset.from_dict(rows)), "img", "kind")
    return pictures.prepare("train", ViTImageProcessor(size={"height": SIDE, "width": SIDE}), mirrored)[:][
        "pixel_values"
    ]


def test_pictures_of_any_size_and_colour():
    """Half of those that are flipped are mirrored; draws follow the seed."""
    for width, height, mode in ((25, 19, "RGB"), (7, 40, "L"), (1, 1, "RGB")):
        pixels = drawn(6, mode=mode, width=width, height=height)
        assert pixels.shape == (6, 3, SIDE, SIDE) and pixels.dtype == torch.float32 and pixels.isfinite().all()
    flipped, plain = drawn(72, mirrored=0.5), drawn(72)
    assert torch.equal(drawn(72, mirrored=0.5), flipped) and not torch.equal(drawn(72, 1, mirrored=0.5), flipped)
    same = [torch.equal(one, other) for one, other in zip(plain, flipped, strict=True)]
    mirrored = [torch.equal(one.flip(-1), other) for one, other in zip(plain, flipped, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)) and 20 < sum(same) < 52


def test_a_small_run_stops_and_resumes(data, tmp_path):
    given = [*options(data, tmp_path), "--augmentation flip --label_smoothing_factor 0.1 --logging_steps 1"]
    run_script("run_image_classification", *given, "--max_steps 4 --save_steps 2")
    (tmp_path / "model.safetensors").unlink()
    run_script("run_image_classification", *given, "--max_steps 8 --save_steps 4 --resume_from_checkpoint latest")
    results = read(tmp_path)
    assert (results["augmentation"], results["steps"], results["train_rows"]) == ("flip", 8, 72)
    log = read(tmp_path / "checkpoint-8", "trainer_state")["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) >= 4 and all(0 < loss < 2 for loss in losses)
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
