"""The flags of the Long Range Arena models: window, image, batch norm, positions, initialisation."""

import pytest
import torch

from helpers.heads import LanguageModelTests
from helpers.models import BIDIRECTIONAL, lively_language_model, padded, relative_error, seeded, tiny_config
from helpers.operators import random_input, random_operator
from modeling_tnn import TnnForSequenceClassification, TnnModel
from modeling_tnn.inputs import token_positions
from modeling_tnn.norms import BatchNorm
from modeling_tnn.tno_auto import COMBINATIONS
from modeling_tnn.tno_rpe import sinusoidal_embedding

LRA = {"norm_type": "batchnorm", "rpe_hidden_norm": False, "rpe_window": 10, "position_embedding": "sinusoidal"}


class TestLraForm(LanguageModelTests):
    """A batch norm counts the documents of packed rows together while it trains."""

    fields = LRA
    test_every_parameter_gets_a_gradient = None  # a bias before a batch norm has none


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_window_cuts_the_kernel(causal):
    """It is the whole kernel times a mask; `OperatorTests` and hypothesis compare its products."""
    operator, whole = random_operator("rpe", causal, rpe_window=5), random_operator("rpe", causal)
    for length in (1, 4, 5, 17, 63):
        inside = torch.arange(0 if causal else 1 - length, length).abs() < 5
        torch.testing.assert_close(operator.coefficients(length), whole.coefficients(length) * inside)


def test_taps_within_a_window():
    assert random_operator("rpe", True, rpe_window=20, decay=0.99).kernel_length(exact=True) == 20
    short = random_operator("rpe", True, rpe_window=1000, decay=0.5)
    assert short.kernel_length(exact=True) == 52
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
    for side in (1, 2, 5):
        v = random_input(2, side**2, operator.channels).requires_grad_()
        fast, released = operator(v), mix_as_released(operator, v, side)
        assert relative_error(fast, released) < 1e-12
        gradients = [torch.autograd.grad(y.square().sum(), [v, *operator.parameters()]) for y in (fast, released)]
        for actual, expected in zip(*gradients, strict=True):
            assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1.0)


def test_image_must_be_square():
    with pytest.raises(
        ValueError, match="number of tokens in a sequence must be a square with spatial_dims=2, got 17"
    ):
        grid_operator("rpe")(random_input(1, 17, 64))
    with pytest.raises(ValueError, match="`rows` and `columns`"):
        grid_operator("rpe").coefficients(16)


def test_axes_have_kernels_of_their_own():
    operator = grid_operator("rpe")
    assert not torch.equal(operator.rows.coefficients(8), operator.columns.coefficients(8))


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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_statistics_do_not_see_padding(causal):
    """Training: the outputs of the classifier, and what its batch norms remember, are those of the bare text."""
    text, outputs, memories = torch.randint(99, (23,)), [], []
    for left, right in ((0, 0), (6, 9)):
        model = seeded(TnnForSequenceClassification, tiny_config("rpe", causal, **LRA, hidden_dropout_prob=0.0))
        outputs.append(model.train()(**padded(text, left, right)).logits)
        memories.append(torch.cat([b.flatten() for name, b in model.named_buffers() if "running" in name]))
    assert relative_error(outputs[1], outputs[0]) < 5e-5
    assert relative_error(memories[1], memories[0]) < 5e-6 and len(memories[0]) == 2 * 5 * 32


def memories_of(model) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name or "batches" in name}


def test_packed_rows_have_the_statistics_of_their_batch():
    """Training: documents of many lengths in a row, one of a single token, as in one padded batch."""
    lengths = (1, 23, 4, 9)
    texts, found = [torch.randint(99, (length,)) for length in lengths], []
    rows, mask = torch.zeros(4, 23, dtype=torch.long), torch.zeros(4, 23, dtype=torch.long)
    for index, text in enumerate(texts):
        rows[index, : len(text)], mask[index, : len(text)] = text, 1
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    for given in (
        {"input_ids": rows, "attention_mask": mask},
        {"input_ids": torch.cat(texts)[None], "position_ids": positions},
    ):
        model = seeded(TnnModel, tiny_config("rpe", **LRA, hidden_dropout_prob=0.0)).train()
        hidden = model(**given).last_hidden_state
        found.append((hidden[mask == 1] if "attention_mask" in given else hidden[0], memories_of(model)))
    torch.testing.assert_close(found[1], found[0])


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


def test_order_matters_with_positions():
    """Without a kernel, a bag of words: only the positions can tell two orders apart."""
    text = torch.randint(99, (1, 9))
    for fields, differs in (({}, False), ({"position_embedding": "sinusoidal"}, True)):
        config = tiny_config("rpe", False, rpe_window=1, num_hidden_layers=1, **fields)
        model = seeded(TnnForSequenceClassification, config)
        change = (model(text).logits - model(text.flip(1)).logits).abs().max()
        assert (change > 1e-4) == differs


def test_initializer_of_the_gated_unit():
    model = seeded(TnnModel, tiny_config(initializer="normal_gtu", hidden_size=64))
    mixer, glu = model.layers[0].mixer, model.layers[0].glu
    for linear in (mixer.u_proj, mixer.v_proj, mixer.o_proj):
        assert linear.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)
        assert linear.bias.detach().std().item() == pytest.approx(0.02, rel=0.3)
    assert glu.up_proj.weight.abs().max().item() == pytest.approx(1 / 8, rel=0.01)


def test_batch_norm_model_is_saved(tmp_path):
    model = TnnModel(tiny_config("rpe", False, **LRA))
    for _ in range(3):
        model.train()(torch.randint(99, (4, 20)))
    model.save_pretrained(tmp_path)
    loaded, text = TnnModel.from_pretrained(tmp_path), torch.randint(99, (1, 20))
    assert torch.equal(loaded.eval()(text)[0], model.eval()(text)[0])


def test_generation_with_window_and_positions():
    """Cached = uncached, for a prompt in chunks too, beyond the window."""
    fields = {"rpe_window": 20, "decay": 0.9, "position_embedding": "sinusoidal"}
    model, prompts = lively_language_model(**fields), torch.randint(2, 99, (2, 30))
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompts, use_cache=False, **options)
    assert torch.equal(model.generate(prompts, **options), expected)
    assert torch.equal(model.generate(prompts, prefill_chunk_size=7, **options), expected)
