"""Packed rows: outputs and gradients of a document do not depend on the other documents in the row.

A compiled graph is one for all documents, and has the values and gradients of the uncompiled code.
"""

import pytest
import torch
from datasets import Dataset
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DataCollatorWithFlattening, DefaultDataCollator, Trainer, TrainingArguments

from helpers.models import (
    BIDIRECTIONAL,
    CAUSAL,
    VARIANTS,
    checkpoint_activations,
    exhaustive,
    random,
    relative_error,
    seeded,
    tiny_config,
)
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.compile.product import convolution, convolution_gradients, document_starts, recorded_convolution
from modeling_tnn.packing import documents_of

LENGTHS = (1, 7, 17, 2, 40, 9, 3)
HEADS = [(TnnForCausalLM, t, True) for t in CAUSAL] + [(TnnForMaskedLM, t, False) for t in BIDIRECTIONAL]


def texts(lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(99, (length,), generator=generator) for length in lengths]


def flattened(lengths=LENGTHS, **options) -> dict[str, torch.Tensor]:
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    return collator([{"input_ids": text.tolist()} for text in texts(lengths)])


WAYS = {"position_ids": {}, "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head, tno_type, causal", HEADS)
def test_packed_is_one_by_one(head, tno_type, causal, way):
    model = seeded(head, tiny_config(tno_type, causal, norm_position="pre" if causal else "post"))
    batch = flattened(**WAYS[way])
    with torch.no_grad():
        packed = model(**batch, output_hidden_states=True)
        alone = [model(text[None], output_hidden_states=True) for text in texts()]
    assert relative_error(packed.logits, torch.cat([a.logits for a in alone], dim=1)) < 5e-6
    for layer, hidden in enumerate(packed.hidden_states):
        assert relative_error(hidden, torch.cat([a.hidden_states[layer] for a in alone], dim=1)) < 5e-6
    merged = model(batch["input_ids"]).logits
    assert relative_error(merged, packed.logits) > 1e-3, "the test sees no leak"


@pytest.mark.parametrize("head, tno_type, causal", HEADS)
def test_no_gradient_crosses_a_boundary(head, tno_type, causal):
    """The outputs of each document depend on its own embeddings, all of them, and on no other."""
    model = seeded(head, tiny_config(tno_type, causal))
    batch = flattened()
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, position_ids=batch["position_ids"]).logits
    start = 0
    for length in LENGTHS:
        own = torch.arange(sum(LENGTHS))
        own = (own >= start) & (own < start + length)
        (gradient,) = torch.autograd.grad(logits[0, own].square().sum(), embeds, retain_graph=True)
        assert gradient[0, ~own].abs().max() == 0
        assert gradient[0, own].abs().amax(dim=1).min() > 0
        start += length


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_parameters(causal):
    """The gradients of the loss on packed rows are those on the padded batch."""
    head = TnnForCausalLM if causal else TnnForMaskedLM
    model = seeded(head, tiny_config(causal=causal)).double()
    batch = flattened()
    model(**batch).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    real = torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]
    labels = padded.masked_fill(~real, -100)
    labels[:, 0] = -100
    model(padded, attention_mask=real.long(), labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 1e-9, name


@pytest.mark.parametrize("tno_type", ["rpe", "ski"])
def test_rows_of_several_documents_with_padding(tno_type):
    """Two rows that differ in their documents; padding between and behind them, and in one before its first token."""
    model = seeded(TnnModel, tiny_config(tno_type, causal=False))
    ids = torch.randint(99, (2, 12))
    position_ids = torch.tensor([[4, 5, 6, 0, 1, 0, 1, 2, 0, 0, 0, 0], [0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 1, 2]])
    mask = torch.tensor([[1] * 8 + [0] * 4, [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]])
    hidden = model(ids, attention_mask=mask, position_ids=position_ids).last_hidden_state
    for row, start, end in ((0, 0, 3), (0, 3, 5), (0, 5, 8), (1, 2, 7), (1, 9, 12)):
        alone = model(ids[row : row + 1, start:end]).last_hidden_state[0]
        assert relative_error(hidden[row, start:end], alone) < 5e-6


@pytest.mark.parametrize(
    "position_ids, mask",
    [
        (torch.arange(12)[None], None),
        (torch.arange(12)[None] + 30, None),
        (torch.arange(12).expand(2, -1), torch.ones(2, 12)),
        (torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]]), torch.tensor([[0] * 3 + [1] * 9, [0] * 3 + [1] * 9])),
        (torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 1, 1]]), torch.tensor([[0] * 2 + [1] * 8 + [0] * 2] * 2)),
        (torch.tensor([[0, 1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10]]), torch.tensor([[1] * 4 + [0] + [1] * 7] * 2)),
    ],
    ids=["eager", "offset", "of each row", "left padding", "both sides", "a hole"],
)
def test_ordinary_positions_mean_nothing(position_ids, mask):
    ids = torch.randint(99, (2, 12))
    assert documents_of(ids, mask, position_ids) is None
    model = seeded(TnnForCausalLM, tiny_config())
    assert torch.equal(
        model(ids, attention_mask=mask, position_ids=position_ids).logits, model(ids, attention_mask=mask).logits
    )


