"""Augmentation of training pictures: values and shapes, draws that follow the seed, mixed targets, and small runs."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pictures
from safetensors.torch import load_file
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from helpers.scripts import run_script
from tnn_scripts import run_image_classification
from tnn_scripts.common.mixing_trainer import MixingTrainer, RepeatingSampler
from tnn_scripts.data import augmentation, mixing, rand_augment
from tnn_scripts.data.augmentation import AUGMENTATIONS, augmented_pixels, build_processor

SIDE = 16
DEIT = AUGMENTATIONS["deit"]


def picture(width: int = 25, height: int = 19, mode: str = "RGB", seed: int = 0) -> Pictures.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Pictures.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).convert("RGB")


def drawn(count: int, seed: int = 0, name: str = "deit", **shape) -> torch.Tensor:
    torch.manual_seed(seed)
    images = [picture(seed=index, **shape) for index in range(count)]
    return augmented_pixels(images, AUGMENTATIONS[name], build_processor(AUGMENTATIONS[name], SIDE), SIDE)


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("width, height", [(25, 19), (7, 40), (16, 16), (1, 1)])
def test_pictures_of_any_size_and_colour(name, mode, width, height):
    pixels = drawn(6, name=name, mode=mode, width=width, height=height)
    assert pixels.shape == (6, 3, SIDE, SIDE) and pixels.dtype == torch.float32 and pixels.isfinite().all()


def test_the_draws_follow_the_seed():
    first, again, other = drawn(4), drawn(4), drawn(4, seed=1)
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(0)
    twice = augmented_pixels([picture()] * 2, DEIT, build_processor(DEIT, SIDE), SIDE)
    assert not torch.equal(*twice)


@pytest.mark.parametrize("operation", rand_augment.OPERATIONS)
@pytest.mark.parametrize("strength", [0.0, 0.85, 1.0])
def test_operations_keep_the_size(operation, strength):
    before = picture()
    torch.manual_seed(0)
    after = rand_augment.OPERATIONS[operation](before, strength)
    assert (after.size, after.mode) == (before.size, "RGB")
    unchanged = np.array_equal(np.asarray(before), np.asarray(after))
    always = operation in ("auto_contrast", "equalize", "invert", "posterize")
    assert unchanged is (strength == 0 and not always)


def test_strength_of_the_operations():
    """Values by hand."""
    grey = Pictures.new("RGB", (20, 20), (100, 100, 100))
    operations = rand_augment.OPERATIONS
    assert operations["solarize_add"](grey, 0.9).getpixel((0, 0)) == (199,) * 3
    assert operations["solarize"](grey, 0.9).getpixel((0, 0)) == (155,) * 3  # of 26 and more the inverse
    assert operations["posterize"](grey, 0.9).getpixel((0, 0)) == (0,) * 3  # one bit
    torch.manual_seed(0)
    assert {operations["brightness"](grey, 0.9).getpixel((0, 0))[0] for _ in range(20)} == {19, 181}
    shifted = {operations["translate_x"](grey, 0.9).getpixel((3, 9)) for _ in range(20)}
    assert shifted == {(100,) * 3, rand_augment.FILL}


def test_half_of_the_draws_of_rand_augment_do_nothing(monkeypatch):
    counted = []
    operation = {"one": lambda image, strength: counted.append(strength) or image}
    monkeypatch.setattr(rand_augment, "OPERATIONS", operation)
    torch.manual_seed(0)
    for _ in range(1000):
        rand_augment.rand_augment(picture())
    assert 900 < len(counted) < 1100 and max(counted) <= 1
    assert np.mean(counted) == pytest.approx(0.9, abs=0.005) and np.std(counted) == pytest.approx(0.05, abs=0.01)


def test_random_parts():
    """Of at least 8% of the picture, at most a third wider or higher; a thin picture has a part too."""
    boxes = []

    class Recorded:
        width, height = 60, 40

        def resize(self, size, resample, box):
            boxes.append(box)

    torch.manual_seed(0)
    for _ in range(300):
        augmentation.random_part(Recorded(), SIDE)
    left, top, right, bottom = np.array(boxes).T
    assert min(left) >= 0 and min(top) >= 0 and max(right) <= 60 and max(bottom) <= 40
    shares, ratios = (right - left) * (bottom - top) / 2400, (right - left) / (bottom - top)
    assert 0.07 < shares.min() < 0.15 and shares.max() > 0.7
    assert 0.65 < ratios.min() < 0.85 and 1.2 < ratios.max() < 1.5
    assert augmentation.random_part(picture(3, 200), SIDE).size == (SIDE, SIDE)


def test_a_quarter_of_the_pictures_is_erased_in_part():
    torch.manual_seed(0)
    plain = torch.full((400, 3, SIDE, SIDE), 7.0)
    erased = torch.stack([augmentation.erase(one) for one in plain])
    changed = (erased != 7).all(dim=1).flatten(1).float().mean(dim=1)  # (400,)
    assert (plain == 7).all() and 70 < (changed > 0).sum() < 130
    assert changed[changed > 0].min() >= 0.01 and changed.max() < 0.4
    noise = erased[erased != 7]
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_mixed_targets_are_the_shares_of_the_pixels(rows):
    """Each picture has the value of its class: then the mean of the mixed pixels is that of the target."""
    labels = torch.arange(rows)
    pixels = labels.float()[:, None, None, None].expand(-1, 3, SIDE, SIDE).clone()
    torch.manual_seed(0)
    kinds = set()
    for _ in range(40):
        mixed, targets = mixing.mix(pixels, labels, num_labels=7)
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(rows))
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ torch.arange(7.0), atol=1e-4, rtol=0)
        kinds.add(bool((mixed == mixed.round()).all()))
    assert kinds == ({True} if rows == 1 else {False, True})
    assert torch.equal(pixels[:, 0, 0, 0], labels.float())


@pytest.mark.parametrize(
    "share, centre, rectangle",
    [
        (0.75, [0.5, 0.5], (slice(4, 12), slice(6, 18))),
        (0.75, [0.0, 0.99], (slice(0, 4), slice(17, 24))),
        (1.0, [0.5, 0.5], (slice(0), slice(0))),
        (0.0, [0.5, 0.5], (slice(0, 16), slice(0, 24))),
    ],
)
def test_rectangle_of_cutmix(share, centre, rectangle):
    pixels = torch.randn(3, 2, 16, 24)
    expected = pixels.clone()
    expected[..., rectangle[0], rectangle[1]] = pixels.flip(0)[..., rectangle[0], rectangle[1]]
    mixed, left = mixing.cutmix(pixels, share, centre)
    assert torch.equal(mixed, expected)
    assert left == pytest.approx(1 - expected[0, 0, rectangle[0], rectangle[1]].numel() / (16 * 24))


def trainer(tmp_path, **options) -> MixingTrainer:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=SIDE, patch_size=8, num_labels=4))
    training = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **options)
    rows = [{"pixel_values": drawn(1)[0], "labels": label % 4} for label in range(12)]
    return MixingTrainer(model=model, args=training, train_dataset=rows, eval_dataset=rows)


def test_loss_of_the_mixed_targets(tmp_path, monkeypatch):
    """The cross entropy of smoothed, mixed targets in training; of the classes in evaluation."""
    mixing_trainer = trainer(tmp_path, label_smoothing_factor=0.1)
    batch = {"pixel_values": drawn(4), "labels": torch.arange(4)}
    model = mixing_trainer.model.train()
    torch.manual_seed(3)
    loss, outputs = mixing_trainer.compute_loss(model, dict(batch), return_outputs=True)
    torch.manual_seed(3)
    pixels, targets = mixing.mix(batch["pixel_values"], batch["labels"], 4)
    logits = model(pixel_values=pixels).logits
    torch.testing.assert_close(outputs.logits, logits)
    smoothed = 0.9 * targets + 0.1 / 4
    torch.testing.assert_close(loss, -(smoothed * logits.log_softmax(-1)).sum(-1).mean())
    plain = mixing_trainer.compute_loss(model.eval(), dict(batch))
    torch.testing.assert_close(
        plain, F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, torch.arange(4))
    )


def test_accumulated_steps_are_one_of_the_whole_batch(tmp_path, monkeypatch):
    """Without mixing: of a peer whose own loss Trainer would not divide."""
    monkeypatch.setattr("tnn_scripts.common.mixing_trainer.mix", lambda pixels, labels, count: (pixels, labels))
    weights = []
    for batch, accumulated in ((12, 1), (4, 3)):
        torch.manual_seed(0)
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "optim": "sgd"}
        one = trainer(tmp_path, max_steps=1, learning_rate=0.1, max_grad_norm=0.0, **options)
        one.train()
        weights.append(one.model.classifier.weight.detach().clone())
    torch.testing.assert_close(*weights)


def test_each_picture_comes_three_times():
    sampler = RepeatingSampler(10, seed=0)
    first = list(sampler)
    assert len(sampler) == len(first) == 10 and list(sampler) == first
    assert [first.count(row) for row in dict.fromkeys(first)] == [3, 3, 3, 1]
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_evaluation_sees_the_middle_of_a_picture():
    """As in DeiT: the shorter side has 256 / 224 of the model's side."""
    rows = np.zeros((32, 64, 3), dtype=np.uint8)
    rows[:, 16:48] = 255
    image = Pictures.fromarray(rows)
    processor = build_processor(DEIT, 28)
    first, again = (processor(image, return_tensors="pt")["pixel_values"] for _ in range(2))
    assert first.shape == (1, 3, 28, 28) and torch.equal(first, again)
    white = (1 - torch.tensor(augmentation.IMAGENET_MEAN)) / torch.tensor(augmentation.IMAGENET_DEVIATION)
    torch.testing.assert_close(first[0].mean(dim=(1, 2)), white)


