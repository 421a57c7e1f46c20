"""Kernels that are kept between passes are those that each pass would compute, until the parameters change."""

import copy
import pickle

import pytest
import torch
from torch import nn

from helpers.models import VARIANTS, image_config, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM, fixed_kernels, numerics
from modeling_tnn.channels import restricted
from modeling_tnn.fixed_kernels import KeptKernels
from modeling_tnn.tno import ToeplitzOperator

IDS = torch.randint(2, 99, (2, 23), generator=torch.Generator().manual_seed(0))


def model_of(tno_type="rpe", causal=True, **fields):
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields))


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The number of positions of each kernel that is computed."""
    lengths, compute = [], ToeplitzOperator.kernel_of

    def kernel_of(self, length, device=None, as_taps=False):
        lengths.append(length)
        return compute(self, length, device, as_taps)

    monkeypatch.setattr(ToeplitzOperator, "kernel_of", kernel_of)
    return lengths


@pytest.mark.parametrize("tno_type, causal", VARIANTS)
@torch.no_grad()
def test_every_operator_gives_the_same_values(tno_type, causal):
    model, mask = model_of(tno_type, causal), torch.ones_like(IDS)
    mask[0, :4] = 0
    lengths = (23, 7, 23, 1)
    expected = [model(IDS[:, :n], attention_mask=mask[:, :n]).logits for n in lengths]
    with model.fixed_kernels():
        found = [model(IDS[:, :n], attention_mask=mask[:, :n]).logits for n in lengths * 2]
    for one, other in zip(found, expected * 2, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_kernel_is_computed_once(made):
    model = model_of("fd")
    with model.fixed_kernels(), torch.inference_mode():
        for length in (23, 7, 23, 7):
            model(IDS[:, :length])
    assert made == [23, 23, 7, 7]
    with torch.no_grad():
        model(IDS)
    assert made == [23, 23, 7, 7, 23, 23]


def test_kernels_of_images_are_kept(made):
    config = image_config()
    model = seeded(TnnForImageClassification, config)
    pixels = torch.randn(2, config.num_channels, config.image_size, config.image_size)
    with torch.no_grad():
        expected = model(pixels).logits
        made.clear()
        with model.fixed_kernels():
            found = [model(pixels).logits for _ in range(2)]
    assert len(made) == 2 * config.num_hidden_layers  # rows and columns
    assert all(torch.equal(one, expected) for one in found)


def test_an_accelerator_keeps_them_too(made, monkeypatch):
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    model = model_of("fd", causal=False)
    with torch.no_grad():
        expected = model(IDS).logits
        with model.fixed_kernels():
            model(IDS)
            made.clear()
            torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert made == []


CHANGES = {
    "optimizer step": lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
    "load_state_dict": lambda model: model.load_state_dict({n: 1.5 * x for n, x in model.state_dict().items()}),
    "another dtype": lambda model: model.double(),
    "another parameter": lambda model: model.model.layers[0].gtu.tno.rpe.apply(renew),
}


def renew(module: nn.Module):
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(2 * parameter.detach()))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_give_new_kernels(change):
    model = model_of("rpe", decay=0.9)
    model(IDS, labels=IDS).loss.backward()
    with model.fixed_kernels(), torch.no_grad():
        before = model(IDS).logits
        CHANGES[change](model)
        found = model(IDS).logits
    with torch.no_grad():
        assert torch.equal(found, model(IDS).logits)
    assert not torch.equal(found.float(), before)


def test_gradients_flow_into_the_kernels():
    model = model_of()
    with model.fixed_kernels():
        with torch.no_grad():
            model(IDS)
        model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].gtu.tno.parameters())


def test_a_copy_keeps_nothing():
    model = model_of()
    with model.fixed_kernels(), torch.no_grad():
        model(IDS)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.model.layers[0].gtu.tno.kept_kernels is None
            assert torch.equal(twin(IDS).logits, model(IDS).logits)


def test_a_part_of_an_operator_keeps_nothing():
    """What a process of several computes may live longer than the context."""
    model = model_of()
    with model.fixed_kernels():
        assert restricted(model.model.layers[0].gtu.tno, range(4)).kept_kernels is None


def test_an_inner_context_leaves_the_outer_one(made):
    model = model_of()
    with model.fixed_kernels(), torch.no_grad():
        with model.fixed_kernels():
            model(IDS)
        model(IDS)
    assert len(made) == model.config.num_hidden_layers
    with pytest.raises(RuntimeError, match="stop"), model.fixed_kernels():
        raise RuntimeError("stop")
    assert all(layer.gtu.tno.kept_kernels is None for layer in model.model.layers)


def test_the_oldest_kernels_are_dropped(monkeypatch):
    monkeypatch.setattr(fixed_kernels, "MOST", 10)
    kept, operator, made = KeptKernels(), nn.Linear(1, 1), []

    def get(length):
        def make():
            made.append(length)
            return torch.zeros(length)

        return kept.get(length, operator, make)

    for length in (4, 5, 4, 3, 4, 5, 20, 20):
        assert get(length).numel() == length
    assert made == [4, 5, 3, 5, 20]


@torch.no_grad()
def test_generation_gives_the_same_tokens():
    model = model_of("rtf").double()
    expected = model.generate(IDS[:, :9], max_new_tokens=12, do_sample=False)
    with model.fixed_kernels():
        for _ in range(2):
            assert torch.equal(model.generate(IDS[:, :9], max_new_tokens=12, do_sample=False), expected)