def test_padding_is_less_than_half():
    positions = torch.cat([torch.arange(n) for n in (600, *[3, 4, 3] * 10)])[None]
    documents = documents_of(torch.zeros(1, 700), None, positions)
    inside = documents.batches.inside
    assert inside.numel() < 2 * 700 and inside.sum() == 700


def test_training_with_dropout_and_checkpointing():
    model = seeded(TnnForCausalLM, tiny_config()).train()
    checkpoint_activations(model)
    model(**flattened()).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("head, causal", [(TnnForCausalLM, True), (TnnForMaskedLM, False)])
def test_trainer(head, causal, tmp_path):
    """With the collator, and with rows that were packed before: Trainer must not drop their positions."""
    packed = {name: values[0].tolist() for name, values in flattened().items()}
    losses = []
    for rows, collator in (
        ([{"input_ids": text.tolist()} for text in texts()], DataCollatorWithFlattening()),
        ([packed], DefaultDataCollator()),
    ):
        args = TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=len(rows), report_to="none",
                                 train_sampling_strategy="sequential", use_cpu=True, disable_tqdm=True)  # fmt: skip
        model = seeded(head, tiny_config(causal=causal, hidden_dropout_prob=0.0))
        trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows), data_collator=collator)
        losses.append(trainer.train().training_loss)
    expected = seeded(head, model.config)(**flattened()).loss.item()
    assert losses == pytest.approx([expected, expected])


def test_tuples():
    model, batch = seeded(TnnModel, tiny_config()), flattened()
    expected = model(batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state
    (output,) = model(batch["input_ids"], position_ids=batch["position_ids"], return_dict=False)
    assert torch.equal(output, expected)


FOUR = torch.zeros(1, 4, dtype=torch.long)
RESTART = torch.tensor([[0, 1, 0, 1]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"position_ids": RESTART, "use_cache": True}, "must be one document when a cache is used"),
        (
            {"position_ids": torch.arange(5)[None]},
            r"`position_ids` must have shape \(B, L\) or \(1, L\) = \(1, 4\), got \(1, 5\)",
        ),
        ({"position_ids": torch.zeros(3, 1, 4).long()}, r"`position_ids` must have shape .*, got \(3, 1, 4\)"),
        ({"seq_idx": torch.zeros(1, 4).long()}, "`position_ids` must be given with `seq_idx`"),
        (
            {"position_ids": RESTART, "attention_mask": torch.ones(1, 3)},
            r"`attention_mask` must have shape .*, got \(1, 3\)",
        ),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        seeded(TnnForCausalLM, tiny_config())(FOUR, **arguments)


def test_a_cache_continues_one_text():
    model = seeded(TnnForCausalLM, tiny_config())
    cache = model(FOUR, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must be one document when a cache is used, got several"):
        model(FOUR, past_key_values=cache, position_ids=RESTART)
    following = model(FOUR, past_key_values=cache, position_ids=torch.arange(4, 8)[None]).logits
    assert relative_error(following, model(FOUR.repeat(1, 2)).logits[:, 4:]) < 5e-6


@pytest.mark.parametrize("causal", [True, False])
def test_one_class_for_a_row(causal):
    model = seeded(TnnForSequenceClassification, tiny_config(causal=causal))
    with pytest.raises(ValueError, match="must be one document for a classification, got several"):
        model(FOUR, position_ids=RESTART)
    assert torch.equal(model(FOUR, position_ids=torch.arange(4)[None]).logits, model(FOUR).logits)


# Operator, causal, with padding.
FEW = [("rpe", True, False), ("rtf", True, True), ("fd", False, False), ("ski", False, True)]
ALL = [(*variant, masked) for variant in VARIANTS for masked in (False, True)]
CASES = [*FEW, *exhaustive(*(case for case in ALL if case not in FEW))]
IDS = torch.arange(80).view(2, 40) % 90 + 5
# Padding before, inside and after documents.
MASK = torch.ones(2, 40, dtype=torch.long)
MASK[0, :3] = MASK[1, 16:18] = MASK[1, 30:] = 0
POSITIONS = torch.arange(40).expand(2, 40) % 16


def compiled(model, fullgraph: bool = True, **options):
    torch._dynamo.reset()
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
    inputs = {"position_ids": POSITIONS} | ({"attention_mask": MASK} if masked else {})
    call, backend = compiled(model)
    assert_same(results(call, model, **inputs), results(model, model, **inputs))
    (graph,) = backend.graphs
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum("modeling_tnn.convolution" in name for name in names) == (4 if tno_type == "ski" else 2)


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
    """Also for rows of one document."""
    model = language_model()
    call, backend = compiled(model)
    for length in (16, 7, 1, 40, 25):
        inputs = {"position_ids": torch.arange(40).expand(2, 40) % length}
        assert_same(results(call, model, **inputs), results(model, model, **inputs))
    assert len(backend.graphs) == 1


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
    logits = compiled(model)[0](inputs_embeds=embeddings, position_ids=POSITIONS).logits
    assert logits[:, :16].isfinite().all() and logits[:, 32:].isfinite().all() and logits[:, 16:32].isnan().all()


def test_hidden_states_and_checkpointed_activations():
    model, positions = language_model(), POSITIONS
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
    with pytest.raises(ValueError, match="`position_ids` must have shape .*, got .2, 39."):
        call(input_ids=IDS, position_ids=POSITIONS[:, 1:])
    with pytest.raises(Exception, match="`position_ids` must hold torch.int64 or torch.int32, got torch.float32"):
        call(input_ids=IDS, position_ids=torch.zeros(2, 40))


def test_operators_that_need_the_documents_on_the_host():
    """A graph refuses an operator whose `matmul` it cannot divide, which works outside of graphs; two axes too."""
    for fields in ({"tno_type": "ski", "ski_interpolation": "released"}, {"spatial_dims": 2}):
        model = seeded(TnnModel, tiny_config(causal=False, hidden_dropout_prob=0.0, **fields)).train()
        inputs = {"input_ids": IDS[:, :32], "position_ids": torch.arange(32).expand(2, 32) % 16}
        alone = model(IDS[:, :32].reshape(4, 16)).last_hidden_state.view(2, 32, -1)
        assert relative_error(model(**inputs).last_hidden_state, alone) < 5e-6
        with pytest.raises(Exception, match="for packed rows in a compiled graph, got"):
            compiled(model)[0](**inputs)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"tno_implementation": "eager"}, {"norm_type": "batchnorm"}], ids=str)