@pytest.fixture(scope="module")
def data(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    features = Features({"img": Image(), "kind": ClassLabel(names=["vertical", "horizontal", "diagonal"])})
    rows = [{"img": image, "kind": label} for image, label in pictures]
    for split, part in {"train": rows[:72], "test": rows[72:]}.items():
        Dataset.from_list(part, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def options(data, output, *more) -> list:
    sizes = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,rpe_dim=8,image_size=24,patch_size=4"
    given = ["--config_name", "tnn-image-tiny", "--config_overrides", sizes + ",max_position_embeddings=36"]
    given += ["--dataset_name", data, "--output_dir", output, "--augmentation", "deit", "--report_to", "none"]
    given += ["--per_device_train_batch_size", 12, "--learning_rate", 3e-3, "--label_smoothing_factor", 0.1]
    return [*given, *more]


def test_a_small_run_stops_and_resumes(data, tmp_path, monkeypatch):
    changed = []

    def recorded(images, *others):
        changed.extend(images)
        return augmented_pixels(images, *others)

    monkeypatch.setattr(run_image_classification, "augmented_pixels", recorded)
    logged = ["--logging_steps", 1]
    run_script("run_image_classification", *options(data, tmp_path, "--max_steps", 4, "--save_steps", 2, *logged))
    (tmp_path / "model.safetensors").unlink()
    rest = ["--max_steps", 8, "--save_steps", 4, *logged, "--resume_from_checkpoint", "latest"]
    run_script("run_image_classification", *options(data, tmp_path, *rest))
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert (results["augmentation"], results["steps"], results["train_rows"]) == ("deit", 8, 72)
    log = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) >= 4 and all(0.5 < loss < 2 for loss in losses)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["do_center_crop"] and saved["size"] == {"shortest_edge": 27}
    assert len(changed) <= 120  # ten batches of twelve, of which two were loaded ahead; no picture of the evaluations
    assert all(value.isfinite().all() for value in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.slow
def test_it_learns_from_mixed_pictures(data, tmp_path):
    run_script("run_image_classification", *options(data, tmp_path, "--max_steps", 150, "--save_strategy", "no"))
    assert json.loads((tmp_path / "all_results.json").read_text())["test_accuracy"] > 0.6
