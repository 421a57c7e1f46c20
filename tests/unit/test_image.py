"""Image classification, and the flags of the Long Range Arena models: window, image, batch norm, positions, start."""

import pytest
import torch
from transformers import AutoModel

from helpers.heads import HeadTests, LayerTests
from helpers.models import BIDIRECTIONAL, checkpoint_activations, image_config, relative_error, seeded, tiny_config
from helpers.operators import random_input, random_operator
from modeling_tnn import TnnForImageClassification, TnnModel, numerics
from modeling_tnn.inputs import token_positions
from modeling_tnn.norms import BatchNorm, SimpleRMSNorm
from modeling_tnn.position_encoder import sinusoidal_embedding
from modeling_tnn.tno_auto import COMBINATIONS


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


LRA = {"norm_type": "batchnorm", "rpe_hidden_norm": False, "rpe_window": 10, "position_embedding": "sinusoidal"}


class TestLraForm(LayerTests):
    """A batch norm counts the documents of packed rows together while it trains."""

    fields = LRA
    test_every_parameter_gets_a_gradient = None  # a bias before a batch norm has none


def test_window_cuts_the_kernel():
    """It is the whole kernel times a mask; `OperatorTests` and hypothesis compare its products."""
    for causal in (True, False):
        operator, whole = random_operator("rpe", causal, rpe_window=5), random_operator("rpe", causal)
        for length in (1, 4, 5, 17, 63):
            inside = torch.arange(0 if causal else 1 - length, length).abs() < 5
            torch.testing.assert_close(operator.coefficients(length), whole.coefficients(length) * inside)
    for window, decay, taps in ((20, 0.99, 20), (1000, 0.5, 52)):
        assert random_operator("rpe", True, rpe_window=window, decay=decay).kernel_length(exact=True) == taps
    assert random_operator("rpe", True, rpe_window=7, decay=0.9, learnable_decay=True).kernel_length() == 7


def grid_operator(tno_type, spatial_mixing="product"):
    fields = {"spatial_dims": 2, "spatial_mixing": spatial_mixing, "rtf_state_size": 5, "ski_rank": 4}
    return random_operator(tno_type, False, **fields)


def mix_as_released(operator, v, side):
    """Each axis by a loop over the lines of the image, both orders of the product."""
    image = v.unflatten(1, (side, side))

    def rows(x):
        return torch.stack([operator.rows(x[:, line]) for line in range(side)], dim=1)

    def columns(x):
        return torch.stack([operator.columns(x[:, :, line]) for line in range(side)], dim=2)

    if operator.mixing == "sum":
        return (rows(image) + columns(image)).flatten(1, 2)
    return (columns(rows(image)) + rows(columns(image))).flatten(1, 2)


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("tno_type", BIDIRECTIONAL)
def test_image_mixer(tno_type, combination):
    """It is what the released code computes, line by line, values and gradients."""
    operator = grid_operator(tno_type, combination)
    assert not torch.equal(operator.rows.coefficients(8), operator.columns.coefficients(8))
    for side in (1, 2, 5):
        v = random_input(2, side**2, operator.channels).requires_grad_()
        fast, released = operator(v), mix_as_released(operator, v, side)
        assert relative_error(fast, released) < 1e-12
        gradients = [torch.autograd.grad(y.square().sum(), [v, *operator.parameters()]) for y in (fast, released)]
        for actual, expected in zip(*gradients, strict=True):
            assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1.0)


def test_image_must_be_square():
    with pytest.raises(ValueError, match="number of tokens .* must be a square with spatial_dims=2, got 17"):
        grid_operator("rpe")(random_input(1, 17, 64))
    with pytest.raises(ValueError, match="`rows` and `columns`"):
        grid_operator("rpe").coefficients(16)