def test_one_graph_of_other_models(fields):
    """PyTorch's own operations outside of it; a norm over the tokens of all documents."""
    model = language_model(**fields)
    inputs = {"position_ids": POSITIONS}
    call, backend = compiled(model)
    # The gradient of a bias before a batch norm is rounding: the errors are relative to the largest gradient.
    logits, *gradients = zip(results(call, model, **inputs), results(model, model, **inputs), strict=True)
    found, expected = (torch.cat([part.flatten() for part in parts]) for parts in zip(*gradients, strict=True))
    assert_same([logits[0], found], [logits[1], expected])
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_a_cache_splits_the_graph():
    model = language_model(use_cache=True).eval()
    call, _ = compiled(model, fullgraph=False)
    inputs = {"position_ids": POSITIONS}
    assert_same(results(call, model, **inputs), results(model, model, **inputs))
    assert call(input_ids=IDS, position_ids=torch.arange(40)[None]).past_key_values.get_seq_length() == 40


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 4])
def test_operators(first, dtype):
    """PyTorch's own checks, then each document alone by the definition."""
    starts = torch.zeros(2, 11, dtype=torch.bool)
    starts[:, 0] = starts[0, 3] = starts[1, 8] = starts[1, 9] = True
    x, kernel = random(2, 11, 3, dtype=dtype), random(3, 9, dtype=torch.promote_types(dtype, torch.float32))
    given = (x.detach().requires_grad_(), kernel.detach().requires_grad_(), first, starts, "fused")
    torch.library.opcheck(convolution, (given[0].permute(2, 0, 1), *given[1:]))
    tests = ("test_schema", "test_faketensor")
    for wanted in ([True, True], [True, False], [False, True]):
        arguments = (x.permute(2, 0, 1), x.permute(2, 0, 1), *given[1:], wanted)
        torch.library.opcheck(convolution_gradients, arguments, test_utils=tests)
    positions = torch.arange(11).expand(2, 11)
    torch.library.opcheck(document_starts, (x, None, positions), test_utils=tests)
    lag = torch.arange(11)[:, None] - torch.arange(11) + first
    matrices = kernel[:, lag.clamp(0, 8)] * ((lag >= 0) & (lag < 9))  # (D, L, L)
    document = starts.cumsum(dim=1)
    together = document[:, :, None] == document[:, None, :]  # (B, L, L)
    expected = torch.einsum("dij,bij,bjd->bid", matrices.double(), together.double(), x.double())
    y = recorded_convolution(*given)
    assert y.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
    found = torch.autograd.grad(y.double().square().sum(), given[:2])
    assert_same([y, *found], [expected, *torch.autograd.grad(expected.square().sum(), (x, kernel))], tolerance)
