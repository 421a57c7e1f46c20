"""Packed rows in a compiled graph: one graph for all documents, the values and gradients of the uncompiled code."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.models import VARIANTS, checkpoint_activations, exhaustive, random, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.packing_recorded import document_convolution, document_convolution_gradients, document_starts

# Operator, causal, with padding.
FEW = [("rpe", True, False), ("rtf", True, True), ("fd", False, False), ("ski", False, True)]
ALL = [(*variant, masked) for variant in VARIANTS for masked in (False, True)]
CASES = [*FEW, *exhaustive(*(case for case in ALL if case not in FEW))]
IDS = torch.arange(80).view(2, 40) % 90 + 5
# Padding before, inside and after documents.
MASK = torch.ones(2, 40, dtype=torch.long)
MASK[0, :3] = MASK[1, 16:18] = MASK[1, 30:] = 0
BOUNDARIES = {
    "position_ids": torch.arange(40).expand(2, 40) % 16,
    "seq_idx": torch.arange(40).expand(2, 40) // 16,
    "cu_seq_lens_q": torch.tensor([0, 16, 32, 40, 56, 72, 80], dtype=torch.int32),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, fullgraph: bool = True, **options):
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=backend, fullgraph=fullgraph, **options), backend


def language_model(tno_type="rpe", causal=True, **fields):
    fields = {"use_cache": False, "hidden_dropout_prob": 0.0} | fields
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields)).train()


def results(call, model, **inputs) -> list[torch.Tensor]:
    """The logits at real tokens, and the gradients."""
    real = inputs.get("attention_mask", torch.ones_like(IDS)).bool()
    logits = call(input_ids=IDS, **inputs).logits[real]
    gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()), allow_unused=True)
    return [logits, *(gradient for gradient in gradients if gradient is not None)]


def assert_same(actual, expected, tolerance=3e-6):
    assert max(relative_error(a, b) for a, b in zip(actual, expected, strict=True)) < tolerance


@pytest.mark.parametrize(("tno_type", "causal", "masked"), CASES)
def test_one_graph(tno_type, causal, masked):
    """Two layers; SKI has two products in each."""
    model = language_model(tno_type, causal, position_embedding="sinusoidal" if masked else None)
    inputs = {"position_ids": BOUNDARIES["position_ids"]} | ({"attention_mask": MASK} if masked else {})
    call, backend = compiled(model)
    assert_same(results(call, model, **inputs), results(model, model, **inputs))
    (graph,) = backend.graphs
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum("document_convolution" in name for name in names) == (4 if tno_type == "ski" else 2)


@pytest.mark.parametrize("way", ["tokens", "mask", "trainer"])
def test_no_documents_unless_they_are_given(way):
    """Nor the operations of an exported graph, which PyTorch 2.11 says that every compiled one is."""
    call, backend = compiled(language_model())
    inputs = {"attention_mask": torch.ones_like(IDS)} if way != "tokens" else {}
    inputs |= {"num_items_in_batch": torch.tensor(78)} if way == "trainer" else {}
    call(input_ids=IDS, labels=IDS, **inputs).loss.backward()
    (graph,) = backend.graphs
    names = " ".join(str(node.target) for node in graph.graph.nodes)
    assert names.count("modeling_tnn.convolution") == 2
    assert not any(word in names for word in ("document", "index_select", "fft"))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_short_documents_of_cubic_ski(size):
    """It has more points than a document has tokens."""
    model = language_model("ski", causal=False, ski_interpolation="cubic", ski_rank=64 if size == 7 else 9)
    inputs = {"position_ids": torch.arange(40).expand(2, 40) % size, "attention_mask": MASK}
    call, _ = compiled(model)
    assert_same(results(call, model, **inputs), results(model, model, **inputs))


def test_one_graph_for_all_documents():
    """Also for rows of one document; and each of the ways to mark documents gives the same."""
    model = language_model()
    call, backend = compiled(model)
    for length in (16, 7, 1, 40, 25):
        inputs = {"position_ids": torch.arange(40).expand(2, 40) % length}
        assert_same(results(call, model, **inputs), results(model, model, **inputs))
    assert len(backend.graphs) == 1
    expected = model(IDS, position_ids=BOUNDARIES["position_ids"]).logits
    for name, boundary in BOUNDARIES.items():
        torch.testing.assert_close(call(input_ids=IDS, **{name: boundary}).logits, expected)


@pytest.mark.slow
def test_a_few_graphs_for_all_lengths():
    model = language_model(decay=0.9)
    call, backend = compiled(model, dynamic=True)
    for length in (20, 33, 64, 151, 153, 257, 400):
        ids, positions = torch.arange(2 * length).view(2, length) % 90, torch.arange(length).expand(2, length) % 30
        logits = call(input_ids=ids, position_ids=positions).logits
        assert relative_error(logits, model(ids, position_ids=positions).logits) < 3e-6
    assert len(backend.graphs) <= 3


@pytest.mark.parametrize("tno_type", ["rpe", "ski"])
def test_no_document_sees_another(tno_type):
    """Not even what is not a number there."""
    model = language_model(tno_type, causal=False)
    embeddings = model.get_input_embeddings()(IDS).detach()
    embeddings[:, 16:32] = torch.nan
    logits = compiled(model)[0](inputs_embeds=embeddings, position_ids=BOUNDARIES["position_ids"]).logits
    assert logits[:, :16].isfinite().all() and logits[:, 32:].isfinite().all() and logits[:, 16:32].isnan().all()


def test_hidden_states_and_checkpointed_activations():
    model, positions = language_model(), BOUNDARIES["position_ids"]
    expected = results(model, model, position_ids=positions)
    checkpoint_activations(model)
    assert_same(results(compiled(model)[0], model, position_ids=positions), expected)
    model = language_model()
    expected, found = (  # transformers installs its hooks outside of graphs
        call(input_ids=IDS, position_ids=positions, output_hidden_states=True).hidden_states
        for call in (model, compiled(model)[0])
    )
    assert_same(found, expected)


def test_wrong_boundaries():
    call, _ = compiled(language_model())
    with pytest.raises(ValueError, match="must grow from 0 to the number of tokens, B \\* L = 80, got"):
        call(input_ids=IDS, cu_seq_lens_q=torch.tensor([0, 40]))
    with pytest.raises(Exception, match="`seq_idx` must hold integers, got torch.float32"):
        call(input_ids=IDS, seq_idx=torch.zeros(2, 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"tno_implementation": "eager"}, {"norm_type": "batchnorm"}, {"use_cache": True}], ids=str
)
def test_what_is_split_outside_of_the_graph(fields):
    """PyTorch's own operations in the graph; a norm over all documents; rows of one document with a cache."""
    model = language_model(**fields).train("norm_type" in fields)
    inputs = {"position_ids": BOUNDARIES["position_ids"]}
    call, backend = compiled(model, fullgraph=False)
    # The gradient of a bias before a batch norm is rounding: the errors are relative to the largest gradient.
    logits, *gradients = zip(results(call, model, **inputs), results(model, model, **inputs), strict=True)
    found, expected = (torch.cat([part.flatten() for part in parts]) for parts in zip(*gradients, strict=True))
    assert_same([logits[0], found], [logits[1], expected])
    names = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert not any("document_convolution" in name for name in names)
    if "use_cache" in fields:
        assert call(input_ids=IDS, position_ids=torch.arange(40)[None]).past_key_values.get_seq_length() == 40


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 4])
def test_operators(first, dtype):
    """PyTorch's own checks, then each document alone by the definition."""
    starts = torch.zeros(2, 11, dtype=torch.bool)
    starts[:, 0] = starts[0, 3] = starts[1, 8] = starts[1, 9] = True
    x, kernel = random(2, 11, 3, dtype=dtype), random(3, 9, dtype=torch.promote_types(dtype, torch.float32))
    given = (x.detach().requires_grad_(), kernel.detach().requires_grad_(), first, starts, "fused")
    torch.library.opcheck(document_convolution, given)
    tests = ("test_schema", "test_faketensor")
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(document_convolution_gradients, (x, *given, *wanted), test_utils=tests)
    positions = torch.arange(11).expand(2, 11)
    torch.library.opcheck(document_starts, (x, None, positions, positions, None), test_utils=tests)
    lag = torch.arange(11)[:, None] - torch.arange(11) + first
    matrices = kernel[:, lag.clamp(0, 8)] * ((lag >= 0) & (lag < 9))  # (D, L, L)
    document = starts.cumsum(dim=1)
    together = document[:, :, None] == document[:, None, :]  # (B, L, L)
    expected = torch.einsum("dij,bij,bjd->bid", matrices.double(), together.double(), x.double())
    y = document_convolution(*given)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
    found = torch.autograd.grad(y.double().square().sum(), given[:2])
    assert_same([y, *found], [expected, *torch.autograd.grad(expected.square().sum(), (x, kernel))], tolerance)


def test_empty_batches():
    x, starts = torch.empty(0, 11, 3), torch.empty(0, 11, dtype=torch.bool)
    given = (x.requires_grad_(), torch.ones(3, 9).requires_grad_(), 0, starts, "fused")
    y = document_convolution(*given)
    assert [g.shape for g in torch.autograd.grad(y.sum(), given[:2])] == [x.shape, (3, 9)]
