"""Regional compilation: one graph for the kernels of all layers and one for the block, and the values of the model."""

import copy
import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.hybrids import hybrid_config
from helpers.models import checkpoint_activations, seeded, slow, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, numerics
from modeling_tnn.compile.regions import compile_regions

IDS = torch.arange(40).view(2, 20) % 90 + 5
MASK = (torch.arange(20) > torch.tensor([[4], [-1]])).long()


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """Whose encoders are computed together."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(tno_type="rpe", causal=True, **fields):
    """Three layers in float64, of which every parameter differs from that of the other layers."""
    fields = {"num_hidden_layers": 3, "hidden_dropout_prob": 0.0, "use_cache": False} | fields
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model.train()


def compiled(model, backend="eager"):
    backend = CompileCounterWithBackend(backend)
    return compile_regions(copy.deepcopy(model), backend=backend, fullgraph=True), backend


def step(model, ids=IDS, **inputs) -> list[torch.Tensor]:
    """The loss and the gradients."""
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("tno_type", "causal", "masked", "graphs"), [("rtf", True, False, 1), *slow(("fd", False, True, 2))]
)
def test_one_graph_for_all_layers(tno_type, causal, masked, graphs):
    """A second step and evaluation compile nothing. The filters of RTF have a fused function, which needs no graph.

    In the block, projections of one input are one product: six linear layers are four.
    """
    model, inputs = model_of(tno_type, causal), {"attention_mask": MASK} if masked else {}
    regional, backend = compiled(model, "aot_eager")
    for _ in range(2):
        assert_same(step(regional, **inputs), step(model, **inputs))
        assert backend.frame_count == graphs
    block = [node.target for node in backend.graphs[-1].graph.nodes]
    assert sum("modeling_tnn.convolution" in str(target) for target in block) == 1
    assert sum(target in (torch.addmm, torch._C._nn.linear) for target in block) == 4
    with torch.no_grad():
        assert_same(regional.eval()(IDS, **inputs).logits, model.eval()(IDS, **inputs).logits)
    assert backend.frame_count == graphs and regional.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_another_length_compiles_once():
    model = model_of()
    regional, backend = compiled(model)
    for length in (20, 13, 9):
        assert_same(step(regional, IDS[:, :length]), step(model, IDS[:, :length]))
    assert backend.frame_count == 4


def test_copies_and_decoding():
    """A copy of a compiled model, in memory or on the disk, is one too; texts are generated as without compilation."""
    model = model_of()
    regional = compile_regions(copy.deepcopy(model), backend="eager")
    expected = step(regional)
    assert_same(step(copy.deepcopy(regional)), expected)
    torch.save(regional, saved := io.BytesIO())
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert loaded.model.layers[0].regions is loaded.model.layers[2].mixer.tno.regions is not None
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "use_cache": True}
    assert torch.equal(loaded.eval().generate(IDS, **options), model.eval().generate(IDS, **options))


@pytest.mark.slow
def test_checkpointed_activations_and_dropout():
    """Both ways to compute them again; what is dropped differs from step to step."""
    model = model_of()
    regional, _ = compiled(model)
    for reentrant in (False, True):
        checkpoint_activations(regional, {"use_reentrant": reentrant})
        assert_same(step(regional), step(model))
    regional, backend = compiled(model_of(hidden_dropout_prob=0.5))
    torch.manual_seed(0)
    first, second = step(regional)[0], step(regional)[0]
    torch.manual_seed(0)
    assert first == step(regional)[0] != second and backend.frame_count == 2


@pytest.mark.slow
def test_what_runs_uncompiled():
    """Attention, and blocks with batch norm. Hidden states are recorded as always."""
    model = model_of(norm_type="batchnorm")
    regional, backend = compiled(model)
    assert_same(step(regional), step(model))
    assert not any("convolution" in str(node.target) for graph in backend.graphs for node in graph.graph.nodes)
    model = seeded(TnnForCausalLM, hybrid_config("full")).train()
    regional, backend = compiled(model)
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    found, expected = (one(IDS, **options) for one in (regional, model))
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    assert len(found.attentions) == len(expected.attentions)


def test_a_failure_to_compile_is_one_warning(caplog):
    def broken(graph, inputs):
        raise RuntimeError("no compiler")

    model = model_of()
    regional = compile_regions(copy.deepcopy(model), backend=broken)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert_same(step(regional), step(model))
    assert caplog.text.count("cannot be compiled and is trained without") == caplog.text.count("no compiler") == 1


def test_packed_rows_are_one_graph():
    """Whatever their documents; padding before and inside them."""
    model = model_of("fd")
    twin, backend = compiled(model)
    for length in (7, 11, 3):
        given = {"position_ids": torch.arange(20).expand(2, 20) % length, "attention_mask": MASK}
        assert_same(step(twin, **given), step(model, **given))
    assert len(backend.graphs) == 1
