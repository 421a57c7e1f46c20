"""The kernels of all layers at once, as an accelerator computes them: equal to those that each layer makes itself."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from helpers.models import VARIANTS, checkpoint_activations, image_config, relative_error, seeded, slow, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM, numerics
from modeling_tnn.kernels.stacking import kernels_of_layers
from modeling_tnn.tno import NO_CONTEXT

FIELDS = {
    "rpe": [{"decay": None}, {"learnable_decay": True}, {"rpe_window": 9, "rpe_input": "sinusoidal"},
            {"norm_type": "layernorm", "rpe_act": "silu", "rpe_residual": True, "rpe_input": "normalized"}],
    "fd": [{"fd_resolution": 16, "fd_input": "cos", "norm_type": "gatedrmsnorm"}],
    "rtf": [{"rtf_constraint": None, "rtf_num_denominators": None}, {"rtf_truncation_length": 12}],
}  # fmt: skip
CASES = [(*variant, {}) for variant in VARIANTS] + [(name, True, one) for name in FIELDS for one in FIELDS[name]]


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())


def model_of(tno_type="rpe", causal=True, **fields):
    """Three layers, of which every parameter differs from its initial value and from that of the other layers."""
    config = tiny_config(tno_type, causal, num_hidden_layers=3, hidden_dropout_prob=0.0, **fields)
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def kernels(model, length: int = 11, device: str = "cpu") -> list:
    """As `TnnModel` asks for them."""
    hidden_states = torch.zeros(1, length, model.config.hidden_size, device=device)
    layers = model.model.layers
    return kernels_of_layers(layers, hidden_states, NO_CONTEXT)


def is_stacked(model) -> bool:
    return all(kernel is not None for kernel in kernels(model))


def outcome(model, ids: torch.Tensor, **options) -> dict:
    """The logits and the gradients of a training step."""
    model.zero_grad()
    outputs = model.train()(ids, labels=ids, **options)
    outputs.loss.backward()
    return {"logits": outputs.logits} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict, expected: dict, tolerance: float = 1e-12):
    assert found.keys() == expected.keys()
    # A gradient that is zero but for rounding is compared with the others.
    scale = max(tensor.abs().max().item() for name, tensor in expected.items() if name != "logits")
    for name, tensor in expected.items():
        least = tensor.abs().max().item() if name == "logits" else max(tensor.abs().max().item(), 1e-3 * scale)
        assert relative_error(found[name], tensor, least) <= tolerance, name


@pytest.mark.parametrize(("tno_type", "causal", "fields"), CASES[::2] + slow(*CASES[1::2]))
def test_values_and_gradients(tno_type, causal, fields, monkeypatch):
    for length, dtype, tolerance in ((1, torch.float64, 1e-12), (17, torch.float64, 1e-12), (63, torch.float32, 2e-5)):
        model = model_of(tno_type, causal, **fields).to(dtype)
        ids = torch.randint(99, (2, length), generator=torch.Generator().manual_seed(0))
        before = copy.deepcopy(model.state_dict())
        monkeypatch.setattr(numerics, "HOST_DEVICES", ("cpu",))
        expected = outcome(model, ids)
        assert not is_stacked(model)
        monkeypatch.setattr(numerics, "HOST_DEVICES", ())
        assert is_stacked(model)
        assert_equal(outcome(model, ids), expected, tolerance)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        for parameter in model.parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("tno_type", ["rpe", "rtf"])
def test_frozen_layers(tno_type, accelerator):
    """All of them: no gradient, as for adapters elsewhere."""
    model, ids = model_of(tno_type).double(), torch.arange(22).view(2, 11)
    expected = outcome(model, ids)
    for layer in model.model.layers:
        layer.mixer.tno.requires_grad_(False)
    assert is_stacked(model) and not kernels(model)[0].requires_grad
    assert_equal(outcome(model, ids), {name: one for name, one in expected.items() if ".tno." not in name})


def test_checkpointed_layers_make_their_own(accelerator):
    model = model_of().double()
    ids = torch.arange(22).view(2, 11)
    expected = outcome(model, ids)
    for reentrant in (False, True):
        checkpoint_activations(model.train(), {"use_reentrant": reentrant})
        assert not is_stacked(model)
        assert_equal(outcome(model, ids), expected)
        assert is_stacked(model.eval())


@pytest.mark.parametrize("tno_type", ["ski", "rtf"])
def test_images(tno_type, monkeypatch):
    model = seeded(TnnForImageClassification, image_config(tno_type)).double()
    pixels, labels = torch.randn(2, 3, 24, 24).double(), torch.tensor([0, 2])
    results = []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        model.zero_grad()
        outputs = model(pixels, labels=labels)
        outputs.loss.backward()
        results.append({"logits": outputs.logits} | {name: p.grad for name, p in model.named_parameters()})
    assert all(pair is not None for pair in kernels(model, 36))
    assert_equal(results[1], results[0])


def encoder(model, layer: int = 1):
    return model.model.layers[layer].mixer.tno.rpe


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **given):
        assert given["context"].kernel is None
        return self.layer(hidden_states, **given)


class OfTheUser(nn.Module):
    def forward(self, x):
        return 2 * x


def replace(module, name):
    """A method of the user's that gives twice as much."""
    method = getattr(module, name)
    setattr(module, name, lambda *given: 2 * method(*given))