def test_batch_norm_counts_real_tokens_only():
    torch.manual_seed(0)
    x, mask = torch.randn(3, 7, 4), torch.ones(3, 7)
    mask[0, :4], mask[2, 5:] = 0, 0
    norm, bare = BatchNorm(4), torch.nn.BatchNorm1d(4)
    y = norm(x, mask)
    torch.testing.assert_close(y[mask.bool()], bare(x[mask.bool()]))
    torch.testing.assert_close(norm.running_var, bare.running_var)
    assert y[mask == 0].abs().max() == 0
    norm.eval(), bare.eval()
    torch.testing.assert_close(norm(x, mask), bare(x.flatten(0, 1)).view_as(x))
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("hosts", [("cpu",), ()], ids=["host", "accelerator"])
def test_statistics_of_a_batch_norm(hosts, monkeypatch, tmp_path):
    """Checkpointed layers count a batch once, halves lose no small change, and a batch of padding is none."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
    config, mask = tiny_config("rpe", **LRA, hidden_dropout_prob=0.0, use_cache=False), torch.ones(3, 9).long()
    mask[:, 6:] = 0
    for real in (mask, None):
        found = []
        for reentrant in (None, False, True):
            model = seeded(TnnModel, config).train()
            if reentrant is not None:
                checkpoint_activations(model, {"use_reentrant": reentrant})
            for seed in range(2):
                ids = torch.randint(99, (3, 9), generator=torch.Generator().manual_seed(seed))
                model(ids, attention_mask=real).last_hidden_state.square().sum().backward()
            found.append(dict(model.named_buffers()))
        assert [name for name in found[0] if "running" in name]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])
    before = {name: buffer.clone() for name, buffer in found[2].items() if "running" in name}
    model(ids, attention_mask=torch.zeros_like(mask)).last_hidden_state.sum().backward()
    assert all(torch.equal(buffer, model.get_buffer(name)) for name, buffer in before.items())
    model.save_pretrained(tmp_path)
    halves = [TnnModel.from_pretrained(tmp_path, dtype=torch.bfloat16), model.half()]
    assert all(torch.equal(buffer, half.get_buffer(name)) for half in halves for name, buffer in before.items())
    assert halves[0].train()(ids, mask).last_hidden_state.dtype == torch.bfloat16
    norm = BatchNorm(1).bfloat16().train()
    for _ in range(100):
        norm(torch.tensor([[[0.0], [2.0]]]).bfloat16())
    torch.testing.assert_close(norm.running_mean, 1 - torch.tensor([0.9**100]))


def test_packed_rows_have_the_statistics_of_their_batch():
    """Training: documents of many lengths in a row, one of a single token, as with padding behind or around them."""
    lengths = (1, 23, 4, 9)
    texts, found = [torch.randint(99, (length,)) for length in lengths], []
    rows, mask = torch.randint(99, (4, 26)), torch.zeros(4, 26, dtype=torch.long)
    for index, text in enumerate(texts):
        rows[index, index : index + len(text)], mask[index, index : index + len(text)] = text, 1
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    behind = (torch.arange(23) < torch.tensor(lengths)[:, None]).long()
    for ids, real in ((padded, behind), (rows, mask), (torch.cat(texts)[None], None)):
        model = seeded(TnnModel, tiny_config("rpe", **LRA, hidden_dropout_prob=0.0)).train()
        given = {"position_ids": positions} if real is None else {"attention_mask": real}
        hidden = model(ids, **given).last_hidden_state
        memory = {n: b for n, b in model.named_buffers() if "running" in n or "batches" in n}
        assert len(memory) == 3 * 5
        found.append((hidden[0] if real is None else hidden[real == 1], memory))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_positions():
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    tokens = torch.zeros(2, 4)
    assert token_positions(mask, 2, tokens).tolist() == [[0, 1, 1, 2], [2, 3, 4, 5]]
    assert token_positions(None, 2, tokens).tolist() == [[2, 3, 4, 5]]
    encoding = sinusoidal_embedding(torch.tensor([[0, 3]]), 5, torch.float64)
    rates = [1, 1, 10000 ** (-2 / 5), 10000 ** (-2 / 5), 10000 ** (-4 / 5)]
    waves = [f(3 * torch.tensor(rate)) for f, rate in zip((torch.sin, torch.cos) * 3, rates, strict=False)]
    torch.testing.assert_close(encoding[0, 1], torch.stack(waves).double(), rtol=1e-6, atol=1e-6)
    assert encoding[0, 0].tolist() == [0, 1, 0, 1, 0]
