"""Models and products in a graph of torch.compile: one graph, one node for each product, the uncompiled values.

It serves packed rows whatever their documents, and a few graphs serve all lengths.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import checkpoint_activations, random, relative_error, seeded, slow, tiny_config
from helpers.products import ProductTests
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel
from modeling_tnn.compile.product import convolution, convolution_gradients, gated_recorded
from modeling_tnn.toeplitz import causal_toeplitz_matmul
from modeling_tnn.toeplitz_fused import NO_GATE

IDS = torch.arange(80).view(2, 40) % 90 + 5
# Padding before, inside and after documents.
MASK = torch.ones(2, 40, dtype=torch.long)
MASK[0, :3] = MASK[1, 16:18] = MASK[1, 30:] = 0
POSITIONS = torch.arange(40).expand(2, 40)
SINUSOIDAL = {"position_embedding": "sinusoidal"}
# Operator, direction, fields, with padding, with documents. The first is usual.
CASES = [
    ("ski", False, SINUSOIDAL, True, False), ("rtf", True, MIXED["hyena"], True, True),
    ("rpe", True, {"num_hidden_layers": 2}, False, True), ("fd", False, {}, True, False),
    ("rpe", True, HYBRIDS["full"] | {"num_hidden_layers": 2}, True, True), ("s4d", True, {}, True, False),
    ("rpe", True, {"tno_implementation": "eager", "norm_type": "batchnorm"}, False, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, fullgraph: bool = True, backend: str = "eager", **options):
    backend = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=backend, fullgraph=fullgraph, **options), backend


def language_model(tno_type="rpe", causal=True, **fields):
    """One layer, unless the fields say otherwise."""
    fields = {"use_cache": False, "hidden_dropout_prob": 0.0, "num_hidden_layers": 1} | fields
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields)).train()


def results(call, model, ids=IDS, **inputs) -> list[torch.Tensor]:
    """The logits at real tokens, and the gradients."""
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    logits = call(input_ids=ids, **inputs).logits[real]
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()), materialize_grads=True)]


def assert_same(actual, expected):
    """A gradient that is zero but for rounding is compared with the others."""
    largest = max(one.abs().max().item() for one in expected[1:])
    for found, wanted in zip(actual, expected, strict=True):
        assert relative_error(found, wanted, max(wanted.abs().max().item(), 1e-3 * largest)) < 5e-6


def names_of(backend) -> str:
    """The targets of the nodes of the only graph."""
    (graph,) = backend.graphs
    return " ".join(str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(("tno_type", "causal", "fields", "masked", "packed"), CASES[:1] + slow(*CASES[1:]))
def test_one_graph(tno_type, causal, fields, masked, packed):
    """SKI has two products in a layer. Rows may have other documents.

    In float64: the gradient of a bias before a batch norm is rounding.
    """
    model = language_model(tno_type, causal, **fields).double()
    call, backend = compiled(model, backend="aot_eager")
    for size in (16, 7, 1) if packed else (40,):
        bounds = {"seq_idx": POSITIONS // size} if masked else {"position_ids": POSITIONS % size}
        inputs = bounds if packed else {}
        inputs |= {"attention_mask": MASK} if masked else {}
        assert_same(results(call, model, **inputs), results(model, model, **inputs))
    names = names_of(backend)
    if fields.get("tno_implementation") != "eager":
        products = model.config.layer_types.count("toeplitz") * (2 if tno_type == "ski" else 1)
        assert names.count("modeling_tnn.convolution") == products
    assert packed or not any(word in names for word in ("document", "index_select"))


def test_what_no_graph_holds():
    """Documents that are not given, operations of an exported graph, and lags below the resolution of float32.

    At the decay 0.9, 152 taps are above it.
    """
    model, ids = language_model(decay=0.9), IDS.repeat(1, 8)[:, :300]
    call, backend = compiled(model)
    given = {"attention_mask": torch.ones_like(ids), "num_items_in_batch": torch.tensor(78), "labels": ids}
    torch.testing.assert_close(call(ids, **given).loss, model(ids, **given).loss)
    assert not any(word in names_of(backend) for word in ("document", "index_select", "fft"))
    (graph,) = backend.graphs
    (node,) = (node for node in graph.graph.nodes if "modeling_tnn.convolution" in str(node.target))
    assert tuple(node.args[1].meta["example_value"].shape) == (64, 152)


@pytest.mark.slow
@pytest.mark.parametrize(("packed", "fields"), [(False, {}), (True, {}), (False, HYBRIDS["full"])])
@torch.no_grad()
def test_a_few_graphs_serve_all_lengths(packed, fields):
    """One below the end of the kernels and one beyond it."""
    model = language_model(decay=0.9, **{"num_hidden_layers": 2} | fields).eval()
    call, backend = compiled(model, dynamic=True)
    for length in (20, 33, 151, 153, 257, 400):
        ids, positions = IDS.repeat(1, 10)[:, :length].contiguous(), torch.arange(length).expand(2, -1) % 30
        given = {"position_ids": positions} if packed else {}
        assert relative_error(call(ids, **given).logits, model(ids, **given).logits) < 5e-6
    assert len(backend.graphs) <= 3


def test_no_document_sees_another():
    """Not even what is not a number there."""
    model = language_model(causal=False)
    embeddings = model.get_input_embeddings()(IDS).detach()
    embeddings[:, 16:32] = torch.nan
    logits = compiled(model)[0](inputs_embeds=embeddings, position_ids=POSITIONS % 16).logits
    assert logits[:, :16].isfinite().all() and logits[:, 32:].isfinite().all() and logits[:, 16:32].isnan().all()


@pytest.mark.slow
def test_hidden_states_and_checkpointed_activations():
    model, given = language_model(), {"position_ids": POSITIONS % 16}
    expected = results(model, model, **given)
    checkpoint_activations(model)
    assert_same(results(compiled(model, backend="aot_eager")[0], model, **given), expected)
    model = language_model(num_hidden_layers=2)
    expected, found = (  # transformers installs its hooks outside of graphs
        call(input_ids=IDS, output_hidden_states=True, **given).hidden_states for call in (model, compiled(model)[0])
    )
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 5e-6


@pytest.mark.slow
def test_refused():
    """A graph refuses an operator whose `matmul` it cannot divide, which works outside of graphs; two axes too."""
    call, _ = compiled(language_model())
    with pytest.raises(ValueError, match="`position_ids` must have shape .*, got .2, 39."):
        call(input_ids=IDS, position_ids=POSITIONS[:, 1:])
    with pytest.raises(Exception, match="`position_ids` must hold torch.int64 or torch.int32, got torch.float32"):
        call(input_ids=IDS, position_ids=torch.zeros(2, 40))
    for fields in ({"tno_type": "ski"}, {"spatial_dims": 2}):
        model = seeded(TnnModel, tiny_config(causal=False, hidden_dropout_prob=0.0, **fields)).train()
        inputs = {"input_ids": IDS[:, :32], "position_ids": torch.arange(32).expand(2, 32) % 16}
        alone = model(IDS[:, :32].reshape(4, 16)).last_hidden_state.view(2, 32, -1)
        assert relative_error(model(**inputs).last_hidden_state, alone) < 5e-6
        with pytest.raises(Exception, match="for packed rows in a compiled graph, got"):
            compiled(model)[0](**inputs)


@pytest.mark.slow
def test_a_cache_splits_the_graph():
    model, given = language_model(use_cache=True).eval(), {"position_ids": POSITIONS % 16}
    call, _ = compiled(model, fullgraph=False)
    assert_same(results(call, model, **given), results(model, model, **given))
    assert call(input_ids=IDS, position_ids=POSITIONS[:1]).past_key_values.get_seq_length() == 40


def compiled_product(function, dynamic=None):
    """A function in one graph, and the graphs that it needs."""
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), backend


def test_eager_is_recorded_as_it_is():
    """Whoever wants PyTorch's own operations in the graph says so."""
    call, backend = compiled_product(lambda v, kernel: causal_toeplitz_matmul(v, kernel, "eager"))
    v, kernel = random(2, 30, 3), random(3, 9)
    torch.testing.assert_close(call(v, kernel), causal_toeplitz_matmul(v, kernel))
    names = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert any("fft" in name for name in names) and not any("modeling_tnn" in name for name in names)


class TestRecorded(ProductTests):
    """The custom operator itself; graphs hold no derivatives of derivatives."""

    tolerances = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
    orders = 1
    transforms = ()

    def product(self, v, kernel, first=0, gate=NO_GATE):
        return gated_recorded(v, kernel, first, gate, "fused")


@pytest.mark.parametrize("shape", [(3, 2, 30), (1, 1, 3)])
def test_operators(shape):
    """PyTorch's own checks: schema, fake tensors, gradients, and graphs of any shape."""
    x, kernel = torch.randn(shape, dtype=torch.float64), torch.randn(shape[0], 5, dtype=torch.float64)
    for tensor, taps in ((x, kernel), (x.permute(1, 2, 0).contiguous().permute(2, 0, 1), kernel.t().contiguous().t())):
        arguments = (tensor.detach().requires_grad_(), taps.detach().requires_grad_(), 2, None, "fused")
        torch.library.opcheck(convolution, arguments)
        for wanted in ([True, True], [True, False], [False, True]):
            given = (tensor, tensor, taps, 2, None, "fused", wanted)
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(convolution_gradients, given, test_utils=tests)