def activation(model, act):
    for layer in range(3):
        encoder(model, layer).out.act = act


# What a user does to the layer in the middle, or to all.
CHANGES = {
    "class": lambda model: setattr(encoder(model).layers[0].linear, "__class__", Doubled),
    "operator": lambda model: setattr(model.model.layers[1].mixer, "tno", model_of("fd").model.layers[1].mixer.tno),
    "shape": lambda model: model.model.layers.__setitem__(1, model_of(rpe_layers=1).model.layers[1]),
    "activation": lambda model: setattr(encoder(model).layers[0], "act", nn.Tanh()),
    "setting": lambda model: setattr(model.model.layers[1].mixer.tno, "decay", 0.5),
    "training flag": lambda model: model.model.layers[1].train(not model.training),
    "dtype": lambda model: encoder(model).layers[0].linear.half(),
    "buffer": lambda model: setattr(tno := model.model.layers[1].mixer.tno, "features", tno.features.double()),
    "hook": lambda model: encoder(model).layers[0].linear.register_forward_hook(lambda m, x, y: 2 * y),
    "parametrization": lambda model: parametrizations.weight_norm(encoder(model).layers[0].linear),
    "frozen": lambda model: encoder(model).requires_grad_(False),
    "dropout": lambda model: activation(model, nn.Sequential(nn.ReLU(), nn.Dropout(0.5)).eval()),
    "activation with parameters": lambda model: activation(model, nn.PReLU()),
    "activation of the user": lambda model: activation(model, OfTheUser()),
    "forward": lambda model: replace(encoder(model).out.linear, "forward"),
    "method": lambda model: replace(model.model.layers[1].mixer.tno, "coefficients"),
    "wrapped": lambda model: model.model.layers.__setitem__(1, Wrapper(model.model.layers[1])),
    "offloaded": lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_are_not_alike_make_their_own(name, monkeypatch):
    model, ids = model_of("hyena" if name == "buffer" else "rpe"), torch.arange(22).view(2, 11)
    CHANGES[name](model)
    expected = model(ids).logits
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    assert kernels(model) == [None] * 3
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)


def test_adapters(monkeypatch):
    """Of PEFT: outside of the encoders they do not matter; inside it makes none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["u_proj"], init_lora_weights=False)
    model, ids = peft.get_peft_model(model_of().double(), config), torch.arange(22).view(2, 11)
    expected = outcome(model, ids)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    assert is_stacked(model.get_base_model())
    assert_equal(outcome(model, ids), expected)


def test_what_is_stacked(accelerator):
    """In float32 at least; on the meta device too, unless weights are elsewhere, as those of an offloaded model."""
    with torch.autocast("cpu", torch.bfloat16):
        assert {kernel.dtype for kernel in kernels(model_of())} == {torch.float32}
    assert not is_stacked(model_of(tno_implementation="eager"))
    assert not is_stacked(TnnForCausalLM(tiny_config(num_hidden_layers=1)))
    assert kernels(model_of(decay=None).to("meta"), 10**6, "meta") == [None] * 3, "too large"
    assert kernels(model_of(decay=0.9).to("meta"), 10**6, "meta")[0].shape[1] < 1000
    model = model_of()
    encoder(model).to("meta")
    assert not is_stacked(model)


@pytest.mark.parametrize("by_layer", [False, True])
def test_sharded_weights(by_layer, monkeypatch):
    """Of FSDP: where only the model is sharded, and not each layer, the weights are whole while it runs."""
    ids = torch.arange(22).view(2, 11)
    expected = outcome(model_of().double(), ids)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = torch.distributed.init_device_mesh("cpu", (1,)), model_of().double()
        for layer in model.model.layers if by_layer else []:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = outcome(model, ids)
        found = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}
    finally:
        torch.distributed.destroy_process_group()
    assert_equal(found, expected)


def test_functions_of_parameters(accelerator):
    """Under torch.func, each layer makes its own."""
    model, ids = model_of().double(), torch.arange(22).view(2, 11)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids}).loss

    found, expected = torch.func.grad(loss)(parameters), outcome(model, ids)
    del expected["logits"]
    assert_equal({name: found[name] for name in expected}, expected)


def test_second_derivatives(monkeypatch):
    model, ids = model_of().double(), torch.arange(22).view(2, 11)
    weights = [encoder(model, layer).layers[0].linear.weight for layer in range(3)]
    results = []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        first = torch.autograd.grad(model(ids, labels=ids).loss, weights, create_graph=True)
        results.append(torch.autograd.grad(sum(one.square().sum() for one in first), weights))
    for found, expected in zip(*reversed(results), strict=True):
        assert relative_error(found, expected) < 1e-11
