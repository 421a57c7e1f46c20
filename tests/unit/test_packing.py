"""Packed rows: outputs and gradients of a document do not depend on the other documents in the row.

`test_graphs.py` has them in compiled graphs.
"""

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, DefaultDataCollator, Trainer, TrainingArguments

from helpers.models import checkpoint_activations, random, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel
from modeling_tnn.compile.product import convolution, convolution_gradients, document_starts, recorded_convolution
from modeling_tnn.packing import documents_of

LENGTHS = (1, 7, 17, 2, 40, 9, 3)
HEADS = {True: TnnForCausalLM, False: TnnForMaskedLM}


def texts(lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(99, (length,), generator=generator) for length in lengths]


def flattened(lengths=LENGTHS, **options) -> dict[str, torch.Tensor]:
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    return collator([{"input_ids": text.tolist()} for text in texts(lengths)])


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_parameters(causal):
    """The gradients of the loss on packed rows are those on the padded batch, with checkpointed activations too."""
    model, found = seeded(HEADS[causal], tiny_config(causal=causal, hidden_dropout_prob=0.0)).double().train(), []
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    real = torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]
    labels = padded.masked_fill(~real, -100)
    labels[:, 0] = -100
    rows = {"input_ids": padded, "attention_mask": real.long(), "labels": labels}
    for given in (rows, flattened(), flattened()):
        model.zero_grad()
        model(**given).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
        if len(found) == 2:
            checkpoint_activations(model)
    for expected, *others in zip(*found, strict=True):
        assert all(relative_error(one, expected) < 1e-9 for one in others)


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


BOUNDS = {"seq_idx": ["seq_idx"], "cu_seq_lens_q": ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"]}


@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1)])
@pytest.mark.parametrize("kept", BOUNDS.values(), ids=BOUNDS)
def test_bounds_in_place_of_positions(kept, lengths):
    """Also of documents of one token, and where positions begin at 2 in each document."""
    batch = flattened(lengths, return_seq_idx=True, return_flash_attn_kwargs=True)
    given = {name: batch[name] for name in ["input_ids", *kept]}
    for causal in (True, False):
        model = seeded(HEADS[causal], tiny_config(causal=causal))
        expected = torch.cat([model(text[None]).logits for text in texts(lengths)], dim=1)
        for positions in (None, batch["position_ids"] + 2):
            assert relative_error(model(**given, position_ids=positions).logits, expected) < 5e-6


def test_bounds_with_padding():
    """Padding before, within and behind a document, with or without a number of its own, belongs to none."""
    model, ids = seeded(TnnModel, tiny_config(causal=False)), torch.randint(99, (2, 9))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1, 1, 1]])
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2, 2, 2, 2]])
    bounds = {"seq_idx": numbers}, {"cu_seq_lens_q": torch.tensor([0, 3, 9, 13, 18, 18])}
    for given in bounds:
        hidden = model(ids, attention_mask=mask, **given).last_hidden_state
        for row, start, end in ((0, 1, 3), (0, 4, 7), (1, 0, 3), (1, 4, 9)):
            alone = model(ids[row : row + 1, start:end]).last_hidden_state[0]
            assert relative_error(hidden[row, start:end], alone) < 5e-6


ORDINARY = {
    "eager": (torch.arange(12)[None], None),
    "offset": (torch.arange(12)[None] + 30, None),
    "of each row": (torch.arange(12).expand(2, -1), torch.ones(2, 12)),
    "left padding": (torch.arange(-3, 9).clamp(min=0)[None], torch.tensor([[0] * 3 + [1] * 9] * 2)),
    "both sides": (torch.tensor([[1, 1, *range(8), 1, 1]]), torch.tensor([[0] * 2 + [1] * 8 + [0] * 2] * 2)),
    "a hole": (torch.tensor([[0, 1, 2, 3, 0, *range(4, 11)]]), torch.tensor([[1] * 4 + [0] + [1] * 7] * 2)),
}


def test_ordinary_positions_mean_nothing():
    ids, model = torch.randint(99, (2, 12)), seeded(TnnForCausalLM, tiny_config())
    for name, (positions, mask) in ORDINARY.items():
        assert documents_of(ids, mask, positions) is None, name
        found, expected = (model(ids, attention_mask=mask, position_ids=p).logits for p in (positions, None))
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("causal", [True, False])
def test_trainer(causal, tmp_path):
    """With the collator, and with rows that were packed before: Trainer must not drop their positions."""
    packed = {name: values[0].tolist() for name, values in flattened().items()}
    losses = []
    for rows, collator in (
        ([{"input_ids": text.tolist()} for text in texts()], DataCollatorWithFlattening()),
        ([packed], DefaultDataCollator()),
    ):
        args = TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=len(rows), report_to="none",
                                 train_sampling_strategy="sequential", use_cpu=True, disable_tqdm=True)  # fmt: skip
        model = seeded(HEADS[causal], tiny_config(causal=causal, hidden_dropout_prob=0.0))
        trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows), data_collator=collator)
        losses.append(trainer.train().training_loss)
    expected = seeded(HEADS[causal], model.config)(**flattened()).loss.item()
    assert losses == pytest.approx([expected, expected])


FOUR = torch.zeros(1, 4, dtype=torch.long)
RESTART = torch.tensor([[0, 1, 0, 1]])


REFUSED = [
    ({"position_ids": RESTART, "use_cache": True}, "must be one document when a cache is used"),
    ({"position_ids": torch.arange(5)[None]}, r"must have shape \(B, L\) or \(1, L\) = \(1, 4\), got \(1, 5\)"),
    ({"position_ids": torch.zeros(3, 1, 4).long()}, r"`position_ids` must have shape .*, got \(3, 1, 4\)"),
    ({"seq_idx": torch.zeros(1, 5).long()}, r"`seq_idx` must have shape \(B, L\) or \(1, L\) = \(1, 4\), got"),
    ({"cu_seq_lens_q": torch.tensor([0, 2, 3])}, "`cu_seq_lens_q` must end with the number of tokens, 4, got"),
    ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "use_cache": True}, "must be one document when a cache is used"),
    ({"position_ids": RESTART, "attention_mask": torch.ones(1, 3)}, r"`attention_mask` must have .*, got \(1, 3\)"),
]


def test_a_cache_continues_one_text():
    model = seeded(TnnForCausalLM, tiny_config())
    for arguments, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            model(FOUR, **arguments)
    cache = model(FOUR, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must be one document when a cache is used, got several"):
        model(FOUR, past_key_values=cache, position_ids=RESTART)
    following = model(FOUR, past_key_values=cache, position_ids=torch.arange(4, 8)[None]).logits
    assert relative_error(following, model(FOUR.repeat(1, 2)).logits[:, 4:]) < 5e-6


@pytest.mark.parametrize(("first", "dtype"), [(0, torch.float64), (4, torch.float32), (4, torch.bfloat16)])
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
    wanted = [expected, *torch.autograd.grad(expected.square().sum(), (x, kernel))]
    assert max(relative_error(a, b) for a, b in zip([y, *found], wanted, strict=True)) < tolerance
