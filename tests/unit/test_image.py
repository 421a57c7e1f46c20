"""Image classification: the released form, any size, image processor, pipeline, Trainer, saving."""

import contextlib

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
    pipeline,
)

from helpers.heads import HeadTests
from helpers.models import BIDIRECTIONAL, image_config, relative_error, seeded, tiny_config
from modeling_tnn import TnnForImageClassification
from modeling_tnn.norms import SimpleRMSNorm


def released_forward(model, pixels):
    """The forward pass of the released image models, with dense matrices and loops over patches."""
    norm, size = SimpleRMSNorm(model.config.hidden_size), model.config.patch_size
    weight = model.model.patch_embedding.projection.weight.flatten(1)
    patches = [
        pixels[:, :, row : row + size, column : column + size].flatten(1) @ weight.t()
        for row in range(0, pixels.shape[2], size)
        for column in range(0, pixels.shape[3], size)
    ]
    x = torch.stack(patches, dim=1) + model.model.patch_embedding.projection.bias
    side = int(len(patches) ** 0.5)
    for layer in model.model.layers:
        mixer, tno = layer.mixer, layer.mixer.tno
        y = norm(x)
        v = torch.nn.functional.silu(mixer.v_proj(y)).unflatten(1, (side, side))
        mixed = torch.einsum("dij,bajd->baid", tno.rows.dense(side), v)
        mixed = mixed + torch.einsum("dij,bjad->biad", tno.columns.dense(side), v)
        x = x + mixer.o_proj(torch.nn.functional.silu(mixer.u_proj(y)) * mixed.flatten(1, 2))
        x = x + layer.glu(norm(x))
    return model.classifier(norm(x.mean(dim=1)))


class TestImageClassification(HeadTests):
    heads = {False: TnnForImageClassification}
    shapes = [(1, 3, 24, 20), (1, 3, 22, 22), (1, 1, 24, 24), (3, 24, 24), (1, 3, 0, 0)]
    multiple, given = "with 3 channels and a side that is a multiple of patch_size=4, got", torch.zeros(2, 3, 24, 24)
    refused = [*zip(({"pixel_values": torch.zeros(shape)} for shape in shapes), [multiple] * 5, strict=True)]
    refused += [
        ({}, "`pixel_values` must be a tensor of shape .*, got NoneType"),
        ({"pixel_values": given, "labels": [1, 2]}, "`labels` must be a tensor"),
        ({"pixel_values": given, "labels": torch.tensor([0, 3])}, "Entries .* num_labels=3.*, got 3"),
    ]

    def build(self, causal, **fields):
        return seeded(TnnForImageClassification, image_config(**fields))

    def batch(self):
        pixels = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels, "labels": torch.tensor([0, 2, 1])}


@pytest.mark.parametrize("tno_type", [name for name in BIDIRECTIONAL if name != "rpe"])
class TestOperators(TestImageClassification):
    """Gradients reach every parameter; what is saved is what is loaded."""

    @pytest.fixture(autouse=True)
    def operator_of_images(self, tno_type):
        self.tno_type = tno_type

    def build(self, causal, **fields):
        return super().build(causal, tno_type=self.tno_type, **fields)

    test_outputs = test_half_precision = test_refused = None


def test_model_is_the_released_one(tmp_path):
    """At the trained size and others. The model of tokens refuses it by name."""
    model = seeded(TnnForImageClassification, image_config())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="damaged or belong to another model: embed_tokens"):
        AutoModel.from_pretrained(tmp_path)
    model.double()
    for size in (4, 20, 24, 36):
        pixels = torch.randn(2, 3, size, size).double()
        assert relative_error(model(pixels).logits, released_forward(model, pixels)) < 1e-12


def test_input_embeddings_are_the_patches():
    """PEFT and checkpointing of frozen models need the input embeddings."""
    model = TnnForImageClassification(image_config())
    assert model.get_input_embeddings() is model.model.get_input_embeddings() is model.model.patch_embedding
    model.requires_grad_(False)
    model.enable_input_require_grads()
    assert model(torch.randn(1, 3, 24, 24)).logits.requires_grad


def striped_pictures() -> list[tuple[Image.Image, int]]:
    """Vertical, horizontal and diagonal stripes of random phase, with their labels."""
    rng, rows = np.random.default_rng(0), []
    y, x = np.mgrid[:24, :24]
    for index in range(96):
        label = index % 3
        wave = np.sin((x, y, x + y)[label] * 1.3 + rng.uniform(0, 6))
        noisy = 128 + 80 * wave[..., None] + rng.normal(0, 10, (24, 24, 3))
        rows.append((Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), label))
    return rows


def test_training_and_pipeline(tmp_path):
    """With an image processor, Trainer and the pipeline: it learns which way stripes run."""
    torch.manual_seed(0)
    striped = striped_pictures()
    processor = ViTImageProcessor(size={"height": 24, "width": 24})
    rows = [{"pixel_values": processor(image)["pixel_values"][0], "labels": label} for image, label in striped]
    labels = {0: "vertical", 1: "horizontal", 2: "diagonal"}
    model = TnnForImageClassification(image_config(id2label=labels, label2id={v: k for k, v in labels.items()}))
    arguments = TrainingArguments(tmp_path / "run", num_train_epochs=6, learning_rate=3e-3, save_strategy="no",
                                  per_device_train_batch_size=16, dataloader_pin_memory=False)  # fmt: skip
    Trainer(model, arguments, train_dataset=Dataset.from_list(rows[:84]).with_format("torch")).train()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    # Without torchvision, transformers 5.17 can make an image processor, but not find one.
    with contextlib.suppress(ImportError):
        processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert processor.size["height"] == 24
    classify = pipeline("image-classification", model=str(tmp_path), image_processor=processor)
    answers = classify([image.resize((48, 48)) for image, _ in striped[84:]], top_k=1)
    assert [answer[0]["label"] for answer in answers] == [labels[label] for _, label in striped[84:]]


def test_refused_configurations():
    hybrid = {"image_size": 8, "patch_size": 1, "layer_types": ["toeplitz", "full_attention"]}
    for config, message in (
        (image_config(max_position_embeddings=64), "`max_position_embeddings` must be .* patches, .24 / 4.*, got 64"),
        (image_config(image_size=25), "`max_position_embeddings` must be .* patches, .25 / 4.*, got 36"),
        (tiny_config(), "`causal` must be False for TnnForImageClassification, got True"),
        (tiny_config(causal=False, **hybrid), "`layer_types` must be 'toeplitz' for all layers of images, got"),
    ):
        with pytest.raises(ValueError, match=message):
            TnnForImageClassification(config)
