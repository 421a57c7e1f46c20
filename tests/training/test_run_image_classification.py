"""Training an image classifier by its script: pictures of stripes, at a size that takes seconds."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pictures
from transformers import (
    AutoModelForImageClassification,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
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
timm = pytest.mark.skipif(find_spec("timm") is None, reason="make test-slow PARTS=images has timm")


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


def drawn(count: int, seed: int = 0, name: str = "deit", **shape) -> torch.Tensor:
    """The pixels of different pictures."""
    set_seed(seed)
    to_pixels = script.training_pixels(name, script.processor_of(name, SIDE), SIDE)
    return torch.stack([to_pixels(picture(seed=index, **shape)) for index in range(count)])


@pytest.mark.parametrize("name", ["none", "flip", pytest.param("deit", marks=timm)])
def test_pictures_of_any_size_and_colour(name):
    """Half of those that are flipped are mirrored; draws follow the seed."""
    for width, height, mode in ((25, 19, "RGB"), (7, 40, "L"), (1, 1, "RGB")):
        pixels = drawn(6, name=name, mode=mode, width=width, height=height)
        assert pixels.shape == (6, 3, SIDE, SIDE) and pixels.dtype == torch.float32 and pixels.isfinite().all()
    assert torch.equal(drawn(4, name=name), drawn(4, name=name))
    assert torch.equal(drawn(4, name=name), drawn(4, seed=1, name=name)) == (name == "none")
    if name == "flip":
        pairs = list(zip(drawn(72, name="none"), drawn(72, name="flip"), strict=True))
        same = [torch.equal(one, other) for one, other in pairs]
        mirrored = [torch.equal(one.flip(-1), other) for one, other in pairs]
        assert all(a != b for a, b in zip(same, mirrored, strict=True)) and 20 < sum(same) < 52


@timm
def test_deit_is_the_published_recipe(monkeypatch):
    """Parts from 8% of the picture, bicubic, mirrored, RandAugment, and noise in a quarter of the pictures.

    Where timm's own bound of a magnitude is 10, Pillow refuses to keep no bits of a colour.
    """
    steps = {type(step).__name__: step for step in script.deit(SIDE).transforms}
    crop, drawing = steps["RandomResizedCropAndInterpolation"], steps["RandAugment"]
    assert (crop.scale, crop.interpolation.value) == ((0.08, 1.0), "bicubic")
    assert {(step.prob, step.magnitude, step.magnitude_std) for step in drawing.ops} == {(0.5, 9, 0.5)}
    assert (steps["RandomHorizontalFlip"].p, steps["RandomErasing"].probability) == (0.5, 0.25)
    for step in drawing.ops:
        assert step.magnitude_max < 10
        monkeypatch.setattr(step, "prob", 1.0)
        monkeypatch.setattr(step, "magnitude", 20)
        assert step(picture()).size == (25, 19)


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(ImportError, match="--augmentation deit needs timm .*: pip install"):
        script.deit(SIDE)


def trainer(tmp_path, **options) -> script.MixingTrainer:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=SIDE, patch_size=8, num_labels=4))
    training = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **options)
    rows = [{"pixel_values": drawn(1)[0], "labels": label % 4} for label in range(12)]
    return script.MixingTrainer(model=model, args=training, train_dataset=rows, eval_dataset=rows)


@timm
def test_loss_of_the_mixed_targets(tmp_path, smoothing=0.1):
    """In training the targets are mixed as the pixels are: the pixels of a picture have the value of its class."""
    mixing_trainer = trainer(tmp_path, label_smoothing_factor=smoothing)
    labels = torch.arange(4)
    pixels = labels.float()[:, None, None, None].expand(-1, 3, SIDE, SIDE)
    read = []
    model = mixing_trainer.model.train()
    model.register_forward_pre_hook(lambda module, args, inputs: read.append(inputs["pixel_values"]), with_kwargs=True)
    for seed in range(8):
        np.random.seed(seed)
        inputs = {"pixel_values": pixels.clone(), "labels": labels}
        loss, outputs = mixing_trainer.compute_loss(model, inputs, return_outputs=True)
        share = read[-1].mean(dim=(1, 2, 3)) / 3  # classes c and 3 - c are mixed
        targets = torch.zeros(4, 4)
        for c in range(4):
            own = (share[c] * 3 - (3 - c)) / (2 * c - 3)
            targets[c, c] += own
            targets[c, 3 - c] += 1 - own
        smoothed = (1 - smoothing) * targets + smoothing / 4
        expected = -(smoothed * outputs.logits.log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert {bool((one == one.round()).all()) for one in read} == {True, False}, "CutMix and mixup"
    plain = mixing_trainer.compute_loss(model.eval(), {"pixel_values": pixels, "labels": labels})
    torch.testing.assert_close(plain, F.cross_entropy(model(pixel_values=pixels).logits, labels))


@timm
def test_odd_batches(tmp_path):
    """The last batch of an epoch is left out, because it may be odd; odd batches are refused."""
    assert len(trainer(tmp_path, per_device_train_batch_size=10).get_train_dataloader()) == 1
    with pytest.raises(ValueError, match="--per_device_train_batch_size must be even with mixed pictures, got 3"):
        trainer(tmp_path, per_device_train_batch_size=3)


def test_evaluation_sees_the_middle_of_a_picture():
    """As in DeiT: the shorter side has 256 / 224 of the model's side."""
    rows = np.zeros((32, 64, 3), dtype=np.uint8)
    rows[:, 16:48] = 255
    processor = script.processor_of("deit", 28)
    found = processor(Pictures.fromarray(rows), return_tensors="pt")["pixel_values"]
    white = (1 - torch.tensor(script.IMAGENET_MEAN)) / torch.tensor(script.IMAGENET_DEVIATION)
    assert found.shape == (1, 3, 28, 28)
    torch.testing.assert_close(found[0].mean(dim=(1, 2)), white)


@timm
def test_a_small_augmented_run_stops_and_resumes(data, tmp_path):
    given = [*options(data, tmp_path), "--augmentation deit --label_smoothing_factor 0.1 --logging_steps 1"]
    run_script("run_image_classification", *given, "--max_steps 4 --save_steps 2")
    (tmp_path / "model.safetensors").unlink()
    run_script("run_image_classification", *given, "--max_steps 8 --save_steps 4 --resume_from_checkpoint latest")
    results = read(tmp_path)
    assert (results["augmentation"], results["steps"], results["train_rows"]) == ("deit", 8, 72)
    log = read(tmp_path / "checkpoint-8", "trainer_state")["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) >= 4 and all(0.5 < loss < 2 for loss in losses)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["do_center_crop"] and saved["size"] == {"shortest_edge": 27}
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
